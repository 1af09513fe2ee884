"""What gradient a function's losses will get, learned from those that came: for `graphs="auto"`. Caller's side.

    a loss's backward ──► the same gradient as in the map before: one more in a row ──► LEAST of them: it is predicted
    predicted rightly for CONFIRMED maps in a row ──► graphs need not be kept any more for a backward that differs
    predicted wrongly ──► a credit is lost, and it takes PRICE maps to earn another
So at most one in `PRICE` maps is predicted wrongly, and one more, whatever the caller does. Any thread may call.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CONFIRMED", "LEAST", "PRICE", "Predicted", "Predictor"]

LEAST = 2  # maps in a row, with the same gradient, before the next one's is predicted
CONFIRMED = 2  # maps in a row that were predicted rightly
PRICE = 25  # maps seen for each that may be predicted wrongly
MOST_CREDIT = 40 * PRICE  # so that a long time of right ones does not pay for as long a time of wrong ones


class Predicted(NamedTuple):
    gradient: float
    is_confirmed: bool


class Predictor:
    """Of one function."""

    __slots__ = ("_credit", "_gradient", "_in_a_row", "_right")

    def __init__(self) -> None:
        self._gradient: float | None = None
        self._in_a_row = 0
        self._right = 0  # predictions in a row
        self._credit = PRICE  # what each prediction that is under way may cost has been taken from it

    def predict(self) -> Predicted | None:
        """The gradient that the losses of a map will get, which begins; None where nobody can say."""
        if self._gradient is None or self._in_a_row < LEAST or self._credit < PRICE:
            return None
        self._credit -= PRICE
        return Predicted(self._gradient, self._right >= CONFIRMED)

    def note_gradient(self, gradient: float, predicted: float | None) -> None:
        """The losses of a map got this one."""
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
        """Backwards of a map were run in vain. `was_right`: the gradient came, but not for all that was run."""
        self._right = 0
        if was_right:
            self._credit -= PRICE
