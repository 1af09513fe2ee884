"""Where the autograd nodes of an operation find its graphs, and the replies that its gates wait for."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mpgrad.autograd.remote_graph import Grads, Order, Promise, Reach, RemoteGraph, forget_oldest
from mpgrad.autograd.running import note_failure
from mpgrad.calls.delivered_gradients import DeliveredGradients, ReadyReply, factors_of, is_in_range, loss_gradients, scaled
from mpgrad.calls.output import Warnings, taken, warned_again
from mpgrad.calls.packing import SharedFunction
from mpgrad.errors import CallNames, InternalError, WorkerDiedError
from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.pickling.exceptions import one_more, raised_again
from mpgrad.torch_state.modes import Modes
from mpgrad.torch_state.vmap_levels import Level
from mpgrad.tracebacks import shown
from mpgrad.wire.messages import Failure
from mpgrad.wire.tensor_packing import Packer, Placed, placed_again, staged_again
from mpgrad.wire.tensor_refs import REQUIRES_GRAD, TensorRef, place_of, views

__all__ = ["GradientReply", "OperationHome", "Sender", "raised_from"]

EXAMINED = 4  # backwards of a map, for what gradient its losses get

Outcome = tuple[Sequence[TensorRef | None], memoryview, dict[int, Borrowed | Slot]]


class GradientReply:
    """The answer to one backward, or to one request for capture gradients."""

    __slots__ = (
        "_graph_task",
        "_outcome",
        "_wait_until",
        "apart",
        "calls",
        "dependents",
        "graph",
        "reached",
        "warned",
        "worker",
    )

    is_ready = False

    def __init__(
        self,
        wait_until: Callable[[Callable[[], bool]], bool],
        worker: object,
        graph_task: int | None = None,
    ) -> None:
        self._wait_until = wait_until
        self._graph_task = graph_task  # the backward that fails with it
        self.worker = worker  # in whose sum the captures' gradients are, unless they are apart: its graph may get another
        # an exception is made anew for whoever asks: one that is kept would keep, in its traceback, what keeps it
        self._outcome: Outcome | Callable[[], BaseException] | None = None
        self.dependents: Sequence[Callable[[], None]] = ()  # of the scheduling thread: to be told when it is there
        self.apart = False  # the captures' gradients come here, though they were to be added up in the worker
        self.graph: RemoteGraph | None = None
        self.reached: Sequence[int] = ()  # captures that `graph` depends on, of those with more behind them
        self.calls = 0  # of which these are the sums, where they are sums
        self.warned: Warnings = ()  # of all the backwards that travelled with this one

    @property
    def arrived(self) -> bool:
        return self._outcome is not None

    def arrive(self, found: Sequence[TensorRef | None], payload: memoryview, memories: dict[int, Borrowed | Slot]) -> None:
        self._arrived((found, payload, memories))

    def fail_with(self, make: Callable[[], BaseException]) -> None:
        """With the exception that `make` gives, anew for whoever asks."""
        self._arrived(make)

    def fail(self, error: BaseException) -> None:
        self.fail_with(functools.partial(one_more, error))

    def fail_as(self, other: GradientReply) -> None:
        """Of the gradients that were needed here, `other` has none, but an error."""
        assert callable(other._outcome)
        self._arrived(other._outcome)

    def _arrived(self, outcome: Outcome | Callable[[], BaseException]) -> None:
        self._outcome = outcome
        dependents, self.dependents = self.dependents, ()
        for tell in dependents:
            tell()

    def passed_on(self, place: int, staged_by: Packer | None = None) -> Placed | None:
        """One of the gradients, for another worker; `staged_by`: for one that can read the CPU's memory only."""
        assert self._outcome is not None and not callable(self._outcome)
        found, payload, memories = self._outcome
        ref = found[place]
        if ref is None:
            return None
        if ref.place >= 0:
            memories = {ref.place: memories[place_of(found, ref)]}
        return placed_again(ref, payload, memories) if staged_by is None else staged_again(staged_by, ref, payload, memories)

    @property
    def has_failed(self) -> bool:
        return callable(self._outcome)

    def gradients(self) -> list[torch.Tensor | None]:
        found, payload, memories = self._wait()

        def borrow(ref: TensorRef) -> Any:
            return memories[ref.place].memory

        return views(found, payload, borrow)

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
        for each in taken(self.warned):
            warned_again(*each)
        if callable(outcome):
            if self._graph_task is not None:
                note_failure(self._graph_task)
            raise outcome()
        assert outcome is not None
        return outcome


