"""`Recovery` gives the work that was lost with a worker to other workers. This module runs in the
caller only.

A call can run again while the caller has its inputs, its function and its seed. They stay as long
as the call's graph is needed. So a lost graph is only missing. The worker that gets the graph's
next backward rebuilds the graph right before it.

    forward under way ──► the front of its operation's queue
    backward under way, or waiting ──► another worker, where the graph is missing:
        [Recompute, [RecomputeBackward ...,]] BackwardCall
    a sum of captures' gradients ──► an error for its operation, which requests each part
Guarantees: an item fails only if more than `retries` workers died while they ran it, if it took too
    long more than `timeout_retries` times, or if more than `retries` and more than `IDLE_DEATHS`
    workers died when it was next. Without retries the items before it in the chunk also fail, as do
    all items that a lost node agent had.
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

from mpgrad.autograd.remote_graph import Backward, RemoteGraph, SumRequest
from mpgrad.callbacks import report
from mpgrad.calls.backwards import error_maker
from mpgrad.calls.operations import FailedResult, Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.errors import CallTimeoutError, SharedMemoryError, WorkerDiedError, add_note
from mpgrad.machine.deaths import Death, failing, judged, successor
from mpgrad.machine.queue import CallQueue
from mpgrad.machine.story import (
    BACKWARD_MOVED,
    DIED_AT,
    LOST_WITH,
)
from mpgrad.machine.under_way import Chunk
from mpgrad.scheduling.known_functions import KnownFunctions
from mpgrad.scheduling.lifecycle import Lifecycle
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.system import kills_for_memory

__all__ = ["Recovery"]

GRAPH_LOST = (
    "the graph that backward needs was lost with it, and is only rebuilt with retries (retries: 0)"
)
OVERRAN = "the pool ended it, because another call ran past its timeout ({} s)"
NOT_BEGUN = "the pool ended it, because it did not begin the call within the timeout ({} s)"
SUM_LOST = "the sum of gradients was lost with it"
OUT_OF_MEMORY = (
    "the kernel has killed processes because memory ran out; use fewer workers, smaller items, or "
    "graphs='recompute'"
)


Part = PackedCall | Backward


class Recovery:
    """Blames a call for a worker's death, and gives lost work to other workers."""

    def __init__(
        self,
        workers: Mapping[int, WorkerHandle],
        functions: KnownFunctions,
        settings: Settings,
        life: Lifecycle,
        queue: CallQueue,
        readmit: Callable[[Operation, float], None],
    ) -> None:
        """Take `readmit`, which is called for each operation whose calls a lost worker had."""
        self._workers = workers
        self._functions = functions
        self._retries = settings.retries
        self._timeout_retries = settings.timeout_retries
        self._life = life
        self._queue = queue
        self._readmit = readmit
        self._kills_for_memory = kills_for_memory()
        # calls and backwards that were given to another worker
        self.reruns = 0

    def blame(
        self,
        worker: WorkerHandle,
        code: int | None,
        death: Death,
        now: float,
    ) -> bool:
        """Blame the running call, or else the next one, because it may have killed the worker.

        After more than `retries` deaths or `timeout_retries` time-outs the call fails. Return
        whether there was such a call. If the node agent was lost, the `death` is as old as its last
        report, and without retries all calls that it had been given fail.
        """
        if self._retries == 0 and worker.link.lost:
            return self._fail_all(worker, code, death.chunks, now)
        verdict = judged(worker, death, self._retries, self._timeout_retries, now)
        if verdict is None:
            return False
        accused, is_overdue, fails = verdict
        chunk, position, offset = death.chunks[0], death.position, death.offset
        # A worker that loads a function has no time limit.
        is_known = position >= 0 or worker.link.lost or worker.overdue is not None
        phase = (
            "backward"
            if chunk.operation is None
            else "forward"
            if is_known
            else "loading the function"
        )

        def error(_: Part | None = None) -> BaseException:
            item = item_of(accused, position, offset)
            died = self._death(worker, code, item, phase, accused, is_overdue)
            return told(died, accused)

        # The caller has set the timeout, so this is not a warning.
        level = logging.WARNING if worker.overdue is None else logging.INFO
        report(level, "%s", error())
        if fails and offset >= 0 and has_other_results(accused):
            begun = range(0 if self._retries == 0 else offset, offset + 1)
            for each in begun:
                accused.note_failed(each, FailedResult.with_error(error()))
            accused.deaths, fails = 0, False
        fail(chunk, failing(death, fails, self._retries), error)
        return True

    def _fail_all(
        self, worker: WorkerHandle, code: int | None, chunks: Sequence[Chunk], now: float
    ) -> bool:
        """Fail all calls and backwards, because results may have been on their way.

        Return whether there were any.
        """
        parts = [part for chunk in chunks for part in chunk.parts]

        def error(part: Part) -> BaseException:
            phase = "forward" if isinstance(part, PackedCall) else "backward"
            died = self._death(worker, code, item_of(part), phase, part)
            return told(died, part)

        for part in parts:
            part.deaths += 1
            part.note((now, DIED_AT, worker.number))
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
        is_overdue: bool = False,
    ) -> BaseException:
        """Make the error of a call that fails. It reports how the worker died and how often the
        call was tried. `is_overdue` means that the call took too long."""
        names = (accused.options.function if isinstance(accused, PackedCall) else accused).names
        item, call = names.number(index), names.words(index)
        tried, idle = accused.deaths + accused.timeouts, accused.idle_deaths
        limit = (
            f"timeout_retries: {self._timeout_retries}"
            if is_overdue
            else f"retries: {self._retries}"
        )
        details = [f"the call was tried {'once' if tried == 1 else f'{tried} times'} ({limit})"] * (
            tried > 0
        )
        if idle:
            details.append(
                f"{'a worker' if idle == 1 else f'{idle} workers'} died when the call was next"
            )
        if is_overdue and worker.overdue is not None:
            return CallTimeoutError(
                item, phase, worker.overdue, "; ".join(details), worker.stack, call, worker.number
            )
        if worker.overdue is not None:
            details.append(NOT_BEGUN.format(worker.overdue))
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

    def take_apart(self, worker: WorkerHandle, chunks: list[Chunk], now: float) -> None:
        """Take apart the chunks of a worker that is gone.

        Calls return to their queues. Backwards and requests wait in the backlog until `revive`.
        """
        # The order is reversed, so that the first calls are first in the queue again.
        for chunk in reversed(chunks):
            if chunk.operation is not None:
                calls = [call for _, call in chunk.calls]
                self.reruns += self._queue.put_back(
                    chunk.operation, calls, now, LOST_WITH, worker.number
                )
                self._readmit(chunk.operation, now)
            worker.backlog.put_back(chunk.from_backlog)

    def revive(self, item: Backward | SumRequest, gone: WorkerHandle, now: float) -> bool:
        """Give a backward of a worker that is gone to another worker, which rebuilds the graph.

        A sum is lost. Return False if no other worker has a place.
        """
        # why nothing can run again
        reason = self._life.broken or self._life.ended
        if item.arrived:  # it was cancelled
            pass
        elif reason is not None:
            item.settle(error_maker(reason))
        elif isinstance(item, SumRequest):
            item.settle(
                error_maker(
                    WorkerDiedError(None, "backward", gone.number, gone.exit_code, SUM_LOST)
                )
            )
        elif not item.graph.can_be_made:
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
            item.note((now, BACKWARD_MOVED, worker.number))
            # The sum that these gradients belong to was in the worker that is gone.
            item.apart = item.asked.captures
            worker.backlog.append(item)
        return True

    def _move_elsewhere(self, graph: RemoteGraph) -> WorkerHandle | None:
        """Return the worker of a graph. If it is gone, move the graph to another worker.

        A graph of gradients goes where the graph that it derives from is. Any other goes to the
        worker with the least to do. Return None if no worker has a place.
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
            self._functions.number(lineage.options.function)
            worker = successor(self._workers.values(), gone.device)
        if worker is None:
            return None
        worker.graphs.move_here(graph.call, before=gone.graphs)
        graph.worker = worker
        return worker


def told(error: BaseException, part: Part) -> BaseException:
    """Return the error with a note of what happened to the call or backward."""
    if isinstance(part, PackedCall):
        words = part.options.story.in_words(part.item)
    else:
        # Nothing is known of a backward that was cancelled.
        graph = part.held
        words = "" if graph is None else graph.owner.story.in_words(graph.first_item)
    if words:
        add_note(error, f"what happened to it:\n{words}")
    return error


def item_of(part: Part, position: int = -1, offset: int = -1) -> int | range | None:
    """Return the number of the part's item, or the numbers of its items.

    Return None if the part is a bundle, and it is unknown which item was running.
    """
    if not isinstance(part, PackedCall):
        return part.items
    if part.bundle:
        return part.item + offset if position >= 0 and offset >= 0 else None
    return part.item


def has_other_results(part: Part) -> TypeGuard[PackedCall]:
    """Whether the part is a bundle in which one item may fail alone."""
    return isinstance(part, PackedCall) and bool(part.bundle) and part.options.return_errors


def fail(chunk: Chunk, part: slice, error: Callable[[Part], BaseException]) -> None:
    """Fail the calls or the backwards in that part of the chunk, so that no worker runs them
    again."""
    if chunk.operation is not None:
        for _, call in chunk.calls[part]:
            chunk.operation.deliver(call.index, error(call))
        del chunk.calls[part]
    else:
        for sent in chunk.backwards[part]:
            sent.settle(error_maker(error(sent)))
        del chunk.backwards[part]
