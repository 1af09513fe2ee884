"""Each process has an arena of shared memory: slabs, which are cut into slots. Other processes
borrow slots and return them. Both sides use this module.

torch.multiprocessing sends one file descriptor for each tensor, which costs about 1,000 us whatever
the size. Here a slab is sent once. After that a tensor is sent as an address, which takes a
microsecond to make and to view.

    owner                                                borrower
    arena.allocate(nbytes) -> Slot   1. [w] written
    lend the slot's address ────────────────────────►    2. [r] borrow(address) -> memory, for any
                                                            number of tensors
                                                         3. the last tensor dies; its address
                                                            joins `returns`
    4. [x] slot dropped, reusable    ◄──── returns ───
Guarantees: only the owner of a slot writes it, before lending it. The memory is not reused until
    every borrower has returned it, whatever the borrower's code did with the tensor.
    Finalizers run anywhere, even in a thread that holds a lock. So they take no lock: they append
    to a deque, which `tidy` and `collect` process.
Assumes: the fork that makes a worker happens before the worker makes its arena.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import sys
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from mpgrad.errors import PoolClosedError, SharedMemoryError
from mpgrad.memory import KIND_BITS, OFFSET_BITS, OFFSET_MASK, OWNER_BITS, slab_of
from mpgrad.system import PORTABLE, OwnedDescriptor, free_memory, reserve_memory
from mpgrad.torch_state.private import descriptor_of, shared_storage, storage_from_descriptor

if TYPE_CHECKING:
    from mpgrad.memory.accelerator import DeviceSlab

__all__ = [
    "COPY_BYTES",
    "WITHHELD",
    "Arena",
    "BorrowedMemory",
    "ForeignSlabs",
    "KeptSlots",
    "Slab",
    "Slot",
]

LIBC = ctypes.CDLL(None, use_errno=True)
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
PAGE = mmap.PAGESIZE
SLAB_BYTES = 64 << 20  # of address space; a slot's pages are reserved when the slot is cut
# Free memory up to this size is kept for reuse, because the first touch of new pages is 5 times
# slower.
IDLE_BYTES = 256 << 20
# Up to this size a copy is cheaper than a private mapping, whose pages fault (64 KiB: 5 us for the
# copy, 16 us for the mapping).
COPY_BYTES = 1 << 20
# limits of `KeptSlots`, apart from the newest slot
MOST_KEPT, MOST_KEPT_BYTES = 64, 4 << 30


class Slab:
    """A piece of shared memory that is mapped into this process. A slice of `memory` keeps the
    mapping alive."""

    elsewhere = False  # whether it is on a device; see `accelerator.DeviceSlab`

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self.nbytes = storage.nbytes()
        self._kept = OwnedDescriptor(descriptor_of(storage))
        # torch has its own duplicate of the descriptor
        os.set_inheritable(self.descriptor, False)
        array_type: Any = type("SlabMemory", (ctypes.c_ubyte * self.nbytes,), {})
        array = array_type.from_address(storage.data_ptr())
        self.start = storage.data_ptr()
        # every memoryview of the array keeps the array alive, and the array keeps the mapping
        array.storage = storage
        self.memory = memoryview(array).cast("B")

    def __del__(self) -> None:
        # When the memory is freed, torch closes the descriptor's number. By now that number may
        # belong to a file of other code. If no file has it, torch aborts the process.
        if not self._kept.is_ours:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))  # never freed

    @property
    def descriptor(self) -> int:
        """The descriptor's number, for immediate use. Raises OSError if other code has closed the
        descriptor, because the number may now belong to another file."""
        return self._kept.number

    @property
    def can_grow(self) -> bool:
        """Whether this process still has the descriptor. Without it, only memory that is already
        reserved can be used."""
        return self._kept.is_ours

    @classmethod
    def make(cls, number: int, size: int) -> Slab:
        return cls(number, shared_storage(size))

    def reserve(self, offset: int, size: int, nbytes: int) -> None:
        """Reserve the pages now, so that a lack of memory is an error here, not a SIGBUS during a
        copy."""
        if nbytes > free_memory():
            raise no_room(nbytes)
        try:
            reserve_memory(self.descriptor, offset, size)
        except OSError as error:
            raise no_room(nbytes, error) from error

    def hollow_out(self, offset: int, size: int) -> None:
        """Return the pages to the system, and keep the addresses. If the system cannot do that, the
        slot keeps its pages."""
        if not PORTABLE and self.can_grow:
            LIBC.fallocate(self.descriptor, PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(size))

    def private(self, offset: int, borrowed: memoryview) -> memoryview:
        """Return the borrowed bytes in a private mapping. The kernel copies a page at its first
        write, so writes are not shared."""
        start = offset % mmap.ALLOCATIONGRANULARITY
        size = start + borrowed.nbytes
        mapping = PrivateMapping(
            self.descriptor, size, access=mmap.ACCESS_COPY, offset=offset - start
        )
        mapping.borrowed = borrowed
        return memoryview(mapping)[start:]


class PrivateMapping(mmap.mmap):
    borrowed: memoryview  # kept, so that it is not returned while the mapping reads its pages


class Slot:
    """One allocation in the arena of this process. It becomes reusable when the last reference to
    it is dropped."""

    __slots__ = ("__weakref__", "_arena", "_capacity", "address", "memory", "slab")

    def __init__(self, arena: Arena, slab: Any, offset: int, capacity: int, nbytes: int) -> None:
        self._arena = arena
        self._capacity = capacity
        self.slab: Any = slab  # a `Slab` or an `accelerator.DeviceSlab`
        self.address: int = slab.number << OFFSET_BITS | offset
        # a memoryview or an `accelerator.Region`
        self.memory: Any = slab.memory[offset : offset + nbytes]

    @property
    def pointer(self) -> int:
        """The address of the memory in this process."""
        start: int = self.slab.start
        return start + (self.address & OFFSET_MASK)

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not python_ends():
            self._arena.note_dead(self.slab, self.address & OFFSET_MASK, self._capacity)


class KeptSlot(NamedTuple):
    """A weak reference to a slot. If `kept` is set, the slot stays alive."""

    weak: weakref.ref[Slot]
    kept: Slot | None = None
    constant: object = None  # the object that the slot was copied from, if it cannot be written


class KeptSlots:
    """Slots that are lent again if their sources still have the same bytes.

    Functions that run repeatedly capture the same tables. Comparing a table takes less time than
    copying it, and constants are not even compared. A slot is kept once a comparison found the
    same bytes, so tables that change each time are not kept.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self.bytes_copied = 0
        # by address and size of the source
        self._known: OrderedDict[tuple[int, int], KeptSlot] = OrderedDict()

    def slot_with(self, pointer: int, nbytes: int, constant: object = None) -> Slot:
        """Return a slot with the bytes at `pointer`. The caller must not write to the slot.

        `constant` is the owner of these bytes, if they cannot be written. It is kept alive.

        Raises:
            SharedMemoryError: there is not enough memory for another slot.
        """
        key = pointer, nbytes
        with self._lock:
            known = self._known.pop(key, None)
        slot = None if known is None else known.weak()
        is_constant = not (constant is None or known is None or known.constant is None)
        if slot is not None and (is_constant or has_bytes(slot, *key)):
            found = KeptSlot(weakref.ref(slot), slot, constant)
        else:
            slot = self._copied(*key)
            found = KeptSlot(weakref.ref(slot))
        with self._lock:
            self._known[key] = found
            while len(self._known) > 1 and self._is_too_much():
                self._known.popitem(last=False)
        return slot

    def _copied(self, pointer: int, nbytes: int) -> Slot:
        try:
            slot = self._arena.allocate(nbytes)
        except SharedMemoryError:
            with self._lock:
                self._known.clear()
            slot = self._arena.allocate(nbytes)
        ctypes.memmove(slot.pointer, pointer, nbytes)
        self.bytes_copied += nbytes
        return slot

    def _is_too_much(self) -> bool:
        kept = sum(nbytes for (_, nbytes), each in self._known.items() if each.kept is not None)
        return len(self._known) > MOST_KEPT or kept > MOST_KEPT_BYTES


