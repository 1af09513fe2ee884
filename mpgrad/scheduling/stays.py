"""Results that stay at the site of the worker that gave them, until somebody needs them. Caller's side.

    Results.staying ──► note: a `Staying`, which calls at the same site may be given as it is
    the caller, or a call elsewhere, needs it ──► fetch ──► its content, written to where it would have come with the answer
    its site is lost ──► the call is run once more, and its result written there          nobody needs it ──► forget
So all that refers to the memory of such a result (outcomes, arguments, recipes of graphs) stays as it is. A call or backward
that a worker cannot be given yet is set aside until the content is there.
Guarantees: what was fetched comes, or there is an error in its place.
Assumes: called by the scheduling thread; after the end perhaps by others.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.calls.operations import Operation, OperationOptions
from mpgrad.calls.outcomes import Failed, Piece, Staying
from mpgrad.calls.packing import PackedCall
from mpgrad.engines.protocol import Engine, Keeper
from mpgrad.errors import SharedMemoryError
from mpgrad.memory.addresses import OFFSET_MASK
from mpgrad.memory.arena import Borrowed, Slab, Slot
from mpgrad.scheduling.chunks import CaptureRequest, Differentiation, SentGradients
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.tensor_packing import Together
from mpgrad.wire.tensor_refs import lent

__all__ = ["Stays"]

PUMPING = 0.1  # seconds between two looks, while nothing else may be done
OTHER_RESULT = "a call whose result was lost with its node gave tensors of other sizes when it was run again"


class Wanted(NamedTuple):
    """Memory of a result that is to get its content, and cannot die before."""

    address: int
    memory: memoryview
    slab: Slab
    place: int


def nothing() -> None:
    pass


class Stays:
    """All results whose content has not come. The attributes that are callables are the scheduler's parts, set by it."""

    def __init__(self) -> None:
        self.post: Callable[[Callable[[], None]], None]
        self.admit: Callable[[Operation], None]  # it has calls for workers, for the first time or again
        self.fail: Callable[[Operation], None]  # a call of it has failed before it was sent
        self.leave: Callable[[Any, SentGradients], None]  # for a worker to take up
        self.tell_waiters: Callable[[], None]
        self.aside = 0  # calls and backwards that are set aside
        self._by_address: dict[int, Staying] = {}
        self._on_the_way: set[Staying] = set()
        self._ended: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._by_address)

    def note(
        self,
        keeper: Keeper,
        operation: Operation,
        call: PackedCall,
        memories: dict[int, Borrowed | Slot],
        addresses: Sequence[int],
    ) -> Staying | None:
        """Of a result with these memories, those `addresses` have no content yet."""
        there = [address for address in addresses if address in memories]
        if not there:
            return None
        staying = Staying(keeper, call, operation.home, operation.timeout, operation.holder)
        for place, (address, holder) in enumerate(memories.items()):
            if address in there:
                staying.pieces[address] = Piece(weakref.ref(holder.memory), holder.slab, place)
        for address in there:
            self._by_address[address] = staying
            keeper.note(address)
        return staying

    def forget(self, address: int) -> None:
        """Nobody holds that memory any more."""
        staying = self._by_address.pop(address, None)
        if staying is not None:
            del staying.pieces[address]
            staying.keeper.let_go(address)

    # --- who needs it

    def fetch(self, staying: Staying, then: Callable[[], None] = nothing) -> None:
        """Have the content come; `then` is an order for the scheduling thread, for when it has, or cannot."""
        if staying.is_settled:
            self.post(then)
            return
        staying.then.append(then)
        if self._ended is not None:
            self._fail(staying, Failed.with_copies(self._ended))
        elif not staying.is_wanted:
            staying.is_wanted = True
            self._on_the_way.add(staying)
            wanted = wanted_of(staying)
            pieces = [(each.address, each.memory.nbytes) for each in wanted]
            staying.keeper.fetch(pieces, functools.partial(self._arrived, staying, wanted))

    def fetch_now(self, staying: Staying, engine: Engine) -> None:
        """For a callback, which runs in this thread: nothing else is done meanwhile."""
        self.fetch(staying)
        while staying in self._on_the_way:
            engine.wait(PUMPING)

    def bring_rest(self) -> bool:
        """Have all come that somebody may still ask for, before there is no site any more; whether some is still to come."""
        unsettled = {each for each in self._by_address.values() if not each.is_settled}
        for staying in unsettled:
            if not staying.is_wanted and staying.may_be_asked_for():
                self.fetch(staying)
        return any(each.is_wanted for each in unsettled)

    def fetch_rest(self, engine: Engine) -> None:
        """As `bring_rest`, at once, and what is lost by now stays so: no call runs any more."""
        self.bring_rest()
        while self._on_the_way:
            engine.wait(PUMPING)

    def end(self, reason: BaseException) -> None:
        self._ended = reason
        for staying in set(self._by_address.values()):
            if not staying.is_settled:
                self._fail(staying, Failed.with_copies(reason))

    # --- what is given to workers

    def set_aside(self, operation: Operation, call: PackedCall, worker: WorkerHandle) -> bool:
        """Whether something that the call is given is not there yet; then it comes back to the line when it is."""
        absent = self._absent(call, worker.link.keeper)
        if not absent:
            return False
        for each in absent:
            if each.failed is not None:
                operation.deliver(call.index, Failed.because_of(each.failed, operation.names.words(call.item)))
                self.fail(operation)
                return True
        self.aside += 1
        first, *others = absent
        for each in others:
            self.fetch(each)
        self.fetch(first, lambda: self._call_goes_on(operation, call))
        return True

    def _call_goes_on(self, operation: Operation, call: PackedCall) -> None:
        self.aside -= 1
        if call.index < operation.limit:
            operation.queue.appendleft(call)
            self.admit(operation)

    def set_backwards_aside(self, worker: WorkerHandle) -> None:
        """Those whose graphs are to be made again from something that is not there yet."""
        for item in list(worker.backlog):
            if not isinstance(item, CaptureRequest) and (absent := self._absent_for(item.what.graph, worker)):
                worker.backlog.remove(item)
                item.set_apart()  # who asks for the sum may be ahead of it now
                self.aside += 1
                first, *others = absent
                for each in others:
                    self.fetch(each)
                self.fetch(first, functools.partial(self._backward_goes_on, item, first))

    def _backward_goes_on(self, item: SentGradients, needed: Staying) -> None:
        self.aside -= 1
        if (failed := needed.failed) is not None and not item.reply.arrived:
            item.reply.fail_with(failed.error)
            self.tell_waiters()
        else:
            self.leave(item.what.graph.worker, item)

    def _absent_for(self, graph: RemoteGraph, worker: WorkerHandle) -> list[Staying]:
        while isinstance(graph.recipe, Differentiation):
            graph = graph.recipe.graph
        if not isinstance(graph.recipe, PackedCall) or worker.graphs.is_there(graph.call):
            return []
        return self._absent(graph.recipe, worker.link.keeper)

    def _absent(self, call: PackedCall, keeper: Keeper | None) -> list[Staying]:
        if isinstance(call.placed, Together):
            return []
        found: dict[Staying, None] = {}
        for placed in call.placed:
            staying = self._by_address.get(placed.address)
            if staying is not None and not (keeper is staying.keeper and keeper is not None and keeper.has(placed.address)):
                found[staying] = None
        return list(found)

    # --- what comes

    def _arrived(self, staying: Staying, wanted: Sequence[Wanted], contents: Sequence[memoryview] | None) -> None:
        self._on_the_way.discard(staying)
        if contents is None:
            self.post(lambda: self._make_again(staying))
        else:
            self._fill(staying, wanted, contents)

    def _fill(self, staying: Staying, wanted: Sequence[Wanted], contents: Sequence[memoryview]) -> None:
        try:
            for each, content in zip(wanted, contents, strict=True):
                each.slab.reserve(each.address & OFFSET_MASK, each.memory.nbytes, each.memory.nbytes)
                each.memory[:] = content
        except SharedMemoryError as error:
            self._fail(staying, Failed.with_error(error))
            return
        for address in staying.pieces:
            del self._by_address[address]
            staying.keeper.let_go(address)
        staying.pieces.clear()
        self._settle(staying)

    def _fail(self, staying: Staying, failed: Failed) -> None:
        staying.failed = failed
        self._settle(staying)

    def _settle(self, staying: Staying) -> None:
        then = staying.settle()
        for order in then:
            self.post(order)
        self.tell_waiters()

    # --- what is lost

    def _make_again(self, staying: Staying) -> None:
        """By running its call once more, for its result only: what it was given is still here, or is made again likewise."""
        if staying.is_settled:
            return
        if self._ended is not None:
            self._fail(staying, Failed.with_copies(self._ended))
            return
        call = copy.copy(staying.call)
        call.gated = call.ungated = call.leaves = call.claims = ()
        call.index = call.deaths = call.idle_deaths = 0
        operation = Operation(call.conditions, staying.home, None, OperationOptions(timeout=staying.timeout))
        operation.on_outcome = lambda index: self._made_again(staying, operation)
        operation.add(call)
        call.item = staying.call.item
        operation.sealed = True
        self.admit(operation)

    def _made_again(self, staying: Staying, operation: Operation) -> None:
        operation.on_outcome = lambda index: None  # it leads here, and so to the outcome
        outcome = operation.outcomes.pop(0)
        if isinstance(outcome, Failed):
            self._fail(staying, outcome)
            return
        found = [(ref.nbytes, outcome.memories[ref.place].memory) for ref in lent(outcome.result.tensors)]
        wanted = wanted_of(staying)
        contents = [found[each.place] for each in wanted if each.place < len(found)]
        if [each.memory.nbytes for each in wanted] != [nbytes for nbytes, _ in contents]:
            self._fail(staying, Failed.with_error(RuntimeError(OTHER_RESULT)))
            return
        self._fill(staying, wanted, [content for _, content in contents])


def wanted_of(staying: Staying) -> list[Wanted]:
    """What somebody still holds of it."""
    pieces = staying.pieces.items()
    found = [(address, ref(), slab, place) for address, (ref, slab, place) in pieces]
    return [Wanted(address, memory, slab, place) for address, memory, slab, place in found if memory is not None]
