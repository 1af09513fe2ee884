"""Results that are asked for later: `multiprocessing.Pool`'s AsyncResult and iterators, and a
differentiable future. Caller only.

All of them make tensors and autograd nodes in the thread that asks, never in the scheduling thread.
The scheduling thread only sets the state of a future, for which it takes no lock (see
`mpgrad.calls.futures`). Callbacks run elsewhere: see `mpgrad.callbacks.later`. The iterator of
`imap` gives results one by one, and takes items from its source only as they are needed.
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
from mpgrad.calls.packing import PackedCall
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
        self._is_collected = False  # somebody has asked for the result, or whether there is one
        self._tells = callback is not None or error_callback is not None
        self._operation = begin(self)
        self._reporter = report(self._operation)

    @not_compiled
    def get(self, timeout: float | None = None) -> R:
        """The result, the same object at every call.

        Args:
            timeout: the seconds after which only your wait ends. The calls go on.

        Raises:
            multiprocessing.TimeoutError: it has not come within `timeout` seconds.
            Exception: what the first failing call raised.
        """
        if not self._wait(timeout):
            raise multiprocessing.TimeoutError(not_yet("get", timeout))
        return self._take()

    def _take(self) -> R:
        """The result, which has come."""
        self._collect()
        with self._lock:
            if not self._fetched:
                # after an interrupt it can be asked for again
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
        """Whether all calls have ended."""
        return self._operation.finished

    def successful(self) -> bool:
        """Whether no call raised.

        Raises:
            ValueError: the result is not ready.
        """
        if not self.ready():
            raise ValueError("the result is not ready; wait for it first (result.wait())")
        self._collect()
        return self._operation.first_failure() is None

    def _on_finished(self) -> None:
        """Has callbacks run; makes the value only for one."""
        failed = self._operation.first_failure()
        if failed is None:
            if self._callback is not None:
                later(call_back, self._callback, self._take)
        elif self._error_callback is not None:
            later(call_back, self._error_callback, failed.error)
        else:
            self._scheduler.uncollected.note(self._number, failed)
            # before it was noted: whoever waits may be faster than this thread
            if self._is_collected:
                self._collect()

    def _collect(self) -> None:
        """Nobody else has to be told of a failure."""
        self._is_collected = True
        failed = self._operation.first_failure()
        if failed is not None:
            self._scheduler.uncollected.collected(failed)


def call_back(callback: Callable[[Any], object], make: Callable[[], object]) -> None:
    """Call it with what `make` gives."""
    try:
        callback(make())
    except BaseException:  # it is the caller's code in a thread of the pool, which has to go on
        report(logging.ERROR, "a callback of the pool raised", with_traceback=True)


class TaskException(Exception):
    """What `concurrent.futures` is told that a call raised. Nobody sees it: `DifferentiableFuture`
    gives what it really was."""


class DifferentiableFuture(UnlockedFuture[R], DeferredValue, Listener):
    """A `concurrent.futures.Future` whose result carries gradients, made in the thread that asks
    for it.

    It may stand, anywhere, among the arguments of further calls, which then begin as soon as it is
    there.

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
        """As in `concurrent.futures`: the result of the call, or the exception that it raised.

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
        """As in `concurrent.futures`: what the call raised, or None.

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
        """What asyncio asks for from Python 3.15 on: whether it is done, and cancelled; its result;
        its exception."""
        if not self.done() or self.cancelled():
            return self.done(), self.cancelled(), None, None
        error = self.exception()
        return True, False, self.result() if error is None else None, error

    def _await_failure(self, method: str, timeout: float | None) -> FailedResult | None:
        """Wait, in that method, until it is done; what it failed with, or None.

        Raises:
            concurrent.futures.TimeoutError: it is not done within `timeout` seconds.
            concurrent.futures.CancelledError: it was cancelled.
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
        """Cancel the call, unless it runs or is done; calls that were given its result then fail.

        Args:
            force: also if it runs: its worker is killed, and what else that one had is done by
                others; without retries, the graphs that it had are lost (engine "thread": the call
                runs to its end, and nobody hears of it).

        Returns:
            Whether it is cancelled. With `force`: whether it was not done.

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
            with attended(self._scheduler.callbacks):
                return self._scheduler.wait_until(self.done, timeout)
        except BaseException:  # KeyboardInterrupt, above all
            self._operation.note_interrupt(self._scheduler.cancel_with_grace)
            raise

    def cancelled(self) -> bool:
        """As in `concurrent.futures`; True also once `cancel(force=True)` or `cancel_after` has
        ended the call."""
        return super().cancelled() or (self._failed is not None and self._failed.is_cancelled)

    def cancel_after(self, seconds: float) -> None:
        """A deadline: cancel the call with `force`, unless it is done `seconds` from now.

        Raises:
            TypeError, ValueError: `seconds` is no number, or negative.

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
        """As in `concurrent.futures`: have `fn(future)` called when the future is done, or at once
        where it is.

        It runs in a thread of the pool, after the callbacks of futures that were done before. It
        may wait for other calls.

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
        """Has callbacks run; makes no value."""
        outcome = self._operation.outcomes[0]
        if not self._starts():
            return  # cancelled
        try:
            self._failed = failed = outcome if isinstance(outcome, FailedResult) else None
            if failed is None or failed.is_cancelled:
                self._end(None)  # the value is made by who asks for it
            else:
                self._scheduler.uncollected.note(self._number, failed)
                self._end(TaskException())  # and so is the exception
        except BaseException:
            # a callback of the caller; an Exception of it is taken before
            report(logging.ERROR, "a callback of a future raised", with_traceback=True)


