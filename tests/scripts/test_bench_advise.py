"""bench_advise.py runs, and compares each forecast with a measurement; the figures are no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_advise.py"


def test_the_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "advise.json"
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=58)
    assert (ended.returncode, ended.stderr) == (0, "")
    figures = {each["name"]: each["value"] for each in json.loads(file.read_text())["figures"]}
    for way in ("loop", "pool of 1"):
        ratio = figures[f"{way}: forecast"] / figures[f"{way}: measured"]
        assert figures[f"{way}: forecast / measured"] == pytest.approx(ratio)
        assert figures[f"{way}: off by the factor"] == pytest.approx(max(ratio, 1 / ratio))
    assert "forecast" in ended.stdout
