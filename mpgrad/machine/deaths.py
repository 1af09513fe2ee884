"""When the pool ends a worker, and what follows from a worker's death: which call is blamed, which
calls fail, and which workers get the rest.

    an operation has reached its deadline ──► "kill operation": its calls fail, and each worker that
        runs one is drained and killed
    a call is overdue ──► "drain": receive what the worker has sent up to now
        ──► "terminate": ask the worker to write its stack and end
        ──► TRACEBACK_PATIENCE seconds later: "kill overdue", which blames the call
    a call that was cancelled with grace has used up its grace period
        ──► skip the calls behind it; SEEN seconds later, "drain" and take them back
        ──► "kill", or "retire" if others need what cannot be rebuilt

    the running call, or else the next one ──► `judged` ──┬─► blamed too often: it fails
                                                          └─► it runs again
    all other calls of the worker ──► their queues; they are not blamed
    backwards ──► `successor`, which rebuilds the graph right before the backward
    a graph that no backward needs yet ──► nothing; it is rebuilt for its next backward
    a sum of captures' gradients ──► lost; the thread that asks for it sends each of its
                                     backwards again, by itself (`OperationGradients`)
A call that takes longer than its `timeout` is *overdue*. So is one that its worker does not begin
in this time, unless the worker loads a function. A call that has begun is blamed for the death of
its worker, or for a time-out. A call that was next is only suspected, and fails only after more
deaths.
"""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from mpgrad.machine.policy import SEEN
from mpgrad.machine.queue import AnyWorker, CallQueue
from mpgrad.machine.story import DIED_AT, DIED_BEFORE, OVERDUE
from mpgrad.machine.under_way import Termination

__all__ = [
    "IDLE_DEATHS",
    "Deadlines",
    "Death",
    "Limits",
    "Step",
    "Verdict",
    "death_of",
    "failing",
    "judged",
    "successor",
]

# seconds that a worker whose call takes too long has to write its stack and end
TRACEBACK_PATIENCE = 0.5

# deaths of workers that had a call next, before the call is blamed
IDLE_DEATHS = 2


# --- workers that the pool ends


# what is to be done with a worker, or with an operation
Step = Literal["kill operation", "drain", "terminate", "kill", "kill overdue", "retire"]


class Limits:
    """Decides which workers are ended.

    Each step is carried out before the next is requested. What a step needs is noted before it is
    returned, and afterwards the worker is looked at anew.
    """

    def __init__(self, queue: CallQueue, can_kill: bool, recoverable: bool) -> None:
        """`can_kill` means that workers can be killed while they run a call, and `recoverable` that
        other workers can rebuild the graphs that a worker kept."""
        self._queue = queue
        self._can_kill = can_kill
        self._recoverable = recoverable
        self.deadlines = Deadlines()
        # when a step may be due, on the clock of time.monotonic
        self.next_look = math.inf

    def steps_to_kill(
        self, workers: Iterable[AnyWorker], operation: Any
    ) -> Iterator[tuple[Step, Any]]:
        """Kill the workers that run a call of the operation."""
        for worker in list(workers) if self._can_kill else ():
            if worker.under_way.is_at(operation):
                yield "drain", worker
                # The worker may have gone on since.
                if worker.gone is None and worker.under_way.is_at(operation):
                    yield "kill", worker

    def steps(self, workers: Iterable[AnyWorker], now: float) -> Iterator[tuple[Step, Any]]:
        """Do what is due. This runs in each turn."""
        workers = list(workers)
        # This comes first. Steps may take long, and what they skip gets the moment of the next
        # turn.
        for worker in workers:
            if worker.under_way.just_skipped:
                worker.under_way.note_skips(now)
        self.next_look = math.inf
        if self.deadlines.heap:
            for operation in self.deadlines.due(now):
                yield "kill operation", operation
            self.next_look = self.deadlines.next
        for worker in workers:
            under_way = worker.under_way
            first = under_way.first
            has_limit = first is not None and first.timeout is not None
            if not (has_limit or worker.termination or under_way.grace_ends < math.inf):
                continue
            is_drained = False
            while worker.gone is None and (step := self._step(worker, is_drained, now)):
                is_drained = True
                yield step, worker
            if worker.gone is None:
                self.next_look = min(self.next_look, overdue_at(worker, now), under_way.grace_ends)

    def _step(self, worker: AnyWorker, is_drained: bool, now: float) -> Step | None:
        """Return what is to be done with the worker now.

        Nothing drastic is done before it is drained. It may have been in time, while this thread
        was late.
        """
        under_way = worker.under_way
        if overdue_at(worker, now) <= now:
            if worker.termination is not None:
                return "kill overdue"
            if not is_drained:
                return "drain"
            worker.overdue = None if under_way.first is None else under_way.first.timeout
            worker.termination = Termination(now + TRACEBACK_PATIENCE, under_way.begun())
            return "terminate"
        if under_way.grace_ends > now:
            return None
        # Calls that it has not begun can be taken back safely once it has seen that they are
        # skipped.
        if under_way.skip_unbegun(now):
            under_way.grace_ends = now + SEEN
            return None
        if not is_drained:
            return "drain"
        # It is unknown when the worker would come to these calls.
        for operation, calls in under_way.take_back(now):
            self._queue.put_back(operation, calls, now)
        under_way.grace_ends = math.inf
        if not self._can_kill:
            return None
        if under_way.is_at_wanted:
            # Another caller waits for this part, and perhaps not for the next.
            under_way.give_grace(now)
            return None
        if self._recoverable or not worker.has_others:
            return "kill"
        # Other callers need something of this worker that no worker could rebuild.
        if under_way.has_for_others:
            # Its node agent may not have reported yet that these calls are skipped.
            under_way.give_grace(now)
        return "retire"


