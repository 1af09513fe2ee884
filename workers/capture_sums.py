"""Gradients of captures, added up over the calls of this worker until the caller collects them: one tensor for many calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpgrad.torch_state.private import plus
from mpgrad.torch_state.vmap_levels import Level

__all__ = ["CaptureSums", "FunctionSums"]

MOST_BACKWARDS = 256  # of one function at a time


class CaptureSums:
    """Capture gradients of one function in one backward, and of how many calls they are the sum."""

    def __init__(self, count: int) -> None:
        self.calls = 0
        self.sums: list[torch.Tensor | None] = [None] * count
        self._owned = [False] * count  # the first gradient may share memory with others; a sum of ours does not

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """One gradient for each capture, None where there is none. Writes to sums of its own only."""
        for k, grad in enumerate(grads):
            held = self.sums[k]
            if grad is None:
                continue
            if held is None:
                self.sums[k] = grad
            elif self._owned[k]:
                held.add_(grad)
            else:
                total = self.sums[k] = plus(held, grad)
                self._owned[k] = total.layout is torch.strided


class FunctionSums:
    """All sums of one function: of each backward, and (None) of the eager ones."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int | None, tuple[Level, ...]], CaptureSums] = {}

    def of(self, graph_task: int | None, levels: tuple[Level, ...], count: int) -> CaptureSums:
        """That of `count` captures; whoever adds a call to it counts the call."""
        key = graph_task, levels
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = CaptureSums(count)
            if len(self._sums) > MOST_BACKWARDS:  # a backward that failed leaves its sum behind
                del self._sums[next(iter(self._sums))]
        return sums

    def take(self, graph_task: int | None, levels: tuple[Level, ...]) -> CaptureSums | None:
        """What was added up, which is not here any more then."""
        return self._sums.pop((graph_task, levels), None)
