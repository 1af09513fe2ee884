"""The user's own modules: every call of an operation has them as they are in the caller when it
begins."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import first_are_quick

import mpgrad
from mpgrad.pickling import modules, state

pytestmark = pytest.mark.quick

OPTIONS: dict[str, dict[str, Any]] = {
    engine: {"engine": engine} for engine in ("process", "thread", "inline")
}
SOURCES = {
    "simulation": """
        import functools
        import threading
        import torch
        import constants
        import constants as other_name
        from package import deep
        from package.deep import helper as imported_helper

        DT = 0.5
        TABLE = {"k": [1.0, 2.0]}
        WEIGHT = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)
        LOCK = threading.Lock()
        ENTRY = object()

        def helper(x):
            return x + 1

        def constant(x): return x * DT
        def container(x): return x * TABLE["k"][1]
        def through_helper(x): return helper(x)
        def attribute(x): return x * constants.C
        def renamed(x): return x * other_name.C
        def passed_on(x): return takes_module(x, constants)
        def takes_module(x, module): return x * module.C
        def dynamic(x): return x * getattr(constants, "C")
        def in_package(x): return deep.helper(x) + imported_helper(x)
        def default(x, dt=TABLE): return x * dt["k"][0]
        def local_import(x):
            import constants as within
            from package import deep as inner
            return x * within.C + inner.D
        def weighted(x): return x * WEIGHT
        @functools.lru_cache(maxsize=8)
        def table(n): return [n + 0.5] * 3
        def cached(x): return x * table(2)[1]
        @functools.cache
        def made(): return torch.full((2,), 5.0, dtype=torch.float64, requires_grad=True)
        def through_cache(x): return x * made()
        def entry(x): return x + (constants.NOTHING is constants.nothing())

        def closure(factor):
            def inner(x):
                return helper(x) * factor * DT
            return inner

        SALT = 5
        class Keyed:
            registry = {}
            def __init__(self, n):
                self.n = n
            def __init_subclass__(cls):
                register(cls)
            def __hash__(self):
                return hash(salted(self.n))
            def __eq__(self, other):
                return self.n == other.n
        def register(cls): Keyed.registry[cls.__name__] = cls
        def salted(n): return n * SALT
        class Derivative(Keyed): pass
        KEYED = {Derivative(1): 2.0, Keyed(2): 3.0}
        def keyed(x): return x * KEYED[Keyed(2)] * KEYED[Derivative(1)] * len(Keyed.registry)

        class Item:
            SCALE = 3.0
            def __init__(self, x):
                self.x = x
            def scaled(self):
                return self.x * self.SCALE * DT

        class Derived(Item):
            def scaled(self):
                return super().scaled() + constants.C

        def of_item(item):
            return item.scaled() + isinstance(item, Item)

        def makes_item(x):
            return Derived(x)
    """,
    "constants": """
        import simulation  # and it imports us
        C = 10.0
        NOTHING = object()
        def nothing(): return NOTHING
        def circular(x): return simulation.DT * x
    """,
    "package/__init__": "",
    "package/deep": """
        from . import beside
        from .beside import twice
        D = 7.0
        def helper(x):
            from .beside import OFFSET
            return twice(x) + D + OFFSET + beside.OFFSET
    """,
    "package/beside": """
        OFFSET = 0.25
        def twice(x): return x * 2 + OFFSET
    """,
}
NAMES = ["simulation", "constants", "package", "package.deep", "package.beside"]


class User:
    """A program of several files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, source in SOURCES.items():
            self.write(name, source)
        self.simulation, self.constants, _, self.deep, self.beside = map(
            importlib.import_module, NAMES
        )

    def write(self, name: str, source: str) -> None:
        path = self.folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within a second
    yield User(tmp_path)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(params=first_are_quick(1, [*OPTIONS.values()]), ids=OPTIONS.keys())
def any_pool(
    request: pytest.FixtureRequest, fork_server: mpgrad.Pool, user: Any
) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(1 if request.param.get("engine") == "inline" else 2, **request.param) as pool:
        yield pool


def xs(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), 1.0 + number, dtype=torch.float64) for number in range(count)]


