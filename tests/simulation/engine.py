"""A simulated engine: workers, links and shared memory that exist only as Python objects of this
process.

    the real scheduler ── Engine, WorkerLink ──► SimulatedLink ──► SimulatedWorker
        ── a step at a time ──► World

A `World` has the clock, the random numbers and the truth: what each call is, why it died, and what
each worker holds. It decides which worker makes the next step, and which one dies, hangs or is
late. A worker is a generator, and anything may happen wherever it yields.

A worker runs no functions. It keeps graphs, functions and sums as numbers, and a check fails if it
gets something that it cannot run. Its rules are those of `mpgrad/workers` (above all `graphs.py`
and `run.py`), in their simplest form.
"""

from __future__ import annotations

import itertools
import pickle
import random
import signal
import struct
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from mpgrad.engines.launch import Exit
from mpgrad.errors import SharedMemoryError
from mpgrad.memory import OFFSET_BITS, OFFSET_MASK, OWNER_BITS, slab_of
from mpgrad.memory.arena import ForeignSlabs
from mpgrad.wire.agent_messages import ProgressRecord
from mpgrad.wire.frames import Frame
from mpgrad.wire.messages import (
    TRACEBACK_SIGNAL,
    BackwardCall,
    Backwards,
    Collect,
    CollectedSums,
    Define,
    DroppedSlabs,
    Failure,
    Follow,
    Forget,
    Forward,
    ForwardCall,
    Gradients,
    MissingGraph,
    MissingSlabs,
    NewSlab,
    ReadyReport,
    Recompute,
    RecomputeBackward,
    Release,
    Result,
    Results,
    ReturnedSlots,
    Start,
    StartFailure,
    Stop,
)
from mpgrad.wire.pipe import Traffic
from mpgrad.wire.tensor_refs import NUMBER_OF_DTYPE, REQUIRES_GRAD, TensorRef

R = TypeVar("R")
Steps = Generator[None, None, R]  # of a worker
SLOT_BYTES = 64
SLAB_SLOTS = 256
PROGRESS_RECORD_BYTES = 8 * ProgressRecord.COUNT
TWICE = "backward ran twice through a graph that was not retained"


