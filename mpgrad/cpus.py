"""How many CPUs this process may really use.

`os.cpu_count` counts what the machine has; schedulers and containers give less, by affinity or by quota.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from mpgrad.system import PORTABLE, own_cgroups, read_words

__all__ = [
    "THREAD_VARIABLES",
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
