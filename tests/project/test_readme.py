"""The README's first example, and the doctor, as a user starts them. Needs no conftest.py: `plain`
in tox.ini says why."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def run(folder: Path, *arguments: str) -> str:
    """In a folder of its own, so that mpgrad is the one that is installed."""
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_the_first_example(tmp_path: Path) -> None:
    # there is no other one
    (example,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    shorter = example.replace("range(1000)", "range(100)")
    assert shorter != example
    (tmp_path / "example.py").write_text(shorter)
    shown, gradients = run(tmp_path, "example.py").splitlines()
    times = r"loop \d+\.\d\d s, pool \d+\.\d\d s"
    assert re.fullmatch(times, shown) and gradients.count("tensor(") == 2
    assert re.findall(f"`{times}`", README.read_text())  # it shows both times, too


def test_the_doctor_finds_that_pools_work(tmp_path: Path) -> None:
    assert run(tmp_path, "-m", "mpgrad", "doctor").startswith("A pool works here.")
