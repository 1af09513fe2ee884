"""`Lifecycle` notes the phases of a pool, and checks what is possible in each. `Driver` lists what
the parts of a scheduler need of the class that runs them. This module runs in the caller only.

Any thread may read the phase or enter one. Only the scheduling thread calls `break_off` and
`end`. After the end there is no such thread, so `Settlement` answers a late order in the thread
that finds it. Only one thread settles at a time. Any other thread leaves its order to that thread,
and does not wait.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mpgrad.autograd.remote_graph import Backward
from mpgrad.callbacks import report
from mpgrad.calls.operations import Operation
from mpgrad.errors import InternalError, PoolClosedError, write
from mpgrad.pickling.exceptions import one_more
from mpgrad.scheduling.tracer import Tracer
from mpgrad.scheduling.worker_handle import WorkerHandle

__all__ = [
    "INSIDE",
    "Driver",
    "Lifecycle",
    "Order",
    "Phase",
    "Settlement",
]

# The scheduling thread calls an order in its next turn, with the present moment.
Order = Callable[[float], None]

INSIDE = "inside the with block (with mpgrad.Pool() as pool: ...)"


class ForkCounter:
    """Counts the forks between the first process and this one. Reading the count is cheaper than
    reading the pid from the system."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.count += 1


FORKS = ForkCounter()


class Phase(enum.IntEnum):
    """Lists the phases of a pool in order."""

    OPEN = enum.auto()
    # The pool takes nothing new. Admitted operations still run, and graphs stay.
    CLOSED = enum.auto()
    # The pool ends each worker as soon as nothing runs and the worker keeps no graph.
    LEAVING = enum.auto()
    # The pool ends all workers when nothing runs.
    DRAINING = enum.auto()
    # The pool ends all workers now.
    STOPPING = enum.auto()


class Lifecycle:
    """Notes the phases that a pool has reached. Phases may be skipped, but never return."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._forks = FORKS.count
        # Several threads may append at the same time.
        self._reached = [Phase.OPEN]
        # The scheduling thread looks at this several times in every turn.
        self.is_stopping = False
        # why the pool cannot go on
        self.broken: BaseException | None = None
        # the error that every request gets after the end
        self.ended: BaseException | None = None
        # whether workers are asked to stop, and not killed
        self.ends_gently = False
        # A worker that has not ended soon after another signal is killed.
        self.ends_by = signal.SIGKILL

    @property
    def phase(self) -> Phase:
        return max(self._reached)

    def enter(self, phase: Phase) -> None:
        self._reached.append(phase)
        if phase is Phase.STOPPING:
            self.is_stopping = True

    def break_off(self, error: BaseException) -> None:
        """Give `error` to all work that is under way, and to all that comes later."""
        # The frames of a traceback keep their callers' frames, and so the variables of these. The
        # same is true of the error that was being handled, such as the end of a worker's pipe.
        self.broken = error.with_traceback(None)
        write(self.broken, "__context__", None)
        self.enter(Phase.STOPPING)

    def end(self) -> BaseException:
        """End the pool, and return the error that every request gets from now on."""
        closed = (
            "the pool is closed, and its workers and their graphs are gone; get results, and "
            f"call backward, {INSIDE}"
        )
        self.ended = self.broken or PoolClosedError(closed)
        return self.ended

    @property
    def has_ended(self) -> bool:
        return self.ended is not None

    @property
    def state(self) -> str:
        return (
            "broken" if self.broken is not None else "closed" if self.phase > Phase.OPEN else "open"
        )

    @property
    def is_ours(self) -> bool:
        """Whether this process has made the pool. A forked child has not."""
        return FORKS.count == self._forks

    def check_process(self) -> None:
        if FORKS.count != self._forks:  # not `is_ours`: this runs for each call and backward
            raise RuntimeError(
                f"this pool belongs to process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}; "
                "make a new one there"
            )

    def check_open(self) -> None:
        """Check that the pool takes new operations.

        Raises:
            PoolClosedError: after `close` or `terminate`.
            RuntimeError: in a forked child, or when the pool is broken.
        """
        self.check_process()
        if self.broken is not None:
            raise one_more(self.broken)
        if self.phase > Phase.OPEN:
            raise PoolClosedError(f"the pool is closed; make a new one, or call it {INSIDE}")

    def check_alive(self) -> None:
        """Check that backwards can still run: the pool has workers, or will have some again."""
        self.check_process()
        reason = self.broken or self.ended
        if reason is not None:
            raise one_more(reason)


class Settlement:
    """Carries out late orders, and fails operations with the reason of the pool's end."""

    def __init__(
        self, inbox: deque[Order], unfinished: dict[Operation, None], life: Lifecycle
    ) -> None:
        self._inbox = inbox
        self._unfinished = unfinished
        self._life = life
        # A callback that runs during a turn may also put an order.
        self._turn = threading.RLock()

    def settle(self, now: float) -> None:
        while self._inbox or self._unfinished:
            if not self._turn.acquire(blocking=False):
                # The thread that has the lock looks once more after it has released the lock.
                return
            try:
                while self._inbox:
                    carry_out(self._inbox.popleft(), now)
                while self._unfinished:
                    operation = next(iter(self._unfinished))
                    # This comes first, because the operation's callbacks may lead here again.
                    del self._unfinished[operation]
                    operation.fail(self._life.ended or InternalError("settled before the end"))
            finally:
                self._turn.release()


def carry_out(order: Order, now: float) -> None:
    try:
        order(now)
    except BaseException:
        # This is a bug of mpgrad, perhaps the one that broke the pool. Other threads still wait for
        # an answer.
        report(logging.ERROR, "an order that came too late failed", with_traceback=True)


# --- the driver


class Driver(Protocol):
    """Runs the parts of a scheduler. A `Dispatcher` has a thread of its own, and an
    `InlineScheduler` uses the caller's. Any thread may call its methods, unless their docstrings
    name a thread."""

    tracer: Tracer
    # orders for the scheduling thread's next turn
    inbox: deque[Order]
    # whether the scheduling thread has work that it was not woken for; a thread that waits wakes it
    has_unheard: bool

    def put(self, order: Order) -> None:
        """Put the order into the inbox; after the pool's end, carry it out at once."""

    def post(self, order: Order) -> None:
        """Put the order into the inbox, and wake the scheduling thread."""

    def wake(self) -> None:
        """Have the scheduling thread look for work."""

    def hand_over(self) -> None:
        """Wake the scheduling thread, and let it have its turn before the caller goes on.

        Callers that have much work of their own call this.
        """
        self.wake()

    def nudge(self) -> None:
        """Note that there are updates for a worker, which can wait a little.

        Finalizers call this, so it may not wait, lock or raise.
        """

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in the caller's thread until `satisfied()` is true, and return whether it was.

        It is evaluated after each frame.
        """

    def wait_for_gradients(self, backward: Backward, now: float) -> None:
        """Send a backward as soon as the gradients that it needs of other backwards have arrived.

        The scheduling thread calls this.
        """

    def requeue(self, worker: WorkerHandle, now: float) -> None:
        """Give the backlog of a worker that is gone to other workers.

        The scheduling thread calls this.
        """

    def cancel_backward(self, graph_task: int) -> None:
        """Cancel all that was sent for the backward with this number, as no thread waits for it.

        Finalizers call this.
        """

    def tell_waiters(self) -> None:
        """Wake the waiting threads that are satisfied now, because something was delivered.

        The scheduling thread calls this; after the pool's end any thread may.
        """
