"""Defines errors by who has to act: the caller, something outside the program, or mpgrad itself.

multiprocessing raises several unrelated types. Wrong arguments still raise `TypeError` and
`ValueError`, and an exception of the user's function keeps its type. If an argument does not exist,
the error names the one that may be meant (`suggests`).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
import multiprocessing.pool
import pickle
import signal
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from typing import Any, NamedTuple, ParamSpec, TypeVar

__all__ = [
    "ONE_CALL",
    "AncestorFailedError",
    "CallNames",
    "CallTimeoutError",
    "InternalError",
    "LostGradientError",
    "PoolClosedError",
    "RemoteError",
    "RemoteTraceback",
    "SharedMemoryError",
    "UncarriedResultError",
    "UnsupportedTorchError",
    "WorkerDiedError",
    "add_note",
    "ancestor_failed",
    "contextmanager",
    "error_in_words",
    "failures",
    "kind_name",
    "read",
    "suggests",
    "traceback_of",
    "write",
]

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("mpgrad")


# the noun for a call that was submitted alone and so has no number
ONE_CALL = "call"


class CallNames(NamedTuple):
    """How errors name the calls of an operation."""

    # the function's Python name; "" for one of mpgrad's own functions
    function: str = ""
    # what the caller would name a call: an item, a block of items, or `ONE_CALL`
    noun: str = "item"

    def words(self, index: int | range | None) -> str:
        """Return words such as "item 3 of simulate", "items 0 to 7 of simulate" or "a call of
        simulate"."""
        has_name = self.function and not self.function.endswith("<lambda>")
        of = f" of {self.function}" if has_name else ""
        if index is None or self.noun == ONE_CALL:
            return f"a call{of}"
        if isinstance(index, range):
            return f"{self.noun}s {index[0]} to {index[-1]}{of}"
        return f"{self.noun} {index}{of}"

    def number(self, index: int | range | None) -> int | None:
        """Return the number of the item, or None if an error cannot name a single one."""
        return index if isinstance(index, int) and self.noun != ONE_CALL else None


class PoolClosedError(ValueError):
    """The caller used a pool, or a graph that its workers keep, after `Pool.close` or
    `Pool.terminate`.

    It is a `ValueError`, because `multiprocessing.Pool` raises one for the same mistake.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     pass
        >>> try:
        ...     pool.map(abs, [-1])
        ... except mpgrad.PoolClosedError as error:
        ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
        the pool is closed; make a new one, or call it inside the with block (with mpgrad.Pool() as
        pool: ...)
    """


class WorkerDiedError(BrokenProcessPool):
    """A worker process ended while it was running a call or kept a graph that a backward needs.

    It is a `BrokenProcessPool`, because `concurrent.futures` raises one. Here the pool goes on
    working, and only the calls and backwards that were lost fail.

    Attributes:
        item: index of the item within its map; None for a submitted call, or if no single item
            can be named.
        phase: what the worker was doing: "forward", "backward", "loading the function" (its modules
            and captures) or "start".
        call: what the worker was running, in words such as "item 3 of simulate"; or "".
        worker: the number of the worker.
        exit_code: as in `multiprocessing.Process.exitcode`: negative for a signal, None if it is
            not known.
        detail: the rest of the message (number of tries, likely cause), or "".
        stack: the worker's Python stack, if a crash left one (SIGSEGV, SIGFPE, SIGABRT, SIGBUS,
            SIGILL), else "".

    Example:
        >>> import os, mpgrad
        >>> with mpgrad.Pool(processes=1, retries=0) as pool:
        ...     try:
        ...         pool.map(os._exit, [3])
        ...     except mpgrad.WorkerDiedError as error:
        ...         print(error.item, error.phase, error.exit_code)
        0 forward 3
    """

    def __init__(
        self,
        item: int | None,
        phase: str,
        worker: int,
        exit_code: int | None,
        detail: str = "",
        stack: str = "",
        call: str = "",
    ) -> None:
        self.item = item
        self.phase = phase
        self.call = call
        self.worker = worker
        self.exit_code = exit_code
        self.detail = detail
        self.stack = stack
        super().__init__(item, phase, worker, exit_code, detail, stack, call)
        note_stack(self, stack)

    def __repr__(self) -> str:
        return short_repr(self)

    def __str__(self) -> str:
        at = f", {self.call}" if self.call else ""
        message = f"worker {self.worker} {describe_exit(self.exit_code)} (phase: {self.phase}{at})"
        return f"{message}; {self.detail}" if self.detail else message


