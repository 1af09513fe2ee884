"""What a pool costs and what it gains: mpgrad beside the serial loop and torch.multiprocessing.Pool, in one run.

Times on a shared machine are worth little alone, so contenders take turns in a random order, every figure is the
median over such rounds, and ratios and differences are taken within a round. Each contender gives the serial loop's
values and gradients, or nothing is timed. torch.multiprocessing.Pool has no gradients; beside mpgrad stands the best
that is written by hand on top of it: one call that runs forward and backward in the worker, possible only where the
gradient of the output is known beforehand.

    items, made anew ──► | clock on ──► contender ──► values, gradients ──► dropped ──► clock off |

    python scripts/benchmarks/bench_overhead.py --processes 2
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing.pool
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from common import (
    LONGEST_ITEM,
    MOST_ITEMS,
    SHORTEST_ITEM,
    Batch,
    Contender,
    Function,
    Loop,
    Measured,
    Outcome,
    Record,
    Work,
    WrongResultError,
    at_least_1,
    backward_at_once,
    calibrated,
    forward,
    limited,
    measured,
    one_backward,
    op_item,
    python_item,
    serial,
    surroundings,
    tiny_items,
)
from losses import copied, doubled, op_bound, python_bound
from torch import Tensor

import mpgrad

EPILOG = "exit status: 0 if everything was measured, 1 if a contender is wrong or the time is up, 2 for wrong arguments"

OVERHEAD_TO_REACH = 60.0  # us an item, forward and backward, tiny tensors, 2 cores
SPEED_UP_TO_REACH = 1.8  # at 1 ms an item, 2 cores

MOST_FILES = 100  # items as torch.multiprocessing tensors: three open files each, and many systems allow 1,024
SLOW_ROUNDS, SLOWEST_ROUNDS = 5, 3  # at most, with large tensors and with fresh processes
FIRST_RESULT_LIMIT = 60  # seconds

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


# --- the contenders


def forward_with_graph(loop: Loop, function: Function, batch: Batch) -> Outcome:
    return Outcome(loop(function, batch.items), [])


class ByHand:
    """What is written by hand around torch.multiprocessing.Pool, with tensors or with numpy arrays in its messages."""

    def __init__(self, pool: multiprocessing.pool.Pool) -> None:
        self._pool = pool

    def forward_tensors(self, function: Function, batch: Batch) -> Outcome:
        return Outcome(self._pool.map(function, [item.detach() for item in batch.items]), [])

    def forward_arrays(self, function: Function, batch: Batch) -> Outcome:
        values = self._pool.map(partial(array_of, function), [item.detach().numpy() for item in batch.items])
        return Outcome([torch.from_numpy(value) for value in values], [])

    def backward_tensors(self, function: Function, batch: Batch) -> Outcome:
        pairs = self._pool.map(partial(value_and_gradient, function), [item.detach() for item in batch.items])
        return Outcome([value for value, _ in pairs], [gradient for _, gradient in pairs])

    def backward_arrays(self, function: Function, batch: Batch) -> Outcome:
        pairs = self._pool.map(partial(array_and_gradient, function), [item.detach().numpy() for item in batch.items])
        return Outcome([torch.from_numpy(value) for value, _ in pairs], [torch.from_numpy(grad) for _, grad in pairs])


def array_of(function: Function, item: Array) -> Array:
    value: Array = function(torch.from_numpy(item)).numpy()
    return value


def value_and_gradient(function: Function, item: Tensor) -> tuple[Tensor, Tensor]:
    leaf = item.requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach(), gradient


def array_and_gradient(function: Function, item: Array) -> tuple[Array, Array]:
    value, gradient = value_and_gradient(function, torch.from_numpy(item))
    return value.numpy(), gradient.numpy()


class Pools(NamedTuple):
    mpgrad: mpgrad.Pool
    by_hand: ByHand

    def forward(self, function: Function) -> list[Contender]:
        return [
            Contender("serial", partial(forward, serial, function)),
            Contender("mpgrad", partial(forward, self.mpgrad.map, function)),
            Contender("torch arrays", partial(self.by_hand.forward_arrays, function)),
            Contender("torch tensors", partial(self.by_hand.forward_tensors, function), MOST_FILES),
        ]

    def forward_with_graph(self, function: Function) -> list[Contender]:
        return [
            Contender("serial", partial(forward_with_graph, serial, function)),
            Contender("mpgrad", partial(forward_with_graph, self.mpgrad.map, function)),
        ]

    def backward(self, function: Function) -> list[Contender]:
        return [
            Contender("serial", partial(one_backward, serial, function)),
            Contender("serial, at once", partial(backward_at_once, function)),
            Contender("mpgrad", partial(one_backward, self.mpgrad.map, function)),
            Contender("torch arrays", partial(self.by_hand.backward_arrays, function)),
            Contender("torch tensors", partial(self.by_hand.backward_tensors, function), MOST_FILES),
        ]


LEGEND = f"""\
contenders, forward / forward and backward
  serial           [function(x) for x in items] / one backward over all results
  serial, at once  each item's backward right after its forward, which leaves its graph in the cache
  mpgrad           mpgrad.Pool.map / one backward over all results
  torch arrays     torch.multiprocessing.Pool.map of detached items, sent as numpy arrays / by hand: the worker runs
                   forward and backward with a gradient of ones that it makes itself, and returns (value, gradient)
  torch tensors    the same, sent as torch tensors (one open file a tensor; on {MOST_FILES} items at most)"""


@contextlib.contextmanager
def started_pools(processes: int) -> Iterator[Pools]:
    """Both pools, for all measurements: an idle one costs the others nothing that would show."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(processes, torch.set_num_threads, (1,)) as by_hand, mpgrad.Pool(processes) as pool:
        yield Pools(pool, ByHand(by_hand))


