"""How many CPUs this process may really use.

`os.cpu_count` counts what the machine has; schedulers and containers give less, by affinity or by quota.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from mpgrad.system import CGROUPS, PORTABLE, PROC

__all__ = ["CGROUPS", "MEMBERSHIP", "cgroup_folders", "cgroup_quota", "read_words", "usable_cpus"]

MEMBERSHIP = PROC / "self/cgroup"


def usable_cpus() -> int:
    """At least 1: the CPUs of this process's affinity mask, or fewer where a cgroup grants it less time than that."""
    if PORTABLE:
        return os.cpu_count() or 1
    quota = cgroup_quota(CGROUPS, MEMBERSHIP) if MEMBERSHIP.exists() else math.inf
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota)))


def cgroup_quota(root: Path, membership: Path) -> float:
    """CPU seconds per second that this process's cgroup and all above it allow; infinity where nothing limits them."""
    return min((quota_of(folder) for folder in cgroup_folders(root, membership, "cpu")), default=math.inf)


def cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Where the limits of `controller` for this process are: of its cgroup and of all above it, in versions 1 and 2."""
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        folder = base / group.lstrip("/")
        for each in (folder, *folder.parents):
            yield each
            if each == base:
                break


def quota_of(folder: Path) -> float:
    """The limit that one cgroup sets: `cpu.max` in version 2, `cpu.cfs_quota_us` in version 1."""
    both = read_words(folder / "cpu.max")
    if len(both) == 2 and both[0] != "max":
        return int(both[0]) / int(both[1])
    quota, period = read_words(folder / "cpu.cfs_quota_us"), read_words(folder / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return math.inf


def read_words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # this cgroup does not set it, or a container does not show it
        return []
