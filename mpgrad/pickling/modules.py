"""The parts of the user's modules that code uses are sent, and rebuilt in the worker.

A worker could import these modules, but it would get them as they are on disk, without the caller's
later changes and reloads. So the parts that a function uses are sent by value (`state` makes the
pickle). This module determines these parts from the code. In a worker, or in the caller for a call
that runs there, it puts them back into modules. Only the functions that were sent see these
modules, as their globals or when they `import` them. So each operation has the modules as they were
when it began. Names that were not sent come from the worker's own import.

Code may also find names at run time (by `eval`, `globals()["w"]`, `import __main__`). The code does
not show which names these are. So a function gets the names that its strings mention, then all
other names of its script that can be pickled and are not large. An `UncarriedName` replaces each
remaining name. Any use of it raises an error with the reason why the name is missing. Without it,
`globals().get("w", 0)` would continue with 0.

Assumes: code reads a module by names that are written in the code (`module.name`, `from module
    import name`). A module that is used in another way, for example passed to a function, is sent
    with all its names. So is a user's module whose functions find names at run time. `Lookups`
    handles such functions in scripts and in code that `exec` made.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import dis
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import operator
import os
import re
import site
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from cloudpickle import list_registry_pickle_by_value
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as CLASS_OF
from cloudpickle.cloudpickle import _function_setstate as function_setstate

from mpgrad.environment import PLACE
from mpgrad.errors import contextmanager
from mpgrad.pickling.class_states import ABSENT, ClassStates, place_classes
from mpgrad.pickling.initialized import (
    INITIALIZED,
    CallersNames,
    noted,
    path_of,
    set_initialized,
)

if TYPE_CHECKING:
    from mpgrad.pickling.compiled import GlobalsSnapshot
    from mpgrad.pickling.registrations import RegisteredKind

__all__ = [
    "ABOUT_ITSELF",
    "AS_IMPORTED",
    "KNOWN",
    "PLACED",
    "UNASKED_BYTES",
    "UNCARRIED",
    "WORDS",
    "GlobalsReference",
    "Lookups",
    "MainModule",
    "NameUses",
    "NamesReference",
    "Namespaces",
    "OwnValueReference",
    "SysReference",
    "WantedName",
    "at_path",
    "attribute_here",
    "being_imported",
    "closure_of",
    "contents_of",
    "fill_main",
    "find_in",
    "is_of_libraries",
    "is_own",
    "is_users_own",
    "looks_up",
    "main_of",
    "make_function",
    "mentioned_in",
    "module_of",
    "name_of",
    "own_import",
    "own_imports",
    "own_value",
    "pickle_finds",
    "place_among",
    "reduce_carried",
    "run_initializer",
    "set_function",
    "stands_alone",
    "uses_in",
    "uses_of",
]

# --- the names that code uses; the pickling side calls these functions


LIBRARIES = {"mpgrad", "torch", "numpy", "cloudpickle"}  # even if they are not installed
# packages whose code is known not to store objects of the user
KNOWN = LIBRARIES | sys.stdlib_module_names
BY_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"}


def is_own(name: str | None) -> bool:
    """Whether the module is the user's own, but not the main script.

    Such a module was imported from the user's file, or made by the user. An editable install
    counts, and so does a module that was given to `cloudpickle.register_pickle_by_value`.
    """
    if name is None or name == "__main__" or name not in sys.modules:
        return False
    return stands_outside_libraries(name) or name in list_registry_pickle_by_value()


@functools.lru_cache(maxsize=4096)
def stands_outside_libraries(name: str) -> bool:
    """Whether the module's file is neither installed nor Python's.

    An extension module does not count, because it cannot be pickled.
    """
    root = name.partition(".")[0]
    files = [
        file for each in (name, root) if each in sys.modules for file in files_of(sys.modules[each])
    ]
    if root in LIBRARIES or (root in sys.stdlib_module_names and not files):
        return False
    if any(file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)) for file in files):
        return False
    if not files:  # made by hand, or part of the interpreter
        return getattr(sys.modules[name], "__spec__", None) is None
    return not any(
        file.startswith(installed()) or "/dist-packages/" in file or "/site-packages/" in file
        for file in files
    )


def is_users_own(name: str) -> bool:
    """Whether the module is the user's own, the main script, or a module that `sys.modules` does
    not contain."""
    return name == "__main__" or name not in sys.modules or is_own(name)


def files_of(module: types.ModuleType) -> list[str]:
    file = getattr(module, "__file__", None)
    return (
        [file]
        if isinstance(file, str)
        else [str(path) + "/" for path in getattr(module, "__path__", ())]
    )


@functools.cache
def installed() -> tuple[str, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    return tuple(paths | {*site.getsitepackages(), site.getusersitepackages()})


def is_of_libraries(module: object) -> bool:
    """Whether a module of this name is Python's, PyTorch's or mpgrad's."""
    return isinstance(module, str) and module.partition(".")[0] in KNOWN


