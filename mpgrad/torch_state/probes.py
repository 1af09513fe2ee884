"""Probes try the behaviours of PyTorch that would silently give wrong gradients if they changed.

`behaviours` first checks that the private names exist (`behaviours.NAMES`), and then runs the
probes. A behaviour has no probe if a change would raise an error, or if any run of the tests would
show it. Probes call the functions of `private` instead of PyTorch's own names, so that they try
what a pool runs.

Guarantees: probes leave nothing behind, draw no random number, and run in their own thread, where
    none of the caller's modes is on. They also pass under modes that belong to the process (anomaly
    detection, default dtype, ...).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from mpgrad.torch_state import private, settings

__all__ = ["BEHAVIOURS", "OF_THE_COMPILER", "expect"]

# what PyTorch should do, in words, and a function that raises if it does not
BEHAVIOURS: dict[str, Callable[[], None]] = {}


def behaviour(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a probe to the list."""

    def remember(probe: Callable[[], None]) -> Callable[[], None]:
        BEHAVIOURS[name] = probe
        return probe

    return remember


def expect(expected: object, found: object) -> None:
    """Raise an `AssertionError` if PyTorch does something else.

    ``python -O`` would leave an `assert` out.
    """
    if found != expected:
        raise AssertionError(f"expected {expected!r}, found {found!r}")


