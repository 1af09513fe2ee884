"""Faults within faults: each test is what a hostile reading of the recovery found, with its
symptom."""

from __future__ import annotations

import dataclasses
import errno
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import linux_only, staffed
from torch import Tensor

import mpgrad
from mpgrad.errors import SharedMemoryError
from mpgrad.memory.arena import Arena, ForeignSlabs
from mpgrad.wire.frames import Channel
from mpgrad.wire.tensor_refs import Packer, Payload

pytestmark = pytest.mark.slow

PATIENCE = 20.0  # seconds


def kill_all(pool: mpgrad.Pool) -> None:
    """Kill all workers, and wait until others have taken their places."""
    dead = {worker.pid for worker in pool.stats().workers}
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while (
        dead & {worker.pid for worker in pool.stats().workers}
        or len(pool.stats().workers) < pool.processes
    ):
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.fixture
def no_descriptors() -> Iterator[Any]:
    """Take all descriptors away, and give them back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run(code: str, **environment: str) -> str:
    """What a program prints on both streams."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        "import os, resource, sys, time, psutil, torch, mpgrad\n" + code,
    ]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- wrong numbers


def test_without_retries_nothing_runs_twice(fork_server: mpgrad.Pool) -> None:
    """Calls of the chunk that were done before another one killed the worker added to their inputs
    once more."""

    def adds(x: Tensor) -> float:
        if x[1] == 7:
            os._exit(3)
        return float(x.add_(1)[0])

    items = [torch.zeros(20_000) for _ in range(4)]
    items[2][1] = 7
    with mpgrad.Pool(1, retries=0) as pool:
        found = pool.map(adds, items, chunksize=4, on_error="return")
    assert [type(each) for each in found] == [mpgrad.WorkerDiedError] * 3 + [float]
    assert found[3] == 1.0 and all(each.item == 2 for each in found[:3])


@pytest.mark.parametrize("kills", [False, True])
def test_a_derived_graph_whose_input_was_changed(fresh_pool: mpgrad.Pool, kills: bool) -> None:
    """The second derivative was taken at the changed input, if a worker had died; the serial loop
    raises."""
    x = torch.ones(5000, requires_grad=True)
    (y,) = fresh_pool.map(lambda x: x * 2, [x])
    (z,) = fresh_pool.map(lambda y: y**3, [y])
    (d,) = torch.autograd.grad(z.sum(), y, create_graph=True)
    with torch.no_grad():
        y.mul_(10)
    if kills:
        kill_all(fresh_pool)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(d.sum(), y)


# --- hangs


