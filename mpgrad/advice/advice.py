"""What `mpgrad.advise` found, as an object and as a page."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

__all__ = ["Advice", "Obstacle", "Way"]

WIDTH = 100
BUSY = "busy machine"


@dataclass(frozen=True)
class Way:
    """One way to run all items, forward and backward.

    Attributes:
        name: "loop", "pool", "threads" (the loop, with as many intra-op threads as CPUs) or "vmap".
        processes: workers, in a pool; otherwise 0.
        seconds: for all items.
        speed_up: over the loop.
        measured: by running a sample in this way; otherwise it is what the model says.

    Example:
        >>> from mpgrad.advice.advice import Way
        >>> print(Way("pool", 2, seconds=0.5, speed_up=1.9, measured=True))      # a line of the page
        pool of 2           500 ms      1.90   measured
    """

    name: Literal["loop", "pool", "threads", "vmap"]
    processes: int
    seconds: float
    speed_up: float
    measured: bool

    def __str__(self) -> str:
        workers = f"pool of {self.processes}" if self.name == "pool" else self.name
        return f"{workers:<14}{length_of(self.seconds):>12}{self.speed_up:>10.2f}   {'measured' if self.measured else 'model'}"


@dataclass(frozen=True)
class Obstacle:
    """What keeps a pool from being faster.

    Attributes:
        name: "items too small", "items too large", "captures too large", "results too large", "one item dominates",
            "threads", "waiting" or "busy machine".
        problem: in figures.
        remedy: what to do.

    Example:
        >>> from mpgrad.advice.advice import Obstacle
        >>> Obstacle("waiting", "the loop used 3% of one CPU", "Take more workers than there are CPUs.").remedy
        'Take more workers than there are CPUs.'
    """

    name: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Advice:
    """What `mpgrad.advise` found. ``print(advice)`` shows it as a page.

    Attributes:
        use: the way to take: "pool", "loop", "threads" or "vmap".
        processes: workers of the pool to take, with which it would be fastest on this machine.
        threads_per_worker: for `mpgrad.Pool`: CPUs divided by the most workers that were allowed (`processes`), so 1 where all
            were. (Pools were tried with one thread.)
        graphs: likewise: "ahead" if results are losses, else "keep". (Pools were tried with that only.)
        ways: all that were measured, and pools of more workers than there are CPUs by the model.
        obstacles: what stands in the way of a pool.
        items: how many there are.
        sampled: how many were run.
        item_seconds: of an item in the loop, forward and backward: the median.
        spread: of that: what one item in ten does not reach, and what one in ten exceeds, in seconds.
        longest_seconds: of the longest item that was run.
        backward_share: of the time of an item, between 0 and 1.
        operation_share: of the time of an item, spent in operations of PyTorch; the rest is Python. None: not measured.
        item_bytes: tensors of an item, the mean.
        result_bytes: tensors of a result, the mean.
        capture_bytes: tensors that the function reaches by itself.
        start_seconds: what the first pool took to start.

    Example:
        >>> import torch, mpgrad
        >>> items = [torch.ones(3, requires_grad=True)] * 50
        >>> advice = mpgrad.advise(lambda x: x.sin().sum(), items, seconds=0.1, show=False)
        >>> advice.graphs, advice.ways[0].name, advice.ways[0].speed_up
        ('ahead', 'loop', 1.0)
        >>> str(advice).startswith(advice.verdict)
        True
    """

    use: Literal["pool", "loop", "threads", "vmap"]
    processes: int
    threads_per_worker: int
    graphs: Literal["ahead", "keep"]
    ways: tuple[Way, ...]
    obstacles: tuple[Obstacle, ...]
    items: int
    sampled: int
    item_seconds: float
    spread: tuple[float, float]
    longest_seconds: float
    backward_share: float
    operation_share: float | None
    item_bytes: float
    result_bytes: float
    capture_bytes: int
    start_seconds: float

    def __str__(self) -> str:
        low, high = self.spread
        shares = f"{self.backward_share:.0%} of it backward"
        if self.operation_share is not None:
            shares += f", {self.operation_share:.0%} in operations, the rest in Python"
        lines = [
            f"{self.verdict} ({self.sampled} of {self.items} items were run)",
            "",
            f"an item    {length_of(self.item_seconds)}, most {length_of(low)} to {length_of(high)}, "
            f"longest {length_of(self.longest_seconds)}; {shares}",
            f"bytes      {size_of(self.item_bytes)} an item, {size_of(self.result_bytes)} a result, "
            f"{size_of(self.capture_bytes)} captures a map",
            f"start      {length_of(self.start_seconds)}, once",
            "",
            f"{'all items':<14}{'time':>12}{'speed-up':>10}",
            *map(str, self.ways),
        ]
        for each in self.obstacles:
            text = f"! {each.name}: {each.problem}. {each.remedy}"
            lines += ["", textwrap.fill(text, WIDTH, subsequent_indent="  ")]
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """What to do, in one line."""
        options = f"{self.processes}, threads_per_worker={self.threads_per_worker}, graphs={self.graphs!r}"
        words = {
            "pool": f"A pool pays: mpgrad.Pool({options}).",
            "loop": "Do not use a pool: the loop is as fast.",
            "threads": "Do not use a pool: give the loop more threads (torch.set_num_threads).",
            "vmap": "Do not use a pool: stack the items and use torch.vmap.",
        }[self.use]
        if any(each.name == BUSY for each in self.obstacles):
            return f"Not to be relied on, as other programs use the CPUs. {words}"
        return words


def length_of(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def size_of(nbytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
