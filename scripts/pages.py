"""The pages of the documentation as programs: runs the code of each page, and keeps the pictures
that it draws.

A page is one program: its ``python`` blocks, one after the other. Its ``output`` blocks are what
the program prints, with "..." for what differs from run to run. What cannot run everywhere is a
``{code-block} python`` whose caption begins with "Not run here:" and says what it needs.

    pip install '.[docs]'
    python scripts/pages.py                                      # all pages
    python scripts/pages.py docs/tutorials/*.md --pictures       # draws docs/pictures anew
"""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "pictures"
LIMIT = 600.0  # seconds, after which a page hangs: a busy machine may be slow
NOT_RUN = ":caption: Not run here: "
NOT_PRINTED = "[Gloo]"  # by the program, but by torch 2.8 itself
KINDS = {"python", "output", "sh", "text"}  # of blocks that are not directives

# pictures that can be read on a light and on a dark page
STYLE = """
backend: Agg
figure.figsize: 6.4, 3.2
figure.constrained_layout.use: True
savefig.transparent: True
savefig.dpi: 160
text.color: 808890
axes.labelcolor: 808890
axes.edgecolor: 808890
xtick.color: 808890
ytick.color: 808890
legend.frameon: False
"""


class Block(NamedTuple):
    """A fenced block: `kind` is what stands behind the fence; `first` the number of its first line,
    from 1."""

    kind: str
    first: int
    lines: list[str]


class MistakeError(Exception):
    """A page that does not do what it says."""


def pages() -> list[Path]:
    """All pages that have a program."""
    return [
        path
        for path in sorted(DOCS.rglob("*.md"))
        if any(block.kind == "python" for block in blocks(path))
    ]


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, also within containers (":::")."""
    kind, first, lines, before = None, 0, [], ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if kind is None:
            if line.startswith("```"):
                kind, first, lines = line.strip("` "), number + 1, []
            elif line.lstrip().startswith(("```", "~~~")) or (
                line.startswith("    ") and not before.strip()
            ):
                raise MistakeError(
                    f"{path}, line {number}: a block begins with ``` at the margin, or nobody "
                    "would run it"
                )
            before = line
        elif line.rstrip() == "```":
            yield Block(kind, first, lines)
            kind = None
        else:
            lines.append(line)
    if kind is not None:
        raise MistakeError(f"{path}, line {first - 1}: this block does not end")


def program(path: Path) -> str:
    """The page's code, each line where it stands in the page, so that tracebacks name the page's
    lines."""
    lines: list[str] = []
    for block in blocks(path):
        if block.kind == "python":
            lines += [""] * (block.first - 1 - len(lines)) + block.lines
    return "\n".join(lines) + "\n"


def output(path: Path) -> str:
    """What the page says that its program prints."""
    return "".join(
        f"{line}\n" for block in blocks(path) if block.kind == "output" for line in block.lines
    )


def missing(path: Path) -> list[str]:
    """The packages that the page's program imports, and that are not installed."""
    found = set()
    for node in ast.walk(ast.parse(program(path))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found |= {name.partition(".")[0] for name in names}
    return sorted(name for name in found if importlib.util.find_spec(name) is None)


def pictures_shown(path: Path) -> set[str]:
    """The names of the pictures in a page that its program draws."""
    return {
        Path(name).name for name in re.findall(r"!\[[^\]]*\]\(([^)]*\.png)\)", path.read_text())
    }


def tables_of(path: Path) -> list[Path]:
    """The data files that a page links to: its program reads them."""
    return [path.parent / name for name in re.findall(r"\]\(([^)]*\.csv)\)", path.read_text())]


def run(path: Path, folder: Path) -> None:
    """Run the page's program in an empty folder, beside the data files that the page links to.

    Raises:
        MistakeError: it fails, warns, hangs, prints or draws something else than the page shows.
    """
    (folder / "matplotlibrc").write_text(STYLE)
    for table in tables_of(path):
        shutil.copy(table, folder)
    (folder / "page.py").write_text(program(path))
    environment = {**os.environ, "PYTHONPATH": "", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "page.py"]
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        raise MistakeError(f"{path}: still running after {LIMIT:.0f} s") from None
    if ended.returncode or "Warning" in ended.stderr:  # Matplotlib may say that it looks for fonts
        raise MistakeError(f"{path}: exit status {ended.returncode}\n{ended.stdout}{ended.stderr}")
    wanted = output(path)
    printed = "".join(
        line for line in ended.stdout.splitlines(keepends=True) if not line.startswith(NOT_PRINTED)
    )
    if not doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS):
        raise MistakeError(f"{path}: the page shows\n{wanted}\nbut its program prints\n{printed}")
    drawn = {picture.name for picture in folder.glob("*.png")}
    if drawn != pictures_shown(path):
        raise MistakeError(
            f"{path}: its program draws {sorted(drawn)}, the page shows "
            f"{sorted(pictures_shown(path))}"
        )


def cpu_seconds() -> float:
    """Of the programs that have ended, and their workers."""
    times = os.times()
    return times.children_user + times.children_system


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs the code of the documentation's pages.")
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument(
        "--pictures", action="store_true", help=f"put the pictures that they draw into {PICTURES}"
    )
    options = parser.parse_args(arguments)
    failed = 0
    for path in options.pages or pages():
        if absent := missing(path):
            print(f"{path}: left out, needs {', '.join(absent)}")
            continue
        began, used = time.perf_counter(), cpu_seconds()
        with tempfile.TemporaryDirectory() as name:
            try:
                run(path, Path(name))
            except MistakeError as mistake:
                print(mistake)
                failed += 1
            else:
                print(
                    f"{path}: {time.perf_counter() - began:.1f} s, CPU {cpu_seconds() - used:.1f} "
                    "s",
                    flush=True,
                )
                for picture in Path(name).glob("*.png") if options.pictures else ():
                    shutil.copy(picture, PICTURES)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
