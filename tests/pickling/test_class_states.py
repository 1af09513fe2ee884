"""Each operation sees its own attributes of classes, whatever was loaded since.

A worker has a class once. Calls that run again, and backwards that look at a class, came to see the
attributes that the operation loaded last had set.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_turn

import mpgrad

DEFINITIONS = """
    import enum
    import torch

    class Base:
        inherited = 1.0

    class Params(Base):
        w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        rate = 1.0
        registry = {}

        def scaled(self, x): return x * self.rate
        @staticmethod
        def fixed(x): return x
        @classmethod
        def of_class(cls, x): return x * cls.rate

    class Slotted:
        __slots__ = ("x",)
        factor = 1.0

    class Mode(enum.Enum):
        FAST = 1
        SLOW = 2
        def __init__(self, number): self.label = str(number)
    Mode.FAST.weight = 1.0
    Mode.extra = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    class Net(torch.nn.Module):
        shared = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        def forward(self, x): return (self.shared * x) ** 2

    class Power(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, x):
            ctx.x = x
            return w * x * Params.rate
        @staticmethod
        def backward(ctx, grad): return grad * ctx.x * Params.rate, None

    class Alias(enum.Enum):
        A = 1
        B = 1
    class Tables(enum.Enum):
        FIRST = [1.0]
    class Other:
        inherited = 10.0
    class Derived(Base): ...
    class Frozen(type):
        def __setattr__(cls, name, value): raise AttributeError("frozen")
    class Constants(metaclass=Frozen):
        three = 3.0

    net = Net()
    def of_an_alias(x): return Alias.B.value * x
    def is_callable(_): return callable(Params())
    def of_a_frozen_class(x): return Constants.three * x
    def leaf(x): return (Params.w * x) ** 2
    def rated(x): return (Params.w * x * Params.rate) ** 2
    def of_module(x): return net(x)
    def of_enum(x): return (Mode.extra * Mode.FAST.value * x) ** 2
    def of_a_member(x): return (Params.w * Mode.FAST.weight * x * len(Mode.SLOW.label)) ** 2
    def of_a_value(x): return (Params.w * x * Tables.FIRST.value[0]) ** 2
    def derived(x): return (Params.w * x * Derived().inherited) ** 2
    def methods(x): return Params.w * Params().scaled(x) * Params.fixed(x) * Params.of_class(x)
    def registered(x): return ((Params.w + sum(Params.registry.values())) * x) ** 2
    def inherited(x): return (Params.w * x * Params.inherited) ** 2
    def slotted(x): return (Params.w * x * Slotted.factor) ** 2
    def added(x): return (Params.w * x * getattr(Params, "later", 1.0)) ** 2
    def backward(x): return Power.apply(Params.w, x)
    def objects(x): return (Params.w * x * Params().rate * type(Params()).rate) ** 2
