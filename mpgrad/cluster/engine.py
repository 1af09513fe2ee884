"""The engine for workers on other machines. It places workers on agents, one for each node, and
notices which agents are lost. It runs in the caller.

    start ──► an agent with room, or a new one ──► AgentLink
    transport's threads ──► inbox ──► wait ──► links with updates
    AgentLink.send ──► records ──► flush ──► Transport.exchange ══► NodeAgent ══╗
                              frames of an AgentLink ◄── take ◄── reply ◄═╝

If the user has given no number of workers, there are as many as fit on the nodes. The number then
changes when nodes join or leave. Two threads of the engine request the nodes, and send heartbeats
so that the agents do not count the caller as dead.

Memory that is lent to a worker is replicated at its agent. The bytes are sent once, before the
frame that names them, even if several workers of the agent borrow them. A worker sends the bytes
that it lends in its frame, and the engine keeps a replica of them (`wire.frames.SlabReplicas`).

Assumes: one thread uses the engine. Only `wake`, `beat`, `resident_bytes` and the transport's
    replies may run in other threads.
"""

from __future__ import annotations

import array
import contextlib
import logging
import math
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from pickle import PickleBuffer
from typing import Any, NamedTuple

from mpgrad.callbacks import report
from mpgrad.cluster.agent import Hello, Record, RecordReceiver, hello, packed
from mpgrad.cluster.transport import AgentOptions, Node, Transport
from mpgrad.engines.launch import Exit
from mpgrad.memory import slab_of
from mpgrad.memory.arena import BorrowedMemory, Slot
from mpgrad.pickling.exceptions import carried
from mpgrad.wire.agent_messages import ProgressRecord
from mpgrad.wire.frames import Frame, SlabReplicas, address_of, unframed
from mpgrad.wire.messages import DroppedSlabs, Failure, Message, NewSlab, ReadyReport, StartFailure
from mpgrad.wire.pipe import Traffic, framed, parts_of

__all__ = [
    "AgentHandle",
    "AgentLink",
    "ClusterEngine",
]

log = logging.getLogger("mpgrad")

NODES_EVERY = 2.0  # seconds
IDLE = 2.0  # seconds that an agent without workers is kept, if the number of workers is given
WAITING = 10.0  # seconds to wait for an agent, before a warning reports that it does not come
CLOSE_PATIENCE = 2.0  # seconds that workers get to end
# Seconds for which a node is avoided after its agent was lost. The first is for agents that had
# worked, the second for agents that had never answered.
AFTER_LOSS, AFTER_FAILURE = 1.0, 10.0
# versions that must be equal, because pickles and numbers of dtypes depend on them
SAME = ("Python", "torch", "mpgrad")


