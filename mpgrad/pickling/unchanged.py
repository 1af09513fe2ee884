"""Functions that are as they were when they were pickled, and are not pickled again; or, in a
worker, as they were loaded, and are not loaded again. Both sides.

A lambda in a loop is a new function each time, with the same code; the tensors that it captures may
be others. Neither is in its pickle, which has numbers in the places of tensors. So a pickle is kept
by the code of the function, with all that it depends on (`Sight`), and looking at that again takes a
tenth of the time.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cloudpickle.cloudpickle import _extract_code_globals as code_globals
from cloudpickle.cloudpickle import _should_pickle_by_reference as by_reference

from mpgrad.pickling.modules import Wanted, contents_of, is_own, looks_up, name_of
from mpgrad.pickling.reducers import names_in_classes
from mpgrad.pickling.structure import CallerPickler, loaded
from mpgrad.wire.tensor_refs import have_attributes

__all__ = ["Sight", "dumped_before", "note_dumped"]

ABSENT = object()
SCALARS = {type(None), bool, int, float, str}
TENSORS = {torch.Tensor, torch.nn.Parameter}
LONGEST = 256  # characters of a text that is looked at each time
FACTS = operator.attrgetter("__name__", "__qualname__", "__module__", "__doc__")
OF_ITS_MODULE = "__name__", "__package__", "__path__", "__file__"  # cloudpickle takes these along
MOST_SIGHTS = 128


class Met(NamedTuple):
    """A tensor, a function or a namespace among the parts of a function: it may be another one next time."""

    kind: type
    number: int  # in the order in which they are met


COMPARED = {*SCALARS, Met, tuple}


class Part(NamedTuple):
    """One of the functions that a pickle brings."""

    code: types.CodeType
    facts: tuple[object, ...]
    namespace: Met
    values: list[object]


class Sight:
    """All that the pickle of a function depends on, where that is known: numbers, tensors, what
    libraries have, and functions that have no more than these.

    Whatever else a function has may be written to unseen. Keeps no tensor, and no function.
    """

    def __init__(self, function: Any, before: Sight | None = None) -> None:
        """`before`: what was seen of a function with the same code, which need not be looked at closely again."""
        self.parts: list[Part] = []
        self.tensors: list[torch.Tensor] = []
        self.wanted: dict[Wanted, None] = {}
        self._numbers: dict[int, Met] = {}
        functions: list[types.FunctionType] = []
        self.is_complete = type(function) is types.FunctionType or is_steady(function)
        self.root: object = None
        if type(function) is types.FunctionType:
            self.root = self._function(function, functions)
        elif self.is_complete:
            self.root = function
        for place, each in enumerate(functions):
            known = before.parts[place].values if before is not None and place < len(before.parts) else []
            self._look_at(each, known, functions)
            if not self.is_complete:
                self.parts.clear()  # which may have anything
                break

    def _look_at(self, function: types.FunctionType, known: Sequence[object], functions: list[types.FunctionType]) -> None:
        names, cells = function.__globals__, function.__closure__ or ()
        defaults, annotations = function.__defaults__ or (), function.__annotations__
        named = [*OF_ITS_MODULE, *globals_of(function.__code__)]
        values = [*defaults, *annotations.values(), *[names.get(each, ABSENT) for each in named]]
        for cell in cells:
            values += contents_of(cell) or [ABSENT]
        if vars(function) or function.__kwdefaults__ or (not known and looks_up(function)):
            self.is_complete = False
        for number, value in enumerate(values):
            kind = type(value)
            if number < len(known) and value is known[number]:
                continue
            if kind is types.FunctionType:
                values[number] = self._function(value, functions)
            elif kind in TENSORS:
                if id(value) not in self._numbers:
                    self.tensors.append(value)
                values[number] = self._met(value)
            elif not is_steady(value):
                self.is_complete = False
        facts = (*FACTS(function), len(defaults), tuple(annotations), tuple(map(self._met, cells)))
        self.parts.append(Part(function.__code__, facts, self._met(names), values))

    def _met(self, value: object) -> Met:
        return self._numbers.setdefault(id(value), Met(type(value), len(self._numbers)))

    def _function(self, value: types.FunctionType, functions: list[types.FunctionType]) -> object:
        if value.__module__ != "__main__":  # whose functions never go by name
            wanted = name_of(value)
            if wanted is not None:
                self.wanted[wanted] = None
                return wanted, value.__qualname__
            if by_reference(value):
                return value
        if id(value) not in self._numbers:
            functions.append(value)
        return self._met(value)

    def is_like(self, other: Sight) -> bool:
        """Whether the pickles are the same, but for which tensors these are."""
        return (
            self.is_complete
            and is_same_value(self.root, other.root)
            and len(self.parts) == len(other.parts)
            and all(map(are_same, self.parts, other.parts))
            and not have_attributes(self.tensors)
        )


def are_same(one: Part, other: Part) -> bool:
    return (
        one.code is other.code
        and one.facts == other.facts
        and one.namespace == other.namespace
        and len(one.values) == len(other.values)
        and (all(map(operator.is_, one.values, other.values)) or all(map(is_same_value, one.values, other.values)))
    )


def is_same_value(one: object, other: object) -> bool:
    kind = type(one)
    if one is other or kind is not type(other) or kind not in COMPARED:
        return one is other
    return one == other and (kind is not float or one != 0)  # 0.0 is equal to -0.0


def is_steady(value: Any) -> bool:
    """Whether nobody can write to it, and it is small, or goes by name."""
    kind = type(value)
    if kind in SCALARS:
        return kind is not str or len(value) <= LONGEST
    if kind is types.BuiltinFunctionType:
        return isinstance(value.__self__, types.ModuleType | type | None)
    if kind is types.ModuleType:
        name = value.__name__
        return value is sys.modules.get(name) and name != "__main__" and not is_own(name)
    if kind is type or kind is type(torch.Tensor):
        return not is_own(value.__module__) and by_reference(value)
    return value is ABSENT or kind is torch.dtype


def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code uses of those around its function."""
    return (*code_globals(code), *names_in_classes(code))


