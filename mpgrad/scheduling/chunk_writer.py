"""What a worker is sent: chunks, of calls, backwards or a request for a sum, as messages; and what
it has then, as the caller knows it: graphs, parts of the sums of captures' gradients, and memory
that has to live until the worker has given it back. Caller's side.

What the worker knows is left out of a message, what it lacks goes before:

    calls ──► [Define,] Forward
    backwards ──► [Define,] Backwards([Recompute, [RecomputeBackward ...,]] BackwardCall ...)

The states of a graph:

    forward, or a differentiable backward ──► ALIVE ──► a backward not to keep it ──► FREED ──┐
                                                │                                             │
                 dropped there for want of room ▼         the last backward, of which         │
                                              LOST     nothing is left ──► CONSUMED ──────────┤
                                                                      released: forgotten ◄───┘
    the next backward of one that is LOST, CONSUMED, or FREED by mistake has it made again: ALIVE
Assumes: called by the scheduling thread; any may look into `functions`, and ask how many graphs
    there are. What has been written is sent, in this order, or the worker is gone.

How much goes together is decided here, where the caller does not say: items in a window and in a
bundle, calls in a chunk.

    items ── window: packed before the workers hear
        ──► calls, each an item or a bundle of cheap ones ── chunk ──► a worker
What calls take is measured (`function_cache.FunctionTiming`), never guessed: before the first
answer they go one by one.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mpgrad.autograd.remote_graph import Backward, RemoteGraph, forget_oldest
from mpgrad.calls.backwards import SumRequest
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


class Chunk(NamedTuple):
    """What a worker has been sent and has not answered: calls of an operation, backwards, or a
    request for a sum."""

    operation: Operation | None
    calls: list[tuple[int, PackedCall]]  # with the call's number
    backwards: list[Backward]
    request: SumRequest | None
    timeout: float | None  # of each call, in seconds

    def fail_backwards(self, make: Callable[[], BaseException]) -> None:
        """Those that wait for it get the exception that `make` gives."""
        for backward in self.backwards:
            backward.settle(make)
        if self.request is not None:
            self.request.settle(make)

    def wanted(self) -> list[bool]:
        """Of each call or backward: whether anybody waits for it."""
        if self.operation is not None:
            return [call.index < self.operation.limit for _, call in self.calls]
        requests = [] if self.request is None else [self.request]
        return [not each.arrived for each in (*self.backwards, *requests)]


Written = tuple[list[Message], Payload, Chunk]


class ChunkWriter:
    """Knows which functions, pickles and states of modules its worker has."""

    def __init__(self, graphs: GraphLedger, sums: SumLedger, lent_slots: LentSlots) -> None:
        self._graphs = graphs
        self._sums = sums
        self._lent_slots = lent_slots
        self.functions: set[int] = set()
        self.codes: set[int] = set()
        # as it was told last; the worker began with that of the pool's beginning
        self._environment = b""
        self._states: RecentValues[bool] = RecentValues()  # of the user's modules, by number

    def forward(
        self, number: int, operation: Operation, calls: list[tuple[int, PackedCall]]
    ) -> Written:
        """A chunk of an operation."""
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
        """A chunk of what waits: backwards under the same modes and environment, or a request for
        capture gradients.

        `note_consumed`: notes what graphs are consumed; whoever consumes one and sends another
        backward of it does it in this order.
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
            item.again = True  # should it be lost with the worker
            call = self._backward_call(item, payload, before)
            self._graphs.note_backward(item)
            calls.append(call)
        self._follow(environment, messages)
        messages.append(Backwards(number, modes, calls))
        return messages, payload, Chunk(None, [], sent, None, timeout)

    def _follow(self, environment: bytes | None, messages: list[Message]) -> None:
        """Adds a `Follow` where what comes next has another environment than what came last."""
        if environment is not None and environment != self._environment:
            self._environment = environment
            messages.append(Follow(environment))

    def _define(self, function: SharedFunction, messages: list[Message]) -> None:
        """Adds a `Define` where the worker does not know the function, and lends the captures."""
        if function.number in self.functions:
            return
        pickled = None
        if function.code not in self.codes:
            pickled = function.pickled
            function.is_new = True
        state = None if function.state is None else self._told(function.state)
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

    def _told(self, state: ModuleSnapshot) -> ModulesState:
        is_known = self._states.get(state.number) is not None
        self._states.put(state.number, True)
        return ModulesState(state.number, None if is_known else state.pickled, len(state.tensors))

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
        """What makes `graph` again, where it is missing there; or where it was freed, and that does
        not count.

        `environment`: the chunk's.
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
        """References for a message whose payload this is; what lies in slots is lent to the
        worker."""
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
    ALIVE = enum.auto()
    # by a backward that was not to keep it: another one is a mistake of the caller's
    FREED = enum.auto()
    LOST = enum.auto()  # to be made again when it is wanted
    CONSUMED = enum.auto()  # likewise, because nothing was left of it


ALIVE, FREED, LOST, CONSUMED = GraphState
TO_BE_MADE = {LOST, CONSUMED}


class GraphLedger:
    """The states of one worker's graphs, by call. Each state was noted when the worker was told,
    not when it has acted."""

    def __init__(self) -> None:
        self.states: dict[int, GraphState] = {}
        self.nbytes = 0  # that they take there, where it is measured

    def __len__(self) -> int:
        return len(self.states)

    @property
    def there(self) -> int:
        """How many take memory in the worker."""
        # others may ask while it changes
        return sum(state not in TO_BE_MADE for state in list(self.states.values()))

    def needs_worker(self, is_last: bool) -> bool:
        """Whether there is a graph for whose sake the worker has to stay. `is_last`: no other could
        make those again."""
        done_with = {CONSUMED} if is_last else TO_BE_MADE
        return any(state not in done_with for state in self.states.values())

    def keep(self, call: int) -> None:
        self.states[call] = ALIVE

    def move_here(self, call: int, before: GraphLedger) -> None:
        """The graph of a worker that is gone, with its ledger `before`: to be made here when it is
        wanted."""
        self.states[call] = CONSUMED if before.states.get(call) is CONSUMED else LOST

    def note_backward(self, backward: Backward) -> None:
        """It is on its way to the worker."""
        if backward.is_last:
            self.states[backward.call] = CONSUMED
        elif not backward.keep:
            self._note_freed(backward.graph)

    def note_consumed(self, calls: Iterable[int]) -> None:
        """Their last backward was an eager one, and has come."""
        for call in calls:
            if call in self.states:  # others have been released meanwhile
                self.states[call] = CONSUMED

    def _note_freed(self, graph: RemoteGraph) -> None:
        """A graph of gradients is freed together with the one that it derives from: they share
        nodes."""
        if self.states.get(graph.call) is ALIVE:
            self.states[graph.call] = FREED
        if isinstance(graph.lineage, Backward):
            self._note_freed(graph.lineage.graph)

    def note_rest(self, backward: Backward) -> None:
        """A backward that was to leave nothing of its graph failed or was not begun: what is left
        is there, all the same."""
        if backward.is_last and self.states.get(backward.call) in TO_BE_MADE:
            self.states[backward.call] = FREED

    def note_no_rest(self, backward: Backward) -> None:
        """Such a backward has left nothing, though one before it may have failed."""
        if backward.is_last and self.states.get(backward.call) is FREED:
            self.states[backward.call] = CONSUMED

    def note_lost(self, call: int) -> None:
        if self.states.get(call) is not CONSUMED:
            self.states[call] = LOST

    def note_dropped(self, calls: Iterable[int]) -> int:
        """Returns how many of these graphs a backward would have found."""
        there = 0
        for call in calls:
            if call in self.states:  # others have been released meanwhile
                there += self.states[call] is ALIVE
                self.note_lost(call)
        return there

    def note_unknown(self, call: int) -> None:
        """The last backward of a graph was cancelled, and nobody knows how far it came: another one
        starts anew."""
        if self.states.get(call) is CONSUMED:
            self.states[call] = LOST

    def begin_again(self, call: int, again: bool) -> GraphState | None:
        """Before a backward: what was the state of a graph that has to be made before it, ALIVE
        from now on; else None.

        `again`: the backward was sent before, so that it may have freed the graph itself.
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
    """The sums of captures' gradients that a worker holds: by function, then by backward (None:
    eager) and levels."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[tuple[int | None, tuple[Level, ...]], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def are_before(self, graph_task: int) -> bool:
        """All of them are of earlier backwards than this."""
        return all(
            each is not None and each < graph_task
            for sums in self._sums.values()
            for each, _ in sums
        )

    def note(self, function: int, graph_task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self._sums.setdefault(function, {})
        sums[graph_task, levels] = None
        forget_oldest(sums)  # as the worker does, which keeps that of eager backwards beside

    def forget(self, function: int, graph_task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self._sums.get(function, {})
        sums.pop((graph_task, levels), None)
        if not sums:
            self._sums.pop(function, None)

    def forget_function(self, function: int) -> None:
        self._sums.pop(function, None)


# --- what the worker has been lent


class LentSlots:
    """Of one worker. It gives an address back as often as it was sent, so one that is on its way
    again stays lent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        # address -> what has to live, how often it was sent
        self._lent: dict[int, tuple[Slot | BorrowedMemory, int]] = {}
        self._slabs: set[int] = set()  # of which the worker knows, or will with the next message
        self._new_slabs: list[Any] = []
        self.gone_slabs: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, address: int, holder: Slot | BorrowedMemory) -> None:
        """Keep `holder` until the worker has given the address back as often as it was sent."""
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
        """The worker does not know the slab after all: it is told of it when it is next lent
        something there."""
        self._slabs.discard(slab)

    def unmap(self, slab: int) -> None:
        """The slab is gone, and the worker is to be told so."""
        if slab in self._slabs:
            self._slabs.discard(slab)
            self.gone_slabs.append(slab)

    def take_new_slabs(self) -> list[Any]:
        new, self._new_slabs = self._new_slabs, []
        return new

    def end(self) -> None:
        """The worker is gone, and holds nothing of ours any more."""
        if not self._link.shares_memory:
            for holder, times in self._lent.values():
                self._link.drop(holder, times)
        self._lent.clear()


