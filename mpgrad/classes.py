"""Classes that travel by value: those of a script, or made in a function, which no worker can import.

cloudpickle carries such a class, and knows it again when it comes back: there is one of it in each process. But then it writes
to it what came, which is right in a worker, whose classes are to be as the caller's are now, and not in the caller, whose
classes are the user's own. And it makes a class with `__slots__` again without them, so that its instances have a `__dict__`
which the caller's cannot take back. Here the caller's stay as they are, and slots are slots on both sides.
"""

from __future__ import annotations

import io
import pickle
import queue
import subprocess
import threading
import types
import typing
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _class_setstate as set_class
from cloudpickle.cloudpickle import _dynamic_class_reduce as dynamic_class_reduce
from cloudpickle.cloudpickle import _make_skeleton_class as make_class

__all__ = ["ClassPickler", "ClassUnpickler", "NotApartError", "dumps", "follow_the_caller", "loads", "reduce_class", "refuse"]

OURS: weakref.WeakSet[type] = weakref.WeakSet()  # pickled by value here, so that they may come back
# all that they consist of could be carried: but whoever waits for a copy, or gives it something, waits in vain
CALLERS_OWN = threading.Thread, subprocess.Popen, queue.Queue, Future
SETS_CLASS = set_class.__module__, set_class.__name__


def dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    ClassPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(pickled: bytes) -> Any:
    return ClassUnpickler(io.BytesIO(pickled)).load()


class ClassPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, value: object) -> Any:
        reduced = super().reducer_override(value)
        if reduced is NotImplemented and isinstance(value, CALLERS_OWN):
            raise TypeError(f"cannot pickle {type(value).__qualname__!r} object")
        if reduced is NotImplemented or not isinstance(value, type):
            return reduced
        OURS.add(value)
        return with_slots(value, reduced)


def reduce_class(value: type) -> Any:
    """By value, also where it could be imported; and to be written to where it comes back, even in the caller."""
    OURS.discard(value)
    return with_slots(value, dynamic_class_reduce(value))


def with_slots(value: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """The slots belong to the arguments with which the class is made: later it is too late."""
    if reduced[0] is not make_class or "__slots__" not in vars(value):
        return reduced
    _, arguments, (state, more), *rest = reduced
    if typing.NamedTuple in arguments[2]:  # of its bases: that sees to slots by itself
        return reduced
    slots = [name for name, member in vars(value).items() if is_slot(value, name, member)]
    slots += [name for name in ("__dict__", "__weakref__") if name in vars(value)]
    state = {name: member for name, member in state.items() if not is_slot(value, name, member)}
    return make_slotted, (slots, *arguments), (state, more), *rest


def make_slotted(slots: Sequence[str], kind: type[type], name: str, bases: tuple[type, ...], given: Any, *others: Any) -> type:
    made: type
    try:
        made = make_class(kind, name, bases, {**given, "__slots__": slots}, *others)
    except TypeError:  # its metaclass adds some of them
        made = make_class(kind, name, bases, given, *others)
    return made


def is_slot(owner: type, name: str, member: object) -> bool:
    """Under its own name: further ones are attributes like all others."""
    return isinstance(member, types.MemberDescriptorType) and (member.__objclass__, member.__name__) == (owner, name)


def leave_ours(made: type, state: Any) -> None:
    if made not in OURS:
        set_class(made, state)


def refuse(made: type, state: Any) -> None:
    raise NotApartError(made)


class NotApartError(Exception):
    """A class was to be loaded in the process that it is of: there are no two of it there."""


class ClassUnpickler(pickle.Unpickler):
    set_class: Callable[[type, Any], Any] = staticmethod(leave_ours)

    def find_class(self, module: str, name: str) -> Any:
        return self.set_class if (module, name) == SETS_CLASS else super().find_class(module, name)


def follow_the_caller() -> None:
    """This process is a worker's."""
    ClassUnpickler.set_class = staticmethod(set_class)
