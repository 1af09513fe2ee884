"""Objects of the user's classes are rebuilt from their parts if pickle would change them. Both
sides use this module.

Pickle looks up methods on the object, so a `__getattr__` of its class may answer. It uses an
unfinished object as a key, before the attributes that `__hash__` needs are set. It copies the
`__dict__` of an object that is its own `__dict__`. It fills dictionaries and lists through their
own methods, before the attributes that these need are set. If `__reduce__` returns a name, pickle
looks it up in a module, where a script's objects are not found.

    object ──► class, immutable attributes  ──► empty object with these attributes
           ──► items, all attributes, slots ──► put into the object
"""

from __future__ import annotations

import enum
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

from mpgrad.environment import PLACE
from mpgrad.pickling.class_states import contents_in, slots_with_values
from mpgrad.pickling.modules import at_path, is_users_own
from mpgrad.pickling.reducers import weakly
from mpgrad.pickling.streams import set_attributes

__all__ = ["IMMUTABLE", "Way", "by_own_code", "way_of"]

Reduced = tuple[Any, ...]
Way = Callable[[Any, Any], Any]  # a function that reduces an object for a pickler
OWN_METHODS = "__getnewargs__", "__getnewargs_ex__", "__setstate__"
IN_PYTHON = types.FunctionType
IS_HEAP_TYPE = 1 << 9


def way_of(kind: Any) -> Way | None:
    """Return how objects of a class are reduced, or None if pickle rebuilds them correctly."""
    if issubclass(kind, enum.Enum):
        return by_name
    if isinstance(kind.__reduce_ex__, IN_PYTHON) or isinstance(kind.__reduce__, IN_PYTHON):
        return by_own_code
    if type(kind).__module__ == "msgspec._core":
        return by_fields
    in_c = next(each for each in kind.__mro__ if not each.__flags__ & IS_HEAP_TYPE)
    usual = getattr(object, "__getstate__", None)  # since Python 3.11
    if (
        in_c not in (object, dict, list)
        or kind.__reduce__ is not object.__reduce__
        or getattr(kind, "__getstate__", usual) is not usual
        or any(hasattr(kind, name) for name in OWN_METHODS)
    ):
        return None
    asks = (getattr(kind, name, None) for name in ("__getattr__", "__getattribute__", "__hash__"))
    if any(isinstance(each, IN_PYTHON) for each in asks) or fills_itself(kind):
        return by_parts
    return by_dictionary if issubclass(kind, dict) and kind.__dictoffset__ else None


def fills_itself(kind: Any) -> bool:
    """Whether pickle would run the code of a dictionary's or list's class when it adds the
    items."""
    names = ("__setitem__",) if issubclass(kind, dict) else ("append", "extend")
    return issubclass(kind, dict | list) and any(
        isinstance(getattr(kind, name, None), IN_PYTHON) for name in names
    )


def by_name(pickler: Any, value: Any) -> Any:
    """Reduce a member of an enumeration to its name, because a copy of its value may not be equal.
    Flags without a name are reduced to their value."""
    kind, name = type(value), value._name_
    named = kind.__members__.get(name) is value
    return (getattr, (kind, name)) if named else by_own_code(pickler, value)


def by_own_code(pickler: Any, value: Any) -> Any:
    """Reduce an object by its class's code, which may return a name that a worker lacks."""
    reduced = value.__reduce_ex__(5)
    if isinstance(reduced, str):
        return reduce_one_of_a_kind(pickler, value, reduced)
    return by_parts(pickler, value) if any(map(member_of(value), reduced[1])) else reduced


def member_of(value: object) -> Callable[[Any], bool]:
    """Return a function that tests whether a class is sent by value and contains the object."""

    def has(kind: Any) -> bool:
        return (
            isinstance(kind, type)
            and is_users_own(kind.__module__)
            and any(each is value for each in vars(kind).values())
        )

    return has


def by_dictionary(pickler: Any, value: Any) -> Any:
    """Reduce a dictionary as pickle does, unless it is its own `__dict__`."""
    return by_parts(pickler, value) if value.__dict__ is value else value.__reduce_ex__(5)


def by_fields(pickler: Any, value: Any) -> Any:
    """Reduce a msgspec struct. msgspec leaves out attributes that are not fields."""
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return (
        with_fields,
        (type(value), fields),
        attributes_in(value) or None,
        None,
        None,
        set_attributes,
    )


def with_fields(kind: Any, fields: dict[str, Any]) -> Any:
    made = kind(**fields)
    for name, value in fields.items():  # `__post_init__` may have changed them again
        sys.modules["msgspec"].structs.force_setattr(made, name, value)
    return made


