"""A `WorkerHandle` is a worker as the scheduler sees it. It notes what the worker has been sent and
lent, and how far the worker is. This module runs in the caller only. The scheduler makes the
decisions.

Guarantees: until the end, other threads only read, and append to the backlog and to the deques of
    updates.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container

from mpgrad.autograd.remote_graph import Backward
from mpgrad.calls.backwards import error_maker
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.engines.kinds import WorkerLink
from mpgrad.machine.deaths import Termination
from mpgrad.machine.ledger import CANCEL, TAKE, GraphLedger, SumLedger
from mpgrad.machine.queue import Backlog
from mpgrad.machine.story import BACKWARD_SENT
from mpgrad.machine.under_way import Chunk, SentChunks
from mpgrad.scheduling.chunk_writer import ChunkWriter, LentSlots
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

__all__ = ["WatchedProgressRecord", "WorkerHandle"]


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
        sent = self.under_way.parts_of_backward(graph_task)
        for item in (*self.backlog.cancel(graph_task), *itertools.chain(*sent.values())):
            if item.arrived:
                continue
            item.settle(error_maker(error))
            # It may have used up its graph, or may never begin.
            if isinstance(item, Backward) and item.again and item.is_last:
                self.graphs.note_unfinished(item.call, item.asked.graph_task, CANCEL)
        self.under_way.put_in_grace(sent, now)

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


# --- how far it is


class WatchedProgressRecord:
    """Reads a worker's progress record, and writes there which chunks the worker is to skip (see
    `machine.under_way`)."""

    def __init__(self, numbers: memoryview, link: WorkerLink | None = None) -> None:
        """Take a copy of the numbers and the `link` to a node agent, if the caller cannot read the
        record itself."""
        # of int64, see `ProgressRecord`
        self._numbers = numbers
        self._link = link
        self.is_far = link is not None

    def at(self) -> tuple[int, int] | None:
        """Return the chunk and the position of the call that was noted last.

        Return None while the worker goes on to another chunk.
        """
        numbers = self._numbers
        chunk = numbers[ProgressRecord.CHUNK]
        in_order()
        position = numbers[ProgressRecord.POSITION]
        in_order()
        is_between = chunk == ProgressRecord.BETWEEN or chunk != numbers[ProgressRecord.CHUNK]
        return None if is_between else (chunk, position)

    @property
    def started(self) -> float | None:
        """When that call began, on the clock of time.monotonic; None while the worker loads a
        function."""
        started = self._numbers[ProgressRecord.STARTED]
        return None if started == ProgressRecord.LOADING else started / 1e9

    @property
    def offset(self) -> int:
        return self._numbers[ProgressRecord.OFFSET]

    def skip(self, number: int, under_way: Container[int]) -> bool:
        """Write that the chunk is skipped, and return whether this is new.

        The chunk gets a place that no other chunk under way has, because that chunk must stay
        skipped. A worker process has a place for each chunk that it is sent at a time. In the
        caller's own process there may be more chunks than places.
        """
        places = range(ProgressRecord.SKIPPED, ProgressRecord.COUNT)
        free = [place for place in places if self._numbers[place] not in under_way]
        if not free or any(self._numbers[place] == number for place in places):
            return False
        self._numbers[free[0]] = number
        if self._link is not None:
            self._link.skip(free[0], number)
        return True

    def skipped(self) -> Container[int]:
        """Return the chunks that the node agent has skipped.

        A worker answers a chunk before it checks whether the next one is skipped.
        """
        # The worker may have answered its first chunk.
        if self._link is None or self._link.has_more():
            return ()
        return self._link.skipped.values()

    def follow(self, seconds: float) -> None:
        """Have the node agent report where the worker is, for this number of seconds."""
        if self._link is not None:
            self._link.follow(seconds)
