"""Backward as PyTorch users know it: partial, repeated, chosen inputs, hooks, errors, threads."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import eventually, graphs_in, staffed
from inside import handles

import mpgrad
import mpgrad.derivatives
from mpgrad.autograd.remote_graph import RemoteGraph, forget_oldest

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
    assert graphs_in(pool2) >= 5
    del results
    gc.collect()
    eventually(lambda: not any(worker.has_updates for worker in handles(pool2)))
    before = graphs_in(pool2)
    kept = pool2.map(lambda x: x.exp(), leaves(3))
    assert graphs_in(pool2) == before + 3
    del kept


def test_graphs_are_released_in_a_worker_that_has_nothing_else_to_do(
    fresh_pool: mpgrad.Pool,
) -> None:
    results = staffed(fresh_pool).map(
        lambda k: (time.sleep(0.05), torch.ones(2, requires_grad=True).exp())[1], range(2)
    )
    assert [worker.graphs for worker in fresh_pool.stats().workers] == [1, 1]
    del results
    # each call goes to the same worker, and nothing to the other
    eventually(lambda: fresh_pool.apply(abs, (-1,)) and graphs_in(fresh_pool) == 0)


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


def test_an_input_changed_in_place_before_the_result_is_fetched(pool: mpgrad.Pool) -> None:
    # symptom: a gradient of 6 instead of 3. cause: the gate was a view, and a write to its base
    # moved it to the new history.
    a = torch.ones(2, requires_grad=True)
    x = a * 1
    future = pool.submit(lambda t: t * 3, x)
    x.mul_(2)
    future.result().sum().backward()
    assert a.grad.tolist() == [3, 3]


def add_to_array(state: torch.Tensor) -> None:
    array = state.numpy()
    array += 3


@pytest.mark.parametrize("size", [5_000, 500_000])
@pytest.mark.parametrize(
    "add", [add_to_array, lambda state: state.add_(3)], ids=["NumPy", "PyTorch"]
)
@pytest.mark.parametrize("inference", [False, True], ids=["array", "inference tensor"])
def test_a_former_result_whose_writes_are_not_counted(
    fork_server: mpgrad.Pool, inference: bool, add: Callable[[torch.Tensor], object], size: int
) -> None:
    """Symptom: a graph that was made again gave gradients of what had been written since. Cause:
    arrays and inference tensors were read where they lie, and PyTorch does not count writes to
    these."""
    weight = torch.ones((), requires_grad=True)

    def loss(item: Any) -> torch.Tensor:
        return (torch.as_tensor(item)[:2] + weight).exp().sum()

    def gradient(losses: Callable[[list[Any]], list[torch.Tensor]], state: torch.Tensor) -> Any:
        (total,) = losses([state if inference else state.numpy()])
        with torch.inference_mode(inference):
            add(state)
        return torch.autograd.grad(total, weight)

    with mpgrad.Pool(1, graphs="recompute") as pool:
        with torch.inference_mode(inference):
            former, state = pool.apply(torch.zeros, (size,)), torch.zeros(size)
        found = gradient(lambda items: pool.map(loss, items), former)
        assert found == gradient(lambda items: list(map(loss, items)), state)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def test_a_failed_backward_keeps_nothing(fresh_pool: mpgrad.Pool) -> None:
    """Symptom: graphs in workers, and the caller's locals, that were never let go. Cause: a kept
    exception kept its traceback, and a derivative that nobody took kept the inputs, whose gates
    kept the derivative."""

    class Local:
        pass

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("bad")

    kept = []

    def in_the_worker() -> None:
        local = Local()
        kept.append(weakref.ref(local))
        results = fresh_pool.map(Fails.apply, [leaf(3) * 1, leaf(3) * 2])
        with contextlib.suppress(KeyError):
            sum(r.sum() for r in results).backward()

    def in_a_hook() -> None:
        local = Local()
        kept.append(weakref.ref(local))
        leaves = [leaf(3, seed=k) for k in range(4)]
        items = [x * 2 for x in leaves]
        items[2].register_hook(lambda grad: 1 / 0)
        results = fresh_pool.map(lambda t: t**3, items)
        with contextlib.suppress(ZeroDivisionError):
            torch.autograd.grad([r.sum() for r in results], leaves, create_graph=True)

    in_the_worker()
    in_a_hook()
    torch.ones(1, requires_grad=True).sum().backward()  # the engine lets go of the last error

    def have_no_graphs() -> bool:
        gc.collect()
        fresh_pool.map(abs, range(8), chunksize=1)
        return graphs_in(fresh_pool) == 0

    eventually(have_no_graphs)
    assert not any(ref() for ref in kept)


def test_another_default_device(pool2: mpgrad.Pool) -> None:
    """Symptom: an error, and with it a placeholder on the wrong device for good. Cause: tensors
    made without a device."""
    x, c = leaf(7), leaf(7, seed=1)
    with torch.device("meta"):
        (result,) = pool2.map(lambda t: t * c, [x])
        result.backward(c.detach())
    assert torch.equal(x.grad, c * c) and torch.equal(c.grad, x * c)


def test_hooks_of_a_checkpoint_around_an_inline_pool() -> None:
    """Symptom: a map of two items gave one result, now and then. Cause: the worker, in the caller's
    thread, saved tensors under the checkpoint's hooks; these ended the second run of the region in
    the middle of a task."""
    c = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    with mpgrad.Pool(1, engine="inline") as pool:

        def region(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
            a, b = pool.map(task, [x * 2, x.exp()])
            return (a * b).tanh()

        def task(t: torch.Tensor) -> torch.Tensor:
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            return (t * c).sin()

        for _ in range(10):
            seen: list[bool] = []
            x = torch.full((3,), 0.25, dtype=torch.float64, requires_grad=True)
            torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False).sum().backward()
            assert seen == [True, True]
            y = x.detach().requires_grad_()
            ((y * 2 * c).sin() * (y.exp() * c).sin()).tanh().sum().backward()
            assert torch.equal(x.grad, y.grad)


@pytest.mark.quick
def test_backwards_are_forgotten_by_several_threads_at_once() -> None:
    # symptom: KeyError, or "dictionary changed size during iteration". cause: two threads found the
    # same oldest one.
    by_task: dict[int, int] = {}
    errors, numbers = [], itertools.count()

    def use() -> None:
        try:
            for _ in range(10_000):
                by_task[next(numbers)] = 0
                forget_oldest(by_task)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == [] and len(by_task) < 300


Tensor = torch.Tensor


def test_a_backward_inside_a_call(pool2: mpgrad.Pool) -> None:
    """Symptom: it added to the `grad` of the caller's items and captures, or not, as timing would
    have it. Cause: a call had copies with the caller's history."""
    weight = torch.ones(2, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        try:
            (x * 3).sum().backward()
        except Exception:
            return torch.zeros(2)
        return x.detach() + 1

    def captured(x: Tensor) -> Tensor:
        (x * weight).sum().backward()
        return x + 1

    items = [torch.ones(2, requires_grad=True) for _ in range(20)]
    for _ in range(3):
        assert all(each.tolist() == [2, 2] for each in pool2.map(inner, items))
        with pytest.warns(UserWarning, match="wrote into"):
            pool2.map(captured, [torch.ones(2)] * 20)
    assert all(each.grad is None for each in items)
    assert weight.grad is None


def test_a_gradient_inside_a_call(pool2: mpgrad.Pool) -> None:
    """`torch.autograd.grad` with a call's own inputs stays where it is."""

    def slope(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        return found.sum()

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for _ in range(5):
        results = pool2.map(slope, [x] * 20)
    (found,) = torch.autograd.grad(sum(results, torch.tensor(0.0)), x)
    assert found.tolist() == [120, 240]
