"""A worker that has run dry gets what another one has been given and has not begun."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.pool import MOST_BUNDLED


@pytest.fixture
def pool(nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(2, inline="never") as own:
        yield own


def run(item: tuple[int, float, str]) -> tuple[int, int]:
    number, seconds, folder = item
    with open(Path(folder) / str(number), "a") as file:  # who ran it
        file.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return number, os.getpid()


def runs(folder: Path) -> list[int]:
    return [len((folder / name).read_text().split()) for name in sorted(os.listdir(folder), key=int)]


@pytest.mark.parametrize(("source", "most"), [(iter, 1), (list, 2 * MOST_BUNDLED)], ids=["one by one", "in bundles"])
def test_what_stands_behind_a_long_call_goes_to_others(
    source: Callable[[list[Any]], Iterable[Any]], most: int, pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """Cheap calls come first, so that chunks are large; then one of a chunk takes long."""
    for _ in range(3):
        pool.map(run, [(0, 0.0, str(tmp_path))] * 100)
    (tmp_path / "0").unlink()
    items = [(number, 1.0 if number == 40 else 1e-3, str(tmp_path)) for number in range(240)]
    started = time.perf_counter()
    found = pool.map(run, source(items))
    seconds = time.perf_counter() - started
    assert [number for number, _ in found] == list(range(240))
    assert runs(tmp_path) == [1] * 240  # each once
    slow = found[40][1]
    behind = [pid for _, pid in found[41:]]
    assert behind.count(slow) <= most + 3, seconds  # what it may have begun, and what is shorter than a message


def test_calls_that_are_called_off_keep_gradients_and_seeds(pool: mpgrad.Pool) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        if x[0] == 0:
            time.sleep(0.2)
        else:
            time.sleep(5e-4)
        return (x * torch.rand(3)).sum()

    def once(pool: mpgrad.Pool) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(5)
        x = torch.ones(3, requires_grad=True)
        xs = [x * (number != 10) for number in range(60)]
        losses = pool.map(noisy, xs)
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), x)
        return [each.item() for each in losses], gradient

    pool.map(noisy, [torch.ones(3)] * 60)
    first, second = once(pool), once(pool)
    with mpgrad.Pool(1, inline="never") as alone:
        third = once(alone)
    assert first[0] == second[0] == third[0]
    torch.testing.assert_close(first[1], third[1])


def test_random_costs_run_each_call_once(pool: mpgrad.Pool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for round_number in range(6):
        folder = tmp_path / str(round_number)
        folder.mkdir()
        costs = torch.exp(2 * torch.randn(300, generator=generator)) * 2e-4
        found = pool.map(run, [(number, min(cost, 0.1), str(folder)) for number, cost in enumerate(costs.tolist())])
        assert [number for number, _ in found] == list(range(300))
        assert runs(folder) == [1] * 300


def test_a_chunksize_is_kept(pool: mpgrad.Pool, tmp_path: Path) -> None:
    items = [(number, 0.3 if number == 0 else 1e-3, str(tmp_path)) for number in range(40)]
    found = pool.map(run, items, chunksize=10)
    assert len({pid for _, pid in found[:10]}) == 1


def test_a_death_with_calls_called_off(pool: mpgrad.Pool, tmp_path: Path) -> None:
    def deadly(item: tuple[int, float, str]) -> tuple[int, int]:
        found = run(item)
        if item[0] == 20 and len((Path(item[2]) / "20").read_text().split()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    pool.map(deadly, [(0, 0.0, str(tmp_path))] * 100)
    items = [(number, 0.3 if number == 20 else 1e-3, str(tmp_path)) for number in range(100)]
    assert [number for number, _ in pool.map(deadly, items)] == list(range(100))
    assert pool.stats().deaths == 1


def test_the_last_calls_wait_for_whoever_has_nothing_to_do(fresh_pool: mpgrad.Pool) -> None:
    def sleeps(seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    while len(fresh_pool.stats().workers) < 2:
        fresh_pool.map(abs, range(8))
    fresh_pool.map(sleeps, [0.01] * 8)  # so that it is known how long they take
    pids = fresh_pool.map(sleeps, [0.5, 0.01, 0.01, 0.01])
    assert pids.count(pids[0]) == 1
