"""What a pool is told of the Ray cluster that it is to use. Caller only; imports nothing of Ray's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Ray"]


@dataclass(frozen=True)
class Ray:
    """Which Ray cluster a pool with ``engine="ray"`` is to use, and how.

    Args:
        address: "auto" for the cluster that this machine belongs to (or `RAY_ADDRESS`); "local" to start one on this machine,
            on the loopback interface only, that ends with the pool; or an address such as "10.0.0.1:6379".
        workers_per_node: at most so many workers on each node; None for as many as its CPUs allow.
        cpus_per_worker: CPUs that are reserved for each worker.
        memory_per_worker: bytes that are reserved for each worker; None for none.
        resources: custom resources that each worker needs, by name.
        runtime_env: Ray's description of what the nodes have to have installed; see Ray's documentation.
        node_timeout: seconds of silence after which the caller and a node take each other for dead.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type; names it and its value.

    Example:
        >>> import mpgrad
        >>> mpgrad.Ray(address="local", node_timeout=5.0).address
        'local'
    """

    address: str = "auto"
    workers_per_node: int | None = None
    cpus_per_worker: float = 1
    memory_per_worker: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    node_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise ValueError(f'address must be "auto", "local", or that of a cluster (address: {self.address!r})')
        for name in ("workers_per_node", "memory_per_worker"):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an integer, or None ({name}: {number!r})")
            if number < 1:
                raise ValueError(f"{name} must be at least 1 ({name}: {number!r})")
        for name in ("cpus_per_worker", "node_timeout"):
            number = getattr(self, name)
            if not is_number(number):
                raise TypeError(f"{name} must be a number ({name}: {number!r})")
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be more than 0, and finite ({name}: {number!r})")
        given = self.resources
        if not isinstance(given, Mapping) or not all(isinstance(name, str) and is_number(given[name]) for name in given):
            raise TypeError(f"resources must be numbers by name (resources: {given!r})")
        if not all(0 <= number < math.inf for number in given.values()):
            raise ValueError(f"resources must be 0 or more, and finite (resources: {given!r})")
        if not isinstance(self.runtime_env, Mapping | None):
            raise TypeError(f"runtime_env must be a mapping, or None (runtime_env: {self.runtime_env!r})")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
