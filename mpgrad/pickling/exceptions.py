"""How an exception of a task comes to the caller: its type, what it holds, its traceback as text."""

from __future__ import annotations

import contextlib
import copy
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.errors import InternalError, RemoteError, RemoteTraceback, add_note, error_in_words, read, write
from mpgrad.pickling import classes

__all__ = ["ExceptionPickler", "carried", "raised_again"]

log = logging.getLogger("mpgrad")


def carried(error: BaseException) -> bytes:
    """The pickle of a task's exception; of its type and text only, where it cannot be carried."""
    forms: Sequence[Callable[[], object]] = (
        lambda: error,
        lambda: Rebuilt(error),
        lambda: RemoteError(error_in_words(error)),
    )
    for form in forms:
        try:
            pickled = classes.dumps(form(), ExceptionPickler)
            if issubclass(type(classes.loads(pickled)), BaseException):
                return pickled
        except BaseException:  # its own code runs here, and may do anything; the next form has less of it
            continue
    raise InternalError("a RemoteError could not be pickled")


class ExceptionPickler(classes.ClassPickler):
    """Tensors arrive as values: the call that raised has left no graph, and a leaf would take gradients without a word."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.detach().__reduce_ex__(5)  # type: ignore[no-untyped-call]
        kind = type(value)  # `isinstance` would believe what `__class__` says
        if issubclass(kind, BaseException) and not has_sound_pickle(kind):
            return rebuilt, parts_of(value)  # type: ignore[arg-type]
        return super().reducer_override(value)


class Rebuilt:
    """Pickles as an exception made without its __init__, which may take other arguments than its `args`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return rebuilt, parts_of(self._error)


def parts_of(error: BaseException) -> tuple[Any, ...]:
    """For `rebuilt`."""
    return type(error), read(error, "args"), read(error, "__dict__"), list(slots_of(error))


def has_sound_pickle(kind: type[BaseException]) -> bool:
    """Whether its class gets back what it gave: `BaseException` gives `__setstate__` the `__dict__`, asks no `__getstate__`.

    A frozen dataclass with slots has both, and would take a name in the `__dict__`, such as `__notes__`, for a field's value.
    """
    gives_state = any("__getstate__" in vars(each) for each in kind.__mro__ if each is not object)
    return not gives_state or kind.__reduce__ is not BaseException.__reduce__


def slots_of(error: BaseException) -> Iterator[tuple[type, str, Any]]:
    """What it has in slots, of its own classes."""
    for kind in type(error).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing is in it
                    yield kind, name, member.__get__(error)


def rebuilt(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any], slots: Sequence[tuple[type, str, Any]]
) -> BaseException:
    """An exception again. Its `__init__` is not called: it may want other arguments. It may be frozen."""
    error = kind.__new__(kind, *args)
    write(error, "args", args)
    read(error, "__dict__").update(state)
    for owner, name, value in slots:
        vars(owner)[name].__set__(error, value)
    return error


def one_more(error: BaseException) -> BaseException:
    """A copy for somebody who waits: one that is raised keeps the frames it came through, and shows them to all others."""
    copied: BaseException | None = None
    with contextlib.suppress(Exception):  # of its class's code, which may want other arguments
        if has_sound_pickle(type(error)):
            copied = copy.copy(error)
    if copied is None:
        copied = rebuilt(*parts_of(error))
    if (cause := read(error, "__cause__")) is not None:
        write(copied, "__cause__", cause)
    return copied


def raised_again(pickled: bytes, traceback: str, phase: str, call: str, worker: str, given: str = "") -> BaseException:
    """The exception of a task as it is to be raised in the parent: its type, the remote traceback as cause, a note."""
    try:
        error = classes.loads(pickled)
    except BaseException as reason:  # its class cannot be imported here, and the text is worth more than the class
        last = traceback.rstrip().rpartition("\n")[2]  # it names the class, unless there are notes
        error = RemoteError(f"{last} (an exception that cannot be loaded here: {error_in_words(reason)})")
    note = f"raised in {f'{call}, ' if call else ''}worker {worker}, phase: {phase}{f' ({given})' if given else ''}"
    if not issubclass(type(error), BaseException):
        error = RemoteError(f"an exception that is none when it is loaded here ({type(error).__qualname__})")
    elif issubclass(type(error), SystemExit):  # the program ends with it, without a word of where it was raised
        log.warning("a task called sys.exit: %s", note)
    write(error, "__cause__", RemoteTraceback(traceback))
    add_note(error, note)
    return error  # type: ignore[no-any-return]
