"""The oracle that mpgrad itself is tested with: whatever the pool does must be what the serial loop does.

`torch.autograd.gradcheck` compares one function with finite differences, to a tolerance. Here the loop run by the caller is
the reference, so values and the gradients of items must agree bit for bit, and no tolerance can hide a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mpgrad import structure
from mpgrad.pool import Pool

__all__ = ["assert_same_as_serial"]


def assert_same_as_serial(
    fn: Callable[[Any], Any],
    items: Sequence[Any],
    pool: Pool | None = None,
    *,
    run: Callable[[Pool, Callable[[Any], Any], list[Any]], Sequence[Any]] = lambda pool, fn, items: pool.map(fn, items),
    capture_rtol: float = 1e-12,
) -> None:
    """Compare ``pool.map(fn, items)`` with ``[fn(item) for item in items]``: values, structure, and first gradients.

    Args:
        fn: the function; gradients of the tensors that it captures are compared too.
        items: tensors or structures; each run gets copies of its own, leaves where these are leaves.
        pool: the pool to test; None for a new one of two processes.
        run: how the pool is asked, where it is not `map`.
        capture_rtol: relative tolerance for gradients of captures, which are sums in another order. All else is compared
            bit for bit.

    Raises:
        AssertionError: names the item, and whether value or gradient differ.

    Example:
        >>> import torch
        >>> from mpgrad.testing import assert_same_as_serial
        >>> weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
        >>> assert_same_as_serial(lambda x: (x * weight).exp(), [torch.randn(n, 3) for n in range(4)])
    """
    if pool is None:
        with Pool(processes=2) as own:
            return assert_same_as_serial(fn, items, own, run=run, capture_rtol=capture_rtol)
    captures = [tensor for tensor in structure.dumps(fn)[1] if tensor.requires_grad]
    ours, theirs = copies(items), copies(items)
    results, reference = list(run(pool, fn, ours)), [fn(item) for item in theirs]
    if len(results) != len(reference):
        raise AssertionError(f"the pool gave {len(results)} results, the serial loop {len(reference)}")
    for index, (result, expected) in enumerate(zip(results, reference, strict=True)):
        compare_values(f"item {index}", result, expected)
    gradients = [
        gradients_of(outputs, [*differentiable(inputs), *captures])
        for outputs, inputs in ((results, ours), (reference, theirs))
    ]
    names = [f"gradient of input {number}" for number in range(len(differentiable(ours)))]
    names += [f"gradient of capture {number}" for number in range(len(captures))]
    for number, (name, grad, expected) in enumerate(zip(names, *gradients, strict=True)):
        tolerance = capture_rtol if number >= len(names) - len(captures) else 0.0
        compare_tensors(name, grad, expected, tolerance)
    return None


def copies(items: Sequence[Any]) -> list[Any]:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)
        return leaf if tensor.is_leaf else leaf.view_as(leaf).clone(memory_format=torch.preserve_format)

    return [tree_map_only(torch.Tensor, copy, item) for item in items]


def differentiable(structures: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(list(structures)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def gradients_of(results: Sequence[Any], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of the outputs times random numbers, the same each time; None where nothing depends on an input."""
    outputs = differentiable(results)
    if not outputs or not inputs:
        return [None] * len(inputs)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(output.shape, dtype=output.dtype, generator=generator) for output in outputs]
    # kept, because captures may share a history with those of the other run
    return list(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, retain_graph=True))


def compare_values(name: str, result: Any, expected: Any) -> None:
    if type(result) is not type(expected):
        raise AssertionError(f"{name}: the pool gave a {type(result).__name__}, the serial loop a {type(expected).__name__}")
    ours, theirs = tree_leaves(result), tree_leaves(expected)
    if len(ours) != len(theirs):
        raise AssertionError(f"{name}: the results differ in structure")
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            if mine.requires_grad != other.requires_grad:
                raise AssertionError(f"{name}: requires_grad is {mine.requires_grad}, serially {other.requires_grad}")
            compare_tensors(f"{name}, value", mine, other, 0.0)
        elif has_equality(other) and mine != other:
            raise AssertionError(f"{name}: the pool gave {mine!r}, the serial loop {other!r}")


def has_equality(value: object) -> bool:
    """Whether two copies of `value` can be told equal: not where equality means identity."""
    equality: object = type(value).__eq__
    return equality is not object.__eq__


def compare_tensors(name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, rtol: float) -> None:
    if ours is None or theirs is None:
        if ours is not theirs:
            raise AssertionError(f"{name}: the pool gave {describe(ours)}, the serial loop {describe(theirs)}")
        return
    kinds = [(each.dtype, each.shape, each.layout) for each in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f"{name}: the pool gave {describe(ours)}, the serial loop {describe(theirs)}")
    if not torch.allclose(ours.detach(), theirs.detach(), rtol=rtol, atol=rtol, equal_nan=True):
        difference = (ours.detach() - theirs.detach()).abs().max().item()
        raise AssertionError(f"{name}: the pool and the serial loop differ by up to {difference:.3g}")


def describe(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
