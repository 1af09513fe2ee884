"""What the parts of a scheduler say to a timeline that is being recorded. Caller's side.

Whoever does something looks at `recording` first, once for each chunk. If it is None, nothing else
is done.

Assumes: called by the scheduling thread, but for `begin` and `lap`, which any thread uses. Any
    thread may also set `recording` to None, so the scheduling thread reads it once.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext

from mpgrad.memory.accelerator import name_of
from mpgrad.scheduling.chunk_writer import Chunk
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.timeline import NotedCall, NotedChunk, Recording, WorkerName
from mpgrad.wire.messages import Recorded

__all__ = ["Notes"]

NOTHING = nullcontext()


class Notes:
    """Of one pool."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._lock = threading.Lock()
        self._under_way: dict[tuple[int, int], NotedChunk] = {}  # by worker and number

    def begin(self, recording: Recording) -> None:
        """Raises RuntimeError where there is one already."""
        with self._lock:
            if self.recording is not None:
                raise RuntimeError(
                    "this pool records a timeline already; end that `with` block first"
                )
            self._under_way.clear()
            self.recording = recording

    def lap(self, kind: str, function: str = "") -> AbstractContextManager[None]:
        """A block in which this thread of the caller does that."""
        recording = self.recording
        return NOTHING if recording is None else recording.lap(kind, function)

    # --- the scheduling thread

    def know(self, worker: WorkerHandle) -> None:
        recording = self.recording  # read once: the caller's thread may end it
        if recording is not None:
            about = WorkerName(worker.number, worker.pid, name_of(worker.device), worker.link.node)
            recording.workers[worker.number] = about

    def sent(self, worker: WorkerHandle, number: int) -> None:
        """It is about to be."""
        recording = self.recording
        if recording is not None and recording.is_known:
            phase, calls = contents(worker.under_way.chunks[number])
            noted = NotedChunk(worker.number, phase, calls, time.monotonic_ns())
            recording.chunks.append(noted)
            self._under_way[worker.number, number] = noted

    def answered(self, worker: WorkerHandle, message: Recorded) -> None:
        noted = self._under_way.pop((worker.number, message.chunk), None)
        if (
            noted is not None and self.recording is not None
        ):  # else it was sent before that began, or comes after its end
            noted.began, noted.ended, noted.spans = message.began, message.ended, message.spans
            noted.answered = time.monotonic_ns()
            # the others were taken back, and run elsewhere
            noted.calls = noted.calls[: message.done]

    def died(self, worker: WorkerHandle) -> None:
        """With all that it had."""
        for number in worker.under_way.chunks:
            noted = self._under_way.pop((worker.number, number), None)
            if noted is not None:
                noted.died = time.monotonic_ns()


def contents(chunk: Chunk) -> tuple[str, list[NotedCall]]:
    """Of a chunk: its phase, and its calls."""
    if chunk.operation is not None:
        function = chunk.operation.options.function.names.function
        calls = [call for _, call in chunk.calls]
        return "forward", [
            NotedCall(
                call.item if call.items == 1 else range(call.item, call.item + call.items), function
            )
            for call in calls
        ]
    if chunk.request is not None:
        return "sums", []
    return "backward", [NotedCall(each.items, each.names.function) for each in chunk.backwards]
