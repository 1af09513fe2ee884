"""Bugs of what functions reach that were, each with its symptom and its cause."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.testing import assert_same_as_serial


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


def test_recursive_functions_give_their_captures_back(fresh_pool: mpgrad.Pool) -> None:
    # symptom: 1 MB a map stayed in the worker. cause: the function is a cycle, which waits for the
    # garbage collector.
    weight = torch.ones(1 << 20)

    def recursive(n: int) -> float:
        return recursive(n - 1) if n else float(weight[0])

    for _ in range(60):
        assert fresh_pool.map(recursive, [2]) == [1.0]
        gc.collect()
    lent = sum(len(worker.lent_slots) for worker in fresh_pool._scheduler.workers.values())
    assert lent < 40  # 64 MiB before a worker collects, 4 MiB a map, two workers


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


def test_while_another_thread_imports_the_compiler(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # symptom: AttributeError. cause: a module is in sys.modules before what it defines is there.
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    assert pool2.map(abs, [-1]) == [1]


def test_code_has_the_name_of_its_file(pool2: mpgrad.Pool) -> None:
    """Symptom: tracebacks of workers without lines. Cause: cloudpickle from 3.1.3 on leaves the
    name out."""

    def fn(x: int) -> list[str]:
        code = [sys._getframe().f_code, (lambda: sys._getframe().f_code)()]
        return [each.co_filename for each in code]

    assert pool2.map(fn, [1]) == [[__file__] * 2]


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.bias.no_decay = True  # type: ignore[attr-defined]
        self.weight.scale = torch.tensor(2.0, requires_grad=True)  # type: ignore[attr-defined]
        self.weight.owner = self  # type: ignore[attr-defined]


def test_attributes_of_tensors(pool: mpgrad.Pool) -> None:
    # symptom: 33.0 in place of 23.0. cause: a captured tensor travelled as its values, without what
    # it had in Python.
    net = Head()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        decayed = [p for p in net.parameters() if not getattr(p, "no_decay", False)]
        scaled = (net.weight * x).sum() * net.weight.scale + net.bias.sum()  # type: ignore[attr-defined, operator]
        assert net.weight.owner is net  # type: ignore[attr-defined]
        return scaled + 10.0 * len(decayed) + getattr(x, "shift", 0.0)

    def given() -> list[torch.Tensor]:
        items = [torch.full((3,), float(k), requires_grad=True) for k in range(30)]
        for k, each in enumerate(items):
            each.shift = torch.tensor(k + 0.5)  # type: ignore[attr-defined]
        return items

    assert_same_as_serial(penalty, given(), pool)
    assert_same_as_serial(
        lambda pair: penalty(pair[0]) + penalty(pair[1]), [[x, x] for x in given()], pool
    )
    net.bias.no_decay = False  # type: ignore[attr-defined]
    assert pool.map(penalty, given()[:1])[0] == penalty(given()[0]) == 20.5


def test_attributes_of_results(pool: mpgrad.Pool) -> None:
    # symptom: AttributeError. cause: a result that is a tensor travelled without a pickle.
    def tagged(x: torch.Tensor) -> Any:
        y = x * 2
        y.tag = {"of": x.item(), "item": x * 3}  # type: ignore[attr-defined]
        return (y, y) if x > 1 else y

    items = [torch.tensor(float(k), requires_grad=True) for k in range(4)]
    assert_same_as_serial(tagged, items, pool)
    first, *_, (last, same) = pool.map(tagged, items)
    assert first.tag["of"] == 0 and last is same and last.tag["item"] == 9
    last.tag["item"].backward()
    assert items[3].grad == 3


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
