"""What the scheduler does wrong by its policy, until it is rebuilt. No test waits for longer than
some seconds."""

from __future__ import annotations

import atexit
import concurrent.futures
import errno
import io
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import linux_only

import mpgrad
from mpgrad.engines.sockets import SocketEngine

WAIT = 1.0  # seconds, where a fault takes two
ENOUGH = 30.0  # seconds, where a fault takes for ever

pytestmark = pytest.mark.slow


def logs(k: int) -> int:
    logging.getLogger("policy").warning("item %s", k)
    return k


def test_a_caller_that_holds_the_lock_of_a_handler(fresh_pool: mpgrad.Pool) -> None:
    # symptom: a hang for ever. cause: the thread that delivers results also gives records of
    # workers to handlers.
    handler, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("policy")
    fresh_pool.map(abs, [-1] * 4, 1)
    logger.addHandler(handler)
    logger.propagate = False
    handler.acquire()
    try:
        assert fresh_pool.map_async(logs, range(40), 1).get(ENOUGH) == [*range(40)]
    finally:
        handler.release()
        logger.removeHandler(handler)
        logger.propagate = True


def ends_slowly(_: int) -> None:
    ends = os._exit

    # as one whose `sys.stdout.flush()` hangs in a pipe that nobody reads
    def end_slowly(status: int) -> None:
        time.sleep(1.5 * WAIT)
        ends(status)

    os._exit = end_slowly  # type: ignore[assignment]
    time.sleep(0.05)  # so that each worker gets one


def test_a_worker_that_ends_slowly(fork_server: mpgrad.Pool) -> None:
    # symptom: all maps stand still for up to 2 s. cause: the thread that feeds workers waits for
    # the exit of one that ends.
    with mpgrad.Pool(2) as pool:
        pool.map(ends_slowly, range(2), 1)
        pool.resize(1)
        assert pool.map_async(abs, [-1]).get(1.8 * WAIT) == [1]


def has_a_slow_exit_handler(_: int) -> None:
    atexit.register(time.sleep, 1.5 * WAIT)


@linux_only("fork, as other workers take as long to start")
def test_retired_workers_with_slow_exit_handlers(fork_server: mpgrad.Pool) -> None:
    # symptom: each successor comes when its predecessor has ended.
    with mpgrad.Pool(2, maxtasksperchild=1) as pool:
        pool.map_async(has_a_slow_exit_handler, range(12), 1).get(6 * WAIT)


def cuts_its_pipe(_: int) -> None:
    os.closerange(3, 1000)
    time.sleep(60)


@linux_only("fork, as other workers take as long to start")
def test_a_worker_that_lives_on_without_its_pipe(fork_server: mpgrad.Pool) -> None:
    # symptom: other workers have nothing to do until it is killed, 2 s later; nor has anybody what
    # waited behind its call.
    with mpgrad.Pool(2, retries=0) as pool:
        pool.map(abs, [-1] * 4, 1)
        cut = pool.apply_async(cuts_its_pipe, (0,))
        for _ in range(10):
            time.sleep(0.05)
            assert pool.map_async(abs, [-1] * 4, 1).get(1.8 * WAIT) == [1] * 4
        with pytest.raises(mpgrad.WorkerDiedError):
            cut.get(ENOUGH)


EAT_LIMITS = """
import resource, torch, mpgrad
with mpgrad.Pool(1, maxtasksperchild=1) as pool:
    pool.apply(abs, (-1,))
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    xs = [torch.ones(1, requires_grad=True) for _ in range(60)]
    sum(pool.map_async(torch.sin, xs).get(20)).backward()
"""


