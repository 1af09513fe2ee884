"""Derivatives of functions of structures of tensors, and what comes beside the output: the same as
torch.func gives.

PyTorch's own tests of torch.func and torch.autograd.functional are not installed with it. The cases
here are those of their subjects: argnums, chunks, empty outputs, strides, constants, writes into
arguments, numbers of dimensions, dtypes.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import in_turn
from torch.autograd import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import mpgrad
from mpgrad import hessian, hvp, jacobian, jvp, per_item_grad, vjp

pytestmark = pytest.mark.quick

MODES = ["auto", "batched", "forward", "reverse"]
Compute = Callable[..., Any]


@pytest.fixture(
    params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["here", "in a pool"]
)
def where(request: pytest.FixtureRequest, pool2: mpgrad.Pool) -> mpgrad.Pool | None:
    return pool2 if request.param else None


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Any, expected: Any, exact: bool = False, graph: bool = False) -> None:
    """One structure, of the same types, and the same numbers. `graph`: it may have one."""
    leaves, spec = tree_flatten(found)
    others, other_spec = tree_flatten(expected)
    assert spec == other_spec
    for each, other in zip(leaves, others, strict=True):
        assert (each.shape, each.dtype) == (other.shape, other.dtype)
        assert graph or not each.requires_grad
        tolerance = 0 if exact else {torch.float32: 1e-5}.get(each.dtype, 1e-11)
        torch.testing.assert_close(each, other, rtol=tolerance, atol=tolerance)


class Pair(NamedTuple):
    left: Any
    right: Any


A, B, S = tensor(2, 3), tensor(3, seed=1), tensor(seed=2)
PARAMETERS = {"w": A, "rest": {"b": B, "scale": S}}
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()


def layer(p: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    return (p["w"] @ (x * p["rest"]["b"])).tanh() * p["rest"]["scale"]


# a function, its arguments, and argnums
CASES: dict[str, tuple[Compute, tuple[Any, ...], int | tuple[int, ...]]] = {
    "a tensor": (torch.sin, (B,), 0),
    "a dict": (layer, (PARAMETERS, B), 0),
    "a dict of one": (lambda p: p["b"].exp(), ({"b": B},), 0),
    "a dict and a tensor": (layer, (PARAMETERS, B), (0, 1)),
    "the tensor before the dict": (layer, (PARAMETERS, B), (1, 0)),
    "a tuple of one argnum": (layer, (PARAMETERS, B), (0,)),
    "the last argument": (layer, (PARAMETERS, B), -1),
    "argnums from the end": (layer, (PARAMETERS, B), (-1, 0)),
    "a tuple": (lambda p: p[0] @ p[1], ((A, B),), 0),
    "a tuple of one tensor": (lambda p: p[0].sin(), ((B,),), 0),
    "a list in a dict": (lambda p: p["all"][0] @ p["all"][1], ({"all": [A, B]},), 0),
    "a named tuple": (lambda p: Pair(p.left @ p.right, {"r": p.right}), (Pair(A, B),), 0),
    "an ordered dict": (lambda p: p["b"] * p["a"], (collections.OrderedDict(b=B, a=S),), 0),
    "a dict out": (lambda x: {"sin": x.sin(), "all": {"sum": x.sum()}}, (B,), 0),
    "a list out": (lambda x: [x.sin(), (x.sum(), x[:1])], (B,), 0),
    "a tuple of one out": (lambda x: ({"y": x.sin()},), (B,), 0),
    "a type of PyTorch's out": (torch.linalg.slogdet, (tensor(3, 3),), 0),
    "structures in and out": (
        lambda p, x: {"y": layer(p, x), "x": [x, p["w"]]},
        (PARAMETERS, B),
        (0, 1),
    ),
    "a module's parameters": (
        lambda p, x: {"y": torch.func.functional_call(MODEL, p, (x,))},
        ({name: each.detach() for name, each in MODEL.named_parameters()}, B),
        0,
    ),
    "a constant out": (
        lambda p: {"y": p["w"].sum(), "one": torch.ones(2, dtype=B.dtype)},
        (PARAMETERS,),
        0,
    ),
    "an argument without effect": (lambda p, q: p["w"].sin(), (PARAMETERS, Pair(B, [S])), (0, 1)),
    "no elements out": (lambda p: {"none": p["w"][:0], "some": p["w"][0]}, (PARAMETERS,), 0),
    "no elements in": (lambda p: p["none"].sum() + p["b"], ({"none": tensor(0, 3), "b": B},), 0),
    "only scalars": (lambda p: {"y": p["a"] * p["b"]}, ({"a": S, "b": S.exp()},), 0),
    "one tensor twice": (lambda p: p[0] * p[1].sin(), ((B, B),), 0),
    "an empty structure beside": (lambda p, q: p["w"].sin(), (PARAMETERS, {}), (0, 1)),
    "float32": (lambda p: {"y": p["a"].sin() * p["b"]}, ({"a": B.float(), "b": S.float()},), 0),
    "two dtypes": (lambda p: {"y": p["a"].sin() * p["b"]}, ({"a": B.float(), "b": B},), 0),
    "strides": (
        lambda p: {"y": p["t"] * p["s"][:3, None]},
        ({"t": A.t(), "s": tensor(9)[::3]},),
        0,
    ),
    "elements that share memory": (
        lambda p: p["e"] * p["u"],
        ({"e": S.expand(3), "u": tensor(4).unfold(0, 3, 1)},),
        0,
    ),
    "more rows": (lambda p: {"y": (p["a"][:, None] * torch.arange(9)).sin()}, ({"a": B},), 0),
}


def run(case: str) -> tuple[Compute, tuple[Any, ...], int | tuple[int, ...]]:
    """The case, with its argnums as torch.func takes them: not those from the end."""
    fn, args, argnums = CASES[case]
    return (
        fn,
        args,
        argnums % 2 if isinstance(argnums, int) else tuple(number % 2 for number in argnums),
    )


@pytest.mark.parametrize(("case", "mode"), in_turn(CASES, MODES))
def test_jacobians(case: str, mode: str, where: mpgrad.Pool | None) -> None:
    fn, args, argnums = CASES[case]
    _, _, positive = run(case)
    expected = torch.func.jacrev(fn, positive)(*args)
    for chunk_size in (None, 1, 2):
        found = jacobian(fn, *args, mode=mode, pool=where, argnums=argnums, chunk_size=chunk_size)
        assert_same(found, expected)


@pytest.mark.parametrize(
    "case", ["a dict and a tensor", "structures in and out", "a list out", "float32"]
)
def test_the_same_arithmetic_gives_the_same_bits(case: str, where: mpgrad.Pool | None) -> None:
    fn, args, argnums = run(case)
    reverse = jacobian(fn, *args, mode="reverse", pool=where, argnums=argnums)
    assert_same(reverse, torch.func.jacrev(fn, argnums, chunk_size=1)(*args), exact=True)
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    tangents = tuple(tree_map(torch.cos, args[number]) for number in numbers)

    def of_some(*some: Any) -> Any:
        every = list(args)
        for number, each in zip(numbers, some, strict=True):
            every[number] = each
        return fn(*every)

    primals = tuple(args[number] for number in numbers)
    found = jvp(fn, args, tangents, argnums=numbers, pool=where)
    assert_same(found, torch.func.jvp(of_some, primals, tangents), exact=True)
    output, pull = torch.func.vjp(of_some, *primals)
    cotangents = tree_map(torch.cos, output)
    # a list is one of items
    own_cotangents = [cotangents] if where or isinstance(cotangents, list) else cotangents
    found = vjp(fn, args, own_cotangents, argnums=numbers, pool=where)
    (found,) = found if isinstance(own_cotangents, list) else [found]
    assert_same(found, (output, pull(cotangents)), exact=True)


@pytest.mark.parametrize("mode", MODES)
def test_hessians(mode: str, where: mpgrad.Pool | None) -> None:
    def value(p: dict[str, Any], x: Any) -> torch.Tensor:
        return layer(p, x["x"] * 2).prod()

    args = PARAMETERS, {"x": B, "unused": [S]}
    for argnums in (0, 1, (0, 1), (1, 0), (1,)):
        expected = torch.func.hessian(value, argnums)(*args)
        found = hessian(value, *args, mode=mode, pool=where, argnums=argnums, chunk_size=2)
        assert_same(found, expected)
        found = hessian(
            lambda *args: (value(*args), {"aux": args[0]["w"]}),
            *args,
            pool=where,
            argnums=argnums,
            has_aux=True,
        )
        assert_same(found, (expected, {"aux": A}))
        nested = hessian(
            lambda *args: {"l": [value(*args)]}, *args, mode=mode, pool=where, argnums=argnums
        )
        assert_same(nested, torch.func.hessian(lambda *args: {"l": [value(*args)]}, argnums)(*args))


@pytest.mark.parametrize("mode", MODES)
def test_arguments_may_be_written_to(mode: str, where: mpgrad.Pool | None) -> None:
    """torch.func.jacrev refuses it, as long as these are leaves: there each evaluation gets
    copies."""

    def write(p: dict[str, Any]) -> Any:
        taken = p.pop("w").mul_(2)
        p["rest"]["scale"].exp_()
        return (taken**2).sum(0) * p["rest"].popitem()[1]

    def write_to_copies(p: dict[str, Any]) -> Any:
        return write(tree_map(torch.clone, p))

    before = tree_map(torch.clone, PARAMETERS)
    assert_same(
        jacobian(write, PARAMETERS, mode=mode, pool=where),
        torch.func.jacrev(write_to_copies)(PARAMETERS),
    )
    found = hessian(lambda p: write(p).sum(), PARAMETERS, mode=mode, pool=where)
    assert_same(found, torch.func.hessian(lambda p: write_to_copies(p).sum())(PARAMETERS))
    assert_same(
        jvp(write, PARAMETERS, before, pool=where),
        torch.func.jvp(write_to_copies, (PARAMETERS,), (before,)),
    )
    assert_same(PARAMETERS, before, exact=True)


def test_products_with_the_hessian(where: mpgrad.Pool | None) -> None:
    def value(p: dict[str, Any], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output = layer(p, x)
        return output.prod(), Pair(output, [x])

    vectors = tree_map(torch.cos, (PARAMETERS, B))
    gradient = torch.func.grad_and_value(value, (0, 1), has_aux=True)
    _, product, beside = torch.func.jvp(gradient, (PARAMETERS, B), vectors, has_aux=True)
    assert_same(
        hvp(value, (PARAMETERS, B), vectors, pool=where, has_aux=True),
        (beside[0], product, beside[1]),
    )
    found = hvp(lambda *args: value(*args)[0], (PARAMETERS, [B, B]), vectors, pool=where)
    assert_same(found, [(beside[0], product)] * 2)
    of_one = hvp(lambda p, x: value(p, x)[0], (PARAMETERS, B), vectors[0], argnums=0, pool=where)[1]
    assert_same(
        of_one,
        torch.func.jvp(torch.func.grad(lambda p: value(p, B)[0]), (PARAMETERS,), (vectors[0],))[1],
    )


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_comes_beside(mode: str, create_graph: bool, where: mpgrad.Pool | None) -> None:
    def fn(p: dict[str, Any], x: torch.Tensor) -> Any:
        y = layer(p, x)
        return {"y": y}, {
            "y": y,
            "places": (torch.arange(3), [x, p["w"] * 2]),
            "none": (),
            "constant": B,
        }

    outputs, aux = fn(PARAMETERS, B)
    for argnums in (0, (0, 1)):
        expected = torch.func.jacrev(fn, argnums, has_aux=True)(PARAMETERS, B)
        assert_same(expected[1], aux, exact=True)
        assert_same(expected, torch.func.jacfwd(fn, argnums, has_aux=True)(PARAMETERS, B))
        options: Any = {"argnums": argnums, "has_aux": True, "create_graph": create_graph}
        for chunk_size in (None, 2):
            found = jacobian(
                fn, PARAMETERS, B, mode=mode, pool=where, chunk_size=chunk_size, **options
            )
            assert type(found) is tuple
            assert_same(found, expected, graph=create_graph)
            assert_same(found[1], aux, exact=True, graph=create_graph)
        items = jacobian(fn, PARAMETERS, [B, B, B], mode=mode, pool=where, **options)
        assert_same(items, [expected] * 3, graph=create_graph)
    tangents = tree_map(torch.cos, (PARAMETERS, B))
    found = jvp(fn, (PARAMETERS, B), tangents, pool=where, has_aux=True, create_graph=create_graph)
    assert_same(
        found,
        torch.func.jvp(fn, (PARAMETERS, B), tangents, has_aux=True),
        exact=True,
        graph=create_graph,
    )
    output, pull, beside = torch.func.vjp(fn, PARAMETERS, B, has_aux=True)
    found = vjp(fn, (PARAMETERS, B), outputs, pool=where, has_aux=True, create_graph=create_graph)
    assert_same(found, (output, pull(outputs), beside), exact=True, graph=create_graph)


def test_nothing_beside(where: mpgrad.Pool | None) -> None:
    for mode in MODES:
        assert_same(
            jacobian(lambda x: (x * 2, ()), B, has_aux=True, mode=mode, pool=where),
            (2 * torch.eye(3).double(), ()),
        )
        no_elements = jacobian(lambda x: (x[:0], [x]), B, has_aux=True, mode=mode, pool=where)
        assert_same(no_elements, (torch.zeros(0, 3).double(), [B]))


def test_what_comes_beside_belongs_to_the_same_random_numbers(where: mpgrad.Pool | None) -> None:
    def fn(p: dict[str, torch.Tensor]) -> Any:
        mask = torch.nn.functional.dropout(torch.ones(20, dtype=B.dtype))
        return p["s"] * mask, mask

    for mode in MODES:
        found = jacobian(fn, [{"s": S}, {"s": S}], mode=mode, pool=where, has_aux=True)
        for slope, mask in found:
            assert torch.equal(slope["s"], mask)
        assert not torch.equal(found[0][1], found[1][1])


def test_items_of_several_structures(where: mpgrad.Pool | None) -> None:
    def fn(p: Any) -> Any:
        return {number: leaf.sin() for number, leaf in enumerate(tree_leaves(p))}

    items = [{"a": B}, (S, [B, A]), B[:0], [S]]
    tangents = [tree_map(torch.cos, each) for each in items]
    for mode in MODES:
        found = jacobian(fn, items, mode=mode, pool=where)
        for each, own in zip(found, items, strict=True):
            assert_same(each, torch.func.jacfwd(fn)(own))
    found = jvp(fn, items, tangents, pool=where)
    for each, own, tangent in zip(found, items, tangents, strict=True):
        assert_same(each, torch.func.jvp(fn, (own,), (tangent,)))
    outputs = [fn(each) for each in items]
    for each, own, output in zip(vjp(fn, items, outputs, pool=where), items, outputs, strict=True):
        assert_same(each, (output, torch.func.vjp(fn, own)[1](output)[0]))


def test_a_single_argument_that_is_a_tuple_with_lists(where: mpgrad.Pool | None) -> None:
    argument, tangent = (A, [B, S]), (A.cos(), [B.cos(), S.cos()])

    def fn(p: Any) -> Any:
        return (p[0] @ p[1][0]) * p[1][1]

    expected = torch.func.jvp(fn, (argument,), (tangent,))
    assert_same(jvp(fn, (argument,), tangent, argnums=0, pool=where), expected)
    assert_same(jvp(fn, (argument,), (tangent,), pool=where), expected)
    gradients = vjp(fn, (argument,), expected[0], pool=where)[1]
    assert_same(gradients, torch.func.vjp(fn, argument)[1](expected[0]))


def random_structure(source: random.Random, depth: int = 0) -> Any:
    kind = (
        source.choice(["tensor", "tensor", "dict", "list", "tuple", "pair"])
        if depth < 3
        else "tensor"
    )
    if kind == "tensor":
        shape = source.choice([(), (1,), (2,), (0,), (2, 2)])
        return tensor(*shape, seed=source.randrange(100))
    if kind == "pair":
        return Pair(random_structure(source, depth + 1), random_structure(source, depth + 1))
    parts = [random_structure(source, depth + 1) for _ in range(source.randrange(1, 3))]
    return {
        "dict": lambda: {str(number): each for number, each in enumerate(parts)},
        "list": list,
        "tuple": tuple,
    }[kind](*([] if kind == "dict" else [parts]))


@pytest.mark.parametrize("seed", range(12))
def test_random_structures(seed: int, where: mpgrad.Pool | None) -> None:
    source = random.Random(seed)
    argument, output = {"p": random_structure(source)}, random_structure(source)
    numbers = itertools.count(1)
    ones = tree_map(lambda each: torch.ones_like(each) * next(numbers), output)
    argnums = source.choice([0, (0,), (1, 0)])

    def fn(p: Any, x: torch.Tensor) -> Any:
        total = x.sin().sum()
        for leaf in tree_leaves(p):
            total = total + (leaf * leaf.cos()).sum()
        return tree_map(lambda one: (total * one).sin(), ones)

    # jacrev takes no output without elements
    expected = torch.func.jacfwd(fn, argnums)(argument, B)
    for mode in MODES:
        assert_same(jacobian(fn, argument, B, mode=mode, argnums=argnums, pool=where), expected)
    second = torch.func.hessian(
        lambda *args: sum(each.sum() for each in tree_leaves(fn(*args))), argnums
    )(argument, B)
    found = hessian(
        lambda *args: sum(each.sum() for each in tree_leaves(fn(*args))),
        argument,
        B,
        argnums=argnums,
        pool=where,
    )
    assert_same(found, second)


# --- beyond a single level


@pytest.mark.slow
def test_results_can_be_differentiated(where: mpgrad.Pool | None) -> None:
    leaves = [each.clone().requires_grad_() for each in (A, B, S)]
    captured = tensor(2, seed=5).requires_grad_()

    def compute(
        w: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, captured: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        p = {"w": w, "rest": {"b": b, "scale": scale}}

        def fn(p: Any) -> Any:
            y = layer(p, B) * captured
            return {"y": y}, (y.exp(),)

        options: Any = {"pool": where, "create_graph": True, "has_aux": True}
        tangent = tree_map(torch.ones_like, p)
        found = [jacobian(fn, p, mode=mode, **options) for mode in ("reverse", "forward")]
        found += [jvp(fn, p, tangent, **options), vjp(fn, p, {"y": captured}, **options)]
        found += [hvp(lambda p: (fn(p)[0]["y"].prod(), fn(p)[1]), p, tangent, **options)]
        return tuple(tree_leaves(found))

    assert torch.autograd.gradcheck(compute, (*leaves, captured), fast_mode=True)


@pytest.mark.parametrize("mode", MODES)
def test_within_transforms(mode: str, where: mpgrad.Pool | None) -> None:
    def fn(p: dict[str, torch.Tensor]) -> Any:
        return {"y": p["a"].sin() * p["b"]}, (p["a"] * 2,)

    p = {"a": B, "b": S}

    def inner(p: Any) -> Any:
        return jacobian(fn, p, mode=mode, pool=where, has_aux=True)

    def of_torch(p: Any) -> Any:
        return torch.func.jacrev(fn, has_aux=True)(p)

    stacked = tree_map(lambda each: torch.stack([each, each * 2]), p)
    assert_same(torch.func.vmap(inner)(stacked), torch.func.vmap(of_torch)(stacked))
    assert_same(torch.func.jacrev(inner)(p), torch.func.jacrev(of_torch)(p))
    assert_same(torch.func.jacfwd(inner)(p), torch.func.jacfwd(of_torch)(p))
    assert_same(jacobian(inner, p, mode=mode), torch.func.jacrev(of_torch)(p))
    assert_same(torch.func.jvp(inner, (p,), (p,)), torch.func.jvp(of_torch, (p,), (p,)))


def test_as_autograd_functional(where: mpgrad.Pool | None) -> None:
    """It knows tuples only; its options of speed change no results."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a @ b, b.sin() * a.sum()

    for mode in MODES:
        found = jacobian(fn, A, B, mode=mode, pool=where)
        assert_same(found, functional.jacobian(fn, (A, B)))
        assert_same(found, functional.jacobian(fn, (A, B), vectorize=True))
        forward = functional.jacobian(fn, (A, B), vectorize=True, strategy="forward-mode")
        assert_same(found, tuple(map(tuple, forward)))
        second = hessian(lambda a, b: fn(a, b)[0].prod(), A, B, mode=mode, pool=where)
        assert_same(
            second, functional.hessian(lambda a, b: fn(a, b)[0].prod(), (A, B), vectorize=True)
        )


