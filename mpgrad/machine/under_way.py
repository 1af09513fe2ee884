"""What is under way with a worker: the chunks that it has been sent and has not answered. Calls
that it has not begun can be taken back, for another worker or because nobody needs them.

    worker, before each call             caller
    notes the call in its record         skips the chunk: writes its number into the record
    looks whether the chunk is skipped   SEEN seconds later: reads which call was noted last
      no: runs the call                  takes back the calls behind that one; sooner, it leaves
      yes: answers without the rest        one more, which may have begun without being read here

So a call is run by the worker or taken back, and never both. A call whose chunk was skipped just
too late is answered as usual. If the worker answers calls unrun that were not taken back, they
return to the queue. If it dies, all calls that it has not answered run again (see `deaths`).

Assumes: called by the scheduling thread; any thread may count what is under way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable
from typing import Any, NamedTuple, Protocol

from mpgrad.machine.policy import SEEN

__all__ = ["GRACE_PERIOD", "Chunk", "ProgressHandle", "SentChunks", "Termination"]

# seconds; most interrupted calls end by themselves in this time, so that the worker's graphs need
# not be rebuilt
GRACE_PERIOD = 0.2


class ProgressHandle(Protocol):
    """Reads and writes a worker's record."""

    # A node agent reads and writes the record, with a delay. So only whole chunks behind the first
    # are taken back, when the agent has reported them as `skipped`.
    is_far: bool

    def at(self) -> tuple[int, int] | None:
        """Return the chunk and the position of the call that was noted last.

        Return None while the worker goes on to another chunk.
        """

    @property
    def started(self) -> float | None:
        """When that call began, on the clock of time.monotonic; None while the worker loads a
        function."""

    @property
    def offset(self) -> int:
        """The place of the running item in its bundle; -1 while none of its items runs."""

    def skip(self, number: int, under_way: Container[int]) -> bool:
        """Write that the chunk is skipped, and return whether this is new.

        There may be no free place for it beside the chunks `under_way`.
        """

    def skipped(self) -> Container[int]:
        """Return the chunks that the node agent has skipped."""

    def follow(self, seconds: float) -> None:
        """Have the node agent report where the worker is, for this number of seconds."""


@dataclasses.dataclass(eq=False)
class Chunk:
    """Holds the work in one message that a worker has been sent and has not answered: calls of an
    operation, backwards, or a request for a sum."""

    # None for backwards and requests
    operation: Any
    # calls with their numbers
    calls: list[tuple[int, Any]]
    backwards: list[Any]
    # None for calls and backwards
    request: Any
    # seconds for each call
    timeout: float | None
    # how many calls or backwards of the message were answered early, and so are not listed here
    answered: int = 0

    def note_answered(self, count: int) -> None:
        """Drop the first calls or backwards, because they are answered."""
        self.answered += count
        del self.calls[:count], self.backwards[:count]

    @property
    def from_backlog(self) -> list[Any]:
        """The backwards, or the request: what came from the worker's backlog."""
        return self.backwards if self.request is None else [self.request]

    @property
    def parts(self) -> list[Any]:
        """The calls, or the backwards."""
        return [call for _, call in self.calls] or self.backwards

    def wanted(self) -> list[bool]:
        """Return for each call or backward whether it is still needed."""
        if self.operation is not None:
            return [call.index < self.operation.limit for _, call in self.calls]
        return [not each.arrived for each in self.from_backlog]


class Termination(NamedTuple):
    """The moment by which a worker has to end, because its running call is overdue."""

    moment: float  # on the clock of time.monotonic
    begun: tuple[int, float]  # see `SentChunks.begun`


