"""Backward as PyTorch users know it: partial, repeated, chosen inputs, hooks, errors, threads."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from conftest import staffed

import mpgrad
from mpgrad.autograd.remote_graph import RemoteGraph

pytestmark = pytest.mark.quick


def leaves(count: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2 + n, dtype=torch.float64, requires_grad=True) for n in range(count)]


def fn(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * x).sin()


def test_one_item_after_another(pool: mpgrad.Pool) -> None:
    ours, theirs = leaves(), leaves()
    # exp saves its result: freeing another item's history would show
    results = pool.map(fn, [x.exp() for x in ours])
    reference = [fn(x.exp()) for x in theirs]
    for index in (3, 0, 4, 1, 2):
        results[index].sum().backward()
        reference[index].sum().backward()
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True))


def test_a_partial_backward_leaves_the_others_without_grad(pool: mpgrad.Pool) -> None:
    xs = leaves()
    results = pool.map(fn, xs)
    calls: list[torch.Tensor] = []
    xs[0].register_hook(calls.append)
    results[2].sum().backward()
    assert [x.grad is None for x in xs] == [True, True, False, True, True]
    assert not calls


def test_twice_without_retain_graph_raises_as_serially(pool: mpgrad.Pool) -> None:
    x = leaves()[0]
    message = "Trying to backward through the graph a second time"
    for results in (pool.map(fn, [x]), [fn(x)]):
        results[0].sum().backward()
        with pytest.raises(RuntimeError, match=message):
            results[0].sum().backward()
    assert pool.map(abs, [-1]) == [1]


def test_retain_graph(pool: mpgrad.Pool) -> None:
    x = leaves()[0]
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    grads = []
    for results in (pool.map(lambda t: fn(t) * weight, [x]), [fn(x) * weight]):
        x.grad = weight.grad = None
        loss = results[0].sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append((x.grad, weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_chosen_inputs(pool: mpgrad.Pool) -> None:
    a, b = leaves(1)[0], leaves(1)[0]
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    serial, results = (
        run(lambda x, y: x * y.exp() * weight, [(a, b)]) for run in (star, pool.starmap)
    )
    for inputs in ([a], [b], [weight], [b, weight]):
        ours = torch.autograd.grad(results[0].sum(), inputs, retain_graph=True)
        theirs = torch.autograd.grad(serial[0].sum(), inputs, retain_graph=True)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def star(function: Any, items: list[Any]) -> list[Any]:
    return [function(*item) for item in items]


def test_unused_inputs(pool: mpgrad.Pool) -> None:
    a, b = leaves(1)[0], leaves(1)[0]
    for results in (pool.starmap(lambda x, y: x * 2, [(a, b)]), [a * 2]):
        assert torch.autograd.grad(results[0].sum(), [b], retain_graph=True, allow_unused=True) == (
            None,
        )
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(results[0].sum(), [b], retain_graph=True)
        (zeros,) = torch.autograd.grad(
            results[0].sum(), [b], allow_unused=True, materialize_grads=True
        )
        assert torch.equal(zeros, torch.zeros_like(b))


def test_only_some_outputs_get_gradients(pool: mpgrad.Pool) -> None:
    x = leaves()[0]
    ((first, second, third),) = pool.map(lambda t: (t * 2, t.exp(), t.sin()), [x])
    second.sum().backward()
    assert torch.equal(x.grad, x.exp().detach())
    assert first.requires_grad and third.requires_grad


def test_hooks_on_results_and_inputs(pool: mpgrad.Pool) -> None:
    x = leaves()[0]
    inner = x * 1
    seen: list[torch.Tensor] = []
    (result,) = pool.map(lambda t: t * 3, [inner])
    result.retain_grad()
    result.register_hook(lambda grad: grad * 2)
    inner.register_hook(seen.append)
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    result.sum().backward()
    assert torch.equal(result.grad, torch.full_like(x, 2.0))
    assert torch.equal(seen[0], torch.full_like(x, 6.0)) and torch.equal(seen[1], seen[0])


def test_gradcheck(pool2: mpgrad.Pool) -> None:
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x, y = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def both(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(pool2.map(lambda item: fn(item) * weight, [x, y * 2]))

    assert torch.autograd.gradcheck(both, (x, y, weight))


def test_anomaly_mode_holds_in_the_worker(pool: mpgrad.Pool) -> None:
    x = torch.zeros(2, requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        (result,) = pool.map(lambda t: torch.sqrt(t) * 0, [x])
        with (
            pytest.raises(RuntimeError, match="returned nan values"),
            pytest.warns(UserWarning, match="Error detected"),
        ):
            result.sum().backward()


def test_an_error_in_backward(pool: mpgrad.Pool) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("in backward")

    xs = leaves()
    results = pool.map(lambda x: Fails.apply(x) if x.numel() == 3 else x * 2, xs)
    with pytest.raises(KeyError, match="in backward") as caught:
        torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    assert any("item 1" in note and "phase: backward" in note for note in caught.value.__notes__)
    assert isinstance(caught.value.__cause__, mpgrad.RemoteTraceback)
    assert pool.map(abs, [-1]) == [1]


def test_results_modified_before_backward_where_a_later_call_read_them(pool2: mpgrad.Pool) -> None:
    x = torch.randn(50_000, dtype=torch.float64, requires_grad=True)
    (first,) = pool2.map(torch.exp, [x])
    (second,) = pool2.map(torch.sin, [first])
    with torch.no_grad():
        first.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


def test_async_calls_read_what_was_there_when_they_were_made(pool2: mpgrad.Pool) -> None:
    (first,) = pool2.map(torch.ones, [(100_000,)])
    future = pool2.submit(torch.sum, first)
    first.zero_()
    assert future.result() == 100_000


def test_backward_from_several_threads(pool: mpgrad.Pool) -> None:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    xs = [torch.full((3,), float(k), dtype=torch.float64) for k in range(8)]
    found: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        (result,) = pool.map(lambda x: (x * weight) ** 2, [xs[k]])
        (found[k],) = torch.autograd.grad(result.sum(), weight)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[k], 2 * xs[k] ** 2) for k in range(8))


def test_graphs_are_released_with_their_results(pool2: mpgrad.Pool) -> None:
    results = pool2.map(lambda x: x.exp(), leaves())
    workers = pool2._scheduler.workers.values()
    assert sum(len(worker.graphs) for worker in workers) >= 5
    del results
    gc.collect()
    pool2._scheduler.wait_until(lambda: False, timeout=0.2)
    for worker in workers:
        assert not worker.has_updates
    before = sum(len(worker.graphs) for worker in workers)
    kept = pool2.map(lambda x: x.exp(), leaves(3))
    assert sum(len(worker.graphs) for worker in workers) == before + 3
    del kept


def test_graphs_are_released_in_a_worker_that_has_nothing_else_to_do(
    fresh_pool: mpgrad.Pool,
) -> None:
    workers = staffed(fresh_pool)._scheduler.workers.values()
    results = fresh_pool.map(
        lambda k: (time.sleep(0.05), torch.ones(2, requires_grad=True).exp())[1], range(2)
    )
    assert [len(worker.graphs) for worker in workers] == [1, 1]
    del results
    deadline = time.monotonic() + 10
    while any(worker.graphs for worker in workers) and time.monotonic() < deadline:
        # each of them goes to the same worker, and nothing to the other
        fresh_pool.apply(abs, (-1,))
    assert not any(worker.graphs for worker in workers)


def test_a_map_inside_a_custom_function(pool: mpgrad.Pool) -> None:
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return pool.map(lambda t: t * 2, [x])[0]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return pool.map(lambda t: t * 2 + 0 * x, [grad])[0]

    x = leaves()[0]
    Outer.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("captures", [False, True])
def test_differentiable_backwards_that_fail_leave_nothing_behind(
    pool2: mpgrad.Pool, captures: bool
) -> None:
    """Gradients that nobody took had a history that led to the graph which kept them, by way of the
    engine."""
    weight = torch.full((3,), 2.0, requires_grad=captures)

    def graphs() -> int:
        gc.collect()
        return sum(type(each) is RemoteGraph for each in gc.get_objects())

    def fails(grad: torch.Tensor) -> None:
        raise LookupError("in the caller")

    calls, before = 8, graphs()
    for _ in range(30):
        xs = [torch.full((3,), float(k), requires_grad=True) for k in range(calls)]
        inner = [x * 1 for x in xs]
        inner[3].register_hook(fails)
        losses = [(y**2).sum() for y in pool2.map(lambda x: x * weight, inner)]
        with pytest.raises(LookupError):
            torch.autograd.grad(sum(losses), [*xs, weight] if captures else xs, create_graph=True)
        del inner, losses
    # the engine itself may keep what the last backward left, until the next: a call's own graph and
    # its derivative's
    assert graphs() <= before + 2 * calls
