"""Measures how fast the pool is, and compares it with the figures that it has to reach. One run
measures every row of that table.

Contenders take turns in a random order, every figure is the median over such rounds, and ratios are
taken within a round. Each contender that returns values and gradients is compared with the serial
loop before it is timed. "over one backward" is the speed-up over the serial loop with one backward
over all items. "over the best order" is the speed-up over the faster of this loop and the one with
a backward right after each item.

    row ──► contenders checked ──► rounds of them in turns ──► figures ──► table, --json

With --compare each row is measured with the code of another checkout, and right afterwards with the
code of this one.

    python scripts/benchmarks/bench_speed.py                           # all rows, about 15 minutes
    python scripts/benchmarks/bench_speed.py --rows tiny forward --compare ../older-checkout
    python scripts/benchmarks/bench_speed.py --rows memory --calls 1000000  # a long run
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import ctypes
import itertools
import json
import multiprocessing
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import jobs
import numpy
import torch
from common import (
    WARM_UPS,
    Figure,
    Record,
    WrongResultError,
    add_options,
    at_least_1,
    cpu_seconds,
    fail,
    interleaved,
    limited,
    median_figure,
    print_figures,
    print_surroundings,
    ratios,
    report,
    sent,
    surroundings,
)
from jobs import (
    OP,
    PYTHON,
    Batch,
    Function,
    Loop,
    LoopsApart,
    Part,
    Run,
    Work,
    backward_at_once,
    backward_with_ones,
    batch_of,
    calibrated,
    copied,
    doubled,
    forward,
    large_items,
    measured,
    one_backward,
    python_item,
    python_loss,
    serial,
    timed,
    timed_turns,
    tiny_items,
    work_items,
)
from torch import Tensor

import mpgrad

EPILOG = (
    "exit status: 0 if everything was measured, 1 if a contender is wrong or the time is up, 2 for "
    "wrong arguments"
)

TINY_AIMS = {"tiny": ("<=", 40.0), "forward": ("<=", 15.0)}  # microseconds an item
# by grain in ms: the speed of a pool without options, as a share of the speed of as many loops that
# share nothing
SHARE_AIMS = {10: 0.93, 1: 0.90, 0.3: 0.85, 0.1: 0.70}
STEP_AIMS = {1: 31.0, 0.3: 25.0}  # microseconds of the caller, by grain in ms
STEP_AIM = 1.07
MANY_WORKERS = 64
# microseconds of the caller and of the workers
LONE_AIMS = {"submit": (200.0, 80.0), "forward and backward": (450.0, 200.0)}
LONE_AIM = 1.25
OBJECT_AIMS = {"changed": ("<=", 1.0), "unchanged": ("<=", 0.8), "item": ("<=", 1.0)}
TABLE_AIM, ARRAY_AIM = ("<=", 0.6), ("<=", 1.2)
SUBMITS = 20  # in a round, with an unchanged table
STILL = 4  # maps, after which an unchanged object is known to be unchanged
LAYERS_AIMS = {3: 1.7, 1: 1.5, 0.3: 0.9}  # speed-ups by grain in ms
START_AIM, FURTHER_AIM = ("<=", 1.15), ("<=", 50.0)
MEMORY_AIM = ("<=", 30.0)  # MiB
NOTHING = ("<=", 0.0)
PHENOBARBITAL_AIM = (">=", 1.85)

GRAPHS = ("keep", "auto")
GRADIENTS: Mapping[str, Callable[[int], float]] = {  # of the losses of a map, by its number
    "the same in each map": lambda number: 1.0,
    "another in each map": lambda number: 1.0 + number,
    "another every 10 maps": lambda number: 1.0 + number // 10,
}
CALLS = 50  # in a chunk of calls that are sent one by one
CAPTURE_SECONDS = 5e-4  # of an item of the map with captures
PARAMETERS = 64
PROGRAM_LIMIT = 100  # seconds
MOST_PROGRAMS = 5  # of one kind


@dataclass(frozen=True)
class Plan:
    """Holds the sizes and limits of the measurement."""

    processes: int = 2
    repeats: int = 9
    tiny_items: int = 1000
    work_seconds: float = 0.3  # of a serial run
    maps: int = 20  # one after another, because a pool learns from map to map
    huge_seconds: float = 1.0  # of a serial run of the huge map
    grains_ms: Sequence[float] = (10, 1, 0.3, 0.1)
    lone_calls: int = 300
    layers: int = 20  # of 8 calls each
    call_grains_ms: Sequence[float] = (3, 1, 0.3)
    tensors: int = 32
    largest_bytes: int = 16_000_000
    capture_bytes: int = 100_000_000
    capture_items: int = 512
    parts: int = 10_000  # of an object
    entries: int = 200_000  # of a dictionary
    array_bytes: int = 1 << 30
    further_workers: int = 8
    idle_seconds: float = 10.0
    megabytes: int = 64  # of a map whose peak of memory is measured, one per item
    # The number of calls over which growth of memory is measured. Workers still warm up then, and
    # grow ten times as fast as over a million calls.
    calls: int = 20_000
    limit: int = 3000  # seconds, after which the whole run is stopped


QUICK = Plan(
    repeats=1,
    tiny_items=20,
    work_seconds=0.02,
    maps=3,
    huge_seconds=0.02,
    grains_ms=(1,),
    lone_calls=5,
    layers=2,
    call_grains_ms=(0.3,),
    tensors=4,
    largest_bytes=1_000_000,
    capture_bytes=1_000_000,
    capture_items=16,
    parts=100,
    entries=1000,
    array_bytes=1 << 21,
    further_workers=1,
    idle_seconds=0.2,
    megabytes=4,
    calls=200,
    limit=120,
)


class Pools:
    """Each pool starts when a row first needs it, and is kept to the end, because an idle pool
    costs the others nothing."""

    def __init__(self, processes: int, stack: contextlib.ExitStack) -> None:
        self._processes = processes
        self._stack = stack
        self._started: dict[str, mpgrad.Pool] = {}

    def __getitem__(self, graphs: str) -> mpgrad.Pool:
        """Return the pool with these graphs."""
        if graphs not in self._started:
            self._started[graphs] = self._stack.enter_context(new_pool(self._processes, graphs))
        return self._started[graphs]


def new_pool(processes: int, graphs: str) -> mpgrad.Pool:
    """Make a pool with these graphs; "auto" is a pool without options."""
    options: Record = {} if graphs == "auto" else {"graphs": graphs, **sent(mpgrad.Pool)}
    pool: mpgrad.Pool = mpgrad.Pool(processes, **options)
    return pool


# --- tiny tensors


def bench_tiny(pools: Pools, plan: Plan) -> Iterator[Figure]:
    yield from tiny_figures("tiny: x * 2, forward and backward", backward_with_ones, pools, plan)


def bench_forward(pools: Pools, plan: Plan) -> Iterator[Figure]:
    yield from tiny_figures("forward: x * 2, forward only, no gradient", forward, pools, plan)


def tiny_figures(row: str, way: Callable[..., Any], pools: Pools, plan: Plan) -> Iterator[Figure]:
    loops: dict[str, Loop] = {"serial": serial, "pool": pools["keep"].map}
    contenders: dict[str, Run] = {name: partial(way, loop, doubled) for name, loop in loops.items()}
    for name, seconds in measured(contenders, tiny_items(plan.tiny_items), plan.repeats).items():
        aim = TINY_AIMS[row.partition(":")[0]] if name == "pool" else None
        yield median_figure(row, name, [1e6 * value for value in seconds], "us/item", aim)


PARTS = ("caller, forward", "workers, forward", "caller, backward", "workers, backward")


def bench_budget(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """Measure the CPU time of a tiny call, of the caller and of the workers."""
    items = [item.requires_grad_() for item in tiny_items(2 * plan.tiny_items)]
    ways = {"one by one": CALLS, "in bundles": None}
    turns = {
        name: partial(cpu_of_parts, pools["keep"], items, chunksize)
        for name, chunksize in ways.items()
    }
    for name, rounds in interleaved(turns, plan.repeats).items():
        row = f"budget: CPU time of x * 2, forward and backward, calls {name}"
        for part, values in zip(PARTS, zip(*rounds, strict=True), strict=True):
            yield median_figure(row, part, values, "us/item")


def cpu_of_parts(pool: mpgrad.Pool, items: Sequence[Tensor], chunksize: int | None) -> list[float]:
    """Return the microseconds per item, of each of PARTS."""
    for item in items:
        item.grad = None
    moments = [cpu_so_far(pool)]
    results = pool.map(doubled, items, chunksize)
    moments.append(cpu_so_far(pool))
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    moments.append(cpu_so_far(pool))
    spent = [
        now - then
        for before, after in itertools.pairwise(moments)
        for then, now in zip(before, after, strict=True)
    ]
    return [1e6 * seconds / len(items) for seconds in spent]


def cpu_so_far(pool: mpgrad.Pool) -> tuple[float, float]:
    """Return the CPU seconds that the caller and the workers have used so far."""
    return time.process_time(), cpu_seconds(worker.pid for worker in pool.stats().workers)


# --- speed-ups, by how long an item takes


def bench_python(pools: Pools, plan: Plan) -> Iterator[Figure]:
    for ms in plan.grains_ms:
        yield from grain_figures("python", PYTHON, ms, pools, plan)


def bench_op(pools: Pools, plan: Plan) -> Iterator[Figure]:
    for ms in plan.grains_ms:
        yield from grain_figures("op", OP, ms, pools, plan)


def grain_figures(name: str, work: Work, ms: float, pools: Pools, plan: Plan) -> Iterator[Figure]:
    function, items = work_items(work, ms / 1e3, plan.work_seconds)
    orders: dict[str, Run] = {
        "serial": partial(one_backward, serial, function),
        "serial, at once": partial(backward_at_once, function),
    }
    maps: dict[str, Run] = {
        graphs: partial(one_backward, pools[graphs].map, function) for graphs in GRAPHS
    }
    with contextlib.ExitStack() as stack:
        turns = timed_turns({**orders, **maps}, items)
        for order, run in orders.items():
            loops = stack.enter_context(contextlib.closing(LoopsApart(run, items, plan.processes)))
            turns[apart(order)] = loops.seconds
        seconds = interleaved(turns, plan.repeats)
    best, limit = (
        min(map(seconds.__getitem__, names), key=statistics.median)
        for names in (orders, map(apart, orders))
    )
    row = f"{name}: {work.name} items of {ms:g} ms, forward and backward"
    for contender, values in seconds.items():
        yield median_figure(row, contender, [1e3 * value for value in values], "ms/item")
    for graphs in GRAPHS:
        yield median_figure(
            row, f"{graphs} over one backward", ratios(seconds["serial"], seconds[graphs]), "x"
        )
        yield median_figure(
            row, f"{graphs} over the best order", ratios(best, seconds[graphs]), "x"
        )
    yield median_figure(
        row, "loops that share nothing over the best order", ratios(best, limit), "x"
    )
    share = ratios(limit, seconds["auto"])
    yield median_figure(row, "auto, as a share of these loops", share, "", (">=", SHARE_AIMS[ms]))


def apart(order: str) -> str:
    return f"{order}, in processes that share nothing"


def bench_step(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """Compare the CPU time of a training step in the default pool with that of loops that share
    nothing."""
    for work, ms in itertools.product((PYTHON, OP), STEP_AIMS):
        function, items = work_items(work, ms / 1e3, plan.work_seconds)
        run = partial(one_backward, pools["auto"].map, function)
        with contextlib.closing(
            LoopsApart(partial(backward_at_once, function), items, plan.processes)
        ) as loops:
            turns = {
                "pool": partial(cpu_of_step, run, pools["auto"], items),
                "loops": lambda loops=loops: [1e6 * loops.cpu_seconds()],
            }
            rounds = interleaved(turns, plan.repeats)
        callers, workers = zip(*rounds["pool"], strict=True)
        over_loops = ratios(*[[sum(each) for each in rounds[name]] for name in turns])
        row = f"step: CPU time of {work.name} items of {ms:g} ms, forward and backward"
        yield median_figure(
            row, "caller", callers, "us/item", ("<=", STEP_AIMS[ms]) if work is PYTHON else None
        )
        yield median_figure(row, "workers", workers, "us/item")
        yield median_figure(
            row, "both, over loops that share nothing", over_loops, "x", ("<=", STEP_AIM)
        )
        # This is computed, because no machine with so many CPUs was available.
        busy = [1e3 * ms / (MANY_WORKERS * caller) for caller in callers]
        yield median_figure(
            row, f"share of the time of {MANY_WORKERS} workers that the caller can fill", busy, ""
        )


def cpu_of_step(run: Run, pool: mpgrad.Pool, items: Sequence[Tensor]) -> list[float]:
    """Return the microseconds per item, of the caller and of the workers."""
    batch, before = batch_of(items), cpu_so_far(pool)
    timed(run, batch)
    return [
        1e6 * (now - then) / len(items) for then, now in zip(before, cpu_so_far(pool), strict=True)
    ]


# --- single calls


def bench_lone(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """Measure calls, each of which is awaited before the next one."""
    pool, leaf = pools["auto"], torch.ones(3, requires_grad=True)
    executor = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    ways: dict[str, Callable[[], object]] = {
        "submit": lambda: pool.submit(abs, -1).result(),
        "apply": lambda: pool.apply(abs, (-1,)),
        "forward and backward": lambda: pool.submit(python_loss, leaf, 1).result().backward(),
        "ProcessPoolExecutor.submit": lambda: executor.submit(abs, -1).result(),
    }
    with executor:
        for way in ways.values():
            way()
        turns = {
            name: partial(cost_of_calls, way, pool, plan.lone_calls) for name, way in ways.items()
        }
        rounds = interleaved(turns, plan.repeats)
    peer, _, _ = zip(*rounds["ProcessPoolExecutor.submit"], strict=True)
    for name, each in rounds.items():
        walls, callers, workers = zip(*each, strict=True)
        of_caller, of_workers = (
            [("<=", aim) for aim in LONE_AIMS[name]] if name in LONE_AIMS else (None, None)
        )
        yield median_figure(f"lone: {name}", "wall time", walls, "us")
        yield median_figure(f"lone: {name}", "CPU time of the caller", callers, "us", of_caller)
        if "." not in name:  # the pool's
            yield median_figure(f"lone: {name}", "CPU time of workers", workers, "us", of_workers)
            aim = ("<=", LONE_AIM) if name == "submit" else None
            yield median_figure(
                f"lone: {name}",
                "wall time over ProcessPoolExecutor.submit's",
                ratios(walls, peer),
                "x",
                aim,
            )


def cost_of_calls(
    way: Callable[[], object], pool: mpgrad.Pool, count: int
) -> tuple[float, float, float]:
    """Return the microseconds of a call: by the wall clock, and the CPU time of the caller and of
    the workers."""
    before, started = cpu_so_far(pool), time.perf_counter()
    for _ in range(count):
        way()
    wall = time.perf_counter() - started
    caller, workers = (now - then for then, now in zip(before, cpu_so_far(pool), strict=True))
    return 1e6 * wall / count, 1e6 * caller / count, 1e6 * workers / count


WIDTH = 8  # calls of a layer


def bench_layers(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """Measure calls whose arguments are the results of two calls of the layer before, without
    waiting for these."""
    pool = pools["auto"]
    for ms in plan.call_grains_ms:
        for part, backward in (("forward", False), ("forward and backward", True)):
            call = partial(sines_of_two, steps=steps_for(ms / 1e3, backward))
            ways = {"serial": call, "pool": partial(pool.submit, call)}
            turns = {
                name: partial(seconds_of_layers, way, plan.layers, backward)
                for name, way in ways.items()
            }
            seconds = interleaved(turns, plan.repeats)
            row = (
                f"layers: {plan.layers} of {WIDTH} calls of {ms:g} ms, each of two results, {part}"
            )
            aim = (">=", LAYERS_AIMS[ms])
            yield median_figure(
                row, "pool over serial", ratios(seconds["serial"], seconds["pool"]), "x", aim
            )


def sines_of_two(x: Tensor, y: Tensor, steps: int) -> Tensor:
    z = x + y
    for _ in range(steps):
        z = z.sin()
    return z


def steps_for(seconds: float, backward: bool) -> int:
    """Return the number of steps with which a forward takes so long. With `backward`, the forward
    records a graph, which takes longer."""
    x, steps = torch.randn(10, requires_grad=backward), 100
    took = min(timeit.repeat(lambda: sines_of_two(x, x, steps), number=1, repeat=20))
    return max(1, round(steps * seconds / took))


def seconds_of_layers(call: Callable[[Any, Any], Any], layers: int, backward: bool) -> float:
    row: list[Any] = [torch.linspace(-1, 1, 10, requires_grad=backward) for _ in range(WIDTH)]
    started = time.perf_counter()
    for _ in range(layers):
        row = [call(row[place], row[(place + 1) % WIDTH]) for place in range(WIDTH)]
    results = [each if isinstance(each, Tensor) else each.result() for each in row]
    if backward:
        torch.autograd.backward(torch.stack(results).sum())
    return time.perf_counter() - started


# --- what a pool learns about its losses


class Maps:
    """Runs maps of a function, one after another, with given gradients of their losses."""

    def __init__(
        self,
        loop: Loop,
        function: Function,
        items: Sequence[Tensor],
        gradient: Callable[[int], float],
    ) -> None:
        self._loop = loop
        self._function = function
        self._items = items
        self._gradient = gradient
        self._number = itertools.count()  # of all maps so far

    def seconds(self, count: int) -> float:
        """Return the mean seconds of `count` maps with their backwards."""
        batches = [batch_of(self._items) for _ in range(count)]
        began = time.perf_counter()
        for batch in batches:
            self._run(batch)
        return (time.perf_counter() - began) / count

    def gradients(self, count: int) -> list[Tensor | None]:
        batches = [batch_of(self._items) for _ in range(count)]
        for batch in batches:
            self._run(batch)
        return [item.grad for batch in batches for item in batch.items]

    def _run(self, batch: Batch) -> None:
        total = torch.stack(tuple(self._loop(self._function, batch.items))).sum()
        (total * self._gradient(next(self._number))).backward()  # type: ignore[no-untyped-call]


def bench_gradients(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """Measure a pool that does not know the function yet, for each of GRADIENTS."""
    function, items = work_items(PYTHON, 1e-3, plan.work_seconds / 10)
    for name, gradient in GRADIENTS.items():
        with contextlib.ExitStack() as stack:
            loops: dict[str, Loop] = {"serial": serial}
            for graphs in GRAPHS:
                loops[graphs] = stack.enter_context(new_pool(plan.processes, graphs)).map
            maps = {each: Maps(loop, function, items, gradient) for each, loop in loops.items()}
            right, *given = (each.gradients(plan.maps) for each in maps.values())
            for each in given:
                torch.testing.assert_close(each, right)
            seconds = interleaved(
                {each: partial(own.seconds, plan.maps) for each, own in maps.items()}, plan.repeats
            )
        row = f"gradients: {plan.maps} maps of {len(items)} Python-bound items of 1 ms, {name}"
        for each, values in seconds.items():
            yield median_figure(row, each, [1e3 * value for value in values], "ms/map")
        yield median_figure(row, "auto over keep", ratios(seconds["keep"], seconds["auto"]), "x")


def bench_huge(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """Measure the first map of a pool, which knows nothing of its losses yet."""
    function, items = work_items(OP, 1e-3, plan.huge_seconds)
    turns = {
        graphs: partial(first_map, plan.processes, graphs, function, items) for graphs in GRAPHS
    }
    row = (
        f"huge: the first map of a pool, {len(items)} op-bound items of 1 ms, forward and backward"
    )
    for graphs, rounds in interleaved(turns, plan.repeats).items():
        seconds, taken = zip(*rounds, strict=True)
        yield median_figure(row, graphs, [1e3 * value / len(items) for value in seconds], "ms/item")
        yield median_figure(
            row, f"{graphs}, memory between the two", [value / 2**20 for value in taken], "MiB"
        )


def first_map(
    processes: int, graphs: str, function: Function, items: Sequence[Tensor]
) -> tuple[float, float]:
    """Return the seconds, and the additional bytes of the workers between forward and backward."""
    batch = batch_of(items)
    with new_pool(processes, graphs) as pool:
        pool.map(time.sleep, [0.01] * 4 * processes, 1)  # all have started
        before = pool.stats().resident_bytes
        began = time.perf_counter()
        losses = pool.map(function, batch.items)
        forward_ended = time.perf_counter()
        taken = pool.stats().resident_bytes - before
        backward_began = time.perf_counter()
        torch.stack(tuple(losses)).sum().backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - backward_began + forward_ended - began, float(taken)


# --- what moves much memory


def bench_transfer(pools: Pools, plan: Plan) -> Iterator[Figure]:
    items = large_items(plan.tensors, plan.largest_bytes)
    megabytes = sum(item.nbytes for item in items) / 1e6
    row = f"transfer: x.clone(), {len(items)} tensors, {megabytes:.0f} MB, forward and backward"
    contenders: dict[str, Run] = {
        "serial": partial(backward_with_ones, serial, copied),
        "pool": partial(backward_with_ones, pools["keep"].map, copied),
    }
    for name, seconds in measured(contenders, items, plan.repeats).items():
        yield median_figure(row, name, [1e3 * value for value in seconds], "ms/item")


def with_captures(weights: Sequence[Tensor], x: Tensor, steps: int) -> Tensor:
    """Use one whole parameter for each item."""
    return python_loss(x, steps) * weights[x.numel() % len(weights)].sum()


def bench_captures(pools: Pools, plan: Plan) -> Iterator[Figure]:
    floats = plan.capture_bytes // 4 // PARAMETERS
    weights = [torch.full((floats,), 1 / floats, requires_grad=True) for _ in range(PARAMETERS)]
    steps = calibrated(PYTHON, CAPTURE_SECONDS)
    items = [python_item(steps) for _ in range(plan.capture_items)]
    captured = Captured(weights, partial(with_captures, weights, steps=steps), items)
    loops: dict[str, Loop] = {"serial": serial, "pool": pools["keep"].map}
    captured.check(loops["pool"])
    seconds = interleaved(
        {name: partial(captured.seconds, loop) for name, loop in loops.items()}, plan.repeats
    )
    row = (
        f"captures: {PARAMETERS} parameters, {plan.capture_bytes / 1e6:g} MB, {len(items)} items, "
        "forward and backward"
    )
    for name, values in seconds.items():
        yield median_figure(row, name, [1e3 * value for value in values], "ms")


class Captured:
    """Holds a function and the parameters that it captures. They change before every run, as an
    optimiser would change them."""

    def __init__(
        self, weights: Sequence[Tensor], function: Function, items: Sequence[Tensor]
    ) -> None:
        self._weights = weights
        self._function = function
        self._items = items

    def seconds(self, loop: Loop) -> float:
        self._step()
        return timed(partial(one_backward, loop, self._function), batch_of(self._items))

    def check(self, loop: Loop) -> None:
        right, given = (self._gradients(each) for each in (serial, loop))
        try:
            torch.testing.assert_close(given, right)
        except AssertionError as error:
            raise WrongResultError(
                "pool: a gradient of a capture differs from the serial loop's"
            ) from error

    def _gradients(self, loop: Loop) -> list[Tensor | None]:
        self._step()
        batch = batch_of(self._items)
        one_backward(loop, self._function, batch)
        return [tensor.grad for tensor in (*batch.items, *self._weights)]

    def _step(self) -> None:
        with torch.no_grad():
            for weight in self._weights:
                weight.mul_(1)
                weight.grad = None


class ScriptPart(Part):
    """The same part, in a class of the script, which is pickled by value."""


def bench_objects(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """Measure an object of many small parts, without tensors, as a capture and as an item."""
    for kind, where in ((Part, "module"), (ScriptPart, "script")):
        parts = [kind(number) for number in range(plan.parts)]
        yield from object_figures(
            f"objects: {plan.parts} parts, class of a {where}", parts, pools, plan
        )
    yield from table_figures(pools["auto"], plan)
    yield from array_figures(pools["auto"], plan)


def table_figures(pool: mpgrad.Pool, plan: Plan) -> Iterator[Figure]:
    """Measure a module's dictionary that does not change, and one C pickle of it."""
    jobs.TABLE.update({number: number / 2 for number in range(plan.entries)})

    def submits() -> None:
        last = [pool.submit(jobs.entry, number) for number in range(SUBMITS)][-1]
        if last.result() != jobs.TABLE[SUBMITS - 1]:
            raise WrongResultError("an entry of the table differs")

    submits()  # pickled until it is known not to change
    rounds = interleaved_seconds(
        {"submits": submits, "pickle.dumps": lambda: pickle.dumps(jobs.TABLE, 5)}, plan
    )
    each = [seconds / SUBMITS for seconds in rounds["submits"]]
    yield median_figure(
        f"objects: a module's dictionary of {plan.entries} entries",
        "a submit, over pickle.dumps",
        ratios(each, rounds["pickle.dumps"]),
        "",
        TABLE_AIM,
    )


