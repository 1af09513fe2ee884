"""Compares all ways to compute the derivative of every entry of y = routine(c, x) with respect to
c, side by side, in one run.

A loop of `torch.autograd.grad` is the reference. All ways must agree with it, otherwise nothing is
timed. They take turns in a random order, and every figure is a median over such rounds, because a
single measurement on a shared machine is worth little.

Memory is what a fresh process needs beyond what it had. After a small warm-up, the kernel's mark of
the largest resident set (VmHWM) is reset, the way runs once, and the rise above the earlier
resident set is read. In a pool this is summed over the caller and all its workers. Shared pages
count in each process that has touched them.

    python scripts/benchmarks/batch_derivatives.py --processes 2
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from common import (
    Figure,
    WrongResultError,
    add_options,
    at_least_1,
    fail,
    interleaved,
    limited,
    median_figure,
    print_figures,
    print_surroundings,
    report,
    status_bytes,
    surroundings,
)
from torch import Tensor

import mpgrad

EPILOG = (
    "exit status: 0 if everything was measured, 1 if two ways disagree or the time is up, 2 for "
    "wrong arguments"
)

# The routine is Python-bound: it repeats a few operations on as many numbers as there are entries.
STEPS = 20
RTOL = 1e-10  # float64; ways differ in the order of sums
CHUNK = 64  # rows or columns, for ways that limit their memory
SMALL = (5, 2)  # entries and parameters of a warm-up
MIB = 2**20
Size = tuple[int, int]  # entries of y, parameters in c


# --- the routine


def routine(c: Tensor, x: Tensor) -> Tensor:
    """Return the end of a relaxation for each entry j, which x[j] and all parameters drive."""
    drive = torch.cos(torch.outer(x, torch.arange(1, len(c) + 1, dtype=x.dtype))) @ c
    y = x
    for _ in range(STEPS):
        y = torch.tanh(y + drive) + x / 10
    return y


def arguments(size: Size) -> tuple[Tensor, Tensor]:
    entries, parameters = size
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(parameters, dtype=torch.float64, generator=generator) / math.sqrt(parameters)
    return c, torch.randn(entries, dtype=torch.float64, generator=generator)


# --- the ways


class Way(NamedTuple):
    name: str
    # of shape (entries, parameters)
    derivative: Callable[[Tensor, Tensor, mpgrad.Pool | None], Tensor]
    pooled: bool = False


def loop_of_grad(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
    c = c.detach().requires_grad_()
    y = routine(c, x)
    return torch.stack(
        [torch.autograd.grad(y[number], c, retain_graph=True)[0] for number in range(len(y))]
    )


def per_item(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
    """Compute each entry as a separate item, as for y_i = routine(c, x_i) with many x_i that cannot
    be batched."""
    assert pool is not None
    c = c.detach().requires_grad_()
    results = pool.map(lambda entry: routine(c, entry), x.unsqueeze(1).unbind())
    return torch.stack(mpgrad.per_item_grad(results, c))


def jacobian_by(
    mode: str, chunk_size: int | None = None
) -> Callable[[Tensor, Tensor, mpgrad.Pool | None], Tensor]:
    def derivative(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
        found: Tensor = mpgrad.jacobian(
            routine, c, x, argnums=0, mode=mode, pool=pool, chunk_size=chunk_size
        )
        return found

    return derivative


def jacrev(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
    found: Tensor = torch.func.jacrev(routine)(c, x)
    return found


def jacfwd(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
    found: Tensor = torch.func.jacfwd(routine)(c, x)
    return found


def ways() -> list[Way]:
    by_jacobian = {
        "reverse": jacobian_by("reverse"),
        "batched": jacobian_by("batched"),
        f"batched by {CHUNK}": jacobian_by("batched", CHUNK),
        "forward": jacobian_by("forward"),
        f"forward by {CHUNK}": jacobian_by("forward", CHUNK),
        "auto": jacobian_by("auto"),
    }
    return [
        Way("loop of grad", loop_of_grad),
        *(Way(name, derivative) for name, derivative in by_jacobian.items()),
        Way("torch.func.jacrev", jacrev),
        Way("torch.func.jacfwd", jacfwd),
        *(
            Way(f"{name}, pool", derivative, pooled=True)
            for name, derivative in by_jacobian.items()
        ),
        Way("per item, pool", per_item, pooled=True),
    ]


# --- the clock


@dataclass(frozen=True)
class Plan:
    """Holds the sizes and limits of the measurement."""

    repeats: int = 7
    sizes: Sequence[Size] = ((10, 1000), (100, 100), (300, 100), (1000, 10), (1000, 1), (3000, 100))
    memory: Sequence[Size] = ((10, 1000), (3000, 100))
    ways_in_memory: Sequence[str] = tuple(way.name for way in ways())
    limit: int = 900  # the whole run is stopped after this time


QUICK = Plan(1, ((6, 3), (3, 6)), ((6, 3),), ("batched", "reverse, pool"), 120)


def bench_times(plan: Plan, pool: mpgrad.Pool) -> Iterator[Figure]:
    for size in plan.sizes:
        row = f"times: {size[0]} entries, {size[1]} parameters"
        for name, seconds in measured(size, plan.repeats, pool).items():
            yield median_figure(row, name, [1e3 * value for value in seconds], "ms")


def measured(size: Size, repeats: int, pool: mpgrad.Pool) -> dict[str, list[float]]:
    c, x = arguments(size)
    check(ways(), c, x, pool)

    def seconds(way: Way) -> float:
        began = time.perf_counter()
        found = way.derivative(c, x, pool if way.pooled else None)
        del found
        return time.perf_counter() - began

    return interleaved({way.name: partial(seconds, way) for way in ways()}, repeats)


def check(contenders: Sequence[Way], c: Tensor, x: Tensor, pool: mpgrad.Pool) -> None:
    """Raise WrongResultError unless each way returns what the first one returns. This is also their
    warm-up."""
    reference, *others = contenders
    expected = reference.derivative(c, x, None)
    scale = float(expected.abs().max())
    for way in others:
        found = way.derivative(c, x, pool if way.pooled else None)
        if found.shape != expected.shape or not torch.allclose(
            found, expected, rtol=RTOL, atol=RTOL * scale
        ):
            raise WrongResultError(
                f"{way.name}: differs from {reference.name} (entries, parameters: "
                f"{tuple(expected.shape)})"
            )


# --- memory


def bench_memory(plan: Plan, processes: int) -> Iterator[Figure]:
    for size in plan.memory:
        row = f"peak memory: {size[0]} entries, {size[1]} parameters"
        yield Figure(row, "the result alone", 8 * size[0] * size[1] / MIB, "MiB")
        for name in plan.ways_in_memory:
            yield Figure(row, name, fresh_peak(name, size, processes) / MIB, "MiB")


def fresh_peak(name: str, size: Size, processes: int) -> int:
    program = [
        sys.executable,
        __file__,
        "--processes",
        str(processes),
        "--peak-of",
        name,
        *map(str, size),
    ]
    return int(
        subprocess.run(program, stdout=subprocess.PIPE, check=True, text=True, timeout=120).stdout
    )


def own_peak(name: str, size: Size, processes: int) -> int:
    """Return the bytes by which this process, and the workers if there are any, grow while the way
    runs once."""
    way = next(way for way in ways() if way.name == name)
    torch.set_num_threads(1)
    with pool_for(way, processes) as pool:
        for _ in range(processes):
            way.derivative(*arguments(SMALL), pool)
        c, x = arguments(size)
        everyone = [
            os.getpid(),
            *(child.pid for child in psutil.Process().children(recursive=True)),
        ]
        before = {pid: status_bytes(pid, "VmRSS") for pid in everyone}
        for pid in everyone:
            # resets the mark of the largest resident set
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        found = way.derivative(c, x, pool)
        peak = sum(max(0, status_bytes(pid, "VmHWM") - before[pid]) for pid in everyone)
        del found
    return peak


@contextlib.contextmanager
def pool_for(way: Way, processes: int) -> Iterator[mpgrad.Pool | None]:
    if not way.pooled:
        yield None
        return
    with mpgrad.Pool(processes) as pool:
        yield pool


# --- the whole


def bench(plan: Plan, processes: int) -> list[Figure]:
    torch.set_num_threads(1)  # as in the workers
    with mpgrad.Pool(processes) as pool:
        figures = list(bench_times(plan, pool))
    figures += bench_memory(plan, processes)
    print_figures(figures)
    return figures


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes", type=at_least_1, default=cpus, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--repeats", type=at_least_1, metavar="N", help="timed rounds (default: 7, quick: 1)"
    )
    add_options(parser)
    # the arguments of a fresh process
    parser.add_argument("--peak-of", nargs=3, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    if options.peak_of:
        name, entries, parameters = options.peak_of
        print(own_peak(name, (int(entries), int(parameters)), options.processes))
        return 0
    plan = QUICK if options.quick else Plan()
    plan = replace(plan, repeats=options.repeats or plan.repeats)
    around = surroundings(options.processes)
    print_surroundings(around)
    try:
        with limited(plan.limit):
            figures = bench(plan, options.processes)
    except (WrongResultError, TimeoutError) as error:
        return fail(error)
    report(options, around, figures, repeats=plan.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
