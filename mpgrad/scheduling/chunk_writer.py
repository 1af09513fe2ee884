"""`ChunkWriter` turns chunks into messages for a worker. A chunk holds calls, backwards or a
request for a sum. Ledgers note what the worker has then: graphs, parts of the sums of captures'
gradients, and memory that must live until the worker has returned it. Caller's side.

A message leaves out what the worker knows. What the worker lacks goes before it:

    calls ──► [Define,] Forward
    backwards ──► [Define,] Backwards([Recompute, [RecomputeBackward ...,]] BackwardCall ...)

The states of a graph:

    forward, or a differentiable backward ──► ALIVE ──► a backward not to keep it ──► FREED ──┐
                                                │                                             │
                 dropped there for want of room ▼         the last backward, of which         │
                                              LOST     nothing is left ──► CONSUMED ──────────┤
                                                                      released: forgotten ◄───┘
    the next backward rebuilds a graph that is LOST, CONSUMED, or FREED by mistake: ALIVE
Assumes: called by the scheduling thread; any thread may look into `functions`, and ask how many
    graphs there are. The messages that were written are sent, in this order, or the worker is gone.

Unless the caller says so, this module also decides how many items form a window or a bundle, and
how many calls form a chunk.

    items ── window: packed before workers are told
        ──► calls, each an item or a bundle of cheap items ── chunk ──► a worker
The time that calls take is measured (`function_cache.FunctionTiming`), never guessed. So calls go
one by one before the first answer.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mpgrad.autograd.remote_graph import Backward, RemoteGraph, SumRequest, forget_oldest
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall, SharedFunction
from mpgrad.memory import slab_of
from mpgrad.memory.arena import BorrowedMemory, Slot
from mpgrad.pickling.state import ModuleSnapshot, RecentValues
from mpgrad.torch_state.private import Level
from mpgrad.wire.frames import Link
from mpgrad.wire.messages import (
    BackwardCall,
    Backwards,
    Collect,
    Define,
    Follow,
    Forward,
    ForwardCall,
    Message,
    ModulesState,
    Recompute,
    RecomputeBackward,
)
from mpgrad.wire.tensor_refs import PackedTensor, PackedTensors, Payload, TensorRef

__all__ = [
    "CHUNKS_UNDER_WAY",
    "FAR",
    "LARGEST_WINDOW",
    "MOST_CALLS",
    "MOST_PAYLOAD",
    "NEAR",
    "WINDOW_BYTES",
    "Chunk",
    "ChunkSeconds",
    "ChunkWriter",
    "GraphLedger",
    "GraphState",
    "LentSlots",
    "SumLedger",
    "Written",
    "bundle_size",
    "chunk_size",
    "first_window",
    "guided_size",
    "workers_worth_feeding",
]


@dataclasses.dataclass(eq=False)
class Chunk:
    """The work in one message that a worker has been sent and has not answered: calls of an
    operation, backwards, or a request for a sum."""

    operation: Operation | None
    # calls with their numbers
    calls: list[tuple[int, PackedCall]]
    backwards: list[Backward]
    request: SumRequest | None
    # seconds for each call
    timeout: float | None
    # how many calls or backwards of the message were answered early; they are not here any more
    answered: int = 0

    def note_answered(self, count: int) -> None:
        """Let go of the first calls or backwards, because they are answered."""
        self.answered += count
        del self.calls[:count], self.backwards[:count]

    def fail_backwards(self, make: Callable[[], BaseException]) -> None:
        """Settle the chunk's backwards and its request with the exception that `make` gives."""
        for backward in self.backwards:
            backward.settle(make)
        if self.request is not None:
            self.request.settle(make)

    def wanted(self) -> list[bool]:
        """Return for each call or backward whether anybody waits for it."""
        if self.operation is not None:
            return [call.index < self.operation.limit for _, call in self.calls]
        requests = [] if self.request is None else [self.request]
        return [not each.arrived for each in (*self.backwards, *requests)]


Written = tuple[list[Message], Payload, Chunk]


