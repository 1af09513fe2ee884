"""How far something has come: bars, functions that are told, `Pool.progress`, and what `Pool.stats`
says in words."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad
import mpgrad.stats
from mpgrad import PoolStats, WorkerStats
from mpgrad.stats import Bar, ProgressState, reported, seconds_left

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


def test_the_pool_goes_on_while_the_function_waits(pool2: mpgrad.Pool) -> None:
    """It is not called by the scheduling thread, which would wait with it for ever."""
    others = threading.Event()

    def waits(done: int, total: int | None, left: float | None) -> None:
        assert others.wait(20)

    result = pool2.map_async(abs, ITEMS, progress=waits)
    pool2.apply_async(abs, (-1,), callback=lambda _: others.set())
    assert result.get() == [7, 6, 5, 4, 3, 2, 1]


def test_a_function_that_raises_stops_nothing(
    pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(done: int, total: int | None, left: float | None) -> None:
        raise KeyError(done)

    assert pool2.map(abs, ITEMS, progress=broken) == [7, 6, 5, 4, 3, 2, 1]
    (record,) = caplog.records
    assert (
        "progress is not shown any more" in record.message
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
        mpgrad.stats.Reporter, "__init__", lambda *_: pytest.fail("a reporter is made")
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
        if (done, total) == (1, 2):
            shown.touch()

    xs = [torch.ones(2, requires_grad=True) for _ in range(2)]
    doubled = fresh_pool.starmap(Waits, [(xs[0], 0), (xs[1], 1)], chunksize=1)
    with fresh_pool.progress(show):
        sum(each.sum() for each in doubled).backward()
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
    looked = threading.Event()

    def look() -> ProgressState:
        now = next(standings)
        if now.is_over:
            looked.set()
        return now

    with reported(lambda *now: told.append(now), look):
        assert looked.wait(20)
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
