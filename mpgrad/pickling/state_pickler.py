"""The pickler of the state: functions and classes of the user's own modules by value, and then what their code wants.

It notes each object that it meets in a `Watch`, which says later whether the pickle is still true. What the caller may write to
is compared by what it holds, or by the bytes that it gives; a large pickle by the identity of its object. Caller only.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from cloudpickle.cloudpickle import _get_or_create_tracker_id as tracker_id_of

from mpgrad.pickling import caches
from mpgrad.pickling.classes import dynamic, is_c_type, made_like_own, reduce_c_type
from mpgrad.pickling.modules import LeftOf, make_function
from mpgrad.pickling.placed import ABOUT_ITSELF
from mpgrad.pickling.reducers import INHERITED
from mpgrad.pickling.streams import Root, captured, reduce_generator
from mpgrad.pickling.structure import CallerPickler
from mpgrad.pickling.uses import Wanted, is_own, module_of, name_of, uses_in
from mpgrad.pickling.watch import ABSENT, Opaque, Watch, attributes_of, contents_of_cell, contents_of_class, items_of, pairs_of

__all__ = ["CODE", "StatePickler", "held_by"]

OF_CLASSES = "a class travels with its attributes: keep what cannot in a global of its module, as workers import it"
LARGE_BYTES = 64 << 10  # of a pickle: what has more is compared by its identity
CONTAINERS = {collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque}
OF_MODULES = getattr(torch.nn.Module, "__getstate__", None)  # leaves out what was compiled
CODE = types.FunctionType, types.MethodType, type, functools.partial
STEADY = (
    *(complex, range, slice, property, staticmethod, classmethod, functools.partial),
    *(types.MethodType, types.BuiltinFunctionType, types.CodeType, types.MappingProxyType, types.ModuleType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(enum.Enum, re.Pattern, pathlib.PurePath, uuid.UUID, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Tensor),
)  # never written to; or they show what they hold as they are pickled


class StatePickler(CallerPickler):
    """Functions and classes of the user's own modules by value, and what their code wants after them."""

    starts_again = False  # the pickle has many parts

    def __init__(self, left: dict[Wanted, LeftOf]) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer)
        self.covered: set[Wanted] = set()
        self.watch = Watch()
        self._left = left
        self._hastened: dict[int, types.FunctionType] = {}  # that may run while the state is loaded, and use globals then
        self._made: dict[int, Any] = {}  # what reducers made for the pickle, which nobody can write to

    def dump_all(self, wanted: Sequence[Wanted]) -> Wanted | None:
        """None; or what cannot be carried, by itself, so that all is in vain."""
        self.wanted = dict.fromkeys(wanted)
        own = {each.module for each in wanted if each.name is None or is_defined_there(each)}
        self.dump(sorted(own))
        while self.wanted:
            some, self.wanted = self.wanted, {}
            if (culprit := self._dump_some([each for each in some if each not in self.covered])) is not None:
                return culprit
        return None

    def _dump_some(self, wanted: Sequence[Wanted]) -> Wanted | None:
        """None; or what cannot be carried, as of `dump_all`."""
        self.covered.update(wanted)
        names: dict[str, dict[str, bool]] = {}  # by module: whether the name is wanted by itself
        for module, name in wanted:
            contents = vars(sys.modules[module])
            of_module = names.setdefault(module, dict.fromkeys(ABOUT_ITSELF, True))
            if name is not None:
                of_module[name] = True
                continue
            for each in contents:
                if not each.startswith("__"):
                    of_module.setdefault(each, False)
        self.watch.names(sys.modules, list(names))
        for module, of_module in names.items():
            contents = vars(sys.modules[module])
            self.watch.names(contents, list(of_module))
            for name, by_itself in of_module.items():
                this = Wanted(module, name)
                self.covered.add(this)
                if name in contents and not self._dump_name(this, contents[name], by_itself):
                    return this
        return None

    def _dump_name(self, wanted: Wanted, value: Any, by_itself: bool) -> bool:
        """Whether it could be carried; raises where it could not, and the worker's own will not do."""
        mark, start = self.watch.mark(), self.buffer.tell()
        try:
            self.dump((wanted.module, wanted.name, self._left.get(wanted, value)))
        except Exception as error:
            is_code = isinstance(value, types.FunctionType | type) and is_own(value.__module__) and not is_c_type(value)
            if wanted in self._left or (by_itself and is_code):
                keep = f"; {OF_CLASSES}" if isinstance(value, type) else ""
                error.args = (f"{wanted.module}.{wanted.name}: {error}{keep}",)
                raise
            return False
        if wanted in self._left:
            self.watch.content(held_by, value)
        if self.buffer.tell() - start > LARGE_BYTES:
            self.watch.forget_since(mark)
        return True

    # --- what is noted of each object

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if (kind is dict or kind is list or kind is set) and id(value) not in self._made:
            self.watch.content(pairs_of if kind is dict else items_of, value)
            return None
        if issubclass(kind, torch.Tensor):
            self.watch.attributes(value)
        return super().persistent_id(value)

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, types.FunctionType):
            return self._noted_function(value)
        if isinstance(value, type):
            return self._noted_class(value)
        if isinstance(value, functools._lru_cache_wrapper):
            self.watch.content(caches.identities, value)
            return caches.reduce_by_value(value)
        if (reduced := reduce_generator(value, captured)) is not None:
            if hasattr(value, "__dict__"):
                self.watch.content(attributes_beside_state, value)
            return reduced
        if isinstance(value, types.CellType):
            self.watch.content(contents_of_cell, value)
        elif not isinstance(value, STEADY):
            refuse_files(value)
            self._note(value)
        return super(CallerPickler, self).reducer_override(value)

    def _noted_function(self, value: types.FunctionType) -> Any:
        reduced = self.reduce_function(value) if name_of(value) is None else self.reduce_function(value, by_value=True)
        if reduced is not NotImplemented and reduced[0] is not make_function:  # the compiler made it
            self.watch.function(value)
        elif reduced is not NotImplemented:
            self.watch.function(value)
            given = reduced[2][1]["__globals__"]
            self.watch.names(value.__globals__, list(given))
            self._note_made(reduced, value.__annotations__)
            self._want_name(value)
        return reduced

    def _noted_class(self, value: type) -> Any:
        if (of_c := reduce_c_type(value)) is not None:
            return of_c
        own = name_of(value)
        if is_own(value.__module__):
            self._hasten_methods(value)
        reduced = dynamic(value) if is_own(value.__module__) else super(CallerPickler, self).reducer_override(value)
        if reduced is not NotImplemented:
            self.watch.content(contents_of_class, value)
            self._note_made(reduced)
            self._want_name(value)
            if own is not None:
                make, arguments, *rest = reduced
                reduced = made_like_own, (value.__module__, value.__qualname__, tracker_id_of(value), make, arguments), *rest
        return reduced

    def globals_along(self, value: types.FunctionType, given: dict[str, Any]) -> dict[str, Any]:
        if id(value) not in self._hastened:
            return {}
        home = module_of(value) or ""
        return {name: self._left.get(Wanted(home, name), each) for name, each in given.items()}

    def _hasten(self, value: Any) -> None:
        """A function, and those that it calls."""
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType) or id(function) in self._hastened or module_of(function) is None:
            return
        self._hastened[id(function)] = function
        for name in uses_in(function.__code__).names:
            self._hasten(function.__globals__.get(name))

    def _hasten_methods(self, kind: type) -> None:
        """Those that Python calls by itself: when a subclass is made, an object is put into a set, and so on."""
        for name, member in vars(kind).items():
            if issubclass(kind, type) or (name.startswith("__") and name.endswith("__")):
                self._hasten(member)

    def _want_name(self, value: Any) -> None:
        """It is to be found under its own name too."""
        if (own := name_of(value)) is not None:
            self.wanted[own] = None

    def _note_made(self, *made: Any) -> None:
        for each in made:
            if isinstance(each, dict | list):
                self._made[id(each)] = each
            elif isinstance(each, tuple):
                self._note_made(*each)

    def _note(self, value: Any) -> None:
        """Have the watch compare what the object holds or, where it does not show that, its pickle."""
        kind = type(value)
        if reduces_as_usual(kind):
            if isinstance(value, dict):
                self.watch.content(pairs_of, value)
            elif isinstance(value, list):
                self.watch.content(items_of, value)
            if hasattr(value, "__dict__"):
                self.watch.content(attributes_of, value)
            if slots := [member for each in kind.__mro__ for member in slots_of(each)]:
                self.watch.content(functools.partial(values_at, slots), value)
            return
        if kind in CONTAINERS:
            self.watch.content(items_of if kind is collections.deque else pairs_of, value)
            return
        for each in kind.__mro__:
            if is_own(each.__module__):
                self._hasten_methods(each)
        now = pickled_alone(value)
        if len(now[0]) <= LARGE_BYTES:
            self.watch.opaque(pickled_alone, value, now)


