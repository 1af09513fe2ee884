"""Where this process stands: with the caller, or as a worker of one; and in which directory."""

from __future__ import annotations

import os

__all__ = ["PLACE", "working_directory"]


class Place:
    in_worker = False


PLACE = Place()


def working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted, and a worker can do without one as well as we can
        return None
