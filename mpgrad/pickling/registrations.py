"""A user's class is sent with its registrations in Python, PyTorch and other packages. Both sides
use this module.

    caller   registered_for(kind) ──► the class's state ──► register(kind, found)   worker
                                           copies, in the caller's process: RegisteredKind
Libraries keep registrations in their own tables. A worker that imports a library does not get
the caller's entries. Without them `isinstance` would be false there, and `torch.func` would find
different leaves. To send the entries of another table, add a row to `REGISTRIES`: how to look a
class up in the caller, how to register it in a worker, and how to forget a copy of a class.

Guarantees: registrations are only added, and those of a copy last as long as operations use it.
    Classes of libraries are never registered.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import gc
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from mpgrad.pickling.class_states import attributes_of_members, set_members
from mpgrad.pickling.modules import is_users_own
from mpgrad.torch_state.private import (
    KL_FUNCTIONS,
    KL_MEMO,
    forget_pytree_node,
    pytree_node,
    remove_safe_globals,
    set_pytree_node,
)

__all__ = ["Accessors", "RegisteredKind", "accessors_named", "register", "registered_for"]


class Registry(NamedTuple):
    """A table of registrations."""

    look: Callable[[type], Any]  # in the caller; returns an entry to pickle, or a false value
    register: Callable[[type, Any], None]  # in the worker
    forget: Callable[[type], Any]  # nothing, if the table keeps no class alive


def registered_for(kind: type) -> dict[str, Any]:
    """Return the registrations of a user's class, by the names in `REGISTRIES`."""
    found = {name: registry.look(kind) for name, registry in REGISTRIES.items()}
    return {name: each for name, each in found.items() if each}


def register(kind: type, found: dict[str, Any]) -> None:
    for name, each in found.items():
        REGISTRIES[name].register(kind, each)


class RegisteredKind:
    """Has the tables forget a copy of a class when this object is gone. Otherwise they would keep
    the copy.

    The copy's functions may refer to the modules that they came with. So this object must not be
    reachable from these.
    """

    def __init__(self, kind: type) -> None:
        weakref.finalize(self, forget, kind).atexit = False


def forget(kind: type) -> None:
    for registry in REGISTRIES.values():
        registry.forget(kind)


def nothing(_: type) -> None: ...


# --- abstract base classes and single dispatch


class LibraryTables:
    """The objects in libraries' modules that have a table of registrations."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._abstract: dict[type, None] = {}
        self._dispatchers: dict[int, Any] = {}

    def abstract_classes(self) -> Iterable[Any]:
        self._look()
        return self._abstract

    def dispatchers(self) -> Iterable[Any]:
        self._look()
        return self._dispatchers.values()

    def _look(self) -> None:
        """Search the modules that were imported since the last search."""
        for name in sys.modules.keys() - self._seen:
            self._seen.add(name)
            module = sys.modules.get(name)
            if not issubclass(type(module), types.ModuleType) or is_users_own(name):
                continue
            # `isinstance` would make proxies and lazy objects load what they stand for.
            for value in list(vars(module).values()):
                if issubclass(type(value), abc.ABCMeta):
                    self._abstract[value] = None
                elif type(value) is types.FunctionType and "registry" in value.__dict__:
                    self._dispatchers[id(value)] = value


LIBRARIES = LibraryTables()


def abstract_bases(kind: type) -> list[type]:
    """Return the abstract classes of libraries that the class is registered with."""
    now = abc.get_cache_token(), len(sys.modules)  # each registration or import changes one
    return [each for each, ref in registered_now(now).get(id(kind), ()) if ref() is kind]


@functools.lru_cache(maxsize=1)
def registered_now(_: object) -> dict[int, list[tuple[type, weakref.ref[type]]]]:
    """Return the classes that are registered with abstract classes of libraries, by their ids.

    There are hundreds of abstract classes. So this is made once for all classes of a pickle.
    """
    found: dict[int, list[tuple[type, weakref.ref[type]]]] = {}
    for each in list(LIBRARIES.abstract_classes()):
        for ref in abc._get_dump(each)[0]:  # type: ignore[attr-defined]
            found.setdefault(id(ref()), []).append((each, ref))
    return found


def register_with_bases(kind: type, bases: list[Any]) -> None:
    for each in bases:
        each.register(kind)


def implementations(kind: type) -> list[tuple[Any, Any]]:
    """Return the libraries' dispatchers that have a function for the class, and the functions."""
    return [
        (each, each.registry[kind])
        for each in list(LIBRARIES.dispatchers())
        if kind in each.registry
    ]


