"""Emulated contexts against the serial loop ``[func.apply(*args) for args in args_per_call]``, in
threads and in a pool."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.function import Function, once_differentiable

import mpgrad
from mpgrad.functions import (
    EmulatedAutogradContext,
    map_with_parallel_backward,
    run_isolated_backward,
    run_isolated_forward,
)

pytestmark = pytest.mark.quick

PATIENCE = 30.0  # seconds after which a rendezvous that nobody joins fails


@pytest.fixture(params=["threads", "pool"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    pool = request.getfixturevalue("pool2") if request.param == "pool" else None
    return functools.partial(map_with_parallel_backward, pool=pool)


def serial(func: type[Function], *args_per_call: Sequence[Any]) -> Any:
    return tuple([func.apply(*args) for args in args_per_call])  # type: ignore[no-untyped-call]


# --- the table of Functions


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        gx = (grad * y).sum_to_size(x.shape) if ctx.needs_input_grad[0] else None
        return gx, grad * x if ctx.needs_input_grad[1] else None


class WithSetup(Function):
    @staticmethod
    def forward(x: Any, times: int = 3) -> Any:
        return (x * times).exp(), x.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.times = inputs[1]
        ctx.save_for_backward(output[0], inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Any, total: Any) -> Any:
        exp, x = ctx.saved_tensors
        return grad * exp * ctx.times + total.expand_as(x), None


class Mixed(Function):
    """Integers, non-tensors, None and a marked output beside the one that has a gradient; checks
    what it is given for them."""

    @staticmethod
    def forward(ctx: Any, x: Any, label: str, nothing: None, index: Any) -> Any:
        values, order = x.sort()
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        ctx.save_for_backward(order, None, values)
        ctx.label = label
        return values * 2, label, None, order, rounded, [x]

    @staticmethod
    def backward(ctx: Any, grad: Any, *others: Any) -> Any:
        order, none, _ = ctx.saved_tensors
        assert none is None and ctx.label == "a" and others[0] is others[1] is others[4] is None
        assert not others[2].any() and others[2].dtype == torch.long and not others[3].any()
        return torch.zeros_like(grad).index_add_(0, order, grad) * 2, None, None, None


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        assert first is None
        return second * 3


class Materialized(Unmaterialized):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first * 2 + second * 3


class Once(Product):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        assert not torch.is_grad_enabled()
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class AsVjp(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.factor = 7
        return x * 7

    @staticmethod
    def vjp(ctx: Any, grad: Any) -> Any:
        return grad * ctx.factor, None  # one None too many is allowed


class Itself(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x, y * 2

    @staticmethod
    def backward(ctx: Any, gx: Any, gy: Any) -> Any:
        return gx * 3, gy * 2


class View(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view(-1)[1:]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.cat([grad.new_zeros(1), grad]) * 5


class NoGrads(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, grad * 2


class Constant(Function):
    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Any) -> Any:
        return torch.full((2,), float(number))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, *[grad[:1] for _ in ctx.needs_input_grad[1:]]


class Intermediate(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.saved_tensors[0]


class Expanding(Function):
    """Returns a gradient that the engine has to sum to the input's shape."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.expand(4, 2) * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


def decorated(method: Any) -> Any:
    calls = 0

    @functools.wraps(method)
    def wrapper(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return method(*args)

    return wrapper


class Decorated(Function):
    @staticmethod
    @decorated
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        assert not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    @decorated
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad @ y.T, x.T @ grad


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64)


def leaf(*shape: int) -> torch.Tensor:
    return rand(*shape).requires_grad_()


def shared_by_two() -> list[tuple[Any, ...]]:
    x, y = leaf(3), leaf(3) * 1
    return [(x, y), (y, x), (y, y), (x, y), (x, rand(3))]


def input_shared_as_output() -> list[tuple[Any, ...]]:
    x = rand(3)
    return [(x, leaf(2)), (x, rand(2)), (x, leaf(2))]


