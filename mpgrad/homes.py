"""Where the autograd nodes of an operation find its graphs, and the replies that its gates wait for."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mpgrad.arena import Borrowed, Slot
from mpgrad.autograd import Grads, Order, Promise, RemoteGraph, forget_oldest
from mpgrad.batching import Level
from mpgrad.carrier import REQUIRES_GRAD, Packer, Placed, TensorRef, placed_again, staged_again, view
from mpgrad.errors import InternalError, WorkerDiedError, raised_again, warned_again
from mpgrad.messages import Failure, Warned
from mpgrad.packing import SharedFunction

__all__ = ["Carrier", "GradientReply", "OperationHome"]

Outcome = tuple[Sequence[TensorRef | None], memoryview, dict[int, Borrowed | Slot]]


class GradientReply:
    """The answer to one backward, or to one request for capture gradients."""

    __slots__ = ("_outcome", "_subject", "_wait_until", "apart", "dependents", "graph", "warned")

    def __init__(self, wait_until: Callable[[Callable[[], bool]], bool], index: int | None) -> None:
        self._wait_until = wait_until
        self._subject = "" if index is None else f"item {index}, "
        # an exception is made anew for whoever asks: one that is kept would keep, in its traceback, what keeps it
        self._outcome: Outcome | Callable[[], BaseException] | None = None
        self.dependents: list[Callable[[], None]] = []  # of the scheduling thread: to be told when it is there
        self.apart = False  # the captures' gradients come here, though they were to be added up in the worker
        self.graph: RemoteGraph | None = None
        self.warned: Sequence[Warned] = ()  # of all the backwards that travelled with this one

    @property
    def arrived(self) -> bool:
        return self._outcome is not None

    def arrive(
        self,
        found: Sequence[TensorRef | None] | Failure,
        payload: memoryview,
        memories: dict[int, Borrowed | Slot],
        worker: int,
    ) -> None:
        if isinstance(found, Failure):
            again = found.error, found.traceback, found.phase, self._subject, worker
            self._arrived(lambda: raised_again(*again))
        else:
            self._arrived((found, payload, memories))

    def fail(self, error: BaseException) -> None:
        self._arrived(lambda: copy.copy(error))

    def fail_as(self, other: GradientReply) -> None:
        """Of the gradients that were needed here, `other` has none, but an error."""
        assert callable(other._outcome)
        self._arrived(other._outcome)

    def _arrived(self, outcome: Outcome | Callable[[], BaseException]) -> None:
        self._outcome = outcome
        dependents, self.dependents = self.dependents, []
        for tell in dependents:
            tell()

    def passed_on(self, place: int, staged_by: Packer | None = None) -> Placed | None:
        """One of the gradients, for another worker; `staged_by`: for one that can read the CPU's memory only."""
        assert self._outcome is not None and not callable(self._outcome)
        found, payload, memories = self._outcome
        ref = found[place]
        if ref is None:
            return None
        return placed_again(ref, payload, memories) if staged_by is None else staged_again(staged_by, ref, payload, memories)

    @property
    def has_failed(self) -> bool:
        return callable(self._outcome)

    def take_warnings(self) -> Sequence[Warned]:
        warned, self.warned = self.warned, ()
        return warned

    def gradients(self) -> list[torch.Tensor | None]:
        found, payload, memories = self._wait()
        return [None if ref is None else view(ref, payload, lambda ref: memories[ref.place].memory) for ref in found]

    def wait(self) -> None:
        """Raises what the backward raised."""
        self._wait()

    def connected(self) -> list[int]:
        found, _, _ = self._wait()
        return [place for place, ref in enumerate(found) if ref is not None and ref.flags & REQUIRES_GRAD]

    def _wait(self) -> Outcome:
        if self._outcome is None:
            self._wait_until(lambda: self.arrived)
        outcome = self._outcome
        for each in self.take_warnings():
            warned_again(*each)
        if callable(outcome):
            raise outcome()
        assert outcome is not None
        return outcome


class Carrier(Protocol):
    """What a home needs of the scheduler. Workers are opaque here."""

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads, again: bool = False) -> GradientReply: ...

    def request_captures(
        self, worker: Any, function: int, task: int, levels: tuple[Level, ...], timeout: float | None
    ) -> GradientReply: ...

    def release(self, graph: RemoteGraph) -> None: ...


class Contribution(NamedTuple):
    """A backward whose gradients of the captures are added up where it runs."""

    graph: weakref.ref[RemoteGraph]  # the engine holds it; a backward that fails leaves this behind
    order: Order
    grads: Grads
    reply: GradientReply


class OperationHome:
    """Where the graphs of one operation live (`autograd.Home`); keeps the function that they share."""

    def __init__(self, carrier: Carrier, function: SharedFunction, deterministic: bool, timeout: float | None) -> None:
        self.carrier = carrier
        self._function = function
        self.deterministic = deterministic
        self.timeout = timeout  # seconds for each call
        # backward -> who adds up what, in the order they were first asked
        self._contributions: dict[int, dict[tuple[object, tuple[Level, ...]], list[Contribution]]] = {}

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads) -> GradientReply:
        worker = graph.worker
        reply = self.carrier.send_gradients(graph, order, grads)
        if order.captures and not order.apart:
            sums = self._contributions.setdefault(order.task, {})
            forget_oldest(self._contributions)
            sums.setdefault((worker, order.levels), []).append(Contribution(weakref.ref(graph), order, grads, reply))
        return reply

    def capture_gradients(self, task: int) -> Iterator[tuple[tuple[Level, ...], Sequence[torch.Tensor | None]]]:
        request = self.carrier.request_captures
        sums = self._contributions.pop(task, {})
        for each in itertools.chain(*sums.values()):
            if any(isinstance(part, Promise) for parts in each.grads for part in parts):
                each.reply.wait()  # only now it has gone to its worker; the others go there before the request does
        asked = [
            (levels, contributions, request(worker, self._function.number, task, levels, self.timeout))
            for (worker, levels), contributions in sums.items()
        ]
        for levels, contributions, reply in asked:
            for each in contributions:
                each.reply.wait()  # raises what it raised
            lost: list[Contribution] = []
            try:
                if found := reply.gradients():
                    yield levels, found
            except WorkerDiedError:
                lost = [each for each in contributions if not each.reply.apart]
            again = list(map(self._send_apart, lost))
            for order, own in [*((each.order, each.reply) for each in contributions if each.reply.apart), *again]:
                yield levels, own.gradients()[len(order.wanted) :]

    def _send_apart(self, lost: Contribution) -> tuple[Order, GradientReply]:
        """Once more, of a backward that was done: its part of the sum was lost with the worker."""
        graph = lost.graph()
        if graph is None:
            raise InternalError("a graph ended before its backward")
        order = lost.order._replace(wanted=(), apart=True)
        return order, self.carrier.send_gradients(graph, order, lost.grads, again=True)

    def release(self, graph: RemoteGraph) -> None:
        self.carrier.release(graph)
