"""Runs the code of each page of the documentation, keeps the pictures that it draws, and writes the
reference from the docstrings.

The ``python`` blocks of a page are one program. The ``output`` blocks are what the program prints,
with "..." for text that differs from run to run. A block that cannot run everywhere begins with a
comment "# not run here: ..." that names what it needs.

A reference page names the objects that it describes in a comment, "<!-- reference: ... -->". Their
docstrings are the only source of everything after this comment.

    pip install '.[docs]'
    python scripts/pages.py                                      # runs all pages
    python scripts/pages.py docs/tutorials/*.md --pictures       # draws docs/pictures anew
    python scripts/pages.py --reference                          # writes docs/reference anew
"""

from __future__ import annotations

import argparse
import ast
import doctest
import functools
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "pictures"
LIMIT = 600.0  # seconds, after which a page counts as hanging; a busy machine may be slow
NOT_RUN = "# not run here: "
NOT_PRINTED = "[Gloo]"  # by the program, but by torch 2.8
# The kinds of blocks. In the reference, "py" is a signature, and "pycon" an example that doctest
# runs.
KINDS = {"python", "output", "sh", "text", "py", "pycon"}

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
    """A fenced block. `kind` is the word after the fence, and `first` is the number of its first
    line, from 1."""

    kind: str
    first: int
    lines: list[str]


class MistakeError(Exception):
    """A page does not do what it shows."""


def pages() -> list[Path]:
    """Return all pages that have a program."""
    return [path for path in sorted(DOCS.rglob("*.md")) if program(path).strip()]


