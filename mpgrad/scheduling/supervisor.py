"""`WorkerSupervisor` starts, replaces, retires and removes the workers of a pool, and gives their
backlogs to other workers. This module runs in the caller only.

    start_worker ──► ready ──► retiring ──► asked to end ──┐
                       └──────────────────► died: lose ────┴──► _remove_at_once

    retiring: the worker takes no new calls, and stays while its graphs are needed
    _remove_at_once: the worker leaves the pool ──► the engine reports its exit, or a wait has ended
        ──► remove ──► requeue
Guarantees: the scheduling thread waits for no exit until all work of the pool is settled.
Assumes: called by the scheduling thread; any thread may set `wanted`, and read `deaths` and
    `kills`.
"""

from __future__ import annotations

import errno
import logging
import math
import resource
from collections.abc import Callable
from typing import NamedTuple

from mpgrad.callbacks import log_levels, report
from mpgrad.calls.packing import missing_device
from mpgrad.engines.kinds import Engine
from mpgrad.environment import current_environment, preparation
from mpgrad.errors import PoolClosedError, WorkerDiedError
from mpgrad.machine.deaths import Death, death_of
from mpgrad.machine.queue import CallQueue
from mpgrad.scheduling.caller_memory import CallerMemory
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.gradients import GradientSender
from mpgrad.scheduling.lifecycle import Driver, Lifecycle, Phase
from mpgrad.scheduling.recovery import Recovery
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import Start, Stop

__all__ = ["WorkerSupervisor"]

log = logging.getLogger("mpgrad")

FAILED_STARTS = 3  # in a row, before the pool breaks
START_GAP = 0.25  # seconds between two attempts to start workers that the system refuses
TELL_EVERY = 60.0  # seconds between two warnings that the system refuses
START_PATIENCE = 2.0  # seconds of such attempts before a pool without workers breaks
EXIT_PATIENCE = 2.0  # seconds for a worker to end before it is killed and counts as gone


class EndingWorker(NamedTuple):
    """A worker that has left the pool, and may not have ended yet."""

    worker: WorkerHandle
    # until when the pool waits for it, on the clock of time.monotonic
    until: float
    # called when it is known how the worker died; None if it was asked to end
    death: Callable[[float], None] | None
    # whether that time is over, and the engine looks for the exit once more
    is_last_look: bool = False


