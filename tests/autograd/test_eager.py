"""Eager backwards whose graphs are gone: whatever becomes of the losses, values and gradients are
those of the serial loop."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import PATIENCE, first_are_quick, in_turn, staffed
from inside import every_loss_gets
from test_auto import Clipped
from torch.utils._pytree import tree_leaves

import mpgrad
from mpgrad.testing import assert_same_as_serial

Tensor = torch.Tensor
Loop = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64, requires_grad=True)


def loss(x: Tensor) -> Tensor:
    return ((x.sin() * weight).exp().sum() - 1) ** 2


def items(count: int = 12) -> list[Tensor]:
    return [
        torch.linspace(-1, 1 + i, 5, dtype=torch.float64, requires_grad=True) for i in range(count)
    ]


@pytest.fixture(
    scope="module",
    params=first_are_quick(1, [{}, {"deterministic": True}, {"graph_memory": "1 MiB"}]),
    ids=str,
)
def pool(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    """For tests that do not hurt it."""
    with every_loss_gets(1.0), mpgrad.Pool(2, **request.param) as pool:
        yield staffed(pool)  # before the first test, which looks for what it leaves


@pytest.fixture
def own_pool(fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with every_loss_gets(1.0), mpgrad.Pool(2) as pool:
        yield pool


def gradients(
    loop: Loop, combine: Callable[[list[Tensor]], Tensor], function: Callable[[Any], Any] = loss
) -> list[Any]:
    xs = items()
    total = combine(loop(function, xs))
    return [total.detach(), *torch.autograd.grad(total, [*xs, weight], allow_unused=True)]


def serial(function: Callable[[Any], Any], xs: Sequence[Any]) -> list[Any]:
    return [function(x) for x in xs]


COMBINATIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda losses: torch.stack(losses).sum(),
    "mean": lambda losses: torch.stack(losses).mean(),
    "weighted": lambda losses: sum(i * each for i, each in enumerate(losses)),  # type: ignore[arg-type, return-value]
    "some": lambda losses: losses[3] + losses[7],
    "square": lambda losses: torch.stack(losses).sum() ** 2,
    "one": lambda losses: losses[-1],
}


def clipped(x: Tensor) -> Tensor:
    return loss(Clipped.apply(x))  # type: ignore[no-untyped-call]


def hooked(x: Tensor) -> Tensor:
    inner = x.sin() * 1
    inner.register_hook(lambda grad: grad.clamp(-0.3, 0.3))
    return loss(inner)


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("function", [loss, clipped, hooked])
def test_gradients_whatever_becomes_of_the_losses(
    pool: mpgrad.Pool, name: str, function: Callable[[Tensor], Tensor]
) -> None:
    """Bit for bit, but for the sums of a capture's gradients."""
    *found, of_weight = gradients(pool.map, COMBINATIONS[name], function)
    *expected, right = gradients(serial, COMBINATIONS[name], function)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(of_weight, right)


def are_there(pool: mpgrad.Pool) -> bool:
    return any(worker.graphs for worker in pool.stats().workers)


def test_graphs_are_gone(own_pool: mpgrad.Pool) -> None:
    """But for those with a hook on a tensor, which is to be called when the caller's backward
    comes."""
    for function, name in [(loss, "map"), (clipped, "map"), (hooked, "map"), (loss, "imap")]:
        losses = list(getattr(own_pool, name)(function, items()))
        deadline = time.monotonic() + PATIENCE
        # those of the map before it may still have to go
        while are_there(own_pool) != (function is hooked):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        del losses


def test_hooks_that_calls_put_on_a_capture_are_all_there_for_each_backward(
    fork_server: mpgrad.Pool,
) -> None:
    def gradient(loop: Loop) -> Tensor:
        own = weight.detach().clone().requires_grad_()

        def doubling(x: Tensor) -> Tensor:
            own.register_hook(lambda grad: grad * 2)
            return (own * x).sum()

        (found,) = torch.autograd.grad(torch.stack(loop(doubling, items(3))).sum(), own)
        return found

    with every_loss_gets(1.0), mpgrad.Pool(1) as pool:
        assert torch.equal(gradient(pool.map), gradient(serial))


@pytest.mark.parametrize(("how_many", "combination"), in_turn([1, 2], ["sum", "weighted"]))
def test_deaths_after_the_forward(own_pool: mpgrad.Pool, combination: str, how_many: int) -> None:
    def lossy(function: Callable[[Any], Any], xs: Sequence[Any]) -> list[Any]:
        losses = own_pool.map(function, xs)
        for worker in own_pool.stats().workers[:how_many]:
            os.kill(worker.pid, signal.SIGKILL)
        return losses

    found, expected = (gradients(loop, COMBINATIONS[combination]) for loop in (lossy, serial))
    torch.testing.assert_close(found, expected)


