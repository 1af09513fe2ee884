"""Generators of random numbers that a function captures, or that several items have in common: a
stream for each item.

Before, items drew from their worker's copy of the generator: several got the same numbers, others
for each number of workers.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inside import functions_known
from torch.quasirandom import SobolEngine

import mpgrad

pytestmark = pytest.mark.quick


class Dice(random.Random):
    def __new__(cls, *arguments: int) -> Dice:
        return super().__new__(cls)  # which takes one argument at most on Python 3.10

    def __init__(self, seed: int, sides: int) -> None:
        super().__init__(seed)
        self.sides = sides

    def roll(self) -> float:
        return self.random() * self.sides


class Noise(numpy.random.Generator):
    def __init__(self, seed: int, scale: float) -> None:
        super().__init__(numpy.random.PCG64(seed))
        self.scale = scale

    def draw(self) -> float:
        return self.normal() * self.scale


@functools.cache
def cached(seed: int) -> tuple[Any, ...]:
    return (numpy.random.default_rng(seed),)


class Simulation:
    shared = numpy.random.default_rng(1)

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(2)
        self.scale = torch.tensor(2.0, requires_grad=True)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x * self.rng.normal() + self.shared.normal()


def scipy_engine(name: str) -> Any:
    qmc = pytest.importorskip("scipy.stats.qmc")
    return getattr(qmc, name)(2, seed=numpy.random.default_rng(1))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Generator": (lambda: numpy.random.default_rng(0), lambda g: g.normal()),
    # symptom: state must be for a PCG64 RNG
    "with attributes": (lambda: Noise(0, 2.0), lambda g: g.draw()),
    "method": (lambda: numpy.random.default_rng(0).normal, lambda g: g()),
    "spawns": (lambda: numpy.random.default_rng(0), lambda g: g.spawn(1)[0].normal()),
    "BitGenerator": (lambda: numpy.random.Philox(0), lambda g: g.random_raw()),
    "SeedSequence": (
        lambda: numpy.random.SeedSequence(0),
        lambda g: g.spawn(1)[0].generate_state(1)[0],
    ),
    "RandomState": (lambda: numpy.random.RandomState(0), lambda g: g.normal()),
    "RandomState of another": (
        lambda: numpy.random.RandomState(numpy.random.PCG64(0)),
        lambda g: g.normal(),
    ),
    "random": (lambda: random.Random(0), lambda g: g.gauss(0, 1)),
    "subclass": (lambda: Dice(0, 6), lambda g: g.roll()),
    "torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda g: torch.rand((), generator=g).item(),
    ),
    "SobolEngine": (
        lambda: SobolEngine(2, scramble=True, seed=0),
        lambda g: g.draw(1).sum().item(),
    ),
    "plain Sobol": (lambda: SobolEngine(1), lambda g: g.draw(1).sum().item()),
}
if numpy.__version__.startswith("1."):
    del GENERATORS["spawns"]  # it leaves the seed sequence out when it pickles a generator
OF_SCIPY = {
    name: (functools.partial(scipy_engine, name), lambda g: g.random(1).sum())
    for name in ("Sobol", "Halton", "LatinHypercube")
}
# it takes seconds to import
each_kind = pytest.mark.parametrize(
    "name", [*GENERATORS, *[pytest.param(name, marks=pytest.mark.slow) for name in OF_SCIPY]]
)
GENERATORS.update(OF_SCIPY)


def held_in_several_ways(
    pool: mpgrad.Pool, name: str, chunksize: int | None
) -> tuple[list[Any], list[Any]]:
    """What items draw from a generator that the function captures, in two maps, and from one that
    all items hold."""
    make, draw = GENERATORS[name]
    generator, another = make(), make()

    def draw_two(_: object) -> list[float]:
        return [float(draw(generator)), float(draw(generator))]

    captured = [pool.map(draw_two, range(6), chunksize) for _ in range(2)]
    items = [(another, number) for number in range(6)]
    held = [
        pool.starmap(lambda g, _: [float(draw(g)), float(draw(g))], items, chunksize)
        for _ in range(2)
    ]
    return captured, held


@each_kind
def test_each_item_has_a_stream_of_its_own(pool: mpgrad.Pool, name: str) -> None:
    """Also in the next map; and the same ones however the items are cut, and for any engine and
    number of workers."""
    expected = held_in_several_ways(pool, name, 1)
    for maps in expected:
        drawn = [number for results in maps for pair in results for number in pair]
        assert len(set(drawn)) == len(drawn) == 24
    assert held_in_several_ways(pool, name, 4) == expected == of_one_worker(name)


@functools.cache
def of_one_worker(name: str) -> tuple[list[Any], list[Any]]:
    with mpgrad.Pool(1, engine="inline") as pool:
        return held_in_several_ways(pool, name, None)


def test_numpy_spawns(pool2: mpgrad.Pool) -> None:
    """The caller's bit stream stays where it is."""
    rng = numpy.random.default_rng(7)
    streams = numpy.random.default_rng(7).spawn(1)[0].spawn(4)
    before = rng.bit_generator.state
    assert pool2.map(lambda _: rng.normal(), range(4)) == [stream.normal() for stream in streams]
    assert rng.bit_generator.state == before
    assert rng.bit_generator.seed_seq.n_children_spawned == 1


def test_one_draw(pool2: mpgrad.Pool) -> None:
    once, rng = random.Random(0), random.Random(0)
    once.getrandbits(62)
    pool2.map(lambda _: rng.random(), range(4))
    assert rng.getstate() == once.getstate()


