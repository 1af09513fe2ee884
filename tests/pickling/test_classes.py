"""Items and results of classes that are carried by value: always as they are now."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import ipaddress
import operator
import sys
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypedDict, TypeVar

import pytest
import torch
import typing_extensions

import mpgrad

pytestmark = pytest.mark.quick

Tensor = torch.Tensor


def made() -> Any:
    @dataclasses.dataclass
    class Item:
        x: Tensor
        scale = 2.0
        weight = None

        def scaled(self) -> Tensor:
            kind = type(self)
            return self.x * kind.scale * (1.0 if kind.weight is None else kind.weight)

    return Item


def leaves(count: int) -> list[Tensor]:
    return [
        torch.full((3,), 1.0 + number, dtype=torch.float64).requires_grad_()
        for number in range(count)
    ]


def test_classes_and_gradients(pool: mpgrad.Pool) -> None:
    item = made()

    def fn(given: Any) -> Any:
        assert type(given) is item
        return item(given.scaled())

    for _ in range(3):
        xs = leaves(40)
        results = pool.map(fn, [item(x) for x in xs])
        assert all(type(result) is item for result in results)
        torch.stack([result.scaled() for result in results]).sum().backward()
        assert all(torch.equal(x.grad, torch.full_like(x, 4)) for x in xs if x.grad is not None)
        assert all(x.grad is not None for x in xs)


def sentinels() -> Any:
    """A class that is carried by value, and whose items have objects in common with it."""
    nothing = object()

    class Item:
        EMPTY = object()
        shared: ClassVar[list[int]] = []

        def __init__(self, x: Tensor) -> None:
            self.x, self.empty, self.nothing, self.log = x, Item.EMPTY, nothing, Item.shared

        def is_whole(self) -> bool:
            return (
                self.empty is type(self).EMPTY
                and self.nothing is nothing
                and self.log is type(self).shared
            )

    return Item


def test_what_an_item_and_its_class_have_in_common_stays_one(pool2: mpgrad.Pool) -> None:
    item = sentinels()
    for _ in range(4):
        assert all(pool2.map(lambda given: given.is_whole(), [item(x) for x in leaves(40)]))


def test_the_callers_classes_stay_as_they_are(pool: mpgrad.Pool) -> None:
    item = sentinels()
    # a cache of pickle's
    before = {name: value for name, value in vars(item).items() if name != "__slotnames__"}
    items = [item(x) for x in leaves(40)]
    for fn in (lambda given: given.x * 2, lambda given: given, lambda given: item(given.x)):
        for _ in range(3):
            results = pool.map(fn, items)
        assert {name: vars(item)[name] for name in before} == before and all(
            each.is_whole() for each in items
        )
    assert all(type(each) is item for each in results)


def test_a_class_that_only_the_worker_has(pool: mpgrad.Pool) -> None:
    def fn(given: int) -> Any:
        class Local:
            twice = 2 * given

            def __init__(self) -> None:
                self.number = given

        return Local()

    results = pool.map(fn, range(20))
    assert [(each.number, each.twice) for each in results] == [
        (number, 2 * number) for number in range(20)
    ]
    assert len(set(map(type, results))) == 20


def test_a_class_is_as_it_is_when_the_operation_begins(pool: mpgrad.Pool) -> None:
    item = made()
    for scale in (2.0, 3.0, 2.0):
        item.scale = scale
        xs = leaves(40)
        results = pool.map(lambda given: given.scaled(), [item(x) for x in xs])
        assert all(torch.equal(result, x * scale) for result, x in zip(results, xs, strict=True))


def test_a_function_may_bring_the_class_too(
    shared_pools: Callable[[str, int], mpgrad.Pool],
) -> None:
    item, pool = made(), shared_pools("process", 1)
    for scale in (2.0, 3.0, 2.0):
        item.scale = scale
        xs = leaves(10)
        if scale == 2:
            results = pool.map(lambda given: given.scaled(), [item(x) for x in xs])
        else:
            results = pool.map(lambda x: item(x).scaled(), xs)
        assert all(torch.equal(result, x * scale) for result, x in zip(results, xs, strict=True))


def test_gradients_of_what_a_class_holds(pool: mpgrad.Pool) -> None:
    item = made()
    weight = torch.full((), 5.0, dtype=torch.float64, requires_grad=True)
    for held in (None, weight, None):
        item.weight, weight.grad = held, None
        xs = leaves(20)
        torch.stack(
            pool.map(lambda given: given.scaled().sum(), [item(x) for x in xs])
        ).sum().backward()
        assert (weight.grad is None) == (held is None)
        if weight.grad is not None:
            assert weight.grad == 2 * sum(x.sum() for x in xs)


def slotted() -> list[type]:
    class Slots:
        __slots__ = ("__weakref__", "x")

        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Inheriting(Slots):
        __slots__ = ("_Inheriting__own",)

        def __init__(self, x: Tensor) -> None:
            super().__init__(x)
            self.__own = x

    class Emptied(Inheriting):
        __slots__ = ()

    class Open(Slots):
        __slots__ = "__dict__"

    @dataclasses.dataclass(slots=True)
    class Data:
        x: Tensor

    @dataclasses.dataclass(slots=True, frozen=True)
    class Frozen:
        x: Tensor

    class Named(NamedTuple):
        x: Tensor

    return [Slots, Inheriting, Emptied, Open, Data, Frozen, Named]


def test_a_metaclass_that_adds_slots_of_its_own(pool: mpgrad.Pool) -> None:
    class Adding(type):
        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
            namespace["__slots__"] = (*namespace.get("__slots__", ()), "__weakref__")
            return super().__new__(cls, name, bases, namespace)

    class Operations(metaclass=Adding):
        __slots__ = ()

        @staticmethod
        def twice(x: int) -> int:
            return 2 * x

    assert pool.map(lambda x: Operations.twice(x), [1, 2]) == [2, 4]


def test_a_slot_with_two_names(pool: mpgrad.Pool) -> None:
    class Named:
        __slots__ = ("x",)

        def __init__(self, x: Tensor) -> None:
            self.x = x

    Named.alias = Named.x  # type: ignore[attr-defined]
    (x,) = leaves(1)
    (result,) = pool.map(lambda given: given.alias * 2, [Named(x)])
    assert torch.equal(result, x * 2)


def is_open(instance: Any) -> bool:
    return hasattr(instance, "__dict__")


@pytest.mark.parametrize("item", slotted(), ids=lambda item: item.__name__)
def test_slots_are_slots_in_workers(pool: mpgrad.Pool, item: Any) -> None:
    """cloudpickle makes such classes again without them: then what came back had a __dict__ that is
    none of the caller's."""
    for _ in range(2):
        xs = leaves(10)
        results = pool.map(lambda given: (item(given.x * 2), is_open(given)), [item(x) for x in xs])
        assert all(type(result) is item and had == is_open(result) for result, had in results)
        torch.stack([result.x.sum() for result, _ in results]).sum().backward()
        assert all(x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2)) for x in xs)


