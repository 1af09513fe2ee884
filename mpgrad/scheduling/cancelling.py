"""Ends early what nobody wants any more, and what takes too long. Caller's side.

    cancel               what has not begun will not; what is under way is dropped when it comes
    cancel with grace    likewise, and a worker that is at it has a grace period to come to its end
    kill                 likewise, and a worker that is at it is killed at once

A call that takes longer than its `timeout` is *overdue*: its worker is asked to leave its stack and
end, and is killed `TRACEBACK_PATIENCE` seconds later. What else a killed worker had goes to others
(see `staffing`). Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

from mpgrad.calls.operations import Operation
from mpgrad.scheduling.admissions import Admissions
from mpgrad.scheduling.lifecycle import Driver
from mpgrad.scheduling.queue import CallQueue, Deliveries
from mpgrad.scheduling.receiving import Receiver
from mpgrad.scheduling.supervisor import WorkerSupervisor
from mpgrad.scheduling.worker_handle import SEEN, Settings, Termination, WorkerHandle
from mpgrad.wire.messages import TRACEBACK_SIGNAL

__all__ = [
    "Canceller",
    "Deadlines",
    "overdue_at",
]

# seconds for a worker whose call takes too long, to leave its stack and end
TRACEBACK_PATIENCE = 0.5


class Canceller:
    """Does what callers and the clock ask for, in the words of the table above."""

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
        self._can_kill = not settings.in_process  # workers, while they run a call
        self._recoverable = settings.recoverable  # what a worker kept can be made again by others
        self.deadlines = Deadlines()

    # --- operations and backwards

    def cancel(self, operation: Operation) -> None:
        operation.starts()  # a future that was cancelled tells who waits for it
        operation.cancel()
        for worker in self._workers.values():
            worker.under_way.cancel(operation)
        self._queue.tidy()
        self._admissions.unfinished.pop(operation, None)
        self._driver.tell_waiters()

    def cancel_queued(self, operation: Operation) -> None:
        """Calls that no worker has been given."""
        while operation.queue or operation.packed:
            call = (operation.queue or operation.packed).popleft()
            operation.deliver(call.index, CancelledError())
        self._admissions.cancel_rest(operation)

    def kill(self, operation: Operation) -> None:
        """What has no outcome gets a `CancelledError`, and workers that are at it are killed."""
        if operation.finished:
            return
        operation.fail(CancelledError())
        self._admissions.cancel_rest(operation)
        for worker in list(self._workers.values()):
            if self._can_kill and worker.under_way.is_at(operation):
                self._drain(worker)  # perhaps it has gone on since
                if worker.gone is None and worker.under_way.is_at(operation):
                    self._supervisor.kill(worker)

    def cancel_with_grace(self, operation: Operation) -> None:
        if operation.has_dependents:
            return
        self.cancel(operation)
        for worker in self._workers.values():
            worker.under_way.cancel_with_grace(operation)

    def cancel_all_with_grace(self) -> None:
        """All that were admitted; what has no outcome gets a `CancelledError`."""
        for operation in list(self._admissions.unfinished):
            operation.sealed = True
            operation.fail(CancelledError())
            operation.limit = 0  # also of one that goes on after a failure
            self._admissions.cancel_rest(operation)
        for worker in self._workers.values():
            worker.under_way.cancel_with_grace(None)

    def cancel_backward(self, graph_task: int) -> None:
        """Whoever would do its parts, or do them again, sees that they are settled."""
        interrupted = CancelledError("the backward was interrupted")
        for worker in [*self._workers.values(), *self._supervisor.gone]:
            worker.cancel_backward(graph_task, interrupted)
        self._driver.tell_waiters()

    # --- by the clock

    def keep_time(self, now: float) -> float:
        """Do what is due; returns when something next is, on the clock of time.monotonic."""
        moments = []
        if self.deadlines:
            for operation in self.deadlines.due(now):
                self.kill(operation)
            moments.append(self.deadlines.next)
        for worker in list(self._workers.values()):
            if not (worker.under_way.chunks or worker.termination):
                continue
            if overdue_at(worker) <= now:
                self._end_overdue(worker, now)
            if worker.gone is None and worker.under_way.grace_ends <= now:
                self._end_grace(worker)
            if worker.gone is None:
                moments += overdue_at(worker), worker.under_way.grace_ends
        return min(moments, default=math.inf)

    def _end_overdue(self, worker: WorkerHandle, now: float) -> None:
        """First it is asked to leave its stack; a worker that has not ended by then is killed."""
        if worker.termination is not None:
            worker.link.kill()
            self._supervisor.lose(worker)
            return
        self._drain(worker)  # we may have been late, and it not
        if worker.gone is None and overdue_at(worker) <= now:
            first = worker.under_way.first
            worker.overdue = None if first is None else first.timeout
            worker.termination = Termination(now + TRACEBACK_PATIENCE, worker.under_way.begun())
            # the end of its pipe is read next, as of any that dies
            worker.link.kill(TRACEBACK_SIGNAL)

    def _end_grace(self, worker: WorkerHandle) -> None:
        """What it is at has had its grace period."""
        under_way = worker.under_way
        # what it has not begun can be had for certain when it has seen that
        if under_way.skip_unbegun():
            under_way.grace_ends = time.monotonic() + SEEN
            return
        self._drain(worker)  # we may have been late, and it not
        if worker.gone is not None or under_way.grace_ends > time.monotonic():
            return
        for operation, calls in under_way.take_back():  # nobody knows when it would come to them
            self._queue.put_back(operation, calls)
        if not self._can_kill:
            under_way.grace_ends = math.inf
        elif under_way.is_at_wanted:
            under_way.give_grace()  # others wait for this part, and perhaps not for the next
        elif self._recoverable or not worker.has_others:
            self._supervisor.kill(worker)
        else:  # what others want of it could not be had again
            under_way.grace_ends = math.inf
            if under_way.has_for_others:
                # for its agent, perhaps, which has yet to say that they are skipped
                under_way.give_grace()
            worker.begin_retiring()
            self._supervisor.fill()

    def _drain(self, worker: WorkerHandle) -> None:
        """Receive what the worker has sent up to now."""
        while worker.gone is None and worker.link.has_more():
            self._receiver.serve(worker)
            self._driver.tell_waiters()
        # what came may be followed by more work: look again before going to sleep
        self._driver.wake()


# --- the clock


SOME = 100  # entries that may be of operations that are gone


class Deadlines:
    """Operations by the moment, on the clock of time.monotonic, at which they have to have
    ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[Operation]]] = []
        self._most = SOME  # before those that are gone are left out
        self._numbers = itertools.count()  # heaps compare what stands behind equal moments

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


def overdue_at(worker: WorkerHandle) -> float:
    """When the call that it is at will have taken too long; where it has, when the worker must have
    ended."""
    if worker.termination is not None and worker.gone is None:
        return worker.termination.moment
    chunk = next(iter(worker.under_way.chunks.values()), None)
    if worker.gone is not None or chunk is None or chunk.timeout is None:
        return math.inf
    if worker.link.keeps_time:
        return -math.inf if worker.under_way.is_at_call(worker.link.overrun) else math.inf
    return worker.under_way.begun()[1] + chunk.timeout