class ClusterEngine:
    """The engine of a pool on a cluster.

    Guarantees: an agent that is silent for `patience` seconds counts as lost, with its workers.
    """

    copies_caller = False

    def __init__(self, transport: Transport, workers: int | None, patience: float) -> None:
        """Request nodes from the transport.

        `workers` is the number of workers, or None for as many as fit on the nodes.

        Raises:
            ConnectionError: the cluster cannot be reached.
            RuntimeError: it has no room for a worker.
        """
        self.traffic = Traffic()
        self.room: int | None = None
        self.transport = transport
        self.patience = patience
        self.inbox: queue.SimpleQueue[tuple[AgentHandle | None, Any]] = queue.SimpleQueue()
        self._agents: list[AgentHandle] = []
        self._ours = hello()
        # by node id: until when the node is avoided, on the clock of time.monotonic
        self._avoided: dict[str, float] = {}
        self._closing = threading.Event()
        self._ask_now = threading.Event()  # request the nodes without delay
        try:
            self._nodes = list(transport.nodes())
            if not any(node.slots for node in self._free_nodes(avoiding=True)):
                # Other programs use all the room, so wait for them.
                self._nodes = [node._replace(free=None) for node in self._nodes]
            if workers is None:
                if not any(node.slots for node in self._nodes):
                    raise RuntimeError(
                        "no node of the cluster has room for a worker; free some CPUs, or set "
                        "`processes`"
                    )
                self._follow()
                self.room = self._room()
            for target in (self._ask_for_nodes, self._beat):
                threading.Thread(target=target, name="mpgrad-cluster", daemon=True).start()
        except BaseException:
            self.close()
            raise

    # --- workers

    def start(self, number: int) -> AgentLink:
        """Start a worker on an agent with room, or on a new agent.

        Raises:
            OSError: the engine follows the nodes, and none of them has room; or a node has just
                failed to start a worker.
        """
        agents = [agent for agent in self._agents if agent.free > 0]
        if not agents:
            agents = [self._new_agent()]
        return AgentLink(number, max(agents, key=lambda agent: agent.free / agent.slots))

    def _new_agent(self) -> AgentHandle:
        """Return an agent for a worker that fits on none of the present agents.

        If the engine follows the nodes, an agent takes a whole node. Otherwise the worker goes to
        the node that has the fewest of this pool's workers. An agent that is planned there gets one
        more place.
        """
        alive = any(not agent.lost for agent in self._agents)
        nodes = [
            node for node in self._free_nodes(avoiding=alive or self.room is None) if node.slots
        ]
        if self.room is not None:
            # An agent on any node could take the room of an agent that needs its whole node.
            if not nodes:
                raise OSError("no node has room for a worker now")
            node = max(nodes, key=lambda node: node.slots)
            return self._new_handle(node, node.slots)
        taken = self._taken()
        chosen = min(nodes, key=lambda node: taken[node.id], default=None)
        may_have_room_soon = any(
            agent.is_refusing and agent.refusals == 1 for agent in self._agents
        )
        if chosen is None and may_have_room_soon:
            raise OSError("no node has room for a worker now")
        # An autoscaler may add nodes of unknown size. The engine assumes the size of the largest
        # present node. If no present node can hold a worker, each agent requests room for one.
        largest = max((each.slots for each in self._nodes), default=0) or 1
        for agent in self._agents:
            has_space = chosen is not None or agent.slots < largest
            if agent.is_planned and agent.on(chosen) and has_space:
                agent.slots += 1
                return agent
        return self._new_handle(chosen, 1)

    def _taken(self) -> Counter[str]:
        """Count the places that this pool's agents have, by the ids of their nodes."""
        taken: Counter[str] = Counter()
        for agent in self._agents:
            if agent.node is not None and not agent.lost:
                taken[agent.node.id] += agent.slots
        return taken

    def _free_nodes(self, avoiding: bool) -> list[Node]:
        """Return the nodes, with the room that is left there.

        With `avoiding`, the nodes whose agents were just lost are left out, and the room that
        others hold is subtracted. Without it, this room is not subtracted, because it may be this
        pool's own, held by a lost agent.
        """
        taken, found = self._taken(), []
        for node in self._nodes:
            if avoiding and self._avoided.get(node.id, 0.0) > time.monotonic():
                continue
            left = node.slots - taken[node.id]
            if avoiding and node.free is not None:
                left = min(left, node.free)
            found.append(node._replace(slots=max(0, left)))
        return found

    def _new_handle(self, node: Node | None, slots: int) -> AgentHandle:
        """Plan an agent, which the next `wait` starts."""
        agent = AgentHandle(self, node, slots)
        self._agents.append(agent)
        return agent

    # --- updates from agents

    def wait(self, seconds: float | None) -> Sequence[AgentLink]:
        for agent in self._agents:
            if agent.is_planned:
                try:
                    agent.open()
                except OSError as error:
                    self.lose(agent, str(error))
            agent.flush()
        self.traffic.system_calls += 1
        patience = self.patience / 4 if seconds is None else min(seconds, self.patience / 4)
        if patience > 0 and not any(
            link.frames for agent in self._agents for link in agent.links.values()
        ):
            with contextlib.suppress(queue.Empty):
                self._take(*self.inbox.get(timeout=patience))
        self.look()
        for agent in self._agents:
            if (
                not agent.lost
                and agent.hello is not None
                and (why := agent.is_silent(self.patience))
            ):
                self.lose(agent, why)
            self._look_after(agent)
            agent.flush()
        links = [
            link
            for agent in self._agents
            for link in agent.links.values()
            if link.frames or link.ended
        ]
        self._agents = [agent for agent in self._agents if not agent.lost or agent.links]
        return links

    def _look_after(self, agent: AgentHandle) -> None:
        now = time.monotonic()
        if self.room is None and now - agent.idle_since > IDLE:  # others may need its room
            agent.close()
        elif (
            agent.hello is None
            and not agent.lost
            and not agent.is_missed
            and now - agent.opened_at > WAITING
        ):
            agent.is_missed = True
            report(
                logging.WARNING,
                "an agent for %d workers (%s) has not started for %g s; other jobs may hold the "
                "CPUs that it needs, or an autoscaler has yet to add a node: end them, wait, or "
                "request less (processes; workers_per_node or cpus_per_worker of mpgrad.Ray)",
                agent.slots,
                f"on node {agent.name}" if agent.name else "wherever there is room",
                WAITING,
            )

    def look(self) -> None:
        """Handle the updates that are in the inbox, without waiting."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self.inbox.get_nowait())

    def _take(self, agent: AgentHandle | None, updates: Any) -> None:
        if agent is not None:
            agent.take(*updates)
        elif updates is not None:
            self._nodes = updates
            there = {node.id for node in updates}
            for each in self._agents:
                if each.node is not None and each.node.id not in there and not each.lost:
                    self.lose(each, "its node has left the cluster")
            if self.room is not None and not self._closing.is_set():
                self._follow()
                self.room = self._room()

    def lose(self, agent: AgentHandle, why: str) -> None:
        agent.lose(why)
        first_line, _, _ = why.partition("\n")
        report(
            logging.WARNING,
            "an agent is gone (%s: %s)",
            agent.name or "on a node that had not started",
            first_line,
        )
        if agent.node is not None:
            self._avoided[agent.node.id] = time.monotonic() + (
                AFTER_FAILURE if agent.hello is None else AFTER_LOSS
            )
        if self.room is not None:  # otherwise the user has given the number of workers
            self.room = self._room()
        self._ask_now.set()

    def check(self, agent: AgentHandle, theirs: Hello) -> None:
        """Reject a node with other versions, because it could misread messages."""
        here, there = self._ours.versions, theirs.versions
        name = next((each for each in SAME if here[each] != there[each]), None)
        if name is None:
            return
        remedy = "use one minor version of Python everywhere"
        if name != "Python":
            same = f"pip install {name}=={here[name]}, or the runtime_env of mpgrad.Ray"
            remedy = f"install the same there ({same})"
        differ = f"{name} {there[name]}, and the caller {here[name]}"
        agent.refusal = f"node {theirs.host} has {differ}; {remedy}"
        if not any(each.hello and not each.refusal and not each.lost for each in self._agents):
            for link in agent.links.values():
                link.refuse(agent.refusal)
            return
        # other nodes can be used
        self.lose(agent, agent.refusal)
        if agent.node is not None:
            self._avoided[agent.node.id] = math.inf

    def _follow(self) -> None:
        """Plan an agent on each node that has room, after nodes have joined or left."""
        for node in self._free_nodes(avoiding=True):
            if node.slots:
                self._new_handle(node, node.slots)

    def _room(self) -> int:
        return max(1, sum(agent.slots for agent in self._agents if not agent.lost))

    def _ask_for_nodes(self) -> None:
        while not self._closing.is_set():
            self._ask_now.wait(NODES_EVERY)
            self._ask_now.clear()
            try:
                self.inbox.put((None, list(self.transport.nodes())))
            except ConnectionError as error:  # if agents are also gone, their silence shows it
                log.debug("the cluster does not answer (%s)", error)

    def _beat(self) -> None:
        """Send heartbeats, even while the scheduling thread is busy."""
        while not self._closing.wait(self.patience / 4):
            for agent in list(self._agents):
                agent.beat()

    def wake(self) -> None:
        self.inbox.put((None, None))

    def close(self) -> None:
        self._closing.set()
        self._ask_now.set()
        for agent in self._agents:
            agent.ask_to_close()
        deadline = time.monotonic() + CLOSE_PATIENCE
        while (left := deadline - time.monotonic()) > 0 and any(
            agent.is_closing and not agent.lost for agent in self._agents
        ):
            for agent in self._agents:
                agent.flush()
            with contextlib.suppress(queue.Empty):
                self._take(*self.inbox.get(timeout=left))
        for agent in self._agents:
            agent.close()
        self.transport.close()


POLLS = 2  # exchanges that wait at the agent for updates
MOST_PENDING = 8  # exchanges, while an agent does not answer
# Seconds without new workers at an agent. The first is for one failed start, the second for several
# in a row.
AFTER_REFUSAL, AFTER_REFUSALS = 1.0, 5.0


class AgentHandle:
    """The caller's end of an agent.

    Guarantees: the agent gets the records in their order, each once. Otherwise the agent is lost,
    and so are its workers.
    """

    def __init__(self, engine: ClusterEngine, node: Node | None, slots: int) -> None:
        self.engine = engine
        self.node = node
        self.slots = slots
        self.links: dict[int, AgentLink] = {}
        self.lost = ""  # why the agent is lost; "" if it runs, or will run
        self.hello: Hello | None = None
        self._agent: Any = None  # the object by which the transport knows it
        # on the clock of time.monotonic, as are the next two moments
        self.opened_at = math.inf
        self.idle_since = math.inf  # when its last worker ended
        self.is_missed = False  # a warning has reported that it has not started
        self._records: list[Record] = []
        self._next_number = 0
        self._arriving = RecordReceiver()
        self._numbering = threading.Lock()
        self._pending: set[int] = set()  # numbers of open exchanges
        self.refusals = 0  # failed starts of workers in a row
        self.full_until = 0.0  # until when no worker is started
        self.is_closing = False  # its workers were asked to end, and some still run
        self.refusal = ""  # why the versions installed there cannot be used
        self._slabs: dict[int, ReplicatedSlab] = {}  # by number

    @property
    def free(self) -> int:
        return (
            0
            if self.lost or self.is_refusing
            else self.slots - sum(not link.is_leaving for link in self.links.values())
        )

    @property
    def is_refusing(self) -> bool:
        """Whether the agent has just failed to start a worker."""
        return not self.lost and time.monotonic() < self.full_until

    @property
    def name(self) -> str:
        """Return the name of its node, or "" while that is not known."""
        if self.node is not None:
            return self.node.name
        return "" if self.hello is None else self.hello.host

    def on(self, node: Node | None) -> bool:
        """Return whether the agent is for this node. None stands for any node with room."""
        return (self.node and self.node.id) == (node and node.id)

    @property
    def is_planned(self) -> bool:
        """Whether the agent has yet to be started, so that it may get more places."""
        return self.opened_at == math.inf and not self.lost

    def open(self) -> None:
        """Start the agent.

        Raises:
            OSError: it cannot be started now.
        """
        options = AgentOptions(self.node, self.slots, self.engine.patience)
        self._agent = self.engine.transport.start_agent(options)
        self.opened_at = time.monotonic()

    # --- to the agent

    def tell(self, *record: Any) -> None:
        self._records.append(record)

    def flush(self) -> None:
        """Send the records, and keep a few exchanges open so that the agent can report."""
        if self.is_planned:
            return
        if self._records and not self.lost:
            records, self._records = self._records, []
            self._exchange(packed(records))
        # A loop until enough exchanges are open would not end if each exchange failed at once.
        for _ in range(0 if self.lost else POLLS - len(self._pending)):
            self._exchange(b"")

    def beat(self) -> None:
        """Send a heartbeat, from any thread, because the thread that uses the engine may be
        busy."""
        if not self.lost and not self.is_planned and len(self._pending) < MOST_PENDING:
            self._exchange(b"")

    def _exchange(self, content: bytes) -> None:
        self.engine.traffic.system_calls += 1
        self.engine.traffic.bytes_sent += len(content)
        with self._numbering:
            number, self._next_number = self._next_number, self._next_number + 1
            self._pending.add(number)
        try:
            reply = partial(self._put_reply, number)
            self.engine.transport.exchange(self._agent, number, content, reply)
        except Exception as error:  # transports have their own exceptions
            self._put_reply(number, error)

    def _put_reply(self, exchange: int, reply: tuple[int, bytes | None] | BaseException) -> None:
        with self._numbering:
            is_first = exchange in self._pending
            if isinstance(reply, BaseException) or reply[1] is not None:
                self._pending.discard(exchange)
        self.engine.inbox.put((self, (is_first, reply)))

    # --- from the agent

    def is_silent(self, patience: float) -> str:
        """Return why the agent counts as dead after `patience` seconds, or "" if it does not."""
        if self._arriving.silent_for > patience:
            return f"it has sent nothing for {patience:g} s"
        if self._arriving.missing_for > patience:
            return f"a message from it was lost {patience:g} s ago"
        return ""

    def take(self, is_first: bool, reply: tuple[int, bytes | None] | BaseException) -> None:
        """Handle a reply from the inbox. The same reply may come twice."""
        if self.lost:
            return
        if isinstance(reply, BaseException):
            if is_first:
                self.engine.lose(self, f"{type(reply).__name__}: {reply}")
            return
        number, content = reply
        if content is None:
            self._arriving.expect(number)
            return
        self.engine.traffic.bytes_received += len(content)
        for record in self._arriving.records(number, content):
            self._obey(*record)

    def _obey(self, kind: str, *rest: Any) -> None:
        match kind:
            case "hello":
                (self.hello,) = rest
                self.engine.check(self, self.hello)
            case "closed":
                self.is_closing = False
            case "resident":
                for number, nbytes in rest[0].items():
                    if number in self.links:
                        self.links[number].nbytes_resident = nbytes
            case _ if (link := self.links.get(rest[0])) is not None:
                link.obey(kind, *rest[1:])

    def lose(self, why: str) -> None:
        """Give up the agent and its workers."""
        was_planned, self.lost = self.is_planned, why
        for link in self.links.values():
            link.ended = True
        if not was_planned:
            self.engine.transport.kill_agent(self._agent)

    def ask_to_close(self) -> None:
        """Have the agent report when its workers, which were asked to stop, have ended."""
        if self.hello is not None and not self.lost:
            self.is_closing = True
            self.tell("close")

    def close(self) -> None:
        """End the agent, which is no longer needed."""
        if not self.lost:
            self.lose("closed")

    # --- memory that is replicated there

    def replicas(self, slab: Any) -> ReplicatedSlab:
        if slab.number not in self._slabs:
            self._slabs[slab.number] = ReplicatedSlab(set(), Counter())
            self.tell("slab", slab.number, slab.nbytes)
        return self._slabs[slab.number]

    def introduce(self, worker: int, slabs: Sequence[int]) -> None:
        """Note that the worker's next frame introduces these slabs."""
        for number in slabs:
            self._slabs[number].workers.add(worker)

    def carry(self, holder: Slot | BorrowedMemory) -> None:
        address, lent = address_of(holder), self.replicas(holder.slab).lent
        # Borrowed memory is written again, because code that has the borrowed tensor may have
        # changed it since it was last sent.
        if not lent[address] or isinstance(holder, BorrowedMemory):
            self.tell("write", address, PickleBuffer(holder.memory))
        lent[address] += 1

    def drop(self, holder: Slot | BorrowedMemory, times: int) -> None:
        address = address_of(holder)
        lent = self._slabs[slab_of(address)].lent
        lent[address] -= times
        if not lent[address]:
            del lent[address]
            self._forget_if_unused(slab_of(address))

    def part(self, worker: int, slabs: Sequence[int] | None = None) -> None:
        """Note that the worker forgets these slabs, with the frame just sent. None stands for all
        slabs of a worker that is gone."""
        for number in list(self._slabs) if slabs is None else slabs:
            if number in self._slabs:
                self._slabs[number].workers.discard(worker)
                self._forget_if_unused(number)

    def _forget_if_unused(self, slab: int) -> None:
        if not any(self._slabs[slab]):
            del self._slabs[slab]
            self.tell("forget", slab)


