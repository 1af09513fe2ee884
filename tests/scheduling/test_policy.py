"""What the scheduler does wrong by its policy, until it is rebuilt. No test waits for longer than some seconds."""

from __future__ import annotations

import concurrent.futures
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mpgrad

WAIT = 1.0  # seconds

pytestmark = pytest.mark.slow


def logs(k: int) -> int:
    logging.getLogger("policy").warning("item %s", k)
    return k


def test_a_caller_that_holds_the_lock_of_a_handler(fresh_pool: mpgrad.Pool) -> None:
    # symptom: a hang for ever. cause: the thread that delivers results also gives records of workers to handlers.
    handler, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("policy")
    fresh_pool.map(abs, [-1] * 4, 1)
    logger.addHandler(handler)
    logger.propagate = False
    handler.acquire()
    try:
        assert fresh_pool.map_async(logs, range(40), 1).get(WAIT) == [*range(40)]
    finally:
        handler.release()
        logger.removeHandler(handler)
        logger.propagate = True


def ends_slowly(_: int) -> None:
    ends = os._exit

    def end_slowly(status: int) -> None:  # as one whose `sys.stdout.flush()` hangs in a pipe that nobody reads
        time.sleep(1.5 * WAIT)
        ends(status)

    os._exit = end_slowly  # type: ignore[assignment]
    time.sleep(0.05)  # so that each worker gets one


@pytest.mark.xfail(
    strict=True, raises=multiprocessing.TimeoutError, reason="policy: the scheduling thread waits for each worker's exit"
)
def test_a_worker_that_ends_slowly(nursery: mpgrad.Pool) -> None:
    # symptom: all maps stand still for up to 2 s. cause: the thread that feeds workers waits for the exit of one that ends.
    with mpgrad.Pool(2) as pool:
        pool.map(ends_slowly, range(2), 1)
        pool.resize(1)
        assert pool.map_async(abs, [-1]).get(WAIT) == [1]


EAT_LIMITS = """
import resource, torch, mpgrad
with mpgrad.Pool(1, maxtasksperchild=1) as pool:
    pool.apply(abs, (-1,))
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    xs = [torch.ones(1, requires_grad=True) for _ in range(60)]
    sum(pool.map_async(torch.sin, xs).get(20)).backward()
"""


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="policy: retired workers eat the limits")
def test_retired_workers_and_a_low_limit_of_descriptors() -> None:
    # symptom: the map waits for ever. cause: workers that have done their calls stay for their graphs, and no other can start.
    script = EAT_LIMITS.replace("get(20)", f"get({3 * WAIT})")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def waits_for(path: Path | None) -> None:
    while path is not None and not path.exists():
        time.sleep(1e-3)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="policy: a fast call waits behind a slow one while another idles")
def test_a_fast_call_behind_a_slow_one(nursery: mpgrad.Pool, tmp_path: Path) -> None:
    # symptom: a fast call arrives when the slow one has ended. cause: what a worker has not begun is taken back only where it
    # is thought to take long.
    go = tmp_path / "go"
    with mpgrad.Executor(2) as executor:
        for _ in range(20):  # known to be fast
            executor.submit(waits_for, None).result()
        futures: list[Any] = [executor.submit(waits_for, go), *(executor.submit(waits_for, None) for _ in range(50))]
        try:
            _, not_done = concurrent.futures.wait(futures[1:], WAIT)
            assert not not_done
        finally:
            go.touch()