def check(pool: mpgrad.Pool, fn: Callable[[Any], Any], items: list[Any]) -> None:
    for given, found in zip(items, pool.map(fn, items), strict=True):
        assert torch.equal(found, fn(given)), fn


def functions(user: Any) -> list[Callable[[Any], Any]]:
    simulation, constants, deep = user.simulation, user.constants, user.deep
    names = (
        *(
            "constant",
            "container",
            "through_helper",
            "attribute",
            "renamed",
            "passed_on",
            "dynamic",
            "in_package",
        ),
        *("default", "local_import", "weighted", "entry", "cached", "keyed"),
    )
    return [
        *(getattr(simulation, name) for name in names),
        simulation.closure(1.5),
        constants.circular,
        deep.helper,
        lambda x: simulation.constant(x) + constants.C + simulation.deep.D,
        lambda x: simulation.Derived(x).scaled(),
    ]


def write_everywhere(user: Any, number: int) -> None:
    """All that a user may do to a module between two operations."""
    user.simulation.DT = 1.5 + number
    user.simulation.TABLE["k"][1] = 4.0 + number
    user.simulation.TABLE["k"][0] = 8.0 * number
    user.simulation.helper = (lambda x: x * 3) if number % 2 else (lambda x: x - 5)
    user.constants.C = 11.0 + number
    user.deep.D += 1
    user.beside.OFFSET = -2.0 * number
    user.simulation.Item.SCALE = 6.0 + number
    user.simulation.Item.extra = number
    with torch.no_grad():
        user.simulation.WEIGHT += 1


def test_all_calls_have_what_the_caller_has(any_pool: mpgrad.Pool, user: Any) -> None:
    """Symptom: some calls had old values, others new ones. Cause: workers imported the modules, and
    the caller ran some."""
    for number in range(3):
        for fn in functions(user):
            check(any_pool, fn, xs(40))
        check(any_pool, user.simulation.of_item, [user.simulation.Derived(x) for x in xs(40)])
        check(any_pool, lambda item: item.scaled(), [user.simulation.Item(x) for x in xs(3)])
        results = any_pool.map(user.simulation.makes_item, xs(20))
        assert all(type(each) is user.simulation.Derived for each in results)
        write_everywhere(user, number)


def test_gradients_of_tensors_in_modules(any_pool: mpgrad.Pool, user: Any) -> None:
    simulation = user.simulation

    def through_an_import(x: torch.Tensor) -> torch.Tensor:
        import simulation  # type: ignore[import-not-found]

        return x * simulation.WEIGHT

    fns: list[Callable[[Any], Any]] = [
        simulation.weighted,
        lambda x: x * simulation.WEIGHT,
        through_an_import,
    ]
    for fn in fns:
        for _ in range(2):
            found = torch.autograd.grad(
                torch.stack(any_pool.map(fn, xs(20))).sum(), simulation.WEIGHT
            )[0]
            expected = torch.autograd.grad(
                torch.stack([fn(x) for x in xs(20)]).sum(), simulation.WEIGHT
            )[0]
            assert torch.equal(found, expected)
            with torch.no_grad():
                simulation.WEIGHT.mul_(2)


