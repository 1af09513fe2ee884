"""A `WorkerHandle` is a worker as the scheduler sees it. It notes what the worker has been sent and
lent, and how far the worker is. Every worker starts with the same `Settings`. This module runs in
the caller only. The scheduler makes the decisions.

A worker writes each call that it begins into a progress record, which the caller reads (see
`wire.agent_messages.ProgressRecord`). Before each call it checks there whether the caller has
skipped the chunk. If no memory is shared, a node agent reads and writes the record for the caller,
with a delay. Then nothing of a running chunk can be taken back. Calls that were skipped in time are
returned unrun.
Guarantees: until the end, other threads only read, and append to the backlog and to the deques of
    updates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpgrad.autograd.remote_graph import Backward, SumRequest
from mpgrad.calls.backwards import error_maker
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import Device, PackedCall, device_code_named, device_count
from mpgrad.engines.kinds import ENGINES, WorkerLink, traits_of
from mpgrad.environment import EnvironmentChanges
from mpgrad.machine.ledger import CANCEL, TAKE, GraphLedger, SumLedger
from mpgrad.machine.policy import SEEN
from mpgrad.machine.queue import Backlog
from mpgrad.machine.story import BACKWARD_SENT
from mpgrad.memory.accelerator import INSTALLED
from mpgrad.scheduling.chunk_writer import Chunk, ChunkWriter, LentSlots
from mpgrad.system import OwnedDescriptor
from mpgrad.tracebacks import shown_stack
from mpgrad.wire.agent_messages import ProgressRecord, in_order
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import (
    DroppedSlabs,
    Forget,
    Message,
    MissingSlabs,
    Release,
    ReturnedSlots,
)
from mpgrad.wire.pipe import UnreadableFrame, read_crash_traceback
from mpgrad.wire.tensor_refs import Payload

__all__ = [
    "GRACE_PERIOD",
    "SentChunks",
    "Settings",
    "Termination",
    "WorkerHandle",
    "worker_devices",
]


class Termination(NamedTuple):
    """The moment by which a worker has to end, because its running call is overdue."""

    moment: float  # on the clock of time.monotonic
    begun: tuple[int, float]  # see `SentChunks.begun`


class WorkerHandle:
    """Holds what the scheduler knows of a worker, and the worker's backlog. It outlives the worker,
    because graphs refer to it."""

    def __init__(self, number: int, link: WorkerLink, device: int = 0) -> None:
        self.number = number
        self.link = link
        # the device's code
        self.device = device
        # whether the worker and the caller can read each other's slots on the device
        self.direct = device == 0
        self.ready = False
        # see `begin_retiring`
        self.retiring = False
        # whether no other worker will rebuild its graphs after its end
        self.is_last = False
        self.pid = -1
        # since when it has been ready, on the clock of time.monotonic
        self.ready_at = 0.0
        self.calls_done = 0

        # the error that its graphs raise after its end
        self.gone: BaseException | None = None
        self.exit_code: int | None = None
        # the timeout of the call for which it was killed
        self.overdue: float | None = None
        # until when it has to end, for that call
        self.termination: Termination | None = None
        # the caller's end of the pipe to which the worker writes its stack if it crashes
        self.crash_traceback: OwnedDescriptor | None = None
        # the stack that was read from this pipe
        self.stack = ""
        # the error in its messages for which it was killed
        self.garbled: UnreadableFrame | None = None
        # why its answer could not be read, for which it was killed
        self.unreadable = ""

        self.graphs = GraphLedger()
        self.sums = SumLedger()
        self.lent_slots = LentSlots(link)
        self.writer = ChunkWriter(self.graphs, self.sums, self.lent_slots)
        self.backlog = Backlog()
        self.under_way = SentChunks()

        # when a message was last sent, on the clock of time.monotonic
        self.sent_at = 0.0
        # The rest are updates, which are sent with the next message.
        # addresses, and how often the caller had received each
        self.returns: deque[tuple[int, int]] = deque()
        # slabs of the worker that the caller could not receive
        self.missing_slabs: list[int] = []
        self.releases: deque[int] = deque()
        # calls whose backward was an eager one, and has arrived
        self.consumed: deque[int] = deque()
        # calls of `consumed` that were noted in `graphs`
        self._to_release: list[int] = []
        # functions with the bytes of their captures
        self.forgotten_functions: deque[tuple[int, int]] = deque()
        self.forgotten_codes: deque[int] = deque()

    @property
    def name(self) -> str:
        """The worker's name in error messages."""
        return f"{self.number} on node {self.link.node}" if self.link.node else str(self.number)

    @property
    def end_in_words(self) -> list[str]:
        """For error messages: everything known of the worker's end, except for the exit code."""
        garbled = ""
        if self.garbled is not None:
            garbled = (
                f"what it sent is not a message ({self.garbled}); did the function write to "
                "descriptors that it did not open?"
            )
        return [
            each
            for each in (self.link.node and f"node: {self.link.node}", self.link.lost, garbled)
            if each
        ]

    def busy(self, now: float) -> float:
        """The share of the time since the worker was ready in which it had work under way."""
        since = self.under_way.since
        seconds = self.under_way.seconds + (max(0.0, now - since) if self.under_way else 0.0)
        return min(1.0, seconds / (now - self.ready_at)) if now > self.ready_at else 0.0

    def begin_retiring(self) -> None:
        """Give the worker no new calls; it ends when it keeps no graph any more.

        Its successor may have its place at once.
        """
        self.retiring = self.link.is_leaving = True

    # --- work that is left

    @property
    def load(self) -> int:
        """The number of calls and backwards that the worker has been given, or will get next."""
        return len(self.backlog) + sum(
            len(chunk.calls) + len(chunk.backwards) for chunk in self.under_way.chunks.values()
        )

    @property
    def backwards_left(self) -> int:
        """The number of backwards that the worker has not answered. Any thread may ask."""
        waiting = sum(isinstance(each, Backward) for each in list(self.backlog))
        return waiting + sum(len(chunk.backwards) for chunk in list(self.under_way.chunks.values()))

    def is_done(self, graph_task: int) -> bool:
        """Whether nothing is under way or waiting, and no backward from this one on needs anything
        of the worker."""
        if (
            self.under_way
            or self.backlog
            or self._has_releases
            or self.graphs.needs_worker(self.is_last)
        ):
            return False
        return self.sums.are_before(graph_task)

    @property
    def only_keeps(self) -> bool:
        """Whether the worker does nothing but keep graphs or sums for backwards that may come. Any
        thread may ask."""
        if self.under_way or self.backlog:
            return False
        return bool(self.sums or set(self.graphs.states) - set(self.releases))

    @property
    def has_others(self) -> bool:
        """Whether the worker has anything that was not cancelled with grace."""
        graphs = self.graphs.states.keys() - set(self.releases)
        return bool(graphs or self.backlog or self.sums) or any(
            any(chunk.wanted()) for chunk in self.under_way.chunks.values()
        )

    def cancel_backward(self, graph_task: int, error: BaseException, now: float) -> None:
        """Cancel all that was sent for the backward with this number.

        Threads that wait for it get the error.
        """
        waiting = self.backlog.cancel(graph_task)
        for item in waiting:
            item.settle(error_maker(error))
        for item in (*waiting, *self.under_way.cancel_backward(graph_task, error, now)):
            # It may have used up its graph, or may never begin.
            if isinstance(item, Backward) and item.again and item.is_last:
                self.graphs.handle(item.call, CANCEL)

    # --- messages to the worker

    @property
    def has_updates(self) -> bool:
        forgotten = self.forgotten_functions or self.forgotten_codes
        return bool(self.returns or self.missing_slabs or self._has_releases or forgotten)

    @property
    def _has_releases(self) -> bool:
        return bool(self.releases or self.consumed or self._to_release)

    def forward(
        self, number: int, operation: Operation, calls: list[tuple[int, PackedCall]], now: float
    ) -> tuple[list[Message], Payload]:
        """Write a chunk of an operation, which is under way from now on."""
        messages, payload, chunk = self.writer.forward(number, operation, calls)
        self._add(number, chunk, now)
        return messages, payload

    def backward(self, number: int, now: float) -> tuple[list[Message], Payload]:
        """Write a chunk of the backlog, which is under way from now on."""
        self.sums.trim()
        messages, payload, chunk = self.writer.backward(number, self.backlog, self.note_consumed)
        sent = (now, BACKWARD_SENT, self.number)
        for each in chunk.backwards:
            each.note(sent)
        self._add(number, chunk, now)
        return messages, payload

    def _add(self, number: int, chunk: Chunk, now: float) -> None:
        self.under_way.add(number, chunk, now)
        if chunk.timeout is not None:
            self.link.limit(number, chunk.timeout)

    def take(self, number: int, now: float) -> Chunk:
        """Take a chunk that is answered."""
        chunk = self.under_way.take(number, now)
        if chunk.timeout is not None:
            self.link.limit(number, None)
        return chunk

    def transmit(self, messages: list[Message], payload: Payload, now: float) -> None:
        """Send `messages` and all updates.

        Raises:
            ConnectionError: the worker is gone.
            OSError: messages that have to wait need descriptors of their own, and there are none.
        """
        # This comes first. A slab that was lost with its owner may be lent again, for a result that
        # is stored there.
        if self.lent_slots.gone_slabs:
            self.link.send([DroppedSlabs(drained(self.lent_slots.gone_slabs))])
        if new_slabs := self.lent_slots.take_new_slabs():
            self.link.introduce(new_slabs)
        updates = self._take_updates()
        if updates and self.under_way.in_grace:
            # The worker may have been spared for work that is not needed any more.
            self.under_way.look_at_grace(now)
        self.sent_at = now
        self.link.send(updates + messages, payload.parts)

    def _take_updates(self) -> list[Message]:
        """Return the updates as messages. They count as sent from now on."""
        updates: list[Message] = []
        if self.returns:
            updates.append(ReturnedSlots(drained(self.returns)))
        if self.missing_slabs:
            updates.append(MissingSlabs(self.missing_slabs))
            self.missing_slabs = []
        self.note_consumed()
        if self._to_release:
            updates.append(Release(self._to_release))
            self._to_release = []
        if self.releases:
            released = drained(self.releases)
            self.graphs.forget(released)
            updates.append(Release(released))
        if self.forgotten_functions or self.forgotten_codes or self.sums.forgotten:
            forgotten = drained(self.forgotten_functions)
            functions = [number for number, _ in forgotten]
            self.writer.forget(functions)
            nbytes = sum(nbytes for _, nbytes in forgotten)
            sums, self.sums.forgotten = self.sums.forgotten, []
            updates.append(Forget(functions, drained(self.forgotten_codes), nbytes, sums))
        return updates

    def note_consumed(self) -> None:
        """Note the graphs of eager backwards that other threads have reported. They can be
        dropped."""
        if self.consumed:
            calls = drained(self.consumed)
            for call in calls:
                self.graphs.handle(call, TAKE)
            self._to_release += calls

    # --- its end

    def note_end(self) -> None:
        """Free what the worker held, because it is gone. Graphs may refer to this handle for
        a long time."""
        self.lent_slots.end()
        self.under_way.end()
        if self.crash_traceback is not None:
            if self.crash_traceback.is_ours:
                self.stack = shown_stack(read_crash_traceback(self.crash_traceback.number))
            self.crash_traceback = None
        elif self.link.crash_traceback:
            self.stack = shown_stack(self.link.crash_traceback)


