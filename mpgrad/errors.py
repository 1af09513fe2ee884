"""Errors by blame: what the caller did, what the outside did, what we did.

multiprocessing raises whatever type is at hand; here the class already says whose move it is. Wrong
arguments stay `TypeError` and `ValueError`, and an exception of the user's function keeps its own
type. An argument that we do not have gets an error that names ours (`suggests`).
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
    "kind_name",
    "read",
    "suggests",
    "traceback_of",
    "write",
]

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("mpgrad")


ONE_CALL = "call"  # the noun of one that was asked for by itself, and has no number


class CallNames(NamedTuple):
    """How errors name the calls of an operation."""

    function: str = ""  # as Python calls it; "" for one of mpgrad's own
    # what a call is in the caller's eyes: an item, or a block of them, or `ONE_CALL`
    noun: str = "item"

    def words(self, index: int | range | None) -> str:
        """For example "item 3 of simulate", "items 0 to 7 of simulate", "a call of simulate"."""
        has_name = self.function and not self.function.endswith("<lambda>")
        of = f" of {self.function}" if has_name else ""
        if index is None or self.noun == ONE_CALL:
            return f"a call{of}"
        if isinstance(index, range):
            return f"{self.noun}s {index[0]} to {index[-1]}{of}"
        return f"{self.noun} {index}{of}"

    def number(self, index: int | range | None) -> int | None:
        """Of the item, where errors can name a single one."""
        return index if isinstance(index, int) and self.noun != ONE_CALL else None


class PoolClosedError(ValueError):
    """The caller used a pool, or a graph that lives on its workers, after `Pool.close` or
    `Pool.terminate`.

    A `ValueError`, because `multiprocessing.Pool` raises that for the same mistake.

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
    """A worker process went away while it had something of ours: a running call, or a graph that
    backward needs.

    A `BrokenProcessPool`, because `concurrent.futures` raises that; but only what is lost fails
    here, not the pool.

    Attributes:
        item: index of the item within its map; None for a submitted call, or where no single item
            can be named.
        phase: what the worker was doing: "forward", "backward", "loading the function" (its modules
            and captures) or "start".
        call: what it was at in words, such as "item 3 of simulate", or "".
        worker: its number.
        exit_code: as in `multiprocessing.Process.exitcode`: negative for a signal, None where it is
            not known.
        detail: what else the message says: how often the call was tried, the likely cause; or "".
        stack: the worker's Python stack, where a crash left one (SIGSEGV, SIGFPE, SIGABRT, SIGBUS,
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

    def __str__(self) -> str:
        at = f", {self.call}" if self.call else ""
        message = f"worker {self.worker} {describe_exit(self.exit_code)} (phase: {self.phase}{at})"
        return f"{message}; {self.detail}" if self.detail else message


class CallTimeoutError(TimeoutError):
    """A call ran longer than its timeout, and was killed with its worker.

    Attributes:
        item: index of the item within its map; None for a submitted call, or where no single item
            can be named.
        phase: "forward", "backward" or "loading the function" (its modules and captures).
        call: which one it was in words, such as "item 3 of simulate".
        seconds: the timeout.
        stack: the worker's Python stack, or "" where it could not write it (it was stopped, say).

    Example:
        >>> import time, mpgrad
        >>> with mpgrad.Pool(processes=1, retries=0) as pool:
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
    ) -> None:
        self.item = item
        self.phase = phase
        self.call = call
        self.seconds = seconds
        self.detail = detail
        self.stack = stack
        super().__init__(item, phase, seconds, detail, stack, call)
        note_stack(self, stack)

    def __str__(self) -> str:
        limits = f"{self.seconds} s, phase: {self.phase}"
        message = (
            f"{self.call} ran longer than its timeout ({limits}), and was killed with its worker"
        )
        return f"{message}; {self.detail}" if self.detail else message


class AncestorFailedError(RuntimeError):
    """A call did not run, because one that was to give it an argument failed or was cancelled: see
    the `__cause__`.

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
    """The outside has no room for a tensor in shared memory; nothing was changed.

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
    """PyTorch as installed does not do what mpgrad relies on: gradients would be wrong, so nothing
    runs.

    Attributes:
        version: that of PyTorch.
        behaviours: what it should do and does not, in words.
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
            f"mpgrad relies on this, and torch {self.version} does not do it: "
            f"{self.behaviours[0]}{more}; "
            f"install a version that mpgrad has been tried with (torch {', '.join(self.tried)})"
        )


class InternalError(RuntimeError):
    """mpgrad itself went wrong. Please report it, with the traceback.

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
    """A backward would come to a tensor that only a worker has, where nobody would find its
    gradient."""


