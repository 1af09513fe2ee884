"""Contains the work of the benchmarks: small and large tensors, losses that take a given time,
loops with their backward.

The serial loop has two orders. One backward over all items is how a loop is usually written. A
backward right after each item is faster if graphs are small, because they are still in the cache. A
pool has to beat this order.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from common import WrongResultError, cpu_seconds, interleaved
from torch import Tensor

SHORTEST_ITEM, LONGEST_ITEM = 10, 200  # floats of a tiny tensor
FEWEST_ITEMS, MOST_ITEMS = 8, 1024  # of a map whose items take some time
CHAIN = 2  # matrix products of an op-bound call; with more, 0.1 ms would go into calling them
RATIO_OF_SIZES = 16  # of the largest to the smallest of the large tensors
ROUNDING = 1e-5  # of float32

Function = Callable[[Tensor], Tensor]
Loop = Callable[[Function, list[Tensor]], Sequence[Tensor]]  # `serial`, or a pool's `map`


# --- what is mapped


def doubled(x: Tensor) -> Tensor:
    return x * 2


def copied(x: Tensor) -> Tensor:
    return x.clone()


def python_loss(x: Tensor, steps: int) -> Tensor:
    y = x
    for _ in range(steps):
        y = torch.sin(y) + x
    return y.sum()


def op_loss(x: Tensor) -> Tensor:
    y = x
    for _ in range(CHAIN):
        y = torch.tanh(y @ x)
    return y.sum()


def square_loss(x: Tensor) -> Tensor:
    return (x * x).sum()


def tiny_items(count: int) -> list[Tensor]:
    """Return items whose lengths are the same in every run."""
    lengths = random.Random(0).choices(range(SHORTEST_ITEM, LONGEST_ITEM + 1), k=count)
    return [torch.randn(length) for length in lengths]


def large_items(count: int, largest_bytes: int) -> list[Tensor]:
    parts = [RATIO_OF_SIZES ** ((number + 0.5) / count - 1) for number in range(count)]
    return [torch.rand(round(largest_bytes * part) // 4) for part in parts]


@dataclass(frozen=True)
class Work:
    """A loss and a kind of item. Its `size` determines how long a call takes."""

    name: str
    function: Callable[[int], Function]
    item: Callable[[int], Tensor]


def python_item(steps: int) -> Tensor:
    return torch.randn(random.randint(SHORTEST_ITEM, LONGEST_ITEM))


def op_item(width: int) -> Tensor:
    return torch.randn(width, width) / math.sqrt(width)


PYTHON = Work("Python-bound", lambda steps: partial(python_loss, steps=steps), python_item)
OP = Work("op-bound", lambda width: op_loss, op_item)


def work_items(work: Work, seconds: float, total: float) -> tuple[Function, list[Tensor]]:
    """Return a function and items. Each item takes `seconds`, forward and backward, and all
    together take about `total`.

    With 0 seconds the items are as cheap as possible.
    """
    size = calibrated(work, seconds) if seconds else 1
    count = (
        min(MOST_ITEMS, max(FEWEST_ITEMS, math.ceil(total / seconds))) if seconds else MOST_ITEMS
    )
    return work.function(size), [work.item(size) for _ in range(count)]


def calibrated(work: Work, seconds: float) -> int:
    """Return the size at which a forward and its immediate backward take about `seconds` in this
    process."""

    def own_seconds(size: int) -> float:
        one = partial(backward_at_once, work.function(size))
        return min(timed(one, batch_of([work.item(size)])) for _ in range(5))

    size = 1
    while own_seconds(2 * size) < seconds:
        size *= 2
    for step in range(1, 5):  # to a sixteenth
        larger = size + max(1, 2 ** (size.bit_length() - 1 - step))
        size = larger if own_seconds(larger) < seconds else size
    return size


# --- how it is mapped


class Batch(NamedTuple):
    """The input of one run: leaves that require gradients, and ones of the items' shapes."""

    items: list[Tensor]
    ones: list[Tensor]


class Outcome(NamedTuple):
    values: Sequence[Tensor]
    gradients: Sequence[Tensor | None]  # of the items; empty if only forward ran


Run = Callable[[Batch], Outcome]


def serial(function: Function, items: list[Tensor]) -> list[Tensor]:
    return [function(item) for item in items]


def forward(loop: Loop, function: Function, batch: Batch) -> Outcome:
    with torch.no_grad():
        return Outcome(loop(function, batch.items), [])


def backward_with_ones(loop: Loop, function: Function, batch: Batch) -> Outcome:
    """Run a backward for functions whose results have their items' shapes."""
    values = loop(function, batch.items)
    torch.autograd.backward(values, batch.ones)
    return Outcome(values, [item.grad for item in batch.items])


