"""The dispatcher: one thread that owns all pipes, feeds the workers, receives, and notices when one dies.

multiprocessing.Pool uses three threads, blocking pipes and a lock around each; a killed worker leaves it waiting for ever.
Here every decision is taken in one thread. KeyboardInterrupt is raised in the main thread, which therefore never interrupts
half a message.

Guarantees: no polling: an idle pool sleeps in `select`; a worker's death is seen at once, as the end of its pipe.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mpgrad.calls.output import report
from mpgrad.engines.launch import Launcher
from mpgrad.errors import InternalError
from mpgrad.scheduling.crew import Worker
from mpgrad.scheduling.scheduler import Scheduler, Settings
from mpgrad.wire.frames import Channel

__all__ = ["Dispatcher"]

GRACE = 0.05  # seconds in which news gathers before it is sent without a message to ride with
EXIT_PATIENCE = 2.0  # seconds for a worker to end, and for its exit code to arrive

LONGEST_TURN = 0.01  # seconds that a caller lets the dispatcher have, at most


class Waiter(NamedTuple):
    satisfied: Callable[[], bool]
    lock: threading.Lock


class Dispatcher(Scheduler):
    """A scheduler in a thread of its own, with workers behind pipes."""

    def __init__(self, settings: Settings, launcher: Launcher) -> None:
        super().__init__(settings)
        self._launcher = launcher
        self._waiters: list[Waiter] = []
        self._watched: dict[int, int] = {}  # by worker: which events of its pipe
        self._woken = False
        self._sleeping = False
        self._sleeping_soundly = False  # without the timer that sends the news
        self._news_due = math.inf
        self._handed_over: deque[threading.Lock] = deque()  # of callers who sleep until the end of a turn
        self._staffed = threading.Event()
        with contextlib.ExitStack() as undo:  # what was opened, should no descriptor or thread be left for the rest
            undo.callback(launcher.close)
            self._wake_read, self._wake_write = os.pipe()
            undo.callback(os.close, self._wake_read)
            undo.callback(os.close, self._wake_write)
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._selector.register(self._wake_read, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="mpgrad-dispatcher", daemon=True)
            self._thread.start()
            undo.pop_all()
        if launcher.copies_caller:
            try:
                self._staffed.wait()
            except BaseException:  # KeyboardInterrupt: nobody will have this pool
                self.abandon()
                raise

    # --- any thread

    def wake(self) -> None:
        self._woken = True
        if self._sleeping:  # only the dispatcher itself clears it: a caller could be interrupted, or too late
            with contextlib.suppress(OSError):  # the pipe is full, so it is being woken, or closed, so it has ended
                os.write(self._wake_write, b"!")

    def hand_over(self) -> None:
        # A thread that wants the interpreter lock gets it after 5 ms from one that computes: far too late for a worker that
        # has run dry. Only one of the two can run anyway, so the caller sleeps until the dispatcher does.
        if threading.current_thread() is self._thread:
            return
        turn = threading.Lock()
        turn.acquire()
        self._handed_over.append(turn)
        self.wake()
        if self._ended is None:
            turn.acquire(timeout=LONGEST_TURN)

    def nudge(self) -> None:
        if self._sleeping_soundly:
            self.wake()

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        self.check_process()
        if satisfied():
            return True
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the pool cannot wait for the pool; hand the work to another thread")
        waiter = Waiter(satisfied, threading.Lock())
        waiter.lock.acquire()
        self._waiters.append(waiter)
        try:
            self.wake()
            if satisfied():
                return True
            waiter.lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
            return satisfied()
        finally:
            with contextlib.suppress(ValueError):  # it was satisfied, and removed by whoever saw that
                self._waiters.remove(waiter)

    def join(self) -> None:
        self.check_process()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the dispatcher's thread

    def _run(self) -> None:
        try:
            try:
                self.staff()
            finally:
                self._staffed.set()
            while not self._stopping:
                self._turn()
        except BaseException as error:
            report(logging.ERROR, "the dispatcher failed", with_traceback=True)
            self._broken = InternalError(f"the dispatcher failed ({type(error).__name__}: {error}); please report it")
            self._broken.__cause__ = error
        finally:
            try:
                self.end()
            finally:
                self._launcher.close()
                self._selector.close()
                read, write, self._wake_write = self._wake_read, self._wake_write, -1
                os.close(read)
                os.close(write)

    def _turn(self) -> None:
        """Do what there is to do, then sleep until something happens."""
        self._woken = False
        self.work()
        self._sleeping_soundly = True  # before looking for news: what comes after the look will wake us
        has_news = self.has_news()
        self._sleeping_soundly = not has_news
        self._sleeping = True
        while self._handed_over:
            self._handed_over.popleft().release()
        patience = self.keep_time()
        if has_news:
            now = time.monotonic()
            self._news_due = min(self._news_due, now + GRACE)
            patience = min(math.inf if patience is None else patience, max(0.0, self._news_due - now))
        else:
            self._news_due = math.inf
        self.traffic.system_calls += 1
        events = self._selector.select(0 if self._woken or self._stopping or self._inbox else patience)
        self._sleeping = self._sleeping_soundly = False
        if has_news and time.monotonic() >= self._news_due:  # though others may keep us busy
            self._news_due = math.inf
            self.tell_news(quiet_for=GRACE)
        for key, mask in events:
            if key.fd == self._wake_read:
                self.traffic.system_calls += 2  # this, and the write that woke us
                os.read(self._wake_read, 4096)
            elif key.data.gone is None:
                self._serve(key.data, mask)

    def _serve(self, worker: Worker, mask: int) -> None:
        """Read what `worker` sent, and write what its pipe did not take before."""
        channel = worker.channel
        assert isinstance(channel, Channel)
        try:
            if mask & selectors.EVENT_WRITE:
                with contextlib.suppress(ConnectionError):  # it died; what it had sent is read first
                    channel.flush()
                self.watch(worker)
            while worker.gone is None and (frame := channel.receive()) is not None:
                self.receive(worker, frame)
        except (EOFError, ConnectionError):
            self.lose(worker)
        except MemoryError as error:  # its answer cannot be read, nor what comes behind it
            worker.unreadable = str(error) or "no memory for what a worker has answered; return less, or tensors"
            self.kill(worker)
            self.lose(worker)
        self.tell_waiters()

    @property
    def can_kill(self) -> bool:
        return self._launcher.can_kill

    def drain_pipe(self, worker: Worker) -> None:
        while any(key.data is worker and mask & selectors.EVENT_READ for key, mask in self._selector.select(0)):
            self._serve(worker, selectors.EVENT_READ)
        self._woken = True  # what came may be followed by more work: look again before going to sleep

    def watch(self, worker: Worker) -> None:
        channel = worker.channel
        assert isinstance(channel, Channel)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_outgoing else 0)
        watched, self._watched[worker.number] = self._watched.get(worker.number), events
        if watched is None:
            self._selector.register(channel, events, worker)
        elif watched != events:
            self._selector.modify(channel, events, worker)

    def tell_waiters(self) -> None:
        for waiter in list(self._waiters):
            if waiter.satisfied():
                with contextlib.suppress(ValueError):  # it gave up at this moment
                    self._waiters.remove(waiter)
                    waiter.lock.release()

    def open_channel(self, number: int) -> Channel:
        ours, theirs = socket.socketpair()
        try:
            self._launcher.launch(number, theirs)
        except BaseException:
            ours.close()
            raise
        return Channel(ours, blocking=False, traffic=self.traffic)

    def close_channel(self, worker: Worker) -> int | None:
        channel = worker.channel
        assert isinstance(channel, Channel)
        self._selector.unregister(channel)
        del self._watched[worker.number]
        channel.close()
        code = self._launcher.exit_code(worker.number, EXIT_PATIENCE)
        if code is None:
            self._launcher.kill(worker.number)
        return code

    def kill(self, worker: Worker, by: int = signal.SIGKILL) -> None:
        self._launcher.kill(worker.number, by)
