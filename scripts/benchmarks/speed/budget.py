"""Whose CPU time a call takes: the caller's and the workers'.

So many CPUs as there are workers can do no more than be busy all the time: where they nearly are, only less work would make a
map faster, and the serial loop's own work, done by the workers, is most of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from common import Batch, Contender, Outcome, batch_of, check, serial, timed, tiny_items
from figures import Figure, interleaved, median_figure
from jobs import OP, PYTHON, backward_at_once, items_of, one_backward
from losses import doubled
from torch import Tensor

import mpgrad
from speed.plan import Plan, Pools

__all__ = ["bench_budget", "bench_cpu"]

CALLS = 50  # in a chunk of calls that go one by one


def bench_budget(pools: Pools, plan: Plan) -> Iterator[Figure]:
    items = [item.requires_grad_() for item in tiny_items(2 * plan.tiny_items)]
    ways = {"one by one": CALLS, "in bundles": None}
    spent = interleaved({name: partial(parts, pools.keep, items, chunksize) for name, chunksize in ways.items()}, plan.repeats)
    for name, rounds in spent.items():
        row = f"budget: CPU time of x * 2, forward and backward, calls {name}"
        for part, values in zip(PARTS, zip(*rounds, strict=True), strict=True):
            yield median_figure(row, part, values, "us/item")


PARTS = ("caller, forward", "workers, forward", "caller, backward", "workers, backward")


def parts(pool: mpgrad.Pool, items: Sequence[Tensor], chunksize: int | None) -> list[float]:
    """Microseconds an item, of each of PARTS."""
    for item in items:
        item.grad = None
    moments = [state(pool)]
    results = pool.map(doubled, items, chunksize)
    moments.append(state(pool))
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    moments.append(state(pool))
    spent = [now - then for before, after in itertools.pairwise(moments) for then, now in zip(before, after, strict=True)]
    return [1e6 * seconds / len(items) for seconds in spent]


def bench_cpu(pools: Pools, plan: Plan) -> Iterator[Figure]:
    loops = {"keep": pools.keep, "ahead": pools.ahead, "auto": pools.default}
    for work in (PYTHON, OP):
        for ms in plan.grains_ms:
            function, items = items_of(work, ms / 1e3, plan.work_seconds)
            alone = {"serial": partial(one_backward, serial, function), "serial, at once": partial(backward_at_once, function)}
            pooled = {name: partial(one_backward, pool.map, function) for name, pool in loops.items()}
            check([Contender(name, way, len(items)) for name, way in {**alone, **pooled}.items()], items)
            ways = {name: partial(own_cpu, way, items) for name, way in alone.items()}
            ways |= {name: partial(shares, pool, pooled[name], items) for name, pool in loops.items()}
            spent = interleaved(ways, plan.repeats)
            row = f"cpu: {work.name} items of {ms:g} ms, forward and backward"
            for name in alone:
                yield median_figure(row, name, [cpu for (cpu,) in spent[name]], "us/item")
            for graphs in loops:
                for part, values in zip(SHARES, zip(*spent[graphs], strict=True), strict=True):
                    yield median_figure(row, f"{graphs}, {part}", values, "us/item")
                busy = [(workers + caller) / (plan.processes * wall) for workers, caller, wall in spent[graphs]]
                yield median_figure(row, f"{graphs}, share of {plan.processes} CPUs that was busy", busy, "x")


SHARES = ("workers", "caller", "wall")


def shares(pool: mpgrad.Pool, way: Callable[[Batch], Outcome], items: Sequence[Tensor]) -> list[float]:
    """Microseconds an item, of each of SHARES."""
    batch = batch_of(items)
    before = state(pool)
    wall = timed(way, batch)
    caller, workers = (now - then for then, now in zip(before, state(pool), strict=True))
    return [1e6 * seconds / len(items) for seconds in (workers, caller, wall)]


def own_cpu(way: Callable[[Batch], Outcome], items: Sequence[Tensor]) -> list[float]:
    batch, began = batch_of(items), time.process_time()
    way(batch)
    return [1e6 * (time.process_time() - began) / len(items)]


def state(pool: mpgrad.Pool) -> tuple[float, float]:
    """Seconds of CPU that the caller, and the workers, have used up to now."""
    workers = [worker.pid for worker in pool.stats().workers]
    return time.process_time(), sum(map(seconds_run, workers))


def seconds_run(pid: int) -> float:
    """By the scheduler's clock, which counts nanoseconds: `psutil.cpu_times` counts hundredths of a second."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