# --- how much goes together


LEAD = 4e-3  # seconds of work that are packed before any of it is sent; doubles
# items that are in any case: of a few dear ones all, so that the largest can be begun first
FIRST_WINDOW = 16
LARGEST_WINDOW = 512  # items that are at most
WINDOW_BYTES = 1 << 20  # of tensors copied, after which what is packed is sent in any case

# seconds of work in a bundle of cheap items: the more, the further off the end
SHORTEST_BUNDLE, LONGEST_BUNDLE = 4e-3, 20e-3
BUNDLES_PER_WORKER = 4  # at least, where there are items enough
MOST_BUNDLED = 48  # items: more win little, and a backward for one of them passes by all

CHUNKS_UNDER_WAY = 2  # one running, one waiting, so that a worker never waits for the parent
CHUNKS_PER_WORKER = CHUNKS_UNDER_WAY  # of what is left, at least
# seconds that a chunk, sent and answered, takes the parent, whose caches are cold by then
CHUNK_CARE = 300e-6
MOST_CALLS = 256  # in one chunk
MOST_PAYLOAD = 1 << 20  # bytes of small tensors in one chunk


class ChunkSeconds(NamedTuple):
    """Seconds of work in a chunk, by what a message costs on its way."""

    shortest: float
    longest: float
    care: float = 0.0  # that a chunk takes the parent, which is to keep up with all workers

    def least(self, workers: int) -> float:
        """The shortest, for so many workers."""
        return min(self.longest, max(self.shortest, workers * self.care))

    @property
    def one_by_one(self) -> float:
        """Seconds of a call, from which on it travels alone."""
        return self.longest / 2


