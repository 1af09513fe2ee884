"""What every system computes: losses of N ragged tensors, and the gradients of their sum to all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from losses import large_loss, op_loss, python_loss
from torch import Tensor

SHORTEST, LONGEST = 10, 200  # floats of a tiny tensor
ROUNDING = 1e-5  # of float32: what a compiler fuses is rounded otherwise
RATIO_OF_SIZES = 16  # of the largest to the smallest of the large ones

Function = Callable[[Tensor], Tensor]


class Outcome(NamedTuple):
    losses: Sequence[Tensor]
    gradients: Sequence[Tensor | None]


class System(Protocol):
    """Constructed with the number of workers; ready when it is."""

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        """Items are leaves that require gradients and have none."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Case:
    """`size`: steps of a Python-bound item, width of an op-bound one, floats of the largest of the large ones."""

    kind: str
    ms: float  # of an item in the serial loop, or 0 for the least there is
    size: int
    count: int

    @property
    def title(self) -> str:
        if self.kind == "large":
            return f"{self.count} tensors of up to {4 * self.size / 1e6:g} MB"
        return f"{self.kind}, {self.ms:g} ms"

    def function(self) -> Function:
        if self.kind == "Python-bound":
            return partial(python_loss, steps=self.size)
        return op_loss if self.kind == "op-bound" else large_loss

    def items(self) -> list[Tensor]:
        """The same in every process."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in self._shapes()]

    def _shapes(self) -> list[tuple[int, ...]]:
        if self.kind == "Python-bound":
            lengths = random.Random(0).choices(range(SHORTEST, LONGEST + 1), k=self.count)
            return [(length,) for length in lengths]
        if self.kind == "op-bound":
            return [(self.size, self.size)] * self.count
        parts = [RATIO_OF_SIZES ** ((number + 0.5) / self.count - 1) for number in range(self.count)]
        return [(round(self.size * part),) for part in parts]


def chunks(items: Sequence[Any], most: int) -> list[list[Any]]:
    """As `multiprocessing.Pool.map` cuts them with four chunks a worker."""
    size = -(-len(items) // most)
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


def leaves(items: Sequence[Tensor]) -> list[Tensor]:
    return [item.clone().requires_grad_() for item in items]


def serial_outcome(function: Function, items: Sequence[Tensor]) -> Outcome:
    """What every system is held against."""
    own = leaves(items)
    losses = [function(item) for item in own]
    return Outcome([loss.detach() for loss in losses], torch.autograd.grad(torch.stack(losses).sum(), own))


class WrongResultError(Exception):
    """A system computed something else than the serial loop."""


def check(system: System, function: Function, items: Sequence[Tensor]) -> None:
    """Raise WrongResultError unless it gives the serial loop's losses and gradients."""
    outcome, right = system.run(function, leaves(items)), serial_outcome(function, items)
    for kind, given, expected in zip(("loss", "gradient"), outcome, right, strict=True):
        try:
            for one, wanted in zip(given, expected, strict=True):
                assert one is not None, "there is none"
                size = float(wanted.abs().max()) if wanted.numel() else 0.0
                torch.testing.assert_close(one.detach(), wanted, rtol=ROUNDING, atol=ROUNDING * size)
        except AssertionError as error:
            raise WrongResultError(f"a {kind} differs from the serial loop's: {error}") from error
