"""What is noted while a timeline is recorded: laps of the caller's threads, chunks of calls on their way through workers.

    threads of the caller ──► `lap` ──► Lap              the scheduling thread ──► `sent`, `answered`, `died` ──► Chunk
                                                         a worker's `Recorded`, `Profiled` ──┘
Assumes: any thread appends to `laps`; all else is the scheduling thread's. Times are nanoseconds of `time.monotonic_ns`, those
    of workers by their own clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpgrad.wire.records import Operation, Span

__all__ = ["Chunk", "Lap", "Recording", "Worker"]


class Lap(NamedTuple):
    """What a thread of the caller did for a while."""

    thread: int
    kind: str  # see `trace.CALLERS`
    began: int
    ended: int
    function: int  # its number, 0 where that does not matter
    items: range | None
    nbytes: int | None


@dataclass
class Chunk:
    """Calls, or backwards, that a worker was sent in one message."""

    worker: int
    number: int
    phase: str  # "forward", "backward", or "sums": of capture gradients
    function: int
    items: Sequence[int | range]  # of each call
    again: frozenset[int]  # positions of calls that were begun before, by a worker that died
    nbytes: int  # of tensors
    sent: int
    sent_whole: int
    answered: int | None = None
    answer_bytes: int = 0
    began: int = 0  # by the worker's clock, as what follows
    ended: int = 0
    spans: Sequence[Span] = ()
    died: tuple[int, int] | None = (
        None  # when the worker did, and the position of the call that it was at; -1: before the first
    )


@dataclass
class Worker:
    number: int
    pid: int
    device: str
    node: str  # "": this machine
    started: tuple[int, int] = (0, 0)  # when the caller began to start it, and when it was ready
    operations: list[Operation] = field(default_factory=list)  # of PyTorch, with `profile`


class Recording:
    """From its making to `end`."""

    def __init__(self, profile: bool, engine: str) -> None:
        self.profile = profile
        self.engine = engine
        self.began = time.monotonic_ns()
        self.ended: int | None = None
        self.is_known = False  # to the workers, which time what they are sent from then on
        self.laps: list[Lap] = []
        self.chunks: list[Chunk] = []
        self.workers: dict[int, Worker] = {}
        self.threads: dict[int, str] = {}  # of the caller, with their names
        self.functions: dict[int, str] = {}  # names, by number

    def lap(self, kind: str, began: int, function: int = 0, items: range | None = None, nbytes: int | None = None) -> int:
        """This thread has done that, up to now, which is returned."""
        thread = threading.get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        now = time.monotonic_ns()
        self.laps.append(Lap(thread, kind, began, now, function, items, nbytes))
        return now

    def end(self) -> None:
        self.ended = time.monotonic_ns()
