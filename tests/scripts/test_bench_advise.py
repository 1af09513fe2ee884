"""bench_advise.py runs, and compares each forecast with a measurement; the figures are no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import quick_figures

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_advise.py"


def test_the_quick_run(tmp_path: Path) -> None:
    found, shown = quick_figures(SCRIPT, tmp_path)
    figures = {each["name"]: each["value"] for each in found}
    for way in ("loop", "pool of 1"):
        ratio = figures[f"{way}: forecast"] / figures[f"{way}: measured"]
        assert figures[f"{way}: forecast / measured"] == pytest.approx(ratio)
        assert figures[f"{way}: off by the factor"] == pytest.approx(max(ratio, 1 / ratio))
    assert "forecast" in shown
