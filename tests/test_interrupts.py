"""An interrupt stops the work: what nobody can ask for any more is called off, running calls with their workers."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE, staffed

import mpgrad

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("interruptible")

FOR_EVER = 600.0  # seconds
SOON = 3.0  # seconds until a pool has its full strength again; on an idle machine it takes a third of one


# --- what tasks do


def spins() -> None:
    while True:
        pass


def sleeps() -> None:
    time.sleep(FOR_EVER)


def computes() -> None:
    """One operation of torch, which looks at no signal: some ten seconds."""
    torch.linalg.svd(torch.ones(3000, 3000))


BUSY = [spins, sleeps, computes]


def begin(folder: Path, busy: Callable[[], None], x: Any) -> Any:
    (folder / f"begun {x}").touch()
    busy()
    return x


def meet(folder: Path, number: int) -> bool:
    """Both workers have to be there at the same time."""
    (folder / f"here {number}").touch()
    wait_for(lambda: count(folder, "here") == 2)
    return True


class Stuck(torch.autograd.Function):
    """The identity, whose backward says that it has begun, and does something for as long as nobody has said `go`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, folder: Path, busy: Callable[[], None]) -> Tensor:
        ctx.folder, ctx.busy = folder, busy
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ctx.folder / f"begun {int(grad.sum())}").touch()
        if not (ctx.folder / "go").exists():
            ctx.busy()
        return grad * 2, None, None


def stuck_in_backward(folder: Path, busy: Callable[[], None], x: Tensor) -> Tensor:
    return Stuck.apply(x.sin(), folder, busy).sum()


