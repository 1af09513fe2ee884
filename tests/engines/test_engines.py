"""The protocol of engines, tried with one whose two sides share no memory (`byte_pipe`)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import byte_pipe
import pytest
import torch
from conftest import passes_with

import mpgrad
from mpgrad.engines.kinds import ENGINES, Kind
from mpgrad.memory.addresses import OFFSET_MASK
from mpgrad.memory.arena import Arena
from mpgrad.testing import assert_same_as_serial
from mpgrad.wire.messages import NewSlab, SlabsGone
from mpgrad.wire.mirror import Mirror

HERE = Path(__file__).parent
# test_recovery.py passes too, in minutes: each worker that dies is followed by a program that imports torch
CORE = ("map", "backward", "reduction", "captures", "higher_order")


@contextlib.contextmanager
def pool_of_bytes() -> Iterator[mpgrad.Pool]:
    ENGINES["bytes"] = Kind(byte_pipe.TRAITS, byte_pipe.byte_pipes)
    sys_path, sys.path[:] = list(sys.path), [str(HERE), *sys.path]  # where its workers find it
    try:
        with mpgrad.Pool(2, engine="bytes") as pool:
            pool.map(time.sleep, [0.1] * 4, 1)
            yield pool
    finally:
        sys.path[:] = sys_path
        ENGINES.pop("bytes", None)


@pytest.fixture(scope="module")
def byte_pool(nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with pool_of_bytes() as pool:
        yield pool


@pytest.mark.quick
@pytest.mark.parametrize("size", [3, 5000], ids=["rides", "carried"])
def test_a_loop_without_shared_memory(byte_pool: mpgrad.Pool, size: int) -> None:
    weight = torch.linspace(1, 2, size, requires_grad=True)
    xs = [torch.full((size,), float(k), requires_grad=True) for k in range(5)]
    assert_same_as_serial(lambda x: (x * weight).sin() / weight, xs, byte_pool)


def test_what_was_carried_is_carried_once(byte_pool: mpgrad.Pool) -> None:
    weight = torch.ones(50_000, requires_grad=True)
    sent = byte_pool.stats().bytes_sent
    results = byte_pool.map(lambda k: ((weight * k).sum(), os.getpid()), range(40), 1)
    workers = len({pid for _, pid in results})  # on a busy machine one may have done it all
    assert workers <= (byte_pool.stats().bytes_sent - sent) / weight.nbytes < workers + 0.1


def test_what_lies_with_one_worker_is_carried_to_another(byte_pool: mpgrad.Pool) -> None:
    """Results that are given on, also after the caller has written to one."""
    first = byte_pool.map(lambda k: torch.full((30_000,), float(k)), range(4), 1)
    first[1].mul_(10)
    second = byte_pool.map(lambda x: x + 1, first, 1)
    first[1].add_(5)
    third = byte_pool.map(lambda x: x + 1, first, 1)
    assert [int(x[0]) for x in second] == [1, 11, 3, 4]
    assert [int(x[-1]) for x in third] == [1, 16, 3, 4]


@pytest.mark.slow
def test_a_worker_dies_and_another_gets_what_it_had(nursery: mpgrad.Pool) -> None:
    weight = torch.linspace(0, 1, 20_000, requires_grad=True)
    xs = [torch.full((20_000,), k / 4, requires_grad=True) for k in range(4)]
    with pool_of_bytes() as pool:
        results = pool.map(lambda x: (x * weight).exp(), xs, 1)
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
        found = torch.autograd.grad(torch.stack(results).sum(), [weight, *xs])
    expected = torch.autograd.grad(torch.stack([(x * weight).exp() for x in xs]).sum(), [weight, *xs])
    torch.testing.assert_close(found, expected)


def test_memory_of_the_other_side_is_given_back(byte_pool: mpgrad.Pool) -> None:
    scheduler: Any = byte_pool._scheduler
    byte_pool.map(lambda x: x + 1, [torch.ones(5000) for _ in range(4)], 1)
    mirrors = [worker.link._mirror for worker in scheduler.workers.values()]
    assert scheduler.wait_until(lambda: not any(mirror._lent for mirror in mirrors), 10)
    mirror = Mirror()
    assert mirror.enclose([SlabsGone([3])], ()) == ([SlabsGone([3])], ())
    _, _, (descriptor,) = mirror.open([NewSlab(7, 4096)], memoryview(b""))
    os.close(descriptor)
    assert mirror._slabs.keys() == {7}
    mirror.open([SlabsGone([7])], memoryview(b""))
    assert not mirror._slabs


@pytest.mark.slow
def test_the_core_tests_pass_without_shared_memory() -> None:
    passes_with(HERE / "byte_pipe.py", *CORE)


def test_what_is_carried_comes_after_its_slab() -> None:
    """Symptom: what was printed, or a slab that was gone, left first, and took bytes along that had no place there yet."""
    ours, theirs = Mirror(), Mirror()
    arena = Arena(1)
    slot = arena.allocate(64)
    slot.memory[:] = bytes(range(64))
    ours.carry(slot)
    assert ours.enclose([], ()) == ([], ())
    slab = slot.slab
    for sent in ([SlabsGone([slab.number])], [NewSlab(slab.number, slab.nbytes)]):
        messages, payload = ours.enclose(sent, (b"rides",))
        received, rest, descriptors = theirs.open(messages, memoryview(b"".join(payload)))
        assert received == sent and rest == b"rides"
        for descriptor in descriptors:
            os.close(descriptor)
    offset = slot.address & OFFSET_MASK
    assert theirs._slabs[slab.number].memory[offset : offset + 64] == slot.memory
    arena.close()
