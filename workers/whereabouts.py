"""Which call a worker is at: a few numbers in shared memory (`Whereabouts`), which the caller reads at any time.

Guarantees: whoever reads the chunk, the position and the chunk again, and finds the same chunk twice, has a pair that goes
    together. The worker notes each call of a forward before it looks whether it is skipped.
"""

from __future__ import annotations

import time

from mpgrad.memory.arena import Arena
from mpgrad.wire.asides import Whereabouts, in_order

__all__ = ["Tracker"]


class Tracker:
    """Written by the worker, but for the chunks that are skipped: these are the caller's."""

    def __init__(self, arena: Arena) -> None:
        self._slot = arena.allocate(8 * Whereabouts.COUNT)
        self._numbers = self._slot.memory.cast("q")
        self.address = self._slot.address
        self.descriptor: int = self._slot.slab.descriptor

    def is_skipped(self, chunk: int) -> bool:
        return chunk in self._numbers[Whereabouts.SKIPPED :]

    def begin(self, chunk: int, position: int) -> None:
        """A call of the chunk begins."""
        numbers = self._numbers
        numbers[Whereabouts.STARTED] = time.monotonic_ns()
        numbers[Whereabouts.OFFSET] = -1
        if numbers[Whereabouts.CHUNK] == chunk:
            numbers[Whereabouts.POSITION] = position
        else:
            numbers[Whereabouts.CHUNK] = Whereabouts.BETWEEN  # whoever reads both finds them to go together, or this
            in_order()
            numbers[Whereabouts.POSITION] = position
            in_order()
            numbers[Whereabouts.CHUNK] = chunk

    def begin_item(self, offset: int) -> None:
        """Of a bundle: for who has to say which one a worker died of. -1: none."""
        self._numbers[Whereabouts.OFFSET] = offset