def test_gradients_of_items(pool2: mpgrad.Pool) -> None:
    p = {
        "w": A.clone().requires_grad_(),
        "rest": (B.clone().requires_grad_(), [S.clone().requires_grad_()]),
    }

    def fn(x: torch.Tensor) -> torch.Tensor:
        return ((p["w"] @ (x * p["rest"][0])) * p["rest"][1][0]).sum()

    items = [B, B * 2]
    found = per_item_grad(pool2.map(fn, items), p)
    for each, x in zip(found, items, strict=True):
        leaves, spec = tree_flatten(p)
        assert_same(each, tree_unflatten(torch.autograd.grad(fn(x), leaves), spec))
    own = [{"x": x.clone().requires_grad_()} for x in items]
    found = per_item_grad(pool2.map(lambda item: (item["x"] ** 2).sum(), own), own)
    assert_same(found, [{"x": 2 * x} for x in items])


# --- what is refused, by torch.func too

P = {"b": B}


@pytest.mark.parametrize(
    ("call", "of_torch", "error", "message"),
    [
        (
            lambda: jacobian(lambda p: p["b"], {"b": B, "n": {"k": 3}}),
            lambda: torch.func.jacrev(lambda p: p["b"])({"b": B, "n": {"k": 3}}),
            TypeError,
            r"argument 0\['n'\]\['k'\] must be a floating point tensor \(given: int\); leave it "
            r"out of argnums",
        ),
        (
            lambda: jacobian(lambda x, p: p[0], B, [(B, None)], argnums=1),
            lambda: torch.func.jacrev(lambda p: p[0])((B, None)),
            TypeError,
            r"argument 1\[1\] must be a floating point tensor \(given: NoneType\)",
        ),
        (
            lambda: jacobian(lambda p: p.left, Pair(B, torch.arange(3))),
            lambda: torch.func.jacrev(lambda p: p.left)(Pair(B, torch.arange(3))),
            TypeError,
            r"argument 0\.right must be floating point to have a derivative \(dtype: torch.int64\)",
        ),
        (
            lambda: jacobian(lambda p: p["c"].abs(), {"c": torch.ones(2, dtype=torch.complex64)}),
            lambda: torch.func.jacrev(lambda p: p["c"].abs())(
                {"c": torch.ones(2, dtype=torch.complex64)}
            ),
            TypeError,
            r"argument 0\['c'\] must be real .*torch\.view_as_real",
        ),
        (
            lambda: jacobian(lambda x: {"c": torch.complex(x, x)}, B),
            lambda: torch.func.jacrev(lambda x: {"c": torch.complex(x, x)})(B),
            TypeError,
            r"the output\['c'\] must be real",
        ),
        (
            lambda: jacobian(lambda x: {"y": [x, None]}, B),
            lambda: torch.func.jacrev(lambda x: {"y": [x, None]})(B),
            TypeError,
            r"the output\['y'\]\[1\] must be a floating point tensor \(given: NoneType\)",
        ),
        (
            lambda: jacobian(lambda x: torch.max(x, 0), B),
            lambda: torch.func.jacrev(lambda x: torch.max(x, 0))(B),
            TypeError,
            r"the output\[1\] must be floating point",
        ),
        (
            lambda: jacobian(lambda x: {"none": []}, B),
            lambda: torch.func.jacrev(lambda x: {"none": []})(B),
            ValueError,
            r"the function must return at least one tensor \(returned: {'none': \[\]}\)",
        ),
        (
            lambda: vjp(lambda x: (), B, ()),
            lambda: torch.func.vjp(lambda x: (), B),
            ValueError,
            r"the function must return at least one tensor \(returned: \(\)\)",
        ),
        (
            lambda: jacobian(lambda p: B, {"none": ()}),
            lambda: torch.func.jacrev(lambda p: B)({"none": ()}),
            ValueError,
            r"the arguments to differentiate must contain a tensor \(argnums: 0, given: {'none': "
            r"\(\)}\)",
        ),
        (
            lambda: jacobian(torch.sin, B, has_aux=True),
            lambda: torch.func.jacrev(torch.sin, has_aux=True)(B),
            TypeError,
            r"with has_aux=True the function must return a tuple \(output, aux\) \(returned: a "
            r"torch.float64 tensor",
        ),
        (
            lambda: jacobian(lambda x: [x, x], B, has_aux=True),
            lambda: torch.func.jacrev(lambda x: [x, x], has_aux=True)(B),
            TypeError,
            r"\(returned: a list\)",
        ),
        (
            lambda: jvp(lambda x: (x, {"loss": 3.0}), B, B, has_aux=True),
            lambda: torch.func.jvp(lambda x: (x, {"loss": 3.0}), (B,), (B,), has_aux=True),
            TypeError,
            r"aux\['loss'\] must be a tensor \(given: float\); return numbers as "
            r"torch\.tensor\(number\)",
        ),
        (
            lambda: hessian(lambda x: (x.sum(), [B, "words"]), B, has_aux=True),
            lambda: torch.func.grad(lambda x: (x.sum(), [B, "words"]), has_aux=True)(B),
            TypeError,
            r"aux\[1\] must be a tensor \(given: str\)",
        ),
        (
            lambda: hvp(lambda p: p["b"].sum(), P, {"c": B}),
            lambda: torch.func.jvp(torch.func.grad(lambda p: p["b"].sum()), (P,), ({"c": B},)),
            ValueError,
            r"vectors must have the structure of the arguments, {'b': \*} \(given: {'c': \*}\)",
        ),
        (
            lambda: jvp(lambda p: p["b"], (P,), P),
            lambda: torch.func.jvp(lambda p: p["b"], (P,), P),
            ValueError,
            r"tangents must have the structure of the arguments, \({'b': \*},\) \(given: {'b': "
            r"\*}\)",
        ),
        (
            lambda: vjp(lambda p: [p["b"]], P, [B]),
            lambda: torch.func.vjp(lambda p: [p["b"]], P)[1](B),
            ValueError,
            r"cotangents must have the structure of the output, \[\*\] \(given: \*\); a list has "
            r"one entry for each item",
        ),
        (
            lambda: jvp(lambda p: p["b"], P, {"b": B[:2]}),
            lambda: torch.func.jvp(lambda p: p["b"], (P,), ({"b": B[:2]},)),
            ValueError,
            r"tangents\['b'\] must be a torch.float64 tensor of shape \(3,\) \(given: a "
            r"torch.float64 tensor of shape \(2,\)\)",
        ),
        (
            lambda: vjp(lambda p: {"y": p["b"]}, P, {"y": 1.0}),
            lambda: torch.func.vjp(lambda p: {"y": p["b"]}, P)[1]({"y": 1.0}),
            ValueError,
            r"cotangents\['y'\] must be a torch.float64 tensor of shape \(3,\) \(given: a float\)",
        ),
        (
            lambda: hessian(lambda p: {"l": p["b"].sum(), "m": p["b"]}, P),
            None,
            ValueError,
            r"the function must return one value \(output shape: \(\), \(3,\)\)",
        ),
    ],
)
def test_what_is_refused(
    call: Compute, of_torch: Compute | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
    if of_torch is not None:
        with pytest.raises(Exception):
            of_torch()


class Unnamed:
    """A type that PyTorch knows to take apart, and not how to name its parts."""

    def __init__(self, part: Any) -> None:
        self.part = part


def test_a_type_that_was_registered(pool2: mpgrad.Pool) -> None:
    """The registration travels with the class."""
    torch.utils._pytree.register_pytree_node(
        Unnamed, lambda each: ([each.part], None), lambda parts, _: Unnamed(*parts)
    )
    try:
        found = jacobian(lambda p: p.part.sin(), Unnamed(B))
        assert_same(found, Unnamed(torch.diag(B.cos())))
        with pytest.raises(TypeError, match="argument 0, leaf 0, must be a floating point tensor"):
            jacobian(lambda p: p, Unnamed(3))
        found = jacobian(lambda p: p.part.sin(), Unnamed(B), pool=pool2)
        assert_same(found, Unnamed(torch.diag(B.cos())))
        assert_same(jacobian(Unnamed, B, pool=pool2), jacobian(Unnamed, B))
    finally:
        torch.utils._pytree._deregister_pytree_node(Unnamed)


def test_complex_numbers_by_way_of_real_ones(where: mpgrad.Pool | None) -> None:
    z = torch.complex(B, B.cos())

    def fn(p: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"z": torch.view_as_real(torch.view_as_complex(p["z"]) ** 2)}

    p = {"z": torch.view_as_real(z)}
    for mode in MODES:
        assert_same(jacobian(fn, p, mode=mode, pool=where), torch.func.jacrev(fn)(p))


@pytest.mark.parametrize("in_pool", [False, True])
def test_a_named_tuple_of_cotangents(pool2: mpgrad.Pool, in_pool: bool) -> None:
    """Symptom: they were refused. Cause: any tuple was taken for one over the arguments."""

    def fn(x: torch.Tensor) -> Any:
        return torch.linalg.slogdet(x)

    x = torch.eye(3, dtype=torch.float64) * 2
    output, pull = torch.func.vjp(fn, x)
    cotangents = type(output)([torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype)])
    _, product = mpgrad.vjp(fn, x, cotangents, pool=pool2 if in_pool else None)
    assert torch.equal(product, pull(cotangents)[0])


