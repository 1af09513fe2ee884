"""Shared memory: one arena of slabs per process, cut into slots; other processes borrow slots and give them back.

torch.multiprocessing hands over one file descriptor a tensor, which costs about 1,000 us each whatever the size. Here a slab
is handed over once; from then on a tensor travels as an address, which takes a microsecond to make and to view.

    owner                                                borrower
    arena.allocate(nbytes) -> Slot   1. [w] written
    lend the slot's address ────────────────────────►    2. [r] borrow(address) -> memory, for any number of tensors
                                                         3. the last tensor dies; its address joins `returns`
    4. [x] slot dropped, reusable    ◄──── returns ───
Guarantees: a slot is written by its owner only, before it is lent; its memory is not used again before every borrower gave
    it back, whatever the borrower's code did with the tensor meanwhile; all methods may be called from any thread and
    from finalizers, because the free lists are deques, whose ends Python makes atomic.
Assumes: the fork that makes a worker happens before the worker makes its arena.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil
import torch

from mpgrad._torch import descriptor_of, shared_storage, storage_from_descriptor
from mpgrad.errors import PoolClosedError, SharedMemoryError

__all__ = ["Arena", "Lenders", "Slab", "Slot", "slab_of"]

PAGE = mmap.PAGESIZE
SLAB_BYTES = 64 << 20  # address space, not memory: pages come when a slot is first cut out of them
IDLE_BYTES = 256 << 20  # free memory of single-slot slabs that is kept for reuse; first touch is 5 times slower than reuse
COPY_BYTES = 256 << 10  # up to here copying is cheaper than a private mapping (64 KiB: 25 against 65 us)
OFFSET_BITS = 44  # an address is slab << OFFSET_BITS | offset
OFFSET_MASK = (1 << OFFSET_BITS) - 1


def slab_of(address: int) -> int:
    return address >> OFFSET_BITS


class Slab:
    """A piece of shared memory, mapped into this process. Whoever holds a `memory` slice keeps the mapping."""

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self.nbytes = storage.nbytes()
        self.descriptor = descriptor_of(storage)
        array_type: Any = type("SlabMemory", (ctypes.c_ubyte * self.nbytes,), {})
        array = array_type.from_address(storage.data_ptr())
        self.start = storage.data_ptr()
        array.storage = storage  # every memoryview made from the array holds the array, and so the mapping
        self.memory = memoryview(array).cast("B")

    @classmethod
    def attach(cls, number: int, descriptor: int, nbytes: int) -> Slab:
        return cls(number, storage_from_descriptor(descriptor, nbytes))

    def private(self, offset: int, borrowed: memoryview) -> memoryview:
        """The borrowed bytes again, but writes stay here: the kernel copies a page when it is first written."""
        start = offset % mmap.ALLOCATIONGRANULARITY
        size = start + borrowed.nbytes
        mapping = PrivateMapping(self.descriptor, size, access=mmap.ACCESS_COPY, offset=offset - start)
        mapping.borrowed = borrowed
        return memoryview(mapping)[start:]


class PrivateMapping(mmap.mmap):
    borrowed: memoryview  # not given back while the mapping reads its pages


class Slot:
    """One allocation in the arena of this process; dropping the last reference makes it reusable."""

    __slots__ = ("__weakref__", "_arena", "_capacity", "address", "memory")

    def __init__(self, arena: Arena, address: int, capacity: int, memory: memoryview) -> None:
        self._arena = arena
        self._capacity = capacity
        self.address = address
        self.memory = memory

    def __del__(self) -> None:
        self._arena.reclaim(self.address, self._capacity)


class Arena:
    """The shared memory that this process owns."""

    def __init__(self, owner: int) -> None:
        self._next_number = owner << 32
        self._free: dict[int, deque[int]] = {}  # capacity -> addresses
        self._open: Slab | None = None  # the slab that slots are cut from
        self._used = 0  # bytes cut off the open slab
        self._idle_bytes = 0  # in free single-slot slabs
        self._growing = threading.Lock()
        self._closed = False
        self.slabs: dict[int, Slab] = {}
        self.made: deque[Slab] = deque()  # slabs that borrowers have not been told of
        self.dropped: deque[int] = deque()  # numbers of slabs that are gone, for borrowers to unmap
        self.slots_made = 0

    def allocate(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes`, its memory exactly `nbytes` long and aligned to pages.

        Raises:
            SharedMemoryError: the machine has not that much memory left.
            PoolClosedError: after `close`.
        """
        if self._closed:
            raise PoolClosedError("the pool is closed, and its shared memory is gone")
        capacity = size_class(nbytes)
        self.slots_made += 1
        try:
            address = self._free[capacity].pop()
        except (KeyError, IndexError):
            address = self._grow(capacity, nbytes)
        else:
            if capacity > SLAB_BYTES // 2:
                self._idle_bytes -= capacity
        offset = address & OFFSET_MASK
        return Slot(self, address, capacity, self.slabs[slab_of(address)].memory[offset : offset + nbytes])

    def close(self) -> None:
        """Give all memory back to the system, each slab when its last view has died."""
        self._closed = True
        self._free.clear()
        self._open = None
        self.slabs.clear()
        self.made.clear()

    def reclaim(self, address: int, capacity: int) -> None:
        if self._closed:
            return
        if capacity > SLAB_BYTES // 2:
            if self._idle_bytes + capacity > IDLE_BYTES:
                del self.slabs[slab_of(address)]  # unmapped with its last view
                self.dropped.append(slab_of(address))
                return
            self._idle_bytes += capacity
        self._free.setdefault(capacity, deque()).append(address)

    def _grow(self, capacity: int, nbytes: int) -> int:
        with self._growing:
            if capacity > SLAB_BYTES // 2:
                slab = self._new_slab(capacity, nbytes)
                reserve(slab, 0, capacity, nbytes)
                return slab.number << OFFSET_BITS
            if self._open is None or self._used + capacity > self._open.nbytes:
                self._open = self._new_slab(SLAB_BYTES, nbytes)
                self._used = 0
            reserve(self._open, self._used, capacity, nbytes)
            address = self._open.number << OFFSET_BITS | self._used
            self._used += capacity
            return address

    def _new_slab(self, size: int, nbytes: int) -> Slab:
        if nbytes > psutil.virtual_memory().available:
            raise no_room(nbytes)
        try:
            storage = shared_storage(size)
        except (OSError, RuntimeError) as error:
            raise no_room(nbytes) from error
        slab = Slab(self._next_number, storage)
        self._next_number += 1
        self.slabs[slab.number] = slab
        self.made.append(slab)
        return slab


