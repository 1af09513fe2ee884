"""The rows of `bench_ray.py`. Each takes the contenders and how much to measure, and gives figures as they come."""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import psutil
import torch
from common import Function, Outcome, WrongResultError, calibrated
from descendants import cpu_seconds
from figures import WARM_UPS, Figure, interleaved, median_figure, ratios
from jobs import PYTHON, backward_at_once, log_normal
from losses import doubled, priced_loss, python_loss, weighted_loss
from torch import Tensor

import mpgrad
from ray_nodes.by_hand import ByHand, parted

PROCESS, HAND, KEEP, AHEAD = "process, keep", "by hand", "ray, keep", "ray, ahead"
REFERENCE = 3e-3  # seconds of the work that others are multiples of
FLOATS = 100  # of an item
CROWD_NODE = 64  # workers
BUSY = 0.8


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int = 7
    shrink: int = 1  # so many times fewer items
    capture_floats: int = 1_000_000
    tiny_items: int = 2000
    flight_floats: int = 250_000
    flight_seconds: float = 5.0
    flight_turns: int = 1
    applies: int = 30  # a round
    deaths: int = 3  # rounds of the row `death`, in which each contender takes a quarter of a minute
    limit: int = 1800  # seconds of the whole run


QUICK = Plan(rounds=1, shrink=16, capture_floats=10_000, tiny_items=50, flight_seconds=0.3, applies=3, deaths=1, limit=240)


class Contenders(NamedTuple):
    """One worker on each node, or as many on this machine without Ray."""

    process: mpgrad.Pool
    hand: ByHand
    keep: mpgrad.Pool
    ahead: mpgrad.Pool

    def pools(self) -> dict[str, mpgrad.Pool]:
        return {PROCESS: self.process, KEEP: self.keep, AHEAD: self.ahead}


# --- a job, and ways to do it


@dataclass(frozen=True)
class Job:
    title: str
    function: Callable[..., Tensor]  # of an item, behind the weight if there is one
    items: Sequence[Tensor]
    weight: Tensor | None = None

    @property
    def leaves(self) -> tuple[list[Tensor], Tensor | None]:
        """Copies that require grad: what has a gradient, or was shared, would be another item."""
        weight = None if self.weight is None else self.weight.clone().requires_grad_()
        return [item.clone().requires_grad_() for item in self.items], weight


Way = Callable[[Job, list[Tensor], "Tensor | None"], Outcome]


def mapped(loop: Callable[[Function, list[Tensor]], Sequence[Tensor]], job: Job, items: list[Tensor], weight: Any) -> Outcome:
    """One backward from the sum of all losses: the caller's own code, whatever the loop."""
    losses = loop(job.function if weight is None else partial(job.function, weight), items)
    torch.autograd.backward(torch.stack(tuple(losses)).sum())
    leaves = items if weight is None else [*items, weight]
    return Outcome([loss.detach() for loss in losses], [leaf.grad for leaf in leaves])


def mapped_forward(
    loop: Callable[[Function, list[Tensor]], Sequence[Tensor]], job: Job, items: list[Tensor], _: Any
) -> Outcome:
    with torch.no_grad():
        return Outcome(loop(job.function, items), [])


def serial(function: Function, items: list[Tensor]) -> list[Tensor]:
    return [function(item) for item in items]


def ways_of(found: Contenders) -> dict[str, Way]:
    ways: dict[str, Way] = {name: partial(mapped, pool.map) for name, pool in found.pools().items()}
    ways[HAND] = lambda job, items, weight: found.hand.both(job.function, items, weight)
    return {name: ways[name] for name in (PROCESS, HAND, KEEP, AHEAD)}


def forward_ways_of(found: Contenders) -> dict[str, Way]:
    """Without gradients the two kinds of graphs are the same."""
    return {
        PROCESS: partial(mapped_forward, found.process.map),
        HAND: lambda job, items, _: Outcome(found.hand.forward(job.function, items), []),
        KEEP: partial(mapped_forward, found.keep.map),
    }


# --- the clock


class Taken(NamedTuple):
    """Seconds of one step; CPU of all threads of the caller, and of all processes that it has started, directly or not."""

    wall: float
    caller: float
    others: float


def taken(way: Way, jobs: Iterator[Job], children: set[psutil.Process]) -> Taken:
    job = next(jobs)
    items, weight = job.leaves
    others, caller, began = cpu_seconds(children), own_cpu(), time.perf_counter()
    outcome = way(job, items, weight)
    del outcome, items, weight  # a training loop pays for that too
    ended = time.perf_counter()
    return Taken(ended - began, own_cpu() - caller, cpu_seconds(children) - others)


def own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def check(job: Job, ways: dict[str, Way], reference: Way) -> None:
    """Raise WrongResultError unless each way gives what the serial loop gives."""
    expected = reference(job, *job.leaves)
    for name, way in ways.items():
        compare(f"{job.title}: {name}", way(job, *job.leaves), expected)


