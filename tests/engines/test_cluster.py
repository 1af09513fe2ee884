"""The engine of clusters, on agents that are programs of this machine: memory, deaths, silence,
nodes that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import local_cluster
import psutil
import pytest
import torch
from conftest import alive, eventually, first_are_quick, gone, linux_only, passes_with
from inside import agents, avoided_nodes, cancel, in_scheduling_thread, keep_no_idle_memory, mirrors

import mpgrad
from mpgrad.cluster import agent
from mpgrad.cluster.agent import AgentWorker, RecordReceiver, packed, unpacked
from mpgrad.cluster.engine import ClusterEngine
from mpgrad.cluster.transport import AgentOptions, LocalTransport, Node, Reply
from mpgrad.engines.kinds import ENGINES, EngineKind
from mpgrad.engines.launch import Exit
from mpgrad.testing import assert_same_as_serial
from mpgrad.wire.agent_messages import ProgressRecord
from mpgrad.wire.pipe import framed

HERE = Path(__file__).parent
TWO = (Node("a", "alpha", 2), Node("b", "beta", 2))
ONE_EACH = (Node("a", "alpha", 1), Node("b", "beta", 1))
LARGE = 250_000
PATIENCE = 50.0  # seconds, in which an agent and its workers start on a busy machine


@contextlib.contextmanager
def cluster(
    *nodes: Node,
    patience: float = 10.0,
    transport: type[LocalTransport] = LocalTransport,
    **options: Any,
) -> Iterator[tuple[mpgrad.Pool, Any]]:
    """A pool on those nodes, and its transport."""
    made = transport(nodes)
    ENGINES["pretended"] = EngineKind(
        local_cluster.TRAITS, lambda wanted: ClusterEngine(made, wanted.workers, patience)
    )
    try:
        with mpgrad.Pool(engine="pretended", **options) as pool:
            yield pool, made
    finally:
        ENGINES.pop("pretended", None)


@pytest.fixture(scope="module")
def on_two_nodes(fork_server: mpgrad.Pool) -> Iterator[tuple[mpgrad.Pool, Any]]:
    with cluster(*TWO) as (pool, transport):
        staffed(pool, 4)
        yield pool, transport


def staffed(pool: mpgrad.Pool, workers: int) -> None:
    while len(pool.stats().workers) < workers:
        pool.map(time.sleep, [0.05] * 2 * workers, 1)


def double(x: Any) -> Any:
    return x * 2


def product(x: Any) -> Any:
    return x * x


def serial(x: Any) -> Any:
    return product(torch.sin(double(x)))


def chain(pool: mpgrad.Pool, x: torch.Tensor) -> list[Any]:
    """`serial`, as three calls."""
    a = pool.submit(double, x)
    b = pool.submit(torch.sin, a)
    return [a, b, pool.submit(product, b)]


def leaf() -> torch.Tensor:
    return torch.linspace(0, 3, LARGE).requires_grad_()


def grad_of(fn: Callable[[Any], Any], x: torch.Tensor) -> torch.Tensor:
    own = x.detach().clone().requires_grad_()
    fn(own).sum().backward()
    assert own.grad is not None
    return own.grad


# --- values, memory


@pytest.mark.quick
@pytest.mark.parametrize("size", [3, 5000], ids=["inline", "carried"])
def test_a_loop_on_two_nodes(on_two_nodes: tuple[mpgrad.Pool, Any], size: int) -> None:
    weight = torch.linspace(1, 2, size, requires_grad=True)
    xs = [torch.full((size,), float(k), requires_grad=True) for k in range(9)]
    assert_same_as_serial(lambda x: (x * weight).sin() / weight, xs, on_two_nodes[0])


def test_filters_of_warnings_hold_on_nodes(on_two_nodes: tuple[mpgrad.Pool, Any]) -> None:
    """Unlike the rest of the environment, which belongs to a machine."""

    def fn(k: int) -> str:
        try:
            warnings.warn("rounded", RuntimeWarning, stacklevel=1)
        except RuntimeWarning:
            return "caught"
        return "passed"

    pool, _ = on_two_nodes
    for action, expected in (("error", "caught"), ("ignore", "passed"), ("error", "caught")):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            assert pool.map(fn, range(4), 1) == [expected] * 4


def test_captures_go_to_a_node_once(on_two_nodes: tuple[mpgrad.Pool, Any], tmp_path: Path) -> None:
    pool, _ = on_two_nodes
    staffed(pool, 4)
    weight = torch.ones(50_000, requires_grad=True)

    def product_with(k: int) -> torch.Tensor:
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 4:  # each worker gets some
            time.sleep(1e-3)
        return (weight * k).sum()

    sent = pool.stats().bytes_sent
    results = pool.map(product_with, range(40), 1)
    sum(results).backward()
    # four workers, two nodes
    assert 2 * weight.nbytes <= pool.stats().bytes_sent - sent < 2.3 * weight.nbytes


def test_mirrors_are_given_back(on_two_nodes: tuple[mpgrad.Pool, Any]) -> None:
    pool, _ = on_two_nodes
    pool.map(lambda x: x + 1, [torch.ones(5000) for _ in range(8)], 1)
    eventually(lambda: not any(each.lent for slabs in mirrors(pool) for each in slabs))
    keep_no_idle_memory(pool)
    pool.map(torch.sum, [torch.ones(20_000_000) for _ in range(2)], 1)

    def is_small() -> bool:
        pool.map(abs, [-1] * 8, 1)
        return all(len(slabs) <= 1 for slabs in mirrors(pool))

    eventually(is_small)


def test_what_lies_with_one_worker_is_carried_to_another(
    on_two_nodes: tuple[mpgrad.Pool, Any],
) -> None:
    """Results that are given on, also after the caller has written to one."""
    pool, _ = on_two_nodes
    first = pool.map(lambda k: torch.full((30_000,), float(k)), range(4), 1)
    first[1].mul_(10)
    second = pool.map(lambda x: x + 1, first, 1)
    first[1].add_(5)
    third = pool.map(lambda x: x + 1, first, 1)
    assert [int(x[0]) for x in second] == [1, 11, 3, 4]
    assert [int(x[-1]) for x in third] == [1, 16, 3, 4]


def test_errors_and_stats_name_the_node(on_two_nodes: tuple[mpgrad.Pool, Any]) -> None:
    pool, _ = on_two_nodes
    staffed(pool, 4)
    assert sorted(worker.node for worker in pool.stats().workers) == [
        "alpha",
        "alpha",
        "beta",
        "beta",
    ]
    with pytest.raises(ZeroDivisionError) as raised:
        pool.map(lambda x: 1 / x, [0])
    assert any("on node" in note for note in raised.value.__notes__)


def test_what_a_call_prints(on_two_nodes: tuple[mpgrad.Pool, Any], capfd: Any) -> None:
    on_two_nodes[0].apply(print, ("said there",))
    assert "said there" in capfd.readouterr().out


def test_chains_of_calls(on_two_nodes: tuple[mpgrad.Pool, Any]) -> None:
    """Results come to the caller, and go on from there; also those that nobody reads, or later."""
    pool, x = on_two_nodes[0], leaf()
    futures = chain(pool, x)
    value = futures[-1].result()
    assert torch.equal(value, serial(x))
    value.sum().backward()
    assert torch.equal(x.grad, grad_of(serial, x))  # type: ignore[arg-type]
    y = leaf()
    first, second, third = [each.result() for each in chain(pool, y)]
    (first.sum() + second.sum() + third.sum()).backward()

    def all_of(own: Any) -> Any:
        a = double(own)
        b = a.sin()
        return a.sum() + b.sum() + product(b).sum()

    assert torch.equal(y.grad, grad_of(all_of, y))  # type: ignore[arg-type]


def test_results_of_several_kinds_go_on_to_other_calls(
    on_two_nodes: tuple[mpgrad.Pool, Any],
) -> None:
    def several(x: Any) -> Any:
        return {
            "large": [x + 1, x - 1],
            "small": x[:3].clone(),
            "sparse": torch.eye(3).to_sparse(),
            "n": 5,
        }

    def gather(found: Any) -> Any:
        return (found["large"][0] * found["large"][1]).sum() + found["small"].sum()

    pool, x = on_two_nodes[0], leaf()
    first = pool.submit(several, x)
    pool.submit(gather, first).result().backward()
    assert torch.equal(x.grad, grad_of(lambda own: gather(several(own)), x))  # type: ignore[arg-type]
    found = first.result()
    assert torch.equal(found["large"][1], x - 1) and found["n"] == 5
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))


@pytest.mark.slow
def test_what_nobody_wants_any_more_is_left_out(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """All calls of a chunk ran, if it had been sent when one that stands before them failed."""

    def fn(k: int) -> None:
        (tmp_path / str(k)).touch()
        while not (tmp_path / ("3" if k == 0 else "go")).exists():
            time.sleep(0.001)
        if k == 0:
            raise KeyError

    with cluster(Node("a", "alpha", 2)) as (pool, _):
        staffed(pool, 2)
        with pytest.raises(KeyError):
            pool.map(fn, range(6), chunksize=3)
        assert pool.apply(abs, (-1,)) == 1  # through the same agent, which has been told by now
        (tmp_path / "go").touch()
        eventually(lambda: all(worker.state == "idle" for worker in pool.stats().workers))
        assert {each.name for each in tmp_path.iterdir()} == {"0", "3", "go"}


def test_workers_say_nothing_between_two_calls(on_two_nodes: tuple[mpgrad.Pool, Any]) -> None:
    """Each word of theirs would wake the agent and the caller, which costs both as much as a small
    call."""
    pool, _ = on_two_nodes
    before = pool.stats().frames_received
    pool.map(abs, range(80), chunksize=20)
    # an answer for each chunk, and perhaps one to give memory back
    assert pool.stats().frames_received - before <= 8


@pytest.mark.slow
def test_what_waits_behind_an_endless_call_goes_to_others(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """Without retries its worker cannot be killed: others want a graph of it. The calls behind it
    waited for ever."""
    begun, go = tmp_path / "begun", tmp_path / "go"

    def stuck() -> None:
        begun.touch()
        while not go.exists():
            time.sleep(0.01)

    weight = torch.ones(2, requires_grad=True)
    with cluster(Node("a", "alpha", 2), processes=1, retries=0) as (pool, _):
        pool.map(abs, range(100))  # so short that they are sent behind others
        (kept,) = pool.map(lambda x: (x * weight).sum(), [torch.ones(2)])
        future = pool.submit(stuck)
        while not begun.exists():
            time.sleep(0.01)
        behind = pool.submit(abs, -1)
        cancel(pool, future)
        assert behind.result() == 1
        go.touch()
        kept.backward()  # waits for the worker
        assert torch.equal(weight.grad, torch.ones(2))  # type: ignore[arg-type]
        assert pool.stats().deaths == 0


@pytest.mark.slow
def test_workers_come_to_their_end(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """They were killed, though the pool was closed and joined."""

    def fn(_: int) -> int:
        leave = os._exit

        def seen(code: int) -> None:
            (tmp_path / str(os.getpid())).write_text(str(code))
            leave(code)

        os._exit = seen  # type: ignore[assignment]
        time.sleep(0.05)
        return os.getpid()

    with cluster(*TWO) as (pool, _):
        staffed(pool, 4)
        pids, there = {worker.pid for worker in pool.stats().workers}, set[int]()
        while there != pids:
            there.update(pool.map(fn, range(8), chunksize=1))
        pool.close()
        pool.join()
        assert {int(each.name): each.read_text() for each in tmp_path.iterdir()} == dict.fromkeys(
            pids, "0"
        )


@pytest.mark.slow
def test_a_worker_that_crashes_leaves_its_stack(fork_server: mpgrad.Pool) -> None:
    def crash(_: int) -> None:
        os.abort()

    def linger(_: int) -> None:
        time.sleep(60)

    with cluster(Node("a", "alpha", 1)) as (pool, _):
        with pytest.raises(mpgrad.WorkerDiedError) as raised:
            pool.map(crash, [0])
        assert "in crash" in raised.value.stack and "os.abort()" in raised.value.stack
        with pytest.raises(mpgrad.CallTimeoutError) as late:
            pool.map(linger, [0], timeout=0.3)
        assert "in linger" in late.value.stack


class Stalling(LocalTransport):
    """What is said from a certain moment on comes a second late."""

    stalls_at = float("inf")

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        def stalled(said: tuple[int, bytes | None] | BaseException) -> None:
            if time.monotonic() < self.stalls_at:
                reply(said)
            else:
                threading.Timer(1.0, reply, (said,)).start()

        super().exchange(agent, number, content, stalled)


@pytest.mark.slow
def test_time_is_kept_on_the_node(fork_server: mpgrad.Pool) -> None:
    """An answer that was late on its way was an overrun."""
    with cluster(Node("a", "alpha", 1), transport=Stalling, retries=0) as (pool, transport):
        staffed(pool, 1)
        for _ in range(5):
            transport.stalls_at = time.monotonic() + 0.2
            # a busy machine may stop the call for so long that it is an overrun
            with contextlib.suppress(mpgrad.CallTimeoutError):
                assert pool.map(lambda x: (time.sleep(0.4), x)[1], [3], timeout=0.8) == [3]
                break
        else:
            raise AssertionError("each answer was an overrun")
        transport.stalls_at = float("inf")
        deaths = pool.stats().deaths
        with pytest.raises(mpgrad.CallTimeoutError):
            pool.map(time.sleep, [60], timeout=0.1)
        assert pool.stats().deaths == deaths + 1


@pytest.mark.quick
def test_the_call_that_is_next_to_take_too_long() -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(AgentWorker(1, ours)) as worker:
        assert worker.next_overrun()[2] == float("inf")
        worker.heard_at, worker.limits = 100.0, {7: 2.0, 9: 3.0}
        assert worker.next_overrun() == (7, -1, 102.0)  # nothing is known of where it is
        worker.progress_record = numbers = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
        # which has no limit; perhaps it was answered, and perhaps not
        numbers[ProgressRecord.CHUNK] = 5
        assert worker.next_overrun() == (7, -1, 102.0)
        (
            numbers[ProgressRecord.CHUNK],
            numbers[ProgressRecord.POSITION],
            numbers[ProgressRecord.STARTED],
        ) = (
            7,
            4,
            101 * 10**9,
        )
        assert worker.next_overrun() == (7, 4, 103.0)
        numbers[ProgressRecord.CHUNK] = 8  # the one before is answered
        assert worker.next_overrun() == (9, -1, 104.0)
        numbers[ProgressRecord.STARTED] = ProgressRecord.LOADING
        before = time.monotonic()
        assert before + 3.0 <= worker.next_overrun()[2] <= time.monotonic() + 3.0
        numbers[ProgressRecord.CHUNK] = 10
        assert worker.next_overrun()[2] == float("inf")


@pytest.mark.quick
def test_an_answer_on_its_way_is_no_overrun_unless_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: dict[int, socket.socket] = {}

    class Launcher:
        tracker = None
        launch = ends.__setitem__

        def exited(self, number: int) -> Exit:
            return Exit(0)

    async def scenario() -> None:
        there = agent.NodeAgent(60.0)
        there._start(1)
        frame = framed(["an answer"], ())
        ends[1].sendall(frame[:-1])
        there._obey("limit", 1, 7, -1.0)  # over when it begins
        assert there._updates[1:] == []
        there._read(there._workers[1])  # nothing more has come
        assert there._updates[1:] == [("overrun", 1, 7, -1)]
        ends[1].sendall(frame[-1:])
        there._read(there._workers[1])
        assert there._updates[2][:2] == ("frame", 1)
        there._obey("end", 1)
        await asyncio.gather(*there._burials)
        ends[1].close()

    monkeypatch.setattr(agent, "process_launcher", lambda _: Launcher())
    asyncio.run(scenario())


@pytest.mark.slow
@linux_only("the fork server, whose children are stopped")
def test_workers_that_do_nothing_at_all_are_overrun(fork_server: mpgrad.Pool) -> None:
    """The chunk before had a limit, too, and nobody told the agent that it was answered. But no
    limit includes the loading of a function."""

    def loads() -> Any:
        time.sleep(1.0)

    class Slow:
        def __reduce__(self) -> Any:
            return loads, ()

    with cluster(Node("a", "alpha", 1), timeout=0.5) as (pool, _):
        assert pool.map(abs, [-1]) == [1]
        deaths = pool.stats().deaths
        (worker,) = pool.stats().workers
        os.kill(worker.pid, signal.SIGSTOP)
        assert pool.map(abs, [-1]) == [1]
        assert pool.stats().deaths > deaths
        slow = Slow()
        for _ in range(5):  # a busy machine may stop the call itself for that long
            deaths = pool.stats().deaths
            assert pool.map(lambda x: (slow, x)[1], [1]) == [1]
            if pool.stats().deaths == deaths:
                break
        else:
            raise AssertionError("each load was an overrun")
        with pytest.raises(mpgrad.CallTimeoutError, match=r"phase: forward.*tried once"):
            pool.map(lambda x: (slow, time.sleep(60)), [1])
        assert pool.stats().deaths == deaths + 1
        weight = torch.ones(3, requires_grad=True)
        loss = pool.map(lambda x: (weight * x).sum(), [2.0])[0]
        (worker,) = pool.stats().workers
        os.kill(worker.pid, signal.SIGSTOP)
        loss.backward()
        assert torch.equal(weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


@pytest.mark.slow
def test_calls_that_end_their_worker(fork_server: mpgrad.Pool) -> None:
    with cluster(Node("a", "alpha", 1)) as (pool, _):
        with pytest.raises(mpgrad.WorkerDiedError, match=r"item 2.*node: alpha"):
            pool.map(
                lambda x: os.kill(os.getpid(), signal.SIGKILL) if x == 2 else x,
                range(4),
                chunksize=4,
            )
        with pytest.raises(mpgrad.CallTimeoutError):
            pool.map(time.sleep, [60], timeout=0.3)
        future = pool.submit(time.sleep, 60)
        while not future.running():
            time.sleep(0.01)
        assert future.cancel(force=True)
        assert pool.map(abs, [-1]) == [1]


@pytest.mark.slow
def test_the_core_tests_pass_on_two_nodes() -> None:
    passes_with(HERE / "local_cluster.py", "map", "backward", "captures")


# --- what a node lacks


@contextlib.contextmanager
def limited(pid: int, what: int, most: int) -> Iterator[None]:
    """A process whose limit is that low."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


