"""The scheduler carries out what `mpgrad.machine` decides: it sends workers their chunks, and
starts and ends workers. It knows nothing of threads and selectors. This module runs in the caller
only.

    callers ── admit, send_gradients, release ──► inbox, backlogs ──► [the scheduling thread]
    callers ◄── Operation.outcomes, Backward.settle ◄───────────────────────────┘  ▲
                                                     workers ◄──► links ◄──────────┘

    admissions ──► queue ──► deliveries ──► the worker
    gradient_sender ──► its backlog ──► deliveries ──► the worker
    the worker ──► receiving ──► Operation, Backward

    supervisor: starts and ends workers
    cancelling: ends calls that are not needed, or that take too long
    recovery: gives lost work to other workers
Each part owns what it changes, and the scheduling thread calls it, so it needs no lock. Other
threads put their orders into deques, and wake the scheduling thread. `Dispatcher` gives the
scheduler a thread of its own, and `InlineScheduler` uses the caller's. Any thread may call
`lifecycle`, `GradientSender`, the packers of `caller_memory`, and the methods that the heads of
other parts name. After the end there is no scheduling thread. A thread that comes too late carries
out its order itself (`lifecycle.Settlement`).
Guarantees: each call added to an operation gets one outcome. Each backward is settled by a value or
    an error. Both hold even if the worker dies or the pool is closed. The scheduling thread does
    not touch the values of tasks: it runs no torch operation, except to copy tensors on devices.
"""

from __future__ import annotations

import itertools
import signal
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable

from mpgrad.autograd.remote_graph import Backward
from mpgrad.callbacks import CallbackThread
from mpgrad.calls.backwards import error_maker
from mpgrad.calls.operations import Operation, UncollectedFailures
from mpgrad.engines.kinds import Engine
from mpgrad.errors import CallNames
from mpgrad.machine.policy import FAR, NEAR
from mpgrad.machine.queue import CallQueue
from mpgrad.machine.story import Story
from mpgrad.memory.accelerator import name_of
from mpgrad.memory.arena import WITHHELD
from mpgrad.scheduling.admissions import Admissions
from mpgrad.scheduling.caller_memory import CallerMemory
from mpgrad.scheduling.cancelling import Canceller
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.gradients import GradientSender
from mpgrad.scheduling.known_functions import KnownFunctions
from mpgrad.scheduling.lifecycle import Driver, Lifecycle, Order, Phase, Settlement
from mpgrad.scheduling.receiving import Receiver
from mpgrad.scheduling.recovery import Recovery
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.supervisor import WorkerSupervisor
from mpgrad.scheduling.tracer import Tracer
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.stats import PoolStats, WorkerStats
from mpgrad.timeline import Trace
from mpgrad.torch_state.modes import ModeCheck

__all__ = ["Scheduler"]

# seconds between two checks whether the forked children for which memory is kept have ended
CHILDREN_PATIENCE = 0.5


