"""A worker as its site sees it: its pipe, what it has shown of itself, and what the site has to say of it. Runs on the node."""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import pickle
import socket

from mpgrad.wire.asides import LastWords, Whereabouts, WhereaboutsHere, in_order
from mpgrad.wire.pipe import Pipe, RawFrame, last_words_in

__all__ = ["Pieces", "SiteWorker"]

Pieces = list[tuple[int, int, str]]  # see `Lacking`


class SiteWorker(Pipe):
    """The site's end of the pipe of a worker."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, blocking=False)
        self.pid = 0  # once the caller has heard it
        self.whereabouts: memoryview | None = None  # of int64, once the worker has shown them
        self._last_words: int | None = None  # a pipe
        self.has_started = False  # the first frame, which is its `Start`, was sent
        self.lacking: Pieces = []  # as it was told
        self.limits: dict[int, float] = {}  # seconds for each call of a chunk that is not answered, by chunk, in that order
        self.heard_at = 0.0  # on the clock of time.monotonic; or when the limits last changed
        self.overrun: tuple[int, int] | None = None  # chunk and position of a call that takes too long, once that was said
        self.alarm: asyncio.TimerHandle | None = None
        self.bytes_seen = 0  # of a frame on its way, when the alarm was set
        self.followed_until = 0.0  # on the same clock; it is said where it is
        self.told: list[int] = []  # where that was last

    def hear(self, frame: RawFrame) -> None:
        """What the worker says to us."""
        for message in pickle.loads(frame.body):
            descriptor = self.take_descriptor()
            if descriptor is None:  # none was free to receive it with
                continue
            if isinstance(message, LastWords):
                self._last_words = descriptor
            elif isinstance(message, WhereaboutsHere):
                with contextlib.suppress(OSError):  # no memory: then it runs what nobody wants
                    memory = memoryview(mmap.mmap(descriptor, 0))
                    self.whereabouts = memory[message.offset : message.offset + message.nbytes].cast("q")
                os.close(descriptor)

    def where(self) -> list[int]:
        """What it has written of where it is; nothing where it goes on in this moment, or nobody could be shown it."""
        if (numbers := self.whereabouts) is None:
            return []
        at = numbers[Whereabouts.CHUNK]
        in_order()
        found = list(numbers[: Whereabouts.SKIPPED])
        in_order()
        return found if at == found[Whereabouts.CHUNK] == numbers[Whereabouts.CHUNK] else []

    def next_overrun(self) -> tuple[int, int, float]:
        """The first chunk with a limit, the call that it is at, and when that will have taken too long.

        The position is -1 where it has not begun that chunk. Only who has sent it knows whether it has something else to do.
        """
        at, position, started = Whereabouts.BETWEEN, -1, 0.0
        if found := self.where():
            at, position = found[Whereabouts.CHUNK], found[Whereabouts.POSITION]
            started = found[Whereabouts.STARTED] / 1e9
        for chunk in [chunk for chunk in self.limits if chunk < at]:
            del self.limits[chunk]
        chunk, seconds = next(iter(self.limits.items()), (-1, math.inf))
        return (chunk, position, started + seconds) if chunk == at else (chunk, -1, self.heard_at + seconds)

    def take_last_words(self) -> str:
        """Of who is dead."""
        return "" if self._last_words is None else last_words_in(self._last_words)
