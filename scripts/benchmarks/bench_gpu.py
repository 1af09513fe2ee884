"""Many ragged, launch-bound simulations on one GPU: one after the other, by workers that share it, and by streams.

A simulation of small tensors keeps a GPU idle: what takes time is Python, which launches kernel after kernel of a few
microseconds each. Several processes launch side by side, each with an interpreter lock of its own; threads with streams share
one. Here every simulation integrates an ensemble of Lorenz systems, of a size and for a number of steps of its own, and the
loss is differentiated back to its parameters. Contenders take turns in a random order, every figure is the median over such
rounds, and all have to give the serial loop's values and gradients, bit for bit, before anything is timed.

    simulations ──► | clock on ──► contender ──► values, gradients ──► synchronize ──► clock off |

    python scripts/benchmarks/bench_gpu.py --workers 1 2 4 8
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Record, WrongResultError, at_least_1, surroundings
from torch import Tensor

import mpgrad

EPILOG = "exit status: 0 if everything was measured, or there is no GPU; 1 if a contender is wrong; 2 for wrong arguments"
NO_GPU = "bench_gpu.py: there is no CUDA GPU here, so nothing was measured (torch.cuda.is_available() is False)"

SMALLEST, LARGEST = 4, 64  # systems in an ensemble: far too few to fill a GPU
WARM_UPS = 2  # untimed rounds: contexts, kernels and slots are made there
TIME_STEP = 0.005


class Simulation(NamedTuple):
    state: Tensor  # ensemble x 3
    parameters: Tensor  # sigma, rho, beta
    steps: int


def simulate(simulation: Simulation) -> Tensor:
    """The mean square of the last state, by Euler's method: about 20 kernels a step."""
    state, (sigma, rho, beta) = simulation.state, simulation.parameters.unbind()
    for _ in range(simulation.steps):
        x, y, z = state.unbind(1)
        state = state + TIME_STEP * torch.stack([sigma * (y - x), x * (rho - z) - y, x * y - beta * z], 1)
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


Loop = Callable[[list[Simulation]], list[Tensor]]
Outcome = list[Tensor]


class Contender(NamedTuple):
    name: str
    loop: Loop


def run(loop: Loop, simulations: list[Simulation]) -> Outcome:
    """Values, and gradients of the parameters."""
    losses = loop(simulations)
    return [*losses, *torch.autograd.grad(losses, [each.parameters for each in simulations])]


def serial(simulations: list[Simulation]) -> list[Tensor]:
    return [simulate(each) for each in simulations]


def in_pool(pool: mpgrad.Pool, simulations: list[Simulation]) -> list[Tensor]:
    return pool.map(simulate, simulations)


@contextlib.contextmanager
def contender(name: str, options: dict[str, Any] | None) -> Iterator[Contender]:
    if options is None:
        yield Contender(name, serial)
    else:
        with mpgrad.Pool(**options) as pool:
            yield Contender(name, partial(in_pool, pool))


def contenders(workers: Sequence[int], device: str) -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {"serial loop": None}
    found |= {f"{count} workers": {"devices": [device] * count} for count in workers}
    found |= {f"{count} streams": {"devices": [device] * count, "engine": "stream"} for count in workers if count > 1}
    return found


def used_bytes(device: torch.device) -> int:
    """On the whole GPU, by all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def timed(loop: Loop, simulations: list[Simulation], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    run(loop, simulations)
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


def check(each: Contender, simulations: list[Simulation], expected: Outcome) -> None:
    for found, reference in zip(run(each.loop, simulations), expected, strict=True):
        if not torch.equal(found, reference):
            raise WrongResultError(f"{each.name}: a value or gradient is not the serial loop's ({found} != {reference})")


def bench(plan: Plan, workers: Sequence[int], name: str) -> Record:
    device = torch.device(name)
    simulations = drawn(plan, device)
    expected = run(serial, simulations)
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        there = []
        for label, options in contenders(workers, name).items():
            before = used_bytes(device)
            each = stack.enter_context(contender(label, options))
            for _ in range(WARM_UPS):
                check(each, simulations, expected)
            there.append(each)
            memory[label] = used_bytes(device) - before
        for _ in range(plan.repeats):
            for each in random.sample(there, len(there)):
                seconds.setdefault(each.name, []).append(timed(each.loop, simulations, device))
    rows = [row(label, plan, seconds[label], seconds["serial loop"], memory[label]) for label in memory]
    return {
        "gpu": torch.cuda.get_device_name(device),
        "date": datetime.date.today().isoformat(),
        "cuda": torch.version.cuda,
        "surroundings": surroundings(max(workers)),
        "plan": vars(plan),
        "rows": rows,
    }


def row(name: str, plan: Plan, seconds: list[float], serial_seconds: list[float], nbytes: int) -> Record:
    return {
        "contender": name,
        "simulations a second": plan.simulations / statistics.median(seconds),
        "speed-up": statistics.median(theirs / own for theirs, own in zip(serial_seconds, seconds, strict=True)),
        "further MiB of the GPU": nbytes / 2**20,
        "seconds": seconds,
    }


def show(record: Record) -> None:
    print(f"{record['gpu']}, CUDA {record['cuda']}, torch {torch.__version__}, {record['date']}\n")
    print("| contender | simulations a second | speed-up | further MiB of the GPU |\n| --- | --- | --- | --- |")
    for each in record["rows"]:
        rate, gain, size = each["simulations a second"], each["speed-up"], each["further MiB of the GPU"]
        print(f"| {each['contender']} | {rate:.1f} | {gain:.2f} | {size:,.0f} |")


def command_line() -> argparse.ArgumentParser:
    summary = "Launch-bound simulations on one GPU: serial, by workers that share it, by streams."
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--workers", type=at_least_1, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default: 1 2 4 8")
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a little of everything, only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("bench_gpu.json"), metavar="FILE", help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    try:
        record = bench(QUICK if options.quick else Plan(), options.workers, options.device)
    except WrongResultError as error:
        print(f"bench_gpu.py: {error}", file=sys.stderr)
        return 1
    show(record)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nall rounds: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
