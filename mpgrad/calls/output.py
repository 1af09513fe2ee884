"""What tasks printed, logged and warned of, given again where the caller's streams, handlers and filters decide."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

from mpgrad.pickling import classes
from mpgrad.tracebacks import is_own, outside
from mpgrad.wire.messages import Logged, Printed, Warned

__all__ = ["Warnings", "given_again", "lowest_log_level", "report", "taken", "warned_again"]

log = logging.getLogger("mpgrad")


def report(level: int, text: str, *arguments: object, with_traceback: bool = False) -> None:
    """Log, from the pool's own thread, which goes on where a handler of the caller's raises."""
    try:
        log.log(level, text, *arguments, exc_info=with_traceback)
    except Exception:
        if sys.__stderr__ is not None:
            traceback.print_exc(file=sys.__stderr__)


def given_again(message: Printed | Logged) -> None:
    """Print, or log, in the caller what a task has printed or logged."""
    try:
        if isinstance(message, Printed):
            printed_again(message)
        else:
            logged_again(message)
    except Exception:  # of a stream or a handler of the caller's
        report(logging.ERROR, "what a task has printed or logged cannot be given again here", with_traceback=True)


def printed_again(printed: Printed) -> None:
    stream = sys.stdout if printed.stream == "stdout" else sys.stderr
    if stream is None:  # a program without a console has none
        return
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed: a task cannot help that
        stream.write(printed.text)


def logged_again(logged: Logged) -> None:
    record: logging.LogRecord = pickle.loads(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def lowest_log_level() -> int:
    """Of all loggers here: below it, nothing need be sent."""
    loggers = [each for each in list(logging.root.manager.loggerDict.values()) if isinstance(each, logging.Logger)]
    return min([logging.root.level, *(each.level for each in loggers if each.level)])


ALREADY_WARNED: dict[Any, Any] = {}  # what Python keeps for each module, so that a filter can say "once"


Warnings = deque[Warned] | tuple[()]  # of tasks, that have come


def taken(warned: Warnings) -> Iterator[Warned]:
    """Each once, though several threads may ask."""
    while warned:
        try:
            yield warned.popleft()
        except IndexError:  # another thread was faster
            return


def warned_again(message: bytes, file: str, line: int) -> None:
    """Give a task's warning here, where the caller's filters decide about it; raises it where they make it an error.

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
