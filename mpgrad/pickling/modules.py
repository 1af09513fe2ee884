"""The user's own modules, put together again where they arrive: in a worker, or in the caller for a call that runs there.

A worker could import them, but would have them as they are on disk: without what the caller has set or reloaded since.
So what a function uses of them (`uses`) travels by value (`state` makes the pickle). Here it is put into modules again, which
only the functions that came along see, as their globals or when they `import` them: each operation has the modules as they
were when it began. What did not travel is the worker's own import's.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as CLASS_OF
from cloudpickle.cloudpickle import _function_setstate as function_setstate

from mpgrad.environment import PLACE
from mpgrad.errors import contextmanager
from mpgrad.pickling.uses import CarriedGlobals, is_own, uses_in

if TYPE_CHECKING:
    from mpgrad.pickling.compiled import Placement

__all__ = [
    "ABOUT_ITSELF",
    "AS_IMPORTED",
    "LIVE",
    "NAMES_HERE",
    "PLACED",
    "GlobalsOf",
    "LeftOf",
    "Live",
    "Mark",
    "NamesHere",
    "Namespaces",
    "attribute_here",
    "find_in",
    "make_function",
    "own_import",
    "own_imports",
    "pickle_finds",
    "reduce_carried",
    "run_initializer",
    "set_function",
]

CARRIED = "_mpgrad_carried"  # among the globals of a module that came from the caller
ABOUT_ITSELF = "__package__", "__path__", "__file__"  # what a module's imports look at
FAILED: dict[str, ImportError] = {}  # own imports that are not tried again
AS_IMPORTED: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()  # classes that travel, too

# --- on their way


class GlobalsOf(NamedTuple):
    """Stands in a pickle for the globals of a module."""

    module: str


class NamesHere:
    """Stands in a pickle, as NAMES_HERE, for the modules that it is loaded with."""


NAMES_HERE = ""


class LeftOf(NamedTuple):
    """Stands in a pickle for a value that cannot be carried: the worker's own is meant."""

    module: str
    name: str  # of an attribute of a class: a path
    type_name: str


Mark = str | GlobalsOf | LeftOf  # a string: a module


# --- and where they arrive


class Live:
    """The modules of this process.

    `classes`: what the process has of the classes that travel by value, where it is the caller's; elsewhere None.
    """

    modules: Mapping[str, CarriedModule] = {}  # that are not those of this process

    def __init__(self, classes: dict[str, type] | None = None, placement: Placement | None = None) -> None:
        self.classes = classes
        self.placement = placement  # where there are functions that the compiler made

    def resolve(self, mark: Mark) -> Any:
        module = imported(mark if isinstance(mark, str) else mark.module)
        if isinstance(mark, str):
            return module
        return getattr(module, mark.name) if isinstance(mark, LeftOf) else vars(module)


LIVE = Live()


class Namespaces(Live):
    """The modules of one state, see `mpgrad.pickling.state`."""

    def __init__(self, placement: Placement | None = None) -> None:
        super().__init__(None if PLACE.in_worker else {}, placement)
        self.modules: dict[str, CarriedModule] = {}
        self.main: CarriedGlobals | None = None  # of the main script, if its functions look names up
        self.script: dict[str, Any] = {}  # the functions and classes of the main script that came along, by name

    @functools.cached_property
    def builtins(self) -> dict[str, Any]:
        return {**vars(builtins), "__import__": self._import}

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """What the `import` of a function finds."""
        full = importlib.util.resolve_name("." * level + name, (globals or {}).get("__package__") or "") if level else name
        found = full if fromlist else full.partition(".")[0]
        if full in self.modules and found in self.modules:
            return self.modules[found]
        return __import__(name, globals, locals, fromlist or (), level)

    def __enter__(self) -> None:
        """A call begins that sees them. In a worker's process, what looks into `sys.modules` sees them too."""
        PLACED.enter(self)
        if self.placement is not None:
            self.placement.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.placement is not None:
            self.placement.__exit__(*error)
        PLACED.leave()

    def find(self, module: str, path: str) -> Any:
        found: Any = self.modules[module]
        for part in path.split("."):
            found = getattr(found, part)
        return found

    def put(self, module: str, names: Mapping[str, Any]) -> None:
        values, contents = {**names, **set_by_initializer(module, names)}, vars(self.module(module))
        contents.update(values)
        if self.placement is not None:
            self.placement.put(contents, values)

    def module(self, name: str) -> CarriedModule:
        if name not in self.modules:
            self.modules[name] = CarriedModule(name, self.modules)
        return self.modules[name]

    def resolve(self, mark: Mark) -> Any:
        if isinstance(mark, LeftOf):
            return left_in_class(mark) if "." in mark.name else left_here(mark)
        return self.module(mark) if isinstance(mark, str) else vars(self.module(mark.module))


