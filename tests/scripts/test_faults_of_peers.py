"""faults_of_peers.py runs each fault in a process of its own and says what came; what peers do is
no test's business."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_the_clone_clean")]

SCRIPT = Path(__file__).parents[2] / "scripts" / "reliability" / "faults_of_peers.py"
LIMIT = 58  # seconds on a busy machine; a quiet one takes 10


@pytest.mark.parametrize(
    ("fault", "told"),
    [("gradients", "right"), ("idle", "right; goes on"), ("parent", "after ")],
)
def test_a_fault_of_a_pool_of_ours(fault: str, told: str, script: Any) -> None:
    assert script.watched(fault, "mpgrad", 30).startswith(told)


def test_a_hang_is_a_result(script: Any) -> None:
    assert script.watched("exit", "torch.multiprocessing.Pool", 2) == "hangs"


def test_the_table() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--faults",
        "exit",
        "--peers",
        "mpgrad",
        "ProcessPoolExecutor",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-3] == "a call always kills its worker"
    assert lines[-2].split()[0] == "mpgrad" and lines[-2].endswith("WorkerDiedError; goes on")
    assert lines[-1].split()[0] == "ProcessPoolExecutor"


def test_trials_that_differ_are_counted(script: Any) -> None:
    assert script.merged(["right", "right"]) == "right"
    assert script.merged(["right", "hangs", "right"]) == "2 of 3: right | 1 of 3: hangs"
