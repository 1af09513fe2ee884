"""A worker sends the prints, log records and warnings of tasks to the caller, and a crash traceback
if it dies. This module runs in workers.

A worker process inherits its parent's descriptors, so C code prints to the same place as in the
parent. But `sys.stdout` is not a descriptor in a notebook, in a test runner or under
`redirect_stdout`, and log handlers are not inherited. Warnings are also sent to the caller, unless
the caller's filters ignore them or make them errors. In that case the filters apply in the task
(`FILTERS`).

    print, logging ──► OutputStream, LogHandler ──► Outlet ──► PrintedText, LoggedRecord
    warnings ──► TaskWarnings ──► the answer
    faulthandler ──► a pipe to the parent
faulthandler writes the Python stack from a signal handler, in C. This works even if the worker is
stuck in C and holds the interpreter lock, or if its memory is corrupt. Fatal signals (SIGSEGV,
SIGFPE, SIGABRT, SIGBUS, SIGILL) still end the worker. The parent sends `TRACEBACK_SIGNAL` to a
worker whose call takes too long. The worker writes its stack, and then the signal ends the process
by default. So the death of the process shows that the stack is complete.

Guarantees: a task's text and log records arrive before its result. Text that it printed before it
    crashed also arrives. Any thread, signal handler or finalizer may print or log at any moment:
    nothing is lost, and nothing is sent twice. If a handler raises while a frame is being sent, the
    waiting frames may be lost, but none is lost in part.
Assumes: one thread sends over the link. Text that other threads print waits for it.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch

from mpgrad.environment import TaskFilters
from mpgrad.errors import contextmanager, traceback_of
from mpgrad.pickling import classes
from mpgrad.pickling.classes import dumps, only_carried
from mpgrad.pickling.exceptions import ExceptionPickler, carried
from mpgrad.pickling.objects import IMMUTABLE
from mpgrad.system import OwnedDescriptor
from mpgrad.wire.agent_messages import CrashTraceback
from mpgrad.wire.frames import Link, drained
from mpgrad.wire.messages import (
    TRACEBACK_SIGNAL,
    Failure,
    LoggedRecord,
    LogLevels,
    Message,
    PrintedText,
    WarningReport,
)

__all__ = [
    "Outlet",
    "TaskWarnings",
    "described",
    "failure",
    "given_in_words",
    "register_crash_traceback",
]


class Outlet:
    """Collects the text and log records of this process, and sends them."""

    def __init__(self, link: Link, log_levels: LogLevels) -> None:
        self._link = link
        self._pid = os.getpid()
        self._thread = threading.current_thread()
        # held while sending, see `EarlyAnswers`
        self.turn = threading.RLock()
        self._waiting: deque[Message] = deque()
        self._is_sending = False
        self._streams = (
            OutputStream(self, "stdout", sys.stdout),
            OutputStream(self, "stderr", sys.stderr),
        )
        sys.stdout, sys.stderr = self._streams
        handler = LogHandler(self)
        logging.root.addHandler(handler)
        take_levels(log_levels, handler)

    def close(self) -> None:
        """Stop sending. Later prints go where they would have gone without this outlet."""
        sys.stdout, sys.stderr = (stream.original for stream in self._streams)

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        if threading.current_thread() is self._thread:
            self._send()

    def flush(self) -> None:
        """Send everything, even unfinished lines. Only the sending thread calls this."""
        for stream in self._streams:
            stream.send()
        self._send()

    def _send(self) -> None:
        # A signal handler or a finalizer has interrupted the loop below, which will also send the
        # new message.
        if self._is_sending:
            return
        try:
            self._is_sending = True
            while self._waiting:
                with self.turn:
                    self._link.send(drained(self._waiting))
        finally:
            self._is_sending = False

    @property
    def is_ours(self) -> bool:
        """Whether the link belongs to this process. In a task's fork it does not."""
        return os.getpid() == self._pid


