"""The clock of a worker on another machine, beside the caller's.

A chunk begins after it was sent and ends before its answer is here. So each chunk bounds what the caller's clock shows beyond
the worker's, from both sides; all together bound it best. In the middle the error is at most half of the quickest way there and
back, and of what the clocks drift apart meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpgrad.timeline.recording import Chunk

__all__ = ["ahead_of"]


def ahead_of(chunks: Iterable[Chunk]) -> int:
    """Nanoseconds that the caller's clock shows more than that of the worker which answered these."""
    answered = [each for each in chunks if each.answered is not None]
    if not answered:
        return 0
    least = max(each.sent - each.began for each in answered)
    most = min(each.answered - each.ended for each in answered if each.answered is not None)
    return (least + most) // 2
