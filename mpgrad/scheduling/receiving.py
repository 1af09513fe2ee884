"""`Receiver` reads the workers' messages and acts on them. This module runs in the caller only.

    link ──► Receiver: each message to its part ──► Answers: outcomes of calls, backwards settled
Guarantees: shared memory that an answer names is borrowed at once, so that it is returned even if
    it is never read. The thread that requests a task's exception makes it; this module never does.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence

from mpgrad.autograd.remote_graph import Backward, OperationGradients, PendingOutcome, RemoteGraph
from mpgrad.callbacks import given_again, later
from mpgrad.calls.backwards import ReceivedGradients, error_maker, raised_from
from mpgrad.calls.operations import DeliveredResult, FailedResult, Operation, Outcome
from mpgrad.calls.packing import PackedCall
from mpgrad.errors import InternalError, SharedMemoryError, write
from mpgrad.machine.ledger import ALIVE, DROP, FAIL, KEEP
from mpgrad.machine.queue import CallQueue
from mpgrad.machine.story import ANSWERED, BACKWARD_ANSWERED, GRAPH_MISSING
from mpgrad.machine.under_way import Chunk
from mpgrad.memory import OFFSET_MASK, owner_of, slab_of
from mpgrad.memory.arena import BorrowedMemory, ForeignSlabs, Slot
from mpgrad.scheduling.admissions import Admissions
from mpgrad.scheduling.caller_memory import CallerMemory, kept
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.known_functions import KnownFunctions
from mpgrad.scheduling.lifecycle import Lifecycle
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.supervisor import WorkerSupervisor
from mpgrad.scheduling.worker_handle import WatchedProgressRecord, WorkerHandle
from mpgrad.system import OwnedDescriptor
from mpgrad.wire.agent_messages import CrashTraceback, ProgressRecord
from mpgrad.wire.frames import Frame
from mpgrad.wire.messages import (
    ChunkTrace,
    CollectedSums,
    DroppedSlabs,
    Failure,
    Gradients,
    LoggedRecord,
    MissingGraph,
    MissingSlabs,
    NewSlab,
    PrintedText,
    ReadyReport,
    Result,
    Results,
    ReturnedSlots,
    StartFailure,
    TrialOutcome,
)
from mpgrad.wire.pipe import UnreadableFrame
from mpgrad.wire.tensor_refs import REQUIRES_GRAD, TensorBucket, TensorRef, lent

__all__ = ["Answers", "Receiver", "failed_again"]

# errors that are raised if a message comes at the wrong time, or has the wrong content
CONTENT = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError)


class Receiver:
    """Passes each message to the part that handles it."""

    def __init__(
        self,
        settings: Settings,
        life: Lifecycle,
        memory: CallerMemory,
        functions: KnownFunctions,
        queue: CallQueue,
        deliveries: Deliveries,
        admissions: Admissions,
        supervisor: WorkerSupervisor,
    ) -> None:
        self._settings = settings
        self._life = life
        self._memory = memory
        self._functions = functions
        self._queue = queue
        self._deliveries = deliveries
        self._admissions = admissions
        self._supervisor = supervisor
        self._tracer = deliveries.tracer
        # forwards; they are counted before they are delivered
        self.items_done = 0
        self.backwards_done = 0
        # While this is true, only the frame's content is read, so an error is the frame's fault.
        self._reading = False
        # the chunk that the present message answers, with its number
        self._taken: tuple[int, Chunk] | None = None
        self._answers = Answers(memory.foreign_slabs, settings.recoverable)

    @property
    def graphs_dropped(self) -> int:
        return self._answers.graphs_dropped

    @property
    def answers(self) -> int:
        """The number of forwards and backwards done so far. Any thread may ask."""
        return self.items_done + self.backwards_done

    def serve(self, worker: WorkerHandle, now: float) -> None:
        """Read the messages of `worker`, or find out that it has died."""
        try:
            while worker.gone is None:
                self._reading, self._taken = True, None
                if (frame := worker.link.receive()) is None:
                    return
                self._receive(worker, frame, now)
        except UnreadableFrame as error:
            self._lose_garbled(worker, now, error)
        except (EOFError, ConnectionError):
            self._supervisor.lose(worker, now)
        # The answer cannot be read, and neither can any that follow it.
        except MemoryError as error:
            worker.unreadable = (
                str(error) or "no memory for what a worker has answered; return less, or tensors"
            )
            self._supervisor.kill(worker, now, blames=True)
        except CONTENT as error:
            if not self._reading or self._settings.in_process:
                raise
            # The chunk is not answered after all.
            if self._taken is not None:
                worker.under_way.put_back(*self._taken)
            self._lose_garbled(worker, now, UnreadableFrame(repr(error)), error)
        finally:
            # It would keep an operation and its results alive until the next answer.
            self._taken = None

    def _lose_garbled(
        self,
        worker: WorkerHandle,
        now: float,
        error: UnreadableFrame,
        cause: BaseException | None = None,
    ) -> None:
        error.__cause__ = cause or error.__cause__
        # Graphs refer to the worker for a long time, and a traceback's frames keep their variables.
        for each in (error, error.__cause__):
            if each is not None:
                write(each.with_traceback(None), "__context__", None)
        worker.garbled = error
        self._supervisor.kill(worker, now, blames=True)

    def _take(self, worker: WorkerHandle, number: int, now: float, more: bool = False) -> Chunk:
        """Take the chunk that a message answers. If more of it follows, the chunk stays."""
        if more:
            return worker.under_way.chunks[number]
        chunk = worker.take(number, now)
        self._taken = number, chunk
        return chunk

    def _receive(self, worker: WorkerHandle, frame: Frame, now: float) -> None:
        for message in frame.messages:
            self._reading, self._taken = True, None
            match message:
                case Results():
                    self._results(worker, message, frame.payload, now)
                case Gradients():
                    chunk = self._take(worker, message.chunk, now, message.more)
                    self.backwards_done += sum(
                        not isinstance(each, MissingGraph) for each in message.outcomes
                    )
                    self._answers.gradients(worker, chunk, message, frame.payload, now)
                case CollectedSums():
                    self._answers.collected(
                        worker, self._take(worker, message.chunk, now), message, frame.payload
                    )
                case NewSlab() if (
                    message.handle is not None and self._memory.device_transfer is not None
                ):
                    self._memory.device_transfer.attach(worker, message, self._memory.foreign_slabs)
                case NewSlab():
                    self._memory.foreign_slabs.attach(
                        message.number, worker.link.take_descriptor(), message.nbytes
                    )
                case DroppedSlabs():
                    self._deliveries.unmap(message.numbers)
                case MissingSlabs():
                    for number in message.numbers:
                        worker.lent_slots.tell_again(number)
                case ReturnedSlots():
                    for address, times in message.slots:
                        self._take_back(worker, address, times)
                case CrashTraceback():
                    pipe = worker.link.take_descriptor()
                    worker.crash_traceback = None if pipe is None else OwnedDescriptor(pipe)
                case ReadyReport():
                    self._ready(worker, message, now)
                case ChunkTrace():
                    self._tracer.answered(worker, message)
                case PrintedText() | LoggedRecord():
                    later(given_again, message)
                case TrialOutcome() if self._memory.device_transfer is not None:
                    others = [
                        each for each in self._deliveries.workers.values() if not each.retiring
                    ]
                    if told := self._memory.device_transfer.tried(
                        worker, message, self._memory.foreign_slabs, others
                    ):
                        self._deliveries.transmit(worker, told, now)
                case StartFailure() if not worker.ready:
                    self._life.break_off(failed_again(message.failure, "", worker).error())
                case _:
                    raise UnreadableFrame(
                        f"no worker sends such a message now ({type(message).__name__})"
                    )
        self._reading = False

    def _ready(self, worker: WorkerHandle, message: ReadyReport, now: float) -> None:
        if worker.link.shares_memory:
            # Without the slab nothing is known of the worker's progress.
            with contextlib.suppress(SharedMemoryError):
                memory = self._memory.foreign_slabs.slab(slab_of(message.progress_record)).memory
                offset = message.progress_record & OFFSET_MASK
                numbers = memory[offset : offset + 8 * ProgressRecord.COUNT].cast("q")
                worker.under_way.progress = WatchedProgressRecord(numbers)
        elif (copy := worker.link.progress_record) is not None:
            worker.under_way.progress = WatchedProgressRecord(copy, worker.link)
        worker.pid = message.pid
        worker.ready_at = now
        worker.ready = True
        # Calls may wait behind long ones of other workers.
        self._queue.look_at = 0.0
        self._supervisor.note_ready(now)
        trace = self._tracer.trace
        # If the workers do not know of the timeline yet, this one is notified with the others.
        if trace is not None and trace.is_known:
            self._deliveries.record(worker, now)

    def _take_back(self, worker: WorkerHandle, address: int, times: int) -> None:
        worker.lent_slots.take_back(address, times)
        slab = slab_of(address)
        owner = owner_of(slab)
        if (
            owner
            and owner not in self._deliveries.workers
            and not worker.lent_slots.have_any_of(slab)
        ):
            # The slab's owner is gone, so it cannot report that the slab is gone.
            worker.lent_slots.unmap(slab)

    def _results(
        self, worker: WorkerHandle, message: Results, payload: memoryview, now: float
    ) -> None:
        """Measure and deliver the results, and put skipped calls back into the queue."""
        chunk = self._take(worker, message.chunk, now, message.more)
        operation = chunk.operation
        assert operation is not None
        done = len(message.outcomes)
        if done:
            items = sum([call.items for _, call in chunk.calls[:done]])
            worker.calls_done += items
            self.items_done += items
            operation.own_seconds += message.own_seconds + message.eager_seconds
            # If there are more outcomes than calls, an error is raised below.
            answered = zip(chunk.calls, message.outcomes, strict=False)
            if measured := sum(
                [
                    call.items - len(call.failed) - len(each.failed)
                    for (_, call), each in answered
                    if isinstance(each, Result)
                ]
            ):
                share = done / (operation.delivered + done) if operation.largest_first else math.inf
                self._functions.note_results(operation.options.function, message, measured, share)
        limit = operation.limit
        outcomes = self._answers.results(worker, chunk, message, payload, now)
        self._reading = False
        chunk.note_answered(done)
        for index, outcome in outcomes:
            operation.deliver(index, outcome)
        if chunk.calls and not message.more:
            # These calls were skipped, so they have not begun.
            self._queue.put_back(operation, [call for _, call in chunk.calls], now)
        if operation.limit != limit:
            self._admissions.cancel_rest(operation)
        if operation.finished:
            self._admissions.unfinished.pop(operation, None)
        if self._settings.calls is not None and worker.calls_done >= self._settings.calls:
            self._supervisor.retire(worker, now)


# --- outcomes from the workers' answers


class Answers:
    """Makes outcomes, with the handles of graphs and of borrowed memory. It makes no tensor and no
    exception."""

    def __init__(self, foreign_slabs: ForeignSlabs, recoverable: bool) -> None:
        self._foreign_slabs = foreign_slabs
        # whether calls are kept as long as their graphs, so that they can run again
        self._recoverable = recoverable
        self.graphs_dropped = 0

    def results(
        self,
        worker: WorkerHandle,
        chunk: Chunk,
        message: Results,
        payload: memoryview,
        now: float,
    ) -> list[tuple[int, Outcome | BaseException]]:
        """Return the outcome of each call that ran, with its index.

        `chunk` may have more calls, which were skipped. The states of the graphs are noted here,
        because another thread may look as soon as the last outcome is delivered.
        """
        operation = chunk.operation
        assert operation is not None
        if message.mutated:
            operation.mutated = True
        operation.warned.extend(message.warned)
        if message.reached and operation.owner.reach is not None:
            operation.owner.reach.found.update(message.reached)
        if len(message.outcomes) > len(chunk.calls):
            raise InternalError(
                f"worker {worker.number} ran a call that it was asked in time to skip; please "
                "report it"
            )
        outcomes = list(self._outcomes(worker, chunk, operation, message, payload, now))
        self._note_graphs(worker, message)
        return outcomes

    def _outcomes(
        self,
        worker: WorkerHandle,
        chunk: Chunk,
        operation: Operation,
        message: Results,
        payload: memoryview,
        now: float,
    ) -> Iterator[tuple[int, Outcome | BaseException]]:
        """Make the outcomes, each with the index of its call."""
        answered, story = (now, ANSWERED, worker.number), operation.options.story.calls
        # After a failure there are fewer outcomes than calls.
        for (number, call), outcome in zip(chunk.calls, message.outcomes, strict=False):
            story[call.item] = (*story.get(call.item, ()), answered)
            if isinstance(outcome, Failure):
                name = operation.names.words(call.item + outcome.offset)
                yield call.index, failed_again(outcome, name, worker)
                continue
            for offset, failure in outcome.failed:
                name = operation.names.words(call.item + offset)
                call.note_failed(offset, failed_again(failure, name, worker))
            graph, gradients = None, outcome.gradients or ()
            item = call.item if call.items == 1 else range(call.item, call.item + call.items)
            if outcome.has_graph:
                graph = self._graph_kept(worker, operation.owner, number, item, call)
            if outcome.gradients is not None and operation.options.eager is not None:
                if not operation.options.eager.keeps:
                    worker.graphs.handle(number, DROP)
                if not operation.options.eager.apart and operation.owner.reach is not None:
                    worker.sums.note(operation.options.function.number, None, ())
            try:
                memories = (
                    self._borrow(outcome.tensors, gradients) if outcome.tensors or gradients else {}
                )
            except SharedMemoryError as error:
                # The frames of its traceback would keep the borrowed memory.
                yield call.index, error.with_traceback(None)
                continue
            if graph is not None and outcome.gradients is not None:
                graph.eager = ReceivedGradients(outcome.gradients, payload, memories, worker)
            if graph is None or graph.lineage is None:
                call.forget_tensors()
            if graph is None:
                # The calls that gave this call their results get no gradient from it.
                call.dependencies = ()
            yield call.index, DeliveredResult(outcome, payload, memories, graph, call, worker)

    def _note_unbegun(self, worker: WorkerHandle, backwards: Sequence[Backward]) -> None:
        """Note the states of the graphs of backwards that were cancelled before they began."""
        later = [
            graph
            for chunk in worker.under_way.chunks.values()
            for each in chunk.backwards
            for graph in each.rebuilt
        ]
        for backward in backwards:
            for graph in backward.rebuilt:
                # the worker rebuilds it for a later one
                if graph not in later:
                    worker.graphs.handle(graph, DROP)
            if backward.is_last and not backward.rebuilt:
                worker.graphs.note_unfinished(backward.call, backward.asked.graph_task, FAIL)

    def gradients(
        self,
        worker: WorkerHandle,
        chunk: Chunk,
        message: Gradients,
        payload: memoryview,
        now: float,
    ) -> None:
        """Settle each backward that ran. A backward whose graph was missing returns to the
        backlog."""
        if message.warned:
            first = chunk.backwards[0]
            first.warned = deque([*first.warned, *message.warned])
        self._note_graphs(worker, message)
        reached, errors = dict(message.reached), dict(message.errors)
        if not message.more:
            self._note_unbegun(worker, chunk.backwards[len(message.outcomes) :])
        for position, (backward, found) in enumerate(
            zip(chunk.backwards, message.outcomes, strict=False)
        ):
            words = GRAPH_MISSING if type(found) is MissingGraph else BACKWARD_ANSWERED
            backward.note((now, words, worker.number))
            if isinstance(found, MissingGraph):
                # The message's `dropped` has the missing graph, from which this backward's graph
                # may derive. The sum may have been collected already.
                worker.graphs.handle(backward.call, DROP)
                backward.apart = backward.asked.captures
                # A backward that was cancelled has arrived.
                if not backward.arrived:
                    worker.backlog.put_again(backward)
            elif isinstance(found, Failure):
                if backward.is_last:
                    worker.graphs.note_unfinished(backward.call, backward.asked.graph_task, FAIL)
                if not backward.arrived:
                    name = backward.names.words(backward.items)
                    backward.settle(functools.partial(raised_from, found, name, worker.name))
            else:
                of_derived = reached.get(position, ()), errors.get(position, ())
                self._gradients_of(backward, worker, found, payload, *of_derived)
        chunk.note_answered(len(message.outcomes))

    def _gradients_of(
        self,
        backward: Backward,
        worker: WorkerHandle,
        found: Sequence[TensorRef | None],
        payload: memoryview,
        reached: Sequence[int],
        errors: Sequence[tuple[int, str]],
    ) -> None:
        """Settle a backward. If there is a graph of the gradients, it depends on the captures
        `reached`. By output, `errors` has the error of a backward of everything behind it."""
        number = backward.derived_number if any_connected(found) else None
        if not backward.arrived:
            derived = None
            if number is not None:
                derived = self._graph_kept(
                    worker, backward.owner, number, backward.graph.index, backward
                )
                derived.errors = dict(errors)
            self._arrive(backward, worker, found, payload, derived, reached)
            return
        # The backward was cancelled, so the memory is returned at once.
        with contextlib.suppress(SharedMemoryError):
            self._borrow(found)
        if number is not None:
            worker.graphs.handle(number, KEEP)
            worker.releases.append(number)

    def collected(
        self, worker: WorkerHandle, chunk: Chunk, message: CollectedSums, payload: memoryview
    ) -> None:
        request = chunk.request
        assert request is not None
        worker.sums.forget(request.function, request.graph_task, request.levels)
        request.calls = message.calls
        if isinstance(message.grads, Failure):
            request.settle(functools.partial(raised_from, message.grads, "", worker.name))
        else:
            self._arrive(request, worker, message.grads, payload)

    def _graph_kept(
        self,
        worker: WorkerHandle,
        owner: OperationGradients,
        number: int,
        index: int | range,
        lineage: PackedCall | Backward,
    ) -> RemoteGraph:
        worker.graphs.handle(number, KEEP)
        return RemoteGraph(owner, worker, number, index, lineage if self._recoverable else None)

    def _note_graphs(self, worker: WorkerHandle, message: Results | Gradients) -> None:
        for call in message.dropped:
            self.graphs_dropped += worker.graphs.states.get(call) == ALIVE
            worker.graphs.handle(call, DROP)
        worker.graphs.nbytes = message.graph_bytes

    def _arrive(
        self,
        settled: PendingOutcome,
        worker: WorkerHandle,
        found: Sequence[TensorRef | None],
        payload: memoryview,
        derived: RemoteGraph | None = None,
        reached: Sequence[int] = (),
    ) -> None:
        try:
            memories = self._borrow(found)
            settled.settle(ReceivedGradients(found, payload, memories, worker, derived, reached))
        except SharedMemoryError as error:
            # The frames of its traceback would keep what waits for the outcome.
            settled.settle(error_maker(error.with_traceback(None)))

    def _borrow(self, *many: Sequence[TensorRef | None]) -> dict[int, BorrowedMemory | Slot]:
        """Borrow the memory of these tensors, and return it by address.

        Raises:
            SharedMemoryError: a part of the memory cannot be mapped. All of it counts as returned.
        """
        found: dict[int, BorrowedMemory | Slot] = {}
        refused: SharedMemoryError | None = None
        for ref, alone in [
            (ref, type(refs) is not TensorBucket) for refs in many for ref in lent(refs)
        ]:
            try:
                memory = self._foreign_slabs.borrow(ref.place, ref.nbytes, findable=alone)
                slab = self._foreign_slabs.slab(slab_of(ref.place))
                found[ref.place] = kept(memory) if slab.elsewhere else BorrowedMemory(memory, slab)
            except SharedMemoryError as error:
                refused = error
        if refused is not None:
            try:
                raise refused
            finally:
                # The error has this frame, which would keep both and the borrowed memory.
                del refused
        return found


def any_connected(found: Sequence[TensorRef | None]) -> bool:
    return any(ref is not None and ref.flags & REQUIRES_GRAD for ref in found)


def failed_again(failure: Failure, call: str, worker: WorkerHandle) -> FailedResult:
    return FailedResult(functools.partial(raised_from, failure, call, worker.name))
