"""Functions are pickled and loaded again only where something that they depend on is another
one."""

from __future__ import annotations

import enum
import functools
import gc
import math
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.pickling import state, unchanged
from mpgrad.pickling.state import dumps_function, loads_with_state

pytestmark = pytest.mark.quick

SCRIPT = """
import functools, math, torch
RATE, TEXT, FLAG = 0.5, "text", True
WEIGHT = torch.ones(3, requires_grad=True)
OTHER = torch.zeros(3)
TABLE = {"k": 1.0}
COUNT = 0
def helper(x): return x * RATE
def number(x): return x * RATE
def tensor(x): return (x * WEIGHT + OTHER).sum()
def through_helper(x): return helper(x)
def library(x): return torch.nn.functional.relu(x) * math.pi
def default(x, rate=2.0): return x * rate
def annotated(x: torch.Tensor, n: int = 2) -> torch.Tensor: return x * n
def recursive(n): return 1 if n == 0 else n * recursive(n - 1)
def absent(x): return x * later
def closure(factor, weight):
    def inner(x): return x * factor * weight
    return inner
def sharing():
    n = 0
    def one(): return n
    def other(): return n
    return lambda: (one(), other())
def container(x): return x * TABLE["k"]
def calls(item): return item(2)
def adds(x):
    global COUNT
    COUNT += x
    return COUNT
def counts(x):
    global COUNT
    COUNT += 1
    return COUNT
def remembers(x):
    remembers.calls = getattr(remembers, "calls", 0) + 1
    return remembers.calls
def looks_up(x): return x * globals()["RATE"]
partly = functools.partial(default, rate=3.0)
given = functools.partial(helper, WEIGHT)
"""


