"""A process of its own for every system, warm from the first case to the last, and told when its turn comes.

So systems can take turns within a round without meeting: what one of them imports, patches, starts or leaves behind is in
its own process tree. Between its turns the whole tree is stopped (SIGSTOP), so that busy-waiting workers cost nobody else
anything; except for those whose servers take each other for dead when stopped, whose idle CPU is reported.

    bench_peers.py                                            host
    check(case)   ──► one line of JSON ──►  the system's losses and gradients against the serial loop's
    load(case)    ──►                       items, kept until the next one
    run()         ──►                       fresh leaves | clocks on | run, drop | clocks off |
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
import traceback
import uuid
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from descendants import MARK, Descendants, cpu_seconds, end_with_parent
from losses import python_loss
from torch import Tensor

from peers.case import Case, Function, System, WrongResultError, check, leaves
from peers.systems import SYSTEMS

SCRIPTS = Path(__file__).parent.parent
LIMIT = 120.0  # seconds for an answer
END_LIMIT = 20.0  # seconds for a system to close


class HostError(Exception):
    """A system failed: what it said."""


class Run(NamedTuple):
    """Seconds that one run took: by the clock, and of CPU."""

    wall: float
    caller: float  # the thread that asks for it
    beside: float  # the other threads of its process
    workers: float  # all other processes of the system that were there before


class Host:
    """The other side of `serve`. Stopped, where the system bears it, whenever it is not answering."""

    def __init__(self, name: str, processes: int, folder: Path) -> None:
        self.name = name
        self._bears_stopping = SYSTEMS[name].bears_stopping
        mark = uuid.uuid4().hex
        path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {MARK: mark, "PYTHONPATH": path, "TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
        settings["RAY_memory_monitor_refresh_ms"] = "0"  # it would end its tasks when others take the machine's memory
        # MPI starts its workers by a program that lies beside Python's
        settings["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        self._errors = (folder / f"{mark}.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "peers.host", name, str(processes), str(os.getpid())],
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._descendants = Descendants(self._process.pid, mark)

    def start(self) -> None:
        """Returns when the system has given its first gradient."""
        self.first_result = float(self._answer()["seconds"])  # from a Python that has imported torch

    def check(self, case: Case) -> None:
        """Raises WrongResultError, HostError."""
        self._ask("check", case)

    def load(self, case: Case) -> None:
        self._ask("load", case)

    def run(self) -> Run:
        """The case that was loaded last, once."""
        workers = {each for each in self._descendants.living if each.pid != self._process.pid}
        before = cpu_seconds(workers)
        spent = self._ask("run")
        return Run(**spent, workers=max(0.0, cpu_seconds(workers) - before))

    def idle_cpu(self, seconds: float) -> float:
        """CPU seconds a second of everything that the system has running, while it has nothing to do."""
        self._descendants.go_on()
        processes = self._descendants.living
        before = cpu_seconds(processes)
        time.sleep(seconds)
        used = (cpu_seconds(processes) - before) / seconds
        self._rest()
        return used

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        """Ends the system as it wants to be ended, unless something went wrong; then whatever is left of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._descendants.go_on()
        try:
            self._process.stdin.close()
            self._process.wait(0 if kind else END_LIMIT)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
        finally:
            self._descendants.look_everywhere()
            self._descendants.kill()
            self._process.wait()
            self._process.stdout.close()
            self._errors.close()

    def _ask(self, what: str, case: Case | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._descendants.go_on()
        command = {"what": what, "case": case and dataclasses.asdict(case)}
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise HostError(f"{self.name}: it has ended (exit status: {self._process.poll()})\n{self._said()}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            line = stdout.readline() if selector.select(LIMIT) else ""
        if not line:
            raise HostError(f"{self.name}: no answer within {LIMIT:g} s, or ended\n{self._said()}")
        answer: dict[str, Any] = json.loads(line)
        if "wrong" in answer:
            raise WrongResultError(f"{self.name}: {answer['wrong']}")
        if "error" in answer:
            raise HostError(f"{self.name}: {answer['error']}")
        self._rest()
        return answer

    def _rest(self) -> None:
        if self._bears_stopping:
            self._descendants.stop()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:]


# --- the host's side


class Turns:
    """What a host does when it is told to."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._function: Function | None = None
        self._items: list[Tensor] = []

    def answer(self, what: str, case: Case | None) -> dict[str, Any]:
        if case is not None:
            self._function, self._items = case.function(), case.items()
        assert self._function is not None
        try:
            if what == "check":
                check(self._system, self._function, self._items)
            if what == "run":
                return self._run(self._function)
        except WrongResultError as error:
            return {"wrong": str(error)}
        except Exception as error:  # for the other side to raise
            return {"error": "".join(traceback.format_exception(error))[-2000:]}
        return {}

    def _run(self, function: Function) -> dict[str, float]:
        items = leaves(self._items)
        clocks = time.perf_counter, time.thread_time, time.process_time
        began = [clock() for clock in clocks]
        outcome = self._system.run(function, items)
        del outcome  # the graphs, which a training loop drops too
        wall, caller, all_threads = (clock() - then for clock, then in zip(clocks, began, strict=True))
        return {"wall": wall, "caller": caller, "beside": max(0.0, all_threads - caller)}


def serve(name: str, processes: int, commands: IO[str], answers: IO[str]) -> None:
    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    began = time.perf_counter()
    system = SYSTEMS[name].start(processes)
    try:
        system.run(partial(python_loss, steps=1), leaves([torch.ones(3)] * processes))
        say({"seconds": time.perf_counter() - began})
        turns = Turns(system)
        for line in commands:
            command = json.loads(line)
            say(turns.answer(command["what"], command["case"] and Case(**command["case"])))
    finally:
        system.close()


def main() -> None:
    end_with_parent(int(sys.argv[3]))  # even while stopped; the kernel then wakes and ends what is stopped of its group
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a system prints is no answer
    serve(sys.argv[1], int(sys.argv[2]), sys.stdin, answers)


if __name__ == "__main__":
    main()
