"""`mpgrad.advise` runs a sample of the items and reports whether a pool pays off.

A worker runs the loop, because it has copies of the items and of everything that the function
reaches. So the caller's tensors and modules stay as they are. Pools run the same items. The loop
and the pools take turns, so that noise of the machine affects both equally.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mpgrad.calls.packing import pickled_function
from mpgrad.pool import Pool
from mpgrad.submission.options import positive
from mpgrad.submission.results import seconds_given
from mpgrad.submission.starting import callable_of, iterator
from mpgrad.system import OthersClock, usable_cpus
from mpgrad.testing import differentiable, tensors_of
from mpgrad.torch_state.modes import kept_random_state

__all__ = ["Advice", "advise"]

T = TypeVar("T")
Function = Callable[[Any], Any]

# A pool with a smaller speed-up is not worth the change.
LEAST_GAIN = 1.15
# The sample should take the first share of the time. If it takes more than the second share, the
# loops and pools run it only once.
SAMPLE_SHARE, LONG_SHARE = 0.1, 0.3
FEWEST, FEWEST_LONG, MOST_SAMPLED = 4, 2, 512  # items in the sample
# In the first round functions are sent, and pools learn how long an item takes.
ROUNDS, WARM_UPS = 6, 1
# A cost is worth a remark if it takes more than this share of the time.
LARGE_SHARE = 0.2
COPIED_PER_SECOND = 4e9  # bytes, by one CPU
# Items of at least this many seconds are so long that the cost of sending them does not count.
LONG = 0.02
# A loop that uses fewer CPUs than this waits for something.
WAITING = 0.7
# If other programs use more than this share of the CPUs, the figures are doubtful.
BUSY = 0.15
MIB = 1 << 20


@dataclass(frozen=True, repr=False)
class Advice:
    """The result of `mpgrad.advise`. Printed, or at the end of a notebook's cell, it is a table
    with the answer first.

    Attributes:
        items: the number of items.
        item_seconds: how long each item of the sample took in the loop, forward and backward.
        pool_seconds: how long a pool took for the whole sample, by its number of workers.
        capture_bytes: the size of the tensors that the function captures.
        item_bytes: the mean size of the tensors of an item and its result.
        cpus: how many CPUs this process may use.
        cpus_of_loop: how many CPUs the loop kept busy.
        cpus_of_others: how many CPUs other programs kept busy at the same time.

    Example:
        >>> import torch, mpgrad
        >>> items = [torch.ones(3, requires_grad=True)] * 50
        >>> advice = mpgrad.advise(lambda x: x.sin().sum(), items, seconds=0.1)
        >>> advice.pays, advice.loop_seconds < advice.seconds(advice.processes)
        (False, True)
        >>> advice.is_doubtful or advice.speed_up < 1
        True
        >>> next(advice.obstacles()).partition(":")[0]
        'Items are small'
    """

    items: int
    item_seconds: Sequence[float]
    pool_seconds: Mapping[int, float]
    capture_bytes: int
    item_bytes: float
    cpus: int
    cpus_of_loop: float
    cpus_of_others: float

    @property
    def pays(self) -> bool:
        """Whether the best pool is so much faster than the loop that it is worth the change."""
        return self.speed_up >= LEAST_GAIN

    @property
    def processes(self) -> int:
        """The number of workers of the pool that is fastest for all items."""
        return min(self.pool_seconds, key=self.seconds)

    @property
    def speed_up(self) -> float:
        """How many times as fast as the loop the fastest pool is, for all items."""
        return self.loop_seconds / self.seconds(self.processes)

    @property
    def loop_seconds(self) -> float:
        """The time that the loop takes for all items, forward and backward."""
        return statistics.fmean(self.item_seconds) * self.items

    def seconds(self, workers: int) -> float:
        """Return the time that a pool with this number of workers takes for all items, forward and
        backward. The pool must be one that was measured."""
        # A small sample may not keep all workers busy.
        return (
            self.pool_seconds[workers]
            * self._at_best(self.items, workers)
            / self._at_best(len(self.item_seconds), workers)
        )

    def _at_best(self, items: int, workers: int) -> float:
        """Return the time for this number of items if sending costs nothing. No number of workers
        is faster than the longest item."""
        return max(
            statistics.fmean(self.item_seconds) * items / min(workers, items),
            max(self.item_seconds),
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether other programs kept so many CPUs busy that the figures may be wrong."""
        return self.cpus_of_others > BUSY * self.cpus

    def obstacles(self) -> Iterator[str]:
        """Yield the reasons why the pool is not faster, each with its remedy."""
        mean, longest = statistics.fmean(self.item_seconds), max(self.item_seconds)
        pool, at_best = (
            self.pool_seconds[self.processes],
            self._at_best(len(self.item_seconds), self.processes),
        )
        if self.capture_bytes / COPIED_PER_SECOND > LARGE_SHARE * at_best:
            size = f"each map copies {self.capture_bytes / MIB:.3g} MiB of captures"
            yield f"Captures are large: {size}. Give each item its part as an argument."
        elif self.item_bytes / COPIED_PER_SECOND > LARGE_SHARE * mean:
            size = f"an item and its result have {self.item_bytes / MIB:.3g} MiB"
            yield f"Tensors are large: {size}. Have the function return less (a loss, a sum)."
        elif mean < LONG and pool - at_best > LARGE_SHARE * pool:
            yield (
                f"Items are small: {length_of(mean)} each. Put several into one: stack them, or "
                "use torch.vmap."
            )
        if self.items > self.processes and longest > self.loop_seconds / max(self.processes, 2):
            yield (
                f"One item takes {length_of(longest)}, and no pool is faster than that. Divide it."
            )
        if self.cpus_of_loop < WAITING and not self.is_doubtful:
            used = f"the loop used {self.cpus_of_loop:.0%} of a CPU"
            yield (
                f"The function waits: {used}. If it waits for files or a network, use more workers "
                "than CPUs."
            )

    def __repr__(self) -> str:
        use = "Use a pool" if self.pays else "Do not use a pool"
        lines = [
            f"{use}: mpgrad.Pool({self.processes}) is about {self.speed_up:.2g} times as fast as "
            "the loop."
        ]
        if self.is_doubtful:
            others = f"other programs used {self.cpus_of_others:.1f} of {self.cpus} CPUs"
            lines.append(
                f"The machine was busy ({others}), so this may be wrong. Run it again when they "
                "have ended."
            )
        median, longest = statistics.median(self.item_seconds), max(self.item_seconds)
        lines += [
            "",
            f"items       {self.items}, of which {len(self.item_seconds)} were run",
            f"one item    {length_of(median)} (median; the longest {length_of(longest)})",
            f"loop        {length_of(self.loop_seconds)}",
            *(
                f"pool of {workers:<3} {length_of(self.seconds(workers))}"
                for workers in self.pool_seconds
            ),
            *(f"! {each}" for each in self.obstacles()),
        ]
        return "\n".join(lines)


