"""Results that the caller collects later: `multiprocessing.Pool`'s AsyncResult and iterators, and a
differentiable future. This module runs in the caller only.

All of them make tensors and autograd nodes in the thread that collects them, never in the
scheduling thread. The scheduling thread only sets the state of a future, and takes no lock for this
(see `mpgrad.calls.futures`). Callbacks run in another thread: see `mpgrad.callbacks.later`. The
iterator of `imap` returns results one by one, and takes items from its source only as they are
needed.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import multiprocessing
import numbers
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from mpgrad.callbacks import later, report
from mpgrad.calls.futures import UnlockedFuture
from mpgrad.calls.operations import (
    Dependency,
    FailedResult,
    Listener,
    Operation,
    SubmittedOperation,
)
from mpgrad.calls.packing import Arguments, PackingOptions, pack_call
from mpgrad.pickling.structure import DeferredValue
from mpgrad.progress import Reporter, attended
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.torch_state.private import not_compiled
from mpgrad.tracebacks import without_own_frames

__all__ = [
    "AsyncResult",
    "DifferentiableFuture",
    "LateError",
    "ResultIterator",
    "seconds_given",
    "seconds_or_none",
]

R = TypeVar("R")


class AsyncResult(Listener, Generic[R]):
    """The result of `Pool.map_async`, `Pool.starmap_async` or `Pool.apply_async`, like
    `multiprocessing.pool.AsyncResult`.

    Example:
        >>> import torch, mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     result = pool.apply_async(torch.add, (torch.ones(1), 2))
        ...     result.wait(timeout=60)
        ...     result.ready(), result.successful(), result.get()
        (True, True, tensor([3.]))
    """

    def __init__(
        self,
        scheduler: Scheduler,
        begin: Callable[[Listener], Operation],
        fetch: Callable[[Operation], R],
        callback: Callable[[R], object] | None,
        error_callback: Callable[[BaseException], object] | None,
        report: Callable[[Operation], Reporter | None],
    ) -> None:
        self._scheduler = scheduler
        self._number = next(scheduler.uncollected.numbers)
        self._fetch = fetch
        self._callback = callback
        self._error_callback = error_callback
        self._lock = threading.RLock()
        self._value: Any = None
        self._fetched = False
        self._is_collected = False  # `get` or `successful` was called, or the value was made
        self._tells = callback is not None or error_callback is not None
        self._operation = begin(self)
        self._reporter = report(self._operation)

    @not_compiled
    def get(self, timeout: float | None = None) -> R:
        """Wait for the result, and return it. Every call returns the same object.

        Args:
            timeout: the seconds after which only your wait ends. The calls go on.

        Raises:
            multiprocessing.TimeoutError: the result has not come within `timeout` seconds.
            Exception: the exception of the first call that failed.
        """
        if not self._wait(timeout):
            raise multiprocessing.TimeoutError(not_yet("get", timeout))
        return self._take()

    def _take(self) -> R:
        """Return the result, which has come."""
        self._collect()
        with self._lock:
            if not self._fetched:
                # After an interrupt the result can still be fetched.
                self._value = self._fetch(self._operation)
                self._fetched = True
            found: R = self._value
            return found

    @without_own_frames
    def wait(self, timeout: float | None = None) -> None:
        """Wait until all calls have ended, or for `timeout` seconds, which end only your wait."""
        self._wait(timeout)

    def _wait(self, timeout: float | None) -> bool:
        timeout = seconds_or_none("timeout", timeout)
        try:
            with attended(self._scheduler.callbacks, self._reporter, timeout):
                is_ready = self._scheduler.wait_until(self.ready, timeout)
                if is_ready and self._reporter is not None:
                    self._reporter.end()
        except BaseException:  # KeyboardInterrupt, above all
            self._operation.note_interrupt(self._scheduler.cancel_with_grace)
            raise
        return is_ready

    def ready(self) -> bool:
        """Return whether all calls have ended."""
        return self._operation.finished

    def successful(self) -> bool:
        """Return whether no call raised.

        Raises:
            ValueError: the result is not ready.
        """
        if not self.ready():
            raise ValueError("the result is not ready; wait for it first (result.wait())")
        self._collect()
        return self._operation.first_failure() is None

    def _on_finished(self) -> None:
        """Have callbacks run. Make the value only for a callback."""
        failed = self._operation.first_failure()
        if failed is None:
            if self._callback is not None:
                later(call_back, self._callback, self._take)
        elif self._error_callback is not None:
            later(call_back, self._error_callback, failed.error)
        else:
            self._scheduler.uncollected.note(self._number, failed)
            # A waiting thread may have collected the result before the failure was noted.
            if self._is_collected:
                self._collect()

    def _collect(self) -> None:
        """Note that the caller learns of a failure from this result, so it is not reported."""
        self._is_collected = True
        failed = self._operation.first_failure()
        if failed is not None:
            self._scheduler.uncollected.collected(failed)


def call_back(callback: Callable[[Any], object], make: Callable[[], object]) -> None:
    """Call `callback(make())`, and report its exceptions."""
    try:
        callback(make())
    except BaseException:  # the caller's code must not end a thread of the pool
        report(logging.ERROR, "a callback of the pool raised", with_traceback=True)


class TaskException(Exception):
    """Stands for the exception of a call in `concurrent.futures`. Users do not see it, because
    `DifferentiableFuture` raises the call's own exception."""


