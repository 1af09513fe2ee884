"""The calls that wait for a worker: which of them one is given next, how many at once, and when
they had better go on waiting.

multiprocessing.Pool cuts a map into chunks of one size beforehand. What calls take is not known
then, so here it is measured: short calls go together, fewer of them towards the end; long ones go
one by one, the largest of the last ones first; and what one worker has been given and has not
begun, another one that has run dry may have.

`Deliveries` gives workers chunks of what waits, and the updates that go with them:

    backlogs, then the queue ──► give ──► WorkerHandle.forward, backward ──► transmit ──► link
Caller's side.
Assumes: called by the scheduling thread; any may set `workers`.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError

from mpgrad.callbacks import report
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall, next_for
from mpgrad.memory import owner_of, slab_of
from mpgrad.scheduling.caller_memory import CallerMemory
from mpgrad.scheduling.chunk_writer import CHUNKS_UNDER_WAY, MOST_PAYLOAD, ChunkSeconds, chunk_size
from mpgrad.scheduling.function_cache import FunctionCache
from mpgrad.scheduling.tracer import Tracer
from mpgrad.scheduling.worker_handle import SEEN, WorkerHandle
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import Backwards, Message, Recompute, Record
from mpgrad.wire.tensor_refs import Payload

__all__ = ["CallQueue", "Deliveries"]

LONG_CALL = 50e-3  # seconds: waiting behind another such call takes longer than being sent
# times the shortest chunk: one of the last calls that takes longer waits for a worker that has
# nothing to do
LAST_AHEAD = 5
# times the shortest chunk: a call that takes so long, and longer than others did, may take long
LATE = 5
# calls for each worker, the last ones of a map, that are begun with the largest: of more, the end
# matters little
SORTED = 16
LAST_UNLIKE = 4  # calls for each worker that wait for one that has nothing to do, where they differ


class CallQueue:
    """Operations with calls, in the order in which they are given out."""

    def __init__(
        self,
        function_cache: FunctionCache,
        numbers: itertools.count[int],
        workers: int,
        calls_per_worker: int | None,
        by_device: bool,
        chunk_seconds: ChunkSeconds,
    ) -> None:
        """`numbers` are given to the calls; `calls_per_worker`: after which a worker is
        replaced."""
        self.workers = workers
        # when there may be more to take back, on the clock of time.monotonic
        self.look_at = math.inf
        self._function_cache = function_cache
        self._numbers = numbers
        self._calls_per_worker = calls_per_worker
        self._by_device = by_device
        self._chunk_seconds = chunk_seconds
        self.operations: deque[Operation] = deque()

    @property
    def has_calls(self) -> bool:
        return bool(self.operations) and any(operation.queue for operation in self.operations)

    def join(self, operation: Operation, first: bool = False) -> None:
        if operation not in self.operations:
            self._function_cache.number(operation.options.function)
            (self.operations.appendleft if first else self.operations.append)(operation)

    def tidy(self) -> None:
        """Let go of operations whose calls nobody wants: if no worker looked here again, their
        results would be kept."""
        for operation in list(self.operations):
            if not any(call.index < operation.limit for call in operation.queue):
                self.operations.remove(operation)

    def put_back(self, operation: Operation, calls: Sequence[PackedCall]) -> None:
        wanted = [call for call in calls if call.index < operation.limit]
        if wanted:
            operation.queue.extendleft(reversed(wanted))
            self.join(operation, first=True)

    def next_for(
        self, worker: WorkerHandle
    ) -> tuple[Operation, list[tuple[int, PackedCall]]] | None:
        """A chunk for the worker, of calls with their numbers; None where there is nothing that it
        should be given now."""
        room = self._room(worker)
        place = 0
        while place < len(self.operations) and room > 0:
            operation = self.operations[place]
            if operation.unsorted:
                self._sort(operation)
            if worker.under_way and operation.queue and self._had_better_wait(operation, worker):
                return None
            calls = self._take_calls(worker, operation, min(room, self._chunk_size(operation)))
            # at once: perhaps no worker looks again, and the results would be kept
            if not operation.queue:
                del self.operations[place]
            if calls:
                return operation, calls
            if operation.queue:  # what is there is for workers on other devices
                place += 1
        return None

    def take_back(self, workers: Collection[WorkerHandle]) -> list[WorkerHandle]:
        """Where some have run dry, what others have been given and have not begun; returns those,
        who may have it.

        Costs are not known beforehand. So it is taken from the one that has most, where that is
        worth a message; and from all that are at a call for longer than such calls take, as nobody
        knows when that ends. See `look_at`.
        """
        self.look_at = math.inf
        dry, others = list[WorkerHandle](), list[WorkerHandle]()
        for worker in workers:
            if worker.under_way.chunks:
                others.append(worker)
            elif worker.ready and not worker.retiring:
                dry.append(worker)
        if not (dry and others) or self.has_calls:
            return []
        others = [worker for worker in others if worker.under_way.has_for_others]
        if not others:
            return []
        loads = {worker: self._unbegun_seconds(worker) for worker in others}
        richest = max(loads, key=loads.__getitem__)
        now = time.monotonic()
        for worker in others:
            moment = self._late_at(worker)
            if moment <= now or (
                worker is richest and loads[richest] >= self._chunk_seconds.shortest
            ):
                for operation, calls in worker.under_way.take_back():
                    self.put_back(operation, calls)
                moment = max(moment, now + SEEN)
            if worker.under_way.has_for_others:
                self.look_at = min(self.look_at, moment)
        return dry

    def _late_at(self, worker: WorkerHandle) -> float:
        """When it will have been at a call for longer than such calls take, on the clock of
        time.monotonic."""
        chunk = worker.under_way.first
        if chunk is None:
            return math.inf
        position, since = worker.under_way.begun()
        seconds = 0.0
        if chunk.operation is not None:
            # which of them is not known
            calls = chunk.calls if position < 0 else chunk.calls[position : position + 1]
            seconds = self._function_cache.seconds(
                chunk.operation.options.function, unknown=0.0
            ) * sum(call.items for _, call in calls)
        return since + max(LATE * self._chunk_seconds.shortest, 2 * seconds)

    def _unbegun_seconds(self, worker: WorkerHandle) -> float:
        seconds = 0.0
        for number, count in worker.under_way.unbegun():
            chunk = worker.under_way.chunks[number]
            assert chunk.operation is not None
            one = self._function_cache.seconds(chunk.operation.options.function, unknown=0.0)
            seconds += one * sum(call.items for _, call in chunk.calls[-count:])
        return seconds

    def _had_better_wait(self, operation: Operation, worker: WorkerHandle) -> bool:
        """Whether the next call had better wait here than behind what this worker is at."""
        return self._may_be_sooner_elsewhere(operation) or self._late_at(worker) <= time.monotonic()

    def _may_be_sooner_elsewhere(self, operation: Operation) -> bool:
        """Whether the next call had better wait here than behind another one, for the worker that
        is the first to have nothing.

        Long ones always. Of the others those of the last ones, one for each worker, or some where
        calls differ, that are not short: what is under way is not always taken back, and a worker
        that has no call ahead waits for each. And those that are to be put in order, until the
        larger ones are packed too.
        """
        if self._goes_by_size(operation) and not operation.sealed:
            return True
        # each has one call or more: those of a graph of calls have one
        others = len(self.operations) - 1
        left = (len(operation.queue) + others) / self.workers
        is_last = left <= (LAST_UNLIKE if operation.largest_first else 1)
        return self._seconds_of_next(operation) > (
            LAST_AHEAD * self._chunk_seconds.shortest if is_last else LONG_CALL
        )

    def _goes_by_size(self, operation: Operation) -> bool:
        """Whether its last calls are put in order: those that travel one by one."""
        seconds = self._function_cache.seconds(operation.options.function, unknown=0.0)
        any_order = operation.options.at_rest and operation.options.chunksize in (None, 1)
        return any_order and self.workers > 1 and seconds >= self._chunk_seconds.one_by_one

    def _seconds_of_next(self, operation: Operation) -> float:
        """What its next call will take: by what such items took before, infinitely long where none
        was run yet."""
        seconds = self._function_cache.seconds(operation.options.function, unknown=math.inf)
        return seconds * operation.queue[0].items if operation.queue else seconds

    def _room(self, worker: WorkerHandle) -> float:
        """How many calls the worker may still be given before it is replaced."""
        if self._calls_per_worker is None:
            return math.inf
        under_way = sum(len(chunk.calls) for chunk in worker.under_way.chunks.values())
        return self._calls_per_worker - worker.calls_done - under_way

    def _sort(self, operation: Operation) -> None:
        """The largest of the last calls first: whoever ran the longest of them last would be alone
        at the end.

        Sizes are but a hint of what calls take, so nothing else hangs on them. Once a call has
        failed only those before it matter, and the first of them most. Source: the rule of the
        longest processing time, R. Graham, SIAM Journal on Applied Mathematics, 1969.
        """
        has_failed = operation.limit < math.inf
        if not has_failed and (
            not self._goes_by_size(operation) or len(operation.queue) > SORTED * self.workers
        ):
            return
        operation.unsorted = False
        calls = drained(operation.queue)
        ranks = [-call.index if has_failed else call.nbytes for call in calls]
        operation.largest_first = not has_failed and len(set(ranks)) > 1
        # as they came, where sizes are equal
        order = sorted(range(len(calls)), key=ranks.__getitem__, reverse=True)
        operation.queue.extendleft(calls[place] for place in reversed(order))

    def _take_calls(
        self, worker: WorkerHandle, operation: Operation, size: float
    ) -> list[tuple[int, PackedCall]]:
        """At most `size` calls, with numbers of their own, or as many as a message holds."""
        calls: list[tuple[int, PackedCall]] = []
        nbytes = 0
        while len(calls) < size and operation.queue and nbytes < MOST_PAYLOAD:
            call = (
                next_for(operation.queue, worker.device)
                if self._by_device
                else operation.queue.popleft()
            )
            if call is None:
                break
            if call.index >= operation.limit:
                continue
            if not operation.starts():
                operation.deliver(call.index, CancelledError())
                continue
            calls.append((next(self._numbers), call))
            nbytes += call.message_bytes
        return calls

    def _chunk_size(self, operation: Operation) -> int:
        if operation.options.chunksize is not None:
            return operation.options.chunksize
        if len(operation.queue) == 1:
            return 1
        seconds, left, workers = (
            self._seconds_of_next(operation),
            len(operation.queue),
            self.workers,
        )
        return chunk_size(seconds, left, workers, self._chunk_seconds)


# --- what leaves for the workers


HAS_UPDATES = operator.attrgetter("has_updates")


class Deliveries:
    """What goes to workers goes through `transmit`, and so along with their updates."""

    def __init__(
        self,
        workers: dict[int, WorkerHandle],
        queue: CallQueue,
        memory: CallerMemory,
        tracer: Tracer,
    ) -> None:
        self.workers = workers
        self._queue = queue
        self._memory = memory
        self.tracer = tracer
        self._chunk_numbers = itertools.count(1)
        self.recomputed = 0  # calls whose graphs were made again

    def feed(self) -> list[WorkerHandle]:
        """Give every worker a chunk before any gets its second. Returns those that are retiring,
        and have nothing to do.

        A second one has to wait for the first, perhaps for long, while another worker starts or
        ends what it does. So it is given where it is known to be short.
        """
        queue = self._queue
        for depth in range(CHUNKS_UNDER_WAY):
            for worker in self.workers.values():
                if (
                    (queue.operations or worker.backlog)
                    and worker.ready
                    and len(worker.under_way.chunks) <= depth
                ):
                    self.give(worker)
        dry = queue.take_back(self.workers.values())
        for _ in range(CHUNKS_UNDER_WAY):
            for worker in dry:
                self.give(worker)
        return [
            each
            for each in self.workers.values()
            if each.retiring and each.ready and not each.backlog
        ]

    def give(self, worker: WorkerHandle) -> None:
        """Send `worker` a chunk of what waits; backwards first, because somebody waits for them."""
        if worker.backlog:
            number = next(self._chunk_numbers)
            messages, payload = worker.backward(number)
            self.recomputed += sum(map(recomputed_by, messages))
            self._transmit_chunk(worker, number, messages, payload)
            return
        # it ends that soon, or is ended; nobody knows which
        if worker.retiring or worker.under_way.in_grace:
            return
        share = self._queue.next_for(worker)
        if share is not None:
            number = next(self._chunk_numbers)
            self._transmit_chunk(worker, number, *worker.forward(number, *share))

    def _transmit_chunk(
        self, worker: WorkerHandle, number: int, messages: list[Message], payload: Payload
    ) -> None:
        if self.tracer.trace is not None:
            self.tracer.sent(worker, number)
        self.transmit(worker, messages, payload)

    def record(self, worker: WorkerHandle) -> None:
        """For a timeline: have it say what it does from now on."""
        self.tracer.know(worker)
        self.transmit(worker, [Record(True)])

    def transmit(
        self, worker: WorkerHandle, messages: list[Message], payload: Payload | None = None
    ) -> None:
        """Send, with all that has to be told. A worker that cannot be reached counts as dead when
        its link is read next."""
        self.collect_returns()
        if self._memory.arena.dropped:
            self.unmap(drained(self._memory.arena.dropped))
        # each worker is told of a slab when it is first lent something there
        self._memory.arena.made.clear()
        try:
            worker.transmit(messages, payload or Payload())
        except ConnectionError:
            pass  # it died; the end of its pipe is read next, and says so once
        except OSError as error:
            # no descriptor is free for what has to wait: what it was sent is not whole
            report(
                logging.WARNING, "a worker is killed, because nothing can be sent to it (%s)", error
            )
            worker.link.kill()

    def collect_returns(self) -> None:
        for address, times in self._memory.foreign_slabs.collect():
            worker = self.workers.get(owner_of(slab_of(address)))
            if worker is not None:
                worker.returns.append((address, times))
        for number in self._memory.foreign_slabs.take_missing():
            if (worker := self.workers.get(owner_of(number))) is not None:
                worker.missing_slabs.append(number)

    def has_updates(self) -> bool:
        """Whether there is something to tell the workers, apart from work."""
        self.collect_returns()
        return any(map(HAS_UPDATES, self.workers.values()))

    def send_updates(self, quiet_for: float) -> None:
        """Tell workers, that have been sent nothing for so many seconds, what has waited for a
        message to go with."""
        now = time.monotonic()
        for worker in self.workers.values():
            if worker.has_updates and worker.ready and now - worker.sent_at >= quiet_for:
                self.transmit(worker, [])

    def unmap(self, numbers: Sequence[int]) -> None:
        """Slabs that their owner dropped, or that died with it."""
        for number in numbers:
            self._memory.foreign_slabs.detach(number)
            for worker in self.workers.values():
                worker.lent_slots.unmap(number)


def recomputed_by(message: Message) -> int:
    """How many calls run again for the backwards of this message."""
    if not isinstance(message, Backwards):
        return 0
    reruns = [step for call in message.calls for step in call.before if isinstance(step, Recompute)]
    return sum(max(1, len(step.call.bundle)) for step in reruns)
