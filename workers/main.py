"""This module contains a worker's loop, and its entry points for each place where it can run: its
own process, or a thread of the parent. It runs in workers.

    serve ──► begin ──► Worker ◄── frames
    requests   Forward, Backwards, Collect ─► Runner ─► Results, Gradients, CollectedSums
    updates    Define, Forget ─► FunctionTable             Release ─► GraphTable
               ReturnedSlots, NewSlab ... ─► WorkerMemory
               Follow ─► FOLLOWER
    timelines  Record ─► ChunkTrace, with each answer
Guarantees: every request is answered once, whatever the task raises. A task's exception ends the
    task, not the worker.
Assumes: one thread calls `handle`. With engine "inline" it may do so within `handle`, because a
    task may use the pool. In a process the only other thread is that of `EarlyAnswers`. The process
    dies with the process that made it: the kernel kills it or, if the kernel cannot (`PORTABLE`),
    it ends at its next read, at the end of the pipe.

A worker is not one of multiprocessing's processes. But a task may start processes, connect to a
manager or make shared memory. For this, a worker has the same state as such a process: the caller's
authentication key, interpreter, start method and resource tracker, and a name and a number.
`workers.ending` ends it.

The tracker is the caller's, because other processes may use a block that a task makes. If the block
is never unlinked, it must be removed with the program, not with a worker. Most programs never need
a tracker. So a worker requests it (`engines.launch.SharedTracker`) when multiprocessing first reads
its descriptor:

    a task makes a block ──► register ──► _fd ──► ask ═══ caller: getfd, which starts a tracker if
                                                          necessary
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any, NoReturn

import torch

from mpgrad.environment import FILTERS, FOLLOWER, PLACE, TaskFilters
from mpgrad.memory import OFFSET_MASK
from mpgrad.pickling import classes
from mpgrad.pickling.modules import PLACED, run_initializer
from mpgrad.pickling.reducers import share_loaded_scripts
from mpgrad.system import PORTABLE, receive_descriptors, thread_variables
from mpgrad.torch_state.modes import begin_as_new
from mpgrad.wire.agent_messages import LackingMemory, ProgressRecord, ProgressRecordLocation
from mpgrad.wire.frames import Channel, Frame, Link, drained
from mpgrad.wire.messages import (
    Backwards,
    ChunkTrace,
    Collect,
    Define,
    DirectTransfer,
    DroppedSlabs,
    Follow,
    Forget,
    Forward,
    Gradients,
    Message,
    MissingSlabs,
    NewSlab,
    ReadyReport,
    Record,
    Release,
    Results,
    ReturnedSlots,
    SlotTrial,
    Span,
    Start,
    StartFailure,
    Stop,
)
from mpgrad.wire.tensor_refs import Payload
from mpgrad.workers import ending
from mpgrad.workers.console import Outlet, TaskWarnings, failure, register_crash_traceback
from mpgrad.workers.early import EarlyAnswers
from mpgrad.workers.functions import FunctionTable, noting_those_of_initializer
from mpgrad.workers.graphs import CHECKPOINTS, ERRORS, HOOKS, GraphTable
from mpgrad.workers.memory import MemoryMonitor, WorkerDevice, WorkerMemory, worker_device
from mpgrad.workers.run import ProgressWriter, Runner

__all__ = [
    "Worker",
    "become_child",
    "begin",
    "refuse_and_exit",
    "serve",
    "serve_in_process",
    "serve_spawned",
    "share_tracker",
]

PR_SET_PDEATHSIG = 1
LIVES: list[socket.socket] = []  # kept open as long as this process lives


class Worker:
    """Passes each message to the part that handles it, and sends the answers."""

    def __init__(
        self,
        number: int,
        link: Link,
        graphs: GraphTable,
        worker_device: WorkerDevice,
        filters: TaskFilters,
    ) -> None:
        self._link = link
        self._worker_device = worker_device
        self.before_answer: Callable[[], None] = lambda: None
        self._memory = memory = WorkerMemory(number, link, worker_device)
        self._progress = ProgressWriter(memory.arena)
        self.task_warnings = TaskWarnings(filters)
        self._functions = functions = FunctionTable(memory, worker_device)
        self.early = EarlyAnswers(self._send_early)
        self._runner = runner = Runner(
            functions, graphs, memory, self._progress, self.task_warnings, worker_device, self.early
        )
        self._records = False  # whether the caller records a timeline
        self._requests: dict[type[Any], Callable[[Any, memoryview], tuple[Message, Payload]]] = {
            Forward: runner.forward,
            Backwards: runner.backward,
            Collect: runner.collect,
        }
        self._news: dict[type[Any], Callable[[Any], None]] = {
            Follow: lambda message: FOLLOWER.follow(message.environment),
            Define: self._define,
            Forget: functions.forget,
            Release: graphs.forget,
            ReturnedSlots: memory.take_back,
            NewSlab: memory.attach,
            DroppedSlabs: memory.detach,
            MissingSlabs: memory.tell_again,
            LackingMemory: memory.note_lacking,
            DirectTransfer: worker_device.go_direct,
            SlotTrial: lambda message: self._send(memory.try_out(message)),
            Record: self._record,
        }

    def announce(self, pid: int) -> None:
        if not self._link.shares_memory:  # the agent reads the record for the caller
            here = ProgressRecordLocation(
                self._progress.address & OFFSET_MASK, 8 * ProgressRecord.COUNT
            )
            self._link.send([here], (), [self._progress.descriptor])
        self._send(ReadyReport(pid, self._progress.address))

    def handle(self, frame: Frame) -> None:
        turn = self.early.turn
        turn.acquire()
        try:
            self._handle(frame)
        finally:
            # with engine "inline", an interrupt may have come before the turn was taken again
            with contextlib.suppress(RuntimeError):
                turn.release()

    def _handle(self, frame: Frame) -> None:
        self._worker_device.arrive()
        for message in frame.messages:
            if type(message) in self._requests:
                self._answer(message, frame.payload)
            else:
                self._news[type(message)](message)
        # returned slots are sent now, because the next answer may come much later
        if type(frame.messages[-1]) not in self._requests and (
            returns := self._memory.take_returns()
        ):
            self._link.send([ReturnedSlots(returns)])

    def _define(self, message: Define) -> None:
        with self._progress.loading():
            self._functions.define(message)

    def _answer(self, message: Any, payload: memoryview) -> None:
        runner = self._runner
        outer = runner.spans, runner.answer
        spans: list[Span] | None = [] if self._records else None
        runner.spans = spans
        began = time.monotonic_ns()
        try:
            answered, outgoing = self._requests[type(message)](message, payload)
        finally:
            runner.spans, runner.answer = outer
        if self.early.error is not None:
            raise self.early.error
        recorded = []
        if spans is not None and self._records:
            done = runner.done if isinstance(answered, (Results, Gradients)) else 0
            recorded.append(ChunkTrace(message.chunk, done, began, time.monotonic_ns(), spans))
        self.before_answer()
        self._send(answered, outgoing.parts, recorded)

    def _send_early(self) -> bool:
        """Send the results of the running chunk so far. Return whether there were any.

        An unfinished line of printed text waits for the chunk's end, because another call has
        begun.
        """
        found = self._runner.take_early()
        if found is not None:
            answered, outgoing = found
            self._send(answered, outgoing.parts)
        return found is not None

    def _record(self, message: Record) -> None:
        """Start or stop recording. With engine "inline", this does not affect the running chunk."""
        self._records = message.on

    def _send(
        self, answer: Message, parts: Sequence[bytes] = (), recorded: Sequence[ChunkTrace] = ()
    ) -> None:
        """Send an answer, with messages about memory."""
        self._memory.announce_slabs()
        messages: list[Message] = []
        if returns := self._memory.take_returns():
            messages.append(ReturnedSlots(returns))
        messages += recorded
        messages.append(answer)
        if missing := self._memory.take_missing():
            messages.append(MissingSlabs(missing))
        if dropped := drained(self._memory.arena.dropped):
            messages.append(DroppedSlabs(dropped))
        self._link.send(messages, parts)


# --- entry points


def serve(end: socket.socket, number: int, in_process: bool = False) -> bool:
    """Answer frames until `Stop` or the end of the link. The caller's side has the other end of the
    socket. Return whether the end of the process waits for threads and processes of tasks."""
    link = Channel(end, blocking=True)
    outlet = worker = None
    setting = contextlib.ExitStack()
    try:
        first = link.receive()
        assert first is not None
        start = first.messages[0]
        assert isinstance(start, Start)
        if start.remote:
            link.lend_by_value()
        if in_process:
            register_crash_traceback(link)  # first, so that a crash of what follows has a stack
            settle(start, number)
            outlet = Outlet(link, start.log_levels)
        begin_as_new(is_process=in_process)
        if in_process:
            ending.begin()
        worker = begin(number, link, start, setting, in_process)
        if outlet is not None and worker is not None:
            # the parent's filters apply to the warnings of tasks, as in a serial loop
            worker.task_warnings.watch()
            worker.before_answer = outlet.flush
            outlet.turn = worker.early.turn
            os.register_at_fork(before=worker.early.stop)
        if worker is not None:
            worker.early.is_on = True
        while worker is not None and (frame := link.receive()) is not None:
            last = frame.messages[-1]
            if type(last) is Stop:
                if in_process and not last.waits:
                    ending.leave_children()
                return last.waits
            worker.handle(frame)
            del frame  # it would pin the payload while the worker waits for the next frame
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    finally:
        if worker is not None:
            worker.early.stop()
        setting.close()
        if outlet is not None:
            outlet.close()
        link.close()
    return False


def begin(
    number: int,
    link: Link,
    start: Start,
    setting: contextlib.ExitStack | None = None,
    in_process: bool = False,
) -> Worker | None:
    """Run the initializer and make the worker, and report over the link whether that succeeded. The
    worker's device is entered in `setting`, for the life of the worker. `in_process` means that the
    worker has its own process."""
    device, phase = WorkerDevice(), "initializer"
    filters = FILTERS if in_process else TaskFilters()
    try:
        if setting is not None:
            device = setting.enter_context(worker_device(start.device, number))
        (initializer, initargs), names, functions = classes.loads_initializer(start.initializer)
        if initializer is not None:
            with noting_those_of_initializer(), filters:
                run_initializer(initializer, initargs, functions, names)
        if in_process:  # a task may have a pool whose workers are threads
            FOLLOWER.settle()
        phase = "start"
        graphs = GraphTable(start.graph_bytes, MemoryMonitor() if start.spares_memory else None)
        # raises if there is not enough shared memory
        worker = Worker(number, link, graphs, device, filters)
    except BaseException as error:
        link.send([StartFailure(failure(error, phase))])
        return None
    worker.announce(os.getpid())
    return worker


def serve_in_process(
    end: socket.socket,
    number: int,
    parent_pid: int | None,
    tracker: socket.socket | None = None,
    life: socket.socket | None = None,
) -> NoReturn:
    """Run `serve` in a process that runs nothing else, and end the process. `parent_pid` is its
    parent, or None if that is unknown.

    The process requests a resource tracker from the caller through `tracker`. It ends when the
    other end of `life` is closed.
    """
    status, waits = 1, False
    ending.forget_exit_handlers()
    try:
        die_with(parent_pid)
        if life is not None:
            die_with_end(life)
        if tracker is not None:
            share_tracker(tracker)
        PLACE.in_worker = True
        # Ctrl-C signals the whole process group, but only the parent handles it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        waits = serve(end, number, in_process=True)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        ending.end(status, waits)


def refuse_and_exit(end: socket.socket, error: Exception) -> NoReturn:
    """Report in the worker's process that its start has failed, and exit."""
    link = Channel(end, blocking=True)
    # an error means that the parent is dead
    with contextlib.suppress(EOFError, ConnectionError):
        link.receive()  # the `Start`
        link.send([StartFailure(failure(error, "start"))])
    os._exit(1)


