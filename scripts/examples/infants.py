"""Reads the infants of a population fit from a CSV file. data/README.md describes its columns.

The model needs logarithms of doses, weights and concentrations, and a dose before every sample. A
file that breaks such a rule would show up in a fit as a `nan`, hours after its cause. So it is
refused here, and the error names the cell.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DataError", "Infant", "read_infants"]

COLUMNS = ("subject", "time_h", "dose_mg", "weight_kg", "apgar", "concentration_mg_per_l")


@dataclass(frozen=True)
class Infant:
    """Holds the doses and measurements of one infant.

    Arguments:
        subject: its number.
        weight: at birth, in kg.
        apgar: five minutes after birth, 1 to 10.
        doses: intravenous boluses in mg, of shape (doses,).
        dose_times: in h, of shape (doses,).
        sample_times: in h, of shape (samples,).
        doses_before: how many doses had been given by each sample, at least 1; integers of shape
            (samples,). Times do not settle it: a dose and a sample at the same time are in the
            order in which they were written down.
        concentrations: measured in plasma in mg/l, of shape (samples,).
    """

    subject: int
    weight: float
    apgar: int
    doses: Tensor
    dose_times: Tensor
    sample_times: Tensor
    doses_before: Tensor
    concentrations: Tensor


class DataError(ValueError):
    """The data file cannot be used; the message names file, line and column."""


@dataclass(frozen=True)
class Line:
    """One line of the file, which knows its position."""

    path: Path
    number: int
    cells: list[str]

    def mistake(self, column: int | str, what: str) -> DataError:
        index = COLUMNS.index(column) if isinstance(column, str) else column
        name = f" ({COLUMNS[index]})" if index < len(COLUMNS) else ""
        return DataError(f"{self.path}, line {self.number}, column {index + 1}{name}: {what}")

    def cell(self, column: str) -> str:
        return self.cells[COLUMNS.index(column)]

    def real(self, column: str) -> float:
        cell = self.cell(column)
        with contextlib.suppress(ValueError):
            if "_" not in cell and math.isfinite(number := float(cell)):  # Python reads 1_4 as 14
                return number
        raise self.mistake(column, f"not a number ({cell!r})")

    def positive(self, column: str) -> float:
        if (number := self.real(column)) > 0:
            return number
        raise self.mistake(column, f"must be positive ({self.cell(column)})")

    def whole(self, column: str) -> int:
        if (number := self.real(column)).is_integer():
            return int(number)
        raise self.mistake(column, f"must be a whole number ({self.cell(column)})")


class Event(NamedTuple):
    """A dose (mg), or a sample with its concentration (mg/l). The other field is None."""

    line: Line
    subject: int
    time: float
    dose: float | None
    weight: float
    apgar: int
    concentration: float | None


def read_infants(path: Path) -> list[Infant]:
    """Return the infants of a data file, in the order of their first lines.

    Raises:
        DataError: the file cannot be read, or breaks one of the rules above.
    """
    lines = read_lines(path)
    header = next(lines)
    for index, (name, cell) in enumerate(
        itertools.zip_longest(COLUMNS, header.cells, fillvalue="")
    ):
        if name != cell:
            raise header.mistake(index, f"the header must be {','.join(COLUMNS)} (here: {cell!r})")
    histories: dict[int, list[Event]] = {}
    for line in lines:
        event = read_event(line)
        histories.setdefault(event.subject, []).append(event)
    if not histories:
        raise replace(header, number=header.number + 1).mistake(
            "subject", "no infants below the header"
        )
    return [infant_of(events) for events in histories.values()]


def read_lines(path: Path) -> Iterator[Line]:
    """Yield all lines that are not empty, and the first one in any case."""
    start = Line(path, 1, [])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise start.mistake(
            "subject", f"cannot read the file ({error.strerror}); see --data"
        ) from error
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            cells = [cell.strip() for cell in raw.decode().split(",")]
        except UnicodeDecodeError as error:
            column = raw[: error.start].count(b",")
            raise Line(path, number, []).mistake(
                column, f"not UTF-8 (byte: {raw[error.start]:#x})"
            ) from error
        if number == 1 or cells != [""]:
            yield Line(path, number, cells)


def read_event(line: Line) -> Event:
    found, wanted = len(line.cells), len(COLUMNS)
    if found != wanted:
        raise line.mistake(min(found, wanted), f"a line must have {wanted} columns (here: {found})")
    event = Event(
        line=line,
        subject=line.whole("subject"),
        time=line.real("time_h"),
        dose=line.positive("dose_mg") if line.cell("dose_mg") else None,
        weight=line.positive("weight_kg"),
        apgar=line.whole("apgar"),
        concentration=line.positive("concentration_mg_per_l")
        if line.cell("concentration_mg_per_l")
        else None,
    )
    if not 1 <= event.apgar <= 10:
        raise line.mistake("apgar", f"must be from 1 to 10 ({event.apgar})")
    if event.dose is None and event.concentration is None:
        raise line.mistake(
            "dose_mg", "neither a dose nor a concentration (both empty); give one of them"
        )
    if event.dose is not None and event.concentration is not None:
        what = (
            f"both a dose and a concentration ({event.dose:g} and {event.concentration:g}); give "
            "each its own line"
        )
        raise line.mistake("concentration_mg_per_l", what)
    return event


def infant_of(events: Sequence[Event]) -> Infant:
    """Make one infant from its lines, in the order of the file."""
    first = events[0]
    for before, event in itertools.pairwise(events):
        check_succession(before, event)
    doses = [(event.dose, event.time) for event in events if event.dose is not None]
    samples = [
        (event.concentration, event.time) for event in events if event.concentration is not None
    ]
    if not samples:
        raise first.line.mistake(
            "concentration_mg_per_l", f"no sample of this infant (subject: {first.subject})"
        )
    if first.dose is None:  # no concentration is predicted before a dose, so none can be explained
        raise first.line.mistake(
            "dose_mg", f"no dose before this sample (subject: {first.subject})"
        )
    given = itertools.accumulate(event.dose is not None for event in events)
    return Infant(
        subject=first.subject,
        weight=first.weight,
        apgar=first.apgar,
        doses=torch.tensor([dose for dose, _ in doses], dtype=torch.float64),
        dose_times=torch.tensor([hour for _, hour in doses], dtype=torch.float64),
        sample_times=torch.tensor([hour for _, hour in samples], dtype=torch.float64),
        doses_before=torch.tensor(
            [n for n, event in zip(given, events, strict=True) if event.dose is None]
        ),
        concentrations=torch.tensor(
            [concentration for concentration, _ in samples], dtype=torch.float64
        ),
    )


def check_succession(before: Event, event: Event) -> None:
    """Check that one infant's lines go forward in time, and agree on its weight and Apgar score."""
    if event.time < before.time:
        what = (
            f"earlier than line {before.line.number} ({event.time:g} after {before.time:g}); sort "
            "the infant's lines"
        )
        raise event.line.mistake("time_h", what)
    for column, here, there in (
        ("weight_kg", event.weight, before.weight),
        ("apgar", event.apgar, before.apgar),
    ):
        if here != there:
            what = (
                f"differs from line {before.line.number} ({here:g}, not {there:g}); an infant has "
                "one"
            )
            raise event.line.mistake(column, what)
