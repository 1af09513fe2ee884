"""How Sphinx makes the site of these pages: `tox -e docs`."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import mpgrad

HERE = Path(__file__).parent

project = "mpgrad"
author = "the authors of mpgrad"
release = mpgrad.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"mpgrad {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what readers copy is only what they type
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # readers copy "options"
# for the drawings in design.md; blocks of code name their language
highlight_language = "none"

# `map` in a docstring becomes a link where there is such a name. What is no link has to
# be a parameter, or one of NO_LINKS: then a misspelt or a former name is a warning
default_role = "py:obj"
PARAMETERS = {
    node.arg
    for file in Path(mpgrad.__file__).parent.rglob("*.py")
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.arg)
}
NO_LINKS = (
    # other projects: docs/inventories has only what pages and signatures link to
    r"(concurrent|functools|joblib|multiprocessing|torch)(\W.+)?",
    # ... without their first names
    r"BrokenProcessPool|Parallel|parallel_config|RAY_ADDRESS|Tensor\.register_hook",
    r"mark_dirty|needs_input_grad|next_functions|func\.apply|self\.module|split",
    r"with|next|__cause__",  # Python's own
    r"[a-z]+[=(].*",  # parameters with their values, as in `retries=0`, and calls
    r"docs/.+\.md",
)
# types in signatures that nobody documents under this name
UNDOCUMENTED = (
    r"(multiprocessing\.context\.)?BaseContext",
    r"concurrent\.futures\._base\.Future",
    r"torch\.nn\.modules\.module\.Module",
    r"collections\.abc\.Mapping\[str",
    r"(mpgrad\..*\.)?([ART]|EachOptions|OnFailure|Items|MoreOptions|Device|Function|Values)",
)
nitpick_ignore = {("py:obj", name) for name in PARAMETERS}
nitpick_ignore_regex = [("py:obj", name) for name in NO_LINKS]
nitpick_ignore_regex += [("py:class", name) for name in UNDOCUMENTED]
nitpick_ignore_regex += [("py:exc", "BrokenProcessPool")]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    (name, "params_style")
    for name in ("Everyday arguments", "Arguments for faults", "Expert arguments")
]


def inventory_of(name: str) -> str:
    """The names that our pages need of another project, for builds without a network.

    `inventories/<name>.txt` has a line for each: name, kind, and address.
    """
    lines = (HERE / "inventories" / f"{name}.txt").read_text().splitlines()
    entries = "".join(
        f"{what} {kind} 1 {page} -\n" for what, kind, page in map(str.split, lines)
    )
    header = (
        "# Sphinx inventory version 2",
        f"# Project: {name}",
        "# Version: ",
        "# (zlib)",
    )
    file = HERE / "_build" / f"{name}.inv"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(
        "".join(f"{line}\n" for line in header).encode()
        + zlib.compress(entries.encode())
    )
    return str(file)


# the whole inventory if it can be fetched, else our extract, with the same addresses
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", (None, inventory_of("python"))),
    "torch": ("https://docs.pytorch.org/docs/stable", (None, inventory_of("torch"))),
    "numpy": ("https://numpy.org/doc/stable", (None, inventory_of("numpy"))),
}
intersphinx_timeout = 10