class Lenders:
    """The slabs of other processes, and what this process has borrowed of them.

    `returned(address, times)` is called, from whichever thread drops the last tensor, with how often the address was
    received: the owner counts how often it was sent, so a slot that is on its way once more is not taken for returned.
    """

    def __init__(self, returned: Callable[[int, int], None]) -> None:
        self.slabs: dict[int, Slab] = {}
        self._returned = returned
        self._views: dict[int, weakref.ref[memoryview]] = {}  # address -> what all borrowers of it here share
        self._borrowed_at: dict[int, tuple[int, weakref.ref[memoryview]]] = {}  # pointer -> address, view
        self._received: dict[int, int] = {}
        self._lock = threading.RLock()  # re-entrant: a finalizer may run while this thread holds it

    def attach(self, number: int, descriptor: int, nbytes: int) -> None:
        self.slabs[number] = Slab.attach(number, descriptor, nbytes)

    def detach(self, number: int) -> None:
        self.slabs.pop(number, None)

    def borrow(self, address: int, nbytes: int, private: bool = False) -> memoryview:
        """The memory at `address`; `private` where others use it too, so that writing to it must not show."""
        with self._lock:
            self._received[address] = self._received.get(address, 0) + 1
            known = self._views.get(address)
            memory = known() if known is not None else None
            if memory is None:
                slab, offset = self.slabs[slab_of(address)], address & OFFSET_MASK
                memory = slab.memory[offset : offset + nbytes]
                start = slab.start + offset  # the pointer of every storage on this memory
                view = weakref.ref(memory, lambda view: self._give_back(address, start, view))
                self._views[address] = view
                self._borrowed_at[start] = address, view
        if not private:
            return memory
        if nbytes <= COPY_BYTES:
            return memoryview(bytearray(memory))
        return self.slabs[slab_of(address)].private(address & OFFSET_MASK, memory)

    def find(self, core: torch.Tensor) -> tuple[int, object] | None:
        """Where `core` lies, and what keeps it there, if it is or looks at something borrowed here."""
        start = core.untyped_storage().data_ptr()
        known = self._borrowed_at.get(start)
        if known is None:
            return None
        address, view = known
        memory = view()
        if memory is None:
            return None
        return address + int(core.storage_offset()) * core.element_size(), memory

    def _give_back(self, address: int, start: int, view: weakref.ref[memoryview]) -> None:
        with self._lock:
            if self._views.get(address) is not view:
                return  # borrowed again meanwhile; that view's end will report for both
            del self._views[address]
            if self._borrowed_at.get(start, (0, None))[1] is view:
                del self._borrowed_at[start]
            times = self._received.pop(address)
        self._returned(address, times)


def size_class(nbytes: int) -> int:
    """The next of 4, 5, 6, 7 times a power of two pages: at most a quarter is wasted."""
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * PAGE


def reserve(slab: Slab, offset: int, size: int, nbytes: int) -> None:
    """Take the pages from the system now, so that a lack is an error here and not a SIGBUS in the middle of a copy."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(slab.descriptor, offset, size)
        except OSError as error:
            raise no_room(nbytes) from error


def no_room(nbytes: int) -> SharedMemoryError:
    free = psutil.virtual_memory().available
    return SharedMemoryError(
        f"no room in shared memory for a tensor ({nbytes:,} bytes asked for, {free:,} bytes of memory free); "
        "drop results that are no longer needed, or cut the item into smaller ones"
    )
