"""Objects of the user's classes are rebuilt from their parts where pickle would change them.
Both sides.

Pickle asks an object for methods, so a `__getattr__` of the class answers for it. It puts a
half-made object into a dictionary, whose `__hash__` then lacks its attributes. It copies the
`__dict__` of an object that is its own `__dict__`. It fills dictionaries and lists by their own
methods, before these find any attributes. And it takes a name that a `__reduce__` gave for a name
in a module, where a script's objects are not found.

    object ──► class, attributes that cannot change ──► empty object with these
           ──► items, all attributes, slots         ──► put into it
"""

from __future__ import annotations

import contextlib
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

from mpgrad.pickling.modules import at_path, is_users_own
from mpgrad.pickling.reducers import weakly

__all__ = ["by_own_code", "way_of"]

Reduced = tuple[Any, ...]
Way = Callable[[Any, Any], Any]  # reduces an object for a pickler
OWN_METHODS = "__getnewargs__", "__getnewargs_ex__", "__setstate__"
IN_PYTHON = types.FunctionType
IS_HEAP_TYPE = 1 << 9


def way_of(kind: Any) -> Way | None:
    """Return how objects of a class are reduced; None if pickle rebuilds them as they are."""
    if isinstance(kind.__reduce_ex__, IN_PYTHON) or isinstance(kind.__reduce__, IN_PYTHON):
        return by_own_code
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
    """Whether a dictionary's or list's own code would run as pickle puts in what it holds."""
    names = ("__setitem__",) if issubclass(kind, dict) else ("append", "extend")
    return issubclass(kind, dict | list) and any(
        isinstance(getattr(kind, name, None), IN_PYTHON) for name in names
    )


def by_own_code(pickler: Any, value: Any) -> Any:
    """Reduce an object as its class says. The class may give a name, which a worker lacks."""
    reduced = value.__reduce_ex__(5)
    return reduce_one_of_a_kind(value, reduced) if isinstance(reduced, str) else reduced


def by_parts(pickler: Any, value: Any) -> Any:
    """Reduce an object that pickle would ask for methods, or would hash when it is half made."""
    return reduce_by_parts(value)


def by_dictionary(pickler: Any, value: Any) -> Any:
    """Reduce a dictionary as pickle does, unless it is its own `__dict__`."""
    return reduce_by_parts(value) if value.__dict__ is value else value.__reduce_ex__(5)


def attributes_in(value: object) -> dict[str, Any] | None:
    """Return the `__dict__`, whatever the class says of attributes."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots only
        return None
    return found


def slots_with_values(value: object) -> dict[str, Any]:
    found = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it is empty
                    found[name] = member.__get__(value)
    return found


def reduce_by_parts(value: Any) -> Reduced:
    """Reduce an object to its items, attributes and slots.

    Its immutable attributes come with the empty object: in a cycle it may be hashed before it gets
    the others. If the object is its own `__dict__`, so is the one that is made from it. If its own
    code would put the items in, they come as a list.
    """
    items = list.__iter__(value) if isinstance(value, list) else None
    pairs = iter(dict.items(value)) if isinstance(value, dict) else None
    contents = []
    if fills_itself(type(value)):
        contents, items, pairs = [*(items or pairs or ())], None, None
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
        own.clear()  # they get the caller's order
        own.update({sys.intern(name): each for name, each in attributes.items()})
    for name, value in slots.items():
        object.__setattr__(made, name, value)


# --- objects that are one of a kind


def reduce_one_of_a_kind(value: Any, name: str) -> Any:
    """Reduce an object whose `__reduce__` gave its name.

    If a script or a function made the object, a worker cannot find the name. Then each process has
    the object once, and the caller gets its own back.
    """
    module = getattr(value, "__module__", None) or type(value).__module__
    if not is_users_own(module) and at_path(sys.modules[module], name) is value:
        return name
    _, (kind, early), parts, items, pairs, _ = reduce_by_parts(value)
    parts = parts or (attributes_in(value), slots_with_values(value), [])
    return one_of_a_kind, (number_of(value), kind, early), parts, items, pairs, set_unless_ours


def number_of(value: object) -> str:
    number = NUMBERS.get(id(value))
    if number is None or number not in ONES or ONES[number]() is not value:
        number = uuid.uuid4().hex
        note_one(number, value)
        OF_THIS_PROCESS.add(number)
    return number


def note_one(number: str, value: object) -> None:
    if len(ONES) == MOST_ONES:
        for gone in [each for each, find in ONES.items() if find() is None]:
            del ONES[gone]
        OF_THIS_PROCESS.intersection_update(ONES)
    ONES[number], NUMBERS[id(value)] = weakly(value), number


def one_of_a_kind(number: str, kind: type, attributes: dict[str, Any]) -> Any:
    found = ONES[number]() if number in ONES else None
    if found is None:
        found = with_attributes(kind, attributes)
        note_one(number, found)
    return found


def set_unless_ours(made: Any, parts: Any) -> None:
    if NUMBERS.get(id(made)) not in OF_THIS_PROCESS:
        set_parts(made, parts)


MOST_ONES = 1000  # after which those that are gone are forgotten
ONES: dict[str, Callable[[], Any]] = {}
NUMBERS: dict[int, str] = {}  # of these objects, by id
OF_THIS_PROCESS: set[str] = set()