CASES: dict[str, tuple[type[Function], Callable[[], list[tuple[Any, ...]]]]] = {
    "product": (
        Product,
        lambda: [(leaf(2, 3), leaf(2, 3)), (leaf(1), leaf(5)), (leaf(), leaf() * 2)],
    ),
    "one call": (Product, lambda: [(leaf(3), leaf(3))]),
    "needs_input_grad": (
        Product,
        lambda: [(leaf(3), rand(3)), (rand(3), leaf(3)), (rand(3), rand(3))],
    ),
    "tensors shared": (Product, shared_by_two),
    "setup_context, different counts": (WithSetup, lambda: [(leaf(3),), (leaf(4), 2)]),
    "mixed outputs": (
        Mixed,
        lambda: [(leaf(4), "a", None, torch.arange(3)), (leaf(2), "a", None, torch.arange(1))],
    ),
    "once_differentiable": (Once, lambda: [(leaf(3), leaf(3)), (leaf(2), leaf(2))]),
    "vjp": (AsVjp, lambda: [(leaf(3),), (leaf(2) * 2,)]),
    "input as output": (
        Itself,
        lambda: [(leaf(3), leaf(2)), (rand(3), leaf(2)), (rand(2), rand(2))],
    ),
    "the same input as output": (Itself, input_shared_as_output),
    "view as output": (View, lambda: [(leaf(3),), (leaf(2, 3).view(-1) * 1,), (rand(2),)]),
    "None gradients": (NoGrads, lambda: [(leaf(3), leaf(3)), (leaf(3), rand(3))]),
    "no tensors": (Constant, lambda: [(1,), (2,)]),
    "tensors in some": (Constant, lambda: [(1,), (2, leaf(1)), (3, leaf(1), leaf(1))]),
    "intermediate": (Intermediate, lambda: [(leaf(3),), (leaf(2),)]),
    "gradient to be summed": (Expanding, lambda: [(leaf(2),), (leaf(1, 2),)]),
    "decorated": (
        Decorated,
        lambda: [
            (leaf(2, 3).float(), leaf(3, 2).float()),
            (leaf(1, 3).float(), leaf(3, 1).float()),
        ],
    ),
    "empty tensors": (Product, lambda: [(leaf(0, 3), leaf(0, 3)), (leaf(1), leaf(0))]),
}


def tensors_in(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return (
        [tensor for value in values for tensor in tensors_in(value)]
        if isinstance(values, (tuple, list))
        else []
    )


def gradients(outputs: Any, inputs: Any) -> list[torch.Tensor | None]:
    ends = [each for each in tensors_in(outputs) if each.requires_grad]
    starts = list({id(each): each for each in tensors_in(inputs) if each.requires_grad}.values())
    if not ends or not starts:
        return []
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.rand(each.shape, dtype=each.dtype, generator=generator) for each in ends]
    return list(torch.autograd.grad(ends, starts, cotangents, allow_unused=True, retain_graph=True))


def assert_equal(ours: Any, theirs: Any, rtol: float = 0.0) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0.0)
    elif isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other, rtol)
    else:
        assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_as_the_serial_loop(
    run: Callable[..., Any], case: str, request: pytest.FixtureRequest
) -> None:
    func, make = CASES[case]
    calls = make()
    reference, outputs = serial(func, *calls), run(func, *calls)
    assert_equal(outputs, reference)
    needed = [
        [each.requires_grad for each in tensors_in(values)] for values in (outputs, reference)
    ]
    assert needed[0] == needed[1]
    # a worker adds those up first
    twice_in_a_call = case == "tensors shared" and request.node.callspec.params["run"] == "pool"
    assert_equal(
        gradients(outputs, calls),
        gradients(reference, calls),
        rtol=1e-14 if twice_in_a_call else 0.0,
    )


@pytest.mark.parametrize("func", [Unmaterialized, Materialized])
def test_outputs_that_nobody_uses(run: Callable[..., Any], func: type[Function]) -> None:
    x, y = leaf(3), leaf(2)
    (_, first), _ = run(func, (x,), (y,))
    assert_equal(
        torch.autograd.grad(first.sum(), [x, y], allow_unused=True), (torch.full_like(x, 3), None)
    )


def test_gradients_added_up_in_the_serial_order(run: Callable[..., Any]) -> None:
    x = torch.tensor([1.0], requires_grad=True)
    calls = [(x, torch.tensor([factor])) for factor in (1e8, 1.0, -1e8, 3.0)]
    expected = gradients(serial(Product, *calls), [x])
    backwards = gradients(serial(Product, *calls[::-1]), [x])
    assert expected != backwards  # or the order would not show
    assert_equal(gradients(run(Product, *calls), [x]), expected)


def test_no_calls(run: Callable[..., Any]) -> None:
    assert run(Product) == ()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(run: Callable[..., Any], mode: Callable[[], Any]) -> None:
    calls = [(leaf(3), leaf(3)), (leaf(2), rand(2))]
    with mode():
        outputs, reference = run(Product, *calls), serial(Product, *calls)
    assert_equal(outputs, reference)
    for output, expected in zip(outputs, reference, strict=True):
        assert not output.requires_grad and output.is_inference() == expected.is_inference()


