"""`Canceller` ends calls that are not needed any more, and carries out the steps by which
`machine.deaths` ends workers. This module runs in the caller only.

    cancel               calls that have not begun do not begin; results that arrive are dropped
    cancel with grace    as cancel, and a worker that runs such a call gets a grace period for it
    kill                 as cancel, and a worker that runs such a call is killed at once
The other calls of a killed worker go to other workers (see `supervisor`).
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import CancelledError
from typing import Any

from mpgrad.calls.operations import Operation
from mpgrad.machine.deaths import Limits, Step
from mpgrad.machine.queue import CallQueue
from mpgrad.scheduling.admissions import Admissions
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.lifecycle import Driver
from mpgrad.scheduling.receiving import Receiver
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.supervisor import WorkerSupervisor
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import TRACEBACK_SIGNAL

__all__ = ["Canceller"]


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
        self.limits = Limits(queue, not settings.in_process, settings.recoverable)

    # --- operations and backwards

    def cancel(self, operation: Operation) -> None:
        operation.cancel()
        self._admissions.cancel_rest(operation)

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
        self._carry_out(self.limits.steps_to_kill(self._workers.values(), operation), now)
        # A worker may have gone on to a call of the operation at this moment.
        self._give_grace(operation, now)

    def cancel_with_grace(self, operation: Operation, now: float) -> None:
        if operation.has_dependents:
            return
        self.cancel(operation)
        self._give_grace(operation, now)

    def cancel_all_with_grace(self, now: float) -> None:
        """Cancel all admitted operations; calls without an outcome get a `CancelledError`."""
        for operation in list(self._admissions.unfinished):
            operation.sealed = True
            operation.fail(CancelledError())
            operation.limit = 0  # even if it goes on after a failure
            self._admissions.cancel_rest(operation)
        self._give_grace(None, now)

    def _give_grace(self, operation: Operation | None, now: float) -> None:
        """Let workers finish what they run of the operation, or of all operations, for a moment."""
        for worker in self._workers.values():
            worker.under_way.cancel_with_grace(operation, now)

    def cancel_backward(self, graph_task: int, now: float) -> None:
        """Settle all parts of a backward, so that no worker runs them, or runs them again."""
        interrupted = CancelledError("the backward was interrupted")
        for worker in [*self._workers.values(), *self._supervisor.gone]:
            worker.cancel_backward(graph_task, interrupted, now)
        self._driver.tell_waiters()

    # --- by the clock

    def keep_time(self, now: float) -> float:
        """Do what is due, and return when to look next, on the clock of time.monotonic."""
        self._carry_out(self.limits.steps(self._workers.values(), now), now)
        return self.limits.next_look

    def _carry_out(self, steps: Iterable[tuple[Step, Any]], now: float) -> None:
        """Carry out each step before the next is decided."""
        for step, target in steps:
            match step:
                case "kill operation":
                    self.kill(target, now)
                case "drain":
                    self._drain(target, now)
                # The end of its pipe is read next, as for any worker that dies.
                case "terminate":
                    target.link.kill(TRACEBACK_SIGNAL)
                case "retire":
                    target.begin_retiring()
                    self._supervisor.fill(now)
                case "kill" | "kill overdue":
                    self._supervisor.kill(target, now, blames=step == "kill overdue")

    def _drain(self, worker: WorkerHandle, now: float) -> None:
        """Receive what the worker has sent up to now."""
        while worker.gone is None and worker.link.has_more():
            self._receiver.serve(worker, now)
            self._driver.tell_waiters()
        # More work may follow from these answers, so the thread looks again before it sleeps.
        self._driver.wake()
