"""Gradients that came with the results: of losses whose backwards a worker ran right after their forwards. Caller only.

Results ──► DeliveredGradients ── serve: the gradient that comes is theirs, or one to multiply with ──► ReadyReply
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpgrad.autograd.remote_graph import Grads, Members, Order, Promise, RemoteGraph
from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.wire.tensor_refs import TensorRef, view_at, views

__all__ = ["DeliveredGradients", "ReadyReply", "factors_of", "is_in_range", "loss_gradients", "scaled"]

LOSSES = (torch.float32, torch.float64)
FEW = 8  # to take one row out of columns takes as long as to pass by so many


class DeliveredGradients:
    """The gradients of losses, which came with them: of their inputs, and where `apart` of the captures too.

    Those of a bundle are taken one by one, each once, unless it is to be kept: whoever gets one may write to it.
    """

    __slots__ = ("_memories", "_payload", "_refs", "_taken", "apart", "expected", "for_one", "maker")

    def __init__(
        self,
        maker: object,
        refs: Sequence[TensorRef | None],
        payload: memoryview,
        memories: dict[int, Borrowed | Slot],
        apart: bool,
        for_one: bool,
        expected: float | None,
    ) -> None:
        self._taken: set[int] = set()
        self.maker = maker  # the worker that has the captures' in its sum; should it die, the graph is another's
        self._refs = refs
        self._payload = payload
        self._memories = memories
        self.apart = apart
        self.for_one = for_one  # they say nothing of other gradients: the backward may do more than multiply
        self.expected = expected  # they are for this gradient, and for no other; None: for one, and to be multiplied

    def serve(self, order: Order, inputs: int, factor: float) -> ReadyReply | None:
        """None where the gradients for one are out of range, and those for `factor` need not be."""
        places = [*order.wanted, *(range(inputs, len(self._refs)) if order.captures and self.apart else ())]
        return self._reply(places, itertools.repeat(factor, len(places)), order.keep)

    def serve_bundle(self, order: Order, members: Members, factors: Sequence[float | None]) -> ReadyReply | None:
        """Likewise; and where some have been taken before."""
        if not self._taken.isdisjoint(order.wanted):
            return None
        items = [members.of_input[number] for number in order.wanted]  # each has one output, its loss
        wanted = [factor for item in items if (factor := factors[item]) is not None]
        reply = self._reply(order.wanted, wanted, order.keep)
        if reply is not None and not order.keep:
            self._taken.update(order.wanted)
        return reply

    def _reply(self, places: Sequence[int], factors: Iterable[float], keep: bool) -> ReadyReply | None:
        """The gradients at `places`, each times its factor; None where one may be out of range."""
        if FEW * len(places) < len(self._refs):
            grads = [view_at(self._refs, place, self._payload, self._borrow) for place in places]
        else:
            every = views(self._refs, self._payload, self._borrow)
            grads = [every[place] for place in places]
        given: list[torch.Tensor | None] = []
        for grad, factor in zip(grads, factors, strict=True):
            if not is_in_range(grad, factor):
                return None
            given.append(scaled(grad, factor, shared=keep))
        return ReadyReply(given)

    def _borrow(self, ref: TensorRef) -> Any:
        return self._memories[ref.place].memory


class ReadyReply:
    """The answer to a backward for which nothing has to be done."""

    __slots__ = ("_gradients", "graph")

    is_ready = True
    reached: Sequence[int] = ()

    def __init__(self, gradients: list[torch.Tensor | None]) -> None:
        self._gradients = gradients
        self.graph: RemoteGraph | None = None

    def gradients(self) -> list[torch.Tensor | None]:
        return self._gradients

    def connected(self) -> list[int]:
        return []


def scaled(grad: torch.Tensor | None, factor: float, shared: bool) -> torch.Tensor | None:
    """`shared`: the gradient will be needed again, and whoever gets one may write to it."""
    if grad is None or (factor == 1 and not shared):
        return grad
    return grad.clone() if factor == 1 else grad * factor


def is_in_range(grad: torch.Tensor | None, factor: float) -> bool:
    """Whether `factor * grad` is what the backward would have given: not where the gradient for one is infinite or NaN."""
    return factor == 1 or grad is None or bool(torch.isfinite(grad.sum()))


def factors_of(order: Order, grads: Grads) -> list[float | None] | None:
    """The gradients of losses as numbers, None for those that have none; None where one is more than that."""
    if order.create or order.levels:
        return None
    factors: list[float | None] = []
    for parts in grads:
        if not parts:
            factors.append(None)
            continue
        part = parts[0]
        if len(parts) > 1 or isinstance(part, Promise) or part.layout is not torch.strided:
            return None  # compressed sparse ones give no number
        factors.append(float(part))
    return factors


def loss_gradients(order: Order, grads: Grads) -> set[float]:
    """What came for losses whose backward runs once, and through all of the graph; nothing where one is otherwise."""
    if order.keep or not order.whole:
        return set()
    parts = [part for parts in grads for part in parts]
    if any(isinstance(part, Promise) or part.numel() != 1 or part.dtype not in LOSSES for part in parts):
        return set()
    found = set(factors_of(order, grads) or ())
    return {each for each in found if each} if all(each and math.isfinite(each) for each in found) else set()