def test_classes_of_exceptions_and_warnings_stay_as_they_are(pool: mpgrad.Pool) -> None:
    class Unlucky(Exception):
        NOTHING = object()

        def __init__(self, number: int, why: object) -> None:
            super().__init__(number)
            self.why = why

    class Odd(UserWarning):
        NOTHING = object()

    def fn(number: int) -> int:
        warnings.warn(Odd("so"), stacklevel=1)
        if number:
            raise Unlucky(number, "no luck")
        return number

    before = [dict(vars(each)) for each in (Unlucky, Odd)]
    for _ in range(3):
        with pytest.warns(Odd), pytest.raises(Unlucky) as caught:
            pool.map(fn, [0, 0, 3])
        assert type(caught.value) is Unlucky and (caught.value.args, caught.value.why) == (
            (3,),
            "no luck",
        )
        assert [dict(vars(each)) for each in (Unlucky, Odd)] == before


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_classes_of_an_initializer_stay_as_they_are(engine: str, fork_server: mpgrad.Pool) -> None:
    class Settings:
        NOTHING = object()

    before = dict(vars(Settings))
    with mpgrad.Pool(1, initializer=lambda: Settings.NOTHING, engine=engine) as pool:
        assert pool.map(lambda x: x, [1]) == [1]
    assert dict(vars(Settings)) == before


