"""An agent: on a node of a cluster, between the caller and the workers that it starts there. Runs
on the node; needs no torch. And what both ends of an agent share: records as bytes, and their
order.

    caller ═══ exchange(number, records) ═══► NodeAgent ── Pipe (Unix socket) ──► worker
           ◄═══ (number, records) ═══════════  │   ◄─ frames ─
                                               └─ slabs: the caller's, replicated here, shared with
                                                         all workers of the agent
Frames are passed on as they are. A slab has the caller's number, and each piece of it lies at the
caller's offset, so addresses in frames stay valid. What a worker lends the caller travels inside
its frames.

    caller ► agent: ("start", worker) ("slab", number, nbytes) ("write", address, bytes)
                   ("forget", slab)
                   ("frame", worker, frame, slabs that it introduces) ("skip", worker, place, chunk)
                   ("limit", worker, chunk, seconds for each of its calls; None: it is answered)
                   ("follow", worker, seconds for which it is said where it is)
                   ("kill", worker, signal) ("end", worker) ("watch", worker, pid) ("close",)
    agent ► caller: ("hello", Hello) ("frame", worker, header, body)
                   ("gone", worker, exit code, crash traceback)
                   ("at", worker, its `ProgressRecord`): before "overrun" and "gone", when followed,
                        each second
                   ("skipped", worker, place, chunk): written, and all that it had answered by then
                        has been passed on
                   ("overrun", worker, chunk, position)
                   ("refused", worker, why) ("resident", {worker: bytes of its process}) ("closed",)
An exchange is answered as soon as there is something to say, or after `PATIENCE`; the caller has
some of them here at a time. What carries them may do so in any order, late, or twice. So both ends
number what they say, and `RecordReceiver` puts it into its order, each piece once. Memory stands
behind the pickle of the records, as it is: it is copied once when it is packed, from where it lies,
and not when it is unpacked.

    number of buffers | size of each, and of the pickle | pickle | buffers
An `AgentWorker` is a worker as its agent sees it: its pipe, what it has shown of itself, and what
the agent has to say of it.

Guarantees: who hears nothing from the caller for `patience` seconds ends, and its workers with it.
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

PATIENCE = 0.5  # seconds until an exchange is answered without anything to say
MOST_WAITING = 4  # exchanges
GATHERING = 2e-3  # seconds between two answers, while there is more to say
EXIT_PATIENCE = 2.0  # seconds for the exit code of a worker
RESIDENT_EVERY = 1.0  # seconds
FOLLOWING_EVERY = 0.02  # seconds
# seconds in which more of a frame has to come that is on its way, or its worker is at a call for
# too long
AMID_FRAME = 1.0


class Hello(NamedTuple):
    """Who is there: what has to be the same at both ends."""

    host: str
    versions: dict[str, str]  # of Python, torch and mpgrad, the first two numbers of Python


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
    """What is a `PickleBuffer` in them is a memoryview at the other end. No bytes say nothing."""
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
    """What one end hears. It waits for what is missing.

    `missing_for` and `silent_for` say for how long already, since whoever asks gives up some time.
    """

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._coming: set[int] = set()
        # on the clock of time.monotonic: when the next became the next, or the first came early
        self._since = 0.0
        self._heard_at = time.monotonic()

    def expect(self, number: int) -> None:
        """That piece is on its way, and may take long."""
        self._heard_at = time.monotonic()
        self._coming.add(number)

    def records(self, number: int, piece: bytes) -> Iterator[Record]:
        """A piece has come: the records of those that are now in turn.

        A number that has come before says nothing new.
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
        """Seconds for which others have been there before the next, of which nobody knows."""
        return (
            time.monotonic() - self._since
            if self._early and self._next not in self._coming
            else 0.0
        )


# --- on the node


