"""Backwards that a worker runs right after their forwards (`graphs="ahead"`), while the graph is hot in the cache.

A loss is a number, and what will come for it is one too. So its gradients are computed for a gradient of one here, and
multiplied by what comes in the caller. Where the backward might be more than such a multiplication, the caller is told: then
they are for a gradient of one only. What no gradient of one may be put through is left for the caller's backward.

With `graphs="auto"` the caller says which gradient it expects, and they are for that one only. The graph stays, so that a wrong
guess costs nothing but the time, and nobody sees it: what may do more than compute is left for the caller's backward.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from mpgrad.torch_state.modes import Modes
from mpgrad.wire.messages import ForwardCall
from mpgrad.wire.tensor_refs import DTYPES, REQUIRES_GRAD, Bucket, TensorRef, flags_in
from mpgrad.workers.capture_sums import CaptureSums
from mpgrad.workers.graph_edges import APPLIED, HOOKS, Edge, edge_of, gradients_at, is_linear, still_there
from mpgrad.workers.stage import Stage

__all__ = ["Ahead", "are_precise", "may_go_ahead"]

PRECISE = (torch.float32, torch.float64)
PRECISE_NUMBERS = tuple(map(DTYPES.index, (*PRECISE, torch.complex64, torch.complex128)))


class Ahead:
    """The gradients of a call's losses, one item after another.

    `at_once`: each before the next item begins, so that the graph goes and its memory is used again. Should a later item turn
    out to be no loss, the graphs of all have to be made again. Otherwise all forwards come first, and it is known then.
    """

    def __init__(
        self,
        call: ForwardCall,
        captures: Sequence[Edge],
        sums: CaptureSums | None,
        at_once: bool,
        ones: bool,
        expected: float | None,
        note: Callable[[int], None],
        stage: Stage,
    ) -> None:
        """`ones`: gradients that hold for one only are wanted too. `expected`: see `Forward`."""
        self.found: list[torch.Tensor | None] = []
        self.sums = sums  # of the captures' gradients; None: these are among `found`
        self.for_one = False  # they may say nothing of other gradients
        self.has_begun = False  # so that the call's graph is not whole any more
        self._captures = captures
        self._wanted = own_inputs(call)
        self.keeps = expected is not None  # the graph
        self._at_once = at_once or self.keeps
        self._ones = ones and APPLIED.is_watching and not self.keeps
        self._gradient = 1.0 if expected is None else expected
        self._note = note  # which item it is at: a backward may be the end of the process
        self._stage = stage
        self._items = 0  # that were differentiated, from the first on
        self._waiting: list[tuple[Sequence[Edge | None], Edge, torch.Tensor, bool]] = []  # of the items behind them
        self._applied = self._hooks = 0

    @property
    def is_complete(self) -> bool:
        return self._items == len(self._wanted)

    def begin(self) -> None:
        """An item begins: what it does to its backward, as far as that is noticed, makes it more than a multiplication."""
        self._applied, self._hooks = APPLIED.count, HOOKS.count

    def take(self, item: int, inputs: Sequence[Edge | None], tensors: Sequence[torch.Tensor], reentrant: bool) -> bool:
        """The item gave `tensors`; `inputs` are the call's. Returns whether its graph can go, as its backward was run."""
        loss = loss_of(tensors)
        if loss is None or item != self._items + len(self._waiting):
            return False
        if HOOKS.count and any(isinstance(each, torch.Tensor) and each._backward_hooks for each in self._captures):
            return False  # items to come may add to the hooks of a capture, and the caller's backward is to see them all
        is_more = APPLIED.count != self._applied or HOOKS.count != self._hooks
        if is_more or not (APPLIED.is_watching or is_linear(loss)):
            if not self._ones:
                return False
            self.for_one = True
        own = self._wanted[item]
        inputs, one = inputs[own.start : own.stop], torch.full_like(loss, self._gradient)
        if self._at_once:
            return self._differentiate(inputs, loss, one, reentrant) and not self.keeps
        self._waiting.append((inputs, edge_of(loss), one, reentrant))
        return False

    def end(self) -> None:
        """All items have been run."""
        if len(self._waiting) == len(self._wanted):
            for each in self._waiting:
                self._note(self._items)
                self._stage.offset = self._items
                if not self._differentiate(*each):
                    break
        self._waiting.clear()

    def _differentiate(self, inputs: Sequence[Edge | None], edge: Edge, one: torch.Tensor, reentrant: bool) -> bool:
        """By itself: what items of a bundle have in common, by way of the function, belongs to neither's gradient."""
        self.has_begun = True
        started = time.perf_counter()
        try:
            edges = [*map(still_there, inputs), *map(still_there, self._captures)]
            found = gradients_at(edges, (edge,), (one,), reentrant, self.keeps)
            for place, grad in enumerate(found):
                if grad is not None and grad.layout is not torch.strided:
                    found[place] = grad.clone()  # its indices may be a tensor that the function keeps, and writes to again
            if self.sums is not None and self._captures:
                self.sums.add(found[len(inputs) :])
                del found[len(inputs) :]
        except KeyboardInterrupt:  # in the caller's own process
            raise
        except BaseException:  # it will be raised again by the caller's backward, which makes the graph again
            return False
        finally:
            self._stage.backward_seconds += time.perf_counter() - started
        self.found += found
        self._items += 1
        return True


def may_go_ahead(call: ForwardCall, modes: Modes, precise: bool) -> bool:
    """Whether the gradient that comes for a loss is one to multiply with; `precise`: so say the captures.

    Under autocast, and in half precision, it may be one that keeps small gradients from becoming zero on their way.
    """
    changed = modes.autocast or modes.anomaly or modes.inference or modes.device
    return precise and not changed and are_precise(call.tensors)


def are_precise(refs: Sequence[TensorRef]) -> bool:
    if isinstance(refs, Bucket):
        return refs.dtype in PRECISE_NUMBERS or not refs.flags & REQUIRES_GRAD
    return all(ref.dtype in PRECISE_NUMBERS for ref in refs if ref.flags & REQUIRES_GRAD)


def loss_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Of those that one item gave: the only one that needs a gradient, where it is a number."""
    needing = [tensor for tensor in tensors if tensor.requires_grad]
    if len(needing) != 1:
        return None
    loss = needing[0]
    is_number = loss.numel() == 1 and loss.dtype in PRECISE and loss.layout is torch.strided
    return loss if is_number else None


def own_inputs(call: ForwardCall) -> Sequence[range]:
    """For each item, the numbers of its tensors among those of the call that need gradients."""
    needing = [bool(flags & REQUIRES_GRAD) for flags in flags_in(call.tensors)]
    if not call.bundle:
        return [range(sum(needing))]
    ends = [0, *itertools.accumulate(needing)]  # how many of those that need gradients come before each tensor
    starts = itertools.accumulate([count for _, count in call.bundle], initial=0)
    return [range(ends[start], ends[stop]) for start, stop in itertools.pairwise(starts)]
