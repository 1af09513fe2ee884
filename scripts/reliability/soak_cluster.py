"""A long run on a Ray cluster of three nodes on this machine, in which workers, sites and nodes are killed all the time.

Each step is a map with forward, backward and double backward (`deterministic=True`), during which something is killed. Its
gradients have to be those of the same step in a pool of processes that nobody hurts, bit for bit. At the end no process of a
site may be left.

    pip install "mpgrad[ray]"
    python scripts/reliability/soak_cluster.py --kills 200
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import mpgrad
from mpgrad.cluster.ray import stay_on_loopback

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
        self.nodes = [cluster.add_node(num_cpus=CPUS) for _ in range(NODES)]
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
            node = self.nodes.pop(self._random.randrange(NODES))
            self.cluster.remove_node(node, allow_graceful=False)
            self.nodes.append(self.cluster.add_node(num_cpus=CPUS))
        else:
            victims = sites_below(psutil.Process())
            if kind == "worker":  # a site's child is the nursery, whose children are the workers
                victims = [worker for site in victims for nursery in site.children() for worker in nursery.children()]
            if not victims:
                return False
            self._random.choice(victims).kill()
        self.killed[kind] += 1
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    stay_on_loopback()
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.1"}
    )
    ray = importlib.import_module("ray")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    with mpgrad.Pool(2, deterministic=True) as pool:
        expected = step(pool)
    killer, started = Killer(cluster, options.kills, options.seed), time.monotonic()
    steps = differing = 0
    with mpgrad.Pool(engine="ray", ray=mpgrad.Ray(node_timeout=5.0), deterministic=True, retries=20, inline="never") as pool:
        step(pool)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(step, pool)
            while killer.left:
                killer.run(under_way)
                found, steps = under_way.result(), steps + 1
                differing += not all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
                under_way = thread.submit(step, pool)
            under_way.result()
        stats = pool.stats()
    deadline = time.monotonic() + 5
    while (left := sites_below(psutil.Process())) and time.monotonic() < deadline:
        time.sleep(0.01)
    result = {
        "kills": dict(killer.killed),
        "steps": steps,
        "steps that differ": differing,
        "deaths of workers": stats.deaths,
        "calls run again": stats.reruns,
        "sites left": len(left),
        "seconds": round(time.monotonic() - started),
    }
    for name, value in result.items():
        print(f"{name:>20}  {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    ray.shutdown()
    cluster.shutdown()
    return 1 if differing or left else 0


if __name__ == "__main__":
    sys.exit(main())
