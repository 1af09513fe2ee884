"""What the user registers for own classes is registered in tasks.

`isinstance` was false there, so another branch ran, and `torch.func` found other leaves.
"""

from __future__ import annotations

import collections.abc
import copyreg
import functools
import gc
import importlib
import numbers
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import mpgrad
from mpgrad.pickling import registrations

DEFINITIONS = """
import collections.abc, copyreg, numbers, pkgutil, torch
from torch.utils import _pytree

w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

class Sequence:
    def __init__(self, x): self.x = x
class Number: ...
class State:
    def __init__(self, a, b): self.a, self.b = a, b
class Odd:
    def __init__(self, value): self.value = value

def flatten(state): return [state.a, state.b], None
def unflatten(parts, _): return State(*parts)
def reduce_odd(odd): return Odd, (odd.value + 100,)
def reduce_state(state): return State, (state.a, state.b)
def divergence(one, other): return 0.0
def of_odd(importer, prefix=""): return "odd"

def is_sequence(item): return isinstance(item, collections.abc.Sequence)
def is_number(_): return issubclass(Number, numbers.Real), isinstance(Number(), numbers.Number)
def leaves(item): return [leaf for leaf in _pytree.tree_leaves(item) if isinstance(leaf, float)]
def leaves_made(x): return leaves([State(x, x)])
def grad(x): return torch.func.grad(lambda s: s.a * s.b)(State(w * x, w)).a
def dispatches(_): return pkgutil.iter_importer_modules(Odd(1), "")
def odd(_): return Odd(1)
"""


@pytest.fixture(params=["module", "script"])
def lib(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "script":
        made = type("Script", (), {})()
        vars(made)["__name__"] = "__main__"
        exec(DEFINITIONS, vars(made))
        yield made
    else:
        (tmp_path / "registers.py").write_text(DEFINITIONS)
        sys.path.append(str(tmp_path))
        yield (made := importlib.import_module("registers"))
        sys.path.remove(str(tmp_path))
        del sys.modules["registers"]
    _pytree.SUPPORTED_NODES.pop(made.State, None)
    copyreg.dispatch_table.pop(made.Odd, None)


def test_registrations_travel_with_classes(pool: mpgrad.Pool, lib: Any) -> None:
    def same(fn: Callable[[Any], Any], item: Any) -> Any:
        (found,) = pool.map(fn, [item])
        assert found == fn(item)
        return found

    assert same(lib.is_sequence, lib.Sequence(1.0)) is False
    assert same(lib.is_number, 0) == (False, False)
    assert same(lib.leaves, lib.State(1.0, 2.0)) == []

    # after the first operation: workers know the classes already
    collections.abc.Sequence.register(lib.Sequence)
    numbers.Real.register(lib.Number)
    _pytree.register_pytree_node(lib.State, lib.flatten, lib.unflatten)
    pkgutil.iter_importer_modules.register(lib.Odd, lib.of_odd)
    assert same(lib.is_sequence, lib.Sequence(1.0)) is True
    assert same(lib.is_number, 0) == (True, True)
    assert same(lib.leaves, lib.State(1.0, 2.0)) == [1.0, 2.0]
    assert same(lib.dispatches, 0) == "odd"
    assert same(lib.grad, 3.0) == 2.0
    assert pool.map(lib.odd, [0])[0].value == 1
    copyreg.pickle(lib.Odd, lib.reduce_odd)
    assert pool.map(lib.odd, [0])[0].value == 101


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_registrations_of_a_kept_state_last(engine: Any, lib: Any) -> None:
    """The end of an operation took back those of a module's classes, which the next one reused."""
    _pytree.register_pytree_node(lib.State, lib.flatten, lib.unflatten)
    with mpgrad.Pool(1, engine=engine) as pool:
        for _ in range(3):
            assert pool.map(lib.leaves_made, [1.0]) == [[1.0, 1.0]]


@pytest.mark.parametrize("engine", ["thread", "inline"])
def test_tables_forget_copies_of_classes(engine: Any, lib: Any) -> None:
    """Each operation left one, and loaded the module anew."""
    collections.abc.Sized.register(lib.State)
    _pytree.register_pytree_node(lib.State, lib.flatten, lib.unflatten)
    pkgutil.iter_importer_modules.register(lib.State, lib.of_odd)
    copyreg.pickle(lib.State, lib.reduce_state)
    torch.distributions.register_kl(lib.State, lib.State)(lib.divergence)  # type: ignore[no-untyped-call]
    torch.serialization.add_safe_globals([lib.State])
    counts = []
    try:
        with mpgrad.Pool(1, engine=engine) as pool:
            for _ in range(10):
                assert pool.map(lib.leaves_made, [1.0]) == [[1.0, 1.0]]
                assert pool.map(lib.leaves, [lib.State(1.0, 2.0)]) == [[1.0, 2.0]]
                gc.collect()
                counts.append(sum(each.__name__ == "State" for each in object.__subclasses__()))
    finally:
        registrations.forget(lib.State)
    assert counts[-1] <= counts[1], counts  # the modules' states are kept
    assert registrations.registered_for(lib.State).keys() == {"abc"}


def test_another_registration_takes_the_place(pool2: mpgrad.Pool, lib: Any) -> None:
    for order in ("ab", "ba"):
        _pytree.SUPPORTED_NODES.pop(lib.State, None)
        flatten = functools.partial(
            lambda order, state: ([getattr(state, name) for name in order], None), order
        )
        _pytree.register_pytree_node(lib.State, flatten, lib.unflatten)
        item = lib.State(1.0, 2.0)
        assert pool2.map(lib.leaves, [item]) == [lib.leaves(item)]


def test_gradients_through_a_registered_class(pool2: mpgrad.Pool, lib: Any) -> None:
    _pytree.register_pytree_node(lib.State, lib.flatten, lib.unflatten)
    results = pool2.map(lib.grad, [1.0, 2.0])
    expected = [lib.grad(x) for x in (1.0, 2.0)]
    assert [each.item() for each in results] == [each.item() for each in expected]
    (got,) = torch.autograd.grad(sum(results), lib.w)
    (wanted,) = torch.autograd.grad(sum(expected), lib.w)
    assert torch.equal(got, wanted)


def test_accessors_of_pandas(pool2: mpgrad.Pool) -> None:
    """A worker's pandas lacked them: AttributeError."""
    pandas = pytest.importorskip("pandas")
    register = pandas.api.extensions.register_series_accessor

    def total(series: Any) -> Any:
        return series.mpgrad_test.total()

    try:
        with pytest.raises(AttributeError, match="mpgrad_test"):
            pool2.map(total, [pandas.Series([1.0, 2.0])])
        for factor in (1.0, 10.0):

            class Accessor:
                def __init__(self, series: Any) -> None:
                    self.series = series

                def total(self, factor: float = factor) -> float:
                    return float(self.series.sum()) * factor

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the second one replaces the first
                register("mpgrad_test")(Accessor)
            assert pool2.map(total, [pandas.Series([1.0, 2.0])]) == [3.0 * factor]
    finally:
        del pandas.Series.mpgrad_test
        pandas.Series._accessors.discard("mpgrad_test")
