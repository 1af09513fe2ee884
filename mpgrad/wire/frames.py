"""Frames over a Unix socket pair: a list of messages, the bytes of small tensors, and file descriptors.

multiprocessing's Connection blocks in the middle of a message and sends descriptors through a named listening socket. Here
the parent's end never blocks: what does not fit into the pipe waits in `_outgoing`, so parent and worker cannot wait for
each other. The worker's end blocks, because a worker has nothing else to do.

    frame: 20 bytes header (sizes of pickle and payload, number of descriptors) | pickle | payload
    descriptors travel beside the header's first byte, as SCM_RIGHTS
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.system import PORTABLE
from mpgrad.wire.messages import Message, NewSlab
from mpgrad.wire.mirror import Mirror

__all__ = ["Channel", "Frame", "Traffic", "drained", "in_frames"]

HEADER = struct.Struct("<QQI")
MAX_DESCRIPTORS = 64  # in one frame; far below the kernel's 253
ANCILLARY_BYTES = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
CLOSE_ON_EXEC = 0 if PORTABLE else int(socket.MSG_CMSG_CLOEXEC)  # of what is received
TRUNCATED = int(socket.MSG_CTRUNC)  # as an enumeration it takes Python's code to look at a bit
# macOS has no room for descriptors while the pipe is nearly full, and calls that EMSGSIZE
NO_ROOM = (errno.EAGAIN, errno.EMSGSIZE)
READ_BYTES = 1 << 16  # what is larger is read straight into memory of its own
ALIGNMENT = 16  # of the payload, so that tensors in it are aligned


OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child() -> None:
    """A process that this one forks must not hold its pipes open: their end tells of its death."""
    for end in OPEN:
        end.close()


os.register_at_fork(after_in_child=close_in_child)


class Traffic:
    """What went through pipes, for those who want to know what an operation costs on any machine."""

    __slots__ = ("bytes_received", "bytes_sent", "frames_received", "frames_sent", "system_calls")

    def __init__(self) -> None:
        self.frames_sent = 0
        self.frames_received = 0
        self.bytes_sent = 0  # pickles and small tensors
        self.bytes_received = 0
        self.system_calls = 0


class Frame(NamedTuple):
    """What is sent, or received, at once."""

    messages: list[Message]
    payload: memoryview


class Channel:
    """One end of a socket pair, a `wire.link.Link`. `send` and `receive` belong to one thread each."""

    def __init__(
        self, end: socket.socket, blocking: bool, traffic: Traffic | None = None, mirror: Mirror | None = None
    ) -> None:
        """`mirror`: nothing but bytes passes between the two ends."""
        self._socket = end
        self._mirror = mirror
        self.shares_memory = mirror is None
        self._traffic = Traffic() if traffic is None else traffic
        end.setblocking(blocking)
        OPEN.add(end)
        self._blocking = blocking
        self._outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()  # the descriptors are our own duplicates
        self._received: deque[list[int] | None] = deque()  # descriptors of each frame that has any; None if they were lost
        self._descriptors: deque[int | None] = deque()  # of the frames that have been read, in the order of their messages
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._incoming = bytearray()
        self._is_dry = False  # nothing more was there at the last look
        self._body: bytearray | None = None  # of a frame whose header has come; filled up to _filled
        self._filled = 0
        self._header = (0, 0, 0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, messages: list[Message], payload: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one frame, or queue what the pipe does not take now (`has_outgoing`).

        Raises:
            ConnectionError: the other end is gone.
            OSError: what has to wait needs descriptors of its own, and there are none.
        """
        if self._mirror is not None:
            messages, payload = self._mirror.enclose(messages, payload)
        pickled = pickle.dumps(messages, protocol=5)
        padding = bytes(-len(pickled) % ALIGNMENT)
        size = sum(map(len, payload))
        header = HEADER.pack(len(pickled) + len(padding), size, len(descriptors))
        frame = b"".join((header, pickled, padding, *payload))
        self._traffic.frames_sent += 1
        self._traffic.bytes_sent += len(frame)
        data = memoryview(frame)
        self.flush()
        if not self._outgoing:
            sent = self._send_some(data, descriptors)
            data, descriptors = data[sent:], () if sent else descriptors
            while data and self._blocking:  # who is stopped and continued while it waits for room has sent a part
                if not sent:
                    self._wait_for_room()
                sent = self._send_some(data, descriptors)
                data, descriptors = data[sent:], () if sent else descriptors
        if data:
            # the receiver may get to it after the sender has closed its own: duplicates are kept until they are on their way
            self._outgoing.append((data, duplicates(descriptors)))

    def introduce(self, slabs: Sequence[Any]) -> None:
        for messages, descriptors in in_frames(slabs):
            self.send(messages, (), descriptors if self.shares_memory else ())

    def carry(self, holder: Slot | Borrowed) -> None:
        if self._mirror is not None:
            self._mirror.carry(holder)

    def drop(self, holder: Slot | Borrowed, times: int) -> None:
        if self._mirror is not None:
            self._mirror.drop(holder, times)

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def flush(self) -> None:
        """Send of what waits as much as the pipe takes. Raises OSError where the other end is gone."""
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            sent = self._send_some(data, descriptors)
            if not sent:
                return
            close_all(descriptors)
            if sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[sent:], ())

    def _send_some(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """The number of bytes that the pipe took; with the first of them it takes the descriptors."""
        self._traffic.system_calls += 1
        try:
            if descriptors:
                return self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
            return self._socket.send(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return 0

    def _wait_for_room(self) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        room.poll()

    def receive(self) -> Frame | None:
        """The next frame; None where the parent's end has no whole frame yet, and should wait until there is more to read.

        Raises:
            EOFError: the other end is gone.
        """
        while True:
            frame = self._next_frame()
            if frame is not None:
                return frame
            if self._is_dry and not self._blocking:
                self._is_dry = False
                return None
            try:
                self._read()
            except BlockingIOError:
                return None
            except ConnectionError as error:
                raise EOFError from error

    def _read(self) -> None:
        """What the pipe has now, some of it; raises BlockingIOError if that is nothing, EOFError at the end."""
        self._traffic.system_calls += 1
        if self._body is not None:  # a large frame is read straight into its own memory
            rest = memoryview(self._body)[self._filled :]
            count = self._socket.recv_into(rest)
            self._is_dry = count < len(rest)
            self._filled += count
        else:
            try:
                count, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], ANCILLARY_BYTES, CLOSE_ON_EXEC)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                self._received.append(None)  # as `TRUNCATED` below, in macOS's words; the bytes come with the next look
                return
            self._is_dry = count < READ_BYTES
            self._incoming += self._buffer[:count]
            received = array.array("i")
            for _, kind, content in ancillary:
                if kind == socket.SCM_RIGHTS:
                    received.frombytes(content[: len(content) - len(content) % received.itemsize])
            if flags & TRUNCATED:  # this process may not have that many open
                close_all(received)
                self._received.append(None)
            elif received:
                self._received.append(received.tolist())
                for descriptor in received if PORTABLE else ():
                    os.set_inheritable(descriptor, False)
        if count == 0:
            raise EOFError

    def _next_frame(self) -> Frame | None:
        """None where it is not whole yet; raises MemoryError where there is no room for it."""
        if self._body is None:
            if len(self._incoming) < HEADER.size:
                return None
            self._header = HEADER.unpack_from(self._incoming)
            size = self._header[0] + self._header[1]
            try:
                self._body = bytearray(size)
            except MemoryError as error:
                raise MemoryError(f"no memory for a message of {size:,} bytes; return less, or tensors") from error
            there = self._incoming[HEADER.size : HEADER.size + size]
            self._body[: len(there)] = there
            self._filled = len(there)
            del self._incoming[: HEADER.size + len(there)]
        if self._filled < len(self._body):
            return None
        self._traffic.frames_received += 1
        self._traffic.bytes_received += HEADER.size + len(self._body)
        content = memoryview(self._body)
        pickled, _, descriptors = self._header
        self._body = None
        if descriptors:
            self._descriptors.extend(self._received.popleft() or [None] * descriptors)
        messages, payload = pickle.loads(content[:pickled]), content[pickled:]
        if self._mirror is not None:
            messages, payload, mirrors = self._mirror.open(messages, payload)
            self._descriptors.extend(mirrors)
        return Frame(messages, payload)

    def take_descriptor(self) -> int | None:
        """The descriptor that belongs to the `NewSlab` message just read; None where there was none free to receive it."""
        return self._descriptors.popleft()

    def hang_up(self) -> None:
        """The other end comes to the end after what it has been sent; what it says until then can still be received."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for _, descriptors in self._outgoing:
            close_all(descriptors)
        self._outgoing.clear()
        for received in (*self._received, self._descriptors):
            close_all([descriptor for descriptor in received or () if descriptor is not None])
        self._received.clear()
        self._descriptors.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that still reads here
        self._socket.close()


def in_frames(slabs: Sequence[Any]) -> Iterator[tuple[list[Message], list[int]]]:
    """The messages that say of slabs, in frames of as many descriptors as one may carry."""
    elsewhere = [each for each in slabs if each.elsewhere]
    if elsewhere:
        yield [NewSlab(each.number, each.nbytes, each.handle, each.lane.index + 1) for each in elsewhere], []
        slabs = [each for each in slabs if not each.elsewhere]
    for start in range(0, len(slabs), MAX_DESCRIPTORS):
        some = slabs[start : start + MAX_DESCRIPTORS]
        yield [NewSlab(slab.number, slab.nbytes) for slab in some], [slab.descriptor for slab in some]


def drained(queue: deque[Any]) -> list[Any]:
    """All that is in the queue now; other threads may go on appending."""
    return [queue.popleft() for _ in range(len(queue))]


def duplicates(descriptors: Sequence[int]) -> list[int]:
    """Of all descriptors, or of none."""
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(os.dup(descriptor))
    except OSError:
        close_all(made)
        raise
    return made


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
