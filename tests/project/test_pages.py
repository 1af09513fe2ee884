"""The documentation: the code of each page runs and prints what it shows, links lead somewhere,
every public name is there."""

from __future__ import annotations

import faulthandler
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mpgrad

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pages.py"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PROGRAMS = [page for page in PAGES if "\n```python\n" in page.read_text()]
pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")
AT_ONCE = 2  # programs, of which each imports torch and starts a pool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


@pytest.mark.slow
def test_the_programs_of_all_other_pages(script: Any, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # each program has a limit of its own
    absent = {page: packages for page in PROGRAMS if (packages := script.missing(page))}
    mistakes: list[str] = []

    def run(page: Path) -> None:
        folder = tmp_path / name_of(page).replace("/", "-")
        folder.mkdir()
        try:
            script.run(page, folder)
        except script.MistakeError as error:
            mistakes.append(str(error))

    with ThreadPoolExecutor(AT_ONCE) as executor:
        list(executor.map(run, [page for page in PROGRAMS if page not in absent]))
    assert not mistakes, "\n\n".join(mistakes)
    if absent:
        told = [f"{name_of(page)} needs {', '.join(packages)}" for page, packages in absent.items()]
        pytest.skip(f"not run: {'; '.join(told)} (pip install '.[docs]')")


@pytest.mark.quick
def test_each_block_runs_or_says_why_not(script: Any) -> None:
    assert script.pages() == PROGRAMS
    for page in PAGES:
        for block in script.blocks(page):
            where = f"{name_of(page)}, line {block.first}"
            if block.kind == "{code-block} python":
                assert block.lines[0].startswith(script.NOT_RUN), where
                compile("\n".join(block.lines[1:]), where, "exec")  # a program all the same
            else:
                assert block.kind in script.KINDS or block.kind.startswith("{"), where


# --- links


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MyST name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)) for each in headings
    ]
    return {each.strip().lower().replace(" ", "-") for each in plain}


def broken_links(page: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.quick
def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `heading`, with commas\n```sh\n# a comment\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-heading-with-commas) [b](other.md#a-comment) [c](none.md) [d](#here) "
        "[e](https://x.org)\n# Here\n"
    )
    assert broken_links(page) == ["other.md#a-comment", "none.md"]


@pytest.mark.quick
def test_scripts_that_are_cited_are_there() -> None:
    """By pages and sources, with their path."""
    sources = [
        file
        for folder in ("mpgrad", "workers", "scripts", "tests")
        for file in (ROOT / folder).rglob("*.py")
    ]
    cited: set[str] = set()
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sources]:
        cited.update(re.findall(r"\bscripts/[\w/]+\.(?:py|sh|txt)\b", file.read_text()))
    assert len(cited) > 10 and [path for path in sorted(cited) if not (ROOT / path).exists()] == []


@pytest.mark.quick
def test_each_page_is_in_a_table_of_contents() -> None:
    """Sphinx warns of it too, but only where the site is built."""
    listed = {"index.md"}
    for page in PAGES:
        for toctree in re.findall(
            r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            names = [
                line.rpartition("<")[2].strip("> ")
                for line in toctree.splitlines()
                if line and not line.startswith(":")
            ]
            listed |= {name_of((page.parent / f"{name}.md").resolve()) for name in names}
    assert listed == set(map(name_of, PAGES))


# --- the reference


@pytest.mark.quick
def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^\.\. auto\w+:: mpgrad\.([\w.]+)", text, re.MULTILINE))
    # two are of concurrent.futures
    public = set(mpgrad.__all__) - {"as_completed", "wait"}
    for module in ("functions", "nn", "testing"):
        public |= {f"{module}.{name}" for name in getattr(mpgrad, module).__all__}
        public.remove(module)
    assert public <= shown
    for name in shown:
        there: Any = mpgrad
        for part in name.split("."):
            there = getattr(there, part)
        assert there.__doc__, name


# --- that pages which are wrong are seen

PAGE = """# A page

```python
import mpgrad
x = {code}
```

:::{{container}} sides
```python
print(x)
```
:::

```output
{shown}
```
"""


@pytest.mark.parametrize(
    ("code", "shown", "told"),
    [
        ("2", "2", ""),
        ("2", "...", ""),
        ("2", "3", "but its program prints"),
        ("1 / 0", "2", "line 5, in <module>\n    x = 1 / 0"),
        ("__import__('warnings').warn('old')", "None", "UserWarning: old"),
        ("open('a.png', 'w').close()", "None", r"draws ['a.png'], the page shows []"),
    ],
)
def test_a_page_that_is_wrong_is_seen(
    script: Any, tmp_path: Path, code: str, shown: str, told: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(code=code, shown=shown))
    (tmp_path / "empty").mkdir()
    if not told:
        script.run(page, tmp_path / "empty")
        return
    with pytest.raises(script.MistakeError) as seen:
        script.run(page, tmp_path / "empty")
    assert told in str(seen.value)


@pytest.mark.quick
def test_what_a_page_needs(script: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport os.path, not_there.at_all\nfrom nor_this import a\n```\n```{code-block} "
        "python\nimport never\n```\n"
    )
    assert script.missing(page) == ["nor_this", "not_there"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("text\n```python\nx = 1\n", "line 2: this block does not end"),
        ("text\n\n    x = 1\n", "line 3: a block begins with ``` at the margin"),
        ("* text\n  ```python\n  x = 1\n  ```\n", "line 2: a block begins with ``` at the margin"),
        ("~~~python\nx = 1\n~~~\n", "line 1: a block begins with ``` at the margin"),
    ],
)
def test_no_block_is_overlooked(script: Any, tmp_path: Path, text: str, told: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(script.MistakeError, match=told):
        list(script.blocks(page))
