"""batch_derivatives.py runs, compares its ways and writes its figures; the figures are no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpgrad

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "batch_derivatives.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 10
TORCH_ITSELF = "ignore:`torch.jit"  # when forward-mode differentiation is first used
JACOBIANS = ["reverse", "batched", "batched by 64", "forward", "forward by 64", "auto"]
ALONE = ["loop of grad", *JACOBIANS, "torch.func.jacrev", "torch.func.jacfwd"]
IN_POOL = [*(f"{name}, pool" for name in JACOBIANS), "per item, pool"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench") / "quick.json"
    command = [sys.executable, "-W", "error", "-W", TORCH_ITSELF, str(SCRIPT), "--quick", "--processes", "2", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout, json.loads(out.read_text())


def test_every_way_is_timed_at_every_size(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    assert [(row["entries"], row["parameters"]) for row in record["times"]] == [(6, 3), (3, 6)]
    for row in record["times"]:
        assert [each["way"] for each in row["ways"]] == [*ALONE, *IN_POOL]
        for each in row["ways"]:
            (seconds,) = each["seconds"]
            assert each["median_ms"] == pytest.approx(1e3 * seconds) and seconds > 0
            assert f"  {each['way']}" in table


def test_the_fastest_are_named(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    for row, times in zip(record["fastest"], record["times"], strict=True):
        medians = {each["way"]: each["median_ms"] for each in times["ways"]}
        for place, names in (("alone", ALONE), ("in_pool", IN_POOL)):
            assert row[place] == min(names, key=medians.__getitem__)
            assert row[f"{place}_speed_up"] == pytest.approx(medians["loop of grad"] / medians[row[place]])
        assert row["in_pool"] in table.partition("the fastest")[2]


def test_memory_of_fresh_processes(quick: tuple[str, dict[str, Any]], script: Any) -> None:
    table, record = quick
    assert [each["way"] for each in record["memory"]] == ["batched", "reverse, pool"]
    assert all(each["peak_bytes"] >= 0 for each in record["memory"])
    assert "peak memory, MiB" in table
    assert script.fresh_peak("batched", (1000, 500), 1) > 8 * 1000 * 1000 * 2  # at least two matrices of all rows


def test_says_where_and_when_it_was_measured(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    around = record["surroundings"]
    assert around["processes"] == 2
    for text in (around["date"], around["cpu"], around["versions"]["torch"]):
        assert text in table


def test_a_wrong_way_stops_the_run(script: Any, pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = script.ways()[0]
    wrong = script.Way("wrong", lambda c, x, pool: right.derivative(c, x, pool) * (1 + 1e-8))
    with pytest.raises(script.WrongResultError, match=r"wrong: differs from loop of grad \(entries, parameters: \(4, 2\)\)"):
        script.check([right, wrong], *script.arguments((4, 2)), pool2)
    monkeypatch.setattr(script, "ways", lambda: [right, wrong])
    out = tmp_path / "none.json"
    assert script.main(["--quick", "--processes", "1", "--out", str(out)]) == 1
    assert not out.exists()