"""

Change = Callable[[Any, int], None]  # what a step sets, after each map


def a_new_leaf(lib: Any, step: int) -> None:
    lib.Params.w = torch.tensor(2.0 + step, dtype=torch.float64, requires_grad=True)


def a_rate(lib: Any, step: int) -> None:
    lib.Params.rate = 1.0 + step


def a_leaf_of_a_module_class(lib: Any, step: int) -> None:
    lib.Net.shared = torch.nn.Parameter(torch.tensor(2.0 + step, dtype=torch.float64))


def an_attribute_of_an_enum(lib: Any, step: int) -> None:
    lib.Mode.extra = torch.tensor(3.0 + step, dtype=torch.float64, requires_grad=True)


def an_attribute_of_a_member(lib: Any, step: int) -> None:
    lib.Mode.FAST.weight = 2.0 + step


def a_value_of_an_enum(lib: Any, step: int) -> None:
    lib.Tables.FIRST.value[0] += 1.0


def another_base(lib: Any, step: int) -> None:
    lib.Derived.__bases__ = (lib.Base if step % 2 else lib.Other,)


def all_methods(lib: Any, step: int) -> None:
    lib.Params.scaled = lambda self, x: x * (2 + step)
    lib.Params.fixed = staticmethod(lambda x: x + step)
    lib.Params.of_class = classmethod(lambda cls, x: x * cls.rate * (3 + step))


def a_registry(lib: Any, step: int) -> None:
    lib.Params.registry[f"step {step}"] = lib.Params.w * (1.0 + step)


def of_the_base(lib: Any, step: int) -> None:
    lib.Base.inherited = 1.0 + step


def of_a_class_with_slots(lib: Any, step: int) -> None:
    lib.Slotted.factor = 1.0 + step


def one_more_or_less(lib: Any, step: int) -> None:
    if step % 2:
        del lib.Params.later
    else:
        lib.Params.later = 5.0 + step


def nothing(lib: Any, step: int) -> None: ...


CASES: dict[str, tuple[str, Change]] = {
    "the same leaf": ("leaf", nothing),
    "another leaf": ("leaf", a_new_leaf),
    "a number": ("rated", a_rate),
    "a parameter of a module's class": ("of_module", a_leaf_of_a_module_class),
    "the same parameter": ("of_module", nothing),
    "an enumeration": ("of_enum", an_attribute_of_an_enum),
    "an enumeration's member": ("of_a_member", an_attribute_of_a_member),
    "an enumeration's value": ("of_a_value", a_value_of_an_enum),
    "bases": ("derived", another_base),
    "methods": ("methods", all_methods),
    "a registry": ("registered", a_registry),
    "a base": ("inherited", of_the_base),
    "a class with slots": ("slotted", of_a_class_with_slots),
    "added and deleted": ("added", one_more_or_less),
    "of an object": ("objects", a_rate),
}
POOLS: dict[str, dict[str, Any]] = {
    "recompute": {"graphs": "recompute"},
    "keep": {"graphs": "keep"},
    "auto": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that this process and workers import from."""
    made = tmp_path_factory.mktemp("classes")
    sys.path.insert(0, str(made))
    yield made
    sys.path.remove(str(made))


@pytest.fixture(scope="module")
def pools(fork_server: mpgrad.Pool, folder: Path) -> Iterator[dict[str, mpgrad.Pool]]:
    with contextlib.ExitStack() as stack:
        made = {
            name: stack.enter_context(mpgrad.Pool(1, **options)) for name, options in POOLS.items()
        }
        for pool in made.values():
            pool.apply(abs, (-1,))
        yield made


class Script:
    """Holds definitions that have no module, as those of a script."""

    def __init__(self) -> None:
        names = vars(self)
        names["__name__"] = "__main__"
        exec(textwrap.dedent(DEFINITIONS), names)


NUMBERS = itertools.count()


@pytest.fixture(params=["module", "script"])
def definitions(request: pytest.FixtureRequest, folder: Path) -> Callable[[], Any]:
    """Return a function that makes all of them anew."""
    if request.param == "script":
        return Script

    def module() -> Any:
        name = f"states_{next(NUMBERS)}"
        (folder / f"{name}.py").write_text(textwrap.dedent(DEFINITIONS))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return module


def serial(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return [fn(each) for each in items]


def values_and_gradients(mapped: Callable[..., Any], lib: Any, name: str, change: Change) -> Any:
    """Return the values of three maps, each with a change after it, then all gradients of one
    backward through the three."""
    maps, leaves = [], dict[int, torch.Tensor]()
    for step in range(3):
        leaves |= {id(each): each for each in (lib.Params.w, lib.Mode.extra, lib.Net.shared)}
        maps.append(mapped(getattr(lib, name), [1.0, 2.0, 3.0]))
        change(lib, step)
    total = sum((1 + place) * sum(results) for place, results in enumerate(maps))
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return [[each.item() for each in results] for results in maps], found


@pytest.mark.parametrize(("case", "options"), in_turn(CASES, POOLS))
def test_an_operation_keeps_its_classes(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any], case: str, options: str
) -> None:
    results, grads = values_and_gradients(pools[options].map, definitions(), *CASES[case])
    wanted_results, wanted_grads = values_and_gradients(serial, definitions(), *CASES[case])
    assert results == wanted_results
    assert grads == wanted_grads


