"""Frames as bytes through a Unix socket pair. A frame is a header, two pieces whose sizes are in
the header, and file descriptors that are sent beside it.

multiprocessing's Connection blocks in the middle of a message, and sends descriptors through a
named listening socket. Here the parent's end never blocks: bytes that do not fit into the pipe wait
in `_outgoing`. So parent and worker cannot wait for each other. The worker's end blocks, because a
worker has nothing else to do.

    frame: 24 bytes header (a mark, sizes of pickle and payload, number of descriptors) | pickle |
    payload
    descriptors are sent beside the header's first byte, as SCM_RIGHTS

Both sides and the agent between them use this module. It knows nothing about messages, and needs no
torch.

Guarantees: frames are sent whole and in order. A signal handler or a finalizer may send a frame
    while another one is being sent, and its frame follows that one. If a handler raises, the
    interrupted frame is either not sent at all, or its rest is sent before the next frame.
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

from mpgrad.system import CLOSE_ON_EXEC, NO_SIGNAL, PORTABLE, OwnedDescriptor

__all__ = [
    "MAX_DESCRIPTORS",
    "Pipe",
    "RawFrame",
    "Traffic",
    "UnreadableFrame",
    "framed",
    "parts_of",
    "read_crash_traceback",
]

HEADER = struct.Struct("<4sQQI")
MARK = b"mpg\xb1"  # every frame begins with it
MAX_BYTES = 1 << 42  # the most bytes of a frame; a header with more is not a frame
MAX_DESCRIPTORS = 64  # in one frame; far below the kernel's limit of 253
ANCILLARY_BYTES = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
TRUNCATED = int(socket.MSG_CTRUNC)  # testing a bit of the enumeration itself runs Python code
# macOS has no room for descriptors while the pipe is nearly full, and reports EMSGSIZE
NO_ROOM = (errno.EAGAIN, errno.EMSGSIZE)
READ_BYTES = 1 << 16  # larger frames are read straight into their own memory
ALIGNMENT = 16  # the payload's, so that tensors in it are aligned


OPEN: weakref.WeakKeyDictionary[socket.socket, OwnedDescriptor] = weakref.WeakKeyDictionary()


def close_in_child() -> None:
    """Close this process's pipes in a forked child. If the child held them open, the other ends
    could not notice this process's death."""
    for end, kept in OPEN.items():
        if kept.is_ours:
            end.close()
        else:
            end.detach()


os.register_at_fork(after_in_child=close_in_child)


class Traffic:
    """Counts of what went through pipes. They show what an operation costs, independent of the
    machine."""

    __slots__ = ("bytes_received", "bytes_sent", "frames_received", "frames_sent", "system_calls")

    def __init__(self) -> None:
        self.frames_sent = 0
        self.frames_received = 0
        self.bytes_sent = 0  # pickles and small tensors
        self.bytes_received = 0
        self.system_calls = 0


class RawFrame(NamedTuple):
    """A received frame, not unpickled."""

    header: tuple[int, int, int]  # bytes of the pickle and of the payload, number of descriptors
    body: memoryview  # both


class UnreadableFrame(EOFError):
    """The received bytes are not a frame, because other code has written to the pipe. No more is
    read from this pipe."""


class OutgoingFrame:
    """A frame that is being sent, or waits to be."""

    __slots__ = ("_owned", "data", "descriptors", "taken")

    def __init__(self, data: memoryview, descriptors: Sequence[int]) -> None:
        self.data = data
        self.descriptors = descriptors
        self.taken: list[int] = []  # bytes that the pipe took, at each attempt
        self._owned: Sequence[int] = ()

    def keep(self) -> None:
        """Duplicate the descriptors of a frame that has to wait, because the sender may close its
        own."""
        if not self.taken and not self._owned:
            self.descriptors = self._owned = duplicates(self.descriptors)

    def end(self) -> None:
        if self._owned:
            close_all(self._owned)
            self.descriptors = self._owned = ()


