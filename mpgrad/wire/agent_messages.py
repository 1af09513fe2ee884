"""What passes between a worker and its agent, and not on to the caller or from there. Needs no
torch, as the agent has none.

A frame of a worker's that comes with descriptors is for the agent, since descriptors end at the
machine's border. With a shared-memory engine there is no agent, and the frame is for the caller.

`ProgressRecord` are numbers in shared memory: whoever is on the worker's machine reads them, an
agent or the caller.
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

# of stores, and of loads, as other processes see them
KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


def in_order() -> None:
    """What was read or written before is so, for other processes too, before what comes after.

    Python has no barrier. But what stands before a release comes no later than it, what stands
    behind an acquisition no earlier than that, and no acquisition before an earlier release.
    """
    if not KEEPS_ORDER:
        for _ in range(2):
            with threading.Lock():
                pass


class LackingMemory(NamedTuple):
    """Agent to worker: what the caller has lent and the agent could not replicate. Each takes the
    place of the one before."""

    pieces: list[tuple[int, int, str]]  # address, bytes, why


class CrashTraceback(NamedTuple):
    """The end of a pipe, whose descriptor travels with the frame: should the worker die, its Python
    stack may be in it."""


class ProgressRecord:
    """What the int64 at a worker's `ReadyReport.progress_record` are. Written by the worker, but
    for those that say otherwise."""

    COUNT = 6
    BETWEEN = -1  # in the place of the chunk: the position is that of another one now
    CHUNK = 0
    POSITION = 1  # of the call in the chunk
    STARTED = 2  # when that call began, on the clock of time.monotonic_ns
    OFFSET = 3  # of the item in the call, where that is a bundle; -1 where it is at none of them
    SKIPPED = 4  # by the parent, here and in the next: a chunk that nobody waits for any more


class ProgressRecordLocation(NamedTuple):
    """Worker to agent: its `ProgressRecord` lie there in the memory whose descriptor travels with
    the frame."""

    offset: int
    nbytes: int
