"""A thread for users' code that a pool runs by itself: callbacks, handlers of `logging`, writes to
the caller's streams.

That code takes its time, waits for the pool, and needs locks that the caller's threads may hold
meanwhile. The scheduling thread feeds all workers and delivers all results, so it must not run any
of that code. It queues it for this second thread:

    scheduling thread ── later ──► CallbackThread: callbacks, prints and records of tasks, the
                                   pool's own records
    caller's thread: waits for a result ── catch_up ──► gets it

Every other thread that calls `later` is the caller's, as with engine "inline", or after the end of
the pool. It runs the code at once. A caller that waits does not run what is queued by itself: it
may hold the lock, not reentrant, that a stream needs.
Guarantees: what is queued runs once, in order, and before the pool has been joined. A caller that
    gets a result has seen what its call printed and logged, unless the thread makes no progress for
    `PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["OF_THREAD", "CallbackThread", "later", "report"]

log = logging.getLogger("mpgrad")

PATIENCE = 0.2  # seconds that a caller who has its result waits for one callback, handler or stream


class Behind(NamedTuple):
    """A caller's thread that waits until so many acts are done."""

    wanted: int
    lock: threading.Lock


class CallbackThread(threading.Thread):
    """The thread of a pool that runs users' code in the order in which the scheduling thread has
    queued it."""

    def __init__(self) -> None:
        super().__init__(name="mpgrad-callbacks", daemon=True)
        self._acts = queue.SimpleQueue[Callable[[], object] | None]()
        # Callers compare these two at each wait. Each has one thread that writes it, so there is no
        # lock.
        self.added = 0
        self.done = 0
        self._stuck_at = -1
        self._behind: list[Behind] = []

    def catch_up(self, patience: float = PATIENCE) -> None:
        """Wait until all that is queued by now is done.

        In this thread, where a callback waits for the pool, it returns at once.

        Args:
            patience: seconds without progress after which it returns, -1 for none. Until there is
                some progress, no further caller waits then.
        """
        if threading.current_thread() is self or (self._stuck_at == self.done and patience >= 0):
            return
        waiter = Behind(self.added, threading.Lock())
        waiter.lock.acquire()
        self._behind.append(waiter)
        try:
            while (done := self.done) < waiter.wanted and not waiter.lock.acquire(timeout=patience):
                if self.done == done:
                    self._stuck_at = done
                    return
        finally:
            with contextlib.suppress(ValueError):  # it has been told
                self._behind.remove(waiter)

    # --- the scheduling thread

    def add(self, act: Callable[[], object]) -> None:
        self.added += 1
        self._acts.put(act)

    def end(self) -> None:
        """No act will be added: the thread ends when all are done."""
        self._acts.put(None)

    # --- this thread

    def run(self) -> None:
        while (act := self._acts.get()) is not None:
            try:
                act()
            except BaseException:  # SystemExit, too: others are still to be told
                with contextlib.suppress(
                    BaseException
                ):  # of a handler: the record of it cannot be given either
                    report(logging.ERROR, "a callback of a future raised", with_traceback=True)
            del act  # it may hold the result of a call, and the next one may be long in coming
            self.done += 1
            for waiter in list(self._behind):
                if waiter.wanted <= self.done:
                    with contextlib.suppress(ValueError):  # its time was over at this moment
                        self._behind.remove(waiter)
                        waiter.lock.release()


class OfThread(threading.local):
    """What a scheduling thread has set for itself; None in all others."""

    callbacks: CallbackThread | None = None

    def after_fork(self) -> None:
        """A worker that a scheduling thread forks is none, and its pool's other thread is not
        there."""
        self.callbacks = None


OF_THREAD = OfThread()
os.register_at_fork(after_in_child=OF_THREAD.after_fork)


def later(act: Callable[..., object], *arguments: object) -> None:
    """Run users' code: by the pool's thread for that if this is a scheduling thread, otherwise at
    once."""
    if OF_THREAD.callbacks is None:
        act(*arguments)
    else:
        OF_THREAD.callbacks.add(functools.partial(act, *arguments))


def report(level: int, text: str, *arguments: object, with_traceback: bool = False) -> None:
    """Log what the pool has to say, which goes on where a handler of the caller's raises."""
    later(log_here, level, text, arguments, sys.exc_info()[1] if with_traceback else None)


def log_here(
    level: int, text: str, arguments: tuple[object, ...], error: BaseException | None
) -> None:
    try:
        log.log(level, text, *arguments, exc_info=error)
    except Exception:
        if sys.__stderr__ is not None:
            traceback.print_exc(file=sys.__stderr__)
