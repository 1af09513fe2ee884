"""What `Pool.timeline` gives."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mpgrad.timeline.trace import Event, Recording, events_of

__all__ = [
    "Timeline",
]


class Timeline:
    """What the workers of a pool and the threads that use it do in a `with` block; see `Pool.timeline`.

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
        self._recording: Recording | None = None

    def __enter__(self) -> Timeline:
        """
        Raises:
            RuntimeError: the pool records a timeline already, or this one has been recorded.
            OSError: the file cannot be written.
            PoolClosedError: after `close` or `terminate`.
        """
        if self._recording is not None:
            raise RuntimeError("a timeline is recorded once; ask the pool for another one")
        recording = Recording()
        self._scheduler.begin_recording(recording)
        try:
            if self._path is not None:
                self._file = self._path.open("w")  # now rather than after a long run: it may not be possible
        except BaseException:
            self._scheduler.end_recording()
            raise
        self._recording = recording
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._scheduler.end_recording()
        finally:
            if self._file is not None:
                with self._file:
                    self._file.write(self._trace)

    @functools.cached_property
    def events(self) -> list[Event]:
        """In the format of Chrome's traces. "ph" is "M" for names, "X" for slices, with "ts" and "dur" in microseconds.

        Process 1 is the caller, process 1 + n worker n. "cat" is what kind of slice it is, as `docs/timeline.md` lists them.
        """
        if self._recording is None:
            raise RuntimeError("the timeline has not been recorded; put the calls into a block: `with timeline:`")
        if self._recording.ended is None:
            raise RuntimeError("the timeline is still being recorded; ask for it after its `with` block")
        return events_of(self._recording)

    @property
    def _trace(self) -> str:
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, as JSON that https://ui.perfetto.dev opens."""
        Path(path).write_text(self._trace)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture, in the format that the name ends in: .png, .pdf or .svg.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        # matplotlib takes a second to import, and need not be there
        try:
            from mpgrad.timeline.picture import draw
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"a picture needs matplotlib: pip install matplotlib ({error})") from error

        draw(self.events, path)

    def __repr__(self) -> str:
        if self._recording is None:
            return "<mpgrad timeline, not begun>"
        if self._recording.ended is None:
            return "<mpgrad timeline, being recorded>"
        return f"<mpgrad timeline, {len(self.events)} events>"
