"""How many CPUs this process may really use.

`os.cpu_count` counts what the machine has; schedulers and containers give less, by affinity or by quota.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from mpgrad.system import PORTABLE, own_cgroups, read_words

__all__ = [
    "THREAD_VARIABLES",
    "OthersClock",
    "cgroup_quota",
    "own_cpus",
    "thread_variables",
    "usable_cpus",
]

THREAD_VARIABLES = (  # of libraries that compute, which read them when they are loaded
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def thread_variables(threads: int | None) -> dict[str, str]:
    """What has these libraries use as many threads; None: as many as the variables say that are there."""
    return {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))


def usable_cpus() -> int:
    """At least 1: the CPUs of this process's affinity mask, or fewer where a cgroup grants it less time than that."""
    if PORTABLE:
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(own_cpus()), cgroup_quota(own_cgroups("cpu")))))


def own_cpus() -> list[int]:
    """The numbers of those that this process may run on."""
    return list(range(os.cpu_count() or 1)) if PORTABLE else sorted(os.sched_getaffinity(0))


def cgroup_quota(folders: Sequence[Path]) -> float:
    """CPU seconds per second that all these cgroups allow; infinity where nothing limits them."""
    return min(map(quota_of, folders), default=math.inf)


def quota_of(folder: Path) -> float:
    """The limit that one cgroup sets: `cpu.max` in version 2, `cpu.cfs_quota_us` in version 1."""
    both = read_words(folder / "cpu.max")
    if len(both) == 2 and both[0] != "max":
        return int(both[0]) / int(both[1])
    quota, period = read_words(folder / "cpu.cfs_quota_us"), read_words(folder / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return math.inf


class OthersClock:
    """Looks at the CPUs that this process may run on, from when it is made. Its descendants are no others."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def cpus(self) -> float:
        """How many of them others kept busy up to now. The system counts in ticks of 10 ms: after some tenths of a second."""
        own = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in own_seconds().items())
        return max(0.0, (busy_seconds() - self._busy - own) / (time.monotonic() - self._start))


def busy_seconds() -> float:
    """Of the CPUs that this process may run on, since the machine started."""
    times, ours = psutil.cpu_times(percpu=True), own_cpus()
    if ours and max(ours) < len(times):
        times = [times[number] for number in ours]
    # of a guest, time is counted as the user's, too; what the host takes from us counts as busy
    still = "idle", "iowait", "guest", "guest_nice"
    return sum(float(getattr(each, name)) for each in times for name in each._fields if name not in still)


def own_seconds() -> dict[int, float]:
    """CPU time of this process and its descendants, each with that of its children that have ended."""
    found, this = {}, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = float(sum(process.cpu_times()[:4]))
    return found
