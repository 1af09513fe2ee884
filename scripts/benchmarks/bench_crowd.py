"""How many workers one caller keeps busy on a cluster: nodes of 64 workers that only pretend to work, and a real caller.

The workers answer each call after the time that it is said to take (`ray_nodes/pretended.py`), so that one machine has room for
hundreds. All else is real: the caller with its scheduler and autograd, and the sites' way of gathering. Between them is Ray, or
a pipe (`--carrier pipe`), whose own cost is next to nothing: the difference is Ray's. All sites, and Ray, share the CPUs that
the caller leaves free.

Each row is a forward and backward over many items. Workers are busy for items x their time, out of workers x the time that
the map and its backward took. CPU of the caller is of all its threads, Ray's among them.

    python scripts/benchmarks/bench_crowd.py                                   # some minutes
    python scripts/benchmarks/bench_crowd.py --carrier pipe --ms 10 --workers 64 128
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from common import at_least_1, limited, surroundings
from descendants import cpu_seconds
from figures import Figure, add_options, fail, print_heading, report
from ray_nodes.cluster import NoClusterError, simulated_nodes
from ray_nodes.pretended import LENGTHS, SECONDS, PretendedActor

import mpgrad
from mpgrad.cluster import ray as cluster_ray
from mpgrad.cluster.carrier import Node, Reply, SiteOptions
from mpgrad.cluster.engine import ClusterEngine
from mpgrad.engines.kinds import ENGINES, Kind

HERE = Path(__file__).parent
NODE = 64  # workers, at most
CROWDS = {1.0: (4, 8, 16), 10.0: (16, 32, 64, 128), 100.0: (128, 256, 512)}  # workers by milliseconds of an item
FLOATS = 100  # of an item
PATIENCE = 60.0
LIMIT = 1800  # seconds


class PipeCarrier:
    """All sites are in one program on this machine, behind one pipe."""

    def __init__(self, nodes: int, seconds: float) -> None:
        self._nodes = [Node(str(number), f"node {number}", NODE) for number in range(nodes)]
        self._socket, theirs = socket.socketpair()
        with theirs:
            code = (
                "import asyncio, socket, sys; sys.path.insert(0, sys.argv[1]); from ray_nodes.pretended import serve;"
                "asyncio.run(serve(socket.socket(fileno=int(sys.argv[2])), float(sys.argv[3]), float(sys.argv[4])))"
            )
            command = [sys.executable, "-c", code, str(HERE), str(theirs.fileno()), str(PATIENCE), str(seconds)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies: dict[tuple[int, int], Reply] = {}
        self._count = 0
        for target in (self._write, self._read):
            threading.Thread(target=target, daemon=True).start()

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def start_site(self, options: SiteOptions) -> Any:
        self._count += 1
        return self._count

    def exchange(self, site: Any, number: int, content: bytes, reply: Reply) -> None:
        self._replies[site, number] = reply
        self._to_send.put(LENGTHS.pack(site, number, len(content)) + content)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (content := self._to_send.get()) is not None:
                self._socket.sendall(content)

    def _read(self) -> None:
        with contextlib.suppress(OSError, struct.error), self._socket.makefile("rb") as file:
            while head := file.read(LENGTHS.size + 8):
                site, exchange, nbytes, number = struct.unpack("<QQQQ", head)
                self._replies.pop((site, exchange))((number, file.read(nbytes)))
        for reply in list(self._replies.values()):
            reply(ConnectionError("the pretended sites have ended"))

    def kill_site(self, site: Any) -> None:
        pass  # they end with the pipe

    def close(self) -> None:
        self._to_send.put(None)
        self.process.kill()
        self.process.wait()
        self._socket.close()


@contextlib.contextmanager
def opened(carrier: str, workers: int, seconds: float, graphs: str) -> Iterator[mpgrad.Pool]:
    """A pool with all its workers there."""
    nodes = -(-workers // NODE)
    with contextlib.ExitStack() as stack:
        if carrier == "pipe":
            made = PipeCarrier(nodes, seconds)
            ENGINES["pretended"] = Kind(ENGINES["ray"].traits, lambda wanted: ClusterEngine(made, wanted.workers, PATIENCE))
            stack.callback(ENGINES.pop, "pretended")
            pool: Any = mpgrad.Pool(workers, engine="pretended", graphs=graphs)  # type: ignore[call-overload]
        else:
            os.environ[SECONDS] = str(seconds)
            os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
            cluster = stack.enter_context(simulated_nodes(nodes, NODE))
            cluster_ray.SiteActor = PretendedActor  # type: ignore[misc,assignment]
            ray = mpgrad.Ray(address=cluster.address, node_timeout=PATIENCE)
            pool = mpgrad.Pool(workers, engine="ray", graphs=graphs, ray=ray)  # type: ignore[call-overload]
        with pool:
            while len(pool.stats().workers) < workers:
                pool.map(torch.sum, [torch.ones(2)] * workers, 1)
            yield pool


class Taken(NamedTuple):
    wall: float
    caller: float  # seconds of CPU
    others: float


def loss(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"a worker that pretends has run {x}")


def taken(pool: mpgrad.Pool, items: int) -> Taken:
    xs = [torch.zeros(FLOATS, requires_grad=True) for _ in range(items)]
    children = set(psutil.Process().children(recursive=True))
    others, caller, began = cpu_seconds(children), own_cpu(), time.perf_counter()
    losses = pool.map(loss, xs)
    torch.stack(tuple(losses)).sum().backward()
    del losses
    wall = time.perf_counter() - began
    assert all(x.grad is not None and x.grad.shape == x.shape for x in xs)
    return Taken(wall, own_cpu() - caller, cpu_seconds(children) - others)


def own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Case(NamedTuple):
    carrier: str
    graphs: str
    ms: float
    workers: int


def measured(case: Case, rounds: int, seconds: float) -> list[Figure]:
    """As many items as would keep all workers, or a caller at 0.3 ms an item, busy for so many seconds."""
    workers = case.workers
    items = round(max(2 * workers, min(seconds * workers / case.ms * 1e3, seconds / 0.3e-3)))
    with opened(case.carrier, workers, case.ms / 1e3, case.graphs) as pool:
        taken(pool, items)
        runs = [taken(pool, items) for _ in range(rounds)]
    row = f"{case.carrier}, {case.graphs}, {items} items of {case.ms:g} ms, {workers} workers"
    values = {
        "workers busy": ([100 * items * case.ms / 1e3 / run.wall / workers for run in runs], "%"),
        "that is": ([items * case.ms / 1e3 / run.wall for run in runs], "workers"),
        "CPU of the caller": ([1e6 * run.caller / items for run in runs], "us/item"),
        "CPUs that the caller used": ([run.caller / run.wall for run in runs], "CPUs"),
        "CPUs that sites and Ray used": ([run.others / run.wall for run in runs], "CPUs"),
    }
    return [Figure(row, name, statistics.median(each), unit, None, each) for name, (each, unit) in values.items()]


def print_line(case: Case, figures: Sequence[Figure]) -> None:
    busy, crowd, cost, caller, others = (figure.value for figure in figures)
    print(
        f"  {case.carrier:5} {case.graphs:6} {case.ms:6g} ms {case.workers:6} workers {busy:6.0f} % busy = {crowd:5.0f} "
        f"{cost:7.0f} us {caller:6.2f} {others:6.2f} CPUs",
        flush=True,
    )


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    parser.add_argument("--carrier", nargs="+", choices=("ray", "pipe"), default=["ray", "pipe"])
    parser.add_argument("--graphs", nargs="+", choices=("keep", "ahead"), default=["ahead", "keep"])
    parser.add_argument("--ms", nargs="+", type=float, default=list(CROWDS), help="of an item, forward and backward")
    crowds = "; ".join(f"{ms:g} ms: {', '.join(map(str, crowd))}" for ms, crowd in CROWDS.items())
    parser.add_argument("--workers", nargs="+", type=at_least_1, metavar="N", help=f"default: {crowds}")
    parser.add_argument("--rounds", type=at_least_1, default=3, metavar="N", help="timed rounds")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a round takes, about")
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    around = surroundings(1)
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, load average {around['load_average']:.2f} before")
    print_heading("workers busy of all, CPU of the caller for an item, CPUs that the caller, and that sites and Ray used")
    torch.set_num_threads(1)
    figures: list[Figure] = []
    status = 0
    kinds = [(carrier, graphs, ms) for carrier in options.carrier for graphs in options.graphs for ms in options.ms]
    cases = [Case(*kind, workers) for kind in kinds for workers in options.workers or CROWDS.get(kind[-1], (NODE,))]
    rounds, seconds = (1, 0.2) if options.quick else (options.rounds, options.seconds)
    try:
        with limited(LIMIT):
            for case in cases[: 1 if options.quick else None]:
                found = measured(case, rounds, seconds)
                print_line(case, found)
                figures += found
    except (NoClusterError, TimeoutError) as error:
        status = fail(error)
    if figures:
        report(options, around, figures, rounds=rounds)
    return status


if __name__ == "__main__":
    sys.exit(main())
