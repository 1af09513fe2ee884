"""`UnlockedFuture` is a `concurrent.futures.Future` without a lock. It is used in the caller only.

A thread that is inside a future's lock may be interrupted by a signal, and the handler may wait for
the pool. If the scheduling thread needed that lock, both would wait forever. So each step is one
operation of a dictionary or a list, which Python makes atomic, and the scheduling thread never
waits.

    PENDING ── _starts ──► RUNNING ── _end ──► FINISHED ──┐
       │                                                  ├──► _tell: waiters, then callbacks
       └────── cancel ───► CANCELLED_AND_NOTIFIED ────────┘

`concurrent.futures.wait` and `as_completed` read a future's private attributes. Under its lock they
read its state, and register a *waiter*, whose event they wait for. Here they find substitutes:

    _condition    `FrozenState` does not block. Its thread always sees the same state.
    _waiters      `WaiterTable` registers a waiter unless the thread has seen a state that is final.
    event         `EndedFutures` keeps the futures that have ended, for the waiter's own thread.
Guarantees: a waiter is notified once of each future that it has seen before the future's end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from typing import Any, TypeVar

from mpgrad.callbacks import later
from mpgrad.tracebacks import without_own_frames

__all__ = ["UnlockedFuture"]

R = TypeVar("R")
FINAL = CANCELLED_AND_NOTIFIED, FINISHED
COURSE, CALLBACKS, BELLS = "course", "callbacks", "bells"


class UnlockedFuture(concurrent.futures.Future[R]):
    """A future that ends without waiting for any other thread."""

    def __init__(self) -> None:
        # `Future.__init__` would make the lock, so it is not called.
        # One dictionary for all, since the collector of cycles visits each object of each future.
        # The thread that sets COURSE first decides whether the call runs or is cancelled. Few
        # futures have CALLBACKS or BELLS, which are lists, or the number of a thread: how deep it
        # is inside `_condition`, and the state that it sees there.
        self._entries: dict[str | int, Any] = {}
        self._has_ended = False
        self._result = None
        self._exception: BaseException | None = None

    def done(self) -> bool:
        """See `concurrent.futures`."""
        return self._has_ended or self._entries.get(COURSE) == CANCELLED_AND_NOTIFIED

    def running(self) -> bool:
        """See `concurrent.futures`."""
        return self._present() == RUNNING

    def cancelled(self) -> bool:
        """See `concurrent.futures`."""
        return not self._has_ended and self._entries.get(COURSE) == CANCELLED_AND_NOTIFIED

    def cancel(self) -> bool:
        """See `concurrent.futures`."""
        if self._entries.setdefault(COURSE, CANCELLED_AND_NOTIFIED) == RUNNING:
            return False
        self._tell()
        return True

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[R]], object]) -> None:
        """See `concurrent.futures`."""
        callback = functools.partial(call_back, fn)
        callbacks = self._entries.setdefault(CALLBACKS, [])
        callbacks.append(callback)
        # If the callback is no longer in the list, `_tell` has taken it.
        if self.done() and taken_from(callbacks, callback):
            callback(self)

    def _starts(self) -> bool:
        """Note that the call begins, perhaps again. Return False if it was cancelled before."""
        return bool(self._entries.setdefault(COURSE, RUNNING) == RUNNING)

    def _end(self, exception: BaseException | None) -> None:
        """Note that the call, which has started, has ended."""
        self._exception = exception
        self._has_ended = True
        self._tell()

    def _present(self) -> str:
        return FINISHED if self._has_ended else self._entries.get(COURSE, PENDING)

    def _tell(self) -> None:
        self._ring()
        callbacks = self._entries.get(CALLBACKS)
        while callbacks:
            # Another thread may have taken the last one.
            with contextlib.suppress(IndexError):
                later(callbacks.pop(0), self)

    def _ring(self) -> None:
        bells = self._entries.get(BELLS)
        while bells:
            with contextlib.suppress(IndexError):
                bells.pop(0).ring(self)

    # --- for the functions of concurrent.futures, and `__repr__`

    @property
    def _state(self) -> str:  # type: ignore[override]
        _, frozen = self._entries.get(threading.get_ident(), (0, None))
        return frozen or self._present()

    @property
    def _condition(self) -> FrozenState:  # type: ignore[override]
        return FrozenState(self)

    @property
    def _waiters(self) -> WaiterTable:  # type: ignore[override]
        return WaiterTable(self)


def call_back(
    fn: Callable[[concurrent.futures.Future[R]], object], future: concurrent.futures.Future[R]
) -> None:
    try:
        fn(future)
    except Exception:
        logging.getLogger("concurrent.futures").exception(
            "exception calling callback for %r", future
        )


def taken_from(items: list[Any], item: object) -> bool:
    """Remove the item. Return False if it was already removed."""
    try:
        items.remove(item)
    except ValueError:
        return False
    return True


class FrozenState:
    """Replaces the lock of a future. It does not block.

    Between `acquire` and `release`, a thread always sees the state that it read first. So does a
    signal handler that runs in between.
    """

    def __init__(self, future: UnlockedFuture[Any]) -> None:
        self._future = future

    def acquire(self) -> None:
        entries, thread = self._future._entries, threading.get_ident()
        depth, state = entries.get(thread) or (0, self._future._present())
        entries[thread] = depth + 1, state

    def release(self) -> None:
        entries, thread = self._future._entries, threading.get_ident()
        depth, state = entries[thread]
        if depth > 1:
            entries[thread] = depth - 1, state
        else:
            del entries[thread]

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class WaiterTable:
    """Replaces a future's list of waiters."""

    def __init__(self, future: UnlockedFuture[Any]) -> None:
        self._future = future

    def append(self, waiter: Any) -> None:
        if not isinstance(waiter.event, EndedFutures):
            waiter.event = EndedFutures(waiter)
        # If the waiter's thread has seen a final state, the waiter is not notified.
        if self._future._state in FINAL:
            return
        self._future._entries.setdefault(BELLS, []).append(waiter.event)
        if self._future.done():
            self._future._ring()

    def remove(self, waiter: Any) -> None:
        taken_from(self._future._entries.get(BELLS, []), waiter.event)


class EndedFutures:
    """Replaces the event of a waiter.

    `threading.Event` has a lock, which the waiter's thread may hold while a signal handler runs.
    The queue has none, and the waiter's thread itself notes the futures that have ended.
    """

    def __init__(self, waiter: Any) -> None:
        self._waiter = weakref.ref(waiter)
        self._told = queue.SimpleQueue[UnlockedFuture[Any] | None]()
        self._is_set = False

    def ring(self, future: UnlockedFuture[Any]) -> None:
        self._told.put(future)

    def set(self) -> None:
        self._is_set = True
        self._told.put(None)

    def clear(self) -> None:
        self._is_set = False

    @without_own_frames  # if an interrupt ends it
    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(queue.Empty):
            while not self._is_set:
                left = None if end is None else max(0.0, end - time.monotonic())
                self._note(self._told.get(timeout=left))
            while True:
                self._note(self._told.get_nowait())
        return self._is_set

    def _note(self, future: UnlockedFuture[Any] | None) -> None:
        waiter = self._waiter()
        if future is None or waiter is None:
            return
        if future._present() == CANCELLED_AND_NOTIFIED:
            waiter.add_cancelled(future)
        elif future._exception is None:
            waiter.add_result(future)
        else:
            waiter.add_exception(future)
