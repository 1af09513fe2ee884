"""Numbered pieces in their order, each once, however they come. Both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator

__all__ = ["Sequence"]


class Sequence:
    """What is missing is waited for; `missing_for` says how long already, for who gives up some time."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._coming: set[int] = set()
        self._since = 0.0  # on the clock of time.monotonic: when the next became the next, or the first came early

    def expect(self, number: int) -> None:
        """That piece is on its way, and may take long."""
        self._coming.add(number)

    def arrange(self, number: int, piece: bytes) -> Iterator[bytes]:
        """The piece comes: those that are now in turn. A number that has come before says nothing new."""
        if number > self._next and not self._early:
            self._since = time.monotonic()
        if number >= self._next:
            self._early.setdefault(number, piece)
        while self._next in self._early:
            self._coming.discard(self._next)
            self._next += 1
            if len(self._early) > 1:
                self._since = time.monotonic()
            yield self._early.pop(self._next - 1)

    @property
    def missing_for(self) -> float:
        """Seconds for which others have been there before the next, of which nobody knows."""
        return time.monotonic() - self._since if self._early and self._next not in self._coming else 0.0
