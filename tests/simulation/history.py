"""Random histories of a pool: the requests of callers, the faults that happen at the same time, and
the checks after each event.

    seed ──► Program: settings, rates, steps
        ──► History: each step, then the rest until nothing more happens ──► checks
Each step has its own random numbers. So `shortest` can leave steps out without changing the others.

Checked after each turn of the scheduler
    - each call that has no outcome is in one place: it waits for others, is in a queue, or is with
      one worker
    - each backward that has no reply waits for others, or is in one backlog, or is with one worker
    - no outcome and no reply comes twice; no worker is idle while there are calls in a queue
    - no call waits behind a running one for longer than `WAIT` seconds if there are other workers,
      because the next idle worker gets it
    - a worker may send results of a chunk before the chunk's end
    - the scheduling thread sleeps until something wakes it, so a wake-up that is forgotten, or is
      lost in the middle of a turn, leaves a thread waiting; sleeps also end late, or for no reason
and at the end
    - everything is answered; each failure is one that the truth (see `engine.World`) explains, and
      names its call
    - sums of captures' gradients are the sums of the gradients from each backward
    - nothing is left once all results are dropped; no worker lives once the pool has ended
"""

from __future__ import annotations

import functools
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import adapter
from engine import TWICE, CheckFailed, Rates, Task, World, gradient_of

from mpgrad.calls.operations import FailedResult, Listener
from mpgrad.errors import (
    AncestorFailedError,
    CallTimeoutError,
    PoolClosedError,
    SharedMemoryError,
    WorkerDiedError,
)

# Seconds that a call may take before the calls behind it are taken back. This is twice the longest
# time in `engine`, which is that of a bundle, and includes messages.
WAIT = 1.0
# The caller does not know which call of a chunk runs there, so the time of all of them counts.
REMOTE_WAIT = 5.0
SEEN = 1e-3  # as in `mpgrad.machine.policy`
IDLE_DEATHS = 2  # as in `mpgrad.machine.deaths`
START_PATIENCE = 2.0  # as in `supervisor`
MOST_EVENTS = 20_000  # of one history; more of them mean a livelock
# looks at the clock in a row; more of them mean a wait for a worker that hangs, without a time-out
MOST_LOOKS = 200
STEPS = {  # the relative frequency of each step
    "something_happens": 60,
    "map": 14,
    "submit": 12,
    "take": 14,
    "backward": 16,
    "collect": 5,
    "drop": 6,
    "add_more": 3,
    "cancel": 2,
    "cancel_queued": 2,
    "cancel_future": 1,
    "cancel_with_grace": 2,
    "kill": 2,
    "kill_at": 2,
    "cancel_backward": 4,
    "cancel_all_with_grace": 1,
    "lose_worker": 3,
    "hang": 4,
    "lie": 2,
    "lose_node": 1,
    "refuse_starts": 3,
    "resize": 2,
    "change_environment": 2,
    "time_passes": 4,
    "end_pool": 1,
}

# what other threads do in the middle of a turn; none of these steps waits
MEANWHILE = "map", "submit", "add_more", "cancel", "cancel_backward", "kill", "resize"


class Step(NamedTuple):
    """An action of a caller, or an event."""

    kind: str
    seed: int


class Program(NamedTuple):
    """Everything that a history depends on."""

    seed: int
    workers: int
    retries: int
    timeout_retries: int
    calls: int | None
    keeps: bool  # graphs may be dropped, and are rebuilt even without retries
    nodes: int
    remote: bool
    rates: Rates
    steps: Sequence[Step]
    most_sums: int = 2  # of one function, in a worker


def program_of(seed: int) -> Program:
    choose = random.Random(seed)

    def sometimes(rate: float) -> float:
        return rate if choose.random() < 0.3 else 0.0

    rates = Rates(
        death=sometimes(0.02),
        hang=sometimes(0.03),
        trim=sometimes(0.1),
        refused_start=sometimes(0.2),
        death_at_start=sometimes(0.1),
        failed_start=sometimes(0.01),
        refused_memory=sometimes(0.05),
    )
    retries, keeps = choose.randrange(3), choose.random() < 0.3
    if not (retries or keeps):
        # then workers drop no graphs, because a graph could not be rebuilt
        rates = rates._replace(trim=0.0)
    kinds = choose.choices(list(STEPS), list(STEPS.values()), k=choose.randrange(10, 60))
    return Program(
        seed=seed,
        workers=choose.randrange(1, 4),
        retries=retries,
        timeout_retries=choose.choice((0, 0, 1)),
        calls=choose.choice((None, None, None, 1, 2, 5)),
        keeps=keeps,
        nodes=choose.choice((0, 0, 2)),
        remote=choose.random() < 0.25,
        rates=rates,
        steps=[Step(kind, choose.getrandbits(32)) for kind in kinds],
        most_sums=choose.choice((1, 2, 5)),
    )


