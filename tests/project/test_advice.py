"""`mpgrad.advise`: what it makes of figures, and one real run for each answer. Functions wait, so
that load matters little."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import mpgrad
from mpgrad import Advice, advice
from mpgrad.system import OthersClock

FOUND = Advice(
    items=100,
    item_seconds=[0.01] * 10,
    pool_seconds={1: 0.11, 2: 0.06},
    capture_bytes=100,
    item_bytes=88.0,
    cpus=2,
    cpus_of_loop=1.0,
    cpus_of_others=0.0,
)


def obstacles(**changes: Any) -> list[str]:
    """The first words of each."""
    return [each.partition(":")[0] for each in dataclasses.replace(FOUND, **changes).obstacles()]


@pytest.mark.quick
def test_seconds_are_those_of_all_items() -> None:
    assert (FOUND.loop_seconds, FOUND.seconds(1), FOUND.seconds(2)) == pytest.approx(
        (1.0, 1.1, 0.6)
    )
    assert (FOUND.processes, FOUND.speed_up) == (2, pytest.approx(1 / 0.6))
    long = dataclasses.replace(
        FOUND, items=10, item_seconds=[0.08, *[0.002] * 9], pool_seconds={2: 0.08}
    )
    assert long.seconds(2) == pytest.approx(0.08)  # the longest item


@pytest.mark.quick
def test_more_workers_than_items_in_the_sample() -> None:
    """A pool of four took as long for two items as one of two, and was thought to be no faster."""
    found = dataclasses.replace(
        FOUND, items=16, item_seconds=[0.4] * 2, pool_seconds={4: 0.4, 2: 0.4}
    )
    assert (found.seconds(2), found.seconds(4)) == pytest.approx((3.2, 1.6))
    assert found.processes == 4
    # nor are there more in all
    assert dataclasses.replace(found, items=3).seconds(4) == pytest.approx(0.4)


@pytest.mark.quick
def test_the_answer_comes_first() -> None:
    assert FOUND.pays
    assert str(FOUND).splitlines() == [
        "Use a pool: mpgrad.Pool(2) is about 1.7 times as fast as the loop.",
        "",
        "items       100, of which 10 were run",
        "one item    10 ms (median; the longest 10 ms)",
        "loop        1 s",
        "pool of 1   1.1 s",
        "pool of 2   600 ms",
    ]
    slow = dataclasses.replace(FOUND, pool_seconds={2: 0.098, 1: 0.11})  # hardly faster
    assert not slow.pays
    assert str(slow).startswith(
        "Do not use a pool: mpgrad.Pool(2) is about 1 times as fast as the loop.\n"
    )
    first, second, *_ = str(dataclasses.replace(FOUND, cpus_of_others=0.6)).splitlines()
    assert first == "Use a pool: mpgrad.Pool(2) is about 1.7 times as fast as the loop."
    assert second.startswith("The machine was busy (other programs used 0.6 of 2 CPUs)")


@pytest.mark.quick
def test_what_stands_in_the_way() -> None:
    assert obstacles() == []
    assert obstacles(capture_bytes=200_000_000) == ["Captures are large"]
    assert obstacles(item_bytes=2e7) == ["Tensors are large"]
    (one,) = obstacles(items=10, item_seconds=[0.08, *[0.002] * 9], pool_seconds={2: 0.08})
    assert one.startswith("One item takes 80 ms")
    assert obstacles(pool_seconds={2: 0.14, 1: 0.15}) == ["Items are small"]
    # whatever it is, they are not small
    assert obstacles(item_seconds=[0.1] * 10, pool_seconds={2: 1.4, 1: 1.5}) == []
    assert obstacles(cpus_of_loop=0.5) == ["The function waits"]
    assert obstacles(cpus_of_loop=0.5, cpus_of_others=0.6) == []  # it was kept waiting


# --- real runs

BURNS = (
    "import time; start = time.perf_counter(); print(flush=True)\nwhile time.perf_counter() - "
    "start < 60: pass"
)


def test_what_other_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", BURNS], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        clock, process, begin = OthersClock(), psutil.Process(other.pid), time.monotonic()
        had = process.cpu_times().user
        while (burnt := process.cpu_times().user - had) < 0.3:  # later if CPUs are busy
            time.sleep(0.05)
        as_ours = clock.cpus()
        monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [])
        assert clock.cpus() > as_ours + 0.5 * burnt / (time.monotonic() - begin)
        other.kill()


def advice_on(
    fn: Any,
    items: list[Any],
    capfd: pytest.CaptureFixture[str],
    is_right: Callable[[Advice], bool],
    seconds: float = 1.0,
) -> Advice:
    """Return the first advice that is right. A busy machine may stand still for a moment, and what
    is measured then leads to another."""
    for _ in range(5):
        found = mpgrad.advise(fn, items, seconds=seconds, processes=2)
        assert tuple(capfd.readouterr()) == ("", "")  # it prints nothing by itself
        assert found.items == len(items)
        if is_right(found):
            return found
    raise AssertionError(found)


def test_it_pays(fork_server: mpgrad.Pool, capfd: pytest.CaptureFixture[str]) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x.sum()

    found = advice_on(
        slow,
        [torch.ones(n, requires_grad=True) for n in range(1, 13)],
        capfd,
        lambda found: found.pays and found.processes == 2,
    )
    assert min(found.item_seconds) > 0.05 and found.item_bytes > 0
    assert str(found).startswith("Use a pool: mpgrad.Pool(2) is about ")


@pytest.mark.slow
def test_items_that_are_too_small(
    fork_server: mpgrad.Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    advice_on(
        lambda x: x + 1,
        list(range(500)),
        capfd,
        lambda found: not found.pays and "Items are small" in str(found),
    )


@pytest.mark.slow
def test_an_item_that_dominates(
    fork_server: mpgrad.Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    advice_on(
        lambda seconds: time.sleep(seconds),
        [0.3, 0.01, 0.01],
        capfd,
        lambda found: "One item takes" in str(found),
    )


@pytest.mark.slow
def test_captures_that_are_too_large(
    fork_server: mpgrad.Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    large = torch.ones(1 << 24)
    found = advice_on(
        lambda x: x * large[0],
        [torch.ones(3), torch.ones(4)],
        capfd,
        lambda found: "Captures are large: each map copies 64 MiB" in str(found),
        seconds=0.4,
    )
    assert found.capture_bytes == 1 << 26


@pytest.mark.filterwarnings(
    "ignore:the function wrote into a tensor"
)  # the pool says so, as it would to the user
def test_the_callers_things_stay_as_they_were(fork_server: mpgrad.Pool) -> None:
    source = torch.ones(3, requires_grad=True)
    weight, history, norm = (
        torch.ones(3, requires_grad=True),
        source * source,
        torch.nn.BatchNorm1d(3),
    )
    items = [torch.ones(2, 3, requires_grad=True), torch.ones(4, 3) * source]
    buffer = torch.zeros(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        random.random()
        return (norm(x) * weight * history * torch.rand(3)).sum()

    torch.manual_seed(1)
    random.seed(1)
    wanted = torch.rand(2), random.random()
    torch.manual_seed(1)
    random.seed(1)
    threads = torch.get_num_threads()
    mpgrad.advise(fn, items, seconds=0.2, processes=1)
    assert torch.equal(torch.rand(2), wanted[0]) and random.random() == wanted[1]
    assert all(each.grad is None for each in (source, weight, items[0], *norm.parameters()))
    assert not buffer.any() and norm.num_batches_tracked == 0
    assert torch.get_num_threads() == threads
    (items[1].sum() + history.sum()).backward()  # their graphs are there


class Counted(torch.autograd.Function):
    """Says how often its backward has run in this process."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return grad


