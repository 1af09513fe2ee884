"""What this worker does, and when, while the caller records a timeline.

Off, nothing of it is in anybody's way: handlers make plain stages, and the tracker tells nobody. `Recorder` puts what notes
moments in their places, and back.

    Record ──► chunks, functions: timed around ── calls: `tracker.tell` ── function, engine: `TimedStage` ──► Recorded, answer
                                              PyTorch's operations, at the end ──► Profiled
Assumes: one thread, in which a chunk may come within another's call (inline).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from mpgrad.wire.messages import Backward, Collect, Forward, Message
from mpgrad.wire.records import Did, Operation, Profiled, Recorded, Span
from mpgrad.wire.tensor_packing import Payload
from mpgrad.workers.stage import Stage
from mpgrad.workers.whereabouts import Tracker

__all__ = ["Recorder"]

Answer = tuple[Message, Payload]
CLOCK = "mpgrad: the clock"  # operations of which both clocks are known
KINDS = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset")  # as the profiler calls operations


class Notes:
    """Of the chunk that is being answered."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self._position = -1  # of the call
        self._since = 0

    def begin(self, position: int) -> None:
        """A call begins, or goes on with its next step."""
        if position != self._position:
            self.end()
            self._position, self._since = position, time.monotonic_ns()

    def end(self) -> None:
        """The call has ended, if one has begun."""
        if self._position >= 0:
            self.spans.append((Did.CALL, self._position, 0, self._since, time.monotonic_ns()))

    def took(self, did: int, offset: int, seconds: float) -> None:
        """Up to now."""
        if seconds > 0:
            now = time.monotonic_ns()
            self.spans.append((did, self._position, offset, now - int(1e9 * seconds), now))


class TimedStage(Stage):
    """Who adds up seconds here does so right after they have passed."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._own = self._backward = 0.0
        super().__init__()

    @property
    def own_seconds(self) -> float:
        return self._own

    @own_seconds.setter
    def own_seconds(self, seconds: float) -> None:
        self._notes.took(Did.FORWARD, self.offset, seconds - self._own)
        self._own = seconds

    @property
    def backward_seconds(self) -> float:
        return self._backward

    @backward_seconds.setter
    def backward_seconds(self, seconds: float) -> None:
        self._notes.took(Did.BACKWARD, self.offset, seconds - self._backward)
        self._backward = seconds


class Recorder:
    """From its making to `end`."""

    def __init__(self, tracker: Tracker, profile: bool) -> None:
        self._tracker = tracker
        self._told = tracker.tell
        self._loaded: list[Span] = []  # functions, for the next chunk
        self._notes = Notes([])
        self._done: list[Recorded] = []
        tracker.tell = self._begin
        began = time.monotonic_ns()
        self._profile = Profile() if profile else None
        if profile:
            self._loaded.append((Did.START, 0, 0, began, time.monotonic_ns()))

    def end(self) -> list[Profiled]:
        """What it has to say at the end."""
        self._tracker.tell = self._told
        if self._profile is None:
            return []
        try:
            return [Profiled(self._profile.end())]
        except Exception:  # a full disk, or a task that profiles, too: what the worker keeps matters more
            logging.getLogger("mpgrad").warning("the profile of a worker cannot be had", exc_info=True)
            return [Profiled([])]

    def new_stage(self) -> Stage:
        return TimedStage(self._notes)

    def _begin(self, chunk: int, position: int) -> None:
        self._notes.begin(position)
        if self._told is not None:
            self._told(chunk, position)

    def requests(self, requests: dict[type[Any], Callable[[Any, memoryview], Answer]]) -> dict[type[Any], Any]:
        """What answers chunks, timed."""
        chunks = (Forward, Backward, Collect)
        return {kind: functools.partial(self._answer, each) if kind in chunks else each for kind, each in requests.items()}

    def _answer(self, answer: Callable[[Any, memoryview], Answer], message: Any, payload: memoryview) -> Answer:
        outer, self._notes = self._notes, Notes(self._loaded)
        self._loaded = []
        if self._profile is not None:
            self._profile.mark()
        began = time.monotonic_ns()
        try:
            answered = answer(message, payload)
            self._notes.end()
            self._done = [Recorded(message.chunk, began, time.monotonic_ns(), self._notes.spans)]
            return answered
        finally:
            self._notes = outer

    def timed(self, define: Callable[[Any], None]) -> Callable[[Any], None]:
        """What takes functions."""

        def defined(message: Any) -> None:
            began = time.monotonic_ns()
            define(message)
            self._loaded.append((Did.LOAD, 0, 0, began, time.monotonic_ns()))

        return defined

    def take(self) -> list[Recorded]:
        """For the answer of the chunk that was just done."""
        done, self._done = self._done, []
        return done


class Profile:
    """PyTorch's operations in this process."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        with warnings.catch_warnings():  # torch 2.11 warns whoever begins that a second beginning would forget the first
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profiler.start()
        self._marks: list[tuple[int, int]] = []  # moments before and after each operation `CLOCK`
        self.mark()

    def mark(self) -> None:
        """Once more, what our clock and the profiler's show: one time or another nothing comes between."""
        before = time.monotonic_ns()
        with torch.profiler.record_function(CLOCK):
            pass
        self._marks.append((before, time.monotonic_ns()))

    def end(self) -> list[Operation]:
        """By our clock: what the profiler's own is differs between its versions."""
        self._profiler.stop()
        descriptor, path = tempfile.mkstemp(suffix=".json")
        os.close(descriptor)
        try:
            self._profiler.export_chrome_trace(path)
            with open(path) as file:
                events = json.load(file)["traceEvents"]
        finally:
            os.unlink(path)
        spans = [each for each in events if each.get("ph") == "X" and each.get("cat") in KINDS]
        clocks = sorted(float(each["ts"]) for each in spans if each["name"] == CLOCK)
        own = next(each["tid"] for each in spans if each["name"] == CLOCK)
        (before, after), mark = min(zip(self._marks, clocks, strict=True), key=lambda pair: pair[0][1] - pair[0][0])
        zero = (before + after) // 2
        threads = {own: 0}  # of the calls; those of others, and of devices, are numbered as they come
        found = []
        for each in spans:
            began = zero + round(1e3 * (each["ts"] - mark))
            thread = threads.setdefault(each["tid"], len(threads))
            if each["name"] != CLOCK:
                found.append((each["name"], thread, began, began + round(1e3 * each["dur"])))
        return found
