"""What an engine is: it starts workers and says when they have answered. And which there are, by
name. Caller's side.

                      scheduler ── start, wait, wake, close ──► Engine
    scheduler ── send, receive, carry, drop, kill, end ──► WorkerLink ════════ Link ── worker's loop
An engine knows nothing of calls, graphs or gradients: frames pass through its links as they are. To
write one: say its `Traits`, start workers that run an entry point of `mpgrad.workers.main` with
their end of a pipe (`serve_in_process` in a process, `serve` in a thread), and add it to `ENGINES`.
Where the two sides share no memory, the links replicate it (see `wire.frames.SlabReplicas`).

Nobody outside this package compares the names of engines.
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
    """In what engines differ for who uses them."""

    # a worker is a process of its own: it can be killed, and what it had given to another one
    is_process: bool
    # a worker draws random numbers of its own, so that an item can have a seed
    own_generators: bool
    may_resize: bool
    on_cpu: bool
    on_devices: bool
    in_caller: bool = False  # calls run in the thread that asks for them
    remote: bool = False  # workers may be on other machines, behind an agent


class WorkerLink(Link, Protocol):
    """The caller's end of the link to one worker. One thread uses it."""

    number: int  # of the worker
    # which calls take too long is seen on the worker's machine, by its clock; else by ours
    keeps_time: bool
    exit: Exit | None  # after `end`, once the worker has ended
    # such a call, of a worker that is silent since: chunk and position, -1: not begun
    overrun: tuple[int, int] | None
    is_leaving: bool  # it is given no more calls: its place may be another's
    # what an agent has written, by place: all that the worker had answered by then has come
    skipped: dict[int, int]

    @property
    def progress_record(self) -> memoryview | None:
        """A copy of the worker's `ProgressRecord`, of int64; None: they are shared."""

    @property
    def node(self) -> str:
        """The name of the machine that it is on; "" for this one."""

    @property
    def has_place(self) -> bool:
        """The worker is there, or will be in a moment; else it waits for room on a cluster, for
        ever perhaps."""

    @property
    def lost(self) -> str:
        """Why it is not the worker's fault that it has ended, where it is known not to be."""

    @property
    def crash_traceback(self) -> str:
        """Its Python stack, as faulthandler writes it; "" where it left none, or left it to us (see
        `agent_messages.CrashTraceback`)."""

    @property
    def could_start(self) -> bool:
        """Its machine was lost, but is known to start workers: that it has ended is no sign that
        none can be started."""

    def resident_bytes(self, pid: int) -> int:
        """Memory of the worker's process, which is `pid`; 0 where it has ended, or nobody knows
        yet. Any thread."""

    def has_more(self) -> bool:
        """Whether there is something to `receive` at this moment, or the end."""

    def skip(self, place: int, chunk: int) -> None:
        """Write that into the worker's `ProgressRecord`, which it does not share with us; or do
        nothing, where it does."""

    def follow(self, seconds: float) -> None:
        """Keep the copy of the `progress_record` up to date for so long; else it is what it was at
        an overrun, or at the end."""

    def limit(self, chunk: int, seconds: float | None) -> None:
        """Each call of the chunk, which is sent next, may take so many seconds; None: it is
        answered. Where it `keeps_time`."""

    def kill(self, by: int = signal.SIGKILL) -> None:
        """End the worker by a signal, also in the middle of a call; what is no process ends after
        the call that it is in."""

    def end(self) -> None:
        """The worker has died or was told to stop: close the link. Where its `exit` is still to
        come, `wait` returns it then.

        What does not end by itself may be killed meanwhile.
        """


class Engine(Protocol):
    """Starts workers. One thread uses it, but for `wake`; after `close` no worker is left."""

    traffic: Traffic
    # for so many workers, and that is how many there are to be; None: as many as are asked for
    room: int | None
    # a worker begins as what this process is at that moment: nothing else should go on in it
    copies_caller: bool

    def start(self, number: int) -> WorkerLink:
        """Start worker `number`; returns at once. What it is to be is said by the first message.

        Raises:
            OSError: the system refuses; it may be tried again.
            RuntimeError: none can be started any more.
        """

    def wait(self, seconds: float | None) -> Sequence[WorkerLink]:
        """Sleep until workers have answered or ended, whose links it returns, or somebody calls
        `wake`; at most so long.

        A link that was closed is returned once more, when its worker's `exit` has come.
        """

    def wake(self) -> None:
        """End a `wait`, this one or the next. Any thread, with any lock held; it neither waits nor
        raises."""

    def close(self) -> None: ...


# --- the engines by name

EngineName = Literal["process", "thread", "inline", "stream", "ray"]


class EngineRequest(NamedTuple):
    """What a pool was asked for, as far as engines differ in it."""

    workers: int | None = None  # None: as many as there is room for
    context: BaseContext | str | None = None  # of multiprocessing
    ray: Any = None  # a `cluster.ray.Ray`
    threads: int | None = None  # of each worker


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
    # by its name: `cluster` is another package, which few need
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
    """
    Raises:
        ValueError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)} (engine: {engine!r})")
    return ENGINES[engine].traits
