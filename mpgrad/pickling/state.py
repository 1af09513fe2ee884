"""What the caller's functions use of the user's own modules, as one pickle, made again only when something changed.

    the function's pickle        names what it wants: simmod.f
    the state's pickle           simmod: f, by value, and DT, TABLE, helper, which its code uses; and what these use, and so on
cloudpickle would pickle all of it with each function and each item. Here functions and items go by name, and an operation has
one state beside its function, which workers keep. While nothing has been written (`watch`), nothing is pickled or sent.

Guarantees: all calls of an operation have what was in the caller's modules when it began, wherever and whenever they run.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import operator
import pathlib
import re
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from cloudpickle.cloudpickle import _get_or_create_tracker_id as tracker_id_of

from mpgrad.pickling import caches
from mpgrad.pickling.classes import dynamic, made_like_own
from mpgrad.pickling.compiled import MARK, Placement
from mpgrad.pickling.modules import (
    ABOUT_ITSELF,
    LeftOf,
    Live,
    Namespaces,
    Wanted,
    is_own,
    make_function,
    module_of,
    name_of,
    own_imports,
    uses_in,
)
from mpgrad.pickling.reducers import INHERITED, weakly
from mpgrad.pickling.structure import CallerPickler, TensorUnpickler, loads
from mpgrad.pickling.watch import ABSENT, Opaque, Watch, attributes_of, contents_of_cell, contents_of_class, items_of, pairs_of

__all__ = [
    "Everything",
    "Recent",
    "State",
    "dumps_arguments",
    "dumps_function",
    "dumps_whole",
    "loads_whole",
    "loads_with_state",
    "namespaces_of",
]

LARGE_BYTES = 64 << 10  # of a pickle: what has more is compared by its identity
MOST_STATES = 128  # kept for the next operation
NUMBER_BYTES = 8
T = TypeVar("T")
WHOLE = b"w"  # begins what `dumps_whole` gives where there is a state; a pickle begins otherwise
CONTAINERS = {collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque}
OF_MODULES = getattr(torch.nn.Module, "__getstate__", None)  # leaves out what was compiled
MOST_LOOKED_AT = 100  # elements of a list
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter}
ELEMENTS = {list, tuple, dict, set, frozenset}
CODE = types.FunctionType, types.MethodType, type, functools.partial
STEADY = (
    *(complex, range, slice, property, staticmethod, classmethod, functools.partial),
    *(types.MethodType, types.BuiltinFunctionType, types.CodeType, types.MappingProxyType, types.ModuleType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(enum.Enum, re.Pattern, pathlib.PurePath, uuid.UUID, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)  # never written to; or they show what they hold as they are pickled


class Everything:
    """Of a process: its own modules."""

    def covers(self, wanted: Iterable[Wanted]) -> bool:
        return True


class State:
    """What the user's modules hold; of them, what some functions use."""

    _numbers = itertools.count(1)

    def __init__(self, pickled: bytes, tensors: list[torch.Tensor], covered: set[Wanted], watch: Watch) -> None:
        self.number = next(self._numbers)
        self.pickled = pickled
        self.tensors = tensors  # captures of whatever uses the state
        self._covered = covered
        self._watch = watch

    def covers(self, wanted: Iterable[Wanted]) -> bool:
        return all(each in self._covered for each in wanted)

    def is_current(self) -> bool:
        return self._watch.is_unchanged()


class Recent(Generic[T]):
    """What was put here last, by number. Two of these that see the same numbers have the same."""

    def __init__(self, most: int = MOST_STATES) -> None:
        self._kept: collections.OrderedDict[int, T] = collections.OrderedDict()
        self._most = most

    def get(self, number: int) -> T | None:
        return self._kept.get(number)

    def put(self, number: int, value: T) -> None:
        self._kept[number] = value
        self._kept.move_to_end(number)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)


