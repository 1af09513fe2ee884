"""The arena and what it lends, without processes: sizes, reuse, private and shared memory, who gives it back."""

from __future__ import annotations

import gc
import itertools
import os
import threading

import pytest
import torch
from conftest import linux_only, shared_memory_files

from mpgrad.memory.arena import IDLE_BYTES, PAGE, SLAB_BYTES, Arena, Lenders, Slot, size_class

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 9 * PAGE, 1_000_003, 100_000_000])
def test_size_classes_waste_at_most_a_quarter(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes and size % PAGE == 0
    assert size <= max(PAGE, nbytes * 1.25 + PAGE)
    assert size_class(size) == size


def test_slots_are_reused_and_disjoint() -> None:
    arena = Arena(1)
    slots = [arena.allocate(10_000) for _ in range(50)]
    ranges = sorted((slot.address, slot.address + 10_000) for slot in slots)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    addresses = {slot.address for slot in slots}
    slots.clear()
    assert arena.allocate(9_000).address in addresses
    assert len({slot.slab.number for slot in slots}) <= 1


def test_large_slots_have_slabs_of_their_own_and_go_back_to_the_system() -> None:
    arena = Arena(1)
    slots = [arena.allocate(SLAB_BYTES) for _ in range(6)]
    assert len({slot.slab.number for slot in slots}) == 6
    arena.made.clear()  # as when borrowers have been told
    before = shared_memory_files()
    slots.clear()
    arena.tidy()
    assert len(arena.dropped) == 2 and shared_memory_files() == before - 2  # 256 MiB stay for reuse
    arena.allocate(SLAB_BYTES).memory[0] = 1
    assert shared_memory_files() == before - 2


@linux_only("punching holes into a memory file")
def test_small_slots_beyond_what_is_kept_lose_their_memory_and_get_it_back() -> None:
    arena = Arena(1)
    slots = [arena.allocate(SLAB_BYTES // 4) for _ in range(24)]
    for slot in slots:
        slot.memory[:3] = b"abc"
    files = {slot.slab.descriptor for slot in slots}

    def used() -> int:
        return sum(os.fstat(file).st_blocks * 512 for file in files)

    assert used() == 24 * (SLAB_BYTES // 4)
    del slot
    slots.clear()
    arena.tidy()
    assert used() == IDLE_BYTES
    slots = [arena.allocate(SLAB_BYTES // 4) for _ in range(24)]
    assert {slot.slab.descriptor for slot in slots} == files and used() == 24 * (SLAB_BYTES // 4)
    for slot in slots:
        slot.memory[:3] = b"xyz"


def borrowed_pair(nbytes: int) -> tuple[Lenders, Slot]:
    arena = Arena(1)
    lenders = Lenders(lambda: None)
    slot = arena.allocate(nbytes)
    lenders.attach(slot.slab.number, os.dup(slot.slab.descriptor), slot.slab.nbytes)
    return lenders, slot


@pytest.mark.parametrize("nbytes", [100, 1_000_000])
def test_borrowed_memory_is_shared_and_private_memory_is_not(nbytes: int) -> None:
    lenders, slot = borrowed_pair(nbytes)
    slot.memory[3] = 7
    shared = lenders.borrow(slot.address, nbytes)
    private = lenders.borrow(slot.address, nbytes, private=True)
    assert shared[3] == private[3] == 7
    private[3] = 9
    assert slot.memory[3] == 7
    shared[3] = 8
    assert slot.memory[3] == 8 and private[3] == 9
    assert not lenders.collect()
    del shared
    private_again = lenders.borrow(slot.address, nbytes, private=True)
    del private
    gc.collect()
    assert private_again[3] == 8
    del private_again
    assert sum(times for _, times in lenders.collect()) == 3


def test_memory_is_returned_when_the_last_tensor_dies_not_before() -> None:
    lenders, slot = borrowed_pair(80_000)
    tensor = torch.frombuffer(lenders.borrow(slot.address, 80_000), dtype=torch.float64)
    part = tensor[5:10].view(5)
    assert lenders.find(part)[0] == slot.address + 40
    del tensor
    assert not lenders.collect()
    del part
    assert lenders.collect() == [(slot.address, 1)]
    assert lenders.find(torch.ones(3)) is None


def test_memory_borrowed_again_is_returned_once_for_both() -> None:
    lenders, slot = borrowed_pair(80_000)
    first = lenders.borrow(slot.address, 80_000)
    del first
    second = lenders.borrow(slot.address, 80_000)  # before the end of the first was told
    assert not lenders.collect()
    del second
    assert lenders.collect() == [(slot.address, 2)]


def test_a_free_slot_is_used_again_for_what_is_somewhat_smaller() -> None:
    """Those of bundles are of many sizes, and memory that is touched for the first time is dear."""
    arena = Arena(1)
    slot, smaller = arena.allocate(30 * PAGE), arena.allocate(17 * PAGE)
    address, used = slot.address, arena.bytes_in_use  # 32 pages, and 20
    del slot
    again = arena.allocate(18 * PAGE)  # as if it were as large as it was
    assert again.address == address and again.memory.nbytes == 18 * PAGE and arena.bytes_in_use == used
    del again
    small = arena.allocate(14 * PAGE)  # would waste more than half
    assert small.address != address
    del small, smaller
    exact = arena.allocate(17 * PAGE)  # of those that fit the smallest
    assert exact.address != address and arena.allocate(30 * PAGE).address == address


def test_threads_allocate_and_free_at_once() -> None:
    arena = Arena(1)
    errors: list[str] = []

    def work(mark: int) -> None:
        for _ in range(500):
            slot = arena.allocate(20_000)
            slot.memory[0] = mark
            slot.memory[19_999] = mark
            if slot.memory[0] != mark or slot.memory[19_999] != mark:
                errors.append("two threads had one slot")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    arena.tidy()
    assert sum(len(free) for free in arena._free.values()) <= 2 * 4  # each thread had two at a time
