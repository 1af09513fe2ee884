"""An asynchronous front end for CPU work: how soon it returns, when the results are there, what is in flight meanwhile.

PyTorch's front end queues work for a GPU and goes on; on a CPU it waits for every operation. `mpgrad.Pool.submit` returns at
once, and takes futures as arguments, so a whole graph of calls is handed over before its first result is there. Gradients flow
through it as through the serial program. Here some independent chains of matrix products, x <- x @ w, are written once

    for every chain: w = submit(handed_over, w)
    for every step: for every chain: x = submit(product, x, w)     front end returns | results are there | gradients are there

and run by front ends that compute at once (numpy, torch) and by one that queues (a pool). `submit` copies the tensors that it
is given, so that the caller may go on writing to them; a future is not copied, so w is handed over once, as it would be to a
GPU. A call is in flight from its submission until its future is done, as done callbacks note it. Every timed run is compared
with torch's serial one.

A queue does not make the machine larger: torch's own threads, which share one product out, are a row of their own, and need no
copies. Where a row of several threads or workers kept about one CPU busy, something else had the machine: run it again.

    python scripts/benchmarks/async_backend.py --chains 4 --length 8 --size 512
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy has no setter, its library reads this when it is loaded

import psutil
import torch
from common import Record, WrongResultError, at_least_1, surroundings
from figures import file_to_write, picture_to_write
from torch import Tensor

import mpgrad

EPILOG = "exit status: 0 if everything was measured, 1 if a front end computes something else, 2 for wrong arguments"

TOLERANCE = 1e-12  # of the largest entry; rounding leaves 1e-15, in float64 and over some tens of products
WARM_UPS = 1  # untimed rounds; the pool gets its shared memory there
NARROW = 1e-3  # of a picture's width: what lasts shorter is not to be seen

PASSES = {"forward": False, "forward and backward": True}


@dataclass(frozen=True)
class Plan:
    """How much is computed, and how often."""

    chains: int = 4
    length: int = 8  # products in a chain
    size: int = 512  # rows and columns of a matrix, float64
    repeats: int = 5

    @property
    def calls(self) -> int:
        return self.chains * (1 + self.length)


QUICK = Plan(chains=3, length=4, size=16, repeats=1)


def handed_over(matrix: Any) -> Any:
    return matrix


def product(x: Any, w: Any) -> Any:
    return x @ w


# --- the front ends


class FrontEnd(Protocol):
    """Takes calls; a handle of one may be an argument of another."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Any: ...

    def value(self, handle: Any) -> Any: ...

    def in_flight(self) -> int:
        """Calls that are not done at this moment."""

    def spans(self) -> list[tuple[float, float]]:
        """Of every call: when it was submitted and when it was done, once all are."""


class AtOnce:
    """What numpy, and torch on a CPU, do: a call is done when it returns. Its handle is its value."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        value = function(*args)
        self._spans.append((began, time.perf_counter()))
        return value

    def value(self, handle: Any) -> Any:
        return handle

    def in_flight(self) -> int:
        return 0

    def spans(self) -> list[tuple[float, float]]:
        return self._spans


class Queued:
    """What a pool does: a call is done when its future is. Its handle is that future."""

    def __init__(self, pool: mpgrad.Pool) -> None:
        self._pool = pool
        self._futures: list[mpgrad.DifferentiableFuture] = []
        self._began: list[float] = []
        # from the thread that delivers; a future is done a moment before its callbacks run, so the reader may have to wait
        self._ended: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], *args: Any) -> mpgrad.DifferentiableFuture:
        number = len(self._began)
        self._began.append(time.perf_counter())
        future = self._pool.submit(function, *args)
        future.add_done_callback(lambda future: self._ended.put((number, time.perf_counter())))
        self._futures.append(future)
        return future

    def value(self, handle: mpgrad.DifferentiableFuture) -> Any:
        return handle.result()

    def in_flight(self) -> int:
        return sum(not future.done() for future in self._futures)

    def spans(self) -> list[tuple[float, float]]:
        ended = dict(self._ended.get() for _ in self._began)
        return [(began, ended[number]) for number, began in enumerate(self._began)]


class Contender(NamedTuple):
    name: str
    front_end: Callable[[], FrontEnd]
    threads: int = 1  # of torch, in this process
    arrays: bool = False  # of numpy, which has no gradients


def contenders(pool: mpgrad.Pool, cpus: int) -> list[Contender]:
    """The first one is what the others are compared with."""
    return [
        Contender("torch, 1 thread", AtOnce),
        Contender("numpy, 1 thread", AtOnce, arrays=True),
        Contender(f"torch, all {cpus} threads", AtOnce, threads=cpus),
        Contender(f"pool, {pool.processes} x 1 thread", lambda: Queued(pool)),
    ]


# --- one run


class Chains(NamedTuple):
    """Where the chains start, and what each is multiplied by in every step; arrays or tensors."""

    starts: list[Any]
    factors: list[Any]

    @classmethod
    def drawn(cls, plan: Plan) -> Chains:
        generator = torch.Generator().manual_seed(0)

        def drawn() -> Tensor:
            return torch.randn(plan.size, plan.size, dtype=torch.float64, generator=generator)

        # a random matrix of this scale has eigenvalues of about 1 at most: long chains neither explode nor vanish
        return cls([drawn() for _ in range(plan.chains)], [drawn() / math.sqrt(plan.size) for _ in range(plan.chains)])

    def copied(self, arrays: bool, with_gradients: bool) -> Chains:
        """Leaves of a run's own: they have no gradients yet, and no run finds them in its caches before others do."""
        if arrays:
            return Chains(*([matrix.clone().numpy() for matrix in matrices] for matrices in self))
        return Chains(*([matrix.clone().requires_grad_(with_gradients) for matrix in matrices] for matrices in self))


