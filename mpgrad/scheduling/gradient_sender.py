"""Backwards on their way from autograd's threads to the workers that keep the graphs. Caller's
side.

Any thread sends; only `leave` is also called by the scheduling thread, for backwards that have
waited for others.

a node's backward ──► send ──► the worker's backlog ──► [scheduling thread] ──► settled
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.remote_graph import (
    Backward,
    Promise,
    RemoteGraph,
    Settled,
    cancel_if_interrupted,
)
from mpgrad.calls.homes import Predictor, SumRequest
from mpgrad.calls.packing import SharedFunction
from mpgrad.environment import Since
from mpgrad.scheduling.function_cache import Codes
from mpgrad.scheduling.lifecycle import Driver, Lifecycle
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.torch_state.modes import Modes, Watch, current_modes
from mpgrad.wire.tensor_refs import REQUIRES_GRAD, Packer, Placed, Together

__all__ = ["GradientSender"]

HELD_GRADIENTS = 256  # sent to the workers together, unless somebody waits for one of them


class Surroundings(NamedTuple):
    """What a backward of the engine runs in."""

    graph_task: int
    modes: Modes
    environment: bytes | None  # of the process; None where workers do not follow it


class GradientSender:
    """What homes of operations ask of the scheduler."""

    def __init__(
        self,
        driver: Driver,
        life: Lifecycle,
        codes: Codes,
        packer: Packer,
        numbers: itertools.count[int],
        since: Since | None,
        watch: Watch,
    ) -> None:
        """`numbers` are given to graphs of gradients, as to calls. `since`: the environment that
        workers follow."""
        self._watch = watch
        self._driver = driver
        self._life = life
        self._codes = codes
        self._packer = packer
        self._numbers = numbers
        self._since = since
        self._held = 0
        self._last: Surroundings | None = None  # that were asked for
        self.last_backward = -1  # of which something was sent

    def send(self, backward: Backward) -> None:
        """Copies its gradients, and returns at once."""
        self._life.check_alive()
        # read once: should it die now, another may get the graph, but not the sum
        worker = backward.graph.worker
        assert isinstance(worker, WorkerHandle)
        if backward.modes is None:  # else it was sent before
            self._prepare(backward, worker)
        backward.worker = worker
        if backward.waits:
            self._driver.put(lambda: self._driver.wait_for_gradients(backward))
        else:
            self.leave(worker, backward)
        self._held += 1
        if self._held >= HELD_GRADIENTS:
            self._held = 0
            self._driver.hand_over()

    def _prepare(self, backward: Backward, worker: WorkerHandle) -> None:
        """Note what it runs under; pack its gradients."""
        backward.grads = self._place([part for parts in backward.grads for part in parts], worker)
        if backward.create:
            backward.derived_number = next(self._numbers)
        _, backward.modes, backward.environment = self.surroundings(backward.graph_task)
        if backward.graph_task != self.last_backward:
            cancel_if_interrupted(backward.graph_task, self._driver.cancel_backward)
            self.last_backward = backward.graph_task

    def wait_for(self, settled: Settled) -> None:
        self._driver.wait_until(lambda: settled.arrived)

    def surroundings(self, graph_task: int) -> Surroundings:
        """Those of the backward with this number, which runs in this thread, as they were when it
        first asked.

        Raises:
            NotImplementedError: the thread is in a mode that workers cannot be in.
        """
        last = self._last  # read once: another thread's backward may put its own there
        if last is None or last.graph_task != graph_task:
            self._watch.look()
            environment = None if self._since is None else self._since.changes()
            last = self._last = Surroundings(graph_task, current_modes(), environment)
        return last

    def _place(
        self, parts: Sequence[torch.Tensor | Promise], worker: WorkerHandle
    ) -> Sequence[Placed | Promise] | Together:
        """Copies of the tensors, in their order; promises stay what they are."""
        packer, staged = self._packer, worker.device == 0
        tensors = [part for part in parts if not isinstance(part, Promise)]
        flags = [REQUIRES_GRAD if tensor.requires_grad else 0 for tensor in tensors]
        together = packer.together(tensors, flags) if len(tensors) == len(parts) else None
        if together is not None:
            return together
        placed = (
            packer.place(tensor, own, None, staged)
            for tensor, own in zip(tensors, flags, strict=True)
        )
        return [part if isinstance(part, Promise) else next(placed) for part in parts]

    def request_sum(self, worker: Any, request: SumRequest) -> None:
        self._life.check_alive()
        self.leave(worker, request)
        self._driver.wake()

    def leave(self, worker: Any, item: Backward | SumRequest) -> None:
        """For the worker to take up; or for others, if it is gone, or goes in this moment."""
        worker.backlog.append(item)
        self._driver.has_unheard = True
        if worker.gone is not None:
            self._driver.put(lambda: self._driver.rescue(worker))

    def release(self, graph: RemoteGraph) -> None:
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        worker.releases.append(graph.call)
        self._driver.nudge()

    def spend(self, graph: RemoteGraph) -> None:
        """Its last backward was an eager one, and has come."""
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        worker.spent.append(graph.call)
        self._driver.nudge()

    def predictor_of(self, function: SharedFunction) -> Predictor | None:
        return self._codes.predictor_of(function)

    def note_wrong_prediction(self) -> None:
        self._codes.wrong_predictions += 1
