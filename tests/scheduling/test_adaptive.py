"""Calls too cheap to be sent: they mean what they would in a worker, and what would not is sent."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import staffed

import mpgrad
from mpgrad.scheduling.costs import Costs
from mpgrad.scheduling.function_cache import Codes, Ran
from mpgrad.scheduling.run_in_caller import CALLS_AT_ONCE
from mpgrad.testing import assert_same_as_serial
from mpgrad.wire.messages import Results

pytestmark = pytest.mark.quick

Tensor = torch.Tensor
weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def cheap(nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    """A pool for which sending is so dear that whatever is known runs here."""
    with mpgrad.Pool(2) as pool:
        staffed(pool)  # what a call takes here, while workers start, says nothing
        pool._submitter.costs._sending = 1.0
        yield pool


def items(count: int = 6) -> list[Tensor]:
    return [torch.linspace(-1, 1 + i, 5, dtype=torch.float64, requires_grad=True) for i in range(count)]


def here(pool: mpgrad.Pool) -> int:
    return pool.stats().calls_here


def known(pool: mpgrad.Pool, function: Callable[[Any], Any], xs: list[Any]) -> list[Any]:
    """The results of a map whose function's cost is known from others."""
    in_a_row = 0
    for _ in range(50):  # the first calls in a fresh process may take long
        before = here(pool)
        results = pool.map(function, xs)
        in_a_row = in_a_row + 1 if here(pool) == before + len(xs) else 0
        if in_a_row == 3:
            return results
    raise AssertionError("a cheap function is not run here")