class Outcome(NamedTuple):
    values: list[Tensor]
    gradients: list[Tensor]  # of the starts, then of the factors; none if only forward was asked for


@dataclass(frozen=True)
class Run:
    """Seconds since the first submission; CPU seconds of this process and the workers."""

    front_end: float
    results: float
    gradients: float | None
    in_flight_at_return: int
    calls: list[tuple[float, float]]  # submitted, done
    cpu: float

    @property
    def whole(self) -> float:
        return self.results if self.gradients is None else self.gradients


def submitted(front_end: FrontEnd, chains: Chains, length: int) -> list[Any]:
    """Handles of the chains' ends. Step by step, not chain by chain: what is queued first can begin first."""
    factors = [front_end.submit(handed_over, factor) for factor in chains.factors]
    ends = chains.starts
    for _ in range(length):
        ends = [front_end.submit(product, x, w) for x, w in zip(ends, factors, strict=True)]
    return ends


def timed(contender: Contender, drawn: Chains, length: int, backward: bool, cpu: Callable[[], float]) -> tuple[Run, Outcome]:
    front_end = contender.front_end()
    chains = drawn.copied(contender.arrays, backward)
    ones = [torch.ones_like(start) for start in drawn.starts]
    leaves = [*chains.starts, *chains.factors]
    with torch.set_grad_enabled(backward), intra_op_threads(contender.threads):
        cpu_before = cpu()
        began = time.perf_counter()
        handles = submitted(front_end, chains, length)
        returned = time.perf_counter()
        in_flight = front_end.in_flight()
        values = [front_end.value(handle) for handle in handles]
        there = ended = time.perf_counter()
        if backward:
            torch.autograd.backward(values, ones)
            ended = time.perf_counter()
        cpu_after = cpu()
    calls = [(submission - began, done - began) for submission, done in front_end.spans()]
    gradients = ended - began if backward else None
    run = Run(returned - began, there - began, gradients, in_flight, calls, cpu_after - cpu_before)
    return run, Outcome([torch.as_tensor(value).detach() for value in values], [leaf.grad for leaf in leaves if backward])


@contextlib.contextmanager
def intra_op_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest_difference(name: str, outcome: Outcome, expected: Outcome) -> float:
    """Relative to the largest entry of a matrix.

    Raises:
        WrongResultError: it is no rounding.
    """
    worst = 0.0
    for kind, given, right in zip(("value", "gradient"), outcome, expected, strict=True):
        for number, (ours, theirs) in enumerate(zip(given, right, strict=True)):
            difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            if not difference <= TOLERANCE:  # so written, nan is refused
                raise WrongResultError(
                    f"{name}: {kind} {number} differs from the serial loop's by {difference:.1e} of its largest entry, and "
                    f"rounding by {TOLERANCE:g} at most; please report it, with the arguments of this run"
                )
            worst = max(worst, difference)
    return worst


# --- all runs


