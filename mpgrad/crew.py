"""The parent's side of its workers: what each one has been sent, lent and told. Decisions are the scheduler's.

Guarantees: methods that others than the scheduler's thread call (`send_later`, the deques of news) only append.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from mpgrad.arena import Borrowed, Slab, Slot
from mpgrad.autograd import Order, RemoteGraph
from mpgrad.batching import Level
from mpgrad.carrier import Payload, Placed
from mpgrad.channel import Pipe, drained, send_slabs
from mpgrad.homes import GradientReply
from mpgrad.messages import Forget, Message, Release, Returned, SlabsGone
from mpgrad.modes import Modes
from mpgrad.operations import Operation, PackedCall

__all__ = ["CaptureRequest", "Chunk", "SentGradients", "Worker"]


class SentGradients(NamedTuple):
    """A backward on its way to the worker that keeps the graph."""

    graph: RemoteGraph
    order: Order
    number: int | None  # of the graph of the gradients, where there is to be one
    grads: list[Placed | None]
    modes: Modes
    reply: GradientReply


class CaptureRequest(NamedTuple):
    function: int
    task: int
    levels: tuple[Level, ...]
    reply: GradientReply


class Chunk(NamedTuple):
    """What a worker has been sent and has not answered: calls of an operation, backwards, or a request for captures."""

    operation: Operation | None
    calls: list[tuple[int, PackedCall]]  # with the call's number
    gradients: list[SentGradients]
    captures: CaptureRequest | None

    def fail_replies(self, error: BaseException) -> None:
        for sent in self.gradients:
            sent.reply.fail(error)
        if self.captures is not None:
            self.captures.reply.fail(error)


class Worker:
    def __init__(self, number: int, channel: Pipe) -> None:
        self.number = number
        self.channel = channel
        self.ready = False
        self.retiring = False  # takes no new calls: it has done as many as one worker may
        self.gone: BaseException | None = None  # what its graphs answer after its end
        self.progress: memoryview | None = None  # two int64 that it writes: its chunk, and the position there
        self.calls_done = 0
        self.graphs = 0
        self.backlog: deque[SentGradients | CaptureRequest] = deque()
        self.under_way: dict[int, Chunk] = {}  # by number, in the order sent, which is that of the answers
        self.functions: set[int] = set()
        self.codes: set[int] = set()
        self.slabs: set[int] = set()
        self._lent: dict[int, tuple[object, int]] = {}  # address -> what has to live, how often it was sent
        # news, to be sent along with the next message
        self._new_slabs: list[Slab] = []
        self.gone_slabs: deque[int] = deque()
        self.returns: deque[tuple[int, int]] = deque()  # address, how often we had received it
        self.releases: deque[int] = deque()
        self.forgotten_functions: deque[tuple[int, int]] = deque()  # with the bytes of their captures
        self.forgotten_codes: deque[int] = deque()

    @property
    def has_news(self) -> bool:
        return bool(self.returns or self.releases or self.forgotten_functions or self.forgotten_codes)

    @property
    def is_done(self) -> bool:
        """Nothing under way, nothing waiting, no graph that a backward could still need."""
        return not (self.under_way or self.backlog or self.graphs or self.releases)

    def lend(self, address: int, holder: Slot | Borrowed) -> None:
        """Keep `holder` until the worker has given the address back as often as it was sent."""
        _, times = self._lent.get(address, (None, 0))
        self._lent[address] = holder, times + 1
        if holder.slab.number not in self.slabs:
            self.slabs.add(holder.slab.number)
            self._new_slabs.append(holder.slab)

    def take_back(self, address: int, times: int) -> None:
        holder, sent = self._lent.pop(address)
        if sent > times:  # it is on its way there once more
            self._lent[address] = holder, sent - times

    def unmap(self, slab: int) -> None:
        if slab in self.slabs:
            self.slabs.discard(slab)
            self.gone_slabs.append(slab)

    def transmit(self, messages: list[Message], payload: Payload) -> None:
        """Send `messages` and all news.

        Raises:
            ConnectionError: the worker is gone.
        """
        if self.gone_slabs:  # first: one that its owner's death took away may be lent again, for a result that lies there
            self.channel.send([SlabsGone(drained(self.gone_slabs))])
        new_slabs, self._new_slabs = self._new_slabs, []
        send_slabs(self.channel, new_slabs)
        news: list[Message] = []
        if self.returns:
            news.append(Returned(drained(self.returns)))
        if self.releases:
            released = drained(self.releases)
            self.graphs -= len(released)
            news.append(Release(released))
        if self.forgotten_functions or self.forgotten_codes:
            forgotten = drained(self.forgotten_functions)
            functions = [number for number, _ in forgotten]
            self.functions.difference_update(functions)
            news.append(Forget(functions, drained(self.forgotten_codes), sum(nbytes for _, nbytes in forgotten)))
        self.channel.send(news + messages, payload.parts)
