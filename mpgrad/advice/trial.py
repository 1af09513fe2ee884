"""A sample of the items, run in all ways that may pay.

The caller's things stay as they were: the loop runs a function that was put together again from its pickle, as a worker has
it, on copies; gradients are asked for (`torch.autograd.grad`) and never added to a `.grad`; generators are put back.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpgrad.advice.model import Measured
from mpgrad.calls.packing import pickled_function
from mpgrad.cpus import own_cpus, usable_cpus
from mpgrad.others_clock import OthersClock
from mpgrad.pickling import state, structure
from mpgrad.pickling.modules import Live
from mpgrad.pool import Pool
from mpgrad.testing import copies, differentiable, tensors_of
from mpgrad.torch_state.modes import kept_random_state
from mpgrad.torch_state.private import tree_leaves

__all__ = ["Found", "tried"]

Function = Callable[[Any], Any]

SAMPLE_SHARE, ROUNDS_SHARE = 0.1, 0.5  # of the time: for the first run of the sample, and for those in turns
LONG_SHARE = 0.3  # of the time: if the first run of so few items takes it, all else is run once, or left out
MOST_SAMPLED = 2000
FEWEST_SAMPLED = 4  # unless they are long
FEWEST_LONG = 2
WARM_UPS = 2  # rounds in which pools learn what an item costs
MOST_ROUNDS = 5
COPIED = 1 << 24  # bytes, to see how fast a copy is


class Found:
    """A trial, and what else it has seen."""

    measured: Measured
    graphs: Literal["ahead", "keep"]
    backward_share: float
    operation_share: float | None
    start_seconds: float


class Subject:
    """The function, and as a worker would have it: with captures of its own."""

    def __init__(self, function: Function) -> None:
        pickled = pickled_function(function)
        self.function = function
        self.originals = pickled.captures
        self.captures = copies(pickled.captures)
        self.capture_bytes = sum(map(bytes_of, pickled.captures))
        self.gradient_bytes = sum(bytes_of(each) for each in self.captures if each.requires_grad)
        own = len(self.captures)
        names: Any = Live({})
        if pickled.state is not None and pickled.state.tensors:
            own -= len(pickled.state.tensors)
            names = state.namespaces_of(pickled.state.pickled, self.captures[own:])
        self.run: Function = structure.loads(pickled.pickled, self.captures[:own], names=names)
        self._names = names  # as long as the function

    def timed(self, item: Any) -> tuple[float, float, Any]:
        """Seconds forward and backward, and the result."""
        inputs = inputs_of([item], self.captures)
        start = time.perf_counter()
        result = self.run(item)
        middle = time.perf_counter()
        has_backward = differentiate([result], inputs)
        return middle - start, time.perf_counter() - middle if has_backward else 0.0, result

    def loop(self, items: Sequence[Any]) -> list[tuple[float, float]]:
        """Seconds of each item forward and backward."""
        return [self.timed(item)[:2] for item in copies(items)]

    def one_backward(self, items: Sequence[Any]) -> float:
        """Seconds of the loop, and of a backward from all results."""
        return seconds_of(lambda own: [self.run(item) for item in own], items, self.captures)

    def in_a_pool(self, pool: Pool, items: Sequence[Any]) -> float:
        """Seconds of a map, and of a backward likewise."""
        return seconds_of(lambda own: pool.map(self.function, own), items, self.originals)


def seconds_of(run: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any], captures: Sequence[torch.Tensor]) -> float:
    own = copies(items)
    inputs = inputs_of(own, captures)
    start = time.perf_counter()
    differentiate(run(own), inputs)
    return time.perf_counter() - start


def inputs_of(items: Sequence[Any], captures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All that needs gradients."""
    return [*differentiable(items), *(each for each in captures if each.requires_grad)]


def differentiate(results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> bool:
    """One backward from all results, as a caller would have it, if there is anything; the gradients are thrown away."""
    outputs = differentiable(results)
    if len(outputs) > 1 and len({(each.shape, each.dtype, each.device) for each in outputs}) == 1 and not outputs[0].dim():
        outputs = [torch.stack(outputs).sum()]  # losses: a gradient for each would take a third of a tiny item's time
    if not (outputs and inputs):
        return False
    torch.autograd.grad(outputs, inputs, [torch.ones_like(each) for each in outputs], allow_unused=True)
    return True


def tried(function: Function, items: Sequence[Any], seconds: float, most: int | None) -> Found:
    """Run a sample for about `seconds`. `most`: workers; None for as many as there are CPUs."""
    threads, cpus = torch.get_num_threads(), min(usable_cpus(), most or usable_cpus())
    end = time.perf_counter() + seconds
    found, subject, clock = Found(), Subject(function), OthersClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_random_state())
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # as in a worker
        sample, first, result, taken = first_run(subject, items, seconds)
        is_long = sum(map(sum, first)) > LONG_SHARE * seconds
        found.graphs = "ahead" if is_loss(result) else "keep"
        found.operation_share = None if is_long else operation_share(subject, sample[0])
        start = time.perf_counter()
        pools = {}
        for workers in sorted({*(1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus), cpus}):
            pool = stack.enter_context(Pool(workers, graphs=found.graphs, threads_per_worker=1))
            pool.map(abs, [1], 1)
            pools[workers] = pool
            if workers == 1:
                found.start_seconds = time.perf_counter() - start
        at_once: list[float] = []
        if is_long:
            loops, in_pools = [first], in_pools_once(subject, sample, pools, end)
        else:
            loops, at_once, in_pools = in_turns(subject, sample, pools, time.perf_counter() + ROUNDS_SHARE * seconds)
        cpus_of_others = max(0.0, clock.cpus() - (len(own_cpus()) - cpus))  # where we are not, they are welcome
        others: dict[Literal["threads", "vmap"], float] = {}
        has_time = not is_long or time.perf_counter() < end
        if cpus > 1 and has_time:
            torch.set_num_threads(cpus)
            others["threads"] = sum(map(sum, subject.loop(sample)))
            torch.set_num_threads(1)
        if has_time and (batched := in_a_batch(subject, sample)) is not None:
            others["vmap"] = batched
    total = [statistics.median(map(sum, each)) for each in zip(*loops, strict=True)]
    found.backward_share = sum(statistics.median(back for _, back in each) for each in zip(*loops, strict=True)) / sum(total)
    found.measured = Measured(
        items=len(items),
        seconds=total,
        one_backward=statistics.median(at_once) if at_once else sum(total),
        pools=in_pools,
        others=others,
        cpus=cpus,
        cpus_taken=taken,
        cpus_of_others=cpus_of_others,
        item_bytes=statistics.fmean(sum(map(bytes_of, tensors_in(item))) for item in sample),
        result_bytes=sum(map(bytes_of, tensors_in(result))),
        capture_bytes=subject.capture_bytes,
        gradient_bytes=subject.gradient_bytes,
        bytes_per_second=bytes_per_second(),
    )
    return found


