"""Classes are sent by value if no worker can import them. Types of ctypes are sent too.

Such classes are defined in a script or in a function. cloudpickle sends them by value, and
recognises a class that comes back, so each process has it once. But cloudpickle then writes the
received attributes into that class. This is right in a worker, whose classes should be as the
caller's are now. It is wrong in the caller, where the classes are the user's own. cloudpickle also
rebuilds a class with `__slots__` without them. Instances then have a `__dict__`, which the caller's
instances cannot take back. Here the caller's classes stay as they are, and both sides keep the
slots.

The metaclasses of ctypes types have no names in `ctypes`, so cloudpickle cannot send these types.
Pointers, arrays and prototypes are rebuilt from what they were made of. The worker imports
structures of the user's modules, and uses its own open libraries and files. A script's structures
are refused, and so is the type that a library uses for its functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import io
import operator
import pickle
import queue
import subprocess
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS as TRACKER_ID_OF
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as CLASS_OF
from cloudpickle.cloudpickle import _class_setstate as set_class
from cloudpickle.cloudpickle import _dynamic_class_reduce as dynamic_class_reduce
from cloudpickle.cloudpickle import _lookup_class_or_track as track
from cloudpickle.cloudpickle import _lookup_module_and_qualname as importable_as
from cloudpickle.cloudpickle import _make_skeleton_class as make_class
from cloudpickle.cloudpickle import _make_skeleton_enum as make_enum

from mpgrad.pickling.modules import (
    AS_IMPORTED,
    PLACED,
    at_path,
    attribute_here,
    is_own,
    name_of,
    own_import,
    pickle_finds,
)

__all__ = [
    "CALLERS_OWN",
    "SETS_CLASS",
    "ClassPickler",
    "ClassUnpickler",
    "dumps",
    "dynamic",
    "follow_the_caller",
    "loads",
    "made_like_own",
    "reduce_c_type",
]

# copies of the caller's classes, for tasks in this process
COPIES: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
OURS: weakref.WeakSet[type] = weakref.WeakSet()  # pickled by value here, so they may come back
# Their parts could be pickled. But somebody who waits for a copy, or passes it something, would
# wait in vain.
CALLERS_OWN = threading.Thread, subprocess.Popen, queue.Queue, Future
SETS_CLASS = set_class.__module__, set_class.__name__


def dumps(value: object, pickler: type[ClassPickler] | None = None) -> bytes:
    buffer = io.BytesIO()
    (pickler or ClassPickler)(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(pickled: bytes) -> Any:
    return ClassUnpickler(io.BytesIO(pickled)).load()


class ClassPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickles classes by value as cloudpickle does, and keeps their slots.

    A class that came from the other side is pickled by its name there.
    """

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, type) and value in COPIES:
            return class_of_ours, (COPIES[value],)
        if (
            isinstance(value, type)
            and value in TRACKER_ID_OF
            and PLACED.hides(value.__module__, value.__qualname__.partition(".")[0])
        ):
            # The caller has it, under its number.
            return with_slots(value, dynamic_class_reduce(value))
        if isinstance(value, type) and (reduced := reduce_c_type(value)) is not None:
            return reduced
        reduced = super().reducer_override(value)
        if reduced is NotImplemented and isinstance(value, CALLERS_OWN):
            raise TypeError(f"cannot pickle {type(value).__qualname__!r} object")
        if not isinstance(value, type) or (
            reduced is NotImplemented and pickle_finds(value.__module__)
        ):
            return reduced
        if reduced is NotImplemented:
            return attribute_here, (value.__module__, value.__qualname__)
        if (name := other_name(value)) is not None:
            return attribute_here, (value.__module__, name)
        OURS.add(value)
        return with_slots(value, reduced)


def other_name(value: type) -> str | None:
    """Return the name under which a library has a class that gives a different name.

    Enumerations of pybind11 are such classes.
    """
    module = sys.modules.get(value.__module__)
    if module is None or module.__name__ in ("__main__", "builtins") or is_own(module.__name__):
        return None
    return next((name for name, each in list(vars(module).items()) if each is value), None)


