"""How Sphinx makes the site of these pages: `tox -e docs`."""

from __future__ import annotations

import zlib
from pathlib import Path

import mpgrad

HERE = Path(__file__).parent

project = "mpgrad"
author = "the authors of mpgrad"
release = mpgrad.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"mpgrad {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {"source_view_link": ""}
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what readers copy is only what they type
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
highlight_language = "none"  # the drawings in design.md; blocks of code name their language

default_role = "py:obj"  # `map` in a docstring becomes a link where there is such a name
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # and stays text where there is none, such as the name of an argument
    # types in signatures that nobody documents under this name
    (
        "py:class",
        r"(multiprocessing\.context\.)?BaseContext|concurrent\.futures\._base\.Future|torch\.nn\.modules\.module\.Module",
    ),
    ("py:class", r"mpgrad\.functions\.parallel\.Starmap|collections\.abc\.Mapping\[str"),
    ("py:exc", "BrokenProcessPool"),
]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def inventory_of(name: str) -> str:
    """The names that our pages need of another project, as an inventory of Sphinx's: for builds without a network.

    `inventories/<name>.txt` has a line for each: name, kind, and the address of its page.
    """
    lines = (HERE / "inventories" / f"{name}.txt").read_text().splitlines()
    entries = "".join(f"{what} {kind} 1 {page} -\n" for what, kind, page in map(str.split, lines))
    header = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The remainder is compressed using zlib.\n"
    file = HERE / "_build" / f"{name}.inv"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(header.encode() + zlib.compress(entries.encode()))
    return str(file)


# the whole inventory if it can be fetched, else our extract: then no warning is lost, and links are the same
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", (None, inventory_of("python"))),
    "torch": ("https://docs.pytorch.org/docs/stable", (None, inventory_of("torch"))),
    "numpy": ("https://numpy.org/doc/stable", (None, inventory_of("numpy"))),
}
intersphinx_timeout = 10
