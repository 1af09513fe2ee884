"""A recording as Chrome's trace events, as a file that Perfetto (ui.perfetto.dev) opens.

Process 1 is the caller, with a track for each of its threads; process 1 + n is worker n. Slices of a track lie side by side
or within one another: a call has the slices of function and engine within it, and these have PyTorch's operations.
Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mpgrad.timeline.clocks import ahead_of
from mpgrad.timeline.recording import Chunk, Lap, Recording, Worker
from mpgrad.wire.records import Did

__all__ = ["CALLER", "Event", "trace_of", "worker_number"]

Event = dict[str, Any]

CALLER = 1  # the process
CALLS = 1  # a worker's thread that runs calls
BEFORE_CALLS = Did.LOAD, Did.START
PHASES = {"forward": "", "backward": "backward of ", "sums": "sums of gradients"}


def worker_number(event: Event) -> int | None:
    """The worker whose slice it is; None: the caller's."""
    return event["pid"] - CALLER or None


def trace_of(recording: Recording) -> dict[str, Any]:
    """What is to be written as JSON."""
    of_workers: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in list(recording.chunks):
        of_workers[chunk.worker].append(chunk)
    end = recording.ended
    assert end is not None
    slices = [caller_slice(recording, lap) for lap in list(recording.laps) if lap.began < end]
    for number, worker in recording.workers.items():
        slices += Track(recording, worker, of_workers[number], end).slices()
    slices.sort(key=lambda each: (each["pid"], each["tid"], each["ts"], -each["dur"]))
    about = {
        "engine": recording.engine,
        "seconds": (end - recording.began) / 1e9,
        "workers": [{"number": each.number, "pid": each.pid, "node": each.node} for each in recording.workers.values()],
    }
    return {"traceEvents": [*names(recording), *slices], "displayTimeUnit": "ms", "mpgrad": about}


def names(recording: Recording) -> Iterator[Event]:
    yield name_event("process_name", CALLER, 0, name="caller")
    for thread, name in enumerate(recording.threads.values(), start=1):
        yield name_event("thread_name", CALLER, thread, name=name)
    for number, worker in sorted(recording.workers.items()):
        where = [f"pid {worker.pid}", worker.device, *([f"node {worker.node}"] if worker.node else [])]
        yield name_event("process_name", CALLER + number, 0, name=f"worker {number} ({', '.join(where)})")
        yield name_event("process_sort_index", CALLER + number, 0, sort_index=number)
        yield name_event("thread_name", CALLER + number, CALLS, name="calls")


