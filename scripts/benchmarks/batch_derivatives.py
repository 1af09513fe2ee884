"""The derivative of every entry of y = routine(c, x) with respect to c: every way to get it, side by side, in one run.

A loop of `torch.autograd.grad` is the reference: all ways have to agree with it, or nothing is timed. They take turns in a
random order, and every figure is a median over such rounds, because times on a shared machine are worth little alone.

Memory is what a fresh process needs beyond what it had: after a small warm-up, the kernel's mark of the largest resident set
(VmHWM) is put back, the way runs once, and the rise over the resident set before is read. In a pool this is summed over the
caller and all its workers; pages that they share count in each that has touched them.

    python scripts/benchmarks/batch_derivatives.py --processes 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from common import WrongResultError, at_least_1, limited, surroundings
from torch import Tensor

import mpgrad

EPILOG = "exit status: 0 if everything was measured, 1 if two ways disagree or the time is up, 2 for wrong arguments"

STEPS = 20  # Python-bound: a few operations on as many numbers as there are entries, again and again
RTOL = 1e-10  # float64; ways differ in the order of sums
CHUNK = 64  # rows or columns, where a way is bounded in memory
SMALL = (5, 2)  # entries and parameters of a warm-up
MIB = 2**20
Record = dict[str, Any]
Size = tuple[int, int]  # entries of y, parameters in c


# --- the routine


def routine(c: Tensor, x: Tensor) -> Tensor:
    """Entry j is where a relaxation driven by x[j] and by all parameters has come to."""
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
    derivative: Callable[[Tensor, Tensor, mpgrad.Pool | None], Tensor]  # of shape (entries, parameters)
    pooled: bool = False


def loop_of_grad(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
    c = c.detach().requires_grad_()
    y = routine(c, x)
    return torch.stack([torch.autograd.grad(y[number], c, retain_graph=True)[0] for number in range(len(y))])


def per_item(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
    """Every entry is an item of its own: as it is where y_i = routine(c, x_i) for many x_i that cannot be batched."""
    assert pool is not None
    c = c.detach().requires_grad_()
    results = pool.map(lambda entry: routine(c, entry), x.unsqueeze(1).unbind())
    return torch.stack(mpgrad.per_item_grad(results, c))


def jacobian_by(mode: str, chunk_size: int | None = None) -> Callable[[Tensor, Tensor, mpgrad.Pool | None], Tensor]:
    def derivative(c: Tensor, x: Tensor, pool: mpgrad.Pool | None) -> Tensor:
        found: Tensor = mpgrad.jacobian(routine, c, x, argnums=0, mode=mode, pool=pool, chunk_size=chunk_size)
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
        *(Way(f"{name}, pool", derivative, pooled=True) for name, derivative in by_jacobian.items()),
        Way("per item, pool", per_item, pooled=True),
    ]


LEGEND = f"""\
ways: by default in the caller, with ", pool" in mpgrad.Pool
  loop of grad      torch.autograd.grad of one entry after the other, and torch.stack: the reference
  reverse ... auto  mpgrad.jacobian(routine, c, x, argnums=0, mode=...); "by {CHUNK}" with chunk_size={CHUNK}
  per item          mpgrad.per_item_grad of a map that makes every entry an item of its own
  torch.func.*      for comparison"""


# --- the clock


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    repeats: int = 7
    sizes: Sequence[Size] = ((10, 1000), (100, 100), (300, 100), (1000, 10), (1000, 1), (3000, 100))
    memory: Sequence[Size] = ((10, 1000), (3000, 100))
    ways_in_memory: Sequence[str] = tuple(way.name for way in ways())
    seconds: int = 900  # the whole run is stopped then


QUICK = Plan(1, ((6, 3), (3, 6)), ((6, 3),), ("batched", "reverse, pool"), 120)


def bench_times(plan: Plan, pool: mpgrad.Pool) -> list[Record]:
    print("\nms for all derivatives, by (entries, parameters)")
    seconds: dict[Size, dict[str, list[float]]] = {size: measured(size, plan.repeats, pool) for size in plan.sizes}
    print_row(["", *map(str, plan.sizes)])
    for way in ways():
        print_row([f"  {way.name}", *(f"{1e3 * statistics.median(seconds[size][way.name]):.2f}" for size in plan.sizes)])
    return [
        {
            "entries": size[0],
            "parameters": size[1],
            "ways": [
                {"way": name, "median_ms": 1e3 * statistics.median(each), "seconds": each}
                for name, each in seconds[size].items()
            ],
        }
        for size in plan.sizes
    ]


def measured(size: Size, repeats: int, pool: mpgrad.Pool) -> dict[str, list[float]]:
    c, x = arguments(size)
    check(ways(), c, x, pool)
    seconds: dict[str, list[float]] = {way.name: [] for way in ways()}
    turns = ways()
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(turns)
        for way in turns:
            began = time.perf_counter()
            found = way.derivative(c, x, pool if way.pooled else None)
            del found
            seconds[way.name].append(time.perf_counter() - began)
    return seconds


def check(contenders: Sequence[Way], c: Tensor, x: Tensor, pool: mpgrad.Pool) -> None:
    """Raise WrongResultError unless each way gives what the first one gives; this is their warm-up too."""
    reference, *others = contenders
    expected = reference.derivative(c, x, None)
    scale = float(expected.abs().max())
    for way in others:
        found = way.derivative(c, x, pool if way.pooled else None)
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=RTOL, atol=RTOL * scale):
            raise WrongResultError(f"{way.name}: differs from {reference.name} (entries, parameters: {tuple(expected.shape)})")


# --- memory


def bench_memory(plan: Plan, processes: int) -> list[Record]:
    print("\npeak memory, MiB, by (entries, parameters); the result alone, then what a fresh process rises by, once")
    print_row(["", *map(str, plan.memory)])
    print_row(["  the result", *(f"{8 * entries * parameters / MIB:.1f}" for entries, parameters in plan.memory)])
    records = []
    for name in plan.ways_in_memory:
        peaks = [fresh_peak(name, size, processes) for size in plan.memory]
        print_row([f"  {name}", *(f"{peak / MIB:.1f}" for peak in peaks)])
        records += [
            {"way": name, "entries": size[0], "parameters": size[1], "peak_bytes": peak}
            for size, peak in zip(plan.memory, peaks, strict=True)
        ]
    return records


def fresh_peak(name: str, size: Size, processes: int) -> int:
    program = [sys.executable, __file__, "--processes", str(processes), "--peak-of", name, *map(str, size)]
    return int(subprocess.run(program, stdout=subprocess.PIPE, check=True, text=True, timeout=120).stdout)


def own_peak(name: str, size: Size, processes: int) -> int:
    """Bytes by which this process, and the workers where there are any, rise while the way runs once."""
    way = next(way for way in ways() if way.name == name)
    torch.set_num_threads(1)
    with pool_for(way, processes) as pool:
        for _ in range(processes):
            way.derivative(*arguments(SMALL), pool)
        c, x = arguments(size)
        everyone = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        before = {pid: status_of(pid, "VmRSS") for pid in everyone}
        for pid in everyone:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # puts the mark of the largest resident set back
        found = way.derivative(c, x, pool)
        peak = sum(max(0, status_of(pid, "VmHWM") - before[pid]) for pid in everyone)
        del found
    return peak


@contextlib.contextmanager
def pool_for(way: Way, processes: int) -> Iterator[mpgrad.Pool | None]:
    if not way.pooled:
        yield None
        return
    with mpgrad.Pool(processes) as pool:
        yield pool


def status_of(pid: int, name: str) -> int:
    """Bytes, from the kernel's account of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return 1024 * int(value.split()[0])
    raise KeyError(name)