def first_run(
    subject: Subject, items: Sequence[Any], seconds: float
) -> tuple[list[Any], list[tuple[float, float]], Any, float]:
    """The items that are to be run, the largest first, others at random; what they took; a result; CPUs that a thread takes."""
    sizes = [sum(map(bytes_of, tensors_in(item))) for item in items]
    largest = max(range(len(items)), key=sizes.__getitem__)
    others = [number for number in range(len(items)) if number != largest]
    random.Random(0).shuffle(others)
    order = [largest, *others][:MOST_SAMPLED]
    subject.timed(copies([items[largest]])[0])  # for what comes once
    sample: list[Any] = []
    taken: list[tuple[float, float]] = []
    result: Any = None
    start, cpu = time.perf_counter(), time.process_time()
    for number in order:
        forward, backward, result = subject.timed(copies([items[number]])[0])
        sample.append(items[number])
        taken.append((forward, backward))
        so_far = time.perf_counter() - start
        if len(sample) >= FEWEST_SAMPLED and so_far > SAMPLE_SHARE * seconds:
            break
        if len(sample) >= FEWEST_LONG and so_far > LONG_SHARE * seconds:
            break
    return sample, taken, result, (time.process_time() - cpu) / (time.perf_counter() - start)


def in_turns(
    subject: Subject, sample: Sequence[Any], pools: dict[int, Pool], end: float
) -> tuple[list[list[tuple[float, float]]], list[float], dict[int, float]]:
    """Of each round, seconds of the loop's items, forward and backward, and of the loop with one backward; and of a pool's map
    and backward, the median.

    Noise of the machine meets all alike, as they take turns.
    """
    loops: list[list[tuple[float, float]]] = []
    at_once: list[float] = []
    rounds: dict[int, list[float]] = {workers: [] for workers in pools}
    for number in range(WARM_UPS + MOST_ROUNDS):
        if number >= WARM_UPS:
            loops.append(subject.loop(sample))
            at_once.append(subject.one_backward(sample))
        for workers, pool in pools.items():
            seconds = subject.in_a_pool(pool, sample)
            if number >= WARM_UPS:
                rounds[workers].append(seconds)
        if number >= WARM_UPS and time.perf_counter() > end:
            break
    return loops, at_once, {workers: statistics.median(each) for workers, each in rounds.items()}


def in_pools_once(subject: Subject, sample: Sequence[Any], pools: dict[int, Pool], end: float) -> dict[int, float]:
    """Seconds, for the most workers that all have an item, and for fewer while there is time."""
    found: dict[int, float] = {}
    for workers in sorted((each for each in pools if each <= len(sample)), reverse=True):
        if not found or time.perf_counter() < end:
            found[workers] = subject.in_a_pool(pools[workers], sample)
    return found


def in_a_batch(subject: Subject, sample: Sequence[Any]) -> float | None:
    """Seconds of `torch.vmap` over the stacked items; None where it cannot be, or gives something else."""
    if len(sample) < 2 or not all(isinstance(each, torch.Tensor) and each.shape == sample[0].shape for each in sample):
        return None
    own = copies(sample)
    try:
        wanted = torch.stack([subject.run(item).detach() for item in own])
        batched = torch.vmap(subject.run)
        times = []
        for _ in range(2):
            start = time.perf_counter()
            result = batched(torch.stack(own))
            differentiate([result], inputs_of(own, subject.captures))
            times.append(time.perf_counter() - start)
        same = torch.allclose(result.detach(), wanted, rtol=1e-3, equal_nan=True)
    except Exception:  # whatever vmap or the function says: it is no way for this function
        return None
    return times[-1] if same else None


class OperationClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time inside of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds += time.perf_counter() - start


def operation_share(subject: Subject, item: Any) -> float:
    """Of the time of an item, the part in operations of PyTorch; both by the same run, which the clock slows down."""
    with OperationClock() as clock:
        forward, backward, _ = subject.timed(copies([item])[0])
    inside: float = clock.seconds
    return min(1.0, inside / (forward + backward))


def is_loss(result: Any) -> bool:
    """Whether a worker may run its backward ahead: one number of full precision, and nothing else that needs gradients."""
    found = differentiable([result])
    return len(found) == 1 and found[0].numel() == 1 and found[0].dtype in (torch.float32, torch.float64)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [each for leaf in tree_leaves([value]) for each in tensors_of(leaf)]


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bytes_per_second() -> float:
    """Of a copy in memory."""
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return COPIED / min(times)