def serve_spawned(descriptor: int, number: int, tracker: int) -> NoReturn:
    """Run `serve_in_process` in its own program, which has inherited its end of the pipe."""
    end = socket.socket(fileno=descriptor)
    # a program that a call starts would otherwise keep it open after this program's end
    end.set_inheritable(False)
    serve_in_process(end, number, None, socket.socket(fileno=tracker))


def settle(start: Start, number: int) -> None:
    """Make this process look like the parent to the code that will run in it."""
    PLACE.importing = start.importing
    become_child(start.preparation, number)
    environment = start.environment
    if start.remote:  # this machine has its own state, but may have a folder with the same name
        sys.path[:] = merged(sys.path, environment.paths)
        sys.argv[:] = environment.arguments
        if environment.directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(environment.directory)
    FOLLOWER.take_over(environment, elsewhere=start.remote)
    os.environ.update(thread_variables(start.threads))  # for libraries that are loaded later
    torch.set_num_threads(start.threads or 1)
    classes.follow_the_caller()
    share_loaded_scripts()
    PLACED.begin()
    CHECKPOINTS.watch()
    ERRORS.watch()
    HOOKS.watch()


def merged(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Return this machine's module paths, followed by the caller's paths that exist here."""
    return [*ours, *(each for each in theirs if each not in ours and os.path.exists(each))]


def die_with(parent_pid: int | None) -> None:
    """Have the kernel kill this process when its parent dies, even if it is busy."""
    if PORTABLE:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # the parent died before this process called prctl
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_with_end(life: socket.socket) -> None:
    """Have the kernel kill this process when the other end of `life` is closed. Nothing is ever
    sent through `life`."""
    if PORTABLE:
        return
    LIVES.append(life)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)  # instead of SIGIO
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it was already closed before
        os._exit(1)


# --- as a child of multiprocessing


class CallerTracker(resource_tracker.ResourceTracker):
    """Fetches the descriptor of the caller's tracker when it is first read. If no answer comes,
    multiprocessing starts another tracker."""

    asks: socket.socket

    @property
    def _fd(self) -> int | None:
        if vars(self).get("_fd") is None:
            vars(self)["_fd"] = asked(self.asks)
        found: int | None = vars(self)["_fd"]
        return found

    @_fd.setter
    def _fd(self, descriptor: int | None) -> None:
        vars(self)["_fd"] = descriptor


def asked(where: socket.socket) -> int | None:
    """Request a tracker's descriptor. Return None if no answer comes or there is no tracker."""
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs:
                socket.send_fds(where, [b"?"], [theirs.fileno()])
            _, descriptors = receive_descriptors(ours, 1, 1)
        except OSError:
            return None
    return descriptors[0] if descriptors else None


def share_tracker(where: socket.socket) -> None:
    """Have this process request its resource tracker through this socket."""
    where.set_inheritable(False)
    tracker = resource_tracker._resource_tracker
    CallerTracker.asks = where
    tracker.__class__ = CallerTracker


def become_child(preparation: Mapping[str, Any] | None, number: int) -> None:
    """Take over the state that multiprocessing gives its children. `preparation` comes from the
    caller (`environment.preparation`), or is None on another machine."""
    process = multiprocessing.current_process()
    process.name = f"mpgrad-worker-{number}"  # appears in log records
    if not process._identity:
        process._identity = (number,)  # tasks distinguish workers by this
    if preparation is None:
        return
    process.authkey = preparation["authkey"]
    multiprocessing.set_executable(preparation["executable"])
    if preparation["start_method"] is not None:
        multiprocessing.set_start_method(preparation["start_method"], force=True)
    if preparation["log_to_stderr"]:
        multiprocessing.util.log_to_stderr()
    logging.getLogger("multiprocessing").setLevel(preparation["log_level"])