def attributes_in(value: object) -> dict[str, Any] | None:
    """Return the `__dict__` without running the class's code."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has only slots
        return None
    return found


def by_parts(pickler: Any, value: Any) -> Reduced:
    """Reduce an object to its items, attributes and slots.

    Otherwise pickle would run code of its class while the object is unfinished.
    The empty object already has the immutable attributes, because in a cycle it may be hashed
    before it gets the others. If the object is its own `__dict__`, so is the rebuilt one. If the
    class's own code would add the items, they are sent as a list.
    """
    contents = contents_in(value)
    items = pairs = None
    if not fills_itself(type(value)):
        items = iter(contents) if isinstance(value, list) else None
        pairs = iter(contents) if isinstance(value, dict) else None
        contents = []
    attributes, slots = attributes_in(value), slots_with_values(value)
    all_values = {**slots, **(attributes or {})}
    early = {name: each for name, each in all_values.items() if is_immutable(each)}
    late = contents or attributes is value or len(early) < len(all_values)
    return (
        with_attributes,
        (type(value), early),
        (attributes, slots, contents) if late else None,
        items,
        pairs,
        set_parts,
    )


def is_immutable(value: object) -> bool:
    kind = type(value)
    return kind in IMMUTABLE or (kind in (tuple, frozenset) and all(map(is_immutable, value)))  # type: ignore[call-overload]


IMMUTABLE = {type(None), bool, int, float, complex, str, bytes}


def with_attributes(kind: Any, attributes: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def set_parts(made: Any, parts: tuple[dict[str, Any] | None, dict[str, Any], list[Any]]) -> None:
    attributes, slots, contents = parts
    if contents:
        fill: Any = list.extend if isinstance(made, list) else dict.update
        fill(made, contents)
    if attributes is made:
        object.__setattr__(made, "__dict__", made)
    elif attributes is not None:
        own: dict[str, Any] = object.__getattribute__(made, "__dict__")
        own.clear()  # so that the attributes get the caller's order
        own.update({sys.intern(name): each for name, each in attributes.items()})
    for name, value in slots.items():
        object.__setattr__(made, name, value)


# --- objects that are one of a kind


def reduce_one_of_a_kind(pickler: Any, value: Any, name: str) -> Any:
    """Reduce an object whose `__reduce__` returned its name.

    If a script or a function made the object, a worker cannot find the name. Then the worker makes
    the object once for each operation, as it was when it first arrived, and the caller gets its own
    object back.
    """
    module = getattr(value, "__module__", None) or type(value).__module__
    if not is_users_own(module) and at_path(sys.modules[module], name) is value:
        return name
    _, (kind, early), *_ = by_parts(pickler, value)
    parts = attributes_in(value), slots_with_values(value), contents_in(value)
    here = getattr(pickler, "_here", None)  # the names that a worker loads it with
    return one_of_a_kind, (here, number_of(value), kind, early), parts, None, None, fill


def number_of(value: object) -> str:
    number, find = NUMBERS.get(id(value), (uuid.uuid4().hex, None))
    if find is None or find() is not value:
        number = note_one(uuid.uuid4().hex, value)
    ONES[number] = weakly(value)  # it may come back to this process
    return number


def note_one(number: str, value: object) -> str:
    if len(NUMBERS) >= MOST_ONES:
        for gone in [each for each, (_, find) in NUMBERS.items() if find() is None]:
            ONES.pop(NUMBERS.pop(gone)[0], None)
    NUMBERS[id(value)] = number, weakly(value)
    return number


def one_of_a_kind(names: Any, number: str, kind: type, attributes: dict[str, Any]) -> Any:
    of_operation = names is not None and PLACE.in_worker
    found = names.ones.get(number) if of_operation else ONES.get(number, type(None))()
    if found is None:
        found = with_attributes(kind, attributes)
        note_one(number, found)
        BARE.add(id(found))
        if of_operation:
            names.ones[number] = found
        else:
            ONES[number] = weakly(found)
    return found


def fill(made: Any, parts: tuple[Any, Any, list[Any]]) -> None:
    """Set the parts of an object, unless it already has them."""
    if id(made) in BARE:
        BARE.remove(id(made))
        set_parts(made, parts)


MOST_ONES = 1000  # at this number, entries of dead objects are removed
ONES: dict[str, Callable[[], Any]] = {}  # by number; objects that may come back to this process
NUMBERS: dict[int, tuple[str, Callable[[], Any]]] = {}  # by id; the numbers of all these objects
BARE: set[int] = set()  # ids of objects that do not have their parts yet