def dynamic(value: type) -> Any:
    """Reduce a class by value, even if it could be imported."""
    OURS.add(value)
    return with_slots(value, dynamic_class_reduce(value))


def with_slots(value: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the slots, and the name, to the arguments that the class is made with.

    After the class is made it would be too late.
    """
    if reduced[0] is make_class:
        make, (*first, given, tracker_id, extra), *rest = reduced
        reduced = (
            make,
            (*first, {**given, "__qualname__": value.__qualname__}, tracker_id, extra),
            *rest,
        )
    slots = slots_in(value)
    if reduced[0] is not make_class or slots is None:
        return reduced
    _, arguments, (state, more), *rest = reduced
    if typing.NamedTuple in arguments[2]:  # among the bases; it handles slots by itself
        return reduced
    state = {name: member for name, member in state.items() if not is_slot(value, name, member)}
    return make_slotted, (slots, *arguments), (state, more), *rest


def make_slotted(
    slots: Sequence[str],
    kind: type[type],
    name: str,
    bases: tuple[type, ...],
    given: Any,
    *others: Any,
) -> type:
    """Make a class with `__slots__`, which cloudpickle would leave out."""
    made: type
    try:
        made = make_class(kind, name, bases, {**given, "__slots__": slots}, *others)
    except TypeError:  # the metaclass adds some of them
        made = make_class(kind, name, bases, given, *others)
    return made


def made_like_own(
    module: str, path: str, tracker_id: str, make: Callable[..., type], arguments: tuple[Any, ...]
) -> type:
    """Make the class, or take the worker's import of it if that is of the same kind.

    So the effects of the import still hold: the class may be registered with a library, or be the
    base of another class.
    """
    found: Any = sys.modules.get(module)
    with contextlib.suppress(ImportError):  # then the worker has no such class
        found = own_import(module)
    found = at_path(found, path)
    is_free = tracker_id not in CLASS_OF and found not in TRACKER_ID_OF
    if isinstance(found, type) and is_free and is_alike(found, make, arguments):
        AS_IMPORTED[found] = dict(vars(found))
        track(tracker_id, found)
        return found
    return make(*arguments)


def is_alike(found: type, make: Callable[..., type], arguments: tuple[Any, ...]) -> bool:
    """Whether the class `found` is what `make(*arguments)` would give."""
    if make is make_enum:
        bases, _, _, members, *_ = arguments
        return (
            issubclass(found, enum.Enum)
            and found.__bases__ == bases
            and {e.name: e.value for e in found} == members
        )
    slots, kind, _, bases, *_ = arguments if make is make_slotted else (None, *arguments)
    return type(found) is kind and found.__bases__ == bases and slots_in(found) == slots


def slots_in(value: type) -> list[str] | None:
    if "__slots__" not in vars(value):
        return None
    slots = [name for name, member in vars(value).items() if is_slot(value, name, member)]
    return slots + [name for name in ("__dict__", "__weakref__") if name in vars(value)]


def is_slot(owner: type, name: str, member: object) -> bool:
    """Whether the member is a slot under its own name. Under further names it is a plain
    attribute."""
    return isinstance(member, types.MemberDescriptorType) and (
        member.__objclass__,
        member.__name__,
    ) == (owner, name)


def leave_ours(made: type, state: Any) -> None:
    """Set the state of a class that was made here, and leave a class that existed before
    unchanged."""
    if made not in OURS:
        set_class(made, state)


def class_of_ours(tracker_id: str) -> type:
    found: type = CLASS_OF[tracker_id]
    return found


class ClassUnpickler(pickle.Unpickler):
    """Loads what `ClassPickler` wrote."""

    set_class: Callable[[type, Any], Any] = staticmethod(leave_ours)

    def __init__(self, *arguments: Any, copies: dict[str, type] | None = None, **more: Any) -> None:
        """Make an unpickler.

        If `copies` is given, classes by value become copies, because the caller's own exist in this
        process. `copies` holds them by tracker id.
        """
        super().__init__(*arguments, **more)
        self._copies = copies

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == SETS_CLASS:
            return self.set_class if self._copies is None else set_copy
        found = super().find_class(module, name)
        return (
            functools.partial(copied, found, self._copies)
            if self._copies is not None and found in MAKERS
            else found
        )


def set_copy(made: type, state: Any) -> None:
    """Set the state as `leave_ours` does, but always for copies."""
    (set_class if made in COPIES else leave_ours)(made, state)


def copied(make: Callable[..., type], copies: dict[str, type], *arguments: Any) -> type:
    """Make a class with `make`, apart from this process's class with the same tracker id."""
    if make is made_like_own:
        *_, make, arguments = arguments
        return make(*arguments)
    *others, tracker_id, extra = arguments
    if tracker_id in CLASS_OF and issubclass(CLASS_OF[tracker_id], BaseException | enum.Enum):
        # The caller's filters and handlers know an exception by its class. An enumeration's members
        # must stay the same objects.
        return class_of_ours(tracker_id)
    if tracker_id not in copies:
        copies[tracker_id] = made = make(*others, None, extra)
        COPIES[made] = tracker_id
    return copies[tracker_id]


def follow(made: type, state: Any) -> None:
    """Set the state of a class, and delete attributes that the caller's class lacks.

    Such an attribute was deleted in the caller, or set by a task.
    """
    if not issubclass(made, enum.Enum):
        gone = vars(made).keys() - state[0].keys()
        for name in gone:
            if not name.startswith(("__", "_abc_")) and not is_slot(made, name, vars(made)[name]):
                delattr(made, name)
    set_class(made, state)


MAKERS = make_class, make_slotted, make_enum, made_like_own


def follow_the_caller() -> None:
    """Make the classes of this process, a worker, follow the caller's."""
    ClassUnpickler.set_class = staticmethod(follow)


# --- types of ctypes


Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
NATIVE, SWAPPED = ("__ctype_le__", "__ctype_be__")[:: 1 if sys.byteorder == "little" else -1]
USES_ERRNO = 8  # the value that `ctypes` uses
OF_PYTHON = "PYFUNCTYPE.<locals>.CFunctionType"


def reduce_c_type(value: type) -> Reduced | None:
    """Return how to rebuild a type of ctypes; None for other types and for those of libraries.

    Raises:
        TypeError: nobody can make it again: a script derived it, or it is the type of an open
            library's functions.
    """
    kind: Any = type(value)
    if not any(each.__module__ == "_ctypes" for each in kind.__mro__):
        return None
    if name_of(value) is not None:
        return attribute_here, (value.__module__, value.__qualname__)
    for make, arguments in origins(value):
        with contextlib.suppress(TypeError):
            # ctypes makes each of the other types only once.
            if make(*arguments) is value or value.__qualname__ == OF_PYTHON:
                return make, arguments
    if importable_as(value) is not None:
        return None
    raise TypeError(
        f"cannot pickle the class {value.__qualname__!r}, which is one of ctypes or derived from "
        "one"
    )


def origins(value: Any) -> Iterator[Reduced]:
    """Yield the calls that may have made the type."""
    if (other := getattr(value, NATIVE, value)) is not value:
        yield getattr, (other, SWAPPED)
    of, length = getattr(value, "_type_", None), getattr(value, "_length_", None)
    if length is not None:
        yield operator.mul, (of, length)
    elif isinstance(of, type):
        yield ctypes.POINTER, (of,)
    if value.__qualname__ == OF_PYTHON:
        yield ctypes.PYFUNCTYPE, (value._restype_, *value._argtypes_)
    elif hasattr(value, "_flags_") and hasattr(value, "_argtypes_"):
        make = functools.partial(ctypes.CFUNCTYPE, use_errno=bool(value._flags_ & USES_ERRNO))
        yield make, (value._restype_, *value._argtypes_)
    if hasattr(value, "_ndim_"):
        yield (
            sys.modules["numpy"].ctypeslib.ndpointer,
            (value._dtype_, value._ndim_, value._shape_, value._flags_),
        )
