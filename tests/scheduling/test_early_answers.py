"""A result leaves its worker when it is there, and does not wait for the rest of its chunk."""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import linux_only
from inside import cancel_by_force, handles, in_scheduling_thread

import mpgrad
from mpgrad.machine.policy import SEEN, ChunkSeconds
from mpgrad.machine.queue import LONG_CALL, CallQueue
from mpgrad.machine.under_way import Chunk, SentChunks
from mpgrad.scheduling.worker_handle import WatchedProgressRecord
from mpgrad.wire.agent_messages import ProgressRecord
from mpgrad.workers.early import EarlyAnswers

ENOUGH = 30.0  # seconds, where a fault takes for ever


def waits_for(path: Path | None) -> int:
    while path is not None and not path.exists():
        time.sleep(1e-3)
    return os.getpid()


def holds(path: Path) -> None:
    """Another function, so that its time does not count for `waits_for`."""
    has_begun(path).touch()
    waits_for(path)


def has_begun(path: Path) -> Path:
    return path.with_suffix(".begun")


@pytest.fixture(params=["process", "thread"])
def one(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    """A pool of one worker, which gets calls of `waits_for` in chunks."""
    with mpgrad.Pool(1, engine=request.param) as pool:
        pool.map(waits_for, [None] * 20)
        yield pool


@contextlib.contextmanager
def held(pool: mpgrad.Pool | mpgrad.Executor, path: Path) -> Iterator[None]:
    """Its worker is busy meanwhile, so that all calls wait and then go together; backwards, too,
    which would go before a call that waits."""
    future = pool.submit(holds, path)
    try:
        waits_for(has_begun(path))
        yield
    finally:
        path.touch()
        future.result()


def lazily(pool: mpgrad.Pool, items: list[Any]) -> Callable[[], Any]:
    results = pool.imap(waits_for, items)
    return lambda: results.next(ENOUGH)


def in_any_order(pool: mpgrad.Pool, items: list[Any]) -> Callable[[], Any]:
    results = pool.imap_unordered(waits_for, items)
    return lambda: results.next(ENOUGH)


def in_chunks(pool: mpgrad.Pool, items: list[Any]) -> Callable[[], Any]:
    results = pool.imap(waits_for, items, chunksize=len(items))
    return lambda: results.next(ENOUGH)


@pytest.mark.quick
@pytest.mark.parametrize("begin", [lazily, in_any_order, in_chunks])
def test_results_before_a_slow_call(one: mpgrad.Pool, tmp_path: Path, begin: Any) -> None:
    # symptom: the first results come with that of the last call. cause: a worker sends the results
    # of a chunk together.
    go = tmp_path / "go"
    with held(one, tmp_path / "hold"):
        following = begin(one, [None] * 5 + [go] + [None] * 2)
    try:
        for _ in range(5):
            following()
    finally:
        go.touch()
    for _ in range(3):
        following()


@pytest.mark.quick
def test_the_results_of_an_executor(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with mpgrad.Executor(1) as executor:
        list(executor.map(waits_for, [None] * 20))
        with held(executor, tmp_path / "hold"):
            results = executor.map(waits_for, [None] * 5 + [go], timeout=ENOUGH)
        try:
            found = list(itertools.islice(results, 5))
        finally:
            go.touch()
        assert [*found, *results] == found[:1] * 6


def test_several_slow_calls_in_a_chunk(one: mpgrad.Pool, tmp_path: Path) -> None:
    """Each has its own moment."""
    paths = [tmp_path / str(number) for number in range(3)]
    with held(one, tmp_path / "hold"):
        following = in_chunks(one, [None, paths[0], None, None, paths[1], None, paths[2], None])
    for path, before in zip([*paths, None], (1, 3, 2, 2), strict=True):
        for _ in range(before):
            following()
        if path is not None:
            path.touch()


def test_a_worker_that_dies_behind_early_results(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """The call that was running is blamed, and no call runs twice that was answered."""
    noted, go = tmp_path / "noted", tmp_path / "go"

    def notes(item: tuple[int, bool]) -> int:
        number, kills = item
        if number >= 0:
            with open(noted, "a") as file:
                file.write(f"{number}\n")
        if kills:
            waits_for(go)
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with mpgrad.Pool(1, retries=0) as pool:
        pool.map(notes, [(-1, False)] * 20)
        with held(pool, tmp_path / "hold"):
            results = pool.imap(notes, [(number, number == 3) for number in range(6)], 6)
        try:
            assert [results.next(ENOUGH) for _ in range(3)] == [0, 1, 2]
        finally:
            go.touch()
        with pytest.raises(mpgrad.WorkerDiedError):
            results.next(ENOUGH)
    assert noted.read_text().split()[:4] == ["0", "1", "2", "3"]


def test_graphs_and_gradients_of_early_results(one: mpgrad.Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    weight = torch.ones(2, requires_grad=True)

    def times(x: torch.Tensor, path: Path | None) -> torch.Tensor:
        waits_for(path)
        return x * weight.exp()

    xs = [torch.full((2,), float(k), requires_grad=True) for k in range(6)]
    for _ in range(3):
        one.map(lambda pair: times(*pair), [(x, None) for x in xs])
    items = [(x, go if x is xs[5] else None) for x in xs]
    with held(one, tmp_path / "hold"):
        results = one.imap(lambda pair: times(*pair), items, 6)
    try:
        first = [results.next(ENOUGH) for _ in range(5)]
    finally:
        go.touch()
    torch.stack([*first, results.next(ENOUGH)]).sum().backward()
    assert torch.allclose(weight.grad, torch.ones(2).exp() * 15)
    assert all(torch.allclose(x.grad, torch.ones(2).exp()) for x in xs)


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: Path | None) -> torch.Tensor:
        ctx.path = path
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        waits_for(ctx.path)
        return grad * 2, None


def begun(backward: Callable[[], None], pool: mpgrad.Pool) -> threading.Thread:
    """A backward in a thread of its own, once the scheduler has it."""
    left = pool.stats().backwards_left
    thread = threading.Thread(target=backward)
    thread.start()
    while pool.stats().backwards_left == left:
        time.sleep(1e-3)
    return thread


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["process", "thread"])
def test_a_quick_backward_before_a_slow_one(
    fork_server: mpgrad.Pool, tmp_path: Path, engine: Any
) -> None:
    # symptom: its gradient comes when the slow one has ended
    go, hold = tmp_path / "go", tmp_path / "hold"
    with mpgrad.Pool(1, engine=engine, graphs="keep") as pool:
        xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
        results = pool.starmap(Waits.apply, list(zip(xs, [None, None, go], strict=True)))
        with held(pool, hold):
            # The first one is sent behind that call, and the other two together behind both.
            threads = [begun(result.sum().backward, pool) for result in results]
        for thread in threads[:2]:
            thread.join(ENOUGH)
        come = [x.grad is not None for x in xs]
        go.touch()
        for thread in threads:
            thread.join()
    assert come == [True, True, False]
    assert [x.grad.tolist() for x in xs] == [[2.0, 2.0]] * 3


@linux_only("the fork of a task")
def test_a_task_forks_from_one_thread(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """Python from 3.12 on warns where a process of several threads is forked."""

    def forks(is_last: bool) -> tuple[int, list[str], list[str]]:
        time.sleep(2e-3 if not is_last else 0.05)
        names = [thread.name for thread in threading.enumerate()]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if not (pid := os.fork()):
                os._exit(0)
        threads = len(os.listdir("/proc/self/task"))
        os.waitpid(pid, 0)
        return (
            threads,
            [str(each.message) for each in found],
            names,
        )

    with mpgrad.Pool(1) as pool:
        pool.map(abs, [-1] * 20)
        found = pool.map(forks, [False, False, False, True, False], chunksize=5)
    assert found == [(1, [], ["MainThread"])] * 5


@pytest.mark.quick
def without_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("without", ["a first step", "a thread", "a beginning"])
def test_a_thread_that_cannot_begin(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: now and then, a worker whose memory was limited hung. Cause: it waited for its
    second thread, which had had no memory to begin."""
    start = _thread.start_new_thread

    def refuses(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    match without:
        case "a first step":
            monkeypatch.setattr(signal, "pthread_sigmask", without_memory)
        case "a thread":
            monkeypatch.setattr(_thread, "start_new_thread", refuses)
        case "a beginning":
            monkeypatch.setattr(_thread, "start_new_thread", lambda *_: start(int, ()))
    early = EarlyAnswers(lambda: False)
    early.is_on = True
    early.note_call()
    assert not early.is_on
    early.stop()


def test_positions_count_from_the_first_call_that_is_not_answered() -> None:
    options = types.SimpleNamespace(chunksize=None)
    operation: Any = types.SimpleNamespace(options=options, limit=9)
    calls: Any = [(k, types.SimpleNamespace(index=k, items=1)) for k in range(6)]
    under_way = SentChunks()
    record = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
    under_way.progress = WatchedProgressRecord(record)
    under_way.chunks[1] = chunk = Chunk(operation, calls, [], None, None)
    record[ProgressRecord.CHUNK], record[ProgressRecord.POSITION] = 1, 3
    chunk.note_answered(2)
    assert under_way.begun()[0] == 1 and under_way.is_at_call((1, 3))
    assert not under_way.is_at_call((1, 1))
    assert under_way.skip_unbegun(now=0.0)
    under_way.note_skips(now=1.0)
    # The worker may have looked before that, and go on to one more call.
    ((_, taken),) = under_way.take_back(now=1.0)
    assert [call.index for call in taken] == [5]
    ((_, taken),) = under_way.take_back(now=1.0 + 2 * SEEN)
    assert [call.index for call in taken] == [4]
    assert not under_way.has_for_others


@pytest.mark.quick
def test_a_call_may_be_late_long_before_its_chunk() -> None:
    # symptom: calls wait behind a slow one for twice the time of the whole chunk. cause: the chunk
    # had not begun when the scheduler decided when to look next.
    cache: Any = types.SimpleNamespace(seconds=lambda function, unknown: 0.4)
    queue = CallQueue(cache, itertools.count(), 2, None, False, ChunkSeconds(1e-3, 1e-2, 1e-2))
    options = types.SimpleNamespace(chunksize=None, function=None)
    operation: Any = types.SimpleNamespace(options=options, limit=9)
    workers: Any = []
    for number in range(2):
        under_way = SentChunks()
        record = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
        under_way.progress = WatchedProgressRecord(record)
        calls: Any = [(k, types.SimpleNamespace(index=k, items=1)) for k in range(3)]
        under_way.add(number + 1, Chunk(operation, calls, [], None, None), now=0.0)
        workers.append(types.SimpleNamespace(ready=True, retiring=False, under_way=under_way))
    queue.look_at = 0.0
    assert not queue.take_back(workers, now=0.0)
    assert queue.look_at <= LONG_CALL


def test_prints_of_a_chunk_with_early_results(
    one: mpgrad.Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"

    def prints(item: tuple[int, Path | None]) -> int:
        for part in range(3):
            print(item[0], part)
            sys.stdout.flush()
        waits_for(item[1])
        return item[0]

    one.map(prints, [(9, None)] * 20)
    with held(one, tmp_path / "hold"):
        results = one.imap(prints, [(k, go if k == 4 else None) for k in range(6)], 6)
    try:
        assert [results.next(ENOUGH) for _ in range(4)] == [0, 1, 2, 3]
    finally:
        go.touch()
    assert list(results) == [4, 5]
    text = capfd.readouterr().out
    assert text.count("9 0\n") == 20
    assert text.replace("9 0\n9 1\n9 2\n", "").split("\n")[:-1] == [
        f"{k} {part}" for k in range(6) for part in range(3)
    ]


@pytest.mark.quick
def test_what_waits_behind_a_slow_call_while_others_are_busy(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    # symptom: the call that was sent behind a slow one comes after all others. cause: it was taken
    # back only for a worker that had nothing to do.
    go, other = tmp_path / "go", tmp_path / "other"
    with mpgrad.Executor(2) as executor:
        executor.submit(time.sleep, 0.06).result()
        list(executor.map(waits_for, [None] * 40))
        slow, busy = executor.submit(waits_for, go), executor.submit(waits_for, other)
        behind = [executor.submit(waits_for, None) for _ in range(2)]
        long = [executor.submit(time.sleep, 0.06) for _ in range(10)]
        done: list[Any] = []
        for future in (busy, *behind, *long):
            future.add_done_callback(done.append)
        try:
            time.sleep(0.15)
            other.touch()
            assert not mpgrad.wait([busy, *behind, *long], timeout=ENOUGH).not_done
        finally:
            go.touch()
        slow.result()
        executor._pool.synchronize()  # with callbacks
        assert done[-1] in long


def test_a_call_that_has_just_begun_is_cancelled_by_force(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """Symptom: a call that hung stayed for ever, although it was cancelled by force. Cause: the
    answer to the call before it had not been read, so its worker did not seem to run it."""
    go, done = tmp_path / "go", threading.Event()

    def acts(how: str) -> None:
        while how == "waits" and not go.exists():
            time.sleep(0.002)
        if how == "hangs":
            time.sleep(600)

    with mpgrad.Pool(1) as pool:
        for _ in range(20):  # calls that are known to be short are sent behind one another
            pool.submit(acts, "ends").result()
        before, hangs = pool.submit(acts, "waits"), pool.submit(acts, "hangs")
        (worker,) = handles(pool)
        while len(worker.under_way.chunks) < 2:
            time.sleep(0.002)
        number, chunk = list(worker.under_way.chunks.items())[1]

        def cancels_before_it_reads() -> None:
            go.touch()
            while (worker.under_way.progress.at() or (-1, -1))[0] != number:
                time.sleep(0.002)
            cancel_by_force(pool, chunk.operation)
            done.set()

        in_scheduling_thread(pool, cancels_before_it_reads)
        assert done.wait(50)
        before.result()
        with pytest.raises(concurrent.futures.CancelledError):
            hangs.result()
        assert pool.submit(abs, -1).result(timeout=50) == 1