def blocks(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    kind, first, before = None, 0, ""
    lines: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if kind is None:
            if line.startswith("```"):
                kind, first, lines = line.strip("` "), number + 1, []
            elif line.lstrip().startswith(("```", "~~~")) or (
                line.startswith("    ") and not before.strip()
            ):
                raise MistakeError(
                    f"{path}, line {number}: a block begins with ``` at the margin, or it "
                    "would not be run"
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
    """Return the page's code, with each line at its place in the page, so that tracebacks name the
    page's lines."""
    lines: list[str] = []
    for block in blocks(path):
        if block.kind == "python" and not block.lines[0].startswith(NOT_RUN):
            lines += [""] * (block.first - 1 - len(lines)) + block.lines
    return "\n".join(lines) + "\n"


def output(path: Path) -> str:
    """Return what the program prints according to the page."""
    return "".join(
        f"{line}\n" for block in blocks(path) if block.kind == "output" for line in block.lines
    )


def missing(path: Path) -> list[str]:
    """Return the packages that the page's program imports and that are not installed."""
    found = set()
    for node in ast.walk(ast.parse(program(path))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found |= {name.partition(".")[0] for name in names}
    return sorted(name for name in found if importlib.util.find_spec(name) is None)


def pictures_shown(path: Path) -> set[str]:
    """Return the names of the pictures in a page that its program draws."""
    return {
        Path(name).name for name in re.findall(r"!\[[^\]]*\]\(([^)]*\.png)\)", path.read_text())
    }


def tables_of(path: Path) -> list[Path]:
    """Return the data files that a page links to, because its program reads them."""
    return [path.parent / name for name in re.findall(r"\]\(([^)]*\.csv)\)", path.read_text())]


def run(path: Path, folder: Path) -> None:
    """Run the page's program in an empty folder, beside the data files that the page links to.

    Raises:
        MistakeError: it fails, warns or hangs, or prints or draws something that the page does not
            show.
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
    if ended.returncode or "Warning" in ended.stderr:  # Matplotlib may report a search for fonts
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


# --- the reference

END = "end of the docstring"
BEGIN = re.compile(r"^<!-- reference: (.*) -->\n", re.MULTILINE)
MEMBERS = types.FunctionType, property, functools.cached_property, staticmethod, classmethod
SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|\w+ arguments|[\w ]+ for \w+).*:")
ENTRY = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)")


class Described(NamedTuple):
    """An object in the reference. `owner` is its class, or None, and `link` leads to its
    heading."""

    name: str
    value: Any
    owner: Any
    link: str


def described(path: Path) -> Iterator[Described]:
    """Yield the objects that a page describes, in its order, and each class's members after the
    class."""
    for name in (" ".join(BEGIN.findall(path.read_text()))).split():
        value = pkgutil.resolve_name(f"mpgrad.{name}")
        yield Described(f"mpgrad.{name}", value, None, f"{path.name}#{slug(f'mpgrad.{name}')}")
        for member, each in vars(value).items() if isinstance(value, type) else ():
            if isinstance(each, MEMBERS) and not member.startswith("_") and each.__doc__:
                title = f"{value.__name__}.{member}"
                yield Described(title, getattr(value, member), value, f"{path.name}#{slug(title)}")


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST name it."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


@functools.cache
def links() -> dict[str, str]:
    """Return the link to each name in the reference, with and without "mpgrad."."""
    found: dict[str, str] = {}
    for path in sorted((DOCS / "reference").glob("*.md")):
        for each in described(path):
            short = each.name.removeprefix("mpgrad.")
            found |= dict.fromkeys((short, f"mpgrad.{short}"), each.link)
    return found


def with_reference(path: Path) -> str:
    """Return the page with descriptions from the present docstrings."""
    text = path.read_text()
    begin = BEGIN.search(text)
    if begin is None:
        return text
    parts = [text[: begin.end()].rstrip()]
    objects = list(described(path))
    for each in objects:
        members = [one for one in objects if one.owner is each.value]
        parts += description(each, members, path.name)
    return "\n\n".join(parts) + "\n"


def description(each: Described, members: Sequence[Described], page: str) -> Iterator[str]:
    """Yield the paragraphs that describe an object."""
    yield f"{'###' if each.owner else '##'} `{each.name}`"
    docstring = list(sections(inspect.getdoc(each.value) or ""))
    titles = [title for title, _ in docstring]
    is_made = not isinstance(each.value, type) or any("rg" in title for title in titles)
    if is_made and callable(each.value):
        yield f"```py\n{signature(each)}\n```"
    own = set(inspect.signature(each.value).parameters) if is_made and callable(each.value) else ()

    def marked(text: str) -> str:
        return with_links(text, each, own, page)

    for title, lines in docstring:
        if not title:
            yield marked("\n".join(lines))
        elif title == "Example":
            code = re.sub(r" *# doctest: .*", "", "\n".join(lines))
            yield f"```pycon\n{code}\n```"
        elif title == "Returns":
            yield f"**Returns:** {marked(' '.join(lines))}"
        elif title.startswith("Raises"):
            yield f"**{marked(title)}:**"
            yield "\n".join(
                f"* {marked(listed(name))}: {marked(text)}" for name, text in entries(lines)
            )
        else:
            what = "Attribute" if title == "Attributes" else title.replace("Args", "Argument")
            rows = [(listed(name), marked(text)) for name, text in entries(lines)]
            yield table((what.replace("arguments", "argument"), "Meaning"), rows)
    if len(members) > 2:
        yield table(
            ("Member", "What it does"),
            [
                (f"[`{one.name.partition('.')[2]}`](#{slug(one.name)})", marked(summary(one.value)))
                for one in members
            ],
        )


def sections(docstring: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and lines of each section. A paragraph without a title has an empty one."""
    title, lines = "", list[str]()
    for line in [*docstring.splitlines(), END]:
        if title and (line.startswith(" ") or not line):
            lines.append(line)
            continue
        if title or line in ("", END) or SECTION.fullmatch(line):
            text = textwrap.dedent("\n".join(lines)).strip("\n")
            if text:
                yield title, text.splitlines()
            title, lines = "", []
        if SECTION.fullmatch(line):
            title = line.rstrip(":")
        elif line:
            lines.append(line)


def entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each entry of a section."""
    found: list[list[str]] = []
    for line in lines:
        if begun := ENTRY.fullmatch(line):
            found.append([begun[1], begun[2]])
        else:
            found[-1][1] += f" {line.strip()}"
    yield from ((name, text) for name, text in found)


def listed(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in lines)


def summary(value: Any) -> str:
    """Return the first sentence of a docstring."""
    ((_, lines), *_) = sections(inspect.getdoc(value) or "")
    return re.split(r"(?<=[.`]\.) |(?<=[a-z)]\.) ", " ".join(lines))[0]


def signature(each: Described) -> str:
    """Return the call with its defaults, but without annotations, which an editor shows."""
    empty = inspect.Parameter.empty
    known = inspect.signature(each.value)
    own = [one for one in known.parameters.values() if one.name != "self"]
    text = str(
        known.replace(
            parameters=[one.replace(annotation=empty) for one in own], return_annotation=empty
        )
    ).replace("'", '"')
    return textwrap.fill(each.name + text, 88, subsequent_indent="    ", break_long_words=False)


def with_links(text: str, each: Described, own: Any, page: str) -> str:
    """Return `text` in Markdown, where names that the reference describes become links.

    Raises:
        MistakeError: a public class has no such member.
    """
    module = each.name.rpartition(".")[0].removeprefix("mpgrad.")
    classes = [one for one in (each.owner, each.value) if isinstance(one, type)]

    def linked(name: str) -> str:
        if name in own or f"mpgrad.{name}" == each.name or name == each.name:
            return f"`{name}`"
        for full in (*(f"{one.__name__}.{name}" for one in classes), f"{module}.{name}", name):
            if full in links():
                target = links()[full]
                return f"[`{name}`]({target.removeprefix(page)})"
        owner, _, member = name.removeprefix("mpgrad.").partition(".")
        public = pkgutil.resolve_name("mpgrad").__dict__.get(owner) if owner in links() else None
        if isinstance(public, type) and member.isidentifier() and not hasattr(public, member):
            raise MistakeError(f"{each.name}: there is no {name}")
        return f"`{name}`"

    return re.sub(r"``(.+?)``|`([^`]+)`", lambda m: f"`{m[1]}`" if m[1] else linked(m[2]), text)


def cpu_seconds() -> float:
    """Return the CPU seconds of the programs that have ended, and of their workers."""
    times = os.times()
    return times.children_user + times.children_system


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs the code of the documentation's pages.")
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument(
        "--pictures", action="store_true", help=f"put the pictures that they draw into {PICTURES}"
    )
    parser.add_argument(
        "--reference", action="store_true", help="only write the reference, from the docstrings"
    )
    options = parser.parse_args(arguments)
    if options.reference:
        for path in sorted((DOCS / "reference").glob("*.md")):
            path.write_text(with_reference(path))
        return 0
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
