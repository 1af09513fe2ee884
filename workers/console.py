"""What a worker tells beside results: what tasks print, log and warn of, and its crash traceback
when it dies.

A worker process inherits the descriptors of its parent, so that C code prints where the parent
does. But `sys.stdout` of a notebook, of a test runner or under `redirect_stdout` is no descriptor,
and log handlers are not inherited at all. Warnings go to the caller too, whose filters say what
becomes of them, as they do for a serial loop.

    print, logging ──► OutputStream, LogHandler ──► Outlet ──► PrintedText, LoggedRecord
    warnings ──► TaskWarnings ──► the answer
    faulthandler ──► a pipe, whose other end the parent has
faulthandler writes the Python stack from a signal's handler, in C: also where the worker is stuck
in C and holds the interpreter lock, or its memory is broken. Fatal signals (SIGSEGV, SIGFPE,
SIGABRT, SIGBUS, SIGILL) end the worker as they would have. `TRACEBACK_SIGNAL` is how the parent
ends one whose call takes too long: the stack is written, and then the signal does what it does by
default, which is to end the process. So the death says that the stack is complete.

Guarantees: what a task printed or logged has arrived before its result; also what it printed before
    it crashed. Any thread, signal's handler or finalizer may print or log at any moment: nothing is
    lost, and nothing comes twice. A handler that raises while something is being sent ends that:
    what waited at that moment may be lost, whole frames of it, never a half.
Assumes: one thread sends over the link; what others print waits for it.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch

from mpgrad.errors import contextmanager, traceback_of
from mpgrad.pickling import classes
from mpgrad.pickling.classes import dumps
from mpgrad.pickling.exceptions import ExceptionPickler, carried
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
    """Gathers what is printed and logged in this process, and sends it."""

    def __init__(self, link: Link, log_levels: LogLevels) -> None:
        self._link = link
        self._pid = os.getpid()
        self._thread = threading.current_thread()
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
        """Nothing can be sent any more; what is still printed goes where it would have gone."""
        sys.stdout, sys.stderr = (stream.original for stream in self._streams)

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        if threading.current_thread() is self._thread:
            self._send()

    def flush(self) -> None:
        """Send what waits, unfinished lines too; by the thread that sends."""
        for stream in self._streams:
            stream.flush()
        self._send()

    def _send(self) -> None:
        # we are in a signal's handler or a finalizer, in the middle of it: it goes on with what was
        # added
        if self._is_sending:
            return
        try:
            self._is_sending = True
            while self._waiting:
                self._link.send(drained(self._waiting))
        finally:
            self._is_sending = False

    @property
    def is_ours(self) -> bool:
        """Not in a process that a task has forked: the link is not its own."""
        return os.getpid() == self._pid


class OutputStream(io.TextIOBase):
    """Takes the place of `sys.stdout` or `sys.stderr`; a line, or what is flushed, is sent at
    once."""

    def __init__(self, outlet: Outlet, name: str, original: TextIO) -> None:
        self._outlet = outlet
        self._name = name
        self.original = original
        self._pieces: deque[str] = deque()  # of a line
        self._order = threading.RLock()  # what was written first is sent first

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
        if not self._outlet.is_ours:
            self.original.flush()
            return
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
    """Tasks see the caller's levels, and nothing that it does not want is sent; records that do not
    reach the root are."""
    for level, name in given.names.items():
        logging.addLevelName(level, name)
    for name, each in given.loggers.items():
        logger = logging.getLogger(None if name == "root" else name)
        logger.setLevel(each.level)
        logger.disabled, logger.propagate = each.disabled, each.propagate
        if not each.propagate:
            logger.addHandler(handler)
    logging.disable(given.disabled)


PLAIN = {type(None), bool, int, float, complex, str, bytes}


def dumps_record(record: logging.LogRecord) -> bytes:
    """A record may hold anything: it goes without what cannot be carried, and its text is made
    here, unless that is plain."""
    attributes = dict(vars(record))
    values = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
    if type(record.msg) is not str or any(type(each) not in PLAIN for each in values):
        attributes.update(msg=record.getMessage(), args=None)
    exception = None
    if record.exc_info and isinstance(record.exc_info[1], BaseException):
        error = record.exc_info[1]
        attributes.update(exc_info=None, exc_text=traceback_of(error).rstrip("\n"))
        exception = carried(error)
    return dumps((pickled_attributes(attributes), exception))


def pickled_attributes(attributes: dict[str, Any]) -> bytes:
    """Without those that cannot be carried."""
    try:
        return dumps(attributes, ExceptionPickler)
    except Exception:  # of whoever's object is among them
        return dumps(
            {name: each for name, each in attributes.items() if can_be_carried(each)},
            ExceptionPickler,
        )


def can_be_carried(value: object) -> bool:
    try:
        dumps(value, ExceptionPickler)
    except Exception:
        return False
    return True


# --- warnings


class TaskWarnings:
    """Those since the last answer, each once, in order."""

    def __init__(self) -> None:
        self._given: dict[WarningReport, None] = {}

    def watch(self) -> None:
        """From here on, in a process that belongs to us."""
        warnings.showwarning = self._show

    def take(self) -> list[WarningReport]:
        """For the answer."""
        if not self._given:
            return []
        given, self._given = self._given, {}
        return list(given)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """While something runs again: its warnings were given the first time."""
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
            # of a class of its own, with what cannot be carried: its text is what matters
            pickled = classes.dumps(UserWarning(str(message)))
        self._given[WarningReport(pickled, filename, lineno)] = None


# --- failures


def failure(error: BaseException, phase: str, offset: int = 0, given: str = "") -> Failure:
    return Failure(carried(error), traceback_of(error), phase, offset, given)


MOST_IN_WORDS = 6  # values of each container


def in_words(value: Any, depth: int = 2) -> str:
    """Tensors by dtype and shape, the rest by type; runs no code of the user's."""
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
    except Exception:  # it is the user's code, and what the result is wanted for is an error's text
        return object.__repr__(value)


# --- crash traceback


def register_crash_traceback(link: Link) -> None:
    """Have this process leave its stack to the parent, or to its agent, which passes it on."""
    try:
        theirs, ours = os.pipe()
    except OSError:  # no descriptor is free, and calls matter more
        return
    try:
        # what does not fit in is left out: nobody reads before we are dead
        os.set_blocking(ours, False)
        link.send([CrashTraceback()], (), [theirs])
    finally:
        os.close(theirs)
    faulthandler.enable(ours)
    faulthandler.register(TRACEBACK_SIGNAL, ours, chain=True)
    # whoever started us may have blocked it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {TRACEBACK_SIGNAL})

    end = [OwnedDescriptor(ours)]

    def leave() -> None:
        """A process that a task forks has nothing to say; nor has one that such a process forks, of
        which the end is not."""
        if end:
            faulthandler.disable()
            faulthandler.unregister(TRACEBACK_SIGNAL)
            end.pop().close()

    os.register_at_fork(after_in_child=leave)
