"""Work that grows along one axis: how long a pool takes forward and backward, and the most memory that it ever has.

sizes made | clock ──► map(s) ──► clock ──► one backward over everything ──► clock |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from losses import doubled
from torch import Tensor

import mpgrad

FLOATS = 10  # of a tiny tensor
MAPS_ITEMS = 3
CAPTURES_ITEMS = 16
TENSORS_ITEMS = 2


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


def peak_bytes(pid: int | str) -> int:
    return status(pid, "VmHWM") * 1024


def status(pid: int | str, name: str) -> int:
    """A number in /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise KeyError(name)


Job = Callable[[mpgrad.Pool, int], Taken]


class Axis(NamedTuple):
    job: Job
    sizes: Sequence[int]
    what: str
    bytes_each: int  # memory of everybody, roughly, for one more


def decades(first: int, last: int) -> list[int]:
    return [10**power for power in range(first, last + 1)]


AXES: dict[str, Axis] = {
    "items": Axis(items, decades(1, 6), "items of a map", 15_000),
    "tensors": Axis(tensors, decades(0, 4), f"tensors in each of {TENSORS_ITEMS} items", 20_000),
    "captures": Axis(captures, decades(0, 4), f"tensors captured by a function of {CAPTURES_ITEMS} items", 20_000),
    "maps": Axis(maps, decades(0, 4), f"maps of {MAPS_ITEMS} items alive", 60_000),
    "size": Axis(size, [4 * 32**power for power in range(6)] + [2**30, 2**32], "bytes of a tensor", 8),
}


def point(axis: str, count: int, processes: int, rounds: int) -> dict[str, float]:
    """In a process that has done nothing before: seconds (the best of some rounds), peaks of memory beyond the start's."""
    with mpgrad.Pool(processes) as pool:
        AXES[axis].job(pool, min(count, 10))
        workers = [worker.pid for worker in pool.stats().workers]
        before = [peak_bytes("self"), sum(map(peak_bytes, workers))]
        runs = [AXES[axis].job(pool, count) for _ in range(rounds)]
        workers = [worker.pid for worker in pool.stats().workers]
        after = [peak_bytes("self"), sum(map(peak_bytes, workers))]
    return {
        "forward": min(run.forward for run in runs),
        "backward": min(run.backward for run in runs),
        "parent": after[0] - before[0],
        "workers": after[1] - before[1],
    }
