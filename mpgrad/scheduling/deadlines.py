"""What has to happen at a certain time: calls end that have run too long, and operations at their deadlines.

Assumes: `due` and `put` are called by the scheduling thread.
"""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from collections.abc import Iterator

from mpgrad.calls.operations import Operation
from mpgrad.scheduling.worker_handle import WorkerHandle

__all__ = ["Deadlines", "overdue_at"]


SOME = 100  # entries that may be of operations that are gone


class Deadlines:
    """Operations by the moment, on the clock of time.monotonic, at which they have to have ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[Operation]]] = []
        self._most = SOME  # before those that are gone are left out
        self._numbers = itertools.count()  # heaps compare what stands behind equal moments

    def put(self, moment: float, operation: Operation) -> None:
        heapq.heappush(self._heap, (moment, next(self._numbers), weakref.ref(operation)))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[2]() is not None]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SOME

    def due(self, now: float) -> Iterator[Operation]:
        while self._heap and self._heap[0][0] <= now:
            operation = heapq.heappop(self._heap)[2]()
            if operation is not None:
                yield operation

    @property
    def next(self) -> float:
        return self._heap[0][0] if self._heap else math.inf


def overdue_at(worker: WorkerHandle) -> float:
    """When the call that it is at will have taken too long; where it has, when the worker must have ended."""
    if worker.doomed is not None and worker.gone is None:
        return worker.doomed.moment
    chunk = worker.under_way.first
    if worker.gone is not None or chunk is None or chunk.timeout is None:
        return math.inf
    if worker.link.keeps_time:
        return -math.inf if worker.under_way.is_at_call(worker.link.overrun) else math.inf
    return worker.under_way.begun()[1] + chunk.timeout
