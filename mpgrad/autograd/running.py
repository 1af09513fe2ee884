"""The backwards that run: what is left of one that fails, and what nobody waits for after an interrupt."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.errors import contextmanager
from mpgrad.torch_state.private import current_graph_task, when_backward_ends

__all__ = ["backward_without_engine", "call_off_if_interrupted", "forget_at_end_of_backward", "note_failure"]


class Sender(Protocol):
    """By which gradients are sent."""

    def call_off_backward(self, graph_task: int) -> None:
        """Nobody waits any more for what was sent for the backward with this number. Called from finalizers."""
        ...


class Backward:
    """One that is running: the engine holds this as long, and no longer, also if it fails or is interrupted.

    What it leaves behind then is work that nobody waits for; and, of one that is differentiable, gradients with a history
    that leads back to the graph which keeps them: Python's collector does not see a cycle through the engine's nodes.
    """

    def __init__(self, graph_task: int) -> None:
        self.graph_task = graph_task
        self.graphs: list[weakref.ref[RemoteGraph]] = []
        self.senders: list[Sender] = []
        self.was_interrupted = True  # unless it comes to its end, or to what the backward of a call raised

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
            for sender in self.senders:
                sender.call_off_backward(self.graph_task)


RUNNING: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()


def running(graph_task: int) -> Backward:
    """The backward with this number, which runs in this thread."""
    backward = RUNNING.get(graph_task)
    if backward is None:
        backward = RUNNING[graph_task] = Backward(graph_task)
        when_backward_ends(backward)
    return backward


def forget_at_end_of_backward(graph: RemoteGraph, graph_task: int) -> None:
    """What its gates have not taken by then nobody will take."""
    running(graph_task).graphs.append(weakref.ref(graph))


def call_off_if_interrupted(graph_task: int, sender: Sender) -> None:
    """The sender is about to send gradients for this backward."""
    if graph_task in RUNNING or graph_task == current_graph_task():
        backward = running(graph_task)
        if sender not in backward.senders:
            backward.senders.append(sender)


@contextmanager
def backward_without_engine(graph_task: int) -> Iterator[None]:
    """What is sent within it, with this number, is called off if it is interrupted."""
    backward = RUNNING[graph_task] = Backward(graph_task)
    try:
        yield
        backward()
    finally:
        del backward  # the traceback may live on


def note_failure(graph_task: int) -> None:
    """The backward of a call has raised, which ends the one with this number: nobody has interrupted that."""
    backward = RUNNING.get(graph_task)
    if backward is not None:
        backward.was_interrupted = False
