"""Where this process stands: with the caller, or as a worker of one."""

from __future__ import annotations

__all__ = ["PLACE"]


class Place:
    in_worker = False


PLACE = Place()
