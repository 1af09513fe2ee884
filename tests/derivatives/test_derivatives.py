"""Derivatives of every output, against torch.autograd.functional, torch.func and finite
differences."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import first_are_quick, in_turn
from torch.autograd import functional

import mpgrad
import mpgrad.derivatives
import mpgrad.tasks.jacobians
from mpgrad.derivatives import hessian, hvp, jacobian, jvp, shares_of, vjp
from mpgrad.tasks.jacobians import Arguments, Jacobian, basis, batches

pytestmark = pytest.mark.quick

MODES = ["auto", "batched", "forward", "reverse"]
Compute = Callable[..., Any]


@pytest.fixture(
    params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["here", "in a pool"]
)
def where(request: pytest.FixtureRequest, pool2: mpgrad.Pool) -> mpgrad.Pool | None:
    return pool2 if request.param else None


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    mpgrad.derivatives.SAID.clear()
    yield
    mpgrad.derivatives.SAID.clear()


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def flat(value: Any) -> list[torch.Tensor]:
    return (
        [each for part in value for each in flat(part)]
        if isinstance(value, tuple | list)
        else [value]
    )


def assert_equal(found: Any, expected: Any, exact: bool = False) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_equal(*pair, exact)
        return
    assert not found.requires_grad
    torch.testing.assert_close(
        found, expected, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12
    )


class OldSine(torch.autograd.Function):
    """Neither a forward derivative, nor a form that torch.func takes; its backward can be batched
    and differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].cos()


