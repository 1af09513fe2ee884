"""What workers answer, turned into outcomes and replies. Nothing is decided here: that is the scheduler's.

Guarantees: shared memory that an answer names is claimed at once, so that it is given back even where nobody ever looks at
    it; an exception of a task is made by who asks for it, never here.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence

from mpgrad.autograd.remote_graph import Home, RemoteGraph
from mpgrad.calls.delivered_gradients import DeliveredGradients
from mpgrad.calls.homes import GradientReply, raised_from
from mpgrad.calls.operations import Operation
from mpgrad.calls.outcomes import Delivered, Failed, Outcome
from mpgrad.calls.packing import PackedCall
from mpgrad.errors import InternalError, SharedMemoryError
from mpgrad.memory.addresses import slab_of
from mpgrad.memory.arena import Borrowed, Lenders, Slot
from mpgrad.scheduling.chunks import Chunk, Differentiation
from mpgrad.scheduling.crossing import kept
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import Collected, Failure, Gradients, Missing, Results, RunAhead
from mpgrad.wire.tensor_refs import REQUIRES_GRAD, Bucket, TensorRef, lent

__all__ = ["Answers", "failed_again"]


class Answers:
    """Makes outcomes and replies, with the handles of graphs and of borrowed memory; no tensor and no exception."""

    def __init__(self, lenders: Lenders, recoverable: bool) -> None:
        self._lenders = lenders
        self._recoverable = recoverable  # calls are kept as long as their graphs, to be run again
        self.graphs_dropped = 0

    def results(
        self, worker: WorkerHandle, chunk: Chunk, message: Results, payload: memoryview
    ) -> list[tuple[int, Outcome | BaseException]]:
        """The outcome of each call that ran, with its index; `chunk` may have more calls, which were called off.

        What is known of the graphs is noted: another thread may look as soon as the last outcome is delivered.
        """
        operation = chunk.operation
        assert operation is not None
        if message.mutated:
            operation.mutated = True
        operation.warned.extend(message.warned)
        if message.reached and operation.home.reach is not None:
            operation.home.reach.found.update(message.reached)
        if len(message.outcomes) > len(chunk.calls):
            raise InternalError(f"worker {worker.number} ran a call that it was told in time to leave out; please report it")
        outcomes = list(self._outcomes(worker, chunk, operation, message, payload))
        self._note_graphs(worker, message)
        return outcomes

    def _outcomes(
        self, worker: WorkerHandle, chunk: Chunk, operation: Operation, message: Results, payload: memoryview
    ) -> Iterator[tuple[int, Outcome | BaseException]]:
        """With the calls' indices."""
        for (number, call), outcome in zip(chunk.calls, message.outcomes, strict=False):  # fewer after a failure
            if isinstance(outcome, Failure):
                name = operation.names.words(call.item + outcome.offset)
                yield call.index, failed_again(outcome, name, worker)
                continue
            graph, gradients = None, outcome.gradients or ()
            item = call.item if call.items == 1 else range(call.item, call.item + call.items)
            if outcome.gradients is not None:
                if operation.expected is None:
                    graph = RemoteGraph(operation.home, worker, number, item, call)
                else:
                    graph = self._graph_kept(worker, operation.home, number, item, call)
                if operation.ahead == RunAhead.SUMS and operation.home.reach is not None:
                    worker.sums.note(operation.function.number, None, ())
                    summed = operation.function.summed
                    summed[worker] = summed.get(worker, 0) + 1
            elif outcome.has_graph:
                graph = self._graph_kept(worker, operation.home, number, item, call)
            try:
                memories = self._borrow(outcome.tensors, gradients)
            except SharedMemoryError as error:
                yield call.index, error.with_traceback(None)  # its frames would keep what was borrowed
                continue
            if graph is not None and outcome.gradients is not None:
                apart = operation.ahead == RunAhead.APART
                graph.ahead = DeliveredGradients(
                    worker, outcome.gradients, payload, memories, apart, outcome.for_one, operation.expected
                )
            if graph is None or graph.recipe is None:
                call.forget_tensors()
            if graph is None:
                call.claims = ()  # of what gave it something, no gradient is wanted
            yield call.index, Delivered(outcome, payload, memories, graph, call, worker)

    def gradients(self, worker: WorkerHandle, chunk: Chunk, message: Gradients, payload: memoryview) -> None:
        """Each backward that ran gets its reply; those whose graphs were missing go back to the backlog."""
        if message.warned:
            first = chunk.gradients[0].reply
            first.warned = deque([*first.warned, *message.warned])
        self._note_graphs(worker, message)
        for position, reached in message.reached:
            chunk.gradients[position].reply.reached = reached
        for sent in chunk.gradients[len(message.outcomes) :]:  # called off, and not begun
            worker.graphs.note_rest(sent)
        for sent, found in zip(chunk.gradients, message.outcomes, strict=False):
            graph, number = sent.what.graph, sent.what.number
            if isinstance(found, Missing):
                worker.graphs.note_missing(graph.call)
                sent.set_apart()  # whoever collects the sum may have been ahead of us
                if not sent.reply.arrived:  # it has where it was called off
                    worker.backlog.append(sent)
                continue
            if isinstance(found, Failure):
                worker.graphs.note_rest(sent)
                name = graph.home.names.words(sent.what.items)
                sent.reply.fail_with(functools.partial(raised_from, found, name, worker.name))
                continue
            if number is not None and any_connected(found):
                sent.reply.graph = self._graph_kept(worker, graph.home, number, graph.index, sent.what)
            self._arrive(sent.reply, found, payload)

    def collected(self, worker: WorkerHandle, chunk: Chunk, message: Collected, payload: memoryview) -> None:
        assert chunk.captures is not None
        worker.sums.forget(chunk.captures.function, chunk.captures.graph_task, chunk.captures.levels)
        chunk.captures.reply.calls = message.calls
        if isinstance(message.grads, Failure):
            chunk.captures.reply.fail_with(functools.partial(raised_from, message.grads, "", worker.name))
        else:
            self._arrive(chunk.captures.reply, message.grads, payload)

    def _graph_kept(
        self, worker: WorkerHandle, home: Home, number: int, index: int | range, recipe: PackedCall | Differentiation
    ) -> RemoteGraph:
        worker.graphs.keep(number)
        return RemoteGraph(home, worker, number, index, recipe if self._recoverable else None)

    def _note_graphs(self, worker: WorkerHandle, message: Results | Gradients) -> None:
        self.graphs_dropped += worker.graphs.note_dropped(message.dropped)
        worker.graphs.nbytes = message.graph_bytes

    def _arrive(self, reply: GradientReply, found: Sequence[TensorRef | None], payload: memoryview) -> None:
        try:
            reply.arrive(found, payload, self._borrow(found))
        except SharedMemoryError as error:
            reply.fail(error.with_traceback(None))  # its frames would keep the reply, and the graph

    def _borrow(self, *many: Sequence[TensorRef | None]) -> dict[int, Borrowed | Slot]:
        """By address.

        Raises:
            SharedMemoryError: some of it cannot be mapped; all of it counts as given back.
        """
        found: dict[int, Borrowed | Slot] = {}
        refused: SharedMemoryError | None = None
        for ref, alone in [(ref, not isinstance(refs, Bucket)) for refs in many for ref in lent(refs)]:
            try:
                memory = self._lenders.borrow(ref.place, ref.nbytes, findable=alone)
                slab = self._lenders.slab(slab_of(ref.place))
                found[ref.place] = kept(memory) if slab.elsewhere else Borrowed(memory, slab)
            except SharedMemoryError as error:
                refused = error
        if refused is not None:
            raise refused
        return found


def any_connected(found: Sequence[TensorRef | None]) -> bool:
    return any(ref is not None and ref.flags & REQUIRES_GRAD for ref in found)


def failed_again(failure: Failure, call: str, worker: WorkerHandle) -> Failed:
    return Failed(functools.partial(raised_from, failure, call, worker.name))
