"""Cheap items of a map travel in bundles, and mean what they mean one by one: against the serial
loop.

Elsewhere in the suite maps are too short for bundles. Here their size is given, as if what calls
cost had been measured.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import random
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE, first_are_quick, staffed
from inside import bundle, every_loss_gets, packed_bundles

import mpgrad
from mpgrad.machine.policy import (
    FAR,
    NEAR,
    bundle_size,
    chunk_size,
    guided_size,
    workers_worth_feeding,
)
from mpgrad.wire.tensor_refs import BUCKETED_BYTES

Tensor = torch.Tensor

SIZE = 8  # from so many tensors on they travel in columns

# floats: some ride in the message, others lie in shared memory, the last is too large for a bundle
SIZES = [*[5, 3000, 1, 30_000, 1024] * 4, 40_000]

weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64, requires_grad=True)
ENGINES: list[dict[str, Any]] = [{}, {"engine": "thread"}, {"engine": "inline"}]


@pytest.fixture(autouse=True)
def bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle(monkeypatch, SIZE)


OPTIONS: list[dict[str, Any]] = [{"graphs": "keep"}, {}, {"engine": "thread"}, {"engine": "inline"}]


@pytest.fixture(params=first_are_quick(1, OPTIONS), ids=str)
def pool(
    request: pytest.FixtureRequest, shared_pools: Callable[[str, int], mpgrad.Pool]
) -> Iterator[mpgrad.Pool]:
    """Workers of the session where graphs are kept; where backwards are eager, they are the test's
    own."""
    if request.param == {"graphs": "keep"}:
        with every_loss_gets(None):
            yield shared_pools("process", 2)
    else:
        with every_loss_gets(1.0), mpgrad.Pool(2, **request.param) as own:
            yield own


@pytest.fixture(params=first_are_quick(1, OPTIONS), ids=str)
def own_pool(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with every_loss_gets(1.0), mpgrad.Pool(2, **request.param) as own:
        yield own


@pytest.fixture(params=first_are_quick(1, ["auto", "keep"]))
def fresh_pool2(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with every_loss_gets(1.0), mpgrad.Pool(2, graphs=request.param) as own:
        yield own


@pytest.fixture(scope="module", params=first_are_quick(1, ["auto", "keep"]))
def open_pool(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(2, graphs=request.param) as own:
        yield staffed(own)


@pytest.fixture
def pool2(open_pool: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with every_loss_gets(1.0):
        yield open_pool


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the workers: two add up large tensors in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def leaves(count: int = 22) -> list[Tensor]:
    return [
        torch.linspace(-1, 1 + i, 5, dtype=torch.float64, requires_grad=True) for i in range(count)
    ]


def loss(x: Tensor) -> Tensor:
    return ((x.sin() * weight).exp().sum() - 1) ** 2


def curve(x: Tensor) -> Tensor:
    return (x.sin() * weight.detach()).exp()


def cube(x: Tensor) -> Tensor:
    return (x**3).sum()


def mixed(x: Tensor) -> Any:
    """Results of other structures, and another number of tensors, from item to item."""
    number = round(x.detach()[-1].item()) - 1
    parts = [x * k for k in range(number % 3)]
    return {"parts": parts, "number": number, "plain": x.detach() * 2}


Loop = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def serial(function: Callable[[Any], Any], xs: Sequence[Any]) -> list[Any]:
    return [function(x) for x in xs]


COMBINATIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda found: torch.stack([each.sum() for each in found]).sum(),
    "weighted": lambda found: torch.stack([i * each.sum() for i, each in enumerate(found)]).sum(),
    "some": lambda found: torch.stack([each.sum() for each in found[3:11:3]]).sum(),
    "one": lambda found: found[9].sum() * 3,
}


def in_the_background(pool: mpgrad.Pool) -> Loop:
    return lambda function, xs: pool.map_async(function, xs).get()  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [loss, curve])
def test_maps_in_the_background(pool: mpgrad.Pool, function: Callable[[Tensor], Tensor]) -> None:
    def found(loop: Loop) -> list[Tensor]:
        xs = leaves()
        results = loop(function, xs)
        return [*results, *torch.autograd.grad(COMBINATIONS["sum"](results), xs)]

    right = found(serial)
    assert all(map(torch.equal, found(in_the_background(pool)), right))
    assert all(
        map(
            torch.equal, found(lambda f, xs: pool.starmap_async(f, [(x,) for x in xs]).get()), right
        )
    )


def test_a_map_in_the_background_goes_in_bundles(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_bundles(monkeypatch)
    xs = leaves()
    result = pool2.map_async(loss, xs)
    with torch.no_grad():
        for x in xs:
            x.fill_(7)  # the workers have copies
    assert all(map(torch.equal, result.get(), serial(loss, leaves())))
    assert packed == [SIZE, SIZE, 22 - 2 * SIZE]
    pool2.map_async(loss, xs, chunksize=1).wait()
    pool2.map_async(loss, iter(x * 1 for x in xs)).wait()
    assert len(packed) == 3


def test_a_generator_may_take_long_in_the_background(pool: mpgrad.Pool) -> None:
    """Python's collector, which is held off while many objects are made, is not held off by it."""

    def source() -> Iterator[Tensor]:
        for x in leaves():
            assert gc.isenabled()
            yield x

    assert len(pool.map_async(loss, source()).get()) == 22


