"""What calls cost, run in the caller or sent, and which is quicker: measured as they go, by the pickle of their function.

    here   the forward, as measured here, and the backward, as long as it takes a worker, but for the speed of both
    sent   what both take a worker, over the number of workers, and what sending takes
The backward counts where calls are given something that needs gradients, as often as one came for such calls.
What was measured last counts: the items of a function may be of another size today. And what was not measured for long is
measured again: now and then a map is sent that would have run here.

Any thread asks and notes, without a lock: if two note at once, a measurement may be lost, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpgrad.scheduling.function_cache import Ran

__all__ = ["Costs"]

DEAR = 1e-3  # seconds: such a call is sent even to a single worker, which may die of it in our place
SENT_SECONDS = 25e-6  # that a call takes beyond its own time where it is sent, until it is measured: as in bundles
BACKWARD_SECONDS = 20e-6  # that its backward takes beyond that
CARE_HERE = 20e-6  # that a call takes beyond its own time where it is run here, at most
LATENCY = 200e-6  # seconds from the first call that is sent to its result
# times what it takes a worker, of a call that is run here; the first until it was tried: those that compute at once share
# caches, memory, perhaps cores
LEAST_ALONE, MOST_ALONE = 0.6, 1.2
ALL_FIRST = 1.2  # times what a backward takes right after its forward, of one that comes later: its graph has left the cache
MANY = 256  # calls of a map, from which its time says what sending takes
FIRST_TRIAL, MOST_BEFORE_TRIAL = 4, 64  # maps that run here before one is sent, to see what that takes; each time twice as many
LEAST_TRIED = 32  # calls of such a map: fewer say little
WORTH_TRYING = 2  # times what a call takes here, as sending is thought to take: beyond, it is not tried
MOST_FUNCTIONS = 128


class Here(NamedTuple):
    """What a call took here."""

    seconds: float  # the forward, with our care for it
    in_workers: float | None  # the forward in a worker, as it was measured up to then; None where that is old


class Estimate(NamedTuple):
    """Seconds a call, forward and backward."""

    here: float
    sent: float
    longest: float  # that it occupies whoever runs it
    knows_backward: bool

    @property
    def pays(self) -> bool:
        """To run it here."""
        return self.longest <= DEAR and self.here < self.sent


class Costs:
    """Of the functions that were met last, by their pickles. Times are in seconds."""

    def __init__(self, in_workers: Callable[[bytes], Ran | None]) -> None:
        self._in_workers = in_workers
        self._here: dict[bytes, Here] = {}  # the last used at the end
        self._sent_ever: dict[bytes, None] = {}
        self._trials: dict[bytes, tuple[int, int]] = {}  # how many maps from now, and how many there were since the last
        self._sending = SENT_SECONDS
        self.calls_here = 0

    def are_known(self, function: bytes) -> bool:
        return self._in_workers(function) is not None or function in self._here

    def are_unknown(self, function: bytes) -> bool:
        """And worth knowing."""
        return not self.are_known(function) and function not in self._sent_ever

    def pays(self, function: bytes, workers: int, count: int | None, grads: bool = False) -> bool:
        """Whether running `count` calls here, one after another, takes less time than sending them.

        `grads`: they are given something that needs gradients.
        """
        estimate = self._estimate(function, workers, count, grads)
        return estimate is not None and estimate.pays

    def next_is_trial(self, function: bytes, workers: int, count: int | None, grads: bool) -> bool:
        """Counts maps that it pays to run here; whether this one is sent nevertheless, to see what that takes now."""
        estimate = self._estimate(function, workers, count, grads)
        if estimate is None or not estimate.pays or (count is not None and count < LEAST_TRIED):
            return False
        if estimate.knows_backward and estimate.sent > WORTH_TRYING * estimate.here:
            return False
        left, interval = self._trials.pop(function, (FIRST_TRIAL, FIRST_TRIAL))
        if left == 0:
            interval = min(2 * interval, MOST_BEFORE_TRIAL)
        self._trials[function] = (left - 1 if left else interval), interval
        forget_first(self._trials)
        return left == 0

    def _estimate(self, function: bytes, workers: int, count: int | None, grads: bool) -> Estimate | None:
        """None where nothing is known, or where it does not matter."""
        measured, ran = self._here.get(function), self._in_workers(function)
        if function in self._sent_ever or (measured is None and ran is None):
            return None
        here, ran = in_agreement(measured, ran)
        ahead, behind = (ran.ahead, ran.behind) if grads else (0.0, 0.0)
        alone = min(max(here / ran.forward, LEAST_ALONE), MOST_ALONE) if ran.forward else 1.0
        sending = self._sending + (BACKWARD_SECONDS if ahead or behind else 0.0)
        sending += 0.0 if count is None else LATENCY / max(1, count)
        at_once = workers if count is None else max(1, min(workers, count))
        backward = (ahead * ALL_FIRST + behind) * alone
        sent = (ran.forward + ahead + behind) / at_once + sending
        return Estimate(here + backward, sent, max(here, ran.forward + ahead), ran.gave_graphs or not grads)

    def note_here(self, function: bytes, seconds: float, calls: int) -> None:
        self.calls_here += calls
        before, ran = self._here.pop(function, None), self._in_workers(function)
        mean = seconds / calls if before is None else (before.seconds + seconds / calls) / 2
        self._here[function] = Here(mean, None if ran is None else ran.forward)
        forget_first(self._here)

    def note_sent(self, function: bytes, seconds: float, calls: int, workers: int, grads: bool = False) -> None:
        """A whole map took so long; `grads` as above."""
        ran, here = self._in_workers(function), self._here.get(function)
        if ran is not None and here is not None:
            # it may have taken long only once, when the machine was busy
            self._here[function] = Here((here.seconds + min(here.seconds, ran.forward)) / 2, None)
        own = 0.0 if ran is None else ran.total if grads else ran.forward
        if calls >= MANY and ran is not None and own < DEAR:
            beyond = max(0.0, seconds / calls - own / workers)
            # up slowly: workers that are still being started, or other programs, are no reason to keep all calls here
            self._sending += (beyond - self._sending) / 2 if beyond < self._sending else self._sending / 8

    def send_ever_after(self, function: bytes) -> None:
        self._sent_ever[function] = None
        forget_first(self._sent_ever)


def in_agreement(here: Here | None, ran: Ran | None) -> tuple[float, Ran]:
    """The forward here, and what a worker takes. Where both cannot be right, the one that was measured later is."""
    if here is None:
        assert ran is not None
        return ran.forward * LEAST_ALONE, ran
    if ran is None or not ran.forward:
        return here.seconds, ran or Ran(here.seconds)
    least, most = ran.forward * LEAST_ALONE, ran.forward * MOST_ALONE
    if here.in_workers != ran.forward:
        return min(max(here.seconds, least), most + CARE_HERE), ran
    times = min(here.seconds / least, 1.0) if here.seconds < most + CARE_HERE else (here.seconds - CARE_HERE) / most
    return here.seconds, Ran(times * ran.forward, times * ran.ahead, times * ran.behind, ran.gave_graphs)


def forget_first(functions: dict[bytes, Any]) -> None:
    if len(functions) > MOST_FUNCTIONS:  # several threads may be here, and forget the same one
        oldest, *_ = list(functions)
        functions.pop(oldest, None)
