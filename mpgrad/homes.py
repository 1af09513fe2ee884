"""Where the autograd nodes of an operation find its graphs, and the replies that its gates wait for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from mpgrad.autograd import Order, RemoteGraph
from mpgrad.batching import Level
from mpgrad.carrier import REQUIRES_GRAD, TensorRef, view
from mpgrad.errors import raised_again, warned_again
from mpgrad.messages import Failure, Warned
from mpgrad.operations import SharedFunction

__all__ = ["Carrier", "GradientReply", "OperationHome"]


Outcome = tuple[Sequence[TensorRef | None], memoryview, dict[int, memoryview]]


class GradientReply:
    """The answer to one backward, or to one request for capture gradients."""

    __slots__ = ("_outcome", "_subject", "_wait_until", "_worker", "graph", "warned")

    def __init__(self, wait_until: Callable[[Callable[[], bool]], bool], worker: int, index: int | None) -> None:
        self._wait_until = wait_until
        self._worker = worker
        self._subject = "" if index is None else f"item {index}, "
        # an exception is made anew for whoever asks: one that is kept would keep, in its traceback, what keeps it
        self._outcome: Outcome | Callable[[], BaseException] | None = None
        self.graph: RemoteGraph | None = None
        self.warned: Sequence[Warned] = ()  # of all the backwards that travelled with this one

    @property
    def arrived(self) -> bool:
        return self._outcome is not None

    def arrive(
        self, found: Sequence[TensorRef | None] | Failure, payload: memoryview, memories: dict[int, memoryview]
    ) -> None:
        if isinstance(found, Failure):
            again = found.error, found.traceback, found.phase, self._subject, self._worker
            self._outcome = lambda: raised_again(*again)
        else:
            self._outcome = found, payload, memories

    def fail(self, error: BaseException) -> None:
        self._outcome = lambda: copy.copy(error)

    def gradients(self) -> list[torch.Tensor | None]:
        found, payload, memories = self._wait()
        return [None if ref is None else view(ref, payload, lambda ref: memories[ref.place]) for ref in found]

    def connected(self) -> list[int]:
        found, _, _ = self._wait()
        return [place for place, ref in enumerate(found) if ref is not None and ref.flags & REQUIRES_GRAD]

    def _wait(self) -> Outcome:
        if self._outcome is None:
            self._wait_until(lambda: self.arrived)
        outcome = self._outcome
        warned, self.warned = self.warned, ()
        for each in warned:
            warned_again(*each)
        if callable(outcome):
            raise outcome()
        assert outcome is not None
        return outcome


class Carrier(Protocol):
    """What a home needs of the scheduler. Workers are opaque here."""

    def send_gradients(self, graph: RemoteGraph, order: Order) -> GradientReply: ...

    def request_captures(self, worker: Any, function: int, task: int, levels: tuple[Level, ...]) -> GradientReply: ...

    def release(self, graph: RemoteGraph) -> None: ...


class OperationHome:
    """Where the graphs of one operation live (`autograd.Home`); keeps the function that they share."""

    def __init__(self, carrier: Carrier, function: SharedFunction, deterministic: bool) -> None:
        self._carrier = carrier
        self._function = function
        self.deterministic = deterministic
        # backward -> who adds up what, in the order they were first asked
        self._contributors: dict[int, dict[tuple[object, tuple[Level, ...]], None]] = {}

    def send_gradients(self, graph: RemoteGraph, order: Order) -> GradientReply:
        if order.captures and not order.apart:
            self._contributors.setdefault(order.task, {})[graph.worker, order.levels] = None
        return self._carrier.send_gradients(graph, order)

    def capture_gradients(self, task: int) -> Iterator[tuple[tuple[Level, ...], Sequence[torch.Tensor | None]]]:
        asked = [
            (levels, self._carrier.request_captures(worker, self._function.number, task, levels))
            for worker, levels in self._contributors.pop(task, {})
        ]
        for levels, reply in asked:
            yield levels, reply.gradients()

    def release(self, graph: RemoteGraph) -> None:
        self._carrier.release(graph)
