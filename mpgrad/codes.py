"""The pickled functions that workers keep, by number: each is sent to each worker once, however often it is mapped."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from mpgrad.crew import Worker
from mpgrad.packing import SharedFunction

__all__ = ["Codes"]

MOST_CODES = 128  # for the next operation with the same function
MOST_BYTES = 64 << 20


class Codes:
    def __init__(self, workers: Mapping[int, Worker]) -> None:
        self._workers = workers
        self._numbers: dict[bytes, int] = {}  # the last used at the end
        self._new_numbers = itertools.count(1)
        self.seconds: dict[int, float] = {}  # code -> mean seconds of a call, as the workers measured it
        self._own_seconds: dict[int, float] = {}  # of these, in the function
        self._measured: dict[int, int] = {}  # how often

    def number(self, function: SharedFunction) -> None:
        """Give the function the number of its code; what was not used for longest may be forgotten for it."""
        code = self._numbers.pop(function.pickled, None) or next(self._new_numbers)
        self._numbers[function.pickled] = function.code = code
        while len(self._numbers) > 1 and (len(self._numbers) > MOST_CODES or sum(map(len, self._numbers)) > MOST_BYTES):
            oldest = self._numbers.pop(next(iter(self._numbers)))
            self.seconds.pop(oldest, None)
            self._measured.pop(oldest, None)
            self._own_seconds.pop(oldest, None)
            for worker in self._workers.values():
                if oldest in worker.codes:
                    worker.codes.discard(oldest)
                    worker.forgotten_codes.append(oldest)

    def seconds_of(self, pickled: bytes) -> float | None:
        """Of its own, that a call of the function takes a worker; None before the first. Any thread may ask."""
        return self._own_seconds.get(self._numbers.get(pickled, 0))

    def note_seconds(self, function: SharedFunction, mean: float, own: float) -> None:
        """The first time in each worker does not count for long: caches are cold, and modules are imported."""
        times = self._measured[function.code] = self._measured.get(function.code, 0) + 1
        for known, new in ((self.seconds, mean), (self._own_seconds, own)):
            before = known.get(function.code, new)
            known[function.code] = new if times <= len(self._workers) + 1 else (before + new) / 2