def compare(what: str, outcome: Outcome, expected: Outcome) -> None:
    """Raise WrongResultError unless they are the same."""
    for kind, given, right in zip(("value", "gradient"), outcome, expected, strict=True):
        try:
            torch.testing.assert_close(list(given), list(right))
        except AssertionError as error:
            raise WrongResultError(f"{what}: a {kind} differs from the serial loop's") from error


# --- rows of jobs


def job_figures(jobs: Sequence[Job], ways: dict[str, Way], reference: Way, plan: Plan) -> Iterator[Figure]:
    """`jobs`: one for all rounds, or one for each, warm-ups included. They differ in what their items hold only."""
    job = jobs[0]
    check(job, ways, reference)
    children = set(psutil.Process().children(recursive=True))  # workers, and all that belongs to the cluster
    # each has an iterator of its own: all of them do the same job within a round
    turns = {name: partial(taken, way, itertools.cycle(jobs), children) for name, way in ways.items()}
    runs = interleaved(turns, plan.rounds)
    for name, own in runs.items():
        yield median_figure(job.title, name, [1e3 * run.wall for run in own], "ms")
    for name, own in runs.items():
        if name != HAND:
            over = ratios([run.wall for run in own], [run.wall for run in runs[HAND]])
            yield median_figure(job.title, f"{name}, time over that by hand (lower is better)", over, "x")
    for name, own in runs.items():
        yield median_figure(
            job.title, f"{name}, CPU of the caller", [1e6 * run.caller / len(job.items) for run in own], "us/item"
        )
    for name, own in runs.items():
        yield median_figure(job.title, f"{name}, CPU of all processes", [1e3 * (run.caller + run.others) for run in own], "ms")


@cache
def steps_of_a_ms() -> float:
    """Forward and backward."""
    return calibrated(PYTHON, REFERENCE, backward_at_once) / REFERENCE / 1e3


def equal(count: int, ms: float, shrink: int) -> Job:
    items = random_items(count, shrink)
    steps = max(1, round(ms * steps_of_a_ms() / shrink))
    return Job(f"{len(items)} items of {ms:g} ms", partial(python_loss, steps=steps), items)


