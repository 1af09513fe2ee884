"""All private names of PyTorch that mpgrad uses are here, except those in `settings`.

Their order is:

    nodes, graphs, and the backward that runs through them; leaves behind a result
    `torch.func` and forward mode; levels of vmap
    the state of a thread, such as autocast, tracing and modes
    the memory of tensors, storages that processes share; modules and scripts that are rebuilt
    the results of torch.compile, and code that it leaves alone

Everything else in the package uses the public API, and these attributes of tensors and nodes:
`_version`, `_is_view`, `_is_zerotensor`, `_backward_hooks`, `_post_accumulate_grad_hooks`,
`_indices` and `_values`. `behaviours` checks for each name before a pool is made. So there are no
fallbacks for missing names, because they would be untested. The one exception is `never_compile`,
on which no result depends.
"""

# long because: all private names are in one place; each function is a few lines

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
from torch._weights_only_unpickler import _remove_safe_globals as remove_safe_globals
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributions.kl import _KL_MEMOIZE as KL_MEMO
from torch.distributions.kl import _KL_REGISTRY as KL_FUNCTIONS
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import (
    SERIALIZED_TYPE_TO_PYTHON_TYPE,
    SUPPORTED_NODES,
    SUPPORTED_SERIALIZED_TYPES,
    _cxx_pytree_pending_imports,
    keystr,
    register_pytree_node,
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
    "KL_FUNCTIONS",
    "KL_MEMO",
    "LEAF_NODE",
    "NODE_IN_PYTHON",
    "NOTHING",
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
    "forget_pytree_node",
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
    "leaf_nodes",
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
    "outputs_leading_to",
    "outside_transforms",
    "over",
    "parametrizations_are_cached",
    "parametrize_again",
    "plus",
    "profiler_is_on",
    "pytree_node",
    "refusing_no_grad",
    "remove_safe_globals",
    "replica_of",
    "run_as_is",
    "saved_tensor_hooks",
    "set_priority",
    "set_pytree_node",
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


# These run for every call and its backward, so they are PyTorch's own functions, without a wrapper.
# The number of the backward that is running in this thread, or -1 outside a backward:
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
# Whether the running backward was asked to keep the graph (`retain_graph` or `create_graph`):
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# Whether the running backward needs a node. It is false for nodes that
# `torch.autograd.grad(inputs=...)` leaves out:
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def leaf_will_run(node: Any) -> bool:
    """Return `will_run` for a leaf's node.

    PyTorch raises an error instead of answering if the leaf is an input of `torch.autograd.grad`.
    """
    try:
        return will_run(node)
    except RuntimeError:
        return True


def when_backward_ends(callback: Callable[[], object]) -> None:
    """Have `callback` called at the end of the running backward, unless the backward fails
    first."""
    ENGINE.queue_callback(callback)


def is_alive(node: Any) -> bool:
    """Return whether the engine can still find `node`.

    A node that is written in Python may outlive its place in the graph.
    """
    try:
        return node.next_functions is not None
    except RuntimeError:
        return False


def is_held(node: Any) -> bool:
    """Return whether Python holds the leaf that `node` adds gradients to. Otherwise only graphs
    lead to it."""
    return sys.getrefcount(node.variable) > references_of_graphs()


@functools.cache
def references_of_graphs() -> int:
    """Return the reference count that Python reports for a leaf that only a graph holds."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = (torch.zeros((), requires_grad=True, device="cpu") * 2).grad_fn
    return sys.getrefcount(node.next_functions[0][0].variable)


def edge_that_keeps(tensor: torch.Tensor) -> GradientEdge:
    """Return an edge from which a backward can start, for a tensor whose node is written in Python.

    It keeps the graph behind alive. It may lead to a view of the tensor, so no gradient can be
    computed at this edge.
    """
    if tensor.layout is torch.strided:
        edge = get_gradient_edge(tensor)
        # torch 2.9 and newer keep the graph alive through a view that they make
        if getattr(edge, "ownership_token", None) is not None:
            return edge
    with torch.enable_grad():
        # Sparse tensors have no views.
        return get_gradient_edge(
            tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
        )


def plus(held: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `held + grad`, as the engine adds gradients.

    torch can add a sparse tensor to a dense one, but not a dense one to a sparse one.
    """
    return held + grad if held.layout is torch.strided else grad + held


def gradients(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor],
    keep: bool,
    create: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Run `torch.autograd.grad(outputs, inputs, grads, keep, create, allow_unused=True)` unchecked.

    The checks cost as much as a small backward. Their first use imports sympy, which takes a new
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
    """Call `function.apply` without its support for `torch.func`, whose tensors never come here.

    This takes a third of the time.
    """
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def set_priority(node: Any, number: int) -> None:
    """Set the priority of a node. Of the nodes that are ready, the engine runs the highest first.

    PyTorch counts the priorities of new nodes up from 0.
    """
    node._set_sequence_nr(number)


def node_type(function: type[torch.autograd.Function]) -> Any:
    """Return the type of the nodes that `function` leaves in a graph."""
    return function._backward_cls


class CallCounter:
    """Counts calls of one of PyTorch's methods.

    A graph does not show these calls, or only a walk through the whole graph would.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.count = 0
        self._owner = owner
        self._name = name
        self._is_watching = False

    @property
    def may_have_run(self) -> bool:
        """Whether the method may have been called. In the caller's process the calls are not
        counted."""
        return self.count > 0 or not self._is_watching

    def watch(self) -> None:
        """Count from now on. The process must be one of mpgrad's."""
        self._is_watching = True
        method: Any = inspect.getattr_static(self._owner, self._name)
        # `Function.apply` is such a method since torch 2.15.
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
    """Wait until devices have finished this thread's work for `tensors`.

    Between nodes on one device the engine does this itself, but not after a node on the CPU.
    """
    for device in {tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()


# --- unknown leaves that results depend on; in a worker they belong to other code
#
#     output ──► the graph behind it, up to `entries` ──► leaves that Python code holds and that
#                                                         are not `known`
#
# A leaf that only graphs hold was made by the call. Its gradient could not be read in a serial loop
# either.


DELAYED_ERRORS: Any = torch._C._functions
with torch.inference_mode(False):
    SOME_LEAF = torch.zeros((), requires_grad=True, device="cpu")
    LEAF_NODE: Any = type(get_gradient_edge(SOME_LEAF).node)
    # A `once_differentiable` backward makes such a node. It raises when it runs.
    ERROR_NODE: Any = type(DELAYED_ERRORS.DelayedError(b"", 1)(SOME_LEAF).grad_fn)


def leaf_nodes(outputs: Sequence[torch.Tensor], entries: Collection[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the leaves behind `outputs`, each once.

    `entries` are types of nodes where the graph of the arguments begins.
    """
    seen: set[Any] = {output.grad_fn for output in outputs} - {None}
    nodes = [node for node in seen if type(node) not in entries]
    while nodes:
        for behind, _ in nodes.pop().next_functions:
            if behind is None or behind in seen:
                continue
            seen.add(behind)
            kind = type(behind)
            if kind is LEAF_NODE:
                yield behind
            elif kind not in entries:
                nodes.append(behind)


def held_leaves(
    outputs: Sequence[torch.Tensor], known: Collection[int], entries: Collection[Any] = ()
) -> list[Any]:
    """Return the nodes of leaves that Python code holds and that are not `known`.

    `known` are ids of leaves. `entries` are those of `leaf_nodes`.
    """
    leaves = leaf_nodes(outputs, entries)
    return [node for node in leaves if id(node.variable) not in known and is_held(node)]


def graph_behind(
    outputs: Sequence[torch.Tensor], entries: Collection[Any] = ()
) -> dict[Any, list[Any]]:
    """Return the nodes behind `outputs`, as far as `entries`, each with its direct users."""
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


def outputs_leading_to(
    ends: Mapping[Any, str], outputs: Sequence[torch.Tensor], users: Mapping[Any, Sequence[Any]]
) -> dict[int, str]:
    """For each output that depends on an end, return its number and the words for that end.

    `ends` maps nodes of the graph behind the outputs to words, and `users` is this graph.
    """
    found = dict(ends)
    nodes = list(found)
    for node in nodes:
        for user in users[node]:
            if user not in found:
                found[user] = found[node]
                nodes.append(user)
    return {
        number: found[each.grad_fn] for number, each in enumerate(outputs) if each.grad_fn in found
    }


def words_of_error(node: Any) -> str:
    """Return the message of the error that an `ERROR_NODE` raises."""
    try:
        node(*[None] * len(node.next_functions))
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a node that only raises has not raised")


def all_leaves() -> list[torch.Tensor]:
    """Return the leaves of this process, except those frozen before it was forked."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    return [each for each in objects if type(each) in kinds and each.requires_grad and each.is_leaf]


# --- `torch.func` and forward mode


# These are also PyTorch's own functions, because they run many times per call. Whether a tensor is
# a wrapper inside `torch.func.grad`, `vmap` and similar transforms:
is_functorch_wrapped: IsSo = torch._C._functorch.is_functorch_wrapped_tensor
# Whether a tensor is the wrapper of a `torch.func.grad`, `vjp` or `jvp` that has ended:
has_ended: IsSo = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]
# Whether a `torch.func` transform is running in this thread:
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def dual_level_is_active() -> bool:
    """Return whether forward-mode differentiation is on in this process
    (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def vmap_levels() -> frozenset[int]:
    """Return the numbers of the `torch.func.vmap` transforms that are running in this thread."""
    stack: Any = torch._C._functorch.get_interpreter_stack() or ()
    return frozenset(
        each.level() for each in stack if each.key() == torch._C._functorch.TransformType.Vmap
    )


def level_count() -> int:
    """Return how many transforms are running in this thread."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a dual tensor of the active level."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class SharedLevel:
    """The one level of dual tensors that all threads of a process share.

    The first thread opens it and the last one closes it. In between, a `torch.func.jvp` uses this
    level and does not open a second one (`JVP_NESTING`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._level = contextlib.ExitStack()
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Allow dual tensors in the body. If other code has opened a level, that level is used."""
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
    """Run the body with forward-mode differentiation on."""
    # PyTorch turns it off while a function's own `jvp` runs.
    with forward_ad._set_fwd_grad_enabled(True), DUAL_LEVEL.entered():
        yield


@contextmanager
def dual_level_kept() -> Iterator[None]:
    """Keep the level open while dual tensors are used, with forward-mode differentiation off.

    Tensors that a graph has saved keep their tangents as long as the level is open. If another
    thread closed the level while a backward of this thread reads them, the backward would fail.
    """
    with forward_ad._set_fwd_grad_enabled(False), DUAL_LEVEL.entered():
        yield


def without_tangents() -> contextlib.AbstractContextManager[None]:
    """Turn forward-mode differentiation off in the body.

    PyTorch does the same in a Function's own forward and `jvp`.
    """
    return forward_ad._set_fwd_grad_enabled(False)


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Run the body as if no `torch.func` transform were running. It may use only plain tensors."""
    return temporarily_clear_interpreter_stack() if transforms_are_active() else NOTHING


class EmptyContext:
    """A context that does nothing. Unlike `contextlib.nullcontext` it runs only C code, because it
    is used several times per call. Entering it returns False."""

    __enter__ = staticmethod(bool)
    __exit__ = staticmethod("".format)  # returns "" for any three arguments


NOTHING: contextlib.AbstractContextManager[bool] = EmptyContext()  # type: ignore[assignment]


# --- levels of vmap
#
# Gradients are batched in `torch.autograd.grad(..., is_grads_batched=True)`, and in a backward
# under `torch.func.vmap`. The engine then passes wrappers to every node. A wrapper looks like one
# gradient and holds a batch of them. It cannot be sent, but its batch can. So the batch is taken
# out here and sent with its batch dimensions in front. The worker differentiates it under as many
# vmaps of the same kind, and the results are put back into wrappers.
#
#     wrappers ──► levels_of, without ──► [B1, B2, *shape]
#              ──► worker: over ──► [B1, B2, *shape] ──► within ──► wrappers


class Level(NamedTuple):
    """One running vmap. PyTorch has two kinds, and `is_grads_batched` still uses the older one."""

    number: int
    older: bool


is_batched: IsSo = torch._C._functorch.is_batchedtensor
is_batched_the_older_way: IsSo = torch._C._functorch.is_legacy_batchedtensor
# The number of the innermost transform that a tensor belongs to:
level_of: Callable[[torch.Tensor], int] = torch._C._functorch.maybe_get_level
vmap_the_older_way: Callable[..., Any] = _vmap


def older_levels() -> int:
    """Return how many vmaps of the older kind are running in this thread."""
    count = int(torch._C._vmapmode_increment_nesting()) - 1
    torch._C._vmapmode_decrement_nesting()
    return count


def batched(tensor: torch.Tensor, level: Level) -> torch.Tensor:
    """Make `tensor` represent one element of its leading dimension."""
    add: Any = torch._add_batch_dim if level.older else torch._C._functorch._add_batch_dim
    wrapper: torch.Tensor = add(tensor, 0, level.number)
    return wrapper


def unbatched(tensor: torch.Tensor, level: Level) -> torch.Tensor:
    """Return the tensor with its batch in front.

    The batch has one element if `tensor` is not batched at this level.
    """
    if level.older:
        batch: torch.Tensor = torch._remove_batch_dim(tensor, level.number, 1, 0)
        return batch
    value, dim = torch._C._functorch._unwrap_batched(tensor, level.number)
    return value.unsqueeze(0) if dim is None else value.movedim(dim, 0)


def levels_of(tensors: Sequence[torch.Tensor | None]) -> tuple[Level, ...]:
    """Return the vmaps that any of `tensors` is batched over, outermost first.

    Raises:
        TypeError: a tensor belongs to a transform that is not vmap.
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
                    "call the pool inside the function that is transformed"
                )
            number = level_of(tensor)
            numbers.add(number)
            tensor, _ = torch._C._functorch._unwrap_batched(tensor, number)
        older = older or (tensor is not None and is_batched_the_older_way(tensor))
    levels = [Level(number, False) for number in sorted(numbers)]
    if older:
        # The engine's threads for devices do not count such levels. But there is one: the one in
        # which `torch.autograd.grad` was called.
        levels += [Level(1 + number, True) for number in range(max(1, older_levels()))]
    return tuple(levels)


def without(tensors: Sequence[torch.Tensor], levels: tuple[Level, ...]) -> list[torch.Tensor]:
    """Return `tensors` with their batches as ordinary dimensions in front, outermost first.

    All of them get the same batch dimensions.
    """
    plain = list(tensors)
    for level in reversed(levels):
        plain = [unbatched(tensor, level) for tensor in plain]
        size = max(tensor.shape[0] for tensor in plain)
        plain = [tensor.expand(size, *tensor.shape[1:]) for tensor in plain]
    return plain


def within(tensor: torch.Tensor, levels: tuple[Level, ...]) -> torch.Tensor:
    """Return the wrapper for a tensor with batch dimensions in front."""
    for level in levels:
        tensor = batched(tensor, level)
    return tensor


def over(
    levels: tuple[Level, ...],
    fn: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Compute `fn(tensors)` under one vmap per level, over the leading dimensions.

    The results also have their batches in front.
    """
    if not levels:
        return list(fn(tensors))
    present: list[bool] = []

    def part(*slices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = over(levels[1:], fn, slices)
        present[:] = [tensor is not None for tensor in found]
        # A vmap has to return something.
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


# In the body of this context, autocast is off, so copies keep their dtype:
without_autocast: Callable[[], contextlib.AbstractContextManager[object]] = (
    torch._C._DisableAutocast
)


def saved_tensor_hooks() -> (
    tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
):
    """Return the innermost `saved_tensors_hooks` of this thread, which are the ones that apply."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Run the body without hooks, as in a new thread."""
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
    """Return what records this thread's operations instead of only running them.

    It would not see a worker's operations.
    """
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
)  # PyTorch's modes that only observe; the module's name if all of its modes do
# A checkpoint with a policy is ignored, because stored and recomputed values are the same.
UNNOTICED = "mpgrad.", "torch.utils.checkpoint._Cach"
CLONES = "torch.autograd.graph._CloneArgBeforeMutateMode"


def name_of_mode(mode: object) -> str:
    """Return the mode's name, as its user writes it."""
    name = f"{type(mode).__module__}.{type(mode).__qualname__}"
    return (
        "torch.autograd.graph.allow_mutation_on_saved_tensors"
        if name == CLONES
        else name.replace("._Flop", ".Flop")
    )


def is_observer(mode: object) -> bool:
    """Return whether the mode is known to change no values."""
    return name_of_mode(mode).startswith(OBSERVERS)


def gives_device(mode: object) -> bool:
    return name_of_mode(mode) == "torch.utils._device.DeviceContext"


DISPATCH_MODES: Any = _get_current_dispatch_mode_stack


def function_modes() -> list[Any]:
    """Return the function modes of this thread, the innermost last."""
    stack: Any = torch.overrides._get_current_function_mode_stack
    return list(stack()) if torch._C._len_torch_function_stack() else []


def foreign_modes() -> list[Any]:
    """Return the modes of this thread that a worker does not know.

    The mode of a default device is not among them.
    """
    found = [mode for mode in function_modes() if not gives_device(mode)]
    if torch._C._len_torch_dispatch_stack():
        found += DISPATCH_MODES()
    return (
        [mode for mode in found if not name_of_mode(mode).startswith(UNNOTICED)] if found else found
    )


def parametrizations_are_cached() -> bool:
    """Return whether a `torch.nn.utils.parametrize.cached` is open."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled


def default_device() -> str | None:
    """Return the device of `torch.set_default_device` or ``with torch.device(...)`` in this
    thread."""
    for mode in reversed(function_modes()):
        if gives_device(mode):
            return str(mode.device)
    return None


@contextmanager
def under_default_device(name: str | None) -> Iterator[None]:
    """Run the body with this default device; None means without one, whatever was set before."""
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
    """Leave the modes that this process inherited from the thread that forked it."""
    pop_function_modes()
    if torch._C._len_torch_dispatch_stack():
        for mode in reversed(DISPATCH_MODES()):
            torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))


class NoGradRefusal(TorchFunctionMode):
    """The mode of `refusing_no_grad`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not args[0]:
            raise NotImplementedError(
                "forward mode follows what is computed under torch.no_grad, which has no derivative"
            )
        return func(*args, **(kwargs or {}))


def without_refusal() -> contextlib.AbstractContextManager[Any]:
    """Run mpgrad's own code within a function that runs under `refusing_no_grad`.

    Other function modes are also off.
    """
    guard: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return guard


# In this context for mpgrad's own code, no `__torch_function__` of a tensor's class is called.
without_subclasses: Callable[[], contextlib.AbstractContextManager[None]]
without_subclasses = torch._C.DisableTorchFunctionSubclass


def is_leaf_with_grad(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, of any class, is a leaf that requires gradients."""
    with without_subclasses():
        return tensor.is_leaf and tensor.requires_grad


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a `torch.Tensor` with the same memory, which autograd derives from `tensor`."""
    with without_subclasses(), torch.inference_mode(False), torch.enable_grad():
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """Set grad mode as `torch.set_grad_enabled` does, without the refusal."""
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
    """Make `torch.no_grad` raise in the body. Enter it with gradients on."""
    # A task in the caller's thread may run in `without_refusal`.
    with torch._C._EnableTorchFunction(), NoGradRefusal():
        yield


# --- the memory of tensors; modules and scripts that are rebuilt

SHARED_STORAGE: Any = torch.UntypedStorage  # its private names are not in torch's type hints


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Make shared memory, mapped as torch.multiprocessing maps it.

    torch itself opens a file in /dev/shm. In a container this is often limited to 64 MiB, and
    writing beyond the limit raises SIGBUS. An anonymous memory file has no such limit, and no name
    that could be left behind.
    """
    descriptor = anonymous_memory()
    try:
        os.truncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return storage_from_descriptor(descriptor, nbytes)


def storage_from_descriptor(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Map shared memory by its file descriptor, as torch.multiprocessing does, and close
    `descriptor`."""
    try:
        storage: torch.UntypedStorage = SHARED_STORAGE._new_shared_fd_cpu(descriptor, nbytes)
        return storage
    finally:
        os.close(descriptor)  # torch keeps its own duplicate


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """Return the file descriptor of shared memory. The storage still owns it."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)


KEYS_OF: Any = torch._C._dispatch_keys
with torch.inference_mode(False):
    PLAIN_KEYS = KEYS_OF(torch.empty(0, device="cpu")).raw_repr()


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements are stored in the CPU's memory as they are.

    This excludes stand-ins and sparse, quantized or conjugated tensors.
    """
    return bool(KEYS_OF(tensor).raw_repr() == PLAIN_KEYS)


def have_plain_memory(tensors: Sequence[torch.Tensor]) -> bool:
    return {KEYS_OF(tensor).raw_repr() for tensor in tensors} == {PLAIN_KEYS}


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Copy the elements of the tensors, which have one dtype, one after another into one tensor."""
    dims = {tensor.dim() for tensor in tensors}
    if dims == {1}:
        return torch.cat(tensors)
    return torch.stack(tensors) if dims == {0} else torch._C._nn.flatten_dense_tensors(tensors)


def replica_of(network: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> torch.nn.Module:
    """Make a module like `network` with other tensors, which are given by the id of the old ones.

    Buffers that are not given stay the same.
    """
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
                # It becomes a plain attribute, because it is not a leaf and so cannot be a
                # parameter.
                setattr(replica, name, tensors[id(parameter)])
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else tensors.get(id(buffer), buffer)
    return copies[id(network)]  # type: ignore[no-any-return]


load_archive: Any = torch.jit.load  # PyTorch's original, even where `torch.jit.load` is replaced


def load_script(code: bytes) -> torch.jit.ScriptModule:
    """Load a scripted module or function that `save_to_buffer` has saved."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)  # the caller saw it when scripting
        module: torch.jit.ScriptModule = load_archive(io.BytesIO(code))
    return module


def pytree_node(kind: type) -> tuple[Any, ...] | None:
    """Return the functions by which the class is registered as a pytree; None if it is not."""
    node = SUPPORTED_NODES.get(kind)
    return node and (node.flatten_fn, node.unflatten_fn, node.flatten_with_keys_fn)


def set_pytree_node(kind: type, functions: tuple[Any, ...]) -> None:
    """Register the class as a pytree, perhaps with other functions than before."""
    flatten, unflatten, with_keys = functions
    forget_pytree_node(kind)  # it refuses to register one again
    register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def forget_pytree_node(kind: type) -> None:
    """Undo `set_pytree_node`, in the tables for serialization and for optree too."""
    SUPPORTED_NODES.pop(kind, None)
    known: Any = SUPPORTED_SERIALIZED_TYPES.pop(kind, None)
    by_name: Any = SERIALIZED_TYPE_TO_PYTHON_TYPE
    if known is not None and by_name.get(known.serialized_type_name) is kind:
        del by_name[known.serialized_type_name]  # classes without a name share an entry
    waiting: list[Any] = _cxx_pytree_pending_imports
    waiting[:] = [each for each in waiting if each[0][0] is not kind]
    if "torch.utils._cxx_pytree" in sys.modules:
        optree: Any = sys.modules["optree"]
        with contextlib.suppress(ValueError):  # it is not registered there
            optree.unregister_pytree_node(kind, namespace="torch")


def parametrize_again(module: Any, state: dict[str, Any]) -> None:
    """Give a module the state of a parametrized one, and a class for it.

    This class computes the tensors from their parametrizations.
    """
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)


# --- `torch.compile`: its results, their options, and code that it must leave alone

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(fn: Callable[P, T]) -> Callable[P, T]:
    """Make `torch.compile` break its graph at `fn`, and leave the functions that `fn` calls alone.

    The compiler is not loaded for this.

    `fn` is public: its exceptions show the caller's frames.
    """

    disabled: Callable[P, T] | None = None  # made once, because that takes 4 us

    @functools.wraps(fn)
    def uncompiled(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        try:
            if disabled is None:
                # Another thread may be importing the compiler.
                disable: Any = getattr(sys.modules.get("torch._dynamo"), "disable", None)
                if disable is None:
                    return fn(*args, **kwargs)
                disabled = disable(fn)
            run: Callable[P, T] = disabled
            return run(*args, **kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise

    uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
    uncompiled._torchdynamo_disable_msg = "it runs in other processes"  # type: ignore[attr-defined]
    never_compile(uncompiled.__code__)  # type: ignore[attr-defined]
    return uncompiled


def run_as_is(function: F) -> F:
    """Make the compiler leave alone a function that the engine calls, and everything it calls.

    While a compiled function calls a backward, the compiler would otherwise compile the parts of
    that backward.
    """
    never_compile(function.__code__, and_callees=True)
    return function


def never_compile(code: types.CodeType, and_callees: bool = False) -> None:
    """Make the compiler leave frames of `code` alone.

    If that is not possible, it compiles them, which is slow but correct.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if all(
        hasattr(frames, name)
        for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
    ):
        action = frames._FrameAction
        of_callees = action.SKIP if and_callees else action.DEFAULT
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, of_callees))


def made_by_compiler(function: types.FunctionType) -> bool:
    """Return whether `torch.compile` or `torch.compiler.disable` made the function.

    A wrapper that got its marks from functools.wraps does not count.
    """
    maker = function.__globals__.get("__name__")
    return maker in COMPILERS and "_torchdynamo_orig_callable" in vars(function)


def is_optimized(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile(module)` made the module."""
    return "dynamo_ctx" in vars(module)


COMPILERS = ("torch._dynamo.eval_frame", "torch._dynamo.external_utils")


def compiler_context(compiled: Any) -> Any:
    """Return the object with which `torch.compile` wrapped a function or module; None without
    one."""
    if isinstance(compiled, torch.nn.Module):
        return vars(compiled).get("dynamo_ctx")
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    held = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    return next((each for each in held if isinstance(each, dynamo._TorchDynamoContext)), None)


def before_compiler(made: Any) -> Any:
    """Return the object that was passed to `torch.compile` or `torch.compiler.disable`."""
    return made._orig_mod if isinstance(made, torch.nn.Module) else made._torchdynamo_orig_callable


def disabling(made: Any) -> dict[str, Any]:
    """Return the arguments of `torch.compiler.disable` that made `made`."""
    context = compiler_context(made)
    if context is None:  # without `recursive` PyTorch needs none
        return {"recursive": False, "reason": made._torchdynamo_disable_msg}
    return {"recursive": True, "reason": context.msg}


def compiled_in_place(module: torch.nn.Module) -> Any:
    """Return what `module.compile()` has put into a module; None if it was not called.

    The state of the module does not contain it.
    """
    return vars(module).get("_compiled_call_impl")


def compile_in_place(module: Any, wrap: Callable[[Any], Any]) -> None:
    """Do what `module.compile()` does, with `wrap` instead of the compiler."""
    module._compiled_call_impl = wrap(module._call_impl)


def compiler_options(context: Any) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` that made `context`, except the defaults.

    It returns None for a context of `disable`.
    """
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
        # only later versions have these
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
    """Return what a layer around a backend calls; None for the backend itself.

    The name is that of versions up to 2.8.
    """
    attributes = getattr(layer, "__dict__", {})
    return attributes.get("_torchdynamo_orig_backend", attributes.get("_torchdynamo_orig_callable"))


def backend_options(backend: Any) -> dict[str, Any]:
    """Return the arguments of `torch.compile` that one of PyTorch's backends represents."""
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
    # PyTorch's own backend may not be a function, but it is known by its name.
    own = module.partition(".")[0] == "torch"
    return {
        "backend": backend.compiler_name if own else function,
        "mode": None,
        "options": None,
        **backend.kwargs,
    }
