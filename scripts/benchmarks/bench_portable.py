"""What the branches for other systems than Linux cost, on Linux: two programs do the same in turns, one in each mode.

A process takes its branches once, when it imports mpgrad, so that each mode has a program of its own, and pools in it.

    this program ──case──► MPGRAD_PORTABLE=0 ──seconds──► figures
                 ──case──► MPGRAD_PORTABLE=1 ──seconds──► figures, and the ratio of a round

python scripts/benchmarks/bench_portable.py --processes 2 --json portable.json
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import at_least_1, batch_of, calibrated, limited, python_item, surroundings, timed, tiny_items
from common import one_backward as backward_of_all
from figures import Figure, add_options, fail, interleaved, median_figure, print_figures, ratios, report
from jobs import PYTHON, backward_at_once, one_backward
from losses import copied, doubled, python_loss
from speed.plan import Plan as PlanOfSpeed
from speed.plan import Pools
from speed.processes import MEMORY, START, run_program
from torch import Tensor

EPILOG = "exit status: 0 if everything was measured, 1 if the time is up or a program died, 2 for wrong arguments"
MODES = {"Linux's own": "0", "portable": "1"}  # MPGRAD_PORTABLE

ITEM_SECONDS = 1e-3
READERS = 8  # calls that read one number each of a large tensor
PATIENCE = 5.0  # seconds, fewer than `limited` leaves


@dataclass(frozen=True)
class Plan:
    rounds: int = 21
    starts: int = 5  # rounds of fresh programs
    tiny_items: int = 1000
    items: int = 300
    tensors: int = 32
    largest_bytes: int = 16_000_000
    read_bytes: int = 64_000_000
    further_workers: int = 4
    limit: int = 1200


QUICK = Plan(
    rounds=1,
    starts=1,
    tiny_items=20,
    items=20,
    tensors=4,
    largest_bytes=1_000_000,
    read_bytes=1_000_000,
    further_workers=1,
    limit=120,
)


# --- what both programs do


class Cases:
    """Each runs once, and gives its seconds."""

    def __init__(self, pools: Pools, plan: Plan, steps: int) -> None:
        self._pools = pools
        self._tiny = tiny_items(plan.tiny_items)
        self._items = [python_item(steps) for _ in range(plan.items)]
        self._loss = partial(python_loss, steps=steps)
        sizes = [plan.largest_bytes * (number + 1) // plan.tensors for number in range(plan.tensors)]
        self._large = [torch.rand(size // 4) for size in sizes]
        self._read = torch.rand(plan.read_bytes // 4)
        self.named: Mapping[str, Callable[[], float]] = {
            f"{plan.tiny_items} tiny calls, x * 2, forward and backward": self._tiny_calls,
            f'{plan.items} items of 1 ms, forward and backward, "keep"': partial(self._of_a_millisecond, "keep"),
            f'{plan.items} items of 1 ms, forward and backward, "ahead"': partial(self._of_a_millisecond, "ahead"),
            f"{plan.tensors} tensors of up to {plan.largest_bytes / 1e6:g} MB, x.clone(), forward and backward": self._copies,
            f"{plan.read_bytes / 1e6:g} MB captured, {READERS} calls that read one number": self._captured,
            f"{plan.read_bytes / 1e6:g} MB as an argument, {READERS} calls that read one number": self._argument,
        }

    def _tiny_calls(self) -> float:
        return timed(partial(backward_of_all, self._pools.keep.map, doubled), batch_of(self._tiny))

    def _of_a_millisecond(self, graphs: str) -> float:
        pool = {"keep": self._pools.keep, "ahead": self._pools.ahead}[graphs]
        return timed(partial(one_backward, pool.map, self._loss), batch_of(self._items))

    def _copies(self) -> float:
        return timed(partial(backward_of_all, self._pools.keep.map, copied), batch_of(self._large))

    def _captured(self) -> float:
        return self._reading(partial(number_in, self._read.clone()), range(READERS))

    def _argument(self) -> float:
        large = self._read.clone()  # in memory of our own, as what a program has just computed
        return self._reading(number_of, [(large, index) for index in range(READERS)])

    def _reading(self, function: Callable[..., float], arguments: Sequence[object]) -> float:
        began = time.perf_counter()
        self._pools.keep.map(function, arguments, chunksize=1)
        return time.perf_counter() - began


def number_in(tensor: Tensor, index: int) -> float:
    return float(tensor[index])


def number_of(argument: tuple[Tensor, int]) -> float:
    return number_in(*argument)


def run_when_told(end: Connection, processes: int, plan: Plan, steps: int) -> None:
    """The program of a mode: runs the case that it is told, until it is told None."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        cases = Cases(Pools(processes, stack), plan, steps).named
        end.send(list(cases))
        while (name := end.recv()) is not None:
            end.send(cases[name]())