def test_a_replaced_worker_hands_over_its_sums_first(fork_server: mpgrad.Pool) -> None:
    with every_loss_gets(1.0), mpgrad.Pool(2, maxtasksperchild=2) as pool:
        found, expected = (gradients(loop, COMBINATIONS["sum"]) for loop in (pool.map, serial))
        torch.testing.assert_close(found, expected)
        assert pool.stats().reruns == 0


def test_retained_and_repeated(pool: mpgrad.Pool) -> None:
    def run(loop: Loop) -> list[Any]:
        xs = items()
        weight.grad = None
        total = torch.stack(loop(loss, xs)).sum()
        total.backward(retain_graph=True)
        held = [x.grad for x in xs]
        total.backward(retain_graph=True)
        assert all(x.grad is each for x, each in zip(xs, held, strict=True))  # added up in place
        total.backward()
        found, weight.grad = weight.grad, None
        return [*(x.grad for x in xs), found]

    torch.testing.assert_close(run(pool.map), run(serial))


@pytest.mark.parametrize("factor", [1, 3])
def test_one_backward_per_item(pool: mpgrad.Pool, factor: int) -> None:
    def run(loop: Callable[..., Any]) -> list[Any]:
        xs = items()
        weight.grad = None
        for each in loop(loss, xs):
            (each * factor).backward()
        found, weight.grad = weight.grad, None
        return [*(x.grad for x in xs), found]

    expected = run(serial)
    torch.testing.assert_close(run(pool.map), expected)
    torch.testing.assert_close(run(pool.imap), expected)


def test_submitted_calls(pool: mpgrad.Pool) -> None:
    def run(call: Callable[..., Any], value: Callable[[Any], Any]) -> Any:
        xs = items(4)
        first = [call(loss, x) for x in xs]
        # losses passed on
        scaled = [call(lambda a, x: (a * x).sum(), a, x) for a, x in zip(first, xs, strict=True)]
        total = sum(map(value, [*scaled, first[0]]))
        return torch.autograd.grad(total, [*xs, weight])

    found = run(pool.submit, lambda future: future.result())
    torch.testing.assert_close(found, run(lambda fn, *args: fn(*args), lambda value: value))


