"""batch_derivatives.py runs, compares its ways and writes its figures; the figures are no test's
business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpgrad

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_the_clone_clean")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "batch_derivatives.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 10
TORCH_ITSELF = "ignore:`torch.jit"  # when forward-mode differentiation is first used
JACOBIANS = ["reverse", "batched", "batched by 64", "forward", "forward by 64", "auto"]
ALONE = ["loop of grad", *JACOBIANS, "torch.func.jacrev", "torch.func.jacfwd"]
SIZES = ["6 entries, 3 parameters", "3 entries, 6 parameters"]
IN_POOL = [*(f"{name}, pool" for name in JACOBIANS), "per item, pool"]


def test_every_way_is_timed_at_every_size(tmp_path: Path, script: Any) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        TORCH_ITSELF,
        str(SCRIPT),
        "--quick",
        "--processes",
        "2",
    ]
    ended = subprocess.run(
        [*command, "--json", str(tmp_path / "quick.json")],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    rows: dict[str, list[str]] = {}
    for figure in json.loads((tmp_path / "quick.json").read_text())["figures"]:
        assert figure["value"] >= 0 and f"  {figure['name']}" in ended.stdout
        rows.setdefault(figure["row"], []).append(figure["name"])
    assert list(rows) == [*(f"times: {size}" for size in SIZES), f"peak memory: {SIZES[0]}"]
    assert [rows[f"times: {size}"] for size in SIZES] == [[*ALONE, *IN_POOL]] * 2
    assert rows[f"peak memory: {SIZES[0]}"] == ["the result alone", "batched", "reverse, pool"]


def test_memory_of_fresh_processes(script: Any) -> None:
    # at least two matrices of all rows
    assert script.fresh_peak("batched", (1000, 500), 1) > 8 * 1000 * 1000 * 2


def test_a_wrong_way_stops_the_run(
    script: Any, pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = script.ways()[0]
    wrong = script.Way("wrong", lambda c, x, pool: right.derivative(c, x, pool) * (1 + 1e-8))
    with pytest.raises(
        script.WrongResultError,
        match=r"wrong: differs from loop of grad \(entries, parameters: \(4, 2\)\)",
    ):
        script.check([right, wrong], *script.arguments((4, 2)), pool2)
    monkeypatch.setattr(script, "ways", lambda: [right, wrong])
    out = tmp_path / "none.json"
    assert script.main(["--quick", "--processes", "1", "--json", str(out)]) == 1
    assert not out.exists()
