"""A worker keeps the values that an initializer sets, even if functions that arrive later bring
other values. Both sides use this module.

Programs that use multiprocessing set a global in the initializer and read it in their tasks. The
caller does not have this global, or has another value.

    the initializer is pickled ──► with the names in the script and in the user's modules that lead
                                   to its objects (`CallersNames`)
    it runs in a worker        ──► the worker records the changes: names, and attributes of
                                   functions and classes
    a function is loaded       ──► the same places get the initializer's values

If the initializer changed an object in place, this object replaces the one that the caller sends,
under all names that led to it when the pool began.

Assumes: an initializer writes to modules that are imported when it begins, or that it names. What
    only closures share has no name. It changes no memory in place that a file or another library
    owns and an array only shows.
"""

from __future__ import annotations

import array
import contextlib
import gc
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.pickling.class_states import ABSENT, MADE_BY_PYTHON
from mpgrad.torch_state.private import without_subclasses

__all__ = [
    "INITIALIZED",
    "SHARED",
    "CallersNames",
    "Path",
    "copy_of_shared",
    "is_searched",
    "names_leading_to",
    "noted",
    "path_of",
    "set_initialized",
]

Path = tuple[str, str]  # a module and a name in it, which is empty for the module itself

# the values that the initializer set, by the path of their module, function or class
INITIALIZED: dict[Path, dict[str, Any]] = {}

# Objects of these types have no contents, or their contents are a `Place` of their own.
NOT_SEARCHED = {type(None), bool, int, float, complex, str, bytes, type, types.ModuleType}
NOT_SEARCHED |= {types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType}


class SharedTensors:
    """Copies of tensors in shared memory that were among the initializer's arguments.

    In torch.multiprocessing, tasks write to such tensors, and the caller sees the writes.
    """

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] = []

    def add(self, make: Callable[..., torch.Tensor], parts: tuple[Any, ...]) -> torch.Tensor:
        self._copies.append(made := make(*parts))
        return made

    def are_written(self) -> bool:
        """Whether one was written since the last call of this method."""
        before, self._versions = self._versions, [each._version for each in self._copies]
        return before != self._versions


SHARED = SharedTensors()


def copy_of_shared(make: Callable[..., torch.Tensor], parts: tuple[Any, ...]) -> torch.Tensor:
    return SHARED.add(make, parts)


def path_of(value: types.FunctionType | type) -> Path:
    return value.__module__, value.__qualname__


Contents = Mapping[str, Any]
Modules = Sequence[tuple[str, Contents]]  # names and contents
Place = tuple[Path, object, Contents]  # the object has the contents
OF_FUNCTIONS = {"__defaults__", "__kwdefaults__"}
FUNCTIONS_AND_CLASSES = (types.FunctionType, type)


class CallersNames(NamedTuple):
    """The caller's names of the objects that an initializer may change."""

    values: Mapping[Path, dict[str, Any]]  # names of objects that come with the initializer
    aliases: Mapping[Path, dict[str, Path]]  # the script's names of objects that modules have
    imports: Sequence[str]  # the modules that the initializer names


def names_leading_to(objects: Mapping[int, Any], modules: Modules) -> dict[Path, dict[str, Any]]:
    """Return the names of these objects, whose keys are their ids, and of objects that lead to
    one."""
    held = {number for number, each in objects.items() if is_searched(each)}
    found: dict[Path, dict[str, Any]] = {}
    for path, _, contents in places(modules, ()):
        for name, value in named(contents):
            if (
                id(value) in objects
                if is_kind(value, FUNCTIONS_AND_CLASSES)
                else held and not held.isdisjoint(map(id, led_to_by([value])))
            ):
                found.setdefault(path, {})[name] = value
    return found


def noted(
    initialize: Callable[[], object],
    modules: Modules,
    functions: Sequence[types.FunctionType],
    names: Mapping[Path, Contents],
) -> None:
    """Run the initializer, and record what it has changed.

    `modules` are the user's modules and the script. `functions` came with the initializer, and
    `names` are the caller's names of its objects.
    """
    modules = [*modules, *((path[0], values) for path, values in names.items() if not path[1])]
    of_caller = [(path, values, values) for path, values in names.items()]
    before = [
        (holder, dict(named(contents)))
        for _, holder, contents in [*of_caller, *places(modules, functions)]
    ]
    # The referents are kept alive, so that no new object gets the address of an old one.
    led_to = led_to_by([values for _, values in before])
    held = {id(each): (each, held_by(each), gc.get_referents(each)) for each in led_to}
    initialize()
    SHARED.are_written()  # its own writes do not count
    changed = {number for number, (each, parts, _) in held.items() if held_by(each) != parts}
    known = {id(holder): values for holder, values in before}
    for path, holder, contents in [*of_caller, *places(modules, functions)]:
        values = known.get(id(holder), {})
        found = {
            name: value
            for name, value in named(contents)
            if values.get(name, ABSENT) is not value
            or (changed and not changed.isdisjoint(map(id, led_to_by([value]))))
        }
        found |= dict.fromkeys(values.keys() - contents.keys(), ABSENT)
        if found:
            INITIALIZED.setdefault(path, {}).update(found)


