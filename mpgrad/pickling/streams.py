"""Random number generators that a function captures are sent to workers.

`ItemStreams` does this for the generators in items.

    [1] `captured`: a `Root` replaces the generator's state
        ─► [2] `drawn`: for one operation, the root becomes an ordinary capture
        ─► [3] `kept`: in a worker, it becomes a `Stream`, which restarts before each item
A root is a tensor. So the pickle of a function stays the same, and its cost stays known, while its
generators advance.
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

Travel = Callable[[Kind, Any], Any]  # reduces a generator; NotImplemented means with its state


class Root(torch.Tensor):
    """[1] Represents a generator of the caller's among a function's captures, before its numbers
    are drawn."""

    __slots__ = ("generator", "kind")  # attributes would be pickled

    kind: Kind
    generator: Any


class Stream:
    """A generator that a function has captured, in a worker."""

    def __init__(self, kind: Kind, generator: Any, root: torch.Tensor) -> None:
        self._begin = kind.begin
        self._generator = generator
        self._drawn = root

    @functools.cached_property
    def _root(self) -> Any:
        with outside_transforms():
            return pickle.loads(bytes(self._drawn.tolist()))

    def begin(self, item: int) -> None:
        """Start the item's numbers, regardless of earlier draws."""
        self._begin(self._generator, self._root, item)


class Streams(list[Stream]):
    """The streams of a function, which are made while the function is loaded.

    In a pickle, an empty object represents them.
    """

    def begin(self, item: int) -> None:
        # An earlier generator may refer to a later one, and draw from it when it begins.
        for each in reversed(self):
            each.begin(item)


def reduce_generator(value: Any, travel: Travel) -> Any:
    """Reduce a generator. Return None if pickle handles it correctly, and for other objects."""
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
    """Rebuild a numpy generator around `bits`, which other generators may share."""
    made = kind.__new__(kind)
    sys.modules["numpy.random"].Generator.__init__(made, bits)
    return made


def set_attributes(made: Any, attributes: Any) -> None:
    """Set an object's Python attributes.

    `__setstate__` of numpy's generators would read a dictionary as the state of the bits.
    """
    own = vars(made)
    for name, value in attributes.items():
        own[sys.intern(name) if type(name) is str else name] = value  # as pickle does


def as_it_is(kind: Kind, generator: Any) -> Any:
    return NotImplemented


# --- captured by a function


def captured(kind: Kind, generator: Any) -> Any:
    """[1] Reduce a captured generator with a root instead of its state."""
    with outside_transforms():
        root = torch.empty(0, dtype=torch.uint8).as_subclass(Root)
    root.kind, root.generator = kind, generator
    make, arguments, *state = kind.blank(generator)
    return kept, (Streams(), root, make, arguments), *state


def drawn(captures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[2] Return the captures, with each root replaced with numbers drawn from its generator.

    Each operation gets different numbers.
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
    """[3] Rebuild a captured generator, and add its stream."""
    made = make(*arguments)
    kind = kind_of_class(type(made))
    assert kind is not None
    streams.append(Stream(kind, made, root))
    return made
