"""Which of the tensors that travel in a row belong to which item: of a bundle, or of claimed results. Both sides.

    tensors   a  b | c | | d  e            parts   [(shape, 2), (shape, 1), (shape, 0), (shape, 2)]
    owners    0  0   1     3  3
This one record goes with the tensors, as `ForwardCall.bundle` and `Result.bundle`; all else is made of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from mpgrad.wire.messages import Parts, Structure

__all__ = ["owners", "split"]


def owners(parts: Parts) -> list[int]:
    """The item of each tensor."""
    return [item for item, (_, count) in enumerate(parts) for _ in range(count)]


def split(parts: Parts, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[Structure, list[torch.Tensor]]]:
    """The structure and the tensors of each item."""
    rest = iter(tensors)
    return ((shape, list(itertools.islice(rest, count))) for shape, count in parts)
