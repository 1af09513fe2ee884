"""The public names and their parameters are those that the list has: none goes, and none comes,
unnoticed.

`python tests/project/test_public_names.py` writes the list anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpgrad
import mpgrad.functions
import mpgrad.joblib
import mpgrad.nn
import mpgrad.testing

pytestmark = pytest.mark.quick

LIST = Path(__file__).with_name("public_names.txt")
MODULES = mpgrad, mpgrad.functions, mpgrad.nn, mpgrad.testing, mpgrad.joblib
MADE_BY_USERS = {
    mpgrad.Pool,
    mpgrad.Executor,
    mpgrad.Ray,
    mpgrad.functions.EmulatedAutogradContext,
    mpgrad.nn.DataParallel,
}


def public_names() -> Iterator[str]:
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            yield f"{module.__name__}.{name}{parameters(value)}"
            if inspect.isclass(value) and value.__module__.startswith("mpgrad"):
                for attribute, member in sorted(vars(value).items()):
                    if not attribute.startswith("_"):
                        yield f"{module.__name__}.{name}.{attribute}{parameters(member)}"


def parameters(value: Any) -> str:
    """Without annotations, which Python's versions print in their own ways, and "..." for each
    default."""
    value = inspect.unwrap(
        value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    )
    if not callable(value) or (inspect.isclass(value) and value not in MADE_BY_USERS):
        return ""
    signature = inspect.signature(value)
    plain = inspect.Parameter.empty
    known = []
    for each in signature.parameters.values():
        default = plain if each.default is plain else ...
        known.append(each.replace(annotation=plain, default=default))
    text = str(signature.replace(parameters=known, return_annotation=plain))
    return text.replace("Ellipsis", "...")


def test_the_public_names_are_those_of_the_list() -> None:
    assert list(public_names()) == LIST.read_text().splitlines()


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in public_names()))