def held_by(value: Any) -> Sequence[Any]:
    """What a value holds, to compare it with later."""
    if isinstance(value, dict):
        return pairs_of(value)
    if isinstance(value, list | tuple | set):
        return items_of(value)
    return attributes_of(value) if is_own(type(value).__module__) and hasattr(value, "__dict__") else ()


def attributes_beside_state(generator: Any) -> Sequence[Any]:
    """Of a generator of random numbers, whose state is none of the pickle's."""
    return pairs_of({name: value for name, value in vars(generator).items() if name != "gauss_next"})


def refuse_files(value: object) -> None:
    if isinstance(value, io.IOBase) and not isinstance(value, io.StringIO | io.BytesIO):
        raise TypeError(f"cannot pickle an open file ({value!r})")  # cloudpickle would send what is in it


def is_defined_there(wanted: Wanted) -> bool:
    """Whether it would be imported, as pickle does."""
    value = vars(sys.modules[wanted.module]).get(wanted.name or "")
    return isinstance(value, types.FunctionType | type) and value.__module__ == wanted.module


def reduces_as_usual(kind: type) -> bool:
    """Whether pickle takes an object's attributes, slots and items, and nothing else."""
    if any("__reduce_ex__" in vars(each) or "__reduce__" in vars(each) for each in kind.__mro__[:-1]):
        return False
    usual = getattr(object, "__getstate__", None)  # since Python 3.11
    own = getattr(kind, "__getstate__", usual)
    known = kind in CallerPickler.dispatch_table or not INHERITED.isdisjoint(kind.__mro__)
    return (own is usual or own is OF_MODULES) and not known


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    return [member for member in vars(kind).values() if isinstance(member, types.MemberDescriptorType)]


def values_at(members: Sequence[types.MemberDescriptorType], value: Any) -> list[Any]:
    return [slot_value(member, value) for member in members]


def slot_value(member: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return ABSENT


def pickled_alone(value: Any) -> Opaque:
    """Its bytes, which tensors it has, and where its buffers lie."""
    pickler = CallerPickler(buffer := io.BytesIO())
    pickler.dump(value)
    tensors = [each.generator if type(each) is Root else each for each in pickler.tensors]
    return buffer.getvalue(), [*tensors, *pickler.buffers], [(each.data_ptr(), each.nbytes) for each in pickler.buffers]
