"""A worker that has run dry gets what another one has been given and has not begun."""

from __future__ import annotations

import collections
import itertools
import math
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import PATIENCE, first_are_quick, staffed
from inside import bundle, measured, pretend_seconds_of_calls, pretend_seconds_of_items

import mpgrad
from mpgrad.calls import operations
from mpgrad.machine.deaths import Death
from mpgrad.machine.policy import MOST_BUNDLED, NEAR
from mpgrad.machine.queue import SORTED, CallQueue
from mpgrad.machine.under_way import Chunk, SentChunks
from mpgrad.scheduling.worker_handle import WatchedProgressRecord
from mpgrad.wire.agent_messages import ProgressRecord, in_order
from mpgrad.workers.run import ProgressWriter


@pytest.fixture
def pool(fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(2) as own:
        yield own


def run(item: tuple[int, float, str]) -> tuple[int, int]:
    """Take so many seconds; if they are negative, wait until so many items have been begun."""
    number, seconds, folder = item
    with open(Path(folder) / str(number), "a") as file:  # who ran it
        file.write(f"{os.getpid()}\n")
    time.sleep(max(0.0, seconds))
    deadline = time.monotonic() + PATIENCE
    while len(os.listdir(folder)) < -seconds:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(os.listdir(folder))} items were begun, not {-seconds:.0f}")
        time.sleep(1e-3)
    return number, os.getpid()