# --- chunks under way


# seconds; most interrupted calls end by themselves in this time, so that the worker's graphs need
# not be rebuilt
GRACE_PERIOD = 0.2


# long because: it has a few lines for each question about a worker's chunks
class SentChunks:
    """Holds the chunks under way with a worker, by number, in the order in which they were sent.
    The worker answers them in this order.

    Assumes: called by the scheduling thread.
    """

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        # of int64, see `ProgressRecord`
        self.progress_record: memoryview | None = None
        # the link to a node agent that reads and writes the record, if the caller cannot
        self.link: WorkerLink | None = None
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
        # when the worker is killed if it still runs such a part, on the same clock
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
        self.progress_record = None

    # --- the worker's progress

    @property
    def has_work(self) -> bool:
        """Whether the worker has not answered a call, backward or request. It may still have to
        answer a chunk whose calls were all taken back."""
        return any(
            chunk.calls or chunk.backwards or chunk.request is not None
            for chunk in self.chunks.values()
        )

    @property
    def first(self) -> Chunk | None:
        return next(iter(self.chunks.values()), None)

    def is_at(self, operation: Operation) -> bool:
        first = self.first
        return first is not None and first.operation is operation

    def begun(self) -> tuple[int, float]:
        """Return the position of the running call in the first chunk, and when it began.

        The position is -1 if no call runs. It counts calls that are not answered.
        """
        number, chunk = next(iter(self.chunks.items()), (None, None))
        progress_record = self.progress_record
        if (
            chunk is None
            or progress_record is None
            or progress_record[ProgressRecord.CHUNK] != number
        ):
            return -1, self.since
        in_order()
        return progress_record[ProgressRecord.POSITION] - chunk.answered, max(
            self.since, progress_record[ProgressRecord.STARTED] / 1e9
        )

    def limited_since(self, now: float) -> float:
        """Return since when the time limit of the running call, or of the next one, counts.

        No limit includes the loading of a function.
        """
        since, progress_record = self.begun()[1], self.progress_record
        if progress_record is None:
            return since
        started = progress_record[ProgressRecord.STARTED]
        return now if started == ProgressRecord.LOADING else max(since, started / 1e9)

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
        return 0 if self.progress_record is None else self.progress_record[ProgressRecord.OFFSET]

    @property
    def is_at_wanted(self) -> bool:
        chunk, position = self.first, max(self.begun()[0], 0)
        # If all calls were taken back, none is left.
        return chunk is not None and any(chunk.wanted()[position : position + 1])

    # --- calls that the worker is to skip

    def cancel(self, operation: Operation) -> None:
        """Have the worker skip the rest of chunks that are not needed any more."""
        for number, chunk in self.chunks.items():
            if chunk.operation is operation and all(
                call.index >= operation.limit for _, call in chunk.calls
            ):
                self._skip(number)

    def _skip(self, number: int) -> bool:
        """Have the worker skip the chunk, and return whether this is new to it.

        The chunk gets a place in the progress record that no other chunk under way has, because
        that chunk must stay skipped. A worker process has a place for each chunk that it is sent at
        a time. In the caller's own process there may be more chunks than places.
        """
        progress_record = self.progress_record
        if progress_record is None:
            return False
        places = range(ProgressRecord.SKIPPED, ProgressRecord.COUNT)
        free = [place for place in places if progress_record[place] not in self.chunks]
        if not free or any(progress_record[place] == number for place in places):
            return False
        progress_record[free[0]] = number
        self._skipped[number] = math.inf
        self.just_skipped.append(number)
        if self.link is not None:
            self.link.skip(free[0], number)
        return True

    def note_skips(self, now: float) -> None:
        """Note since when chunks are skipped: a moment after the worker could see it."""
        for number in self.just_skipped:
            if number in self._skipped:
                self._skipped[number] = now
        self.just_skipped.clear()

    def skip_unbegun(self, now: float) -> bool:
        """Have the worker skip calls that others may run, and return whether any are new to it."""
        are_news = [self._skip(number) for number in self._for_others()]
        return any(are_news) or any(now - since < SEEN for since in self._skipped.values())

    def unbegun(self, now: float) -> list[tuple[int, int]]:
        """Return chunks, and how many calls at the end of each the worker will surely not begin.

        The worker notes each call in the record, then checks if the chunk is skipped. Some time
        after the skip was written, the record shows the last call that it will run. Before that,
        the worker may have begun one more call, which cannot be read here yet, but not two.
        """
        progress_record = self.progress_record
        if progress_record is None:
            return []
        if self.link is not None:
            return self._skipped_by_agent(self.link)
        for_others = self._for_others()
        at = progress_record[ProgressRecord.CHUNK]
        in_order()
        position = progress_record[ProgressRecord.POSITION]
        in_order()
        # The worker goes on to another call at this moment.
        if at == ProgressRecord.BETWEEN or at != progress_record[ProgressRecord.CHUNK]:
            return []
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

    def _skipped_by_agent(self, link: WorkerLink) -> list[tuple[int, int]]:
        """Return whole chunks behind the first, which the node agent has skipped.

        A worker answers a chunk before it checks whether the next one is skipped.
        """
        # The worker may have answered its first chunk.
        if link.has_more():
            return []
        skipped = link.skipped.values()
        return [
            (number, len(chunk.calls))
            for number, chunk in self._for_others().items()
            if number in skipped
        ]

    def take_back(self, now: float) -> list[tuple[Operation, list[PackedCall]]]:
        """Take back the calls that `unbegun` counts.

        Another request, after `SEEN` seconds or a node agent's report, may take back more.
        """
        self.skip_unbegun(now)
        taken = []
        # The calls are counted after the worker can see that they are skipped.
        for number, count in self.unbegun(now):
            if number in self._skipped:
                chunk = self.chunks[number]
                assert chunk.operation is not None
                taken.append((chunk.operation, [call for _, call in chunk.calls[-count:]]))
                del chunk.calls[-count:]
        return taken

    @property
    def has_for_others(self) -> bool:
        """Whether there are calls behind the running one that the worker can be made to skip."""
        chunks = self.chunks
        if not chunks or self.progress_record is None:
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
        for place, (number, chunk) in enumerate(self.chunks.items()):
            is_divisible = self.link is None and not stays_together(chunk)
            if chunk.operation is not None and (place > 0 or is_divisible):
                found[number] = chunk
        return found

    # --- calls that are cancelled with grace

    def cancel_with_grace(self, operation: Operation | None, now: float) -> None:
        """Cancel all chunks of the operation, or of all operations if it is None."""
        wanted = [number for number, chunk in self.chunks.items() if chunk.operation is not None]
        self._put_in_grace(
            [
                each
                for each in wanted
                if operation is None or self.chunks[each].operation is operation
            ],
            now,
        )

    def cancel_backward(
        self, graph_task: int, error: BaseException, now: float
    ) -> list[Backward | SumRequest]:
        """Cancel the parts of the backward with this number, and return them.

        Threads that wait for them get the error.
        """
        parts, numbers = list[Backward | SumRequest](), []
        for number, chunk in self.chunks.items():
            found = [
                each
                for each in (*chunk.backwards, chunk.request)
                if each is not None and each.graph_task == graph_task
            ]
            for each in found:
                each.settle(error_maker(error))
            if found:
                numbers.append(number)
                parts += found
        self._put_in_grace(numbers, now)
        return parts

    def _put_in_grace(self, numbers: Sequence[int], now: float) -> None:
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
        if self.link is not None:
            self.link.follow(2 * GRACE_PERIOD)


