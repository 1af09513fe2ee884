"""Functions with a cache, in another process: what they keep is there too, where it holds tensors.

A cached function is how scripts make a model once (`@functools.cache def model(): ...`). With an empty cache each worker would
make another one, with values of its own and gradients for nobody. So what a cache has of tensors, modules and generators of
random numbers travels with the function, and its tensors are captures. The rest does not: it may be long, and each process can
compute it. And a helper that prepares the process, once, has to run in a worker too.

`functools` shows what is in a cache to nobody but the collector of cycles; and there is no way in but to call the function.

Guarantees: what was in the cache when the operation began is found there by every call of it.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mpgrad.torch_state.generators import is_generator, learn

__all__ = ["entries_with_tensors", "identities", "reduce_by_value"]

MOST_LOOKED_AT = 10_000  # objects of one cache: a millisecond
NO_TENSORS = {type(None), bool, int, float, complex, str, bytes, types.CodeType}
ABSENT = object()


class Entry(NamedTuple):
    """Of a cache of `functools`."""

    key: Any
    result: Any


def entries(cached: Any) -> list[Entry]:
    """What is in the cache; what was used last comes last, where the cache is bounded."""
    inside = gc.get_referents(cached)  # all at once, whatever other threads do
    if cached.cache_parameters()["maxsize"] is None:
        cache = next(each for each in inside if type(each) is dict)  # the other one has the attributes
        return [Entry(*pair) for pair in list(cache.items())]
    found = []  # its type, then a key, its result and the type of the link between the two for each
    for place in range(1, len(inside), 3):
        if inside[place + 2] is not LINK:
            break
        found.append(Entry(*inside[place : place + 2]))
    return found


def marks() -> tuple[Any, Any]:
    """What stands in a key between arguments and keywords; and the type of the links in a bounded cache."""
    cached = functools.lru_cache(maxsize=1)(lambda **names: None)
    cached(name=None)
    _, key, _, link, *_ = gc.get_referents(cached)
    return key[0], link


KEYWORDS, LINK = marks()


def arguments(key: Any, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of the call."""
    if type(key) is not tuple:
        return (key,), {}
    count = next((place for place, each in enumerate(key) if each is KEYWORDS), None)
    if count is None:
        return key[: len(key) // 2] if typed else key, {}
    rest = key[count + 1 :]  # names and values by turns, then the types of all
    named = rest[: (len(rest) - count) // 3 * 2] if typed else rest
    return key[:count], dict(zip(named[::2], named[1::2], strict=True))


def entries_with_tensors(cached: Any) -> list[Entry]:
    learn()
    looked_at = iter(range(MOST_LOOKED_AT))
    return [each for each in entries(cached) if type(each.result) not in NO_TENSORS and holds_tensors(each.result, looked_at)]


def holds_tensors(value: Any, looked_at: Iterator[int]) -> bool:
    """Whether a tensor, module or generator of random numbers is in `value`, as far as it is looked at; near ones first."""
    waiting, seen = [value], {id(value)}
    for each in waiting:
        if next(looked_at, None) is None:
            return False
        kind = type(each)  # no isinstance: a weak proxy would answer for what it stands for
        if issubclass(kind, torch.Tensor | torch.nn.Module) or is_generator(each):
            return True
        if kind is types.FunctionType:
            inside: list[Any] = [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
        else:
            inside = gc.get_referents(each)
        for part in inside:
            if type(part) not in NO_TENSORS and not isinstance(part, type | types.ModuleType) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return False


def identities(cached: Any) -> list[Any]:
    """What tells that a worker would get something else than before."""
    own = attributes(cached)
    return [*own, *own.values(), *(part for each in entries_with_tensors(cached) for part in each)]


def attributes(cached: Any) -> dict[str, Any]:
    """Those that it was given, beside what it has from the function and `functools`."""
    function = cached.__wrapped__
    copied = getattr(function, "__dict__", {})
    own = {name: each for name, each in vars(cached).items() if name not in ("__wrapped__", "cache_parameters")}
    return {
        name: each
        for name, each in own.items()
        if each is not copied.get(name, ABSENT) and each is not getattr(function, name, ABSENT)
    }


# --- there and back


def reduce_by_value(cached: Any) -> tuple[Any, ...]:
    parameters = cached.cache_parameters()
    kept = [(*arguments(key, parameters["typed"]), result) for key, result in entries_with_tensors(cached)]
    return cached_again, (cached.__wrapped__, parameters), (attributes(cached), kept), None, None, fill


class StandIn(functools.partial[Any]):
    """What a cached function calls: first to be given what is known already, then the function, with no frame in between."""

    def turn_to(self, function: Any, *first: Any) -> None:
        set_state: Any = super().__setstate__  # type: ignore[misc]  # typeshed leaves it out
        set_state((function, first, {}, None))


def cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    made = functools.lru_cache(**parameters)(StandIn(function))
    return functools.update_wrapper(made, function)


def fill(cached: Any, state: tuple[dict[str, Any], list[tuple[tuple[Any, ...], dict[str, Any], Any]]]) -> None:
    """Put the entries in by calling it with a function that gives their results."""
    own, kept = state
    vars(cached).update(own)
    stand_in = next(each for each in gc.get_referents(cached) if type(each) is StandIn)
    for args, kwargs, result in kept:
        stand_in.turn_to(given, result)
        cached(*args, **kwargs)
    stand_in.turn_to(cached.__wrapped__)


def given(result: Any, *args: Any, **kwargs: Any) -> Any:
    return result
