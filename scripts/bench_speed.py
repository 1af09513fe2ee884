"""How fast the pool is, against the figures that it has to reach: every row of that table, in one run.

Contenders take turns in a random order, every figure is the median over such rounds, and ratios are taken within a round.
Whatever gives values and gradients is compared with the serial loop before it is timed. "over one backward" is the
speed-up over the serial loop with one backward over all items; "over the best order" that over the faster of it and a
backward right after each item.

    row ──► contenders checked ──► rounds of them in turns ──► figures ──► table, --json, ratios to an older --json

    python scripts/bench_speed.py                             # all rows, some ten minutes
    python scripts/bench_speed.py --rows tiny forward --repeats 15
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from bench_overhead import (
    LONGEST_ITEM,
    SHORTEST_ITEM,
    Contender,
    Function,
    Measured,
    Work,
    WrongResultError,
    at_least_1,
    doubled,
    forward,
    limited,
    measured,
    serial,
    surroundings,
)
from bench_overhead import one_backward as backward_of_all
from figures import Figure, add_options, fail, median_figure, print_figures, ratios, report
from jobs import OP, PYTHON, backward_at_once, items_of, one_backward
from torch import Tensor

import mpgrad
import mpgrad.pool

EPILOG = "exit status: 0 if everything was measured, 1 if a contender is wrong or the time is up, 2 for wrong arguments"

Aims = dict[float, tuple[float, ...]]  # of a grain in ms: keep over one backward, eager over the best order
PYTHON_AIMS = {10: (2.3, 1.92), 1: (2.1, 1.8), 0.3: (1.7, 1.5), 0.1: (1.4, 1.2)}
OP_AIMS = {10: 1.9, 1: 1.75, 0.1: 1.15}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    processes: int = 2
    repeats: int = 9
    tiny_items: int = 1000
    work_seconds: float = 0.3  # of a serial run
    grains_ms: Sequence[float] = (10, 1, 0.3, 0.1)
    adaptive_ms: Sequence[float] = (0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 3, 10, 50)
    tensors: int = 32
    largest_bytes: int = 16_000_000
    capture_bytes: int = 100_000_000
    capture_items: int = 512
    tail_items: int = 256
    tail_seconds: float = 1.0  # serial
    further_workers: int = 8
    idle_seconds: float = 10.0
    limit: int = 3000  # seconds; the whole run is stopped then


QUICK = Plan(
    repeats=1,
    tiny_items=20,
    work_seconds=0.02,
    grains_ms=(1,),
    adaptive_ms=(0, 1),
    tensors=4,
    largest_bytes=1_000_000,
    capture_bytes=1_000_000,
    capture_items=16,
    tail_items=16,
    tail_seconds=0.05,
    further_workers=1,
    idle_seconds=0.2,
    limit=120,
)


def supported(**options: object) -> dict[str, object]:
    """The options that this mpgrad has."""
    known = inspect.signature(mpgrad.Pool).parameters
    kept = {name: value for name, value in options.items() if name in known}
    if kept.get("graphs") not in (None, *mpgrad.pool.GRAPHS):
        del kept["graphs"]
    for name in options.keys() - kept.keys():
        print(f"this mpgrad has no {name}={options[name]!r}: measured without")
    return kept


class Pools:
    """Each started when a row first wants it, and kept to the end: an idle one costs the others nothing that would show."""

    def __init__(self, processes: int, stack: contextlib.ExitStack) -> None:
        self.processes = processes
        self._stack = stack

    def _started(self, **options: object) -> mpgrad.Pool:
        pool: mpgrad.Pool = mpgrad.Pool(self.processes, **supported(**options))  # type: ignore[arg-type]
        return self._stack.enter_context(pool)

    @cached_property
    def keep(self) -> mpgrad.Pool:
        return self._started(graphs="keep", inline="never")

    @cached_property
    def eager(self) -> mpgrad.Pool:
        return self._started(graphs="eager", inline="never")

    @cached_property
    def adaptive(self) -> mpgrad.Pool:
        return self._started(graphs="keep")

    @cached_property
    def adaptive_eager(self) -> mpgrad.Pool:
        return self._started(graphs="eager")


# --- tiny tensors


def bench_tiny(pools: Pools, plan: Plan) -> Iterator[Figure]:
    contenders = [
        Contender("serial", partial(backward_of_all, serial, doubled)),
        Contender("pool", partial(backward_of_all, pools.keep.map, doubled)),
    ]
    yield from tiny_figures("tiny: x * 2, forward and backward, pool forced", contenders, plan, 40.0)


def bench_forward(pools: Pools, plan: Plan) -> Iterator[Figure]:
    contenders = [
        Contender("serial", partial(forward, serial, doubled)),
        Contender("pool", partial(forward, pools.keep.map, doubled)),
    ]
    yield from tiny_figures("forward: x * 2, forward only, no gradient, pool forced", contenders, plan, 15.0)


def tiny_figures(row: str, contenders: Sequence[Contender], plan: Plan, most: float) -> Iterator[Figure]:
    lengths = random.Random(0).choices(range(SHORTEST_ITEM, LONGEST_ITEM + 1), k=plan.tiny_items)
    contenders = [contender._replace(most_items=plan.tiny_items) for contender in contenders]
    own, pool = measured(contenders, [torch.randn(length) for length in lengths], plan.repeats)
    yield median_figure(row, "serial", microseconds(own), "us/item")
    yield median_figure(row, "pool", microseconds(pool), "us/item", ("<=", most))


def microseconds(result: Measured) -> list[float]:
    return [1e6 * seconds for seconds in result.seconds]


# --- speed-ups


def bench_python(pools: Pools, plan: Plan) -> Iterator[Figure]:
    for ms in plan.grains_ms:
        keep, eager = PYTHON_AIMS.get(ms, (None, None))
        yield from grain_figures("python", pools, plan, PYTHON, ms, keep, eager)


def bench_op(pools: Pools, plan: Plan) -> Iterator[Figure]:
    for ms in plan.grains_ms:
        yield from grain_figures("op", pools, plan, OP, ms, None, OP_AIMS.get(ms))


def grain_figures(
    name: str, pools: Pools, plan: Plan, work: Work, ms: float, keep_aim: float | None, eager_aim: float | None
) -> Iterator[Figure]:
    function, items = items_of(work, ms / 1e3, plan.work_seconds)
    loops = {"keep": pools.keep, "eager": pools.eager}
    results = side_by_side(function, items, loops, plan.repeats)
    row = f"{name}: {work.name} items of {ms:g} ms, forward and backward"
    yield from absolute(row, results.values())
    aims = {"keep": (keep_aim, None), "eager": (None, eager_aim)}
    for graphs in loops:
        over_one, over_best = (None if aim is None else (">=", aim) for aim in aims[graphs])
        mine = results[graphs].seconds
        yield median_figure(row, f"{graphs} over one backward", ratios(results["serial"].seconds, mine), "x", over_one)
        yield median_figure(row, f"{graphs} over the best order", ratios(best_order(results), mine), "x", over_best)


def side_by_side(
    function: Function, items: Sequence[Tensor], pools: dict[str, mpgrad.Pool], repeats: int
) -> dict[str, Measured]:
    contenders = [
        Contender("serial", partial(one_backward, serial, function)),
        Contender("serial, at once", partial(backward_at_once, function)),
        *(Contender(name, partial(one_backward, pool.map, function)) for name, pool in pools.items()),
    ]
    contenders = [contender._replace(most_items=len(items)) for contender in contenders]
    return {result.name: result for result in measured(contenders, items, repeats)}


def best_order(results: dict[str, Measured]) -> list[float]:
    return min((results["serial"], results["serial, at once"]), key=lambda result: result.median).seconds


def absolute(row: str, results: Iterator[Measured] | Sequence[Measured] | object) -> Iterator[Figure]:
    for result in results:  # type: ignore[attr-defined]
        yield median_figure(row, result.name, [1e3 * seconds for seconds in result.seconds], "ms/item")


def bench_adaptive(pools: Pools, plan: Plan) -> Iterator[Figure]:
    loops = {"keep": pools.adaptive, "eager": pools.adaptive_eager}
    for work in (PYTHON, OP):
        least: dict[str, float] = dict.fromkeys(loops, float("inf"))
        for ms in plan.adaptive_ms:
            function, items = items_of(work, ms / 1e3, plan.work_seconds)
            results = side_by_side(function, items, loops, plan.repeats)
            row = f"adaptive: {work.name} items of {ms:g} ms, forward and backward, warm pool that may run them inline"
            for graphs in loops:
                over_one = ratios(results["serial"].seconds, results[graphs].seconds)
                over_best = ratios(best_order(results), results[graphs].seconds)
                yield median_figure(row, f"{graphs} over one backward", over_one, "x", (">=", 0.95))
                yield median_figure(row, f"{graphs} over the best order", over_best, "x")
                least[graphs] = min(least[graphs], statistics.median(over_one))
        row = f"adaptive: {work.name}, the smallest of all grains"
        for graphs in loops:
            yield Figure(row, f"{graphs} over one backward", least[graphs], "x", (">=", 0.95))


# --- the whole


Row = Callable[[Pools, Plan], Iterator[Figure]]
ROWS: dict[str, Row] = {
    "tiny": bench_tiny,
    "forward": bench_forward,
    "python": bench_python,
    "op": bench_op,
    "adaptive": bench_adaptive,
}


def bench(rows: Sequence[str], plan: Plan) -> list[Figure]:
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)  # as the workers have
    figures = []
    with contextlib.ExitStack() as stack:
        pools = Pools(plan.processes, stack)
        for name in rows:
            found = list(ROWS[name](pools, plan))
            print_figures(found)
            figures += found
    return figures


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--processes", type=at_least_1, default=2, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--repeats", type=at_least_1, metavar="N", help="timed rounds (default: 9, quick: 1)")
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = replace(QUICK if options.quick else Plan(), processes=options.processes)
    plan = replace(plan, repeats=options.repeats or plan.repeats)
    around = surroundings(plan.processes)
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, load average {around['load_average']:.2f} before")
    print(f"{plan.processes} workers of one intra-op thread; medians of {plan.repeats} rounds")
    try:
        with limited(plan.limit):
            figures = bench(options.rows, plan)
    except (WrongResultError, TimeoutError) as error:
        return fail(error)
    report(options, around, figures, repeats=plan.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
