"""What follows from a trial: other numbers of workers, the way to take, what stands in the way. Computes only.

Time of a map over n workers: what the caller does for all items, one after another, and what the workers divide among them,

    seconds(n) = caller + work / n,    and for all items not less than the longest takes

with the two from measurements of different n, by least squares. (G. Amdahl, AFIPS 1967.)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mpgrad.advice.advice import BUSY, Obstacle, Way, length_of, size_of

__all__ = ["Measured", "best_of", "obstacles_of", "pool_seconds", "spread_of", "ways_of"]

LEAST_GAIN = 1.15  # below which a pool is not worth the change
LARGE_SHARE = 0.2  # of the work, that copying may take before it is worth a remark
LONG = 0.02  # seconds of an item, for which what sending costs does not count
FEW_CPUS, MANY_CPUS = 0.7, 1.3  # of one thread that is to use one CPU
OTHERS_SHARE = 0.15  # of the CPUs, from which on others make the figures doubtful


@dataclass(frozen=True)
class Measured:
    """A trial.

    Attributes:
        items: how many there are.
        seconds: of each item that was run, in the loop; the largest first of all.
        one_backward: seconds of the loop over them with one backward from all results.
        pools: seconds of a map of the same items and its backward, by number of workers.
        others: seconds of the same items in other ways, by their names.
        cpus: that may be used.
        cpus_taken: by the loop with one thread.
        cpus_of_others: that other programs took of them meanwhile.
        item_bytes, result_bytes: of tensors; the mean.
        capture_bytes: of tensors.
        gradient_bytes: of those that need gradients.
        bytes_per_second: of a copy.
    """

    items: int
    seconds: Sequence[float]
    one_backward: float
    pools: Mapping[int, float]
    others: Mapping[Literal["threads", "vmap"], float]
    cpus: int
    cpus_taken: float
    cpus_of_others: float
    item_bytes: float
    result_bytes: float
    capture_bytes: int
    gradient_bytes: int
    bytes_per_second: float

    @property
    def scale(self) -> float:
        """From the items that were run to all."""
        return self.items / len(self.seconds)

    @property
    def loop(self) -> float:
        """Seconds of the loop over all items, in the order that is faster: a backward after each, or one in the end."""
        return min(sum(self.seconds), self.one_backward) * self.scale


def pool_seconds(measured: Mapping[int, float], workers: int) -> float:
    """Of a map over so many workers: what was measured, else what the model says."""
    if workers in measured:
        return measured[workers]
    if len(measured) == 1:
        ((count, seconds),) = measured.items()
        return seconds * count / workers
    work, caller = statistics.linear_regression([1 / each for each in measured], list(measured.values()))
    return max(caller, 0.0) + max(work, 0.0) / workers  # noise may have it that one of them is negative


def ways_of(trial: Measured) -> Iterator[Way]:
    """The loop, pools of 1, 2, 4, ... workers, and the others; seconds for all items."""
    loop = trial.loop
    yield Way("loop", 0, loop, 1.0, True)
    most = max(2 * trial.cpus, 8)
    counts = sorted({*trial.pools, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})
    for count in counts if trial.pools else []:
        seconds = max(pool_seconds(trial.pools, count) * trial.scale, max(trial.seconds))
        yield Way("pool", count, seconds, loop / seconds, count in trial.pools)
    for name, each in trial.others.items():
        yield Way(name, 0, each * trial.scale, loop / (each * trial.scale), True)


def best_of(ways: Sequence[Way], cpus: int) -> tuple[Way, Way | None]:
    """The way to take, and the best pool that this machine has CPUs for."""
    pools = [way for way in ways if way.name == "pool" and way.processes <= max(cpus, 1)]
    pool = min(pools, key=lambda way: way.seconds, default=None)
    others = [way for way in ways if way.name not in ("pool", "loop") and way.speed_up >= LEAST_GAIN]
    candidates = others + ([pool] if pool is not None and pool.speed_up >= LEAST_GAIN else [])
    return min(candidates, key=lambda way: way.seconds, default=ways[0]), pool


def obstacles_of(trial: Measured, pool: Way | None) -> Iterator[Obstacle]:
    """What keeps the best pool from being as many times faster as it has workers."""
    mean = sum(trial.seconds) / len(trial.seconds)
    workers = pool.processes if pool is not None else trial.cpus
    copied = trial.capture_bytes / trial.bytes_per_second
    if copied > LARGE_SHARE * trial.loop / workers:
        yield Obstacle(
            "captures too large",
            f"each map copies {size_of(trial.capture_bytes)} of captured tensors ({length_of(copied)}), and all items together "
            f"take {length_of(trial.loop)}",
            "Give each item its part as an argument, or put more items into one map.",
        )
    crossing = (trial.item_bytes + trial.result_bytes) / trial.bytes_per_second
    if crossing > LARGE_SHARE * mean:
        yield Obstacle(
            "results too large" if trial.result_bytes > trial.item_bytes else "items too large",
            f"an item and its result have {size_of(trial.item_bytes + trial.result_bytes)}, which takes {length_of(crossing)} "
            f"to copy, and {length_of(mean)} to compute",
            "Have the function return what is needed of it (a loss, a sum), or use threads.",
        )
    if (longest := max(trial.seconds)) > trial.loop / max(workers, 2) and trial.items > 1:
        yield Obstacle(
            "one item dominates",
            f"the longest item takes {length_of(longest)} of {length_of(trial.loop)}; no number of workers is faster than that",
            "Divide that item, or give it more threads.",
        )
    if 1 in trial.pools and trial.loop < trial.pools[1] * trial.scale:
        sending = trial.pools[1] / len(trial.seconds) - mean
        more = f"an item takes {length_of(mean)} on average, and a pool of one {length_of(sending)} more"
        is_large = sending > LARGE_SHARE * mean
        if is_large and mean < LONG:
            yield Obstacle(
                "items too small", more, "Put several items into one (stack them, torch.vmap), or stay with the loop."
            )
        elif is_large and trial.gradient_bytes:
            yield Obstacle(
                "captures too large",
                f"{more}: each adds to gradients of captured tensors ({size_of(trial.gradient_bytes)})",
                "Give each item its part as an argument.",
            )
    if trial.cpus_of_others > OTHERS_SHARE * trial.cpus:
        yield Obstacle(
            BUSY,
            f"other programs took {trial.cpus_of_others:.1f} of {trial.cpus} CPUs meanwhile",
            "Ask again when they have ended.",
        )
    elif trial.cpus_taken < FEW_CPUS:
        yield Obstacle(
            "waiting",
            f"the loop used {trial.cpus_taken:.0%} of one CPU: the function waits, for a file or another program, say",
            "If so, a pool may have more workers than there are CPUs.",
        )
    if trial.cpus_taken > MANY_CPUS:
        yield Obstacle(
            "threads",
            f"with one intra-op thread the loop keeps {trial.cpus_taken:.1f} CPUs busy, and each worker will",
            "Limit the threads of the other library (OMP_NUM_THREADS=1 before the program starts).",
        )


def spread_of(seconds: Sequence[float]) -> tuple[float, float]:
    """What one in ten does not reach, and what one in ten exceeds."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return deciles[0], deciles[-1]
