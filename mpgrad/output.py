"""What tasks printed and logged, given again here, where the caller's streams and handlers decide about it."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys

from mpgrad.messages import Logged, Printed

__all__ = ["logged_again", "lowest_log_level", "printed_again"]


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