def name_event(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def slice_event(pid: int, tid: int, began: int, ended: int, name: str, kind: str, **args: object) -> Event:
    """`began`, `ended`: nanoseconds; the format has microseconds."""
    found = {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": began / 1e3,
        "dur": max(0, ended - began) / 1e3,
        "name": name,
        "cat": kind,
    }
    return found | {"args": {key: value for key, value in args.items() if value is not None}}


def caller_slice(recording: Recording, lap: Lap) -> Event:
    threads = list(recording.threads)
    function = recording.functions.get(lap.function, "")
    name = f"{lap.kind} {function}".rstrip()
    began, ended = lap.began - recording.began, min(lap.ended, recording.ended or lap.ended) - recording.began
    items = None if lap.items is None else whole(lap.items)
    return slice_event(
        CALLER, 1 + threads.index(lap.thread), max(0, began), ended, name, lap.kind, items=items, bytes=lap.nbytes
    )


def whole(items: int | range) -> int | list[int]:
    """An item, or the first and the last one."""
    return items if isinstance(items, int) else [items[0], items[-1]] if items else []


def in_words(items: int | range) -> str:
    return f"item {items}" if isinstance(items, int) else f"items {items[0]} to {items[-1]}" if items else "no item"


class Track:
    """What one worker did, by the caller's clock, from the recording's beginning on."""

    def __init__(self, recording: Recording, worker: Worker, chunks: Sequence[Chunk], end: int) -> None:
        self._recording = recording
        self._worker = worker
        self._chunks = sorted(chunks, key=lambda each: each.began if each.answered else math.inf)
        self._end = end - recording.began
        self._ahead = (ahead_of(chunks) if worker.node else 0) - recording.began
        self._slices: list[Event] = []

    def slices(self) -> list[Event]:
        hired, ready = (each - self._recording.began for each in self._worker.started)
        if ready > 0:
            self._add(hired, ready, "starts", "start")
        free = max(0, ready)  # since when it has nothing
        for chunk in self._chunks:
            sent = chunk.sent - self._recording.began
            if chunk.answered is None:  # so are those behind it
                self._add_unanswered(chunk, max(free, sent))
                break
            spans = chunk.spans
            began = min([chunk.began, *(span[3] for span in spans if span[0] in BEFORE_CALLS)]) + self._ahead
            start = max(free, sent)
            if start < began:
                self._add(start, began, "transfer", "transfer", bytes=chunk.nbytes, chunk=chunk.number)
            self._add_chunk(chunk, ready)
            free = max(free, chunk.ended + self._ahead)
        self._slices += self._operations()
        return self._slices

    def _add(self, began: int, ended: int, name: str, kind: str, tid: int = CALLS, **args: object) -> None:
        if began < self._end:
            ended = min(ended, self._end)
            self._slices.append(slice_event(CALLER + self._worker.number, tid, max(0, began), ended, name, kind, **args))

    def _add_unanswered(self, chunk: Chunk, start: int) -> None:
        """Its worker died, or is still at it."""
        if chunk.died is not None:
            moment, position = chunk.died
            at = f" at {in_words(chunk.items[position])}" if 0 <= position < len(chunk.items) else ""
            self._add(start, moment - self._recording.began, f"died{at}", "lost", chunk=chunk.number)
        else:
            items = in_words(chunk.items[0]) if chunk.items else chunk.phase
            self._add(start, self._end, f"not answered yet: {items}", "open", chunk=chunk.number)

    def _add_chunk(self, chunk: Chunk, ready: int) -> None:
        function = self._recording.functions.get(chunk.function, "")
        for did, position, offset, began, ended in chunk.spans:
            began, ended = began + self._ahead, ended + self._ahead
            if did == Did.LOAD:
                self._add(began, ended, f"loads {function}".rstrip(), "load")
                continue
            if did == Did.START:
                self._add(max(began, ready), ended, "starts the profiler", "start")  # clocks of nodes are known roughly
                continue
            items = chunk.items[position] if position < len(chunk.items) else range(0)
            again = True if position in chunk.again else None
            if did == Did.CALL:
                name = f"{PHASES[chunk.phase]}{function} {in_words(items)}".strip()
                self._add(began, ended, name, "call", phase=chunk.phase, item=whole(items), chunk=chunk.number, again=again)
                continue
            item = items[offset] if isinstance(items, range) and chunk.phase == "forward" else items
            if did == Did.BACKWARD:
                ahead = True if chunk.phase == "forward" else None  # it came right after its forward
                self._add(
                    began, ended, "backward", "backward", item=whole(item), function=function or None, again=again, ahead=ahead
                )
            elif chunk.phase == "forward":
                self._add(began, ended, "forward", "forward", item=whole(item), function=function or None, again=again)
            else:
                self._add(began, ended, "forward again", "forward", item=whole(item), again=True)
        if chunk.phase == "sums":
            self._add(chunk.began + self._ahead, chunk.ended + self._ahead, PHASES["sums"], "call", phase="sums")

    def _operations(self) -> list[Event]:
        """PyTorch's: those of the calls' thread within the slices of functions and engine, others on tracks of their own.

        The profiler's clock is known to a microsecond or so; what lies across the edge of a slice ends there.
        """
        around = sorted(
            (each["ts"], each["ts"] + each["dur"]) for each in self._slices if each["cat"] in ("forward", "backward")
        )
        starts = [start for start, _ in around]
        found = []
        for name, thread, began, ended in self._worker.operations:
            start, stop = (began + self._ahead) / 1e3, (ended + self._ahead) / 1e3
            if not thread:
                place = bisect.bisect(starts, (start + stop) / 2) - 1
                if place < 0 or (start + stop) / 2 > around[place][1]:
                    continue  # our own, around calls
                start, stop = max(start, around[place][0]), min(stop, around[place][1])
            if 0 <= start < self._end / 1e3:
                stop = min(stop, self._end / 1e3)
                pid = CALLER + self._worker.number
                found.append(slice_event(pid, CALLS + thread, round(1e3 * start), round(1e3 * stop), name, "operation"))
        return found