def test_a_call_that_needs_no_gradient_when_it_is_run_again(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """For a derived graph, the backward was sent again without end."""
    flag = tmp_path / "flag"
    x = torch.ones(3, requires_grad=True)
    (y,) = fresh_pool.map(lambda x: (x**3).detach() if flag.exists() else x**3, [x])
    (d,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    flag.touch()
    kill_all(fresh_pool)
    with pytest.raises(
        RuntimeError, match="no output of the function needed gradients when it was run again"
    ):
        torch.autograd.grad(d.sum(), x)


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_a_worker_that_dies_and_leaves_a_child(
    fork_server: mpgrad.Pool, tmp_path: Path, timeout: float | None
) -> None:
    """The child held the worker's end of the pipe, so that nobody saw the death."""
    flag = tmp_path / "child"

    def forks(x: int) -> int:
        if not flag.exists():
            pid = os.fork()
            if pid == 0:
                time.sleep(100)
                os._exit(0)
            flag.write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    started = time.monotonic()
    with mpgrad.Pool(1, timeout=timeout) as pool:
        assert pool.map(forks, [1]) == [1]
    assert time.monotonic() - started < 50
    os.kill(int(flag.read_text()), signal.SIGKILL)


def test_an_exception_of_a_module_that_is_being_imported(tmp_path: Path) -> None:
    """The pool's thread waited for the import, which waited for the pool."""
    (tmp_path / "simulation.py").write_text(
        "import mpgrad\n"
        "from mpgrad.environment import PLACE\n"
        "class MyError(Exception): pass\n"
        "def fails(x): raise MyError('boom')\n"
        "if not PLACE.in_worker:\n"
        "    with mpgrad.Pool(1) as pool:\n"
        "        try: pool.map(fails, [1])\n"
        "        except MyError as error: print(repr(error))\n"
    )
    assert run(f"sys.path.insert(0, {str(tmp_path)!r}); import simulation") == "MyError('boom')\n"


class OddError(Exception):
    """Pickles as a text."""

    def __reduce__(self) -> Any:
        return str, ("gone",)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int

    def __reduce__(self) -> Any:
        return FrozenError, (self.code,)


@pytest.mark.parametrize("kind", [OddError, FrozenError])
def test_exceptions_that_cannot_be_raised_again(pool: mpgrad.Pool, kind: type[Exception]) -> None:
    """They broke the pool."""

    def fails(x: int) -> None:
        raise kind(x)

    with pytest.raises(Exception, match=r"Odd|Frozen|1") as caught:
        pool.map(fails, [1])
    assert kind.__name__ in f"{type(caught.value).__name__}: {caught.value}"
    assert pool.map(abs, [-1]) == [1]


@pytest.mark.parametrize(
    "moment", [pytest.param("in the launcher", marks=linux_only("the fork server")), "in the arena"]
)
def test_a_pool_is_collected_while_locks_are_held(
    fork_server: mpgrad.Pool, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finalizer waited for a thread that waited for the lock."""
    dropped: Any = mpgrad.Pool(1)
    x = torch.ones(5000, requires_grad=True)
    (y,) = dropped.map(lambda x: x * 2, [x])
    dropped.itself = dropped  # a cycle
    gc.disable()
    try:
        del dropped
        if moment == "in the launcher":
            alive: Any = mpgrad.engines.launch.ForkServerProcess.alive.fget  # type: ignore[attr-defined]
            collecting = property(lambda self: (gc.collect(), alive(self))[1])
            monkeypatch.setattr("mpgrad.engines.launch.ForkServerProcess.alive", collecting)
            mpgrad.Pool(1).terminate()
        else:
            free = mpgrad.memory.arena.free_memory
            monkeypatch.setattr(
                "mpgrad.memory.arena.free_memory", lambda: (gc.collect(), free())[1]
            )
            with pytest.raises(mpgrad.PoolClosedError):
                y.backward(torch.ones(5000) * 2)
    finally:
        gc.enable()


def test_a_pool_without_workers_for_a_moment(
    fork_server: mpgrad.Pool, no_descriptors: Any, tmp_path: Path
) -> None:
    """The successor of a worker that had done its calls could not be started, and nobody tried
    again."""
    word, go = tmp_path / "word", tmp_path / "go"

    def waits(x: int) -> int:
        word.touch()
        while not go.exists():
            time.sleep(1e-3)
        return x

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with mpgrad.Pool(1, maxtasksperchild=1) as pool:
        pool.map(abs, [1])
        result = pool.map_async(waits, [1, 2], chunksize=1)
        while not word.exists():
            time.sleep(1e-3)
        no_descriptors()
        os.symlink("/", go)  # takes no descriptor
        while pool._scheduler.supervisor._refused_since is None:
            time.sleep(1e-3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert result.get(PATIENCE) == [1, 2]


# --- broken pools


def test_a_frame_that_is_half_sent_needs_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be killed: it waited for the rest of a frame for ever, and its calls for
    it."""

    def refuse(descriptors: Any) -> list[int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with mpgrad.Pool(1, engine="thread") as pool:
        pool.map(abs, [1])
        monkeypatch.setattr("mpgrad.wire.pipe.duplicates", refuse)
        result = pool.map_async(len, [bytes(1 << 22)])  # more than a pipe takes at once
        assert result.get(PATIENCE) == [1 << 22]


@pytest.mark.parametrize("block", [None, (1 << 32, 64)])
def test_captures_that_cannot_be_mapped_are_given_back(block: tuple[int, int] | None) -> None:
    """The first was; those behind it, which nobody had looked at, stayed in use for as long as the
    pool lived.

    Only captures on devices have slots of their own, so this asks the worker's side directly.
    """
    from mpgrad.workers.memory import WorkerDevice, WorkerMemory

    ref = Payload().add(Packer(Arena(1)).pack(torch.zeros(4), 0))
    refs = [ref._replace(place=number << 32) for number in (2, 3, 4)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        memory = WorkerMemory(1, Channel(theirs, blocking=True), WorkerDevice())
        for number in range(1, 5):
            memory._foreign_slabs.attach(number, None, 4096)  # no descriptor was free
        with pytest.raises(mpgrad.SharedMemoryError):
            memory.captures(block, refs)
    returned = [ref.place for ref in refs] + ([] if block is None else [block[0]])
    assert sorted(memory.take_returns()) == sorted((address, 1) for address in returned)


def test_many_open_files() -> None:
    """Above 1,024 descriptors any death, and the end, broke the pool: `select` knows no more."""
    code = (
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))\n"
        "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]\n"
        "with mpgrad.Pool(2) as pool:\n"
        "    pool.map(abs, range(8), chunksize=1)\n"
        "    result = pool.map_async(lambda x: time.sleep(0.3) or x, [1, 2])\n"
        "    time.sleep(0.1); os.kill(pool.stats().workers[0].pid, 9)\n"
        "    print(result.get(20))\n"
    )
    assert run(code) == "[1, 2]\n"


@linux_only("the fork server")
def test_a_fork_that_fails(tmp_path: Path) -> None:
    """It ended the fork server, and with it all workers of all pools."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "fork, count = os.fork, [0]\n"
        "def failing():\n"
        "    count[0] += 1\n"
        "    if count[0] == 3: raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return fork()\n"
        "os.fork = failing\n"
    )
    code = (
        "with mpgrad.Pool(2) as pool:\n"
        "    pool.map(abs, range(8), chunksize=1)\n"
        "    pids = {worker.pid for worker in pool.stats().workers}\n"
        "    pool.resize(3)\n"
        "    while len(pool.stats().workers) < 3: time.sleep(0.01)\n"
        "    print(pids <= {worker.pid for worker in pool.stats().workers}, pool.map(abs, [-1]))\n"
    )
    assert run(code, PYTHONPATH=str(tmp_path)) == "True [1]\n"


def test_many_workers_that_start_die_at_once() -> None:
    """Three starts in a row failed, it seemed; it was one event."""
    code = (
        "with mpgrad.Pool(4) as pool:\n"
        "    while not psutil.Process().children(): time.sleep(0.001)\n"
        "    psutil.Process().children()[0].kill()\n"
        "    print(pool.map(abs, [-1, -2]))\n"
    )
    assert run(code) == "[1, 2]\n"


@linux_only("the fork server")
def test_the_fork_server_is_dying_and_nobody_can_know() -> None:
    """A process that is killed closes its pipes before its parent is told; successors of its
    workers were asked of it."""
    code = (
        "from mpgrad.engines.launch import ForkServerLauncher, ForkServerProcess\n"
        "# without a look\n"
        "ForkServerProcess.alive = property(lambda self: self._process.returncode is None)\n"
        "with mpgrad.Pool(2) as first, mpgrad.Pool(1) as second:\n"
        "    (fork_server,) = psutil.Process().children()\n"
        "    print(first.map(abs, [-1, -2]), second.map(abs, [-3]))\n"
        "    fork_server.kill()\n"
        "    while first.stats().deaths < 2 or second.stats().deaths < 1: time.sleep(0.001)\n"
        "    print(first.map(abs, [-4, -5]), second.map(abs, [-6]))\n"
        "    print(len(psutil.Process().children()))\n"
        "ForkServerLauncher.end_unused()\n"
        "print(len(psutil.Process().children()))\n"
    )
    assert run(code).splitlines() == ["[1, 2] [3]", "[4, 5] [6]", "1", "0"]


# --- limits of time


def test_calls_that_ended_in_time_while_nobody_looked(fork_server: mpgrad.Pool) -> None:
    """The pool's thread, after a callback had held it up, killed workers for calls that were done
    long ago."""
    with mpgrad.Pool(1, timeout=1, retries=0) as pool:
        pool.map(abs, [1])
        result = pool.map_async(lambda x: time.sleep(0.2) or x, [1, 2, 3], chunksize=1)
        pool._scheduler.post(lambda now: time.sleep(2))
        assert result.get(PATIENCE) == [1, 2, 3] and pool.stats().deaths == 0


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.8)
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


def test_each_step_to_a_lost_graph_has_its_own_time(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, timeout=1.5) as pool:
        x = torch.ones(3, requires_grad=True)
        (y,) = pool.map(lambda x: (time.sleep(0.8), Slow.apply(x))[1], [x])
        (d,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        kill_all(pool)
        assert torch.equal(torch.autograd.grad(d.sum(), x)[0], torch.full((3,), 6.0))


# --- leaks


def test_gradients_for_graphs_that_are_missing(fork_server: mpgrad.Pool) -> None:
    """Their shared memory was never given back."""
    with mpgrad.Pool(1, graphs="recompute") as pool:
        for _ in range(4):
            x = torch.ones(50_000, requires_grad=True)
            (y,) = pool.map(lambda x: x**3, [x])
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.sum() + (g**2).sum()).backward()
            assert torch.equal(x.grad, torch.full_like(x, 3 + 2 * 3 * 6.0))
            del x, y, g
        deadline = time.monotonic() + PATIENCE
        while pool._scheduler.memory.arena.bytes_in_use:
            assert time.monotonic() < deadline, pool.stats()
            pool.map(abs, [1])


def test_memory_of_dead_workers_in_a_survivor(fresh_pool: mpgrad.Pool) -> None:
    """A survivor kept a mapping, and a descriptor, for each worker whose results it had read after
    its death."""

    def slowly(y: Tensor) -> Tensor:
        time.sleep(0.02)
        return y.sum()

    staffed(fresh_pool).map(slowly, [torch.ones(3)] * 4)
    survivor = min(worker.pid for worker in fresh_pool.stats().workers)
    counts = []
    for _ in range(8):
        results = fresh_pool.map(lambda x: x + 1, [torch.ones(300_000)] * 4, chunksize=1)
        others = {worker.pid for worker in fresh_pool.stats().workers} - {survivor}
        for pid in others:
            os.kill(pid, signal.SIGKILL)
        while (
            others & {worker.pid for worker in fresh_pool.stats().workers}
            or len(fresh_pool.stats().workers) < 2
        ):
            time.sleep(1e-3)
        fresh_pool.map(slowly, results, chunksize=1)
        del results
        fresh_pool.map(slowly, [torch.ones(3)] * 4, chunksize=1)
        counts.append(len(os.listdir(f"/proc/{survivor}/fd")))
    assert counts[-1] <= counts[2] + 1, counts


def test_graphs_that_were_released_as_they_were_dropped(fork_server: mpgrad.Pool) -> None:
    """They counted as missing for ever, and the number of graphs went below 0."""
    with mpgrad.Pool(1, graph_memory="12 MB") as pool:
        for _ in range(3):
            x = torch.ones(1_500_000, requires_grad=True)
            first = pool.map(lambda x: (x * 2).exp(), [x])
            later = pool.map_async(lambda x: (time.sleep(0.2), (x * 2).exp())[1], [x])
            del first
            del x
            later.get()
            del later
        deadline = time.monotonic() + PATIENCE
        (worker,) = pool._scheduler.workers.values()
        while worker.graphs:
            assert time.monotonic() < deadline, pool.stats()
            pool.map(abs, [1])
        assert pool.stats().workers[0].graphs == 0


def test_the_sizes_of_graphs_that_are_gone() -> None:
    """The heap of sizes kept them all."""
    from mpgrad.workers.graphs import GraphEdges, GraphTable

    table = GraphTable(1 << 40)
    for call in range(10_000):
        table.keep(call, GraphEdges(cast("Any", None), [], []), 1000)
        table.note_emptied(call)
        table.release(call)
    assert table.nbytes == 0 and len(table._largest) < 2000


# --- beyond the pool's own processes and threads


def test_a_program_that_a_call_started_and_that_outlives_its_worker(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """It held the worker's end of the pipe open: the death was seen when it had ended."""

    def starts(flag: Path) -> bool:
        if not flag.exists():
            os.system(f"sleep 100 & echo $! > {flag}")
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    begin = time.monotonic()
    assert fresh_pool.map(starts, [tmp_path / "flag"]) == [True]
    assert time.monotonic() - begin < 50
    os.kill(int((tmp_path / "flag").read_text()), signal.SIGKILL)


@linux_only("the fork server")
def test_a_fork_while_another_thread_starts_the_fork_server() -> None:
    """The child waited for ever for a lock whose owner it did not have."""
    code = (
        "import threading\n"
        "from mpgrad.engines.launch import ForkServerLauncher\n"
        "held, go = threading.Event(), threading.Event()\n"
        "def holds():\n"
        "    with ForkServerLauncher._lock: held.set(), go.wait()\n"
        "thread = threading.Thread(target=holds)\n"
        "thread.start(), held.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with mpgrad.Pool(1) as pool: print(pool.map(abs, [-1]), flush=True)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "go.set(), thread.join(), print(status)\n"
    )
    assert run(code) == "[1]\n0\n"


def test_a_forked_child_of_a_program_with_executors() -> None:
    """It stumbled over its parent's as it ended, and did not finish what it had submitted to its
    own."""
    code = (
        "executors = [mpgrad.Executor(1) for _ in range(3)]\n"
        "assert [each.submit(abs, -1).result() for each in executors] == [1] * 3\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    own = mpgrad.Executor(1)\n"
        "    own.submit(lambda: (time.sleep(0.3), print('done', flush=True)))\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert run(code) == "done\n0\n"


def test_a_pool_for_which_no_descriptor_is_left() -> None:
    """It counted as a user of the fork server, which stayed when all pools had ended; and so did
    its pipe."""
    code = (
        "from mpgrad.engines.launch import ForkServerLauncher\n"
        "first = mpgrad.Pool(1)\n"
        "assert first.map(abs, [-1]) == [1]\n"
        "before = psutil.Process().num_fds()\n"
        "for spare in range(3):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, "
        "resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "    held = []\n"
        "    try:\n"
        "        while True: held.append(os.dup(0))\n"
        "    except OSError: pass\n"
        "    for _ in range(spare): os.close(held.pop())\n"
        "    try: mpgrad.Pool(1)\n"
        "    except OSError as error: print(error.errno == 24, end=' ')\n"
        "    for each in held: os.close(each)\n"
        "    assert psutil.Process().num_fds() == before, spare\n"
        "first.terminate()\n"
        "ForkServerLauncher.end_unused()\n"
        "print(psutil.Process().children())\n"
    )
    assert run(code) == "True True True []\n"


def test_a_fork_server_that_somebody_has_stopped() -> None:
    """The end of the last pool waited for it for ever."""
    code = (
        "pool = mpgrad.Pool(1)\n"
        "assert pool.map(abs, [-1]) == [1]\n"
        "psutil.Process().children()[0].suspend()\n"
        "pool.terminate()\n"
        "print(psutil.Process().children())\n"
    )
    assert run(code) == "[]\n"


def test_a_caller_that_blocks_signals() -> None:
    """The fork server had that from it, and never learnt that a worker had ended: nobody got its
    exit code, and all waited."""
    code = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "with mpgrad.Pool(1, retries=0) as pool:\n"
        "    try: pool.map(lambda x: os.kill(os.getpid(), 9), [1])\n"
        "    except mpgrad.WorkerDiedError as error: print(error.exit_code)\n"
    )
    assert run(code) == "-9\n"


class Refusing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("refused")


def test_a_handler_and_a_stream_of_the_callers_that_raise(
    fresh_pool: mpgrad.Pool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The pool was broken for good."""

    def waits(go: Path) -> int:
        while not go.exists():
            time.sleep(1e-3)
        return 1

    handler = Refusing()
    logging.getLogger().addHandler(handler)
    try:
        monkeypatch.setattr(
            "sys.stdout", types.SimpleNamespace(write=handler.emit, flush=lambda: None)
        )
        assert fresh_pool.map(
            lambda x: (logging.getLogger("task").warning("logged"), print("printed"), x)[-1], [1]
        ) == [1]
        future = fresh_pool.submit(waits, tmp_path / "go")
        # before it is done: after that this thread would call it
        future.add_done_callback(lambda future: 1 / 0)
        (tmp_path / "go").touch()
        assert future.result() == 1
        assert fresh_pool.map(abs, [-1]) == [1]
    finally:
        logging.getLogger().removeHandler(handler)
    monkeypatch.undo()
    assert fresh_pool.map(abs, [-1]) == [1]
    told = capfd.readouterr().err
    assert told.count("RuntimeError: refused") >= 3 and "ZeroDivisionError" in told


def test_a_chunk_stays_skipped_while_another_is() -> None:
    """What had been given to others was run all the same, if the worker was slow to look; then the
    pool was broken."""
    from mpgrad.scheduling.chunk_writer import Chunk
    from mpgrad.scheduling.worker_handle import SentChunks
    from mpgrad.wire.agent_messages import ProgressRecord

    def chunk(operation: Any, numbers: range) -> Any:
        return Chunk(
            operation,
            [(k, types.SimpleNamespace(index=k, items=1)) for k in numbers],
            [],
            None,
            None,
        )  # type: ignore[misc]

    options = types.SimpleNamespace(chunksize=None)
    first, second = (types.SimpleNamespace(options=options, limit=9) for _ in range(2))
    under_way = SentChunks()
    under_way.progress_record = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
    under_way.chunks = {1: chunk(first, range(1)), 2: chunk(first, range(1, 6))}
    under_way.progress_record[ProgressRecord.CHUNK] = 1  # which it runs
    ((_, taken),) = under_way.take_back(now=0.0)
    assert len(taken) == 4
    del under_way.chunks[1]  # it is answered, and the worker has yet to look at the next
    under_way.chunks[3] = chunk(second, range(1))
    second.limit = 0
    under_way.cancel(second)  # type: ignore[arg-type]
    assert set(under_way.progress_record[ProgressRecord.SKIPPED :]) == {2, 3}


def test_a_worker_is_lost_at_calls_that_were_taken_back() -> None:
    """It has to answer that it ran none of them, and may die, or be killed, before it does."""
    from mpgrad.scheduling.chunk_writer import Chunk
    from mpgrad.scheduling.lifecycle import Lifecycle
    from mpgrad.scheduling.recovery import Recovery
    from mpgrad.scheduling.worker_handle import WorkerHandle
    from mpgrad.wire.agent_messages import ProgressRecord

    operation: Any = types.SimpleNamespace(limit=9, options=types.SimpleNamespace(chunksize=None))
    worker = WorkerHandle(1, types.SimpleNamespace(lost=""))  # type: ignore[arg-type]
    worker.under_way.progress_record = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
    for number in (1, 2):
        worker.under_way.chunks[number] = Chunk(
            operation, [(number, types.SimpleNamespace(index=number))], [], None, None
        )  # type: ignore[list-item]
    worker.under_way.progress_record[ProgressRecord.CHUNK] = 1
    worker.under_way.skip_unbegun(now=0.0)
    worker.under_way.note_skips(now=0.0)
    ((_, taken),) = worker.under_way.take_back(now=1.0)
    assert [call.index for call in taken] == [2] and 2 in worker.under_way.progress_record[
        ProgressRecord.SKIPPED :
    ]
    assert worker.under_way.is_at_wanted
    del worker.under_way.chunks[1]
    assert not worker.under_way.is_at_wanted
    settings: Any = types.SimpleNamespace(retries=0, timeout_retries=0)
    recovery = Recovery({}, None, settings, Lifecycle(), lambda operation, now: None)  # type: ignore[arg-type]
    assert not recovery.blame(worker, -9, [worker.under_way.chunks[2]], -1, -1, 0.0)
    # it had looked at the next call, to see that this is somebody else's
    worker.under_way.chunks[2].calls.append((2, types.SimpleNamespace(index=2)))  # type: ignore[arg-type]
    assert not recovery.blame(worker, -9, [worker.under_way.chunks[2]], 1, -1, 0.0)


LARGE = 10 << 20  # elements, whose memory is a slab of its own


def forget_first_slab(lost: list[int]) -> Callable[..., None]:
    """In place of `ForeignSlabs.attach`: as where no descriptor is free for the first slab that
    comes."""
    attach = ForeignSlabs.attach

    def attached(self: ForeignSlabs, number: int, descriptor: int | None, nbytes: int) -> None:
        if not lost and descriptor is not None:
            lost.append(number)
            os.close(descriptor)
            descriptor = None
        attach(self, number, descriptor, nbytes)

    return attached


def lose_first_slab() -> None:
    ForeignSlabs.attach = forget_first_slab([])  # type: ignore[method-assign]


def test_a_slab_for_which_no_descriptor_was_free_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was not, and everything that was put there from then on could not be had."""
    lost: list[int] = []
    with mpgrad.Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]  # it is there, with its first slab
        monkeypatch.setattr(ForeignSlabs, "attach", forget_first_slab(lost))
        with pytest.raises(SharedMemoryError, match="no file descriptor was free"):
            pool.map(torch.ones, [LARGE])
        assert lost
        for _ in range(3):
            assert pool.map(torch.ones, [LARGE])[0].sum() == LARGE


def test_likewise_in_a_worker() -> None:
    with mpgrad.Pool(1, initializer=lose_first_slab) as pool:
        with pytest.raises(SharedMemoryError, match="no file descriptor was free"):
            pool.map(torch.sum, [torch.ones(100_000)])
        for _ in range(3):
            assert pool.map(torch.sum, [torch.ones(100_000)] * 3) == [100_000] * 3
