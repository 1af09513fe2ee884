"""How much is sent together, unless the caller decides: how many items form a window or a bundle,
and how many calls form a chunk.

    items ── window: packed before any is sent
        ──► calls, each an item or a bundle of cheap items ── chunk ──► a worker
The time that calls take is measured (`timing.FunctionTiming`), never guessed. So calls are sent one
by one before the first answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = [
    "CHUNKS_UNDER_WAY",
    "FAR",
    "LARGEST_WINDOW",
    "MOST_CALLS",
    "MOST_PAYLOAD",
    "NEAR",
    "SEEN",
    "WINDOW_BYTES",
    "ChunkSeconds",
    "bundle_size",
    "chunk_size",
    "first_window",
    "guided_size",
    "workers_worth_feeding",
]

# seconds after which each of two processes has seen what the other wrote; two CPUs need far less
SEEN = 1e-3

# seconds of work that are packed before any of it is sent; each later window has twice as much
LEAD = 4e-3
# the fewest items in the first window; a few expensive items are all packed first, so that the
# largest can begin first
FIRST_WINDOW = 16
LARGEST_WINDOW = 512  # items
# bytes of copied tensors after which the packed items are sent in any case
WINDOW_BYTES = 1 << 20

# seconds of work in a bundle of cheap items; bundles are longer far from the end of a map
SHORTEST_BUNDLE, LONGEST_BUNDLE = 4e-3, 20e-3
# the fewest bundles for each worker, if there are enough items
BUNDLES_PER_WORKER = 4
# items; a larger bundle gains little, and a backward for one item has to skip all others
MOST_BUNDLED = 48

# One chunk runs and one waits, so that a worker never waits for the parent.
CHUNKS_UNDER_WAY = 2
# the fewest chunks for each worker into which the remaining calls are split
CHUNKS_PER_WORKER = CHUNKS_UNDER_WAY
# seconds that the parent takes to send a chunk and read its answer, with cold caches
CHUNK_CARE = 300e-6
MOST_CALLS = 256  # in one chunk
MOST_PAYLOAD = 1 << 20  # bytes of small tensors in one chunk


class ChunkSeconds(NamedTuple):
    """Limits for the seconds of work in a chunk. They depend on the cost of a message."""

    shortest: float
    longest: float
    # the longest if the caller waits for all results together; calls that a worker has not begun
    # can be taken back
    together: float
    # seconds that the parent, which has to keep up with all workers, needs for a chunk
    care: float = 0.0

    def least(self, workers: int) -> float:
        """Return the seconds of the shortest chunk, if there are this many workers."""
        return min(self.longest, max(self.shortest, workers * self.care))

    @property
    def one_by_one(self) -> float:
        """The seconds from which calls are sent alone, if they differ in size or if the caller
        needs their results one by one."""
        return self.longest / 2


NEAR = ChunkSeconds(1e-3, 20e-3, 200e-3)
# A message to another machine takes a few ms on its way, and up to 1 ms of CPU time at each end.
FAR = ChunkSeconds(10e-3, 100e-3, 100e-3, 0.7e-3)


def first_window(seconds: float) -> int:
    """Return how many items are packed before any is sent. Each later window is twice as large.

    Each item takes `seconds`, which are infinite if unknown.

    Once workers have work, they compete with the caller for CPUs. When the caller gets a CPU again,
    its caches are cold, and the workers have run dry. So the caller packs many cheap items first,
    which takes almost no time. The number does not depend on the number of workers. With many
    workers, the first few leave the caller its CPU, and the others would wait too long.
    """
    return min(LARGEST_WINDOW, max(FIRST_WINDOW, math.ceil(LEAD / max(seconds, 1e-9))))


def bundle_size(seconds: float, total: int, left: int, workers: int) -> int:
    """Return how many items form a bundle, if `left` of the `total` items are left.

    Each item takes `seconds`. Each worker that is worth feeding gets several bundles.
    """
    most = min(
        MOST_BUNDLED, total // (BUNDLES_PER_WORKER * workers_worth_feeding(workers, total, seconds))
    )
    return max(1, min(most, guided_size(seconds, left, workers, SHORTEST_BUNDLE, LONGEST_BUNDLE)))


def chunk_size(
    seconds: float, left: int, workers: int, chunk_seconds: ChunkSeconds, together: bool = False
) -> int:
    """Return how many of the `left` calls, of `seconds` each, a worker is sent at once.

    `together` is true if the caller waits for all results together.
    """
    longest = chunk_seconds.together if together else chunk_seconds.longest
    least = chunk_seconds.least(workers)
    # The parent cannot keep up with all workers if chunks are shorter.
    crowded = CHUNK_CARE * workers
    return min(MOST_CALLS, guided_size(seconds, left, workers, least, longest, crowded))


def guided_size(
    seconds: float, left: int, workers: int, shortest: float, longest: float, crowded: float = 0.0
) -> int:
    """Return how many of the `left` calls, of `seconds` each, go together.

    The number is a share of the calls that are left, so it falls towards the end. Together these
    calls take at least `shortest` and at most `longest` seconds. A share that takes less than
    `crowded` seconds is rounded up, others are rounded down.

    Source: guided self-scheduling, C. Polychronopoulos and D. Kuck, IEEE Transactions on Computers,
    1987.
    """
    shares = CHUNKS_PER_WORKER * workers_worth_feeding(workers, left, seconds)
    share = left // shares
    if share * seconds < crowded:
        share = math.ceil(left / shares)
    seconds = max(seconds, 1e-9)
    return max(1, min(max(share, math.ceil(shortest / seconds)), int(longest / seconds)))


def workers_worth_feeding(workers: int, calls: int, seconds: float) -> int:
    """Return how many workers it pays to use for the calls, of `seconds` each.

    With fewer workers, the workers' part takes longer. With more workers, the parent's part does. k
    workers take calls * seconds / k, and the parent takes CHUNK_CARE * CHUNKS_PER_WORKER * k. The
    sum is least if both are equal. `seconds` are infinite if unknown.
    """
    if not calls or seconds == math.inf:
        return workers
    return min(
        workers, max(1, math.ceil(math.sqrt(calls * seconds / (CHUNK_CARE * CHUNKS_PER_WORKER))))
    )
