"""The chunks that a worker has been sent and has not answered, and how far it has come with them. Caller's side.

A worker writes what it begins into memory that the caller reads (see `wire.asides.Whereabouts`), and looks there, before each
call, whether the caller has called the chunk off. Where no memory is shared a site reads and writes there for us, some time
later: so of a chunk that runs nothing can be taken back, but what was skipped in time comes back unrun.

Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from mpgrad.calls.homes import error_maker
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.engines.kinds import WorkerLink
from mpgrad.scheduling.chunk_writer import Chunk
from mpgrad.wire.asides import Whereabouts, in_order

__all__ = ["MERCY", "SEEN", "UnderWay"]

SEEN = 1e-3  # seconds after which another process has seen what we wrote, and we what it wrote before: ample, for two CPUs
MERCY = 0.2  # seconds for a call that was interrupted: most end by themselves, and the worker's graphs need not be made again


# long because: a line for each thing that may be asked of what a worker has
class UnderWay:
    """Chunks by number, in the order sent, which is that of the answers."""

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self.whereabouts: memoryview | None = None  # of int64, see `Whereabouts`
        self.link: WorkerLink | None = None  # to who reads and writes there for us, where we cannot
        self.seconds = 0.0  # in which there was something under way, up to the last answer
        self.since = 0.0  # when the first chunk became the first, on the clock of time.monotonic
        self._skipped: dict[int, float] = {}  # chunks, and since when, on the same clock
        self.given_up: set[int] = set()  # chunks with a part for which somebody waited who was interrupted
        self.end_at = math.inf  # when the worker is ended, should it be at such a part then, on the same clock

    def __bool__(self) -> bool:
        return bool(self.chunks)

    def add(self, number: int, chunk: Chunk) -> None:
        if not self.chunks:
            self.since = time.monotonic()
        self.chunks[number] = chunk

    def take(self, number: int) -> Chunk:
        """It is answered."""
        now = time.monotonic()
        self.seconds += now - self.since
        self.since = now
        chunk = self.chunks.pop(number)
        self._skipped.pop(number, None)
        if self.given_up:
            self.end_at = math.inf
            self.look_at_given_up()
        return chunk

    def put_back(self, number: int, chunk: Chunk) -> None:
        """It is not answered after all: what came could not be read to the end."""
        self.chunks = {number: chunk, **self.chunks}

    def drop_behind(self) -> None:
        """All chunks but the first are somebody else's now."""
        for number in list(self.chunks)[1:]:
            del self.chunks[number]

    def end(self) -> None:
        """The worker is gone."""
        self.chunks.clear()
        self.whereabouts = None

    # --- where it is

    @property
    def first(self) -> Chunk | None:
        return next(iter(self.chunks.values()), None)

    def is_at(self, operation: Operation) -> bool:
        first = self.first
        return first is not None and first.operation is operation

    def begun(self) -> tuple[int, float]:
        """The position of the call that the worker is at, in the first chunk, and since when; -1 where it is at none."""
        chunk = next(iter(self.chunks), None)
        whereabouts = self.whereabouts
        if whereabouts is None or whereabouts[Whereabouts.CHUNK] != chunk:
            return -1, self.since
        in_order()
        return whereabouts[Whereabouts.POSITION], max(self.since, whereabouts[Whereabouts.STARTED] / 1e9)

    def is_at_call(self, call: tuple[int, int] | None) -> bool:
        """Whether it is at this position of this chunk, -1: anywhere in it."""
        return call is not None and call[0] == next(iter(self.chunks), None) and call[1] in (-1, self.begun()[0])

    @property
    def offset(self) -> int:
        """Of the item that it is at, in a bundle."""
        return 0 if self.whereabouts is None else self.whereabouts[Whereabouts.OFFSET]

    @property
    def is_at_wanted(self) -> bool:
        chunk, position = self.first, max(self.begun()[0], 0)
        return chunk is not None and any(chunk.wanted()[position : position + 1])  # there are none where all were taken back

    # --- what it had better leave out

    def cancel(self, operation: Operation) -> None:
        """Have the worker leave out what it has not begun of chunks that nobody waits for."""
        for number, chunk in self.chunks.items():
            if chunk.operation is operation and all(call.index >= operation.limit for _, call in chunk.calls):
                self._skip(number)

    def _skip(self, number: int) -> None:
        """In a place that no other chunk under way has: that one, too, must stay skipped.

        There is one for each that a process is sent at a time; in the caller's own there may be more of them.
        """
        whereabouts = self.whereabouts
        if whereabouts is None:
            return
        places = range(Whereabouts.SKIPPED, Whereabouts.COUNT)
        free = [place for place in places if whereabouts[place] not in self.chunks]
        if free and all(whereabouts[place] != number for place in places):
            whereabouts[free[0]] = number
            self._skipped[number] = time.monotonic()
            if self.link is not None:
                self.link.skip(free[0], number)

    def skip_unbegun(self) -> None:
        """Have it leave out what it has not begun, for others."""
        for number in self._for_others():
            self._skip(number)

    def unbegun(self) -> list[tuple[int, int]]:
        """Chunks, and how many calls at their end it has not begun and can be told not to begin.

        It notes each call, then looks whether the chunk is skipped. What it noted some time after that was written is all that
        it will run. Before that it may have looked at one more, of which we do not read yet, but not at two.
        """
        whereabouts = self.whereabouts
        if whereabouts is None:
            return []
        if self.link is not None:
            return self._skipped_by_site(self.link)
        for_others = self._for_others()
        now = time.monotonic()
        at = whereabouts[Whereabouts.CHUNK]
        in_order()
        position = whereabouts[Whereabouts.POSITION]
        in_order()
        if at == Whereabouts.BETWEEN or at != whereabouts[Whereabouts.CHUNK]:  # it goes on in this moment
            return []
        found = []
        is_answered = at in self.chunks  # those before it are, though their answers may still be on their way
        for number, chunk in self.chunks.items():
            begun = -1
            if number == at:
                is_answered, begun = False, position
            if is_answered or number not in for_others:
                continue
            count = len(chunk.calls) - begun - 1
            if now - self._skipped.get(number, now) < SEEN:
                count = 0 if stays_together(chunk) else count - 1
            if count > 0:
                found.append((number, count))
        return found

    def _skipped_by_site(self, link: WorkerLink) -> list[tuple[int, int]]:
        """Whole chunks behind the first. A worker answers a chunk before it looks whether the next one is skipped."""
        if link.has_more():  # it may have answered its first chunk
            return []
        skipped = link.skipped.values()
        return [(number, len(chunk.calls)) for number, chunk in self._for_others().items() if number in skipped]

    def take_back(self) -> list[tuple[Operation, list[PackedCall]]]:
        """Take back what `unbegun` counts; and more, when this is asked again after `SEEN` seconds, or a site has told."""
        self.skip_unbegun()
        taken = []
        for number, count in self.unbegun():  # counted after it can see that it is skipped
            if number in self._skipped:
                chunk = self.chunks[number]
                assert chunk.operation is not None
                taken.append((chunk.operation, [call for _, call in chunk.calls[-count:]]))
                del chunk.calls[-count:]
        return taken

    @property
    def has_for_others(self) -> bool:
        """There are calls behind the one that it is at, which it can be told not to begin."""
        if self.whereabouts is None or not (
            len(self.chunks) > 1 or any(len(chunk.calls) > 1 for chunk in self.chunks.values())
        ):
            return False
        first, position = next(iter(self.chunks), None), self.begun()[0]
        return any(len(chunk.calls) > (position + 1 if number == first else 0) for number, chunk in self._for_others().items())

    def _for_others(self) -> dict[int, Chunk]:
        """Chunks of which others may have what was not begun; what stays together, or is behind a site, only as a whole."""
        found = {}
        for place, (number, chunk) in enumerate(self.chunks.items()):
            is_divisible = self.link is None and not stays_together(chunk)
            if chunk.operation is not None and (place > 0 or is_divisible):
                found[number] = chunk
        return found

    # --- what is not wanted any more, and must end soon

    def give_up_operation(self, operation: Operation | None) -> None:
        """All of its chunks; None: of all operations."""
        wanted = [number for number, chunk in self.chunks.items() if chunk.operation is not None]
        self.give_up([each for each in wanted if operation is None or self.chunks[each].operation is operation])

    def give_up_backward(self, graph_task: int, error: BaseException) -> None:
        """The parts of the backward with this number; who waits for them gets the error."""
        numbers = []
        for number, chunk in self.chunks.items():
            parts = [each for each in (*chunk.backwards, chunk.request) if each is not None and each.graph_task == graph_task]
            for each in parts:
                each.settle(error_maker(error))
            if parts:
                numbers.append(number)
        self.give_up(numbers)

    def give_up(self, numbers: Sequence[int]) -> None:
        """Chunks that are not wanted any more, or not as a whole: leave out what can be left out, and end the rest soon."""
        for number in numbers:
            self.given_up.add(number)
            if not any(self.chunks[number].wanted()):
                self._skip(number)
        self.look_at_given_up()

    def look_at_given_up(self) -> None:
        """What the worker is at has been given up, or has been answered; or what others wanted of it they want no more."""
        self.given_up.intersection_update(self.chunks)
        if next(iter(self.chunks), None) not in self.given_up:
            self.end_at = math.inf
        elif self.end_at == math.inf:
            self.wait_for_end()

    def wait_for_end(self) -> None:
        """The worker gets some more time for what it is at."""
        self.end_at = time.monotonic() + MERCY
        if self.link is not None:
            self.link.follow(2 * MERCY)


def stays_together(chunk: Chunk) -> bool:
    return chunk.operation is not None and chunk.operation.options.chunksize is not None
