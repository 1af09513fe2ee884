"""`Timeline` is the object that `Pool.timeline` returns. A `Trace` holds its notes. `events_of`
converts it to Chrome's trace events, which Perfetto (ui.perfetto.dev) opens. This module runs in
the caller only.

    a thread of the caller ──► `span` ──► CallerSpan
    the scheduling thread (`scheduling.tracer`) ──► TracedChunk ◄── a worker's `ChunkTrace`
    a Trace that has ended ──► `events_of`

Process 1 is the caller, with a track for each of its threads. Process 1 + n is worker n. Slices of
a track are side by side or nested: a chunk contains the slices of its items.
Format: "Trace Event Format", Google,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

`draw` makes a picture of a trace. It has one track for each worker, and below them one for each
thread of the caller. It needs matplotlib.

Assumes: any thread appends to `caller_spans`; only the scheduling thread changes the rest. Times
    are nanoseconds of `time.monotonic_ns`, and workers' times are by their own clock.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from mpgrad.errors import contextmanager
from mpgrad.wire.messages import Span

__all__ = [
    "CALLER",
    "CallerSpan",
    "Event",
    "Timeline",
    "Trace",
    "TracedCall",
    "TracedChunk",
    "WorkerName",
    "draw",
    "events_of",
]


class Timeline:
    """A record of what a pool's workers and the caller's threads do in a `with` block.

    See `Pool.timeline`.

    Example:
        >>> import os, mpgrad
        >>> with mpgrad.Pool(processes=1) as pool, pool.timeline() as timeline:
        ...     results = pool.map(abs, [-1, 2])
        >>> sorted({event["pid"] for event in timeline.events})
        [1, 2]
        >>> timeline.save(os.devnull)      # or as trace.json, for https://ui.perfetto.dev
        >>> timeline.draw("run.png")       # doctest: +SKIP
    """

    def __init__(self, scheduler: Any, path: str | os.PathLike[str] | None) -> None:
        self._scheduler = scheduler
        self._path = None if path is None else Path(path)
        self._file: TextIO | None = None
        self._own_trace: Trace | None = None

    def __enter__(self) -> Timeline:
        """Begin to record.

        Raises:
            RuntimeError: the pool is already recording a timeline, or this one has been recorded.
            OSError: the file cannot be written.
            PoolClosedError: the pool was closed or terminated.
        """
        if self._own_trace is not None:
            raise RuntimeError("a timeline is recorded once; get another one from the pool")
        trace = Trace()
        self._scheduler.begin_trace(trace)
        try:
            if self._path is not None:
                # The file is opened now, because this may fail, and the run may be long.
                self._file = self._path.open("w")
        except BaseException:
            self._scheduler.end_trace()
            raise
        self._own_trace = trace
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._scheduler.end_trace()
        finally:
            if self._file is not None:
                with self._file:
                    self._file.write(self._trace)

    @functools.cached_property
    def events(self) -> list[Event]:
        """The events in the format of Chrome's traces.

        "ph" is "M" for names and "X" for slices, with "ts" and "dur" in microseconds. Process 1 is
        the caller, and process 1 + n is worker n. "cat" is the kind of slice; `docs/timeline.md`
        lists the kinds.
        """
        if self._own_trace is None:
            raise RuntimeError(
                "the timeline has not been recorded; put the calls into a block: `with timeline:`"
            )
        if self._own_trace.ended is None:
            raise RuntimeError(
                "the timeline is still being recorded; read it after its `with` block"
            )
        return events_of(self._own_trace)

    @property
    def _trace(self) -> str:
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, which https://ui.perfetto.dev opens."""
        Path(path).write_text(self._trace)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture. The end of the name gives the format: .png, .pdf or .svg.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        draw(self.events, CALLER, path)

    def __repr__(self) -> str:
        if self._own_trace is None:
            return "<mpgrad timeline, not begun>"
        if self._own_trace.ended is None:
            return "<mpgrad timeline, being recorded>"
        return f"<mpgrad timeline, {len(self.events)} events>"


class CallerSpan(NamedTuple):
    """A span of time in which one of the caller's threads did one kind of work."""

    thread: int
    kind: str  # "pickles", "packs", "waits" or "makes results"
    function: str  # its name, or ""
    began: int
    ended: int


class TracedCall(NamedTuple):
    """A call, or the backward of a call."""

    items: int | range
    function: str  # its name, or ""


