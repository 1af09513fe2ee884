"""bench_overhead.py runs, checks its contenders and writes its figures; the figures are no test's business."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_overhead.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 10
BY_HAND = ["torch arrays", "torch tensors"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=LIMIT
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("bench") / "quick.json"
    ended = run("--quick", "--processes", "2", "--repeats", "1", "--output", str(output))
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout, json.loads(output.read_text())


def names(row: dict[str, Any]) -> list[str]:
    return [contender["contender"] for contender in row["contenders"]]


def test_every_contender_is_measured_in_every_pass(quick: tuple[str, dict[str, Any]]) -> None:
    _, record = quick
    forward, with_graph, backward = record["tiny"]
    assert names(forward) == ["serial", "mpgrad", *BY_HAND]
    assert names(with_graph) == ["serial", "mpgrad"]
    for row in (backward, *record["work"]):
        assert names(row) == ["serial", "serial, at once", "mpgrad", *BY_HAND]
    assert [row["contender"] for row in record["start_up"]] == ["mpgrad"]
    assert [row["pass"] for row in record["transfer"]] == ["forward", "forward and backward"]


def test_figures_are_seconds_of_every_round(quick: tuple[str, dict[str, Any]]) -> None:
    _, record = quick
    for row in (*record["tiny"], *record["work"], *record["transfer"]):
        for contender in row["contenders"]:
            (seconds,) = contender["seconds_per_item"]
            assert contender["median_us_per_item"] == pytest.approx(1e6 * seconds)


def test_says_where_and_when_it_was_measured(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    around = record["surroundings"]
    assert around["processes"] == 2
    for text in (around["date"], around["cpu"], around["versions"]["torch"]):
        assert text in table


def test_a_wrong_contender_stops_the_run(script: Any) -> None:
    contenders = [
        script.Contender("serial", functools.partial(script.one_backward, script.serial, script.doubled)),
        script.Contender("wrong", functools.partial(script.one_backward, script.serial, without_gradient)),
    ]
    with pytest.raises(script.WrongResultError, match="wrong: a gradient differs from the serial loop's"):
        sys.modules["common"].check(contenders, [torch.ones(3)])


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach() * 2 + 0 * x


def test_time_is_limited(script: Any) -> None:
    with pytest.raises(TimeoutError, match="longer than 1 s"), script.limited(1):
        threading.Event().wait(30)


def test_refuses_no_processes(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--processes", "0"])
    assert "must be at least 1 (0)" in capsys.readouterr().err
