"""Contains all that the simulation knows about the scheduler's classes: how to make them, and where
to look inside.

If you change those classes, change this module. `engine.py` knows the messages of the wire, and
`history.py` knows neither.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any
from unittest import mock

import torch
from engine import CheckFailed, SimulatedEngine, SimulatedLenders, Task, World

from mpgrad.autograd.remote_graph import (
    Backward,
    BackwardRequest,
    ExpectedGradients,
    OperationGradients,
    PendingOutcome,
    Promise,
    RemoteGraph,
)
from mpgrad.calls.operations import (
    DeliveredResult,
    FailedResult,
    Listener,
    Operation,
    SubmittedOperation,
    let_go,
)
from mpgrad.calls.packing import OperationOptions, PackedCall, PickledFunction, SharedFunction
from mpgrad.errors import CallNames
from mpgrad.machine import ledger
from mpgrad.machine.story import Story
from mpgrad.memory import arena
from mpgrad.scheduling import caller_memory, gradients, recovery, supervisor
from mpgrad.scheduling.dispatcher import Dispatcher
from mpgrad.scheduling.gradients import OperationLink
from mpgrad.scheduling.settings import Settings
from mpgrad.torch_state.modes import current_modes
from mpgrad.wire.messages import LogLevels
from mpgrad.wire.tensor_refs import NUMBER_OF_DTYPE, PackedTensor

FLOAT64 = NUMBER_OF_DTYPE[torch.float64]
MODES = current_modes()


class Environment:
    """The environment of the caller's process, see `mpgrad.environment.EnvironmentChanges`."""

    begin: Any = None

    def __init__(self) -> None:
        self.now = b""

    def changes(self) -> bytes:
        return self.now


@contextlib.contextmanager
def simulated(world: World, most_sums: int = 2) -> Iterator[None]:
    """Run the body with the world's shared memory, without logging, and without reading torch's
    modes."""
    foreign_slabs = type("ForeignSlabs", (SimulatedLenders,), {"world": world})
    replies = CountedReplies()
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (
                arena,
                "watch",
                here_alone(lambda view: None, arena.watch),
            ),  # forked children would look for memory that does not exist
            (caller_memory, "ForeignSlabs", foreign_slabs),
            (gradients, "current_modes", lambda: MODES),
            (supervisor, "log_levels", lambda: LogLevels({}, {}, 0)),
            (recovery, "kills_for_memory", lambda: 0),
            (ledger, "MOST_SUMS", most_sums),
            (PendingOutcome, "settle", replies.wrapped(PendingOutcome.settle)),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        before = logging.root.manager.disable
        stack.callback(logging.disable, before)
        logging.disable(logging.CRITICAL)
        yield