def set_initialized(
    path: Path, put: Callable[[str, Any], None], delete: Callable[[str], None]
) -> None:
    """Give a module, function or class the values that the initializer has set."""
    for name, value in INITIALIZED.get(path, {}).items():
        if value is ABSENT:
            with contextlib.suppress(AttributeError, KeyError):
                delete(name)
        else:
            put(name, value)


def places(modules: Modules, functions: Sequence[types.FunctionType]) -> Iterator[Place]:
    """Yield all places that contain names: the modules, and their functions and classes."""
    found: dict[int, Any] = {id(each): each for each in functions}
    names = {name for name, _ in modules}
    waiting: list[Contents] = [contents for _, contents in modules]
    for contents in waiting:
        for value in list(contents.values()):
            is_code = is_kind(value, FUNCTIONS_AND_CLASSES) and value.__module__ in names
            if is_code and id(value) not in found:
                found[id(value)] = value
                if is_kind(value, type):
                    waiting.append(vars(value))
    yield from [((name, ""), contents, contents) for name, contents in modules]
    for value in found.values():
        defaults = {name: getattr(value, name) for name in OF_FUNCTIONS if hasattr(value, name)}
        yield path_of(value), value, {**vars(value), **defaults}


def named(contents: Contents) -> Iterator[tuple[str, Any]]:
    """Yield the user's names and their values."""
    for name, value in list(contents.items()):
        if name in OF_FUNCTIONS or not (name.startswith("__") or name in MADE_BY_PYTHON):
            yield name, value


def is_kind(value: object, kinds: Any) -> bool:
    """Whether the value is an instance, without running code of its class, as `isinstance` may."""
    return issubclass(type(value), kinds)


def is_searched(value: object) -> bool:
    """Whether the value may have contents that can change."""
    return type(value) not in NOT_SEARCHED and not is_kind(value, (type, tuple, frozenset))


def led_to_by(values: list[Any]) -> list[Any]:
    """Return these values, and all objects that can be reached from them."""
    found, level, seen = list[Any](), values, set(map(id, values))
    while level := [each for each in level if type(each) not in NOT_SEARCHED]:
        found += level
        further = {id(each): each for each in gc.get_referents(*level) if id(each) not in seen}
        seen |= further.keys()
        level = list(further.values())
    return found


def held_by(value: Any) -> list[int]:
    """Return what tells whether the value was changed in place."""
    parts = [*gc.get_referents(value), *(dict.keys(value) if is_kind(value, dict) else ())]
    if is_kind(value, torch.Tensor):
        with without_subclasses():
            version = checksum(value) if value.is_inference() else value._version
            address = value.data_ptr() if value.layout is torch.strided else 0
        return [*map(id, parts), version, address]
    try:
        content = [zlib.crc32(memoryview(value).cast("B"))] if shows_own_memory(value) else []
    except (TypeError, ValueError, BufferError):  # a released view, or items that are objects
        content = []
    return [*map(id, parts), *content]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of an inference tensor, because such tensors count no versions; 0 if its
    memory cannot be read here."""
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.data_ptr() == 0:
        return 0
    plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg().reshape(-1)
    content: Any = plain.contiguous().view(torch.uint8).numpy()
    return zlib.crc32(content)


def shows_own_memory(value: Any) -> bool:
    """Whether the value's bytes belong to a Python object.

    Other memory may have been unmapped. Reading it would kill the worker.
    """
    arrays = getattr(sys.modules.get("numpy"), "ndarray", ())
    while not is_kind(value, (bytes, bytearray, array.array)):
        if is_kind(value, arrays):
            if value.flags.owndata:
                return True
            value = value.base
        elif is_kind(value, memoryview):
            value = value.obj
        else:
            return False
    return True
