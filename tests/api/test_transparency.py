"""Whether anybody can tell a loop in the pool from a loop in the caller: a table of operations
times behaviours.

Each behaviour is written once, for any `loop(fn, items)`, and returns values to compare. It runs
with the serial loop, and with every operation of the pool that can stand in for it. Values and
gradients of items have to agree bit for bit; sums over items may have been added in another order,
and agree to rounding.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import in_turn
from torch.utils.checkpoint import checkpoint

import mpgrad

Loop = Callable[..., list[Any]]


def serial(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [fn(item) for item in items]


def results_of(futures: list[Any]) -> list[Any]:
    """Of all it is asked how they ended: a failure that nobody asks for would surface in another
    test."""
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


OPERATIONS: dict[str, Callable[[mpgrad.Pool], Loop]] = {
    "map": lambda pool: pool.map,
    "map in chunks": lambda pool: functools.partial(pool.map, chunksize=3),
    "starmap": lambda pool: lambda fn, items: pool.starmap(fn, [(item,) for item in items]),
    "apply": lambda pool: lambda fn, items: [pool.apply(fn, (item,)) for item in items],
    "imap": lambda pool: lambda fn, items: list(pool.imap(fn, items)),
    "map_async": lambda pool: lambda fn, items: pool.map_async(fn, items).get(),
    "submit": lambda pool: lambda fn, items: results_of([pool.submit(fn, item) for item in items]),
    # a fold of one item into nothing else, and a tree whose leaves are lists: every way that calls
    # can be run
    "reduce": lambda pool: (
        lambda fn, items: [pool.reduce(Applied(fn), [item], None) for item in items]
    ),
    "map_reduce": lambda pool: lambda fn, items: pool.map_reduce(Listed(fn), items, joined, []),
}


class Applied:
    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, target: None, item: Any) -> Any:
        return self.fn(item)


class Listed:
    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, item: Any) -> list[Any]:
        return [self.fn(item)]


def joined(left: list[Any], right: list[Any]) -> list[Any]:
    return left + right


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def ragged() -> list[torch.Tensor]:
    return [leaf(n, seed=n) for n in (1, 3, 2, 5)]


# --- backward


def plain_backward(loop: Loop) -> list[Any]:
    items, c = ragged(), leaf(1, seed=9)
    results = loop(lambda x: (x * c).exp() * x, items)
    sum(r.sum() for r in results).backward()
    return [*results, *[x.grad for x in items], c.grad]


def one_item_then_another(loop: Loop) -> list[Any]:
    items, c = ragged(), leaf(1, seed=9)
    results = loop(lambda x: (x * c).exp() * x, items)
    found = []
    for index in (2, 0, 3, 1):
        results[index].sum().backward()
        found += [None if x.grad is None else x.grad.clone() for x in items]
    return [*found, c.grad]


def repeated_with_retain_graph(loop: Loop) -> list[Any]:
    items, c = ragged(), leaf(1, seed=9)
    total = sum(r.sum() for r in loop(lambda x: (x * c).sin(), items))
    for _ in range(2):
        total.backward(retain_graph=True)
    total.backward()
    try:
        total.backward()
    except RuntimeError as error:
        return [*[x.grad for x in items], c.grad, "a second time" in str(error)]
    return ["did not raise"]


def chosen_inputs(loop: Loop) -> list[Any]:
    items, c = ragged(), leaf(1, seed=9)
    results = loop(lambda x: (x * c).sin(), items)
    total = sum(r.sum() for r in results)
    one = torch.autograd.grad(total, items[1], retain_graph=True)
    both = torch.autograd.grad(total, [c, items[3]], retain_graph=True)
    none = torch.autograd.grad(results[0].sum(), items[1:], allow_unused=True, retain_graph=True)
    zeros = torch.autograd.grad(
        results[0].sum(), items[1:], allow_unused=True, materialize_grads=True
    )
    return [*one, *both, *none, *zeros, *[x.grad for x in items]]


def of_a_result(loop: Loop) -> list[Any]:
    """The derivative with respect to what a map returned, which is an input of the next one."""
    items = ragged()
    middle = loop(lambda x: x.exp(), items)
    last = loop(lambda x: x.sin(), middle)
    return list(torch.autograd.grad([r.sum() for r in last], [*middle, *items]))


def undefined_and_zero_gradients(loop: Loop) -> list[Any]:
    x, y = leaf(2), leaf(3, seed=1)
    a, b, number = loop(lambda t: (t[0] * t[1].sum(), t[1] ** 2, 7), [(x, y)])[0]
    only_b = torch.autograd.grad(b.sum(), [x, y], retain_graph=True, allow_unused=True)
    with_zeros = torch.autograd.grad(
        [a, b], [x, y], [torch.zeros_like(a), torch.ones_like(b)], retain_graph=True
    )
    with_none = torch.autograd.grad([a.sum(), b.sum()], [x, y], [None, None])
    return [number, *only_b, *with_zeros, *with_none]


def an_output_that_is_the_input_or_a_view_of_it(loop: Loop) -> list[Any]:
    x = leaf(4)
    same, view, other = loop(lambda t: (t, t[1:3], t.view(2, 2).t()), [x * 1])[0]
    sum((part * k).sum() for k, part in enumerate((same, view, other), 2)).backward()
    return [same, view, other, x.grad]


def an_output_that_does_not_depend_on_the_input(loop: Loop) -> list[Any]:
    x, c = leaf(2), leaf(2, seed=1)
    of_c, constant = loop(lambda t: (c * 2, t.detach() * 3), [x])[0]
    of_c.sum().backward()
    return [of_c, constant, x.grad, c.grad]


def one_tensor_in_several_items_and_twice_in_one(loop: Loop) -> list[Any]:
    x = leaf(3)
    results = loop(lambda t: (t[0] * t[1].exp()).sum(), [(x, x), (x, x * 2), (x.detach(), x)])
    sum(results).backward()
    return [*results, x.grad]


def complex_numbers(loop: Loop) -> list[Any]:
    x = torch.randn(
        3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    results = loop(
        lambda t: (t * t.conj() + t**2, t.conj(), t.imag, torch.view_as_real(t)), [x, x * 1j]
    )
    sum(part.abs().sum() for result in results for part in result).backward()
    return [*[part.resolve_conj().resolve_neg() for result in results for part in result], x.grad]


def half_precision(loop: Loop) -> list[Any]:
    items = [
        torch.ones(5, dtype=dtype).div(3).requires_grad_()
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    ]
    results = loop(lambda t: (t * 3).sigmoid(), items)
    for result in results:
        result.sum().backward()
    return [*results, *[x.grad for x in items]]


def empty_and_scalar_tensors(loop: Loop) -> list[Any]:
    items = [leaf(0), leaf(), leaf(3, 0, 2), leaf(1, 1)]
    results = loop(lambda t: t * 2 + t.sum(), items)
    sum(r.sum() for r in results).backward()
    return [*results, *[x.grad for x in items]]


def strided_items_and_gradients(loop: Loop) -> list[Any]:
    x = leaf(4, 6)
    results = loop(lambda t: t * t, [x.t(), x[::2, 1::2], x[:1].expand(3, 6), x.unfold(1, 3, 1)])
    weights = [
        torch.arange(r.numel(), dtype=r.dtype).view(r.shape[::-1]).permute(*range(r.dim())[::-1])
        for r in results
    ]
    gradients = torch.autograd.grad(results, x, weights)
    return [*gradients, *[list(r.stride()) for r in results]]


# --- hooks, modes, threads


def tensor_hooks(loop: Loop) -> list[Any]:
    seen: list[torch.Tensor] = []
    items, c = ragged(), leaf(1, seed=9)
    c.register_hook(lambda grad: grad * 2)
    items[0].register_hook(seen.append)
    items[1].register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))
    results = loop(lambda x: x.sin() * c, [x * 2 for x in items])
    results[2].retain_grad()
    results[3].register_hook(lambda grad: grad * 10)
    sum(r.sum() for r in results).backward()
    # not c.grad: its sum is hooked, and summed in other orders
    return [*seen, *[x.grad for x in items], results[2].grad]


def node_hooks(loop: Loop) -> list[Any]:
    seen: list[torch.Tensor] = []
    x = leaf(3)
    (result,) = loop(lambda t: t.exp(), [x])
    result.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    total = result.sum()
    total.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 3,))
    total.backward()
    return [*seen, x.grad]


def hooks_for_saved_tensors(loop: Loop) -> list[Any]:
    """They change what backward finds, so they have to reach the worker."""
    x, c = leaf(3), leaf(3, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.half(), lambda half: half.double()
    ):
        (result,) = loop(lambda t: (t * c).exp(), [x])
    result.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        (other,) = loop(lambda t: (t * c).exp(), [x])
    other.sum().backward()
    return [result, other, x.grad, c.grad]


def in_place_on_results(loop: Loop) -> list[Any]:
    items = ragged()
    results = loop(lambda x: x * x, items)
    for result in results:
        result.mul_(2).add_(1)
    sum((r**2).sum() for r in results).backward()
    return [*results, *[x.grad for x in items]]


def in_place_inside(loop: Loop) -> list[Any]:
    items = ragged()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0] = x.sum()
        return x.mul_(3).mul_(y)

    results = loop(fn, [x * 1 for x in items])
    sum(r.sum() for r in results).backward()
    return [*results, *[x.grad for x in items]]


def under_no_grad(loop: Loop) -> list[Any]:
    x = leaf(3)
    (kept,) = loop(lambda t: t.exp(), [x])
    with torch.no_grad():
        (plain,) = loop(lambda t: t * 2, [x])
        kept.backward(torch.ones_like(kept))
    return [plain, x.grad]


def gradients_turned_on_inside_no_grad(loop: Loop) -> list[Any]:
    x, c = leaf(3), leaf(3, seed=1)
    y = x * 2

    def fn(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            u = t * c
            return u.mul_(2), t * 3, t

    with torch.no_grad():
        results = [part for result in loop(fn, [x, y]) for part in result]
    sum((part * k).sum() for k, part in enumerate(results, 1)).backward()
    return [*results, x.grad, c.grad]


def backward_in_another_thread(loop: Loop) -> list[Any]:
    items = ragged()
    results = loop(lambda x: x.exp(), items)
    threads = [threading.Thread(target=result.sum().backward) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [x.grad for x in items]


def anomaly_mode(loop: Loop) -> list[Any]:
    """The warning names the line of the forward, wherever that ran."""
    x = torch.zeros(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (result,) = loop(lambda t: torch.sqrt(t) * 0, [x])  # the line
        try:
            result.sum().backward()
        except RuntimeError as error:
            named = any("# the line" in str(each.message) for each in caught)
            return [str(error), named]
    return ["did not raise"]


def warnings_of_the_function(loop: Loop) -> list[Any]:
    def fn(x: int) -> int:
        warnings.warn(f"{x} is odd", FutureWarning, stacklevel=1)
        return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = loop(fn, [1, 3])
    ours = [each for each in caught if each.category is FutureWarning]
    return [
        *results,
        sorted(str(each.message) for each in ours),
        {each.filename for each in ours} == {__file__},
    ]


# --- calls inside calls, checkpoints, Functions


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


def a_function_class(loop: Loop) -> list[Any]:
    items = ragged()
    results = loop(Cube.apply, items)
    gradients = torch.autograd.grad([r.sum() for r in results], items, create_graph=True)
    second = torch.autograd.grad([g.sum() for g in gradients], items)
    return [*results, *gradients, *second]


def a_map_inside_a_function(loop: Loop) -> list[Any]:
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                ctx.inner = x.detach().requires_grad_()
                inner = ctx.inner
                ctx.results = loop(lambda t: t.exp() * inner, [inner, inner * 2])
            return sum(r.detach() for r in ctx.results)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(ctx.results, ctx.inner, [grad, grad])[0]

    x = leaf(3)
    Inside.apply(x).sum().backward()
    return [x.grad]


def a_checkpoint_around_it(loop: Loop, reentrant: bool) -> list[Any]:
    x, c = leaf(3), leaf(3, seed=1)

    def region(x: torch.Tensor) -> torch.Tensor:
        a, b = loop(lambda t: (t * c).sin(), [x * 2, x.exp()])
        return (a * b).tanh()

    result = checkpoint(region, x, use_reentrant=reentrant)
    result.sum().backward()
    return [result, x.grad, c.grad]


def a_checkpoint_inside_it(loop: Loop, reentrant: bool) -> list[Any]:
    items, c = ragged(), leaf(1, seed=9)
    net = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Softplus())
    results = loop(
        lambda x: checkpoint(lambda t: net(t * c) * t, x, use_reentrant=reentrant), items
    )
    sum(r.sum() for r in results).backward()
    return [*results, *[x.grad for x in items], c.grad]


@pytest.mark.slow
def test_a_reentrant_checkpoint_inside_it(pool2: mpgrad.Pool) -> None:
    """It works with `backward()` only, not with `torch.autograd.grad`, which is what workers
    otherwise use."""
    for loop in (operation(pool2) for operation in OPERATIONS.values()):
        found, expected = a_checkpoint_inside_it(loop, True), a_checkpoint_inside_it(serial, True)
        assert_same(found, expected, exact=False)


def a_backward_inside_the_task(loop: Loop) -> list[Any]:
    """A task that optimises something of its own."""
    items = ragged()

    def fn(x: torch.Tensor) -> torch.Tensor:
        own = torch.zeros_like(x, requires_grad=True)
        optimizer = torch.optim.SGD([own], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ((own - x.detach()) ** 2).sum().backward()
            optimizer.step()
        return own.detach() * x

    results = loop(fn, items)
    sum(r.sum() for r in results).backward()
    return [*results, *[x.grad for x in items]]


def exceptions(loop: Loop) -> list[Any]:
    def fn(x: int) -> int:
        if x > 1:
            raise KeyError(x)
        return x

    try:
        loop(fn, [0, 1, 2, 3])
    except KeyError as error:
        return [error.args]
    return ["did not raise"]


# --- higher order


def gradient_penalty(loop: Loop) -> list[torch.Tensor]:
    items = ragged()
    results = loop(lambda x: (x**3).sum() * x, items)
    gradients = torch.autograd.grad([r.sum() for r in results], items, create_graph=True)
    penalty = sum((g**2).sum() for g in gradients)
    penalty.backward()
    return [*gradients, *[x.grad for x in items]]


def of_captures(loop: Loop) -> list[torch.Tensor]:
    items, weight = ragged(), leaf(1, seed=9)
    results = loop(lambda x: (x * weight).sin() * weight, items)
    total = sum(r.sum() for r in results)
    *gradients, of_weight = torch.autograd.grad(total, [*items, weight], create_graph=True)
    second = torch.autograd.grad(
        sum((g**2).sum() for g in gradients) * of_weight.sum(), [*items, weight]
    )
    return [*gradients, of_weight, *second]


def fourth_order(loop: Loop) -> list[torch.Tensor]:
    x, c = leaf(3), leaf(3, seed=1)
    (y,) = loop(lambda x: (x * c).exp() * x, [x])
    found = []
    for _ in range(4):
        y, of_c = torch.autograd.grad(y.sum(), [x, c], create_graph=True)
        found += [y, of_c]
    return found


def hessian_vector_product(loop: Loop) -> list[torch.Tensor]:
    items = ragged()
    results = loop(lambda x: x.prod() + (x**4).sum(), items)
    gradients = torch.autograd.grad(results, items, create_graph=True)
    return list(torch.autograd.grad(gradients, items, [torch.ones_like(x) for x in items]))


def inner_step(loop: Loop) -> list[torch.Tensor]:
    """An inner gradient step differentiated by an outer one, as in MAML."""
    weight, tasks = leaf(2), [leaf(2, seed=k) for k in range(1, 4)]
    losses = loop(lambda x: ((weight * x).tanh() ** 2).sum(), tasks)
    found = []
    for loss, task in zip(losses, tasks, strict=True):
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        faster = weight - 0.1 * gradient
        (outer,) = loop(lambda x: (faster * x).sum() ** 2, [task])
        found += torch.autograd.grad(outer, [weight, task], retain_graph=True)
    return found


def some_inputs(loop: Loop) -> list[torch.Tensor]:
    items = ragged()
    results = loop(lambda x: x**4, items)
    first = torch.autograd.grad(results[1].sum(), items[1], create_graph=True)
    second = torch.autograd.grad(first[0].sum(), items[1], create_graph=True)
    third = torch.autograd.grad(second[0].sum(), items[1])
    other = torch.autograd.grad(results[2].sum(), items[2])
    return [*first, *second, *third, *other]


def shared_item(loop: Loop) -> list[torch.Tensor]:
    x = leaf(3)
    results = loop(lambda t: (t[0] * t[1]).exp(), [(x, x), (x, 2 * x)])
    (gradient,) = torch.autograd.grad([r.sum() for r in results], x, create_graph=True)
    gradient.sum().backward()
    return [gradient, x.grad]


def chain(loop: Loop) -> list[torch.Tensor]:
    items = ragged()
    middle = loop(lambda x: x * x, items)
    results = loop(lambda x: x.sin() * x, middle)
    gradients = torch.autograd.grad([r.sum() for r in results], items, create_graph=True)
    sum((g * g).sum() for g in gradients).backward()
    return [*gradients, *[x.grad for x in items]]


def linear(loop: Loop) -> list[torch.Tensor]:
    """The gradient does not depend on the input; only on the gradient that comes in."""
    items = ragged()
    cotangents = [torch.ones_like(x).requires_grad_() for x in items]
    results = loop(lambda x: x * 3, items)
    gradients = torch.autograd.grad(results, items, cotangents, create_graph=True)
    back = torch.autograd.grad([g.sum() for g in gradients], cotangents)
    return [*gradients, *back]


def backward_creates(loop: Loop) -> list[torch.Tensor]:
    items = ragged()
    sum((r**2).sum() for r in loop(lambda x: x**2, items)).backward(create_graph=True)
    gradients = [x.grad for x in items]
    second = torch.autograd.grad([g.sum() for g in gradients], items)
    for x in items:
        x.grad = None  # else x and its gradient keep each other alive
    return [*gradients, *second]


def zero_gradients(loop: Loop) -> list[Any]:
    x, y = leaf(2), leaf(2, seed=1)
    ((a, _),) = loop(lambda t: (t[0] ** 2, t[1] ** 2), [(x, y)])
    first = torch.autograd.grad(a.sum(), [x, y], create_graph=True, allow_unused=True)
    second = torch.autograd.grad(first[0].sum(), [x, y], allow_unused=True, materialize_grads=True)
    return [*first, *second]


EXACT = [
    one_item_then_another,
    of_a_result,
    undefined_and_zero_gradients,
    an_output_that_is_the_input_or_a_view_of_it,
    an_output_that_does_not_depend_on_the_input,
    complex_numbers,
    half_precision,
    empty_and_scalar_tensors,
    tensor_hooks,
    node_hooks,
    hooks_for_saved_tensors,
    in_place_on_results,
    in_place_inside,
    under_no_grad,
    gradients_turned_on_inside_no_grad,
    backward_in_another_thread,
    anomaly_mode,
    warnings_of_the_function,
    a_function_class,
    a_backward_inside_the_task,
    exceptions,
    gradient_penalty,
    hessian_vector_product,
    some_inputs,
    linear,
    zero_gradients,
]
TO_ROUNDING = [
    strided_items_and_gradients,
    plain_backward,
    repeated_with_retain_graph,
    chosen_inputs,
    one_tensor_in_several_items_and_twice_in_one,
    a_map_inside_a_function,
    functools.partial(a_checkpoint_around_it, reentrant=True),
    functools.partial(a_checkpoint_around_it, reentrant=False),
    functools.partial(a_checkpoint_inside_it, reentrant=False),
    of_captures,
    fourth_order,
    inner_step,
    shared_item,
    chain,
    backward_creates,
]


def name_of(behaviour: Any) -> str:
    if isinstance(behaviour, str):
        return behaviour
    if isinstance(behaviour, functools.partial):
        return f"{behaviour.func.__name__}-{behaviour.keywords}"
    return str(behaviour.__name__)


def assert_same(ours: Sequence[Any], theirs: Sequence[Any], exact: bool) -> None:
    assert len(ours) == len(theirs)
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(other, torch.Tensor):
            assert mine == other, place
            continue
        assert isinstance(mine, torch.Tensor), place
        assert (mine.shape, mine.dtype, mine.requires_grad) == (
            other.shape,
            other.dtype,
            other.requires_grad,
        ), place
        close = (
            torch.equal(mine, other)
            if exact
            else torch.allclose(mine, other, rtol=1e-12, atol=1e-14)
        )
        assert close, (place, mine, other)


@pytest.mark.filterwarnings(
    "ignore:Using backward.. with create_graph=True"
)  # one behaviour is about just that
@pytest.mark.parametrize(
    ("behaviour", "operation"),
    in_turn(EXACT + TO_ROUNDING, [*OPERATIONS, "inline"], always=1),
    ids=name_of,
)
def test_nobody_can_tell(
    shared_pools: Callable[[str, int], mpgrad.Pool],
    behaviour: Callable[[Loop], list[Any]],
    operation: str,
) -> None:
    if operation == "inline":
        loop: Loop = shared_pools("inline", 1).map
    else:
        loop = OPERATIONS[operation](shared_pools("process", 2))
    assert_same(behaviour(loop), behaviour(serial), behaviour in EXACT)


# --- what has no serial loop to compare with


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # the compiler looks at it where it resumes
def test_a_compiled_function_goes_around_the_pool(pool2: mpgrad.Pool) -> None:
    c = leaf(3, seed=1)

    def fn(
        loop: Loop, total: Callable[[list[torch.Tensor]], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        y = x * 2
        a, b = loop(lambda t: (t * c).sin(), [y, y + 1])
        return (a * b * total([a, b])).sum()

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.exp() + b.exp()

    arguments = (
        (pool2.map, lambda items: pool2.map_reduce(torch.exp, items, "sum")),
        (
            lambda fn, items: list(pool2.imap(fn, items)),
            lambda items: pool2.submit(both, *items).result(),
        ),
        (
            lambda fn, items: pool2.map_async(fn, items).get(),
            lambda items: pool2.reduce("sum", [both(*items)], c * 0),
        ),
    )
    x = leaf(3)
    expected = fn(serial, lambda items: both(*items), x)
    gradients = torch.autograd.grad(expected, [x, c])
    for loop, total in arguments:
        result = torch.compile(fn, backend="eager")(loop, total, x)
        assert torch.allclose(result, expected, rtol=1e-12)
        assert all(
            torch.allclose(*pair)
            for pair in zip(torch.autograd.grad(result, [x, c]), gradients, strict=True)
        )


def test_function_classes_stand_for_their_apply(pool: mpgrad.Pool) -> None:
    items = ragged()
    for results in (
        pool.map(Cube, items),
        pool.starmap(Cube, [(x,) for x in items]),
        [pool.apply(Cube, (x,)) for x in items],
        [pool.submit(Cube, x).result() for x in items],
        list(pool.imap(Cube, items)),
        [pool.map_reduce(Cube, [x], "sum") for x in items],
    ):
        gradients = torch.autograd.grad([r.sum() for r in results], items)
        assert all(torch.equal(grad, 3 * x**2) for grad, x in zip(gradients, items, strict=True))


class Awkward(UserWarning):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def test_warnings_follow_the_callers_filters(pool2: mpgrad.Pool) -> None:
    def fn(x: int) -> int:
        warnings.warn("careful", RuntimeWarning, stacklevel=1)
        warnings.warn(Awkward(f"odd {x}"), stacklevel=1)
        return x

    with pytest.warns(RuntimeWarning, match="careful"), pytest.warns(UserWarning, match="odd 1"):
        assert pool2.map(fn, [1]) == [1]
    with pytest.raises(RuntimeWarning, match="careful"):  # this project makes them errors
        pool2.map(fn, [1, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        assert pool2.map(fn, range(9)) == list(range(9))
    assert not caught


def test_a_derivative_runs_under_the_modes_of_the_forward(pool2: mpgrad.Pool) -> None:
    def value(loop: Loop, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loop(lambda t: (t @ weight).float().sin().sum(), [x])[0]

    x, weight = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        torch.func.grad(lambda x, loop=loop: value(loop, x))(x) for loop in (pool2.map, serial)
    )
    assert torch.equal(ours, theirs)