class Asked(Listener):
    """An operation and its outcome."""

    _is_told = False

    def __init__(
        self,
        begin: Callable[[Listener], Any],
        options: dict[str, Any],
        number: int,
        is_future: bool,
    ) -> None:
        self.is_future = is_future
        self.options = options
        self.number = number
        self.tasks: list[Task] = []
        self.delivered = self._arrived = deque()
        self.may_start = True  # false if it is a future that was cancelled
        self.is_cancelled = False
        self.is_taken = False
        self.operation = begin(self)

    def _starts(self) -> bool:
        return self.may_start


class Family:
    """A graph and all graphs that derive from it. They are freed together."""

    def __init__(self) -> None:
        self.freeing: list[int] = []  # backwards that should not keep the graph


class Graph:
    """A graph that a caller has."""

    def __init__(self, graph: Any, task: Task, family: Family, asked: Asked) -> None:
        self.graph = graph
        self.task = task
        self.family = family
        self.asked = asked


class Sent:
    """A backward, and the reply that it waits for."""

    def __init__(self, graph: Graph, graph_task: int, reply: Any, promised: Sent | None) -> None:
        self.call = graph.graph.call
        self.graph = graph.graph  # until a caller drops it
        self.task = graph.task
        self.family = graph.family
        self.asked = graph.asked
        self.graph_task = graph_task
        self.reply = reply
        self.promised = promised
        self.in_sum = False
        self.gives_promises = False
        self.is_cancelled = False
        self.is_checked = False