# --- the two programs


@contextlib.contextmanager
def mode(portable: str) -> Iterator[None]:
    """Programs that are started in the block take these branches."""
    before = os.environ.copy()
    os.environ["MPGRAD_PORTABLE"] = portable
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Program:
    """Raises ChildProcessError where it should answer and has died; what it died of stands on the terminal."""

    def __init__(self, portable: str, processes: int, plan: Plan, steps: int) -> None:
        self._portable = portable
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=run_when_told, args=(theirs, processes, plan, steps))
        with mode(portable):
            self._process.start()
        theirs.close()  # else its death would not be the end of the pipe
        self.cases: list[str] = self._answer()

    def seconds(self, case: str) -> float:
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._end.send(case)
        return float(self._answer())

    def _answer(self) -> Any:
        try:
            return self._end.recv()
        except EOFError:
            raise ChildProcessError(f"the program died (MPGRAD_PORTABLE: {self._portable})") from None

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died, which whoever waited for its answer has heard
            self._end.send(None)
        self._process.join(PATIENCE)
        self._process.kill()  # where it still is in a case, because the time of the whole run is up


def bench_calls(processes: int, plan: Plan) -> Iterator[Figure]:
    steps = calibrated(PYTHON, ITEM_SECONDS, backward_at_once)
    with contextlib.ExitStack() as stack:
        programs = {}
        for name, portable in MODES.items():
            programs[name] = Program(portable, processes, plan, steps)
            stack.callback(programs[name].end)
        for case in programs["portable"].cases:
            turns = {name: partial(program.seconds, case) for name, program in programs.items()}
            yield from compared(case, interleaved(turns, plan.rounds), "ms", 1e3)


def bench_processes(processes: int, plan: Plan) -> Iterator[Figure]:
    fresh = PlanOfSpeed(processes=processes, further_workers=plan.further_workers)

    def run(program: str, portable: str) -> list[float]:
        with mode(portable):
            found: list[float] = run_program(program, fresh)
        return found

    starts = interleaved({name: partial(run, START, portable) for name, portable in MODES.items()}, plan.starts, warm_ups=0)
    firsts = {name: [first for _, first, _ in rounds] for name, rounds in starts.items()}
    furthers = {name: [further for _, _, further in rounds] for name, rounds in starts.items()}
    yield from compared("from Pool() to the first result in a fresh program", firsts, "s", 1)
    yield from compared("each further worker, until it has answered", furthers, "ms", 1e3)
    memory = {name: run(MEMORY, portable) for name, portable in MODES.items()}
    yield from compared("memory (USS) of a further idle worker", memory, "MiB", 1)


def compared(row: str, found: Mapping[str, Sequence[float]], unit: str, factor: float) -> Iterator[Figure]:
    for name, values in found.items():
        yield median_figure(row, name, [factor * value for value in values], unit)
    yield median_figure(row, "portable over Linux's own", ratios(found["portable"], found["Linux's own"]), "x")


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    around = surroundings(options.processes)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures: list[Figure] = []
    try:
        with limited(plan.limit):
            for bench in (bench_calls, bench_processes):
                found = list(bench(options.processes, plan))
                print_figures(found)
                figures += found
    except (OSError, subprocess.SubprocessError) as error:  # TimeoutError and ChildProcessError are OSErrors
        return fail(error)
    report(options, around, figures, rounds=plan.rounds)
    return 0


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--processes", type=at_least_1, default=2, metavar="N", help="workers (default: %(default)s)")
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
