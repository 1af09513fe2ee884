"""The private names of PyTorch that mpgrad leans on, all in one place; those of PyTorch's settings
are in `settings`. In this order:

    nodes, graphs, and the backward that runs through them; leaves behind a result
    `torch.func` and forward mode; levels of vmap
    what a thread is in, such as autocast, tracing and modes
    the memory of tensors, storages that processes share; modules and scripts made again
    what torch.compile makes, and code that it leaves alone

Everything else in the package uses the public API, and of tensors and nodes the attributes
`_version`, `_is_view`, `_is_zerotensor`, `_backward_hooks`, `_post_accumulate_grad_hooks`,
`_indices` and `_values`. `behaviours` asks for each name before a pool is made, so there are no
other ways for where one is missing: they would be ways that nobody has gone. The one exception is
`never_compile`, which no result depends on.
"""

# long because: it is one door, behind which each function is a few lines

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import io
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_pprint,
)

from mpgrad.errors import contextmanager
from mpgrad.system import anonymous_memory
from mpgrad.tracebacks import hide_own_frames

__all__ = [
    "DELAYED_ERRORS",
    "ERROR_NODE",
    "LEAF_NODE",
    "NODE_IN_PYTHON",
    "CallCounter",
    "Level",
    "all_leaves",
    "apply",
    "batched",
    "before_compiler",
    "compile_in_place",
    "compiled_in_place",
    "compiler_context",
    "compiler_options",
    "current_graph_task",
    "default_device",
    "descriptor_of",
    "disabling",
    "dual_level_is_active",
    "dual_level_kept",
    "edge_that_keeps",
    "flattened",
    "foreign_modes",
    "grad_mode",
    "gradients",
    "graph_behind",
    "graph_is_kept",
    "has_ended",
    "has_plain_memory",
    "has_tangent",
    "have_plain_memory",
    "held_leaves",
    "is_alive",
    "is_batched",
    "is_batched_the_older_way",
    "is_functorch_wrapped",
    "is_held",
    "is_observer",
    "is_optimized",
    "is_refusing_no_grad",
    "keystr",
    "leading_to",
    "leaf_will_run",
    "leave_all_modes",
    "level_count",
    "level_of",
    "levels_of",
    "load_archive",
    "load_script",
    "made_by_compiler",
    "name_of_mode",
    "node_type",
    "not_compiled",
    "older_levels",
    "outside_transforms",
    "over",
    "parametrizations_are_cached",
    "parametrize_again",
    "plus",
    "profiler_is_on",
    "refusing_no_grad",
    "replica_of",
    "saved_tensor_hooks",
    "set_priority",
    "shared_storage",
    "storage_from_descriptor",
    "tracer",
    "transforms_are_active",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "treespec_pprint",
    "unbatched",
    "under_default_device",
    "vmap_levels",
    "vmap_the_older_way",
    "wait_for_devices",
    "when_backward_ends",
    "will_run",
    "within",
    "within_dual_level",
    "without",
    "without_autocast",
    "without_refusal",
    "without_saved_tensor_hooks",
    "without_tangents",
]

ENGINE: Any = torch.autograd.Variable._execution_engine
NODE_IN_PYTHON: Any = torch._C._FunctionBase
IsSo = Callable[[torch.Tensor], bool]


# These are asked for every call and its backward, so they are PyTorch's own functions, without one
# of ours around them. The number of the backward that is running in this thread; -1 outside one:
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
# Whether the running backward was asked to keep the graph (`retain_graph` or `create_graph`):
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# Whether the running backward needs a node: false for what `torch.autograd.grad(inputs=...)` leaves
# out:
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def leaf_will_run(node: Any) -> bool:
    """`will_run` of a leaf's node, of which PyTorch refuses to say that `torch.autograd.grad` asked
    for it."""
    try:
        return will_run(node)
    except RuntimeError:
        return True


def when_backward_ends(callback: Callable[[], object]) -> None:
    """Have it called at the end of the backward that is running, if that does not fail before."""
    ENGINE.queue_callback(callback)