def test_what_a_cache_holds_is_a_capture(any_pool: mpgrad.Pool, user: Any) -> None:
    """Each worker made one of its own, and the caller's had no gradient; also where the module was
    known before it was made."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    cold = any_pool.map(user.simulation.through_cache, [x, x])
    with torch.no_grad():
        user.simulation.made().fill_(7.0)
    for value in (7.0, 8.0):
        with torch.no_grad():
            user.simulation.made().fill_(value)
        ys = any_pool.map(user.simulation.through_cache, [x, x, x])
        assert [y.tolist() for y in ys] == [[value, value]] * 3
        (gradient,) = torch.autograd.grad(torch.stack(ys).sum(), user.simulation.made())
        assert gradient.tolist() == [3.0, 3.0]
    user.simulation.made.cache_clear()
    user.simulation.made.scale = 2
    assert all(
        y.tolist() == [5.0, 5.0]
        for y in (*cold, *any_pool.map(user.simulation.through_cache, [x, x]))
    )


def test_reloaded_from_another_file(any_pool: mpgrad.Pool, user: Any) -> None:
    check(any_pool, user.simulation.of_item, [user.simulation.Derived(x) for x in xs(20)])
    for offset in (1.0, 2.0):
        user.write(
            "constants",
            f"C = {offset}\nNOTHING = 1\ndef nothing(): return 1\ndef added(x): return x + "
            f"{offset}\n",
        )
        # the file alone changes nothing
        check(any_pool, user.constants.nothing.__call__ and user.simulation.attribute, xs(20))
        importlib.reload(user.constants)
        check(any_pool, user.constants.added, xs(20))
        check(any_pool, user.simulation.attribute, xs(20))
        old = user.simulation.Derived(xs(1)[0])
        importlib.reload(user.simulation)
        check(any_pool, user.simulation.of_item, [user.simulation.Derived(x) for x in xs(20)])
        check(any_pool, user.simulation.of_item, [old] * 3)  # of the class before
        check(any_pool, user.simulation.of_item, [old, user.simulation.Derived(xs(1)[0])])


def test_code_replaced_within_a_function(any_pool: mpgrad.Pool, user: Any) -> None:
    """As IPython's autoreload does."""
    check(any_pool, user.simulation.through_helper, xs(20))
    user.simulation.helper.__code__ = (lambda x: x * 9).__code__
    check(any_pool, user.simulation.through_helper, xs(20))
    user.simulation.default.__defaults__ = ({"k": [5.0]},)
    check(any_pool, user.simulation.default, xs(20))


