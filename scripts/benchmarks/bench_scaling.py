"""Measures how cost grows: the items per second that one parent can send and receive, and growth
along every axis of a map.

Dispatch: workers that answer at once, even more of them than CPUs, because this part measures the
    parent. The parent's threads share one interpreter lock. So its CPU seconds per item, p, limit
    the items per second to 1 / p on any machine. A worker has its own cost of w CPU seconds per
    item. So W workers with items of g seconds are at most min(g / (g + w), g / (W p)) busy. They
    are 80 % busy if items take at least

    g = max(0.8 W p, 4 w)

Waiting: many more workers than CPUs, whose items only sleep. So all CPU time is the pool's own,
    whether the caller, the workers or the system use it.

Growth: seconds and peaks of memory, each point in a fresh process, and the slopes of the last
    points in a log-log picture. A slope of 1 is linear, and 2 would be quadratic. Less than 1 means
    that a fixed cost still shows.

    python scripts/benchmarks/bench_scaling.py --json scaling.json --picture scaling.png
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import psutil
import torch
from common import (
    Figure,
    Record,
    add_options,
    at_least_1,
    cpu_seconds,
    fail,
    limited,
    median_figure,
    picture_to_write,
    print_figures,
    print_surroundings,
    report,
    sent,
    status_bytes,
    surroundings,
)
from jobs import doubled
from torch import Tensor

import mpgrad

EPILOG = "exit status: 0 if everything was measured, 1 if the time is up, 2 for wrong arguments"

RATE_AIM = (">=", 20_000.0)  # items a second
SLOPE_AIM = ("<=", 1.15)
LAST_POINTS = 3  # to which a slope is fitted; earlier points are mostly fixed cost
MIB = 2**20
ENOUGH_BYTES = 16 * MIB  # less growth of memory is only a few stray pages
CROWDS = (16, 64, 256)  # workers whose grain is computed
WAITED_MS = (100.0, 30.0, 10.0, 3.0)
WAVES = 8  # items for each waiting worker, at least
WAITED_SECONDS = 0.4  # of its items together, at least
WAITING_FLOATS = 3
POINT_LIMIT = 900  # seconds
WORKERS = 2  # for measuring growth
FLOATS = 10  # of a tiny tensor
MAPS_ITEMS = 3
CAPTURES_ITEMS = 16
TENSORS_ITEMS = 2


# --- what grows


class Taken(NamedTuple):
    forward: float  # seconds
    backward: float


def all_doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x * 2 for x in tensors]


def times_sum(captures: Sequence[Tensor], x: Tensor) -> Tensor:
    return x * torch.stack(tuple(captures)).sum()


def leaves(count: int, floats: int = FLOATS) -> list[Tensor]:
    return [torch.ones(floats, requires_grad=True) for _ in range(count)]


def taken(forward: Callable[[], list[Tensor]]) -> Taken:
    began = time.perf_counter()
    values = forward()
    there = time.perf_counter()
    torch.autograd.backward(values, [torch.ones_like(value) for value in values])
    return Taken(there - began, time.perf_counter() - there)


def items(pool: mpgrad.Pool, count: int) -> Taken:
    return taken(partial(pool.map, doubled, leaves(count)))


def tensors(pool: mpgrad.Pool, count: int) -> Taken:
    lists = [leaves(count) for _ in range(TENSORS_ITEMS)]
    return taken(lambda: [value for values in pool.map(all_doubled, lists) for value in values])


def captures(pool: mpgrad.Pool, count: int) -> Taken:
    return taken(partial(pool.map, partial(times_sum, leaves(count)), leaves(CAPTURES_ITEMS)))


def maps(pool: mpgrad.Pool, count: int) -> Taken:
    each = [leaves(MAPS_ITEMS) for _ in range(count)]
    return taken(lambda: [value for own in each for value in pool.map(doubled, own)])


def size(pool: mpgrad.Pool, count: int) -> Taken:
    return taken(partial(pool.map, doubled, leaves(1, count // 4)))


Job = Callable[[mpgrad.Pool, int], Taken]


class Axis(NamedTuple):
    job: Job
    sizes: Sequence[int]
    what: str
    bytes_each: int  # roughly, the memory of all processes for one more


def decades(first: int, last: int) -> list[int]:
    return [10**power for power in range(first, last + 1)]


AXES: dict[str, Axis] = {
    "items": Axis(items, decades(1, 6), "items of a map", 15_000),
    "tensors": Axis(tensors, decades(0, 4), f"tensors in each of {TENSORS_ITEMS} items", 20_000),
    "captures": Axis(
        captures, decades(0, 4), f"tensors captured by a function of {CAPTURES_ITEMS} items", 20_000
    ),
    "maps": Axis(maps, decades(0, 4), f"maps of {MAPS_ITEMS} items alive", 60_000),
    "size": Axis(
        size, [4 * 32**power for power in range(6)] + [2**30, 2**32], "bytes of a tensor", 8
    ),
}


@dataclass(frozen=True)
class Plan:
    """Holds the sizes and limits of the measurement."""

    workers: Sequence[int] = (2, 4, 8, 16, 64)
    waiting: Sequence[int] = (64, 16)  # workers
    waited_ms: Sequence[float] = WAITED_MS
    items: int = 5000
    repeats: int = 5
    largest: float = math.inf  # of an axis
    axes: Sequence[str] = tuple(AXES)
    limit: int = 3600


QUICK = Plan(
    workers=(2, 4), waiting=(4,), waited_ms=(3.0,), items=100, repeats=1, largest=100, limit=120
)


# --- dispatch


class Costs(list[tuple[float, float, float]]):
    """The wall time, the parent's CPU seconds and the workers' CPU seconds per item, for every
    round."""

    def median(self, column: int) -> float:
        return statistics.median(row[column] for row in self)


def forward(pool: mpgrad.Pool, items: Sequence[Tensor]) -> None:
    with torch.no_grad():
        pool.map(doubled, items)


def forward_and_backward(pool: mpgrad.Pool, items: Sequence[Tensor]) -> None:
    leaves = [item.clone().requires_grad_() for item in items]
    torch.autograd.backward(pool.map(doubled, leaves), list(items))


def costs(
    pool: mpgrad.Pool, run: Callable[[mpgrad.Pool, Sequence[Tensor]], None], plan: Plan
) -> Costs:
    items = [torch.ones(FLOATS) for _ in range(plan.items)]
    found = Costs()
    for number in range(plan.repeats + 1):
        workers = [worker.pid for worker in pool.stats().workers]
        before = (time.perf_counter(), time.process_time(), cpu_seconds(workers))
        run(pool, items)
        after = (time.perf_counter(), time.process_time(), cpu_seconds(workers))
        if number:  # the first one warms up
            wall, parent, others = (
                (now - then) / plan.items for now, then in zip(after, before, strict=True)
            )
            found.append((wall, parent, others))
    return found


def bench_dispatch(plan: Plan) -> Iterator[Sequence[Figure]]:
    runs = {"forward": forward, "forward and backward": forward_and_backward}
    found: dict[str, dict[int, Costs]] = {name: {} for name in runs}
    for workers in plan.workers:
        with mpgrad.Pool(workers, **sent(mpgrad.Pool)) as pool:
            for name, run in runs.items():
                found[name][workers] = costs(pool, run, plan)
    yield [figure for name in runs for figure in dispatch_figures(name, found[name])]


def dispatch_figures(name: str, by_workers: dict[int, Costs]) -> Iterator[Figure]:
    for workers, cost in by_workers.items():
        row = f"dispatch: x * 2 on {FLOATS} floats, {name}, {workers} workers"
        yield median_figure(row, "wall", [1e6 * wall for wall, _, _ in cost], "us/item")
        yield median_figure(
            row, "CPU of the parent", [1e6 * parent for _, parent, _ in cost], "us/item"
        )
        yield median_figure(
            row, "CPU of all workers", [1e6 * others for _, _, others in cost], "us/item"
        )
        yield median_figure(
            row, "the parent could do", [1 / parent for _, parent, _ in cost], "items/s", RATE_AIM
        )
    row = f"dispatch: smallest grain at which workers stay 80 % busy, {name}: max(0.8 W p, 4 w)"
    for crowd in CROWDS:
        yield Figure(row, f"{crowd} workers", 1e3 * smallest_grain(crowd, by_workers), "ms")


def smallest_grain(crowd: int, by_workers: dict[int, Costs]) -> float:
    """Compute the grain from p and w, as measured with the nearest number of workers that is not
    larger."""
    nearest = max((workers for workers in by_workers if workers <= crowd), default=min(by_workers))
    cost = by_workers[nearest]
    return max(0.8 * crowd * cost.median(1), 4 * cost.median(2))


# --- waiting


def doubled_after(seconds: float, x: Tensor) -> Tensor:
    time.sleep(seconds)
    return x * 2


def wait_forward(pool: mpgrad.Pool, seconds: float, items: Sequence[Tensor]) -> None:
    with torch.no_grad():
        pool.map(partial(doubled_after, seconds), items)


def wait_forward_and_backward(pool: mpgrad.Pool, seconds: float, items: Sequence[Tensor]) -> None:
    leaves = [item.clone().requires_grad_() for item in items]
    torch.autograd.backward(pool.map(partial(doubled_after, seconds), leaves), list(items))


def bench_waiting(plan: Plan) -> Iterator[Sequence[Figure]]:
    runs = {"forward": wait_forward, "forward and backward": wait_forward_and_backward}
    for workers in plan.waiting:
        with mpgrad.Pool(workers, **sent(mpgrad.Pool)) as pool:
            for ms in plan.waited_ms:
                waves = max(WAVES, math.ceil(1e3 * WAITED_SECONDS / ms))
                items = [torch.ones(WAITING_FLOATS) for _ in range(waves * workers)]
                for name, run in runs.items():
                    turn = partial(run, pool, ms / 1e3, items)
                    found = [waited(pool, turn) for _ in range(plan.repeats + 1)][1:]
                    row = f"waiting: items sleep {ms:g} ms, {name}, {workers} workers"
                    ideal = waves * ms / 1e3
                    yield [
                        median_figure(
                            row, "ideal over wall", [ideal / wall for wall, _ in found], ""
                        ),
                        median_figure(
                            row,
                            "CPU of all",
                            [1e3 * cpu / len(items) for _, cpu in found],
                            "ms/item",
                        ),
                    ]


def waited(pool: mpgrad.Pool, turn: Callable[[], None]) -> tuple[float, float]:
    """Return the turn's wall time, and the CPU time of the caller and the workers."""
    pids = [os.getpid(), *(worker.pid for worker in pool.stats().workers)]
    began, used = time.perf_counter(), cpu_seconds(pids)
    turn()
    return time.perf_counter() - began, cpu_seconds(pids) - used


