"""mutants.py says which faults no test notices."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")

SCRIPT = Path(__file__).parents[2] / "scripts" / "guards" / "mutants.py"
SOURCE = "def half(n):\n    if n > 3:\n        return n / 2\n    return n / 2\n"
TEST = "from mpgrad.a import half\n\ndef test_half():\n    assert half(4) == 2\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {"mpgrad/__init__.py": "", "mpgrad/a.py": SOURCE, "tests/test_a.py": TEST}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        (
            {
                "-     if n > 3:\n-         return n / 2\n"
                "+     if n > 3:\n+         return n * 2": "killed"
            },
            0,
        ),
        (
            {
                "- n > 3\n+ n > 2": "SURVIVED",
                "- return n / 2\n+ return n * 2": "in 2 places",
                "- return n / 3\n+ return n * 2": "in 0 places",
            },
            1,
        ),
    ],
)
def test_what_becomes_of_a_mutant(
    script: Any, tree: Path, capsys: pytest.CaptureFixture[str], faults: dict[str, str], code: int
) -> None:
    text = "\n".join(f"{fault}\n? test_a.py\n" for fault in faults)
    assert script.main([], tree, f"# a\n\n{text}") == code
    said = capsys.readouterr().out
    assert all(outcome in said for outcome in faults.values())
    assert (tree / "mpgrad" / "a.py").read_text() == SOURCE  # it was planted in a copy


def test_a_test_that_fails_by_itself_has_noticed_nothing(
    script: Any, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests" / "test_a.py").write_text(TEST.replace("== 2", "== 3"))
    assert script.main([], tree, "- n > 3\n+ n > 2\n? test_a.py\n") == 1
    assert "without any mutant: FAILED tests/test_a.py::test_half" in capsys.readouterr().out
