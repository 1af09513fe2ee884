"""Results asked for later: AsyncResult, iterators and Futures, as in multiprocessing and
concurrent.futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.pool
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import PATIENCE, eventually, staffed
from inside import (
    LIMIT,
    before_ends_are_told,
    borrowed_by,
    break_off,
    hung_calls_are_overdue,
    let_it_hear,
    let_waiting_threads_look,
    waiting_threads,
)

import mpgrad
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import OperationOptions

pytestmark = pytest.mark.quick


def leaf() -> torch.Tensor:
    return torch.arange(3.0, dtype=torch.float64).requires_grad_()


def fails(x: Any) -> Any:
    raise LookupError("no")


def test_map_async(pool: mpgrad.Pool) -> None:
    x = leaf()
    result = pool.map_async(torch.exp, [x, x * 2])
    values = result.get(30)
    assert result.ready() and result.successful() and result.get() is values
    sum(v.sum() for v in values).backward()
    torch.testing.assert_close(x.grad, x.exp() + 2 * (2 * x).exp())


def test_starmap_async_and_apply_async(pool: mpgrad.Pool) -> None:
    assert pool.starmap_async(pow, [(2, 3), (4, 2)]).get(30) == [8, 16]
    assert pool.apply_async(int, ("11",), {"base": 2}).get(30) == 3


def asks_with(
    pool: mpgrad.Pool, fn: Callable[..., Any], *args: Any, **options: Any
) -> dict[str, Callable[[], Any]]:
    return {
        "apply": lambda: pool.apply(fn, args, **options),
        "apply_async": lambda: pool.apply_async(fn, args, **options).get(),
    }


@pytest.mark.parametrize("name", ["apply", "apply_async"])
def test_a_time_limit_of_one_call_is_that_of_a_pool(
    fork_server: mpgrad.Pool, tmp_path: Path, name: str
) -> None:
    def hangs(begun: Path) -> None:
        begun.touch()
        time.sleep(600)

    late = []
    for of_pool, of_call in ((LIMIT, None), (None, LIMIT), (2 * LIMIT, LIMIT)):
        begun = tmp_path / f"{of_pool} {of_call}"
        with (
            mpgrad.Pool(1, retries=0, timeout=of_pool) as pool,
            hung_calls_are_overdue(pool, begun.exists),
            pytest.raises(mpgrad.CallTimeoutError) as caught,
        ):
            asks_with(pool, hangs, begun, timeout=of_call)[name]()
        late.append(
            (caught.value.call, caught.value.item, caught.value.seconds, caught.value.detail)
        )
    assert (
        late
        == [("a call of hangs", None, LIMIT, "the call was tried once (timeout_retries: 0)")] * 3
    )


@pytest.mark.parametrize("name", ["apply", "apply_async"])
def test_a_time_limit_holds_for_one_call_and_its_backward(
    fork_server: mpgrad.Pool, tmp_path: Path, name: str
) -> None:
    x, begun = leaf(), tmp_path / "begun"
    with mpgrad.Pool(1, retries=0) as pool, hung_calls_are_overdue(pool, begun.exists):
        asks_with(pool, torch.exp, x, timeout=LIMIT)[name]().sum().backward()
        assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]
        # it is loaded now
        asks_with(pool, BackwardUntil.apply, x, tmp_path)[name]().sum().backward()
        slow = asks_with(pool, BackwardUntil.apply, x, tmp_path / "never", timeout=LIMIT)[name]()
        with pytest.raises(mpgrad.CallTimeoutError) as caught:
            slow.sum().backward()
        assert (caught.value.phase, caught.value.seconds) == ("backward", LIMIT)
        unlimited = pool.submit(until, tmp_path / "go")
        with pytest.raises(multiprocessing.TimeoutError):  # that is not its end
            pool.apply_async(until, (tmp_path / "go",)).get(timeout=0.3)
        (tmp_path / "go").touch()
        assert unlimited.result(30) is None


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(1e-3)


class BackwardUntil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: Path) -> torch.Tensor:
        ctx.path = path
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if not ctx.path.exists():
            (ctx.path.parent / "begun").touch()
        until(ctx.path)
        return grad * 2, None


def test_a_time_limit_that_cannot_be(pool: mpgrad.Pool) -> None:
    engine = pool._options.engine
    for ask in asks_with(pool, abs, -1, timeout=0).values():
        with pytest.raises(
            ValueError,
            match="must be more than 0" if engine == "process" else "workers that can be killed",
        ):
            ask()
    for ask in asks_with(pool, abs, -1, timeout="1").values():
        with pytest.raises(
            TypeError, match=r"timeout must be a number of seconds, or None \(timeout: '1'\)"
        ):
            ask()


def given(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


KEYWORDS = {
    "timeout": 1,
    "device": "cuda",
    "chunksize": 2,
    "progress": 3,
    "on_error": 4,
    "fn": 5,
    "func": 6,
    "self": 7,
}


@pytest.mark.parametrize("devices", [None, ["cpu"]])
def test_keywords_are_the_functions(fork_server: mpgrad.Pool, devices: list[str] | None) -> None:
    """As with `multiprocessing.pool.ThreadPool` and `concurrent.futures.ThreadPoolExecutor`."""
    with (
        concurrent.futures.ThreadPoolExecutor(1) as executor,
        multiprocessing.pool.ThreadPool(1) as other,
    ):
        expected = executor.submit(given, 1, **KEYWORDS).result()
        assert other.apply(given, (1,), KEYWORDS) == expected
    with mpgrad.Pool(None if devices else 1, devices=devices) as pool:
        assert pool.submit(given, 1, **KEYWORDS).result() == expected
        assert pool.apply(given, (1,), KEYWORDS) == expected
        assert (
            pool.apply_async(given, (1,), KEYWORDS, timeout=60, device=devices and "cpu").get()
            == expected
        )
    with mpgrad.Executor(None if devices else 1, devices=devices) as executor:
        assert executor.submit(given, 1, **KEYWORDS).result() == expected


def test_results_fetched_under_other_modes(pool: mpgrad.Pool) -> None:
    x = leaf()
    result = pool.apply_async(torch.exp, (x,))
    with torch.no_grad():
        value = result.get(30)
    value.sum().backward()
    assert torch.equal(x.grad, x.exp().detach())
    with torch.no_grad():
        result = pool.apply_async(torch.exp, (x,))
    assert not result.get(30).requires_grad


def test_errors_of_async_results(pool: mpgrad.Pool) -> None:
    result = pool.map_async(fails, [1, 2])
    result.wait(30)
    assert result.ready() and not result.successful()
    for _ in range(2):
        with pytest.raises(LookupError, match="no"):
            result.get()


def test_not_ready(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    result = fresh_pool.apply_async(until, (tmp_path / "go",))
    with pytest.raises(
        multiprocessing.TimeoutError, match=r"no result within the timeout of get \(0.01 s\)"
    ):
        result.get(0.01)
    with pytest.raises(ValueError, match="the result is not ready"):
        result.successful()
    assert not result.ready()
    result.wait(0.01)
    (tmp_path / "go").touch()
    assert result.get(30) is None


def test_callbacks(pool: mpgrad.Pool) -> None:
    done = threading.Semaphore(0)
    seen: list[Any] = []

    def remember(value: Any) -> None:
        seen.append(value)
        done.release()

    x = leaf()
    pool.map_async(torch.exp, [x], callback=remember, error_callback=remember)
    assert done.acquire(timeout=30)
    pool.apply_async(fails, (1,), callback=remember, error_callback=remember)
    assert done.acquire(timeout=30)
    ((value,), error) = seen
    assert isinstance(error, LookupError)
    value.sum().backward()
    assert torch.equal(x.grad, x.exp().detach())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """That the result has been taken. The scheduling thread tells nobody of an end before."""
    asks, taken = threading.current_thread(), threading.Event()
    # with engine "inline" it is the same thread
    before_ends_are_told(
        monkeypatch, lambda: threading.current_thread() is asks or taken.wait(PATIENCE)
    )
    return taken


@pytest.mark.parametrize("name", ["map_async", "apply_async"])
@pytest.mark.parametrize("function", [abs, fails])
def test_a_callback_is_told_though_somebody_has_the_result_already(
    pool: mpgrad.Pool, taken: threading.Event, name: str, function: Any
) -> None:
    """Symptom: now and then, an `error_callback` was never called.

    Cause: `get` takes the outcomes as soon as all calls have ended, and the scheduling thread then
    looked for a failure there.
    """
    told = queue.SimpleQueue[Any]()
    result = getattr(pool, name)(function, [-1], callback=told.put, error_callback=told.put)
    while not result.ready():
        time.sleep(0)
    try:
        wanted = result.get()
    except LookupError as error:
        wanted = error
    taken.set()
    assert told.get(timeout=30) is wanted


def test_a_failure_that_was_asked_for_does_not_surface_again(
    pool: mpgrad.Pool, taken: threading.Event
) -> None:
    """Whoever asks may be faster than the scheduling thread, which notes the failure for
    `synchronize`."""
    result = pool.map_async(fails, [-1])
    while not result.ready():
        time.sleep(0)
    with pytest.raises(LookupError):
        result.get()
    taken.set()
    pool.synchronize()


def test_synchronize_waits_until_a_failure_is_noted(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By reading: it could return as soon as the last call had ended, before callbacks and notes of
    its failure."""
    gate, is_telling, may_tell = tmp_path / "gate", threading.Event(), threading.Event()

    def waits_and_fails() -> None:
        while not gate.exists():
            time.sleep(1e-3)
        raise LookupError("no")

    result = pool2.apply_async(waits_and_fails)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        waits = executor.submit(pool2.synchronize)
        while not waiting_threads(pool2):
            time.sleep(0)
        # behind the order by which `synchronize` looks for what is under way
        let_it_hear(pool2)
        before_ends_are_told(monkeypatch, lambda: (is_telling.set(), may_tell.wait(PATIENCE)))
        gate.touch()
        assert is_telling.wait(30)
        let_waiting_threads_look(pool2)  # it asks, now that the call has ended
        ended, _ = concurrent.futures.wait([waits], timeout=0.2)
        may_tell.set()
        assert not ended and result.ready()
        with pytest.raises(LookupError):
            waits.result()