class CheckFailed(AssertionError):
    """The scheduler has done something wrong. Each check has its own `name`."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.name = name


class Rates(NamedTuple):
    """How often things go wrong in a history. These are probabilities for each step of a worker, or
    for each request."""

    death: float = 0.0
    hang: float = 0.0
    trim: float = 0.0  # a worker drops a graph because memory is short
    refused_start: float = 0.0
    death_at_start: float = 0.0
    failed_start: float = 0.0
    refused_memory: float = 0.0


class Task:
    """A call, and the truth about what happened to it."""

    def __init__(self, number: int, choose: random.Random, traits: Sequence[str]) -> None:
        self.number = number
        self.traits = frozenset(traits)
        self.steps = choose.randrange(3)
        self.function = 0
        self.environment = b""
        self.ended = False  # it need not begin any more
        self.sources: list[Task] = []  # the tasks whose results are its arguments
        # the truth about forwards: how often a worker died that was running it, or would have run
        # it next
        self.deaths = self.idle_deaths = self.overdue = 0
        self.unsure_deaths = self.unsure_timeouts = 0  # it may have been skipped then
        self.was_caught = False  # a worker that had run it died, and may have sent its result


class WorkerGraph:
    """A graph in a worker. `base` is the graph that it derives from. They share nodes, so both are
    emptied together."""

    def __init__(self, task: Task, held: list[int], base: WorkerGraph | None = None) -> None:
        self.task = task
        self.held = held  # addresses that it keeps borrowed
        self.base = base
        self._is_emptied = False

    @property
    def is_emptied(self) -> bool:
        return self._is_emptied or (self.base is not None and self.base.is_emptied)

    def empty(self) -> None:
        self._is_emptied = True
        if self.base is not None:
            self.base.empty()


class SimulatedSlab:
    """Shared memory that is not really shared."""

    elsewhere = False
    can_grow = False
    descriptor = -1

    def __init__(self, number: int) -> None:
        self.number = number
        self.nbytes = SLOT_BYTES * SLAB_SLOTS
        self.memory = memoryview(bytearray(self.nbytes))
        self.start = number << OFFSET_BITS


class SimulatedSlot:
    """Memory of the caller that is lent to workers. It must live until all of them have returned
    it."""

    def __init__(self, slab: SimulatedSlab, place: int) -> None:
        self.slab = slab
        self.address = slab.number << OFFSET_BITS | place * SLOT_BYTES
        self.memory = slab.memory[place * SLOT_BYTES : place * SLOT_BYTES + 8]


class SimulatedLenders(ForeignSlabs):
    """The real class with simulated slabs. The system may refuse to map memory."""

    world: World

    def attach(self, number: int, descriptor: int | None, nbytes: int) -> None:
        self.slabs[number] = self.world.slabs[number]

    def borrow(
        self, address: int, nbytes: int, private: bool = False, findable: bool = True
    ) -> Any:
        if self.world.chance(self.world.rates.refused_memory):
            self.world.refused_memory = True
            self._given_back.append((address, 1))
            raise SharedMemoryError("no memory (simulated)")
        return super().borrow(address, nbytes, private, findable)


class World:
    """The clock, the random numbers, the truth, and all workers that have ever existed."""

    def __init__(
        self,
        rates: Rates,
        retries: int,
        timeout_retries: int = 0,
        remote: bool = False,
        listens: bool = False,
    ) -> None:
        self.random = random.Random()
        self.rates = rates
        self.retries = retries
        self.timeout_retries = timeout_retries
        self.remote = remote  # workers are behind agents, which share no memory with the caller
        self.now = 1000.0
        self.tasks: list[Task] = []
        self.workers: list[SimulatedWorker] = []
        self.slabs: dict[int, SimulatedSlab] = {}
        self.slots: weakref.WeakValueDictionary[int, SimulatedSlot] = weakref.WeakValueDictionary()
        self.events: list[str] | None = [] if listens else None
        self.environments: dict[int, set[bytes]] = {}  # by backward: where it may run
        self.environments_of_functions: dict[int, bytes] = {}
        self.backward_deaths: Counter[tuple[int, int]] = Counter()  # by graph and backward
        self.backward_timeouts: Counter[tuple[int, int]] = Counter()
        self.caught_backwards: set[tuple[int, int]] = set()  # as `Task.was_caught`
        self.refused_memory = False
        self.starts_fail = False  # then the pool may break
        self.refused_until = 0.0  # until when the system refuses all starts
        self.lost_nodes = False
        self.calls_per_worker: int | None = None
        self.cancelled_graphs: set[int] = set()  # that a backward was cancelled of
        # by call, backwards that were to be cancelled, and whether they were
        self.cancelled_backwards: dict[int, dict[int, Callable[[], bool]]] = {}
        # backwards that leave nothing of a graph, by graph
        self.last_backwards: dict[int, set[int]] = {}
        self.used_up_graphs: set[int] = set()  # by a backward that left nothing
        # how often each was sent, by graph and backward
        self.backwards_sent: Counter[tuple[int, int]] = Counter()
        self._places = itertools.count()
        self._own_slab = SimulatedSlab(0)

    def clock(self) -> float:
        return self.now

    def note(self, text: str) -> None:
        if self.events is not None:
            self.events.append(f"{self.now - 1000:8.3f}  {text}")

    def chance(self, rate: float) -> bool:
        return rate > 0 and self.random.random() < rate

    def task(self, traits: Sequence[str]) -> Task:
        task = Task(len(self.tasks), self.random, traits)
        self.tasks.append(task)
        return task

    def slot(self) -> SimulatedSlot:
        slot = SimulatedSlot(self._own_slab, next(self._places) % SLAB_SLOTS)
        while slot.address in self.slots:
            slot = SimulatedSlot(self._own_slab, next(self._places) % SLAB_SLOTS)
        self.slots[slot.address] = slot
        return slot

    def able(self) -> list[SimulatedWorker]:
        """Return the workers that can make a step."""
        return [worker for worker in self.workers if worker.can_step]

    def step(self, worker: SimulatedWorker) -> None:
        """Let the worker do a little, or die, or hang."""
        self.now += self.random.choice((0.0, 1e-4, 1e-3, 2e-2))
        if self.chance(self.rates.death):
            worker.die(-signal.SIGSEGV)
        elif worker.at_call and self.chance(self.rates.hang):
            self.note(f"worker {worker.number} hangs")
            worker.is_hung = True
        else:
            worker.step()

    def sites_report(self, patient: bool = False) -> bool:
        """Let agents report what they have seen. If there is nothing and `patient`, advance the
        clock to the next report. Return whether there was or will be a report."""
        links = [
            worker.link
            for worker in self.workers
            if isinstance(worker.link, AgentLink) and worker.alive
        ]
        have_told = [link.report() for link in links]
        if any(have_told):
            return True
        moments = [moment for link in links if (moment := link.next_moment()) is not None]
        if patient and moments:
            self.now = max(self.now, min(moments)) + 1e-6
        return patient and bool(moments)

    def calm(self) -> None:
        """From now on nothing goes wrong by itself. Workers that hang are ended, or go on when
        nothing else can happen."""
        self.rates = Rates()
        self.refused_until = 0.0


class SimulatedWorker:
    """A worker: what it has, what it was sent, and how far it has got."""

    def __init__(self, world: World, number: int, node: str) -> None:
        self.world = world
        self.number = number
        self.alive = True
        self.exit_code: int | None = None
        self.is_hung = False
        self.is_late = world.chance(0.1)
        self.is_stubborn = world.chance(0.3)  # hangs in a place where only SIGKILL reaches it
        self.is_ready = False
        self.at_call = False
        self.told_to_stop = False
        self.frames: deque[Frame] = deque()
        self.link = (
            AgentLink(world, self, node) if world.remote else SimulatedLink(world, self, node)
        )
        # what it has
        self.slab = SimulatedSlab(number << OWNER_BITS)
        world.slabs[self.slab.number] = self.slab
        self.numbers = self.slab.memory[:PROGRESS_RECORD_BYTES].cast("q")
        # its code, and the address of its captures
        self.functions: dict[int, tuple[int, int | None]] = {}
        self.codes: set[int] = set()
        self.slabs: set[int] = set()  # the slabs that were introduced to it
        self.graphs: dict[int, WorkerGraph] = {}
        self.dropped: set[int] = set()  # the caller believes that they are here
        self.excused: set[int] = set()  # graphs that had to be rebuilt, but were skipped
        self.sums: dict[tuple[int, int | None], list[float]] = {}  # by function and backward
        self.lent: set[int] = set()
        self.calls_begun = 0
        self.environment = b""
        # sends the results of a chunk's first calls while a later one runs; None if there are none
        self._early: Callable[[], None] | None = None
        self._free = [place * SLOT_BYTES for place in range(1, SLAB_SLOTS)]
        self._returns: Counter[int] = Counter()
        self._waits = False
        self._life = self._live()

    @property
    def can_step(self) -> bool:
        return self.alive and not (
            self.is_hung or self.is_late or (self._waits and not self.frames)
        )

    @property
    def has_early_answer(self) -> bool:
        """Whether the second thread of the worker could send results. It can do so even while the
        worker hangs in a call."""
        return self.alive and self.at_call and self._early is not None

    def answer_early(self) -> None:
        self.world.note(f"worker {self.number} answers early")
        early, self._early = self._early, None
        assert early is not None
        early()

    @property
    def running(self) -> tuple[int, ...]:
        """The chunk and the position of the call that runs now, and its start; -1 if none does."""
        is_at = self.alive and self.at_call and not self.link.has_more()
        return tuple(self.numbers[:3]) if is_at else (-1, -1, -1)

    def step(self) -> None:
        try:
            next(self._life)
        except StopIteration:
            if self.alive:
                self.die(0)

    def die(self, code: int) -> None:
        if self.alive:
            self.world.note(f"worker {self.number} ends (exit code {code})")
            self.world.starts_fail |= not self.is_ready
            self.alive = False
            self.exit_code = code

    def check(self, holds: bool, name: str, text: object = "") -> None:
        if not holds:
            raise CheckFailed(name, f"worker {self.number}: {text}")

    # --- its life

    def _live(self) -> Steps[None]:
        (start,) = (yield from self._next_frame()).messages
        self.check(isinstance(start, Start), "the first message is not a Start", start)
        yield
        if self.world.chance(self.world.rates.death_at_start):
            self.die(1)
            yield
        if self.world.chance(self.world.rates.failed_start):
            self.world.starts_fail = True
            self.link.answer([StartFailure(failure("start"))])
            return
        self.link.answer([NewSlab(self.slab.number, self.slab.nbytes)])
        self.link.answer([ReadyReport(self.number, self.slab.start)])
        self.is_ready = True
        self.world.note(f"worker {self.number} is ready")
        while not self.told_to_stop:
            frame = yield from self._next_frame()
            has_answered = False
            for message in frame.messages:
                yield
                has_answered = yield from self._handle(message)
                if self.world.chance(self.world.rates.trim):
                    self._drop_one()
            if not has_answered and self._returns:
                self.link.answer(self._take_returns())

    def _next_frame(self) -> Steps[Frame]:
        while not self.frames:
            self._waits = True
            yield
        self._waits = False
        return self.frames.popleft()

    def _handle(self, message: Any) -> Steps[bool]:
        """Return whether the message was answered."""
        match message:
            case Forward():
                yield from self._forward(message)
            case Backwards():
                yield from self._backward(message)
            case Collect():
                yield
                self._collect(message)
            case Define():
                yield from self._load(message)
                return False
            case _:
                self._hear(message)
                return False
        return True

    def _hear(self, message: Any) -> None:
        match message:
            case Follow():
                self.environment = message.environment
            case Forget():
                for function in message.functions:
                    self.check(
                        function in self.functions,
                        "a worker is asked to forget a function that it does not have",
                        function,
                    )
                    _, address = self.functions.pop(function)
                    if address is not None:
                        self._returns[address] += 1
                    for key in [key for key in self.sums if key[0] == function]:
                        del self.sums[key]
                for function, graph_task, _ in message.sums:
                    # A backward that failed has added nothing.
                    self.sums.pop((function, graph_task), None)
                self.codes.difference_update(message.codes)
            case Release():
                for call in message.calls:
                    self._release(call)
                    self.dropped.discard(call)
            case ReturnedSlots():
                for address, _ in message.slots:
                    self.check(
                        address in self.lent,
                        "a worker gets back memory that it has not lent",
                        address,
                    )
                    self.lent.remove(address)
                    self._free.append(address & OFFSET_MASK)
            case NewSlab():
                self.slabs.add(message.number)
            case DroppedSlabs():
                self.slabs.difference_update(message.numbers)
            case Stop():
                self.told_to_stop = True
            case MissingSlabs():
                pass
            case _:
                self.check(False, "a worker gets a message that it does not understand", message)

    # --- functions and memory

    @property
    def is_loading(self) -> bool:
        return self.numbers[ProgressRecord.STARTED] == ProgressRecord.LOADING

    def _load(self, message: Define) -> Steps[None]:
        """Load a function. This may take longer than any call may."""
        self.numbers[ProgressRecord.STARTED] = ProgressRecord.LOADING
        yield
        self.world.now += self.world.random.choice((0.0, 0.0, 1.0))
        yield
        self._define(message)
        self.numbers[ProgressRecord.STARTED] = int(self.world.now * 1e9)
        yield

    def _define(self, message: Define) -> None:
        function = message.function
        self.check(
            function not in self.functions, "a function is defined twice in a worker", function
        )
        if message.pickled is not None:
            self.codes.add(message.code)
        self.check(
            message.code in self.codes,
            "a worker does not know the code of a function",
            message.code,
        )
        is_own = self.environment == self.world.environments_of_functions[function]
        self.check(is_own, "a function is loaded in the environment of another operation", function)
        address = None if message.slot is None else message.slot[0]
        if address is not None:
            self._borrow(address)
        self.functions[function] = message.code, address

    def _borrow(self, address: int) -> None:
        slab = slab_of(address)
        self.check(
            slab in self.slabs, "memory is lent that was not introduced to the worker", hex(address)
        )
        owner = slab >> OWNER_BITS
        if owner == 0:
            self.check(
                address in self.world.slots,
                "memory that a worker borrows no longer exists",
                hex(address),
            )
        elif (lender := self.world.workers[owner - 1]).alive:
            self.check(
                address in lender.lent,
                "memory that another worker borrows was reused",
                hex(address),
            )

    def _lent_to_us(self, refs: Sequence[TensorRef]) -> list[int]:
        addresses = [ref.place for ref in refs if ref.place >= 0]
        for address in addresses:
            self._borrow(address)
        return addresses

    def _lend(self, value: float, payload: bytearray, flags: int = 0) -> TensorRef:
        """Return a reference to a number for the caller, in shared memory or in the message."""
        place = -1 - len(payload)
        if self._free and self.world.chance(0.3):
            offset = self._free.pop()
            place = self.slab.start | offset
            self.lent.add(place)
            struct.pack_into("d", self.slab.memory, offset, value)
        else:
            payload += struct.pack("d", value)
        return TensorRef(NUMBER_OF_DTYPE[torch.float64], (), None, place, 8, flags)

    def _take_returns(self) -> list[Any]:
        returned, self._returns = list(self._returns.items()), Counter()
        return [ReturnedSlots(returned)] if returned else []

    def _answer(self, message: Any, payload: bytearray) -> None:
        self.at_call, self._early = False, None
        self.link.answer([*self._take_returns(), message], payload)

    # --- where it is

    def _begin(self, chunk: int, position: int) -> None:
        self.numbers[ProgressRecord.STARTED] = int(self.world.now * 1e9)
        self.numbers[ProgressRecord.OFFSET] = -1
        self.numbers[ProgressRecord.POSITION] = position
        self.numbers[ProgressRecord.CHUNK] = chunk
        self.at_call = True

    def _is_skipped(self, chunk: int) -> bool:
        return chunk in self.numbers[ProgressRecord.SKIPPED :].tolist()

    # --- forwards

    def _forward(self, message: Forward) -> Steps[None]:
        payload = bytearray()
        outcomes: list[Any] = []
        sent = 0

        def results(more: bool) -> Results:
            nonlocal sent
            sent += len(outcomes)
            seconds = self.world.random.choice((0.0, 1e-3, 0.1)) * len(outcomes)
            dropped = self._take_dropped()
            return Results(
                message.chunk,
                outcomes[:],
                seconds,
                seconds,
                0.0,
                False,
                [],
                dropped,
                0,
                more=more,
            )

        def early() -> None:
            self.link.answer([*self._take_returns(), results(more=True)], payload[:])
            outcomes.clear()
            payload.clear()

        self.check(
            message.function in self.functions,
            "a worker is asked to run a function that it does not have",
            message,
        )
        for position, call in enumerate(message.calls):
            self._begin(message.chunk, position)
            self.at_call = False
            yield
            if self._is_skipped(message.chunk):
                break
            self.at_call = True
            self.calls_begun += 1
            limit = self.world.calls_per_worker
            self.check(
                limit is None or self.calls_begun <= limit,
                "a worker runs more calls than it may",
                self.calls_begun,
            )
            self._early = early if outcomes else None
            task = self._task_of(call, message.function)
            self.check(
                self.environment == task.environment,
                "a call runs in the environment of another operation",
                task.number,
            )
            self.check(
                task.deaths <= self.world.retries,
                "a call runs although it has killed too many workers",
                task.number,
            )
            self.check(
                task.overdue <= self.world.timeout_retries,
                "a call runs although it took too long too often",
                task.number,
            )
            held = self._lent_to_us(call.tensors)
            for _ in range(task.steps):
                yield
            if "kills" in task.traits:
                self.die(-signal.SIGKILL)
                yield
            self._early = None
            outcomes.append(self._outcome(call, task, held, payload))
            yield
            if isinstance(outcomes[-1], Failure) and message.stop_at_failure:
                break
        for call in message.calls[sent + len(outcomes) :]:
            self._returns.update(self._lent_to_us(call.tensors))
        self._answer(results(more=False), payload)

    def _task_of(self, call: ForwardCall, function: int) -> Task:
        assert isinstance(call.structure, int)
        task = self.world.tasks[call.structure]
        self.check(
            task.function == function, "a call runs with the function of another", task.number
        )
        self.check(
            len(call.dependency_results) == len(task.sources),
            "a call runs without the results that it needs",
            task.number,
        )
        return task

    def _outcome(
        self, call: ForwardCall, task: Task, held: list[int], payload: bytearray
    ) -> Result | Failure:
        if "fails" in task.traits:
            self._returns.update(held)
            return failure("forward", task.number)
        has_graph = "graph" in task.traits
        if has_graph:
            self.check(call.call not in self.graphs, "two calls have one number", call.call)
            self.graphs[call.call] = WorkerGraph(task, held)
        else:
            self._returns.update(held)
        refs = [self._lend(task.number, payload, REQUIRES_GRAD if has_graph else 0)]
        return Result(call.structure, refs, has_graph, None, [(None, 1) for _ in call.bundle])

    # --- graphs

    def _release(self, call: int) -> None:
        graph = self.graphs.pop(call, None)
        if graph is not None:
            self._returns.update(graph.held)

    def _drop_one(self) -> None:
        kept = [call for call, graph in self.graphs.items() if not graph.is_emptied]
        if kept:
            call = self.world.random.choice(kept)
            self.world.note(f"worker {self.number} drops graph {call}")
            self._release(call)
            self.dropped.add(call)

    def _take_dropped(self) -> list[int]:
        dropped, self.dropped = sorted(self.dropped), set()
        self.excused.update(dropped)
        return dropped

    # --- backwards

    def _backward(self, message: Backwards) -> Steps[None]:
        payload = bytearray()
        outcomes: list[Any] = []
        sent = 0

        def gradients(more: bool) -> Gradients:
            nonlocal sent
            sent += len(outcomes)
            return Gradients(message.chunk, outcomes[:], [], self._take_dropped(), 0, more=more)

        def early() -> None:
            self.link.answer([*self._take_returns(), gradients(more=True)], payload[:])
            outcomes.clear()
            payload.clear()

        for position, call in enumerate(message.calls):
            if self._is_skipped(message.chunk):
                break
            self.at_call = False
            yield
            self._early = early if outcomes else None
            environments = self.world.environments[call.graph_task]
            self.check(
                self.environment in environments,
                "a backward runs in the environment of another one",
                call,
            )
            self.check(
                self.world.backward_timeouts[call.call, call.graph_task]
                <= self.world.timeout_retries,
                "a backward runs although it took too long too often",
                call,
            )
            found: Any = None
            for step in (*call.before, call):
                self._begin(message.chunk, position)
                yield
                self._check_freed(step, call)
                found = self._step(step, payload)
                if found is None or isinstance(found, Failure):
                    break
            outcomes.append(MissingGraph() if found is None else found)
        for call in message.calls[sent + len(outcomes) :]:
            for step in (*call.before, call):
                self._give_back_unread(step)
        self._answer(gradients(more=False), payload)

    def _give_back_unread(self, step: Recompute | RecomputeBackward | BackwardCall) -> None:
        if isinstance(step, Recompute):
            self.excused.add(step.call.call)
            self._returns.update(self._lent_to_us(step.call.tensors))
        else:
            call = step.call if isinstance(step, RecomputeBackward) else step
            self.excused.add(call.call)
            if call.graph is not None:
                self.excused.add(call.graph)
            self._returns.update(self._lent_to_us(call.grads))

    def _check_freed(self, step: Recompute | RecomputeBackward | BackwardCall, of: Any) -> None:
        """Only a backward that was sent before may find its own graph freed, by itself, and have it
        made again. A graph is used up only if another backward has done so, or would have."""
        if not isinstance(step, Recompute) or step.call.call != of.call:
            return
        known = self.graphs.get(of.call)
        if step.consumed:
            others = self.world.last_backwards.get(of.call, set()) - {of.graph_task}
            cancelled = self.world.cancelled_backwards.get(of.call, {})
            others -= {each for each, was_cancelled in cancelled.items() if was_cancelled()}
            self.check(
                known is not None or of.call in self.world.used_up_graphs or bool(others),
                "a graph is used up that no backward has used up",
                of.call,
            )
            return
        is_freed = known is not None and known.is_emptied
        is_excused = of.call in self.excused | self.world.cancelled_graphs
        self.check(
            not is_freed or is_excused or self.world.backwards_sent[of.call, of.graph_task] > 1,
            "a graph that was freed is made again for another backward",
            of,
        )

    def _step(self, step: Recompute | RecomputeBackward | BackwardCall, payload: bytearray) -> Any:
        if isinstance(step, Recompute):
            self._run_again(step)
            return ()
        if isinstance(step, RecomputeBackward):
            return self._differentiate(step.call, bytearray())
        return self._differentiate(step, payload)

    def _run_again(self, step: Recompute) -> None:
        call = step.call
        self.check(
            step.function in self.functions,
            "a graph needs a function that the worker does not have",
            step,
        )
        task = self._task_of(call, step.function)
        environment = self.environment if step.environment is None else step.environment
        self.check(
            environment == task.environment,
            "a call runs again in the environment of another operation",
            task.number,
        )
        fails = "fails backward" in task.traits
        known = self.graphs.get(call.call)
        if not step.consumed and known is not None and not known.is_emptied:
            # Several backwards may have found that it was missing.
            is_excused = fails or call.call in self.world.cancelled_graphs | self.excused
            self.check(is_excused, "a graph is made again that is still there", call.call)
        held = self._lent_to_us(call.tensors)
        if step.consumed and call.call in self.graphs:
            self._returns.update(held)
            return
        self._release(call.call)
        self.dropped.discard(call.call)
        graph = self.graphs[call.call] = WorkerGraph(task, held)
        if step.consumed:
            graph.empty()

    def _differentiate(self, call: BackwardCall, payload: bytearray) -> Any:
        """Return references to the gradients; None if the graph is missing."""
        self._returns.update(self._lent_to_us(call.grads))
        graph = self.graphs.get(call.call)
        if graph is None:
            is_excused = call.call in self.dropped or call.call in self.excused
            self.check(
                is_excused, "a backward of a graph that the worker never had, or has released", call
            )
            self.dropped.add(call.call)
            return None
        if graph.is_emptied:
            return failure("backward", graph.task.number, TWICE)
        if "fails backward" in graph.task.traits and self.world.random.random() < 0.6:
            return failure("backward", graph.task.number)
        flags = 0 if call.graph is None else REQUIRES_GRAD
        refs = [
            self._lend(gradient_of(call.call, call.graph_task), payload, flags) for _ in call.wanted
        ]
        if call.captures and call.apart:
            refs.append(self._lend(graph.task.number, payload))
        elif call.captures:
            self.sums.setdefault((graph.task.function, call.graph_task), []).append(
                graph.task.number
            )
        if call.graph is not None:
            self._release(call.graph)
            self.graphs[call.graph] = WorkerGraph(graph.task, [], graph)
        elif call.last:
            self.world.used_up_graphs.add(call.call)
            self._release(call.call)
        elif not call.keep:
            graph.empty()
        return refs

    def _collect(self, message: Collect) -> None:
        payload = bytearray()
        sums = self.sums.pop((message.function, message.graph_task), [])
        refs = [self._lend(sum(sums), payload)] if sums else []
        self._answer(CollectedSums(message.chunk, refs, len(sums)), payload)


def gradient_of(call: int, graph_task: int) -> float:
    """Return the gradient: a different number for each graph and backward."""
    return call * 4096.0 + graph_task


def failure(phase: str, task: int = -1, text: str = "failed") -> Failure:
    return Failure(pickle.dumps(ValueError(text, task)), "", phase)


class SimulatedLink:
    """The caller's end of the link to a simulated worker: see `engines.kinds.WorkerLink`."""

    shares_memory = True
    keeps_time = False
    overrun: tuple[int, int] | None = None
    progress_record: memoryview | None = None
    crash_traceback = ""
    has_place = True
    could_start = False

    def __init__(self, world: World, worker: SimulatedWorker, node: str) -> None:
        self.world = world
        self.worker = worker
        self.number = worker.number
        self.node = node
        self.lost = ""
        self.is_leaving = False
        self.has_ended = False
        self.tells_exit = True  # its exit has not been reported yet
        self.knows_exit = world.random.random() < 0.5  # whether the exit is known at once
        self.skipped: dict[int, int] = {}
        self._answers: deque[Frame] = deque()
        self._unanswered: dict[int, list[Any]] = {}  # by chunk: tasks or backwards
        self._had_traceback: tuple[int, ...] | None = None  # the worker's position at that moment
        self._lies: set[int] = set()  # positions of lies among the remaining answers
        self._limits: dict[int, float] = {}  # of chunks without an answer

    # --- the worker's end

    def answer(self, messages: list[Any], payload: bytearray | None = None) -> None:
        self._answers.append(Frame(messages, memoryview(payload or bytearray())))

    # --- the caller's end

    def send(
        self, messages: list[Any], payload: Sequence[bytes] = (), descriptors: Sequence[int] = ()
    ) -> None:
        if self.has_ended:
            raise CheckFailed(
                "a message is sent over a closed link", f"worker {self.number}: {messages}"
            )
        for message in messages:
            match message:
                case Forward():
                    tasks = [
                        self.world.tasks[call.structure]
                        for call in message.calls
                        if isinstance(call.structure, int)
                    ]
                    self._unanswered[message.chunk] = list(tasks)
                    self._note("calls", message.chunk, [task.number for task in tasks])
                case Backwards():
                    backwards = [(call.call, call.graph_task) for call in message.calls]
                    self._unanswered[message.chunk] = list(backwards)
                    self.world.backwards_sent.update(backwards)
                    for call in message.calls:
                        if call.last:
                            lasts = self.world.last_backwards.setdefault(call.call, set())
                            lasts.add(call.graph_task)
                    self._note("backwards (graph, number)", message.chunk, backwards)
                case Collect():
                    self._unanswered[message.chunk] = []
                    self._note("a request for a sum", message.chunk, message.graph_task)
                case Stop():
                    self.world.note(f"worker {self.number} is asked to stop")
        if not self.worker.alive:
            if self.world.chance(0.5):
                raise BrokenPipeError("simulated")
            return
        self.worker.frames.append(Frame(messages, memoryview(bytearray().join(payload))))

    def _note(self, what: str, chunk: int, parts: object) -> None:
        if self.world.events is not None:
            self.world.note(f"worker {self.number} is sent {what} {parts} (chunk {chunk})")

    def introduce(self, slabs: Sequence[Any]) -> None:
        if slabs and self.worker.alive:  # otherwise the next message finds that it is dead
            self.send([NewSlab(slab.number, slab.nbytes) for slab in slabs])

    def lie(self) -> None:
        """Let the worker send something that is not a message. The caller can no longer trust what
        follows."""
        never = 1 << 40
        lies: list[Any] = [
            Results(never, [], 0.0, 0.0, 0.0, False, [], [], 0, more=False),
            Gradients(never, [], [], [], 0, more=False),
            CollectedSums(never, [], 0),
            StartFailure(failure("start")),
            Stop(),
            # this names a real chunk, but is not an outcome
            Results(next(iter(self._unanswered), never), None, 0.0, 0.0, 0.0, False, [], [], 0),
        ]
        self.world.note(f"worker {self.number} lies")
        self._answers.append(Frame([self.world.random.choice(lies)], memoryview(b"")))
        self._lies.add(len(self._answers))

    def receive(self) -> Frame | None:
        self._lies = {place - 1 for place in self._lies}
        if self._answers:
            frame = self._answers.popleft()
            if 0 in self._lies:
                # The scheduler blames the lie, which may have answered the call. The truth is noted
                # once.
                self._tell_truth(is_sure=False)
                self._had_traceback = None
                return frame
            for message in frame.messages:
                if isinstance(message, (Results, Gradients, CollectedSums)):
                    if not getattr(message, "more", False):
                        self._unanswered.pop(message.chunk, None)
                    if self.world.events is not None:
                        self.world.note(
                            f"worker {self.number} has answered chunk {message.chunk}: "
                            f"{in_words(message)}"
                        )
            return frame
        if not self.worker.alive:
            self._tell_truth()
            raise EOFError
        return None

    def has_more(self) -> bool:
        return not self.has_ended and (bool(self._answers) or not self.worker.alive)

    def has_exited(self) -> bool:
        """Return whether its exit still has to be reported."""
        return self.tells_exit and self.has_ended and not self.worker.alive

    @property
    def numbers(self) -> memoryview:
        """The progress record that the scheduler knows."""
        return self.worker.numbers

    def kill(self, by: int = signal.SIGKILL) -> None:
        worker = self.worker
        if by == TRACEBACK_SIGNAL:
            self._check_time()
            self._had_traceback = self._begun()
            if not (worker.is_hung and worker.is_stubborn):
                worker.die(-TRACEBACK_SIGNAL)
        else:
            if self._had_traceback is not None:
                self._tell_truth()
            worker.die(-signal.SIGKILL)

    def _begun(self) -> tuple[int, int]:
        """The first chunk, and since when its call runs; 0 if it has not begun."""
        first = next(iter(self._unanswered), -1)
        has_begun = self.numbers[ProgressRecord.CHUNK] == first
        return first, self.numbers[ProgressRecord.STARTED] if has_begun else 0

    def _check_time(self) -> None:
        """Check that the call, or the next one, has had its time since the worker began it or could
        have begun it."""
        worker, now = self.worker, self.world.now
        limit = self._limits[next(iter(self._unanswered))]
        started = worker.numbers[ProgressRecord.STARTED] / 1e9
        if not self.keeps_time and (worker.is_loading or now < started + limit):
            raise CheckFailed("a worker is ended before its time", f"worker {worker.number}")

    def _tell_truth(self, is_sure: bool = True) -> None:
        """Note what the worker was running, or had next, when it died. This comes before the
        scheduler's verdict."""
        chunk, parts = next(iter(self._unanswered.items()), (None, []))
        has_begun = self.numbers[ProgressRecord.CHUNK] == chunk
        position = self.numbers[ProgressRecord.POSITION] if has_begun else 0
        for each in itertools.chain(*self._unanswered.values()) if self.lost else parts[:position]:
            if isinstance(each, Task):
                each.was_caught = True
            else:
                self.world.caught_backwards.add(each)
        if not parts:  # a request for a sum
            return
        part = parts[position]
        is_told = self._had_traceback is not None and not self.lost
        if is_told and self._had_traceback != self._begun():
            return  # it ended in that moment, and nobody is to blame
        is_overdue = is_told and has_begun
        if isinstance(part, tuple):
            counts = self.world.backward_timeouts if is_overdue else self.world.backward_deaths
            counts[part] += 1
        elif has_begun and (
            not is_sure or (not self.worker.at_call and self.worker._is_skipped(chunk))
        ):
            # the worker was about to skip it, because the scheduler may have taken it back
            part.unsure_deaths += not is_overdue
            part.unsure_timeouts += is_overdue
        elif is_overdue:
            part.overdue += 1
        elif has_begun:
            part.deaths += 1
        else:
            part.idle_deaths += 1
        if self.world.events is not None:
            what = part if isinstance(part, tuple) else part.number
            self.world.note(
                f"worker {self.number} has died {'at' if has_begun else 'before'} {what}"
            )

    def end(self) -> None:
        worker = self.worker
        is_told = any(
            isinstance(message, Stop) for frame in worker.frames for message in frame.messages
        )
        if worker.alive and not (is_told or worker.told_to_stop):
            raise CheckFailed("a link is closed while its worker lives", f"worker {self.number}")
        self.has_ended = True

    @property
    def exit(self) -> Exit | None:
        is_known = self.knows_exit and self.has_ended and not self.worker.alive
        return Exit(self.worker.exit_code) if is_known else None

    def lose(self) -> None:
        """Lose the worker's node."""
        self.lost = f"node {self.node} is lost (simulated)"
        self.worker.die(-signal.SIGKILL)

    def carry(self, holder: Any) -> None:
        """Both ends look at the same memory."""

    def drop(self, holder: Any, times: int) -> None:
        """Both ends look at the same memory."""

    def skip(self, place: int, chunk: int) -> None:
        """Both ends look at the same memory."""

    def follow(self, seconds: float) -> None:
        """Both ends look at the same memory."""

    def limit(self, chunk: int, seconds: float | None) -> None:
        """Note the limit. The worker's clock is ours."""
        if seconds is None:
            self._limits.pop(chunk, None)
        else:
            self._limits[chunk] = seconds

    def close(self) -> None:
        self._answers.clear()

    def take_descriptor(self) -> int | None:
        return None

    def resident_bytes(self, pid: int) -> int:
        return 0


