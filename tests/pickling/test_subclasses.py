"""Tensors of classes of their own keep class and attributes; gradients come as in the loop."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import constraints

import mpgrad
from mpgrad.testing import assert_same_as_serial


class Tagged(torch.Tensor):
    """A plain subclass, with attributes."""

    tag: Any


class Wrapping(torch.Tensor):
    """Gives its results its class, and what it knows of units."""

    unit: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, Wrapping):
            units = [each.unit for each in args if hasattr(each, "unit")]
            found.unit = "·".join(units) if len(units) > 1 else "".join(units)
        return found


class Strict(torch.Tensor):
    """Knows few functions, and has methods under names of PyTorch's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in {"mul", "sum", "cos", "__get__", "requires_grad_"}:
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Sphere(torch.nn.Module):
    """A manifold with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.radius = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.radius


class OnManifold(torch.nn.Parameter):
    """As geoopt's: a parameter that wants more than a tensor when it is made."""

    manifold: Any

    def __new__(cls, data: torch.Tensor, manifold: Any, requires_grad: bool = True) -> Any:
        made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.manifold = manifold
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("by its own way it would be another leaf")


class Slotted(torch.Tensor):
    __slots__ = ("unit",)


class Batch(torch.Tensor):
    @property
    def shape(self) -> Any:
        return torch.Tensor.size(self)[:1]


class Frozen(torch.Tensor):
    requires_grad = False


class Seen(torch.Tensor):
    """Sees what PyTorch does with it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    """Of which sums are exact: gradients of captures are added up in any order."""
    return torch.randint(-8, 8, (count,), generator=torch.Generator().manual_seed(seed)).double()


def tagged(values: torch.Tensor, tag: Any = "t") -> Tagged:
    made = values.as_subclass(Tagged)
    made.tag = tag
    return made


def wrapping(values: torch.Tensor) -> Wrapping:
    made = values.as_subclass(Wrapping)
    made.unit = "m"
    return made


def strict(values: torch.Tensor) -> Strict:
    return values.as_subclass(Strict)


def on_manifold(values: torch.Tensor) -> OnManifold:
    return OnManifold(values, Sphere())


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": tagged,
    "wraps": wrapping,
    "strict": strict,
    "parameter": on_manifold,
}
SIZES = 5, 2_000  # the second one goes through shared memory


def facts_of(value: Any, depth: int = 0) -> Any:
    """All that can be told apart of a result."""
    if isinstance(value, dict):
        return {name: facts_of(each, depth) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [type(value), *(facts_of(each, depth) for each in value)]
    if isinstance(value, torch.nn.Module):
        return type(value), facts_of(dict(value.named_parameters()), depth)
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        elements = value.detach().contiguous().numpy().tobytes()
        own = type(value), value.is_leaf, value.requires_grad, value.stride(), value.dtype, elements
    return own, facts_of(vars(value), depth + 1) if depth < 3 else None


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, list | tuple):
        return list(itertools.chain.from_iterable(map(tensors_in, value)))
    return [value] if isinstance(value, torch.Tensor) else []


def run(results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> Any:
    """What there is after a backward from the results."""
    facts = facts_of(list(results))
    needing = [each for each in tensors_in(list(results)) if each.requires_grad]
    with torch._C.DisableTorchFunctionSubclass():
        loss = sum((each.double() * each.double()).sum() for each in needing)
    torch.autograd.backward(loss)
    return facts, [facts_of(each.grad) for each in inputs]


Case = tuple[Callable[[Any], Any], list[Any], list[torch.Tensor]]


def assert_as_serial(pool: mpgrad.Pool, make: Callable[[], Case]) -> None:
    """`make` gives the function, the items and the leaves whose gradients are compared."""
    fn, items, inputs = make()
    serial = run([fn(item) for item in items], inputs)
    fn, items, inputs = make()
    assert run(pool.map(fn, items), inputs) == serial
    fn, items, inputs = make()
    assert run(pool.map(fn, items, chunksize=1), inputs) == serial
    fn, items, inputs = make()
    assert run([pool.submit(fn, item).result() for item in items], inputs) == serial


def doubled(x: Any) -> Any:
    assert type(x) in {Tagged, Wrapping, Strict, OnManifold}
    return x * 2


def summed(x: Any) -> Any:
    return (x * x).sum()


def with_facts(x: Any) -> Any:
    is_parameter = isinstance(x, torch.nn.Parameter)
    return {"y": x.cos() * 2, "x": x * 1, "facts": facts_of(x), "is": is_parameter}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fn", [doubled, summed, with_facts])
def test_leaves_among_the_arguments(pool: mpgrad.Pool, fn: Callable[[Any], Any], kind: str) -> None:
    def make() -> Any:
        inputs = [KINDS[kind](numbers(size)).requires_grad_() for size in (*SIZES, *SIZES)]
        return fn, inputs, inputs

    assert_as_serial(pool, make)


def test_constants_of_libraries_are_these(pool: mpgrad.Pool) -> None:
    """They are compared by `is`: the types of pypose's tensors are such."""
    item = tagged(numbers(2), constraints.real)
    ((result, is_real),) = pool.map(lambda x: (x, x.tag is constraints.real), [item])
    assert is_real
    assert result.tag is constraints.real


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_history_and_in_dictionaries(pool: mpgrad.Pool, kind: str) -> None:
    """What has a history may be written to in place; one tensor twice stays one."""

    def fn(item: dict[str, Any]) -> dict[str, Any]:
        x, leaf = item["x"], item["more"][0]
        assert x is item["more"][1]
        y = x * leaf
        if kind in ("plain", "wraps"):
            x.mul_(3)
            with torch.no_grad():
                y = y * leaf.sum()
            y = x * y
        has_graph = x.grad_fn is not None
        return {"sum": [y.sum(), item["name"]], "y": y, "same": item["more"][0], "graph": has_graph}

    def make() -> Any:
        leaves = [KINDS[kind](numbers(7, n)).requires_grad_() for n in range(6)]
        products = [leaf * 2 for leaf in leaves[3:]]
        pairs = zip(products, leaves, strict=False)
        items = [{"name": "n", "x": x, "more": [leaf, x]} for x, leaf in pairs]
        return fn, items, leaves

    task, items, leaves = make()
    serial = [task(item) for item in items]
    same = [each.pop("same") for each in serial]
    found = run(serial, leaves)
    task, items, leaves = make()
    results = pool.map(task, items)
    back = [each.pop("same") for each in results]
    assert run(results, leaves) == found
    for one, other in zip(back, same, strict=True):
        assert type(one) is type(other)
        assert one.grad_fn is not None
        assert vars(one).keys() == vars(other).keys()