def has_bytes(slot: Slot, pointer: int, nbytes: int) -> bool:
    """Whether the slot has the same bytes as the memory at `pointer`."""
    difference: int = LIBC.memcmp(*map(ctypes.c_void_p, (slot.pointer, pointer, nbytes)))
    return difference == 0


class BorrowedMemory(NamedTuple):
    """Borrowed memory of another process. Keep this object while a third process reads it."""

    memory: memoryview
    slab: Slab


class Arena:
    """The shared memory that this process owns, on the CPU or on a device; `make_slab` decides.

    Slots are cut from large slabs. A slot larger than half a slab has a slab of its own. Up to
    `idle_bytes` of free memory are kept for reuse, and the rest is returned to the system. A slot
    of a shared slab then keeps its address range, without memory: it is hollow.
    """

    def __init__(
        self,
        owner: int,
        make_slab: Callable[[int, int], Any] = Slab.make,
        kind: int = 0,
        idle_bytes: float = IDLE_BYTES,
    ) -> None:
        self._next_number = owner << OWNER_BITS | kind << KIND_BITS
        self._make_slab = make_slab  # called with the slab's number and size
        self._most_idle = idle_bytes
        # capacity -> free slots with memory; no list is empty
        self._free: dict[int, list[tuple[Slab, int]]] = {}
        # capacity -> free slots without memory
        self._hollow: dict[int, list[tuple[Slab, int]]] = {}
        self._idle_bytes = 0  # in free slots
        self.bytes_in_use = 0  # in live slots
        self._open: Slab | None = None  # the slab that slots are cut from
        self._used = 0  # bytes of the open slab that are already cut
        # slots without references: slab, offset, capacity
        self._dead: deque[tuple[Slab, int, int]] = deque()
        self._slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._closed = False
        self.made: deque[Slab] = deque()  # slabs that are not yet announced to borrowers
        self.dropped: deque[int] = deque()  # numbers of dropped slabs, which borrowers should unmap
        self.slots_made = 0

    def allocate(self, nbytes: int) -> Slot:
        """Return a slot. Its memory is exactly `nbytes` long and starts at a page.

        Raises:
            SharedMemoryError: the machine does not have enough free memory.
            PoolClosedError: the arena is closed.
        """
        capacity = size_class(nbytes)
        with self._lock:
            if self._closed:
                raise PoolClosedError("the pool is closed, and its shared memory is gone")
            self.slots_made += 1
            self._reclaim_dead()
            free = self._fitting(capacity)
            if free is not None:
                capacity = free
                slab, offset = self._take_free(capacity)
            else:
                slab, offset = self._grow(capacity, nbytes)
            self.bytes_in_use += capacity
            return Slot(self, slab, offset, capacity, nbytes)

    def note_dead(self, slab: Slab, offset: int, capacity: int) -> None:
        """Record that a slot has lost its last reference. Finalizers call this."""
        if not self._closed:
            self._dead.append((slab, offset, capacity))

    def tidy(self) -> None:
        """Make dead slots reusable, and return surplus memory to the system."""
        if self._dead:
            with self._lock:
                self._reclaim_dead()

    def tell_again(self, numbers: Iterable[int]) -> None:
        """Announce these slabs again, because a borrower lacks them. Skip dropped slabs."""
        self.made.extend(
            slab for number in numbers if (slab := self._slabs.get(number)) is not None
        )

    def _reclaim_dead(self) -> None:
        """Make dead slots reusable. Assumes: the lock is held."""
        while self._dead:
            slab, offset, capacity = self._dead.popleft()
            self.bytes_in_use -= capacity
            self._idle_bytes += capacity
            free = self._free.pop(capacity, [])
            free.append((slab, offset))
            # This size moves to the end, so the least recently used size is dropped first.
            self._free[capacity] = free
            while self._idle_bytes > self._most_idle:
                self._drop(next(iter(self._free)))

    def _fitting(self, capacity: int) -> int | None:
        """Return the smallest capacity of a free slot that wastes no more than half of it."""
        if capacity in self._free:
            return capacity
        return min((size for size in self._free if capacity < size <= 2 * capacity), default=None)

    def _take_free(self, capacity: int) -> tuple[Slab, int]:
        free = self._free.pop(capacity)
        slot = free.pop()
        if free:
            self._free[capacity] = free
        self._idle_bytes -= capacity
        return slot

    def _drop(self, capacity: int) -> None:
        """Return the memory of one free slot of this size to the system."""
        slab, offset = self._take_free(capacity)
        if slab.nbytes == capacity:
            self.dropped.append(slab.number)  # unmapped here when its last view dies
        else:
            slab.hollow_out(offset, capacity)
            self._hollow.setdefault(capacity, []).append((slab, offset))

    def close(self) -> None:
        """Return all memory to the system. Each slab is unmapped when its last view dies."""
        with self._lock:
            self._closed = True
            self._free.clear()
            self._hollow.clear()
            self._open = None
            self.made.clear()
            self._dead.clear()

    def _grow(self, capacity: int, nbytes: int) -> tuple[Slab, int]:
        """Return a slab, perhaps a new one, and an offset for a slot, because no free slot fits.
        The pages are reserved."""
        if capacity > SLAB_BYTES // 2:
            slab = self._new_slab(capacity, nbytes)
            slab.reserve(0, capacity, nbytes)
            self.made.append(slab)
            return slab, 0
        hollow = self._hollow.get(capacity)
        while hollow and not hollow[-1][0].can_grow:
            hollow.pop()
        if hollow:
            slab, offset = hollow[-1]
            slab.reserve(offset, capacity, nbytes)
            return hollow.pop()
        if (
            self._open is None
            or self._used + capacity > self._open.nbytes
            or not self._open.can_grow
        ):
            self._open, self._used = self._new_slab(SLAB_BYTES, nbytes), 0
            self.made.append(self._open)
        self._open.reserve(self._used, capacity, nbytes)
        offset = self._used
        self._used += capacity
        return self._open, offset

    def _new_slab(self, size: int, nbytes: int) -> Slab:
        try:
            slab: Slab = self._make_slab(self._next_number, size)
        except (OSError, RuntimeError) as error:
            raise no_room(nbytes, error) from error
        self._next_number += 1
        self._slabs[slab.number] = slab
        return slab


