"""Whether what was pickled is still what it was, in microseconds: nobody tells of writes into modules, classes and lists.

While a pickle is made, each object in it that may be written to is noted here, with the objects that it then held; it is
unchanged as long as it holds the same ones. What does not show what it holds (numpy arrays, objects of other libraries)
is pickled again and compared. Of tensors only attributes are: their values travel with each operation, whatever they are.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["ABSENT", "Watch"]

ABSENT = object()
MOST_OBJECTS = 1000  # of one large value that are looked at before each operation
OF_A_FUNCTION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")
ATTRIBUTES = operator.attrgetter("__dict__")

Content = Sequence[Any]
Opaque = tuple[bytes, Sequence[Any], Sequence[tuple[int, int]]]  # kept alive, so that no other object gets its address


class Watch:
    """What was met while a pickle was made, with what it held: whether that is still so."""

    def __init__(self) -> None:
        self._functions: list[types.FunctionType] = []
        self._code: list[Any] = []
        self._bare: list[types.FunctionType | torch.Tensor] = []  # without attributes of their own
        self._names: list[tuple[dict[str, Any], list[str], list[Any]]] = []
        self._rest: list[tuple[Callable[[Any], Content], Any, Content]] = []
        self._opaque: list[tuple[Callable[[Any], Opaque], Any, Opaque]] = []

    def is_unchanged(self) -> bool:
        """Whether each object that was noted holds what it held then."""
        if not all(map(operator.is_, self._code, [part for each in self._functions for part in OF_A_FUNCTION(each)])):
            return False
        if any(map(ATTRIBUTES, self._bare)):
            return False
        for contents, names, values in self._names:
            if not all(map(operator.is_, [contents.get(name, ABSENT) for name in names], values)):
                return False
        for held_by, value, before in self._rest:
            now = held_by(value)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return all(is_same(pickled(value), before) for pickled, value, before in self._opaque)

    def names(self, contents: dict[str, Any], names: list[str]) -> None:
        """Of a module."""
        self._names.append((contents, names, [contents.get(name, ABSENT) for name in names]))

    def function(self, value: types.FunctionType) -> None:
        self._functions.append(value)
        self._code.extend(OF_A_FUNCTION(value))
        self.attributes(value)

    def attributes(self, value: types.FunctionType | torch.Tensor) -> None:
        if vars(value):
            self.content(attributes_of, value)
        else:
            self._bare.append(value)

    def content(self, held_by: Callable[[Any], Content], value: Any) -> None:
        self._rest.append((held_by, value, held_by(value)))

    def opaque(self, pickled: Callable[[Any], Opaque], value: Any, now: Opaque) -> None:
        self._opaque.append((pickled, value, now))

    def mark(self) -> tuple[int, int]:
        return len(self._rest), len(self._opaque)

    def forget_since(self, mark: tuple[int, int]) -> None:
        """Containers, and where there are very many, objects; but neither classes, functions nor modules."""
        later = self._rest[mark[0] :]
        kept = [each for each in later if each[0] is not pairs_of and each[0] is not items_of]
        if len(kept) > MOST_OBJECTS:
            kept = [each for each in kept if isinstance(each[1], type)]
        self._rest[mark[0] :] = kept
        del self._opaque[mark[1] :]


def is_same(now: Opaque, before: Opaque) -> bool:
    """Whether two pickles of one object say the same."""
    count = len(now[1]) - len(now[2])  # the rest are views of buffers, made for the pickle
    tensors = len(now[1]) == len(before[1]) and all(map(operator.is_, now[1][:count], before[1][:count]))
    return tensors and now[0] == before[0] and now[2] == before[2]


# --- what objects hold


def items_of(value: Any) -> Content:
    return tuple(value)


def pairs_of(value: dict[Any, Any]) -> Content:
    return (*value, *value.values())


def attributes_of(value: Any) -> Content:
    return pairs_of(value.__dict__)


def contents_of_class(value: type) -> Content:
    """Its bases, and what stands in its body."""
    return (*value.__bases__, *[part for name, part in vars(value).items() if name not in MADE_BY_PYTHON])


def contents_of_cell(value: types.CellType) -> Content:
    try:
        return (value.cell_contents,)
    except ValueError:
        return ()


MADE_BY_PYTHON = {"__slotnames__", "_abc_impl", "__weakref__", "__dict__"}  # as it goes along
