"""What a function is to be called with. Caller only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.calls.packing import Arguments
from mpgrad.errors import ONE_CALL
from mpgrad.pickling.item_streams import ItemStreams

__all__ = ["Source", "callable_of", "first_of", "iterator"]

FIRST_LOOKED_AT = 4  # calls, for the classes of the user's modules that they bring
ITERATORS: tuple[type, ...] = type(iter([])), type(iter(())), type(iter(range(0)))
AT_REST = list, tuple, range, dict, set, frozenset, torch.Tensor, *ITERATORS


class Source(NamedTuple):
    """The calls of an operation, as the user gave them; taken from once."""

    calls: Iterable[Arguments]
    total: int | None  # how many, where that is known beforehand
    at_rest: bool  # they are all there: no code of the caller's runs between two of them
    noun: str = "item"  # see `CallNames`
    items: Iterable[Any] | ItemStreams | None = None  # what each call is given, where it can be looked at beforehand

    @classmethod
    def of_items(cls, items: Iterable[Any]) -> Source:
        """Each item is the argument of a call."""
        each = iterator("the items", items)
        return cls((((item,), {}) for item in each), length(items), is_at_rest(items), items=seen_again(items))

    @classmethod
    def of_arguments(cls, arguments: Iterable[Iterable[Any]]) -> Source:
        """Each element has the arguments of a call."""
        each = iterator("the items", arguments)
        calls: Iterable[Arguments] = ((arguments_of(item), {}) for item in each)
        return cls(calls, length(arguments), is_at_rest(arguments), items=seen_again(arguments))

    @classmethod
    def of_one(cls, args: Iterable[Any], kwds: Mapping[str, Any] | None) -> Source:
        """The arguments of the only call."""
        if kwds is not None and not isinstance(kwds, dict):
            if not isinstance(kwds, Mapping):
                raise TypeError(f"kwds must be a mapping (kwds: {kwds!r})")
            kwds = dict(kwds)
        call = args if type(args) is tuple else tuple(iterator("args", args))
        return cls([(call, kwds or {})], 1, at_rest=True, noun=ONE_CALL, items=())


def iterator(what: str, given: Iterable[Any]) -> Iterator[Any]:
    """Raises TypeError where there is none; of the mistake that swapped arguments are, says what is meant."""
    try:
        return iter(given)
    except TypeError as error:
        order = f"; the function comes first, then {what}" if callable(given) else ""
        raise TypeError(f"{what} must be an iterable{order} (given: {given!r})") from error


def arguments_of(item: Iterable[Any]) -> tuple[Any, ...]:
    return item if type(item) is tuple else tuple(iterator("an item, as the arguments of a call,", item))


def is_at_rest(iterable: Iterable[Any]) -> bool:
    """Whether all items are there. Code of the caller that makes them one by one may write to one that it gave."""
    return type(iterable) in AT_REST


def seen_again(items: Iterable[Any]) -> Iterable[Any] | None:
    """The items, if they can be gone through now and once more later."""
    return items if is_at_rest(items) and not isinstance(items, Iterator) else None


def length(iterable: Iterable[Any]) -> int | None:
    """None where it cannot be known without taking the items."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def first_of(source: Source) -> tuple[Sequence[Arguments], Iterable[Arguments]]:
    """What the first few calls are given, if there is anything but tensors; and all calls. Only of those that are at rest."""
    if not source.at_rest:
        return (), source.calls
    calls = iter(source.calls)
    head = list(itertools.islice(calls, FIRST_LOOKED_AT))
    others = [call for call in head if call[1] or not all(isinstance(value, torch.Tensor) for value in call[0])]
    return others, itertools.chain(head, calls)


def callable_of(function: object) -> Callable[..., Any]:
    """`function` itself, or the `apply` of an `autograd.Function`; a context of PyTorch's own serves it in the worker."""
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        apply: Callable[..., Any] = function.apply
        return apply
    if not callable(function):
        raise TypeError(f"the function must be callable (given: {function!r})")
    return function
