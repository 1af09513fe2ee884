"""Histories of `mpgrad.machine` alone. Calls, operations, workers and their progress records are
plain stubs, and the driver below carries out what is decided. It imports no torch, and nothing else
of mpgrad: `test_machine.py` runs it in an interpreter that has neither.

    python tests/simulation/alone.py HISTORIES [FIRST_SEED]

Checked: each call gets one outcome, calls that were taken back are not run by the worker that had
them, calls fail only after too many deaths or time-outs of their own, workers do not go on with
what was cancelled, and no moment is forgotten at which there is something to do. `history.py` does
the same, and more, with the real scheduler.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import deque
from collections.abc import Container, Iterator
from typing import Any

from mpgrad.machine.deaths import IDLE_DEATHS, Limits, death_of, failing, judged, successor
from mpgrad.machine.policy import CHUNKS_UNDER_WAY, NEAR
from mpgrad.machine.queue import CallQueue
from mpgrad.machine.story import LOST, Story
from mpgrad.machine.timing import FunctionTiming
from mpgrad.machine.under_way import Chunk, SentChunks

# seconds until another process sees what was written, at most; calls take longer
UNSEEN = 5e-6
TIMEOUT = 0.3
MOST_TURNS = 20_000


class Function:
    """A function, and the times of its calls."""

    def __init__(self) -> None:
        self.timing = FunctionTiming()

    def seconds(self, function: Any, unknown: float) -> float:
        return self.timing.seconds or unknown

    def number(self, function: Any) -> None:
        """Do nothing: there is one function."""


class Options:
    def __init__(self, rng: random.Random) -> None:
        self.function = None
        self.chunksize = rng.choice((None, None, 4))
        self.timeout = rng.choice((None, TIMEOUT))
        self.at_rest = rng.random() < 0.5
        self.together = rng.random() < 0.5
        self.story = Story()


class Operation:
    def __init__(self, rng: random.Random) -> None:
        self.options = Options(rng)
        self.queue: deque[Any] = deque()
        self.packed: deque[Any] = deque()
        self.limit = math.inf
        self.sealed = True
        self.unsorted = self.largest_first = False

    def starts(self, index: int) -> bool:
        return True


class Call:
    items, message_bytes, route = 1, 64, None
    has_lost_graph = False

    def __init__(self, operation: Operation, index: int, kind: str, seconds: float) -> None:
        self.operation, self.index, self.item = operation, index, index
        self.kind, self.seconds, self.nbytes = kind, seconds, index % 3
        self.deaths = self.timeouts = self.idle_deaths = 0
        self.outcome = ""

    def note(self, transition: Any) -> None:
        self.operation.options.story.note(self.item, transition)


class Record:
    """A progress record. What one side writes, the other side sees a little later."""

    is_far, offset = False, -1

    def __init__(self, world: World) -> None:
        self._world = world
        self._notes: list[tuple[float, int, int, float]] = [(0.0, 0, 0, 0.0)]
        self._skips: dict[int, float] = {}

    # --- the worker's end

    def note(self, now: float, chunk: int, position: int) -> None:
        seen = max(now + self._world.rng.random() * UNSEEN, self._notes[-1][0])
        self._notes.append((seen, chunk, position, now))

    def is_skipped(self, now: float, chunk: int) -> bool:
        return self._skips.get(chunk, math.inf) <= now

    # --- the caller's end

    def _last(self) -> tuple[float, int, int, float]:
        return next(each for each in reversed(self._notes) if each[0] <= self._world.now)

    def at(self) -> tuple[int, int] | None:
        seen, chunk, position, _ = self._last()
        is_recent = self._world.now - seen < UNSEEN
        return None if is_recent and self._world.rng.random() < 0.5 else (chunk, position)

    @property
    def started(self) -> float:
        return self._last()[3]

    def skip(self, number: int, under_way: Container[int]) -> bool:
        if number in self._skips:
            return False
        self._skips[number] = self._world.now + self._world.rng.random() * UNSEEN
        return True

    def follow(self, seconds: float) -> None:
        """Do nothing: no agent is between."""


class Link:
    lost, keeps_time, overrun, has_place = "", False, None, True


class Worker:
    """Both what the caller knows of a worker, and the worker itself, which is a generator of the
    moments at which it does its next step."""

    device, ready, has_others = 0, True, False

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.link = world, number, Link()
        self.under_way = SentChunks()
        self.under_way.progress = self.record = Record(world)
        self.retiring = False
        self.calls_done = 0
        self.gone: Any = None
        self.overdue: float | None = None
        self.termination: Any = None
        self.inbox: deque[tuple[int, list[Call]]] = deque()
        # chunks with the calls that have run, and whether more follow
        self.answers: deque[tuple[int, list[Call], bool]] = deque()
        self.is_alive = self.is_idle = True
        self.at, self._steps = world.now, self._run()

    @property
    def load(self) -> int:
        return sum(len(chunk.calls) for chunk in self.under_way.chunks.values())

    def go_on(self) -> None:
        """Do all steps up to now."""
        while self.is_alive and self.at <= self.world.now:
            self.at = next(self._steps, math.inf)

    def _run(self) -> Iterator[float]:
        rng, now = self.world.rng, self.world.now
        while True:
            self.is_idle = not self.inbox
            while self.is_idle:
                yield math.inf
                now = self.world.now
            number, calls = self.inbox[0]
            done: list[Call] = []
            for position, call in enumerate(calls):
                self.record.note(now, number, position)
                yield (now := now + rng.random() * 2e-6)
                if self.record.is_skipped(now, number):
                    break
                if call.kind == "dies":
                    yield (now := now + call.seconds)
                    self.is_alive = False
                    return
                yield (now := now + call.seconds)
                done.append(call)
                if rng.random() < 0.1:
                    self.answers.append((number, done, True))
                    done = []
            self.answers.append((number, done, False))
            self.inbox.popleft()


class World:
    """A history: a few operations with calls, workers, and the driver that carries out what the
    machine decides."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.retries, self.timeout_retries = rng.choice((0, 1, 2)), rng.choice((0, 1))
        self.wanted = rng.randint(1, 4)
        self.function = Function()
        self.queue = CallQueue(
            self.function,
            itertools.count(1),
            self.wanted,
            None,
            by_device=False,
            chunk_seconds=NEAR,
        )
        self.limits = Limits(self.queue, can_kill=True, recoverable=True)
        self.workers: dict[int, Worker] = {}
        self._numbers, self._chunks = itertools.count(1), itertools.count(1)
        self.operations = [Operation(rng) for _ in range(rng.randint(1, 3))]
        # the operation that is cancelled with grace, and when
        self.cancelled = rng.choice((None, self.operations[0]))
        self.cancels_at = math.inf if self.cancelled is None else 0.1 * rng.random()
        self.calls = [call for each in self.operations for call in self._calls_of(each)]

    def _calls_of(self, operation: Operation) -> list[Call]:
        rng = self.rng
        usual = rng.choice((2e-5, 1e-3, 2e-2))
        calls = []
        for index in range(rng.randint(1, 40)):
            kind = rng.choices(("runs", "hangs", "dies", "is slow"), (60, 1, 1, 2))[0]
            if kind == "hangs" and not (operation.options.timeout or operation is self.cancelled):
                kind = "runs"
            slow = {"hangs": math.inf, "is slow": 0.1}.get(kind, 0.0)
            calls.append(Call(operation, index, kind, slow + usual * (1 + rng.random())))
        return calls

    def run(self) -> None:
        self._fill()
        for operation in self.operations:
            calls = [call for call in self.calls if call.operation is operation]
            self.queue.join(operation, calls)
        for _ in range(MOST_TURNS):
            self._turn()
            is_busy = any(worker.under_way for worker in self.workers.values())
            if all(call.outcome for call in self.calls) and not is_busy:
                return
            moments = [
                self.now if worker.answers or not worker.is_alive else worker.at
                for worker in self.workers.values()
            ]
            soonest = min(self.limits.next_look, self.queue.look_at, self.cancels_at, *moments)
            assert soonest < math.inf, "nobody will ever look again"
            self.now = max(self.now + 1e-7, soonest)
        raise AssertionError("the history does not end")

    # --- the driver

    def _fill(self) -> None:
        while sum(not each.retiring for each in self.workers.values()) < self.wanted:
            worker = Worker(self, next(self._numbers))
            self.workers[worker.number] = worker
            self.queue.look_at = 0.0

    def _turn(self) -> None:
        for worker in list(self.workers.values()):
            worker.go_on()
            # Sometimes the driver is late, and reads an answer in its next turn.
            if self.rng.random() < 0.9:
                self._receive(worker)
        if self.now >= self.cancels_at:
            self.cancels_at = math.inf
            self._cancel(self.cancelled)
        self._feed()
        if self.queue.take_back(self.workers.values(), self.now):
            self._feed()
        for step, worker in self.limits.steps(self.workers.values(), self.now):
            match step:
                case "drain":
                    self._receive(worker)
                case "terminate":
                    # A worker that does not listen is killed later.
                    worker.is_alive = self.rng.random() < 0.5
                case "kill" | "kill overdue":
                    self._lose(worker, blames=step == "kill overdue")
                case "retire":
                    worker.retiring = True
                    self._fill()

    def _feed(self) -> None:
        for depth in range(CHUNKS_UNDER_WAY):
            for worker in self.workers.values():
                under_way = worker.under_way
                if len(under_way.chunks) > depth or under_way.in_grace or worker.retiring:
                    continue
                if (share := self.queue.next_for(worker, self.now)) is not None:
                    operation, calls = share
                    number = next(self._chunks)
                    chunk = Chunk(operation, calls, [], None, operation.options.timeout)
                    under_way.add(number, chunk, self.now)
                    worker.inbox.append((number, [call for _, call in calls]))
                    if worker.is_idle:
                        worker.is_idle, worker.at = False, self.now
                    self.queue.note_given(worker, self.now)

    def _receive(self, worker: Worker) -> None:
        while worker.gone is None and worker.answers:
            number, done, more = worker.answers.popleft()
            under_way = worker.under_way
            chunk = under_way.chunks[number] if more else under_way.take(number, self.now)
            expected = [call for _, call in chunk.calls[: len(done)]]
            assert done == expected, "a call was taken back, and has run all the same"
            for call in done:
                self.function.timing.note(call.seconds, call.seconds, self.wanted, math.inf)
                self._deliver(call, "a value")
            chunk.note_answered(len(done))
            if not more:
                unrun = [call for _, call in chunk.calls]
                self.queue.put_back(chunk.operation, unrun, self.now)
        if worker.gone is None and not worker.is_alive:
            self._lose(worker, blames=True)

    def _lose(self, worker: Worker, blames: bool) -> None:
        death = death_of(worker, blames)
        worker.gone, worker.is_alive = "lost", False
        del self.workers[worker.number]
        worker.under_way.end()
        if death.blames and death.chunks:
            verdict = judged(worker, death, self.retries, self.timeout_retries, self.now)
            if verdict is not None:
                accused = verdict.accused
                assert accused.kind == "dies" or not accused.deaths, "the wrong call is blamed"
                assert accused.kind == "hangs" or not accused.timeouts, "the wrong call is late"
                part = failing(death, verdict.fails, self.retries)
                self._fail([call for _, call in death.chunks[0].calls[part]])
                del death.chunks[0].calls[part]
        for chunk in reversed(death.chunks):
            calls = [call for _, call in chunk.calls]
            self.queue.put_back(chunk.operation, calls, self.now, LOST, worker.number)
        self._fill()
        assert successor(self.workers.values(), 0) in self.workers.values()

    def _fail(self, calls: list[Call]) -> None:
        for call in calls:
            excess = call.deaths > self.retries or call.timeouts > self.timeout_retries
            suspected = call.idle_deaths > max(self.retries, IDLE_DEATHS)
            assert excess or suspected or self.retries == 0, "a call fails without a reason"
            self._deliver(call, "an error")

    def _deliver(self, call: Call, outcome: str) -> None:
        if call.index < call.operation.limit:
            assert not call.outcome, "a call gets two outcomes"
            call.outcome = outcome

    def _cancel(self, operation: Any) -> None:
        for call in self.calls:
            if call.operation is operation and not call.outcome:
                call.outcome = "cancelled"
        operation.limit = 0
        self.queue.tidy()
        for worker in self.workers.values():
            worker.under_way.cancel_with_grace(operation, self.now)


def main() -> None:
    histories, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + histories):
        try:
            World(seed).run()
        except Exception as error:
            sys.exit(f"seed {seed}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
