"""Runs many ragged, launch-bound simulations on one GPU: one after the other, with workers that
share it, and with streams.

A simulation of small tensors leaves a GPU idle, because the time is spent in Python, which launches
one kernel of a few microseconds after another. Several processes launch side by side, each with its
own interpreter lock, while threads with streams share one. Here every simulation integrates an
ensemble of Lorenz systems with its own size and number of steps, and the loss is differentiated
with respect to its parameters. Contenders take turns in a random order, and every figure is the
median over such rounds. Before anything is timed, all must return the serial loop's values and
gradients, bit for bit.

    simulations ──► | clock on ──► contender ──► values, gradients ──► synchronize ──► clock off |

    python scripts/benchmarks/bench_gpu.py --workers 1 2 4 8
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from common import (
    Figure,
    WrongResultError,
    add_options,
    at_least_1,
    fail,
    interleaved,
    median_figure,
    print_figures,
    print_surroundings,
    ratios,
    report,
    surroundings,
)
from torch import Tensor

import mpgrad

EPILOG = (
    "exit status: 0 if everything was measured, or there is no GPU; 1 if a contender is wrong; 2 "
    "for wrong arguments"
)
NO_GPU = (
    "bench_gpu.py: there is no CUDA GPU here, so nothing was measured (torch.cuda.is_available() "
    "is False)"
)

SMALLEST, LARGEST = 4, 64  # systems in an ensemble: far too few to fill a GPU
TIME_STEP = 0.005
SERIAL = "serial loop"
MIB = 2**20


class Simulation(NamedTuple):
    state: Tensor  # ensemble x 3
    parameters: Tensor  # sigma, rho, beta
    steps: int


def simulate(simulation: Simulation) -> Tensor:
    """Return the mean square of the last state, by Euler's method, with about 20 kernels per
    step."""
    state, (sigma, rho, beta) = simulation.state, simulation.parameters.unbind()
    for _ in range(simulation.steps):
        x, y, z = state.unbind(1)
        state = state + TIME_STEP * torch.stack(
            [sigma * (y - x), x * (rho - z) - y, x * y - beta * z], 1
        )
    return state.square().mean()


@dataclass(frozen=True)
class Plan:
    simulations: int = 48
    steps: int = 100  # of the longest; the shortest has a quarter
    repeats: int = 7


QUICK = Plan(simulations=8, steps=20, repeats=1)


def drawn(plan: Plan, device: torch.device) -> list[Simulation]:
    draw = random.Random(0)
    torch.manual_seed(0)
    parameters = torch.tensor([10.0, 28.0, 8 / 3])
    return [
        Simulation(
            torch.randn(draw.randint(SMALLEST, LARGEST), 3).to(device),
            (parameters * (1 + 0.01 * k / plan.simulations)).to(device).requires_grad_(),
            draw.randint(max(1, plan.steps // 4), plan.steps),
        )
        for k in range(plan.simulations)
    ]


# --- the contenders

Loop = Callable[[list[Simulation]], list[Tensor]]


def serial(simulations: list[Simulation]) -> list[Tensor]:
    return [simulate(each) for each in simulations]


def contenders(workers: Sequence[int], device: str) -> dict[str, dict[str, Any] | None]:
    """Return the options of each contender's pool; None for the serial loop."""
    found: dict[str, dict[str, Any] | None] = {SERIAL: None}
    found |= {f"{count} workers": {"devices": [device] * count} for count in workers}
    found |= {
        f"{count} streams": {"devices": [device] * count, "engine": "stream"}
        for count in workers
        if count > 1
    }
    return found


@contextlib.contextmanager
def started(options: dict[str, Any] | None) -> Iterator[Loop]:
    if options is None:
        yield serial
    else:
        with mpgrad.Pool(**options) as pool:
            yield partial(pool.map, simulate)


def run(loop: Loop, simulations: list[Simulation]) -> list[Tensor]:
    """Return the values, and the gradients of the parameters."""
    losses = loop(simulations)
    return [*losses, *torch.autograd.grad(losses, [each.parameters for each in simulations])]


def check(name: str, loop: Loop, simulations: list[Simulation], expected: list[Tensor]) -> None:
    for found, reference in zip(run(loop, simulations), expected, strict=True):
        if not torch.equal(found, reference):
            raise WrongResultError(
                f"{name}: a value or gradient is not the serial loop's ({found} != {reference})"
            )


# --- the clock


def timed(loop: Loop, simulations: list[Simulation], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run(loop, simulations)
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def used_bytes(device: torch.device) -> int:
    """Return the bytes that all processes use on the whole GPU."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def bench(plan: Plan, workers: Sequence[int], name: str) -> list[Figure]:
    device = torch.device(name)
    simulations = drawn(plan, device)
    expected = run(serial, simulations)
    turns: dict[str, Callable[[], float]] = {}
    memory: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for label, options in contenders(workers, name).items():
            before = used_bytes(device)
            loop = stack.enter_context(started(options))
            check(label, loop, simulations, expected)
            turns[label] = partial(timed, loop, simulations, device)
            memory[label] = used_bytes(device) - before
        seconds = interleaved(turns, plan.repeats)
    row = (
        f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}: {plan.simulations} "
        "simulations"
    )
    return list(figures_of(row, plan, seconds, memory))


def figures_of(
    row: str, plan: Plan, seconds: Mapping[str, Sequence[float]], memory: Mapping[str, int]
) -> Iterator[Figure]:
    for name, values in seconds.items():
        yield median_figure(row, name, [plan.simulations / value for value in values], "1/s")
        yield median_figure(
            row, f"{name} over the serial loop", ratios(seconds[SERIAL], values), "x"
        )
        yield Figure(row, f"{name}, further memory of the GPU", memory[name] / MIB, "MiB")


# --- the whole


def command_line() -> argparse.ArgumentParser:
    summary = "Launch-bound simulations on one GPU: serial, by workers that share it, by streams."
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--workers",
        type=at_least_1,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="default: 1 2 4 8",
    )
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    plan = QUICK if options.quick else Plan()
    around = surroundings(max(options.workers))
    print_surroundings(around)
    try:
        figures = bench(plan, options.workers, options.device)
    except WrongResultError as error:
        return fail(error)
    print_figures(figures)
    report(options, around, figures, repeats=plan.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
