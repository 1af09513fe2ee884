"""Bugs that came with what makes maps fast, each with its symptom and its cause."""

from __future__ import annotations

import concurrent.futures
import itertools
import operator
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from conftest import every_loss_gets

import mpgrad

pytestmark = pytest.mark.quick

Tensor = torch.Tensor


def total(x: Tensor) -> Tensor:
    return x.sum()


def own(x: float) -> float:
    return x


def test_one_negated_number_in_all_places(pool: mpgrad.Pool) -> None:
    """Symptom: -2 came as 2, with no error. Cause: the way for expanded tensors left out what a
    lazy negation needs."""
    expanded = torch.tensor([1 + 2j]).conj().imag.expand(3)
    assert expanded.is_neg()
    (found,) = pool.map(lambda x: x * 1, [expanded], chunksize=1)
    assert found.tolist() == [-2, -2, -2]


def test_a_generator_that_writes_to_what_it_gave(pool2: mpgrad.Pool) -> None:
    """Symptom: every item had the last one's values. Cause: a map took 256 items before it copied
    the first of them."""

    def items() -> Iterator[Tensor]:
        buffer = torch.zeros(2)
        for i in range(600):
            yield buffer.fill_(i)

    for _ in range(5):
        pool2.map(total, [torch.ones(2)] * 50)
    assert pool2.map(total, items()) == [total(x) for x in items()]


def steps(state: Tensor) -> Iterator[Tensor]:
    """A program whose next state takes the place of the one before."""
    for _ in range(5):
        yield state.add_(1)


class Serial:
    """The loops that maps stand for."""

    map = staticmethod(lambda function, items: [function(item) for item in items])
    starmap = staticmethod(lambda function, items: [function(*item) for item in items])


WAYS: dict[str, Callable[[Any, Callable[[Tensor], Tensor], Tensor], list[Tensor]]] = {
    "map": lambda pool, function, state: pool.map(function, steps(state)),
    "a map object": lambda pool, function, state: pool.map(function, map(state.add_, range(5))),
    "rows": lambda pool, function, state: pool.map(function, (each[:2] for each in steps(state))),
    "starmap": lambda pool, function, state: pool.starmap(function, ((x,) for x in steps(state))),
    "zip": lambda pool, function, state: pool.starmap(function, zip(steps(state), strict=True)),
    "arguments": lambda pool, function, state: pool.starmap(
        function, [map(state.add_, [k]) for k in range(5)]
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_generator_that_writes_to_a_former_result(
    pool2: mpgrad.Pool, way: Callable[..., list[Tensor]]
) -> None:
    """Symptom: every item had the last one's values. Cause: former results were read where they
    lie, as the caller waits. But a generator runs the caller's code meanwhile."""
    weight = torch.tensor([1.5], requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return (x[:2].exp() * weight).sum()

    found = way(pool2, function, pool2.apply(torch.zeros, (5000,)))
    expected = way(Serial, function, torch.zeros(5000))
    assert found == expected
    of_pool, of_loop = (
        [torch.autograd.grad(x, weight) for x in each] for each in (found, expected)
    )
    assert of_pool == of_loop


def test_former_results_that_are_at_rest_are_read_where_they_lie(pool2: mpgrad.Pool) -> None:
    former = pool2.starmap(torch.full, [((5000,), 1.0), ((5000,), 2.0)])
    memory = pool2._scheduler.memory
    copied = memory.bytes_copied
    for items in (former, tuple(former), dict.fromkeys(former), iter(former)):
        pool2.map(total, items)
    for arguments in (
        [(x,) for x in former],
        [[x] for x in former],
        zip(former),
        zip(iter(former)),
    ):
        pool2.starmap(total, arguments)
    pool2.apply(total, former[:1])
    pool2.map_reduce(torch.neg, former, "sum")
    pool2.reduce(torch.add, former, former[0], associative=False)
    assert memory.bytes_copied == copied
    with forward_ad.dual_level():
        small = forward_ad.make_dual(torch.ones(()), torch.ones(()))
        pool2.starmap(torch.add, [(x, small) for x in former])
    assert memory.bytes_copied - copied < former[0].nbytes
    torch.func.grad(lambda w: pool2.starmap(lambda x, w: x[0] * w, [(x, w) for x in former])[1])(
        torch.ones(())
    )
    assert memory.bytes_copied - copied < former[0].nbytes


def test_a_generator_that_draws_random_numbers(pool2: mpgrad.Pool) -> None:
    """Symptom: items came twice, and the caller's generator was where it had been. Cause: what the
    iterable drew was taken for the function's, and put back."""
    for _ in range(5):
        pool2.map(own, [1.0] * 50)
    random.seed(0)
    found = [pool2.map(own, (random.random() for _ in range(700))), random.random()]
    random.seed(0)
    assert found == [[random.random() for _ in range(700)], random.random()]
    random.seed(0)
    pool2.starmap(own, [(random.random() for _ in range(1)) for _ in range(700)])
    after = random.random()
    random.seed(0)
    assert [random.random() for _ in range(701)][-1] == after


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


def counter() -> Callable[[], int]:
    count = 0

    def counts() -> int:
        nonlocal count
        count += 1
        return count

    return counts


def test_lone_calls_of_a_function_that_stays_the_same(fork_server: mpgrad.Pool) -> None:
    """Workers are told of it once. Each call finds it as it was, and not as another call left
    it."""

    def bytes_each(functions: list[Callable[[int], int]]) -> float:
        for function in functions:
            assert [pool.submit(function, -1).result() for _ in range(3)]
        before = pool.stats().bytes_sent
        for function in functions * 10:
            pool.submit(function, -1).result()
        return (pool.stats().bytes_sent - before) / len(functions * 10)

    with mpgrad.Pool(1) as pool:
        assert bytes_each([abs]) + 30 < bytes_each([abs, operator.neg])
        counts = counter()
        for _ in range(3):
            assert [future.result() for future in [pool.submit(counts) for _ in range(4)]] == [
                1
            ] * 4


def test_lone_calls_whose_worker_dies(fork_server: mpgrad.Pool) -> None:
    """The next worker is told of their function, too."""
    with mpgrad.Pool(1) as pool:
        for _ in range(3):
            assert pool.submit(abs, -1).result() == 1
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
        for _ in range(3):
            assert pool.submit(abs, -1).result() == 1