class ProbeNode(torch.autograd.Function):
    """An identity whose backward is a function of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backward: Callable[[Any], Any]) -> torch.Tensor:
        ctx.run = backward
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return ctx.run(grad), None


def leaf() -> Any:
    return torch.ones(2, dtype=torch.float64, device="cpu", requires_grad=True)


def through(tensor: torch.Tensor, look: Callable[[], Any], seen: list[Any]) -> Any:
    """Pass `tensor` through a node that adds the result of `look` to `seen` in a backward."""

    def backward(grad: Any) -> Any:
        seen.append(look())
        return grad

    return private.apply(ProbeNode, tensor, backward)


# --- the order in which a backward runs nodes, and its own state


@behaviour("a backward runs the ready node with the highest sequence number first")
def order_by_priority() -> None:
    ran: list[Any] = []
    first, second, third = (through(leaf(), lambda name=name: name, ran) for name in "abc")  # type: ignore[misc]
    private.set_priority(first.grad_fn, 1 << 40)
    private.set_priority(second.grad_fn, 0)
    private.set_priority(third.grad_fn, 1)
    (first + second + third).sum().backward()
    expect(["a", "c", "b"], ran)


@behaviour("a node can ask which other nodes the running backward will run")
def nodes_that_will_run() -> None:
    seen: list[Any] = []
    x, y = leaf(), leaf()
    left, right = x * 2, y * 2
    nodes: list[Any] = [left.grad_fn, right.grad_fn]
    leaves = [node.next_functions[0][0] for node in nodes]
    top = through(
        left + right,
        lambda: [*map(private.will_run, nodes), *map(private.leaf_will_run, leaves)],
        seen,
    ).sum()
    torch.autograd.grad(top, [x], retain_graph=True)
    expect([True, False, True, False], seen.pop())
    top.backward()
    expect([True] * 4, seen.pop())


@behaviour("a node can ask whether the running backward keeps the graph")
def kept_graphs() -> None:
    seen: list[Any] = []
    x = leaf()
    result = through(x, private.graph_is_kept, seen).sum()
    for keep, create in ((True, False), (True, True), (False, False)):
        private.gradients([result], [x], [torch.ones_like(result)], keep, create)
    expect([True, True, False], seen)


@behaviour("each backward has its own number, even a backward within another one")
def numbered_backwards() -> None:
    seen: list[Any] = []
    inner = through(leaf(), private.current_graph_task, seen).sum()

    def look() -> int:
        inner.backward()
        return private.current_graph_task()

    through(through(leaf(), private.current_graph_task, seen), look, seen).sum().backward()
    within, again, first = seen
    expect(
        (True, True, -1), (first == again != within, min(seen) >= 0, private.current_graph_task())
    )


@behaviour("at the end of a backward a callback is called once, after all nodes")
def callbacks_at_the_end() -> None:
    ran: list[Any] = []
    below = through(leaf(), lambda: "below", ran)
    through(
        below, lambda: private.when_backward_ends(lambda: ran.append("end")), ran
    ).sum().backward()
    expect([None, "below", "end"], ran)


# --- gradients on their way


@behaviour("the next node gets the same object that a node returned, even an expanded number")
def placeholders_untouched() -> None:
    placeholder = torch.zeros((), dtype=torch.float64, device="cpu").expand(2)
    came: list[Any] = []

    def replace(grad: Any) -> Any:
        came.append(grad)
        return torch.full((2,), 3.0, dtype=torch.float64, device="cpu")

    x = leaf()
    private.apply(
        ProbeNode, private.apply(ProbeNode, x, replace), lambda grad: placeholder
    ).sum().backward()
    expect((True, [3.0, 3.0]), (came[0] is placeholder, x.grad.tolist()))


@behaviour("gradients can be computed at edges of the graph; they are None at unconnected edges")
def gradients_at_edges() -> None:
    def same(tensor: torch.Tensor) -> Any:
        return private.apply(ProbeNode, tensor, lambda grad: grad)

    x, y = leaf(), leaf()
    inner, aside = same(x * 3), same(y * 3)
    # As in a worker, the output's edge alone keeps the graph in which the inputs' nodes are.
    output = private.edge_that_keeps(same(inner * inner))
    inputs = [GradientEdge(each.grad_fn, 0) for each in (inner, aside)]
    del inner
    # a dead node makes torch 2.8 crash
    expect([True, True], [private.is_alive(edge.node) for edge in inputs])
    found = private.gradients(
        [output], [*inputs, x, y], [torch.ones_like(x)], keep=False, create=False
    )
    expect(
        [[6.0, 6.0], None, [18.0, 18.0], None],
        [None if grad is None else grad.tolist() for grad in found],
    )


@behaviour("a graph shows whether Python holds one of its leaves")
def held_leaves() -> None:
    x = leaf()
    nodes: list[Any] = [(each * each.detach()).grad_fn for each in (x, leaf())]
    expect([True, False], [private.is_held(node.next_functions[0][0]) for node in nodes])


class DoublingHooks(OrderedDict[int, Any]):
    """Hooks whose results are doubled."""

    def __setitem__(self, number: int, hook: Callable[[Any], Any]) -> None:
        super().__setitem__(number, lambda grad: 2 * hook(grad))


@behaviour("the first hook on a tensor uses its node's dictionary, which may be of another type")
def hooks_in_a_dictionary_of_our_own() -> None:
    class Hooked(ProbeNode):
        pass

    node_type = private.node_type(Hooked)
    register = node_type._register_hook_dict

    def register_our_own(node: Any, tensor: torch.Tensor) -> None:
        tensor._backward_hooks = DoublingHooks()
        register(node, tensor)

    node_type._register_hook_dict = register_our_own
    x = leaf()
    result = private.apply(Hooked, x, lambda grad: grad)
    result.register_hook(lambda grad: grad * 7)
    (grad,) = torch.autograd.grad(result.sum(), [x])
    expect([14.0, 14.0], grad.tolist())


@behaviour("calls of PyTorch's methods can be counted, whichever class they are called on")
def counted_calls() -> None:
    before = inspect.getattr_static(torch.autograd.Function, "apply")
    applied = private.CallCounter(torch.autograd.Function, "apply")
    applied.watch()
    try:
        ProbeNode.apply(leaf(), lambda grad: grad)  # type: ignore[no-untyped-call]
    finally:
        # mypy refuses to assign a method.
        setattr(torch.autograd.Function, "apply", before)  # noqa: B010
    expect(True, applied.count >= 1)  # other threads may also call it


# --- tensors, and the modes of a thread


@behaviour("a tensor shows whether its elements are stored as they are, and whether it is a view")
def plain_memory() -> None:
    plain = torch.ones(2, dtype=torch.float64, device="cpu")
    conjugated = torch.ones(2, dtype=torch.complex64, device="cpu").conj()
    odd = [conjugated, conjugated.imag, plain.to_sparse(), torch.empty(2, device="meta")]
    expect(
        [True, True, True], [private.has_plain_memory(each) for each in (plain, leaf(), plain[::2])]
    )
    expect([False] * 4, [private.has_plain_memory(each) for each in odd])
    expect(
        (True, False),
        (private.have_plain_memory([plain, leaf()]), private.have_plain_memory([plain, odd[0]])),
    )
    plain.mul_(2)
    expect((1, False, True), (plain._version, plain._is_view(), plain[:1]._is_view()))


@behaviour("the innermost hooks for saved tensors can be read")
def hooks_for_saved_tensors() -> None:
    outer, inner = (torch.neg, torch.abs), (torch.abs, torch.neg)
    with (
        torch.autograd.graph.saved_tensors_hooks(*outer),
        torch.autograd.graph.saved_tensors_hooks(*inner),
    ):
        expect(inner, private.saved_tensor_hooks())


@behaviour("a mode can notice, and refuse, that gradients are turned off")
def refused_no_grad() -> None:
    with torch.enable_grad(), private.refusing_no_grad():
        with private.grad_mode(False):
            expect(False, torch.is_grad_enabled())
        try:
            with torch.no_grad():
                raise AssertionError("torch.no_grad was not refused")
        except NotImplementedError:
            pass


@behaviour("the modes of a thread can be read")
def seen_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class OfFunctions(TorchFunctionMode):
        __module__ = "users"  # our own modes do not count

    class OfOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
        __module__ = "users"

    inner, outer = OfOperations(), OfFunctions()  # type: ignore[no-untyped-call]
    with inner, outer:
        expect([outer, inner], private.foreign_modes())
    with torch.device("meta"):
        expect(("meta", []), (private.default_device(), private.foreign_modes()))
    expect((None, []), (private.default_device(), private.foreign_modes()))


@behaviour("settings, and hooks for all modules, can be read")
def settings_and_hooks() -> None:
    for setting in settings.every_setting():
        setting.get()
    settings.global_hooks()


@behaviour("within torch.func.vmap, the kinds of tensors and levels can be read")
def levels_of_vmap() -> None:
    plain, seen = torch.arange(6.0, device="cpu").reshape(3, 2), list[Any]()

    def look(row: torch.Tensor) -> torch.Tensor:
        level = private.Level(private.level_of(row), older=False)
        batch = private.unbatched(row, level)
        is_running = private.vmap_levels() == {level.number}
        seen.append((private.transforms_are_active(), private.level_count(), is_running))
        seen.append(
            [
                private.is_functorch_wrapped(each) and private.is_batched(each)
                for each in (row, plain)
            ]
        )
        with private.outside_transforms():
            seen.append((private.transforms_are_active(), batch.tolist() == plain.tolist()))
        return private.batched(plain * 2, level)

    expect((plain * 2).tolist(), torch.func.vmap(look)(plain).tolist())
    expect([(True, 1, True), [True, False], (False, True)], seen)
    expect(
        (False, 0, frozenset()),
        (private.transforms_are_active(), private.level_count(), private.vmap_levels()),
    )


@behaviour("the vmap before torch.func makes wrappers whose levels can be read")
def the_older_vmap() -> None:
    plain = torch.arange(6.0, device="cpu").reshape(3, 2)

    def look(row: torch.Tensor) -> tuple[torch.Tensor]:
        expect((True, 1), (private.is_batched_the_older_way(row), private.older_levels()))
        level = private.Level(1, older=True)
        return (private.batched(private.unbatched(row, level) * 2, level),)

    expect((plain * 2).tolist(), private.vmap_the_older_way(look)(plain)[0].tolist())
    expect((False, 0), (private.is_batched_the_older_way(plain), private.older_levels()))


# --- what torch.compile makes


def what_it_was_made_with_can_be_read() -> None:
    compiler: Any = torch.compile
    options = {"guard_filter_fn": list, "other": 1}
    given = {"dynamic": True, "fullgraph": True, "options": options}
    # The compiler takes some of the options out.
    found: Any = compiler(probed, backend=on_its_own, **{**given, "options": {**options}})
    expect((True, probed), (private.made_by_compiler(found), private.before_compiler(found)))
    expect(
        {"backend": on_its_own, **given}, private.compiler_options(private.compiler_context(found))
    )
    module = torch.nn.Identity()
    inductor: Any = compiler(module, options={"epilogue_fusion": False})
    expected = {"backend": "inductor", "dynamic": None, "options": {"epilogue_fusion": False}}
    expect(expected, private.compiler_options(private.compiler_context(inductor)))
    expect(
        (True, False, module),
        (
            private.is_optimized(inductor),
            private.is_optimized(module),
            private.before_compiler(inductor),
        ),
    )
    for recursive in (True, False):
        disabled: Any = torch.compiler.disable(probed, recursive=recursive, reason="why")  # type: ignore[no-untyped-call]
        expect(
            (True, probed), (private.made_by_compiler(disabled), private.before_compiler(disabled))
        )
        expect({"recursive": recursive, "reason": "why"}, private.disabling(disabled))
    module.compile(backend="eager", dynamic=True)
    in_place = private.compiler_context(private.compiled_in_place(module))
    expect({"backend": "eager", "dynamic": True}, private.compiler_options(in_place))
    private.compile_in_place(module, lambda call: lambda x: (call(x), "compiled"))
    expect((1, "compiled"), module(1))


# These run only if functions made by torch.compile are sent, because they load the compiler.
OF_THE_COMPILER = {
    "the arguments of torch.compile can be read from its results": (
        what_it_was_made_with_can_be_read
    ),
}


def probed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def on_its_own(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Replace a compiler as a backend that compiles nothing."""
    return graph.forward
