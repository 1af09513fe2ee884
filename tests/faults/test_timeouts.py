"""A time limit is not a death: a call that takes too long fails at its first time-out, unless
`timeout_retries` asks for more. Nothing else is charged for it."""

from __future__ import annotations

import contextlib
import fractions
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch
from conftest import PATIENCE, linux_only, replace_all, staffed
from inside import (
    LIMIT,
    handles,
    hung_calls_are_overdue,
    in_scheduling_thread,
    is_overdue,
    make_overdue,
)

import mpgrad
import mpgrad.joblib
from mpgrad.workers import early

Tensor = torch.Tensor
FOREVER = 600


def note(file: Path) -> int:
    """How often this was called with the file, by any process, this time included."""
    with file.open("a") as stream:
        stream.write(".")
    return file.stat().st_size


def noted(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def hangs(file: Path, *_: Any) -> Any:
    note(file)
    time.sleep(FOREVER)


class HangsBackward(torch.autograd.Function):
    """Its backward hangs as often as is said."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, file: Path, times: int) -> Tensor:
        ctx.file, ctx.times = file, times
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if note(ctx.file) <= ctx.times:
            time.sleep(FOREVER)
        return grad * 2, None, None


class Loaded:
    """Calls a function in each worker that loads it; in a task it is `abs`."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return loaded, self._call

    def __call__(self, k: int) -> int:
        return abs(k)


def loaded(function: Callable[..., object], *args: Any) -> Callable[[int], int]:
    function(*args)
    return abs


# --- limits that nothing but the pool's own clock can end


@pytest.mark.quick
def test_a_short_limit_of_a_forward_and_of_a_backward(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """Nobody wakes the pool's thread. A busy machine may stand still for longer than the limit, so
    workers may be ended before these calls begin."""
    x = torch.ones(2, requires_grad=True)

    def backward_hangs() -> Tensor:
        while True:
            with contextlib.suppress(mpgrad.CallTimeoutError):
                (y,) = pool.map(lambda x: HangsBackward.apply(x, tmp_path / "hung", 99), [x])
                return y.sum()

    with mpgrad.Pool(1, retries=99, timeout=0.2) as pool:
        with pytest.raises(mpgrad.CallTimeoutError):
            pool.apply_async(hangs, (tmp_path / "hung",)).get(PATIENCE)
        with pytest.raises(mpgrad.CallTimeoutError):
            backward_hangs().backward()
        assert pool.stats().kills >= 2


# --- each operation fails at its first time-out


def jacobian(pool: mpgrad.Pool, file: Path) -> object:
    return mpgrad.jacobian(functools.partial(hangs, file), torch.ones(2), pool=pool)


OPERATIONS: dict[str, Callable[[mpgrad.Pool, Path], object]] = {
    "map": lambda pool, file: pool.map(hangs, [file]),
    "starmap": lambda pool, file: pool.starmap(hangs, [(file, 1)]),
    "map_async": lambda pool, file: pool.map_async(hangs, [file]).get(50),
    "imap": lambda pool, file: list(pool.imap(hangs, [file])),
    "imap_unordered": lambda pool, file: list(pool.imap_unordered(hangs, [file])),
    "apply": lambda pool, file: pool.apply(hangs, (file,)),
    "apply_async": lambda pool, file: pool.apply_async(hangs, (file,)).get(50),
    "submit": lambda pool, file: pool.submit(hangs, file).result(50),
    "reduce": lambda pool, file: pool.reduce(lambda target, _: hangs(file), [1, 2], [0]),
    "map_reduce": lambda pool, file: pool.map_reduce(hangs, [file, file], lambda a, b: a),
    "jacobian": jacobian,
}


@pytest.mark.slow
def test_each_operation_fails_at_its_first_time_out(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    def hung() -> int:
        return sum(noted(tmp_path / name) for name in OPERATIONS)

    with mpgrad.Pool(1, timeout=LIMIT) as pool, hung_calls_are_overdue(pool, hung):
        for number, (name, ask) in enumerate(OPERATIONS.items(), 1):
            with pytest.raises(mpgrad.CallTimeoutError):
                ask(pool, tmp_path / name)
            assert (name, noted(tmp_path / name)) == (name, 1)
            assert pool.stats().deaths == number


@pytest.mark.slow
def test_an_executor_fails_at_its_first_time_out(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    def hung() -> int:
        return noted(tmp_path / "submit") + noted(tmp_path / "map")

    with mpgrad.Executor(2, timeout=LIMIT) as executor, hung_calls_are_overdue(executor, hung):
        with pytest.raises(mpgrad.CallTimeoutError):
            executor.submit(hangs, tmp_path / "submit").result(50)
        with pytest.raises(mpgrad.CallTimeoutError):
            list(executor.map(hangs, [tmp_path / "map"]))
    assert (noted(tmp_path / "submit"), noted(tmp_path / "map")) == (1, 1)


@pytest.fixture
def backend(fork_server: mpgrad.Pool) -> Iterator[None]:
    mpgrad.joblib.register()
    yield
    del joblib.parallel.BACKENDS["mpgrad"]


@pytest.mark.slow
def test_joblibs_backend_fails_at_its_first_time_out(backend: None, tmp_path: Path) -> None:
    calls = [joblib.delayed(hangs)(tmp_path / "hung"), joblib.delayed(abs)(-1)]
    with (
        joblib.parallel_config(backend="mpgrad", n_jobs=2, timeout=0.3),
        pytest.raises(mpgrad.CallTimeoutError),
    ):
        joblib.Parallel(batch_size=1)(calls)
    # none, if the machine stood still before it was noted
    assert noted(tmp_path / "hung") <= 1


def test_a_hung_backward_fails_at_its_first_time_out(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    xs = [torch.full((2,), float(k), requires_grad=True) for k in range(3)]

    def fn(x: Tensor) -> Tensor:
        return HangsBackward.apply(x, tmp_path / "hung", 99) if x[0] == 1 else x * 2

    with mpgrad.Pool(1) as pool, hung_calls_are_overdue(pool, lambda: noted(tmp_path / "hung")):
        results = pool.map(fn, xs, timeout=LIMIT)
        (worker,) = pool.stats().workers
        with pytest.raises(mpgrad.CallTimeoutError) as caught:
            torch.cat(results).sum().backward()
        error = caught.value
        assert (error.item, error.phase, error.worker) == (1, "backward", worker.number)
        assert str(error) == (
            "item 1 of fn ran longer than the time limit of a call (60.0 s, phase: backward), and "
            f"was killed with its worker (worker: {worker.number}); the call was tried once "
            "(timeout_retries: 0)"
        )
        (y,) = pool.map(torch.exp, [xs[0]])
        y.sum().backward()
        assert torch.equal(xs[0].grad, y)  # type: ignore[arg-type]
    assert noted(tmp_path / "hung") == 1


# --- those that are tried again


def test_time_outs_are_tried_again_on_request(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    def fn(k: int) -> int:
        if note(tmp_path / f"{k}") <= k:
            time.sleep(FOREVER)
        return k

    def hung() -> int:
        return sum(min(noted(tmp_path / f"{k}"), k) for k in range(3))

    with mpgrad.Pool(1, timeout_retries=1) as pool, hung_calls_are_overdue(pool, hung):
        found = pool.map(fn, [0, 1, 2], 1, timeout=LIMIT, on_error="return")
        assert found[:2] == [0, 1] and isinstance(found[2], mpgrad.CallTimeoutError)
        assert "; the call was tried 2 times (timeout_retries: 1)" in str(found[2])
        assert pool.stats().deaths == 3


@pytest.mark.parametrize("retries", [2, 0])
def test_a_hung_backward_is_tried_again_on_request(
    fork_server: mpgrad.Pool, tmp_path: Path, retries: int
) -> None:
    """Without retries its graph is lost with the worker, and the error is that of the time-out."""
    x = torch.ones(2, requires_grad=True)
    with (
        mpgrad.Pool(1, retries=retries, timeout_retries=1) as pool,
        hung_calls_are_overdue(pool, lambda: min(noted(tmp_path / "hung"), 1)),
    ):
        (y,) = pool.map(lambda x: HangsBackward.apply(x, tmp_path / "hung", 1), [x], timeout=LIMIT)
        if retries == 0:
            with pytest.raises(mpgrad.CallTimeoutError):
                y.sum().backward()
        else:
            y.sum().backward()
            assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]
    assert noted(tmp_path / "hung") == (1 if retries == 0 else 2)


@pytest.mark.slow
def test_deaths_and_time_outs_are_counted_apart(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    def fn(k: int) -> int:
        match note(tmp_path / "begun"):
            case 1 | 3:
                os.kill(os.getpid(), signal.SIGKILL)
            case 2:
                time.sleep(FOREVER)
        return k

    with (
        mpgrad.Pool(1, retries=2, timeout_retries=1) as pool,
        hung_calls_are_overdue(pool, lambda: noted(tmp_path / "begun") >= 2),
    ):
        assert pool.map(fn, [7], timeout=LIMIT) == [7]
        assert pool.stats().deaths == 3


def keeps_answers() -> None:
    """This worker sends the results of a chunk together, however long a call takes."""
    early.PATIENCE = early.PATIENCE_TOGETHER = FOREVER


@pytest.mark.parametrize("initializer", [None, keeps_answers])
def test_without_retries_a_time_out_may_be_tried_again(
    fork_server: mpgrad.Pool, tmp_path: Path, initializer: Callable[[], None] | None
) -> None:
    """What had run in the same chunk fails, unless it was answered: it must not run twice."""

    def fn(k: int) -> int:
        if note(tmp_path / f"{k}") == 1 and k == 1:
            time.sleep(FOREVER)
        return k

    def hung() -> int:
        is_early = initializer is not None or pool.stats().calls == 1  # the first has come
        return min(noted(tmp_path / "1"), 1) if is_early else 0

    with (
        mpgrad.Pool(1, initializer, retries=0, timeout_retries=1) as pool,
        hung_calls_are_overdue(pool, hung),
    ):
        first, *others = pool.map(fn, range(4), 4, timeout=LIMIT, on_error="return")
        assert others == [1, 2, 3]
        assert first == 0 if initializer is None else isinstance(first, mpgrad.CallTimeoutError)
    assert [noted(tmp_path / f"{k}") for k in range(4)] == [1, 2, 1, 1]


# --- what is not charged


def test_what_was_next_in_the_killed_worker_is_not_charged(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    def fn(k: int) -> int:
        if k < 4:
            hangs(tmp_path / "hung")
        return k

    with mpgrad.Pool(1) as pool, hung_calls_are_overdue(pool, lambda: noted(tmp_path / "hung")):
        *late, last, end = pool.map(fn, range(6), 6, timeout=LIMIT, on_error="return")
        assert [type(each) for each in late] == [mpgrad.CallTimeoutError] * 4
        assert (last, end) == (4, 5) and pool.stats().deaths == 4


def test_the_loading_of_a_function_does_not_count(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    # symptom: a time-out with the phase "loading the function". cause: the clock ran from the
    # moment at which the worker had been sent its first call.
    # tried again, because a busy machine may stand still for a moment; each time it loads as long
    with mpgrad.Pool(1, timeout_retries=3) as pool:
        assert pool.map(Loaded(time.sleep, 0.5), [-1, -2], timeout=0.2) == [1, 2]


def test_the_clock_begins_once_the_function_is_loaded(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """Nobody tells the scheduler when that is."""

    def fn(loaded: object, k: int) -> None:
        hangs(tmp_path / "hung")

    with mpgrad.Pool(1) as pool, hung_calls_are_overdue(pool, lambda: noted(tmp_path / "hung")):
        with pytest.raises(mpgrad.CallTimeoutError) as caught:
            pool.map(functools.partial(fn, Loaded(time.sleep, 0.1)), [1], timeout=LIMIT)
        assert caught.value.phase == "forward" and pool.stats().deaths == 1
    assert noted(tmp_path / "hung") == 1


@pytest.mark.slow
@linux_only("SIGSTOP")
def test_a_call_that_a_stopped_worker_has_next_is_not_charged(fork_server: mpgrad.Pool) -> None:
    stopped = []

    def hung() -> int:
        return len(stopped) if [each.state for each in pool.stats().workers] == ["busy"] else 0

    with mpgrad.Pool(1, timeout=LIMIT) as pool, hung_calls_are_overdue(pool, hung):
        for deaths in range(2):
            (worker,) = staffed(pool).stats().workers
            os.kill(worker.pid, signal.SIGSTOP)
            stopped.append(worker)
            assert pool.map(abs, [-1, -2]) == [1, 2]
            assert pool.stats().deaths == deaths + 1


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


def test_calls_that_ended_in_time_while_nobody_looked(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """The pool's thread, after a callback had held it up, killed workers for calls that were done
    long ago."""
    begun, go = tmp_path / "begun", tmp_path / "go"

    def waits(k: int) -> int:
        begun.touch()
        while not go.exists():
            time.sleep(1e-3)
        return k

    def holds_it_up() -> None:
        go.touch()
        while not worker.link.has_more():  # until the result is in the pipe
            time.sleep(1e-3)
        now = time.monotonic()
        make_overdue(worker, now)
        looked.append(is_overdue(worker, now))

    looked: list[bool] = []
    with mpgrad.Pool(1, timeout=LIMIT, retries=0) as pool:
        result = pool.map_async(waits, [1])
        while not begun.exists():
            time.sleep(1e-3)
        (worker,) = handles(pool)
        in_scheduling_thread(pool, holds_it_up)
        assert result.get(PATIENCE) == [1] and pool.stats().deaths == 0
        assert worker.termination is None and looked == [True]


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.8)
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


@pytest.mark.slow
def test_each_step_to_a_lost_graph_has_its_own_time(fork_server: mpgrad.Pool) -> None:
    # tried again, because a busy machine may stand still for a moment; two steps take too long
    # however often they are tried
    with mpgrad.Pool(1, timeout=1.5, timeout_retries=3) as pool:
        x = torch.ones(3, requires_grad=True)
        (y,) = pool.map(lambda x: (time.sleep(0.8), Slow.apply(x))[1], [x])
        (d,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        replace_all(pool)
        assert torch.equal(torch.autograd.grad(d.sum(), x)[0], torch.full((3,), 6.0))
