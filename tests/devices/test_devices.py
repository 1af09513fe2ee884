"""Runs the tests in `pretend/`, of pools with devices on machines without one, in a process of
their own.

PyTorch starts the autograd engine's threads for devices at the first backward of a process, for the
kinds of device that there are by then, so the pretended kind has to be there before.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_pools_on_pretended_devices() -> None:
    faulthandler.cancel_dump_traceback_later()  # these are many tests, each of which is watched
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(TESTS / "pretend"),
    ]
    environment = {**os.environ, "MPGRAD_PRETEND": "1"}
    # not in the clone itself: "-m" would import the mpgrad that lies there, whichever is installed
    done = subprocess.run(
        command, env=environment, cwd=TESTS, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_pool_without_devices_leaves_the_keyword_to_the_function(pool2: mpgrad.Pool) -> None:
    assert pool2.submit(torch.ones, 3, device="cpu").result().equal(torch.ones(3))
