"""Nodes and graphs of autograd, and the backward that runs through them; and what stands for other
tensors there: those of `torch.func` and of vmap, which stand for a batch or are followed by a
transform, and those of forward mode.

Both sides; in three parts: nodes and backwards, transforms and forward mode, levels of vmap.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpgrad.errors import contextmanager

__all__ = [
    "NODE_IN_PYTHON",
    "CallCounter",
    "apply",
    "batched",
    "current_graph_task",
    "dual_level_is_active",
    "dual_level_kept",
    "edge_that_keeps",
    "gradients",
    "graph_is_kept",
    "has_ended",
    "has_tangent",
    "is_alive",
    "is_batched",
    "is_batched_the_older_way",
    "is_functorch_wrapped",
    "is_held",
    "known_to_torch_func",
    "leaf_will_run",
    "level_count",
    "level_of",
    "node_type",
    "older_levels",
    "outside_transforms",
    "plus",
    "set_priority",
    "transforms_are_active",
    "unbatched",
    "unbatched_the_older_way",
    "vmap_levels",
    "vmap_the_older_way",
    "wait_for_devices",
    "when_backward_ends",
    "will_run",
    "within_dual_level",
    "without_tangents",
]

ENGINE: Any = torch.autograd.Variable._execution_engine
NODE_IN_PYTHON: Any = torch._C._FunctionBase


# These are asked for every call and its backward, so they are PyTorch's own functions, without one of ours around them.
# The number of the backward that is running in this thread; -1 outside one:
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
# Whether the running backward was asked to keep the graph (`retain_graph` or `create_graph`):
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# Whether the running backward needs a node: false for what `torch.autograd.grad(inputs=...)` leaves out:
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def leaf_will_run(node: Any) -> bool:
    """`will_run` of a leaf's node, of which PyTorch refuses to say that `torch.autograd.grad` asked for it."""
    try:
        return will_run(node)
    except RuntimeError:
        return True


def when_backward_ends(callback: Callable[[], object]) -> None:
    """Have it called at the end of the backward that is running, if that does not fail before."""
    ENGINE.queue_callback(callback)


def is_alive(node: Any) -> bool:
    """Whether the engine can still find `node`: one that is written in Python may outlive what it stands for."""
    try:
        return node.next_functions is not None
    except RuntimeError:
        return False


def is_held(node: Any) -> bool:
    """Whether Python has hold of the leaf that `node` adds gradients to; otherwise nothing but graphs leads to it."""
    return references(node) > references_of_graphs()


def references(node: Any) -> int:
    return sys.getrefcount(node.variable)


