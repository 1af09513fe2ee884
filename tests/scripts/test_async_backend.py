"""async_backend.py runs, compares all runs with the serial one and writes its figures, which are no test's business."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "async_backend.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 6
CPUS = len(os.sched_getaffinity(0))
FRONT_ENDS = {
    "forward": ["torch, 1 thread", "numpy, 1 thread", f"torch, all {CPUS} threads", "pool, 2 x 1 thread"],
    "forward and backward": ["torch, 1 thread", f"torch, all {CPUS} threads", "pool, 2 x 1 thread"],
}
CALLS = 3 * (1 + 4)  # of a quick run: a factor handed over and four products, in each of three chains


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # which the script would set, and nobody take back
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # matplotlib keeps its fonts' files open
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module(SCRIPT.stem)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("async_backend")
    files = ["--out", str(folder / "quick.json"), "--picture", str(folder / "quick.png")]
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--processes", "2", "--repeats", "2", *files]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout, json.loads((folder / "quick.json").read_text()), folder / "quick.png"


def quick_run(script: Any, folder: Path) -> int:
    files = ["--out", str(folder / "quick.json"), "--picture", str(folder / "quick.png")]
    status = script.main(["--quick", "--chains", "2", "--length", "2", "--processes", "1", *files])
    assert isinstance(status, int)
    return status


def test_every_front_end_is_timed_in_every_pass(quick: tuple[str, dict[str, Any], Path]) -> None:
    table, record, picture = quick
    assert set(record) == {"surroundings", "plan", "tolerance", *FRONT_ENDS}
    assert record["plan"] == {"chains": 3, "length": 4, "size": 16, "repeats": 2}
    for name, front_ends in FRONT_ENDS.items():
        assert [row["contender"] for row in record[name]] == front_ends
        printed = table.partition(f"\n{name}\n")[2]
        for row in record[name]:
            assert f"\n  {row['contender']} " in printed
            assert len(row["seconds"]) == 2 and row["cpus_busy"] > 0 and row["speed_up"] > 0
            for returned, there, gradients in row["seconds"]:
                assert 0 < returned <= there and (gradients is None) == (name == "forward")
                assert gradients is None or gradients > there
            assert ("gradients_ms" in row) == (name != "forward")
            assert 0 <= row["largest_difference"] <= record["tolerance"]
    assert picture.read_bytes().startswith(b"\x89PNG") and f"picture: {picture}" in table


def test_only_the_pool_has_calls_in_flight(quick: tuple[str, dict[str, Any], Path]) -> None:
    _, record, _ = quick
    for name in FRONT_ENDS:
        *at_once, pool = record[name]
        assert all(row["most_in_flight"] == 1 and row["in_flight_at_return"] == 0 for row in at_once)
        assert 0 <= pool["in_flight_at_return"] <= CALLS and 1 < pool["most_in_flight"] <= CALLS
        for row in record[name]:
            moments, counts = zip(*row["in_flight"], strict=True)
            assert len(moments) == 2 * CALLS and list(moments) == sorted(moments) and moments[0] >= 0
            assert (min(counts), max(counts), counts[-1]) == (0, row["most_in_flight"], 0)


def test_steps_of_what_is_in_flight(script: Any) -> None:
    calls = [(0.0, 3.0), (1.0, 2.0), (1.5, 5.0)]
    steps = script.in_flight_over_time(calls)
    assert steps == [(0.0, 1), (1.0, 2), (1.5, 3), (2.0, 2), (3.0, 1), (5.0, 0)]
    assert script.visible(steps, 0.6) == [(0.0, 1), (2.0, 2), (3.0, 1), (5.0, 0)]
    row = script.Row("", [script.Run(2.0, 5.0, None, 2, calls, 7.5), script.Run(1.0, 9.0, None, 0, [], 6.5)])
    assert (row.mean_in_flight, row.most_in_flight, row.cpus_busy, row.median("front_end")) == (7.5 / 5.0, 3, 1.0, 1.5)


class WrongGradient(torch.autograd.Function):
    """An identity, but for its backward in another process than the one that calls it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, caller: int) -> torch.Tensor:
        ctx.caller = caller
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad if os.getpid() == ctx.caller else grad * (1 + 1e-9), None


@pytest.mark.parametrize(
    ("front_end", "kind"), [("pool, 1 x 1 thread", "gradient"), ("pool, 1 x 1 thread", "value"), ("numpy, 1 thread", "value")]
)
def test_what_is_beyond_rounding_is_refused(
    nursery: mpgrad.Pool,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    front_end: str,
    kind: str,
) -> None:
    caller = os.getpid()

    def perturbed(x: Any, w: Any) -> Any:
        if kind == "gradient":
            return x @ w if not isinstance(x, torch.Tensor) else WrongGradient.apply(x @ w, caller)
        hit = os.getpid() != caller if front_end.startswith("pool") else not isinstance(x, torch.Tensor)
        return (x @ w) * (1 + 1e-9 * hit)

    assert quick_run(script, tmp_path) == 0
    capsys.readouterr()
    monkeypatch.setattr(script, "product", perturbed)
    (tmp_path / "quick.json").unlink()
    threads = torch.get_num_threads()
    assert quick_run(script, tmp_path) == 1
    assert f"async_backend.py: {front_end}: {kind} " in capsys.readouterr().err
    assert not (tmp_path / "quick.json").exists() and torch.get_num_threads() == threads


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_wrong_entry_is_no_rounding(script: Any, wrong: float) -> None:
    right = [torch.ones(2, 2, dtype=torch.float64)]
    near = [right[0] + torch.tensor([[0.0, 0.0], [0.0, 1e-15]])]
    assert 0 < script.largest_difference("", script.Outcome(near, near), script.Outcome(right, right)) < 1e-14
    off = [right[0] + torch.tensor([[0.0, 0.0], [0.0, wrong]])]
    with pytest.raises(script.WrongResultError, match="pool: gradient 0 differs from the serial loop's by"):
        script.largest_difference("pool", script.Outcome(right, off), script.Outcome(right, right))


def test_without_matplotlib(nursery: mpgrad.Pool, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick_run(script, tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("no picture: matplotlib is not installed")
    assert not (tmp_path / "quick.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chains", "0"], "must be at least 1 (0)"),
        (["--out", "/nowhere/at/all.json"], "no such folder ('/nowhere/at'); make it first"),
        (["--picture", "/tmp"], "is a folder ('/tmp'); name a file in it"),
        (["--picture", "picture.txt"], "no picture format ('picture.txt'); end in one of .pdf, .png, .svg"),
    ],
)
def test_refuses_before_the_runs(script: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert message in capsys.readouterr().err
