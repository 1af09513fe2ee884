"""The connection between the caller and one worker. `Link` is the protocol of its ends, for any
kind of connection. A frame holds a list of messages, the bytes of small tensors, and file
descriptors. If the sides cannot share memory, each keeps replicas of the other's. Both sides use
this module.

A replica has the same numbers and offsets as the slab. An agent keeps replicas of the caller's
memory, and the caller keeps replicas of each agent's.

    lend a slot ──► carry ──► its bytes follow the payload of the next frame ══► written at the same
                                                     offset ──► borrowed

So addresses stay valid, no message is rewritten, and the borrower reads memory of its own machine
as if it were shared. A sender's own slot is sent once while it is lent. Borrowed memory is sent
each time, because code that has the borrowed tensor may have written to it in between.

Assumes: one thread sends, and one receives. Memory that an owner returns to the system remains in
    the replica until the slab is dropped.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from mpgrad.memory import OFFSET_BITS, OFFSET_MASK, slab_of
from mpgrad.memory.arena import BorrowedMemory, Slab, Slot
from mpgrad.wire.messages import CarriedSlots, DroppedSlabs, Message, NewSlab
from mpgrad.wire.pipe import MAX_DESCRIPTORS, Pipe, Traffic, UnreadableFrame, framed

__all__ = [
    "Channel",
    "Frame",
    "Link",
    "SlabReplicas",
    "address_of",
    "drained",
    "in_frames",
    "unframed",
]


# in place of an empty part of a body, which would keep the whole body
EMPTY = memoryview(b"")


class Frame(NamedTuple):
    """The content of one message to or from the other end."""

    messages: list[Message]
    payload: memoryview


class Channel(Pipe):
    """One end of a socket pair, a `Link`."""

    def __init__(self, end: socket.socket, blocking: bool, traffic: Traffic | None = None) -> None:
        super().__init__(end, blocking, traffic)
        self._replicas: SlabReplicas | None = None  # the other end's copies of what it was lent
        self.shares_memory = True

    def send(
        self,
        messages: list[Message],
        payload: Sequence[bytes] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one frame. Queue the bytes that the pipe does not take now (`has_outgoing`).

        Raises:
            ConnectionError: the other end is gone.
            OSError: a queued frame needs duplicates of its descriptors, and none are free.
        """
        if self._replicas is not None:
            messages, payload = self._replicas.enclose(messages, payload)
        self.send_raw(framed(messages, payload, len(descriptors)), descriptors)

    def lend_by_value(self) -> None:
        """Send bytes instead of sharing memory from now on. The other end is an agent's, which
        passes frames on to another machine without reading them."""
        self._replicas = SlabReplicas()
        self.shares_memory = False

    def introduce(self, slabs: Sequence[Any]) -> None:
        for messages, descriptors in in_frames(slabs):
            self.send(messages, (), descriptors if self.shares_memory else ())

    def carry(self, holder: Slot | BorrowedMemory) -> None:
        if self._replicas is not None:
            self._replicas.carry(holder)

    def drop(self, holder: Slot | BorrowedMemory, times: int) -> None:
        if self._replicas is not None:
            self._replicas.drop(holder, times)

    def receive(self) -> Frame | None:
        """Return the next frame. At the parent's end, return None if no whole frame has arrived.
        Then wait until there is more to read, and try again.

        Raises:
            EOFError: the other end is gone.
        """
        raw = self.receive_raw()
        if raw is None:
            return None
        return Frame(*unframed(*raw))


def unframed(header: tuple[int, int, int], body: memoryview) -> tuple[list[Message], memoryview]:
    """Return the messages and the payload, which remains a part of the body.

    Raises:
        UnreadableFrame: the frame was not written by this package.
    """
    try:
        messages = pickle.loads(body[: header[0]])
    except MemoryError:
        raise
    except BaseException as error:
        if (
            not isinstance(error, Exception)
            and threading.current_thread() is threading.main_thread()
        ):
            raise  # a signal's handler has raised it; in other threads the pickle has
        raise UnreadableFrame(repr(error)) from error
    if type(messages) is not list:
        raise UnreadableFrame(f"it held no messages, but {type(messages).__name__}")
    return messages, body[header[0] :] if header[1] else EMPTY