def module_of(function: types.FunctionType) -> str | None:
    """Return the name of the user's module whose globals the function uses."""
    name = function.__globals__.get("__name__")
    if not isinstance(name, str) or not is_own(name):
        return None
    return name if vars(sys.modules[name]) is function.__globals__ else None


def name_of(value: Any) -> WantedName | None:
    """Return the name under which a user's module contains a function or class."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or not is_own(module):
        return None
    if at_path(sys.modules[module], path) is not value:
        return None
    return WantedName(module, path.partition(".")[0])


def at_path(found: Any, path: str) -> Any:
    """Return the object at a dotted path in a module, or None if there is no such object."""
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def place_among(value: object, modules: Iterable[str]) -> tuple[str, str] | None:
    """Return the first of these modules that contains the object, and the object's name there."""
    for module in modules:
        for name, held in list(getattr(sys.modules.get(module), "__dict__", {}).items()):
            if held is value:
                return module, name
    return None


class WantedName(NamedTuple):
    """A name in a user's module."""

    module: str
    name: str | None  # None for all names


class NameUses(NamedTuple):
    """How the code of a function, and of functions defined in it, uses names."""

    names: frozenset[str]
    loose: frozenset[str]  # names whose values are used, not only their attributes
    # the module, the number of dots before it, and whether it is renamed
    imports: frozenset[tuple[str, int, bool]]


@functools.lru_cache(maxsize=4096)
def uses_in(code: types.CodeType) -> NameUses:
    """Find the uses of names in the bytecode."""
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
            # Python 3.13 and later may load two names in one instruction.
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            loose |= {name for name in loaded if isinstance(name, str)}
    inner = [
        uses_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    ]
    return NameUses(
        frozenset(code.co_names).union(*(each.names for each in inner)),
        frozenset(loose).union(*(each.loose for each in inner)),
        frozenset(imports).union(*(each.imports for each in inner)),
    )


def uses_of(function: types.FunctionType, given: Mapping[str, Any]) -> Iterator[WantedName]:
    """Yield the names in the user's modules that the function uses.

    `given` are the values of its globals.
    """
    uses = uses_in(function.__code__)
    found: dict[str, bool] = {}  # whether all of the module is used, by module
    for name, value in itertools.chain(given.items(), closure_of(function).items()):
        if isinstance(value, types.ModuleType) and is_own(value.__name__):
            found[value.__name__] = found.get(value.__name__, False) or name in uses.loose
    for name, level, renamed in uses.imports:
        package = function.__globals__.get("__package__") or ""
        full = importlib.util.resolve_name("." * level + name, package)
        for each in itertools.accumulate(full.split("."), "{}.{}".format):
            if is_own(each):
                found[each] = (
                    found.get(each, False) or renamed or each.rpartition(".")[2] in uses.loose
                )
    if names := users_builtins() & mentioned_in(function.__code__):
        yield from [WantedName("builtins", name) for name in names]
    if module_of(function) is not None and not READS_SCRIPT.isdisjoint(ways_in(function.__code__)):
        yield from [WantedName("__main__", name) for name in mentioned_in(function.__code__)]
    waiting = list(found)
    while waiting:
        module = waiting.pop()
        yield WantedName(module, "__name__")  # the module itself
        if found[module]:
            yield WantedName(module, None)
            continue
        contents = vars(sys.modules[module])
        if "__getattr__" in contents and uses.names - contents.keys():
            yield WantedName(module, "__getattr__")
        for name in uses.names & contents.keys():
            yield WantedName(module, name)
            inner = contents[name]
            if (
                isinstance(inner, types.ModuleType)
                and is_own(inner.__name__)
                and inner.__name__ not in found
            ):
                found[inner.__name__] = name in uses.loose
                waiting.append(inner.__name__)