def lacks(pool: mpgrad.Pool, xs: list[torch.Tensor], why: str) -> None:
    message = (
        re.escape(f"no room in shared memory on node {socket.gethostname()} for a tensor (")
        + f".*{why}"
    )
    with pytest.raises(mpgrad.SharedMemoryError, match=message) as raised:
        pool.map(torch.sum, xs, 1)
    assert any("on node alpha" in note for note in raised.value.__notes__)


@pytest.mark.slow
@linux_only("prlimit")
def test_a_site_without_room_fails_the_calls_that_need_it(fork_server: mpgrad.Pool) -> None:
    """It ended, and its workers with it, again and again."""
    with cluster(Node("a", "alpha", 2)) as (pool, transport):
        staffed(pool, 2)
        pid = transport.agents[0].process.pid
        xs = [torch.full((5000,), float(k)) for k in range(6)]
        with limited(pid, resource.RLIMIT_NOFILE, psutil.Process(pid).num_fds()):
            lacks(pool, xs, r"Too many open files\); raise the limit of open files there")
            assert pool.map(abs, range(-6, 0), chunksize=1) == [6, 5, 4, 3, 2, 1]
        sums = [5000.0 * k for k in range(6)]
        assert [each.item() for each in pool.map(torch.sum, xs, 1)] == sums
        large = torch.ones(20_000_000)  # in a slab of its own
        with limited(pid, resource.RLIMIT_FSIZE, 1 << 20):
            lacks(
                pool,
                [torch.ones(3), large],
                r"80,000,000 bytes requested; File too large\); raise the limit of the size",
            )
            assert [each.item() for each in pool.map(torch.sum, xs, 1)] == sums
        assert [each.item() for each in pool.map(torch.sum, [torch.ones(3), large], 1)] == [
            3,
            20_000_000,
        ]
        assert pool.stats().deaths == 0