def test_a_failure_in_the_background(pool: mpgrad.Pool) -> None:
    def fails(x: Tensor) -> Tensor:
        if x[-1] > 10:
            raise ZeroDivisionError("on purpose")
        return x.sum()

    told: list[BaseException] = []
    result = pool.map_async(fails, leaves(), error_callback=told.append)
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        result.get()
    assert caught.value.__notes__[0].startswith("raised in item 10 of fails, ")
    deadline = time.monotonic() + 20
    while not told and time.monotonic() < deadline:  # the callback has a thread of its own
        time.sleep(0.001)
    assert told == [caught.value]
    assert torch.equal(pool.map_async(loss, leaves()).get()[-1], loss(leaves()[-1]))


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("function", [loss, curve, cube])
def test_values_and_gradients(
    pool: mpgrad.Pool, function: Callable[[Tensor], Tensor], combination: str
) -> None:
    def found(loop: Loop) -> list[Tensor | None]:
        xs = leaves()
        results = loop(function, xs)
        grads = torch.autograd.grad(
            COMBINATIONS[combination](results), [*xs, weight], allow_unused=True
        )
        return [*(each.detach() for each in results), *grads]

    ours, theirs = found(pool.map), found(serial)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):  # bit for bit
        assert (one is None) == (other is None) and (
            one is None or other is None or torch.equal(one, other)
        )
    if theirs[-1] is None:
        assert ours[-1] is None
    else:
        # a sum of the workers' sums
        torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-12, atol=1e-12)


def test_results_of_any_structure(pool: mpgrad.Pool) -> None:
    def found(loop: Loop) -> list[Any]:
        xs = leaves()
        results = loop(mixed, xs)
        sum(part.sum() for each in results for part in each["parts"]).backward()  # type: ignore[union-attr]
        return [(each["number"], each["plain"], len(each["parts"])) for each in results] + [
            x.grad for x in xs
        ]

    for one, other in zip(found(pool.map), found(serial), strict=True):
        if isinstance(one, tuple):
            assert (one[0], one[2]) == (other[0], other[2]) and torch.equal(one[1], other[1])
        else:
            assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("kinds", ["lv", "vl", "llv", "lf", "fl", "lp", "llllllllv", "le"])
