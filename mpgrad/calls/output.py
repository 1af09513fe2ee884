"""What tasks printed, logged and warned of, given again where the caller's streams, handlers and
filters decide."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

from mpgrad.callbacks import report
from mpgrad.errors import RemoteError, RemoteTraceback, write
from mpgrad.pickling import classes
from mpgrad.pickling.classes import ClassUnpickler
from mpgrad.tracebacks import is_own, outside, shown
from mpgrad.wire.messages import Logged, Logger, LogLevels, Printed, Warned

__all__ = ["Warnings", "given_again", "log_levels", "taken", "warned_again"]


def given_again(message: Printed | Logged) -> None:
    """Print, or log, in the caller what a task has printed or logged."""
    try:
        if isinstance(message, Printed):
            printed_again(message)
        else:
            logged_again(message)
    except Exception:  # of a stream or a handler of the caller's
        report(
            logging.ERROR,
            "what a task has printed or logged cannot be given again here",
            with_traceback=True,
        )


def printed_again(printed: Printed) -> None:
    stream = sys.stdout if printed.stream == "stdout" else sys.stderr
    if stream is None:  # a program without a console has none
        return
    with contextlib.suppress(
        OSError, ValueError
    ):  # nobody reads it any more, or it is closed: a task cannot help that
        stream.write(printed.text)


def logged_again(logged: Logged) -> None:
    record = loads_record(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def loads_record(pickled: bytes) -> logging.LogRecord:
    """As if it had been logged here: with the exception, and with the level's name."""
    attributes, exception = NoImports(io.BytesIO(pickled)).load()
    record = logging.makeLogRecord(NoImports(io.BytesIO(attributes)).load())
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
        error = NoImports(io.BytesIO(pickled)).load()
    except Exception:  # its class is not here, or its own code failed; there is the text
        error = None
    return error if isinstance(error, BaseException) else RemoteError(text.rpartition("\n")[2])


class NoImports(ClassUnpickler):
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


Warnings = deque[Warned] | tuple[()]  # of tasks, that have come


def taken(warned: Warnings) -> Iterator[Warned]:
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