# --- growth


def bench_growth(plan: Plan) -> Iterator[Sequence[Figure]]:
    for name in plan.axes:
        axis = AXES[name]
        row = f"growth: {axis.what}"
        points: dict[int, Record] = {}
        for size in axis.sizes:
            if size > plan.largest:
                continue
            if axis.bytes_each * size > psutil.virtual_memory().available:
                print(
                    f"{row}: {size:,} left out: it could take more memory than there is", flush=True
                )
                continue
            points[size] = fresh_point(name, size, 1 if size == axis.sizes[-1] else 3)
        yield list(point_figures(row, points))


def point(name: str, count: int, rounds: int) -> dict[str, float]:
    """Return the seconds (the best of several rounds) and the peaks of memory above those at the
    start. The process must have done nothing before."""
    with mpgrad.Pool(WORKERS, **sent(mpgrad.Pool)) as pool:
        AXES[name].job(pool, min(count, 10))
        before = peaks(pool)
        runs = [AXES[name].job(pool, count) for _ in range(rounds)]
        parent, workers = (now - then for now, then in zip(peaks(pool), before, strict=True))
    return {
        "forward": min(run.forward for run in runs),
        "backward": min(run.backward for run in runs),
        "parent": parent,
        "workers": workers,
    }


def peaks(pool: mpgrad.Pool) -> tuple[int, int]:
    """Return the largest number of bytes that the parent, and all workers together, have had so
    far."""
    return status_bytes(os.getpid(), "VmHWM"), sum(
        status_bytes(worker.pid, "VmHWM") for worker in pool.stats().workers
    )


