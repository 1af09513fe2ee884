"""What the parts of a scheduler say to a timeline that is being recorded. Caller's side.

Who does something often asks for `recording` first, once for each chunk or wait; off, it is None and nothing else is done.

Assumes: called by the scheduling thread, but for `recording`, `laps` and `timed`, which any thread uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mpgrad.memory.accelerator import name_of
from mpgrad.scheduling.chunks import Chunk, SentGradients
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.timeline.recording import Chunk as NotedChunk
from mpgrad.timeline.recording import Recording, Worker
from mpgrad.torch_state.private import current_graph_task, when_backward_ends
from mpgrad.wire.frames import Frame
from mpgrad.wire.messages import Collected, Failure, Gradients, Missing, Result, Results
from mpgrad.wire.records import Profiled, Recorded
from mpgrad.wire.tensor_packing import Placed, Together
from mpgrad.wire.tensor_refs import lent

__all__ = ["Notes"]

NOT_BEGUN = -1

T = TypeVar("T")
Laps = Callable[..., None]  # see `no_lap`


def no_lap(kind: str, function: int = 0, items: range | None = None, nbytes: int | None = None) -> None:
    """Nobody records."""


class Notes:
    """Of one pool."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.profiling: set[int] = set()  # workers whose operations are still to come
        self._lock = threading.Lock()
        self._under_way: dict[tuple[int, int], NotedChunk] = {}  # by worker and number
        self._lost: set[tuple[int, int]] = set()  # calls that were begun by a worker that died
        self._backwards: set[int] = set()  # that run
        self._handling: tuple[int, int] | None = None  # since when an answer is, and its bytes

    def begin(self, recording: Recording) -> None:
        """Raises RuntimeError where there is one already."""
        with self._lock:
            if self.recording is not None:
                raise RuntimeError("this pool records a timeline already; end that `with` block first")
            self._under_way.clear()
            self._handling = None
            self._lost.clear()
            self._backwards.clear()
            self.profiling.clear()
            self.recording = recording

    # --- any thread of the caller

    def laps(self) -> Laps:
        """A function that says, of the time since it was last called, what it was used for."""
        recording = self.recording
        if recording is None:
            return no_lap
        began = time.monotonic_ns()

        def lap(kind: str, function: int = 0, items: range | None = None, nbytes: int | None = None) -> None:
            nonlocal began
            began = recording.lap(kind, began, function, items, nbytes)

        return lap

    def timed(self, kind: str, does: Callable[[T], Any]) -> Callable[[T], Any]:
        recording = self.recording
        if recording is None:
            return does

        def timed(given: T) -> Any:
            began = time.monotonic_ns()
            try:
                return does(given)
            finally:
                recording.lap(kind, began)

        return timed

    def waited(self, since: int) -> None:
        """The thread has slept until now, for the scheduling thread."""
        if since and (recording := self.recording) is not None:
            recording.lap("waits for results" if current_graph_task() < 0 else "waits for gradients", since)

    def backward_begins(self) -> None:
        """The backward that runs in this thread is about to send its first gradients; noted when it ends, unless it fails."""
        recording, graph_task = self.recording, current_graph_task()
        if recording is None or graph_task < 0 or graph_task in self._backwards:
            return
        began = time.monotonic_ns()

        def end() -> None:
            self._backwards.discard(graph_task)
            recording.lap("runs backward", began)

        self._backwards.add(graph_task)
        when_backward_ends(end)

    # --- the scheduling thread

    def sent(self, worker: WorkerHandle, number: int, since: int) -> None:
        recording, chunk = self.recording, worker.under_way.chunks.get(number)
        if recording is None or chunk is None or not recording.is_known:
            return
        if worker.number not in recording.workers:
            self.know(worker)
        phase, items, keys, nbytes = contents(chunk)
        again = frozenset(place for place, key in enumerate(keys) if key in self._lost) if self._lost else frozenset[int]()
        function = 0 if chunk.operation is None else chunk.operation.function.number
        now = recording.lap("sends", since, function, nbytes=nbytes)
        noted = NotedChunk(worker.number, number, phase, function, items, again, nbytes, since, now)
        recording.chunks.append(noted)
        self._under_way[worker.number, number] = noted

    def know(self, worker: WorkerHandle) -> None:
        if self.recording is not None:
            started = int(1e9 * worker.hired_at), int(1e9 * worker.ready_at)
            about = Worker(worker.number, worker.pid, name_of(worker.device), worker.link.node, started)
            self.recording.workers[worker.number] = about

    def answered(self, worker: WorkerHandle, message: Recorded, frame: Frame) -> None:
        """The first message of the frame that has the answer."""
        noted = self._under_way.pop((worker.number, message.chunk), None)
        if self.recording is None or noted is None:  # it was sent before the recording began
            return
        noted.answered = time.monotonic_ns()
        noted.answer_bytes = bytes_of(frame)
        noted.began, noted.ended, noted.spans = message.began, message.ended, message.spans
        self._handling = noted.answered, noted.answer_bytes

    def handled(self) -> None:
        """What followed from the frame."""
        if self._handling is not None and self.recording is not None:
            since, nbytes = self._handling
            self.recording.lap("receives", since, nbytes=nbytes)
        self._handling = None

    def profiled(self, worker: WorkerHandle, message: Profiled) -> None:
        self.profiling.discard(worker.number)
        if self.recording is not None:
            self.know(worker)
            self.recording.workers[worker.number].operations = message.operations

    def died(self, worker: WorkerHandle, position: int) -> None:
        """With all that it had; it was at the call at this position of its first chunk."""
        self.profiling.discard(worker.number)
        now = time.monotonic_ns()
        for place, (number, chunk) in enumerate(worker.under_way.chunks.items()):
            noted = self._under_way.pop((worker.number, number), None)
            if noted is not None:
                noted.died = now, position if place == 0 else NOT_BEGUN
                _, _, keys, _ = contents(chunk)
                self._lost.update(keys[: noted.died[1] + 1])


