"""A task that writes to a captured container changes a copy. The caller is warned once a
function."""

from __future__ import annotations

import collections
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.quick

RESULTS: list[Any] = []
TABLE: dict[Any, Any] = {"best": 0}
SEEN: set[Any] = set()
COUNTS: collections.Counter[str] = collections.Counter()
NESTED = {"rows": [[1.0]]}
CACHE: dict[int, int] = {}
_private: list[int] = []


class Model:
    def __init__(self) -> None:
        self.steps = 0
        self.history: list[float] = []
        self.table: Any = None

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.steps

    def step(self, x: float) -> float:
        self.steps += 1
        return x

    def remember(self, x: float) -> float:
        self.history.append(x)
        return x

    def fill(self, x: float) -> float:
        self.table = self.table or [1.0]
        return x * self.doubled

    def __call__(self, x: float) -> float:
        return self.remember(x)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.LSTM(2, 2)
        self.seen = 0

    def forward(self, x: float) -> float:
        self.seen += 1
        return x


MODEL = Model()


def appending(x: float) -> float:
    RESULTS.append(x)
    return x


def setting(x: float) -> float:
    TABLE["best"] = x
    return x


def adding(x: float) -> float:
    SEEN.add((x, len(SEEN)))
    return x


def counting(x: float) -> float:
    COUNTS["calls"] += 1
    return x


def nesting(x: float) -> float:
    NESTED["rows"][0].append(x)
    return x


def noting(x: float, log: list[float] = []) -> float:  # noqa: B006
    log.append(x)
    return x


def attribute(x: float) -> float:
    MODEL.steps = int(x)
    return x


def of_itself(x: float) -> float:
    of_itself.log.append(x)  # type: ignore[attr-defined]
    return x


of_itself.log = []  # type: ignore[attr-defined]


def appending_with(log: list[float], x: float) -> float:
    log.append(x)
    return x


def of_a_closure() -> Callable[[float], float]:
    losses: list[float] = []

    def fn(x: float) -> float:
        losses.append(x)
        return x

    return fn


LOST: list[tuple[Callable[[float], float], str]] = [
    (appending, r"^appending changed RESULTS \(a list\), but only the worker's copy"),
    (setting, r"^setting changed TABLE \(a dict\)"),
    (adding, r"^adding changed SEEN \(a set\)"),
    (counting, r"^counting changed COUNTS \(a Counter\)"),
    (nesting, r"^nesting changed NESTED\[...\]\[...\] \(a list\)"),
    (noting, r"^noting changed log \(a list\)"),
    (attribute, r"^attribute changed MODEL \(attributes\)"),
    (of_itself, r"^of_itself changed of_itself.log \(a list\)"),
    (of_a_closure(), r"^fn changed losses \(a list\)"),
    (functools.partial(appending_with, []), r"^appending_with changed .* \(a list\)"),
    (Model().step, r"^Model.step changed self \(attributes\)"),
    (Model().remember, r"^Model.remember changed self.history \(a list\)"),
    (Model(), r"^Model.* changed history \(a list\)"),
    (Layer(), r"^Layer.* changed Layer \(attributes\)"),
]


@pytest.mark.parametrize(("function", "message"), LOST)
def test_a_write_that_is_lost(
    pool: mpgrad.Pool, function: Callable[[float], float], message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        assert pool.map(function, [1.0, 2.0]) == [1.0, 2.0]


def test_it_is_told_once(pool2: mpgrad.Pool) -> None:
    given: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *now: given.append(now)
        for _ in range(3):
            pool2.map(appending, range(40), 1)
            pool2.submit(appending, 1.0).result()
            list(pool2.imap(appending, range(4)))
            pool2.map_async(appending, range(4)).get()
    ((text, kind, file, line, *_),) = given
    assert (kind, file, line) == (UserWarning, __file__, appending.__code__.co_firstlineno)
    assert "return the value and store it in the caller" in str(text)


def with_cache(k: int) -> int:
    if k not in CACHE:
        CACHE[k] = k * k
    return CACHE[k]


@functools.lru_cache
def squared(k: int) -> int:
    return k * k


def with_lru_cache(k: int) -> int:
    return squared(k)


def with_scratch(k: int) -> int:
    RESULTS.append(k)
    return int(RESULTS.pop())


def with_own(k: int) -> int:
    own = Model()
    own.history.append(k)
    _private.append(k)
    return k


def with_libraries(k: int) -> int:
    logging.getLogger("of a task").setLevel(logging.ERROR + k)
    torch.nn.Linear(1, 1)(torch.ones(1))
    return k


def of_an_item(items: list[int]) -> int:
    items.append(1)
    return len(items)


@pytest.mark.parametrize(
    "function", [with_cache, with_lru_cache, with_scratch, with_own, with_libraries, Model().fill]
)
def test_what_a_task_changes_for_itself(
    pool: mpgrad.Pool, function: Callable[[float], float]
) -> None:
    """Warnings are errors here."""
    for _ in range(2):
        pool.map(function, [1, 2, 3])


def test_an_item_is_the_tasks_own(pool: mpgrad.Pool) -> None:
    assert pool.map(of_an_item, [[], [1]]) == [1, 2]


WORKERS_OWN: list[int] = []


def begin() -> None:
    WORKERS_OWN.append(0)


def counted(_: int) -> int:
    WORKERS_OWN.append(1)
    return len(WORKERS_OWN)


def test_what_an_initializer_has_made_is_the_workers(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, begin) as pool:
        assert pool.map(counted, range(3)) == [2, 3, 4]


def test_a_failed_task_has_written_as_well(pool2: mpgrad.Pool) -> None:
    log: list[int] = []

    def fn(k: int) -> float:
        log.append(k)
        return 1 / k

    with pytest.warns(UserWarning, match="^fn changed log"), pytest.raises(ZeroDivisionError):
        pool2.map(fn, [0])
