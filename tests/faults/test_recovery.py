"""What a dead worker had is done again by others: the results are those of the serial loop,
whatever died and when."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import (
    PATIENCE,
    eventually,
    first_are_quick,
    linux_only,
    replace_all,
    said_by,
    staffed,
)
from inside import (
    LIMIT,
    before_gradients_are_packed,
    every_loss_gets,
    graphs_known,
    handles,
    hung_calls_are_overdue,
    let_it_hear,
    send_all_ahead,
)

import mpgrad
from mpgrad.calls.packing import PackedCall
from mpgrad.scheduling.supervisor import WorkerSupervisor
from mpgrad.system import PORTABLE
from mpgrad.testing import assert_same_as_serial

Tensor = torch.Tensor


class Once:
    """In a task: does something the first time only, whichever worker comes first; a file
    remembers."""

    def __init__(self, file: Path, what: Callable[[], object]) -> None:
        self.file = file
        self.what = what

    def __call__(self) -> None:
        try:
            os.close(os.open(self.file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.what()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    import ctypes
    import faulthandler

    faulthandler.disable()
    ctypes.string_at(0)


def exits() -> None:
    os._exit(3)


def items(count: int = 6) -> list[Tensor]:
    return [torch.linspace(-1, k, 4, dtype=torch.float64, requires_grad=True) for k in range(count)]


def workers_of(pool: mpgrad.Pool) -> list[int]:
    return [worker.pid for worker in pool.stats().workers]


def kill_all(pool: mpgrad.Pool) -> None:
    """Kill every worker, and wait until the pool has noticed."""
    deaths = pool.stats().deaths
    victims = workers_of(pool)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: pool.stats().deaths >= deaths + len(victims))


class Around(torch.autograd.Function):
    """An identity whose backward does something first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Callable[[], object]) -> Tensor:
        ctx.before = before
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.before()
        return grad * 1, None


@pytest.mark.parametrize("death", first_are_quick(1, [killed, segfault, exits]))
@pytest.mark.parametrize("phase", ["forward", "backward", "double backward"])
def test_a_death_in_a_phase(
    fresh_pool: mpgrad.Pool, tmp_path: Path, death: Callable[[], None], phase: str
) -> None:
    xs, weight = items(), torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)

    def derivatives(loop: Callable[..., list[Tensor]], die: Callable[[], object]) -> list[Tensor]:
        class Second(Around):
            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
                return Around.apply(grad * 1, die if phase == "double backward" else int), None

        def fn(x: Tensor) -> Tensor:
            if phase == "forward" and x[-1] == 3:
                die()
            y = (
                Second.apply(x, int)
                if phase == "double backward"
                else Around.apply(x, die if phase == "backward" else int)
            )
            return (y * weight).exp() * torch.rand(())

        torch.manual_seed(1)
        results = loop(fn, xs)
        first = torch.autograd.grad(sum(y.sum() for y in results), [weight, *xs], create_graph=True)
        second = torch.autograd.grad(sum((grad**2).sum() for grad in first), [weight, *xs])
        return [each.detach() for each in (*results, *first, *second)]

    expected = derivatives(fresh_pool.map, int)
    assert fresh_pool.stats().deaths == 0
    found = derivatives(fresh_pool.map, Once(tmp_path / "once", death))
    assert fresh_pool.stats().deaths == 1
    for ours, theirs in zip(found, expected, strict=True):
        # sums of captures depend on who adds them up
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def assert_same(
    run: Callable[[Callable[..., list[Tensor]]], Sequence[Sequence[Tensor | None]]],
    pool: mpgrad.Pool,
) -> None:
    """What `run` gives with the pool's map, and with the serial loop."""
    for found, expected in zip(
        run(pool.map), run(lambda fn, items: [fn(item) for item in items]), strict=True
    ):
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_all_die_between_forward_and_backward(fresh_pool: mpgrad.Pool) -> None:
    weight, xs = torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True), items()

    def run(loop: Callable[..., list[Tensor]]) -> Any:
        results = loop(lambda x: (x * weight).sin(), xs)
        kill_all(fresh_pool)
        first = torch.autograd.grad(results[2].sum(), [xs[2], weight], retain_graph=True)
        kill_all(fresh_pool)
        some = torch.autograd.grad(results[2].sum() + results[4].prod(), [xs[2], weight])
        kill_all(fresh_pool)
        rest = torch.autograd.grad(
            [results[0].sum(), results[5].sum()], [*xs, weight], allow_unused=True
        )
        return [first, some, rest]

    assert_same(run, fresh_pool)


def test_the_only_worker_dies(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    once = Once(tmp_path / "once", killed)
    with mpgrad.Pool(1) as pool:
        xs = items(3)
        results = pool.map(lambda x: Around.apply(x, once) ** 2, xs)
        sum(y.sum() for y in results).backward()
        assert pool.stats().deaths == 1
        assert all(torch.equal(x.grad, 2 * x.detach()) for x in xs)


def test_second_derivatives_of_lost_first_ones(fresh_pool: mpgrad.Pool) -> None:
    xs, weight = items(3), torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)

    def derivatives(
        loop: Callable[..., list[Tensor]], between: Callable[[], object]
    ) -> list[Tensor]:
        results = loop(lambda x: (x * weight).exp(), xs)
        inputs = [weight, *xs]
        first = torch.autograd.grad(sum(y.sum() for y in results), inputs, create_graph=True)
        between()
        second = torch.autograd.grad(
            sum((grad**2).sum() for grad in first), inputs, create_graph=True
        )
        between()
        # a loss and a penalty in one pass: graphs of both orders are made again, with the one they
        # derive from
        everything = [(each**2).sum() for each in (*results, *first, *second)]
        return [*first, *second, *torch.autograd.grad(everything, inputs)]

    expected = derivatives(lambda fn, xs: [fn(x) for x in xs], int)
    found = derivatives(fresh_pool.map, lambda: kill_all(fresh_pool))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def after_all_gradients_of(xs: list[Tensor], act: Callable[[], None]) -> None:
    """Call `act` when all workers have answered a backward, before their sums are collected."""
    came = itertools.count(1)
    for x in xs:
        x.register_hook(lambda grad: act() if next(came) == len(xs) else None)