def array_figures(pool: mpgrad.Pool, plan: Plan) -> Iterator[Figure]:
    """Measure a map with a large array that does not change, and one comparison of its bytes."""
    array = numpy.ones(plan.array_bytes // 8)
    other, constant = array.copy(), array.copy()
    constant.flags.writeable = False
    memcmp = ctypes.CDLL(None).memcmp
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (array, other)]
    turns: dict[str, Callable[[], object]] = {
        "memcmp": lambda: memcmp(*pointers, ctypes.c_size_t(array.nbytes)),
        "map": lambda: pool.map(lambda x: array[-1] * x, [1.0, 2.0]),
        "map, read-only": lambda: pool.map(lambda x: constant[-1] * x, [1.0, 2.0]),
    }
    rounds = interleaved_seconds(turns, plan)
    row = f"objects: an array of {plan.array_bytes >> 20} MiB"
    for name in ("map", "map, read-only"):
        yield median_figure(
            row, f"{name}, over one memcmp", ratios(rounds[name], rounds["memcmp"]), "", ARRAY_AIM
        )


def interleaved_seconds(
    turns: Mapping[str, Callable[[], object]],
    plan: Plan,
    before: Mapping[str, Callable[[], None]] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each turn in each round. `before` has functions that run before some of
    the turns."""
    rounds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-WARM_UPS, plan.repeats):
        for name, turn in turns.items():
            if before and name in before:
                before[name]()
            seconds = timeit.timeit(turn, number=1)
            if number >= 0:
                rounds[name].append(seconds)
    return rounds


def object_figures(row: str, parts: Sequence[Part], pools: Pools, plan: Plan) -> Iterator[Figure]:
    def captured(x: float) -> float:
        return parts[-1].rate * x

    def captured_still(x: float) -> float:
        return still[-1].rate * x

    def change() -> None:
        parts[0].rate += 1.0

    still = copy.deepcopy(parts)
    # Loading a class of this script here would give it new methods, which is a change.
    pickled = cloudpickle.dumps([Part(number) for number in range(len(parts))])
    pool, items = pools["auto"], [parts, parts]
    turns: dict[str, Callable[[], object]] = {
        "cloudpickle.dumps": lambda: cloudpickle.dumps(parts),
        "pickle.loads": lambda: pickle.loads(pickled),
        "changed": lambda: pool.map(captured, [1.0, 2.0]),
        "unchanged": lambda: pool.map(captured_still, [1.0, 2.0]),
        "item": lambda: pool.map(last_rate, items),
    }
    for _ in range(STILL):
        pool.map(captured_still, [1.0, 2.0])
    rounds = interleaved_seconds(turns, plan, dict.fromkeys(("changed", "item"), change))
    rounds["item"] = [seconds / len(items) for seconds in rounds["item"]]
    dumps, loads = rounds["cloudpickle.dumps"], rounds["pickle.loads"]
    both = [sum(pair) for pair in zip(dumps, loads, strict=True)]
    for name, aim in OBJECT_AIMS.items():
        base, words = (dumps, "dumps") if name == "unchanged" else (both, "(dumps + loads)")
        yield median_figure(
            row, f"{name}, over {words} of cloudpickle", ratios(rounds[name], base), "", aim
        )
    yield median_figure(row, "cloudpickle.dumps", [1e3 * each for each in dumps], "ms")


def last_rate(parts: Sequence[Part]) -> float:
    return parts[-1].rate


# --- processes, each time in a fresh program, where no other fork server is warm or idle

STARTED = """
import time
started = time.monotonic()
import torch
imported = time.monotonic()
import json, os, pathlib, sys
import psutil
from mpgrad import Pool  # the package imports what is asked for; the clock is for what it does then

processes, further, options, seconds, megabytes, calls, repeats = json.loads(sys.argv[1])

def all_answer(pool, workers):
    seen = set()
    while len(seen) < workers:  # a call sleeps, else one worker would take all
        seen |= set(pool.map(lambda _: (time.sleep(2e-3), os.getpid())[1], range(2 * workers)))

def differentiated(pool):
    leaf = torch.ones(3, requires_grad=True)
    sum(pool.map(torch.exp, [leaf] * 4 * processes)).sum().backward()

def everyone():
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
"""

START = """
began = time.monotonic()
with Pool(processes, **options) as pool:
    pool.map(torch.neg, [torch.ones(3)])
    first = time.monotonic()
    all_answer(pool, processes)
    before = time.monotonic()
    pool.resize(processes + further)
    all_answer(pool, processes + further)
    print(json.dumps([imported - started, first - began, (time.monotonic() - before) / further]))
"""

MEMORY = """
with Pool(processes, **options) as pool:
    all_answer(pool, processes)
    first = {worker.pid for worker in pool.stats().workers}
    pool.resize(processes + further)
    all_answer(pool, processes + further)
    differentiated(pool)
    pids = [worker.pid for worker in pool.stats().workers if worker.pid not in first]
    used = [psutil.Process(pid).memory_full_info() for pid in pids]
    print(json.dumps([[each.uss / 2**20 for each in used], [each.pss / 2**20 for each in used]]))
"""

HELD = """
import logging, re, threading

# it warns that tiny functions are too cheap for a pool
logging.getLogger("mpgrad").setLevel(logging.ERROR)

def held():
    '''MiB of the caller and each other: PSS, so shared memory counts once, without files, which
    others may map too.'''
    what = "Pss_(?:Anon|Shmem): *([0-9]+)"
    rollups = [pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in everyone()]
    return [sum(map(int, re.findall(what, each))) / 2**10 for each in rollups]

def exp_of(leaves):
    results = pool.map(torch.exp, leaves)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])