def raised_from(failure: Failure, call: str, worker: str) -> BaseException:
    """The exception of a task, anew; `call`, for its note: such as "item 3 of simulate", or ""."""
    return raised_again(failure.error, shown(failure.traceback), failure.phase, call, worker, failure.given)


class Sender(Protocol):
    """What a home needs of the scheduler. Workers are opaque here."""

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads, again: bool = False) -> GradientReply: ...

    def modes_of(self, graph_task: int) -> Modes:
        """Those of the backward with this number, which runs in this thread; raises where workers cannot be in them."""
        ...

    def request_captures(
        self, worker: Any, function: int, graph_task: int | None, levels: tuple[Level, ...], timeout: float | None
    ) -> GradientReply: ...

    def release(self, graph: RemoteGraph) -> None: ...

    def spend(self, graph: RemoteGraph) -> None:
        """Its last backward was run ahead, and has come."""
        ...

    def guess_of(self, function: SharedFunction) -> Learner | None: ...

    def note_wrong_guess(self, function: SharedFunction) -> None: ...

    def note_other_gradient(self, function: SharedFunction) -> None: ...


class Learner(Protocol):
    """What gradient losses get: see `scheduling.guesses`."""

    def note_right(self, gradient: float) -> None: ...

    def note_other(self) -> None: ...


class Contribution(NamedTuple):
    """A backward whose gradients of the captures are added up where it runs."""

    graph: weakref.ref[RemoteGraph]  # the engine holds it; a backward that fails leaves this behind
    order: Order
    grads: Grads
    reply: GradientReply


class Share(NamedTuple):
    """What a backward ahead has added to the sums of its worker, as the caller's backward wants it."""

    graph: weakref.ref[RemoteGraph]
    order: Order
    grads: Grads
    factor: float
    guessed: bool  # its graph is kept until the sum is used


Sums = dict[tuple[object, tuple[Level, ...]], list[Contribution]]  # by worker and levels


def alive(ref: weakref.ref[RemoteGraph]) -> RemoteGraph:
    """The graph, which the engine holds."""
    graph = ref()
    if graph is None:
        raise InternalError("a graph ended before its backward")
    return graph


