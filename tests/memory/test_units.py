"""The parts by themselves, without processes: arena, carrier, structure, channel, autograd nodes, CPU counting, seeds."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import linux_only, shared_memory_files

from mpgrad import cpus
from mpgrad.autograd.call_node import attach
from mpgrad.autograd.capture_gate import Captures
from mpgrad.autograd.input_gates import gate
from mpgrad.autograd.remote_graph import Grads, Order, RemoteGraph
from mpgrad.memory.arena import IDLE_BYTES, PAGE, SLAB_BYTES, Arena, Lenders, Slot, size_class
from mpgrad.pickling import state, structure
from mpgrad.torch_state import modes
from mpgrad.wire import tensor_packing, tensor_refs
from mpgrad.wire.frames import Channel
from mpgrad.wire.messages import NewSlab, Returned

pytestmark = pytest.mark.quick

# --- arena


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


# --- carrier


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    arena, lenders = Arena(1), Lenders(lambda: None)
    payload = tensor_packing.Payload()
    placed = tensor_packing.Packer(arena).place(tensor, tensor_refs.flags_of(tensor))
    for slab in arena.made:
        lenders.attach(slab.number, os.dup(slab.descriptor), slab.nbytes)
    ref = payload.add(placed)
    riding = memoryview(bytearray(b"".join(payload.parts)))
    return tensor_refs.view(ref, riding, lambda ref: lenders.borrow(ref.place, ref.nbytes))


@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16, torch.int16, torch.bool])
def test_every_layout_of_a_tensor_arrives(size: int, dtype: torch.dtype) -> None:
    base = (torch.randn(4, 5 * size, 6) * 3).to(dtype)
    views = [base, base.transpose(0, 2), base[1:, ::2], base[:, :0], base[0, 0, 0], base[:1].expand(7, -1, -1), base.mT[2]]
    if dtype.is_complex:
        views += [base.conj(), base.conj().imag]
    for each in views:
        arrived = round_trip(each)
        assert torch.equal(arrived, each.resolve_conj().resolve_neg())
        assert arrived.dtype == dtype or not dtype.is_complex or arrived.dtype == torch.float32
        assert not arrived._is_view()


def test_the_payload_keeps_tensors_aligned() -> None:
    payload = tensor_packing.Payload()
    packing = tensor_packing.Packer(Arena(1))
    refs = [payload.add(packing.place(torch.ones(n, dtype=torch.int8), 0)) for n in (1, 17, 3)]
    assert [(-1 - ref.place) % tensor_refs.ALIGNMENT for ref in refs] == [0, 0, 0]


# --- structure


def test_pickles_without_tensors() -> None:
    a, b = torch.ones(1000, requires_grad=True), torch.zeros(2)
    pickled, tensors = structure.dumps({"x": [a, (b, a)], "n": 3})
    assert [id(t) for t in tensors] == [id(a), id(b)] and len(pickled) < 100
    value = structure.loads(pickled, [b, a])
    assert value["x"][0] is b and value["x"][1][0] is a and value["x"][1][1] is b and value["n"] == 3


@pytest.mark.parametrize("dumps", [structure.dumps, lambda value: state.dumps_arguments(value, None)])
def test_tensors_are_not_kept_by_what_pickled_them(dumps: Any) -> None:
    numpy = pytest.importorskip("numpy")
    tensor, array = torch.ones(3), numpy.ones(5000)  # out of band
    refs = [weakref.ref(tensor), weakref.ref(array)]
    gc.disable()  # a cycle would wait for it
    try:
        dumps({"tensor": tensor, "array": array})
        del tensor, array
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


# --- channel


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=False), Channel(theirs, blocking=False)


def test_frames_arrive_whole_in_any_pieces() -> None:
    ours, theirs = pair()
    payloads = [os.urandom(size) for size in (0, 1, 100, 300_000, 5_000_000, 7)]
    for number, payload in enumerate(payloads):
        ours.send([Returned([(number, 1)])], [payload])
    assert ours.has_outgoing  # the pipe does not hold 5 MB, and nobody reads yet
    received = []
    while len(received) < len(payloads):
        ours.flush()
        while (frame := theirs.receive()) is not None:
            received.append(frame)
    assert [bytes(frame.payload) for frame in received] == payloads
    assert [frame.messages[0].slots[0][0] for frame in received] == list(range(len(payloads)))
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_a_worker_that_is_stopped_and_continued_sends_the_rest() -> None:
    """A send that a signal interrupts has sent a part; what was left stayed with the worker, and the parent waited for ever."""
    ours, theirs = socket.socketpair()
    code = (
        "import socket, sys; from mpgrad.wire.frames import Channel; from mpgrad.wire.messages import Returned;"
        "end = Channel(socket.socket(fileno=int(sys.argv[1])), blocking=True);"
        "print('here', flush=True);"
        "end.send([Returned([])], [b'x' * 1_000_000]); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], **pipes) as worker:  # type: ignore[call-overload]
        theirs.close()
        ours.settimeout(5)
        received = bytearray()
        try:
            assert worker.stdout.readline() == b"here\n"
            state = psutil.Process(worker.pid)
            while len(received) < 1_000_000:
                while state.status() == psutil.STATUS_RUNNING:  # until there is no room in the pipe, and it sleeps
                    pass
                os.kill(worker.pid, signal.SIGSTOP)
                while state.status() != psutil.STATUS_STOPPED:
                    pass
                received += ours.recv(1 << 16)
                os.kill(worker.pid, signal.SIGCONT)
                while state.status() == psutil.STATUS_STOPPED:
                    pass
        finally:
            worker.kill()
    ours.close()


def test_descriptors_arrive_with_their_frames(tmp_path: Path) -> None:
    ours, theirs = pair()
    for number in range(3):
        with open(tmp_path / f"file{number}", "w") as file:
            ours.send([NewSlab(number, 1)], [b"x" * 1000], [file.fileno()])
    for number in range(3):
        frame = theirs.receive()
        if frame is None:  # one read takes the descriptors of one frame; the pipe is still readable
            frame = theirs.receive()
        assert frame is not None and frame.messages == [NewSlab(number, 1)]
        descriptor = theirs.take_descriptor()
        assert descriptor is not None and os.path.samestat(os.fstat(descriptor), os.stat(tmp_path / f"file{number}"))
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    ours.close()
    theirs.close()


# --- autograd, with a home that is no process


class FakeHome:
    """Answers a backward with the gradient times 10, and records the order of events."""

    deterministic = False
    timeout = None
    reach: Any = None

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads) -> FakeHome.Reply:
        self.events.append(("send", graph.index))
        return self.Reply(self, graph.index, [grad * 10 for (grad,) in grads for _ in order.wanted])

    def capture_gradients(self, task: int) -> Iterator[tuple[tuple[()], list[torch.Tensor | None]]]:
        self.events.append(("captures", -1))
        yield (), [torch.full((2,), 7.0)]

    def release(self, graph: RemoteGraph) -> None:
        self.events.append(("release", graph.index))

    class Reply:
        graph = None

        def __init__(self, home: FakeHome, index: int, grads: list[torch.Tensor | None]) -> None:
            self.home, self.index, self.grads = home, index, grads

        def gradients(self) -> list[torch.Tensor | None]:
            self.home.events.append(("wait", self.index))
            return self.grads


def test_everything_is_sent_before_anything_is_waited_for() -> None:
    home = FakeHome()
    xs = [torch.ones(3, requires_grad=True) for _ in range(4)]
    capture = torch.ones(2, requires_grad=True)
    token = Captures(home, [capture]).token()
    results = [
        attach(RemoteGraph(home, None, 0, index), [torch.ones(3)], token, [gate(x * 2)])[0] for index, x in enumerate(xs)
    ]
    sum(result.sum() for result in results).backward()
    names = [name for name, _ in home.events]
    assert names == ["send"] * 4 + ["wait"] * 4 + ["captures"]
    assert [index for name, index in home.events if name == "wait"] == [3, 2, 1, 0]
    assert all(torch.equal(x.grad, torch.full((3,), 20.0)) for x in xs)
    assert torch.equal(capture.grad, torch.full((2,), 7.0))
    home.events.clear()
    del results
    gc.collect()
    assert sorted(home.events) == [("release", index) for index in range(4)]


# --- CPUs


def test_cgroup_quotas(tmp_path: Path) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    assert cpus.cgroup_quota(tmp_path, membership) == 1.5
    membership.write_text("0::/elsewhere\n")
    assert cpus.cgroup_quota(tmp_path, membership) == math.inf
    (tmp_path / "cpu" / "old").mkdir(parents=True)
    (tmp_path / "cpu" / "old" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "old" / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("7:memory:/old\n4:cpu,cpuacct:/old\n")
    assert cpus.cgroup_quota(tmp_path, membership) == 0.5


@linux_only("sched_getaffinity and cgroups")
def test_usable_cpus_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "cgroup_quota", lambda root, membership: math.inf)
    assert cpus.usable_cpus() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert cpus.usable_cpus() == 16
    monkeypatch.setattr(cpus, "cgroup_quota", lambda root, membership: 2.5)
    assert cpus.usable_cpus() == 3
    monkeypatch.setattr(cpus, "cgroup_quota", lambda root, membership: 0.2)
    assert cpus.usable_cpus() == 1


# --- seeds


def test_split_mix_against_the_published_sequence() -> None:
    # the first outputs of SplitMix64 seeded with 1234567, as printed on rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    golden = 0x9E3779B97F4A7C15
    state = 1234567
    outputs = []
    for _ in range(3):
        state = (state + golden) & modes.MASK
        outputs.append(modes.finish_mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
