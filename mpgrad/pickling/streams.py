"""Random number generators that a function captures are sent to workers.

`ItemStreams` does this for the generators that items hold.

    [1] `captured`: a `Root` takes the place of the generator's state
        ─► [2] `drawn`: for one operation, it becomes a capture like others
        ─► [3] `kept`: in a worker, it becomes a `Stream`, which begins anew before each item
A root is a tensor. So the pickle of a function stays the same, and its cost stays known, while its
generators move on.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpgrad.pickling.modules import attribute_here
from mpgrad.torch_state.generators import Kind, bits_of, is_generator, kind_of, kind_of_class, named
from mpgrad.torch_state.private import outside_transforms

__all__ = [
    "Root",
    "Streams",
    "Travel",
    "as_it_is",
    "captured",
    "drawn",
    "plain",
    "reduce_generator",
    "set_attributes",
]

Travel = Callable[[Kind, Any], Any]  # reduces a generator; NotImplemented: with its state


class Root(torch.Tensor):
    """[1] Represents, among a function's captures, the numbers still to be drawn from a generator.

    The generator is the caller's.
    """

    __slots__ = ("generator", "kind")  # attributes would be pickled

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
        """Start the item's numbers, whatever the generator drew before."""
        self._begin(self._generator, self._root, item)


class Streams(list[Stream]):
    """The streams of a function, which are made while the function is loaded.

    In a pickle, an empty object represents them.
    """

    def begin(self, item: int) -> None:
        # An object that was made later may be held by an earlier one. The earlier one may draw from
        # it as it begins.
        for each in reversed(self):
            each.begin(item)


def reduce_generator(value: Any, travel: Travel) -> Any:
    """Reduce a generator; None if pickle's own way is right, and for any other object."""
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
    return (
        generator_again,
        (type(value), bits),
        getattr(value, "__dict__", None),
        None,
        None,
        set_attributes,
    )


def generator_again(kind: Any, bits: Any) -> Any:
    """Rebuild a generator of numpy's around `bits`, which other generators may share."""
    made = kind.__new__(kind)
    sys.modules["numpy.random"].Generator.__init__(made, bits)
    return made


def set_attributes(made: Any, attributes: Any) -> None:
    """Set an object's Python attributes.

    `__setstate__` of numpy's generators would take a dictionary for the state of the bits.
    """
    own = vars(made)
    for name, value in attributes.items():
        own[sys.intern(name) if type(name) is str else name] = value  # pickle interns them too


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
    """[2] Return the captures, with roots replaced with what the caller's generators give.

    No other operation gets the same numbers.
    """
    return [
        plain(each.kind.root(each.generator)) if type(each) is Root else each for each in captures
    ]


def plain(root: Any) -> torch.Tensor:
    with outside_transforms():
        return torch.tensor(list(pickle.dumps(root)), dtype=torch.uint8)


def kept(
    streams: Streams, root: torch.Tensor, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """[3]"""
    made = make(*arguments)
    kind = kind_of_class(type(made))
    assert kind is not None
    streams.append(Stream(kind, made, root))
    return made