@dataclass
class Row:
    """One contender's runs in one pass, in the order of the rounds."""

    name: str
    runs: list[Run] = field(default_factory=list)
    difference: float = 0.0

    def median(self, part: str) -> float:
        return float(statistics.median(getattr(run, part) for run in self.runs))

    @property
    def usual(self) -> Run:
        """The run of median length."""
        return sorted(self.runs, key=lambda run: run.whole)[(len(self.runs) - 1) // 2]

    @property
    def mean_in_flight(self) -> float:
        """Over the time until the results are there, in the usual run."""
        return sum(done - submission for submission, done in self.usual.calls) / self.usual.results

    @property
    def most_in_flight(self) -> int:
        return max(count for _, count in in_flight_over_time(self.usual.calls))

    @property
    def cpus_busy(self) -> float:
        """Over all runs: the system counts the workers' time in steps of 10 ms."""
        return sum(run.cpu for run in self.runs) / sum(run.whole for run in self.runs)

    def speed_up(self, other: Row) -> float:
        return statistics.median(its.whole / mine.whole for mine, its in zip(self.runs, other.runs, strict=True))

    def record(self, other: Row) -> Record:
        return {
            "contender": self.name,
            "front_end_ms": 1e3 * self.median("front_end"),
            "results_ms": 1e3 * self.median("results"),
            **({} if self.runs[0].gradients is None else {"gradients_ms": 1e3 * self.median("gradients")}),
            "speed_up": self.speed_up(other),
            "cpus_busy": self.cpus_busy,
            "in_flight_at_return": self.usual.in_flight_at_return,
            "most_in_flight": self.most_in_flight,
            "mean_in_flight": self.mean_in_flight,
            "largest_difference": self.difference,
            "in_flight": in_flight_over_time(self.usual.calls),  # (seconds, calls) of the usual run
            "seconds": [[run.front_end, run.results, run.gradients] for run in self.runs],
        }


def in_flight_over_time(calls: Sequence[tuple[float, float]]) -> list[tuple[float, int]]:
    """Moments in seconds, and how many calls are in flight from each on; the last number is 0."""
    events = sorted([*((submission, 1) for submission, _ in calls), *((done, -1) for _, done in calls)])
    return list(zip((moment for moment, _ in events), itertools.accumulate(step for _, step in events), strict=True))


def measured(each: Sequence[Contender], plan: Plan, cpu: Callable[[], float]) -> dict[str, list[Row]]:
    """All passes of all contenders in turns, in an order that is drawn anew in every round: the machine may be shared."""
    drawn = Chains.drawn(plan)
    run_of = functools.partial(timed, drawn=drawn, length=plan.length, cpu=cpu)
    expected = {name: run_of(each[0], backward=backward)[1] for name, backward in PASSES.items()}
    rows: dict[str, list[Row]] = {name: [] for name in PASSES}
    turns = []
    for name, backward in PASSES.items():
        for contender in each:
            if not (backward and contender.arrays):
                rows[name].append(Row(contender.name))
                turns.append((contender, name, rows[name][-1]))
    shuffle = random.Random(0).shuffle
    for number in range(-WARM_UPS, plan.repeats):
        shuffle(turns)
        for contender, name, row in turns:
            run, outcome = run_of(contender, backward=PASSES[name])
            row.difference = max(row.difference, largest_difference(contender.name, outcome, expected[name]))
            if number >= 0:
                row.runs.append(run)
    return rows


def cpu_seconds(workers: Sequence[psutil.Process]) -> float:
    times = [worker.cpu_times() for worker in workers]
    return time.process_time() + math.fsum(each.user + each.system for each in times)


def bench(plan: Plan, processes: int) -> tuple[Record, dict[str, list[Row]]]:
    around = surroundings(processes)
    print_surroundings(around, plan)
    with mpgrad.Pool(processes) as pool:
        pool.map(abs, range(4 * processes))  # all have started
        cpu = functools.partial(cpu_seconds, [psutil.Process(worker.pid) for worker in pool.stats().workers])
        rows = measured(contenders(pool, around["usable_cpus"]), plan, cpu)
    for name, each in rows.items():
        print_table(name, each, plan)
    passes = {name: [row.record(each[0]) for row in each] for name, each in rows.items()}
    return {"surroundings": around, "plan": asdict(plan), "tolerance": TOLERANCE, **passes}, rows


# --- what is printed


def print_surroundings(around: Record, plan: Plan) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    print(f"{versions}, Python {around['python']}, {around['date']}")
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, {around['memory_gib']} GiB, {around['system']}")
    print(f"{around['processes']} workers; load average {around['load_average']:.2f} before")
    print(f"{plan.chains} chains of {plan.length} products of {plan.size} x {plan.size} matrices, float64")
    print(f"medians of {plan.repeats} rounds, the front ends in turns; milliseconds from the first submission until ...")
    print(f"in flight: of {plan.calls} calls, in the round of median length", end="; ")
    print("speed-up: of the whole, over the first row", flush=True)


HEADINGS = ("returns, ms", "in flight then", "results, ms", "mean in flight", "gradients, ms", "speed-up", "CPUs busy")


def print_table(name: str, rows: Sequence[Row], plan: Plan) -> None:
    print(f"\n{name}")
    print_cells(["  front end", *(heading for heading in HEADINGS if PASSES[name] or heading != "gradients, ms")])
    for row in rows:
        cells = [f"  {row.name}", f"{1e3 * row.median('front_end'):.2f}", f"{row.usual.in_flight_at_return}"]
        cells += [f"{1e3 * row.median('results'):.2f}", f"{row.mean_in_flight:.1f}"]
        cells += [f"{1e3 * row.median('gradients'):.2f}"] if PASSES[name] else []
        print_cells([*cells, f"{row.speed_up(rows[0]):.2f}", f"{row.cpus_busy:.1f}"])
    pool = rows[-1]
    returned = pool.median("front_end")
    print(
        f"  the pool's front end is back after {1e3 * returned / plan.calls:.2f} ms a call, "
        f"{100 * returned / pool.median('whole'):.1f} % of the whole; "
        f"largest relative difference of any run {max(row.difference for row in rows):.0e}",
        flush=True,
    )


def print_cells(cells: Sequence[str]) -> None:
    first, *others = cells
    print(f"{first:23}" + "".join(f"{cell:>15}" for cell in others))


# --- the picture


def draw(rows: dict[str, list[Row]], plan: Plan, file: Path) -> None:
    """Calls in flight over time, one panel a pass.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"Calls in flight: {plan.chains} chains of {plan.length} products, {plan.size} x {plan.size} matrices")
    figure.supxlabel("dot: the front end returns; square: the gradients are there", fontsize="medium")
    colours = {row.name: f"C{number}" for number, row in enumerate(next(iter(rows.values())))}
    for axes, (name, each) in zip(figure.subplots(1, len(rows)), rows.items(), strict=True):
        longest = max(row.usual.whole for row in each)
        for row in each:
            colour = colours[row.name]
            steps = [(0.0, 0), *visible(in_flight_over_time(row.usual.calls), longest * NARROW)]
            moments, counts = zip(*steps, strict=True)
            axes.step([1e3 * moment for moment in moments], counts, where="post", color=colour, label=row.name)
            axes.plot(1e3 * row.usual.front_end, row.usual.in_flight_at_return, "o", color=colour, clip_on=False)
            if row.usual.gradients is not None:
                axes.plot(1e3 * row.usual.gradients, 0, "s", color=colour, clip_on=False)
        axes.set_title(name)
        axes.set_xlabel("ms since the first submission")
        axes.set_ylabel("calls submitted and not done")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(file, dpi=150)


def visible(steps: Sequence[tuple[float, int]], narrow: float) -> list[tuple[float, int]]:
    """Without steps that end sooner than `narrow` seconds after they begin, such as between two calls of a serial loop."""
    ends = [moment for moment, _ in steps[1:]] + [math.inf]
    return [step for step, end in zip(steps, ends, strict=True) if end - step[0] >= narrow]


# --- the command line


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    for name, what in (
        ("chains", "independent chains"),
        ("length", "products in a chain"),
        ("size", "rows and columns of a matrix"),
        ("repeats", "timed rounds"),
    ):
        default, quick = getattr(Plan(), name), getattr(QUICK, name)
        parser.add_argument(f"--{name}", type=at_least_1, metavar="N", help=f"{what} (default: {default}, quick: {quick})")
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=at_least_1, default=cpus, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a little of everything, only to see that it runs")
    for option, accepted, default in (
        ("--out", file_to_write, "async_backend.json"),
        ("--picture", picture_to_write, "async_backend.png"),
    ):
        parser.add_argument(option, type=accepted, default=default, metavar="FILE", help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    given = {name: number for name in asdict(QUICK) if (number := getattr(options, name)) is not None}
    plan = replace(QUICK if options.quick else Plan(), **given)
    try:
        with intra_op_threads(1):  # as the workers have
            record, rows = bench(plan, options.processes)
    except WrongResultError as error:
        print(f"async_backend.py: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nall rounds: {options.out}")
    try:
        draw(rows, plan, options.picture)
    except ImportError as error:
        print(f"no picture: matplotlib is not installed ({error}); pip install '.[scripts]'")
    else:
        print(f"picture: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
