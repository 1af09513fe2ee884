"""A Ray cluster on this machine: a head without CPUs, and nodes with a few each. For benchmarks and soaks only.

Each node has its own raylet and object store, so what travels between nodes takes the path that it takes between machines.
The network between them is the loopback interface, and all of them share the CPUs of this machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

STORE = 200 << 20  # bytes of each node's object store
STARTS = 3  # a raylet ends if its helpers take longer than 15 s to start, as on a busy machine (ray-project/ray#65983)
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else 127.0.0.1 becomes another address of this machine
    "RAY_USAGE_STATS_ENABLED": "0",
}


class NoClusterError(Exception):
    """Ray did not start here."""


@contextlib.contextmanager
def simulated_nodes(count: int, cpus: int = 1) -> Iterator[Any]:
    """This process is the driver in the block, which gets Ray's cluster; to add nodes to it, use `start_node`.

    Raises:
        NoClusterError: Ray is not installed, or a node does not start.
    """
    os.environ.update(SETTINGS)
    try:
        ray, utils = importlib.import_module("ray"), importlib.import_module("ray.cluster_utils")
    except ImportError as error:
        raise NoClusterError(f"Ray is not installed ({error}): pip install '.[bench]'") from error
    with tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # else Ray notes there, for all programs of this machine, that this is its cluster
        cluster = utils.Cluster()
        try:
            start_node(cluster, num_cpus=0, include_dashboard=False)
            for _ in range(count):
                start_node(cluster, num_cpus=cpus)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def start_node(cluster: Any, **options: Any) -> Any:
    left = STARTS
    while True:
        try:
            return cluster.add_node(object_store_memory=STORE, **options)
        except Exception as error:  # `Exception` itself is what Ray raises
            left -= 1
            if not left:
                raise NoClusterError(f"a node of Ray does not start ({error}); try again when the machine is quiet") from error


def node_ids() -> list[str]:
    """Of the nodes that have CPUs."""
    ray = importlib.import_module("ray")
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
