"""Items and results of classes that are carried by value: looked at and loaded once, and always as they are now."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad import structure
from mpgrad.structure import MOST_CLASSES

Tensor = torch.Tensor

ADAPTIVE = True
OPTIONS: list[dict[str, Any]] = [{}, *({"inline": "never", "engine": each} for each in ("process", "thread", "inline"))]


@pytest.fixture(params=OPTIONS, ids=str)
def any_pool(request: pytest.FixtureRequest, nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(1 if request.param.get("engine") == "inline" else 2, **request.param) as pool:
        yield pool


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
    return [torch.full((3,), 1.0 + number, dtype=torch.float64).requires_grad_() for number in range(count)]


def test_classes_and_gradients(any_pool: mpgrad.Pool) -> None:
    item = made()

    def fn(given: Any) -> Any:
        assert type(given) is item
        return item(given.scaled())

    for _ in range(3):
        xs = leaves(40)
        results = any_pool.map(fn, [item(x) for x in xs])
        assert all(type(result) is item for result in results)
        torch.stack([result.scaled() for result in results]).sum().backward()
        assert all(torch.equal(x.grad, torch.full_like(x, 4)) for x in xs if x.grad is not None)
        assert all(x.grad is not None for x in xs)


@pytest.mark.parametrize("way", ["map", "starmap", "map_async"])
def test_a_class_is_looked_at_once_and_loaded_once(way: str, nursery: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    item, looked_at = made(), list[type]()
    search = structure.reaches_tensor
    monkeypatch.setattr(structure, "reaches_tensor", lambda value: looked_at.append(value) or search(value))
    items = [item(x) for x in leaves(50)]

    def fn(given: Any) -> Any:
        from mpgrad import structure

        return given.scaled(), len(structure.LOADED)

    with mpgrad.Pool(1, inline="never") as pool:
        for _ in range(2):  # one by one, and in bundles
            looked_at.clear()
            match way:
                case "map":
                    results = pool.map(fn, items)
                case "starmap":
                    results = pool.starmap(fn, [(each,) for each in items])
                case "map_async":
                    results = pool.map_async(fn, items).get()
            assert looked_at.count(item) <= 2  # the second time for its pickle
            assert {loaded for _, loaded in results} == {1}


def test_a_class_is_as_it_is_when_the_operation_begins(any_pool: mpgrad.Pool) -> None:
    """Also where it is what it was once: its pickle is known then, but is not what was loaded last."""
    item = made()
    for scale in (2.0, 3.0, 2.0):
        item.scale = scale
        xs = leaves(40)
        results = any_pool.map(lambda given: given.scaled(), [item(x) for x in xs])
        assert all(torch.equal(result, x * scale) for result, x in zip(results, xs, strict=True))


def test_a_function_may_bring_the_class_too(nursery: mpgrad.Pool) -> None:
    item = made()
    with mpgrad.Pool(1, inline="never") as pool:
        for scale in (2.0, 3.0, 2.0):
            item.scale = scale
            xs = leaves(10)
            if scale == 2:
                results = pool.map(lambda given: given.scaled(), [item(x) for x in xs])
            else:
                results = pool.map(lambda x: item(x).scaled(), xs)
            assert all(torch.equal(result, x * scale) for result, x in zip(results, xs, strict=True))


def test_the_pickle_that_was_loaded_last_counts() -> None:
    """Operations side by side may have had the class in two states."""
    item, pickles = made(), list[bytes]()
    for scale in (2.0, 3.0):
        item.scale = scale
        pickles.append(structure.dumps(item)[0])
    structure.forget_classes()
    for number in (0, 0, 1, 1, 0, 1):
        assert structure.class_again(pickles[number]) is item
        assert item.scale == 2 + number
    structure.forget_classes()


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_gradients_of_what_a_class_holds(engine: str, nursery: mpgrad.Pool) -> None:
    item = made()
    weight = torch.full((), 5.0, dtype=torch.float64, requires_grad=True)
    with mpgrad.Pool(1, inline="never", engine=engine) as pool:
        for held in (None, weight, None):
            item.weight, weight.grad = held, None
            xs = leaves(20)
            torch.stack(pool.map(lambda given: given.scaled().sum(), [item(x) for x in xs])).sum().backward()
            assert (weight.grad is None) == (held is None)
            if weight.grad is not None:
                assert weight.grad == 2 * sum(x.sum() for x in xs)


@pytest.mark.parametrize("where", ["items", "results"])
def test_classes_that_are_made_anew_for_each_item_are_not_all_kept(where: str, nursery: mpgrad.Pool) -> None:
    def loaded(make: Callable[[], Any]) -> Callable[[Any], Any]:
        def fn(given: Any) -> Any:
            from mpgrad import structure

            return make()(torch.ones(3)) if isinstance(given, int) else len(structure.LOADED)

        return fn

    with mpgrad.Pool(1, inline="never") as pool:
        if where == "items":
            assert max(pool.map(loaded(made), [made()(torch.ones(3)) for _ in range(3 * MOST_CLASSES)])) <= MOST_CLASSES + 1
        else:
            results = pool.map(loaded(made), range(3 * MOST_CLASSES))
            assert len(structure.LOADED) <= MOST_CLASSES + 1
            assert all(torch.equal(each.scaled(), torch.full((3,), 2.0)) for each in results)
            assert not any(type(one) is type(other) for one, other in itertools.pairwise(results))
