"""`PoolStats` reports in numbers what a pool does and holds. Programs read its attributes, and
people read its text, which is a table. Both sides use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

__all__ = [
    "PoolStats",
    "WorkerStats",
    "size_of",
]


class WorkerStats(NamedTuple):
    """The numbers of one worker.

    Attributes:
        number: the worker's number, from 1. A worker that replaces another gets a new number.
        pid: the process id of the worker. With engines "thread" and "inline" it is the caller's.
        resident_bytes: the memory of the worker's process, including pages that it shares with
            others. It is 0 if the process has just ended, or no descriptor is free to look.
        graphs: the number of graphs that the worker keeps for backwards.
        graph_bytes: the memory of these graphs. It is measured only with `graph_memory`, and
            otherwise 0.
        calls: the number of calls that the worker has run.
        state: "busy", "idle" or "retiring". A retiring worker gets no new calls, and ends once it
            keeps no graphs.
        busy: the share of the time since its start in which the worker had work, 0 to 1.
        device: the worker's device, such as "cpu" or "cuda:0".
        node: the name of the worker's machine, in a pool on a cluster; "" on this machine.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     _ = pool.map(abs, range(10))
        ...     (worker,) = pool.stats().workers
        >>> worker.number, worker.calls, worker.retiring, worker.as_dict()["device"]
        (1, 10, False, 'cpu')
    """

    number: int
    pid: int
    resident_bytes: int
    graphs: int
    graph_bytes: int
    calls: int
    state: Literal["idle", "busy", "retiring"]
    busy: float
    device: str = "cpu"
    node: str = ""

    @property
    def retiring(self) -> bool:
        """Whether the worker gets no new calls, and ends once its graphs are no longer needed."""
        return self.state == "retiring"

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by the names of the attributes."""
        return self._asdict()


class PoolStats(NamedTuple):
    """The numbers of a pool, see `Pool.stats`. Printed, it is a table.

    Attributes:
        workers: the numbers of each worker that has started.
        resident_bytes: the memory of all their processes.
        shared_bytes: the shared memory in use for tensors on their way, for inputs of kept graphs,
            and for results.
        deaths: the number of workers that have died so far.
        kills: how many of these the pool killed, for a timeout, a forced cancel or an interrupt.
        reruns: the number of calls and backwards that another worker got after a death.
        recomputed: the number of calls that ran again for a backward, because their graph was
            dropped, lost or used up.
        graphs_dropped: the number of graphs that workers dropped, because memory was short, or
            because they keep none (`graphs="recompute"`).
        wrong_predictions: the number of backwards that ran right after their forwards
            (`graphs="auto"`) for a wrong gradient.
        operations: the number of maps, submitted calls and so on that have not ended.
        calls: the number of calls that workers have run so far. Workers that have ended are
            included.
        calls_left: the number of calls of these operations that have not ended yet.
        backwards: the number of backwards that workers have run so far. Items that were sent
            together share one. Backwards that ran right after their forwards (`graphs="auto"`) do
            not count.
        backwards_left: the number of backwards that have not ended yet.
        frames_sent: the number of frames sent to workers so far. A frame holds the messages of many
            calls.
        frames_received: the number of frames received from workers.
        bytes_sent: the bytes in frames: pickles and tensors of up to 8 KiB. Larger tensors are
            stored in shared memory.
        bytes_received: the bytes in received frames.
        system_calls: the caller's system calls to write, read and wait for frames. (Engine "inline"
            makes none.)
        bytes_copied: the bytes of tensors that the caller copied into frames and shared memory.
        slots_made: the number of pieces of shared memory that the caller took.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     _ = pool.map(abs, range(10))
        ...     stats = pool.stats()
        >>> stats.calls, stats.calls_left, stats.deaths, len(stats.as_dict()["workers"])
        (10, 0, 0, 1)
    """

    workers: list[WorkerStats]
    resident_bytes: int
    shared_bytes: int
    deaths: int
    kills: int
    reruns: int
    recomputed: int
    graphs_dropped: int
    wrong_predictions: int
    operations: int
    calls: int
    calls_left: int
    backwards: int
    backwards_left: int
    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    system_calls: int
    bytes_copied: int
    slots_made: int

    def as_dict(self) -> dict[str, Any]:
        """Return only numbers, strings, dicts and lists, as for JSON."""
        return {**self._asdict(), "workers": [each.as_dict() for each in self.workers]}

    def __str__(self) -> str:
        return "\n".join(
            [
                *aligned([HEADER, *map(row_of, self.workers)]),
                f"operations: {self.operations} under way",
                f"calls:      {self.calls:,} done, {self.calls_left:,} left",
                f"backwards:  {self.backwards:,} done, {self.backwards_left:,} left",
                f"deaths:     {self.deaths:,} of workers, {self.kills:,} by the pool",
                f"run again:  {self.reruns:,} calls and backwards after deaths, "
                f"{self.recomputed:,} calls for their graphs",
                f"dropped:    {self.graphs_dropped:,} graphs, {self.wrong_predictions:,} backwards "
                "with a wrong prediction",
                f"memory:     {size_of(self.resident_bytes)} of workers; "
                f"{size_of(self.shared_bytes)} shared for tensors",
                f"sent:       {size_of(self.bytes_sent)} in {self.frames_sent:,} frames",
                f"received:   {size_of(self.bytes_received)} in {self.frames_received:,} frames",
                f"copied:     {size_of(self.bytes_copied)} of tensors; {self.slots_made:,} slots "
                "made",
            ]
        )


HEADER = "worker", "node", "device", "pid", "state", "busy", "calls", "graphs", "memory"
LEFT = {"node", "device", "state"}  # columns of words


def row_of(worker: WorkerStats) -> tuple[str, ...]:
    return (
        str(worker.number),
        worker.node,
        worker.device,
        str(worker.pid),
        worker.state,
        f"{worker.busy:.0%}",
        f"{worker.calls:,}",
        f"{worker.graphs:,}",
        size_of(worker.resident_bytes),
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns. The first row holds the columns' names.

    Columns that are empty except for their name are left out.
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(rows) == 1]
    padded = []
    for name, *cells in columns:
        width = max(map(len, (name, *cells)))
        padded.append(
            [each.ljust(width) if name in LEFT else each.rjust(width) for each in (name, *cells)]
        )
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def size_of(nbytes: int) -> str:
    """Return the size as text, such as "1.5 MiB"."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
