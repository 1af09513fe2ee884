"""The backwards that run: what is left of one that fails, and what nobody waits for after an interrupt."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Protocol

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.torch_state.private import graph_task, when_backward_ends

__all__ = ["backward_without_engine", "call_off_if_interrupted", "forget_at_end_of_backward", "note_failure"]


class Carrier(Protocol):
    """By which gradients are sent."""

    def call_off_backward(self, task: int) -> None:
        """Nobody waits any more for what was sent for the backward with this number. Called from finalizers."""
        ...


class Backward:
    """One that is running: the engine holds this as long, and no longer, also if it fails or is interrupted.

    What it leaves behind then is work that nobody waits for; and, of one that is differentiable, gradients with a history
    that leads back to the graph which keeps them: Python's collector does not see a cycle through the engine's nodes.
    """

    def __init__(self, task: int) -> None:
        self.task = task
        self.graphs: list[weakref.ref[RemoteGraph]] = []
        self.carriers: list[Carrier] = []
        self.was_interrupted = True  # unless it comes to its end, or to what the backward of a call raised

    def __call__(self) -> None:
        """The engine calls it where the backward has not failed; then all has been taken."""
        self.was_interrupted = False

    def __del__(self) -> None:
        for ref in self.graphs:
            if (graph := ref()) is not None:
                graph.forget(self.task)
        if self.was_interrupted:
            for carrier in self.carriers:
                carrier.call_off_backward(self.task)


RUNNING: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()


def running(task: int) -> Backward:
    """The backward with this number, which runs in this thread."""
    backward = RUNNING.get(task)
    if backward is None:
        backward = RUNNING[task] = Backward(task)
        when_backward_ends(backward)
    return backward


def forget_at_end_of_backward(graph: RemoteGraph, task: int) -> None:
    """What its gates have not taken by then nobody will take."""
    running(task).graphs.append(weakref.ref(graph))


def call_off_if_interrupted(task: int, carrier: Carrier) -> None:
    """The carrier is about to send gradients for this backward."""
    if task in RUNNING or task == graph_task():
        backward = running(task)
        if carrier not in backward.carriers:
            backward.carriers.append(carrier)


@contextlib.contextmanager
def backward_without_engine(task: int) -> Iterator[None]:
    """What is sent within it, with this number, is called off if it is interrupted."""
    backward = RUNNING[task] = Backward(task)
    try:
        yield
        backward()
    finally:
        del backward  # the traceback may live on


def note_failure(task: int) -> None:
    """The backward of a call has raised, which ends the one with this number: nobody has interrupted that."""
    backward = RUNNING.get(task)
    if backward is not None:
        backward.was_interrupted = False
