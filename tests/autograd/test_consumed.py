"""A graph is dropped after the backward that leaves nothing of it; a second backward finds what it
would find in PyTorch."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import eventually, first_are_quick, in_turn, staffed
from inside import keeps_no_graphs

import mpgrad

Tensor = torch.Tensor
Loop = Callable[[Callable[..., Any], list[Any]], list[Any]]

SECOND_TIME = "Trying to backward through the graph a second time"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"graphs": "recompute"},
    {"graph_memory": "1 GiB"},
    {"deterministic": True},
    {"retries": 0},
    {"engine": "thread"},
    {"engine": "thread", "graphs": "recompute"},
    {"engine": "inline"},
]
REMADE = [each for each in OPTIONS if each.get("engine") is None and each.get("retries") is None]


@pytest.fixture(scope="module", params=first_are_quick(2, OPTIONS), ids=str)
def any_pool(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(1 if request.param.get("engine") == "inline" else 2, **request.param) as pool:
        yield staffed(pool)  # before the first test, which looks for what it leaves


@pytest.fixture
def single(fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(1) as pool:
        yield pool


def serial(fn: Callable[..., Any], items: list[Any]) -> list[Any]:
    return [fn(item) for item in items]


def leaves(count: int = 5) -> list[Tensor]:
    return [
        torch.arange(1.0, 4 + number, dtype=torch.float64).requires_grad_()
        for number in range(count)
    ]


def graphs_in(pool: mpgrad.Pool) -> int:
    return sum(worker.graphs for worker in pool.stats().workers)


class Mark:
    pass


def marks() -> list[weakref.ref[Mark]]:
    """In the worker: of nodes. Globals of ours each function has for itself there."""
    found: list[weakref.ref[Mark]] = vars(sys).setdefault("mpgrad_test_marks", [])
    return found


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = mark = Mark()
        marks().append(weakref.ref(mark))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def marked(x: Tensor) -> Tensor:
    y: Tensor = Marked.apply(x)  # type: ignore[no-untyped-call]
    return y.exp()


def marks_alive(_: object) -> int:
    return sum(mark() is not None for mark in marks())


def test_graphs_go_with_their_backward(single: mpgrad.Pool) -> None:
    """And not with the results, which the caller may keep."""
    xs = leaves()
    results = single.map(marked, xs, 1)
    assert graphs_in(single) == single.apply(marks_alive, (None,)) == 5
    torch.stack([result.sum() for result in results[:3]]).sum().backward()
    assert graphs_in(single) == single.apply(marks_alive, (None,)) == 2
    torch.stack([result.sum() for result in results[3:]]).sum().backward(retain_graph=True)
    assert graphs_in(single) == single.apply(marks_alive, (None,)) == 2
    torch.stack([result.sum() for result in results[3:]]).sum().backward()
    assert graphs_in(single) == single.apply(marks_alive, (None,)) == 0
    for number, x in enumerate(xs):
        once = 2 * (2 * x.detach()).exp()
        torch.testing.assert_close(x.grad, once if number < 3 else 2 * once)


def test_the_graph_of_a_bundle_goes_with_the_backward_of_all_its_items(single: mpgrad.Pool) -> None:
    single.map(marked, leaves(40))
    results = single.map(marked, leaves(200))
    bundles = graphs_in(single)
    assert 0 < bundles < 200
    results[0].sum().backward()
    assert graphs_in(single) == bundles
    torch.stack([result.sum() for result in results[1:]]).sum().backward()
    assert graphs_in(single) == 1  # the one that was not run through as a whole
    del results


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp(), x.sin()


def shared(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y.sin(), y.cos()


def second_backward(
    loop: Loop, fn: Callable[..., Any], pick: Callable[[Any], list[Tensor]], keep: bool = False
) -> list[Any]:
    """The backwards of what `pick` gives of each result, one after another, and then of the first
    again."""
    xs = leaves()
    found: list[Any] = []
    for result in loop(fn, xs):
        picked = pick(result)
        for each in [*picked, picked[0]]:
            try:
                each.sum().backward(retain_graph=keep)
                found.append([None if x.grad is None else x.grad.clone() for x in xs])
            except RuntimeError as error:
                assert SECOND_TIME in str(error)
                found.append("a second time")
    return found


CASES: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Tensor]]]] = {
    "whole": (lambda x: x.exp(), lambda y: [y]),
    "a loss": (lambda x: x.exp().sum(), lambda y: [y]),
    "nothing saved": (lambda x: (x + x).sum(), lambda y: [y]),
    "apart": (parts, list),
    "both at once": (parts, lambda y: [y[0].sum() + y[1].sum()]),
    "one of two": (parts, lambda y: [y[0]]),
    "with a common part": (shared, list),
    "a fresh leaf": (
        lambda x: (x * torch.ones(1, dtype=x.dtype, requires_grad=True)).exp(),
        lambda y: [y],
    ),
}


PARTIAL = "apart", "one of two", "with a common part"


@pytest.mark.parametrize("case", CASES)
def test_a_second_backward_finds_what_it_finds_serially(any_pool: mpgrad.Pool, case: str) -> None:
    fn, pick = CASES[case]
    # `docs/guarantees.md`: a graph that is made for each backward does not know what a partial one
    # has freed
    works = keeps_no_graphs(any_pool) and case in PARTIAL
    expected = second_backward(serial, fn, pick, keep=works)
    found = second_backward(lambda fn, xs: any_pool.map(fn, xs, 1), fn, pick)
    assert str(found) == str(expected)
    assert any_pool.map(abs, [-1]) == [1]


def test_of_several_inputs_and_captures_all_have_to_be_wanted(single: mpgrad.Pool) -> None:
    weight = torch.full((), 3.0, dtype=torch.float64, requires_grad=True)

    def asked(loop: Loop) -> list[Any]:
        a, b = (
            torch.full((2,), each, dtype=torch.float64, requires_grad=True) for each in (2.0, 5.0)
        )
        (y,) = loop(lambda pair: (pair[0].exp() * weight).sum() + pair[1].sin().sum(), [(a, b)])
        first = torch.autograd.grad(y, [a])
        try:
            return [first, torch.autograd.grad(y, [b]), torch.autograd.grad(y, [weight])]
        except RuntimeError as error:
            assert SECOND_TIME in str(error)
            return [first, "a second time"]

    assert str(asked(single.map)) == str(asked(serial))


@pytest.mark.parametrize("options", REMADE, ids=str)
def test_the_function_runs_again_for_a_second_backward_only(
    fork_server: mpgrad.Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    def fn(x: Tensor) -> Tensor:
        with (tmp_path / "calls").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return x + x

    x = leaves(1)[0]
    with mpgrad.Pool(1, **options) as pool:
        (y,) = pool.map(fn, [x], 1)
        y.sum().backward()
        calls = 2 if options.get("graphs") == "recompute" else 1
        assert len((tmp_path / "calls").read_text().split()) == calls
        y.sum().backward()  # nothing was saved, so PyTorch allows it
        assert len((tmp_path / "calls").read_text().split()) == calls + 1
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 4))


def test_without_retries_graphs_stay(fork_server: mpgrad.Pool) -> None:
    """They could not be made again."""
    xs = leaves()
    with mpgrad.Pool(1, retries=0) as pool:
        results = pool.map(lambda x: x + x, xs, 1)
        for _ in range(2):
            torch.stack([result.sum() for result in results]).sum().backward()
        assert graphs_in(pool) == 5
    assert all(torch.equal(x.grad, torch.full_like(x, 4)) for x in xs if x.grad is not None)


def test_random_numbers_are_the_same_in_a_second_backward(single: mpgrad.Pool) -> None:
    x = leaves(1)[0]

    def fn(x: Tensor) -> Tensor:
        return x + x if torch.rand(()) < 0.5 else x + x + x

    for y in single.map(fn, [x] * 8, 1):
        grads = [torch.autograd.grad(y.sum(), [x])[0] for _ in range(3)]
        assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_a_graph_of_gradients_outlives_the_backward_of_its_source(single: mpgrad.Pool) -> None:
    def penalty(loop: Loop) -> list[Any]:
        (x,) = leaves(1)
        (y,) = loop(lambda x: (x**3).sum(), [x])
        (grad,) = torch.autograd.grad(y, [x], create_graph=True)
        found: list[Any] = []
        for loss in (y, grad.sum(), y):
            try:
                loss.backward()
            except RuntimeError as error:
                assert SECOND_TIME in str(error)
                found.append("a second time")
            found.append(None if x.grad is None else x.grad.clone())
        return found

    assert str(penalty(lambda fn, xs: single.map(fn, xs, 1))) == str(penalty(serial))


def test_futures_that_were_passed_on(single: mpgrad.Pool) -> None:
    """Gradients go from worker to worker as promises: they count as what has come."""
    x = leaves(1)[0]
    first = single.submit(marked, x)
    second = single.submit(lambda y: y.sin(), first)
    before = single.apply(marks_alive, (None,))
    second.result().sum().backward()
    assert graphs_in(single) == 0
    assert single.apply(marks_alive, (None,)) == before - 1
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (2 * x.detach()).exp().cos() * 2 * (2 * x.detach()).exp())


def test_a_worker_that_died_with_a_spent_graph(single: mpgrad.Pool) -> None:
    x = leaves(1)[0]
    (y,) = single.map(lambda x: x.exp(), [x], 1)
    y.sum().backward()
    os.kill(single.stats().workers[0].pid, 9)
    assert single.map(abs, [-1]) == [1]
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        y.sum().backward()


def test_a_worker_that_was_replaced(fork_server: mpgrad.Pool) -> None:
    """Symptom: a second backward gave gradients. Cause: a consumed graph holds no worker, and the
    next one did not know of it."""
    x = leaves(1)[0]
    with mpgrad.Pool(1, maxtasksperchild=1) as pool:
        (y,) = pool.map(lambda x: x.exp(), [x], 1)
        y.sum().backward()
        assert pool.map(abs, [-1]) == [1]
        with pytest.raises(RuntimeError, match=SECOND_TIME):
            y.sum().backward()


def test_a_killed_backward_is_not_a_second_one(single: mpgrad.Pool, tmp_path: Path) -> None:
    """It was to be the last one, and is sent again."""
    x = leaves(1)[0]

    def die_once(grad: Tensor) -> None:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), 9)

    (y,) = single.map(lambda x: hooked(x.exp(), die_once), [x], 1)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().exp())


def hooked(x: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
    x.register_hook(hook)
    return x


def refuse(grad: Tensor) -> None:
    if torch.isnan(grad).any():
        raise ValueError("refused")


def outcomes(
    loop: Loop, fn: Callable[..., Any], losses: Callable[[Any], list[Tensor]], *grads: float
) -> list[str]:
    """Of backwards, one after another, with these gradients."""
    a, b = (torch.full((2,), each, dtype=torch.float64, requires_grad=True) for each in (0.0, 5.0))
    (result,) = loop(fn, [(a, b)])
    found = []
    for loss, grad in zip(losses(result), grads, strict=True):
        try:
            found.append(
                str(
                    torch.autograd.grad(
                        loss, [a, b], torch.full_like(loss, grad), allow_unused=True
                    )
                )
            )
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__} {str(error)[:40]}")
    return found


FAILING: dict[str, tuple[Any, ...]] = {
    "a part was freed before": (
        lambda pair: (pair[0].exp(), pair[1].sin()),
        lambda y: [y[1].sum(), y[0].sum() + y[1].sum(), y[0].sum(), y[0].sum()],
        *(1.0, 1.0, 1.0, 1.0),
    ),
    "refused": (
        lambda pair: hooked(pair[0].exp() + pair[1], refuse),
        lambda y: [y.sum()] * 3,
        torch.nan,
        1.0,
        1.0,
    ),
    "refused, nothing saved": (
        lambda pair: hooked(pair[0] + pair[1], refuse),
        lambda y: [y.sum()] * 3,
        1.0,
        torch.nan,
        1.0,
    ),
}


@pytest.mark.parametrize(
    ("case", "options"),
    in_turn(FAILING, [each for each in OPTIONS if each.get("graphs") != "recompute"], always=1),
    ids=str,
)
def test_a_backward_that_fails_leaves_what_it_leaves_serially(
    fork_server: mpgrad.Pool, options: dict[str, Any], case: str
) -> None:
    """Symptom: "a second time", for a part that was never run through. Cause: the graph went though
    its backward had failed."""
    with mpgrad.Pool(1, **options) as pool:
        assert outcomes(lambda fn, items: pool.map(fn, items, 1), *FAILING[case]) == outcomes(
            serial, *FAILING[case]
        )


def test_a_graph_whose_backward_has_failed_is_still_there(fork_server: mpgrad.Pool) -> None:
    """It holds its worker, which is to be replaced: the next one would take it for consumed."""
    with mpgrad.Pool(1, maxtasksperchild=1) as pool:
        (y,) = pool.map(lambda x: hooked(x.exp(), refuse), leaves(1), 1)
        with pytest.raises(ValueError, match="refused"):
            y.backward(torch.full_like(y, torch.nan))
        assert pool.map(abs, [-1]) == [1]
        assert graphs_in(pool) == 1
        y.sum().backward()
        assert graphs_in(pool) == 0


def test_anomaly_mode_says_nothing_of_the_second_run(single: mpgrad.Pool) -> None:
    """Symptom: "returned nan values". Cause: the gradients with which a graph is run through
    again."""
    with (
        pytest.warns(UserWarning, match="Error detected in"),
        torch.autograd.set_detect_anomaly(True),
    ):
        case = (lambda pair: pair[0].sqrt() + pair[1]), (lambda y: [y.sum()] * 2), 1.0, 1.0
        found = outcomes(lambda fn, items: single.map(fn, items, 1), *case)
        assert found == outcomes(serial, *case) and SECOND_TIME[:40] in found[1]


def test_the_memory_of_spent_graphs(fork_server: mpgrad.Pool) -> None:
    """Symptom: they pushed out others. Cause: they counted as they were before they were run
    through."""
    weight = torch.ones(3000, requires_grad=True)
    xs = [torch.ones(3000, requires_grad=True) for _ in range(12)]
    with mpgrad.Pool(1, graph_memory="100 KB") as pool:
        results = pool.map(lambda x: (x * weight).exp(), xs, 1)
        for result, x in zip(results, xs, strict=True):
            torch.autograd.grad(result.sum(), [x, weight])
            with pytest.raises(RuntimeError, match=SECOND_TIME):
                torch.autograd.grad(result.sum(), [x])
        (worker,) = pool.stats().workers
        assert worker.graph_bytes == 0


def dies_when(folder: Path) -> None:
    """End the worker, the first time, as soon as the file `go` is there."""
    if not (folder / "died").exists():
        (folder / "died").touch()
        while not (folder / "go").exists():
            time.sleep(0.002)
        os._exit(3)


@pytest.mark.parametrize("how", [{}, {"retain_graph": True}], ids=str)
def test_a_mistaken_backward_whose_worker_dies_before_it(
    single: mpgrad.Pool, tmp_path: Path, how: dict[str, bool]
) -> None:
    """Symptom: a second backward with `retain_graph` added its gradients, if its worker died before
    it. Cause: its graph, which was used up, counted as rebuilt, and so as lost."""
    (x,) = leaves(1)
    (loss,) = single.map(lambda x: (x * x).sum(), [x])
    loss.backward()
    once = x.grad.clone()
    dying = single.submit(dies_when, tmp_path)

    def goes_when_it_is_sent() -> None:
        eventually(lambda: single.stats().backwards_left > 0)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=goes_when_it_is_sent)
    thread.start()
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        loss.backward(**how)
    thread.join()
    dying.result()
    assert single.stats().deaths == 1 and torch.equal(x.grad, once)
