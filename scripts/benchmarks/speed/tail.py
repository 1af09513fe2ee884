"""Heavy-tailed costs that nobody knows beforehand, against the best schedule for what they turn out to be.

Every call notes what its forward and its backward took, where it ran; the best schedule of those same costs is then
computed (for graphs="ahead": of the costs in the last serial loop with a backward after each item). Clocks inside a call do
not see all that it costs (the engine before and after, dropping its graph): the serial loop in the same order and round
tells how much more that is. So the figure is what scheduling, messages and waiting add.

    item ──► Begin ──► forward ──► End ──► loss          times[0, number]: from Begin to End
         ◄──       ◄── backward ◄──     ◄──              times[1, number]: from End to Begin
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import Batch, Contender, Function, Outcome, batch_of, calibrated, check, serial, timed
from figures import Figure, interleaved, median_figure, ratios
from jobs import PYTHON, backward_at_once, log_normal, longest_first, one_backward
from losses import python_loss
from torch import Tensor

from speed.plan import Plan, Pools

AIM = ("<=", 1.1)
SIGMA = 2.0
AT_ONCE = "serial, at once"
FLOATS = 100  # of an item, after its number of steps and its own number
REFERENCE_SECONDS = 1e-3

Times = np.ndarray[Any, np.dtype[np.float64]]  # (2, items): seconds of forward and backward


class Stopwatch:
    def __init__(self, times: Times, number: int) -> None:
        self._times = times
        self._number = number
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, phase: int) -> None:
        self._times[phase, self._number] = time.perf_counter() - self._began


class Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Stopwatch) -> Tensor:
        ctx.watch = watch
        watch.start()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.stop(1)
        return *grads, None


class End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, watch: Stopwatch) -> Tensor:
        ctx.watch = watch
        watch.stop(0)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.start()
        return *grads, None


def clocked(x: Tensor, file: Path, count: int) -> Tensor:
    steps, number = (int(entry) for entry in x[:2].tolist())
    watch = Stopwatch(times_in(file, count), number)
    loss = python_loss(Begin.apply(x, watch)[2:], steps)  # type: ignore[no-untyped-call]
    seen: Tensor = End.apply(loss, watch)  # type: ignore[no-untyped-call]
    return seen


def unclocked(x: Tensor) -> Tensor:
    return python_loss(x[2:], int(x[0]))


@functools.cache
def times_in(file: Path, count: int) -> Times:
    return np.memmap(file, np.float64, "r+", shape=(2, count))


def two_phases(times: Times, workers: int) -> float:
    """Every forward has to be done before the loss is there, and with it any backward."""
    return longest_first(times[0].tolist(), workers) + longest_first(times[1].tolist(), workers)


def one_phase(times: Times, workers: int) -> float:
    return longest_first(times.sum(0).tolist(), workers)


class Way(NamedTuple):
    run: Callable[[Batch], Outcome]
    schedule: Callable[[Times, int], float]
    workers: int
    serial: str  # the loop in the same order


def ways(pools: Pools, function: Function) -> dict[str, Way]:
    """The clocks are Functions, which pools run ahead as long as gradients of one come: "ahead" goes without."""
    workers = pools.processes
    return {
        "serial": Way(partial(one_backward, serial, function), one_phase, 1, "serial"),
        AT_ONCE: Way(partial(backward_at_once, function), one_phase, 1, AT_ONCE),
        "keep": Way(partial(one_backward, pools.keep.map, function), two_phases, workers, "serial"),
        "ahead": Way(partial(one_backward, pools.ahead.map, unclocked), one_phase, workers, AT_ONCE),
    }


def bench_tail(pools: Pools, plan: Plan) -> Iterator[Figure]:
    count = plan.tail_items
    steps = calibrated(PYTHON, REFERENCE_SECONDS, backward_at_once) / REFERENCE_SECONDS * plan.tail_seconds / count
    items = [
        torch.cat([torch.tensor([max(1.0, round(steps * cost)), number]), torch.randn(FLOATS)])
        for number, cost in enumerate(log_normal(count, SIGMA))
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = times_file(Path(folder) / "times", count)
        all_ways = ways(pools, partial(clocked, file=file, count=count))
        check([Contender(name, way.run, count) for name, way in all_ways.items()], items)
        over: dict[str, list[float]] = {name: [] for name in all_ways}

        def seconds(name: str) -> float:
            nonlocal at_once
            way = all_ways[name]
            wall = timed(way.run, batch_of(items))
            times = at_once if name == "ahead" else times_in(file, count).copy()
            over[name].append(wall / way.schedule(times, way.workers))
            at_once = times if name == AT_ONCE else at_once
            return wall

        at_once = times_in(file, count).copy()
        seconds(AT_ONCE)
        over[AT_ONCE].clear()
        results = interleaved({name: partial(seconds, name) for name in all_ways}, plan.repeats)
        times_in.cache_clear()  # it maps the file
    row = f"tail: {count} items of log-normal cost (sigma {SIGMA:g}), Python-bound, forward and backward"
    for name, walls in results.items():
        yield median_figure(row, name, [1e3 * wall for wall in walls], "ms")
    for name in ("keep", "ahead"):
        beyond = ratios(over[name], over[all_ways[name].serial])[-plan.repeats :]
        yield median_figure(row, f"{name} over the best schedule", beyond, "x", AIM)


def times_file(file: Path, count: int) -> Path:
    np.zeros((2, count)).tofile(file)
    return file
