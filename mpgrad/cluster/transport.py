"""Transports. A transport reports which nodes exist, starts agents there, and sends bytes between
the caller and these agents. Both sides use this module, and it needs no torch.

    ClusterEngine ── nodes, start_agent, exchange, kill_agent ──► Transport ═══ NodeAgent, on a node

A transport knows nothing about frames or workers. Replies and errors may come in any order, in any
thread, late, or twice (see `agent.RecordReceiver`).

`LocalTransport` needs no cluster. Its nodes are only names, and its agents are programs on this
machine, with a pipe to each. Tests use it, and it is the smallest example of a transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from mpgrad.cluster.agent import NodeAgent
from mpgrad.engines.launch import program

__all__ = ["AgentOptions", "LocalTransport", "Node", "Reply", "Transport", "serve"]

# The content is None if it is on its way but takes some time. A second reply brings it.
Reply = Callable[["tuple[int, bytes | None] | BaseException"], None]


class Node(NamedTuple):
    """A machine that is alive."""

    id: str
    name: str  # for people: the name of the host, or its address
    slots: int  # workers that it has room for, including those of this pool
    # workers that it has room for now, if known: other programs may hold a part of its room
    free: int | None = None


class AgentOptions(NamedTuple):
    """How to start an agent."""

    node: Node | None  # None: on any node, as soon as one has room
    slots: int  # workers that the agent must have room for
    patience: float  # seconds of silence after which each side counts the other as dead


class Transport(Protocol):
    """How the engine reaches nodes and agents.

    One thread uses a transport. Only `nodes` and `exchange` may be called by other threads at the
    same time.
    """

    def nodes(self) -> Sequence[Node]:
        """Return the nodes that are alive. This may take a while.

        Raises:
            ConnectionError: the cluster cannot be reached.
        """

    def start_agent(self, options: AgentOptions) -> Any:
        """Start an agent, and return at once the object by which `exchange` and `kill_agent` know
        it. Exchanges that are sent before the agent has started wait for it.

        Raises:
            OSError: it cannot be started now.
        """

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        """Run `NodeAgent.exchange(number, content)` in the agent. Call `reply` with its result, or
        with the error if there will be none."""

    def kill_agent(self, agent: Any) -> None:
        """End the agent and its workers, whatever they do. It may have ended already. Its open
        exchanges get errors."""

    def close(self) -> None:
        """End everything that the transport itself has started."""


# --- without a cluster


class LocalAgent:
    """The caller's end of a local agent. One thread writes, another one reads."""

    def __init__(self, options: AgentOptions) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            patience = round(1000 * options.patience)
            self.process = program("mpgrad.cluster.transport", "serve", theirs, patience)
        self.connection = Connection(ours.detach())
        self.to_send: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.replies: dict[int, Reply] = {}  # by number of the open exchange
        self.ended: ConnectionError | None = None
        self.threads = [
            threading.Thread(target=each, name="mpgrad-agent", daemon=True)
            for each in (self.write, self.read)
        ]
        for thread in self.threads:
            thread.start()

    def exchange(self, number: int, content: bytes, reply: Reply) -> None:
        with self.lock:
            if self.ended is None:
                self.replies[number] = reply
                self.to_send.put((number, content))
                return
        reply(self.ended)

    def write(self) -> None:
        with contextlib.suppress(OSError):  # the reading thread also notices it
            while (exchange := self.to_send.get()) is not None:
                self.connection.send(exchange)

    def read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                exchange, said = self.connection.recv()
                self.replies.pop(exchange)(said)
        with self.lock:
            self.ended = ConnectionError("its process has ended")
        for reply in self.replies.values():
            reply(self.ended)
        self.to_send.put(None)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()
        self.connection.close()


class LocalTransport:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self.agents: list[LocalAgent] = []

    def nodes(self) -> Sequence[Node]:
        return list(self._nodes)

    def join(self, node: Node) -> None:
        self._nodes.append(node)

    def part(self, node: str) -> None:
        self._nodes = [each for each in self._nodes if each.id != node]

    def start_agent(self, options: AgentOptions) -> LocalAgent:
        agent = LocalAgent(options)
        self.agents.append(agent)
        return agent

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        agent.exchange(number, content, reply)

    def kill_agent(self, agent: Any) -> None:
        agent.kill()
        self.agents.remove(agent)

    def close(self) -> None:
        for agent in list(self.agents):
            self.kill_agent(agent)


# --- in the agent's process


def serve(descriptor: int, milliseconds: int) -> None:
    asyncio.run(serve_agent(Connection(descriptor), milliseconds / 1000))


async def serve_agent(connection: Connection, patience: float) -> None:
    """Run an agent until the caller's end is closed."""
    agent = NodeAgent(patience)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(exchange: int, content: bytes) -> None:
        connection.send((exchange, await agent.exchange(exchange, content)))

    def finished(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        task.result()  # an error goes to the loop's handler, which ends the agent

    try:
        while True:
            task = asyncio.create_task(answer(*await asyncio.to_thread(connection.recv)))
            tasks.add(task)
            task.add_done_callback(finished)
    except (EOFError, OSError):  # the caller is gone
        agent.close()
