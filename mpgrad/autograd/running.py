"""The backwards of PyTorch's engine that run: what each leaves behind when it ends, fails or is
interrupted. Caller only."""

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
    """A backward of the engine that runs: the engine holds this as long, and no longer, also if it
    fails or is interrupted.

    What it leaves behind then is work that nobody waits for; and, of one that is differentiable,
    gradients with a history that leads back to the graph which keeps them: Python's collector does
    not see a cycle through the engine's nodes.
    """

    def __init__(self, graph_task: int) -> None:
        self.graph_task = graph_task
        self.graphs: list[weakref.ref[RemoteGraph]] = []
        self.cancels: list[CancelBackward] = []
        # unless it comes to its end, or to what the backward of a call raised
        self.was_interrupted = True

    def __call__(self) -> None:
        """The engine calls it where the backward has not failed; then all has been taken."""
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
    """The backward with this number, which runs in this thread."""
    backward = RUNNING.get(graph_task)
    if backward is None:
        backward = RUNNING[graph_task] = RunningBackward(graph_task)
        when_backward_ends(backward)
    return backward


def forget_at_end_of_backward(graph: RemoteGraph, graph_task: int) -> None:
    """What its gates have not taken by then nobody will take."""
    running(graph_task).graphs.append(weakref.ref(graph))


def cancel_if_interrupted(graph_task: int, cancel: CancelBackward) -> None:
    """Gradients are about to be sent for this backward."""
    if graph_task in RUNNING or graph_task == current_graph_task():
        backward = running(graph_task)
        if cancel not in backward.cancels:
            backward.cancels.append(cancel)


@contextmanager
def backward_without_engine(graph_task: int) -> Iterator[None]:
    """What is sent within it, with this number, is cancelled if it is interrupted."""
    backward = RUNNING[graph_task] = RunningBackward(graph_task)
    try:
        yield
        backward()
    finally:
        del backward  # the traceback may live on


def note_failure(graph_task: int) -> None:
    """The backward of a call has raised, which ends the one with this number: nobody has
    interrupted that."""
    backward = RUNNING.get(graph_task)
    if backward is not None:
        backward.was_interrupted = False