def find_in(names: Live, module: str, path: str) -> Any:
    """What `pickle` would look for in `sys.modules`."""
    if isinstance(names, Namespaces) and module in names.modules:
        return names.find(module, path)
    return named(module, path)


def make_function(names: Live, code: types.CodeType, own_globals: dict[str, Any], *others: Any) -> types.FunctionType:
    """cloudpickle would give it the builtins of this process."""
    if names.placement is not None:
        return names.placement.make_function(code, own_globals, *others)
    found = names.builtins if isinstance(names, Namespaces) else vars(builtins)
    if isinstance(own_globals, CarriedGlobals):
        found = own_globals.builtins(found)
    own_globals["__builtins__"] = found
    return types.FunctionType(code, own_globals, *others)


def set_function(made: types.FunctionType, state: tuple[Any, Any, Live]) -> None:
    """As cloudpickle does, but with the builtins that it has; what an initializer has set here stays."""
    *own_state, names = state
    if state[1]["__module__"] == "__main__" and isinstance(names, Namespaces):
        names.script[state[1]["__qualname__"]] = made
        if isinstance(made.__globals__, CarriedGlobals):
            names.main = made.__globals__
        names.script.update({name: each for name, each in state[1]["__globals__"].items() if isinstance(each, BY_NAME)})
    if names.placement is not None:
        names.placement.set_state(function_setstate, made, own_state)
        return
    kept, given = made.__globals__["__builtins__"], state[1]["__globals__"]
    function_setstate(made, own_state)
    made.__globals__["__builtins__"] = kept  # functions that this one makes get them
    if INITIALIZED:
        made.__globals__.update(set_by_initializer(made.__globals__.get("__name__", ""), given))


BY_NAME = types.FunctionType, type, functools._lru_cache_wrapper  # pickle takes these for what stands under their names


def reduce_carried(value: types.FunctionType) -> tuple[Any, ...] | None:
    """A function on its way back to the caller, who has it; None for one that is not of a module that came from there."""
    module = value.__globals__.get(CARRIED)
    return (named, (module.__name__, value.__qualname__)) if module is not None and stands_in(module, value) else None


def stands_in(module: types.ModuleType, value: Any) -> bool:
    """Whether it is what stands in the module under its own name."""
    found: Any = module
    for part in value.__qualname__.split("."):
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    return found is value


def named(module: str, path: str) -> Any:
    return operator.attrgetter(path)(imported(module))


class CarriedModule(types.ModuleType):
    """What travelled of a module; what did not is looked for in the worker's own import."""

    def __init__(self, name: str, modules: Mapping[str, CarriedModule]) -> None:
        super().__init__(name)
        vars(self)[CARRIED] = self
        self._siblings = modules

    def __getattr__(self, name: str) -> Any:
        if (sibling := vars(self)["_siblings"].get(f"{self.__name__}.{name}")) is not None:
            return sibling
        try:
            return getattr(own_import(self.__name__), name)
        except ImportError as error:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}: not carried, and this worker cannot import the module"
            ) from error