@pytest.mark.parametrize("options", POOLS)
def test_a_backward_reads_the_classes_of_its_operation(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any], options: str
) -> None:
    lib = definitions()
    first = pools[options].map(lib.backward, [1.0, 2.0])
    lib.Params.rate = 10.0
    second = pools[options].map(lib.backward, [1.0, 2.0])
    (grad,) = torch.autograd.grad(sum(first) + sum(second), lib.Params.w)
    assert grad == 3.0 + 30.0


def test_classes_of_calls_that_alternate(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any]
) -> None:
    lib, pool = definitions(), pools["auto"]
    started = []
    for step in range(3):
        started.append(pool.map_async(lib.rated, [1.0] * 12, chunksize=1))
        lib.Params.rate = 2.0 + step
    assert [[each.item() for each in one.get()] for one in started] == [
        [4.0 * rate**2] * 12 for rate in (1, 2, 3)
    ]


def test_what_a_task_writes_to_a_class_stays_until_the_caller_writes(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any]
) -> None:
    lib, pool = definitions(), pools["auto"]

    def counts(x: float) -> float:
        lib.Params.rate += x
        return lib.Params.rate

    assert pool.map(counts, [1.0, 1.0]) == [2.0, 3.0]
    lib.Params.rate = 10.0
    assert pool.map(counts, [1.0]) == [11.0]


def test_nothing_is_kept_of_forgotten_operations(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any]
) -> None:
    lib, pool = definitions(), pools["auto"]
    for _ in range(3):
        pool.map(lib.leaf, [1.0])
        lib.Params.w = torch.zeros(1000, requires_grad=True)

    def tensors(_: int) -> int:
        gc.collect()
        return sum(type(each) is torch.Tensor and each.numel() == 1000 for each in gc.get_objects())

    # that which the class has now
    assert pool.map(tensors, [0]) <= [1]


def test_an_enumeration_with_an_alias(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any]
) -> None:
    """Its attributes were looked up under the alias: KeyError."""
    assert pools["auto"].map(definitions().of_an_alias, [2.0]) == [2.0]


def test_methods_that_are_deleted(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any]
) -> None:
    """A name with two underscores stayed in the worker."""
    lib = definitions()
    lib.Params.__call__ = lambda self: None
    assert pools["auto"].map(lib.is_callable, [0]) == [True]
    del lib.Params.__call__
    assert pools["auto"].map(lib.is_callable, [0]) == [False]


def test_a_metaclass_that_lets_nobody_set_attributes(
    pools: dict[str, mpgrad.Pool], definitions: Callable[[], Any]
) -> None:
    assert pools["auto"].map(definitions().of_a_frozen_class, [2.0]) == [6.0]


class EqualClasses(type):
    def __eq__(cls, other: object) -> bool:
        return isinstance(other, EqualClasses)

    def __hash__(cls) -> int:
        return 1


class One(metaclass=EqualClasses):
    rate = 1.0


class Two(metaclass=EqualClasses):
    rate = 2.0


def test_classes_that_are_equal_are_refused(pools: dict[str, mpgrad.Pool]) -> None:
    """The table of classes is a dictionary, so both became one."""
    with pytest.raises(
        TypeError, match=r"'(One|Two)'.*its metaclass 'EqualClasses' defines __eq__"
    ):
        pools["auto"].map(lambda x: (One.rate + Two.rate) * x, [1.0])


@pytest.mark.parametrize("engine", ["thread", "inline"])
def test_a_pool_in_a_task_of_the_callers_process(
    fork_server: mpgrad.Pool, definitions: Callable[[], Any], engine: Any
) -> None:
    """Its workers did not know the copies of classes that such a task has, and took functions of
    modules from their own imports."""
    lib = definitions()
    leaf = lib.leaf
    lib.Params.w = torch.tensor(3.0, dtype=torch.float64)

    def nested(number: float) -> tuple[float, float]:
        x = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        with mpgrad.Pool(1) as inner:
            (result,) = inner.map(leaf, [x])
            (grad,) = torch.autograd.grad(result, x)
        return result.item(), grad.item()

    with mpgrad.Pool(1, engine=engine) as pool:
        assert pool.map(nested, [3.0]) == [(81.0, 54.0)]
