"""soak.py runs, hurts its workers, compares both runs and notices what it is there to notice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_the_clone_clean")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "reliability" / "soak.py"
LIMIT = 55  # seconds on a busy machine; a quiet one takes 11


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("soak") / "quick.json"
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--json", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    return ended.stdout, json.loads(out.read_text())


def test_training_ends_with_the_same_parameters(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    injured, undisturbed = record["injured"], record["undisturbed"]
    assert record["equal"] and record["first_difference"] is None and record["hangs"] == 0
    assert injured["steps"] == undisturbed["steps"] == len(injured["seconds"]) > 5
    assert injured["sha256_of_parameters"] == undisturbed["sha256_of_parameters"]
    assert injured["last_loss"] == undisturbed["last_loss"] != injured["first_loss"]
    assert "parameters after each step: equal, bit for bit" in table


def test_workers_were_hurt_and_the_others_were_not(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    harm = record["injured"]["harm"]
    assert harm["kills"] > 0 and record["injured"]["reruns"] > 0
    # a call on a very busy machine may take longer than the timeout, and is then one more
    assert record["injured"]["deaths"] >= harm["kills"] + harm["stops"]
    harm = record["undisturbed"]["harm"]
    assert (
        harm["kills"] == harm["stops"] == harm["slow_downs"] == record["undisturbed"]["reruns"] == 0
    )
    for row in (
        "kills (SIGKILL)",
        "calls and backwards rerun",
        "step, ms: median",
        "parent's descriptors",
    ):
        assert row in table


def test_says_what_it_held_and_where_it_ran(quick: tuple[str, dict[str, Any]]) -> None:
    table, record = quick
    start, end = record["injured"]["start"], record["injured"]["end"]
    assert end["descriptors"] == start["descriptors"] and end["threads"] == start["threads"]
    assert all(held["parent_bytes"] > 0 and held["workers_bytes"] > 0 for held in (start, end))
    around = record["surroundings"]
    for text in (around["date"], around["cpu"], around["versions"]["torch"]):
        assert text in table
    assert record["plan"]["kills"] == 20 and around["processes"] == record["plan"]["processes"]


def test_the_smallest_difference_is_found(
    fork_server: mpgrad.Pool, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared: list[list[str]] = []
    compare = script.first_difference
    monkeypatch.setattr(
        script, "first_difference", lambda *marks: compared.extend(marks) or compare(*marks)
    )
    out = tmp_path / "other.json"
    threads = torch.get_num_threads()
    try:
        monkeypatch.setattr(
            script, "plan_of", lambda options: script.Plan(1, kills=1, gap=0.05, perturb=3)
        )
        assert script.main(["--json", str(out)]) == 1
    finally:
        torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    assert not record["equal"] and record["first_difference"] == 3 and record["hangs"] == 0
    assert record["injured"]["error"] is None and record["undisturbed"]["error"] is None
    # the parameters at the end need not differ: how many steps there are is the machine's to say,
    # and they may round it away
    injured, undisturbed = compared
    assert (
        len(injured) == len(undisturbed)
        and injured[:3] == undisturbed[:3]
        and injured[3] != undisturbed[3]
    )
    assert record["injured"]["sha256_of_parameters"] == injured[-1]
    assert record["undisturbed"]["sha256_of_parameters"] == undisturbed[-1]


def test_a_hang_ends_the_run(
    fork_server: mpgrad.Pool,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script.Training, "step", lambda training: time.sleep(30))
    run = script.injured(script.Plan(processes=1, hang=1))
    assert run.hangs == 1 and run.error == "TimeoutError in step 0: the run took longer than 1 s"
    assert "in _run" in capfd.readouterr().err  # what the pool was at


def test_an_error_of_a_step_is_no_hang_but_no_success(
    fork_server: mpgrad.Pool, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def given_up(training: Any) -> None:
        raise mpgrad.CallTimeoutError(3, "forward", 0.5)

    monkeypatch.setattr(script.Training, "step", given_up)
    run = script.injured(script.Plan(processes=1))
    assert (
        run.hangs == 0
        and run.error is not None
        and run.error.startswith("CallTimeoutError in step 0")
    )
    monkeypatch.setattr(script, "injured", lambda plan: run)
    threads = torch.get_num_threads()
    try:
        assert (
            script.main(["--kills", "1", "--processes", "1", "--json", str(tmp_path / "none.json")])
            == 1
        )
    finally:
        torch.set_num_threads(threads)


def test_first_difference(script: Any) -> None:
    assert script.first_difference(["a", "b"], ["a", "b"]) is None
    assert script.first_difference(["a", "b", "c"], ["a", "x", "c"]) == 1
    assert script.first_difference(["a", "b"], ["a"]) == 1  # a run that is shorter is another one


def test_only_the_pools_own_workers_are_hurt(script: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as stranger:
        stranger.wait()
    for pid in (1, stranger.pid):
        with pytest.raises(ProcessLookupError), script.held(pid):
            pass


def test_refuses_no_time(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--seconds", "0"])
    assert "must be at least 1 (0)" in capsys.readouterr().err