def left_here(mark: LeftOf) -> Any:
    """The worker's own value, in the place of one that could not be carried."""
    path = f"{mark.module}.{mark.name}"
    try:
        value = getattr(own_import(mark.module), mark.name)
    except (ImportError, AttributeError) as error:
        message = f"{path} cannot be carried ({mark.type_name}), and the worker has none; make it when it is needed"
        raise TypeError(message) from error
    if value is not None and type(value).__qualname__ != mark.type_name:  # None: it is to be made when it is needed
        raise TypeError(
            f"{path} was replaced in the caller by what cannot be carried ({mark.type_name}; the worker imports a "
            f"{type(value).__qualname__}); make it when it is needed, or in the pool's initializer"
        )
    return value


def left_in_class(mark: LeftOf) -> Any:
    """The attribute that a class has as the worker imported it: the caller may have set another one since."""
    path, _, name = mark.name.rpartition(".")
    try:
        kind = attribute_here(mark.module, path)
        return AS_IMPORTED.get(kind, vars(kind))[name]
    except (ImportError, AttributeError, KeyError) as error:
        return NotHere(f"{mark.module}.{mark.name}", f"{type(error).__name__}: {error}")


class NotHere:
    """Stands for an attribute that was not carried, and is none of the worker's own: who wants it is told."""

    def __init__(self, path: str, reason: str) -> None:
        self._words = f"{path} cannot be carried to or from a worker, and the worker's own import has none ({reason})"

    def __get__(self, instance: object, owner: type) -> Any:
        raise TypeError(f"{self._words}; make it where its module defines the class")


# --- what `sys.modules` has while a call runs


class Placed:
    """What pickle and the like find in this process's modules while a call runs: what its functions find.

    Whatever looks into `sys.modules` would see what this process has imported, and pickle refuses what is not the same object
    under its name there. So a module that this process has imported holds for a while what travelled. One that it cannot import
    is the carried one, and the main module gives what it is asked for of the script. Calls of one operation follow each other:
    all stays until another operation's begin, or the imports are wanted.

    Assumes: one thread runs calls. Engines in the caller's process place nothing, for its modules are the caller's.
    """

    def __init__(self) -> None:
        self._running: list[Namespaces] = []  # one within another
        self._current: Namespaces | None = None
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each module what it holds by itself
        self._added: list[str] = []
        self._thread = 0  # that runs the calls of a worker's process; a task may have a pool of threads

    def begin(self) -> None:
        """This process, and this thread of it, is a worker's."""
        self._thread = threading.get_ident()
        vars(sys.modules["__main__"])["__getattr__"] = self.in_script

    def enter(self, names: Namespaces) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(names)
            self._place(names)

    def leave(self) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()
            if self._running:
                self._place(self._running[-1])

    def take_back(self, names: Namespaces | None = None) -> None:
        """Have the modules as this process has imported them; `names`: only where these are placed."""
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
        """Whether what stands there came with a call."""
        contents = vars(sys.modules[module]) if module in sys.modules else {}
        own = next((values for each, values in self._replaced if each is contents), {})
        return module in self._added or (name in own and own[name] is not contents.get(name))

    def in_script(self, name: str) -> Any:
        """`__getattr__` of the module `__main__`: what a call's functions have in the caller's."""
        current = self._current
        if current is not None and name in current.script:
            return current.script[name]
        if current is not None and current.main is not None and name in current.main:
            return current.main[name]
        for kind in reversed(list(CLASS_OF.values())):
            if (kind.__module__, kind.__qualname__) == ("__main__", name):
                return kind
        if name == "__file__" and current is not None:  # programs of multiprocessing that a task starts run it once more
            files = {each.__code__.co_filename for each in current.script.values() if isinstance(each, types.FunctionType)}
            if len(files) == 1 and os.path.isfile(file := files.pop()):
                return file
        raise AttributeError(f"module '__main__' has no attribute {name!r} (a call has what its functions use of the script)")

    def _place(self, names: Namespaces) -> None:
        if names is self._current:
            return
        self.take_back()
        self._current = names
        for name, carried in names.modules.items():
            if name in sys.modules:
                contents = vars(sys.modules[name])
                given = {each: value for each, value in vars(carried).items() if each not in OF_MODULES}
                self._replaced.append((contents, {each: contents.get(each, ABSENT) for each in given}))
                contents.update(given)
            elif name in FAILED:
                sys.modules[name] = carried
                self._added.append(name)