def runs(folder: Path) -> list[int]:
    return [
        len((folder / name).read_text().split()) for name in sorted(os.listdir(folder), key=int)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "most"), [(iter, 1), (list, 2 * MOST_BUNDLED)], ids=["one by one", "in bundles"]
)
def test_what_stands_behind_a_long_call_goes_to_others(
    source: Callable[[list[Any]], Iterable[Any]], most: int, pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """Cheap calls come first, so that chunks are large; then one of a chunk takes long."""
    for _ in range(3):
        pool.map(run, [(0, 0.0, str(tmp_path))] * 100)
    (tmp_path / "0").unlink()
    # The long one raises unless others begin all but what its worker may have begun, and what is
    # shorter than a message.
    long = float(most + 3 - 240)
    items = [(number, long if number == 40 else 1e-3, str(tmp_path)) for number in range(240)]
    found = pool.map(run, source(items))
    assert [number for number, _ in found] == list(range(240))
    assert runs(tmp_path) == [1] * 240  # each once


def test_what_is_worth_a_message_goes_to_others_at_once(
    pool: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not wait until the call takes longer than such calls do."""
    for _ in range(3):
        pool.map(run, [(0, 1e-3, str(tmp_path))] * 100)
    (tmp_path / "0").unlink()
    monkeypatch.setattr("mpgrad.machine.queue.LATE", math.inf)
    # the long one raises unless others begin all but what its worker may have begun, and what is
    # shorter than a message
    items = [(number, -116.0 if number == 40 else 1e-3, str(tmp_path)) for number in range(120)]
    found = pool.map(run, iter(items))
    assert [number for number, _ in found] == list(range(120))
    assert runs(tmp_path) == [1] * 120


def test_calls_that_are_taken_back_keep_gradients_and_seeds(pool: mpgrad.Pool) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        if x[0] == 0:
            time.sleep(0.2)
        else:
            time.sleep(5e-4)
        return (x * torch.rand(3)).sum()

    def once(pool: mpgrad.Pool) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(5)
        x = torch.ones(3, requires_grad=True)
        xs = [x * (number != 10) for number in range(60)]
        losses = pool.map(noisy, xs)
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), x)
        return [each.item() for each in losses], gradient

    pool.map(noisy, [torch.ones(3)] * 60)
    first, second = once(pool), once(pool)
    with mpgrad.Pool(1) as alone:
        third = once(alone)
    assert first[0] == second[0] == third[0]
    torch.testing.assert_close(first[1], third[1])


@pytest.mark.slow
def test_random_costs_run_each_call_once(pool: mpgrad.Pool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for round_number in range(6):
        folder = tmp_path / str(round_number)
        folder.mkdir()
        costs = torch.exp(2 * torch.randn(300, generator=generator)) * 2e-4
        found = pool.map(
            run,
            [(number, min(cost, 0.1), str(folder)) for number, cost in enumerate(costs.tolist())],
        )
        assert [number for number, _ in found] == list(range(300))
        assert runs(folder) == [1] * 300


def test_a_chunksize_is_kept(pool: mpgrad.Pool, tmp_path: Path) -> None:
    items = [(number, 0.3 if number == 0 else 1e-3, str(tmp_path)) for number in range(40)]
    found = pool.map(run, items, chunksize=10)
    assert len({pid for _, pid in found[:10]}) == 1


def test_a_death_with_calls_taken_back(pool: mpgrad.Pool, tmp_path: Path) -> None:
    def deadly(item: tuple[int, float, str]) -> tuple[int, int]:
        found = run(item)
        if item[0] == 20 and len((Path(item[2]) / "20").read_text().split()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    pool.map(deadly, [(0, 0.0, str(tmp_path))] * 100)
    items = [(number, 0.3 if number == 20 else 1e-3, str(tmp_path)) for number in range(100)]
    assert [number for number, _ in pool.map(deadly, items)] == list(range(100))
    assert pool.stats().deaths == 1


def test_the_last_calls_wait_for_whoever_has_nothing_to_do(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    # so that it is known how long they take
    staffed(fresh_pool).map(run, [(9, 0.01, str(tmp_path))] * 8)
    (tmp_path / "9").unlink()
    items = [(number, 0.01 if number else -4.0, str(tmp_path)) for number in range(4)]
    pids = [pid for _, pid in fresh_pool.map(run, items)]
    assert pids.count(pids[0]) == 1


class Noted:
    """A call of 12 ms, and a line that says who began it. Its item has its own number in every
    place. While there is a file `hold`, no call ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.hold = file.with_name("hold")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        number = int(x[0])
        with open(self.file, "a") as file:
            file.write(f"{os.getpid()} {number}\n")
        time.sleep(12e-3)
        while self.hold.exists():
            time.sleep(1e-3)
        if len(x) % 2:
            raise ValueError(f"item {number} is odd")
        return x.sum() * torch.rand(())

    def begun(self) -> dict[int, list[int]]:
        """By worker the numbers of its items, in the order in which it ran them."""
        numbers: dict[int, list[int]] = {}
        for line in self.file.read_text().splitlines():
            pid, number = map(int, line.split())
            numbers.setdefault(pid, []).append(number)
        self.file.unlink()
        return numbers


def numbered(sizes: Iterable[int]) -> list[torch.Tensor]:
    return [torch.full((size,), float(number)) for number, size in enumerate(sizes)]


@pytest.fixture
def noted(pool: mpgrad.Pool, tmp_path: Path) -> Noted:
    fn = Noted(tmp_path / "begun")
    staffed(pool).map(fn, numbered([2] * 4))  # so that it is known how long it takes
    fn.begun()
    return fn


@pytest.mark.usefixtures("nothing_is_taken_back")
@pytest.mark.parametrize("way", first_are_quick(1, ["map", "starmap", "map_async", "map_reduce"]))
def test_the_largest_calls_are_begun_first(way: str, pool: mpgrad.Pool, noted: Noted) -> None:
    items = numbered(range(100, 1600, 100))
    for _ in range(2):  # a reduction is another function, of which nothing is known at first
        match way:
            case "map":
                pool.map(noted, items)
            case "starmap":
                pool.starmap(noted, [(item,) for item in items])
            case "map_async":
                pool.map_async(noted, items).get()
            case "map_reduce":
                pool.map_reduce(noted, items, "sum")
        begun = noted.begun()
        assert sorted(itertools.chain(*begun.values())) == list(range(15))
    assert sorted(each[0] for each in begun.values()) == [13, 14]


@pytest.mark.usefixtures("nothing_is_taken_back")
def test_of_many_calls_the_last_ones(
    pool: mpgrad.Pool, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what goes wrong with the first ones is known soon."""
    # all are packed before a worker hears of one
    pretend_seconds_of_items(monkeypatch, 0.0)
    bundle(monkeypatch, 1)
    count, last = 60, 2 * SORTED
    pool.map(noted, numbered(range(100, 100 * (count + 1), 100)))
    begun = list(noted.begun().values())
    late = [[number for number in each if number >= count - last] for each in begun]
    assert all(
        each[: len(each) - len(own)] == sorted(set(each) - set(own))
        for each, own in zip(begun, late, strict=True)
    )
    # a worker that is slow to begin may find the largest taken
    assert all(own == sorted(own, reverse=True) for own in late)


@pytest.mark.usefixtures("nothing_is_taken_back")
@pytest.mark.parametrize("way", first_are_quick(2, ["map", "imap", "map_async"]))
def test_long_calls_go_together_if_nobody_wants_one_first(
    way: str, pool: mpgrad.Pool, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    # symptom: each call of 10 ms costs a message, an answer, and later a backward of its own
    items = numbered([100] * 40)
    # A busy machine may stop a call, which then seems to take longer. Its result leaves early, so
    # that answers are not counted here.
    pretend_seconds_of_calls(monkeypatch, 12e-3)
    before = pool.stats().frames_sent
    match way:
        case "map":
            pool.map(noted, items)
        case "map_async":
            pool.map_async(noted, items).get()
        case "imap":
            list(pool.imap(noted, items))
    frames = pool.stats().frames_sent - before
    assert 30 <= frames <= 60 if way == "imap" else frames <= 25
    for each in noted.begun().values():
        assert each == sorted(each)


@pytest.mark.usefixtures("nothing_is_taken_back")
@pytest.mark.parametrize("way", first_are_quick(2, ["imap", "generator", "equal", "chunksize"]))
def test_otherwise_calls_are_begun_in_the_order_of_the_items(
    way: str, pool: mpgrad.Pool, noted: Noted
) -> None:
    items = numbered(range(100, 1300, 100))
    match way:
        case "imap":
            list(pool.imap(noted, items))
        case "generator":
            pool.map(noted, (item for item in items))
        case "equal":
            pool.map(noted, numbered([100] * 12))
        case "chunksize":
            pool.map(noted, items, chunksize=2)
    for each in noted.begun().values():
        assert each == sorted(each)


@pytest.mark.usefixtures("nothing_is_taken_back")
def test_calls_that_waited_for_others_are_put_in_order_too(
    pool: mpgrad.Pool, noted: Noted, tmp_path: Path
) -> None:
    path = str(tmp_path / "all are packed")
    os.mkfifo(path)

    def largest() -> torch.Tensor:
        open(path).close()
        return torch.full((3000,), 99.0)

    waiting = pool.submit(largest)
    noted.hold.touch()  # until the largest is there
    result = pool.map_async(noted, [waiting, *numbered(range(100, 900, 100))])
    open(path, "w").close()
    mpgrad.wait([waiting])
    noted.hold.unlink()
    result.get()
    begun = noted.begun()
    assert max(each.index(99) for each in begun.values() if 99 in each) <= 4


def test_results_do_not_depend_on_the_order_of_calls(pool: mpgrad.Pool, noted: Noted) -> None:
    items = [
        torch.arange(1.0, 100 * length + 1).requires_grad_() for length in (2, 5, 1, 9, 3, 9, 4)
    ]

    def outcome(each: mpgrad.Pool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses = each.map(noted, items)
        return [*losses, *torch.autograd.grad(torch.stack(losses).sum(), items)]

    with mpgrad.Pool(1) as alone:
        for ours, others in zip(outcome(pool), outcome(alone), strict=True):
            assert torch.equal(ours, others)


@pytest.mark.usefixtures("nothing_is_taken_back")
def test_after_a_failure_the_first_items_come_first(pool: mpgrad.Pool, noted: Noted) -> None:
    """One of them may have to be raised in its place, and then all the others need not be run."""
    for _ in range(5):
        with pytest.raises(ValueError, match="item 0 is odd"):
            pool.map(noted, numbered(range(101, 3101, 200)))
        begun = list(noted.begun().values())
        assert any(0 in each for each in begun)
        for each in begun:
            assert each[0] >= 13 and each[2:] == sorted(each[2:])
        # Two and two that wait behind them, then as many again. The machine may stop the worker
        # that has the first item, while the other goes on.
        if sum(map(len, begun)) <= 8:
            return
    raise AssertionError("a failure ends nothing")


def test_the_smallest_calls_which_come_last_do_not_pass_for_all(fork_server: mpgrad.Pool) -> None:
    """What is known of a function after a map is the mean of its calls."""

    def sleeps(x: torch.Tensor) -> float:
        begin = time.perf_counter()
        time.sleep(0.1 if len(x) > 10 else 0.002)
        return time.perf_counter() - begin

    items = [torch.ones(length) for length in (20, 20, 1, 2, 3, 4, 5, 6, 7, 8)]
    with mpgrad.Pool(2) as pool:
        for _ in range(2):
            mean = sum(pool.map(sleeps, items, chunksize=1)) / 10
            (known,) = measured(pool)
            assert 0.7 < known.own_seconds / mean < 1.8


def test_nothing_is_learned_from_failures(fork_server: mpgrad.Pool) -> None:
    # symptom: as above. cause: the time of a call that had raised was part of the mean.
    def simulate(k: int) -> None:
        if k % 2:
            raise ValueError("is not valid")
        time.sleep(0.002)

    with mpgrad.Pool(1) as pool:
        for chunksize in (1, 4):
            pool.map(simulate, [1, 1, 1, 1], chunksize=chunksize, on_error="return")
        assert not measured(pool)
        pool.map(simulate, [0, 1, 1, 1] * 4, chunksize=4, on_error="return")
        (known,) = measured(pool)
        assert known.own_seconds >= 0.002 <= known.seconds


class Watched(collections.deque[Any]):
    """Knows which threads change it."""

    changed_by: set[str]

    def __getattribute__(self, name: str) -> Any:
        if name in ("append", "appendleft", "extend", "extendleft", "popleft"):
            self.changed_by.add(threading.current_thread().name)
        return super().__getattribute__(name)


def test_the_queue_is_the_scheduling_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # symptom, once in some hundred runs of all tests: "deque mutated during iteration", and the
    # pool was broken. cause: an operation failed, so the scheduling thread went through the queues
    # of all, while another thread added calls to its own.
    queues: list[Watched] = []
    made = operations.Operation.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.queue = Watched()
        self.queue.changed_by = set()
        queues.append(self.queue)

    monkeypatch.setattr(operations.Operation, "__init__", watched)
    with mpgrad.Pool(2) as pool:
        results = [
            *pool.map(torch.neg, [torch.ones(1)] * 100),
            *pool.imap(torch.neg, [torch.ones(1)] * 100),
        ]
        future = pool.submit(torch.neg, pool.submit(torch.neg, torch.ones(1)))
        with pytest.raises(ZeroDivisionError):
            pool.map(lambda n: 1 / n, [1, 0] * 50)
        assert len(results) == 200 and future.result() == 1
    threads = set().union(*(queue.changed_by for queue in queues))
    assert len(threads) == 1 and threading.current_thread().name not in threads


@pytest.mark.quick
def test_where_a_worker_is_does_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # symptom, on processors that change the order of stores: the chunk that a worker is at with the
    # position in the one before. cause: nothing kept the order of plain stores and loads but what
    # x86 promises.
    did: list[Any] = []

    class Numbers(list[int]):
        def __setitem__(self, place: Any, value: Any) -> None:
            did.append((place, value))
            super().__setitem__(place, value)

        def __getitem__(self, place: Any) -> Any:
            did.append(place)
            return super().__getitem__(place)

    for module in ("mpgrad.workers.run", "mpgrad.scheduling.worker_handle"):
        monkeypatch.setattr(f"{module}.in_order", lambda: did.append("in order"))
    progress: Any = SimpleNamespace(_numbers=Numbers([0] * ProgressRecord.COUNT))
    ProgressWriter.begin(progress, 7, 3)
    assert did[-5:] == [(0, ProgressRecord.BETWEEN), "in order", (1, 3), "in order", (0, 7)]
    under_way: Any = SentChunks()
    under_way.progress = WatchedProgressRecord(progress._numbers)
    did.clear()
    assert under_way.unbegun(0.0) == []
    assert did == [0, "in order", 1, "in order", 0]
    monkeypatch.setattr("mpgrad.wire.agent_messages.KEEPS_ORDER", False)
    in_order()


@pytest.mark.parametrize(
    ("seconds", "waiting", "waits"),
    [(2e-3, 1, False), (2e-2, 1, True), (2e-2, 9, False), (0.1, 9, True)],
)
def test_short_calls_are_sent_ahead_even_where_they_are_the_last(
    seconds: float, waiting: int, waits: bool
) -> None:
    # symptom: between the calls of a graph each worker waited. cause: the last ones waited for who
    # has nothing to do.
    call = SimpleNamespace(items=1)
    options = SimpleNamespace(function=None, at_rest=False, chunksize=None)
    operation: Any = SimpleNamespace(
        queue=[call] * waiting, options=options, sealed=True, largest_first=False
    )
    codes: Any = SimpleNamespace(seconds=lambda function, unknown: seconds)
    queue = CallQueue(
        codes,
        itertools.count(),
        workers=2,
        calls_per_worker=None,
        by_device=False,
        chunk_seconds=NEAR,
    )
    queue.operations.append(operation)
    assert queue._may_be_sooner_elsewhere(operation) is waits


@pytest.mark.slow
def test_a_chunk_stays_skipped_while_another_is() -> None:
    """What had been given to others was run all the same, if the worker was slow to look; then the
    pool was broken."""

    def chunk(operation: Any, numbers: range) -> Any:
        return Chunk(
            operation,
            [(k, types.SimpleNamespace(index=k, items=1)) for k in numbers],
            [],
            None,
            None,
        )  # type: ignore[misc]

    options = types.SimpleNamespace(chunksize=None)
    first, second = (types.SimpleNamespace(options=options, limit=9) for _ in range(2))
    under_way = SentChunks()
    record = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
    under_way.progress = WatchedProgressRecord(record)
    under_way.chunks = {1: chunk(first, range(1)), 2: chunk(first, range(1, 6))}
    record[ProgressRecord.CHUNK] = 1  # which it runs
    ((_, taken),) = under_way.take_back(now=0.0)
    assert len(taken) == 4
    del under_way.chunks[1]  # it is answered, and the worker has yet to look at the next
    under_way.chunks[3] = chunk(second, range(1))
    second.limit = 0
    under_way.cancel(second)
    assert set(record[ProgressRecord.SKIPPED :]) == {2, 3}


@pytest.mark.slow
def test_a_worker_is_lost_at_calls_that_were_taken_back() -> None:
    """It has to answer that it ran none of them, and may die, or be killed, before it does."""
    from mpgrad.scheduling.lifecycle import Lifecycle
    from mpgrad.scheduling.recovery import Recovery
    from mpgrad.scheduling.worker_handle import WorkerHandle

    operation: Any = types.SimpleNamespace(limit=9, options=types.SimpleNamespace(chunksize=None))
    worker = WorkerHandle(1, types.SimpleNamespace(lost=""))  # type: ignore[arg-type]
    record = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
    worker.under_way.progress = WatchedProgressRecord(record)
    for number in (1, 2):
        worker.under_way.chunks[number] = Chunk(
            operation, [(number, types.SimpleNamespace(index=number))], [], None, None
        )  # type: ignore[list-item]
    record[ProgressRecord.CHUNK] = 1
    worker.under_way.skip_unbegun(now=0.0)
    worker.under_way.note_skips(now=0.0)
    ((_, taken),) = worker.under_way.take_back(now=1.0)
    assert [call.index for call in taken] == [2] and 2 in record[ProgressRecord.SKIPPED :]
    assert worker.under_way.is_at_wanted
    del worker.under_way.chunks[1]
    assert not worker.under_way.is_at_wanted
    settings: Any = types.SimpleNamespace(retries=0, timeout_retries=0)
    nothing: Any = None
    recovery = Recovery({}, nothing, settings, Lifecycle(), nothing, lambda operation, now: None)
    at = Death([worker.under_way.chunks[2]], position=-1, offset=-1, blames=True)
    assert not recovery.blame(worker, -9, at, 0.0)
    # it had looked at the next call, to see that this is somebody else's
    worker.under_way.chunks[2].calls.append((2, types.SimpleNamespace(index=2)))  # type: ignore[arg-type]
    assert not recovery.blame(worker, -9, at._replace(position=1), 0.0)
