"""What the benchmarks share: contenders, the clock, items and work of a given length, what a machine is, limits of a run.

A contender turns a batch of items into values and gradients. It has to give what the serial loop gives before it is timed.
Contenders take turns in a random order within a round, so that noise of the machine meets them all alike; a ratio or a
difference is taken within a round.

Assumes nothing of mpgrad, which this module does not import: scripts about other systems use it too. Scripts in the
folders beside this one put this folder on their path.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import logging
import math
import os
import platform
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

SHORTEST_ITEM, LONGEST_ITEM = 10, 200  # floats of a tiny tensor
MOST_ITEMS = 400  # in one run
WARM_UPS = 2  # untimed rounds; pools learn there what a call costs

# mpgrad says once of each tiny function that it costs more to send than to run: here that is what is measured
logging.getLogger("mpgrad").addFilter(lambda record: "cost more to send" not in str(record.msg))

Function = Callable[[Tensor], Tensor]
Loop = Callable[[Function, list[Tensor]], Sequence[Tensor]]  # `serial`, or a pool's `map`
Record = dict[str, Any]


# --- contenders


class Batch(NamedTuple):
    """What one run gets: leaves that require gradients, and ones for the outputs, which have the items' shapes."""

    items: list[Tensor]
    ones: list[Tensor]


class Outcome(NamedTuple):
    values: Sequence[Tensor]
    gradients: Sequence[Tensor | None]  # of the items; empty if only forward was asked for


class Contender(NamedTuple):
    name: str
    run: Callable[[Batch], Outcome]
    most_items: int = MOST_ITEMS


def serial(function: Function, items: list[Tensor]) -> list[Tensor]:
    return [function(item) for item in items]


def forward(loop: Loop, function: Function, batch: Batch) -> Outcome:
    with torch.no_grad():
        return Outcome(loop(function, batch.items), [])


def one_backward(loop: Loop, function: Function, batch: Batch) -> Outcome:
    values = loop(function, batch.items)
    torch.autograd.backward(values, batch.ones)
    return Outcome(values, [item.grad for item in batch.items])


def backward_at_once(function: Function, batch: Batch) -> Outcome:
    values = []
    for item, one in zip(*batch, strict=True):
        value = function(item)
        torch.autograd.backward(value, one)
        values.append(value.detach())
    return Outcome(values, [item.grad for item in batch.items])


# --- the clock


class Measured(NamedTuple):
    name: str
    seconds: list[float]  # an item, one figure a round

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def beyond(self, other: Measured) -> float:
        """Seconds an item more than `other`."""
        return statistics.median(mine - its for mine, its in zip(self.seconds, other.seconds, strict=True))

    def speed_up(self, other: Measured) -> float:
        """How many times faster than `other`."""
        return statistics.median(its / mine for mine, its in zip(self.seconds, other.seconds, strict=True))

    def record(self) -> Record:
        return {"contender": self.name, "median_us_per_item": 1e6 * self.median, "seconds_per_item": self.seconds}


def batch_of(items: Sequence[Tensor]) -> Batch:
    """Copies: a leaf that has a gradient, or that lies in shared memory since it was sent, would be another item."""
    return Batch([item.clone().requires_grad_() for item in items], [torch.ones_like(item) for item in items])


def measured(contenders: Sequence[Contender], items: Sequence[Tensor], rounds: int) -> list[Measured]:
    check(contenders, items)
    results = [Measured(contender.name, []) for contender in contenders]
    turns = list(zip(contenders, results, strict=True))
    shuffle = random.Random(0).shuffle
    for number in range(-WARM_UPS, rounds):
        shuffle(turns)
        for contender, result in turns:
            own = items[: contender.most_items]
            seconds = timed(contender.run, batch_of(own)) / len(own)
            if number >= 0:
                result.seconds.append(seconds)
    return results


def timed(run: Callable[[Batch], Outcome], batch: Batch) -> float:
    """Seconds, the dropping of values and graphs included: a training loop pays for that too."""
    began = time.perf_counter()
    outcome = run(batch)
    del outcome
    return time.perf_counter() - began


def check(contenders: Sequence[Contender], items: Sequence[Tensor]) -> None:
    """Raise WrongResultError unless each contender gives what the first one gives."""
    reference, *others = contenders
    expected = reference.run(batch_of(items))
    for contender in others:
        own = items[: contender.most_items]
        outcome = contender.run(batch_of(own))
        for kind, given, right in zip(("value", "gradient"), outcome, expected, strict=True):
            try:
                torch.testing.assert_close(list(given), list(right[: len(own)]))
            except AssertionError as error:
                raise WrongResultError(f"{contender.name}: a {kind} differs from the serial loop's") from error


class WrongResultError(Exception):
    """A contender computed something else than the serial loop."""


# --- items, and work of some length


def tiny_items(count: int) -> list[Tensor]:
    """The same lengths in every run."""
    return [torch.randn(length) for length in random.Random(0).choices(range(SHORTEST_ITEM, LONGEST_ITEM + 1), k=count)]


@dataclass(frozen=True)
class Work:
    """A function and a kind of item, of a `size` that sets how long a call takes."""

    name: str
    function: Callable[[int], Function]
    item: Callable[[int], Tensor]


def python_item(steps: int) -> Tensor:
    return torch.randn(random.randint(SHORTEST_ITEM, LONGEST_ITEM))


def op_item(width: int) -> Tensor:
    return torch.randn(width, width) / math.sqrt(width)


def calibrated(work: Work, seconds: float, run: Callable[[Function, Batch], Outcome] = backward_at_once) -> int:
    """The size at which forward and backward right after it take about so many seconds in this process."""

    def own_seconds(size: int) -> float:
        one = partial(run, work.function(size))
        return min(timed(one, batch_of([work.item(size)])) for _ in range(5))

    size = 1
    while own_seconds(2 * size) < seconds:
        size *= 2
    for step in range(1, 5):  # to a sixteenth
        larger = size + max(1, 2 ** (size.bit_length() - 1 - step))
        size = larger if own_seconds(larger) < seconds else size
    return size


# --- a run: where it is, how long it may take


def surroundings(processes: int) -> Record:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processes": processes,
        "cpu": cpu_model(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("mpgrad", "numpy", "torch")},
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds; end the process if it then does not leave the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        raise TimeoutError(f"the run took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 ({text})")
    return number
