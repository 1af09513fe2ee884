"""`Dispatcher` runs a scheduler in a thread of its own, and `InlineScheduler` in the caller's
thread. This module runs in the caller only.

multiprocessing.Pool uses three threads, blocking pipes and a lock around each pipe. A killed worker
leaves it waiting forever. A dispatcher has one thread, which owns all links, feeds the workers,
receives their answers, and notices when a worker dies. This thread makes every decision. Python
raises KeyboardInterrupt in the main thread, so an interrupt never cuts a message in half. User code
that could block the thread (callbacks, log handlers and streams) runs in another thread
(`CallbackThread`).

    a turn: fall_asleep: work ──► feed ──► keep_time ──► [engine.wait] ──► wake_up: serve each link

Only the scheduler and the tracer read the clock. Other parts get the time as an argument, and at
the pool's end the clock (`WorkerSupervisor.await_exits`). The thread that drives the scheduler, or
a simulation, waits for the engine between the two halves of a turn.

No wake-up is lost. A thread that has work writes the work, then `_woken`, and then reads `_sleep`.
The dispatcher's thread writes `_sleep`, and then reads `_woken` and the inbox. So at least one of
them sees the other. Some work (`put`, `leave`) does not wake the dispatcher. It sets `has_unheard`,
and the next thread that waits wakes the dispatcher.

With engines whose calls run in the caller there is no other thread.
Guarantees: with `InlineScheduler`, a thread that waits first does all that can be done.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mpgrad.callbacks import LOOK_EVERY, OF_THREAD, report
from mpgrad.engines.kinds import ENGINES, Engine, EngineRequest, WorkerLink
from mpgrad.errors import InternalError, add_note
from mpgrad.pickling.exceptions import one_more
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.scheduling.settings import Settings
from mpgrad.torch_state.private import current_graph_task

__all__ = [
    "Dispatcher",
    "InlineScheduler",
    "scheduler_for",
]

# seconds until the clock is read again; the system allows at most 2**31 ms
LONGEST_SLEEP = 86_400.0
# seconds for which updates are collected before they are sent without another message
UPDATE_PATIENCE = 0.05
# the note of an internal error shows this many transitions of the last operation
LATEST = 20
LONGEST_TURN = 0.01  # seconds that a caller lets the dispatcher have, at most


class Waiter(NamedTuple):
    satisfied: Callable[[], bool]
    lock: threading.Lock


class Dispatcher(Scheduler):
    """Runs a scheduler in a thread of its own."""

    def __init__(
        self, settings: Settings, engine: Engine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(settings, engine, clock)
        self._waiters: list[Waiter] = []
        # whether the thread has done its last work
        self._is_over = False
        self._woken = False
        self._sleeps = itertools.count(1)
        # the number of the present sleep; 0 while the thread is awake
        self._sleep = 0
        # the number of the last sleep that another thread has ended
        self._ended_sleep = 0
        # whether the thread sleeps without the timer that sends updates
        self._sleeping_soundly = False
        # when the thread looks for updates, on the clock of time.monotonic
        self._updates_due = 0.0
        # a lock for each caller that sleeps until the end of a turn
        self._handed_over: deque[threading.Lock] = deque()
        self._staffed = threading.Event()
        # taken by the thread when it begins, or by a caller who keeps it from beginning
        self._begun = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mpgrad-dispatcher", daemon=True)

    def start(self) -> None:
        self.callbacks.start()
        self._thread.start()
        if self.engine.copies_caller:
            self._staffed.wait()

    def terminate_without_waiting(self) -> None:
        super().terminate_without_waiting()
        # If the thread has not begun, the pool must be ended here.
        if self.life.is_ours and self._begun.acquire(blocking=False):
            self._end_all()

    # --- any thread

    def wake(self) -> None:
        # Each wake costs the caller the interpreter lock, so each sleep is ended only once. The
        # number is noted after the wake, because a caller could be interrupted between the two. A
        # caller that notes an old number, because it is late, causes only one more wake.
        self.has_unheard = False
        self._woken = True
        sleep = self._sleep
        if sleep and sleep != self._ended_sleep:
            self.engine.wake()
            self._ended_sleep = sleep

    def hand_over(self) -> None:
        # A thread that computes gives up the interpreter lock only after 5 ms. That is far too late
        # for a worker that has run dry. Only one of the two threads can run anyway, so the caller
        # sleeps until the dispatcher does.
        if threading.current_thread() is self._thread:
            return
        turn = threading.Lock()
        turn.acquire()
        self._handed_over.append(turn)
        self.wake()
        if not self.life.has_ended:
            with self.tracer.span("waits"):
                turn.acquire(timeout=LONGEST_TURN)

    def nudge(self) -> None:
        if self._sleeping_soundly:
            self.wake()

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        self.life.check_process()
        is_satisfied = satisfied() or self._wait_and_tick(satisfied, timeout)
        if is_satisfied and self.callbacks.done != self.callbacks.added:
            self.callbacks.catch_up()
        return is_satisfied

    def _wait_and_tick(self, satisfied: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, and do this thread's periodic jobs, which show progress."""
        if not self.callbacks.watched:
            return self._wait(satisfied, timeout)
        end = math.inf if timeout is None else self.clock() + timeout
        while any(item.is_here for item in self.callbacks.watched):
            left = end - self.clock()
            if self._wait(satisfied, min(left, LOOK_EVERY)):
                return True
            if left <= LOOK_EVERY:
                return False
            self.callbacks.tick()
        return self._wait(satisfied, None if end == math.inf else end - self.clock())

    def _wait(self, satisfied: Callable[[], bool], timeout: float | None) -> bool:
        if OF_THREAD.callbacks is self.callbacks:
            raise RuntimeError(
                "a finalizer that Python runs in the pool's own thread cannot wait for the pool"
            )
        waiter = Waiter(satisfied, threading.Lock())
        waiter.lock.acquire()
        self._waiters.append(waiter)
        try:
            # The awaited event may need one more turn of the scheduling thread.
            if self.has_unheard or self._sleeping_soundly:
                self.wake()
            if satisfied():
                return True
            if not self._is_over:
                self._sleep_until(waiter.lock, timeout)
            # The thread that could have satisfied the caller has ended.
            if self._is_over and not satisfied():
                raise one_more(
                    self.life.ended or InternalError("the dispatcher ended before the pool")
                )
            return satisfied()
        finally:
            # The thread that finds a waiter satisfied removes it.
            if waiter in self._waiters:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)

    def _sleep_until(self, told: threading.Lock, timeout: float | None) -> None:
        with self.tracer.span("waits"):
            told.acquire(
                timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            )

    def join(self) -> None:
        self.life.check_process()
        this = threading.current_thread()
        if this is self._thread:
            return
        for thread in (self._thread, self.callbacks):
            # A thread that is not alive has ended, or could not begin.
            if thread is not this and thread.is_alive():
                thread.join()

    # --- the dispatcher's thread

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        OF_THREAD.callbacks = self.callbacks
        try:
            self.supervisor.fill(self.clock())
            self._staffed.set()
            while not self.life.is_stopping:
                self.wake_up(self.engine.wait(self.fall_asleep()))
        except BaseException as error:
            report(logging.ERROR, "the dispatcher failed", with_traceback=True)
            broken = InternalError(
                f"the dispatcher failed ({type(error).__name__}: {error}); please report it"
            )
            broken.__cause__ = error
            if latest := self.story.latest(LATEST):
                add_note(broken, f"what happened last:\n{latest}")
            self.life.break_off(broken)
        finally:
            self._end_all()
            OF_THREAD.callbacks = None

    def _end_all(self) -> None:
        try:
            self.end()
        except BaseException:
            report(
                logging.ERROR, "the dispatcher failed at the end of the pool", with_traceback=True
            )
        finally:
            self._is_over = True
            self._staffed.set()
            self.callbacks.end()
            self.tell_waiters()

    def fall_asleep(self) -> float | None:
        """Do all work, and return for how many seconds the thread may sleep.

        Return None if it may sleep until it is woken.
        """
        self._woken = False
        now = self.clock()
        if now >= self._updates_due:
            self._send_updates(now)
        self.work()
        self._sleep = next(self._sleeps)
        while self._handed_over:
            self._handed_over.popleft().release()
        soonest = self.keep_time(self.clock())
        if not self._sleeping_soundly:
            soonest = min(soonest, self._updates_due)
        if self._woken or self.life.is_stopping or self.inbox:
            return 0.0
        return None if soonest == math.inf else min(max(0.0, soonest - self.clock()), LONGEST_SLEEP)

    def wake_up(self, links: Iterable[WorkerLink]) -> None:
        """Read the links that have something to read."""
        # The work of the next turn may make updates.
        if self._sleeping_soundly:
            self._updates_due = self.clock() + UPDATE_PATIENCE
        self._sleep, self._sleeping_soundly = 0, False
        self.look_at_room()
        for link in links:
            if (worker := self.workers.get(link.number)) is not None:
                self.receiver.serve(worker, self.clock())
                self.tell_waiters()
            # A link without an exit was lost at this moment.
            elif link.exit is not None:
                self.supervisor.remove(link.number, self.clock())

    def _send_updates(self, now: float) -> None:
        """Send updates to workers that were sent nothing for a while.

        If no updates are left, the thread sleeps without a timer until another thread wakes it.
        """
        if self.deliveries.has_updates():
            self.deliveries.send_updates(quiet_for=UPDATE_PATIENCE, now=now)
        # This is set before the check, so that an update that comes after it wakes this thread.
        self._sleeping_soundly = True
        self._sleeping_soundly = not self.deliveries.has_updates()
        self._updates_due = math.inf if self._sleeping_soundly else now + UPDATE_PATIENCE

    def tell_waiters(self) -> None:
        for waiter in list(self._waiters):
            if self._is_over or waiter.satisfied():
                try:
                    self._waiters.remove(waiter)
                # The waiter's timeout ended at this moment.
                except ValueError:
                    continue
                waiter.lock.release()


