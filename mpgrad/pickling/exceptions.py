"""Errors: how a task's exception comes to the caller, and where in a value that stands which cannot
be pickled.

pickle says "cannot pickle '_io.TextIOWrapper' object", and not who holds it. So the value is
searched once more after the failure: of what an object is made of, one part fails by itself, and of
that one part of it, down to what has no such part.

Guarantees: the search costs nothing where nothing fails; where much has to be tried (`SECONDS`), or
    an object's own code fails when it is asked, the path ends early. The error stays the first one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import pickle
import reprlib
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from mpgrad.errors import (
    InternalError,
    RemoteError,
    RemoteTraceback,
    UnsupportedTorchError,
    add_note,
    error_in_words,
    read,
    write,
)
from mpgrad.pickling import classes
from mpgrad.pickling.modules import uses_in
from mpgrad.pickling.reducers import (
    REGISTER,
    attributes_of_cache,
    entries_with_tensors,
    fill_exception,
    is_rebuilt,
    rebuilt,
    reduce_exception,
)
from mpgrad.pickling.structure import ProbePickler

__all__ = [
    "ExceptionPickler",
    "carried",
    "find",
    "item_not_carried",
    "not_carried",
    "raised_again",
    "why_not",
]

log = logging.getLogger("mpgrad")


def carried(error: BaseException) -> bytes:
    """The pickle of a task's exception; of its type and text only, where it cannot be carried."""
    forms: Sequence[Callable[[], bytes]] = (
        lambda: classes.dumps(error, ExceptionPickler),
        lambda: classes.dumps(error, RebuildingPickler),
        lambda: classes.dumps(RemoteError(error_in_words(error)), ExceptionPickler),
    )
    for form in forms:
        try:
            pickled = form()
            if issubclass(type(classes.loads(pickled)), BaseException):
                return pickled
        except BaseException:
            # its own code runs here, and may do anything; the next form has less of it
            continue
    raise InternalError("a RemoteError could not be pickled")


class ExceptionPickler(classes.ClassPickler):
    """Tensors arrive as values: the call that raised has left no graph, and a leaf would take
    gradients without a word."""

    rebuilds_all = False

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.detach().__reduce_ex__(5)  # type: ignore[no-untyped-call]
        kind = type(value)  # `isinstance` would believe what `__class__` says
        if issubclass(kind, BaseException) and (self.rebuilds_all or is_rebuilt(kind)):
            return reduce_exception(value)
        return super().reducer_override(value)


class RebuildingPickler(ExceptionPickler):
    """Where pickling an exception by its class's own code fails."""

    rebuilds_all = True


def one_more(error: BaseException) -> BaseException:
    """A copy for somebody who waits: one that is raised keeps the frames it came through, and shows
    them to all others."""
    copied: BaseException | None = None
    with contextlib.suppress(Exception):  # of its class's code, which may want other arguments
        if not is_rebuilt(type(error)):
            copied = copy.copy(error)
    if copied is None:
        _, parts, state, *_ = reduce_exception(error)
        copied = rebuilt(*parts)
        fill_exception(copied, state)
    if (cause := read(error, "__cause__")) is not None:
        write(copied, "__cause__", cause)
    return copied


def raised_again(
    pickled: bytes, traceback: str, phase: str, call: str, worker: str, given: str = ""
) -> BaseException:
    """The exception of a task as it is to be raised in the parent: its type, the remote traceback
    as cause, a note."""
    try:
        error = classes.loads(pickled)
    except BaseException as reason:
        # its class cannot be imported here, and the text is worth more than the class
        last = traceback.rstrip().rpartition("\n")[2]  # it names the class, unless there are notes
        error = RemoteError(
            f"{last} (an exception that cannot be loaded here: {error_in_words(reason)})"
        )
    note = (
        f"raised in {f'{call}, ' if call else ''}worker {worker}, phase: "
        f"{phase}{f' ({given})' if given else ''}"
    )
    if not issubclass(type(error), BaseException):
        error = RemoteError(
            f"an exception that is none when it is loaded here ({type(error).__qualname__})"
        )
    elif issubclass(type(error), SystemExit):
        # the program ends with it, without a word of where it was raised
        log.warning("a task called sys.exit: %s", note)
    write(error, "__cause__", RemoteTraceback(traceback))
    add_note(error, note)
    return error  # type: ignore[no-any-return]


# --- the path to what cannot be carried, and the remedy


SECONDS = 5.0


