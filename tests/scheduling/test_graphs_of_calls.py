"""Futures among the arguments of calls: a graph of calls that runs, forward and backward, without
the caller in between."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import first_are_quick
from inside import every_loss_gets
from torch import Tensor

import mpgrad

PATIENCE = 20.0  # seconds, where something has to happen that another process does


def wave(x: Tensor) -> Tensor:
    return (x * 2).sin()


def mixed(a: Tensor, b: Tensor) -> Tensor:
    return a * b + a


class Caller:
    """`submit` at once: the serial loop of a graph of calls."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)


def value(result: Any) -> Any:
    return result.result() if isinstance(result, concurrent.futures.Future) else result


def chain(pool: Any, x: Tensor, w: Tensor) -> Any:
    for k in range(6):
        x = pool.submit(lambda t, k: wave(t) + k, x, k)
    return x


def diamond(pool: Any, x: Tensor, w: Tensor) -> Any:
    top = pool.submit(wave, x)
    left, right = pool.submit(torch.exp, top), pool.submit(torch.cos, top)
    return pool.submit(mixed, left, right)


def fan_out(pool: Any, x: Tensor, w: Tensor) -> Any:
    top = pool.submit(wave, x)
    return pool.submit(
        lambda parts: torch.stack(parts).sum(0),
        [pool.submit(torch.mul, top, w * k) for k in range(5)],
    )


def nested(pool: Any, x: Tensor, w: Tensor) -> Any:
    pair = pool.submit(lambda t: {"a": t.sin(), "b": [t.cos(), 3]}, x)
    return pool.submit(
        lambda d, *, again: d["v"]["a"] * d["v"]["b"][0] * again["b"][1] * w,
        {"v": pair},
        again=pair,
    )


def several_outputs(pool: Any, x: Tensor, w: Tensor) -> Any:
    parts = pool.submit(lambda t: (t * 2, torch.full_like(t, 3.0), t.exp()), x)
    return pool.submit(lambda p: p[0] * p[1] + p[2], parts)


def with_captures(pool: Any, x: Tensor, w: Tensor) -> Any:
    first = pool.submit(lambda t: t * w, x)
    return pool.submit(lambda t: t.sin() * w, first)


def passed_through(pool: Any, x: Tensor, w: Tensor) -> Any:
    return pool.submit(torch.mul, pool.submit(lambda t: t, x), w)


def in_place(pool: Any, x: Tensor, w: Tensor) -> Any:
    return pool.submit(lambda t: t.mul_(w), pool.submit(wave, x))


SHAPES = [chain, diamond, fan_out, nested, several_outputs, with_captures, passed_through, in_place]


# the small ones are inline in a message, the large ones lie in shared memory
@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("graph", SHAPES, ids=lambda graph: graph.__name__)
def test_a_graph_of_calls_is_the_serial_one(
    pool: mpgrad.Pool, graph: Callable[..., Any], size: int
) -> None:
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    w = torch.randn(size, dtype=torch.float64, requires_grad=True)
    found, expected = value(graph(pool, x, w)), graph(Caller(), x, w)
    assert torch.equal(found, expected)
    v = torch.randn(size, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, w), v, retain_graph=True, allow_unused=True),
        torch.autograd.grad(expected, (x, w), v, retain_graph=True, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)
    again = torch.autograd.grad(found, x, v)[0]
    assert torch.equal(again, torch.autograd.grad(expected, x, v)[0]) or graph in (fan_out, nested)