class WorkerSupervisor:
    """Keeps the number of active workers at `wanted`.

    Guarantees: this number is reached, or the system refuses to start more workers. A backward that
    waits for a worker that is gone is not forgotten.
    """

    # long because: it takes all parts that a worker's start and end concern
    def __init__(
        self,
        driver: Driver,
        settings: Settings,
        engine: Engine,
        life: Lifecycle,
        memory: CallerMemory,
        deliveries: Deliveries,
        gradients: GradientSender,
        recovery: Recovery,
        queue: CallQueue,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._engine = engine
        self._life = life
        self._memory = memory
        self._workers = deliveries.workers
        self._deliveries = deliveries
        self._gradients = gradients
        self._recovery = recovery
        self._queue = queue
        # how many active workers there should be
        self.wanted = settings.workers
        self.deaths = 0
        # deaths that the pool caused
        self.kills = 0
        # when to try again to start missing workers
        self.again_at = math.inf
        # workers that are gone, and whose backlog has no place in another worker
        self.unplaced: list[WorkerHandle] = []
        # workers that are gone, and may not have ended yet, by number
        self._ending: dict[int, EndingWorker] = {}
        # the number of the newest worker
        self._newest = 0
        self._failed_starts = 0
        # the number of the newest worker that was started before the last failure
        self._started_before_failure = 0
        # when a warning last reported that workers are missing
        self._told_at = -math.inf
        # since when no worker takes calls, and none can be started
        self._refused_since: float | None = None

    def fill(self, now: float) -> None:
        """Start or retire workers until `wanted` are active. At the pool's end, start none.

        Workers that only keep graphs do not count.
        """
        if self._life.is_stopping:
            return
        self.again_at = math.inf
        # A worker whose node agent is lost is as good as gone. A worker that waits for room is the
        # first to retire.
        active = [
            worker for worker in self._workers.values() if not (worker.retiring or worker.link.lost)
        ]
        active.sort(key=lambda each: not each.link.has_place)
        try:
            for _ in range(self.wanted - len(active)):
                self.start_worker(now)
        except OSError as error:
            self._note_refusal(error, now)
        # No worker can be started any more, or a new one would not be as it should be.
        except RuntimeError as error:
            self._life.break_off(error)
        too_many = active[self.wanted :]
        for worker in too_many:
            worker.begin_retiring()
        for worker in too_many:
            # A worker that has a place retires when it has finished its work.
            if not worker.link.has_place:
                self.retire(worker, now)
        self._requeue_unplaced(now)

    def _note_refusal(self, error: OSError, now: float) -> None:
        """Note that no further worker can be started, and try again soon.

        If no worker that takes calls is left, a worker that only keeps graphs makes room. Without
        such a worker the pool breaks after a while.
        """
        self.again_at = now + START_GAP
        if now - self._told_at > TELL_EVERY:
            self._told_at = now
            report(logging.WARNING, "no further worker can be started now (%s)", error)
        keepers = [
            worker
            for worker in self._workers.values()
            if worker.retiring and not (worker.under_way or worker.backlog)
        ]
        others = [worker for worker in self._workers.values() if worker not in keepers]
        is_wanted = self._queue.has_calls or self.unplaced
        if any(worker.ready for worker in others) or (keepers and not is_wanted):
            # A later lack of workers is timed anew.
            self._refused_since = None
            return
        if self._refused_since is None:
            self._refused_since = now
        if self._ending or others:
            # A place will be free, or a worker is starting.
            pass
        elif keepers and self._settings.recoverable:
            worker = min(keepers, key=lambda each: (bool(each.sums), each.graphs.there))
            self._drop_graphs(worker, now)
        elif now - self._refused_since > START_PATIENCE:
            self._life.break_off(with_limit(error))

    def _drop_graphs(self, worker: WorkerHandle, now: float) -> None:
        """End the worker. Other workers rebuild its graphs if they are still needed."""
        log.info(
            "worker %d ends, because no other can be started; its %d graphs are rebuilt if needed",
            worker.number,
            worker.graphs.there,
        )
        self._send_off(worker, "has ended, to make room for another", now)
        # Its descriptors are free at once, and the rest when it has ended.
        self.again_at = now

    def start_worker(self, now: float) -> None:
        """Start a worker, and send it its settings.

        Raises:
            OSError: the system refuses.
            RuntimeError: no worker can be started any more.
        """
        settings, device_transfer = self._settings, self._memory.device_transfer
        device = 0
        if settings.devices is not None:
            device = missing_device(
                settings.devices,
                (each.device for each in self._workers.values() if not each.retiring),
            )
        number = self._newest + 1
        worker = WorkerHandle(number, self._engine.start(number), device)
        self._newest = number
        self._workers[number] = worker
        start = Start(
            settings.initializer,
            settings.threads,
            settings.graph_bytes,
            settings.spares_memory,
            log_levels(),
            current_environment() if settings.since is None else settings.since.begin,
            None if settings.remote else preparation(),
            b"" if device_transfer is None else device_transfer.setup(device),
            settings.remote,
            settings.importing,
        )
        self._deliveries.transmit(worker, [start], now)
        if (
            device_transfer is not None
            and device
            and (offered := device_transfer.offer(device)) is not None
        ):
            slot, trial = offered
            worker.lent_slots.lend(slot.address, slot)
            self._deliveries.transmit(worker, [trial], now)

    def note_ready(self, now: float) -> None:
        """Note that a worker has started."""
        self._failed_starts = 0
        self._refused_since = None
        self._requeue_unplaced(now)

    def retire(self, worker: WorkerHandle, now: float) -> None:
        """Give the worker no new calls. It stays while it keeps graphs."""
        # `fill` has sent it off already.
        if worker.gone is not None:
            return
        if not worker.retiring:
            worker.begin_retiring()
            # This may send the worker off at once, if no other can be started beside it.
            self.fill(now)
        if worker.gone is None and worker.is_done(self._first_wanted()):
            self._send_off(worker, f"has ended after {worker.calls_done} calls", now)
            # A start may have failed before, because this worker took the resources.
            self.fill(now)

    def end_retiring(self, now: float) -> None:
        """End the retiring workers that are not needed any more."""
        for worker in list(self._workers.values()):
            if worker.retiring and worker.ready:
                self.retire(worker, now)

    def _send_off(self, worker: WorkerHandle, why: str, now: float) -> None:
        self._deliveries.transmit(worker, [Stop()], now)
        self._remove_at_once(worker, PoolClosedError(f"worker {worker.number} {why}"), now)
        self.requeue(worker, now)
        self._driver.tell_waiters()

    def _first_wanted(self) -> int:
        """Return the number of the first backward whose sums may be needed.

        If many workers are retiring, they do not wait for the sums of backwards before the last
        one. These backwards seem to have failed. A sum that is still needed is computed again.
        """
        are_many = sum(each.retiring for each in self._workers.values()) > self.wanted
        stay = self._life.phase is Phase.LEAVING
        return self._gradients.last_backward if are_many and not stay else 0

    def retire_all(self, now: float) -> None:
        """Retire all workers. Each ends as soon as it is not needed."""
        self.wanted = 0
        for worker in list(self._workers.values()):
            worker.is_last = True
            self.retire(worker, now)
        # Threads that wait until unneeded workers have ended may be able to go on.
        self._driver.tell_waiters()

    def _remove_at_once(
        self,
        worker: WorkerHandle,
        reason: BaseException,
        now: float,
        death: Callable[[float], None] | None = None,
    ) -> None:
        """Remove the worker from the pool.

        Its chunks, and the memory that it may still read, stay until its exit.
        """
        worker.link.end()
        worker.gone = reason
        self._ending[worker.number] = EndingWorker(worker, now + EXIT_PATIENCE, death)
        del self._workers[worker.number]
        if worker.link.exit is not None:
            self.remove(worker.number, now)

    def remove(self, number: int, now: float) -> None:
        """Clean up after a worker that has ended, or has had enough time to end.

        Its memory stays while results view it.
        """
        ending = self._ending.pop(number, None)
        # The worker ended after that time.
        if ending is None:
            return
        worker = ending.worker
        if worker.link.exit is None:
            worker.link.kill()
        else:
            worker.exit_code = worker.link.exit.code
        self._deliveries.unmap(self._memory.slabs_of(number))
        worker.note_end()
        self._driver.tell_waiters()
        if ending.death is not None:
            ending.death(now)
        # A start may have failed because this worker took the resources.
        elif self.again_at < math.inf:
            self.fill(now)

    @property
    def gone(self) -> list[WorkerHandle]:
        """Workers that are gone, and may still have a backlog."""
        return [
            *dict.fromkeys([*self.unplaced, *(ending.worker for ending in self._ending.values())])
        ]

    @property
    def awaits_exits(self) -> bool:
        """Whether workers that were ready have not ended yet. Any thread may ask."""
        return any(ending.worker.ready for ending in list(self._ending.values()))

    @property
    def has_deaths(self) -> bool:
        """Whether a worker has died, and it is not known yet how."""
        return any(ending.death is not None for ending in self._ending.values())

    def keep_time(self, now: float) -> float:
        """Do what is due, and return when to look next, on the clock of time.monotonic."""
        if not self._ending and self.again_at == math.inf:
            return math.inf
        for number, ending in list(self._ending.items()):
            if ending.is_last_look:
                self.remove(number, now)
            # The worker may have ended in time, while this thread was late.
            elif ending.until <= now:
                self._ending[number] = ending._replace(is_last_look=True)
        if now >= self.again_at:
            self.fill(now)
        return min([self.again_at, *(ending.until for ending in self._ending.values())])

    def kill(self, worker: WorkerHandle, now: float, blames: bool = False) -> None:
        """Kill the worker. `blames` means that its running call is blamed."""
        worker.link.kill()
        self.lose(worker, now, blames)

    def lose(self, worker: WorkerHandle, now: float, blames: bool = True) -> None:
        """Remove a worker that died. Its work goes to other workers, except for a call that has
        killed too many."""
        is_ours = not blames or worker.termination is not None
        death = death_of(worker, blames)
        if self._driver.tracer.trace is not None:
            self._driver.tracer.died(worker)
        died = WorkerDiedError(None, "forward", worker.number, None)

        def has_exited(now: float) -> None:
            died.exit_code = worker.exit_code
            if worker.link.exit is not None and worker.link.exit.refusal is not None:
                self._note_refusal(worker.link.exit.refusal, now)
            else:
                self._look_into(worker, death, now)
            self.requeue(worker, now)
            # Other workers have work now, and the scheduling thread may be about to sleep.
            self._driver.wake()

        self.deaths += worker.ready
        self.kills += is_ours
        self._remove_at_once(worker, died, now, has_exited)
        # Chunks behind the first one cannot have caused the death.
        if worker.number in self._ending:
            behind = death.chunks[1:]
            del death.chunks[1:]
            worker.under_way.drop_behind()
            self._recovery.take_apart(worker, behind, now)
        # If the worker had not started, `_look_into` decides whether workers can start at all.
        if worker.ready:
            self.fill(now)

    def _look_into(self, worker: WorkerHandle, death: Death, now: float) -> None:
        """Find out who is to blame for a death, now that the exit is known or awaited in vain."""
        code = worker.exit_code
        # The death of a worker that had started was counted before.
        self.deaths += not worker.ready
        is_blamed = death.blames and death.chunks and self._recovery.blame(worker, code, death, now)
        if death.blames and not is_blamed and self._life.broken is None:
            phase, words = "idle" if worker.ready else "start", "; ".join(worker.end_in_words)
            report(logging.WARNING, "%s", WorkerDiedError(None, phase, worker.number, code, words))
        self._recovery.take_apart(worker, death.chunks, now)
        if self._is_last_start(worker):
            words = "; ".join([f"so did {FAILED_STARTS} in a row", *worker.end_in_words])
            self._life.break_off(
                WorkerDiedError(None, "start", worker.number, code, words, worker.stack)
            )
        else:
            self.fill(now)

    def _is_last_start(self, worker: WorkerHandle) -> bool:
        """Whether workers cannot be started.

        Workers that start together and die together count as one attempt.
        """
        others_start = bool(worker.link.lost) and any(each.ready for each in self._workers.values())
        if worker.ready or worker.link.could_start or others_start:
            self._failed_starts = 0
        elif worker.number > self._started_before_failure:
            self._failed_starts += 1
            self._started_before_failure = self._newest
        return self._failed_starts == FAILED_STARTS

    def requeue(self, worker: WorkerHandle, now: float) -> None:
        """Give the backlog of a worker that is gone to other workers.

        If the worker died, this happens as soon as it is known how.
        """
        if worker.number in self._ending and self._ending[worker.number].death is not None:
            return
        waiting = []
        while worker.backlog:
            try:
                item = worker.backlog.popleft()
            except IndexError:  # After the pool's end several threads may do this.
                break
            if not self._recovery.revive(item, worker, now):
                waiting.append(item)
        if waiting:
            worker.backlog.put_back(waiting)
            if worker not in self.unplaced:
                self.unplaced.append(worker)
        self._driver.tell_waiters()

    def _requeue_unplaced(self, now: float) -> None:
        unplaced, self.unplaced = self.unplaced, []
        for gone in unplaced:
            self.requeue(gone, now)

    def end_all(self, reason: BaseException, gently: bool, now: float) -> None:
        """End all workers.

        Idle workers end by themselves. With `gently` all workers do.
        """
        for worker in list(self._workers.values()):
            if gently or (worker.ready and worker.under_way.is_idle and self._life.broken is None):
                self._deliveries.transmit(worker, [Stop(waits=gently)], now)
            else:
                worker.link.kill(self._life.ends_by)
        for worker in list(self._workers.values()):
            self._remove_at_once(worker, reason, now)
        # Their backlogs are answered now, however they died.
        for number, ending in self._ending.items():
            self._ending[number] = ending._replace(death=None)

    def await_exits(self, clock: Callable[[], float]) -> None:
        """Wait for all exits in this thread, because all other waits have ended."""
        until = max((ending.until for ending in self._ending.values()), default=0.0)
        left = math.inf
        while self._ending and left > 0:
            left = max(0.0, until - clock())
            for link in self._engine.wait(left):
                if link.exit is not None:
                    self.remove(link.number, clock())
        for number in list(self._ending):
            self.remove(number, clock())


# the limit that has been reached, for each error number
LIMITS = {
    errno.EMFILE: ("RLIMIT_NOFILE", "open files of a process (ulimit -n)"),
    errno.EAGAIN: ("RLIMIT_NPROC", "processes and threads (ulimit -u; pids.max of a cgroup)"),
    errno.ENOMEM: ("RLIMIT_AS", "memory (ulimit -v; memory.max of a cgroup)"),
    errno.ENFILE: ("", "open files of the system (fs.file-max)"),
    errno.ENOSPC: ("", "shared memory (the size of /dev/shm)"),
}


def with_limit(error: OSError) -> OSError:
    """Return the error with the name of the system's limit that has been reached."""
    name, words = LIMITS.get(error.errno or 0, ("", ""))
    if not words:
        return error
    if name:
        soft, _ = resource.getrlimit(getattr(resource, name))
        words += f"; {name} is {'unlimited' if soft == resource.RLIM_INFINITY else soft} here"
    reason = (
        f"{error.strerror}: no worker can be started, and none is left that takes calls; raise the "
        f"limit of {words}"
    )
    return OSError(
        error.errno, f"{reason}, or use fewer workers, and drop results whose graphs are kept"
    )