# --- tiny tensors


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    repeats: int = 9
    tiny_items: int = MOST_ITEMS
    work_ms: Sequence[float] = (0.1, 1.0, 10.0)
    work_seconds: float = 0.2  # of a serial run
    megabytes: Sequence[int] = (1, 4, 16, 64)
    megabytes_moved: int = 64  # in a run, if that gives each process an item
    start_ups: Sequence[str] = ("serial", "mpgrad", "torch fork", "torch forkserver", "torch spawn")
    seconds: int = 600  # the whole run is stopped then


QUICK = Plan(1, 20, (1.0,), 0.02, (1,), 2, ("mpgrad",), 120)


def bench_tiny(pools: Pools, plan: Plan) -> list[Record]:
    items = tiny_items(plan.tiny_items)
    print(f"\nx * 2 on {len(items)} items of {SHORTEST_ITEM} to {LONGEST_ITEM} floats, us an item")
    passes = {
        "forward, no gradients": pools.forward(doubled),
        "forward, differentiable": pools.forward_with_graph(doubled),
        "forward and backward": pools.backward(doubled),
    }
    return [tiny_record(name, measured(contenders, items, plan.repeats)) for name, contenders in passes.items()]


def tiny_record(name: str, results: Sequence[Measured]) -> Record:
    own = results[0]
    print_row([f"  {name}", "wall", "beyond serial"])
    for result in results:
        beyond = "" if result is own else f"{1e6 * result.beyond(own):.1f}"
        print_row([f"    {result.name}", f"{1e6 * result.median:.1f}", beyond])
    contenders = [result.record() | {"us_per_item_beyond_serial": 1e6 * result.beyond(own)} for result in results]
    return {"pass": name, "contenders": contenders}


# --- work of some length


WORKS = [
    Work("Python-bound", lambda steps: partial(python_bound, steps=steps), python_item),
    Work("op-bound", lambda width: op_bound, op_item),
]


