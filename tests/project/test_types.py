"""What type checkers say of programs that use mpgrad; and which names its objects show."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import mpgrad
from mpgrad.engines.kinds import ENGINES, EngineName
from mpgrad.pool import Named
from mpgrad.submission.options import MoreOptions
from mpgrad.tasks.wrappers import NAMED

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("typed_program.py")
WRONG = {
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if line.endswith("  # wrong")
}


def skip_without(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install {module}")


@pytest.mark.slow
def test_mypy_refuses_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    """Elsewhere, so that it finds mpgrad as installed. It reads torch, which takes a minute where
    there is no cache of it."""
    skip_without("mypy")
    (tmp_path / PROGRAM.name).write_text(PROGRAM.read_text())
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
        "--no-error-summary",
    ]
    ended = subprocess.run([*command, PROGRAM.name], cwd=tmp_path, capture_output=True, text=True)
    refused = {int(line.split(":")[1]) for line in ended.stdout.splitlines() if ": error: " in line}
    assert refused == WRONG, ended.stdout + ended.stderr


@pytest.mark.slow
def test_pyright_refuses_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    """Its first run, after `pip install pyright`, fetches the program itself, so that one is the
    user's to make."""
    skip_without("pyright")
    (tmp_path / PROGRAM.name).write_text(PROGRAM.read_text())
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        PROGRAM.name,
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if not ended.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {(ended.stderr or ended.stdout).strip()[-200:]}")
    found = json.loads(ended.stdout)["generalDiagnostics"]
    refused = {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}
    assert refused == WRONG, [
        f"{each['range']['start']['line'] + 1}: {each['message']}" for each in found
    ]


@pytest.mark.quick
def test_what_types_name_is_what_there_is() -> None:
    assert set(get_args(EngineName)) == ENGINES.keys()
    assert set(get_args(Named)) == NAMED.keys()
    parameters = (
        mpgrad.Pool.__init__.__kwdefaults__ or mpgrad.Pool.__init__.__wrapped__.__kwdefaults__
    )  # type: ignore[attr-defined]
    assert MoreOptions.__annotations__.keys() == parameters.keys()


OWN = {
    mpgrad.AsyncResult: {"get", "ready", "successful", "wait"},
    mpgrad.DifferentiableFuture: {
        "add_done_callback",
        "cancel",
        "cancel_after",
        "cancelled",
        "exception",
        "result",
    },
    mpgrad.ResultIterator: {"next"},
    mpgrad.Executor: {
        *("map", "submit", "shutdown", "kill_workers", "terminate_workers", "resize"),
        *("progress", "stats", "timeline"),
    },
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_objects_show_what_is_public_only(kind: type[Any]) -> None:
    assert {name for name in vars(kind) if not name.startswith("_")} == OWN[kind]


def test_no_attribute_of_an_object_is_public(pool2: mpgrad.Pool) -> None:
    made: list[Any] = [
        pool2,
        pool2.submit(abs, -1),
        pool2.map_async(abs, [-1]),
        pool2.imap(abs, [-1]),
    ]
    assert [name for each in made for name in vars(each) if not name.startswith("_")] == []
    assert not {"leave", "terminate_without_waiting"} & set(dir(mpgrad.Pool))
    pool2.synchronize()
