"""bench_peers.py: every system that is installed agrees with the serial loop before it is timed, and nothing stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench_peers.py"
LIMIT = 50  # seconds on a busy machine; a quiet one takes 10
SYSTEMS = ["serial", "mpgrad, ahead"]
CPU = ["the caller's thread", "other threads of its process", "other processes"]


def test_systems_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it draws: pip install '.[scripts]'")
    files = ["--json", str(tmp_path / "quick.json"), "--picture", str(tmp_path / "quick.png")]
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--systems", *SYSTEMS, *files]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert "all 2 systems give the serial loop's losses and gradients in all 3 cases" in ended.stdout
    figures = json.loads((tmp_path / "quick.json").read_text())["figures"]
    rows: dict[str, set[str]] = {}
    for figure in figures:
        rows.setdefault(figure["row"], set()).add(figure["name"])
    start, python_bound, op_bound, large, idle = rows.values()
    assert start == idle == set(SYSTEMS)
    over = {f"{name}, over the best serial" for name in SYSTEMS}
    cpu = {f"{name}, CPU of {where}" for name in SYSTEMS for where in CPU}
    assert python_bound == op_bound == large == {*SYSTEMS, *over, *cpu}
    spent = {(figure["row"], figure["name"]): figure["value"] for figure in figures}
    for row in list(rows)[1:-1]:
        caller, _, workers = (spent[row, f"serial, CPU of {where}"] for where in CPU)
        assert caller > 0 == workers  # it has none
        assert spent[row, f"mpgrad, ahead, CPU of {CPU[-1]}"] > 0
    assert (tmp_path / "quick.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def peers(script: Any) -> Any:
    return sys.modules["peers.host"]


@pytest.fixture
def small(peers: Any) -> Any:
    return peers.Case("Python-bound", 0, 2, 3)


class Wrong:
    """Right but for one entry of one gradient, or one loss."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def run(self, function: Any, items: list[torch.Tensor]) -> Any:
        losses = [function(item) for item in items]
        gradients = list(torch.autograd.grad(torch.stack(losses).sum(), items))
        if self._kind == "gradient":
            gradients[1][0] += 0.01
        if self._kind == "loss":
            losses[0] = losses[0] + 0.01
        if self._kind == "missing":
            return sys.modules["peers.case"].Outcome(losses, [None] * 3)
        return sys.modules["peers.case"].Outcome(losses, gradients)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("kind", "message"), [("gradient", "a gradient"), ("missing", "a gradient"), ("loss", "a loss")])
def test_a_wrong_system_is_told(peers: Any, small: Any, kind: str, message: str) -> None:
    turns = peers.Turns(Wrong(kind))
    assert turns.answer("check", small)["wrong"].startswith(f"{message} differs from the serial loop's")
    assert peers.Turns(Wrong("nothing")).answer("check", small) == {}


def test_nothing_is_timed_where_one_is_wrong(script: Any, peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Host:
        def __init__(self, name: str, *args: Any) -> None:
            pass

        def start(self) -> None:
            self.first_result = 1.0

        def check(self, case: Any) -> None:
            calls.append("check")
            raise script.WrongResultError("peer: a gradient differs")

        def load(self, case: Any) -> None:
            calls.append("load")

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: Any, *others: object) -> None:
            calls.append(kind.__name__)

    monkeypatch.setattr(script, "Host", Host)
    assert script.main(["--quick", "--systems", "serial"]) == 1
    assert calls == ["check", "WrongResultError"]


def test_what_was_measured_is_kept(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bench(*plan: Any) -> Iterator[Any]:
        yield script.Figure("row", "serial", 1.0, "s")
        raise script.HostError("joblib: it was killed")

    monkeypatch.setattr(script, "bench", bench)
    assert script.main(["--quick", "--systems", "serial", "--json", str(tmp_path / "part.json")]) == 1
    (figure,) = json.loads((tmp_path / "part.json").read_text())["figures"]
    assert (figure["row"], figure["name"], figure["value"]) == ("row", "serial", 1.0)


def test_a_host_that_fails_says_why(peers: Any, small: Any) -> None:
    class Failing(Wrong):
        def run(self, function: Any, items: list[torch.Tensor]) -> Any:
            raise RuntimeError("out of order")

    assert "RuntimeError: out of order" in peers.Turns(Failing("")).answer("run", small)["error"]


def test_ratios_are_taken_within_a_round(script: Any, peers: Any, small: Any) -> None:
    seconds = {"serial": [2.0, 4.0], "serial, at once": [1.0, 2.0], "joblib": [1.0, 1.0], "mpgrad, keep": [0.5, 1.0]}
    runs = {name: [peers.Run(wall, 0.5 * wall, 0.0, 0.25) for wall in walls] for name, walls in seconds.items()}
    values = {figure.name: figure.value for figure in script.case_figures(small, runs)}
    assert values["mpgrad, keep, over the best serial"] == 2.0
    assert values["mpgrad, keep, over the best process-based peer"] == 1.5
    assert values["serial"] == 1e3 * 3.0 / small.count
    assert values["joblib, CPU of the caller's thread"] == 1e3 * 0.5 / small.count
    assert values["joblib, CPU of other processes"] == 1e3 * 0.25 / small.count


def test_items_are_the_same_in_every_process(peers: Any) -> None:
    large = peers.Case("large", 0, 1600, 4)
    first, second = large.items(), large.items()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert [len(item) for item in first] == [141, 283, 566, 1131]
    assert peers.Case("op-bound", 1, 3, 2).items()[0].shape == (3, 3)


def test_what_is_not_installed_is_left_out(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "version_of", lambda name: None if name == "joblib" else "1")
    monkeypatch.setattr(script, "bench", lambda names, plan, processes: print("measured:", names) or [])
    assert script.main(["--systems", "serial", "joblib"]) == 0
    printed = capsys.readouterr().out
    assert "joblib is not installed: left out" in printed and "measured: ['serial']" in printed
