"""`CallQueue` holds the calls that wait for a worker. It decides which calls a worker gets next,
how many at once, and which calls should wait longer.

multiprocessing.Pool cuts a map into chunks of one size before it knows how long calls take.
`CallQueue` uses measured times. It sends short calls together, and fewer of them towards the end.
It sends long calls one by one, unless the caller waits for all results together. It sends the
largest of the last calls first. A worker that has run dry may get calls that another worker has
received but not begun.

A `Backlog` holds the backwards that wait for one worker. Backwards have no choice of workers.

Assumes: called by the scheduling thread; any thread may set `workers`, and append to a backlog.
    Nothing else changes a backlog, or the queue of an operation that runs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from mpgrad.machine.policy import (
    CHUNKS_UNDER_WAY,
    MOST_PAYLOAD,
    SEEN,
    ChunkSeconds,
    chunk_size,
)
from mpgrad.machine.story import GIVEN_BACK, SENT
from mpgrad.machine.under_way import SentChunks, Termination

__all__ = ["AnyWorker", "Backlog", "CallQueue", "NextChunk"]

# seconds; waiting behind a call of this length takes longer than being sent
LONG_CALL = 50e-3
# If one of the last calls takes longer than this many shortest chunks, it waits for an idle worker.
LAST_AHEAD = 5
# If a call takes longer than this many shortest chunks, and longer than other calls did, its end
# cannot be predicted.
LATE = 5
# calls per worker, at the end of a map, that are sorted by size; before that, their order matters
# little
SORTED = 16
# calls per worker, at the end of a map, that wait for an idle worker if they differ in size
LAST_UNLIKE = 4


class AnyWorker(Protocol):
    """What is known of a worker."""

    number: int
    # the device's code
    device: int
    # whether it has started
    ready: bool
    # It gets no new calls, and stays while its graphs are needed.
    retiring: bool
    calls_done: int
    # the error that its graphs raise after its end
    gone: BaseException | None
    # until when it has to end, for an overdue call
    termination: Termination | None
    # the timeout of the call for which it was ended
    overdue: float | None
    # what it has been sent, and what waits for it
    under_way: SentChunks
    backlog: Backlog

    @property
    def link(self) -> AnyLink:
        """Leads to the worker, and outlives it."""

    @property
    def load(self) -> int:
        """The number of calls and backwards that it has been given, or will get next."""

    @property
    def has_others(self) -> bool:
        """Whether it has anything that was not cancelled with grace."""


class AnyLink(Protocol):
    """What the link to a worker knows of the worker."""

    # whether the worker's machine checks by its own clock which calls take too long
    keeps_time: bool
    # the call that takes too long: its chunk, and its position or -1
    overrun: tuple[int, int] | None

    @property
    def has_place(self) -> bool:
        """Whether the worker runs, or will soon."""

    @property
    def lost(self) -> str:
        """Why the worker has ended, if this is not its own fault; otherwise ""."""


class NextChunk(NamedTuple):
    """What a worker is to be sent next."""

    worker: Any
    # None for a chunk of the worker's backlog
    operation: Any
    # calls of the operation, with their numbers
    calls: list[tuple[int, Any]]


class CallQueue:
    """Holds the operations that have calls, in the order in which workers get them."""

    def __init__(
        self,
        functions: Any,
        numbers: itertools.count[int],
        workers: int,
        calls_per_worker: int | None,
        by_device: bool,
        chunk_seconds: ChunkSeconds,
    ) -> None:
        """Take the calls' numbers from `numbers`. A worker is replaced after `calls_per_worker`
        calls."""
        self.workers = workers
        # the next moment, on the clock of time.monotonic, at which calls may be taken back
        self.look_at = math.inf
        self._functions = functions
        self._numbers = numbers
        self._calls_per_worker = calls_per_worker
        self._by_device = by_device
        self._chunk_seconds = chunk_seconds
        self.operations: deque[Any] = deque()

    @property
    def has_calls(self) -> bool:
        return bool(self.operations) and any(operation.queue for operation in self.operations)

    def join(self, operation: Any, calls: Sequence[Any], first: bool = False) -> None:
        """Put runnable calls behind the operation's other calls."""
        operation.queue.extend(calls)
        if operation.queue:
            operation.unsorted = operation.options.at_rest and operation.sealed
            self._join(operation, first)

    def _join(self, operation: Any, first: bool) -> None:
        if operation not in self.operations:
            self._functions.number(operation.options.function)
            (self.operations.appendleft if first else self.operations.append)(operation)

    def take_all(self, operation: Any) -> Iterator[Any]:
        """Take the calls that no worker has been given."""
        while operation.queue or operation.packed:
            yield (operation.queue or operation.packed).popleft()

    def tidy(self) -> None:
        """Drop operations none of whose calls are needed. Otherwise their results would be kept
        until a worker is next given calls."""
        for operation in list(self.operations):
            if not any(call.index < operation.limit for call in operation.queue):
                self.operations.remove(operation)

    def put_back(
        self,
        operation: Any,
        calls: Sequence[Any],
        now: float,
        why: str = GIVEN_BACK,
        worker: int = 0,
    ) -> int:
        """Put a worker's calls back in front, and return how many are still needed.

        `why` is for their story.
        """
        wanted = [call for call in calls if call.index < operation.limit]
        if wanted:
            for call in wanted:
                call.note((now, why, worker))
            operation.queue.extendleft(reversed(wanted))
            self._join(operation, first=True)
        return len(wanted)

    def next_chunks(self, workers: Collection[AnyWorker], now: float) -> Iterator[NextChunk]:
        """Decide what the workers get. Each chunk is sent before the next is requested.

        Every worker gets a chunk before any gets its second. A second chunk has to wait for the
        first, perhaps for a long time, while another worker starts or becomes idle. So a second
        chunk is given only if it is known to be short.
        """
        yield from self._next_chunks(workers, now)
        if self.take_back(workers, now):
            yield from self._next_chunks(workers, now)

    def _next_chunks(self, workers: Collection[AnyWorker], now: float) -> Iterator[NextChunk]:
        for depth in range(CHUNKS_UNDER_WAY):
            for worker in workers:
                if (
                    (self.operations or worker.backlog)
                    and worker.ready
                    and len(worker.under_way.chunks) <= depth
                    and (chunk := self.next_chunk_for(worker, now)) is not None
                ):
                    yield chunk
                    self.note_sent(worker, now)

    def note_sent(self, worker: AnyWorker, now: float) -> None:
        """Note that the worker was sent a chunk, whose calls may have to be taken back."""
        if worker.under_way.has_for_others:
            self.look_at = min(self.look_at, now + LONG_CALL)

    def next_chunk_for(self, worker: AnyWorker, now: float) -> NextChunk | None:
        """Take what this worker gets next, however much it has been sent.

        Backwards go first, because callers wait for them. Return None if the worker should get
        nothing now.
        """
        if worker.backlog:
            return NextChunk(worker, None, [])
        # A running call in its grace period either ends soon, or its worker is killed.
        if worker.retiring or worker.under_way.in_grace:
            return None
        room = self._room(worker)
        place = 0
        while place < len(self.operations) and room > 0:
            operation = self.operations[place]
            if operation.unsorted:
                self._sort(operation)
            if (
                worker.under_way
                and operation.queue
                and self._had_better_wait(operation, worker, now)
            ):
                return None
            calls = self._take_calls(worker, operation, min(room, self._chunk_size(operation)), now)
            # Drop the operation at once. Otherwise its results would be kept until a worker is next
            # given calls.
            if not operation.queue:
                del self.operations[place]
            if calls:
                return NextChunk(worker, operation, calls)
            # The calls that are left are for workers on other devices.
            if operation.queue:
                place += 1
        return None

    def take_back(self, workers: Collection[AnyWorker], now: float) -> bool:
        """Take back calls that have not begun, and return whether any were taken.

        Costs are not known in advance. If a worker runs a call for longer than such calls take, the
        calls behind it are taken back, because the end of that call cannot be predicted. If some
        workers have run dry, calls are also taken from the worker with the most work, if they are
        worth a message. See `look_at`.
        """
        # No worker has a call that it has not begun.
        if self.look_at == math.inf:
            return False
        takers = [worker for worker in workers if worker.ready and not worker.retiring]
        is_dry = not (self.has_calls or all(worker.under_way.chunks for worker in takers))
        if not is_dry and now < self.look_at:
            return False
        self.look_at = math.inf
        others = [
            worker
            for worker in workers
            if worker.under_way.has_for_others and takers not in ([], [worker])
        ]
        richest, most = None, self._chunk_seconds.shortest
        for worker in others if is_dry else ():
            if (load := self._unbegun_seconds(worker, now)) >= most:
                richest, most = worker, load
        has_taken = False
        for worker in others:
            # If no worker is idle, these calls need not move yet, and a message is not free.
            moment = self._late_at(worker) + (0.0 if is_dry else LONG_CALL)
            if moment <= now or worker is richest:
                for operation, calls in worker.under_way.take_back(now):
                    self.put_back(operation, calls, now)
                    has_taken = True
                moment = max(moment, now + SEEN)
            if worker.under_way.has_for_others:
                # A call can be late before its chunk is, and workers do not report when they begin
                # a call.
                self.look_at = min(self.look_at, moment, now + LONG_CALL)
        return has_taken

    def _late_at(self, worker: AnyWorker) -> float:
        """Return the moment, on the clock of time.monotonic, after which the worker's running call
        takes longer than such calls do."""
        chunk = worker.under_way.first
        if chunk is None:
            return math.inf
        position, since = worker.under_way.begun()
        seconds = 0.0
        if chunk.operation is not None:
            # If the position is unknown, the call may be any of the chunk.
            calls = chunk.calls if position < 0 else chunk.calls[position : position + 1]
            seconds = self._functions.seconds(chunk.operation.options.function, unknown=0.0) * sum(
                call.items for _, call in calls
            )
        return since + max(LATE * self._chunk_seconds.shortest, 2 * seconds)

    def _unbegun_seconds(self, worker: AnyWorker, now: float) -> float:
        seconds = 0.0
        for number, count in worker.under_way.unbegun(now):
            chunk = worker.under_way.chunks[number]
            assert chunk.operation is not None
            one = self._functions.seconds(chunk.operation.options.function, unknown=0.0)
            seconds += one * sum(call.items for _, call in chunk.calls[-count:])
        return seconds

    def _had_better_wait(self, operation: Any, worker: AnyWorker, now: float) -> bool:
        """Return whether the next call should wait here, and not behind the worker's running
        call."""
        return self._may_be_sooner_elsewhere(operation) or self._late_at(worker) <= now

    def _may_be_sooner_elsewhere(self, operation: Any) -> bool:
        """Return whether the next call should wait here for the first idle worker, and not behind
        another call.

        * Long calls always wait.
        * The last calls, one for each worker or a few if calls differ, wait unless they are short.
          Chunks under way are not always taken back. If short calls waited, a worker would run dry
          after each one.
        * Calls that will be sorted wait until all of them are packed, the larger ones included.
        """
        if self._goes_by_size(operation) and not operation.sealed:
            return True
        # Each operation has at least one call. In a graph of calls each has exactly one.
        others = len(self.operations) - 1
        left = (len(operation.queue) + others) / self.workers
        is_last = left <= (LAST_UNLIKE if operation.largest_first else 1)
        return self._seconds_of_next(operation) > (
            LAST_AHEAD * self._chunk_seconds.shortest if is_last else LONG_CALL
        )

    def _goes_by_size(self, operation: Any) -> bool:
        """Return whether the last calls are sorted by size. Only long calls are."""
        seconds = self._functions.seconds(operation.options.function, unknown=0.0)
        any_order = operation.options.at_rest and operation.options.chunksize in (None, 1)
        return any_order and self.workers > 1 and seconds >= self._chunk_seconds.one_by_one

    def _seconds_of_next(self, operation: Any) -> float:
        """Return the expected seconds of the operation's next call; infinite before the first."""
        seconds: float = self._functions.seconds(operation.options.function, unknown=math.inf)
        return seconds * operation.queue[0].items if operation.queue else seconds

    def _room(self, worker: AnyWorker) -> float:
        """Return how many more calls the worker may be given before it is replaced."""
        if self._calls_per_worker is None:
            return math.inf
        under_way = sum(len(chunk.calls) for chunk in worker.under_way.chunks.values())
        return self._calls_per_worker - worker.calls_done - under_way

    def _sort(self, operation: Any) -> None:
        """Put the largest of the last calls first.

        If the longest call ran last, its worker would work alone at the end. Sizes are only a hint
        of how long calls take, so nothing else depends on them. Once a call has failed, only the
        calls before it matter, and the first of these matters most.

        Source: the rule of the longest processing time, R. Graham, SIAM Journal on Applied
        Mathematics, 1969.
        """
        has_failed = operation.limit < math.inf
        if not has_failed and (
            not self._goes_by_size(operation) or len(operation.queue) > SORTED * self.workers
        ):
            return
        operation.unsorted = False
        calls = [operation.queue.popleft() for _ in range(len(operation.queue))]
        ranks = [-call.index if has_failed else call.nbytes for call in calls]
        operation.largest_first = not has_failed and len(set(ranks)) > 1
        # Calls of equal size keep their order.
        order = sorted(range(len(calls)), key=ranks.__getitem__, reverse=True)
        operation.queue.extendleft(calls[place] for place in reversed(order))

    def _take_calls(
        self, worker: AnyWorker, operation: Any, size: float, now: float
    ) -> list[tuple[int, Any]]:
        """Take at most `size` calls from the queue, as far as they fit into a message. Number
        them."""
        calls: list[tuple[int, Any]] = []
        nbytes = items = 0
        most_items = operation.options.chunksize or math.inf
        sent, story = (now, SENT, worker.number), operation.options.story.calls
        while (
            len(calls) < size and operation.queue and nbytes < MOST_PAYLOAD and items < most_items
        ):
            call = (
                next_for(operation.queue, worker.device)
                if self._by_device
                else operation.queue.popleft()
            )
            if call is None:
                break
            if call.index >= operation.limit:
                continue
            # The call was cancelled.
            if not operation.starts(call.index):
                continue
            calls.append((next(self._numbers), call))
            story[call.item] = (*story.get(call.item, ()), sent)
            nbytes += call.message_bytes
            items += call.items
        return calls

    def _chunk_size(self, operation: Any) -> Any:
        if operation.options.chunksize is not None:
            return operation.options.chunksize
        if len(operation.queue) == 1:
            return 1
        seconds, left, workers = (
            self._seconds_of_next(operation),
            len(operation.queue),
            self.workers,
        )
        # If calls differ in size, the next idle worker begins the largest.
        together = operation.options.together and not operation.largest_first
        size = chunk_size(seconds, left, workers, self._chunk_seconds, together)
        if operation.unsorted and self._goes_by_size(operation):
            size = min(size, max(1, left - SORTED * workers))
        return size


