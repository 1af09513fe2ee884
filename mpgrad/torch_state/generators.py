"""Random number generators that a function captures, or that items share, give each item a stream.

In a loop such a generator goes on from item to item. Copies of it in workers would all give the
same numbers, and the results would depend on the number of workers. So the caller's generator gives
one *root* for each operation, by numpy's `spawn` or by one draw. An item's numbers depend only on
the root and the item's position. This module describes each kind of generator by a few functions.
`mpgrad.pickling.streams` sends generators, and workers call `begin` before each item.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.quasirandom import SobolEngine

from mpgrad.torch_state.modes import split_mix

__all__ = [
    "Kind",
    "bits_of",
    "is_generator",
    "is_generator_class",
    "kind_of",
    "kind_of_class",
    "learn",
    "named",
]

MOST_SEED = (1 << 62) - 1


class Kind(NamedTuple):
    """The functions that handle one class of generators, and its subclasses."""

    # Advances the caller's generator. Returns plain values, which differ from call to call.
    root: Callable[[Any], Any]
    # Called with (generator, root, item). Sets the generator in place, whatever it drew before.
    begin: Callable[[Any, Any, int], None]
    # Defines how pickle rebuilds one, whatever its state is, so that equal functions have equal
    # pickles.
    blank: Callable[[Any], tuple[Any, ...]]
    # Returns a generator that is not shared, so that `begin` may be called with it.
    own: Callable[[Any], Any] = copy.deepcopy
    # Defines how pickle saves one with its state. None leaves it to pickle.
    whole: Callable[[Any], tuple[Any, ...] | None] = lambda generator: None


def is_generator(value: object) -> bool:
    """Return whether the value is a known generator. Call `learn` before."""
    return is_generator_class(type(value))


def is_generator_class(kind: type) -> bool:
    return not CLASSES.isdisjoint(kind.__mro__)


def kind_of(generator: object) -> Kind | None:
    """Return the kind of a generator.

    It is None for an object that only leads to a generator (`bits_of`), is the same in each process
    (`named`), or has no state.
    """
    if named(generator) is not None or isinstance(generator, random.SystemRandom):
        return None
    kind = kind_of_class(type(generator))
    # An engine that scrambles nothing beforehand draws from its numpy generator, which is handled
    # by itself.
    if kind is not None and kind.begin is begin_engine and not hasattr(generator, "_init_quad"):
        return None
    return kind


def kind_of_class(own: type) -> Kind | None:
    """Return the kind of the class, whatever state its objects are in."""
    learn()
    return next((KINDS[each] for each in own.__mro__ if each in KINDS), None)


def named(generator: object) -> tuple[str, str] | None:
    """Return module and name of a generator that each process has once; None for others.

    Such a generator gets the item's seed.
    """
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None and generator is numpy._rand:
        return "numpy.random.mtrand", "_rand"
    if generator is random._inst:
        return "random", "_inst"
    return ("torch", "default_generator") if generator is torch.default_generator else None


def bits_of(generator: Any) -> Any:
    """Return the bit generator of a `numpy.random.Generator`, which has no state of its own."""
    return getattr(generator, "bit_generator", None)


# --- one number for a whole operation


def seed_of(root: int, item: int) -> int:
    return split_mix(root + item) & MOST_SEED


def begin_python(generator: random.Random, root: int, item: int) -> None:
    generator.seed(seed_of(root, item))


def blank_python(generator: random.Random) -> tuple[Any, ...]:
    return parts_python(generator, None) or tuple(as_pickle_does(generator))


def whole_python(generator: random.Random) -> tuple[Any, ...] | None:
    return parts_python(generator, generator.getstate())


def parts_python(generator: random.Random, state: Any) -> tuple[Any, ...] | None:
    """Return the state with the attributes that a subclass adds, which pickle would drop.

    It is None if the class has its own way of pickling.
    """
    kind = type(generator)
    if (
        kind.__reduce__ is not random.Random.__reduce__
        or kind.__reduce_ex__ is not object.__reduce_ex__
    ):
        return None
    attributes = {name: value for name, value in vars(generator).items() if name != "gauss_next"}
    return new_python, (kind,), (attributes, state), None, None, set_python


def new_python(kind: type[random.Random]) -> random.Random:
    """Make a generator without the arguments that its `__init__` may need."""
    made: Any = kind.__new__(kind)
    made.gauss_next = None
    return cast(random.Random, made)


def set_python(made: random.Random, parts: tuple[Mapping[str, Any], Any]) -> None:
    attributes, state = parts
    vars(made).update(attributes)
    if state is not None:
        made.setstate(state)


def own_python(generator: random.Random) -> random.Random:
    if (parts := whole_python(generator)) is None:
        return copy.deepcopy(generator)
    make, arguments, state, *_ = parts
    made: random.Random = make(*arguments)
    set_python(made, state)
    return made


def begin_torch(generator: torch.Generator, root: int, item: int) -> None:
    generator.manual_seed(seed_of(root, item))


def torch_root(generator: torch.Generator) -> int:
    return int(
        torch.randint(
            0, MOST_SEED, (), generator=generator, dtype=torch.int64, device=generator.device
        )
    )


def sobol_root(engine: SobolEngine) -> int:
    """Draw a point. An engine that scrambles nothing has only a few different coordinates in it."""
    point = engine.num_generated, engine.seed, engine.draw(1, dtype=torch.float64).tolist()
    return int.from_bytes(hashlib.blake2b(repr(point).encode(), digest_size=7).digest(), "little")


def begin_sobol(engine: SobolEngine, root: int, item: int) -> None:
    """Begin a scrambled sequence, a different one for each item.

    The position at which one sequence would go on depends on the items before.
    """
    SobolEngine.__init__(engine, engine.dimension, scramble=True, seed=seed_of(root, item))  # type: ignore[no-untyped-call]


# --- numpy's generators; numpy is optional, and none exist before it is imported


class SpawnRoot(NamedTuple):
    """A SeedSequence as plain values."""

    entropy: Any
    key: tuple[int, ...]
    size: int


def bits_root(bits: Any) -> SpawnRoot:
    """Return a child of its seed sequence or, if that cannot spawn, one draw."""
    seeds = bits._seed_seq  # `seed_seq` since numpy 1.25
    if not isinstance(seeds, numpy_random().SeedSequence):
        return SpawnRoot(int(bits.random_raw()), (), 4)
    return seeds_root(seeds)


def seeds_root(seeds: Any) -> SpawnRoot:
    child = seeds.spawn(1)[0]
    return SpawnRoot(child.entropy, tuple(child.spawn_key), child.pool_size)


def begin_seeds(seeds: Any, root: SpawnRoot, item: int) -> None:
    seeds.children = seeds_of(root, item)


def blank_seeds(seeds: Any) -> tuple[Any, ...]:
    return seeds_again, (seeds.entropy, seeds.spawn_key, seeds.pool_size)


def own_seeds(seeds: Any) -> Any:
    return seeds_again(seeds.entropy, seeds.spawn_key, seeds.pool_size)


def seeds_again(entropy: Any, key: tuple[int, ...], size: int) -> Any:
    """Rebuild a SeedSequence of a class that needs numpy."""
    kind = importlib.import_module("mpgrad.torch_state.seed_sequences").ItemSeeds
    return kind(entropy, spawn_key=key, pool_size=size)


def seeds_of(root: SpawnRoot, item: int) -> Any:
    """Return the same as `root.spawn(n)[item]`, for any n."""
    return numpy_random().SeedSequence(
        root.entropy, spawn_key=(*root.key, item), pool_size=root.size
    )


def begin_bits(bits: Any, root: SpawnRoot, item: int) -> None:
    # Generators that hold it see the change, and spawn from there.
    bits.__init__(seeds_of(root, item))


def state_root(state: Any) -> SpawnRoot:
    return SpawnRoot(int.from_bytes(state.bytes(8), "little"), (), 4)


def begin_state(state: Any, root: SpawnRoot, item: int) -> None:
    type(state).__init__(state, type(state._bit_generator)(seeds_of(root, item)))


def numpy_random() -> Any:
    return sys.modules["numpy.random"]


def blank_state(state: Any) -> tuple[Any, ...]:
    return state_again, (type(state), type(state._bit_generator))


def state_again(kind: type[Any], bits: type[Any]) -> Any:
    return kind(bits(0))


# --- scipy's engines, which may be scrambled once for all by their numpy generator


def engine_root(engine: Any) -> SpawnRoot:
    bits = bits_of(engine.rng)
    return state_root(engine.rng) if bits is None else bits_root(bits)


def begin_engine(engine: Any, root: SpawnRoot, item: int) -> None:
    # `qmc_quad` makes further engines in the same way.
    engine.__init__(**engine._init_quad, seed=numpy_random().default_rng(seeds_of(root, item)))


def of_numpy(module: Any) -> dict[type, Kind]:
    return {
        module.BitGenerator: Kind(bits_root, begin_bits, lambda bits: (type(bits), (0,))),
        module.RandomState: Kind(state_root, begin_state, blank_state),
        module.SeedSequence: Kind(seeds_root, begin_seeds, blank_seeds, own_seeds),
    }


def of_scipy(module: Any) -> dict[type, Kind]:
    return {module.QMCEngine: Kind(engine_root, begin_engine, as_pickle_does)}


def as_pickle_does(generator: Any) -> Any:
    return generator.__reduce_ex__(5)


KINDS: dict[type, Kind] = {
    random.Random: Kind(
        lambda generator: generator.getrandbits(62),
        begin_python,
        blank_python,
        own_python,
        whole_python,
    ),
    torch.Generator: Kind(
        torch_root, begin_torch, lambda generator: (torch.Generator, (generator.device,))
    ),
    SobolEngine: Kind(sobol_root, begin_sobol, as_pickle_does),
}


CLASSES: set[type] = set(KINDS)  # and numpy's and scipy's, once these are imported
MISSING = {"numpy.random": of_numpy, "scipy.stats.qmc": of_scipy}


def learn() -> None:
    """Note the classes of modules that have been imported since the last call."""
    for name in [each for each in MISSING if each in sys.modules] if MISSING else ():
        with contextlib.suppress(AttributeError):  # another thread is importing it
            KINDS.update(MISSING[name](sys.modules[name]))
            CLASSES.update(KINDS, [numpy_random().Generator])
            MISSING.pop(name, None)
