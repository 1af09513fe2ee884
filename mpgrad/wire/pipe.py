"""Frames as bytes through a Unix socket pair: a header, two pieces whose sizes it tells, and file descriptors beside it.

multiprocessing's Connection blocks in the middle of a message and sends descriptors through a named listening socket. Here
the parent's end never blocks: what does not fit into the pipe waits in `_outgoing`, so parent and worker cannot wait for
each other. The worker's end blocks, because a worker has nothing else to do.

    frame: 20 bytes header (sizes of pickle and payload, number of descriptors) | pickle | payload
    descriptors travel beside the header's first byte, as SCM_RIGHTS

Both sides, and the site between them: knows nothing of messages, and needs no torch.
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
from collections.abc import Sequence
from typing import NamedTuple

from mpgrad.system import PORTABLE

__all__ = ["HEADER", "MAX_DESCRIPTORS", "Pipe", "RawFrame", "Traffic", "framed", "last_words_in"]

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


class RawFrame(NamedTuple):
    """What was received at once."""

    header: tuple[int, int, int]  # bytes of the pickle and of the payload, number of descriptors
    body: memoryview  # both


class Pipe:
    """One end of a socket pair. Sending and receiving belong to one thread each."""

    def __init__(self, end: socket.socket, blocking: bool, traffic: Traffic | None = None) -> None:
        self._socket = end
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

    def send_raw(self, frame: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        """Send a frame, its header in front, or queue what the pipe does not take now (`has_outgoing`).

        Raises:
            ConnectionError: the other end is gone.
            OSError: what has to wait needs descriptors of its own, and there are none.
        """
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

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def flush(self) -> None:
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

    @property
    def bytes_waiting(self) -> int:
        """Of a frame of which not all has come."""
        return len(self._incoming) if self._body is None else self._filled

    def receive_raw(self) -> RawFrame | None:
        """The next frame; None where an end that does not block has no whole one yet, and should wait until there is more.

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

    def _next_frame(self) -> RawFrame | None:
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
        frame, self._body = RawFrame(self._header, memoryview(self._body)), None
        if frame.header[2]:
            self._descriptors.extend(self._received.popleft() or [None] * frame.header[2])
        return frame

    def take_descriptor(self) -> int | None:
        """The next of those that came with frames; None where there was none free to receive it."""
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


def framed(messages: Sequence[object], payload: Sequence[bytes], descriptors: int = 0) -> bytes:
    """A frame as it goes through a pipe, with its header."""
    pickled = pickle.dumps(messages, protocol=5)
    padding = bytes(-len(pickled) % ALIGNMENT)
    header = HEADER.pack(len(pickled) + len(padding), sum(map(len, payload)), descriptors)
    return b"".join((header, pickled, padding, *payload))


def last_words_in(pipe: int) -> str:
    """What has been written into it, by who is dead; closes it."""
    os.set_blocking(pipe, False)  # a process that it forked may hold the other end
    found = b""
    with contextlib.suppress(BlockingIOError):
        while some := os.read(pipe, 1 << 16):
            found += some
    os.close(pipe)
    return found.decode(errors="replace")


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