NEAR = ChunkSeconds(1e-3, 20e-3)
# to another machine: some ms on the way, and up to 1 ms of CPU time at each end
FAR = ChunkSeconds(10e-3, 100e-3, 0.7e-3)


def first_window(seconds: float) -> int:
    """How many items, of so many seconds each, are packed before the workers hear of them; each
    later window is twice as large.

    Once they do, they take the CPUs, the caller's too where there are no more; and when it is its
    turn again its caches are cold, and they have run dry. So of cheap items, which are packed in no
    time, the caller packs many first. That would be too late for many workers, of which the first
    few leave it its CPU: so it does not depend on how many there are. Unknown seconds are infinite.
    """
    return min(LARGEST_WINDOW, max(FIRST_WINDOW, math.ceil(LEAD / max(seconds, 1e-9))))


def bundle_size(seconds: float, total: int, left: int, workers: int) -> int:
    """How many of the `left` ones of `total` items, of so many seconds each, go together: some for
    each worker that is worth feeding."""
    most = min(
        MOST_BUNDLED, total // (BUNDLES_PER_WORKER * workers_worth_feeding(workers, total, seconds))
    )
    return max(1, min(most, guided_size(seconds, left, workers, SHORTEST_BUNDLE, LONGEST_BUNDLE)))


def chunk_size(seconds: float, left: int, workers: int, chunk_seconds: ChunkSeconds) -> int:
    """How many of the calls that are `left`, of so many seconds each, a worker is sent at once."""
    return min(
        MOST_CALLS,
        guided_size(seconds, left, workers, chunk_seconds.least(workers), chunk_seconds.longest),
    )


def guided_size(seconds: float, left: int, workers: int, shortest: float, longest: float) -> int:
    """How many of the calls that are `left`, of so many seconds each, go together: a share, so
    fewer towards the end.

    At least `shortest` and at most `longest` seconds of work. Source: guided self-scheduling, C.
    Polychronopoulos and D. Kuck, IEEE Transactions on Computers, 1987.
    """
    share = left // (CHUNKS_PER_WORKER * workers_worth_feeding(workers, left, seconds))
    seconds = max(seconds, 1e-9)
    return max(1, min(max(share, math.ceil(shortest / seconds)), int(longest / seconds)))


def workers_worth_feeding(workers: int, calls: int, seconds: float) -> int:
    """To how many of the workers it is worth handing out the calls, of so many seconds each.

    With fewer their part takes longer, with more the parent's: k workers take calls * seconds / k,
    the parent CHUNK_CARE * CHUNKS_PER_WORKER * k, and such a sum is least where both are the same.
    Unknown seconds are infinite.
    """
    if not calls or seconds == math.inf:
        return workers
    return min(
        workers, max(1, math.ceil(math.sqrt(calls * seconds / (CHUNK_CARE * CHUNKS_PER_WORKER))))
    )
