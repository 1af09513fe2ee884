"""`GradientSender` and `OperationLink` send backwards from autograd's threads to the workers that
keep the graphs. This module runs in the caller only.

    a node's backward ──► OperationLink ──► its gradients came with the result: settled at once
                              └──► GradientSender.send ──► the worker's backlog
                                       ──► [scheduling thread] ──► settled when they come
Assumes: any thread sends. The scheduling thread calls only `leave`, for backwards that have waited
    for others.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.remote_graph import (
    Backward,
    PendingOutcome,
    Promise,
    RemoteGraph,
    SumRequest,
)
from mpgrad.autograd.running import cancel_if_interrupted, note_failure
from mpgrad.callbacks import taken, warned_again
from mpgrad.calls.backwards import ReceivedGradients
from mpgrad.calls.packing import SharedFunction
from mpgrad.environment import EnvironmentChanges
from mpgrad.scheduling.known_functions import KnownFunctions
from mpgrad.scheduling.lifecycle import Driver, Lifecycle
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.torch_state.modes import ModeCheck, Modes, current_modes
from mpgrad.wire.messages import EagerOptions
from mpgrad.wire.tensor_refs import (
    REQUIRES_GRAD,
    PackedTensor,
    PackedTensors,
    Packer,
    is_like_a_loss,
)

__all__ = ["GradientSender", "OperationLink"]

EXAMINED = 4  # backwards of a map, to learn the gradient of its losses


class OperationLink:
    """Leads to the workers that keep the graphs of one operation (`autograd.GraphLink`). It keeps
    the function that they share."""

    def __init__(
        self,
        sender: GradientSender,
        function: SharedFunction,
        modes: Modes,
        environment: bytes | None,
        eager: EagerOptions | None,
        learns: bool,
    ) -> None:
        """`modes` and `environment` are those of the calls."""
        self.sender = sender  # reaches the graphs of one pool
        self._modes = modes
        self._environment = environment
        self._function = function
        self._eager = eager
        # how many more backwards are examined, for the next map
        self._to_see = EXAMINED if learns else 0
        self._seen: float | None = None  # the gradient in earlier backwards
        self._was_wrong = False

    def send(self, item: Backward | SumRequest) -> None:
        """Start a backward, or request a sum, and return at once."""
        if isinstance(item, SumRequest):
            self.sender.request_sum(item)
        elif item.modes is not None or not self._is_settled_now(item):
            self.sender.send(item)

    def _is_settled_now(self, backward: Backward) -> bool:
        """Whether the backward's gradients came with the result. Learn from the ones that it gets.

        Only a backward through the whole graph, which does not keep it, can get these gradients.
        """
        graph, eager = backward.graph, self._eager
        gradients = loss_gradients(backward) if self._to_see > 0 or eager is not None else set()
        if self._to_see > 0:
            self._learn(gradients)
        if eager is None or graph.eager is None:
            return False
        with self.sender.serving:
            arrived, graph.eager = graph.eager, None
        if arrived is None:
            return False
        needs_sum = backward.asked.captures and not eager.apart
        _, modes, environment = self.sender.surroundings(backward.graph_task)
        is_like_the_calls = (
            modes.but_grad == self._modes.but_grad and environment == self._environment
        )
        is_same = gradients == {eager.gradient} and is_like_the_calls
        if not is_same or (needs_sum and backward.apart):
            self._note_wrong()
            return False
        backward.apart = backward.asked.captures and eager.apart
        backward.worker, backward.was_eager = arrived.worker, True
        backward.settle(arrived)
        if not needs_sum:
            self.sender.consume(graph)
        return True

    def wait(self, settled: PendingOutcome) -> ReceivedGradients:
        """Wait for a backward or for a requested sum. Return its gradients, or raise its error."""
        # even if it has arrived, because tasks' earlier prints come before it
        self.sender.wait_for(settled)
        for each in taken(settled.warned):
            warned_again(*each)
        if settled.has_failed:
            if isinstance(settled, Backward):
                note_failure(settled.graph_task)
            raise settled.outcome()
        arrived: ReceivedGradients = settled.outcome
        return arrived

    def note_eager_sum(self, backwards: Sequence[Backward], is_theirs: bool) -> None:
        if not is_theirs:
            self._note_wrong()
            return
        for each in backwards:
            self.sender.consume(each.graph)

    # --- the gradient of losses

    def _learn(self, gradients: set[float]) -> None:
        self._to_see -= 1
        predictor = self.sender.functions.predictor_of(self._function)
        if len(gradients) != 1 or self._seen not in (None, *gradients):
            self._to_see = 0
            predictor.note_other()
        elif self._seen is None:
            (self._seen,) = gradients
            predictor.note_gradient(
                self._seen, None if self._eager is None else self._eager.gradient
            )

    def _note_wrong(self) -> None:
        """Note that an eager backward was run in vain."""
        self.sender.functions.wrong_predictions += 1
        if not self._was_wrong:
            self._was_wrong = True
            was_right = self._eager is not None and self._seen == self._eager.gradient
            self.sender.functions.predictor_of(self._function).note_wrong(was_right)

    def release(self, graph: RemoteGraph) -> None:
        """Release a graph that can get no further backward."""
        if graph.eager is not None:
            self._note_wrong()
        if self._to_see == EXAMINED:  # no backward has come
            self._to_see = 0
            self.sender.functions.predictor_of(self._function).note_other()
        self.sender.release(graph)


def loss_gradients(backward: Backward) -> set[float]:
    """Return the gradients that the losses get, if their backward runs once and through the whole
    graph. Otherwise return an empty set."""
    asked = backward.asked
    if asked.keep or asked.create or asked.levels or backward.waits or not asked.whole:
        return set()
    parts: list[torch.Tensor] = list(itertools.chain.from_iterable(backward.grads))
    if not all(map(is_like_a_loss, parts)):
        return set()
    found = set(map(float, parts))
    return found if all(each and math.isfinite(each) for each in found) else set()


# --- for all operations of a pool


# This many backwards are sent to the workers together, unless a thread waits for one of them.
HELD_GRADIENTS = 256


class BackwardContext(NamedTuple):
    """Holds the modes and the environment that a backward of autograd's engine runs in."""

    graph_task: int
    modes: Modes
    # the process's environment; None if workers do not follow it
    environment: bytes | None


