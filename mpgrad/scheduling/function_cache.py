"""The pickled functions that workers keep, by number: each is sent to each worker once, however
often it is mapped.

Assumes: called by the scheduling thread, but for `own_seconds`, `predicted` and `predictor_of`,
which any may call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from mpgrad.calls.backwards import Prediction, Predictor
from mpgrad.calls.packing import SharedFunction
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import Results

__all__ = ["FunctionCache"]

MOST_CODES = 128  # for the next operation with the same function
MOST_BYTES = 64 << 20


class FunctionTiming:
    """Of one function: what its calls took, as the workers measured it."""

    __slots__ = ("_answers", "own_seconds", "predictor", "seconds")

    def __init__(self) -> None:
        # of an item by itself, with its backward where that is run right after it
        self.own_seconds = 0.0
        self.seconds = 0.0  # of an item, with our care for it
        self.predictor = Predictor()
        self._answers = 0

    def note_results(self, message: Results, items: int, workers: int, share: float) -> None:
        """The first answer of each worker does not count for long: caches are cold, and modules are
        imported."""
        self._answers += 1
        weight = min(share, 0.5 if self._answers > workers + 1 else 1.0)
        own_seconds = message.own_seconds + message.eager_seconds
        self.own_seconds = mixed(self.own_seconds, own_seconds / items, weight)
        self.seconds = mixed(self.seconds, message.seconds / items, weight)


class FunctionCache:
    """The functions that were mapped last, by number, and what their calls took, in seconds."""

    def __init__(self, workers: Mapping[int, WorkerHandle]) -> None:
        self._workers = workers
        self._numbers: dict[bytes, int] = {}  # the last used at the end
        self._new_numbers = itertools.count(1)
        self._measured: dict[int, FunctionTiming] = {}  # by number
        self.wrong_predictions = 0  # about so many: threads that count at once may lose one

    def number(self, function: SharedFunction) -> None:
        """Give the function the number of its code; what was not used for longest may be forgotten
        for it."""
        code = self._numbers.pop(function.pickled, None) or next(self._new_numbers)
        self._numbers[function.pickled] = function.code = code
        while len(self._numbers) > 1 and (
            len(self._numbers) > MOST_CODES or sum(map(len, self._numbers)) > MOST_BYTES
        ):
            oldest = self._numbers.pop(next(iter(self._numbers)))
            self._measured.pop(oldest, None)
            for worker in self._workers.values():
                if oldest in worker.writer.codes:
                    worker.writer.codes.discard(oldest)
                    worker.forgotten_codes.append(oldest)

    def own_seconds(self, pickled: bytes) -> float | None:
        """What a call of the function takes a worker; None before the first. Any thread may ask."""
        measured = self._measured.get(self._numbers.get(pickled, 0))
        return None if measured is None else measured.own_seconds

    def predicted(self, pickled: bytes) -> Prediction | None:
        """The gradient that the losses of a map that begins will get, if it can be predicted. Any
        thread may ask."""
        measured = self._measured.get(self._numbers.get(pickled, 0))
        return None if measured is None else measured.predictor.predict()

    def predictor_of(self, function: SharedFunction) -> Predictor | None:
        """None where nothing came of the function yet, or it was forgotten. Any thread may ask."""
        measured = self._measured.get(function.code)
        return None if measured is None else measured.predictor

    def seconds(self, function: SharedFunction, unknown: float) -> float:
        """Of one of its calls, with our care for it; `unknown` before the first."""
        measured = self._measured.get(function.code)
        return unknown if measured is None else measured.seconds

    def note_results(
        self, function: SharedFunction, message: Results, items: int, share: float = math.inf
    ) -> None:
        """What `items` calls took.

        What was measured last counts most; but where the largest calls come first, no more than its
        `share` of all that were measured in this operation: then the mean of all of them counts.
        """
        if self._numbers.get(function.pickled) != function.code:  # forgotten meanwhile
            return
        measured = self._measured.get(function.code) or FunctionTiming()
        measured.note_results(message, items, len(self._workers), share)
        self._measured[function.code] = measured  # only now may others look at it


def mixed(old: float, new: float, weight: float) -> float:
    """`weight` is that of the new one."""
    return (1 - weight) * old + weight * new