@pytest.mark.parametrize("graph", first_are_quick(2, SHAPES), ids=lambda graph: graph.__name__)
def test_second_derivatives_and_batches(pool2: mpgrad.Pool, graph: Callable[..., Any]) -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    w = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: value(graph(pool2, x, w)), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: value(graph(pool2, x, w)), (x, w))
    found, expected = value(graph(pool2, x, w)), graph(Caller(), x, w)
    eye = torch.eye(3, dtype=torch.float64)
    (ours,) = torch.autograd.grad(found, x, eye, is_grads_batched=True)
    (theirs,) = torch.autograd.grad(expected, x, eye, is_grads_batched=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    "use",
    [
        lambda pool, fs, w: pool.map(lambda t: t * w, fs),
        lambda pool, fs, w: pool.starmap(torch.mul, [(f, w) for f in fs]),
        lambda pool, fs, w: list(pool.imap(lambda t: t * w, fs)),
        lambda pool, fs, w: pool.map_async(lambda t: t * w, fs).get(),
        lambda pool, fs, w: [pool.apply(lambda t: t * w, (f,)) for f in fs],
        lambda pool, fs, w: [pool.reduce(lambda t, item: t + item * w, fs, torch.zeros(3))],
        lambda pool, fs, w: [
            pool.reduce(lambda t, item: t.add_(item), [torch.ones(3)], [fs[0], fs[1]])[0] * w
        ],
        lambda pool, fs, w: [pool.map_reduce(lambda t: t * w, fs, "sum")],
        lambda pool, fs, w: pool.map(lambda p: p[0] * p[1] * w, [(fs[0], fs[1]), (fs[1], fs[0])]),
    ],
    ids=[
        "map",
        "starmap",
        "imap",
        "map_async",
        "apply",
        "reduce",
        "targets",
        "map_reduce",
        "pairs",
    ],
)
def test_every_operation_takes_futures(pool: mpgrad.Pool, use: Callable[..., Any]) -> None:
    xs = [torch.rand(3, requires_grad=True) for _ in range(4)]
    w = torch.rand(3, requires_grad=True)

    # the same operation on values, which other tests compare with the serial loop
    expected = torch.autograd.grad(
        sum(t.sum() for t in use(pool, [wave(x) for x in xs], w)), [*xs, w], allow_unused=True
    )

    found = use(pool, [pool.submit(wave, x) for x in xs], w)
    grads = torch.autograd.grad(sum(t.sum() for t in found), [*xs, w], allow_unused=True)
    torch.testing.assert_close(grads, expected)


def test_captures_of_hidden_calls(pool: mpgrad.Pool) -> None:
    """The sum of their gradients was asked for before it was added up, where nothing else had to be
    waited for first."""
    x = torch.randn(3, 4, dtype=torch.float64)  # needs no gradient
    layers = [torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]
    weights = [layer.weight for layer in layers]
    expected = torch.autograd.grad(layers[2](layers[1](layers[0](x))).exp().sum(), weights)
    for _ in range(10):
        last: Any = x
        for layer in layers:
            last = pool.submit(layer, last)
        found = torch.autograd.grad(pool.submit(torch.exp, last).result().sum(), weights)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_the_same_future_twice_is_the_same_object(pool: mpgrad.Pool) -> None:
    future = pool.submit(torch.ones, 3)
    assert pool.submit(lambda a, b: a is b[0], future, [future]).result()


def test_values_without_gradients_pass_too(pool: mpgrad.Pool) -> None:
    words = pool.submit(lambda: ["a", {"b": 2}])
    assert pool.submit(lambda w, n: (w, n), words, pool.submit(abs, -3)).result() == (
        ["a", {"b": 2}],
        3,
    )
    with torch.no_grad():
        x = torch.ones(2, requires_grad=True)
        assert not pool.submit(torch.mul, pool.submit(torch.mul, x, 2), 3).result().requires_grad


def test_leaves_and_parameters_that_calls_make(pool: mpgrad.Pool) -> None:
    def made() -> Any:
        return torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)

    future = pool.submit(made)
    seen = pool.submit(
        lambda pair: [(t.is_leaf, t.requires_grad, type(t) is torch.nn.Parameter) for t in pair],
        future,
    )
    product = pool.submit(lambda pair: (pair[0] * pair[1] * 2).sum(), future)
    product.result().backward()  # before anybody has seen the leaves
    parameter, leaf = future.result()
    assert seen.result() == [(True, True, True), (True, True, False)]
    assert torch.equal(parameter.grad, torch.full((3,), 2.0)) and torch.equal(
        leaf.grad, torch.full((3,), 2.0)
    )
    assert torch.equal(parameter, torch.ones(3)) and type(parameter) is torch.nn.Parameter