class ChunkWriter:
    """Writes messages for one worker, and notes which functions, pickles and states of modules the
    worker has."""

    def __init__(self, graphs: GraphLedger, sums: SumLedger, lent_slots: LentSlots) -> None:
        self._graphs = graphs
        self._sums = sums
        self._lent_slots = lent_slots
        self.functions: set[int] = set()
        self.codes: set[int] = set()
        # the environment that the worker was told last; it began with that of the pool's beginning
        self._environment = b""
        # states of the user's modules that the worker has, by number
        self._states: RecentValues[bool] = RecentValues()

    def forward(
        self, number: int, operation: Operation, calls: list[tuple[int, PackedCall]]
    ) -> Written:
        """Write a chunk of an operation."""
        payload, messages = Payload(), list[Message]()
        options = operation.options
        function = options.function
        self._follow(options.environment, messages)
        self._define(function, messages)
        sent = [self._forward_call(call, packed, payload) for call, packed in calls]
        forward = Forward(
            number,
            function.number,
            options.modes,
            options.seed,
            options.stop_at_failure,
            options.eager,
            sent,
        )
        messages.append(forward)
        return messages, payload, Chunk(operation, calls, [], None, options.timeout)

    def backward(
        self, number: int, backlog: deque[Backward | SumRequest], note_consumed: Callable[[], None]
    ) -> Written:
        """Write a chunk of the backlog: backwards with the same modes and environment, or a request
        for capture gradients.

        `note_consumed` notes which graphs are consumed. A thread that consumes a graph and sends
        another backward of it does so in this order.
        """
        first = backlog[0]
        payload, messages = Payload(), list[Message]()
        if isinstance(first, SumRequest):
            backlog.popleft()
            collect = Collect(number, first.function, first.graph_task, first.levels)
            return [collect], payload, Chunk(None, [], [], first, first.timeout)
        sent: list[Backward] = []
        modes, environment, timeout = first.modes, first.environment, first.owner.timeout
        calls: list[BackwardCall] = []
        while backlog and len(sent) < MOST_CALLS and payload.nbytes < MOST_PAYLOAD:
            item = backlog[0]
            if isinstance(item, SumRequest) or item.owner.timeout != timeout:
                break
            if (item.modes, item.environment) != (modes, environment):
                break
            backlog.popleft()
            note_consumed()
            sent.append(item)
            if item.captures and not item.apart:
                self._sums.note(item.owner.function, item.graph_task, item.levels)
            before = self._before(item.graph, payload, messages, item.again, environment)
            # The backward may be lost with the worker, and sent again.
            item.again = True
            call = self._backward_call(item, payload, before)
            self._graphs.note_backward(item)
            calls.append(call)
        self._follow(environment, messages)
        messages.append(Backwards(number, modes, calls))
        return messages, payload, Chunk(None, [], sent, None, timeout)

    def _follow(self, environment: bytes | None, messages: list[Message]) -> None:
        """Add a `Follow` if the next message's environment differs from the last one's."""
        if environment is not None and environment != self._environment:
            self._environment = environment
            messages.append(Follow(environment))

    def _define(self, function: SharedFunction, messages: list[Message]) -> None:
        """Add a `Define` if the worker does not know the function, and lend it the captures."""
        if function.number in self.functions:
            return
        pickled = None
        if function.code not in self.codes:
            pickled = function.pickled
            function.is_new = True
        state = None if function.state is None else self._told(function.state, function.shared)
        messages.append(
            Define(
                function.number,
                function.code,
                pickled,
                function.sent_slot,
                function.refs,
                function.gathers,
                state,
            )
        )
        self.functions.add(function.number)
        self.codes.add(function.code)
        if function.slot is not None:
            self._lent_slots.lend(function.slot.address, function.slot)
        for slot in function.slots:
            self._lent_slots.lend(slot.address, slot)

    def _told(self, state: ModuleSnapshot, shared: Sequence[int]) -> ModulesState:
        is_known = self._states.get(state.number) is not None
        self._states.put(state.number, True)
        return state.sent(shared, is_known)

    def _forward_call(self, number: int, call: PackedCall, payload: Payload) -> ForwardCall:
        tensors = self._pack(call.packed, payload)
        return ForwardCall(
            number,
            call.item,
            call.structure,
            tensors,
            call.dependency_results,
            call.origin,
            call.bundle,
        )

    def _backward_call(
        self, backward: Backward, payload: Payload, before: Sequence[Recompute | RecomputeBackward]
    ) -> BackwardCall:
        return BackwardCall(
            backward.call,
            backward.graph_task,
            backward.keep,
            backward.is_last,
            backward.wanted,
            backward.captures,
            backward.apart,
            backward.levels,
            backward.derived_number,
            self._pack(backward.grads, payload),
            backward.parts,
            before,
        )

    def _before(
        self,
        graph: RemoteGraph,
        payload: Payload,
        messages: list[Message],
        again: bool,
        environment: bytes | None,
    ) -> list[Recompute | RecomputeBackward]:
        """Return the steps that rebuild `graph`, if the worker lacks it.

        With `again` a freed graph is rebuilt, too, because the freeing does not count.
        `environment` is that of the chunk.
        """
        lineage = graph.lineage
        state = None if lineage is None else self._graphs.begin_again(graph.call, again)
        if state is None:
            return []
        if isinstance(lineage, Backward):
            before = self._before(lineage.graph, payload, messages, True, environment)
            other = None if lineage.environment == environment else lineage.environment
            return [
                *before,
                RecomputeBackward(lineage.modes, self._backward_call(lineage, payload, ()), other),
            ]
        assert isinstance(lineage, PackedCall)
        options = lineage.options
        function, own = options.function, options.environment
        if function.number not in self.functions:
            self._follow(own, messages)
        self._define(function, messages)
        other = None if own == environment else own
        is_consumed = state is GraphState.CONSUMED and not again
        return [
            Recompute(
                function.number,
                options.modes,
                options.seed,
                self._forward_call(graph.call, lineage, payload),
                is_consumed,
                other,
            )
        ]

    def _pack(
        self, packed: Sequence[PackedTensor] | PackedTensors, payload: Payload
    ) -> Sequence[TensorRef]:
        """Return references for a message with this payload, and lend the slots to the worker."""
        if isinstance(packed, PackedTensors):
            if packed.holder is not None:
                self._lent_slots.lend(packed.holder.address, packed.holder)
            return payload.add_all(packed)
        for each in packed:
            if each.holder is not None:
                self._lent_slots.lend(each.address, each.holder)
        return payload.add_all(packed)

    def forget(self, functions: Sequence[int]) -> None:
        self.functions.difference_update(functions)
        for function in functions:
            self._sums.forget_function(function)


