"""`EarlyAnswers` sends the results of finished calls while a later call of their chunk takes long.
This module runs in workers.

Short calls go to a worker together, and their results come back together, because a message costs
more than such a call. But the duration of a call is not known in advance. So while a call runs, a
thread checks every few milliseconds whether results are waiting, and sends them.

    the worker's thread   turn taken │ answer grows │ released: user's code │ taken │ answer sent
    this thread                      └─────────── turn taken: finished results sent ──┘
Guarantees: the two threads never touch the answer, the worker's memory or the link at the same
    time. While a task forks, the thread does not exist. `threading.enumerate()` does not list it.
Assumes: user's code lets other threads run. While C code keeps the interpreter lock, results wait.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import signal
import threading
import time
import weakref
from collections.abc import Callable

from mpgrad.system import PROC

__all__ = ["EarlyAnswers"]

# seconds; the caller also considers such a call long (`LATE` in `scheduling.queue`)
PATIENCE = 5e-3
# the same if results are needed only together; each answer costs more than 0.1 ms of CPU
PATIENCE_TOGETHER = 50e-3


class EarlyAnswers:
    """The thread, and the turn that it shares with the worker's own thread.

    It is a context manager for user's code: `with early: value = function(...)`.
    """

    def __init__(self, send: Callable[[], bool]) -> None:
        """`send` sends the finished results, and returns whether there were any."""
        self._send = send
        # a thread that prints within user's code, perhaps in a finalizer, also takes the turn
        self.turn = threading.RLock()
        # whether calls may start this thread; False if the worker's thread is the caller's
        self.is_on = False
        self.error: BaseException | None = None
        self._patience = PATIENCE  # seconds between two checks
        self._calls = 0  # calls that began after results that were not sent
        self._is_asleep = True  # whether the thread sleeps until a call wakes it
        self._bell = _thread.allocate_lock()
        self._has_ended = _thread.allocate_lock()  # the newest thread holds it while it lives
        self._thread = 0  # the system's number of the thread; 0 if there is none

    def __enter__(self) -> None:
        self.turn.release()

    def __exit__(self, *_: object) -> None:
        self.turn.acquire()

    def note_call(self, together: bool = False) -> None:
        """Record that a call begins while results of other calls wait. If `together`, the results
        are needed only together."""
        self._calls += 1
        patience = PATIENCE_TOGETHER if together else PATIENCE
        if (self._is_asleep or patience < self._patience) and self.is_on:
            self._is_asleep, self._patience = False, patience
            if self._thread:
                # the bell may already be released, and the thread not yet awake
                with contextlib.suppress(RuntimeError):
                    self._bell.release()
            else:
                self._start()

    def _start(self) -> None:
        self._bell.acquire(blocking=False)
        self._has_ended = ended = _thread.allocate_lock()
        ended.acquire()
        begun = _thread.allocate_lock()
        begun.acquire()
        run = functools.partial(self._run, begun, ended)
        lives = weakref.ref(run)
        # If it is refused, or has no memory to begin with, results leave with their chunk.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(run, ())
            del run
            while not begun.acquire(timeout=PATIENCE) and lives() is not None:
                pass
        self.is_on = bool(self._thread)

    def stop(self) -> None:
        """End the thread. The next call that needs it starts another."""
        thread, ended = self._thread, self._has_ended
        if not thread:
            return
        self._thread = 0
        self._bell.acquire(blocking=False)
        with contextlib.suppress(RuntimeError):  # another thread, which forks, has released it
            self._bell.release()
        ended.acquire()
        ended.release()
        self._is_asleep = True
        # Python warns of a fork while the system still lists a second thread.
        while (PROC / "self" / "task" / str(thread)).exists():
            time.sleep(0)

    def _run(self, begun: _thread.LockType, ended: _thread.LockType) -> None:
        try:
            # Signals must go to the worker's thread, which runs their handlers, and interrupt its
            # wait.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._thread = thread = _thread.get_native_id()
        except MemoryError:
            return
        finally:
            begun.release()
        seen = -1
        try:
            while self._thread == thread:
                self._bell.acquire(timeout=-1 if self._is_asleep else self._patience)
                if seen != self._calls:
                    seen = self._calls
                elif self.turn.acquire(blocking=False):
                    # the same call has been running since the last check
                    try:
                        self._is_asleep = not self._send()
                    finally:
                        self.turn.release()
        except BaseException as error:
            # The worker's thread raises it, unless the pipe has already raised it there.
            self.error = error
            self.is_on = False
        finally:
            ended.release()
