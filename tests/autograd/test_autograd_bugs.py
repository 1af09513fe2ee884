"""Bugs of backwards, transforms and derivatives that were, each with its symptom and its cause."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpgrad
import mpgrad.derivatives

SPAN = torch.arange(3, dtype=torch.float64)


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


def serial(fn: Any, items: Any) -> list[Any]:
    return [fn(item) for item in items]


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


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


def test_an_ordinary_backward_through_a_transform(pool2: mpgrad.Pool) -> None:
    """Symptom: zero gradients. Cause: a vjp inside a vjp made its gradients connected only where
    its own inputs needed them, and not where the captures did."""
    found = []
    for loop in (pool2.map, serial):
        x, c = leaf(3).detach(), leaf(3, seed=1)
        torch.func.grad(lambda x, loop=loop, c=c: loop(lambda t: (t * c).sin().sum(), [x])[0])(
            x
        ).sum().backward()
        found.append(c.grad)
    assert torch.equal(*found)


def test_rows_of_a_jacobian_meet_the_mask_of_the_forward(pool2: mpgrad.Pool) -> None:
    """Symptom: an error, or one mask per row. Cause: the vmap over rows took the function's random
    numbers for its own."""
    x = leaf(8).detach()
    y, pull_back = torch.func.vjp(
        lambda x: pool2.map(lambda t: torch.nn.functional.dropout(t, 0.5) * t, [x])[0], x
    )
    for randomness in ("error", "same", "different"):
        (rows,) = torch.func.vmap(pull_back, randomness=randomness)(
            torch.eye(8, dtype=torch.float64)
        )
        assert torch.allclose(rows.diagonal() * x, 2 * y)


def test_noise_under_a_vmap_on_an_item_that_is_not_batched(pool2: mpgrad.Pool) -> None:
    """Symptom: the same noise in all rows, or none where it is forbidden. Cause: items without a
    batch left the vmap."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return pool2.map(lambda t: t + torch.rand(3), [torch.ones(3), x])[0] + 0 * x

    rows = torch.func.vmap(fn, randomness="different")(torch.zeros(4, 3))
    assert not torch.equal(rows[0], rows[1])
    with pytest.raises(
        RuntimeError, match="called random operation while in randomness error mode"
    ):
        torch.func.vmap(fn)(torch.zeros(4, 3))


def test_a_tangent_on_a_gradient_is_not_lost_silently(pool2: mpgrad.Pool) -> None:
    """Symptom: no tangent, no error. Cause: gradients travel without their tangents."""
    (y,) = pool2.map(torch.exp, [x := leaf(3)])
    with torch.autograd.forward_ad.dual_level():
        weights = torch.autograd.forward_ad.make_dual(torch.ones_like(x), torch.ones_like(x))
        with pytest.raises(
            TypeError,
            match=r"a gradient that came to a pool's result has a tangent.*torch\.func\.jvp",
        ):
            torch.autograd.grad(y, x, weights.detach() + weights)


