"""`Deliveries` sends workers chunks of the calls and backwards that wait, together with updates.
This module runs in the caller only.

    CallQueue.next_chunks ──► send ──► ChunkWriter ──► transmit ──► link
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from mpgrad.callbacks import report
from mpgrad.machine.queue import NextChunk
from mpgrad.machine.story import BACKWARD_SENT
from mpgrad.memory import owner_of, slab_of
from mpgrad.scheduling.caller_memory import CallerMemory
from mpgrad.scheduling.tracer import Tracer
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import Backwards, Message, Recompute, Record
from mpgrad.wire.tensor_refs import Payload

__all__ = ["Deliveries"]


class Deliveries:
    """Sends the workers their messages. All of them go through `transmit`, which adds updates."""

    def __init__(
        self,
        workers: dict[int, WorkerHandle],
        memory: CallerMemory,
        tracer: Tracer,
    ) -> None:
        self.workers = workers
        self._memory = memory
        self.tracer = tracer
        self._chunk_numbers = itertools.count(1)
        # calls whose graphs were rebuilt
        self.recomputed = 0

    def send(self, next_chunk: NextChunk, now: float) -> None:
        worker, operation, calls = next_chunk
        number = next(self._chunk_numbers)
        if operation is None:
            messages, payload, chunk = worker.writer.backward(number, worker.backlog)
            self.recomputed += sum(map(recomputed_by, messages))
            for backward in chunk.backwards:
                backward.note((now, BACKWARD_SENT, worker.number))
        else:
            messages, payload, chunk = worker.writer.forward(number, operation, calls)
            operation.options.story.shorten()
        worker.add(number, chunk, now)
        if self.tracer.trace is not None:
            self.tracer.sent(worker, number)
        self.transmit(worker, messages, now, payload)

    def record_all(self, is_on: bool, now: float) -> None:
        """Have all workers report for a timeline what they do from now on, or end that."""
        for worker in self.workers.values():
            if worker.ready:
                self.record(worker, is_on, now)

    def record(self, worker: WorkerHandle, is_on: bool, now: float) -> None:
        self.tracer.know(worker)
        self.transmit(worker, [Record(is_on)], now)

    def transmit(
        self,
        worker: WorkerHandle,
        messages: list[Message],
        now: float,
        payload: Payload | None = None,
    ) -> None:
        """Send the messages and all updates.

        A worker that cannot be reached counts as dead when its link is read next.
        """
        self.collect_returns()
        if self._memory.arena.dropped:
            self.unmap(drained(self._memory.arena.dropped))
        # A worker learns of a slab when it is first lent memory there.
        self._memory.arena.made.clear()
        try:
            worker.transmit(messages, payload or Payload(), now)
        except ConnectionError:
            # The worker died. The end of its pipe is read next, and reports that once.
            pass
        except OSError as error:
            # No descriptor is free for the part that has to wait, so the worker's messages are
            # incomplete.
            report(
                logging.WARNING, "a worker is killed, because nothing can be sent to it (%s)", error
            )
            worker.link.kill()

    def collect_returns(self) -> None:
        for address, times in self._memory.foreign_slabs.collect():
            worker = self.workers.get(owner_of(slab_of(address)))
            if worker is not None:
                worker.returns.append((address, times))
        for number in self._memory.foreign_slabs.take_missing():
            if (worker := self.workers.get(owner_of(number))) is not None:
                worker.missing_slabs.append(number)

    def has_updates(self) -> bool:
        """Whether updates wait for the workers."""
        self.collect_returns()
        return any(worker.has_updates for worker in self.workers.values())

    def send_updates(self, quiet_for: float, now: float) -> None:
        """Send waiting updates to workers that have been sent nothing for `quiet_for` seconds."""
        for worker in self.workers.values():
            if worker.has_updates and worker.ready and now - worker.sent_at >= quiet_for:
                self.transmit(worker, [], now)

    def unmap(self, numbers: Sequence[int]) -> None:
        """Forget slabs that their owner dropped, or that died with their owner."""
        for number in numbers:
            self._memory.foreign_slabs.detach(number)
            for worker in self.workers.values():
                worker.lent_slots.unmap(number)


def recomputed_by(message: Message) -> int:
    """Return how many calls run again for the backwards of this message."""
    if not isinstance(message, Backwards):
        return 0
    reruns = [step for call in message.calls for step in call.before if isinstance(step, Recompute)]
    return sum(max(1, len(step.call.bundle)) for step in reruns)
