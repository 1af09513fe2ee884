"""Bugs that came with what makes maps fast, each with its symptom and its cause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mpgrad

Tensor = torch.Tensor


@pytest.fixture
def cheap(nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    """A pool for which sending is so dear that whatever is known runs in the caller's thread."""
    with mpgrad.Pool(2) as pool:
        pool._costs._sending = 1.0
        yield pool


def total(x: Tensor) -> Tensor:
    return x.sum()


def own(x: float) -> float:
    return x


def test_one_negated_number_in_all_places(pool: mpgrad.Pool) -> None:
    """Symptom: -2 came as 2, with no error. Cause: the way for expanded tensors left out what a lazy negation needs."""
    expanded = torch.tensor([1 + 2j]).conj().imag.expand(3)
    assert expanded.is_neg()
    (found,) = pool.map(lambda x: x * 1, [expanded], chunksize=1)
    assert found.tolist() == [-2, -2, -2]
