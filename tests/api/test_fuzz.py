"""Random programs and random backwards: the pool against the serial loop, for the cases that nobody
thinks of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import mpgrad

pytestmark = pytest.mark.slow

Loop = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
Tensor = torch.Tensor
EXAMPLES = 40


class Pair(NamedTuple):
    a: Any
    b: Any


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * x, x.sum()

    @staticmethod
    def backward(ctx: Any, of_square: Tensor, of_sum: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * of_square + of_sum


def written(t: Tensor, u: Tensor) -> Tensor:
    copy = t.reshape(-1).clone()  # no view of the clone: writes to views meet bugs of torch.func
    copy[:1] = u.sum()
    return copy.mul_(u.mean())


def own_gradient(t: Tensor, u: Tensor) -> Tensor:
    with torch.enable_grad():
        own = t.detach().requires_grad_()
        return torch.autograd.grad((own**3).sum(), own)[0] * u.sum()


def constant(t: Tensor, u: Tensor) -> Tensor:
    with torch.no_grad():
        return t * u.sum()


SMOOTH: list[Callable[[Tensor, Tensor], Tensor]] = [  # of any shapes, and also under torch.func
    lambda t, u: t.sin(),
    lambda t, u: t * u.sum(),
    lambda t, u: (t.detach() + 1) * u.mean(),
    lambda t, u: torch.stack([t, t.tanh()]),
    lambda t, u: torch.cat([t.reshape(-1), u.reshape(-1)])[-4:],
    lambda t, u: t.reshape(-1, 1) @ u.reshape(1, -1)[:, :3],
    lambda t, u: torch.where(t.detach() > 0, t, u.sum()),
    lambda t, u: t.unsqueeze(0).transpose(0, -1) * 2,
    lambda t, u: torch.view_as_real(
        torch.complex(t, t.cos()) * torch.complex(u.sum(), t.detach())
    ).prod(-1),
    lambda t, u: t.reshape(-1).unfold(0, 1, 1).cumsum(0),
]
ORDINARY = [
    *SMOOTH,
    written,
    constant,
    own_gradient,
    lambda t, u: Square.apply(t)[0] + Square.apply(u)[1],
    lambda t, u: (
        torch.autograd.grad((t**2).sum(), t, create_graph=True)[0] if t.requires_grad else t
    ),
    lambda t, u: checkpoint(lambda a: a.tanh() * a, t, use_reentrant=False),
]
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
    # under grad(vmap(grad(...))) torch 2.15 refuses to write into a slice ("Cannot access storage
    # of TensorWrapper")
    SMOOTH.append(written)


class Program:
    """A random composition of operations, the same for the same seed."""

    def __init__(self, seed: int, operations: list[Callable[[Tensor, Tensor], Tensor]]) -> None:
        self.seed = seed
        self.operations = operations

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        choose = random.Random(self.seed)
        made = list(tensors)
        for _ in range(choose.randrange(1, 6)):
            made.append(choose.choice(self.operations)(choose.choice(made), choose.choice(made)))
        first, second = made[-1].clone(), made[-2].clone()
        return choose.choice(
            [
                first,
                (first, second),
                {"a": first, "n": 3, "b": [second, None]},
                Pair(first, "s"),
                [second],
            ]
        )


def tensors_in(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def backwards(seed: int, loop: Loop) -> list[Any]:
    """One or two maps on shared leaves, and a backward of a random kind; gradients of a sum of
    everything come last."""
    choose = random.Random(seed)
    leaves = [numbers(choose.choice([(), (3,), (2, 3), (0,), (1, 4)]), seed + k) for k in range(3)]
    inputs = [each.requires_grad_() for each in leaves[: choose.randrange(1, 4)]]
    pick: list[Callable[[Tensor], Tensor]] = [
        torch.clone,
        torch.detach,
        lambda t: t,
        lambda t: t.T if t.dim() > 1 else t * 2,
    ]

    def some(count: int) -> list[Tensor]:
        return [choose.choice(pick)(choose.choice(leaves)) for _ in range(count)]

    items, captures = (
        [some(choose.randrange(1, 4)) for _ in range(choose.randrange(1, 5))],
        some(choose.randrange(3)),
    )
    program, second = Program(seed, ORDINARY), Program(seed + 1, ORDINARY)
    results = loop(lambda item: program([*item, *captures]), items)
    found: list[Any] = [each.detach().clone() for each in tensors_in(results)]
    if choose.random() < 0.4:
        results = loop(lambda value: second(tensors_in(value)), results)
    outputs = [each for each in tensors_in(results) if each.requires_grad and choose.random() < 0.8]
    if not outputs:
        return found
    if choose.random() < 0.3:
        # None: for one of several outputs of a node
        outputs[0].register_hook(lambda grad: grad if grad is None else grad * 2)
    kind = choose.randrange(4)
    weights = [numbers(tuple(each.shape), 5).requires_grad_(kind == 3) for each in outputs]
    if kind == 0:
        torch.autograd.backward(outputs, weights, retain_graph=True)
        torch.autograd.backward(outputs[:1], weights[:1])
        return [*found, *[each.grad for each in inputs]]
    if kind == 1:
        some_inputs = choose.sample(inputs, 1)
        found += torch.autograd.grad(
            outputs, some_inputs, weights, allow_unused=True, retain_graph=True
        )
        return [*found, *torch.autograd.grad(outputs, inputs, weights, allow_unused=True)]
    if kind == 2:
        batches = [torch.stack([each, each * 2]) for each in weights]
        return [
            *found,
            *torch.autograd.grad(
                outputs, inputs, batches, allow_unused=True, is_grads_batched=True
            ),
        ]
    grads: Sequence[Tensor | None] = outputs
    for _ in range(choose.randrange(2, 4)):
        total = sum(
            (each * each).sum() for each in grads if each is not None and each.requires_grad
        )
        if not isinstance(total, Tensor):
            break
        grads = torch.autograd.grad(
            total, [*inputs, *weights], allow_unused=True, create_graph=True
        )
        found += grads
    both = [
        (each * each).sum()
        for each in (*outputs, *grads)
        if each is not None and each.requires_grad
    ]
    # a loss and a penalty, in one pass
    return [*found, *torch.autograd.grad(both, [*inputs, *weights], allow_unused=True)]


def transforms(seed: int, loop: Loop) -> list[Any]:
    choose = random.Random(seed)
    program, other = Program(seed, SMOOTH), numbers((3,), seed).requires_grad_()

    def vector(x: Tensor) -> Tensor:
        results = loop(
            lambda item: program([item[0], item[0] * x, other]),
            [(x, 1), (x * 2, "s"), (other, None)],
        )
        return torch.cat([each.reshape(-1)[:3] for each in tensors_in(results)])

    def scalar(x: Tensor) -> Tensor:
        return (vector(x).sin() if seed % 2 else vector(x)).sum()

    x = numbers((3,), seed + 1)
    kinds: list[Callable[[], Any]] = [
        lambda: grad(scalar)(x),
        lambda: jvp(vector, (x,), (x.cos(),)),
        lambda: jacrev(vector)(x),
        lambda: jacfwd(vector)(x),
        lambda: hessian(scalar)(x),
        lambda: vmap(vector, in_dims=1)(numbers((3, 4), seed)),
        lambda: vmap(grad(scalar))(numbers((4, 3), seed)),
        lambda: jacfwd(lambda y: grad(lambda z: jvp(scalar, (z * y,), (y,))[1])(x))(x),
    ]
    found = tensors_in(choose.choice(kinds)())
    total = sum(each.sum() for each in found) + 0 * other.sum()
    return [each.detach() + 0 for each in (*found, *torch.autograd.grad(total, other))]


def outcome(
    case: Callable[[int, Loop], list[Any]], seed: int, loop: Loop
) -> list[Any] | type[Exception]:
    try:
        return case(seed, loop)
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [backwards, transforms], ids=lambda case: case.__name__)
@pytest.mark.parametrize("engine", [("process", 2), ("inline", 1)], ids=lambda engine: engine[0])
def test_random_programs(
    shared_pools: Callable[[str, int], mpgrad.Pool],
    engine: tuple[str, int],
    case: Callable[[int, Loop], list[Any]],
) -> None:
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 10**9))
    def agrees(seed: int) -> None:
        expected = outcome(case, seed, lambda fn, items: [fn(item) for item in items])
        found = outcome(case, seed, shared_pools(*engine).map)
        if isinstance(expected, type) or isinstance(found, type):
            assert found is expected
            return
        assert len(found) == len(expected)
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert (ours is None) == (theirs is None), place
            if theirs is not None:
                assert (ours.shape, ours.dtype, ours.requires_grad) == (
                    theirs.shape,
                    theirs.dtype,
                    theirs.requires_grad,
                ), place
                assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True), place

    agrees()
