"""The arena and what it lends, without processes: sizes, reuse, private and shared memory, who
gives it back."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
from conftest import linux_only, shared_memory_files

from mpgrad.errors import SharedMemoryError
from mpgrad.memory.arena import (
    COPY_BYTES,
    IDLE_BYTES,
    PAGE,
    PRIVATE,
    SHARED,
    SLAB_BYTES,
    Arena,
    ForeignSlabs,
    Slot,
    size_class,
)

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


def borrowed_pair(nbytes: int) -> tuple[ForeignSlabs, Slot]:
    arena = Arena(1)
    foreign_slabs = ForeignSlabs(lambda: None)
    slot = arena.allocate(nbytes)
    foreign_slabs.attach(slot.slab.number, os.dup(slot.slab.descriptor), slot.slab.nbytes)
    return foreign_slabs, slot


@pytest.mark.parametrize("nbytes", [100, 1_000_000])
def test_borrowed_memory_is_shared_and_private_memory_is_not(nbytes: int) -> None:
    foreign_slabs, slot = borrowed_pair(nbytes)
    slot.memory[3] = 7
    shared = foreign_slabs.borrow(slot.address, nbytes)
    private = foreign_slabs.borrow(slot.address, nbytes, private=True)
    assert shared[3] == private[3] == 7
    private[3] = 9
    assert slot.memory[3] == 7
    shared[3] = 8
    assert slot.memory[3] == 8 and private[3] == 9
    assert not foreign_slabs.collect()
    del shared
    private_again = foreign_slabs.borrow(slot.address, nbytes, private=True)
    del private
    gc.collect()
    assert private_again[3] == 8
    del private_again
    assert sum(times for _, times in foreign_slabs.collect()) == 3


def test_memory_is_returned_when_the_last_tensor_dies_not_before() -> None:
    foreign_slabs, slot = borrowed_pair(80_000)
    tensor = torch.frombuffer(foreign_slabs.borrow(slot.address, 80_000), dtype=torch.float64)
    part = tensor[5:10].view(5)
    assert foreign_slabs.find(part)[0] == slot.address + 40
    del tensor
    assert not foreign_slabs.collect()
    del part
    assert foreign_slabs.collect() == [(slot.address, 1)]
    assert foreign_slabs.find(torch.ones(3)) is None


def test_memory_borrowed_again_is_returned_once_for_both() -> None:
    foreign_slabs, slot = borrowed_pair(80_000)
    first = foreign_slabs.borrow(slot.address, 80_000)
    del first
    second = foreign_slabs.borrow(slot.address, 80_000)  # before the end of the first was told
    assert not foreign_slabs.collect()
    del second
    assert foreign_slabs.collect() == [(slot.address, 2)]


def test_a_free_slot_is_used_again_for_what_is_somewhat_smaller() -> None:
    """Those of bundles are of many sizes, and memory that is touched for the first time is dear."""
    arena = Arena(1)
    slot, smaller = arena.allocate(30 * PAGE), arena.allocate(17 * PAGE)
    address, used = slot.address, arena.bytes_in_use  # 32 pages, and 20
    del slot
    again = arena.allocate(18 * PAGE)  # as if it were as large as it was
    assert (
        again.address == address and again.memory.nbytes == 18 * PAGE and arena.bytes_in_use == used
    )
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


@linux_only("memory that is reserved, given up and mapped again through a descriptor")
@pytest.mark.parametrize("idle_bytes", [IDLE_BYTES, 0])
def test_a_file_that_got_the_number_of_a_slab(idle_bytes: int, tmp_path: Path) -> None:
    """Code that closes all that is open, and opens files then, found zeros behind its data, or
    holes in it."""
    arena = Arena(1, idle_bytes=idle_bytes)
    foreign_slabs = ForeignSlabs(lambda: None)
    free, kept = arena.allocate(4 * PAGE), arena.allocate(COPY_BYTES + PAGE)
    foreign_slabs.attach(kept.slab.number, os.dup(kept.slab.descriptor), kept.slab.nbytes)
    kept.memory[5] = 7
    foreign_slabs.borrow(kept.address, kept.memory.nbytes)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(file, b"mine" * PAGE)
    for slab in (kept.slab, foreign_slabs.slabs[kept.slab.number]):
        os.dup2(file, slab.descriptor, inheritable=False)
    os.close(file)
    private = foreign_slabs.borrow(kept.address, kept.memory.nbytes, private=True)
    private[6] = 8
    assert (private[5], kept.memory[5], kept.memory[6]) == (7, 7, 0)
    # it is a copy, on the heap, which a forked child has anyway: pages of it are not to be mapped
    # anew there
    assert not [view for view in (*SHARED.values(), *PRIVATE.values()) if view[4] is foreign_slabs]
    del free
    again = [arena.allocate(4 * PAGE) for _ in range(3)]
    for number, slot in enumerate(again):
        slot.memory[0] = number
    assert again[-1].slab is not kept.slab and [slot.memory[0] for slot in again] == [0, 1, 2]
    assert (tmp_path / "file").read_bytes() == b"mine" * PAGE
    with pytest.raises(OSError, match="close only what you open"):
        _ = kept.slab.descriptor
    numbers = {slab._kept._number for slab in (kept.slab, foreign_slabs.slabs[kept.slab.number])}
    foreign_slabs.close()
    arena.close()
    del kept, again, private, slot, slab
    gc.collect()
    for number in numbers:  # not closed with the memory
        assert os.path.samestat(os.fstat(number), os.stat(tmp_path / "file"))
        os.close(number)


@linux_only("a descriptor for each slab")
def test_a_slab_whose_descriptor_was_closed_before_it_was_mapped_is_asked_for_again(
    tmp_path: Path,
) -> None:
    """Its number may be another file's, which was mapped in its place, and closed."""
    foreign_slabs, slot = borrowed_pair(80_000)
    (kept, _) = foreign_slabs._unmapped[slot.slab.number]
    with open(tmp_path / "file", "wb") as file:
        os.dup2(file.fileno(), kept.number, inheritable=False)
        with pytest.raises(SharedMemoryError):
            foreign_slabs.borrow(slot.address, 80_000)
        assert foreign_slabs.take_missing() == [slot.slab.number]
        foreign_slabs.attach(slot.slab.number, os.dup(slot.slab.descriptor), slot.slab.nbytes)
        assert foreign_slabs.borrow(slot.address, 80_000).nbytes == 80_000
        os.close(kept._number)  # which nobody else has


@linux_only("posix_fallocate")
@pytest.mark.parametrize("why", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_to_reserve_memory_may_be_denied(why: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of a container may forbid it, and a file system may not have it: that was taken for
    a lack of memory."""

    def denied(*_: int) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "posix_fallocate", denied)
    slot = Arena(1).allocate(10_000)
    slot.memory[:3] = b"abc"


@linux_only("posix_fallocate")
@pytest.mark.parametrize(
    ("why", "words"),
    [(errno.ENOSPC, "no room in shared memory"), (errno.EFBIG, "ulimit -f unlimited")],
)
def test_what_reserving_memory_lacks_is_named(
    why: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(SharedMemoryError, match=words):
        Arena(1).allocate(10_000)
