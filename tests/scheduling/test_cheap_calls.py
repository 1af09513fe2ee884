"""Calls that take less time than sending them: they mean what they would in a loop, and the log
says that they cost."""

from __future__ import annotations

import logging
import operator
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import staffed

import mpgrad
from mpgrad.scheduling.known_functions import KnownFunctions
from mpgrad.submission.submitter import MAPS, TOLD, CheapCalls
from mpgrad.testing import assert_same_as_serial
from mpgrad.wire.messages import Results

pytestmark = pytest.mark.quick

Tensor = torch.Tensor
weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64, requires_grad=True)


def items(count: int = 6) -> list[Tensor]:
    return [
        torch.linspace(-1, 1 + i, 5, dtype=torch.float64, requires_grad=True) for i in range(count)
    ]


def known(pool: mpgrad.Pool, function: Callable[[Any], Any], xs: list[Any]) -> list[Any]:
    """The results of a map whose function's cost is known from another one."""
    pool.map(function, xs)
    return pool.map(function, xs)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: (x.sin() * weight).exp(),
    "several": lambda x: (x * 2, weight * x),
    "a structure": lambda x: {"a": [x.sin(), 3], "b": (x.detach(), None)},
    "the argument itself": lambda x: x,
    "written to": lambda x: x.sin().mul_(2).add_(weight),
    "a view of the argument": lambda x: x[1:3],
    "no tensor": lambda x: float(x.sum().detach()),
    "under no_grad": torch.no_grad()(lambda x: x * weight),
}


def test_a_leaf_that_is_returned(pool2: mpgrad.Pool) -> None:
    """It may be a package's: it is as in the loop."""
    for _ in range(4):
        assert_same_as_serial(
            lambda x: torch.ones(3, dtype=torch.float64, requires_grad=True),
            items(),
            pool2,
            order=2,
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_as_in_a_serial_loop(pool2: mpgrad.Pool, name: str) -> None:
    function = FUNCTIONS[name]
    known(pool2, function, items())
    assert_same_as_serial(function, items(), pool2, order=2)


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_calls_that_go_together_and_others_between(pool2: mpgrad.Pool) -> None:
    def function(x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        seen.append(x)
        if x.numel() == 3:
            return [x.exp(), len(seen)]  # a list, which goes on by itself
        return (x * weight.to(x.dtype)[: x.numel()]).sum()

    seen: list[Tensor] = []
    leaf = torch.ones(10, requires_grad=True)
    others = [
        (torch.ones(2, requires_grad=True),),
        torch.ones(3),
        leaf[2:7],
        torch.ones(5),
        torch.ones(5).double(),
    ]
    xs = [
        others[k % 5] if k % 17 == 0 else torch.full((1 + k % 5,), float(k), requires_grad=True)
        for k in range(100)
    ]
    found = known(pool2, function, xs)
    serial: list[Any] = list(map(function, xs))
    leaves = [
        leaf,
        weight,
        *(x for x in xs if isinstance(x, Tensor) and x.is_leaf and x.requires_grad),
    ]

    def gradients(results: list[Any]) -> list[Tensor | None]:
        tensors = [r[0] if isinstance(r, list) else r for r in results]
        return list(torch.autograd.grad(sum(t.sum() for t in tensors), leaves, allow_unused=True))

    for ours, theirs in zip(found, serial, strict=True):
        assert torch.equal(
            *(each[0] if isinstance(each, list) else each for each in (ours, theirs))
        )
    assert all(
        ours is theirs or torch.equal(ours, theirs)
        for ours, theirs in zip(*map(gradients, (found, serial)), strict=True)
    )
    assert len(seen) == 100  # workers have lists of their own


def test_structured_arguments_and_starmap(pool2: mpgrad.Pool) -> None:
    def function(pair: dict[str, Tensor]) -> Tensor:
        return pair["a"] * pair["b"] * weight

    xs = [{"a": a, "b": b} for a, b in zip(items(), items(), strict=True)]
    known(pool2, function, xs)
    assert_same_as_serial(function, xs, pool2)
    pairs = list(zip(items(), items(), strict=True))
    for _ in range(2):
        found = pool2.starmap(torch.mul, pairs)
    assert all(torch.equal(each, a * b) for each, (a, b) in zip(found, pairs, strict=True))
    assert pool2.apply(torch.mul, pairs[1]).equal(pairs[1][0] * pairs[1][1])


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_arguments_and_captures_are_private(pool2: mpgrad.Pool) -> None:
    def write(x: Tensor) -> Tensor:
        return x.add_(1)

    xs = [torch.zeros(3) for _ in range(5)]
    assert all(torch.equal(each, torch.ones(3)) for each in known(pool2, write, xs))
    assert not any(x.any() for x in xs)
    state = torch.zeros(3)
    box: list[int] = []

    def remember(x: Tensor) -> int:
        box.append(1)
        return len(box)

    known(pool2, remember, xs)
    assert box == []

    def count(x: Tensor) -> Tensor:
        return state.add_(1) + x

    with pytest.warns(UserWarning, match="wrote into a tensor that it captures"):
        pool2.map(count, xs)
    with pytest.warns(UserWarning, match="wrote into a tensor that it captures"):
        pool2.map(count, xs)
    assert not state.any()


def test_writes_to_leaves_are_refused(pool2: mpgrad.Pool) -> None:
    def sometimes(x: Tensor) -> Tensor:
        return x.add_(1) if x.numel() == 3 else x * 2

    fine, bad = items(3), [torch.zeros(3, requires_grad=True)]
    known(pool2, sometimes, fine)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad") as caught:
        pool2.map(sometimes, [*fine, *bad])
    assert "item 3" in "".join(caught.value.__notes__)
    assert not bad[0].any()


def test_errors_name_item_and_worker(pool2: mpgrad.Pool) -> None:
    def picky(x: int) -> int:
        if x == 7:
            raise KeyError("seven")
        return x

    assert known(pool2, picky, list(range(5))) == list(range(5))
    with pytest.raises(KeyError, match="seven") as caught:
        pool2.map(picky, range(20))
    assert "item 7" in "".join(caught.value.__notes__) and "worker" in "".join(
        caught.value.__notes__
    )
    found = pool2.map(picky, range(9), on_error="return")
    assert [*found[:7], found[8]] == [*range(7), 8] and isinstance(found[7], KeyError)

    def unpicklable(x: int) -> Any:
        return (y for y in [x]) if x else x

    known(pool2, unpicklable, [0, 0])
    with pytest.raises(TypeError, match="the result cannot be sent"):
        pool2.map(unpicklable, [0, 1])


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()).item(), lambda: random.random()], ids=["torch", "random"]
)
def test_random_numbers_are_those_of_the_workers(
    pool2: mpgrad.Pool, draw: Callable[[], float]
) -> None:
    """And those of the caller go on as if nothing had been drawn."""

    def noisy(x: int) -> float:
        return draw()

    found, after = [], []
    for _ in range(3):
        torch.manual_seed(1)
        random.seed(1)
        found.append(pool2.map(noisy, range(10)))
        after.append((torch.rand(()).item(), random.random()))
    assert found[0] == found[1] == found[2] and after[0] == after[1] == after[2]
    torch.manual_seed(1)
    with mpgrad.Pool(2) as other:
        assert other.map(noisy, range(10)) == found[0]


