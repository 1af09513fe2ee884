"""A worker warns if a task writes to a captured container, because the write goes to a copy and is
lost. This module runs in workers.

PyTorch counts writes to tensors, but Python does not count writes to lists, dicts, sets and
attributes. The objects that a container refers to can be read in C, as `ContentRecord` does. So the
containers of a function are compared after each chunk, until one has changed. Most functions have
none.

Containers that code changes for its own use are ignored: containers of libraries, values that an
initializer has set, attributes that are filled when they are first needed, and names that begin
with an underscore or contain "cache" or "memo".
Assumes: one operation at a time uses a container.
"""

from __future__ import annotations

import collections
import functools
import gc
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from mpgrad.pickling.initialized import INITIALIZED
from mpgrad.pickling.modules import CarriedModule, closure_of, is_users_own, uses_in
from mpgrad.pickling.objects import IMMUTABLE
from mpgrad.pickling.unchanged import are_same_objects
from mpgrad.workers.console import TaskWarnings

__all__ = ["OURS", "CapturedContainers"]

MOST_WATCHED = 1000  # parts of containers; more would cost more than 10 µs a chunk
CONTAINERS = {
    *(list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict),
    *(collections.Counter,),
}
PLAIN = IMMUTABLE | {torch.Tensor, torch.nn.Parameter}
PLAIN |= {types.ModuleType, types.BuiltinFunctionType, types.CodeType, type}
FOR_ITSELF = re.compile(r"(^|\.)_|cache|memo", re.IGNORECASE)
# classes of this package that contain functions of the user
OURS = "mpgrad.tasks.", "mpgrad.torch_state.modes.", "mpgrad.joblib."


class Place(NamedTuple):
    """A captured container, or the attributes of an object, with the name that leads there."""

    name: str
    contents: Any
    is_object: bool  # `contents` are its attributes


class CapturedContainers:
    """The containers that one function captures."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # the user's first function; the warning names its place
        self._code: types.FunctionType | None = None
        self._name = type(function).__qualname__
        self._places: list[Place] = []
        self._find(function)
        self._contents = [each.contents for each in self._places]
        self._note()

    def _note(self) -> None:
        # these are kept alive, so that no other object gets an address of one
        self._parts = gc.get_referents(*self._contents)
        self._before = [copied(each) for each in self._contents]

    def warn_of_writes(self, task_warnings: TaskWarnings) -> None:
        """Warn the caller of the first container that has changed. Then stop comparing."""
        if not self._contents:
            return
        if are_same_objects(gc.get_referents(*self._contents), self._parts):
            return
        changed = [
            each
            for each, before in zip(self._places, self._before, strict=True)
            if is_lost(each, before)
        ]
        if not changed:
            self._note()
            return
        self._contents = []
        what = changed[0]
        kind = "attributes" if what.is_object else f"a {type(what.contents).__name__}"
        task_warnings.add(
            f"{self._name} changed {what.name} ({kind}), but only the worker's copy, which is "
            "lost; return the value and store it in the caller, or let the initializer make "
            "objects that each worker keeps",
            self._code,
        )

    # --- the search

    def _find(self, function: Callable[..., Any]) -> None:
        left = MOST_WATCHED
        own = {id(each) for values in INITIALIZED.values() for each in values.values()}
        seen = set[int]()
        waiting: list[tuple[str, Any]] = [("", function)]
        for name, value in waiting:
            if left <= 0:
                break
            kind = type(value)
            if kind in PLAIN or id(value) in seen or id(value) in own or FOR_ITSELF.search(name):
                continue
            seen.add(id(value))
            left -= 1
            if kind is types.FunctionType:
                if not is_users_own(value.__module__ or ""):
                    continue
                if self._code is None:
                    self._code = value
                    self._name = value.__qualname__.rpartition("<locals>.")[2]
            elif kind in CONTAINERS:
                if value.__len__() > left:
                    continue
                left -= len(value)
                self._places.append(Place(name, value, is_object=False))
            elif is_users(kind) and hasattr(value, "__dict__"):
                self._places.append(Place(name or kind.__qualname__, vars(value), is_object=True))
            waiting += inside(name, value)


def inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a value that are searched next."""
    kind = type(value)
    joint = f"{name}." if name else ""
    if kind is types.FunctionType:
        yield from closure_of(value).items()
        defaults = value.__defaults__ or ()
        count = value.__code__.co_argcount
        yield from zip(
            value.__code__.co_varnames[count - len(defaults) : count], defaults, strict=True
        )
        yield from (value.__kwdefaults__ or {}).items()
        yield from ((f"{value.__name__}.{each}", part) for each, part in vars(value).items())
        given = value.__globals__
        for each in uses_in(value.__code__).names & given.keys():
            if type(given[each]) is CarriedModule:
                for inner in uses_in(value.__code__).names & vars(given[each]).keys():
                    yield f"{each}.{inner}", vars(given[each])[inner]
            else:
                yield each, given[each]
    elif kind is types.MethodType:
        yield "", value.__func__
        yield "self", value.__self__
    elif kind is functools.partial:
        yield from (("", each) for each in (value.func, *value.args, *value.keywords.values()))
    elif kind in CONTAINERS or kind is tuple:
        parts = value.values() if issubclass(kind, dict) else value
        yield from ((f"{name}[...]", each) for each in list(parts) if type(each) not in PLAIN)
    elif is_users(kind):
        yield "", kind.__call__ if callable(value) else None
        yield from ((joint + each, part) for each, part in getattr(value, "__dict__", {}).items())
    elif f"{kind.__module__}.".startswith(OURS):
        yield from (("", each) for each in gc.get_referents(value))


def is_users(kind: type) -> bool:
    return not issubclass(kind, type) and is_users_own(kind.__module__)


def copied(contents: Any) -> Any:
    return dict(contents) if isinstance(contents, dict) else list(contents)


def is_lost(place: Place, before: Any) -> bool:
    """Whether a task has changed the contents, and not only filled in attributes."""
    now = copied(place.contents)
    if place.is_object:
        return any(
            value is not None and differ(now.get(name, value), value)
            for name, value in before.items()
            if not FOR_ITSELF.search(name)
        )
    if isinstance(now, dict):
        return now.keys() != before.keys() or any(differ(now[key], before[key]) for key in before)
    return len(now) != len(before) or any(map(differ, now, before))


def differ(one: Any, other: Any) -> bool:
    """Whether two values differ. Equal numbers and strings may be new objects, because objects that
    are one of a kind get their attributes again with each item."""
    is_plain = type(one) is type(other) and type(one) in IMMUTABLE
    return one is not other and not (is_plain and one == other)
