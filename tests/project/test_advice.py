"""`mpgrad.advise`: the model by its figures, and one real run for each answer. Functions wait, so that load matters little."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import mpgrad
from mpgrad import Advice
from mpgrad.advice import trial
from mpgrad.advice.model import Measured, best_of, obstacles_of, pool_seconds, spread_of, ways_of
from mpgrad.others_clock import OthersClock

TRIAL = Measured(
    items=100,
    seconds=[0.01] * 10,
    one_backward=0.1,
    pools={1: 0.11, 2: 0.06},
    others={},
    cpus=2,
    cpus_taken=1.0,
    cpus_of_others=0.0,
    item_bytes=80.0,
    result_bytes=8.0,
    capture_bytes=100,
    gradient_bytes=0,
    bytes_per_second=1e9,
)


def obstacles(**changes: Any) -> list[str]:
    trial = dataclasses.replace(TRIAL, **changes)
    return [each.name for each in obstacles_of(trial, best_of(list(ways_of(trial)), trial.cpus)[1])]


@pytest.mark.quick
def test_pools_that_were_not_measured_follow_amdahl() -> None:
    measured = {1: 0.01 + 0.1, 2: 0.01 + 0.05, 4: 0.01 + 0.025}
    assert pool_seconds(measured, 8) == pytest.approx(0.01 + 0.0125)
    assert pool_seconds(measured, 2) == measured[2]
    assert pool_seconds({1: 0.1}, 4) == pytest.approx(0.025)
    assert pool_seconds({1: 0.1, 2: 0.04}, 4) >= 0  # faster than the workers can be: noise


@pytest.mark.quick
def test_ways_are_those_of_all_items() -> None:
    ways = {(way.name, way.processes): way for way in ways_of(dataclasses.replace(TRIAL, others={"threads": 0.2}))}
    assert ways["loop", 0].seconds == pytest.approx(1.0)
    assert (ways["pool", 2].seconds, ways["pool", 2].speed_up) == pytest.approx((0.6, 1 / 0.6))
    assert ways["pool", 4].seconds == pytest.approx(0.35) and not ways["pool", 4].measured
    assert ways["threads", 0].speed_up == pytest.approx(0.5)
    long = list(ways_of(dataclasses.replace(TRIAL, items=10, seconds=[0.08, *[0.002] * 9])))
    assert min(way.seconds for way in long) == 0.08  # the longest item


@pytest.mark.quick
def test_the_way_to_take() -> None:
    def best(**changes: Any) -> tuple[str, int]:
        way, _ = best_of(list(ways_of(dataclasses.replace(TRIAL, **changes))), 2)
        return way.name, way.processes

    assert best() == ("pool", 2)
    assert best(pools={1: 0.11, 2: 0.095}) == ("loop", 0)  # hardly faster
    assert best(one_backward=0.06) == ("loop", 0)  # as the loop is in its faster order
    assert best(others={"vmap": 0.01}) == ("vmap", 0)
    assert best(others={"threads": 0.055}) == ("threads", 0)
    assert best(others={"threads": 0.07}) == ("pool", 2)


@pytest.mark.quick
def test_what_stands_in_the_way() -> None:
    assert obstacles() == []
    assert obstacles(capture_bytes=200_000_000) == ["captures too large"]
    assert obstacles(result_bytes=5e6) == ["results too large"]
    assert obstacles(item_bytes=5e6) == ["items too large"]
    assert obstacles(items=10, seconds=[0.08, *[0.002] * 9]) == ["one item dominates"]
    assert obstacles(pools={1: 0.15, 2: 0.14}) == ["items too small"]
    assert obstacles(seconds=[0.1] * 10, one_backward=1.0, pools={1: 1.5, 2: 1.4}) == []  # whatever it is, they are not small
    assert obstacles(seconds=[0.1] * 10, one_backward=1.0, pools={1: 1.5, 2: 1.4}, gradient_bytes=10**8) == [
        "captures too large"
    ]
    assert obstacles(cpus_taken=2.0) == ["threads"]
    assert obstacles(cpus_taken=0.5) == ["waiting"]
    assert obstacles(cpus_taken=0.5, cpus_of_others=0.6) == ["busy machine"]


@pytest.mark.quick
def test_the_spread() -> None:
    assert spread_of([3.0]) == (3.0, 3.0)
    assert spread_of([float(n) for n in range(11)]) == (1.0, 9.0)


# --- real runs

BURNS = "import time; start = time.perf_counter(); print(flush=True)\nwhile time.perf_counter() - start < 60: pass"


def test_what_other_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", BURNS], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        clock = OthersClock()
        time.sleep(0.5)
        as_ours = clock.cpus()
        monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [])
        assert clock.cpus() > as_ours + 0.1
        other.kill()


def advice_on(fn: Any, items: list[Any], capsys: pytest.CaptureFixture[str]) -> Advice:
    advice = mpgrad.advise(fn, items, seconds=1.0, processes=2)
    told = capsys.readouterr()
    assert told.out == f"{advice}\n" and told.err == ""
    assert (advice.items, advice.ways[0].name) == (len(items), "loop")
    return advice


def names(advice: Advice) -> set[str]:
    return {each.name for each in advice.obstacles}


def test_it_pays(nursery: mpgrad.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x.sum()

    advice = advice_on(slow, [torch.ones(n, requires_grad=True) for n in range(1, 13)], capsys)
    assert (advice.use, advice.processes, advice.graphs) == ("pool", 2, "ahead")
    assert advice.item_seconds > 0.05 and advice.item_bytes > 0
    assert "A pool pays: mpgrad.Pool(2, " in str(advice)


def test_items_that_are_too_small(nursery: mpgrad.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    advice = advice_on(lambda x: x + 1, list(range(500)), capsys)
    assert advice.use == "loop" or "items too small" in names(advice)


@pytest.mark.slow
def test_an_item_that_dominates(nursery: mpgrad.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    advice = advice_on(lambda seconds: time.sleep(seconds), [0.3, 0.01, 0.01], capsys)
    assert "one item dominates" in names(advice)


def test_captures_that_are_too_large(nursery: mpgrad.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    large = torch.ones(1 << 24)
    advice = advice_on(lambda x: x * large[0], [torch.ones(3), torch.ones(4)], capsys)
    assert "captures too large" in names(advice) and advice.capture_bytes == 1 << 26


@pytest.mark.filterwarnings("ignore:the function wrote into a tensor")  # the pool says so, as it would to the user
def test_the_callers_things_stay_as_they_were(nursery: mpgrad.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    source = torch.ones(3, requires_grad=True)
    weight, history, norm = torch.ones(3, requires_grad=True), source * source, torch.nn.BatchNorm1d(3)
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
    mpgrad.advise(fn, items, seconds=0.2, processes=1, show=False)
    assert capsys.readouterr().out == ""
    assert torch.equal(torch.rand(2), wanted[0]) and random.random() == wanted[1]
    assert all(each.grad is None for each in (source, weight, items[0], *norm.parameters()))
    assert not buffer.any() and norm.num_batches_tracked == 0
    assert torch.get_num_threads() == threads
    (items[1].sum() + history.sum()).backward()  # their graphs are there


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        mpgrad.advise(abs, [])
    with pytest.raises(ValueError, match=r"above 0 \(seconds: 0\)"):
        mpgrad.advise(abs, [1], seconds=0)
    with pytest.raises(ValueError, match="processes"):
        mpgrad.advise(abs, [1], processes=0)


def test_long_items_are_run_a_few_times(nursery: mpgrad.Pool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half-second items took 40 s, whatever `seconds` said."""

    def long(x: torch.Tensor) -> torch.Tensor:
        with (tmp_path / "calls").open("a") as file:
            file.write("x")
        time.sleep(0.5)
        return x.sum()

    advice = advice_on(long, [torch.ones(3)] * 12, capsys)
    assert (advice.use, advice.sampled) == ("pool", 2)
    assert advice.backward_share == 0 and advice.operation_share is None  # nothing needs gradients
    assert len((tmp_path / "calls").read_text()) <= 7


@pytest.mark.slow
def test_long_items_for_more_workers_than_were_run(nursery: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of four took as long for two items as one of two, and was thought to be no faster."""
    monkeypatch.setattr(trial, "usable_cpus", lambda: 4)
    advice = mpgrad.advise(time.sleep, [0.4] * 16, seconds=1.0, processes=4, show=False)
    found = {way.processes: way for way in advice.ways if way.name == "pool"}
    assert found[2].measured and not found[4].measured
    assert advice.processes == 4 and found[4].speed_up > 1.5 * found[2].speed_up > 2


def test_seconds_that_are_no_number() -> None:
    with pytest.raises(TypeError, match="seconds must be a number \\(seconds: '5'\\)"):
        mpgrad.advise(abs, [1], seconds="5")  # type: ignore[arg-type]
