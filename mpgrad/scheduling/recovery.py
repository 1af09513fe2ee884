"""What is lost with a worker is done again by others, from what the parent still holds.

A call can be run again while its inputs, its function and its seed are here, and they are as long as its graph is wanted. So
a graph that is lost is only missing: it is made again, by the worker that gets its next backward, right before that.

    forward under way ──► the front of its operation's queue
    backward under way, or waiting ──► another worker: [Rerun, [Rederive ...,]] BackwardCall      graph: missing there
    a sum of captures' gradients ──► an error for who collects it, who asks for its parts one by one
Guarantees: an item fails only when more than `retries` workers died while they ran it.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.calls.operations import Operation
from mpgrad.calls.output import report
from mpgrad.calls.packing import PackedCall
from mpgrad.errors import CallTimeoutError, SharedMemoryError, WorkerDiedError
from mpgrad.memory.limits import kills_for_memory
from mpgrad.scheduling.chunks import CaptureRequest, Chunk, Differentiation, SentGradients
from mpgrad.scheduling.function_cache import Codes
from mpgrad.scheduling.lifecycle import Lifecycle
from mpgrad.scheduling.worker_handle import WorkerHandle

__all__ = ["Recovery"]

IDLE_DEATHS = 2  # of workers that died when a call was next, that are nobody's fault
GRAPH_LOST = "the graph that backward needs was lost with it, and is only made again with retries (retries: 0)"
SUM_LOST = "the sum of gradients was lost with it"
OUT_OF_MEMORY = "the kernel has killed for want of memory meanwhile; use fewer workers, smaller items, or graphs='recompute'"


class Recovery:
    """Says who is to blame for a death, and gives what was lost to others."""

    def __init__(
        self,
        workers: Mapping[int, WorkerHandle],
        codes: Codes,
        retries: int,
        life: Lifecycle,
        readmit: Callable[[Operation], None],
    ) -> None:
        """`readmit`: the operation has calls for workers again."""
        self._workers = workers
        self._codes = codes
        self._retries = retries
        self._life = life
        self._readmit = readmit
        self._kills_for_memory = kills_for_memory()
        self.reruns = 0  # calls and backwards that were given to another worker

    def blame(self, worker: WorkerHandle, code: int | None, chunk: Chunk, position: int, offset: int) -> bool:
        """The call that was running, or else was next, may be what killed the worker: past the retries it fails.

        False where all of the chunk had been taken back.

        `offset` is that of the item, where the call was running and is a bundle.

        Without retries so are those before it, which were done: their inputs may have been written to.
        """
        place = max(position, 0)
        accused: PackedCall | SentGradients
        index: int | range | None
        if chunk.calls:
            _, accused = chunk.calls[place]
            index = accused.item
            if accused.bundle:
                index = accused.item + offset if position >= 0 and offset >= 0 else None
        elif chunk.gradients:
            accused = chunk.gradients[place]
            index = accused.what.items
        else:
            return False
        if position >= 0:
            accused.deaths += 1
        else:
            accused.idle_deaths += 1
        phase = "backward" if chunk.operation is None else "forward" if position >= 0 else "loading the function"
        level = logging.WARNING if worker.overdue is None else logging.INFO  # a timeout is what the caller asked for
        report(level, "%s", self._death(worker, code, index, phase, accused))
        if accused.deaths <= self._retries and accused.idle_deaths <= max(self._retries, IDLE_DEATHS):
            return True
        failed = slice(0 if self._retries == 0 and position >= 0 else place, place + 1)
        if chunk.operation is not None:
            for _, call in chunk.calls[failed]:
                chunk.operation.deliver(call.index, self._death(worker, code, index, phase, accused))
            del chunk.calls[failed]
        else:
            for sent in chunk.gradients[failed]:
                sent.reply.fail(self._death(worker, code, index, phase, accused))
            del chunk.gradients[failed]
        return True

    def _death(
        self,
        worker: WorkerHandle,
        code: int | None,
        index: int | range | None,
        phase: str,
        accused: PackedCall | SentGradients,
    ) -> BaseException:
        """The error of a call that fails: what is known of the death, and how often it was tried."""
        names = (accused.conditions.function if isinstance(accused, PackedCall) else accused.what.graph.home).names
        item, call = names.number(index), names.words(index)
        tried = accused.deaths + accused.idle_deaths
        details = [f"the call was tried {'once' if tried == 1 else f'{tried} times'} (retries: {self._retries})"]
        if worker.overdue is not None:
            return CallTimeoutError(item, phase, worker.overdue, details[0], worker.stack, call)
        if worker.unreadable:
            return SharedMemoryError(f"{worker.unreadable} ({call}, phase: {phase})")
        if code == -signal.SIGKILL and kills_for_memory() > self._kills_for_memory:
            details.append(OUT_OF_MEMORY)
        details += worker.end_in_words
        return WorkerDiedError(item, phase, worker.number, code, "; ".join(details), worker.stack, call)

    def take_apart(self, worker: WorkerHandle, chunks: list[Chunk]) -> None:
        """What was under way with a worker that is gone: calls go back to their queues, the rest waits to be revived."""
        for chunk in reversed(chunks):  # so that the first calls are first in the queue again
            if chunk.operation is not None:
                wanted = [call for _, call in chunk.calls if call.index < chunk.operation.limit]
                self.reruns += len(wanted)
                chunk.operation.queue.extendleft(reversed(wanted))
                self._readmit(chunk.operation)
            worker.backlog.extendleft(reversed(chunk.gradients))
            if chunk.captures is not None:
                worker.backlog.appendleft(chunk.captures)

    def revive(self, item: SentGradients | CaptureRequest, gone: WorkerHandle) -> None:
        """What a worker that is gone should have done is done by another, which makes the graph again. A sum is lost.

        Assumes: there is another worker that has a place, or all has ended.
        """
        reason = self._life.broken or self._life.ended  # why nothing is done again any more
        if item.reply.arrived:  # it was called off
            if isinstance(item, SentGradients):
                gone.graphs.note_unknown(item.what.graph.call)
        elif reason is not None:
            item.reply.fail(reason)
        elif isinstance(item, CaptureRequest):
            item.reply.fail(WorkerDiedError(None, "backward", gone.number, gone.exit_code, SUM_LOST))
        elif not can_be_made(item.what.graph):
            index, names = item.what.items, item.what.graph.home.names
            number, call = names.number(index), names.words(index)
            item.reply.fail(WorkerDiedError(number, "backward", gone.number, gone.exit_code, GRAPH_LOST, call=call))
        else:
            self.reruns += 1
            item.set_apart()
            self._rehome(item.what.graph).backlog.append(item)

    def _rehome(self, graph: RemoteGraph) -> WorkerHandle:
        """The worker of a graph; a new one if that is gone: with the graph that it derives from, or where least is to do."""
        gone = graph.worker
        assert isinstance(gone, WorkerHandle)
        if gone.gone is None:
            return gone
        recipe = graph.recipe
        if isinstance(recipe, Differentiation):
            worker = self._rehome(recipe.graph)
        else:
            assert isinstance(recipe, PackedCall)
            self._codes.number(recipe.conditions.function)
            placed = [each for each in self._workers.values() if each.link.has_place]
            there = [each for each in placed if each.device == gone.device]
            active = [each for each in there if not each.retiring] or there
            worker = min(active or placed, key=lambda each: each.load)
        gone.note_spent()
        worker.graphs.move_here(graph.call, before=gone.graphs)
        graph.worker = worker
        return worker


def can_be_made(graph: RemoteGraph) -> bool:
    """Whether there are recipes for it and all that it derives from."""
    recipe = graph.recipe
    return can_be_made(recipe.graph) if isinstance(recipe, Differentiation) else recipe is not None