def bench_work(pools: Pools, plan: Plan, processes: int) -> list[Record]:
    names = [contender.name for contender in pools.backward(doubled)]
    print("\nforward and backward: ms an item, and below it the speed-up over serial (over serial, at once)")
    print("  Python-bound: many times y = sin(y) + x; op-bound: twice y = tanh(y @ x)")
    print_row(["", *names])
    records = []
    for work in WORKS:
        for ms in plan.work_ms:
            size = calibrated(work, ms / 1e3)
            count = min(MOST_ITEMS, max(4 * processes, round(1e3 * plan.work_seconds / ms)))
            items = [work.item(size) for _ in range(count)]
            results = measured(pools.backward(work.function(size)), items, plan.repeats)
            records.append(work_record(f"{work.name}, {ms:g} ms", results, {"size": size, "items": count}))
    return records


def work_record(name: str, results: Sequence[Measured], settings: Record) -> Record:
    one, at_once, *_ = results
    pairs = [(result.speed_up(one), result.speed_up(at_once)) for result in results]
    print_row([f"  {name}", *(f"{1e3 * result.median:.3f}" for result in results)])
    print_row(["", *(f"{over_one:.2f} ({over_best:.2f})" for over_one, over_best in pairs)])
    contenders = [
        result.record() | {"speed_up_over_serial": over_one, "speed_up_over_serial_at_once": over_best}
        for result, (over_one, over_best) in zip(results, pairs, strict=True)
    ]
    return {"work": name, **settings, "contenders": contenders}


# --- large tensors


