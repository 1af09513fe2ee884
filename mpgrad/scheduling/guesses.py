"""What gradient a function's losses will get, learned from those that came: for `graphs="auto"`. Caller's side.

    a loss's backward, the same gradient for all of a map ──► right: one more in a row ──► enough of them: expected
    another gradient, or part of a backward ──► other: none in a row
    a worker ran backwards for it in vain   ──► wrong: likewise, and twice as many are asked for next time
So the backwards that are run in vain become ever fewer, whatever the caller does. Any thread may call.
"""

from __future__ import annotations

__all__ = ["Guess"]

LEAST = 2  # maps in a row, with the same gradient, before the next one's is expected
MOST = 512
OPEN = 16  # of so many in a row, one more may be expected before it is known what came
FORGIVEN = 32  # further ones in a row, after which it is as if no guess had been wrong


class Guess:
    """Of one function."""

    __slots__ = ("_gradient", "_in_a_row", "_needed", "_open")

    def __init__(self) -> None:
        self._gradient: float | None = None
        self._in_a_row = 0
        self._needed = LEAST
        self._open = 0  # maps that were guessed, and of which nothing is known yet

    def ask(self) -> float | None:
        """The gradient that the losses of a map will get, which begins; None where nobody can say."""
        if self._in_a_row < self._needed or self._open > self._in_a_row // OPEN:
            return None
        self._open += 1
        return self._gradient

    def note_right(self, gradient: float) -> None:
        """The losses of a map got this one."""
        self._in_a_row = self._in_a_row + 1 if gradient == self._gradient else 1
        self._gradient = gradient
        self._open = max(0, self._open - 1)
        if self._in_a_row >= self._needed + FORGIVEN:
            self._needed = LEAST

    def note_other(self) -> None:
        """Results of a map got no backward, or one that is not a loss's, or different ones."""
        self._in_a_row = self._open = 0

    def note_wrong(self) -> None:
        """What was expected did not come."""
        if self._in_a_row:  # once for each map
            self._in_a_row, self._needed = 0, min(2 * self._needed, MOST)
        self._open = 0