def known_for_good(pool: mpgrad.Pool, function: Callable[[Any], Any], xs: list[Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of calls that have run here so far. From now on they are thought cheap, however slow the machine is."""
    known(pool, function, xs)
    monkeypatch.setattr(Costs, "pays", lambda *_: True)
    return here(pool)


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


def test_a_leaf_that_is_returned(cheap: mpgrad.Pool) -> None:
    """It may be a package's: wherever the call runs, it is as in the loop."""
    for _ in range(4):
        assert_same_as_serial(lambda x: torch.ones(3, dtype=torch.float64, requires_grad=True), items(), cheap, order=2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_here_as_in_a_serial_loop(cheap: mpgrad.Pool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = FUNCTIONS[name]
    before = known_for_good(cheap, function, items(), monkeypatch)
    assert_same_as_serial(function, items(), cheap, order=2)
    assert here(cheap) > before


def test_calls_that_are_looked_at_together_and_others_between(cheap: mpgrad.Pool) -> None:
    def function(x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        seen.append(x)
        if x.numel() == 3:
            return [x.exp(), len(seen)]  # a list, which goes on by itself
        return (x * weight.to(x.dtype)[: x.numel()]).sum()

    seen: list[Tensor] = []
    leaf = torch.ones(10, requires_grad=True)
    others = [(torch.ones(2, requires_grad=True),), torch.ones(3), leaf[2:7], torch.ones(5), torch.ones(5).double()]
    xs = [others[k % 5] if k % 17 == 0 else torch.full((1 + k % 5,), float(k), requires_grad=True) for k in range(100)]
    found = known(cheap, function, xs)
    serial: list[Any] = list(map(function, xs))
    leaves = [leaf, weight, *(x for x in xs if isinstance(x, Tensor) and x.is_leaf and x.requires_grad)]

    def gradients(results: list[Any]) -> list[Tensor | None]:
        tensors = [r[0] if isinstance(r, list) else r for r in results]
        return list(torch.autograd.grad(sum(t.sum() for t in tensors), leaves, allow_unused=True))

    for ours, theirs in zip(found, serial, strict=True):
        assert torch.equal(*(each[0] if isinstance(each, list) else each for each in (ours, theirs)))
    assert all(
        ours is theirs or torch.equal(ours, theirs) for ours, theirs in zip(*map(gradients, (found, serial)), strict=True)
    )
    assert len(seen) == 100  # calls here have a list of their own


def test_structured_arguments_and_starmap(cheap: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(pair: dict[str, Tensor]) -> Tensor:
        return pair["a"] * pair["b"] * weight

    xs = [{"a": a, "b": b} for a, b in zip(items(), items(), strict=True)]
    before = known_for_good(cheap, function, xs, monkeypatch)
    assert_same_as_serial(function, xs, cheap)
    assert here(cheap) > before
    pairs = list(zip(items(), items(), strict=True))
    for _ in range(2):
        found = cheap.starmap(torch.mul, pairs)
    assert all(torch.equal(each, a * b) for each, (a, b) in zip(found, pairs, strict=True))
    assert cheap.apply(torch.mul, pairs[1]).equal(pairs[1][0] * pairs[1][1])


def test_arguments_and_captures_are_private(cheap: mpgrad.Pool) -> None:
    def write(x: Tensor) -> Tensor:
        return x.add_(1)

    xs = [torch.zeros(3) for _ in range(5)]
    assert all(torch.equal(each, torch.ones(3)) for each in known(cheap, write, xs))
    assert not any(x.any() for x in xs)
    state = torch.zeros(3)
    box: list[int] = []

    def remember(x: Tensor) -> int:
        box.append(1)
        return len(box)

    known(cheap, remember, xs)
    assert box == []

    def count(x: Tensor) -> Tensor:
        return state.add_(1) + x

    with pytest.warns(UserWarning, match="wrote into a tensor that it captures"):
        cheap.map(count, xs)
    with pytest.warns(UserWarning, match="wrote into a tensor that it captures"):
        cheap.map(count, xs)  # tried here, and sent
    assert not state.any()


def test_writes_to_leaves_are_refused_here_as_there(cheap: mpgrad.Pool) -> None:
    def sometimes(x: Tensor) -> Tensor:
        return x.add_(1) if x.numel() == 3 else x * 2

    fine, bad = items(3), [torch.zeros(3, requires_grad=True)]
    known(cheap, sometimes, fine)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad") as caught:
        cheap.map(sometimes, [*fine, *bad])
    assert "item 3" in "".join(caught.value.__notes__)
    assert not bad[0].any()


def test_errors_are_those_of_a_worker(cheap: mpgrad.Pool) -> None:
    def picky(x: int) -> int:
        if x == 7:
            raise KeyError("seven")
        return x

    assert known(cheap, picky, list(range(5))) == list(range(5))
    with pytest.raises(KeyError, match="seven") as caught:
        cheap.map(picky, range(20))
    assert "item 7" in "".join(caught.value.__notes__) and "worker" in "".join(caught.value.__notes__)
    found = cheap.map(picky, range(9), on_error="return")
    assert [*found[:7], found[8]] == [*range(7), 8] and isinstance(found[7], KeyError)

    def unpicklable(x: int) -> Any:
        return (y for y in [x]) if x else x

    known(cheap, unpicklable, [0, 0])
    with pytest.raises(TypeError, match="the result cannot be carried"):
        cheap.map(unpicklable, [0, 1])


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), lambda: random.random()], ids=["torch", "random"])
def test_random_numbers_are_those_of_the_workers(cheap: mpgrad.Pool, draw: Callable[[], float]) -> None:
    """And those of the caller go on as if nothing had been tried here."""

    def noisy(x: int) -> float:
        return draw()

    found, after = [], []
    for _ in range(3):
        torch.manual_seed(1)
        random.seed(1)
        found.append(cheap.map(noisy, range(10)))
        after.append((torch.rand(()).item(), random.random()))
    assert found[0] == found[1] == found[2] and after[0] == after[1] == after[2]
    assert here(cheap) == 0
    torch.manual_seed(1)
    with mpgrad.Pool(2, send="always") as other:
        assert other.map(noisy, range(10)) == found[0]


def test_a_map_draws_the_same_from_the_caller_wherever_it_runs(cheap: mpgrad.Pool) -> None:
    after = []
    for _ in range(20):
        torch.manual_seed(1)
        cheap.map(abs, range(3))
        after.append(torch.rand(()).item())
    assert here(cheap) > 3 and len(set(after)) == 1


def test_the_first_calls_of_an_unknown_function_are_sent(cheap: mpgrad.Pool) -> None:
    cheap.map(abs, range(100))
    for _ in range(20):
        scale = random.random()
        pids = cheap.map(lambda x, scale=scale: (x * scale, os.getpid())[1], range(100))  # new each time
        assert os.getpid() not in pids[:16]
        if set(pids[16:]) == {os.getpid()}:
            return
    raise AssertionError("no cheap function was run here")


def test_a_function_that_becomes_dear_is_sent_again(cheap: mpgrad.Pool) -> None:
    def wait(seconds: float) -> tuple[float, int]:
        time.sleep(seconds)
        return seconds, os.getpid()

    known(cheap, wait, [0.0] * 5)
    delays = [0.0] * 10 + [0.03] * 12
    found = cheap.map(wait, delays)
    assert [each for each, _ in found] == delays
    assert found[0][1] == os.getpid() and found[-1][1] != os.getpid()
    failing = [0.0] * 3 + [0.03] * 4 + ["x"]

    def item_that_failed() -> str:
        with pytest.raises(TypeError) as caught:
            cheap.map(wait, failing)
        return "".join(caught.value.__notes__)

    assert "item 7" in item_that_failed()


def test_captures_are_as_they_are_now(cheap: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.ones(3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return x * scale

    xs = [torch.ones(3) for _ in range(4)]
    before = known_for_good(cheap, function, xs, monkeypatch)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            scale.fill_(value)
        assert all(torch.equal(each, torch.full((3,), value)) for each in cheap.map(function, xs))
    (gradient,) = torch.autograd.grad(sum(each.sum() for each in cheap.map(function, xs)), scale)
    assert torch.equal(gradient, torch.full((3,), 4.0)) and here(cheap) == before + 16


def test_modes_and_modules(cheap: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    before = known_for_good(cheap, network, items(), monkeypatch)
    assert_same_as_serial(network, items(), cheap)
    assert here(cheap) > before
    with torch.no_grad():
        assert not any(each.requires_grad for each in cheap.map(network, items()))
    with torch.inference_mode():
        assert all(each.is_inference() for each in cheap.map(network, items()))
    assert not any(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"send": "always"}, {}),
        ({"timeout": 50}, {}),
        ({"initializer": abs, "initargs": (1,)}, {}),
        ({"engine": "thread"}, {}),
        ({}, {"timeout": 50}),
        ({}, {"chunksize": 1}),
        ({}, {"progress": True}),
    ],
    ids=str,
)
def test_where_all_calls_are_sent(nursery: mpgrad.Pool, options: dict[str, Any], arguments: dict[str, Any]) -> None:
    with mpgrad.Pool(2, **options) as pool:
        for _ in range(3):
            pool.map(abs, range(50), **arguments)
        assert here(pool) == 0


def test_an_empty_map_and_a_closed_pool(cheap: mpgrad.Pool) -> None:
    known(cheap, abs, [1, 2])
    assert cheap.map(abs, []) == [] and cheap.map(len, []) == []
    cheap.close()
    with pytest.raises(mpgrad.PoolClosedError):
        cheap.map(abs, [1])


def test_an_interrupt_leaves_the_pool_whole(cheap: mpgrad.Pool) -> None:
    def stop(x: int) -> int:
        if x == 3:
            raise KeyboardInterrupt
        return x

    known(cheap, stop, [1, 2])
    with pytest.raises(KeyboardInterrupt):
        cheap.map(stop, range(10))
    assert cheap.map(abs, range(-3, 3)) == [3, 2, 1, 0, 1, 2]


def test_long_maps_in_pieces(cheap: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = known_for_good(cheap, abs, [1, 2], monkeypatch)
    count = 5 * CALLS_AT_ONCE + 3
    assert cheap.map(abs, iter(range(-count, 0))) == list(range(count, 0, -1))
    assert here(cheap) == before + count


def test_hooks_inside_of_the_function_and_on_results(cheap: mpgrad.Pool) -> None:
    """Symptom: hooks called with None. Cause: copies of several calls were outputs of one node."""

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad.clamp(-1, 1))
        return x * 5

    xs = items(40)
    results = known(cheap, hooked, xs)
    same = known(cheap, lambda x: x, xs)
    same[4].register_hook(lambda grad: grad * 2)
    results[5].sum().backward()
    same[6].sum().backward()
    assert xs[4].grad is None and torch.equal(xs[5].grad, torch.ones_like(xs[5]))  # type: ignore[arg-type]


def test_a_backward_for_some_inputs_leaves_the_others_alone(cheap: mpgrad.Pool) -> None:
    xs = items(40)
    total = torch.stack([each.sum() for each in known(cheap, torch.exp, xs)]).sum()
    for x in xs:
        assert torch.equal(torch.autograd.grad(total, x, retain_graph=x is not xs[-1])[0], x.detach().exp())
    results = known(cheap, lambda x: (x**2).sum(), xs)
    torch.autograd.grad(torch.stack(results).sum(), xs[3])
    torch.autograd.grad(torch.stack(results[4:]).sum(), xs[4])


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        spin(1e-3)
        return grad * 2


def run_here(pool: mpgrad.Pool, function: Any, xs: list[Tensor]) -> int:
    """How many calls of a map ran here; its results are differentiated, where they can be."""
    before = here(pool)
    results = pool.map(function, xs)
    if results[0].requires_grad:
        torch.stack(results).sum().backward()
    return here(pool) - before


def within_some_attempts(attempt: Callable[[], bool], attempts: int = 20) -> bool:
    """The machine may be busy with something else."""
    return any(attempt() for _ in range(attempts))


def test_what_the_backward_takes_counts(nursery: mpgrad.Pool) -> None:
    xs = [torch.ones(3, requires_grad=True) for _ in range(40)]
    with staffed(mpgrad.Pool(2)) as pool:
        for _ in range(3):
            run_here(pool, SlowBackward, xs)
        assert within_some_attempts(lambda: run_here(pool, SlowBackward, xs) < len(xs))
        with torch.no_grad():
            assert within_some_attempts(lambda: run_here(pool, SlowBackward, xs) == len(xs))


def test_backwards_count_where_there_will_be_some(nursery: mpgrad.Pool) -> None:
    plain = [torch.ones(3) for _ in range(40)]
    leaves = [torch.ones(3, requires_grad=True) for _ in range(40)]
    with staffed(mpgrad.Pool(2)) as pool:

        def runs_here(xs: list[Tensor]) -> bool:
            return run_here(pool, SlowBackward, xs) == len(xs)

        assert within_some_attempts(lambda: runs_here(plain))
        assert within_some_attempts(lambda: not runs_here(leaves))  # nobody knew; it was tried
        assert within_some_attempts(lambda: not runs_here(leaves) and not runs_here(leaves))
        assert within_some_attempts(lambda: runs_here(plain))


def test_backwards_that_come_for_some_calls_only() -> None:
    codes = Codes({})
    function: Any = SimpleNamespace(pickled=b"f", code=0)
    codes.number(function)
    graph = SimpleNamespace(home=SimpleNamespace(code=function.code))
    other = SimpleNamespace(home=SimpleNamespace(code=function.code + 1))

    def results(items: int, with_graphs: int) -> Ran:
        message = Results(1, [], 2e-3 * items, 1e-3 * items, 3e-3 * with_graphs, False, [], [], 0)
        codes.note_results(function, message, items, with_graphs)
        ran = codes.ran(b"f")
        assert ran is not None
        return ran

    def backwards(*graphs: Any) -> float:
        codes.note_backwards([SimpleNamespace(what=SimpleNamespace(graph=each)) for each in graphs], 8e-3)  # type: ignore[misc]
        ran = codes.ran(b"f")
        assert ran is not None
        return ran.behind

    assert results(10, 0) == Ran(1e-3)
    assert results(10, 8) == pytest.approx(Ran(1e-3, 3e-3, 0.0, gave_graphs=True))
    assert backwards(graph, graph) == pytest.approx(1e-3)  # of two of eight
    assert backwards(graph, other) == pytest.approx(1e-3)  # whose it was nobody knows
    assert results(10, 0) == pytest.approx(Ran(1e-3, 3e-3, 1e-3, gave_graphs=True))  # without gradients
    for _ in range(100):
        ran = results(100, 100)
    assert ran.behind < 1e-6  # none came for long


def test_items_of_another_size(nursery: mpgrad.Pool) -> None:
    """What was measured last counts, though it was not where the calls run that are thought of."""

    def function(x: Tensor) -> Tensor:
        spin(1e-6 * x.numel())
        return x.sum()

    def of_size(count: int, size: int) -> int:
        return run_here(pool, function, [torch.ones(size) for _ in range(count)])

    with mpgrad.Pool(2) as pool:
        assert within_some_attempts(lambda: of_size(100, 10) == 100)
        assert of_size(400, 500) < 200  # some, until it is known
        assert within_some_attempts(lambda: of_size(400, 500) == 0)
        assert within_some_attempts(lambda: of_size(100, 10) == 100)


def test_sending_is_tried_now_and_then() -> None:
    times = {b"close": Ran(40e-6), b"cheap": Ran(1e-6), b"dear": Ran(2e-3)}
    costs = Costs(times.get)
    for function in times:
        costs.note_here(function, times[function].forward, 1)

    def trials(function: bytes, maps: int, grads: bool = False) -> list[int]:
        return [number for number in range(maps) if costs.next_is_trial(function, 2, 1000, grads)]

    assert trials(b"close", 200) == [4, 13, 30, 63, 128, 193]
    assert not any(costs.next_is_trial(b"close", 2, 5, grads=False) for _ in range(50))  # too few to say anything
    assert trials(b"cheap", 50) == []  # it would take far longer
    assert trials(b"dear", 50) == []  # it is sent anyway
    assert trials(b"cheap", 10, grads=True) == [4]  # nobody knows what its backward takes
    times[b"cheap"] = Ran(1e-6, gave_graphs=True)
    assert trials(b"cheap", 50, grads=True) == []


def test_functions_are_forgotten_by_several_threads_at_once() -> None:
    costs, errors = Costs(lambda function: Ran(60e-6)), []

    def use(thread: int) -> None:
        try:
            for k in range(3000):
                function = f"{thread}, {k}".encode()
                costs.note_here(function, 60e-6, 1)
                costs.next_is_trial(function, 2, 1000, grads=False)
                costs.send_ever_after(function)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpgrad.scheduling.costs.SENT_SECONDS", 60e-6)  # thought at first; these numbers are for it
    times = {b"cheap": Ran(10e-6), b"medium": Ran(140e-6), b"dear": Ran(2e-3)}
    costs = Costs(times.get)
    assert costs.pays(b"medium", 2, 1000)  # it may be quicker without another one at the same time: that is tried
    costs.note_here(b"medium", 140e-6, 1)
    assert costs.pays(b"cheap", 2, 1000) and not costs.pays(b"medium", 2, 1000) and not costs.pays(b"new", 2, 1000)
    assert costs.pays(b"medium", 2, 4)  # so few that waking the workers is most of it
    assert costs.pays(b"medium", 1, 1000) and not costs.pays(b"dear", 1, 1)
    for _ in range(5):
        costs.note_sent(b"medium", 1000 * 445e-6, 1000, 2)  # far more than the work itself
    assert costs.pays(b"medium", 2, 1000)
    for _ in range(2):
        costs.note_sent(b"medium", 1000 * 50e-6, 1000, 2)
    assert not costs.pays(b"medium", 2, 1000)
    times[b"medium"] = Ran(10e-6)
    assert costs.pays(b"medium", 2, 1000)  # what was measured here is old
    times[b"medium"] = Ran(200e-6)
    assert not costs.pays(b"medium", 2, 1000)
    for _ in range(9):
        costs.note_here(b"medium", 110e-6, 1)  # alone it takes about as long as two workers take, side by side
    assert costs.pays(b"medium", 2, 1000)
    times[b"medium"] = Ran(200e-6, ahead=400e-6)  # the backward too
    assert not costs.pays(b"medium", 2, 1000, grads=True)
    times[b"medium"] = Ran(200e-6, behind=400e-6)
    assert not costs.pays(b"medium", 2, 1000, grads=True)
    assert costs.pays(b"medium", 2, 1000, grads=False)  # then there will be none
    times[b"medium"] = Ran(40e-6, ahead=400e-6)
    for _ in range(9):  # without gradients: sending took 60 us a call, not less than nothing
        costs.note_sent(b"medium", 1000 * 80e-6, 1000, 2, grads=False)
    assert costs.pays(b"medium", 2, 1000)
    costs.note_here(b"cheap", 0.1, 1)  # a hiccup
    assert not costs.pays(b"cheap", 2, 1000)
    for _ in range(9):
        costs.note_sent(b"cheap", 0.05, 1000, 2)
    assert costs.pays(b"cheap", 2, 1000)
    costs.send_ever_after(b"cheap")
    assert not costs.pays(b"cheap", 2, 1000)


def test_the_end_of_the_program_in_a_call(cheap: mpgrad.Pool) -> None:
    """Symptom: map raised SystemExit, and the caller's generator had moved. Cause: only an Exception had the map sent."""

    def ends(k: int) -> int:
        if k == 57:
            torch.rand(1)
            raise SystemExit("at 57")
        return k

    known(cheap, ends, [1] * 60)
    for _ in range(2):  # of which one may be sent as a trial
        torch.manual_seed(0)
        found = cheap.map(ends, range(60), on_error="return")
        drawn = torch.rand(1)
        assert found[:57] == list(range(57)) and repr(found[57]) == "SystemExit('at 57')"
    torch.manual_seed(0)
    with mpgrad.Pool(2, send="always") as pool:
        pool.map(ends, range(60), on_error="return")
    assert torch.equal(torch.rand(1), drawn)