def test_retired_workers_and_a_low_limit_of_descriptors() -> None:
    # symptom: the map waits for ever. cause: workers that have done their calls stay for their
    # graphs, and no other can start.
    script = EAT_LIMITS.replace("get(20)", f"get({ENOUGH})")
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def refuses(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From its third worker on the engine starts none for so long."""
    start, since = SocketEngine.start, time.monotonic()

    def refusing(engine: SocketEngine, number: int) -> Any:
        if number > 2 and time.monotonic() - since < seconds:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(engine, number)

    monkeypatch.setattr(SocketEngine, "start", refusing)


@pytest.mark.parametrize("graphs", ["auto", "keep"])
def test_the_system_refuses_for_a_while(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, graphs: Any
) -> None:
    # symptom: the map goes on when the graphs have gone, and so, in the thread that would use them,
    # never.
    refuses(monkeypatch, WAIT / 2)
    with mpgrad.Pool(2, maxtasksperchild=1, graphs=graphs) as pool:
        xs = [torch.ones(1, requires_grad=True) for _ in range(6)]
        losses = pool.map_async(torch.exp, xs).get(ENOUGH)
        torch.stack(losses).sum().backward()
    assert [x.grad for x in xs] == [math.e * torch.ones(1)] * 6


def test_graphs_that_cannot_be_made_again_are_not_dropped(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # symptom: the map waits for ever.
    refuses(monkeypatch, math.inf)
    with mpgrad.Pool(2, maxtasksperchild=1, retries=0) as pool:
        xs = [torch.ones(1, requires_grad=True) for _ in range(2)]
        losses = pool.map_async(torch.exp, xs, 1).get(ENOUGH)
        time.sleep(2.5 * WAIT)
        torch.stack(losses).sum().backward()  # nobody wants a worker: they stay
    assert [x.grad for x in xs] == [math.e * torch.ones(1)] * 2


def test_an_error_names_the_limit(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # symptom: the map waits for ever.
    refuses(monkeypatch, math.inf)
    with mpgrad.Pool(2, maxtasksperchild=1, retries=0) as pool:
        xs = [torch.ones(1, requires_grad=True) for _ in range(6)]
        with pytest.raises(BlockingIOError, match="RLIMIT_NPROC"):
            pool.map_async(torch.exp, xs, 1).get(ENOUGH)


def waits_for(path: Path | None) -> None:
    while path is not None and not path.exists():
        time.sleep(1e-3)


def test_a_fast_call_behind_a_slow_one(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    # symptom: a fast call arrives when the slow one has ended. cause: what a worker has not begun
    # is taken back only where it is thought to take long.
    go = tmp_path / "go"
    with mpgrad.Executor(2) as executor:
        for _ in range(20):  # known to be fast
            executor.submit(waits_for, None).result()
        futures: list[Any] = [
            executor.submit(waits_for, go),
            *(executor.submit(waits_for, None) for _ in range(50)),
        ]
        try:
            _, not_done = concurrent.futures.wait(futures[1:], ENOUGH)
            assert not not_done
        finally:
            go.touch()


def waits_for_some(item: tuple[Path | None, int]) -> int:
    waits_for(item[0])
    time.sleep(5e-3)  # so long that each is a call of its own
    return item[1]


@pytest.mark.parametrize("chunksize", [None, 1])
def test_the_first_of_a_chunk_is_unexpectedly_slow(
    fork_server: mpgrad.Pool, tmp_path: Path, chunksize: int | None
) -> None:
    # symptom: what is in one message with it, or in the next, comes when it has ended.
    go = tmp_path / "go"
    with mpgrad.Pool(2) as pool:
        pool.map(waits_for_some, [(None, k) for k in range(40)])
        items = [(go if k == 0 else None, k) for k in range(40)]
        results = pool.imap_unordered(waits_for_some, items, chunksize)
        try:
            found = [results.next(ENOUGH) for _ in range(39)]
        finally:
            go.touch()
        assert sorted([*found, results.next(ENOUGH)]) == [*range(40)]


def test_what_is_taken_back_runs_once(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    def is_noted(k: int) -> None:
        with open(tmp_path / "runs", "a") as file:
            file.write(f"{k}\n")
        time.sleep(20e-3 if k % 37 == 0 else 0.5e-3)

    with mpgrad.Pool(3) as pool:
        pool.map(is_noted, [1] * 50)
        for _ in range(5):
            (tmp_path / "runs").unlink()
            list(pool.imap_unordered(is_noted, range(400), None))
            assert sorted(map(int, (tmp_path / "runs").read_text().split())) == [*range(400)]


NO_FORK = """
import os, errno
fork = os.fork
def refused():
    if len(open(f"/proc/self/task/{os.getpid()}/children").read().split()) >= 4:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = refused
"""
MORE_THAN_MAY_BE = """
import torch, mpgrad
with mpgrad.Pool(2, maxtasksperchild=1, retries={retries}) as pool:
    xs = [torch.ones(1, requires_grad=True) for _ in range(8)]
    sum(pool.map_async(torch.sin, xs, 1).get(20)).backward()
    assert pool.stats().deaths == 0
"""


@linux_only("the fork server")
@pytest.mark.parametrize("retries", [0, 2])
def test_a_fork_server_that_may_not_fork(tmp_path: Path, retries: int) -> None:
    # symptom: these are deaths of workers, three of which break the pool; and their reason is
    # printed, and not raised.
    (tmp_path / "sitecustomize.py").write_text(NO_FORK)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", MORE_THAN_MAY_BE.format(retries=retries)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )
    if retries:
        assert ended.returncode == 0, ended.stderr
    else:
        assert "BlockingIOError" in ended.stderr and "RLIMIT_NPROC" in ended.stderr