class CallTimeoutError(TimeoutError):
    """A call ran longer than the `timeout` of its pool or map, and was killed with its worker.

    It is a `TimeoutError`, as is the error of `result(timeout)`, which ends only your wait.

    Attributes:
        item: index of the item within its map; None for a submitted call, or if no single item
            can be named.
        phase: "forward" or "backward".
        call: the name of the call, such as "item 3 of simulate".
        seconds: the timeout.
        detail: the rest of the message (number of tries).
        stack: the worker's Python stack, or "" if it could not write one (a stopped process).
        worker: the number of the worker, or None if it is not known.

    Example:
        >>> import time, mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     try:
        ...         pool.map(time.sleep, [60], timeout=0.1)
        ...     except mpgrad.CallTimeoutError as error:
        ...         print(error.item, error.phase, error.seconds)
        0 forward 0.1
    """

    def __init__(
        self,
        item: int | None,
        phase: str,
        seconds: float,
        detail: str = "",
        stack: str = "",
        call: str = "a call",
        worker: int | None = None,
    ) -> None:
        self.item = item
        self.phase = phase
        self.call = call
        self.seconds = seconds
        self.detail = detail
        self.stack = stack
        self.worker = worker
        super().__init__(item, phase, seconds, detail, stack, call, worker)
        note_stack(self, stack)

    def __repr__(self) -> str:
        return short_repr(self)

    def __str__(self) -> str:
        limits = f"{self.seconds} s, phase: {self.phase}"
        number = "" if self.worker is None else f" (worker: {self.worker})"
        message = (
            f"{self.call} ran longer than the time limit of a call ({limits}), and was killed with "
            f"its worker{number}"
        )
        return f"{message}; {self.detail}" if self.detail else message


class AncestorFailedError(RuntimeError):
    """A call did not run, because one of its arguments is the result of a call that failed or was
    cancelled. The `__cause__` is that call's error.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     failing = pool.submit(int, "x")
        ...     try:
        ...         pool.submit(abs, failing).result()
        ...     except mpgrad.AncestorFailedError as error:
        ...         print(error.__cause__)
        invalid literal for int() with base 10: 'x'
    """


class SharedMemoryError(MemoryError):
    """The system has no room for a tensor in shared memory. Nothing was changed.

    Example:
        >>> import torch, mpgrad
        >>> items = [torch.ones(2, 3), torch.ones(4)]
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     try:
        ...         sums = pool.map(torch.sum, items)
        ...     except mpgrad.SharedMemoryError:      # the loop needs no shared memory
        ...         sums = [torch.sum(item) for item in items]
        >>> sums
        [tensor(6.), tensor(4.)]
    """


class UnsupportedTorchError(RuntimeError):
    """The installed PyTorch lacks a behaviour that mpgrad relies on. Gradients would be wrong, so
    nothing runs.

    Attributes:
        version: the version of PyTorch.
        behaviours: what PyTorch should do but does not do, in words.
        tried: minor versions of PyTorch that mpgrad has been tried with.

    Example:
        >>> import mpgrad
        >>> error = mpgrad.UnsupportedTorchError(
        ...     "2.6.0", ["a backward runs later nodes first"], ["2.8", "2.9"]
        ... )
        >>> f"install torch {error.tried[-1]} instead of {error.version}"
        'install torch 2.9 instead of 2.6.0'
    """

    def __init__(self, version: str, behaviours: Sequence[str], tried: Sequence[str]) -> None:
        self.version = version
        self.behaviours = tuple(behaviours)
        self.tried = tuple(tried)
        super().__init__(version, self.behaviours, self.tried)

    def __str__(self) -> str:
        more = f", and {len(self.behaviours) - 1} more" if len(self.behaviours) > 1 else ""
        return (
            f"torch {self.version} lacks a behaviour that mpgrad relies on: "
            f"{self.behaviours[0]}{more}; "
            f"install a version that mpgrad has been tried with (torch {', '.join(self.tried)})"
        )