def overdue_at(worker: AnyWorker, now: float) -> float:
    """Return when the worker's running call becomes overdue.

    If the call is overdue already, return when the worker must have ended.
    """
    if worker.termination is not None and worker.gone is None:
        return worker.termination.moment
    chunk = worker.under_way.first
    if worker.gone is not None or chunk is None or chunk.timeout is None:
        return math.inf
    if worker.link.keeps_time:
        return -math.inf if worker.under_way.is_at_call(worker.link.overrun) else math.inf
    return worker.under_way.limited_since(now) + chunk.timeout


# the heap may keep this many entries of operations that are gone
SOME = 100


class Deadlines:
    """Orders operations by the moment at which they must have ended.

    Moments are on the clock of time.monotonic.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, weakref.ref[Any]]] = []
        # If there are more entries than this, those of operations that are gone are removed.
        self._most = SOME
        # If two moments are equal, heaps compare the next field.
        self._numbers = itertools.count()

    def put(self, moment: float, operation: Any) -> None:
        heapq.heappush(self.heap, (moment, next(self._numbers), weakref.ref(operation)))
        if len(self.heap) > self._most:
            self.heap = [entry for entry in self.heap if entry[2]() is not None]
            heapq.heapify(self.heap)
            self._most = 2 * len(self.heap) + SOME

    def due(self, now: float) -> Iterator[Any]:
        while self.heap and self.heap[0][0] <= now:
            operation = heapq.heappop(self.heap)[2]()
            if operation is not None:
                yield operation

    @property
    def next(self) -> float:
        return self.heap[0][0] if self.heap else math.inf


# --- what follows from a death


class Death(NamedTuple):
    """Where a worker was when it was lost."""

    # The worker was at the first of these, and had not begun the others.
    chunks: list[Any]
    # the position of the running call in the first chunk; -1 if none ran
    position: int
    # the place of the running item in its bundle
    offset: int
    # whether a call may be the reason
    blames: bool


class Verdict(NamedTuple):
    """The call or backward that is blamed for a death. If it does not fail, it runs again."""

    accused: Any
    is_overdue: bool
    fails: bool


def death_of(worker: AnyWorker, blames: bool) -> Death:
    """Return where the worker was. Note if it did not end because of its overdue call."""
    under_way = worker.under_way
    position, since = under_way.begun()
    if worker.link.lost:
        worker.overdue = None
    elif worker.termination is not None and worker.termination.begun[1] != since:
        # The overdue call ended at that moment.
        worker.overdue, blames = None, False
    return Death(list(under_way.chunks.values()), position, under_way.offset, blames)


def judged(
    worker: AnyWorker, death: Death, retries: int, timeout_retries: int, now: float
) -> Verdict | None:
    """Count the death against the running call, or else the next one.

    Return None if that call had been taken back: the worker had only looked whether it should
    begin.
    """
    place, has_begun = max(death.position, 0), death.position >= 0
    parts = death.chunks[0].parts
    if place >= len(parts):
        return None
    accused, is_overdue = parts[place], has_begun and worker.overdue is not None
    if not has_begun:
        accused.idle_deaths += 1
        words, fails = DIED_BEFORE, accused.idle_deaths > max(retries, IDLE_DEATHS)
    elif is_overdue:
        accused.timeouts += 1
        words, fails = OVERDUE, accused.timeouts > timeout_retries or accused.has_lost_graph
    else:
        accused.deaths += 1
        words, fails = DIED_AT, accused.deaths > retries
    accused.note((now, words, worker.number))
    return Verdict(accused, is_overdue, fails)


def failing(death: Death, fails: bool, retries: int) -> slice:
    """Return which parts of the first chunk fail if the accused one does, or does not.

    Without retries, the parts before it also fail. They had run, but their inputs may have been
    written to.
    """
    place = max(death.position, 0)
    return slice(0 if retries == 0 and death.position >= 0 else place, place + fails)


def successor(workers: Iterable[AnyWorker], device: int) -> Any:
    """Return the worker that takes over the graphs of a dead worker on this device.

    It is the worker with the least to do. Workers on the same device come first, and among these
    the ones that still take calls. Return None if no worker has a place.
    """
    placed = [each for each in workers if each.link.has_place]
    there = [each for each in placed if each.device == device]
    active = [each for each in there if not each.retiring] or there
    return min(active or placed, key=lambda each: each.load, default=None)
