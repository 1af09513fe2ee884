"""`graphs="auto"`: eager backwards once it is known which gradients come. Their values are those of
the serial loop."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import first_are_quick, passes_with

import mpgrad
from mpgrad.machine.timing import CONFIRMED, LEAST
from mpgrad.scheduling.gradients import GradientSender
from mpgrad.workers import memory

Tensor = torch.Tensor
HERE = Path(__file__).parent
SECOND_TIME = "Trying to backward through the graph a second time"

weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64, requires_grad=True)


def loss(x: Tensor) -> Tensor:
    return (x.sin() * weight).exp().sum().square()


def items(count: int = 12) -> list[Tensor]:
    return [
        torch.linspace(-1, 1 + i, 5, dtype=torch.float64, requires_grad=True) for i in range(count)
    ]


def mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


@pytest.fixture(
    params=first_are_quick(1, [{}, {"deterministic": True}, {"graph_memory": "1 MiB"}]), ids=str
)
def pool(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(2, **request.param) as pool:
        yield pool


@pytest.fixture
def single(fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(1) as pool:
        yield pool


def gradients(
    losses: list[Tensor], xs: list[Tensor], combine: Callable[[list[Tensor]], Tensor]
) -> list[Tensor | None]:
    return list(torch.autograd.grad(combine(losses), [*xs, weight], allow_unused=True))


def learn(
    pool: mpgrad.Pool,
    function: Callable[[Any], Any] = loss,
    combine: Callable[[list[Tensor]], Tensor] = mean,
) -> None:
    """Have the pool predict for the function's losses what `combine` brings to twelve, and drop
    their graphs."""
    for _ in range(LEAST + CONFIRMED):
        combine(pool.map(function, items())).backward()
    weight.grad = None


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The backwards that go to workers."""
    found: list[object] = []
    send = GradientSender.send

    def noted(self: GradientSender, *args: Any, **options: Any) -> Any:
        found.append(args)
        return send(self, *args, **options)

    monkeypatch.setattr(GradientSender, "send", noted)
    return found


def test_what_is_learned_saves_the_way(single: mpgrad.Pool, sent: list[object]) -> None:
    for step in range(LEAST + 3):
        xs = items()
        # a function without captures, whose sums would be fetched
        losses = single.map(lambda x: x.square().sum(), xs)
        sent.clear()
        mean(losses).backward()
        assert bool(sent) == (step < LEAST)
        ys = items()
        mean([y.square().sum() for y in ys]).backward()
        assert all(
            torch.equal(cast("Tensor", x.grad), cast("Tensor", y.grad))
            for x, y in zip(xs, ys, strict=True)
        )


COMBINATIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "the mean": mean,
    "another gradient": lambda losses: torch.stack(losses).sum() / 7,
    "different ones": lambda losses: (
        torch.stack(losses) @ torch.linspace(0, 1, 12, dtype=torch.float64)
    ),
    "some": lambda losses: (losses[3] + losses[7]) / 12,
    "one by one": lambda losses: sum(losses) / 12,  # type: ignore[return-value]
    "squared": lambda losses: torch.stack(losses).mean().square(),
}


def test_gradients_are_those_of_the_loop_whatever_was_expected(pool: mpgrad.Pool) -> None:
    for combine, chunksize in itertools.product(COMBINATIONS.values(), (None, 1, 1)):
        learn(pool)
        xs = items()
        expected = gradients(list(map(loss, xs)), xs, combine)
        *found, of_weight = gradients(pool.map(loss, xs, chunksize), xs, combine)
        assert str(found) == str(expected[:-1]) and all(
            map(torch.equal, filter_none(found), filter_none(expected[:-1]))
        )
        torch.testing.assert_close(of_weight, expected[-1])


def filter_none(grads: list[Tensor | None]) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


def test_a_gradient_with_a_rounding_of_its_own_comes_bit_for_bit(single: mpgrad.Pool) -> None:

    def function(x: Tensor) -> Tensor:
        return (x.exp() / 3).sum().sin()

    def seventh(losses: list[Tensor]) -> Tensor:
        return torch.stack(losses).sum() / 7

    for _ in range(LEAST + 1):
        xs, ys = items(), items()
        seventh(single.map(function, xs)).backward()
        seventh(list(map(function, ys))).backward()
        assert all(
            torch.equal(cast("Tensor", x.grad), cast("Tensor", y.grad))
            for x, y in zip(xs, ys, strict=True)
        )


@pytest.mark.parametrize("name", first_are_quick(3, ["mean", *COMBINATIONS]))
@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_wrong_prediction_costs_a_second_run_at_most(
    fork_server: mpgrad.Pool, tmp_path: Path, name: str, is_confirmed: bool
) -> None:
    """And none while graphs are kept, until some predictions were right."""

    def counted(x: Tensor) -> Tensor:
        with (tmp_path / "calls").open("a") as file:
            file.write(".")
        return loss(x)

    combine = COMBINATIONS.get(name, mean)
    with mpgrad.Pool(1) as pool:
        for _ in range(LEAST + CONFIRMED * is_confirmed):
            gradients(pool.map(counted, xs := items(), 1), xs, mean)
        (tmp_path / "calls").write_text("")
        gradients(pool.map(counted, xs := items(), 1), xs, combine)
        again = {"mean": 0, "the mean": 0, "one by one": 0, "some": 2}.get(name, 12)
        assert len((tmp_path / "calls").read_text()) == 12 + again * is_confirmed
        # of "some" ten get no gradient, and the worker has a sum of all
        assert pool.stats().wrong_predictions == (11 if name == "some" else again)


