"""Bugs of calls, queues, callbacks and blame that were, each with its symptom and its cause."""

from __future__ import annotations

import collections
import concurrent.futures
import fractions
import gc
import importlib
import itertools
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.autograd.remote_graph import forget_oldest
from mpgrad.calls import operations
from mpgrad.machine.policy import NEAR
from mpgrad.machine.queue import CallQueue
from mpgrad.scheduling.worker_handle import SentChunks
from mpgrad.wire.agent_messages import ProgressRecord, in_order
from mpgrad.workers.run import ProgressWriter


def test_calls_go_back_to_the_queue_in_their_order(fork_server: mpgrad.Pool) -> None:
    # symptom: a hang. cause: two chunks of a dead worker were put back one before the other, and a
    # failure in the later one then dropped calls of the earlier one that were still wanted.
    def fn(k: int) -> int:
        if k == 4:
            raise LookupError(k)
        return k

    with mpgrad.Pool(1) as pool:
        pid = pool.apply(os.getpid)
        os.kill(pid, signal.SIGSTOP)
        result = pool.map_async(fn, range(6), 4)
        time.sleep(0.3)  # both chunks are in the pipe of the stopped worker
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LookupError):
            result.get(20)


class KillsItsLoader:
    def __reduce__(self) -> Any:
        return os._exit, (3,)

    def __call__(self, x: int) -> int:
        return x


def test_a_function_that_kills_whoever_loads_it(fresh_pool: mpgrad.Pool) -> None:
    # symptom: workers were replaced for ever. cause: a call that had not begun was put back without
    # counting.
    with pytest.raises(
        mpgrad.WorkerDiedError,
        match=r"exited with status 3 \(phase: loading the function, item 0 of KillsItsLoader\)",
    ):
        fresh_pool.map(KillsItsLoader(), [1])
    assert fresh_pool.map(abs, [-1]) == [1]


def test_a_working_directory_that_was_deleted(tmp_path: Path, fork_server: mpgrad.Pool) -> None:
    # symptom: InternalError(FileNotFoundError). cause: os.getcwd where workers are started.
    before = os.getcwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        with mpgrad.Pool(1) as pool:
            assert pool.map(abs, [-1]) == [1]
    finally:
        os.chdir(before)


def test_finished_operations_are_forgotten(pool: mpgrad.Pool) -> None:
    # symptom: operations stayed for ever, and callbacks did not come. cause: one that was sealed
    # after its last outcome was not looked at again.
    done = threading.Event()

    def slow_source() -> Iterator[int]:
        yield from range(3)
        time.sleep(0.2)  # all outcomes are there before the end is known

    result = pool.map_async(abs, slow_source(), callback=lambda values: done.set())
    assert done.wait(10) and result.get() == [0, 1, 2]
    for _ in range(10):
        assert len(list(pool.imap(abs, range(17)))) == 17
        assert pool.map(abs, slow_source_of(4)) == [0, 1, 2, 3]
    assert pool._scheduler.wait_until(lambda: not pool._scheduler.admissions.unfinished, timeout=30)


def slow_source_of(count: int) -> Iterator[int]:
    for k in range(count):
        time.sleep(0.001)
        yield k


def test_threads_share_an_iterator(pool2: mpgrad.Pool) -> None:
    # symptom: lost items and KeyErrors. cause: `next` was not made for several threads, as
    # multiprocessing's is.
    results = pool2.imap(abs, range(600))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = [value for part in threads.map(lambda _: list(results), range(4)) for value in part]
    assert sorted(found) == list(range(600))


def test_the_item_that_killed_is_named(fresh_pool: mpgrad.Pool) -> None:
    # symptom: item 0 was blamed. cause: the calls before it in its chunk failed too, each with an
    # error of its own.
    with pytest.raises(mpgrad.WorkerDiedError, match=r"phase: forward, item 3\)"):
        fresh_pool.map(
            lambda k: os.kill(os.getpid(), signal.SIGKILL) if k == 3 else k, range(20), 10
        )


