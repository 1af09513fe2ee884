"""Objects that pickle refuses or changes, although a fork would simply have them.

Each case is a function of an item. In a task it must give what it gives in the loop, for an object
that the function captures, for an item and for a result.
"""

from __future__ import annotations

import builtins
import collections
import importlib.util
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpgrad


class AttributeDict(dict):  # type: ignore[type-arg]
    """The usual recipe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Config(collections.UserDict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Dotted(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__  # raises KeyError for what pickle asks for
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Recent(dict):  # type: ignore[type-arg]
    """Forgets the oldest entry. Its `__setitem__` needs its attributes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.order: list[Any] = []
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) == self.most:
            del self[self.order.pop(0)]
        super().__setitem__(key, value)
        self.order.append(key)


class Scaled(list):  # type: ignore[type-arg]
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = [factor]

    def append(self, value: Any) -> None:
        super().append(self.factor[0] * value)

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)


class Proxy:
    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


class Node:
    """Hashes by its name, and leads to other nodes, in a circle."""

    def __init__(self, name: str, *others: Node) -> None:
        self.edges: dict[Node, Any] = dict.fromkeys(others, 1.0)
        self.friends = set(others)
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.name == other.name

    def __repr__(self) -> str:
        edges = [(each.name, weight) for each, weight in self.edges.items()]
        found = [each in self.edges and each in self.friends for each in self.edges]
        return f"{self.name} {edges} {sorted(e.name for e in self.friends)} {found} {[*vars(self)]}"


class SlottedNode:
    __slots__ = ("name", "others")

    def __init__(self, name: str) -> None:
        self.name = name
        self.others: dict[SlottedNode, int] = {self: 1}

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{self.name} {self in self.others} {len(self.others)}"