class Known(NamedTuple):
    """A pickle, and of what it was made."""

    sight: Sight
    modules: object  # that were loaded
    pickled: bytes
    order: list[int]  # of the tensors
    wanted: list[Wanted]


# by a function's code, or by one that is written in C
DUMPED: dict[types.CodeType | types.BuiltinFunctionType | None, Known] = {}


def dumped_before(function: Any) -> tuple[bytes, list[torch.Tensor], dict[Wanted, None]] | None:
    """The pickle of the function, its tensors and what it wants, where that is known without pickling it again."""
    known = DUMPED.get(key_of(function))
    if known is None or not known.sight.is_complete or known.modules != loaded():
        return None
    sight = Sight(function, known.sight)
    if not sight.is_like(known.sight):
        return None
    tensors = [sight.tensors[number] for number in known.order]
    return known.pickled, tensors, dict.fromkeys(known.wanted)


def note_dumped(function: Any, pickler: CallerPickler, pickled: bytes) -> None:
    """For the next time, where it is known of what the pickle was made."""
    key = key_of(function)
    known = DUMPED.get(key)
    if key is None or (known is not None and not known.sight.is_complete):
        return
    sight = Sight(function)
    places = {id(tensor): place for place, tensor in enumerate(sight.tensors)}
    has_seen_all = not pickler.buffers and not pickler.mark and places.keys() == set(map(id, pickler.tensors))
    sight.is_complete = sight.is_complete and has_seen_all and sight.wanted.keys() == pickler.wanted.keys()
    order = [places[id(tensor)] for tensor in pickler.tensors] if sight.is_complete else []
    sight.tensors.clear()
    if len(DUMPED) >= MOST_SIGHTS:
        DUMPED.clear()
    DUMPED[key] = Known(sight, loaded(), pickled, order, list(pickler.wanted))


def key_of(function: Any) -> types.CodeType | types.BuiltinFunctionType | None:
    """None: no pickles of such functions are kept."""
    if type(function) is types.FunctionType:
        return function.__code__
    return function if type(function) is types.BuiltinFunctionType and is_steady(function) else None
