"""The short examples: each runs, finds what the serial loop finds, says so, and is short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")
EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
MOST_LINES = 50


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "reduce", "graph_of_calls", "jacobian"])
def test_an_example_agrees_with_the_serial_loop(name: str) -> None:
    """It compares by itself, and raises where it does not."""
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= MOST_LINES
    # torch's own code says so, when forward-mode differentiation is first used
    command = [sys.executable, "-W", "ignore:`torch.jit", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "serial" in ended.stdout
