"""Trains a small model in a pool whose workers are hurt all the time, and then in a pool whose
workers are left alone.

Every step maps an encoder over ragged items, and a head over the encoder's results, with dropout.
In every few steps, a penalty on the gradients of the items makes it second order. Both runs must
end with the same parameters, bit for bit. During the first run a thread takes a random worker at
random moments, sometimes several within a millisecond, and

    kills it (SIGKILL)                  its calls go to others, another worker takes its place
    stops it (SIGSTOP)                  this goes unnoticed until a call exceeds the pool's timeout:
                                        then the same
    slows it down (SIGSTOP, and soon    it goes on, unless it was slow for longer than the timeout
    SIGCONT)

A step that takes longer than a minute counts as a hang and ends the run. Injuries that follow each
other faster than workers can start (0.05 s each, on a busy machine 0.5 s) also end it, because then
no workers are left that could finish a step.

    python scripts/reliability/soak.py --kills 1000 --seconds 600
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import hashlib
import json
import logging
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

from common import at_least_1, file_to_write, limited, print_surroundings, surroundings

import mpgrad

EPILOG = (
    "exit status: 0 if both runs end with the same parameters and no step hung, 1 if they differ, "
    "or a step hung or failed, "
    "2 for wrong arguments"
)

ITEMS = 24  # in a step
KEPT = 60  # items in all
FEATURES, HIDDEN = 6, 16
LENGTHS = (3, 60)  # of most items, which are inline in a message
LONG = 1200  # of a few, which are stored in shared memory
SECOND_ORDER_EVERY = 4  # steps
# the number of steps after which memory, descriptors and threads are first measured, and injuries
# begin
WARM_UP = 5
ALL_RETRIES = 10**6

INJURIES = {"kill": 0.85, "stop": 0.05, "slow": 0.10}  # how likely each is
SHARE_OF_BURSTS = 0.1  # of the gaps between injuries are very short
BURST_GAP = 1e-3  # seconds
LONGEST_SLOW = 0.2  # seconds
PATIENCE = 10.0  # seconds for all workers to run again

MIB = 2**20
Record = dict[str, Any]


# --- what is trained


class Model(nn.Module):
    """Both halves are captures of the mapped functions, so their parameters get gradients from
    every item."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Dropout(0.2), nn.Linear(HIDDEN, HIDDEN)
        )
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Softplus(), nn.Linear(HIDDEN, 1))

    def encode(self, x: Tensor) -> Tensor:
        rows: Tensor = self.encoder(x)
        return rows.mean(0) + 0.01 * torch.randn(HIDDEN)

    def error(self, code: Tensor, target: float) -> Tensor:
        found: Tensor = self.head(code).squeeze()
        return (found - target) ** 2