def test_calls_that_wait_keep_what_was_there_before(user: Any, fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(2) as pool:
        futures, expected = [], []
        for number in range(20):
            user.simulation.DT = float(number)
            futures.append(pool.submit(user.simulation.constant, xs(1)[0]))
            expected.append(user.simulation.constant(xs(1)[0]))
        assert all(
            torch.equal(future.result(), value)
            for future, value in zip(futures, expected, strict=True)
        )


def test_new_workers_have_the_same(user: Any, fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1) as pool:
        write_everywhere(user, 3)
        check(pool, user.simulation.in_package, xs(10))
        user.write("package/deep", "raise RuntimeError('half edited')")
        pool.resize(3)
        for _ in range(3):
            check(pool, user.simulation.in_package, xs(40))


def test_nothing_is_sent_while_nothing_changes(
    user: Any, fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    make = state.SnapshotCache._pickled
    monkeypatch.setattr(
        state.SnapshotCache,
        "_pickled",
        lambda self, *given: made.append(given) or make(self, *given),
    )

    def bytes_sent(fn: Callable[[Any], Any], items: list[Any]) -> int:
        before = pool.stats().bytes_sent
        pool.map(fn, items)
        return pool.stats().bytes_sent - before

    with mpgrad.Pool(1) as pool:
        small = [bytes_sent(torch.sin, xs(1)) for _ in range(2)][1]
        for fn in (user.simulation.in_package, user.simulation.constant):
            assert bytes_sent(fn, xs(1)) > small + 500
            for _ in range(3):  # pickled again, with the same result
                assert bytes_sent(fn, xs(1)) < small + 100
            made.clear()
            assert bytes_sent(fn, xs(1)) < small + 100
            assert not made
        items = [user.simulation.Item(x) for x in xs(30)]
        for _ in range(4):
            bytes_sent(user.simulation.of_item, items)
        made.clear()
        assert bytes_sent(user.simulation.of_item, items) < 30 * 400  # by name
        bytes_sent(lambda item: item.scaled(), items)
        assert len(made) == 1


def test_what_cannot_be_carried_is_the_workers_own(user: Any, fork_server: mpgrad.Pool) -> None:
    user.write(
        "held",
        "LOG = open(__file__)\nSPARE = None\ndef f(x): return x + len(LOG.name) * 0 + "
        "LOG.readable()\n",
    )
    held = importlib.import_module("held")
    try:
        with mpgrad.Pool(2) as pool:
            check(pool, held.f, xs(4))
            held.LOG.close()
            held.LOG = open(__file__)  # noqa: SIM115
            with pytest.raises(
                TypeError,
                match=r"held\.LOG was replaced with a value that cannot be sent \(TextIOWrapper\)",
            ):
                pool.map(held.f, xs(4))
            held.LOG.close()
            held.LOG = type("Log", (), {"name": "", "readable": lambda self: True})()
            check(pool, held.f, xs(4))
    finally:
        del sys.modules["held"]


def test_whose_modules_are_the_users_own(user: Any) -> None:
    assert all(map(modules.is_own, [*NAMES, __name__]))
    libraries = (
        "torch",
        "torch.nn",
        "torch._C",
        "json",
        "builtins",
        "numpy",
        "pytest",
        "mpgrad",
        "mpgrad.pool",
    )
    for name in (*libraries, "__main__", "no"):
        assert not modules.is_own(name), name


def test_a_library_can_be_declared_ones_own(user: Any, fork_server: mpgrad.Pool) -> None:
    import cloudpickle
    import tqdm

    cloudpickle.register_pickle_by_value(tqdm)
    try:
        tqdm.of_ours = 3.0  # type: ignore[attr-defined]
        with mpgrad.Pool(2) as pool:
            check(pool, lambda x: x * tqdm.of_ours, xs(4))  # type: ignore[attr-defined]
            tqdm.of_ours = 4.0  # type: ignore[attr-defined]
            check(pool, lambda x: x * tqdm.of_ours, xs(4))  # type: ignore[attr-defined]
    finally:
        cloudpickle.unregister_pickle_by_value(tqdm)
        del tqdm.of_ours  # type: ignore[attr-defined]


def test_globals_that_an_initializer_sets(user: Any, fork_server: mpgrad.Pool) -> None:
    """As with multiprocessing: functions of the module find them in the worker."""
    user.write(
        "served",
        """
        MODEL, CACHE, UNTOUCHED = None, {}, 1.0
        class Settings: pass
        SETTINGS = Settings()
        def load(value):
            global MODEL
            MODEL, CACHE["k"], SETTINGS.scale = value, value + 1, value + 2
        def f(x): return x * MODEL + CACHE["k"] + SETTINGS.scale + UNTOUCHED
        """,
    )
    served = importlib.import_module("served")
    try:
        with mpgrad.Pool(2, initializer=served.load, initargs=(2.0,)) as pool:
            for served.UNTOUCHED in (1.0, 5.0):
                assert [r.tolist() for r in pool.map(served.f, xs(3))] == [
                    [x[0] * 2 + 7 + served.UNTOUCHED] * 2 for x in xs(3)
                ]
    finally:
        del sys.modules["served"]


MORE = """
    import collections, enum, io, numpy, torch
    class Opaque:
        def __init__(self): self.w = None
        def __getstate__(self): return {"w": self.w.detach()}
    OPAQUE = Opaque()
    def opaque(x): return x + OPAQUE.w.sum()
    class Config: pass
    CONFIG = Config()
    CONFIG.dt = 0.5
    LARGE = {"config": CONFIG, "data": [float(n) for n in range(20000)]}
    def large(x): return x * CONFIG.dt + len(LARGE["data"])
    class Table:
        data, dt = [float(n) for n in range(20000)], 0.5
    def of_class(x): return x * Table.dt
    SETTINGS = {"a": 1.0}
    def __getattr__(name):
        try:
            return SETTINGS[name]
        except KeyError:
            raise AttributeError(name) from None
    class Slots:
        __slots__ = ("__dt",)
        def __init__(self): self.__dt = 1.0
        def set(self, dt): self.__dt = dt
        def get(self): return self.__dt
    SLOTS = Slots()
    def slots(x): return x * SLOTS.get()
    def in_strings(x): return x * globals()["SETTINGS"]["a"] * eval("SETTINGS['a']")
    class Planet(enum.Enum):
        EARTH = (1.0, 2.0)
        def __init__(self, mass, radius): self.mass, self.radius = mass, radius
    def planet(x): return x * Planet.EARTH.mass
    DEQUE, ORDERED = collections.deque([1.0]), collections.OrderedDict(a=1.0)
    def containers(x): return x * DEQUE[0] * ORDERED["a"]
    ARRAY = numpy.ones(3)
    def array(x): return x * float(ARRAY[1])
    BLOCK = bytearray(3)
    VIEW = memoryview(bytearray(3))[1:]
    def block(x): return x * BLOCK[0]
    def view(x): return x * VIEW[0]
    NET = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()).double()
    def net(x): return NET(x) * NET.training
"""


def test_what_is_hard_to_watch(any_pool: mpgrad.Pool, user: Any) -> None:
    user.write("more", textwrap.dedent(MORE))
    more = importlib.import_module("more")
    try:
        for number in range(4):
            more.OPAQUE.w = torch.full((3,), float(number), dtype=torch.float64)
            more.CONFIG.dt = more.Table.dt = 1.0 + number
            more.SETTINGS["a"] = 2.0 + number
            more.SLOTS.set(3.0 + number)
            more.DEQUE[0] = more.ORDERED["a"] = 4.0 + number
            more.ARRAY[1] = 5.0 + number
            more.BLOCK[0] = more.VIEW[0] = 6 + number
            more.NET[0].bias.data += 1
            more.NET.train(number % 2 == 0)
            names = "opaque", "large", "of_class", "slots", "in_strings", "planet", "containers"
            of_memory = "array", "block", "view", "net"
            for fn in (
                *(getattr(more, name) for name in (*names, *of_memory)),
                lambda x: x * more.a,
            ):
                check(any_pool, fn, xs(6))
    finally:
        del sys.modules["more"]


def test_what_cannot_be_carried_as_a_whole(user: Any, fork_server: mpgrad.Pool) -> None:
    user.write(
        "mixed",
        """
        MIXED = {"dt": 1.0, "log": open(__file__)}
        MADE = None
        def f(x): return x * MIXED["dt"]
        def g(x):
            global MADE
            if MADE is None:
                MADE = open(__file__)
            return x * MADE.readable()
        """,
    )
    mixed = importlib.import_module("mixed")
    try:
        with mpgrad.Pool(2) as pool:
            check(pool, mixed.f, xs(3))
            mixed.MIXED["dt"] = 9.0
            with pytest.raises(
                TypeError, match=r"mixed\.MIXED was written to, and cannot be sent \(dict\)"
            ):
                pool.map(mixed.f, xs(3))
            for _ in range(2):
                check(pool, mixed.g, xs(3))  # which makes one here, too
    finally:
        mixed.MIXED["log"].close()
        mixed.MADE.close()
        del sys.modules["mixed"]


def test_attributes_of_classes_that_change_and_change_back(
    any_pool: mpgrad.Pool, user: Any
) -> None:
    """Symptom: the value in between. Cause: states share classes, and one that was known was not
    loaded again."""
    user.write(
        "given",
        "class Step:\n    dt = 1.0\ndef f(x): return x * Step.dt\ndef g(x): return x + Step.dt\n",
    )
    given = importlib.import_module("given")
    try:
        for dt in (1.0, 2.0, 1.0, 2.0):
            given.Step.dt = dt
            check(any_pool, given.f if dt == 1 else given.g, xs(3))
    finally:
        del sys.modules["given"]


def test_classes_go_without_what_cannot_be_carried(user: Any, fork_server: mpgrad.Pool) -> None:
    user.write(
        "trainer",
        """
        class Trainer:
            pool = None
            rate = 0.5
            def step(self, x): return x * self.rate
            def all(self, xs): return self.pool.map(self.step, xs)
        """,
    )
    trainer = importlib.import_module("trainer")
    try:
        with mpgrad.Pool(2) as trainer.Trainer.pool:
            for trainer.Trainer.rate in (0.5, 2.0):
                found = trainer.Trainer().all(xs(4))
                assert all(
                    torch.equal(r, x * trainer.Trainer.rate)
                    for r, x in zip(found, xs(4), strict=True)
                )
    finally:
        del sys.modules["trainer"]


OPEN = """
    import abc
    class Base(abc.ABC):
        log = open(__file__)
        @abc.abstractmethod
        def name(self): ...
    class Reader(Base):
        file = open(__file__)
        files = [file]
        def name(self): return self.file.name, self.log.name, getattr(self, "files", None)[0].name
    reader = Reader()
    def by_class(x): return Reader().name()
    def by_object(x): return reader.name()
    def added_later(x): return getattr(reader, "later", None)
"""


@pytest.mark.quick
def test_attributes_of_classes_that_cannot_be_carried(user: Any, fork_server: mpgrad.Pool) -> None:
    """Symptom: a worker's class had no `file`, and `getattr(self, "files", None)` was None. Cause:
    they were left out."""
    user.write("readers", OPEN)
    readers = importlib.import_module("readers")
    try:
        with mpgrad.Pool(1) as pool:
            for function in (readers.by_class, readers.by_object, readers.by_class):
                assert pool.map(function, [0]) == [function(0)]
            readers.Reader.later = readers.Reader.file
            assert pool.map(readers.by_class, [0]) == [readers.by_class(0)]
            with pytest.raises(
                TypeError,
                match=r"Reader\.later cannot be sent.*the worker's own import does not have it",
            ):
                pool.map(readers.added_later, [0])
    finally:
        readers.Reader.file.close()
        readers.Reader.log.close()
        del sys.modules["readers"]


def test_more_names_than_a_byte_counts(user: Any, fork_server: mpgrad.Pool) -> None:
    names = "\n".join(f"N{number} = {number}" for number in range(300))
    added = " + ".join(f"N{number}" for number in range(300))
    user.write(
        "many",
        f"{names}\ndef f(x):\n    total = {added}\n    from constants import C\n    return x * C + "
        "total\n",
    )
    many = importlib.import_module("many")
    try:
        with mpgrad.Pool(2) as pool:
            check(pool, many.f, xs(3))
            many.N299 = user.constants.C = 1.5
            check(pool, many.f, xs(3))
    finally:
        del sys.modules["many"]


PLUGIN = """
    import functools
    import torch
    K = 2.0
    WEIGHT = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    def helper(x): return x * K
    def uses(x): return helper(x) * WEIGHT
    def looks(x): return globals()["helper"](x) * globals()["K"] + eval("helper(x)")
    @functools.cache
    def cached(k): return k + K
    class Item:
        class Inner:
            def __init__(self, x): self.x = x
        def __init__(self, x): self.inner = self.Inner(x)
        def scaled(self): return helper(self.inner.x) + cached(1)
    class OwnError(ValueError): pass
    def fails(x): raise OwnError("said")
    def of_item(item): return item.scaled()
    def returns(x): return Item(x)
    def again(x, n=2): return again(helper(x), n - 1) if n else x
"""


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(
            (name, "process")
            for name in ("plug.d.e", "x.py", ".hidden", "a folder/plug-in.py", "with space")
        ),
        *(("plug.d.e", engine) for engine in ("thread", "inline")),
    ],
)
def test_modules_that_nobody_can_import(name: str, engine: Any, fork_server: mpgrad.Pool) -> None:
    """Symptom: Can't pickle <function uses>: import of module 'plug.d.e' failed. Cause: pickle
    imports the parent of a name."""
    plugin: Any = ModuleType(name)
    exec(textwrap.dedent(PLUGIN), vars(plugin))
    sys.modules[name] = plugin
    try:
        with mpgrad.Pool(1, engine=engine) as pool:
            for factor in (2.0, 5.0):
                plugin.K = factor
                plugin.cached.cache_clear()
                for function in (
                    plugin.uses,
                    plugin.looks,
                    plugin.again,
                    lambda x: plugin.helper(x) + plugin.K,
                ):
                    check(pool, function, xs(2))
                check(pool, plugin.of_item, [plugin.Item(x) for x in xs(2)])
                assert type(pool.map(plugin.returns, xs(1))[0]) is plugin.Item
                assert pool.map(lambda _: plugin.helper, [0]) == [plugin.helper]
                with pytest.raises(plugin.OwnError, match="said"):
                    pool.map(plugin.fails, [0])
                found = pool.map(plugin.uses, xs(2))
                (gradient,) = torch.autograd.grad(sum(each.sum() for each in found), plugin.WEIGHT)
                assert torch.equal(gradient, sum(map(plugin.helper, xs(2))))
    finally:
        del sys.modules[name]


