"""How far a pool has come with its life, what may still be asked of it, and what the parts of a
scheduler ask of whoever runs them (`Driver`). Caller's side.

Any thread asks, and enters a phase; `break_off` and `end` are the scheduling thread's. After the
end there is no such thread: what comes then is answered in the thread that finds it (`Settlement`).
Any thread may, but one at a time; another one that comes meanwhile leaves what it has brought to
that one, and does not wait.
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
    "Phase",
    "Settlement",
]

INSIDE = "inside the with block (with mpgrad.Pool() as pool: ...)"


class ForkCounter:
    """Counts how often this process is a forked child of another: cheaper to ask than the system
    for the pid."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.count += 1


FORKS = ForkCounter()


class Phase(enum.IntEnum):
    OPEN = enum.auto()
    CLOSED = enum.auto()  # takes nothing new; what was admitted still runs, and graphs stay
    LEAVING = enum.auto()  # ends each worker as soon as nothing runs, and no graph is kept there
    DRAINING = enum.auto()  # ends all workers when nothing runs
    STOPPING = enum.auto()  # ends them now


class Lifecycle:
    """It only goes on: phases may be left out, and nothing leads back."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._forks = FORKS.count
        self._reached = [Phase.OPEN]  # several threads may append in the same moment
        # asked at every turn of the scheduling thread
        self.is_ending = False  # it has at least come to `LEAVING`
        self.is_stopping = False
        self.broken: BaseException | None = None  # why it cannot go on
        # what is answered from now on: nothing runs any more
        self.ended: BaseException | None = None
        self.ends_gently = False  # workers are told to stop, rather than killed
        self.ends_by = signal.SIGKILL  # who has not ended soon after another signal is killed

    @property
    def phase(self) -> Phase:
        return max(self._reached)

    def enter(self, phase: Phase) -> None:
        self._reached.append(phase)
        if phase >= Phase.LEAVING:
            self.is_ending = True
        if phase is Phase.STOPPING:
            self.is_stopping = True

    def break_off(self, error: BaseException) -> None:
        """All that is under way, and all that comes later, gets `error`."""
        # Frames in a traceback keep their callers' frames, and so what those had: also in that of
        # the error that was being handled, such as the end of a worker's pipe.
        self.broken = error.with_traceback(None)
        write(self.broken, "__context__", None)
        self.enter(Phase.STOPPING)

    def end(self) -> BaseException:
        """Returns what is answered from now on."""
        closed = (
            "the pool is closed, and its workers and their graphs are gone; ask for results, and "
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
        """This process has made it, not one of which it is a forked child."""
        return FORKS.count == self._forks

    def check_process(self) -> None:
        if not self.is_ours:
            raise RuntimeError(
                f"this pool belongs to process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}; "
                "make a new one there"
            )

    def check_open(self) -> None:
        """Raises:
        PoolClosedError: after `close` or `terminate`.
        RuntimeError: in a forked child, or when the pool is broken.
        """
        self.check_process()
        if self.broken is not None:
            raise one_more(self.broken)
        if self.phase > Phase.OPEN:
            raise PoolClosedError(f"the pool is closed; make a new one, or call it {INSIDE}")

    def check_alive(self) -> None:
        """There are workers, or will be again, for graphs that they keep."""
        self.check_process()
        reason = self.broken or self.ended
        if reason is not None:
            raise one_more(reason)


class Settlement:
    """Orders are carried out, and operations fail with the reason of the end."""

    def __init__(
        self, inbox: deque[Callable[[], None]], unfinished: dict[Operation, None], life: Lifecycle
    ) -> None:
        self._inbox = inbox
        self._unfinished = unfinished
        self._life = life
        self._turn = threading.RLock()  # callbacks that run meanwhile may ask for something, too

    def settle(self) -> None:
        while self._inbox or self._unfinished:
            if not self._turn.acquire(blocking=False):
                return  # whoever has it looks once more after giving it back
            try:
                while self._inbox:
                    carry_out(self._inbox.popleft())
                while self._unfinished:
                    operation = next(iter(self._unfinished))
                    del self._unfinished[operation]  # first: its callbacks may lead here again
                    operation.fail(self._life.ended or InternalError("settled before the end"))
            finally:
                self._turn.release()


def carry_out(order: Callable[[], None]) -> None:
    try:
        order()
    except BaseException:
        # a fault of ours, perhaps the one that broke the pool: others still wait for an answer
        report(logging.ERROR, "an order that came too late failed", with_traceback=True)


# --- whose thread it is


class Driver(Protocol):
    """A `Dispatcher` has a thread of its own, an `InlineScheduler` the caller's. All of it may be
    called by any thread."""

    tracer: Tracer
    inbox: deque[Callable[[], None]]  # orders for the scheduling thread's next turn
    # something was put where that thread will find it, without waking it; whoever waits will
    has_unheard: bool

    def put(self, order: Callable[[], None]) -> None:
        """Into the inbox; after the end it is done at once."""
        ...

    def post(self, order: Callable[[], None]) -> None:
        """`put`, and `wake`."""
        ...

    def wake(self) -> None:
        """Have the scheduling thread look at what there is to do."""
        ...

    def hand_over(self) -> None:
        """`wake`, by a caller who has much work of its own: let the scheduling thread have its turn
        first."""
        ...

    def nudge(self) -> None:
        """There are updates for a worker, which can wait a little. Called from finalizers: it may
        not wait, lock or raise."""
        ...

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in the caller's thread until `satisfied()`, which is evaluated after each frame;
        whether it was."""
        ...

    def wait_for_gradients(self, backward: Backward) -> None:
        """Send it when the gradients have come that it needs of other backwards. Called by the
        scheduling thread."""
        ...

    def requeue(self, worker: WorkerHandle) -> None:
        """Have others do what was left for a worker that is gone. Called by the scheduling
        thread."""
        ...

    def cancel_backward(self, graph_task: int) -> None:
        """Nobody waits any more for what was sent for the backward with this number. Called from
        finalizers."""
        ...

    def tell_waiters(self) -> None:
        """Something was delivered. Called by the scheduling thread; after the end by any."""
        ...