def wave(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


# --- what tests do


def count(folder: Path, word: str) -> int:
    return sum(path.name.startswith(word) for path in folder.iterdir())


def forget_begun(folder: Path) -> None:
    for path in folder.glob("begun*"):
        path.unlink()


def wait_for(there: Callable[[], bool], patience: float = 30) -> None:
    end = time.monotonic() + patience
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


@contextlib.contextmanager
def interrupted(when: Callable[[], bool], expected: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Ctrl-C comes as soon as `when()`, and leaves the block."""

    def interrupt() -> None:
        wait_for(when)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(expected):
        thread.start()
        yield
    thread.join()


def somebody_waits(pool: mpgrad.Pool) -> bool:
    return bool(pool._scheduler._waiters)  # type: ignore[attr-defined]


def assert_at_full_strength(pool: mpgrad.Pool, folder: Path) -> None:
    folder = folder / f"strength {time.monotonic_ns()}"
    folder.mkdir()
    started = time.monotonic()
    assert pool.map(functools.partial(meet, folder), range(2), 1) == [True, True]
    assert time.monotonic() - started < SOON


def leaves(count: int) -> list[Tensor]:
    return [torch.linspace(-1, 1, 5 + k).mul(k + 1).requires_grad_() for k in range(count)]


def gradients(xs: list[Tensor]) -> list[Tensor | None]:
    return [x.grad for x in xs]


def serial_gradients(fn: Callable[[Tensor], Tensor], xs: list[Tensor]) -> list[Tensor | None]:
    copies = [x.detach().clone().requires_grad_() for x in xs]
    sum(fn(x) for x in copies).backward()  # type: ignore[union-attr]
    return gradients(copies)


# --- in forward


@pytest.mark.parametrize("busy", BUSY)
def test_a_map(fresh_pool: mpgrad.Pool, tmp_path: Path, busy: Callable[[], None]) -> None:
    staffed(fresh_pool)
    for round in range(2):  # twice in a row
        with interrupted(lambda: count(tmp_path, "begun") == 2):
            fresh_pool.map(functools.partial(begin, tmp_path, busy), range(50), 1)
        forget_begun(tmp_path)
        if round or busy is sleeps:
            assert_at_full_strength(fresh_pool, tmp_path)
    assert count(tmp_path, "begun") == 0  # none of those that waited has begun since


def in_a_map_reduce(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.map_reduce(function, range(2), "sum")


def in_a_reduce(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.reduce(lambda target, item: function(target), [1], [1, 2])


def in_apply(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.apply(function, (1,))


def in_a_starmap(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.starmap(function, [(1,), (2,)])


def in_a_map_with_progress(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.map(function, range(2), progress=True)


def in_get(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.map_async(function, range(2)).get()


def in_wait(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.map_async(function, range(2)).wait()


def in_result(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.submit(function, 1).result()


def in_exception(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.submit(function, 1).exception()


def in_imap(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    for _ in pool.imap(function, range(9)):
        pass


def in_imap_unordered(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    next(pool.imap_unordered(function, range(9)))


def in_synchronize(pool: mpgrad.Pool, function: Callable[[Any], Any]) -> None:
    pool.submit(function, 1)
    pool.synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        in_a_map_reduce,
        in_a_reduce,
        in_apply,
        in_a_starmap,
        in_a_map_with_progress,
        in_get,
        in_wait,
        in_result,
        in_exception,
        in_imap,
        in_imap_unordered,
        in_synchronize,
    ],
)
def test_every_way_to_wait(fresh_pool: mpgrad.Pool, tmp_path: Path, wait: Callable[..., None]) -> None:
    with interrupted(lambda: count(tmp_path, "begun") > 0):
        wait(fresh_pool, functools.partial(begin, tmp_path, sleeps))
    assert_at_full_strength(fresh_pool, tmp_path)
    assert fresh_pool.apply(abs, (-1,)) == 1


@pytest.mark.parametrize("moment", ["in the map", "in the shutdown"])
def test_an_executor(nursery: mpgrad.Pool, tmp_path: Path, moment: str) -> None:
    function = functools.partial(begin, tmp_path, sleeps)
    started = time.monotonic()
    with interrupted(lambda: count(tmp_path, "begun") == 2), mpgrad.Executor(2) as executor:
        results = executor.map(function, range(9))
        if moment == "in the map":
            list(results)
        else:
            del results
            for k in range(9):
                executor.submit(function, k)
    executor.shutdown()  # waits for nothing
    assert time.monotonic() - started < SOON


def test_a_future_that_somebody_holds_is_still_wanted(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    def task(x: Tensor) -> Tensor:
        (tmp_path / "begun").touch()
        wait_for((tmp_path / "go").exists)
        return x * 3

    x = torch.ones(2, requires_grad=True)
    future, result = fresh_pool.submit(task, x), fresh_pool.map_async(task, [x])
    results = fresh_pool.imap(task, [x])
    for wait in (future.result, future.exception, result.get, result.wait, results.next, fresh_pool.synchronize):
        with interrupted(functools.partial(somebody_waits, fresh_pool)):
            wait()
    assert fresh_pool.stats().deaths == 0 and not future.done() and not result.ready()
    (tmp_path / "go").touch()
    (future.result() + result.get()[0] + next(results)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [9, 9]


def test_a_timeout_is_no_interrupt(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    future = fresh_pool.submit(wait_for, (tmp_path / "go").exists)
    result = fresh_pool.apply_async(wait_for, [(tmp_path / "go").exists])
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    with pytest.raises(multiprocessing.TimeoutError):
        result.get(timeout=0.01)
    touched = (tmp_path / "go").touch
    done = []
    future.add_done_callback(lambda _: done.append(1))
    del future, result
    touched()
    fresh_pool.synchronize()
    assert done == [1] and fresh_pool.stats().deaths == 0


def test_somebody_is_still_to_be_told(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    told: list[object] = []
    task = functools.partial(wait_for, (tmp_path / "go").exists)
    future = fresh_pool.submit(task)
    future.add_done_callback(told.append)
    result = fresh_pool.apply_async(task, callback=told.append)
    for wait in (future.result, result.get):
        with interrupted(functools.partial(somebody_waits, fresh_pool)):
            wait()
    del future, result, wait
    (tmp_path / "go").touch()
    wait_for(lambda: len(told) == 2)


# --- in backward


@pytest.mark.parametrize("busy", BUSY)
def test_a_backward(fresh_pool: mpgrad.Pool, tmp_path: Path, busy: Callable[[], None]) -> None:
    """Later it comes to its end, and gives what it would have given."""
    staffed(fresh_pool)
    xs, ys = leaves(6), leaves(2)
    results = fresh_pool.map(functools.partial(stuck_in_backward, tmp_path, busy), xs, 1)
    others = fresh_pool.map(wave, ys, 1)  # whose graphs are on the same workers
    for _ in range(2):
        forget_begun(tmp_path)
        with interrupted(lambda: count(tmp_path, "begun") > 0):
            sum(results).backward(retain_graph=True)
        assert_at_full_strength(fresh_pool, tmp_path)
    (tmp_path / "go").touch()
    for x in xs:
        x.grad = None
    sum(results).backward()
    sum(others).backward()
    assert_same(gradients(xs), serial_gradients(lambda x: stuck_in_backward(tmp_path, busy, x), xs))
    assert_same(gradients(ys), serial_gradients(wave, ys))


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
