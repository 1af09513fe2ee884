"""How Sphinx makes the site of these pages: `tox -e docs`.

The pages are ordinary Markdown. The links of the index pages give the navigation.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "mpgrad" / "__init__.py"

project = "mpgrad"
author = "the authors of mpgrad"
(release,) = re.findall(r'^__version__ = "(.+)"', PACKAGE.read_text(), re.MULTILINE)
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"mpgrad {release}"
html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what readers copy is only what they type
copybutton_prompt_is_regexp = True

myst_heading_anchors = 3
smartquotes = False  # readers copy "options"
# for the drawings in design.md; blocks of code name their language
highlight_language = "none"

# a line of an index: an item or a row that begins with a link to another page
LINE = re.compile(r"^[*|] \[`?([^\]`]+)`?\]\(([\w/]+)\.md\)", re.MULTILINE)


def with_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Give an index page a hidden table of contents for each of its sections."""
    if not page.endswith("index"):
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE):
        title = section.partition("\n")[0]
        options = [":hidden:"]
        if not title.startswith("# "):
            options.append(f":caption: {title}")
        lines = [f"{name} <{target}>" for name, target in LINE.findall(section)]
        if lines:
            toctree = ["", "```{toctree}", *options, "", *lines, "```", ""]
            source[0] += "\n".join(toctree)


def setup(app: Sphinx) -> None:
    app.connect("source-read", with_navigation)
