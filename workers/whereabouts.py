"""Where a worker is: which call it is at, in a few numbers in shared memory (`Whereabouts`) that
the caller reads at any time; how far a call has come, for its failure, and what it took (`Stage`);
and, while the caller records a timeline, what it does and when.

Without a timeline nothing of it is in anybody's way: handlers make plain stages. A `Recorder` has
them make stages that note moments.

    Record ──► chunks: `timed` ── function, engine: `TimedStage` ──► Recorded, in the frame of the answer
Guarantees: whoever reads the chunk, the position and the chunk again, and finds the same chunk
    twice, has a pair that goes together. The worker notes each call of a forward before it looks
    whether it is skipped.
Assumes: one thread, in which a chunk may come within another's call (inline).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpgrad.memory.arena import Arena
from mpgrad.wire.asides import Whereabouts, in_order
from mpgrad.wire.messages import Message, Recorded, Span
from mpgrad.wire.tensor_refs import Payload

__all__ = [
    "Recorder",
    "Stage",
    "Tracker",
]


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


# --- how far a call has come


class Stage:
    """Of one call forward, or of the backwards of a chunk. A timeline has a kind that also notes when (`TimedStage`)."""

    def __init__(self) -> None:
        self.phase = "forward"
        self.position = 0  # of the call, in its chunk
        self.offset = 0  # of the item, in a bundle
        self.given = ""  # to the function, where it raised
        self.own_seconds = 0.0  # in the function
        self.backward_seconds = 0.0  # in PyTorch's engine


# --- timelines


Answer = tuple[Message, Payload]


class TimedStage(Stage):
    """Who adds up seconds here does so right after they have passed."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._own = self._backward = 0.0
        super().__init__()

    @property
    def own_seconds(self) -> float:
        return self._own

    @own_seconds.setter
    def own_seconds(self, seconds: float) -> None:
        self._note("forward", seconds - self._own)
        self._own = seconds

    @property
    def backward_seconds(self) -> float:
        return self._backward

    @backward_seconds.setter
    def backward_seconds(self, seconds: float) -> None:
        self._note("backward", seconds - self._backward)
        self._backward = seconds

    def _note(self, phase: str, seconds: float) -> None:
        """Up to now."""
        if seconds > 0:
            now = time.monotonic_ns()
            self._spans.append((phase, self.position, self.offset, now - int(1e9 * seconds), now))


class Recorder:
    """Notes what is done for each chunk, from its making on."""

    def __init__(self) -> None:
        self._spans: list[Span] = []  # of the chunk that is being answered
        self._done: list[Recorded] = []

    def new_stage(self) -> Stage:
        return TimedStage(self._spans)

    def timed(self, answer: Callable[[Any, memoryview], Answer], message: Any, payload: memoryview) -> Answer:
        """The answer of a chunk."""
        outer, self._spans = self._spans, []
        began = time.monotonic_ns()
        try:
            answered = answer(message, payload)
            self._done = [Recorded(message.chunk, began, time.monotonic_ns(), self._spans)]
            return answered
        finally:
            self._spans = outer

    def take(self) -> list[Recorded]:
        """For the answer of the chunk that was just done."""
        done, self._done = self._done, []
        return done
