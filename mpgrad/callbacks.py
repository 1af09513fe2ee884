"""A thread for user code that the pool runs: callbacks, handlers of `logging`, and writes to the
caller's streams. It runs in the caller.

User code may take long, wait for the pool, or need locks that the caller's threads hold. The
scheduling thread feeds all workers and delivers all results, so it must not run user code. It
queues the code for this second thread:

    scheduling thread ── later ──► CallbackThread: callbacks, prints and records of tasks, the
                                   pool's own records
    caller's thread: waits for a result ── catch_up ──► gets it

Any other thread that calls `later` belongs to the caller. This happens with engine "inline" and
after the end of the pool. Such a thread runs the code at once. A caller that waits does not run
queued code itself, because it may hold a lock that a stream needs and that is not reentrant.

If no other thread shows the progress of an operation, this thread does (see `mpgrad.progress`).

This module also repeats the prints, log records and warnings of tasks in the caller, where the
caller's streams, handlers and filters apply to them.
Guarantees: queued code runs once, in order, and before the pool has been joined. A caller that gets
    a result has seen what its call printed and logged, unless the thread makes no progress for
    `PATIENCE` seconds.
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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

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

# seconds that a caller waits for one callback, handler or stream after its result has arrived
PATIENCE = 0.2
# seconds between two looks at what the thread watches
LOOK_EVERY = 0.1


class PeriodicJob(Protocol):
    """A job that a waiting thread or the callbacks thread does now and then."""

    @property
    def is_closed(self) -> bool:
        """Return whether the job has ended."""

    @property
    def is_here(self) -> bool:
        """Return whether this thread should do it."""

    @property
    def is_nowhere(self) -> bool:
        """Return whether the callbacks thread should do it."""

    def tick(self) -> None:
        """Do it if it is due. Exceptions of the user's code are not raised."""

    def end(self) -> None:
        """Do it for the last time."""


class CallbackWaiter(NamedTuple):
    """A caller's thread that waits until a certain number of acts are done."""

    wanted: int
    lock: threading.Lock


class CallbackThread(threading.Thread):
    """The pool's thread that runs user code, in the order in which the scheduling thread has queued
    it."""

    def __init__(self) -> None:
        super().__init__(name="mpgrad-callbacks", daemon=True)
        self._acts = queue.SimpleQueue[Callable[[], object] | None]()
        # Callers compare these two at each wait. Only one thread writes each, so they need no lock.
        self.added = 0
        self.done = 0
        self._stuck_at = -1
        self._behind: list[CallbackWaiter] = []
        self.watched: list[PeriodicJob] = []

    def watch(self, item: PeriodicJob) -> None:
        """Look at the item every `LOOK_EVERY` seconds, until it is closed."""
        self.watched.append(item)
        self._acts.put(look_around)

    def tick(self, everything: bool = False) -> None:
        """Do the jobs of the current thread; with `everything`, also the jobs that belong to no
        thread."""
        for item in list(self.watched):
            if item.is_here or (everything and item.is_nowhere):
                item.tick()
            if item.is_closed:
                # Another thread may have taken the last job.
                with contextlib.suppress(ValueError):
                    self.watched.remove(item)

    def catch_up(self, patience: float = PATIENCE) -> None:
        """Wait until all code that is queued by now has run.

        If a callback waits for the pool, this runs in the thread itself, and returns at once.

        Args:
            patience: seconds without progress after which it returns; -1 to wait without limit.
                After such a return no further caller waits until there is some progress.
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
            # A waiter that was woken is not in the list.
            with contextlib.suppress(ValueError):
                self._behind.remove(waiter)

    # --- the scheduling thread

    def add(self, act: Callable[[], object]) -> None:
        self.added += 1
        self._acts.put(act)

    def end(self) -> None:
        """End the thread when all acts are done. No act may be added after this."""
        self._acts.put(None)

    # --- this thread

    def run(self) -> None:
        while (act := self._next()) is not None:
            if act is look_around:
                continue
            try:
                act()
            # This includes SystemExit, because further acts have to run.
            except BaseException:
                # If a log handler raised, the report may also fail.
                with contextlib.suppress(BaseException):
                    report(logging.ERROR, "a callback of a future raised", with_traceback=True)
            # The act may hold the result of a call, and the next act may come much later.
            del act
            self.done += 1
            for waiter in list(self._behind):
                if waiter.wanted <= self.done:
                    # The waiter's patience may end at this moment.
                    with contextlib.suppress(ValueError):
                        self._behind.remove(waiter)
                        waiter.lock.release()
        for item in list(self.watched):
            if item.is_nowhere:
                with contextlib.suppress(BaseException):
                    item.end()

    def _next(self) -> Callable[[], object] | None:
        while True:
            # If a log handler raised, the thread goes on.
            with contextlib.suppress(BaseException):
                self.tick(everything=True)
            with contextlib.suppress(queue.Empty):
                return self._acts.get(timeout=LOOK_EVERY if self.watched else None)


def look_around() -> None:
    """Do nothing but wake the thread, which has something new to watch."""


class ThreadState(threading.local):
    """The callbacks thread of this scheduling thread; None in all other threads."""

    callbacks: CallbackThread | None = None

    def after_fork(self) -> None:
        """Forget the thread in a forked worker.

        A worker that a scheduling thread forks is not a scheduling thread, and has no callbacks
        thread.
        """
        self.callbacks = None


OF_THREAD = ThreadState()
os.register_at_fork(after_in_child=OF_THREAD.after_fork)


def later(act: Callable[..., object], *arguments: object) -> None:
    """Queue user code for the callbacks thread if this is a scheduling thread; else run it at
    once."""
    if OF_THREAD.callbacks is None:
        act(*arguments)
    else:
        OF_THREAD.callbacks.add(functools.partial(act, *arguments))


def report(level: int, text: str, *arguments: object, with_traceback: bool = False) -> None:
    """Log a message of the pool. The pool goes on if one of the caller's handlers raises."""
    later(log_here, level, text, arguments, sys.exc_info()[1] if with_traceback else None)


