"""How far something has come, shown while it goes on.

Who waits for a backward is in PyTorch's code, and the scheduling thread may not wait for a
terminal. So another thread looks ten times a second, and shows what it has found: what runs knows
nothing of it.

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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpgrad.errors import contextmanager

__all__ = ["Progress", "Reporter", "Standing", "reported"]

# done, in all, seconds left; None where that is not known, or there is nothing yet
Show = Callable[[int, int | None, float | None], object]
Progress = bool | str | Show  # False: nothing; True: a bar; a string: a bar with this description

log = logging.getLogger("mpgrad")

INTERVAL = 0.1  # seconds between two looks
PAUSE = 20  # or so many times what the last one took


class Standing(NamedTuple):
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

    def __init__(self, progress: Progress, look: Callable[[], Standing]) -> None:
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
        except (
            Exception
        ) as error:  # of the caller's function, or of its terminal: no reason for the work to stop
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


def seconds_left(now: float, since: float, done: int, found: Standing) -> float | None:
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
def reported(progress: Progress, look: Callable[[], Standing]) -> Iterator[None]:
    """Show what `look` finds until the block ends."""
    if progress is False:
        yield
        return
    reporter = Reporter(progress, look)
    try:
        yield
    finally:
        reporter.end()