def random_items(count: int, shrink: int) -> list[Tensor]:
    return [torch.randn(FLOATS) for _ in range(max(2, count // shrink))]


def priced(steps: int, item: Tensor) -> Tensor:
    """What `priced_loss` takes."""
    return torch.cat([torch.tensor([float(steps)]), item])


def largest_share(costs: Sequence[float], shares: int) -> float:
    """Of those that are dealt by hand, over their mean: what nobody balances costs so much more time."""
    return shares * max(sum(share) for share in parted(costs, shares)) / sum(costs)


class Rows:
    def __init__(self, found: Contenders, plan: Plan) -> None:
        self._found = found
        self._plan = plan

    def _equal(self, count: int, ms: float) -> Job:
        return equal(count, ms, self._plan.shrink)

    def _both(self, *jobs: Job) -> Iterator[Figure]:
        titled = [replace(job, title=f"{job.title}, forward and backward") for job in jobs]
        yield from job_figures(titled, ways_of(self._found), partial(mapped, serial), self._plan)

    def short(self) -> Iterator[Figure]:
        yield from self._both(self._equal(256, 3))

    def forward(self) -> Iterator[Figure]:
        job = self._equal(256, 3)
        titled = Job(f"{job.title}, the forward alone", job.function, job.items)
        yield from job_figures([titled], forward_ways_of(self._found), partial(mapped_forward, serial), self._plan)

    def middle(self) -> Iterator[Figure]:
        yield from self._both(self._equal(64, 10))

    def capture(self) -> Iterator[Figure]:
        floats = self._plan.capture_floats
        items = random_items(32, self._plan.shrink)
        steps = max(1, round(34 * steps_of_a_ms() / self._plan.shrink))
        title = f"{len(items)} items of 34 ms with a weight of {4 * floats / 1e6:g} MB"
        yield from self._both(Job(title, partial(weighted_loss, steps=steps), items, 1 + torch.rand(floats)))

    def tail(self) -> Iterator[Figure]:
        """Each round has other costs: in one draw the static shares may be as good as equal, in another far from it."""
        items = random_items(64, self._plan.shrink)
        steps = 10 * steps_of_a_ms() / self._plan.shrink
        title = f"{len(items)} items of log-normal cost (mean 10 ms, sigma 1), other costs in each round"
        draws = [
            [max(1, round(steps * cost)) for cost in log_normal(len(items), 1.0, seed)]
            for seed in range(WARM_UPS + self._plan.rounds)
        ]
        jobs = [Job(title, priced_loss, [priced(*each) for each in zip(draw, items, strict=True)]) for draw in draws]
        figures = list(self._both(*jobs))
        yield from figures
        largest = [largest_share(draw, self._found.hand.shares) for draw in draws[WARM_UPS:]]
        yield median_figure(figures[0].row, "the largest share by hand, over the mean", largest, "x")

    def tiny(self) -> Iterator[Figure]:
        """What an item costs the caller; and from that, on paper, for how many workers one caller is enough."""
        items = [torch.randn(10) for _ in range(self._plan.tiny_items)]
        job = Job(f"{len(items)} items of one step, all sent, forward and backward", partial(python_loss, steps=1), items)
        figures = list(job_figures([job], ways_of(self._found), partial(mapped, serial), self._plan))
        yield from figures
        spent = {figure.name: figure.value for figure in figures}
        for name in (PROCESS, KEEP, AHEAD):
            yield from crowd_figures(name, spent[f"{name}, CPU of the caller"] / 1e6)

    def flight(self) -> Iterator[Figure]:
        plan, found = self._plan, self._found
        tensor = torch.randn(plan.flight_floats)
        submits: dict[str, Callable[[int], Any]] = {
            PROCESS: lambda number: found.process.apply_async(doubled, (tensor,)),
            HAND: lambda number: found.hand.call(number, array_doubled, tensor.numpy()),
            KEEP: lambda number: found.keep.apply_async(doubled, (tensor,)),
        }
        gets: dict[str, Callable[[Any], Any]] = {name: lambda result: result.get() for name in submits}
        gets[HAND] = found.hand.get
        turns = {name: partial(flown, submits[name], gets[name], plan.flight_seconds) for name in submits}
        row = f"8 tensors of {tensor.nbytes / 1e6:g} MB in flight for {plan.flight_seconds:g} s, there and back"
        flights = interleaved(turns, min(plan.rounds, plan.flight_turns), 1)
        for name, own in flights.items():
            yield median_figure(row, name, [each.rate for each in own], "tensors/s")
            yield Figure(row, f"{name}, the longest stall", 1e3 * max(each.stall for each in own), "ms")

    def apply(self) -> Iterator[Figure]:
        found = self._found
        calls: dict[str, Callable[[], Any]] = {
            PROCESS: lambda: found.process.apply(abs, (-1,)),
            HAND: lambda: found.hand.get(found.hand.call(0, abs, -1)),
            KEEP: lambda: found.keep.apply(abs, (-1,)),
        }
        turns = {name: partial(latencies, call, self._plan.applies) for name, call in calls.items()}
        for name, rounds in interleaved(turns, self._plan.rounds, 1).items():
            all_of_them = sorted(each for own in rounds for each in own)
            row = f"warm apply(abs, (-1,)), {len(all_of_them)} of them one after the other"
            yield Figure(row, f"{name}, median", 1e3 * statistics.median(all_of_them), "ms")
            yield Figure(row, f"{name}, 90th percentile", 1e3 * all_of_them[int(0.9 * len(all_of_them))], "ms")


# --- without gradients


class Flown(NamedTuple):
    rate: float  # tensors a second
    stall: float  # seconds; the longest time between two results


def flown(submit: Callable[[int], Any], get: Callable[[Any], Any], seconds: float) -> Flown:
    """Results are taken in the order of the calls."""
    flying = deque(submit(number) for number in range(8))
    get(flying.popleft())
    began = last = time.perf_counter()
    count, stall = 0, 0.0
    while last - began < seconds:
        flying.append(submit(count))
        get(flying.popleft())
        now = time.perf_counter()
        count, stall, last = count + 1, max(stall, now - last), now
    while flying:
        get(flying.popleft())
    return Flown(count / (last - began), stall)


def array_doubled(array: Any) -> Any:
    return array * 2


def latencies(call: Callable[[], Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


# --- on paper


def crowd_figures(name: str, cost: float) -> Iterator[Figure]:
    """`cost`: seconds of the caller's CPU an item. Workers ask for N / t items a second; a caller gives 1 / cost of them."""
    row = f"{name}: workers that one caller keeps {100 * BUSY:.0f} % busy, {BUSY:g} t / c, computed and not run"
    yield Figure(row, "c, the caller's CPU", 1e6 * cost, "us/item")
    for ms in (1, 10, 100):
        workers = BUSY * ms / 1e3 / cost
        yield Figure(row, f"items of t = {ms} ms", workers, "workers")
        yield Figure(row, f"items of t = {ms} ms, in nodes of {CROWD_NODE} workers", workers / CROWD_NODE, "nodes")


ROWS: dict[str, Callable[[Rows], Iterator[Figure]]] = {
    "short": Rows.short,
    "forward": Rows.forward,
    "middle": Rows.middle,
    "capture": Rows.capture,
    "tail": Rows.tail,
    "tiny": Rows.tiny,
    "flight": Rows.flight,
    "apply": Rows.apply,
}
