"""One worker: takes frames, answers what asks for an answer. The same object serves in a process, a thread, or inline.

    requests   Forward, Backwards, Collect ─► Runner ─► Results, Gradients, Collected
    news       Define, Forget ─► FunctionTable             Release ─► GraphTable             Returned, NewSlab ... ─► Loans
               Follow ─► FOLLOWER
    timelines  Record ─► Recorded, with each answer
Guarantees: every request is answered once, whatever the task raises; a task's exception ends the task, not the worker.
Assumes: one thread calls `handle`. Inline that may happen within `handle`: a task may use the pool again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpgrad.environment import FOLLOWER
from mpgrad.memory.addresses import OFFSET_MASK
from mpgrad.wire.asides import Lacking, Whereabouts, WhereaboutsHere
from mpgrad.wire.frames import Frame, drained
from mpgrad.wire.link import Link
from mpgrad.wire.messages import (
    Backwards,
    Collect,
    Define,
    Direct,
    Follow,
    Forget,
    Forward,
    Message,
    NewSlab,
    Ready,
    Record,
    Recorded,
    Release,
    Returned,
    SlabsGone,
    SlabsMissing,
    Span,
    Try,
)
from mpgrad.wire.tensor_packing import Payload
from mpgrad.workers.console import TaskWarnings
from mpgrad.workers.device import Station
from mpgrad.workers.functions import FunctionTable
from mpgrad.workers.graphs import GraphTable
from mpgrad.workers.memory import Loans
from mpgrad.workers.run import Runner, Tracker

__all__ = ["Worker"]


class Worker:
    """The loop: takes each message to the part whose matter it is, and sends what that answers."""

    def __init__(self, number: int, link: Link, graphs: GraphTable, station: Station) -> None:
        self._link = link
        self._station = station
        self.before_answer: Callable[[], None] = lambda: None
        self._loans = loans = Loans(number, link, station)
        self._tracker = Tracker(loans.arena)
        self._warnings = TaskWarnings()
        functions = FunctionTable(loans, station)
        self._runner = runner = Runner(functions, graphs, loans, self._tracker, self._warnings, station)
        self._records = False  # for a timeline
        self._requests: dict[type[Any], Callable[[Any, memoryview], tuple[Message, Payload]]] = {
            Forward: runner.forward,
            Backwards: runner.backward,
            Collect: runner.collect,
        }
        self._news: dict[type[Any], Callable[[Any], None]] = {
            Follow: lambda message: FOLLOWER.follow(message.environment),
            Define: functions.define,
            Forget: functions.forget,
            Release: graphs.forget,
            Returned: loans.take_back,
            NewSlab: loans.attach,
            SlabsGone: loans.detach,
            SlabsMissing: loans.tell_again,
            Lacking: loans.note_lacking,
            Direct: station.go_direct,
            Try: lambda message: self._send(loans.try_out(message)),
            Record: self._record,
        }

    def take_warnings(self) -> None:
        """Send the warnings of tasks to the parent, whose filters say what becomes of them, as they do for a serial loop."""
        self._warnings.watch()

    def announce(self, pid: int) -> None:
        if not self._link.shares_memory:  # for the site: it looks there for the caller
            here = WhereaboutsHere(self._tracker.address & OFFSET_MASK, 8 * Whereabouts.COUNT)
            self._link.send([here], (), [self._tracker.descriptor])
        self._send(Ready(pid, self._tracker.address))

    def handle(self, frame: Frame) -> None:
        self._station.arrive()
        for message in frame.messages:
            if type(message) in self._requests:
                self._answer(message, frame.payload)
            else:
                self._news[type(message)](message)
        # nobody knows when the next answer comes
        if type(message) not in self._requests and (returns := self._loans.take_returns()):
            self._link.send([Returned(returns)])

    def _answer(self, message: Any, payload: memoryview) -> None:
        runner, outer = self._runner, self._runner.spans
        spans: list[Span] | None = [] if self._records else None
        runner.spans = spans
        began = time.monotonic_ns()
        try:
            answered, outgoing = self._requests[type(message)](message, payload)
        finally:
            runner.spans = outer
        recorded = []
        if spans is not None and self._records:
            recorded.append(Recorded(message.chunk, began, time.monotonic_ns(), spans))
        self._send(answered, outgoing.parts, recorded)

    def _record(self, message: Record) -> None:
        """Begin or end; inline, a chunk that is under way goes on as it began."""
        self._records = message.on

    def _send(self, answer: Message, parts: Sequence[bytes] = (), recorded: Sequence[Recorded] = ()) -> None:
        """Send the answer, and along with it what the parent has to know about memory."""
        self.before_answer()
        self._loans.announce_slabs()
        messages: list[Message] = []
        if returns := self._loans.take_returns():
            messages.append(Returned(returns))
        messages += recorded
        messages.append(answer)
        if missing := self._loans.take_missing():
            messages.append(SlabsMissing(missing))
        if dropped := drained(self._loans.arena.dropped):
            messages.append(SlabsGone(dropped))
        self._link.send(messages, parts)
