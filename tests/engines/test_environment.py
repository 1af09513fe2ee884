"""What the caller changes in its environment after a pool has begun shows in workers, as it does in
the serial loop.

Workers are other processes: they had the variables, the directory and the arguments of the moment
when the pool began.
"""

from __future__ import annotations

import contextlib
import decimal
import logging
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import linux_only

import mpgrad
from mpgrad.environment import EnvironmentChanges
from mpgrad.machine.timing import CONFIRMED, LEAST

NAME = "MPGRAD_TEST_VARIABLE"
Change = Callable[[pytest.MonkeyPatch, Path], None]


def seen(_: object = None) -> tuple[Any, ...]:
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = "deleted"
    there = os.path.exists("made_by_the_test")
    return (
        os.environ.get(NAME),
        os.getenv("HOME"),
        directory,
        there,
        sys.argv[:],
        sys.path[:],
        time.localtime(0).tm_hour,
    )


def set_it(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv(NAME, "new, also with \udcff in it")


def delete_another(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.delenv("HOME", raising=False)


def go_elsewhere(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "made_by_the_test").touch()
    patch.chdir(folder)


def delete_the_directory(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.chdir(folder)
    folder.rmdir()


def give_arguments(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(sys, "argv", ["program", "--fast"])


def add_a_path(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.syspath_prepend(str(folder))


def replace_all(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "environ", {NAME: "replaced"})  # which `os.getenv` reads, too


CHANGES = [
    set_it,
    delete_another,
    go_elsewhere,
    delete_the_directory,
    give_arguments,
    add_a_path,
    replace_all,
]


@pytest.mark.quick
@pytest.mark.parametrize("change", CHANGES)
def test_calls_see_what_has_changed(
    change: Change,
    pool2: mpgrad.Pool,
    pool: mpgrad.Pool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    before = seen()
    assert pool2.map(seen, range(4), 1) == [before] * 4
    with monkeypatch.context() as patch:
        change(patch, tmp_path)
        now = seen()
        assert now != before
        assert pool2.map(seen, range(4), 1) == pool.map(seen, range(4), 1) == [now] * 4
    assert pool2.map(seen, range(4), 1) == [seen()] * 4 == [before] * 4


def computed(_: object = None) -> tuple[Any, ...]:
    third = str(decimal.Decimal(1) / 3)
    traps = {each.__name__ for each, is_set in decimal.getcontext().traps.items() if is_set}
    return third, traps, numpy.geterr(), sys.getrecursionlimit()


@contextlib.contextmanager
def computing_otherwise() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    with decimal.localcontext() as context, numpy.errstate(divide="raise", under="ignore"):
        context.prec, context.traps[decimal.Inexact] = 5, False
        context.traps[decimal.DivisionByZero] = False
        sys.setrecursionlimit(limit + 1000)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)


@pytest.mark.quick
def test_numbers_are_computed_as_in_the_caller(pool2: mpgrad.Pool) -> None:
    """A worker had Python's own settings: other digits, and a warning for an error."""
    before = computed()
    assert pool2.map(computed, range(2), 1) == [before] * 2
    with computing_otherwise():
        now = computed()
        assert now[0] == "0.33333" and now != before
        assert pool2.map(computed, range(2), 1) == [now] * 2
        pool2.map(lambda _: sys.setrecursionlimit(5000), range(2), 1)
        with mpgrad.Pool(1) as later:
            assert later.map(computed, [0]) == [now]
    assert pool2.map(computed, range(2), 1) == [before] * 2


def levels(_: object = None) -> list[int]:
    names = "mpgrad_tests.some", "mpgrad_tests.some.other", "mpgrad_tests.third"
    return [logging.getLogger(name).getEffectiveLevel() for name in names]


@pytest.mark.quick
def test_levels_of_loggers_that_are_set_later(pool2: mpgrad.Pool) -> None:
    """`isEnabledFor` gave what was true when the pool began, so another branch ran."""
    before = levels()
    assert pool2.map(levels, range(2), 1) == [before] * 2
    logging.getLogger("mpgrad_tests.some").setLevel(logging.DEBUG)
    try:
        assert levels() == [logging.DEBUG, logging.DEBUG, before[2]]
        assert pool2.map(levels, range(2), 1) == [levels()] * 2
    finally:
        logging.getLogger("mpgrad_tests.some").setLevel(logging.NOTSET)
    assert pool2.map(levels, range(2), 1) == [before] * 2


def set_by_an_initializer() -> None:
    decimal.getcontext().prec = 3
    numpy.seterr(divide="ignore")


@pytest.mark.quick
def test_how_an_initializer_has_numbers_computed_stays(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, initializer=set_by_an_initializer) as pool:
        for changed in (contextlib.nullcontext(), computing_otherwise()):
            with changed:
                third, _, errors, limit = pool.apply(computed, (0,))
                assert (third, errors["divide"]) == ("0.333", "ignore")
                assert limit == sys.getrecursionlimit()


@pytest.mark.quick
@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the system has no time.tzset")
def test_the_time_zone_is_the_one_in_use(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before `time.tzset` in the caller: until then the loop's clock goes on as it was,
    whatever TZ says."""
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "XXX-7")
            for _ in range(2):
                assert (
                    pool2.map(lambda _: (time.tzname, time.timezone), range(2), 1)
                    == [(time.tzname, time.timezone)] * 2
                )
                time.tzset()
            assert time.timezone == -7 * 3600
    finally:
        time.tzset()
    assert pool2.map(seen, range(2), 1) == [seen()] * 2


@pytest.mark.quick
def test_a_module_is_found_where_the_caller_finds_it_now(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that loading the function imports."""
    (tmp_path / "found_late.py").write_text(f"import os\nCONSTANT = os.environ[{NAME!r}]\n")

    def fn(_: int) -> str:
        import found_late

        return found_late.CONSTANT

    monkeypatch.setenv(NAME, "read by the import")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert pool2.map(fn, range(2), 1) == ["read by the import"] * 2
    finally:
        sys.modules.pop("found_late", None)


def set_up(folder: str) -> None:
    os.environ[NAME] = "the initializer's"
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv[:] = ["the initializer's"]


def test_what_a_worker_has_set_itself_stays(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its initializer's variables, directory, paths and arguments; the numbers of threads that
    mpgrad sets."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(NAME, raising=False)
    with mpgrad.Pool(1, initializer=set_up, initargs=(str(tmp_path),)) as pool:
        assert pool.apply(os.getcwd) == str(tmp_path)
        monkeypatch.setenv(NAME, "the caller's")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        monkeypatch.setenv("ANOTHER_VARIABLE", "followed")
        monkeypatch.chdir("/")
        monkeypatch.syspath_prepend("/nowhere")
        monkeypatch.setattr(sys, "argv", ["the caller's"])
        names = NAME, "OMP_NUM_THREADS", "ANOTHER_VARIABLE"
        of_worker = pool.apply(
            lambda: ([os.environ.get(each) for each in names], os.getcwd(), sys.path[:2], sys.argv)
        )
    assert of_worker[0][::2] == ["the initializer's", "followed"] and of_worker[0][1] != "7"
    assert of_worker[1:] == (str(tmp_path), [str(tmp_path), "/nowhere"], ["the initializer's"])


class Scaled(torch.autograd.Function):
    """Its factors are what a variable says in the forward, and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = float(os.environ[NAME])
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (ctx.factor + 100 * float(os.environ[NAME]))


@pytest.mark.parametrize("graphs", ["keep", "recompute"])
def test_backwards_and_calls_that_run_again(
    graphs: Any, fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is made again finds what the forward had; its backward what the caller has when
    it runs."""
    with mpgrad.Pool(1, graphs=graphs) as pool:
        x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
        monkeypatch.setenv(NAME, "2")
        first = pool.map(Scaled.apply, [x])
        monkeypatch.setenv(NAME, "3")
        second = pool.map(Scaled.apply, [y])
        monkeypatch.setenv(NAME, "5")
        (first[0] + second[0]).backward()
        assert (first[0].item(), second[0].item(), x.grad, y.grad) == (2, 3, 502, 503)


class Seen(torch.autograd.Function):
    """An identity whose gradient says what its backward has seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (zlib.crc32(repr(seen()).encode()) % 1000)


@pytest.mark.parametrize("change", CHANGES)
def test_backwards_that_came_early(
    change: Change, fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """A backward that ran with its forward saw the forward's environment, not the caller's later
    one."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return Seen.apply(x).sum()  # type: ignore[no-any-return, no-untyped-call]

    with mpgrad.Pool(1) as pool:
        for step in range(LEAST + CONFIRMED + 1):
            folder = tmp_path / str(step)
            folder.mkdir()
            xs, ys = ([torch.ones(2, requires_grad=True) for _ in range(3)] for _ in range(2))
            of_pool, of_loop = sum(pool.map(loss, xs)), sum(map(loss, ys))
            with pytest.MonkeyPatch.context() as patch:
                change(patch, folder)
                found, expected = torch.autograd.grad(of_pool, xs), torch.autograd.grad(of_loop, ys)
            assert all(map(torch.equal, found, expected))


@linux_only("the time it takes to start workers")
def test_the_successor_of_a_worker_that_died(
    fresh_pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A call that is tried again finds the environment of its operation, in a worker that began in
    another one."""

    def fn(k: int) -> tuple[str, str]:
        if k == 1 and not os.path.exists("tried"):
            Path("tried").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.environ[NAME], os.getcwd()

    monkeypatch.setenv(NAME, "1")
    monkeypatch.chdir(tmp_path)
    future = fresh_pool.submit(fn, 1)
    monkeypatch.setenv(NAME, "2")
    monkeypatch.chdir("/")
    assert future.result() == ("1", str(tmp_path))
    assert fresh_pool.map(fn, [0, 2], 1) == [("2", "/")] * 2


@pytest.mark.quick
def test_nothing_is_told_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    since = EnvironmentChanges()
    assert since.changes() == b""
    monkeypatch.setenv(NAME, "1")
    changes = since.changes()
    assert changes and since.changes() is changes
    monkeypatch.delenv(NAME)
    assert since.changes() == b""