class InternalError(RuntimeError):
    """mpgrad itself has a bug. Please report it, with the traceback.

    Example:
        >>> import traceback, mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     try:
        ...         results = pool.map(abs, [-1, 2])
        ...     except mpgrad.InternalError:
        ...         report = traceback.format_exc()      # send us this
        ...         raise
        >>> results
        [1, 2]
    """


class LostGradientError(RuntimeError):
    """A backward would reach a tensor that only a worker has, so its gradient would be lost."""


class RemoteError(RuntimeError):
    """Replaces a task's exception that cannot be pickled. The message has its type and text.

    Example:
        >>> import mpgrad
        >>> def fails(item):
        ...     error = ValueError(f"wrong item ({item})")
        ...     error.others = (each for each in ())      # no generator can be pickled
        ...     raise error
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     try:
        ...         pool.map(fails, [3])
        ...     except mpgrad.RemoteError as error:
        ...         print(error)
        ValueError: wrong item (3)
    """


class RemoteTraceback(multiprocessing.pool.RemoteTraceback, _RemoteTraceback):  # type: ignore[name-defined,misc]
    """The traceback of an exception in a worker, as text. It is the `__cause__` of the exception
    that the caller gets.

    It derives from the `RemoteTraceback` classes of `multiprocessing.pool` and
    `concurrent.futures.process`, which are used in the same way.

    Attributes:
        text: the traceback.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     try:
        ...         pool.map(int, ["x"])
        ...     except ValueError as error:
        ...         cause = error.__cause__
        >>> isinstance(cause, mpgrad.RemoteTraceback), cause.text.splitlines()[-1]
        (True, "ValueError: invalid literal for int() with base 10: 'x'")
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tb = f'\n"""\n{text}"""'


class UncarriedResultError(
    multiprocessing.pool.MaybeEncodingError,  # type: ignore[name-defined,misc]
    pickle.PicklingError,
    TypeError,
):
    """A result cannot be sent to the caller.

    It is a `MaybeEncodingError`, which `multiprocessing.Pool` raises, and a pickle error, which
    `concurrent.futures` raises.

    Attributes:
        exc: the `repr` of the exception that was raised.
        value: the `repr` of the result.
    """

    def __init__(self, message: str, exc: str, value: str) -> None:
        Exception.__init__(self, message, exc, value)
        self.exc = exc
        self.value = value

    def __str__(self) -> str:
        return str(self.args[0])


def ancestor_failed(error: BaseException, call: str) -> AncestorFailedError:
    """Return the error of a call (for example "item 3 of simulate") whose argument comes from a
    call that raised `error`."""
    described = error_in_words(error)
    failed = AncestorFailedError(
        f"{call} did not run, because a call that it needs failed ({described})"
    )
    failed.__cause__ = error
    return failed


def describe_exit(exit_code: int | None) -> str:
    """Describe the exit in words that follow a subject, such as "was killed by SIGKILL".

    A negative code is the number of a signal.
    """
    if exit_code is None:
        return "died"
    if exit_code < 0:
        try:
            return f"was killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    return f"exited with status {exit_code}"


# --- fields of any exception: its class may be a frozen dataclass or have properties that raise


def kind_name(error: BaseException) -> str:
    """Return the name of the exception's class, which a metaclass may hide."""
    return str(vars(type)["__qualname__"].__get__(type(error)))


def read(error: BaseException, name: str) -> Any:
    """Return one of Python's own fields of an exception, such as `__cause__`."""
    return vars(BaseException)[name].__get__(error)


def write(error: BaseException, name: str, value: Any) -> None:
    """Set one of Python's own fields of an exception, such as `__cause__`."""
    vars(BaseException)[name].__set__(error, value)


def error_in_words(error: BaseException) -> str:
    """Return the last line of the exception's traceback.

    If the exception has no text, or if reading the text fails, return only the class.
    """
    try:
        text = str(error)
    except BaseException as reason:
        return f"{kind_name(error)}, whose text is not available ({kind_name(reason)})"
    return f"{kind_name(error)}: {text}" if text else kind_name(error)


