"""Whose CPU time a tiny call takes: the caller's and the workers', forward and backward, one by one and in bundles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from bench_overhead import tiny_items
from figures import Figure, interleaved, median_figure
from losses import doubled
from torch import Tensor

import mpgrad
from speed.plan import Plan, Pools

__all__ = ["bench_budget"]

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


def state(pool: mpgrad.Pool) -> tuple[float, float]:
    """Seconds of CPU that the caller, and the workers, have used up to now."""
    workers = [worker.pid for worker in pool.stats().workers]
    return time.process_time(), sum(map(seconds_run, workers))


def seconds_run(pid: int) -> float:
    """By the scheduler's clock, which counts nanoseconds: `psutil.cpu_times` counts hundredths of a second."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