class ReplicatedSlab(NamedTuple):
    """A slab of the caller that has a replica at an agent. The agent can forget it when both fields
    are empty."""

    workers: set[int]  # workers that know it
    lent: Counter[int]  # address -> how often it is lent to workers of the agent


class AgentLink:
    """The caller's end of the link to a worker at an agent. It is a `WorkerLink`."""

    shares_memory = False
    keeps_time = True

    def __init__(self, number: int, agent: AgentHandle) -> None:
        self.number = number
        self.agent = agent
        self.frames: deque[tuple[tuple[int, int, int], memoryview]] = deque()  # headers and bodies
        self._refused = ""  # why the worker could not be started
        self.is_leaving = False
        # the worker is gone, and no more frames will come
        self.ended = False
        self.exit: Exit | None = None
        self._exit_code: int | None = None  # None while it is not known
        self.crash_traceback = ""
        self.nbytes_resident = 0
        self.overrun: tuple[int, int] | None = None
        self.progress_record = memoryview(bytearray(8 * ProgressRecord.COUNT)).cast("q")
        self.skipped: dict[int, int] = {}
        self._replicas = SlabReplicas()  # replicas of the worker's slabs
        self._descriptors: deque[int] = deque()
        agent.links[number] = self
        agent.idle_since = math.inf
        agent.tell("start", number)
        if agent.refusal:
            self.refuse(agent.refusal)

    @property
    def node(self) -> str:
        return self.agent.name

    @property
    def has_place(self) -> bool:
        return self.agent.hello is not None and not self.ended

    @property
    def lost(self) -> str:
        return f"its agent was lost: {self.agent.lost}" if self.agent.lost else self._refused

    @property
    def could_start(self) -> bool:
        return bool(self.agent.lost) and self.agent.hello is not None

    def obey(self, kind: str, *rest: Any) -> None:
        """Handle what the agent reports about this worker."""
        match kind:
            case "frame":
                self.frames.append(rest)
                self.overrun = None  # the worker has gone on since
            case "at":
                (numbers,) = rest  # the worker's own numbers, by its machine's clock
                self.progress_record[: len(numbers)] = array.array("q", numbers)
            case "skipped":
                place, chunk = rest
                self.skipped[place] = chunk
            case "overrun":
                self.overrun = rest
            case "gone":
                code, self.crash_traceback = rest
                self.ended = True
                self._exit_code = self._exit_code if code is None else code
            case "refused":
                self._refused = f"no process can be started there: {rest[0]}"
                self.ended = True
                self.agent.refusals += 1
                pause = AFTER_REFUSAL if self.agent.refusals == 1 else AFTER_REFUSALS
                self.agent.full_until = time.monotonic() + pause

    def send(
        self,
        messages: list[Message],
        payload: Sequence[bytes] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        if self.ended:
            raise ConnectionError(self.agent.lost or "the worker is gone")
        new = [message.number for message in messages if isinstance(message, NewSlab)]
        self.agent.introduce(self.number, new)
        self.agent.engine.traffic.frames_sent += 1
        self.agent.tell(
            "frame", self.number, PickleBuffer(framed(messages, payload, len(new))), new
        )
        for message in messages:
            if isinstance(message, DroppedSlabs):
                self.agent.part(self.number, message.numbers)

    def introduce(self, slabs: Sequence[Any]) -> None:
        for slab in slabs:
            self.agent.replicas(slab)
            # The message is alone in its frame, because this frame may have to wait at the agent.
            self.send([NewSlab(slab.number, slab.nbytes)])

    def carry(self, holder: Slot | BorrowedMemory) -> None:
        self.agent.carry(holder)

    def drop(self, holder: Slot | BorrowedMemory, times: int) -> None:
        self.agent.drop(holder, times)

    def receive(self) -> Frame | None:
        if not self.frames:
            if self.ended:
                raise EOFError
            return None
        header, body = self.frames.popleft()
        self.agent.engine.traffic.frames_received += 1
        body = memoryview(bytearray(body))  # writable and aligned, as the body from a socket is
        messages, payload, replicas = self._replicas.open(*unframed(header, body))
        self._descriptors.extend(replicas)
        for message in messages:
            if isinstance(message, ReadyReport):
                self.agent.refusals = 0
                self.agent.tell("watch", self.number, message.pid)
        return Frame(messages, payload)

    def take_descriptor(self) -> int | None:
        return self._descriptors.popleft()

    def has_more(self) -> bool:
        self.agent.engine.look()
        return bool(self.frames) or self.ended

    def skip(self, place: int, chunk: int) -> None:
        self.agent.tell("skip", self.number, place, chunk)

    def follow(self, seconds: float) -> None:
        self.agent.tell("follow", self.number, seconds)

    def limit(self, chunk: int, seconds: float | None) -> None:
        self.agent.tell("limit", self.number, chunk, seconds)

    def kill(self, by: int = signal.SIGKILL) -> None:
        self.agent.tell("kill", self.number, by)
        self._exit_code = -by
        self.agent.flush()

    def resident_bytes(self, pid: int) -> int:
        """Return the number that the agent last reported. It reports once a second."""
        return self.nbytes_resident

    def close(self) -> None:
        self.frames.clear()

    def end(self) -> None:
        """Forget the worker.

        The agent reports that a worker is gone only when it knows how the worker has ended. If it
        has not reported that, ask it to end the worker.
        """
        if not self.ended:
            self.agent.tell("end", self.number)
            self.ended = True
        self.agent.part(self.number)
        del self.agent.links[self.number]
        if not self.agent.links:
            self.agent.idle_since = time.monotonic()
        self.close()
        self.exit = Exit(self._exit_code)

    def refuse(self, why: str) -> None:
        """Queue a message that no worker can start, because the agent's node cannot be used."""
        failure = Failure(carried(RuntimeError(why)), "", "start")
        frame = framed([StartFailure(failure)], ())
        self.frames.append(parts_of(frame))
