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
MOST_SAMPLED = 2000
FEWEST_SAMPLED = 4  # that are run whatever it takes
WARM_UPS = 2  # rounds in which pools learn what an item costs
MOST_ROUNDS = 5
COPIED = 1 << 24  # bytes, to see how fast a copy is


class Found:
    """A trial, and what else it has seen."""

    measured: Measured
    graphs: Literal["ahead", "keep"]
    backward_share: float
    operation_share: float
    start_seconds: float


class Subject:
    """The function as a worker would have it, with captures of its own."""

    def __init__(self, function: Function) -> None:
        pickled = pickled_function(function)
        self.captures = copies(pickled.captures)
        self.capture_bytes = sum(map(bytes_of, pickled.captures))
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
        differentiate([result], inputs)
        return middle - start, time.perf_counter() - middle, result

    def loop(self, items: Sequence[Any]) -> list[tuple[float, float]]:
        """Seconds of each item forward and backward."""
        return [self.timed(item)[:2] for item in copies(items)]


def inputs_of(items: Sequence[Any], captures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All that needs gradients."""
    return [*differentiable(items), *(each for each in captures if each.requires_grad)]


def differentiate(results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
    """One backward from all results, as a caller would have it; the gradients are thrown away."""
    outputs = differentiable(results)
    if len(outputs) > 1 and len({(each.shape, each.dtype, each.device) for each in outputs}) == 1 and not outputs[0].dim():
        outputs = [torch.stack(outputs).sum()]  # losses: a gradient for each would take a third of a tiny item's time
    if outputs and inputs:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(each) for each in outputs], allow_unused=True)


def tried(function: Function, items: Sequence[Any], seconds: float, most: int | None) -> Found:
    """Run a sample for about `seconds`. `most`: workers; None for as many as there are CPUs."""
    threads, cpus = torch.get_num_threads(), min(usable_cpus(), most or usable_cpus())
    found, subject, clock = Found(), Subject(function), OthersClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_random_state())
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # as in a worker
        sample, result, taken = first_run(subject, items, SAMPLE_SHARE * seconds)
        found.graphs = "ahead" if is_loss(result) else "keep"
        found.operation_share = operation_share(subject, sample[0])
        start = time.perf_counter()
        pools = {}
        for workers in sorted({*(1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus), cpus}):
            pool = stack.enter_context(Pool(workers, graphs=found.graphs, threads_per_worker=1))
            pool.map(abs, [1], 1)
            pools[workers] = pool
            if workers == 1:
                found.start_seconds = time.perf_counter() - start
        loops, in_pools = in_turns(subject, function, sample, pools, time.perf_counter() + ROUNDS_SHARE * seconds)
        cpus_of_others = max(0.0, clock.cpus() - (len(own_cpus()) - cpus))  # where we are not, they are welcome
        others = {}
        if cpus > 1:
            torch.set_num_threads(cpus)
            others["threads"] = sum(map(sum, subject.loop(sample)))
            torch.set_num_threads(1)
        if (batched := in_a_batch(subject, sample)) is not None:
            others["vmap"] = batched
    total = [statistics.median(map(sum, each)) for each in zip(*loops, strict=True)]
    found.backward_share = sum(statistics.median(back for _, back in each) for each in zip(*loops, strict=True)) / sum(total)
    found.measured = Measured(
        items=len(items),
        seconds=total,
        pools=in_pools,
        others=others,
        cpus=cpus,
        cpus_taken=taken,
        cpus_of_others=cpus_of_others,
        item_bytes=statistics.fmean(sum(map(bytes_of, tensors_in(item))) for item in sample),
        result_bytes=sum(map(bytes_of, tensors_in(result))),
        capture_bytes=subject.capture_bytes,
        bytes_per_second=bytes_per_second(),
    )
    return found


def first_run(subject: Subject, items: Sequence[Any], seconds: float) -> tuple[list[Any], Any, float]:
    """The items that are to be run, the largest first, others at random; one's result; CPUs that one thread takes."""
    sizes = [sum(map(bytes_of, tensors_in(item))) for item in items]
    largest = max(range(len(items)), key=sizes.__getitem__)
    others = [number for number in range(len(items)) if number != largest]
    random.Random(0).shuffle(others)
    order = [largest, *others][:MOST_SAMPLED]
    subject.timed(copies([items[largest]])[0])  # for what comes once
    sample: list[Any] = []
    result: Any = None
    start, cpu = time.perf_counter(), time.process_time()
    for number in order:
        *_, result = subject.timed(copies([items[number]])[0])
        sample.append(items[number])
        if len(sample) >= FEWEST_SAMPLED and time.perf_counter() - start > seconds:
            break
    return sample, result, (time.process_time() - cpu) / (time.perf_counter() - start)


def in_turns(
    subject: Subject, function: Function, sample: Sequence[Any], pools: dict[int, Pool], end: float
) -> tuple[list[list[tuple[float, float]]], dict[int, float]]:
    """Of each round, seconds of the loop's items, forward and backward; and of a pool's map and backward, the median.

    Noise of the machine meets all alike, as they take turns.
    """
    captures = pickled_function(function).captures
    loops: list[list[tuple[float, float]]] = []
    rounds: dict[int, list[float]] = {workers: [] for workers in pools}
    for number in range(WARM_UPS + MOST_ROUNDS):
        if number >= WARM_UPS:
            loops.append(subject.loop(sample))
        for workers, pool in pools.items():
            own = copies(sample)
            inputs = inputs_of(own, captures)
            start = time.perf_counter()
            differentiate(pool.map(function, own), inputs)
            if number >= WARM_UPS:
                rounds[workers].append(time.perf_counter() - start)
        if number >= WARM_UPS and time.perf_counter() > end:
            break
    return loops, {workers: statistics.median(each) for workers, each in rounds.items()}


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
    """Of the time of an item, the part in operations of PyTorch."""
    forward, backward, _ = subject.timed(copies([item])[0])
    with OperationClock() as clock:
        subject.timed(copies([item])[0])
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