def test_names_of_classes_in_classes(pool: mpgrad.Pool) -> None:
    """Symptom: "Inner" for "Outer.Inner". Cause: cloudpickle makes a class again without it."""

    class Outer:
        class Inner:
            __slots__ = ("x",)

        class Pair(NamedTuple):
            x: int = 0

    def names(_: int) -> list[str]:
        return [each.__qualname__ for each in (Outer, Outer.Inner, Outer.Pair)]

    assert pool.map(names, [0]) == [names(0)]


def test_partial_methods(pool: mpgrad.Pool) -> None:
    """Symptom: "_partial_new() missing 1 required positional argument: 'func'" on Python 3.14."""

    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def times(self, by: float, x: Tensor, plus: float = 0.0) -> Tensor:
            return x * by * self.factor + plus

        twice = functools.partialmethod(times, 2.0, plus=1.0)
        half = functools.partialmethod(lambda self, x: x * 0.5)

    scale = Scale(3.0)
    (x,) = leaves(1)
    (result,) = pool.map(lambda each: scale.twice(each) + scale.half(each), [x])
    result.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 6.5))
    (made,) = pool.map(lambda each: each, [functools.partialmethod(Scale.times, 2.0)])
    assert (made.args, made.keywords) == ((2.0,), {})


UNRESOLVED = """
class Scale:
    weight: OnlyForCheckers
    def __init__(self, factor): self.factor = factor
    def __call__(self, x: OnlyForCheckers): return x * self.factor

def twice(x: torch.Tensor) -> OnlyForCheckers: return x * 2
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are made with the function")
def test_annotations_that_cannot_be_made(pool: mpgrad.Pool) -> None:
    """As of what is imported under `if TYPE_CHECKING`. Symptom: NameError, where the serial loop
    does not look."""
    script: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(compile(UNRESOLVED, "script", "exec", dont_inherit=True), script)
    twice, scale = script["twice"], script["Scale"](3.0)
    for _ in range(2):
        (x,) = leaves(1)
        (result,) = pool.map(lambda each: twice(each) + scale(each), [x])
        result.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 5.0))
    texts = {"x": "torch.Tensor", "return": "OnlyForCheckers"}
    assert pool.map(lambda _: twice.__annotations__, [0]) == [texts]


def with_effects() -> dict[str, Any]:
    """Classes whose definition runs code of the user's."""
    names: dict[str, Any] = {"__name__": "__main__"}
    source = """if True:
        import abc

        class Base:
            registry, count = {}, 0
            def __init_subclass__(cls, *, key, **rest):  # a required keyword
                super().__init_subclass__(**rest)
                Base.registry[key] = cls
                Base.count += 1
                cls.key = key
        class A(Base, key="a"): ...
        class B(A, key="b"): __slots__ = ("y",)

        class Meta(type):
            made = []
            def __new__(mcs, name, bases, names, *, tag):
                made = super().__new__(mcs, name, bases, names)
                made.tag = tag
                return made
            def __init__(cls, name, bases, names, **rest): Meta.made.append(name)
        class M(metaclass=Meta, tag="m"): ...

        class Counting(abc.ABCMeta):
            count = 0
            def __new__(mcs, *args):
                Counting.count += 1
                return super().__new__(mcs, *args)
        class Abstract(metaclass=Counting):
            @abc.abstractmethod
            def f(self): ...
        class Concrete(Abstract):
            def f(self): return 3

        def registered(_):
            same = Base.registry["a"] is A, Base.registry["b"] is B
            return sorted(Base.registry), Base.count, A.key, B.key, same
        def metaclass(_): return Meta.made, M.tag, isinstance(M(), M), type(M) is Meta
        def abstract(_):
            try: Abstract()
            except TypeError: return Counting.count, Concrete().f()
        def in_an_item(item): return type(item) is A, Base.count
        def derived(_):
            class C(A, key="c"): ...
            return Base.count, sorted(Base.registry), C.key
    """
    exec(source, names)
    return names


