"""Batched gradients: `torch.autograd.grad(..., is_grads_batched=True)`, and a backward under `torch.func.vmap`.

There the engine hands every node wrappers, which look like one gradient and hold a batch of them. A wrapper cannot travel,
the batch can: it is taken out here, sent with its batch dimensions in front, differentiated in the worker under as many vmaps
of the same kind, and put back into wrappers.

    wrappers ──► levels_of, without ──► [B1, B2, *shape] ──► worker: over ──► [B1, B2, *shape] ──► within ──► wrappers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.torch_state import private

__all__ = ["Level", "levels_of", "over", "within", "without"]


class Level(NamedTuple):
    """One vmap that is being run. PyTorch has two kinds: `is_grads_batched` still uses the older one."""

    number: int
    older: bool


def levels_of(tensors: Sequence[torch.Tensor | None]) -> tuple[Level, ...]:
    """The vmaps that any of `tensors` is batched over, outermost first.

    Raises:
        TypeError: one belongs to another transform than vmap.
    """
    if private.have_plain_memory([tensor for tensor in tensors if tensor is not None]):
        return ()
    numbers: set[int] = set()
    older = False
    for tensor in tensors:
        while tensor is not None and private.is_functorch_wrapped(tensor):
            if not private.is_batched(tensor):
                raise TypeError(
                    "a gradient that came to a pool's result belongs to a torch.func transform other than vmap; "
                    "call the pool inside of the function that is transformed"
                )
            number = private.level_of(tensor)
            numbers.add(number)
            tensor, _ = private.unbatched(tensor, number)
        older = older or (tensor is not None and private.is_batched_the_older_way(tensor))
    levels = [Level(number, False) for number in sorted(numbers)]
    if older:
        # in the engine's threads for devices none is counted; there is one then, within which `torch.autograd.grad` was called
        levels += [Level(1 + number, True) for number in range(max(1, private.older_levels()))]
    return tuple(levels)


def without(tensors: Sequence[torch.Tensor], levels: tuple[Level, ...]) -> list[torch.Tensor]:
    """`tensors` with their batches as ordinary dimensions in front, outermost first, the same for all of them."""
    plain = list(tensors)
    for level in reversed(levels):
        plain = [_without_one(tensor, level) for tensor in plain]
        size = max(tensor.shape[0] for tensor in plain)
        plain = [tensor.expand(size, *tensor.shape[1:]) for tensor in plain]
    return plain


def _without_one(tensor: torch.Tensor, level: Level) -> torch.Tensor:
    if level.older:
        return private.unbatched_the_older_way(tensor, level.number)
    value, dim = private.unbatched(tensor, level.number)
    return value.unsqueeze(0) if dim is None else value.movedim(dim, 0)


def within(tensor: torch.Tensor, levels: tuple[Level, ...]) -> torch.Tensor:
    """The wrapper for a tensor with batch dimensions in front."""
    for level in levels:
        tensor = private.batched(tensor, level.number, level.older)
    return tensor


def over(
    levels: tuple[Level, ...],
    fn: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """`fn(tensors)` under one vmap per level, over the leading dimensions; batches in front of what it returns, too."""
    if not levels:
        return list(fn(tensors))
    present: list[bool] = []

    def part(*slices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = over(levels[1:], fn, slices)
        present[:] = [tensor is not None for tensor in found]
        return tuple(tensor for tensor in found if tensor is not None) or slices[:1]  # a vmap has to return something

    batched: Any = private.vmap_the_older_way(part) if levels[0].older else torch.func.vmap(part, randomness="different")
    results = iter(batched(*tensors))
    return [next(results) if there else None for there in present]
