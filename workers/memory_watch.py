"""Whether memory is about to end where its limit kills: that of the control groups that this worker is in.

Graphs that are kept are what a worker can do without: the calls are run again when their backwards come.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path

from mpgrad.cgroups import limiting, memory_limit, memory_used, own_cgroups

__all__ = ["MemoryWatch"]

NEAR = 0.85  # of a limit, which caller and workers share; the file cache has been left out. A call takes more while it runs
AHEAD = 2  # times what was taken between two looks, which may be taken until the next one: a call's graph, in each worker
FAR = 0.6  # up to here, that included
SELDOM, OFTEN = 0.1, 0.005  # seconds between two looks, of 0.05 ms: below FAR, and from there on


class MemoryWatch:
    def __init__(self, folders: Sequence[Path] | None = None) -> None:
        """`folders`: of the control groups; None for this process's own. Those that limit nothing now are left out."""
        self._given = folders
        self._next = 0.0  # when to look again, on the clock of time.monotonic
        self._used = 1.0  # of the limit that is nearest
        self._rise = 0.0  # between two looks, the most of late

    @functools.cached_property
    def _folders(self) -> list[Path]:
        """Found when they are first needed: it takes 0.7 ms, for which a worker's start would wait."""
        return limiting(own_cgroups("memory") if self._given is None else self._given)

    def is_short(self) -> bool:
        """Looks, unless it has looked a moment ago: then nothing is said to be short."""
        now = time.monotonic()
        if now < self._next:
            return False
        if not self._folders:
            self._next = math.inf
            return False
        used = max(memory_used(folder) / memory_limit(folder) for folder in self._folders)
        self._rise = max(used - self._used, self._rise / 2)
        self._used = used
        soon = used + AHEAD * self._rise
        self._next = now + (SELDOM if soon < FAR else OFTEN)
        return used > NEAR or soon > 1
