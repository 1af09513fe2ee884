"""The parts of the user's modules that functions use are one pickle, the *state*. It is rebuilt
only after a change.

    the function's pickle        refers to names: simmod.f
    the state's pickle           simmod: f, by value, and DT, TABLE, helper, which its code uses;
                                 and the names that these use, and so on

cloudpickle would pickle all of this with each function and each item. Here functions and items are
pickled by name. Each operation has one state besides its function, and workers keep it. While
nothing changes (`ContentRecord`), nothing is pickled or sent.

A function and its modules may refer to the same objects. These are only in the state's pickle. The
function's pickle has numbers for them, so each of them stays one object (`SharingPickle`).

Guarantees: all calls of an operation see the caller's modules as they were when it began, wherever
    and whenever they run.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import marshal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from cloudpickle.cloudpickle import _get_or_create_tracker_id as tracker_id_of

from mpgrad.collector import collector_held
from mpgrad.pickling.class_states import ABSENT
from mpgrad.pickling.classes import dynamic, made_like_own, reduce_c_type
from mpgrad.pickling.compiled import MARK, GlobalsSnapshot
from mpgrad.pickling.modules import (
    ABOUT_ITSELF,
    PLACED,
    Namespaces,
    OwnValueReference,
    WantedName,
    closure_of,
    is_own,
    make_function,
    module_of,
    name_of,
    own_imports,
    uses_in,
)
from mpgrad.pickling.reducers import globals_used, identities, itself, reduce_by_value, weakly
from mpgrad.pickling.registrations import RegisteredKind
from mpgrad.pickling.streams import (
    Root,
    Streams,
    Travel,
    as_it_is,
    captured,
    plain,
)
from mpgrad.pickling.structure import (
    CallerPickler,
    Memo,
    ProbePickler,
    TensorPickler,
    TensorUnpickler,
    held_by_class,
    pairs_of,
    size_alone,
    values_of,
)
from mpgrad.pickling.unchanged import (
    STEADY,
    KnownPickle,
    are_same,
    keep_pickle,
    kept_pickle,
)
from mpgrad.torch_state.generators import Kind
from mpgrad.torch_state.private import NOTHING, outside_transforms
from mpgrad.wire.messages import ModulesState

__all__ = [
    "ItemStreams",
    "ModuleSnapshot",
    "RecentFunctions",
    "RecentValues",
    "dumps_arguments",
    "dumps_function",
    "dumps_whole",
    "largest_part",
    "loads_whole",
    "loads_with_state",
]

CODE = types.FunctionType, types.MethodType, type, functools.partial
MOST_STATES = 128  # kept for later operations
MOST_FUNCTIONS = 8  # of a pool, whose pickles are kept
T = TypeVar("T")
# the first byte of a `dumps_whole` result that contains a state; pickles begin with another byte
WHOLE = b"w"
MOST_LOOKED_AT = 100  # elements of a list
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter}
ELEMENTS = {list, tuple, dict, set, frozenset}


# --- the pickle


class StatePickler(CallerPickler):
    """Pickles functions and classes of the user's modules by value, then what their code uses."""

    refuses_files = True

    def __init__(self, left: dict[WantedName, OwnValueReference]) -> None:
        super().__init__(io.BytesIO())
        self.covered: set[WantedName] = set()
        self._left = left
        # functions that may run, and use globals, while the state is being loaded
        self._hastened: dict[int, types.FunctionType] = {}

    def dump_all(self, wanted: Sequence[WantedName]) -> WantedName | None:
        """Pickle these names, and the names that they use.

        Return None, or the first name that cannot be pickled. The pickle is then useless.
        """
        self.wanted = dict.fromkeys(wanted)
        own = {each.module for each in wanted if each.name is None or is_defined_there(each)}
        self.dump(tuple(sorted(own)))
        while self.wanted:
            some, self.wanted = self.wanted, {}
            if (
                culprit := self._dump_some([each for each in some if each not in self.covered])
            ) is not None:
                return culprit
        return None

    def _dump_some(self, wanted: Sequence[WantedName]) -> WantedName | None:
        """Pickle these names. Return the same as `dump_all`."""
        self.covered.update(wanted)
        # for each module, its names, and whether a name was requested by itself
        names: dict[str, dict[str, bool]] = {}
        for module, name in wanted:
            contents = vars(sys.modules[module])
            of_module = names.setdefault(module, dict.fromkeys(ABOUT_ITSELF, True))
            if name is not None:
                of_module[name] = True
                continue
            for each in contents:
                if not each.startswith("__"):
                    of_module.setdefault(each, False)
        self.look(values_of, (sys.modules, list(names)))
        for module, of_module in names.items():
            contents = vars(sys.modules[module])
            is_whole = WantedName(module, None) in wanted
            self.look(
                *((pairs_of, contents) if is_whole else (values_of, (contents, [*of_module])))
            )
            for name, by_itself in of_module.items():
                this = WantedName(module, name)
                self.covered.add(this)
                if name in contents and not self._dump_name(this, contents[name], by_itself):
                    return this
        return None

    def _dump_name(self, wanted: WantedName, value: Any, by_itself: bool) -> bool:
        """Pickle a name. Return False if the worker's own value must be used instead.

        If the worker's own value cannot be used either, raise the error.
        """
        try:
            self.dump((wanted.module, wanted.name, self._left.get(wanted, value)))
        except Exception as error:
            is_code = isinstance(value, types.FunctionType | type) and is_own(value.__module__)
            if wanted in self._left or (by_itself and is_code):
                error.args = (f"{wanted.module}.{wanted.name}: {error}",)
                raise
            return False
        if wanted in self._left:
            self.look(held_by, value)
        return True

    def _reduce_code(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._noted_function(value)
        if isinstance(value, type):
            return self._noted_class(value)
        self.look(identities, value)
        return reduce_by_value(value)

    def _noted_function(self, value: types.FunctionType) -> Any:
        reduced = (
            self.reduce_function(value)
            if name_of(value) is None
            else self.reduce_function(value, by_value=True)
        )
        if reduced is not NotImplemented and reduced[0] is make_function:
            self._want_name(value)  # not made by the compiler
        return reduced

    def _noted_class(self, value: type) -> Any:
        if (of_c := reduce_c_type(value)) is not None:
            return of_c
        own = name_of(value)
        if is_own(value.__module__):
            self._hasten_methods(value)
        reduced = (
            dynamic(value) if is_own(value.__module__) else TensorPickler._reduce_code(self, value)
        )
        if reduced is not NotImplemented and own is not None:
            make, arguments, (members, more), *rest = reduced
            members.pop("__slotnames__", None)  # pickle adds it in each process
            members = {name: member_or_left(value, name, each) for name, each in members.items()}
            identity = value.__module__, value.__qualname__, tracker_id_of(value)
            reduced = made_like_own, (*identity, make, arguments), (members, more), *rest
        if reduced is not NotImplemented and len(reduced) > 2:  # not one of Python's own types
            self.look(held_by_class, value)
            self.note_made(reduced)
            self._want_name(value)
        return reduced

    def globals_along(self, value: types.FunctionType, given: dict[str, Any]) -> dict[str, Any]:
        if id(value) not in self._hastened:
            return {}
        home = module_of(value) or ""
        return {name: self._left.get(WantedName(home, name), each) for name, each in given.items()}

    def _hasten(self, value: Any) -> None:
        """Record that a function, and those that it calls, may run while the state is being
        loaded."""
        function = getattr(value, "__func__", value)
        if (
            not isinstance(function, types.FunctionType)
            or id(function) in self._hastened
            or module_of(function) is None
        ):
            return
        self._hastened[id(function)] = function
        for name in uses_in(function.__code__).names:
            self._hasten(function.__globals__.get(name))

    def _hasten_methods(self, kind: type) -> None:
        """Hasten the methods that Python itself calls.

        Python calls them, for example, when a subclass is made or an object is added to a set.
        """
        for name, member in vars(kind).items():
            if issubclass(kind, type) or (name.startswith("__") and name.endswith("__")):
                self._hasten(member)

    def _want_name(self, value: Any) -> None:
        """Require that the value is also found under its own name."""
        if (own := name_of(value)) is not None:
            self.wanted[own] = None


def held_by(value: Any) -> Sequence[Any]:
    """Return the contents of a value, for a later comparison."""
    if isinstance(value, dict):
        return pairs_of(value)
    if isinstance(value, list | tuple | set):
        return tuple(value)
    own = is_own(type(value).__module__) and getattr(value, "__dict__", None)
    return pairs_of(own) if own else ()


def member_or_left(kind: type, name: str, member: Any) -> Any:
    """Return an attribute of a class, or a reference to the worker's own if it cannot be pickled,
    for example a file."""
    if (
        name.startswith(("__", "_abc_"))
        or type(member) in PLAIN
        or issubclass(type(member), (*CODE, *STEADY))
    ):
        return member
    try:
        pickler = CallerPickler(io.BytesIO())
        pickler.refuses_files = True
        pickler.dump(member)
    except Exception:
        return OwnValueReference(
            kind.__module__, f"{kind.__qualname__}.{name}", type(member).__qualname__
        )
    return member


def is_defined_there(wanted: WantedName) -> bool:
    """Whether the name is a function or class that its module itself defines."""
    value = vars(sys.modules[wanted.module]).get(wanted.name or "")
    return isinstance(value, types.FunctionType | type) and value.__module__ == wanted.module


# --- snapshots of the modules


class ModuleSnapshot(KnownPickle):
    """The parts of the user's modules that some functions use, as they were at one moment."""

    _numbers = itertools.count(1)

    def __init__(self, pickler: StatePickler) -> None:
        super().__init__(pickler)
        self.number = next(self._numbers)
        self.pickled = pickler.buffer.getvalue()
        self.mark = pickler.mark  # see `structure.RUNS_CODE`
        self.tensors = pickler.taken_out  # captures of all functions that use the state
        self._covered = pickler.covered

    @functools.cached_property
    def _memo(self) -> Memo:
        """The objects in the pickle, and their numbers."""
        memo: Memo = self.pickler.memo.copy()
        return memo

    @functools.cached_property
    def _identified(self) -> Memo:
        return self.pickler.identified()

    def covers(self, wanted: Iterable[WantedName]) -> bool:
        return all(each in self._covered for each in wanted)

    def shared_with(self, pickler: CallerPickler) -> tuple[Memo, tuple[int, ...]]:
        """Return the objects that a value shares with this state: a memo with their numbers in the
        value's new pickle, and their numbers in this pickle."""
        # Copying a large memo takes long, and most small ones share nothing.
        is_small = pickler.buffer.tell() <= len(self.pickled)
        some = pickler.identified() if is_small else self._identified
        if not some:
            return {}, ()
        own, known = (some, self._memo) if is_small else (pickler.memo.copy(), some)
        both = sorted((own[each][0], known[each]) for each in own.keys() & known.keys())
        memo = {id(each): (number, each) for number, (_, (_, each)) in enumerate(both)}
        return memo, tuple(number for _, (number, _) in both)

    @property
    def values(self) -> dict[str, Any]:
        """The current values of the names in the state."""
        return {
            f"{module}.{name}": vars(sys.modules[module]).get(name)
            for module, name in self._covered
            if name is not None and module in sys.modules
        }

    def sent(self, shared: Sequence[int], is_known: bool = False) -> ModulesState:
        """Return the message that sends the state to a worker."""
        pickled = None if is_known else self.pickled
        return ModulesState(self.number, pickled, len(self.tensors), tuple(shared))

    def has_some_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        own = set(map(id, self.tensors))
        return any(id(each) in own for each in tensors)


class RecentValues(collections.OrderedDict[Hashable, T]):
    """A cache of the values that were put last.

    Two of these caches that see the same keys in the same order keep the same keys.
    """

    def __init__(self, most: int = MOST_STATES) -> None:
        super().__init__()
        self._most = most

    def put(self, key: Hashable, value: T) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class SnapshotCache:
    """The most recent snapshots, as long as they are up to date."""

    def __init__(self) -> None:
        # reentrant, because objects that are pickled run their own code, which may come here again
        self._lock = threading.RLock()
        self._known: RecentValues[ModuleSnapshot] = RecentValues()  # by the wanted names
        # Values that cannot be pickled, as they were when first met after the module was loaded.
        # ABSENT replaces a value that could be pickled.
        self._met: dict[WantedName, tuple[object, Callable[[], Any], Sequence[Any]]] = {}

    def of(self, wanted: Iterable[WantedName]) -> ModuleSnapshot | None:
        """Return the current state with the `wanted` names, or None if there are no such names.

        While nothing changes, the same object is returned.
        """
        key = tuple(wanted)
        if not key:
            return None
        with self._lock:
            state = self._known.get(key)
            make = functools.partial(self._pickled, key)
            state = ModuleSnapshot(make()) if state is None else state.renewed(make)
            self._known.put(key, state)
            return state

    def _pickled(self, wanted: Sequence[WantedName]) -> StatePickler:
        left: dict[WantedName, OwnValueReference] = {}
        while True:
            pickler = StatePickler(left)
            if (culprit := pickler.dump_all(wanted)) is None:
                break
            left[culprit] = self._left_of(culprit)
        for each in pickler.covered - left.keys():
            self._note_kind(
                each,
                None
                if vars(sys.modules[each.module]).get(each.name or "", ABSENT) is None
                else ABSENT,
            )
        return pickler

    def _left_of(self, wanted: WantedName) -> OwnValueReference:
        """Return a reference to the worker's own value, in place of one that cannot be pickled.

        Raises TypeError if the caller's value was replaced.
        """
        assert wanted.name is not None
        value = vars(sys.modules[wanted.module])[wanted.name]
        known = self._note_kind(wanted, value)
        if known is not value and known is not None:  # None if it is made when it is needed
            raise TypeError(
                f"{wanted.module}.{wanted.name} was replaced with a value that cannot be sent "
                f"({type(value).__name__}), and workers would use another one; make it when it is "
                "needed, or in the pool's initializer"
            )
        return OwnValueReference(wanted.module, wanted.name, type(value).__qualname__)

    def _note_kind(self, wanted: WantedName, value: Any) -> Any:
        """Return the value that the name had when it was first met."""
        module = sys.modules[wanted.module]
        load = getattr(module, "__spec__", None) or module  # a reload makes a new object
        known = self._met.get(wanted)
        if known is None or known[0] is not load:
            known = self._met[wanted] = load, weakly(value), held_by(value)
        now = held_by(value)
        if known[1]() is value and not are_same(known[2], now):
            raise TypeError(
                f"{wanted.module}.{wanted.name} was written to, and cannot be sent "
                f"({type(value).__name__}): workers have it as they import it; do not store values "
                "that cannot be sent with values that change"
            )
        found = known[1]()
        return ABSENT if found is None and isinstance(known[1], weakref.ref) else found


STATES = SnapshotCache()
# the states without tensors that this worker process has loaded
LOADED: RecentValues[tuple[Namespaces, TensorUnpickler, dict[type, RegisteredKind]]] = (
    RecentValues()
)


# --- the state with a function, with arguments, and alone


class SharingPickle(NamedTuple):
    """The pickle of a value, and the state to load it with."""

    pickled: bytes
    tensors: list[torch.Tensor]  # without the state's
    state: ModuleSnapshot | None
    # The numbers, in the state's pickle, of objects that both contain. Each stays one object.
    shared: tuple[int, ...] = ()


def dumps_beside(
    value: object,
    make: Callable[[io.BytesIO], CallerPickler],
    pickler: CallerPickler,
    state: ModuleSnapshot | None,
) -> SharingPickle:
    """Return the value's pickle, which the `pickler` has made, with the state.

    If the value shares objects with the state, it is pickled again with their numbers.
    """
    if state is None:
        return SharingPickle(pickler.buffer.getvalue() + pickler.mark, pickler.taken_out, None)
    mark = pickler.mark or state.mark
    # a value with futures is pickled only once, because pickling queries them
    memo, shared = ({}, ()) if pickler.dependencies else state.shared_with(pickler)
    if shared:
        pickler = make(io.BytesIO())
        pickler.memo = memo
        pickler.dump(value)
    return SharingPickle(pickler.buffer.getvalue() + mark, pickler.taken_out, state, shared)


class KnownFunction(KnownPickle):
    """A function whose pickle may be reused."""

    # the function's pickle with the state that it was last used with
    beside: SharingPickle | None = None

    def dumps_beside(self, function: Any, state: ModuleSnapshot | None) -> SharingPickle:
        if self.beside is None or self.beside.state is not state:
            self.beside = dumps_beside(function, CallerPickler, self.pickler, state)
        return self.beside


class RecentFunctions:
    """The functions that were last pickled for a pool, and their pickles.

    A function is kept from its second operation on, with all its captures.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By the id of the called object, and its method. Another object may get the same id.
        self._known: RecentValues[tuple[weakref.ref[Any], KnownFunction | None]] = RecentValues(
            MOST_FUNCTIONS
        )

    def of(self, function: Any) -> KnownFunction:
        """Return the function with an up-to-date pickle."""
        make = functools.partial(function_pickler, function)
        is_method = type(function) is types.MethodType
        called = function.__self__ if is_method else function
        key = id(called), function.__func__ if is_method else None
        try:
            reference = weakref.ref(called)
        except TypeError:
            return KnownFunction(make())
        with self._lock:
            met, known = self._known.get(key, (None, None))
        came_before = met is not None and met() is called
        known = known.renewed(make) if known is not None and came_before else KnownFunction(make())
        is_kept = came_before and not known.pickler.finds_names
        with self._lock:
            self._known.put(key, (reference, known if is_kept else None))
        return known


def function_pickler(function: Any) -> CallerPickler:
    pickler = CallerPickler(io.BytesIO())
    pickler.dump(function)
    return pickler


def dumps_function(
    function: Any,
    first: Sequence[tuple[Sequence[Any], dict[str, Any]]] = (),
    recent: RecentFunctions | None = None,
) -> SharingPickle:
    """Pickle `function`. The tensors of the state come after those of the function.

    `first` are the arguments of some calls, whose classes other calls may also need. `recent` are
    the functions that were pickled before.
    """
    kept, fingerprint = kept_pickle(function)
    if kept is None:
        if fingerprint is None and recent is not None:
            known = recent.of(function)
        else:
            known = KnownFunction(function_pickler(function))
        pickler = known.pickler
        wanted = dict(pickler.wanted)
        if fingerprint is not None:
            keep_pickle(function, fingerprint, pickler, pickler.buffer.getvalue())
    else:
        wanted = dict.fromkeys(kept.wanted)
    given = [value for args, kwargs in first for value in (*args, *kwargs.values())]
    if brings_code(given):
        others = CallerPickler(io.BytesIO(), dependencies=[], travel=as_it_is)
        # the error is ignored, because packing the call will raise it again and name the item
        with contextlib.suppress(Exception):
            others.dump(first)
        wanted.update(others.wanted)
    state = STATES.of(wanted)
    if kept is None:
        return known.dumps_beside(function, state)
    assert fingerprint is not None
    tensors = [fingerprint.tensors[number] for number in kept.order]
    if state is None or not state.has_some_of(tensors):
        mark = b"" if state is None else state.mark
        return SharingPickle(kept.pickled + mark, tensors, state)
    return dumps_beside(function, CallerPickler, function_pickler(function), state)


def largest_part(function: Any, state: ModuleSnapshot | None) -> str | None:
    """Return the name of the largest object that the function uses by name."""
    used = {} if state is None else state.values
    code = getattr(function, "__func__", function)
    if isinstance(code, types.FunctionType):
        used |= globals_used(code) | closure_of(code)
    sizes = {}
    for name, value in used.items():
        with contextlib.suppress(Exception):  # it cannot be pickled by itself
            sizes[name] = size_alone(value, None)
    return max(sizes, key=lambda name: sizes[name], default=None)


def brings_code(value: Any, depth: int = 3) -> bool:
    """Whether `value` contains functions, classes, or objects of the user's classes.

    The search stops at a depth of 3, and after 100 elements of a container.
    """
    kind = type(value)
    if kind in ELEMENTS:
        inside = list(itertools.islice(value.values() if kind is dict else value, MOST_LOOKED_AT))
        if PLAIN.issuperset(map(type, inside)):
            return False
        return depth > 0 and any(brings_code(each, depth - 1) for each in inside)
    return kind not in PLAIN and (is_own(kind.__module__) or issubclass(kind, CODE))


def dumps_arguments(
    value: object, known: ModuleSnapshot | None, travel: Travel = as_it_is
) -> tuple[bytes, list[torch.Tensor], list[Any]]:
    """Pickle arguments that may contain `DeferredValue` objects, as `dumps_whole` does.

    Also return the dependencies on these, in the order in which pickle meets them. If the state
    `known` covers everything, no other state is added.
    """
    dependencies: list[Any] = []
    return *dumps_whole(value, travel, known, dependencies), dependencies


def dumps_whole(
    value: object,
    travel: Travel = captured,
    known: ModuleSnapshot | None = None,
    dependencies: list[Any] | None = None,
) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle `value` with the parts of the user's modules that it uses.

    Return the bytes and the tensors of both, for `loads_whole`.
    """
    make = functools.partial(CallerPickler, dependencies=dependencies, travel=travel)
    pickler = make(io.BytesIO())
    pickler.dump(value)
    is_covered = known is not None and known.covers(pickler.wanted)
    state = None if is_covered else STATES.of(pickler.wanted)
    if state is None:
        return pickler.buffer.getvalue() + pickler.mark, pickler.taken_out
    pickled, tensors, _, shared = dumps_beside(value, make, pickler, state)
    beside = marshal.dumps((state.number, state.pickled, len(state.tensors), shared))
    return WHOLE + beside + pickled, tensors + state.tensors


def loads_whole(
    pickled: bytes,
    tensors: Sequence[torch.Tensor],
    dependency_results: Sequence[Any] = (),
    names: Namespaces | None = None,
    streams: Streams | None = None,
) -> Any:
    """Load a pickle of `dumps_whole` or `dumps_arguments`.

    `names` are the modules of the state that was `known` there. `streams` receives the streams of
    the generators that the value captures.
    """
    state = None
    if pickled.startswith(WHOLE):
        stream = io.BytesIO(pickled)
        stream.seek(len(WHOLE))
        state, pickled = ModulesState(*marshal.load(stream)), stream.read()
    return loads_with_state(pickled, tensors, state, dependency_results, names, streams)[0]


def loads_with_state(
    pickled: bytes,
    captures: Sequence[torch.Tensor],
    state: ModulesState | None = None,
    dependency_results: Sequence[Any] = (),
    names: Namespaces | None = None,
    streams: Streams | None = None,
) -> tuple[Any, Namespaces, Streams]:
    """Load a function, the modules that it sees, and the generators that it captures.

    If there is a state, the last captures belong to it. Without a state, `names` are the modules.
    """
    own = len(captures) - (0 if state is None else state.tensors)
    seen = names or Namespaces()
    found = Streams() if streams is None else streams
    is_compiled = MARK in pickled or (state is not None and MARK in (state.pickled or b""))
    placement = GlobalsSnapshot() if seen.placement is None and is_compiled else None
    if placement is not None:
        registered, seen = seen.registered, Namespaces(placement)
        seen.registered = registered

    modules, objects = seen, list[Any]()
    with collector_held(), NOTHING if placement is None else placement.loading():
        if state is not None:
            modules, loader = loaded(state, captures[own:], seen, found)
            memo = loader.memo.copy() if state.shared else {}
            objects = [memo[each] for each in state.shared]
        unpickler = TensorUnpickler(
            io.BytesIO(pickled), captures[:own], dependency_results, modules, found, objects
        )
        return unpickler.load(), modules, found


def loaded(
    state: ModulesState,
    tensors: Sequence[torch.Tensor],
    operation: Namespaces,
    streams: Streams,
) -> tuple[Namespaces, TensorUnpickler]:
    """Return the modules of a state for an operation, and the unpickler that made them.

    Modules that are already loaded are reused if the state has no tensors, because tensors differ
    each time.
    """
    placement, registered = operation.placement, operation.registered
    number, pickled = state.number, state.pickled or b""
    is_kept = not tensors and placement is None
    found = LOADED.get(number) if is_kept else None
    if found is None:
        names = Namespaces(placement)
        stream = io.BytesIO(pickled)
        unpickler = TensorUnpickler(stream, tensors, (), names, streams)
        with PLACED.taken_back():  # for this process's own values
            own_imports(unpickler.load())
            while stream.tell() < len(pickled):
                module, name, value = unpickler.load()
                names.put(module, {name: value})
        found = names, unpickler, names.registered
    names, unpickler, of_state = found
    registered.update(of_state)
    # The copies reach their modules. So a kept one must not have what keeps them registered.
    names.registered = {} if is_kept else registered
    if is_kept:
        LOADED.put(number, found)
    view = names.for_operation()
    view.registered = registered
    return view, unpickler


# --- generators of random numbers in items


# generators that several items share; numpy's cannot have weak references
SHARED: collections.deque[Any] = collections.deque(maxlen=64)


Roots = dict[int, tuple[Any, Any]]  # the generator and its root, by the generator's id


class MetGenerator(NamedTuple):
    """A generator that an item contained."""

    generator: Any  # kept alive, so that no other object gets its id
    first: int
    is_shared: bool


class ItemStreams:
    """Decides how generators in the items of one operation are sent.

    If one item contains a generator, it is sent as it is. If several items contain it, each item
    gets its own stream of it. The items of an iterator are not all known in advance. In that case
    the first item that contains a generator gets it as it is, and each later item gets a stream.
    After that the generator counts as shared. An item may be packed more than once.
    """

    def __init__(self, items: Iterable[Any] | None, captures: Sequence[torch.Tensor] = ()) -> None:
        """Start with the `items`, if all of them are known.

        `captures` are the function's captures, before they are `drawn`.
        """
        self._items = items
        self._captured = (
            [each.generator for each in captures if type(each) is Root] if captures else ()
        )
        self._first = 0  # the number of the operation's first item
        self._met: dict[int, MetGenerator] = {}
        self._roots: Roots = {}
        self._roots_of_code: Roots = {}

    def onwards(self, first: int) -> ItemStreams:
        """Return the streams for later items, which another operation numbers from `first`."""
        later = ItemStreams(self._items)
        later._first, later._met, later._roots = first, self._met, self._roots
        return later

    def of(self, item: int) -> Travel:
        return functools.partial(self._reduce, self._first + item)

    def _reduce(self, item: int, kind: Kind, generator: Any) -> Any:
        met = self._met.get(id(generator))
        if met is None:
            met = self._met[id(generator)] = MetGenerator(
                generator, item, self._is_shared(generator)
            )
        if item == met.first and not met.is_shared:
            return NotImplemented
        root = root_of(kind, generator, self._roots)
        with outside_transforms():
            own = kind.own(generator)
            kind.begin(own, root, item)
        self._met[id(own)] = MetGenerator(own, item, is_shared=False)
        return itself, (own,)

    def drawn(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of an item, with roots replaced with drawn numbers.

        An item may bring code of the user's modules that captures generators. All items share
        these.
        """
        roots = self._roots_of_code
        return [
            plain(root_of(each.kind, each.generator, roots)) if type(each) is Root else each
            for each in tensors
        ]

    def _is_shared(self, generator: Any) -> bool:
        """Whether the function or several items contain the generator."""
        if any(each is generator for each in self._captured):
            return True
        if self._items is None:
            return any(each is generator for each in tuple(SHARED))
        return len(self._holders.get(id(generator), (None, ()))[1]) > 1

    @functools.cached_property
    def _holders(self) -> dict[int, tuple[Any, set[int]]]:
        """Return the generators in items by id, each with the numbers of its items.

        The generators are kept alive, so that no other object gets their ids.
        """
        found: dict[int, tuple[Any, set[int]]] = {}

        def note(item: int, kind: Kind, generator: Any) -> Any:
            found.setdefault(id(generator), (generator, set()))[1].add(item)
            return NotImplemented

        for number, item in enumerate(self._items or ()):
            # the error is ignored, because packing the item will raise it again and name the item
            with contextlib.suppress(Exception):
                ProbePickler(
                    io.BytesIO(), dependencies=[], travel=functools.partial(note, number)
                ).dump(item)
        return found


def root_of(kind: Kind, generator: Any, roots: Roots) -> Any:
    """Return the generator's root from `roots`. Draw one if there is none."""
    if id(generator) not in roots:
        with outside_transforms():
            roots[id(generator)] = generator, kind.root(generator)
        SHARED.append(generator)
    return roots[id(generator)][1]
