"""A worker has one copy of each class, but each operation sees the attributes that the class had in
the caller when the operation began. This module runs in workers.

    operation 1  loaded: rate = 1                          runs again: takes the class, rate = 1
    operation 2                  loaded: takes the class,
                                 rate = 2; operation 1 keeps its attributes
Before a call or a backward runs, the classes of its operation get their attributes back, and lose
those that the operation did not have.

Guarantees: no code of the classes or their metaclasses runs when attributes are put back. Nothing
    is kept for an operation that cannot run again.
Assumes: one thread runs calls. Engines in the caller's process have copies of the classes instead.
"""

from __future__ import annotations

import contextlib
import enum
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "ABSENT",
    "BASES",
    "MADE_BY_PYTHON",
    "ClassStates",
    "attributes_of_members",
    "contents_in",
    "place_classes",
    "set_members",
    "slots_with_values",
]

ABSENT = object()  # in place of a value that does not exist


class ClassStates(dict[type, dict[str, Any]]):
    """The classes that came with one operation, and their attributes while the classes have those
    of another operation."""

    def take(self, kind: type) -> None:
        """Give the class this operation's attributes."""
        owner = OWNERS.get(kind, lambda: None)()
        if owner is not self:
            if owner is not None:
                owner[kind] = own_attributes(kind)
            OWNERS[kind] = weakref.ref(self)
            if kind in self:
                restore(kind, self[kind])
        self.setdefault(kind, {})


# The operation whose attributes a class has, for each class that came from the caller. Nothing is
# kept for an operation that cannot run again.
OWNERS: weakref.WeakKeyDictionary[type, Callable[[], ClassStates | None]] = (
    weakref.WeakKeyDictionary()
)


def place_classes(states: Iterable[ClassStates]) -> None:
    for each in states:
        for kind in each:
            each.take(kind)


def own_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class, except those that Python made."""
    found = {
        name: value
        for name, value in vars(kind).items()
        if not (name in MADE_BY_PYTHON or isinstance(value, types.MemberDescriptorType))
    }
    return found | {OF_MEMBERS: attributes_of_members(kind), BASES: kind.__bases__}


def restore(kind: type, attributes: Mapping[str, Any]) -> None:
    """Give the class exactly these attributes, without calling its metaclass."""
    now = own_attributes(kind)
    for name in now.keys() - attributes.keys() - {OF_MEMBERS}:
        type.__delattr__(kind, name)
    for name, value in attributes.items():
        if now.get(name, ABSENT) is not value and name != OF_MEMBERS:
            type.__setattr__(kind, name, value)
    set_members(kind, attributes.get(OF_MEMBERS, {}))


def attributes_of_members(kind: type) -> dict[str, dict[str, Any]]:
    """Return the attributes of an enumeration's members."""
    members: Mapping[str, Any] = kind.__members__ if issubclass(kind, enum.Enum) else {}
    return {
        name: {each: value for each, value in vars(member).items() if not made_by_enum(each)}
        for name, member in members.items()
        if member._name_ == name  # otherwise it is an alias
    }


def set_members(kind: type, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    for name, given in attributes.items():
        own: dict[str, Any] = kind.__members__[name].__dict__  # type: ignore[attr-defined]
        for each in [each for each in own if not (made_by_enum(each) or each in given)]:
            del own[each]
        own.update(given)


def made_by_enum(name: str) -> bool:
    # a `_value_` may be mutable
    return name.startswith("_") and name.endswith("_") and name != "_value_"


def contents_in(value: object) -> list[Any]:
    """Return the items of a list or dictionary without running the class's code."""
    if isinstance(value, list):
        return [*list.__iter__(value)]
    return [*dict.items(value)] if isinstance(value, dict) else []


def slots_with_values(value: object) -> dict[str, Any]:
    found = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # the slot is empty
                    found[name] = member.__get__(value)
    return found


BASES = "__bases__"
# a key that cannot be the name of an attribute
OF_MEMBERS = "the members' attributes"
# Python adds these itself
MADE_BY_PYTHON = {"__slotnames__", "_abc_impl", "__weakref__", "__dict__"}