class GradientSender:
    """Sends backwards and requests for the links of operations."""

    def __init__(
        self,
        driver: Driver,
        life: Lifecycle,
        functions: KnownFunctions,
        packer: Packer,
        numbers: itertools.count[int],
        since: EnvironmentChanges | None,
        mode_check: ModeCheck,
    ) -> None:
        """Take `numbers` for graphs of gradients, from the counter that calls also use.

        `since` records changes of the environment that workers follow.
        """
        self._mode_check = mode_check
        self._driver = driver
        self._life = life
        self.functions = functions
        self._packer = packer
        self._numbers = numbers
        self._since = since
        # of two backwards in two threads, one gets the gradients that came with a result
        self.serving = threading.Lock()
        self._held = 0
        # the context that was requested last
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
        if backward.asked.create:
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

    def request_sum(self, request: SumRequest) -> None:
        self._life.check_alive()
        self.leave(request.worker, request)
        self._driver.wake()

    def leave(self, worker: Any, item: Backward | SumRequest) -> None:
        """Leave the item in the worker's backlog.

        If the worker is gone, or goes at this moment, other workers get the item.
        """
        worker.backlog.append(item)
        self._driver.has_unheard = True
        if worker.gone is not None:
            self._driver.put(lambda now: self._driver.requeue(worker, now))

    def release(self, graph: RemoteGraph) -> None:
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        worker.graphs.released.append(graph.call)
        self._driver.nudge()

    def consume(self, graph: RemoteGraph) -> None:
        """Note that the graph's last backward was an eager one, and has arrived."""
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        worker.graphs.consumed.append(graph.call)
        self._driver.nudge()