class History:
    """Runs a program."""

    def __init__(self, program: Program, listens: bool = False) -> None:
        self.program = program
        self.world = World(
            program.rates, program.retries, program.timeout_retries, program.remote, listens
        )
        self.asked: list[Asked] = []
        self.asked_of: dict[int, Asked] = {}  # by task
        self.graphs: list[Graph] = []
        self.sent: list[Sent] = []
        self.environment = adapter.Environment()
        self.scheduler: Any = None  # a `SimulatedScheduler`, once it runs
        self._graph_tasks = 0
        self._events = 0
        self._looks = 0  # looks at the clock since a worker could last do something
        self._staffed_at = 0.0  # when a worker that takes calls last existed
        self._count = 0  # of operations
        # by worker: the call that it runs, and the moments of the turns since when calls have
        # waited behind it
        self._waits: dict[int, tuple[tuple[int, ...], list[float]]] = {}
        # the moments by which operations must have ended
        self._deadlines: list[tuple[float, weakref.ref[Any]]] = []

    def run(self) -> None:
        with adapter.simulated(self.world, self.program.most_sums):
            self.world.random.seed(self.program.seed)
            self.world.calls_per_worker = self.program.calls
            self.scheduler = adapter.new_scheduler(
                self.world,
                self.environment,
                self.program.nodes,
                workers=self.program.workers,
                calls=self.program.calls,
                retries=self.program.retries,
                timeout_retries=self.program.timeout_retries,
                graph_bytes=1 if self.program.keeps else None,
                remote=self.program.remote,
            )
            self.scheduler.drive = self.happens
            self.scheduler.after_work = self.check_states
            self.scheduler.meanwhile = self._happens_meanwhile
            for step in self.program.steps:
                self.world.random.seed(step.seed)
                self.world.note(f"--- {step.kind}")
                getattr(self, step.kind)()
            self.scheduler.meanwhile = lambda: None
            self.world.random.seed(self.program.seed)
            self.world.note("--- the end")
            self._end()

    def note(self, text: str) -> None:
        self.world.note(text)

    def choose(self, among: Sequence[Any]) -> Any:
        return self.world.random.choice(among) if among else None

    # --- what happens by itself

    def something_happens(self) -> None:
        for _ in range(self.world.random.choice((1, 3, 10, 30))):
            if not self.happens(patient=False):
                break

    def happens(self, patient: bool = True) -> bool:
        """Let the scheduler take a turn, or a worker make a step, or, if `patient`, time pass.
        Return False if nothing can happen."""
        self._events += 1
        if self._events > MOST_EVENTS:
            raise CheckFailed("it goes on for ever")
        scheduler, world = self.scheduler, self.world
        self._check_patience()
        able = world.able()
        if world.remote and world.random.random() < 0.2 and world.sites_report():
            scheduler.simulated.wake()
        self._looks = 0 if able else self._looks
        # now and then a sleep ends for no reason, but no thread may depend on that
        ends_early = bool(able) and world.random.random() < 0.02
        has_turn = (
            scheduler.has_turn
            or ends_early
            or any(each.link.has_more() or each.link.has_exited() for each in world.workers)
        )
        early = [each for each in world.workers if each.has_early_answer]
        if early and world.random.random() < 0.2:
            world.random.choice(early).answer_early()
        elif (
            has_turn and not scheduler.life.has_ended and (not able or world.random.random() < 0.4)
        ):
            scheduler.turn()
            if not (scheduler.life.has_ended or scheduler.life.is_stopping or scheduler.is_woken):
                self._check_waits()
                self._check_deadlines()
        elif able:
            world.step(world.random.choice(able))
        elif not patient:
            return False
        elif early:
            world.random.choice(early).answer_early()
        elif late := [worker for worker in world.workers if worker.alive and worker.is_late]:
            world.random.choice(late).is_late = False
        elif (
            scheduler.next_look is not None
            and not scheduler.life.has_ended
            and self._looks < MOST_LOOKS
        ):
            self._looks += 1
            world.now = max(world.now, scheduler.next_look) + 1e-6
        elif world.sites_report(patient=True):
            scheduler.simulated.wake()
        elif hung := [worker for worker in world.workers if worker.alive and worker.is_hung]:
            if overdue := adapter.workers_with_timeout(scheduler) & {
                worker.number for worker in hung if not worker.is_loading
            }:
                raise CheckFailed(
                    "a call takes too long, and is not ended", f"workers {sorted(overdue)}"
                )
            self._looks = 0
            world.random.choice(hung).is_hung = False
        else:
            return False
        return True

    def _happens_meanwhile(self) -> None:
        """Let another thread go on in the middle of a turn."""
        if self.world.random.random() < 0.03:
            kind = self.choose(MEANWHILE)
            self.note(f"--- in the middle of a turn: {kind}")
            getattr(self, kind)()

    def time_passes(self) -> None:
        self.world.now += self.choose((0.06, 0.3, 1.0, 2.5))

    # --- requests of callers

    @property
    def is_open(self) -> bool:
        life = self.scheduler.life
        return life.phase == 1 and life.broken is None

    def _ask(self, is_submitted: bool, **options: Any) -> Asked:
        world, choose = self.world, self.world.random
        function = adapter.new_function(
            self.scheduler, b"code %d" % choose.randrange(4), choose.random() < 0.5
        )
        environment = self.environment.now
        world.environments_of_functions[function.number] = environment
        self._count += 1
        begin = functools.partial(
            adapter.new_operation, self.scheduler, function, environment, is_submitted, **options
        )
        asked = Asked(begin, options, self._count, is_submitted)
        self.asked.append(asked)
        world.note(f"operation {asked.number}: {'submit' if is_submitted else 'map'} {options}")
        return asked

    def _add(self, asked: Asked, sources: Sequence[Asked] = (), items: int = 1) -> None:
        choose = self.world.random
        kinds = [
            ("graph",),
            ("graph",),
            ("graph",),
            (),
            ("fails",),
            ("kills",),
            ("graph", "fails backward"),
        ]
        traits = choose.choices(kinds, (6, 6, 6, 4, 1, 1, 3))[0]
        task = self.world.task(traits)
        task.function = asked.operation.options.function.number
        task.environment = asked.operation.options.environment
        task.sources = [source.tasks[0] for source in sources]
        asked.tasks.append(task)
        self.asked_of[task.number] = asked
        slot = self.world.slot() if choose.random() < 0.3 else None
        adapter.add_call(
            asked.operation, task, items, slot, [source.operation for source in sources]
        )
        if self.world.events is not None:
            after = f" after {[each.number for each in task.sources]}" if sources else ""
            self.note(f"  call {task.number} {list(traits)}{after}")

    def map(self) -> None:
        if not self.is_open:
            return
        choose = self.world.random
        asked = self._ask(
            False,
            chunksize=choose.choice((None, None, 1, 3)),
            timeout=choose.choice((None, None, 0.3)),
            stop_at_failure=choose.random() < 0.6,
            at_rest=choose.random() < 0.5,
        )
        items = choose.choice((1, 1, 1, 4))
        for _ in range(choose.randrange(1, 6)):
            self._add(asked, items=items)
        asked.operation.sealed = choose.random() < 0.8
        self.scheduler.admit(asked.operation)

    def add_more(self) -> None:
        open_ones = [each for each in self.asked if not each.operation.sealed and not each.is_taken]
        asked = self.choose(open_ones)
        if asked is not None and self.is_open:
            self.note(f"operation {asked.number} gets more calls")
            for _ in range(self.world.random.randrange(3)):
                self._add(asked)
            asked.operation.sealed = True
            self.scheduler.admit(asked.operation)

    def submit(self) -> None:
        if not self.is_open:
            return
        choose = self.world.random
        earlier = [each for each in self.asked if each.is_future and not each.is_taken]
        asked = self._ask(True, timeout=choose.choice((None, None, 0.3)))
        sources = choose.sample(earlier, min(len(earlier), choose.choice((0, 1, 1, 2))))
        self._add(asked, sources)
        asked.operation.sealed = True
        self.scheduler.admit(asked.operation)

    def take(self) -> None:
        """Take the results of an operation that has ended."""
        asked = self.choose(
            [each for each in self.asked if each.operation.finished and not each.is_taken]
        )
        if asked is None:
            return
        self.note(f"the results of operation {asked.number} are taken")
        asked.is_taken = True
        for index, outcome in adapter.taken(asked.operation).items():
            self._check_outcome(asked, index, outcome)
            graph = getattr(outcome, "graph", None)
            if graph is not None:
                self.graphs.append(Graph(graph, asked.tasks[index], Family(), asked))

    def drop(self) -> None:
        """Drop results, or graphs of results."""
        if self.graphs and self.world.random.random() < 0.7:
            graph = self.graphs.pop(self.world.random.randrange(len(self.graphs)))
            self.note(f"graph {graph.graph.call} is dropped")
            self._let_go(graph.graph)
        elif self.asked:
            asked = self.asked.pop(self.world.random.randrange(len(self.asked)))
            self.note(f"operation {asked.number} is dropped")
            if not asked.operation.sealed:
                self.scheduler.cancel(asked.operation)  # as iterators do

    def _let_go(self, graph: Any) -> None:
        for sent in self.sent:
            if sent.graph is graph:
                sent.graph = None
                adapter.forget(sent.reply)

    # --- backwards

    def backward(self) -> None:
        """Run backwards of some results. Some of them pass their gradients on to others."""
        if (
            not self.graphs
            or self.scheduler.life.broken is not None
            or self.scheduler.life.has_ended
        ):
            return
        choose = self.world.random
        self._graph_tasks += 1
        graph_task = self._graph_tasks
        self.world.environments[graph_task] = {self.environment.now}
        captures = choose.random() < 0.6
        graphs = choose.sample(self.graphs, min(len(self.graphs), choose.randrange(1, 5)))
        if choose.random() < 0.4:
            # the graphs of the last backward, which may not have come to its end
            last = self.sent[-1].graph_task if self.sent else 0
            again = [each.graph for each in self.sent if each.graph_task == last]
            graphs = [each for each in self.graphs if each.graph in again] or graphs
        for graph in graphs:
            earlier = [each for each in self.sent if each.gives_promises and not each.reply.arrived]
            promised = choose.choice(earlier) if earlier and choose.random() < 0.3 else None
            create = choose.random() < 0.15
            keep = create or choose.random() < 0.4
            apart = create or choose.random() < 0.2
            reply = adapter.send_backward(
                graph.graph,
                graph_task,
                promise=None if promised is None else promised.reply,
                keep=keep,
                whole=choose.random() < 0.7,
                create=create,
                captures=captures,
                apart=apart,
            )
            sent = Sent(graph, graph_task, reply, promised)
            sent.in_sum = captures and not apart
            sent.gives_promises = not create
            self.sent.append(sent)
            if not keep:
                graph.family.freeing.append(graph_task)
            after = ""
            if promised is not None:
                after = f", after backward {promised.graph_task} of {promised.call}"
            self.note(
                f"backward {graph_task} of graph {sent.call} (call {graph.task.number}): keep "
                f"{keep}, create {create}{after}"
            )
        if choose.random() < 0.7:
            adapter.await_reply(self.scheduler, choose.choice(self.sent).reply)

    def collect(self) -> None:
        """Wait for the sums of captures' gradients of a backward."""
        numbers = sorted(
            {each.graph_task for each in self.sent if each.in_sum and each.graph is not None}
        )
        graph_task = self.choose(numbers)
        if graph_task is None:
            return
        mine = [each for each in self.sent if each.graph_task == graph_task and each.in_sum]
        for owner in {
            id(each.graph.owner): each.graph.owner for each in mine if each.graph is not None
        }.values():
            parts = [each for each in mine if each.asked.operation.owner is owner]
            if any(each.graph is None for each in parts):
                continue  # the engine would hold these backwards
            self.note(f"the sum of backward {graph_task} is requested")
            # lost parts are sent again
            self.world.environments[graph_task].add(self.environment.now)
            expected = sum(each.task.number for each in parts)
            try:
                found = adapter.sum_of_captures(owner, graph_task)
            except CheckFailed:
                raise
            except Exception as error:
                self._check_sum_failure(parts, error)
            else:
                if found != expected:
                    raise CheckFailed(
                        "a sum is wrong", f"backward {graph_task}: {found} instead of {expected}"
                    )
            for each in parts:
                each.in_sum = False

    def _check_sum_failure(self, parts: Sequence[Sent], error: BaseException) -> None:
        has_failed = any(each.reply.arrived and each.reply.has_failed for each in parts)
        life = self.scheduler.life
        is_explained = (
            has_failed or life.broken is not None or life.has_ended or self.world.refused_memory
        )
        is_explained = is_explained or any(each.is_cancelled for each in parts)
        if not is_explained and not isinstance(
            error, (CallTimeoutError, WorkerDiedError, ValueError)
        ):
            raise CheckFailed("a sum fails without a reason", repr(error))

    def cancel_backward(self) -> None:
        number = self.choose(
            sorted({each.graph_task for each in self.sent if not each.reply.arrived})
        )
        if number is not None:
            self.note(f"backward {number} is cancelled")
            for each in self.sent:
                if each.graph_task == number:
                    each.is_cancelled = True
                    self.world.cancelled_graphs.add(each.call)
                    of_call = self.world.cancelled_backwards.setdefault(each.call, {})
                    of_call[number] = functools.partial(
                        adapter.is_cancelled, weakref.ref(each.reply)
                    )
            self.scheduler.cancel_backward(number)

    # --- cancelled requests

    def _cancel_by(self, ask: Callable[[Any], None], word: str, futures: bool = False) -> None:
        asked = self.choose(
            [each for each in self.asked if not each.is_taken and (each.is_future or not futures)]
        )
        if asked is not None:
            self.note(f"operation {asked.number}: {word}")
            asked.is_cancelled = True
            ask(asked.operation)

    def cancel(self) -> None:
        self._cancel_by(self.scheduler.cancel, "cancel")

    def cancel_queued(self) -> None:
        asked = self.choose([each for each in self.asked if not each.is_taken])
        if asked is not None:
            self.note(f"operation {asked.number}: cancel_queued")
            asked.is_cancelled = True
            asked.operation.sealed = True
            self.scheduler.cancel_queued(asked.operation)

    def cancel_future(self) -> None:
        asked = self.choose([each for each in self.asked if each.is_future])
        if asked is not None:
            self.note(f"operation {asked.number}: the future is cancelled")
            asked.is_cancelled = True
            asked.may_start = False
            self.scheduler.cancel(asked.operation)

    def cancel_with_grace(self) -> None:
        self._cancel_by(self.scheduler.cancel_with_grace, "cancel_with_grace")

    def kill(self) -> None:
        self._cancel_by(self.scheduler.kill, "kill", futures=True)

    def kill_at(self) -> None:
        moment = self.world.now + self.choose((0.0, 0.1, 0.5))

        def kill_at(operation: Any) -> None:
            self._deadlines.append((moment, weakref.ref(operation)))
            self.scheduler.kill_at(moment, operation)

        self._cancel_by(kill_at, "kill_at", futures=True)

    def cancel_all_with_grace(self) -> None:
        self.note("cancel_all_with_grace")
        for asked in self.asked_of.values():
            asked.is_cancelled = True
        self.scheduler.cancel_all_with_grace()

    # --- faults, and the pool's life

    def lose_worker(self) -> None:
        worker = self.choose([each for each in self.world.workers if each.alive])
        if worker is not None:
            worker.die(-9)

    def lie(self) -> None:
        worker = self.choose([each for each in self.world.workers if each.alive and each.is_ready])
        if worker is not None:
            worker.link.lie()

    def hang(self) -> None:
        # a start has no time-out
        alive = [each for each in self.world.workers if each.alive and each.is_ready]
        worker = self.choose([each for each in alive if each.at_call] or alive)
        if worker is not None:
            self.note(f"worker {worker.number} hangs")
            worker.is_hung = True

    def lose_node(self) -> None:
        node = self.choose(
            sorted({each.link.node for each in self.world.workers if each.alive and each.link.node})
        )
        if node is not None:
            self.note(f"{node} is lost")
            self.world.lost_nodes = True
            self.world.starts_fail = True
            for worker in self.world.workers:
                if worker.alive and worker.link.node == node:
                    worker.link.lose()

    def refuse_starts(self) -> None:
        seconds = self.choose((0.5, 5.0, 20.0))
        self.note(f"the system starts no worker for {seconds} seconds")
        self.world.refused_until = self.world.now + seconds
        self.kill()

    def resize(self) -> None:
        if self.is_open:
            workers = self.world.random.randrange(1, 4)
            self.note(f"the pool is to have {workers} workers")
            self.scheduler.resize(workers)

    def change_environment(self) -> None:
        self.environment.now = b"environment %d" % self.world.random.randrange(3)

    def end_pool(self) -> None:
        if self.is_open:
            self._begin_end(self.choose(("close", "drain", "leave", "terminate")))

    def _begin_end(self, how: str) -> None:
        self.note(how)
        if how == "drain":
            self.scheduler.close()
        getattr(self.scheduler, how)()

    # --- checks

    def _check_patience(self) -> None:
        """Check that a pool without workers waits before it breaks, if the system refuses to start
        workers."""
        broken = self.scheduler.life.broken
        if any(worker.ready and not worker.retiring for worker in self.scheduler.workers.values()):
            self._staffed_at = self.world.now
        elif isinstance(broken, OSError) and self.world.now - self._staffed_at < START_PATIENCE:
            raise CheckFailed("a pool breaks without patience", repr(broken))

    def _check_waits(self) -> None:
        """Check, after a turn, that no call waits behind a running one while there are other
        workers, and that the scheduler looks again before the call takes too long."""
        scheduler, now = self.scheduler, self.world.now
        waits, self._waits = self._waits, {}
        takers = adapter.takers(scheduler)
        for number in scheduler.workers:
            if not takers - {number}:
                continue
            running = self.world.workers[number - 1].running
            if not adapter.calls_behind(scheduler, number, running):
                continue
            before, turns = waits.get(number, (running, []))
            # In the first turn in which calls wait too long, the worker is only made to skip them.
            # An agent reports when it has done so.
            turns = [*turns, now] if before == running else [now]
            self._waits[number] = running, turns
            wait = REMOTE_WAIT if self.program.remote else WAIT
            late = [each for each in turns if each - turns[0] > wait]
            if late and now - late[0] > 2 * SEEN and not self.program.remote:
                raise CheckFailed("a call waits behind a long one", f"worker {number}")
            if scheduler.next_look is None or scheduler.next_look > now + wait:
                raise CheckFailed(
                    "no turn looks at calls that wait behind another one", f"worker {number}"
                )

    def _check_deadlines(self) -> None:
        """After a turn: the operations whose time is over have ended, and the scheduler will look
        at the others in time."""
        for entry in list(self._deadlines):
            moment, operation = entry[0], entry[1]()
            if operation is None or operation.finished:
                self._deadlines.remove(entry)
            elif self.scheduler.next_look is None or self.scheduler.next_look > moment + 1e-3:
                raise CheckFailed("a deadline is forgotten", f"at {moment}")

    def check_states(self) -> None:
        """Check, between two events, that each call and backward is in exactly one place."""
        scheduler = self.scheduler
        if scheduler.inbox or scheduler.life.is_stopping:
            return
        if adapter.has_queued_calls(scheduler) and (idle := adapter.idle_workers(scheduler)):
            raise CheckFailed("a worker is idle while calls wait", f"workers {idle}")
        places = adapter.places_of_calls(scheduler)
        for asked in self.asked:
            operation = asked.operation
            if len(asked.delivered) > len(set(asked.delivered)):
                raise CheckFailed(
                    "a call gets two outcomes", f"operation {asked.number}: {asked.delivered}"
                )
            if asked.is_cancelled or asked.is_taken:
                continue
            for index, task in enumerate(asked.tasks):
                if index >= operation.limit:
                    break
                count = places[id(operation), index]
                if index in operation.outcomes:
                    is_right = count == 0
                else:
                    waits = any(self._is_open_task(source) for source in task.sources)
                    is_right = count == (0 if waits else 1)
                if not is_right:
                    raise CheckFailed(
                        "a call is not in one state", f"call {task.number} is in {count} places"
                    )
        replies = adapter.places_of_backwards(scheduler)
        for sent in self.sent:
            if not (sent.reply.arrived or sent.is_cancelled):
                waits = sent.promised is not None and not sent.promised.reply.arrived
                if replies[id(sent.reply)] != (0 if waits else 1):
                    text = (
                        f"backward {sent.graph_task} of {sent.call} is in "
                        f"{replies[id(sent.reply)]} places"
                    )
                    raise CheckFailed("a backward is not in one state", text)

    def _is_open_task(self, task: Task) -> bool:
        asked = self.asked_of[task.number]
        return not asked.is_taken and asked.operation.outcome is None

    def _check_outcome(self, asked: Asked, index: int, outcome: Any) -> None:
        task = asked.tasks[index]
        if isinstance(outcome, FailedResult):
            error = outcome.error()
            if not self._is_explained(task, error):
                raise CheckFailed("a call fails without a reason", f"call {task.number}: {error!r}")
            return
        if outcome.result.structure != task.number:
            raise CheckFailed(
                "a call has the result of another",
                f"call {task.number}: {outcome.result.structure}",
            )
        if (outcome.graph is not None) != ("graph" in task.traits):
            raise CheckFailed("a call has no graph, or one too many", f"call {task.number}")

    def _is_explained(self, task: Task, error: BaseException) -> bool:
        """Return whether the truth explains that this call failed with this error."""
        asked, retries, life = self.asked_of[task.number], self.program.retries, self.scheduler.life
        match error:
            case AncestorFailedError():
                cause = error.__cause__
                return cause is not None and any(
                    self._is_explained(each, cause) for each in ancestors(task)
                )
            case CancelledError():
                return asked.is_cancelled
            case CallTimeoutError():
                is_overdue = task.overdue + task.unsure_timeouts > self.program.timeout_retries
                is_caught = retries == 0 and task.was_caught
                return asked.options["timeout"] is not None and (is_overdue or is_caught)
            case WorkerDiedError():
                killed = task.deaths + task.unsure_deaths > retries
                killed = killed or task.idle_deaths > max(retries, IDLE_DEATHS)
                # If a node is lost, everything that it was given fails, including what could not be
                # sent, which is not seen here.
                killed = killed or (retries == 0 and (task.was_caught or "is lost" in str(error)))
                return killed or life.broken is not None
            case SharedMemoryError():
                return self.world.refused_memory
            case PoolClosedError():
                return bool(life.has_ended)
            case ValueError():
                is_own = "fails" in task.traits and error.args == ("failed", task.number)
                return is_own or self._is_failed_start(error)
            case OSError():
                return bool(life.broken is not None and self.world.starts_fail)
        return False

    def _is_failed_start(self, error: BaseException) -> bool:
        return (
            self.scheduler.life.broken is not None
            and self.world.starts_fail
            and error.args == ("failed", -1)
        )

    def _check_reply(self, sent: Sent) -> None:
        sent.is_checked = True
        if not sent.reply.has_failed:
            value = adapter.value_of_reply(sent.reply)
            if value != gradient_of(sent.call, sent.graph_task):
                raise CheckFailed("a backward has the gradient of another", f"{value}")
            return
        error = adapter.error_of_reply(sent.reply)
        if not self._is_explained_backward(sent, error):
            text = f"backward {sent.graph_task} of graph {sent.call}: {error!r}"
            raise CheckFailed("a backward fails without a reason", text)

    def _is_explained_backward(self, sent: Sent, error: BaseException) -> bool:
        retries, life = self.program.retries, self.scheduler.life
        if sent.promised is not None and self._is_explained_backward(sent.promised, error):
            return True
        this = sent.call, sent.graph_task
        deaths, timeouts = self.world.backward_deaths[this], self.world.backward_timeouts[this]
        # this matters only without retries
        is_lost = retries == 0 and (this in self.world.caught_backwards or not self.program.keeps)
        match error:
            case CancelledError():
                return sent.is_cancelled
            case CallTimeoutError():
                return timeouts > self.program.timeout_retries or is_lost
            case WorkerDiedError():
                return deaths > retries or is_lost or life.broken is not None
            case SharedMemoryError():
                return self.world.refused_memory
            case PoolClosedError():
                return bool(life.has_ended)
            case ValueError() if error.args[0] == TWICE:
                return any(each != sent.graph_task for each in sent.family.freeing)
            case ValueError():
                is_own = "fails backward" in sent.task.traits and error.args == (
                    "failed",
                    sent.task.number,
                )
                return is_own or self._is_failed_start(error)
            case OSError():
                return bool(life.broken is not None and self.world.starts_fail)
        return False

    # --- the end

    def _until_nothing_happens(self) -> None:
        self._looks = 0
        while self.happens():
            pass

    def _end(self) -> None:
        self.world.calm()
        self._seal_all()
        self._await_replies()
        self._until_nothing_happens()
        self._check_answers()
        self._check_kept()
        self._drop_all()
        self._until_nothing_happens()
        self._check_nothing_left()
        if not self.scheduler.life.has_ended:
            self._begin_end(self.choose(("drain", "leave", "terminate")))
            self._until_nothing_happens()
        if not self.scheduler.life.has_ended:
            raise CheckFailed("the pool does not end")
        self._check_end()

    def _await_replies(self) -> None:
        for sent in self.sent:
            adapter.await_reply(self.scheduler, sent.reply)

    def _seal_all(self) -> None:
        for asked in self.asked:
            if not asked.operation.sealed:
                asked.operation.sealed = True
                self.scheduler.admit(asked.operation)

    def _check_answers(self) -> None:
        broken = self.scheduler.life.broken
        if broken is not None and not self.world.starts_fail:
            raise CheckFailed("the pool breaks without a reason", repr(broken))
        for asked in self.asked:
            if not asked.operation.finished:
                raise CheckFailed("an operation does not end", f"operation {asked.number}")
            if len(asked.delivered) > len(set(asked.delivered)):
                raise CheckFailed(
                    "a call gets two outcomes", f"operation {asked.number}: {asked.delivered}"
                )
            for index, outcome in asked.operation.outcomes.items():
                self._check_outcome(asked, index, outcome)
        for sent in self.sent:
            if not sent.reply.arrived:
                raise CheckFailed(
                    "a backward has no reply", f"backward {sent.graph_task} of graph {sent.call}"
                )
            self._check_reply(sent)

    def _check_kept(self) -> None:
        """A worker keeps no sum that nobody knows of, and does not stay without a reason."""
        for number, handle in self.scheduler.workers.items():
            worker = self.world.workers[number - 1]
            known = adapter.sums_of_worker(handle)
            unknown = set(worker.sums) - known
            if unknown and handle.ready:
                raise CheckFailed("a worker keeps a sum that nobody collects", f"{unknown}")
            # A sum to which only backwards that failed belong is known all the same.
            keeps = worker.graphs or known or worker.dropped
            if handle.retiring and handle.ready and not keeps and self.scheduler.life.phase < 3:
                raise CheckFailed("a worker stays that is not needed", f"worker {number}")

    def _drop_all(self) -> None:
        self.note("everything is dropped")
        for sent in self.sent:
            adapter.forget(sent.reply)
        self.asked.clear()
        self.asked_of.clear()
        self.graphs.clear()
        self.sent.clear()

    def _check_nothing_left(self) -> None:
        kept = adapter.kept_of_pool(self.scheduler)
        left = {name: count for name, count in kept.items() if count}
        for handle in self.scheduler.handles:
            kept = adapter.kept_of_worker(handle)
            left |= {
                f"{name} of worker {handle.number}": count for name, count in kept.items() if count
            }
        for worker in self.world.workers:
            if worker.alive:
                own: dict[str, Any] = {
                    "graphs": worker.graphs,
                    "functions": worker.functions,
                    "lent": worker.lent,
                    "sums": worker.sums,
                }
                left |= {
                    f"{name} in worker {worker.number}": len(each)
                    for name, each in own.items()
                    if each
                }
        if self.world.slots:
            left["memory of the caller"] = len(self.world.slots)
        if left:
            raise CheckFailed("something is left when everything is dropped", f"{left}")

    def _check_end(self) -> None:
        left = {
            name: count for name, count in adapter.kept_of_pool(self.scheduler).items() if count
        }
        if left or self.scheduler.workers:
            raise CheckFailed(
                "something is left at the end", f"{left}, workers {list(self.scheduler.workers)}"
            )


