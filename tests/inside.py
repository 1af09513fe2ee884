"""Contains all that tests know about the inside of a pool that runs: its time limits, its
scheduling thread, and what the scheduler knows of workers, of memory and of functions.

Use `pool.stats()`, `pool.story()`, `pool.timeline()` and `mpgrad.testing` instead where they tell
enough. If you change those classes, change this module; a test checks that no other test reaches
into a pool. `simulation/adapter.py` has the same task for the simulation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.callbacks import CallbackThread
from mpgrad.calls import packing
from mpgrad.calls.operations import Operation
from mpgrad.machine import deaths
from mpgrad.machine.queue import CallQueue
from mpgrad.machine.timing import Prediction
from mpgrad.scheduling.known_functions import KnownFunctions
from mpgrad.submission import submitter
from mpgrad.submission.submitter import Feeder
from mpgrad.wire.agent_messages import ProgressRecord

PATIENCE = 20.0  # seconds for a machine that is busy
LIMIT = 60.0  # seconds, a time limit that no call exceeds unless it is made overdue


def scheduler_of(pool: mpgrad.Pool | mpgrad.Executor) -> Any:
    within: Any = pool._pool if isinstance(pool, mpgrad.Executor) else pool
    return within._scheduler


# --- time limits


@contextlib.contextmanager
def hung_calls_are_overdue(
    pool: mpgrad.Pool | mpgrad.Executor,
    hung: Callable[[], int],
    is_at: Callable[[int], bool] = lambda pid: True,
) -> Iterator[None]:
    """Have hung calls begin before their time, so that they are overdue, while more calls have
    hung, as `hung` counts them, than workers were killed.

    So time limits can be so long that a busy machine keeps no other call from being in time. If
    several workers may have work, `is_at` tells from its pid whether a worker is at such a call.
    """
    scheduler, is_over = scheduler_of(pool), threading.Event()

    def found() -> list[Any]:
        workers = list(scheduler.workers.values())
        is_ending = any(each.termination is not None for each in workers)
        if is_ending or hung() <= scheduler.supervisor.kills:
            return []
        return [each for each in workers if has_limit(each) and is_at(each.pid)]

    def look(now: float) -> None:
        for worker in found():
            make_overdue(worker, now)

    def watch() -> None:
        while not is_over.wait(2e-3):
            # This is the only order. The thread has to look by itself at all that follows.
            if found():
                scheduler.post(look)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def has_limit(worker: Any) -> bool:
    first = worker.under_way.first
    return first is not None and first.timeout is not None


def make_overdue(worker: Any, now: float) -> None:
    """Have the worker's running call begin a second more than its time limit ago, in the scheduling
    thread. Nothing changes while the worker loads a function."""
    under_way = worker.under_way
    since = now - under_way.first.timeout - 1.0
    under_way.since = min(under_way.since, since)
    progress = under_way.progress
    if progress is not None and progress.started is not None:
        progress._numbers[ProgressRecord.STARTED] = int(min(progress.started, since) * 1e9)


def is_overdue(worker: Any, now: float) -> bool:
    """Return whether the worker's running call is overdue, as far as its answers were read."""
    return deaths.overdue_at(worker, now) <= now


# --- the scheduling thread


def in_scheduling_thread(pool: mpgrad.Pool, act: Callable[[], object]) -> None:
    """Have the scheduling thread call `act` in its next turn."""
    scheduler_of(pool).post(lambda now: act())


def let_it_hear(pool: mpgrad.Pool) -> None:
    """Wait until the scheduling thread has done what it was told before."""
    heard = threading.Event()
    in_scheduling_thread(pool, heard.set)
    assert heard.wait(PATIENCE)


def sleeps_soundly(pool: mpgrad.Pool) -> bool:
    """Return whether the scheduling thread sleeps until it is woken."""
    return bool(scheduler_of(pool)._sleeping_soundly)


def waiting_threads(pool: mpgrad.Pool) -> int:
    """Return how many threads wait for the pool."""
    return len(scheduler_of(pool)._waiters)


def let_waiting_threads_look(pool: mpgrad.Pool) -> None:
    """Have threads that wait look whether they need to wait longer."""
    scheduler_of(pool).tell_waiters()


