"""A process has a class only once, but each operation sees the attributes that the class had in the
caller when the operation began. Worker's side.

    operation 1  loaded: rate = 1                       runs again: takes the class back, rate = 1
    operation 2                  loaded: takes it, rate = 2; 1 keeps what it left
So before a call or a backward runs, the classes of its operation get their attributes back,
deletions included.

Guarantees: no code of the classes or their metaclasses runs when attributes are put back. Nothing
    is kept for an operation that cannot run again.
Assumes: one thread runs calls. Engines in the caller's process have copies of the classes instead.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "BASES",
    "MADE_BY_PYTHON",
    "ClassStates",
    "attributes_of_members",
    "place_classes",
    "set_members",
]

ABSENT = object()


class ClassStates(dict[type, dict[str, Any]]):
    """The classes that came with one operation, and their attributes while another one's are in
    place."""

    def take(self, kind: type) -> None:
        """Make the class this operation's."""
        owner = OWNERS.get(kind, lambda: None)()
        if owner is not self:
            if owner is not None:
                owner[kind] = own_attributes(kind)
            OWNERS[kind] = weakref.ref(self)
            if kind in self:
                restore(kind, self[kind])
        self.setdefault(kind, {})


# For each class that came from the caller, the operation whose attributes it has. Nothing is kept
# for an operation that nobody can run again.
OWNERS: weakref.WeakKeyDictionary[type, Callable[[], ClassStates | None]] = (
    weakref.WeakKeyDictionary()
)


def place_classes(states: Iterable[ClassStates]) -> None:
    for each in states:
        for kind in each:
            each.take(kind)


def own_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class, apart from those that Python made."""
    found = {
        name: value
        for name, value in vars(kind).items()
        if not (name in MADE_BY_PYTHON or isinstance(value, types.MemberDescriptorType))
    }
    return found | {OF_MEMBERS: attributes_of_members(kind), BASES: kind.__bases__}


def restore(kind: type, attributes: Mapping[str, Any]) -> None:
    """Give the class these attributes, and no others, whatever its metaclass says of that."""
    now = own_attributes(kind)
    for name in now.keys() - attributes.keys() - {OF_MEMBERS}:
        type.__delattr__(kind, name)
    for name, value in attributes.items():
        if now.get(name, ABSENT) is not value and name != OF_MEMBERS:
            type.__setattr__(kind, name, value)
    set_members(kind, attributes.get(OF_MEMBERS, {}))


def attributes_of_members(kind: type) -> dict[str, dict[str, Any]]:
    """Return what the members of an enumeration have besides their names."""
    members: Mapping[str, Any] = kind.__members__ if issubclass(kind, enum.Enum) else {}
    return {
        name: {each: value for each, value in vars(member).items() if not made_by_enum(each)}
        for name, member in members.items()
        if member.name == name  # others are aliases
    }


def set_members(kind: type, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    for name, given in attributes.items():
        own: dict[str, Any] = kind.__members__[name].__dict__  # type: ignore[attr-defined]
        for each in [each for each in own if not (made_by_enum(each) or each in given)]:
            del own[each]
        own.update(given)


def made_by_enum(name: str) -> bool:
    return name.startswith("_") and name.endswith("_") and name != "_value_"  # which may be mutable


BASES = "__bases__"
# A key that is not an attribute's name.
OF_MEMBERS = "the members' attributes"
# Python adds these by itself.
MADE_BY_PYTHON = {"__slotnames__", "_abc_impl", "__weakref__", "__dict__"}
