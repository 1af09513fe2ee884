"""The agent: a process on a node of a cluster, between the caller and the workers that the agent
starts there. It runs on the node, and needs no torch. This module also holds what both ends of an
agent share: how records become bytes, and how they are put into order.

    caller ═══ exchange(number, records) ═══► NodeAgent ── Pipe (Unix socket) ──► worker
           ◄═══ (number, records) ═══════════  │   ◄─ frames ─
                                               └─ slabs: the caller's, replicated here, shared with
                                                         all workers of the agent

The agent passes frames on unchanged. A replica has the same number as the caller's slab, and the
same offsets, so addresses in frames stay valid. The bytes of tensors that a worker lends to the
caller are sent inside its frames.

    caller ► agent: ("start", worker) ("slab", number, nbytes) ("write", address, bytes)
                   ("forget", slab)
                   ("frame", worker, frame, slabs that it introduces) ("skip", worker, place, chunk)
                   ("limit", worker, chunk, seconds for each of its calls; None: it is answered)
                   ("follow", worker, seconds for which the agent follows the worker)
                   ("kill", worker, signal) ("end", worker) ("watch", worker, pid) ("close",)
    agent ► caller: ("hello", Hello) ("frame", worker, header, body)
                   ("gone", worker, exit code, crash traceback)
                   ("at", worker, its `ProgressRecord`)
                   ("skipped", worker, place, chunk): the agent has noted the chunk, and has passed
                        on everything that the worker had answered by then
                   ("overrun", worker, chunk, position)
                   ("refused", worker, why) ("resident", {worker: bytes of its process}) ("closed",)

The agent sends "at" only if the record has changed. It checks before it sends "overrun" or "gone",
and once a second. While it follows a worker, it checks every 20 ms. The caller asks the agent to
follow a worker after an interrupt.

The agent answers an exchange as soon as it has records to send, or after `PATIENCE`. The caller
keeps several exchanges waiting here at a time. The transport may deliver exchanges in any order,
late, or twice. So both ends number what they send, and `RecordReceiver` restores the order and
drops duplicates. Memory follows the pickle of the records as raw bytes. It is copied once, when it
is packed, and is not copied when it is unpacked.

    number of buffers | size of each, and of the pickle | pickle | buffers

`AgentWorker` is the agent's view of a worker. It holds the pipe, the shared memory that the worker
has announced, and what the agent last reported about the worker.

Guarantees: an agent that gets nothing from the caller for `patience` seconds ends, with its
    workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.metadata
import math
import mmap
import os
import pickle
import platform
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpgrad.engines.launch import Launcher, exit_gap, launched, process_launcher
from mpgrad.memory import OFFSET_MASK, slab_of
from mpgrad.system import PORTABLE, anonymous_memory, free_memory, reserve_memory, resident_bytes
from mpgrad.wire.agent_messages import (
    CrashTraceback,
    LackingMemory,
    ProgressRecord,
    ProgressRecordLocation,
    in_order,
)
from mpgrad.wire.pipe import Pipe, RawFrame, framed, read_crash_traceback

__all__ = [
    "AgentWorker",
    "Hello",
    "NodeAgent",
    "Pieces",
    "Record",
    "RecordReceiver",
    "hello",
    "packed",
    "unpacked",
]

PATIENCE = 0.5  # seconds until an exchange is answered without records
MOST_WAITING = 4  # exchanges
GATHERING = 2e-3  # seconds between two answers, while there are more records
EXIT_PATIENCE = 2.0  # seconds for the exit code of a worker
RESIDENT_EVERY = 1.0  # seconds
FOLLOWING_EVERY = 0.02  # seconds
# seconds within which more bytes of a frame must arrive; otherwise its worker counts as still
# running the call
AMID_FRAME = 1.0


class Hello(NamedTuple):
    """One end's host and versions; the versions must be the same at both ends."""

    host: str
    versions: dict[str, str]  # Python's (its first two numbers), torch's and mpgrad's


def hello() -> Hello:
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "mpgrad"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return Hello(socket.gethostname(), versions)


# --- records as bytes


Record = tuple[Any, ...]
COUNT = struct.Struct("<Q")


def packed(records: Sequence[Record]) -> bytes:
    """Return the records as bytes, which are empty if there are no records.

    A `PickleBuffer` in the records becomes a memoryview at the other end.
    """
    if not records:
        return b""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(records, protocol=5, buffer_callback=buffers.append)
    pieces: list[bytes | memoryview] = [pickled, *(buffer.raw() for buffer in buffers)]
    head = struct.pack(f"<{1 + len(pieces)}Q", len(pieces), *map(len, pieces))
    return b"".join((head, *pieces))


