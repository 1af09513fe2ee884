"""Backwards that a worker runs right after their forwards (`graphs="eager"`), while the graph is hot in the cache.

A loss is a number, and what will come for it is one too. So its gradients are computed for a gradient of one here, and
multiplied by what comes in the caller. Whatever might not be such a multiplication is left for the caller's backward.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from mpgrad.workers.graphs import APPLIED, HOOKS, CaptureSums, Graph, is_linear, run_backward

from mpgrad.carrier import DTYPES, REQUIRES_GRAD, TensorRef, flags_in
from mpgrad.messages import ForwardCall
from mpgrad.modes import Modes

__all__ = ["Ahead", "are_precise", "is_loss", "may_go_ahead"]

PRECISE = (torch.float32, torch.float64)
PRECISE_NUMBERS = tuple(map(DTYPES.index, (*PRECISE, torch.complex64, torch.complex128)))


class Ahead:
    """The gradients of a call's losses, one item after another."""

    def __init__(self, call: ForwardCall, sums: CaptureSums | None) -> None:
        self.found: list[torch.Tensor | None] = []
        self.sums = sums  # of the captures' gradients; None: these are among `found`
        self.seconds = 0.0
        self.has_begun = False  # so that the call's graph is not whole any more
        self._wanted = own_inputs(call)
        self._items = 0  # that it was done for
        self._noticed = noticed()

    @property
    def is_complete(self) -> bool:
        return self._items == len(self._wanted)

    def watch(self) -> None:
        """An item begins: what it does to its backward, as far as that is noticed, makes it more than a multiplication."""
        self._noticed = noticed()

    def take(self, item: int, graph: Graph, loss: torch.Tensor) -> bool:
        """Run the backward of `item`, whose graph, with one output, is gone then; False where it has to be left.

        By itself: what items of a bundle have in common, by way of the function, belongs to neither's gradient.
        """
        if item != self._items or noticed() != self._noticed or not (APPLIED.is_watching or is_linear(graph)):
            return False
        self.has_begun = True
        own, started = self._wanted[item], time.perf_counter()
        try:
            grads = run_backward(graph, [torch.ones_like(loss)], own, bool(graph.captures), False, False, ())
        except BaseException:  # it will be raised again by the caller's backward, which makes the graph again
            return False
        if self.sums is not None and graph.captures:
            grads, of_captures = grads[: len(own)], grads[len(own) :]
            self.sums.add(of_captures)
        self.found += grads
        self._items += 1
        graph.outputs.clear()
        self.seconds += time.perf_counter() - started
        return True


def noticed() -> tuple[int, int]:
    return APPLIED.count, HOOKS.count


def may_go_ahead(call: ForwardCall, modes: Modes, precise: bool) -> bool:
    """Whether the gradient that comes for a loss is one to multiply with; `precise`: so say the captures.

    Under autocast, and in half precision, it may be one that keeps small gradients from becoming zero on their way.
    """
    return precise and not (modes.autocast or modes.anomaly or modes.inference) and are_precise(call.tensors)


def are_precise(refs: Sequence[TensorRef]) -> bool:
    return all(ref.dtype in PRECISE_NUMBERS for ref in refs if ref.flags & REQUIRES_GRAD)


def is_loss(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dtype in PRECISE and tensor.layout is torch.strided


def own_inputs(call: ForwardCall) -> Sequence[range]:
    """For each item, the numbers of its tensors among those of the call that need gradients."""
    needing = [bool(flags & REQUIRES_GRAD) for flags in flags_in(call.tensors)]
    if not call.bundle:
        return [range(sum(needing))]
    found, start, rest = list[range](), 0, iter(needing)
    for _, count in call.bundle:
        end = start + sum(itertools.islice(rest, count))
        found.append(range(start, end))
        start = end
    return found
