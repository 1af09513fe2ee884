"""What benchmarks map. Needs torch and nothing else: workers of every peer import it, and their start is timed."""

from __future__ import annotations

import torch
from torch import Tensor

CHAIN = 2  # matrix products of an op-bound call; with more, 0.1 ms would go into calling them


def doubled(x: Tensor) -> Tensor:
    return x * 2


def copied(x: Tensor) -> Tensor:
    return x.clone()


def python_bound(x: Tensor, steps: int) -> Tensor:
    y = x
    for _ in range(steps):
        y = torch.sin(y) + x
    return y


def op_bound(x: Tensor, chain: int = CHAIN) -> Tensor:  # an argument, because torch.jit.script reads no globals
    y = x
    for _ in range(chain):
        y = torch.tanh(y @ x)
    return y


def python_loss(x: Tensor, steps: int) -> Tensor:
    return python_bound(x, steps).sum()


def op_loss(x: Tensor) -> Tensor:
    return op_bound(x).sum()


def large_loss(x: Tensor) -> Tensor:
    return (x * x).sum()


def weighted_loss(weight: Tensor, x: Tensor, steps: int) -> Tensor:
    return weight.mean() * python_loss(x, steps)


def priced_loss(x: Tensor) -> Tensor:
    """The first number of the item says how many steps it costs."""
    return python_loss(x[1:], int(x[0]))