def test_nobody_takes_outcomes_before_the_first_failure_is_known() -> None:
    """By reading: `get` could raise the exception of a later item. Cause: the operation was
    `finished` for an instant."""

    class Watched(Operation):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            # another thread may look here
            if name in ("delivered", "limit") and len(self.outcomes) > 0 and self.finished:
                assert self.outcomes.keys() >= set(range(min(self.added, self.limit)))
                assert self.first_failure() is self.outcomes[self.limit]

    operation = Watched(OperationOptions(SimpleNamespace(names=None), None, None, None), None)  # type: ignore[arg-type]
    operation.added, operation.sealed = 8, True
    for index, outcome in (
        (5, LookupError()),
        (6, None),
        (3, LookupError()),
        (0, None),
        (2, None),
        (1, LookupError()),
    ):
        assert not operation.finished
        operation.deliver(index, outcome)  # type: ignore[arg-type]
    assert operation.finished and operation.limit == 1


def test_a_callback_that_raises_does_no_harm(
    pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="mpgrad"):
        pool2.apply_async(abs, (-1,), callback=fails).get()
        assert pool2.map(abs, [-2]) == [2]
    assert "a callback of the pool raised" in caplog.text


def test_imap(pool: mpgrad.Pool) -> None:
    xs = [torch.full((n,), 2.0, requires_grad=True) for n in range(50)]
    for count, (result, x) in enumerate(zip(pool.imap(lambda t: t**2, xs), xs, strict=True)):
        assert result.shape == (count,)
        result.sum().backward()
        assert torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize("chunksize", [1, 7, None])
