"""train_data_parallel.py trains the same model in every way, and notices where not; times are no
test's business."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "train_data_parallel.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 10
WAYS = ["one process, 1 thread", "one process, 2 threads", "mpgrad, 2 workers", "gloo, 2 ranks"]


@pytest.fixture(scope="module")
def scikit_learn() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn has the digits: pip install '.[examples]'")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


@pytest.fixture(scope="module")
def quick(
    scikit_learn: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("train") / "quick.json"
    ended = run("--out", str(out))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    return ended.stdout, json.loads(out.read_text())


@pytest.mark.slow
def test_all_ways_train_the_same_model(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    assert record["agree"] and "within the tolerance of 1e-05" in table
    assert [row["way"] for row in record["ways"]] == WAYS
    one = record["ways"][0]["losses"]
    assert one[-1] < one[0]  # something is learned
    for row in record["ways"]:
        assert row["losses"] == pytest.approx(one, rel=record["tolerance"])
        assert row["largest_loss_difference"] <= record["tolerance"]
        # an image between two digits
        assert row["accuracy"] == pytest.approx(record["ways"][0]["accuracy"], abs=0.01)


@pytest.mark.slow
def test_every_epoch_of_every_way_is_timed(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    for row in record["ways"]:
        assert len(row["seconds"]) == record["plan"]["epochs"] and min(row["seconds"]) > 0
        speeds = f"{row['speed_up']:10.2f}{row['speed_over_gloo']:10.2f}"
        assert f"{row['way']:26}{row['median_seconds_per_epoch']:12.3f}{speeds}" in table
    assert record["ways"][-1]["speed_over_gloo"] == 1
    around = record["surroundings"]
    for text in (
        around["date"],
        around["cpu"],
        around["versions"]["torch"],
        around["versions"]["scikit-learn"],
    ):
        assert text in table


@pytest.mark.slow
def test_a_wrong_gradient_is_found(scikit_learn: None, tmp_path: Path) -> None:
    out = tmp_path / "perturbed.json"
    ended = run("--epochs", "2", "--perturb", "0.001", "--out", str(out))
    assert (ended.returncode, ended.stderr) == (1, ""), ended.stdout
    assert "above the tolerance of 1e-05" in ended.stdout
    record = json.loads(out.read_text())
    assert not record["agree"]
    wrong = [
        row["way"] for row in record["ways"] if row["largest_loss_difference"] > record["tolerance"]
    ]
    assert wrong == ["mpgrad, 2 workers"]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run(
    scikit_learn: None, script: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0, which waits for the gradients of the one that failed, does not keep the run
    waiting."""
    plan = script.Plan(batch=512, width=8)
    digits = script.load_images()
    of_rank_1 = script.shuffled(len(digits.labels), 0)[256:512]
    digits.labels[of_rank_1] = 99  # no such digit: cross_entropy refuses
    with (
        pytest.raises(script.EndedError, match="a rank ended too early"),
        script.over_ranks(digits, plan) as way,
    ):
        way.epoch(0)
    assert "Target 99 is out of bounds" in capfd.readouterr().err


def test_a_loss_that_is_no_number_agrees_with_nothing(script: Any) -> None:
    assert script.largest_difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert script.largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    for found, expected in (
        ([math.nan], [1.0]),
        ([1.0], [math.nan]),
        ([math.nan], [math.nan]),
        ([math.inf], [math.inf]),
    ):
        assert script.largest_difference(found, expected) == math.inf


def test_without_scikit_learn(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    out = tmp_path / "none.json"
    assert script.main(["--quick", "--out", str(out)]) == 2 and not out.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "scikit-learn" in line and "pip install '.[examples]'" in line


def test_refuses_no_processes(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--processes", "0"])
    assert "must be at least 1 (0)" in capsys.readouterr().err
