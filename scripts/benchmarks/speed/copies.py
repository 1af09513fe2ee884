"""What moves much memory: large tensors there and back, and functions that capture many parameters."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.pool
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from common import (
    Batch,
    Contender,
    Function,
    Loop,
    Outcome,
    WrongResultError,
    batch_of,
    calibrated,
    measured,
    python_item,
    serial,
    timed,
    tiny_items,
)
from common import one_backward as backward_of_all
from figures import Figure, interleaved, median_figure, ratios
from jobs import PYTHON, backward_at_once, one_backward
from losses import copied, python_bound
from torch import Tensor

from speed.plan import Plan, Pools

TRANSFER_AIM = ("<=", 1.3)
CAPTURES_AIM = ("<=", 1.2)
RATIO_OF_SIZES = 16  # of the largest tensor to the smallest
ITEM_SECONDS = 5e-4  # of an item of the map with captures
PARAMETERS = 64
FEW_PARAMETERS = 20

# --- large tensors


def bench_transfer(pools: Pools, plan: Plan) -> Iterator[Figure]:
    parts = [RATIO_OF_SIZES ** ((number + 0.5) / plan.tensors - 1) for number in range(plan.tensors)]
    items = [torch.rand(round(plan.largest_bytes * part) // 4) for part in parts]
    megabytes = sum(item.nbytes for item in items) / 1e6
    row = f"transfer: x.clone(), {len(items)} tensors, {megabytes:.0f} MB, forward and backward"
    with plain_copies(items, plan.processes) as copies:
        contenders = [
            Contender("serial", partial(backward_of_all, serial, copied)),
            Contender("pool", partial(backward_of_all, pools.keep.map, copied)),
            Contender("four plain copies", copies.run),
        ]
        results = measured(contenders, items, plan.repeats)
    for result in results:
        yield median_figure(row, result.name, [1e3 * len(items) * seconds for seconds in result.seconds], "ms")
    _, pool, plain = results
    yield median_figure(row, "pool over four plain copies", ratios(pool.seconds, plain.seconds), "x", TRANSFER_AIM)


class PlainCopies:
    """Items copied twice, for forward, and ones copied twice, for backward, by processes that have all memory mapped."""

    STEPS = ((0, 1), (1, 2), (3, 4), (4, 5))  # from row to row of the memory; 2 and 5 are what comes out

    def __init__(self, items: Sequence[Tensor], memory: Tensor, pool: multiprocessing.pool.Pool, processes: int) -> None:
        self._memory = memory
        self._pool = pool
        ends = torch.tensor([item.numel() for item in items]).cumsum(0).tolist()
        self._spans = [(end - item.numel(), end) for end, item in zip(ends, items, strict=True)]
        self._shares = [self._spans[first::processes] for first in range(processes)]

    def run(self, batch: Batch) -> Outcome:
        self._pool.map(copy_spans, self._shares, chunksize=1)
        values, gradients = ([row[first:end] for first, end in self._spans] for row in self._memory[[2, 5]].unbind())
        return Outcome(values, gradients)


@contextlib.contextmanager
def plain_copies(items: Sequence[Tensor], processes: int) -> Iterator[PlainCopies]:
    memory = torch.zeros(6, sum(item.numel() for item in items)).share_memory_()  # type: ignore[no-untyped-call]
    memory[0] = torch.cat(list(items))
    memory[3] = 1
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(processes, take_memory, (memory,)) as pool:
        yield PlainCopies(items, memory, pool, processes)


def take_memory(memory: Tensor) -> None:
    torch.set_num_threads(1)
    PROCESS["memory"] = memory


PROCESS: dict[str, Any] = {}  # what this process has been given


def copy_spans(spans: Sequence[tuple[int, int]]) -> None:
    memory = PROCESS["memory"]
    for first, end in spans:
        for source, target in PlainCopies.STEPS:
            memory[target, first:end].copy_(memory[source, first:end])


# --- captures


def with_captures(weights: Sequence[Tensor], x: Tensor, steps: int) -> Tensor:
    """Each item uses one of the parameters, the whole of it."""
    return python_bound(x, steps).sum() * weights[x.numel() % len(weights)].sum()


def without_captures(count: int, floats: int, x: Tensor, steps: int) -> Tensor:
    """The same work, with parameters and the sums of their gradients that every process has for itself."""
    loss = python_bound(x, steps).sum()
    product: Tensor = OwnWeight.apply(loss, x.numel() % count, count, floats)  # type: ignore[no-untyped-call]
    return product


@functools.cache
def own_weights(count: int, floats: int) -> tuple[list[Tensor], list[Tensor]]:
    return weights_of(count, floats), [torch.zeros(floats) for _ in range(count)]


def weights_of(count: int, floats: int) -> list[Tensor]:
    return [torch.full((floats,), 1 / floats) for _ in range(count)]


class OwnWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, count: int, floats: int) -> Tensor:
        weights, sums = own_weights(count, floats)
        ctx.save_for_backward(x)
        ctx.weight, ctx.sum = weights[number], sums[number]
        product: Tensor = x * ctx.weight.sum()
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x,) = grads, ctx.saved_tensors
        ctx.sum.add_(grad * x)
        return grad * ctx.weight.sum(), None, None, None


def bench_captures(pools: Pools, plan: Plan) -> Iterator[Figure]:
    floats = plan.capture_bytes // 4 // PARAMETERS
    steps = calibrated(PYTHON, ITEM_SECONDS, backward_at_once)
    items = [python_item(steps) for _ in range(plan.capture_items)]
    weights = [weight.requires_grad_() for weight in weights_of(PARAMETERS, floats)]
    captured = Captured(weights, partial(with_captures, weights, steps=steps), items)
    own = partial(without_captures, PARAMETERS, floats, steps=steps)
    captured.check(pools.keep.map)
    memory = torch.zeros(2, PARAMETERS * floats)

    def copies() -> float:
        began = time.perf_counter()
        for _ in range(1 + plan.processes):  # the parameters once in, a sum of gradients from each worker
            memory[1].copy_(memory[0])
        return time.perf_counter() - began

    turns: dict[str, Callable[[], float]] = {
        "serial": partial(captured.seconds, serial),
        "pool": partial(captured.seconds, pools.keep.map),
        "pool without captures": lambda: timed(partial(one_backward, pools.keep.map, own), batch_of(items)),
        f"{1 + plan.processes} plain copies of the parameters": copies,
    }
    results = interleaved(turns, plan.repeats)
    row = f"captures: {PARAMETERS} parameters, {plan.capture_bytes / 1e6:g} MB, {len(items)} items, forward and backward"
    for name, seconds in results.items():
        yield median_figure(row, name, [1e3 * value for value in seconds], "ms")
    _, pool, without, plain = results.values()
    needed = [one + other for one, other in zip(without, plain, strict=True)]
    yield median_figure(row, "pool over without captures and copies", ratios(pool, needed), "x", CAPTURES_AIM)


def with_all(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    total = x.sum()
    for weight in weights:
        total = total * weight.sum()
    return total


def bench_deterministic(pools: Pools, plan: Plan) -> Iterator[Figure]:
    """What it takes to add the gradients of captures in the loop's order, where that is most of the work."""
    weights = [weight.requires_grad_() for weight in weights_of(FEW_PARAMETERS, 3)]
    captured = Captured(weights, partial(with_all, weights), tiny_items(plan.deterministic_items))
    loops: dict[str, Loop] = {"serial": serial, "pool": pools.keep.map, "deterministic pool": pools.deterministic.map}
    for loop in loops.values():
        captured.check(loop)
    results = interleaved({name: partial(captured.seconds, loop) for name, loop in loops.items()}, plan.repeats)
    row = f"deterministic: an item uses {FEW_PARAMETERS} small captures, forward and backward"
    for name, seconds in results.items():
        yield median_figure(row, name, [1e6 * value / plan.deterministic_items for value in seconds], "us/item")
    _, pool, deterministic = results.values()
    yield median_figure(row, "deterministic pool over pool", ratios(deterministic, pool), "x")


class Captured:
    """A function and the parameters that it captures, which change before every run, as an optimiser would change them."""

    def __init__(self, weights: Sequence[Tensor], function: Function, items: Sequence[Tensor]) -> None:
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
            raise WrongResultError("pool: a gradient of a capture differs from the serial loop's") from error

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
