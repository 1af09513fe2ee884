"""Compares mpgrad with its peers, which compute the same losses of N ragged tensors and all their
gradients.

Peers cannot pass gradients between processes. So their tasks compute gradients by hand: one call
runs forward and backward of several items in the worker, and returns losses and gradients as
arrays. This is possible because the loss is a sum, so every item's incoming gradient is known
beforehand. Peers that do not cut a map into chunks use those of multiprocessing.Pool, four per
worker. All have the same number of workers with one intra-op thread, and stay warm.

Before a case is timed, all must return the serial loop's losses and gradients. Then they take turns
in a random order. The clock runs from tensors in the caller to losses and gradients in the caller.
"the best serial" is the fastest serial loop of the case, with any number of threads.

    pip install '.[bench]'
    python scripts/benchmarks/bench_peers.py --picture peers.png      # about a quarter of an hour
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from common import (
    Figure,
    WrongResultError,
    add_options,
    at_least_1,
    fail,
    limited,
    median_figure,
    picture_to_write,
    print_figures,
    print_surroundings,
    ratios,
    report,
    surroundings,
)
from jobs import (
    OP,
    PYTHON,
    Array,
    Batch,
    Function,
    Outcome,
    Pair,
    Run,
    array_pair,
    array_pairs,
    backward_at_once,
    large_items,
    measured,
    one_backward,
    serial,
    square_loss,
    work_items,
)
from torch import Tensor

import mpgrad

EPILOG = (
    "exit status: 0 if everything was measured, 1 if a system is wrong or the time is up, 2 for "
    "wrong arguments"
)

KINDS = {"Python-bound": PYTHON, "op-bound": OP}
CHUNKS = 4  # for each worker, as in multiprocessing.Pool
MIB = 2**20
AHEAD = (">=", 1.0)
TICKS = (0.35, 0.5, 0.7, 1, 1.4, 2)  # of the picture's speed-up

Map = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]


# --- the systems: each yields a function of a function and a batch, for one `with` block

Way = Callable[[Function, Batch], Outcome]


def by_hand(pairs: Callable[[Function, Sequence[Array]], Sequence[Pair]]) -> Way:
    """Send arrays, and return losses and gradients."""

    def run(function: Function, batch: Batch) -> Outcome:
        found = pairs(function, [item.detach().numpy() for item in batch.items])
        values, gradients = (
            [torch.from_numpy(np.asarray(one)) for one in side] for side in zip(*found, strict=True)
        )
        return Outcome(values, gradients)

    return run


def in_chunks(mapped: Map, processes: int) -> Way:
    """Cut a map into chunks, for peers that do not do this themselves."""

    def pairs(function: Function, items: Sequence[Array]) -> Sequence[Pair]:
        size = -(-len(items) // (CHUNKS * processes))
        chunks = [list(items[first : first + size]) for first in range(0, len(items), size)]
        return [pair for part in mapped(partial(array_pairs, function), chunks) for pair in part]

    return by_hand(pairs)


@contextlib.contextmanager
def serial_loop(processes: int, at_once: bool = False, threads: int = 1) -> Iterator[Way]:
    def run(function: Function, batch: Batch) -> Outcome:
        torch.set_num_threads(threads)
        try:
            return (
                backward_at_once(function, batch)
                if at_once
                else one_backward(serial, function, batch)
            )
        finally:
            torch.set_num_threads(1)

    yield run


@contextlib.contextmanager
def torch_pool(processes: int) -> Iterator[Way]:
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(processes) as pool:
        yield by_hand(lambda function, items: pool.map(partial(array_pair, function), items))


@contextlib.contextmanager
def process_pool_executor(processes: int) -> Iterator[Way]:
    context = torch.multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, context) as executor:
        yield in_chunks(lambda function, chunks: list(executor.map(function, chunks)), processes)


@contextlib.contextmanager
def joblib_parallel(processes: int) -> Iterator[Way]:
    """Run joblib, which makes its own batches, and passes arrays above 1 MB as files in memory."""
    joblib = importlib.import_module("joblib")
    with joblib.Parallel(processes, backend="loky", mmap_mode="c") as parallel:
        pair = joblib.delayed(array_pair)
        yield by_hand(lambda function, items: parallel(pair(function, item) for item in items))
    importlib.import_module("joblib.externals.loky").get_reusable_executor().shutdown(wait=True)


@contextlib.contextmanager
def ray_tasks(processes: int) -> Iterator[Way]:
    ray = importlib.import_module("ray")
    path = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
    options = {"include_dashboard": False, "log_to_driver": False, "runtime_env": path}
    ray.init(
        num_cpus=processes, object_store_memory=1024 * MIB, _node_ip_address="127.0.0.1", **options
    )
    call = ray.remote(lambda function, chunk: function(chunk))

    def mapped(function: Callable[[Any], Any], chunks: Sequence[Any]) -> Sequence[Any]:
        results: list[Any] = ray.get([call.remote(function, chunk) for chunk in chunks])
        return results

    try:
        yield in_chunks(mapped, processes)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def mpgrad_pool(processes: int) -> Iterator[Way]:
    """Run mpgrad's pool without options."""
    with mpgrad.Pool(processes) as pool:
        yield partial(one_backward, pool.map)


class System(NamedTuple):
    start: Callable[[int], contextlib.AbstractContextManager[Way]]
    distribution: str = "torch"


