"""The pickled functions that workers keep, by number: each is sent to each worker once, however often it is mapped."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpgrad.crew import SentGradients, Worker
from mpgrad.messages import Results
from mpgrad.packing import SharedFunction

__all__ = ["Codes", "Ran"]

MOST_CODES = 128  # for the next operation with the same function
MOST_BYTES = 64 << 20
MOST_REMEMBERED = 1024  # calls with graphs, of which is known what their backwards took; more count for ever less


class Ran(NamedTuple):
    """Seconds that a call takes a worker, apart from our care for it. A backward is one of a call that gave a graph."""

    forward: float
    ahead: float = 0.0  # the backward, where that is run right after it
    behind: float = 0.0  # the backwards that came later, over all such calls: for some perhaps none came
    gave_graphs: bool = False  # so that what the backward takes is known

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
        self._behind: dict[int, tuple[float, float]] = {}  # calls that gave graphs, and seconds of their backwards

    def number(self, function: SharedFunction) -> None:
        """Give the function the number of its code; what was not used for longest may be forgotten for it."""
        code = self._numbers.pop(function.pickled, None) or next(self._new_numbers)
        self._numbers[function.pickled] = function.code = code
        while len(self._numbers) > 1 and (len(self._numbers) > MOST_CODES or sum(map(len, self._numbers)) > MOST_BYTES):
            oldest = self._numbers.pop(next(iter(self._numbers)))
            self.seconds.pop(oldest, None)
            self._measured.pop(oldest, None)
            self._ran.pop(oldest, None)
            self._behind.pop(oldest, None)
            for worker in self._workers.values():
                if oldest in worker.codes:
                    worker.codes.discard(oldest)
                    worker.forgotten_codes.append(oldest)

    def ran(self, pickled: bytes) -> Ran | None:
        """What a call of the function takes a worker; None before the first. Any thread may ask."""
        return self._ran.get(self._numbers.get(pickled, 0))

    def note_results(self, function: SharedFunction, message: Results, items: int, with_graphs: int) -> None:
        """What `items` calls took, of which so many gave graphs.

        The first time in each worker does not count for long: caches are cold, and modules are imported.
        """
        code = function.code
        times = self._measured[code] = self._measured.get(code, 0) + 1
        weight = 0.5 if times > len(self._workers) + 1 else 1.0
        before = self._ran.get(code, Ran(0.0))
        forward = mixed(before.forward, message.own_seconds / items, weight)
        ahead = before.ahead
        if with_graphs:
            ahead = mixed(ahead, message.ahead_seconds / with_graphs, weight if before.gave_graphs else 1.0)
        self.seconds[code] = mixed(self.seconds.get(code, 0.0), message.seconds / items, weight)
        self._note_behind(code, Ran(forward, ahead), with_graphs, 0.0)

    def note_backwards(self, sent: Sequence[SentGradients], seconds: float) -> None:
        """What they took together; several functions' together say nothing of one."""
        codes = {each.what.graph.home.code for each in sent}
        code = codes.pop()
        if not codes and code in self._ran:
            self._note_behind(code, self._ran[code], 0, seconds)

    def _note_behind(self, code: int, ran: Ran, calls: float, seconds: float) -> None:
        """Of so many further calls with graphs, and backwards of so many seconds."""
        calls_before, seconds_before = self._behind.get(code, (0.0, 0.0))
        calls, seconds = calls + calls_before, seconds + seconds_before
        if calls > MOST_REMEMBERED:
            calls, seconds = calls / 2, seconds / 2
        self._behind[code] = calls, seconds
        self._ran[code] = ran._replace(behind=seconds / calls, gave_graphs=True) if calls else ran


def mixed(old: float, new: float, weight: float) -> float:
    """`weight` is that of the new one."""
    return (1 - weight) * old + weight * new
