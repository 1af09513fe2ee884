"""Clusters without room for all: what is lost, or left over, must not wait for a worker that may
never come."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import eventually, first_are_quick
from inside import agents, handles, leave
from test_cluster import (
    ONE_EACH,
    PATIENCE,
    chain,
    cluster,
    grad_of,
    leaf,
    serial,
    staffed,
)

import mpgrad
from mpgrad.cluster.transport import AgentOptions, LocalTransport, Node


class Crowded(LocalTransport):
    """There is room on the nodes that were named; an agent that may be anywhere waits until some is
    made."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(nodes)
        self.waiting: list[Any] = []

    def start_agent(self, options: AgentOptions) -> Any:
        agent = super().start_agent(options)
        if options.node is None:
            agent.process.send_signal(signal.SIGSTOP)
            self.waiting.append(agent)
        return agent

    def lose(self, *nodes: str) -> None:
        """In their order, from the first."""
        for node, agent in zip(nodes, list(self.agents), strict=False):
            self.part(node)
            agent.process.kill()

    def make_room(self) -> None:
        """For the agent that came last."""
        self.waiting[-1].process.send_signal(signal.SIGCONT)


def leaves() -> list[torch.Tensor]:
    return [torch.full((3,), float(k), requires_grad=True) for k in range(8)]


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


# --- a node is lost, and there is no room elsewhere


@pytest.mark.parametrize("lost", first_are_quick(1, [1, 2]))
def test_graphs_are_made_again_by_those_who_are_there(fork_server: mpgrad.Pool, lost: int) -> None:
    """They were given to the worker with the least to do, which was one that never came."""
    xs = leaves()
    with (
        ThreadPoolExecutor(1) as thread,
        cluster(*ONE_EACH, transport=Crowded, processes=2) as (pool, transport),
    ):
        staffed(pool, 2)
        total = sum(pool.map(sine, xs, 1))
        transport.lose(*"ab"[:lost])
        eventually(lambda: len(transport.waiting) == lost)
        gradients = thread.submit(torch.autograd.grad, total, xs)
        if lost == 2:
            # which is said, though no worker has them
            eventually(lambda: pool.stats().backwards_left > 0)
            transport.make_room()
        assert all(
            torch.equal(found, x.cos())
            for found, x in zip(gradients.result(PATIENCE), xs, strict=True)
        )


@pytest.mark.slow
def test_join_waits_for_gradients_that_wait_for_room(fork_server: mpgrad.Pool) -> None:
    xs = leaves()
    with (
        ThreadPoolExecutor(2) as threads,
        cluster(*ONE_EACH, transport=Crowded, processes=2) as (pool, transport),
    ):
        staffed(pool, 2)
        total = sum(pool.map(sine, xs, 1))
        transport.lose("a", "b")
        eventually(lambda: len(transport.waiting) == 2)
        gradients = threads.submit(torch.autograd.grad, total, xs)
        eventually(lambda: pool.stats().backwards_left > 0)
        pool.close()
        joined = threads.submit(pool.join)
        transport.make_room()
        assert all(
            torch.equal(found, x.cos())
            for found, x in zip(gradients.result(PATIENCE), xs, strict=True)
        )
        joined.result(PATIENCE)


@pytest.mark.slow
def test_without_retries_the_error_comes_at_once(fork_server: mpgrad.Pool) -> None:
    """It waited for room, where the graph could not be made again anyway."""
    xs = leaves()
    with (
        ThreadPoolExecutor(1) as thread,
        cluster(*ONE_EACH, transport=Crowded, processes=2, retries=0) as (pool, transport),
    ):
        staffed(pool, 2)
        total = sum(pool.map(sine, xs, 1))
        transport.lose("a", "b")
        eventually(lambda: len(transport.waiting) == 2)
        with pytest.raises(mpgrad.WorkerDiedError, match="only rebuilt with retries"):
            thread.submit(torch.autograd.grad, total, xs).result(PATIENCE)