class Autocasted(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (grad.float() @ x + x @ grad.float()).float() + torch.is_autocast_enabled("cpu")


def test_under_autocast(run: Callable[..., Any]) -> None:
    calls = [(torch.rand(2, 2, requires_grad=True),), (torch.rand(3, 3, requires_grad=True),)]
    with torch.autocast("cpu"):
        outputs, reference = run(Autocasted, *calls), serial(Autocasted, *calls)
        assert reference[0].dtype == torch.bfloat16
        assert_equal(outputs, reference)
        assert_equal(gradients(outputs, calls), gradients(reference, calls))
    assert_equal(gradients(outputs, calls), gradients(reference, calls))
    assert [each.grad_fn is not None for each in outputs] == [True, True]


# --- one after another would wait for ever


class Meeting(Function):
    """Its calls get nowhere unless they are under way at the same time."""

    barrier: Any = None

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Meeting.barrier.wait(PATIENCE)
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        Meeting.barrier.wait(PATIENCE)
        return MeetingAgain.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class MeetingAgain(Function):
    @staticmethod
    def forward(ctx: Any, grad: Any, x: Any) -> Any:
        ctx.save_for_backward(grad, x)
        return grad * 3 * x**2

    @staticmethod
    def backward(ctx: Any, second: Any) -> Any:
        Meeting.barrier.wait(PATIENCE)
        grad, x = ctx.saved_tensors
        return second * 3 * x**2, second * grad * 6 * x


@pytest.mark.parametrize("count", [2, 12])
def test_threads_run_all_calls_at_the_same_time(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meeting, "barrier", threading.Barrier(count))
    inputs = [leaf(2) for _ in range(count)]
    outputs = map_with_parallel_backward(Meeting, *[(x,) for x in inputs])
    grads = torch.autograd.grad([each.sum() for each in outputs], inputs, create_graph=True)
    second = torch.autograd.grad([each.sum() for each in grads], inputs, create_graph=True)
    third = torch.autograd.grad([each.sum() for each in second], inputs)
    for x, output, first, twice, thrice in zip(inputs, outputs, grads, second, third, strict=True):
        torch.testing.assert_close(
            [output, first, twice, thrice], [x**3, 3 * x**2, 6 * x, torch.full_like(x, 6)]
        )


def test_the_serial_loop_would_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "barrier", threading.Barrier(2))
    monkeypatch.setitem(globals(), "PATIENCE", 0.05)
    with pytest.raises(threading.BrokenBarrierError):
        serial(Meeting, (leaf(1),), (leaf(1),))


class MeetingInProcesses(Function):
    """Each call opens the gate of the other one, then waits at its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, pipes: list[str]) -> Any:
        meet(pipes)
        ctx.pipes = pipes
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        meet(ctx.pipes)
        return grad * os.getpid(), None


def meet(pipes: list[str]) -> None:
    theirs, mine = (os.open(path, os.O_RDWR) for path in pipes)
    try:
        os.write(theirs, b"!")
        assert select.select([mine], [], [], PATIENCE)[0], "the other call did not come"
        os.read(mine, 1)
    finally:
        os.close(theirs)
        os.close(mine)


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[list[str]]:
    paths = [str(tmp_path / name) for name in ("left", "right")]
    for path in paths:
        os.mkfifo(path)
    # or what is written would be lost between two readers
    kept = [os.open(path, os.O_RDWR) for path in paths]
    yield paths
    for descriptor in kept:
        os.close(descriptor)


def test_processes_run_all_calls_at_the_same_time(pool2: mpgrad.Pool, pipes: list[str]) -> None:
    x, y = leaf(2), leaf(3)
    a, b = map_with_parallel_backward(MeetingInProcesses, (x, pipes), (y, pipes[::-1]), pool=pool2)
    first, second = torch.autograd.grad([a.sum(), b.sum()], [x, y])
    assert len({int(first[0]), int(second[0]), os.getpid()}) == 3


# --- what depends on one waits for all


class Recorded(Function):
    log: list[str] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Any, name: str, events: Any) -> Any:
        ctx.name, ctx.events = name, events
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.name == "slow":
            assert ctx.events["quick"].wait(PATIENCE)
        Recorded.log.append(ctx.name)
        ctx.events[ctx.name].set()
        return grad * 2, None, None


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_gradient_waits_for_every_backward(
    slow_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(Recorded, "log", log)
    events = {name: threading.Event() for name in ("quick", "slow")}
    x, y = leaf(2), leaf(2)
    quick_in, slow_in = x * 1, y * 1
    quick_in.register_hook(lambda grad: log.append("gradient"))
    calls = [(slow_in, "slow", events), (quick_in, "quick", events)]
    outputs = map_with_parallel_backward(Recorded, *calls[:: 1 if slow_first else -1])
    (outputs[0].sum() + outputs[1].sum()).backward()  # type: ignore[no-untyped-call]
    assert log == ["quick", "slow", "gradient"]


def test_in_a_pool_too_all_tensors_pass_one_node(pool2: mpgrad.Pool) -> None:
    x, y = leaf(2), leaf(3)
    a, b = map_with_parallel_backward(Product, (x, rand(2)), (y, rand(3)), pool=pool2)
    assert a.grad_fn is b.grad_fn and type(a.grad_fn).__name__ == "JointIdentityBackward"
    reached: list[str] = []
    x.register_hook(lambda grad: reached.append("x"))
    y.register_hook(lambda grad: reached.append("y"))
    gates = [
        node for node in nodes_behind(a.grad_fn) if type(node).__name__ == "JointIdentityBackward"
    ]
    assert len(gates) == 2
    gates[1].register_hook(lambda *grads: reached.append("entry"))
    (a.sum() + b.sum()).backward()
    assert reached[0] == "entry" and sorted(reached[1:]) == ["x", "y"]


def nodes_behind(root: Any) -> list[Any]:
    seen = [root]
    for node in seen:
        seen += [each for each, _ in node.next_functions if each is not None and each not in seen]
    return seen


def test_double_backward_in_a_pool(pool2: mpgrad.Pool) -> None:
    calls = [(leaf(3), leaf(3)), (leaf(2), rand(2))]
    joints: list[Any] = []
    ours = twice(functools.partial(map_with_parallel_backward, pool=pool2), calls, joints)
    assert_equal(ours, twice(serial, calls, []))
    assert not any(each.requires_grad for each in ours[1])
    # its gradients have come through one
    assert joints and all(type(node).__name__ == "JointIdentityBackward" for node in joints)


def twice(run: Callable[..., Any], calls: list[Any], nodes: list[Any]) -> Any:
    inputs = [each for args in calls for each in args if each.requires_grad]
    outputs = run(Product, *calls)
    first = torch.autograd.grad([each.exp().sum() for each in outputs], inputs, create_graph=True)
    nodes += [each.grad_fn for each in first]
    return first, torch.autograd.grad([each.exp().sum() for each in first], inputs)


# --- double backward


class Cubed(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return x**3 * y, x * y

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        x, y = ctx.saved_tensors
        return first * 3 * x**2 * y + second * y, first * x**3 + second * x


class SavedOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        result = x.exp()
        ctx.save_for_backward(result)
        return result, y * 1

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first * ctx.saved_tensors[0], second


class OnAttribute(Function):
    """A tensor with a history that is no saved tensor: there a double backward reaches beyond what
    the node knows."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.x, ctx.y = x, y
        return x**2 * y, y * 1

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first * 2 * ctx.x * ctx.y, first * ctx.x**2 + second


