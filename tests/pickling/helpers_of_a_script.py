"""A user's module that scripts import. It has a tensor, so its functions are sent by value."""

from __future__ import annotations

import torch

scale = torch.full((3,), 5.0, dtype=torch.float64, requires_grad=True)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scale
