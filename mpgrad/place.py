"""Where this process stands: with the caller, or as a worker of one; in which directory; and what its children should know."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
from typing import Any

__all__ = ["PLACE", "preparation", "working_directory"]


class Place:
    in_worker = False


PLACE = Place()


def working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted, and a worker can do without one as well as we can
        return None


def preparation() -> dict[str, Any]:
    """What multiprocessing tells its children of itself, as in `multiprocessing.spawn.get_preparation_data`."""
    logger = logging.getLogger("multiprocessing")
    return {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "executable": multiprocessing.spawn.get_executable(),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "log_level": logger.level,
        "log_to_stderr": multiprocessing.util._log_to_stderr,  # type: ignore[attr-defined]
    }
