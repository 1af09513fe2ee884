"""How much memory this process uses, as its allocator counts it: what a call's graph takes is the rise over the call."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from mpgrad.system import PORTABLE, resident_bytes

__all__ = ["give_back", "memory_in_use"]


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
