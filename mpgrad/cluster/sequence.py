"""Numbered pieces in their order, each once, however they come. Both sides."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Sequence"]


class Sequence:
    """What is lost is waited for: who sends it finds out that it was lost, and ends the site."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}

    def arrange(self, number: int, piece: bytes) -> Iterator[bytes]:
        """The piece comes: those that are now in turn. A number that has come before says nothing new."""
        if number >= self._next:
            self._early.setdefault(number, piece)
        while self._next in self._early:
            self._next += 1
            yield self._early.pop(self._next - 1)