class DifferentiableFuture(UnlockedFuture[R], DeferredValue, Listener):
    """A `concurrent.futures.Future` with a differentiable result, which is made in the thread that
    calls `result`.

    You can pass the future to other calls, even inside a list or dict. They begin as soon as its
    result is ready.

    Example:
        >>> import torch, mpgrad
        >>> x = torch.ones(2, requires_grad=True)
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     future = pool.submit(torch.mul, x, 3)
        ...     pool.submit(torch.sum, future).result().backward()
        ...     future.done(), future.result(), x.grad
        (True, tensor([3., 3.], grad_fn=<CallBackward>), tensor([3., 3.]))
    """

    def __init__(
        self, scheduler: Scheduler, begin: Callable[[Listener], SubmittedOperation]
    ) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._number = next(scheduler.uncollected.numbers)
        self._failed: FailedResult | None = None
        self._operation = begin(self)

    @not_compiled
    def result(self, timeout: float | None = None) -> R:
        """As in `concurrent.futures`, return the result of the call, or raise its exception.

        Args:
            timeout: the seconds after which only your wait ends. The call goes on.
        """
        failed = self._await_failure("result", timeout)
        if failed is not None:
            raise failed.error()
        value: R = self._operation.take()
        return value

    @without_own_frames
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As in `concurrent.futures`, return the exception that the call raised, or None.

        Args:
            timeout: the seconds after which only your wait ends. The call goes on.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     pool.submit(int, "x").exception()
            ValueError("invalid literal for int() with base 10: 'x'")
        """
        failed = self._await_failure("exception", timeout)
        return None if failed is None else failed.error()

    @not_compiled
    def _get_snapshot(self) -> tuple[bool, bool, R | None, BaseException | None]:
        """Return whether the future is done, whether it is cancelled, its result and its exception.
        asyncio calls this from Python 3.15 on."""
        if not self.done() or self.cancelled():
            return self.done(), self.cancelled(), None, None
        error = self.exception()
        return True, False, self.result() if error is None else None, error

    def _await_failure(self, method: str, timeout: float | None) -> FailedResult | None:
        """Wait until the future is done, and return its failure, or None. Errors name `method`.

        Raises:
            concurrent.futures.TimeoutError: the future is not done within `timeout` seconds.
            concurrent.futures.CancelledError: the future was cancelled.
        """
        timeout = seconds_or_none("timeout", timeout)
        callbacks = self._scheduler.callbacks
        if self.done():
            if callbacks.done != callbacks.added:
                callbacks.catch_up()
        elif not self._wait(timeout):
            raise concurrent.futures.TimeoutError(not_yet(method, timeout))
        if self.cancelled():
            raise concurrent.futures.CancelledError
        if self._failed is not None:
            self._scheduler.uncollected.collected(self._failed)
        return self._failed

    def cancel(self, force: bool = False) -> bool:
        """Cancel the call, unless it runs or is done. Calls that take this future then fail.

        Args:
            force: also cancel a call that runs, by killing its worker. Other workers take over the
                worker's other calls; without retries, its graphs are lost. With engine "thread",
                the call runs to its end, and its result is dropped.

        Returns:
            Whether the call is cancelled. With `force`: whether it was not yet done.

        Example:
            >>> import time, mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     future = pool.submit(time.sleep, 60)
            ...     (
            ...         future.cancel(force=True),
            ...         mpgrad.wait([future]).done == {future},
            ...         future.cancelled(),
            ...     )
            (True, True, True)
        """
        cancelled = super().cancel()
        if cancelled:
            self._scheduler.cancel(self._operation)
        elif force and not self.done():
            self._scheduler.kill(self._operation)
            return True
        return cancelled

    def _wait(self, timeout: float | None) -> bool:
        try:
            with attended(self._scheduler.callbacks, timeout=timeout):
                return self._scheduler.wait_until(self.done, timeout)
        except BaseException:  # KeyboardInterrupt, above all
            self._operation.note_interrupt(self._scheduler.cancel_with_grace)
            raise

    def cancelled(self) -> bool:
        """As in `concurrent.futures`, return whether the call was cancelled. It is also True once
        `cancel(force=True)` or `cancel_after` has ended the call."""
        return super().cancelled() or (self._failed is not None and self._failed.is_cancelled)

    def cancel_after(self, seconds: float) -> None:
        """Set a deadline: unless the call is done `seconds` from now, cancel it with `force`.

        Raises:
            TypeError, ValueError: `seconds` is not a number, or is negative.

        Example:
            >>> import time, mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     future = pool.submit(time.sleep, 60)
            ...     future.cancel_after(0.05)
            ...     mpgrad.wait([future]).done == {future}, future.cancelled()
            (True, True)
        """
        if (seconds := seconds_given("seconds", seconds)) < 0:
            raise ValueError(f"seconds must not be negative (seconds: {seconds:g})")
        self._scheduler.kill_at(time.monotonic() + seconds, self._operation)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[R]], object]) -> None:
        """As in `concurrent.futures`, call `fn(future)` when the future is done, or at once if it
        already is.

        The callback runs in a thread of the pool, after the callbacks of futures that were done
        earlier. It may wait for other calls.

        Example:
            >>> import queue, mpgrad
            >>> done = queue.SimpleQueue()
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     pool.submit(abs, -1).add_done_callback(done.put)
            ...     done.get(timeout=60).result()
            1
        """
        self._tells = True
        super().add_done_callback(fn)

    def _dependency(self) -> Dependency | None:
        return self._operation.dependency()

    def _taken(self) -> Any:
        return self._operation.take()

    def _on_finished(self) -> None:
        """Have callbacks run. Make no value."""
        outcome = self._operation.outcomes[0]
        if not self._starts():
            return  # cancelled
        try:
            self._failed = failed = outcome if isinstance(outcome, FailedResult) else None
            if failed is None or failed.is_cancelled:
                self._end(None)  # `result` makes the value in the thread that calls it
            else:
                self._scheduler.uncollected.note(self._number, failed)
                self._end(TaskException())  # `result` also makes the call's own exception
        except BaseException:
            # A callback of the caller raised KeyboardInterrupt or the like. An Exception is caught
            # before.
            report(logging.ERROR, "a callback of a future raised", with_traceback=True)


# --- what `imap` returns


class LateError(multiprocessing.TimeoutError):
    """A result has not come in time. A task may itself raise `multiprocessing.TimeoutError`."""


class ResultIterator(Listener, Generic[R]):
    """The results of `Pool.imap` or `Pool.imap_unordered`. The iterator takes items from their
    source only as it needs them.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     results = pool.imap(abs, [-1, -2])
        ...     results.next(timeout=60), list(results)
        (1, [2])
    """

    # If it were notified of results, the operation would keep it alive, and would never be
    # cancelled.
    _is_told = False

    def __init__(
        self,
        scheduler: Scheduler,
        begin: Callable[[Listener], Operation],
        calls: Iterator[Arguments],
        packing: Callable[[Operation], PackingOptions],
        window: float,
        ordered: bool,
        report: Callable[[Operation], Reporter | None],
        step: int = 1,
    ) -> None:
        """Take `step` items at a time once the window is full."""
        self._scheduler = scheduler
        self._window = window
        self._step = step
        self._ordered = ordered
        self._arrived: deque[int] = deque()
        self._next = 0
        self._source_error: BaseException | None = None
        self._turn = threading.RLock()  # the source of the items is the caller's code
        self._operation = begin(self)
        self._calls = calls
        self._packing = packing(self._operation)
        self._reporter = report(self._operation)
        weakref.finalize(self, dropped, scheduler, self._operation, window).atexit = False
        self._fill()

    def __iter__(self) -> ResultIterator[R]:
        return self

    @not_compiled
    def next(self, timeout: float | None = None) -> R:
        """Wait for the next result, and return it.

        Args:
            timeout: the seconds after which only your wait ends. The call goes on.

        Raises:
            StopIteration: all results have been returned.
            multiprocessing.TimeoutError: the result has not come within `timeout` seconds. You can
                call `next` again for the same result.
            Exception: the exception of the call, or of the source of the items. You can call `next`
                again for later results.
        """
        timeout = seconds_or_none("timeout", timeout)
        # several threads may share the iterator
        with self._turn, attended(self._scheduler.callbacks, self._reporter, timeout):
            if self._next == self._operation.added:
                self._end()
            try:
                is_there = self._scheduler.wait_until(self._is_there, timeout)
            except BaseException:  # KeyboardInterrupt, above all
                self._operation.note_interrupt(self._scheduler.cancel_with_grace)
                raise
            if not is_there:
                raise LateError(not_yet("next", timeout))
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
                raise RuntimeError(
                    f"{name} raised StopIteration, which would have ended the results"
                ) from error
            finally:
                # After an interrupt, the outcome is still stored, and `next` may return it later.
                if index not in self._operation.outcomes:
                    self._next += 1
                    if not self._ordered:
                        self._arrived.popleft()

    __next__ = next

    def _is_there(self) -> bool:
        """Whether the next result has come, or never will. Its call may have been added after all
        calls were cancelled."""
        return self._has_come() or self._operation.limit == 0

    def _has_come(self) -> bool:
        return self._next in self._operation.outcomes if self._ordered else bool(self._arrived)

    def _end(self) -> None:
        if self._reporter is not None:
            self._reporter.end()
        error, self._source_error = self._source_error, None
        raise StopIteration if error is None else error

    def _fill(self, asked: int = 0) -> None:
        """Add calls until the window is full or the source is empty. `asked` results are about to
        be returned."""
        try:
            # All results of a step that has begun count as returned.
            steps_given = math.ceil((self._next + asked) / self._step)
            self._add_some(steps_given * self._step)
        except BaseException:  # as in `next`; exceptions of the source are caught before
            self._operation.note_interrupt(self._scheduler.cancel_with_grace)
            raise

    def _add_some(self, given: int) -> None:
        """Add as many calls as the window allows. If their source raises an error, keep it until
        the results before it have been returned."""
        before = self._operation.added, self._operation.sealed
        window_size = 1  # the workers begin with the first call, because the source may be slow
        while not self._operation.sealed and self._operation.added - given < self._window:
            try:
                args, kwargs = next(self._calls)
                self._operation.add(pack_call(self._packing, self._operation.added, args, kwargs))
            except StopIteration:
                self._operation.sealed = True
            except Exception as error:
                self._source_error = error
                self._operation.sealed = True
            if self._operation.added - before[0] == window_size:
                window_size *= 4
                self._scheduler.admit(self._operation)
        if (self._operation.added, self._operation.sealed) != before:
            self._scheduler.admit(self._operation)

    def _cancel_rest(self) -> None:
        """Cancel the calls that have not begun. For these, `next` raises `CancelledError`. After an
        interrupt, `next` is not called again."""
        if self._operation.was_interrupted:
            self._scheduler.cancel_with_grace(self._operation)
            return
        self._operation.sealed = True
        if not self._operation.has_ended:
            self._scheduler.cancel_queued(self._operation)


def dropped(scheduler: Scheduler, operation: Operation, window: float) -> None:
    """Cancel the operation of an iterator that is gone."""
    # If the window is infinite, all calls run even if nobody reads their results.
    if not operation.sealed or (window < math.inf and not operation.finished):
        scheduler.cancel(operation)


MOST_SHOWN = 10**1000  # Python refuses to write integers of more than a few thousand digits


# --- seconds as the caller gives them


def not_yet(method: str, timeout: float | None) -> str:
    """Return the message of the error that `method` raises."""
    return (
        f"no result within the timeout of {method} ({timeout} s); the call goes on, and you can "
        "wait again. To end a call that takes long, give the pool, the map or apply_async a timeout"
    )


def seconds_or_none(name: str, given: object) -> float | None:
    """Do as `seconds_given`, but accept None."""
    return None if given is None else seconds_given(name, given, "a number of seconds, or None")


def seconds_given(name: str, given: Any, expected: str = "a number of seconds") -> float:
    """Return `given` as a float.

    Raises:
        TypeError, ValueError: `given` is not a number, or a float cannot hold it. The message names
            the argument and its value.
    """
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} must be {expected} ({name}: {given!r})")
    try:
        seconds = float(given)
    except OverflowError:
        shown = (
            "more than 1000 digits"
            if isinstance(given, int) and abs(given) >= MOST_SHOWN
            else given
        )
        raise ValueError(
            f"{name} must be {expected}; for no limit, use math.inf ({name}: {shown})"
        ) from None
    if math.isnan(seconds):
        raise ValueError(f"{name} must be {expected} ({name}: nan)")
    return seconds
