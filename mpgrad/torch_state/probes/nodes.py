"""Tensors and nodes from which the probes look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpgrad.torch_state import private


class Node(torch.autograd.Function):
    """An identity whose backward is a function of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backward: Callable[[Any], Any]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.run = backward
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, None]:
        return ctx.run(grad), None


class Entrance(torch.autograd.Function):
    """Gives a tensor a history; no argument, but hidden in a list."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, hidden: list[torch.Tensor]) -> torch.Tensor:
        return hidden[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def leaf() -> Any:
    return torch.ones(2, dtype=torch.float64, device="cpu", requires_grad=True)


def through(tensor: torch.Tensor, look: Callable[[], Any], seen: list[Any]) -> Any:
    """`tensor` behind a node which, in a backward, puts what `look` finds into `seen`."""

    def backward(grad: Any) -> Any:
        seen.append(look())
        return grad

    return private.apply(Node, tensor, backward)
