"""How fast the pool is, against the figures that it has to reach: every row of that table, in one run.

Contenders take turns in a random order, every figure is the median over such rounds, and ratios are taken within a round.
Whatever gives values and gradients is compared with the serial loop before it is timed. "over one backward" is the
speed-up over the serial loop with one backward over all items; "over the best order" that over the faster of it and a
backward right after each item.

    row ──► contenders checked ──► rounds of them in turns ──► figures ──► table, --json, ratios to an older --json

    python scripts/benchmarks/bench_speed.py                             # all rows, some ten minutes
    python scripts/benchmarks/bench_speed.py --rows tiny forward --repeats 15
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from common import WrongResultError, at_least_1, limited, surroundings
from figures import Figure, add_options, fail, print_figures, report
from speed import budget, classes, copies, floor, grains, processes, tail
from speed.plan import QUICK, Plan, Pools

EPILOG = "exit status: 0 if everything was measured, 1 if a contender is wrong or the time is up, 2 for wrong arguments"

Row = Callable[[Pools, Plan], Iterator[Figure]]
ROWS: dict[str, Row] = {
    "tiny": grains.bench_tiny,
    "forward": grains.bench_forward,
    "lengths": grains.bench_lengths,
    "budget": budget.bench_budget,
    "cpu": budget.bench_cpu,
    "floor": floor.bench_floor,
    "python": grains.bench_python,
    "op": grains.bench_op,
    "transfer": copies.bench_transfer,
    "captures": copies.bench_captures,
    "deterministic": copies.bench_deterministic,
    "classes": classes.bench_classes,
    "tail": tail.bench_tail,
    "start": processes.bench_start,
    "memory": processes.bench_memory,
    "idle": processes.bench_idle,
    "phenobarbital": processes.bench_phenobarbital,
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