# --- what the caller sees


@pytest.mark.parametrize("first", ["before", "between", "after"])
def test_gradients_of_what_lies_between(pool: mpgrad.Pool, first: str) -> None:
    """A value that is asked for has the gradient that comes through the calls it was given to,
    whenever it is asked for."""
    x = torch.randn(3000, requires_grad=True)
    a = pool.submit(wave, x)
    if first == "before":
        a.result()
    b, c = pool.submit(torch.exp, a), pool.submit(torch.cos, a)
    if first == "between":
        a.result()
    found_b, found_c = b.result(), c.result()
    found = a.result()
    found.retain_grad()
    seen: list[Tensor] = []
    found.register_hook(seen.append)
    (found_b.sum() + found_c.sum() + found.sum()).backward()
    mine = x.grad
    x.grad = None
    expected = wave(x)
    expected.retain_grad()
    (expected.exp().sum() + expected.cos().sum() + expected.sum()).backward()
    assert torch.equal(found, expected)
    torch.testing.assert_close(
        (found.grad, seen[0], mine), (expected.grad, expected.grad, x.grad), rtol=1e-6, atol=1e-6
    )


def test_a_later_call_gets_what_the_caller_made_of_a_value(pool: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    a = pool.submit(torch.mul, x, 3)
    a.result().mul_(2)
    b = pool.submit(torch.mul, a, a)
    b.result().sum().backward()
    assert torch.equal(b.result(), torch.full((3,), 36.0)) and torch.equal(
        x.grad, torch.full((3,), 72.0)
    )


@pytest.mark.parametrize("size", [3, 3000, 300_000])
def test_an_earlier_call_gets_the_value_as_it_was(
    pool2: mpgrad.Pool, tmp_path: Path, size: int
) -> None:
    x = torch.ones(size, requires_grad=True)
    go = tmp_path / "go"
    gate = pool2.submit(wait_for, go)
    a = pool2.submit(torch.mul, x, 3)
    b = pool2.submit(lambda t, gate: t * t, a, gate)
    a.result().mul_(2)  # b waits for the gate
    assert not b.done()
    go.touch()
    b.result().sum().backward(retain_graph=True)
    assert torch.equal(b.result(), torch.full((size,), 9.0)) and torch.equal(
        x.grad, torch.full((size,), 18.0)
    )
    assert torch.equal(a.result(), torch.full((size,), 6.0))
    x.grad = None
    a.result().sum().backward()
    assert torch.equal(x.grad, torch.full((size,), 6.0))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(1e-3)


def test_a_call_may_write_to_what_it_was_given(pool: mpgrad.Pool) -> None:
    a = pool.submit(torch.ones, 3000)
    b, c = pool.submit(lambda t: t.add_(1).sum(), a), pool.submit(lambda t: t.add_(2).sum(), a)
    assert (b.result(), c.result(), a.result().sum()) == (6000, 9000, 3000)


def test_threads_may_take_one_graph(pool2: mpgrad.Pool) -> None:
    x = torch.rand(100, requires_grad=True)
    futures = [pool2.submit(wave, x)]
    for _ in range(30):
        futures.append(pool2.submit(mixed, futures[-1], futures[len(futures) // 2]))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        values = list(threads.map(lambda future: future.result(), reversed(futures)))[::-1]
    serial = [wave(x)]
    for _ in range(30):
        serial.append(mixed(serial[-1], serial[len(serial) // 2]))
    assert all(map(torch.equal, values, serial))
    torch.testing.assert_close(
        torch.autograd.grad(values[-1].sum(), x), torch.autograd.grad(serial[-1].sum(), x)
    )


# --- backward goes its own way


class Meet(torch.autograd.Function):
    """An identity whose backward leaves a word, and waits for another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: Path | None, waits: Path | None) -> Tensor:
        ctx.leaves, ctx.waits = leaves, waits
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.leaves is not None:
            ctx.leaves.touch()
        if ctx.waits is not None:
            wait_for(ctx.waits)
        return grad, None, None


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("takes", [(0, 1), (1, 0)], ids=["forth", "back"])
def test_a_chain_does_not_wait_for_another(
    pool2: mpgrad.Pool, tmp_path: Path, slow: int, takes: tuple[int, int]
) -> None:
    """The end of one chain waits, backward, until the other chain has come to its beginning."""
    word, here = tmp_path / "word", [tmp_path / "0", tmp_path / "1"]
    x = torch.ones(3, requires_grad=True)
    ends = []

    def begins(x: Tensor, number: int) -> Tensor:
        here[number].touch()
        wait_for(here[1 - number])  # so that the chains are on different workers, where they stay
        return Meet.apply(x, word if number != slow else None, None)

    for number in range(2):
        first = pool2.submit(begins, x, number)
        middle = pool2.submit(torch.mul, first, 2)
        ends.append(pool2.submit(Meet.apply, middle, None, word if number == slow else None))
    values = {number: ends[number].result() for number in takes}
    (values[0] + values[1]).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0))


def test_gradients_go_from_worker_to_worker(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of hidden calls the caller makes neither values nor gradients."""
    from mpgrad.calls.backwards import ReceivedGradients
    from mpgrad.calls.operations import DeliveredResult

    looked: list[str] = []
    views, gradients = DeliveredResult.views, ReceivedGradients.tensors
    monkeypatch.setattr(
        DeliveredResult,
        "views",
        lambda self, private=False: looked.append("value") or views(self, private),
    )
    monkeypatch.setattr(
        ReceivedGradients, "tensors", lambda self: looked.append("gradient") or gradients(self)
    )
    x = torch.ones(3000, requires_grad=True)
    last = x
    for _ in range(5):
        last = pool2.submit(torch.mul, last, 2)
    last.result().sum().backward()
    assert looked == ["value", "gradient"] and torch.equal(x.grad, torch.full((3000,), 32.0))


@pytest.mark.usefixtures("nothing_is_taken_back")
@pytest.mark.parametrize("size", [3, 3000])
def test_a_chain_stays_where_it_is(fresh_pool: mpgrad.Pool, size: int) -> None:
    """A call goes to the worker that has its input, though another one is idle, and comes first in
    its list."""
    fresh_pool.map(abs, range(8))
    last: Any = fresh_pool.submit(lambda: (torch.ones(size), [os.getpid()]))
    for _ in range(20):
        last = fresh_pool.submit(lambda pair: (pair[0] + 1, [*pair[1], os.getpid()]), last)
    pids = last.result()[1]
    assert len(pids) == 21 and sum(a != b for a, b in itertools.pairwise(pids)) <= 2, pids


# --- what goes wrong


def fails(x: Any = None) -> Any:
    raise LookupError("nothing there")


def test_descendants_of_a_failure_fail_with_it_as_their_cause(pool: mpgrad.Pool) -> None:
    first = pool.submit(fails)
    second = pool.submit(wave, first)
    third = pool.submit(mixed, torch.ones(3), [second])
    for future, name in (third, "mixed"), (second, "wave"):
        message = rf"^a call of {name} did not run, .* \(LookupError: nothing there"
        with pytest.raises(mpgrad.AncestorFailedError, match=message) as caught:
            future.result()
        assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(LookupError):
        first.result()
    with pytest.raises(mpgrad.AncestorFailedError, match="item 1 of wave did not run"):
        pool.map(wave, [torch.ones(3), first, torch.ones(3)])
    good, bad = pool.map(wave, [torch.ones(3), second], on_error="return")
    assert torch.equal(good, wave(torch.ones(3))) and isinstance(bad, mpgrad.AncestorFailedError)


class Refuses(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise LookupError("no gradient")


def test_a_failing_backward_of_a_hidden_call(pool: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    last = pool.submit(
        torch.mul, pool.submit(Refuses.apply, pool.submit(torch.mul, x, 2)), 3
    ).result()
    with pytest.raises(LookupError, match="no gradient"):
        last.sum().backward()
    pool.submit(torch.mul, pool.submit(torch.mul, x, 2), 3).result().sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))


def test_a_failing_backward_whose_gradient_nobody_needs(pool: mpgrad.Pool) -> None:
    """What the hidden call was given needs no gradient: nobody would have waited."""
    source = pool.submit(lambda: torch.ones(3, requires_grad=True) * 2)
    with pytest.raises(LookupError, match="no gradient"):
        pool.submit(Refuses.apply, source).result().sum().backward()
    last = (
        pool.submit(torch.exp, pool.submit(lambda: torch.ones(3, requires_grad=True) * 2))
        .result()
        .sum()
    )
    last.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        last.backward()


def test_a_cancelled_call_fails_its_descendants(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    gate = fresh_pool.submit(wait_for, go)
    middle = fresh_pool.submit(lambda gate: 1, gate)
    last = fresh_pool.submit(abs, middle)
    assert middle.cancel() and middle.cancelled()
    assert concurrent.futures.wait([middle, last], timeout=PATIENCE).not_done == set()
    with pytest.raises(mpgrad.AncestorFailedError) as caught:
        last.result()
    assert isinstance(caught.value.__cause__, concurrent.futures.CancelledError)
    go.touch()
    assert gate.result() is None


@pytest.mark.parametrize("after", [None, 0.2])
def test_a_running_call_is_cancelled_by_force(
    fresh_pool: mpgrad.Pool, after: float | None, tmp_path: Path
) -> None:
    x = torch.ones(3, requires_grad=True)
    kept = fresh_pool.map(wave, [x] * 6)  # graphs on both workers
    word = tmp_path / "word"
    stuck = fresh_pool.submit(lambda: (word.touch(), time.sleep(600)))
    after_it = fresh_pool.submit(lambda nothing: 1, stuck)
    wait_for(word)
    others = [fresh_pool.submit(pow, k, 2) for k in range(20)]
    assert stuck.running() and not stuck.cancel()
    started = time.monotonic()
    if after is None:
        assert stuck.cancel(force=True)
    else:
        stuck.cancel_after(after)
    with pytest.raises(concurrent.futures.CancelledError):
        stuck.result()
    with pytest.raises(concurrent.futures.CancelledError):
        stuck.exception()
    assert stuck.cancelled() and stuck.done() and time.monotonic() - started < PATIENCE
    with pytest.raises(mpgrad.AncestorFailedError):
        after_it.result()
    assert [other.result() for other in others] == [k**2 for k in range(20)]
    sum(kept).sum().backward()
    torch.testing.assert_close(x.grad, 6 * 2 * (2 * x.detach()).cos())
    assert fresh_pool.stats().deaths == 1 and not stuck.cancel(force=True)
    with pytest.raises(ValueError, match="seconds must not be negative"):
        stuck.cancel_after(-1)


def test_cancelling_by_force_what_waits_or_has_ended(pool: mpgrad.Pool) -> None:
    done = pool.submit(abs, -1)
    assert done.result() == 1 and not done.cancel(force=True) and not done.cancelled()
    done.cancel_after(0)
    pool.map(abs, [1])
    assert done.result() == 1


@pytest.mark.parametrize("moment", ["forward", "before backward", "in backward"])
def test_workers_that_die_in_a_graph(fresh_pool: mpgrad.Pool, tmp_path: Path, moment: str) -> None:
    word, go = tmp_path / "word", tmp_path / "go"
    x = torch.rand(3000, requires_grad=True)
    w = torch.rand(3000, requires_grad=True)

    def graph(pool: Any, held: bool) -> Any:
        top = pool.submit(lambda t: t * w, x)
        stays = moment == "in backward" and held
        left = pool.submit(
            lambda t: Meet.apply(t, word if stays else None, go if stays else None) * w, top
        )
        right = pool.submit(
            lambda t, _: t.cos() * w,
            top,
            pool.submit(wait_for, go) if moment == "forward" and held else None,
        )
        return pool.submit(mixed, left, right)

    future = graph(fresh_pool, True)
    if moment == "forward":
        kill_all(fresh_pool)
        go.touch()
    found = future.result()
    if moment == "before backward":
        kill_all(fresh_pool)
    thread = threading.Thread(target=found.sum().backward)
    thread.start()
    if moment == "in backward":
        wait_for(word)
        kill_all(fresh_pool)
        go.touch()
    thread.join()
    grads = x.grad, w.grad
    go.touch()
    expected = torch.autograd.grad(graph(Caller(), False).sum(), (x, w))
    torch.testing.assert_close(grads, expected)


def kill_all(pool: mpgrad.Pool) -> None:
    for worker in pool.stats().workers:
        os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "options",
    first_are_quick(
        2,
        [
            {"graphs": "recompute"},
            {"maxtasksperchild": 2},
            {},
            {"deterministic": True},
            {"retries": 0},
        ],
    ),
)
def test_graphs_in_other_pools(fork_server: mpgrad.Pool, options: dict[str, Any]) -> None:
    x = torch.rand(3000, requires_grad=True)
    w = torch.rand(3000, requires_grad=True)
    with every_loss_gets(1.0), mpgrad.Pool(2, **options) as pool:
        for graph in (chain, fan_out, with_captures):
            found, expected = value(graph(pool, x, w)), graph(Caller(), x, w)
            assert torch.equal(found, expected)
            for ours, theirs in zip(
                torch.autograd.grad(found.sum(), (x, w), allow_unused=True),
                torch.autograd.grad(expected.sum(), (x, w), allow_unused=True),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs)


def test_futures_where_they_cannot_be(pool2: mpgrad.Pool, fresh_pool: mpgrad.Pool) -> None:
    future = pool2.submit(abs, -1)
    with pytest.raises(
        TypeError, match="a future can be an argument of a call, but neither part of a function"
    ):
        pool2.map(lambda x: future, [1])
    with pytest.raises(ValueError, match="a call of abs has a future of another pool"):
        fresh_pool.submit(abs, future)
    with pytest.raises(ValueError, match="item 1 of abs has a future of another pool"):
        fresh_pool.map(abs, [1, future])
    assert future.result() == 1
    assert fresh_pool.submit(abs, future).result() == 1  # it is a value now
    with (
        concurrent.futures.ThreadPoolExecutor(1) as threads,
        pytest.raises(TypeError, match="item 0 cannot be sent"),
    ):
        pool2.submit(abs, threads.submit(abs, -1))
    assert pool2.map(abs, [-1]) == [1]


def test_close_waits_for_a_graph_and_terminate_ends_it(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with mpgrad.Pool(2) as pool:
        last: Any = pool.submit(wait_for, go)
        for _ in range(5):
            last = pool.submit(lambda before: 1, last)
        pool.close()
        go.touch()
        pool.join()
        assert last.result() == 1
    with mpgrad.Pool(2) as pool:
        futures: list[Any] = [pool.submit(time.sleep, 600)]
        for _ in range(5):
            futures.append(pool.submit(lambda before: 1, futures[-1]))
    for future in futures:
        with pytest.raises((mpgrad.PoolClosedError, mpgrad.AncestorFailedError)):
            future.result()


# --- waiting for all


def test_synchronize(pool: mpgrad.Pool) -> None:
    pool.synchronize()
    futures = [pool.submit(time.sleep, 0.01) for _ in range(4)]
    later = pool.map_async(abs, range(5))
    pool.synchronize()
    assert all(future.done() for future in futures) and later.ready()


def test_failures_that_nobody_asked_for_surface(pool: mpgrad.Pool) -> None:
    seen = pool.submit(fails)
    with pytest.raises(LookupError):
        seen.result()
    pool.synchronize()  # that one was seen
    pool.submit(fails)
    pool.submit(abs, pool.submit(wave, "no tensor"))
    pool.map_async(fails, [1, 2])
    handled: list[BaseException] = []
    pool.map_async(fails, [1], error_callback=handled.append)
    with pytest.raises(LookupError, match="nothing there") as caught:
        pool.synchronize()
    assert "failures that nobody asked for, besides this one: 2" in caught.value.__notes__
    assert len(handled) == 1
    pool.synchronize()  # they are forgotten


def test_as_completed_wait_and_callbacks(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    slow = fresh_pool.submit(wait_for, go)
    after = fresh_pool.submit(lambda before: 2, slow)
    quick = fresh_pool.submit(abs, -1)
    called: list[Any] = []
    after.add_done_callback(lambda future: called.append(future.result()))
    order = mpgrad.as_completed([slow, after, quick], timeout=PATIENCE)
    assert next(order) is quick
    done, not_done = mpgrad.wait([slow, quick], return_when=concurrent.futures.FIRST_COMPLETED)
    assert (done, not_done) == ({quick}, {slow})
    go.touch()
    assert set(order) == {slow, after}
    assert after.result() == 2 and called == [2]


# --- long, many, and gone


@pytest.mark.slow
def test_a_long_chain_and_its_end(pool2: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    last: Any = x
    for _ in range(1000):
        last = pool2.submit(torch.mul, last, 1.0)
    last.result().sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    for _ in range(1000):
        last = pool2.submit(torch.mul, last, 1.0)
    pool2.synchronize()
    del last  # 1,000 calls, each of which holds the one before


def test_results_between_are_not_kept(pool2: mpgrad.Pool) -> None:
    """Without gradients nothing that a chain has left behind stays: neither objects nor shared
    memory."""
    last = pool2.submit(torch.ones, 100_000)
    begun = weakref.ref(last)
    before = psutil.Process().memory_info().rss
    for _ in range(200):
        last = pool2.submit(torch.add, last, 1)
    assert last.result()[0] == 201
    gc.collect()
    assert begun() is None
    assert psutil.Process().memory_info().rss - before < 40 << 20  # 200 results are 80 MB
    assert pool2.stats().shared_bytes < 40 << 20


def test_a_dropped_graph_leaves_nothing(pool2: mpgrad.Pool) -> None:
    x = torch.ones(3000, requires_grad=True)
    top = pool2.submit(wave, x)
    pool2.submit(mixed, top, pool2.submit(torch.exp, top))
    del top
    pool2.synchronize()
    deadline = time.monotonic() + PATIENCE
    while (stats := pool2.stats()).shared_bytes or any(worker.graphs for worker in stats.workers):
        assert time.monotonic() < deadline, stats
        gc.collect()
        pool2.map(abs, range(4))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_results_passed_on(pool2: mpgrad.Pool, layout: torch.layout, late: bool) -> None:
    """They have no stand-ins: whether the first value is asked for, and when, makes no
    difference."""

    def gradients(submit: Any) -> list[Any]:
        source = torch.eye(3, dtype=torch.float64).mul(2).to_sparse(layout=layout).requires_grad_()
        first = submit(lambda x: (x * 2, x.to_dense().sum(), x.detach() * 3), source)
        second = submit(lambda triple: triple[0] * 3, first)
        if not late:
            first.result()
        loss = second.result().to_dense().pow(2).sum()
        sparse, dense, plain = first.result()
        assert (
            sparse.layout is plain.layout is layout
            and sparse.requires_grad
            and not plain.requires_grad
        )
        total = loss + sparse.to_dense().pow(3).sum() * dense
        (grad,) = torch.autograd.grad(total, source, create_graph=True)
        (further,) = torch.autograd.grad(grad.to_dense().pow(2).sum(), source)
        return [total.detach(), plain.to_dense(), grad.detach().to_dense(), further.to_dense()]

    class Done:
        def __init__(self, value: Any) -> None:
            self.value = value

        def result(self) -> Any:
            return self.value

    def at_once(fn: Any, x: Any) -> Done:
        return Done(fn(x.value if isinstance(x, Done) else x))

    for ours, theirs in zip(gradients(pool2.submit), gradients(at_once), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
