"""Histories of `mpgrad.machine` alone. Calls, operations, workers and their progress records are
plain stubs, and the driver below carries out what is decided. As a program it imports no torch, and
nothing else of mpgrad.

    python tests/simulation/alone.py HISTORIES [FIRST_SEED]

A history draws whether workers can be killed, whether they are near or behind a node agent, whether
graphs can be rebuilt, and how soon one process sees what another has written. The driver is slow
now and then, so answers arrive between any two of its steps.

Checked: each call gets one outcome and is in one place; calls that were taken back are not run by
the worker that had them; the call that ran is blamed, and one that was next is only suspected;
calls fail only after too many deaths or time-outs of their own; each worker is ended for a reason,
after its answers were read, and in time; what cannot be rebuilt is not killed; and no moment is
forgotten at which there is something to do. `history.py` does the same, and more, with the real
scheduler.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import types
from collections import deque
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.modules["mpgrad"] = types.ModuleType("mpgrad")
    sys.modules["mpgrad"].__path__ = [str(Path(__file__).parents[2] / "mpgrad")]

from mpgrad.machine.deaths import IDLE_DEATHS, SOME, Limits, death_of, failing, judged, successor
from mpgrad.machine.policy import NEAR, SEEN
from mpgrad.machine.queue import Backlog, CallQueue
from mpgrad.machine.story import LOST_WITH, Story
from mpgrad.machine.timing import FunctionTiming
from mpgrad.machine.under_way import GRACE_PERIOD, Chunk, SentChunks

# seconds until another process sees what was written, at most; each time with the calls that may be
# so short, because a worker must not begin two calls in twice this time
UNSEEN: dict[float, tuple[float, ...]] = {
    5e-6: (2e-5, 1e-3, 2e-2),
    0.45 * SEEN: (1e-3, 2e-3),
}
# seconds on the way to a node agent, or from it
AWAY = 2e-3
TIMEOUT = 0.3
# seconds by which the driver may be late, because other things kept it
SLOW = (1e-6, 1e-4, 3e-3)
LATE = 20e-3
# operations with deadlines that nobody holds any more, in some histories
GONE = 150
MOST_TURNS = 10_000
MOST_STEPS = 200


class Function:
    """A function, and the times of its calls."""

    def __init__(self) -> None:
        self.timing = FunctionTiming()

    def seconds(self, function: Any, unknown: float) -> float:
        return self.timing.seconds or unknown

    def number(self, function: Any) -> None:
        """Do nothing: there is one function."""


class Options:
    def __init__(self, rng: random.Random, can_kill: bool) -> None:
        self.function = None
        self.chunksize = rng.choice((None, None, 4))
        self.timeout = rng.choice((None, TIMEOUT)) if can_kill else None
        self.at_rest = rng.random() < 0.5
        self.together = rng.random() < 0.5
        self.story = Story()


class Operation:
    def __init__(self, rng: random.Random, can_kill: bool) -> None:
        self.options = Options(rng, can_kill)
        self.queue: deque[Any] = deque()
        self.packed: deque[Any] = deque()
        self.limit = math.inf
        self.sealed = True
        self.unsorted = self.largest_first = False
        self.deadline = rng.choice((math.inf, math.inf, math.inf, 0.05, 0.3)) * rng.random()
        self.stops_at_failure = rng.random() < 0.5
        self.is_killed = False

    def starts(self, index: int) -> bool:
        return True


class Part:
    """A call or a backward."""

    items, message_bytes, route = 1, 64, None
    has_lost_graph = False

    def __init__(self, owner: Any, index: int, fate: str, seconds: float) -> None:
        self.operation, self.index, self.item = owner, index, index
        self.fate, self.seconds, self.nbytes = fate, seconds, index % 3
        self.deaths = self.timeouts = self.idle_deaths = 0
        self.outcome = ""

    def note(self, transition: Any) -> None:
        self.operation.options.story.note(self.item, transition)


class Backward(Part):
    """A backward of a call. Its worker keeps the graph; others rebuild it."""

    kind = "backward"

    def __init__(self, graph_task: int, fate: str, seconds: float) -> None:
        super().__init__(None, 0, fate, seconds)
        self.graph_task = graph_task

    @property
    def arrived(self) -> bool:
        return bool(self.outcome)

    def note(self, transition: Any) -> None:
        """Do nothing: it has no story here."""


class Record:
    """A progress record. What one side writes, the other side sees later: soon, or when a node
    agent has passed it on."""

    offset = -1

    def __init__(self, worker: Worker) -> None:
        self._worker, self._world = worker, worker.world
        self.is_far = self._world.is_far
        # when the caller may see each note, the chunk, the position and when it began
        self.notes: list[tuple[float, int, int, float | None]] = [(0.0, 0, 0, 0.0)]
        self._copy = self.notes[0]
        self._skips: dict[int, float] = {}

    # --- the worker's end

    def note(self, now: float, chunk: int, position: int, started: float | None) -> None:
        seen = now + (AWAY if self.is_far else self._world.rng.random() * self._world.unseen)
        self.notes.append((max(seen, self.notes[-1][0]), chunk, position, started))

    def is_skipped(self, now: float, chunk: int) -> bool:
        return self._skips.get(chunk, math.inf) <= now

    # --- the caller's end

    def latest(self) -> tuple[float, int, int, float | None]:
        return next(each for each in reversed(self.notes) if each[0] <= self._world.now)

    def report(self) -> None:
        """Have the agent report where the worker is."""
        self._copy = self.latest()

    def _last(self) -> tuple[float, int, int, float | None]:
        return self._copy if self.is_far else self.latest()

    def at(self) -> tuple[int, int] | None:
        seen, chunk, position, _ = self._last()
        is_recent = not self.is_far and self._world.now - seen < self._world.unseen
        return None if is_recent and self._world.rng.random() < 0.5 else (chunk, position)

    @property
    def started(self) -> float | None:
        return self._last()[3]

    def skip(self, number: int, under_way: Container[int]) -> bool:
        if number in self._skips:
            return False
        away = AWAY if self.is_far else self._world.rng.random() * self._world.unseen
        self._skips[number] = self._world.now + away
        return True

    def skipped(self) -> Container[int]:
        if self._worker.has_answered:
            return ()
        return [each for each, at in self._skips.items() if at + AWAY <= self._world.now]

    def follow(self, seconds: float) -> None:
        self.report()


class Link:
    lost, has_place = "", True

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.keeps_time = worker.world.is_far

    @property
    def overrun(self) -> tuple[int, int] | None:
        """The call that takes too long by the clock of the agent, as far as the caller knows."""
        worker = self._worker
        _, chunk, position, started = worker.record.latest()
        sent = worker.under_way.chunks.get(chunk)
        then = worker.world.now - AWAY
        if started is None or sent is None or sent.timeout is None or worker.idle_at <= then:
            return None
        if then - started < sent.timeout - 1e-9 or worker.has_answered:
            return None
        worker.record.report()
        return chunk, position


class Worker:
    """Both what the caller knows of a worker, and the worker itself, which is a generator of the
    moments at which it does its next step."""

    device, ready = 0, True

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.under_way = SentChunks()
        self.record = Record(self)
        # Some records cannot be mapped. Then the caller does not know which call runs. It takes
        # none back, so calls behind one that hangs would stay with a worker that retires.
        may_retire = world.can_kill and not world.recoverable
        self.is_seen = world.is_far or may_retire or world.rng.random() < 0.95
        self.under_way.progress = self.record if self.is_seen else None
        self.link = Link(self)
        self.backlog = Backlog()
        # whether it keeps graphs that are not cancelled
        self.keeps = world.rng.random() < 0.5
        self.retiring = False
        self.calls_done = 0
        self.gone: Any = None
        self.overdue: float | None = None
        self.termination: Any = None
        self.inbox: deque[tuple[int, list[Part]]] = deque()
        # when each arrives, its chunk, the parts that have run, and whether more follow
        self.answers: deque[tuple[float, int, list[Part], bool]] = deque()
        self.is_idle = True
        self.idle_at, self.died_at = world.now, math.inf
        # what it truly runs, and since when; infinite while it loads the function
        self.running: Part | None = None
        self.began = world.now
        self.loads_since = math.inf
        # whether it is ended because an answer of its could not be read
        self.is_garbled = False
        self.at, self._steps = world.now, self._run()

    @property
    def load(self) -> int:
        return sum(len(chunk.parts) for chunk in self.under_way.chunks.values())

    @property
    def has_others(self) -> bool:
        chunks = self.under_way.chunks.values()
        return self.keeps or bool(self.backlog) or any(any(each.wanted()) for each in chunks)

    @property
    def has_answered(self) -> bool:
        """Whether there is an answer to read."""
        return bool(self.answers) and self.answers[0][0] <= self.world.now

    @property
    def is_dead(self) -> bool:
        """Whether it can be seen that the worker is dead."""
        return self.died_at + self.world.away <= self.world.now

    @property
    def next_look(self) -> float:
        """When something comes from the worker, or may come."""
        moments = [self.at, self.died_at + self.world.away]
        if self.answers:
            moments.append(self.answers[0][0])
        first = self.under_way.first
        if self.link.keeps_time and first is not None and first.timeout is not None:
            moments.append(self.began + first.timeout + AWAY)
        return min((each for each in moments if each > self.world.now), default=math.inf)

    def go_on(self) -> None:
        """Do all steps up to now."""
        while self.died_at == math.inf and self.at <= self.world.now:
            self.at = next(self._steps)

    def die(self, now: float) -> None:
        self.died_at, self.at = now, math.inf

    def _answer(self, now: float, number: int, done: list[Part], more: bool) -> None:
        self.answers.append((now + self.world.away, number, done, more))

    def _run(self) -> Iterator[float]:
        rng, record, now = self.world.rng, self.record, self.world.now
        if rng.random() < 0.3:
            self.loads = rng.choice((1e-3, 2 * TIMEOUT))
        else:
            self.loads = 0.0
        while True:
            self.is_idle, self.idle_at = not self.inbox, math.inf if self.inbox else now
            while self.is_idle:
                yield math.inf
                now, self.idle_at = self.at, math.inf
            number, parts = self.inbox[0]
            if parts[0].fate == "dies unbegun":
                self.die(now)
                yield math.inf
            if self.loads:
                _, before, place, _ = record.notes[-1]
                record.note(now, before, place, None)
                self.began, self.loads_since = math.inf, now
                yield now + self.loads
                now, self.loads, self.loads_since = self.at, 0.0, math.inf
                record.note(now, before, place, now)
            done: list[Part] = []
            for position, part in enumerate(parts):
                record.note(now, number, position, now)
                self.began = now
                yield now + rng.random() * 2e-6
                now = self.at
                if record.is_skipped(now, number):
                    break
                self.running = part
                yield now + part.seconds
                now = self.at
                if part.fate == "dies":
                    self.die(now)
                    yield math.inf
                self.running = None
                done.append(part)
                # Without a record, an early answer is all that the caller learns.
                if rng.random() < 0.1 or not self.is_seen:
                    self._answer(now, number, done, True)
                    done = []
            self._answer(now, number, done, False)
            self.inbox.popleft()


class World:
    """A history: a few operations with calls, workers, and the driver that carries out what the
    machine decides."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.is_woken = False
        self.retries, self.timeout_retries = rng.choice((0, 1, 2)), rng.choice((0, 1))
        self.wanted = rng.choice((1, 1, 2, 4))
        self.can_kill, self.recoverable = rng.random() < 0.8, rng.random() < 0.5
        self.is_far = self.can_kill and rng.random() < 0.4
        self.away = AWAY if self.is_far else 0.0
        self.unseen, self._lengths = rng.choice(list(UNSEEN.items()))
        self.function = Function()
        self.queue = CallQueue(
            self.function,
            itertools.count(1),
            self.wanted,
            None,
            by_device=False,
            chunk_seconds=NEAR,
        )
        self.limits = Limits(self.queue, self.can_kill, self.recoverable)
        self.workers: dict[int, Worker] = {}
        # workers that died, until it is known how
        self.ending: list[tuple[float, Worker, Any]] = []
        self._numbers, self._chunks = itertools.count(1), itertools.count(1)
        # operations and backwards that were cancelled with grace, and when
        self.cancelled: dict[Any, float] = {}
        # when the workers were asked to skip what was cancelled; after a long turn this is later
        self.skipped: dict[Any, float] = {}
        self.operations = [Operation(rng, self.can_kill) for _ in range(rng.randint(1, 5))]
        # parts that were blamed, because it could not be known which call killed the worker
        self.may_be_blamed: set[Part] = set()
        # when backwards with this number are cancelled with grace, or operations
        self.cancels: dict[Any, float] = {
            each: rng.choice((0.1, 0.5)) * rng.random()
            for each in (1, *self.operations)
            if rng.random() < 0.4
        }
        # the share of the calls that get a backward
        self.backward_share = rng.choice((0.0, 0.1, 0.5))
        self.backwards: list[Backward] = []
        self.calls = [call for each in self.operations for call in self._calls_of(each)]

    def _calls_of(self, operation: Operation) -> list[Part]:
        rng = self.rng
        usual = rng.choice(self._lengths)
        has_limit = operation.options.timeout is not None or operation.deadline < math.inf
        ends = has_limit or operation in self.cancels
        calls = []
        for index in range(rng.randint(1, rng.choice((6, 60, 120)))):
            fate = self._fate((90, 5, 1, 0.5, 2, 3, 1), ends)
            calls.append(Part(operation, index, fate, self._seconds(fate, usual)))
        return calls

    def _fate(self, weights: tuple[float, ...], ends: bool) -> str:
        """Return what becomes of a part; only those that are ended may hang."""
        fates = ("runs", "hangs", "dies", "dies unbegun", "is slow", "is late", "fails")
        fate = self.rng.choices(fates, weights)[0]
        return "runs" if fate == "hangs" and not (ends and self.can_kill) else fate

    def _seconds(self, fate: str, usual: float) -> float:
        # Some calls end right after their time limit.
        late = TIMEOUT + self.rng.choice((1e-3, 2e-3, 0.4)) * self.rng.random()
        slow = self.rng.choice((0.1, 0.5))
        least = {"hangs": math.inf, "is slow": slow, "is late": late}.get(fate, 0.0)
        return least + usual * (1 + self.rng.random())

    def run(self) -> None:
        self._fill()
        for operation in self.operations:
            calls = [call for call in self.calls if call.operation is operation]
            self.queue.join(operation, calls)
            if operation.deadline < math.inf:
                self.limits.deadlines.put(operation.deadline, operation)
        for _ in range(GONE if self.rng.random() < 0.1 else 0):
            self.limits.deadlines.put(self.rng.random(), Operation(self.rng, self.can_kill))
        assert len(self.limits.deadlines.heap) <= SOME, "deadlines of what is gone are kept"
        for _ in range(MOST_TURNS):
            self._turn()
            if self._has_ended():
                return
            soonest = min(
                self.limits.next_look,
                self.queue.look_at,
                *(self.cancels[each] for each in self.cancels.keys() - self.cancelled.keys()),
                *(moment for moment, *_ in self.ending),
                *(worker.next_look for worker in self.workers.values()),
            )
            has_more = any(each.has_answered or each.is_dead for each in self.workers.values())
            soonest = self.now if has_more or self.is_woken else soonest
            assert soonest < math.inf, "nobody will ever look again"
            self.now = max(self.now + 1e-7, soonest)
        raise AssertionError("the history does not end")

    def _has_ended(self) -> bool:
        # A worker that retires may never end what was cancelled, nor what it has to do after that.
        staying = [each for each in self.workers.values() if not each.retiring]
        if self.ending or any(each.under_way or each.backlog for each in staying):
            return False
        return all(call.outcome for call in self.calls)

    # --- the driver

    def _fill(self) -> None:
        while sum(not each.retiring for each in self.workers.values()) < self.wanted:
            worker = Worker(self, next(self._numbers))
            self.workers[worker.number] = worker
            self.queue.look_at = 0.0

    def _pause(self) -> None:
        """Now and then, be slow, often until a worker has done a step. The workers go on."""
        if self.rng.random() < 0.2:
            steps = [each.at for each in self.workers.values() if each.at > self.now]
            soonest = min(steps, default=math.inf)
            slow = self.rng.choice(SLOW)
            self.now = soonest if soonest - self.now < SLOW[-1] else self.now + slow
        for worker in self.workers.values():
            worker.go_on()

    def _turn(self) -> None:
        self.is_woken = False
        self._pause()
        for worker in list(self.workers.values()):
            # Sometimes the driver is late, and reads an answer in its next turn.
            if self.rng.random() < 0.8:
                self._receive(worker)
            if self.is_far and self.rng.random() < 0.5:
                worker.record.report()
        for each in [each for each in self.ending if each[0] <= self.now]:
            self.ending.remove(each)
            self._remove(*each[1:])
        for each, moment in self.cancels.items():
            if moment <= self.now and each not in self.cancelled:
                self.cancelled[each] = self.now
                self._cancel(each)
        self._feed()
        self._pause()
        now = self.now
        self._carry_out(self.limits.steps(self.workers.values(), now), now)
        assert self.limits.next_look > now, "what is due is not done"
        self._check_moments()
        self._check_places()

    def _carry_out(self, steps: Iterable[tuple[Any, Any]], now: float) -> None:
        for count, (step, target) in enumerate(steps):
            assert count < MOST_STEPS, "the steps do not end"
            match step:
                case "kill operation":
                    assert target.deadline <= now, "an operation is ended too early"
                    self._kill(target, now)
                case "drain":
                    self._pause()
                    self._receive(target)
                    # More work may follow from these answers.
                    self.is_woken = True
                case "terminate":
                    self._check_terminated(target, now)
                    # A worker that does not listen is killed later.
                    if self.rng.random() < 0.5:
                        target.die(self.now)
                case "kill overdue":
                    assert target.termination.moment <= now, "a worker is killed too early"
                    self._lose(target, blames=True)
                case "kill":
                    self._check_killed(target, now)
                    self._lose(target, blames=False)
                case "retire":
                    assert self.can_kill and not self.recoverable, "a worker retires without need"
                    assert target.has_others, "a worker retires, and has nothing for others"
                    target.retiring = True
                    self._fill()
                case _:
                    raise AssertionError(f"the step {step!r} is unknown")

    def _feed(self) -> None:
        for worker, operation, calls in self.queue.next_chunks(self.workers.values(), self.now):
            self._pause()
            may_run = not (worker.retiring or worker.under_way.in_grace)
            assert may_run or operation is None, "a worker gets calls that it may not run"
            if operation is None:
                backwards = list(worker.backlog.take_alike())
                self._send(worker, Chunk(None, [], backwards, None, None), list(backwards))
            else:
                chunk = Chunk(operation, calls, [], None, operation.options.timeout)
                self._send(worker, chunk, [call for _, call in calls])

    def _send(self, worker: Worker, chunk: Chunk, parts: list[Any]) -> None:
        number = next(self._chunks)
        worker.under_way.add(number, chunk, self.now)
        worker.inbox.append((number, parts))
        if worker.is_idle and worker.died_at == math.inf:
            worker.is_idle, worker.at = False, self.now

    def _receive(self, worker: Worker) -> None:
        while worker.gone is None and worker.has_answered:
            _, number, done, more = worker.answers.popleft()
            under_way = worker.under_way
            chunk = under_way.chunks[number] if more else under_way.take(number, self.now)
            if self.can_kill and not more and self.rng.random() < 0.003:
                # The answer cannot be read to its end.
                under_way.put_back(number, chunk)
                assert under_way.first is chunk, "what was not answered after all is not the first"
                worker.is_garbled = True
                self._lose(worker, blames=True)
                return
            expected = chunk.parts[: len(done)]
            assert done == expected, "a call was taken back, and has run all the same"
            for part in done:
                self._deliver(part, "an error" if part.fate == "fails" else "a value")
                if chunk.operation is not None:
                    # A hanging call ends if it is cancelled at the right moment.
                    seconds = min(part.seconds, 2 * TIMEOUT)
                    self.function.timing.note(seconds, seconds, self.wanted, math.inf)
                    self._backward_of(worker)
            chunk.note_answered(len(done))
            if not more:
                unrun = [call for _, call in chunk.calls]
                self.queue.put_back(chunk.operation, unrun, self.now)
                assert all(each.arrived for each in chunk.backwards), "a backward was not run"
            # Some operations end with their first call that fails.
            failed = [each.index for each in done if each.outcome == "an error"]
            if chunk.operation is not None and chunk.operation.stops_at_failure and failed:
                self._end(chunk.operation, min(failed))
        if worker.gone is None and worker.is_dead:
            worker.record.report()
            self._lose(worker, blames=True)

    def _backward_of(self, worker: Worker) -> None:
        """Sometimes the result of a call gets a backward."""
        graph_task = self.rng.choice((1, 2))
        if self.rng.random() > self.backward_share or graph_task in self.cancelled:
            return
        fate = self._fate((4, 1, 0.2, 0.2, 4, 0, 0), graph_task in self.cancels)
        backward = Backward(graph_task, fate, self._seconds(fate, self._lengths[0]))
        self.backwards.append(backward)
        worker.backlog.append(backward)

    def _lose(self, worker: Worker, blames: bool) -> None:
        death = death_of(worker, blames)
        worker.gone = "lost"
        worker.die(min(worker.died_at, self.now))
        del self.workers[worker.number]
        # Chunks behind the first one cannot have caused the death.
        behind = death.chunks[1:]
        del death.chunks[1:]
        worker.under_way.drop_behind()
        self._fill()
        self._put_back(worker, behind)
        self.ending.append((self.now + self.rng.choice((0.0, 1e-3)), worker, death))
        while worker.backlog:
            self._successor().backlog.append(worker.backlog.popleft())

    def _remove(self, worker: Worker, death: Any) -> None:
        """It is known how the worker died."""
        if death.blames and death.chunks:
            before = [each.idle_deaths for each in death.chunks[0].parts]
            verdict = judged(worker, death, self.retries, self.timeout_retries, self.now)
            if verdict is not None:
                accused = verdict.accused
                if worker.is_garbled or not worker.is_seen:
                    self.may_be_blamed.add(accused)
                may_be_blamed = accused.fate == "dies" or accused in self.may_be_blamed
                assert may_be_blamed or not accused.deaths, "the wrong call is blamed"
                late = accused.seconds >= TIMEOUT or accused.outcome or not worker.is_seen
                assert late or not accused.timeouts, "the wrong call is late"
                is_suspected = [each.idle_deaths for each in death.chunks[0].parts] != before
                if worker.termination is None and worker.is_seen and not worker.is_garbled:
                    ran = accused is worker.running
                    assert is_suspected != ran, "a call that was next is more than suspected"
                most = max(self.retries, IDLE_DEATHS)
                assert accused.idle_deaths <= most + 1, "a call that kills workers does not fail"
                part = failing(death, verdict.fails, self.retries)
                failed = death.chunks[0].parts[part]
                for call in failed:
                    excess = call.deaths > self.retries or call.timeouts > self.timeout_retries
                    had_run = self.retries == 0 and call is not accused and not is_suspected
                    suspect = call.idle_deaths > most
                    assert excess or suspect or had_run, "a call fails without a reason"
                    self._deliver(call, "an error")
                del death.chunks[0].calls[part], death.chunks[0].backwards[part]
        self._put_back(worker, death.chunks)
        worker.under_way.end()

    def _put_back(self, worker: Worker, chunks: list[Chunk]) -> None:
        for chunk in reversed(chunks):
            calls = [call for _, call in chunk.calls]
            self.queue.put_back(chunk.operation, calls, self.now, LOST_WITH, worker.number)
            if backwards := [each for each in chunk.backwards if not each.arrived]:
                self._successor().backlog.put_back(backwards)

    def _successor(self) -> Worker:
        found = successor(self.workers.values(), 0)
        assert isinstance(found, Worker) and not found.retiring, "a worker that retires gets work"
        return found

    def _deliver(self, part: Part, outcome: str) -> None:
        if part.operation is None:
            part.outcome = part.outcome or outcome
        elif part.index < part.operation.limit:
            assert not part.outcome, "a call gets two outcomes"
            part.outcome = outcome

    def _cancel(self, what: Any) -> None:
        """Cancel an operation, or a backward with this number, with grace."""
        if what == 1:
            for each in self.backwards:
                if each.graph_task == 1 and not each.outcome:
                    each.outcome = "cancelled"
            for worker in self.workers.values():
                worker.backlog.cancel(1)
                worker.under_way.put_in_grace(worker.under_way.parts_of_backward(1), self.now)
        else:
            self._end(what)
            for worker in self.workers.values():
                worker.under_way.cancel_with_grace(what, self.now)
        for worker in self.workers.values():
            # Some calls end when their grace period does.
            if worker.running and worker.running.outcome and self.rng.random() < 0.5:
                worker.at = self.now + GRACE_PERIOD + 4e-3 * self.rng.random()

    def _end(self, operation: Operation, limit: int = 0) -> None:
        """End the operation: no call from the limit on is needed."""
        operation.limit = limit
        for call in self.calls:
            if call.operation is operation and call.index >= limit and not call.outcome:
                call.outcome = "cancelled"
        self.skipped[operation] = self.now
        for worker in self.workers.values():
            worker.under_way.cancel(operation)
        self.queue.tidy()

    def _kill(self, operation: Operation, now: float) -> None:
        operation.is_killed = True
        self.cancelled[operation] = now
        self._end(operation)
        self._carry_out(self.limits.steps_to_kill(self.workers.values(), operation), now)
        # Another worker may have gone on to such a call, and its last answer may be on its way.
        for worker in self.workers.values():
            worker.under_way.cancel_with_grace(operation, now)

    # --- checks

    def _cancelled_at(self, part: Part) -> float:
        what = part.graph_task if isinstance(part, Backward) else part.operation
        return self.cancelled.get(what, math.inf)

    def _is_sure(self, worker: Worker) -> bool:
        """Whether the caller must know what the worker does, because it began long enough ago."""
        began = min(worker.began, worker.loads_since)
        return began < self.now - 3 * self.unseen and worker.is_seen and not self.is_far

    def _check_terminated(self, worker: Worker, now: float) -> None:
        assert self.can_kill, "a worker is ended that cannot be"
        assert not worker.has_answered, "a worker is ended, and its answer was not read"
        since = max(worker.under_way.since, worker.began)
        if (worker.began == math.inf and worker.is_seen) or self._is_sure(worker):
            assert now - since >= TIMEOUT - 1e-6, "a call is ended before its time"

    def _check_killed(self, worker: Worker, now: float) -> None:
        assert self.can_kill, "a worker is killed that cannot be"
        assert not worker.has_answered, "a worker is killed, and its answer was not read"
        first = worker.under_way.first
        assert first is not None, "a worker is killed that has nothing to do"
        if first.operation is not None and self.cancelled.get(first.operation) == now:
            return
        assert self.recoverable or not worker.has_others, "what cannot be rebuilt is killed"
        part = worker.running
        if part is not None and self._is_sure(worker):
            assert part.outcome, "a worker is killed at a call that is needed"
            since = max(worker.under_way.since, self._cancelled_at(part))
            assert now - since >= GRACE_PERIOD - 1e-6, "a call gets no grace"

    def _check_moments(self) -> None:
        """Check that nothing that is due is left, and that nothing that will be is forgotten."""
        late = self.now - LATE - 3 * self.away
        look = self.limits.next_look
        for operation in self.operations:
            assert operation.is_killed or look <= operation.deadline, "a deadline is forgotten"
        for worker in self.workers.values():
            if worker.died_at < math.inf:
                continue
            if worker.termination is not None:
                assert look <= worker.termination.moment, "a worker that ended is not killed"
                continue
            first, part = worker.under_way.first, worker.running
            if part is None or first is None or part not in first.parts:
                continue
            since = max(worker.under_way.since, worker.began)
            if first.timeout is not None:
                soon = late if self.is_far else look - 2 * self.unseen
                assert soon <= since + first.timeout, "a time limit is forgotten"
            cancelled_at = self._cancelled_at(part)
            parts = worker.inbox[0][1]
            if worker.is_seen and all(each.outcome == "cancelled" for each in parts):
                skipped_at = self.skipped.get(part.operation, cancelled_at)
                seen_at = skipped_at + self.unseen + self.away
                assert worker.began <= seen_at + 1e-5, "what was cancelled begins"
            if self.can_kill and worker.is_seen and not worker.retiring:
                # A worker at a backward that is needed is looked at again after as long.
                grace = GRACE_PERIOD * (2 if isinstance(part, Backward) else 1)
                due = max(since, cancelled_at) + grace + 3 * SEEN + LATE + 3 * self.away
                assert look <= due, "a grace period is forgotten"

    def _check_places(self) -> None:
        """Check that each call without an outcome is in one place, and runs nowhere else."""
        for worker in self.workers.values():
            is_idle = worker.under_way.is_idle
            assert is_idle or worker.under_way, "a worker that has nothing to do is not idle"
            if worker.running is not None and worker.began > 0:
                chunk = worker.under_way.chunks[worker.inbox[0][0]]
                assert worker.running in chunk.parts, "a call was taken back, and runs"
                assert not is_idle, "a worker that runs a call counts as idle"
            elif worker.began == math.inf and self._is_sure(worker):
                assert not is_idle, "a worker that loads a function counts as idle"
        if self.rng.random() < 0.7:
            return
        places = [call for operation in self.queue.operations for call in operation.queue]
        for worker in [*self.workers.values(), *(each for _, each, _ in self.ending)]:
            for chunk in worker.under_way.chunks.values():
                places.extend(call for _, call in chunk.calls)
        left = [call for call in places if not call.outcome]
        assert len(left) == len(set(left)), "a call is in two places"
        assert len(left) == sum(not call.outcome for call in self.calls), "a call is nowhere"


def main() -> None:
    histories, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + histories):
        try:
            World(seed).run()
        except Exception as error:
            sys.exit(f"seed {seed}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
