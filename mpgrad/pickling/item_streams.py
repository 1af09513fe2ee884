"""Generators of random numbers that items hold: as they are; but one that several items have gives each a stream of its own.

Where the items are not all there yet (an iterator's), the first one that has a generator gets it as it is, the others a stream
each; from then on it is known that several items have it. Caller only.
"""

from __future__ import annotations

import collections
import functools
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.pickling.reducers import itself
from mpgrad.pickling.streams import Root, Travel, plain
from mpgrad.pickling.structure import CallerPickler, Deferred
from mpgrad.torch_state.generators import Kind
from mpgrad.torch_state.private import outside_transforms

__all__ = ["ItemStreams"]

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
        self._found: dict[int, tuple[Any, set[int]]] = {}  # held, so that no other one gets its id
        for number, item in enumerate(items):
            try:
                Counting(io.BytesIO(), claims=[], travel=functools.partial(self._note, number)).dump(item)
            except Exception:  # whoever packs the item will find it again, and name the item
                continue

    def _note(self, item: int, kind: Kind, generator: Any) -> Any:
        self._found.setdefault(id(generator), (generator, set()))[1].add(item)
        return NotImplemented

    def is_in_several(self, generator: Any) -> bool:
        return len(self._found.get(id(generator), (None, ()))[1]) > 1


class Counting(CallerPickler):
    """Claims no futures, and takes nothing out."""

    def persistent_id(self, value: Any) -> Any:
        return 0 if isinstance(value, torch.Tensor | Deferred) else super().persistent_id(value)
