"""What mpgrad relies on PyTorch to do beyond its public interface, tried out before a pool is made.

A release of PyTorch may rename its private parts, or have them do something else, and a version number says nothing about
that. So what they do is tried, each behaviour by itself, in some milliseconds once a process: a pool on a version that differs
raises `UnsupportedTorchError` instead of giving wrong gradients. The probes call what `private` offers, not PyTorch's own
names, so that they try what a pool runs; they follow it in order.

Guarantees: probes leave nothing behind, draw no random number, and run in a thread of their own, where they meet no mode of
    the caller's. Those that belong to the process (anomaly detection, default dtype, ...) they bear.
Assumes: no other thread enters or leaves forward-mode differentiation at this very moment. The process has one level of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

import mpgrad.system  # noqa: F401  # says what a system lacks: that is no fault of PyTorch's
from mpgrad.errors import UnsupportedTorchError
from mpgrad.place import PLACE

try:
    from mpgrad.torch_state import private
except (AttributeError, ImportError) as error:  # said by the first probe
    MISSING: Exception | None = error
else:
    MISSING = None

__all__ = ["BEHAVIOURS", "TRIED", "Behaviour", "check", "failures", "was_tried"]

# Python versions by minor version of torch: on which pairs the tests have passed, see docs/compatibility.md
TRIED: dict[str, tuple[str, ...]] = {
    "2.8": ("3.10",),
    "2.9": ("3.10",),
    "2.10": ("3.11",),
    "2.11": ("3.12",),
    "2.12": ("3.11",),
    "2.13": ("3.11", "3.13"),
    "2.14": ("3.12",),
    "2.15": ("3.13",),
}

LOGGER = logging.getLogger("mpgrad")


class Behaviour(NamedTuple):
    name: str  # what PyTorch is expected to do, in words
    probe: Callable[[], None]  # raises where it does something else


class DiffersError(Exception):
    """What a probe has found is not what it expected."""


BEHAVIOURS: list[Behaviour] = []


def behaviour(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def remember(probe: Callable[[], None]) -> Callable[[], None]:
        BEHAVIOURS.append(Behaviour(name, probe))
        return probe

    return remember


class Check:
    """That of this process. One that is forked has what its parent had."""

    def __init__(self) -> None:
        self.passed = False
        self.compiler_passed = False
        self.lock = threading.RLock()  # two probes at once would meet each other's changes


CHECK = Check()


def unlock_in_child() -> None:
    """Another thread may have held it as this process was forked."""
    CHECK.lock = threading.RLock()


os.register_at_fork(after_in_child=unlock_in_child)


def check() -> None:
    """Try all behaviours, unless this process has done so, or is the worker of one that has.

    Raises:
        UnsupportedTorchError: PyTorch does not behave as expected; names what it should do, its version and those tried.
    """
    if CHECK.passed or PLACE.in_worker:
        return
    with CHECK.lock:
        if not CHECK.passed:
            check_now()


def check_now() -> None:
    failed = failures()
    for _, error in failed:
        if isinstance(error, (OSError, MemoryError)):
            raise error  # the system lacks something, and PyTorch was not asked
    if failed:
        error = failed[0][1]
        raise UnsupportedTorchError(torch.__version__, [name for name, _ in failed], tuple(TRIED)) from error
    CHECK.passed = True
    newest = max(map(minor_of, TRIED))
    if minor_of(torch.__version__) > newest:
        LOGGER.warning(
            "torch %s is newer than any that mpgrad has been tried with (%s); it behaves as expected in all that was checked",
            torch.__version__,
            ".".join(map(str, newest)),
        )


def check_compiler() -> None:
    """Try what is relied on where functions are carried that torch.compile made; for others the compiler need not be loaded.

    Raises:
        UnsupportedTorchError: they are made otherwise than expected.
    """
    with CHECK.lock:
        if CHECK.compiler_passed:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                what_it_was_made_with_can_be_read()
        except Exception as error:
            name = "torch.compile leaves what it was given where it can be read"
            raise UnsupportedTorchError(torch.__version__, [name], tuple(TRIED)) from error
        CHECK.compiler_passed = True


def what_it_was_made_with_can_be_read() -> None:
    compiler: Any = torch.compile
    module = torch.nn.Identity()
    given: list[dict[str, Any]] = [{"dynamic": None}, {"dynamic": True, "fullgraph": True}, {"dynamic": False, "mode": "other"}]
    given += [{"dynamic": None, "options": {"guard_filter_fn": list, "other": 1}}]
    for options in ({"backend": on_its_own, **each} for each in given):
        copied: dict[str, Any] = {name: dict(value) if name == "options" else value for name, value in options.items()}
        found: Any = compiler(probed, **copied)  # which takes some of the options out
        expect(True, private.made_by_compiler(found))
        expect(options, private.compiler_options(private.compiler_context(found)))
        expect(probed, private.before_compiler(found))
    eager = private.compiler_context(torch.compile(module, backend="eager"))
    expect({"backend": "eager", "dynamic": None}, private.compiler_options(eager))
    inductor: Any = torch.compile(module, options={"epilogue_fusion": False})
    expected = {"backend": "inductor", "dynamic": None, "options": {"epilogue_fusion": False}}
    expect(expected, private.compiler_options(private.compiler_context(inductor)))
    expect((True, False), (private.is_optimized(inductor), private.is_optimized(module)))
    expect(module, private.before_compiler(inductor))
    for recursive in (True, False):
        disabled: Any = torch.compiler.disable(probed, recursive=recursive, reason="why")  # type: ignore[no-untyped-call]
        expect((True, probed), (private.made_by_compiler(disabled), private.before_compiler(disabled)))
        expect({"recursive": recursive, "reason": "why"}, private.disabling(disabled))
    module.compile(backend="eager", dynamic=True)
    in_place = private.compiler_context(private.compiled_in_place(module))
    expect({"backend": "eager", "dynamic": True}, private.compiler_options(in_place))
    private.compile_in_place(module, lambda call: lambda x: (call(x), "compiled"))
    expect((1, "compiled"), module(1))
    private.cache_folder()


def probed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def on_its_own(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend that nothing is compiled with."""
    return graph.forward


