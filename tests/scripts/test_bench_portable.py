"""bench_portable.py runs every case in both modes; the figures are no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import quick_figures

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_portable.py"


def test_each_case_in_both_modes(tmp_path: Path) -> None:
    figures, shown = quick_figures(SCRIPT, tmp_path, "--processes", "1", within=150)  # a dozen programs import torch
    assert [each["name"] for each in figures] == ["Linux's own", "portable", "portable over Linux's own"] * 9
    assert all(each["row"] in shown for each in figures)
    own, portable, ratio = (each["value"] for each in figures if each["row"].startswith("memory"))
    assert ratio == pytest.approx(portable / own)
    assert portable > 2 * own  # each worker has imported torch for itself
