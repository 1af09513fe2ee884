"""`map`, `starmap` and `apply` against the serial loop, for every engine and number of workers."""

from __future__ import annotations

import dataclasses
import functools
import queue
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import mpgrad
from mpgrad.testing import assert_same_as_serial

pytestmark = pytest.mark.quick

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Body:
    mass: torch.Tensor
    name: str
    path: list[torch.Tensor]


def ragged(
    count: int = 9, requires_grad: bool = True, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [
        torch.randn(n, 1 + n % 3, dtype=dtype, requires_grad=requires_grad) for n in range(count)
    ]


def smooth(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp()).cumsum(0)


def test_ragged_tensors(pool: mpgrad.Pool) -> None:
    assert_same_as_serial(smooth, ragged(40), pool)


def test_non_leaf_items(pool: mpgrad.Pool) -> None:
    assert_same_as_serial(smooth, [x * 2 for x in ragged()], pool)


@pytest.mark.parametrize(
    "nbytes",
    [8, 4096, 8192, 8200, 70_000, 300_000, pytest.param(5_000_000, marks=pytest.mark.slow)],
)
def test_sizes_around_every_border(pool2: mpgrad.Pool, nbytes: int) -> None:
    items = [torch.randn(nbytes // 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert_same_as_serial(smooth, items, pool2)


def test_a_result_may_be_any_structure(pool: mpgrad.Pool) -> None:
    def fn(x: torch.Tensor) -> dict[str, Any]:
        return {
            "several": (x.sin(), [x.cos(), None, 3, "text"]),
            "fixed": x.detach(),
            "integer": x.argsort(0),
            "bool": x > 0,
            "scalar": x.sum(),
            "empty": x[:0],
            "pair": Pair(x * 2, x.shape),
        }

    assert_same_as_serial(fn, ragged(), pool)


def test_a_tuple_of_tensors(pool: mpgrad.Pool) -> None:
    assert_same_as_serial(lambda x: (x * 2, x.detach(), x.sum()), ragged(), pool)


def test_items_may_be_any_structure(pool: mpgrad.Pool) -> None:
    a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    items = [{"a": a, "rest": (b, [a, 2.0], None)}, {"a": b, "rest": (a, [b, -1.0], None)}]
    assert_same_as_serial(
        lambda item: item["a"] * item["rest"][1][1] + item["rest"][0].exp(), items, pool
    )


def test_dataclasses_go_and_come(pool: mpgrad.Pool) -> None:
    mass = torch.ones(3, requires_grad=True)

    def fn(body: Body) -> Body:
        return Body(body.mass * 2, body.name.upper(), [step + body.mass for step in body.path])

    (body,) = pool.map(fn, [Body(mass, "moon", [mass * 3])])
    assert isinstance(body, Body) and body.name == "MOON"
    (body.mass.sum() + body.path[0].sum()).backward()
    assert torch.equal(mass.grad, torch.full((3,), 6.0))


def test_a_tensor_twice_in_an_item_is_one_tensor(pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    ((same, product),) = pool.map(lambda item: (item[0] is item[1], item[0] * item[1]), [[x, x]])
    assert same
    product.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_one_tensor_in_many_items(pool: mpgrad.Pool) -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    results = pool.map(lambda item: (item[0] * item[1]).sin(), [(x, k) for k in range(7)])
    expected = [(x * k).sin() for k in range(7)]
    ours = torch.autograd.grad(sum(r.sum() for r in results), x)
    assert torch.equal(ours[0], torch.autograd.grad(sum(r.sum() for r in expected), x)[0])


def test_the_same_tensor_twice_in_a_result(pool2: mpgrad.Pool) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y, y]

    x = torch.ones(2, requires_grad=True)
    ((first, second),) = pool2.map(fn, [x])
    assert first is second


def test_an_output_that_is_the_input(pool: mpgrad.Pool) -> None:
    assert_same_as_serial(lambda x: (x, x.t(), x * 1), ragged(), pool)


def test_an_output_that_does_not_depend_on_the_input(pool: mpgrad.Pool) -> None:
    assert_same_as_serial(lambda x: (torch.ones(2), x * 2), ragged(), pool)


def test_a_leaf_made_by_the_function(pool2: mpgrad.Pool) -> None:
    def fn(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = torch.full((2,), float(k), requires_grad=True)
        return leaf, leaf * 2

    ((leaf, doubled),) = pool2.map(fn, [3])
    assert leaf.requires_grad and leaf.is_leaf
    assert doubled.requires_grad and not doubled.is_leaf
    doubled.sum().backward()  # as in the serial loop, where nobody sees this gradient either


def test_starmap(pool: mpgrad.Pool) -> None:
    items = [(x, x.detach() + 1, k) for k, x in enumerate(ragged())]

    def fn(x: torch.Tensor, y: torch.Tensor, k: int) -> torch.Tensor:
        return x * y * k

    assert_same_as_serial(
        lambda args: fn(*args), items, pool, run=lambda pool, _, items: pool.starmap(fn, items)
    )


def test_apply_with_keywords(pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    result = pool.apply(torch.add, (x, x * 2), {"alpha": 3})
    result.sum().backward()
    assert torch.equal(result.detach(), torch.full((2,), 7.0))
    assert torch.equal(x.grad, torch.full((2,), 7.0))


def test_items_that_are_no_tensors(pool: mpgrad.Pool) -> None:
    assert pool.map(lambda x: x + 1, range(100)) == list(range(1, 101))
    assert pool.map(str.upper, ["a", "b"]) == ["A", "B"]
    assert pool.map(len, []) == []
    assert pool.starmap(pow, [(2, 3), (3, 2)]) == [8, 9]
    assert pool.map(lambda x: x, [None, (), {}]) == [None, (), {}]


def test_an_iterable_without_length(pool: mpgrad.Pool) -> None:
    assert pool.map(lambda x: x * x, (k for k in range(20))) == [k * k for k in range(20)]


@pytest.mark.parametrize("chunksize", [1, 3, 1000])
def test_chunksize_changes_nothing(pool: mpgrad.Pool, chunksize: int) -> None:
    assert_same_as_serial(
        smooth, ragged(20), pool, run=lambda pool, fn, items: pool.map(fn, items, chunksize)
    )


def test_a_list_that_can_be_walked_twice(pool2: mpgrad.Pool) -> None:
    results = pool2.map(smooth, ragged())
    assert isinstance(results, list)
    assert [id(r) for r in results] == [id(r) for r in results]


def test_a_chain_of_maps(pool: mpgrad.Pool) -> None:
    def run(pool: mpgrad.Pool, fn: Any, items: list[torch.Tensor]) -> list[torch.Tensor]:
        for _ in range(3):
            items = pool.map(fn, items)
        return items

    def thrice(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = smooth(x)
        return x

    large = [torch.randn(50_000, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for items in (ragged(), large):
        assert_same_as_serial(
            thrice, items, pool, run=lambda pool, _, items: run(pool, smooth, items)
        )


def test_former_results_are_read_in_place_and_not_changed(pool2: mpgrad.Pool) -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    first = pool2.map(torch.clone, [torch.ones(200_000), torch.ones(20_000)])
    copied = pool2.stats().bytes_copied
    second = pool2.map(scale, first)
    assert pool2.stats().bytes_copied == copied
    assert all(bool((x == 1).all()) for x in first)
    assert all(bool((x == 2).all()) for x in second)


@pytest.mark.parametrize("size", [10, 5_000, 200_000])
def test_in_place_writes_stay_in_the_task(pool: mpgrad.Pool, size: int) -> None:
    x = torch.ones(size, dtype=torch.float64, requires_grad=True)
    inner = x * 3
    results = pool.map(lambda t: t.mul_(2).exp(), [inner, inner])
    assert bool((inner == 3).all())
    sum(r.sum() for r in results).backward()
    assert torch.allclose(x.grad, torch.full_like(x, 2 * 6 * torch.e**6))


def test_an_in_place_write_to_a_leaf_raises_as_it_does_serially(pool: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        RuntimeError,
        match="a leaf Variable that requires grad is being used in an in-place operation",
    ):
        pool.map(lambda t: t.mul_(2), [x])


def test_results_may_be_written_in_place(pool: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    (y,) = pool.map(lambda t: t * 2, [x])
    y.mul_(5)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 10.0))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.bool,
    ],
)
def test_dtypes(pool2: mpgrad.Pool, dtype: torch.dtype) -> None:
    needs_grad = dtype.is_floating_point or dtype.is_complex
    items = [torch.ones(n, 2, dtype=dtype, requires_grad=needs_grad) for n in (0, 1, 4000)]
    assert_same_as_serial(lambda x: x * 2 if needs_grad else ~x, items, pool2)


def test_strides_survive(pool2: mpgrad.Pool) -> None:
    base = torch.randn(4, 5, 6)
    items = [
        base.transpose(0, 2),
        base[:, ::2],
        base[1:3],
        base[0, 0, 0],
        torch.randn(3, 1).expand(3, 1000),
        torch.randn(5).as_strided((3, 3), (1, 1)),
        torch.randn(200, 300).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(0, 3),
        torch.tensor(3.0),
    ]
    for item, (result, stride) in zip(
        items, pool2.map(lambda x: (x, x.stride()), items), strict=True
    ):
        assert torch.equal(result, item)
        assert result.stride() == stride
        dense = (
            item.numel()
            and not (item.storage_offset() and item.dim() == 3)
            and item.shape != (4, 3, 6)
        )
        if dense and item.shape != (3, 3):
            assert stride == item.stride()


def test_large_expanded_tensors_stay_small(pool2: mpgrad.Pool) -> None:
    huge = torch.ones(1).expand(1 << 40)  # 4 TiB, were it written out
    assert pool2.map(lambda x: (x.shape, float(x[5])), [huge]) == [(torch.Size([1 << 40]), 1.0)]


def test_parameters_stay_parameters(pool2: mpgrad.Pool) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    ((kind, result),) = pool2.map(lambda x: (type(x).__name__, x * 2), [p])
    assert kind == "Parameter"
    result.sum().backward()
    assert torch.equal(p.grad, torch.full((2,), 2.0))


def test_partials_methods_and_callables(pool: mpgrad.Pool) -> None:
    class Scale:
        def __init__(self, factor: torch.Tensor) -> None:
            self.factor = factor

        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

        __call__ = apply

    factor = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    scale = Scale(factor)
    for fn in (scale, scale.apply, functools.partial(torch.mul, factor), torch.sin):
        assert_same_as_serial(fn, ragged(), pool)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_mkldnn(), "layout is torch._mkldnn"),
        (lambda: torch.ones(3, device="meta"), "device is meta"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "NestedTensor, whose __torch_dispatch__",
        ),
    ],
    ids=["mkldnn", "meta", "nested"],
)
def test_what_cannot_be_carried_is_refused_by_name(
    pool: mpgrad.Pool, make: Callable[[], torch.Tensor], reason: str
) -> None:
    tensor, cannot = make(), "(holds a tensor that )?cannot be sent"
    with pytest.raises(TypeError, match=rf"item 1 {cannot}.*{reason}"):
        pool.map(lambda x: x, [torch.ones(1), tensor])
    with pytest.raises(TypeError, match=rf"the function {cannot}.*{reason}"):
        pool.map(lambda x: tensor, [torch.ones(1)])
    assert pool.map(abs, [-1]) == [1]


def test_a_result_that_cannot_be_carried_names_its_item(pool: mpgrad.Pool) -> None:
    with pytest.raises(
        TypeError, match=r"the result holds a tensor that cannot be sent.*_mkldnn"
    ) as caught:
        pool.map(lambda x: x.to_mkldnn() if x.numel() > 1 else x, [torch.ones(1), torch.ones(2)])
    assert any("item 1" in note for note in caught.value.__notes__)


# --- several iterables, as `Executor.map` and Python's `map` take them

WAYS: list[Callable[..., list[Any]]] = [
    lambda pool, *args, **options: pool.map(*args, **options),
    lambda pool, *args, **options: list(pool.imap(*args, **options)),
    lambda pool, *args, **options: sorted(pool.imap_unordered(*args, **options)),
    lambda pool, *args, **options: pool.map_async(*args, **options).get(),
]
NAMES = ["map", "imap", "imap_unordered", "map_async"]


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_several_iterables(pool: mpgrad.Pool, way: Callable[..., list[Any]]) -> None:
    xs, ys = ragged(5), [x.detach().sin().requires_grad_() for x in ragged(4)]

    def fn(x: torch.Tensor, y: torch.Tensor, k: int) -> torch.Tensor:
        return (x * y).sum() * k + y.square().sum()

    found = []
    for losses in (way(pool, fn, xs, ys, range(3)), list(map(fn, xs, ys, range(3)))):
        total = torch.stack(sorted(losses)).sum()
        found.append([*sorted(losses), *torch.autograd.grad(total, [*xs[:3], *ys[:3]])])
    ours, theirs = found
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_the_chunksize_stays_where_it_was(
    pool2: mpgrad.Pool, way: Callable[..., list[Any]]
) -> None:
    xs, ys = [1, 2, 3], [5, 4, 0]
    for given, options in [
        ((xs, 2), {}),
        ((xs,), {"chunksize": 2}),
        ((xs, None), {}),
    ]:
        assert way(pool2, abs, *given, **options) == [1, 2, 3]
    for given, options in [((xs, ys, 2), {}), ((xs, ys), {"chunksize": 2}), ((xs, iter(ys)), {})]:
        assert sorted(way(pool2, max, *given, **options)) == [3, 4, 5]
    assert way(pool2, func=abs, iterable=xs) == [1, 2, 3]


def test_the_callback_stays_where_it_was(pool2: mpgrad.Pool) -> None:
    done: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    pool2.map_async(abs, [-1], 1, done.put).wait()
    pool2.map_async(max, [-1], [2], 1, done.put).wait()
    pool2.map_async(max, [-1], [3], callback=done.put).wait()
    assert [done.get(timeout=60) for _ in range(3)] == [[1], [2], [3]]


@pytest.mark.parametrize("second", [range(50), zip(range(50)), (k for k in range(50))])
def test_the_shortest_iterable_ends_the_map(pool2: mpgrad.Pool, second: Any) -> None:
    assert len(pool2.map(lambda _, y: y, range(100), second)) == 50
    assert pool2.map(max, [], [1]) == []
    assert next(pool2.imap(max, range(10**9), range(10**9))) == 0


Tensor = torch.Tensor


def total(x: Tensor) -> Tensor:
    return x.sum()


def own(x: float) -> float:
    return x


def test_a_generator_that_writes_to_what_it_gave(pool2: mpgrad.Pool) -> None:
    """Symptom: every item had the last one's values. Cause: a map took 256 items before it copied
    the first of them."""

    def items() -> Iterator[Tensor]:
        buffer = torch.zeros(2)
        for i in range(600):
            yield buffer.fill_(i)

    for _ in range(5):
        pool2.map(total, [torch.ones(2)] * 50)
    assert pool2.map(total, items()) == [total(x) for x in items()]


def steps(state: Tensor) -> Iterator[Tensor]:
    """A program whose next state takes the place of the one before."""
    for _ in range(5):
        yield state.add_(1)


class Serial:
    """The loops that maps stand for."""

    map = staticmethod(lambda function, items: [function(item) for item in items])
    starmap = staticmethod(lambda function, items: [function(*item) for item in items])


GENERATORS: dict[str, Callable[[Any, Callable[[Tensor], Tensor], Tensor], list[Tensor]]] = {
    "map": lambda pool, function, state: pool.map(function, steps(state)),
    "a map object": lambda pool, function, state: pool.map(function, map(state.add_, range(5))),
    "rows": lambda pool, function, state: pool.map(function, (each[:2] for each in steps(state))),
    "starmap": lambda pool, function, state: pool.starmap(function, ((x,) for x in steps(state))),
    "zip": lambda pool, function, state: pool.starmap(function, zip(steps(state), strict=True)),
    "arguments": lambda pool, function, state: pool.starmap(
        function, [map(state.add_, [k]) for k in range(5)]
    ),
}


@pytest.mark.parametrize("way", GENERATORS.values(), ids=GENERATORS)
def test_a_generator_that_writes_to_a_former_result(
    pool2: mpgrad.Pool, way: Callable[..., list[Tensor]]
) -> None:
    """Symptom: every item had the last one's values. Cause: former results were read where they
    lie, as the caller waits. But a generator runs the caller's code meanwhile."""
    weight = torch.tensor([1.5], requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return (x[:2].exp() * weight).sum()

    found = way(pool2, function, pool2.apply(torch.zeros, (5000,)))
    expected = way(Serial, function, torch.zeros(5000))
    assert found == expected
    of_pool, of_loop = (
        [torch.autograd.grad(x, weight) for x in each] for each in (found, expected)
    )
    assert of_pool == of_loop


def test_former_results_that_are_at_rest_are_read_where_they_lie(pool2: mpgrad.Pool) -> None:
    former = pool2.starmap(torch.full, [((5000,), 1.0), ((5000,), 2.0)])
    copied = pool2.stats().bytes_copied
    for items in (former, tuple(former), dict.fromkeys(former), iter(former)):
        pool2.map(total, items)
    for arguments in (
        [(x,) for x in former],
        [[x] for x in former],
        zip(former),
        zip(iter(former)),
    ):
        pool2.starmap(total, arguments)
    pool2.apply(total, former[:1])
    pool2.map_reduce(torch.neg, former, "sum")
    pool2.reduce(torch.add, former, former[0], associative=False)
    assert pool2.stats().bytes_copied == copied
    with forward_ad.dual_level():
        small = forward_ad.make_dual(torch.ones(()), torch.ones(()))
        pool2.starmap(torch.add, [(x, small) for x in former])
    assert pool2.stats().bytes_copied - copied < former[0].nbytes
    torch.func.grad(lambda w: pool2.starmap(lambda x, w: x[0] * w, [(x, w) for x in former])[1])(
        torch.ones(())
    )
    assert pool2.stats().bytes_copied - copied < former[0].nbytes


def test_a_generator_that_draws_random_numbers(pool2: mpgrad.Pool) -> None:
    """Symptom: items came twice, and the caller's generator was where it had been. Cause: what the
    iterable drew was taken for the function's, and put back."""
    for _ in range(5):
        pool2.map(own, [1.0] * 50)
    random.seed(0)
    found = [pool2.map(own, (random.random() for _ in range(700))), random.random()]
    random.seed(0)
    assert found == [[random.random() for _ in range(700)], random.random()]
    random.seed(0)
    pool2.starmap(own, [(random.random() for _ in range(1)) for _ in range(700)])
    after = random.random()
    random.seed(0)
    assert [random.random() for _ in range(701)][-1] == after