SYSTEMS = {
    "serial": System(serial_loop),
    "serial, at once": System(partial(serial_loop, at_once=True)),
    "serial, 2 threads, at once": System(partial(serial_loop, at_once=True, threads=2)),
    "joblib": System(joblib_parallel, "joblib"),
    "ProcessPoolExecutor": System(process_pool_executor),
    "torch Pool, arrays": System(torch_pool),
    "Ray tasks": System(ray_tasks, "ray"),
    "mpgrad": System(mpgrad_pool, "mpgrad"),
}
SERIAL = [name for name in SYSTEMS if name.startswith("serial")]
PEERS = [name for name in SYSTEMS if name not in (*SERIAL, "mpgrad")]


def version_of(name: str) -> str | None:
    """Return the version of the package that a system needs; None if it is not installed."""
    try:
        return importlib.metadata.version(SYSTEMS[name].distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- the cases


@dataclass(frozen=True)
class Plan:
    """Holds the sizes and limits of the measurement."""

    grains_ms: Sequence[float] = (0, 0.1, 0.3, 0.5, 1, 3, 10, 50)
    seconds: float = 0.3  # of a serial run
    large: int = 32  # tensors
    largest_bytes: int = 16_000_000
    repeats: int = 7
    limit: int = 3600


QUICK = Plan((1,), 0.01, 4, 400_000, 1, 100)


def cases(plan: Plan) -> Iterator[tuple[str, Function, list[Tensor]]]:
    for kind, work in KINDS.items():
        for ms in plan.grains_ms:
            yield title(kind, ms), *work_items(work, ms / 1e3, plan.seconds)
    size = f"{plan.large} tensors of up to {plan.largest_bytes / 1e6:g} MB: forward and backward"
    yield size, square_loss, large_items(plan.large, plan.largest_bytes)


def title(kind: str, ms: float) -> str:
    return f"{kind}, {ms:g} ms: forward and backward"


def bench(names: Sequence[str], plan: Plan, processes: int) -> Iterator[Figure]:
    """Yield the figures one by one, so that they are kept even if the run ends early."""
    with contextlib.ExitStack() as stack:
        ways = {name: stack.enter_context(SYSTEMS[name].start(processes)) for name in names}
        for row, function, items in cases(plan):
            contenders: dict[str, Run] = {
                name: partial(way, function) for name, way in ways.items()
            }
            found = list(case_figures(row, measured(contenders, items, plan.repeats)))
            print_figures(found)
            yield from found


def case_figures(row: str, seconds: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    for name, values in seconds.items():
        yield median_figure(row, name, [1e3 * value for value in values], "ms/item")
    best = fastest(seconds, SERIAL)
    if best is not None:
        for name, values in seconds.items():
            yield median_figure(
                row, f"{name}, over the best serial", ratios(seconds[best], values), "x"
            )
    peer = fastest(seconds, PEERS)
    if peer is not None and "mpgrad" in seconds:
        over = ratios(seconds[peer], seconds["mpgrad"])
        yield median_figure(row, "mpgrad, over the best peer", over, "x", AHEAD)


def fastest(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str | None:
    """Return the fastest of the systems that were measured."""
    there = [name for name in names if name in seconds]
    return min(there, key=lambda name: statistics.median(seconds[name]), default=None)


# --- the picture


def draw(
    figures: Sequence[Figure], names: Sequence[str], grains: Sequence[float], file: Path
) -> None:
    from matplotlib.figure import Figure as Canvas  # which the table does not need

    values = {(figure.row, figure.name): figure.value for figure in figures}
    canvas = Canvas(figsize=(7.2, 4), layout="constrained")
    for axes, kind in zip(canvas.subplots(1, 2, sharey=True), KINDS, strict=True):
        for name in names:
            ups = [
                values.get((title(kind, ms), f"{name}, over the best serial"), float("nan"))
                for ms in grains
            ]
            style = {"linestyle": "--" if name in SERIAL else ":", "linewidth": 1.2}
            if name == "mpgrad":
                style = {"linestyle": "-", "linewidth": 2.5, "color": "black"}
            axes.plot(ups, "o", label=name, markersize=4, **style)
        axes.set_xticks(range(len(grains)), [f"{ms:g}" if ms else "tiny" for ms in grains])
        axes.set(title=kind, yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
    axes.set_ylim(bottom=TICKS[0])  # slower systems leave the picture
    lines, labels = axes.get_legend_handles_labels()
    canvas.legend(lines, labels, frameon=False, ncols=len(names), loc="outside upper center")
    canvas.supxlabel("time of an item in the loop, forward and backward (ms)", fontsize="medium")
    canvas.axes[0].set_ylabel("times as fast as the best loop (higher is better)")
    canvas.savefig(file, dpi=200)


# --- the whole


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        metavar="SYSTEM",
        help="; ".join(SYSTEMS),
    )
    parser.add_argument(
        "--processes",
        type=at_least_1,
        default=2,
        metavar="N",
        help="workers (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=at_least_1, metavar="N", help="timed rounds (default: 7, quick: 1)"
    )
    parser.add_argument(
        "--picture",
        type=picture_to_write,
        metavar="FILE",
        help="speed-up against grain, a line per system",
    )
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    plan = replace(plan, repeats=options.repeats or plan.repeats)
    versions = {name: version_of(name) for name in options.systems}
    names = [name for name, version in versions.items() if version is not None]
    around = surroundings(options.processes)
    print_surroundings(around)
    for name, version in versions.items():
        print(f"  {name:30}{SYSTEMS[name].distribution} {version or 'is not installed: left out'}")
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures: list[Figure] = []
    status = 0
    try:
        with limited(plan.limit):
            figures.extend(bench(names, plan, options.processes))
    except (WrongResultError, TimeoutError) as error:
        status = fail(error)
    report(options, around, figures, versions=versions, repeats=plan.repeats)
    if options.picture is not None:
        draw(figures, names, plan.grains_ms, options.picture)
        print(f"picture: {options.picture}")
    return status


if __name__ == "__main__":
    sys.exit(main())