# --- the caller's own thread


class InlineScheduler(Scheduler):
    """Runs a scheduler in the thread that makes a request."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(settings._replace(workers=1, calls=None), engine, time.monotonic)
        self._turn = threading.RLock()

    def start(self) -> None:
        self.supervisor.start_worker(self.clock())
        self.wake()

    def wake(self) -> None:
        while self._work_on():
            # Functions that show progress run between calls, without the lock.
            if self.callbacks.watched and current_graph_task() == -1:
                self.callbacks.tick(everything=True)

    def _work_on(self) -> bool:
        """Do a step. Return whether there may be more to do."""
        with self._turn:
            try:
                if not self.life.has_ended and self._step():
                    return True
            except BaseException as error:
                # The worker's modes end now, if the interrupt came just before their end. Later
                # they would undo what the caller has set since.
                traceback.clear_frames(error.__traceback__)
                interrupted = (
                    "an inline pool was interrupted in the middle of its own work "
                    f"({type(error).__name__})"
                )
                self.life.break_off(
                    RuntimeError(
                        f"{interrupted}; make a new one, or use processes, which an interrupt does "
                        "not break"
                    )
                )
                raise
            if self.life.is_stopping and not self.life.has_ended:
                self.end()
        return False

    def _step(self) -> bool:
        """Work, have the worker work, and take its answers.

        Return whether there may be more to do.
        """
        self.work()
        links = self.engine.wait(0)
        for link in links:
            self.receiver.serve(self.workers[link.number], self.clock())
        if not links and not self.inbox:
            return False
        return not self.life.is_stopping

    def feed(self, now: float) -> None:
        (worker,) = self.workers.values()
        # A task may use the pool again, so chunks under way have no limit.
        if worker.ready and (chunk := self._queue.next_chunk_for(worker, now)) is not None:
            self.deliveries.send(chunk, now)

    def nudge(self) -> None:
        """Do nothing: updates go with the next message."""

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        self.life.check_process()
        self.wake()
        return satisfied()

    def join(self) -> None:
        self.life.check_process()

    def leave(self) -> None:
        """Close the pool: there is no process to end."""
        self.close()

    def tell_waiters(self) -> None:
        """Do nothing: the thread that waits is this one, and looks for itself."""


# --- which of the two


def scheduler_for(name: str, settings: Settings, wanted: EngineRequest) -> Scheduler:
    """Make the scheduler for the engine with this name; the caller has to start it."""
    traits, make = ENGINES[name]
    engine = make(wanted)
    if engine.room is not None:
        settings = settings._replace(workers=engine.room)
    try:
        return (InlineScheduler if traits.in_caller else Dispatcher)(settings, engine)
    except BaseException:  # KeyboardInterrupt
        engine.close()
        raise
