"""Numbers of the pickled functions that workers keep, the time that their calls take, and for
`graphs="auto"` the gradient that their losses will get. Each function is sent to each worker once,
however often it is mapped. Caller's side.

A `Predictor` learns from the gradients that came:

    the same gradient as in the map before: one more in a row ──► after LEAST, it is predicted
    predicted rightly for CONFIRMED maps in a row ──► graphs need not be kept for another backward
    predicted wrongly ──► a credit is lost, and it takes PRICE maps to earn another
So at most one in `PRICE` maps, and one more, is predicted wrongly, whatever the caller does.

Assumes: called by the scheduling thread; any thread may call `own_seconds`, `predicted` and
    `predictor_of`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from mpgrad.calls.packing import SharedFunction
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import Results

__all__ = ["CONFIRMED", "LEAST", "PRICE", "FunctionCache", "Prediction", "Predictor"]

# Workers keep so many functions for the next operation that uses one.
MOST_CODES = 128
MOST_BYTES = 64 << 20


class FunctionTiming:
    """The time that calls of one function took, as measured by the workers."""

    __slots__ = ("_answers", "own_seconds", "predictor", "seconds")

    def __init__(self) -> None:
        # seconds of an item by itself, including a backward that runs right after it
        self.own_seconds = 0.0
        # seconds of an item, including mpgrad's own work for it
        self.seconds = 0.0
        self.predictor = Predictor()
        self._answers = 0

    def note_results(self, message: Results, items: int, workers: int, share: float) -> None:
        """Add an answer's times to the means.

        The first answer of each worker soon loses its weight, because it includes cold caches and
        imports of modules.
        """
        self._answers += 1
        weight = min(share, 0.5 if self._answers > workers + 1 else 1.0)
        own_seconds = message.own_seconds + message.eager_seconds
        self.own_seconds = mixed(self.own_seconds, own_seconds / items, weight)
        self.seconds = mixed(self.seconds, message.seconds / items, weight)


class FunctionCache:
    """The functions that were mapped last, by number, and the seconds that their calls took."""

    def __init__(self, workers: Mapping[int, WorkerHandle]) -> None:
        self._workers = workers
        # the function that was used last stands at the end
        self._numbers: dict[bytes, int] = {}
        self._new_numbers = itertools.count(1)
        self._measured: dict[int, FunctionTiming] = {}  # by number
        # This is approximate: two threads that count at the same time may lose one.
        self.wrong_predictions = 0

    def number(self, function: SharedFunction) -> None:
        """Give the function the number of its code.

        Workers forget the functions used longest ago, if there are too many or they are too large.
        """
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
        """Return the seconds that one of the function's calls takes; None before the first.

        Any thread may ask.
        """
        measured = self._measured.get(self._numbers.get(pickled, 0))
        return None if measured is None else measured.own_seconds

    def predicted(self, pickled: bytes) -> Prediction | None:
        """Predict the gradient that the losses of a new map will get; None if that is not possible.

        Any thread may ask.
        """
        measured = self._measured.get(self._numbers.get(pickled, 0))
        return None if measured is None else measured.predictor.predict()

    def predictor_of(self, function: SharedFunction) -> Predictor | None:
        """Return the function's predictor; None before its first result, or if it was forgotten.

        Any thread may ask.
        """
        measured = self._measured.get(function.code)
        return None if measured is None else measured.predictor

    def seconds(self, function: SharedFunction, unknown: float) -> float:
        """Return the seconds of a call, including mpgrad's own work; `unknown` before the first."""
        measured = self._measured.get(function.code)
        return unknown if measured is None else measured.seconds

    def note_results(
        self, function: SharedFunction, message: Results, items: int, share: float = math.inf
    ) -> None:
        """Note the time that `items` calls took.

        The last measurement counts most. If an operation's largest calls come first, a measurement
        counts for at most its `share` of all that the operation has made, so their mean counts.
        """
        # The function was forgotten meanwhile.
        if self._numbers.get(function.pickled) != function.code:
            return
        measured = self._measured.get(function.code) or FunctionTiming()
        measured.note_results(message, items, len(self._workers), share)
        # Only now may other threads look at the measurement.
        self._measured[function.code] = measured


def mixed(old: float, new: float, weight: float) -> float:
    """Return the weighted mean of both; `weight` is the weight of the new number."""
    return (1 - weight) * old + weight * new


# --- which gradient losses will get


LEAST = 2  # maps in a row, with the same gradient, before the next one's is predicted
CONFIRMED = 2  # maps in a row that were predicted rightly
PRICE = 25  # maps seen for each that may be predicted wrongly
# so that a long time of right ones does not pay for as long a time of wrong ones
MOST_CREDIT = 40 * PRICE


class Prediction(NamedTuple):
    gradient: float
    is_confirmed: bool


class Predictor:
    """Predicts the gradient that the losses of one function will get."""

    __slots__ = ("_credit", "_gradient", "_in_a_row", "_right")

    def __init__(self) -> None:
        self._gradient: float | None = None
        self._in_a_row = 0
        self._right = 0  # predictions in a row
        # what each prediction that is under way may cost has been taken from it
        self._credit = PRICE

    def predict(self) -> Prediction | None:
        """Return the gradient that the losses of a new map will get, or None if it is unknown."""
        if self._gradient is None or self._in_a_row < LEAST or self._credit < PRICE:
            return None
        self._credit -= PRICE
        return Prediction(self._gradient, self._right >= CONFIRMED)

    def note_gradient(self, gradient: float, predicted: float | None) -> None:
        """Note the gradient that the losses of a map got."""
        self._in_a_row = self._in_a_row + 1 if gradient == self._gradient else 1
        self._gradient = gradient
        self._credit = min(self._credit + 1, MOST_CREDIT)
        if predicted == gradient:
            self._credit += PRICE
            self._right += 1

    def note_other(self) -> None:
        """Results of a map got no backward, or one that is not a loss's, or different ones."""
        self._in_a_row = 0

    def note_wrong(self, was_right: bool) -> None:
        """Backwards of a map were run in vain. `was_right`: the gradient came, but not for all that
        was run."""
        self._right = 0
        if was_right:
            self._credit -= PRICE
