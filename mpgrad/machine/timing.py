"""How long the calls of a function take; for `graphs="auto"`, which gradient its losses will get.

A `Predictor` learns from the gradients that came:

    the same gradient as in the map before: one more in a row ──► after LEAST, it is predicted
    predicted rightly for CONFIRMED maps in a row ──► graphs need not be kept for another backward
    predicted wrongly ──► a credit is lost, and it takes PRICE maps to earn another
So at most one in `PRICE` maps, and one more, is predicted wrongly, whatever the caller does.
Assumes: each method is called by one thread at a time; reading needs no lock.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CONFIRMED", "LEAST", "PRICE", "FunctionTiming", "Prediction", "Predictor"]


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

    def note(self, own_seconds: float, seconds: float, workers: int, share: float) -> None:
        """Add an answer's times, of one item each, to the means.

        The first answer of each worker soon loses its weight, because it includes cold caches and
        imports of modules.
        """
        self._answers += 1
        weight = min(share, 0.5 if self._answers > workers + 1 else 1.0)
        self.own_seconds = mixed(self.own_seconds, own_seconds, weight)
        self.seconds = mixed(self.seconds, seconds, weight)


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