class OneByOne(OldSine):
    """Its backward has no batching rule either."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].cos() if grad.abs().sum().item() >= 0 else grad


# --- every way gives what PyTorch gives

Case = tuple[Compute, tuple[torch.Tensor, ...]]
CASES: dict[str, Case] = {
    "more rows": (lambda c: (c[:, None] * torch.arange(1, 6, dtype=c.dtype)).sin(), (tensor(2),)),
    "more columns": (lambda c: c.exp().sum(0) * c[0], (tensor(4, 3),)),
    "scalar to scalar": (lambda c: c**3, (tensor(),)),
    "scalar to many": (lambda c: c ** torch.arange(7), (tensor(),)),
    "many to scalar": (lambda c: c.prod(), (tensor(5),)),
    "no rows": (lambda c: c[:0] * 2, (tensor(3),)),
    "no columns": (lambda c: c.sum() + torch.ones(2, 2, dtype=c.dtype), (tensor(0, 3),)),
    "nothing at all": (lambda c: c * 2, (tensor(0),)),
    "several arguments": (lambda a, b: (a @ b).tanh(), (tensor(2, 3), tensor(3, 2, seed=1))),
    "several outputs": (lambda c: (c.exp(), c.sum(), c[:2].outer(c)), (tensor(3),)),
    "a tuple of one": (lambda c: (c.exp(),), (tensor(3),)),
    "several of both": (
        lambda a, b: (a * b, a.sum().reshape(1, 1), b[1:]),
        (tensor(), tensor(3, seed=1)),
    ),
    "independent": (
        lambda a, b: (a.sin(), torch.ones(2, dtype=a.dtype)),
        (tensor(2), tensor(2, seed=1)),
    ),
    "detached": (lambda c: c.detach() * c, (tensor(3),)),
    "the same tensor twice": (lambda a, b: a * b.sin(), (tensor(3), tensor(3))),
}


# torch.autograd.functional stacks rows, and fails where there are none
NO_STACK = ("no rows", "nothing at all")


@pytest.mark.parametrize(("case", "mode"), in_turn(CASES, MODES))
def test_as_pytorch(case: str, mode: str, where: mpgrad.Pool | None) -> None:
    fn, args = CASES[case]
    inputs = args if len(args) > 1 else args[0]
    if case in NO_STACK:
        expected = torch.func.jacfwd(fn)(*args)
    else:
        expected = functional.jacobian(fn, inputs)
    for chunk_size in (None, 1, 3):
        found = jacobian(fn, *args, mode=mode, pool=where, chunk_size=chunk_size)
        assert_equal(found, expected, exact=mode == "reverse")
        assert all(each.dtype == torch.float64 for each in flat(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, where: mpgrad.Pool | None) -> None:
    c, x = tensor(2, dtype=dtype), tensor(3)
    for mode in MODES:
        of_c, of_x = jacobian(lambda c, x: c.sum() * x, c, x, mode=mode, pool=where)
        assert (of_c.dtype, of_x.dtype) == (dtype, torch.float64)
        assert torch.equal(of_c, x.to(dtype)[:, None].expand(3, 2))
        assert torch.equal(of_x, c.sum() * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_as_torch_func(mode: str, where: mpgrad.Pool | None) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(torch.eye(3, dtype=a.dtype) * 3 + a, b).cumprod(0)

    a, b = tensor(3, 3), tensor(3, seed=1)
    for argnums in (0, 1, (1, 0), (1,)):
        found = jacobian(fn, a, b, mode=mode, pool=where, argnums=argnums, chunk_size=2)
        assert_equal(found, torch.func.jacrev(fn, argnums)(a, b))
        assert_equal(found, torch.func.jacfwd(fn, argnums)(a, b))
    assert_equal(
        jacobian(fn, a, b, mode=mode, pool=where, argnums=-1), torch.func.jacrev(fn, 1)(a, b)
    )


@pytest.mark.parametrize("mode", MODES)
def test_ragged_lists(mode: str, where: mpgrad.Pool | None) -> None:
    c = tensor(2)
    items = [tensor(n, seed=n) for n in (1, 40, 0, 3)]
    weights = [1, 2, 3, 4]  # not differentiated: may be anything

    def fn(c: torch.Tensor, x: torch.Tensor, weight: int) -> torch.Tensor:
        return weight * (c[0] * x + c[1]).sin()

    found = jacobian(fn, c, items, weights, mode=mode, pool=where, argnums=(0, 1))
    for x, weight, each in zip(items, weights, found, strict=True):
        own = functools.partial(fn, weight=weight)
        expected = (
            functional.jacobian(own, (c, x)) if len(x) else torch.func.jacfwd(own, (0, 1))(c, x)
        )
        assert_equal(each, expected, exact=mode == "reverse")
    of_c = jacobian(fn, c, items, weights, mode=mode, pool=where, argnums=0)
    assert_equal(of_c, [each[0] for each in found])
    assert jacobian(lambda x: x, [], mode=mode, pool=where) == []


@pytest.mark.parametrize("mode", MODES)
def test_hessians(mode: str, where: mpgrad.Pool | None) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.sin() * b.prod()).sum() * b[0]

    a, b = tensor(2, 2), tensor(3, seed=1)
    assert_equal(hessian(fn, a, b, mode=mode, pool=where), functional.hessian(fn, (a, b)))
    assert_equal(
        hessian(fn, a, b, mode=mode, pool=where, argnums=1), torch.func.hessian(fn, 1)(a, b)
    )
    found = hessian(fn, a, [b, b * 2], mode=mode, pool=where, argnums=1, chunk_size=2)
    assert_equal(found, [torch.func.hessian(fn, 1)(a, b), torch.func.hessian(fn, 1)(a, b * 2)])
    for linear in (lambda a: a.sum(), lambda a: torch.ones(1, dtype=a.dtype)):
        assert_equal(
            hessian(linear, a, mode=mode, pool=where), torch.zeros(2, 2, 2, 2, dtype=torch.float64)
        )


def test_products(where: mpgrad.Pool | None) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.sin() * b.sum(), b.exp()

    def value(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fn(a, b)[0].prod()

    a, b, u, v = tensor(2), tensor(3, seed=1), tensor(2, seed=2), tensor(3, seed=3)
    one = torch.ones((), dtype=torch.float64)
    assert_equal(jvp(fn, (a, b), (u, v), pool=where), functional.jvp(fn, (a, b), (u, v)))
    assert_equal(
        vjp(fn, (a, b), (u, v), pool=where), functional.vjp(fn, (a, b), (u, v)), exact=True
    )
    assert_equal(hvp(value, (a, b), (u, v), pool=where), functional.hvp(value, (a, b), (u, v)))
    assert_equal(
        jvp(fn, (a, b), u, argnums=0, pool=where)[1], functional.jvp(lambda a: fn(a, b), a, u)[1]
    )
    assert_equal(
        vjp(value, (a, b), one, argnums=1, pool=where)[1], functional.vjp(value, (a, b), one)[1][1]
    )
    assert_equal(
        hvp(value, (a, b), v, argnums=1, pool=where)[1],
        functional.hvp(lambda b: value(a, b), b, v)[1],
    )
    assert_equal(jvp(torch.sin, a, u, pool=where), functional.jvp(torch.sin, a, u))
    assert_equal(vjp(torch.sin, (a,), u, pool=where)[1], (a.cos() * u,))
    assert_equal(hvp(lambda a: a.sum(), a, u, pool=where)[1], torch.zeros_like(a))
    assert_equal(jvp(lambda a: torch.ones(3), a, u, pool=where)[1], torch.zeros(3))
    # ragged
    items, tangents = [a, b], [u, v]
    expected = [(x.exp(), x.exp() * t) for x, t in zip(items, tangents, strict=True)]
    assert_equal(jvp(torch.exp, items, tangents, pool=where), expected)
    assert_equal(vjp(torch.exp, items, tangents, pool=where), expected)
    cubes = hvp(lambda x: (x**3).sum(), items, tangents, pool=where)
    assert_equal(cubes, [((x**3).sum(), 6 * x * t) for x, t in zip(items, tangents, strict=True)])
    shared = jvp(lambda c, x: c * x, (one, items), one, argnums=0, pool=where)
    assert_equal(shared, [(x, x) for x in items])


# --- results that can be differentiated


@pytest.mark.parametrize("mode", MODES)
def test_with_a_graph(mode: str, where: mpgrad.Pool | None) -> None:
    a, b, captured = (tensor(2, seed=seed).requires_grad_() for seed in range(3))

    def compute(a: torch.Tensor, b: torch.Tensor, captured: torch.Tensor) -> Any:
        def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.cat([(a * captured).sin() * b.prod(), a[:1] ** 3])

        of_shared = jacobian(fn, a, b, mode=mode, pool=where, create_graph=True, chunk_size=2)
        of_items = jacobian(fn, a, [b, b * 2], mode=mode, pool=where, create_graph=True, argnums=1)
        return tuple(flat(of_shared) + of_items)

    assert torch.autograd.gradcheck(compute, (a, b, captured))


def test_products_and_hessians_with_a_graph(where: mpgrad.Pool | None) -> None:
    a, captured = tensor(2).requires_grad_(), tensor(2, seed=1).requires_grad_()
    v = tensor(2, seed=2).requires_grad_()

    def compute(a: torch.Tensor, captured: torch.Tensor, v: torch.Tensor) -> Any:
        def fn(a: torch.Tensor) -> torch.Tensor:
            return (a * captured).sin()

        def value(a: torch.Tensor) -> torch.Tensor:
            return fn(a).prod()

        options: Any = {"pool": where, "create_graph": True}
        pairs = [jvp(fn, a, v, **options), vjp(fn, a, v, **options), hvp(value, a, v, **options)]
        return (
            *flat(pairs),
            hessian(value, a, **options),
            hessian(value, a, mode="forward", **options),
        )

    assert torch.autograd.gradcheck(compute, (a, captured, v))


@pytest.mark.parametrize("mode", MODES)
def test_captures_are_constants_without_create_graph(mode: str, where: mpgrad.Pool | None) -> None:
    c, captured = tensor(2).requires_grad_(), tensor(2, seed=1).requires_grad_()
    expected = torch.diag(captured.detach())
    assert_equal(jacobian(lambda c: c * captured, c, mode=mode, pool=where), expected)
    with torch.no_grad():
        assert_equal(jacobian(lambda c: c * captured, c, mode=mode, pool=where), expected)
        assert jacobian(
            lambda c: c * captured, c, mode=mode, pool=where, create_graph=True
        ).requires_grad
    assert_equal(
        hvp(lambda c: (c**2 * captured).sum(), c, c.detach(), pool=where)[1],
        (2 * c * captured).detach(),
    )


def test_inside_of_a_task(pool2: mpgrad.Pool) -> None:
    items = [tensor(n, seed=n).requires_grad_() for n in (1, 3)]
    for mode in MODES:
        results = pool2.map(
            lambda x: jacobian(torch.sin, x, mode=mode, create_graph=True).sum(), items
        )
        for x, grad in zip(items, torch.autograd.grad(results, items), strict=True):
            torch.testing.assert_close(grad, -x.detach().sin(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_whatever_modes_the_caller_has(mode: str, where: mpgrad.Pool | None) -> None:
    c = tensor(3)
    with torch.inference_mode():
        assert torch.equal(jacobian(torch.exp, c, mode=mode, pool=where), torch.diag(c.exp()))


# --- ways that give place to others


def test_a_function_without_forward_derivative(where: mpgrad.Pool | None) -> None:
    def fn(c: torch.Tensor) -> torch.Tensor:
        return OldSine.apply(c * torch.arange(5, dtype=c.dtype))

    c = tensor()
    expected = functional.jacobian(fn, c)
    with pytest.warns(
        UserWarning, match="fn does not .* batched forward mode .*used batched rows instead"
    ) as said:
        assert_equal(jacobian(fn, c, pool=where), expected)
    assert len(said) == 1 and said[0].filename == __file__
    assert_equal(jacobian(fn, c, pool=where), expected)  # once: a second warning would be an error
    assert_equal(jacobian(fn, [c, c * 2], pool=where)[0], expected)
    assert_equal(jacobian(fn, c, mode="batched", pool=where), expected)
    assert_equal(jacobian(fn, c, mode="reverse", pool=where), expected, exact=True)
    with pytest.raises(
        NotImplementedError,
        match=r"'forward': batched forward mode \(.*; use mode='auto' or mode='reverse'",
    ):
        jacobian(fn, c, mode="forward", pool=where)


def test_a_function_without_batching_rule(where: mpgrad.Pool | None) -> None:
    def fn(c: torch.Tensor) -> torch.Tensor:
        return OneByOne.apply(c * 2)[:2]

    c = tensor(3)
    expected = functional.jacobian(fn, c)
    with pytest.warns(
        UserWarning,
        match="batched rows .*used one row at a time instead; mode='reverse' uses this at once",
    ):
        assert_equal(jacobian(fn, c, pool=where), expected, exact=True)
    with pytest.raises(
        NotImplementedError,
        match=r"fn does not support mode 'batched': batched rows \(RuntimeError: ",
    ):
        jacobian(fn, c, mode="batched", pool=where)
    with pytest.warns(
        UserWarning,
        match="batched forward mode .* nor forward mode, one .* nor batched rows",
    ):
        jacobian(lambda c: fn(c).repeat(9), c, pool=where)


class NoBatches(torch.autograd.Function):
    """A forward derivative that looks at numbers, which no vmap takes."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_forward(*inputs)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * ctx.saved_tensors[0].cos() if tangent.abs().sum().item() >= 0 else tangent


