"""A function sees what the caller has when the operation begins, however large that is."""

from __future__ import annotations

import collections
import functools
import importlib
import random
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import first_are_quick

import mpgrad
from mpgrad.memory.arena import COPY_BYTES, Arena, KeptSlots
from mpgrad.pickling import state, unchanged

pytestmark = pytest.mark.quick

CITY = """
    import torch

    class Agent:
        def __init__(self, number):
            self.number, self.wealth, self.near = number, 1.0, [number]
            self.facts = {"age": 20.0}

    class City:
        def __init__(self):
            self.agents = [Agent(number) for number in range(1500)]
            self.rate, self.table = 1.0, {"tax": {"low": 0.5}}
            self.weight = torch.tensor(2.0, requires_grad=True)

    CITY = City()
    def rate(x): return CITY.weight * x * CITY.rate
    def entry(x): return CITY.weight * x * CITY.table["tax"]["low"]
    def agent(x): return CITY.weight * x * CITY.agents[1321].wealth
    def fact(x): return CITY.weight * x * CITY.agents[77].facts["age"]

    class Layer(torch.nn.Module):
        def __init__(self): super().__init__(); self.scale = torch.nn.Parameter(torch.ones(()))
        def forward(self, x): return x * self.scale

    class Net(torch.nn.Module):
        def __init__(self, count):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(count))
            self.head = Layer()
        def forward(self, x): return self.head(self.layers[-1](x)) * (1 + self.layers[3].training)

    NET = Net(600)
    def net(x): return NET(x)
"""