class OutputStream(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr`. It sends finished lines and flushed text at once."""

    def __init__(self, outlet: Outlet, name: str, original: TextIO) -> None:
        self._outlet = outlet
        self._name = name
        self.original = original
        self._pieces: deque[str] = deque()  # parts of a line
        self._order = threading.RLock()  # keeps the texts in order

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.original.encoding

    @property
    def buffer(self) -> object:
        return self.original.buffer

    def fileno(self) -> int:
        return self.original.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if not self._outlet.is_ours:
            return self.original.write(text)
        self._pieces.append(text)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self._outlet.is_ours:
            self.send()
        else:
            self.original.flush()

    def send(self) -> None:
        """Send what was written, even an unfinished line."""
        with self._order:
            text = "".join(drained(self._pieces))
            if text:
                self._outlet.put(PrintedText(self._name, text))


class LogHandler(logging.Handler):
    def __init__(self, outlet: Outlet) -> None:
        super().__init__()
        self._outlet = outlet

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._outlet.is_ours:
                self._outlet.put(LoggedRecord(dumps_record(record)))
        except Exception:
            self.handleError(record)


def take_levels(given: LogLevels, handler: logging.Handler) -> None:
    """Set the caller's levels, so that no record is sent that the caller would drop. Records of
    loggers that do not propagate get the handler directly."""
    for level, name in given.names.items():
        logging.addLevelName(level, name)
    for name, each in given.loggers.items():
        logger = logging.getLogger(None if name == "root" else name)
        logger.setLevel(each.level)
        logger.disabled, logger.propagate = each.disabled, each.propagate
        if not each.propagate:
            logger.addHandler(handler)
    logging.disable(given.disabled)


def dumps_record(record: logging.LogRecord) -> bytes:
    """Pickle a record without the attributes that cannot be pickled. If its arguments are not
    plain, format the text here."""
    attributes = dict(vars(record))
    values = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
    if type(record.msg) is not str or any(type(each) not in IMMUTABLE for each in values):
        attributes.update(msg=record.getMessage(), args=None)
    exception = None
    if record.exc_info and isinstance(record.exc_info[1], BaseException):
        error = record.exc_info[1]
        attributes.update(exc_info=None, exc_text=traceback_of(error).rstrip("\n"))
        exception = carried(error)
    return dumps((pickled_attributes(attributes), exception))


def pickled_attributes(attributes: dict[str, Any]) -> bytes:
    """Pickle the attributes that can be pickled."""
    try:
        return dumps(attributes, ExceptionPickler)
    except Exception:  # an object among them may raise anything
        return dumps(only_carried(attributes, ExceptionPickler), ExceptionPickler)


# --- warnings


class TaskWarnings:
    """The warnings since the last answer, in order and without repetitions."""

    def __init__(self, filters: TaskFilters) -> None:
        self.filters = filters
        self._given: dict[WarningReport, None] = {}

    def watch(self) -> None:
        """Collect warnings from now on, in a process that belongs to the pool."""
        warnings.showwarning = self._show

    def take(self) -> list[WarningReport]:
        """Return the warnings for the answer, and forget them."""
        if not self._given:
            return []
        given, self._given = self._given, {}
        return list(given)

    def add(self, text: str, function: types.FunctionType | None) -> None:
        """Add one of mpgrad's own warnings, at the function's first line. The caller's filters
        apply to it."""
        file, line, module = __file__, 0, None
        if function is not None:
            code, module = function.__code__, function.__module__
            file, line = code.co_filename, code.co_firstlineno
        self._given[WarningReport(classes.dumps(UserWarning(text)), file, line, module)] = None

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore warnings while a call runs again, because the caller got them the first time."""
        given = dict(self._given)
        try:
            yield
        finally:
            self._given = given

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        instance = message if isinstance(message, Warning) else category(message)
        try:
            pickled = classes.dumps(instance)
        except Exception:
            # a warning of the user's class with content that cannot be pickled: keep its text
            pickled = classes.dumps(UserWarning(str(message)))
        report = WarningReport(pickled, filename, lineno, module_at(filename, lineno))
        self._given[report] = None


def module_at(file: str, line: int) -> str | None:
    """Return the name of the module whose code is running there. Python compares it with the
    filters, but does not pass it on."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_lineno) == (file, line):
            return frame.f_globals.get("__name__")
        frame = frame.f_back
    return None


# --- failures


def failure(error: BaseException, phase: str, offset: int = 0, given: str = "") -> Failure:
    return Failure(carried(error), traceback_of(error), phase, offset, given)


MOST_IN_WORDS = 6  # describe at most this many values of a container


def in_words(value: Any, depth: int = 2) -> str:
    """Describe tensors by dtype and shape, other values by type. This does not run user's code."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"array {value.dtype} {list(value.shape)}"
    if kind not in (tuple, list, dict):
        return kind.__name__
    opening, closing = "()" if kind is tuple else "[]" if kind is list else "{}"
    if depth == 0:
        return f"{opening}...{closing}"
    pairs = (
        [("", each) for each in value]
        if kind is not dict
        else [(f"{named(key)}: ", each) for key, each in value.items()]
    )
    return opening + all_in_words(pairs, depth - 1) + closing


def all_in_words(pairs: Sequence[tuple[str, Any]], depth: int) -> str:
    words = [name + in_words(value, depth) for name, value in pairs[:MOST_IN_WORDS]]
    left = len(pairs) - len(words)
    return ", ".join([*words, f"and {left} more"] if left else words)


def named(key: object) -> str:
    return repr(key) if type(key) in (str, int) else type(key).__name__


def given_in_words(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    return all_in_words(
        [*(("", each) for each in args), *((f"{name}=", each) for name, each in kwargs.items())], 2
    )


def described(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # user's code may raise, and this text is only for an error message
        return object.__repr__(value)


# --- crash traceback


def register_crash_traceback(link: Link) -> None:
    """If this process crashes, send its stack to the parent, or to its agent, which passes it
    on."""
    try:
        theirs, ours = os.pipe()
    except OSError:  # no descriptor is free: run calls without a traceback
        return
    try:
        # text that does not fit is lost, because the pipe is read only after the worker's death
        os.set_blocking(ours, False)
        link.send([CrashTraceback()], (), [theirs])
    finally:
        os.close(theirs)
    faulthandler.enable(ours)
    faulthandler.register(TRACEBACK_SIGNAL, ours, chain=True)
    # the process that started this one may have blocked the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {TRACEBACK_SIGNAL})

    end = [OwnedDescriptor(ours)]

    def leave() -> None:
        """Close the pipe, once. Processes that a task forks, and their children, must not report to
        it."""
        if end:
            faulthandler.disable()
            faulthandler.unregister(TRACEBACK_SIGNAL)
            end.pop().close()

    os.register_at_fork(after_in_child=leave)
