"""bench_crowd.py: workers that only pretend to work take the time that they say; how many are busy is no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import quick_figures

pytest.importorskip("ray", reason="its nodes may be those of Ray: pip install '.[bench]'")

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_crowd.py"
NAMES = {"workers busy", "that is", "CPU of the caller", "CPUs that the caller used", "CPUs that sites and Ray used"}


@pytest.mark.parametrize("graphs", ["ahead", "keep"])
def test_a_small_crowd(graphs: str, tmp_path: Path) -> None:
    found, _ = quick_figures(SCRIPT, tmp_path, "--carrier", "pipe", "--graphs", graphs, "--ms", "20", "--workers", "3")
    figures = {each["name"]: each["value"] for each in found}
    assert set(figures) == NAMES
    # none works faster than it says: a round of 3 workers has the work of no more than 3
    assert 0 < figures["that is"] <= 3.1 and figures["workers busy"] == pytest.approx(figures["that is"] / 3 * 100)
    assert figures["CPU of the caller"] > 0
