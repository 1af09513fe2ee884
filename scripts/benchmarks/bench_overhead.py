"""What a pool costs and what it gains: mpgrad beside the serial loop and torch.multiprocessing.Pool, in one run.

Times on a shared machine are worth little alone, so contenders take turns in a random order, every figure is the
median over such rounds, and ratios and differences are taken within a round. Each contender gives the serial loop's
values and gradients, or nothing is timed. torch.multiprocessing.Pool has no gradients; beside mpgrad stands the best
that is written by hand on top of it: one call that runs forward and backward in the worker, possible only where the
gradient of the output is known beforehand.

    items, made anew ──► | clock on ──► contender ──► values, gradients ──► dropped ──► clock off |

    python scripts/bench_overhead.py --processes 2
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import itertools
import json
import math
import multiprocessing.pool
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.multiprocessing
from losses import copied, doubled, op_bound, python_bound
from torch import Tensor

import mpgrad

EPILOG = "exit status: 0 if everything was measured, 1 if a contender is wrong or the time is up, 2 for wrong arguments"

OVERHEAD_TO_REACH = 60.0  # us an item, forward and backward, tiny tensors, 2 cores
SPEED_UP_TO_REACH = 1.8  # at 1 ms an item, 2 cores

SHORTEST_ITEM, LONGEST_ITEM = 10, 200  # floats of a tiny tensor
MOST_ITEMS = 400  # in one run
MOST_FILES = 100  # items as torch.multiprocessing tensors: three open files each, and many systems allow 1,024
WARM_UPS = 2  # untimed rounds; pools learn there what a call costs
SLOW_ROUNDS, SLOWEST_ROUNDS = 5, 3  # at most, with large tensors and with fresh processes
FIRST_RESULT_LIMIT = 60  # seconds

Function = Callable[[Tensor], Tensor]
Loop = Callable[[Function, list[Tensor]], Sequence[Tensor]]  # `serial`, or a pool's `map`
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Record = dict[str, Any]


# --- the contenders


class Batch(NamedTuple):
    """What one run gets: leaves that require gradients, and ones for the outputs, which have the items' shapes."""

    items: list[Tensor]
    ones: list[Tensor]


class Outcome(NamedTuple):
    values: Sequence[Tensor]
    gradients: Sequence[Tensor | None]  # of the items; empty if only forward was asked for


class Contender(NamedTuple):
    name: str
    run: Callable[[Batch], Outcome]
    most_items: int = MOST_ITEMS


def serial(function: Function, items: list[Tensor]) -> list[Tensor]:
    return [function(item) for item in items]


def forward(loop: Loop, function: Function, batch: Batch) -> Outcome:
    with torch.no_grad():
        return Outcome(loop(function, batch.items), [])


def forward_with_graph(loop: Loop, function: Function, batch: Batch) -> Outcome:
    return Outcome(loop(function, batch.items), [])


def one_backward(loop: Loop, function: Function, batch: Batch) -> Outcome:
    values = loop(function, batch.items)
    torch.autograd.backward(values, batch.ones)
    return Outcome(values, [item.grad for item in batch.items])


def backward_at_once(function: Function, batch: Batch) -> Outcome:
    values = []
    for item, one in zip(*batch, strict=True):
        value = function(item)
        torch.autograd.backward(value, one)
        values.append(value.detach())
    return Outcome(values, [item.grad for item in batch.items])


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


# --- the clock


class Measured(NamedTuple):
    name: str
    seconds: list[float]  # an item, one figure a round

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def beyond(self, other: Measured) -> float:
        """Seconds an item more than `other`."""
        return statistics.median(mine - its for mine, its in zip(self.seconds, other.seconds, strict=True))

    def speed_up(self, other: Measured) -> float:
        """How many times faster than `other`."""
        return statistics.median(its / mine for mine, its in zip(self.seconds, other.seconds, strict=True))

    def record(self) -> Record:
        return {"contender": self.name, "median_us_per_item": 1e6 * self.median, "seconds_per_item": self.seconds}


def batch_of(items: Sequence[Tensor]) -> Batch:
    """Copies: a leaf that has a gradient, or that lies in shared memory since it was sent, would be another item."""
    return Batch([item.clone().requires_grad_() for item in items], [torch.ones_like(item) for item in items])


def measured(contenders: Sequence[Contender], items: Sequence[Tensor], rounds: int) -> list[Measured]:
    check(contenders, items)
    results = [Measured(contender.name, []) for contender in contenders]
    turns = list(zip(contenders, results, strict=True))
    shuffle = random.Random(0).shuffle
    for number in range(-WARM_UPS, rounds):
        shuffle(turns)
        for contender, result in turns:
            own = items[: contender.most_items]
            seconds = timed(contender.run, batch_of(own)) / len(own)
            if number >= 0:
                result.seconds.append(seconds)
    return results


def timed(run: Callable[[Batch], Outcome], batch: Batch) -> float:
    """Seconds, the dropping of values and graphs included: a training loop pays for that too."""
    began = time.perf_counter()
    outcome = run(batch)
    del outcome
    return time.perf_counter() - began


def check(contenders: Sequence[Contender], items: Sequence[Tensor]) -> None:
    """Raise WrongResultError unless each contender gives what the first one gives."""
    reference, *others = contenders
    expected = reference.run(batch_of(items))
    for contender in others:
        own = items[: contender.most_items]
        outcome = contender.run(batch_of(own))
        for kind, given, right in zip(("value", "gradient"), outcome, expected, strict=True):
            try:
                torch.testing.assert_close(list(given), list(right[: len(own)]))
            except AssertionError as error:
                raise WrongResultError(f"{contender.name}: a {kind} differs from the serial loop's") from error


class WrongResultError(Exception):
    """A contender computed something else than the serial loop."""


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


def tiny_items(count: int) -> list[Tensor]:
    """The same lengths in every run."""
    return [torch.randn(length) for length in random.Random(0).choices(range(SHORTEST_ITEM, LONGEST_ITEM + 1), k=count)]


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


@dataclass(frozen=True)
class Work:
    """A function and a kind of item, of a `size` that sets how long a call takes."""

    name: str
    function: Callable[[int], Function]
    item: Callable[[int], Tensor]


def python_item(steps: int) -> Tensor:
    return torch.randn(random.randint(SHORTEST_ITEM, LONGEST_ITEM))


def op_item(width: int) -> Tensor:
    return torch.randn(width, width) / math.sqrt(width)


WORKS = [
    Work("Python-bound", lambda steps: partial(python_bound, steps=steps), python_item),
    Work("op-bound", lambda width: op_bound, op_item),
]


def calibrated(work: Work, seconds: float, run: Callable[[Function, Batch], Outcome] = backward_at_once) -> int:
    """The size at which forward and backward right after it take about so many seconds in this process."""

    def own_seconds(size: int) -> float:
        one = partial(run, work.function(size))
        return min(timed(one, batch_of([work.item(size)])) for _ in range(5))

    size = 1
    while own_seconds(2 * size) < seconds:
        size *= 2
    for step in range(1, 5):  # to a sixteenth
        larger = size + max(1, 2 ** (size.bit_length() - 1 - step))
        size = larger if own_seconds(larger) < seconds else size
    return size


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


def surroundings(processes: int) -> Record:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processes": processes,
        "cpu": cpu_model(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("mpgrad", "numpy", "torch")},
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


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


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds; end the process if it then does not leave the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        raise TimeoutError(f"the run took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 ({text})")
    return number


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
