"""Second derivatives of every operation, batches of gradients, the order of sums, and the graphs
that workers keep."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import eventually, graphs_in
from torch.autograd import gradcheck, gradgradcheck

import mpgrad
import mpgrad.derivatives

pytestmark = pytest.mark.quick

Loop = Callable[..., list[Any]]  # the pool's map, or the serial loop


def serial(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [fn(item) for item in items]


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def ragged() -> list[torch.Tensor]:
    return [leaf(n, seed=n) for n in (1, 3, 2, 5)]


def assert_equal(ours: Sequence[Any], theirs: Sequence[Any], exact: bool = True) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.shape == other.shape
            assert mine.requires_grad == other.requires_grad
            assert (
                torch.equal(mine, other)
                if exact
                else torch.allclose(mine, other, rtol=1e-12, atol=1e-14)
            )


C = torch.tensor([0.5, -1.5], dtype=torch.float64)
OPERATIONS: dict[str, Callable[[mpgrad.Pool], Callable[..., Any]]] = {
    "map": (lambda pool: lambda x, w: sum(pool.map(lambda t: (t * w).exp() * t, [x, x * 2]))),
    "starmap": (
        lambda pool: (
            lambda x, w: tuple(pool.starmap(lambda a, b: (a * b * C).sin(), [(x, w), (w, x**2)]))
        )
    ),
    "imap": (lambda pool: lambda x, w: tuple(pool.imap(lambda t: (t * w) ** 3, [x, w]))),
    "submit": (lambda pool: lambda x, w: pool.submit(lambda t: t * w.exp() * t, x).result()),
    "reduce": (lambda pool: lambda x, w: pool.reduce(lambda t, i: t * i + w, [x, x * w], w)),
    "in-place": (
        lambda pool: (
            lambda x, w: pool.reduce(lambda t, i: t.add_(i * i * w), [x, x * w], [w * 1, x * 1])[0]
        )
    ),
    "map_reduce": (
        lambda pool: lambda x, w: pool.map_reduce(lambda t: t**2 * w, [x, w, x * w], "sum")
    ),
    "named": (lambda pool: lambda x, w: pool.reduce("logsumexp", [x, x * w], w**2)),
    "map_async": (
        lambda pool: lambda x, w: tuple(pool.map_async(lambda t: t.tanh() * w, [x, w]).get())
    ),
}


@pytest.mark.parametrize(
    "pool", [("process", 2), ("inline", 1)], indirect=True, ids=lambda engine: engine[0]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradcheck_of_every_operation(pool: mpgrad.Pool, operation: str) -> None:
    fn = OPERATIONS[operation](pool)
    inputs = leaf(2), leaf(2, seed=1)
    assert gradcheck(fn, inputs, check_batched_grad=True)
    assert gradgradcheck(fn, inputs)


# --- batched gradients


def batched(loop: Loop) -> list[torch.Tensor]:
    items, weight = ragged(), leaf(1, seed=9)
    results = loop(lambda x: (x * weight).sin() * x.sum(), items)
    cotangents = [
        torch.randn(4, *r.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for r in results
    ]
    kept = torch.autograd.grad(
        results, [*items, weight], cotangents, is_grads_batched=True, retain_graph=True
    )
    one = torch.autograd.grad(
        results[1], [items[1], weight], cotangents[1], is_grads_batched=True, create_graph=True
    )
    second = torch.autograd.grad([g.sum() for g in one], [items[1], weight], retain_graph=True)
    again = torch.autograd.grad(
        one[0], items[1], cotangents[1].expand(2, *one[0].shape), is_grads_batched=True
    )
    return [*kept, *one, *second, *again]


def under_vmap(loop: Loop) -> list[torch.Tensor]:
    items, weight = ragged(), leaf(1, seed=9)
    results = loop(lambda x: (x * weight).sin() * x.sum(), items)

    def gradients(row: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(
            results[1:3], [*items[1:3], weight], [row, other], retain_graph=True
        )

    rows, others = torch.eye(3, dtype=torch.float64), leaf(4, 2).detach()
    single = torch.func.vmap(gradients, (0, None))(rows, others[0])
    double = torch.func.vmap(torch.func.vmap(gradients, (None, 0)), (0, None))(rows, others)
    return [*single, *double]


def some_batched(loop: Loop) -> list[Any]:
    """Two outputs, of which one gets no gradient at all."""
    x, y = leaf(2), leaf(3, seed=1)
    ((_, b),) = loop(lambda t: (t[0] * t[1].sum(), t[1] ** 2), [(x, y)])
    rows = torch.eye(3, dtype=torch.float64)
    return list(torch.autograd.grad(b, [x, y], rows, is_grads_batched=True, allow_unused=True))


@pytest.mark.parametrize(
    "case", [batched, under_vmap, some_batched], ids=lambda case: case.__name__
)
def test_batches_of_gradients(pool: mpgrad.Pool, case: Callable[[Loop], list[Any]]) -> None:
    assert_equal(case(pool.map), case(serial), exact=False)


def test_vectorized_jacobians(pool2: mpgrad.Pool) -> None:
    def fn(loop: Loop) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.stack(loop(lambda t: (t * x).prod() * t, [x, x * 2]))

    x = leaf(3)
    for vectorize in (False, True):
        ours, theirs = (
            torch.autograd.functional.hessian(
                lambda x, loop=loop: fn(loop)(x).sum(), x, vectorize=vectorize
            )
            for loop in (pool2.map, serial)
        )
        assert_equal([ours], [theirs], exact=False)
        ours, theirs = (
            torch.autograd.functional.jacobian(fn(loop), x, vectorize=vectorize)
            for loop in (pool2.map, serial)
        )
        assert_equal([ours], [theirs], exact=False)


# --- order of sums


def sums_of_captures(loop: Loop) -> torch.Tensor:
    weight = leaf(50)
    items = [leaf(50, seed=n).detach() * 10.0 ** (n % 7) for n in range(40)]
    sum(r.sum() for r in loop(lambda x: (x * weight).sin(), items)).backward()
    assert weight.grad is not None
    return weight.grad


def test_deterministic_sums_are_the_serial_ones(fork_server: mpgrad.Pool) -> None:
    expected = sums_of_captures(serial)
    for processes in (1, 2, 3):
        with mpgrad.Pool(processes, deterministic=True) as pool:
            assert torch.equal(sums_of_captures(pool.map), expected)
            assert torch.equal(
                sums_of_captures(lambda fn, items, pool=pool: pool.map(fn, items, chunksize=7)),
                expected,
            )


def test_deterministic_algorithms_order_the_sums_too(pool: mpgrad.Pool) -> None:
    expected = sums_of_captures(serial)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(sums_of_captures(pool.map), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# --- memory


def test_graphs_of_derivatives_are_released(fresh_pool: mpgrad.Pool) -> None:
    """One graph per call and order; each is gone from its worker's table when the parent's node
    is."""

    def settles_at(number: int) -> None:
        gc.collect()
        # releases go with the next message
        eventually(
            lambda: fresh_pool.map(abs, range(8), chunksize=1) and graphs_in(fresh_pool) == number
        )

    items = ragged()
    results = fresh_pool.map(lambda x: x**4, items)
    gradients = torch.autograd.grad([r.sum() for r in results], items, create_graph=True)
    settles_at(8)
    second = torch.autograd.grad([g.sum() for g in gradients], items, create_graph=True)
    settles_at(12)
    del gradients, second
    settles_at(4)
    del results
    settles_at(0)


class CubeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def cube_times(x: torch.Tensor) -> torch.Tensor:
    return CubeOnce.apply(x) * x


def its_derivative(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(cube_times(x), x, create_graph=True)[0]


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_what_can_be_differentiated_once_raises(engine: Any) -> None:
    # symptom: a second derivative that lacked a part, silently. cause: PyTorch puts a node there
    # that only raises; no input is behind it, and the engine left it out.
    with mpgrad.Pool(1, engine=engine) as pool:
        for fn in (cube_times, CubeOnce.apply):
            x = torch.tensor(2.0, requires_grad=True)
            grad = torch.tensor(1.0, requires_grad=True)
            (first,) = torch.autograd.grad(pool.map(fn, [x])[0], x, grad, create_graph=True)
            with pytest.raises(RuntimeError, match=r"twice .* @once_differentiable"):
                first.backward()


def test_what_can_be_differentiated_once_raises_within_a_call(pool2: mpgrad.Pool) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"twice .* @once_differentiable"):
        its_derivative(x).backward()
    for _ in range(4):  # also where a backward may run early
        with pytest.raises(RuntimeError, match=r"twice .* @once_differentiable"):
            sum(pool2.map(its_derivative, [x, x])).backward()


def fail_at_searches() -> None:
    graphs: Any = importlib.import_module("mpgrad.workers.graphs")
    graphs.graph_behind = None


def test_graphs_are_not_searched_for_what_was_never_made() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with mpgrad.Pool(1) as pool:
        pool.apply(fail_at_searches)
        (first,) = torch.autograd.grad(pool.map(lambda x: x**3, [x])[0], x, create_graph=True)
        first.backward()
    assert x.grad == 12


def test_a_loss_and_a_penalty_on_its_gradient(pool: mpgrad.Pool) -> None:
    """Symptom: "backward through the graph a second time", for the commonest use of create_graph.
    Cause: the call and its derivative share nodes in the worker, and are two backwards there; the
    first one freed what the second needed."""
    found = []
    for loop in (pool.map, serial):
        x, c = leaf(2), leaf(2, seed=1)
        (result,) = loop(lambda t: (t * c).sin().exp() * t.prod(), [x])
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        rows = [torch.autograd.grad(result[i], x, create_graph=True)[0] for i in range(2)]
        (result.sum() + (gradient**2).sum() + torch.stack(rows).det()).backward()
        found.append([x.grad, c.grad])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            result.sum().backward()
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(*found, strict=True))


def test_many_derivatives_of_one_graph_do_not_add_up(pool2: mpgrad.Pool) -> None:
    """Symptom: each backward took longer than the one before. Cause: a list of all derivatives a
    graph ever had."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (y,) = pool2.map(lambda x: x**3, [x])
    for _ in range(20):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    gc.collect()
    torch.autograd.grad(y.sum(), x, create_graph=True)
    assert len(y.grad_fn.graph.family) <= 3
