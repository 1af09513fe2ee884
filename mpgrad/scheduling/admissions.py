"""`Admissions` keeps each operation from its start to its end, and holds calls and backwards that
wait for others. Caller's side.

    submit(g, a)    a's outcome is put into g's call when it arrives     ──► the queue
    a's backward    it takes the gradients that g's backward gives       ──► the worker of a's graph
Guarantees: a call or backward that waits goes on, or fails with the error of what it waited for.
    Nothing recurses, however long a chain is.
Assumes: called by the scheduling thread.

`GradientSender` sends backwards from autograd's threads to the workers that keep the graphs. Any
thread sends. The scheduling thread calls only `leave`, for backwards that have waited for others.

    a node's backward ──► send ──► the worker's backlog ──► [scheduling thread] ──► settled
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.remote_graph import (
    Backward,
    PendingOutcome,
    Promise,
    RemoteGraph,
    cancel_if_interrupted,
)
from mpgrad.callbacks import taken
from mpgrad.calls.backwards import Predictor, SumRequest
from mpgrad.calls.operations import DeliveredResult, FailedResult, Operation
from mpgrad.calls.packing import PackedCall, SharedFunction
from mpgrad.calls.results import UncollectedFailures
from mpgrad.environment import EnvironmentChanges
from mpgrad.scheduling.function_cache import FunctionCache
from mpgrad.scheduling.lifecycle import Driver, Lifecycle
from mpgrad.scheduling.queue import CallQueue, Deliveries
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.torch_state.modes import ModeCheck, Modes, current_modes
from mpgrad.wire.tensor_refs import (
    LEAF,
    REQUIRES_GRAD,
    PackedTensor,
    PackedTensors,
    Packer,
    packed_again,
    staged_again,
)

__all__ = ["Admissions", "GradientSender"]


class Admissions:
    """Keeps the operations that have not ended. It looks at a waiting call or backward again each
    time something arrives for it, until nothing is missing."""

    def __init__(
        self,
        driver: Driver,
        queue: CallQueue,
        deliveries: Deliveries,
        gradients: GradientSender,
        packer: Packer,
        uncollected: UncollectedFailures,
    ) -> None:
        self.unfinished: dict[Operation, None] = {}
        self._driver = driver
        self._queue = queue
        self._deliveries = deliveries
        self._gradients = gradients
        self._packer = packer
        self._uncollected = uncollected

    def admit(self, operation: Operation, now: float) -> None:
        """Take the calls of an operation, which may have been admitted before."""
        if operation.finished:
            self.unfinished.pop(operation, None)
            operation.tell_if_finished()
            self._driver.tell_waiters()
            return
        self.unfinished[operation] = None
        while operation.packed:
            call = operation.packed.popleft()
            if call.dependencies:
                self._look_at_call(operation, call, now)
            else:
                operation.queue.append(call)
        if operation.queue:
            operation.unsorted = operation.options.at_rest and operation.sealed
            self._queue.join(operation)

    def cancel_rest(self, operation: Operation) -> None:
        """Drop the calls after the first that failed, because nobody wants them."""
        for worker in self._deliveries.workers.values():
            worker.under_way.cancel(operation)
        self._queue.tidy()
        if operation.finished:
            self.unfinished.pop(operation, None)
            self._driver.tell_waiters()

    # --- calls and backwards that wait

    def _look_at_call(self, operation: Operation, call: PackedCall, now: float) -> None:
        """Put the results of other calls into a call. If one is missing, look again when it
        arrives."""
        if call.index in operation.outcomes or call.index >= operation.limit:
            return
        for dependency in call.dependencies:
            if dependency.outcome is None:
                again = functools.partial(self._look_at_call, operation, call)
                dependency.source.dependents.append(
                    functools.partial(self._driver.inbox.append, again)
                )
                return
            if isinstance(dependency.outcome, FailedResult):
                self._uncollected.collected(dependency.outcome)  # it is this operation's now
                operation.deliver(
                    call.index,
                    FailedResult.because_of(dependency.outcome, operation.names.words(call.item)),
                )
                self.cancel_rest(operation)
                return
        outcomes = [dependency.outcome for dependency in call.dependencies]
        request = operation.options.request
        for dependency, outcome in zip(call.dependencies, outcomes, strict=True):
            put_in(call, outcome, self._packer if request is not None and request.staged else None)
            # The warnings move here, because perhaps nobody ever asks for the value itself.
            operation.warned.extend(taken(dependency.source.warned))
        if request is not None:
            try:
                request.look_again(call)
            except ValueError as error:
                operation.deliver(call.index, error)
                self.cancel_rest(operation)
                return
        operation.queue.append(call)
        operation.unsorted = operation.options.at_rest and operation.sealed
        # Work that has begun is finished first, so that its memory is given back.
        self._queue.join(operation, first=True)
        giver = outcomes[-1].worker
        if giver.ready and giver.gone is None and not giver.under_way:
            # The worker that has a part of the input goes on with the call.
            self._deliveries.give(giver, now)

    def look_at_backward(self, backward: Backward, now: float) -> None:
        """Put the gradients of other backwards into a backward. If one is missing, look again when
        it arrives."""
        promises = [part.backward for part in backward.grads if isinstance(part, Promise)]
        for other in promises:
            if not other.arrived:
                again = functools.partial(self.look_at_backward, backward)
                other.dependents = (
                    *other.dependents,
                    functools.partial(self._driver.inbox.append, again),
                )
                return
            if other.has_failed:
                backward.settle(other.outcome)
                self._driver.tell_waiters()
                return
        for other in promises:
            if other.warned:
                backward.warned = deque([*backward.warned, *taken(other.warned)])
        worker = backward.graph.worker
        assert isinstance(worker, WorkerHandle)
        staged_by = self._packer if worker.device == 0 else None
        rest = iter(backward.grads)
        kept = [
            kept_promises(list(itertools.islice(rest, count)), staged_by)
            for count in backward.parts
        ]
        backward.grads, backward.parts = list(itertools.chain(*kept)), list(map(len, kept))
        self._gradients.leave(backward.worker, backward)


def put_in(call: PackedCall, outcome: DeliveredResult, packer: Packer | None) -> None:
    """Add the tensors of a result to a call.

    `packer` is given if the call runs on the CPU: a result on a device has to be copied there.
    """
    refs = outcome.result.tensors
    assert not isinstance(call.packed, PackedTensors)
    # Without a graph only leaves need gradients.
    if outcome.graph is None:
        refs = [
            ref if ref.flags & LEAF else ref._replace(flags=ref.flags & ~REQUIRES_GRAD)
            for ref in refs
        ]
    if packer is None:
        call.packed += [packed_again(ref, outcome.payload, outcome.memories) for ref in refs]
    else:
        call.packed += [
            staged_again(packer, ref, outcome.payload, outcome.memories) for ref in refs
        ]
    call.dependency_results = (*call.dependency_results, (outcome.result.structure, len(refs)))


def kept_promises(
    parts: Sequence[PackedTensor | Promise], staged_by: Packer | None
) -> list[PackedTensor | Promise]:
    there = (
        part.backward.outcome.passed_on(part.place, staged_by)
        if isinstance(part, Promise)
        else part
        for part in parts
    )
    return [part for part in there if part is not None]


# --- backwards from autograd's threads


# So many backwards are sent to the workers together, unless a thread waits for one of them.
HELD_GRADIENTS = 256


class BackwardContext(NamedTuple):
    """The modes and the environment that a backward of autograd's engine runs in."""

    graph_task: int
    modes: Modes
    # the process's environment; None if workers do not follow it
    environment: bytes | None


