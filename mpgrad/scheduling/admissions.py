"""Operations from when callers hand them in until they have ended: calls join the queue as soon as what they need is there.

Caller's side. Assumes: called by the scheduling thread.
"""

from __future__ import annotations

from typing import Any

from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.scheduling.chunks import SentGradients
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.driver import Driver
from mpgrad.scheduling.gradient_sender import GradientSender
from mpgrad.scheduling.queue import Line
from mpgrad.scheduling.waiting_calls import Dependents
from mpgrad.wire.tensor_packing import Packer

__all__ = ["Admissions"]


class Admissions:
    """The operations that have not ended, and what becomes of calls and backwards that have waited."""

    def __init__(self, driver: Driver, line: Line, deliveries: Deliveries, gradients: GradientSender, packer: Packer) -> None:
        self.unfinished: dict[Operation, None] = {}
        self.dependents = Dependents(self, driver.inbox.append, packer)
        self._driver = driver
        self._line = line
        self._deliveries = deliveries
        self._gradients = gradients

    def admit(self, operation: Operation) -> None:
        """It has calls, for the first time or again."""
        if operation.finished:
            self.unfinished.pop(operation, None)
            operation.tell_if_finished()
            self._driver.tell_waiters()
            return
        self.unfinished[operation] = None
        while operation.waiting:
            self.dependents.look_at_call(operation, operation.waiting.popleft())
        if operation.queue:
            operation.unsorted = operation.at_rest and operation.sealed
            self._line.join(operation)

    def cancel_rest(self, operation: Operation) -> None:
        """Nobody wants the calls after the first that failed."""
        for worker in self._deliveries.workers.values():
            worker.under_way.cancel(operation)
        self._line.tidy()
        if operation.finished:
            self.unfinished.pop(operation, None)
            self._driver.tell_waiters()

    # --- what becomes of those that have waited: see `waiting_calls.Waited`

    def call_is_ready(self, operation: Operation, call: PackedCall, giver: Any) -> None:
        operation.queue.append(call)
        operation.unsorted = operation.at_rest and operation.sealed
        self._line.join(operation, first=True)  # what has begun is finished first, and its memory given back
        if giver.ready and giver.gone is None and not giver.under_way:
            self._deliveries.give(giver)  # who has a part of the input goes on with it, rather than whoever is looked at first

    def call_has_failed(self, operation: Operation) -> None:
        self.cancel_rest(operation)

    def backward_is_ready(self, sent: SentGradients) -> None:
        self._gradients.leave(sent.reply.worker, sent)

    def backward_has_failed(self) -> None:
        self._driver.tell_waiters()