ABSENT = object()
OF_MODULES = {*vars(types.ModuleType("")), *ABOUT_ITSELF, "__builtins__", CARRIED, "_siblings"}
PLACED = Placed()


# --- what an initializer sets in a worker


INITIALIZED: dict[str, dict[str, Any]] = {}  # by module


def run_initializer(initializer: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Globals that it sets in a worker process stay as they are there: it was for that, most of the time, that it was given."""
    if not PLACE.in_worker:  # they are the caller's
        initializer(*arguments)
        return
    inner = initializer
    while isinstance(inner, functools.partial | types.MethodType):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    for name, level, _ in uses_in(inner.__code__).imports if isinstance(inner, types.FunctionType) else ():
        if not level:
            with contextlib.suppress(ImportError):  # the initializer will find out
                imported(name)
    places = {name: vars(module) for name, module in list(sys.modules.items()) if is_own(name)}
    if isinstance(inner, types.FunctionType):
        places.setdefault(inner.__module__, inner.__globals__)
    before = {name: (dict(contents), inside(contents)) for name, contents in places.items()}
    initializer(*arguments)
    for name, contents in places.items():
        values, insides = before[name]
        now = inside(contents)
        changed = [each for each in contents if contents[each] is not values.get(each, before) or now[each] != insides[each]]
        if changed := [each for each in changed if not each.startswith("__")]:
            INITIALIZED[name] = {each: contents[each] for each in changed}


def inside(contents: Mapping[str, Any]) -> dict[str, list[int]]:
    """Which objects each of the values holds."""
    return {name: list(map(id, held_in(value))) for name, value in contents.items()}


def held_in(value: Any) -> Iterable[Any]:
    if isinstance(value, list | set | dict):
        return [*value, *value.values()] if isinstance(value, dict) else value
    attributes = getattr(value, "__dict__", None)
    is_code = isinstance(value, types.ModuleType | type | types.FunctionType)
    return tuple(attributes.values()) if isinstance(attributes, dict) and not is_code else ()


def set_by_initializer(module: str, names: Iterable[str]) -> dict[str, Any]:
    found = INITIALIZED.get(module, {})
    return {name: found[name] for name in names if name in found}


# --- the imports of this process


def imported(name: str) -> types.ModuleType:
    """As by an import statement. importlib's way, in Python 3.10, waits for who was importing the module at a worker's fork."""
    if pickle_finds(name) or name not in sys.modules:
        __import__(name)
    return sys.modules[name]


def pickle_finds(module: str) -> bool:
    """Whether `import` finds a module that is there: not one that is named `plug.d.e` and has no parent, or `x.py`."""
    return module.partition(".")[0] in sys.modules and module != ""


def own_import(name: str) -> types.ModuleType:
    """The module as this process imports it.

    Raises:
        ImportError: it cannot.
    """
    from mpgrad.torch_state.private import (
        outside_transforms,  # late: it imports errors, which are carried like classes, which import us
    )

    if name in FAILED:
        raise FAILED[name]
    if name in sys.modules and not PLACE.in_worker:  # perhaps it is being imported, by whoever waits for us
        return sys.modules[name]
    try:
        with outside_transforms(), torch.inference_mode(False), torch.enable_grad():  # a task may be running
            return imported(name)
    except Exception as error:
        FAILED[name] = failed = ImportError(f"a worker cannot import {name}: {type(error).__name__}: {error}", name=name)
        raise failed from error


def attribute_here(module: str, path: str) -> Any:
    return operator.attrgetter(path)(own_import(module))


def own_imports(names: Iterable[str]) -> None:
    """For what modules do when they are imported, such as to register something; functions that need none of it go without."""
    for name in names:
        try:
            own_import(name)
        except ImportError:
            continue  # it is kept, and raised as soon as something of the import is wanted