@pytest.mark.quick
@linux_only("holes in files")
def test_a_mirror_takes_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = agent.SlabReplica(1 << 20)
    slab.write(4096, b"here")
    monkeypatch.setattr(agent, "free_memory", lambda: 3)
    slab.write(4096, b"also")
    with pytest.raises(OSError, match="Cannot allocate memory"):
        slab.write(8192, b"more")
    assert os.pread(slab.descriptor, 4, 4096) == b"also"
    slab.close()


# --- deaths


def step(pool: mpgrad.Pool | None, injure: Callable[[str], None]) -> list[torch.Tensor]:
    """Forward, backward and double backward of a map, with the gradients of items and of what is
    closed over."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.rand(3000, dtype=torch.float64, generator=generator).requires_grad_()
    xs = [
        torch.rand(3000, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(12)
    ]

    seconds = 0 if pool is None else 0.02

    def fn(x: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return ((x * weight).sin() * weight).sum()

    if pool is None:
        results = [fn(x) for x in xs]
    else:
        pending = pool.map_async(fn, xs, 1)
        injure("forward")
        results = pending.get()
    loss = torch.stack(results).square().sum()
    injure("backward")
    first = torch.autograd.grad(loss, [weight, *xs], create_graph=True)
    injure("double backward")
    second = torch.autograd.grad(sum(each.square().sum() for each in first), [weight, *xs])  # type: ignore[arg-type]
    return [loss.detach(), *(each.detach() for each in first), *second]


@pytest.fixture(scope="module")
def unharmed(fork_server: mpgrad.Pool) -> list[torch.Tensor]:
    """What the step gives where nothing happens; within rounding that of the serial loop."""
    with mpgrad.Pool(2, deterministic=True) as pool:
        found = step(pool, lambda _: None)
    for ours, theirs in zip(found, step(None, lambda _: None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("worker", "backward"),
        ("agent", "forward"),
        ("agent", "backward"),
        ("agent", "double backward"),
        ("silent agent", "backward"),
    ],
)
def test_what_was_lost_is_made_again_bit_for_bit(
    unharmed: list[torch.Tensor], what: str, when: str
) -> None:
    patience = 1.5 if what == "silent agent" else 10.0
    with cluster(*TWO, patience=patience, deterministic=True, processes=4) as (pool, transport):
        staffed(pool, 4)

        def injure(now: str) -> None:
            if now != when:
                return
            if now == "forward":
                time.sleep(0.03)
            if what == "worker":
                os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
            else:
                os.kill(
                    transport.agents[0].process.pid,
                    signal.SIGKILL if what == "agent" else signal.SIGSTOP,
                )

        found = step(pool, injure)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, unharmed, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["terminate", "join"])
def test_values_outlive_the_pool(fork_server: mpgrad.Pool, ended: str) -> None:
    x = leaf()
    with cluster(*TWO) as (pool, _):
        a, b, c = chain(pool, x)
        c.result()
        if ended == "join":
            pool.close()
            pool.join()
    assert torch.equal(a.result(), double(x)) and torch.equal(b.result(), torch.sin(double(x)))


@pytest.mark.slow
def test_chains_whose_graphs_were_lost(fork_server: mpgrad.Pool) -> None:
    """Their calls run again with the results that the caller has, also where nobody has read
    these."""
    with cluster(*ONE_EACH) as (pool, transport):
        staffed(pool, 2)
        x = leaf()
        value = chain(pool, x)[-1].result()
        deaths = pool.stats().deaths
        for each in list(transport.agents):
            each.process.kill()
        eventually(lambda: pool.stats().deaths == deaths + 2)
        (grad,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        assert torch.equal(grad, grad_of(serial, x))
        staffed(pool, 2)
        for worker in pool.stats().workers:
            os.kill(worker.pid, signal.SIGKILL)
        grad.sum().backward()
        own = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(serial(own).sum(), own, create_graph=True)
        first.sum().backward()
        assert torch.equal(x.grad, own.grad)  # type: ignore[arg-type]


class Unruly(LocalTransport):
    """Replies come late, in any order, and some twice."""

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        choice = random.Random(number)

        def late(said: tuple[int, bytes | None] | BaseException) -> None:
            for _ in range(choice.choice([1, 1, 2])):
                threading.Timer(choice.random() * 0.02, reply, (said,)).start()

        super().exchange(agent, number, content, late)


def test_replies_out_of_order_and_doubled_change_nothing(unharmed: list[torch.Tensor]) -> None:
    with cluster(*TWO, transport=Unruly, deterministic=True, processes=2) as (pool, _):
        found = step(pool, lambda _: None)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, unharmed, strict=True))


class Forgetful(LocalTransport):
    """Loses a reply, and says nothing."""

    forgets = False

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        def perhaps(said: tuple[int, bytes | None] | BaseException) -> None:
            if self.forgets and not isinstance(said, BaseException) and said[1]:
                self.forgets = False
            else:
                reply(said)

        super().exchange(agent, number, content, perhaps)


@pytest.mark.slow
def test_a_lost_reply_loses_the_site(fork_server: mpgrad.Pool) -> None:
    with cluster(Node("a", "alpha", 1), transport=Forgetful, patience=1.0) as (pool, transport):
        pool.map(abs, [-1])
        transport.forgets = True
        assert pool.map(abs, [-1]) == [1]
        assert pool.stats().deaths >= 1


@pytest.mark.quick
def test_a_worker_that_does_not_end_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent waited for its exit code, and meanwhile for nobody else."""
    ends: dict[int, socket.socket] = {}
    has_ended = threading.Event()

    class Slow:
        tracker = None

        def launch(self, number: int, end: socket.socket) -> None:
            ends[number] = end

        def exited(self, number: int) -> Exit | None:
            return Exit(7) if has_ended.is_set() else None

        def close(self) -> None: ...

    async def scenario() -> None:
        there = agent.NodeAgent(60.0)
        exchanges = itertools.count()

        async def said(*records: Any) -> list[Any]:
            _, content = await there.exchange(next(exchanges), packed(records))
            return [
                record for record in (unpacked(content) if content else ()) if record[0] != "hello"
            ]

        assert await said(("start", 1), ("start", 2)) == []
        ends[1].close()
        updates: list[Any] = []
        while not there._burials:
            await asyncio.sleep(0)
        ends[2].sendall(framed(["here"], ()))
        while not updates:
            updates = await said()
        assert [record[:2] for record in updates] == [("frame", 2)]
        has_ended.set()
        while (updates := await said()) == []:
            pass
        assert updates == [("gone", 1, 7, "")]
        there._obey("end", 2)
        await asyncio.gather(*there._burials)
        ends[2].close()

    monkeypatch.setattr(agent, "process_launcher", lambda context: Slow())
    asyncio.run(scenario())


