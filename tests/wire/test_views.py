"""Tensors that are views: what `as_strided` finds around their elements is what the serial loop finds, or it raises."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.torch_state.private import tree_leaves
from mpgrad.wire.tensor_cores import GAPPED, RIDE_BYTES, ROOM_BYTES, dense_core
from mpgrad.wire.tensor_refs import LONE, SPREAD, WITHIN

pytestmark = pytest.mark.quick

Tensor = torch.Tensor
REFUSED = r"counts from the beginning of the tensor's storage \(storage_offset: \d+\), but what lies there before"
GAPS_REFUSED = "came without what lies between its elements"


def base(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


WHOLE: dict[str, Callable[[], Tensor]] = {  # what lies around them is little
    "contiguous": lambda: base(4, 5),
    "with gaps": lambda: base(4, 10)[:, ::2],
    "with gaps and an offset": lambda: base(4, 10)[:, 1::2],
    "a row": lambda: base(4, 20)[1],
    "rows": lambda: base(6, 5)[2:],
    "a column": lambda: base(20, 20)[:, 3],
    "transposed": lambda: base(5, 4).t()[1:],
    "expanded": lambda: base(9, 1)[1:].expand(8, 5),
    "overlapping": lambda: base(12).unfold(0, 8, 1),
    "overlapping, with gaps": lambda: base(40)[2:].as_strided((3, 5), (2, 3)),
    "real": lambda: torch.view_as_complex(base(4, 5, 2)).imag,
    "large": lambda: base(4, RIDE_BYTES // 2)[:, ::2],
    "large, with an offset": lambda: base(RIDE_BYTES)[3:],
}

REACHING: dict[str, Callable[[Tensor], Any]] = {
    "from the beginning": lambda x: x.as_strided((2, 2), (2, 1), 0) * 2,
    "from an offset": lambda x: torch.as_strided(x, (4,), (1,), storage_offset=3).sin(),
    "from itself": lambda x: x.as_strided((3,), (1,)) * 3,
    "a copy": lambda x: torch.as_strided_copy(x, (3,), (2,), 1),
    "scattered": lambda x: x.detach().as_strided_scatter(torch.ones(2, 2, dtype=x.dtype), (2, 2), (2, 1), 0),
    "in place": lambda x: (x * 1).as_strided_((2, 2), (2, 1), 1).exp(),
    "its strides": lambda x: (x.sum(), x.stride(), x.storage_offset()),
}


def again(view: Callable[[], Tensor]) -> Tensor:
    return view().detach().requires_grad_()


def outcome(results: list[Any], xs: list[Tensor]) -> list[Tensor]:
    """The tensors of the results, and the gradients of the items, which go back to where those came from."""
    tensors = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
    needing = [each for each in tensors if each.requires_grad]
    return [*tensors, *(torch.autograd.grad(sum(each.cos().sum() for each in needing), xs) if needing else ())]


@pytest.mark.parametrize("name", WHOLE)
def test_what_lies_around_an_argument_comes_along(pool: mpgrad.Pool, name: str) -> None:
    for reaching, fn in REACHING.items():
        if name.startswith(("expanded", "overlapping")) and reaching == "scattered":
            continue  # PyTorch would write to one place twice
        ours, theirs = [again(WHOLE[name])], [again(WHOLE[name])]
        serial, found = [fn(x) for x in theirs], pool.map(fn, ours, chunksize=1)
        assert [each for each in tree_leaves(found) if not isinstance(each, Tensor)] == [
            each for each in tree_leaves(serial) if not isinstance(each, Tensor)
        ], reaching
        for mine, other in zip(outcome(found, ours), outcome(serial, theirs), strict=True):
            assert torch.equal(mine, other) and mine.stride() == other.stride(), reaching


@pytest.mark.parametrize("name", WHOLE)
def test_what_lies_around_a_capture_and_a_result_comes_along(pool2: mpgrad.Pool, name: str) -> None:
    captured = again(WHOLE[name])
    for fn in (lambda x: captured.as_strided((4,), (1,), 1) * x, lambda x: captured.as_strided((2, 2), (2, 1)) * x):
        (found,), serial = pool2.map(fn, [torch.tensor(2.0, dtype=torch.float64)]), fn(2.0)
        assert torch.equal(found, serial)
        grads = [torch.autograd.grad(result.sum(), captured)[0] for result in (found, serial)]
        assert torch.equal(*grads) and grads[0].stride() == grads[1].stride()
    view = WHOLE[name]
    (found,), serial = pool2.map(lambda x: view(), [0]), view()
    assert torch.equal(found, serial) and found.stride() == serial.stride()
    if name not in ("a row", "rows", "transposed", "expanded"):  # which go without what is behind their end
        span = 1 + sum((size - 1) * step for size, step in zip(serial.shape, serial.stride(), strict=True))
        whole = (found.storage_offset() + span,)
        assert torch.equal(found.as_strided(whole, (1,), 0), serial.as_strided(whole, (1,), 0))


# --- where it would be much: an error


FAR = 10 * ROOM_BYTES
WIDE = RIDE_BYTES  # elements between two of a column


def bundled(pool: mpgrad.Pool, fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    pool.map(fn, [base(30)] * 40)  # so that it is known to be cheap
    return pool.map(fn, items)


def alone(pool: mpgrad.Pool, fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return pool.map(fn, items, chunksize=1)


class Reaches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.as_strided_copy(x, (2,), (1,), 0)


class ReachesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.asked = x.storage_offset() if x.numel() % 2 else 0
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.as_strided(x.shape, x.stride(), ctx.asked)


def deep_copies(x: Tensor) -> Tensor:
    copy.deepcopy(x)
    return x.as_strided((2,), (1,), 0)


def pickles(x: Tensor) -> Tensor:
    pickle.dumps(x)
    return x.as_strided((2,), (1,), 0)


COUNTING: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.as_strided((2,), (1,), 0),
    lambda x: x[1:].as_strided(size=(2,), stride=(1,), storage_offset=0),
    lambda x: torch.as_strided(input=x, size=(2,), stride=(1,), storage_offset=1),
    lambda x: torch.as_strided(size=(2,), stride=(1,), storage_offset=1, x=x),
    lambda x: torch.as_strided_copy(x, (2,), (1,), 0),
    lambda x: (x * 1).sum() + x.as_strided_((2,), (1,), 0).sum(),
    lambda x: torch.as_strided_(x, (2,), (1,), 0),
    lambda x: x.as_strided_scatter(torch.zeros(2, dtype=x.dtype), (2,), (1,), 0),
    lambda x: torch.as_strided_scatter(x, torch.zeros(2, dtype=x.dtype), (2,), (1,), storage_offset=0),
    lambda x: torch.func.grad(lambda y: y.as_strided((2,), (1,), 0).sum())(x),
    functools.partial(torch.as_strided, size=(2,), stride=(1,), storage_offset=0),
    functools.partial(Tensor.as_strided, size=(2,), stride=(1,), storage_offset=0),
    Reaches.apply,
    deep_copies,  # PyTorch asks where it begins, the function does not
    pickles,
    lambda x: torch.func.vmap(lambda y: y.as_strided((2,), (1,), 0))(x[None]),
]


@pytest.mark.parametrize("run", [bundled, alone])
def test_an_argument_without_what_lies_before_it(pool2: mpgrad.Pool, run: Callable[..., Any]) -> None:
    rows = list(base(300, 30)[280:])
    for fn in COUNTING:
        with pytest.raises(RuntimeError, match=REFUSED):
            run(pool2, fn, rows)
    right = [
        lambda x: x.as_strided((2, 4), (1, 2)),
        lambda x: x.as_strided((3,), (2,), x.storage_offset()),
        lambda x: torch.as_strided(x, (3,), (2,), storage_offset=x[4:].storage_offset()),
        lambda x: x.clone().as_strided((2,), (1,), 0),
        lambda x: (x * 2).as_strided((2,), (1,), 1),
    ]
    for fn in right:
        for mine, other in zip(run(pool2, fn, rows), map(fn, rows), strict=True):
            assert torch.equal(mine, other)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size"):  # the next row stays in the caller too
        run(pool2, lambda x: x.as_strided((2, 30), (30, 1)), rows)


def test_a_backward_without_what_lies_before_an_argument(pool2: mpgrad.Pool) -> None:
    """There the call has ended: nobody knows of it but what it leaves."""
    rows, captured = base(300, 30).requires_grad_(), base(300, 30).requires_grad_()

    def gradients(results: Iterable[Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(sum(each.sum() for each in results), [rows, captured], allow_unused=True)

    row = captured[290]
    for options in ({}, {"chunksize": 1}):
        for fn in (ReachesBackward.apply, lambda x: x * ReachesBackward.apply(row)):
            results = pool2.map(fn, rows[280:], **options)
            with pytest.raises(RuntimeError, match=REFUSED):
                gradients(results)
        odd = list(rows[280:, 1:])  # with these it has asked where they begin
        found, serial = (
            gradients(pool2.map(ReachesBackward.apply, odd, **options))[0],
            gradients(map(ReachesBackward.apply, odd))[0],
        )
        assert found is not None and serial is not None and torch.equal(found, serial)


def test_who_does_not_reach_is_not_asked(pool2: mpgrad.Pool) -> None:
    """Nor is the one who reaches within what came whole, beside others that did not."""
    row, column, whole = base(2, FAR)[1], base(9, WIDE)[:, 3], base(5)
    fn = lambda args: args[2].as_strided((2,), (1,), 1) + args[0][0] + args[1][1]  # noqa: E731
    assert torch.equal(pool2.map(fn, [(row, column, whole)])[0], fn((row, column, whole)))
    captured = pool2.map(lambda x: x.as_strided((2,), (1,), 1) + row[0] + column[1], [whole])[0]
    assert torch.equal(captured, fn((row, column, whole)))


@pytest.mark.parametrize("run", [bundled, alone])
def test_an_argument_without_what_lies_between_its_elements(pool2: mpgrad.Pool, run: Callable[..., Any]) -> None:
    columns = list(base(9, WIDE).t()[3:20])
    overlapping = base(9 * WIDE).as_strided((9, 8, 2), (WIDE - 1, 1, 1))
    conjugated = torch.view_as_complex(base(4, 10, 2))[:, ::2].conj()
    for given in (columns, [overlapping] * 3, [conjugated] * 3):
        for fn in (
            lambda x: x.as_strided((2,), (1,)),
            lambda x: torch.as_strided(x, (2,), (1,), 0),
            lambda x: torch.as_strided_copy(x[1:], (2,), (1,), x.storage_offset()),
        ):
            with pytest.raises(RuntimeError, match=GAPS_REFUSED):
                run(pool2, fn, given)
        for (mine, stride), other in zip(run(pool2, lambda x: (x * 2, x.stride()), given), given, strict=True):
            assert torch.equal(mine, other * 2) and stride == other.stride()


def test_captures_and_results_that_are_passed_on(pool2: mpgrad.Pool) -> None:
    row, column, other = base(2, FAR)[1], base(9, WIDE)[:, 3], base(4)
    for fn, words in (
        (lambda x: row.as_strided((2,), (1,), 0), REFUSED),
        (lambda x: row[4:].as_strided((2,), (1,), 0), REFUSED),
        (lambda x: column.as_strided((2,), (1,)), GAPS_REFUSED),
    ):
        with pytest.raises(RuntimeError, match=words):
            pool2.map(fn, [other])
    future = pool2.submit(lambda x: x[FAR:], base(FAR + 5))
    with pytest.raises(RuntimeError, match=REFUSED):
        pool2.submit(lambda x: x.as_strided((2,), (1,), 0), future).result()


def test_scripted_and_compiled_functions_may_stride(pool2: mpgrad.Pool) -> None:
    """They do not see that somebody watches."""

    def strides(x: Tensor) -> Tensor:
        return torch.as_strided(x, [2, 2], [1, 2], 1) + x.as_strided([2, 2], [1, 2], 0)

    def inside(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.jit.script(strides)(x), torch.compile(strides, backend="eager", fullgraph=True)(x)

    x = base(8)
    assert all(torch.equal(each, strides(x)) for each in pool2.map(inside, [x])[0])


def test_pools_in_workers_stride_as_well(pool2: mpgrad.Pool) -> None:
    def inside(x: Tensor) -> list[Tensor]:
        with mpgrad.Pool(1) as within:
            return within.map(functools.partial(torch.as_strided, size=(2,), stride=(2,)), [x[::2], x[1:]])

    x = base(300)[200:]
    found, serial = pool2.map(inside, [x])[0], [each.as_strided((2,), (2,)) for each in (x[::2], x[1:])]
    assert all(map(torch.equal, found, serial))


# --- how much travels


def test_views_stay_small() -> None:
    def travels(tensor: Tensor) -> tuple[int, int]:
        core, _, how = dense_core(tensor)
        return core.numel(), how

    batch, matrix = base(1000, 50), base(1000, 1000)
    assert travels(batch) == (50_000, 0)
    assert travels(batch[3]) == (50, LONE)
    assert travels(batch[500:]) == (25_000, LONE)
    assert travels(batch.flatten()[2:]) == (50_000, WITHIN)
    assert travels(batch.flatten()[ROOM_BYTES // 8 + 1 :])[1] == LONE
    assert travels(matrix[:, 0]) == (1000, SPREAD)
    assert travels(matrix[:, 7]) == (1000, SPREAD | LONE)
    assert travels(matrix.t()) == (1_000_000, 0)
    assert travels(matrix[500:].t()) == (500_000, LONE)
    assert travels(matrix[:, ::GAPPED])[0] == 1000 * 1000 - GAPPED + 1
    assert travels(matrix[:, :: GAPPED + 1]) == (1000 * 1000 // (GAPPED + 1), SPREAD)
    assert travels(base(10, 10)[:, 2]) == (2 + 91, WITHIN)
    assert travels(base(1).expand(1 << 40)) == (1, 0)
    assert travels(base(1000).unfold(0, 500, 1)) == (1000, 0)