def register_implementations(kind: type, found: list[tuple[Any, Any]]) -> None:
    for dispatcher, implementation in found:
        dispatcher.register(kind, implementation)


def forget_implementations(kind: type) -> None:
    for dispatcher, _ in implementations(kind):
        (table,) = gc.get_referents(dispatcher.registry)  # of which this is a read-only view
        table.pop(kind, None)
        dispatcher._clear_cache()


# --- PyTorch


def divergences(kind: type) -> list[tuple[type, type, Any]]:
    """Return the functions that `torch.distributions.kl.register_kl` registered for the class."""
    return [(*pair, each) for pair, each in list(KL_FUNCTIONS.items()) if kind in pair]


def register_divergences(kind: type, found: list[tuple[type, type, Any]]) -> None:
    for one, other, function in found:
        torch.distributions.register_kl(one, other)(function)  # type: ignore[no-untyped-call]


def forget_divergences(kind: type) -> None:
    for one, other, _ in divergences(kind):
        KL_FUNCTIONS.pop((one, other), None)
        KL_MEMO.clear()


def is_safe_global(kind: type) -> bool:
    return kind in torch.serialization.get_safe_globals()


def register_safe_global(kind: type, is_one: bool) -> None:
    torch.serialization.add_safe_globals([kind])


def forget_safe_global(kind: type) -> None:
    if is_safe_global(kind):
        remove_safe_globals([kind])


def forget_reducer(kind: type) -> None:
    copyreg.dispatch_table.pop(kind, None)


REGISTRIES = {
    "attributes of an enumeration's members": Registry(attributes_of_members, set_members, nothing),
    "abc": Registry(abstract_bases, register_with_bases, nothing),
    "functools.singledispatch": Registry(
        implementations, register_implementations, forget_implementations
    ),
    "copyreg": Registry(copyreg.dispatch_table.get, copyreg.pickle, forget_reducer),
    "torch.distributions": Registry(divergences, register_divergences, forget_divergences),
    "torch.serialization": Registry(is_safe_global, register_safe_global, forget_safe_global),
    "torch.utils._pytree": Registry(pytree_node, set_pytree_node, forget_pytree_node),
}


# --- accessors of pandas


def accessors_named(names: Iterable[str]) -> list[Any]:
    """Return the user's pandas accessors with these names. Code refers to them only by name.

    The list contains the pandas class, the name and the accessor's class of each accessor in turn.
    """
    pandas: Any = sys.modules.get("pandas")
    found: list[Any] = []
    for kind in () if pandas is None else (pandas.DataFrame, pandas.Series, pandas.Index):
        for name in kind._accessors.intersection(names):
            accessor = vars(kind)[name]._accessor if name in vars(kind) else object
            if is_users_own(accessor.__module__):
                found += kind, name, accessor
    return found


class Accessors:
    """Represents accessors in a pickle, which registers them when it is loaded."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found

    def __reduce__(self) -> tuple[Any, ...]:
        return register_accessors, tuple(self._found)


def register_accessors(*found: Any) -> None:
    extensions = sys.modules["pandas"].api.extensions
    for kind, name, accessor in zip(found[::3], found[1::3], found[2::3], strict=True):
        register_one = getattr(extensions, f"register_{kind.__name__.lower()}_accessor")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas warns that an accessor is replaced
            register_one(name)(accessor)