def fresh_point(axis: str, size: int, rounds: int) -> Record:
    command = [sys.executable, __file__, "--point", axis, str(size), str(rounds)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, timeout=POINT_LIMIT
    )
    found: Record = json.loads(ended.stdout.splitlines()[-1])
    return found


def point_figures(row: str, points: dict[int, Record]) -> Iterator[Figure]:
    for size, found in points.items():
        for phase in ("forward", "backward"):
            yield Figure(row, f"{size:,}: {phase}", found[phase], "s")
        for side in ("parent", "workers"):
            yield Figure(row, f"{size:,}: peak of memory, {side}", found[side] / MIB, "MiB")
    for what in ("forward", "backward", "parent", "workers"):
        values = {size: found[what] for size, found in points.items()}
        if what in ("parent", "workers"):
            values = {size: value for size, value in values.items() if value >= ENOUGH_BYTES}
        if len(values) >= 2:
            yield Figure(row, f"slope of {what}", slope(values), "", SLOPE_AIM)


def slope(values: dict[int, float]) -> float:
    """Return the slope of the straight line through the last points in a log-log picture, by least
    squares."""
    last = sorted(values.items())[-LAST_POINTS:]
    return statistics.linear_regression(
        *zip(*((math.log(x), math.log(y)) for x, y in last), strict=True)
    ).slope


