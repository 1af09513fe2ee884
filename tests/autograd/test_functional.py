"""Pool calls inside `torch.func` transforms and on dual tensors, against the same transforms of the
serial loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import mpgrad
import mpgrad.derivatives
from mpgrad.torch_state import private

pytestmark = pytest.mark.quick

Loop = Callable[..., list[Any]]  # the pool's map, or the serial loop


def serial(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [fn(item) for item in items]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


W = numbers(3, seed=7)


def vector(loop: Loop) -> Callable[[torch.Tensor], torch.Tensor]:
    """A vector of 3 in, 4 out; the function captures `x` as well as taking parts of it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        a, b, count = loop(
            lambda t: (t[0] * x * W).sin() if t[1] else t[0].sum().exp() * x,
            [(x**2, 1), (x, 0), (W, 1)],
        )
        return torch.cat([a + b, count[:1] * x.prod()])

    return fn


def scalar(loop: Loop) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: vector(loop)(x).pow(2).sum()


def flat(value: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(value)


TRANSFORMS: dict[str, Callable[[Loop], Any]] = {
    "grad": lambda loop: grad(scalar(loop))(numbers(3)),
    "grad of grad": lambda loop: grad(lambda x: grad(scalar(loop))(x).pow(2).sum())(numbers(3)),
    "vjp": lambda loop: vjp(vector(loop), numbers(3))[1](numbers(4, seed=1)),
    "vjp's value": lambda loop: vjp(vector(loop), numbers(3))[0],
    "jvp": lambda loop: jvp(vector(loop), (numbers(3),), (numbers(3, seed=2),)),
    "jvp of jvp": lambda loop: jvp(
        lambda x: jvp(vector(loop), (x,), (numbers(3, seed=2),))[1],
        (numbers(3),),
        (numbers(3, seed=3),),
    ),
    "jacrev": lambda loop: jacrev(vector(loop))(numbers(3)),
    "jacfwd": lambda loop: jacfwd(vector(loop))(numbers(3)),
    "hessian": lambda loop: hessian(scalar(loop))(numbers(3)),
    "jacrev of jacrev": lambda loop: jacrev(jacrev(scalar(loop)))(numbers(3)),
    "vmap": lambda loop: vmap(vector(loop))(numbers(5, 3)),
    "vmap of vmap": lambda loop: vmap(vmap(vector(loop)), in_dims=1)(numbers(5, 2, 3)),
    "vmap of grad": lambda loop: vmap(grad(scalar(loop)))(numbers(5, 3)),
    "grad of vmap": lambda loop: grad(lambda x: vmap(vector(loop))(x).sum())(numbers(5, 3)),
    "vmap, some items": lambda loop: vmap(lambda x: tuple(loop(lambda t: t * 2, [x, W])))(
        numbers(5, 3)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform(pool: mpgrad.Pool, name: str) -> None:
    ours, theirs = flat(TRANSFORMS[name](pool.map)), flat(TRANSFORMS[name](serial))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "transform", [grad, jacrev, jacfwd, hessian], ids=lambda transform: transform.__name__
)
def test_reductions(pool2: mpgrad.Pool, transform: Callable[..., Any]) -> None:
    def by_pool(x: torch.Tensor) -> torch.Tensor:
        total = pool2.map_reduce(lambda t: t**2 * W, [x, x * 2, W], "sum")
        folded = pool2.reduce(lambda target, item: target.mul_(item + 1), [x, W], [x * 1, W * x])
        return (
            (total * folded[0] * folded[1]).sum()
            + pool2.apply(torch.prod, (x,))
            + pool2.starmap(torch.dot, [(x, W)])[0]
        )

    def by_loop(x: torch.Tensor) -> torch.Tensor:
        total = x**2 * W + (x * 2) ** 2 * W + W**2 * W
        return (
            (total * (x * (x + 1) * (W + 1)) * (W * x * (x + 1) * (W + 1))).sum()
            + x.prod()
            + torch.dot(x, W)
        )

    ours, theirs = transform(by_pool)(numbers(3)), transform(by_loop)(numbers(3))
    assert torch.allclose(ours, theirs, rtol=1e-10)


def test_functional_call(pool: mpgrad.Pool) -> None:
    class Net(torch.nn.Module):
        def __init__(self, loop: Loop) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
            ).double()
            self.loop = [loop]

        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([y.sum().view(1) for y in self.loop[0](self.inner, xs)])

    items = [numbers(n, 3, seed=n) for n in (1, 4, 2)]
    torch.manual_seed(0)
    parameters = {name: parameter.detach() for name, parameter in Net(serial).named_parameters()}
    found = []
    for loop in (pool.map, serial):
        net = Net(loop)
        loss = lambda parameters, net=net: functional_call(net, parameters, (items,)).pow(2).sum()  # noqa: E731
        found.append(grad(loss)(parameters))
        rows = jacrev(lambda parameters, net=net: functional_call(net, parameters, (items,)))(
            parameters
        )
        found[-1] |= {f"rows of {name}": row for name, row in rows.items()}
    for name in found[0]:
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-12, atol=1e-14), name