# --- what `imap` returns


class LateError(multiprocessing.TimeoutError):
    """A result has not come in time. A task may raise the other kind."""


class ResultIterator(Listener, Generic[R]):
    """The results of `Pool.imap` or `Pool.imap_unordered`; takes items from their source only as
    far as it needs them.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     results = pool.imap(abs, [-1, -2])
        ...     results.next(timeout=60), list(results)
        (1, [2])
    """

    _is_told = False  # the operation would keep it, and nobody would cancel the rest

    def __init__(
        self,
        scheduler: Scheduler,
        begin: Callable[[Listener], Operation],
        pack: Callable[[Operation], Iterator[Callable[[], PackedCall]]],
        window: float,
        ordered: bool,
        report: Callable[[Operation], Reporter | None],
        step: int = 1,
    ) -> None:
        """`step`: how many items are taken at a time, once the window is full."""
        self._scheduler = scheduler
        self._window = window
        self._step = step
        self._ordered = ordered
        self._arrived: deque[int] = deque()
        self._next = 0
        self._source_error: BaseException | None = None
        self._turn = threading.RLock()  # the source of the items is the caller's code
        self._operation = begin(self)
        self._calls = pack(self._operation)  # each packs one call
        self._reporter = report(self._operation)
        weakref.finalize(self, dropped, scheduler, self._operation, window).atexit = False
        self._fill()

    def __iter__(self) -> ResultIterator[R]:
        return self

    @not_compiled
    def next(self, timeout: float | None = None) -> R:
        """The next result.

        Args:
            timeout: the seconds after which only your wait ends. The call goes on.

        Raises:
            StopIteration: all results have been given.
            multiprocessing.TimeoutError: it has not come within `timeout` seconds; it can be asked
                for again.
            Exception: what the call raised, or what the source of the items raised; later results
                can still be asked for.
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
                # unless there was an interrupt: then it can be asked for again
                if index not in self._operation.outcomes:
                    self._next += 1
                    if not self._ordered:
                        self._arrived.popleft()

    __next__ = next

    def _is_there(self) -> bool:
        """The next result, or that it never will be: its call may have been added after all were
        cancelled."""
        return self._has_come() or self._operation.limit == 0

    def _has_come(self) -> bool:
        return self._next in self._operation.outcomes if self._ordered else bool(self._arrived)

    def _end(self) -> None:
        if self._reporter is not None:
            self._reporter.end()
        error, self._source_error = self._source_error, None
        raise StopIteration if error is None else error

    def _fill(self, asked: int = 0) -> None:
        """Add calls until the window is full or the source is empty. `asked`: results that are
        about to be given."""
        try:
            # of a step that has begun, all is as good as given
            steps_given = math.ceil((self._next + asked) / self._step)
            self._add_some(steps_given * self._step)
        except BaseException:  # as in `next`; the source's own exceptions do not come here
            self._operation.note_interrupt(self._scheduler.cancel_with_grace)
            raise

    def _add_some(self, given: int) -> None:
        """Have as many calls under way as the window allows; an error of their source is kept until
        its turn."""
        before = self._operation.added, self._operation.sealed
        window_size = 1  # the workers begin with the first; the source may be slow
        while not self._operation.sealed and self._operation.added - given < self._window:
            try:
                self._operation.add(next(self._calls)())
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
        """What has not begun will not; `next` raises `CancelledError` for it. After an interrupt
        there is no `next`."""
        if self._operation.was_interrupted:
            self._scheduler.cancel_with_grace(self._operation)
            return
        self._operation.sealed = True
        if not self._operation.has_ended:
            self._scheduler.cancel_queued(self._operation)


def dropped(scheduler: Scheduler, operation: Operation, window: float) -> None:
    """Nobody holds the iterator any more."""
    # with a window without end, all is asked for, whether anybody looks at it or not
    if not operation.sealed or (window < math.inf and not operation.finished):
        scheduler.cancel(operation)


MOST_SHOWN = 10**1000  # Python refuses to write integers of more than some thousand digits


# --- seconds as the caller gives them


def not_yet(method: str, timeout: float | None) -> str:
    """Return the message of an error."""
    return (
        f"no result within the timeout of {method} ({timeout} s); the call goes on, and you can "
        "wait again. To end a call that takes long, give the pool, the map or apply_async a timeout"
    )


def seconds_or_none(name: str, given: object) -> float | None:
    """As `seconds_given`, where the argument may be None."""
    return None if given is None else seconds_given(name, given, "a number of seconds, or None")


def seconds_given(name: str, given: Any, expected: str = "a number of seconds") -> float:
    """`given` as a float.

    Raises:
        TypeError, ValueError: it is no number, or none that a float can hold; names the argument
            and its value.
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
            f"{name} must be {expected}; if it is to have no end, take math.inf ({name}: {shown})"
        ) from None
    if math.isnan(seconds):
        raise ValueError(f"{name} must be {expected} ({name}: nan)")
    return seconds