def interrupt_next_order(patch: pytest.MonkeyPatch, pool: mpgrad.Pool, is_told: bool) -> None:
    """Raise KeyboardInterrupt in the next thread that tells the scheduling thread something, before
    or after that."""
    scheduler = scheduler_of(pool)
    post = scheduler.post

    def interrupted(order: Callable[[float], None]) -> None:
        patch.undo()
        if is_told:
            post(order)
        raise KeyboardInterrupt

    patch.setattr(scheduler, "post", interrupted)


@contextlib.contextmanager
def held_orders(pool: mpgrad.Pool) -> Iterator[Callable[[], None]]:
    """Hold back what the scheduling thread is told in the body, until the function that the body
    gets is called."""
    scheduler, held = scheduler_of(pool), list[Any]()

    def let_go() -> None:
        for order in held:
            scheduler.post(order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "post", held.append)
        yield let_go


def shown_progress(pool: mpgrad.Pool) -> list[Any]:
    """Return the `Reporter`s that the pool has not forgotten."""
    return list(scheduler_of(pool).callbacks.watched)


# --- operations that end before their time


def cancel(pool: mpgrad.Pool, future: mpgrad.Future[Any]) -> None:
    """Cancel a call that may have begun, as an interrupt does."""
    scheduler_of(pool).cancel_with_grace(future._operation)


def cancel_all(pool: mpgrad.Pool) -> None:
    """Cancel all calls, as an interrupt of an executor's `with` block does."""
    scheduler_of(pool).cancel_all_with_grace()


def cancel_by_force(pool: mpgrad.Pool, operation: Any) -> None:
    """Cancel the operation and kill the workers that run a call of it, in the scheduling thread."""
    scheduler = scheduler_of(pool)
    scheduler.cancelling.kill(operation, scheduler.clock())


def leave(pool: mpgrad.Pool) -> None:
    """Let each worker end when it is not needed any more, as `Executor.shutdown` does."""
    scheduler_of(pool).leave()


def break_off(pool: mpgrad.Pool, error: BaseException) -> None:
    """Break the pool, as a fault in the scheduling thread does."""
    scheduler = scheduler_of(pool)
    in_scheduling_thread(pool, lambda: scheduler.life.break_off(error))


# --- workers


def handles(pool: mpgrad.Pool) -> list[Any]:
    """Return the scheduler's `WorkerHandle` of each worker."""
    return list(scheduler_of(pool).workers.values())


def graphs_known(pool: mpgrad.Pool) -> int:
    """Return of how many graphs the scheduler knows, including those that workers dropped."""
    return sum(len(worker.graphs) for worker in handles(pool))


def lent_slots(pool: mpgrad.Pool) -> int:
    return sum(len(worker.lent_slots) for worker in handles(pool))


def workers_begun(pool: mpgrad.Pool) -> int:
    """Return how many workers have been started, including those that are gone."""
    return int(scheduler_of(pool).supervisor._newest)


def is_refused_workers(pool: mpgrad.Pool) -> bool:
    """Return whether the system has just refused to start a worker."""
    return scheduler_of(pool).supervisor._refused_since is not None


def agents(pool: mpgrad.Pool) -> list[Any]:
    """Return the `AgentHandle`s of a pool on a cluster."""
    return list(scheduler_of(pool).engine._agents)


def recorded_in_worker(pool: mpgrad.Pool) -> tuple[bool, Any]:
    """Return whether the worker of an inline pool records a timeline, and what it has recorded."""
    worker = scheduler_of(pool).engine._worker
    return worker._records, worker._runner.spans


def avoided_nodes(pool: mpgrad.Pool) -> set[str]:
    return set(scheduler_of(pool).engine._avoided)


def mirrors(pool: mpgrad.Pool) -> list[list[Any]]:
    """Return for each agent the slabs of which it has copies."""
    return [list(agent._slabs.values()) for agent in agents(pool)]


# --- what is known of functions


def functions_known(pool: mpgrad.Pool) -> int:
    return len(scheduler_of(pool).functions._numbers)


def measured(pool: mpgrad.Pool) -> list[Any]:
    """Return the times that are known of each function."""
    return list(scheduler_of(pool).functions._measured.values())


