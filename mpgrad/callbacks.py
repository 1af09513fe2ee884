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

What tasks printed, logged and warned of, given again where the caller's streams, handlers and
filters decide.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import queue
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpgrad.errors import RemoteError, RemoteTraceback, write
from mpgrad.pickling import classes
from mpgrad.pickling.classes import ClassUnpickler
from mpgrad.tracebacks import is_own, outside, shown
from mpgrad.wire.messages import LoggedRecord, Logger, LogLevels, PrintedText, WarningReport

__all__ = [
    "OF_THREAD",
    "CallbackThread",
    "Warnings",
    "given_again",
    "later",
    "log_levels",
    "report",
    "taken",
    "warned_again",
]

log = logging.getLogger("mpgrad")

PATIENCE = 0.2  # seconds that a caller who has its result waits for one callback, handler or stream


class CallbackWaiter(NamedTuple):
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
        self._behind: list[CallbackWaiter] = []

    def catch_up(self, patience: float = PATIENCE) -> None:
        """Wait until all that is queued by now is done.

        In this thread, where a callback waits for the pool, it returns at once.

        Args:
            patience: seconds without progress after which it returns, -1 for none. Until there is
                some progress, no further caller waits then.
        """
        if threading.current_thread() is self or (self._stuck_at == self.done and patience >= 0):
            return
        waiter = CallbackWaiter(self.added, threading.Lock())
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
                # of a handler: the record of it cannot be given either
                with contextlib.suppress(BaseException):
                    report(logging.ERROR, "a callback of a future raised", with_traceback=True)
            del act  # it may hold the result of a call, and the next one may be long in coming
            self.done += 1
            for waiter in list(self._behind):
                if waiter.wanted <= self.done:
                    with contextlib.suppress(ValueError):  # its time was over at this moment
                        self._behind.remove(waiter)
                        waiter.lock.release()


class ThreadState(threading.local):
    """What a scheduling thread has set for itself; None in all others."""

    callbacks: CallbackThread | None = None

    def after_fork(self) -> None:
        """A worker that a scheduling thread forks is none, and its pool's other thread is not
        there."""
        self.callbacks = None


OF_THREAD = ThreadState()
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


# --- what tasks printed, logged and warned of


def given_again(message: PrintedText | LoggedRecord) -> None:
    """Print, or log, in the caller what a task has printed or logged."""
    try:
        if isinstance(message, PrintedText):
            printed_again(message)
        else:
            logged_again(message)
    except Exception:  # of a stream or a handler of the caller's
        report(
            logging.ERROR,
            "what a task has printed or logged cannot be given again here",
            with_traceback=True,
        )


def printed_again(printed: PrintedText) -> None:
    stream = sys.stdout if printed.stream == "stdout" else sys.stderr
    if stream is None:  # a program without a console has none
        return
    # nobody reads it any more, or it is closed: a task cannot help that
    with contextlib.suppress(OSError, ValueError):
        stream.write(printed.text)


def logged_again(logged: LoggedRecord) -> None:
    record = loads_record(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def loads_record(pickled: bytes) -> logging.LogRecord:
    """As if it had been logged here: with the exception, and with the level's name."""
    attributes, exception = RecordUnpickler(io.BytesIO(pickled)).load()
    record = logging.makeLogRecord(RecordUnpickler(io.BytesIO(attributes)).load())
    if (name := logging.getLevelName(record.levelno)) != f"Level {record.levelno}":
        record.levelname = name
    if exception is not None:
        record.exc_text = shown(record.exc_text or "")
        error = exception_again(exception, record.exc_text)
        write(error, "__cause__", RemoteTraceback(record.exc_text))
        record.exc_info = type(error), error, None
    return record


def exception_again(pickled: bytes, text: str) -> BaseException:
    try:
        error = RecordUnpickler(io.BytesIO(pickled)).load()
    except Exception:  # its class is not here, or its own code failed; there is the text
        error = None
    return error if isinstance(error, BaseException) else RemoteError(text.rpartition("\n")[2])


class RecordUnpickler(ClassUnpickler):
    """The thread that gives records may not wait for an import, as the importing thread may wait
    for the pool's end."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise ImportError(f"{module} is not imported here", name=module)
        found: Any = sys.modules[module]
        is_going_on = getattr(getattr(found, "__spec__", None), "_initializing", False)
        if not is_going_on:
            return super().find_class(module, name)
        for part in name.split("."):
            found = getattr(found, part)
        return found


def log_levels() -> LogLevels:
    """What a task sees of them."""
    loggers = [*logging.root.manager.loggerDict.items(), ("root", logging.root)]
    seen = {
        name: Logger(each.level, bool(each.disabled), bool(each.propagate))
        for name, each in loggers
        if isinstance(each, logging.Logger)
    }
    changed = {name: each for name, each in seen.items() if each != Logger() or name == "root"}
    names = {
        level: logging.getLevelName(level) for level in set(getattr(logging, "_levelToName", ()))
    }
    return LogLevels(changed, names, logging.root.manager.disable)


# what Python keeps for each module, so that a filter can say "once"
ALREADY_WARNED: dict[Any, Any] = {}


Warnings = deque[WarningReport] | tuple[()]  # of tasks, that have come


def taken(warned: Warnings) -> Iterator[WarningReport]:
    """Each once, though several threads may ask."""
    while warned:
        try:
            yield warned.popleft()
        except IndexError:  # another thread was faster
            return


def warned_again(message: bytes, file: str, line: int) -> None:
    """Give a task's warning here, where the caller's filters decide about it; raises it where they
    make it an error.

    One that is said of who called the task (by `stacklevel`) is said of the caller's line.
    """
    try:
        instance = classes.loads(message)
    except Exception as error:  # its class cannot be imported here
        instance = UserWarning(f"a warning that cannot be loaded here ({error})")
    if is_own(file):
        frame, _ = outside()
        file, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(instance, type(instance), file, line, registry=ALREADY_WARNED)
