"""bench_timeline.py runs and writes its figures; the figures are no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import quick_figures

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_timeline.py"


def test_it_measures_on_against_off(tmp_path: Path) -> None:
    figures, shown = quick_figures(SCRIPT, tmp_path)
    assert [each["name"] for each in figures] == ["off", "on", "on beyond off"] * 4
    assert all(each["name"] in shown and len(each["rounds"]) == 2 for each in figures)
