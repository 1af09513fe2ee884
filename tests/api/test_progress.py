"""How far something has come: bars, functions that are told, `Pool.progress`, and what `Pool.stats`
says in words."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import json
import multiprocessing
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import shown_progress

import mpgrad
import mpgrad.progress
from mpgrad import PoolStats, WorkerStats
from mpgrad.progress import Bar, ProgressState, Reporter, seconds_left
from mpgrad.torch_state.private import current_graph_task

ITEMS = range(-7, 0)
Told = list[tuple[int, int | None, float | None]]


@pytest.mark.quick
@pytest.mark.parametrize("progress", [True, "infants"])
def test_a_progress_bar(
    pool: mpgrad.Pool, progress: bool | str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pool.map(abs, ITEMS, progress=progress) == [7, 6, 5, 4, 3, 2, 1]
    assert pool.map_reduce(abs, [torch.tensor(-2), torch.tensor(3)], "sum", progress=progress) == 5
    bar = capsys.readouterr().err
    assert "7/7" in bar and "2/2" in bar
    assert ("infants" in bar) == (progress == "infants")


def test_progress_without_tqdm(pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    for run in (pool2.map, pool2.map_async, pool2.imap):
        with pytest.raises(
            ImportError, match="progress needs tqdm, which is not installed; pip install tqdm"
        ):
            run(abs, [1], progress=True)
    with pytest.raises(ImportError, match="progress needs tqdm"), pool2.progress():
        raise AssertionError("it does not begin")
    assert importlib.import_module("tqdm")


FORMS: dict[str, Callable[[mpgrad.Pool, Any], list[Any]]] = {
    "map": lambda pool, told: pool.map(abs, ITEMS, progress=told),
    "starmap": lambda pool, told: pool.starmap(abs, [(x,) for x in ITEMS], progress=told),
    "map_async": lambda pool, told: pool.map_async(abs, ITEMS, progress=told).get(),
    "starmap_async": lambda pool, told: pool.starmap_async(
        abs, [(x,) for x in ITEMS], progress=told
    ).get(),
    "imap": lambda pool, told: list(pool.imap(abs, ITEMS, progress=told)),
    "imap_unordered": lambda pool, told: sorted(
        pool.imap_unordered(abs, ITEMS, progress=told), reverse=True
    ),
    "map of a generator": lambda pool, told: pool.map(abs, (x for x in ITEMS), progress=told),
}


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_a_function_is_told(pool: mpgrad.Pool, form: str) -> None:
    """The last it hears, before whoever waited goes on, is that all is done."""
    told: Told = []
    assert FORMS[form](pool, lambda *now: told.append(now)) == [7, 6, 5, 4, 3, 2, 1]
    assert told[-1] == (7, 7, 0.0)
    assert all(total == (None if form.endswith("generator") else 7) for _, total, _ in told[:-1])
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_what_fails_is_not_said_to_be_done(pool2: mpgrad.Pool) -> None:
    def fails_at_three(x: int) -> int:
        return x if x < 3 else 1 // 0

    told: Told = []
    with pytest.raises(ZeroDivisionError):
        pool2.map(fails_at_three, range(20), progress=lambda *now: told.append(now))
    done, total, _ = told[-1]
    assert done < 20 == total


def test_a_function_may_use_the_pool(pool: mpgrad.Pool) -> None:
    """It is not called by the scheduling thread, which would wait with it for ever."""
    told: Told = []

    def uses(done: int, total: int | None, left: float | None) -> None:
        told.append((done, total, pool.apply(abs, (-1,))))

    for form in FORMS.values():
        told.clear()
        assert form(pool, uses) == [7, 6, 5, 4, 3, 2, 1]
        assert told[-1] == (7, 7, 1)


# --- whose thread shows it


def until(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(1e-3)


class Shower:
    """Notes which threads call it, and that none does while another one is in it.

    The calls of `waits` end only when it has shown that the first is done.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self.shown = folder / f"shown {time.monotonic_ns()}"
        self.told: list[tuple[int, int | None]] = []
        self.threads: list[str] = []
        self.in_backward = False
        self._alone = threading.Lock()

    def __call__(self, done: int, total: int | None, left: float | None) -> None:
        assert self._alone.acquire(blocking=False)
        try:
            assert self.lock.acquire(timeout=20)
            self.lock.release()
            self.told.append((done, total))
            self.threads.append(threading.current_thread().name)
            self.in_backward |= current_graph_task() != -1
            if done:
                self.shown.touch()
        finally:
            self._alone.release()