def test_imap_unordered(pool: mpgrad.Pool, chunksize: int | None) -> None:
    results = pool.imap_unordered(lambda k: k * k, range(100), chunksize)
    assert sorted(results) == [k * k for k in range(100)]


def test_imap_takes_only_what_it_needs(pool2: mpgrad.Pool) -> None:
    taken: list[int] = []

    def endless() -> Iterator[int]:
        for k in itertools.count():
            taken.append(k)
            yield k

    results = pool2.imap(lambda k: -k, endless())
    assert [next(results) for _ in range(10)] == [-k for k in range(10)]
    assert len(taken) < 100
    del results
    assert pool2.map(abs, [-1]) == [1]


def test_imap_goes_on_after_a_failing_item(pool: mpgrad.Pool) -> None:
    results = pool.imap(lambda k: 6 // k, [3, 0, 2])
    assert next(results) == 2
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == [3]


def test_imap_over_a_source_that_raises(pool: mpgrad.Pool) -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the source broke")

    results = pool.imap(abs, source())
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(OSError, match="the source broke"):
        next(results)
    assert list(results) == []


def test_map_over_a_source_that_raises(pool: mpgrad.Pool) -> None:
    def source() -> Iterator[int]:
        yield from range(100)
        raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"):
        pool.map(abs, source())
    assert pool.map(abs, [-1]) == [1]


def test_submit(pool: mpgrad.Pool) -> None:
    x = leaf()
    future = pool.submit(torch.add, x, x, alpha=2)
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(30) is future.result()
    future.result().sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    failing = pool.submit(fails, 1)
    assert isinstance(failing.exception(30), LookupError)
    with pytest.raises(LookupError):
        failing.result()


def test_futures_of_many_submits(pool: mpgrad.Pool) -> None:
    futures = [pool.submit(pow, k, 2) for k in range(40)]
    assert [future.result(30) for future in futures] == [k * k for k in range(40)]
    done, not_done = concurrent.futures.wait([pool.submit(abs, -k) for k in range(10)], timeout=30)
    assert not not_done and sorted(future.result() for future in done) == list(range(10))
    assert sorted(
        f.result() for f in concurrent.futures.as_completed([pool.submit(abs, k) for k in (1, 2)])
    ) == [1, 2]


def test_futures_in_asyncio(pool2: mpgrad.Pool) -> None:
    async def both() -> list[int]:
        return await asyncio.gather(*(asyncio.wrap_future(pool2.submit(pow, k, 2)) for k in (2, 3)))

    assert asyncio.run(both()) == [4, 9]


def test_a_future_cancelled_before_it_began(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    busy = [fresh_pool.submit(until, tmp_path / "go") for _ in range(8)]
    last = fresh_pool.submit(abs, -1)
    assert last.cancel() and last.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        last.result()
    (tmp_path / "go").touch()
    assert [future.result(30) for future in busy] == [None] * 8
    assert not busy[0].cancel()
    assert fresh_pool.map(abs, [-1]) == [1]


def test_dropped_results_are_given_back(fresh_pool: mpgrad.Pool) -> None:
    def reads(count: int) -> bool:
        gc.collect()
        return len(borrowed_by(fresh_pool)) == count

    for _ in range(3):
        fresh_pool.map_async(torch.ones, [(50_000,)] * 6)
    fresh_pool.map(abs, range(10))
    kept = fresh_pool.map(torch.ones, [(50_000,)])
    eventually(lambda: reads(1))  # the dispatcher collects in a turn of its own
    del kept
    eventually(lambda: reads(0))


def test_memory_of_former_maps_is_given_back(fresh_pool: mpgrad.Pool) -> None:
    """By the caller, who has lent captures, and by the workers, who have lent results: 2 MB
    each."""

    def products(capture: torch.Tensor) -> None:
        fresh_pool.map(lambda k: capture * k, range(4), 1)

    def rounds(count: int) -> tuple[int, int]:
        for k in range(count):
            products(torch.full((500_000,), float(k)))  # a copy of each is sent
        gc.collect()
        fresh_pool.map(time.sleep, [0.02] * 8, 1)  # what is given back is told with an answer
        stats = fresh_pool.stats()
        return stats.shared_bytes, stats.resident_bytes

    staffed(fresh_pool)
    shared, resident = rounds(5)
    shared_later, resident_later = rounds(20)
    assert shared_later < shared + 10e6
    assert resident_later < resident + 40e6


class Large:
    """What a caller's frame holds."""


class Odd(Exception):
    """Takes other arguments than it keeps."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("odd")


ENDS: dict[str, Callable[[mpgrad.Pool], None]] = {
    "terminated": mpgrad.Pool.terminate,
    "broken": lambda pool: break_off(pool, Odd(1, 2)),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_each_who_waits_gets_an_error_of_its_own(
    end: Callable[[mpgrad.Pool], None], fork_server: mpgrad.Pool
) -> None:
    # symptom: four users' frames, 20 MiB each, stayed for as long as the pool, and each traceback
    # showed those of the others. cause: one PoolClosedError for all, which keeps the frames that it
    # is raised through.
    with mpgrad.Pool(1) as pool:
        result = pool.map_async(time.sleep, [60])
        future, results = pool.submit(abs, -1), pool.imap(abs, [-1])
        other = pool.submit(abs, future)
        asks: list[Callable[[], Any]] = [
            result.get,
            result.get,
            future.result,
            future.result,
            results.next,
            other.result,
        ]
        refs, errors = [], []

        def waits(ask: Callable[[], Any]) -> None:
            large = Large()
            refs.append(weakref.ref(large))
            try:
                ask()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=waits, args=(ask,)) for ask in asks]
        for thread in threads:
            thread.start()
        eventually(lambda: len(refs) == len(asks))
        end(pool)
        for thread in threads:
            thread.join(20)
        with contextlib.suppress(Exception):
            pool.map(abs, [-1])
        assert len(errors) == len(asks) == len(set(map(id, errors)))
        depths = [
            sum(1 for _ in traceback.walk_tb(error.__traceback__) if _[0].f_code is waits.__code__)
            for error in errors
        ]
        assert depths == [1] * len(asks)
        errors.clear()
        gc.collect()
        assert not [ref for ref in refs if ref() is not None]


def test_a_failure_and_a_cancellation_in_asyncio(fresh_pool: mpgrad.Pool) -> None:
    """Symptom on Python 3.15: None for a result, another exception. Cause: asyncio looks at private
    fields."""

    async def outcomes() -> list[Any]:
        failed, cancelled = fresh_pool.submit(int, "x"), fresh_pool.submit(time.sleep, 60)
        cancelled.cancel(force=True)
        return await asyncio.gather(
            *map(asyncio.wrap_future, (failed, cancelled)), return_exceptions=True
        )

    failed, cancelled = asyncio.run(outcomes())
    assert type(failed) is ValueError and type(cancelled) is asyncio.CancelledError


def test_threads_share_an_iterator(pool2: mpgrad.Pool) -> None:
    # symptom: lost items and KeyErrors. cause: `next` was not made for several threads, as
    # multiprocessing's is.
    results = pool2.imap(abs, range(600))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = [value for part in threads.map(lambda _: list(results), range(4)) for value in part]
    assert sorted(found) == list(range(600))


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
    eventually(lambda: not pool2.stats().operations)