def test_each_map_draws_the_same_from_the_caller(pool2: mpgrad.Pool) -> None:
    after = []
    for _ in range(20):
        torch.manual_seed(1)
        pool2.map(abs, range(3))
        after.append(torch.rand(()).item())
    assert len(set(after)) == 1


def test_captures_are_as_they_are_now(pool2: mpgrad.Pool) -> None:
    scale = torch.ones(3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return x * scale

    xs = [torch.ones(3) for _ in range(4)]
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            scale.fill_(value)
        assert all(torch.equal(each, torch.full((3,), value)) for each in pool2.map(function, xs))
    (gradient,) = torch.autograd.grad(sum(each.sum() for each in pool2.map(function, xs)), scale)
    assert torch.equal(gradient, torch.full((3,), 4.0))


def test_modes_and_modules(pool2: mpgrad.Pool) -> None:
    network = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()
    known(pool2, network, items())
    assert_same_as_serial(network, items(), pool2)
    with torch.no_grad():
        assert not any(each.requires_grad for each in pool2.map(network, items()))
    with torch.inference_mode():
        assert all(each.is_inference() for each in pool2.map(network, items()))
    assert not any(parameter.grad is not None for parameter in network.parameters())


def test_an_empty_map_and_a_closed_pool(fresh_pool: mpgrad.Pool) -> None:
    known(fresh_pool, abs, [1, 2])
    assert fresh_pool.map(abs, []) == [] and fresh_pool.map(len, []) == []
    fresh_pool.close()
    with pytest.raises(mpgrad.PoolClosedError):
        fresh_pool.map(abs, [1])


def test_an_interrupt_leaves_the_pool_whole(pool2: mpgrad.Pool) -> None:
    def stop(x: int) -> int:
        if x == 3:
            raise KeyboardInterrupt
        return x

    known(pool2, stop, [1, 2])
    with pytest.raises(KeyboardInterrupt):
        pool2.map(stop, range(10))
    assert pool2.map(abs, range(-3, 3)) == [3, 2, 1, 0, 1, 2]


def test_long_maps(pool2: mpgrad.Pool) -> None:
    count = 1283
    for _ in range(2):
        assert pool2.map(abs, iter(range(-count, 0))) == list(range(count, 0, -1))


def test_hooks_inside_of_the_function_and_on_results(pool2: mpgrad.Pool) -> None:
    """Symptom: hooks called with None. Cause: copies of several calls were outputs of one node."""

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad.clamp(-1, 1))
        return x * 5

    xs = items(40)
    results = known(pool2, hooked, xs)
    same = known(pool2, lambda x: x, xs)
    same[4].register_hook(lambda grad: grad * 2)
    results[5].sum().backward()
    same[6].sum().backward()
    assert xs[4].grad is None and torch.equal(xs[5].grad, torch.ones_like(xs[5]))  # type: ignore[arg-type]


