"""What a trial does, step by step: from the import of torch to a timed pool and the GPUs.

Each step yields findings, or raises, which becomes one. Those that are fatal build upon each other.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from mpgrad.doctor.findings import REPORT, Finding
from mpgrad.doctor.machine import is_portable

__all__ = ["STEPS", "Step"]

MOST_TOLD = 5  # behaviours that differ
MOST_WORKERS = 2  # that are tried: what they tell is true of more
FURTHER_WORKERS, FURTHER_SECONDS = 5, 3.0  # starts that are measured, and when no more are begun
ROUNDS, ROUND_SECONDS = 9, 1.5
CALLS = 200  # of a map of tiny calls
SHARED_NUMBERS = 1 << 16  # elements of a tensor that travels in shared memory
SLOW_START, SLOW_FURTHER, SLOW_CALL = 15.0, 1.0, 300e-6  # seconds, beyond which there is a remark


class Step(NamedTuple):
    """Something that is tried, and what is said if it fails."""

    section: str  # of the finding that says that it failed
    name: str
    doing: str
    find: Callable[[ExitStack], Iterator[Finding]]  # given where open pools go
    remedy: str
    fatal: bool = True  # no pool can work without it
    always: bool = False  # whatever failed before


def wanted_torch(requirements: list[str] | None) -> str:
    """With the lowest version, as the package's metadata have it: `behaviours.TRIED` is out of reach without a torch."""
    return next((each for each in requirements or () if re.match(r"torch\b(?!-)", each)), "torch")


def requirements() -> list[str] | None:
    try:
        return importlib.metadata.requires("mpgrad")
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed, which has a line of its own
        return None


def import_torch(pools: ExitStack) -> Iterator[Finding]:
    place = importlib.util.find_spec("torch")
    if place is None:
        remedy = f"{INSTALL} ({VERSIONS})"
        yield Finding("software", "torch", "not installed", problem="mpgrad needs PyTorch", remedy=remedy, fatal=True)
        return
    print(f"torch lies in {place.origin or list(place.submodule_search_locations or ())}", flush=True)  # shown if it fails
    import torch

    version: Any = torch.version
    builds = {"CUDA": version.cuda, "ROCm": getattr(version, "hip", None), "XPU": getattr(version, "xpu", None)}
    build = ", ".join(f"{name} {number}" for name, number in builds.items() if number) or "for CPUs only"
    yield Finding("software", "torch", torch.__version__, detail=build)
    detail = "in the caller; in a worker 1, or threads_per_worker"
    yield Finding("CPUs", "torch's threads", torch.get_num_threads(), detail=detail)


def check_behaviours(pools: ExitStack) -> Iterator[Finding]:
    import torch

    from mpgrad.torch_state import behaviours

    ours = f"torch {'.'.join(torch.__version__.split('.')[:2])} with Python {sys.version_info[0]}.{sys.version_info[1]}"
    was_tried = behaviours.was_tried(torch.__version__, sys.version_info[:2])
    known = f"{ours} was {'' if was_tried else 'not '}tried"
    start = time.perf_counter()
    failures = behaviours.failures()
    seconds = time.perf_counter() - start
    if not failures:
        yield Finding("software", "behaviour check", "passed", detail=f"in {1e3 * seconds:.0f} ms; {known}")
        return
    told = "; ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failures[:MOST_TOLD])
    problem = f"PyTorch does not behave as mpgrad needs it: {told}{' ...' if len(failures) > MOST_TOLD else ''}"
    pairs = "; ".join(f"torch {minor} with Python {', '.join(pythons)}" for minor, pythons in behaviours.TRIED.items())
    remedy = f"install what was tried ({pairs}), and please report this page"
    yield Finding("software", "behaviour check", f"{len(failures)} failed", "", known, problem, remedy, fatal=True)


def start_method(pools: ExitStack) -> Iterator[Finding]:
    name = "start method"
    lacking = [call for call, try_it in (("memfd_create", try_memfd), ("pidfd_open", try_pidfd)) if not try_it()]
    if is_portable():
        refused = f"this system refuses {', '.join(lacking)}" if lacking else "MPGRAD_PORTABLE is set"
        forced = refused if sys.platform == "linux" else "not Linux"
        detail = f"portable mode ({forced}): each worker imports torch by itself, which takes seconds"
        yield Finding("pool", name, "spawn", detail=detail)
        return
    detail = "workers are forked from a process that has imported torch once"
    if not lacking:
        yield Finding("pool", name, "nursery", detail=detail)
        return
    problem = f"this system refuses what it needs: {', '.join(lacking)} (since Linux 5.3; a sandbox may forbid it)"
    remedy = "export MPGRAD_PORTABLE=1 before the program starts"
    yield Finding("pool", name, "nursery", "", detail, problem, remedy, fatal=True)


def try_memfd() -> bool:
    try:
        os.close(os.memfd_create("mpgrad"))
    except (AttributeError, OSError):
        return False
    return True


def try_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def import_pool(pools: ExitStack) -> Iterator[Finding]:
    import mpgrad.pool  # noqa: F401  # that it can be is the finding

    yield from ()