@pytest.fixture
def city(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_city.py").write_text(textwrap.dedent(CITY))
    yield importlib.import_module("a_city")
    del sys.modules["a_city"]


@pytest.fixture(params=first_are_quick(1, ["process", "inline"]))
def a_pool(request: pytest.FixtureRequest) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(1, engine=request.param) as pool:
        yield pool


def check(pool: mpgrad.Pool, function: Callable[[Any], torch.Tensor], leaf: torch.Tensor) -> None:
    """Compare values and gradients with those of the loop."""
    xs = [torch.tensor(1.0), torch.tensor(3.0)]
    for _ in range(5):  # the last time nothing is pickled
        found, expected = torch.stack(pool.map(function, xs)), torch.stack([*map(function, xs)])
        assert torch.equal(found, expected)
        assert torch.equal(
            *(torch.autograd.grad(each.sum(), leaf)[0] for each in (found, expected))
        )


def test_a_part_of_a_large_object_changes(a_pool: mpgrad.Pool, city: Any) -> None:
    """Symptom: old values, map after map. Cause: only the identity of large objects was
    compared."""
    town = city.CITY
    for function in (city.rate, city.entry, city.agent, city.fact):
        check(a_pool, function, town.weight)
    town.rate = 2.0
    check(a_pool, city.rate, town.weight)
    town.table["tax"]["low"] = 7.0
    check(a_pool, city.entry, town.weight)
    town.agents[1321].wealth = 5.0
    check(a_pool, city.agent, town.weight)
    town.agents[77].facts["age"] = 21.0
    check(a_pool, city.fact, town.weight)
    town.weight = torch.tensor(3.0, requires_grad=True)
    check(a_pool, city.rate, town.weight)


def test_a_part_of_a_large_network_changes(a_pool: mpgrad.Pool, city: Any) -> None:
    check(a_pool, city.net, city.NET.head.scale)
    city.NET.eval()
    check(a_pool, city.net, city.NET.head.scale)
    city.NET.head = city.Layer()
    city.NET.head.scale.data.fill_(4.0)
    check(a_pool, city.net, city.NET.head.scale)


MORE = """
    import numpy, a_city, collections
    def absent(x):
        try: return x * LATER
        except NameError: return x
    def attribute(x):
        try: return x * a_city.NEW
        except AttributeError: return x
    ORDER = collections.OrderedDict(a=1.0, b=2.0)
    def order(x): return x * next(iter(ORDER.values()))
    TABLE = numpy.ones(100)
    CONSTANT = numpy.ones(100)
    CONSTANT.flags.writeable = False
    VIEW = TABLE[:50]
    VIEW.flags.writeable = False
    LARGE = numpy.ones(10_000)
    def arrays(x): return x * float(TABLE[0] + 10 * VIEW[1] + 100 * CONSTANT[0] + LARGE[5])
    def method(x): return x
    def through(x): return x * getattr(method, "rate", 1.0)
    class Kind:
        rate = 1.0
        def __new__(cls): return super().__new__(cls)
    def kind(x): return x * Kind.rate * getattr(Kind, "more", 1.0)
    import torch
    class Own(torch.Tensor): rate = 3.0
    TENSOR = torch.ones(1)
    def of_class(x): return x * getattr(TENSOR, "rate", 1.0)
"""


def test_what_is_seen_besides(a_pool: mpgrad.Pool, city: Any, tmp_path: Path) -> None:
    """Names that come later, the order of a dictionary, arrays, attributes of code."""
    (tmp_path / "more_city.py").write_text(textwrap.dedent(MORE))
    more = importlib.import_module("more_city")

    def write(number: float) -> None:
        more.LATER = city.NEW = number
        more.ORDER.move_to_end(next(iter(more.ORDER)))
        more.TABLE[0] = more.TABLE[1] = more.LARGE[5] = number
        more.method.rate = number
        if number == 2.0:
            more.TENSOR.__class__ = more.Own
            more.Kind.more = more.Kind.rate
            del more.Kind.rate
            more.Kind.rate = 5.0
            more.CONSTANT.flags.writeable = True
            more.CONSTANT[0] = 7.0

    names = "absent", "attribute", "order", "arrays", "through", "kind", "of_class"
    try:
        for number in (1.0, 2.0, 3.0):
            for _ in range(3):
                for name in names:
                    function = getattr(more, name)
                    assert a_pool.map(function, [2.0, 10.0]) == [*map(function, [2.0, 10.0])], name
            write(number + 1.0)
    finally:
        del sys.modules["more_city"]


def test_constant_arrays_are_compared_by_identity() -> None:
    numpy = pytest.importorskip("numpy")
    table = numpy.ones(4)
    view = table[1:]
    view.flags.writeable = False
    assert not unchanged.is_constant(table) and not unchanged.is_constant(view)
    table.flags.writeable = False
    assert unchanged.is_constant(table) and unchanged.is_constant(view)
    assert unchanged.is_constant(numpy.frombuffer(b"12345678"))
    assert not unchanged.is_constant(numpy.frombuffer(bytearray(8)))
    assert unchanged.is_constant(numpy.float32(1)) and not unchanged.is_constant([1.0])


def large_array() -> Any:
    numpy = pytest.importorskip("numpy")
    return numpy.ones(COPY_BYTES)  # eight times as many bytes


@pytest.mark.parametrize("is_constant", [False, True])
def test_a_large_array_is_copied_once(a_pool: mpgrad.Pool, is_constant: bool) -> None:
    """Symptom: a map took as long as a copy of the array."""
    table = large_array()
    table.flags.writeable = not is_constant

    def last(x: float) -> float:
        return float(table[-1]) * x

    for _ in range(4):
        assert a_pool.map(last, [1.0, 2.0]) == [1.0, 2.0]
    before = a_pool.stats().shared_bytes
    assert before < 2 * table.nbytes
    assert a_pool.map(last, [1.0, 2.0]) == [1.0, 2.0] and a_pool.stats().shared_bytes <= before
    if not is_constant:
        table[-1] = 3.0
        assert a_pool.map(last, [1.0, 2.0]) == [3.0, 6.0]


def test_kept_slots() -> None:
    """A slot is kept once its bytes were the same, and only as long as they are."""
    slots = KeptSlots(Arena(0))
    table = torch.zeros(10)
    first = slots.slot_with(table.data_ptr(), table.nbytes)
    assert slots.slot_with(table.data_ptr(), table.nbytes) is first
    kept = weakref.ref(first)
    del first
    assert kept() is not None
    table[3] = 1.0
    second = slots.slot_with(table.data_ptr(), table.nbytes)
    assert second is not kept() and bytes(second.memory) == bytes(table.numpy())
    assert kept() is None
    kept = weakref.ref(second)
    del second
    assert kept() is None  # its bytes came once


@pytest.mark.parametrize("size", [10, COPY_BYTES])
def test_what_is_no_constant(a_pool: mpgrad.Pool, size: int) -> None:
    """Other shapes of read-only arrays, masks; and attributes of tensors that have a name like
    ours."""
    numpy = pytest.importorskip("numpy")
    table = numpy.ones(size)
    table.flags.writeable = False
    masked, tensor = numpy.ma.array(table), torch.ones(size)
    tensor.is_constant = True  # type: ignore[attr-defined]

    def facts(x: float) -> Any:
        return table.shape, int(masked.mask.sum()), float(tensor[0])

    def check() -> None:
        for _ in range(6):
            assert a_pool.map(facts, [1.0]) == [facts(1.0)]

    check()
    table.shape = (2, size // 2)
    check()
    masked.mask = [True] * size
    check()
    tensor[0] = 7.0
    check()


def test_writes_to_a_large_array_stay_in_their_operation(a_pool: mpgrad.Pool) -> None:
    table = large_array()

    def write(x: float) -> float:
        table[-1] += x
        return float(table[-1])

    for _ in range(4):
        assert a_pool.map(write, [1.0, 1.0]) == [2.0, 3.0]
    assert table[-1] == 1.0


# --- random objects, of which one place changes


class Plain:
    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


class Slotted:
    __slots__ = "one", "other"

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other


class Mixed(Slotted):
    __slots__ = ("__dict__",)


class OwnState(Plain):
    def __getstate__(self) -> Any:
        return dict(vars(self))


class Reduced(Plain):
    def __reduce__(self) -> Any:
        return Plain, (), {"inside": list(vars(self).values())}


class OwnDict(dict[Any, Any]):
    pass


class OwnSet(set[Any]):
    pass


class Number(float):
    pass


OWN = (Plain, Slotted, Mixed, OwnState, Reduced, OwnDict, OwnSet, Number)


def function_of(default: Any, word: Any, cell: Any) -> Any:
    def made(x: Any, given: Any = default, *, named: Any = word) -> Any:
        return cell

    return made


def leaf(chance: random.Random) -> Any:
    return chance.choice(
        [
            *(chance.random(), chance.randrange(1 << 40), f"text {chance.random()}", None, True),
            *(torch.tensor(chance.random()), Number(chance.random())),
        ]
    )


def tree(chance: random.Random, depth: int) -> Any:
    """Return a random graph of objects."""
    if depth == 0:
        return leaf(chance)
    some = [tree(chance, depth - 1) for _ in range(chance.randint(1, 4))]
    named = {f"name{number}": each for number, each in enumerate(some)}
    kinds: list[Callable[[], Any]] = [
        *(lambda: list(some), lambda: tuple(some), lambda: dict(named)),
        *(lambda: Plain(**named), lambda: OwnState(**named), lambda: Reduced(**named)),
        *(lambda: Slotted(some[0], some[-1]), lambda: OwnDict(named)),
        *(lambda: collections.OrderedDict(named), lambda: collections.deque(some)),
        *(lambda: collections.defaultdict(list, named), lambda: bytearray(b"abc")),
        *(lambda: OwnSet([1.5, 2.5]), lambda: {1.5, 2.5}, lambda: types.MappingProxyType(named)),
        *(lambda: function_of(some[0], some[-1], some), lambda: type("Made", (), named)),
        *(lambda: functools.partial(max, some[0], **named), lambda: Plain(**named).__init__),
        lambda: dict(enumerate(some)),
        lambda: torch.nn.ModuleList([torch.nn.Dropout(0.5)]),
    ]
    made = chance.choice(kinds)()
    if depth > 1 and chance.random() < 0.2:
        return mixed(made)
    return made


def mixed(inside: Any) -> Mixed:
    made = Mixed(inside, 1.0)
    made.more = inside  # type: ignore[attr-defined]
    return made


def places(value: Any, found: dict[int, Any]) -> list[Callable[[random.Random], None]]:
    """Return changes of each place in the graph."""
    if id(value) in found:
        return []
    found[id(value)] = value
    changes: list[Callable[[random.Random], None]] = []
    inside: list[Any] = []
    if isinstance(value, dict):
        inside += value.values()
        changes += [lambda c, key=key: value.update({key: c.random()}) for key in value]  # type: ignore[misc]
        changes.append(lambda c: value.update(new=c.random()))
        if value and next(iter(value)) != "last":
            changes.append(lambda c: value.update(last=value.pop(next(iter(value)))))
    if isinstance(value, collections.OrderedDict) and len(value) > 1:
        changes.append(lambda c: value.move_to_end(next(iter(value))))
    if isinstance(value, list):
        inside += value
        changes += [lambda c: value.append(c.random()), lambda c: value.insert(0, None)]
        changes.append(lambda c: value.__setitem__(slice(-1, None), [c.random()]))
    if isinstance(value, collections.deque):
        inside += value
        changes.append(lambda c: value.appendleft(c.random()))
    if isinstance(value, set):
        changes.append(lambda c: value.add(c.random()))
    if isinstance(value, bytearray):
        changes.append(lambda c: value.__setitem__(0, value[0] + 1))
    if isinstance(value, Slotted):
        inside += [getattr(value, name) for name in Slotted.__slots__ if hasattr(value, name)]
        changes.append(lambda c: setattr(value, "one", c.random()))
        if hasattr(value, "one") and not hasattr(value, "other"):
            changes.append(lambda c: (setattr(value, "other", value.one), delattr(value, "one"))[0])
        elif hasattr(value, "other"):
            changes.append(lambda c: delattr(value, "other"))
    if isinstance(value, types.FunctionType):
        inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inside += [cell.cell_contents for cell in value.__closure__ or ()]
        changes += [lambda c: setattr(value, "note", c.random())]
        if value.__kwdefaults__ and value.__closure__:
            changes.append(lambda c: value.__kwdefaults__.update(named=c.random()))
            changes.append(lambda c: setattr(value, "__defaults__", (c.random(),)))
            changes.append(
                lambda c: setattr(value.__closure__[0], "cell_contents", c.random())  # type: ignore[index]
            )
    elif isinstance(value, type):
        inside += [each for name, each in vars(value).items() if name.startswith("name")]
        changes.append(lambda c: setattr(value, "name0", c.random()))
    elif isinstance(value, torch.Tensor):
        changes.append(lambda c: setattr(value, "note", c.random()))
    elif isinstance(value, functools.partial):
        inside += [*value.args, *value.keywords.values()]
        changes.append(lambda c: value.keywords.update(more=c.random()))
    elif isinstance(value, types.MethodType):
        inside.append(value.__self__)
    elif isinstance(value, tuple | types.MappingProxyType):
        inside += value.values() if isinstance(value, types.MappingProxyType) else value
    elif hasattr(value, "__dict__") and value != {}:  # empty hooks of modules are left out
        inside += [each for each in vars(value).values() if each is not value]
        changes.append(lambda c: setattr(value, "new", c.random()))
        changes.append(lambda c: setattr(value, "new2", [c.random()]))
        if type(value) in (Plain, OwnState):
            changes.append(lambda c: setattr(value, "__dict__", {"only": c.random()}))
    return changes + [change for each in inside for change in places(each, found)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's, which also has the classes."""
    made: Any = types.ModuleType("a_random_module")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec("HELD = None\ndef f(x): return HELD", vars(made))
    for kind in OWN:
        monkeypatch.setattr(kind, "__module__", made.__name__)
        vars(made)[kind.__name__] = kind
    return made


@pytest.mark.parametrize("where", ["module", "closure"])
@pytest.mark.parametrize("seed", first_are_quick(10, [*range(40)]))
def test_each_change_of_a_random_object_is_seen(
    module: Any, seed: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    made: list[object] = []
    for owner, name in ((state.SnapshotCache, "_pickled"), (state, "function_pickler")):
        make = getattr(owner, name)
        noting = functools.partial(lambda make, *given: made.append(1) or make(*given), make)
        monkeypatch.setattr(owner, name, lambda *given, noting=noting: noting(*given))
    held = [tree(chance, 4)]

    def captures(x: Any) -> Any:
        return held

    recent = state.RecentFunctions()

    def sent() -> tuple[bytes, list[Any], int]:
        made.clear()
        if where == "closure":
            pickled, tensors, *_ = state.dumps_function(captures, (), recent)
            return pickled, tensors, len(made)
        module.HELD = held[0]
        snapshot = state.dumps_function(module.f, (), recent)[2]
        assert snapshot is not None
        return snapshot.pickled, snapshot.tensors, len(made)

    for _ in range(6):
        # `__slotnames__` come late
        before = next(found for _ in range(9) if (found := sent())[2] == 0)
        now = sent()
        assert now[0] == before[0] and now[2] == 0
        assert [*map(id, now[1])] == [*map(id, before[1])]
        change = chance.choice([*places(held[0], {}), lambda c: held.__setitem__(0, c.random())])
        change(chance)
        assert sent()[2] > 0


def test_lists_are_compared_by_identity() -> None:
    parts = ["text", [1.0], 7]
    assert unchanged.are_same_objects(parts, list(parts)) and unchanged.are_same_objects([], [])
    for number in range(len(parts)):
        others = list(parts)
        others[number] = [1.0]
        assert not unchanged.are_same_objects(parts, others)
