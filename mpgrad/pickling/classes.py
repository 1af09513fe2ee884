"""Classes are sent by value if workers cannot import them. Types of ctypes are also sent.

Such classes are defined in a script or in a function. cloudpickle sends them by value, and
recognises a class that comes back, so each process has it once. But cloudpickle then writes the
received attributes into that class. This is right in a worker, whose classes should match the
caller's current ones. It is wrong in the caller, where the classes are the user's own. cloudpickle
also drops `__slots__` when it rebuilds a class. Instances then have a `__dict__`, which the
caller's instances cannot take back. Here the caller's classes stay unchanged, and both sides keep
the slots.

The metaclasses of ctypes types have no names in `ctypes`, so cloudpickle cannot send these types.
Pointers, arrays and prototypes are rebuilt from their parts. The worker imports structures of the
user's modules, and uses its own open libraries and files. A script's structures are refused, and so
is the type that a library uses for its functions.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS as TRACKER_ID_OF
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as CLASS_OF
from cloudpickle.cloudpickle import _class_setstate as set_attributes
from cloudpickle.cloudpickle import _dynamic_class_reduce as dynamic_class_reduce
from cloudpickle.cloudpickle import _lookup_class_or_track as track
from cloudpickle.cloudpickle import _lookup_module_and_qualname as importable_as
from cloudpickle.cloudpickle import _make_function as make_function
from cloudpickle.cloudpickle import _make_skeleton_class as make_bare_class
from cloudpickle.cloudpickle import _make_skeleton_enum as make_bare_enum

from mpgrad.pickling.class_states import (
    BASES,
    MADE_BY_PYTHON,
    contents_in,
    slots_with_values,
)
from mpgrad.pickling.modules import (
    AS_IMPORTED,
    PLACED,
    at_path,
    attribute_here,
    is_own,
    is_users_own,
    name_of,
    own_import,
    pickle_finds,
    place_among,
)
from mpgrad.pickling.registrations import register, registered_for

__all__ = [
    "CALLERS_OWN",
    "SETS_CLASS",
    "ClassPickler",
    "ClassUnpickler",
    "dumps",
    "dynamic",
    "follow_the_caller",
    "loads",
    "loads_initializer",
    "made_like_own",
    "only_carried",
    "reduce_c_type",
]

# copies of the caller's classes, for tasks in this process
COPIES: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
OURS: weakref.WeakSet[type] = weakref.WeakSet()  # pickled by value here, so they may come back
# Their parts could be pickled. But a task that waits for a copy, or passes it something, would wait
# for ever.
CALLERS_OWN = threading.Thread, subprocess.Popen, queue.Queue, Future
SETS_CLASS = set_attributes.__module__, set_attributes.__name__


def dumps(value: object, pickler: type[ClassPickler] | None = None) -> bytes:
    buffer = io.BytesIO()
    (pickler or ClassPickler)(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def only_carried(given: Mapping[str, Any], pickler: type[ClassPickler]) -> dict[str, Any]:
    """Return the values that can be pickled."""
    found = {}
    for name, value in given.items():
        with contextlib.suppress(Exception):  # an object among them may raise anything
            dumps(value, pickler)
            found[name] = value
    return found


def loads(pickled: bytes) -> Any:
    return ClassUnpickler(io.BytesIO(pickled)).load()


def loads_initializer(pickled: bytes) -> tuple[Any, Any, list[types.FunctionType]]:
    """Load an initializer and its arguments. Return these, the caller's names of its objects if
    there are any, and the functions that came by value."""
    unpickler = InitializerUnpickler(stream := io.BytesIO(pickled))
    whole = unpickler.load()
    names = unpickler.load() if stream.tell() < len(pickled) else None
    return whole, names, unpickler.functions


class ClassPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickles classes by value as cloudpickle does, and keeps their slots.

    A class that came from the other side is pickled by its name there.
    """

    to_caller = True  # the receiver already has the classes and modules that it sent

    def reducer_override(self, value: object) -> Any:
        if self.to_caller and isinstance(value, type) and value in COPIES:
            return class_of_ours, (COPIES[value],)
        if (
            isinstance(value, type)
            and value in TRACKER_ID_OF
            and PLACED.hides(value.__module__, value.__qualname__.partition(".")[0])
        ):
            # the caller finds it by its tracker id
            return with_slots(value, dynamic_class_reduce(value))
        if isinstance(value, type) and (reduced := reduce_c_type(value)) is not None:
            return reduced
        if isinstance(value, type) and (parts := of_pydantic(value)) is not None:
            return operator.getitem, parts
        reduced = super().reducer_override(value)
        if reduced is NotImplemented and isinstance(value, CALLERS_OWN):
            raise TypeError(f"cannot pickle {type(value).__qualname__!r} object")
        if not isinstance(value, type) or (
            reduced is NotImplemented and pickle_finds(value.__module__)
        ):
            return reduced
        if reduced is NotImplemented:
            return attribute_here, (value.__module__, value.__qualname__)
        if (place := other_place(value)) is not None:
            return attribute_here, place
        OURS.add(value)
        return with_slots(value, reduced)


