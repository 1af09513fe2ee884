"""bench_ray.py runs every row on simulated nodes, checks before it times, and computes with what it measures as it says."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="it measures beside Ray: pip install '.[bench]'")

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_ray.py"
LIMIT = 200  # seconds; nodes of Ray start, of several processes each
CONTENDERS = {"process, keep", "by hand", "ray, keep", "ray, ahead"}


Found = dict[str, dict[str, float]]  # figures by row and name


def run(tmp_path: Path, *options: str) -> tuple[Found, Any]:
    faulthandler.cancel_dump_traceback_later()  # LIMIT is longer, and ends a hang, too
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(tmp_path / "quick.json"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    found: Found = {}
    for figure in json.loads((tmp_path / "quick.json").read_text())["figures"]:
        found.setdefault(figure["row"], {})[figure["name"]] = figure["value"]
        assert figure["value"] > 0 and figure["row"] in ended.stdout
    return found, ended


def test_all_rows(tmp_path: Path, rows: Any) -> None:
    found, _ = run(tmp_path, "--rows", *rows.ROWS)
    short, forward, middle, capture, tail, tiny, *crowds, flight, apply = found.values()
    for row in (short, middle, capture, tail, tiny):
        assert set(row) >= CONTENDERS
        assert row["ray, keep, CPU of all processes"] > row["ray, keep, CPU of the caller"] / 1e6
    assert CONTENDERS - set(forward) == {"ray, ahead"}
    measured = [tiny[f"{name}, CPU of the caller"] for name in ("process, keep", "ray, keep", "ray, ahead")]
    assert [row["c, the caller's CPU"] for row in crowds] == pytest.approx(measured)
    for row in (flight, apply):
        assert len(row) == 2 * 3
    assert 1 <= tail["the largest share by hand, over the mean"] < 2


def test_a_node_dies(tmp_path: Path) -> None:
    if "MPGRAD_LARGE_TESTS" not in os.environ:
        pytest.skip("takes a minute, most of it until Ray notices that a node is dead; set MPGRAD_LARGE_TESTS to have it")
    found, ended = run(tmp_path, "--rows", "death")
    (death,) = found.values()
    for name in ("by hand, restarted by Ray", "ray, ahead"):
        assert death[name] > death[f"{name}, undisturbed"]
    assert "marked dead" not in ended.stdout and "is gone" not in ended.stderr


@pytest.fixture
def rows(script: Any) -> Any:
    return sys.modules["ray_nodes.rows"]


def test_workers_that_one_caller_keeps_busy(rows: Any) -> None:
    values = {figure.name: figure.value for figure in rows.crowd_figures("ray, keep", 100e-6)}
    assert values["items of t = 10 ms"] == pytest.approx(80)
    assert values["items of t = 10 ms, in nodes of 64 workers"] == pytest.approx(80 / 64)
    assert values["items of t = 100 ms"] == pytest.approx(800)


def test_a_wrong_gradient_of_the_weight_is_refused(script: Any, rows: Any) -> None:
    weighted_loss = sys.modules["losses"].weighted_loss
    job = rows.Job("job", lambda weight, x: weighted_loss(weight, x, 1), [torch.ones(3)], torch.ones(4))

    def right(job: Any, items: list[torch.Tensor], weight: torch.Tensor) -> Any:
        return rows.mapped(rows.serial, job, items, weight)

    def wrong(job: Any, items: list[torch.Tensor], weight: torch.Tensor) -> Any:
        outcome = right(job, items, weight)
        return outcome._replace(gradients=[*outcome.gradients[:-1], 2 * outcome.gradients[-1]])

    rows.check(job, {"right": right}, right)
    with pytest.raises(script.WrongResultError, match="job: wrong: a gradient differs"):
        rows.check(job, {"right": right, "wrong": wrong}, right)


def test_a_round_has_a_job_of_its_own_which_all_contenders_do(rows: Any) -> None:
    jobs = [rows.Job("job", float(number).__mul__, [torch.ones(2)]) for number in range(rows.WARM_UPS + 2)]
    seen: dict[str, list[Any]] = {rows.HAND: [], rows.AHEAD: []}

    def way(name: str, job: Any, items: list[torch.Tensor], weight: None) -> Any:
        seen[name].append(job)
        return rows.Outcome([], [])

    ways = {name: partial(way, name) for name in seen}
    list(rows.job_figures(jobs, ways, lambda *_: rows.Outcome([], []), rows.Plan(rounds=2)))
    assert seen[rows.HAND] == seen[rows.AHEAD] == [jobs[0], *jobs]  # the first time it is checked


def test_the_largest_share(rows: Any) -> None:
    assert rows.largest_share([1, 1, 1, 1], 2) == 1
    assert rows.largest_share([1, 3, 2, 6], 2) == pytest.approx(9 / 6)
    assert rows.largest_share([1, 3, 2, 6], 1) == 1


def test_the_halves_by_hand_are_woven_together(rows: Any) -> None:
    by_hand = sys.modules["ray_nodes.by_hand"]
    items = [torch.full((2,), float(number)) for number in range(5)]
    actor = by_hand.NodeActor.__new__(by_hand.NodeActor)  # in this process, which keeps its session
    parts = by_hand.parted([item.numpy() for item in items], 2)
    found = [actor.both(lambda x: (x * x).sum(), part, None) for part in parts]
    losses, gradients, _ = zip(*found, strict=True)
    assert by_hand.woven(losses) == [2.0 * number**2 for number in range(5)]
    assert [gradient[0] for gradient in by_hand.woven(gradients)] == [2.0 * number for number in range(5)]


def test_a_stall_is_seen(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.1, 0.2, 0.9, 1.0])
    monkeypatch.setattr(rows.time, "perf_counter", lambda: next(clock))
    flown = rows.flown(lambda number: number, lambda number: number, 1.0)
    assert flown.rate == pytest.approx(4.0) and flown.stall == pytest.approx(0.7)
