"""What a worker says of what it does, and when, while a timeline of its pool is recorded. Worker to parent, but for `Record`.

All times are the worker's `time.monotonic_ns`: on one machine that is the caller's clock too.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Did", "Operation", "Profiled", "Record", "Recorded", "Records", "Span"]

Span = tuple[int, int, int, int, int]  # what it did (`Did`), position of the call, offset of the item, first and last moment
Operation = tuple[str, int, int, int]  # of PyTorch: its name, thread, first and last moment


class Did:
    """What a span is about."""

    LOAD = 0  # a function came, before the calls
    CALL = 1  # all that a call, or a backward, takes
    FORWARD = 2  # in the function, at one item
    BACKWARD = 3  # in PyTorch's engine
    START = 4  # of the profiler, before the calls


class Record(NamedTuple):
    """Say what you do from now on; or, not `on`, no more. `profile`: with PyTorch's operations, which are sent at the end."""

    on: bool
    profile: bool = False


class Recorded(NamedTuple):
    """What was done for a chunk: in the frame of its answer, and before it."""

    chunk: int
    began: int
    ended: int
    spans: list[Span]


class Profiled(NamedTuple):
    """The operations since `Record`."""

    operations: list[Operation]


Records = Record | Recorded | Profiled
