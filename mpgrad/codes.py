"""The pickled functions that workers keep, by number: each is sent to each worker once, however often it is mapped."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpgrad.crew import SentGradients, Worker
from mpgrad.packing import SharedFunction

__all__ = ["Codes", "Ran"]

MOST_CODES = 128  # for the next operation with the same function
MOST_BYTES = 64 << 20


class Ran(NamedTuple):
    """Seconds that a call takes a worker, apart from our care for it."""

    forward: float
    ahead: float = 0.0  # the backward, where that is run right after it
    behind: float = 0.0  # the backward, where it comes later

    @property
    def total(self) -> float:
        """Of the call as it is sent."""
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

    def note_backwards(self, sent: Sequence[SentGradients], seconds: float) -> None:
        """What they took together; several functions' together say nothing of one."""
        codes = {each.what.graph.home.code for each in sent}
        ran = self._ran.get(next(iter(codes)))
        if len(codes) > 1 or ran is None:
            return
        items = [each.what.items for each in sent]
        mean = seconds / sum(len(each) if isinstance(each, range) else 1 for each in items)
        self._ran[codes.pop()] = ran._replace(behind=(ran.behind + mean) / 2 if ran.behind else mean)

    def note_seconds(self, function: SharedFunction, mean: float, ran: Ran) -> None:
        """The first time in each worker does not count for long: caches are cold, and modules are imported."""
        code = function.code
        times = self._measured[code] = self._measured.get(code, 0) + 1
        if times > len(self._workers) + 1:
            before = self._ran[code]
            mean = (self.seconds[code] + mean) / 2
            ran = Ran((before.forward + ran.forward) / 2, (before.ahead + ran.ahead) / 2)
        behind = self._ran[code].behind if code in self._ran else 0.0
        self.seconds[code], self._ran[code] = mean, ran._replace(behind=behind)