class InPlaceBackward(Cubed):
    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        x, y = ctx.saved_tensors
        return first * 3 * x**2 * y + second.mul_(y), first * x**3


@pytest.mark.parametrize("func", [Cubed, SavedOutput, OnAttribute])
def test_double_backward(func: type[Function]) -> None:
    def both(*inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = map_with_parallel_backward(func, (inputs[0], inputs[1]), (inputs[1], inputs[2]))
        return tensors_in(outputs)

    inputs = [leaf(3) for _ in range(3)]
    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradgradcheck(both, inputs)


@pytest.mark.parametrize("func", [Cubed, SavedOutput, OnAttribute, InPlaceBackward])
def test_double_and_triple_backward_as_serially(func: type[Function]) -> None:
    calls = [(leaf(3), leaf(3)), (leaf(2), leaf(2))]
    inputs = tensors_in(calls)

    def orders(run: Callable[..., Any]) -> list[Any]:
        outputs = tensors_in(run(func, *calls))
        found = []
        for _ in range(3):
            outputs = list(
                torch.autograd.grad(
                    [each.exp().sum() for each in outputs], inputs, create_graph=True
                )
            )
            found.append([each.detach() for each in outputs])
        return found

    torch.testing.assert_close(
        orders(map_with_parallel_backward), orders(serial), rtol=1e-12, atol=0
    )


def test_a_double_backward_frees_and_ends() -> None:
    for run in (serial, map_with_parallel_backward):
        x = leaf(2)
        outputs = run(Cubed, (x, rand(2)), (leaf(2), rand(2)))
        first = torch.autograd.grad(outputs[0][0].sum(), x, create_graph=True)[0]
        kept = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
        assert not kept.requires_grad and torch.equal(kept, torch.autograd.grad(first.sum(), x)[0])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(first.sum(), x)


def test_once_differentiable_refuses_a_second_time() -> None:
    messages = []
    for run in (serial, map_with_parallel_backward):
        x, y = leaf(2), leaf(2)
        outputs = run(Once, (x, y), (y, x))
        first = torch.autograd.grad(sum(each.exp().sum() for each in outputs), x, create_graph=True)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="differentiate twice") as caught:
            first[0].sum().backward()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_repeated_backwards_and_freed_tensors() -> None:
    x, y = leaf(2), leaf(2)
    a, b = map_with_parallel_backward(Product, (x, y), (y, x))
    first = torch.autograd.grad(a.sum(), [x, y], retain_graph=True)
    assert_equal(
        first,
        torch.autograd.grad((a + b).sum(), [x, y], retain_graph=True) and (y.detach(), x.detach()),
    )
    torch.autograd.grad(b.sum(), [x])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(a.sum(), [x])


def test_saved_tensors_are_checked_for_in_place_writes() -> None:
    x, y = leaf(2) * 1, leaf(2)
    a, _ = map_with_parallel_backward(Product, (x, y), (rand(2), y))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a.sum().backward()


