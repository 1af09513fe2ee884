"""The running backwards of PyTorch's engine, and what is done when one ends, fails or is
interrupted. This module runs in the caller only."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.errors import contextmanager
from mpgrad.torch_state.private import current_graph_task, when_backward_ends

__all__ = [
    "backward_without_engine",
    "cancel_if_interrupted",
    "forget_at_end_of_backward",
    "note_failure",
]


# cancels what was sent for the backward with this number; called from finalizers
CancelBackward = Callable[[int], None]


class RunningBackward:
    """A running backward of the engine. The engine holds this object until the backward ends, even
    if it fails or is interrupted.

    An interrupted backward leaves work that nobody waits for. A differentiable backward leaves
    gradients with a history that leads back to the graph which keeps them. Python's garbage
    collector does not see a cycle through the engine's nodes.
    """

    def __init__(self, graph_task: int) -> None:
        self.graph_task = graph_task
        self.graphs: list[weakref.ref[RemoteGraph]] = []
        self.cancels: list[CancelBackward] = []
        # false if it came to its end, or failed because the backward of a call raised
        self.was_interrupted = True

    def __call__(self) -> None:
        """The engine calls this if the backward has not failed. Gates have taken all gradients."""
        self.was_interrupted = False

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if python_ends():
            return
        for ref in self.graphs:
            if (graph := ref()) is not None:
                graph.forget(self.graph_task)
        if self.was_interrupted:
            for cancel in self.cancels:
                cancel(self.graph_task)


RUNNING: weakref.WeakValueDictionary[int, RunningBackward] = weakref.WeakValueDictionary()


def running(graph_task: int) -> RunningBackward:
    """Return the backward with this number, which runs in this thread."""
    backward = RUNNING.get(graph_task)
    if backward is None:
        backward = RUNNING[graph_task] = RunningBackward(graph_task)
        when_backward_ends(backward)
    return backward


def forget_at_end_of_backward(graph: RemoteGraph, graph_task: int) -> None:
    """Have the graph forget gradients that its gates have not taken when the backward ends."""
    running(graph_task).graphs.append(weakref.ref(graph))


def cancel_if_interrupted(graph_task: int, cancel: CancelBackward) -> None:
    """Have `cancel` called if this backward is interrupted. Call this before gradients are sent."""
    if graph_task in RUNNING or graph_task == current_graph_task():
        backward = running(graph_task)
        if cancel not in backward.cancels:
            backward.cancels.append(cancel)


@contextmanager
def backward_without_engine(graph_task: int) -> Iterator[None]:
    """Cancel everything that is sent within it, with this number, if it is interrupted."""
    backward = RUNNING[graph_task] = RunningBackward(graph_task)
    try:
        yield
        backward()
    finally:
        del backward  # the traceback may live on


def note_failure(graph_task: int) -> None:
    """Note that the backward with this number fails because the backward of a call has raised, and
    not because it was interrupted."""
    backward = RUNNING.get(graph_task)
    if backward is not None:
        backward.was_interrupted = False
