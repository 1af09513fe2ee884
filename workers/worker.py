"""One worker: takes frames, answers what asks for an answer. The same object serves in a process, a thread, or inline.

    requests   Forward ─► ForwardHandler ─► Results        Backwards, Collect ─► BackwardHandler ─► Gradients, Collected
    news       Define, Forget ─► FunctionTable             Release ─► GraphTable             Returned, NewSlab ... ─► Loans
               Follow ─► FOLLOWER
    timelines  Record ─► Recorder ─► Recorded, with each answer
Guarantees: every request is answered once, whatever the task raises; a task's exception ends the task, not the worker.
Assumes: one thread calls `handle`. Inline that may happen within `handle`: a task may use the pool again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpgrad.environment import FOLLOWER
from mpgrad.memory.addresses import OFFSET_MASK
from mpgrad.wire.asides import Lacking, Whereabouts, WhereaboutsHere
from mpgrad.wire.frames import Frame, Link, drained
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
    Release,
    Returned,
    SlabsGone,
    SlabsMissing,
    Try,
)
from mpgrad.wire.tensor_refs import Payload
from mpgrad.workers.backward import BackwardHandler
from mpgrad.workers.call_run import CallRunner
from mpgrad.workers.forward import ForwardHandler
from mpgrad.workers.functions import FunctionTable
from mpgrad.workers.graphs import GraphTable
from mpgrad.workers.loans import Loans
from mpgrad.workers.station import NO_STATION, Station
from mpgrad.workers.streams import TaskWarnings
from mpgrad.workers.whereabouts import Recorder, Stage, Tracker

__all__ = ["Worker"]


class Worker:
    """The loop: takes each message to the part whose matter it is, and sends what that answers."""

    def __init__(self, number: int, link: Link, graphs: GraphTable, station: Station = NO_STATION) -> None:
        self._link = link
        self._station = station
        self.before_answer: Callable[[], None] = lambda: None
        self._loans = loans = Loans(number, link, station)
        self._tracker = tracker = Tracker(loans.arena)
        self._warnings = task_warnings = TaskWarnings()
        functions = FunctionTable(loans, station)
        runner = CallRunner(loans, tracker, station)
        self._forward = forward = ForwardHandler(functions, graphs, loans, runner, tracker, task_warnings, station)
        self._backward = backward = BackwardHandler(functions, graphs, loans, runner, tracker, task_warnings, station)
        self._requests: dict[type[Any], Callable[[Any, memoryview], tuple[Message, Payload]]] = {
            Forward: forward.answer,
            Backwards: backward.answer,
            Collect: backward.collect,
            Try: loans.try_out,
        }
        self._recorder: Recorder | None = None
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
        has_answered = False
        for message in frame.messages:
            kind = type(message)
            if has_answered := kind in self._requests:
                answer = self._requests[kind]
                if self._recorder is None or kind is Try:
                    answered, payload = answer(message, frame.payload)
                else:
                    answered, payload = self._recorder.timed(answer, message, frame.payload)
                self._send(answered, payload.parts)
            else:
                self._news[kind](message)
        if not has_answered and (returns := self._loans.take_returns()):  # nobody knows when the next answer comes
            self._link.send([Returned(returns)])

    def _record(self, message: Record) -> None:
        """What runs meanwhile, inline, goes on as it began."""
        self._recorder = recorder = Recorder() if message.on else None
        self._forward.new_stage = self._backward.new_stage = Stage if recorder is None else recorder.new_stage

    def _send(self, answer: Message, parts: Sequence[bytes] = ()) -> None:
        """Send the answer, and along with it what the parent has to know about memory."""
        self.before_answer()
        self._loans.announce_slabs()
        messages: list[Message] = []
        if returns := self._loans.take_returns():
            messages.append(Returned(returns))
        if self._recorder is not None:
            messages += self._recorder.take()
        messages.append(answer)
        if missing := self._loans.take_missing():
            messages.append(SlabsMissing(missing))
        if dropped := drained(self._loans.arena.dropped):
            messages.append(SlabsGone(dropped))
        self._link.send(messages, parts)
