"""How good the forecasts of `mpgrad.advise` are: each beside what the way takes when all items are run.

The forecast is made from a sample, in some seconds; then the loop and the pools that it knows take turns over all items,
forward and backward. "forecast / measured": 1 is right, and within 20 % is the aim.

    python scripts/benchmarks/bench_advise.py
    python scripts/benchmarks/bench_advise.py --quick --json bench_advise.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from common import Function, at_least_1, batch_of, limited, serial, surroundings
from figures import Figure, add_options, fail, interleaved, print_figures, report
from jobs import OP, PYTHON, backward_at_once, items_of, one_backward
from torch import Tensor

import mpgrad

LIMIT = 900  # seconds
LENGTHS = {
    "tiny": (PYTHON, 0.0),
    "Python-bound, 1 ms": (PYTHON, 1e-3),
    "Python-bound, 10 ms": (PYTHON, 1e-2),
    "op-bound, 10 ms": (OP, 1e-2),
}
QUICK = ["Python-bound, 1 ms"]
WITHIN = 1.2


def bench(names: Sequence[str], processes: int, seconds: float, total: float, rounds: int) -> Iterator[Figure]:
    for name in names:
        work, length = LENGTHS[name]
        function, items = items_of(work, length, total)
        leaves = batch_of(items).items
        advice = mpgrad.advise(function, leaves, seconds=seconds, processes=processes, show=False)
        measured = in_full(function, items, {way.processes for way in advice.ways if way.measured}, advice.graphs, rounds)
        found = []
        for way in advice.ways:
            if way.name in ("loop", "pool") and way.processes in measured:
                label = f"pool of {way.processes}" if way.processes else "loop"
                actual = statistics.median(measured[way.processes])
                found.append(Figure(name, f"{label}: measured", 1e3 * actual, "ms", rounds=measured[way.processes]))
                found.append(Figure(name, f"{label}: forecast", 1e3 * way.seconds, "ms"))
                ratio = way.seconds / actual
                found.append(Figure(name, f"{label}: forecast / measured", ratio, ""))
                found.append(Figure(name, f"{label}: off by the factor", max(ratio, 1 / ratio), "", ("<=", WITHIN)))
        print_figures(found)
        yield from found


def in_full(function: Function, items: Sequence[Tensor], counts: set[int], graphs: str, rounds: int) -> dict[int, list[float]]:
    """Seconds of all items, forward and backward, by number of workers; 0 is the loop, in the order that is faster."""
    pools = {count: mpgrad.Pool(count, graphs=graphs) for count in counts if count}
    try:
        turns: dict[str, Callable[[], float]] = {
            "at once": lambda: timed(lambda batch: backward_at_once(function, batch), items),
            "in the end": lambda: timed(lambda batch: one_backward(serial, function, batch), items),
        }
        for count, pool in pools.items():
            turns[str(count)] = lambda pool=pool: timed(  # type: ignore[misc]
                lambda batch: one_backward(pool.map, function, batch), items
            )
        found = interleaved(turns, rounds)
        orders = [found.pop("at once"), found.pop("in the end")]
        return {0: min(orders, key=statistics.median), **{int(name): seconds for name, seconds in found.items()}}
    finally:
        for pool in pools.values():
            pool.terminate()


def timed(run: Callable[..., object], items: Sequence[Tensor]) -> float:
    batch = batch_of(items)
    start = time.perf_counter()
    run(batch)
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--processes", type=at_least_1, default=2, metavar="N", help="workers (default: %(default)s)")
    add_options(parser)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as the workers have
    around = surroundings(options.processes)
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, load average {around['load_average']:.2f} before")
    try:
        with limited(LIMIT):
            if options.quick:
                found = list(bench(QUICK, options.processes, seconds=0.5, total=0.05, rounds=1))
            else:
                found = list(bench(list(LENGTHS), options.processes, seconds=5.0, total=2.0, rounds=5))
    except TimeoutError as error:
        return fail(error)
    report(options, around, found, repeats=1 if options.quick else 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
