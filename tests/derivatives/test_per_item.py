"""Gradients of each result by itself, against one `torch.autograd.grad` per result of the serial
loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpgrad
from mpgrad import per_item_grad

pytestmark = pytest.mark.quick


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def ragged() -> list[torch.Tensor]:
    return [leaf(n, seed=n) for n in (1, 3, 2, 5)]


def test_own_inputs_and_captures(pool: mpgrad.Pool) -> None:
    c, d, items = leaf(2, seed=8), leaf(1, seed=9), ragged()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * c.sum() * d).sum()

    ours, theirs = pool.map(fn, items), [fn(x) for x in items]
    for inputs in (items, c, (c, d), [(x, c) for x in items], (d,)):
        found = per_item_grad(ours, inputs, retain_graph=True)
        for index, grad in enumerate(found):
            wanted = inputs[index] if isinstance(inputs, list) else inputs
            expected = torch.autograd.grad(theirs[index], wanted, retain_graph=True)
            assert isinstance(grad, tuple) == isinstance(wanted, tuple)
            assert all(map(torch.equal, grad if isinstance(grad, tuple) else (grad,), expected))
    sum(ours).backward()  # the graphs are still there
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        per_item_grad(ours, c)


def test_one_tensor_in_every_item_is_not_summed(pool: mpgrad.Pool) -> None:
    x = leaf(3)
    results = pool.starmap(lambda x, k: (x**k).sum(), [(x, k) for k in range(1, 5)])
    for k, grad in enumerate(per_item_grad(results, x), 1):
        assert torch.equal(grad, torch.autograd.grad((x**k).sum(), x)[0])


def test_several_results_of_an_item_and_weights(pool: mpgrad.Pool) -> None:
    x, c = leaf(3), leaf(3, seed=1)
    ((a, b),) = pool.map(lambda x: (x * c, c.exp()), [x])
    weights = [leaf(3, seed=2).detach(), leaf(3, seed=3).detach()]
    of_x, zero = per_item_grad([a, b], x, weights, retain_graph=True)
    assert torch.equal(of_x, weights[0] * c) and torch.equal(zero, torch.zeros_like(x))
    first, second = per_item_grad([a, b], c, weights)
    assert torch.equal(first, weights[0] * x) and torch.equal(second, weights[1] * c.exp())


def test_gradients_may_be_differentiated(pool: mpgrad.Pool) -> None:
    c, items = leaf(2, seed=8), [leaf(2, seed=n) for n in range(3)]
    results = pool.map(lambda x: ((x * c) ** 3).sum(), items)
    grads = per_item_grad(results, c, create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in grads), [c, *items], retain_graph=True)
    expected = torch.autograd.grad(sum((3 * x**3 * c**2).sum() for x in items), [c, *items])
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(second, expected, strict=True))
    again = per_item_grad(grads, c, [torch.ones_like(c)] * 3)
    assert all(
        torch.allclose(g, 6 * x**3 * c, rtol=1e-12) for g, x in zip(again, items, strict=True)
    )


def test_after_imap_and_submit(pool: mpgrad.Pool) -> None:
    c = leaf()
    results = [
        *pool.imap(lambda x: x * c**2, [1.0, 2.0]),
        pool.submit(lambda x: x * c**2, 3.0).result(),
    ]
    assert per_item_grad(results, c) == [2 * c * 1.0, 2 * c * 2.0, 2 * c * 3.0]
    assert per_item_grad([], c) == []


def test_wrong_arguments(pool2: mpgrad.Pool) -> None:
    c, x = leaf(), leaf(3)
    results = pool2.map(lambda x: x * c, [x, x * 2])
    cases: list[tuple[Any, Any, Any, str]] = [
        ([x], c, None, r"results\[0\] is not an unchanged result of a pool.*it is: Tensor"),
        (
            [results[0] * 2],
            c,
            None,
            r"results\[0\] is not an unchanged result of a pool.*it is: Tensor",
        ),
        (results, c, None, r"results\[0\] has several elements.*shape: \(3,\)"),
        (results, x, [torch.ones(3), torch.ones(3)], r"an input for results\[1\] is neither"),
        (results, [x, x * 2], [torch.ones(3)] * 2, r"an input for results\[1\] is neither"),
        (results, c.detach(), [torch.ones(3)] * 2, r"does not require grad"),
        (
            results,
            [x],
            None,
            r"inputs must have one entry for each of the 2 results \(inputs: 1 entries\); .*pass a "
            r"tuple",
        ),
        (results, c, [torch.ones(3)], "grad_outputs must have one entry for each of the 2 results"),
        (
            results,
            c,
            [torch.ones(3), torch.ones(2)],
            r"grad_outputs\[1\] must have the shape of its result",
        ),
    ]
    wrong_types: list[tuple[Any, Any, Any, str]] = [
        (
            (r for r in results),
            c,
            None,
            r"results must be a list of tensors \(given: generator\); collect them first",
        ),
        (results[0], c, None, r"results must be a list of tensors \(given: Tensor\)"),
        (results, [1, 2], None, r"an input for results\[0\] must be a tensor \(given: int\)"),
        (results, c, [1.0, 2.0], r"grad_outputs\[0\] must be a tensor or None \(given: float\)"),
    ]
    for outputs, inputs, weights, message in wrong_types:
        with pytest.raises(TypeError, match=message):
            per_item_grad(outputs, inputs, weights)
    for outputs, inputs, weights, message in cases:
        with pytest.raises(ValueError, match=message):
            per_item_grad(outputs, inputs, weights)
    # nothing was lost
    assert len(per_item_grad(results, c, [torch.ones(3, dtype=torch.float64)] * 2)) == 2


def test_per_item_gradients_of_what_is_item_and_capture(pool: mpgrad.Pool) -> None:
    """Symptom: half of the gradient. Cause: a tensor was looked for among the items or among the
    captures."""
    x = leaf(3)
    results = pool.map(lambda t: (t * x).sum(), [x, x])
    assert all(torch.equal(grad, 2 * x) for grad in mpgrad.per_item_grad(results, x))


def test_a_complex_result_has_no_implied_gradient(pool2: mpgrad.Pool) -> None:
    x = torch.ones(1, dtype=torch.complex64, requires_grad=True)
    results = pool2.map(lambda x: x * 2, [x])
    with pytest.raises(
        ValueError, match=r"results\[0\] is complex, so its gradient must be passed"
    ):
        mpgrad.per_item_grad(results, x)
