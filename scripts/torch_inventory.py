"""Finds everything in PyTorch's public modules that changes a state of the process or a thread, and
prints how mpgrad treats it.

PyTorch has no list of its modes and settings. This script looks through its public modules for
context managers, for functions that set globals or call PyTorch's own setters, for names like
`set_...`, and for flags. torch_inventory.txt lists how each is treated in calls of a pool. A test
fails if PyTorch has one that is not in the list.

    python scripts/torch_inventory.py          # names that the list or this PyTorch lacks
    python scripts/torch_inventory.py --all    # everything that is found
"""

from __future__ import annotations

import argparse
import dis
import importlib
import inspect
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LIST = Path(__file__).with_suffix(".txt")
EPILOG = (
    "exit status: 0 if the list has everything that was found, 1 if it lacks something, 2 for "
    "wrong arguments"
)
# These are not modules for users' programs.
SKIPPED = {"bin", "contrib", "include", "lib", "share", "test", "testing"}
SETTERS = re.compile(
    r"(set|enable|disable|use|allow|register|unregister|preferred|activate|restore|rename|swap)(_|$)"
)
PRIVATE = re.compile(r"\._(?!_)")
PRIVATE_SETTERS = re.compile(r"(^|_)(set|enable|disable|push|pop)(_|$)")


def modules() -> Iterator[str]:
    """Yield the names of the public modules, imported, except those that need a missing package."""
    yield "torch"
    yield "torch.__future__"
    yield from below("torch", Path(torch.__file__).parent)


def below(package: str, folder: Path) -> Iterator[str]:
    for found in pkgutil.iter_modules([str(folder)], f"{package}."):
        last = found.name.rpartition(".")[2]
        if last.startswith("_") or last in SKIPPED:
            continue
        try:
            importlib.import_module(found.name)
        except Exception:  # it needs a package, a device or a system that is missing here
            continue
        yield found.name
        if found.ispkg:
            yield from below(found.name, folder / last)


def changes_state(name: str, value: Any) -> bool:
    if inspect.isclass(value):
        return hasattr(value, "__enter__")
    if not callable(value):
        return False
    # under `contextlib.contextmanager`
    if inspect.isgeneratorfunction(getattr(value, "__wrapped__", None)):
        return True
    code = getattr(value, "__code__", None)
    if code is not None and any(
        each.opname == "STORE_GLOBAL" for each in dis.get_instructions(code)
    ):
        return True
    if (
        code is not None
        and "_C" in code.co_names
        and any(map(PRIVATE_SETTERS.search, code.co_names))
    ):
        return True
    return SETTERS.match(name) is not None


def assigned(name: str, module: types.ModuleType) -> Iterator[str]:
    """Yield flags: attributes of a module, or of an object in it, whose class handles
    assignments."""
    if type(module) is types.ModuleType and not name.startswith("torch.backends."):
        for attribute in names_in(module):
            kind = type(getattr(module, attribute, None))
            for field, value in vars(kind).items() if kind.__module__ == name else ():
                if isinstance(value, property) and value.fset is not None:
                    yield f"{name}.{attribute}.{field}"
        return
    for attribute, value in vars(type(module)).items():
        if hasattr(type(value), "__set__") and not attribute.startswith("_"):
            yield f"{name}.{attribute}"
    for attribute in names_in(module):
        value = getattr(module, attribute, ...)
        if isinstance(value, bool | str | None) and attribute.islower():
            yield f"{name}.{attribute}"
        setter = (
            None
            if inspect.isclass(value)
            else getattr(vars(type(value)).get("__setattr__"), "__code__", None)
        )
        for constant in () if setter is None else setter.co_consts:
            if isinstance(constant, str) and hasattr(value, constant):
                yield f"{name}.{attribute}.{constant}"


def names_in(module: types.ModuleType) -> set[str]:
    """Return the public names. Modules of `torch.backends` wrap the real modules (`m`)."""
    holders = module, type(module), getattr(module, "m", None)
    return {name for holder in holders for name in dir(holder) if not name.startswith("_")}


def name_of(value: Any, where: str, name: str) -> str:
    """Return the name that users write. If it is only an import from another module, return its
    name there."""
    home = getattr(value, "__module__", None)
    public = where.count(".") <= 1 or name in getattr(sys.modules[where], "__all__", ())
    if (
        not isinstance(home, str)
        or home == "torch._C"
        or home == where
        or (public and PRIVATE.search(f".{home}"))
    ):
        return f"{where}.{name}"
    return f"{home}.{getattr(value, '__qualname__', name)}"


def inventory() -> set[str]:
    """Return the names of everything that is found, one for each object."""
    found: dict[int, str] = {}
    flags: set[str] = set()
    kept: list[Any] = []  # otherwise an id may later belong to another object
    for where in modules():
        module = importlib.import_module(where)
        flags.update(assigned(where, module))
        for name in names_in(module):
            value = getattr(module, name, None)
            home = getattr(value, "__module__", None) or "torch"
            if not (
                isinstance(home, str) and home.partition(".")[0] == "torch"
            ) or inspect.ismodule(value):
                continue
            if changes_state(name, value):
                kept.append(value)
                called = name_of(value, where, name)
                found[id(value)] = min(
                    found.get(id(value), called), called, key=lambda each: (len(each), each)
                )
            if inspect.isclass(value) and home == where:
                for attribute, method in vars(value).items():
                    if isinstance(method, staticmethod | classmethod) and SETTERS.match(attribute):
                        flags.add(f"{where}.{name}.{attribute}")
    # private names are for PyTorch's own use, except modes, which users make
    return flags.union(
        each for each in found.values() if each.endswith("Mode") or not PRIVATE.search(each)
    )


def listed(text: str) -> dict[str, str]:
    """Return how each name is treated, which is the heading that it appears under."""
    fates: dict[str, str] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("["):
            heading = line.strip("[]")
        elif line and not line.startswith("#"):
            assert line not in fates, f"twice in the list: {line}"
            fates[line] = heading
    return fates


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--all", action="store_true", help="everything that is found, and what becomes of it"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found, fates = inventory(), listed(LIST.read_text())
    if args.all:
        for name in sorted(found):
            print(f"{name:80} {fates.get(name, 'not in the list')}")
    lacking = sorted(found - fates.keys())
    for name in lacking:
        print(f"not in {LIST.name}: {name}")
    for name in sorted(fates.keys() - found):
        print(f"not in this PyTorch: {name}")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
