"""`Tracer` notes the scheduler's events in a timeline that is being recorded. This module runs in
the caller only.

The scheduler's parts look at `trace` first, once for each chunk. If it is None, they do nothing
else.

Assumes: called by the scheduling thread; any thread may call `begin` and `span`. Any thread may
    also set `trace` to None, so the scheduling thread reads it once.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager

from mpgrad.machine.under_way import Chunk
from mpgrad.memory.accelerator import name_of
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.timeline import Trace, TracedCall, TracedChunk, WorkerName
from mpgrad.torch_state.private import NOTHING
from mpgrad.wire.messages import ChunkTrace

__all__ = ["Tracer"]


class Tracer:
    """Notes the events of one pool."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._lock = threading.Lock()
        # by the numbers of the worker and the chunk
        self._under_way: dict[tuple[int, int], TracedChunk] = {}

    def begin(self, trace: Trace) -> None:
        """Begin to record. Raises RuntimeError if the pool records a timeline already."""
        with self._lock:
            if self.trace is not None:
                raise RuntimeError(
                    "this pool records a timeline already; end that `with` block first"
                )
            self._under_way.clear()
            self.trace = trace

    def span(self, kind: str, function: str = "") -> AbstractContextManager[object]:
        """Return a context manager that records what the caller's thread does in a block."""
        trace = self.trace
        return NOTHING if trace is None else trace.span(kind, function)

    # --- the scheduling thread

    def know(self, worker: WorkerHandle) -> None:
        """Note the worker's name and device."""
        # This is read once, because the caller's thread may end the timeline.
        trace = self.trace
        if trace is not None:
            about = WorkerName(worker.number, worker.pid, name_of(worker.device), worker.link.node)
            trace.workers[worker.number] = about

    def sent(self, worker: WorkerHandle, number: int) -> None:
        """Note that a chunk is about to be sent."""
        trace = self.trace
        if trace is not None and trace.is_known:
            phase, calls = contents(worker.under_way.chunks[number])
            traced = TracedChunk(worker.number, phase, calls, time.monotonic_ns())
            trace.chunks.append(traced)
            self._under_way[worker.number, number] = traced

    def answered(self, worker: WorkerHandle, message: ChunkTrace) -> None:
        """Note that a chunk is answered, and the times that the worker reports."""
        traced = self._under_way.pop((worker.number, message.chunk), None)
        # Other chunks were sent before the timeline began, or are answered after its end.
        if traced is not None and self.trace is not None:
            traced.began, traced.ended, traced.spans = message.began, message.ended, message.spans
            traced.answered = time.monotonic_ns()
            # The other calls were taken back, and run elsewhere.
            traced.calls = traced.calls[: message.done]

    def died(self, worker: WorkerHandle) -> None:
        """Note that the worker died with all its chunks."""
        for number in worker.under_way.chunks:
            traced = self._under_way.pop((worker.number, number), None)
            if traced is not None:
                traced.died = time.monotonic_ns()


def contents(chunk: Chunk) -> tuple[str, list[TracedCall]]:
    """Return the phase of a chunk, and its calls."""
    if chunk.operation is not None:
        function = chunk.operation.options.function.names.function
        calls = [call for _, call in chunk.calls]
        return "forward", [
            TracedCall(
                call.item if call.items == 1 else range(call.item, call.item + call.items), function
            )
            for call in calls
        ]
    if chunk.request is not None:
        return "sums", []
    return "backward", [TracedCall(each.items, each.names.function) for each in chunk.backwards]