def bench_transfer(pools: Pools, plan: Plan, processes: int) -> list[Record]:
    records = []
    for name, contenders in (("forward", pools.forward(copied)), ("forward and backward", pools.backward(copied))):
        print(f"\nx.clone(), {name}: MB of items a second (1 MB = 2 ** 20 bytes)")
        print_row(["", *(contender.name for contender in contenders)])
        for size in plan.megabytes:
            items = [torch.rand(size * 2**18) for _ in range(max(processes, plan.megabytes_moved // size))]
            results = measured(contenders, items, min(plan.repeats, SLOW_ROUNDS))
            print_row([f"  {len(items)} items of {size} MB", *(f"{size / result.median:.0f}" for result in results)])
            rows = [result.record() | {"megabytes_per_second": size / result.median} for result in results]
            records.append({"pass": name, "megabytes": size, "items": len(items), "contenders": rows})
    return records


# --- start-up

PROGRAM = """
import time
import functools, torch, torch.multiprocessing
{imports}
seconds = [time.monotonic()]
{forward}
seconds.append(time.monotonic())
{backward}
seconds.append(time.monotonic())
print(*seconds)
"""


class Start(NamedTuple):
    """What a fresh process executes until it has a first result, then until it has a first gradient."""

    imports: str
    forward: str
    backward: str

    def seconds(self) -> list[float]:
        """Of each part, the first one with the start of Python."""
        program = [sys.executable, "-c", PROGRAM.format(**self._asdict())]
        began = time.monotonic()  # one clock for all processes of a machine
        ended = subprocess.run(program, stdout=subprocess.PIPE, check=True, text=True, timeout=FIRST_RESULT_LIMIT)
        moments = [began, *map(float, ended.stdout.split())]
        return [after - before for before, after in itertools.pairwise(moments)]


def starts(processes: int) -> dict[str, Start]:
    leaf = "torch.ones(3, requires_grad=True)"
    mapped = f"pool = mpgrad.Pool({processes})\n[result] = pool.map(torch.neg, [{leaf}])"
    return {
        "serial": Start("", f"result = torch.neg({leaf})", "result.sum().backward()"),
        "mpgrad": Start("import mpgrad", mapped, "result.sum().backward()"),
        **{f"torch {method}": torch_start(method, processes) for method in ("fork", "forkserver", "spawn")},
    }


def torch_start(method: str, processes: int) -> Start:
    context = f"torch.multiprocessing.get_context({method!r})"
    preload = f"{context}.set_forkserver_preload(['torch'])\n" if method == "forkserver" else ""
    forward = f"{preload}pool = {context}.Pool({processes})\npool.map(torch.neg, [torch.ones(3)])"
    gradient = "functools.partial(torch.autograd.functional.jacobian, torch.neg)"
    return Start("", forward, f"pool.map({gradient}, [torch.ones(3)])")


def bench_start_up(plan: Plan, processes: int) -> list[Record]:
    print("\nfresh Python process, one pool: s until all is imported, + until a first result, + until a first gradient")
    print_row(["", "imports", "+ result", "+ gradient", "= in all"])
    runs: dict[str, list[list[float]]] = {name: [] for name in plan.start_ups}
    for _ in range(min(plan.repeats, SLOWEST_ROUNDS)):
        for name in random.sample(plan.start_ups, len(plan.start_ups)):
            runs[name].append(starts(processes)[name].seconds())
    return [start_record(name, seconds) for name, seconds in runs.items()]


def start_record(name: str, runs: Sequence[Sequence[float]]) -> Record:
    medians = [statistics.median(part) for part in (*zip(*runs, strict=True), [sum(run) for run in runs])]
    print_row([f"  {name}", *(f"{median:.3f}" for median in medians)])
    parts = ("imports", "first_result", "first_gradient", "in_all")
    return {"contender": name, "median_seconds": dict(zip(parts, medians, strict=True)), "seconds_per_part": runs}


# --- the whole


def print_row(cells: Sequence[str]) -> None:
    first, *others = cells
    print((f"{first:26}" + "".join(f"{cell:>17}" for cell in others)).rstrip(), flush=True)


def print_surroundings(around: Record, plan: Plan) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    print(f"{versions}, Python {around['python']}, {around['date']}")
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, {around['memory_gib']} GiB, {around['system']}")
    print(f"{around['processes']} processes of one intra-op thread; load average {around['load_average']:.2f} before")
    rounds = [min(plan.repeats, most) for most in (plan.repeats, SLOW_ROUNDS, SLOWEST_ROUNDS)]
    print("medians of {} rounds, the contenders in turns (large tensors: {}, fresh processes: {})".format(*rounds))
    print("to reach with 2 processes on 2 cores, forward and backward:", end=" ")
    print(f"{OVERHEAD_TO_REACH:g} us an item beyond serial on tiny tensors; speed-up {SPEED_UP_TO_REACH:g} at 1 ms")
    print(f"\n{LEGEND}")


def bench(plan: Plan, processes: int) -> Record:
    around = surroundings(processes)
    print_surroundings(around, plan)
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)  # as the workers have
    with started_pools(processes) as pools:
        record = {
            "tiny": bench_tiny(pools, plan),
            "work": bench_work(pools, plan, processes),
            "transfer": bench_transfer(pools, plan, processes),
        }
    record["start_up"] = bench_start_up(plan, processes)
    to_reach = {"us_per_item_beyond_serial": OVERHEAD_TO_REACH, "speed_up_at_1_ms": SPEED_UP_TO_REACH}
    return {"surroundings": around, "repeats": plan.repeats, "to_reach": to_reach, **record}


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=at_least_1, default=cpus, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least_1, metavar="N", help="timed rounds (default: 9, quick: 1)")
    parser.add_argument("--quick", action="store_true", help="a little of everything, only to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("bench_overhead.json"), metavar="FILE", help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    if options.repeats is not None:
        plan = replace(plan, repeats=options.repeats)
    try:
        with limited(plan.seconds):
            record = bench(plan, options.processes)
    except (WrongResultError, TimeoutError) as error:
        print(f"bench_overhead.py: {error}", file=sys.stderr)
        return 1
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nall rounds: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
