"""Backwards on their way from autograd's threads to the workers that keep the graphs. Caller's side.

Any thread sends; only `leave` is also called by the scheduling thread, for backwards that have waited for others.

a node's backward ──► send_gradients ──► the worker's backlog ──► [scheduling thread] ──► GradientReply
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpgrad.autograd.remote_graph import Grads, Order, Promise, RemoteGraph
from mpgrad.autograd.running import call_off_if_interrupted
from mpgrad.calls.homes import GradientReply
from mpgrad.calls.packing import SharedFunction
from mpgrad.environment import Since
from mpgrad.scheduling.chunks import CaptureRequest, Differentiation, SentGradients
from mpgrad.scheduling.driver import Driver
from mpgrad.scheduling.function_cache import Codes
from mpgrad.scheduling.guesses import Guess
from mpgrad.scheduling.lifecycle import Lifecycle
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.torch_state.modes import Modes, Watch, current_modes
from mpgrad.torch_state.vmap_levels import Level
from mpgrad.wire.tensor_packing import Packer, Placed, Together
from mpgrad.wire.tensor_refs import REQUIRES_GRAD

__all__ = ["GradientSender"]

HELD_GRADIENTS = 256  # sent to the workers together, unless somebody waits for one of them


class GradientSender:
    """What homes of operations ask of the scheduler (see `calls.homes.Sender`)."""

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
        """`numbers` are given to graphs of gradients, as to calls. `since`: the environment that workers follow."""
        self._watch = watch
        self._driver = driver
        self._life = life
        self._codes = codes
        self._packer = packer
        self._numbers = numbers
        self._since = since
        self._wait_until = driver.wait_until  # one bound method for all replies
        self.wait_for_gradients: Callable[[SentGradients], None]  # that it needs and that are still to come
        self.rescue: Callable[[WorkerHandle], None]  # what was left for a worker that is gone
        self.give_up: Callable[[int], None]  # the backward with this number
        self._held = 0
        self._last_modes: tuple[int, Modes | None] = -1, None  # of the last backward that was asked about
        self.last_backward = -1  # of which something was sent
        self._environment: bytes | None = None  # of the process, when that began

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads, again: bool = False) -> GradientReply:
        """Copies them, and returns at once. `again`: see `SentGradients`."""
        self._life.check_alive()
        flat = [part for parts in grads for part in parts]
        waits_for_others = any(isinstance(part, Promise) for part in flat)
        worker = graph.worker  # read once: should it die now, another may get the graph, but not the sum
        assert isinstance(worker, WorkerHandle)
        placed = self._place(flat, worker)
        number = next(self._numbers) if order.create else None
        modes = self.modes_of(order.graph_task)
        if order.graph_task != self.last_backward:
            call_off_if_interrupted(order.graph_task, self)
            self.last_backward = order.graph_task
            self._environment = None if self._since is None else self._since.changes()
        what = Differentiation(graph, order, number, placed, list(map(len, grads)), modes, self._environment)
        reply = GradientReply(self._wait_until, worker, order.graph_task)
        sent = SentGradients(what, reply, graph.home.timeout, again)
        if waits_for_others:
            self._driver.put(lambda: self.wait_for_gradients(sent))
        else:
            self.leave(worker, sent)
        self._held += 1
        if self._held >= HELD_GRADIENTS:
            self._held = 0
            self._driver.hand_over()
        return sent.reply

    def modes_of(self, graph_task: int) -> Modes:
        """Those of the backward with this number, which is running in this thread.

        Raises:
            NotImplementedError: the thread is in a mode that workers cannot be in.
        """
        last, modes = self._last_modes  # read once: another thread's backward may put its own there
        if modes is None or last != graph_task:
            self._watch.look()
            modes = current_modes()
            self._last_modes = graph_task, modes
        return modes

    def _place(self, parts: Sequence[torch.Tensor | Promise], worker: WorkerHandle) -> Sequence[Placed | Promise] | Together:
        """Copies of the tensors, in their order; promises stay what they are."""
        packer, staged = self._packer, worker.device == 0
        tensors = [part for part in parts if not isinstance(part, Promise)]
        flags = [REQUIRES_GRAD if tensor.requires_grad else 0 for tensor in tensors]
        together = packer.together(tensors, flags) if len(tensors) == len(parts) else None
        if together is not None:
            return together
        placed = (packer.place(tensor, own, None, staged) for tensor, own in zip(tensors, flags, strict=True))
        return [part if isinstance(part, Promise) else next(placed) for part in parts]

    def request_captures(
        self, worker: WorkerHandle, function: int, graph_task: int | None, levels: tuple[Level, ...], timeout: float | None
    ) -> GradientReply:
        self._life.check_alive()
        reply = GradientReply(self._wait_until, worker)
        self.leave(worker, CaptureRequest(function, graph_task, levels, timeout, reply))
        self._driver.wake()
        return reply

    def leave(self, worker: Any, item: SentGradients | CaptureRequest) -> None:
        """For the worker to take up; or for others, if it is gone, or goes in this moment."""
        worker.backlog.append(item)
        if worker.gone is not None:
            self._driver.put(lambda: self.rescue(worker))

    def release(self, graph: RemoteGraph) -> None:
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        if graph.call in worker.graphs:  # else its gradients came with its result
            worker.releases.append(graph.call)
            self._driver.nudge()

    def call_off_backward(self, graph_task: int) -> None:
        """As `Scheduler.call_off`, all that was sent for the backward with this number."""
        self._driver.post(lambda: self.give_up(graph_task))

    def spend(self, graph: RemoteGraph) -> None:
        worker = graph.worker
        assert isinstance(worker, WorkerHandle)
        worker.spent.append(graph.call)

    def guess_of(self, function: SharedFunction) -> Guess | None:
        return self._codes.guess_of(function)

    def note_wrong_guess(self, function: SharedFunction) -> None:
        self._codes.note_wrong_guess(function)

    def note_other_gradient(self, function: SharedFunction) -> None:
        """Than the one for which the backward of a loss was run ahead, and must be run again."""
        self._codes.note_other_gradient(function)