@pytest.mark.parametrize("of", ["item", "capture"])
def test_the_loop_is_run_with_its_backward(of: str) -> None:
    tensor = torch.ones(3, requires_grad=True)
    items: list[Any] = [tensor] * 3 if of == "item" else [1.0] * 3
    timer = advice.LoopTimer(lambda x: Counted.apply(x if of == "item" else tensor).sum())
    before = Counted.calls
    seconds, cpus = timer(items)
    assert Counted.calls - before == len(seconds) == 3 and cpus > 0
    assert tensor.grad is None


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        mpgrad.advise(abs, [])
    with pytest.raises(ValueError, match=r"above 0 \(seconds: 0\)"):
        mpgrad.advise(abs, [1], seconds=0)
    with pytest.raises(ValueError, match="processes"):
        mpgrad.advise(abs, [1], processes=0)
    with pytest.raises(TypeError, match="seconds must be a number \\(seconds: '5'\\)"):
        mpgrad.advise(abs, [1], seconds="5")  # type: ignore[arg-type]


def test_long_items_are_run_a_few_times(
    fork_server: mpgrad.Pool, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Half-second items took 40 s, whatever `seconds` said; these take a quarter of `seconds`,
    too."""

    calls = tmp_path / "calls"

    def long(x: torch.Tensor) -> torch.Tensor:
        with calls.open("a") as file:
            file.write("x")
        time.sleep(0.1)
        return x.sum()

    def is_right(found: Advice) -> bool:
        count = len(calls.read_text())
        calls.unlink()
        assert count <= 7 and len(found.item_seconds) == 2
        return found.pays and found.processes == 2

    advice_on(long, [torch.ones(3)] * 12, capfd, is_right, seconds=0.4)


def test_it_is_a_table_in_a_notebook() -> None:
    assert repr(FOUND) == str(FOUND) and "\n" in repr(FOUND)
