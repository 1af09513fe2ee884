"""How an exception of a task comes to the caller: its type, what it holds, its traceback as text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpgrad.errors import InternalError, RemoteError, RemoteTraceback, add_note
from mpgrad.pickling import classes

__all__ = ["carried", "raised_again"]

log = logging.getLogger("mpgrad")


def carried(error: BaseException) -> bytes:
    """The pickle of a task's exception; of its type and text only, where it cannot be carried."""
    name = type(error).__qualname__
    forms: Sequence[Callable[[], object]] = (
        lambda: error,
        lambda: Rebuilt(error),
        lambda: RemoteError(f"{name}: {error}"),
        lambda: RemoteError(f"{name}, whose text cannot be had"),
    )
    for form in forms:
        try:
            pickled = classes.dumps(form(), ExceptionPickler)
            if isinstance(classes.loads(pickled), BaseException):
                return pickled
        except BaseException:  # its own code runs here, and may do anything; the next form has less of it
            continue
    raise InternalError("a RemoteError could not be pickled")


class ExceptionPickler(classes.ClassPickler):
    """Tensors arrive as values: the call that raised has left no graph, and a leaf would take gradients without a word."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.detach().__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return super().reducer_override(value)


class Rebuilt:
    """Pickles as an exception made without its __init__, which may take other arguments than its `args`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return rebuilt, (type(self._error), self._error.args, vars(self._error))


def rebuilt(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """An exception again. Its `__init__` is not called: it may want other arguments."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def raised_again(pickled: bytes, traceback: str, phase: str, call: str, worker: str, given: str = "") -> BaseException:
    """The exception of a task as it is to be raised in the parent: its type, the remote traceback as cause, a note."""
    try:
        error = classes.loads(pickled)
    except BaseException as reason:  # its class cannot be imported here, and the text is worth more than the class
        error = RemoteError(f"an exception that cannot be loaded here ({reason})")
    note = f"raised in {f'{call}, ' if call else ''}worker {worker}, phase: {phase}{f' ({given})' if given else ''}"
    if isinstance(error, SystemExit):  # the program ends with it, without a word of where it was raised
        log.warning("a task called sys.exit: %s", note)
    try:
        tell_origin(error, traceback, note)
    except Exception as reason:  # it takes no attributes, or is no exception
        error = RemoteError(f"an exception that cannot be raised again here ({type(error).__qualname__}: {reason})")
        tell_origin(error, traceback, note)
    return error  # type: ignore[no-any-return]


def tell_origin(error: BaseException, traceback: str, note: str) -> None:
    """Give it the worker's traceback as its cause, and a note."""
    error.__cause__ = RemoteTraceback(traceback)
    add_note(error, note)
