"""Generators of random numbers, on their way: those that a function captures, and those that items hold.

    [1] `captured`: a `Root` in the place of its state ─► [2] `drawn`, for one operation, a capture like others
        ─► [3] `kept`, in a worker: a `Stream`, which begins anew before each item
A root is a tensor, so that the pickle of a function stays the same, and its cost known, while its generators move on.

Generators of items travel as they are; but one that several items have gives each a stream of its own. Where the items are not
all there yet (an iterator's), the first one that has a generator gets it as it is, the others a stream each; from then on it is
known that several items have it.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.pickling.modules import attribute_here
from mpgrad.pickling.reducers import itself
from mpgrad.torch_state.generators import Kind, bits_of, is_generator, kind_of, kind_of_class, named
from mpgrad.torch_state.private import outside_transforms

__all__ = [
    "ItemStreams",
    "Root",
    "Streams",
    "Travel",
    "as_it_is",
    "captured",
    "drawn",
    "reduce_generator",
    "set_attributes",
]

Travel = Callable[[Kind, Any], Any]  # how a generator is reduced; NotImplemented: as it is


class Root(torch.Tensor):
    """[1] Stands among a function's captures for what is still to be drawn from a generator of the caller's."""

    __slots__ = ("generator", "kind")  # not attributes, which would travel

    kind: Kind
    generator: Any


class Stream:
    """A generator that a function holds in a worker."""

    def __init__(self, kind: Kind, generator: Any, root: torch.Tensor) -> None:
        self._begin = kind.begin
        self._generator = generator
        self._drawn = root

    @functools.cached_property
    def _root(self) -> Any:
        with outside_transforms():
            return pickle.loads(bytes(self._drawn.tolist()))

    def begin(self, item: int) -> None:
        """Whatever it drew before, it goes on as the item's."""
        self._begin(self._generator, self._root, item)


class Streams(list[Stream]):
    """Those of a function, which come into being as it is loaded: in a pickle, an empty one stands for these."""

    def begin(self, item: int) -> None:
        # what was made last may be held by what was made before, and be drawn from as that begins
        for each in reversed(self):
            each.begin(item)


def reduce_generator(value: Any, travel: Travel) -> Any:
    """How a generator travels; None where as pickle has it, and for anything else."""
    if not is_generator(value):
        return None
    kind = kind_of(value)
    if kind is not None:
        reduced = travel(kind, value)
        return kind.whole(value) if reduced is NotImplemented else reduced
    if (own := named(value)) is not None:
        return attribute_here, own
    if isinstance(value, random.SystemRandom):
        return type(value), ()  # it has no state
    if (bits := bits_of(value)) is None:
        return None
    return generator_again, (type(value), bits), getattr(value, "__dict__", None), None, None, set_attributes


def generator_again(kind: Any, bits: Any) -> Any:
    """One of numpy's, around what may be others' too."""
    made = kind.__new__(kind)
    sys.modules["numpy.random"].Generator.__init__(made, bits)
    return made


def set_attributes(made: Any, attributes: Any) -> None:
    """Set an object's attributes in Python. (`__setstate__` of numpy's takes a dictionary for the state of the bits.)"""
    vars(made).update(attributes)


def as_it_is(kind: Kind, generator: Any) -> Any:
    return NotImplemented


# --- captured by a function


def captured(kind: Kind, generator: Any) -> Any:
    """[1]"""
    with outside_transforms():
        root = torch.empty(0, dtype=torch.uint8).as_subclass(Root)
    root.kind, root.generator = kind, generator
    make, arguments, *state = kind.blank(generator)
    return kept, (Streams(), root, make, arguments), *state


def drawn(captures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[2] The captures with what the caller's generators give: no other operation gets the same."""
    return [plain(each.kind.root(each.generator)) if type(each) is Root else each for each in captures]


def plain(root: Any) -> torch.Tensor:
    with outside_transforms():
        return torch.tensor(list(pickle.dumps(root)), dtype=torch.uint8)


def kept(streams: Streams, root: torch.Tensor, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """[3]"""
    made = make(*arguments)
    kind = kind_of_class(type(made))
    assert kind is not None
    streams.append(Stream(kind, made, root))
    return made


# --- held by items


SHARED: collections.deque[Any] = collections.deque(maxlen=64)  # generators; numpy's have no weak references


Roots = dict[int, tuple[Any, Any]]  # generator and root, by the generator's id


class Met(NamedTuple):
    """A generator that an item had."""

    generator: Any  # held, so that no other one gets its id
    first: int
    is_shared: bool


class ItemStreams:
    """How the generators travel that the items of one operation hold. An item may be packed more than once."""

    def __init__(self, items: Iterable[Any] | None, captures: Sequence[torch.Tensor] = ()) -> None:
        """`items`: where they are all there. `captures`: of the function, before they are `drawn`."""
        self._items = items
        self._captured = [each.generator for each in captures if type(each) is Root]
        self._first = 0  # the number of the operation's first item
        self._met: dict[int, Met] = {}
        self._roots: Roots = {}
        self._roots_of_code: Roots = {}

    def onwards(self, first: int) -> ItemStreams:
        """For items that come later, in an operation of their own: these are numbered from `first` on."""
        later = ItemStreams(self._items)
        later._first, later._met, later._roots = first, self._met, self._roots
        return later

    def of(self, item: int) -> Travel:
        return functools.partial(self._reduce, self._first + item)

    def _reduce(self, item: int, kind: Kind, generator: Any) -> Any:
        met = self._met.get(id(generator))
        if met is None:
            met = self._met[id(generator)] = Met(generator, item, self._is_shared(generator))
        if item == met.first and not met.is_shared:
            return NotImplemented
        root = root_of(kind, generator, self._roots)
        with outside_transforms():
            own = kind.own(generator)
            kind.begin(own, root, item)
        self._met[id(own)] = Met(own, item, is_shared=False)
        return itself, (own,)

    def drawn(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of an item; generators that code captures which it brings, in a module of the user's, are everybody's."""
        roots = self._roots_of_code
        return [plain(root_of(each.kind, each.generator, roots)) if type(each) is Root else each for each in tensors]

    def _is_shared(self, generator: Any) -> bool:
        """Whether the function has it, or several items."""
        if any(each is generator for each in self._captured):
            return True
        if self._items is None:
            return any(each is generator for each in tuple(SHARED))
        return self._census.is_in_several(generator)

    @functools.cached_property
    def _census(self) -> Census:
        assert self._items is not None
        return Census(self._items)


def root_of(kind: Kind, generator: Any, roots: Roots) -> Any:
    """The generator's among these; drawn, if it has none there."""
    if id(generator) not in roots:
        with outside_transforms():
            roots[id(generator)] = generator, kind.root(generator)
        SHARED.append(generator)
    return roots[id(generator)][1]


class Census:
    """Which items have which generators."""

    def __init__(self, items: Iterable[Any]) -> None:
        from mpgrad.pickling.structure import Trial  # late: it imports us

        self._found: dict[int, tuple[Any, set[int]]] = {}  # held, so that no other one gets its id
        for number, item in enumerate(items):
            try:
                Trial(io.BytesIO(), claims=[], travel=functools.partial(self._note, number)).dump(item)
            except Exception:  # whoever packs the item will find it again, and name the item
                continue

    def _note(self, item: int, kind: Kind, generator: Any) -> Any:
        self._found.setdefault(id(generator), (generator, set()))[1].add(item)
        return NotImplemented

    def is_in_several(self, generator: Any) -> bool:
        return len(self._found.get(id(generator), (None, ()))[1]) > 1