def test_derivatives_of_derivatives(pool: mpgrad.Pool) -> None:
    assert_same_as_serial(loss, items(4), pool, order=3)
    assert torch.autograd.gradcheck(
        lambda *xs: sum(pool.map(loss, xs)), items(3), check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(lambda *xs: sum(pool.map(loss, xs)), items(2))


def test_errors_in_the_place_of_results(pool: mpgrad.Pool) -> None:
    def picky(x: Tensor) -> Tensor:
        if x[-1] > 3:
            raise ValueError("too large")
        return loss(x)

    xs = items(6)
    results = pool.map(picky, xs, on_error="return")
    good = [each for each in results if isinstance(each, Tensor)]
    assert len(good) == 3 and len(results) == 6
    found = torch.autograd.grad(torch.stack(good).sum(), [*xs[:3], weight])
    torch.testing.assert_close(
        found, torch.autograd.grad(sum(map(loss, xs[:3])), [*xs[:3], weight])
    )


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "not a scalar": lambda x: x * weight,
    "several": lambda x: (x.sum(), (x * weight).sum()),
    "one of two": lambda x: {"loss": (x * weight).sum(), "value": x.detach() * 2},
    "one element": lambda x: (x * weight).sum().reshape(1, 1),
    "complex": lambda x: torch.complex(x.sum(), weight.prod()),
    "half": lambda x: (x * weight).sum().half(),
    "no gradient": lambda x: x.detach().sum(),
    "only a capture": lambda x: (weight * x.detach()).sum(),
    "itself": lambda x: x[2],
    "nothing of it": lambda x: (x * 0).sum() + 1,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("gradient", first_are_quick(1, [1.0, 3.0]))
def test_results_of_other_kinds(pool: mpgrad.Pool, name: str, gradient: float) -> None:
    def run(loop: Loop) -> list[Any]:
        xs = items(5)
        results = tree_leaves(loop(OTHERS[name], xs))
        outputs = [each for each in results if each.requires_grad]
        into = [
            torch.linspace(gradient, 1, each.numel(), dtype=each.dtype).reshape(each.shape)
            for each in outputs
        ]
        found = (
            torch.autograd.grad(outputs, [*xs, weight], into, allow_unused=True) if outputs else ()
        )
        return [*(each.detach() for each in results), *found]

    for ours, theirs in zip(run(pool.map), run(serial), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_and_autocast(own_pool: mpgrad.Pool) -> None:
    """With a gradient of 1 the gradient below is zero in half precision; scaling the loss is there
    to prevent that."""
    small = torch.tensor(2.0**-24, dtype=torch.float16)

    def run(loop: Loop) -> list[Tensor]:
        xs = [torch.ones(3, dtype=torch.float16, requires_grad=True) for _ in range(3)]
        losses = loop(lambda x: (x * small * small).sum().float(), xs)
        return list(torch.autograd.grad(torch.stack(losses).sum() * 2.0**20, xs))

    found, expected = run(own_pool.map), run(serial)
    assert all(map(torch.equal, found, expected)) and all(each.all() for each in found)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_as_serial(
            lambda x: (x @ x.T).float().sum(), [torch.ones(3, 3, requires_grad=True)], own_pool
        )


@pytest.mark.parametrize("combination", ["sum", "weighted"])
def test_dropout_and_seeds(pool: mpgrad.Pool, combination: str) -> None:
    """A graph that is made again has the numbers that the value has."""

    def noisy(x: Tensor) -> Tensor:
        return (torch.nn.functional.dropout(x) * random.random() * weight).sum()

    def run(graphs: float | None) -> list[Any]:
        torch.manual_seed(3)
        with every_loss_gets(graphs):
            return gradients(pool.map, COMBINATIONS[combination], noisy)

    torch.testing.assert_close(run(1.0), run(None))


def test_the_caller_may_write_to_what_was_not_saved(own_pool: mpgrad.Pool) -> None:
    """A gradient that was computed early is that of the values then; the serial loop raises, or has
    not saved them."""
    xs = items(3)
    losses = own_pool.map(lambda x: (x * 3).sum(), xs)
    with torch.no_grad():
        for x in xs:
            x.zero_()
    torch.stack(losses).sum().backward()
    assert all(torch.equal(x.grad, torch.full_like(x, 3)) for x in xs if x.grad is not None)


def test_large_gradients_lie_in_shared_memory_and_are_given_back(own_pool: mpgrad.Pool) -> None:
    xs = [torch.rand(1 << 18, requires_grad=True) for _ in range(6)]
    for _ in range(20):
        torch.stack(own_pool.map(lambda x: (x * x).sum(), xs)).sum().backward()
    assert all(torch.allclose(x.grad, 40 * x) for x in xs if x.grad is not None)
    # inputs and gradients of the last two maps, perhaps
    assert own_pool.stats().shared_bytes < 5 * sum(x.nbytes for x in xs)


@pytest.mark.parametrize("seed", first_are_quick(4, range(12)))
def test_random_losses(pool: mpgrad.Pool, seed: int) -> None:
    """Random weights of random subsets, backward in random pieces."""
    draw = random.Random(seed)
    weights = [draw.choice([0, 1, 1, 1, 2, -0.5]) for _ in range(12)]
    cut = draw.randrange(13)
    kept = draw.random() < 0.5

    def run(loop: Loop) -> list[Any]:
        xs, found = items(), []
        losses = loop(loss, xs)
        for part in (range(cut), range(cut, 12)):
            if part:
                total = sum(weights[i] * losses[i] for i in part)
                for keep in (True, False) if kept else (False,):
                    found += torch.autograd.grad(
                        total, [*xs, weight], retain_graph=keep, allow_unused=True
                    )
        return found

    for ours, theirs in zip(run(pool.map), run(serial), strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_sparse_gradients_do_not_share_memory_with_what_is_written_to(
    own_pool: mpgrad.Pool,
) -> None:
    table = torch.ones(4, 3, requires_grad=True)
    kept: dict[str, torch.Tensor] = {}

    def embedded(row: int) -> torch.Tensor:
        rows = kept.setdefault("rows", torch.zeros(2, dtype=torch.long)).fill_(row)
        return torch.nn.functional.embedding(rows, table, sparse=True).sum()

    torch.stack(own_pool.map(embedded, [0, 1, 2, 3] * 4, 1)).sum().backward()
    assert table.grad is not None
    assert table.grad.to_dense()[:, 0].tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2), ()], ids=str)
