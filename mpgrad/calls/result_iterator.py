"""What `imap` returns: results one by one, and items from their source only as far as they are needed. Caller's side."""

from __future__ import annotations

import math
import multiprocessing
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.calls.results import Desk
from mpgrad.calls.seconds import seconds_or_none
from mpgrad.torch_state.private import not_compiled

__all__ = ["LateError", "ResultIterator"]

R = TypeVar("R")


class LateError(multiprocessing.TimeoutError):
    """A result has not come in time. A task may raise the other kind."""


class ResultIterator(Generic[R]):
    """The results of `Pool.imap` or `Pool.imap_unordered`; takes items from their source only as far as it needs them.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     results = pool.imap(abs, [-1, -2])
        ...     results.next(timeout=60), list(results)
        (1, [2])
    """

    def __init__(
        self,
        desk: Desk,
        operation: Operation,
        calls: Iterator[Callable[[], PackedCall]],
        window: float,
        ordered: bool,
        on_awaited: Callable[[], object] = lambda: None,
    ) -> None:
        self._desk = desk
        self._operation = operation
        self._calls = calls  # each packs one call
        self._window = window
        self._ordered = ordered
        self._arrived: deque[int] = deque()
        self._next = 0
        self._source_error: BaseException | None = None
        self._on_awaited = on_awaited
        self._turn = threading.RLock()  # the source of the items is the caller's code
        arrived = self._arrived  # not self: the operation would keep the iterator alive
        operation.on_outcome = arrived.append
        operation.holder = weakref.ref(self)
        self._is_abandoned = False
        self._fill()

    def __iter__(self) -> ResultIterator[R]:
        return self

    @not_compiled
    def next(self, timeout: float | None = None) -> R:
        """The next result.

        Raises:
            StopIteration: all results have been given.
            multiprocessing.TimeoutError: it has not come within `timeout` seconds; it can be asked for again.
            Exception: what the call raised, or what the source of the items raised; later results can still be asked for.
        """
        timeout = seconds_or_none("timeout", timeout)
        with self._turn:  # several threads may share the iterator
            if self._next == self._operation.added:
                self._end()
            try:
                is_there = self._desk.wait_until(self._is_there, timeout)
            except BaseException:  # KeyboardInterrupt, above all
                self._abandon()
                raise
            if not is_there:
                raise LateError(f"no result within the timeout ({timeout} s)")
            if not self._has_come():
                self._next += 1
                raise CancelledError
            self._fill(1)
            index = self._next if self._ordered else self._arrived[0]
            try:
                value: R = self._operation.value(index)
                return value
            except StopIteration as error:
                name = self._operation.names.words(index)
                raise RuntimeError(f"{name} raised StopIteration, which would have ended the results") from error
            finally:
                if index not in self._operation.outcomes:  # unless there was an interrupt: then it can be asked for again
                    self._next += 1
                    if not self._ordered:
                        self._arrived.popleft()

    __next__ = next

    def _is_there(self) -> bool:
        """The next result, or that it never will be: its call may have been added after all were called off."""
        return self._has_come() or self._operation.limit == 0

    def _has_come(self) -> bool:
        return self._next in self._operation.outcomes if self._ordered else bool(self._arrived)

    def _end(self) -> None:
        self._on_awaited()
        error, self._source_error = self._source_error, None
        raise StopIteration if error is None else error

    def _fill(self, asked: int = 0) -> None:
        """Add calls until the window is full or the source is empty. `asked`: results that are about to be given."""
        try:
            self._add_some(self._next + asked)
        except BaseException:  # as in `next`; the source's own exceptions do not come here
            self._abandon()
            raise

    def _add_some(self, given: int) -> None:
        """Have as many calls under way as the window allows; an error of their source is kept until its turn."""
        before = self._operation.added, self._operation.sealed
        wave = 1  # the workers begin with the first; the source may be slow
        while not self._operation.sealed and self._operation.added - given < self._window:
            try:
                self._operation.add(next(self._calls)())
            except StopIteration:
                self._operation.sealed = True
            except Exception as error:
                self._source_error = error
                self._operation.sealed = True
            if self._operation.added - before[0] == wave:
                wave *= 4
                self._desk.admit(self._operation)
        if (self._operation.added, self._operation.sealed) != before:
            self._desk.admit(self._operation)

    def _abandon(self) -> None:
        """Whoever waited was interrupted: the calls are called off as soon as nobody can ask for a result any more."""
        self._is_abandoned = True

    def _cancel_rest(self) -> None:
        """What has not begun will not; `next` raises `CancelledError` for it. After an interrupt there is no `next`."""
        if self._is_abandoned:
            self._desk.call_off(self._operation)
            return
        self._operation.sealed = True
        if not self._operation.has_ended:
            self._desk.cancel_queued(self._operation)

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if python_ends():  # all pools have ended, and names of modules may be gone
            return
        if self._is_abandoned:
            self._desk.call_off(self._operation)
        # with a window without end, all is asked for, whether anybody looks at it or not
        elif not self._operation.sealed or (self._window < math.inf and not self._operation.finished):
            self._desk.cancel(self._operation)