def test_a_backward_for_some_inputs_leaves_the_others_alone(pool2: mpgrad.Pool) -> None:
    xs = items(40)
    total = torch.stack([each.sum() for each in known(pool2, torch.exp, xs)]).sum()
    for x in xs:
        assert torch.equal(
            torch.autograd.grad(total, x, retain_graph=x is not xs[-1])[0], x.detach().exp()
        )
    results = known(pool2, lambda x: (x**2).sum(), xs)
    torch.autograd.grad(torch.stack(results).sum(), xs[3])
    torch.autograd.grad(torch.stack(results[4:]).sum(), xs[4])


def test_the_end_of_the_program_in_a_call(pool2: mpgrad.Pool) -> None:
    """It is that of the call only."""

    def ends(k: int) -> int:
        if k == 57:
            torch.rand(1)
            raise SystemExit("at 57")
        return k

    known(pool2, ends, [1] * 60)
    for _ in range(2):
        torch.manual_seed(0)
        found = pool2.map(ends, range(60), on_error="return")
        drawn = torch.rand(1)
        assert found[:57] == list(range(57)) and repr(found[57]) == "SystemExit('at 57')"
    torch.manual_seed(0)
    with mpgrad.Pool(2) as pool:
        pool.map(ends, range(60), on_error="return")
    assert torch.equal(torch.rand(1), drawn)


def test_what_calls_take_is_that_of_forward_and_eager_backward() -> None:
    codes = KnownFunctions({})
    function: Any = SimpleNamespace(pickled=b"f", code=0)
    codes.number(function)
    assert codes.own_seconds(b"f") is None

    def results(items: int, eager: float) -> float | None:
        codes.note_results(
            function,
            Results(1, [], 2e-3 * items, 1e-3 * items, eager * items, False, [], [], 0),
            items,
        )
        return codes.own_seconds(b"f")

    assert results(10, 0.0) == pytest.approx(1e-3)
    for _ in range(30):
        found = results(10, 3e-3)
    assert found == pytest.approx(4e-3)


