"""`Reporter` shows the progress of an operation while it runs. It runs in the caller.

The function that shows it may need a lock that the waiting thread holds. So a thread that is in
`map`, `get` or `next` *attends*, and calls the function itself, ten times a second while it waits.
With a timeout it does not attend, so a slow function delays no deadline. If no thread attends, the
callbacks thread calls the function. A thread that is in a backward does not attend, because it is
in PyTorch's code.

    operation, pool ◄── look ── an attending thread, ──► show: a bar of tqdm, or the caller's
                                or the callbacks thread        function
Guarantees: only one thread at a time runs the function. The last look comes after the end. It comes
    before the attending thread goes on, unless the callbacks thread has been in the function for
    longer than `PATIENCE`. Looks and shows take at most a 20th of the time.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from mpgrad.callbacks import LOOK_EVERY, CallbackThread, report
from mpgrad.errors import contextmanager
from mpgrad.torch_state.private import NOTHING, current_graph_task

__all__ = [
    "Progress",
    "ProgressState",
    "Reporter",
    "attended",
    "reported",
    "reporter_of",
]

# a function of: done, total, seconds left; None if that is not known, or nothing is done yet
Show = Callable[[int, int | None, float | None], object]
# False shows nothing, True a bar, and a string a bar with this description.
Progress = bool | str | Show

T = TypeVar("T")

# seconds that an ending thread waits for another thread that is in the function
PATIENCE = 0.2
# If a look takes long, the pause after it is this many times as long.
PAUSE = 20


class ProgressState(NamedTuple):
    done: int
    total: int | None  # None if it is not known
    is_over: bool = False  # whether nothing more will come


class Reporter:
    """Shows what `look` finds, until `end` is called or `look` reports that everything is over.

    Args:
        is_of_pool: every thread that waits for the pool attends.

    Raises:
        ImportError: `progress` requests a bar, and tqdm is not installed.
        TypeError: `progress` is of a wrong type, or a function that does not take done, total and
            seconds left.
    """

    def __init__(
        self, progress: Progress, look: Callable[[], ProgressState], is_of_pool: bool = False
    ) -> None:
        self.is_of_pool = is_of_pool
        # the idents of the threads that attend
        self.attendants: list[int] = []
        self._look = look
        self._progress = progress
        self._display = contextlib.ExitStack()
        self._show: Show
        if callable(progress):
            check_takes_three(progress)
            self._show = progress
        elif isinstance(progress, bool | str):
            bar = Bar(progress if isinstance(progress, str) else None, look().total)
            self._show = self._display.enter_context(bar)
        else:
            expected = (
                "progress must be True, False, a description, or a function of done, total and "
                "seconds left"
            )
            raise TypeError(f"{expected} (progress: {progress!r})")
        # The thread that holds this calls the function. No thread waits for it without limit.
        self._turn = threading.Lock()
        self._has_ended = False
        self._closing = threading.Event()
        self._due = time.monotonic() + LOOK_EVERY
        # when the first work was done, and how much
        self._first: tuple[float, int] | None = None
        self._shown: tuple[int, int | None] | None = None

    # --- threads that attend, and the callbacks thread

    @property
    def is_here(self) -> bool:
        """Whether this thread attends. In a backward it does not."""
        return threading.get_ident() in self.attendants and current_graph_task() == -1

    @property
    def is_nowhere(self) -> bool:
        return not self.attendants

    @property
    def is_closed(self) -> bool:
        """Whether it has stopped."""
        return self._closing.is_set()

    def tick(self) -> None:
        """Show the present state if this is due, unless another thread is doing so."""
        while (self.is_here or self.is_nowhere) and self._is_due():
            # The thread that has the turn looks once more after it has given it back.
            if not self._turn.acquire(blocking=False):
                return
            try:
                self._show_once()
            finally:
                self._turn.release()

    def end(self) -> None:
        """Show the present state, and nothing more.

        If another thread is in the function, that thread does it. It may need a lock that the
        caller holds, so the caller does not wait for long.
        """
        self._has_ended = True
        if self.is_closed:
            return
        with attending([self]) as is_attended:
            if not is_attended:
                # In a backward, the callbacks thread shows it.
                self._closing.wait(PATIENCE)
                return
            if self._turn.acquire(timeout=PATIENCE):
                self._turn.release()
            self.tick()

    def at_each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. They are taken by a thread that attends."""
        for item in items:
            self.tick()
            yield item

    def _is_due(self) -> bool:
        return not self.is_closed and (self._has_ended or time.monotonic() >= self._due)

    def _show_once(self) -> None:
        # This is read before the look, so that the last look comes after the end.
        is_last = self._has_ended
        now = time.monotonic()
        try:
            found = self._look()
            if found.done and self._first is None:
                self._first = now, found.done
            if found[:2] != self._shown:
                self._shown = found[:2]
                left = None if self._first is None else seconds_left(now, *self._first, found)
                self._show(found.done, found.total or None, left)
            if is_last or found.is_over:
                self._close()
        except BaseException as error:
            self._close()
            # Above all, a KeyboardInterrupt is meant for the thread that waits.
            if not isinstance(error, Exception) and self.is_here:
                raise
            # The caller's function or terminal failed. The work goes on.
            report(
                logging.WARNING,
                "progress is no longer shown: %r raised %s: %s",
                self._progress,
                type(error).__name__,
                error,
            )
        self._due = time.monotonic() + max(LOOK_EVERY, PAUSE * (time.monotonic() - now))

    def _close(self) -> None:
        self._closing.set()
        self._display.close()


