"""How much a run of `bench_speed.py` measures, and the pools that its rows share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mpgrad
from speed.bare import BarePool
from speed.limit import LoopsAtOnce


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    processes: int = 2
    repeats: int = 9
    tiny_items: int = 1000
    tiny_lengths: Sequence[int] = (500, 1000, 2000, 5000, 20_000)
    work_seconds: float = 0.3  # of a serial run
    grains_ms: Sequence[float] = (10, 1, 0.3, 0.1)
    tensors: int = 32
    largest_bytes: int = 16_000_000
    capture_bytes: int = 100_000_000
    capture_items: int = 512
    deterministic_items: int = 500
    tail_items: int = 256
    tail_seconds: float = 1.0  # serial
    further_workers: int = 8
    idle_seconds: float = 10.0
    limit: int = 3000  # seconds; the whole run is stopped then


QUICK = Plan(
    repeats=1,
    tiny_items=20,
    tiny_lengths=(20, 40),
    work_seconds=0.02,
    grains_ms=(1,),
    tensors=4,
    largest_bytes=1_000_000,
    capture_bytes=1_000_000,
    capture_items=16,
    deterministic_items=16,
    tail_items=16,
    tail_seconds=0.05,
    further_workers=1,
    idle_seconds=0.2,
    limit=120,
)


class Pools:
    """Each started when a row first wants it, and kept to the end: an idle one costs the others nothing that would show."""

    def __init__(self, processes: int, stack: contextlib.ExitStack) -> None:
        self.processes = processes
        self._stack = stack

    def _started(self, **options: Any) -> mpgrad.Pool:
        pool: mpgrad.Pool = mpgrad.Pool(self.processes, **options)
        return self._stack.enter_context(pool)

    @cached_property
    def loops(self) -> LoopsAtOnce:
        return self._stack.enter_context(LoopsAtOnce(self.processes))

    @cached_property
    def bare(self) -> BarePool:
        return self._bare(ahead=False)

    @cached_property
    def bare_ahead(self) -> BarePool:
        return self._bare(ahead=True)

    def _bare(self, ahead: bool) -> BarePool:
        pool = BarePool(self.processes, ahead)
        self._stack.callback(pool.terminate)
        return pool

    @cached_property
    def keep(self) -> mpgrad.Pool:
        return self._started(graphs="keep")

    @cached_property
    def deterministic(self) -> mpgrad.Pool:
        return self._started(graphs="keep", deterministic=True)

    @cached_property
    def ahead(self) -> mpgrad.Pool:
        return self._started(graphs="ahead")

    @cached_property
    def default(self) -> mpgrad.Pool:
        """As it is for whoever gives no options: it learns which graphs to keep."""
        return self._started()