class States:
    """Those that were made last, for as long as they are true."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[tuple[Wanted, ...], State] = collections.OrderedDict()
        # what cannot be carried, as it was met first since the module was loaded; ABSENT where something was met that can
        self._met: dict[Wanted, tuple[object, Callable[[], Any], Sequence[Any]]] = {}

    def of(self, wanted: Iterable[Wanted]) -> State | None:
        key = tuple(wanted)
        if not key:
            return None
        with self._lock:
            state = self._known.pop(key, None)
            if state is None or not state.is_current():
                state = self._made(key)
            self._known[key] = state
            if len(self._known) > MOST_STATES:
                self._known.popitem(last=False)
            return state

    def _made(self, wanted: Sequence[Wanted]) -> State:
        left: dict[Wanted, LeftOf] = {}
        bare: set[tuple[type, str]] = set()
        while True:
            pickler = StatePickler(left, bare)
            try:
                culprit = pickler.dump_all(wanted)
            except BareClassError:
                continue
            if culprit is None:
                break
            left[culprit] = self._left_of(culprit)
        for each in pickler.covered - left.keys():
            self._note_kind(each, None if vars(sys.modules[each.module]).get(each.name or "", ABSENT) is None else ABSENT)
        return State(pickler.buffer.getvalue(), pickler.taken_out, pickler.covered, pickler.watch)

    def _left_of(self, wanted: Wanted) -> LeftOf:
        assert wanted.name is not None
        value = vars(sys.modules[wanted.module])[wanted.name]
        known = self._note_kind(wanted, value)
        if known is not value and known is not None:  # None: what is made when it is needed
            raise TypeError(
                f"{wanted.module}.{wanted.name} was replaced by what cannot be carried ({type(value).__name__}), and workers "
                "would have another one; make it when it is needed, or in the pool's initializer"
            )
        return LeftOf(wanted.module, wanted.name, type(value).__qualname__)

    def _note_kind(self, wanted: Wanted, value: Any) -> Any:
        """What it was when it was met first."""
        module = sys.modules[wanted.module]
        load = getattr(module, "__spec__", None) or module  # another object when it is reloaded
        known = self._met.get(wanted)
        if known is None or known[0] is not load:
            known = self._met[wanted] = load, weakly(value), held_by(value)
        now = held_by(value)
        if known[1]() is value and not (len(now) == len(known[2]) and all(map(operator.is_, known[2], now))):
            raise TypeError(
                f"{wanted.module}.{wanted.name} was written to, and cannot be carried ({type(value).__name__}): workers have "
                "it as they import it; keep what cannot be carried apart from what changes"
            )
        return known[1]()


STATES = States()
LOADED: Recent[Namespaces] = Recent()  # states without tensors, in the process of a worker


class StatePickler(CallerPickler):
    """Functions and classes of the user's own modules by value, and what their code wants after them."""

    def __init__(self, left: dict[Wanted, LeftOf], bare: set[tuple[type, str]]) -> None:
        """`bare`: attributes that classes go without, as these cannot be carried; what is found of them is added."""
        self.buffer = io.BytesIO()
        super().__init__(self.buffer)
        self.covered: set[Wanted] = set()
        self.watch = Watch()
        self._left = left
        self._bare = bare
        self._classes: list[type] = []
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
        mark, start = self.watch.mark(), self.buffer.tell()
        try:
            self.dump((wanted.module, wanted.name, self._left.get(wanted, value)))
        except Exception as error:
            if found := set(self._attributes_that_fail()) - self._bare:
                self._bare |= found
                raise BareClassError from error
            if wanted in self._left or (by_itself and isinstance(value, types.FunctionType | type)):
                error.args = (f"{wanted.module}.{wanted.name}: {error}",)
                raise
            return False
        if wanted in self._left:
            self.watch.content(held_by, value)
        if self.buffer.tell() - start > LARGE_BYTES:
            self.watch.forget_since(mark)
        return True

    # --- what is noted of each object

    def persistent_id(self, value: object) -> Any:
        kind = type(value)
        if (kind is dict or kind is list or kind is set) and id(value) not in self._made:
            self.watch.content(pairs_of if kind is dict else items_of, value)
            return None
        return super().persistent_id(value)

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, types.FunctionType):
            return self._noted_function(value)
        if isinstance(value, type):
            return self._noted_class(value)
        if isinstance(value, functools._lru_cache_wrapper):
            self.watch.content(caches.identities, value)
            return caches.reduce_by_value(value)
        if isinstance(value, types.CellType):
            self.watch.content(contents_of_cell, value)
        elif isinstance(value, io.IOBase) and not isinstance(value, io.StringIO | io.BytesIO):
            raise TypeError(f"cannot pickle an open file ({value!r})")  # cloudpickle would send what is in it
        elif not isinstance(value, STEADY):
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
        own = name_of(value)
        if is_own(value.__module__):
            self._hasten_methods(value)
            self._classes.append(value)
        reduced = dynamic(value) if is_own(value.__module__) else super(CallerPickler, self).reducer_override(value)
        if self._bare and reduced is not NotImplemented and len(reduced) > 2:
            make, arguments, (members, more), *rest = reduced
            members = {name: each for name, each in members.items() if (value, name) not in self._bare}
            reduced = make, arguments, (members, more), *rest
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

    def _attributes_that_fail(self) -> Iterator[tuple[type, str]]:
        for kind in self._classes:
            for name, member in list(vars(kind).items()):
                if not isinstance(member, CODE) and not isinstance(member, STEADY) and cannot_be_carried(member):
                    yield kind, name

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
    if isinstance(value, dict):
        return pairs_of(value)
    if isinstance(value, list | tuple | set):
        return items_of(value)
    return attributes_of(value) if is_own(type(value).__module__) and hasattr(value, "__dict__") else ()


class BareClassError(Exception):
    """A class has an attribute that cannot be carried, such as a pool; once more, without."""


def cannot_be_carried(value: Any) -> bool:
    try:
        pickled_alone(value)
    except Exception:
        return True
    return False


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
    return buffer.getvalue(), [*pickler.tensors, *pickler.buffers], [(each.data_ptr(), each.nbytes) for each in pickler.buffers]


# --- with a function, with arguments, and by itself


