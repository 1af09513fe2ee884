"""bench_scaling.py and load.py run, and compute with what they measure as they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_scaling.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 10


def run(script: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "error", str(script), "--quick", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    figures: list[dict[str, Any]] = json.loads(Path(arguments[-1]).read_text())["figures"]
    return figures


def test_dispatch(tmp_path: Path) -> None:
    figures = run(SCRIPT, "--parts", "dispatch", "--json", str(tmp_path / "quick.json"))
    values = {(figure["row"], figure["name"]): figure["value"] for figure in figures}
    assert all(value > 0 for value in values.values())
    row = "dispatch: x * 2 on 10 floats, forward, 2 workers"
    assert values[row, "the parent could do"] == pytest.approx(1e6 / values[row, "CPU of the parent"])


def test_balance(tmp_path: Path) -> None:
    figures = run(SCRIPT, "--parts", "balance", "--json", str(tmp_path / "quick.json"))
    assert [figure["name"].partition(" ")[0] for figure in figures] == ["map", "imap"]
    assert all(figure["value"] > 1 for figure in figures)


def test_growth(tmp_path: Path) -> None:
    arguments = ["--parts", "growth", "--axes", "tensors", "--largest", "10", "--json", str(tmp_path / "quick.json")]
    values = {figure["name"]: figure["value"] for figure in run(SCRIPT, *arguments)}
    assert {"1: forward", "10: forward", "10: backward", "10: peak of memory, parent"} <= set(values)
    assert {"slope of forward", "slope of backward"} <= set(values)


def test_load(tmp_path: Path) -> None:
    rows = ["graphs", "maps"]
    figures = run(SCRIPT.parents[1] / "reliability" / "load.py", "--rows", *rows, "--json", str(tmp_path / "quick.json"))
    values = {figure["name"]: figure["value"] for figure in figures}
    for name in ("descriptors of the parent", "threads of the parent", "descriptors of a worker", "threads of a worker"):
        assert values[f"{name}, after a fifth"] == values[f"{name}, at the end"] > 0
    assert values["forward"] > 0 and values["backward"] > 0


def test_slopes(script: Any) -> None:
    assert script.slope({size: 3e-6 * size for size in (1, 10, 100, 1000)}) == pytest.approx(1)
    assert script.slope({1: 5.0, 10: 5.0, 100: 1e-3 * 100**2, 1000: 1e-3 * 1000**2, 10_000: 1e5}) == pytest.approx(2)


def test_growth_that_is_quadratic_shows(script: Any) -> None:
    points = {
        size: {"forward": 1e-6 * size, "backward": 1e-9 * size**2, "parent": 0, "workers": 1000 * size}
        for size in (10**4, 10**5, 10**6)
    }
    figures = {figure.name: figure for figure in script.point_figures("growth: items", points)}
    assert figures["slope of forward"].reached and figures["slope of backward"].reached is False
    assert figures["slope of workers"].value == pytest.approx(1)
    assert "slope of parent" not in figures  # too little to tell


def test_the_smallest_grain(script: Any) -> None:
    few, many = script.Costs([(0.0, 20e-6, 50e-6)]), script.Costs([(0.0, 30e-6, 50e-6)])
    assert script.smallest_grain(2, {2: few, 64: many}) == pytest.approx(4 * 50e-6)  # what workers do themselves
    assert script.smallest_grain(16, {2: few, 64: many}) == pytest.approx(0.8 * 16 * 20e-6)
    assert script.smallest_grain(256, {2: few, 64: many}) == pytest.approx(0.8 * 256 * 30e-6)