@pytest.mark.parametrize("mode", MODES)
def test_other_arguments_may_be_written_to(mode: str, where: mpgrad.Pool | None) -> None:
    """Mode "auto" evaluated twice, at what the first evaluation had left, and the caller's tensor
    got a history; forward mode refused."""

    def fn(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
        p["y"].mul_(x.sum())
        return (p["y"] * x).repeat(5)

    p = {"y": B.clone()}
    expected = torch.func.jacrev(fn)(B, {"y": B.clone()})
    assert_same(jacobian(fn, B, p, argnums=0, mode=mode, pool=where), expected)
    assert_same(jacobian(fn, [B, B], p, argnums=0, mode=mode, pool=where), [expected] * 2)
    assert_same(p["y"], B, exact=True)


class Wrapper(torch.Tensor):
    """A tensor that has no memory of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        found: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda each: each.inner if isinstance(each, Wrapper) else each, (args, kwargs or {})
        )
        return tree_map(
            lambda each: Wrapper(each) if isinstance(each, torch.Tensor) else each,
            func(*args, **kwargs),
        )


def test_a_tensor_without_memory() -> None:
    """The address of its memory was asked for, which it has not."""
    x = Wrapper(B)
    for mode in ("reverse", "batched"):
        found = jacobian(torch.sin, x, mode=mode)
        torch.testing.assert_close(getattr(found, "inner", found), torch.diag(B.cos()))
    assert_same(vjp(torch.sin, x, x)[1].inner, B * B.cos())
