"""An unchanged function is not pickled again, and not loaded again in a worker. Both sides use this
module.

A `ContentRecord` checks whether the objects of a pickle have changed.

A lambda in a loop is a new function each time, with the same code. It may capture other tensors,
but its pickle contains numbers instead of tensors. So pickles are kept by the code of the function,
with everything that they depend on (`FunctionFingerprint`). Checking this takes a tenth of the time
of pickling.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import gc
import io
import itertools
import operator
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from cloudpickle.cloudpickle import _should_pickle_by_reference as by_reference

from mpgrad.pickling.class_states import ABSENT
from mpgrad.pickling.modules import WantedName, contents_of, is_own, looks_up, name_of, uses_in
from mpgrad.pickling.reducers import HOOKS, INHERITED, annotations_of, globals_used
from mpgrad.pickling.registrations import accessors_named
from mpgrad.pickling.streams import Root
from mpgrad.pickling.structure import (
    CallerPickler,
    is_constant,
    is_known,
    loaded,
)
from mpgrad.wire.messages import SCALARS, is_plain
from mpgrad.wire.tensor_refs import have_attributes

__all__ = [
    "STEADY",
    "ContentRecord",
    "FunctionFingerprint",
    "KeptPickle",
    "KnownPickle",
    "WholePickle",
    "are_alike",
    "are_same",
    "are_same_objects",
    "keep_pickle",
    "kept_pickle",
]

# --- the contents of objects


STEADY = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, tuple, frozenset),
    *(property, staticmethod, classmethod, types.MethodType, types.BuiltinFunctionType),
    *(types.CodeType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.FunctionType),
    *(enum.Enum, re.Pattern, pathlib.PurePath, uuid.UUID, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Tensor),
)  # immutable, except for attributes; the parts of functions are recorded separately
CONTAINERS = {
    *(list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(collections.Counter, functools.partial, types.CellType),
}
REDUCES = {object.__reduce__, *(each.__reduce__ for each in CONTAINERS)}
OF_MODULES = getattr(torch.nn.Module, "__getstate__", None)  # leaves out compiled parts
STATES = {OF_MODULES, getattr(object, "__getstate__", None)}  # Python 3.10 has none
IN_C = types.WrapperDescriptorType, types.MethodDescriptorType, type(None)
OF_NEW = "__getnewargs__", "__getnewargs_ex__"
ATTRIBUTES = operator.attrgetter("__dict__")
STRINGS = {str}
POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
BETWEEN = (object(),)  # separates two objects, so that a part cannot move unseen between them


class ContentRecord:
    """Checks whether all objects of a pickle still have the same contents.

    Python does not report changes. But an object's referents and its keys can be read in C, which
    takes a few milliseconds for 10,000 objects. Objects that do not show their contents (numpy
    arrays, objects that define their own pickling) are pickled again, and the bytes are compared.
    Only the attributes of tensors are compared, because operations send the values.

    Guarantees: no change goes unseen. A false alarm costs one more pickling.
    """

    def __init__(self, pickler: CallerPickler) -> None:
        """Record the objects, and keep them alive, so that no other object gets their ids."""
        memo = pickler.memo.copy()
        kinds: dict[type, list[Any]] = {}
        for _, value in memo.values():
            kinds.setdefault(type(value), []).append(value)
        self._looks = pickler.looks
        # objects whose referents are all of their contents
        self._shown: list[Any] = []
        self._sized: list[Any] = []
        self._keyed: list[dict[str, Any]] = []
        self._slots: list[tuple[types.MemberDescriptorType, list[Any]]] = []
        self._constants: list[Any] = []
        self._opaque: list[Any] = []
        self._tensors = [each for each in pickler.tensors if type(each) is not Root]
        self._note_dicts([*map(ATTRIBUTES, self._tensors)])
        for kind, values in kinds.items():
            self._note(kind, values)
        for each in self._opaque:
            del memo[id(each)]
        # The other objects of the pickle are compared by themselves.
        self._beside = CallerPickler(io.BytesIO())
        self._beside.memo = memo if self._opaque else {}
        self._modules = loaded()
        self._before = self._held()

    def _note(self, kind: type, values: list[Any]) -> None:
        if issubclass(kind, type | torch.Tensor) or (issubclass(kind, STEADY) and is_known(kind)):
            return
        if not shows_all(kind):
            for value in values:
                (self._constants if is_constant(value) else self._opaque).append(value)
            return
        has_slots = any("__slots__" in vars(each) for each in kind.__mro__)
        if issubclass(kind, dict):
            self._note_dicts(values)
        elif issubclass(kind, list | set | collections.deque):
            self._sized += values
            self._shown += values
        elif has_slots or not hasattr(values[0], "__dict__"):
            for value in values:
                self._shown += (value, BETWEEN)
        else:
            self._shown += values  # each has its own dictionary, which ends its parts
        if hasattr(values[0], "__dict__"):
            self._note_dicts([*map(ATTRIBUTES, values)])
        if issubclass(kind, torch.nn.Module):  # pickled without its empty hooks
            hooks = [vars(each)[name] for each in values for name in HOOKS & vars(each).keys()]
            self._note(collections.OrderedDict, hooks)
        for each in kind.__mro__:
            members = vars(each).values() if "__slots__" in vars(each) else ()
            self._slots += [
                (member, values)
                for member in members
                if isinstance(member, types.MemberDescriptorType)
            ]

    def _note_dicts(self, values: list[Any]) -> None:
        self._sized += values
        self._shown += values
        # keys that are not all strings are already among the referents
        self._keyed += [each for each in values if STRINGS.issuperset(map(type, each))]

    def holds(self) -> bool:
        if loaded() != self._modules:
            return False
        try:
            now, before = self._held(), self._before
        except Exception:  # an object's own code raised it; pickling will raise it again
            return False
        return (
            are_same_objects(now[0], before[0])
            and now[1] == before[1]
            and are_alike(now[2], before[2])
        )

    def _held(self) -> tuple[list[Any], list[Any], WholePickle]:
        parts: list[Any] = gc.get_referents(*self._shown)
        parts += itertools.chain.from_iterable(self._keyed)
        for member, values in self._slots:
            parts += [slot_value(member, value) for value in values]
        for look, value in self._looks:
            parts += look(value)
            parts.append(BETWEEN)
        parts += map(type, self._tensors)
        pickler = CallerPickler(io.BytesIO())
        if self._opaque:
            pickler.memo = self._beside.memo
            pickler.dump(self._opaque)
        facts = [*map(len, self._sized), *map(facts_of_constant, self._constants)]
        return parts, facts, whole_of(pickler)


def facts_of_constant(value: Any) -> tuple[Any, ...] | None:
    """Return the properties of a constant that may change, or None if it is no longer constant."""
    return (value.shape, value.dtype, value.strides) if is_constant(value) else None


def are_same_objects(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists have the same objects, by the addresses in their memory. This takes a tenth
    of the time of comparing the elements with `is`."""
    if len(some) != len(others):
        return False
    nbytes = len(some) * POINTER_BYTES
    found: int = ctypes.pythonapi.memcmp(
        *map(ctypes.c_void_p, (parts_at(some), parts_at(others), nbytes))
    )
    return found == 0