def draw(figures: Sequence[Figure], axes: dict[str, Axis], file: str) -> None:
    from matplotlib.figure import Figure as Canvas  # which the table does not need

    canvas = Canvas(figsize=(4.5 * len(axes), 8), layout="constrained")
    panels = canvas.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes.values()):
        row = f"growth: {axis.what}"
        for panel, kinds, unit in (
            (panels[0][column], ("forward", "backward"), "s"),
            (panels[1][column], ("peak of memory, parent", "peak of memory, workers"), "MiB"),
        ):
            for kind in kinds:
                values = {
                    int(figure.name.partition(":")[0].replace(",", "")): figure.value
                    for figure in figures
                    if figure.row == row and figure.name.endswith(f": {kind}") and figure.value > 0
                }
                panel.loglog(list(values), list(values.values()), "o-", label=kind)
            panel.set(xlabel=axis.what, ylabel=unit)
            # linear growth has a slope of 45 degrees
            panel.set_aspect("equal", adjustable="datalim")
            panel.legend(frameon=False)
    canvas.savefig(file, dpi=120)


# --- the whole

PARTS: dict[str, Callable[[Plan], Iterator[Sequence[Figure]]]] = {
    "dispatch": bench_dispatch,
    "waiting": bench_waiting,
    "growth": bench_growth,
}


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    parser.add_argument(
        "--axes", nargs="+", choices=AXES, default=list(AXES), metavar="AXIS", help=", ".join(AXES)
    )
    parser.add_argument(
        "--largest", type=at_least_1, metavar="N", help="of an axis (default: its own, quick: 100)"
    )
    parser.add_argument(
        "--repeats",
        type=at_least_1,
        metavar="N",
        help="timed rounds, but of growth (default: 5, quick: 1)",
    )
    parser.add_argument(
        "--picture", type=picture_to_write, metavar="FILE", help="log-log, of growth"
    )
    add_options(parser)
    # the arguments of a fresh process
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    torch.set_num_threads(1)
    if options.point is not None:
        axis, size, rounds = options.point
        print(json.dumps(point(axis, int(size), int(rounds))))
        return 0
    given = {"axes": options.axes, "largest": options.largest, "repeats": options.repeats}
    plan = replace(
        QUICK if options.quick else Plan(),
        **{name: value for name, value in given.items() if value is not None},
    )
    around = surroundings(WORKERS)
    print_surroundings(around)
    figures: list[Figure] = []
    try:
        with limited(plan.limit):
            for part in options.parts:
                for found in PARTS[part](plan):  # an axis takes minutes
                    print_figures(found)
                    figures += found
    except TimeoutError as error:
        return fail(error)
    report(options, around, figures, repeats=plan.repeats)
    if options.picture is not None:
        draw(figures, {name: AXES[name] for name in options.axes}, options.picture)
        print(f"picture: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