def failures() -> list[tuple[str, Exception]]:
    """Of each behaviour that PyTorch does not have: its name, and what went wrong."""
    found: list[tuple[str, Exception]] = []
    with CHECK.lock:
        thread = threading.Thread(target=try_all, args=(found,), name="mpgrad-check")
        thread.start()
        thread.join()
    return found


def try_all(found: list[tuple[str, Exception]]) -> None:
    with warnings.catch_warnings():  # of what only the probes do; the caller's filters may make errors of them
        warnings.simplefilter("ignore")
        for name, probe in BEHAVIOURS:
            try:
                probe()
            except Exception as error:  # whatever it is, it is no longer what mpgrad was written for
                found.append((name, error))


def was_tried(torch_version: str, python: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Whether the tests have passed on this pair of minor versions.

    Example:
        >>> was_tried("1.13.1+cpu", (3, 8))
        False
    """
    return ".".join(map(str, python)) in TRIED.get(".".join(map(str, minor_of(torch_version))), ())


def minor_of(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def expect(expected: object, found: object) -> None:
    if found != expected:
        raise DiffersError(f"expected {expected!r}, found {found!r}")


# --- what the probes are made of


class Node(torch.autograd.Function):
    """An identity whose backward is a function of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backward: Callable[[Any], Any]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.run = backward
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, None]:
        return ctx.run(grad), None


