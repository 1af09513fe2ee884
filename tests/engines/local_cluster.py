"""Two nodes of a simulated cluster. Agents are programs on this machine, and Ray is not needed.

As a pytest plug-in (`-p local_cluster`) it replaces the engine "process" in all tests that pytest
runs. With `MPGRAD_CLUSTER=ray` in the environment it uses two nodes of a real Ray cluster on this
machine.
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
    """Return an engine with the nodes "alpha" and "beta", which have room for many workers."""
    transport = LocalTransport([Node("a", "alpha", 64), Node("b", "beta", 64)])
    return ClusterEngine(transport, 2 if wanted.workers is None else wanted.workers, PATIENCE)


def two_ray_nodes(wanted: EngineRequest) -> Engine:
    """Return an engine with the nodes of the cluster that `start_ray` has started."""
    return ENGINES["ray"].make(
        wanted._replace(workers=wanted.workers or 2, ray=Ray(cpus_per_worker=0.01))
    )


def start_ray(nodes: int = 2, cpus: float = CPUS) -> Any:
    """Start a cluster with this number of nodes beside the head, which has no CPUs."""
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


OF_ONE_MACHINE = {  # tests that wait for events that never happen here, and why
    "test_a_pool_without_workers_for_a_moment": "the caller needs no descriptor to start a worker",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (why := OF_ONE_MACHINE.get(item.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=why))
    # Ray keeps its own sockets and processes, which come and go
    if os.environ.get("MPGRAD_CLUSTER") == "ray":
        conftest: Any = importlib.import_module("conftest")
        conftest.leftovers = lambda before: {}