class Net(torch.nn.Module):
    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.weight: Any = KINDS[kind](numbers(size, 9))
        if kind == "parameter":
            assert dict(self.named_parameters())["weight"] is self.weight
        else:
            self.weight.requires_grad_()

    def forward(self, x: torch.Tensor) -> Any:
        assert self.weight.is_leaf
        assert type(self.weight) is not torch.Tensor
        y = self.weight * x
        manifold = getattr(self.weight, "manifold", None)
        return y if manifold is None else manifold.projected(y)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_by_a_module(pool: mpgrad.Pool, kind: str, size: int) -> None:
    def make() -> Any:
        net = Net(kind, size)
        held = [each for each in vars(net.weight).values() if isinstance(each, torch.nn.Module)]
        items = [numbers(size, n).requires_grad_(n > 0) for n in range(3)]
        return net, items, [net.weight, *[each.radius for each in held], *items]

    assert_as_serial(pool, make)


def test_what_it_holds_is_a_capture_too(pool: mpgrad.Pool) -> None:
    """Tensors, modules and itself, in its `__dict__`."""

    def make() -> Any:
        scale = numbers(4, 1).requires_grad_()
        net = torch.nn.Linear(4, 2).double()
        x = tagged(numbers(4, 2).requires_grad_() * 1, {"scale": scale, "net": net})
        with torch.no_grad():
            for each in x.tag["net"].parameters():
                each.copy_(numbers(each.numel(), 3).reshape(each.shape))
        x.tag["me"] = x

        def fn(y: Any) -> Any:
            assert x.tag["me"] is x
            return x.tag["net"](x.as_subclass(torch.Tensor) * y.tag["scale"]) * x.tag["scale"].sum()

        other = tagged(numbers(4, 5), {"scale": numbers(4, 6).requires_grad_()})
        return fn, [other, other], [scale, other.tag["scale"], *x.tag["net"].parameters()]

    assert_as_serial(pool, make)


def test_views_of_plain_tensors_and_spread_ones(pool: mpgrad.Pool) -> None:
    def make() -> Any:
        base = numbers(60, 1).requires_grad_()
        views = [base.view(6, 10)[:, n : n + 4].as_subclass(Tagged) for n in range(3)]
        views.append(base[::7].as_subclass(Tagged))
        views.append(base[:1].expand(8).as_subclass(Tagged))
        return doubled, views, [base]

    assert_as_serial(pool, make)


