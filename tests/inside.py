"""Contains all that tests know about the inside of a pool that runs: its clock, its scheduling
thread, and what the scheduler knows of workers, of memory and of functions.

Use `pool.stats()`, `pool.story()`, `pool.timeline()` and `mpgrad.testing` instead where they tell
enough. If you change those classes, change this module; a test checks that no other test reaches
into a pool. `simulation/adapter.py` has the same task for the simulation.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import mpgrad

PATIENCE = 20.0  # seconds for a machine that is busy
LONG = 1000.0  # seconds, more than any time limit of a test
LIMIT = 60.0  # seconds, a time limit that no call exceeds unless time is skipped


def scheduler_of(pool: mpgrad.Pool | mpgrad.Executor) -> Any:
    within: Any = pool._pool if isinstance(pool, mpgrad.Executor) else pool
    return within._scheduler


# --- the clock


@contextlib.contextmanager
def hung_calls_are_overdue(
    pool: mpgrad.Pool | mpgrad.Executor, hung: Callable[[], int]
) -> Iterator[None]:
    """Skip a long time on the pool's clock while more calls have hung, as `hung` counts them, than
    workers were killed.

    So time limits can be so long that a busy machine keeps no other call from being in time. Time
    passes for all workers: no other call with a limit may be under way then.
    """
    scheduler, skipped, is_over = scheduler_of(pool), 0.0, threading.Event()
    scheduler.clock = lambda: time.monotonic() + skipped

    def look(now: float) -> None:
        nonlocal skipped
        is_ending = any(each.termination is not None for each in scheduler.workers.values())
        if hung() > scheduler.supervisor.kills and not is_ending:
            skipped += LONG

    def watch() -> None:
        while not is_over.wait(2e-3):
            scheduler.post(look)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


# --- the scheduling thread


def in_scheduling_thread(pool: mpgrad.Pool, act: Callable[[], object]) -> None:
    """Have the scheduling thread call `act` in its next turn."""
    scheduler_of(pool).post(lambda now: act())


def let_it_hear(pool: mpgrad.Pool) -> None:
    """Wait until the scheduling thread has done what it was told before."""
    heard = threading.Event()
    in_scheduling_thread(pool, heard.set)
    assert heard.wait(PATIENCE)


def waiting_threads(pool: mpgrad.Pool) -> int:
    """Return how many threads wait for the pool."""
    return len(scheduler_of(pool)._waiters)


# --- workers


def handles(pool: mpgrad.Pool) -> list[Any]:
    """Return the scheduler's `WorkerHandle` of each worker."""
    return list(scheduler_of(pool).workers.values())


def lent_slots(pool: mpgrad.Pool) -> int:
    return sum(len(worker.lent_slots) for worker in handles(pool))