def test_nothing_is_kept_after_a_backward() -> None:
    watched: list[weakref.ref[torch.Tensor]] = []

    class Watched(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            intermediate, result, for_jvp = x.cos(), x.sin(), x.clone()
            watched.extend(weakref.ref(each) for each in (intermediate, for_jvp))
            ctx.save_for_backward(intermediate, result)
            ctx.save_for_forward(for_jvp)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0]

    gc.disable()
    try:
        outputs = map_with_parallel_backward(Watched, (leaf(2),), (leaf(2),))
        held = [weakref.ref(each) for each in outputs]
        assert sum(each() is None for each in watched) == 2
        sum(each.sum() for each in outputs).backward()
        del outputs
        assert [each() for each in (*watched, *held)] == [None] * 6  # no cycle through the contexts
    finally:
        gc.enable()


def test_an_error_keeps_no_tensor() -> None:
    watched: list[weakref.ref[torch.Tensor]] = []

    class Failing(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.own = x.clone()
            watched.append(weakref.ref(ctx.own))
            raise ValueError("no")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            map_with_parallel_backward(Failing, (leaf(2),), (leaf(2),))
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()


def test_saved_tensor_hooks_see_what_the_calls_save() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        map_with_parallel_backward(
            Product, (leaf(2), leaf(2)), (leaf(3), leaf(3)), (rand(4), rand(4))
        )
    assert sorted(packed) == [(2,), (2,), (3,), (3,)]  # nothing for the call that needs no gradient


# --- forward-mode


class Tangent(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, power: int) -> Any:
        assert forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]
        ctx.save_for_forward(x, y)
        ctx.save_for_backward(x, y)
        ctx.power = power
        return x**power * y, x.long(), "text"

    @staticmethod
    def jvp(ctx: Any, tx: Any, ty: Any, none: None) -> Any:
        x, y = ctx.saved_tensors
        assert none is None
        return ctx.power * x ** (ctx.power - 1) * y * tx + x**ctx.power * ty, None, None

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1) * y, grad * x**ctx.power, None


@pytest.mark.parametrize("reverse", [False, True])
def test_forward_mode(reverse: bool) -> None:
    with forward_ad.dual_level():
        x = leaf(3) if reverse else rand(3)
        dual = forward_ad.make_dual(x, rand(3))  # type: ignore[no-untyped-call]
        calls = [(dual, rand(3), 2), (rand(3), dual, 3), (rand(3), rand(3), 2)]
        ours, theirs = (
            [tangents(each[0]) for each in run(Tangent, *calls)]
            for run in (map_with_parallel_backward, serial)
        )
        assert_equal(ours, theirs)
        assert theirs[2][1] is None and theirs[0][1] is not None
        if reverse:
            for part in (0, 1):
                grads = [
                    torch.autograd.grad(sum(each[part].sum() for each in both[:2]), x)
                    for both in (ours, theirs)
                ]
                assert_equal(grads[0], grads[1])


class HalfMarked(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return x * 2, rounded, x.view_as(x), x.long()

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any, other: Any, __: Any) -> Any:
        return grad * 2 + other

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        return tangent * 2, None, tangent.view_as(tangent), None


@pytest.mark.parametrize("dual_needs_grad", [False, True])
def test_tangents_in_some_calls_and_gradients_in_others(dual_needs_grad: bool) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf(3) if dual_needs_grad else rand(3), rand(3))  # type: ignore[no-untyped-call]
        calls = [(dual,), (leaf(3),), (rand(3),)]
        ours, theirs = map_with_parallel_backward(HalfMarked, *calls), serial(HalfMarked, *calls)
        for call in (0, 2):
            assert_equal(
                [tangents(each) for each in ours[call]], [tangents(each) for each in theirs[call]]
            )
        for mine, other in zip(ours[1], theirs[1], strict=True):
            primal, tangent = tangents(mine)
            # serially always None
            assert torch.equal(primal, other) and (tangent is None or not tangent.any())
        assert_equal(gradients(ours[1][::2], calls[1]), gradients(theirs[1][::2], calls[1]))
        # nothing was written to the arguments
        assert_equal([tangents(args[0])[1] for args in calls[1:]], [None, None])


def test_in_place_functions_write_to_duals() -> None:
    class AddTangent(AddInPlace):
        @staticmethod
        def jvp(ctx: Any, target: Any, x: Any) -> Any:
            return target.add_(x)

    results = []
    for run in (map_with_parallel_backward, serial):
        torch.manual_seed(0)
        with forward_ad.dual_level():
            targets = [forward_ad.make_dual(rand(3), rand(3)) for _ in range(2)]  # type: ignore[no-untyped-call]
            added = forward_ad.make_dual(rand(3), rand(3))  # type: ignore[no-untyped-call]
            outputs = run(AddTangent, *[(each, added) for each in targets])
            assert outputs[0] is targets[0] and outputs[1] is targets[1]
            results.append([tangents(each) for each in outputs])
    assert_equal(results[0], results[1])