def contents(chunk: Chunk) -> tuple[str, list[int | range], list[tuple[int, int]], int]:
    """Of a chunk: its phase, the items of each call, what tells the calls from others, and the bytes of their tensors."""
    items: list[int | range]
    if chunk.operation is not None:
        function = chunk.operation.function.number
        calls = [call for _, call in chunk.calls]
        items = [call.item if call.items == 1 else range(call.item, call.item + call.items) for call in calls]
        return "forward", items, [(function, call.item) for call in calls], sum(call.nbytes for call in calls)
    if chunk.captures is not None:
        return "sums", [], [], 0
    keys = [(-sent.graph_task, sent.what.graph.call) for sent in chunk.gradients]
    return "backward", [sent.what.items for sent in chunk.gradients], keys, sum(map(gradient_bytes, chunk.gradients))


def gradient_bytes(sent: SentGradients) -> int:
    grads = sent.what.grads
    if isinstance(grads, Together):
        return grads.nbytes
    return sum(each.nbytes for each in grads if isinstance(each, Placed))


def bytes_of(frame: Frame) -> int:
    """Of tensors and small results, in the frame and in shared memory."""
    nbytes = len(frame.payload)
    for message in frame.messages:
        if isinstance(message, Results):
            for outcome in message.outcomes:
                if isinstance(outcome, Result):
                    nbytes += sum(ref.nbytes for refs in (outcome.tensors, outcome.gradients or ()) for ref in lent(refs))
        elif isinstance(message, Gradients | Collected):
            found = message.outcomes if isinstance(message, Gradients) else [message.grads]
            nbytes += sum(ref.nbytes for refs in found if not isinstance(refs, Failure | Missing) for ref in lent(refs))
    return nbytes
