"""What is one object in the caller is one object in a task, by whichever way it is reached."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.quick

LIB = """
    import collections, functools, random, torch, lib_two

    class Model:
        def __init__(self):
            self.w = torch.ones(2, requires_grad=True)
            self.parts = {"a": [1.0], "b": collections.deque([2.0])}
        def __call__(self, x): return (self.w * x).sum() * self.parts["a"][0]

    w = torch.full((2,), 3.0, requires_grad=True)
    named = torch.ones(2, requires_grad=True)
    named.note = "n"
    model = Model()
    registry = {"model": model}
    class Params: w, table = w, {"rate": 2.0}
    lib_two.w, lib_two.model = w, model
    callbacks = []
    generator = random.Random(5)
    def f(x): return (w * x).sum() * Params.table["rate"]
    def g(x): return model(x) + lib_two.w.sum() + registry["model"].w.sum()
    def draws(x): return generator.random()
    @functools.cache
    def made(): return torch.zeros(2)
"""
SCRIPT = """
    import lib, lib_two, torch
    from lib import w, f, g, model, registry, Params, named, callbacks, generator, made
    table = Params.table
    inner = model.parts["a"]
    made()

    def same(x):
        return (
            w is lib.w, w is lib_two.w, model is lib.model, registry["model"] is lib.model,
            model is lib_two.model, Params.w is w, table is lib.Params.table,
            inner is lib.model.parts["a"], named is lib.named, named.note,
            made() is lib.made(), generator is lib.generator,
        )
    def grads(x): return torch.autograd.grad(f(x) + g(x), [w, model.w])
    def write(x):
        inner[0] = table["rate"] = x
        return lib.model.parts["a"][0], lib.Params.table["rate"], f(torch.ones(2)).item()
    def hook(x): return hook.rate * x
    hook.rate = [1.0]
    callbacks.append(hook)
    def calls(x):
        hook.rate = x
        return lib.callbacks[0] is hook, lib.callbacks[0](2.0)
    def local():
        mine = lib.model
        return lambda x: (mine is lib.model, mine(x))
    def numbers(x): return generator.random() == lib.draws(x)
    class Held:
        w, model = w, model
    def by_class(x): return Held.w is lib.w, Held.model is lib.model, (Held.w * x).sum()
    class Callable:
        def __init__(self): self.model = lib.model
        def __call__(self, x): return self.model is lib.model, g(x)
        def method(self, x): return self.model is lib.model, g(x)
"""


class Names:
    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lib.py").write_text(textwrap.dedent(LIB))
    (tmp_path / "lib_two.py").write_text("")
    importlib.import_module("lib")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(SCRIPT), names)
    yield Names(names)
    for name in ("lib", "lib_two"):
        del sys.modules[name]


@pytest.fixture(params=["process", "thread", "inline"])
def a_pool(request: pytest.FixtureRequest) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(1, engine=request.param) as pool:
        yield pool


def one(pool: mpgrad.Pool, function: Callable[..., Any], x: Any) -> Any:
    return pool.map(function, [x])[0]


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_one_object_by_two_ways(a_pool: mpgrad.Pool, script: Any) -> None:
    """Symptom: `w is lib.w` was False in a task, and `autograd.grad` raised. Cause: a function and
    the modules' names were two pickles."""
    x = torch.ones(2)
    for _ in range(4):
        found = one(a_pool, script.same, x)
        assert found == script.same(x) and all(found)
        for mine, other in zip(one(a_pool, script.grads, x), script.grads(x), strict=True):
            assert torch.equal(mine, other)
        assert one(a_pool, script.write, 4.0) == (4.0, 4.0, 24.0)
        assert one(a_pool, script.calls, 3.0) == (True, 6.0)
        assert one(a_pool, script.numbers, 1) is False
        script.lib.model.parts["b"].append(1.0)


def test_gradients_reach_the_one_leaf(a_pool: mpgrad.Pool, script: Any) -> None:
    x = torch.ones(2)
    held = script.Callable()
    for function in (script.by_class, script.local(), held, held.method):
        for _ in range(3):
            found, expected = one(a_pool, function, x), function(x)
            assert found[:-1] == expected[:-1] and all(found[:-1])
            leaves = script.w, script.model.w
            grads = [
                torch.autograd.grad(each[-1], leaves, allow_unused=True)
                for each in (found, expected)
            ]
            for mine, other in zip(*grads, strict=True):
                assert mine is other is None or torch.equal(mine, other)


def test_transforms_of_what_is_shared(a_pool: mpgrad.Pool, script: Any) -> None:
    found = mpgrad.jacobian(script.g, torch.ones(2), pool=a_pool)
    expected = torch.autograd.functional.jacobian(script.g, torch.ones(2))
    assert torch.equal(found, expected)


def test_other_operations(a_pool: mpgrad.Pool, script: Any) -> None:
    x = torch.ones(2)
    assert all(a_pool.submit(script.same, x).result())
    assert all(a_pool.apply(script.same, (x,)))
    assert all(map(all, a_pool.imap(script.same, [x, x])))
    assert all(a_pool.starmap(script.same, [(x,)])[0])
    with mpgrad.Executor(1) as executor:
        assert all(executor.submit(script.same, x).result())