def advise(
    fn: Callable[[T], object],
    items: Iterable[T],
    *,
    seconds: float = 5.0,
    processes: int | None = None,
) -> Advice:
    """Run a sample of the items, and report whether ``pool.map(fn, items)`` is faster than the
    loop, and with how many workers.

    The sample runs in the loop and in pools, forward and backward. The loop runs with one intra-op
    thread, and then with as many as your program has (`torch.get_num_threads`). The faster loop
    counts. Each worker of a pool has one intra-op thread. All runs use copies, so your tensors,
    gradients and generators stay as they were. Effects of `fn` outside of Python (for example on
    files) happen each time it runs.

    Args:
        fn: as for `Pool.map`.
        items: as for `Pool.map`; at least one. A generator is used up.
        seconds: about how long the trial takes. If items are long, two of them run, once in each
            loop and pool.
        processes: the largest number of workers to try. It is at most the number of CPUs, which is
            also the default. A pool with half as many workers is also tried.

    Raises:
        ValueError: there are no items; `seconds` is not above 0; `processes` is less than 1.
        TypeError: `seconds` is not a number.
        Exception: `fn` raised it.

    Example:
        >>> import torch, mpgrad
        >>> items = [torch.ones(3, requires_grad=True)] * 50
        >>> str(mpgrad.advise(lambda x: x.sin().sum(), items, seconds=0.1)).partition(":")[0]
        'Do not use a pool'
    """
    function, items = callable_of(fn), list(iterator("the items", items))
    if not items:
        raise ValueError("advice needs at least one item (items: [])")
    if (seconds := seconds_given("seconds", seconds, "a number")) <= 0:
        raise ValueError(f"seconds must be above 0 (seconds: {seconds:g})")
    if processes is not None:
        positive("processes", processes)
    cpus = usable_cpus()
    most = cpus if processes is None else min(cpus, processes)
    timer = LoopTimer(function)
    captures = pickled_function(function).captures
    clock = OthersClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_random_state())
        loops: dict[int, Pool] = {}
        for threads in sorted({1, torch.get_num_threads()}):
            loops[threads] = stack.enter_context(Pool(1, threads_per_worker=threads))
        pools: dict[int, Pool] = {}
        # A pool of half the size is tried because two CPUs may share a core.
        for workers in sorted({most, max(most // 2, min(most, 2))}):
            pools[workers] = stack.enter_context(Pool(workers))
            pools[workers].map(abs, [1], 1)  # starts the workers
        for pool in (*loops.values(), *pools.values()):
            pool._submitter.cheap_calls = None  # the advice replaces the log's warning
        end = time.perf_counter() + seconds
        sample, first, cpus_of_loop = first_loop(loops[1], timer, items, seconds)
        is_long = sum(first) > LONG_SHARE * seconds
        loop_rounds = {threads: list[list[float]]() for threads in loops}
        loop_rounds[1].append(first)
        pool_rounds = {workers: list[float]() for workers in pools}
        results: Sequence[Any] = []
        for number in range(1 if is_long else ROUNDS):
            if number > WARM_UPS and time.perf_counter() > end:
                break
            for threads, loop in loops.items():
                if not (is_long and loop_rounds[threads]):
                    loop_rounds[threads].append(loop.apply(timer, (sample,))[0])
            for workers, pool in pools.items():
                taken, results = timed_map(pool, function, sample, captures)
                pool_rounds[workers].append(taken)
    each_loop = [
        [statistics.median(warm(item)) for item in zip(*rounds, strict=True)]
        for rounds in loop_rounds.values()
    ]
    return Advice(
        items=len(items),
        item_seconds=min(each_loop, key=sum),
        pool_seconds={
            workers: statistics.median(warm(rounds)) for workers, rounds in pool_rounds.items()
        },
        capture_bytes=bytes_of(captures),
        item_bytes=bytes_of(tensors_of([sample, results])) / len(sample),
        cpus=cpus,
        cpus_of_loop=cpus_of_loop,
        cpus_of_others=clock.cpus(),
    )


class LoopTimer:
    """Runs the loop, in a worker."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, items: Sequence[Any]) -> tuple[list[float], float]:
        """Return the seconds of each item, forward and backward, and how many CPUs the loop kept
        busy."""
        captures = pickled_function(self.function).captures  # the worker's own
        inputs = [inputs_of([item], captures) for item in items]
        seconds = []
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for item, each in zip(items, inputs, strict=True):
            start = time.perf_counter()
            differentiate([self.function(item)], each)
            seconds.append(time.perf_counter() - start)
        return seconds, (time.process_time() - cpu_begin) / (time.perf_counter() - begin)


def first_loop(
    loop: Pool, timer: LoopTimer, items: Sequence[Any], seconds: float
) -> tuple[list[Any], list[float], float]:
    """Choose a sample that takes part of this time in the loop.

    The sample is the largest item and other items at random. Return the sample, the seconds of
    each item, and how many CPUs they kept busy.
    """
    largest = max(range(len(items)), key=lambda position: bytes_of(tensors_of(items[position])))
    others = [item for position, item in enumerate(items) if position != largest]
    order = [items[largest], *random.Random(0).sample(others, min(len(others), MOST_SAMPLED - 1))]
    loop.apply(timer, (order[:1],))  # takes the costs that come only once
    taken: list[float] = []
    busy: list[float] = []
    while len(taken) < len(order):
        count = max(1, len(taken))
        more, cpus = loop.apply(timer, (order[len(taken) : len(taken) + count],))
        taken += more
        busy += [cpus] * len(more)
        is_enough = sum(taken) > SAMPLE_SHARE * seconds and len(taken) >= FEWEST
        if is_enough or (sum(taken) > LONG_SHARE * seconds and len(taken) >= FEWEST_LONG):
            break
    return order[: len(taken)], taken, statistics.fmean(busy)


def timed_map(
    pool: Pool, function: Function, items: Sequence[Any], captures: Sequence[torch.Tensor]
) -> tuple[float, Sequence[Any]]:
    """Return the seconds of a map with one backward from all its results, and the results."""
    inputs = inputs_of(items, captures)
    start = time.perf_counter()
    results = pool.map(function, items)
    differentiate(results, inputs)
    return time.perf_counter() - start, results


def inputs_of(items: Sequence[Any], captures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in items and captures that need gradients."""
    return [*differentiable(items), *(each for each in captures if each.requires_grad)]


def differentiate(results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
    """Run one backward from all results, and throw the gradients away. Do nothing if no result or
    input needs gradients."""
    outputs = differentiable(results)
    if (
        len({(each.shape, each.dtype, each.device) for each in outputs}) == 1
        and not outputs[0].dim()
    ):
        # The results are losses. A separate gradient for each loss would take a third of a tiny
        # item's time.
        outputs = [torch.stack(outputs).sum()]
    if outputs and inputs:
        torch.autograd.grad(
            outputs, inputs, [torch.ones_like(each) for each in outputs], allow_unused=True
        )


def warm(values: Sequence[float]) -> Sequence[float]:
    """Return the values without the warm-up rounds, if there are later rounds."""
    return values[WARM_UPS:] or values[-1:]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def length_of(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
