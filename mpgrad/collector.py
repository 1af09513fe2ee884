"""Python's collector of cycles, held off while an operation makes its many small objects.

A map of 2,000 items makes some 50,000 objects and no cycle. The collector sees only that there are more and more of them and
walks through all of the process for each quarter that is added, torch's 300,000 included: a third to a half of what a call
with tiny tensors costs the parent.

Guarantees: at most LONGEST_HOLD seconds of waiting and MOST_HELD new objects pass without the collector; where the caller has
    turned it off it stays off; a forked child has it on.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator

from mpgrad.errors import contextmanager

__all__ = ["LONGEST_HOLD", "collector_held", "let_collector_look"]

LONGEST_HOLD = 0.1  # seconds: then there is time to collect
MOST_HELD = 200_000  # new objects, ours or those of the iterable that the caller gave


class Hold:
    """Whoever holds the collector off; at the latest until it is gone, should an interrupt come before anything else."""

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not python_ends():
            HOLDERS.let_go(self)


class Holders:
    """The collector belongs to the process, and several threads may run operations."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a hold may end within it
        self.holds: set[int] = set()
        self._was_on = False  # before the first of them

    def add(self, hold: Hold) -> None:
        with self._lock:
            if not self.holds:
                self._was_on = self._was_on or gc.isenabled()
            self.holds.add(id(hold))
            gc.disable()

    def let_go(self, hold: Hold) -> None:
        with self._lock:
            self.holds.discard(id(hold))
            if not self.holds and self._was_on:
                gc.enable()
                self._was_on = False

    def after_fork(self) -> None:
        """Those who hold it are threads of the parent, or come back to a hold that is over."""
        if self.holds and self._was_on:
            gc.enable()
        self._lock = threading.RLock()


HOLDERS = Holders()
os.register_at_fork(after_in_child=HOLDERS.after_fork)


@contextmanager
def collector_held() -> Iterator[None]:
    hold = Hold()
    try:
        HOLDERS.add(hold)
        yield
    finally:
        HOLDERS.let_go(hold)


def let_collector_look() -> None:
    """To be called now and then within `collector_held`."""
    if gc.get_count()[0] > MOST_HELD:
        gc.collect(1)
