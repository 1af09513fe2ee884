"""Pauses Python's garbage collector while many small objects are made. Both sides use it.

A map of 2,000 items makes about 50,000 objects and no cycles. But the collector only counts
objects. Each time a quarter has been added, it walks through the whole process, including torch's
300,000 objects. That takes a third to a half of the caller's cost of a call with tiny tensors, and
of the time in which a worker loads an object of 10,000 parts.

Guarantees: the collector pauses for at most LONGEST_HOLD seconds of waiting and MOST_HELD new
    objects. If the caller has turned it off, it stays off. A forked child has it on.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable

__all__ = ["LONGEST_HOLD", "collector_held", "let_collector_look"]

LONGEST_HOLD = 0.1  # seconds; a longer wait leaves time to collect
MOST_HELD = 200_000  # new objects, ours or those of the iterable that the caller gave


class HoldCounter:
    """Keeps the holds that pause the collector. It belongs to the process, and several threads may
    run operations."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a hold may end within it
        self.holds: set[int] = set()
        self.was_on = False  # before the first hold

    def after_fork(self) -> None:
        """Forget the holds: their threads stayed in the parent, or return to a hold that is
        over."""
        if self.holds and self.was_on:
            gc.enable()
        self.holds.clear()  # otherwise the child's own holds would never be the last
        self.was_on = False
        self.lock = threading.RLock()


HOLDERS = HoldCounter()
os.register_at_fork(after_in_child=HOLDERS.after_fork)


class collector_held:  # named like a function, because it is called like one
    """Pauses the collector during a block. If an interrupt prevents the end of the block, the pause
    ends when this object is deleted."""

    def __enter__(self) -> None:
        with HOLDERS.lock:
            if not HOLDERS.holds:
                HOLDERS.was_on = HOLDERS.was_on or gc.isenabled()
            HOLDERS.holds.add(id(self))
            gc.disable()

    def __exit__(self, *error: object) -> None:
        with HOLDERS.lock:
            HOLDERS.holds.discard(id(self))
            if not HOLDERS.holds and HOLDERS.was_on:
                gc.enable()
                HOLDERS.was_on = False

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not python_ends():
            self.__exit__()


def let_collector_look() -> None:
    """Collect if many objects are new. Long operations call this now and then within
    `collector_held`."""
    if gc.get_count()[0] > MOST_HELD:
        gc.collect(1)