def check_takes_three(show: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(show)
    # Some functions that are written in C have no signature.
    except ValueError:
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
    """Return the seconds left, at the speed since `since`, when `done` were done.

    The time before that is left out, because it includes the start of workers.
    """
    if found.total is None:
        return None
    if found.done >= found.total:
        return 0.0
    if found.done <= done:
        return None
    return (now - since) / (found.done - done) * (found.total - found.done)


class Bar:
    """A bar of tqdm whose total may change. In a notebook it is tqdm's widget."""

    def __init__(self, description: str | None, total: int | None) -> None:
        try:
            tqdm = importlib.import_module("tqdm.auto").tqdm
        except ImportError as error:
            raise ImportError(
                "progress needs tqdm, which is not installed; pip install tqdm"
            ) from error
        # The bar shows every update, because they are rare enough.
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


# --- which thread shows it


def reporter_of(
    callbacks: CallbackThread,
    progress: Progress,
    look: Callable[[], ProgressState],
    is_of_pool: bool = False,
) -> Reporter | None:
    """Return a reporter that no thread attends yet; None if `progress` is False."""
    if progress is False:
        return None
    reporter = Reporter(progress, look, is_of_pool)
    callbacks.watch(reporter)
    return reporter


def attended(
    callbacks: CallbackThread, own: Reporter | None = None, timeout: float | None = None
) -> contextlib.AbstractContextManager[bool]:
    """Return a block in which this thread attends `own`, and the reporters of the whole pool.

    With a `timeout` it does not, because a slow function would delay the end of the wait.
    """
    if timeout is not None or (own is None and not callbacks.watched):
        return NOTHING
    of_pool = [each for each in callbacks.watched if isinstance(each, Reporter) and each.is_of_pool]
    return attending(of_pool if own is None else [*of_pool, own])


@contextmanager
def attending(reporters: Sequence[Reporter]) -> Iterator[bool]:
    """Have this thread attend the reporters, and yield True. In a backward, yield False."""
    if current_graph_task() != -1:
        yield False
        return
    thread = threading.get_ident()
    try:
        for each in reporters:
            each.attendants.append(thread)
        yield True
    finally:
        for each in reporters:
            # An interrupt may have come before the thread was noted.
            with contextlib.suppress(ValueError):
                each.attendants.remove(thread)


@contextmanager
def reported(
    callbacks: CallbackThread, progress: Progress, look: Callable[[], ProgressState]
) -> Iterator[Reporter | None]:
    """Show what `look` finds until the block ends. Its thread attends."""
    reporter = None if progress is False else Reporter(progress, look)
    with attended(callbacks, reporter):
        if reporter is None:
            yield None
            return
        # Its thread attends it from the beginning.
        callbacks.watch(reporter)
        try:
            yield reporter
        finally:
            reporter.end()