def test_dual_tensors(pool: mpgrad.Pool) -> None:
    found = []
    for loop in (pool.map, serial):
        weight = numbers(3, seed=5).requires_grad_()
        with forward_ad.dual_level():
            x = forward_ad.make_dual(numbers(3), numbers(3, seed=2))
            y = vector(loop)(x * weight)
            primal, tangent = forward_ad.unpack_dual(y)
            plain = loop(lambda t: t * 2, [numbers(2)])[0]
            assert forward_ad.unpack_dual(plain).tangent is None
        of_primal = torch.autograd.grad(primal.sum(), weight, retain_graph=True)
        found.append([primal, tangent, *of_primal, *torch.autograd.grad(tangent.sum(), weight)])
        with forward_ad.dual_level():  # forward over reverse
            x = forward_ad.make_dual(numbers(3).requires_grad_(), numbers(3, seed=2))
            (gradient,) = torch.autograd.grad(vector(loop)(x).pow(2).sum(), x)
            found[-1].append(forward_ad.unpack_dual(gradient).tangent)
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_threads_share_the_level_of_dual_tensors() -> None:
    """Symptom: "a forward AD level with an invalid index", seldom. Cause: a thread closed the level
    that another one used."""

    def first() -> None:
        with private.within_dual_level():
            both.wait()
            inside.wait()

    both, inside = threading.Barrier(2, timeout=10), threading.Barrier(2, timeout=10)
    thread = threading.Thread(target=first)
    thread.start()
    both.wait()
    with private.within_dual_level():
        dual = forward_ad.make_dual(numbers(3), numbers(3, seed=2))
        inside.wait()
        thread.join()
        assert forward_ad.unpack_dual(dual * 2).tangent is not None
    assert not private.dual_level_is_active()


def test_the_level_stays_in_the_backward_of_tangents(tmp_path: Path) -> None:
    """Symptom: as above. Cause: another thread could close the level while this one took out what
    its graph had saved."""

    def noted(t: torch.Tensor) -> torch.Tensor:
        y = t.sin()
        y.register_hook(lambda _: (tmp_path / f"{private.dual_level_is_active()}").touch())
        return y * t

    weight = numbers(3, seed=5).requires_grad_()
    with mpgrad.Pool(1, engine="thread") as pool:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(numbers(3), numbers(3, seed=2))
            (y,) = pool.map(noted, [x * weight])
            tangent = forward_ad.unpack_dual(y).tangent
        torch.autograd.grad(tangent.sum(), weight)
    assert [path.name for path in tmp_path.iterdir()] == ["True"]
    assert not private.dual_level_is_active()


def test_a_function_with_its_own_jvp(pool2: mpgrad.Pool) -> None:
    """Of the old kind, without `setup_context`, which torch.func would refuse, but dual tensors do
    not."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_forward(x)
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return tangent * x * 2 + 1000  # so that nothing else could have made it

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * x * 2

    with forward_ad.dual_level():
        x = forward_ad.make_dual(numbers(3), numbers(3, seed=2))
        tangents = [
            forward_ad.unpack_dual(loop(Square.apply, [x])[0]).tangent
            for loop in (pool2.map, serial)
        ]
    assert torch.equal(*tangents)


def test_structures_and_other_results(pool2: mpgrad.Pool) -> None:
    def fn(item: dict[str, Any]) -> dict[str, Any]:
        return {
            "y": item["x"] ** 2,
            "count": item["x"].numel(),
            "index": torch.argmax(item["x"]),
            "name": item["name"],
        }

    def value(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        a, b = loop(fn, [{"x": x, "name": "a"}, {"x": x * 2, "name": "b"}])
        assert (a["count"], b["name"]) == (3, "b")
        return (a["y"] * b["y"]).sum(), [a["index"], b["index"]]

    ours, theirs = (
        grad(lambda x, loop=loop: value(loop, x), has_aux=True)(numbers(3))
        for loop in (pool2.map, serial)
    )
    assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]


def test_nothing_but_numbers_comes_back(pool2: mpgrad.Pool) -> None:
    shapes = vmap(lambda x: x * pool2.map(lambda t: t.dim(), [x])[0])(torch.ones(2, 3))
    assert torch.equal(shapes, torch.ones(2, 3))


def test_random_numbers_are_the_same_in_every_run(pool2: mpgrad.Pool) -> None:
    """A derivative runs the function again, and has to meet the same mask."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            pool2.map(lambda t: torch.nn.functional.dropout(t, 0.5) * t, [x, x * 2])
        ).sum()

    x = numbers(50)
    torch.manual_seed(3)
    value, pull_back = vjp(fn, x)
    (gradient,) = pull_back(torch.ones((), dtype=torch.float64))
    # it is homogeneous, of degree 2
    assert torch.allclose((gradient * x).sum(), 2 * value, rtol=1e-12)
    torch.manual_seed(3)
    assert torch.allclose(jvp(fn, (x,), (x,))[1], 2 * value, rtol=1e-12)

    def second(x: torch.Tensor) -> torch.Tensor:
        return pool2.map(lambda t: torch.nn.functional.dropout(t, 0.5) * t, [x, x * 2, x.detach()])[
            1
        ].sum()

    value, pull_back = vjp(second, x)  # a derivative of one item of several
    assert torch.allclose((pull_back(torch.ones_like(value))[0] * x).sum(), 2 * value, rtol=1e-12)


