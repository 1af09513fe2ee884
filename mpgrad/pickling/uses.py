"""Which modules are the user's own, and what a function uses of them: read from its code. Asked by whoever pickles one.

Assumes: code looks into a module by names that stand in the code (`module.name`, `from module import name`); one that is used
    in any other way, such as given to a function, travels with all that is in it.
"""

from __future__ import annotations

import dis
import functools
import importlib.machinery
import importlib.util
import itertools
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cloudpickle import list_registry_pickle_by_value

__all__ = [
    "LIBRARIES",
    "Uses",
    "Wanted",
    "contents_of",
    "is_of_libraries",
    "is_own",
    "is_users",
    "leads_to_libraries",
    "module_of",
    "name_of",
    "uses_in",
    "uses_of",
]

LIBRARIES = {"mpgrad", "torch", "numpy", "cloudpickle"}  # also where they are not installed
KNOWN = LIBRARIES | sys.stdlib_module_names  # packages whose code does as we know, and keeps nothing of the user's
MOST_READ = 16384  # bytes of a pickle: to read more takes longer than what it may save
NAMES = re.compile(rb"(?:\x8c.)?(\w+)", re.DOTALL)  # a short string begins with an opcode and its length
BY_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"}


def is_own(name: str | None) -> bool:
    """Whether the module is the user's own: imported from a file of theirs, or made by them, and not the main script.

    An editable install is; so is what `cloudpickle.register_pickle_by_value` was told of.
    """
    if name is None or name == "__main__" or name not in sys.modules:
        return False
    return stands_outside_libraries(name) or name in list_registry_pickle_by_value()


def is_users(kind: type) -> bool:
    """Whether the class is the user's, also of the main script, or derived from one that is."""
    modules = {each.__module__ for each in kind.__mro__}
    return any(each == "__main__" or each not in sys.modules or is_own(each) for each in modules)


@functools.lru_cache(maxsize=4096)
def stands_outside_libraries(name: str) -> bool:
    """Whether it was neither installed nor belongs to Python, by its file; an extension module cannot be carried."""
    root = name.partition(".")[0]
    files = [file for each in (name, root) if each in sys.modules for file in files_of(sys.modules[each])]
    if root in LIBRARIES or (root in sys.stdlib_module_names and not files):
        return False
    if any(file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)) for file in files):
        return False
    if not files:  # made by hand, unless it belongs to the interpreter
        return getattr(sys.modules[name], "__spec__", None) is None
    return not any(file.startswith(installed()) or "/dist-packages/" in file or "/site-packages/" in file for file in files)


def files_of(module: types.ModuleType) -> list[str]:
    file = getattr(module, "__file__", None)
    return [file] if isinstance(file, str) else [str(path) + "/" for path in getattr(module, "__path__", ())]


@functools.cache
def installed() -> tuple[str, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    return tuple(paths | {*site.getsitepackages(), site.getusersitepackages()})


def is_of_libraries(module: object) -> bool:
    """Whether a module of this name is Python's, PyTorch's or ours."""
    return isinstance(module, str) and module.partition(".")[0] in KNOWN


def module_of(function: types.FunctionType) -> str | None:
    """The module of the user's own whose globals are the function's."""
    name = function.__globals__.get("__name__")
    if not isinstance(name, str) or not is_own(name):
        return None
    return name if vars(sys.modules[name]) is function.__globals__ else None


def name_of(value: Any) -> Wanted | None:
    """Under which name a function or class stands in a module of the user's own."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or not is_own(module):
        return None
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    return Wanted(module, path.partition(".")[0]) if found is value else None


class Wanted(NamedTuple):
    """A name in a module of the user's own."""

    module: str
    name: str | None  # None: all that is in it


class Uses(NamedTuple):
    """What the code of a function, and of those defined in it, does with names."""

    names: frozenset[str]
    loose: frozenset[str]  # names of which not only attributes are used
    imports: frozenset[tuple[str, int, bool]]  # modules, the dots before them, and whether under another name


@functools.lru_cache(maxsize=4096)
def uses_in(code: types.CodeType) -> Uses:
    """Read from the bytecode."""
    loose, imports = set[str](), set[tuple[str, int, bool]]()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for number, step in enumerate(steps[:-1]):
        follower = steps[number + 1]
        if step.opname == "IMPORT_NAME":
            stored = follower.argval if follower.opname.startswith("STORE_") else None
            level = int(steps[number - 2].argval)
            imports.add((step.argval, level, stored not in (None, step.argval.partition(".")[0])))
        elif step.opname == "IMPORT_FROM" and follower.argval != step.argval:
            loose.add(step.argval)
        elif step.opname.startswith("LOAD_") and follower.opname not in BY_ATTRIBUTE:
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # two at a time, from Python 3.13 on
            loose |= {name for name in loaded if isinstance(name, str)}
    inner = [uses_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return Uses(
        frozenset(code.co_names).union(*(each.names for each in inner)),
        frozenset(loose).union(*(each.loose for each in inner)),
        frozenset(imports).union(*(each.imports for each in inner)),
    )


def uses_of(function: types.FunctionType, given: Mapping[str, Any]) -> Iterator[Wanted]:
    """What it uses as attributes of modules of the user's own; `given` are the values of its globals."""
    uses = uses_in(function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: contents for name, cell in cells for contents in contents_of(cell)}
    found: dict[str, bool] = {}  # module -> whether all of it
    for name, value in itertools.chain(given.items(), closure.items()):
        if isinstance(value, types.ModuleType) and is_own(value.__name__):
            found[value.__name__] = found.get(value.__name__, False) or name in uses.loose
    for name, level, renamed in uses.imports:
        full = importlib.util.resolve_name("." * level + name, function.__globals__.get("__package__") or "") if level else name
        for each in itertools.accumulate(full.split("."), "{}.{}".format):
            if is_own(each):
                found[each] = found.get(each, False) or renamed or each.rpartition(".")[2] in uses.loose
    waiting = list(found)
    while waiting:
        module = waiting.pop()
        yield Wanted(module, "__name__")  # the module itself
        if found[module]:
            yield Wanted(module, None)
            continue
        contents = vars(sys.modules[module])
        if "__getattr__" in contents and uses.names - contents.keys():
            yield Wanted(module, "__getattr__")
        for name in uses.names & contents.keys():
            yield Wanted(module, name)
            inner = contents[name]
            if isinstance(inner, types.ModuleType) and is_own(inner.__name__) and inner.__name__ not in found:
                found[inner.__name__] = name in uses.loose
                waiting.append(inner.__name__)


def contents_of(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a cell that is not filled yet: a recursive function while it is defined
        return []


def leads_to_libraries(pickled: bytes) -> bool:
    """Whether it names a package whose code is not in it, and is neither Python's nor PyTorch's; a long one may."""
    return len(pickled) > MOST_READ or names_library(pickled, loaded())


Loaded = tuple[int, str, frozenset[str]]


def loaded() -> Loaded:
    """Another one when something has been imported, or packages that travel by value are others."""
    return len(sys.modules), next(reversed(sys.modules)), frozenset(list_registry_pickle_by_value())


@functools.lru_cache(maxsize=64)  # a function is mapped again and again
def names_library(pickled: bytes, modules: Loaded) -> bool:
    return not libraries(modules).isdisjoint(NAMES.findall(pickled))


@functools.lru_cache(maxsize=1)
def libraries(modules: Loaded) -> frozenset[bytes]:
    """Of those `loaded`."""
    roots = {name.partition(".")[0] for name in list(sys.modules)} - KNOWN - {"__main__"}
    return frozenset(root.encode() for root in roots if not is_own(root))
