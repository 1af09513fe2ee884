"""bench_peers.py: systems agree with the serial loop before they are timed, and ratios are taken as
it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_the_clone_clean")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_peers.py"
LIMIT = 58  # seconds on a busy machine; a quiet one takes 10
# Ray takes long
SYSTEMS = [
    "serial",
    "serial, at once",
    "joblib",
    "ProcessPoolExecutor",
    "torch Pool, arrays",
    "mpgrad",
]


def test_systems_side_by_side(tmp_path: Path) -> None:
    for package in ("joblib", "matplotlib"):
        pytest.importorskip(
            package, reason="it is beside the pool, or draws: pip install '.[bench]'"
        )
    files = ["--json", str(tmp_path / "quick.json"), "--picture", str(tmp_path / "quick.png")]
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--systems", *SYSTEMS, *files]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    rows: dict[str, set[str]] = {}
    for figure in json.loads((tmp_path / "quick.json").read_text())["figures"]:
        assert figure["value"] > 0
        rows.setdefault(figure["row"], set()).add(figure["name"])
    python_bound, op_bound, large = rows.values()
    over = {f"{name}, over the best serial" for name in SYSTEMS}
    assert python_bound == op_bound == large == {*SYSTEMS, *over, "mpgrad, over the best peer"}
    assert (tmp_path / "quick.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_taken_within_a_round(script: Any) -> None:
    seconds = {
        "serial": [2.0, 4.0],
        "serial, at once": [1.0, 2.0],
        "joblib": [1.0, 1.0],
        "mpgrad": [0.5, 1.0],
    }
    values = {figure.name: figure.value for figure in script.case_figures("row", seconds)}
    assert values["mpgrad, over the best serial"] == 2.0
    assert values["mpgrad, over the best peer"] == 1.5
    assert values["serial"] == 3000.0


def test_what_was_measured_is_kept(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def bench(*plan: Any) -> Iterator[Any]:
        yield script.Figure("row", "serial", 1.0, "s")
        raise script.WrongResultError("joblib: a gradient differs")

    monkeypatch.setattr(script, "bench", bench)
    assert (
        script.main(["--quick", "--systems", "serial", "--json", str(tmp_path / "part.json")]) == 1
    )
    (figure,) = json.loads((tmp_path / "part.json").read_text())["figures"]
    assert (figure["row"], figure["name"], figure["value"]) == ("row", "serial", 1.0)


def test_what_is_not_installed_is_left_out(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "version_of", lambda name: None if name == "joblib" else "1")
    monkeypatch.setattr(
        script, "bench", lambda names, plan, processes: print("measured:", names) or []
    )
    assert script.main(["--systems", "serial", "joblib"]) == 0
    printed = capsys.readouterr().out
    assert "joblib is not installed: left out" in printed and "measured: ['serial']" in printed