class AgentLink(SimulatedLink):
    """The link to a worker on another machine. The progress record reaches the scheduler late, and
    the scheduler's skips reach the worker late."""

    shares_memory = False
    keeps_time = True

    def __init__(self, world: World, worker: SimulatedWorker, node: str) -> None:
        super().__init__(world, worker, node)
        self.progress_record = memoryview(bytearray(PROGRESS_RECORD_BYTES)).cast("q")
        self._lent = 0  # how many loans have not been returned yet
        self._skips: list[tuple[int, int]] = []  # skips that the agent has not written yet
        self._heard_at = world.now
        self._followed_until = 0.0

    @property
    def numbers(self) -> memoryview:
        assert self.progress_record is not None
        return self.progress_record

    def answer(self, messages: list[Any], payload: bytearray | None = None) -> None:
        super().answer(messages, payload)
        self.overrun = None
        self._heard_at = self.world.now

    def receive(self) -> Frame | None:
        if not (self._answers or self.worker.alive or self.lost):
            self._tell_where()
        return super().receive()

    def report(self) -> bool:
        """Do what the agent was asked to do, and report what it has seen. Return whether there was
        anything."""
        skips, self._skips = self._skips, []
        for place, chunk in skips:
            self.worker.numbers[place] = chunk
            self.skipped[place] = chunk
        if self.world.now < self._followed_until:
            self._tell_where()
        chunk, position, moment = self._next_overrun()
        is_overrun = moment <= self.world.now and self.overrun != (chunk, position)
        if is_overrun:
            self._tell_where()
            self.overrun = chunk, position
        return bool(skips) or is_overrun

    def next_moment(self) -> float | None:
        """Return when a call will have taken too long, if this was not reported yet."""
        chunk, position, moment = self._next_overrun()
        is_stuck = self.worker.is_loading and self.worker.is_hung
        is_told = self.overrun == (chunk, position)
        return None if moment == float("inf") or is_told or is_stuck else moment

    def _next_overrun(self) -> tuple[int, int, float]:
        """Do the same as `next_overrun` in `cluster.agent`."""
        at, position = (
            self.worker.numbers[ProgressRecord.CHUNK],
            self.worker.numbers[ProgressRecord.POSITION],
        )
        limits = [chunk for chunk in self._limits if chunk >= at]
        if not limits:
            return -1, -1, float("inf")
        chunk = limits[0]
        started = self.worker.numbers[ProgressRecord.STARTED] / 1e9
        if self.worker.is_loading:
            started = self.world.now
        if chunk == at:
            return chunk, position, started + self._limits[chunk]
        return chunk, -1, max(self._heard_at, started) + self._limits[chunk]

    def _tell_where(self) -> None:
        for place in range(ProgressRecord.SKIPPED):
            self.numbers[place] = self.worker.numbers[place]

    def skip(self, place: int, chunk: int) -> None:
        self._skips.append((place, chunk))

    def follow(self, seconds: float) -> None:
        self._followed_until = self.world.now + seconds

    def limit(self, chunk: int, seconds: float | None) -> None:
        self._heard_at = self.world.now
        super().limit(chunk, seconds)

    def carry(self, holder: Any) -> None:
        self._lent += 1

    def drop(self, holder: Any, times: int) -> None:
        self._lent -= times
        if self._lent < 0:
            raise CheckFailed(
                "an agent is asked to end a worker that it does not have", f"worker {self.number}"
            )

    def end(self) -> int | None:
        self._skips.clear()
        return super().end()


