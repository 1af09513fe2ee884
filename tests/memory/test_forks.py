"""What forked children see of results, gradients and inputs, which lie in shared memory: what was
there at the fork, for ever.

They read the numbers of later calls, once the caller had dropped its results, and what they wrote
appeared in the caller.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import eventually, linux_only, open_descriptors
from inside import borrowed_by

import mpgrad
from mpgrad.memory import arena as arenas
from mpgrad.memory.arena import Arena, ForeignSlabs, Slot
from mpgrad.system import PORTABLE

pytestmark = pytest.mark.quick

SIZE = 5_000  # of float32: too large to travel in a message


class Child:
    """A forked process that answers with what `look()` gives, once it is asked."""

    def __init__(self, look: Callable[[], object], fork: Callable[[], int] = os.fork) -> None:
        asked, self._ask = os.pipe()
        self._answer, answered = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            try:
                os.close(self._ask)
                os.read(asked, 1)
                os.write(answered, pickle.dumps(look()))
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answered)

    def ask(self) -> Any:
        os.write(self._ask, b"\0")
        os.close(self._ask)
        with open(self._answer, "rb") as file:
            answer = pickle.load(file)  # other children may hold its other end
        os.waitpid(self.pid, 0)
        return answer


def full(number: float) -> torch.Tensor:
    return torch.full((SIZE,), float(number))


def numbers(tensors: Sequence[torch.Tensor | None]) -> list[float]:
    found = []
    for tensor in tensors:
        assert tensor is not None and bool((tensor == tensor[0]).all())
        found.append(float(tensor[0]))
    return found


def use_memory_again(pool: mpgrad.Pool) -> None:
    for _ in range(3):
        pool.map(full, range(100, 108))


def test_a_child_reads_what_was_there_at_the_fork(pool: mpgrad.Pool) -> None:
    results = pool.map(full, range(4))
    child = Child(lambda: numbers(results))
    results.clear()
    use_memory_again(pool)
    assert child.ask() == [0, 1, 2, 3]


def test_children_of_several_epochs(pool2: mpgrad.Pool) -> None:
    """They saved epochs 2, 3, 2, 3 in the place of 0, 1, 2, 3."""
    children = []
    for epoch in range(4):
        results = pool2.map(full, [epoch] * 3)
        children.append(Child(lambda results=results: numbers(results)))  # type: ignore[misc]
        del results
    use_memory_again(pool2)
    assert [child.ask() for child in children] == [[epoch] * 3 for epoch in range(4)]


def test_what_a_child_writes_is_its_own(pool: mpgrad.Pool) -> None:
    x = torch.ones(SIZE, requires_grad=True)
    (y,) = pool.map(lambda t: 3 * t, [x])
    y.sum().backward()
    assert x.grad is not None
    grad = x.grad

    def write() -> list[float]:
        y.detach().fill_(7)
        grad.zero_()
        return numbers([y.detach(), grad])

    assert Child(write).ask() == [7, 0]
    assert numbers([y.detach(), grad]) == [3, 3]


def test_what_the_caller_writes_is_its_own(pool: mpgrad.Pool) -> None:
    results = pool.map(full, range(3))
    child = Child(lambda: numbers(results))
    for result in results:
        result += 10
    assert child.ask() == [0, 1, 2]
    assert numbers(results) == [10, 11, 12]
    # workers get what the caller has written
    assert numbers(pool.map(torch.neg, results)) == [-10, -11, -12]


def test_a_grandchild_reads_what_was_there_at_the_first_fork(pool2: mpgrad.Pool) -> None:
    """Also once its parent has ended, and all descriptors are closed, as daemons do it."""
    results = pool2.map(full, range(4))
    reader, writer = os.pipe()
    asked, ask = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.dup2(asked, 0)
            os.dup2(writer, 1)
            os.closerange(3, 1 << 12)
            os.read(0, 1)
            os.write(1, pickle.dumps(numbers(results)))
        os._exit(0)
    os.wait()
    os.close(writer)
    del results
    use_memory_again(pool2)
    os.write(ask, b"\0")
    with open(reader, "rb") as file:
        assert pickle.loads(file.read()) == [0, 1, 2, 3]
    os.close(asked)
    os.close(ask)


def test_a_fork_in_a_thread(pool2: mpgrad.Pool) -> None:
    results = pool2.map(full, range(4))
    children: list[Child] = []
    threads = [
        threading.Thread(target=lambda: children.append(Child(lambda: numbers(results))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.clear()
    use_memory_again(pool2)
    assert [child.ask() for child in children] == [[0, 1, 2, 3]] * 4


def test_a_child_with_a_pool_of_its_own(pool2: mpgrad.Pool) -> None:
    results = pool2.map(full, range(4))

    def look() -> list[float]:
        with mpgrad.Pool(1, engine="inline") as own:
            use_memory_again(own)
            made = own.map(torch.neg, results)
            grandchild = Child(lambda: numbers(results + made))
            made.clear()
            use_memory_again(own)
            return list(grandchild.ask())

    child = Child(look)
    results.clear()
    use_memory_again(pool2)
    assert child.ask() == [0, 1, 2, 3, 0, -1, -2, -3]


def test_results_of_a_closed_pool() -> None:
    with mpgrad.Pool(1, engine="thread") as pool:
        results = pool.map(full, range(3))
    assert Child(lambda: numbers([result.fill_(7) for result in results])).ask() == [7, 7, 7]
    child = Child(lambda: numbers(results))
    results[0].fill_(8)
    assert numbers(results) == [8, 1, 2] and child.ask() == [0, 1, 2]


class Loaded(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tensors[index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader(pool2: mpgrad.Pool) -> None:
    data = Loaded(pool2.map(full, range(40)))
    fork: Any = multiprocessing.get_context("fork")
    loader = torch.utils.data.DataLoader(
        data, batch_size=1, num_workers=2, multiprocessing_context=fork, prefetch_factor=1
    )
    batches = iter(loader)
    found = [next(batches)[0]]
    data._tensors = []
    use_memory_again(pool2)
    found += [batch[0] for batch in batches]
    assert numbers(found) == list(range(40))


# --- in workers


def helped(x: torch.Tensor, folder: Path) -> float:
    """Leaves a helper behind, which looks at the input when it is asked."""
    if os.fork() == 0:
        try:
            (folder / "go").read_bytes()  # until the test writes there
            (folder / "said").write_bytes(pickle.dumps(numbers([x])))
        finally:
            os._exit(0)
    return float(x[0])


@pytest.mark.parametrize("size", [SIZE, 300_000], ids=["copied or shared", "mapped privately"])
@pytest.mark.parametrize("calls", [None, 1], ids=["worker stays", "worker ends"])
def test_a_helper_that_a_task_has_forked(
    fork_server: mpgrad.Pool, size: int, calls: int | None, tmp_path: Path
) -> None:
    """It read 5.0 where 1.0 is right."""
    for name in ("go", "said"):
        os.mkfifo(tmp_path / name)
    with mpgrad.Pool(1, maxtasksperchild=calls) as pool:
        assert pool.apply(helped, (torch.ones(size), tmp_path)) == 1
        for _ in range(4):
            assert pool.apply(torch.sum, (torch.full((size,), 5.0),)) == 5 * size
        (tmp_path / "go").write_bytes(b"\0")
        assert pickle.loads((tmp_path / "said").read_bytes()) == [1]


def spoils(x: torch.Tensor) -> float:
    child = Child(lambda: x.fill_(9) is x)
    child.ask()
    return float(x[0])


def test_what_a_helper_writes_is_its_own(pool: mpgrad.Pool) -> None:
    assert pool.map(spoils, [full(1), full(2)]) == [1, 2]


# --- what it costs, and what is left


def borrowed(
    count: int, copies: bool = PORTABLE
) -> tuple[ForeignSlabs, list[Slot], list[torch.Tensor]]:
    arena = Arena(1)
    foreign_slabs = ForeignSlabs(lambda: None, copies)
    slots = [arena.allocate(4 * SIZE) for _ in range(count)]
    slab = slots[0].slab
    foreign_slabs.attach(slab.number, os.dup(slab.descriptor), slab.nbytes)
    for number, slot in enumerate(slots):
        torch.frombuffer(slot.memory, dtype=torch.float32).fill_(number)
    tensors = [
        torch.frombuffer(foreign_slabs.borrow(slot.address, 4 * SIZE), dtype=torch.float32)
        for slot in slots
    ]
    return foreign_slabs, slots, tensors


def write(slots: Sequence[Slot], number: float) -> None:
    for slot in slots:
        torch.frombuffer(slot.memory, dtype=torch.float32).fill_(number)


@linux_only("private mappings")
def test_memory_is_given_back_when_the_child_has_ended() -> None:
    foreign_slabs, slots, tensors = borrowed(3)
    child = Child(lambda: numbers(tensors))
    tensors[0].fill_(50)  # a page of our own, which is not to be seen later
    tensors.clear()
    assert foreign_slabs.collect() == []
    assert child.ask() == [0, 1, 2]
    assert sorted(foreign_slabs.collect()) == [(slot.address, 1) for slot in slots]
    write(slots, 60)
    again = [
        torch.frombuffer(foreign_slabs.borrow(slot.address, 4 * SIZE), dtype=torch.float32)
        for slot in slots
    ]
    assert numbers(again) == [60, 60, 60]


@linux_only("private mappings")
def test_memory_of_an_idle_pool_is_given_back_when_the_child_has_ended(pool2: mpgrad.Pool) -> None:
    results = pool2.map(full, range(3))
    addresses = borrowed_by(pool2)
    child = Child(lambda: numbers(results))
    results.clear()
    child.ask()
    eventually(lambda: not addresses & borrowed_by(pool2))


@linux_only("private mappings")
def test_children_that_overlap_keep_only_what_they_see() -> None:
    """What was kept for one was kept for the next one, too: where there always was one, nothing was
    ever given back."""
    foreign_slabs, slots, tensors = borrowed(3)
    children = [Child(lambda: numbers(tensors))]
    tensors.pop()
    children.append(Child(lambda: numbers(tensors)))
    tensors.clear()
    children.append(Child(lambda: numbers(tensors)))
    assert children.pop(0).ask() == [0, 1, 2]
    assert foreign_slabs.collect() == [(slots[2].address, 1)]
    write(slots[2:], 60)
    assert children.pop(0).ask() == [0, 1]
    assert sorted(foreign_slabs.collect()) == [(slot.address, 1) for slot in slots[:2]]
    assert children.pop().ask() == []


@pytest.mark.parametrize("copies", [False, True], ids=["mapped", "copied"])
def test_many_children_leave_no_descriptors(copies: bool) -> None:
    foreign_slabs, slots, tensors = borrowed(3, copies or PORTABLE)
    before = sorted(open_descriptors())
    for _ in range(8):
        assert Child(lambda: numbers(tensors)).ask() == [0, 1, 2]
    foreign_slabs.collect()
    assert sorted(open_descriptors()) == before
    tensors.clear()
    assert len(foreign_slabs.collect()) == len(slots)


@pytest.mark.parametrize("lacking", ["mappings", "descriptors", "the slab's descriptor"])
def test_where_something_is_lacking(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign_slabs, slots, tensors = borrowed(3)
    (slab,) = foreign_slabs.slabs.values()
    number = slab.descriptor

    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "none left")

    def fork() -> int:
        if lacking == "mappings":
            monkeypatch.setattr(arenas, "remap", lambda view, how: False)
        elif lacking == "descriptors":
            monkeypatch.setattr(os, "pipe", refused)
            monkeypatch.setattr(os, "memfd_create", refused, raising=False)
        else:  # somebody has closed it, and its number is another file's
            os.dup2(1, number)
        with monkeypatch.context():
            return os.fork()

    child = Child(lambda: numbers(tensors), fork)
    monkeypatch.undo()
    tensors.clear()
    if not PORTABLE:
        assert foreign_slabs.collect() == []
    if lacking != "descriptors":  # else the child has no copies, or nobody has waited for them
        write(slots, 60)
    assert child.ask() == [0, 1, 2]
    foreign_slabs.close()  # nothing is kept any longer
    if lacking == "the slab's descriptor":
        os.close(number)  # which is ours now


@pytest.mark.parametrize("copies", [False, True], ids=["mapped", "copied"])
def test_what_another_thread_borrows_during_a_fork(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads may run between the fork and what prepares it."""
    foreign_slabs, slots, tensors = borrowed(2, copies or PORTABLE)
    prepare = arenas.Fork.prepare
    tensors.pop()
    foreign_slabs.collect()

    def borrow() -> None:
        tensors.append(
            torch.frombuffer(foreign_slabs.borrow(slots[1].address, 4 * SIZE), dtype=torch.float32)
        )

    def prepare_and_borrow(fork: arenas.Fork) -> None:
        prepare(fork)
        borrower = threading.Thread(target=borrow)
        borrower.start()
        borrower.join()

    monkeypatch.setattr(arenas.Fork, "prepare", prepare_and_borrow)
    child = Child(lambda: numbers(tensors))
    monkeypatch.undo()
    tensors.pop()
    returned = foreign_slabs.collect()
    if returned:
        write([slots[1]], 60)
    assert returned == [] or copies or PORTABLE
    assert child.ask() == [0, 1]


def test_programs_that_are_started_keep_nothing() -> None:
    foreign_slabs, slots, tensors = borrowed(1)
    with subprocess.Popen(["sleep", "60"], preexec_fn=os.getpid) as program:
        tensors.clear()
        assert foreign_slabs.collect() == [(slots[0].address, 1)]
        program.kill()
