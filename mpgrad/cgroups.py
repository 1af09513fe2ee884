"""What a group of processes may have: Linux's control groups (versions 1 and 2), which containers and batch systems set."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpgrad.system import CGROUPS, PORTABLE, PROC, free_on_machine

__all__ = ["cgroup_folders", "free_memory", "limiting", "memory_limit", "memory_used", "own_cgroups", "read_words"]

MEMBERSHIP = PROC / "self/cgroup"
SPARED = 0.05  # of a group's limit: for what is taken without asking. At the limit the kernel kills, and says nothing before
KNOWN_FOR = 0.5  # seconds, at most, for which the groups that limit memory are those that were found, which takes 0.7 ms


def own_cgroups(controller: str) -> list[Path]:
    """Where limits of `controller` for this process may be; nowhere on other systems, and where that cannot be read."""
    try:
        return [] if PORTABLE else list(cgroup_folders(CGROUPS, MEMBERSHIP, controller))
    except (OSError, ValueError):
        return []


def cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Of this process's cgroup and of all above it."""
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


def limiting(folders: Sequence[Path]) -> list[Path]:
    """Those that set a limit of memory that this machine could exceed."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [folder for folder in folders if memory_limit(folder) < there]


@functools.lru_cache(maxsize=1)
def limiting_now(root: Path, membership: Path, moment: int) -> list[Path]:
    """Of this process's groups. Looked for once in each moment, since groups and their limits may change."""
    return limiting(own_cgroups("memory"))


def free_memory() -> int:
    """Bytes that this process can still have: of the machine's, and within the limits of all groups that it is in.

    What other processes of the groups take meanwhile, they take from the same.
    """
    folders = limiting_now(CGROUPS, MEMBERSHIP, int(time.monotonic() / KNOWN_FOR))
    rooms = [int((1 - SPARED) * memory_limit(folder)) - memory_used(folder) for folder in folders]
    return max(0, min(free_on_machine(), *rooms)) if rooms else free_on_machine()


def memory_limit(folder: Path) -> float:
    """In bytes: `memory.max` in version 2, `memory.limit_in_bytes` in version 1."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = read_words(folder / name)
        if words and words[0] != "max":
            return int(words[0])
    return math.inf


def memory_used(folder: Path) -> int:
    """In bytes, without the file cache that the kernel gives up when memory is wanted."""
    words = read_words(folder / "memory.current") or read_words(folder / "memory.usage_in_bytes") or ["0"]
    stat = read_words(folder / "memory.stat")
    counts = dict(zip(stat[::2], map(int, stat[1::2]), strict=False))
    cache = [counts.get(f"total_{kind}", counts.get(kind, 0)) for kind in ("active_file", "inactive_file")]
    return max(0, int(words[0]) - sum(cache))


def read_words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # this cgroup does not set it, or a container does not show it
        return []