# long because: it has a method for each request, and most are one line long
class Scheduler(Driver):
    """Puts the parts together, and has a method for each request of the caller's threads. A
    subclass decides on the thread."""

    def __init__(self, settings: Settings, engine: Engine, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.engine = engine
        # read between events only; the parts get the time as an argument
        self.clock = clock
        self.life = Lifecycle()
        self.callbacks = CallbackThread()  # not started if the scheduling thread is the caller's
        self.tracer = Tracer()
        self.mode_check = ModeCheck(settings.in_caller)
        self.memory = CallerMemory(settings, self.nudge)
        self.packer = self.memory.packer
        self.copying_packer = self.memory.copying_packer
        # of the operation that was admitted last, with the names of its calls
        self.story, self._names = Story(), CallNames("", "")
        self.inbox: deque[Order] = deque()
        # whether the scheduling thread has work that it has not been woken for
        self.has_unheard = False
        self.workers: dict[int, WorkerHandle] = {}
        by_device = self.memory.device_transfer is not None
        numbers = itertools.count(1)  # of calls
        self.functions = functions = KnownFunctions(self.workers)
        self._queue = queue = CallQueue(
            functions,
            numbers,
            settings.workers,
            settings.calls,
            by_device,
            FAR if settings.remote else NEAR,
        )
        self.deliveries = deliveries = Deliveries(self.workers, self.memory, self.tracer)
        self.gradients = gradients = GradientSender(
            self,
            self.life,
            functions,
            self.copying_packer,
            numbers,
            settings.since,
            self.mode_check,
        )
        self.uncollected = UncollectedFailures()
        self.admissions = Admissions(
            self, queue, deliveries, gradients, self.copying_packer, self.uncollected
        )
        self._settling = Settlement(self.inbox, self.admissions.unfinished, self.life)
        self.recovery = Recovery(
            self.workers, functions, settings, self.life, queue, self.admissions.admit
        )
        self.supervisor = WorkerSupervisor(
            self,
            settings,
            engine,
            self.life,
            self.memory,
            deliveries,
            gradients,
            self.recovery,
            queue,
        )
        self.receiver = Receiver(
            settings,
            self.life,
            self.memory,
            functions,
            queue,
            deliveries,
            self.admissions,
            self.supervisor,
        )
        self.cancelling = Canceller(
            self, deliveries, self.admissions, queue, self.supervisor, self.receiver, settings
        )

    @abstractmethod
    def start(self) -> None:
        """Start the workers. If that raises, the caller has to terminate the scheduler, without
        waiting."""

    @abstractmethod
    def join(self) -> None:
        """Wait for the end that `drain` or `terminate` has requested."""

    def feed(self, now: float) -> None:
        for chunk in self._queue.next_chunks(self.workers.values(), now):
            self.deliveries.send(chunk, now)
        self.supervisor.end_retiring(now)

    # --- any thread: operations

    def put(self, order: Order) -> None:
        self.inbox.append(order)
        self.has_unheard = True
        if self.life.has_ended:
            self._settle()

    def post(self, order: Order) -> None:
        self.put(order)
        self.wake()

    def admit(self, operation: Operation, waits: bool = False) -> None:
        """Run the calls in the operation's queue.

        Admit the operation again after more calls were added. `waits` means that the caller needs
        the results.
        """
        self.story, self._names = operation.options.story, operation.names
        self.put(lambda now: self.admissions.admit(operation, now))
        if waits:
            self.hand_over()
        else:
            self.wake()

    def forget_function(self, number: int, nbytes: int) -> None:
        """Have workers forget the function, whose captures have `nbytes`.

        Neither the function nor any of its graphs is needed any more.
        """
        for worker in list(self.workers.values()):
            if number in worker.writer.functions:
                worker.forgotten_functions.append((number, nbytes))
        self.nudge()

    def cancel(self, operation: Operation) -> None:
        """Cancel the rest of the operation, because it is not needed.

        Calls that have not begun do not begin, and results that arrive are dropped.
        """
        self.post(lambda now: self.cancelling.cancel(operation))

    def cancel_queued(self, operation: Operation) -> None:
        """Give a `CancelledError` to the calls that no worker has been given."""
        self.post(lambda now: self.cancelling.cancel_queued(operation))

    def cancel_with_grace(self, operation: Operation) -> None:
        """Cancel the operation, because the caller that waited for it was interrupted.

        A call that does not end soon is killed with its worker.
        """
        self.post(lambda now: self.cancelling.cancel_with_grace(operation, now))

    def cancel_all_with_grace(self) -> None:
        """Cancel with grace all operations that were admitted up to now.

        A caller that still requests a result gets a `CancelledError`.
        """
        self.post(self.cancelling.cancel_all_with_grace)

    def cancel_backward(self, graph_task: int) -> None:
        """Cancel with grace all that was sent for the backward with this number."""
        self.post(lambda now: self.cancelling.cancel_backward(graph_task, now))

    def kill(self, operation: Operation) -> None:
        """Cancel the operation, and kill the workers that run one of its calls.

        The other calls of these workers go to other workers.
        """
        self.post(lambda now: self.cancelling.kill(operation, now))

    def kill_at(self, moment: float, operation: Operation) -> None:
        """Kill the operation at the `moment`, on the clock of time.monotonic, unless it has
        ended."""
        self.post(lambda now: self.cancelling.limits.deadlines.put(moment, operation))

    def await_all(self) -> None:
        """Wait until all operations that were admitted up to now have ended."""
        pending: list[Operation] = []
        # `ended` counts the operations that had ended at the last check. The next one starts there.
        looked, ended, told = False, 0, False

        def look(now: float) -> None:
            nonlocal looked
            pending.extend(self.admissions.unfinished)
            looked = True
            self.tell_waiters()

        def all_ended() -> bool:
            nonlocal ended
            # Two threads may look at the same time.
            at = ended
            while at < len(pending) and pending[at].has_ended:
                at += 1
            ended = at
            return looked and at == len(pending)

        def all_told(now: float) -> None:
            nonlocal told
            told = True
            self.tell_waiters()

        self.post(look)
        try:
            self.wait_until(all_ended)
            # An order runs between two deliveries, so listeners know of the last one by then.
            self.post(all_told)
            self.wait_until(lambda: told)
            self.callbacks.catch_up(-1)
        # This is mostly a KeyboardInterrupt.
        except BaseException:
            for operation in pending:
                operation.note_interrupt(self.cancel_with_grace)
            raise

    # --- any thread: a timeline

    def begin_trace(self, trace: Trace) -> None:
        """Begin to record a timeline. Raises RuntimeError if the pool records one already."""
        self.life.check_open()
        self.tracer.begin(trace)

        def tell_all(now: float) -> None:
            self.deliveries.record_all(True, now)
            trace.is_known = True

        self.post(tell_all)

    def end_trace(self) -> None:
        """End the timeline, and have the workers stop recording."""
        if self.tracer.trace is None:
            return
        self.tracer.trace.end()
        self.tracer.trace = None
        self.post(lambda now: self.deliveries.record_all(False, now))

    # --- any thread: the pool's life

    def wait_for_workers(self, enough: Callable[[Iterable[bool]], bool]) -> None:
        """Return once `any` or `all` workers are ready, or the pool has broken."""

        def are_ready() -> bool:
            workers = list(self.workers.values())
            return self.life.broken is not None or (
                bool(workers) and enough(worker.ready for worker in workers)
            )

        self.wait_until(are_ready)

    def resize(self, workers: int) -> None:
        self.life.check_open()
        self._have(workers)
        self.post(lambda now: self._keep(workers))

    def _keep(self, workers: int) -> None:
        """Have this many workers from now on, as set by the user instead of the engine."""
        self.engine.room = None
        self._have(workers)

    def _have(self, workers: int) -> None:
        self.settings = self.settings._replace(workers=workers)
        self.supervisor.wanted = self._queue.workers = workers
        self.post(self.supervisor.fill)

    def stats(self) -> PoolStats:
        self.life.check_process()
        now = self.clock()
        workers = [
            statistics(worker, now) for worker in list(self.workers.values()) if worker.ready
        ]
        traffic = self.engine.traffic
        return PoolStats(
            workers,
            sum({(worker.node, worker.pid): worker.resident_bytes for worker in workers}.values()),
            self.memory.bytes_in_use,
            self.supervisor.deaths,
            self.supervisor.kills,
            self.recovery.reruns,
            self.deliveries.recomputed,
            self.receiver.graphs_dropped,
            self.functions.wrong_predictions,
            sum(not operation.finished for operation in list(self.admissions.unfinished)),
            self.receiver.items_done,
            self._items_left(),
            self.receiver.backwards_done,
            self._backwards_left(),
            traffic.frames_sent,
            traffic.frames_received,
            traffic.bytes_sent,
            traffic.bytes_received,
            traffic.system_calls,
            self.memory.bytes_copied,
            self.memory.arena.slots_made,
        )

    def story_of(self, item: int) -> str:
        """Return what happened to this item of the last operation; raises LookupError."""
        told, call = self.story.in_words(item), self._names.words(item)
        if not told:
            raise LookupError(f"nothing has happened to item {item} of the last operation")
        return f"{call}\n{told}"

    def tally(self) -> tuple[int, int]:
        """Return how many forwards and backwards have been done so far, and how many are left."""
        return self.receiver.answers, self._items_left() + self._backwards_left()

    def _items_left(self) -> int:
        return sum(operation.items_left for operation in list(self.admissions.unfinished))

    def _backwards_left(self) -> int:
        return sum(
            worker.backwards_left for worker in [*self.supervisor.gone, *self.workers.values()]
        )

    def close(self) -> None:
        """Take no new operations. Admitted operations still run, and graphs stay."""
        self.life.enter(Phase.CLOSED)

    def drain(self) -> None:
        """End the workers, after `close`, when all admitted operations are done.

        Raises:
            ValueError: the pool is still open.
            RuntimeError: the caller is a callback.
        """
        self.life.check_process()
        if threading.current_thread() is self.callbacks:
            raise RuntimeError(
                "a callback cannot join its pool, which waits for all callbacks; join it in "
                "another thread"
            )
        if self.life.phase is Phase.OPEN:
            raise ValueError("the pool is still open; close or terminate it before join")
        self.life.enter(Phase.DRAINING)
        self.wake()

    def leave(self) -> None:
        """Take no new operations, and let each worker end when it is not needed any more.

        A worker ends as soon as all admitted operations are done, and it keeps no graph.
        """
        self.close()
        if self.life.is_ours:
            self.life.enter(Phase.LEAVING)
            self.wake()

    def await_unneeded(self) -> None:
        """After `leave`, wait until the workers that keep no graph have ended."""
        self.wait_until(
            # The order matters, because a worker that has left the first is in the second already.
            lambda: (
                all(each.is_last and each.only_keeps for each in list(self.workers.values()))
                and not self.supervisor.awaits_exits
            )
        )

    def terminate(self) -> None:
        """End the workers now; work that is under way fails with `PoolClosedError`."""
        if self.life.is_ours:
            self.terminate_without_waiting()
            self.join()

    def break_off(self, error: BaseException, by: signal.Signals) -> None:
        """End the workers now, with this signal. Work that is under way fails with `error`, as do
        backwards."""

        def end(now: float) -> None:
            if not self.life.has_ended:
                self.life.ends_by = by
                self.life.break_off(error)

        self.post(end)

    def terminate_without_waiting(self) -> None:
        """Terminate without waiting.

        This may be called when no reference to the pool is left, in any thread with any lock held.
        """
        if self.life.is_ours:
            self.life.enter(Phase.STOPPING)
            self.wake()

    # --- the scheduling thread

    def work(self) -> None:
        """Do all work that needs no waiting."""
        while self.inbox:
            self.inbox.popleft()(self.clock())
        # Orders may have taken long, and time limits count from when calls are sent.
        now = self.clock()
        self.memory.tidy()
        if not self.life.is_stopping:
            self.feed(now)
            self._look_at_end(now)

    def _look_at_end(self, now: float) -> None:
        """End the workers, or the pool, if the phase requires it and nothing runs."""
        phase = self.life.phase
        if phase in (Phase.LEAVING, Phase.DRAINING) and self._is_idle():
            if phase is Phase.LEAVING:
                self.supervisor.retire_all(now)
            else:
                self.life.ends_gently = True
                self.life.enter(Phase.STOPPING)
        if phase is Phase.LEAVING and not (
            self.supervisor.wanted or self.workers or self.supervisor.has_deaths
        ):
            # The pool stops even if graphs should be rebuilt, because no worker is left to do so.
            self.life.enter(Phase.STOPPING)

    def _is_idle(self) -> bool:
        busy = any(
            worker.under_way or worker.backlog
            for worker in [*self.supervisor.gone, *self.workers.values()]
        )
        return not (busy or self._queue.has_calls)

    def wait_for_gradients(self, backward: Backward, now: float) -> None:
        self.admissions.look_at_backward(backward, now)

    def requeue(self, worker: WorkerHandle, now: float) -> None:
        self.supervisor.requeue(worker, now)

    def look_at_room(self) -> None:
        """Change the number of workers if the engine, which follows a cluster's nodes, has more or
        less room."""
        room = self.engine.room
        if room is not None and room != self.supervisor.wanted and self.life.phase is Phase.OPEN:
            self._have(room)

    def keep_time(self, now: float) -> float:
        """Do what is due, and return when to look next; infinite for never."""
        soonest = min(
            self.cancelling.keep_time(now), self.supervisor.keep_time(now), self._queue.look_at
        )
        if WITHHELD:
            soonest = min(soonest, now + CHILDREN_PATIENCE)
        return soonest

    def end(self) -> None:
        """End the pool. This happens last, and leaves no thread waiting."""
        try:
            self._end()
        finally:
            self.engine.close()

    def _end(self) -> None:
        reason = self.life.end()
        gone = [*self.supervisor.gone, *self.workers.values()]
        chunks = [chunk for worker in gone for chunk in worker.under_way.chunks.values()]
        try:
            self.supervisor.end_all(
                reason,
                gently=self.life.ends_gently and self.life.broken is None,
                now=self.clock(),
            )
        finally:
            try:
                for item in itertools.chain(*(chunk.from_backlog for chunk in chunks)):
                    item.settle(error_maker(reason))
                for worker in gone:
                    self.supervisor.requeue(worker, self.clock())
            finally:
                try:
                    self._settle()
                    self.supervisor.await_exits(self.clock)
                finally:
                    self.memory.close()

    def _settle(self) -> None:
        self._settling.settle(self.clock())
        self._queue.tidy()
        self.tell_waiters()


def statistics(worker: WorkerHandle, now: float) -> WorkerStats:
    return WorkerStats(
        worker.number,
        worker.pid,
        worker.link.resident_bytes(worker.pid),
        worker.graphs.there,
        worker.graphs.nbytes,
        worker.calls_done,
        "retiring" if worker.retiring else "busy" if worker.under_way else "idle",
        worker.busy(now),
        name_of(worker.device),
        worker.link.node,
    )