def test_without_gradients_and_other_dtypes(pool: mpgrad.Pool) -> None:
    def make() -> Any:
        values = torch.arange(5), torch.ones(3, dtype=torch.bool), torch.zeros(0), torch.tensor(2)
        items = [tagged(each) for each in values]
        return lambda x: (x, x * 2, type(x) is Tagged), items, []

    with torch.no_grad():
        fn, items, _ = make()
        assert facts_of(pool.map(fn, items)) == facts_of([fn(item) for item in items])
        with torch.inference_mode():
            assert facts_of(pool.map(fn, items)) == facts_of([fn(item) for item in items])


def test_leaves_that_the_function_makes(pool: mpgrad.Pool) -> None:
    """They are leaves here, too; and a frozen parameter stays one."""

    def fn(x: torch.Tensor) -> Any:
        frozen = OnManifold(x.detach(), None, requires_grad=False)
        return OnManifold(x.detach() * 2, Sphere()), frozen, tagged(x.detach())

    items = [numbers(3, n).requires_grad_() for n in range(2)]
    for results, serial in zip(pool.map(fn, items), map(fn, items), strict=True):
        assert facts_of(results) == facts_of(serial)


def test_the_node_of_a_result_is_the_pools(pool: mpgrad.Pool) -> None:
    x = wrapping(numbers(3)).requires_grad_()
    y, z = pool.map(doubled, [x, x])
    assert type(y.grad_fn).__name__ == "CallBackward"
    assert (y.unit, y.is_leaf) == ("m", False)
    product = y * z
    assert (type(product), product.unit) == (Wrapping, "m·m")
    (grad,) = torch.autograd.grad(product.sum(), x)
    again = x * 2
    (serial,) = torch.autograd.grad((again * (x * 2)).sum(), x)
    assert facts_of(grad) == facts_of(serial)


def test_derivatives_of_derivatives_and_hooks(pool: mpgrad.Pool) -> None:
    def facts(call: Callable[..., Any]) -> Any:
        x, heard = tagged(numbers(3)).requires_grad_(), list[Any]()
        x.register_hook(lambda grad: heard.append(type(grad)))
        y = call(cubed, [x])[0]
        y.register_hook(lambda grad: heard.append(type(grad)))
        first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad((first * first).sum(), x)[0]
        y = call(cubed, [x])[0]
        y.sum().backward()
        return heard, facts_of([first, second, x.grad])

    assert facts(pool.map) == facts(lambda fn, items: [fn(item) for item in items])


def cubed(x: Any) -> Any:
    return x * x * x


def test_chains_of_calls(pool: mpgrad.Pool) -> None:
    """Results that others get as futures, whether they are asked for or not."""

    def chain(call: Callable[..., Any], value: Callable[[Any], Any]) -> Any:
        x = wrapping(numbers(4)).requires_grad_()
        first = call(cubed, x)
        second = call(torch.mul, first, 2)
        third = value(call(cubed, second))
        both = value(call(torch.mul, second, value(second)))
        return run([third, both, value(first)], [x])

    assert chain(lambda fn, *args: pool.submit(fn, *args), lambda future: future.result()) == chain(
        lambda fn, *args: fn(*args), lambda value: value
    )


def added(one: Any, other: Any) -> Any:
    return one + other


def added_in_place(total: Any, x: Any) -> None:
    assert type(total) is type(x) is Wrapping
    total.mul_(2).add_(x * x)


def test_reductions(pool: mpgrad.Pool) -> None:
    def make() -> list[Any]:
        return [tagged(numbers(5, n)).requires_grad_() for n in range(6)]

    items = make()
    serial = run([functools.reduce(added, map(cubed, items))], items)
    items = make()
    assert run([pool.map_reduce(cubed, items, added)], items) == serial


@pytest.mark.parametrize("size", SIZES)
def test_reductions_in_place(pool: mpgrad.Pool, size: int) -> None:
    """Also into what is a leaf in the loop: the caller's target is not written to."""

    def make() -> tuple[list[Any], Any]:
        items = [wrapping(numbers(size, n)).requires_grad_() for n in range(3)]
        return items, wrapping(numbers(size, 7)).requires_grad_()

    items, target = make()
    total = target * 1
    for item in items:
        added_in_place(total, item)
    serial = run([total], [*items, target])
    items, target = make()
    assert run([pool.reduce(added_in_place, items, target * 1)], [*items, target]) == serial