def unpacked(content: bytes) -> Sequence[Record]:
    if not content:
        return ()
    view = memoryview(content)
    (count,) = COUNT.unpack_from(view)
    start = COUNT.size * (1 + count)
    pieces: list[memoryview] = []
    for size in struct.unpack_from(f"<{count}Q", view, COUNT.size):
        pieces.append(view[start : start + size])
        start += size
    records: Sequence[Record] = pickle.loads(pieces[0], buffers=pieces[1:])
    return records


# --- numbered pieces in their order


class RecordReceiver:
    """The pieces that one end receives, in their order. A piece waits for missing earlier ones.

    `silent_for` and `missing_for` are in seconds. The end uses them to decide when to give up.
    """

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._coming: set[int] = set()
        # on the clock of time.monotonic: when the missing piece became the next, or the first later
        # piece came
        self._since = 0.0
        self._heard_at = time.monotonic()

    def expect(self, number: int) -> None:
        """Note that this piece is on its way, and may take long."""
        self._heard_at = time.monotonic()
        self._coming.add(number)

    def records(self, number: int, piece: bytes) -> Iterator[Record]:
        """Return the records that are now in turn, after a piece has arrived.

        A piece whose number has arrived before is ignored.
        """
        self._heard_at = time.monotonic()
        if number > self._next and not self._early:
            self._since = time.monotonic()
        if number >= self._next:
            self._early.setdefault(number, piece)
        while self._next in self._early:
            self._coming.discard(self._next)
            self._next += 1
            if len(self._early) > 1:
                self._since = time.monotonic()
            yield from unpacked(self._early.pop(self._next - 1))

    @property
    def silent_for(self) -> float:
        return time.monotonic() - self._heard_at

    @property
    def missing_for(self) -> float:
        """Seconds for which later pieces have waited for the next one, unless it is expected."""
        return (
            time.monotonic() - self._since
            if self._early and self._next not in self._coming
            else 0.0
        )


# --- on the node


class SlabReplica:
    """The replica of one of the caller's slabs, with the same number. Its memory is created at the
    first write."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: mmap.mmap | None = None
        self.descriptor = -1  # -1 until the memory is created
        # workers, and the frames that will introduce this slab to them
        self.awaited: list[tuple[int, memoryview]] = []

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copy the content to an offset of the slab.

        Raises:
            OSError: the system has no memory or no descriptor left for it now.
        """
        if self._memory is None:
            self._memory = self._make()
        self._reserve(offset, len(content))
        self._memory[offset : offset + len(content)] = content

    def _make(self) -> mmap.mmap:
        descriptor = anonymous_memory()
        try:
            os.ftruncate(descriptor, self._nbytes)
            memory = mmap.mmap(descriptor, self._nbytes)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        return memory

    def _reserve(self, offset: int, nbytes: int) -> None:
        """Reserve memory first, so that a lack is an error, not a SIGBUS in the middle of a
        copy."""
        if not PORTABLE and os.lseek(self.descriptor, offset, os.SEEK_HOLE) >= offset + nbytes:
            return  # it has been written before
        if nbytes > free_memory():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        reserve_memory(self.descriptor, offset, nbytes)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            os.close(self.descriptor)