class ForeignSlabs:
    """The slabs of other processes, and the memory that this process has borrowed from them.

    Each address is returned with the number of times that it was received, and the owner counts how
    often it was sent. So the owner can see whether a returned slot is on its way here again.

    Assumes: one thread borrows and collects. Any thread may call `find`.
    """

    def __init__(self, notify: Callable[[], None], copies_for_children: bool = PORTABLE) -> None:
        """If `copies_for_children`, a fork copies borrowed memory. The end of the module explains
        this.

        macOS can map named shared memory only as shared, never privately, so there it is True.
        """
        self.copies_for_children = copies_for_children
        self.slabs: dict[int, Any] = {}  # `Slab`s and `accelerator.DeviceSlab`s
        # slab number -> opens a slab on a device, at its first use
        self._elsewhere: dict[int, Callable[[], DeviceSlab]] = {}
        # descriptor and size of slabs that have not been used yet
        self._unmapped: dict[int, tuple[OwnedDescriptor, int]] = {}
        # Addresses to return without a view: the slab could not be mapped, or it is on a device,
        # where borrowed memory is copied at once.
        self._given_back: list[tuple[int, int]] = []
        self._missing: set[int] = set()  # slabs that are needed but did not arrive
        # pieces that are not available on this machine: address, bytes, reason
        self.lacking: Sequence[tuple[int, int, str]] = ()
        self.closed = False
        self.notify = notify  # called when there is something to collect
        # By address and size: the view that all borrowers in this process share, and how often the
        # address was received.
        self._views: dict[tuple[int, int], weakref.ref[memoryview]] = {}
        self._received: dict[tuple[int, int], int] = {}
        # pointer of a storage -> address, slab, view
        self._pointers: dict[int, tuple[int, Slab, weakref.ref[memoryview]]] = {}
        # key, pointer, view, and the `View` if it was made private
        self._dead: deque[tuple[tuple[int, int], int, weakref.ref[memoryview], View | None]] = (
            deque()
        )

    @property
    def bytes_in_use(self) -> int:
        """How many bytes are borrowed here."""
        return sum(nbytes for _, nbytes in list(self._views))

    def attach(self, number: int, descriptor: int | None, nbytes: int) -> None:
        """Add a slab to borrow from. The descriptor is None if this process had reached its limit
        of descriptors and could not receive it."""
        if descriptor is None:
            return
        if number in self.slabs or number in self._unmapped:  # it was requested twice
            os.close(descriptor)
        else:
            self._unmapped[number] = OwnedDescriptor(descriptor), nbytes

    def attach_elsewhere(self, number: int, open_slab: Callable[[], DeviceSlab]) -> None:
        """Add a slab on a device."""
        self._elsewhere[number] = open_slab

    def detach(self, number: int) -> None:
        """Remove a slab that its owner has dropped, or whose owner has died. Borrowed memory stays
        mapped."""
        slab = self.slabs.pop(number, None)
        if slab is not None and slab.elsewhere:
            slab.finish()
        self._elsewhere.pop(number, None)
        kept, _ = self._unmapped.pop(number, (None, 0))
        if kept is not None:
            kept.close()

    @property
    def numbers(self) -> list[int]:
        """The numbers of all slabs, mapped or not."""
        return [*self.slabs, *self._unmapped, *self._elsewhere]

    def slab(self, number: int) -> Any:
        """Return a slab. Its first use maps it.

        Raises:
            SharedMemoryError: the system refuses to map it; the caller may try again.
        """
        if number in self._unmapped and not self._unmapped[number][0].is_ours:
            # other code has closed the descriptor: request the slab again
            del self._unmapped[number]
        if number in self._unmapped:
            kept, nbytes = self._unmapped[number]
            try:
                self.slabs[number] = Slab(
                    number, storage_from_descriptor(os.dup(kept.number), nbytes)
                )
            except (OSError, RuntimeError, MemoryError) as error:
                raise no_mapping(f"{nbytes:,} bytes") from error
            del self._unmapped[number]
            kept.close()
        elif number in self._elsewhere:
            try:
                self.slabs[number] = self._elsewhere[number]()
            except (OSError, RuntimeError) as error:
                raise no_mapping(f"on a device: {error}") from error
            del self._elsewhere[number]
        if number not in self.slabs:
            self._missing.add(number)
            raise no_mapping("no file descriptor was free to receive it")
        return self.slabs[number]

    def borrow(
        self, address: int, nbytes: int, private: bool = False, findable: bool = True
    ) -> Any:
        """Return the memory at `address`.

        If `private`, others also use the memory, and must not see writes to what is returned.
        `find` finds only `findable` memory, so only that may be lent on.

        Raises:
            SharedMemoryError: it cannot be mapped here. It then counts as returned.
        """
        key = address, nbytes
        try:
            if self.lacking:
                self._check_lacking(address, nbytes)
            slab, offset = self.slab(slab_of(address)), address & OFFSET_MASK
        except SharedMemoryError:
            self._given_back.append((address, 1))
            raise
        if slab.elsewhere:
            # The reader copies the memory right after this, before it reports the return.
            self._given_back.append((address, 1))
            return slab.memory[offset : offset + nbytes]
        self._received[key] = self._received.get(key, 0) + 1
        known = self._views.get(key)
        memory = known() if known is not None else None
        if known is None or memory is None:
            memory = slab.memory[offset : offset + nbytes]
            pointer = slab.start + offset
            known = weakref.ref(memory, lambda view: self._died(key, pointer, view))
            self._views[key] = known
            if findable:
                self._pointers[pointer] = address, slab, known
            if not private:
                watch((known, pointer, nbytes, slab, self))
                return memory
        if not private:
            if id(known) not in SHARED and id(known) not in PRIVATE:
                watch((known, slab.start + offset, nbytes, slab, self))
            return memory
        if PORTABLE or nbytes <= COPY_BYTES or not slab.can_grow:
            return memoryview(bytearray(memory))
        mapping = slab.private(offset, memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        watch((weakref.ref(mapping, forget), start, nbytes, None, self))
        return mapping

    def take_missing(self) -> list[int]:
        """Return the slabs that were found missing since the last call. Their owners should send
        them again."""
        missing, self._missing = self._missing, set()
        return list(missing)

    def _check_lacking(self, address: int, nbytes: int) -> None:
        for start, size, why in self.lacking:
            if start < address + nbytes and address < start + size:
                raise SharedMemoryError(why)

    def find(self, core: torch.Tensor) -> tuple[int, BorrowedMemory] | None:
        """Return the address of `core` and its memory, if that memory is borrowed here.

        A call whose graph is rebuilt reads the memory again. Until then, writes to it must be
        counted, and PyTorch does not count writes to inference tensors. So these are found only in
        inference mode, where calls leave no graphs.
        """
        if core.is_inference() and not torch.is_inference_mode_enabled():
            return None
        address, slab, view = self._pointers.get(core.untyped_storage().data_ptr(), (0, None, None))
        memory = view() if view is not None else None
        if slab is None or memory is None:
            return None
        return address + int(core.storage_offset()) * core.element_size(), BorrowedMemory(
            memory, slab
        )

    def _died(self, key: tuple[int, int], pointer: int, view: weakref.ref[memoryview]) -> None:
        private = forget(view)
        if not self.closed:
            self._dead.append((key, pointer, view, private))
            self.notify()

    def hide(self, view: weakref.ref[memoryview], pointer: int) -> None:
        """Stop finding this memory, because other processes do not see later writes to it."""
        if self._pointers.get(pointer, (0, None, None))[2] is view:
            del self._pointers[pointer]

    def close(self) -> None:
        """Stop returning memory. Each slab is unmapped when its last view dies."""
        self.closed = True
        let_go(self)
        for number in list(self._unmapped):
            self.detach(number)
        for table in (
            self.slabs,
            self._elsewhere,
            self._views,
            self._received,
            self._pointers,
            self._dead,
        ):
            table.clear()

    def collect(self) -> list[tuple[int, int]]:
        """Return the addresses that became unused here since the last call, and how often each was
        received."""
        if WITHHELD:
            let_go()
        returned, self._given_back = self._given_back, []
        while self._dead:
            key, pointer, view, private = self._dead.popleft()
            if private is not None and not remap(private, mmap.MAP_SHARED):
                continue  # never return it, because later writes of its owner would be unseen here
            self.hide(view, pointer)
            # Otherwise it was borrowed again, and the death of the new view will report both.
            if self._views.get(key) is view:
                del self._views[key]
                returned.append((key[0], self._received.pop(key)))
        return returned


def size_class(nbytes: int) -> int:
    """Round up to 4, 5, 6 or 7 times a power of two pages. This wastes at most a quarter."""
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * PAGE


def no_mapping(why: str) -> SharedMemoryError:
    return SharedMemoryError(
        f"the system refuses to map another process's shared memory here ({why}); drop results "
        "that are no longer needed, or "
        "raise the limits of the process (ulimit -v, ulimit -n)"
    )


def no_room(nbytes: int, error: Exception | None = None) -> SharedMemoryError:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return SharedMemoryError(
            f"cannot allocate shared memory ({nbytes:,} bytes requested): the limit on file sizes "
            f"applies to it ({limit:,} bytes, and at least {SLAB_BYTES:,} are needed); raise the "
            "limit (ulimit -f unlimited)"
        )
    return SharedMemoryError(
        f"no room in shared memory for a tensor ({nbytes:,} bytes requested, {free_memory():,} "
        "bytes of memory free); "
        "drop results that are no longer needed, or cut the item into smaller ones"
    )


# --- borrowed memory in a forked child keeps its content as of the fork
#
# A shared mapping stays shared after a fork. The child would see later writes of the slot's owner
# and of its parent, and the parent would see the child's writes. So the child gets its own version
# of all memory that is borrowed at an `os.fork`. There are two ways:
#
#     mapped    [1] Before the fork the parent remaps the pages privately. So its writes and the
#               child's stay apart, page by page.
#               [2] The parent does not return the memory before the child has ended (`Token`),
#               because pages without writes are still the owner's.
#               [3] Once the view is dead, and before the memory is returned, it is shared again.
#     copied    The child copies the memory, and the parent waits. This is done if the memory cannot
#               be mapped privately or its descriptor is closed. Workers also do it, because the
#               memory of a worker that ends is returned even if its children live on.
#
# Guarantees: memory that another thread borrows during a fork is treated like memory that was
#     borrowed before it.
# Assumes: Python forks the children (`os.fork`, multiprocessing, `preexec_fn` of subprocess), or
#     they run another program at once. This process writes to no other memory in the pages of a
#     borrowed piece: workers have private copies of it.

LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PIECE = 1 << 20  # bytes copied at once
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
FIXED = 0x10  # MAP_FIXED, on Linux and on macOS
FAILED = ctypes.c_void_p(-1).value
ADD_SEALS, SEAL_WRITE = 1033, 0x08  # F_ADD_SEALS, F_SEAL_WRITE


# Borrowed memory that is in use: the memory, its address, size and slab (None if it was mapped
# privately from the beginning), and the object that returns it. This is a plain tuple because each
# result has one, and a class takes 0.1 us more.
View: TypeAlias = tuple[weakref.ref[memoryview], int, int, Slab | None, ForeignSlabs]

# all shared views of this process, by the id of the weak reference
SHARED: dict[int, View] = {}
# views that were mapped privately, or copied, because of a fork
PRIVATE: dict[int, View] = {}
FORKS: list[Fork] = []  # forks that are running
# Forks whose children still need memory, which is therefore not returned. Without a token, this
# lasts until the pool ends.
WITHHELD: list[Fork] = []
# Held while shared views become private, so that each does so only once. A second time would lose
# the writes after the first.
MAPPING = threading.RLock()


def watch(view: View) -> None:
    """Make sure that forked children see this memory as it was at the fork, until `forget`."""
    SHARED[id(view[0])] = view
    if FORKS:
        for fork in list(FORKS):
            fork.keep(view)
            fork.copies = True


def forget(memory: weakref.ref[memoryview]) -> View | None:
    """Forget a view that has died, and return it if it was made private. Finalizers call this."""
    return None if SHARED.pop(id(memory), None) is not None else PRIVATE.pop(id(memory), None)


def remap(view: View, how: int) -> bool:
    """Remap the pages. Return False if the system refuses, or if other code has closed the slab's
    descriptor."""
    slab, (start, size) = view[3], pages_of(view)
    assert slab is not None
    try:
        map_at(start, size, how, slab.descriptor, start - slab.start)
    except OSError:
        return False
    return True


def map_at(start: int, size: int, how: int, descriptor: int, offset: int) -> None:
    """Map pages at a fixed address. Raises OSError."""
    if LIBC.mmap(start, size, READ_WRITE, how | FIXED, descriptor, offset) == FAILED:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")


def pages_of(view: View) -> tuple[int, int]:
    """Return the start and size of all pages that contain the view."""
    _, first, nbytes, *_ = view
    start = first & -PAGE
    return start, -(-(first + nbytes - start) // PAGE) * PAGE


def copy_here(view: View) -> None:
    """Replace a view's pages with private copies, piece by piece, because reused memory is faster.

    Raises:
        SharedMemoryError: the system does not have enough memory.
    """
    start, size = pages_of(view)
    try:
        for piece in range(start, start + size, PIECE):
            nbytes = min(PIECE, start + size - piece)
            content = ctypes.string_at(piece, nbytes)
            map_at(piece, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            ctypes.memmove(piece, content, nbytes)
    except (OSError, MemoryError) as error:
        raise SharedMemoryError(
            f"a forked child has no memory for copies of its parent's tensors ({size:,} bytes), so "
            "it will see the parent's later changes to them; drop results before you fork"
        ) from error


class Token:
    """Shows whether a child or one of its children is alive. They inherit a mapping, and keep it
    even if they close all descriptors."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._start: int | None = None
        # Without the mapping, the end of the child goes unnoticed, and nothing is returned.
        with contextlib.suppress(OSError):
            self._descriptor = os.memfd_create("mpgrad-fork", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(self._descriptor, PAGE)
            start = LIBC.mmap(None, PAGE, READ_WRITE, mmap.MAP_SHARED, self._descriptor, 0)
            self._start = None if start == FAILED else start

    def leave_to_child(self) -> None:
        if self._start is not None:
            LIBC.munmap(self._start, PAGE)

    def is_held(self) -> bool:
        if self._start is None:
            return True
        try:
            fcntl.fcntl(self._descriptor, ADD_SEALS, SEAL_WRITE)
        except OSError:  # EBUSY: a process has a writable mapping
            return True
        return False

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def let_go(closed: ForeignSlabs | None = None) -> None:
    """Release memory that was kept for children that have ended. Keep nothing more for `closed`,
    which no longer returns memory."""
    for fork in list(WITHHELD):
        if closed is not None:
            fork.kept.pop(closed, None)
        if not fork.kept or (fork.token is not None and not fork.token.is_held()):
            with contextlib.suppress(ValueError):  # another thread has removed it
                WITHHELD.remove(fork)


def seen(memories: list[memoryview | None]) -> list[bool]:
    """Whether each memory is used by code here, so that a new child will see it. The others are
    kept only for earlier children.

    Assumes: `MAPPING` is held, so no fork withholds more between the two counts. Memory that is
    released between them counts as seen.
    """
    memories.append(memoryview(b""))  # only this list refers to it
    *counts, ours = [sys.getrefcount(memory) for memory in memories]
    kept = [some for fork in list(WITHHELD) for some in list(fork.kept.values())]
    withheld = Counter(id(each) for some in kept for each in some)
    return [
        count - ours > withheld[id(memory)] for count, memory in zip(counts, memories, strict=False)
    ]


class Fork:
    """A fork that a thread is running, and later the memory that is withheld for its child."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.copies = False  # the child copies memory, and the parent waits for it
        self.kept: dict[ForeignSlabs, list[memoryview]] = {}
        self.token: Token | None = None
        self._pipe: tuple[int, int] | None = None

    def keep(self, view: View) -> memoryview | None:
        """Withhold this memory. Return None if nothing uses it any more."""
        memory, foreign_slabs = view[0](), view[4]
        if memory is not None and not foreign_slabs.closed:
            self.kept.setdefault(foreign_slabs, []).append(memory)
        return memory

    def prepare(self) -> None:
        let_go()
        with MAPPING:
            views = [*PRIVATE.items(), *SHARED.items()]
            for (key, view), is_seen in zip(
                views, seen([view[0]() for _, view in views]), strict=True
            ):
                # the reference keeps it mapped
                memory = self.keep(view) if is_seen else None
                if memory is not None and key in SHARED:
                    self.copies |= not make_private(key, view)
        if self.kept or self.copies:
            self.token = None if PORTABLE else Token()
            with contextlib.suppress(OSError):  # no descriptor is free
                self._pipe = os.pipe()

    def in_parent(self) -> None:
        if self.token is not None:
            self.token.leave_to_child()
        if self._pipe is not None:
            reader, writer = self._pipe
            os.close(writer)
            if self.copies:
                os.read(reader, 1)
            os.close(reader)
        for foreign_slabs in [each for each in list(self.kept) if each.copies_for_children]:
            del self.kept[foreign_slabs]
        if self.kept:
            WITHHELD.append(self)
        for foreign_slabs in list(self.kept):
            foreign_slabs.notify()  # a waiting thread now checks whether the child has ended

    def in_child(self) -> None:
        try:
            for key, view in list(SHARED.items()):
                memory = view[0]()  # the reference keeps it mapped
                if memory is not None:
                    copy_here(view)
                    PRIVATE[key] = view
                    del SHARED[key]
        finally:
            if self._pipe is not None:
                reader, writer = self._pipe
                os.close(reader)
                if self.copies:
                    os.write(writer, b"\0")
                os.close(writer)
            for foreign_slabs in {view[4] for view in [*PRIVATE.values(), *SHARED.values()]}:
                foreign_slabs.close()  # only the parent returns memory


def make_private(key: int, view: View) -> bool:
    """Make a view private. Return False if that is not possible. Assumes: `MAPPING` is held."""
    memory, start, _, slab, foreign_slabs = view
    if slab is None or foreign_slabs.copies_for_children or not remap(view, mmap.MAP_PRIVATE):
        return False
    foreign_slabs.hide(memory, start)
    PRIVATE[key] = view
    del SHARED[key]
    return True


def before() -> None:
    FORKS.append(fork := Fork())
    fork.prepare()


def this_fork() -> Fork:
    return next(fork for fork in reversed(FORKS) if fork.thread == threading.get_ident())


def after_in_parent() -> None:
    FORKS.remove(fork := this_fork())
    fork.in_parent()


def after_in_child() -> None:
    global MAPPING
    fork = this_fork()
    FORKS.clear()
    WITHHELD.clear()
    MAPPING = threading.RLock()
    fork.in_child()


os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)
