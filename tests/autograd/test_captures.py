"""Gradients to the tensors that a function reaches, however it reaches them."""

from __future__ import annotations

import functools
import gc
import importlib
import warnings
from typing import Any

import pytest
import torch
from inside import lent_slots, sums_kept

import mpgrad
import mpgrad.derivatives
from mpgrad.testing import assert_same_as_serial

pytestmark = pytest.mark.quick

GLOBAL = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
MODULE = torch.nn.Linear(3, 3, dtype=torch.float64)
HOLDER = {"inner": [GLOBAL]}


def items(count: int = 7) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in range(count)]


def uses_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * GLOBAL


def uses_it_indirectly(x: torch.Tensor) -> torch.Tensor:
    return uses_a_global(x).sin()


def uses_a_container(x: torch.Tensor) -> torch.Tensor:
    return x * HOLDER["inner"][0]


def uses_a_module(x: torch.Tensor) -> torch.Tensor:
    return MODULE(x)


def uses_a_default(x: torch.Tensor, factor: torch.Tensor = GLOBAL) -> torch.Tensor:
    return x / factor


class Scales:
    def by_global(self, x: torch.Tensor) -> torch.Tensor:
        return x * GLOBAL


@pytest.mark.parametrize(
    "fn",
    [
        uses_a_global,
        uses_it_indirectly,
        uses_a_container,
        uses_a_module,
        uses_a_default,
        Scales().by_global,
    ],
    ids=lambda fn: fn.__name__,
)
def test_functions_of_an_importable_module(pool: mpgrad.Pool, fn: object) -> None:
    assert_same_as_serial(fn, items(), pool)
    GLOBAL.grad = None
    sum(r.sum() for r in pool.map(fn, items())).backward()
    assert GLOBAL.grad is not None or fn is uses_a_module


def test_closures_leaf_and_not(pool: mpgrad.Pool) -> None:
    leaf = torch.randn(3, dtype=torch.float64, requires_grad=True)
    inner = leaf.exp()
    assert_same_as_serial(lambda x: x * leaf + inner, items(), pool)
    assert_same_as_serial(functools.partial(lambda weight, x: x @ weight, inner), items(), pool)


def test_a_module_fills_every_parameters_grad(pool: mpgrad.Pool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    ).double()
    constant = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    tensors = [*net.parameters(), constant]

    def grads(results: list[torch.Tensor]) -> list[torch.Tensor | None]:
        for tensor in tensors:
            tensor.grad = None
        sum((r**2).sum() for r in results).backward()
        return [tensor.grad for tensor in tensors]

    ours = grads(pool.map(lambda x: net(x) * constant, items(30)))
    theirs = grads([net(x) * constant for x in items(30)])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_module_as_the_function(pool: mpgrad.Pool) -> None:
    assert_same_as_serial(torch.nn.Linear(3, 2).double(), items(), pool)


def test_frozen_and_shared_parameters(pool: mpgrad.Pool) -> None:
    first, second = torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 3).double()
    second.weight = first.weight
    first.bias.requires_grad_(False)
    net = torch.nn.Sequential(first, second)
    ((same, frozen),) = pool.map(
        lambda x: (net[0].weight is net[1].weight, net[0].bias.requires_grad), [0]
    )
    assert same and not frozen
    assert_same_as_serial(lambda x: net(x), items(), pool)


def test_a_capture_that_only_some_items_use(pool: mpgrad.Pool) -> None:
    used, unused = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 100:
            return x * unused
        return x * used if x.shape[0] % 2 else x * 1

    assert_same_as_serial(fn, items(), pool)
    sum(r.sum() for r in pool.map(fn, items())).backward()
    assert unused.grad is None and used.grad is not None


def test_captures_without_items_that_need_gradients(pool: mpgrad.Pool) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    results = pool.map(lambda k: weight * k, range(10))
    sum(results).backward()
    assert weight.grad == 45


def test_captures_changed_between_maps(pool: mpgrad.Pool) -> None:
    weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = sum(
            pool.map(lambda x: ((weight - x) ** 2).sum(), [torch.ones(3), torch.full((3,), 3.0)])
        )
        loss.backward()
        optimizer.step()
    expected = torch.zeros(3, dtype=torch.float64)
    for _ in range(5):
        expected = expected - 0.1 * (2 * (expected - 1) + 2 * (expected - 3))
    torch.testing.assert_close(weight.detach(), expected)


def test_data_written_behind_autograds_back_is_seen(pool2: mpgrad.Pool) -> None:
    weight = torch.ones(2)
    fn = lambda x: x * weight  # noqa: E731
    assert pool2.map(fn, [1])[0].tolist() == [1, 1]
    weight.data[0] = 5  # leaves the version counter as it was
    assert pool2.map(fn, [1])[0].tolist() == [5, 1]


def test_each_capture_is_placed_once_a_map(pool2: mpgrad.Pool) -> None:
    weight = torch.randn(1000, 1000, requires_grad=True)
    before = pool2.stats()
    results = pool2.map(lambda k: (weight * k).sum(), range(64))
    after = pool2.stats()
    assert after.bytes_copied - before.bytes_copied < 1.01 * weight.nbytes
    assert after.slots_made - before.slots_made == 1
    sum(results).backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, sum(range(64))))