class Sentinel:
    """Its `__reduce__` gives a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


def circle() -> Node:
    first = Node("a")
    second = Node("b", first)
    first.edges[second] = 2.0
    first.friends |= {first, second}
    return first


def written(config: Any) -> Any:
    """Write in one way and read in the other."""
    config["rate"] = 5.0
    config.rate += 1.0
    return config["rate"], config.rate, sorted(config)


def filled(made: Any, *values: Any) -> Any:
    for value in values:
        made.__setitem__(value, [value]) if isinstance(made, dict) else made.append(value)
    return made


for kind in (AttributeDict, Config, Dotted, Recent, Scaled, Proxy, Node, SlottedNode, Sentinel):
    kind.__module__ = "__main__"  # as classes of a script: no worker can import them

OBJECTS: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "an attribute dictionary": lambda: (AttributeDict(rate=1.0, w=[2.0]), written),
    "one in another": lambda: (
        AttributeDict(a=AttributeDict(b=1.0)),
        lambda x: (x.a.b, x["a"]["b"], x.a is x["a"], vars(x) is x),
    ),
    "a user's dictionary": lambda: (
        Config(rate=1.0),
        lambda x: (x.rate, dict(x), type(x).__name__),
    ),
    "a dotted dictionary": lambda: (
        Dotted(a=1.0, b=Dotted(c=2.0)),
        lambda x: (x.a, x.b.c, dict(x)),
    ),
    "a dictionary that forgets": lambda: (
        filled(Recent(2), 1.0, 2.0, 3.0),
        lambda x: (dict(filled(x, 4.0)), x.order, [*vars(x)]),
    ),
    "a list that scales": lambda: (
        filled(Scaled(2.0), 1.0, 2.0),
        lambda x: (list(filled(x, 3.0)), x.factor),
    ),
    "a proxy": lambda: (Proxy([1.0, 2.0]), lambda x: (x.count(1.0), x.target)),
    "nodes in a circle": lambda: (circle(), repr),
    "slotted nodes in a circle": lambda: (SlottedNode("a"), repr),
    "a function of frompyfunc": lambda: (
        np.frompyfunc(lambda a, b: a + b, 2, 1),
        lambda f: (f(1, 2), f.nin),
    ),
    "one with an identity": lambda: (
        np.frompyfunc(lambda a, b: a + b, 2, 1, identity=0),
        lambda f: (f.reduce([1, 2]), f.identity),
    ),
    "np.vectorize": lambda: (used(np.vectorize(lambda a: 2 * a)), lambda f: f([1.0, 2.0]).tolist()),
    "a struct": lambda: (struct.Struct("<dd"), lambda s: s.unpack(s.pack(1.0, 2.0))),
}


def used(vectorized: Any) -> Any:
    vectorized([1.0])
    return vectorized


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
@pytest.mark.quick
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_that_a_fork_would_have(pool2: mpgrad.Pool, name: str) -> None:
    thing, fn = OBJECTS[name]()
    wanted = fn(OBJECTS[name]()[0])
    assert pool2.map(lambda _: fn(thing), [0]) == [wanted]
    assert pool2.map(fn, [thing]) == [wanted]
    (back,) = pool2.map(lambda each: each, [thing])
    assert fn(back) == wanted


MISSING = Sentinel("MISSING")


@pytest.mark.quick
def test_an_object_whose_reduce_gives_a_name_is_one_of_a_kind(pool2: mpgrad.Pool) -> None:
    local = Sentinel("LOCAL")

    def fn(item: Any) -> Any:
        return item is MISSING, item is local, MISSING if item is local else local

    for _ in range(2):
        assert pool2.map(fn, [MISSING, local, 1]) == [
            (True, False, local),
            (False, True, MISSING),
            (False, False, local),
        ]
    assert pool2.map(lambda _: MISSING, [0])[0] is MISSING
    local.rate = 1.0  # type: ignore[attr-defined]
    for local.rate in (2.0, 3.0):  # type: ignore[attr-defined]
        assert pool2.map(lambda _: local.rate, [0, 0, 0]) == [local.rate] * 3  # type: ignore[attr-defined]


class NamedList(list[float]):
    rate = 1.0

    def __reduce__(self) -> str:  # type: ignore[override]
        return "LOCAL"


@pytest.mark.parametrize("graphs", ["recompute", "keep", "auto"])
def test_each_operation_has_its_own_state_of_such_an_object(
    fork_server: mpgrad.Pool, graphs: Any
) -> None:
    """A call that ran again saw the state of the operation that came last."""
    local, x = NamedList([1.0]), torch.tensor(3.0, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * local[-1] * local.rate) ** len(local)

    with mpgrad.Pool(1, graphs=graphs) as pool:
        first, again = pool.map(fn, [x]), pool.map(lambda _: list(local), [0, 0])
        local.rate = 2.0
        local.append(5.0)
        second = pool.map(fn, [x])
        assert [*first, *second] == [3.0, 900.0]
        assert again == [[1.0], [1.0]]
        assert torch.autograd.grad(sum(first), x) == (torch.tensor(1.0),)
        assert torch.autograd.grad(sum(second), x) == (torch.tensor(600.0),)
        (back,) = pool.map(lambda _: local, [0])
        assert back is local
        assert local == [1.0, 5.0]


@pytest.mark.quick
def test_gradients_of_tensors_in_such_objects(pool2: mpgrad.Pool) -> None:
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    config = AttributeDict(w=w)
    node = Node("a")
    node.edges[node] = w

    def fn(x: float) -> torch.Tensor:
        return config.w * config["w"] * node.edges[node] * x

    results = pool2.map(fn, [1.0, 2.0])
    sum(results).backward()  # type: ignore[union-attr]
    assert w.grad == 3 * 4.0 * 3.0


@pytest.mark.quick
def test_outcomes_of_pytest_keep_their_class(pool2: mpgrad.Pool) -> None:
    for outcome in (pytest.skip, pytest.fail, pytest.xfail):
        with pytest.raises(outcome.Exception) as caught:
            pool2.map(lambda _, outcome=outcome: outcome("no data"), [0])
        assert type(caught.value) is outcome.Exception


@pytest.fixture
def module_that_reads_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "reads_script.py").write_text(
        "import __main__, sys\n"
        "def imports(x):\n    from __main__ import mpgrad_w\n    return mpgrad_w * x\n"
        "def by_name(x): return __main__.mpgrad_w * x\n"
        "def by_modules(x): return sys.modules['__main__'].mpgrad_w * x\n"
    )
    sys.path.append(str(tmp_path))
    yield importlib.import_module("reads_script")
    sys.path.remove(str(tmp_path))
    del sys.modules["reads_script"]
    vars(sys.modules["__main__"]).pop("mpgrad_w", None)


def test_a_module_that_reads_the_script(
    pool2: mpgrad.Pool, module_that_reads_the_script: Any
) -> None:
    module, script = module_that_reads_the_script, vars(sys.modules["__main__"])
    for value in (2.0, 3.0):
        script["mpgrad_w"] = w = torch.tensor(value, requires_grad=True)
        for fn in (module.imports, module.by_name, module.by_modules):
            w.grad = None
            sum(pool2.map(fn, [1.0, 2.0])).backward()
            assert w.grad == 3.0


PACKAGES: dict[str, str] = {
    "msgspec": """
        class Point(msgspec.Struct, tag="p", rename={"y": "Y"}):
            x: float
            y: list = []
            z: int = msgspec.field(default_factory=lambda: 3)
            def total(self): return self.x + self.z + len(self.y)
        class Derived(Point, kw_only=True, frozen=False):
            key: str = "k"
        class Note(msgspec.Struct):  # with a type that only type checkers see
            text: "OnlyForTypeCheckers"
        def fn(p):
            encoded, note = msgspec.json.encode(Derived(1.0, key="j")), Note("a")
            again = msgspec.json.decode(encoded, type=Derived)
            same = type(p) is Point, again == Derived(1.0, key="j")
            return p.total(), same, encoded, Point(2.0), note
        item = Point(1.0)
    """,
    "msgspec, attributes and __post_init__": """
        class Open(msgspec.Struct, dict=True):
            x: float
            def __post_init__(self): self.x += 1
        class Sub(Open):
            def __post_init__(self): super().__post_init__()
        def with_more(x):
            made = Sub(x)
            made.more = "more"
            return made
        captured = with_more(2.0)
        def fn(p):
            found = [[type(each).__name__, each.x, each.more] for each in (p, captured)]
            return found, Sub(1.0).x, Sub(1.0) == Sub(1.0), with_more(3.0)
        item = with_more(1.0)
    """,
    "msgspec, generic": """
        import typing
        T = typing.TypeVar("T")
        class Holder(msgspec.Struct, typing.Generic[T]):
            x: T
        def fn(p): return p.x, msgspec.json.decode(b'{"x": 1.5}', type=Holder[float])
        item = Holder(2.0)
    """,
    "pydantic": """
        import typing
        T = typing.TypeVar("T")
        class Reply(pydantic.BaseModel, typing.Generic[T]):
            value: T
        def fn(x): return Reply[float](value=x.value), isinstance(x, Reply[float])
        item = Reply[float](value=2.0)
    """,
    "cachetools, methods": """
        class Model:
            def __init__(self): self.cache, self.count = cachetools.LRUCache(4), 0
            @cachetools.cachedmethod(lambda self: self.cache)
            def doubled(self, x):
                self.count += 1
                return 2 * x
        model = Model()
        model.doubled(1.0)
        def fn(x): return model.doubled(x), model.doubled(x), Model().doubled(x)
        item = 3.0
    """,
    "pyrsistent": """
        class Base(pyrsistent.PClass):
            x = pyrsistent.field()
        class Record(Base):  # whose slots the metaclass makes from its fields
            y = pyrsistent.field(initial=1.0)
        def fn(r): return r.set(x=r.x + r.y), Record(x=3.0), type(r) is Record
        item = Record(x=2.0)
    """,
    "cachetools": """
        import threading
        @cachetools.cached(cachetools.LRUCache(4), lock=threading.RLock())
        def doubled(x): return 2 * x
        doubled(1.0)
        def fn(x): return doubled(x) + doubled(1.0)
        item = 3.0
    """,
}


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # a cache counts
@pytest.mark.parametrize("package", PACKAGES)
def test_objects_of_packages(pool2: mpgrad.Pool, package: str) -> None:
    name = package.partition(",")[0]
    names: dict[str, Any] = {name: pytest.importorskip(name), "__name__": "__main__"}
    lines = PACKAGES[package].splitlines(keepends=True)
    source = "".join(line[8:] for line in lines)
    exec(compile(source, package, "exec", dont_inherit=True), names)
    (found,) = pool2.map(names["fn"], [names["item"]])
    wanted = names["fn"](names["item"])
    assert found == wanted
    assert [*map(type, [found])] == [*map(type, [wanted])]
    if package == "msgspec, attributes and __post_init__":
        assert (found[3].x, found[3].more) == (4.0, "more")
    if package == "pydantic":
        assert isinstance(found[0], names["Reply"][float])


BY_ITS_CLASS = """
def of_class(kind, name): return vars(kind)[name]
class Counting:
    def __init__(self, function): self.function, self.count = function, 0
    def __set_name__(self, owner, name): self.place = owner, name
    def __get__(self, owner, kind=None):
        self.count += 1
        return self.function.__get__(owner)
    def __reduce__(self): return of_class, self.place