@pytest.mark.quick
def test_pieces_are_put_in_order_once() -> None:
    numbers = [2, 0, 0, 1, 1, 4, 2, 3, 3, 0]
    arriving, found = RecordReceiver(), []
    for number in numbers:
        found += arriving.records(number, packed([(number,)]))
    assert found == [(number,) for number in range(5)]


@pytest.mark.quick
def test_memory_is_packed_from_where_it_lies() -> None:
    """It was copied twice at one end, and once at the other."""
    large = memoryview(bytearray(range(256)) * 40_000)
    tracemalloc.start()
    content = packed([("write", 1, PickleBuffer(large)), ("slab", 2, 3)])
    _, most = tracemalloc.get_traced_memory()
    assert most < 1.1 * large.nbytes
    before, _ = tracemalloc.get_traced_memory()
    records = unpacked(content)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < before + 0.1 * large.nbytes
    assert records == [("write", 1, large), ("slab", 2, 3)]


@pytest.mark.quick
def test_what_is_missing() -> None:
    arriving = RecordReceiver()
    pieces = [packed([(number,)]) for number in range(3)]
    assert list(arriving.records(0, pieces[0])) == [(0,)] and arriving.missing_for == 0
    assert list(arriving.records(2, pieces[2])) == [] and arriving.missing_for > 0
    arriving.expect(1)
    assert arriving.missing_for == 0
    assert list(arriving.records(1, pieces[1])) == [(1,), (2,)] and arriving.missing_for == 0


