"""What an initializer sets in a worker stays there, whatever functions bring later. Worker's side.

Programs of multiprocessing set a global in the initializer and read it in their tasks. The caller
does not have this global, or has another value.

    the initializer runs ──► what differs then: names of the user's modules and of the script, and
                             attributes of their functions and classes
    a function is loaded ──► the same places get the initializer's values

If the initializer changed an object in place, this object takes the place of the one that the
caller sends, under all names.

Assumes: an initializer writes to modules that are imported, at the latest, when it begins.
"""

from __future__ import annotations

import gc
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.pickling.class_states import MADE_BY_PYTHON

__all__ = ["INITIALIZED", "SHARED", "Path", "copy_of_shared", "noted", "other_names", "path_of"]

Path = tuple[str, str]  # a module, and a name in it; an empty one for the module itself

# What the initializer set, by the path of the module, function or class that has it.
INITIALIZED: dict[Path, dict[str, Any]] = {}
# The places in modules whose objects it changed in place.
IN_PLACE: set[Path] = set()

ABSENT = object()
# An object of these types has no contents, or they are noted as a place of their own.
NOT_SEARCHED = {type(None), bool, int, float, complex, str, bytes, type, types.ModuleType}
NOT_SEARCHED |= {types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType}


class SharedTensors:
    """Copies of tensors in shared memory that the initializer was given.

    In torch.multiprocessing, tasks write to such tensors, and the caller sees it.
    """

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] = []

    def add(self, make: Callable[..., torch.Tensor], parts: tuple[Any, ...]) -> torch.Tensor:
        self._copies.append(made := make(*parts))
        return made

    def are_written(self) -> bool:
        """Whether somebody has written to one since this was asked last."""
        before, self._versions = self._versions, [each._version for each in self._copies]
        return before != self._versions


SHARED = SharedTensors()


def copy_of_shared(make: Callable[..., torch.Tensor], parts: tuple[Any, ...]) -> torch.Tensor:
    return SHARED.add(make, parts)


def path_of(value: types.FunctionType | type) -> Path:
    return value.__module__, value.__qualname__


def noted(
    initialize: Callable[[], object],
    modules: Mapping[str, dict[str, Any]],
    functions: Sequence[types.FunctionType],
) -> None:
    """Run the initializer, and note what differs then.

    `modules` are the contents of the user's modules and of the script. `functions` are those that
    came with the initializer.
    """
    before = {path: dict(snapshots(contents)) for path, contents in places(modules, functions)}
    initialize()
    SHARED.are_written()  # its own writes do not count
    for path, contents in places(modules, functions):
        known = before.get(path, {})
        for name, (value, inside) in snapshots(contents):
            was = known.get(name)
            if was is None or was.value is not value:
                INITIALIZED.setdefault(path, {})[name] = value
            elif not same(was.inside, inside):
                INITIALIZED.setdefault(path, {})[name] = value
                IN_PLACE.add((path[0], name))


def places(
    modules: Mapping[str, dict[str, Any]], functions: Sequence[types.FunctionType]
) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield everything that has names: the modules, and their functions and classes."""
    found: dict[int, Any] = {id(each): each for each in functions}
    for name, contents in modules.items():
        yield (name, ""), contents
        for value in list(contents.values()):
            if isinstance(value, types.FunctionType | type) and value.__module__ in modules:
                found[id(value)] = value
    for value in found.values():
        yield path_of(value), vars(value)


class Snapshot(NamedTuple):
    """A value and all that it leads to."""

    value: Any
    inside: list[Any]


def snapshots(contents: Mapping[str, Any]) -> Iterator[tuple[str, Snapshot]]:
    for name, value in list(contents.items()):
        if not (name.startswith("__") or name in MADE_BY_PYTHON):
            yield name, Snapshot(value, led_to_by(value))


def led_to_by(value: Any) -> list[Any]:
    """Return everything that the value leads to, always in the same order, with what memory holds
    as a number."""
    found: list[Any] = []
    level, seen = [value], {id(value)}
    while level := [each for each in level if type(each) not in NOT_SEARCHED]:
        found += (held for each in level for held in memory_of(each))
        referents = gc.get_referents(*level)
        keys = [key for each in level if isinstance(each, dict) for key in each]
        found += (*referents, *keys)
        level = []
        for each in referents:
            if id(each) not in seen:
                seen.add(id(each))
                level.append(each)
    return found


def memory_of(value: Any) -> Iterable[object]:
    """Return what tells whether the memory of a tensor, array or buffer was written to."""
    if isinstance(value, torch.Tensor):
        return value._version, value.data_ptr()
    try:
        return (zlib.crc32(memoryview(value).cast("B")),)
    except (TypeError, ValueError, BufferError):
        return ()


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        each is its_like or (type(each) is int and each == its_like)
        for each, its_like in zip(one, other, strict=True)
    )


def other_names(namespaces: Iterable[dict[str, Any]], came: Mapping[Path, Any]) -> None:
    """Put the objects that the initializer changed in place under all names that the caller's
    objects have. `came` has these by their places."""
    instead = {
        id(value): INITIALIZED[module, ""][name]
        for (module, name), value in came.items()
        if (module, name) in IN_PLACE
    }
    for contents in namespaces if instead else ():
        contents.update(
            {name: instead[id(each)] for name, each in contents.items() if id(each) in instead}
        )