def test_a_backward_for_each_loss_runs_nothing_again(single: mpgrad.Pool, tmp_path: Path) -> None:
    """The sum that the worker has of the captures' gradients is none that a backward wants; each
    was run again, every time."""

    def counted(x: Tensor) -> Tensor:
        with (tmp_path / "calls").open("a") as file:
            file.write(".")
        return loss(x)

    for _ in range(LEAST + 3):
        for each in single.map(counted, items(), 1):
            each.backward()
    found, weight.grad = weight.grad, None
    assert len((tmp_path / "calls").read_text()) == 12 * (LEAST + 3)
    for each in [loss(x) for _ in range(LEAST + 3) for x in items()]:
        each.backward()
    expected, weight.grad = weight.grad, None
    torch.testing.assert_close(found, expected)


def test_a_second_backward_raises_as_in_the_loop(single: mpgrad.Pool) -> None:
    learn(single)
    total = mean(single.map(loss, items()))
    total.backward()
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        total.backward()


def test_a_graph_that_is_kept_can_be_used_again(single: mpgrad.Pool) -> None:
    learn(single)
    xs, ys = items(), items()
    found, expected = mean(single.map(loss, xs)), mean(list(map(loss, ys)))
    for keep in (True, True, False):
        for ours, theirs in zip(
            torch.autograd.grad(found, xs, retain_graph=keep),
            torch.autograd.grad(expected, ys, retain_graph=keep),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


def test_what_a_backward_does_it_does_when_it_comes(single: mpgrad.Pool, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def noted(grad: Tensor) -> None:
        log.write_text(log.read_text() + f"{grad[0].item()} ")

    def hooked(x: Tensor) -> Tensor:
        inner = x * 2
        inner.register_hook(noted)
        return loss(inner)

    for _ in range(LEAST + 2):
        log.write_text("")
        losses = single.map(hooked, items(3))
        assert log.read_text() == ""
        mean(losses).backward()
        assert len(log.read_text().split()) == 3


def test_results_without_a_backward_end_it(single: mpgrad.Pool, sent: list[object]) -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp().sum()

    for _ in range(LEAST + 1):
        sent.clear()
        mean(single.map(function, items())).backward()
    assert not sent
    single.map(function, items())
    mean(single.map(function, items())).backward()
    assert sent


@pytest.mark.parametrize("is_over", [False, True], ids=["before", "after"])
def test_a_death(pool: mpgrad.Pool, is_over: bool) -> None:
    """Before or after the eager backward has come."""
    learn(pool)
    xs, ys = items(), items()
    total, expected = mean(pool.map(loss, xs)), mean(list(map(loss, ys)))
    if is_over:
        total.backward(inputs=xs, retain_graph=True)
        expected.backward(inputs=ys, retain_graph=True)
    os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
    total.backward(inputs=xs)
    expected.backward(inputs=ys)
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


def test_derivatives_of_derivatives(pool: mpgrad.Pool) -> None:
    def combined(*xs: Tensor) -> Tensor:
        return mean(pool.map(loss, list(xs)))

    learn(pool)
    assert torch.autograd.gradcheck(combined, items(3)) and torch.autograd.gradgradcheck(
        combined, items(2)
    )


@pytest.mark.slow
def test_the_core_tests_pass_if_every_loss_is_taken_to_get_one() -> None:
    passes_with(HERE / "losses_get_one.py", "captures", "higher_order", "consumed")


# --- memory that is about to end


def limited(folder: Path, used: int) -> None:
    """As a control group of 1000 bytes shows itself, of which so many are used."""
    (folder / "memory.max").write_text("1000\n")
    (folder / "memory.current").write_text(f"{used + 50}\n")
    (folder / "memory.stat").write_text("anon 7\ninactive_file 20\nactive_file 30\n")


@pytest.mark.quick
def test_a_limit_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SELDOM", 0.0)
    monkeypatch.setattr(memory, "OFTEN", 0.0)
    assert not memory.MemoryMonitor([]).is_short()
    assert not memory.MemoryMonitor([tmp_path / "without a limit"]).is_short()
    limited(tmp_path, 850)
    watch = memory.MemoryMonitor([tmp_path])
    assert not watch.is_short()
    limited(tmp_path, 851)
    assert watch.is_short()
    limited(tmp_path, 500)
    assert not watch.is_short()
    limited(tmp_path, 700)
    assert watch.is_short()  # the next call may take as much as this one, in the other worker too
    assert not watch.is_short()
    limited(tmp_path, 900)
    monkeypatch.setattr(memory, "OFTEN", 100.0)
    assert watch.is_short() and not watch.is_short()  # it has just looked


@pytest.mark.parametrize(
    ("options", "runs"), [({}, 24), ({"graphs": "keep"}, 12), ({"retries": 0}, 12)], ids=str
)
def test_graphs_are_dropped_when_memory_is_short(
    fork_server: mpgrad.Pool, tmp_path: Path, options: dict[str, Any], runs: int
) -> None:
    """Half of those that are there, after each call: in the end all were dropped once."""
    folder, begun = tmp_path / "cgroup", tmp_path / "begun"
    folder.mkdir()

    def initializer() -> None:
        memory.own_cgroups = lambda _: [folder]  # type: ignore[attr-defined]
        memory.SELDOM = memory.OFTEN = 0.0

    def function(x: Tensor) -> Tensor:
        with begun.open("a") as file:
            file.write(".")
        return loss(x)

    def step(pool: mpgrad.Pool) -> list[Tensor | None]:
        xs = items()
        begun.write_text("")
        return gradients(pool.map(function, xs, chunksize=1), xs, mean)

    limited(folder, 500)
    xs = items()
    expected = gradients([loss(x) for x in xs], xs, mean)
    with mpgrad.Pool(1, initializer=initializer, deterministic=True, **options) as pool:
        assert all(map(same, step(pool), expected)) and len(begun.read_text()) == 12
        limited(folder, 950)
        assert all(map(same, step(pool), expected))
        assert len(begun.read_text()) == runs


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


# --- whose graphs have gone


class Clipped(torch.autograd.Function):
    """An identity whose backward is no multiplication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.3, 0.3)


def clipped(x: Tensor) -> Tensor:
    return loss(Clipped.apply(x))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("function", [loss, clipped])
def test_nothing_is_kept_and_no_second_trip_is_made(
    single: mpgrad.Pool, function: Callable[[Tensor], Tensor]
) -> None:
    """Nor of functions that call a custom `autograd.Function`."""
    learn(single, function)
    losses = single.map(function, items())
    (worker,) = single.stats().workers
    assert worker.graphs == 0
    with torch.no_grad():
        total = mean(losses)
    assert total == mean([function(x) for x in items()])


def test_a_worker_that_stands_still_is_not_asked(single: mpgrad.Pool) -> None:
    def square(x: Tensor) -> Tensor:
        return x.square().sum()

    learn(single, square)
    xs = items()
    losses = single.map(square, xs)
    (worker,) = single.stats().workers
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        mean(losses).backward()
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    ys = items()
    mean(list(map(square, ys))).backward()
    assert all(
        torch.equal(cast("Tensor", x.grad), cast("Tensor", y.grad))
        for x, y in zip(xs, ys, strict=True)
    )


@pytest.mark.parametrize("name", [*COMBINATIONS, "retained"])
def test_gradients_when_the_worker_is_gone(single: mpgrad.Pool, name: str) -> None:
    """What it had added up, and what it would have to run again, is made by another one."""
    learn(single)
    xs, ys = items(), items()
    losses = single.map(loss, xs)
    os.kill(single.stats().workers[0].pid, signal.SIGKILL)
    combine = COMBINATIONS.get(name, mean)
    expected = gradients(list(map(loss, ys)), ys, combine)
    if name == "retained":
        torch.autograd.grad(combine(losses), xs, retain_graph=True)
    *found, of_weight = gradients(losses, xs, combine)
    assert all(map(torch.equal, filter_none(found), filter_none(expected[:-1])))
    torch.testing.assert_close(of_weight, expected[-1])


def test_a_backward_of_a_result_that_was_passed_on(single: mpgrad.Pool) -> None:
    """Losses of calls whose results go to other calls get gradients from worker to worker."""

    def run(call: Callable[..., Any], value: Callable[[Any], Any]) -> Any:
        xs = items(4)
        first = [call(loss, x) for x in xs]
        scaled = [call(lambda a, x: (a * x).sum(), a, x) for a, x in zip(first, xs, strict=True)]
        total = sum(map(value, [*scaled, first[0]]))
        return torch.autograd.grad(total, [*xs, weight])

    expected = run(lambda fn, *args: fn(*args), lambda value: value)
    for _ in range(LEAST + CONFIRMED + 2):
        found = run(single.submit, lambda future: future.result())
        torch.testing.assert_close(found, expected)


class Unwilling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("no gradient today")
        return grad.expand(5), None


def test_an_error_of_the_backward_is_raised_by_the_backward(single: mpgrad.Pool) -> None:
    def function(x: Tensor) -> Tensor:
        return Unwilling.apply(x, bool(x[0] > 0))  # type: ignore[no-untyped-call, no-any-return]

    learn(single, function)
    results = single.map(function, [x.detach().neg().requires_grad_() for x in items(3)])
    with pytest.raises(ArithmeticError, match="no gradient today") as caught:
        results[1].backward()
    assert "item 1" in "".join(caught.value.__notes__)
    learn(single, function)