class NodeAgent:
    """The agent's main object. One event loop uses it."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._launcher: Launcher = process_launcher(None)
        self._workers: dict[int, AgentWorker] = {}
        self._slabs: dict[int, SlabReplica] = {}
        self._lacking: Pieces = []  # what the caller lent and the agent could not write
        self.arriving = RecordReceiver()
        self._next_number = 0
        self._updates: list[Record] = [("hello", hello())]
        self._burials: set[asyncio.Task[None]] = set()
        self._is_closing = False  # the caller waits until no worker is left
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._answered_at = 0.0
        self._gathering = False  # an answer is scheduled
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(end_at_once)
        if self._launcher.tracker is not None:
            self._loop.add_reader(self._launcher.tracker.fileno(), self._launcher.tracker.answer)
        self._loop.call_later(self._patience, self._look_whether_alone)
        self._loop.call_later(RESIDENT_EVERY, self._tell_resident)

    async def exchange(self, number: int, content: bytes) -> tuple[int, bytes]:
        """Obey the caller's records, and return new records with a number of their own."""
        for record in self.arriving.records(number, content):
            self._obey(*record)
        if not self._updates:
            updates: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(updates)
            if len(self._waiting) > MOST_WAITING:
                self._answer()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(updates, min(PATIENCE, self._patience / 4))
        said, self._updates = self._updates, []
        self._next_number += 1
        return self._next_number - 1, packed(said)

    def close(self) -> None:
        if self._launcher.tracker is not None:
            self._loop.remove_reader(self._launcher.tracker.fileno())
        self._launcher.close()

    # --- from the caller

    def _obey(self, kind: str, *rest: Any) -> None:
        match kind:
            case "start":
                self._start(*rest)
            case "slab":
                number, nbytes = rest
                self._slabs[number] = SlabReplica(nbytes)
            case "write":
                self._write_replica(*rest)
            case "forget":
                self._slabs.pop(rest[0]).close()
                self._lacking = [piece for piece in self._lacking if slab_of(piece[0]) != rest[0]]
            case "close":
                self._is_closing = True
                if not self._burials:
                    self._say("closed")
            case _ if (worker := self._workers.get(rest[0])) is not None:
                self._obey_for(worker, kind, *rest[1:])

    def _obey_for(self, worker: AgentWorker, kind: str, *rest: Any) -> None:
        match kind:
            case "frame":
                self._pass_on(worker, *rest)
            case "skip" if worker.progress_record is not None:
                place, chunk = rest
                worker.progress_record[place] = chunk
                self._read(worker)  # what it answered before it could see the skip
                self._say("skipped", worker.number, place, chunk)
            case "limit":
                self._set_limit(worker, *rest)
            case "follow":
                is_followed = worker.followed_until
                worker.followed_until = time.monotonic() + rest[0]
                if not is_followed:
                    self._follow(worker)
            case "kill":
                self._launcher.kill(worker.number, *rest)
            case "watch":
                (worker.pid,) = rest
                self._say("resident", {worker.number: resident_bytes(worker.pid)})
            case "end":
                self._bury(worker)

    def _write_replica(self, address: int, content: memoryview) -> None:
        """Write to a replica. If that fails, only the calls that need this memory lack it."""
        slab = self._slabs[slab_of(address)]
        lacking = [piece for piece in self._lacking if piece[0] != address]
        try:
            slab.write(address & OFFSET_MASK, content)
        except OSError as error:
            lacking.append((address, len(content), no_room(len(content), error)))
        self._lacking = lacking
        if slab.descriptor >= 0 and slab.awaited:
            awaited, slab.awaited = slab.awaited, []
            for number, frame in awaited:
                self._obey("frame", number, frame, [slab_of(address)])

    def _start(self, number: int) -> None:
        try:
            worker = AgentWorker(number, launched(self._launcher, number))
        except OSError as error:
            self._say("refused", number, str(error))
            return
        self._workers[number] = worker
        self._loop.add_reader(worker.fileno(), self._read, worker)

    def _pass_on(self, worker: AgentWorker, frame: memoryview, slabs: list[int]) -> None:
        new = [self._slabs[each] for each in slabs]
        for slab in new:
            if slab.descriptor < 0:
                # This frame only introduces the slab. The slab's content counts as lacking until
                # its memory exists.
                slab.awaited.append((worker.number, frame))
                return
        try:
            if worker.has_started and worker.lacking != self._lacking:
                worker.lacking = self._lacking
                worker.send_raw(framed([LackingMemory(self._lacking)], ()))
            worker.has_started = True
            worker.send_raw(frame, [slab.descriptor for slab in new])
        except ConnectionError:
            return  # the end of its pipe is read next, and reports it
        except OSError:  # the worker got only a part of the frame
            self._launcher.kill(worker.number)
            return
        if worker.has_outgoing:
            self._loop.add_writer(worker.fileno(), self._write, worker)

    # --- from workers

    def _read(self, worker: AgentWorker) -> None:
        try:
            while (frame := worker.receive_raw()) is not None:
                worker.heard_at, worker.overrun, worker.bytes_seen = time.monotonic(), None, 0
                # frames with descriptors are for the agent: descriptors cannot leave this machine
                if frame.header[2]:
                    worker.hear(frame)
                    continue
                self._say("frame", worker.number, frame.header, pickle.PickleBuffer(frame.body))
        except EOFError:
            self._bury(worker)
            return
        if worker.limits:
            self._keep_time(worker)

    def _set_limit(self, worker: AgentWorker, chunk: int, seconds: float | None) -> None:
        worker.heard_at = time.monotonic()
        if seconds is None:
            worker.limits.pop(chunk, None)
        else:
            worker.limits[chunk] = seconds
        self._read(worker)  # it may have answered just now

    def _keep_time(self, worker: AgentWorker) -> None:
        """Report the call of the worker that takes too long, by the clock of this machine.
        Otherwise look again when a call will have taken too long."""
        if worker.alarm is not None:
            worker.alarm.cancel()
        chunk, position, moment = worker.next_overrun()
        # there is nothing to watch, or it has been reported
        if moment == math.inf or worker.overrun == (chunk, position):
            return
        left, comes = moment - time.monotonic(), worker.bytes_waiting != worker.bytes_seen
        if left > 0 or comes:  # the arriving frame may be the answer
            worker.bytes_seen = worker.bytes_waiting
            pause = left if left > 0 else AMID_FRAME
            worker.alarm = self._loop.call_later(pause, self._read, worker)
        else:
            worker.overrun = chunk, position
            self._tell_where(worker)
            self._say("overrun", worker.number, chunk, position)

    def _tell_where(self, worker: AgentWorker) -> None:
        """Report the worker's position, before anything is reported about its current call."""
        if (found := worker.where()) and found != worker.told:
            worker.told = found
            self._say("at", worker.number, found)

    def _follow(self, worker: AgentWorker) -> None:
        """Report each change of the worker's position, for a while."""
        if self._workers.get(worker.number) is not worker:  # it was removed
            return
        self._tell_where(worker)
        if time.monotonic() < worker.followed_until:
            self._loop.call_later(FOLLOWING_EVERY, self._follow, worker)
        else:
            worker.followed_until = 0.0

    def _write(self, worker: AgentWorker) -> None:
        try:
            worker.flush()
        except ConnectionError:
            self._loop.remove_writer(worker.fileno())
            return  # the end of its pipe is read next
        if not worker.has_outgoing:
            self._loop.remove_writer(worker.fileno())

    def _bury(self, worker: AgentWorker) -> None:
        """Remove a worker that has ended or is to end. A task waits for its exit, so that other
        workers need not wait."""
        del self._workers[worker.number]
        self._tell_where(worker)
        worker.followed_until = 0.0
        if worker.alarm is not None:
            worker.alarm.cancel()
        self._loop.remove_reader(worker.fileno())
        self._loop.remove_writer(worker.fileno())
        worker.close()
        burial = self._loop.create_task(self._see_end(worker))
        self._burials.add(burial)
        burial.add_done_callback(self._buried)

    async def _see_end(self, worker: AgentWorker) -> None:
        """Report how the worker has ended. A worker that does not end in time is killed, and its
        exit code is reported as None."""
        since, is_said = time.monotonic(), False
        while (found := self._launcher.exited(worker.number)) is None:
            if time.monotonic() - since > EXIT_PATIENCE and not is_said:
                self._launcher.kill(worker.number)
                self._say("gone", worker.number, None, worker.take_crash_traceback())
                is_said = True
            await asyncio.sleep(exit_gap(since))
        if found.refusal is not None:
            self._say("refused", worker.number, str(found.refusal))
        elif not is_said:
            self._say("gone", worker.number, found.code, worker.take_crash_traceback())

    def _buried(self, burial: asyncio.Task[None]) -> None:
        self._burials.discard(burial)
        burial.result()  # an error goes to the loop's handler, which ends the agent
        if self._is_closing and not self._burials:
            self._say("closed")

    # --- to the caller

    def _say(self, *record: Any) -> None:
        self._updates.append(record)
        since = time.monotonic() - self._answered_at
        if since >= GATHERING:
            self._answer()
        elif not self._gathering:
            # More records will follow soon, and an answer costs both sides as much as a small call.
            self._gathering = True
            self._loop.call_later(GATHERING - since, self._answer)

    def _answer(self) -> None:
        self._gathering, self._answered_at = False, time.monotonic()
        while self._waiting:
            updates = self._waiting.popleft()
            if not updates.done():
                updates.set_result(None)
                return

    def _tell_resident(self) -> None:
        if found := {
            number: resident_bytes(each.pid) for number, each in self._workers.items() if each.pid
        }:
            # not urgent: these go with the next answer
            self._updates.append(("resident", found))
        # If this agent is lost, no other process knows where its workers were.
        for worker in self._workers.values():
            self._tell_where(worker)
        self._loop.call_later(RESIDENT_EVERY, self._tell_resident)

    def _look_whether_alone(self) -> None:
        silence = max(self.arriving.silent_for, self.arriving.missing_for)
        if silence >= self._patience:
            os._exit(1)  # the fork server dies with this process, and the workers with it
        self._loop.call_later(self._patience - silence, self._look_whether_alone)