def not_carried(error: Exception, subject: str, value: object, may_wait: bool = False) -> NoReturn:
    """Raise the `error` with which `value`, the `subject` (say "item 3"), could not be pickled:
    same type, named subject.

    What an object's own code raised stays the object that it is, and the subject is a note.
    `may_wait`: futures may be in it.
    """
    if isinstance(error, UnsupportedTorchError):
        raise error
    if type(error) in (TypeError, pickle.PicklingError):
        raise type(error)(why_not(error, subject, value, may_wait)) from error
    # the loop that takes items from their source would take it for its end
    if isinstance(error, StopIteration):
        raise pickle.PicklingError(why_not(error, subject, value, may_wait, repr(error))) from error
    add_note(error, why_not(error, subject, value, may_wait, ""))
    raise error


def why_not(
    error: Exception, subject: str, value: object, may_wait: bool = False, words: str | None = None
) -> str:
    """By which path the culprit is reached, and what to do. `words`: the error's."""
    words = str(error) if words is None else words
    path, culprit = find(value, functools.partial(fails, may_wait))
    remedy = remedy_for(culprit) or (ELSE if str(error).lower().startswith(PICKLES_OWN) else "")
    colon, where = ": " if words else "", f" ({path})" if path else ""
    return (
        f"{subject} cannot be carried to or from a "
        f"worker{colon}{words}{where}{'; ' if remedy else ''}{remedy}"
    )


def item_not_carried(
    error: Exception, index: int, args: Sequence[object], kwargs: Mapping[str, object]
) -> NoReturn:
    """Raise what `not_carried` says of an item."""
    named = {**{str(number): each for number, each in enumerate(args)}, **kwargs}
    value = args[0] if len(args) == 1 and not kwargs else named
    not_carried(error, f"item {index}", value, may_wait=True)


def fails(may_wait: bool, value: object) -> bool:
    """Whether `value` cannot be pickled."""
    try:
        ProbePickler(io.BytesIO(), [] if may_wait else None).dump(value)
    except Exception:
        return True
    return False


class CulpritPath(NamedTuple):
    path: str  # from the value that was to be carried; "" where it is that itself
    culprit: object


class NamedPart(NamedTuple):
    name: str
    value: object


def find(value: object, fails: Callable[[object], bool]) -> CulpritPath:
    """The innermost part of `value` that cannot be carried, whose own parts all can; `fails` tries
    one."""
    deadline = time.monotonic() + SECONDS
    path, seen = "", {id(value)}
    while True:
        tried = () if remedy_for(value) else parts(value)
        inner = None
        # of the user's objects, and another one is about to be raised
        with contextlib.suppress(Exception):
            inner = next(
                (part for part in tried if is_culprit(part.value, seen, fails, deadline)), None
            )
        if inner is None:
            return CulpritPath(path, value)
        seen.add(id(inner.value))
        if isinstance(value, types.FunctionType):
            path += (", " if path else "") + f"{value.__name__}'s {inner.name}"
        else:
            path += inner.name if path else inner.name.removeprefix(".")
        value = inner.value


def is_culprit(
    part: object, seen: set[int], fails: Callable[[object], bool], deadline: float
) -> bool:
    """Whether it is worth looking into: not seen yet, in time, and it fails too."""
    return id(part) not in seen and time.monotonic() < deadline and fails(part)


SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60
shown = SHORT.repr  # also of what fails to show itself


def parts(value: object) -> Iterator[NamedPart]:
    """What pickle would carry along with `value`, by the names that somebody would write who looks
    for it."""
    if isinstance(value, types.FunctionType):
        yield from parts_of_function(value)
    elif isinstance(value, torch.Tensor):
        yield from (NamedPart(f".{name}", each) for name, each in value.__dict__.items())
    elif isinstance(value, types.MethodType):
        yield NamedPart("", value.__self__)
        yield NamedPart(".__func__", value.__func__)
    elif isinstance(value, functools.partial):
        yield NamedPart(".func", value.func)
        yield from (NamedPart(f".args[{number}]", each) for number, each in enumerate(value.args))
        yield from (
            NamedPart(f".keywords[{shown(name)}]", each) for name, each in value.keywords.items()
        )
    elif isinstance(value, Mapping):
        yield from (NamedPart(f"[{shown(key)}]", each) for key, each in list(value.items()))
        yield from (NamedPart(f" (the key {shown(key)})", key) for key in list(value))
        yield from parts_of_state(value)
    elif isinstance(value, (list, tuple)):
        yield from (NamedPart(f"[{number}]", each) for number, each in enumerate(value))
        yield from parts_of_state(value)
    elif isinstance(value, (set, frozenset)):
        yield from (NamedPart(f" (its member {shown(each)})", each) for each in list(value))
    elif isinstance(value, type):
        yield from (NamedPart(f".{name}", each) for name, each in list(vars(value).items()))
        yield from (NamedPart(f" (its base {each.__name__})", each) for each in value.__bases__)
    elif isinstance(value, property):
        yield from (
            NamedPart(f".{name}", getattr(value, name)) for name in ("fget", "fset", "fdel")
        )
    elif isinstance(value, functools._lru_cache_wrapper):
        yield NamedPart("", value.__wrapped__)
        yield from (
            NamedPart(f".{name}", each) for name, each in attributes_of_cache(value).items()
        )
        for entry in entries_with_tensors(value):
            yield NamedPart(f" (what its cache has for {shown(entry.key)})", entry.result)
            yield NamedPart(f" (the key {shown(entry.key)} of its cache)", entry.key)
    elif (cached := getattr(value, "__wrapped__", None)) is not None:
        yield NamedPart("", cached)
    else:
        yield from parts_of_state(value)
        yield NamedPart(" (its class)", type(value))