def tangents(value: Any) -> tuple[Any, Any]:
    primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return primal, tangent


def test_forward_mode_in_a_pool(pool2: mpgrad.Pool) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf(3), rand(3))  # type: ignore[no-untyped-call]
        calls = [(dual, rand(3), 2), (leaf(3), dual, 3), (leaf(3), rand(3), 2)]
        ours, theirs = (
            map_with_parallel_backward(Tangent, *calls, pool=pool2),
            serial(Tangent, *calls),
        )
        for call in (0, 1):
            assert_equal(tangents(ours[call][0]), tangents(theirs[call][0]))
        primal, tangent = tangents(ours[2][0])
        assert torch.equal(primal, theirs[2][0]) and not tangent.any()  # serially None


def test_forward_over_reverse() -> None:
    x, y, direction = leaf(3), leaf(3), rand(3)
    results = []
    for run in (map_with_parallel_backward, serial):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, direction)  # type: ignore[no-untyped-call]
            outputs = run(Tangent, (dual, y, 2), (y, dual, 2))
            grads = torch.autograd.grad(
                sum(each[0].sum() for each in outputs), [x, y], create_graph=True
            )  # type: ignore[arg-type]
            results.append([tangents(each) for each in grads])
    assert results[1][0][1] is not None
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=0)


def test_jvps_run_at_the_same_time_and_fail_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meets(Function):
        barrier = threading.Barrier(3)

        @staticmethod
        def forward(ctx: Any, x: Any, results: int) -> Any:
            ctx.results = results
            return x * 2

        @staticmethod
        def jvp(ctx: Any, tangent: Any, _: None) -> Any:
            Meets.barrier.wait(PATIENCE)
            return (tangent * 2,) * ctx.results

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rand(2), rand(2))  # type: ignore[no-untyped-call]
        map_with_parallel_backward(Meets, (dual, 1), (dual, 1), (dual, 1))
        with pytest.raises(RuntimeError, match=r"expected 1 but got 2") as caught:
            map_with_parallel_backward(Meets, (dual, 1), (dual, 2), (dual, 1))
        assert notes(caught.value) == ["raised in call 1, phase: jvp"]
        with pytest.raises(NotImplementedError, match="implement the jvp"):
            map_with_parallel_backward(Product, (dual, rand(2)))


# --- in place