def waits(shown: Path, x: int) -> int:
    if x:
        until(shown)
    return x


WAITS: dict[str, Callable[[mpgrad.Pool, Callable[[int], int], Any], Any]] = {
    "map": lambda pool, fn, told: pool.map(fn, range(5), 1, progress=told),
    "starmap": lambda pool, fn, told: pool.starmap(fn, [(x,) for x in range(5)], 1, progress=told),
    "map of a generator": lambda pool, fn, told: pool.map(
        fn, (x for x in range(5)), 1, progress=told
    ),
    "get": lambda pool, fn, told: pool.map_async(fn, range(5), 1, progress=told).get(),
    "wait": lambda pool, fn, told: pool.map_async(fn, range(5), 1, progress=told).wait(),
    "next": lambda pool, fn, told: list(pool.imap(fn, range(5), progress=told)),
    "next, unordered": lambda pool, fn, told: list(
        pool.imap_unordered(fn, range(5), progress=told)
    ),
    "map_reduce": lambda pool, fn, told: pool.map_reduce(
        lambda x: torch.tensor(fn(x)), range(5), "sum", progress=told
    ),
}


def leave_it_to_the_waiting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the callbacks thread could be faster than a thread that is about to
    wait."""
    monkeypatch.setattr(Reporter, "is_nowhere", False, raising=False)


@pytest.mark.parametrize("form", WAITS)
def test_a_function_that_needs_a_lock_of_the_waiting_thread(
    pool2: mpgrad.Pool, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # symptom: a hang for ever. cause: a thread of its own called the function, and the waiting
    # thread waited for its last call.
    leave_it_to_the_waiting_thread(monkeypatch)
    shower = Shower(tmp_path)
    task = functools.partial(waits, shower.shown)
    with shower.lock:
        WAITS[form](pool2, task, shower)
    # a map_reduce has blocks
    if form != "map_reduce":
        assert any(0 < done < 5 for done, _ in shower.told)
    assert shower.told[-1][0] == shower.told[-1][1]
    assert {*shower.threads} == {threading.current_thread().name}


@pytest.mark.parametrize("wait", ["map", "next", "get", "result"])
def test_a_block_whose_function_needs_a_lock_of_the_waiting_thread(
    pool2: mpgrad.Pool, tmp_path: Path, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_it_to_the_waiting_thread(monkeypatch)
    shower = Shower(tmp_path)
    task = functools.partial(waits, shower.shown)
    with shower.lock, pool2.progress(shower):
        if wait == "result":
            futures = [pool2.submit(task, x) for x in range(5)]
            assert [future.result() for future in futures] == [*range(5)]
        else:
            WAITS[wait](pool2, task, False)
    assert shower.told[-1] == (5, 5)
    assert {*shower.threads} == {threading.current_thread().name}


def test_between_two_results_the_callbacks_thread_shows(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    for ask in (
        lambda task, shower: pool2.map_async(task, range(5), 1, progress=shower).get,
        lambda task, shower: pool2.imap(task, range(5), progress=shower).__next__,
    ):
        shower = Shower(tmp_path)
        get = ask(functools.partial(waits, shower.shown), shower)
        until(shower.shown)
        get()
        assert shower.threads[0] == "mpgrad-callbacks"


def test_one_thread_at_a_time_is_in_a_function(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    shower = Shower(tmp_path)
    result = pool2.map_async(abs, (time.sleep(0.01) or x for x in range(30)), 1, progress=shower)
    with pool2.progress(Shower(tmp_path)), concurrent.futures.ThreadPoolExecutor(4) as threads:
        got = [threads.submit(result.get) for _ in range(4)]
        got += [threads.submit(pool2.map, abs, range(30), 1) for _ in range(4)]
        assert all(each.result() == [*range(30)] for each in got)
    assert shower.told[-1] == (30, 30)
    assert shower.told == sorted({*shower.told})


def test_a_result_does_not_wait_for_a_function_in_another_thread(
    pool2: mpgrad.Pool, tmp_path: Path
) -> None:
    """The function was called before the thread that has its lock waited; it is called once more
    when it has the lock."""
    shower, is_in = Shower(tmp_path), threading.Event()

    def show(done: int, total: int | None, left: float | None) -> None:
        is_in.set()
        shower(done, total, left)

    with shower.lock:
        result = pool2.map_async(until, [tmp_path / "go"], progress=show)
        assert is_in.wait(20)
        (tmp_path / "go").touch()
        assert result.get(20) == [None]
        assert shower.told == []
    deadline = time.monotonic() + 20
    while shower.told[-1:] != [(1, 1)] and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert shower.told == [(0, 1), (1, 1)]
    assert {*shower.threads} == {"mpgrad-callbacks"}


def test_an_inline_pool_shows_between_calls(tmp_path: Path) -> None:
    shower = Shower(tmp_path)
    with mpgrad.Pool(1, engine="inline") as pool:
        pool.map(time.sleep, [0.11] * 3, 1, progress=shower)
    assert shower.told == [(1, 3), (2, 3), (3, 3)]
    assert {*shower.threads} == {threading.current_thread().name}


def test_a_map_within_a_backward(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    shower, x = Shower(tmp_path), torch.ones(2, requires_grad=True)
    task = functools.partial(waits, shower.shown)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        pool2.map(task, range(5), 1, progress=shower)
        return grad * 2

    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4, 4]
    assert shower.told[-1] == (5, 5) and not shower.in_backward
    assert {*shower.threads} == {"mpgrad-callbacks"}


def test_a_slow_function_delays_no_kill(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    kills: list[int] = []

    def slow(done: int, total: int | None, left: float | None) -> None:
        deadline = time.monotonic() + 20
        while not fresh_pool.stats().deaths and time.monotonic() < deadline:
            time.sleep(1e-3)
        kills.append(fresh_pool.stats().deaths)

    fresh_pool.map(
        until, [tmp_path / "never"], timeout=0.3, progress=slow, on_error="return", chunksize=1
    )
    assert kills[0] >= 1


@pytest.mark.parametrize("form", ["map", "get", "next"])
def test_an_interrupt_in_a_function(
    fresh_pool: mpgrad.Pool, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited ends as by any interrupt."""
    leave_it_to_the_waiting_thread(monkeypatch)
    told: Told = []

    def interrupted(done: int, total: int | None, left: float | None) -> None:
        told.append((done, total, left))
        raise KeyboardInterrupt

    task = functools.partial(waits, tmp_path / "never")
    fresh_pool.map(abs, range(2), 1)
    wait = WAITS[form]
    with pytest.raises(KeyboardInterrupt):
        if form == "next":
            results = fresh_pool.imap(task, range(5), progress=interrupted)
            next(results), next(results)
        else:
            wait(fresh_pool, task, interrupted)
    results = None
    assert len(told) == 1
    assert fresh_pool.map(abs, range(-5, 0)) == [5, 4, 3, 2, 1]
    assert all(each.is_closed for each in shown_progress(fresh_pool))


