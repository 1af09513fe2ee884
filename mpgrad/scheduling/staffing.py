"""The workers of a pool come and go: started, replaced, sent away, buried; and what they leave behind is seen to. (Caller.)

    hire ──► ready ──► retiring (no new calls; it stays while graphs there are wanted) ──► told to stop ──┐
               └──────────────────────────────────────────────────────────────────► died: lose ───────────┴──► bury ──► rescue
Assumes: called by the scheduling thread; any may set `wanted`, and read `deaths` and `kills`.
"""

from __future__ import annotations

import itertools
import logging
import math
import time

from mpgrad.calls.device_choice import missing_device
from mpgrad.calls.output import log_levels, report
from mpgrad.engines.protocol import Engine
from mpgrad.environment import current_environment
from mpgrad.errors import PoolClosedError, WorkerDiedError
from mpgrad.place import preparation
from mpgrad.scheduling.caller_memory import CallerMemory
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.driver import Driver
from mpgrad.scheduling.gradient_sender import GradientSender
from mpgrad.scheduling.lifecycle import Lifecycle, Phase
from mpgrad.scheduling.recovery import Recovery
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import Start, Stop

__all__ = ["Staff"]

FAILED_STARTS = 3  # in a row, before the pool gives up
STAFF_GAP = 0.25  # seconds between two attempts to start workers that the system refuses
STAFF_PATIENCE = 2.0  # seconds of such attempts, before a pool without any worker gives up