def test_code_that_ran_when_a_class_was_defined_does_not_run_again(
    pool: mpgrad.Pool,
) -> None:
    """A registry counted its classes twice in a task, and a required keyword was missing."""
    names = with_effects()
    for _ in range(2):
        for each in ("registered", "metaclass", "abstract"):
            assert pool.map(names[each], [0]) == [names[each](0)]
        assert pool.map(names["in_an_item"], [names["A"]()]) == [(True, 2)]
    assert pool.map(names["derived"], [0]) == [(3, ["a", "b", "c"], "c")]


def enumerations() -> list[Any]:
    class WithAlias(enum.Enum):
        FIRST = 1.0
        ALSO_FIRST = FIRST
        SECOND = 2.0

    class Edges(enum.Flag):
        LEFT = 1
        RIGHT = 2
        BOTH = 3
        NONE = 0

    class OneCharacter(bytes, enum.Enum):
        def __new__(cls, code: int, label: str) -> Any:
            made = bytes.__new__(cls, [code])
            made._value_ = code
            made.label = label  # type: ignore[attr-defined]
            return made

        A = 65, "a"
        ALSO_A = 65, "also a"
        B = 66, "b"

    class Pair(tuple[int, int], enum.Enum):
        X = 1, 2

    class Time(datetime.timedelta, enum.Enum):
        DAY = 1
        WEEK = 7

    class HasEverything(enum.EnumMeta):
        def __contains__(cls, _: object) -> bool:
            return True

    class Everything(enum.Enum, metaclass=HasEverything):
        PART = 1

    class Begins(enum.Enum):
        def __init__(self, begin: float, end: float) -> None:
            self.length = end - begin

        LONG = 1.0, 9.0

    made = [WithAlias, Edges, OneCharacter, Pair, Time, Everything, Begins]
    if sys.version_info >= (3, 11):

        class Unknown(enum.IntFlag, boundary=enum.KEEP):
            ONE = 1
            MANY = 255

        made.append(Unknown)
    return made


@pytest.mark.parametrize("kind", enumerations(), ids=lambda kind: kind.__name__)
def test_enumerations_have_all_names_and_values(pool: mpgrad.Pool, kind: Any) -> None:
    """Names of a second member with a value, or of several flags, were missing, so that some
    enumerations could not be loaded. Members had other values than `__new__` gave them."""

    def seen(_: object) -> Any:
        members = list(kind.__members__.items())
        data = kind._member_type_
        return (
            [(name, each._name_, each._value_) for name, each in members],
            [data is object or data.__reduce_ex__(each, 2)[1][-1] for _, each in members],
            [kind(each._value_) is each is getattr(kind, name) for name, each in members],
            [each._name_ for each in kind],
            [getattr(each, name, None) for _, each in members for name in ("label", "length")],
            type(kind).__name__,
            getattr(kind, "_boundary_", None),
        )

    assert pool.map(seen, [0]) == [seen(0)]
    members = list(kind.__members__.values())
    assert all(a is b for a, b in zip(pool.map(lambda x: x, members), members, strict=True))


Held = TypeVar("Held")


def test_typed_dictionaries(pool: mpgrad.Pool) -> None:
    """Their metaclass refused to make them in the worker."""

    class Settings(TypedDict, total=False):
        rate: float

    class More(Settings):
        weight: Tensor

    class Box(typing_extensions.TypedDict, Generic[Held]):
        held: Held

    class Count(TypedDict):
        count: int

    def fn(given: Settings) -> Any:
        assert typing.is_typeddict(More) and Count.__required_keys__ == {"count"}
        kinds = [(each.__name__, each.__total__, each.__bases__) for each in (Settings, More, Box)]
        return (
            More(rate=given["rate"], weight=torch.ones(2)),
            Box[int](held=3),
            Count(count=1),
            kinds,
        )

    given = Settings(rate=2.0)
    assert repr(pool.map(fn, [given])) == repr([fn(given)])


