"""How many CPUs other programs take, so that figures of a busy machine can be told from those that
may be relied on."""

from __future__ import annotations

import contextlib
import time

import psutil

from mpgrad.system import own_cpus

__all__ = ["OthersClock"]


class OthersClock:
    """Looks at the CPUs that this process may run on, from when it is made. Its descendants are no
    others."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def cpus(self) -> float:
        """How many of them others kept busy up to now. The system counts in ticks of 10 ms: after
        some tenths of a second."""
        own = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in own_seconds().items())
        return max(0.0, (busy_seconds() - self._busy - own) / (time.monotonic() - self._start))


def busy_seconds() -> float:
    """Of the CPUs that this process may run on, since the machine started."""
    times, ours = psutil.cpu_times(percpu=True), own_cpus()
    if ours and max(ours) < len(times):
        times = [times[number] for number in ours]
    # of a guest, time is counted as the user's, too; what the host takes from us counts as busy
    still = "idle", "iowait", "guest", "guest_nice"
    return sum(
        float(getattr(each, name)) for each in times for name in each._fields if name not in still
    )


def own_seconds() -> dict[int, float]:
    """CPU time of this process and its descendants, each with that of its children that have
    ended."""
    found, this = {}, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = float(sum(process.cpu_times()[:4]))
    return found
