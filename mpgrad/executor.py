"""`Executor` is a `concurrent.futures.Executor` over a pool. Code for `ProcessPoolExecutor` gets
gradients by changing one name.

A dead worker breaks a ProcessPoolExecutor for good, and its results are copies without a history.
Here another worker runs the calls again. Only a call that kills its workers every time fails, with
an exception that is also a `BrokenProcessPool`. Results keep their gradients after a `shutdown`,
because a worker ends only when it keeps no more graphs. This module runs in the caller only.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import inspect
import math
import os
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, TypeVar

from mpgrad.calls.operations import Operation
from mpgrad.errors import RemoteTraceback, suggests, traceback_of, write
from mpgrad.pool import Pool
from mpgrad.progress import Progress
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.stats import PoolStats
from mpgrad.submission.options import CallOptions, MoreOptions, positive
from mpgrad.submission.results import (
    DifferentiableFuture,
    LateError,
    ResultIterator,
    seconds_or_none,
)
from mpgrad.submission.starting import Source, callable_of, iterator
from mpgrad.tasks.wrappers import Initializer
from mpgrad.timeline import Timeline
from mpgrad.tracebacks import hide_own_frames, without_own_frames

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Executor"]

R = TypeVar("R")

POOL_OPTIONS = [
    name
    for name, each in inspect.signature(Pool).parameters.items()
    if each.kind is each.KEYWORD_ONLY
]


class Executor(concurrent.futures.Executor):
    """A `concurrent.futures.ProcessPoolExecutor` with gradients.

    A `with` block waits at its end until all submitted calls are done. If an interrupt
    (KeyboardInterrupt, SystemExit) leaves the block, all calls are cancelled. This includes running
    calls, unless they end within 0.2 s.

    Args:
        max_workers: the number of workers. None: one for each CPU that this process may use.
        mp_context: a context of `multiprocessing`. None: mpgrad's own.
        initializer: a function that each worker calls once, with `initargs`.
        initargs: the arguments of `initializer`.
        max_tasks_per_child: the number of calls after which a worker is replaced. None: never.
        **options: see `mpgrad.Pool`.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type. The message names
            the argument and its value.

    Example:
        >>> import torch, mpgrad
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with mpgrad.Executor(max_workers=2) as executor:
        ...     squares = list(executor.map(torch.square, [x, x * 3]))
        >>> sum(each.sum() for each in squares).backward()      # even after the shutdown
        >>> x.grad
        tensor([20., 40.])
    """

    @suggests("Executor", *POOL_OPTIONS)
    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        *,
        max_tasks_per_child: int | None = None,
        **options: Unpack[MoreOptions],
    ) -> None:
        # The message is that of concurrent.futures.
        if isinstance(max_workers, int) and max_workers <= 0:
            raise ValueError(f"max_workers must be greater than 0 (max_workers: {max_workers})")
        if max_workers is not None:
            positive("max_workers", max_workers)
        if max_tasks_per_child is not None:
            positive("max_tasks_per_child", max_tasks_per_child)
        if initializer is not None:
            if not callable(initializer):
                raise TypeError(f"initializer must be callable (initializer: {initializer!r})")
            initializer = Initializer(initializer)
        self._pool = Pool(
            max_workers, initializer, initargs, max_tasks_per_child, mp_context, **options
        )
        # The lock guards the sets below. Finalizers and signal handlers may take it again.
        self._lock = threading.RLock()
        self._shut_down = False
        self._futures: weakref.WeakSet[DifferentiableFuture[Any]] = weakref.WeakSet()
        self._maps: weakref.WeakSet[Operation] = weakref.WeakSet()
        UNFINISHED.add(self._pool._scheduler)
        # Submitted calls still run after the executor is gone.
        weakref.finalize(self, self._pool._leave).atexit = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> DifferentiableFuture[R]:
        """Run ``fn(*args, **kwargs)`` on a worker, as `Pool.submit` does.

        `Executor(timeout=)` limits the time that each call runs. The future's `cancel_after` sets a
        deadline, which includes the time that the call waits.

        If the call cannot be sent, the future raises the error, as in `concurrent.futures`.

        Raises:
            RuntimeError: the executor was shut down.
            BrokenProcessPool: workers cannot be started.
            TypeError: `fn` is not callable.

        Example:
            >>> import torch, mpgrad
            >>> x = torch.ones(3, requires_grad=True)
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     executor.submit(torch.dot, x, x).result().backward()
            >>> x.grad
            tensor([2., 2., 2.])
        """
        function = callable_of(fn)
        self._check_open()
        try:
            # No lock is held here, because pickling runs the caller's code.
            future = self._pool.submit(function, *args, **kwargs)
        except Exception as error:
            # Another thread may have shut down the executor in the meantime.
            self._check_open()
            self._pool._scheduler.life.check_open()
            future = self._pool._submitter.failed_call(without_frames(error))
        with self._lock:
            self._futures.add(future)
        return future

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[R]:
        """Return an iterator over ``map(fn, *iterables)``, computed by the workers, in order.

        Args:
            fn: a function with as many arguments as there are iterables.
            iterables: the arguments. All items are taken at once, unless there is a `buffersize`.
            timeout: the limit of your wait for the whole map. `next` raises after this number of
                seconds from now. Calls that have not begun are then cancelled.
                `Executor(timeout=...)` limits each call.
            chunksize: the number of items that are sent together. None: it follows the measured
                cost of a call.
            buffersize: the number of chunks that are taken ahead of the results, as in Python 3.14.
                Without a `chunksize` it is the number of items. The iterables may be endless.
                None: all items are taken at once.

        Raises:
            concurrent.futures.TimeoutError: a result has not arrived in time. (Since Python 3.11
                this is `TimeoutError`.)
            Exception: the exception of the first call that failed or could not be sent.
            RuntimeError: the executor was shut down. With a `buffersize`, `next` also raises it
                once it has returned the results of all items taken before the shutdown.
            ValueError: `chunksize` or `buffersize` is less than 1.
            TypeError: one of them is not an integer, or `timeout` is not a number.

        Example:
            >>> import itertools, mpgrad
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     powers = list(executor.map(pow, [2, 3], [5, 2]))
            ...     endless = executor.map(abs, itertools.count(), buffersize=4)
            ...     powers, [next(endless) for _ in range(5)]
            ([32, 9], [0, 1, 2, 3, 4])
        """
        function = callable_of(fn)
        if chunksize is not None:
            positive("chunksize", chunksize)
        if buffersize is not None:
            check_buffersize(buffersize)
        seconds = seconds_or_none("timeout", timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        arguments = zip(*(iterator("the items", each) for each in iterables), strict=False)
        # The caller's code runs here, and may use the executor.
        items = list(arguments) if buffersize is None else self._while_open(arguments)
        window = math.inf if buffersize is None else buffersize * (chunksize or 1)
        self._check_open()
        try:
            source = Source.of_arguments(items)
            results = self._pool._submitter.iterate(
                function, source, CallOptions(chunksize), ordered=True, window=window
            )
        except Exception as error:
            self._pool._scheduler.life.check_open()
            return raised_later(without_frames(error))
        with self._lock:
            self._maps.add(results._operation)
        return in_time(results, seconds, deadline)

    def stats(self) -> PoolStats:
        """Return statistics of each worker and of the pool, as `Pool.stats` does.

        They count what is in progress, done and kept, and the workers that died.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     _ = list(executor.map(abs, range(10)))
            ...     executor.stats().calls
            10
        """
        return self._pool.stats()

    def timeline(self, path: str | os.PathLike[str] | None = None) -> Timeline:
        """Record which worker runs which item in a block, and when, as `Pool.timeline` does.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     with executor.timeline() as timeline:
            ...         _ = executor.submit(abs, -1).result()
            >>> forwards = [each for each in timeline.events if each.get("cat") == "forward"]
            >>> [event["pid"] for event in forwards]  # on worker 1
            [2]
        """
        return self._pool.timeline(path)

    def progress(self, progress: Progress = True) -> contextlib.AbstractContextManager[None]:
        """Show how many futures and backwards are done in a block, as `Pool.progress` does.

        Example:
            >>> import mpgrad
            >>> shown = []
            >>> def show(done, total, seconds_left):
            ...     shown.append((done, total))
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     with executor.progress(show):
            ...         _ = list(executor.map(abs, range(10)))
            >>> shown[-1]
            (10, 10)
        """
        return self._pool.progress(progress)

    def resize(self, max_workers: int) -> None:
        """Change the number of workers, as `Pool.resize` does.

        Surplus workers get no new calls, and end once they keep no graphs.

        Raises:
            RuntimeError: the executor was shut down.
            ValueError: `max_workers` is less than 1. Otherwise see `Pool.resize`.
            TypeError: `max_workers` is not an integer.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     executor.resize(2)
            ...     list(executor.map(abs, [-1, -2]))
            [1, 2]
        """
        self._check_open()
        self._pool.resize(positive("max_workers", max_workers))

    @without_own_frames
    def shutdown(
        self, wait: bool = True, *, cancel_futures: bool = False, kill_workers: bool = False
    ) -> None:
        """Accept no more calls. Workers end when all work is done and their graphs are no longer
        needed.

        Args:
            wait: wait until all submitted calls and the workers that keep no graph have ended; with
                `kill_workers`, until all workers have ended.
            cancel_futures: cancel calls that have not begun.
            kill_workers: kill the workers, as in loky. All calls that have not ended fail with a
                `BrokenProcessPool`. Results that have arrived stay valid, but their graphs are
                gone.

        Example:
            >>> import time, mpgrad
            >>> executor = mpgrad.Executor(max_workers=1)
            >>> future = executor.submit(abs, -1)
            >>> executor.shutdown()
            >>> future.done(), future.result()
            (True, 1)
            >>> executor = mpgrad.Executor(max_workers=1)
            >>> future = executor.submit(time.sleep, 60)
            >>> executor.shutdown(kill_workers=True)
            >>> future.exception()
            BrokenProcessPool('shutdown(kill_workers=True) ended workers, their calls and graphs')
        """
        with self._lock:
            self._shut_down = True
            futures, maps = list(self._futures), list(self._maps)
        if cancel_futures:
            for future in futures:
                future.cancel()
            for operation in maps:
                self._pool._scheduler.cancel_queued(operation)
        self._pool._leave()
        if kill_workers:
            self._break_off("shutdown(kill_workers=True)", signal.SIGKILL)
        if wait and kill_workers:
            self._pool._scheduler.join()
        elif wait:
            self._pool._scheduler.await_all()
            self._pool._scheduler.await_unneeded()

    def terminate_workers(self) -> None:
        """Shut down, and send the workers SIGTERM, as `concurrent.futures.ProcessPoolExecutor` does
        in Python 3.14.

        Calls that have not begun are cancelled. Calls that run fail with a `BrokenProcessPool`.
        Results that have arrived stay valid, but their graphs are gone, and a backward raises the
        same error. The method does not wait for the workers. A worker that has not ended 2 s later
        is killed.

        Example:
            >>> import time, mpgrad
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     future = executor.submit(time.sleep, 60)
            ...     executor.terminate_workers()
            ...     mpgrad.wait([future]).done == {future}
            True
        """
        self.shutdown(wait=False, cancel_futures=True)
        self._break_off("terminate_workers()", signal.SIGTERM)

    def kill_workers(self) -> None:
        """Shut down as `terminate_workers` does, but with SIGKILL, which no call can catch.

        Example:
            >>> import time, mpgrad
            >>> with mpgrad.Executor(max_workers=1) as executor:
            ...     future = executor.submit(time.sleep, 60)
            ...     executor.kill_workers()
            ...     mpgrad.wait([future]).done == {future}
            True
        """
        self.shutdown(wait=False, cancel_futures=True)
        self._break_off("kill_workers()", signal.SIGKILL)

    def _break_off(self, asked: str, by: signal.Signals) -> None:
        """End the workers with this signal, because of the call `asked`."""
        error = BrokenProcessPool(f"{asked} ended workers, their calls and graphs")
        self._pool._scheduler.break_off(error, by)

    @without_own_frames
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # A GeneratorExit is not an interrupt: a caller may close a generator when it has enough
        # results.
        if error is not None and not isinstance(error, (Exception, GeneratorExit)):
            self.shutdown(wait=False, cancel_futures=True)
            self._pool._scheduler.cancel_all_with_grace()
        self.shutdown()

    def _while_open(self, arguments: Iterator[R]) -> Iterator[R]:
        """Yield the arguments of a map that takes them as needed. After a shutdown, raise."""
        for each in arguments:
            self._check_open()
            yield each

    def _check_open(self) -> None:
        if self._shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if INTERPRETER_ENDS.is_set():
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")


def without_frames(error: Exception) -> Exception:
    """Return `error` with its traceback only as text.

    The frames would keep the arguments for as long as the future.
    """
    write(error, "__cause__", RemoteTraceback(traceback_of(error)))
    write(error, "__context__", None)
    # The exception's class may have a `with_traceback` of its own.
    return BaseException.with_traceback(error, None)


def check_buffersize(buffersize: object) -> None:
    """Raise TypeError or ValueError for a wrong value, with the messages of concurrent.futures."""
    if isinstance(buffersize, bool) or not isinstance(buffersize, int):
        raise TypeError(f"buffersize must be an integer or None (buffersize: {buffersize!r})")
    if buffersize < 1:
        raise ValueError(f"buffersize must be None or > 0 (buffersize: {buffersize})")


def raised_later(error: Exception) -> Iterator[Any]:
    """Return an iterator that raises at the first `next`, because its calls could not be sent."""
    yield from ()
    raise error


def in_time(
    results: ResultIterator[R], seconds: float | None, deadline: float | None
) -> Iterator[R]:
    """Yield the results, each before the deadline.

    If the caller stops iterating, calls that have not begun are cancelled.
    """
    try:
        while True:
            try:
                yield results.next(None if deadline is None else deadline - time.monotonic())
            except StopIteration:
                return
            except LateError:
                raise concurrent.futures.TimeoutError(
                    f"no result within the timeout of map ({seconds} s since it was called); calls "
                    "that have not begun are cancelled"
                ) from None
    except BaseException as error:
        hide_own_frames(error)
        raise
    finally:
        results._cancel_rest()


# the schedulers of executors
UNFINISHED: weakref.WeakSet[Scheduler] = weakref.WeakSet()
INTERPRETER_ENDS = threading.Event()


def finish_all() -> None:
    """Finish all submitted calls when the interpreter ends, as in concurrent.futures."""
    INTERPRETER_ENDS.set()
    for scheduler in list(UNFINISHED):
        # A forked child also has its parent's schedulers.
        if scheduler.life.is_ours:
            scheduler.leave()
            scheduler.await_all()


# This runs before the pools' own end, which was registered earlier.
atexit.register(finish_all)
