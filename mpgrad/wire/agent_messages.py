"""The messages between a worker and its agent, which go no further. This module needs no torch,
because the agent has none. Both sides use it.

A frame that a worker sends with descriptors is for the agent, because descriptors cannot leave the
machine. With a shared-memory engine there is no agent, and the frame is for the caller.

A `ProgressRecord` is a row of numbers in shared memory. The process that watches the worker on the
worker's machine reads it: the agent or the caller.
"""

from __future__ import annotations

import platform
import threading
from typing import NamedTuple

__all__ = [
    "CrashTraceback",
    "LackingMemory",
    "ProgressRecord",
    "ProgressRecordLocation",
    "in_order",
]

# whether this CPU keeps stores in order, and loads in order, as other processes see them
KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


def in_order() -> None:
    """Order memory accesses: other processes see earlier reads and writes happen before later ones.

    Python has no barrier, but locks order memory accesses. An access before a release cannot happen
    after it. An access after an acquisition cannot happen before it. No acquisition happens before
    an earlier release.
    """
    if not KEEPS_ORDER:
        for _ in range(2):
            with threading.Lock():
                pass


class LackingMemory(NamedTuple):
    """Agent to worker: the lent memory that the agent could not replicate. Each message replaces
    the one before."""

    pieces: list[tuple[int, int, str]]  # address, bytes, why


class CrashTraceback(NamedTuple):
    """Worker to agent or caller: one end of a pipe, whose descriptor is sent with the frame. If the
    worker dies, the pipe may hold its Python stack."""


class ProgressRecord:
    """The meaning of the int64 numbers at a worker's `ReadyReport.progress_record`. The worker
    writes them, except `SKIPPED`."""

    COUNT = 6
    BETWEEN = -1  # instead of a chunk: the position is about to change to another chunk's
    CHUNK = 0
    POSITION = 1  # the call's position in the chunk
    # when that call began, or the worker had loaded a function, on the clock of time.monotonic_ns
    STARTED = 2
    LOADING = -1  # instead of that moment: the worker loads a function
    OFFSET = 3  # the item's offset in a bundle; -1 while none of its items runs
    SKIPPED = 4  # this number and the next: a chunk that is not needed; the parent writes it


class ProgressRecordLocation(NamedTuple):
    """Worker to agent: where its `ProgressRecord` is in the memory whose descriptor is sent with
    the frame."""

    offset: int
    nbytes: int