@pytest.mark.slow
def test_without_retries_no_call_runs_twice(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """An agent that is lost does not say what its workers had begun."""

    notes, go = tmp_path / "notes", tmp_path / "go"
    notes.mkdir()

    def note(k: int) -> int:
        with (notes / str(k)).open("a") as file:
            file.write("x")
        while not go.exists():
            time.sleep(0.01)
        return k

    with cluster(*ONE_EACH, transport=Crowded, processes=2, retries=0) as (pool, transport):
        staffed(pool, 2)
        futures = [pool.submit(note, k) for k in range(8)]
        eventually(lambda: len(list(notes.iterdir())) >= 2)
        transport.lose("a")
        go.touch()
        errors = [future.exception(PATIENCE) for future in futures]
        assert any(errors) and not all(errors)
        for error in errors:
            assert error is None or isinstance(error, mpgrad.WorkerDiedError)
            assert error is None or "phase: forward" in str(error)
        assert all(file.read_text() == "x" for file in notes.iterdir())


@pytest.mark.slow
def test_a_long_call_that_took_its_node_along_is_blamed(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """And not the first of its chunk."""
    caller = os.getpid()

    def last_one_kills(k: int) -> int:
        if k == 2:
            go = tmp_path / str(os.getpid())
            while not go.exists():  # until its agent has said where it is
                time.sleep(0.01)
            # beyond the fork server, if there is one
            agent = next(each for each in psutil.Process().parents() if each.ppid() == caller)
            agent.kill()
            time.sleep(60)
        return k

    with cluster(Node("a", "alpha", 1), processes=1, retries=1) as (pool, _):
        result = pool.map_async(last_one_kills, range(3), 3)
        while not result.ready():
            for worker in handles(pool):
                chunk, (position, _) = worker.under_way.first, worker.under_way.begun()
                calls = chunk.calls[max(0, position) : position + 1] if chunk is not None else []
                if [call.index for _, call in calls] == [2]:
                    (tmp_path / str(worker.pid)).touch()
            time.sleep(0.01)
        with pytest.raises(mpgrad.WorkerDiedError) as caught:
            result.get()
        assert caught.value.item == 2


@pytest.mark.slow
def test_graphs_of_chains_are_made_again_after_the_end(fork_server: mpgrad.Pool) -> None:
    """After `Executor.shutdown` workers take no new calls; these are old ones."""
    with ThreadPoolExecutor(1) as thread, cluster(*ONE_EACH) as (pool, transport):
        staffed(pool, 2)
        xs, results = [], []
        # or one might end at once, and nobody would be left
        while not all(worker.graphs for worker in pool.stats().workers):
            more = [leaf() for _ in range(4)]
            chains = [chain(pool, x) for x in more]
            results += [each[-1].result() for each in chains]
            xs += more
        del chains
        total = sum(each.sum() for each in results)
        leave(pool)
        eventually(lambda: all(worker.state == "retiring" for worker in pool.stats().workers))
        transport.agents[0].process.kill()
        found = thread.submit(torch.autograd.grad, total, xs).result(PATIENCE)
        assert all(torch.equal(grad, grad_of(serial, x)) for grad, x in zip(found, xs, strict=True))


@pytest.mark.slow
def test_nobody_is_left_to_make_graphs_again(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """The backward waited for ever: workers that have been retired have no successors."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        tempfile.mkstemp(prefix=f"{os.getpid()} ", dir=tmp_path)
        time.sleep(1.0)
        return x * 2

    with ThreadPoolExecutor(1) as thread, cluster(*ONE_EACH) as (pool, transport):
        staffed(pool, 2)
        xs = [leaf() for _ in range(2)]
        first = [pool.submit(slow, x) for x in xs]
        total = sum(pool.submit(torch.sin, each).result().sum() for each in first)
        del first
        leave(pool)
        eventually(lambda: all(worker.state == "retiring" for worker in pool.stats().workers))
        pids = [int(path.name.split()[0]) for path in tmp_path.iterdir()]
        slow_one = psutil.Process(pids[0])
        (agent,) = [
            each
            for each in transport.agents
            if each.process.pid in [parent.pid for parent in slow_one.parents()]
        ]
        (other,) = [each for each in transport.agents if each is not agent]
        agent.process.kill()
        gradients = thread.submit(torch.autograd.grad, total, xs)
        again = pids.count(slow_one.pid)  # on a busy machine perhaps both
        eventually(lambda: len(list(tmp_path.iterdir())) == 2 + again)
        other.process.kill()
        with pytest.raises((mpgrad.PoolClosedError, mpgrad.WorkerDiedError)):
            gradients.result(PATIENCE)


# --- places


@pytest.mark.slow
def test_a_replaced_worker_leaves_its_place_to_its_successor(fork_server: mpgrad.Pool) -> None:
    """It keeps graphs, and its successor was to find room elsewhere."""
    xs = [torch.full((3,), float(k), requires_grad=True) for k in range(24)]
    with (
        ThreadPoolExecutor(1) as thread,
        cluster(*ONE_EACH, transport=Crowded, processes=2, maxtasksperchild=4) as (pool, _),
    ):
        results = thread.submit(pool.map, sine, xs, 1).result(PATIENCE)
        assert all(
            torch.equal(found, x.cos())
            for found, x in zip(torch.autograd.grad(sum(results), xs), xs, strict=True)
        )


@pytest.mark.slow
def test_fewer_workers_are_those_that_are_there(fork_server: mpgrad.Pool) -> None:
    """Every second one was kept, and half of them had not come."""
    with cluster(Node("a", "alpha", 2), transport=Crowded, processes=4) as (pool, transport):
        staffed(pool, 2)
        eventually(lambda: len(transport.waiting) == 1)
        pool.resize(2)
        pool.map(abs, range(8), 1)
        assert {worker.state for worker in pool.stats().workers} <= {"idle", "busy"}
        eventually(lambda: len(transport.agents) == 1)  # nobody waits for room any more


@pytest.mark.slow
@pytest.mark.parametrize("refusals", [1, 2])
def test_a_worker_that_was_refused_is_tried_again_there(
    fork_server: mpgrad.Pool, refusals: int
) -> None:
    """It was to find room elsewhere, while its place was free; so it is only where a node goes on
    to refuse."""
    with (
        ThreadPoolExecutor(1) as thread,
        cluster(Node("a", "alpha", 1), transport=Crowded, processes=1) as (pool, transport),
    ):
        staffed(pool, 1)
        (agent,) = agents(pool)
        # it refuses for a moment, or for longer than this test takes
        agent.refusals = refusals
        agent.full_until = time.monotonic() + (0.5 if refusals == 1 else 100.0)
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
        found = thread.submit(pool.map, abs, [-1])
        if refusals > 1:
            eventually(lambda: transport.waiting)
            transport.make_room()
        assert found.result(PATIENCE) == [1]
        assert len(transport.waiting) == refusals - 1


def test_a_lost_node_costs_no_worker_elsewhere(fork_server: mpgrad.Pool) -> None:
    """With nodes that are followed: its dead workers were counted, and a living one retired."""
    with cluster(Node("a", "alpha", 2), Node("b", "beta", 2)) as (pool, transport):
        staffed(pool, 4)
        kept = {worker.pid for worker in pool.stats().workers if worker.node == "beta"}
        transport.part("a")
        transport.agents[0].process.kill()
        eventually(lambda: pool.stats().deaths == 2)
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
        workers = pool.stats().workers
        assert {worker.pid for worker in workers} == kept and {
            worker.state for worker in workers
        } <= {"idle", "busy"}