def test_a_gradient_inside_a_function_under_a_transform(pool2: mpgrad.Pool) -> None:
    """Symptom: "does not require grad". Cause: the function saw plain tensors where a transform's
    tensors require grad."""

    def force(t: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((t**3).sum(), t, create_graph=True)[0]

    x = leaf(2).detach()
    for transform in (torch.func.grad, torch.func.hessian):
        ours, theirs = (
            transform(lambda x, loop=loop: loop(force, [x])[0].sum())(x)
            for loop in (pool2.map, serial)
        )
        assert torch.equal(ours, theirs)


def test_a_backward_after_the_autocast_region(pool2: mpgrad.Pool) -> None:
    """Symptom: gradients in bfloat16. Cause: a derivative ran wholly under the modes of the
    forward."""

    def loss(loop: Any, x: torch.Tensor) -> torch.Tensor:
        def fn(t: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return t @ weight

        with torch.autocast("cpu", torch.bfloat16):
            return loop(fn, [x])[0].sum()

    x, weight = leaf(2, 2).float().detach(), leaf(2, 2, seed=1).float().detach()
    ours, theirs = (
        torch.func.grad(lambda x, loop=loop: loss(loop, x))(x) for loop in (pool2.map, serial)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated, and still there
def test_tracers_are_refused(pool2: mpgrad.Pool) -> None:
    """Symptom: the traced function returned its first result for ever. Cause: a tracer sees none of
    a worker's operations."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return pool2.map(lambda t: t * 2, [x])[0] + x

    with pytest.raises(RuntimeError, match=r"a pool call cannot be traced.*by: torch\.jit\.trace"):
        torch.jit.trace(fn, (torch.ones(2),), check_trace=False)
    with pytest.raises(RuntimeError, match=r"a pool call cannot be traced.*torch\.func\.linearize"):
        torch.func.linearize(fn, torch.ones(2))


def test_a_plain_call_inside_a_transform_inline(shared_pools: Any) -> None:
    """Symptom: "belongs to a torch.func transform". Cause: the task ran in the caller's thread,
    under its transform."""
    pool, w = shared_pools("inline", 1), leaf(2).detach()
    assert torch.equal(
        torch.func.grad(lambda x: (pool.map(lambda t: t * 2, [w])[0] * x).sum())(w), 2 * w
    )


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
    deadline = time.monotonic() + 10
    workers = fresh_pool._scheduler.workers.values()
    while any(worker.graphs for worker in workers) and time.monotonic() < deadline:
        gc.collect()
        fresh_pool.map(abs, range(8), chunksize=1)
    assert [len(worker.graphs) for worker in workers] == [0, 0]
    assert not any(ref() for ref in kept)


def test_another_default_device(pool2: mpgrad.Pool) -> None:
    """Symptom: an error, and with it a placeholder on the wrong device for good. Cause: tensors
    made without a device."""
    x, c = leaf(7), leaf(7, seed=1)
    with torch.device("meta"):
        (result,) = pool2.map(lambda t: t * c, [x])
        result.backward(c.detach())
    assert torch.equal(x.grad, c * c) and torch.equal(c.grad, x * c)


@pytest.mark.parametrize(
    "expanded", [lambda t: t.sum() * SPAN, lambda t: torch.where(SPAN > 0.5, SPAN, t.sum())]
)
def test_hessian_of_a_function_with_an_expanded_gradient(pool2: mpgrad.Pool, expanded: Any) -> None:
    """Symptom: "more than one element of the written-to tensor refers to a single memory location".
    Cause: a gradient came from the worker expanded, as it was made; forward mode gives tangents the
    strides of their values, and writes them there."""
    found = torch.func.hessian(lambda x: pool2.map(expanded, [x])[0].sum())(SPAN * 2)
    assert torch.equal(found, torch.func.hessian(lambda x: expanded(x).sum())(SPAN * 2))


class RaisesForThree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.count = x.numel()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if ctx.count == 3:
            raise ValueError("no gradient for three")
        return grad


@pytest.mark.parametrize("counts", [(3, 2, 2, 2, 2, 2), (3, 3, 3)])
def test_a_backward_that_raises_where_only_captures_are_wanted(
    pool: mpgrad.Pool, counts: tuple[int, ...]
) -> None:
    """Symptom: the capture's gradient lacked that item's part, without an error; where all items of
    a worker raised, the worker died, and other graphs with it. Cause: nobody took the replies of
    the calls, only the sum, which might not exist."""
    c = torch.tensor(2.0, requires_grad=True)
    others = pool.map(lambda x: (x * c * 3).sum(), [torch.ones(2)] * 4)
    results = pool.map(lambda x: RaisesForThree.apply(x * c).sum(), [torch.ones(n) for n in counts])
    with pytest.raises(ValueError, match="no gradient for three"):
        torch.autograd.grad(sum(results), c)
    loss = sum(pool.map(lambda x: (x * c).sum(), [torch.ones(2)] * 4))
    assert torch.autograd.grad(loss, c)[0] == 8
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, c)
    assert torch.autograd.grad(sum(others), c)[0] == 24


def test_forward_mode_around_a_pool_whose_task_turns_gradients_off(pool: mpgrad.Pool) -> None:
    """Symptom: the derivative followed what `no_grad` hides, or not, depending on the output's
    size. Cause: what refuses that in the caller is a function mode of its thread, which no worker
    has."""

    def fn(c: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = c.sum()
        return torch.cat([c * constant] * 10)

    c, expected = torch.tensor([2.0]), torch.full((10, 1), 2.0)
    mpgrad.derivatives.SAID.clear()
    with pytest.warns(
        UserWarning, match=r"forward mode follows what is computed under torch\.no_grad"
    ):
        assert torch.equal(mpgrad.jacobian(lambda c: pool.map(fn, [c])[0], c), expected)
        assert torch.equal(
            mpgrad.jvp(lambda c: pool.map(fn, [c])[0], c, torch.ones(1))[1], expected[:, 0]
        )


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


def test_failed_backwards_with_captures_leave_little(pool: mpgrad.Pool) -> None:
    """Symptom: memory in caller and workers for every backward that failed. Cause: what would be
    collected at its end."""
    c = torch.ones(3, requires_grad=True)
    xs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    results = pool.map(lambda x: x * c, xs)
    owner = results[0].grad_fn.graph.owner

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("by hook")

    handle = xs[0].register_hook(fails)
    for _ in range(300):
        with pytest.raises(ValueError, match="by hook"):
            sum(y.sum() for y in results).backward(retain_graph=True)
    assert len(owner._sums) <= 257
    handle.remove()
    c.grad = None
    sum(y.sum() for y in results).backward()
    assert torch.equal(c.grad, torch.full((3,), 2.0))


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
