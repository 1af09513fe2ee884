"""What a pool is doing and what it holds, in figures."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PoolStats", "WorkerStats"]


class WorkerStats(NamedTuple):
    """One worker.

    Attributes:
        number: counts all workers of the pool from 1; a worker that takes the place of another has a number of its own.
        pid: of its process (with engines "thread" and "inline", of this one).
        resident_bytes: of its process, pages that it shares with others included; 0 where it has just ended.
        graphs: how many it keeps for a backward.
        graph_bytes: what these take; measured only with `graph_memory`, otherwise 0.
        calls: how many it has run.
        device: where it stands: "cpu", or like "cuda:0".
        node: the name of its machine, in a pool on a cluster; "" on this one.
        retiring: it takes no new calls, and ends when it keeps no graph any more.
    """

    number: int
    pid: int
    resident_bytes: int
    graphs: int
    graph_bytes: int
    calls: int
    retiring: bool
    device: str = "cpu"
    node: str = ""


class PoolStats(NamedTuple):
    """A pool, see `Pool.stats`.

    Attributes:
        workers: those that have started.
        resident_bytes: of all their processes.
        shared_bytes: shared memory in use for tensors on their way, for inputs of graphs that are kept, and for results.
        deaths: of workers, so far.
        reruns: calls and backwards that were given to another worker for it.
        calls_here: calls that ran in the caller's thread, because sending them would have taken longer.
        frames_sent: to workers, so far; a frame holds the messages of many calls.
        frames_received: from workers.
        bytes_sent: in frames, pickles and tensors of up to 8 KiB; larger ones lie in shared memory.
        bytes_received: likewise.
        system_calls: of the caller's process to write, read and wait for frames. (Engine "inline" has none of these.)
        bytes_copied: of tensors, by the caller, into frames and shared memory.
        slots_made: pieces of shared memory that the caller took.
    """

    workers: list[WorkerStats]
    resident_bytes: int
    shared_bytes: int
    deaths: int
    reruns: int
    calls_here: int
    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    system_calls: int
    bytes_copied: int
    slots_made: int