def in_words(message: Any) -> str:
    if isinstance(message, CollectedSums):
        return f"the sum of {message.calls}"
    return ", ".join(
        type(outcome).__name__ if isinstance(outcome, tuple) else "gradients"
        for outcome in message.outcomes
    )


class SimulatedEngine:
    """A simulated `engines.kinds.Engine`. No thread sleeps: `wait` returns at once, and `wake` is
    noted."""

    copies_caller = False

    def __init__(self, world: World, nodes: int) -> None:
        self.world = world
        self.traffic = Traffic()
        self.room: int | None = None
        self.is_woken = False
        self._nodes = nodes
        self._is_closed = False

    def start(self, number: int) -> SimulatedLink:
        if self._is_closed:
            raise CheckFailed("a worker is started after the end", f"worker {number}")
        is_refused = self.world.now < self.world.refused_until
        if is_refused or self.world.chance(self.world.rates.refused_start):
            self.world.starts_fail = True
            self.world.note(f"the system refuses to start worker {number}")
            raise OSError("no more processes (simulated)")
        node = f"node-{number % self._nodes}" if self._nodes else ""
        worker = SimulatedWorker(self.world, number, node)
        self.world.workers.append(worker)
        return worker.link

    def wait(self, seconds: float | None) -> Sequence[SimulatedLink]:
        """Return links with something to read, in any order, and not always all of them."""
        links = [
            worker.link
            for worker in self.world.workers
            if worker.link.has_more() or worker.link.has_exited()
        ]
        self.world.random.shuffle(links)
        links = links[: self.world.random.randrange(1, 4)]
        for link in links:
            link.knows_exit |= link.has_exited()
            link.tells_exit = link.tells_exit and link.exit is None
        if not links and seconds:
            self._let_others_go_on(seconds)
        return links

    def _let_others_go_on(self, seconds: float) -> None:
        """Let the others go on while this thread waits for exits."""
        able = self.world.able()
        if able:
            self.world.step(self.world.random.choice(able))
        else:
            self.world.now += seconds

    def wake(self) -> None:
        self.is_woken = True

    def close(self) -> None:
        self._is_closed = True
        alive = [worker.number for worker in self.world.workers if worker.alive]
        if alive:
            raise CheckFailed("workers live on after the end", str(alive))
