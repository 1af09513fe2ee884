"""What the doctor finds: one line each, with the remedy beside what is amiss; as a page, and as JSON.

Probes gather and know nothing of the page; the page is made of findings and knows nothing of the machine.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["GIB", "MIB", "Finding", "as_json", "found_by", "page", "size_of", "works"]

SECTIONS = ("software", "CPUs", "memory", "limits", "pool", "GPUs")  # in the page's order
MIB, GIB = 1 << 20, 1 << 30
WIDTH = 110
NAME_WIDTH, VALUE_WIDTH = 17, 12
REPORT = "please report this page, with what you ran"


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Attributes:
        value: None where it is not known.
        unit: of the value.
        detail: what helps to read the value.
        problem: what is amiss; empty where nothing is.
        remedy: what to do about that.
        fatal: no pool can work because of it.
    """

    section: str
    name: str
    value: str | int | float | None
    unit: str = ""
    detail: str = ""
    problem: str = ""
    remedy: str = ""
    fatal: bool = False


Probe = Callable[[], Finding | None]  # None: not worth a line here


def found_by(probes: Iterable[Probe]) -> Iterator[Finding]:
    """What each of the probes finds. One that fails has a line that says so: the others are wanted all the same."""
    for probe in probes:
        name = probe.__name__.replace("_", " ")
        try:
            finding = probe()
        except ImportError as error:
            finding = Finding("doctor", name, "not looked at", detail=str(error))  # the package has a line of its own
        except Exception as error:
            problem = f"this probe failed ({type(error).__name__}: {error})"
            finding = Finding("doctor", name, None, problem=problem, remedy=REPORT)
        if finding is not None:
            yield finding


def works(findings: Iterable[Finding]) -> bool:
    """Whether a pool can be made here."""
    return not any(finding.fatal for finding in findings)


def as_json(version: str, findings: Sequence[Finding]) -> str:
    found = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"mpgrad": version, "works": works(findings), "findings": found}, indent=1)


def page(findings: Sequence[Finding]) -> str:
    """The verdict, then a block for each section. Lines that are amiss are marked "!", or "X" where no pool can work."""
    lines = [verdict(findings)]
    others = dict.fromkeys(finding.section for finding in findings if finding.section not in SECTIONS)
    for section in (*SECTIONS, *others):
        rows = [line for finding in findings if finding.section == section for line in row(finding)]
        lines += ["", section, *rows] if rows else []
    return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> str:
    """The last lines of the page."""
    amiss = [finding for finding in findings if finding.problem]
    if not amiss:
        return "A pool works here, and nothing is amiss."
    names = ", ".join(f"{finding.section}: {finding.name}" for finding in sorted(amiss, key=lambda each: not each.fatal))
    opening = "A pool works here" if works(findings) else "NO POOL CAN WORK HERE"
    marks = "!" if works(findings) else "X" if all(finding.fatal for finding in amiss) else "X and !"
    return textwrap.fill(f"{opening}. Look at what is marked {marks} ({names}).", WIDTH, subsequent_indent="  ")


def row(finding: Finding) -> Iterator[str]:
    """The lines of one finding."""
    mark = "X" if finding.fatal else "!" if finding.problem else " "
    value = "not known" if finding.value is None and not finding.problem else text_of(finding.value)
    told = f"{f'{value} {finding.unit}'.strip():<{VALUE_WIDTH}} {finding.detail}".strip()
    indent = " " * (NAME_WIDTH + 3)
    paragraphs = [each for each in (told, finding.problem, finding.remedy and f"-> {finding.remedy}") if each]
    for number, paragraph in enumerate(paragraphs):
        first = f"{mark} {finding.name:<{NAME_WIDTH}} " if number == 0 else indent
        yield textwrap.fill(paragraph, WIDTH, initial_indent=first, subsequent_indent=indent)


def text_of(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def size_of(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
