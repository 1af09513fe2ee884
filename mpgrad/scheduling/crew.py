"""The parent's side of its workers: what each one has been sent, lent and told. Decisions are the scheduler's.

Guarantees: methods that others than the scheduler's thread call (`send_later`, the deques of news) only append.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpgrad.autograd.remote_graph import Order, Promise, RemoteGraph, forget_oldest
from mpgrad.calls.homes import GradientReply
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall, SharedFunction
from mpgrad.memory.arena import Borrowed, Slot, slab_of
from mpgrad.pickling.state import Recent, State
from mpgrad.torch_state.modes import Modes
from mpgrad.torch_state.vmap_levels import Level
from mpgrad.tracebacks import shown_stack
from mpgrad.wire.frames import Pipe, drained, send_slabs
from mpgrad.wire.messages import (
    Backward,
    BackwardCall,
    Collect,
    Define,
    Forget,
    Forward,
    ForwardCall,
    Message,
    ModulesState,
    Progress,
    Rederive,
    Release,
    Rerun,
    Returned,
    SlabsGone,
)
from mpgrad.wire.tensor_packing import Payload, Placed, Together
from mpgrad.wire.tensor_refs import TensorRef

__all__ = ["CaptureRequest", "Chunk", "Differentiation", "Doom", "SentGradients", "Worker"]


MOST_CALLS = 256  # in one chunk
MOST_PAYLOAD = 1 << 20  # bytes of small tensors in one chunk
MERCY = 0.2  # seconds for a call that was interrupted: most end by themselves, and the worker's graphs need not be made again


class Differentiation(NamedTuple):
    """A backward of one call: also the recipe of the graph of its gradients."""

    graph: RemoteGraph
    order: Order
    number: int | None  # of the graph of the gradients, where there is to be one
    grads: Sequence[Placed | Promise] | Together  # all parts of all gradients; promises, if any, until it is sent
    parts: list[int]  # how many each has
    modes: Modes

    @property
    def is_last(self) -> bool:
        """Unless it fails nothing is left of the graph, which could be made again: so what is dead of it need not be kept."""
        order = self.order
        return order.whole and not (order.keep or order.create) and isinstance(self.graph.recipe, PackedCall)

    @property
    def items(self) -> int | range:
        """Of the item, or of those of a bundle to whose results gradients have come."""
        return self.graph.given([count or None for count in self.parts])


class SentGradients:
    """A backward on its way to the worker that keeps the graph, or that makes it again."""

    __slots__ = ("again", "deaths", "idle_deaths", "reply", "timeout", "what")

    def __init__(self, what: Differentiation, reply: GradientReply, timeout: float | None, again: bool) -> None:
        self.what = what
        self.reply = reply
        self.timeout = timeout
        self.again = again  # it was sent before, and may have freed its graph; that is no mistake of the caller's
        self.deaths = 0  # of workers that ran it
        self.idle_deaths = 0  # of workers that had it next

    @property
    def task(self) -> int:
        return self.what.order.task

    def set_apart(self) -> None:
        """Its captures' gradients come with the reply: the sum that they were to be part of is with another worker."""
        if self.what.order.captures and not self.what.order.apart:
            self.what = self.what._replace(order=self.what.order._replace(apart=True))
            self.reply.apart = True


class CaptureRequest(NamedTuple):
    function: int
    task: int | None  # None: of the eager backwards
    levels: tuple[Level, ...]
    timeout: float | None
    reply: GradientReply


class Chunk(NamedTuple):
    """What a worker has been sent and has not answered: calls of an operation, backwards, or a request for captures."""

    operation: Operation | None
    calls: list[tuple[int, PackedCall]]  # with the call's number
    gradients: list[SentGradients]
    captures: CaptureRequest | None
    timeout: float | None  # of each call, in seconds

    def fail_replies(self, error: BaseException) -> None:
        for sent in self.gradients:
            sent.reply.fail(error)
        if self.captures is not None:
            self.captures.reply.fail(error)

    def wanted(self) -> list[bool]:
        """Of each call or backward: whether anybody waits for it."""
        if self.operation is not None:
            return [call.index < self.operation.limit for _, call in self.calls]
        requests: list[SentGradients | CaptureRequest] = [*self.gradients]
        if self.captures is not None:
            requests.append(self.captures)
        return [not each.reply.arrived for each in requests]