class Boxed(list[Any]):
    __hash__ = object.__hash__


class WithSlot(set[Any]):
    __slots__ = ("largest",)

    def __init__(self, numbers: Any) -> None:
        super().__init__(numbers)
        self.largest = max(numbers)


class HasOwnWay(int):
    def __reduce__(self) -> Any:
        return operator.add, (int(self), 0)


BASES: dict[Any, Any] = {
    dict: {"b": 1, "a": 2},
    collections.OrderedDict: {"b": 1, "a": 2},
    collections.Counter: "aab",
    collections.defaultdict: (int, {"a": 1}),
    list: [1, 2],
    Boxed: [1, 2],
    collections.deque: ([1, 2, 3], 2),
    set: {1, 2},
    frozenset: {1, 2},
    WithSlot: {1, 2},
    bytearray: b"ab",
    ipaddress.IPv4Address: "127.0.0.1",
    ipaddress.IPv4Network: "127.0.0.0/30",
    decimal.Decimal: "1.5",
    datetime.datetime: (2020, 1, 2, 3),
    complex: (1, 2),
    HasOwnWay: 4,
    ValueError: ("a", "b"),
    functools.partial: (operator.add, 1),
}
PARTS = "_ip", "network_address", "largest", "maxlen", "default_factory", "args", "func", "__doc__"


def test_members_have_the_contents_of_the_class_that_they_extend(pool: mpgrad.Pool) -> None:
    """Those with containers were empty, and those with slots lost the slots."""
    kinds: dict[Any, Any] = {
        base: type(enum.Enum)("Kind", (base, enum.Enum), made_body(base, A=value, B=value))
        for base, value in BASES.items()
    }

    def seen(_: object) -> Any:
        return [
            (
                name,
                each._name_,
                repr(each._value_),
                base.__repr__(each).replace("Kind", base.__name__),
                [str(getattr(each, part, None)) for part in PARTS],
                [*base.items(each)] if issubclass(base, dict) else None,
                sorted(base.__iter__(each)) if hasattr(base, "__iter__") else None,
            )
            for base, kind in kinds.items()
            for name, each in kind.__members__.items()
        ]

    (found,) = pool.map(seen, [0])
    for there, here in zip(found, seen(0), strict=True):
        assert there == here
    members = [each for kind in kinds.values() for each in kind]
    assert all(a is b for a, b in zip(pool.map(lambda x: x, members), members, strict=True))


def made_body(base: Any, **members: Any) -> Any:
    body = enum.EnumMeta.__prepare__("Kind", (base, enum.Enum))
    body["__hash__"], body["__module__"] = object.__hash__, __name__
    for name, each in members.items():
        body[name] = each
    return body


def test_a_member_arrives_by_its_name(pool: mpgrad.Pool) -> None:
    """A tensor, a function or a nan is not equal to its copy, so the value finds no member."""

    class Weight(enum.Enum):
        FULL = torch.ones(2)
        HALF = functools.partial(torch.mul, 0.5)
        NONE = float("nan")
        ALSO_NONE = NONE

    class Edges(enum.Flag):
        LEFT = 1
        RIGHT = 2

    def same(given: Any) -> Any:
        return given is type(given)[given.name], given

    members = [*Weight, *Edges]
    found = pool.map(same, members)
    assert all(a and b is each for (a, b), each in zip(found, members, strict=True))
    assert pool.map(lambda _: list(Weight.__members__), [0]) == [list(Weight.__members__)]
    assert pool.map(lambda _: len(Weight), [0]) == [3]
    both = Edges.LEFT | Edges.RIGHT
    assert pool.map(lambda x: x, [both]) == [both]


def test_an_enumeration_of_a_module_with_tensors(
    pool: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors were compared as if the result had a truth value."""
    (tmp_path / "weights_of_mine.py").write_text(
        "import enum, torch\n"
        "class Weight(enum.Enum):\n"
        "    FULL = torch.ones(2)\n"
        "def use(x): return Weight.FULL.value.sum() * x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    use = importlib.import_module("weights_of_mine").use
    assert pool.map(use, [2.0]) == [4.0]
