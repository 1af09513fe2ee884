"""What a pool is doing and what it holds, in figures: attributes for programs, as text a table for
people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["PoolStats", "WorkerStats", "size_of"]


class WorkerStats(NamedTuple):
    """One worker.

    Attributes:
        number: counts all workers of the pool from 1; a worker that takes the place of another has
            a number of its own.
        pid: of its process (with engines "thread" and "inline", of this one).
        resident_bytes: of its process, pages that it shares with others included; 0 where it has
            just ended, or no descriptor is free to look.
        graphs: how many it keeps for a backward.
        graph_bytes: what these take; measured only with `graph_memory`, otherwise 0.
        calls: how many it has run.
        state: "busy"; "idle"; or "retiring": it takes no new calls, and ends when it keeps no graph
            any more.
        busy: share of the time since its start in which it had something to do, 0 to 1.
        device: where it stands: "cpu", or like "cuda:0".
        node: the name of its machine, in a pool on a cluster; "" on this one.

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
        """Whether it takes no new calls, and ends once nobody needs its graphs."""
        return self.state == "retiring"

    def as_dict(self) -> dict[str, Any]:
        """By the names of the attributes."""
        return self._asdict()


class PoolStats(NamedTuple):
    """A pool, see `Pool.stats`. Printed, it is a table.

    Attributes:
        workers: those that have started.
        resident_bytes: of all their processes.
        shared_bytes: shared memory in use for tensors on their way, for inputs of graphs that are
            kept, and for results.
        deaths: of workers, so far.
        kills: how many of these the pool brought about, for a timeout, a forced cancel or an
            interrupt.
        reruns: calls and backwards that were given to another worker for a death.
        recomputed: calls that ran again for a backward, because their graph was gone: dropped,
            lost, or used up.
        graphs_dropped: by workers, for want of memory, or because none are to be kept
            (`graphs="recompute"`).
        wrong_predictions: backwards that ran right after their forwards (`graphs="auto"`) with a
            gradient that did not come.
        operations: maps, submitted calls and the like that have not ended.
        calls: that workers have run, so far; also workers that have ended.
        calls_left: of these operations, sent or waiting.
        backwards: that workers were asked for and have run, so far; items that travelled together
            have one for all. Those that ran right after their forwards (`graphs="auto"`) are not
            counted.
        backwards_left: sent or waiting.
        frames_sent: to workers, so far; a frame holds the messages of many calls.
        frames_received: from workers.
        bytes_sent: in frames, pickles and tensors of up to 8 KiB; larger ones lie in shared memory.
        bytes_received: likewise.
        system_calls: of the caller's process to write, read and wait for frames. (Engine "inline"
            has none of these.)
        bytes_copied: of tensors, by the caller, into frames and shared memory.
        slots_made: pieces of shared memory that the caller took.

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
        """Of numbers, strings, dicts and lists only, as for JSON."""
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
    """Lines of columns, the first row their names; columns that are empty but for it are left
    out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(rows) == 1]
    padded = []
    for name, *cells in columns:
        width = max(map(len, (name, *cells)))
        padded.append(
            [each.ljust(width) if name in LEFT else each.rjust(width) for each in (name, *cells)]
        )
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def size_of(nbytes: int) -> str:
    """As a person reads it."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
