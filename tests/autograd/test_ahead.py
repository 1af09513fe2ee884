"""`graphs="ahead"`: backwards right after their forwards, against the serial loop."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import first_are_quick
from torch.utils._pytree import tree_leaves

import mpgrad
from mpgrad.testing import assert_same_as_serial

Tensor = torch.Tensor
Loop = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64, requires_grad=True)
counter = torch.zeros((), dtype=torch.float64, requires_grad=True)


def loss(x: Tensor) -> Tensor:
    return ((x.sin() * weight).exp().sum() - 1) ** 2


def items(count: int = 12) -> list[Tensor]:
    return [torch.linspace(-1, 1 + i, 5, dtype=torch.float64, requires_grad=True) for i in range(count)]


@pytest.fixture(params=first_are_quick(2, [{}, {"engine": "inline"}, {"engine": "thread"}, {"deterministic": True}]), ids=str)
def ahead(request: pytest.FixtureRequest, nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(2, graphs="ahead", **request.param) as pool:
        yield pool


@pytest.fixture
def ahead2(nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(2, graphs="ahead") as pool:
        yield pool


def gradients(loop: Loop, combine: Callable[[list[Tensor]], Tensor], function: Callable[[Any], Any] = loss) -> list[Any]:
    xs = items()
    total = combine(loop(function, xs))
    return [total.detach(), *torch.autograd.grad(total, [*xs, weight], allow_unused=True)]


def serial(function: Callable[[Any], Any], xs: Sequence[Any]) -> list[Any]:
    return [function(x) for x in xs]


COMBINATIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda losses: torch.stack(losses).sum(),
    "mean": lambda losses: torch.stack(losses).mean(),
    "half of it": lambda losses: torch.stack(losses).sum() / 2,
    "weighted": lambda losses: sum(i * each for i, each in enumerate(losses)),  # type: ignore[arg-type, return-value]
    "some": lambda losses: losses[3] + losses[7],
    "square": lambda losses: torch.stack(losses).sum() ** 2,
    "one": lambda losses: losses[-1],
}


class Clipped(torch.autograd.Function):
    """An identity whose backward is no multiplication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.3, 0.3)


def clipped_by_a_hook(x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda grad: grad.clamp(-0.3, 0.3))
    return x


def clipped(x: Tensor) -> Tensor:
    return loss(Clipped.apply(x))


def hooked(x: Tensor) -> Tensor:
    return loss(clipped_by_a_hook(x.sin()))


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("function", first_are_quick(1, [loss, clipped, hooked]))
def test_gradients_whatever_becomes_of_the_losses(ahead: mpgrad.Pool, name: str, function: Callable[[Tensor], Tensor]) -> None:
    if function is hooked and ahead._options.engine != "process" and name not in ("sum", "some", "one"):
        pytest.skip("docs/guarantees.md: with these engines hooks are not noticed")
    exact = name in ("sum", "some", "one", "half of it")  # factors that are powers of two
    for _ in range(2):  # what other gradients come to is remembered
        found, expected = (gradients(loop, COMBINATIONS[name], function) for loop in (ahead.map, serial))
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            is_capture = number == len(found) - 1
            torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if exact and not is_capture else {}))


@pytest.mark.parametrize("clip", [Clipped.apply, clipped_by_a_hook])
def test_a_backward_that_clips(ahead2: mpgrad.Pool, clip: Callable[[Tensor], Tensor]) -> None:
    """Symptom: a gradient of 0.03 where the serial loop's is 0.1. Cause: gradients that came with a loss were multiplied by the
    one that came, though the function's backward was not linear in that."""
    x = torch.ones(2, requires_grad=True)
    (found,) = torch.autograd.grad(ahead2.map(lambda x: clip(x).sum(), [x])[0] / 10, x)
    assert found.tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("function", [loss, clipped, hooked])
@pytest.mark.parametrize("name", first_are_quick(1, ["map", "imap"]))
def test_what_may_do_more_than_multiply_is_run_ahead_for_gradients_of_one(
    ahead2: mpgrad.Pool, name: str, function: Callable[[Tensor], Tensor]
) -> None:
    """And no longer once others have come."""

    def keeps_graphs(factor: float) -> bool:
        losses = list(getattr(ahead2, name)(function, items()))
        kept = sum(worker.graphs for worker in ahead2.stats().workers)
        torch.autograd.backward(losses, [torch.full((), factor, dtype=torch.float64)] * len(losses))
        return kept > 0

    assert not keeps_graphs(1) and not keeps_graphs(0.5)
    assert keeps_graphs(0.5) == keeps_graphs(1) == (function is not loss)


def test_what_is_learned_of_one_closure_holds_for_the_next(ahead2: mpgrad.Pool) -> None:
    """What it holds may change with every step; and a call is not to be run twice in each."""

    def keeps_graphs(step: float) -> bool:
        losses = ahead2.map(lambda x: clipped(x) * step, items())
        kept = sum(worker.graphs for worker in ahead2.stats().workers)
        torch.stack(losses).mean().backward()
        return kept > 0

    assert [keeps_graphs(step) for step in (1.0, 0.9, 0.8)] == [False, True, True]


