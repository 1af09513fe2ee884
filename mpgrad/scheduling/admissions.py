"""`Admissions` keeps each operation from its start to its end, and holds calls and backwards that
wait for others. This module runs in the caller only.

    submit(g, a)    a's outcome is put into g's call when it arrives     ──► the queue
    a's backward    it takes the gradients that g's backward gives       ──► the worker of a's graph
Guarantees: a call or backward that waits goes on, or fails with the error of what it waited for.
    Nothing recurses, however long a chain is.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from mpgrad.autograd.remote_graph import (
    Backward,
    Promise,
)
from mpgrad.callbacks import taken
from mpgrad.calls.operations import DeliveredResult, FailedResult, Operation, UncollectedFailures
from mpgrad.calls.packing import PackedCall
from mpgrad.machine.queue import CallQueue
from mpgrad.machine.story import WAITS
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.gradients import GradientSender
from mpgrad.scheduling.lifecycle import Driver
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.tensor_refs import (
    LEAF,
    REQUIRES_GRAD,
    PackedTensor,
    PackedTensors,
    Packer,
    packed_again,
    staged_again,
)

__all__ = ["Admissions"]


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
        ready = []
        while operation.packed:
            call = operation.packed.popleft()
            if call.dependencies:
                self._look_at_call(operation, call, now)
            else:
                ready.append(call)
        self._queue.join(operation, ready)

    def cancel_rest(self, operation: Operation) -> None:
        """Drop the calls after the first that failed, because they are not needed."""
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
                call.note((now, WAITS, 0))
                again = functools.partial(self._look_at_call, operation, call)
                dependency.source.dependents.append(
                    functools.partial(self._driver.inbox.append, again)
                )
                return
            if isinstance(dependency.outcome, FailedResult):
                self._uncollected.collected(dependency.outcome)  # this operation raises it
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
            # The warnings move here, because the value itself may never be requested.
            operation.warned.extend(taken(dependency.source.warned))
        if request is not None:
            try:
                request.look_again(call)
            except ValueError as error:
                operation.deliver(call.index, error)
                self.cancel_rest(operation)
                return
        # Work that has begun is finished first, so that its memory is given back.
        self._queue.join(operation, [call], first=True)
        giver = outcomes[-1].worker
        is_idle = giver.ready and giver.gone is None and not giver.under_way
        # The worker that has a part of the input runs the call next.
        if is_idle and (chunk := self._queue.next_chunk_for(giver, now)) is not None:
            self._deliveries.send(chunk, now)
            self._queue.note_sent(giver, now)

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
                backward.warned = [*backward.warned, *taken(other.warned)]
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
        more = [packed_again(ref, outcome.payload, outcome.memories) for ref in refs]
    else:
        more = [staged_again(packer, ref, outcome.payload, outcome.memories) for ref in refs]
    call.packed = [*call.packed, *more]
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
