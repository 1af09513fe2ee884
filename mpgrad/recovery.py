"""What is lost with a worker is done again by others, from what the parent still holds.

A call can be run again while its inputs, its function and its seed are here, and they are as long as its graph is wanted. So
a graph that is lost is only missing: it is made again, by the worker that gets its next backward, right before that.

    forward under way ──► the front of its operation's queue
    backward under way, or waiting ──► another worker: [Rerun, [Rederive ...,]] BackwardCall      graph: missing there
    a sum of captures' gradients ──► an error for who collects it, who asks for its parts one by one
Guarantees: an item is given up only when more than `retries` workers died while they ran it.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from mpgrad.autograd import RemoteGraph
from mpgrad.codes import Codes
from mpgrad.crew import CaptureRequest, Chunk, Differentiation, SentGradients, Worker
from mpgrad.errors import CallTimeoutError, SharedMemoryError, WorkerDiedError
from mpgrad.memory import kills_for_memory
from mpgrad.packing import PackedCall

__all__ = ["Recovery"]

IDLE_DEATHS = 2  # of workers that died when a call was next, that are nobody's fault
GRAPH_LOST = "the graph that backward needs was lost with it"
OUT_OF_MEMORY = "the kernel has killed for want of memory meanwhile; use fewer workers, smaller items, or graphs='recompute'"


class Recovery:
    def __init__(
        self, workers: Mapping[int, Worker], codes: Codes, retries: int, ended: Callable[[], BaseException | None]
    ) -> None:
        self._workers = workers
        self._codes = codes
        self._retries = retries
        self._ended = ended  # why nothing is done again any more
        self._kills_for_memory = kills_for_memory()
        self.reruns = 0  # calls and backwards that were given to another worker

    def blame(self, worker: Worker, code: int | None, chunk: Chunk, position: int) -> None:
        """The call that was running, or else was next, may be what killed the worker: past the retries it is given up."""
        retries = self._retries if position >= 0 else max(self._retries, IDLE_DEATHS)
        if chunk.operation is not None:
            _, call = chunk.calls[max(position, 0)]
            call.deaths += 1
            if call.deaths > retries:
                del chunk.calls[max(position, 0)]
                phase = "forward" if position >= 0 else "loading the function"
                chunk.operation.deliver(call.index, self._death(worker, code, call.index, phase))
        elif chunk.gradients:
            sent = chunk.gradients[max(position, 0)]
            sent.deaths += 1
            if sent.deaths > retries:
                del chunk.gradients[max(position, 0)]
                sent.reply.fail(self._death(worker, code, sent.what.graph.index, "backward"))

    def _death(self, worker: Worker, code: int | None, index: int, phase: str) -> BaseException:
        if worker.overdue is not None:
            return CallTimeoutError(index, phase, worker.overdue)
        if worker.unreadable:
            return SharedMemoryError(f"{worker.unreadable} (item {index}, phase: {phase})")
        detail = OUT_OF_MEMORY if code == -signal.SIGKILL and kills_for_memory() > self._kills_for_memory else ""
        return WorkerDiedError(index, phase, worker.number, code, detail)

    def revive(self, item: SentGradients | CaptureRequest, gone: Worker) -> None:
        """What a worker that is gone should have done is done by another, which makes the graph again. A sum is lost."""
        reason = self._ended()
        if reason is not None:
            item.reply.fail(reason)
        elif isinstance(item, CaptureRequest):
            item.reply.fail(WorkerDiedError(None, "backward", gone.number, exit_code_of(gone), GRAPH_LOST))
        elif not can_be_made(item.what.graph):
            index = item.what.graph.index
            item.reply.fail(WorkerDiedError(index, "backward", gone.number, exit_code_of(gone), GRAPH_LOST))
        else:
            self.reruns += 1
            item.set_apart()
            self._rehome(item.what.graph).backlog.append(item)

    def _rehome(self, graph: RemoteGraph) -> Worker:
        """The worker of a graph; a new one if that is gone: with the graph that it derives from, or where least is to do."""
        worker = graph.worker
        assert isinstance(worker, Worker)
        if worker.gone is None:
            return worker
        recipe = graph.recipe
        if isinstance(recipe, Differentiation):
            worker = self._rehome(recipe.graph)
        else:
            assert isinstance(recipe, PackedCall)
            self._codes.number(recipe.conditions.function)
            worker = min((each for each in self._workers.values() if not each.retiring), key=lambda each: each.load)
        graph.worker = worker
        worker.graphs += 1
        worker.missing.add(graph.call)
        return worker


def can_be_made(graph: RemoteGraph) -> bool:
    """Whether there are recipes for it and all that it derives from."""
    recipe = graph.recipe
    return can_be_made(recipe.graph) if isinstance(recipe, Differentiation) else recipe is not None


def exit_code_of(gone: Worker) -> int | None:
    return gone.gone.exit_code if isinstance(gone.gone, WorkerDiedError) else None
