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
import io
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from mpgrad.pickling.classes import MAKERS
from mpgrad.pickling.compiled import MARK, Placement
from mpgrad.pickling.modules import LeftOf, Live, Namespaces, own_imports
from mpgrad.pickling.placed import PLACED
from mpgrad.pickling.reducers import weakly
from mpgrad.pickling.state_pickler import CODE, StatePickler, held_by
from mpgrad.pickling.streams import Streams, Travel, as_it_is, captured
from mpgrad.pickling.structure import RUNS_CODE, CallerPickler, TensorUnpickler, loads
from mpgrad.pickling.uses import Wanted, is_own
from mpgrad.pickling.watch import ABSENT, Watch

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

MOST_STATES = 128  # kept for the next operation
NUMBER_BYTES = 8
T = TypeVar("T")
WHOLE = b"w"  # begins what `dumps_whole` gives where there is a state; a pickle begins otherwise
MOST_LOOKED_AT = 100  # elements of a list
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter}
ELEMENTS = {list, tuple, dict, set, frozenset}


class Everything:
    """Of a process: its own modules."""

    def covers(self, wanted: Iterable[Wanted]) -> bool:
        return True


class State:
    """What the user's modules hold; of them, what some functions use."""

    _numbers = itertools.count(1)

    def __init__(self, pickled: bytes, mark: bytes, tensors: list[torch.Tensor], covered: set[Wanted], watch: Watch) -> None:
        self.number = next(self._numbers)
        self.pickled = pickled
        self.mark = mark  # see `structure.RUNS_CODE`
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
        self._lock = threading.RLock()  # what is pickled has methods of its own, which may come here again
        self._known: collections.OrderedDict[tuple[Wanted, ...], State] = collections.OrderedDict()
        # what cannot be carried, as it was met first since the module was loaded; ABSENT where something was met that can
        self._met: dict[Wanted, tuple[object, Callable[[], Any], Sequence[Any]]] = {}

    def of(self, wanted: Iterable[Wanted]) -> State | None:
        """The state with all that is wanted, as it is now; the same one while nothing changes. None: nothing is wanted."""
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
        while True:
            pickler = StatePickler(left)
            if (culprit := pickler.dump_all(wanted)) is None:
                break
            left[culprit] = self._left_of(culprit)
        for each in pickler.covered - left.keys():
            self._note_kind(each, None if vars(sys.modules[each.module]).get(each.name or "", ABSENT) is None else ABSENT)
        return State(pickler.buffer.getvalue(), pickler.mark, pickler.taken_out, pickler.covered, pickler.watch)

    def _left_of(self, wanted: Wanted) -> LeftOf:
        """In the place of what cannot be carried: the worker's own. Raises TypeError where the caller's was replaced."""
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
LAST = [0]  # the number of the one that was loaded last; 0: it is not kept


# --- with a function, with arguments, and by itself


def dumps_function(function: Any, first: Sequence[Any] = ()) -> tuple[bytes, list[torch.Tensor], State | None]:
    """The pickle of `function`, its tensors, and the state it is to be loaded with, whose tensors come after them.

    `first`: what some calls are given, perhaps of classes that the other calls will need too.
    """
    pickler = CallerPickler(buffer := io.BytesIO())
    pickler.dump(function)
    if brings_code(list(first), depth=5):
        others = CallerPickler(io.BytesIO(), claims=[], travel=as_it_is)
        with contextlib.suppress(Exception):  # whoever packs the call will find it again, and name the item
            others.dump(first)
        pickler.wanted.update(others.wanted)
    state = STATES.of(pickler.wanted)
    mark = pickler.mark or (b"" if state is None else state.mark)
    return buffer.getvalue() + mark, pickler.taken_out, state


def brings_code(value: Any, depth: int = 3) -> bool:
    """Whether there are functions, classes, or objects of the user's own classes in `value`; not looked at in every corner."""
    kind = type(value)
    if kind in ELEMENTS:
        inside = value.values() if kind is dict else value
        return depth > 0 and any(brings_code(each, depth - 1) for each in itertools.islice(inside, MOST_LOOKED_AT))
    return kind not in PLAIN and (is_own(kind.__module__) or issubclass(kind, CODE))