class Backlog(deque[Any]):
    """Holds the backwards, and the requests for sums, that wait for one worker."""

    def put_back(self, items: Sequence[Any]) -> None:
        """Put items that this or another worker was given in front."""
        self.extendleft(reversed(items))

    def put_again(self, item: Any) -> None:
        """Put back a backward that was sent and did not run. It comes before all that were sent
        later, or not yet, because later backwards of its graph must run after it."""
        place = 0
        while place < len(self) and self[place].sent <= item.sent:
            place += 1
        self.insert(place, item)

    def take_alike(self) -> Iterator[Any]:
        """Take items from the front that can be in one message."""
        first = self.popleft()
        yield first
        kind = first.kind if self else None
        while self and self[0].kind == kind:
            yield self.popleft()

    def cancel(self, graph_task: int) -> list[Any]:
        """Remove and return all items of the backward with this number."""
        found = [each for each in list(self) if each.graph_task == graph_task]
        for item in found:
            # After the pool's end several threads may take from the backlog.
            with contextlib.suppress(ValueError):
                self.remove(item)
        return found


def next_for(queue: deque[Any], device: int) -> Any:
    """Take the first call that may run on the device; return None if there is none."""
    for place in range(len(queue)):  # an iterator would fail if the caller added calls
        call = queue[place]
        if call.route is None or device in call.route:
            del queue[place]
            return call
    return None