@dataclass
class TracedChunk:
    """Calls, or backwards, that a worker was sent in one message."""

    worker: int
    # "forward", "backward", or "sums" (of capture gradients)
    phase: str
    calls: Sequence[TracedCall]
    sent: int
    answered: int | None = None
    # The next three use the worker's clock.
    began: int = 0
    ended: int = 0
    spans: Sequence[Span] = ()
    # when the worker died without an answer
    died: int | None = None


class WorkerName(NamedTuple):
    """The number, process, device and machine of a worker."""

    number: int
    pid: int
    device: str
    node: str  # "" for this machine


class Trace:
    """The notes of a timeline, from its making to `end`."""

    def __init__(self) -> None:
        self.began = time.monotonic_ns()
        self.ended: int | None = None
        # whether the workers were notified; they time the chunks that they are sent from then on
        self.is_known = False
        self.caller_spans: list[CallerSpan] = []
        # in the order in which they were sent
        self.chunks: list[TracedChunk] = []
        self.workers: dict[int, WorkerName] = {}
        # the names of the caller's threads
        self.threads: dict[int, str] = {}

    @contextmanager
    def span(self, kind: str, function: str) -> Iterator[None]:
        """Note that this thread does this kind of work in the block."""
        thread, began = threading.get_ident(), time.monotonic_ns()
        self.threads.setdefault(thread, threading.current_thread().name)
        try:
            yield
        finally:
            self.caller_spans.append(CallerSpan(thread, kind, function, began, time.monotonic_ns()))

    def end(self) -> None:
        self.ended = time.monotonic_ns()


# --- as events

Event = dict[str, Any]

CALLER = 1  # the number of the caller's process
CALLS = 1  # the number of a worker's thread that runs calls
PHASES = {"forward": "calls", "backward": "backwards", "sums": "sums of gradients"}


class Slice(NamedTuple):
    """A slice of a track. Times are nanoseconds, by the caller's clock."""

    pid: int
    tid: int
    began: int
    ended: int
    name: str
    kind: str
    args: dict[str, object]


def events_of(trace: Trace) -> list[Event]:
    """Return the names, then the slices of each track, ordered by their beginnings. Outer slices
    come first."""
    assert trace.ended is not None
    slices = list(caller_slices(trace))
    chunks = list(trace.chunks)
    for worker in list(trace.workers.values()):
        own = [chunk for chunk in chunks if chunk.worker == worker.number]
        slices += worker_slices(worker, own, trace.ended)
    slices.sort(key=lambda each: (each.pid, each.tid, each.began, -each.ended))
    shown = (each for each in slices if each.began < trace.ended)
    return [
        *names(trace),
        *(slice_event(each, trace.began, trace.ended) for each in shown),
    ]


def names(trace: Trace) -> Iterator[Event]:
    yield name_event("process_name", CALLER, 0, name="caller")
    for thread, name in enumerate(list(trace.threads.values()), start=1):
        yield name_event("thread_name", CALLER, thread, name=name)
    for number, worker in sorted(trace.workers.items()):
        where = [
            f"pid {worker.pid}",
            worker.device,
            *([f"node {worker.node}"] if worker.node else []),
        ]
        yield name_event(
            "process_name", CALLER + number, 0, name=f"worker {number} ({', '.join(where)})"
        )
        yield name_event("thread_name", CALLER + number, CALLS, name="calls")


