"""A worker as the scheduler sees it: what it has been sent, lent and told. Caller's side; decisions are the scheduler's.

Guarantees: other threads append to the backlog and the deques of news, and read; until the end they change nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import NamedTuple

from mpgrad.autograd.remote_graph import Backward
from mpgrad.calls.homes import SumRequest, error_maker
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.engines.kinds import WorkerLink
from mpgrad.scheduling.chunk_writer import Chunk, ChunkWriter
from mpgrad.scheduling.graph_ledger import GraphLedger, Loans, SumLedger
from mpgrad.scheduling.under_way import UnderWay
from mpgrad.system import Kept
from mpgrad.tracebacks import shown_stack
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import Forget, Message, Release, Returned, SlabsGone, SlabsMissing
from mpgrad.wire.pipe import UnreadableFrame, last_words_in
from mpgrad.wire.tensor_refs import Payload

__all__ = ["Doom", "WorkerHandle"]


class Doom(NamedTuple):
    """A worker has to end by the `moment`, because of the call that it was at."""

    moment: float  # on the clock of time.monotonic
    begun: tuple[int, float]  # see `UnderWay.begun`


class WorkerHandle:
    """What the scheduler knows of a worker, and what waits for it. Outlives the worker, for graphs that refer to it."""

    def __init__(self, number: int, link: WorkerLink, device: int = 0) -> None:
        self.number = number
        self.link = link
        self.device = device  # its code
        self.direct = device == 0  # it and we can read each other's slots on its device
        self.ready = False
        self.retiring = False  # see `send_home`
        self.is_last = False  # when it has ended no other will make again what is missing
        self.pid = -1
        self.ready_at = 0.0  # since when it is, on the clock of time.monotonic
        self.calls_done = 0

        self.gone: BaseException | None = None  # what its graphs answer after its end
        self.exit_code: int | None = None
        self.overdue: float | None = None  # the timeout of the call for which it was killed
        self.doomed: Doom | None = None  # it has been told to end, for that call
        self.last_words: Kept | None = None  # our end of the pipe that it writes its stack into, should it crash
        self.stack = ""  # what came of it
        self.garbled: UnreadableFrame | None = None  # what was wrong with what it sent, for which it was killed
        self.unreadable = ""  # why its answer could not be read, for which it was killed

        self.graphs = GraphLedger()
        self.sums = SumLedger()
        self.loans = Loans(link)
        self.writer = ChunkWriter(self.graphs, self.sums, self.loans)
        self.backlog: deque[Backward | SumRequest] = deque()
        self.under_way = UnderWay()

        # news, to be sent along with the next message
        self.sent_at = 0.0  # when that was last, on the clock of time.monotonic
        self.returns: deque[tuple[int, int]] = deque()  # address, how often we had received it
        self.missing_slabs: list[int] = []  # of the worker's, that we could not receive
        self.releases: deque[int] = deque()
        self.spent: deque[int] = deque()  # calls whose backward was an eager one, and has come
        self._emptied: list[int] = []  # of these, those that were noted
        self.forgotten_functions: deque[tuple[int, int]] = deque()  # with the bytes of their captures
        self.forgotten_codes: deque[int] = deque()

    @property
    def name(self) -> str:
        """For errors."""
        return f"{self.number} on node {self.link.node}" if self.link.node else str(self.number)

    @property
    def end_in_words(self) -> list[str]:
        """For errors: what is known of its end beside the exit code."""
        garbled = ""
        if self.garbled is not None:
            garbled = f"what it had sent is no message ({self.garbled}); did the function write to descriptors not its own?"
        return [each for each in (self.link.node and f"node: {self.link.node}", self.link.lost, garbled) if each]

    @property
    def busy(self) -> float:
        """The share of the time since it was ready in which it had something under way."""
        now, since = time.monotonic(), self.under_way.since
        seconds = self.under_way.seconds + (max(0.0, now - since) if self.under_way else 0.0)
        return min(1.0, seconds / (now - self.ready_at)) if now > self.ready_at else 0.0

    def send_home(self) -> None:
        """It takes no new calls, and ends when it keeps no graph any more; its successor may have its place at once."""
        self.retiring = self.link.is_leaving = True

    # --- what is left to do

    @property
    def load(self) -> int:
        """How many calls it has been given or is about to be."""
        return len(self.backlog) + sum(len(chunk.calls) + len(chunk.backwards) for chunk in self.under_way.chunks.values())

    @property
    def backwards_left(self) -> int:
        """That it has not answered. Any thread asks."""
        waiting = sum(isinstance(each, Backward) for each in list(self.backlog))
        return waiting + sum(len(chunk.backwards) for chunk in list(self.under_way.chunks.values()))

    @property
    def is_done(self) -> bool:
        """Nothing under way, nothing waiting, nothing there that a backward could still need."""
        return not self.sums and self.has_sums_before(0)

    def has_sums_before(self, graph_task: int) -> bool:
        """It would be done, but for sums of earlier backwards."""
        if self.under_way or self.backlog or self._has_releases or self.graphs.needs_worker(self.is_last):
            return False
        return self.sums.are_before(graph_task)

    @property
    def has_others(self) -> bool:
        """Whether there is anything but what has been given up."""
        graphs = self.graphs.states.keys() - set(self.releases)
        return bool(graphs or self.backlog or self.sums) or any(any(chunk.wanted()) for chunk in self.under_way.chunks.values())

    def give_up_backward(self, graph_task: int, error: BaseException) -> None:
        """All that was sent for the backward with this number; who waits for it gets the error."""
        for item in list(self.backlog):
            if item.graph_task == graph_task:
                with contextlib.suppress(ValueError):  # after the end several threads may take from it
                    self.backlog.remove(item)
                item.settle(error_maker(error))
        self.under_way.give_up_backward(graph_task, error)

    # --- what it is sent

    @property
    def has_news(self) -> bool:
        of_memory = self.returns or self.missing_slabs
        of_graphs = self.releases or self.spent or self._emptied
        return bool(of_memory or of_graphs or self.forgotten_functions or self.forgotten_codes)

    @property
    def _has_releases(self) -> bool:
        return bool(self.releases or self.spent or self._emptied)

    def forward(self, number: int, operation: Operation, calls: list[tuple[int, PackedCall]]) -> tuple[list[Message], Payload]:
        """A chunk of an operation, which is under way from now on."""
        messages, payload, chunk = self.writer.forward(number, operation, calls)
        self._add(number, chunk)
        return messages, payload

    def backward(self, number: int) -> tuple[list[Message], Payload]:
        """A chunk of what waits in the backlog, likewise."""
        messages, payload, chunk = self.writer.backward(number, self.backlog, self.note_spent)
        self._add(number, chunk)
        return messages, payload

    def _add(self, number: int, chunk: Chunk) -> None:
        self.under_way.add(number, chunk)
        if chunk.timeout is not None:
            self.link.limit(number, chunk.timeout)

    def take(self, number: int) -> Chunk:
        """A chunk that is answered."""
        chunk = self.under_way.take(number)
        if chunk.timeout is not None:
            self.link.limit(number, None)
        return chunk

    def transmit(self, messages: list[Message], payload: Payload) -> None:
        """Send `messages` and all news.

        Raises:
            ConnectionError: the worker is gone.
            OSError: what has to wait needs descriptors of its own, and there are none.
        """
        if self.loans.gone_slabs:  # first: one that its owner's death took away may be lent again, for a result that lies there
            self.link.send([SlabsGone(drained(self.loans.gone_slabs))])
        self.link.introduce(self.loans.take_new_slabs())
        news = self._take_news()
        if news and self.under_way.given_up:
            self.under_way.look_at_given_up()  # it may have been spared for the sake of what nobody wants any more
        self.sent_at = time.monotonic()
        self.link.send(news + messages, payload.parts)

    def _take_news(self) -> list[Message]:
        """As messages; what is taken counts as told."""
        news: list[Message] = []
        if self.returns:
            news.append(Returned(drained(self.returns)))
        if self.missing_slabs:
            news.append(SlabsMissing(self.missing_slabs))
            self.missing_slabs = []
        self.note_spent()
        if self._emptied:
            news.append(Release(self._emptied))
            self._emptied = []
        if self.releases:
            released = drained(self.releases)
            self.graphs.forget(released)
            news.append(Release(released))
        if self.forgotten_functions or self.forgotten_codes:
            forgotten = drained(self.forgotten_functions)
            functions = [number for number, _ in forgotten]
            self.writer.forget(functions)
            news.append(Forget(functions, drained(self.forgotten_codes), sum(nbytes for _, nbytes in forgotten)))
        return news

    def note_spent(self) -> None:
        """What other threads have said of eager backwards: their graphs can go."""
        if self.spent:
            calls = drained(self.spent)
            self.graphs.note_spent(calls)
            self._emptied += calls

    # --- its end

    def take_leave(self) -> None:
        """It is gone; graphs may refer to it for long."""
        self.loans.end()
        self.under_way.end()
        if self.last_words is not None:
            if self.last_words.is_ours:
                self.stack = shown_stack(last_words_in(self.last_words.number))
            self.last_words = None
        elif self.link.last_words:
            self.stack = shown_stack(self.link.last_words)
