"""bench_scaling.py runs, and computes with what it measures as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import quick_figures

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_the_clone_clean")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_scaling.py"


def test_dispatch(tmp_path: Path) -> None:
    figures, _ = quick_figures(SCRIPT, tmp_path, "--parts", "dispatch")
    values = {(figure["row"], figure["name"]): figure["value"] for figure in figures}
    assert all(value > 0 for value in values.values())
    row = "dispatch: x * 2 on 10 floats, forward, 2 workers"
    assert values[row, "the parent could do"] == pytest.approx(
        1e6 / values[row, "CPU of the parent"]
    )


def test_waiting(tmp_path: Path) -> None:
    figures, _ = quick_figures(SCRIPT, tmp_path, "--parts", "waiting")
    values = {(figure["row"], figure["name"]): figure["value"] for figure in figures}
    row = "waiting: items sleep 3 ms, forward and backward, 4 workers"
    assert 0 < values[row, "ideal over wall"] < 1 and values[row, "CPU of all"] > 0


def test_growth(tmp_path: Path) -> None:
    figures, _ = quick_figures(
        SCRIPT, tmp_path, "--parts", "growth", "--axes", "tensors", "--largest", "10"
    )
    values = {figure["name"]: figure["value"] for figure in figures}
    assert {"1: forward", "10: forward", "10: backward", "10: peak of memory, parent"} <= set(
        values
    )
    assert {"slope of forward", "slope of backward"} <= set(values)


def test_slopes(script: Any) -> None:
    assert script.slope({size: 3e-6 * size for size in (1, 10, 100, 1000)}) == pytest.approx(1)
    assert script.slope(
        {1: 5.0, 10: 5.0, 100: 1e-3 * 100**2, 1000: 1e-3 * 1000**2, 10_000: 1e5}
    ) == pytest.approx(2)


def test_growth_that_is_quadratic_shows(script: Any) -> None:
    points = {
        size: {
            "forward": 1e-6 * size,
            "backward": 1e-9 * size**2,
            "parent": 0,
            "workers": 1000 * size,
        }
        for size in (10**4, 10**5, 10**6)
    }
    figures = {figure.name: figure for figure in script.point_figures("growth: items", points)}
    assert figures["slope of forward"].reached and figures["slope of backward"].reached is False
    assert figures["slope of workers"].value == pytest.approx(1)
    assert "slope of parent" not in figures  # too little to tell


def test_the_smallest_grain(script: Any) -> None:
    few, many = script.Costs([(0.0, 20e-6, 50e-6)]), script.Costs([(0.0, 30e-6, 50e-6)])
    # what workers do themselves
    assert script.smallest_grain(2, {2: few, 64: many}) == pytest.approx(4 * 50e-6)
    assert script.smallest_grain(16, {2: few, 64: many}) == pytest.approx(0.8 * 16 * 20e-6)
    assert script.smallest_grain(256, {2: few, 64: many}) == pytest.approx(0.8 * 256 * 30e-6)
