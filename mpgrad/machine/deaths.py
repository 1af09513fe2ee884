"""What follows from a worker's death: which call is blamed, which calls fail, and which workers get
the rest.

    the running call, or else the next one ──► `judged` ──┬─► blamed too often: it fails
                                                          └─► it runs again
    all other calls of the worker ──► their queues; they are not blamed
    backwards ──► `successor`, which rebuilds the graph right before the backward
    a graph that no backward needs yet ──► nothing; it is rebuilt for its next backward
    a sum of captures' gradients ──► lost; the thread that asks for it sends each of its
                                     backwards again, by itself (`OperationGradients`)
A call that has begun is blamed for the death of its worker, or for a time-out. A call that was next
is only suspected, and fails only after more deaths.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpgrad.machine.story import DIED_AT, DIED_BEFORE, OVERDUE

__all__ = ["IDLE_DEATHS", "failing", "judged", "successor"]

# deaths of workers that had a call next, before the call is blamed
IDLE_DEATHS = 2


def judged(
    accused: Any,
    has_begun: bool,
    is_overdue: bool,
    is_lost: bool,
    retries: int,
    timeout_retries: int,
) -> tuple[str, bool]:
    """Count the death against the accused call. Return the words for its story, and whether it
    fails. If it does not fail, it runs again.

    `is_overdue` is true if the call took too long, and `is_lost` if its graph cannot be rebuilt.
    """
    if not has_begun:
        accused.idle_deaths += 1
        return DIED_BEFORE, accused.idle_deaths > max(retries, IDLE_DEATHS)
    if is_overdue:
        accused.timeouts += 1
        return OVERDUE, accused.timeouts > timeout_retries or is_lost
    accused.deaths += 1
    return DIED_AT, accused.deaths > retries


def failing(place: int, fails: bool, has_begun: bool, retries: int) -> slice:
    """Return which parts of the chunk fail if the part at this place is accused.

    Without retries, the parts before it also fail. They had run, but their inputs may have been
    written to.
    """
    return slice(0 if retries == 0 and has_begun else place, place + fails)


def successor(workers: Iterable[Any], device: int) -> Any:
    """Return the worker that takes over the graphs of a dead worker on this device.

    It is the worker with the least to do. Workers on the same device come first, and among these
    the ones that still take calls. Return None if no worker has a place.
    """
    placed = [each for each in workers if each.link.has_place]
    there = [each for each in placed if each.device == device]
    active = [each for each in there if not each.retiring] or there
    return min(active or placed, key=lambda each: each.load, default=None)
