"""bench_speed.py runs every row, checks before it times, and computes with its figures as it
says."""

from __future__ import annotations

import argparse
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quick_figures

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_the_clone_clean")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_speed.py"


# in four runs, each well within its time; with the rows that have aims, once for each aim
ROWS = {
    ("tiny", "forward", "budget", "python", "op"): ["tiny", "forward", "python", "op"],
    ("lone", "layers", "gradients", "huge", "transfer", "captures"): [
        *["lone"] * 5,
        *["layers"] * 2,
    ],
    ("step",): ["step"] * 6,
    ("objects",): ["objects"] * 9,
}


@pytest.mark.parametrize("rows", ROWS, ids=" ".join)
def test_rows_of_grains_and_copies(tmp_path: Path, rows: tuple[str, ...]) -> None:
    figures, table = quick_figures(SCRIPT, tmp_path, "--rows", *rows)
    assert [figure["row"].partition(":")[0] for figure in figures if figure["aim"]] == ROWS[rows]
    assert {figure["row"].partition(":")[0] for figure in figures} == set(rows)
    for figure in figures:
        # which is counted in ticks of 10 ms
        has_run = figure["value"] > 0 or "CPU time" in figure["name"]
        assert has_run and figure["row"] in table
        assert len(figure["rounds"]) == 1
        if figure["aim"]:
            assert ("reached" if figure["reached"] else "not yet") in table


def test_rows_of_fresh_programs(tmp_path: Path) -> None:
    figures, _ = quick_figures(SCRIPT, tmp_path, "--rows", "start", "idle")
    values = {figure["name"]: figure["value"] for figure in figures}
    assert values["from Pool() to the first result"] > 0
    ratio = values["from Pool() to the first result"] / values["import torch"]
    assert values["from Pool() to the first result over import torch"] == pytest.approx(ratio)
    assert {"CPU of the pool", "how often it ran"} <= set(values)


def test_row_of_memory(tmp_path: Path) -> None:
    figures, table = quick_figures(SCRIPT, tmp_path, "--rows", "memory", "--calls", "100")
    values = {figure["name"]: figure["value"] for figure in figures}
    assert values["PSS of an idle worker"] > values["USS of an idle worker"] > 1
    # as many tensors of 1 MB
    assert values["peak of PSS and shared memory, over that before all"] > 4
    assert {"growth of the caller", "growth of the workers"} <= set(
        values
    ) and "memory: 100 calls" in table


def test_another_checkout_is_measured_beside_this_one(tmp_path: Path) -> None:
    """Its package says that it was imported, and is this one's otherwise."""
    checkout = tmp_path / "older"
    package = Path(__file__).parents[2] / "mpgrad"
    (checkout / "mpgrad").mkdir(parents=True)
    for file in package.iterdir():
        if file.name != "__init__.py":
            (checkout / "mpgrad" / file.name).symlink_to(file.resolve())
    told = f"open({str(tmp_path / 'told')!r}, 'w').write(__file__)\n"
    (checkout / "mpgrad" / "__init__.py").write_text((package / "__init__.py").read_text() + told)
    figures, table = quick_figures(
        SCRIPT, tmp_path, "--rows", "forward", "--compare", str(checkout)
    )
    assert (tmp_path / "told").read_text() == str(checkout / "mpgrad" / "__init__.py")
    compared = table.partition("\nold, new, old / new\n")[2]
    assert len(figures) == 2
    for figure in figures:
        assert f"  {figure['row']}, {figure['name']}: " in compared and ": new" not in compared


@pytest.fixture
def common(script: Any) -> Any:
    return sys.modules["common"]


def test_figures_against_their_aims(common: Any) -> None:
    assert common.Figure("row", "name", 40.0, "us", ("<=", 40.0)).reached
    assert not common.Figure("row", "name", 40.1, "us", ("<=", 40.0)).reached
    assert common.Figure("row", "name", 1.9, "x", (">=", 1.9)).reached
    assert not common.Figure("row", "name", float("nan"), "x", (">=", 1.9)).reached
    assert common.Figure("row", "name", 1.0, "x").reached is None
    assert common.median_figure("row", "name", [3.0, 1.0, 8.0], "us").value == 3.0


def test_figures_are_compared(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [script.Figure("row", "name", 2.0, "us"), script.Figure("row", "other", 2.0, "us")]
    script.print_comparison([script.Figure("row", "name", 3.0, "us")], now)
    assert "  row, name: 3 2 1.50 us\n  row, other: new\n" in capsys.readouterr().out
    with pytest.raises(argparse.ArgumentTypeError, match="make one with git worktree add"):
        script.older_checkout(str(tmp_path))


def test_time_is_limited(common: Any) -> None:
    with pytest.raises(TimeoutError, match="longer than 1 s"), common.limited(1):
        threading.Event().wait(30)


def test_refuses_before_the_runs(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--processes", "0"], "must be at least 1 (0)"),
        (["--json", "/nowhere/at/all.json"], "no such folder ('/nowhere/at'); make it first"),
        (["--json", "/tmp"], "is a folder ('/tmp'); name a file in it"),
    ):
        with pytest.raises(SystemExit):
            script.main(arguments)
        assert message in capsys.readouterr().err


def test_contenders_take_turns(common: Any) -> None:
    seen: list[str] = []

    def turn(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    results = common.interleaved({name: partial(turn, name) for name in "ab"}, rounds=3)
    assert {name: len(values) for name, values in results.items()} == {"a": 3, "b": 3}
    assert all(set(seen[first : first + 2]) == {"a", "b"} for first in range(0, 10, 2))
    assert common.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("gradient", "a gradient"), ("missing", "a gradient"), ("loss", "a value")],
)
def test_a_wrong_contender_is_refused(script: Any, common: Any, kind: str, message: str) -> None:
    jobs = sys.modules["jobs"]

    def wrong(batch: Any) -> Any:
        losses, gradients = jobs.one_backward(jobs.serial, jobs.square_loss, batch)
        if kind == "gradient":
            gradients[1] = gradients[1] + 0.01
        if kind == "missing":
            gradients[1] = None
        if kind == "loss":
            losses[0] = losses[0] + 0.01
        return jobs.Outcome(losses, gradients)

    right = partial(jobs.one_backward, jobs.serial, jobs.square_loss)
    items = [torch.ones(3), torch.ones(2)]
    jobs.check(
        {"serial": right, "at once": partial(jobs.backward_at_once, jobs.square_loss)}, items
    )
    with pytest.raises(
        common.WrongResultError, match=f"wrong: {message} differs from the serial loop's"
    ):
        jobs.check({"serial": right, "wrong": wrong}, items)


def test_a_wrong_gradient_of_a_capture_is_refused(script: Any) -> None:
    weights = [torch.ones(4, requires_grad=True)]
    captured = script.Captured(
        weights, partial(script.with_captures, weights, steps=1), [torch.ones(3)]
    )

    def wrong(function: Any, items: list[torch.Tensor]) -> list[torch.Tensor]:
        return [function(item) + 0.1 * weights[0].sum() for item in items]

    captured.check(lambda function, items: list(map(function, items)))
    with pytest.raises(script.WrongResultError, match="gradient of a capture differs"):
        captured.check(wrong)
