"""A transport through Ray: agents are actors on its nodes; it places them, carries bytes, and says
which are dead. Both sides. And what a pool is told of the Ray cluster that it is to use. Imports
nothing of Ray's before it is asked for.

Ray sends what is small within the call of an actor's method, and whatever is larger through its
object store, which costs more (measured, an echo to another raylet of the same machine: 90 KB 1.6
ms, 110 KB 17 ms). So content goes in pieces up to `WITHIN_CALL`, and beyond that as one object.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mpgrad.cluster.agent import NodeAgent
from mpgrad.cluster.engine import ClusterEngine
from mpgrad.cluster.transport import AgentOptions, Node, Reply

__all__ = ["Ray", "RayTransport", "ray_engine"]

PIECE = 90 << 10  # bytes that Ray sends within a call
WITHIN_CALL = 2 << 20
CONNECT_PATIENCE = 5.0  # seconds
FETCHING = 8  # large replies at a time


@dataclass(frozen=True)
class Ray:
    """Which Ray cluster a pool with ``engine="ray"`` is to use, and how.

    Args:
        address: "auto" for the cluster that this machine belongs to (or `RAY_ADDRESS`); "local" to
            start one on this machine, on the loopback interface only, that ends with the pool; or
            an address such as "10.0.0.1:6379".
        workers_per_node: at most so many workers on each node; None for as many as its CPUs allow.
        cpus_per_worker: CPUs that are reserved for each worker.
        memory_per_worker: bytes that are reserved for each worker; None for none.
        resources: custom resources that each worker needs, by name.
        runtime_env: Ray's description of what the nodes have to have installed; see Ray's
            documentation.
        node_timeout: seconds of silence after which the caller and a node take each other for dead.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type; names it and its
            value.

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
            raise ValueError(
                f'address must be "auto", "local", or that of a cluster (address: {self.address!r})'
            )
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
        if not isinstance(given, Mapping) or not all(
            isinstance(name, str) and is_number(given[name]) for name in given
        ):
            raise TypeError(f"resources must be numbers by name (resources: {given!r})")
        if not all(0 <= number < math.inf for number in given.values()):
            raise ValueError(f"resources must be 0 or more, and finite (resources: {given!r})")
        if not isinstance(self.runtime_env, Mapping | None):
            raise TypeError(
                f"runtime_env must be a mapping, or None (runtime_env: {self.runtime_env!r})"
            )


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- the transport


def ray_module() -> Any:
    """
    Raises:
        ImportError: Ray is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            'engine "ray" needs Ray, which is not installed; pip install ray'
        ) from error


def stay_on_loopback() -> None:
    """Have what Ray starts from now on listen on the loopback interface only, as it does where it
    knows no clusters."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None:  # it had been imported before, and has read that already
        constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]


def cluster_address(options: Ray) -> str:
    """As far as it is known."""
    return os.environ.get("RAY_ADDRESS", "") if options.address == "auto" else options.address