class AddInPlace(Function):
    @staticmethod
    def forward(ctx: Any, target: Any, x: Any) -> Any:
        target.add_(x)
        ctx.mark_dirty(target)
        ctx.save_for_backward(x)
        return target

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2, grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_in_place_functions_write_to_their_argument(needs_grad: bool) -> None:
    def once(run: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        inputs = [(leaf(3) if needs_grad else rand(3)) for _ in range(4)]
        a, b = inputs[0] * 1, inputs[2] * 1
        results = run(AddInPlace, (a, inputs[1]), (b, inputs[3]))
        assert results[0] is a and results[1] is b
        return results, a._version, gradients(results, inputs)

    assert_equal(once(map_with_parallel_backward), once(serial))


def test_in_place_on_a_leaf_is_refused_as_serially() -> None:
    for run in (serial, map_with_parallel_backward):
        with pytest.raises(
            RuntimeError,
            match="a leaf Variable that requires grad has been used in an in-place operation",
        ):
            run(AddInPlace, (leaf(2), rand(2)), (rand(2), rand(2)))


def test_in_place_on_what_another_call_reads_is_refused() -> None:
    buffer = rand(4)
    refused = "call 0 wrote in place to memory that call 1 may have read"
    for other in (buffer, buffer[1:]):
        with pytest.raises(ValueError, match=refused):
            map_with_parallel_backward(AddInPlace, (buffer, rand(4)), (rand(other.shape[0]), other))
    rows = rand(2, 3)
    expected = rows + 1
    with torch.no_grad():
        map_with_parallel_backward(AddInPlace, (rows[0], torch.ones(3)), (rows[1], torch.ones(3)))
    assert torch.equal(rows, expected)


def test_in_place_in_a_pool_leaves_the_callers_tensors_alone(pool2: mpgrad.Pool) -> None:
    calls = [(leaf(3) * 1, leaf(3)), (leaf(2) * 1, leaf(2))]
    copies = [(target.clone(), x) for target, x in calls]
    before = [target.clone() for target, _ in calls]
    outputs, expected = (
        map_with_parallel_backward(AddInPlace, *calls, pool=pool2),
        serial(AddInPlace, *copies),
    )
    assert_equal(outputs, expected)
    assert_equal([target for target, _ in calls], before)
    assert_equal(
        torch.autograd.grad(outputs[0].sum(), calls[0]),
        (torch.full((3,), 2.0).double(), calls[0][1].detach()),
    )


def test_results_may_be_written_to(run: Callable[..., Any]) -> None:
    x, y = leaf(2), leaf(2)
    a, b = run(Product, (x, rand(2)), (y, rand(2)))
    expected = torch.autograd.grad(a.sum(), x, retain_graph=True)[0] * 2
    a.mul_(2)
    assert_equal(torch.autograd.grad(a.sum() + b.sum(), x)[0], expected)


# --- errors


class Picky(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, where: str, ended: Any = None) -> Any:
        ctx.where, ctx.ended = where, ended
        if where == "late":
            assert ended.wait(PATIENCE)
            ended.clear()
        if where == "forward":
            if ended is not None:
                ended.set()
            raise KeyError("x", 3)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        answers = {
            "backward": None,
            "too few": (grad,),
            "too many": (grad, None, None, grad),
            "not a tensor": (1.0, None, None),
            "for no tensor": (grad, grad, None),
            "shape": (torch.ones(7), None, None),
            "fewer dimensions": (torch.ones(()), None, None),
        }
        if ctx.where == "backward":
            raise ZeroDivisionError("nothing to divide by")
        return answers.get(ctx.where, (grad * 2, None, None))


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_the_first_failing_call_is_raised_when_all_have_ended() -> None:
    ended = threading.Event()
    with pytest.raises(KeyError) as caught:
        map_with_parallel_backward(
            Picky,
            (leaf(2), "late", ended),
            (leaf(2), "forward", ended),
            (leaf(2), "fine", None),
            (leaf(2), "forward", None),
        )
    assert not ended.is_set()  # the late one had its turn
    assert caught.value.args == ("x", 3)
    assert notes(caught.value) == [
        "raised in call 1, phase: forward; call 3 failed (KeyError: ('x', 3))"
    ]


def test_a_failing_backward_is_named() -> None:
    x = leaf(2)
    outputs = map_with_parallel_backward(
        Picky, (x, "fine", None), (x, "backward", None), (x, "shape", None)
    )
    with pytest.raises(ZeroDivisionError) as caught:
        sum(each.sum() for each in outputs).backward()
    expected = "raised in call 1, phase: backward; call 2 failed (RuntimeError: Function Picky"
    assert notes(caught.value)[0].startswith(expected)
    assert x.grad is None


def test_errors_of_calls_in_a_pool(pool2: mpgrad.Pool) -> None:
    with pytest.raises(KeyError) as caught:
        map_with_parallel_backward(
            Picky, (leaf(2), "fine", None), (leaf(2), "forward", None), pool=pool2
        )
    assert (
        caught.value.args == ("x", 3)
        and "item 1" in notes(caught.value)[0]
        and "forward" in notes(caught.value)[0]
    )
    a, b = map_with_parallel_backward(
        Picky, (leaf(2), "fine", None), (leaf(2), "backward", None), pool=pool2
    )
    with pytest.raises(ZeroDivisionError) as failed:
        (a + b).sum().backward()
    assert "item 1" in notes(failed.value)[0] and "backward" in notes(failed.value)[0]


WRONG = ["too few", "too many", "not a tensor", "for no tensor", "shape", "fewer dimensions"]


@pytest.mark.parametrize("where", WRONG)
def test_wrong_gradients_raise_what_pytorch_raises(where: str) -> None:
    caught = []
    for run in (serial, map_with_parallel_backward):
        a, b = run(Picky, (leaf(2), "fine", None), (leaf(2), where, None))
        with pytest.raises(RuntimeError) as error:
            (a + b).sum().backward()
        caught.append(error.value)
    theirs, ours = caught
    assert str(ours).startswith(str(theirs).partition("\n")[0])
    assert notes(ours) == ["raised in call 1, phase: backward"]


def test_wrong_arguments() -> None:
    with pytest.raises(
        TypeError, match=r"func must be a subclass of torch.autograd.Function \(func: <built-in"
    ):
        map_with_parallel_backward(len, ())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"func must be a subclass"):
        run_isolated_forward(Product.apply, leaf(1))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError,
        match=r"call 1 must be a sequence \(given: a Tensor\); for one argument pass \(argument,\)",
    ):
        map_with_parallel_backward(AsVjp, (leaf(2),), leaf(2))  # type: ignore[arg-type]
    for func in (Product, WithSetup):
        with pytest.raises(TypeError) as caught:
            map_with_parallel_backward(func, (leaf(2), leaf(2)), ())
        assert notes(caught.value) == ["raised in call 1, phase: forward"]


def test_torch_func_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=r"an argument of call 0 belongs to a torch\.func transform"
    ):
        torch.func.vmap(lambda x: map_with_parallel_backward(Product, (x, x)))(rand(2, 3))
    x = leaf(3)
    (output,) = map_with_parallel_backward(Product, (x, rand(3)))
    with pytest.raises(NotImplementedError, match=r"a gradient belongs to a torch\.func transform"):
        torch.func.vmap(lambda grad: torch.autograd.grad(output, x, grad))(rand(2, 3))