def traceback_of(error: BaseException) -> str:
    """Return the traceback as text. Parts that the exception's own code fails to return are left
    out."""
    entries = read(error, "__traceback__")
    try:
        return "".join(traceback.format_exception(type(error), error, entries))
    # a property of the exception may raise anything
    except BaseException as reason:
        frames = "".join(traceback.format_tb(entries))
        unread = f"(the rest of its traceback cannot be read: {error_in_words(reason)})"
        return f"Traceback (most recent call last):\n{frames}{unread}\n{error_in_words(error)}\n"


class Block(contextlib.AbstractContextManager[T]):
    """The context manager that `contextmanager` makes from a generator."""

    def __init__(self, steps: Iterator[T]) -> None:
        self._steps: Any = steps  # a generator

    def __enter__(self) -> T:
        value: T = next(self._steps)
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        entries: types.TracebackType | None,
    ) -> None:
        if error is None:
            next(self._steps, None)
            return
        try:
            self._steps.throw(error)
        except BaseException as raised:
            # Python turns a StopIteration that leaves a generator into a RuntimeError.
            if raised is not error and read(raised, "__cause__") is not error:
                raise
            BaseException.with_traceback(error, entries)


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, Block[T]]:
    """Make a context manager, as `contextlib.contextmanager` does, but also for frozen exceptions.

    `contextlib`'s sets attributes on an exception that leaves the block, and a frozen dataclass
    refuses that.

    Assumes: an exception that is raised in the block also leaves the generator.
    """

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(function(*args, **kwargs))

    return made


def add_note(error: BaseException, note: str) -> None:
    """Do what `error.add_note(note)` does. Python 3.10 does not have this method."""
    notes = read(error, "__dict__").setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def note_stack(error: BaseException, stack: str) -> None:
    if stack:
        add_note(error, f"the worker's Python stack:\n{stack}")


def short_repr(error: BaseException) -> str:
    """Return the type and the message. The arguments contain whole stacks."""
    return f"{type(error).__name__}({str(error)!r})"


# --- arguments that have other names in other libraries

# The names of the number of workers, and of other arguments, in joblib, concurrent.futures, torch
# and multiprocess libraries.
WORKERS = (
    "processes",
    "max_workers",
    "n_jobs",
    "num_workers",
    "nprocs",
    "workers",
    "n_workers",
    "n_processes",
    "num_processes",
)
ELSEWHERE = {
    "max_tasks_per_child": "maxtasksperchild",
    "maxtasksperchild": "max_tasks_per_child",
    "mp_context": "context",
    "context": "mp_context",
    "start_method": "context",
    "backend": "engine",
    "num_threads": "threads_per_worker",
    "n_threads": "threads_per_worker",
    "device": "devices",
}


def refuse_unknown(subject: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if a given name is not known. The message names the one that may be meant."""
    known = list(known)
    for name in given:
        if name in known:
            continue
        meant = [
            each
            for each in (*(WORKERS if name in WORKERS else ()), ELSEWHERE.get(name, ""))
            if each in known
        ]
        close = (meant or difflib.get_close_matches(name, known, 1))[:1]
        hint = f"; did you mean {close[0]!r}?" if close else f" (there are: {', '.join(known)})"
        raise TypeError(f"{subject} got an unexpected keyword argument {name!r}{hint}")


def suggests(subject: str, *options: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a method refuse unknown keyword arguments, except the `options`, which it passes on."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        _, *parameters = inspect.signature(function).parameters.values()  # except self
        known = [*(each.name for each in parameters if each.kind is not each.VAR_KEYWORD), *options]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            refuse_unknown(subject, kwargs, known)
            return function(*args, **kwargs)

        return checked

    return decorated


# --- exceptions in place of results


def failures(results: Iterable[object]) -> dict[int, BaseException]:
    """Return the exceptions among the results of a map with ``on_error="return"``, by index.

    An exception that the function itself returned also counts.

    Example:
        >>> import mpgrad
        >>> items = ["1", "x", "3"]
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     results = pool.map(int, items, on_error="return")
        >>> mpgrad.failures(results)
        {1: ValueError("invalid literal for int() with base 10: 'x'")}
    """
    return {index: each for index, each in enumerate(results) if isinstance(each, BaseException)}