def users_builtins() -> set[str]:
    """Return the names that the user has put into `builtins`, as `gettext.install` does."""
    return {
        name for name, value in list(vars(builtins).items()) if not is_pythons_builtin(name, value)
    }


def is_pythons_builtin(name: str, value: Any) -> bool:
    if name.startswith("__") or any(value is each for each in CONSTANTS):
        return True
    if isinstance(value, type | types.BuiltinFunctionType):
        return value.__module__ in ("builtins", "io", "_io") and name in (value.__name__, *ALIASES)
    return type(value).__module__ == "_sitebuiltins"  # `exit`, for example


CONSTANTS = None, True, False, Ellipsis, NotImplemented
ALIASES = "EnvironmentError", "IOError"  # of OSError


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the values that the function captures, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: contents for name, cell in cells for contents in contents_of(cell)}


def contents_of(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    # the cell is still empty, as in a recursive function that is being defined
    except ValueError:
        return []


# --- names that are found at run time


# a key in the state of a function that looks up names: the names that were not sent, and why
UNCARRIED = "_mpgrad_uncarried"
UNASKED_BYTES = 1 << 20  # the limit for all names together that are not mentioned in a string
BUILTINS = {"eval", "exec", "globals", "__import__"}
ATTRIBUTES = {
    "__globals__",
    "f_globals",
    "get_type_hints",
    "import_module",
    "getmodule",
    "resolve_name",
}
FINDERS = {*(getattr(builtins, name) for name in BUILTINS), importlib.import_module}
# in these modules only these attributes lead to names
LEADING = {"sys": {"modules"}, "builtins": BUILTINS, "pydoc": {"locate"}}
READS_SCRIPT = {"__main__", "sys"}  # by these, a module's function can reach the script
WORDS = re.compile(r"[^\W\d]\w*")


# --- in the caller


@functools.lru_cache(maxsize=4096)
def ways_in(code: types.CodeType) -> frozenset[str]:
    """Return the means by which the code, or the code of inner functions, may look up any name."""
    found = ATTRIBUTES & spelled_in(code)
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found |= {step.argval} & {*BUILTINS, "__main__", "sys"}
        elif step.opname == "IMPORT_NAME":
            found |= {step.argval} & {"__main__", "sys", "builtins", "pydoc"}
    for module, names in LEADING.items():
        if names.isdisjoint(spelled_in(code)):
            found.discard(module)
    return frozenset(
        found.union(*(ways_in(each) for each in code.co_consts if isinstance(each, types.CodeType)))
    )


@functools.lru_cache(maxsize=4096)
def spelled_in(code: types.CodeType) -> set[str]:
    """Return the names of attributes, including those in strings for `getattr`."""
    return {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}


def looks_up(function: types.FunctionType) -> bool:
    """Whether the function finds names at run time by a builtin.

    A method or a script's function that only has the name of such a builtin does not count.
    """
    ways = ways_in(function.__code__)
    if ways and any(way not in BUILTINS or way not in function.__globals__ for way in ways):
        return True
    return any(leads_to_names(value, function.__code__) for value in values_near(function))


def values_near(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of the function's globals, defaults and closure."""
    names = function.__globals__
    yield from [names[each] for each in uses_in(function.__code__).names if each in names]
    yield from [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from closure_of(function).values()


def leads_to_names(value: Any, code: types.CodeType) -> bool:
    kind = type(value)
    if kind is types.ModuleType:
        return not LEADING.get(value.__name__, set()).isdisjoint(spelled_in(code))
    return (kind is types.BuiltinFunctionType or kind is types.FunctionType) and value in FINDERS


@functools.lru_cache(maxsize=4096)
def mentioned_in(code: types.CodeType) -> frozenset[str]:
    """Return the words in the code's strings, and the names of attributes, which may be attributes
    of `__main__`."""
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
    """Whether the namespace is the script's, or was made by `exec`.

    Workers also have the namespaces of other modules.
    """
    module = sys.modules.get(str(namespace.get("__name__")))
    return module is None or module is sys.modules["__main__"] or vars(module) is not namespace


class Lookups:
    """The names of one namespace that the functions of a pickle may look up."""

    def __init__(self, contents: Mapping[str, Any], size: Callable[[Any, int | None], int]) -> None:
        """`size(value, limit)` returns the size of a value's own pickle in bytes.

        It raises OverflowError above the limit, or the error of pickle.
        """
        self._contents = contents
        self._size = size
        self._left = UNASKED_BYTES
        self._carried: set[str] = set()
        self.uncarried: dict[str, str] = {}  # name -> why it is not sent

    def names(self, mentioned: frozenset[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names that a function gets in addition to those in `given`."""
        contents = dict(self._contents)
        for name in contents.keys() - self._carried - given.keys():
            if name in mentioned:
                self._try(name, contents[name], None)
        for name, value in contents.items():
            if (
                name not in self._carried
                and name not in self.uncarried
                and name not in given
                and name != "__builtins__"
            ):
                self._try(name, value, self._left)
        return {
            name: contents[name] for name in contents if name in self._carried and name not in given
        }

    def _try(self, name: str, value: Any, limit: int | None) -> None:
        is_module = issubclass(type(value), types.ModuleType)
        if limit is not None and is_module and is_own(value.__name__):
            self.uncarried[name] = "it is a module of your own, which would be sent as a whole"
            return
        try:
            size = self._size(value, limit)
        except OverflowError:
            self.uncarried[name] = (
                f"names that are not mentioned in a string share {UNASKED_BYTES >> 20} MiB, and it "
                "needs more than is left"
            )
        except Exception as error:
            self.uncarried[name] = f"{type(error).__name__}: {error}"
        else:
            self._left -= 0 if limit is None else size
            self._carried.add(name)
            self.uncarried.pop(name, None)


# --- in the worker


class UncarriedName:
    """Replaces a value that was not sent, for functions that find it by name at run time.

    Any use of it raises an error with the reason. Only `is` and `type` treat it as an ordinary
    object.
    """

    def __init__(self, words: str) -> None:
        object.__setattr__(self, "_words", words)


def refuse(value: Any, *given: Any, **named: Any) -> NoReturn:
    raise TypeError(object.__getattribute__(value, "_words"))


# The methods that Python, its types and its operators call on a value. `repr` still works.
BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
ASKED = (
    *("getattribute", "setattr", "delattr", "dir", "get", "call", "enter", "bool", "hash"),
    *("eq", "lt", "le", "gt", "ge", "reduce_ex", "str", "format", "iter", "next", "reversed"),
    *("len", "contains", "getitem", "setitem", "delitem"),
    *("int", "float", "complex", "index", "neg", "pos", "abs", "invert", "round"),
)
for asked in (*ASKED, *BINARY, *(f"r{each}" for each in BINARY)):
    setattr(UncarriedName, f"__{asked}__", refuse)
del asked


class MainModule(types.ModuleType):
    """The caller's `__main__`, a module whose dictionary is the globals of the functions."""

    def __init__(self, contents: dict[str, Any]) -> None:
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


# Each dictionary has one as long as it is referenced. So `import __main__` and `sys.modules` return
# the same module.
MAINS: weakref.WeakValueDictionary[int, MainModule] = weakref.WeakValueDictionary()


def main_of(contents: dict[str, Any]) -> MainModule:
    return MAINS.get(id(contents)) or MAINS.setdefault(id(contents), MainModule(contents))


class SysModule(types.ModuleType):
    """`sys`, with the caller's `__main__` in its `modules`."""

    def __init__(self, contents: dict[str, Any]) -> None:
        super().__init__("sys")
        object.__setattr__(self, "_contents", contents)

    def __getattribute__(self, name: str) -> Any:
        return (
            Modules(object.__getattribute__(self, "_contents"))
            if name == "modules"
            else getattr(sys, name)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys, name, value)


class SysReference:
    """Represents in the caller the `SysModule` that a worker will make."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self._contents = contents

    def __reduce__(self) -> Any:
        return SysModule, (self._contents,)


class Modules(collections.UserDict[str, types.ModuleType]):
    """`sys.modules` with another `__main__`."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self.data = sys.modules
        self._main = main_of(contents)

    def __getitem__(self, name: str) -> types.ModuleType:
        return self._main if name == "__main__" else self.data[name]


def fill_main(main: MainModule, state: tuple[dict[str, Any], dict[str, str]]) -> None:
    """Add the names that were sent, and the reasons why the others were not."""
    names, uncarried = state
    vars(main).update(names)
    add_uncarried(vars(main), vars(main), uncarried)


def add_uncarried(
    given: dict[str, Any], known: Mapping[str, Any], uncarried: Mapping[str, str]
) -> None:
    """Add an `UncarriedName` for each name that was sent neither by itself nor with a function."""
    for name, reason in uncarried.items():
        if name not in known and name not in given:
            path = f"{known.get('__name__', 'the caller')}.{name}"
            remedy = "name it in the function that looks it up, or pass it"
            given[name] = UncarriedName(f"{path} was not sent to this worker ({reason}); {remedy}")


# --- modules that came from the caller


CARRIED = "_mpgrad_carried"  # in the globals of a module from the caller
ABOUT_ITSELF = "__package__", "__path__", "__file__"  # used by a module's imports
FAILED: dict[str, ImportError] = {}  # imports that failed in this process; they are not retried
# classes that are sent, with the attributes that the import in this process gave them
AS_IMPORTED: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()

# --- in a pickle


class GlobalsReference(NamedTuple):
    """Represents the globals of a module in a pickle."""

    module: str


class NamesReference(NamedTuple):
    """Represents the modules that a pickle is loaded with."""


class OwnValueReference(NamedTuple):
    """Represents a value that cannot be pickled. In the worker it becomes the worker's own
    value."""

    module: str
    name: str  # a path, for an attribute of a class
    type_name: str


# --- in the process that loads the pickle


class Namespaces:
    """The modules of one state (see `mpgrad.pickling.state`)."""

    def __init__(self, placement: GlobalsSnapshot | None = None) -> None:
        # copies of the classes that are sent by value, if this process is the caller's
        self.classes: dict[str, type] | None = None if PLACE.in_worker else {}
        # the copies that are registered with libraries, until no operation has its `RegisteredKind`
        self.registered: dict[type, RegisteredKind] = {}
        self.placement = placement  # if the compiler made some functions
        self.modules: dict[str, CarriedModule] = {}
        # the globals of the main script, if its functions look up names
        self.main: dict[str, Any] | None = None
        # the functions and classes of the main script that arrived, by name
        self.script: dict[str, Any] = {}
        # objects that are one of a kind (`mpgrad.pickling.objects`)
        self.ones: dict[str, Any] = {}
        # first those of the modules, which operations may share; then those of the function and its
        # items
        self.class_states: tuple[ClassStates, ...] = (ClassStates(),)

    def for_operation(self) -> Namespaces:
        """Return a copy with the same modules for another operation, which adds its own classes."""
        view = copy.copy(self)
        view.script, view.ones = dict(self.script), dict(self.ones)
        view.classes = None if self.classes is None else dict(self.classes)
        view.class_states = *self.class_states, ClassStates()
        return view

    def set_class(self, set_state: Callable[[type, Any], None], made: type, state: Any) -> None:
        """Set the state of a received class, for this operation only."""
        states = self.class_states[-1]
        states.take(made)
        set_state(made, state)
        set_initialized(
            path_of(made),
            functools.partial(type.__setattr__, made),
            functools.partial(type.__delattr__, made),
        )

    @functools.cached_property
    def builtins(self) -> dict[str, Any]:
        return {**vars(builtins), "__import__": self._import}

    def begin_again(self, script: Mapping[str, Any]) -> None:
        """Restore the names that a function was loaded with, and this `script`.

        Items may have added names since, and builtins may have changed.
        """
        self.script, self.ones = dict(script), {}
        self.class_states = (ClassStates(),)
        self.builtins.clear()
        self.builtins.update(vars(builtins), __import__=self._import)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """Find the module that a function's `import` names."""
        if self.main is not None and name in ("__main__", "sys"):
            return main_of(self.main) if name == "__main__" else SysModule(self.main)
        package = (globals or {}).get("__package__") or ""
        full = importlib.util.resolve_name("." * level + name, package)
        found = full if fromlist else full.partition(".")[0]
        if full in self.modules and found in self.modules and full not in PROCESS_WIDE:
            return self.modules[found]
        return __import__(name, globals, locals, fromlist or (), level)

    def __enter__(self) -> None:
        """Begin a call that sees these modules.

        In a worker process, code that reads `sys.modules` also sees them.
        """
        PLACED.enter(self)
        if self.placement is not None:
            self.placement.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.placement is not None:
            self.placement.__exit__(*error)
        PLACED.leave()

    def put(self, module: str, names: Mapping[str, Any]) -> None:
        values, contents = dict(names), vars(self.module(module))
        set_initialized((module, ""), values.__setitem__, values.__delitem__)
        contents.update(values)
        if module == "builtins":  # functions use a separate dictionary
            self.builtins.update(values)
        if self.placement is not None:
            self.placement.put(contents, values)

    def module(self, name: str) -> CarriedModule:
        if name not in self.modules:
            self.modules[name] = CarriedModule(name, self.modules)
        return self.modules[name]


# calls find the names that were sent for these in the process's own module, and write to it
PROCESS_WIDE = {"builtins", "__main__"}


def find_in(names: Namespaces, module: str, path: str) -> Any:
    """Find an object as `pickle` does, but in the modules of `names` first."""
    found = names.modules.get(module) or imported(module)
    return operator.attrgetter(path)(found)


def make_function(
    names: Namespaces, code: types.CodeType, own_globals: dict[str, Any], *others: Any
) -> types.FunctionType:
    """Make a function with the builtins of `names`. cloudpickle would use this process's."""
    if names.placement is not None:
        return names.placement.make_function(code, own_globals, *others)
    own_globals["__builtins__"] = names.builtins
    return types.FunctionType(code, own_globals, *others)


def set_function(made: types.FunctionType, state: tuple[Any, Any, Namespaces]) -> None:
    """Set a function's state as cloudpickle does, but keep its builtins, and keep the values that
    an initializer has set here."""
    *own_state, names = state
    uncarried = state[1].pop(UNCARRIED, None)
    if state[1]["__module__"] == "__main__":
        names.script[state[1]["__qualname__"]] = made
        if uncarried is not None:
            names.main = made.__globals__
        names.script.update(
            {
                name: each
                for name, each in state[1]["__globals__"].items()
                if isinstance(each, BY_NAME)
            }
        )
    add_uncarried(state[1]["__globals__"], made.__globals__, uncarried or {})
    if names.placement is not None:
        names.placement.set_state(function_setstate, made, own_state)
        return
    kept = made.__globals__["__builtins__"]
    function_setstate(made, own_state)
    made.__globals__["__builtins__"] = kept  # functions that this one makes inherit them
    if INITIALIZED:
        own = made.__globals__
        set_initialized((own.get("__name__", ""), ""), own.__setitem__, own.__delitem__)
        set_initialized(
            path_of(made), functools.partial(setattr, made), functools.partial(delattr, made)
        )


# pickle looks up objects of these types by name
BY_NAME = types.FunctionType, type, functools._lru_cache_wrapper


def reduce_carried(value: types.FunctionType) -> tuple[Any, ...] | None:
    """Reduce a function by name, because the caller, which gets it back, has it.

    Return None for a function whose module did not come from the caller.
    """
    module = value.__globals__.get(CARRIED)
    if module is None or at_path(module, value.__qualname__) is not value:
        return None
    return named, (module.__name__, value.__qualname__)


def named(module: str, path: str) -> Any:
    return operator.attrgetter(path)(imported(module))


class CarriedModule(types.ModuleType):
    """A module with the names that were sent. Other names are looked up in the worker's own
    import."""

    # These are class attributes, because Python 3.15 warns about globals that contain them without
    # a loader.
    __spec__ = __loader__ = None

    def __init__(self, name: str, modules: Mapping[str, CarriedModule]) -> None:
        super().__init__(name)
        del vars(self)["__spec__"], vars(self)["__loader__"]
        vars(self)[CARRIED] = self
        self._siblings = modules

    def __getattr__(self, name: str) -> Any:
        if (sibling := vars(self)["_siblings"].get(f"{self.__name__}.{name}")) is not None:
            return sibling
        try:
            return getattr(own_import(self.__name__), name)
        except ImportError as error:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}: it was not sent, and this "
                "worker cannot import the module"
            ) from error


def own_value(mark: OwnValueReference) -> Any:
    return left_in_class(mark) if "." in mark.name else left_here(mark)


def left_here(mark: OwnValueReference) -> Any:
    """Return the worker's own value instead of one that could not be pickled."""
    path = f"{mark.module}.{mark.name}"
    try:
        value = getattr(own_import(mark.module), mark.name)
    except (ImportError, AttributeError) as error:
        message = (
            f"{path} cannot be sent ({mark.type_name}), and the worker does not have it; make it "
            "when it is needed"
        )
        raise TypeError(message) from error
    # None means that the value is made when it is needed.
    if value is not None and type(value).__qualname__ != mark.type_name:
        raise TypeError(
            f"{path} was replaced in the caller with a value that cannot be sent "
            f"({mark.type_name}; the worker imports a {type(value).__qualname__}); make it when it "
            "is needed, or in the pool's initializer"
        )
    return value


def left_in_class(mark: OwnValueReference) -> Any:
    """Return the attribute that the worker's import gave a class.

    The class may have another attribute by now, from the caller.
    """
    path, _, name = mark.name.rpartition(".")
    try:
        kind = attribute_here(mark.module, path)
        return AS_IMPORTED.get(kind, vars(kind))[name]
    except (ImportError, AttributeError, KeyError) as error:
        return AbsentAttribute(f"{mark.module}.{mark.name}", f"{type(error).__name__}: {error}")


class AbsentAttribute:
    """Represents an attribute that was not sent and that the worker lacks.

    Reading it raises an error with the reason.
    """

    def __init__(self, path: str, reason: str) -> None:
        self._words = (
            f"{path} cannot be sent to or from a worker, and the worker's own import does not have "
            f"it ({reason})"
        )

    def __get__(self, instance: object, owner: type) -> Any:
        raise TypeError(f"{self._words}; set it where its module defines the class")


# --- `sys.modules` while a call runs


class ModuleOverlay:
    """Shows a call's modules to pickle and to other code that reads `sys.modules`.

    That code would find the modules that this process has imported, and pickle refuses an object if
    its module has a different object under its name. So an imported module temporarily gets the
    names that were sent. A module that this process cannot import is replaced with the received
    one. The main module also finds the names of the script.

    Calls of one operation follow each other. So the names stay in place until a call of another
    operation begins, or until the imports themselves are needed.

    Assumes: one thread runs calls. Engines in the caller's process place nothing, because its
        modules are the caller's.
    """

    def __init__(self) -> None:
        self._running: list[Namespaces] = []  # nested calls
        self._current: Namespaces | None = None
        # for each module, its dictionary and its own values of the replaced names
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._added: list[str] = []
        # the thread that runs the calls of a worker process; a task may have its own threads
        self._thread = 0

    def begin(self) -> None:
        """Record that this process is a worker, and that this thread runs its calls."""
        self._thread = threading.get_ident()
        vars(sys.modules["__main__"])["__getattr__"] = self.in_script

    def enter(self, names: Namespaces) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(names)
            self._place(names)
            place_classes(names.class_states)

    def leave(self) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()
            if self._running:
                self._place(self._running[-1])
                place_classes(self._running[-1].class_states)

    def take_back(self, names: Namespaces | None = None) -> None:
        """Restore the modules as this process has imported them.

        If `names` is given, do so only if it is in place.
        """
        if names is not None and names is not self._current:
            return
        for contents, values in self._replaced:
            for name, value in values.items():
                if value is ABSENT:
                    contents.pop(name, None)
                else:
                    contents[name] = value
        for name in self._added:
            sys.modules.pop(name, None)
        self._replaced.clear()
        self._added.clear()
        self._current = None

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        before = self._current
        self.take_back()
        try:
            yield
        finally:
            if before is not None:
                self._place(before)

    def hides(self, module: str, name: str) -> bool:
        """Whether the value under this name came with a call."""
        contents = vars(sys.modules[module]) if module in sys.modules else {}
        own = next((values for each, values in self._replaced if each is contents), {})
        return module in self._added or (name in own and own[name] is not contents.get(name))

    def in_script(self, name: str) -> Any:
        """Find a name among the globals of the call's functions. This is the `__getattr__` of the
        module `__main__`."""
        current = self._current
        if current is not None and name in current.script:
            return current.script[name]
        if current is not None and current.main is not None and name in current.main:
            return current.main[name]
        for kind in reversed(list(CLASS_OF.values())):
            if (kind.__module__, kind.__qualname__) == ("__main__", name):
                return kind
        # multiprocessing's child processes, which a task may start, run this file again
        if name == "__file__" and current is not None:
            files = {
                each.__code__.co_filename
                for each in current.script.values()
                if isinstance(each, types.FunctionType)
            }
            if len(files) == 1 and os.path.isfile(file := files.pop()):
                return file
        raise AttributeError(
            f"module '__main__' has no attribute {name!r} (a call has only the names of the script "
            "that its functions use)"
        )

    def _place(self, names: Namespaces) -> None:
        if names is self._current:
            return
        self.take_back()
        self._current = names
        for name, carried in names.modules.items():
            if name in sys.modules:
                contents = vars(sys.modules[name])
                given = {
                    each: value for each, value in vars(carried).items() if each not in OF_MODULES
                }
                self._replaced.append(
                    (contents, {each: contents.get(each, ABSENT) for each in given})
                )
                contents.update(given)
            elif name in FAILED:
                sys.modules[name] = carried
                self._added.append(name)


OF_MODULES = {*vars(types.ModuleType("")), *ABOUT_ITSELF, "__builtins__", CARRIED, "_siblings"}
PLACED = ModuleOverlay()


# --- the initializer


def run_initializer(
    initializer: Callable[..., Any],
    arguments: Sequence[Any],
    functions: Sequence[types.FunctionType],
    names: CallersNames | None,
) -> None:
    """Run the initializer. The values that it sets in a worker process stay there.

    `functions` were loaded with it. `names` are the caller's names.
    """
    if names is None or not PLACE.in_worker:  # the globals are the caller's
        initializer(*arguments)
        return
    for name in names.imports:
        with contextlib.suppress(Exception):  # the initializer will get this error itself
            imported(name)
    named = {
        path: {name: at_path(sys.modules.get(module), of) for name, (module, of) in of_path.items()}
        for path, of_path in names.aliases.items()
    }
    for path, values in names.values.items():
        named.setdefault(path, {}).update(values)
    modules = [(name, vars(module)) for name, module in list(sys.modules.items()) if is_own(name)]
    modules.append(("__main__", vars(sys.modules["__main__"])))
    known = {id(contents) for _, contents in modules}
    for each in functions:
        if id(each.__globals__) not in known:
            known.add(id(each.__globals__))
            modules.append((each.__globals__.get("__name__", ""), each.__globals__))
    noted(functools.partial(initializer, *arguments), modules, functions, named)


# --- the imports of this process


def imported(name: str) -> types.ModuleType:
    """Import a module as an import statement does.

    In Python 3.10, `importlib.import_module` would wait for a thread that was importing the module
    when the worker was forked.
    """
    if pickle_finds(name) or name not in sys.modules:
        __import__(name)
    return sys.modules[name]


def pickle_finds(module: str) -> bool:
    """Whether `import` finds a module that `sys.modules` contains.

    It does not find a module that is named `plug.d.e` and has no parent, or one named `x.py`.
    """
    return module.partition(".")[0] in sys.modules and module != ""


def being_imported() -> frozenset[str]:
    """Return the names of the modules whose import made this call."""
    found, frame = set(), inspect.currentframe()
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        if frame.f_code.co_name == "<module>" and getattr(spec, "_initializing", False):
            found.add(str(frame.f_globals["__name__"]))
        frame = frame.f_back
    return frozenset(found)


def own_import(name: str) -> types.ModuleType:
    """Return the module as this process imports it.

    Raises:
        ImportError: it cannot be imported.
    """
    from mpgrad.torch_state.private import (
        # This is imported late, to avoid a circular import by way of `errors` and `classes`.
        outside_transforms,
    )

    if name in FAILED:
        raise FAILED[name]
    # another thread may be importing it and waiting for this one
    if name in sys.modules and not PLACE.in_worker:
        return sys.modules[name]
    try:
        # a task may be running under other modes
        with outside_transforms(), torch.inference_mode(False), torch.enable_grad():
            return imported(name)
    except Exception as error:
        FAILED[name] = failed = ImportError(
            f"a worker cannot import {name}: {type(error).__name__}: {error}", name=name
        )
        raise failed from error


def attribute_here(module: str, path: str) -> Any:
    return operator.attrgetter(path)(own_import(module))


def own_imports(names: Iterable[str]) -> None:
    """Import modules for the effects of their import, such as registrations.

    If an import fails, functions that do not need the module still run.
    """
    for name in names:
        # the error is kept in `FAILED`, and raised when the module is needed
        with contextlib.suppress(ImportError):
            own_import(name)
