"""Engine "ray" beside engine "process" and beside what is written by hand with Ray actors, on simulated nodes, in one run.

The cluster is on this machine: a head without CPUs, and two nodes with one CPU each. So both engines and the actors have two
workers on the same CPUs, and what differs is the way between them and the caller. The network is the loopback interface.
Whatever gives values and gradients is compared with the serial loop before it is timed; then all take turns in a random
order, every figure is the median over such rounds, and ratios are taken within a round.

By hand (ray_nodes/by_hand.py) has an advantage that a pool cannot have: it knows that the loss is a sum. CPU of the caller
is of all its threads, Ray's among them. How many workers one caller keeps busy is computed from what tiny items cost it, and
not run. Tiny items travel many to a message, longer ones few, and these cost more: compare the rows of longer items.
With `--nodes 1` on a machine with two CPUs, the caller has one to itself.

Row `death` comes last, on a cluster of its own: a node dies in the middle of a step (ray_nodes/death.py). It has three rounds
whatever `--rounds` says, which take two minutes, because Ray needs 12 s to notice that a node is dead.

    python scripts/benchmarks/bench_ray.py                              # all rows, some seven minutes
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
from ray_nodes.death import death
from ray_nodes.rows import QUICK, ROWS, Contenders, Plan, Rows

import mpgrad

EPILOG = "exit status: 0 if all was measured, 1 if Ray does not start, one is wrong or the time is up, 2 for wrong arguments"

DEATH = "death"
SHARE = 0.4  # of a node's CPU, for each of the two pools' workers: both pools are open all the time
PATIENCE = 60.0  # seconds: a machine that others use may be silent for long


@contextlib.contextmanager
def started(nodes: int) -> Iterator[Contenders]:
    """All of them warm, for the whole run: an idle one costs the others next to nothing."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(simulated_nodes(nodes)).address
        cluster = mpgrad.Ray(address=address, cpus_per_worker=SHARE, workers_per_node=1, node_timeout=PATIENCE)

        def pool(engine: str, graphs: str) -> mpgrad.Pool:
            ray = cluster if engine == "ray" else None
            opened: mpgrad.Pool = mpgrad.Pool(nodes, engine=engine, graphs=graphs, ray=ray)
            return stack.enter_context(opened)

        yield Contenders(pool("process", "keep"), ByHand(node_ids()), pool("ray", "keep"), pool("ray", "ahead"))


def bench(names: Sequence[str], nodes: int, plan: Plan) -> Iterator[Figure]:
    """The figures as they come: whatever ends the run, those are there."""
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)  # as the workers have
    if any(name in ROWS for name in names):
        with started(nodes) as contenders:
            rows = Rows(contenders, plan)
            for name in names:
                if name in ROWS:
                    yield from printed(ROWS[name](rows))
    if DEATH in names:  # last: it has a cluster of its own, and Ray allows a program one at a time
        yield from printed(death(plan))


def printed(figures: Iterator[Figure]) -> Sequence[Figure]:
    found = list(figures)
    print_figures(found)
    return found


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    rows = [*ROWS, DEATH]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--nodes", type=at_least_1, default=2, metavar="N", help="but for row death (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least_1, metavar="N", help="timed rounds, but for row death (default: 7, quick: 1)")
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    around = surroundings(options.nodes)
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, load average {around['load_average']:.2f} before")
    print(f"{options.nodes} simulated nodes of one worker; medians of {plan.rounds} rounds")
    figures: list[Figure] = []
    status = 0
    try:
        with limited(plan.limit):
            figures.extend(bench(options.rows, options.nodes, plan))
    except (NoClusterError, WrongResultError, TimeoutError) as error:
        status = fail(error)
    if figures:
        report(options, around, figures, nodes=options.nodes, rounds=plan.rounds, ray=importlib.metadata.version("ray"))
    return status


if __name__ == "__main__":
    sys.exit(main())
