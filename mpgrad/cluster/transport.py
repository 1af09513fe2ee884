"""What carries bytes between the caller and the agents of a cluster, starts agents, and says which
nodes there are: what a transport is, and one without a cluster. Both sides; needs no torch.

    ClusterEngine ── nodes, start_agent, exchange, kill_agent ──► Transport ═══ NodeAgent, on a node
A transport knows neither frames nor workers. Replies and errors may come in any order, in any
thread, late, or twice (see `agent.RecordReceiver`).

`LocalTransport` has names for nodes, and programs on this machine for agents, with a pipe to each.
It is for tests of everything that is not the cluster's, and the smallest example of a transport.
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

# the content is None where it is on its way and takes some time; it comes with a second reply
Reply = Callable[["tuple[int, bytes | None] | BaseException"], None]


class Node(NamedTuple):
    """A machine that is alive."""

    id: str
    name: str  # for people: of the host, or its address
    slots: int  # for how many workers it has room, those of this pool included
    # for how many it has room now, as far as is known: others may hold a part of it
    free: int | None = None


class AgentOptions(NamedTuple):
    """What an agent is started with."""

    node: Node | None  # None: wherever there is room, as soon as there is
    slots: int  # for so many workers
    patience: float  # seconds: after such a silence each side takes the other for dead


class Transport(Protocol):
    """One thread uses it, but for `nodes` and `exchange`, which others call at the same time."""

    def nodes(self) -> Sequence[Node]:
        """Those that are alive. May take a while.

        Raises:
            ConnectionError: the cluster cannot be reached.
        """

    def start_agent(self, options: AgentOptions) -> Any:
        """What the other two know the agent by; returns at once. What is sent before it has started
        waits for it.

        Raises:
            OSError: it cannot be started now.
        """

    def exchange(self, agent: Any, number: int, content: bytes, reply: Reply) -> None:
        """Have `NodeAgent.exchange(number, content)` run there; `reply` gets what it returns, or
        why there will be nothing."""

    def kill_agent(self, agent: Any) -> None:
        """End it and its workers, whatever they do; it may have ended already. Its replies are
        errors."""

    def close(self) -> None:
        """End what the transport itself has started."""


# --- without a cluster


class LocalAgent:
    """The caller's end of one: a thread writes, and another one reads."""

    def __init__(self, options: AgentOptions) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            patience = round(1000 * options.patience)
            self.process = program("mpgrad.cluster.transport", "serve", theirs, patience)
        self.connection = Connection(ours.detach())
        self.to_send: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.replies: dict[int, Reply] = {}  # of exchanges under way
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
        with contextlib.suppress(OSError):  # the reader sees it, too
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
    """Until the caller's end is closed."""
    agent = NodeAgent(patience)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(exchange: int, content: bytes) -> None:
        connection.send((exchange, await agent.exchange(exchange, content)))

    def finished(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        task.result()  # an error is the loop's, which ends the agent

    try:
        while True:
            task = asyncio.create_task(answer(*await asyncio.to_thread(connection.recv)))
            tasks.add(task)
            task.add_done_callback(finished)
    except (EOFError, OSError):  # the caller is gone
        agent.close()
