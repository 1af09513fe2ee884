"""What is written by hand with Ray alone: an actor on each node, a share of the items for each, forward and backward at once.

It gets to know that the loss is a sum, so the actors need nothing from the caller between forward and backward. Arrays
travel, and a weight travels once a step for all actors. It has no balancing, hooks, general loss or higher derivatives.
Recovery only where it is asked for: Ray starts a lost actor again, and repeats its share.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from common import Function, Outcome
from torch import Tensor

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[np.float32]]
STAYS = {"num_cpus": 0}
# Half a CPU: two find room on the node that is left, and none on the head, which has no CPUs. With a whole one a lost actor
# would wait until another node joins. With none, Ray 2.60 puts actors whose affinity is soft onto the head, too.
COMES_AGAIN = {"num_cpus": 0.5, "max_restarts": -1, "max_task_retries": -1}
PATIENCE = 60.0  # seconds for a step; with Ray's own settings one with a death takes some 16


class ByHand:
    def __init__(self, nodes: Sequence[str], comes_again: bool = False) -> None:
        """`nodes`: ids, for an actor on each. `comes_again`: elsewhere, if its node dies; its call is repeated."""
        self._ray = importlib.import_module("ray")
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        actor = self._ray.remote(NodeActor)
        options = COMES_AGAIN if comes_again else STAYS
        self._actors = [
            actor.options(**options, scheduling_strategy=affinity(node_id=node, soft=comes_again)).remote() for node in nodes
        ]

    @property
    def shares(self) -> int:
        return len(self._actors)

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def forward(self, function: Function, items: Sequence[Tensor]) -> list[Tensor]:
        parts = parted([item.detach().numpy() for item in items], len(self._actors))
        return tensors(
            self._ray.get([actor.forward.remote(function, part) for actor, part in zip(self._actors, parts, strict=True)])
        )

    def both(self, function: Callable[..., Tensor], items: Sequence[Tensor], weight: Tensor | None) -> Outcome:
        """Losses; gradients of the items, and behind them that of the weight."""
        put = None if weight is None else self._ray.put(weight.detach().numpy())
        parts = parted([item.detach().numpy() for item in items], len(self._actors))
        asked = [actor.both.remote(function, part, put) for actor, part in zip(self._actors, parts, strict=True)]
        losses, gradients, sums = zip(*self._ray.get(asked, timeout=PATIENCE), strict=True)
        of_weight = [] if weight is None else [torch.from_numpy(np.sum(sums, axis=0))]
        return Outcome(tensors(losses), [*tensors(gradients), *of_weight])

    def call(self, number: int, function: Callable[..., Any], *args: Any) -> Any:
        """A reference to the result, from one actor after the other as `number` counts up."""
        return self._actors[number % len(self._actors)].call.remote(function, *args)

    def get(self, reference: Any) -> Any:
        return self._ray.get(reference)


def parted(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    return [items[first::parts] for first in range(parts)]


def woven(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """What `parted` took apart, in its order."""
    return [part[place] for place in range(len(parts[0])) for part in parts if place < len(part)]


def tensors(parts: Sequence[Sequence[Array]]) -> list[Tensor]:
    return [torch.from_numpy(np.array(each)) for each in woven(parts)]  # Ray lends what cannot be written


class NodeActor:
    def __init__(self) -> None:
        with contextlib.suppress(PermissionError):  # it has one
            os.setsid()  # a session of its own, as mpgrad's workers have: Linux may share out CPUs by session
        torch.set_num_threads(1)
        # what lies in Ray's store cannot be written, and nobody does
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    def forward(self, function: Function, items: list[Array]) -> Array:
        with torch.no_grad():
            return np.stack([function(torch.from_numpy(item)).numpy() for item in items])

    def both(self, function: Callable[..., Tensor], items: list[Array], weight: Array | None) -> Any:
        """Backward right after each forward, while its graph is in the cache."""
        own = None if weight is None else torch.from_numpy(weight).requires_grad_()
        of_item = function if own is None else partial(function, own)
        leaves = [torch.from_numpy(item).requires_grad_() for item in items]
        losses = []
        for leaf in leaves:
            loss = of_item(leaf)
            torch.autograd.backward(loss)
            losses.append(loss.detach().numpy())
        gradients = [leaf.grad.numpy() for leaf in leaves if leaf.grad is not None]
        return np.stack(losses), gradients, None if own is None or own.grad is None else own.grad.numpy()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)