@pytest.mark.parametrize("ask", ["map", "imap", "submit"])
def test_arguments_that_are_not_used(pool: mpgrad.Pool, ask: str, used: tuple[int, ...]) -> None:
    """No gradient comes to them, and none of theirs to others."""

    def some(item: Sequence[Tensor]) -> Tensor:
        return (weight * sum(item[k] ** (k + 2) for k in used)).sum() + weight.prod()

    loops: dict[str, Loop] = {
        "map": pool.map,
        "imap": lambda function, xs: list(pool.imap(function, xs)),
        "submit": lambda function, xs: [
            each.result() for each in [pool.submit(function, x) for x in xs]
        ],
    }

    def found(loop: Loop) -> list[Any]:
        leaves = [
            torch.full((5,), 1.0 + k, dtype=torch.float64, requires_grad=True) for k in range(3)
        ]
        total = sum(loop(some, [[leaf * (1 + i) for leaf in leaves] for i in range(4)]))
        return list(torch.autograd.grad(total, [*leaves, weight], allow_unused=True))  # type: ignore[arg-type]

    for ours, theirs in zip(found(loops[ask]), found(serial), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunksize", [None, 1])
def test_items_that_give_no_loss_leave_nothing_in_the_sums_of_others(
    fork_server: mpgrad.Pool, chunksize: int | None
) -> None:
    captured = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def mostly(x: Tensor) -> Tensor:
        loss = (x * captured).sum()
        return loss.detach() if x[0] < 0 else loss

    xs = [torch.ones(3, dtype=torch.float64) for _ in range(192)]
    xs[150] = -xs[150]
    with every_loss_gets(1.0), mpgrad.Pool(1) as pool:
        losses = [each for each in pool.map(mostly, xs, chunksize) if each.requires_grad]
        assert len(losses) == 191
        sum(losses).backward()  # type: ignore[union-attr]
    assert captured.grad is not None and captured.grad.tolist() == [191.0] * 3


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, 100 << 20))


def test_a_call_that_fails_after_its_backward_leaves_nothing_in_the_sums_of_others(
    fork_server: mpgrad.Pool,
) -> None:
    captured = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def large(item: tuple[Tensor, int]) -> tuple[Tensor, Tensor]:
        x, count = item
        return (x * captured).sum(), torch.empty(count, dtype=torch.uint8)

    is_large = [i == 2 for i in range(5)]
    xs = [
        (torch.full((3,), 99.0 if large else 1.0, dtype=torch.float64), 150 << 20 if large else 1)
        for large in is_large
    ]
    with every_loss_gets(1.0), mpgrad.Pool(1, limit_files) as pool:
        results = pool.map(large, xs, on_error="return")
        assert [isinstance(each, mpgrad.SharedMemoryError) for each in results] == is_large
        sum(each[0] for each in results if isinstance(each, tuple)).backward()  # type: ignore[union-attr]
    assert captured.grad is not None and captured.grad.tolist() == [4.0] * 3


@pytest.mark.quick
def test_eager_backwards_in_several_threads(fork_server: mpgrad.Pool) -> None:
    """Symptom: an AssertionError, or "zip() argument 2 is shorter". Cause: all asked the workers
    for their sums, which are given once, and who came last had an empty one take the place of the
    other."""
    weight = torch.ones(2, requires_grad=True)
    with (
        every_loss_gets(1.0),
        mpgrad.Pool(2) as pool,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        for _ in range(5):
            loss = torch.stack(pool.map(lambda x: (x * weight).sum(), [torch.ones(2)] * 8)).sum()
            start = threading.Barrier(4)

            def backward(loss: Tensor = loss, start: threading.Barrier = start) -> list[float]:
                start.wait()
                (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
                return found.tolist()

            found = [threads.submit(backward) for _ in range(4)]
            assert [each.result() for each in found] == [[8, 8]] * 4


@pytest.mark.quick
def test_gradients_of_a_worker_that_died_are_not_those_of_its_heir(
    fork_server: mpgrad.Pool,
) -> None:
    """Symptom: with one worker dead, the gradient of two losses was that of two others. Cause:
    whose sum a loss is part of was asked of its graph, which had moved; as many as the heir had
    added up were taken for those that it had."""
    weight = torch.ones((), requires_grad=True)
    with every_loss_gets(1.0), mpgrad.Pool(2) as pool:
        losses = pool.map(lambda x: weight * x, [1.0, 10.0, 100.0, 1000.0], chunksize=2)
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
        while not pool.stats().deaths:
            time.sleep(0.01)
        for some in itertools.combinations(losses, 2):
            (found,) = torch.autograd.grad(sum(some), weight, retain_graph=True)
            assert found == sum(some)
