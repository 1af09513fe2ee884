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
from typing import Any

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


Contents = Mapping[str, Any]


def noted(
    initialize: Callable[[], object],
    modules: Sequence[tuple[str, dict[str, Any]]],
    functions: Sequence[types.FunctionType],
) -> None:
    """Run the initializer, and note what differs then.

    `modules` are the names and contents of the user's modules and of the script. `functions` are
    those that came with the initializer.
    """
    before = [(path, contents, dict(contents)) for path, contents in places(modules, functions)]
    # With what each one refers to, so that no new object gets the address of an old one.
    held = {id(each): (each, held_by(each), gc.get_referents(each)) for each in led_to_by(before)}
    initialize()
    SHARED.are_written()  # its own writes do not count
    changed = {number for number, (each, parts, _) in held.items() if held_by(each) != parts}
    known = {id(contents): values for _, contents, values in before}
    for path, contents in places(modules, functions):
        values = known.get(id(contents), {})
        for name, value in list(contents.items()):
            if name.startswith("__") or name in MADE_BY_PYTHON:
                continue
            if values.get(name, ABSENT) is not value:
                INITIALIZED.setdefault(path, {})[name] = value
            elif changed and not changed.isdisjoint(map(id, led_to_by([value]))):
                INITIALIZED.setdefault(path, {})[name] = value
                IN_PLACE.add((path[0], name))


def places(
    modules: Sequence[tuple[str, dict[str, Any]]], functions: Sequence[types.FunctionType]
) -> Iterator[tuple[Path, Contents]]:
    """Yield everything that has names: the modules, and their functions and classes."""
    found: dict[int, Any] = {id(each): each for each in functions}
    names = {name for name, _ in modules}
    waiting: list[Contents] = [contents for _, contents in modules]
    for contents in waiting:
        for value in list(contents.values()):
            is_code = isinstance(value, types.FunctionType | type) and value.__module__ in names
            if is_code and id(value) not in found:
                found[id(value)] = value
                if isinstance(value, type):
                    waiting.append(vars(value))
    yield from [((name, ""), contents) for name, contents in modules]
    yield from [(path_of(value), value.__dict__) for value in found.values()]


def led_to_by(values: list[Any]) -> list[Any]:
    """Return these values, and everything that they lead to."""
    found, level, seen = list[Any](), values, set(map(id, values))
    while level := [each for each in level if type(each) not in NOT_SEARCHED]:
        found += level
        further = {id(each): each for each in gc.get_referents(*level) if id(each) not in seen}
        seen |= further.keys()
        level = list(further.values())
    return found


def held_by(value: Any) -> list[int]:
    """Return what tells whether the value was changed in place."""
    parts = [*gc.get_referents(value), *(value if isinstance(value, dict) else ())]
    if isinstance(value, torch.Tensor):
        return [*map(id, parts), value._version, value.data_ptr()]
    try:
        return [*map(id, parts), zlib.crc32(memoryview(value).cast("B"))]
    except (TypeError, ValueError, BufferError):  # it shows no memory
        return [*map(id, parts)]


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