def of_pydantic(value: type) -> tuple[Any, Any] | None:
    """Return the generic pydantic model that a model was made from, and the model's parameters."""
    made_from = vars(value).get("__pydantic_generic_metadata__") or {"origin": None}
    return None if made_from["origin"] is None else (made_from["origin"], made_from["args"])


def other_place(value: type) -> tuple[str, str] | None:
    """Return the library module and the name that lead to a class, if its own ones are wrong.

    Enumerations of pybind11 have a wrong name. The outcomes of pytest have a wrong module.
    """
    home = value.__module__
    if home not in sys.modules or home == "__main__" or is_own(home):
        return None
    modules = list(sys.modules) if home == "builtins" else [home]
    return place_among(value, [each for each in modules if each != "__main__" and not is_own(each)])


def dynamic(value: type) -> Any:
    """Reduce a class by value, even if it could be imported."""
    OURS.add(value)
    return with_slots(value, dynamic_class_reduce(value))


def with_slots(value: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the parts of a class that cloudpickle leaves out: slots, qualified name, registrations.

    The slots and the name are arguments, because they cannot be set after the class is made.
    """
    if reduced[0] not in (make_bare_class, make_bare_enum):  # found by its name, or None's class
        return reduced
    make, arguments, (state, _), *rest = reduced
    if CLASS_OF[arguments[-2]] is not value:
        raise TypeError(
            f"cannot pickle the class {value.__qualname__!r}: it is equal to another class, "
            f"because its metaclass {type(value).__qualname__!r} defines __eq__; let a class be "
            "equal only to itself"
        )
    more = registered_for(value)
    state = {**state, BASES: value.__bases__}
    if make is make_bare_enum:
        members: Any = members_of(value)
        state = {name: each for name, each in state.items() if name not in members}
        made_by = type(value), boundary_of(value)
        arguments = *arguments[:3], members, *arguments[4:-1], made_by
        return make_enum, arguments, (state, more), *rest
    *first, given, tracker_id, extra = arguments
    given = {**given, "__qualname__": value.__qualname__}
    slots = slots_in(value)
    if vars(value).get("__pydantic_complete__"):
        # These are the local names of the function that defined the class. A complete class does
        # not need them.
        state = {**state, "__pydantic_parent_namespace__": None}
    if type(value).__module__ == "msgspec._core":
        state = {name: each for name, each in state.items() if not is_of_struct(value, name, each)}
        parts = given | {"__annotations__": vars(value).get("__annotations__", {})}
        if "__post_init__" in vars(value):
            parts["__post_init__"] = finish  # msgspec looks for it only when it makes the class
        arguments = slots, *first, parts, *struct_parts(value), tracker_id, extra
        return make_struct, arguments, (state, more), *rest
    if typing.NamedTuple in arguments[2]:  # among the bases; NamedTuple makes its own slots
        slots = None
    if slots is not None:
        state = {name: each for name, each in state.items() if not is_slot(value, name, each)}
    return make_class, (slots, *first, given, tracker_id, extra), (state, more), *rest


def make_class(
    slots: Sequence[str] | None,
    kind: type[type],
    name: str,
    bases: tuple[Any, ...],
    given: dict[str, Any],
    tracker_id: str | None,
    extra: object,
) -> type:
    """Make a class, or return the class that this process already has for the tracker id."""
    known: type | None = CLASS_OF.get(tracker_id)
    if known is not None:
        return known
    members = {sys.intern(each): value for each, value in given.items()}
    made = None
    if slots is not None:
        with contextlib.suppress(TypeError):  # the metaclass adds some of the slots itself
            made = bare_class(kind, name, bases, {**members, "__slots__": slots})
        if made is not None and set(slots) - set(slots_in(made) or ()):
            # A library's metaclass makes the slots from parts of the class body that are gone.
            made = bare_class(kind, name, bases, {**members, "__slots__": slots}, is_not_pythons)
    tracked: type = track(tracker_id, made or bare_class(kind, name, bases, members))
    return tracked


def make_enum(
    bases: tuple[Any, ...],
    name: str,
    qualname: str,
    members: dict[str, tuple[Any, ...]],
    module: str,
    tracker_id: str | None,
    made_by: tuple[type[enum.EnumMeta], object],
) -> type:
    # long because: it has the arguments of cloudpickle's function, which loses aliases, names of
    # several flags, metaclasses, and what `__new__` made of a member
    """Make an enumeration, or return the one that this process already has for the tracker id."""
    known: type | None = CLASS_OF.get(tracker_id)
    if known is not None:
        return known
    body: Any = enum.EnumMeta.__prepare__(name, bases)
    body["__new__"], body["__init__"] = new_member, lambda *_: None
    for each, parts in members.items():
        body[each] = parts
    kind, boundary = made_by
    # such as `enum.KEEP`
    more: Any = {} if boundary is boundary_of(bases[-1]) else {"boundary": boundary}
    with quiet(bases):
        made: Any = enum.EnumMeta.__new__(kind, name, bases, body, **more)
    # those of the caller's class arrive with its state
    for each in {"__init__", "__new_member__", "_new_member_", "_use_args_"} & vars(made).keys():
        type.__delattr__(made, each)
    made.__module__, made.__qualname__ = module, qualname
    return track(tracker_id, made)  # type: ignore[no-any-return]  # cloudpickle is untyped


def new_member(kind: Any, *parts: Any) -> Any:
    """Make a member without the code of Python classes that it extends."""
    value, arguments, contents, slots = parts[0] if kind._member_type_ is tuple else parts
    base = class_in_c(kind)
    made = base.__new__(kind, *arguments)
    if base.__init__ is not object.__init__:
        base.__init__(made, *arguments)
    if issubclass(base, dict):
        for item in contents:
            base.__setitem__(made, *item)
    elif contents:
        base.extend(made, contents)
    for name, each in slots.items():
        object.__setattr__(made, name, each)
    made._value_ = value
    return made


def members_of(value: Any) -> dict[str, tuple[Any, ...]]:
    """Return for each name of an enumeration the arguments of `new_member`."""
    members = value.__members__
    parts = {
        name: (member._value_, *data_of(member))
        for name, member in members.items()
        if member._name_ == name  # otherwise it is an alias, which needs the same value
    }
    return {name: parts[member._name_] for name, member in members.items()}


def data_of(member: Any) -> tuple[Sequence[Any], Sequence[Any], dict[str, Any]]:
    """Return the arguments that the member's class in C needs, its contents, and its slots."""
    base = class_in_c(type(member))
    slots = {
        name: each for name, each in slots_with_values(member).items() if not hasattr(base, name)
    }
    if base in (object, list, dict):
        return (), contents_in(member), slots
    if hasattr(base, "__getnewargs__"):
        return base.__getnewargs__(member), (), slots
    of_array = base.__reduce_ex__ is not object.__reduce_ex__
    if of_array or base.__reduce__ is not object.__reduce__:
        reduced = base.__reduce_ex__(member, 2) if of_array else base.__reduce__(member)
        make, arguments, *rest = reduced
        if make is type(member) and not (rest and isinstance(rest[0], tuple)):
            return arguments, [each for items in rest[1:] for each in items or ()], slots
    return (member._value_,), (), slots


def class_in_c(kind: type) -> Any:
    """Return the nearest class of the method resolution order that is not written in Python."""
    return next(
        owner
        for owner in kind.__mro__
        if any(is_c_method(owner, each) for each in vars(owner).values())
    )


def is_c_method(owner: type, member: object) -> bool:
    return (
        isinstance(member, types.MethodDescriptorType | types.WrapperDescriptorType)
        and member.__objclass__ is owner
    )


def boundary_of(kind: type) -> object:
    return getattr(kind, "_boundary_", None)  # since Python 3.11


# A msgspec class must be made with its fields.
def make_struct(
    slots: Sequence[str],
    kind: Any,
    name: str,
    bases: tuple[Any, ...],
    given: dict[str, Any],
    fields: dict[str, dict[str, Any]],
    config: dict[str, Any],
    tracker_id: str | None,
    extra: object,
) -> type:
    # long because: these are the arguments of `make_class`, and two more
    """Make a msgspec class, or return the one that this process already has for the tracker id."""
    made: type | None = CLASS_OF.get(tracker_id)
    if made is None:
        field = sys.modules["msgspec"].field
        given = given | {each: field(**parts) for each, parts in fields.items() if parts}
        resolved = types.resolve_bases(bases)
        if resolved is not bases:
            given["__orig_bases__"] = bases
        with quiet(resolved):
            made = track(tracker_id, kind(name, resolved, given, **config))
    return made


def finish(made: Any) -> None:
    """Call the `__post_init__` that the class was given after it was made."""
    type(made).__post_init__(made)


def struct_parts(value: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the arguments of `msgspec.field` for each field of the class, and its options."""
    names, defaults = value.__struct_fields__, value.__struct_defaults__
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    fields: dict[str, dict[str, Any]] = {}
    for name, encoded in zip(names, value.__struct_encode_fields__, strict=True):
        if name in vars(value).get("__annotations__", {}):
            fields[name] = {} if encoded == name else {"name": encoded}
            default = given.get(name, sys.modules["msgspec"].NODEFAULT)
            if hasattr(default, "factory"):
                fields[name]["default_factory"] = default.factory
            elif default is not sys.modules["msgspec"].NODEFAULT:
                fields[name]["default"] = default
    config = {
        name: getattr(value.__struct_config__, name)
        for name in dir(value.__struct_config__)
        if not name.startswith("_")
    }
    # reading `kw_only` from the signature would need all types that the annotations name
    config["kw_only"] = any(name not in value.__match_args__ for name in fields)
    return fields, config


def is_of_struct(owner: type, name: str, member: object) -> bool:
    """Whether msgspec makes this member of a class."""
    made = name.startswith("__struct") or name in ("__slots__", "__match_args__", "__annotations__")
    return made or is_slot(owner, name, member)


def bare_class(
    kind: type[type],
    name: str,
    bases: tuple[Any, ...],
    members: dict[str, Any],
    is_passed_over: Callable[[str], bool] = is_users_own,
) -> type:
    """Make a class without running the user's code that ran when the class was defined.

    This code is `__init_subclass__` of the bases, and methods of the metaclass. Its effects arrive
    with the state of the class, and with the objects that it wrote to. Metaclasses of the modules
    that are passed over do not make the class.
    """
    resolved = types.resolve_bases(bases)
    with quiet(resolved):
        # that of `typing` or `typing_extensions`, which refuses the bases that it made
        if kind.__name__ == "_TypedDictMeta":
            if any(issubclass(each, typing.Generic) for each in resolved):
                members = {**members, "__orig_bases__": bases}
                return type.__new__(kind, name, (dict, typing.Generic), members)
            return type.__new__(kind, name, (dict,), members)
        if not is_passed_over(kind.__module__):
            return types.new_class(name, bases, {"metaclass": kind}, lambda to: to.update(members))
        make: Any = next(
            each.__new__ for each in type.mro(kind) if not is_passed_over(each.__module__)
        )
        if resolved is not bases:
            members = {**members, "__orig_bases__": bases}
        made: type = make(kind, name, resolved, members)
        return made


def is_not_pythons(module: str) -> bool:
    return module not in sys.stdlib_module_names


@contextlib.contextmanager
def quiet(bases: Sequence[Any]) -> Iterator[None]:
    """Keep this thread from running `__init_subclass__` methods of the user's classes."""
    owners = {
        owner: vars(owner)[BEGINS]
        for base in types.resolve_bases(bases)
        for owner in type.mro(base)
        if BEGINS in vars(owner) and is_users_own(owner.__module__)
    }
    if not owners:
        yield
        return
    this = threading.get_ident()

    def silent(begins: Any) -> Any:
        def begin(cls: type, /, **given: Any) -> None:
            if threading.get_ident() != this:
                begins.__get__(None, cls)(**given)

        return classmethod(begin)

    with QUIET:
        for owner, begins in owners.items():
            type.__setattr__(owner, BEGINS, silent(begins))
        try:
            yield
        finally:
            for owner, begins in owners.items():
                type.__setattr__(owner, BEGINS, begins)


BEGINS = "__init_subclass__"
# the classes belong to the process, and some engines' workers are threads
QUIET = threading.RLock()


def made_like_own(
    module: str, path: str, tracker_id: str, make: Callable[..., type], arguments: tuple[Any, ...]
) -> type:
    """Use the worker's import of the class if it is alike. Otherwise make the class.

    This keeps the effects of the import: the class may be registered with a library, or be the base
    of another class.
    """
    found: Any = sys.modules.get(module)
    with contextlib.suppress(ImportError):  # the worker does not have the module
        found = own_import(module)
    found = at_path(found, path)
    is_free = tracker_id not in CLASS_OF and found not in TRACKER_ID_OF
    if isinstance(found, type) and is_free and is_alike(found, make, arguments):
        AS_IMPORTED[found] = dict(vars(found))
        track(tracker_id, found)
        return found
    return make(*arguments)


def is_alike(found: type, make: Callable[..., type], arguments: tuple[Any, ...]) -> bool:
    """Whether the class `found` is like the class that `make(*arguments)` would return."""
    if make is make_enum:
        bases, _, _, members, *_, made_by = arguments
        if not (
            issubclass(found, enum.Enum)
            and found.__bases__ == bases
            and (type(found), boundary_of(found)) == made_by
        ):
            return False
        with contextlib.suppress(Exception):  # such as two tensors, which have no truth value
            return bool(members_of(found) == members)
        return False
    slots, kind, _, bases, *_ = arguments
    return type(found) is kind and found.__bases__ == bases and slots_in(found) == slots


def slots_in(value: type) -> list[str] | None:
    if "__slots__" not in vars(value):
        return None
    slots = [name for name, member in vars(value).items() if is_slot(value, name, member)]
    return slots + [name for name in ("__dict__", "__weakref__") if name in vars(value)]


def is_slot(owner: type, name: str, member: object) -> bool:
    """Whether the member is a slot under its own name. Under another name it is a plain
    attribute."""
    return isinstance(member, types.MemberDescriptorType) and (
        member.__objclass__,
        member.__name__,
    ) == (owner, name)


def set_class(made: type, state: Any) -> None:
    """Set the attributes of a class without calling its metaclass, and register the class."""
    attributes, registered = state
    for name, value in attributes.items():
        if name == "_abc_impl":
            for each in value:
                made.register(each)  # type: ignore[attr-defined]
        elif name != BASES or made.__bases__ != value:
            type.__setattr__(made, name, value)
    register(made, registered)


def leave_ours(made: type, state: Any) -> None:
    """Set the state of a class that was made here. Leave a class that already existed unchanged."""
    if made not in OURS or made in COPIES:
        set_class(made, state)


def class_of_ours(tracker_id: str) -> type:
    found: type = CLASS_OF[tracker_id]
    return found


class ClassUnpickler(pickle.Unpickler):
    """Loads what `ClassPickler` wrote."""

    set_class: Callable[[type, Any], Any] = staticmethod(leave_ours)

    def __init__(self, *arguments: Any, copies: dict[str, type] | None = None, **more: Any) -> None:
        """Make an unpickler.

        If `copies` is given, classes by value become copies, because the caller's own classes exist
        in this process. `copies` stores them by tracker id.
        """
        super().__init__(*arguments, **more)
        self._copies = copies

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == SETS_CLASS:
            return self.set_class
        found = super().find_class(module, name)
        return (
            functools.partial(copied, found, self._copies)
            if self._copies is not None and found in MAKERS
            else found
        )


class InitializerUnpickler(ClassUnpickler):
    """Records each function that arrives by value."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.functions: list[types.FunctionType] = []

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._make if found is make_function else found

    def _make(self, *parts: Any) -> types.FunctionType:
        made: types.FunctionType = make_function(*parts)
        self.functions.append(made)
        return made


def copied(make: Callable[..., type], copies: dict[str, type], *arguments: Any) -> type:
    """Make a copy of this process's class with the same tracker id, by `make`."""
    if make is made_like_own:
        *_, make, arguments = arguments
        return make(*arguments)
    *others, tracker_id, extra = arguments
    if tracker_id in CLASS_OF and issubclass(CLASS_OF[tracker_id], BaseException | enum.Enum):
        # The caller's filters and handlers recognise an exception by its class. An enumeration's
        # members must stay the same objects.
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
        for name in vars(made).keys() - state[0].keys() - NOT_IN_STATE:
            if not is_slot(made, name, vars(made)[name]):
                type.__delattr__(made, name)
    set_class(made, state)


# attributes that a class has although its state does not contain them
NOT_IN_STATE = MADE_BY_PYTHON | {"__module__", "__doc__", "__slots__", "__match_args__"}
NOT_IN_STATE |= {"__annotations__", "__annotate_func__", "__annotations_cache__"}


MAKERS = make_class, make_enum, make_struct, made_like_own


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
        TypeError: it cannot be rebuilt, because a script derived it, or because it is the type of
            an open library's functions.
    """
    kind: Any = type(value)
    if not any(each.__module__ == "_ctypes" for each in kind.__mro__):
        return None
    if name_of(value) is not None:
        return attribute_here, (value.__module__, value.__qualname__)
    for make, arguments in origins(value):
        with contextlib.suppress(TypeError):
            # except for this one, ctypes makes each type only once
            if make(*arguments) is value or value.__qualname__ == OF_PYTHON:
                return make, arguments
    if importable_as(value) is not None:
        return None
    raise TypeError(
        f"cannot pickle the class {value.__qualname__!r}, which is a ctypes class or is derived "
        "from one"
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