class SlabReplica:
    """Shared memory with the number of one of the caller's slabs, made and taken from the system
    when it is first written."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: mmap.mmap | None = None
        self.descriptor = -1  # there is none yet
        # workers, and the frames that are to introduce it to them
        self.awaited: list[tuple[int, memoryview]] = []

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """
        Raises:
            OSError: the system has no memory, or no descriptor, for that now.
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
        """A lack is an error here, not a SIGBUS in the middle of a copy."""
        if not PORTABLE and os.lseek(self.descriptor, offset, os.SEEK_HOLE) >= offset + nbytes:
            return  # has been written before
        if nbytes > free_memory():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        reserve_memory(self.descriptor, offset, nbytes)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            os.close(self.descriptor)


class NodeAgent:
    """Used by one event loop."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._launcher: Launcher = process_launcher(None)
        self._workers: dict[int, AgentWorker] = {}
        self._slabs: dict[int, SlabReplica] = {}
        self._lacking: Pieces = []  # what was lent by the caller, and could not be written here
        self.arriving = RecordReceiver()
        self._next_number = 0
        self._updates: list[Record] = [("hello", hello())]
        self._burials: set[asyncio.Task[None]] = set()
        self._is_closing = False  # nobody is to be left, and the caller waits for that
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._answered_at = 0.0
        self._gathering = False  # an answer will be given soon
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(end_at_once)
        if self._launcher.tracker is not None:
            self._loop.add_reader(self._launcher.tracker.fileno(), self._launcher.tracker.answer)
        self._loop.call_later(self._patience, self._look_whether_alone)
        self._loop.call_later(RESIDENT_EVERY, self._tell_resident)

    async def exchange(self, number: int, content: bytes) -> tuple[int, bytes]:
        """Obey, and say what is new, with a number of its own."""
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

    # --- what the caller says

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
                self._read(worker)  # what it answered before it could see that
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
        """What cannot be written is missing to the calls that need it, and to nobody else."""
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
                # alone in its frame; what lies there lacks until then
                slab.awaited.append((worker.number, frame))
                return
        try:
            if worker.has_started and worker.lacking != self._lacking:
                worker.lacking = self._lacking
                worker.send_raw(framed([LackingMemory(self._lacking)], ()))
            worker.has_started = True
            worker.send_raw(frame, [slab.descriptor for slab in new])
        except ConnectionError:
            return  # the end of its pipe is read next, and says so
        except OSError:  # what it was sent is not whole
            self._launcher.kill(worker.number)
            return
        if worker.has_outgoing:
            self._loop.add_writer(worker.fileno(), self._write, worker)

    # --- what workers say

    def _read(self, worker: AgentWorker) -> None:
        try:
            while (frame := worker.receive_raw()) is not None:
                worker.heard_at, worker.overrun, worker.bytes_seen = time.monotonic(), None, 0
                if frame.header[2]:  # with descriptors, which end at this machine's border
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
        self._read(worker)  # it may have answered in this moment

    def _keep_time(self, worker: AgentWorker) -> None:
        """Say which call of the worker takes too long, by the clock of this machine, or look again
        when it will have."""
        if worker.alarm is not None:
            worker.alarm.cancel()
        chunk, position, moment = worker.next_overrun()
        # there is nothing to watch, or it has been said
        if moment == math.inf or worker.overrun == (chunk, position):
            return
        left, comes = moment - time.monotonic(), worker.bytes_waiting != worker.bytes_seen
        if left > 0 or comes:  # what comes may be its answer
            worker.bytes_seen = worker.bytes_waiting
            pause = left if left > 0 else AMID_FRAME
            worker.alarm = self._loop.call_later(pause, self._read, worker)
        else:
            worker.overrun = chunk, position
            self._tell_where(worker)
            self._say("overrun", worker.number, chunk, position)

    def _tell_where(self, worker: AgentWorker) -> None:
        """Before anything is said of the call that it is at."""
        if (found := worker.where()) and found != worker.told:
            worker.told = found
            self._say("at", worker.number, found)

    def _follow(self, worker: AgentWorker) -> None:
        """Say where the worker is as soon as it goes on, for a while."""
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
        """It has ended, or is to end; who waits for that must not have the others wait."""
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
        """Say how it has ended; of one that has not after a while, and is killed, that nobody knows
        it."""
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
        burial.result()  # an error is the loop's, which ends the agent
        if self._is_closing and not self._burials:
            self._say("closed")

    # --- what is said

    def _say(self, *record: Any) -> None:
        self._updates.append(record)
        since = time.monotonic() - self._answered_at
        if since >= GATHERING:
            self._answer()
        elif not self._gathering:
            # more of it comes soon, and an answer costs both sides as much as a small call
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
            self._updates.append(("resident", found))  # which can wait for something to go with
        for worker in self._workers.values():  # should this agent be lost, nobody else could say
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
        f"no room in shared memory on node {where} for a tensor ({nbytes:,} bytes asked for; "
        f"{why}); {remedy}"
    )


def end_at_once(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An agent that has failed in the middle of something is better lost: the caller notices that,
    and has all done elsewhere."""
    loop.default_exception_handler(context)
    os._exit(1)


