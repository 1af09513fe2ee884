"""`Canceller` ends calls that are not needed any more, and calls that take too long. This module
runs in the caller only.

    cancel               calls that have not begun do not begin; results that arrive are dropped
    cancel with grace    as cancel, and a worker that runs such a call gets a grace period for it
    kill                 as cancel, and a worker that runs such a call is killed at once

A call that takes longer than its `timeout` is *overdue*. So is one that its worker does not begin
in this time, unless the worker loads a function. The worker is asked to write its stack and end,
and is killed `TRACEBACK_PATIENCE` seconds later. The other calls of a killed worker go to other
workers (see `supervisor`).
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

from mpgrad.calls.operations import Operation
from mpgrad.machine.policy import SEEN
from mpgrad.machine.queue import CallQueue
from mpgrad.scheduling.admissions import Admissions
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.lifecycle import Driver
from mpgrad.scheduling.receiving import Receiver
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.supervisor import WorkerSupervisor
from mpgrad.scheduling.worker_handle import Termination, WorkerHandle
from mpgrad.wire.messages import TRACEBACK_SIGNAL

__all__ = [
    "Canceller",
    "Deadlines",
    "overdue_at",
]

# seconds that a worker whose call takes too long has to write its stack and end
TRACEBACK_PATIENCE = 0.5


class Canceller:
    """Cancels or kills calls for callers and for the clock, as in the table above."""

    def __init__(
        self,
        driver: Driver,
        deliveries: Deliveries,
        admissions: Admissions,
        queue: CallQueue,
        supervisor: WorkerSupervisor,
        receiver: Receiver,
        settings: Settings,
    ) -> None:
        self._driver = driver
        self._workers = deliveries.workers
        self._admissions = admissions
        self._queue = queue
        self._supervisor = supervisor
        self._receiver = receiver
        # whether workers can be killed while they run a call
        self._can_kill = not settings.in_process
        # whether other workers can rebuild the graphs that a worker kept
        self._recoverable = settings.recoverable
        self.deadlines = Deadlines()

    # --- operations and backwards

    def cancel(self, operation: Operation) -> None:
        operation.cancel()
        for worker in self._workers.values():
            worker.under_way.cancel(operation)
        self._queue.tidy()
        self._admissions.unfinished.pop(operation, None)
        self._driver.tell_waiters()

    def cancel_queued(self, operation: Operation) -> None:
        """Give a `CancelledError` to the calls that no worker has been given."""
        for call in self._queue.take_all(operation):
            operation.deliver(call.index, CancelledError())
        self._admissions.cancel_rest(operation)

    def kill(self, operation: Operation, now: float) -> None:
        """Give calls without an outcome a `CancelledError`, and kill the workers that run one."""
        if operation.finished:
            return
        operation.fail(CancelledError())
        self._admissions.cancel_rest(operation)
        for worker in list(self._workers.values()):
            if self._can_kill and worker.under_way.is_at(operation):
                # The worker may have gone on since.
                self._drain(worker, now)
                if worker.gone is None and worker.under_way.is_at(operation):
                    self._supervisor.kill(worker, now)

    def cancel_with_grace(self, operation: Operation, now: float) -> None:
        if operation.has_dependents:
            return
        self.cancel(operation)
        for worker in self._workers.values():
            worker.under_way.cancel_with_grace(operation, now)

    def cancel_all_with_grace(self, now: float) -> None:
        """Cancel all admitted operations; calls without an outcome get a `CancelledError`."""
        for operation in list(self._admissions.unfinished):
            operation.sealed = True
            operation.fail(CancelledError())
            operation.limit = 0  # even if it goes on after a failure
            self._admissions.cancel_rest(operation)
        for worker in self._workers.values():
            worker.under_way.cancel_with_grace(None, now)

    def cancel_backward(self, graph_task: int, now: float) -> None:
        """Settle all parts of a backward, so that no worker runs them, or runs them again."""
        interrupted = CancelledError("the backward was interrupted")
        for worker in [*self._workers.values(), *self._supervisor.gone]:
            worker.cancel_backward(graph_task, interrupted, now)
        self._driver.tell_waiters()

    # --- by the clock

    def keep_time(self, now: float) -> float:
        """Do what is due, and return when to look next, on the clock of time.monotonic."""
        moments = []
        if self.deadlines:
            for operation in self.deadlines.due(now):
                self.kill(operation, now)
            moments.append(self.deadlines.next)
        for worker in list(self._workers.values()):
            if worker.under_way.just_skipped:
                worker.under_way.note_skips(now)
            first = worker.under_way.first
            has_limit = first is not None and first.timeout is not None
            if not (has_limit or worker.termination or worker.under_way.grace_ends < math.inf):
                continue
            if overdue_at(worker, now) <= now:
                self._end_overdue(worker, now)
            if worker.gone is None and worker.under_way.grace_ends <= now:
                self._end_grace(worker, now)
            if worker.gone is None:
                moments += overdue_at(worker, now), worker.under_way.grace_ends
        return min(moments, default=math.inf)

    def _end_overdue(self, worker: WorkerHandle, now: float) -> None:
        """Ask the worker to write its stack and end, or kill it if it was asked before."""
        if worker.termination is not None:
            self._supervisor.kill(worker, now, blames=True)
            return
        # The worker may have been in time, while this thread was late.
        self._drain(worker, now)
        if worker.gone is None and overdue_at(worker, now) <= now:
            first = worker.under_way.first
            worker.overdue = None if first is None else first.timeout
            worker.termination = Termination(now + TRACEBACK_PATIENCE, worker.under_way.begun())
            # The end of its pipe is read next, as for any worker that dies.
            worker.link.kill(TRACEBACK_SIGNAL)

    def _end_grace(self, worker: WorkerHandle, now: float) -> None:
        """Act on a worker whose running call has used up its grace period."""
        under_way = worker.under_way
        # Calls that it has not begun can be taken back safely once it has seen that they are
        # skipped.
        if under_way.skip_unbegun(now):
            under_way.grace_ends = now + SEEN
            return
        # The worker may have been in time, while this thread was late.
        self._drain(worker, now)
        if worker.gone is not None or under_way.grace_ends > now:
            return
        # It is unknown when the worker would come to these calls.
        for operation, calls in under_way.take_back(now):
            self._queue.put_back(operation, calls, now)
        if not self._can_kill:
            under_way.grace_ends = math.inf
        elif under_way.is_at_wanted:
            # Another caller waits for this part, and perhaps not for the next.
            under_way.give_grace(now)
        elif self._recoverable or not worker.has_others:
            self._supervisor.kill(worker, now)
        else:
            # Other callers need something of this worker that no worker could rebuild.
            under_way.grace_ends = math.inf
            if under_way.has_for_others:
                # Its node agent may not have reported yet that these calls are skipped.
                under_way.give_grace(now)
            worker.begin_retiring()
            self._supervisor.fill(now)

    def _drain(self, worker: WorkerHandle, now: float) -> None:
        """Receive what the worker has sent up to now."""
        while worker.gone is None and worker.link.has_more():
            self._receiver.serve(worker, now)
            self._driver.tell_waiters()
        # More work may follow from these answers, so the thread looks again before it sleeps.
        self._driver.wake()


# --- the clock


# the heap may keep this many entries of operations that are gone
SOME = 100


class Deadlines:
    """Orders operations by the moment at which they must have ended.

    Moments are on the clock of time.monotonic.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[Operation]]] = []
        # If there are more entries than this, those of operations that are gone are removed.
        self._most = SOME
        # If two moments are equal, heaps compare the next field.
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def put(self, moment: float, operation: Operation) -> None:
        heapq.heappush(self._heap, (moment, next(self._numbers), weakref.ref(operation)))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[2]() is not None]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SOME

    def due(self, now: float) -> Iterator[Operation]:
        while self._heap and self._heap[0][0] <= now:
            operation = heapq.heappop(self._heap)[2]()
            if operation is not None:
                yield operation

    @property
    def next(self) -> float:
        return self._heap[0][0] if self._heap else math.inf


def overdue_at(worker: WorkerHandle, now: float) -> float:
    """Return when the worker's running call becomes overdue.

    If the call is overdue already, return when the worker must have ended.
    """
    if worker.termination is not None and worker.gone is None:
        return worker.termination.moment
    chunk = next(iter(worker.under_way.chunks.values()), None)
    if worker.gone is not None or chunk is None or chunk.timeout is None:
        return math.inf
    if worker.link.keeps_time:
        return -math.inf if worker.under_way.is_at_call(worker.link.overrun) else math.inf
    return worker.under_way.limited_since(now) + chunk.timeout