def start_first(pools: ExitStack) -> Iterator[Finding]:
    """A pool of one worker: whether results and gradients are right, and how long it takes."""
    import torch

    import mpgrad

    start = time.perf_counter()
    pool = pools.enter_context(mpgrad.Pool(1))
    pool.apply(abs, (-1,))
    seconds = time.perf_counter() - start
    # exact arithmetic: the first `exp` of a process in two threads of MKL may have errors of 3e-5 while the machine is busy
    item = torch.arange(1.0, SHARED_NUMBERS + 1, device="cpu").requires_grad_()
    result = pool.apply(torch.square, (item,))
    torch.autograd.backward(result.sum())
    assert item.grad is not None
    given = item.detach()
    for name, tensor, expected in (("results", result.detach(), given * given), ("gradients", item.grad, 2 * given)):
        wrong = torch.ne(tensor, expected)
        if wrong.any():
            first = f"{tensor[wrong][0].item()!r} for {expected[wrong][0].item()!r}"
            problem = f"its {name} are wrong ({int(wrong.sum())} of {SHARED_NUMBERS} numbers; the first: {first})"
            yield Finding("pool", "first worker", None, problem=problem, remedy=REPORT, fatal=True)
            return
    finding = Finding("pool", "first worker", round(seconds, 2), "s", "from Pool() to its result; gradients are right")
    if seconds > SLOW_START:
        problem = "most of that is one more import of torch"
        remedy = "keep one pool open for the whole program; have the packages on a local disk"
        finding = dataclasses.replace(finding, problem=problem, remedy=remedy)
    yield finding


def start_further(pools: ExitStack) -> Iterator[Finding]:
    """The first pool is open meanwhile, so that its nursery serves them."""
    import mpgrad

    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < FURTHER_WORKERS and time.perf_counter() - begun < FURTHER_SECONDS:
        start = time.perf_counter()
        with mpgrad.Pool(1) as pool:
            pool.apply(abs, (-1,))
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    finding = Finding("pool", "further worker", round(1e3 * seconds, 1), "ms", f"median of {len(times)}, as a pool of its own")
    if seconds > SLOW_FURTHER and not is_portable():
        problem = "a fork should take some 30 ms: the machine is busy, or short of memory"
        finding = dataclasses.replace(finding, problem=problem, remedy="see CPUs and memory above")
    yield finding


def time_calls(pools: ExitStack) -> Iterator[Finding]:
    """Maps of tiny calls by a loop and on workers, and calls one by one, in turns: the median of each."""
    import torch

    import mpgrad
    from mpgrad.cpus import usable_cpus

    workers = min(MOST_WORKERS, usable_cpus())
    pool = pools.enter_context(mpgrad.Pool(workers))
    items = [torch.ones(3) for _ in range(CALLS)]
    ways: dict[str, Callable[[], object]] = {
        "loop": lambda: [torch.sin(item) for item in items],
        "sent": lambda: pool.map(torch.sin, items),
        "awaited": lambda: pool.apply(torch.sin, (items[0],)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    begun = time.perf_counter()
    for turn in range(1 + ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken = time.perf_counter() - start
            if turn > 0:  # the first is for what comes once
                seconds[name].append(taken / (1 if name == "awaited" else CALLS))
        if turn > 1 and time.perf_counter() - begun > ROUND_SECONDS:
            break
    yield from judged_calls({name: statistics.median(times) for name, times in seconds.items()}, workers)


def judged_calls(seconds: dict[str, float], workers: int) -> Iterator[Finding]:
    """`seconds` of a call, by its way."""

    def found(name: str, way: str, detail: str) -> Finding:
        return Finding("pool", name, round(1e6 * seconds[way], 1), "us", detail)

    yield found("tiny call, loop", "loop", "in a plain loop")
    sent = found("tiny call, sent", "sent", f"one of {CALLS} in a map, {workers} worker{'s' if workers > 1 else ''}")
    if seconds["sent"] > SLOW_CALL:
        problem = "30 to 60 us are usual: other programs want these CPUs, too"
        sent = dataclasses.replace(sent, problem=problem, remedy="see CPUs above; cheap calls gain nothing here")
    yield sent
    yield found("tiny call, alone", "awaited", "sent, and its result awaited")


def look_for_gpus(pools: ExitStack) -> Iterator[Finding]:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        yield Finding("GPUs", "found", "none")
        return
    count = torch.accelerator.device_count()
    module: Any = torch.get_device_module(accelerator)
    names = [str(module.get_device_name(number)) for number in range(count)] if hasattr(module, "get_device_name") else []
    told = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield Finding("GPUs", accelerator.type, count, detail=told)


def close_pools(pools: ExitStack) -> Iterator[Finding]:
    pools.close()
    yield from ()


INSTALL = f"pip install '{wanted_torch(requirements())}'"
VERSIONS = "docs/compatibility.md lists those that were tested"
TORCH = f"install PyTorch again ({INSTALL}; {VERSIONS}), and see that no file or folder of yours is named torch"
UNFIT = f"install the package if one is missing; else take another torch ({VERSIONS}), and report this page"
DRIVER = "see that the driver of the GPU works (nvidia-smi); pools on the CPU do"
START = "see memory and limits above, and ps for what else runs"

STEPS = (
    Step("software", "torch", "importing torch", import_torch, TORCH, always=True),
    Step("software", "behaviour check", "checking the behaviour of PyTorch", check_behaviours, UNFIT),
    Step("pool", "start method", "looking at the start method", start_method, REPORT),
    Step("pool", "import", "importing mpgrad.pool", import_pool, UNFIT),
    Step("pool", "first worker", "starting the first worker", start_first, START),
    Step("pool", "further worker", "starting further workers", start_further, START, fatal=False),
    Step("pool", "tiny calls", "timing tiny calls", time_calls, START, fatal=False),
    Step("GPUs", "found", "looking for GPUs", look_for_gpus, DRIVER, fatal=False, always=True),
    Step("pool", "close", "closing the pools", close_pools, REPORT, always=True),
)
