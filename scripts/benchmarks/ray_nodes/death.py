"""The row `death` of `bench_ray.py`: a node dies in the middle of a step. On a cluster of its own, which it leaves in pieces.

A turn has two nodes of one CPU. A contender opens there, does some steps that nobody disturbs, and one in whose middle all
processes of a node that has half of the work are killed. Another node joins for the next turn, which begins when Ray has
noticed that the old one is gone: before that it places actors there. It looks every 3 s, and believes it the fifth time.

What is killed closes its connections, so whoever has one to it hears of the death at once. A host without power is silent:
a pool waits for `node_timeout` then.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import psutil
from common import Outcome, WrongResultError
from figures import Figure, interleaved, median_figure, ratios

import mpgrad
from ray_nodes.by_hand import ByHand
from ray_nodes.cluster import node_ids, simulated_nodes, start_node
from ray_nodes.rows import AHEAD, Job, Plan, Way, compare, equal, mapped, serial

NODES = 2
STEPS = 3  # that nobody disturbs, behind as many untimed ones
TRIES = 3  # for a step that is not over before the node dies: others may have slowed the steps before it
RESTARTED = "by hand, restarted by Ray"

Opened = contextlib.AbstractContextManager[Way]


def death(plan: Plan) -> Iterator[Figure]:
    job = equal(64, 10, shrink=1)  # a shorter step would be over before anything dies
    with hushed(), simulated_nodes(NODES) as cluster:
        turns = {name: partial(taken, cluster, name, opened, job) for name, opened in CONTENDERS.items()}
        runs = interleaved(turns, plan.deaths, warm_ups=0)
    row = f"{job.title}, forward and backward, a node dies halfway"
    for name, own in runs.items():
        yield median_figure(row, name, [1e3 * turn.injured for turn in own], "ms")
    over = ratios([turn.injured for turn in runs[AHEAD]], [turn.injured for turn in runs[RESTARTED]])
    yield median_figure(row, f"{AHEAD}, time over that {RESTARTED}", over, "x")
    for name, own in runs.items():
        yield median_figure(row, f"{name}, undisturbed", [1e3 * turn.calm for turn in own], "ms")
    for name, own in runs.items():
        yield median_figure(row, f"{name}, cost of the death", [1e3 * (turn.injured - turn.calm) for turn in own], "ms")


# --- who takes part


@contextlib.contextmanager
def pool() -> Iterator[Way]:
    with mpgrad.Pool(NODES, engine="ray", graphs="ahead") as opened:
        while sum(worker.calls > 0 for worker in opened.stats().workers) < NODES:
            opened.map(time.sleep, [0.02] * NODES, 1)
        yield partial(mapped, opened.map)


@contextlib.contextmanager
def by_hand() -> Iterator[Way]:
    with contextlib.closing(ByHand(node_ids(), comes_again=True)) as hand:
        yield lambda job, items, weight: hand.both(job.function, items, weight)


CONTENDERS: dict[str, Callable[[], Opened]] = {RESTARTED: by_hand, AHEAD: pool}


# --- a turn


class Turn(NamedTuple):
    """Seconds of a step: the median of those that nobody disturbed, and the one with the death."""

    calm: float
    injured: float


def taken(cluster: Any, name: str, opened: Callable[[], Opened], job: Job) -> Turn:
    what = f"{job.title}: {name}"
    expected = mapped(serial, job, *job.leaves)
    for _ in range(TRIES):
        with opened() as way:
            calm = [timed(way, job)[0] for _ in range(2 * STEPS)][STEPS:]
            node, *_ = cluster.worker_nodes
            with ThreadPoolExecutor(1) as thread:
                killed = thread.submit(kill, processes_of(node), after=min(calm) / 2)
                injured, outcome = timed(way, job)
                in_time = killed.done()
            killed.result()
            compare(what, outcome, expected)
        replace(cluster, node)
        if in_time:
            return Turn(statistics.median(calm), injured)
    raise WrongResultError(f"{what}: the step was over before the node died, {TRIES} times; try again on a quiet machine")


def replace(cluster: Any, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)
    start_node(cluster, num_cpus=1)
    while len(node_ids()) > NODES:
        time.sleep(0.1)


def timed(way: Way, job: Job) -> tuple[float, Outcome]:
    items, weight = job.leaves
    began = time.perf_counter()
    outcome = way(job, items, weight)
    return time.perf_counter() - began, outcome


def processes_of(node: Any) -> list[psutil.Process]:
    """Ray's own first."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    found = [raylet, *raylet.children(recursive=True)]
    if not any("Actor" in process.name() for process in found):
        raise WrongResultError("no actor is on the node that is to die")
    return found


def kill(processes: list[psutil.Process], after: float) -> None:
    """All at once: an actor that outlives Ray's own process lives for some 0.2 s, in which it may end its half."""
    time.sleep(after)
    for process in processes:
        process.kill()


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """The deaths are meant: neither mpgrad nor Ray is to tell of them. Ray writes to the standard output."""
    log, silent = logging.getLogger("mpgrad"), logging.NullHandler()
    log.addHandler(silent)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        log.removeHandler(silent)
