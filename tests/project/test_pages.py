"""The documentation: the code of each page runs and prints what it shows, pages are ordinary
Markdown, links lead somewhere, and the reference is that of the docstrings."""

from __future__ import annotations

import faulthandler
import re
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mpgrad
import mpgrad.joblib

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pages.py"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BY_HAND = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
PROGRAMS = [
    page for page in PAGES if re.search(r"\n```python\n(?!# not run here: )", page.read_text())
]
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
            assert block.kind in script.KINDS, where
            if block.kind == "python" and block.lines[0].startswith(script.NOT_RUN):
                compile("\n".join(block.lines), where, "exec")  # a program all the same


DIRECTIVES = re.compile(r"^(:::.*|(?:```|~~~)\{.*|%.*)$|(\{[\w:-]+\}`)", re.MULTILINE)


@pytest.mark.quick
@pytest.mark.parametrize("page", BY_HAND, ids=str)
def test_pages_are_ordinary_markdown(page: Path) -> None:
    """GitHub shows directives and roles of Sphinx as they are written."""
    assert DIRECTIVES.findall(page.read_text()) == []


@pytest.mark.quick
def test_directives_and_roles_are_seen() -> None:
    text = ":::{note}\n```{toctree}\n{meth}`a` {a}\n```python\n% a comment\n"
    assert len(DIRECTIVES.findall(text)) == 4


MOST_WORDS = 20_000


def words_by_hand(text: str) -> int:
    """How many words a page has, without the parts that scripts write."""
    written = re.sub(r"<!-- reference: .*|<!-- table: .*?<!-- end.*?-->", "", text, flags=re.DOTALL)
    return sum(any(map(str.isalnum, word)) for word in written.split())


@pytest.mark.quick
def test_a_reader_can_read_all_pages() -> None:
    assert sum(words_by_hand(page.read_text()) for page in BY_HAND) <= MOST_WORDS


@pytest.mark.quick
def test_words_are_counted_where_people_write_them() -> None:
    text = "one | two <!-- table: x -->three<!-- end of the table --> 3\n<!-- reference: a -->\nb"
    assert words_by_hand(text) == 3


# --- links


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in headings]
    slugs = [re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in plain]
    assert len(set(slugs)) == len(slugs), page  # a second one would get a number
    return set(slugs)


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def broken_links(page: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
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
def test_each_page_has_a_line_in_an_index() -> None:
    """From which the site makes its navigation."""
    line = re.compile(r"^(?:\* \[[^\]]+\]\(([\w/]+\.md)\): \w|\| \[[^\]]+\]\(([\w/]+\.md)\) \|)")
    listed = ["index.md"]
    for page in PAGES:
        if page.name == "index.md":
            found = [line.match(each) for each in page.read_text().splitlines()]
            names = [each[1] or each[2] for each in found if each]
            listed += [name_of((page.parent / name).resolve()) for name in names]
    assert sorted(listed) == sorted(map(name_of, PAGES))


# --- the reference

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


@pytest.mark.quick
def test_the_reference_is_that_of_the_docstrings(script: Any) -> None:
    """`python scripts/pages.py --reference` writes it."""
    old = [page.name for page in REFERENCE if script.with_reference(page) != page.read_text()]
    assert old == []


@pytest.mark.quick
def test_the_reference_has_every_public_name(script: Any) -> None:
    shown = [each.value for page in REFERENCE for each in script.described(page)]
    public = [getattr(mpgrad, name) for name in mpgrad.__all__]
    modules = [value for value in public if isinstance(value, types.ModuleType)]
    for module in (mpgrad, mpgrad.joblib, *modules):
        for name in module.__all__:
            value = getattr(module, name)
            if getattr(value, "__module__", "").startswith("mpgrad"):
                assert any(each is value for each in shown), name


class Described:
    """Has something of everything.

    See `value`, ``Pool``, `mpgrad.Pool.map` and `torch.nn`.

    Args:
        first: an int | None. See
            `first`.
        **others: more.

    Raises (`value`):
        ValueError, mpgrad.PoolClosedError: it is wrong, and the next line
        goes on.

    Example:
        >>> 1 + 1  # doctest: +SKIP
        2

        >>> 3
        3
    """

    def __init__(self, first: int | None = None, mode: str = "a", **others: Any) -> None:
        self.first = first

    @property
    def value(self) -> int:
        """One e.g. value. And more."""
        return 1


DESCRIPTION = """## `mpgrad.Described`

```py
mpgrad.Described(first=None, mode="a", **others)
```

Has something of everything.

See [`value`](#describedvalue), `Pool`, [`mpgrad.Pool.map`](pool.md#poolmap) and `torch.nn`.

| Argument | Meaning |
| --- | --- |
| `first` | an int \\| None. See `first`. |
| `**others` | more. |

**Raises ([`value`](#describedvalue)):**

* `ValueError`, [`mpgrad.PoolClosedError`](errors.md#mpgradpoolclosederror): it is wrong, and the next line goes on.

```pycon
>>> 1 + 1
2

>>> 3
3
```"""  # noqa: E501


@pytest.fixture
def page(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page that describes the class above."""
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n<!-- reference: Described -->\n\n## `mpgrad.Old`\n")
    monkeypatch.setattr(mpgrad, "Described", Described, raising=False)
    links = {**script.links(), "Described.value": "page.md#describedvalue"}
    monkeypatch.setattr(script, "links", lambda: links)
    return page


@pytest.mark.quick
def test_a_docstring_becomes_a_description(script: Any, page: Path) -> None:
    head, _, text = script.with_reference(page).partition("\n\n## ")
    assert head == "# A page\n\n<!-- reference: Described -->"
    described, _, member = f"## {text}".partition("\n\n### ")
    assert described == DESCRIPTION
    assert member == "`Described.value`\n\nOne e.g. value. And more.\n"


@pytest.mark.quick
def test_a_name_that_is_not_there_is_seen(
    script: Any, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Described, "__doc__", "As `Pool.mop` does.")
    with pytest.raises(script.MistakeError, match=r"mpgrad.Described: there is no Pool.mop"):
        script.with_reference(page)


# --- that pages which are wrong are seen

PAGE = """# A page

```python
import mpgrad
x = {code}
```

```python
print(x)
```

```python
# not run here: needs a GPU
print(1 / 0)
```

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
        "```python\nimport os.path, not_there.at_all\nfrom nor_this import a\n```\n```python\n"
        "# not run here: needs never\nimport never\n```\n"
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