def test_a_sum_that_is_lost_before_it_is_collected(fresh_pool: mpgrad.Pool) -> None:
    """All backwards are done and answered when the workers die; what they had added up for the
    capture went with them."""
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    xs = items(8)
    results = staffed(fresh_pool).map(lambda x: x * weight, xs, 1)
    after_all_gradients_of(xs, lambda: kill_all(fresh_pool))
    sum(y.sum() for y in results).backward()
    assert fresh_pool.stats().deaths == 2
    torch.testing.assert_close(weight.grad, sum(x.detach() for x in xs), rtol=1e-14, atol=1e-14)
    assert all(torch.equal(x.grad, torch.ones(4, dtype=torch.float64)) for x in xs)


def test_a_worker_that_dies_while_gradients_are_made_ready_for_it(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a derived graph another makes its graph again: a gradient of a capture was in the sum
    there, and came apart too."""
    weight = torch.linspace(0.5, 1, 4, dtype=torch.float64, requires_grad=True)

    def penalized(loop: Any, xs: list[Tensor]) -> Iterator[Any]:
        losses = list(loop(lambda x: ((x * weight).sin() * weight).sum(), xs))
        slopes = torch.autograd.grad(sum(losses), xs, create_graph=True)
        yield
        yield torch.autograd.grad(
            sum(losses) + sum((slope**2).sum() for slope in slopes), [*xs, weight]
        )

    with mpgrad.Pool(2) as pool:
        rehomed = []

        def dies(graph: Any, worker: Any) -> None:
            if not rehomed and isinstance(graph.lineage, PackedCall):
                os.kill(worker.pid, signal.SIGKILL)
                for pid in pids - {worker.pid}:
                    os.kill(pid, signal.SIGCONT)
                eventually(lambda: graph.worker is not worker)
                rehomed.append(graph)

        steps = penalized(functools.partial(pool.map, chunksize=1), items())
        next(steps)
        pids = {each.pid for each in pool.stats().workers}
        for pid in pids:  # so that no backward is answered before the death
            os.kill(pid, signal.SIGSTOP)
        before_gradients_are_packed(monkeypatch, pool, dies)
        found = next(steps)
        assert len(rehomed) == 1
    _, expected = penalized(map, items())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
def test_a_worker_that_is_stopped_with_a_sum(fork_server: mpgrad.Pool) -> None:
    """It has answered every call, and hangs when it is to hand over what it added up: that may time
    out too."""
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    xs, stopped = items(8), list[int]()
    with (
        mpgrad.Pool(2, timeout=LIMIT) as pool,
        hung_calls_are_overdue(pool, lambda: len(stopped), stopped.__contains__),
    ):
        results = staffed(pool).map(lambda x: x * weight, xs, 1)

        def stop_all() -> None:
            for pid in workers_of(pool):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

        after_all_gradients_of(xs, stop_all)
        sum(y.sum() for y in results).backward()
        assert pool.stats().kills == len(stopped) == 2
    torch.testing.assert_close(weight.grad, sum(x.detach() for x in xs), rtol=1e-14, atol=1e-14)


def test_an_input_that_the_task_writes_to(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    """The second worker has to find it as the first one did, not half written."""
    once = Once(tmp_path / "once", killed)
    xs = [torch.arange(float(n)) for n in (5, 5_000, 500_000)]  # in the message, copied, mapped

    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        once()
        return x.add_(1)

    for ours, x in zip(fresh_pool.map(fn, [x * 1 for x in xs]), xs, strict=True):
        assert torch.equal(ours, 2 * x + 1)
    graphs = fresh_pool.map(
        lambda x: (x.mul_(2) ** 2).sum(), [(x * 1).requires_grad_() * 1 for x in xs]
    )
    kill_all(fresh_pool)
    leaves = [x.clone().requires_grad_() for x in xs]
    graphs = fresh_pool.map(lambda x: (x.mul_(2) ** 2).sum(), [x * 1 for x in leaves])
    kill_all(fresh_pool)
    torch.stack(graphs).sum().backward()
    assert all(torch.equal(leaf.grad, 8 * x) for leaf, x in zip(leaves, xs, strict=True))


def test_results_of_dead_workers_as_inputs(fresh_pool: mpgrad.Pool) -> None:
    """They lie in the memory of the dead, and are read there by the living."""
    x = torch.linspace(0, 1, 10_000, dtype=torch.float64, requires_grad=True)
    first = fresh_pool.map(lambda x: x * 2, [x, x + 1])
    kill_all(fresh_pool)
    second = fresh_pool.map(lambda y: y.sin(), first)
    kill_all(fresh_pool)
    sum(z.sum() for z in second).backward()
    expected = torch.autograd.grad((x * 2).sin().sum() + ((x + 1) * 2).sin().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "operation",
    first_are_quick(2, ["submit", "map_reduce", "starmap", "imap", "reduce", "map_async"]),
)
def test_every_operation(fresh_pool: mpgrad.Pool, tmp_path: Path, operation: str) -> None:
    weight = torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)
    xs = items(4)
    once = Once(tmp_path / "once", killed)

    def fn(x: Tensor, y: Any = None) -> Tensor:
        once()
        return x * weight if y is None else x * weight + y

    ways: dict[str, Callable[[], Any]] = {
        "starmap": lambda: torch.stack(fresh_pool.starmap(fn, [(x, 1.0) for x in xs])).sum(0) - 4,
        "imap": lambda: torch.stack(list(fresh_pool.imap(fn, xs))).sum(0),
        "submit": lambda: torch.stack(
            [each.result() for each in [fresh_pool.submit(fn, x) for x in xs]]
        ).sum(0),
        "reduce": lambda: fresh_pool.reduce(
            lambda target, x: fn(x, target), xs, torch.zeros(4, dtype=torch.float64)
        ),
        "map_reduce": lambda: fresh_pool.map_reduce(fn, xs, "sum"),
        "map_async": lambda: torch.stack(fresh_pool.map_async(fn, xs).get()).sum(0),
    }
    total = ways[operation]()
    kill_all(fresh_pool)
    grads = torch.autograd.grad(total.sum(), [weight, *xs])
    expected = torch.autograd.grad(sum((x * weight).sum() for x in xs), [weight, *xs])
    assert fresh_pool.stats().deaths >= 2
    for ours, theirs in zip((total, *grads), (sum(x * weight for x in xs), *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_a_call_that_kills_every_worker_fails(
    fresh_pool: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(k: int) -> int:
        if k == 7:
            killed()
        return k

    with pytest.raises(
        mpgrad.WorkerDiedError, match=r"was killed by SIGKILL \(phase: forward, item 7 of fn\)"
    ) as caught:
        fresh_pool.map(fn, range(20))
    assert (caught.value.item, caught.value.call) == (7, "item 7 of fn")
    assert (fresh_pool.stats().deaths, fresh_pool.stats().kills) == (3, 0)
    logged = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(logged) == 3 and logged[-1] == str(caught.value) and "tried once" in logged[0]
    future = fresh_pool.submit(fn, 7)
    with pytest.raises(mpgrad.WorkerDiedError, match=r"\(phase: forward, a call of fn\)") as caught:
        future.result()
    assert (
        caught.value.item is None
        and pickle.loads(pickle.dumps(caught.value)).call == "a call of fn"
    )
    found = fresh_pool.map(fn, range(20), on_error="return")
    assert isinstance(found.pop(7), mpgrad.WorkerDiedError) and found == [*range(7), *range(8, 20)]


@linux_only("the fork server")
def test_an_exit_that_was_reported_while_nobody_looked(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the error did not say how the worker had died. Cause: the pool's thread was late,
    and gave up an exit whose report lay in the pipe."""
    lose = WorkerSupervisor.lose

    def then_stand_still(supervisor: Any, worker: Any, *arguments: Any) -> None:
        lose(supervisor, worker, *arguments)
        if supervisor._ending:
            control = supervisor._engine.launcher._fork_server._control
            assert select.select([control], [], [], PATIENCE)[0]

    monkeypatch.setattr(WorkerSupervisor, "lose", then_stand_still)
    monkeypatch.setattr("mpgrad.scheduling.supervisor.EXIT_PATIENCE", 0.0)
    with mpgrad.Pool(1, retries=0) as pool:
        for _ in range(5):  # the exit may be known at once
            with pytest.raises(mpgrad.WorkerDiedError, match="was killed by SIGKILL"):
                pool.apply(killed)


@pytest.mark.slow
def test_the_likely_cause_is_named(
    fresh_pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpgrad.scheduling.recovery.kills_for_memory", lambda: 10**9)
    with pytest.raises(
        mpgrad.WorkerDiedError,
        match="the kernel has killed processes because memory ran out; use fewer workers",
    ):
        fresh_pool.apply(killed)
    with pytest.raises(mpgrad.WorkerDiedError) as caught:
        fresh_pool.apply(exits)
    assert "memory" not in str(caught.value)


def test_a_function_that_is_another_the_second_time(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    x = torch.ones(2, requires_grad=True)
    file = tmp_path / "ran"

    def fn(x: Tensor) -> Any:
        first = not file.exists()
        file.touch()
        return x * 2 if first else (x * 2, x * 3)

    (y,) = fresh_pool.map(fn, [x])
    kill_all(fresh_pool)
    with pytest.raises(
        RuntimeError, match="2 outputs of the function needed gradients, not 1 as before"
    ):
        y.sum().backward()


def test_warnings_are_given_once(fresh_pool: mpgrad.Pool) -> None:
    def fn(x: Tensor) -> Tensor:
        warnings.warn("told once", stacklevel=1)
        return x * 2

    x = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="told once"):
        (y,) = fresh_pool.map(fn, [x])
    kill_all(fresh_pool)
    y.sum().backward()  # a second warning would be an error
    assert x.grad.tolist() == [2, 2]


# --- time-outs


def test_a_call_that_hangs_once(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """A busy neighbour is spared."""
    begun, again = tmp_path / "begun", tmp_path / "again"

    def fn(k: int) -> int:
        if k == 1 and not begun.exists():
            begun.write_text(str(os.getpid()))
            time.sleep(600)
        if k == 1:
            again.touch()
        while k == 0 and not again.exists():
            time.sleep(1e-3)
        return k * k

    with (
        mpgrad.Pool(2, timeout=LIMIT, timeout_retries=1) as pool,
        hung_calls_are_overdue(pool, begun.exists, lambda pid: begun.read_text() == str(pid)),
    ):
        before = workers_of(staffed(pool))
        assert pool.map(fn, range(12), 1) == [k * k for k in range(12)]
        assert pool.stats().deaths == 1
        assert set(before) - set(workers_of(pool)) == {int(begun.read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_call_that_always_hangs(
    fork_server: mpgrad.Pool, tmp_path: Path, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mpgrad")

    def hangs() -> None:
        (tmp_path / f"{os.getpid()}").touch()
        time.sleep(60)

    def fn(x: Tensor) -> Tensor:
        if x[-1] == 2 and phase == "forward":
            hangs()
        return Around.apply(x, hangs if x[-1] == 2 else int)

    xs = items(4)
    with (
        mpgrad.Pool(2, timeout_retries=1) as pool,
        hung_calls_are_overdue(
            pool,
            lambda: len(list(tmp_path.iterdir())),
            lambda pid: (tmp_path / f"{pid}").exists(),
        ),
    ):
        message = (
            rf"item 2 of fn ran longer than the time limit of a call \(60.0 s, phase: {phase}\), "
            r"and was killed with its worker"
        )
        with pytest.raises(mpgrad.CallTimeoutError, match=message) as caught:
            results = pool.map(fn, xs, timeout=LIMIT)
            sum(y.sum() for y in results).backward()
        assert (caught.value.item, caught.value.phase, caught.value.seconds) == (2, phase, LIMIT)
        assert (
            pool.stats().kills
            == pool.stats().deaths
            == len([each for each in caplog.records if each.levelname == "INFO"])
        )
        assert isinstance(caught.value, TimeoutError)
        assert pool.map(abs, [-1], timeout=5) == [1]


def test_without_retries_a_hang_takes_the_graphs_of_its_worker_along(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """The error said "killed by SIGUSR2", and not why."""
    weight, begun = torch.ones(2, requires_grad=True), tmp_path / "begun"
    with mpgrad.Pool(1, retries=0) as pool, hung_calls_are_overdue(pool, begun.exists):
        done, late = pool.map(
            lambda k: (k and (begun.touch(), time.sleep(60)), weight * k)[1],
            [0, 1],
            1,
            timeout=LIMIT,
            on_error="return",
        )
        assert isinstance(late, mpgrad.CallTimeoutError)
        message = (
            r"item 0\); the pool ended it, because another call ran past its timeout \(60\.0 s\); "
            r"the graph .* was lost"
        )
        with pytest.raises(mpgrad.WorkerDiedError, match=message):
            done.sum().backward()


@pytest.mark.slow
def test_a_stopped_worker(fork_server: mpgrad.Pool) -> None:
    stopped: list[int] = []

    with (
        mpgrad.Pool(2, timeout=LIMIT) as pool,
        hung_calls_are_overdue(pool, lambda: len(stopped), stopped.__contains__),
    ):
        staffed(pool)
        victim = workers_of(pool)[0]
        os.kill(victim, signal.SIGSTOP)
        stopped.append(victim)
        assert pool.map(abs, range(40), 1) == list(range(40))
        assert victim not in workers_of(pool)


@pytest.mark.slow
def test_a_timeout_is_that_of_a_call_and_not_of_a_chunk(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, timeout=1.5, timeout_retries=12) as pool:
        for _ in range(5):  # a call may take too long where a busy machine stands still
            deaths = pool.stats().deaths
            assert pool.map(time.sleep, [0.2] * 12, 12) == [None] * 12
            if pool.stats().deaths == deaths:
                break
        else:
            pytest.fail("each time, a worker was killed for a chunk that took too long")


# --- errors in the place of results


def test_errors_are_returned_where_asked_for(pool: mpgrad.Pool) -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    xs = items(5)

    def fn(x: Tensor) -> Tensor:
        if x[-1] in (1, 3):
            raise ValueError(f"refused {int(x[-1])}")
        return x * weight

    found = pool.map(fn, xs, on_error="return")
    assert [str(found[k]) for k in (1, 3)] == ["refused 1", "refused 3"]
    assert any("item 3" in note for note in found[3].__notes__)
    sum(found[k].sum() for k in (0, 2, 4)).backward()
    assert [x.grad is None for x in xs] == [False, True, False, True, False]
    torch.testing.assert_close(
        weight.grad, (xs[0] + xs[2] + xs[4]).detach(), rtol=1e-14, atol=1e-14
    )
    assert [type(each) for each in pool.starmap(pow, [(1, 2), (0, -1)], on_error="return")] == [
        int,
        ZeroDivisionError,
    ]
    assert [type(each) for each in pool.imap(lambda k: 1 / k, [1, 0], on_error="return")] == [
        float,
        ZeroDivisionError,
    ]
    assert [
        type(each) for each in pool.map_async(lambda k: 1 / k, [1, 0], on_error="return").get()
    ] == [
        float,
        ZeroDivisionError,
    ]
    with pytest.raises(
        ValueError, match=r"on_error must be one of raise, return \(on_error: 'ignore'\)"
    ):
        pool.map(fn, xs, on_error="ignore")
    with pytest.raises(NotImplementedError, match=r"not for torch\.func transforms"):
        torch.func.grad(lambda x: pool.map(torch.sum, [x], on_error="return")[0])(xs[0])


def test_the_rest_of_a_running_chunk_is_left_out(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    folder, other, go = tmp_path / "begun", tmp_path / "other", tmp_path / "go"
    folder.mkdir()

    def until(file: Path) -> None:
        while not file.exists():
            time.sleep(1e-3)

    def fn(k: int) -> None:
        if k == 0:
            until(other)  # the other chunk runs
            raise ValueError("first")
        (folder / str(k)).touch()
        other.touch()
        until(go)

    with pytest.raises(ValueError, match="first"):
        pool2.map(fn, range(100), 50)
    let_it_hear(pool2)
    go.touch()
    assert pool2.apply(abs, (-1,)) == 1 and pool2.map(abs, [1, 2], 1) == [1, 2]
    # the first of the other chunk, and perhaps the second of this one
    assert len(list(folder.iterdir())) <= 2


# --- graphs that are not kept


@pytest.fixture(
    params=[{"graphs": "recompute"}, {}, {"graph_memory": 1000}, {"graph_memory": "1 GiB"}], ids=str
)
def frugal(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[Any]:
    with every_loss_gets(1.0):
        yield request.param


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_derivatives_of_graphs_that_are_not_kept(frugal: dict[str, Any], engine: str) -> None:
    weight = torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)

    def run(loop: Callable[..., list[Tensor]]) -> Any:
        xs = items()
        results = loop(lambda x: (x * weight).exp(), xs)
        return [
            torch.autograd.grad(results[2].sum(), [xs[2], weight], retain_graph=True),
            torch.autograd.grad(results[2].sum(), [xs[2], weight], retain_graph=True),
            torch.autograd.grad(sum(y.sum() for y in results), [weight, *xs]),
        ]

    with mpgrad.Pool(2, engine=engine, **frugal) as pool:
        for order in (1, 2, 3):
            assert_same_as_serial(lambda x: (x * weight).exp(), items(3), pool, order=order)
        assert_same(run, pool)


def test_recomputing_runs_the_function_again_and_keeps_nothing(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    def fn(x: Tensor) -> Tensor:
        (tmp_path / f"{os.getpid()} {time.monotonic_ns()}").touch()
        return torch.nn.functional.dropout(x, 0.5) * 1.0

    xs = [torch.ones(50, requires_grad=True) for _ in range(4)]
    with mpgrad.Pool(2, graphs="recompute") as pool:
        results = pool.map(fn, xs)
        assert len(list(tmp_path.iterdir())) == 4
        assert sum(worker.graphs for worker in pool.stats().workers) == 0
        sum(y.sum() for y in results).backward(retain_graph=True)
        assert len(list(tmp_path.iterdir())) == 8
        kill_all(pool)
        sum(y.sum() for y in results).backward()
    # the same mask each time
    assert all(torch.equal(x.grad, 2 * y.detach()) for x, y in zip(xs, results, strict=True))


@linux_only("mallinfo2: the allocator's own count")
def test_graphs_stay_within_their_memory(fork_server: mpgrad.Pool) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(50):  # 400 kB each
            x = x.sin()
        return x.sum()

    # 800 MB of graphs
    xs = [
        torch.linspace(0, 1 + k, 50_000, dtype=torch.float64, requires_grad=True) for k in range(40)
    ]
    limit = 60_000_000
    with mpgrad.Pool(2, graph_memory=limit) as pool:
        staffed(pool).map(fn, xs[:2])
        before = [worker.resident_bytes for worker in pool.stats().workers]
        results = pool.map(fn, xs)
        stats = pool.stats()
        # one of the workers may have come to few items
        assert all(worker.graph_bytes <= limit for worker in stats.workers)
        assert max(worker.graph_bytes for worker in stats.workers) > 0.5 * limit
        assert 2 <= sum(worker.graphs for worker in stats.workers) <= 6
        sum(results).backward()
        after = [worker.resident_bytes for worker in pool.stats().workers]
    # 400 MB each without a limit
    assert all(now - then < 3 * limit for now, then in zip(after, before, strict=True))
    for x in (xs[0], xs[20], xs[39]):
        expected = torch.autograd.grad(fn(x), x)[0]
        torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=1e-14)


def test_a_released_graph_takes_its_input_with_it(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1) as pool:
        x = torch.ones(1_000_000, requires_grad=True)
        for _ in range(3):
            (y,) = pool.map(lambda t: t.sin().sum(), [x])
            held = pool.stats().shared_bytes
            assert held >= 4_000_000
            y.backward()
            del y
            x.grad = None  # it lies in the worker's memory
            deadline = time.monotonic() + PATIENCE
            # until the worker has given it back, along with some answer
            while pool.stats().shared_bytes >= 4_000_000:
                assert time.monotonic() < deadline
                pool.apply(abs, (1,))


# --- workers that come and go


def test_resize_just_before_the_end(fork_server: mpgrad.Pool) -> None:
    """A worker was started after the end, whose pipe nobody closed."""
    for _ in range(10):
        with mpgrad.Pool(1) as pool:
            pool.resize(2)
    gc.collect()  # an unclosed socket warns then


def test_resize_while_graphs_are_held(fork_server: mpgrad.Pool) -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    xs = items(12)
    with mpgrad.Pool(3) as pool:
        results = pool.map(lambda x: x * weight, xs, 1)
        needed = {worker.pid for worker in pool.stats().workers if worker.graphs}
        pool.resize(1)
        more = pool.map(lambda x: x * weight, xs, 1)
        workers = pool.stats().workers
        assert sum(not worker.retiring for worker in workers) == 1
        assert needed <= {worker.pid for worker in workers if worker.graphs}
        sum(y.sum() for y in (*results, *more)).backward()
        del results, more
        pool.resize(2)
        assert pool.map(abs, range(-20, 0), 1) == list(range(20, 0, -1))
        # not just two, of whom one is about to leave
        only_these = [False, False]
        eventually(lambda: [each.retiring for each in pool.stats().workers] == only_these, 100)
        assert "processes=2" in repr(pool)
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="processes must be at least 1"):
                pool.resize(wrong)
    torch.testing.assert_close(weight.grad, 2 * sum(x.detach() for x in xs))
    with pytest.raises(mpgrad.PoolClosedError):
        pool.resize(3)
    with (
        mpgrad.Pool(engine="inline") as pool,
        pytest.raises(ValueError, match="an inline pool has one worker"),
    ):
        pool.resize(2)


def test_workers_whose_graphs_are_only_missing_may_end(fork_server: mpgrad.Pool) -> None:
    xs = items(6)
    with mpgrad.Pool(2, graphs="recompute", maxtasksperchild=1) as pool:
        results = pool.map(lambda x: x**2, xs, 1)
        pool.map(abs, range(4), 1)
        eventually(lambda: len(pool.stats().workers) <= 2)
        sum(y.sum() for y in results).backward()
    assert all(torch.equal(x.grad, 2 * x.detach()) for x in xs)


def test_workers_that_have_done_enough_hand_over_what_they_have_added_up(
    fork_server: mpgrad.Pool,
) -> None:
    """Symptom: every call ran twice. Cause: a worker that had but a sum of captures' gradients was
    ended."""
    weight, xs = torch.ones(4, dtype=torch.float64, requires_grad=True), items(6)
    with mpgrad.Pool(2, maxtasksperchild=1) as pool:
        results = pool.map(lambda x: x * weight, xs, 1)
        sum(y.sum() for y in results).backward()
        assert pool.stats().reruns == 0
        eventually(lambda: not any(each.retiring for each in pool.stats().workers))
    torch.testing.assert_close(weight.grad, sum(x.detach() for x in xs), rtol=1e-14, atol=1e-14)


def test_sums_that_nobody_collects(fork_server: mpgrad.Pool) -> None:
    """A backward that fails leaves them behind; who has but these is not kept for long."""
    weight, (x,) = torch.ones(4, dtype=torch.float64, requires_grad=True), items(1)

    def fails(grad: Tensor) -> None:
        raise LookupError("in the caller")

    def times(x: Tensor) -> Tensor:
        return x * weight

    with mpgrad.Pool(1, maxtasksperchild=1) as pool:
        results = []
        for _ in range(6):
            inner = x * 2
            inner.register_hook(fails)
            results += pool.map(times, [inner])
            with pytest.raises(LookupError):
                results[-1].sum().backward()
        eventually(lambda: len(pool.stats().workers) <= 3)
        assert weight.grad is None


def test_a_retiring_worker_dies(fork_server: mpgrad.Pool) -> None:
    xs = items(6)
    with mpgrad.Pool(2, maxtasksperchild=2) as pool:
        results = pool.map(lambda x: x**2, xs, 1)
        kill_all(pool)
        sum(y.sum() for y in results).backward()
        assert all(torch.equal(x.grad, 2 * x.detach()) for x in xs)
        assert pool.map(abs, range(10), 1) == list(range(10))
        assert sum(not worker.retiring for worker in pool.stats().workers) <= 2


@pytest.mark.slow
@linux_only("the fork server")
def test_the_fork_server_dies_with_graphs_in_its_children() -> None:
    assert run_with_own_fork_server() == "ok"


def run_with_own_fork_server() -> str:
    """In a process of its own: the fork server of this one is shared by all tests."""

    program = """
import os, signal, psutil, torch, mpgrad
xs = [torch.ones(3, requires_grad=True) for _ in range(4)]
with mpgrad.Pool(2) as pool:
    results = pool.map(lambda x: x ** 3, xs)
    (child,) = psutil.Process().children()
    os.kill(child.pid, signal.SIGKILL)
    sum(y.sum() for y in results).backward()
    assert all(x.grad.tolist() == [3, 3, 3] for x in xs)
    assert pool.map(abs, range(5)) == list(range(5))
print("ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_deaths_while_several_threads_use_the_pool(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(2, retries=1000) as pool:
        run_threads_under_fire(pool)


BETWEEN_SHOTS = 1.0 if PORTABLE else 0.05  # a worker that is spawned takes a second to start


def run_threads_under_fire(pool: mpgrad.Pool) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []
    rounds: list[int] = []

    def use(seed: int) -> None:
        try:
            for done in range(1000):
                if done >= 6 and pool.stats().deaths > 3:  # however fast it goes
                    break
                weight = torch.full((3,), float(seed), requires_grad=True)
                xs: Sequence[Tensor] = [
                    torch.full((3,), float(k), requires_grad=True) for k in range(6)
                ]
                results = pool.map(lambda x: x * weight, xs)
                sum(y.sum() for y in results).backward()
                assert weight.grad is not None and weight.grad.tolist() == [15.0] * 3
                assert all(x.grad is not None and x.grad.tolist() == [seed] * 3 for x in xs)
                rounds.append(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    shot_at = -1
    while any(thread.is_alive() for thread in threads):
        # only after a round, because on a busy machine a worker may need longer to start than the
        # time between two shots
        if len(rounds) > shot_at:
            shot_at = len(rounds)
            for pid in workers_of(pool)[:1]:
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    os.kill(pid, signal.SIGKILL)
        stop.wait(BETWEEN_SHOTS)
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(rounds) >= 24 and pool.stats().deaths > 3


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"retries": -1}, ValueError, r"retries must be at least 0 \(retries: -1\)"),
        (
            {"timeout_retries": -1},
            ValueError,
            r"timeout_retries must be at least 0 \(timeout_retries: -1\)",
        ),
        (
            {"timeout_retries": 0.5},
            TypeError,
            r"timeout_retries must be an integer \(timeout_retries: 0\.5\)",
        ),
        ({"timeout": 0}, ValueError, r"timeout must be more than 0 seconds \(timeout: 0\)"),
        (
            {"timeout": "1"},
            TypeError,
            r"timeout must be a number of seconds, or None \(timeout: '1'\)",
        ),
        (
            {"timeout": 1, "engine": "thread"},
            ValueError,
            r"a timeout needs workers that can be killed.*\(engine: 'thread'\)",
        ),
        (
            {"graphs": "drop"},
            ValueError,
            r"graphs must be one of auto, keep, recompute \(graphs: 'drop'\)",
        ),
        ({"graph_memory": "2 GB of it"}, ValueError, r'graph_memory must be like "2 GiB"'),
        ({"graph_memory": "2 gb"}, ValueError, r'graph_memory must be like "2 GiB"'),
        (
            {"graph_memory": 0},
            ValueError,
            r"graph_memory must be at least 1 byte \(graph_memory: 0\)",
        ),
        ({"graph_memory": 1.5}, TypeError, r"graph_memory must be a number of bytes"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        mpgrad.Pool(1, **arguments)


def test_calls_go_back_to_the_queue_in_their_order(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # symptom: a hang. cause: two chunks of a dead worker were put back one before the other, and a
    # failure in the later one then dropped calls of the earlier one that were still wanted.
    def fn(k: int) -> int:
        if k == 4:
            raise LookupError(k)
        return k

    send_all_ahead(monkeypatch)
    with mpgrad.Pool(1) as pool:
        pool.map(fn, [0])
        (worker,) = handles(pool)
        os.kill(worker.pid, signal.SIGSTOP)
        result = pool.map_async(fn, range(6), 4)
        eventually(lambda: len(worker.under_way.chunks) == 2)
        os.kill(worker.pid, signal.SIGKILL)
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


def test_a_former_result_of_a_worker_that_has_died(fresh_pool: mpgrad.Pool) -> None:
    # symptom: InternalError(KeyError). cause: the memory was forgotten with the worker, although a
    # result still lay in it.
    made = fresh_pool.map(lambda k: (os.getpid(), torch.ones(20_000)), range(4), 1)
    ones = [tensor for _, tensor in made]
    os.kill(made[0][0], signal.SIGKILL)
    for _ in range(3):
        assert [float(r.sum()) for r in fresh_pool.map(lambda t: t * 2, ones)] == [40_000.0] * 4


def test_memory_of_a_dead_worker_that_another_has_seen_before(fork_server: mpgrad.Pool) -> None:
    # symptom: KeyError in the task. cause: the other was told that the memory is new again, and
    # then that it is gone.
    with mpgrad.Pool(2) as pool:
        made = pool.map(lambda k: (os.getpid(), torch.ones(20_000)), range(20), 1)
        results = [tensor for _, tensor in made]
        for _ in range(3):
            assert [float(r.sum()) for r in pool.map(lambda t: t * 2, results)] == [40_000.0] * 20
        os.kill(made[0][0], signal.SIGKILL)
        for _ in range(3):
            assert [float(r.sum()) for r in pool.map(lambda t: t * 2, results)] == [40_000.0] * 20


@pytest.mark.slow
def test_without_retries_nothing_runs_twice(fork_server: mpgrad.Pool) -> None:
    """Calls of the chunk that were done before another one killed the worker added to their inputs
    once more."""

    def adds(x: Tensor) -> float:
        if x[1] == 7:
            os._exit(3)
        return float(x.add_(1)[0])

    items = [torch.zeros(20_000) for _ in range(4)]
    items[2][1] = 7

    def answers_at_the_end() -> None:
        from mpgrad.workers import early

        early.PATIENCE = early.PATIENCE_TOGETHER = 600.0

    with mpgrad.Pool(1, answers_at_the_end, retries=0) as pool:
        found = pool.map(adds, items, chunksize=4, on_error="return")
    assert [type(each) for each in found] == [mpgrad.WorkerDiedError] * 3 + [float]
    assert found[3] == 1.0 and all(each.item == 2 for each in found[:3])


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True])
def test_a_derived_graph_whose_input_was_changed(fresh_pool: mpgrad.Pool, kills: bool) -> None:
    """The second derivative was taken at the changed input, if a worker had died; the serial loop
    raises."""
    x = torch.ones(5000, requires_grad=True)
    (y,) = fresh_pool.map(lambda x: x * 2, [x])
    (z,) = fresh_pool.map(lambda y: y**3, [y])
    (d,) = torch.autograd.grad(z.sum(), y, create_graph=True)
    with torch.no_grad():
        y.mul_(10)
    if kills:
        replace_all(fresh_pool)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(d.sum(), y)


@pytest.mark.slow
def test_a_call_that_needs_no_gradient_when_it_is_run_again(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """For a derived graph, the backward was sent again without end."""
    flag = tmp_path / "flag"
    x = torch.ones(3, requires_grad=True)
    (y,) = fresh_pool.map(lambda x: (x**3).detach() if flag.exists() else x**3, [x])
    (d,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    flag.touch()
    replace_all(fresh_pool)
    with pytest.raises(
        RuntimeError, match="no output of the function needed gradients when it was run again"
    ):
        torch.autograd.grad(d.sum(), x)


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_a_worker_that_dies_and_leaves_a_child(
    fork_server: mpgrad.Pool, tmp_path: Path, timeout: float | None
) -> None:
    """The child held the worker's end of the pipe, so that nobody saw the death."""
    flag = tmp_path / "child"

    def forks(x: int) -> int:
        if not flag.exists():
            pid = os.fork()
            if pid == 0:
                time.sleep(100)
                os._exit(0)
            flag.write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    started = time.monotonic()
    with mpgrad.Pool(1, timeout=timeout) as pool:
        assert pool.map(forks, [1]) == [1]
    assert time.monotonic() - started < 50
    os.kill(int(flag.read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_many_workers_that_start_die_at_once() -> None:
    """Three starts in a row failed, it seemed; it was one event."""
    code = (
        "with mpgrad.Pool(4) as pool:\n"
        "    while not psutil.Process().children(): time.sleep(0.001)\n"
        "    psutil.Process().children()[0].kill()\n"
        "    print(pool.map(abs, [-1, -2]))\n"
    )
    assert said_by(code) == "[1, 2]\n"


@pytest.mark.slow
def test_gradients_for_graphs_that_are_missing(fork_server: mpgrad.Pool) -> None:
    """Their shared memory was never given back."""
    with mpgrad.Pool(1, graphs="recompute") as pool:
        for _ in range(4):
            x = torch.ones(50_000, requires_grad=True)
            (y,) = pool.map(lambda x: x**3, [x])
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.sum() + (g**2).sum()).backward()
            assert torch.equal(x.grad, torch.full_like(x, 3 + 2 * 3 * 6.0))
            del x, y, g
        deadline = time.monotonic() + PATIENCE
        while pool.stats().shared_bytes:
            assert time.monotonic() < deadline, pool.stats()
            pool.map(abs, [1])


@pytest.mark.slow
def test_memory_of_dead_workers_in_a_survivor(fresh_pool: mpgrad.Pool) -> None:
    """A survivor kept a mapping, and a descriptor, for each worker whose results it had read after
    its death."""

    def slowly(y: Tensor) -> Tensor:
        time.sleep(0.02)
        return y.sum()

    staffed(fresh_pool).map(slowly, [torch.ones(3)] * 4)
    survivor = min(worker.pid for worker in fresh_pool.stats().workers)
    counts: list[int] = []

    def open_files() -> int:
        return len(os.listdir(f"/proc/{survivor}/fd"))

    for _ in range(8):
        results = fresh_pool.map(lambda x: x + 1, [torch.ones(300_000)] * 4, chunksize=1)
        others = {worker.pid for worker in fresh_pool.stats().workers} - {survivor}
        for pid in others:
            os.kill(pid, signal.SIGKILL)
        while (
            others & {worker.pid for worker in fresh_pool.stats().workers}
            or len(fresh_pool.stats().workers) < 2
        ):
            time.sleep(1e-3)
        fresh_pool.map(slowly, results, chunksize=1)
        del results
        fresh_pool.map(slowly, [torch.ones(3)] * 4, chunksize=1)
        counts.append(open_files())
    # the survivor learns with its next call what is gone, and may not have had one
    deadline = time.monotonic() + PATIENCE
    while open_files() > counts[2] + 1:
        assert time.monotonic() < deadline, [*counts, open_files()]
        fresh_pool.map(slowly, [torch.ones(3)] * 4, chunksize=1)


@pytest.mark.slow
def test_graphs_that_were_released_as_they_were_dropped(fork_server: mpgrad.Pool) -> None:
    """They counted as missing for ever, and the number of graphs went below 0."""
    with mpgrad.Pool(1, graph_memory="12 MB") as pool:
        for _ in range(3):
            x = torch.ones(1_500_000, requires_grad=True)
            first = pool.map(lambda x: (x * 2).exp(), [x])
            later = pool.map_async(lambda x: (time.sleep(0.2), (x * 2).exp())[1], [x])
            del first
            del x
            eventually(lambda: graphs_known(pool) == 0)  # while the worker runs the other
            later.get()
            del later
        eventually(lambda: pool.map(abs, [1]) and graphs_known(pool) == 0)


@pytest.mark.slow
def test_the_sizes_of_graphs_that_are_gone() -> None:
    """The heap of sizes kept them all."""
    from mpgrad.workers.graphs import GraphEdges, GraphTable

    table = GraphTable(1 << 40)
    for call in range(10_000):
        table.keep(call, GraphEdges(cast("Any", None), [], []), 1000)
        table.note_emptied(call)
        table.release(call)
    assert table.nbytes == 0 and len(table._largest) < 2000


@pytest.mark.slow
def test_a_program_that_a_call_started_and_that_outlives_its_worker(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """It held the worker's end of the pipe open: the death was seen when it had ended."""

    def starts(flag: Path) -> bool:
        if not flag.exists():
            os.system(f"sleep 100 & echo $! > {flag}")
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    begin = time.monotonic()
    assert fresh_pool.map(starts, [tmp_path / "flag"]) == [True]
    assert time.monotonic() - begin < 50
    os.kill(int((tmp_path / "flag").read_text()), signal.SIGKILL)


def test_a_second_backward_raises_even_if_its_worker_dies_of_it(fork_server: mpgrad.Pool) -> None:
    """Symptom: it was taken for one that had freed the graph itself, and gradients doubled."""
    w = torch.ones(3, requires_grad=True)
    with mpgrad.Pool(1) as pool:
        (loss,) = pool.map(lambda x: (w * x).sum(), [torch.tensor(2.0)])
        loss.backward()
        (worker,) = pool.stats().workers
        os.kill(worker.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            second = thread.submit(loss.backward)
            while pool.stats().backwards_left == 0:
                time.sleep(0.001)
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(RuntimeError, match="a second time"):
                second.result(60)
    assert w.grad is not None and w.grad.tolist() == [2.0, 2.0, 2.0]