def test_hooks_that_calls_put_on_a_capture_are_all_there_for_each_backward(nursery: mpgrad.Pool) -> None:
    def gradient(loop: Loop) -> Tensor:
        own = weight.detach().clone().requires_grad_()

        def doubling(x: Tensor) -> Tensor:
            own.register_hook(lambda grad: grad * 2)
            return (own * x).sum()

        (found,) = torch.autograd.grad(torch.stack(loop(doubling, items(3))).sum(), own)
        return found

    with mpgrad.Pool(1, graphs="ahead") as pool:
        assert torch.equal(gradient(pool.map), gradient(serial))


def test_nothing_is_kept_and_no_second_trip_is_made(ahead2: mpgrad.Pool) -> None:
    xs = items()
    losses = ahead2.map(lambda x: x.square().sum(), xs)
    workers = ahead2.stats().workers
    assert sum(worker.graphs for worker in workers) == 0
    for worker in workers:  # what they had to do is done
        os.kill(worker.pid, signal.SIGSTOP)
    try:
        torch.stack(losses).sum().backward()
    finally:
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)
    assert all(torch.equal(x.grad, 2 * x) for x in xs if x.grad is not None)


@pytest.mark.parametrize("combination", ["sum", "weighted"])
@pytest.mark.parametrize("how_many", first_are_quick(1, [1, 2]))
def test_deaths_after_the_forward(ahead2: mpgrad.Pool, combination: str, how_many: int) -> None:
    def lossy(function: Callable[[Any], Any], xs: Sequence[Any]) -> list[Any]:
        losses = ahead2.map(function, xs)
        for worker in ahead2.stats().workers[:how_many]:
            os.kill(worker.pid, signal.SIGKILL)
        return losses

    found, expected = (gradients(loop, COMBINATIONS[combination]) for loop in (lossy, serial))
    torch.testing.assert_close(found, expected)


def test_a_replaced_worker_hands_over_its_sums_first(nursery: mpgrad.Pool) -> None:
    with mpgrad.Pool(2, graphs="ahead", maxtasksperchild=2) as pool:
        found, expected = (gradients(loop, COMBINATIONS["sum"]) for loop in (pool.map, serial))
        torch.testing.assert_close(found, expected)
        assert pool.stats().reruns == 0


def test_retained_and_repeated(ahead: mpgrad.Pool) -> None:
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

    torch.testing.assert_close(run(ahead.map), run(serial))


def test_one_backward_per_item(ahead: mpgrad.Pool) -> None:
    def run(loop: Callable[..., Any]) -> list[Any]:
        xs = items()
        weight.grad = None
        for each in loop(loss, xs):
            (each * 3).backward()
        found, weight.grad = weight.grad, None
        return [*(x.grad for x in xs), found]

    torch.testing.assert_close(run(ahead.map), run(serial))
    torch.testing.assert_close(run(ahead.imap), run(serial))


def test_submitted_calls(ahead: mpgrad.Pool) -> None:
    def run(call: Callable[..., Any], value: Callable[[Any], Any]) -> Any:
        xs = items(4)
        first = [call(loss, x) for x in xs]
        scaled = [call(lambda a, x: (a * x).sum(), a, x) for a, x in zip(first, xs, strict=True)]  # losses passed on
        total = sum(map(value, [*scaled, first[0]]))
        return torch.autograd.grad(total, [*xs, weight])

    found = run(ahead.submit, lambda future: future.result())
    torch.testing.assert_close(found, run(lambda fn, *args: fn(*args), lambda value: value))


def test_derivatives_of_derivatives(ahead: mpgrad.Pool) -> None:
    assert_same_as_serial(loss, items(4), ahead, order=3)
    assert torch.autograd.gradcheck(lambda *xs: sum(ahead.map(loss, xs)), items(3), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda *xs: sum(ahead.map(loss, xs)), items(2))


class Unwilling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


def test_an_error_of_the_backward_is_raised_by_the_backward(ahead: mpgrad.Pool) -> None:
    results = ahead.map(lambda x: Unwilling.apply(x), items(3))  # type: ignore[no-untyped-call]
    assert [each.item() for each in results] == [each.sum().item() for each in items(3)]
    with pytest.raises(ArithmeticError, match="no gradient today") as caught:
        results[1].backward()
    assert "item 1" in "".join(caught.value.__notes__)
    found, expected = (gradients(loop, COMBINATIONS["sum"]) for loop in (ahead.map, serial))
    torch.testing.assert_close(found, expected)


