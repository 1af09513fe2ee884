"""Plants faults (mutants) one at a time. A test must notice each of them.

    python scripts/guards/mutants.py [--only WORD ...] [--out FILE.json]

The mutants are in `mutants.txt`. Each runs in a copy of what git tracks. Its text must appear
exactly once in `mpgrad/` and `workers/`. First, all tests must pass in a copy without a fault.
Tests that take too long count as having noticed the fault. The exit code is 1 if a mutant survives,
or is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.txt")
SECONDS = 150  # for the tests of one mutant
AT_ONCE = 2


class Mutant(NamedTuple):
    """A fault: the text that it replaces, the new text, and the tests (in `tests/`) that notice
    it."""

    old: str
    new: str
    tests: str


def mutants_in(text: str) -> list[Mutant]:
    """Read paragraphs with removed lines (-), lines that replace them (+), and tests (?). A #
    begins a comment."""
    found = []
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line[:2] in ("- ", "+ ", "? ")]
        parts = {mark: [line[2:] for line in lines if line[0] == mark] for mark in "-+?"}
        if lines:
            found.append(Mutant("\n".join(parts["-"]), "\n".join(parts["+"]), " ".join(parts["?"])))
    return found


class Found(NamedTuple):
    """Describes the outcome of a mutant: killed, survived, or not found."""

    outcome: str
    file: str
    seconds: float
    by: str


def copy_of(tree: Path, folder: Path) -> Path:
    """Copy the files that git tracks, and copy links as links, such as mpgrad/workers."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (tree / name).exists():
            shutil.copy2(tree / name, folder / name, follow_symlinks=False)
    return folder


def sources(tree: Path) -> list[Path]:
    return sorted(
        file for package in ("mpgrad", "workers") for file in (tree / package).rglob("*.py")
    )


def places(tree: Path, text: str) -> list[Path]:
    """Return the file of each occurrence of a text."""
    return [file for file in sources(tree) for _ in range(file.read_text().count(text))]


def plant(tree: Path, mutant: Mutant) -> Path | None:
    """Replace the text. Return the file, or None unless the text appears exactly once."""
    found = places(tree, mutant.old)
    if len(found) != 1:
        return None
    found[0].write_text(found[0].read_text().replace(mutant.old, mutant.new))
    return found[0]


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> str:
    """Run tests until one fails. Return its name, or "" if all pass."""
    names = [f"tests/{test}" for test in tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        *names,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds} s"
    failed = [
        line.split(" - ")[0]
        for line in ended.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return (failed or [f"exit code {ended.returncode}"])[0] if ended.returncode else ""


def tried(mutant: Mutant, tree: Path) -> Found:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(tree, Path(folder))
        file = plant(copy, mutant)
        if file is None:
            return Found(f"in {len(places(copy, mutant.old))} places", "", 0.0, "")
        by = run_tests(copy, mutant.tests.split(), SECONDS)
        return Found(
            "killed" if by else "SURVIVED",
            str(file.relative_to(copy)),
            time.monotonic() - start,
            by,
        )


def main(arguments: Sequence[str] | None = None, tree: Path = ROOT, text: str | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="mutants whose text or tests contain one of these words",
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the table")
    given = parser.parse_args(arguments)
    every = mutants_in(LIST.read_text() if text is None else text)
    chosen = [each for each in every if any(word in "\n".join(each) for word in given.only)]
    with tempfile.TemporaryDirectory() as folder:
        tests = sorted({test for each in chosen for test in each.tests.split()})
        if failed := run_tests(copy_of(tree, Path(folder)), tests, SECONDS * len(chosen)):
            print(f"without any mutant: {failed}")
            return 1
    rows = []
    with ThreadPoolExecutor(AT_ONCE) as executor:
        for mutant, found in zip(
            chosen, executor.map(lambda each: tried(each, tree), chosen), strict=True
        ):
            line = mutant.old.strip().partition("\n")[0]
            print(
                f"{found.outcome:9} {found.seconds:4.0f} s  {found.file:40} {line[:60]:60}  "
                f"{found.by}",
                flush=True,
            )
            rows.append({**mutant._asdict(), **found._asdict()})
    survivors = sum(row["outcome"] != "killed" for row in rows)
    print(f"{len(rows) - survivors} of {len(rows)} mutants killed")
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1))
    return int(survivors > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
