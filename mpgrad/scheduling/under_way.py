"""The chunks that a worker has been sent and has not answered, and how far it has come with them. Caller's side.

A worker writes what it begins into memory that the caller reads (see `wire.messages.Progress`), and looks there, before each
call, whether the caller has called the chunk off. Where no memory is shared the worker sends `Begun`, and cannot be told.

Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.scheduling.chunks import Chunk
from mpgrad.wire.messages import Progress

__all__ = ["MERCY", "UnderWay"]

MERCY = 0.2  # seconds for a call that was interrupted: most end by themselves, and the worker's graphs need not be made again


class UnderWay:
    """Chunks by number, in the order sent, which is that of the answers."""

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self.progress: memoryview | None = None  # of int64, see `Progress`
        self.can_call_off = False  # the worker sees what we write there
        self.since = 0.0  # when the first chunk became the first, on the clock of time.monotonic
        self.given_up: set[int] = set()  # chunks with a part for which somebody waited who was interrupted
        self.end_at = math.inf  # when the worker is ended, should it be at such a part then, on the same clock

    def __bool__(self) -> bool:
        return bool(self.chunks)

    def add(self, number: int, chunk: Chunk) -> None:
        if not self.chunks:
            self.since = time.monotonic()
        self.chunks[number] = chunk

    def note_begun(self, chunk: int, position: int) -> None:
        """As the worker would write it, by our clock."""
        if self.progress is None:
            self.progress = memoryview(bytearray(8 * Progress.COUNT)).cast("q")
        self.progress[Progress.STARTED] = time.monotonic_ns()
        self.progress[Progress.OFFSET] = -1
        self.progress[Progress.POSITION] = position
        self.progress[Progress.CHUNK] = chunk

    def take(self, number: int) -> Chunk:
        """It is answered."""
        self.since = time.monotonic()
        chunk = self.chunks.pop(number)
        if self.given_up:
            self.end_at = math.inf
            self.look_at_given_up()
        return chunk

    def end(self) -> None:
        """The worker is gone."""
        self.chunks.clear()
        self.progress = None

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
        progress = self.progress
        if progress is None or progress[Progress.CHUNK] != chunk:
            return -1, self.since
        return progress[Progress.POSITION], max(self.since, progress[Progress.STARTED] / 1e9)

    @property
    def offset(self) -> int:
        """Of the item that it is at, in a bundle."""
        return 0 if self.progress is None else self.progress[Progress.OFFSET]

    @property
    def is_at_wanted(self) -> bool:
        chunk, position = self.first, max(self.begun()[0], 0)
        return chunk is not None and any(chunk.wanted()[position : position + 1])  # there are none where all were taken back

    # --- what it had better leave out

    def cancel(self, operation: Operation) -> None:
        """Have the worker leave out what it has not begun of chunks that nobody waits for."""
        for number, chunk in self.chunks.items():
            if chunk.operation is operation and all(call.index >= operation.limit for _, call in chunk.calls):
                self._call_off(number)

    def _call_off(self, number: int) -> None:
        """In a place that no other chunk under way has: that one, too, must stay called off.

        There is one for each that a process is sent at a time; in the caller's own there may be more of them.
        """
        progress = self.progress
        if progress is None or not self.can_call_off:
            return
        places = range(Progress.CANCELLED, Progress.COUNT)
        free = [place for place in places if progress[place] not in self.chunks]
        if free and all(progress[place] != number for place in places):
            progress[free[0]] = number

    def unbegun(self) -> list[tuple[Operation, list[tuple[int, PackedCall]], int]]:
        """The calls of chunks, and how many of them at the end it has not begun and can be told not to begin.

        It notes each call that it begins, and looks before each whether the chunk is called off. So it may have looked at one
        more already when we call it off, but not at two: it has run the first of them in between.
        """
        progress = self.progress
        if progress is None or not self.can_call_off:
            return []
        at, position = progress[Progress.CHUNK], progress[Progress.POSITION]
        if at == Progress.BETWEEN or at != progress[Progress.CHUNK]:  # it goes on in this moment
            return []
        found = []
        is_answered = at in self.chunks  # those before it are, though their answers may still be on their way
        for number, chunk in self.chunks.items():
            begun = -1
            if number == at:
                is_answered, begun = False, position
            if not is_answered and chunk.operation is not None and chunk.operation.chunksize is None:
                found.append((chunk.operation, chunk.calls, max(0, len(chunk.calls) - begun - 2)))
        return found

    def call_off(self) -> list[tuple[Operation, list[PackedCall]]]:
        """Take back what `unbegun` counts."""
        if not self.can_call_off:
            return []
        for number, chunk in self.chunks.items():
            if chunk.operation is not None:
                self._call_off(number)
        taken = []
        for operation, calls, count in self.unbegun():  # counted after it can see that it is called off
            if count:
                taken.append((operation, [call for _, call in calls[-count:]]))
                del calls[-count:]
        return taken

    def call_off_behind(self) -> None:
        """Have it leave out the calls of the chunks behind its first."""
        for number in self._behind():
            self._call_off(number)

    def take_back_behind(self) -> list[tuple[Operation, list[PackedCall]]]:
        """Those calls, for others. It answers a chunk before it looks whether the next one is called off.

        Assumes: its answers were read after they had been called off, and its first chunk has none.
        """
        taken = []
        for chunk in self._behind().values() if self.can_call_off else ():
            assert chunk.operation is not None
            taken.append((chunk.operation, [call for _, call in chunk.calls]))
            chunk.calls.clear()
        return taken

    def _behind(self) -> dict[int, Chunk]:
        behind = itertools.islice(self.chunks.items(), 1, None)
        return {number: chunk for number, chunk in behind if chunk.operation is not None}

    # --- what is not wanted any more, and must end soon

    def give_up_operation(self, operation: Operation | None) -> None:
        """All of its chunks; None: of all operations."""
        wanted = [number for number, chunk in self.chunks.items() if chunk.operation is not None]
        self.give_up([each for each in wanted if operation is None or self.chunks[each].operation is operation])

    def give_up_backward(self, task: int, error: BaseException) -> None:
        """The parts of the backward with this number; who waits for them gets the error."""
        numbers = []
        for number, chunk in self.chunks.items():
            of_task = [each for each in (*chunk.gradients, chunk.captures) if each is not None and each.task == task]
            for each in of_task:
                each.reply.fail(error)
            if of_task:
                numbers.append(number)
        self.give_up(numbers)

    def give_up(self, numbers: Sequence[int]) -> None:
        """Chunks that are not wanted any more, or not as a whole: leave out what can be left out, and end the rest soon."""
        for number in numbers:
            self.given_up.add(number)
            if not any(self.chunks[number].wanted()):
                self._call_off(number)
        self.look_at_given_up()

    def look_at_given_up(self) -> None:
        """What the worker is at has been given up, or has been answered; or what others wanted of it they want no more."""
        self.given_up.intersection_update(self.chunks)
        if next(iter(self.chunks), None) not in self.given_up:
            self.end_at = math.inf
        elif self.end_at == math.inf:
            self.end_at = time.monotonic() + MERCY