class Model:
    @Counting
    def doubled(self, x): return 2 * x
model = Model()
def fn(x): return model.doubled(x), vars(Model)["doubled"].count
"""


def test_an_object_that_is_pickled_as_what_its_class_has(pool2: mpgrad.Pool) -> None:
    """The class had nothing yet when it came to a worker: KeyError."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(BY_ITS_CLASS, names)
    assert pool2.map(names["fn"], [2.0]) == [(4.0, 1)]


BUILTINS = """
import builtins
def global_name(x): return mpgrad_scale * x
def attribute(x): return builtins.mpgrad_scale * x
def by_getattr(x): return getattr(builtins, "mpgrad_scale", 1.0) * x
def asked(x): return hasattr(builtins, "mpgrad_scale")
def writes(x):
    builtins.mpgrad_scale = 7.0
    return builtins.mpgrad_scale
"""


@pytest.fixture(params=["script", "module"])
def reads_builtins(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[str], Any]]:
    names: dict[str, Any] = {"__name__": "__main__"}
    if request.param == "script":
        exec(BUILTINS, names)
        yield names.__getitem__
    else:
        (tmp_path / "reads_builtins.py").write_text(BUILTINS)
        sys.path.append(str(tmp_path))
        module = importlib.import_module("reads_builtins")
        yield lambda name: getattr(module, name)
        sys.path.remove(str(tmp_path))
        del sys.modules["reads_builtins"]
    vars(builtins).pop("mpgrad_scale", None)