@contextlib.contextmanager
def every_loss_gets(gradient: float | None, is_confirmed: bool = True) -> Iterator[None]:
    """Predict this gradient for all losses with `graphs="auto"`, from the first map on. None
    predicts nothing.

    So all backwards that may be eager are eager. They also drop their graphs, unless the prediction
    is not confirmed.
    """
    predicted = None if gradient is None else Prediction(gradient, is_confirmed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KnownFunctions, "predicted", lambda self, pickled: predicted)
        yield


def pretend_seconds_of_items(patch: pytest.MonkeyPatch, seconds: float | None) -> None:
    """Have all items take so long, as far as callers know who pack them; None is not known."""
    patch.setattr(KnownFunctions, "own_seconds", lambda self, pickled: seconds)


def pretend_seconds_of_calls(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have all calls take so long, as far as the scheduler knows."""
    patch.setattr(KnownFunctions, "seconds", lambda self, function, unknown: seconds)


def bundle(patch: pytest.MonkeyPatch, size: int) -> None:
    """Have all maps pack so many items into a call."""
    patch.setattr(
        Feeder, "_bundle_size", lambda self, operation, total: 1 if total is None else size
    )


def packed_bundles(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each bundle that is packed from now on."""
    sizes: list[int] = []

    def pack_bundle(how: Any, index: int, calls: Sequence[Any], *others: Any) -> Any:
        sizes.append(len(calls))
        return packing.pack_bundle(how, index, calls, *others)

    patch.setattr(submitter, "pack_bundle", pack_bundle)
    return sizes


def packed_windows(patch: pytest.MonkeyPatch, pool: mpgrad.Pool) -> list[int]:
    """Return a list that gets the number of packed items each time that workers hear of some."""
    packed, scheduler = list[int](), scheduler_of(pool)
    admit = scheduler.admit

    def noted(operation: Any, waits: bool = False) -> None:
        packed.append(operation.items)
        admit(operation, waits)

    patch.setattr(scheduler, "admit", noted)
    return packed


def send_all_ahead(patch: pytest.MonkeyPatch) -> None:
    """Send calls to workers that run others, even if they had better wait for an idle one."""
    patch.setattr(CallQueue, "_had_better_wait", lambda *_: False)


def take_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """Have workers run what they are given, even if the machine stops one of them for a while."""
    patch.setattr(CallQueue, "take_back", lambda self, workers, now: False)


# --- moments of an operation


def before_ends_are_told(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` whenever an operation has just ended and nobody has been told."""
    tell = Operation.tell_if_finished

    def tell_late(operation: Operation) -> None:
        if operation.finished:
            act()
        tell(operation)

    patch.setattr(Operation, "tell_if_finished", tell_late)


def patience_with_stacks(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give a worker whose call is overdue so long to write its stack and end."""
    patch.setattr(deaths, "TRACEBACK_PATIENCE", seconds)


def patience_with_callbacks(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have callers wait so long for the callbacks thread."""
    patch.setattr(CallbackThread.catch_up, "__defaults__", (seconds,))


def sums_kept(result: torch.Tensor) -> int:
    """Return how many sums of captures' gradients are expected for the operation of a result."""
    return len(result.grad_fn.graph.owner._sums)  # type: ignore[union-attr]


def keeps_no_graphs(pool: mpgrad.Pool) -> bool:
    return bool(scheduler_of(pool).settings.graph_bytes == 0)


def before_gradients_are_packed(
    patch: pytest.MonkeyPatch, pool: mpgrad.Pool, act: Callable[[Any, Any], object]
) -> None:
    """Call `act` with the graph of each backward and with its worker, before its gradients are
    packed for this worker."""
    sender = scheduler_of(pool).gradients
    prepare = sender._prepare

    def prepare_late(backward: Any, worker: Any) -> None:
        act(backward.graph, worker)
        prepare(backward, worker)

    patch.setattr(sender, "_prepare", prepare_late)


# --- memory


def borrowed_by(pool: mpgrad.Pool) -> set[int]:
    """Return the addresses of workers' memory that the caller reads."""
    return {address for address, _ in scheduler_of(pool).memory.foreign_slabs._views}


def keep_no_idle_memory(pool: mpgrad.Pool) -> None:
    """Have the caller give slabs back as soon as nothing uses them."""
    scheduler_of(pool).memory.arena._most_idle = 0


def transfer_of(pool: mpgrad.Pool) -> Any:
    return scheduler_of(pool).memory.device_transfer