class RemoteError(RuntimeError):
    """Stands for an exception of a task that cannot be pickled; the message names its type and
    text.

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
    """The traceback of an exception in a worker, as text; it is the `__cause__` of the exception
    raised in the parent.

    A `RemoteTraceback` of `multiprocessing.pool` and of `concurrent.futures.process`, which stand
    in the same place.

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
    """A result cannot be carried to the caller.

    A `MaybeEncodingError`, as `multiprocessing.Pool` raises, and what pickle raises, as
    `concurrent.futures` does.

    Attributes:
        exc: the `repr` of what was raised.
        value: that of the result.
    """

    def __init__(self, message: str, exc: str, value: str) -> None:
        Exception.__init__(self, message, exc, value)
        self.exc = exc
        self.value = value

    def __str__(self) -> str:
        return str(self.args[0])


def ancestor_failed(error: BaseException, call: str) -> AncestorFailedError:
    """The error of a call (for example "item 3 of simulate") that was to get the result of one that
    raised `error`."""
    described = error_in_words(error)
    failed = AncestorFailedError(
        f"{call} did not run, because a call that it needs failed ({described})"
    )
    failed.__cause__ = error
    return failed


def describe_exit(exit_code: int | None) -> str:
    """As the verb of a sentence: "was killed by SIGKILL"; a negative code is a signal's."""
    if exit_code is None:
        return "died"
    if exit_code < 0:
        try:
            return f"was killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    return f"exited with status {exit_code}"


# --- of any exception: its class may be a frozen dataclass, or have properties that raise


def kind_name(error: BaseException) -> str:
    """The name of its class, which a metaclass may hide."""
    return str(vars(type)["__qualname__"].__get__(type(error)))


def read(error: BaseException, name: str) -> Any:
    """Python's own field of an exception, such as `__cause__`."""
    return vars(BaseException)[name].__get__(error)


def write(error: BaseException, name: str, value: Any) -> None:
    """Set Python's own field of an exception, such as `__cause__`."""
    vars(BaseException)[name].__set__(error, value)


def error_in_words(error: BaseException) -> str:
    """As the last line of a traceback; its class alone where it has no text, or its text cannot be
    had."""
    try:
        text = str(error)
    except BaseException as reason:
        return f"{kind_name(error)}, whose text cannot be had ({kind_name(reason)})"
    return f"{kind_name(error)}: {text}" if text else kind_name(error)


def traceback_of(error: BaseException) -> str:
    """The text; without what the exception's own code does not tell of it."""
    entries = read(error, "__traceback__")
    try:
        return "".join(traceback.format_exception(type(error), error, entries))
    except BaseException as reason:  # of one of its properties, say, which may raise anything
        frames = "".join(traceback.format_tb(entries))
        unread = f"(the rest of its traceback cannot be read: {error_in_words(reason)})"
        return f"Traceback (most recent call last):\n{frames}{unread}\n{error_in_words(error)}\n"


class Block(contextlib.AbstractContextManager[T]):
    """What `contextmanager` makes of a generator."""

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
            # Python makes a RuntimeError of a StopIteration that leaves a generator
            if raised is not error and read(raised, "__cause__") is not error:
                raise
            BaseException.with_traceback(error, entries)


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, Block[T]]:
    """As `contextlib`'s, which sets attributes of an exception that leaves the block: a frozen
    dataclass refuses that.

    Assumes: the block ends with what was raised in it.
    """

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(function(*args, **kwargs))

    return made


def add_note(error: BaseException, note: str) -> None:
    """As `error.add_note(note)`, which Python has only from 3.11 on."""
    notes = read(error, "__dict__").setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def note_stack(error: BaseException, stack: str) -> None:
    if stack:
        add_note(error, f"the worker's Python stack:\n{stack}")


# --- arguments that other libraries call otherwise

# what numbers of workers are called in joblib, concurrent.futures, torch, multiprocess libraries;
# and other arguments
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
    """Raises:
    TypeError: a name that is given is not known; says which known one may be meant.
    """
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
    """Have a method refuse unknown keyword arguments; those that it passes on are the `options`."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        _, *parameters = inspect.signature(function).parameters.values()  # but for self
        known = [*(each.name for each in parameters if each.kind is not each.VAR_KEYWORD), *options]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            refuse_unknown(subject, kwargs, known)
            return function(*args, **kwargs)

        return checked

    return decorated
