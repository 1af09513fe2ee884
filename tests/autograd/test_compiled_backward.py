"""Backwards that a compiled function calls, and PyTorch's compiled autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpgrad

DISABLE = r"compiled autograd cannot run the backward .*compiled_autograd\._disable\(\)"


@pytest.fixture
def w() -> torch.Tensor:
    return torch.tensor(2.0, requires_grad=True)


@pytest.fixture
def compiled_autograd() -> Iterator[Any]:
    """The module. Nothing compiled is left behind."""
    module = pytest.importorskip("torch._dynamo.compiled_autograd")
    yield module
    torch._dynamo.reset()


def total(losses: Any) -> None:
    sum(losses).backward()


def serial(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return [fn(item) for item in items]


def test_compiled_autograd_is_refused(
    pool: mpgrad.Pool, w: torch.Tensor, compiled_autograd: Any
) -> None:
    # symptom: an InternalTorchDynamoError about a `proxy`
    leaves = [torch.ones(3, requires_grad=True) for _ in range(3)]
    for items in ([1.0, 2.0], leaves, [each * 2 for each in leaves]):
        results = [torch.as_tensor(each).sum() for each in pool.map(lambda x: (w * x).sin(), items)]
        with compiled_autograd._enable(lambda graph: graph):
            with pytest.raises(RuntimeError, match=DISABLE):
                total(results)
            with pytest.raises(RuntimeError, match=DISABLE):
                torch.autograd.grad(results[0], w)
            with compiled_autograd._disable():
                sum(results).backward(retain_graph=True)
        # the pool is as it was
        assert w.grad is not None
        (again,) = torch.autograd.grad(sum(results), w)
        assert torch.equal(w.grad, again)
        w.grad = None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_on", [False, True])
def test_a_compiled_step_calls_a_backward(
    pool: mpgrad.Pool, w: torch.Tensor, compiled_autograd: Any, is_on: bool
) -> None:
    # symptom: an InternalTorchDynamoError about a `proxy`, from the code of the pool's nodes, which
    # the compiler compiled
    step = torch.compile(total, backend="eager")

    @torch.compile(backend="eager")
    def whole(loop: Any) -> None:
        sum(loop(lambda x: (w * x).sin(), [1.0, 2.0])).backward()

    with torch._dynamo.config.patch(compiled_autograd=is_on):
        found = []
        for loop in (serial, pool.map, pool.map):
            w.grad = None
            step(loop(lambda x: (w * x).sin(), [1.0, 2.0]))
            whole(loop)
            found.append(w.grad)
    assert found[0] == found[1] == found[2]
    w.grad = None
    total(pool.map(lambda x: (w * x).sin(), [1.0, 2.0]))
    assert 2 * w.grad == found[0]
