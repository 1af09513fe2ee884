"""`ChunkWriter` turns chunks into messages for a worker. A chunk holds calls, backwards or a
request for a sum. Ledgers note what the worker then has: graphs, parts of the sums of captures'
gradients, and memory that must live until the worker has returned it. This module runs in the
caller only.

A message omits what the worker already has. Whatever the worker lacks is sent before it:

    calls ──► [Define,] Forward
    backwards ──► [Define,] Backwards([Recompute, [RecomputeBackward ...,]] BackwardCall ...)

Assumes: called by the scheduling thread; any thread may look into `functions`, and count the
    graphs. Messages are sent in the order in which they were written, or the worker is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from mpgrad.autograd.remote_graph import Backward, RemoteGraph, SumRequest
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall, SharedFunction
from mpgrad.machine.ledger import CONSUMED, FREE, GraphLedger, SumLedger
from mpgrad.machine.policy import MOST_CALLS, MOST_PAYLOAD
from mpgrad.machine.queue import Backlog
from mpgrad.machine.under_way import Chunk
from mpgrad.memory import slab_of
from mpgrad.memory.arena import BorrowedMemory, Slot
from mpgrad.pickling.state import ModuleSnapshot, RecentValues
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

__all__ = ["ChunkWriter", "LentSlots", "Written"]


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
        # the environment that the worker was last sent; before, it has that of the pool's beginning
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
        messages.append(
            Forward(
                number,
                function.number,
                options.modes,
                options.seed,
                options.stop_at_failure,
                options.eager,
                options.together,
                sent,
            )
        )
        return messages, payload, Chunk(operation, calls, [], None, options.timeout)

    def backward(self, number: int, backlog: Backlog) -> Written:
        """Write a chunk of the backlog: backwards with the same modes and environment, or a request
        for capture gradients."""
        self._sums.trim()
        payload, messages = Payload(), list[Message]()
        sent: list[Backward] = []
        calls: list[BackwardCall] = []
        for item in backlog.take_alike():
            if isinstance(item, SumRequest):
                collect = Collect(number, item.function, item.graph_task, item.levels)
                return [collect], payload, Chunk(None, [], [], item, item.timeout)
            # A thread that consumes a graph and sends another backward of it does so in this order.
            self._graphs.note_consumed()
            sent.append(item)
            asked = item.asked
            if asked.captures and not item.apart:
                self._sums.note(item.owner.function, asked.graph_task, asked.levels)
            # A backward that was lost with its worker may have freed the graph itself, unless an
            # earlier one has used it up.
            again = item.again and not self._graphs.is_used_up_for(item.call, asked.graph_task)
            before = self._before(item.graph, payload, messages, again, item.environment)
            item.again, item.sent = True, number
            item.rebuilt = [step.graph for step in before] if before else ()
            call = self._backward_call(item, payload, before)
            self._note_sent(item)
            calls.append(call)
            if len(sent) == MOST_CALLS or payload.nbytes >= MOST_PAYLOAD:
                break
        first = sent[0]
        self._follow(first.environment, messages)
        messages.append(Backwards(number, first.modes, calls))
        return messages, payload, Chunk(None, [], sent, None, first.owner.timeout)

    def _note_sent(self, backward: Backward) -> None:
        """Note what a backward leaves of its graph, and of all graphs that this one derives from.
        They share nodes."""
        if backward.is_last:
            self._graphs.use_up(backward.call, backward.asked.graph_task)
            return
        lineage: object = None if backward.asked.keep else backward
        while isinstance(lineage, Backward):
            self._graphs.handle(lineage.call, FREE)
            lineage = lineage.graph.lineage

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
                function.of_lone_calls,
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
        return ForwardCall(
            number,
            call.item,
            call.structure,
            self._pack(call.packed, payload),
            call.dependency_results,
            call.origin,
            call.bundle,
            tuple(call.failed),
        )

    def _backward_call(
        self, backward: Backward, payload: Payload, before: Sequence[Recompute | RecomputeBackward]
    ) -> BackwardCall:
        asked = backward.asked
        return BackwardCall(
            backward.call,
            asked.graph_task,
            asked.keep,
            backward.is_last,
            asked.wanted,
            asked.captures,
            backward.apart,
            asked.levels,
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

        With `again` even a freed graph is rebuilt, because the freeing does not count.
        `environment` is that of the chunk.
        """
        lineage = graph.lineage
        state = None if lineage is None else self._graphs.rebuild(graph.call, again)
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
        is_consumed = state == CONSUMED and not again
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


# --- slots that the worker has been lent


class LentSlots:
    """Holds the slots that one worker has been lent.

    The worker returns an address as often as it was sent. So an address that was sent again stays
    lent.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        # address -> the memory that has to live, and how often it was sent
        self._lent: dict[int, tuple[Slot | BorrowedMemory, int]] = {}
        # slabs that the worker knows, or will know with the next message
        self._slabs: set[int] = set()
        self.new_slabs: deque[Any] = deque()
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
            self.new_slabs.append(holder.slab)

    def take_back(self, address: int, times: int) -> None:
        holder, sent = self._lent.pop(address)
        if not self._link.shares_memory:
            self._link.drop(holder, times)
        if sent > times:  # it was sent there once more
            self._lent[address] = holder, sent - times

    def have_any_of(self, slab: int) -> bool:
        return any(slab_of(address) == slab for address in self._lent)

    def tell_again(self, slab: int) -> None:
        """Note that the worker does not know the slab after all.

        The worker learns of the slab when it is next lent memory there.
        """
        self._slabs.discard(slab)

    def unmap(self, slab: int) -> None:
        """Note that the slab is gone, so that the worker is notified."""
        if slab in self._slabs:
            self._slabs.discard(slab)
            self.gone_slabs.append(slab)

    def end(self) -> None:
        """Drop all slots, because the worker is gone and reads none of them any more."""
        if not self._link.shares_memory:
            for holder, times in self._lent.values():
                self._link.drop(holder, times)
        self._lent.clear()