def test_forward_one_column_at_a_time(where: mpgrad.Pool | None) -> None:
    c = tensor(2)
    expected = functional.jacobian(NoBatches.apply, c)
    with pytest.warns(
        UserWarning,
        match="used forward mode, one column at a time instead; mode='forward' uses this",
    ):
        assert_equal(jacobian(NoBatches, c, mode="forward", pool=where), expected)
    assert_equal(
        jacobian(lambda c: NoBatches.apply(c).repeat(3), c, mode="reverse"), expected.repeat(3, 1)
    )


def test_products_without_forward_derivative(where: mpgrad.Pool | None) -> None:
    c, v = tensor(3), tensor(3, seed=1)
    with pytest.warns(
        UserWarning,
        match=r"apply does not support forward mode \(.*\); mpgrad used two backwards instead",
    ):
        assert_equal(jvp(OldSine, c, v, pool=where), (c.sin(), c.cos() * v))
    with pytest.warns(
        UserWarning,
        match="the gradient of .* forward over reverse .*; mpgrad used reverse over reverse",
    ):
        assert_equal(
            hvp(lambda c: OldSine.apply(c).sum(), c, v, pool=where), (c.sin().sum(), -c.sin() * v)
        )
    assert_equal(jvp(OldSine, c, v, pool=where), (c.sin(), c.cos() * v))  # said once
    assert_equal(hessian(lambda c: OldSine.apply(c).sum(), c, pool=where), torch.diag(-c.sin()))