def parts_at(parts: list[Any]) -> int | None:
    """Return the address of the list's memory, which is stored after its size."""
    return ctypes.c_void_p.from_address(id(parts) + tuple.__basicsize__).value


class WholePickle(NamedTuple):
    """A pickle with the tensors and buffers that were taken out of it."""

    pickled: bytes
    tensors: list[torch.Tensor]
    buffers: list[torch.Tensor]


def are_alike(one: WholePickle, other: WholePickle) -> bool:
    """Whether two pickles of the same objects are equal. Tensors are compared by identity."""
    return (
        one.pickled == other.pickled
        and are_same([*map(source_of, one.tensors)], [*map(source_of, other.tensors)])
        and len(one.buffers) == len(other.buffers)
        and all(map(have_same_bytes, one.buffers, other.buffers))
    )


K = TypeVar("K", bound="KnownPickle")


class KnownPickle:
    """A pickle that is reused as long as its objects do not change."""

    def __init__(self, pickler: CallerPickler) -> None:
        self.pickler = pickler
        self._whole = whole_of(pickler)
        self._came_alike = 0  # how often it was rebuilt with the same result
        # The record, and whether it is known to belong to this pickle. Both are replaced together,
        # because other threads may be here.
        self._kept: tuple[ContentRecord, bool] | None = None

    def renewed(self: K, make: Callable[[], CallerPickler]) -> K:
        """Return this pickle if it is up to date, and otherwise a new one, whose pickler `make`
        returns.

        Objects that change often are not worth a record. Another thread may write while an object
        is being pickled. So a record must be made between two equal pickles.
        """
        record, is_sure = self._kept or (None, False)
        if is_sure and record is not None and record.holds():
            return self
        pickler = make()
        if not are_alike(whole_of(pickler), self._whole):
            return type(self)(pickler)
        self._came_alike += 1
        if record is not None and record.holds():
            self._kept = record, True
        elif self._came_alike > 1:
            self._kept = ContentRecord(pickler), False
        return self