class Doom(NamedTuple):
    """A worker has to end by the `moment`, because of the call that it was at."""

    moment: float  # on the clock of time.monotonic
    begun: tuple[int, float]  # see `Worker.begun`


class Worker:
    def __init__(self, number: int, channel: Pipe, device: int = 0) -> None:
        self.number = number
        self.channel = channel
        self.device = device  # its code
        self.direct = device == 0  # it and we can read each other's slots on its device
        self.ready = False
        self.retiring = False  # takes no new calls: it has done as many as one worker may
        self.is_last = False  # when it has ended no other will make again what is missing
        self.gone: BaseException | None = None  # what its graphs answer after its end
        self.exit_code: int | None = None
        self.overdue: float | None = None  # the timeout of the call for which it was killed
        self.doomed: Doom | None = None  # it has been told to end, for that call
        self.last_words: int | None = None  # our end of the pipe that it writes its stack into, should it crash
        self.stack = ""  # what came of it
        self.unreadable = ""  # why its answer could not be read, for which it was killed
        self.pid = -1
        self.progress: memoryview | None = None  # of int64, see `Progress`
        self.busy_since = 0.0  # when its first chunk under way became the first
        self.calls_done = 0
        self.kept: set[int] = set()  # graphs, by call
        self.graph_bytes = 0  # that they take there, where it is measured
        self.missing: set[int] = set()  # graphs that are to be made there when they are wanted
        self.freed: set[int] = set()  # graphs whose backward was not to keep them
        self.spent: set[int] = set()  # those of them that are missing because nothing was left of them
        self.backlog: deque[SentGradients | CaptureRequest] = deque()
        self.under_way: dict[int, Chunk] = {}  # by number, in the order sent, which is that of the answers
        self.given_up: set[int] = set()  # chunks under way with a part for which somebody waited who was interrupted
        self.end_at = math.inf  # when it is ended, should it be at such a part then, on the clock of time.monotonic
        # of captures' gradients that are added up there: by function, then by backward (None: eager) and levels
        self.sums: dict[int, dict[tuple[int | None, tuple[Level, ...]], None]] = {}
        self.functions: set[int] = set()
        self.codes: set[int] = set()
        self.states: Recent[bool] = Recent()  # of the user's modules, by number
        self.slabs: set[int] = set()
        self._lent: dict[int, tuple[object, int]] = {}  # address -> what has to live, how often it was sent
        self.sent_at = 0.0  # when it was last sent something, on the clock of time.monotonic
        # news, to be sent along with the next message
        self._new_slabs: list[Any] = []
        self.gone_slabs: deque[int] = deque()
        self.returns: deque[tuple[int, int]] = deque()  # address, how often we had received it
        self.releases: deque[int] = deque()
        self.forgotten_functions: deque[tuple[int, int]] = deque()  # with the bytes of their captures
        self.forgotten_codes: deque[int] = deque()

    @property
    def has_news(self) -> bool:
        return bool(self.returns or self.releases or self.forgotten_functions or self.forgotten_codes)

    @property
    def graphs(self) -> int:
        return len(self.kept)

    @property
    def load(self) -> int:
        """How many calls it has been given or is about to be."""
        return len(self.backlog) + sum(len(chunk.calls) + len(chunk.gradients) for chunk in self.under_way.values())

    @property
    def is_done(self) -> bool:
        """Nothing under way, nothing waiting, nothing there that a backward could still need."""
        return not self.sums and self.has_sums_before(0)

    def has_sums_before(self, task: int) -> bool:
        """It would be done, but for sums of earlier backwards."""
        given_up = self.spent if self.is_last else self.missing
        if self.under_way or self.backlog or self.graphs > len(given_up) or self.releases:
            return False
        return all(each is not None and each < task for sums in self.sums.values() for each, _ in sums)

    @property
    def current(self) -> Chunk | None:
        """Its first chunk under way."""
        return next(iter(self.under_way.values()), None)

    def is_at(self, operation: Operation) -> bool:
        current = self.current
        return current is not None and current.operation is operation

    def begun(self) -> tuple[int, float]:
        """The position of the call that it is at, in its first chunk under way, and since when; -1 where it is at none."""
        chunk = next(iter(self.under_way), None)
        progress = self.progress
        if progress is None or progress[Progress.CHUNK] != chunk:
            return -1, self.busy_since
        return progress[Progress.POSITION], max(self.busy_since, progress[Progress.STARTED] / 1e9)

    @property
    def offset(self) -> int:
        """Of the item that it is at, in a bundle."""
        return 0 if self.progress is None else self.progress[Progress.OFFSET]

    def cancel(self, operation: Operation) -> None:
        """Have it leave out what it has not begun of chunks that nobody waits for."""
        if self.progress is None:
            return
        for number, chunk in self.under_way.items():
            if chunk.operation is operation and all(call.index >= operation.limit for _, call in chunk.calls):
                self._call_off(number, self.progress)

    def give_up(self, numbers: Sequence[int]) -> None:
        """Chunks that are not wanted any more, or not as a whole: leave out what can be left out, and end the rest soon."""
        for number in numbers:
            self.given_up.add(number)
            if self.progress is not None and not any(self.under_way[number].wanted()):
                self._call_off(number, self.progress)
        self.look_at_given_up()

    def give_up_backward(self, task: int, error: BaseException) -> None:
        for item in list(self.backlog):
            if item.task == task:
                with contextlib.suppress(ValueError):  # after the end several threads may take from it
                    self.backlog.remove(item)
                item.reply.fail(error)
        numbers = []
        for number, chunk in self.under_way.items():
            of_task = [each for each in (*chunk.gradients, chunk.captures) if each is not None and each.task == task]
            for each in of_task:
                each.reply.fail(error)
            if of_task:
                numbers.append(number)
        self.give_up(numbers)

    def look_at_given_up(self) -> None:
        """What it is at has been given up, or has been answered; or what others wanted of it they want no more."""
        self.given_up.intersection_update(self.under_way)
        if next(iter(self.under_way), None) not in self.given_up:
            self.end_at = math.inf
        elif self.end_at == math.inf:
            self.end_at = time.monotonic() + MERCY

    def call_off_behind(self) -> None:
        """Have it leave out the calls of the chunks behind its first."""
        if self.progress is not None:
            for number in self._behind():
                self._call_off(number, self.progress)

    def take_back_behind(self) -> list[tuple[Operation, list[PackedCall]]]:
        """Those calls, for others. It answers a chunk before it looks whether the next one is called off.

        Assumes: its pipe was drained after they had been called off, and its first chunk has no answer.
        """
        taken = []
        for chunk in self._behind().values() if self.progress is not None else ():
            assert chunk.operation is not None
            taken.append((chunk.operation, [call for _, call in chunk.calls]))
            chunk.calls.clear()
        return taken

    def _behind(self) -> dict[int, Chunk]:
        behind = itertools.islice(self.under_way.items(), 1, None)
        return {number: chunk for number, chunk in behind if chunk.operation is not None}

    @property
    def is_at_wanted(self) -> bool:
        chunk, position = self.current, max(self.begun()[0], 0)
        return chunk is not None and any(chunk.wanted()[position : position + 1])  # there are none where all were taken back

    @property
    def has_others(self) -> bool:
        """Whether there is anything but what has been given up."""
        graphs = self.kept.difference(list(self.releases))
        return bool(graphs or self.backlog or self.sums) or any(any(chunk.wanted()) for chunk in self.under_way.values())

    def note_rest(self, sent: SentGradients) -> None:
        """A backward that was to leave nothing of its graph failed or was not begun: what is left is there, all the same."""
        if sent.what.is_last:
            self.missing.discard(sent.what.graph.call)
            self.spent.discard(sent.what.graph.call)

    def _call_off(self, number: int, progress: memoryview) -> None:
        """In a place that no other chunk under way has: that one, too, must stay called off.

        There is one for each that a process is sent at a time; in the caller's own there may be more of them.
        """
        places = range(Progress.CANCELLED, Progress.COUNT)
        free = [place for place in places if progress[place] not in self.under_way]
        if free and all(progress[place] != number for place in places):
            progress[free[0]] = number

    def unbegun(self) -> list[tuple[Operation, list[tuple[int, PackedCall]], int]]:
        """The calls of chunks, and how many of them at the end it has not begun and can be told not to begin.

        It notes each call that it begins, and looks before each whether the chunk is called off. So it may have looked at one
        more already when we call it off, but not at two: it has run the first of them in between.
        """
        progress = self.progress
        if progress is None:
            return []
        at, position = progress[Progress.CHUNK], progress[Progress.POSITION]
        if at == Progress.BETWEEN or at != progress[Progress.CHUNK]:  # it goes on in this moment
            return []
        found = []
        is_answered = at in self.under_way  # those before it are, though their answers may still be on their way
        for number, chunk in self.under_way.items():
            begun = -1
            if number == at:
                is_answered, begun = False, position
            if not is_answered and chunk.operation is not None and chunk.operation.chunksize is None:
                found.append((chunk.operation, chunk.calls, max(0, len(chunk.calls) - begun - 2)))
        return found

    def call_off(self) -> list[tuple[Operation, list[PackedCall]]]:
        """Take back what `unbegun` counts."""
        if self.progress is None:
            return []
        for number, chunk in self.under_way.items():
            if chunk.operation is not None:
                self._call_off(number, self.progress)
        taken = []
        for operation, calls, count in self.unbegun():  # counted after it can see that it is called off
            if count:
                taken.append((operation, [call for _, call in calls[-count:]]))
                del calls[-count:]
        return taken

    def note_sum(self, function: int, task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self.sums.setdefault(function, {})
        sums[task, levels] = None
        forget_oldest(sums)  # as the worker does

    def forget_sum(self, function: int, task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self.sums.get(function, {})
        sums.pop((task, levels), None)
        if not sums:
            self.sums.pop(function, None)

    def take_leave(self) -> None:
        """It is gone, and holds nothing of ours any more; graphs may refer to it for long."""
        self._lent.clear()
        self.under_way.clear()
        self.progress = None
        if self.last_words is not None:
            self.stack = shown_stack(all_of(self.last_words))
            os.close(self.last_words)
            self.last_words = None

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

    def has_borrowed_from(self, slab: int) -> bool:
        return any(slab_of(address) == slab for address in self._lent)

    def unmap(self, slab: int) -> None:
        if slab in self.slabs:
            self.slabs.discard(slab)
            self.gone_slabs.append(slab)

    # --- what it is sent

    def forward(self, number: int, operation: Operation, calls: list[tuple[int, PackedCall]]) -> tuple[list[Message], Payload]:
        """A chunk of an operation."""
        payload, messages = Payload(), list[Message]()
        function, modes, seed, _ = operation.conditions
        self._define(function, messages)
        sent = [self._forward_call(call, packed, payload) for call, packed in calls]
        messages.append(
            Forward(number, function.number, modes, seed, operation.stop_at_failure, operation.eager, function.ones, sent)
        )
        self.under_way[number] = Chunk(operation, calls, [], None, operation.timeout)
        return messages, payload

    def backward(self, number: int) -> tuple[list[Message], Payload]:
        """A chunk of what waits: backwards under the same modes, or a request for capture gradients."""
        first = self.backlog[0]
        payload, messages = Payload(), list[Message]()
        if isinstance(first, CaptureRequest):
            self.backlog.popleft()
            self.under_way[number] = Chunk(None, [], [], first, first.timeout)
            return [Collect(number, first.function, first.task, first.levels)], payload
        sent: list[SentGradients] = []
        calls: list[BackwardCall] = []
        while self.backlog and len(sent) < MOST_CALLS and payload.nbytes < MOST_PAYLOAD:
            item = self.backlog[0]
            if isinstance(item, CaptureRequest) or item.what.modes != first.what.modes or item.timeout != first.timeout:
                break
            self.backlog.popleft()
            sent.append(item)
            order = item.what.order
            if order.captures and not order.apart:
                self.note_sum(item.what.graph.home.function, order.task, order.levels)
            before = self._before(item.what.graph, payload, messages, item.again)
            item.again = True  # should it be lost with us
            calls.append(self._backward_call(item.what, payload, before))
            if not item.what.order.keep:
                self._note_freed(item.what.graph)
            if calls[-1].last:
                self.missing.add(item.what.graph.call)
                self.spent.add(item.what.graph.call)
        messages.append(Backward(number, first.what.modes, calls))
        self.under_way[number] = Chunk(None, [], sent, None, first.timeout)
        return messages, payload

    def _told(self, state: State) -> ModulesState:
        is_known = self.states.get(state.number) is not None
        self.states.put(state.number, True)
        return ModulesState(state.number, None if is_known else state.pickled, len(state.tensors))

    def _define(self, function: SharedFunction, messages: list[Message]) -> None:
        if function.number in self.functions:
            return
        pickled = None if function.code in self.codes else function.pickled
        state = None if function.state is None else self._told(function.state)
        messages.append(Define(function.number, function.code, pickled, function.block, function.refs, function.gathers, state))
        self.functions.add(function.number)
        self.codes.add(function.code)
        if function.slot is not None:
            self.lend(function.slot.address, function.slot)
        for slot in function.slots:
            self.lend(slot.address, slot)

    def _forward_call(self, number: int, call: PackedCall, payload: Payload) -> ForwardCall:
        tensors = self._pack(call.placed, payload)
        return ForwardCall(number, call.item, call.structure, tensors, call.claimed, call.origin, call.bundle)

    def _backward_call(self, what: Differentiation, payload: Payload, before: Sequence[Rerun | Rederive]) -> BackwardCall:
        order = what.order
        grads = what.grads if isinstance(what.grads, Together) else [part for part in what.grads if isinstance(part, Placed)]
        return BackwardCall(
            what.graph.call,
            order.task,
            order.keep,
            what.is_last,
            order.wanted,
            order.captures,
            order.apart,
            order.levels,
            what.number,
            self._pack(grads, payload),
            what.parts,
            before,
        )

    def _note_freed(self, graph: RemoteGraph) -> None:
        """A graph of gradients is freed together with the one that it derives from: they share nodes."""
        self.freed.add(graph.call)
        if isinstance(graph.recipe, Differentiation):
            self._note_freed(graph.recipe.graph)

    def _before(self, graph: RemoteGraph, payload: Payload, messages: list[Message], again: bool) -> list[Rerun | Rederive]:
        """What makes `graph` again, where it is missing here; or where it was freed, and that does not count."""
        recipe = graph.recipe
        is_here = graph.call in self.kept and graph.call not in self.missing
        if recipe is None or (is_here and not (again and graph.call in self.freed)):
            return []
        is_spent = graph.call in self.spent and not again
        self.kept.add(graph.call)
        for calls in (self.missing, self.freed, self.spent):
            calls.discard(graph.call)
        if isinstance(recipe, Differentiation):
            before = self._before(recipe.graph, payload, messages, again=True)
            return [*before, Rederive(recipe.modes, self._backward_call(recipe, payload, ()))]
        assert isinstance(recipe, PackedCall)
        function, modes, seed, _ = recipe.conditions
        self._define(function, messages)
        return [Rerun(function.number, modes, seed, self._forward_call(graph.call, recipe, payload), is_spent)]

    def _pack(self, placed: Sequence[Placed] | Together, payload: Payload) -> Sequence[TensorRef]:
        if isinstance(placed, Together):
            if placed.holder is not None:
                self.lend(placed.holder.address, placed.holder)
            return payload.add_all(placed)
        for each in placed:
            if each.holder is not None:
                self.lend(each.address, each.holder)
        return payload.add_all(placed)

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
            for calls in (self.kept, self.missing, self.freed, self.spent):
                calls.difference_update(released)
            news.append(Release(released))
        if self.forgotten_functions or self.forgotten_codes:
            forgotten = drained(self.forgotten_functions)
            functions = [number for number, _ in forgotten]
            self.functions.difference_update(functions)
            for function in functions:
                self.sums.pop(function, None)
            news.append(Forget(functions, drained(self.forgotten_codes), sum(nbytes for _, nbytes in forgotten)))
        if news and self.given_up:
            self.look_at_given_up()  # it may have been spared for the sake of what nobody wants any more
        self.sent_at = time.monotonic()
        self.channel.send(news + messages, payload.parts)


def all_of(pipe: int) -> str:
    """What has been written into it, by who is dead."""
    os.set_blocking(pipe, False)  # a process that it forked may hold the other end
    found = b""
    with contextlib.suppress(BlockingIOError):
        while some := os.read(pipe, 1 << 16):
            found += some
    return found.decode(errors="replace")