def test_an_error_of_the_function_itself_stays_what_it_is(where: mpgrad.Pool | None) -> None:
    class Refuses(OldSine):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no derivative at this point")

    def fails(c: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no value at this point")

    c = tensor(3)
    for mode in MODES:
        for fn in (fails, Refuses.apply):
            with pytest.raises(ArithmeticError, match="at this point"):
                jacobian(fn, c, mode=mode, pool=where)
    for fn in (fails, Refuses.apply):
        with pytest.raises(ArithmeticError, match="at this point"):
            jvp(fn, c, c, pool=where)
        with pytest.raises(ArithmeticError, match="at this point"):
            hvp(lambda c: fn(c).sum(), c, c, pool=where)


# --- one function for all rows and columns


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers(mode: str, where: mpgrad.Pool | None) -> None:
    def fn(c: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(c.repeat(8), 0.5) * random.random()

    c = tensor(4)
    torch.manual_seed(3)
    state = random.getstate()
    found = jacobian(fn, [c, c], mode=mode, pool=where, chunk_size=3)
    after = torch.rand(3)
    assert random.getstate() == state
    torch.manual_seed(3)
    reference = jacobian(fn, [c, c], mode="reverse")
    assert torch.equal(after, torch.rand(3))  # the caller's generator went on as far, pool or not
    assert_equal(found, reference)
    assert not torch.equal(*found)  # items have streams of their own
    (value, _), other = (
        vjp(fn, c, torch.ones(32, dtype=c.dtype), pool=where),
        jvp(fn, c, c, pool=where)[0],
    )
    assert not torch.equal(value, other)  # and so have operations
    for each in found:
        rows = each.view(8, 4, 4)
        scale = rows.max()
        assert all(torch.equal(row, torch.diag((row.diagonal() > 0) * scale)) for row in rows)


@pytest.mark.parametrize("mode", MODES)
def test_arguments_may_be_written_to(mode: str, where: mpgrad.Pool | None) -> None:
    def fn(c: torch.Tensor) -> torch.Tensor:
        return (c.mul_(2) ** 2).repeat(3)

    c = tensor(2)
    before = c.clone()
    assert_equal(jacobian(fn, c, mode=mode, pool=where), torch.diag(8 * c).repeat(3, 1))
    assert_equal(jvp(fn, c, before, pool=where)[1], (8 * c * c).repeat(3))
    assert_equal(
        hessian(lambda c: fn(c).sum(), c, mode=mode, pool=where), 24 * torch.eye(2, dtype=c.dtype)
    )
    assert torch.equal(c, before)


@pytest.mark.parametrize(
    "pool_of",
    first_are_quick(3, [("process", 1), ("thread", 2), ("inline", 1), ("process", 4)]),
    ids=str,
)
def test_any_engine(
    pool_of: tuple[str, int], shared_pools: Callable[[str, int], mpgrad.Pool]
) -> None:
    fn, c = CASES["several outputs"][0], tensor(3)
    expected = functional.jacobian(fn, c)
    for mode in MODES:
        assert_equal(jacobian(fn, c, mode=mode, pool=shared_pools(*pool_of)), expected)
    items = [tensor(n, seed=n) for n in range(3, 9)]
    found = jacobian(fn, items, mode="forward", pool=shared_pools(*pool_of))
    assert_equal(found, [functional.jacobian(fn, x) for x in items])


# --- how much is done


class Counted(torch.autograd.Function):
    """Counts backwards, and notes the largest batch that came."""

    backwards = 0
    generate_vmap_rule = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Counted.backwards += 1
        return grad * 2


def test_batched_is_no_loop_and_chunks_are() -> None:
    c = tensor(10)
    for mode, chunk_size, backwards in (
        ("batched", None, 1),
        ("batched", 4, 3),
        ("auto", 5, 2),
        ("reverse", None, 10),
    ):
        Counted.backwards = 0
        assert torch.equal(
            jacobian(Counted, c, mode=mode, chunk_size=chunk_size), 2 * torch.eye(10, dtype=c.dtype)
        )
        assert Counted.backwards == backwards


def test_chunks_bound_the_memory() -> None:
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if (
                isinstance(result, torch.Tensor)
                and func.namespace == "aten"
                and func._schema.name == "aten::mul"
            ):
                sizes.append(result.numel())
            return result

    c = tensor(50)
    for chunk_size, largest in ((None, 50 * 50), (7, 7 * 50), (1, 50)):
        sizes.clear()
        with Watch():
            found = jacobian(lambda c: c * c, c, mode="batched", chunk_size=chunk_size)
        assert max(sizes) == largest
        assert torch.equal(found, torch.diag(2 * c))


def test_the_workers_share_rows_columns_and_items(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[tuple[int, int, int]]] = []
    starmap = mpgrad.Pool.starmap

    def noted(self: mpgrad.Pool, fn: Any, calls: list[Any], chunksize: int | None) -> list[Any]:
        sent.append([call[:3] for call in calls])
        return starmap(self, fn, calls, chunksize)

    monkeypatch.setattr(mpgrad.Pool, "starmap", noted)
    jacobian(torch.exp, tensor(9), pool=pool2)
    jacobian(torch.exp, [tensor(1), tensor(9)], pool=pool2)
    assert sent == [[(0, 0, 2), (0, 1, 2)], [(0, 0, 1), (1, 0, 2), (1, 1, 2)]]
    assert shares_of([0], 3) == [3]
    assert shares_of([5, 5, 5, 5], 2) == [1, 1, 1, 1]
    assert shares_of([1, 98, 1], 4) == [1, 4, 1]
    assert shares_of([0, 0], 4) == [1, 1] and shares_of([], 2) == []
    done = []

    class Noted(Jacobian):
        def __call__(self, item: int, share: int, shares: int, *own: Any) -> Any:
            found = super().__call__(item, share, shares, *own)
            done.append((item, share, [tuple(each.shape) for each in found.tensors]))
            return found

    c = tensor(3)
    for mode, count in (("reverse", 13), ("batched", 13), ("forward", 3), ("auto", 3)):
        task = Noted(lambda c: c.sum().repeat(13), Arguments((c,), None), False, False, mode, None)
        done.clear()
        for share in range(2):
            task(0, share, 2)
        assert [shapes[0][0] for _, _, shapes in done] == [count // 2, count - count // 2]


def test_basis() -> None:
    likes = [tensor(2), tensor(0), tensor(), tensor(2, 2)]
    whole = torch.eye(7, dtype=torch.float64)
    for start, stop in itertools.combinations(range(8), 2):
        blocks = [
            like.new_zeros(stop - start, *like.shape) if block is None else block
            for like, block in zip(likes, basis(likes, start, stop), strict=True)
        ]
        assert torch.equal(
            torch.cat([block.reshape(stop - start, -1) for block in blocks], 1), whole[start:stop]
        )
        for step in (1, 2, 100):
            pieces = batches(likes, start, stop, step)
            assert [row for piece in pieces for row in range(*piece)] == list(range(start, stop))
            for piece in pieces:
                assert sum(block is not None for block in basis(likes, *piece)) == 1


@pytest.mark.parametrize("mode", MODES)
def test_infinite_derivatives_stay_where_they_are(mode: str, where: mpgrad.Pool | None) -> None:
    # a cotangent or tangent of 0 would be multiplied by the infinite derivative of sqrt
    c, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for fn, args in (
        (lambda c: (c.sqrt(), c * 3), (c,)),
        (lambda a, b: a.sqrt() + b, (c, one)),
        (lambda a, b: (a.sqrt() + b).repeat(20), (c, one)),
    ):
        inputs = args if len(args) > 1 else args[0]
        for chunk_size in (None, 1):
            found = jacobian(fn, *args, mode=mode, pool=where, chunk_size=chunk_size)
            assert_equal(found, functional.jacobian(fn, inputs), exact=True)
    value: Compute = lambda a, b: a.pow(1.5).sum() + (b**2).sum()  # noqa: E731
    found = hessian(value, c, one, mode=mode, pool=where)
    assert_equal(found[1], functional.hessian(value, (c, one))[1])


# --- what other modes and levels there are


def test_forward_mode_within_forward_mode() -> None:
    x, five, v = torch.arange(1.0, 4), torch.full((3,), 5.0), torch.ones(3)
    assert_equal(jvp(lambda q: jvp(lambda y: q * y, five, v, create_graph=True)[1], x, v), (x, v))
    # here a graph need not be asked for
    assert_equal(jvp(lambda q: jvp(lambda y: q * y, five, v)[1], x, v), (x, v))
    assert_equal(torch.func.grad(lambda q: jacobian(torch.sin, q).sum())(x), -x.sin())
    assert_equal(
        jvp(lambda q: hvp(lambda y: (q * y**2).sum(), five, v, create_graph=True)[1], x, v),
        (2 * x, 2 * v),
    )
    for mode in MODES:
        assert_equal(
            jvp(lambda q: jacobian(lambda y: q * y, five, mode=mode, create_graph=True), x, v)[1],
            torch.diag(v),
        )
        inner: Compute = functools.partial(jacobian, torch.sin, mode=mode, create_graph=True)
        for outer in MODES:
            assert_equal(jacobian(lambda q: inner(q).sum(0), x, mode=outer), torch.diag(-x.sin()))
    with torch.autograd.forward_ad.dual_level():
        c = torch.autograd.forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        for mode in ("reverse", "batched"):
            found = torch.autograd.forward_ad.unpack_dual(
                jacobian(lambda q: q * c, x, mode=mode, create_graph=True)
            )
            assert_equal(found.primal.detach(), 2 * torch.eye(3))
            assert torch.equal(found.tangent, torch.eye(3))
        with pytest.raises(
            NotImplementedError, match="Nested forward mode AD is not supported at the moment"
        ):
            jacobian(lambda q: q * c, x, mode="forward")


@pytest.mark.parametrize("mode", ["auto", "batched", "reverse", "forward"])
def test_within_transforms(mode: str, where: mpgrad.Pool | None) -> None:
    x = tensor(3)
    inner: Compute = functools.partial(
        jacobian, torch.sin, mode=mode, pool=where, create_graph=True
    )
    assert_equal(torch.func.jacrev(lambda q: inner(q).sum(0))(x), torch.diag(-x.sin()))
    assert_equal(
        torch.func.vmap(inner)(torch.stack([x, x * 2])),
        torch.stack([torch.diag(x.cos()), torch.diag((x * 2).cos())]),
    )
    assert_equal(torch.func.jacfwd(lambda q: inner(q).sum(0))(x), torch.diag(-x.sin()))

    assert_equal(torch.func.jvp(lambda q: inner(q).sum(0), (x,), (x,))[1], -x.sin() * x)


@pytest.mark.parametrize("pool_of", [("process", 2), ("thread", 2), ("inline", 1)], ids=str)
def test_a_pull_function_is_refused_in_a_transform(
    pool_of: tuple[str, int], shared_pools: Callable[[str, int], mpgrad.Pool]
) -> None:
    """What it holds lost its graph on the way to a worker, so that all its gradients were zero."""
    pool = shared_pools(*pool_of)
    _, pull = torch.func.vjp(torch.sin, tensor(3))
    with pytest.raises(TypeError, match=r"of a torch\.func transform that has ended"):
        torch.func.vmap(lambda v: pool.apply(pull, (v,))[0])(torch.eye(3))
    with pytest.raises(TypeError, match=r"of a torch\.func transform that has ended"):
        torch.func.grad(lambda v: pool.apply(lambda call, v: call(v)[0], (pull, v)).sum())(
            tensor(3)
        )
    with pytest.raises(TypeError, match=r"belongs to a torch\.func transform"):
        pool.apply(pull, (tensor(3),))


DIRECTION = tensor(2, seed=1)


def square(fn: Compute) -> Compute:
    return lambda x: (fn(x) ** 2).sum()


def squares(fn: Compute) -> Compute:
    return lambda x: (fn(x) ** 2).reshape(-1)


def own_and_torch_func() -> dict[str, tuple[Compute, Compute]]:
    """Each kind of derivative, as ours and as that of torch.func: both make a function of a
    function."""
    found: dict[str, tuple[Compute, Compute]] = {
        "jvp": (
            lambda fn, pool: lambda x: jvp(squares(fn), x, DIRECTION, pool=pool)[1],
            lambda fn: lambda x: torch.func.jvp(squares(fn), (x,), (DIRECTION,))[1],
        ),
        "vjp": (
            lambda fn, pool: (
                lambda x: vjp(square(fn), x, torch.ones((), dtype=torch.float64), pool=pool)[1]
            ),
            lambda fn: torch.func.grad(square(fn)),
        ),
        "hvp": (
            lambda fn, pool: lambda x: hvp(square(fn), x, DIRECTION, pool=pool)[1],
            lambda fn: lambda x: torch.func.jvp(torch.func.grad(square(fn)), (x,), (DIRECTION,))[1],
        ),
    }
    for mode in MODES:
        ways: dict[str, Any] = {"mode": mode}
        found[f"jacobian, {mode}"] = (
            lambda fn, pool, ways=ways: lambda x: jacobian(squares(fn), x, pool=pool, **ways),
            lambda fn: torch.func.jacrev(squares(fn)),
        )
        found[f"hessian, {mode}"] = (
            lambda fn, pool, ways=ways: lambda x: hessian(square(fn), x, pool=pool, **ways),
            lambda fn: torch.func.hessian(square(fn)),
        )
    return found


KINDS = own_and_torch_func()
IN_POOLS = "jacobian, reverse", "jvp"  # one way through a graph, one by dual numbers


def curved(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.cumprod(0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("outer", "inner"), in_turn(KINDS, [*dict.fromkeys([*IN_POOLS, *KINDS])], always=2)
)
def test_a_derivative_of_a_derivative(outer: str, inner: str, pool2: mpgrad.Pool) -> None:
    """The inner one detached its result unless `create_graph` was given, so that a reverse outer
    one gave zeros."""
    x = tensor(2)
    own, of_torch = KINDS[outer]
    own_inner, of_torch_inner = KINDS[inner]
    expected = of_torch(of_torch_inner(curved))(x)
    assert_equal(own(own_inner(curved, None), None)(x), expected)
    if inner in IN_POOLS:
        assert_equal(own(own_inner(curved, None), pool2)(x), expected)
        assert_equal(own(own_inner(curved, pool2), None)(x), expected)
        task = own_inner(curved, None)
        assert_equal(own(lambda x: pool2.apply(task, (x,)), None)(x), expected)
        assert_equal(of_torch(lambda x: pool2.apply(task, (x,)))(x), expected)


def test_a_derivative_of_a_derivative_of_a_derivative(where: mpgrad.Pool | None) -> None:
    x = tensor(2)
    for mode in MODES:
        once = functools.partial(jacobian, curved, mode=mode)
        twice = functools.partial(jacobian, once, mode=mode)
        expected = torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(curved)))(x)
        assert_equal(jacobian(twice, x, mode=mode, pool=where), expected)


@pytest.mark.parametrize("mode", ["reverse", "batched"])
def test_a_derivative_of_the_gradients_of_items(mode: str, pool2: mpgrad.Pool) -> None:
    def gradients(x: torch.Tensor) -> torch.Tensor:
        items = [x[:2] * 1, x[1:] * 1]
        results = pool2.map(lambda each: (each.sin() ** 2).sum(), items)
        return torch.cat([grad * 3 for grad in mpgrad.per_item_grad(results, items)])

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [
                torch.func.grad(lambda each: (each.sin() ** 2).sum())(each) * 3
                for each in (x[:2], x[1:])
            ]
        )

    x = tensor(3)
    assert_equal(jacobian(gradients, x, mode=mode), torch.func.jacrev(of_torch)(x))


def test_an_inner_derivative_under_no_grad_is_a_constant(where: mpgrad.Pool | None) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            slope = jacobian(torch.sin, x).diagonal()
        return slope * x

    x = tensor(3)
    assert_equal(jacobian(fn, x, mode="reverse", pool=where), torch.diag(x.cos()))


@pytest.mark.parametrize("pool_of", [("process", 2), ("thread", 2), ("inline", 1)], ids=str)
def test_forward_mode_around_a_call_that_uses_it(
    pool_of: tuple[str, int], shared_pools: Callable[[str, int], mpgrad.Pool]
) -> None:
    """Workers opened a level of dual numbers for the outer one, and PyTorch refuses to open another
    one for the inner one."""
    pool, x, v = shared_pools(*pool_of), tensor(2), DIRECTION

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(curved, (x,), (v,))[1]

    for outer in (
        lambda fn: torch.func.jvp(fn, (x,), (v,)),
        lambda fn: torch.func.jvp(lambda y: torch.func.jvp(fn, (y,), (v,))[1], (x,), (v,)),
        lambda fn: torch.func.jacfwd(torch.func.jacrev(fn))(x),
        lambda fn: torch.func.vmap(torch.func.jacfwd(fn))(torch.stack([x, v])),
    ):
        assert_equal(outer(lambda x: pool.apply(inner, (x,))), outer(inner))


def test_what_is_computed_under_no_grad_has_no_derivative(where: mpgrad.Pool | None) -> None:
    """PyTorch's forward mode would follow it, and the way that is taken depends on sizes."""

    def fn(q: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = q**2
        return (q - constant).repeat(5)

    def value(q: torch.Tensor) -> torch.Tensor:
        return (fn(q) ** 2).sum()

    x, v = tensor(3), torch.ones(3, dtype=torch.float64)
    with pytest.warns(
        UserWarning, match=r"forward mode follows what is computed under torch\.no_grad"
    ):
        assert_equal(jacobian(fn, x, pool=where), functional.jacobian(fn, x))
        assert_equal(jvp(fn, x, v, pool=where), functional.jvp(fn, x, v))
        assert_equal(hvp(value, x, v, pool=where), functional.hvp(value, x, v))
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"):
        jacobian(fn, x, mode="forward", pool=where)


@pytest.mark.parametrize("mode", MODES)
def test_odd_tensors_as_arguments(mode: str, where: mpgrad.Pool | None) -> None:
    with torch.inference_mode():
        inference = tensor(3)
    for x in (inference, tensor(5).unfold(0, 3, 1), tensor().expand(3), tensor(3, 4).t()[1:]):
        plain = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x).clone()
        v = tensor(*x.shape, seed=1)
        assert_equal(
            jacobian(torch.square, x, mode=mode, pool=where),
            functional.jacobian(torch.square, plain),
        )
        assert_equal(jvp(torch.square, x, v, pool=where), (plain**2, 2 * plain * v))
        assert_equal(hvp(lambda x: (x**3).sum(), x, v, pool=where)[1], 6 * plain * v)


def test_random_numbers_in_a_backward(where: mpgrad.Pool | None) -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.rand(3)

    found = []
    for mode, chunk_size in (("reverse", None), ("batched", None), ("batched", 1)):
        torch.manual_seed(0)
        found.append(jacobian(Noisy, torch.ones(3), mode=mode, chunk_size=chunk_size, pool=where))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("mode", MODES)
def test_results_share_no_memory(mode: str, where: mpgrad.Pool | None) -> None:
    x = tensor(3)
    for found in (
        jacobian(torch.add, x, x, mode=mode, pool=where),
        jacobian(lambda a: (a, a), x, mode=mode, pool=where),
        vjp(torch.add, (x, x), x, pool=where)[1],
    ):
        before = found[1].clone()
        found[0].add_(1)
        assert torch.equal(found[1], before)


def test_some_columns_cannot_be_had(where: mpgrad.Pool | None) -> None:
    class Half(NoBatches):
        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            if tangent[-1].item():
                raise RuntimeError("not this one")
            return tangent * ctx.saved_tensors[0].cos()

    x = tensor(4)
    with pytest.warns(UserWarning, match="not this one|Half"):
        found = jacobian(lambda q: Half.apply(q).repeat(10), [x, x], pool=where)
        one = jacobian(lambda q: Half.apply(q).repeat(10), x, pool=where)
    for each in (*found, one):
        assert_equal(each, torch.diag(x.cos()).repeat(10, 1))


def test_forward_mode_in_a_thread_that_the_caller_waits_for(
    shared_pools: Callable[[str, int], mpgrad.Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpgrad.tasks.jacobians, "PATIENCE", 0.2)
    x = tensor(3)
    threads = shared_pools("thread", 2)
    with pytest.raises(
        RuntimeError,
        match=r"another thread has been in forward mode for 0\.2 s, perhaps waiting for",
    ):
        jacobian(
            lambda q: (
                sum(threads.map(lambda t: jacobian(torch.sin, t, mode="forward").sum(0), [x, x]))
                * q
            ),
            x,
            mode="forward",
        )


# --- wrong arguments


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: jacobian(3, c), TypeError, r"the function must be callable \(given: 3\)"),
        (
            lambda c: jacobian(torch.sin, c, mode="fast"),
            ValueError,
            r"mode must be one of 'auto', .* \(mode: 'fast'\)",
        ),
        (
            lambda c: jacobian(torch.sin, c, chunk_size=0),
            ValueError,
            r"chunk_size must be at least 1 \(chunk_size: 0\)",
        ),
        (
            lambda c: jacobian(torch.sin, c, argnums=1),
            ValueError,
            r"some of the 1 arguments, from 0 \(argnums: 1\)",
        ),
        (lambda c: jacobian(torch.sin, c, argnums=()), ValueError, r"\(argnums: \(\)\)"),
        (
            lambda c: jacobian(torch.mul, c, c, argnums=(0, -2)),
            ValueError,
            r"each argument once \(argnums: \(0, -2\)\)",
        ),
        (
            lambda c: jacobian(torch.sin, c, argnums=True),
            TypeError,
            r"argnums must be an integer, .*True",
        ),
        (lambda c: jacobian(torch.sin), ValueError, "some of the 0 arguments"),
        (
            lambda c: jacobian(torch.mul, [c, c], [c]),
            ValueError,
            r"one entry for each item.*lengths: \[1, 2\]",
        ),
        (
            lambda c: jacobian(torch.mul, c, 3),
            TypeError,
            "argument 1 must be a floating point tensor .given: int.; leave",
        ),
        (
            lambda c: jacobian(torch.sin, c.long()),
            TypeError,
            r"argument 0 must be floating point .*torch.int64",
        ),
        (
            lambda c: jacobian(torch.sin, [c, c.to(torch.complex64)]),
            TypeError,
            r"argument 0 must be real .*complex64.*as_real",
        ),
        (
            lambda c: jacobian(torch.argsort, c),
            TypeError,
            r"the output must be floating point to have .*torch.int64",
        ),
        (
            lambda c: jacobian(lambda c: (c, 3), c),
            TypeError,
            r"the output\[1\] must be a floating point tensor \(given: int\)",
        ),
        (
            lambda c: jacobian(lambda c: torch.complex(c, c), c),
            TypeError,
            r"the output must be real .*complex128",
        ),
        (
            lambda c: hessian(torch.sin, c),
            ValueError,
            r"the function must return one value \(output shape: \(3,\)\)",
        ),
        (
            lambda c: hvp(torch.sin, c, c),
            ValueError,
            r"the function must return one value \(output shape: \(3,\)\)",
        ),
        (
            lambda c: jvp(torch.sin, c, c[:2]),
            ValueError,
            r"tangents must be .* of shape \(3,\) .*\(2,\)",
        ),
        (
            lambda c: jvp(torch.mul, (c, c), c),
            ValueError,
            r"tangents must have the structure of the arguments, \(\*, \*\) \(given: \*\)",
        ),
        (
            lambda c: vjp(torch.sin, c, c[:2]),
            ValueError,
            r"cotangents must be a torch.float64 tensor of shape \(3,\)",
        ),
        (
            lambda c: vjp(torch.sin, c, (c, c)),
            ValueError,
            r"cotangents must have the structure of the output, \* \(given: \(\*, \*\)\)",
        ),
        (lambda c: hvp(torch.sum, c, 1.0), ValueError, r"vectors must be .* \(given: a float\)"),
        (
            lambda c: jacobian(torch.sin, c, pool=3),
            TypeError,
            r"pool must be an mpgrad.Pool, or None \(pool: 3\)",
        ),
        (lambda c: jacobian(torch.sin, c, mode=["auto"]), ValueError, r"mode must be one of"),
        (
            lambda c: hvp(torch.sum, c, c.float()),
            ValueError,
            r"vectors must be .* \(given: a torch.float32",
        ),
    ],
)
def test_wrong_arguments(call: Compute, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(tensor(3))