def test_reductions_name_blocks_and_targets(pool2: mpgrad.Pool) -> None:
    # symptom: "item 10" for the 101st of 640 items. cause: calls of a reduction are blocks of
    # items, or targets.
    with pytest.raises(ZeroDivisionError) as caught:
        pool2.map_reduce(lambda k: 1 / (k - 100), range(640), "sum")
    assert any("raised in block 10, worker" in note for note in caught.value.__notes__)
    with pytest.raises(ZeroDivisionError) as caught:
        pool2.reduce(lambda target, k: target / k, [1, 0], [1.0, 2.0])
    assert any("raised in target 0, worker" in note for note in caught.value.__notes__)


def test_a_callback_that_ends_the_program(
    pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    # symptom: a broken pool. cause: only Exception was caught.
    pool2.apply_async(abs, (-1,), callback=lambda value: sys.exit(3)).get()
    assert pool2.map(abs, [-1]) == [1]
    assert "a callback of the pool raised" in caplog.text
    pool2.submit(time.sleep, 1).add_done_callback(lambda future: sys.exit(3))
    assert pool2.map(abs, [-1] * 8) == [1] * 8
    pool2.synchronize()  # waits for callbacks, too
    assert "a callback of a future raised" in caplog.text


def test_a_result_waited_for_while_it_is_cancelled(fresh_pool: mpgrad.Pool) -> None:
    # symptom: the waiter woke up when a call ended. cause: it was told with the next frame only.
    for _ in range(4):
        fresh_pool.submit(time.sleep, 100)
    future = fresh_pool.submit(abs, -1)
    threading.Timer(0.1, future.cancel).start()
    begin = time.monotonic()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert time.monotonic() - begin < 50


def test_an_iterator_that_is_dropped_half_way(pool2: mpgrad.Pool) -> None:
    results = pool2.imap(torch.ones, [(50_000,)] * 100)
    next(results)
    del results
    gc.collect()
    assert pool2._scheduler.wait_until(
        lambda: not pool2._scheduler.admissions.unfinished, timeout=30
    )


@pytest.mark.quick
@pytest.mark.parametrize("ask", ["map", "map_async", "starmap"])
def test_a_failure_ends_the_reading_of_items(pool: mpgrad.Pool, ask: str) -> None:
    # symptom: a million items were packed, and an endless source never came to its end, though the
    # first item had failed. cause: whoever packed calls did not look at what came of them.
    taken = 0

    def source() -> Iterator[Any]:
        nonlocal taken
        for taken in range(1, 200_001):
            yield (-taken,) if ask == "starmap" else -taken

    def fails(k: int) -> int:
        raise LookupError(k)

    with pytest.raises(LookupError, match="-1"):
        getattr(pool, ask)(fails, source()).get()
    assert taken < 200_000


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failing_early_item(failing: int, fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    # symptom: hours until the error of an item that had failed at once. cause: it counted as a call
    # of 0 s, so the function was cheap: the other items, however long they take, were sent, and
    # were waited for.

    def simulate(k: int) -> None:
        (tmp_path / str(k)).touch()
        if k == failing:
            raise ValueError("is not valid")
        time.sleep(0.05)

    with mpgrad.Pool(2) as pool:
        for _ in range(2):  # the second finds what was learned from the first
            with pytest.raises(ValueError, match="is not valid"):
                pool.map(simulate, range(300))
        assert len(list(tmp_path.iterdir())) < 40


def test_nothing_is_learned_from_failures(fork_server: mpgrad.Pool) -> None:
    # symptom: as above. cause: the time of a call that had raised was part of the mean.
    def simulate(k: int) -> None:
        if k % 2:
            raise ValueError("is not valid")
        time.sleep(0.002)

    with mpgrad.Pool(1) as pool:
        for chunksize in (1, 4):
            pool.map(simulate, [1, 1, 1, 1], chunksize=chunksize, on_error="return")
        assert not pool._scheduler.functions._measured
        pool.map(simulate, [0, 1, 1, 1] * 4, chunksize=4, on_error="return")
        (measured,) = pool._scheduler.functions._measured.values()
        assert measured.own_seconds >= 0.002 <= measured.seconds


@pytest.mark.quick
@pytest.mark.parametrize(
    "seconds", [30 * 86400, 1e9, 1e300, math.inf, fractions.Fraction(10**10)], ids=str
)
def test_time_limits_of_any_length(seconds: Any, fork_server: mpgrad.Pool) -> None:
    # symptom: InternalError for all calls of the pool, OverflowError where one waited. cause: the
    # system takes milliseconds as 32 bits where the pool sleeps, and nanoseconds as 64 where a
    # caller does.
    with mpgrad.Pool(1, timeout=seconds) as pool:
        assert pool.map(abs, [-1], timeout=seconds) == [1]
        future, result = pool.submit(time.sleep, 0.02), pool.map_async(time.sleep, [0.02])
        future.cancel_after(seconds)
        assert future.result(seconds) is None and future.exception(seconds) is None
        result.wait(seconds)
        assert result.get(seconds) == [None]
        assert pool.imap(time.sleep, [0.02]).next(seconds) is None
    with mpgrad.Executor(1, timeout=seconds) as executor:
        assert list(executor.map(time.sleep, [0.02], timeout=seconds)) == [None]


WAITS: dict[str, Callable[[mpgrad.Pool, Any], Any]] = {
    "a map": lambda pool, seconds: pool.map(abs, [-1], timeout=seconds),
    "get": lambda pool, seconds: pool.map_async(abs, [-1]).get(seconds),
    "wait": lambda pool, seconds: pool.map_async(abs, [-1]).wait(seconds),
    "next": lambda pool, seconds: pool.imap(abs, [-1]).next(seconds),
    "result": lambda pool, seconds: pool.submit(abs, -1).result(seconds),
    "exception": lambda pool, seconds: pool.submit(abs, -1).exception(seconds),
    "cancel_after": lambda pool, seconds: pool.submit(abs, -1).cancel_after(seconds),
}


@pytest.mark.quick
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_what_is_no_time_is_refused_by_name(
    pool: mpgrad.Pool, wait: Callable[[mpgrad.Pool, Any], Any]
) -> None:
    # symptom: "'>=' not supported between instances of 'str' and 'int'", "int too large to convert
    # to float"
    for wrong, error in {
        "5": TypeError,
        True: TypeError,
        math.nan: ValueError,
        10**400: ValueError,
    }.items():
        with pytest.raises(
            error, match=rf"(timeout|seconds) must be a number of seconds.*: {wrong!r}\)"
        ):
            wait(pool, wrong)
    with pytest.raises(ValueError, match=r"more than 1000 digits\)"):
        wait(pool, 10**5000)
    assert pool.map(abs, [-1]) == [1]


def stops(k: int) -> int:
    if k == 1:
        raise StopIteration(k)
    return k


ITERATIONS: dict[str, Callable[[mpgrad.Pool, Callable[[Any], Any], list[Any]], Any]] = {
    "imap": lambda pool, fn, items: list(pool.imap(fn, items)),
    "imap_unordered": lambda pool, fn, items: list(pool.imap_unordered(fn, items)),
    "map_reduce": lambda pool, fn, items: pool.map_reduce(fn, items, lambda a, b: a + b),
}


@pytest.mark.quick
@pytest.mark.parametrize("iterate", ITERATIONS.values(), ids=ITERATIONS)
def test_a_stop_iteration_ends_nothing_silently(
    pool: mpgrad.Pool, iterate: Callable[..., Any]
) -> None:
    # symptom: fewer results, fewer items in a sum, no error. cause: who asked for results, or `map`
    # in a worker, took it for the end. As in a generator it becomes a RuntimeError.
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        iterate(pool, stops, [0, 1, 2])
    assert isinstance(caught.value.__cause__, StopIteration) or "generator raised" in str(
        caught.value
    )


def test_what_tasks_of_an_executor_raise_is_no_end_and_no_timeout(fork_server: mpgrad.Pool) -> None:
    def fails(error: BaseException) -> None:
        raise error

    with mpgrad.Executor(1) as executor:
        with pytest.raises(RuntimeError, match="item 1 of stops raised StopIteration"):
            list(executor.map(stops, [0, 1, 2]))
        # symptom: "a result did not come ..."
        with pytest.raises(multiprocessing.TimeoutError, match="of the task"):
            list(executor.map(fails, [multiprocessing.TimeoutError("of the task")]))
        for error in (StopAsyncIteration(), GeneratorExit()):
            with pytest.raises(type(error)):
                list(executor.map(fails, [error]))


class Submits:
    """Uses an executor where it is pickled, in a thread of its own if need be."""

    def __init__(self, executor: mpgrad.Executor, in_thread: bool) -> None:
        self.executor, self.in_thread = executor, in_thread

    def __reduce__(self) -> Any:
        found = []
        ask = threading.Thread(
            target=lambda: found.append(self.executor.submit(abs, -3).result(20)), daemon=True
        )
        if self.in_thread:
            ask.start()
            ask.join(20)
        else:
            ask.run()
        return int, (found[0],)


@pytest.mark.parametrize("in_thread", [False, True])
def test_code_that_pickles_may_use_the_executor(fork_server: mpgrad.Pool, in_thread: bool) -> None:
    # symptom: a hang. cause: `submit` held a lock, which is not re-entrant, while the caller's code
    # pickled the arguments.
    with mpgrad.Executor(1) as executor:
        ask = threading.Thread(
            target=lambda: found.append(executor.submit(abs, Submits(executor, in_thread))),
            daemon=True,
        )
        found: list[Any] = []
        ask.start()
        ask.join(20)
        assert found and found[0].result(20) == 3


def test_statistics_without_a_free_descriptor(pool2: mpgrad.Pool) -> None:
    # symptom: OSError from `stats`. cause: how much memory a worker has is read from a file.
    pool2.map(abs, [-1] * 8, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        found = pool2.stats()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [each.resident_bytes for each in found.workers] == [0, 0] and found.calls >= 8


@pytest.mark.quick
def test_backwards_are_forgotten_by_several_threads_at_once() -> None:
    # symptom: KeyError, or "dictionary changed size during iteration". cause: two threads found the
    # same oldest one.
    by_task: dict[int, int] = {}
    errors, numbers = [], itertools.count()

    def use() -> None:
        try:
            for _ in range(10_000):
                by_task[next(numbers)] = 0
                forget_oldest(by_task)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == [] and len(by_task) < 300


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


def forgets_its_next_sum() -> None:
    CaptureSums: Any = importlib.import_module("mpgrad.workers.functions").CaptureSums
    add = CaptureSums.add

    def forgets(self: Any, grads: Any) -> None:
        CaptureSums.add = add

    CaptureSums.add = forgets


def test_a_sum_of_capture_gradients_that_lacks_calls(fork_server: mpgrad.Pool) -> None:
    # symptom: no gradient, silently. cause: of how many calls a sum is was looked at only for
    # backwards that were eager.
    weight = torch.linspace(1, 2, 3, requires_grad=True)
    xs = [torch.ones(3), torch.full((3,), 2.0)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (weight * x).sin().sum()

    with mpgrad.Pool(1, graphs="keep") as pool:
        pool.apply(forgets_its_next_sum)
        (2 * sum(pool.map(fn, xs))).backward()
    (expected,) = torch.autograd.grad(2 * sum(fn(x) for x in xs), [weight])
    torch.testing.assert_close(weight.grad, expected)


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
    under_way.progress_record = progress._numbers
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
