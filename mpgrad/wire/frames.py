"""The way between the caller and one worker: what both ends of it can do (`Link`), whatever it is
made of; frames, each with a list of messages, the bytes of small tensors, and file descriptors; and
replicas of the other side's memory, where that cannot be shared. Both sides.

A replica has the same numbers and offsets. An agent keeps replicas of the caller's memory, and the
caller keeps replicas of each agent's.

    lend a slot ──► carry ──► its bytes stand behind the payload of the next frame
                                                     ══► written at the same offset ──► borrowed
So addresses stay valid, no message is rewritten, and who borrows looks at memory of this machine as
if it were shared. A slot is carried once while it is lent; memory that is not ours each time, since
who has it may have written there meanwhile.

Assumes: one thread sends, and one receives. What an owner hollows out or gives up stays in the
    replica until the slab is gone.
"""

from __future__ import annotations

import contextlib
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


class Frame(NamedTuple):
    """What is sent, or received, at once."""

    messages: list[Message]
    payload: memoryview


class Channel(Pipe):
    """One end of a socket pair, a `Link`."""

    def __init__(self, end: socket.socket, blocking: bool, traffic: Traffic | None = None) -> None:
        super().__init__(end, blocking, traffic)
        self._replicas: SlabReplicas | None = None  # that the other end has of what is lent to it
        self.shares_memory = True

    def send(
        self,
        messages: list[Message],
        payload: Sequence[bytes] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one frame, or queue what the pipe does not take now (`has_outgoing`).

        Raises:
            ConnectionError: the other end is gone.
            OSError: what has to wait needs descriptors of its own, and there are none.
        """
        if self._replicas is not None:
            messages, payload = self._replicas.enclose(messages, payload)
        self.send_raw(framed(messages, payload, len(descriptors)), descriptors)

    def lend_by_value(self) -> None:
        """From now on: the other end is an agent's, which passes frames on to another machine, and
        cannot look into them."""
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
        """The next frame; None where the parent's end has no whole frame yet, and should wait until
        there is more to read.

        Raises:
            EOFError: the other end is gone.
        """
        raw = self.receive_raw()
        if raw is None:
            return None
        return Frame(*unframed(*raw))


def unframed(header: tuple[int, int, int], body: memoryview) -> tuple[list[Message], memoryview]:
    """Messages and payload again; the payload stays a part of the body.

    Raises:
        UnreadableFrame: it is none of ours.
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
            raise  # of a signal's handler; in other threads it is the pickle's
        raise UnreadableFrame(repr(error)) from error
    if type(messages) is not list:
        raise UnreadableFrame(f"it held no messages, but {type(messages).__name__}")
    return messages, body[header[0] :]


def in_frames(slabs: Sequence[Any]) -> Iterator[tuple[list[Message], list[int]]]:
    """The messages that say of slabs, in frames of as many descriptors as one may carry."""
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
    """All that is in the queue now; other threads may go on appending, and taking."""
    found = []
    with contextlib.suppress(IndexError):
        for _ in range(len(queue)):
            found.append(queue.popleft())
    return found


class SlabReplicas:
    """What one end of a link has of the other's slabs, and has given the other of its own."""

    def __init__(self) -> None:
        self._slabs: dict[int, Slab] = {}
        self._lent: dict[int, int] = {}  # address of a slot -> how often it is lent there now
        self._to_carry: dict[int, memoryview] = {}  # by address
        self._known: set[int] = set()  # slabs that the other side has heard of

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
        """The frame with what has to be carried; what lies in a slab that is still to be introduced
        waits for a later one."""
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
        """What the other side sent, with the descriptors of replicas for its new slabs; what it
        carried is in its place.

        Raises:
            MemoryError: there is no room for that here.
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
    """One end. Frames arrive whole, once, and in the order in which they were sent; or the other
    end is gone.

    Where `shares_memory`, both sides look at the same bytes: a slab is handed over once, with its
    descriptor. Elsewhere each has a replica of the other's slabs, with the same numbers and
    offsets, and what is lent is carried: its bytes travel with a frame.
    """

    shares_memory: bool

    def send(
        self,
        messages: list[Message],
        payload: Sequence[bytes] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """The caller's end never waits. Descriptors pass where memory is shared.

        Raises:
            ConnectionError: the other end is gone.
        """
        ...

    def introduce(self, slabs: Sequence[Any]) -> None:
        """Slabs that messages are going to name."""
        ...

    def carry(self, holder: Slot | BorrowedMemory) -> None:
        """The next frame names this memory, which is not shared."""
        ...

    def drop(self, holder: Slot | BorrowedMemory, times: int) -> None:
        """It has been given back so many times."""
        ...

    def receive(self) -> Frame | None:
        """The next frame; None where the caller's end has no whole one yet.

        Raises:
            EOFError: the other end is gone.
        """
        ...

    def close(self) -> None: ...

    def take_descriptor(self) -> int | None:
        """What came with the message just read: for a `NewSlab`, of the slab, or its replica; None
        where none could be had."""
        ...
