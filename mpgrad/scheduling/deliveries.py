"""What leaves for the workers: chunks of what waits, and the news that rides with them. Caller's
side.

    backlogs, then the queue ──► give ──► WorkerHandle.forward, backward ──► transmit ──► link
Assumes: called by the scheduling thread.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections.abc import Sequence

from mpgrad.callbacks import report
from mpgrad.memory.addresses import owner_of, slab_of
from mpgrad.scheduling.caller_memory import CallerMemory
from mpgrad.scheduling.notes import Notes
from mpgrad.scheduling.queue import Line
from mpgrad.scheduling.sizes import CHUNKS_UNDER_WAY
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import Backwards, Message, Record, Rerun
from mpgrad.wire.tensor_refs import Payload

__all__ = ["Deliveries"]

HAS_NEWS = operator.attrgetter("has_news")


class Deliveries:
    """What goes to workers goes through `transmit`, and so along with their news."""

    def __init__(
        self, workers: dict[int, WorkerHandle], line: Line, memory: CallerMemory, notes: Notes
    ) -> None:
        self.workers = workers
        self._line = line
        self._memory = memory
        self.notes = notes
        self._chunk_numbers = itertools.count(1)
        self.recomputed = 0  # calls whose graphs were made again

    def feed(self) -> list[WorkerHandle]:
        """Give every worker a chunk before any gets its second. Returns those that are retiring,
        and have nothing to do.

        A second one has to wait for the first, perhaps for long, while another worker starts or
        ends what it does. So it is given where it is known to be short.
        """
        line = self._line
        for depth in range(CHUNKS_UNDER_WAY):
            for worker in self.workers.values():
                if (
                    (line.operations or worker.backlog)
                    and worker.ready
                    and len(worker.under_way.chunks) <= depth
                ):
                    self.give(worker)
        dry = line.take_back(self.workers.values())
        for _ in range(CHUNKS_UNDER_WAY):
            for worker in dry:
                self.give(worker)
        return [
            each
            for each in self.workers.values()
            if each.retiring and each.ready and not each.backlog
        ]

    def give(self, worker: WorkerHandle) -> None:
        """Send `worker` a chunk of what waits; backwards first, because somebody waits for them."""
        if worker.backlog:
            number = next(self._chunk_numbers)
            messages, payload = worker.backward(number)
            self.recomputed += sum(map(recomputed_by, messages))
            self._transmit_chunk(worker, number, messages, payload)
            return
        if (
            worker.retiring or worker.under_way.in_grace
        ):  # it ends that soon, or is ended; nobody knows which
            return
        share = self._line.next_for(worker)
        if share is not None:
            number = next(self._chunk_numbers)
            self._transmit_chunk(worker, number, *worker.forward(number, *share))

    def _transmit_chunk(
        self, worker: WorkerHandle, number: int, messages: list[Message], payload: Payload
    ) -> None:
        if self.notes.recording is not None:
            self.notes.sent(worker, number)
        self.transmit(worker, messages, payload)

    def record(self, worker: WorkerHandle) -> None:
        """For a timeline: have it say what it does from now on."""
        self.notes.know(worker)
        self.transmit(worker, [Record(True)])

    def transmit(
        self, worker: WorkerHandle, messages: list[Message], payload: Payload | None = None
    ) -> None:
        """Send, with all that has to be told. A worker that cannot be reached counts as dead when
        its link is read next."""
        self.collect_returns()
        if self._memory.arena.dropped:
            self.unmap(drained(self._memory.arena.dropped))
        # each worker is told of a slab when it is first lent something there
        self._memory.arena.made.clear()
        try:
            worker.transmit(messages, payload or Payload())
        except ConnectionError:
            pass  # it died; the end of its pipe is read next, and says so once
        except (
            OSError
        ) as error:  # no descriptor is free for what has to wait: what it was sent is not whole
            report(
                logging.WARNING, "a worker is killed, because nothing can be sent to it (%s)", error
            )
            worker.link.kill()

    def collect_returns(self) -> None:
        for address, times in self._memory.lenders.collect():
            worker = self.workers.get(owner_of(slab_of(address)))
            if worker is not None:
                worker.returns.append((address, times))
        for number in self._memory.lenders.take_missing():
            if (worker := self.workers.get(owner_of(number))) is not None:
                worker.missing_slabs.append(number)

    def has_news(self) -> bool:
        """Whether there is something to tell the workers, apart from work."""
        self.collect_returns()
        return any(map(HAS_NEWS, self.workers.values()))

    def tell_news(self, quiet_for: float) -> None:
        """Tell workers, that have been sent nothing for so many seconds, what has waited for a
        message to ride with."""
        now = time.monotonic()
        for worker in self.workers.values():
            if worker.has_news and worker.ready and now - worker.sent_at >= quiet_for:
                self.transmit(worker, [])

    def unmap(self, numbers: Sequence[int]) -> None:
        """Slabs that their owner dropped, or that died with it."""
        for number in numbers:
            self._memory.lenders.detach(number)
            for worker in self.workers.values():
                worker.loans.unmap(number)


def recomputed_by(message: Message) -> int:
    """How many calls run again for the backwards of this message."""
    if not isinstance(message, Backwards):
        return 0
    reruns = [step for call in message.calls for step in call.before if isinstance(step, Rerun)]
    return sum(max(1, len(step.call.bundle)) for step in reruns)
