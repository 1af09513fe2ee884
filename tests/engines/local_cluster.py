"""Two nodes of a cluster that is only pretended: agents are programs on this machine, and no Ray is
needed.

As a plug-in of pytest (`-p local_cluster`) it runs whatever tests are named with it in the place of
engine "process". With `MPGRAD_CLUSTER=ray` in the environment these are two nodes of a real Ray
cluster on this machine.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from mpgrad.cluster.engine import ClusterEngine
from mpgrad.cluster.ray import Ray, stay_on_loopback
from mpgrad.cluster.transport import LocalTransport, Node
from mpgrad.engines.kinds import ENGINES, Engine, EngineKind, EngineRequest

TRAITS = ENGINES["ray"].traits
PATIENCE = 10.0  # seconds until a silent agent is given up
CPUS = 4  # of each node


def two_nodes(wanted: EngineRequest) -> Engine:
    """Nodes "alpha" and "beta", with room for many."""
    transport = LocalTransport([Node("a", "alpha", 64), Node("b", "beta", 64)])
    return ClusterEngine(transport, 2 if wanted.workers is None else wanted.workers, PATIENCE)


def two_ray_nodes(wanted: EngineRequest) -> Engine:
    """Of the cluster that `start_ray` has started."""
    return ENGINES["ray"].make(
        wanted._replace(workers=wanted.workers or 2, ray=Ray(cpus_per_worker=0.01))
    )


def start_ray(nodes: int = 2, cpus: float = CPUS) -> Any:
    """A cluster of so many nodes beside the head, which has no CPUs."""
    stay_on_loopback()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.1"}
    )
    for _ in range(nodes):
        cluster.add_node(num_cpus=cpus)
    importlib.import_module("ray").init(
        address=cluster.address, log_to_driver=False, logging_level="WARNING"
    )
    return cluster


def pytest_configure() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    make = two_nodes
    if os.environ.get("MPGRAD_CLUSTER") == "ray":
        start_ray()
        make = two_ray_nodes
    ENGINES["process"] = EngineKind(TRAITS, make)


OF_ONE_MACHINE = {  # tests that wait for what never happens here, and why
    "test_a_pool_without_workers_for_a_moment": "the caller needs no descriptor to start a worker",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (why := OF_ONE_MACHINE.get(item.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=why))
    # it keeps sockets and processes of its own, which come and go
    if os.environ.get("MPGRAD_CLUSTER") == "ray":
        conftest: Any = importlib.import_module("conftest")
        conftest.leftovers = lambda before: {}
