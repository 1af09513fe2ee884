"""`reduce` and `map_reduce` against the serial fold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.tasks.wrappers import MOST_BLOCKS, blocks_of

pytestmark = pytest.mark.quick


def tensors(count: int, seed: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def in_place(target: torch.Tensor, item: torch.Tensor) -> None:
    target.mul_(item).add_(item)


def returning(target: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return (target * item).sin() + item


def serial_fold(fn: Callable[[Any, Any], Any], items: list[Any], target: Any) -> Any:
    for item in items:
        result = fn(target, item)
        target = target if result is None else result
    return target


@pytest.mark.parametrize("fn", [in_place, returning])
@pytest.mark.parametrize("count", [0, 1, 2, 11])
@pytest.mark.parametrize("targets", [1, 3])
def test_targets_side_by_side(pool: mpgrad.Pool, fn: Any, count: int, targets: int) -> None:
    grads = []
    for fold in (
        lambda *args: pool.reduce(*args),
        lambda fn, items, ts: [serial_fold(fn, items, t) for t in ts],
    ):
        leaves, starts = tensors(count), tensors(targets, seed=5)
        folded = fold(fn, [leaf * 2 for leaf in leaves], [start * 2 for start in starts])
        sum((k + 1) * (f**2).sum() for k, f in enumerate(folded)).backward()
        grads.append([f.detach() for f in folded] + [x.grad for x in (*leaves, *starts)])
    for mine, other in zip(*grads, strict=True):
        # an item gets a gradient from each target, and each of those is a sum already: (a + b) + (c
        # + d), not a + b + c + d
        tolerance = 0.0 if targets == 1 else 1e-12
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_the_example_of_the_readme(pool: mpgrad.Pool) -> None:
    def map_function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(0)

    def reduce_function(target: torch.Tensor, item: torch.Tensor) -> None:
        target.add_(item)

    grads = []
    for serial in (False, True):
        torch.manual_seed(0)
        leaves = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 5, 0, 7)]
        target1, target2 = (
            torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)
        )
        if serial:
            mapped = [map_function(x * 2) for x in leaves]
            t1, t2 = (serial_fold(reduce_function, mapped, t * 2) for t in (target1, target2))
        else:
            mapped = pool.map(map_function, [x * 2 for x in leaves])
            t1, t2 = pool.reduce(reduce_function, mapped, [target1 * 2, target2 * 2])
        ((t1**2).sum() + (t2**2).sum()).backward()
        grads.append([x.grad for x in (*leaves, target1, target2)])
    assert all(torch.equal(mine, other) for mine, other in zip(*grads, strict=True))


def test_one_target_and_structures(pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)

    def fn(state: dict[str, Any], item: int) -> dict[str, Any]:
        return {"sum": state["sum"] * item, "count": state["count"] + 1}

    result = pool.reduce(fn, [2, 3, 4], {"sum": x * 1, "count": 0})
    assert result["count"] == 3
    result["sum"].sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 24.0))


def test_the_callers_target_is_not_written(pool: mpgrad.Pool) -> None:
    target = torch.zeros(3)
    assert torch.equal(
        pool.reduce(lambda t, i: t.add_(i), [1.0, 2.0], target), torch.full((3,), 3.0)
    )
    assert torch.equal(target, torch.zeros(3))


@pytest.mark.parametrize("size", [3, 100_000])
def test_items_written_by_one_targets_fold_are_not_seen_by_the_others(
    pool: mpgrad.Pool, size: int
) -> None:
    def greedy(target: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        item.mul_(2)
        return target + item

    items = [torch.ones(size) for _ in range(3)]
    folded = pool.reduce(greedy, items, [torch.zeros(size) for _ in range(4)])
    assert all(torch.equal(f, torch.full((size,), 6.0)) for f in folded)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "fn", [torch.matmul, lambda t, i: t.add_(i)], ids=["returning", "in place"]
)
def test_associative(pool2: mpgrad.Pool, fn: Any, count: int) -> None:
    def rotations(count: int) -> list[torch.Tensor]:
        torch.manual_seed(6)
        return [
            torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0].requires_grad_()
            for _ in range(count)
        ]

    grads = []
    for serial in (False, True):
        items, target = rotations(count), rotations(1)[0]
        if serial:
            result = functools.reduce(
                torch.matmul if fn is torch.matmul else torch.add, items, target
            )
        else:
            result = pool2.reduce(fn, items, target * 1, associative=True)
        (result * torch.arange(9.0, dtype=torch.float64).reshape(3, 3)).sum().backward()
        grads.append([result.detach(), target.grad, *(item.grad for item in items)])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_tree_depends_on_the_number_of_items_only(
    shared_pools: Callable[[str, int], mpgrad.Pool],
) -> None:
    items = [torch.randn(50, dtype=torch.float32) for _ in range(300)]
    results = [
        shared_pools(*engine).map_reduce(lambda x: x.exp(), items, "sum")
        for engine in (("process", 1), ("process", 2), ("process", 4), ("inline", 1))
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    sizes = [len(block) for block in blocks_of(range(301))]
    assert len(sizes) == MOST_BLOCKS and max(sizes) - min(sizes) == 1 and sum(sizes) == 301


NAMED = {
    "sum": lambda values: sum(values[1:], values[0]),
    "mean": lambda values: torch.stack(values).mean(0),
    "max": lambda values: torch.stack(values).amax(0),
    "min": lambda values: torch.stack(values).amin(0),
    "logsumexp": lambda values: torch.logsumexp(torch.stack(values), 0),
    "cat": torch.cat,
    "stack": torch.stack,
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("count", [1, 7, 130])
def test_named(pool2: mpgrad.Pool, name: str, count: int) -> None:
    grads = []
    for serial in (False, True):
        items, first = tensors(count), tensors(1, seed=9)[0]
        if serial:
            reduced = NAMED[name]([x.exp() for x in items])
            onto = NAMED[name]([first * 1, *items])
        else:
            reduced = pool2.map_reduce(torch.exp, items, name)
            onto = pool2.reduce(name, items, first)
        (reduced**2).sum().backward()
        (onto**2).sum().backward()
        grads.append([reduced.detach(), onto.detach(), first.grad, *(item.grad for item in items)])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_map_reduce_with_a_function_and_captures(pool: mpgrad.Pool) -> None:
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    grads = []
    for serial in (False, True):
        items, init = tensors(20), torch.ones(3, dtype=torch.float64, requires_grad=True)
        weight.grad = None
        if serial:
            result = functools.reduce(torch.mul, (x.sin() * weight for x in items), init)
        else:
            result = pool.map_reduce(lambda x: x.sin() * weight, items, torch.mul, init)
        result.sum().backward()
        grads.append([result.detach(), init.grad, weight.grad, *(item.grad for item in items)])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_nothing_to_reduce(pool: mpgrad.Pool) -> None:
    with pytest.raises(TypeError, match="map_reduce of no items needs an initial value"):
        pool.map_reduce(abs, [], "sum")
    assert torch.equal(pool.map_reduce(abs, [], "sum", torch.ones(2)), torch.ones(2))
    assert pool.reduce(returning, [], []) == []


def test_bad_arguments(pool: mpgrad.Pool) -> None:
    with pytest.raises(
        ValueError, match=r"no reduction has this name \('median'\); use one of 'sum'"
    ):
        pool.map_reduce(abs, [1], "median")
    with pytest.raises(TypeError, match="a reduction must be a function or one of"):
        pool.reduce(3, [1], 1)


@pytest.mark.parametrize(
    "fn", [torch.Tensor.add_, torch.Tensor.mul_, torch.add], ids=lambda fn: fn.__name__
)
def test_targets_that_are_items(pool: mpgrad.Pool, fn: Any) -> None:
    """The items are what they were, whatever a fold has written into its target by then."""

    def folded(reduce: Any) -> list[Any]:
        source = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        values = list((source * 1.5).unbind())
        results = reduce(values, {"target": values[0]}, values[2])
        loss = results[0]["target"] * results[1]
        return [*results[0].values(), results[1], *torch.autograd.grad(loss, source)]

    def by_pool(
        items: list[torch.Tensor], first: dict[str, torch.Tensor], second: torch.Tensor
    ) -> Any:
        def onto_structure(
            target: dict[str, torch.Tensor], item: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            return {"target": fn(target["target"], item)}

        return pool.reduce(onto_structure, items, [first])[0], pool.reduce(fn, items, second)

    def on_copies(
        items: list[torch.Tensor], first: dict[str, torch.Tensor], second: torch.Tensor
    ) -> Any:
        one, other = first["target"].clone(), second.clone()
        for item in items:
            one, other = fn(one, item), fn(other, item)
        return {"target": one}, other

    for ours, theirs in zip(folded(by_pool), folded(on_copies), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
