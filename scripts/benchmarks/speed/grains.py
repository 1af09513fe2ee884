"""Wall time of tiny items, and speed-ups by how long an item takes: what handing work out costs, and what it brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from common import (
    Batch,
    Contender,
    Function,
    Loop,
    Measured,
    Outcome,
    Work,
    forward,
    measured,
    serial,
    tiny_items,
)
from common import one_backward as backward_of_all
from figures import Figure, median_figure, ratios
from jobs import OP, PYTHON, backward_at_once, items_of, one_backward
from losses import doubled
from torch import Tensor

import mpgrad
from speed.plan import Plan, Pools

# by grain in ms: "keep" over one backward; "ahead", and a pool without options ("auto"), over the best order
PYTHON_KEEP_AIMS = {10: 2.3, 1: 2.1, 0.3: 1.7, 0.1: 1.4}
PYTHON_AIMS = {"ahead": {10: 1.92, 1: 1.8, 0.3: 1.5, 0.1: 1.2}, "auto": {10: 1.9, 1: 1.6}}
OP_AIMS = {"ahead": {10: 1.9, 1: 1.75, 0.1: 1.15}, "auto": {10: 1.7, 1: 1.45}}
LIMIT = "loops at once"  # in as many processes, between which nothing travels
BARE = "bare pool"  # see `speed.bare`
LONGEST_BARE = 0.3  # ms: it cuts maps into equal chunks, which is no limit for items that take longer


# --- tiny tensors


def bench_tiny(pools: Pools, plan: Plan) -> Iterator[Figure]:
    maps: dict[str, Loop] = {"serial": serial, "pool": pools.keep.map, BARE: pools.bare.map}
    row = "tiny: x * 2, forward and backward"
    yield from tiny_figures(row, backward_of_all, maps, plan.tiny_items, plan.repeats, 40.0)


def bench_forward(pools: Pools, plan: Plan) -> Iterator[Figure]:
    maps: dict[str, Loop] = {"serial": serial, "pool": pools.keep.map, BARE: pools.bare.map}
    row = "forward: x * 2, forward only, no gradient"
    yield from tiny_figures(row, forward, maps, plan.tiny_items, plan.repeats, 15.0)


def bench_lengths(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """What a map takes at its beginning and at its end weighs less in a longer one."""
    for count in plan.tiny_lengths:
        for way, run, most in (("forward and backward", backward_of_all, 40.0), ("forward only, no gradient", forward, 15.0)):
            maps: dict[str, Loop] = {"serial": serial, "pool": pools.keep.map}
            row = f"lengths: x * 2, {count:,} items in a map, {way}"
            yield from tiny_figures(row, run, maps, count, plan.repeats, most)


def tiny_figures(
    row: str, run: Callable[[Loop, Function, Batch], Outcome], maps: dict[str, Loop], count: int, repeats: int, most: float
) -> Iterator[Figure]:
    contenders = [Contender(name, partial(run, loop, doubled), most_items=count) for name, loop in maps.items()]
    for result in measured(contenders, tiny_items(count), repeats):
        aim = ("<=", most) if result.name == "pool" else None
        yield median_figure(row, result.name, microseconds(result), "us/item", aim)


def microseconds(result: Measured) -> list[float]:
    return [1e6 * seconds for seconds in result.seconds]


# --- speed-ups


def bench_python(pools: Pools, plan: Plan) -> Iterator[Figure]:
    for ms in plan.grains_ms:
        yield from grain_figures("python", pools, plan, PYTHON, ms, PYTHON_KEEP_AIMS, PYTHON_AIMS)


def bench_op(pools: Pools, plan: Plan) -> Iterator[Figure]:
    for ms in plan.grains_ms:
        yield from grain_figures("op", pools, plan, OP, ms, {}, OP_AIMS)


def grain_figures(
    name: str,
    pools: Pools,
    plan: Plan,
    work: Work,
    ms: float,
    keep_aims: Mapping[float, float],
    aims: Mapping[str, Mapping[float, float]],
) -> Iterator[Figure]:
    function, items = items_of(work, ms / 1e3, plan.work_seconds)
    loops = {"keep": pools.keep, "ahead": pools.ahead, "auto": pools.default}
    limits = [Contender(LIMIT, partial(pools.loops.run, function))]
    if ms <= LONGEST_BARE:
        bare = {"keep": pools.bare, "ahead": pools.bare_ahead}
        limits += [Contender(f"{BARE}, {name}", partial(one_backward, pool.map, function)) for name, pool in bare.items()]
    results = side_by_side(function, items, loops, plan.repeats, *limits)
    row = f"{name}: {work.name} items of {ms:g} ms, forward and backward"
    yield from absolute(row, results.values())
    yield median_figure(row, f"{LIMIT} over the best order", ratios(best_order(results), results[LIMIT].seconds), "x")
    for graphs in loops:
        over_one = at_least(keep_aims.get(ms) if graphs == "keep" else None)
        over_best = at_least(aims.get(graphs, {}).get(ms))
        mine = results[graphs].seconds
        yield median_figure(row, f"{graphs} over one backward", ratios(results["serial"].seconds, mine), "x", over_one)
        yield median_figure(row, f"{graphs} over the best order", ratios(best_order(results), mine), "x", over_best)
        if (theirs := results.get(f"{BARE}, {graphs}")) is not None:
            yield median_figure(row, f"{graphs} over the bare pool", ratios(theirs.seconds, mine), "x")


def at_least(aim: float | None) -> tuple[str, float] | None:
    return None if aim is None else (">=", aim)


def side_by_side(
    function: Function, items: Sequence[Tensor], pools: dict[str, mpgrad.Pool], repeats: int, *others: Contender
) -> dict[str, Measured]:
    contenders = [
        Contender("serial", partial(one_backward, serial, function)),
        Contender("serial, at once", partial(backward_at_once, function)),
        *(Contender(name, partial(one_backward, pool.map, function)) for name, pool in pools.items()),
        *others,
    ]
    contenders = [contender._replace(most_items=len(items)) for contender in contenders]
    return {result.name: result for result in measured(contenders, items, repeats)}


def best_order(results: dict[str, Measured]) -> list[float]:
    return min((results["serial"], results["serial, at once"]), key=lambda result: result.median).seconds


def absolute(row: str, results: Iterable[Measured]) -> Iterator[Figure]:
    for result in results:
        yield median_figure(row, result.name, [1e3 * seconds for seconds in result.seconds], "ms/item")