@pytest.mark.parametrize("graphs", ["recompute", "keep"])
def test_graphs_that_are_made_again(fork_server: mpgrad.Pool, graphs: Any) -> None:
    def make() -> Any:
        net = Net("parameter", 6)
        inputs = [wrapping(numbers(6, n)).requires_grad_() for n in range(4)]
        return net, inputs, [net.weight, *inputs]

    with mpgrad.Pool(2, graphs=graphs) as pool:
        fn, items, inputs = make()
        serial = run([fn(item) for item in items], inputs)
        fn, items, inputs = make()
        results = pool.map(fn, items)
        if graphs == "keep":
            for worker in pool.stats().workers:
                os.kill(worker.pid, signal.SIGKILL)
        assert run(results, inputs) == serial


def test_classes_made_in_a_function_travel_by_value(pool: mpgrad.Pool) -> None:
    class Local(torch.Tensor):
        def twice(self) -> Any:
            return self * 2

    def make() -> Any:
        inputs = [numbers(3, n).as_subclass(Local).requires_grad_() for n in range(2)]
        return lambda x: (x.twice(), isinstance(x, Local)), inputs, inputs

    assert_as_serial(pool, make)


SCRIPT = """
import torch, mpgrad

class Mine(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, Mine):
            found.unit = next((each.unit for each in args if hasattr(each, "unit")), None)
        return found

class Own(torch.nn.Parameter):
    def __new__(cls, data, unit):
        made = torch.Tensor._make_subclass(cls, data, True)
        made.unit = unit
        return made

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Own(torch.ones(3), "kg")

    def forward(self, x):
        assert type(self.weight) is Own and self.weight.is_leaf and self.weight.unit == "kg"
        return self.weight * x

def made(n):
    x = torch.full((n,), 2.0).as_subclass(Mine)
    x.unit = "m"
    return x.requires_grad_()

if __name__ == "__main__":
    for engine in ("process", "thread", "inline"):
        with mpgrad.Pool(2, engine=engine) as pool:
            mpgrad.testing.assert_same_as_serial(Net(), [made(3), made(3)], pool)
            result = pool.apply(made, (4,))
            print(engine, type(result) is Mine, result.is_leaf, result.unit)
"""


@pytest.mark.slow
def test_classes_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    lines = [f"{engine} True True m" for engine in ("process", "thread", "inline")]
    assert ended.stdout.splitlines() == lines, ended.stderr[-3000:]


def test_the_check_against_the_serial_loop(pool2: mpgrad.Pool) -> None:
    x = wrapping(numbers(3)).requires_grad_()
    assert_same_as_serial(with_facts, [x, tagged(numbers(4) * 1)], pool2)


# --- what is refused


REFUSED = {
    "Slotted": (
        lambda: torch.ones(2).as_subclass(Slotted),
        r"which has __slots__ of its own; pass tensor.as_subclass\(torch.Tensor\), and take "
        r"as_subclass\(Slotted\)",
    ),
    "Batch": (
        lambda: torch.ones(2, 3).as_subclass(Batch),
        r"which has shape of its own; pass tensor",
    ),
    "Frozen": (
        lambda: torch.ones(2).as_subclass(Frozen),
        r"which has requires_grad of its own; pass tensor",
    ),
    "Seen": (
        lambda: torch.Tensor._make_subclass(Seen, torch.ones(2)),
        "whose __torch_dispatch__ may see other tensors than its own; pass the plain tensors",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name_and_path(pool2: mpgrad.Pool, name: str) -> None:
    make, words = REFUSED[name]
    tensor, called = make(), rf"a tensor of class {Seen.__module__}\.{name}"
    words = f"cannot be sent to or from a worker: {called}, {words}"
    with pytest.raises(TypeError, match=rf"item 1 {words}.*\(\['a'\]\[0\]\)$"):
        pool2.map(lambda x: 1, [1, {"a": [tensor]}])
    with pytest.raises(TypeError, match=f"item 0 {words}"):
        pool2.map(lambda x: 1, [tensor])
    with pytest.raises(TypeError, match=rf"the function {words}.*\(<lambda>'s closure: tensor\)$"):
        pool2.map(lambda x: tensor, [1])
    holder = tagged(torch.ones(1), {"b": tensor})
    with pytest.raises(TypeError, match=rf"item 0 {words}.*\(tag\['b'\]\)$"):
        pool2.map(lambda x: 1, [holder])
    with pytest.raises(TypeError, match=rf"the result {words}.*\(\[1\]\)"):
        pool2.map(lambda x: [x, make()], [1])


def test_the_remedy(pool: mpgrad.Pool) -> None:
    def make() -> Any:
        leaves = [numbers(3, n).requires_grad_() for n in range(2)]
        items = [leaf.as_subclass(Slotted).as_subclass(torch.Tensor) for leaf in leaves]
        return lambda x: (x.as_subclass(Slotted) * 2).as_subclass(torch.Tensor), items, leaves

    assert_as_serial(pool, make)
