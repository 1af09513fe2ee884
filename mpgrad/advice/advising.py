"""The question that comes first: does a pool pay? Caller only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import TypeVar

from mpgrad.advice.advice import Advice
from mpgrad.advice.model import best_of, obstacles_of, spread_of, ways_of
from mpgrad.advice.trial import tried
from mpgrad.calls.seconds import seconds_given
from mpgrad.cpus import usable_cpus
from mpgrad.submission.options import positive
from mpgrad.submission.source import callable_of, iterator

__all__ = ["advise"]

T = TypeVar("T")


def advise(
    fn: Callable[[T], object], items: Iterable[T], *, seconds: float = 5.0, processes: int | None = None, show: bool = True
) -> Advice:
    """Whether ``pool.map(fn, items)`` would be faster than the loop, and with which options: run a sample, print a page.

    It runs some items, forward and backward, in the loop and in pools of 1, 2, 4, ... workers, with more threads, and under
    `torch.vmap` where the items can be stacked. It runs copies: your tensors, gradients and generators stay as they were.
    What `fn` does outside of Python (files, say) it does as often as it is run.

    Args:
        fn: as for `Pool.map`.
        items: likewise; at least one. A generator is used up by it.
        seconds: for the trial, about: it ends what it has begun, and the first pool has to start. If two items take a third of
            it, they are run in a pool once more, and in other ways only as long as there is time.
        processes: the most workers to try; never more than there are CPUs, which is what None means.
        show: print the page.

    Returns:
        What was found; ``print(advice)`` shows it again.

    Raises:
        ValueError: there are no items; `seconds` is not above 0; `processes` is less than 1.
        TypeError: `seconds` is no number.
        Exception: what `fn` raised.

    Example:
        >>> import torch, mpgrad
        >>> advice = mpgrad.advise(lambda x: x.sin().sum(), [torch.ones(3, requires_grad=True)] * 50, seconds=0.5, show=False)
        >>> advice.use in ("loop", "vmap"), advice.items
        (True, 50)
    """
    function, items = callable_of(fn), list(iterator("the items", items))
    if not items:
        raise ValueError("advice needs at least one item (items: [])")
    if (seconds := seconds_given("seconds", seconds, "a number")) <= 0:
        raise ValueError(f"seconds must be above 0 (seconds: {seconds:g})")
    if processes is not None:
        positive("processes", processes)
    found = tried(function, items, seconds, processes)
    trial = found.measured
    ways = tuple(ways_of(trial))
    best, pool = best_of(ways, trial.cpus)
    workers = pool.processes if pool is not None else 1
    advice = Advice(
        use=best.name,
        processes=workers,
        threads_per_worker=max(1, usable_cpus() // max(workers, trial.cpus)),
        graphs=found.graphs,
        ways=ways,
        obstacles=tuple(obstacles_of(trial, pool)),
        items=trial.items,
        sampled=len(trial.seconds),
        item_seconds=statistics.median(trial.seconds),
        spread=spread_of(trial.seconds),
        longest_seconds=max(trial.seconds),
        backward_share=found.backward_share,
        operation_share=found.operation_share,
        item_bytes=trial.item_bytes,
        result_bytes=trial.result_bytes,
        capture_bytes=trial.capture_bytes,
        start_seconds=found.start_seconds,
    )
    if show:
        print(advice)
    return advice
