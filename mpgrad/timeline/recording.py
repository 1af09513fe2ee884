"""What is noted while a timeline is recorded: laps of the caller's threads, chunks on their way through workers.

    a thread of the caller ──► `lap` ──► Lap
    the scheduling thread (`scheduling.notes`) ──► NotedChunk ◄── a worker's `Recorded`

Assumes: any thread appends to `laps`; all else is the scheduling thread's. Times are nanoseconds of `time.monotonic_ns`, those
    of workers by their own clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpgrad.errors import contextmanager
from mpgrad.wire.messages import Span

__all__ = ["Lap", "NotedCall", "NotedChunk", "Recording", "Worker"]


class Lap(NamedTuple):
    """What a thread of the caller did for a while."""

    thread: int
    kind: str  # "pickles", "packs", "waits" or "makes results"
    function: str  # its name, or ""
    began: int
    ended: int


class NotedCall(NamedTuple):
    """A call, or a backward of one."""

    items: int | range
    function: str  # its name, or ""


@dataclass
class NotedChunk:
    """Calls, or backwards, that a worker was sent in one message."""

    worker: int
    phase: str  # "forward", "backward", or "sums": of capture gradients
    calls: Sequence[NotedCall]
    sent: int
    answered: int | None = None
    began: int = 0  # by the worker's clock, as what follows
    ended: int = 0
    spans: Sequence[Span] = ()
    died: int | None = None  # when the worker did, without an answer


class Worker(NamedTuple):
    """Who it is."""

    number: int
    pid: int
    device: str
    node: str  # "": this machine


class Recording:
    """From its making to `end`."""

    def __init__(self) -> None:
        self.began = time.monotonic_ns()
        self.ended: int | None = None
        self.is_known = False  # to the workers, which time what they are sent from then on
        self.laps: list[Lap] = []
        self.chunks: list[NotedChunk] = []  # in the order in which they were sent
        self.workers: dict[int, Worker] = {}
        self.threads: dict[int, str] = {}  # of the caller, with their names

    @contextmanager
    def lap(self, kind: str, function: str) -> Iterator[None]:
        """This thread does that in the block."""
        thread, began = threading.get_ident(), time.monotonic_ns()
        self.threads.setdefault(thread, threading.current_thread().name)
        try:
            yield
        finally:
            self.laps.append(Lap(thread, kind, function, began, time.monotonic_ns()))

    def end(self) -> None:
        self.ended = time.monotonic_ns()
