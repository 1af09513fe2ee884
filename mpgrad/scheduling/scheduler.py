"""The scheduler: which worker gets what and when, and what follows when one dies. It knows no thread and no selector.

    callers ── admit, send_gradients, release ──► inbox, backlogs ──► [one thread] ◄──► pipes ◄──► workers
    callers ◄── Operation.outcomes, GradientReply ◄─────────────────────────┘
Everything below "the scheduling thread" is called by one thread at a time, so it needs no lock; what comes from other threads
is appended to deques and the thread is woken. `Dispatcher` gives it a thread of its own, `InlineScheduler` the caller's.
Guarantees: each call added to an operation gets one outcome, each backward one reply, a value or an error, also when its
    worker dies or the pool is closed. Values of tasks are not touched: no torch operation runs in the scheduling thread.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.remote_graph import Grads, Order, Promise, RemoteGraph
from mpgrad.autograd.running import call_off_if_interrupted
from mpgrad.calls.device_choice import missing_device
from mpgrad.calls.homes import GradientReply
from mpgrad.calls.operations import Operation
from mpgrad.calls.output import given_again, lowest_log_level, report
from mpgrad.calls.packing import PackedCall, SharedFunction
from mpgrad.errors import InternalError, PoolClosedError, SharedMemoryError, WorkerDiedError
from mpgrad.memory.accelerator import name_of
from mpgrad.memory.arena import OFFSET_MASK, Arena, Lenders, slab_of
from mpgrad.place import working_directory
from mpgrad.scheduling.answers import Answers, failed_again
from mpgrad.scheduling.crew import MERCY, CaptureRequest, Chunk, Differentiation, Doom, SentGradients, Worker
from mpgrad.scheduling.crossing import Crossing
from mpgrad.scheduling.deadlines import Deadlines, overdue_at
from mpgrad.scheduling.function_cache import Codes, Ran
from mpgrad.scheduling.queue import CHUNKS_UNDER_WAY, Line
from mpgrad.scheduling.recovery import Recovery
from mpgrad.scheduling.waiting_calls import Dependents
from mpgrad.stats import PoolStats, WorkerStats, resident_bytes
from mpgrad.torch_state.modes import Modes, current_modes
from mpgrad.torch_state.vmap_levels import Level
from mpgrad.wire.frames import Frame, Pipe, Traffic, drained
from mpgrad.wire.messages import (
    FAREWELL,
    Collected,
    Gradients,
    LastWords,
    Logged,
    Message,
    NewSlab,
    Printed,
    Progress,
    Ready,
    Result,
    Results,
    Returned,
    SlabsGone,
    Start,
    StartFailed,
    Stop,
    Tried,
)
from mpgrad.wire.tensor_packing import Packer, Payload, Placed, Together
from mpgrad.wire.tensor_refs import REQUIRES_GRAD

__all__ = ["Scheduler", "Settings"]

HELD_GRADIENTS = 256  # sent to the workers together, unless somebody waits for one of them
FAILED_STARTS = 3  # in a row, before the pool gives up
STAFF_GAP = 0.25  # seconds between two attempts to start workers that the system refuses
FAREWELL_PATIENCE = 0.5  # seconds for a worker whose call takes too long, to leave its stack and end
STAFF_PATIENCE = 2.0  # seconds of such attempts, before a pool without any worker gives up
INSIDE = "inside the with block (with mpgrad.Pool() as pool: ...)"


class Forks:
    """Counts how often this process is a forked child of another: cheaper to ask than the system for the pid."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.count += 1


FORKS = Forks()


class Settings(NamedTuple):
    """What every worker of a pool starts with."""

    workers: int
    initializer: bytes  # pickle of (function or None, arguments)
    threads: int  # intra-op
    calls: int | None  # after which a worker is replaced
    retries: int  # of a call whose worker died; 0: what is lost is lost
    graph_bytes: int | None  # of graphs in each worker; beyond, they are dropped and made again
    eager: bool  # backwards of losses are run right after their forwards
    devices: tuple[int, ...] | None = None  # the code of each worker's device
    in_process: bool = False  # workers on devices are threads of this process

    @property
    def recoverable(self) -> bool:
        """Whether calls are kept as long as their graphs, to be run again."""
        return self.retries > 0 or self.graph_bytes is not None or self.eager