class Staff:
    """Guarantees: there are as many active workers as there should be, or the system refuses; nothing that waited for a worker
    that is gone is forgotten.
    """

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
        self.wanted = settings.workers  # active ones
        self.deaths = 0
        self.kills = 0  # of these, by the pool
        self.again_at = math.inf  # when it is tried again to start those that are missing
        self.stranded: list[WorkerHandle] = []  # that are gone, and nobody has a place who could take over what waits for them
        self._numbers = itertools.count(1)
        self._failed_starts = 0
        self._started_before_failure = 0  # the last worker that did
        self._understaffed_since: float | None = None

    def fill(self) -> None:
        """Have as many workers as there should be, apart from those that only keep graphs; after the end, none."""
        if self._life.has_ended:
            return
        self.again_at = math.inf
        # whose site is lost is as good as gone; who waits for room is the first to be dispensed with
        active = [worker for worker in self._workers.values() if not (worker.retiring or worker.link.lost)]
        active.sort(key=lambda each: not each.link.has_place)
        try:
            for _ in range(self.wanted - len(active)):
                self.hire()
            self._understaffed_since = None
        except OSError as error:
            self._bear(error)
        except RuntimeError as error:  # workers would not be what they should be
            self._life.break_off(error)
        too_many = active[self.wanted :]
        for worker in too_many:
            worker.send_home()
        for worker in too_many:
            if not worker.link.has_place:  # else it is told when it has done what it was given
                self.retire(worker)
        self._rescue_stranded()

    def _bear(self, error: OSError) -> None:
        """No further worker can be started: try again soon, for a while at least where none is left."""
        now = time.monotonic()
        if self._understaffed_since is None:
            self._understaffed_since = now
            report(logging.WARNING, "no further worker can be started now (%s)", error)
        if not self._workers and now - self._understaffed_since > STAFF_PATIENCE:
            self._life.break_off(error)
        self.again_at = now + STAFF_GAP

    def hire(self) -> None:
        """Start a worker, and tell it what it is to be. Raises OSError where the system refuses, RuntimeError where it will."""
        settings, crossing = self._settings, self._memory.crossing
        device = 0
        if settings.devices is not None:
            device = missing_device(settings.devices, (each.device for each in self._workers.values() if not each.retiring))
        number = next(self._numbers)
        worker = WorkerHandle(number, self._engine.start(number), device)
        self._workers[number] = worker
        start = Start(
            settings.initializer,
            settings.threads,
            settings.graph_bytes,
            settings.spares_memory,
            log_levels(),
            current_environment() if settings.since is None else settings.since.begin,
            None if settings.remote else preparation(),
            b"" if crossing is None else crossing.post(device),
            settings.remote,
        )
        self._deliveries.transmit(worker, [start])
        if crossing is not None and device and (offered := crossing.offer(device)) is not None:
            slot, trial = offered
            worker.loans.lend(slot.address, slot)
            self._deliveries.transmit(worker, [trial])

    def note_ready(self) -> None:
        """A worker has started."""
        self._failed_starts = 0
        self._rescue_stranded()

    def retire(self, worker: WorkerHandle) -> None:
        """It takes no new calls; it stays while it keeps graphs."""
        if worker.gone is not None:  # `fill` has seen to it
            return
        if not worker.retiring:
            worker.send_home()
            self.fill()
        if worker.is_done or self._is_forsaken(worker):
            self._deliveries.transmit(worker, [Stop()])
            self.bury(worker, PoolClosedError(f"worker {worker.number} has ended after {worker.calls_done} calls"))
            self.fill()  # should it have failed before, for want of what this one had
            self.rescue(worker)
            self._driver.tell_waiters()

    def _is_forsaken(self, worker: WorkerHandle) -> bool:
        """It has but sums of a backward that failed, it seems, as there are later ones; one that is wanted is made again."""
        is_one_of_many = sum(each.retiring for each in self._workers.values()) > self.wanted
        stays = self._life.phase is Phase.LEAVING
        return is_one_of_many and not stays and worker.has_sums_before(self._gradients.last_backward)

    def send_away(self) -> None:
        """All of them, each as soon as nobody needs it."""
        self.wanted = 0
        for worker in list(self._workers.values()):
            worker.is_last = True
            self.retire(worker)

    def bury(self, worker: WorkerHandle, reason: BaseException) -> int | None:
        """Forget a worker; returns its exit code. Its memory stays while it is viewed."""
        code = worker.link.end()
        worker.gone = reason
        del self._workers[worker.number]
        self._deliveries.unmap(self._memory.slabs_of(worker.number))
        worker.take_leave()
        return code

    def kill(self, worker: WorkerHandle) -> None:
        """For what it is at, which nobody wants any more, and is no fault of the call's."""
        worker.link.kill()
        self.lose(worker, blames=False)

    def lose(self, worker: WorkerHandle, blames: bool = True) -> None:
        """It died. All that it had been given goes to others, but for a call that kills too often."""
        is_ours = not blames or worker.doomed is not None
        begun, offset = worker.under_way.begun(), worker.under_way.offset
        if worker.link.lost:
            worker.overdue = None  # it has not ended for that
        elif worker.doomed is not None and worker.doomed.begun != begun:  # what took too long was done in that moment
            worker.overdue, blames = None, False
        chunks = list(worker.under_way.chunks.values())
        if self._driver.notes.recording is not None:
            self._driver.notes.died(worker)
        died = WorkerDiedError(None, "forward", worker.number, None)
        died.exit_code = worker.exit_code = self.bury(worker, died)
        self.deaths += 1
        self.kills += is_ours
        is_blamed = blames and chunks and self._recovery.blame(worker, died.exit_code, chunks, begun[0], offset)
        if blames and not is_blamed and self._life.broken is None:
            phase, words = "idle" if worker.ready else "start", "; ".join(worker.end_in_words)
            report(logging.WARNING, "%s", WorkerDiedError(None, phase, worker.number, died.exit_code, words))
        self._recovery.take_apart(worker, chunks)
        if self._is_last_start(worker):
            words = "; ".join([f"so did {FAILED_STARTS} in a row", *worker.end_in_words])
            self._life.break_off(WorkerDiedError(None, "start", worker.number, died.exit_code, words, worker.stack))
        else:
            self.fill()
        self.rescue(worker)
        self._driver.wake()  # others have something to do now; the scheduling thread may be about to sleep

    def _is_last_start(self, worker: WorkerHandle) -> bool:
        """Whether workers cannot be started. Those that start together and die together count as one attempt."""
        others_start = bool(worker.link.lost) and any(each.ready for each in self._workers.values())
        if worker.ready or worker.link.could_start or others_start:
            self._failed_starts = 0
        elif worker.number > self._started_before_failure:
            self._failed_starts += 1
            self._started_before_failure = max(self._workers, default=worker.number)
        return self._failed_starts == FAILED_STARTS

    def rescue(self, worker: WorkerHandle) -> None:
        """What waited for a worker that is gone."""
        waiting = []
        while worker.backlog:
            try:
                item = worker.backlog.popleft()
            except IndexError:  # after the end several threads may do this
                break
            if not self._recovery.revive(item, worker):
                waiting.append(item)
        if waiting:
            worker.backlog.extendleft(reversed(waiting))
            if worker not in self.stranded:
                self.stranded.append(worker)
        self._driver.tell_waiters()

    def _rescue_stranded(self) -> None:
        stranded, self.stranded = self.stranded, []
        for gone in stranded:
            self.rescue(gone)

    def dissolve(self, reason: BaseException, gently: bool) -> None:
        """The last of them end; those with nothing to do run their exit handlers, as all do if it is done `gently`."""
        for worker in list(self._workers.values()):
            if gently or (worker.ready and not worker.under_way and self._life.broken is None):
                self._deliveries.transmit(worker, [Stop(waits=gently)])
            else:
                worker.link.kill()
        for worker in list(self._workers.values()):
            self.bury(worker, reason)
