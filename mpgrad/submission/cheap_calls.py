"""One line in the log for a function whose calls cost more to send than to run. Caller only.

Every call is sent, so that what it gives and does never depends on how long it takes. Whether that pays cannot be known
beforehand. But workers report how long the calls of a map took by themselves, and the sum of these is what a loop would take.
Where maps of a function take much longer than that, its user is told so, once, and what to do about it.

Assumes: a map is only noted if the comparison is fair: all its items were there when it began, and somebody waited for it.
"""

from __future__ import annotations

import logging

from mpgrad.callbacks import report
from mpgrad.calls.operations import Operation
from mpgrad.scheduling.scheduler import Scheduler

__all__ = ["CheapCalls"]

MUCH = 1.5  # times as long as the calls by themselves
MAPS = 3  # in a row: one may be slow because of what else the machine does
MOST_FUNCTIONS = 128

TOLD: dict[int, object] = {}  # hashes of the pickles of the functions that this process has been told of


class CheapCalls:
    """The functions of a pool whose last maps took much longer than their calls."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._receiver = scheduler.receiver
        self._slow: dict[int, list[tuple[float, float]]] = {}  # seconds of maps and of their calls, by hash of the pickle

    def note(self, operation: Operation, seconds: float, answers: int) -> None:
        """A map took so many seconds.

        `answers`: how many the pool had when it began. If there are more now than those of this map, workers did something
        else as well, and the map may have waited for that.
        """
        function = operation.options.function
        if function.is_new or self._receiver.answers - answers != operation.items or not operation.items:
            return
        key = hash(function.pickled)
        if key in TOLD:
            return
        if seconds <= MUCH * operation.own_seconds:
            self._slow.pop(key, None)
            return
        maps = self._slow.setdefault(key, [])
        maps.append((seconds, operation.own_seconds))
        if len(self._slow) > MOST_FUNCTIONS:
            self._slow.clear()
        if len(maps) < MAPS:
            return
        mine = object()
        if TOLD.setdefault(key, mine) is not mine:  # another thread was faster
            return
        whole, own = (1e3 * sum(each) for each in zip(*maps, strict=True))
        report(
            logging.WARNING,
            "calls of %s cost more to send than to run: its last %d maps took %.3g ms, their calls by themselves %.3g ms; "
            "use larger items, several items in one call, a chunksize, or a plain loop",
            function.names.function,
            MAPS,
            whole,
            own,
        )
