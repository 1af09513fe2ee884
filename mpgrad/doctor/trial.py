"""A pool tried out for the doctor, in a process of its own.

Importing torch, the driver of a GPU or a first worker may hang or crash, and the page has to come out nevertheless. So what
needs torch runs in a child, which writes each finding as it is made; what it had written when it ended, or was ended,
counts, and where it stood then is one more finding.

    doctor ── Popen ──► child: main()            nursery, workers
            ◄─ begins, finding, finding, begins ... ─ stdout
    when the child has ended, or past the limit: all that is left of them is killed

The doctor waits for the child, not for the end of its output: a nursery, or whatever else it has started, may outlive it and
hold that open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

from mpgrad.doctor import machine
from mpgrad.doctor.findings import Finding
from mpgrad.doctor.steps import STEPS, Step

__all__ = ["main", "tried"]

BOOT = "import sys; sys.path[:] = sys.argv[2:]; from mpgrad.doctor.trial import main; main(float(sys.argv[1]))"
MARK = "mpgrad-trial: "  # what others print to stdout has no such mark
GRACE = 10.0  # seconds after which a child whose doctor has been killed ends by itself
LAST_WORDS = 2  # lines of a child that died
PATIENCE = 5.0  # seconds for what has been killed to end: a process that a driver or a disk holds does not
TAG = "MPGRAD_TRIAL"  # in the environment of the child, and so of all that it starts


# --- the doctor's side


def tried(limit: float, command: Sequence[str] | None = None) -> list[Finding]:
    """What a child finds within `limit` seconds. All that it started is ended. `command` is what tests put in its place."""
    if command is None:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        command = [sys.executable, *flags, "-c", BOOT, str(limit), *sys.path]
    tag = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        try:
            output = stack.enter_context(contextlib.closing(Output()))
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output.entrance,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the doctor, who ends it
                env={**os.environ, TAG: tag},
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            problem, remedy = f"no process can be started ({error})", "see memory and limits above"
            return [Finding("pool", "trial", None, problem=problem, remedy=remedy, fatal=True)]
        in_time = True
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            left = end_all(process, tag)
    findings = read_trial(output.text(), process.returncode, None if in_time else limit)
    if left:
        problem = f"killed, but not ended within {PATIENCE:g} s: process {', '.join(map(str, left))}"
        remedy = "a driver or a disk holds it (ps -o pid,stat,wchan): see dmesg; it may stay until the machine is restarted"
        findings.append(Finding("pool", "trial", None, problem=problem, remedy=remedy))
    return findings


class Output:
    """A pipe, read as it fills, up to a mark: its end would come only when nobody holds it any more."""

    def __init__(self) -> None:
        self.content, self.mark = bytearray(), uuid.uuid4().bytes
        self.exit, self.entrance = os.pipe()
        self.reader = threading.Thread(target=self.read, name="mpgrad-doctor-output")
        self.reader.start()

    def read(self) -> None:
        while self.mark not in self.content:
            self.content += os.read(self.exit, 1 << 16)

    def close(self) -> None:
        """All that has been written by now is read first."""
        os.write(self.entrance, self.mark)
        self.reader.join()
        os.close(self.entrance)
        os.close(self.exit)

    def text(self) -> str:
        return self.content.partition(self.mark)[0].decode(errors="replace")


def end_all(process: subprocess.Popen[bytes], tag: str) -> list[int]:
    """Kill the child, and the nursery, workers and whatever else it started. The numbers of those that do not end."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    deadline = time.monotonic() + PATIENCE
    while (left := kill_tagged(tag)) and time.monotonic() < deadline:  # again: one may have forked before it was killed
        time.sleep(0.01)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        left.add(process.pid)
    return sorted(left)


def kill_tagged(tag: str) -> set[int]:
    """The processes that were found. What a dead child left may have another session and parent by now, but the same tag."""
    try:
        import psutil
    except ImportError:  # the child came no further than to its own import of it: it has started no nursery
        return set()
    found: set[int] = set()
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if each.environ().get(TAG) == tag:
                found.add(each.pid)
                each.kill()
    return found


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
    """With what the process has said last."""
    told = " / ".join(words[-LAST_WORDS:])
    return dataclasses.replace(finding, problem=f"{finding.problem}; it said: {told}") if told else finding


def ending(status: int) -> str:
    """How a process ended, in words."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"exit status {status}"


# --- the child's side

NOT_TRIED = Finding("pool", "further steps", "not tried", detail="because of what is marked X")


def main(limit: float) -> None:
    """The trial, in the child, which ends itself some seconds after `limit` seconds."""
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(limit + GRACE))  # nobody is left to kill it, should the doctor have been killed
    broken = machine.FAULT is not None  # the doctor has said so by itself
    if broken:
        tell("finding", dataclasses.asdict(NOT_TRIED))
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
                if finding.fatal and number == 0:
                    return  # nothing is open, and nothing works without torch


def tell(kind: str, content: object) -> None:
    """To the process that tries us: one line of JSON."""
    print(MARK + json.dumps({kind: content}), flush=True)


def carefully(step: Step, pools: contextlib.ExitStack) -> Iterator[Finding]:
    """The findings of a step; one that says so where it raised."""
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
