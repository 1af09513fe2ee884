"""What a timeline costs: maps and their backwards while one is recorded, and while none is, in turns in the same pool.

a map, one backward ──► seconds ──┬──► off
the same within `pool.timeline()` ┴──► on            on / off - 1, round by round

python scripts/benchmarks/bench_timeline.py --processes 2 --json timeline.json
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from common import Function, Work, at_least_1, calibrated, limited, python_item, surroundings
from figures import Figure, add_options, fail, interleaved, median_figure, print_figures, ratios, report
from losses import doubled, python_bound
from torch import Tensor

import mpgrad

EPILOG = "exit status: 0 if everything was measured, 1 if the time is up, 2 for wrong arguments"

AIM = ("<=", 3.0)  # percent, at 1 ms an item
FLOATS = 10


class Case(NamedTuple):
    name: str
    seconds: float | None  # of an item, forward and backward; None: a tiny one
    items: int
    aim: tuple[str, float] | None = None


class Plan(NamedTuple):
    cases: Sequence[Case]
    rounds: int
    limit: int


FULL = Plan([Case("1 ms", 1e-3, 400, AIM), Case("10 ms", 1e-2, 60), Case("tiny", None, 4000)], rounds=25, limit=900)
QUICK = Plan([Case("1 ms", 1e-3, 20, AIM), Case("tiny", None, 100)], rounds=2, limit=100)
GRAPHS = ("keep", "ahead")


def with_steps(steps: int) -> Function:
    return partial(python_bound, steps=steps)


def items_of(case: Case) -> tuple[Function, list[Tensor]]:
    if case.seconds is None:
        return doubled, [torch.ones(FLOATS) for _ in range(case.items)]
    function = with_steps(calibrated(Work("python", with_steps, python_item), case.seconds))
    return function, [python_item(1) for _ in range(case.items)]


def loss(function: Function, x: Tensor) -> Tensor:
    return function(x).sum()


def seconds(pool: mpgrad.Pool, function: Function, items: Sequence[Tensor], on: bool) -> float:
    leaves = [item.clone().requires_grad_() for item in items]
    with pool.timeline() if on else contextlib.nullcontext():
        began = time.perf_counter()
        torch.stack(pool.map(partial(loss, function), leaves)).sum().backward()
        return time.perf_counter() - began


def measured(graphs: str, processes: int, plan: Plan) -> list[Figure]:
    figures = []
    with mpgrad.Pool(processes, graphs=graphs) as pool:
        for case in plan.cases:
            function, items = items_of(case)
            turns = {name: partial(seconds, pool, function, items, name == "on") for name in ("off", "on")}
            found = interleaved(turns, plan.rounds)
            row = f'python-bound, {case.name} an item, {case.items} items, graphs="{graphs}"'
            for name, rounds in found.items():
                figures.append(median_figure(row, name, [1e6 * each / case.items for each in rounds], "us/item"))
            more = [100 * (ratio - 1) for ratio in ratios(found["on"], found["off"])]
            figures.append(median_figure(row, "on beyond off", more, "%", case.aim))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = QUICK if options.quick else FULL
    around = surroundings(options.processes)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures: list[Figure] = []
    try:
        with limited(plan.limit):
            for graphs in GRAPHS:
                found = measured(graphs, options.processes, plan)
                print_figures(found)
                figures += found
    except TimeoutError as error:
        return fail(error)
    report(options, around, figures, rounds=plan.rounds)
    return 0


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What recording a timeline costs.", epilog=EPILOG)
    parser.add_argument("--processes", type=at_least_1, default=2, help="workers (default: %(default)s)")
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