class Script:
    """Its names as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


@pytest.fixture
def script() -> Script:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, names)
    unchanged.PICKLES.clear()
    return Script(names)


def dumped_before(function: Callable[..., Any]) -> tuple[bytes, list[torch.Tensor]] | None:
    kept, fingerprint = unchanged.kept_pickle(function)
    return (
        None
        if kept is None or fingerprint is None
        else (kept.pickled, [fingerprint.tensors[number] for number in kept.order])
    )


def is_known(function: Callable[..., Any]) -> bool:
    """Whether it is not pickled again; what is known is what it would be pickled as."""
    known = dumped_before(function)
    if known is None:
        return False
    unchanged.PICKLES.clear()
    pickled, tensors, *_ = dumps_function(function)
    assert known[0] == pickled and len(known[1]) == len(tensors)
    assert all(one is other for one, other in zip(known[1], tensors, strict=True))
    return True


STEADY = [
    "number",
    "tensor",
    "through_helper",
    "library",
    "default",
    "annotated",
    "recursive",
    "absent",
    "partly",
    "given",
]


@pytest.mark.parametrize("name", STEADY)
def test_what_cannot_be_written_to_is_known(script: Any, name: str) -> None:
    function = getattr(script, name)
    dumps_function(function)
    assert is_known(function)


@pytest.mark.parametrize("name", ["container", "looks_up"])
def test_what_may_be_written_to_is_not(script: Any, name: str) -> None:
    for _ in range(2):
        dumps_function(getattr(script, name))
        assert dumped_before(getattr(script, name)) is None


@pytest.mark.parametrize(
    "function", [abs, math.sin, torch.sin, torch.nn.functional.relu, functools.partial(abs)]
)
def test_of_libraries(function: Callable[..., Any]) -> None:
    dumps_function(function)
    assert is_known(function)


@pytest.mark.parametrize(
    "function", [[].append, "a".join, functools.partial(max, []), torch.nn.ReLU()]
)
def test_what_has_an_object_is_pickled_each_time(function: Callable[..., Any]) -> None:
    dumps_function(function)
    assert dumped_before(function) is None


def test_no_object_is_kept_for_its_method() -> None:
    """Symptom: its tensor lived on. Cause: the method was noted as one whose pickles are not
    kept."""
    for make in (lambda tensor: tensor.mul, lambda tensor: functools.partial(tensor.mul)):
        tensor = torch.ones(2)
        kept = weakref.ref(tensor)
        dumps_function(make(tensor))
        del tensor
        assert kept() is None


def test_a_lambda_in_a_loop(script: Any) -> None:
    """It is another function each time, and its tensors are others."""
    dumps_function(script.closure(2.0, torch.ones(2)))
    weight = torch.zeros(4)
    known = dumped_before(script.closure(2.0, weight))
    assert known is not None and known[1] == [weight]


def test_a_partial_function_is_not_what_it_calls(script: Any) -> None:
    for function in (
        script.default,
        functools.partial(script.default),
        functools.partial(script.default, 1.0),
    ):
        dumps_function(function)
        assert is_known(function)
    assert dumped_before(functools.partial(script.default, rate=1.0)) is None


def test_attributes_of_tensors_are_in_the_pickle(script: Any) -> None:
    """Symptom: tensors without attributes had those of others, which had been captured by functions
    with the same code."""
    weight = torch.ones(2)
    weight.note = "of the first"  # type: ignore[attr-defined]
    dumps_function(script.closure(2.0, weight))
    assert dumped_before(script.closure(2.0, torch.ones(2))) is None


def test_a_method_of_a_class_of_the_scripts(script: Any) -> None:
    """Its class may be written to."""
    exec(
        "class Own(dict): tag = 1\nmake = Own.fromkeys\ndef makes(x): return make([x]).tag",
        vars(script),
    )
    dumps_function(script.makes)
    assert dumped_before(script.makes) is None


def test_who_writes_while_it_is_pickled(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread, which has put back what was there when all is looked at again."""
    dump = state.CallerPickler.dump

    def dumped(self: Any, value: Any) -> None:
        script.RATE = 7.0
        dump(self, value)
        script.RATE = 0.5

    monkeypatch.setattr(state.CallerPickler, "dump", dumped)
    dumps_function(script.number)
    assert dumped_before(script.number) is None


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a number": ("number", lambda script: vars(script).update(RATE=0.25)),
    "its sign": ("absent", lambda script: vars(script).update(later=-0.0)),
    "its kind": ("default", lambda script: setattr(script.default, "__defaults__", (2,))),
    "a helper": ("through_helper", lambda script: vars(script).update(helper=lambda x: x)),
    "a helper's code": (
        "through_helper",
        lambda script: setattr(script.helper, "__code__", (lambda x: x).__code__),
    ),
    "what a helper uses": ("through_helper", lambda script: vars(script).update(RATE=1)),
    "a name that was absent": ("absent", lambda script: vars(script).update(later=2)),
    "a name that is gone": ("number", lambda script: vars(script).pop("RATE")),
    "a default": ("default", lambda script: setattr(script.default, "__defaults__", (3.0,))),
    "a keyword's default": (
        "number",
        lambda script: setattr(script.number, "__kwdefaults__", {"x": 1}),
    ),
    "an attribute": ("number", lambda script: setattr(script.number, "calls", 1)),
    "an annotation": ("annotated", lambda script: script.annotated.__annotations__.update(n=float)),
    "its name": ("number", lambda script: setattr(script.number, "__qualname__", "other")),
    "what a name leads to": ("library", lambda script: vars(script).update(math=torch)),
    "an attribute of a tensor": ("tensor", lambda script: setattr(script.WEIGHT, "note", "n")),
    "the kind of a tensor": (
        "tensor",
        lambda script: vars(script).update(WEIGHT=torch.nn.Parameter(torch.ones(3))),
    ),
    "two tensors that are one": ("tensor", lambda script: vars(script).update(OTHER=script.WEIGHT)),
    "what a partial one is given": (
        "partly",
        lambda script: script.partly.keywords.update(rate=4.0),
    ),
    "and what it is not given any more": ("partly", lambda script: script.partly.keywords.clear()),
    "an attribute of a partial one": ("partly", lambda script: setattr(script.partly, "calls", 1)),
    "what a partial one calls": ("given", lambda script: vars(script).update(RATE=0.25)),
    "what cannot be compared": ("number", lambda script: vars(script).update(RATE=[0.5])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_pickled_again(script: Any, change: str) -> None:
    name, make = CHANGES[change]
    if change == "its sign":
        script.later = 0.0
    function = getattr(script, name)
    dumps_function(function)
    assert dumped_before(function) is not None
    make(script)
    assert dumped_before(function) is None


def test_cells_that_are_shared(script: Any) -> None:
    """Of two functions with equal values in cells, what one writes the other one reads, or does
    not."""
    shared = script.sharing()
    dumps_function(shared)
    cells = shared.__closure__
    other = cells[1].cell_contents
    lone = types.FunctionType(
        other.__code__, other.__globals__, other.__name__, None, (types.CellType(0),)
    )
    lone.__qualname__ = other.__qualname__
    apart = types.FunctionType(
        shared.__code__, shared.__globals__, shared.__name__, None, (cells[0], types.CellType(lone))
    )
    apart.__qualname__ = shared.__qualname__
    assert is_known(shared) and dumped_before(apart) is None


def test_no_tensor_and_no_function_is_kept(script: Any) -> None:
    weight = torch.ones(3)
    function = script.closure(2.0, weight)
    refs = weakref.ref(weight), weakref.ref(function)
    dumps_function(function)
    dumped_before(function)
    del weight, function
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# --- in a pool


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_a_call_sees_what_the_caller_has_now(script: Any, engine: str) -> None:
    x = torch.linspace(0, 1, 3)
    with mpgrad.Pool(1, engine=engine) as pool:
        for rate in (0.5, 0.25, 0.25, 3.0):
            script.RATE = rate
            assert torch.equal(pool.map(script.through_helper, [x])[0], x * rate)
            weight = torch.full((3,), rate, requires_grad=True)
            result = pool.submit(script.closure(rate, weight), x).result()
            result.sum().backward()
            assert weight.grad is not None and torch.equal(weight.grad, x * rate)


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
@pytest.mark.parametrize("name", ["counts", "remembers"])
def test_what_a_call_writes_is_gone_in_the_next_operation(
    script: Any, engine: str, name: str
) -> None:
    """As ever: an operation's calls share what they write, in a worker, and the next one begins as
    the caller has it."""
    with mpgrad.Pool(1, engine=engine) as pool:
        for _ in range(3):
            assert pool.map(getattr(script, name), [0, 0], 1) == [1, 2]


def test_what_no_call_has_written_to_is_loaded_once(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []

    def counted(*given: Any, **more: Any) -> Any:
        loaded.append(given)
        return loads_with_state(*given, **more)

    monkeypatch.setattr("mpgrad.workers.functions.loads_with_state", counted)
    with mpgrad.Pool(1, engine="inline") as pool:
        for function, expected in ((script.number, 1), (script.counts, 3), (script.container, 3)):
            loaded.clear()
            for _ in range(3):
                pool.map(function, [torch.ones(2)])
            assert len(loaded) == expected


SCALE = 2.0


def test_what_was_not_known_whole_is_not_taken_for_known(pool: mpgrad.Pool) -> None:
    """Symptom: IndexError, raised while loading a function that uses names of a module of the
    user's own."""
    weight = torch.linspace(1, 2, 3)
    for _ in range(3):
        assert torch.equal(
            pool.map(lambda x: x * weight * SCALE, [torch.ones(3)])[0], weight * SCALE
        )


class Word(str, enum.Enum):
    RATE = "rate"


def test_keywords_that_are_no_plain_texts(pool: mpgrad.Pool) -> None:
    """Symptom: each worker died of the message, which has no classes of the user's."""
    assert pool.apply(dict, (), {Word.RATE: 1.0}) == {"rate": 1.0}


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_operations_that_overlap(script: Any, engine: str) -> None:
    """Symptom: what calls of one had written the other's calls saw."""
    with mpgrad.Pool(1, engine=engine) as pool:
        pool.map(script.adds, [0])
        first, second = pool.imap(script.adds, iter([5] * 4)), pool.imap(script.adds, iter([0] * 4))
        found = [(next(first), next(second)) for _ in range(4)]
    assert found == [(5, 0), (10, 0), (15, 0), (20, 0)]


def test_items_that_bring_what_they_use(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a worker that had loaded the function without the module that the items use had an
    old one."""
    module: Any = types.ModuleType("own_module_of_items")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("RATE = 1\ndef scaled(x): return x * RATE", vars(module))
    with mpgrad.Pool(1) as pool:
        for rate in (1, 2, 3):
            pool.map(script.calls, [abs])
            module.RATE = rate
            assert pool.map(script.calls, [module.scaled]) == [2 * rate]


@pytest.mark.parametrize("engine", ["thread", "inline"])
def test_builtins_are_those_of_now(
    script: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mpgrad.Pool(1, engine=engine) as pool:
        for value in (1, 2):
            monkeypatch.setattr("builtins.later", value, raising=False)
            assert pool.map(script.absent, [3]) == [3 * value]


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_what_items_bring_is_not_kept(script: Any, engine: str) -> None:
    exec("def made(big):\n def item(x): return big * x\n return item", vars(script))
    exec(
        "def large(_):\n import gc; gc.collect()\n"
        " return sum(isinstance(o, torch.Tensor) and o.numel() == 1_000_003 for o in "
        "gc.get_objects())",
        vars(script),
    )
    with mpgrad.Pool(1, engine=engine) as pool:
        pool.map(script.calls, [script.made(torch.ones(2))])
        pool.map(script.calls, [script.made(torch.ones(1_000_003))])
        pool.map(abs, [1])
        assert pool.map(script.large, [0]) == [0]