def whole_of(pickler: CallerPickler) -> WholePickle:
    return WholePickle(pickler.buffer.getvalue(), pickler.tensors, pickler.buffers)


def source_of(tensor: Any) -> Any:
    return tensor.generator if type(tensor) is Root else tensor


def have_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare buffers. Memory that the objects themselves use is sent with each operation."""
    return (one.data_ptr(), one.nbytes) == (other.data_ptr(), other.nbytes) or torch.equal(
        one, other
    )


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def shows_all(kind: type) -> bool:
    """Whether an object's pickle depends only on its referents.

    Otherwise code of its class, or of the library that made it, decides how it is pickled.
    """
    if kind in CONTAINERS:
        return True
    own_iterator = issubclass(kind, list | dict | set | collections.deque) and not all(
        isinstance(getattr(kind, name, None), IN_C) for name in ("__iter__", "__len__", "items")
    )
    reduces: Any = kind.__reduce_ex__
    return (
        reduces is object.__reduce_ex__
        and kind.__reduce__ in REDUCES
        and getattr(kind, "__getstate__", None) in STATES
        and all(is_known(getattr(kind, name, None)) for name in OF_NEW)
        and isinstance(kind.__getattribute__, IN_C)
        and not own_iterator
        and kind not in CallerPickler.dispatch_table
        and INHERITED.isdisjoint(kind.__mro__)
        and not issubclass(kind, torch.jit.ScriptModule)
    )


def slot_value(member: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return ABSENT


# --- functions with immutable contents only


TENSORS = {torch.Tensor, torch.nn.Parameter}
FACTS = operator.attrgetter("__name__", "__qualname__", "__module__", "__doc__")
OF_ITS_MODULE = "__name__", "__package__", "__path__", "__file__"  # cloudpickle includes these
MOST_KEPT = 128


class ObjectNumber(NamedTuple):
    """Represents a tensor, function, namespace or cell, which may be a different one next time."""

    kind: type
    number: int  # counts these objects in the order in which they are first met


Function = types.FunctionType | functools.partial[Any]


class FunctionParts(NamedTuple):
    """The parts of a function or partial function that a pickle contains."""

    code: object
    facts: tuple[object, ...]
    values: list[object]


COMPARED = {*SCALARS, str, ObjectNumber, tuple}


class FunctionFingerprint:
    """Everything that the pickle of a function depends on.

    It consists of numbers, tensors, objects of libraries, and functions that have only these. Any
    other object could be changed unseen.
    """

    def __init__(self) -> None:
        self.root: object = None  # represents the function itself
        self.parts: list[FunctionParts] = []
        self.wanted: dict[WantedName, None] = {}
        self.functions: list[Function] = []
        self.tensors: list[torch.Tensor] = []
        # the globals of each function that it uses, by its id
        self.given: dict[int, dict[str, Any]] = {}
        self._places: dict[int, ObjectNumber] = {}

    @classmethod
    def of(cls, function: Any) -> FunctionFingerprint | None:
        """Return the fingerprint of `function`, or None if the function has other objects."""
        fingerprint = cls()
        try:
            fingerprint.root = fingerprint._seen(function)
            for each in fingerprint.functions:  # the list grows in this loop
                fingerprint.parts.append(fingerprint._parts_of(each))
        except MutableStateError:
            return None
        return None if have_attributes(fingerprint.tensors) else fingerprint

    def _parts_of(self, function: Function) -> FunctionParts:
        if isinstance(function, functools.partial):
            if vars(function):
                raise MutableStateError
            values = [function.func, *function.args, *function.keywords.values()]
            return FunctionParts(
                functools.partial, tuple(function.keywords), list(map(self._seen, values))
            )
        if vars(function) or function.__kwdefaults__ or getattr(function, "__type_params__", None):
            raise MutableStateError
        names, cells = function.__globals__, function.__closure__ or ()
        defaults, annotations = function.__defaults__ or (), annotations_of(function)
        self.given[id(function)] = given = globals_used(function)
        values = [
            *defaults,
            *annotations.values(),
            *[names.get(each, ABSENT) for each in OF_ITS_MODULE],
            *given.values(),
            *found_elsewhere(function),
        ]
        for cell in cells:
            values += contents_of(cell) or [ABSENT]
        shared = self._place(names), *map(self._place, cells)
        facts = (*FACTS(function), len(defaults), tuple(annotations), tuple(given), shared)
        return FunctionParts(function.__code__, facts, list(map(self._seen, values)))

    def _seen(self, value: Any) -> object:
        """Return the object that represents a value in the fingerprint.

        Raises:
            MutableStateError: the value could be changed unseen.
        """
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            return self._by_value(value)
        if kind in TENSORS:
            if id(value) not in self._places:
                self.tensors.append(value)
            return self._place(value)
        if not goes_by_itself(value):
            raise MutableStateError
        return value

    def _function(self, value: types.FunctionType) -> object:
        if value.__module__ != "__main__":  # functions of the main script are never sent by name
            wanted = name_of(value)
            if wanted is not None:
                self.wanted[wanted] = None
                return wanted, value.__qualname__
            if by_reference(value):
                return value
        return self._by_value(value)

    def _by_value(self, value: Function) -> ObjectNumber:
        if id(value) not in self._places:
            self.functions.append(value)
        return self._place(value)

    def _place(self, value: object) -> ObjectNumber:
        return self._places.setdefault(id(value), ObjectNumber(type(value), len(self._places)))

    def is_like(self, other: FunctionFingerprint) -> bool:
        """Whether the pickles are the same, apart from the identity of the tensors."""
        return (
            is_same(self.root, other.root)
            and len(self.parts) == len(other.parts)
            and all(map(have_same_parts, self.parts, other.parts))
        )

    def settle(self) -> bool:
        """Release all tensors and functions. Return False if a function finds names at run
        time."""
        finds_names = any(
            looks_up(each) for each in self.functions if isinstance(each, types.FunctionType)
        )
        self.functions, self.tensors, self.given = [], [], {}
        return not finds_names


def found_elsewhere(function: types.FunctionType) -> list[object]:
    """Return the objects that the function finds by name outside its globals: builtins and pandas
    accessors."""
    known, contents = function.__globals__, vars(builtins)
    names = uses_in(function.__code__).names
    found = [contents.get(name, ABSENT) for name in names if name not in known]
    return [*found, *accessors_named(names)]


class MutableStateError(Exception):
    """A function has an object that may be changed in place."""


def have_same_parts(one: FunctionParts, other: FunctionParts) -> bool:
    return (
        one.code is other.code
        and one.facts == other.facts
        and len(one.values) == len(other.values)
        and all(map(is_same, one.values, other.values))
    )


def is_same(one: object, other: object) -> bool:
    kind = type(one)
    if one is other or kind is not type(other) or kind not in COMPARED:
        return one is other
    return one == other and (kind is not float or one != 0)  # 0.0 is equal to -0.0


def goes_by_itself(value: Any) -> bool:
    """Whether the value is small and immutable, or is pickled by name."""
    kind = type(value)
    if kind is types.BuiltinFunctionType:
        holder = value.__self__
        return (
            holder is None
            or isinstance(holder, types.ModuleType)
            or (isinstance(holder, type) and goes_by_itself(holder))
        )
    if kind is types.ModuleType:
        name = value.__name__
        return value is sys.modules.get(name) and name != "__main__" and not is_own(name)
    if kind is type or kind is type(torch.Tensor):
        return not is_own(value.__module__) and by_reference(value)
    return value is ABSENT or kind is torch.dtype or is_plain(value)


def is_same_dict(one: dict[str, Any], other: dict[str, Any] | None) -> bool:
    """Whether the values are the same objects."""
    return (
        other is not None
        and one.keys() == other.keys()
        and all(value is other[name] for name, value in one.items())
    )


# --- pickles


class KeptPickle(NamedTuple):
    """A pickle, and the fingerprint of its function."""

    pickled: bytes
    wanted: list[WantedName]
    fingerprint: FunctionFingerprint
    order: list[int]  # of the tensors
    modules: object  # see `loaded`


# A function's code, or a function that is written in C. A partial function has a pair of the type
# `functools.partial` and its function's key.
Key = types.CodeType | types.BuiltinFunctionType | tuple[type, Any]
# None if functions with this key have had mutable state
PICKLES: dict[Key, KeptPickle | None] = {}


def key_of(function: Any) -> Key | None:
    """Return the key of the function, or None if pickles of such functions are not kept."""
    is_partial = type(function) is functools.partial
    called = function.func if is_partial else function
    key: Any = None
    if type(called) is types.FunctionType:
        key = called.__code__
    elif type(called) is types.BuiltinFunctionType and goes_by_itself(called):
        # bound methods are excluded, because they would keep their objects alive
        key = called
    return (functools.partial, key) if is_partial and key is not None else key


def kept_pickle(function: Any) -> tuple[KeptPickle | None, FunctionFingerprint | None]:
    """Return the function's pickle if it is known, and the function's fingerprint if a pickle may
    be kept."""
    key = key_of(function)
    if key is None or (known := PICKLES.get(key, ABSENT)) is None:
        return None, None
    fingerprint = FunctionFingerprint.of(function)
    if fingerprint is None:
        note(key, None)
        return None, None
    if (
        isinstance(known, KeptPickle)
        and known.modules == loaded()
        and fingerprint.is_like(known.fingerprint)
    ):
        return known, fingerprint
    return None, fingerprint


def keep_pickle(
    function: Any, fingerprint: FunctionFingerprint, pickler: CallerPickler, pickled: bytes
) -> None:
    """Keep a pickle, if the `fingerprint` from before pickling is still valid.

    Another thread may have changed the function during pickling, and then changed it back. So the
    globals that the pickler used are also compared.
    """
    key, now = key_of(function), FunctionFingerprint.of(function)
    assert key is not None
    had_the_same = [
        is_same_dict(given, pickler.given.get(number))
        for number, given in fingerprint.given.items()
    ]
    if now is None or not now.is_like(fingerprint) or not all(had_the_same):
        return
    places = {id(tensor): place for place, tensor in enumerate(fingerprint.tensors)}
    if pickler.buffers or pickler.mark or places.keys() != set(map(id, pickler.tensors)):
        return
    order = [places[id(tensor)] for tensor in pickler.tensors]
    is_whole = fingerprint.settle() and fingerprint.wanted.keys() == pickler.wanted.keys()
    note(
        key,
        KeptPickle(pickled, list(pickler.wanted), fingerprint, order, loaded())
        if is_whole
        else None,
    )


def note(key: Key, kept: KeptPickle | None) -> None:
    if len(PICKLES) >= MOST_KEPT:
        PICKLES.clear()
    PICKLES[key] = kept
