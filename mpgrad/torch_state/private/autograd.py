"""Nodes and graphs of autograd, and the backward that runs through them."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = [
    "NODE_IN_PYTHON",
    "CallCounter",
    "apply",
    "current_graph_task",
    "edge_that_keeps",
    "gradients",
    "graph_is_kept",
    "is_alive",
    "is_held",
    "leaf_will_run",
    "node_type",
    "plus",
    "set_priority",
    "wait_for_devices",
    "when_backward_ends",
    "will_run",
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
