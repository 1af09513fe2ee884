"""What is lost with a worker is done again by others, from what the parent still holds.

A call can be run again while its inputs, its function and its seed are here. They stay as long as
its graph is wanted. So a graph that is lost is only missing: it is made again, by the worker that
gets its next backward, right before that.

    forward under way ──► the front of its operation's queue
    backward under way, or waiting ──► another worker, where the graph is missing:
        [Recompute, [RecomputeBackward ...,]] BackwardCall
    a sum of captures' gradients ──► an error for who collects it, who asks for its parts one by one
Guarantees: an item fails only when more than `retries` workers died while they ran it, or more than
    that, and more than `IDLE_DEATHS`, when it was next. Without retries those before it in the
    chunk fail too, and all that a lost agent had.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence

from mpgrad.autograd.remote_graph import Backward, RemoteGraph
from mpgrad.callbacks import report
from mpgrad.calls.backwards import SumRequest, error_maker
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.errors import CallTimeoutError, SharedMemoryError, WorkerDiedError
from mpgrad.scheduling.chunk_writer import Chunk
from mpgrad.scheduling.function_cache import FunctionCache
from mpgrad.scheduling.lifecycle import Lifecycle
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.system import kills_for_memory

__all__ = ["Recovery"]

IDLE_DEATHS = 2  # of workers that died when a call was next, that are nobody's fault
GRAPH_LOST = (
    "the graph that backward needs was lost with it, and is only made again with retries (retries: "
    "0)"
)
OVERRAN = "the pool ended it, because another call ran past its timeout ({} s)"
SUM_LOST = "the sum of gradients was lost with it"
OUT_OF_MEMORY = (
    "the kernel has killed for want of memory meanwhile; use fewer workers, smaller items, or "
    "graphs='recompute'"
)


Part = PackedCall | Backward


class Recovery:
    """Says who is to blame for a death, and gives what was lost to others."""

    def __init__(
        self,
        workers: Mapping[int, WorkerHandle],
        function_cache: FunctionCache,
        retries: int,
        life: Lifecycle,
        readmit: Callable[[Operation], None],
    ) -> None:
        """`readmit`: the operation has calls for workers again."""
        self._workers = workers
        self._function_cache = function_cache
        self._retries = retries
        self._life = life
        self._readmit = readmit
        self._kills_for_memory = kills_for_memory()
        self.reruns = 0  # calls and backwards that were given to another worker

    def blame(
        self,
        worker: WorkerHandle,
        code: int | None,
        chunks: Sequence[Chunk],
        position: int,
        offset: int,
    ) -> bool:
        """The call that was running, or else was next, may be what killed the worker: past the
        retries it fails.

        False where that had been taken back: it had but looked whether it should begin.

        `position` in the first chunk; `offset` is that of the item, where the call was running and
        is a bundle. If the agent was lost, both are as old as what it said last.

        Without retries the calls before it fail, too. They were done, but their inputs may have
        been written to. Of a lost agent all that it had been given fails.
        """
        if self._retries == 0 and worker.link.lost:
            return self._fail_all(worker, code, chunks)
        chunk, place = chunks[0], max(position, 0)
        parts = parts_of(chunk)
        if place >= len(parts):
            return False
        accused = parts[place]
        # before it began, its function was loaded, which took too long
        if position >= 0 or worker.overdue is not None:
            accused.deaths += 1
        else:
            accused.idle_deaths += 1
        is_known = position >= 0 or worker.link.lost
        phase = (
            "backward"
            if chunk.operation is None
            else "forward"
            if is_known
            else "loading the function"
        )

        def error(_: Part = accused) -> BaseException:
            return self._death(worker, code, item_of(accused, position, offset), phase, accused)

        # a timeout is what the caller asked for
        level = logging.WARNING if worker.overdue is None else logging.INFO
        report(level, "%s", error())
        if accused.deaths > self._retries or accused.idle_deaths > max(self._retries, IDLE_DEATHS):
            fail(
                chunk, slice(0 if self._retries == 0 and position >= 0 else place, place + 1), error
            )
        return True

    def _fail_all(self, worker: WorkerHandle, code: int | None, chunks: Sequence[Chunk]) -> bool:
        """Of some a result may have been on its way."""
        parts = [part for chunk in chunks for part in parts_of(chunk)]

        def error(part: Part) -> BaseException:
            phase = "forward" if isinstance(part, PackedCall) else "backward"
            return self._death(worker, code, item_of(part), phase, part)

        for part in parts:
            part.deaths += 1
        if parts:
            report(logging.WARNING, "%s", error(parts[0]))
        for chunk in chunks:
            fail(chunk, slice(None), error)
        return bool(parts)

    def _death(
        self,
        worker: WorkerHandle,
        code: int | None,
        index: int | range | None,
        phase: str,
        accused: Part,
    ) -> BaseException:
        """The error of a call that fails: what is known of the death, and how often it was
        tried."""
        names = (accused.options.function if isinstance(accused, PackedCall) else accused).names
        item, call = names.number(index), names.words(index)
        tried, idle = accused.deaths, accused.idle_deaths
        details = [
            f"the call was tried {'once' if tried == 1 else f'{tried} times'} (retries: "
            f"{self._retries})"
        ] * (tried > 0)
        if idle:
            details.append(
                f"{'a worker' if idle == 1 else f'{idle} workers'} died when the call was next"
            )
        if worker.overdue is not None:
            return CallTimeoutError(
                item, phase, worker.overdue, "; ".join(details), worker.stack, call
            )
        if worker.unreadable:
            return SharedMemoryError(f"{worker.unreadable} ({call}, phase: {phase})")
        if code == -signal.SIGKILL and kills_for_memory() > self._kills_for_memory:
            details.append(OUT_OF_MEMORY)
        details += worker.end_in_words
        died = WorkerDiedError(
            item, phase, worker.number, code, "; ".join(details), worker.stack, call
        )
        died.__cause__ = worker.garbled
        return died

    def take_apart(self, worker: WorkerHandle, chunks: list[Chunk]) -> None:
        """What was under way with a worker that is gone: calls go back to their queues, the rest
        waits to be revived."""
        for chunk in reversed(chunks):  # so that the first calls are first in the queue again
            if chunk.operation is not None:
                wanted = [call for _, call in chunk.calls if call.index < chunk.operation.limit]
                self.reruns += len(wanted)
                chunk.operation.queue.extendleft(reversed(wanted))
                self._readmit(chunk.operation)
            worker.backlog.extendleft(reversed(chunk.backwards))
            if chunk.request is not None:
                worker.backlog.appendleft(chunk.request)

    def revive(self, item: Backward | SumRequest, gone: WorkerHandle) -> bool:
        """What a worker that is gone should have done is done by another, which makes the graph
        again. A sum is lost.

        False where there is no other that has a place.
        """
        reason = self._life.broken or self._life.ended  # why nothing is done again any more
        if item.arrived:  # it was cancelled
            if isinstance(item, Backward):
                gone.graphs.note_unknown(item.call)
        elif reason is not None:
            item.settle(error_maker(reason))
        elif isinstance(item, SumRequest):
            item.settle(
                error_maker(
                    WorkerDiedError(None, "backward", gone.number, gone.exit_code, SUM_LOST)
                )
            )
        elif not can_be_made(item.graph):
            index, names = item.items, item.names
            number, call = names.number(index), names.words(index)
            details = (
                [GRAPH_LOST] if gone.overdue is None else [OVERRAN.format(gone.overdue), GRAPH_LOST]
            )
            died = WorkerDiedError(
                number, "backward", gone.number, gone.exit_code, "; ".join(details), call=call
            )
            item.settle(error_maker(died))
        else:
            worker = self._move_elsewhere(item.graph)
            if worker is None:
                return False
            self.reruns += 1
            # the sum that they were to be part of is with another worker
            item.apart = item.captures
            worker.backlog.append(item)
        return True

    def _move_elsewhere(self, graph: RemoteGraph) -> WorkerHandle | None:
        """The worker of a graph; a new one if that is gone: with the graph that it derives from, or
        where least is to do.

        None where nobody has a place.
        """
        gone = graph.worker
        assert isinstance(gone, WorkerHandle)
        if gone.gone is None:
            return gone
        lineage = graph.lineage
        if isinstance(lineage, Backward):
            worker = self._move_elsewhere(lineage.graph)
        else:
            assert isinstance(lineage, PackedCall)
            self._function_cache.number(lineage.options.function)
            placed = [each for each in self._workers.values() if each.link.has_place]
            there = [each for each in placed if each.device == gone.device]
            active = [each for each in there if not each.retiring] or there
            worker = min(active or placed, key=lambda each: each.load, default=None)
        if worker is None:
            return None
        gone.note_consumed()
        worker.graphs.move_here(graph.call, before=gone.graphs)
        graph.worker = worker
        return worker


def parts_of(chunk: Chunk) -> Sequence[Part]:
    return [call for _, call in chunk.calls] or chunk.backwards


def item_of(part: Part, position: int = -1, offset: int = -1) -> int | range | None:
    """The number of its item, or of its items; None where it is a bundle, and nobody knows which
    item was running."""
    if not isinstance(part, PackedCall):
        return part.items
    if part.bundle:
        return part.item + offset if position >= 0 and offset >= 0 else None
    return part.item


def fail(chunk: Chunk, part: slice, error: Callable[[Part], BaseException]) -> None:
    """The calls or the gradients in that part of it; nobody runs them again."""
    if chunk.operation is not None:
        for _, call in chunk.calls[part]:
            chunk.operation.deliver(call.index, error(call))
        del chunk.calls[part]
    else:
        for sent in chunk.backwards[part]:
            sent.settle(error_maker(error(sent)))
        del chunk.backwards[part]


def can_be_made(graph: RemoteGraph) -> bool:
    """Whether there are lineages for it and all that it derives from."""
    lineage = graph.lineage
    return can_be_made(lineage.graph) if isinstance(lineage, Backward) else lineage is not None
