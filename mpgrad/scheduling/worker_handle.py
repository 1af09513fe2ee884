"""What every worker of a pool starts with (`Settings`), and a worker as the scheduler sees it: what
it has been sent, lent and told, and how far it has come with that. Caller's side; decisions are the
scheduler's.

A worker writes what it begins into memory that the caller reads (see
`wire.agent_messages.ProgressRecord`), and looks there, before each call, whether the caller has had
the chunk skipped. Where no memory is shared an agent reads and writes there for us, some time
later: so of a chunk that runs nothing can be taken back, but what was skipped in time comes back
unrun.
Guarantees: other threads append to the backlog and the deques of updates, and read; until the end
    they change nothing else.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpgrad.autograd.remote_graph import Backward
from mpgrad.calls.backwards import SumRequest, error_maker
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import Device, PackedCall, device_code_named, device_count
from mpgrad.engines.kinds import ENGINES, WorkerLink, traits_of
from mpgrad.environment import EnvironmentChanges
from mpgrad.memory.accelerator import INSTALLED
from mpgrad.scheduling.chunk_writer import Chunk, ChunkWriter, GraphLedger, LentSlots, SumLedger
from mpgrad.system import OwnedDescriptor
from mpgrad.tracebacks import shown_stack
from mpgrad.wire.agent_messages import ProgressRecord, in_order
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import DroppedSlabs, Forget, Message, MissingSlabs, Release, ReturnedSlots
from mpgrad.wire.pipe import UnreadableFrame, read_crash_traceback
from mpgrad.wire.tensor_refs import Payload

__all__ = [
    "GRACE_PERIOD",
    "SEEN",
    "SentChunks",
    "Settings",
    "Termination",
    "WorkerHandle",
    "worker_devices",
]


class Termination(NamedTuple):
    """A worker has to end by the `moment`, because of the call that it was at."""

    moment: float  # on the clock of time.monotonic
    begun: tuple[int, float]  # see `SentChunks.begun`


class WorkerHandle:
    """What the scheduler knows of a worker, and what waits for it. Outlives the worker, for graphs
    that refer to it."""

    def __init__(self, number: int, link: WorkerLink, device: int = 0) -> None:
        self.number = number
        self.link = link
        self.device = device  # its code
        self.direct = device == 0  # it and we can read each other's slots on its device
        self.ready = False
        self.retiring = False  # see `begin_retiring`
        self.is_last = False  # when it has ended no other will make again what is missing
        self.pid = -1
        self.ready_at = 0.0  # since when it is, on the clock of time.monotonic
        self.calls_done = 0

        self.gone: BaseException | None = None  # what its graphs answer after its end
        self.exit_code: int | None = None
        self.overdue: float | None = None  # the timeout of the call for which it was killed
        self.termination: Termination | None = None  # it has been told to end, for that call
        # our end of the pipe that it writes its stack into, should it crash
        self.crash_traceback: OwnedDescriptor | None = None
        self.stack = ""  # what came of it
        # what was wrong with what it sent, for which it was killed
        self.garbled: UnreadableFrame | None = None
        self.unreadable = ""  # why its answer could not be read, for which it was killed

        self.graphs = GraphLedger()
        self.sums = SumLedger()
        self.lent_slots = LentSlots(link)
        self.writer = ChunkWriter(self.graphs, self.sums, self.lent_slots)
        self.backlog: deque[Backward | SumRequest] = deque()
        self.under_way = SentChunks()

        # updates, to be sent along with the next message
        self.sent_at = 0.0  # when that was last, on the clock of time.monotonic
        self.returns: deque[tuple[int, int]] = deque()  # address, how often we had received it
        self.missing_slabs: list[int] = []  # of the worker's, that we could not receive
        self.releases: deque[int] = deque()
        self.consumed: deque[int] = deque()  # calls whose backward was an eager one, and has come
        self._to_release: list[int] = []  # of these, those that were noted
        # with the bytes of their captures
        self.forgotten_functions: deque[tuple[int, int]] = deque()
        self.forgotten_codes: deque[int] = deque()

    @property
    def name(self) -> str:
        """For errors."""
        return f"{self.number} on node {self.link.node}" if self.link.node else str(self.number)

    @property
    def end_in_words(self) -> list[str]:
        """For errors: what is known of its end beside the exit code."""
        garbled = ""
        if self.garbled is not None:
            garbled = (
                f"what it had sent is no message ({self.garbled}); did the function write to "
                "descriptors not its own?"
            )
        return [
            each
            for each in (self.link.node and f"node: {self.link.node}", self.link.lost, garbled)
            if each
        ]

    @property
    def busy(self) -> float:
        """The share of the time since it was ready in which it had something under way."""
        now, since = time.monotonic(), self.under_way.since
        seconds = self.under_way.seconds + (max(0.0, now - since) if self.under_way else 0.0)
        return min(1.0, seconds / (now - self.ready_at)) if now > self.ready_at else 0.0

    def begin_retiring(self) -> None:
        """It takes no new calls, and ends when it keeps no graph any more; its successor may have
        its place at once."""
        self.retiring = self.link.is_leaving = True

    # --- what is left to do

    @property
    def load(self) -> int:
        """How many calls it has been given or is about to be."""
        return len(self.backlog) + sum(
            len(chunk.calls) + len(chunk.backwards) for chunk in self.under_way.chunks.values()
        )

    @property
    def backwards_left(self) -> int:
        """That it has not answered. Any thread asks."""
        waiting = sum(isinstance(each, Backward) for each in list(self.backlog))
        return waiting + sum(len(chunk.backwards) for chunk in list(self.under_way.chunks.values()))

    @property
    def is_done(self) -> bool:
        """Nothing under way, nothing waiting, nothing there that a backward could still need."""
        return not self.sums and self.has_sums_before(0)

    def has_sums_before(self, graph_task: int) -> bool:
        """It would be done, but for sums of earlier backwards."""
        if (
            self.under_way
            or self.backlog
            or self._has_releases
            or self.graphs.needs_worker(self.is_last)
        ):
            return False
        return self.sums.are_before(graph_task)

    @property
    def has_others(self) -> bool:
        """Whether there is anything but what was cancelled with grace."""
        graphs = self.graphs.states.keys() - set(self.releases)
        return bool(graphs or self.backlog or self.sums) or any(
            any(chunk.wanted()) for chunk in self.under_way.chunks.values()
        )

    def cancel_backward(self, graph_task: int, error: BaseException) -> None:
        """All that was sent for the backward with this number; who waits for it gets the error."""
        for item in list(self.backlog):
            if item.graph_task == graph_task:
                # after the end several threads may take from it
                with contextlib.suppress(ValueError):
                    self.backlog.remove(item)
                item.settle(error_maker(error))
        self.under_way.cancel_backward(graph_task, error)

    # --- what it is sent

    @property
    def has_updates(self) -> bool:
        of_memory = self.returns or self.missing_slabs
        of_graphs = self.releases or self.consumed or self._to_release
        return bool(of_memory or of_graphs or self.forgotten_functions or self.forgotten_codes)

    @property
    def _has_releases(self) -> bool:
        return bool(self.releases or self.consumed or self._to_release)

    def forward(
        self, number: int, operation: Operation, calls: list[tuple[int, PackedCall]]
    ) -> tuple[list[Message], Payload]:
        """A chunk of an operation, which is under way from now on."""
        messages, payload, chunk = self.writer.forward(number, operation, calls)
        self._add(number, chunk)
        return messages, payload

    def backward(self, number: int) -> tuple[list[Message], Payload]:
        """A chunk of what waits in the backlog, likewise."""
        messages, payload, chunk = self.writer.backward(number, self.backlog, self.note_consumed)
        self._add(number, chunk)
        return messages, payload

    def _add(self, number: int, chunk: Chunk) -> None:
        self.under_way.add(number, chunk)
        if chunk.timeout is not None:
            self.link.limit(number, chunk.timeout)

    def take(self, number: int) -> Chunk:
        """A chunk that is answered."""
        chunk = self.under_way.take(number)
        if chunk.timeout is not None:
            self.link.limit(number, None)
        return chunk

    def transmit(self, messages: list[Message], payload: Payload) -> None:
        """Send `messages` and all updates.

        Raises:
            ConnectionError: the worker is gone.
            OSError: what has to wait needs descriptors of its own, and there are none.
        """
        # first: one that its owner's death took away may be lent again, for a result that lies
        # there
        if self.lent_slots.gone_slabs:
            self.link.send([DroppedSlabs(drained(self.lent_slots.gone_slabs))])
        if new_slabs := self.lent_slots.take_new_slabs():
            self.link.introduce(new_slabs)
        updates = self._take_updates()
        if updates and self.under_way.in_grace:
            # it may have been spared for the sake of what nobody wants any more
            self.under_way.look_at_grace()
        self.sent_at = time.monotonic()
        self.link.send(updates + messages, payload.parts)

    def _take_updates(self) -> list[Message]:
        """As messages; what is taken counts as told."""
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
        if self.forgotten_functions or self.forgotten_codes:
            forgotten = drained(self.forgotten_functions)
            functions = [number for number, _ in forgotten]
            self.writer.forget(functions)
            updates.append(
                Forget(
                    functions, drained(self.forgotten_codes), sum(nbytes for _, nbytes in forgotten)
                )
            )
        return updates

    def note_consumed(self) -> None:
        """What other threads have said of eager backwards: their graphs can go."""
        if self.consumed:
            calls = drained(self.consumed)
            self.graphs.note_consumed(calls)
            self._to_release += calls

    # --- its end

    def note_end(self) -> None:
        """It is gone; graphs may refer to it for long."""
        self.lent_slots.end()
        self.under_way.end()
        if self.crash_traceback is not None:
            if self.crash_traceback.is_ours:
                self.stack = shown_stack(read_crash_traceback(self.crash_traceback.number))
            self.crash_traceback = None
        elif self.link.crash_traceback:
            self.stack = shown_stack(self.link.crash_traceback)


# --- chunks under way


# seconds after which another process has seen what we wrote, and we what it wrote before: ample,
# for two CPUs
SEEN = 1e-3
# seconds: most calls that are interrupted end by themselves, and the worker's graphs need not be
# made again
GRACE_PERIOD = 0.2


# long because: a line for each thing that may be asked of what a worker has
class SentChunks:
    """Chunks by number, in the order sent, which is that of the answers. Assumes: called by the
    scheduling thread."""

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self.progress_record: memoryview | None = None  # of int64, see `ProgressRecord`
        self.link: WorkerLink | None = None  # to who reads and writes there for us, where we cannot
        self.seconds = 0.0  # in which there was something under way, up to the last answer
        self.since = 0.0  # when the first chunk became the first, on the clock of time.monotonic
        self._skipped: dict[int, float] = {}  # chunks, and since when, on the same clock
        self.in_grace: set[int] = set()  # chunks of which a part was cancelled with grace
        # when the worker is killed, should it be at such a part then, on the same clock
        self.grace_ends = math.inf

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
        if self.in_grace:
            self.grace_ends = math.inf
            self.look_at_grace()
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
        self.progress_record = None

    # --- where it is

    @property
    def first(self) -> Chunk | None:
        return next(iter(self.chunks.values()), None)

    def is_at(self, operation: Operation) -> bool:
        first = self.first
        return first is not None and first.operation is operation

    def begun(self) -> tuple[int, float]:
        """The position of the call that the worker is at, in the first chunk, and since when; -1
        where it is at none."""
        chunk = next(iter(self.chunks), None)
        progress_record = self.progress_record
        if progress_record is None or progress_record[ProgressRecord.CHUNK] != chunk:
            return -1, self.since
        in_order()
        return progress_record[ProgressRecord.POSITION], max(
            self.since, progress_record[ProgressRecord.STARTED] / 1e9
        )

    def is_at_call(self, call: tuple[int, int] | None) -> bool:
        """Whether it is at this position of this chunk, -1: anywhere in it."""
        return (
            call is not None
            and call[0] == next(iter(self.chunks), None)
            and call[1] in (-1, self.begun()[0])
        )

    @property
    def offset(self) -> int:
        """Of the item that it is at, in a bundle."""
        return 0 if self.progress_record is None else self.progress_record[ProgressRecord.OFFSET]

    @property
    def is_at_wanted(self) -> bool:
        chunk, position = self.first, max(self.begun()[0], 0)
        # there are none where all were taken back
        return chunk is not None and any(chunk.wanted()[position : position + 1])

    # --- what it is to skip

    def cancel(self, operation: Operation) -> None:
        """Have the worker skip what it has not begun of chunks that nobody waits for."""
        for number, chunk in self.chunks.items():
            if chunk.operation is operation and all(
                call.index >= operation.limit for _, call in chunk.calls
            ):
                self._skip(number)

    def _skip(self, number: int) -> bool:
        """Whether that is news. In a place that no other chunk under way has: that one, too, must
        stay skipped.

        There is one for each that a process is sent at a time; in the caller's own there may be
        more of them.
        """
        progress_record = self.progress_record
        if progress_record is None:
            return False
        places = range(ProgressRecord.SKIPPED, ProgressRecord.COUNT)
        free = [place for place in places if progress_record[place] not in self.chunks]
        if not free or any(progress_record[place] == number for place in places):
            return False
        progress_record[free[0]] = number
        self._skipped[number] = time.monotonic()
        if self.link is not None:
            self.link.skip(free[0], number)
        return True

    def skip_unbegun(self) -> bool:
        """Have it skip what it has not begun, for others; whether there is something that it has
        yet to see."""
        are_news = [self._skip(number) for number in self._for_others()]
        return any(are_news)

    def unbegun(self) -> list[tuple[int, int]]:
        """Chunks, and how many calls at their end it has not begun and can be told not to begin.

        It notes each call, then looks whether the chunk is skipped. What it noted some time after
        that was written is all that it will run. Before that it may have looked at one more, of
        which we do not read yet, but not at two.
        """
        progress_record = self.progress_record
        if progress_record is None:
            return []
        if self.link is not None:
            return self._skipped_by_agent(self.link)
        for_others = self._for_others()
        now = time.monotonic()
        at = progress_record[ProgressRecord.CHUNK]
        in_order()
        position = progress_record[ProgressRecord.POSITION]
        in_order()
        # it goes on in this moment
        if at == ProgressRecord.BETWEEN or at != progress_record[ProgressRecord.CHUNK]:
            return []
        found = []
        # those before it are, though their answers may still be on their way
        is_answered = at in self.chunks
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

    def _skipped_by_agent(self, link: WorkerLink) -> list[tuple[int, int]]:
        """Whole chunks behind the first. A worker answers a chunk before it looks whether the next
        one is skipped."""
        if link.has_more():  # it may have answered its first chunk
            return []
        skipped = link.skipped.values()
        return [
            (number, len(chunk.calls))
            for number, chunk in self._for_others().items()
            if number in skipped
        ]

    def take_back(self) -> list[tuple[Operation, list[PackedCall]]]:
        """Take back what `unbegun` counts; and more, when this is asked again after `SEEN` seconds,
        or an agent has told."""
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
        if self.progress_record is None or not (
            len(self.chunks) > 1 or any(len(chunk.calls) > 1 for chunk in self.chunks.values())
        ):
            return False
        first, position = next(iter(self.chunks), None), self.begun()[0]
        return any(
            len(chunk.calls) > (position + 1 if number == first else 0)
            for number, chunk in self._for_others().items()
        )

    def _for_others(self) -> dict[int, Chunk]:
        """Chunks of which others may have what was not begun; what stays together, or is behind a
        agent, only as a whole."""
        found = {}
        for place, (number, chunk) in enumerate(self.chunks.items()):
            is_divisible = self.link is None and not stays_together(chunk)
            if chunk.operation is not None and (place > 0 or is_divisible):
                found[number] = chunk
        return found

    # --- what is cancelled with grace

    def cancel_with_grace(self, operation: Operation | None) -> None:
        """All of its chunks; None: of all operations."""
        wanted = [number for number, chunk in self.chunks.items() if chunk.operation is not None]
        self._put_in_grace(
            [
                each
                for each in wanted
                if operation is None or self.chunks[each].operation is operation
            ]
        )

    def cancel_backward(self, graph_task: int, error: BaseException) -> None:
        """The parts of the backward with this number; who waits for them gets the error."""
        numbers = []
        for number, chunk in self.chunks.items():
            parts = [
                each
                for each in (*chunk.backwards, chunk.request)
                if each is not None and each.graph_task == graph_task
            ]
            for each in parts:
                each.settle(error_maker(error))
            if parts:
                numbers.append(number)
        self._put_in_grace(numbers)

    def _put_in_grace(self, numbers: Sequence[int]) -> None:
        """Chunks that are not wanted any more, or not as a whole: have what has not begun skipped,
        and end the rest soon."""
        for number in numbers:
            self.in_grace.add(number)
            if not any(self.chunks[number].wanted()):
                self._skip(number)
        self.look_at_grace()

    def look_at_grace(self) -> None:
        """What the worker is at was cancelled with grace, or answered; or what others wanted of it
        they want no more."""
        self.in_grace.intersection_update(self.chunks)
        if next(iter(self.chunks), None) not in self.in_grace:
            self.grace_ends = math.inf
        elif self.grace_ends == math.inf:
            self.give_grace()

    def give_grace(self) -> None:
        """From now on the worker has a grace period for what it is at."""
        self.grace_ends = time.monotonic() + GRACE_PERIOD
        if self.link is not None:
            self.link.follow(2 * GRACE_PERIOD)


def stays_together(chunk: Chunk) -> bool:
    return chunk.operation is not None and chunk.operation.options.chunksize is not None


# --- what every worker starts with


class Settings(NamedTuple):
    """What a scheduler is made with; some of it is told to each worker (`Start`)."""

    workers: int
    initializer: bytes  # pickle of (function or None, arguments)
    threads: int | None  # intra-op; None: nobody has said how many
    calls: int | None  # after which a worker is replaced
    retries: int  # of a call whose worker died; 0: what is lost is lost
    graph_bytes: int | None  # of graphs in each worker; beyond, they are dropped and made again
    spares_memory: bool  # graphs are dropped, too, where memory is about to end
    devices: tuple[int, ...] | None = None  # the code of each worker's device
    in_process: bool = False  # workers are threads of this process: they cannot be killed
    remote: bool = False  # workers may be on other machines
    # the caller's environment when the pool began, where workers follow it
    since: EnvironmentChanges | None = None
    in_caller: bool = False  # calls run in the thread that waits for them

    @property
    def recoverable(self) -> bool:
        """Whether calls are kept as long as their graphs, to be run again."""
        return self.retries > 0 or self.graph_bytes is not None


def worker_devices(
    devices: Device | Sequence[Device] | None, processes: int | None, engine: str, context: object
) -> tuple[int, ...] | None:
    """The code of each worker's device (see `accelerator.device_code`), for `Pool(devices=...)`;
    None where that is None.

    Raises:
        ValueError, TypeError: a device that does not exist, or that this engine or number of
            processes does not go with.
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