@pytest.mark.slow
def test_a_site_that_hears_nothing_ends_with_its_workers(fork_server: mpgrad.Pool) -> None:
    with cluster(Node("a", "alpha", 2), patience=1.0) as (pool, transport):
        staffed(pool, 2)
        agent = transport.agents[0]  # held, because another one may be in its place by then
        pids = [worker.pid for worker in pool.stats().workers] + [agent.process.pid]
        agent.exchange = lambda *_: None  # as if the network were cut
        started = time.monotonic()
        assert gone(pids[:2], within=10)
        assert time.monotonic() - started < 8
        del agent.exchange
        assert pool.map(abs, [-1]) == [1]  # by other workers


@pytest.mark.slow
@linux_only("the fork server, and the death signal")
def test_the_caller_is_killed_and_nothing_is_left(fork_server: mpgrad.Pool) -> None:
    code = (
        "import time, mpgrad, local_cluster\n"
        "from mpgrad.engines.kinds import ENGINES, EngineKind\n"
        "ENGINES['pretended'] = EngineKind(local_cluster.TRAITS, local_cluster.two_nodes)\n"
        "pool = mpgrad.Pool(2, engine='pretended')\n"
        "while len(pool.stats().workers) < 2:\n"
        "    pool.map(time.sleep, [0.05] * 4, 1)\n"
        "pending = pool.map_async(time.sleep, [60] * 2, 1)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env
    ) as caller:
        assert caller.stdout is not None and caller.stdout.readline() == "ready\n"
        pids = [each.pid for each in psutil.Process(caller.pid).children(recursive=True)]
        caller.kill()
    assert len(pids) >= 6  # two agents, two fork servers, two workers
    assert gone(pids, within=20), [psutil.Process(pid).cmdline() for pid in pids if alive(pid)]