# --- which wins


def winners(times: Sequence[Record]) -> list[Record]:
    pooled = {way.name for way in ways() if way.pooled}
    rows = []
    for record in times:
        medians = {each["way"]: each["median_ms"] for each in record["ways"]}
        loop = medians["loop of grad"]
        alone, in_pool = (
            min((name for name in medians if (name in pooled) == inside), key=medians.__getitem__) for inside in (False, True)
        )
        row = {key: record[key] for key in ("entries", "parameters")}
        rows.append(
            row
            | {"alone": alone, "alone_speed_up": loop / medians[alone]}
            | {"in_pool": in_pool, "in_pool_speed_up": loop / medians[in_pool], "auto_speed_up": loop / medians["auto"]}
        )
    return rows


def print_winners(rows: Sequence[Record]) -> None:
    print("\nthe fastest, and how many times faster than the loop of grad")
    print_row(["  (entries, parameters)", "auto", "alone", "", "in the pool"])
    for row in rows:
        size = f"  ({row['entries']}, {row['parameters']})"
        times = [f"{row[key]:.1f}" for key in ("auto_speed_up", "alone_speed_up", "in_pool_speed_up")]
        print_row([size, times[0], row["alone"], times[1], row["in_pool"], times[2]])


# --- the whole


def print_row(cells: Sequence[str]) -> None:
    first, *others = cells
    print((f"{first:26}" + "".join(f"{cell:>20}" for cell in others)).rstrip(), flush=True)


def bench(plan: Plan, processes: int) -> Record:
    around = surroundings(processes)
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    print(f"{versions}, Python {around['python']}, {around['date']}")
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, {around['memory_gib']} GiB, {around['system']}")
    print(f"{processes} processes of one intra-op thread; load average {around['load_average']:.2f} before")
    print(f"medians of {plan.repeats} rounds, the ways in turns; float64, all agree to a relative {RTOL:g}\n\n{LEGEND}")
    torch.set_num_threads(1)  # as the workers have
    with mpgrad.Pool(processes) as pool:
        times = bench_times(plan, pool)
    fastest = winners(times)
    print_winners(fastest)
    memory = bench_memory(plan, processes)
    return {
        "surroundings": around,
        "repeats": plan.repeats,
        "relative_tolerance": RTOL,
        "times": times,
        "fastest": fastest,
        "memory": memory,
    }


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=at_least_1, default=cpus, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least_1, metavar="N", help="timed rounds (default: 7, quick: 1)")
    parser.add_argument("--quick", action="store_true", help="a little of everything, only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("batch_derivatives.json"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--peak-of", nargs=3, help=argparse.SUPPRESS)  # what a fresh process is started with
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    if options.peak_of:
        name, entries, parameters = options.peak_of
        print(own_peak(name, (int(entries), int(parameters)), options.processes))
        return 0
    plan = QUICK if options.quick else Plan()
    if options.repeats is not None:
        plan = replace(plan, repeats=options.repeats)
    try:
        with limited(plan.seconds):
            record = bench(plan, options.processes)
    except (WrongResultError, TimeoutError) as error:
        print(f"batch_derivatives.py: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nall rounds: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