def dumps_arguments(
    value: object, known: State | Everything | None, travel: Travel = as_it_is
) -> tuple[bytes, list[torch.Tensor], list[Any]]:
    """`dumps_whole` of what may have `Deferred` values in it, and the claims to those, in the order in which pickle meets them.

    What the state `known` has is left to it.
    """
    pickler = CallerPickler(buffer := io.BytesIO(), claims=[], travel=travel)
    pickler.dump(value)
    pickled, tensors = buffer.getvalue() + pickler.mark, pickler.taken_out
    if pickler.wanted and (known is None or not known.covers(pickler.wanted)):
        pickled, tensors = with_state(pickled, tensors, pickler.wanted)
    return pickled, tensors, pickler.claims or []


def dumps_whole(value: object, travel: Travel = captured) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of `value` with all that it uses of the user's modules, and the tensors in both. `loads_whole` reads them."""
    pickler = CallerPickler(buffer := io.BytesIO(), travel=travel)
    pickler.dump(value)
    return with_state(buffer.getvalue(), pickler.taken_out, pickler.wanted)


def with_state(pickled: bytes, tensors: list[torch.Tensor], wanted: Iterable[Wanted]) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes and tensors with those of the state behind what uses it, where it uses any."""
    state = STATES.of(wanted)
    if state is None:
        return pickled, tensors
    pickled += b"" if pickled.endswith(RUNS_CODE) else state.mark
    header = b"".join(each.to_bytes(NUMBER_BYTES, "little") for each in (state.number, len(tensors), len(state.pickled)))
    return WHOLE + header + state.pickled + pickled, tensors + state.tensors


def loads_whole(
    pickled: bytes,
    tensors: Sequence[torch.Tensor],
    claimed: Sequence[Any] = (),
    names: Live | None = None,
    streams: Streams | None = None,
) -> Any:
    """What `dumps_whole` or `dumps_arguments` gave; `names` are those of the state that was known then.

    `streams`: gets those of the generators that it captures.
    """
    names = names or Namespaces()
    if MARK in pickled and names.placement is None:
        placement = Placement()
        names = Namespaces(placement)
        return placement.load(lambda: loads_whole(pickled, tensors, claimed, names, streams))
    if not pickled.startswith(WHOLE):
        return loads(pickled, tensors, claimed, names, streams)
    start = len(WHOLE) + 3 * NUMBER_BYTES
    parts = [pickled[place : place + NUMBER_BYTES] for place in range(len(WHOLE), start, NUMBER_BYTES)]
    number, own, size = [int.from_bytes(part, "little") for part in parts]
    names = loaded(number, pickled[start : start + size], tensors[own:], names.placement, streams)
    return loads(pickled[start + size :], tensors[:own], claimed, names, streams)


def loads_with_state(
    pickled: bytes, captures: Sequence[torch.Tensor], number: int, state: bytes, tensors: int
) -> tuple[Any, Namespaces, Streams]:
    """A function, the modules that it sees, and the generators that it captures.

    Of `captures` the last `tensors` are those of the state `number`, if any.
    """
    placement = Placement() if MARK in pickled or MARK in state else None
    own, streams = len(captures) - tensors, Streams()

    def load() -> tuple[Any, Namespaces, Streams]:
        names = loaded(number, state, captures[own:], placement, streams) if state else Namespaces(placement)
        return loads(pickled, captures[:own], (), names, streams), names, streams

    return load() if placement is None else placement.load(load)


def loaded(
    number: int,
    pickled: bytes,
    tensors: Sequence[torch.Tensor],
    placement: Placement | None = None,
    streams: Streams | None = None,
) -> Namespaces:
    """The modules as the state has them; those that were loaded before, where it has no tensors, which are others each time."""
    if tensors or placement is not None:
        LAST[0] = 0
        return namespaces_of(pickled, tensors, placement, streams)
    found = LOADED.get(number)
    if found is None:
        found = namespaces_of(pickled, ())
    elif number != LAST[0] and any(each.__name__.encode() in pickled for each in MAKERS):
        # states share classes: the one that was loaded since has set their attributes
        namespaces_of(pickled, ())
    LAST[0] = number
    LOADED.put(number, found)
    return found


def namespaces_of(
    pickled: bytes,
    tensors: Sequence[torch.Tensor],
    placement: Placement | None = None,
    streams: Streams | None = None,
) -> Namespaces:
    """The modules as a state has them."""
    found = Namespaces(placement)
    stream = io.BytesIO(pickled)
    unpickler = TensorUnpickler(stream, tensors, (), found, streams)
    with PLACED.taken_back():  # for what is this process's own
        own_imports(unpickler.load())
        while stream.tell() < len(pickled):
            module, name, value = unpickler.load()
            found.put(module, {name: value})
    return found
