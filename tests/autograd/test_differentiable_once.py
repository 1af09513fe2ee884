"""Second derivatives through Functions that can be differentiated once: a value where the loop has
one, an error where the loop raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import mpgrad

Loop = Callable[..., list[Any]]  # the pool's starmap, or the serial loop


class ProductOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ProductOnce.apply(x, y)  # type: ignore[no-untyped-call, no-any-return]


def serial(fn: Callable[..., Any], items: Sequence[Sequence[Any]]) -> list[Any]:
    return [fn(*item) for item in items]


def one_by_one(pool: mpgrad.Pool) -> Loop:
    return lambda fn, items: [pool.submit(fn, *item).result() for item in items]


def separately(pool: mpgrad.Pool) -> Loop:
    """Every item in a call of its own."""
    return lambda fn, items: pool.starmap(fn, items, chunksize=1)


# --- functions, of two arguments and a capture


def alone(x: Any, y: Any, w: Any) -> Any:
    return once(x, y)


def beside_others(x: Any, y: Any, w: Any) -> Any:
    return once(x, y) + x**2 * y * w


def after_others(x: Any, y: Any, w: Any) -> Any:
    return once(x.sin() * w, y) + x


def before_others(x: Any, y: Any, w: Any) -> Any:
    return once(x, y).exp() * w


def of_the_capture(x: Any, y: Any, w: Any) -> Any:
    return once(x, w) * y + y**3


def two_in_a_row(x: Any, y: Any, w: Any) -> Any:
    return once(once(x, y) * w, y) * x


def one_of_two(x: Any, y: Any, w: Any) -> Any:
    return once(x, y), (x * y * w).sin()


def of_a_derivative(x: Any, y: Any, w: Any) -> Any:
    """Differentiates once by itself, so that its first derivative is the second one."""
    if not x.requires_grad:
        return x * y * w
    with torch.enable_grad():
        (first,) = torch.autograd.grad(once(x, y) * x * w, x, create_graph=True)
    return first


def of_a_derivative_or_not(x: Any, y: Any, w: Any) -> Any:
    return of_a_derivative(x, y, w), x * y**2 * w


FUNCTIONS = [
    alone,
    beside_others,
    after_others,
    before_others,
    of_the_capture,
    two_in_a_row,
    one_of_two,
    of_a_derivative,
    of_a_derivative_or_not,
]


# --- programs around them


def plainly(loop: Loop, fn: Any, x: Any, y: Any, w: Any) -> list[Any]:
    return loop(lambda x, y: fn(x, y, w), [(x, y), (y, x)])


def between_operations(loop: Loop, fn: Any, x: Any, y: Any, w: Any) -> list[Any]:
    results = loop(lambda x, y: fn(x, y, w), [(x * y, y), (y.exp(), x)])
    return [each.sin() * y if isinstance(each, torch.Tensor) else each for each in results]


def before_once(loop: Loop, fn: Any, x: Any, y: Any, w: Any) -> list[Any]:
    return [once(each, y) for each in tensors(loop(lambda x, y: fn(x, y, w), [(x, y)]))]


def two_calls(loop: Loop, fn: Any, x: Any, y: Any, w: Any) -> list[Any]:
    (inner,) = loop(lambda x, y: fn(x, y, w), [(x, y)])
    return loop(lambda x, y: fn(x, y, w), [(each, x) for each in tensors([inner])])


PROGRAMS = [plainly, between_operations, before_once, two_calls]


def tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for each in results for tensor in tensors(each)]


def outcome(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except RuntimeError as error:
        return type(error), str(error)


def outcomes(loop: Loop, program: Any, fn: Any, needing: str, gradient: str) -> Iterator[Any]:
    """Yield what each first and second derivative gives or raises."""
    leaves = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=name in needing)
        for name, value in (("x", 0.7), ("y", 1.3), ("w", -0.4))
    }
    results = [each for each in tensors(program(loop, fn, **leaves)) if each.requires_grad]
    wanted = [leaves[name] for name in needing]
    for chosen in filter(None, [results, results[1:]]):
        grads = [torch.full_like(each, 1.5, requires_grad=gradient == "needing") for each in chosen]

        def first(wanted: Any, grads: Any = grads, chosen: Any = chosen) -> Any:
            return torch.autograd.grad(
                chosen,
                wanted,
                None if gradient == "none" else grads,
                create_graph=True,
                allow_unused=True,
            )

        yield outcome(lambda chosen=chosen: sum(chosen).backward(retain_graph=True))
        for among in [wanted, wanted[:1]]:
            found = outcome(lambda among=among, first=first: first(among))
            yield found
            if not isinstance(found[0], type):
                yield from second_derivatives(found, [*wanted, *grads])


def second_derivatives(found: Sequence[Any], inputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    given = [each for each in found if each is not None and each.requires_grad]
    inputs = [each for each in inputs if each.requires_grad]
    for each in given:
        yield from (
            outcome(lambda each=each, at=at: torch.autograd.grad(each, [at], retain_graph=True))
            for at in inputs
        )
        yield outcome(
            lambda each=each: torch.autograd.grad(
                each, inputs, create_graph=True, allow_unused=True
            )
        )
        yield outcome(lambda each=each: each.backward(retain_graph=True))
    if given:
        yield outcome(
            lambda: torch.autograd.grad(
                given, inputs, [each.detach() for each in given], retain_graph=True
            )
        )


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, (list, tuple)):
        assert isinstance(ours, (list, tuple)), (where, ours, theirs)
        assert len(ours) == len(theirs), (where, ours, theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other, where)
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), (where, ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        assert ours.requires_grad == theirs.requires_grad, where
    else:
        assert ours == theirs, where


SLOW = pytest.mark.slow


@pytest.mark.quick
def test_the_second_derivative_that_was_reported(pool: mpgrad.Pool) -> None:
    # symptom: "trying to differentiate twice" for a derivative that the loop has. cause: nodes that
    # only raise were run whatever the caller asked for.
    for loop in (serial, pool.starmap, one_by_one(pool)):
        x, y = (torch.tensor(each, requires_grad=True) for each in (2.0, 3.0))
        (result,) = loop(lambda x, y: once(x, y) + x * y, [(x, y)])
        grads = torch.autograd.grad(
            result, [x, y], torch.ones((), requires_grad=True), create_graph=True
        )
        assert torch.autograd.grad(grads[0].sum(), [y], retain_graph=True)[0] == 1
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grads[0].sum().backward()


@pytest.mark.parametrize(
    "fn",
    [
        each if each in (beside_others, of_a_derivative_or_not) else pytest.param(each, marks=SLOW)
        for each in FUNCTIONS
    ],
    ids=lambda fn: fn.__name__,
)
def test_second_derivatives_are_those_of_the_loop(pool: mpgrad.Pool, fn: Any) -> None:
    raised = 0
    for program, needing, gradient, loop in [
        *((program, "xyw", "needing", pool.starmap) for program in PROGRAMS),
        (plainly, "x", "needing", pool.starmap),
        (plainly, "xyw", "none", pool.starmap),
        (plainly, "xyw", "needing", separately(pool)),
    ]:
        expected = list(outcomes(serial, program, fn, needing, gradient))
        raised += sum("differentiate twice" in str(each) for each in expected)
        found = list(outcomes(loop, program, fn, needing, gradient))
        assert_same(found, expected, f"{program.__name__}, {needing}, {gradient}")
    assert raised  # so that both kinds were there