def test_capture_gradients_come_as_one_sum_a_worker(pool2: mpgrad.Pool) -> None:
    weight = torch.randn(200, 200, requires_grad=True)
    results = pool2.map(lambda k: weight * k, range(50), 1)
    backwards = pool2.stats().backwards
    with pool2.timeline() as timeline:
        sum(r.sum() for r in results).backward()
    assert 1 <= sum(event.get("name") == "sums of gradients" for event in timeline.events) <= 2
    assert torch.equal(weight.grad, torch.full_like(weight, sum(range(50))))  # type: ignore[arg-type]
    # no call is asked again for its part: the sums have all of them
    assert pool2.stats().backwards == backwards + 50


def test_writing_into_a_capture_warns_and_stays_in_the_worker(pool: mpgrad.Pool) -> None:
    norm = torch.nn.BatchNorm1d(3)
    before = norm.running_mean.clone()
    with pytest.warns(UserWarning, match="wrote into a tensor that it captures"):
        results = pool.map(norm, [torch.randn(5, 3) for _ in range(4)])
    assert torch.equal(norm.running_mean, before)
    assert len(results) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.map(norm.eval(), [torch.randn(5, 3) for _ in range(4)])


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_write_into_a_capture_is_not_seen_by_others(pool: mpgrad.Pool, size: int) -> None:
    state = torch.zeros(size)

    def fn(k: int) -> float:
        state[0] += 1
        return float(state[1])

    with pytest.warns(UserWarning, match="wrote into a tensor"):
        assert pool.map(fn, range(8)) == [0.0] * 8
    assert float(state[0]) == 0
    (fresh,) = pool.map(lambda k: float(state[0]), [0])
    assert fresh == 0


def test_partial_backwards_add_up(pool: mpgrad.Pool) -> None:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    results = pool.map(lambda x: (x * weight).exp().sum(), items(6))
    reference = [(x * weight).exp().sum() for x in items(6)]
    for kind in (results, reference):
        kind.reverse()
    ours, theirs = [], []
    for outputs, grads in ((results, ours), (reference, theirs)):
        for output in outputs:
            weight.grad = None
            output.backward()
            grads.append(weight.grad)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_a_backward_into_captures_warns_that_it_stays_there(pool: mpgrad.Pool) -> None:
    weight = torch.ones(2, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        return x.detach() * 2

    with pytest.warns(
        UserWarning, match=r"wrote into a tensor that it captures, or into its \.grad"
    ):
        pool.map(fn, [torch.ones(2)])
    assert weight.grad is None


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


def test_failed_backwards_with_captures_leave_little(pool: mpgrad.Pool) -> None:
    """Symptom: memory in caller and workers for every backward that failed. Cause: what would be
    collected at its end."""
    c = torch.ones(3, requires_grad=True)
    xs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    results = pool.map(lambda x: x * c, xs)

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("by hook")

    handle = xs[0].register_hook(fails)
    for _ in range(300):
        with pytest.raises(ValueError, match="by hook"):
            sum(y.sum() for y in results).backward(retain_graph=True)
    assert sums_kept(results[0]) <= 257
    handle.remove()
    c.grad = None
    sum(y.sum() for y in results).backward()
    assert torch.equal(c.grad, torch.full((3,), 2.0))


def forgets_its_next_sum() -> None:
    CaptureSums: Any = importlib.import_module("mpgrad.workers.functions").CaptureSums
    add = CaptureSums.add

    def forgets(self: Any, grads: Any) -> None:
        CaptureSums.add = add

    CaptureSums.add = forgets


def test_a_sum_of_capture_gradients_that_lacks_calls(fork_server: mpgrad.Pool) -> None:
    # symptom: no gradient, silently. cause: of how many calls a sum is was looked at only for
    # backwards that were eager.
    weight = torch.linspace(1, 2, 3, requires_grad=True)
    xs = [torch.ones(3), torch.full((3,), 2.0)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (weight * x).sin().sum()

    with mpgrad.Pool(1, graphs="keep") as pool:
        pool.apply(forgets_its_next_sum)
        (2 * sum(pool.map(fn, xs))).backward()
    (expected,) = torch.autograd.grad(2 * sum(fn(x) for x in xs), [weight])
    torch.testing.assert_close(weight.grad, expected)


def test_recursive_functions_give_their_captures_back(fresh_pool: mpgrad.Pool) -> None:
    # symptom: 1 MB a map stayed in the worker. cause: the function is a cycle, which waits for the
    # garbage collector.
    weight = torch.ones(1 << 20)

    def recursive(n: int) -> float:
        return recursive(n - 1) if n else float(weight[0])

    for _ in range(60):
        assert fresh_pool.map(recursive, [2]) == [1.0]
        gc.collect()
    assert lent_slots(fresh_pool) < 40  # 64 MiB before a worker collects, 4 MiB a map, two workers
