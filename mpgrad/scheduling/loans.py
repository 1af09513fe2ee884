"""What a worker has been lent: memory that has to live, and to be seen there, until it has given it back. Caller's side."""

from __future__ import annotations

from collections import deque
from typing import Any

from mpgrad.memory.arena import Borrowed, Slot, slab_of
from mpgrad.wire.link import Link

__all__ = ["Loans"]


class Loans:
    """Of one worker. It gives an address back as often as it was sent, so one that is on its way again stays lent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lent: dict[int, tuple[Slot | Borrowed, int]] = {}  # address -> what has to live, how often it was sent
        self._slabs: set[int] = set()  # of which the worker knows, or will with the next message
        self._new_slabs: list[Any] = []
        self.gone_slabs: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, address: int, holder: Slot | Borrowed) -> None:
        """Keep `holder` until the worker has given the address back as often as it was sent."""
        _, times = self._lent.get(address, (None, 0))
        self._lent[address] = holder, times + 1
        if not self._link.shares_memory:
            self._link.carry(holder)
        if holder.slab.number not in self._slabs:
            self._slabs.add(holder.slab.number)
            self._new_slabs.append(holder.slab)

    def take_back(self, address: int, times: int) -> None:
        holder, sent = self._lent.pop(address)
        if not self._link.shares_memory:
            self._link.drop(holder, times)
        if sent > times:  # it is on its way there once more
            self._lent[address] = holder, sent - times

    def have_any_of(self, slab: int) -> bool:
        return any(slab_of(address) == slab for address in self._lent)

    def tell_again(self, slab: int) -> None:
        """The worker does not know the slab after all: it is told of it when it is next lent something there."""
        self._slabs.discard(slab)

    def unmap(self, slab: int) -> None:
        """The slab is gone, and the worker is to be told so."""
        if slab in self._slabs:
            self._slabs.discard(slab)
            self.gone_slabs.append(slab)

    def take_new_slabs(self) -> list[Any]:
        new, self._new_slabs = self._new_slabs, []
        return new

    def end(self) -> None:
        """The worker is gone, and holds nothing of ours any more."""
        if not self._link.shares_memory:
            for holder, times in self._lent.values():
                self._link.drop(holder, times)
        self._lent.clear()
