"""What this worker does, and when, while the caller records a timeline.

Off, nothing of it is in anybody's way: handlers make plain stages. `Recorder` has them make stages that note moments.

    Record ──► chunks: `timed` ── function, engine: `TimedStage` ──► Recorded, in the frame of the answer
Assumes: one thread, in which a chunk may come within another's call (inline).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpgrad.wire.messages import Message, Recorded, Span
from mpgrad.wire.tensor_packing import Payload
from mpgrad.workers.stage import Stage

__all__ = ["Recorder"]

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
