"""How long the calls of a function take, and which gradient its losses will get. The gradient is
needed for `graphs="auto"` only.

A `Predictor` learns from the gradients that losses got:

    the same gradient in LEAST maps in a row ──► it is predicted for the next map
    right predictions for CONFIRMED maps in a row ──► graphs need not be kept for another backward
    a wrong prediction ──► a credit is lost, and it takes PRICE maps to earn another
So at most one in `PRICE` maps, plus one, is predicted wrongly, whatever the caller does.
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
        """Add the times per item of an answer to the means.

        The first answer of each worker soon loses its weight, because it includes cold caches and
        imports of modules.
        """
        self._answers += 1
        weight = min(share, 0.5 if self._answers > workers + 1 else 1.0)
        self.own_seconds = mixed(self.own_seconds, own_seconds, weight)
        self.seconds = mixed(self.seconds, seconds, weight)


def mixed(old: float, new: float, weight: float) -> float:
    """Return the weighted mean of both numbers. The new one has this weight."""
    return (1 - weight) * old + weight * new


# --- which gradient losses will get


LEAST = 2  # maps in a row with the same gradient, before it is predicted for the next map
CONFIRMED = 2  # maps in a row with a right prediction
PRICE = 25  # maps that pay for one wrong prediction
# This limit keeps many right predictions from paying for as many wrong ones.
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
        self._right = 0  # right predictions in a row
        # The price of each prediction under way is already subtracted.
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
        """Note that results of a map got no backward, or a backward that is not a loss's, or
        different gradients."""
        self._in_a_row = 0

    def note_wrong(self, was_right: bool) -> None:
        """Note that backwards of a map ran in vain. `was_right` is true if the gradient came, but
        not for all backwards that ran."""
        self._right = 0
        if was_right:
            self._credit -= PRICE