def test_an_exit_in_the_callbacks_thread(
    pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    result = pool2.map_async(time.sleep, [0.3], progress=lambda *_: sys.exit(3))
    while not caplog.records:
        time.sleep(1e-3)
    assert result.get() == [None]
    assert "progress is no longer shown" in caplog.records[0].message
    assert "SystemExit" in caplog.records[0].message


def test_a_function_that_raises_stops_nothing(
    pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(done: int, total: int | None, left: float | None) -> None:
        raise KeyError(done)

    assert pool2.map(abs, ITEMS, progress=broken) == [7, 6, 5, 4, 3, 2, 1]
    (record,) = caplog.records
    assert (
        "progress is no longer shown" in record.message
        and "broken" in record.message
        and "KeyError" in record.message
    )


@pytest.mark.quick
def test_a_function_of_other_arguments_is_refused(pool2: mpgrad.Pool) -> None:
    with pytest.raises(
        TypeError, match=r"progress must take three arguments: .* \(too many positional"
    ):
        pool2.map(abs, ITEMS, progress=lambda done: None)  # type: ignore[arg-type, misc]
    # which tells nothing of its arguments
    assert pool2.map(abs, ITEMS, progress=max) == [7, 6, 5, 4, 3, 2, 1]


def test_nothing_is_told_of_a_total_of_nothing(pool2: mpgrad.Pool) -> None:
    """Who divides by it would fail."""
    told: list[Any] = []
    assert pool2.map(abs, [], progress=lambda *found: told.append(found)) == []
    with pool2.progress(lambda *found: told.append(found)):
        pass
    assert set(told) <= {(0, None, None)}


def test_nothing_is_made_where_nothing_is_asked_for(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mpgrad.progress.Reporter, "__init__", lambda *_: pytest.fail("a reporter is made")
    )
    for run in FORMS.values():
        assert run(pool2, False) == [7, 6, 5, 4, 3, 2, 1]


def test_a_block_counts_all_that_the_pool_does(pool: mpgrad.Pool) -> None:
    """Calls that were submitted before it, too, if they are still to be done; and each backward."""
    xs = [torch.ones(3, requires_grad=True) for _ in ITEMS]
    told: Told = []
    pool.map(abs, ITEMS)  # what was done before does not count
    with pool.progress(lambda *now: told.append(now)):
        futures = [pool.submit(torch.sum, x) for x in xs]
        loss = torch.stack([future.result() for future in futures]).sum()
    assert told[-1] == (7, 7, 0.0)
    with pool.progress(lambda *now: told.append(now)):
        loss.backward()
    assert told[-1] == (7, 7, 0.0)
    assert all(x.grad is not None and x.grad.equal(torch.ones(3)) for x in xs)


def test_a_block_of_an_executor(fork_server: mpgrad.Pool) -> None:
    told: Told = []
    with mpgrad.Executor(1) as executor, executor.progress(lambda *now: told.append(now)):
        with executor.timeline() as timeline:
            assert list(executor.map(abs, ITEMS)) == [7, 6, 5, 4, 3, 2, 1]
        assert (
            executor.stats().calls
            == 7
            == sum(event["cat"] == "forward" for event in timeline.events if event["ph"] == "X")
        )
    assert told[-1] == (7, 7, 0.0)


def test_a_block_tells_of_a_backward_while_it_waits(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """The second backward ends only when the first has been shown."""
    shown = tmp_path / "shown"

    def wait_for(path: Path) -> None:
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
            ctx.number = number
            (tmp_path / str(number)).touch()
            wait_for(tmp_path / str(1 - number))  # each worker has one of them
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.number:
                wait_for(shown)
            return grad * 2, None

    def show(done: int, total: int | None, left: float | None) -> None:
        if (done, total) != (2, 2):
            threads.add(threading.current_thread().name)
        if (done, total) == (1, 2):
            shown.touch()

    threads: set[str] = set()
    xs = [torch.ones(2, requires_grad=True) for _ in range(2)]
    doubled = fresh_pool.starmap(Waits, [(xs[0], 0), (xs[1], 1)], chunksize=1)
    with fresh_pool.progress(show):
        sum(each.sum() for each in doubled).backward()
    # within the backward
    assert threads == {"mpgrad-callbacks"}
    assert shown.exists() and all(
        x.grad is not None and x.grad.equal(torch.full((2,), 2.0)) for x in xs
    )


def test_an_iterator_that_is_dropped_takes_its_bar_along(pool2: mpgrad.Pool) -> None:
    """The fixture that looks for threads would find it."""
    results = pool2.imap(abs, iter(range(10_000)), progress=lambda *_: None)
    assert next(results) == 0


@pytest.mark.quick
def test_seconds_left() -> None:
    assert seconds_left(5.0, 2.0, 1, ProgressState(2, 4)) == 6.0
    assert seconds_left(5.0, 2.0, 1, ProgressState(4, 4)) == 0.0
    assert (
        seconds_left(5.0, 2.0, 1, ProgressState(1, 4)) is None
        and seconds_left(5.0, 2.0, 1, ProgressState(2, None)) is None
    )


def test_a_function_is_told_of_changes_only_and_of_the_end() -> None:
    standings = iter(
        [
            ProgressState(0, 2),
            ProgressState(0, 2),
            ProgressState(1, 3),
            ProgressState(1, 3, is_over=True),
        ]
    )
    told: Told = []
    reporter = Reporter(lambda *now: told.append(now), lambda: next(standings))
    while not reporter.is_closed:
        reporter._due = 0.0
        reporter.tick()
    reporter.end()
    assert [now[:2] for now in told] == [(0, 2), (1, 3)]


def test_a_notebooks_widget_hears_of_a_total_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = types.SimpleNamespace(max=4)
    bar = types.SimpleNamespace(
        n=0, total=4, container=types.SimpleNamespace(children=["", scale, ""]), close=lambda: None
    )
    bar.update = lambda by: setattr(bar, "n", bar.n + by)
    monkeypatch.setattr(importlib.import_module("tqdm.auto"), "tqdm", lambda **_: bar)
    with Bar(None, 4) as show:
        show(0, None, None)
        assert (bar.total, scale.max) == (4, 4)  # a widget takes no total of None
        show(3, 9, None)
    assert (bar.n, bar.total, scale.max) == (3, 9, 9)


# --- statistics

WORKERS = [
    WorkerStats(1, 4242, 300 << 20, 12, 0, 1512, "busy", 0.871, node="alpha"),
    WorkerStats(13, 5, 1 << 30, 0, 0, 3, "idle", 0.0, node="beta"),
]
TABLE = """\
worker  node   device   pid  state  busy  calls  graphs     memory
     1  alpha  cpu     4242  busy    87%  1,512      12  300.0 MiB
    13  beta   cpu        5  idle     0%      3       0    1.0 GiB
operations: 2 under way
calls:      1,600 done, 40 left
backwards:  1,500 done, 0 left
deaths:     2 of workers, 1 by the pool
run again:  3 calls and backwards after deaths, 4 calls for their graphs
dropped:    5 graphs, 6 backwards with a wrong prediction
memory:     1.3 GiB of workers; 0 bytes shared for tensors
sent:       2.0 KiB in 20 frames
received:   999 bytes in 30 frames
copied:     1.0 KiB of tensors; 9 slots made"""


@pytest.mark.quick
def test_statistics_are_a_table() -> None:
    stats = PoolStats(
        WORKERS,
        (1 << 30) + (300 << 20),
        0,
        2,
        1,
        3,
        4,
        5,
        6,
        2,
        1600,
        40,
        1500,
        0,
        20,
        30,
        2048,
        999,
        0,
        1000,
        9,
    )
    assert str(stats) == TABLE
    here = str(stats._replace(workers=[each._replace(node="") for each in WORKERS]))
    assert here.splitlines()[0].split() == [
        "worker",
        "device",
        "pid",
        "state",
        "busy",
        "calls",
        "graphs",
        "memory",
    ]
    assert str(stats._replace(workers=[])).splitlines()[0].startswith("worker  node")
    assert json.loads(json.dumps(stats.as_dict()))["workers"][0]["state"] == "busy"


@pytest.fixture
def two(fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(2) as pool:
        yield pool


def test_statistics_of_a_pool_at_work(two: mpgrad.Pool, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"

    def waits(x: torch.Tensor) -> torch.Tensor:
        while not go_on.exists():
            time.sleep(0.01)
        return x * 2

    before = two.stats()
    assert (before.operations, before.calls, before.calls_left, before.backwards) == (0, 0, 0, 0)
    x = torch.ones(2, requires_grad=True)
    result = two.map_async(waits, [x] * 5, chunksize=1)
    deadline = time.monotonic() + 20
    while [worker.state for worker in two.stats().workers] != [
        "busy"
    ] * 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    during = two.stats()
    assert (during.operations, during.calls, during.calls_left) == (1, 0, 5)
    assert [worker.state for worker in during.workers] == ["busy"] * 2
    go_on.touch()
    torch.stack(result.get()).sum().backward()
    after = two.stats()
    assert (
        after.operations,
        after.calls,
        after.calls_left,
        after.backwards,
        after.backwards_left,
    ) == (0, 5, 0, 5, 0)
    assert all(0 < worker.busy <= 1 and worker.state == "idle" for worker in after.workers)


def test_a_pool_says_what_it_is(two: mpgrad.Pool) -> None:
    assert repr(two) == "<mpgrad.Pool processes=2 engine='process' open>"
    two.close()
    assert repr(two) == "<mpgrad.Pool processes=2 engine='process' closed>"


def test_a_slow_function_delays_no_timeout(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    """The waiting thread was in the function, and `get` returned seconds after its time."""
    may_end = threading.Event()
    calls = pool2.map_async(
        until, [tmp_path / "go"] * 20, chunksize=1, progress=lambda *_: may_end.wait(60)
    )
    with pytest.raises(multiprocessing.TimeoutError):
        calls.get(timeout=0.3)
    (tmp_path / "go").touch()
    may_end.set()
    calls.get()


def test_a_future_is_waited_for_with_a_timeout(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    """The waiting thread was in the function of `Pool.progress`, as it may be without a timeout."""
    shown_by: list[threading.Thread] = []
    with pool2.progress(lambda *_: shown_by.append(threading.current_thread())):
        future = pool2.submit(until, tmp_path / "go")
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(timeout=0.4)
        assert threading.current_thread() not in shown_by
        (tmp_path / "go").touch()
        future.result()