def here_alone(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Use `simulated` only in this thread. Other threads of this process have their own pools,
    which are real."""
    this = threading.get_ident()
    return lambda *given: simulated(*given) if threading.get_ident() == this else real(*given)


class CountedReplies:
    """Checks that each backward gets one reply. A cancelled backward may still be answered."""

    def wrapped(
        self, settle: Callable[[PendingOutcome, Any], None]
    ) -> Callable[[PendingOutcome, Any], None]:
        def checked(reply: PendingOutcome, outcome: Any) -> None:
            if reply.arrived and not (
                reply.has_failed and "interrupted" in str(error_of_reply(reply))
            ):
                raise CheckFailed("a backward gets two replies")
            settle(reply, outcome)

        return checked


class SimulatedScheduler(Dispatcher):
    """The real scheduler without its thread. The history makes it wake up, work and fall asleep.
    While it sleeps, callers and workers go on."""

    def __init__(self, settings: Settings, engine: SimulatedEngine, world: World) -> None:
        super().__init__(settings, engine, world.clock)
        self.world = world
        self.simulated = engine
        self.handles: list[Any] = []  # of all workers that have ever existed
        self.next_look: float | None = None  # when the sleep ends by itself
        self.drive: Callable[[], bool]  # makes something happen; returns False if nothing can
        self.after_work: Callable[[], None] = lambda: None  # checks
        self.meanwhile: Callable[[], None] = lambda: None  # other threads, in the middle of a turn

    def start(self) -> None:
        self.supervisor.fill(self.clock())
        self._begin_sleep()

    def hand_over(self) -> None:
        """Wake the scheduler. No other thread can wait for the turn, because this thread also runs
        it."""
        self.wake()

    def join(self) -> None:
        """Do nothing: the history goes on until the end."""

    def _sleep_until(self, told: threading.Lock, timeout: float | None) -> None:
        while told.locked():
            if not self.drive():
                raise CheckFailed("a thread waits for ever")

    @property
    def is_woken(self) -> bool:
        return self.simulated.is_woken

    @property
    def has_turn(self) -> bool:
        """Whether its sleep ends for a reason other than messages from workers."""
        is_due = self.next_look is not None and self.next_look <= self.world.now
        return self.is_woken or is_due

    def turn(self) -> None:
        if self.life.has_ended:
            return
        self.simulated.is_woken = False
        self.wake_up(self.engine.wait(0))
        if not self.life.is_stopping:
            self._begin_sleep()
            return
        try:
            self.end()
        finally:
            self._is_over = True
            self.tell_waiters()

    def _begin_sleep(self) -> None:
        patience = self.fall_asleep()
        self.next_look = None if patience is None else self.world.now + patience

    def work(self) -> None:
        super().work()
        self.handles += [each for each in self.workers.values() if each not in self.handles]
        self.after_work()

    def keep_time(self, now: float) -> float:
        self.meanwhile()
        return super().keep_time(now)


def new_scheduler(
    world: World, environment: Environment, nodes: int, **settings: Any
) -> SimulatedScheduler:
    given = Settings(
        initializer=b"",
        threads=1,
        spares_memory=False,
        since=environment,  # type: ignore[arg-type]
        **settings,
    )
    scheduler = SimulatedScheduler(given, SimulatedEngine(world, nodes), world)
    scheduler.start()
    return scheduler


# --- calls


def new_function(scheduler: SimulatedScheduler, code: bytes, with_captures: bool) -> SharedFunction:
    pickled = PickledFunction(code, [], False, None, ())
    function = SharedFunction(
        pickled, scheduler.packer, scheduler.forget_function, CallNames("simulated", "item")
    )
    if with_captures:
        function.slot = scheduler.world.slot()  # type: ignore[assignment]
    return function


def new_operation(
    scheduler: SimulatedScheduler,
    function: SharedFunction,
    environment: bytes,
    is_submitted: bool,
    listener: Listener,
    **options: Any,
) -> Operation:
    kind = SubmittedOperation if is_submitted else Operation
    story = Story()
    link = OperationLink(scheduler.gradients, function, MODES, None, None, False)
    timeout = options.get("timeout")
    owner = OperationGradients(link, function.number, function.names, False, timeout, story)
    how = OperationOptions(function, MODES, None, story, environment, **options)
    return kind(how, owner, listener=listener)


def add_call(
    operation: Operation, task: Task, items: int, slot: Any, sources: Sequence[SubmittedOperation]
) -> None:
    """Add a call, which is sent as the number of its task, with the caller's memory if there is a
    `slot`."""
    packed = (
        [] if slot is None else [PackedTensor(FLOAT64, (), None, slot.address, 8, 0, None, slot)]
    )
    call = PackedCall(
        operation.added, task.number, packed, [source.dependency() for source in sources]
    )
    if items > 1:
        call.bundle, call.items = [(None, 1)] * items, items
    operation.add(call)


def taken(operation: Operation) -> dict[int, DeliveredResult | FailedResult]:
    """Take the operation's outcomes, as a request for all values does. After that it no longer has
    them."""
    found = dict(operation.outcomes)
    for outcome in found.values():
        if isinstance(operation, SubmittedOperation) and isinstance(outcome, DeliveredResult):
            for ref in operation._dependencies or ():
                if (dependency := ref()) is not None:
                    dependency.settle(outcome, [])
            operation._dependencies = None
            operation._taken = True
            operation.outcomes.clear()
        let_go(outcome)
    return found


# --- backwards


def send_backward(
    graph: RemoteGraph,
    graph_task: int,
    promise: Any,
    keep: bool,
    whole: bool,
    create: bool,
    captures: bool,
    apart: bool,
) -> Any:
    """Send a backward and return it. `promise` is another backward, whose gradient this one
    needs."""
    asked = BackwardRequest(graph_task, keep, whole, create, wanted=(0,), captures=captures)
    part = torch.zeros(()) if promise is None else Promise(promise, 0)
    backward = Backward(graph, asked, [[part]], apart, waits=promise is not None)
    graph.owner.link.send(backward)
    if captures and not apart:
        graph.owner.add_to_sum(backward.graph_task, ExpectedGradients(backward))
    return backward


def sum_of_captures(operation_home: Any, graph_task: int) -> float:
    """Wait for the sum of the captures' gradients, and return it."""
    return sum(
        float(each)
        for found in operation_home.capture_gradients(graph_task)
        for each in found
        if each is not None
    )


def await_reply(scheduler: SimulatedScheduler, reply: Any) -> None:
    """Wait for a reply as a gate does."""
    scheduler.gradients.wait_for(reply)


def value_of_reply(reply: Any) -> float:
    return float(reply.outcome.tensors()[0])


def error_of_reply(reply: Any) -> BaseException:
    return reply.outcome()  # type: ignore[no-any-return]


def is_cancelled(reference: weakref.ref[Any]) -> bool:
    """Whether the reply was cancelled; False if nobody holds it any more."""
    reply = reference()
    has_failed = reply is not None and reply.arrived and reply.has_failed
    return has_failed and isinstance(error_of_reply(reply), CancelledError)


def forget(reply: Any) -> None:
    """Note that the gates of the backward take nothing more."""
    reply.let_go()


# --- where calls are


def places_of_calls(scheduler: SimulatedScheduler) -> Counter[tuple[int, int]]:
    """Count how often each call, by operation and index, is in a queue or with a worker."""
    found: Counter[tuple[int, int]] = Counter()
    for operation in scheduler.admissions.unfinished:
        found.update((id(operation), call.index) for call in operation.queue)
    for worker in [*scheduler.supervisor.gone, *scheduler.workers.values()]:
        for chunk in worker.under_way.chunks.values():
            if chunk.operation is not None:
                found.update((id(chunk.operation), call.index) for _, call in chunk.calls)
    return found


def places_of_backwards(scheduler: SimulatedScheduler) -> Counter[int]:
    """Count how often each reply that has not arrived is in a backlog or with a worker."""
    found: Counter[int] = Counter()
    for worker in [*scheduler.supervisor.gone, *scheduler.workers.values()]:
        items = [each for each in worker.backlog if isinstance(each, Backward)]
        for chunk in worker.under_way.chunks.values():
            items += chunk.backwards
        found.update(id(each) for each in items if not each.arrived)
    return found


def idle_workers(scheduler: SimulatedScheduler) -> list[int]:
    """Return the workers that may take any call and have none."""
    limit = scheduler.settings.calls
    return [
        worker.number
        for worker in scheduler.workers.values()
        if worker.ready
        and not (worker.under_way or worker.retiring)
        and (limit is None or worker.calls_done < limit)
    ]


def takers(scheduler: SimulatedScheduler) -> set[int]:
    """Return the workers that take calls."""
    return {each.number for each in scheduler.workers.values() if each.ready and not each.retiring}


def calls_behind(scheduler: SimulatedScheduler, number: int, running: tuple[int, ...]) -> int:
    """Return how many calls wait behind the running one that are still needed and that other
    workers may run."""
    worker, found = scheduler.workers[number], 0
    chunks = worker.under_way.chunks
    if running[0] != next(iter(chunks), None):
        return 0
    for at, chunk in chunks.items():
        is_first = at == running[0]
        stays = chunk.operation is None or chunk.operation.options.chunksize is not None
        if chunk.operation is None or (is_first and (stays or worker.under_way.progress.is_far)):
            continue
        begun = running[1] + 1 - chunk.answered if is_first else 0
        found += sum(chunk.wanted()[begun:])
    return found


def workers_with_timeout(scheduler: SimulatedScheduler) -> set[int]:
    """Return the workers that will be ended if they do not answer in time."""
    chunks = {worker.number: worker.under_way.first for worker in scheduler.workers.values()}
    return {
        number
        for number, chunk in chunks.items()
        if chunk is not None and chunk.timeout is not None
    }


def has_queued_calls(scheduler: SimulatedScheduler) -> bool:
    unfinished = scheduler.admissions.unfinished
    return any(call.index < operation.limit for operation in unfinished for call in operation.queue)


def sums_of_worker(worker: Any) -> set[tuple[int, int | None]]:
    """The sums that the scheduler believes the worker has, by function and backward."""
    return {
        (function, graph_task)
        for function, sums in worker.sums._sums.items()
        for graph_task, _ in sums
    }


def kept_of_worker(worker: Any) -> dict[str, int]:
    """Return the sizes of what the scheduler keeps about a worker, by name."""
    return {
        "backlog": len(worker.backlog),
        "chunks under way": len(worker.under_way.chunks),
        "chunks in grace": len(worker.under_way.in_grace) if worker.gone is None else 0,
        "lent slots": len(worker.lent_slots),
        "graphs": len(worker.graphs) if worker.gone is None else 0,
        "sums": len(worker.sums) if worker.gone is None else 0,
        "functions": len(worker.writer.functions) if worker.gone is None else 0,
        "releases": len(worker.graphs.released) if worker.gone is None else 0,
    }


def kept_of_pool(scheduler: SimulatedScheduler) -> dict[str, int]:
    return {
        "inbox": len(scheduler.inbox),
        "unfinished operations": len(scheduler.admissions.unfinished),
        "backlogs of unplaced workers": sum(
            len(worker.backlog) for worker in scheduler.supervisor.unplaced
        ),
        "queued calls": has_queued_calls(scheduler),
    }
