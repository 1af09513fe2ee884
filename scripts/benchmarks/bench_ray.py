"""Engine "ray" beside engine "process" and beside what is written by hand with Ray actors, on simulated nodes, in one run.

The cluster is on this machine: a head without CPUs, and two nodes with one CPU each. So both engines and the actors have two
workers on the same CPUs, and what differs is the way between them and the caller. The network is the loopback interface.
Whatever gives values and gradients is compared with the serial loop before it is timed; then all take turns in a random
order, every figure is the median over such rounds, and ratios are taken within a round.

By hand (ray_nodes/by_hand.py) has an advantage that a pool cannot have: it knows that the loss is a sum. CPU of the caller
is of all its threads, Ray's among them. How many workers one caller keeps busy is computed from what tiny items cost it, and
not run. Tiny items travel many to a message, longer ones few, and these cost more: compare the rows of longer items.

    python scripts/benchmarks/bench_ray.py                              # all rows, some five minutes
    python scripts/benchmarks/bench_ray.py --rows short apply --rounds 15
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from common import WrongResultError, at_least_1, limited, surroundings
from figures import Figure, add_options, fail, print_figures, report
from ray_nodes.by_hand import ByHand
from ray_nodes.cluster import NoClusterError, node_ids, simulated_nodes
from ray_nodes.rows import QUICK, ROWS, Contenders, Plan, Rows

import mpgrad

EPILOG = "exit status: 0 if all was measured, 1 if Ray does not start, one is wrong or the time is up, 2 for wrong arguments"

NODES = 2
SHARE = 0.4  # of a node's CPU, for each of the two pools' workers: both pools are open all the time
PATIENCE = 60.0  # seconds: a machine that others use may be silent for long


@contextlib.contextmanager
def started() -> Iterator[Contenders]:
    """All of them warm, for the whole run: an idle one costs the others next to nothing."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(simulated_nodes(NODES)).address
        cluster = mpgrad.Ray(address=address, cpus_per_worker=SHARE, workers_per_node=1, node_timeout=PATIENCE)

        def pool(engine: str, graphs: str) -> mpgrad.Pool:
            ray = cluster if engine == "ray" else None
            opened: mpgrad.Pool = mpgrad.Pool(NODES, engine=engine, graphs=graphs, send="always", ray=ray)
            return stack.enter_context(opened)

        yield Contenders(pool("process", "keep"), ByHand(node_ids()), pool("ray", "keep"), pool("ray", "ahead"))


def bench(names: Sequence[str], plan: Plan) -> Iterator[Figure]:
    """The figures as they come: whatever ends the run, those are there."""
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)  # as the workers have
    with started() as contenders:
        rows = Rows(contenders, plan)
        for name in names:
            figures = list(ROWS[name](rows))
            print_figures(figures)
            yield from figures


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=at_least_1, metavar="N", help="timed rounds (default: 7, quick: 1)")
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    around = surroundings(NODES)
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, load average {around['load_average']:.2f} before")
    print(f"{NODES} simulated nodes of one worker; medians of {plan.rounds} rounds")
    figures: list[Figure] = []
    status = 0
    try:
        with limited(plan.limit):
            figures.extend(bench(options.rows, plan))
    except (NoClusterError, WrongResultError, TimeoutError) as error:
        status = fail(error)
    if figures:
        report(options, around, figures, rounds=plan.rounds, ray=importlib.metadata.version("ray"))
    return status


if __name__ == "__main__":
    sys.exit(main())