def parts_of_function(function: types.FunctionType) -> Iterator[NamedPart]:
    """All that its pickle has of it, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield NamedPart(f"closure: {name}", cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    for name in sorted(uses_in(function.__code__).names & function.__globals__.keys()):
        yield NamedPart(f"global: {name}", function.__globals__[name])
    for number, each in enumerate(function.__defaults__ or ()):
        yield NamedPart(f"default {number}", each)
    for name, each in (function.__kwdefaults__ or {}).items():
        yield NamedPart(f"default: {name}", each)
    for name, each in vars(function).items():
        yield NamedPart(f"attribute: {name}", each)


def parts_of_state(value: object) -> Iterator[NamedPart]:
    """What it would have itself made again from: its attributes, unless it says otherwise."""
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # it refuses: then it is the one
        return
    if isinstance(reduced, str):  # it goes by name
        return
    own = type(value)
    yield from (
        NamedPart(f" (made from a {type(each).__name__})", each)
        for each in reduced[1]
        if each is not own
    )
    state = reduced[2] if len(reduced) > 2 else None
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            yield from (NamedPart(f".{name}", each) for name, each in attributes.items())
        elif attributes is not None:
            yield NamedPart(" (its state)", attributes)


def remedy_for(culprit: object) -> str:
    """What to do about something that means nothing outside of the caller's process; "" where no
    more is known of it."""
    names = {f"{each.__module__}.{each.__qualname__}" for each in type(culprit).__mro__}
    return next((words for kinds, words in REMEDIES.items() if names & set(kinds)), "")


# by name: most of these modules are never imported
ONCE = "or once a worker, with Pool(initializer=...)"
ELSE = f"make it in the function, {ONCE}, or leave it out in the __getstate__ of what holds it"
PICKLES_OWN = ("cannot pickle", "can't pickle", "can't get")
REMEDIES = {
    ("io.IOBase", "_io._IOBase"): f"pass its name, and open it in the function, {ONCE}",
    ("ctypes.CDLL", "_ctypes.CFuncPtr"): f"load the library in the function, {ONCE}",
    (
        "_socket.socket",
        "ssl.SSLContext",
        "_ssl._SSLContext",
        "sqlite3.Connection",
    ): f"connect in the function, {ONCE}",
    (
        "builtins.generator",
        "builtins.coroutine",
        "builtins.async_generator",
    ): "make a list of what it gives, or call in the function what gave it",
    ("threading.Thread",): "start it in the function, or have the function not reach it",
    (
        "subprocess.Popen",
        "multiprocessing.process.BaseProcess",
    ): "it is the caller's child: pass what it gave, or start it in the function",
    (
        "multiprocessing.synchronize.SemLock",
        "_multiprocessing.SemLock",
    ): "workers are no children of multiprocessing's: use "
    "one of a multiprocessing.Manager(), or lock a file (fcntl.flock) that each opens by its name",
    (
        "queue.Queue",
        "_queue.SimpleQueue",
        "multiprocessing.queues.Queue",
        "multiprocessing.queues.SimpleQueue",
    ): "return what "
    "was to be put into it, and pass what was to be taken out; or use a queue of a "
    "multiprocessing.Manager()",
    ("torch.library.Library", "torch._library.custom_ops.CustomOpDef"): REGISTER,
    ("concurrent.futures._base.Future",): "pass its result()",
    ("torch.jit.Future",): "pass what it gives (wait())",
    ("builtins.frame", "builtins.traceback"): "pass its text (traceback.format_exc())",
}
