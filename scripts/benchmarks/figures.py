"""Figures that benchmarks report: a table on the terminal, a JSON file, and the ratios to an older file.

Every benchmark is a list of `Figure`s, so that one table, one file format and one comparison serve them all. Figures of
two files mean the same if row and name are the same; a ratio over 1 means that the new value is larger, which is good or
bad as the figure has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Record = dict[str, Any]

FORMATS = (".pdf", ".png", ".svg")
WARM_UPS = 2  # untimed rounds; pools learn there what a call costs, and get their shared memory


@dataclass(frozen=True)
class Figure:
    """One number of a benchmark, and what it has to be where there is an aim: "<=" or ">=" and a value."""

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


def median_figure(row: str, name: str, rounds: Sequence[float], unit: str, aim: tuple[str, float] | None = None) -> Figure:
    return Figure(row, name, statistics.median(rounds), unit, aim, list(rounds))


# --- the clock


def interleaved(turns: Mapping[str, Callable[[], T]], rounds: int, warm_ups: int = WARM_UPS) -> dict[str, list[T]]:
    """What each gives in every round, in a random order within a round: noise of the machine meets them all alike."""
    results: dict[str, list[T]] = {name: [] for name in turns}
    shuffled = random.Random(0)
    for number in range(-warm_ups, rounds):
        for name in shuffled.sample(list(turns), len(turns)):
            value = turns[name]()
            if number >= 0:
                results[name].append(value)
    return results


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: the halves of a round share the machine's mood."""
    return [one / other for one, other in zip(over, under, strict=True)]


# --- the table


def print_heading(title: str) -> None:
    print(f"\n{title}")


def print_figures(figures: Sequence[Figure]) -> None:
    """Rows that come one after the other share their heading."""
    row = None
    for figure in figures:
        if figure.row != row:
            row = figure.row
            print_heading(row)
        value, unit, aim, reached = figure.cells()
        print(f"  {figure.name:58}{value:>11} {unit:10}{aim:>9}  {reached}".rstrip(), flush=True)


# --- files


def write(path: Path, surroundings: Record, figures: Sequence[Figure], **more: Any) -> None:
    record = {"surroundings": surroundings, **more, "figures": [figure.record() for figure in figures]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def figures_of(path: Path) -> dict[tuple[str, str], Record]:
    """The figures in a file that `write` wrote.

    Raises:
        argparse.ArgumentTypeError: it is no such file.
    """
    try:
        return {(record["row"], record["name"]): record for record in json.loads(path.read_text())["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"no file of figures ({str(path)!r}: {error!r}); make one with --json") from error


def old_figures(text: str) -> dict[tuple[str, str], Record]:
    return figures_of(Path(text))


def print_comparison(old: Mapping[tuple[str, str], Record], figures: Sequence[Figure]) -> None:
    print("\nold, new, old / new")
    for figure in figures:
        before = old.get((figure.row, figure.name))
        if before is None:
            print(f"  {figure.row}, {figure.name}: new")
        else:
            print(f"  {figure.row}, {figure.name}: {compared(before['value'], figure.value)} {figure.unit}")


def compared(before: float, now: float) -> str:
    ratio = f"{before / now:.2f}" if now else "-"
    return f"{before:.4g} {now:.4g} {ratio}"


# --- the command line


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks of figures take."""
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures and rounds there")
    parser.add_argument(
        "--compare", type=old_figures, metavar="FILE", help="print ratios to the figures of an older --json file"
    )
    parser.add_argument("--quick", action="store_true", help="a little of everything, only to see that it runs")


def file_to_write(text: str) -> Path:
    """A file to be written; refused now rather than after the runs."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder ({str(path.parent)!r}); make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"is a folder ({text!r}); name a file in it")
    return path


def picture_to_write(text: str) -> Path:
    path = file_to_write(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"no picture format ({text!r}); end in one of {', '.join(FORMATS)}")
    return path


def report(options: argparse.Namespace, surroundings: Record, figures: Sequence[Figure], **more: Any) -> None:
    """What the options of `add_options` ask for, once the figures are there."""
    if options.compare is not None:
        print_comparison(options.compare, figures)
    if options.json is not None:
        write(options.json, surroundings, figures, **more)
        print(f"\nall rounds: {options.json}")


def fail(error: Exception) -> int:
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    return 1