def no_room(nbytes: int, error: OSError) -> str:
    remedy = "drop results that are no longer needed, or cut the item into smaller ones"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit of open files there (ulimit -n, before `ray start`)"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit of the size of files there (ulimit -f, before `ray start`)"
    where, why = socket.gethostname(), error.strerror or str(error)
    return (
        f"no room in shared memory on node {where} for a tensor ({nbytes:,} bytes requested; "
        f"{why}); {remedy}"
    )


def end_at_once(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the agent after an unexpected error. The caller notices that it is lost, and runs its
    work elsewhere."""
    loop.default_exception_handler(context)
    os._exit(1)


# --- a worker, as its agent sees it


Pieces = list[tuple[int, int, str]]  # see `LackingMemory`


class AgentWorker(Pipe):
    """The agent's end of the pipe of a worker."""

    def __init__(self, number: int, end: socket.socket) -> None:
        super().__init__(end, blocking=False)
        self.number = number
        self.pid = 0  # 0 until the caller has sent it
        self.progress_record: memoryview | None = None  # int64 numbers, once announced
        self._crash_traceback: int | None = None  # a pipe's descriptor
        self.has_started = False  # its first frame, the `Start`, was sent
        self.lacking: Pieces = []  # what the worker was last told
        # seconds for each call of a chunk that is not answered, by chunk, in the order of sending
        self.limits: dict[int, float] = {}
        # on the clock of time.monotonic: the worker's last frame, or the last change of the limits
        self.heard_at = 0.0
        # chunk and position of the call that was reported as taking too long
        self.overrun: tuple[int, int] | None = None
        self.alarm: asyncio.TimerHandle | None = None
        self.bytes_seen = 0  # bytes of an arriving frame, when the alarm was set
        self.followed_until = 0.0  # on the clock of time.monotonic
        self.told: list[int] = []  # the last reported progress record

    def hear(self, frame: RawFrame) -> None:
        """Take the descriptors that the worker sends to the agent."""
        for message in pickle.loads(frame.body):
            descriptor = self.take_descriptor()
            if descriptor is None:  # this process had no free descriptor to receive it
                continue
            if isinstance(message, CrashTraceback):
                self._crash_traceback = descriptor
            elif isinstance(message, ProgressRecordLocation):
                # without memory for the mapping, the worker runs chunks that it should skip
                with contextlib.suppress(OSError):
                    memory = memoryview(mmap.mmap(descriptor, 0))
                    self.progress_record = memory[
                        message.offset : message.offset + message.nbytes
                    ].cast("q")
                os.close(descriptor)

    def where(self) -> list[int]:
        """Return the worker's progress record. The list is empty while the worker moves on to
        another call, or if the record is not mapped here."""
        if (numbers := self.progress_record) is None:
            return []
        at = numbers[ProgressRecord.CHUNK]
        in_order()
        found = list(numbers[: ProgressRecord.SKIPPED])
        in_order()
        return found if at == found[ProgressRecord.CHUNK] == numbers[ProgressRecord.CHUNK] else []

    def next_overrun(self) -> tuple[int, int, float]:
        """Return the first chunk with a limit, the position of its running call, and the moment
        when that call has taken too long.

        The position is -1 if the worker has not begun that chunk. Only the caller, which has sent
        it, knows whether the worker has other work.
        """
        at, position, started = ProgressRecord.BETWEEN, -1, 0.0
        if found := self.where():
            at, position = found[ProgressRecord.CHUNK], found[ProgressRecord.POSITION]
            is_loading = found[ProgressRecord.STARTED] == ProgressRecord.LOADING
            started = time.monotonic() if is_loading else found[ProgressRecord.STARTED] / 1e9
        for chunk in [chunk for chunk in self.limits if chunk < at]:
            del self.limits[chunk]
        chunk, seconds = next(iter(self.limits.items()), (-1, math.inf))
        return (
            (chunk, position, started + seconds)
            if chunk == at
            else (chunk, -1, max(self.heard_at, started) + seconds)
        )

    def take_crash_traceback(self) -> str:
        """Return the Python stack that a dead worker has written, or "" if it has written none."""
        return "" if self._crash_traceback is None else read_crash_traceback(self._crash_traceback)
