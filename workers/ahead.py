"""Backwards that a worker runs right after their forwards (`graphs="eager"`), while the graph is hot in the cache.

A loss is a number, and what will come for it is one too. So its gradients are computed for a gradient of one here, and
multiplied by what comes in the caller. Where the backward might be more than such a multiplication, the caller is told: then
they are for a gradient of one only. What no gradient of one may be put through is left for the caller's backward.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from mpgrad.workers.graphs import APPLIED, HOOKS, CaptureSums, Graph, is_linear, run_backward

from mpgrad.carrier import DTYPES, REQUIRES_GRAD, TensorRef, flags_in
from mpgrad.messages import ForwardCall
from mpgrad.modes import Modes

__all__ = ["Ahead", "are_precise", "may_go_ahead"]

PRECISE = (torch.float32, torch.float64)
PRECISE_NUMBERS = tuple(map(DTYPES.index, (*PRECISE, torch.complex64, torch.complex128)))


class Ahead:
    """The gradients of a call's losses, one item after another.

    `at_once`: each before the next item begins, so that the graph goes and its memory is used again. Should a later item turn
    out to be no loss, the graphs of all have to be made again. Otherwise all forwards come first, and it is known then.
    """

    def __init__(
        self, call: ForwardCall, sums: CaptureSums | None, at_once: bool, ones: bool, note: Callable[[int], None]
    ) -> None:
        """`ones`: gradients that hold for one only are wanted too."""
        self.found: list[torch.Tensor | None] = []
        self.sums = sums  # of the captures' gradients; None: these are among `found`
        self.seconds = 0.0
        self.for_one = False  # they may say nothing of other gradients
        self.has_begun = False  # so that the call's graph is not whole any more
        self._wanted = own_inputs(call)
        self._at_once = at_once
        self._ones = ones and APPLIED.is_watching
        self._note = note  # which item it is at: a backward may be the end of the process
        self._items = 0  # that were differentiated, from the first on
        self._waiting: list[tuple[Graph, torch.Tensor]] = []  # with the loss, of the items behind them

    @property
    def is_complete(self) -> bool:
        return self._items == len(self._wanted)

    def begin(self) -> None:
        """An item begins: what it does to its backward, as far as that is noticed, makes it more than a multiplication."""
        self._noticed = noticed()

    def take(self, item: int, graph: Graph, tensors: Sequence[torch.Tensor]) -> bool:
        """The item gave `tensors`. Returns whether its backward was run, so that its graph can go."""
        loss = loss_of(tensors)
        if loss is None or len(graph.outputs) != 1 or item != self._items + len(self._waiting):
            return False
        if HOOKS.count and any(isinstance(each, torch.Tensor) and each._backward_hooks for each in graph.captures):
            return False  # items to come may add to the hooks of a capture, and the caller's backward is to see them all
        if noticed() != self._noticed or not (APPLIED.is_watching or is_linear(graph)):
            if not self._ones:
                return False
            self.for_one = True
        if self._at_once:
            return self._differentiate(graph, loss)
        self._waiting.append((graph._replace(outputs=list(graph.outputs)), loss))  # that one goes on to grow
        return False

    def end(self) -> None:
        """All items have been run."""
        if len(self._waiting) == len(self._wanted):
            for graph, loss in self._waiting:
                if not self._differentiate(graph, loss):
                    break
        self._waiting.clear()

    def _differentiate(self, graph: Graph, loss: torch.Tensor) -> bool:
        """By itself: what items of a bundle have in common, by way of the function, belongs to neither's gradient."""
        self.has_begun = True
        self._note(self._items)
        own, started = self._wanted[self._items], time.perf_counter()
        try:
            found = run_backward(graph, [torch.ones_like(loss)], own, bool(graph.captures), False, False, ())
            grads = [each.clone() if each is not None and is_sparse(each) else each for each in found]
            if self.sums is not None and graph.captures:
                grads, of_captures = grads[: len(own)], grads[len(own) :]
                self.sums.add(of_captures)
        except KeyboardInterrupt:  # in the caller's own process
            raise
        except BaseException:  # it will be raised again by the caller's backward, which makes the graph again
            return False
        finally:
            self.seconds += time.perf_counter() - started
        self.found += grads
        self._items += 1
        return True


def is_sparse(grad: torch.Tensor) -> bool:
    """Its indices may be a tensor that the function keeps, and writes to for the next item."""
    return grad.layout is not torch.strided


def noticed() -> tuple[int, int]:
    return APPLIED.count, HOOKS.count


def may_go_ahead(call: ForwardCall, modes: Modes, precise: bool) -> bool:
    """Whether the gradient that comes for a loss is one to multiply with; `precise`: so say the captures.

    Under autocast, and in half precision, it may be one that keeps small gradients from becoming zero on their way.
    """
    return precise and not (modes.autocast or modes.anomaly or modes.inference) and are_precise(call.tensors)


def are_precise(refs: Sequence[TensorRef]) -> bool:
    return all(ref.dtype in PRECISE_NUMBERS for ref in refs if ref.flags & REQUIRES_GRAD)


def loss_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Of those that one item gave: the only one that needs a gradient, where it is a number."""
    needing = [tensor for tensor in tensors if tensor.requires_grad]
    if len(needing) != 1 or needing[0].numel() != 1 or needing[0].dtype not in PRECISE:
        return None
    return needing[0] if needing[0].layout is torch.strided else None


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
