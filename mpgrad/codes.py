"""The pickled functions that workers keep, by number: each is sent to each worker once, however often it is mapped."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from mpgrad.crew import Worker
from mpgrad.packing import SharedFunction

__all__ = ["Codes", "Ran"]

MOST_CODES = 128  # for the next operation with the same function
MOST_BYTES = 64 << 20


class Ran(NamedTuple):
    """Seconds of the function itself in a worker."""

    forward: float
    ahead: float  # of the backward, where that was run right after it

    @property
    def total(self) -> float:
        return self.forward + self.ahead


class Codes:
    def __init__(self, workers: Mapping[int, Worker]) -> None:
        self._workers = workers
        self._numbers: dict[bytes, int] = {}  # the last used at the end
        self._new_numbers = itertools.count(1)
        self.seconds: dict[int, float] = {}  # code -> mean seconds of a call, as the workers measured it
        self._ran: dict[int, Ran] = {}  # of these, in the function
        self._measured: dict[int, int] = {}  # how often

    def number(self, function: SharedFunction) -> None:
        """Give the function the number of its code; what was not used for longest may be forgotten for it."""
        code = self._numbers.pop(function.pickled, None) or next(self._new_numbers)
        self._numbers[function.pickled] = function.code = code
        while len(self._numbers) > 1 and (len(self._numbers) > MOST_CODES or sum(map(len, self._numbers)) > MOST_BYTES):
            oldest = self._numbers.pop(next(iter(self._numbers)))
            self.seconds.pop(oldest, None)
            self._measured.pop(oldest, None)
            self._ran.pop(oldest, None)
            for worker in self._workers.values():
                if oldest in worker.codes:
                    worker.codes.discard(oldest)
                    worker.forgotten_codes.append(oldest)

    def ran(self, pickled: bytes) -> Ran | None:
        """What a call of the function takes a worker; None before the first. Any thread may ask."""
        return self._ran.get(self._numbers.get(pickled, 0))

    def note_seconds(self, function: SharedFunction, mean: float, ran: Ran) -> None:
        """The first time in each worker does not count for long: caches are cold, and modules are imported."""
        code = function.code
        times = self._measured[code] = self._measured.get(code, 0) + 1
        if times > len(self._workers) + 1:
            before = self._ran[code]
            mean = (self.seconds[code] + mean) / 2
            ran = Ran((before.forward + ran.forward) / 2, (before.ahead + ran.ahead) / 2)
        self.seconds[code], self._ran[code] = mean, ran
