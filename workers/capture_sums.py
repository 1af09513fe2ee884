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
        self.calls += 1
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
    """All sums of one function: one for each backward, and one for the backwards that ran right after their forwards."""

    def __init__(self) -> None:
        self._ahead: CaptureSums | None = None
        self._by_backward: dict[tuple[int, tuple[Level, ...]], CaptureSums] = {}

    def add(self, graph_task: int, levels: tuple[Level, ...], grads: Sequence[torch.Tensor | None]) -> None:
        key = graph_task, levels
        sums = self._by_backward.get(key)
        if sums is None:
            sums = self._by_backward[key] = CaptureSums(len(grads))
            if len(self._by_backward) > MOST_BACKWARDS:  # a backward that failed leaves its sum behind
                del self._by_backward[next(iter(self._by_backward))]
        sums.add(grads)

    def add_ahead(self, grads: Sequence[torch.Tensor | None]) -> None:
        if self._ahead is None:
            self._ahead = CaptureSums(len(grads))
        self._ahead.add(grads)

    def take(self, graph_task: int | None, levels: tuple[Level, ...]) -> CaptureSums | None:
        """What was added up for a backward; without `graph_task`, for those ahead."""
        if graph_task is not None:
            return self._by_backward.pop((graph_task, levels), None)
        ahead, self._ahead = self._ahead, None
        return ahead