@each_kind
def test_of_one_item_as_it_is(pool: mpgrad.Pool, name: str) -> None:
    make, draw = GENERATORS[name]
    items = [make() for _ in range(2)]
    draw(items[1])
    generator = make()
    expected = [draw(generator), draw(generator)]
    assert pool.map(draw, items) == expected
    assert list(pool.imap(draw, iter(items))) == expected
    assert pool.apply(draw, (items[1],)) == expected[1]


def test_items_of_an_iterator(pool: mpgrad.Pool) -> None:
    """That others have the generator too is known when the second one comes; later, beforehand."""
    rng = numpy.random.default_rng(0)
    drawn = [
        number
        for _ in range(2)
        for number in pool.imap(lambda g: g.normal(), (rng for _ in range(6)))
    ]
    drawn += pool.starmap(lambda g, _: g.normal(), zip([rng] * 6, range(6), strict=True))
    assert len(set(drawn)) == 18


def test_captured_and_given(pool2: mpgrad.Pool) -> None:
    rng = random.Random(0)
    drawn = pool2.map(lambda g: (g.random(), rng.random()), [rng])[0]
    assert len({*drawn, rng.random()}) == 3


def test_an_object_holds_it(pool: mpgrad.Pool) -> None:
    """A bound method's object, and its class; the gradients are those of these numbers, also when a
    backward is repeated."""
    simulation, x = Simulation(), torch.tensor(1.0)
    results = pool.map(simulation.step, [x] * 6)
    assert len({result.item() for result in results}) == 6
    (first,) = torch.autograd.grad(sum(results), simulation.scale, retain_graph=True)
    (second,) = torch.autograd.grad(sum(results), simulation.scale)
    assert first == second != 0


def test_in_a_cache(pool: mpgrad.Pool) -> None:
    # symptom: each worker made its own again, and items drew the same numbers
    cached(3)
    drawn = [
        number
        for _ in range(2)
        for number in pool.map(lambda _: cached(3)[0].normal(), range(6), 1)
    ]
    assert len(set(drawn)) == 12


def test_submitted_calls(pool: mpgrad.Pool) -> None:
    rng = random.Random(0)
    futures = [pool.submit(rng.random) for _ in range(6)]
    assert len({future.result() for future in futures}) == 6


def test_reductions(pool: mpgrad.Pool) -> None:
    rng, noise = random.Random(0), list[float]()
    for _ in range(2):
        total = pool.map_reduce(
            lambda _: torch.tensor([rng.random()], dtype=torch.float64), range(6), "cat"
        )
        noise += total.tolist()
    assert len(set(noise)) == 12


@pytest.mark.parametrize("mode", ["reverse", "forward", "batched"])
def test_rows_and_columns_of_one_function(pool2: mpgrad.Pool, mode: str) -> None:
    """Symptom: shares of one Jacobian belonged to different functions, as each worker drew on from
    its copy."""
    x = torch.ones(4, dtype=torch.float64)
    rng = numpy.random.default_rng(0)
    stream = numpy.random.default_rng(0).spawn(1)[0].spawn(1)[0]
    found = mpgrad.jacobian(
        lambda x: x * torch.as_tensor(rng.normal(size=4)), x, mode=mode, pool=pool2
    )
    assert found.diagonal().tolist() == stream.normal(size=4).tolist()


def test_inside_transforms(pool: mpgrad.Pool) -> None:
    """The derivative meets the numbers of the value."""
    rng = numpy.random.default_rng(0)

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(pool.map(lambda x: x * rng.normal(), [x, x])).sum()

    grad, value = torch.func.grad_and_value(total)(torch.ones(()))
    assert grad == value


def test_a_death_changes_nothing(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    rng = numpy.random.default_rng(0)

    def die_once(item: int) -> float:
        drawn = rng.normal()
        if item == 2 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return float(drawn)

    streams = numpy.random.default_rng(0).spawn(1)[0].spawn(4)
    assert fresh_pool.map(die_once, range(4), 1) == [stream.normal() for stream in streams]


def test_the_process_s_own(pool2: mpgrad.Pool) -> None:
    """Symptom: `from random import gauss` captured a copy of the generator behind it, the same for
    all items."""
    seeded = []
    for _ in range(2):
        torch.manual_seed(0)
        seeded.append(
            pool2.map(
                lambda draw: [draw(0, 1), draw(0, 1)], [random.gauss, numpy.random.normal] * 3
            )
        )
    gauss, normal = random.gauss, numpy.random.normal
    drawn = pool2.map(lambda _: (gauss(0, 1), normal(0, 1)), range(4))
    assert seeded[0] == seeded[1]
    assert len({number for pair in (*seeded[0], *drawn) for number in pair}) == 20


def test_without_a_state(pool2: mpgrad.Pool) -> None:
    """Symptom: `NotImplementedError: System entropy source does not have state`."""
    system = random.SystemRandom()
    assert len(set(pool2.map(lambda _: (system.random(), secrets.choice([1])), range(4)))) == 4


def test_the_pickle_stays_the_same() -> None:
    """Else each map would be that of a function of which nothing is known, and calls that draw
    would not be bundled."""
    rng, engine = numpy.random.default_rng(0), random.Random(0)
    with mpgrad.Pool(1, engine="inline") as pool:
        for _ in range(3):
            pool.map(lambda _: rng.normal() + engine.random(), range(40))
            rng.normal(), engine.gauss(0, 1)
        assert functions_known(pool) == 1