def log_here(
    level: int, text: str, arguments: tuple[object, ...], error: BaseException | None
) -> None:
    try:
        # Python's handler of last resort shows only the text
        named = text if log.hasHandlers() else f"{log.name}: {text}"
        log.log(level, named, *arguments, exc_info=error)
    except Exception:
        if sys.__stderr__ is not None:
            traceback.print_exc(file=sys.__stderr__)


# --- prints, log records and warnings of tasks


def given_again(message: PrintedText | LoggedRecord) -> None:
    """Repeat in the caller what a task has printed or logged."""
    try:
        if isinstance(message, PrintedText):
            printed_again(message)
        else:
            logged_again(message)
    # One of the caller's streams or handlers failed.
    except Exception:
        report(
            logging.ERROR,
            "the output or a log record of a task cannot be repeated here",
            with_traceback=True,
        )


def printed_again(printed: PrintedText) -> None:
    stream = sys.stdout if printed.stream == "stdout" else sys.stderr
    # A program without a console has no stream.
    if stream is None:
        return
    # Perhaps the stream's reader is gone, or the stream is closed. That is not the task's fault.
    with contextlib.suppress(OSError, ValueError):
        stream.write(printed.text)


def logged_again(logged: LoggedRecord) -> None:
    record = loads_record(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def loads_record(pickled: bytes) -> logging.LogRecord:
    """Make the record as if it had been logged here, with the exception and the level's name."""
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
    # The exception's class is missing here, or its own code failed. Only its text is left.
    except Exception:
        error = None
    return error if isinstance(error, BaseException) else RemoteError(text.rpartition("\n")[2])


class RecordUnpickler(ClassUnpickler):
    """Unpickles records without an import. The callbacks thread must not wait for an import,
    because the importing thread may wait for the pool's end."""

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
    """Return the caller's levels of `logging`, which tasks also use."""
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


# Each module has a registry of the warnings that were shown, so that the filters "default" and
# "once" work. This registry is for modules that are not imported here.
ELSEWHERE: dict[str, Any] = {}

# warnings of tasks that have arrived
Warnings = list[WarningReport] | tuple[()]


def taken(warned: Warnings) -> Iterator[WarningReport]:
    """Yield each warning once, even if several threads iterate."""
    while warned:
        try:
            yield warned.pop(0)
        # Another thread has taken the last one.
        except IndexError:
            return


def warned_again(message: bytes, file: str, line: int, module: str | None) -> None:
    """Repeat a task's warning in the caller, whose filters apply to it as in the loop.

    If they make it an error, it is raised here. If the warning's `stacklevel` points to the code
    that called the task, the warning shows the caller's line.
    """
    try:
        instance = classes.loads(message)
    # The warning's class cannot be imported here.
    except Exception as error:
        instance = UserWarning(f"a warning that cannot be loaded here ({error})")
    known = vars(sys.modules[module]) if module in sys.modules else ELSEWHERE
    if is_own(file):
        frame, _ = outside()
        file, line, known = frame.f_code.co_filename, frame.f_lineno, frame.f_globals
        module = known.get("__name__")
    registry = known.setdefault("__warningregistry__", {})
    warnings.warn_explicit(instance, type(instance), file, line, module, registry)