def test_batched_gradients() -> None:
    calls = [(leaf(3), leaf(3)), (leaf(3), leaf(3))]
    batch = rand(4, 3)
    ours, theirs = (
        torch.autograd.grad(run(Product, *calls)[1], calls[1], batch, is_grads_batched=True)
        for run in (map_with_parallel_backward, serial)
    )
    assert_equal(ours, theirs)


# --- the contexts themselves


def test_an_isolated_call() -> None:
    x, y = leaf(3), leaf(3)
    ctx, output = run_isolated_forward(Product, x, y)
    assert (
        not output.requires_grad
        and ctx.needs_input_grad == (True, True)
        and isinstance(ctx, EmulatedAutogradContext)
    )
    for _ in range(2):
        first, second = run_isolated_backward(Product, ctx, torch.ones(3))
        assert torch.equal(first, y) and torch.equal(second, x) and not first.requires_grad
    ctx, outputs = run_isolated_forward(Itself, x, y)
    assert isinstance(outputs, tuple) and not outputs[0].requires_grad
    assert_equal(
        run_isolated_backward(Itself, ctx, torch.ones(3), None),
        (torch.full((3,), 3.0), torch.zeros(3).double()),
    )
    ctx, outputs = run_isolated_forward(WithSetup, x)
    assert ctx.times == 3 and len(run_isolated_backward(WithSetup, ctx, None, torch.ones(()))) == 2


def test_a_context_counts_as_one() -> None:
    ctx = EmulatedAutogradContext()
    assert isinstance(ctx, torch.autograd.function.FunctionCtx)
    assert (ctx.needs_input_grad, ctx.saved_tensors) == ((), ())
    ctx.anything = 3
    with pytest.raises(AttributeError):
        _ = ctx.next_functions


def test_attributes_set_in_a_backward_stay() -> None:
    class Counting(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.count = 0
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            assert len(ctx.saved_tensors) == 1
            ctx.count += 1
            return grad * ctx.count

    x = leaf(2)
    (output,) = map_with_parallel_backward(Counting, (x,))
    grads = [torch.autograd.grad(output.sum(), x, retain_graph=True)[0][0].item() for _ in range(3)]
    assert grads == [1, 2, 3]


@pytest.mark.quick
def test_the_names_are_in_their_module_only() -> None:
    """They are rarely needed, and looked like a second way to write a map."""
    assert set(mpgrad.functions.__all__).isdisjoint({*mpgrad.__all__, *dir(mpgrad)})
    with pytest.raises(AttributeError, match="no attribute 'run_isolated_forward'"):
        _ = mpgrad.run_isolated_forward  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_package_imports_the_module_when_asked() -> None:
    program = (
        "import sys, mpgrad; print('mpgrad.workers' in sys.modules, "
        "mpgrad.functions.EmulatedAutogradContext.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "mpgrad.functions"]
    with pytest.raises(AttributeError, match="module 'mpgrad' has no attribute 'no_such_name'"):
        _ = mpgrad.no_such_name  # type: ignore[attr-defined]


def test_wrong_gradients_for_an_isolated_backward() -> None:
    ctx, _ = run_isolated_forward(Product, torch.ones(3, requires_grad=True), torch.ones(3))
    for grads, error, message in (
        ((), ValueError, r"one gradient, or None, for each output \(outputs: 1, given: 0\)"),
        ((torch.ones(3), torch.ones(3)), ValueError, r"\(outputs: 1, given: 2\)"),
        (
            (torch.ones(4, 3),),
            ValueError,
            r"the gradient of output 0 must have its shape \(\(3,\); given: \(4, 3\)\)",
        ),
        ((1.0,), TypeError, r"the gradient of output 0 must be a tensor or None \(given: float\)"),
    ):
        with pytest.raises(error, match=message):
            run_isolated_backward(Product, ctx, *grads)
    with pytest.raises(
        TypeError, match=r"ctx must be what run_isolated_forward returned \(given: NoneType\)"
    ):
        run_isolated_backward(Product, None, torch.ones(3))


def test_in_a_pool_all_calls_end_before_the_first_error_is_raised(
    pool2: mpgrad.Pool, tmp_path: Path
) -> None:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, call: int) -> torch.Tensor:
            if call == 0:
                raise ValueError("at once")
            time.sleep(0.3)
            (tmp_path / str(call)).touch()
            raise ArithmeticError("later")

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad, None

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="at once") as caught:
        map_with_parallel_backward(Fails, (x, 0), (x, 1), pool=pool2)
    assert (tmp_path / "1").exists()
    assert (
        "raised in call 0, phase: forward; call 1 failed (ArithmeticError: later)"
        in caught.value.__notes__
    )
