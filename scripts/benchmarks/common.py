"""Contains the parts that the benchmarks share: the clock, figures and their files, the description
of the machine, and the limits of a run.

Contenders take turns in a random order within a round, so noise of the machine affects all of them
equally. A figure is the median over rounds, and a ratio is taken within a round. This module does
not import mpgrad, because scripts about other systems also use it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import random
import re
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil

# mpgrad logs once for each tiny function that it is too cheap for a pool. Such functions are
# measured here. Older versions use other words.
logging.getLogger("mpgrad").addFilter(
    lambda record: not re.search("maps took|cost more to send", str(record.msg))
)

T = TypeVar("T")
Record = dict[str, Any]

FORMATS = (".pdf", ".png", ".svg")
WARM_UPS = 2  # untimed rounds, in which pools learn what a call costs and get their shared memory


class WrongResultError(Exception):
    """A contender computed another result than the serial loop."""


def sent(pool: type) -> Record:
    """Return the options of a pool that sends all calls. Older versions may run cheap calls in the
    caller."""
    return {"send": "always"} if "send" in inspect.signature(pool).parameters else {}


# --- the clock


def interleaved(turns: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the result of each turn in every round. The order within a round is random."""
    results: dict[str, list[T]] = {name: [] for name in turns}
    shuffled = random.Random(0)
    for number in range(-WARM_UPS, rounds):
        for name in shuffled.sample(list(turns), len(turns)):
            value = turns[name]()
            if number >= 0:
                results[name].append(value)
    return results


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratios within each round."""
    return [one / other for one, other in zip(over, under, strict=True)]


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the seconds that all threads of these processes have run, to the nanosecond. `psutil`
    counts in steps of 10 ms."""
    nanoseconds = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                nanoseconds += int(task.read_text().split()[0])
    return nanoseconds / 1e9


def status_bytes(pid: int, name: str) -> int:
    """Return a size from the kernel's account of a process: its resident set (VmRSS), or the
    largest that it had (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return 1024 * int(value.split()[0])
    raise KeyError(name)


# --- figures


@dataclass(frozen=True)
class Figure:
    """One number of a benchmark. Its aim, if it has one, is "<=" or ">=" and a value."""

    row: str
    name: str
    value: float
    unit: str
    aim: tuple[str, float] | None = None
    rounds: Sequence[float] = field(default=(), repr=False)  # what `value` is the median of

    @property
    def reached(self) -> bool | None:
        if self.aim is None:
            return None
        sign, bound = self.aim
        return self.value <= bound if sign == "<=" else self.value >= bound

    def cells(self) -> list[str]:
        aim = "" if self.aim is None else f"{self.aim[0]} {self.aim[1]:g}"
        reached = {None: "", True: "reached", False: "not yet"}[self.reached]
        return [f"{self.value:.4g}", self.unit, aim, reached]

    def record(self) -> Record:
        return dataclasses.asdict(self) | {"reached": self.reached}


def median_figure(
    row: str, name: str, rounds: Sequence[float], unit: str, aim: tuple[str, float] | None = None
) -> Figure:
    return Figure(row, name, statistics.median(rounds), unit, aim, list(rounds))


def print_figures(figures: Sequence[Figure]) -> None:
    """Print the figures. Consecutive figures of one row share their heading."""
    row = None
    for figure in figures:
        if figure.row != row:
            row = figure.row
            print(f"\n{row}")
        value, unit, aim, reached = figure.cells()
        print(f"  {figure.name:58}{value:>11} {unit:10}{aim:>9}  {reached}".rstrip(), flush=True)


def report(
    options: argparse.Namespace, around: Record, figures: Sequence[Figure], **more: Any
) -> None:
    """Write the file of the option `--json`."""
    if options.json is not None:
        record = {
            "surroundings": around,
            **more,
            "figures": [figure.record() for figure in figures],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nall rounds: {options.json}")


# --- a run: where it is, how long it may take


def surroundings(processes: int) -> Record:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processes": processes,
        "cpu": cpu_model(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("mpgrad", "numpy", "torch")
        },
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def print_surroundings(around: Record) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    print(f"{versions}, Python {around['python']}, {around['date']}")
    print(
        f"{around['cpu']}, {around['usable_cpus']} usable CPUs, {around['memory_gib']} GiB, "
        f"{around['system']}"
    )
    print(f"{around['processes']} processes; load average {around['load_average']:.2f} before")


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after this number of seconds. If the process does not leave
    the block then, end it."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        raise TimeoutError(f"the run took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def fail(error: Exception) -> int:
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    return 1


# --- the command line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks have."""
    parser.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="write all figures and rounds there"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a little of everything, only to see that it runs"
    )


def at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 ({text})")
    return number


def file_to_write(text: str) -> Path:
    """Return the path of a file that can be written. A wrong path is refused now rather than after
    the runs."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder ({str(path.parent)!r}); make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"is a folder ({text!r}); name a file in it")
    return path


def picture_to_write(text: str) -> Path:
    path = file_to_write(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"no picture format ({text!r}); end in one of {', '.join(FORMATS)}"
        )
    return path
