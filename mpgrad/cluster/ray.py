"""A transport through Ray, and the options of a pool's Ray cluster. Agents are actors on Ray's
nodes. Ray places them, transports bytes, and reports which are dead. Both sides use this module. It
imports nothing from Ray until a pool needs it.

Ray sends small arguments within the call of an actor's method. It sends larger ones through its
object store, which is slower: an echo to another raylet on the same machine took 1.6 ms for 90 KB
and 17 ms for 110 KB. So content of up to `WITHIN_CALL` is sent in small pieces, and larger content
as one object.
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
FETCHING = 8  # large replies that are fetched at the same time


@dataclass(frozen=True)
class Ray:
    """Select the Ray cluster that a pool with ``engine="ray"`` uses, and set how it uses it.

    Args:
        address: "auto" for the cluster that this machine belongs to (or `RAY_ADDRESS`); "local" to
            start one on this machine, which uses only the loopback interface and ends with the
            pool; or an address such as "10.0.0.1:6379".
        workers_per_node: the most workers on each node; None for as many as its CPUs allow.
        cpus_per_worker: CPUs that are reserved for each worker.
        memory_per_worker: bytes that are reserved for each worker; None for none.
        resources: custom resources that each worker needs, by name.
        runtime_env: Ray's description of the software that the nodes need; see Ray's
            documentation.
        node_timeout: seconds of silence after which the caller and a node count each other as dead.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type. The message names
            the argument and its value.

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
    """Return the module `ray`.

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
    """Have Ray's new processes listen on the loopback interface only, as on systems for which Ray
    supports no clusters."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None:  # Ray was imported before, and has read the variable already
        constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]


def cluster_address(options: Ray) -> str:
    """Return the cluster's address, or "" if it is not known yet."""
    return os.environ.get("RAY_ADDRESS", "") if options.address == "auto" else options.address


def check_that_somebody_listens(address: str) -> None:
    """Check the address at once, because Ray itself would try for minutes.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_PATIENCE).close()


def check_that_it_is_no_client(address: str) -> None:
    """Reject Ray Client, which does not report which nodes have room, and which sends messages on a
    detour.

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
    """The cluster that this process has started for its pools (`address="local"`). It ends with the
    last of these pools. Ray allows one cluster at a time."""

    lock = threading.Lock()
    current: OwnCluster | None = None

    def __init__(self) -> None:
        self.pools = 0


class RayTransport:
    def __init__(self, options: Ray) -> None:
        """Join the cluster, or start one. If the program has joined a cluster already, use that
        one.

        Raises:
            ImportError: Ray is not installed.
            ConnectionError: there is no cluster at the address, none can be started, or the address
                is one of Ray Client.
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
        except Exception as error:  # Ray raises many kinds, including plain Exception
            can = "started" if self._starts_own else "joined"
            remedy = (
                ""
                if self._starts_own
                else (
                    "; start one (ray start --head), give its address, or use "
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
        except Exception as error:  # Ray raises many kinds, and documents none of them
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
        """Return each node's free resources, as of a few moments ago. Ray has no public name for
        this, so the result is None if this version of Ray lacks the private one."""
        state = importlib.import_module("ray._private.state")
        ask: Any = getattr(state, "available_resources_per_node", None)
        return None if ask is None else ask()

    def _room(self, has: Mapping[str, float]) -> int:
        """Return the number of workers for which these resources are enough."""
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
            # otherwise Ray sends its dashboard an event for each exchange
            "enable_task_events": False,
        }
        if ours.memory_per_worker is not None:
            how["memory"] = ours.memory_per_worker * options.slots
        try:
            return ray.remote(AgentActor).options(**how).remote(options.patience)
        except Exception as error:  # Ray raises many kinds
            raise OSError(
                f"Ray can start no agent now ({type(error).__name__}: {error})"
            ) from error

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        asked = agent.exchange.remote(number, *in_pieces(content, self._ray.put))
        asked.future().add_done_callback(lambda future: self._take(future, reply))

    def _take(self, future: Any, reply: Reply) -> None:
        """Pass a reply on, in the thread of Ray that handles the replies of all agents. So another
        thread fetches large replies."""
        if future.exception() is None and is_large(future.result()[1:]):
            reply((future.result()[0], None))
            self._fetching.submit(lambda: reply(replied(future, self._ray.get)))
        else:
            reply(replied(future, self._ray.get))

    def kill_agent(self, agent: Any) -> None:
        with contextlib.suppress(Exception):  # the actor or the cluster has ended already
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
    """Return pieces that are small enough for a call, or one reference to an object in Ray's
    store."""
    if len(content) > WITHIN_CALL:
        return [[put(content)]]  # Ray would replace a reference that is not in a list
    return [content[start : start + PIECE] for start in range(0, len(content), PIECE)]


def is_large(pieces: Sequence[Any]) -> bool:
    return len(pieces) == 1 and isinstance(pieces[0], list)


def replied(future: Any, get: Callable[[Any], Any]) -> tuple[int, bytes] | BaseException:
    try:
        number, *pieces = future.result()
        return number, bytes(get(pieces[0][0])) if is_large(pieces) else b"".join(pieces)
    except BaseException as error:
        # one of Ray's errors: the actor or its node has died, or it cannot be reached
        return error


class AgentActor:
    """The actor on the node. It holds a `NodeAgent` in its event loop."""

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