def go_on(calls):
    for begun in range(0, calls, 1000):
        count = min(1000, calls - begun)
        pool.map(abs, range(count // 2))
        exp_of([torch.ones(3, requires_grad=True) for _ in range(count - count // 2)])

def peak():
    seen, ended = [], threading.Event()

    def watch():
        while not ended.wait(1e-3):
            seen.append(sum(held()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    exp_of([torch.ones(250_000, requires_grad=True) for _ in range(megabytes)])
    ended.set()
    watcher.join()
    return max(seen)

with Pool(processes, **options) as pool:
    all_answer(pool, processes)
    go_on(min(calls, 20_000))  # until what is kept for further calls is there
    before = held()
    go_on(calls)
    after = held()
    # the first few are lower: what is freed is kept for later
    peaks = [peak() - sum(after) for _ in range(repeats)]
    print(json.dumps([after[0] - before[0], sum(after[1:]) - sum(before[1:]), peaks]))
"""

IDLE = """
def used(tasks):
    '''Nanoseconds that these threads ran, and how often they were given a CPU.'''
    runs = [list(map(int, (task / "schedstat").read_text().split())) for task in tasks]
    return [sum(run[0] for run in runs), sum(run[2] for run in runs)]

def state():
    tasks = [task for pid in everyone() for task in pathlib.Path(f"/proc/{pid}/task").iterdir()]
    # this thread sleeps and reads
    return used([task for task in tasks if task.name != str(os.getpid())])

with Pool(processes, **options) as pool:
    all_answer(pool, processes)
    differentiated(pool)
    time.sleep(seconds / 4)  # what follows a map at once is not idling
    before = state()
    time.sleep(seconds)
    print(json.dumps([now - then for now, then in zip(state(), before)]))
"""


def run_program(program: str, plan: Plan) -> Any:
    options, counts = sent(mpgrad.Pool), [plan.megabytes, plan.calls, plan.repeats]
    settings = [plan.processes, plan.further_workers, options, plan.idle_seconds, *counts]
    command = [sys.executable, "-c", STARTED + program, json.dumps(settings)]
    limit = PROGRAM_LIMIT + plan.calls / 1000
    # otherwise the program would import mpgrad from the directory where this one was started
    folder = Path(mpgrad.__file__).parents[1]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, timeout=limit, cwd=folder
    )
    return json.loads(ended.stdout)


def bench_start(pools: Pools, plan: Plan) -> Iterator[Figure]:
    runs = [run_program(START, plan) for _ in range(min(plan.repeats, MOST_PROGRAMS))]
    imports, firsts, furthers = zip(*runs, strict=True)
    row = f"start: of a pool of {plan.processes} in a fresh program"
    yield median_figure(row, "import torch", imports, "s")
    yield median_figure(row, "from Pool() to the first result", firsts, "s")
    yield median_figure(
        row,
        "from Pool() to the first result over import torch",
        ratios(firsts, imports),
        "x",
        START_AIM,
    )
    milliseconds = [1e3 * seconds for seconds in furthers]
    yield median_figure(
        row, "each further worker, until it has answered", milliseconds, "ms", FURTHER_AIM
    )


def bench_memory(pools: Pools, plan: Plan) -> Iterator[Figure]:
    row = f"memory: {plan.further_workers} further workers after a small map, forward and backward"
    private, proportional = run_program(MEMORY, plan)
    yield median_figure(row, "USS of an idle worker", private, "MiB", MEMORY_AIM)
    yield median_figure(row, "PSS of an idle worker", proportional, "MiB")
    *growths, peaks = run_program(HELD, plan)
    row = (
        f"memory: {plan.calls} calls, half of them abs, half torch.exp of tiny tensors, forward "
        "and backward"
    )
    for name, growth in zip(("caller", "workers"), growths, strict=True):
        yield Figure(row, f"growth of the {name}", 1e6 * growth / plan.calls, "MiB/million")
    row = (
        f"memory: maps of torch.exp over {plan.megabytes} tensors of 1 MB each, forward and "
        "backward"
    )
    yield median_figure(row, "peak of PSS and shared memory, over that before all", peaks, "MiB")


def bench_idle(pools: Pools, plan: Plan) -> Iterator[Figure]:
    nanoseconds, switches = run_program(IDLE, plan)
    row = f"idle: a pool of {plan.processes} that has nothing to do for {plan.idle_seconds:g} s"
    yield Figure(row, "CPU of the pool", nanoseconds / 1e6, "ms", NOTHING)
    yield Figure(row, "how often it ran", switches, "times", NOTHING)


# --- a whole program


def bench_phenobarbital(pools: Pools, plan: Plan) -> Iterator[Figure]:
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import phenobarbital as script  # needs '.[scripts]', which the other rows do not
    from foce import scaled
    from infants import read_infants

    infants = read_infants(script.DATA)
    parameters = scaled(torch.tensor(script.START, dtype=torch.float64))
    loops: dict[str, script.Loop] = {"serial": script.serial}
    loops |= {graphs: pools[graphs].map for graphs in GRAPHS}
    right = script.evaluate(script.serial, infants, parameters)
    for name, loop in loops.items():
        difference = float(
            (script.evaluate(loop, infants, parameters).gradient - right.gradient).abs().max()
        )
        if not difference <= script.GRADIENT_TOLERANCE:  # true for nan
            raise WrongResultError(
                f"{name}: the gradient differs from the serial loop's by {difference:g}"
            )

    def seconds(name: str) -> float:
        return float(script.evaluate(loops[name], infants, parameters).seconds)

    results = interleaved({name: partial(seconds, name) for name in loops}, plan.repeats)
    row = f"phenobarbital: {len(infants)} infants, objective and gradient"
    for name, values in results.items():
        yield median_figure(row, name, [1e3 * value for value in values], "ms")
    for name in GRAPHS:
        over = ratios(results["serial"], results[name])
        yield median_figure(row, f"{name} over serial", over, "x", PHENOBARBITAL_AIM)


# --- another checkout


def figures_of_checkout(checkout: Path, row: str, options: argparse.Namespace) -> list[Figure]:
    """Measure a row with this script and the package of another checkout."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            sys.executable,
            __file__,
            "--rows",
            row,
            "--json",
            file.name,
            "--processes",
            str(options.processes),
        ]
        command += ["--quick"] if options.quick else []
        command += ["--repeats", str(options.repeats)] if options.repeats else []
        command += ["--calls", str(options.calls)] if options.calls else []
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return [figure_of(record) for record in json.loads(Path(file.name).read_text())["figures"]]


def figure_of(record: Record) -> Figure:
    return Figure(record["row"], record["name"], record["value"], record["unit"])


def print_comparison(old: Sequence[Figure], new: Sequence[Figure]) -> None:
    before = {(figure.row, figure.name): figure.value for figure in old}
    print("\nold, new, old / new")
    for figure in new:
        value = before.get((figure.row, figure.name))
        if value is None:
            print(f"  {figure.row}, {figure.name}: new")
        else:
            ratio = f"{value / figure.value:.2f}" if figure.value else "-"
            print(
                f"  {figure.row}, {figure.name}: {value:.4g} {figure.value:.4g} {ratio} "
                f"{figure.unit}"
            )


def older_checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "mpgrad" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(
            f"no checkout of mpgrad ({text!r}); make one with git worktree add"
        )
    return path


# --- the whole

ROWS: dict[str, Callable[[Pools, Plan], Iterator[Figure]]] = {
    "tiny": bench_tiny,
    "forward": bench_forward,
    "budget": bench_budget,
    "python": bench_python,
    "op": bench_op,
    "step": bench_step,
    "lone": bench_lone,
    "layers": bench_layers,
    "gradients": bench_gradients,
    "huge": bench_huge,
    "transfer": bench_transfer,
    "captures": bench_captures,
    "objects": bench_objects,
    "start": bench_start,
    "memory": bench_memory,
    "idle": bench_idle,
    "phenobarbital": bench_phenobarbital,
}


def bench(options: argparse.Namespace, plan: Plan) -> list[Figure]:
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)  # as in the workers
    figures, old = [], []
    with contextlib.ExitStack() as stack:
        pools = Pools(plan.processes, stack)
        for name in options.rows:
            if options.compare is not None:
                old += figures_of_checkout(options.compare, name, options)
            found = list(ROWS[name](pools, plan))
            print_figures(found)
            figures += found
    if options.compare is not None:
        print_comparison(old, figures)
    return figures


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS)
    )
    parser.add_argument(
        "--processes",
        type=at_least_1,
        default=2,
        metavar="N",
        help="workers (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=at_least_1, metavar="N", help="timed rounds (default: 9, quick: 1)"
    )
    calls = "calls over which memory may grow (default: 20000, quick: 200)"
    parser.add_argument("--calls", type=at_least_1, metavar="N", help=calls)
    compare = "also measure each row with the code of this checkout, and print the ratios"
    parser.add_argument("--compare", type=older_checkout, metavar="CHECKOUT", help=compare)
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = replace(QUICK if options.quick else Plan(), processes=options.processes)
    plan = replace(plan, repeats=options.repeats or plan.repeats, calls=options.calls or plan.calls)
    around = surroundings(plan.processes)
    print_surroundings(around)
    print(f"medians of {plan.repeats} rounds; the code in {Path(mpgrad.__file__).parent}")
    try:
        with limited(plan.limit * (1 if options.compare is None else 2)):
            figures = bench(options, plan)
    except (WrongResultError, TimeoutError) as error:
        return fail(error)
    report(options, around, figures, repeats=plan.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