class Scheduler(ABC):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._forks = FORKS.count
        self.traffic = Traffic()
        self.arena = Arena(0)
        self.lenders = Lenders(self.nudge)
        self._crossing = Crossing(settings.devices, settings.in_process) if settings.devices is not None else None
        self.packer = Packer(self.arena, self.lenders.find, settings.recoverable, self._crossing)
        self.copying_packer = Packer(self.arena, None, settings.recoverable, self._crossing)
        self._workers: dict[int, Worker] = {}
        self._worker_numbers = itertools.count(1)
        self._call_numbers = itertools.count(1)
        self._chunk_numbers = itertools.count(1)
        self._unfinished: dict[Operation, None] = {}
        self._codes = Codes(self._workers)
        self._line = Line(
            self._codes, self._call_numbers, settings.workers, settings.calls, by_device=self._crossing is not None
        )
        self._wait_until = self.wait_until  # one bound method for all replies
        self._recovery = Recovery(self._workers, self._codes, settings.retries, lambda: self._broken or self._ended)
        self._inbox: deque[Callable[[], None]] = deque()
        self._held_gradients = 0
        self._task_modes: tuple[int, Modes] = -1, current_modes()  # the last backward and its modes
        self._deadlines = Deadlines()
        self._answers = Answers(self.lenders, settings.recoverable)
        self._dependents = Dependents(self, self._inbox.append, self.copying_packer)
        self._failed_starts = 0
        self._started_before_failure = 0  # the last worker that did
        self._understaffed_since: float | None = None
        self._staff_at = math.inf  # when it is tried again
        self._stranded: list[Worker] = []  # that are gone, and nobody was there to take over what waited for them
        self._deaths = 0
        self._broken: BaseException | None = None
        self._closing = False
        self._draining = False
        self._leaving = False
        self._stopping = False
        self._ended: BaseException | None = None

    # --- what a subclass decides: whose thread it is

    @abstractmethod
    def wake(self) -> None:
        """Have the scheduling thread look at the inbox and the backlogs."""

    def hand_over(self) -> None:
        """`wake`, by a caller who has much work of its own: let the scheduling thread have its turn first."""
        self.wake()

    @abstractmethod
    def nudge(self) -> None:
        """There is news for a worker, which can wait a little. Called from finalizers: it may not wait, lock or raise."""

    @abstractmethod
    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in the caller's thread until `satisfied()`, which is evaluated after each frame; whether it was."""

    @abstractmethod
    def join(self) -> None:
        """Wait for the end that `drain` or `terminate` asked for."""

    @abstractmethod
    def open_channel(self, number: int) -> Pipe:
        """Start worker `number`; returns our end of its pipe."""

    @abstractmethod
    def close_channel(self, worker: Worker) -> int | None:
        """Close the pipe of a worker that has died or was told to stop; returns its exit code, if known."""

    @property
    @abstractmethod
    def can_kill(self) -> bool:
        """Whether workers can be ended while they run a call."""

    @abstractmethod
    def drain_pipe(self, worker: Worker) -> None:
        """Receive what the worker has sent up to now."""

    @abstractmethod
    def kill(self, worker: Worker, by: int = signal.SIGKILL) -> None: ...

    @abstractmethod
    def tell_waiters(self) -> None:
        """Something was delivered."""

    @abstractmethod
    def watch(self, worker: Worker) -> None:
        """The worker's pipe may hold data that it did not take yet."""

    # --- any thread

    def check_open(self) -> None:
        """Raises:
        PoolClosedError: after `close` or `terminate`.
        RuntimeError: in a forked child, or when the pool is broken.
        """
        self.check_process()
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        if self._closing:
            raise PoolClosedError(f"the pool is closed; make a new one, or call it {INSIDE}")

    @property
    def state(self) -> str:
        return "broken" if self._broken is not None else "closed" if self._closing else "open"

    @property
    def is_ours(self) -> bool:
        """This process has made it, not one of which it is a forked child."""
        return FORKS.count == self._forks

    def check_process(self) -> None:
        if not self.is_ours:
            raise RuntimeError(
                f"this pool belongs to process {self._pid} and cannot be used in its forked child {os.getpid()}; "
                "make a new one there"
            )

    def admit(self, operation: Operation, waits: bool = False) -> None:
        """Have the calls in the operation's queue run; again after more were added. `waits`: the caller needs the results."""
        self._inbox.append(lambda: self._admit(operation))
        if waits:
            self.hand_over()
        else:
            self.wake()
        self._settle_if_ended()

    def ran(self, pickled: bytes) -> Ran | None:
        """What a call of the function takes by itself; None before the first."""
        return self._codes.ran(pickled)

    def cancel(self, operation: Operation) -> None:
        """Nobody wants the rest: what has not begun will not, what is under way is dropped when it comes."""
        self._post(lambda: self._cancel(operation))

    def call_off(self, operation: Operation) -> None:
        """As `cancel`, and a call that does not end soon is ended with its worker: whoever waited for it was interrupted."""
        self._post(lambda: self._call_off(operation))

    def call_off_all(self) -> None:
        """Likewise, all operations that were admitted up to now; who still asks for a result gets a `CancelledError`."""
        self._post(self._call_off_all)

    def call_off_backward(self, task: int) -> None:
        """Likewise, all that was sent for the backward with this number."""
        self._post(lambda: self._call_off_backward(task))

    def stop(self, operation: Operation) -> None:
        """As `cancel`, and what is under way is ended too, with its worker; whatever else that one had goes to others."""
        self._post(lambda: self._stop(operation))

    def stop_at(self, moment: float, operation: Operation) -> None:
        """`stop` it, unless it has ended by then: on the clock of time.monotonic."""
        self._post(lambda: self._deadlines.put(moment, operation))

    def await_all(self) -> None:
        """Wait until all that was admitted up to now has ended."""
        pending: list[Operation] = []
        looked, ended = False, 0  # how many of them had ended at the last look: each look goes on from there

        def look() -> None:
            nonlocal looked
            pending.extend(self._unfinished)
            looked = True
            self.tell_waiters()

        def all_ended() -> bool:
            nonlocal ended
            while ended < len(pending) and pending[ended].has_ended:
                ended += 1
            return looked and ended == len(pending)

        self._post(look)
        try:
            self.wait_until(all_ended)
        except BaseException:  # KeyboardInterrupt, above all
            for operation in pending:
                if operation.holder is not None:
                    holder = operation.holder()
                    if holder is None:
                        self.call_off(operation)
                    else:
                        holder.give_up()
            raise

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads, again: bool = False) -> GradientReply:
        self._check_alive()
        flat = [part for parts in grads for part in parts]
        waits_for_others = any(isinstance(part, Promise) for part in flat)
        worker = graph.worker  # read once: should it die now, another may get the graph, but not the sum
        assert isinstance(worker, Worker)
        placed = self._place_grads(flat, worker)
        number = next(self._call_numbers) if order.create else None
        task, modes = self._task_modes  # read once: another thread's backward may put its own there
        if task != order.task:
            call_off_if_interrupted(order.task, self)
            modes = current_modes()
            self._task_modes = order.task, modes
        what = Differentiation(graph, order, number, placed, list(map(len, grads)), modes)
        sent = SentGradients(what, GradientReply(self._wait_until, what.items, worker, order.task), graph.home.timeout, again)
        if waits_for_others:
            self._inbox.append(lambda: self._dependents.look_at_backward(sent))
            self._settle_if_ended()
        else:
            self._leave(worker, sent)
        self._held_gradients += 1
        if self._held_gradients >= HELD_GRADIENTS:
            self._held_gradients = 0
            self.hand_over()
        return sent.reply

    def _place_grads(self, parts: Sequence[torch.Tensor | Promise], worker: Worker) -> Sequence[Placed | Promise] | Together:
        packer, staged = self.copying_packer, worker.device == 0
        tensors = [part for part in parts if not isinstance(part, Promise)]
        flags = [REQUIRES_GRAD if tensor.requires_grad else 0 for tensor in tensors]
        together = packer.together(tensors, flags) if len(tensors) == len(parts) else None
        if together is not None:
            return together
        placed = (packer.place(tensor, own, None, staged) for tensor, own in zip(tensors, flags, strict=True))
        return [part if isinstance(part, Promise) else next(placed) for part in parts]

    def request_captures(
        self, worker: Worker, function: int, task: int | None, levels: tuple[Level, ...], timeout: float | None
    ) -> GradientReply:
        self._check_alive()
        reply = GradientReply(self.wait_until, None, worker)
        self._leave(worker, CaptureRequest(function, task, levels, timeout, reply))
        self.wake()
        return reply

    def _leave(self, worker: Any, item: SentGradients | CaptureRequest) -> None:
        """For the worker to take up; or for others, if it is gone, or goes in this moment."""
        worker.backlog.append(item)
        if worker.gone is not None:
            self._inbox.append(lambda: self._rescue(worker))
            self._settle_if_ended()

    def _check_alive(self) -> None:
        self.check_process()
        reason = self._broken or self._ended
        if reason is not None:
            raise copy.copy(reason)

    def release(self, graph: RemoteGraph) -> None:
        worker = graph.worker
        assert isinstance(worker, Worker)
        if graph.call in worker.kept:  # else its gradients came with its result
            worker.releases.append(graph.call)
            self.nudge()

    def note_other_gradient(self, function: SharedFunction) -> None:
        """Than the one for which the backward of a loss was run ahead, and must be run again."""
        self._codes.note_other_gradient(function)

    def forget_function(self, number: int, nbytes: int) -> None:
        """The function, whose captures have `nbytes`, is not needed any more, nor any graph of it."""
        for worker in list(self._workers.values()):
            if number in worker.functions:
                worker.forgotten_functions.append((number, nbytes))
        self.nudge()

    def resize(self, workers: int) -> None:
        self.check_open()
        self._settings = self._settings._replace(workers=workers)
        self._line.workers = workers
        self._post(self.staff)

    def stats(self, calls_here: int) -> PoolStats:
        self.check_process()
        workers = [
            WorkerStats(
                worker.number,
                worker.pid,
                resident_bytes(worker.pid),
                worker.graphs - len(worker.missing),
                worker.graph_bytes,
                worker.calls_done,
                worker.retiring,
                name_of(worker.device),
            )
            for worker in list(self._workers.values())
            if worker.ready
        ]
        resident = sum({worker.pid: worker.resident_bytes for worker in workers}.values())
        shared = self.arena.bytes_in_use + self.lenders.bytes_in_use
        copied = self.packer.bytes_copied + self.copying_packer.bytes_copied
        traffic = self.traffic
        return PoolStats(
            workers,
            resident,
            shared,
            self._deaths,
            self._recovery.reruns,
            calls_here,
            traffic.frames_sent,
            traffic.frames_received,
            traffic.bytes_sent,
            traffic.bytes_received,
            traffic.system_calls,
            copied,
            self.arena.slots_made,
        )

    def close(self) -> None:
        """Take nothing new; what was admitted still runs, and graphs stay."""
        self._closing = True

    def drain(self) -> None:
        """After `close`: end the workers when all that was admitted is done.

        Raises:
            ValueError: the pool is still open.
        """
        self.check_process()
        if not self._closing:
            raise ValueError("the pool is still open; close or terminate it before join")
        self._draining = True
        self.wake()

    def leave(self) -> None:
        """After `close`: end each worker as soon as all that was admitted is done, and no graph is kept there."""
        self.close()
        if self.is_ours:
            self._leaving = True
            self.wake()

    def cancel_queued(self, operation: Operation) -> None:
        """Calls that no worker has been given get a `CancelledError`."""
        self._post(lambda: self._cancel_queued(operation))

    def terminate(self) -> None:
        """End the workers now; what is under way fails with `PoolClosedError`."""
        if not self.is_ours:
            return
        self._closing = self._stopping = True
        self.wake()
        self.join()

    def abandon(self) -> None:
        """As `terminate`, without waiting: called where nobody can see the pool any more, in any thread, with any lock held."""
        if self.is_ours:
            self._closing = self._stopping = True
            self.wake()

    def _post(self, order: Callable[[], None]) -> None:
        self._inbox.append(order)
        self.wake()
        self._settle_if_ended()

    def _settle_if_ended(self) -> None:
        if self._ended is not None:
            self._settle()

    # --- the scheduling thread: workers come and go

    def work(self) -> None:
        """Do all that can be done without waiting."""
        while self._inbox:
            self._inbox.popleft()()
        self.arena.tidy()
        if self._crossing is not None:
            self._crossing.tidy()
        self._feed()
        if self._draining and self._is_idle():
            self._stopping = True
        if self._leaving and self._is_idle():
            self._settings = self._settings._replace(workers=0)
            for worker in list(self._workers.values()):
                worker.is_last = True
                self._retire(worker)
            self._stopping = not self._workers

    def staff(self) -> None:
        """Have as many workers as there should be, apart from those that only keep graphs."""
        self._staff_at = math.inf
        active = [worker for worker in self._workers.values() if not worker.retiring]
        try:
            for _ in range(self._settings.workers - len(active)):
                self.hire()
            self._understaffed_since = None
        except OSError as error:
            self._bear(error)
        for worker in active[self._settings.workers :]:
            worker.retiring = True
        if self._workers:
            stranded, self._stranded = self._stranded, []
            for gone in stranded:
                self._rescue(gone)

    def _bear(self, error: OSError) -> None:
        """No further worker can be started: try again soon, for a while at least where none is left."""
        now = time.monotonic()
        if self._understaffed_since is None:
            self._understaffed_since = now
            report(logging.WARNING, "no further worker can be started now (%s)", error)
        if not self._workers and now - self._understaffed_since > STAFF_PATIENCE:
            self._break(error)
        self._staff_at = now + STAFF_GAP

    def hire(self) -> None:
        settings, crossing = self._settings, self._crossing
        device = 0
        if settings.devices is not None:
            device = missing_device(settings.devices, (each.device for each in self._workers.values() if not each.retiring))
        number = next(self._worker_numbers)
        worker = Worker(number, self.open_channel(number), device)
        self._workers[number] = worker
        self.watch(worker)
        directory = working_directory()
        start = Start(
            settings.initializer,
            settings.threads,
            settings.graph_bytes,
            lowest_log_level(),
            list(sys.path),
            list(sys.argv),
            directory,
            b"" if crossing is None else crossing.post(device),
        )
        self._transmit(worker, [start], Payload())
        if crossing is not None and device and (offered := crossing.offer(device)) is not None:
            slot, trial = offered
            worker.lend(slot.address, slot)
            self._transmit(worker, [trial], Payload())

    def _retire(self, worker: Worker) -> None:
        """It takes no new calls; it stays while it keeps graphs."""
        if not worker.retiring:
            worker.retiring = True
            self.staff()
        if worker.is_done or self._is_forsaken(worker):
            self._transmit(worker, [Stop()], Payload())
            self._bury(worker, PoolClosedError(f"worker {worker.number} has ended after {worker.calls_done} calls"))
            self.staff()  # should it have failed before, for want of what this one had
            self._rescue(worker)
            self.tell_waiters()

    def _is_forsaken(self, worker: Worker) -> bool:
        """It has but sums of a backward that failed, it seems, as there are later ones; one that is wanted is made again."""
        is_one_of_many = sum(each.retiring for each in self._workers.values()) > self._settings.workers
        return is_one_of_many and not self._leaving and worker.has_sums_before(self._task_modes[0])

    def _bury(self, worker: Worker, reason: BaseException) -> int | None:
        """Forget a worker. Its memory stays while it is viewed."""
        code = self.close_channel(worker)
        worker.gone = reason
        del self._workers[worker.number]
        self._unmap([number for number in self.lenders.numbers if number >> 32 == worker.number])
        worker.take_leave()
        return code

    # --- the scheduling thread: what is lost is done again

    def lose(self, worker: Worker, blames: bool = True) -> None:
        """The end of its pipe: it died. All that it had been given goes to others, but for a call that kills too often."""
        begun, offset = worker.begun(), worker.offset
        if worker.doomed is not None and worker.doomed.begun != begun:  # what took too long was done in that moment
            worker.overdue, blames = None, False
        chunks = list(worker.under_way.values())
        died = WorkerDiedError(None, "forward", worker.number, None)
        died.exit_code = worker.exit_code = self._bury(worker, died)
        self._deaths += 1
        if chunks and blames:
            self._recovery.blame(worker, died.exit_code, chunks[0], begun[0], offset)
        for chunk in reversed(chunks):  # so that the first calls are first in the queue again
            if chunk.operation is not None:
                wanted = [call for _, call in chunk.calls if call.index < chunk.operation.limit]
                self._recovery.reruns += len(wanted)
                chunk.operation.queue.extendleft(reversed(wanted))
                self._admit(chunk.operation)
            worker.backlog.extendleft(reversed(chunk.gradients))
            if chunk.captures is not None:
                worker.backlog.appendleft(chunk.captures)
        if self._is_last_start(worker):
            so_did_others = f"so did {FAILED_STARTS} in a row"
            self._break(WorkerDiedError(None, "start", worker.number, died.exit_code, so_did_others, worker.stack))
        else:
            self.staff()
        self._rescue(worker)

    def _is_last_start(self, worker: Worker) -> bool:
        """Whether workers cannot be started. Those that start together and die together count as one attempt."""
        if worker.ready:
            self._failed_starts = 0
        elif worker.number > self._started_before_failure:
            self._failed_starts += 1
            self._started_before_failure = max(self._workers, default=worker.number)
        return self._failed_starts == FAILED_STARTS

    def _rescue(self, worker: Worker) -> None:
        """What waited for a worker that is gone."""
        if not self._workers and self._ended is None:
            self._stranded.append(worker)
            return
        while worker.backlog:
            try:
                item = worker.backlog.popleft()
            except IndexError:  # after the end several threads may do this
                break
            self._recovery.revive(item, worker)
        self.tell_waiters()

    def keep_time(self) -> float | None:
        """Do what is due; returns the seconds until something next is, None where nothing is."""
        now = time.monotonic()
        if now >= self._staff_at:
            self.staff()
        for operation in self._deadlines.due(now):
            self._stop(operation)
        moments = [self._staff_at, self._deadlines.next]
        for worker in list(self._workers.values()):
            if worker.doomed is None and overdue_at(worker) <= now:
                self.drain_pipe(worker)  # we may have been late, and it not
                if worker.gone is None and overdue_at(worker) <= now:
                    worker.overdue = next(iter(worker.under_way.values())).timeout
                    worker.doomed = Doom(now + FAREWELL_PATIENCE, worker.begun())
                    self.kill(worker, FAREWELL)  # the end of its pipe is read next, as of any that dies
            elif worker.doomed is not None and worker.doomed.moment <= now:
                self.kill(worker)
                self.lose(worker)
                continue
            if worker.end_at <= now:
                self._end_given_up(worker)
            moments += overdue_at(worker), worker.end_at
        soonest = min(moments)
        return None if soonest == math.inf else max(0.0, soonest - time.monotonic())

    def _break(self, error: BaseException) -> None:
        """The pool cannot go on: all that is under way, and all that comes later, gets `error`."""
        self._broken = error
        self._stopping = True

    def _is_idle(self) -> bool:
        busy = any(worker.under_way or worker.backlog for worker in self._workers.values())
        return not (busy or self._line.has_calls)

    def end(self) -> None:
        """The last thing that happens; nobody may be left waiting."""
        closed = f"the pool is closed, and its workers and their graphs are gone; ask for results, and call backward, {INSIDE}"
        reason = self._broken or PoolClosedError(closed)
        chunks = [chunk for worker in self._workers.values() for chunk in worker.under_way.values()]
        gone = [*self._stranded, *self._workers.values()]
        self._ended = reason
        try:
            for worker in list(self._workers.values()):
                if self._draining and self._broken is None:
                    self._transmit(worker, [Stop()], Payload())
                else:
                    self.kill(worker)
            for worker in list(self._workers.values()):
                self._bury(worker, reason)
        finally:
            for chunk in chunks:
                chunk.fail_replies(reason)
            for worker in gone:
                self._rescue(worker)
            self.arena.close()
            self.lenders.close()
            if self._crossing is not None:
                self._crossing.close()
            self._settle()

    def _settle(self) -> None:
        """After the end: answer what came too late. Runs in whichever thread finds it, perhaps in several."""
        while True:
            try:
                order = self._inbox.popleft()
            except IndexError:
                break
            order()
        for operation in list(self._unfinished):
            operation.fail(self._ended or InternalError("settled before the end"))
            self._unfinished.pop(operation, None)
        self.tell_waiters()

    # --- sending

    def _admit(self, operation: Operation) -> None:
        if operation.finished:
            self._unfinished.pop(operation, None)
            operation.tell_if_finished()
            self.tell_waiters()
            return
        self._unfinished[operation] = None
        while operation.waiting:
            self._dependents.look_at_call(operation, operation.waiting.popleft())
        if operation.queue:
            operation.unsorted = operation.at_rest and operation.sealed
            self._line.join(operation)

    def call_is_ready(self, operation: Operation, call: PackedCall, giver: Any) -> None:
        operation.queue.append(call)
        operation.unsorted = operation.at_rest and operation.sealed
        self._line.join(operation, first=True)  # what has begun is finished first, and its memory given back
        if giver.ready and giver.gone is None and not giver.under_way:
            self._give(giver)  # who has a part of the input goes on with it, rather than whoever is looked at first

    def call_has_failed(self, operation: Operation) -> None:
        self._cancel_rest(operation)

    def backward_is_ready(self, sent: SentGradients) -> None:
        self._leave(sent.reply.worker, sent)

    def backward_has_failed(self) -> None:
        self.tell_waiters()

    def _cancel(self, operation: Operation) -> None:
        operation.starts()  # a future that was cancelled tells who waits for it
        operation.cancel()
        for worker in self._workers.values():
            worker.cancel(operation)
        self._unfinished.pop(operation, None)
        self.tell_waiters()

    def _cancel_queued(self, operation: Operation) -> None:
        while operation.queue or operation.waiting:
            call = (operation.queue or operation.waiting).popleft()
            operation.deliver(call.index, CancelledError())
        self._cancel_rest(operation)

    def _stop(self, operation: Operation) -> None:
        if operation.finished:
            return
        operation.fail(CancelledError())
        self._cancel_rest(operation)
        for worker in list(self._workers.values()):
            if self.can_kill and worker.is_at(operation):
                self.drain_pipe(worker)  # perhaps it has gone on since
                if worker.gone is None and worker.is_at(operation):
                    self.kill(worker)
                    self.lose(worker, blames=False)

    def _call_off(self, operation: Operation) -> None:
        if operation.is_claimed:
            return
        self._cancel(operation)
        for worker in self._workers.values():
            worker.give_up([number for number, chunk in worker.under_way.items() if chunk.operation is operation])

    def _call_off_all(self) -> None:
        for operation in list(self._unfinished):
            operation.sealed = True
            operation.fail(CancelledError())
            operation.limit = 0  # also of one that goes on after a failure
            self._cancel_rest(operation)
        for worker in self._workers.values():
            worker.give_up([number for number, chunk in worker.under_way.items() if chunk.operation is not None])

    def _call_off_backward(self, task: int) -> None:
        """Whoever would do its parts, or do them again, sees that they have a reply."""
        interrupted = CancelledError("the backward was interrupted")
        for worker in [*self._workers.values(), *self._stranded]:
            worker.give_up_backward(task, interrupted)
        self.tell_waiters()

    def _end_given_up(self, worker: Worker) -> None:
        """It has had time enough to come to an end with what nobody wants any more."""
        worker.call_off_behind()
        self.drain_pipe(worker)  # we may have been late, and it not
        if worker.gone is not None or worker.end_at > time.monotonic():
            return
        for operation, calls in worker.take_back_behind():  # nobody knows when it would come to them
            self._line.put_back(operation, calls)
        if not self.can_kill:
            worker.end_at = math.inf
        elif worker.is_at_wanted:
            worker.end_at = time.monotonic() + MERCY  # others wait for this part, and perhaps not for the next
        elif self._settings.recoverable or not worker.has_others:
            self.kill(worker)
            self.lose(worker, blames=False)
        else:  # what others want of it could not be had again
            worker.end_at = math.inf
            worker.retiring = True
            self.staff()

    def _feed(self) -> None:
        """Give every worker a chunk before any gets its second.

        A second one has to wait for the first, perhaps for long, while another worker starts or ends what it does. So it is
        given where it is known to be short.
        """
        for depth in range(CHUNKS_UNDER_WAY):
            for worker in list(self._workers.values()):
                if worker.ready and len(worker.under_way) <= depth:
                    self._give(worker)
        for worker in self._line.take_back(self._workers.values()) * CHUNKS_UNDER_WAY:
            self._give(worker)

    def _give(self, worker: Worker) -> None:
        """Send `worker` a chunk of what waits; backwards first, because somebody waits for them."""
        if worker.backlog:
            self._transmit(worker, *worker.backward(self._next_chunk(worker)))
            return
        if worker.retiring:
            self._retire(worker)
            return
        if worker.given_up:  # it ends that soon, or is ended; nobody knows which
            return
        share = self._line.next_for(worker)
        if share is not None:
            self._transmit(worker, *worker.forward(self._next_chunk(worker), *share))

    def _next_chunk(self, worker: Worker) -> int:
        if not worker.under_way:
            worker.busy_since = time.monotonic()
        return next(self._chunk_numbers)

    def _transmit(self, worker: Worker, messages: list[Message], payload: Payload) -> None:
        self.collect_returns()
        self._unmap(drained(self.arena.dropped))
        self.arena.made.clear()  # each worker is told of a slab when it is first lent something there
        try:
            worker.transmit(messages, payload)
        except ConnectionError:
            pass  # it died; the end of its pipe is read next, and says so once
        except OSError as error:  # no descriptor is free for what has to wait: what it was sent is not whole
            report(logging.WARNING, "a worker is given up, because nothing can be sent to it (%s)", error)
            self.kill(worker)
        self.watch(worker)

    def collect_returns(self) -> None:
        for address, times in self.lenders.collect():
            worker = self._workers.get(slab_of(address) >> 32)
            if worker is not None:
                worker.returns.append((address, times))

    def has_news(self) -> bool:
        """Whether there is something to tell the workers, apart from work."""
        self.collect_returns()
        return any(worker.has_news for worker in self._workers.values())

    def tell_news(self, quiet_for: float) -> None:
        """Tell workers, that have been sent nothing for so many seconds, what has waited for a message to ride with."""
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.has_news and worker.ready and now - worker.sent_at >= quiet_for:
                self._transmit(worker, [], Payload())

    def _unmap(self, numbers: Sequence[int]) -> None:
        """Slabs that their owner gave up, or that died with it."""
        for number in numbers:
            self.lenders.detach(number)
            for worker in self._workers.values():
                worker.unmap(number)

    # --- receiving

    def receive(self, worker: Worker, frame: Frame) -> None:
        for message in frame.messages:
            match message:
                case Results():
                    self._receive_results(worker, message, frame.payload)
                case Gradients():
                    chunk = self._answered(worker, message.chunk)
                    self._codes.note_backwards(chunk.gradients, message.seconds)
                    self._answers.gradients(worker, chunk, message, frame.payload)
                case Collected():
                    self._answers.collected(worker, self._answered(worker, message.chunk), message, frame.payload)
                case NewSlab() if message.handle is not None and self._crossing is not None:
                    self._crossing.attach(worker, message, self.lenders)
                case NewSlab():
                    self.lenders.attach(message.number, worker.channel.take_descriptor(), message.nbytes)
                case SlabsGone():
                    self._unmap(message.numbers)
                case Returned():
                    for address, times in message.slots:
                        self._take_back(worker, address, times)
                case LastWords():
                    worker.last_words = worker.channel.take_descriptor()
                case Ready():
                    with contextlib.suppress(SharedMemoryError):  # then nothing is known of how far it has come
                        memory = self.lenders.slab(slab_of(message.progress)).memory
                        offset = message.progress & OFFSET_MASK
                        worker.progress = memory[offset : offset + 8 * Progress.COUNT].cast("q")
                    worker.pid = message.pid
                    worker.ready = True
                    self._failed_starts = 0
                case Printed() | Logged():
                    given_again(message)
                case Tried() if self._crossing is not None:
                    others = [each for each in self._workers.values() if not each.retiring]
                    if told := self._crossing.tried(worker, message, self.lenders, others):
                        self._transmit(worker, told, Payload())
                case StartFailed():
                    self._break(failed_again(message.failure, "", worker).error())
                case _:
                    raise InternalError(f"a worker sent what only the parent sends ({type(message).__name__})")

    def _take_back(self, worker: Worker, address: int, times: int) -> None:
        worker.take_back(address, times)
        slab = slab_of(address)
        owner = slab >> 32
        if owner and owner not in self._workers and not worker.has_borrowed_from(slab):
            worker.unmap(slab)  # of a worker that is gone; nobody else would say so

    def _answered(self, worker: Worker, number: int) -> Chunk:
        worker.busy_since = time.monotonic()
        chunk = worker.under_way.pop(number)
        if worker.given_up:
            worker.end_at = math.inf
            worker.look_at_given_up()
        return chunk

    def _receive_results(self, worker: Worker, message: Results, payload: memoryview) -> None:
        chunk = self._answered(worker, message.chunk)
        operation = chunk.operation
        assert operation is not None
        done = len(message.outcomes)
        if done:
            items = sum([call.items for _, call in chunk.calls[:done]])
            worker.calls_done += items
            outcomes = zip(chunk.calls, message.outcomes, strict=False)  # one too many is refused below
            with_graphs = sum([call.items for (_, call), each in outcomes if isinstance(each, Result) and each.has_graph])
            share = done / (operation.delivered + done) if operation.largest_first else math.inf
            self._codes.note_results(operation.function, message, items, with_graphs, share)
        limit = operation.limit
        self._answers.results(worker, chunk, message, payload)
        self._line.put_back(operation, [call for _, call in chunk.calls[done:]])  # called off, and then not begun after all
        if operation.limit != limit:
            self._cancel_rest(operation)
        if operation.finished:
            self._unfinished.pop(operation, None)
        if self._settings.calls is not None and worker.calls_done >= self._settings.calls:
            self._retire(worker)

    def _cancel_rest(self, operation: Operation) -> None:
        """Nobody wants the calls after the first that failed."""
        for worker in self._workers.values():
            worker.cancel(operation)
        if operation.finished:
            self._unfinished.pop(operation, None)
            self.tell_waiters()