def ancestors(task: Task) -> list[Task]:
    """Return the tasks whose results are its arguments, and their ancestors."""
    found = list(task.sources)
    for each in found:
        found += [source for source in each.sources if source not in found]
    return found


# --- histories by their seeds


class Fault(NamedTuple):
    """A fault of a history."""

    program: Program
    name: str  # of the check
    text: str
    events: Sequence[str]


def fault_in(program: Program, listens: bool = False) -> Fault | None:
    history = History(program, listens)
    try:
        history.run()
    except CheckFailed as error:
        return Fault(program, error.name, str(error), history.world.events or ())
    except Exception as error:  # an error of the scheduler itself
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = (
            "" if place is None else f" ({place.tb_frame.f_code.co_name}, line {place.tb_lineno})"
        )
        return Fault(
            program,
            f"the scheduler raises {type(error).__name__}",
            f"{error!r}{where}",
            history.world.events or (),
        )
    return None


def shortest(fault: Fault) -> Fault:
    """Return the fault with as few steps as possible, by leaving some out."""
    steps, size = list(fault.program.steps), len(fault.program.steps) // 2
    while size:
        start = 0
        while start < len(steps):
            fewer = steps[:start] + steps[start + size :]
            found = fault_in(fault.program._replace(steps=fewer))
            if found is not None and found.name == fault.name:
                steps = fewer
            else:
                start += size
        size //= 2
    return fault_in(fault.program._replace(steps=steps), listens=True) or fault


def in_words(fault: Fault) -> str:
    told = ", ".join(
        f"{name}: {value}"
        for name, value in fault.program._asdict().items()
        if name not in ("rates", "steps")
    )
    wrong = ", ".join(
        f"{name} {value}" for name, value in fault.program.rates._asdict().items() if value
    )
    return "\n".join(
        [f"{fault.text}", f"  {told}", f"  what goes wrong: {wrong or 'nothing'}", *fault.events]
    )
