"""All processes that a program has started, whatever became of them: to be watched, stopped and ended together.

Servers leave their family (a daemon's parent is init), so everything that such a program starts carries a mark in its
environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

import psutil

MARK = "MPGRAD_BENCHMARK_CASE"  # in the environment of everything that belongs together


class Descendants:
    """All that a process has started, also what has left its family meanwhile."""

    def __init__(self, pid: int, mark: str) -> None:
        self._process = psutil.Process(pid)
        self._mark = f"{MARK}={mark}".encode()
        self._seen: set[psutil.Process] = {self._process}

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._seen}

    def look(self) -> None:
        with contextlib.suppress(psutil.Error):
            self._seen.update(self._process.children(recursive=True))

    def look_everywhere(self) -> None:
        """What was born and orphaned between two looks still carries the mark of its case."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self._mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                    self._seen.add(process)

    def left(self) -> list[psutil.Process]:
        return [process for process in self._seen if process.pid != self._process.pid and lives(process)]

    @property
    def living(self) -> set[psutil.Process]:
        self.look()
        self._seen = {process for process in self._seen if lives(process)}
        return self._seen

    def stop(self) -> None:
        """No CPU for any of them until `go_on`."""
        self._tell(signal.SIGSTOP)

    def go_on(self) -> None:
        self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        for process in self.living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                process.kill()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cpu_seconds(processes: set[psutil.Process]) -> float:
    """What all their threads have run so far, to the nanosecond: `cpu_times` counts in steps of 10 ms."""
    nanoseconds = 0
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                nanoseconds += int(task.read_text().split()[0])
    return nanoseconds / 1e9


PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
