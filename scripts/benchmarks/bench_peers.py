"""mpgrad beside its peers: the same losses of N ragged tensors, and the gradients to all of them, by every system there is.

Peers whose gradients end at the process border (all pools but mpgrad and torch.distributed.rpc) get the best that is
written by hand around them: one call that runs forward and backward and returns both. Each system has a process of its
own that stays warm (peers/host.py); all give the serial loop's losses and gradients in every case, or nothing is timed;
then they take turns in a random order, and every figure is the median over such rounds, ratios being taken within a round.
All have the same number of workers of one intra-op thread. Servers are bound to the loopback interface, and everything
that was started is ended, after --limit seconds at the latest.

What is fair and what is not: a figure holds everything between tensors in the caller and gradients in the caller. By-hand
ways get to know that the loss is a sum; "mpgrad, keep" and torch.distributed.rpc do not. Peers without chunks of their own
get multiprocessing.Pool's, four a worker. "the best serial" is the fastest serial loop of the case, whatever its threads.
Beside the clock, the CPU time of the caller's thread, of the other threads of its process, and of all other processes.

    pip install '.[bench]'
    python scripts/benchmarks/bench_peers.py --json peers.json --picture peers.png      # about half an hour
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import at_least_1, calibrated, limited, surroundings
from figures import Figure, add_options, fail, interleaved, median_figure, picture_to_write, print_figures, ratios, report
from jobs import OP, PYTHON, backward_at_once
from peers.case import Case, WrongResultError
from peers.host import Host, HostError, Run
from peers.systems import IN_ONE_PROCESS, OURS, SERIAL, SYSTEMS, version_of

EPILOG = "exit status: 0 if everything was measured, 1 if a system is wrong or the time is up, 2 for wrong arguments"

KINDS = {"Python-bound": PYTHON, "op-bound": OP}
WARM_UPS = 4  # torch.jit compiles for its backward at the third run
AHEAD = (">=", 1.0)
CPU = {"caller": "the caller's thread", "beside": "other threads of its process", "workers": "other processes"}
TICKS = (0.2, 0.5, 0.7, 1, 1.4, 2)  # of the picture's speed-up
OUR_COLOURS = ("gray", "crimson", "black")
Runs = Mapping[str, Sequence[Run]]  # by system
Seconds = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    grains_ms: Sequence[float] = (0, 0.1, 1, 10, 50)
    seconds: float = 0.3  # of a serial run
    most_items: int = 1024
    fewest_items: int = 8
    large: int = 32  # tensors
    largest_bytes: int = 16_000_000
    repeats: int = 7
    starts: int = 3
    idle_seconds: float = 5.0
    limit: int = 3600


QUICK = Plan((1,), 0.01, 16, 4, 4, 400_000, 1, 1, 0.1, 100)


def cases(plan: Plan) -> Iterator[Case]:
    for kind, work in KINDS.items():
        for ms in plan.grains_ms:
            size = calibrated(work, ms / 1e3, backward_at_once) if ms else 1
            count = round(1e3 * plan.seconds / ms) if ms else plan.most_items
            yield Case(kind, ms, size, min(plan.most_items, max(plan.fewest_items, count)))
    yield Case("large", 0, plan.largest_bytes // 4, plan.large)


# --- rounds


def first_results(hosts: Mapping[str, Host], processes: int, folder: Path, starts: int) -> Iterator[Figure]:
    """Of the hosts, and of some fresh ones."""
    for name, host in hosts.items():
        seconds = [host.first_result]
        for _ in range(starts - 1):
            with Host(name, processes, folder) as fresh:
                fresh.start()
                seconds.append(fresh.first_result)
        yield median_figure("start-up: from a Python with torch to the first gradient", name, seconds, "s")


def timed_case(case: Case, hosts: Mapping[str, Host], repeats: int) -> Runs:
    for host in hosts.values():
        host.load(case)
    return interleaved({name: host.run for name, host in hosts.items()}, repeats, WARM_UPS)


def case_figures(case: Case, runs: Runs) -> Iterator[Figure]:
    row = f"{case.title}: forward and backward"
    seconds = {name: [run.wall for run in own] for name, own in runs.items()}
    for name, walls in seconds.items():
        yield median_figure(row, name, [1e3 * wall / case.count for wall in walls], "ms/item")
    best = fastest(seconds, SERIAL)
    if best is not None:
        for name, walls in seconds.items():
            yield median_figure(row, f"{name}, over the best serial", ratios(seconds[best], walls), "x")
    peer = fastest(seconds, [name for name in SYSTEMS if name not in (*OURS, *IN_ONE_PROCESS)])
    if peer is not None:
        for name in OURS:
            if name in seconds:
                over = ratios(seconds[peer], seconds[name])
                yield median_figure(row, f"{name}, over the best process-based peer", over, "x", AHEAD)
    for name, own in runs.items():
        for part, where in CPU.items():
            spent = [1e3 * float(getattr(run, part)) / case.count for run in own]
            yield median_figure(row, f"{name}, CPU of {where}", spent, "ms/item")


def print_case(figures: Sequence[Figure]) -> None:
    """A line a system."""
    values = {figure.name: figure.value for figure in figures}
    columns = ["over the best serial", "over the best process-based peer", *(f"CPU of {where}" for where in CPU.values())]
    titles = ["ms/item", "over serial", "over peers", *(f"CPU: {part}" for part in CPU)]
    print(f"\n{figures[0].row}")
    print(f"  {'':30}{''.join(f'{title:>14}' for title in titles)}")
    for name in SYSTEMS:
        if name in values:
            cells = [values.get(f"{name}, {column}") for column in columns]
            over, spent = cells[: -len(CPU)], cells[-len(CPU) :]
            texts = [f"{values[name]:.4f}", *map(as_text(2), over), *map(as_text(4), spent)]
            print(f"  {name:30}{''.join(f'{text:>14}' for text in texts)}", flush=True)


def as_text(digits: int) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else f"{value:.{digits}f}"


def fastest(seconds: Seconds, names: Sequence[str]) -> str | None:
    """Of those that were measured."""
    return min((name for name in names if name in seconds), key=lambda name: statistics.median(seconds[name]), default=None)


# --- the whole


@contextlib.contextmanager
def started_hosts(names: Sequence[str], processes: int, folder: Path) -> Iterator[dict[str, Host]]:
    with contextlib.ExitStack() as stack:
        hosts: dict[str, Host] = {}
        for name in names:
            hosts[name] = stack.enter_context(Host(name, processes, folder))
            hosts[name].start()  # before the next one starts
        yield hosts


def bench(names: Sequence[str], plan: Plan, processes: int) -> Iterator[Figure]:
    """The figures as they come: whatever ends the run, those are there."""

    def shown(found: Iterator[Figure], show: Callable[[Sequence[Figure]], None] = print_figures) -> Sequence[Figure]:
        figures = list(found)
        show(figures)
        return figures

    with tempfile.TemporaryDirectory(prefix="peers_", ignore_cleanup_errors=True) as path:
        folder = Path(path)
        all_cases = list(cases(plan))
        with started_hosts(names, processes, folder) as hosts:
            yield from shown(first_results(hosts, processes, folder, plan.starts))
            for case in all_cases:
                for host in hosts.values():
                    host.check(case)
            print(f"\nall {len(hosts)} systems give the serial loop's losses and gradients in all {len(all_cases)} cases")
            for case in all_cases:
                yield from shown(case_figures(case, timed_case(case, hosts, plan.repeats)), print_case)
            row = f"idle: CPU seconds a second, over {plan.idle_seconds:g} s"
            yield from shown(Figure(row, name, host.idle_cpu(plan.idle_seconds), "s/s") for name, host in hosts.items())


def draw(figures: Sequence[Figure], names: Sequence[str], grains: Sequence[float], file: Path) -> None:
    from matplotlib import colormaps  # which the table does not need
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure as Canvas

    colours = colormaps["tab20"]
    assert isinstance(colours, ListedColormap)

    values = {(figure.row, figure.name): figure.value for figure in figures}
    canvas = Canvas(figsize=(13, 6), layout="constrained")
    shown: list[float] = []
    for axes, kind in zip(canvas.subplots(1, 2, sharey=True), KINDS, strict=True):
        for number, name in enumerate(names):
            rows = [f"{Case(kind, ms, 0, 0).title}: forward and backward" for ms in grains]
            ups = [values.get((row, f"{name}, over the best serial"), math.nan) for row in rows]  # without serial: none
            if name in OURS:
                look: dict[str, Any] = {"linestyle": "-", "color": OUR_COLOURS[OURS.index(name)], "linewidth": 2.5, "zorder": 3}
            else:
                style = "--" if name in IN_ONE_PROCESS else ":"
                look = {"linestyle": style, "color": colours(number % colours.N), "linewidth": 1.2}
            axes.plot(ups, "o", label=name, **look)
            shown += [up for up in ups if not math.isnan(up)]
        axes.set_xticks(range(len(grains)), [f"{ms:g}" for ms in grains])
        axes.set(title=kind, xlabel="serial time of an item, forward and backward (ms)", yscale="log")
        axes.axhline(1, color="black", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
    lowest = min(shown, default=TICKS[0])
    axes.set_ylim(bottom=max((tick for tick in TICKS if tick <= lowest), default=TICKS[0]))  # what is slower leaves the picture
    axes.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
    canvas.axes[0].set_ylabel("speed-up over the best serial loop (higher is better)")
    canvas.savefig(file, dpi=150)


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM", help="; ".join(SYSTEMS)
    )
    parser.add_argument("--grains", nargs="+", type=float, metavar="MS", help="of items (default: 0 0.1 1 10 50; quick: 1)")
    parser.add_argument("--processes", type=at_least_1, default=2, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--repeats", type=at_least_1, metavar="N", help="timed rounds (default: 7, quick: 1)")
    parser.add_argument("--limit", type=at_least_1, metavar="SECONDS", help="of the whole run (default: 3600, quick: 100)")
    parser.add_argument("--picture", type=picture_to_write, metavar="FILE", help="speed-up against grain, a line per system")
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    given = {"grains_ms": options.grains, "repeats": options.repeats, "limit": options.limit}
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    versions = {name: version_of(name) for name in options.systems}
    names = [name for name, version in versions.items() if version is not None]
    around = surroundings(options.processes)
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, load average {around['load_average']:.2f} before")
    print(f"{options.processes} workers of one intra-op thread; medians of {plan.repeats} rounds")
    for name, version in versions.items():
        print(f"  {name:30}{SYSTEMS[name].distribution} {version or 'is not installed: left out'}")
    random.seed(0)
    torch.set_num_threads(1)
    figures: list[Figure] = []
    status = 0
    try:
        with limited(plan.limit):
            figures.extend(bench(names, plan, options.processes))
    except (WrongResultError, HostError, TimeoutError) as error:
        status = fail(error)
    if not figures:
        return status
    report(options, around, figures, versions=versions, repeats=plan.repeats)
    if options.picture is not None:
        draw(figures, names, plan.grains_ms, options.picture)
        print(f"picture: {options.picture}")
    return status


if __name__ == "__main__":
    sys.exit(main())
