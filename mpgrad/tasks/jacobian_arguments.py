"""The arguments of a derivative: of each item its own, what all items share, and which of them are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Argnums = int | tuple[int, ...] | None


class Arguments:
    """Arguments of all items: a list has one entry for each item, anything else they share. Some are differentiated.

    `vectors` are those that a product is taken with; they have lists of their own.
    """

    def __init__(self, args: tuple[Any, ...], argnums: Argnums, vectors: tuple[Any, ...] = ()) -> None:
        every = (*args, *vectors)
        lengths = {len(each) for each in every if isinstance(each, list)}
        if len(lengths) > 1:
            raise ValueError(
                f"lists must have one entry for each item, all the same number (lengths: {sorted(lengths)}); "
                "pass what all items share as it is"
            )
        self.common = [None if isinstance(each, list) else each for each in every]
        self.own = {number: each for number, each in enumerate(every) if isinstance(each, list)}
        self.in_items = bool(lengths)
        self.items = lengths.pop() if lengths else 1
        self.count = len(args)
        self.wanted = numbers_of(argnums, len(args))
        self.alone = isinstance(argnums, int) or (argnums is None and len(args) == 1)  # no tuple over the arguments
        for number in self.wanted:
            for tensor in self.own.get(number, [args[number]]):
                check_real(tensor, f"argument {number}", "leave it out of argnums")

    def of(self, item: int) -> list[Any]:
        """What the item does not share, in order."""
        return [each[item] for each in self.own.values()]

    def inputs(self, item: int) -> list[Tensor]:
        every = filled(self.common, list(self.own), self.of(item))
        return [every[number] for number in self.wanted]

    def vectors(self, item: int) -> list[Any]:
        return filled(self.common, list(self.own), self.of(item))[self.count :]

    def sizes(self) -> list[int]:
        """The number of elements that each item has for itself."""
        return [sum(each.numel() for each in self.of(item) if isinstance(each, Tensor)) for item in range(self.items)]


def numbers_of(argnums: Argnums, count: int) -> tuple[int, ...]:
    """Of the arguments that are differentiated, from 0."""
    if argnums is None:
        argnums = tuple(range(count))
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise TypeError(f"argnums must be an integer, a tuple of integers, or None (argnums: {argnums!r})")
    if not numbers or not all(-count <= number < count for number in numbers):
        raise ValueError(f"argnums must name some of the {count} arguments, from 0 (argnums: {argnums!r})")
    numbers = tuple(number % count for number in numbers)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums must name each argument once (argnums: {argnums!r})")
    return numbers


def check_real(tensor: object, name: str, remedy: str) -> None:
    """Raise a TypeError where it has no derivative; `name` and `remedy` are for the message."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a floating point tensor (given: {type(tensor).__name__}); {remedy}")
    if tensor.is_complex():
        raise TypeError(f"{name} must be real (dtype: {tensor.dtype}); differentiate by way of torch.view_as_real")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point to have a derivative (dtype: {tensor.dtype}); {remedy}")


def filled(common: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """`common` with `values` in some places."""
    whole = list(common)
    for number, value in zip(numbers, values, strict=True):
        whole[number] = value
    return whole