def stays_together(chunk: Chunk) -> bool:
    return chunk.operation is not None and chunk.operation.options.chunksize is not None


# --- settings of all workers


class Settings(NamedTuple):
    """Holds the settings of a scheduler. Each worker is sent some of them (`Start`)."""

    workers: int
    # the pickle of (function or None, arguments)
    initializer: bytes
    # intra-op threads; None if no number was given
    threads: int | None
    # A worker is replaced after this many calls.
    calls: int | None
    # how often a call runs again after its worker died; with 0, lost work stays lost
    retries: int
    # how often a call runs again after it took too long
    timeout_retries: int
    # how many bytes graphs in a worker may take; beyond that they are dropped and rebuilt
    graph_bytes: int | None
    # Graphs are also dropped if memory is about to run out.
    spares_memory: bool
    # the code of each worker's device
    devices: tuple[int, ...] | None = None
    # Workers are threads of this process, so they cannot be killed.
    in_process: bool = False
    # Workers may be on other machines.
    remote: bool = False
    # changes of the caller's environment since the pool began, if workers follow it
    since: EnvironmentChanges | None = None
    # Calls run in the thread that waits for them.
    in_caller: bool = False

    @property
    def recoverable(self) -> bool:
        """Whether calls are kept as long as their graphs, so that they can run again."""
        return self.retries > 0 or self.graph_bytes is not None