def check_that_somebody_listens(address: str) -> None:
    """Ray itself would try for minutes.

    Raises:
        OSError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_PATIENCE).close()


def check_that_it_is_no_client(address: str) -> None:
    """Ray Client does not say which nodes have room, and has each message take a detour.

    Raises:
        ConnectionError: the address is one of Ray Client.
    """
    if address.startswith("ray://"):
        raise ConnectionError(
            "Ray Client (ray://) cannot be used; run the script in the cluster (ray job submit), "
            "or on a machine that has "
            "joined it without workers (ray start --address=HOST:6379 --num-cpus=0) (address: "
            f"{address!r})"
        )


class OwnCluster:
    """What was started for pools of this process (`address="local"`): it ends with the last of
    them. Ray allows one at once."""

    lock = threading.Lock()
    current: OwnCluster | None = None

    def __init__(self) -> None:
        self.pools = 0


class RayTransport:
    def __init__(self, options: Ray) -> None:
        """Joins the cluster, or starts one; uses the one that the program has joined already.

        Raises:
            ImportError: Ray is not installed.
            ConnectionError: there is no cluster at the address, or none can be started; or it is
                one of Ray Client.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        check_that_it_is_no_client(cluster_address(options))
        self._starts_own = options.address == "local"
        if self._starts_own:
            stay_on_loopback()
        self._ray = ray_module()
        self._options = options
        self._fetching = ThreadPoolExecutor(FETCHING, "mpgrad-fetch")
        with OwnCluster.lock:
            if not self._ray.is_initialized():
                OwnCluster.current = None
                self._join()
                if self._starts_own:
                    OwnCluster.current = OwnCluster()
            self._own = OwnCluster.current
            if self._own is not None:
                self._own.pools += 1

    def _join(self) -> None:
        options = self._options
        how: dict[str, Any] = {
            "address": options.address,
            "log_to_driver": False,
            "logging_level": "WARNING",
        }
        if options.runtime_env is not None:
            how["runtime_env"] = dict(options.runtime_env)
        if self._starts_own:
            how |= {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
        try:
            check_that_somebody_listens(cluster_address(options))
            self._ray.init(**how)
        except Exception as error:  # Ray raises many kinds, among them just this one
            can = "started" if self._starts_own else "joined"
            remedy = (
                ""
                if self._starts_own
                else (
                    "; start one (ray start --head), say its address, or use "
                    'mpgrad.Ray(address="local")'
                )
            )
            raise ConnectionError(
                f"no Ray cluster can be {can} ({error}){remedy} (address: {options.address!r})"
            ) from error

    def nodes(self) -> Sequence[Node]:
        try:
            alive = [each for each in self._ray.nodes() if each["Alive"]]
            free = self._free_resources()
        except Exception as error:  # of many kinds, none of which Ray documents
            raise ConnectionError(
                f"the Ray cluster does not answer ({type(error).__name__}: {error})"
            ) from error
        found = []
        for each in alive:
            number, has_now = each["NodeID"], None if free is None else free.get(each["NodeID"])
            name = each["NodeManagerHostname"] or each["NodeManagerAddress"]
            found.append(
                Node(
                    number,
                    name,
                    self._room(each["Resources"]),
                    None if has_now is None else self._room(has_now),
                )
            )
        return found

    def _free_resources(self) -> Mapping[str, Mapping[str, float]] | None:
        """Of each node, some moments ago; None where this version of Ray does not say, as it has no
        public name for it."""
        state = importlib.import_module("ray._private.state")
        ask: Any = getattr(state, "available_resources_per_node", None)
        return None if ask is None else ask()

    def _room(self, has: Mapping[str, float]) -> int:
        """For how many workers."""
        options = self._options
        needs = {"CPU": options.cpus_per_worker, **options.resources}
        if options.memory_per_worker is not None:
            needs["memory"] = options.memory_per_worker
        room = min(int(has.get(name, 0) / each) for name, each in needs.items() if each)
        return room if options.workers_per_node is None else min(room, options.workers_per_node)

    def start_agent(self, options: AgentOptions) -> Any:
        ours, ray = self._options, self._ray
        placement: Any = "SPREAD"
        if options.node is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            placement = strategies.NodeAffinitySchedulingStrategy(
                node_id=options.node.id, soft=False
            )
        how: dict[str, Any] = {
            "num_cpus": ours.cpus_per_worker * options.slots,
            "resources": {name: each * options.slots for name, each in ours.resources.items()},
            "scheduling_strategy": placement,
            "max_restarts": 0,
            "max_concurrency": 1000,
            "enable_task_events": False,  # of each exchange, for the dashboard
        }
        if ours.memory_per_worker is not None:
            how["memory"] = ours.memory_per_worker * options.slots
        try:
            return ray.remote(AgentActor).options(**how).remote(options.patience)
        except Exception as error:  # of many kinds
            raise OSError(
                f"Ray can start no agent now ({type(error).__name__}: {error})"
            ) from error

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        asked = agent.exchange.remote(number, *in_pieces(content, self._ray.put))
        asked.future().add_done_callback(lambda future: self._take(future, reply))

    def _take(self, future: Any, reply: Reply) -> None:
        """In a thread of Ray's, which has the replies of all agents: a large one is fetched in
        another."""
        if future.exception() is None and is_large(future.result()[1:]):
            reply((future.result()[0], None))
            self._fetching.submit(lambda: reply(replied(future, self._ray.get)))
        else:
            reply(replied(future, self._ray.get))

    def kill_agent(self, agent: Any) -> None:
        with contextlib.suppress(Exception):  # it has ended, or the cluster has
            self._ray.kill(agent)

    def close(self) -> None:
        self._fetching.shutdown(wait=False)
        with OwnCluster.lock:
            own, self._own = self._own, None
            if own is None:
                return
            own.pools -= 1
            if own.pools == 0 and own is OwnCluster.current and not sys.is_finalizing():
                OwnCluster.current = None
                self._ray.shutdown()


def in_pieces(content: bytes, put: Callable[[Any], Any]) -> list[Any]:
    """Each small enough to travel within a call, or one reference to an object in Ray's store."""
    if len(content) > WITHIN_CALL:
        return [[put(content)]]  # in a list, Ray leaves the reference as it is
    return [content[start : start + PIECE] for start in range(0, len(content), PIECE)]


def is_large(pieces: Sequence[Any]) -> bool:
    return len(pieces) == 1 and isinstance(pieces[0], list)


def replied(future: Any, get: Callable[[Any], Any]) -> tuple[int, bytes] | BaseException:
    try:
        number, *pieces = future.result()
        return number, bytes(get(pieces[0][0])) if is_large(pieces) else b"".join(pieces)
    except BaseException as error:
        # of Ray's kinds: the actor died, its node did, it cannot be reached
        return error


class AgentActor:
    """On the node: a `NodeAgent` in an actor's event loop."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._agent: NodeAgent | None = None

    async def exchange(self, number: int, *pieces: Any) -> tuple[Any, ...]:
        if self._agent is None:
            self._agent = NodeAgent(self._patience)
        if is_large(pieces):
            self._agent.arriving.expect(number)
            content = bytes(await pieces[0][0])
        else:
            content = b"".join(pieces)
        answer, said = await self._agent.exchange(number, content)
        return answer, *in_pieces(said, ray_module().put)


def ray_engine(options: Ray | None, workers: int | None) -> ClusterEngine:
    options = Ray() if options is None else options
    patience = min(options.node_timeout, threading.TIMEOUT_MAX)
    return ClusterEngine(RayTransport(options), workers, patience)