# --- nodes


@pytest.mark.slow
def test_nodes_join_and_leave(fork_server: mpgrad.Pool) -> None:
    with cluster(Node("a", "alpha", 1)) as (pool, transport):
        assert pool.processes == 1
        pool.map(abs, [-1])
        transport.join(Node("b", "beta", 2))
        eventually(
            lambda: sorted(each.node for each in pool.stats().workers) == ["alpha", "beta", "beta"]
        )
        assert pool.processes == 3
        transport.part("a")
        transport.agents[0].process.kill()
        eventually(
            lambda: pool.processes == 2 and {each.node for each in pool.stats().workers} == {"beta"}
        )
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]


@pytest.mark.slow
def test_workers_of_a_node_have_one_site(fork_server: mpgrad.Pool) -> None:
    """Each that came later had one of its own, to which captures travelled once more."""
    with cluster(Node("a", "alpha", 8), Node("b", "beta", 8), processes=2) as (pool, transport):
        staffed(pool, 2)
        pool.resize(8)
        staffed(pool, 8)
        assert sorted(len(agent.links) for agent in agents(pool)) == [1, 1, 3, 3]
        pool.resize(1)
        eventually(lambda: len(transport.agents) == 1)
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]


@pytest.mark.slow
def test_workers_that_were_lost_come_again_in_one_site(fork_server: mpgrad.Pool) -> None:
    with cluster(Node("a", "alpha", 8), Node("b", "beta", 8), processes=6) as (pool, transport):
        staffed(pool, 6)
        transport.agents[0].process.kill()
        eventually(lambda: pool.stats().deaths == 3)
        staffed(pool, 6)
        assert len(transport.agents) == 2