def in_frames(slabs: Sequence[Any]) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield the messages that introduce slabs, in frames with as many descriptors as allowed."""
    elsewhere = [each for each in slabs if each.elsewhere]
    if elsewhere:
        yield (
            [
                NewSlab(each.number, each.nbytes, each.handle, each.channel.index + 1)
                for each in elsewhere
            ],
            [],
        )
        slabs = [each for each in slabs if not each.elsewhere]
    for start in range(0, len(slabs), MAX_DESCRIPTORS):
        some = slabs[start : start + MAX_DESCRIPTORS]
        yield (
            [NewSlab(slab.number, slab.nbytes) for slab in some],
            [slab.descriptor for slab in some],
        )


def drained(queue: deque[Any]) -> list[Any]:
    """Remove and return what is in the queue now. Other threads may append or take at the same
    time."""
    found = []
    for _ in range(len(queue)):
        try:
            found.append(queue.popleft())
        # Another thread has taken the last one.
        except IndexError:
            break
    return found


class SlabReplicas:
    """The replicas that one end of a link keeps of the other's slabs, and notes of what the other
    end has of its own."""

    def __init__(self) -> None:
        self._slabs: dict[int, Slab] = {}
        self._lent: dict[int, int] = {}  # address of a slot -> how often it is lent now
        self._to_carry: dict[int, memoryview] = {}  # memory for the next frame, by address
        self._known: set[int] = set()  # slabs that were introduced to the other side

    def carry(self, holder: Slot | BorrowedMemory) -> None:
        address = address_of(holder)
        times = self._lent.get(address, 0)
        if not times or isinstance(holder, BorrowedMemory):
            self._to_carry[address] = holder.memory
        self._lent[address] = times + 1

    def drop(self, holder: Slot | BorrowedMemory, times: int) -> None:
        address = address_of(holder)
        left = self._lent.pop(address) - times
        if left > 0:
            self._lent[address] = left

    def enclose(
        self, messages: list[Message], payload: Sequence[bytes]
    ) -> tuple[list[Message], Sequence[bytes]]:
        """Add the memory that has to be sent to a frame. Memory in a slab that is not introduced
        yet waits for a later frame."""
        for message in messages:
            if isinstance(message, NewSlab):
                self._known.add(message.number)
            elif isinstance(message, DroppedSlabs):
                self._known.difference_update(message.numbers)
        carried = {
            address: memory
            for address, memory in self._to_carry.items()
            if slab_of(address) in self._known
        }
        if not carried:
            return messages, payload
        for address in carried:
            del self._to_carry[address]
        slots = [(address, memory.nbytes) for address, memory in carried.items()]
        return [CarriedSlots(slots), *messages], [*payload, *map(bytes, carried.values())]

    def open(
        self, messages: list[Message], payload: memoryview
    ) -> tuple[list[Message], memoryview, list[int]]:
        """Write the memory that was sent to its place in the replicas.

        Returns:
            The other messages, the payload without the bytes of that memory, and the descriptors of
            replicas of new slabs.

        Raises:
            MemoryError: there is no room for a replica here.
        """
        descriptors = []
        try:
            for message in messages:
                if isinstance(message, NewSlab):
                    slab = self._slabs[message.number] = Slab.make(message.number, message.nbytes)
                    descriptors.append(os.dup(slab.descriptor))
                elif isinstance(message, DroppedSlabs):
                    for number in message.numbers:
                        self._slabs.pop(number, None)
            first = messages[0] if messages else None
            if not isinstance(first, CarriedSlots):
                return messages, payload, descriptors
            place = payload.nbytes - sum(nbytes for _, nbytes in first.slots)
            payload, behind = payload[:place], payload[place:]
            for address, nbytes in first.slots:
                slab, offset = self._slabs[slab_of(address)], address & OFFSET_MASK
                slab.reserve(offset, nbytes, nbytes)
                slab.memory[offset : offset + nbytes] = behind[:nbytes]
                behind = behind[nbytes:]
        except (OSError, RuntimeError) as error:
            raise MemoryError(
                f"no room for a replica of another machine's memory ({error})"
            ) from error
        return messages[1:], payload, descriptors


def address_of(holder: Slot | BorrowedMemory) -> int:
    if isinstance(holder, Slot):
        return holder.address
    start = ctypes.addressof(ctypes.c_char.from_buffer(holder.memory))
    return holder.slab.number << OFFSET_BITS | start - holder.slab.start


class Link(Protocol):
    """One end of a connection. Frames arrive whole, once, and in the order in which they were sent,
    unless the other end is gone.

    If the link `shares_memory`, both sides use the same bytes, and a slab is handed over once, with
    its descriptor. Otherwise each side has replicas of the other's slabs, with the same numbers and
    offsets, and the bytes of lent memory are sent with a frame.
    """

    shares_memory: bool

    def send(
        self,
        messages: list[Message],
        payload: Sequence[bytes] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one frame. The caller's end never waits. Descriptors are sent only if memory is
        shared.

        Raises:
            ConnectionError: the other end is gone.
        """
        ...

    def introduce(self, slabs: Sequence[Any]) -> None:
        """Tell the other end about slabs that later messages will name."""
        ...

    def carry(self, holder: Slot | BorrowedMemory) -> None:
        """Send the bytes of this memory with the next frame, which names it, if it is not
        shared."""
        ...

    def drop(self, holder: Slot | BorrowedMemory, times: int) -> None:
        """Note that the other end has returned this memory this number of times."""
        ...

    def receive(self) -> Frame | None:
        """Return the next frame, or None if the caller's end has no whole frame yet.

        Raises:
            EOFError: the other end is gone.
        """
        ...

    def close(self) -> None: ...

    def take_descriptor(self) -> int | None:
        """Return the descriptor that came with the message just read, or None if none was free. For
        a `NewSlab` it is that of the slab or of its replica."""
        ...
