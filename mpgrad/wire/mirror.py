"""Memory of the other side, where it cannot be shared: a mirror here, with the same numbers and offsets.

A site keeps mirrors of the caller's memory, and the caller keeps mirrors of each site's. Both sides.

    lend a slot ──► carry ──► its bytes stand behind the payload of the next frame ══► written at the same offset ──► borrowed
So addresses stay valid, no message is rewritten, and who borrows looks at memory of this machine as if it were shared. A slot
is carried once while it is lent; memory that is not ours each time, since who has it may have written there meanwhile.

Assumes: one thread sends, and one receives. What an owner hollows out or gives up stays in the mirror until the slab is gone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from mpgrad.memory.addresses import OFFSET_BITS, OFFSET_MASK, slab_of
from mpgrad.memory.arena import Borrowed, Slab, Slot
from mpgrad.wire.messages import Carried, Message, NewSlab, SlabsGone

__all__ = ["Mirror", "address_of"]


class Mirror:
    """What one end of a link has of the other's slabs, and has given the other of its own."""

    def __init__(self) -> None:
        self._slabs: dict[int, Slab] = {}
        self._lent: dict[int, int] = {}  # address of a slot -> how often it is lent there now
        self._to_carry: dict[int, memoryview] = {}  # by address
        self._known: set[int] = set()  # slabs that the other side has heard of

    def carry(self, holder: Slot | Borrowed) -> None:
        address = address_of(holder)
        times = self._lent.get(address, 0)
        if not times or isinstance(holder, Borrowed):
            self._to_carry[address] = holder.memory
        self._lent[address] = times + 1

    def drop(self, holder: Slot | Borrowed, times: int) -> None:
        address = address_of(holder)
        left = self._lent.pop(address) - times
        if left > 0:
            self._lent[address] = left

    def enclose(self, messages: list[Message], payload: Sequence[bytes]) -> tuple[list[Message], Sequence[bytes]]:
        """The frame with what has to be carried; what lies in a slab that is still to be introduced waits for a later one."""
        for message in messages:
            if isinstance(message, NewSlab):
                self._known.add(message.number)
            elif isinstance(message, SlabsGone):
                self._known.difference_update(message.numbers)
        carried = {address: memory for address, memory in self._to_carry.items() if slab_of(address) in self._known}
        if not carried:
            return messages, payload
        for address in carried:
            del self._to_carry[address]
        slots = [(address, memory.nbytes) for address, memory in carried.items()]
        return [Carried(slots), *messages], [*payload, *map(bytes, carried.values())]

    def open(self, messages: list[Message], payload: memoryview) -> tuple[list[Message], memoryview, list[int]]:
        """What the other side sent, with the descriptors of mirrors for its new slabs; what it carried is in its place.

        Raises:
            MemoryError: there is no room for that here.
        """
        try:
            return self._opened(messages, payload)
        except (OSError, RuntimeError) as error:
            raise MemoryError(f"no room for a mirror of another machine's memory ({error})") from error

    def _opened(self, messages: list[Message], payload: memoryview) -> tuple[list[Message], memoryview, list[int]]:
        descriptors = []
        for message in messages:
            if isinstance(message, NewSlab):
                slab = self._slabs[message.number] = Slab.make(message.number, message.nbytes)
                descriptors.append(os.dup(slab.descriptor))
            elif isinstance(message, SlabsGone):
                for number in message.numbers:
                    self._slabs.pop(number, None)
        first = messages[0] if messages else None
        if not isinstance(first, Carried):
            return messages, payload, descriptors
        place = payload.nbytes - sum(nbytes for _, nbytes in first.slots)
        payload, behind = payload[:place], payload[place:]
        for address, nbytes in first.slots:
            slab, offset = self._slabs[slab_of(address)], address & OFFSET_MASK
            slab.reserve(offset, nbytes, nbytes)
            slab.memory[offset : offset + nbytes] = behind[:nbytes]
            behind = behind[nbytes:]
        return messages[1:], payload, descriptors


def address_of(holder: Slot | Borrowed) -> int:
    if isinstance(holder, Slot):
        return holder.address
    start = ctypes.addressof(ctypes.c_char.from_buffer(holder.memory))
    return holder.slab.number << OFFSET_BITS | start - holder.slab.start