def dumps_function(function: Any, first: Sequence[Any] = ()) -> tuple[bytes, list[torch.Tensor], State | None]:
    """The pickle of `function`, its tensors, and the state it is to be loaded with, whose tensors come after them.

    `first`: what some calls are given, perhaps of classes that the other calls will need too.
    """
    pickler = CallerPickler(buffer := io.BytesIO())
    pickler.dump(function)
    if brings_code(list(first), depth=5):
        others = CallerPickler(io.BytesIO(), claims=[])
        with contextlib.suppress(Exception):  # whoever packs the call will find it again, and name the item
            others.dump(first)
        pickler.wanted.update(others.wanted)
    state = STATES.of(pickler.wanted)
    return buffer.getvalue(), pickler.taken_out, state


def brings_code(value: Any, depth: int = 3) -> bool:
    """Whether there are functions, classes, or objects of the user's own classes in `value`; not looked at in every corner."""
    kind = type(value)
    if kind in ELEMENTS:
        inside = value.values() if kind is dict else value
        return depth > 0 and any(brings_code(each, depth - 1) for each in itertools.islice(inside, MOST_LOOKED_AT))
    return kind not in PLAIN and (is_own(kind.__module__) or issubclass(kind, CODE))


def dumps_arguments(value: object, known: State | Everything | None) -> tuple[bytes, list[torch.Tensor], list[Any]]:
    """`dumps_whole` of what may have `Deferred` values in it, and the claims to those, in the order in which pickle meets them.

    What the state `known` has is left to it.
    """
    pickler = CallerPickler(buffer := io.BytesIO(), claims=[])
    pickler.dump(value)
    pickled, tensors = buffer.getvalue(), pickler.taken_out
    if pickler.wanted and (known is None or not known.covers(pickler.wanted)):
        pickled, tensors = with_state(pickled, tensors, pickler.wanted)
    return pickled, tensors, pickler.claims or []


def dumps_whole(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of `value` with all that it uses of the user's modules, and the tensors in both. `loads_whole` reads them."""
    pickler = CallerPickler(buffer := io.BytesIO())
    pickler.dump(value)
    return with_state(buffer.getvalue(), pickler.taken_out, pickler.wanted)


def with_state(pickled: bytes, tensors: list[torch.Tensor], wanted: Iterable[Wanted]) -> tuple[bytes, list[torch.Tensor]]:
    state = STATES.of(wanted)
    if state is None:
        return pickled, tensors
    header = b"".join(each.to_bytes(NUMBER_BYTES, "little") for each in (state.number, len(tensors), len(state.pickled)))
    return WHOLE + header + state.pickled + pickled, tensors + state.tensors


def loads_whole(pickled: bytes, tensors: Sequence[torch.Tensor], claimed: Sequence[Any] = (), names: Live | None = None) -> Any:
    """What `dumps_whole` or `dumps_arguments` gave; `names` are those of the state that was known then."""
    names = names or Namespaces()
    if MARK in pickled and names.placement is None:
        placement = Placement()
        names = Namespaces(placement)
        return placement.load(lambda: loads_whole(pickled, tensors, claimed, names))
    if not pickled.startswith(WHOLE):
        return loads(pickled, tensors, claimed, names=names)
    start = len(WHOLE) + 3 * NUMBER_BYTES
    parts = [pickled[place : place + NUMBER_BYTES] for place in range(len(WHOLE), start, NUMBER_BYTES)]
    number, own, size = [int.from_bytes(part, "little") for part in parts]
    names = loaded(number, pickled[start : start + size], tensors[own:], names.placement)
    return loads(pickled[start + size :], tensors[:own], claimed, names=names)


def loads_with_state(
    pickled: bytes, captures: Sequence[torch.Tensor], number: int, state: bytes, tensors: int
) -> tuple[Any, Live]:
    """A function, and the modules that it sees; of `captures` the last `tensors` are those of the state `number`, if any."""
    placement = Placement() if MARK in pickled or MARK in state else None
    own = len(captures) - tensors

    def load() -> tuple[Any, Live]:
        names = loaded(number, state, captures[own:], placement) if state else Namespaces(placement)
        return loads(pickled, captures[:own], names=names), names

    return load() if placement is None else placement.load(load)


def loaded(number: int, pickled: bytes, tensors: Sequence[torch.Tensor], placement: Placement | None = None) -> Namespaces:
    """The modules as the state has them; those that were loaded before, where it has no tensors, which are others each time."""
    if tensors or placement is not None:
        return namespaces_of(pickled, tensors, placement)
    found = LOADED.get(number) or namespaces_of(pickled, ())
    LOADED.put(number, found)
    return found


def namespaces_of(pickled: bytes, tensors: Sequence[torch.Tensor], placement: Placement | None = None) -> Namespaces:
    """The modules as a state has them."""
    found = Namespaces(placement)
    stream = io.BytesIO(pickled)
    unpickler = TensorUnpickler(stream, tensors, (), found)
    own_imports(unpickler.load())
    while stream.tell() < len(pickled):
        module, name, value = unpickler.load()
        found.put(module, {name: value})
    return found
