"""The oracle that mpgrad itself is tested with: whatever the pool does must be what the serial loop does.

`torch.autograd.gradcheck` compares one function with finite differences, to a tolerance. Here the loop run by the caller is
the reference, so values and the gradients of items must agree bit for bit, and no tolerance can hide a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpgrad._torch import tree_leaves, tree_map_only
from mpgrad.packing import pickled_function
from mpgrad.pool import Pool

__all__ = ["assert_same_as_serial"]


def assert_same_as_serial(
    fn: Callable[[Any], Any],
    items: Sequence[Any],
    pool: Pool | None = None,
    *,
    order: int = 1,
    run: Callable[[Pool, Callable[[Any], Any], list[Any]], Sequence[Any]] = lambda pool, fn, items: pool.map(fn, items),
    rtol: float | None = None,
) -> None:
    """Compare ``pool.map(fn, items)`` with ``[fn(item) for item in items]``: values, structure, and derivatives.

    Args:
        fn: the function; gradients of the tensors that it captures are compared too.
        items: tensors or structures; each run gets copies of its own, leaves where these are leaves.
        pool: the pool to test; None for a new one of two processes.
        order: derivatives up to this order; 0 for values only. Those of order 2 are of all first ones, weighted at random,
            as `torch.autograd.gradgradcheck` does it.
        run: how the pool is asked, where it is not `map`.
        rtol: relative tolerance for what the pool adds up in another order: the gradients of captures, and all from order 2
            on; None for 4096 times the precision of the dtype. All else is compared bit for bit.

    Raises:
        AssertionError: names the item, and whether value or gradient differ.
        ValueError: `order` is negative.

    Example:
        >>> import torch
        >>> from mpgrad.testing import assert_same_as_serial
        >>> weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
        >>> items = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in range(4)]
        >>> assert_same_as_serial(lambda x: (x * weight).exp(), items, order=2)
    """
    if order < 0:
        raise ValueError(f"order must be at least 0 (order: {order})")
    if pool is None:
        with Pool(processes=2) as own:
            return assert_same_as_serial(fn, items, own, order=order, run=run, rtol=rtol)
    captures = [tensor for tensor in pickled_function(fn).captures if tensor.requires_grad]
    ours, theirs = copies(items), copies(items)
    results, reference = list(run(pool, fn, ours)), [fn(item) for item in theirs]
    if len(results) != len(reference):
        raise AssertionError(f"the pool gave {len(results)} results, the serial loop {len(reference)}")
    for index, (result, expected) in enumerate(zip(results, reference, strict=True)):
        compare_values(f"item {index}", result, expected)
    sides = [
        (differentiable(outputs), [*differentiable(inputs), *captures])
        for outputs, inputs in ((results, ours), (reference, theirs))
    ]
    names = [f"input {number}" for number in range(len(differentiable(ours)))]
    names += [f"capture {number}" for number in range(len(captures))]
    for degree in range(1, order + 1):
        found = [gradients_of(outputs, inputs, degree, degree < order) for outputs, inputs in sides]
        for number, (name, grad, expected) in enumerate(zip(names, *found, strict=True)):
            in_order = degree == 1 and number < len(names) - len(captures)
            label = "gradient of" if degree == 1 else f"derivative of order {degree} of"
            compare_tensors(f"{label} {name}", grad, expected, 0.0 if in_order else rtol)
        sides = [(differentiable(grads), inputs) for grads, (_, inputs) in zip(found, sides, strict=True)]
    return None


def copies(items: Sequence[Any]) -> list[Any]:
    known: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:  # one tensor twice stays one
            leaf = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                leaf = torch.nn.Parameter(leaf.detach(), tensor.requires_grad)
            known[id(tensor)] = leaf if tensor.is_leaf else leaf.clone()
        return known[id(tensor)]

    return [tree_map_only(torch.Tensor, copy, item) for item in items]


def differentiable(structures: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(list(structures)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def gradients_of(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], seed: int, create_graph: bool
) -> list[torch.Tensor | None]:
    """Gradients of the outputs times random numbers, the same each time; None where nothing depends on an input."""
    if not outputs or not inputs:
        return [None] * len(inputs)
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device) for output in outputs]
    # kept, because captures may share a history with those of the other run
    found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, retain_graph=True, create_graph=create_graph)
    return list(found)


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
        elif has_equality(other) and any_of(mine != other):
            raise AssertionError(f"{name}: the pool gave {mine!r}, the serial loop {other!r}")


def any_of(unequal: Any) -> bool:
    """Whether anything is unequal; arrays compare element by element."""
    return bool(unequal.any() if hasattr(unequal, "any") else unequal)


def has_equality(value: object) -> bool:
    """Whether two copies of `value` can be told equal: not where equality means identity."""
    equality: object = type(value).__eq__
    return equality is not object.__eq__


def compare_tensors(name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, rtol: float | None) -> None:
    if ours is None or theirs is None:
        if ours is not theirs:
            raise AssertionError(f"{name}: the pool gave {describe(ours)}, the serial loop {describe(theirs)}")
        return
    kinds = [(each.device, each.dtype, each.shape, each.layout, strides_that_matter(each)) for each in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f"{name}: the pool gave {describe(ours)}, the serial loop {describe(theirs)}")
    if rtol is None:
        rtol = 4096 * torch.finfo(theirs.dtype).eps
    ours, theirs = ours.detach().cpu().to_dense(), theirs.detach().cpu().to_dense()
    if rtol == 0 and same_bits(ours, theirs):
        return
    if rtol == 0 or not torch.allclose(ours, theirs, rtol=rtol, atol=rtol, equal_nan=True):
        difference = (ours - theirs).abs().max().item()
        raise AssertionError(f"{name}: the pool and the serial loop differ by up to {difference:.3g}")


def strides_that_matter(tensor: torch.Tensor) -> list[int]:
    """Not those of dimensions of size 1, nor of tensors without elements."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Also the sign of zeros; all that is not a number is alike."""
    ours, theirs = (each.resolve_conj().resolve_neg().contiguous().reshape(-1) for each in (ours, theirs))
    same = (ours.view(torch.uint8) == theirs.view(torch.uint8)).view(-1, ours.element_size()).all(1)
    return bool((same | (ours.isnan() & theirs.isnan())).all())


def describe(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    strides = f" and strides {tensor.stride()}" if tensor.layout is torch.strided else ""
    device = "" if tensor.is_cpu else f" on {tensor.device}"
    return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}{strides}{device}"
