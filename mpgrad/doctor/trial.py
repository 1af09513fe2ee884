"""A pool tried out for the doctor, in a process of its own.

Importing torch, the driver of a GPU or a first worker may hang or crash, and the page has to come out nevertheless. So what
needs torch runs in a child, which writes each finding as it is made; what it had written when it ended, or was ended,
counts, and where it stood then is one more finding.

    doctor ── Popen ──► child: main()            nursery, workers
            ◄─ begins, finding, finding, begins ... ─ stdout
    past the limit: all of them are killed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mpgrad.doctor.findings import Finding
from mpgrad.doctor.steps import STEPS, Step

__all__ = ["main", "tried"]

BOOT = "import sys; sys.path[:] = sys.argv[2:]; from mpgrad.doctor.trial import main; main(float(sys.argv[1]))"
MARK = "mpgrad-trial: "  # what others print to stdout has no such mark
GRACE = 10.0  # seconds after which a child whose doctor has been killed ends by itself
LAST_WORDS = 2  # lines of a child that died


# --- the doctor's side


def tried(limit: float, command: Sequence[str] | None = None) -> list[Finding]:
    """What a child finds within `limit` seconds. Nothing of it is left afterwards. `command` is what tests put in its place."""
    if command is None:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        command = [sys.executable, *flags, "-c", BOOT, str(limit), *sys.path]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the doctor, who ends it
        )
    except OSError as error:
        problem, remedy = f"no process can be started ({error})", "see memory and limits above"
        return [Finding("pool", "trial", None, problem=problem, remedy=remedy, fatal=True)]
    in_time = True
    try:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            in_time = False
            end_with_all(process)
            output, _ = process.communicate()
    finally:
        end_with_all(process)
    return read_trial(output, process.returncode, None if in_time else limit)


def end_with_all(process: subprocess.Popen[str]) -> None:
    """Kill the child, and the nursery and workers that it has started: those that hang would outlive it."""
    if process.poll() is not None:
        return
    descendants: list[Any] = []
    with contextlib.suppress(ImportError):  # without psutil a child comes no further than to its own import of it
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(process.pid)
            child.suspend()  # it starts no more of them
            descendants = child.children(recursive=True)
    process.kill()
    for each in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):  # its parent's death was its own
            each.kill()
    process.wait()


def read_trial(output: str, status: int, limit: float | None) -> list[Finding]:
    """The findings in a child's output, and one more where it did not come to its end: past its `limit`, or by dying."""
    findings: list[Finding] = []
    words: list[str] = []  # of the step, that are no findings
    at = STEPS[0]
    for line in output.splitlines():
        word, mark, rest = line.partition(MARK)
        words += [word.strip()] if word.strip() else []
        told = json.loads(rest) if mark else {}
        if "begins" in told:
            at, words = STEPS[told["begins"]], []
        elif "finding" in told:
            finding = Finding(**told["finding"])
            findings.append(with_words(finding, words) if finding.value is None and finding.problem else finding)
    if limit is not None:
        problem = f"hung: {at.doing} had not ended after {limit:g} s in all, and was killed"
        remedy = f"{at.remedy}; if the machine is only slow, give it more time (--timeout {5 * limit:g})"
    elif status != 0:
        problem = f"the process died ({ending(status)}) while {at.doing}"
        remedy = f"see memory and limits above; {at.remedy}"
    else:
        return findings
    fatal = at.section != "GPUs"  # a pool that raises at times may work at others, one that hangs does not
    return [*findings, with_words(Finding(at.section, at.name, None, problem=problem, remedy=remedy, fatal=fatal), words)]


def with_words(finding: Finding, words: list[str]) -> Finding:
    told = " / ".join(words[-LAST_WORDS:])
    return dataclasses.replace(finding, problem=f"{finding.problem}; it said: {told}") if told else finding


def ending(status: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"exit status {status}"


# --- the child's side

NOT_TRIED = Finding("pool", "further steps", "not tried", detail="because of what is marked X")


def main(limit: float) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(limit + GRACE))  # nobody is left to kill it, should the doctor have been killed
    broken = False
    with contextlib.ExitStack() as pools:
        for number, step in enumerate(STEPS):
            if broken and not step.always:
                continue
            tell("begins", number)
            for finding in carefully(step, pools):
                tell("finding", dataclasses.asdict(finding))
                if finding.fatal and not broken:
                    broken = True
                    tell("finding", dataclasses.asdict(NOT_TRIED))
            if broken and number == 0:
                return  # nothing is open, and nothing works without torch


def tell(kind: str, content: object) -> None:
    print(MARK + json.dumps({kind: content}), flush=True)


def carefully(step: Step, pools: contextlib.ExitStack) -> Iterator[Finding]:
    try:
        yield from step.find(pools)
    except Exception as error:
        text = " ".join(str(error).split())
        yield Finding(
            step.section,
            step.name,
            None,
            problem=f"{step.doing} failed ({type(error).__name__}: {text})",
            remedy=step.remedy,
            fatal=step.fatal,
        )