# --- what a worker has


class GraphState(enum.Enum):
    """The state of a graph in a worker, as drawn above."""

    ALIVE = enum.auto()
    # A backward that was not to keep the graph freed it. Another backward is the user's mistake.
    FREED = enum.auto()
    # The graph is rebuilt when it is needed.
    LOST = enum.auto()
    # The last backward left nothing of the graph. It is rebuilt when it is needed.
    CONSUMED = enum.auto()


ALIVE, FREED, LOST, CONSUMED = GraphState
TO_BE_MADE = {LOST, CONSUMED}


class GraphLedger:
    """The states of one worker's graphs, by call. A state changes when the worker is told, not when
    it has acted."""

    def __init__(self) -> None:
        self.states: dict[int, GraphState] = {}
        # bytes that the graphs take in the worker, if this is measured
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.states)

    @property
    def there(self) -> int:
        """The number of graphs that take memory in the worker."""
        # Another thread may ask while the states change.
        return sum(state not in TO_BE_MADE for state in list(self.states.values()))

    def needs_worker(self, is_last: bool) -> bool:
        """Whether the worker has to stay for the sake of a graph.

        `is_last` says that no other worker could rebuild a lost graph.
        """
        done_with = {CONSUMED} if is_last else TO_BE_MADE
        return any(state not in done_with for state in self.states.values())

    def keep(self, call: int) -> None:
        self.states[call] = ALIVE

    def move_here(self, call: int, before: GraphLedger) -> None:
        """Take over the graph of a worker that is gone, whose ledger is `before`.

        This worker rebuilds the graph when it is needed.
        """
        self.states[call] = CONSUMED if before.states.get(call) is CONSUMED else LOST

    def note_backward(self, backward: Backward) -> None:
        """Note that a backward is on its way to the worker."""
        if backward.is_last:
            self.states[backward.call] = CONSUMED
        elif not backward.keep:
            self._note_freed(backward.graph)

    def note_consumed(self, calls: Iterable[int]) -> None:
        """Note that the last backward of these graphs was an eager one, and has arrived."""
        for call in calls:
            # Graphs without a state were released meanwhile.
            if call in self.states:
                self.states[call] = CONSUMED

    def _note_freed(self, graph: RemoteGraph) -> None:
        """Note that a backward freed the graph.

        A graph of gradients is freed together with the graph that it derives from, because they
        share nodes.
        """
        if self.states.get(graph.call) is ALIVE:
            self.states[graph.call] = FREED
        if isinstance(graph.lineage, Backward):
            self._note_freed(graph.lineage.graph)

    def note_rest(self, backward: Backward) -> None:
        """Note that a backward failed or did not begin.

        If it was to leave nothing of its graph, the rest of the graph is still there.
        """
        if backward.is_last and self.states.get(backward.call) in TO_BE_MADE:
            self.states[backward.call] = FREED

    def note_no_rest(self, backward: Backward) -> None:
        """Note that a backward has run. If it was the graph's last one, nothing is left of it.

        An earlier backward of the graph may have failed.
        """
        if backward.is_last and self.states.get(backward.call) is FREED:
            self.states[backward.call] = CONSUMED

    def note_lost(self, call: int) -> None:
        if self.states.get(call) is not CONSUMED:
            self.states[call] = LOST

    def note_dropped(self, calls: Iterable[int]) -> int:
        """Note that the worker dropped these graphs, and return how many of them were alive."""
        there = 0
        for call in calls:
            # Graphs without a state were released meanwhile.
            if call in self.states:
                there += self.states[call] is ALIVE
                self.note_lost(call)
        return there

    def note_unknown(self, call: int) -> None:
        """Note that the last backward of a graph was cancelled.

        Nobody knows how far it came, so another backward starts anew.
        """
        if self.states.get(call) is CONSUMED:
            self.states[call] = LOST

    def begin_again(self, call: int, again: bool) -> GraphState | None:
        """Return the state of a graph that must be rebuilt before a backward, and note it as ALIVE.

        Return None if the graph need not be rebuilt. `again` says that the backward was sent
        before, so it may have freed the graph itself.
        """
        state = self.states.get(call)
        if state is ALIVE or (state is FREED and not again):
            return None
        self.states[call] = ALIVE
        return LOST if state is None else state

    def forget(self, calls: Iterable[int]) -> None:
        for call in calls:
            self.states.pop(call, None)


