"""Where the autograd nodes of an operation find its graphs, and the replies that its gates wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mpgrad.autograd import Grads, RemoteGraph
from mpgrad.carrier import TensorRef, view
from mpgrad.errors import raised_again
from mpgrad.messages import Failure
from mpgrad.operations import SharedFunction

__all__ = ["Carrier", "GradientReply", "OperationHome"]


class GradientReply:
    """The answer to one backward, or to one request for capture gradients."""

    __slots__ = ("_outcome", "_subject", "_wait_until", "_worker")

    def __init__(self, wait_until: Callable[[Callable[[], bool]], bool], worker: int, index: int | None) -> None:
        self._wait_until = wait_until
        self._worker = worker
        self._subject = "" if index is None else f"item {index}, "
        self._outcome: tuple[Sequence[TensorRef | None], memoryview, dict[int, memoryview]] | BaseException | None = None

    @property
    def arrived(self) -> bool:
        return self._outcome is not None

    def arrive(
        self, found: Sequence[TensorRef | None] | Failure, payload: memoryview, memories: dict[int, memoryview]
    ) -> None:
        if isinstance(found, Failure):
            self._outcome = raised_again(found.error, found.traceback, found.phase, self._subject, self._worker)
        else:
            self._outcome = found, payload, memories

    def fail(self, error: BaseException) -> None:
        self._outcome = error

    def gradients(self) -> list[torch.Tensor | None]:
        if self._outcome is None:
            self._wait_until(lambda: self.arrived)
        outcome = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(None)
        assert outcome is not None
        found, payload, memories = outcome
        return [None if ref is None else view(ref, payload, lambda ref: memories[ref.place]) for ref in found]


class Carrier(Protocol):
    """What a home needs of the scheduler. Workers are opaque here."""

    def send_gradients(
        self, graph: RemoteGraph, task: int, keep: bool, wanted: tuple[int, ...], captures: bool, grads: Grads
    ) -> GradientReply: ...

    def request_captures(self, worker: Any, function: int, task: int) -> GradientReply: ...

    def release(self, graph: RemoteGraph) -> None: ...


class OperationHome:
    """Where the graphs of one operation live (`autograd.Home`); keeps the function that they share."""

    def __init__(self, carrier: Carrier, function: SharedFunction) -> None:
        self._carrier = carrier
        self._function = function
        self._contributors: dict[int, dict[object, None]] = {}  # backward -> workers, in the order they were first asked

    def send_gradients(
        self, graph: RemoteGraph, task: int, keep: bool, wanted: tuple[int, ...], captures: bool, grads: Grads
    ) -> GradientReply:
        if captures:
            self._contributors.setdefault(task, {})[graph.worker] = None
        return self._carrier.send_gradients(graph, task, keep, wanted, captures, grads)

    def capture_gradients(self, task: int) -> Grads:
        workers = self._contributors.pop(task, {})
        replies = [self._carrier.request_captures(worker, self._function.number, task) for worker in workers]
        total: list[torch.Tensor | None] = [None] * len(self._function.differentiable)
        for reply in replies:
            for number, grad in enumerate(reply.gradients()):
                held = total[number]
                total[number] = grad if held is None else held if grad is None else held + grad
        return total

    def release(self, graph: RemoteGraph) -> None:
        self._carrier.release(graph)
