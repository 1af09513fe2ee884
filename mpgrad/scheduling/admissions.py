"""Operations from when callers hand them in until they have ended; calls and backwards that wait
for others. Caller's side.

    submit(g, a)    a's outcome is put into g's call when it has come    ──► the queue
    a's backward    its gradients are those that g's backward gives      ──► the worker of a's graph
Guarantees: whoever waits goes on, or fails with what it waited for; nothing recurses, however long
a chain is.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence

from mpgrad.autograd.remote_graph import Backward, Promise
from mpgrad.calls.operations import Delivered, Failed, Operation
from mpgrad.calls.output import taken
from mpgrad.calls.packing import PackedCall
from mpgrad.calls.results import Uncollected
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.gradient_sender import GradientSender
from mpgrad.scheduling.lifecycle import Driver
from mpgrad.scheduling.queue import Line
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.tensor_refs import (
    LEAF,
    REQUIRES_GRAD,
    Packer,
    Placed,
    Together,
    placed_again,
    staged_again,
)

__all__ = ["Admissions"]


class Admissions:
    """The operations that have not ended. Looks at those that wait, again and again, until nothing
    is missing."""

    def __init__(
        self,
        driver: Driver,
        line: Line,
        deliveries: Deliveries,
        gradients: GradientSender,
        packer: Packer,
        uncollected: Uncollected,
    ) -> None:
        self.unfinished: dict[Operation, None] = {}
        self._driver = driver
        self._line = line
        self._deliveries = deliveries
        self._gradients = gradients
        self._packer = packer
        self._uncollected = uncollected

    def admit(self, operation: Operation) -> None:
        """It has calls, for the first time or again."""
        if operation.finished:
            self.unfinished.pop(operation, None)
            operation.tell_if_finished()
            self._driver.tell_waiters()
            return
        self.unfinished[operation] = None
        while operation.packed:
            call = operation.packed.popleft()
            if call.claims:
                self._look_at_call(operation, call)
            else:
                operation.queue.append(call)
        if operation.queue:
            operation.unsorted = operation.options.at_rest and operation.sealed
            self._line.join(operation)

    def cancel_rest(self, operation: Operation) -> None:
        """Nobody wants the calls after the first that failed."""
        for worker in self._deliveries.workers.values():
            worker.under_way.cancel(operation)
        self._line.tidy()
        if operation.finished:
            self.unfinished.pop(operation, None)
            self._driver.tell_waiters()

    # --- those that wait

    def _look_at_call(self, operation: Operation, call: PackedCall) -> None:
        """Put into a call what other calls give it; or come back when the first that is missing has
        come."""
        if call.index in operation.outcomes or call.index >= operation.limit:
            return
        for claim in call.claims:
            if claim.outcome is None:
                again = functools.partial(self._look_at_call, operation, call)
                claim.source.dependents.append(functools.partial(self._driver.inbox.append, again))
                return
            if isinstance(claim.outcome, Failed):
                self._uncollected.collected(claim.outcome)  # it is this operation's now
                operation.deliver(
                    call.index, Failed.because_of(claim.outcome, operation.names.words(call.item))
                )
                self.cancel_rest(operation)
                return
        outcomes = [claim.outcome for claim in call.claims]
        request = operation.options.request
        for claim, outcome in zip(call.claims, outcomes, strict=True):
            put_in(call, outcome, self._packer if request is not None and request.staged else None)
            # perhaps nobody ever asks for the value itself
            operation.warned.extend(taken(claim.source.warned))
        if request is not None:
            try:
                request.look_again(call)
            except ValueError as error:
                operation.deliver(call.index, error)
                self.cancel_rest(operation)
                return
        operation.queue.append(call)
        operation.unsorted = operation.options.at_rest and operation.sealed
        # what has begun is finished first, and its memory given back
        self._line.join(operation, first=True)
        giver = outcomes[-1].worker
        if giver.ready and giver.gone is None and not giver.under_way:
            # who has a part of the input goes on with it, rather than whoever is looked at first
            self._deliveries.give(giver)

    def look_at_backward(self, backward: Backward) -> None:
        """Put into a backward the gradients that other backwards give it; or come back likewise."""
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


def put_in(call: PackedCall, outcome: Delivered, packer: Packer | None) -> None:
    """`packer`: where the call is to run on the CPU, and a result that lies on a device has to come
    there."""
    refs = outcome.result.tensors
    assert not isinstance(call.placed, Together)
    if outcome.graph is None:  # then only leaves need gradients
        refs = [
            ref if ref.flags & LEAF else ref._replace(flags=ref.flags & ~REQUIRES_GRAD)
            for ref in refs
        ]
    if packer is None:
        call.placed += [placed_again(ref, outcome.payload, outcome.memories) for ref in refs]
    else:
        call.placed += [
            staged_again(packer, ref, outcome.payload, outcome.memories) for ref in refs
        ]
    call.claimed = (*call.claimed, (outcome.result.structure, len(refs)))


def kept_promises(
    parts: Sequence[Placed | Promise], staged_by: Packer | None
) -> list[Placed | Promise]:
    there = (
        part.backward.outcome.passed_on(part.place, staged_by)
        if isinstance(part, Promise)
        else part
        for part in parts
    )
    return [part for part in there if part is not None]