def data() -> list[tuple[Tensor, float]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(*LENGTHS, (KEPT,), generator=generator).tolist()
    lengths[:: KEPT // 5] = [LONG] * len(lengths[:: KEPT // 5])
    items = [torch.randn(length, FEATURES, generator=generator) for length in lengths]
    return [(x, float(x.sin().mean())) for x in items]


class Training:
    """Runs the same steps each time, because all random numbers depend only on the number of the
    step."""

    def __init__(self, pool: mpgrad.Pool) -> None:
        torch.manual_seed(0)
        self.pool = pool
        self.model = Model()
        self.data = data()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        # marks of the parameters after each step, to find the first step that differs
        self.marks: list[str] = []

    def step(self) -> float:
        number = len(self.marks)
        torch.manual_seed(number)
        chosen = random.Random(number).sample(self.data, ITEMS)
        second_order = number % SECOND_ORDER_EVERY == 0
        items = [x.clone().requires_grad_(second_order) for x, _ in chosen]
        self.optimizer.zero_grad()
        codes = self.pool.map(self.model.encode, items)
        errors = self.pool.starmap(
            self.model.error,
            [(code, target) for code, (_, target) in zip(codes, chosen, strict=True)],
        )
        loss = torch.stack(errors).mean()
        total = loss
        if second_order:
            grads = torch.autograd.grad(loss, items, create_graph=True)
            total = loss + ITEMS * torch.stack([(grad**2).sum() for grad in grads]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.marks.append(mark_of(self.model))
        return float(loss.detach())


def mark_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def perturb(model: nn.Module) -> None:
    """Change a parameter by the smallest possible amount, which the comparison has to notice."""
    with torch.no_grad():
        entry = next(model.parameters()).view(-1)[:1]
        entry.copy_(torch.nextafter(entry, torch.full_like(entry, math.inf)))


# --- the thread that hurts it


class Slowed(NamedTuple):
    number: int
    until: float
    descriptor: int


@dataclass
class Harm:
    """Counts the injuries of the workers."""

    kills: int = 0
    stops: int = 0
    slow_downs: int = 0


class Tormentor:
    """A thread that hurts the pool's workers until it has killed enough of them, or is stopped.

    It has its own random numbers, so that training does not depend on it. It reads the state of the
    pool from `Pool.stats`.
    """

    def __init__(self, pool: mpgrad.Pool, plan: Plan) -> None:
        self.harm = Harm()
        self._pool = pool
        self._plan = plan
        self._random = random.Random(plan.seed)
        # for each worker whose death the pool has not noticed yet: whether it was only stopped
        self._doomed: dict[int, bool] = {}
        self._slowed: list[Slowed] = []
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tormentor", daemon=True)

    def __enter__(self) -> Tormentor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Raise the error of the thread, if there was one."""
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def all_deaths_seen(self) -> bool:
        """Return whether the pool, after its end, knows of all deaths, including those that only a
        timeout shows."""
        self._look()
        return not self._doomed

    def _run(self) -> None:
        try:
            next_blow = time.monotonic()
            while not self._over.is_set() and (
                self._plan.kills is None or self.harm.kills < self._plan.kills
            ):
                if time.monotonic() >= next_blow:
                    self._strike()
                    burst = self._random.random() < SHARE_OF_BURSTS
                    next_blow = time.monotonic() + (
                        BURST_GAP if burst else self._random.uniform(0.5, 1.5) * self._plan.gap
                    )
                self._release(lambda slowed: slowed.until <= time.monotonic())
                due = (
                    min([next_blow, *(slowed.until for slowed in self._slowed)]) - time.monotonic()
                )
                self._over.wait(max(0.0, due))
        except BaseException as error:
            self._error = error
        finally:
            self._release(lambda slowed: True)

    def _strike(self) -> None:
        self._look()
        victims = [
            worker for worker in self._pool.stats().workers if worker.number not in self._doomed
        ]
        if not victims:
            return
        number, pid, *_ = self._random.choice(victims)
        (injury,) = self._random.choices(list(INJURIES), list(INJURIES.values()))
        stopped = sum(self._doomed.values())
        if injury == "stop" and stopped >= max(1, self._plan.processes // 2):
            # with all workers stopped all the time there is no training, only timeouts
            injury = "kill"
        with contextlib.suppress(ProcessLookupError), held(pid) as descriptor:
            signal.pidfd_send_signal(
                descriptor, signal.SIGKILL if injury == "kill" else signal.SIGSTOP
            )
            if injury == "slow":
                self.harm.slow_downs += 1
                until = time.monotonic() + self._random.uniform(0.0, LONGEST_SLOW)
                self._slowed.append(Slowed(number, until, os.dup(descriptor)))
                return
            if injury == "stop":  # permanently, so an earlier slow-down must not wake it
                self._release(lambda slowed: slowed.number == number, wake=False)
            self._doomed[number] = injury == "stop"
            if injury == "kill":
                self.harm.kills += 1
            else:
                self.harm.stops += 1

    def _release(self, whom: Callable[[Slowed], bool], wake: bool = True) -> None:
        released = [slowed for slowed in self._slowed if whom(slowed)]
        self._slowed = [slowed for slowed in self._slowed if slowed not in released]
        for slowed in released:
            with contextlib.suppress(ProcessLookupError):  # it was killed before
                if wake:
                    signal.pidfd_send_signal(slowed.descriptor, signal.SIGCONT)
            os.close(slowed.descriptor)

    def _look(self) -> None:
        there = {worker.number for worker in self._pool.stats().workers}
        self._doomed = {
            number: stopped for number, stopped in self._doomed.items() if number in there
        }


@contextlib.contextmanager
def held(pid: int) -> Iterator[int]:
    """Yield a descriptor of a worker's process, because its number may be given to another process
    as soon as it has ended.

    Raises:
        ProcessLookupError: the process has ended.
    """
    descriptor = os.pidfd_open(pid)
    try:
        try:
            ours = os.getpid() in [parent.pid for parent in psutil.Process(pid).parents()]
            dead = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ours, dead = False, True
        if dead or not ours:
            raise ProcessLookupError(pid)
        yield descriptor
    finally:
        os.close(descriptor)


# --- a run


@dataclass(frozen=True)
class Plan:
    """Holds the sizes and limits of a run."""

    processes: int = 4
    seconds: float = math.inf  # of injuries
    kills: int | None = None
    gap: float = 0.2  # seconds between injuries, on average, apart from bursts
    timeout: float = 1.0  # of the pool
    hang: int = 60  # seconds of a step
    seed: int = 0
    # the step of the undisturbed run before which a parameter is changed
    perturb: int | None = None


QUICK = Plan(seconds=20, kills=20, gap=0.15, timeout=0.5, hang=30)


class Held(NamedTuple):
    """Holds the resources of a run at a moment between two steps."""

    parent_bytes: int
    workers_bytes: int
    shared_bytes: int
    descriptors: int
    threads: int


@dataclass
class Run:
    marks: list[str] = field(default_factory=list)
    first_loss: float = math.nan
    last_loss: float = math.nan
    seconds: list[float] = field(default_factory=list)  # of each step
    start: Held | None = None
    end: Held | None = None
    harm: Harm = field(default_factory=Harm)
    deaths: int = 0
    reruns: int = 0
    hangs: int = 0
    error: str | None = None

    def record(self) -> Record:
        held = {
            name: None if each is None else each._asdict()
            for name, each in (("start", self.start), ("end", self.end))
        }
        each = asdict(replace(self, marks=[], start=None, end=None))
        del each["marks"]
        last = self.marks[-1] if self.marks else None
        return each | held | {"steps": len(self.marks), "sha256_of_parameters": last}


def held_by(pool: mpgrad.Pool, plan: Plan) -> Held:
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while len((stats := pool.stats()).workers) < plan.processes and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = sum(worker.resident_bytes for worker in stats.workers)
    own = psutil.Process()
    return Held(
        own.memory_info().rss, workers, stats.shared_bytes, own.num_fds(), own.num_threads()
    )


def injured(plan: Plan) -> Run:
    """Run until enough workers have been hurt for long enough."""
    run = Run()
    with started(plan) as pool, watched(run, pool):
        training = Training(pool)
        take_steps(run, training, plan, lambda: len(training.marks) == WARM_UP)
        run.start = held_by(pool, plan)
        tormentor = Tormentor(pool, plan)
        run.harm = tormentor.harm
        with tormentor:
            end = time.monotonic() + plan.seconds
            take_steps(run, training, plan, lambda: tormentor.done or time.monotonic() > end)
        end = time.monotonic() + plan.hang
        take_steps(
            run, training, plan, lambda: tormentor.all_deaths_seen() or time.monotonic() > end
        )
        if not tormentor.all_deaths_seen():
            raise TimeoutError(
                "the pool did not find out about a worker's death, or a stopped worker, in "
                f"{plan.hang} s"
            )
        run.end = held_by(pool, plan)
    return run


def undisturbed(plan: Plan, steps: int) -> Run:
    run = Run()
    with started(plan) as pool, watched(run, pool):
        training = Training(pool)
        take_steps(run, training, plan, lambda: len(training.marks) == min(WARM_UP, steps))
        run.start = held_by(pool, plan)
        take_steps(run, training, plan, lambda: len(training.marks) == steps)
        run.end = held_by(pool, plan)
    return run


def started(plan: Plan) -> mpgrad.Pool:
    return mpgrad.Pool(
        plan.processes,
        deterministic=True,
        retries=ALL_RETRIES,
        timeout=plan.timeout,
        timeout_retries=ALL_RETRIES,
    )


def take_steps(run: Run, training: Training, plan: Plan, enough: Callable[[], bool]) -> None:
    while not enough():
        if len(training.marks) == plan.perturb:
            perturb(training.model)
        began = time.perf_counter()
        with limited(plan.hang):
            loss = training.step()
        run.seconds.append(time.perf_counter() - began)
        run.marks = training.marks
        run.first_loss = run.first_loss if len(run.seconds) > 1 else loss
        run.last_loss = loss


@contextlib.contextmanager
def watched(run: Run, pool: mpgrad.Pool) -> Iterator[None]:
    """Note the end of a run, even of a run that ends early with a hang or with an error that no
    step should raise."""
    try:
        yield
    except Exception as error:
        # the pool's own error is also a TimeoutError, of a call that was given up
        run.hangs = int(
            isinstance(error, TimeoutError) and not isinstance(error, mpgrad.CallTimeoutError)
        )
        run.error = f"{type(error).__name__} in step {len(run.marks)}: {error}"
        traceback.print_exc()
        faulthandler.dump_traceback(all_threads=True)  # shows what the pool's thread was doing
    stats = pool.stats()
    run.deaths, run.reruns = stats.deaths, stats.reruns


def first_difference(marks: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the first step after which the parameters of two runs differ; None if there is
    none."""
    for number, (one, other) in enumerate(zip(marks, others, strict=False)):
        if one != other:
            return number
    return None if len(marks) == len(others) else min(len(marks), len(others))


# --- the table


def print_row(cells: Sequence[str]) -> None:
    first, *others = cells
    print((f"  {first:48}" + "".join(f"{cell:>20}" for cell in others)).rstrip(), flush=True)


def print_runs(runs: Sequence[Run]) -> None:
    print()
    print_row(["", "injured", "undisturbed"])
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("steps", lambda run: str(len(run.marks))),
        ("kills (SIGKILL)", lambda run: str(run.harm.kills)),
        ("stops (SIGSTOP)", lambda run: str(run.harm.stops)),
        ("slow-downs (SIGSTOP, SIGCONT)", lambda run: str(run.harm.slow_downs)),
        ("deaths seen by the pool", lambda run: str(run.deaths)),
        ("calls and backwards rerun", lambda run: str(run.reruns)),
        ("hangs", lambda run: str(run.hangs)),
        ("loss, first step", lambda run: f"{run.first_loss:.6f}"),
        ("loss, last step", lambda run: f"{run.last_loss:.6f}"),
        ("step, ms: median", lambda run: ms_of(statistics.median, run.seconds[WARM_UP:])),
        ("step, ms: mean", lambda run: ms_of(statistics.fmean, run.seconds[WARM_UP:])),
        ("step, ms: worst", lambda run: ms_of(max, run.seconds[WARM_UP:])),
        (
            "resident, MiB: parent, start -> end",
            lambda run: change(run, lambda held: f"{held.parent_bytes / MIB:.1f}"),
        ),
        (
            "resident, MiB: all workers, start -> end",
            lambda run: change(run, lambda held: f"{held.workers_bytes / MIB:.1f}"),
        ),
        (
            "shared memory in use, KiB, start -> end",
            lambda run: change(run, lambda held: f"{held.shared_bytes / 1024:.0f}"),
        ),
        (
            "parent's descriptors, start -> end",
            lambda run: change(run, lambda held: str(held.descriptors)),
        ),
        ("parent's threads, start -> end", lambda run: change(run, lambda held: str(held.threads))),
    ]
    for name, cell in rows:
        print_row([name, *map(cell, runs)])


def change(run: Run, figure: Callable[[Held], str]) -> str:
    return " -> ".join("?" if held is None else figure(held) for held in (run.start, run.end))


def ms_of(of: Callable[[Sequence[float]], float], seconds: Sequence[float]) -> str:
    return f"{1e3 * of(seconds):.1f}" if seconds else "-"


# --- the whole


def soak(plan: Plan) -> Record:
    around = surroundings(plan.processes)
    print_surroundings(around)
    print(
        f"{ITEMS} items a step; an injury every {plan.gap:g} s or so, a timeout of "
        f"{plan.timeout:g} s, seed {plan.seed}"
    )
    torch.set_num_threads(1)  # as in the workers
    gentle = replace(plan, perturb=None)
    hurt = injured(gentle)
    whole = undisturbed(plan, len(hurt.marks)) if hurt.error is None else Run()
    print_runs([hurt, whole])
    errors = [
        f"{name}: {run.error}"
        for name, run in (("injured", hurt), ("undisturbed", whole))
        if run.error is not None
    ]
    differs = first_difference(hurt.marks, whole.marks)
    equal = differs is None and not errors
    verdict = (
        "equal, bit for bit"
        if equal
        else "not all compared"
        if errors
        else f"DIFFERENT, from step {differs} on"
    )
    print("\n" + "\n".join([*errors, f"parameters after each step: {verdict}"]), flush=True)
    return {
        "surroundings": around,
        "plan": asdict(plan) | {"seconds": plan.seconds if math.isfinite(plan.seconds) else None},
        "injured": hurt.record(),
        "undisturbed": whole.record(),
        "hangs": hurt.hangs + whole.hangs,
        "equal": equal,
        "first_difference": differs,
    }


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--seconds", type=at_least_1, metavar="S", help="of injuries (default: 60, without --kills)"
    )
    parser.add_argument(
        "--kills",
        type=at_least_1,
        metavar="N",
        help="after which injuries end, if that comes first",
    )
    parser.add_argument(
        "--processes",
        type=at_least_1,
        default=Plan.processes,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK.kills} kills, only to see that it runs"
    )
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write all steps there")
    return parser


def plan_of(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else Plan(seconds=60 if options.kills is None else math.inf)
    given = {"seconds": options.seconds, "kills": options.kills, "processes": options.processes}
    return replace(plan, **{name: value for name, value in given.items() if value is not None})


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    # the deaths are meant, and the table counts them
    logging.getLogger("mpgrad").addHandler(logging.NullHandler())
    record = soak(plan_of(options))
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"all steps: {options.json}")
    return 0 if record["equal"] and record["hangs"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
