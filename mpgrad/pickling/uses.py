"""What a function uses by name: of modules that are the user's own, read from its code; and, where
it finds names at run time (by `eval`, `globals()["w"]`, `import __main__`), of its script. Asked by
whoever pickles one; the last part runs in the worker.

Which names are found at run time, nobody can read from the code. So such a function gets those that
its strings mention, and then all names of its module, as far as they can be carried and are not
large. Its globals know of the others: to look one up raises an error that says why, where a plain
dictionary would say that there is none, and `globals().get("w", 0)` would go on with 0. To go
through the values of all names raises it too.

Assumes: code looks into a module by names that stand in the code (`module.name`, `from module
    import name`); one that is used in any other way, such as given to a function, travels with all
    that is in it. A module of the user's own has all its names (`mpgrad.pickling.state`); lookups
    at run time are seen to for scripts, and for code that was made by `exec`.
"""

from __future__ import annotations

import builtins
import collections
import dis
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import re
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from cloudpickle import list_registry_pickle_by_value

__all__ = [
    "LIBRARIES",
    "UNASKED_BYTES",
    "CarriedGlobals",
    "Lookups",
    "SysOf",
    "Uses",
    "Wanted",
    "contents_of",
    "fill_main",
    "is_of_libraries",
    "is_own",
    "is_users",
    "leads_to_libraries",
    "looks_up",
    "main_of",
    "mentioned_in",
    "module_of",
    "name_of",
    "stands_alone",
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


# --- names that are found at run time


UNASKED_BYTES = 1 << 20  # of names that no string mentions, all together
BUILTINS = {"eval", "exec", "globals", "__import__"}
ATTRIBUTES = {"__globals__", "f_globals", "get_type_hints", "import_module", "getmodule", "resolve_name"}
FINDERS = {*(getattr(builtins, name) for name in BUILTINS), importlib.import_module}
LEADING = {"sys": {"modules"}, "builtins": BUILTINS, "pydoc": {"locate"}}  # of whose attributes only these lead to names
WORDS = re.compile(r"[^\W\d]\w*")


# --- in the caller


@functools.lru_cache(maxsize=4096)
def ways_in(code: types.CodeType) -> frozenset[str]:
    """By which the code, or that of functions defined in it, may look up any name."""
    found = ATTRIBUTES & spelled_in(code)
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found |= {step.argval} & {*BUILTINS, "__main__", "sys"}
        elif step.opname == "IMPORT_NAME":
            found |= {step.argval} & {"__main__", "sys", "builtins", "pydoc"}
    for module, names in LEADING.items():
        if names.isdisjoint(spelled_in(code)):
            found.discard(module)
    return frozenset(found.union(*(ways_in(each) for each in code.co_consts if isinstance(each, types.CodeType))))


@functools.lru_cache(maxsize=4096)
def spelled_in(code: types.CodeType) -> set[str]:
    """Names of attributes, also as strings for `getattr`."""
    return {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}


def looks_up(function: types.FunctionType) -> bool:
    """Whether it finds names at run time: by a builtin, and not by a method or a function of the script that is called so."""
    ways = ways_in(function.__code__)
    if ways and any(way not in BUILTINS or way not in function.__globals__ for way in ways):
        return True
    return any(leads_to_names(value, function.__code__) for value in values_near(function))


def values_near(function: types.FunctionType) -> Iterator[Any]:
    """What it has by a name of its own."""
    names = function.__globals__
    yield from [names[each] for each in uses_in(function.__code__).names if each in names]
    yield from [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        yield from contents_of(cell)


def leads_to_names(value: Any, code: types.CodeType) -> bool:
    kind = type(value)
    if kind is types.ModuleType:
        return not LEADING.get(value.__name__, set()).isdisjoint(spelled_in(code))
    return (kind is types.BuiltinFunctionType or kind is types.FunctionType) and value in FINDERS


@functools.lru_cache(maxsize=4096)
def mentioned_in(code: types.CodeType) -> frozenset[str]:
    """Words of its strings, and names of attributes, which may be those of `__main__`."""
    found = set(code.co_names)
    waiting = list(code.co_consts)
    while waiting:
        each = waiting.pop()
        if isinstance(each, types.CodeType):
            found |= mentioned_in(each)
        elif isinstance(each, str):
            found.update(WORDS.findall(each))
        elif isinstance(each, tuple | frozenset):
            waiting += each
    return frozenset(found)


def stands_alone(namespace: Mapping[str, Any]) -> bool:
    """Whether the script has it, or `exec` made it: those of other modules are the worker's own, too."""
    module = sys.modules.get(str(namespace.get("__name__")))
    return module is None or module is sys.modules["__main__"] or vars(module) is not namespace


class Lookups:
    """The names of one namespace, for the functions in a pickle that may look them up."""

    def __init__(self, contents: Mapping[str, Any], size: Callable[[Any, int | None], int]) -> None:
        """`size(value, limit)`: bytes of a value by itself; raises OverflowError above the limit, or what pickle says."""
        self._contents = contents
        self._size = size
        self._left = UNASKED_BYTES
        self._carried: set[str] = set()
        self.uncarried: dict[str, str] = {}  # and why

    def names(self, mentioned: frozenset[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """What a function gets beside what it is `given`."""
        contents = dict(self._contents)
        for name in contents.keys() - self._carried - given.keys():
            if name in mentioned:
                self._try(name, contents[name], None)
        for name, value in contents.items():
            if name not in self._carried and name not in self.uncarried and name not in given and name != "__builtins__":
                self._try(name, value, self._left)
        return {name: contents[name] for name in contents if name in self._carried and name not in given}

    def _try(self, name: str, value: Any, limit: int | None) -> None:
        if limit is not None and isinstance(value, types.ModuleType) and not is_library(value):
            self.uncarried[name] = "it is a module of your own, all of which would travel"
            return
        try:
            size = self._size(value, limit)
        except OverflowError:
            self.uncarried[name] = f"names that no string mentions have {UNASKED_BYTES >> 20} MiB together, and it has more"
        except Exception as error:
            self.uncarried[name] = f"{type(error).__name__}: {error}"
        else:
            self._left -= 0 if limit is None else size
            self._carried.add(name)
            self.uncarried.pop(name, None)


def is_library(module: types.ModuleType) -> bool:
    return not is_own(module.__name__)


# --- and in the worker


class CarriedGlobals(dict[str, Any]):
    """The globals of functions that look up names: knows of those that did not come along."""

    def __init__(self, contents: Mapping[str, Any] | None = None, uncarried: dict[str, str] | None = None) -> None:
        super().__init__(contents or {})
        self.uncarried = {} if uncarried is None else uncarried
        self._builtins: CarriedBuiltins | None = None

    def builtins(self, contents: Mapping[str, Any]) -> CarriedBuiltins:
        """For all functions that have these globals, with the builtins of this process."""
        if self._builtins is None:
            self._builtins = CarriedBuiltins(contents, self)
        return self._builtins

    def __reduce__(self) -> Any:
        return CarriedGlobals, (dict(super().items()), self.uncarried)

    def own(self, name: str, otherwise: Any) -> Any:
        return super().get(name, otherwise)

    def check(self, name: object) -> None:
        if name in self.uncarried and not super().__contains__(name):
            path = f"{self.own('__name__', 'the caller')}.{name}"
            remedy = "name it in the function that looks it up, or pass it"
            raise TypeError(f"{path} was not carried to this worker ({self.uncarried[str(name)]}); {remedy}")

    def __missing__(self, name: str) -> Any:
        self.check(name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.check(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.check(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self.check(name)
        return super().setdefault(name, default)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.uncarried

    def __iter__(self) -> Iterator[str]:
        return iter([*super().keys(), *(self.uncarried.keys() - super().keys())])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def keys(self) -> Any:
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    def copy(self) -> Any:
        return {name: self[name] for name in self}


class CarriedBuiltins(dict[str, Any]):
    """Asked last for a name, also by what `eval` runs, which asks dictionaries without their methods."""

    def __init__(self, contents: Mapping[str, Any], carried: CarriedGlobals) -> None:
        super().__init__(contents)
        self._carried = carried
        self._import = contents["__import__"]
        if carried.own("__name__", "") == "__main__":
            self["__import__"] = self._import_here

    def __missing__(self, name: str) -> Any:
        self._carried.check(name)
        raise KeyError(name)

    def _import_here(self, name: str, *others: Any, **more: Any) -> Any:
        if name == "sys":
            return CarriedSys(self._carried)
        return main_of(self._carried) if name == "__main__" else self._import(name, *others, **more)


class CarriedMain(types.ModuleType):
    """The caller's `__main__`: what functions have as their globals, as a module."""

    def __init__(self, contents: CarriedGlobals) -> None:
        super().__init__("__main__")
        object.__setattr__(self, "_contents", contents)

    def __getattribute__(self, name: str) -> Any:
        contents = object.__getattribute__(self, "_contents")
        if name == "__dict__":
            return contents
        if name in contents:
            return contents[name]
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_contents")[name] = value


class CarriedSys(types.ModuleType):
    """`sys`, whose `modules` have the caller's `__main__`."""

    def __init__(self, contents: CarriedGlobals) -> None:
        super().__init__("sys")
        object.__setattr__(self, "_contents", contents)

    def __getattribute__(self, name: str) -> Any:
        return Modules(object.__getattribute__(self, "_contents")) if name == "modules" else getattr(sys, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys, name, value)


class SysOf:
    """Stands for one in the caller."""

    def __init__(self, contents: CarriedGlobals) -> None:
        self._contents = contents

    def __reduce__(self) -> Any:
        return CarriedSys, (self._contents,)


class Modules(collections.UserDict[str, types.ModuleType]):
    """`sys.modules`, with another `__main__`."""

    def __init__(self, contents: CarriedGlobals) -> None:
        self.data = sys.modules
        self._main = main_of(contents)

    def __getitem__(self, name: str) -> types.ModuleType:
        return self._main if name == "__main__" else self.data[name]


def main_of(contents: CarriedGlobals) -> CarriedMain:
    found = vars(contents).get("main")
    if found is None:
        found = vars(contents)["main"] = CarriedMain(contents)
    return found


def fill_main(main: CarriedMain, contents: Mapping[str, Any]) -> None:
    vars(main).update(contents)
