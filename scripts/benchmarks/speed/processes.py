"""What the processes themselves cost: their start, their memory, an idle pool; and a whole program that uses one.

Everything about processes is measured in a fresh program, so that no other pool's nursery is warm and nothing else is idle.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import WrongResultError
from figures import Figure, interleaved, median_figure, ratios

from speed.grains import LIMIT
from speed.plan import Plan, Pools

START_AIM, FURTHER_AIM = ("<=", 1.15), ("<=", 50.0)
MEMORY_AIM = ("<=", 30.0)  # MB of 2 ** 20 bytes
NOTHING = ("<=", 0.0)
PHENOBARBITAL_AIM = (">=", 1.85)

PROGRAM_LIMIT = 100  # seconds
SLOW_ROUNDS = 5  # at most, of fresh programs

STARTED = """
import time
started = time.monotonic()
import torch
imported = time.monotonic()
import json, os, pathlib, sys
import psutil
from mpgrad import Pool  # the package imports what is asked for; the clock is for what it does then

processes, further, seconds = json.loads(sys.argv[1])

def all_answer(pool, workers):
    seen = set()
    while len(seen) < workers:  # a call sleeps, else one worker would take all
        seen |= set(pool.map(lambda _: (time.sleep(2e-3), os.getpid())[1], range(2 * workers)))

def differentiated(pool):
    leaf = torch.ones(3, requires_grad=True)
    sum(pool.map(torch.exp, [leaf] * 4 * processes)).sum().backward()
"""

START = (
    STARTED
    + """
began = time.monotonic()
with Pool(processes) as pool:
    pool.map(torch.neg, [torch.ones(3)])
    first = time.monotonic()
    all_answer(pool, processes)
    before = time.monotonic()
    pool.resize(processes + further)
    all_answer(pool, processes + further)
    print(json.dumps([imported - started, first - began, (time.monotonic() - before) / further]))
"""
)

MEMORY = (
    STARTED
    + """
with Pool(processes) as pool:
    all_answer(pool, processes)
    first = {worker.pid for worker in pool.stats().workers}
    pool.resize(processes + further)
    all_answer(pool, processes + further)
    differentiated(pool)
    pids = [worker.pid for worker in pool.stats().workers if worker.pid not in first]
    print(json.dumps([psutil.Process(pid).memory_full_info().uss / 2**20 for pid in pids]))
"""
)

IDLE = (
    STARTED
    + """
def threads(pid):
    return sorted(pathlib.Path(f"/proc/{pid}/task").iterdir())

def used(tasks):
    '''Nanoseconds that these threads ran, and how often they were given a CPU.'''
    runs = [list(map(int, (task / "schedstat").read_text().split())) for task in tasks]
    return [sum(run[0] for run in runs), sum(run[2] for run in runs)]

def state():
    mine = [task for task in threads(os.getpid()) if task.name != str(os.getpid())]  # this one sleeps and reads
    others = [task for child in psutil.Process().children(recursive=True) for task in threads(child.pid)]
    return [used(mine), used(others)]

with Pool(processes) as pool:
    all_answer(pool, processes)
    differentiated(pool)
    time.sleep(seconds / 4)  # what follows a map at once is not idling
    before = state()
    time.sleep(seconds)
    print(json.dumps([[now - then for now, then in zip(*pair)] for pair in zip(state(), before)]))
"""
)


def run_program(program: str, plan: Plan) -> Any:
    settings = json.dumps([plan.processes, plan.further_workers, plan.idle_seconds])
    command = [sys.executable, "-c", program, settings]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=PROGRAM_LIMIT)
    return json.loads(ended.stdout)


def bench_start(pools: Pools, plan: Plan) -> Iterator[Figure]:
    runs = [run_program(START, plan) for _ in range(min(plan.repeats, SLOW_ROUNDS))]
    imports, firsts, furthers = zip(*runs, strict=True)
    row = f"start: of a pool of {plan.processes} in a fresh program"
    yield median_figure(row, "import torch", imports, "s")
    yield median_figure(row, "from Pool() to the first result", firsts, "s")
    yield median_figure(row, "from Pool() to the first result over import torch", ratios(firsts, imports), "x", START_AIM)
    milliseconds = [1e3 * seconds for seconds in furthers]
    yield median_figure(row, "each further worker, until it has answered", milliseconds, "ms", FURTHER_AIM)


def bench_memory(pools: Pools, plan: Plan) -> Iterator[Figure]:
    each: Sequence[float] = run_program(MEMORY, plan)
    row = f"memory: {plan.further_workers} further workers after a small map, forward and backward"
    yield median_figure(row, "USS of an idle worker", each, "MiB", MEMORY_AIM)


def bench_idle(pools: Pools, plan: Plan) -> Iterator[Figure]:
    parent, others = run_program(IDLE, plan)
    row = f"idle: a pool of {plan.processes} that has nothing to do for {plan.idle_seconds:g} s"
    for name, (nanoseconds, switches) in {"the pool's threads in the parent": parent, "workers and nursery": others}.items():
        yield Figure(row, f"CPU of {name}", nanoseconds / 1e6, "ms", NOTHING)
        yield Figure(row, f"how often {name} ran", switches, "times", NOTHING)


def bench_phenobarbital(pools: Pools, plan: Plan) -> Iterator[Figure]:
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    import phenobarbital as script  # needs '.[scripts]', which the other rows do not
    from foce import scaled
    from infants import read_infants

    infants = read_infants(script.DATA)
    parameters = scaled(torch.tensor(script.START, dtype=torch.float64))
    pooled: dict[str, script.Loop] = {"keep": pools.keep.map, "ahead": pools.ahead.map, "auto": pools.default.map}
    loops: dict[str, script.Loop] = {"serial": script.serial, **pooled}
    right = script.evaluate(script.serial, infants, parameters)
    for name, loop in loops.items():
        difference = float((script.evaluate(loop, infants, parameters).gradient - right.gradient).abs().max())
        if not difference <= script.GRADIENT_TOLERANCE:  # true for nan
            raise WrongResultError(f"{name}: the gradient differs from the serial loop's by {difference:g}")

    def seconds(name: str) -> float:
        return float(script.evaluate(loops[name], infants, parameters).seconds)

    def at_once() -> float:
        shares = [infants[number :: pools.processes] for number in range(pools.processes)]
        began = time.perf_counter()
        pools.keep.map(partial(evaluated, parameters=parameters), shares, chunksize=1)
        return time.perf_counter() - began

    def evaluated(share: Sequence[Any], parameters: torch.Tensor) -> None:
        script.evaluate(script.serial, share, parameters)

    results = interleaved({**{name: partial(seconds, name) for name in loops}, LIMIT: at_once}, plan.repeats)
    row = f"phenobarbital: {len(infants)} infants, objective and gradient"
    yield Figure(row, "serial", 1e3 * statistics.median(results["serial"]), "ms")
    yield median_figure(row, f"{LIMIT} over serial", ratios(results["serial"], results[LIMIT]), "x")
    for name in pooled:
        yield median_figure(row, name, [1e3 * value for value in results[name]], "ms")
        yield median_figure(row, f"{name} over serial", ratios(results["serial"], results[name]), "x", PHENOBARBITAL_AIM)