def worker_devices(
    devices: Device | Sequence[Device] | None, processes: int | None, engine: str, context: object
) -> tuple[int, ...] | None:
    """Return the code of each worker's device for `Pool(devices=...)`, or None if that is None.

    `accelerator.device_code` makes the codes.

    Raises:
        ValueError, TypeError: a device does not exist, or does not fit the engine or the number of
            processes.
    """
    traits = traits_of(engine)
    if devices is None:
        if not traits.on_cpu:
            raise ValueError(
                f'engine "{engine}" runs on a GPU; say on which (devices="cuda:0", processes=4)'
            )
        return None
    if not traits.on_devices:
        others = ", ".join(name for name, each in ENGINES.items() if each.traits.on_devices)
        raise ValueError(f"devices are for engines {others} (engine: {engine!r})")
    kind = INSTALLED.accelerator.type
    if isinstance(devices, str) and devices == kind:
        codes = [code + 1 for code in range(device_count(devices))]
    elif isinstance(devices, (str, torch.device)):
        codes = [device_code_named(devices, "devices")] * (1 if processes is None else processes)
    elif isinstance(devices, Sequence):
        codes = [device_code_named(device, "devices") for device in devices]
    else:
        raise TypeError(
            f"devices must be a device, or a list of one for each worker (devices: {devices!r})"
        )
    if not codes:
        raise ValueError(f"devices must name at least one (devices: {devices!r})")
    if processes is not None and processes != len(codes):
        raise ValueError(
            f"devices say how many workers there are ({len(codes)}); leave processes out "
            f"(processes: {processes})"
        )
    if not traits.on_cpu and 0 in codes:
        raise ValueError(
            f'engine "{engine}" runs on GPUs only; use "thread" on the CPU (devices: {devices!r})'
        )
    if any(codes) and getattr(context, "_name", context) == "fork":
        raise ValueError(
            'a forked process cannot use the GPUs of its parent (context: "fork"); leave context '
            'out, or "spawn"'
        )
    return tuple(codes)
