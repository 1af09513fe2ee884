"""Generators of random numbers that a function captures, on their way. (Those of items:
`ItemStreams`.)

    [1] `captured`: a `Root` in the place of its state
        ─► [2] `drawn`, for one operation, a capture like others
        ─► [3] `kept`, in a worker: a `Stream`, which begins anew before each item
A root is a tensor, so that the pickle of a function stays the same, and its cost known, while its
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

Travel = Callable[[Kind, Any], Any]  # how a generator is reduced; NotImplemented: as it is


class Root(torch.Tensor):
    """[1] Stands among a function's captures for what is still to be drawn from a generator of the
    caller's."""

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
    """Those of a function, which come into being as it is loaded: in a pickle, an empty one stands
    for these."""

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
    return (
        generator_again,
        (type(value), bits),
        getattr(value, "__dict__", None),
        None,
        None,
        set_attributes,
    )


def generator_again(kind: Any, bits: Any) -> Any:
    """One of numpy's, around what may be others' too."""
    made = kind.__new__(kind)
    sys.modules["numpy.random"].Generator.__init__(made, bits)
    return made


def set_attributes(made: Any, attributes: Any) -> None:
    """Set an object's attributes in Python. (`__setstate__` of numpy's takes a dictionary for the
    state of the bits.)"""
    own = vars(made)
    for name, value in attributes.items():
        own[sys.intern(name) if type(name) is str else name] = value  # as pickle does


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