def test_transforms_around_plain_tensors_change_nothing(pool2: mpgrad.Pool) -> None:
    """The pool call follows nothing here, so its graph is kept, and captures get their gradients as
    always."""
    weight = numbers(3, seed=5).requires_grad_()
    results = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        results.extend(pool2.map(lambda t: t * weight, [W]))
        results.extend(pool2.imap(lambda t: t * weight, [W]))
        results.append(pool2.submit(lambda t: t * weight, W).result())
        return x.sum()

    grad(fn)(numbers(2))
    sum(r.sum() for r in results).backward()
    assert torch.equal(weight.grad, 3 * W)


@pytest.mark.parametrize(
    "way", ["submit", "imap", "map_async", "imap_unordered", "apply_async", "starmap_async"]
)
def test_asynchronous_calls_are_refused_by_name(pool2: mpgrad.Pool, way: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        arguments = {"submit": x, "apply_async": (x,), "starmap_async": [(x,)]}.get(way, [x])
        result = getattr(pool2, way)(torch.neg, arguments)
        return next(result) if way.startswith("imap") else x

    with pytest.raises(
        TypeError, match=r"torch\.func transform.*use map, starmap, apply, reduce or map_reduce"
    ):
        vmap(call)(numbers(2, 3))
    with (
        forward_ad.dual_level(),
        pytest.raises(TypeError, match=r"tangent.*use map, starmap, apply, reduce or map_reduce"),
    ):
        call(forward_ad.make_dual(numbers(3), numbers(3)))


def test_errors_name_the_item(pool2: mpgrad.Pool) -> None:
    def fn(t: torch.Tensor) -> torch.Tensor:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no") as caught:
        grad(lambda x: pool2.map(fn, [x])[0].sum())(numbers(2))
    assert "item 0" in caught.value.__notes__[0]


SPAN = torch.arange(3, dtype=torch.float64)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def test_an_ordinary_backward_through_a_transform(pool2: mpgrad.Pool) -> None:
    """Symptom: zero gradients. Cause: a vjp inside a vjp made its gradients connected only where
    its own inputs needed them, and not where the captures did."""
    found = []
    for loop in (pool2.map, serial):
        x, c = leaf(3).detach(), leaf(3, seed=1)
        torch.func.grad(lambda x, loop=loop, c=c: loop(lambda t: (t * c).sin().sum(), [x])[0])(
            x
        ).sum().backward()
        found.append(c.grad)
    assert torch.equal(*found)


def test_rows_of_a_jacobian_meet_the_mask_of_the_forward(pool2: mpgrad.Pool) -> None:
    """Symptom: an error, or one mask per row. Cause: the vmap over rows took the function's random
    numbers for its own."""
    x = leaf(8).detach()
    y, pull_back = torch.func.vjp(
        lambda x: pool2.map(lambda t: torch.nn.functional.dropout(t, 0.5) * t, [x])[0], x
    )
    for randomness in ("error", "same", "different"):
        (rows,) = torch.func.vmap(pull_back, randomness=randomness)(
            torch.eye(8, dtype=torch.float64)
        )
        assert torch.allclose(rows.diagonal() * x, 2 * y)


def test_noise_under_a_vmap_on_an_item_that_is_not_batched(pool2: mpgrad.Pool) -> None:
    """Symptom: the same noise in all rows, or none where it is forbidden. Cause: items without a
    batch left the vmap."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return pool2.map(lambda t: t + torch.rand(3), [torch.ones(3), x])[0] + 0 * x

    rows = torch.func.vmap(fn, randomness="different")(torch.zeros(4, 3))
    assert not torch.equal(rows[0], rows[1])
    with pytest.raises(
        RuntimeError, match="called random operation while in randomness error mode"
    ):
        torch.func.vmap(fn)(torch.zeros(4, 3))


def test_a_tangent_on_a_gradient_is_not_lost_silently(pool2: mpgrad.Pool) -> None:
    """Symptom: no tangent, no error. Cause: gradients travel without their tangents."""
    (y,) = pool2.map(torch.exp, [x := leaf(3)])
    with torch.autograd.forward_ad.dual_level():
        weights = torch.autograd.forward_ad.make_dual(torch.ones_like(x), torch.ones_like(x))
        with pytest.raises(
            TypeError,
            match=r"a gradient that came to a pool's result has a tangent.*torch\.func\.jvp",
        ):
            torch.autograd.grad(y, x, weights.detach() + weights)


def test_a_gradient_inside_a_function_under_a_transform(pool2: mpgrad.Pool) -> None:
    """Symptom: "does not require grad". Cause: the function saw plain tensors where a transform's
    tensors require grad."""

    def force(t: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((t**3).sum(), t, create_graph=True)[0]

    x = leaf(2).detach()
    for transform in (torch.func.grad, torch.func.hessian):
        ours, theirs = (
            transform(lambda x, loop=loop: loop(force, [x])[0].sum())(x)
            for loop in (pool2.map, serial)
        )
        assert torch.equal(ours, theirs)


def test_a_backward_after_the_autocast_region(pool2: mpgrad.Pool) -> None:
    """Symptom: gradients in bfloat16. Cause: a derivative ran wholly under the modes of the
    forward."""

    def loss(loop: Any, x: torch.Tensor) -> torch.Tensor:
        def fn(t: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return t @ weight

        with torch.autocast("cpu", torch.bfloat16):
            return loop(fn, [x])[0].sum()

    x, weight = leaf(2, 2).float().detach(), leaf(2, 2, seed=1).float().detach()
    ours, theirs = (
        torch.func.grad(lambda x, loop=loop: loss(loop, x))(x) for loop in (pool2.map, serial)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated, and still there
def test_tracers_are_refused(pool2: mpgrad.Pool) -> None:
    """Symptom: the traced function returned its first result for ever. Cause: a tracer sees none of
    a worker's operations."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return pool2.map(lambda t: t * 2, [x])[0] + x

    with pytest.raises(RuntimeError, match=r"a pool call cannot be traced.*by: torch\.jit\.trace"):
        torch.jit.trace(fn, (torch.ones(2),), check_trace=False)
    with pytest.raises(RuntimeError, match=r"a pool call cannot be traced.*torch\.func\.linearize"):
        torch.func.linearize(fn, torch.ones(2))


def test_a_plain_call_inside_a_transform_inline(shared_pools: Any) -> None:
    """Symptom: "belongs to a torch.func transform". Cause: the task ran in the caller's thread,
    under its transform."""
    pool, w = shared_pools("inline", 1), leaf(2).detach()
    assert torch.equal(
        torch.func.grad(lambda x: (pool.map(lambda t: t * 2, [w])[0] * x).sum())(w), 2 * w
    )


@pytest.mark.parametrize(
    "expanded", [lambda t: t.sum() * SPAN, lambda t: torch.where(SPAN > 0.5, SPAN, t.sum())]
)
def test_hessian_of_a_function_with_an_expanded_gradient(pool2: mpgrad.Pool, expanded: Any) -> None:
    """Symptom: "more than one element of the written-to tensor refers to a single memory location".
    Cause: a gradient came from the worker expanded, as it was made; forward mode gives tangents the
    strides of their values, and writes them there."""
    found = torch.func.hessian(lambda x: pool2.map(expanded, [x])[0].sum())(SPAN * 2)
    assert torch.equal(found, torch.func.hessian(lambda x: expanded(x).sum())(SPAN * 2))


def test_forward_mode_around_a_pool_whose_task_turns_gradients_off(pool: mpgrad.Pool) -> None:
    """Symptom: the derivative followed what `no_grad` hides, or not, depending on the output's
    size. Cause: what refuses that in the caller is a function mode of its thread, which no worker
    has."""

    def fn(c: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = c.sum()
        return torch.cat([c * constant] * 10)

    c, expected = torch.tensor([2.0]), torch.full((10, 1), 2.0)
    mpgrad.derivatives.SAID.clear()
    with pytest.warns(
        UserWarning, match=r"forward mode follows what is computed under torch\.no_grad"
    ):
        assert torch.equal(mpgrad.jacobian(lambda c: pool.map(fn, [c])[0], c), expected)
        assert torch.equal(
            mpgrad.jvp(lambda c: pool.map(fn, [c])[0], c, torch.ones(1))[1], expected[:, 0]
        )
