"""bench_timeline.py runs and writes its figures; the figures are no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_timeline.py"


def test_it_measures_on_against_off(tmp_path: Path) -> None:
    output = tmp_path / "timeline.json"
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--json", str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=58)
    assert (ended.returncode, ended.stderr) == (0, "")
    figures = json.loads(output.read_text())["figures"]
    assert [each["name"] for each in figures] == ["off", "on", "on beyond off"] * 4
    assert all(each["name"] in ended.stdout and len(each["rounds"]) == 2 for each in figures)