def test_losses_beside_others(pool: mpgrad.Pool, kinds: str) -> None:
    """The bundle keeps its graph, unless all of its items are losses."""

    def one(pair: tuple[int, Tensor]) -> Tensor:
        number, x = pair
        match kinds[number % len(kinds)]:
            case "l":
                return loss(x)
            case "v":
                return curve(x)
            case "f":  # a fresh leaf
                return torch.ones(2, dtype=x.dtype, requires_grad=True)
            case "p":  # plain
                return x.detach().sum()
        return Clipped.apply(x).sum()

    def found(loop: Loop) -> list[Tensor | None]:
        xs = leaves()
        results = loop(one, list(enumerate(xs)))
        total = torch.stack([i * each.sum() for i, each in enumerate(results)]).sum()
        return [*results, *torch.autograd.grad(total, [*xs, weight], allow_unused=True)]

    for ours, right in zip(found(pool.map), found(serial), strict=True):
        assert (ours is None) == (right is None)
        if ours is not None and right is not None:
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_a_graph_that_went_with_a_loss_is_made_again(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """Up to then the function gave nothing but losses, so that each was differentiated before the
    next item began."""
    runs = tmp_path / "runs"

    def one(pair: tuple[bool, Tensor]) -> Tensor:
        is_loss, x = pair
        with open(runs, "a") as file:
            file.write("x")
        return loss(x) if is_loss else curve(x)

    def found(loop: Loop, kinds: Sequence[bool]) -> list[Tensor]:
        xs = leaves(len(kinds))
        results = loop(one, list(zip(kinds, xs, strict=True)))
        total = torch.stack([i * each.sum() for i, each in enumerate(results)]).sum()
        return [*results, *torch.autograd.grad(total, [*xs, weight])]

    mixed = [True, False] * SIZE
    with every_loss_gets(1.0), mpgrad.Pool(1) as pool:
        pool.map(one, [(True, x) for x in leaves(2 * SIZE)])
        # the first bundle that is mixed is run twice; from then on the forwards come first
        for times in (3, 2):
            runs.unlink()
            ours = found(pool.map, mixed)
            assert len(runs.read_text()) == times * SIZE
            for one_of_ours, right in zip(ours, found(serial, mixed), strict=True):
                torch.testing.assert_close(one_of_ours, right, rtol=1e-12, atol=1e-12)


class Clipped(torch.autograd.Function):
    """What is linear forward, and not backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (2 * grad).clamp(max=3)


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_a_graph_goes_before_the_next_item_begins(fork_server: mpgrad.Pool) -> None:
    """So that the next one finds its memory in the cache, and never more than one is there."""

    class Mark:
        pass

    marks: list[weakref.ref[Mark]] = []

    def alive(x: Tensor) -> tuple[Tensor, int]:
        there = sum(ref() is not None for ref in marks)
        mark, y = Mark(), x.exp()
        marks.append(weakref.ref(mark))
        assert y.grad_fn is not None
        y.grad_fn.metadata["mark"] = mark  # lives as long as the graph
        return y.sum(), there

    with every_loss_gets(1.0), mpgrad.Pool(1) as pool:
        assert [there for _, there in pool.map(alive, leaves(24))] == [0] * 24
    with mpgrad.Pool(1, graphs="keep") as pool:
        keep = [there for _, there in pool.map(alive, leaves())]
    assert keep == list(range(22))


def test_a_mixture_of_results_runs_once(pool: mpgrad.Pool, tmp_path: Path) -> None:
    """What is run again may give something else: threads share their generators. Where an eager
    backward turns out to be for a part of a bundle only, and its graph has gone, that bundle runs
    again."""
    may_run = {"once ", "once once "} if pool._options.predicts else {"once "}

    def dropped(pair: tuple[int, Tensor]) -> Tensor:
        number, x = pair
        with open(tmp_path / str(number), "a") as file:
            file.write("once ")
        y = torch.nn.functional.dropout(x.exp(), 0.5)
        return y.sum() if number % 3 else y

    for _ in range(2):
        xs = leaves(24)
        results = pool.map(dropped, list(enumerate(xs)))
        torch.stack([result.sum() for result in results]).sum().backward()
        for number, (x, result) in enumerate(zip(xs, results, strict=True)):
            grad = x.grad
            assert grad is not None  # exp(x) times the mask, as the result
            torch.testing.assert_close(grad if result.dim() else grad.sum(), result.detach())
            assert (tmp_path / str(number)).read_text() in may_run
            (tmp_path / str(number)).unlink()


def test_what_unpickling_an_argument_raises_comes_as_it_is(pool: mpgrad.Pool) -> None:
    with pytest.raises(StopIteration, match="no more"):
        pool.map(lambda pair: pair[0], [(x, Ends()) for x in leaves(8)])


class Ends:
    def __reduce__(self) -> Any:
        return end, ()


def end() -> None:
    raise StopIteration("no more")


@pytest.mark.parametrize(
    ("seconds", "total", "sizes"),
    [
        (0.0, 1000, [48] * 21),
        (100e-6, 256, [32] * 8),
        (1e-3, 60, [7, 7, 7, 7, 7, 6, 4, 4, 4, 4, 4]),
        (9e-3, 18, [2] * 6 + [1] * 6),
        (300e-6, 256, [*[32] * 5, 24, 18, *[14] * 4]),
        (1e-6, 64, [16] * 4),  # for one worker
        (30e-3, 4, [1] * 4),
        (1e-6, 3, [1] * 3),
    ],
)
def test_sizes_of_bundles(seconds: float, total: int, sizes: list[int]) -> None:
    left, found = total, list[int]()
    while left > 0:
        found.append(bundle_size(seconds, total, left, workers=2))
        left -= found[-1]
    assert found == sizes


def test_workers_that_a_parent_cannot_feed() -> None:
    """It takes 0.3 ms for each chunk. Where there is little work for many workers, some get
    none."""
    assert workers_worth_feeding(2, calls=64, seconds=20e-6) == 2
    for seconds, workers in (
        (0.0, 1),
        (1e-9, 1),
        (20e-6, 13),
        (1e-3, 64),
        (1.0, 64),
        (math.inf, 64),
    ):
        assert workers_worth_feeding(64, 5000, seconds) == workers
    assert workers_worth_feeding(64, calls=0, seconds=math.inf) == 64
    assert bundle_size(20e-6, 5000, 5000, workers=64) == 48 > 5000 // (4 * 64)
    assert guided_size(1e-3, 1000, 64, shortest=1e-3, longest=20e-3) == 1000 // (2 * 41)
    assert guided_size(1e-3, 1000, 8, shortest=1e-3, longest=20e-3) == 20  # ms of work
    assert guided_size(math.inf, 1000, 64, shortest=1e-3, longest=20e-3) == 1


def test_a_caller_keeps_up_with_many_machines() -> None:
    """Towards the end of a map chunks are short; many workers asked for more of them than one
    caller can hand out."""
    assert [FAR.least(workers) for workers in (2, 64, 1000)] == [
        10e-3,
        pytest.approx(45e-3, rel=0.1),
        100e-3,
    ]
    assert NEAR.least(1000) == NEAR.shortest  # `workers_worth_feeding` cares for that
    assert chunk_size(10e-3, 1920, 64, NEAR, together=True) == 1920 // (2 * 64)
    assert chunk_size(10e-3, 1920, 2, NEAR, together=True) == 20  # 200 ms of work
    assert chunk_size(10e-3, 1920, 64, NEAR) == 2
    assert chunk_size(1e-3, 1, 64, FAR) >= 40 > chunk_size(1e-3, 1, 2, FAR) == 10


def test_a_caller_keeps_up_with_many_workers_that_wait() -> None:
    # symptom: 64 workers that sleep 10 ms a call are busy half of the time. cause: a message for
    # almost each call, and all CPUs are busy with messages.
    def size(seconds: float, left: int, workers: int = 64, together: bool = True) -> int:
        return chunk_size(seconds, left, workers, NEAR, together)

    assert size(10e-3, 128) == 2  # a call is over before all 64 have got theirs
    assert size(10e-3, 32, workers=16) == 1  # here it is not
    assert size(10e-3, 64) == 1
    assert size(20e-3, 255) == 1
    assert size(15e-3, 1000, together=False) == 1  # others would wait for the second one


@pytest.mark.parametrize("function", [lambda x: x.sin().exp(), cube], ids=["curve", "loss"])
def test_tensors_of_many_sizes(
    own_pool: mpgrad.Pool, function: Callable[[Tensor], Tensor], one_thread: None
) -> None:
    def found(loop: Loop) -> list[Tensor]:
        xs = [
            torch.linspace(-1, 1 + k, n, dtype=torch.float64).requires_grad_()
            for k, n in enumerate(SIZES)
        ]
        results = loop(function, xs)
        grads = torch.autograd.grad(
            results[3].sum() * 2 + results[9].sum(), [xs[3], xs[9]], retain_graph=True
        )
        torch.autograd.backward([each.sum() for each in results])
        return [*map(torch.detach, results), *grads, *[x.grad for x in xs if x.grad is not None]]

    for ours, theirs in zip(found(own_pool.map), found(serial), strict=True):
        assert torch.equal(ours, theirs)
    del ours
    deadline = time.monotonic() + PATIENCE
    while own_pool.stats().shared_bytes and time.monotonic() < deadline:
        own_pool.map(abs, range(4))  # what was lent comes back with a worker's next answer
    assert own_pool.stats().shared_bytes == 0


def test_what_is_read_in_place_goes_one_by_one(pool2: mpgrad.Pool) -> None:
    """Results in shared memory, that one item's backward must find unchanged, have nothing to do
    with the others'."""
    # those up to there are copied, which takes less time than calls of their own
    length = 1 + BUCKETED_BYTES // 4
    weights = [torch.full((length,), float(k), requires_grad=True) for k in range(2 * SIZE)]
    with torch.no_grad():
        items = pool2.map(lambda k: torch.full((length,), float(k)), range(2 * SIZE))
    results = pool2.starmap(torch.mul, list(zip(items, weights, strict=True)))
    assert len({each.grad_fn for each in results}) == len(items)
    items[0].zero_()
    torch.autograd.backward([each.sum() for each in results[1:]])
    assert all(
        w.grad is not None and torch.equal(w.grad, item)
        for w, item in zip(weights[1:], items[1:], strict=True)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()


def test_they_travel_together(fresh_pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = leaves(4 * SIZE)
    results = fresh_pool2.map(curve, xs)
    assert len({each.grad_fn for each in results}) == 4
    assert sum(worker.calls for worker in fresh_pool2.stats().workers) == len(xs)
    with_chunks = fresh_pool2.map(curve, xs, chunksize=2)
    assert len({each.grad_fn for each in with_chunks}) == len(xs) / 2
    alone = fresh_pool2.map(curve, xs, chunksize=1)
    assert len({each.grad_fn for each in alone}) == len(xs)


def test_a_tensor_that_items_share_gets_its_gradient_in_the_serial_order(pool: mpgrad.Pool) -> None:
    def found(loop: Callable[..., list[Tensor]]) -> Tensor:
        shared = torch.linspace(0.1, 2, 7, dtype=torch.float64, requires_grad=True)
        arguments = [(torch.linspace(i, i**1.5, 7, dtype=torch.float64), shared) for i in range(22)]
        torch.stack(loop(lambda x, y: (x * y).exp().sum().log(), arguments)).sum().backward()
        assert shared.grad is not None
        return shared.grad

    assert torch.equal(
        found(pool.starmap), found(lambda f, arguments: [f(*each) for each in arguments])
    )


@pytest.mark.parametrize("function", [loss, curve])
def test_backwards_one_by_one_leave_the_others_alone(
    pool: mpgrad.Pool, function: Callable[[Tensor], Tensor]
) -> None:
    ours, theirs = leaves(), leaves()
    results, expected = pool.map(function, ours), serial(function, theirs)
    for k in [3, 2, 17, 0, 21, 1, 4]:
        results[k].sum().backward()
        expected[k].sum().backward()
        assert [x.grad is None for x in ours] == [x.grad is None for x in theirs]
    for x, y in zip(ours, theirs, strict=True):
        assert (x.grad is None and y.grad is None) or torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_a_second_backward_raises_as_in_the_serial_loop(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(2) as pool:
        results = pool.map(curve, leaves())
        results[5].sum().backward(retain_graph=True)
        results[5].sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            results[5].sum().backward()
        results[6].sum().backward()


def test_what_a_backward_gave_may_be_written_to(pool2: mpgrad.Pool) -> None:
    xs, others = leaves(), leaves()
    results, expected = pool2.map(cube, xs), serial(cube, others)
    for k in (2, 3):
        for each, own in ((results, xs), (expected, others)):
            each[k].backward(retain_graph=True)
            own[k].grad.zero_()  # type: ignore[union-attr]
            each[k].backward(torch.tensor(2.0, dtype=torch.float64))
        assert torch.equal(xs[k].grad, others[k].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [loss, cube])
def test_derivatives_of_one_item(pool: mpgrad.Pool, function: Callable[[Tensor], Tensor]) -> None:
    def found(loop: Loop) -> list[Tensor]:
        xs = leaves()
        results = loop(function, xs)
        results[4].backward(retain_graph=True)
        (first,) = torch.autograd.grad(results[5], xs[5], create_graph=True)
        second = torch.autograd.grad(first.sin().sum(), [xs[5]], create_graph=True)
        third = torch.autograd.grad(second[0].sum(), xs[5])
        return [first, *second, *third]

    for one, other in zip(found(pool.map), found(serial), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradcheck(pool2: mpgrad.Pool) -> None:
    xs = leaves(6)
    assert torch.autograd.gradcheck(lambda *xs: tuple(pool2.map(curve, xs)), xs)
    assert torch.autograd.gradgradcheck(lambda *xs: tuple(pool2.map(cube, xs)), xs)


def test_batched_gradients(pool2: mpgrad.Pool) -> None:
    def found(loop: Loop) -> Tensor:
        xs = leaves()
        grads = torch.eye(5, dtype=torch.float64)
        return torch.autograd.grad(loop(curve, xs)[6], xs[6], grads, is_grads_batched=True)[0]

    assert torch.equal(found(pool2.map), found(serial))


def test_an_input_of_another_item_was_not_used(pool2: mpgrad.Pool) -> None:
    xs = leaves()
    for results in (pool2.map(cube, xs), serial(cube, xs)):
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(results[5], xs[6])


def test_what_cannot_share_a_node_goes_one_by_one(pool2: mpgrad.Pool) -> None:
    def found(loop: Loop) -> tuple[list[Any], list[Any]]:
        heard: list[Any] = []
        xs = leaves()
        for k in (1, 9):
            xs[k].register_hook(lambda grad, k=k: heard.append((k, grad.clone())))  # type: ignore[misc]
        inner = [x * 2 if k % 5 == 4 else x for k, x in enumerate(xs)]  # with a history
        large = torch.ones(5000, dtype=torch.float64, requires_grad=True)
        results = loop(cube, [*inner, large])
        for k in (9, 10, 4, -1, 1):
            results[k].backward()
        return [x.grad for x in (*xs, large)], heard

    (ours, our_calls), (theirs, their_calls) = found(pool2.map), found(serial)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert [k for k, _ in our_calls] == [k for k, _ in their_calls] == [9, 1]


def failing(x: Tensor) -> Tensor:
    if x[0] == 13:
        raise ArithmeticError("thirteen")
    return x * 2


def test_a_failure_names_its_item(pool: mpgrad.Pool) -> None:
    with pytest.raises(ArithmeticError) as caught:
        pool.map(failing, [torch.full((2,), float(k)) for k in range(22)])
    assert any("item 13 of failing," in note for note in caught.value.__notes__)
    assert len(pool.map(failing, [torch.zeros(2)] * 22)) == 22


def unpicklable(x: Tensor) -> Any:
    return (line for line in "ab") if x[0] == 6 else x


def test_a_result_that_cannot_be_carried_names_its_item(pool2: mpgrad.Pool) -> None:
    with pytest.raises(TypeError) as caught:
        pool2.map(unpicklable, [torch.full((2,), float(k)) for k in range(22)])
    assert any("item 6 of unpicklable," in note for note in caught.value.__notes__)


def test_an_argument_that_cannot_be_carried_names_its_item(pool2: mpgrad.Pool) -> None:
    with pytest.raises(TypeError, match="item 7"):
        pool2.map(abs, [*[torch.ones(2)] * 7, torch.ones(2).to("meta")] + [torch.ones(2)] * 20)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient")


def test_a_backward_that_fails(pool: mpgrad.Pool) -> None:
    def some_fail(x: Tensor) -> Tensor:
        return Broken.apply(x).sum() if x[-1] == 6 else x.sum()  # type: ignore[no-any-return, no-untyped-call]

    results = pool.map(some_fail, leaves())
    results[4].backward()
    with pytest.raises(ArithmeticError, match="no gradient"):
        results[5].backward()
    results[6].backward()


def dying(path: Path, x: Tensor) -> Tensor:
    marker = path / str(int(x[0]))
    if x[0] in (6, 13) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return (x * weight[:2].detach()).sum()


def test_a_bundle_whose_worker_dies_is_run_again(fresh_pool2: mpgrad.Pool, tmp_path: Path) -> None:
    xs = [torch.full((2,), float(k), dtype=torch.float64, requires_grad=True) for k in range(22)]
    results = fresh_pool2.map(functools.partial(dying, tmp_path), xs)
    torch.stack(results).sum().backward()
    assert all(torch.equal(x.grad, weight[:2].detach()) for x in xs)  # type: ignore[arg-type]
    assert fresh_pool2.stats().deaths == 2


def always_dying(x: Tensor) -> Tensor:
    if x[0] == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_an_item_that_kills_is_named(fresh_pool2: mpgrad.Pool) -> None:
    with pytest.raises(mpgrad.WorkerDiedError) as caught:
        fresh_pool2.map(always_dying, [torch.full((2,), float(k)) for k in range(22)])
    assert caught.value.item == 13
    assert len(fresh_pool2.map(abs, [torch.ones(2)] * 22)) == 22


@pytest.mark.parametrize("function", [loss, curve])
def test_graphs_that_are_lost_are_made_again(
    fresh_pool2: mpgrad.Pool, function: Callable[[Tensor], Tensor]
) -> None:
    def found(loop: Loop, between: Callable[[], None]) -> list[Tensor]:
        xs = leaves()
        results = loop(function, xs)
        results[3].sum().backward()
        between()
        total = torch.stack([i * each.sum() for i, each in enumerate(results) if i != 3]).sum()
        return list(torch.autograd.grad(total, [*xs[:3], *xs[4:]]))

    def kill() -> None:
        for worker in fresh_pool2.stats().workers:
            os.kill(worker.pid, signal.SIGKILL)

    for one, other in zip(found(fresh_pool2.map, kill), found(serial, lambda: None), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def noisy(x: Tensor) -> list[float]:
    import numpy

    return [torch.rand(()).item(), random.random(), float(numpy.random.rand()), float(x[0])]


def test_each_item_has_random_numbers_of_its_own(fork_server: mpgrad.Pool) -> None:
    found = []
    with mpgrad.Pool(2) as pool:
        for chunksize in (None, 3):
            torch.manual_seed(5)
            found.append(
                pool.map(
                    noisy, [torch.full((1,), float(k)) for k in range(22)], chunksize=chunksize
                )
            )
    assert found[0] == found[1] and len({each[0] for each in found[0]}) == 22


def warning(x: Tensor) -> Tensor:
    warnings.warn(f"of {int(x[0])}", UserWarning, stacklevel=1)
    return x


def test_warnings_come_through(pool2: mpgrad.Pool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool2.map(warning, [torch.full((1,), float(k)) for k in range(9)])
    assert sorted(str(each.message) for each in caught) == sorted(f"of {k}" for k in range(9))


def test_the_graph_goes_when_the_last_result_does(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(2) as pool:
        results = pool.map(curve, leaves(2 * SIZE))
        assert sum(worker.graphs for worker in pool.stats().workers) == 2
        del results[: SIZE + 1]
        gc.collect()
        deadline = time.monotonic() + PATIENCE
        while sum(worker.graphs for worker in pool.stats().workers) == 2:
            assert time.monotonic() < deadline
            pool.map(abs, [torch.ones(1)])  # carries the news
            pool.map(abs, [torch.ones(1)] * 9)
        assert sum(worker.graphs for worker in pool.stats().workers) == 1


def test_no_grad_and_inference_mode(pool2: mpgrad.Pool) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        xs = leaves()
        with mode():
            results = pool2.map(curve, xs)
            expected = serial(curve, xs)
        assert all(torch.equal(*each) for each in zip(results, expected, strict=True))
        assert not any(each.requires_grad for each in results)
        assert all(
            each.is_inference() == other.is_inference()
            for each, other in zip(results, expected, strict=True)
        )


@torch.enable_grad()
def stubborn(x: Tensor) -> Tensor:
    return (x.sin() * weight).sum()


def test_a_function_that_turns_gradients_on(pool: mpgrad.Pool) -> None:
    def found(loop: Loop) -> list[Tensor | None]:
        xs = leaves()
        with torch.no_grad():
            results = loop(stubborn, xs)
        results[4].backward(retain_graph=True)
        return [x.grad for x in xs] + list(
            torch.autograd.grad(torch.stack(results).sum(), [*xs, weight])
        )

    for one, other in zip(found(pool.map), found(serial), strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_deterministic_pools_keep_their_order(fork_server: mpgrad.Pool) -> None:
    def found(loop: Loop) -> Tensor:
        return torch.autograd.grad(torch.stack(loop(loss, leaves())).sum(), weight)[0]

    with mpgrad.Pool(2, deterministic=True) as pool:
        assert torch.equal(found(pool.map), found(serial))


def test_per_item_gradients(pool: mpgrad.Pool) -> None:
    xs = leaves()
    shared = torch.linspace(1, 2, 5, dtype=torch.float64, requires_grad=True)
    results = pool.starmap(lambda x, y: ((x * y).sin() * weight).sum(), [(x, shared) for x in xs])
    for (ours, of_shared, of_weight), x in zip(
        mpgrad.per_item_grad(results, [(x, shared, weight) for x in xs]), xs, strict=True
    ):
        theirs = torch.autograd.grad(((x * shared).sin() * weight).sum(), [x, shared, weight])
        for one, other in zip((ours, of_shared, of_weight), theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def huge(x: Tensor) -> Tensor:
    from mpgrad.memory import arena

    arena.free_memory = lambda: 10_000_000
    return torch.empty(100_000_000) if x[0] == 6 else torch.empty(3)


def test_no_room_for_a_result_names_its_item(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1) as pool:
        with pytest.raises(mpgrad.SharedMemoryError) as caught:
            pool.map(huge, [torch.full((1,), float(k)) for k in range(11)])
        assert any("item 6 of huge," in note for note in caught.value.__notes__)


def test_a_backward_that_fails_names_its_item_or_those_that_it_was_with(
    fork_server: mpgrad.Pool,
) -> None:
    with mpgrad.Pool(2) as pool:
        results = pool.map(lambda x: Broken.apply(x).sum(), leaves(11))
        for total, name in ((results[5], "item 5,"), (results[9] + results[10], "items 8 to 10,")):
            with pytest.raises(ArithmeticError) as caught:
                total.backward()
            assert any(name in note for note in caught.value.__notes__)


# --- what a hostile reading found


def test_hooks_on_results_are_called_for_their_own_gradients(pool: mpgrad.Pool) -> None:
    xs = leaves()
    results = pool.map(cube, xs)
    heard: list[Tensor] = []
    results[1].register_hook(heard.append)
    results[2].register_hook(lambda grad: grad * 2)
    results[0].backward()
    assert not heard
    results[2].backward()
    assert torch.equal(xs[2].grad, 6 * xs[2].detach() ** 2)  # type: ignore[arg-type]
    results[3].register_hook(heard.append).remove()
    results[4].retain_grad()
    torch.stack(results[3:6]).sum().backward()
    assert not heard and torch.equal(results[4].grad, torch.ones(()).double())  # type: ignore[arg-type]


def test_hooks_on_the_node_that_results_share_are_refused(pool2: mpgrad.Pool) -> None:
    xs = leaves()
    node = pool2.map(cube, xs)[1].grad_fn
    assert node is not None
    for register in (node.register_hook, node.register_prehook):
        with pytest.raises(RuntimeError, match=r"result\.register_hook.*chunksize=1"):
            register(print)
    alone = pool2.map(cube, xs, chunksize=1)[1]
    assert alone.grad_fn is not None
    alone.grad_fn.register_prehook(lambda grads: (grads[0] * 10,))
    alone.backward()
    assert torch.equal(xs[1].grad, 30 * xs[1].detach() ** 2)  # type: ignore[arg-type]


def test_a_hook_that_fails_is_named_as_in_the_serial_loop(pool: mpgrad.Pool) -> None:
    def message(loop: Loop) -> str:
        def shapeless(grad: Tensor) -> Tensor:
            return torch.zeros(7)

        results = loop(cube, leaves())
        results[1].register_hook(shapeless)
        with pytest.raises(RuntimeError) as caught:
            torch.stack(results).sum().backward()
        return str(caught.value)

    assert message(pool.map) == message(serial)


# of mode "all", docs/guarantees.md says what differs where a backward wants none of them
@pytest.mark.parametrize(
    ("mode", "wanted"),
    [(m, w) for m in ("all", "any") for w in ((0,), (1, 2), (0, 1, 2))] + [("any", (3,))],
)
def test_hooks_on_many_results(pool: mpgrad.Pool, mode: str, wanted: tuple[int, ...]) -> None:
    def heard(loop: Loop) -> list[Any]:
        results, told = loop(cube, leaves()), list[Any]()
        torch.autograd.graph.register_multi_grad_hook(results[:3], told.append, mode=mode)  # type: ignore[arg-type]
        torch.stack([results[k] for k in wanted]).sum().backward()
        return told

    assert heard(pool.map) == heard(serial)


def test_what_is_written_to_a_result_concerns_it_alone(pool: mpgrad.Pool) -> None:
    def found(loop: Loop) -> list[Any]:
        xs = leaves(9)
        results = loop(lambda x: x.sin() * 2, xs)
        results[0].mul_(3)
        results[1][0] = 7
        results[2].detach_()
        torch.stack(results[:2] + results[3:5]).sum().backward()
        return [
            *map(Tensor.tolist, results),
            *[None if x.grad is None else x.grad.tolist() for x in xs],
        ]

    assert found(pool.map) == found(serial)


PATTERNS: dict[str, Callable[[list[Tensor], list[Tensor]], list[Any]]] = {
    "one input after another": lambda xs, found: [
        torch.autograd.grad(torch.stack(found).sum(), x)[0] for x in xs
    ],
    "some inputs, then the rest": lambda xs, found: [
        torch.stack(found).sum().backward(inputs=xs[:2]),
        torch.stack(found[2:]).sum().backward(),
        *(x.grad for x in xs),
    ],
    "an input, then a capture": lambda xs, found: [
        torch.autograd.grad(torch.stack(found).sum(), xs[0])[0],
        torch.autograd.grad(torch.stack(found[1:]).sum(), weight)[0],
    ],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_backward_for_some_inputs_leaves_the_graphs_of_others_alone(
    pool: mpgrad.Pool, pattern: str
) -> None:
    def found(loop: Loop) -> list[Any]:
        xs = leaves(9)
        return PATTERNS[pattern](xs, loop(loss, xs))

    for one, other in zip(found(pool.map), found(serial), strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_backwards_that_nobody_asked_for_are_not_run(pool2: mpgrad.Pool) -> None:
    xs = leaves()
    results = pool2.map(lambda x: Broken.apply(x).sum() if x[-1] == 6 else x.sum(), xs)
    (grad,) = torch.autograd.grad(torch.stack(results).sum(), xs[4])
    assert torch.equal(grad, torch.ones_like(grad))


def test_inside_a_transform_that_does_not_follow_the_items(pool2: mpgrad.Pool) -> None:
    xs = leaves()
    total = sum(float(each.detach()) for each in serial(cube, xs))
    grad = torch.func.grad(lambda w: w * sum(float(each.detach()) for each in pool2.map(cube, xs)))(
        torch.tensor(1.0)
    )
    torch.testing.assert_close(float(grad), total, rtol=1e-6, atol=0.0)


def test_what_items_share_by_way_of_the_function_is_nobodys_gradient(
    fork_server: mpgrad.Pool,
) -> None:
    memo: dict[str, Tensor] = {}

    def remembering(x: Tensor) -> Tensor:
        if "y" not in memo:
            memo["y"] = (x * x).sum()
        return memo["y"] + x.sum()

    for gradient in (None, 1.0):
        with every_loss_gets(gradient), mpgrad.Pool(1) as pool:
            xs = leaves(4)
            pool.map(remembering, xs)[1].backward()
            assert xs[0].grad is None or gradient is None  # as in the serial loop, or not at all
            assert torch.equal(xs[1].grad, torch.ones(5, dtype=torch.float64))  # type: ignore[arg-type]


def test_a_backward_that_reaches_nothing_leaves_higher_derivatives_alone(pool: mpgrad.Pool) -> None:
    """Symptom: None. Cause: the node forgot its inputs after a backward, though nothing had been
    freed."""
    for chunksize in (None, 1):
        xs = leaves()
        results = pool.map(lambda x: (x**3 * weight.detach()).sum(), xs, chunksize)
        assert torch.autograd.grad(results[5], weight, allow_unused=True) == (None,)
        (first,) = torch.autograd.grad(results[5], xs[5], create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), xs[5])
        torch.testing.assert_close(second, (6 * xs[5] * weight).detach())


def test_a_derivative_of_a_derivative_leaves_nothing(fresh_pool2: mpgrad.Pool) -> None:
    """Symptom: two graphs more for each. Cause: a backward kept its gradients, whose history led to
    it."""
    xs = leaves()
    (first,) = torch.autograd.grad(fresh_pool2.map(cube, xs)[5], xs[5], create_graph=True)
    torch.autograd.grad(first.sum(), xs[5])
    del first
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while any(worker.graphs for worker in fresh_pool2.stats().workers):
        assert time.monotonic() < deadline
        fresh_pool2.map(abs, range(4))


def test_other_leaves_may_be_frozen_or_get_a_history(pool: mpgrad.Pool) -> None:
    xs = leaves()
    results = pool.map(cube, xs)
    xs[4].requires_grad_(False)
    xs[6].requires_grad_(False)
    xs[6].mul_(torch.ones((), dtype=torch.float64, requires_grad=True).exp())
    (first,) = torch.autograd.grad(results[5], xs[5], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), xs[5])
    torch.testing.assert_close(second, 6 * xs[5].detach())
    xs[6].sum().backward()


def ended_by_its_backward(x: Tensor) -> Tensor:
    y = x.exp()
    if x[-1] == 3:
        y.grad_fn.register_prehook(lambda grads: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[union-attr]
    return y.sum()


def test_an_item_whose_backward_kills_is_named(fresh_pool2: mpgrad.Pool) -> None:
    with pytest.raises(mpgrad.WorkerDiedError) as caught:
        fresh_pool2.map(ended_by_its_backward, leaves(6))[2].backward()
    assert caught.value.item == 2


# --- options of a map that go along with bundles


def numbered(count: int) -> list[Tensor]:
    return [torch.full((2,), float(k), requires_grad=True) for k in range(count)]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bundles that a test packs."""
    return packed_bundles(monkeypatch)


def test_a_bar_takes_nothing_apart(
    pool: mpgrad.Pool, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress, a chunksize or `on_error="return"` made cheap items slower."""
    # a busy machine may stop the thread that shows it
    monkeypatch.setattr("mpgrad.progress.PATIENCE", PATIENCE)
    shown: list[tuple[int, int | None]] = []
    xs, others = leaves(), leaves()
    results = pool.map(curve, xs, progress=lambda done, total, left: shown.append((done, total)))
    assert packed == [SIZE, SIZE, 22 - 2 * SIZE]
    assert shown[-1] == (22, 22)
    assert all(done in (0, 8, 14, 16, 22) and total == 22 for done, total in shown)
    assert all(map(torch.equal, results, serial(curve, others)))
    assert pool.map_async(curve, xs, progress=lambda *now: shown.append(now[:2])).get() is not None
    assert len(packed) == 6
    assert shown[-1] == (22, 22)


def test_the_items_of_a_failed_map_are_counted(pool2: mpgrad.Pool) -> None:
    shown: list[int] = []
    with pytest.raises(ArithmeticError):
        pool2.map(failing, numbered(22), 16, progress=lambda done, total, left: shown.append(done))
    assert shown[-1] == 8


def ends(items: Sequence[Any]) -> list[int]:
    """The first and the last item of a chunk's calls."""
    return [*itertools.chain.from_iterable([each] if type(each) is int else each for each in items)]


@pytest.mark.parametrize("chunksize", [2, 7, 8, 9, 12, 100])
def test_a_chunk_has_the_items_that_it_was_asked_for(
    fork_server: mpgrad.Pool, packed: list[int], chunksize: int
) -> None:
    xs = leaves()
    with mpgrad.Pool(1) as pool:
        with pool.timeline() as timeline:
            results = pool.map(curve, xs, chunksize)
        grads = torch.autograd.grad(COMBINATIONS["sum"](results), xs)
        others = leaves()
        assert all(map(torch.equal, results, serial(curve, others)))
        right = torch.autograd.grad(COMBINATIONS["sum"](serial(curve, others)), others)
        assert all(map(torch.equal, grads, right))
    assert sum(packed) == 22
    assert max(packed) == min(chunksize, SIZE)
    chunks = [each["args"]["items"] for each in timeline.events if each.get("cat") == "chunk"]
    sent = sorted((each[0], each[-1]) for each in map(ends, chunks))
    starts = range(0, 22, chunksize)
    assert [first for first, _ in sent][: len(starts)] == [*starts]
    assert [last for _, last in sent] == [min(start + chunksize, 22) - 1 for start in starts]


def test_exceptions_in_the_places_of_results(pool: mpgrad.Pool, packed: list[int]) -> None:
    def fn(x: Tensor) -> Any:
        if x[-1] in (3.0, 11.0, 12.0, 22.0):
            raise ZeroDivisionError(f"on purpose {x[-1]:.0f}")
        return curve(x) if x[-1] % 2 else loss(x)

    def serially(x: Tensor) -> Any:
        try:
            return fn(x)
        except ZeroDivisionError as error:
            return error

    for _ in range(2):
        xs, others = leaves(), leaves()
        found, right = pool.map(fn, xs, on_error="return"), [*map(serially, others)]
        for ours, theirs, index in zip(found, right, range(22), strict=True):
            if isinstance(theirs, Tensor):
                assert torch.equal(ours, theirs)
            else:
                assert repr(ours) == repr(theirs)
                assert ours.__notes__[0].startswith(f"raised in item {index} of fn, ")
        for results in (found, right):
            sum(each.sum() for each in results if isinstance(each, Tensor)).backward()
            weight.grad = None
        for x, other in zip(xs, others, strict=True):
            assert (x.grad is None) == (other.grad is None)
            assert x.grad is None or torch.equal(x.grad, other.grad)
    assert packed == [SIZE, SIZE, 22 - 2 * SIZE] * 2


def test_all_items_of_a_bundle_may_fail(pool: mpgrad.Pool) -> None:
    found = pool.map(failing, [torch.full((5,), 13.0)] * 20, on_error="return")
    assert [type(each) for each in found] == [ArithmeticError] * 20


def test_a_result_that_cannot_be_carried_is_one_item(pool2: mpgrad.Pool) -> None:
    found = pool2.map(unpicklable, numbered(10), on_error="return")
    assert [k for k, each in enumerate(found) if isinstance(each, TypeError)] == [6]


@pytest.mark.parametrize("retries", [0, 1])
def test_an_item_that_kills_leaves_the_others_of_its_bundle(
    fork_server: mpgrad.Pool, retries: int
) -> None:
    xs = numbered(22)
    with mpgrad.Pool(1, retries=retries) as pool:
        found = pool.map(always_dying, xs, on_error="return")
        dead = [k for k, each in enumerate(found) if isinstance(each, mpgrad.WorkerDiedError)]
        # without retries, what had run in the bundle may not run again
        assert dead == ([13] if retries else [*range(8, 14)])
        assert [each.item for k, each in enumerate(found) if k in dead] == [13] * len(dead)
        if retries:
            sum(each.sum() for each in found if isinstance(each, Tensor)).backward()
            assert [k for k, x in enumerate(xs) if x.grad is None] == dead