class OperationHome:
    """Where the graphs of one operation live (`autograd.Home`); keeps the function that they share."""

    def __init__(
        self,
        sender: Sender,
        function: SharedFunction,
        modes: Modes,
        deterministic: bool,
        timeout: float | None,
        learns: bool = False,
    ) -> None:
        """`modes`: those of the calls."""
        self.sender = sender
        self._modes = modes
        self._compared = -1, False  # the last backward, and whether it had the same
        self._function = function
        self.deterministic = deterministic
        self.timeout = timeout  # seconds for each call
        self.reach: Reach | None = None  # of its captures that need gradients
        self._contributions: dict[int, Sums] = {}  # by backward; in the order in which workers were first asked
        self._shares: dict[int, dict[object, list[Share]]] = {}  # by backward, then by worker
        self._ahead_sums: dict[object, list[torch.Tensor | None]] = {}  # by worker, for another backward
        self._to_see = EXAMINED if learns else 0  # backwards that are still looked at, for the next map's sake
        self._seen: float | None = None  # the gradient of those before
        self._ahead_lock = threading.Lock()  # backwards in several threads, of which one gets what a worker hands over once

    @property
    def function(self) -> int:
        return self._function.number

    @property
    def names(self) -> CallNames:
        return self._function.names

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads) -> GradientReply | ReadyReply:
        served = self._serve(graph, order, grads)
        if self._to_see > 0:
            self._learn(order, grads)
        if served is not None:
            return served
        reply = self.sender.send_gradients(graph, order, grads)
        if order.captures and not order.apart:
            sums = self._contributions.setdefault(order.graph_task, {})
            forget_oldest(self._contributions)
            sums.setdefault((reply.worker, order.levels), []).append(Contribution(weakref.ref(graph), order, grads, reply))
        return reply

    def _serve(self, graph: RemoteGraph, order: Order, grads: Grads) -> ReadyReply | None:
        """From gradients that came with the result; None where that cannot be."""
        ahead = graph.ahead
        if not isinstance(ahead, DeliveredGradients):
            return None
        if not self._modes_are_same(order.graph_task):
            if ahead.expected is not None:
                self._guess_was_wrong(graph)
            return None
        if ahead.expected is not None:
            return self._serve_expected(graph, ahead, order, grads)
        if order.apart and not ahead.apart:
            return None
        factors = factors_of(order, grads)
        factor = factors[0] if factors else None
        if factors is None or (order.captures and (factor is None or len(set(factors)) > 1)):
            return None
        if ahead.for_one and not all(each in (None, 1) for each in factors):
            self.sender.note_other_gradient(self._function)
            return None
        if graph.members is not None:
            served = ahead.serve_bundle(order, graph.members, factors)
        else:
            served = None if factor is None else ahead.serve(order, len(graph.placeholders), factor)
        if served is not None:
            self._note_share(graph, ahead.maker, order, grads, factor, guessed=False)
            if not order.keep and graph.members is None:
                graph.ahead = None  # another backward has to run the call again
        return served

    def _serve_expected(self, graph: RemoteGraph, ahead: DeliveredGradients, order: Order, grads: Grads) -> ReadyReply | None:
        """Where this is the backward that was run ahead: of all of the graph, which is not kept, with that gradient."""
        if (order.apart and not ahead.apart) or loss_gradients(order, grads) != {ahead.expected}:
            self._guess_was_wrong(graph)
            return None
        with self._ahead_lock:  # of two backwards in two threads one is served
            if graph.ahead is not ahead:
                return None
            graph.ahead = None
        if graph.members is not None:
            served = ahead.serve_bundle(order, graph.members, [1.0] * len(grads))
        else:
            served = ahead.serve(order, len(graph.placeholders), 1.0)
        if served is None:
            return None
        if order.captures and not order.apart:
            self._note_share(graph, ahead.maker, order, grads, 1.0, guessed=True)
        else:
            self.sender.spend(graph)
        return served

    def _modes_are_same(self, graph_task: int) -> bool:
        """Whether this backward runs under the modes of the calls, under which those ahead were run."""
        if self._compared[0] != graph_task:
            self._compared = graph_task, self.sender.modes_of(graph_task).but_grad == self._modes.but_grad
        return self._compared[1]

    def _guess_was_wrong(self, graph: RemoteGraph) -> None:
        graph.ahead = None
        self.sender.note_wrong_guess(self._function)

    def _learn(self, order: Order, grads: Grads) -> None:
        """What gradients its losses get, or that these are none."""
        self._to_see -= 1
        guess = self.sender.guess_of(self._function)
        if guess is None:
            return
        found = loss_gradients(order, grads)
        if len(found) != 1 or self._seen not in (None, *found):
            self._to_see = 0
            guess.note_other()
        elif self._seen is None:
            (self._seen,) = found
            guess.note_right(self._seen)

    def _note_share(
        self, graph: RemoteGraph, maker: object, order: Order, grads: Grads, factor: float | None, guessed: bool
    ) -> None:
        if order.captures and not order.apart and factor is not None:
            shares = self._shares.setdefault(order.graph_task, {})
            forget_oldest(self._shares)
            shares.setdefault(maker, []).append(Share(weakref.ref(graph), order, grads, factor, guessed))

    def capture_gradients(self, graph_task: int) -> Iterator[tuple[tuple[Level, ...], Sequence[torch.Tensor | None]]]:
        request = self.sender.request_captures
        sums = self._contributions.pop(graph_task, {})
        for each in itertools.chain(*sums.values()):
            if any(isinstance(part, Promise) for parts in each.grads for part in parts):
                each.reply.wait()  # only now it has gone to its worker; the others go there before the request does
        yield from self._ahead_gradients(graph_task, sums)
        asked = [
            (levels, contributions, request(worker, self._function.number, graph_task, levels, self.timeout))
            for (worker, levels), contributions in sums.items()
        ]
        for levels, contributions, reply in asked:
            for each in contributions:
                each.reply.wait()  # raises what it raised
            summed = [each for each in contributions if not each.reply.apart]
            found: Sequence[torch.Tensor | None] = ()
            with contextlib.suppress(WorkerDiedError):  # its sum is lost, but not what it was made of
                found = reply.gradients()
            if summed and reply.calls == len(summed):
                yield levels, found
                summed = []
            again = list(map(self._send_apart, summed))  # of none where there is nothing to lose
            for order, own in [*((each.order, each.reply) for each in contributions if each.reply.apart), *again]:
                yield levels, own.gradients()[len(order.wanted) :]

    def _ahead_gradients(
        self, graph_task: int, sums: Sums
    ) -> Iterator[tuple[tuple[Level, ...], Sequence[torch.Tensor | None]]]:
        """Of calls whose backwards were run ahead; those of which that was in vain join the contributions to `sums`."""
        shares = self._shares.pop(graph_task, {})
        sure = {worker: own for worker, own in shares.items() if self._are_the_sum(worker, own)}
        with self._ahead_lock:
            self._collect_ahead(sure)
            held = {worker: self._ahead_sums.get(worker) for worker in sure}
            for worker, own in sure.items():
                if not own[0].order.keep:
                    self._ahead_sums.pop(worker, None)
        for worker, own in shares.items():
            found = held.get(worker)
            if found is not None and all(is_in_range(each, own[0].factor) for each in found):
                for share in own:
                    if share.guessed:
                        self.sender.spend(alive(share.graph))
                yield (), [scaled(each, own[0].factor, shared=own[0].order.keep) for each in found]
                continue
            for share in own:
                if share.guessed:  # there are other calls in the sum than these
                    self._guess_was_wrong(alive(share.graph))
                self._contribute(share, sums)

    def _collect_ahead(self, sure: dict[object, list[Share]]) -> None:
        """From all workers at once."""
        request = self.sender.request_captures
        missing = [worker for worker in sure if worker not in self._ahead_sums]
        for worker, reply in [(each, request(each, self._function.number, None, (), self.timeout)) for each in missing]:
            with contextlib.suppress(WorkerDiedError):  # its sum is lost, but not what it was made of
                found = reply.gradients()
                if reply.calls == len(sure[worker]):  # not so where another backward took it, or a call failed half-way
                    self._ahead_sums[worker] = found

    def _are_the_sum(self, worker: object, shares: Sequence[Share]) -> bool:
        """Whether what the worker has added up is what these calls give, but for one factor."""
        return len(shares) == self._function.summed.get(worker) and len({share.factor for share in shares}) == 1

    def _contribute(self, share: Share, sums: Sums) -> None:
        """Run the backward again, with the gradient that came."""
        graph = alive(share.graph)
        order = share.order._replace(wanted=())
        reply = self.sender.send_gradients(graph, order, share.grads, again=True)
        sums.setdefault((reply.worker, ()), []).append(Contribution(share.graph, order, share.grads, reply))

    def _send_apart(self, lost: Contribution) -> tuple[Order, GradientReply]:
        """Once more, of a backward that was done: its part of the sum was lost with the worker."""
        graph = alive(lost.graph)
        order = lost.order._replace(wanted=(), apart=True)
        return order, self.sender.send_gradients(graph, order, lost.grads, again=True)

    def release(self, graph: RemoteGraph) -> None:
        """Nobody can ask for a backward of it any more."""
        if isinstance(graph.ahead, DeliveredGradients) and graph.ahead.expected is not None:
            self._guess_was_wrong(graph)
        if self._to_see == EXAMINED:  # none has come at all
            self._to_see = 0
            if (guess := self.sender.guess_of(self._function)) is not None:
                guess.note_other()
        self.sender.release(graph)