class GradientSender:
    """Does what graph owners ask of the scheduler."""

    def __init__(
        self,
        driver: Driver,
        life: Lifecycle,
        function_cache: FunctionCache,
        packer: Packer,
        numbers: itertools.count[int],
        since: EnvironmentChanges | None,
        mode_check: ModeCheck,
    ) -> None:
        """Take `numbers` for graphs of gradients, from the counter that calls use, too.

        `since` records changes of the environment that workers follow.
        """
        self._mode_check = mode_check
        self._driver = driver
        self._life = life
        self._function_cache = function_cache
        self._packer = packer
        self._numbers = numbers
        self._since = since
        self._held = 0
        # the context that was asked for last
        self._last: BackwardContext | None = None
        # the number of the last backward of the engine that sent something
        self.last_backward = -1

    def send(self, backward: Backward) -> None:
        """Copy the backward's gradients, leave it for its worker, and return at once."""
        self._life.check_alive()
        # This is read once. If the worker dies now, another may get the graph, but not the sum.
        worker = backward.graph.worker
        assert isinstance(worker, WorkerHandle)
        # A backward with modes was sent before.
        if backward.modes is None:
            self._prepare(backward, worker)
        backward.worker = worker
        if backward.waits:
            self._driver.put(lambda now: self._driver.wait_for_gradients(backward, now))
        else:
            self.leave(worker, backward)
        self._held += 1
        if self._held >= HELD_GRADIENTS:
            self._held = 0
            self._driver.hand_over()

    def _prepare(self, backward: Backward, worker: WorkerHandle) -> None:
        """Note the modes and environment of a backward, and pack its gradients."""
        backward.grads = self._pack([part for parts in backward.grads for part in parts], worker)
        if backward.create:
            backward.derived_number = next(self._numbers)
        _, backward.modes, backward.environment = self.surroundings(backward.graph_task)
        if backward.graph_task != self.last_backward:
            cancel_if_interrupted(backward.graph_task, self._driver.cancel_backward)
            self.last_backward = backward.graph_task

    def wait_for(self, settled: PendingOutcome) -> None:
        self._driver.wait_until(lambda: settled.arrived)

    def surroundings(self, graph_task: int) -> BackwardContext:
        """Return the context of the backward with this number, which runs in this thread.

        The context is the one at the backward's first request.

        Raises:
            NotImplementedError: the thread is in a mode that workers cannot be in.
        """
        # This is read once, because another thread's backward may replace it.
        last = self._last
        if last is None or last.graph_task != graph_task:
            self._mode_check.look()
            environment = None if self._since is None else self._since.changes()
            last = self._last = BackwardContext(graph_task, current_modes(), environment)
        return last

    def _pack(
        self, parts: Sequence[torch.Tensor | Promise], worker: WorkerHandle
    ) -> Sequence[PackedTensor | Promise] | PackedTensors:
        """Copy the tensors, in their order, and leave promises as they are."""
        packer, staged = self._packer, worker.device == 0
        tensors = [part for part in parts if not isinstance(part, Promise)]
        flags = [REQUIRES_GRAD if tensor.requires_grad else 0 for tensor in tensors]
        together = packer.together(tensors, flags) if len(tensors) == len(parts) else None
        if together is not None:
            return together
        packed = (
            packer.pack(tensor, own, None, staged)
            for tensor, own in zip(tensors, flags, strict=True)
        )
        return [part if isinstance(part, Promise) else next(packed) for part in parts]

    def request_sum(self, worker: Any, request: SumRequest) -> None:
        self._life.check_alive()
        self.leave(worker, request)
        self._driver.wake()

    def leave(self, worker: Any, item: Backward | SumRequest) -> None:
        """Leave the item in the worker's backlog.

        If the worker is gone, or goes in this moment, other workers get the item.
        """
        worker.backlog.append(item)
        self._driver.has_unheard = True
        if worker.gone is not None:
            self._driver.put(lambda now: self._driver.requeue(worker))

    def release(self, graph: RemoteGraph) -> None:
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        worker.releases.append(graph.call)
        self._driver.nudge()

    def consume(self, graph: RemoteGraph) -> None:
        """Note that the graph's last backward was an eager one, and has arrived."""
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        worker.consumed.append(graph.call)
        self._driver.nudge()

    def predictor_of(self, function: SharedFunction) -> Predictor | None:
        return self._function_cache.predictor_of(function)

    def note_wrong_prediction(self) -> None:
        self._function_cache.wrong_predictions += 1
