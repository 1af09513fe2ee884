"""Tensors that are views: they arrive as they are, without what their storage holds around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.testing import assert_same_as_serial
from mpgrad.torch_state.private import tree_leaves
from mpgrad.wire.tensor_refs import GAPPED, INLINE_BYTES, SPREAD, dense_core

pytestmark = pytest.mark.quick

Tensor = torch.Tensor
WIDE = INLINE_BYTES  # elements between two of a column
LARGE = 2 * INLINE_BYTES  # elements of a tensor that lies in a slab, beside others
BEYOND = "out of bounds for storage of size"


def base(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


VIEWS: dict[str, Callable[[], Tensor]] = {
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
    "large": lambda: base(4, INLINE_BYTES // 2)[:, ::2],
    "large, with an offset": lambda: base(INLINE_BYTES)[3:],
    "with wide gaps": lambda: base(9, WIDE)[:, 3],
    "overlapping, with wide gaps": lambda: base(9 * WIDE).as_strided((9, 8, 2), (WIDE - 1, 1, 1)),
    "conjugated, with gaps": lambda: torch.view_as_complex(base(4, 10, 2))[:, ::2].conj(),
    "a row of a large batch": lambda: base(300, 30)[290],
}


def again(view: Callable[[], Tensor]) -> Tensor:
    return view().detach().requires_grad_()


def outcome(results: list[Any], xs: list[Tensor]) -> list[Tensor]:
    """The tensors of the results, and the gradients of the items, which go back to where those came
    from."""
    tensors = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
    needing = [each for each in tensors if each.requires_grad]
    return [
        *tensors,
        *(
            torch.autograd.grad(sum(each.cos().abs().sum() for each in needing), xs)
            if needing
            else ()
        ),
    ]


def within(x: Tensor) -> Any:
    """What a view's own elements say, by `as_strided` too: counted from where it begins, in its
    storage here or there."""
    start = x.storage_offset()
    return (
        x * 2,
        x.stride(),
        x.as_strided(x.shape, x.stride()) * 2,
        torch.as_strided(x, x.shape, x.stride(), start) * 3,
    )


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_the_loops(pool: mpgrad.Pool, name: str) -> None:
    ours, theirs = [again(VIEWS[name])], [again(VIEWS[name])]
    found, serial = pool.map(within, ours, chunksize=1), [within(x) for x in theirs]
    assert [each for each in tree_leaves(found) if not isinstance(each, Tensor)] == [
        each for each in tree_leaves(serial) if not isinstance(each, Tensor)
    ]
    for mine, other in zip(outcome(found, ours), outcome(serial, theirs), strict=True):
        assert torch.equal(mine, other) and mine.stride() == other.stride()


@pytest.mark.parametrize("name", VIEWS)
def test_a_captured_view_and_one_that_is_a_result(pool2: mpgrad.Pool, name: str) -> None:
    captured, view = again(VIEWS[name]), VIEWS[name]
    fn = lambda x: captured.as_strided(captured.shape, captured.stride()) * x  # noqa: E731
    (found,), serial = pool2.map(fn, [torch.tensor(2.0, dtype=torch.float64)]), fn(2.0)
    assert torch.equal(found, serial)
    grads = [torch.autograd.grad(result.abs().sum(), captured)[0] for result in (found, serial)]
    assert torch.equal(*grads) and grads[0].stride() == grads[1].stride()
    (found,), serial = pool2.map(lambda x: view(), [0]), view()
    assert torch.equal(found, serial) and found.stride() == serial.stride()


# --- what is not there


def bundled(pool: mpgrad.Pool, fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    pool.map(fn, [base(30)] * 40)  # so that it is known to be cheap
    return pool.map(fn, items)


def alone(pool: mpgrad.Pool, fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return pool.map(fn, items, chunksize=1)


class ReachesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + x.as_strided((x.numel() + 1,), (1,))[1:]


PAST_THE_END: list[Callable[[Tensor], Any]] = [
    lambda x: x.as_strided((x.numel() + 1,), (1,)),
    lambda x: x.as_strided((2,), (1,), x.storage_offset() + x.numel() - 1),
    lambda x: torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel()),
    lambda x: torch.as_strided_copy(x, (2, x.numel()), (x.numel(), 1)),
    lambda x: (x * 1).sum() + x.detach().as_strided_((x.numel() + 1,), (1,)).sum(),
    lambda x: x.as_strided_scatter(torch.zeros(2, dtype=x.dtype), (2,), (x.numel(),)),
    lambda x: x[1:].as_strided((x.numel(),), (1,)),
]


@pytest.mark.parametrize("run", [bundled, alone])
@pytest.mark.parametrize("size", [1, 30, LARGE], ids=["one", "inline", "lies in a slab"])
def test_past_the_end_of_an_argument_pytorch_raises(
    pool2: mpgrad.Pool, run: Callable[..., Any], size: int
) -> None:
    """Though other tensors lie there: those of the same message, or slab."""
    rows = list(base(12, size))[:8]
    for fn in PAST_THE_END:
        with pytest.raises(RuntimeError, match=BEYOND):
            run(pool2, fn, rows)


@pytest.mark.parametrize("size", [30, LARGE], ids=["inline", "lies in a slab"])
def test_past_the_end_of_others_pytorch_raises(pool2: mpgrad.Pool, size: int) -> None:
    """Captures, results that are passed on, several tensors of an item, and results in the
    caller."""
    row, other = base(3, size)[1], base(3, size)[2]
    for fn in PAST_THE_END:
        with pytest.raises(RuntimeError, match=BEYOND):
            pool2.map(lambda x, fn=fn: fn(row) + x.sum() + other.sum(), [base(4)])
        with pytest.raises(RuntimeError, match=BEYOND):
            pool2.map(lambda pair, fn=fn: fn(pair[0]), [(row, other), (other, row)])
    future = pool2.submit(lambda x: (x[:size] * 1, x[size:] * 1), base(2 * size))
    with pytest.raises(RuntimeError, match=BEYOND):
        pool2.submit(lambda pair: PAST_THE_END[0](pair[0]), future).result()
    for found in (*future.result(), *pool2.map(torch.sin, [row, other])):
        with pytest.raises(RuntimeError, match=BEYOND):
            PAST_THE_END[0](found.detach())


def test_past_the_end_of_a_view_with_gaps_pytorch_raises(pool2: mpgrad.Pool) -> None:
    for name in ("with gaps", "with wide gaps", "a column", "overlapping", "transposed", "large"):
        with pytest.raises(RuntimeError, match=BEYOND):
            alone(pool2, lambda x: x.as_strided((2, *x.shape), (1, *x.stride())), [VIEWS[name]()])


@pytest.mark.parametrize("size", [30, LARGE], ids=["inline", "lies in a slab"])
def test_past_the_end_in_a_backward_pytorch_raises(pool2: mpgrad.Pool, size: int) -> None:
    rows = base(300, size).requires_grad_() if size < 100 else base(9, size).requires_grad_()
    for options in ({}, {"chunksize": 1}):
        results = pool2.map(ReachesInBackward.apply, rows[-4:], **options)
        with pytest.raises(RuntimeError, match=BEYOND):
            torch.autograd.grad(sum(each.sum() for each in results), rows)


@pytest.mark.parametrize("run", [bundled, alone])
def test_before_a_view_others_numbers_are_read(pool2: mpgrad.Pool, run: Callable[..., Any]) -> None:
    """The one access whose numbers are not the loop's: see the guarantees. Offset 0 is where the
    view begins."""
    rows = list(base(300, 30)[280:])
    for mine, row in zip(
        run(pool2, lambda x: x.as_strided((2,), (1,), 0), rows), rows, strict=True
    ):
        assert torch.equal(mine, row[:2])
    for name in ("with gaps and an offset", "a column", "with wide gaps"):
        x = VIEWS[name]()
        (found,) = run(pool2, lambda x: (x.storage_offset(), x.as_strided((1,), (1,), 0)), [x])
        assert found[0] == 0 and torch.equal(found[1], x.flatten()[:1])


# --- how much travels


def test_views_stay_small() -> None:
    def travels(tensor: Tensor) -> tuple[int, int]:
        core, _, how = dense_core(tensor)
        return core.numel(), how

    batch, matrix = base(1000, 50), base(1000, 1000)
    assert travels(batch) == (50_000, 0)
    assert travels(batch[3]) == (50, 0)
    assert travels(batch[500:]) == (25_000, 0)
    assert travels(matrix[:, 7]) == (1000, SPREAD)
    assert travels(matrix.t()) == (1_000_000, 0)
    assert travels(matrix[500:].t()) == (500_000, 0)
    assert travels(matrix[:, ::GAPPED])[0] == 1000 * 1000 - GAPPED + 1
    assert travels(matrix[:, :: GAPPED + 1]) == (1000 * 1000 // (GAPPED + 1), SPREAD)
    assert travels(base(10, 10)[:, 2]) == (10, SPREAD)
    assert travels(base(1).expand(1 << 40)) == (1, 0)
    assert travels(base(1000).unfold(0, 500, 1)) == (1000, 0)


def test_one_negated_number_in_all_places(pool: mpgrad.Pool) -> None:
    """Symptom: -2 came as 2, with no error. Cause: the way for expanded tensors left out what a
    lazy negation needs."""
    expanded = torch.tensor([1 + 2j]).conj().imag.expand(3)
    assert expanded.is_neg()
    (found,) = pool.map(lambda x: x * 1, [expanded], chunksize=1)
    assert found.tolist() == [-2, -2, -2]


def test_two_views_of_one_former_result(pool2: mpgrad.Pool) -> None:
    # symptom: ValueError in the worker. cause: borrowed memory was known by its address alone,
    # without its size.
    (y,) = pool2.map(lambda n: torch.arange(n, dtype=torch.float64), [200_000])
    ((short, whole),) = pool2.starmap(lambda a, b: (a.sum(), b.sum()), [(y[:100_000], y)])
    assert float(short) == float(y[:100_000].sum()) and float(whole) == float(y.sum())


def test_strides_with_holes(pool: mpgrad.Pool) -> None:
    # symptom: last bits differed. cause: a strided item came densely packed, and torch adds it up
    # in another order.
    torch.manual_seed(0)
    items = [torch.randn(63, 130, dtype=torch.float64)[:, ::2].requires_grad_() for _ in range(6)]
    items += [
        torch.randn(40, 50, 6, dtype=torch.float64).transpose(0, 2)[1:5, ::3] for _ in range(6)
    ]
    for item, result in zip(
        items, pool.map(lambda x: (x.sum(), x.norm(), x.mean(0), x.stride()), items), strict=True
    ):
        serial = item.sum(), item.norm(), item.mean(0)
        assert all(torch.equal(mine, other) for mine, other in zip(result, serial, strict=False))
        assert result[3] == item.stride()
    assert_same_as_serial(lambda x: x[:, ::2], [torch.randn(5, 7, requires_grad=True)], pool)


def test_one_tensor_as_two_arguments_or_results_stays_one(pool: mpgrad.Pool) -> None:
    # symptom: x.mul_(2) did not show in y, although both were one tensor. cause: the fast path
    # copied each by itself.
    x = torch.ones(2)
    assert pool.starmap(lambda a, b: a.mul_(2) + b, [(x, x)])[0].tolist() == [4, 4]
    ((a, b),) = pool.map(lambda t: (t, t), [x])
    assert a is b


def test_tensors_without_memory(pool2: mpgrad.Pool) -> None:
    """Symptom: random numbers, or a crash. Cause: PyTorch's efficient zeros, which forward mode
    makes, have no bytes."""
    assert torch.equal(
        pool2.map(lambda n: torch._efficientzerotensor((n,)), [3])[0] + 0, torch.zeros(3)
    )
    zeros = torch._efficientzerotensor((2,))
    assert torch.equal(pool2.map(lambda x: x + zeros, [torch.ones(2)])[0], torch.ones(2))
