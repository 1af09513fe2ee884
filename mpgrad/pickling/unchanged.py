"""A function that has not changed is not pickled again, and not loaded again in a worker.

Both sides.

A lambda in a loop is a new function each time, with the same code. It may capture other tensors,
but its pickle has numbers in the places of tensors. So pickles are kept by the code of the
function, with everything that they depend on (`FunctionFingerprint`). Checking this again takes a
tenth of the time of pickling.
"""

from __future__ import annotations

import builtins
import functools
import operator
import sys
import types
from typing import Any, NamedTuple

import torch
from cloudpickle.cloudpickle import _should_pickle_by_reference as by_reference

from mpgrad.pickling.modules import WantedName, contents_of, is_own, looks_up, name_of, uses_in
from mpgrad.pickling.reducers import annotations_of, globals_used
from mpgrad.pickling.structure import CallerPickler, loaded
from mpgrad.wire.messages import SCALARS, is_plain
from mpgrad.wire.tensor_refs import have_attributes

__all__ = ["FunctionFingerprint", "KeptPickle", "keep_pickle", "kept_pickle"]

ABSENT = object()
TENSORS = {torch.Tensor, torch.nn.Parameter}
FACTS = operator.attrgetter("__name__", "__qualname__", "__module__", "__doc__")
OF_ITS_MODULE = "__name__", "__package__", "__path__", "__file__"  # cloudpickle includes these
MOST_KEPT = 128


class ObjectNumber(NamedTuple):
    """The place of a tensor, function, namespace or cell, which may be a different one next
    time."""

    kind: type
    number: int  # counts these objects in the order in which they are first met


Function = types.FunctionType | functools.partial[Any]


class FunctionParts(NamedTuple):
    """The parts of a function that a pickle contains, or of a partial function."""

    code: object
    facts: tuple[object, ...]
    values: list[object]


COMPARED = {*SCALARS, str, ObjectNumber, tuple}


class FunctionFingerprint:
    """Everything that the pickle of a function depends on.

    This may be numbers, tensors, objects that libraries have, and functions that have only these.
    Anything else that a function has could be changed unseen.
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
        """Return the fingerprint of `function`; None if the function has anything else."""
        fingerprint = cls()
        try:
            fingerprint.root = fingerprint._seen(function)
            for each in fingerprint.functions:  # the list grows meanwhile
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
            *builtins_of(function),
        ]
        for cell in cells:
            values += contents_of(cell) or [ABSENT]
        shared = self._place(names), *map(self._place, cells)
        facts = (*FACTS(function), len(defaults), tuple(annotations), tuple(given), shared)
        return FunctionParts(function.__code__, facts, list(map(self._seen, values)))

    def _seen(self, value: Any) -> object:
        """Return what represents a value in the fingerprint; raises `MutableStateError`."""
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
        if value.__module__ != "__main__":  # functions of the main script never go by name
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
        """Whether the pickles are the same, except for the identity of the tensors."""
        return (
            is_same(self.root, other.root)
            and len(self.parts) == len(other.parts)
            and all(map(are_same, self.parts, other.parts))
        )

    def settle(self) -> bool:
        """Release all tensors and functions. Returns False if a function finds names at run
        time."""
        finds_names = any(
            looks_up(each) for each in self.functions if isinstance(each, types.FunctionType)
        )
        self.functions, self.tensors, self.given = [], [], {}
        return not finds_names


def builtins_of(function: types.FunctionType) -> list[object]:
    """Return what builtins hold under the names that the function does not find in its globals."""
    known, contents = function.__globals__, vars(builtins)
    names = uses_in(function.__code__).names
    return [contents.get(name, ABSENT) for name in names if name not in known]


class MutableStateError(Exception):
    """A function has something that may be changed in place."""


def are_same(one: FunctionParts, other: FunctionParts) -> bool:
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
    """A pickle, and the fingerprint of what it was made from."""

    pickled: bytes
    wanted: list[WantedName]
    fingerprint: FunctionFingerprint
    order: list[int]  # the tensors' order
    modules: object  # that were loaded


# A function's code, or a function that is written in C. For a partial function, the type of partial
# functions comes with it.
Key = types.CodeType | types.BuiltinFunctionType | tuple[type, Any]
# None if functions with this key have had mutable state.
PICKLES: dict[Key, KeptPickle | None] = {}


def key_of(function: Any) -> Key | None:
    """Return the key of the function; None if no pickles of such functions are kept."""
    is_partial = type(function) is functools.partial
    called = function.func if is_partial else function
    key: Any = None
    if type(called) is types.FunctionType:
        key = called.__code__
    elif type(called) is types.BuiltinFunctionType and goes_by_itself(called):
        # A bound method would keep its object alive.
        key = called
    return (functools.partial, key) if is_partial and key is not None else key


def kept_pickle(function: Any) -> tuple[KeptPickle | None, FunctionFingerprint | None]:
    """Return the pickle of the function, if it is known, and its fingerprint, if a pickle may be
    kept."""
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
    """Keep a pickle, if the `fingerprint` from before pickling still holds.

    Other threads may have changed the function meanwhile, and changed it back. So the globals that
    the pickler used are compared too.
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
