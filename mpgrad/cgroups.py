"""What a group of processes may have: Linux's control groups (versions 1 and 2), which containers and batch systems set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from mpgrad.system import CGROUPS, PORTABLE, PROC

__all__ = ["cgroup_folders", "memory_limit", "memory_used", "own_cgroups", "read_words"]

MEMBERSHIP = PROC / "self/cgroup"


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