def is_alive(node: Any) -> bool:
    """Whether the engine can still find `node`: one that is written in Python may outlive what it
    stands for."""
    try:
        return node.next_functions is not None
    except RuntimeError:
        return False


def is_held(node: Any) -> bool:
    """Whether Python has hold of the leaf that `node` adds gradients to; otherwise nothing but
    graphs leads to it."""
    return sys.getrefcount(node.variable) > references_of_graphs()


@functools.cache
def references_of_graphs() -> int:
    """As many as Python counts of a leaf that nobody has."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = (torch.zeros((), requires_grad=True, device="cpu") * 2).grad_fn
    return sys.getrefcount(node.next_functions[0][0].variable)


def edge_that_keeps(tensor: torch.Tensor) -> GradientEdge:
    """The edge to a tensor whose node is written in Python, and with it the graph behind."""
    if tensor.layout is torch.strided:
        edge = get_gradient_edge(tensor)
        # from torch 2.9 on, and made by way of a view
        if getattr(edge, "ownership_token", None) is not None:
            return edge
    with torch.enable_grad():
        # of sparse tensors there are no views
        return get_gradient_edge(
            tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
        )


def plus(held: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """`held + grad` as the engine adds gradients: torch adds a sparse tensor to a dense one, and
    not the other way round."""
    return held + grad if held.layout is torch.strided else grad + held


def gradients(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor],
    keep: bool,
    create: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad(outputs, inputs, grads, keep, create, allow_unused=True)` without its
    checks.

    Those cost as much as a small backward, and their first use imports sympy, which takes a fresh
    worker half a second.
    """
    found: tuple[torch.Tensor | None, ...] = ENGINE.run_backward(
        tuple(outputs),
        tuple(grads),
        keep,
        create,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply` without its care for `torch.func`, of whose tensors none comes here: a third
    of the cost."""
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def set_priority(node: Any, number: int) -> None:
    """Of the nodes that are ready, the engine runs the one with the highest number first; they are
    born counted up from 0."""
    node._set_sequence_nr(number)


def node_type(function: type[torch.autograd.Function]) -> Any:
    """The type of the nodes that `function` leaves in a graph."""
    return function._backward_cls


class CallCounter:
    """Counts calls of one of PyTorch's methods whose traces nothing in a graph shows, or only a
    walk through all of it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.count = 0
        self._owner = owner
        self._name = name

    def watch(self) -> None:
        """From here on, in a process that belongs to us."""
        method: Any = inspect.getattr_static(self._owner, self._name)
        # `Function.apply` from torch 2.15 on
        in_c = isinstance(method, types.ClassMethodDescriptorType)
        function = (
            functools.partial(call_class_method, method)
            if in_c
            else getattr(method, "__func__", method)
        )

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        functools.update_wrapper(counted, method)
        bind = classmethod if in_c else type(method)
        setattr(self._owner, self._name, counted if method is function else bind(counted))


def call_class_method(
    method: types.ClassMethodDescriptorType, owner: type, *args: Any, **kwargs: Any
) -> Any:
    return method.__get__(None, owner)(*args, **kwargs)


def wait_for_devices(tensors: Sequence[torch.Tensor | None]) -> None:
    """Wait until what this thread has devices compute for `tensors` is there.

    Between nodes on one device the engine sees to that itself, but not behind a node on the CPU.
    """
    for device in {tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()


# --- leaves that results depend on, besides those that are known: in a worker somebody else's
#
#     output ──► the graph behind it, as far as `entries` ──► leaves that somebody holds, and that
#                                                             are not `known`
# A leaf that nothing holds but graphs was made by the call, whose gradient nobody could ask for in
# a serial loop either.


with torch.inference_mode(False):
    LEAF_NODE: Any = type(get_gradient_edge(torch.zeros((), requires_grad=True, device="cpu")).node)


# what a `once_differentiable` backward makes: a node that raises when a gradient comes to it
DELAYED_ERRORS: Any = torch._C._functions
with torch.inference_mode(False):
    ERROR_NODE: Any = type(
        DELAYED_ERRORS.DelayedError(b"", 1)(torch.zeros((), requires_grad=True)).grad_fn
    )


def held_leaves(
    outputs: Sequence[torch.Tensor], known: Collection[int], entries: Collection[Any] = ()
) -> list[Any]:
    """Their nodes. `known`: ids of leaves. `entries`: types of nodes where the graph of what was
    given begins."""
    seen: set[Any] = {output.grad_fn for output in outputs} - {None}
    nodes, leaves = [node for node in seen if type(node) not in entries], list[Any]()
    while nodes:
        for behind, _ in nodes.pop().next_functions:
            if behind is None or behind in seen:
                continue
            seen.add(behind)
            kind = type(behind)
            if kind is LEAF_NODE:
                leaves.append(behind)
            elif kind not in entries:
                nodes.append(behind)
    return [node for node in leaves if id(node.variable) not in known and is_held(node)]


def graph_behind(
    outputs: Sequence[torch.Tensor], entries: Collection[Any] = ()
) -> dict[Any, list[Any]]:
    """The nodes, as far as `entries`; and which of them lead to each directly."""
    users: dict[Any, list[Any]] = {
        output.grad_fn: [] for output in outputs if output.grad_fn is not None
    }
    nodes = list(users)
    while nodes:
        node = nodes.pop()
        if type(node) in entries:
            continue
        for behind, _ in node.next_functions:
            if behind is None:
                continue
            if behind not in users:
                users[behind] = []
                nodes.append(behind)
            users[behind].append(node)
    return users


def leading_to(leaf: Any, users: Mapping[Any, Sequence[Any]], seen: set[Any]) -> list[Any]:
    """The nodes of a graph that lead to the one of a leaf, and that itself; but for what was
    `seen`, which they then are."""
    found = [] if leaf in seen else [leaf]
    seen.add(leaf)
    for node in found:
        further = [each for each in users[node] if each not in seen]
        found += dict.fromkeys(further)
        seen.update(further)
    return found


def all_leaves() -> list[torch.Tensor]:
    """Of this process, but for those that it was forked with when it was frozen."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    return [each for each in objects if type(each) in kinds and each.requires_grad and each.is_leaf]


# --- `torch.func` and forward mode


# These, too, are PyTorch's own functions: they are asked many times a call.
# Whether a tensor is a wrapper inside `torch.func.grad`, `vmap` and their like:
is_functorch_wrapped: IsSo = torch._C._functorch.is_functorch_wrapped_tensor
# Whether a tensor is the wrapper of a `torch.func.grad`, `vjp` or `jvp` that is over:
has_ended: IsSo = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]
# Whether a `torch.func` transform is running in this thread:
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def dual_level_is_active() -> bool:
    """Whether forward-mode differentiation is on in this process
    (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def vmap_levels() -> frozenset[int]:
    """The numbers of the `torch.func.vmap`s that are running in this thread."""
    stack: Any = torch._C._functorch.get_interpreter_stack() or ()
    return frozenset(
        each.level() for each in stack if each.key() == torch._C._functorch.TransformType.Vmap
    )


def level_count() -> int:
    """How many transforms are running in this thread."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a dual tensor of the level that is active."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class SharedLevel:
    """There is one level of dual tensors for all threads of a process: the first one opens it, the
    last one closes it.

    Meanwhile a `torch.func.jvp` takes that level, and does not open a second one (`JVP_NESTING`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._level = contextlib.ExitStack()
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Whoever is here can make dual tensors; where somebody else has opened a level, that one
        serves."""
        with self._lock:
            is_ours = self._count > 0 or not dual_level_is_active()
            if is_ours and self._count == 0:
                self._level.enter_context(forward_ad.dual_level())
                torch._functorch.eager_transforms.JVP_NESTING += 1
            self._count += is_ours
        try:
            yield
        finally:
            with self._lock:
                self._count -= is_ours
                if is_ours and self._count == 0:
                    torch._functorch.eager_transforms.JVP_NESTING -= 1
                    self._level.close()


DUAL_LEVEL = SharedLevel()


@contextmanager
def within_dual_level() -> Iterator[None]:
    """Forward-mode differentiation is on in the body."""
    # a function's own `jvp` runs with it off
    with forward_ad._set_fwd_grad_enabled(True), DUAL_LEVEL.entered():
        yield


@contextmanager
def dual_level_kept() -> Iterator[None]:
    """Around all that is made of dual tensors, with forward-mode differentiation off.

    Tensors that a graph has saved have their tangents for as long as there is a level. If another
    thread closed it while this one's backward takes them out, that would fail.
    """
    with forward_ad._set_fwd_grad_enabled(False), DUAL_LEVEL.entered():
        yield


def without_tangents() -> contextlib.AbstractContextManager[None]:
    """Forward-mode differentiation is off in the body, as it is in a Function's own forward and
    `jvp`."""
    return forward_ad._set_fwd_grad_enabled(False)


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Run the body as if no `torch.func` transform were running; only plain tensors may be used in
    it."""
    return temporarily_clear_interpreter_stack() if transforms_are_active() else NOTHING


NOTHING = contextlib.nullcontext()  # one for all: this is asked several times a call


# --- levels of vmap
#
# Batched gradients: `torch.autograd.grad(..., is_grads_batched=True)`, and a backward under
# `torch.func.vmap`. There the engine hands every node wrappers, which look like one gradient and
# hold a batch of them. A wrapper cannot travel, the batch can: it is taken out here, sent with its
# batch dimensions in front, differentiated in the worker under as many vmaps of the same kind, and
# put back into wrappers.
#
#     wrappers ──► levels_of, without ──► [B1, B2, *shape]
#              ──► worker: over ──► [B1, B2, *shape] ──► within ──► wrappers


class Level(NamedTuple):
    """One vmap that is being run. PyTorch has two kinds: `is_grads_batched` still uses the older
    one."""

    number: int
    older: bool


is_batched: IsSo = torch._C._functorch.is_batchedtensor
is_batched_the_older_way: IsSo = torch._C._functorch.is_legacy_batchedtensor
# The number of the innermost transform that a tensor belongs to:
level_of: Callable[[torch.Tensor], int] = torch._C._functorch.maybe_get_level
vmap_the_older_way: Callable[..., Any] = _vmap


def older_levels() -> int:
    """How many vmaps of the older kind are running in this thread."""
    count = int(torch._C._vmapmode_increment_nesting()) - 1
    torch._C._vmapmode_decrement_nesting()
    return count


def batched(tensor: torch.Tensor, level: Level) -> torch.Tensor:
    """Let `tensor` stand for one element of its leading dimension."""
    add: Any = torch._add_batch_dim if level.older else torch._C._functorch._add_batch_dim
    wrapper: torch.Tensor = add(tensor, 0, level.number)
    return wrapper


def unbatched(tensor: torch.Tensor, level: Level) -> torch.Tensor:
    """The batch in front; a batch of one where `tensor` is not batched at this level."""
    if level.older:
        batch: torch.Tensor = torch._remove_batch_dim(tensor, level.number, 1, 0)
        return batch
    value, dim = torch._C._functorch._unwrap_batched(tensor, level.number)
    return value.unsqueeze(0) if dim is None else value.movedim(dim, 0)


def levels_of(tensors: Sequence[torch.Tensor | None]) -> tuple[Level, ...]:
    """The vmaps that any of `tensors` is batched over, outermost first.

    Raises:
        TypeError: one belongs to another transform than vmap.
    """
    if have_plain_memory([tensor for tensor in tensors if tensor is not None]):
        return ()
    numbers: set[int] = set()
    older = False
    for tensor in tensors:
        while tensor is not None and is_functorch_wrapped(tensor):
            if not is_batched(tensor):
                raise TypeError(
                    "a gradient that came to a pool's result belongs to a torch.func transform "
                    "other than vmap; "
                    "call the pool inside of the function that is transformed"
                )
            number = level_of(tensor)
            numbers.add(number)
            tensor, _ = torch._C._functorch._unwrap_batched(tensor, number)
        older = older or (tensor is not None and is_batched_the_older_way(tensor))
    levels = [Level(number, False) for number in sorted(numbers)]
    if older:
        # in the engine's threads for devices none is counted; there is one then, within which
        # `torch.autograd.grad` was called
        levels += [Level(1 + number, True) for number in range(max(1, older_levels()))]
    return tuple(levels)


def without(tensors: Sequence[torch.Tensor], levels: tuple[Level, ...]) -> list[torch.Tensor]:
    """`tensors` with their batches as ordinary dimensions in front, outermost first, the same for
    all of them."""
    plain = list(tensors)
    for level in reversed(levels):
        plain = [unbatched(tensor, level) for tensor in plain]
        size = max(tensor.shape[0] for tensor in plain)
        plain = [tensor.expand(size, *tensor.shape[1:]) for tensor in plain]
    return plain


def within(tensor: torch.Tensor, levels: tuple[Level, ...]) -> torch.Tensor:
    """The wrapper for a tensor with batch dimensions in front."""
    for level in levels:
        tensor = batched(tensor, level)
    return tensor


def over(
    levels: tuple[Level, ...],
    fn: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """`fn(tensors)` under one vmap per level, over the leading dimensions; batches in front of what
    it returns, too."""
    if not levels:
        return list(fn(tensors))
    present: list[bool] = []

    def part(*slices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = over(levels[1:], fn, slices)
        present[:] = [tensor is not None for tensor in found]
        # a vmap has to return something
        return tuple(tensor for tensor in found if tensor is not None) or slices[:1]

    batched: Any = (
        vmap_the_older_way(part)
        if levels[0].older
        else torch.func.vmap(part, randomness="different")
    )
    results = iter(batched(*tensors))
    return [next(results) if there else None for there in present]


# --- what a thread is in: autocast, hooks for saved tensors, tracing, modes, a refused
# `torch.no_grad`


# What is copied in the body of this one stays what it is:
without_autocast: Callable[[], contextlib.AbstractContextManager[object]] = (
    torch._C._DisableAutocast
)


def saved_tensor_hooks() -> (
    tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
):
    """The innermost `torch.autograd.graph.saved_tensors_hooks` of this thread: those that apply."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """As in a thread of its own."""
    hidden = []
    try:
        while (hooks := saved_tensor_hooks()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hidden.append(hooks)
        yield
    finally:
        for hooks in reversed(hidden):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def tracer() -> str | None:
    """What records the operations of this thread instead of only running them; it would see none of
    a worker's."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    keys: Any = torch._C._TorchDispatchModeKey
    traces = torch._C._get_dispatch_mode(keys.PROXY) is not None
    return "torch.fx (make_fx, torch.func.linearize, torch.export)" if traces else None


OBSERVERS = (
    "torch.cuda._sanitizer.CUDASanitizerDispatchMode",
    "torch.distributed._tools.",
    "torch.distributed.tensor.debug.",
    "torch.testing._internal.logging_tensor.LoggingTensorMode",
    "torch.utils._debug_mode.",
    "torch.utils.flop_counter.",
)  # PyTorch's own modes that only look on; where a module has nothing else, its name
# checkpoint with a policy: what it keeps and what it computes once more has the same values
UNNOTICED = "mpgrad.", "torch.utils.checkpoint._Cach"
CLONES = "torch.autograd.graph._CloneArgBeforeMutateMode"


def name_of_mode(mode: object) -> str:
    """As its user calls it."""
    name = f"{type(mode).__module__}.{type(mode).__qualname__}"
    return (
        "torch.autograd.graph.allow_mutation_on_saved_tensors"
        if name == CLONES
        else name.replace("._Flop", ".Flop")
    )


def is_observer(mode: object) -> bool:
    """Whether it is known to change no values."""
    return name_of_mode(mode).startswith(OBSERVERS)


def gives_device(mode: object) -> bool:
    return name_of_mode(mode) == "torch.utils._device.DeviceContext"


DISPATCH_MODES: Any = _get_current_dispatch_mode_stack


def function_modes() -> list[Any]:
    """Those of this thread, the innermost last."""
    stack: Any = torch.overrides._get_current_function_mode_stack
    return list(stack()) if torch._C._len_torch_function_stack() else []


def foreign_modes() -> list[Any]:
    """The modes of this thread that a worker knows nothing of; that of a default device is not
    among them."""
    found = [mode for mode in function_modes() if not gives_device(mode)]
    if torch._C._len_torch_dispatch_stack():
        found += DISPATCH_MODES()
    return (
        [mode for mode in found if not name_of_mode(mode).startswith(UNNOTICED)] if found else found
    )


def parametrizations_are_cached() -> bool:
    """Whether a `torch.nn.utils.parametrize.cached` is open."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled


def default_device() -> str | None:
    """That of `torch.set_default_device` or ``with torch.device(...)`` in this thread."""
    found = [str(mode.device) for mode in function_modes() if gives_device(mode)]
    return found[-1] if found else None


@contextmanager
def under_default_device(name: str | None) -> Iterator[None]:
    """The body runs with it; None: without one, whatever there was."""
    if name is not None:
        with torch.device(name):
            yield
        return
    push: Any = torch.overrides._push_mode
    before = function_modes()
    pop_function_modes()
    try:
        for mode in before:
            if not gives_device(mode):
                push(mode)
        yield
    finally:
        pop_function_modes()
        for mode in before:
            push(mode)


def pop_function_modes() -> None:
    pop: Any = torch.overrides._pop_mode
    for _ in range(torch._C._len_torch_function_stack()):
        pop()


def leave_all_modes() -> None:
    """For a process that was forked by a thread that was in some."""
    pop_function_modes()
    if torch._C._len_torch_dispatch_stack():
        for mode in reversed(DISPATCH_MODES()):
            torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))


class NoGradRefusal(TorchFunctionMode):
    """See `refusing_no_grad`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not args[0]:
            raise NotImplementedError(
                "forward mode follows what is computed under torch.no_grad, which has no derivative"
            )
        return func(*args, **(kwargs or {}))


def without_refusal() -> contextlib.AbstractContextManager[Any]:
    """For our own code within a function that runs under `refusing_no_grad`. Other function modes
    are off there too."""
    guard: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return guard


# a context for our own code: no `__torch_function__` of a tensor's class is called
without_subclasses: Callable[[], contextlib.AbstractContextManager[None]]
without_subclasses = torch._C.DisableTorchFunctionSubclass


def is_leaf_with_grad(tensor: torch.Tensor) -> bool:
    """Of any class."""
    with without_subclasses():
        return tensor.is_leaf and tensor.requires_grad


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A `torch.Tensor` with the same memory, which autograd has made of it."""
    with without_subclasses(), torch.inference_mode(False), torch.enable_grad():
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """`torch.set_grad_enabled`, without the refusal."""
    before = torch.is_grad_enabled()
    with without_refusal():
        torch.set_grad_enabled(enabled)
    try:
        yield
    finally:
        with without_refusal():
            torch.set_grad_enabled(before)


def is_refusing_no_grad() -> bool:
    return any(isinstance(mode, NoGradRefusal) for mode in function_modes())


@contextmanager
def refusing_no_grad() -> Iterator[None]:
    """`torch.no_grad` in the body raises; to be entered with gradients on."""
    # a task in the caller's thread may run `without_refusal`
    with torch._C._EnableTorchFunction(), NoGradRefusal():
        yield


# --- the memory of tensors; modules and scripts that are made again

SHARED_STORAGE: Any = torch.UntypedStorage  # its private names are not in torch's type hints


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Shared memory mapped as torch.multiprocessing maps it.

    torch itself opens a file in /dev/shm, which in a container often ends at 64 MiB, and writing
    past that end is a SIGBUS; an anonymous memory file has no such limit, and never a name that
    could stay behind.
    """
    descriptor = anonymous_memory()
    try:
        os.truncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return storage_from_descriptor(descriptor, nbytes)


def storage_from_descriptor(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Map shared memory by its file descriptor, as torch.multiprocessing's reducers do, and close
    `descriptor`."""
    try:
        storage: torch.UntypedStorage = SHARED_STORAGE._new_shared_fd_cpu(descriptor, nbytes)
        return storage
    finally:
        os.close(descriptor)  # torch keeps a duplicate of its own


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """The file descriptor behind shared memory; it stays the storage's own."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)


KEYS_OF: Any = torch._C._dispatch_keys
with torch.inference_mode(False):
    PLAIN_KEYS = KEYS_OF(torch.empty(0, device="cpu")).raw_repr()


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in the CPU's memory as they are: no stand-in, sparse, quantized or
    conjugated tensor."""
    return bool(KEYS_OF(tensor).raw_repr() == PLAIN_KEYS)


def have_plain_memory(tensors: Sequence[torch.Tensor]) -> bool:
    return {KEYS_OF(tensor).raw_repr() for tensor in tensors} == {PLAIN_KEYS}


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The elements of the tensors, which are of one dtype, one after another, copied."""
    dims = {tensor.dim() for tensor in tensors}
    if dims == {1}:
        return torch.cat(tensors)
    return torch.stack(tensors) if dims == {0} else torch._C._nn.flatten_dense_tensors(tensors)


def replica_of(network: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> torch.nn.Module:
    """A module like `network` with other tensors, by the id of the old ones; buffers that are not
    named stay the same."""
    modules: Any = list(network.modules())
    copies: Any = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in network.modules():
        replica = copies[id(module)]
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copies[id(child)]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                # a plain attribute: it is no leaf, and so no parameter
                setattr(replica, name, tensors[id(parameter)])
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else tensors.get(id(buffer), buffer)
    return copies[id(network)]  # type: ignore[no-any-return]


load_archive: Any = torch.jit.load  # PyTorch's own, also in workers


def load_script(code: bytes) -> torch.jit.ScriptModule:
    """What `save_to_buffer` of a scripted module or function has saved."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)  # said to the one who scripted it
        module: torch.jit.ScriptModule = load_archive(io.BytesIO(code))
    return module


def parametrize_again(module: Any, state: dict[str, Any]) -> None:
    """Give a module the state of a parametrized one, and the class that makes tensors anew from
    their parametrizations."""
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)


# --- `torch.compile`: what it makes, with which options, and code that it is to leave alone

P = ParamSpec("P")
T = TypeVar("T")


def not_compiled(fn: Callable[P, T]) -> Callable[P, T]:
    """Have `torch.compile` break its graph at `fn`, and leave alone what `fn` calls, without
    loading the compiler for it.

    `fn` is public: its exceptions show the caller's frames.
    """

    @functools.wraps(fn)
    def uncompiled(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            # another thread may be importing it
            disable: Any = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            run: Callable[P, T] = fn if disable is None else disable(fn)
            return run(*args, **kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise

    uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
    uncompiled._torchdynamo_disable_msg = "it runs in other processes"  # type: ignore[attr-defined]
    never_compile(uncompiled.__code__)  # type: ignore[attr-defined]
    return uncompiled


def never_compile(code: types.CodeType) -> None:
    """Have the compiler leave frames of `code` alone. Where it cannot be told, it compiles them:
    slow, but right."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if all(
        hasattr(frames, name)
        for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
    ):
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def made_by_compiler(function: types.FunctionType) -> bool:
    """Whether `torch.compile` or `torch.compiler.disable` gave it; no wrapper that functools.wraps
    has given its marks."""
    maker = function.__globals__.get("__name__")
    return maker in COMPILERS and "_torchdynamo_orig_callable" in vars(function)


def is_optimized(module: torch.nn.Module) -> bool:
    """Whether `torch.compile(module)` gave it."""
    return "dynamo_ctx" in vars(module)


COMPILERS = ("torch._dynamo.eval_frame", "torch._dynamo.external_utils")


def compiler_context(compiled: Any) -> Any:
    """What `torch.compile` wraps functions with, by a function or module that it has wrapped; None
    where there is none."""
    if isinstance(compiled, torch.nn.Module):
        return vars(compiled).get("dynamo_ctx")
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    held = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    return next((each for each in held if isinstance(each, dynamo._TorchDynamoContext)), None)


def before_compiler(made: Any) -> Any:
    """What was given to `torch.compile` or `torch.compiler.disable`."""
    return made._orig_mod if isinstance(made, torch.nn.Module) else made._torchdynamo_orig_callable


def disabling(made: Any) -> dict[str, Any]:
    """The arguments of `torch.compiler.disable` that gave `made`."""
    context = compiler_context(made)
    if context is None:  # without `recursive` PyTorch has no need of one
        return {"recursive": False, "reason": made._torchdynamo_disable_msg}
    return {"recursive": True, "reason": context.msg}


def compiled_in_place(module: torch.nn.Module) -> Any:
    """What `module.compile()` has put into it, of which its state has nothing; None where it was
    not called."""
    return vars(module).get("_compiled_call_impl")


def compile_in_place(module: Any, wrap: Callable[[Any], Any]) -> None:
    """As `module.compile()`, with `wrap` in the place of the compiler."""
    module._compiled_call_impl = wrap(module._call_impl)


def compiler_options(context: Any) -> dict[str, Any] | None:
    """The arguments of `torch.compile` that gave `context`, as far as they are not its defaults;
    None of `disable`'s."""
    if not callable(context.callback):
        return None
    layers = [context.callback]
    while (inner := inner_layer(layers[-1])) is not None:
        layers.append(inner)
    convert, found = layers[1], backend_options(layers[-1])
    inner_options = found["options"] or {}
    if (kept := context.callback.hooks.guard_filter_fn) is not None:
        inner_options = {**inner_options, "guard_filter_fn": kept}
    found.update(
        options=inner_options or None,
        fullgraph=getattr(convert, "_one_graph", False),
        dynamic=context._dynamic,
        # of later versions
        recompile_limit=getattr(convert, "_recompile_limit", None),
        isolate_recompiles=getattr(context, "_isolate_recompiles_id", -1) != -1,
        shapes_spec=getattr(context, "_shapes_spec", None),
    )
    return {
        name: value
        for name, value in found.items()
        if name == "dynamic" or value not in (None, False)
    }


def inner_layer(layer: Any) -> Any:
    """What a layer around a backend calls; None of the backend itself. (The name is that of
    versions up to 2.8.)"""
    attributes = getattr(layer, "__dict__", {})
    return attributes.get("_torchdynamo_orig_backend", attributes.get("_torchdynamo_orig_callable"))


def backend_options(backend: Any) -> dict[str, Any]:
    """The arguments of `torch.compile` that a backend of PyTorch stands for."""
    names: Any = torch
    if isinstance(backend, names._TorchCompileInductorWrapper):
        options = dict(backend.config)
        if backend.compiler_name != "inductor":
            options["use_aoti"] = True
        return {"backend": "inductor", "options": options, "name": getattr(backend, "name", None)}
    if not isinstance(backend, names._TorchCompileWrapper):  # torch._dynamo.optimize was called
        return {"backend": backend, "options": None}
    function = backend.compiler_fn
    module = getattr(function, "__module__", None) or type(function).__module__
    # it may be no function then, but is known by its name
    own = module.partition(".")[0] == "torch"
    return {
        "backend": backend.compiler_name if own else function,
        "mode": None,
        "options": None,
        **backend.kwargs,
    }