class SumLedger:
    """The sums of captures' gradients that a worker holds.

    They are found by function, then by backward and levels. For eager backwards, the backward is
    None.
    """

    def __init__(self) -> None:
        self._sums: dict[int, dict[tuple[int | None, tuple[Level, ...]], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def are_before(self, graph_task: int) -> bool:
        """Whether all sums come from earlier backwards than this one."""
        return all(
            each is not None and each < graph_task
            for sums in self._sums.values()
            for each, _ in sums
        )

    def note(self, function: int, graph_task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self._sums.setdefault(function, {})
        sums[graph_task, levels] = None
        # The worker does the same, except that it keeps the sum of eager backwards separately.
        forget_oldest(sums)

    def forget(self, function: int, graph_task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self._sums.get(function, {})
        sums.pop((graph_task, levels), None)
        if not sums:
            self._sums.pop(function, None)

    def forget_function(self, function: int) -> None:
        self._sums.pop(function, None)


# --- slots that the worker has been lent


class LentSlots:
    """The slots that one worker has been lent.

    The worker returns an address as often as it was sent. So an address that is on its way again
    stays lent.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        # address -> the memory that has to live, and how often it was sent
        self._lent: dict[int, tuple[Slot | BorrowedMemory, int]] = {}
        # slabs that the worker knows, or is told of with the next message
        self._slabs: set[int] = set()
        self._new_slabs: list[Any] = []
        self.gone_slabs: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, address: int, holder: Slot | BorrowedMemory) -> None:
        """Keep `holder` until the worker has returned the address as often as it was sent."""
        _, times = self._lent.get(address, (None, 0))
        self._lent[address] = holder, times + 1
        if not self._link.shares_memory:
            self._link.carry(holder)
        if holder.slab.number not in self._slabs:
            self._slabs.add(holder.slab.number)
            self._new_slabs.append(holder.slab)

    def take_back(self, address: int, times: int) -> None:
        holder, sent = self._lent.pop(address)
        if not self._link.shares_memory:
            self._link.drop(holder, times)
        if sent > times:  # it is on its way there once more
            self._lent[address] = holder, sent - times

    def have_any_of(self, slab: int) -> bool:
        return any(slab_of(address) == slab for address in self._lent)

    def tell_again(self, slab: int) -> None:
        """Note that the worker does not know the slab after all.

        The worker is told of the slab when it is next lent something there.
        """
        self._slabs.discard(slab)

    def unmap(self, slab: int) -> None:
        """Note that the slab is gone, so that the worker is told."""
        if slab in self._slabs:
            self._slabs.discard(slab)
            self.gone_slabs.append(slab)

    def take_new_slabs(self) -> list[Any]:
        new, self._new_slabs = self._new_slabs, []
        return new

    def end(self) -> None:
        """Let go of all slots, because the worker is gone and reads none of them any more."""
        if not self._link.shares_memory:
            for holder, times in self._lent.values():
                self._link.drop(holder, times)
        self._lent.clear()


# --- how much goes together


# seconds of work that are packed before any of it is sent; each later window has twice as much
LEAD = 4e-3
# The first window has at least so many items. A few expensive items are all packed first, so that
# the largest can begin first.
FIRST_WINDOW = 16
LARGEST_WINDOW = 512  # items
# Once so many bytes of tensors are copied, the packed items are sent in any case.
WINDOW_BYTES = 1 << 20

# seconds of work in a bundle of cheap items; bundles are longer far from the end of a map
SHORTEST_BUNDLE, LONGEST_BUNDLE = 4e-3, 20e-3
# Each worker gets at least so many bundles, if there are enough items.
BUNDLES_PER_WORKER = 4
# items; a larger bundle gains little, and a backward for one item passes by all the others
MOST_BUNDLED = 48

# One chunk runs and one waits, so that a worker never waits for the parent.
CHUNKS_UNDER_WAY = 2
# The calls that are left make at least so many chunks for each worker.
CHUNKS_PER_WORKER = CHUNKS_UNDER_WAY
# seconds that the parent takes to send a chunk and read its answer, with cold caches
CHUNK_CARE = 300e-6
MOST_CALLS = 256  # in one chunk
MOST_PAYLOAD = 1 << 20  # bytes of small tensors in one chunk


class ChunkSeconds(NamedTuple):
    """Limits for the seconds of work in a chunk. They depend on the cost of a message."""

    shortest: float
    longest: float
    # seconds that a chunk takes the parent, which has to keep up with all workers
    care: float = 0.0

    def least(self, workers: int) -> float:
        """Return the seconds of the shortest chunk for so many workers."""
        return min(self.longest, max(self.shortest, workers * self.care))

    @property
    def one_by_one(self) -> float:
        """Calls that take so many seconds or more are sent alone."""
        return self.longest / 2


NEAR = ChunkSeconds(1e-3, 20e-3)
# A message to another machine takes a few ms on its way, and up to 1 ms of CPU time at each end.
FAR = ChunkSeconds(10e-3, 100e-3, 0.7e-3)


def first_window(seconds: float) -> int:
    """Return how many items are packed before the workers are told of any.

    Each item takes so many seconds; unknown seconds are infinite. Each later window is twice as
    large.

    Once workers have work, they compete with the caller for CPUs. When the caller gets a CPU again,
    its caches are cold, and the workers have run dry. So the caller packs many cheap items first,
    which takes almost no time. The number does not depend on the number of workers. With many
    workers, the first few leave the caller its CPU, and the others would wait too long.
    """
    return min(LARGEST_WINDOW, max(FIRST_WINDOW, math.ceil(LEAD / max(seconds, 1e-9))))


def bundle_size(seconds: float, total: int, left: int, workers: int) -> int:
    """Return how many items form a bundle: `left` of the `total` items are left.

    Each item takes so many seconds. Each worker that is worth feeding gets several bundles.
    """
    most = min(
        MOST_BUNDLED, total // (BUNDLES_PER_WORKER * workers_worth_feeding(workers, total, seconds))
    )
    return max(1, min(most, guided_size(seconds, left, workers, SHORTEST_BUNDLE, LONGEST_BUNDLE)))


def chunk_size(seconds: float, left: int, workers: int, chunk_seconds: ChunkSeconds) -> int:
    """Return how many of the `left` calls, of so many seconds each, a worker is sent at once."""
    return min(
        MOST_CALLS,
        guided_size(seconds, left, workers, chunk_seconds.least(workers), chunk_seconds.longest),
    )


def guided_size(seconds: float, left: int, workers: int, shortest: float, longest: float) -> int:
    """Return how many of the `left` calls, of so many seconds each, go together.

    The number is a share of the calls that are left, so it falls towards the end. Together they
    take at least `shortest` and at most `longest` seconds.

    Source: guided self-scheduling, C. Polychronopoulos and D. Kuck, IEEE Transactions on Computers,
    1987.
    """
    share = left // (CHUNKS_PER_WORKER * workers_worth_feeding(workers, left, seconds))
    seconds = max(seconds, 1e-9)
    return max(1, min(max(share, math.ceil(shortest / seconds)), int(longest / seconds)))


def workers_worth_feeding(workers: int, calls: int, seconds: float) -> int:
    """Return to how many workers it is worth giving the calls, of so many seconds each.

    With fewer workers their part takes longer, and with more workers the parent's part does. k
    workers take calls * seconds / k, and the parent takes CHUNK_CARE * CHUNKS_PER_WORKER * k. The
    sum is least if both are equal. Unknown seconds are infinite.
    """
    if not calls or seconds == math.inf:
        return workers
    return min(
        workers, max(1, math.ceil(math.sqrt(calls * seconds / (CHUNK_CARE * CHUNKS_PER_WORKER))))
    )