class Pipe:
    """One end of a socket pair. One thread may send, and one may receive."""

    def __init__(self, end: socket.socket, blocking: bool, traffic: Traffic | None = None) -> None:
        self._socket = end
        self._traffic = Traffic() if traffic is None else traffic
        end.setblocking(blocking)
        self._kept = OPEN[end] = OwnedDescriptor(end.fileno())
        self._blocking = blocking
        self._outgoing: deque[OutgoingFrame] = deque()
        self._is_flushing = False
        # the descriptors of each frame that has any; None if they were lost
        self._received: deque[list[int] | None] = deque()
        # the descriptors of frames that were read, in the order of their messages
        self._descriptors: deque[int | None] = deque()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._incoming = bytearray()
        self._is_dry = False  # the last read has emptied the pipe
        # the body of a frame whose header has arrived, filled up to _filled
        self._body: bytearray | None = None
        self._filled = 0
        self._header = (0, 0, 0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_raw(self, frame: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        """Send a frame that begins with its header. Queue the bytes that the pipe does not take now
        (`has_outgoing`).

        Raises:
            ConnectionError: the other end is gone.
            OSError: a queued frame needs duplicates of its descriptors, and none are free; or other
                code has closed the pipe.
        """
        self._traffic.frames_sent += 1
        self._traffic.bytes_sent += len(frame)
        outgoing = OutgoingFrame(memoryview(frame), descriptors)
        try:
            self._outgoing.append(outgoing)
            self.flush()
            if descriptors:
                outgoing.keep()
        except BaseException:
            if not outgoing.taken:
                with contextlib.suppress(ValueError):
                    self._outgoing.remove(outgoing)
            raise

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def flush(self) -> None:
        """Send the queued frames. An end that does not block sends as much as the pipe takes."""
        # This runs in a signal handler that has interrupted `flush`. The interrupted loop will also
        # send the frame that was just appended.
        if self._is_flushing:
            return
        try:
            self._is_flushing = True
            if not self._kept.is_ours:  # the descriptor may be the user's socket by now
                raise self._kept.lost
            while self._outgoing:
                first = self._outgoing[0]
                rest = first.data[sum(first.taken) :] if first.taken else first.data
                room = not rest or self._send_some(first, rest)
                if room and (not rest or first.taken[-1] == len(rest)):
                    self._outgoing.popleft().end()
                elif not self._blocking:
                    return
                elif not room:
                    self._wait_for_room()
        finally:
            self._is_flushing = False

    def _send_some(self, outgoing: OutgoingFrame, rest: memoryview) -> bool:
        """Return whether the pipe took any bytes, and note how many. The descriptors go with the
        first bytes."""
        self._traffic.system_calls += 1
        # `map` sends and notes the number in C, so no signal handler can raise between the two
        try:
            if outgoing.descriptors and not outgoing.taken:
                rights = [
                    (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", outgoing.descriptors))
                ]
                outgoing.taken.extend(map(self._socket.sendmsg, ([rest],), (rights,), (NO_SIGNAL,)))
            else:
                outgoing.taken.extend(map(self._socket.send, (rest,), (NO_SIGNAL,)))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def _wait_for_room(self) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        room.poll()

    @property
    def bytes_waiting(self) -> int:
        """The received bytes of a frame that has not arrived completely."""
        return len(self._incoming) if self._body is None else self._filled

    def receive_raw(self) -> RawFrame | None:
        """Return the next frame. An end that does not block returns None if no whole frame has
        arrived. Then wait until there is more to read, and try again.

        Raises:
            EOFError: the other end is gone. If the bytes are not a frame, it is an
                `UnreadableFrame`.
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
                count, ancillary, flags, _ = self._socket.recvmsg_into(
                    [self._buffer], ANCILLARY_BYTES, CLOSE_ON_EXEC
                )
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                # the same as `TRUNCATED` below, on macOS; the bytes come with the next read
                self._received.append(None)
                return
            self._is_dry = count < READ_BYTES
            self._incoming += self._buffer[:count]
            received = array.array("i")
            for _, kind, content in ancillary:
                if kind == socket.SCM_RIGHTS:
                    received.frombytes(content[: len(content) - len(content) % received.itemsize])
            if flags & TRUNCATED:  # the limit of this process's open files is reached
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
            mark, pickled, payload, descriptors = HEADER.unpack_from(self._incoming)
            if mark != MARK:
                raise UnreadableFrame(f"it began with {bytes(self._incoming[:16])!r}")
            self._header = pickled, payload, descriptors
            size = pickled + payload
            if size > MAX_BYTES or descriptors > MAX_DESCRIPTORS:
                raise UnreadableFrame(
                    f"it announced {size:,} bytes and {descriptors:,} descriptors"
                )
            try:
                self._body = bytearray(size)
            except MemoryError as error:
                raise MemoryError(
                    f"no memory for a message of {size:,} bytes; return less, or tensors"
                ) from error
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
            if not self._received:
                raise UnreadableFrame(
                    f"it announced {frame.header[2]} descriptors, but came without them"
                )
            self._descriptors.extend(self._received.popleft() or [None] * frame.header[2])
        return frame

    def take_descriptor(self) -> int | None:
        """Return the next received descriptor, or None if too many files were open to receive
        it."""
        return self._descriptors.popleft()

    def hang_up(self) -> None:
        """Stop sending, so that the other end ends once it has read everything. What it sends until
        then can still be received."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for outgoing in self._outgoing:
            outgoing.end()
        self._outgoing.clear()
        for received in (*self._received, self._descriptors):
            close_all([descriptor for descriptor in received or () if descriptor is not None])
        self._received.clear()
        self._descriptors.clear()
        if not self._kept.is_ours:
            self._socket.detach()
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that still reads here
        self._socket.close()


def framed(messages: Sequence[object], payload: Sequence[bytes], descriptors: int = 0) -> bytes:
    """Return the bytes of a frame, with its header."""
    pickled = pickle.dumps(messages, protocol=5)
    padding = bytes(-len(pickled) % ALIGNMENT)
    header = HEADER.pack(MARK, len(pickled) + len(padding), sum(map(len, payload)), descriptors)
    return b"".join((header, pickled, padding, *payload))


def parts_of(frame: bytes | memoryview) -> RawFrame:
    """Return the parts of a frame that did not go through a pipe."""
    _, pickled, payload, descriptors = HEADER.unpack_from(frame)
    return RawFrame((pickled, payload, descriptors), memoryview(frame)[HEADER.size :])


def read_crash_traceback(pipe: int) -> str:
    """Read what a dead process has written into the pipe, and close the pipe."""
    os.set_blocking(pipe, False)  # a child of the dead process may hold the other end
    found = b""
    with contextlib.suppress(BlockingIOError):
        while some := os.read(pipe, 1 << 16):
            found += some
    os.close(pipe)
    return found.decode(errors="replace")


def duplicates(descriptors: Sequence[int]) -> list[int]:
    """Duplicate all of these descriptors. If one fails, close all duplicates."""
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