# long because: it has a few lines for each question about a worker's chunks
class SentChunks:
    """Holds the chunks under way with a worker, by number, in the order in which they were sent.
    The worker answers them in this order.

    Assumes: called by the scheduling thread.
    """

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        # None until the worker is ready, and if its record cannot be mapped
        self.progress: ProgressHandle | None = None
        # seconds in which a chunk was under way, up to the last answer
        self.seconds = 0.0
        # when the first chunk became the first, on the clock of time.monotonic
        self.since = 0.0
        # skipped chunks, and since when, on the same clock
        self._skipped: dict[int, float] = {}
        # skipped chunks whose time is not noted yet
        self.just_skipped: list[int] = []
        # chunks with a part that was cancelled with grace
        self.in_grace: set[int] = set()
        # when the worker is killed if it still runs such a part, on the same clock; calls behind it
        # are skipped first, which may put this off
        self.grace_ends = math.inf

    def __bool__(self) -> bool:
        return bool(self.chunks)

    def add(self, number: int, chunk: Chunk, now: float) -> None:
        if not self.chunks:
            self.since = now
        self.chunks[number] = chunk

    def take(self, number: int, now: float) -> Chunk:
        """Take a chunk that is answered."""
        self.seconds += now - self.since
        self.since = now
        chunk = self.chunks.pop(number)
        self._skipped.pop(number, None)
        if self.in_grace:
            self.grace_ends = math.inf
            self.look_at_grace(now)
        return chunk

    def put_back(self, number: int, chunk: Chunk) -> None:
        """Put a chunk back, because its answer could not be read to the end."""
        self.chunks = {number: chunk, **self.chunks}

    def drop_behind(self) -> None:
        """Forget all chunks except the first, because other workers get them."""
        for number in list(self.chunks)[1:]:
            del self.chunks[number]

    def end(self) -> None:
        """Forget all chunks, because the worker is gone."""
        self.chunks.clear()
        self.progress = None

    # --- the worker's progress

    @property
    def is_idle(self) -> bool:
        """Whether the worker runs nothing, and loads nothing. It may still have to answer a chunk
        whose calls were all taken back."""
        has_work = any(chunk.calls or chunk.from_backlog for chunk in self.chunks.values())
        is_loading = self.progress is not None and self.progress.started is None
        return not (self.chunks and (has_work or is_loading))

    @property
    def first(self) -> Chunk | None:
        return next(iter(self.chunks.values()), None)

    def is_at(self, operation: Any) -> bool:
        first = self.first
        return first is not None and first.operation is operation

    def begun(self) -> tuple[int, float]:
        """Return the position of the running call in the first chunk, and when it began.

        The position is -1 if no call runs. It counts calls that are not answered.
        """
        progress = self.progress
        place = None if progress is None else progress.at()
        if progress is None or place is None or place[0] != next(iter(self.chunks), None):
            return -1, self.since
        at, position = place
        return position - self.chunks[at].answered, max(self.since, progress.started or 0.0)

    def limited_since(self, now: float) -> float:
        """Return since when the time limit of the running call, or of the next one, counts.

        No limit includes the loading of a function.
        """
        if self.progress is None:
            return self.since
        started: float | None = self.progress.started
        return now if started is None else max(self.since, started)

    def is_at_call(self, call: tuple[int, int] | None) -> bool:
        """Whether the worker runs the call at this position of this message; -1 means any call."""
        number, chunk = next(iter(self.chunks.items()), (None, None))
        if call is None or chunk is None or call[0] != number:
            return False
        position = self.begun()[0]
        return call[1] == -1 or (position >= 0 and call[1] == position + chunk.answered)

    @property
    def offset(self) -> int:
        """The place of the running item in its bundle."""
        return 0 if self.progress is None else self.progress.offset

    @property
    def is_at_wanted(self) -> bool:
        chunk, position = self.first, max(self.begun()[0], 0)
        # If all calls were taken back, none is left.
        return chunk is not None and any(chunk.wanted()[position : position + 1])

    # --- calls that the worker is to skip

    def cancel(self, operation: Any) -> None:
        """Have the worker skip the rest of chunks that are not needed any more."""
        for number, chunk in self.chunks.items():
            if chunk.operation is operation and all(
                call.index >= operation.limit for _, call in chunk.calls
            ):
                self._skip(number)

    def _skip(self, number: int) -> bool:
        """Have the worker skip the chunk, and return whether this is new to it."""
        if self.progress is None or not self.progress.skip(number, self.chunks):
            return False
        self._skipped[number] = math.inf
        self.just_skipped.append(number)
        return True

    def note_skips(self, now: float) -> None:
        """Note since when chunks are skipped: a moment after the worker could see it."""
        for number in self.just_skipped:
            if number in self._skipped:
                self._skipped[number] = now
        self.just_skipped.clear()

    def skip_unbegun(self, now: float) -> bool:
        """Have the worker skip calls that others may run, and return whether any are new to it."""
        if self.progress is None:
            return False
        are_news = [self._skip(number) for number in self._for_others()]
        return any(are_news) or any(now - since < SEEN for since in self._skipped.values())

    def unbegun(self, now: float) -> list[tuple[int, int]]:
        """Return chunks, and how many calls at the end of each the worker will surely not begin."""
        if self.progress is None:
            return []
        for_others = self._for_others()
        if self.progress.is_far:
            skipped = self.progress.skipped()
            return [
                (number, len(chunk.calls))
                for number, chunk in for_others.items()
                if number in skipped
            ]
        # The worker goes on to another chunk at this moment.
        if (place := self.progress.at()) is None:
            return []
        at, position = place
        found = []
        # Chunks before the running one are answered, though the answers may be on their way.
        is_answered = at in self.chunks
        for number, chunk in self.chunks.items():
            begun = -1
            if number == at:
                is_answered, begun = False, position - chunk.answered
            if is_answered or number not in for_others:
                continue
            count = len(chunk.calls) - begun - 1
            if now - self._skipped.get(number, now) < SEEN:
                count = 0 if stays_together(chunk) else count - 1
            if count > 0:
                found.append((number, count))
        return found

    def take_back(self, now: float) -> list[tuple[Any, list[Any]]]:
        """Take back the calls that `unbegun` counts.

        Another request, after `SEEN` seconds or a node agent's report, may take back more.
        """
        self.skip_unbegun(now)
        taken = []
        # The calls are counted after the worker can see that they are skipped.
        for number, count in self.unbegun(now):
            if number in self._skipped:
                chunk = self.chunks[number]
                taken.append((chunk.operation, [call for _, call in chunk.calls[-count:]]))
                del chunk.calls[-count:]
        return taken

    @property
    def has_for_others(self) -> bool:
        """Whether there are calls behind the running one that the worker can be made to skip."""
        chunks = self.chunks
        if not chunks or self.progress is None:
            return False
        # This runs in each turn, and most chunks have one call.
        if len(chunks) == 1 and len(next(iter(chunks.values())).calls) <= 1:
            return False
        first, position = next(iter(self.chunks), None), self.begun()[0]
        return any(
            len(chunk.calls) > (position + 1 if number == first else 0)
            for number, chunk in self._for_others().items()
        )

    def _for_others(self) -> dict[int, Chunk]:
        """Return the chunks whose calls other workers may run, if they have not begun.

        Chunks that stay together, or are behind a node agent, are only given back as a whole.
        """
        found = {}
        is_far = self.progress is not None and self.progress.is_far
        for place, (number, chunk) in enumerate(self.chunks.items()):
            is_divisible = not (is_far or stays_together(chunk))
            if chunk.operation is not None and (place > 0 or is_divisible):
                found[number] = chunk
        return found

    # --- calls that are cancelled with grace

    def cancel_with_grace(self, operation: Any, now: float) -> None:
        """Cancel all chunks of the operation, or of all operations if it is None."""
        numbers = [
            number
            for number, chunk in self.chunks.items()
            if chunk.operation is not None and operation in (None, chunk.operation)
        ]
        self.put_in_grace(numbers, now)

    def parts_of_backward(self, graph_task: int) -> dict[int, list[Any]]:
        """Return the parts of the backward with this number, by chunk."""
        parts = {
            number: [each for each in chunk.from_backlog if each.graph_task == graph_task]
            for number, chunk in self.chunks.items()
        }
        return {number: found for number, found in parts.items() if found}

    def put_in_grace(self, numbers: Iterable[int], now: float) -> None:
        """Skip calls that have not begun, and give the running ones a grace period.

        The chunks are not needed any more, or not as a whole.
        """
        for number in numbers:
            self.in_grace.add(number)
            if not any(self.chunks[number].wanted()):
                self._skip(number)
        self.look_at_grace(now)

    def look_at_grace(self, now: float) -> None:
        """Begin or end the grace period, because the first chunk has changed.

        It may have been cancelled with grace, or answered, or the worker's other work is not needed
        any more.
        """
        self.in_grace.intersection_update(self.chunks)
        if next(iter(self.chunks), None) not in self.in_grace:
            self.grace_ends = math.inf
        elif self.grace_ends == math.inf:
            self.give_grace(now)

    def give_grace(self, now: float) -> None:
        """Begin a grace period for the worker's running call."""
        self.grace_ends = now + GRACE_PERIOD
        if self.progress is not None:
            self.progress.follow(2 * GRACE_PERIOD)


def stays_together(chunk: Chunk) -> bool:
    return chunk.operation is not None and chunk.operation.options.chunksize is not None
