"""bench_speed.py runs every row, checks before it times, and computes with its figures as it says."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_speed.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 10


def run(*arguments: str) -> tuple[str, list[dict[str, Any]]]:
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    return ended.stdout, json.loads(Path(arguments[-1]).read_text())["figures"]


def test_rows_of_grains_and_copies(tmp_path: Path) -> None:
    of_grains = ["tiny", "forward", "lengths", "budget", "cpu", "floor", "python", "op"]
    rows = [*of_grains, "transfer", "captures", "deterministic", "classes", "tail"]
    table, figures = run("--rows", *rows, "--json", str(tmp_path / "quick.json"))
    assert [figure["row"].partition(":")[0] for figure in figures if figure["aim"]] == [
        "tiny", "forward", *["lengths"] * 4, *["python"] * 3, "op", "op", "transfer", "captures", "tail", "tail"
    ]  # fmt: skip
    assert {figure["row"].partition(":")[0] for figure in figures} == set(rows)
    for figure in figures:
        assert figure["value"] > 0 and figure["row"] in table
        assert len(figure["rounds"]) == 1
        if figure["aim"]:
            assert ("reached" if figure["reached"] else "not yet") in table


def test_rows_of_fresh_programs(tmp_path: Path) -> None:
    _, figures = run("--rows", "start", "memory", "idle", "--json", str(tmp_path / "quick.json"))
    values = {figure["name"]: figure["value"] for figure in figures}
    assert values["from Pool() to the first result"] > 0 and values["USS of an idle worker"] > 1
    ratio = values["from Pool() to the first result"] / values["import torch"]
    assert values["from Pool() to the first result over import torch"] == pytest.approx(ratio)
    assert {"CPU of workers and nursery", "how often workers and nursery ran"} <= set(values)


@pytest.fixture
def figures(script: Any) -> Any:
    return sys.modules["figures"]


def test_figures_against_their_aims(figures: Any) -> None:
    assert figures.Figure("row", "name", 40.0, "us", ("<=", 40.0)).reached
    assert not figures.Figure("row", "name", 40.1, "us", ("<=", 40.0)).reached
    assert figures.Figure("row", "name", 1.9, "x", (">=", 1.9)).reached
    assert not figures.Figure("row", "name", float("nan"), "x", (">=", 1.9)).reached
    assert figures.Figure("row", "name", 1.0, "x").reached is None
    assert figures.median_figure("row", "name", [3.0, 1.0, 8.0], "us").value == 3.0


def test_an_older_file_is_compared(figures: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures.write(tmp_path / "old.json", {}, [figures.Figure("row", "name", 3.0, "us")])
    now = [figures.Figure("row", "name", 2.0, "us"), figures.Figure("row", "other", 2.0, "us")]
    figures.print_comparison(figures.old_figures(str(tmp_path / "old.json")), now)
    assert "  row, name: 3 2 1.50 us\n  row, other: new\n" in capsys.readouterr().out
    (tmp_path / "other.json").write_text("{}")
    for wrong in ("other.json", "nowhere.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="make one with --json"):
            figures.old_figures(str(tmp_path / wrong))


def test_contenders_take_turns(figures: Any) -> None:
    seen: list[str] = []

    def turn(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    results = figures.interleaved({name: partial(turn, name) for name in "ab"}, rounds=3, warm_ups=1)
    assert {name: len(values) for name, values in results.items()} == {"a": 3, "b": 3}
    assert all(set(seen[first : first + 2]) == {"a", "b"} for first in range(0, 8, 2))
    assert figures.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_schedules(script: Any) -> None:
    jobs = sys.modules["jobs"]
    assert jobs.longest_first([3.0, 1.0, 2.0, 2.0], 2) == 4.0
    assert jobs.longest_first([10.0, 1.0, 1.0], 2) == 10.0
    costs = jobs.log_normal(1000, 2.0)
    assert sum(costs) == pytest.approx(1000) and max(costs) > 30


def test_a_wrong_gradient_of_a_capture_is_refused(script: Any) -> None:
    copies = sys.modules["speed.copies"]
    weights = [torch.ones(4, requires_grad=True)]
    captured = copies.Captured(weights, partial(copies.with_captures, weights, steps=1), [torch.ones(3)])

    def wrong(function: Any, items: list[torch.Tensor]) -> list[torch.Tensor]:
        return [function(item) + 0.1 * weights[0].sum() for item in items]

    captured.check(lambda function, items: list(map(function, items)))
    with pytest.raises(script.WrongResultError, match="gradient of a capture differs"):
        captured.check(wrong)
