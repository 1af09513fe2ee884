"""What a worker is sent: chunks, of calls, backwards or a request for a sum, as messages; what the
worker knows is left out, what it lacks goes before. Caller's side.

    calls ──► [Define,] Forward
    backwards ──► [Define,] Backwards([Rerun, [Rederive ...,]] BackwardCall ...)
Assumes: called by the scheduling thread; any may look into `functions`. What has been written is
    sent, in this order, or the worker is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpgrad.autograd.remote_graph import Backward, RemoteGraph
from mpgrad.calls.homes import SumRequest
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall, SharedFunction
from mpgrad.pickling.state import Recent, State
from mpgrad.scheduling.graph_ledger import GraphLedger, GraphState, Loans, SumLedger
from mpgrad.scheduling.sizes import MOST_CALLS, MOST_PAYLOAD
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
    Rederive,
    Rerun,
)
from mpgrad.wire.tensor_refs import Payload, Placed, TensorRef, Together

__all__ = ["Chunk", "ChunkWriter", "Written"]


class Chunk(NamedTuple):
    """What a worker has been sent and has not answered: calls of an operation, backwards, or a request for a sum."""

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

    def __init__(self, graphs: GraphLedger, sums: SumLedger, loans: Loans) -> None:
        self._graphs = graphs
        self._sums = sums
        self._loans = loans
        self.functions: set[int] = set()
        self.codes: set[int] = set()
        self._environment = b""  # as it was told last; the worker began with that of the pool's beginning
        self._states: Recent[bool] = Recent()  # of the user's modules, by number

    def forward(self, number: int, operation: Operation, calls: list[tuple[int, PackedCall]]) -> Written:
        """A chunk of an operation."""
        payload, messages = Payload(), list[Message]()
        options = operation.options
        function = options.function
        self._follow(options.environment, messages)
        self._define(function, messages)
        sent = [self._forward_call(call, packed, payload) for call, packed in calls]
        forward = Forward(number, function.number, options.modes, options.seed, options.stop_at_failure, options.eager, sent)
        messages.append(forward)
        return messages, payload, Chunk(operation, calls, [], None, options.timeout)

    def backward(self, number: int, backlog: deque[Backward | SumRequest], note_spent: Callable[[], None]) -> Written:
        """A chunk of what waits: backwards under the same modes and environment, or a request for capture gradients.

        `note_spent`: notes what graphs are spent; whoever spends one and sends another backward of it does it in this order.
        """
        first = backlog[0]
        payload, messages = Payload(), list[Message]()
        if isinstance(first, SumRequest):
            backlog.popleft()
            collect = Collect(number, first.function, first.graph_task, first.levels)
            return [collect], payload, Chunk(None, [], [], first, first.timeout)
        sent: list[Backward] = []
        modes, environment, timeout = first.modes, first.environment, first.home.timeout
        calls: list[BackwardCall] = []
        while backlog and len(sent) < MOST_CALLS and payload.nbytes < MOST_PAYLOAD:
            item = backlog[0]
            if isinstance(item, SumRequest) or item.home.timeout != timeout:
                break
            if (item.modes, item.environment) != (modes, environment):
                break
            backlog.popleft()
            note_spent()
            sent.append(item)
            if item.captures and not item.apart:
                self._sums.note(item.home.function, item.graph_task, item.levels)
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
            Define(function.number, function.code, pickled, function.sent_slot, function.refs, function.gathers, state)
        )
        self.functions.add(function.number)
        self.codes.add(function.code)
        if function.slot is not None:
            self._loans.lend(function.slot.address, function.slot)
        for slot in function.slots:
            self._loans.lend(slot.address, slot)

    def _told(self, state: State) -> ModulesState:
        is_known = self._states.get(state.number) is not None
        self._states.put(state.number, True)
        return ModulesState(state.number, None if is_known else state.pickled, len(state.tensors))

    def _forward_call(self, number: int, call: PackedCall, payload: Payload) -> ForwardCall:
        tensors = self._pack(call.placed, payload)
        return ForwardCall(number, call.item, call.structure, tensors, call.claimed, call.origin, call.bundle)

    def _backward_call(self, backward: Backward, payload: Payload, before: Sequence[Rerun | Rederive]) -> BackwardCall:
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
        self, graph: RemoteGraph, payload: Payload, messages: list[Message], again: bool, environment: bytes | None
    ) -> list[Rerun | Rederive]:
        """What makes `graph` again, where it is missing there; or where it was freed, and that does not count.

        `environment`: the chunk's.
        """
        recipe = graph.recipe
        state = None if recipe is None else self._graphs.begin_again(graph.call, again)
        if state is None:
            return []
        if isinstance(recipe, Backward):
            before = self._before(recipe.graph, payload, messages, True, environment)
            other = None if recipe.environment == environment else recipe.environment
            return [*before, Rederive(recipe.modes, self._backward_call(recipe, payload, ()), other)]
        assert isinstance(recipe, PackedCall)
        options = recipe.options
        function, own = options.function, options.environment
        if function.number not in self.functions:
            self._follow(own, messages)
        self._define(function, messages)
        other = None if own == environment else own
        is_spent = state is GraphState.SPENT and not again
        return [
            Rerun(
                function.number, options.modes, options.seed, self._forward_call(graph.call, recipe, payload), is_spent, other
            )
        ]

    def _pack(self, placed: Sequence[Placed] | Together, payload: Payload) -> Sequence[TensorRef]:
        """References for a message whose payload this is; what lies in slots is lent to the worker."""
        if isinstance(placed, Together):
            if placed.holder is not None:
                self._loans.lend(placed.holder.address, placed.holder)
            return payload.add_all(placed)
        for each in placed:
            if each.holder is not None:
                self._loans.lend(each.address, each.holder)
        return payload.add_all(placed)

    def forget(self, functions: Sequence[int]) -> None:
        self.functions.difference_update(functions)
        for function in functions:
            self._sums.forget_function(function)