def test_a_module_that_shares_its_name(pool2: mpgrad.Pool) -> None:
    """Symptom: module 'json' has no attribute 'helper', or the other one's values. Cause: modules
    go by their names."""
    plugin: Any = ModuleType("json")
    exec(textwrap.dedent(PLUGIN), vars(plugin))
    plugin.K = 7.0
    check(pool2, lambda x: plugin.helper(x) + plugin.K, xs(2))


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "own_parameters.py").write_text(
        "import torch\n"
        "W = torch.ones(2, requires_grad=True)\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * W\n"
        "class Plain:\n"
        "    def run(self, x):\n"
        "        return self.inner(x)\n"
        "    def inner(self, x):\n"
        "        return x * W\n"
        "def function(x):\n"
        "    return x * W\n"
        "def labelled(x):\n"
        "    return getattr(W, 'label', 'none')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_parameters")
    del sys.modules["own_parameters"]


def test_captures_reached_through_the_code_of_a_class(
    fork_server: mpgrad.Pool, own_module: Any
) -> None:
    # symptom: values with the W of the import, and no gradient. cause: a class went by its name,
    # only functions were searched.
    with torch.no_grad():
        own_module.W.fill_(5)
    Net, function = own_module.Net, own_module.function
    net, plain = Net(), own_module.Plain()
    with mpgrad.Pool(2) as pool:
        through_names = (
            net,
            plain.run,
            lambda x: net(x),
            lambda x: Net()(x),
            function,
            lambda x: function(x),
        )
        through_module = (
            lambda x: x * own_module.W,
            lambda x: own_module.Net()(x),
            lambda x: own_module.function(x),
        )
        for fn in (*through_names, *through_module):
            own_module.W.grad = None
            (result,) = pool.map(fn, [torch.ones(2)])
            assert result.tolist() == [5, 5]
            result.sum().backward()
            assert own_module.W.grad.tolist() == [1, 1]


