"""How much goes together, where the caller does not say: items in a wave and in a bundle, calls in
a chunk. Caller's side.

    items ── wave: packed before the workers hear
        ──► calls, each an item or a bundle of cheap ones ── chunk ──► a worker
What calls take is measured (`function_cache.Measured`), never guessed: before the first answer they
go one by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = [
    "CHUNKS_UNDER_WAY",
    "FAR",
    "LARGEST_WAVE",
    "MOST_CALLS",
    "MOST_PAYLOAD",
    "NEAR",
    "WAVE_BYTES",
    "Grain",
    "bundle_size",
    "chunk_size",
    "fed",
    "first_wave",
    "guided_size",
]

LEAD = 4e-3  # seconds of work that are packed before any of it is sent; doubles
# items that are in any case: of a few dear ones all, so that the largest can be begun first
FIRST_WAVE = 16
LARGEST_WAVE = 512  # items that are at most
WAVE_BYTES = 1 << 20  # of tensors copied, after which what is packed is sent in any case

# seconds of work in a bundle of cheap items: the more, the further off the end
SHORTEST_BUNDLE, LONGEST_BUNDLE = 4e-3, 20e-3
BUNDLES_PER_WORKER = 4  # at least, where there are items enough
MOST_BUNDLED = 48  # items: more win little, and a backward for one of them passes by all

CHUNKS_UNDER_WAY = 2  # one running, one waiting, so that a worker never waits for the parent
CHUNKS_PER_WORKER = CHUNKS_UNDER_WAY  # of what is left, at least
# seconds that a chunk, sent and answered, takes the parent, whose caches are cold by then
CHUNK_CARE = 300e-6
MOST_CALLS = 256  # in one chunk
MOST_PAYLOAD = 1 << 20  # bytes of small tensors in one chunk


class Grain(NamedTuple):
    """Seconds of work in a chunk, by what a message costs on its way."""

    shortest: float
    longest: float
    care: float = 0.0  # that a chunk takes the parent, which is to keep up with all workers

    def least(self, workers: int) -> float:
        """The shortest, for so many workers."""
        return min(self.longest, max(self.shortest, workers * self.care))

    @property
    def one_by_one(self) -> float:
        """Seconds of a call, from which on it travels alone."""
        return self.longest / 2


NEAR = Grain(1e-3, 20e-3)
# to another machine: some ms on the way, and up to 1 ms of CPU time at each end
FAR = Grain(10e-3, 100e-3, 0.7e-3)


def first_wave(seconds: float) -> int:
    """How many items, of so many seconds each, are packed before the workers hear of them; each
    later wave is twice as large.

    Once they do, they take the CPUs, the caller's too where there are no more; and when it is its
    turn again its caches are cold, and they have run dry. So of cheap items, which are packed in no
    time, the caller packs many first. That would be too late for many workers, of which the first
    few leave it its CPU: so it does not depend on how many there are. Unknown seconds are infinite.
    """
    return min(LARGEST_WAVE, max(FIRST_WAVE, math.ceil(LEAD / max(seconds, 1e-9))))


def bundle_size(seconds: float, total: int, left: int, workers: int) -> int:
    """How many of the `left` ones of `total` items, of so many seconds each, go together: some for
    each worker that is fed."""
    most = min(MOST_BUNDLED, total // (BUNDLES_PER_WORKER * fed(workers, total, seconds)))
    return max(1, min(most, guided_size(seconds, left, workers, SHORTEST_BUNDLE, LONGEST_BUNDLE)))


def chunk_size(seconds: float, left: int, workers: int, grain: Grain) -> int:
    """How many of the calls that are `left`, of so many seconds each, a worker is sent at once."""
    return min(MOST_CALLS, guided_size(seconds, left, workers, grain.least(workers), grain.longest))


def guided_size(seconds: float, left: int, workers: int, shortest: float, longest: float) -> int:
    """How many of the calls that are `left`, of so many seconds each, go together: a share, so
    fewer towards the end.

    At least `shortest` and at most `longest` seconds of work. Source: guided self-scheduling, C.
    Polychronopoulos and D. Kuck, IEEE Transactions on Computers, 1987.
    """
    share = left // (CHUNKS_PER_WORKER * fed(workers, left, seconds))
    seconds = max(seconds, 1e-9)
    return max(1, min(max(share, math.ceil(shortest / seconds)), int(longest / seconds)))


def fed(workers: int, calls: int, seconds: float) -> int:
    """To how many of the workers it is worth handing out the calls, of so many seconds each.

    With fewer their part takes longer, with more the parent's: k workers take calls * seconds / k,
    the parent CHUNK_CARE * CHUNKS_PER_WORKER * k, and such a sum is least where both are the same.
    Unknown seconds are infinite.
    """
    if not calls or seconds == math.inf:
        return workers
    return min(
        workers, max(1, math.ceil(math.sqrt(calls * seconds / (CHUNK_CARE * CHUNKS_PER_WORKER))))
    )
