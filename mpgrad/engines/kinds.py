"""Defines the protocol of an engine, which starts workers and reports which have answered or ended,
and lists the engines by name. It runs in the caller.

                      scheduler ── start, wait, wake, close ──► Engine
    scheduler ── send, receive, carry, drop, kill, end ──► WorkerLink ════════ Link ── worker's loop

An engine knows nothing of calls, graphs or gradients: its links pass frames on unchanged. To write
one, give its `Traits`, and start workers that run an entry point of `mpgrad.workers.main` with
their end of a pipe (`serve_in_process` in a process, `serve` in a thread). Then add it to
`ENGINES`. If the two sides share no memory, the links replicate it (see
`wire.frames.SlabReplicas`).

Only this package compares the names of engines.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Literal, NamedTuple, Protocol

from mpgrad.engines.launch import Exit, ThreadLauncher, process_launcher
from mpgrad.engines.sockets import InlineEngine, SocketEngine
from mpgrad.wire.frames import Link
from mpgrad.wire.pipe import Traffic

__all__ = [
    "ENGINES",
    "Engine",
    "EngineKind",
    "EngineName",
    "EngineRequest",
    "Traits",
    "WorkerLink",
    "traits_of",
]


class Traits(NamedTuple):
    """The differences between engines that matter outside this package."""

    # A worker is a process of its own. It can be killed, and its work given to another one.
    is_process: bool
    # A worker has its own random generators, so that each item can have a seed.
    own_generators: bool
    may_resize: bool
    on_cpu: bool
    on_devices: bool
    in_caller: bool = False  # calls run in the thread that waits for them
    remote: bool = False  # workers may be on other machines, behind an agent


class WorkerLink(Link, Protocol):
    """The caller's end of the link to one worker. One thread uses it."""

    number: int  # the worker's number
    # Whether the worker's machine checks which calls take too long, by its own clock. Otherwise the
    # scheduling thread checks it.
    keeps_time: bool
    exit: Exit | None  # set after `end`, once the worker has ended
    # The call that takes too long, while the worker has sent nothing since: chunk and position, or
    # -1 if it has not begun the chunk.
    overrun: tuple[int, int] | None
    is_leaving: bool  # it gets no more calls, so its place may be given to another worker
    # The chunks that an agent has noted as skipped, by place in the record. Everything that the
    # worker had answered before has arrived.
    skipped: dict[int, int]

    @property
    def progress_record(self) -> memoryview | None:
        """A copy of the worker's `ProgressRecord`, of int64, or None if the record is shared."""

    @property
    def node(self) -> str:
        """The name of the worker's machine, or "" for this one."""

    @property
    def has_place(self) -> bool:
        """Whether the worker runs, or will soon. Otherwise it waits for room on a cluster, perhaps
        forever."""

    @property
    def lost(self) -> str:
        """Why the worker has ended, if this is known not to be its own fault; otherwise ""."""

    @property
    def crash_traceback(self) -> str:
        """The worker's Python stack, as faulthandler writes it. It is "" if the worker left none,
        or left it to the scheduler (see `agent_messages.CrashTraceback`)."""

    @property
    def could_start(self) -> bool:
        """Whether the worker's machine was lost, but had started workers before. Then the worker's
        end does not mean that none can be started."""

    def resident_bytes(self, pid: int) -> int:
        """Return the memory of the worker's process, whose id is `pid`. It is 0 if the process has
        ended, or while the size is not known. Any thread may call this."""

    def has_more(self) -> bool:
        """Return whether `receive` would return a frame, or report the end of the link, at this
        moment."""

    def skip(self, place: int, chunk: int) -> None:
        """Note a skipped chunk in the worker's `ProgressRecord` if the record is not shared.
        Otherwise do nothing."""

    def follow(self, seconds: float) -> None:
        """Keep the copy of the `progress_record` up to date for this number of seconds. Without
        this, the copy may be out of date except at an overrun and at the end."""

    def limit(self, chunk: int, seconds: float | None) -> None:
        """Let each call of the chunk, which is sent next, take up to `seconds`. None: the chunk is
        answered. Only links with `keeps_time` do this."""

    def kill(self, by: int = signal.SIGKILL) -> None:
        """End the worker by a signal, even in the middle of a call. A worker that is not a process
        ends after its call."""

    def end(self) -> None:
        """Close the link of a worker that has died or was asked to stop.

        If its `exit` is not known yet, a later `wait` returns the link. A worker that does not end
        by itself may be killed.
        """


class Engine(Protocol):
    """Starts workers. One thread uses an engine, except for `wake`. After `close` no worker is
    left."""

    traffic: Traffic
    # the number of workers that there is room for, and that should run; None: as many as requested
    room: int | None
    # Whether a worker starts as a copy of this process. Then no other thread should run at that
    # moment.
    copies_caller: bool

    def start(self, number: int) -> WorkerLink:
        """Start worker `number`, and return at once. The first message tells it what to do.

        Raises:
            OSError: the system refuses now; the caller may try again.
            RuntimeError: workers can no longer be started.
        """

    def wait(self, seconds: float | None) -> Sequence[WorkerLink]:
        """Sleep until workers have answered or ended, or until a thread calls `wake`, but at most
        this number of seconds. Return the links of these workers.

        A closed link is returned once more, when its worker's `exit` is known.
        """

    def wake(self) -> None:
        """End the current `wait`, or the next one. Any thread may call this, with any lock held. It
        neither waits nor raises."""

    def close(self) -> None: ...


# --- the engines by name

EngineName = Literal["process", "thread", "inline", "stream", "ray"]


class EngineRequest(NamedTuple):
    """The options of a pool that matter to some engine."""

    workers: int | None = None  # None: as many as there is room for
    context: BaseContext | str | None = None  # multiprocessing's
    ray: Any = None  # a `cluster.ray.Ray`
    threads: int | None = None  # for each worker


class EngineKind(NamedTuple):
    traits: Traits
    make: Callable[[EngineRequest], Engine]


def processes(wanted: EngineRequest) -> Engine:
    return SocketEngine(process_launcher(wanted.context, wanted.threads))


def threads(wanted: EngineRequest) -> Engine:
    return SocketEngine(ThreadLauncher())


def inline(wanted: EngineRequest) -> Engine:
    return InlineEngine()


def ray_cluster(wanted: EngineRequest) -> Engine:
    # imported by name, because `cluster` is another package, which few programs need
    package = importlib.import_module("mpgrad.cluster.ray")
    engine: Engine = package.ray_engine(wanted.ray, wanted.workers)
    return engine


ENGINES = {
    "process": EngineKind(
        Traits(is_process=True, own_generators=True, may_resize=True, on_cpu=True, on_devices=True),
        processes,
    ),
    "thread": EngineKind(
        Traits(
            is_process=False, own_generators=False, may_resize=True, on_cpu=True, on_devices=False
        ),
        threads,
    ),
    "inline": EngineKind(
        Traits(
            is_process=False,
            own_generators=True,
            may_resize=False,
            on_cpu=True,
            on_devices=False,
            in_caller=True,
        ),
        inline,
    ),
    "stream": EngineKind(
        Traits(
            is_process=False, own_generators=False, may_resize=True, on_cpu=False, on_devices=True
        ),
        threads,
    ),
    "ray": EngineKind(
        Traits(
            is_process=True,
            own_generators=True,
            may_resize=True,
            on_cpu=True,
            on_devices=False,
            remote=True,
        ),
        ray_cluster,
    ),
}


def traits_of(engine: str) -> Traits:
    """Return the traits of an engine.

    Raises:
        ValueError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)} (engine: {engine!r})")
    return ENGINES[engine].traits