def test_names_that_the_user_put_into_builtins(
    pool2: mpgrad.Pool, reads_builtins: Callable[[str], Any]
) -> None:
    """As gettext.install and icecream.install do. They were a NameError, or a default was used."""
    contents = vars(builtins)
    for value in (2.0, 3.0):
        contents["mpgrad_scale"] = w = torch.tensor(value, requires_grad=True)
        for name in ("global_name", "attribute", "by_getattr"):
            w.grad = None
            results = pool2.map(reads_builtins(name), [1.0, 2.0])
            assert [each.item() for each in results] == [value, 2 * value]
            sum(results).backward()
            assert w.grad == 3.0
    assert pool2.map(reads_builtins("writes"), [0]) == [7.0]
    assert contents.pop("mpgrad_scale") is w
    assert pool2.map(reads_builtins("asked"), [0]) == [False]
    assert pool2.map(reads_builtins("by_getattr"), [2.0]) == [2.0]
    with pytest.raises(NameError, match="mpgrad_scale"):
        pool2.map(reads_builtins("global_name"), [1.0])


EXTENSION = """
#include <Python.h>
static PyObject *twice(PyObject *self, PyObject *x) { return PyNumber_Add(x, x); }
static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "mpgrad_by_path", 0, -1, methods};
PyMODINIT_FUNC PyInit_mpgrad_by_path(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="comes without a compiler")
def test_an_extension_module_that_was_loaded_by_its_path(
    pool2: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.utils.cpp_extension loads them: `import` finds none in a worker."""
    source, file = tmp_path / "by_path.c", tmp_path / f"by_path{EXTENSION_SUFFIXES[0]}"
    source.write_text(EXTENSION)
    include = sysconfig.get_path("include")
    subprocess.run(["cc", "-shared", "-fPIC", "-I", include, source, "-o", file], check=True)
    pool2.map(abs, [-1])  # the module comes after the workers
    spec = importlib.util.spec_from_file_location("mpgrad_by_path", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mpgrad_by_path", module)
    spec.loader.exec_module(module)
    twice = module.twice
    assert pool2.map(lambda x: module.twice(x), [2.0]) == [4.0]
    assert pool2.map(twice, [2.0]) == [4.0]
    assert pool2.map(lambda f: f(2.0), [twice]) == [4.0]