def one_backward(loop: Loop, function: Function, batch: Batch) -> Outcome:
    """Run one backward from the sum of all losses."""
    losses = loop(function, batch.items)
    torch.autograd.backward(torch.stack(tuple(losses)).sum())
    return Outcome(losses, [item.grad for item in batch.items])


def backward_at_once(function: Function, batch: Batch) -> Outcome:
    """Run a backward right after each loss."""
    losses = []
    for item in batch.items:
        loss = function(item)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    return Outcome(losses, [item.grad for item in batch.items])


# --- processes that share nothing


class LoopsApart:
    """Runs serial loops in separate processes, each over a part of the items. No pool can be
    faster. It must be closed."""

    def __init__(self, run: Run, items: Sequence[Tensor], processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._count = len(items)
        self._pipes = []
        self._processes = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            part = [item.numpy() for item in items[number::processes]]
            process = context.Process(target=loop_apart, args=(theirs, run, part), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def seconds(self) -> float:
        """Return the seconds per item, until the last of the loops has ended."""
        return self._spent(time.perf_counter)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds per item, of all loops."""
        return self._spent(
            lambda: cpu_seconds(
                [process.pid for process in self._processes if process.pid is not None]
            )
        )

    def _spent(self, clock: Callable[[], float]) -> float:
        """Return the time per item, from the clock before and after the loops."""
        self._all_do("copy the items")
        began = clock()
        self._all_do("run")
        return (clock() - began) / self._count

    def _all_do(self, order: str) -> None:
        for pipe in self._pipes:
            pipe.send(order)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        for process in self._processes:
            process.join()


def loop_apart(pipe: Connection, run: Run, arrays: Sequence[Array]) -> None:
    torch.set_num_threads(1)
    items = [torch.from_numpy(array) for array in arrays]
    batch = batch_of(items)
    while (order := pipe.recv()) != "end":
        if order == "run":
            run(batch)
        else:
            batch = batch_of(items)
        pipe.send(order)


# --- how peers map it, whose gradients end at the process border

Array = np.ndarray[Any, np.dtype[np.float32]]
Pair = tuple[Array, Array]

# Arrays in a store that several processes read are not writable, and no code writes to them.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def array_pair(function: Function, item: Array) -> Pair:
    """Return one item's loss and gradient."""
    torch.set_num_threads(1)
    leaf = torch.from_numpy(item).requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach().numpy(), gradient.numpy()


def array_pairs(function: Function, items: Sequence[Array]) -> list[Pair]:
    return [array_pair(function, item) for item in items]


# --- what is measured


def batch_of(items: Sequence[Tensor]) -> Batch:
    """Return copies of the items. A leaf that has a gradient, or that is stored in shared memory
    after it was sent, would be a different item."""
    return Batch(
        [item.clone().requires_grad_() for item in items], [torch.ones_like(item) for item in items]
    )


def timed(run: Run, batch: Batch) -> float:
    """Return the seconds of a run. They include the time to drop values and graphs, because a
    training loop also needs it."""
    began = time.perf_counter()
    outcome = run(batch)
    del outcome
    return time.perf_counter() - began


def measured(
    contenders: Mapping[str, Run], items: Sequence[Tensor], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds per item of each contender in every round, after all have returned what
    the first one returns."""
    return interleaved(timed_turns(contenders, items), rounds)


def timed_turns(
    contenders: Mapping[str, Run], items: Sequence[Tensor]
) -> dict[str, Callable[[], float]]:
    """Return functions that measure the seconds per item of each contender, after all have returned
    what the first one returns."""
    check(contenders, items)

    def seconds(run: Run) -> float:
        return timed(run, batch_of(items)) / len(items)

    return {name: partial(seconds, run) for name, run in contenders.items()}


def check(contenders: Mapping[str, Run], items: Sequence[Tensor]) -> None:
    """Raise WrongResultError unless each contender returns what the first one returns."""
    reference, *others = contenders
    expected = contenders[reference](batch_of(items))
    for name in others:
        outcome = contenders[name](batch_of(items))
        for kind, given, right in zip(("value", "gradient"), outcome, expected, strict=True):
            try:
                for one, wanted in zip(given, right, strict=True):
                    assert one is not None and wanted is not None, "a value is missing"
                    size = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
                    torch.testing.assert_close(one, wanted, rtol=ROUNDING, atol=ROUNDING * size)
            except AssertionError as error:
                raise WrongResultError(
                    f"{name}: a {kind} differs from the serial loop's"
                ) from error


# --- objects


class Part:
    """One of many small parts of an object."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rate = number / 2
        self.name = f"part {number}"
        self.near = [number, number + 1]


TABLE: dict[int, float] = {}


def entry(number: int) -> float:
    return TABLE[number]