# --- the line in the log


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the log says of calls that are too cheap; nobody has been told of any function
    before."""
    before = dict(TOLD)
    TOLD.clear()
    caplog.set_level(logging.WARNING, "mpgrad")
    yield lambda: [
        each.getMessage() for each in caplog.records if "too cheap for a pool" in each.getMessage()
    ]
    TOLD.update(before)


def tiny(x: Tensor) -> Tensor:
    return x * 2


def slow(x: Tensor) -> Tensor:
    time.sleep(0.02)
    return x * 2


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)


def many() -> list[Tensor]:
    return [torch.ones(3, requires_grad=True) for _ in range(40)]


def test_the_log_says_once_that_sending_costs_more(
    log: Callable[[], list[str]], fork_server: mpgrad.Pool
) -> None:
    with staffed(mpgrad.Pool(2)) as pool:
        pool.map(tiny, many())  # each worker gets to know the function: that does not count
        while len(log()) == 0 and pool.stats().calls < 200 * 40:
            pool.map(tiny, many())
        (line,) = log()
        assert pool.stats().calls >= (1 + MAPS) * 40
        place = f"{__file__}:{tiny.__code__.co_firstlineno}"
        assert line.startswith(
            f"tiny ({place}) is too cheap for a pool: its last {MAPS} maps took "
        )
        took, own = (float(each.rpartition(" ")[2]) for each in line.split(" ms")[:2])
        assert took > 1.5 * own > 0
        # On a busy machine any part of a map may take most of its time.
        remedies = "use larger items, several items in one call, or a plain loop", "read-only"
        assert line.endswith(remedies)
        for _ in range(2 * MAPS):
            pool.map(tiny, many())
    with staffed(mpgrad.Pool(2, engine="thread")) as pool:  # not in another pool either
        for _ in range(2 * (1 + MAPS)):
            pool.map(tiny, many())
    assert log() == [line]


TABLE: dict[int, float] = {}


def entry(x: Tensor) -> Tensor:
    return x * TABLE[7]


def test_the_log_names_what_is_large(
    log: Callable[[], list[str]], fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TABLE", {number: number / 2 for number in range(300_000)})
    with staffed(mpgrad.Pool(1)) as pool:
        while not any("; checking" in line for line in log()) and pool.stats().calls < 400:
            TOLD.clear()  # the last maps may have been slow because the machine was busy
            pool.map(entry, [torch.ones(3)] * 2)
    line = log()[-1]
    assert f"; checking {__name__}.TABLE for changes took " in line
    assert " ms of this; make it smaller" in line


def test_starmap_counts_and_single_calls_do_not(
    log: Callable[[], list[str]], fork_server: mpgrad.Pool
) -> None:
    with staffed(mpgrad.Pool(1)) as pool:
        for count in range(200):
            pool.apply(abs, (-1,))
            pool.starmap(max, [(1, 2)] * 40)
            if count >= 20 and log():
                break
    assert [line.partition(" is ")[0] for line in log()] == ["max"]


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_the_log_does_not_mind_long_calls(
    engine: Any, log: Callable[[], list[str]], fork_server: mpgrad.Pool
) -> None:
    with staffed(mpgrad.Pool(2, engine=engine)) as pool:
        for _ in range(2 + MAPS):
            pool.map(slow, many()[:4])
    assert log() == []


def test_the_log_does_not_mind_waiting_for_items(
    log: Callable[[], list[str]], fork_server: mpgrad.Pool
) -> None:
    def slowly() -> Iterator[Tensor]:
        for x in many()[:3]:
            time.sleep(0.005)
            yield x

    with staffed(mpgrad.Pool(1)) as pool:
        for _ in range(2 + MAPS):
            pool.map(tiny, slowly())
            pool.map(tiny, [pool.submit(slow, x) for x in many()[:2]])
    assert log() == []


@pytest.mark.slow
def test_the_log_does_not_mind_waiting_for_workers(
    log: Callable[[], list[str]], fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """They may have to start, or do something else."""
    for _ in range(2 + MAPS):
        with mpgrad.Pool(1) as pool:
            pool.map(tiny, many())
    with mpgrad.Pool(1, maxtasksperchild=1) as pool:
        for _ in range(2 + MAPS):
            pool.map(tiny, many()[:1])
    with staffed(mpgrad.Pool(1)) as pool, ThreadPoolExecutor(2) as threads:
        for number in range(2 + MAPS):
            go = tmp_path / str(number)
            threads.submit(pool.map, until, [go])
            while pool.stats().calls_left == 0:
                time.sleep(0.001)
            waits = threads.submit(pool.map, tiny, many())
            while pool.stats().calls_left == 1:
                time.sleep(0.001)
            go.touch()
            waits.result()
    assert not [line for line in log() if line.startswith("tiny")]


def test_the_log_does_not_mind_one_slow_map(log: Callable[[], list[str]]) -> None:
    """The machine may have done something else."""
    shared = SimpleNamespace(
        is_new=False,
        pickled=b"waits",
        seconds=0.0,
        state=None,
        names=SimpleNamespace(function="waits"),
    )
    operation: Any = SimpleNamespace(
        options=SimpleNamespace(function=shared), items=1, own_seconds=1e-3
    )
    scheduler: Any = SimpleNamespace(receiver=SimpleNamespace(answers=1))
    cheap_calls = CheapCalls(scheduler)
    for _ in range(3):
        for seconds in [0.1] * (MAPS - 1) + [1e-3]:
            cheap_calls.note(time.sleep, operation, seconds, answers=0)
    assert log() == []
    for _ in range(MAPS):
        cheap_calls.note(time.sleep, operation, 0.1, answers=0)
    assert len(log()) == 1


def test_the_log_is_silent_inline_and_of_failures(
    log: Callable[[], list[str]], fork_server: mpgrad.Pool
) -> None:
    with mpgrad.Pool(engine="inline") as pool:
        for _ in range(2 + MAPS):
            pool.map(tiny, many())
    with staffed(mpgrad.Pool(1)) as pool:
        for _ in range(2 + MAPS):
            pool.map(int, ["x"] * 4, on_error="return")
            pool.map_reduce(tiny, many(), "sum")  # a function of ours
            with pytest.raises(ValueError, match="invalid literal"):
                pool.map(int, ["y"] * 4)
    assert log() == []


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