def name_event(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def slice_event(each: Slice, start: int, end: int) -> Event:
    """Return the part of the slice that is in the trace, in microseconds since the trace began."""
    began, ended = max(each.began, start) - start, min(each.ended, end) - start
    times = {"ts": began / 1e3, "dur": max(0, ended - began) / 1e3}
    return {
        "ph": "X",
        "pid": each.pid,
        "tid": each.tid,
        **times,
        "name": each.name,
        "cat": each.kind,
        "args": each.args,
    }


def caller_slices(trace: Trace) -> Iterator[Slice]:
    # The spans are read first: a thread adds itself before it adds a span.
    caller_spans = list(trace.caller_spans)
    tracks = {thread: number for number, thread in enumerate(list(trace.threads), start=1)}
    for thread, kind, function, began, ended in caller_spans:
        yield Slice(CALLER, tracks[thread], began, ended, f"{kind} {function}".rstrip(), kind, {})


def worker_slices(worker: WorkerName, chunks: Sequence[TracedChunk], end: int) -> Iterator[Slice]:
    """Make the slices of a worker.

    Of the chunks without an answer only the first is shown, because the worker ran that one.
    """
    # The worker has been idle since `free`.
    pid, free = CALLER + worker.number, 0
    ahead = ahead_of(chunks) if worker.node else 0
    for chunk in chunks:
        if chunk.answered is None:
            continue
        began, free = chunk.began + ahead, chunk.ended + ahead
        yield Slice(pid, CALLS, began, free, PHASES[chunk.phase], "chunk", items_in(chunk))
        for phase, position, offset, first, last in chunk.spans:
            items, function = chunk.calls[position]
            if isinstance(items, range) and chunk.phase == "forward":
                items = items[offset]
            is_again = phase == "forward" and chunk.phase == "backward"
            name = "forward again" if is_again else phase
            args: dict[str, object] = {"item": whole(items), "function": function}
            yield Slice(pid, CALLS, first + ahead, last + ahead, name, phase, args)
    for chunk in [each for each in chunks if each.answered is None][:1]:
        name = "not answered" if chunk.died is None else "the worker died"
        yield Slice(
            pid,
            CALLS,
            max(free, chunk.sent),
            chunk.died or end,
            name,
            "unanswered",
            items_in(chunk),
        )


def items_in(chunk: TracedChunk) -> dict[str, object]:
    return {"items": [whole(call.items) for call in chunk.calls]}


def whole(items: int | range) -> int | list[int]:
    """Return the item, or the first and the last of several."""
    return items if isinstance(items, int) else [items[0], items[-1]]


def ahead_of(chunks: Sequence[TracedChunk]) -> int:
    """Return how many nanoseconds the caller's clock is ahead of a worker's on another machine.

    `chunks` are the worker's. A chunk begins after it was sent, and ends before its answer is here.
    So each chunk bounds the difference from both sides, and all chunks together give the best
    bounds. This takes the middle of them. Its error is at most half of the quickest round trip,
    plus half of the clocks' drift in that time.
    """
    least = [each.sent - each.began for each in chunks if each.answered is not None]
    most = [each.answered - each.ended for each in chunks if each.answered is not None]
    return (max(least) + min(most)) // 2 if least else 0


# --- the picture


WIDTH, ROW, FRAME = 10.0, 0.32, 1.3  # inches
DPI = 110
# The kinds of slices, with their names and colours. Later kinds are drawn over earlier ones.
KINDS = {
    "chunk": ("around items", "#b8b8b8"),
    "forward": ("forward", "#3b7dd8"),
    "backward": ("backward", "#d9662b"),
    "unanswered": ("not answered", "#111111"),
    "pickles": ("pickles", "#8c6bb1"),
    "packs": ("packs", "#4f9d69"),
    "makes results": ("makes results", "#8ccf9b"),
    "waits": ("waits", "#eeeeee"),
}


def draw(events: Sequence[dict[str, Any]], caller: int, path: str | os.PathLike[str]) -> None:
    """Write the picture, in the format that the name ends in.

    `caller` is the number of the caller's process.
    """
    # matplotlib takes a second to import, and is optional.
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a picture needs matplotlib: pip install matplotlib ({error})"
        ) from error

    names = {}
    for event in events:
        track = event["pid"], event["tid"]
        if event["name"] == "process_name" and event["pid"] != caller:
            names[event["pid"], 1] = event["args"]["name"].partition(" (")[0]
        elif event["name"] == "thread_name" and event["pid"] == caller:
            names[track] = f"caller: {event['args']['name']}"
    order = sorted(names, key=lambda track: (track[0] == caller, track))
    figure = Figure(figsize=(WIDTH, FRAME + ROW * len(order)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    patches = []
    for kind, (label, color) in KINDS.items():
        slices = [event for event in events if event["ph"] == "X" and event["cat"] == kind]
        for row, track in enumerate(order):
            own = [event for event in slices if (event["pid"], event["tid"]) == track]
            bars = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in own]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, linewidth=0)
        if slices:
            patches.append(Patch(color=color, label=label))
    axes.set(ylim=(len(order) - 0.4, -0.6), xlabel="seconds")
    axes.set_yticks(range(len(order)), [names[track] for track in order])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(
        handles=patches, loc="outside upper center", ncols=len(KINDS), frameon=False, fontsize=8
    )
    figure.savefig(path)
