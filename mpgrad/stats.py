"""What a pool is doing and what it holds, in figures: attributes for programs, as text a table for
people.

And how far an operation has come, shown while it goes on (`Reporter`). Who waits for a backward is
in PyTorch's code, and the scheduling thread may not wait for a terminal. So another thread looks
ten times a second, and shows what it has found: what runs knows nothing of it.

    operation, pool ◄── look ── Reporter's thread ──► show: a bar of tqdm, or the caller's function
Guarantees: the last look comes after the end; a look and a show together take no more than a 20th
of the time.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from mpgrad.errors import contextmanager

__all__ = [
    "PoolStats",
    "Progress",
    "ProgressState",
    "Reporter",
    "WorkerStats",
    "reported",
    "size_of",
]


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


# --- progress


# done, in all, seconds left; None where that is not known, or there is nothing yet
Show = Callable[[int, int | None, float | None], object]
Progress = bool | str | Show  # False: nothing; True: a bar; a string: a bar with this description

log = logging.getLogger("mpgrad")

INTERVAL = 0.1  # seconds between two looks
PAUSE = 20  # or so many times what the last one took


class ProgressState(NamedTuple):
    done: int
    total: int | None  # None where it is not known
    is_over: bool = False  # nothing more will come


class Reporter:
    """Shows what `look` finds, from now on to `end`, or until that says that all is over.

    Raises:
        ImportError: a bar is asked for, and tqdm is not installed.
        TypeError: `progress` is none of what it may be, or a function that does not take done,
            total and seconds left.
    """

    def __init__(self, progress: Progress, look: Callable[[], ProgressState]) -> None:
        self._look = look
        self._progress = progress
        self._display: contextlib.AbstractContextManager[Show]
        if callable(progress):
            check_takes_three(progress)
            self._display = contextlib.nullcontext(progress)
        elif isinstance(progress, bool | str):
            self._display = Bar(progress if isinstance(progress, str) else None, look().total)
        else:
            expected = (
                "progress must be True, False, a description, or a function of done, total and "
                "seconds left"
            )
            raise TypeError(f"{expected} (progress: {progress!r})")
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpgrad-progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Show what there is now, and nothing more."""
        self._has_ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._display as show:
                self._show_all(show)
        except Exception as error:
            # of the caller's function, or of its terminal: no reason for the work to stop
            log.warning(
                "progress is not shown any more: %r raised %s: %s",
                self._progress,
                type(error).__name__,
                error,
            )

    def _show_all(self, show: Show) -> None:
        first = shown = None
        while True:
            is_last = self._has_ended.is_set()  # asked before the look
            now = time.monotonic()
            found = self._look()
            if found.done and first is None:
                first = now, found.done
            if found[:2] != shown:
                shown = found[:2]
                show(
                    found.done,
                    found.total or None,
                    None if first is None else seconds_left(now, *first, found),
                )
            if is_last or found.is_over:
                return
            self._has_ended.wait(max(INTERVAL, PAUSE * (time.monotonic() - now)))


def check_takes_three(show: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(show)
    except ValueError:  # of some that are written in C nothing is known
        return
    try:
        signature.bind(0, None, None)
    except TypeError as error:
        expected = (
            "progress must take three arguments: how many are done, how many there are, and the "
            "seconds left"
        )
        raise TypeError(f"{expected} ({error}; progress: {show!r})") from None


def seconds_left(now: float, since: float, done: int, found: ProgressState) -> float | None:
    """If what is left goes on as it has since so many were done; what came before that also held
    the start of workers."""
    if found.total is None:
        return None
    if found.done >= found.total:
        return 0.0
    if found.done <= done:
        return None
    return (now - since) / (found.done - done) * (found.total - found.done)


class Bar:
    """A bar of tqdm's, in a notebook its widget, whose total may change."""

    def __init__(self, description: str | None, total: int | None) -> None:
        try:
            tqdm = importlib.import_module("tqdm.auto").tqdm
        except ImportError as error:
            raise ImportError(
                "progress needs tqdm, which is not installed; pip install tqdm"
            ) from error
        # each show counts: they are rare enough
        self._bar: Any = tqdm(total=total, desc=description, mininterval=0, miniters=0)

    def __enter__(self) -> Show:
        return self._move

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _move(self, done: int, total: int | None, _: float | None) -> None:
        if total is not None and total != self._bar.total:
            self._bar.total = total
            if (widget := getattr(self._bar, "container", None)) is not None:
                widget.children[1].max = total
        self._bar.update(done - self._bar.n)


@contextmanager
def reported(progress: Progress, look: Callable[[], ProgressState]) -> Iterator[None]:
    """Show what `look` finds until the block ends."""
    if progress is False:
        yield
        return
    reporter = Reporter(progress, look)
    try:
        yield
    finally:
        reporter.end()
