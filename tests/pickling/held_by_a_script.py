"""Compares a pool with the serial loop, for objects that a script may hold and use in the functions
that it maps. test_objects.py runs this script."""

from __future__ import annotations

import abc
import collections
import contextvars
import dataclasses
import enum
import functools
import logging
import os
import tempfile
import threading
import traceback
import typing
import weakref
import xml.dom.minidom
import xml.sax.saxutils
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch

import mpgrad
from mpgrad.testing import assert_same_as_serial

Tensor = torch.Tensor
T = TypeVar("T")
weight = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
CASES: dict[str, Callable[[Tensor], Any]] = {}


def case(fn: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    CASES[fn.__name__] = fn
    return fn


# --- functools


@functools.lru_cache(maxsize=7)
def table(size: int) -> Tensor:
    return weight.detach() * size


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


class Cached:
    @functools.lru_cache(maxsize=3)  # noqa: B019  # scripts do this
    def scaled(self, by: int) -> Tensor:
        return weight * by


@case
def caches(x: Tensor) -> Tensor:
    sizes = (
        table.cache_info().maxsize,
        fibonacci.cache_info().maxsize,
        Cached.scaled.cache_info().maxsize,
    )
    assert sizes == (7, None, 3)
    return x * table(2) * fibonacci(10) * Cached().scaled(2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * net(2, kind="b").weight


@functools.lru_cache(maxsize=2)
def net(*sizes: int, kind: str = "a") -> Net:
    return Net()


@functools.lru_cache(maxsize=None, typed=True)
def drawn(*sizes: float, kind: str = "a") -> dict[str, Any]:
    return {"values": [torch.rand(2, dtype=torch.float64)]}


@functools.cache
def prepared() -> int:
    return 1  # it has no tensors, so each process prepares its own


net(1)
net(2, kind="b")
net(1)  # so that the other entry is the next one to be dropped
for kind in ("a", "b"):
    drawn(1, 2.0, kind=kind)
    drawn(1.0, 2, kind=kind)
drawn()
drawn(1)
prepared()
prepared.scale = 3  # type: ignore[attr-defined]
of_a_class = functools.cache(dict)
warm = functools.lru_cache(maxsize=2)(lambda *sizes, kind="a": Net())
warm(1)
warm(2, kind="b")
warm(1)


@case
def warm_caches(x: Tensor) -> Tensor:
    known = [drawn(*each, kind=kind) for each in ((1, 2.0), (1.0, 2)) for kind in ("a", "b")] + [
        drawn(),
        drawn(1),
    ]
    assert (
        len({id(each) for each in known}) == 6 and net.__wrapped__.__name__ == net.__name__ == "net"
    )
    assert of_a_class(a=1) == {"a": 1}
    return sum(each["values"][0] for each in known) * net(1)(x) * prepared.scale  # type: ignore[attr-defined]


def warm_in_the_worker(x: Tensor) -> Tensor:
    first, second = warm(1), warm(2, kind="b")
    warm(1)
    warm(3)  # the least recently used entry is dropped
    assert warm(1) is first and warm.cache_info().currsize == 2 and warm(2, kind="b") is not second
    warm.cache_clear()
    assert (
        warm.cache_info().currsize == 0
        and warm(1) is not first
        and warm.cache_parameters()["maxsize"] == 2
    )
    return x * first.weight


@functools.singledispatch
def dispatched(value: Any) -> Any:
    raise NotImplementedError(type(value))


class Wrapped(NamedTuple):
    x: Tensor


@dispatched.register
def of_tensor(value: Tensor) -> Tensor:
    return value * weight


@dispatched.register
def of_wrapped(value: Wrapped) -> Tensor:
    return dispatched(value.x) * 2


@dispatched.register(collections.abc.Mapping)
def of_mapping(value: Any) -> Tensor:
    return sum(dispatched(each) for each in value.values())


class Dispatcher:
    @functools.singledispatchmethod
    def go(self, value: Any) -> Any:
        return value

    @go.register
    def of_tensor(self, value: Tensor) -> Tensor:
        return value + weight


dispatched(weight)  # so that the function keeps what it found
assert dispatched.dispatch(dict) is of_mapping


@case
def dispatch(x: Tensor) -> Tensor:
    return dispatched(Wrapped(x)) + dispatched({"a": x}) + Dispatcher().go(x)


class Lazy:
    def __init__(self) -> None:
        self.factor = 2

    @functools.cached_property
    def product(self) -> Tensor:
        return weight * self.factor

    twice = functools.partialmethod(lambda self, by, x: x * by * self.factor, 2)


lazy = Lazy()


@case
def cached_properties(x: Tensor) -> Tensor:
    return lazy.product * x + Lazy().product * lazy.twice(x)  # type: ignore[call-arg]


# --- weak references


class Node:
    def __init__(self, value: Tensor, parent: Node | None = None) -> None:
        self.value = value
        self.parent = None if parent is None else weakref.ref(parent)
        self.children: list[Node] = []
        if parent is not None:
            parent.children.append(self)


root = Node(weight)
leaf = Node(weight * 2, root)
dead = weakref.ref(Node(weight))
only = weakref.WeakValueDictionary({"leaf": leaf})
about = weakref.WeakKeyDictionary({leaf: 3.0})
members = weakref.WeakSet([root, leaf])
proxy = weakref.proxy(leaf)
method = weakref.WeakMethod(lazy.__init__)


@case
def weak_references(x: Tensor) -> Tensor:
    parent = leaf.parent and leaf.parent()
    assert parent is root and parent.children == [leaf] and dead() is None
    assert only["leaf"] is leaf and list(about) == [leaf] and len(members) == 2 and root in members
    of_lazy = method()
    assert of_lazy is not None and of_lazy.__self__.factor == 2
    return x * parent.value * proxy.value * about[leaf]


tensor_proxy, module_proxy = weakref.proxy(leaf.value), weakref.proxy(net(1))
gone_items = [weakref.proxy(Node(weight)), weakref.ref(Node(weight))]
folder = tempfile.TemporaryDirectory()  # it has a `weakref.finalize`
of_method = weakref.WeakMethod(lazy.__init__)


@case
def weak_proxies(x: Tensor) -> Tensor:
    assert of_method() is not None and os.path.isdir(folder.name) and gone_items[1]() is None
    try:
        raise AssertionError(gone_items[0].value)
    except ReferenceError:
        return x * tensor_proxy * module_proxy.weight


class Registry:
    known: ClassVar[weakref.WeakValueDictionary[str, Registry]] = weakref.WeakValueDictionary()

    def __init__(self, name: str) -> None:
        self.known[name] = self


kept = Registry("kept")
only_reference = weakref.ref(kept)


@case
def weak_registries(x: Tensor) -> Tensor:
    assert type(only_reference()).__name__ == "Registry" and set(Registry.known) == {"kept"}
    return x * len(Registry.known)


# --- locks and similar objects of one process

lock, rlock, condition, bounded = (
    threading.Lock(),
    threading.RLock(),
    threading.Condition(),
    threading.BoundedSemaphore(2),
)
signal = threading.Semaphore(0)
event, semaphore, barrier, local = (
    threading.Event(),
    threading.Semaphore(2),
    threading.Barrier(1),
    threading.local(),
)
shared = threading.Lock()
both = threading.Condition(shared), threading.Condition(shared)
event.set()
lock.acquire()  # the caller holds it, and a worker has its own
bounded.acquire()
local.here = 1
level: contextvars.ContextVar[float] = contextvars.ContextVar("level", default=2.0)
unset: contextvars.ContextVar[float] = contextvars.ContextVar("unset")
changed: contextvars.ContextVar[float] = contextvars.ContextVar("changed")
changed.set(5.0)


class Own(threading.local):
    def __init__(self, start: int, by: int = 1) -> None:
        self.number = start * by


own, untouched = Own(2, by=3), Own(4)
own.number = 5


def in_the_worker(x: Tensor) -> Tensor:
    assert (own.number, untouched.number) == (6, 4)
    with lock, rlock, rlock, condition, semaphore, bounded, bounded:
        barrier.wait(1)
        assert event.is_set() and not hasattr(local, "here")
        local.here = 2
    assert not signal.acquire(blocking=False)  # it has not been released
    with both[0]:
        assert not shared.acquire(blocking=False)
    return x * level.get() * unset.get(3.0) * changed.get()


class Guarded:
    """Has a lock in each object, as classes for many threads do."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._log = logging.getLogger("guarded")
        self._handler = logging.NullHandler()  # it has a lock
        self.total = weight * 0

    def add(self, x: Tensor) -> Tensor:
        with self._lock:
            self._log.debug("adding")
            return self.total + x * weight


CASES["guarded"] = Guarded().add


# --- classes and functions of every kind


class Colour(enum.Enum):
    RED = 1.0
    BLUE = 2.0

    def times(self, x: Tensor) -> Tensor:
        return x * self.value


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Scaled(Protocol):
    def scaled(self, x: Tensor) -> Tensor: ...


@typing.runtime_checkable
class Runs(Protocol):
    def run(self) -> Tensor: ...


class Base(abc.ABC):
    @abc.abstractmethod
    def scaled(self, x: Tensor) -> Tensor: ...

    @property
    @abc.abstractmethod
    def name(self) -> str: ...


class Derived(Base):
    class Inner:
        factor = 3

        class Most:
            factor = weight

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.Inner.factor * self.Inner.Most.factor

    @property
    def name(self) -> str:
        return "derived"


@Base.register
class Registered: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: Tensor
    kind: Colour = Colour.BLUE
    more: dict[str, int] = dataclasses.field(default_factory=dict)


class Box(typing.Generic[T]):
    def __init__(self, held: T) -> None:
        self.held = held


@case
def classes(x: Tensor) -> Tensor:
    derived: Scaled = Derived()
    assert (
        isinstance(derived, Base) and issubclass(Registered, Base) and not isinstance(derived, Runs)
    )
    assert Colour(2.0) is Colour.BLUE and Flags.A | Flags.B == 3
    point = Point(Box(Wrapped(x)).held.x)
    return point.kind.times(derived.scaled(point.x))


@case
def classes_in_functions(x: Tensor) -> Tensor:
    @dataclasses.dataclass
    class Pair:
        first: Tensor = dataclasses.field(default_factory=lambda: weight)
        second: torch.dtype = torch.float64

    return (x * Pair().first).to(Pair.second)


def steps(x: Tensor) -> Iterator[Tensor]:
    for number in range(3):
        yield x * number + (yield from inner_steps(x))


def inner_steps(x: Tensor) -> Iterator[Tensor]:
    yield x * weight
    return weight


@case
def generator_functions(x: Tensor) -> list[Tensor]:
    return list(steps(x))


OPERATORS = torch.ops, torch.ops.aten, torch.ops.aten.mul, torch.ops.aten.mul.Tensor


@case
def operators(x: Tensor) -> Tensor:
    every, namespace, operator, overload = OPERATORS
    assert every.aten.mul is namespace.mul is operator and operator.Tensor is overload
    return overload(x, weight)


class Counted:
    """A decorator with state."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.fn(*args)


def times(factor: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    calls: list[int] = []

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any) -> Any:
            calls.append(1)
            return fn(*args) * factor

        return wrapped

    return decorate


@case
@Counted
@times(2.0)
def decorated(x: Tensor) -> Tensor:
    return x * weight


@case
def module_below_another(x: Tensor) -> Tensor:
    """Uses `xml` and its attributes."""
    return x * len(xml.sax.saxutils.escape("<"))


@case
def module_that_an_inner_function_uses(x: Tensor) -> Tensor:
    def inner() -> int:
        return len(xml.dom.minidom.parseString("<a/>").childNodes)

    return x * inner()


def main() -> None:
    xs = [torch.arange(2.0, dtype=torch.float64).requires_grad_() for _ in range(3)]
    with mpgrad.Pool(1) as pool:
        for name, fn in CASES.items():
            try:
                assert_same_as_serial(fn, xs, pool)
                print(name, "ok")
            except BaseException:
                print(name, traceback.format_exc())
        for _ in range(2):  # each operation has new objects
            ys = pool.map(in_the_worker, xs[:1])
            assert torch.equal(ys[0], xs[0] * 2.0 * 3.0 * 5.0)
        print("guards ok")
        folder.cleanup()
        assert torch.equal(pool.map(warm_in_the_worker, xs[:1])[0], xs[0] * warm(1).weight)
        print("caches that go on ok")


if __name__ == "__main__":
    main()
