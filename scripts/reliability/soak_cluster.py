"""A long run on a Ray cluster of three nodes on this machine, in which workers, sites and nodes are killed all the time.

Each step is a map with forward, backward and double backward (`deterministic=True`), during which something is killed. Its
gradients have to be those of the same step in a pool of processes that nobody hurts, bit for bit. At the end no process of a
site may be left.

    pip install '.[ray]'
    python scripts/reliability/soak_cluster.py --kills 200
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

from ray_nodes.cluster import simulated_nodes, start_node

import mpgrad

NODES = 3
CPUS = 2  # of each
PAUSES = (0.3, 1.5)  # seconds between kills; a site and its workers take some 3 s to start
KINDS = ("worker", "worker", "worker", "site", "node")


def step(pool: mpgrad.Pool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(5000, dtype=torch.float64, generator=generator).requires_grad_()
    xs = [torch.rand(5000, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(24)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return ((x * weight).sin() * weight).sum()

    loss = torch.stack(pool.map(fn, xs, 1)).square().sum()
    first = torch.autograd.grad(loss, [weight, *xs], create_graph=True)
    total = torch.stack([each.square().sum() for each in first]).sum()
    return [loss.detach(), *(each.detach() for each in first), *torch.autograd.grad(total, [weight, *xs])]


def sites_below(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children(recursive=True):
        try:
            if "SiteActor" in "".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
    return found


class Killer:
    """Kills what is there, at random moments. In the main thread, outside which Ray adds no nodes."""

    def __init__(self, cluster: Any, kills: int, seed: int) -> None:
        self.cluster = cluster
        self.nodes = list(cluster.worker_nodes)
        self.left = kills
        self.killed: collections.Counter[str] = collections.Counter()
        self._random = random.Random(seed)

    def run(self, meanwhile: concurrent.futures.Future[Any]) -> None:
        while self.left and not meanwhile.done():
            time.sleep(self._random.uniform(*PAUSES))
            if self._kill(self._random.choice(KINDS)):
                self.left -= 1

    def _kill(self, kind: str) -> bool:
        if kind == "node":
            node = self.nodes.pop(self._random.randrange(len(self.nodes)))
            self.cluster.remove_node(node, allow_graceful=False)
            self.nodes.append(start_node(self.cluster, num_cpus=CPUS))
        else:
            victims = sites_below(psutil.Process())
            if kind == "worker":  # a site's child is the nursery, whose children are the workers
                victims = [worker for site in victims for nursery in site.children() for worker in nursery.children()]
            if not victims:
                return False
            self._random.choice(victims).kill()
        self.killed[kind] += 1
        return True


def soak(cluster: Any, kills: int, seed: int) -> dict[str, Any]:
    """Steps until so much was killed, and one more; what came of them."""
    with mpgrad.Pool(2, deterministic=True) as pool:
        expected = step(pool)

    def differs(found: list[torch.Tensor]) -> bool:
        return not all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))

    killer, started = Killer(cluster, kills, seed), time.monotonic()
    differing = []
    with mpgrad.Pool(engine="ray", ray=mpgrad.Ray(node_timeout=5.0), deterministic=True, retries=20) as pool:
        step(pool)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            while killer.left:
                under_way = thread.submit(step, pool)
                killer.run(under_way)
                differing.append(differs(under_way.result()))
        differing.append(differs(step(pool)))
        stats = pool.stats()
    deadline = time.monotonic() + 5
    while (left := sites_below(psutil.Process())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "kills": dict(killer.killed),
        "steps": len(differing),
        "steps that differ": sum(differing),
        "deaths of workers": stats.deaths,
        "calls run again": stats.reruns,
        "sites left": len(left),
        "seconds": round(time.monotonic() - started),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    logging.getLogger("mpgrad").addHandler(logging.NullHandler())  # the deaths are meant, and the table counts them
    with simulated_nodes(NODES, CPUS) as cluster:
        result = soak(cluster, options.kills, options.seed)
    for name, value in result.items():
        print(f"{name:>20}  {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["steps that differ"] or result["sites left"] else 0


if __name__ == "__main__":
    sys.exit(main())