@functools.cache
def references_of_graphs() -> int:
    """As many as `references` counts of a leaf that nobody has."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = (torch.zeros((), requires_grad=True, device="cpu") * 2).grad_fn
    return references(node.next_functions[0][0])


def edge_that_keeps(tensor: torch.Tensor) -> GradientEdge:
    """The edge to a tensor whose node is written in Python, and with it the graph behind."""
    if tensor.layout is torch.strided:
        edge = get_gradient_edge(tensor)
        if getattr(edge, "ownership_token", None) is not None:  # from torch 2.9 on, and made by way of a view
            return edge
    with torch.enable_grad():
        # of sparse tensors there are no views
        return get_gradient_edge(tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone())


def plus(held: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """`held + grad` as the engine adds gradients: torch adds a sparse tensor to a dense one, and not the other way round."""
    return held + grad if held.layout is torch.strided else grad + held


def gradients(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor],
    keep: bool,
    create: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad(outputs, inputs, grads, keep, create, allow_unused=True)` without its checks.

    Those cost as much as a small backward, and their first use imports sympy, which takes a fresh worker half a second.
    """
    found: tuple[torch.Tensor | None, ...] = ENGINE.run_backward(
        tuple(outputs), tuple(grads), keep, create, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply` without its care for `torch.func`, of whose tensors none comes here: a third of the cost."""
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def set_priority(node: Any, number: int) -> None:
    """Of the nodes that are ready, the engine runs the one with the highest number first; they are born counted up from 0."""
    node._set_sequence_nr(number)


def node_type(function: type[torch.autograd.Function]) -> Any:
    """The type of the nodes that `function` leaves in a graph."""
    return function._backward_cls


class CallCounter:
    """Counts calls of one of PyTorch's methods whose traces nothing in a graph shows, or only a walk through all of it."""

    def __init__(self, owner: type, name: str) -> None:
        self.count = 0
        self.is_watching = False
        self._owner = owner
        self._name = name

    def watch(self) -> None:
        """From here on, in a process that belongs to us."""
        method: Any = inspect.getattr_static(self._owner, self._name)
        in_c = isinstance(method, types.ClassMethodDescriptorType)  # `Function.apply` from torch 2.15 on
        function = functools.partial(call_class_method, method) if in_c else getattr(method, "__func__", method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        functools.update_wrapper(counted, method)
        bind = classmethod if in_c else type(method)
        setattr(self._owner, self._name, counted if method is function else bind(counted))
        self.is_watching = True


def call_class_method(method: types.ClassMethodDescriptorType, owner: type, *args: Any, **kwargs: Any) -> Any:
    return method.__get__(None, owner)(*args, **kwargs)


def wait_for_devices(tensors: Sequence[torch.Tensor | None]) -> None:
    """Wait until what this thread has devices compute for `tensors` is there.

    Between nodes on one device the engine sees to that itself, but not behind a node on the CPU.
    """
    for device in {tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()


# --- `torch.func` and forward mode


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a wrapper inside `torch.func.grad`, `vmap` and their like."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def has_ended(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the wrapper of a `torch.func.grad`, `vjp` or `jvp` that is over."""
    return bool(torch._C._functorch.is_dead_tensor_wrapper(tensor))  # type: ignore[attr-defined]


# Whether a `torch.func` transform is running in this thread; PyTorch's own function, for it is asked many times a call.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def dual_level_is_active() -> bool:
    """Whether forward-mode differentiation is on in this process (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def vmap_levels() -> frozenset[int]:
    """The numbers of the `torch.func.vmap`s that are running in this thread."""
    stack: Any = torch._C._functorch.get_interpreter_stack() or ()
    return frozenset(each.level() for each in stack if each.key() == torch._C._functorch.TransformType.Vmap)


def level_count() -> int:
    """How many transforms are running in this thread."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a dual tensor of the level that is active."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class SharedLevel:
    """There is one level of dual tensors for all threads of a process: the first one opens it, the last one closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._level = contextlib.ExitStack()
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Whoever is here can make dual tensors; where somebody else has opened a level, that one serves."""
        with self._lock:
            is_ours = self._count > 0 or not dual_level_is_active()
            if is_ours and self._count == 0:
                self._level.enter_context(forward_ad.dual_level())
                self._level.enter_context(known_to_torch_func())
            self._count += is_ours
        try:
            yield
        finally:
            with self._lock:
                self._count -= is_ours
                if is_ours and self._count == 0:
                    self._level.close()


@contextmanager
def known_to_torch_func() -> Iterator[None]:
    """A `torch.func.jvp` in the body takes the level of dual tensors that there is, and does not open a second one."""
    torch._functorch.eager_transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        torch._functorch.eager_transforms.JVP_NESTING -= 1


DUAL_LEVEL = SharedLevel()


@contextmanager
def within_dual_level() -> Iterator[None]:
    """Forward-mode differentiation is on in the body."""
    with forward_ad._set_fwd_grad_enabled(True), DUAL_LEVEL.entered():  # a function's own `jvp` runs with it off
        yield


@contextmanager
def dual_level_kept() -> Iterator[None]:
    """Around all that is made of dual tensors, with forward-mode differentiation off.

    Tensors that a graph has saved have their tangents for as long as there is a level. If another thread closed it while this
    one's backward takes them out, that would fail.
    """
    with forward_ad._set_fwd_grad_enabled(False), DUAL_LEVEL.entered():
        yield


def without_tangents() -> contextlib.AbstractContextManager[None]:
    """Forward-mode differentiation is off in the body, as it is in a Function's own forward and `jvp`."""
    return forward_ad._set_fwd_grad_enabled(False)


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Run the body as if no `torch.func` transform were running; only plain tensors may be used in it."""
    if not transforms_are_active():
        return NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    stack: contextlib.AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return stack


NOTHING = contextlib.nullcontext()  # one for all: this is asked several times a call


# --- levels of vmap


def is_batched(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def level_of(tensor: torch.Tensor) -> int:
    """The number of the innermost transform that it belongs to."""
    return int(torch._C._functorch.maybe_get_level(tensor))


def unbatched(tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """The batch that `tensor` stands for at this level, and the batch dimension; None where it is not batched there."""
    value, dim = torch._C._functorch._unwrap_batched(tensor, level)
    return value, dim


def batched(tensor: torch.Tensor, level: int, older: bool) -> torch.Tensor:
    """Let `tensor` stand for one element of its leading dimension."""
    add: Any = torch._add_batch_dim if older else torch._C._functorch._add_batch_dim
    wrapper: torch.Tensor = add(tensor, 0, level)
    return wrapper


# The vmap before torch.func; `torch.autograd.grad(is_grads_batched=True)` is what still uses it.


def is_batched_the_older_way(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def older_levels() -> int:
    """How many such vmaps are running in this thread."""
    count = int(torch._C._vmapmode_increment_nesting()) - 1
    torch._C._vmapmode_decrement_nesting()
    return count


def unbatched_the_older_way(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """The batch in front; a batch of one where `tensor` is not batched at this level."""
    batch: torch.Tensor = torch._remove_batch_dim(tensor, level, 1, 0)
    return batch


def vmap_the_older_way(fn: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    from torch._vmap_internals import _vmap

    mapped: Callable[..., tuple[torch.Tensor, ...]] = _vmap(fn)
    return mapped
