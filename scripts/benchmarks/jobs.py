"""The job of the speed benchmarks: N ragged tensors, a loss of each, its gradient to every item.

The serial loop has two orders. One backward over all items is how a loop is usually written; a backward right after each
item is faster where graphs are small, because they are still in the cache, and is what a pool has to beat.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial

import torch
from common import Batch, Function, Loop, Outcome, Work, calibrated, op_item, python_item
from losses import op_loss, python_loss
from torch import Tensor

MOST_ITEMS = 1024
FEWEST_ITEMS = 8


PYTHON = Work("Python-bound", lambda steps: partial(python_loss, steps=steps), python_item)
OP = Work("op-bound", lambda width: op_loss, op_item)


# --- how it is done


def one_backward(loop: Loop, function: Function, batch: Batch) -> Outcome:
    losses = loop(function, batch.items)
    torch.autograd.backward(torch.stack(tuple(losses)).sum())
    return Outcome(losses, [item.grad for item in batch.items])


def backward_at_once(function: Function, batch: Batch) -> Outcome:
    losses = []
    for item in batch.items:
        loss = function(item)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    return Outcome(losses, [item.grad for item in batch.items])


# --- how much of it


def items_of(work: Work, seconds: float, total: float) -> tuple[Function, list[Tensor]]:
    """A function and items of which each takes so many seconds, forward and backward, and all together about `total`."""
    if not seconds:
        return work.function(1), [work.item(1) for _ in range(min(MOST_ITEMS, math.ceil(total / 25e-6)))]
    size = calibrated(work, seconds, backward_at_once)
    count = min(MOST_ITEMS, max(FEWEST_ITEMS, math.ceil(total / seconds)))
    return work.function(size), [work.item(size) for _ in range(count)]


def log_normal(count: int, sigma: float, seed: int = 0) -> list[float]:
    """Heavy-tailed costs of mean 1: a few items cost as much as all others."""
    generator = random.Random(seed)
    drawn = [generator.lognormvariate(0, sigma) for _ in range(count)]
    return [cost * count / sum(drawn) for cost in drawn]


def longest_first(costs: Sequence[float], workers: int) -> float:
    """How long the best schedule takes that is easily found: the longest item first, to the worker that is free first.

    Within 4/3 of the optimum (Graham 1969), and next to it for many items.
    """
    busy = [0.0] * workers
    for cost in sorted(costs, reverse=True):
        busy[busy.index(min(busy))] += cost
    return max(busy)