IMPORTED = """
import collections, dataclasses, functools, types, torch
def new(): return torch.tensor(2.0, requires_grad=True)
@dataclasses.dataclass(slots=True)
class Slots:
    w: torch.Tensor
W = new()
NAMESPACE = types.SimpleNamespace(w=new())
SLOTS = Slots(new())
DEQUE = collections.deque([new()])
@functools.lru_cache(None)
def cached(): return W * 1
def namespace(x): return x * NAMESPACE.w
def slots(x): return x * SLOTS.w
def deque(x): return x * DEQUE[0]
def cache(x): return x * cached()
def local(x):
    import imported_model
    return x * imported_model.W
"""


def test_captures_in_other_containers_of_an_imported_module(
    fork_server: mpgrad.Pool, tmp_path: Any, monkeypatch: Any
) -> None:
    """Symptom: no gradient, no error. Cause: a function that goes by name is searched for tensors,
    but not everywhere."""
    (tmp_path / "imported_model.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("imported_model")
    try:
        with mpgrad.Pool(1) as pool:
            for fn, tensor in (
                (model.namespace, model.NAMESPACE.w),
                (model.slots, model.SLOTS.w),
                (model.deque, model.DEQUE[0]),
                (model.cache, model.W),
                (model.local, model.W),
            ):
                tensor.grad = None
                pool.map(fn, [torch.tensor(3.0)])[0].backward()
                assert tensor.grad == 3.0, fn
    finally:
        del sys.modules["imported_model"]


def test_attributes_of_tensors_in_a_module_that_change(
    own_module: Any, fresh_pool: mpgrad.Pool
) -> None:
    # the state of a module is pickled again only when something in it has changed
    fn = own_module.labelled
    for label in ("a", "b"):
        own_module.W.label = label
        assert fresh_pool.map(fn, [1]) == [label]
    del own_module.W.label
    assert fresh_pool.map(fn, [1]) == ["none"]
    item = torch.ones(1)
    with (
        pytest.raises(TypeError, match=r"\(label\); pass its name"),
        open(os.devnull, "w") as file,
    ):
        item.label = file  # type: ignore[attr-defined]
        fresh_pool.map(fn, [item])