# --- a worker, as its agent sees it


Pieces = list[tuple[int, int, str]]  # see `LackingMemory`


class AgentWorker(Pipe):
    """The agent's end of the pipe of a worker."""

    def __init__(self, number: int, end: socket.socket) -> None:
        super().__init__(end, blocking=False)
        self.number = number
        self.pid = 0  # once the caller has heard it
        self.progress_record: memoryview | None = None  # of int64, once the worker has shown them
        self._crash_traceback: int | None = None  # a pipe
        self.has_started = False  # the first frame, which is its `Start`, was sent
        self.lacking: Pieces = []  # as it was told
        # seconds for each call of a chunk that is not answered, by chunk, in that order
        self.limits: dict[int, float] = {}
        self.heard_at = 0.0  # on the clock of time.monotonic; or when the limits last changed
        # chunk and position of a call that takes too long, once that was said
        self.overrun: tuple[int, int] | None = None
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
            if isinstance(message, CrashTraceback):
                self._crash_traceback = descriptor
            elif isinstance(message, ProgressRecordLocation):
                with contextlib.suppress(OSError):  # no memory: then it runs what nobody wants
                    memory = memoryview(mmap.mmap(descriptor, 0))
                    self.progress_record = memory[
                        message.offset : message.offset + message.nbytes
                    ].cast("q")
                os.close(descriptor)

    def where(self) -> list[int]:
        """What it has written of where it is; nothing where it goes on in this moment, or nobody
        could be shown it."""
        if (numbers := self.progress_record) is None:
            return []
        at = numbers[ProgressRecord.CHUNK]
        in_order()
        found = list(numbers[: ProgressRecord.SKIPPED])
        in_order()
        return found if at == found[ProgressRecord.CHUNK] == numbers[ProgressRecord.CHUNK] else []

    def next_overrun(self) -> tuple[int, int, float]:
        """The first chunk with a limit, the call that it is at, and when that will have taken too
        long.

        The position is -1 where it has not begun that chunk. Only who has sent it knows whether it
        has something else to do.
        """
        at, position, started = ProgressRecord.BETWEEN, -1, 0.0
        if found := self.where():
            at, position = found[ProgressRecord.CHUNK], found[ProgressRecord.POSITION]
            started = found[ProgressRecord.STARTED] / 1e9
        for chunk in [chunk for chunk in self.limits if chunk < at]:
            del self.limits[chunk]
        chunk, seconds = next(iter(self.limits.items()), (-1, math.inf))
        return (
            (chunk, position, started + seconds)
            if chunk == at
            else (chunk, -1, self.heard_at + seconds)
        )

    def take_crash_traceback(self) -> str:
        """Of who is dead."""
        return "" if self._crash_traceback is None else read_crash_traceback(self._crash_traceback)