class Entrance(torch.autograd.Function):
    """Gives a tensor a history; no argument, but hidden in a list."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, hidden: list[torch.Tensor]) -> torch.Tensor:
        return hidden[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def leaf() -> Any:
    return torch.ones(2, dtype=torch.float64, device="cpu", requires_grad=True)


def through(tensor: torch.Tensor, look: Callable[[], Any], seen: list[Any]) -> Any:
    """`tensor` behind a node which, in a backward, puts what `look` finds into `seen`."""

    def backward(grad: Any) -> Any:
        seen.append(look())
        return grad

    return private.apply(Node, tensor, backward)


# --- the probes


@behaviour("the parts of PyTorch that mpgrad imports are there")
def imported() -> None:
    if MISSING is not None:
        raise MISSING


@behaviour("of the nodes that are ready, a backward runs the one with the highest sequence number first")
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
    top = through(left + right, lambda: [*map(private.will_run, nodes), *map(private.leaf_will_run, leaves)], seen).sum()
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


@behaviour("each backward has a number of its own, also one within another")
def numbered_backwards() -> None:
    outer, inner = list[Any](), list[Any]()
    nested = through(leaf(), private.graph_task, inner).sum()

    def look() -> int:
        before = private.graph_task()
        nested.backward(retain_graph=True)
        expect(before, private.graph_task())
        return before

    result = through(through(leaf(), private.graph_task, outer), look, outer).sum()
    result.backward(retain_graph=True)
    result.backward()
    first, again, second, third = outer
    expect((-1, first, second), (private.graph_task(), again, third))
    expect(4, len({first, second, *inner}))
    expect(True, min(first, second, *inner) >= 0)


@behaviour("what a node returns comes to the next node as the very same object, also a number that is expanded")
def placeholders_untouched() -> None:
    placeholder = torch.zeros((), dtype=torch.float64, device="cpu").expand(2)
    real = torch.full((2,), 3.0, dtype=torch.float64, device="cpu")
    came: list[Any] = []

    def replace(grad: Any) -> Any:
        came.append(grad)
        return real

    x = leaf()
    result = private.apply(Node, private.apply(Node, x, replace), lambda grad: placeholder)
    result.sum().backward()
    expect(True, came[0] is placeholder)
    expect([3.0, 3.0], [] if x.grad is None else x.grad.tolist())


@behaviour("gradients can be asked for at edges of the graph; there are none at what it does not lead to")
def gradients_at_edges() -> None:
    x, aside = leaf(), leaf()
    inner = x * 3
    result = inner * inner
    edges = [torch.autograd.graph.get_gradient_edge(each) for each in (result, inner, aside)]
    ones = torch.ones_like(result)
    found = private.gradients(edges[:1], [edges[1], x, edges[2]], [ones], keep=True, create=False)
    expect([[6.0, 6.0], [18.0, 18.0], None], [None if grad is None else grad.tolist() for grad in found])
    differentiable = private.gradients([result], [x], [ones], keep=True, create=True)[0]
    expect(True, differentiable is not None and differentiable.requires_grad)
    private.gradients([result], [x], [ones], keep=False, create=False)
    try:
        private.gradients([result], [x], [ones], keep=False, create=False)
    except RuntimeError:
        return
    raise DiffersError("a graph that was not kept gave gradients again")


@behaviour("an edge to a node written in Python keeps the graph behind it")
def edges_that_keep() -> None:
    x = leaf()
    edge = private.edge_that_keeps(private.apply(Node, x * 3, lambda grad: grad * 2))
    (grad,) = private.gradients([edge], [x], [torch.ones(2, dtype=torch.float64, device="cpu")], keep=False, create=False)
    expect([6.0, 6.0], None if grad is None else grad.tolist())


@behaviour("at the end of a backward a callback is called once, after all nodes")
def callbacks_at_the_end() -> None:
    ran: list[Any] = []
    below = through(leaf(), lambda: "below", ran)
    through(below, lambda: private.when_backward_ends(lambda: ran.append("end")), ran).sum().backward()
    expect([None, "below", "end"], ran)


@behaviour("a node written in Python ends with the last tensor or graph that leads to it")
def ends_of_nodes() -> None:
    entered = private.apply(Entrance, leaf(), [torch.ones(2, dtype=torch.float64, device="cpu")])
    kept = entered * 2
    ref = weakref.ref(entered.grad_fn)
    kinds = private.NODE_IN_PYTHON, BackwardCFunction, private.node_type(Entrance), private.node_type(Node)
    expect([True, True, True, False], [isinstance(ref(), kind) for kind in kinds])
    del entered
    expect((True, True), (ref() is not None, private.is_alive(ref())))
    del kept
    expect(None, ref())


@behaviour("a node written in Python that outlives its tensors says so, or can still be asked for its gradient")
def nodes_that_outlive_their_tensors() -> None:
    node = private.apply(Entrance, leaf(), [torch.ones(2, dtype=torch.float64, device="cpu")]).grad_fn
    if private.is_alive(node):  # so it is from torch 2.9 on
        x, edge = leaf(), torch.autograd.graph.GradientEdge(node, 0)
        ones = torch.ones(2, dtype=torch.float64, device="cpu")
        (grad,) = private.gradients([x * 2], [edge], [ones], keep=False, create=False)
        expect(None, grad)


@behaviour("a tensor that a Function gives out, and that was no argument, is no view; writes in place are counted")
def outputs_are_no_views() -> None:
    entered = private.apply(Entrance, leaf(), [torch.ones(2, dtype=torch.float64, device="cpu")])
    expect((False, 0), (entered._is_view(), entered._version))
    entered.mul_(2)
    expect(1, entered._version)
    expect(True, entered[:1]._is_view())


@behaviour("a leaf's node names the leaf, and hooks on a leaf can be seen")
def leaves_and_their_hooks() -> None:
    x = leaf()
    node = (x * 2).grad_fn.next_functions[0][0]
    expect(True, node.variable is x)
    expect((False, False), (bool(x._backward_hooks), bool(x._post_accumulate_grad_hooks)))
    x.register_hook(lambda grad: None)
    x.register_post_accumulate_grad_hook(lambda tensor: None)
    expect((True, True), (bool(x._backward_hooks), bool(x._post_accumulate_grad_hooks)))


@behaviour("hooks of many tensors may lie in one dictionary")
def hooks_in_a_dictionary() -> None:
    shared, x = private.SharedHooks(), leaf()
    watched = x * 1
    shared.watch(watched)
    shared.hooks[0] = lambda grad: grad * 5
    (grad,) = torch.autograd.grad(watched.sum(), [x], retain_graph=True)
    expect([5.0, 5.0], grad.tolist())
    shared.hooks.clear()
    (grad,) = torch.autograd.grad(watched.sum(), [x])
    expect([1.0, 1.0], grad.tolist())


class Doubling(OrderedDict[int, Any]):
    """Hooks whose results are doubled."""

    def __setitem__(self, number: int, hook: Callable[[Any], Any]) -> None:
        super().__setitem__(number, lambda grad: 2 * hook(grad))


@behaviour("the first hook on a tensor asks its node for the dictionary, which may be one of another type")
def hooks_in_a_dictionary_of_our_own() -> None:
    class Hooked(Node):
        pass

    node_type = private.node_type(Hooked)
    register = node_type._register_hook_dict

    def register_our_own(node: Any, tensor: torch.Tensor) -> None:
        tensor._backward_hooks = Doubling()
        register(node, tensor)

    node_type._register_hook_dict = register_our_own
    x = leaf()
    result = private.apply(Hooked, x, lambda grad: grad)
    result.register_hook(lambda grad: grad * 7)
    expect((Doubling, 1), (type(result._backward_hooks), len(result._backward_hooks)))
    (grad,) = torch.autograd.grad(result.sum(), [x])
    expect([14.0, 14.0], grad.tolist())


@behaviour("PyTorch's own hooks tell by their module that they are")
def hooks_of_pytorch() -> None:
    x = leaf()
    torch.autograd.graph.register_multi_grad_hook([x], lambda grads: None)
    expect(["torch.autograd.graph"], [hook.__module__ for hook in x._backward_hooks.values()])
    expect("torch.utils.checkpoint", torch.utils.checkpoint._checkpoint_hook.__module__)


@behaviour("calls of PyTorch's methods can be counted, of whatever class they are asked for")
def counted_calls() -> None:
    applied = private.CallCounter(torch.autograd.Function, "apply")
    checkpoints = private.CallCounter(CheckpointFunction, "forward")
    hooks = private.CallCounter(torch.Tensor, "register_hook")
    with applied.watching(), checkpoints.watching(), hooks.watching():
        result: Any = Node.apply(leaf(), lambda grad: grad)  # type: ignore[no-untyped-call]
        expect(True, isinstance(result.grad_fn, private.node_type(Node)))
        torch.nn.Parameter(torch.ones(1, device="cpu")).register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
        expect((1, 0, 1), (applied.count, checkpoints.count, hooks.count))
        # as `checkpoint(use_reentrant=True)`, whose first use takes seconds
        CheckpointFunction.apply(torch.neg, False, leaf())  # type: ignore[no-untyped-call]
        expect(1, checkpoints.count)
    Node.apply(leaf(), lambda grad: grad)  # type: ignore[no-untyped-call]
    expect(2, applied.count)  # the checkpoint is one, too


@behaviour("shared memory can be made, and mapped again by its file descriptor")
def storages_by_descriptor() -> None:
    for descriptor in (*os.pipe(), *os.pipe()):  # where none is free that is an OSError; PyTorch says it in words of its own
        os.close(descriptor)
    made = private.shared_storage(64)
    again = private.storage_from_descriptor(os.dup(private.descriptor_of(made)), 64)
    made[5] = 7
    expect((64, 7, False), (again.nbytes(), again[5], made.data_ptr() == again.data_ptr()))


@behaviour("a tensor says whether its elements lie in memory as they are")
def plain_memory() -> None:
    plain = torch.ones(2, dtype=torch.float64, device="cpu")
    complex_ones = torch.ones(2, dtype=torch.complex64, device="cpu")
    nothing: torch.Tensor = torch._efficientzerotensor(2, device="cpu")
    odd = [complex_ones.conj(), complex_ones.conj().imag, plain.to_sparse(), torch.empty(2, device="meta"), nothing]
    expect([True, True, True], [private.has_plain_memory(each) for each in (plain, leaf(), plain[::2])])
    expect([False] * 5, [private.has_plain_memory(each) for each in odd])
    expect((True, False), (private.have_plain_memory([plain, leaf()]), private.have_plain_memory([plain, odd[0]])))
    expect((False, True), (plain._is_zerotensor(), nothing._is_zerotensor()))


@behaviour("a sparse tensor gives its indices and values as they are")
def parts_of_sparse_tensors() -> None:
    indices = torch.tensor([[1, 0, 1]], device="cpu")
    sparse = torch.sparse_coo_tensor(indices, torch.ones(3, dtype=torch.float64, device="cpu"), (2,), check_invariants=False)
    expect(([[1, 0, 1]], [1.0, 1.0, 1.0]), (sparse._indices().tolist(), sparse._values().tolist()))


@behaviour("tensors of any shapes can be copied one after another in one step")
def flattened_tensors() -> None:
    tensors = [
        torch.full(shape, value, dtype=torch.float64, device="cpu") for shape, value in (((), 1), ((1, 2), 2), ((1,), 3))
    ]
    expect([1.0, 2.0, 2.0, 3.0], private.flattened(tensors).flatten().tolist())


@behaviour("a module can be made again around other tensors")
def modules_made_again() -> None:
    module = torch.nn.PReLU(device="cpu", dtype=torch.float64)  # draws no random numbers
    doubled = {id(module.weight): module.weight.detach() * 2}
    x = -leaf()
    expect((2 * module(x)).tolist(), private.replica_of(module, doubled)(x).tolist())
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Softplus())
    copy: Any = object.__new__(torch.nn.PReLU)
    private.parametrize_again(copy, vars(module))
    expect(module(x).tolist(), copy(x).tolist())


@behaviour("TorchScript knows its own operations by PyTorch's functions")
def operations_of_scripts() -> None:
    expect("aten::as_strided", private.script_operations().get(id(torch.as_strided)))


@behaviour("the tensors in a structure can be had, and replaced")
def tensors_in_structures() -> None:
    plain = torch.ones(2, device="cpu")
    found = private.tree_leaves({"a": [plain, 3], "b": (None,)})
    expect((True, [3]), (found[0] is plain, [each for each in found[1:] if each is not None]))
    expect(([0], 3), private.tree_map_only(torch.Tensor, lambda tensor: 0, ([plain], 3)))


@behaviour("what records operations can be seen")
def tracers() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class AsMakeFx(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """In the place of the mode by which `make_fx` records, which it would take seconds to import."""

        _mode_key = torch._C._TorchDispatchModeKey.PROXY

    found: list[Any] = [private.tracer()]

    def look(*args: Any) -> Any:
        found.append(private.tracer())
        return args[0] * 2

    torch._C._create_graph_by_tracing(look, (leaf().detach(),), lambda tensor: "", True, False, None, [])
    with AsMakeFx():  # type: ignore[no-untyped-call]  # nothing is run in it: that would import seconds of code
        found.append(private.tracer())
    expect([None, "torch.jit.trace", private.MAKE_FX, None], [*found, private.tracer()])


@behaviour("autocast can be switched off for all devices")
def switched_off_autocast() -> None:
    matrix = torch.ones(2, 2, device="cpu", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expect(torch.bfloat16, (matrix @ matrix).dtype)
        torch.set_autocast_enabled("cuda", True)  # of this thread, and there need be none
        with private.without_autocast():
            expect(torch.float32, (matrix @ matrix).dtype)
            expect((False, False), (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))


@behaviour("the innermost hooks for saved tensors can be had")
def hooks_for_saved_tensors() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    outside = private.saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(unpack, pack), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        expect((None, (pack, unpack)), (outside, private.saved_tensor_hooks()))
        with private.without_saved_tensor_hooks():
            expect(None, private.saved_tensor_hooks())
        expect((pack, unpack), private.saved_tensor_hooks())


@behaviour("a mode can see, and refuse, that gradients are turned off")
def refused_no_grad() -> None:
    with torch.enable_grad(), private.refusing_no_grad():
        expect(True, private.is_refusing_no_grad())
        with private.grad_mode(False):
            expect(False, torch.is_grad_enabled())
        expect_refusal()
        with private.without_refusal():
            with torch.no_grad():
                expect(False, torch.is_grad_enabled())
            with private.refusing_no_grad():
                expect_refusal()
    expect((False, True), (private.is_refusing_no_grad(), torch.is_grad_enabled()))


def expect_refusal() -> None:
    try:
        with torch.no_grad():
            raise DiffersError("torch.no_grad was not refused")
    except NotImplementedError:
        pass


@behaviour("within torch.func.vmap, tensors and levels say what they are")
def levels_of_vmap() -> None:
    plain, seen = torch.arange(6.0, device="cpu").reshape(3, 2), list[Any]()

    def look(row: torch.Tensor) -> torch.Tensor:
        level = private.level_of(row)
        batch, dim = private.unbatched(row, level)
        seen.append((private.transforms_are_active(), private.level_count(), private.vmap_levels() == {level}, dim))
        seen.append([private.is_functorch_wrapped(each) and private.is_batched(each) for each in (row, plain)])
        expect(plain.tolist(), batch.tolist())
        with private.outside_transforms():
            seen.append((private.transforms_are_active(), private.has_plain_memory(row)))
        return private.batched(plain * 2, level, older=False)

    expect((plain * 2).tolist(), torch.func.vmap(look)(plain).tolist())
    expect([(True, 1, True, 0), [True, False], (False, False)], seen)

    def look_further(row: torch.Tensor) -> torch.Tensor:
        def look_again(number: torch.Tensor) -> torch.Tensor:
            return number * private.level_count() * max(private.vmap_levels())

        inner: Any = torch.func.vmap(look_again)
        return inner(row)  # type: ignore[no-any-return]

    expect((plain * 4).tolist(), torch.func.vmap(look_further)(plain).tolist())  # two of them, numbered from 1
    expect((False, 0, frozenset()), (private.transforms_are_active(), private.level_count(), private.vmap_levels()))


@behaviour("a tensor that torch.func.grad follows is told from a batch")
def tensors_that_grad_follows() -> None:
    plain = torch.ones(2, device="cpu")
    level = torch._C._functorch._grad_increment_nesting()  # as `torch.func.grad`, whose first use takes seconds
    try:
        followed = torch._C._functorch._wrap_for_grad(plain, level)
        expect((True, False), (private.is_functorch_wrapped(followed), private.is_batched(followed)))
        expect(plain.data_ptr(), private.unwrapped(followed).data_ptr())
    finally:
        torch._C._functorch._grad_decrement_nesting()


@behaviour("batched gradients come to nodes as stand-ins, of torch.func.vmap's kind or the one before")
def batched_gradients() -> None:
    batch, seen = torch.arange(6.0, dtype=torch.float64, device="cpu").reshape(3, 2), list[Any]()

    def look(row: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append((private.is_batched_the_older_way(row), private.older_levels(), private.has_plain_memory(row)))
        older = private.unbatched_the_older_way(row, 1)
        expect(batch.tolist(), older.tolist())
        return (private.batched(older * 2, 1, older=True),)

    (doubled,) = private.vmap_the_older_way(look)(batch)
    expect((batch * 2).tolist(), doubled.tolist())
    expect(([(True, 1, False)], 0, False), (seen, private.older_levels(), private.is_batched_the_older_way(batch)))

    def is_stand_in(grad: torch.Tensor) -> torch.Tensor:
        seen.append(private.is_batched(grad) or private.is_batched_the_older_way(grad))
        return grad

    x = leaf()
    result = private.apply(Node, x, is_stand_in)

    def pull_back(row: torch.Tensor) -> tuple[torch.Tensor]:
        (grad,) = private.gradients([result], [x], [row], keep=True, create=False)
        assert grad is not None
        return (grad,)

    with without_looking_for_nan():
        for vmap in (private.vmap_the_older_way, torch.func.vmap):
            (grad,) = vmap(pull_back)(batch)
            expect((True, batch.tolist()), (seen.pop(), grad.tolist()))


@contextlib.contextmanager
def without_looking_for_nan() -> Iterator[None]:
    """Where anomaly detection looks for NaN, in all threads of the process, PyTorch refuses batches."""
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        yield
        return
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(True, check_nan=True)


@behaviour("forward-mode differentiation says whether it is on, and can be switched off")
def forward_mode() -> None:
    plain = torch.ones(2, device="cpu")
    with private.within_dual_level():
        dual = torch._VF._make_dual(plain, plain, level=forward_ad._current_level)
        expect((True, True, False), (private.dual_level_is_active(), private.has_tangent(dual), private.has_tangent(plain)))
        with private.without_tangents():
            expect(False, private.has_tangent(dual.view(2)))
        expect(True, private.has_tangent(dual.view(2)))
