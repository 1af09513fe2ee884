"""Whether memory is about to end where its limit kills: that of the control groups that this worker
is in. And how much memory this process uses, as its allocator counts it: what a call's graph takes
is the rise over the call.

Graphs that are kept are what a worker can do without: the calls are run again when their backwards
come.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpgrad.system import PORTABLE, limiting, memory_limit, memory_used, own_cgroups, resident_bytes

__all__ = [
    "MemoryWatch",
    "give_back",
    "memory_in_use",
]

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


# --- as the allocator counts


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


class Mstats(ctypes.Structure):
    """What the `mstats` of macOS returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("bytes_total", "chunks_used", "bytes_used", "chunks_free", "bytes_free")]


LIBC = ctypes.CDLL(None)
MALLINFO: Any = None if PORTABLE else getattr(LIBC, "mallinfo2", None)  # glibc from 2.33 on
if MALLINFO is not None:
    MALLINFO.restype = Mallinfo
MALLOC_TRIM: Any = None if PORTABLE else getattr(LIBC, "malloc_trim", None)  # glibc's
MSTATS: Any = getattr(LIBC, "mstats", None) if PORTABLE else None  # macOS
if MSTATS is not None:
    MSTATS.restype = Mstats


def give_back() -> None:
    """To the system, what was freed and the allocator keeps; where it can be told to."""
    if MALLOC_TRIM is not None:
        MALLOC_TRIM(0)


def memory_in_use() -> int:
    """Bytes that the allocator has given out: their rise over a call is what stays.

    Where it does not say, those that the process has resident, which memory that is used again does not add to.
    """
    if MALLINFO is not None:
        state = MALLINFO()
        return int(state.uordblks + state.hblkhd)
    if MSTATS is not None:
        return int(MSTATS().bytes_used)
    return resident_bytes(os.getpid())