def test_errors_in_the_place_of_results(ahead: mpgrad.Pool) -> None:
    def picky(x: Tensor) -> Tensor:
        if x[-1] > 3:
            raise ValueError("too large")
        return loss(x)

    xs = items(6)
    results = ahead.map(picky, xs, on_error="return")
    good = [each for each in results if isinstance(each, Tensor)]
    assert len(good) == 3 and len(results) == 6
    found = torch.autograd.grad(torch.stack(good).sum(), [*xs[:3], weight])
    torch.testing.assert_close(found, torch.autograd.grad(sum(map(loss, xs[:3])), [*xs[:3], weight]))


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
def test_results_of_other_kinds(ahead: mpgrad.Pool, name: str) -> None:
    def run(loop: Loop) -> list[Any]:
        xs = items(5)
        results = tree_leaves(loop(OTHERS[name], xs))
        outputs = [each for each in results if each.requires_grad]
        into = [torch.linspace(-1, 2, each.numel(), dtype=each.dtype).reshape(each.shape) for each in outputs]
        found = torch.autograd.grad(outputs, [*xs, weight], into, allow_unused=True) if outputs else ()
        return [*(each.detach() for each in results), *found]

    for ours, theirs in zip(run(ahead.map), run(serial), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_and_autocast_wait_for_the_gradient_that_comes(ahead2: mpgrad.Pool) -> None:
    """With a gradient of 1 the gradient below is zero in half precision; scaling the loss is there to prevent that."""
    small = torch.tensor(2.0**-24, dtype=torch.float16)

    def run(loop: Loop) -> list[Tensor]:
        xs = [torch.ones(3, dtype=torch.float16, requires_grad=True) for _ in range(3)]
        losses = loop(lambda x: (x * small * small).sum().float(), xs)
        return list(torch.autograd.grad(torch.stack(losses).sum() * 2.0**20, xs))

    found, expected = run(ahead2.map), run(serial)
    assert all(map(torch.equal, found, expected)) and all(each.all() for each in found)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_as_serial(lambda x: (x @ x.T).float().sum(), [torch.ones(3, 3, requires_grad=True)], ahead2)


def test_dropout_and_seeds(ahead: mpgrad.Pool) -> None:
    def noisy(x: Tensor) -> Tensor:
        return (torch.nn.functional.dropout(x) * random.random() * weight).sum()

    if "thread" in repr(ahead):
        return  # threads share the process's generators
    xs = items(6)
    torch.manual_seed(3)
    values = ahead.map(noisy, xs)
    torch.manual_seed(3)
    again = ahead.map(noisy, xs)
    assert values == again
    combined = [sum(i * each for i, each in enumerate(losses)) for losses in (values, again)]  # has them run again
    torch.testing.assert_close(*[torch.autograd.grad(each, [*xs, weight]) for each in combined], rtol=0, atol=1e-12)


def test_the_caller_may_write_to_what_was_not_saved(ahead2: mpgrad.Pool) -> None:
    """A gradient that was computed ahead is that of the values then; the serial loop raises, or has not saved them."""
    xs = items(3)
    losses = ahead2.map(lambda x: (x * 3).sum(), xs)
    with torch.no_grad():
        for x in xs:
            x.zero_()
    torch.stack(losses).sum().backward()
    assert all(torch.equal(x.grad, torch.full_like(x, 3)) for x in xs if x.grad is not None)


def test_large_gradients_lie_in_shared_memory_and_are_given_back(ahead2: mpgrad.Pool) -> None:
    xs = [torch.rand(1 << 18, requires_grad=True) for _ in range(6)]
    for _ in range(20):
        torch.stack(ahead2.map(lambda x: (x * x).sum(), xs)).sum().backward()
    assert all(torch.allclose(x.grad, 40 * x) for x in xs if x.grad is not None)
    assert ahead2.stats().shared_bytes < 5 * sum(x.nbytes for x in xs)  # inputs and gradients of the last two maps, perhaps


def test_random_losses(ahead: mpgrad.Pool) -> None:
    """Random weights of random subsets, backward in random pieces."""
    for seed in range(12):
        draw = random.Random(seed)
        weights = [draw.choice([0, 1, 1, 1, 2, -0.5]) for _ in range(12)]
        cut = draw.randrange(13)
        kept = draw.random() < 0.5

        def run(loop: Loop, weights: list[float] = weights, cut: int = cut, kept: bool = kept) -> list[Any]:
            xs, found = items(), []
            losses = loop(loss, xs)
            for part in (range(cut), range(cut, 12)):
                if part:
                    total = sum(weights[i] * losses[i] for i in part)
                    for keep in (True, False) if kept else (False,):
                        found += torch.autograd.grad(total, [*xs, weight], retain_graph=keep, allow_unused=True)
            return found

        for ours, theirs in itertools.zip_longest(run(ahead.map), run(serial)):
            if ours is None or theirs is None:
                assert ours is theirs, seed
            else:
                torch.testing.assert_close(ours, theirs, msg=str(seed))


def test_sparse_gradients_do_not_share_memory_with_what_is_written_to(ahead2: mpgrad.Pool) -> None:
    table = torch.ones(4, 3, requires_grad=True)
    kept: dict[str, torch.Tensor] = {}

    def embedded(row: int) -> torch.Tensor:
        rows = kept.setdefault("rows", torch.zeros(2, dtype=torch.long)).fill_(row)
        return torch.nn.functional.embedding(rows, table, sparse=True).sum()

    torch.stack(ahead2.map(embedded, [0, 1, 2, 3] * 4, 1)).sum().backward()
    assert table.grad is not None
    assert table.grad.to_dense()[:, 0].tolist() == [8, 8, 8, 8]
