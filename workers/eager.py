"""Eager backwards: of a loss right after its forward, while the graph is hot in the cache, for the gradient that is predicted.

Gradients of inputs travel with the result; those of captures too, or they are added up here until the caller collects them.
Unless the graph is kept, it goes, and a caller whose backward turns out to be another one has it made again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from mpgrad.wire.messages import Eager, ForwardCall
from mpgrad.wire.tensor_refs import REQUIRES_GRAD, flags_in
from mpgrad.workers.functions import CaptureSums
from mpgrad.workers.graph_edges import HOOKS, Edge, edge_of, gradients_at, still_there
from mpgrad.workers.whereabouts import Stage

__all__ = ["EagerBackwards"]

LOSSES = (torch.float32, torch.float64)


class EagerBackwards:
    """Those of a call's losses, one item after another."""

    def __init__(
        self,
        call: ForwardCall,
        how: Eager,
        captures: Sequence[Edge],
        sums: CaptureSums | None,
        stage: Stage,
    ) -> None:
        """`sums`: of the captures' gradients; None: these are among `found`."""
        self.found: list[torch.Tensor | None] = []
        self.how = how
        self.has_begun = False  # so that the call's graph may not be whole any more
        self.sums = sums
        self._captures = captures
        self._wanted = own_inputs(call)
        self._stage = stage
        self._items = 0  # that were differentiated, from the first on
        self._hooks = 0

    @property
    def is_complete(self) -> bool:
        return self._items == len(self._wanted)

    def begin(self) -> None:
        """An item begins. If it registers hooks on tensors, these are to be called when the caller's backward comes."""
        self._hooks = HOOKS.count

    def take(self, item: int, inputs: Sequence[Edge | None], tensors: Sequence[torch.Tensor], reentrant: bool) -> bool:
        """The item gave `tensors`; `inputs` are the call's. Returns whether its graph can go, as its backward was run."""
        loss = loss_of(tensors)
        if loss is None or item != self._items or HOOKS.count != self._hooks:
            return False
        if HOOKS.count and any(isinstance(each, torch.Tensor) and each._backward_hooks for each in self._captures):
            return False  # items to come may add to the hooks of a capture, and the caller's backward is to see them all
        self.has_begun = True
        started = time.perf_counter()
        own = self._wanted[item]
        try:
            edges = [*map(still_there, inputs[own.start : own.stop]), *map(still_there, self._captures)]
            gradient = torch.full_like(loss, self.how.gradient)
            found = gradients_at(edges, (edge_of(loss),), (gradient,), reentrant, self.how.keeps)
        except BaseException:  # it will be raised again by the caller's backward, which makes the graph again
            return False
        finally:
            self._stage.backward_seconds += time.perf_counter() - started
        for place, grad in enumerate(found):
            if grad is not None and grad.layout is not torch.strided:
                found[place] = grad.clone()  # its indices may be a tensor that the function keeps, and writes to again
        if self.sums is not None:
            self.sums.add(found[len(own) :])
            del found[len(own) :]
        self.found += found
        self._items += 1
        return not self.how.keeps


def loss_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Of those that one item gave: the only one that needs a gradient, where it is a number."""
    needing = [tensor for tensor in tensors if tensor.requires_grad]
    if len(needing) != 1:
        return None
    loss = needing[0]
    is_number = loss.numel() == 1 and loss.dtype in LOSSES and loss.layout is torch.strided
    return loss if is_number else None


def own_inputs(call: ForwardCall) -> Sequence[range]:
    """For each item, the numbers of its tensors among those of the call that need gradients."""
    needing = [bool(flags & REQUIRES_GRAD) for flags in flags_in(call.tensors)]
    if not call.bundle:
        return [range(sum(needing))]
    ends = [0, *itertools.accumulate(needing)]  # how many of those that need gradients come before each tensor
    starts = itertools.accumulate([count for _, count in call.bundle], initial=0)
    return [range(ends[start], ends[stop]) for start, stop in itertools.pairwise(starts)]