@pytest.mark.slow
def test_what_others_hold_is_left_to_them(fork_server: mpgrad.Pool) -> None:
    with cluster(Node("a", "alpha", 3, free=1)) as (pool, transport):
        assert pool.processes == 1
        pool.map(abs, [-1])
        transport._nodes = [Node("a", "alpha", 3, free=2)]
        eventually(lambda: pool.processes == 3)
        staffed(pool, 3)
        transport._nodes = [Node("a", "alpha", 3, free=0)]
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
        assert pool.processes == 3


class Late(LocalTransport):
    def start_agent(self, options: AgentOptions) -> Any:
        agent = super().start_agent(options)
        agent.process.send_signal(signal.SIGSTOP)
        return agent


@pytest.mark.slow
def test_a_site_that_does_not_come(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Nothing said what the pool waited for."""
    from mpgrad.cluster import engine

    monkeypatch.setattr(engine, "WAITING", 0.1)
    with cluster(Node("a", "alpha", 3), transport=Late, patience=1.0) as (pool, transport):
        found = pool.map_async(abs, [-1])
        eventually(
            lambda: (
                "an agent for 3 workers (on node alpha) has not started for 0.1 s; other jobs"
                in caplog.text
            )
        )
        transport.agents[0].process.send_signal(signal.SIGCONT)
        assert found.get() == [1]
    assert caplog.text.count("has not started") == 1


@pytest.mark.quick
def test_where_workers_are_placed() -> None:
    small, large = Node("a", "alpha", 2), Node("b", "beta", 8)

    def placed(nodes: list[Node], workers: int) -> list[tuple[str, int]]:
        engine = ClusterEngine(LocalTransport(nodes), workers, 60.0)
        for number in range(workers):
            engine.start(number)
        found = [(agent.name, agent.slots) for agent in engine._agents]
        engine.close()
        return found

    assert placed([small, large], 4) == [("alpha", 2), ("beta", 2)]
    assert placed([small, large], 9) == [("alpha", 2), ("beta", 7)]
    assert placed([small, large], 12) == [("alpha", 2), ("beta", 8), ("", 2)]
    # nobody knows how large nodes will be
    assert placed([small._replace(slots=0)], 3) == [("", 1)] * 3
    assert placed([small], 7) == [("alpha", 2), ("", 2), ("", 2), ("", 1)]
    held = [small._replace(free=0), large._replace(free=0)]
    assert placed(held, 4) == [("alpha", 2), ("beta", 2)]  # waits for those who hold them


def test_no_room(fork_server: mpgrad.Pool) -> None:
    with (
        pytest.raises(RuntimeError, match="no node of the cluster has room"),
        cluster(Node("a", "alpha", 0)),
    ):
        pass


@pytest.mark.parametrize("name", first_are_quick(1, ["torch", "Python", "mpgrad"]))
def test_another_version_on_a_node(
    fork_server: mpgrad.Pool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpgrad.cluster import engine

    ours = engine.hello()
    other = ours._replace(versions={**ours.versions, name: "1.2.3"})
    monkeypatch.setattr(engine, "hello", lambda: other)
    message = re.escape(
        f"node {ours.host} has {name} {ours.versions[name]}, and the caller 1.2.3; "
    )
    with cluster(Node("a", "alpha", 1)) as (pool, _), pytest.raises(RuntimeError, match=message):
        pool.map(abs, [-1])


@pytest.mark.slow
def test_a_node_with_another_version_joins(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool goes on with the nodes that it has."""
    from mpgrad.cluster.engine import AgentHandle

    obey = AgentHandle._obey

    def changed(self: AgentHandle, kind: str, *rest: Any) -> None:
        if kind == "hello" and self.name == "beta":
            rest = (rest[0]._replace(versions={**rest[0].versions, "torch": "1.2.3"}),)
        obey(self, kind, *rest)

    monkeypatch.setattr(AgentHandle, "_obey", changed)
    with cluster(Node("a", "alpha", 1)) as (pool, transport):
        pool.map(abs, [-1])
        transport.join(Node("b", "beta", 1))
        eventually(lambda: "b" in avoided_nodes(pool))
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
        assert {worker.node for worker in pool.stats().workers} == {"alpha"}


@pytest.mark.slow
def test_a_busy_caller_is_no_silence(fork_server: mpgrad.Pool) -> None:
    """A callback kept the thread busy that speaks with the agents, which took the caller for
    dead."""
    with cluster(Node("a", "alpha", 1), patience=1.0) as (pool, _):
        weight = torch.ones(3, requires_grad=True)
        for _ in range(3):  # a busy machine may stop an agent for that long
            deaths, weight.grad = pool.stats().deaths, None
            (result,) = pool.map(lambda x: (weight * x).sum(), [2.0])
            in_scheduling_thread(pool, lambda: time.sleep(3))
            time.sleep(0.1)
            result.backward()
            assert torch.equal(weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
            if pool.stats().deaths == deaths:
                break
        else:
            raise AssertionError("each time the caller passed for dead")


class Refusing(LocalTransport):
    def start_agent(self, options: AgentOptions) -> Any:
        agent = super().start_agent(options)
        agent.process.kill()
        return agent


def test_sites_that_do_not_start(fork_server: mpgrad.Pool) -> None:
    message = "its agent was lost: ConnectionError"
    with (
        cluster(Node("a", "alpha", 1), transport=Refusing) as (pool, _),
        pytest.raises(mpgrad.WorkerDiedError, match=message),
    ):
        pool.map(abs, [-1])


# --- Ray's options


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"address": ""}, ValueError, "address must be"),
        ({"workers_per_node": 0}, ValueError, "workers_per_node must be at least 1"),
        (
            {"workers_per_node": 1.5},
            TypeError,
            r"workers_per_node must be an integer, or None \(workers_per_node: 1.5\)",
        ),
        ({"memory_per_worker": 0}, ValueError, "memory_per_worker must be at least 1"),
        ({"cpus_per_worker": 0}, ValueError, "cpus_per_worker must be more than 0"),
        (
            {"cpus_per_worker": "2"},
            TypeError,
            r"cpus_per_worker must be a number \(cpus_per_worker: '2'\)",
        ),
        ({"node_timeout": -1.0}, ValueError, "node_timeout must be more than 0"),
        (
            {"node_timeout": float("inf")},
            ValueError,
            "node_timeout must be more than 0, and finite",
        ),
        ({"node_timeout": None}, TypeError, "node_timeout must be a number"),
        ({"resources": ["GPU"]}, TypeError, "resources must be numbers by name"),
        ({"resources": {"tape": "1"}}, TypeError, "resources must be numbers by name"),
        (
            {"resources": {"tape": float("nan")}},
            ValueError,
            "resources must be 0 or more, and finite",
        ),
        ({"runtime_env": "pip"}, TypeError, "runtime_env must be a mapping, or None"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mpgrad.Ray(**options)


@pytest.mark.quick
def test_what_the_engine_refuses() -> None:
    with pytest.raises(ValueError, match='ray is for engine "ray"'):
        mpgrad.Pool(1, ray=mpgrad.Ray())
    with pytest.raises(TypeError, match="ray must be a mpgrad"):
        mpgrad.Pool(1, engine="ray", ray="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ray"):
        mpgrad.Pool(1, engine="ray", devices="cpu")


@pytest.mark.quick
def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="needs Ray, which is not installed; pip install ray"):
        mpgrad.Pool(1, engine="ray")
