"""A task's exception is sent to the caller. If pickle refuses an object, the error names it.

pickle reports "cannot pickle '_io.TextIOWrapper' object", but not which object refers to that file.
So the value is searched after the failure. The search goes from the value to a part that also
fails, then to a part of that part, and so on. It ends at an object whose parts can all be pickled.

Guarantees: the search costs nothing unless something fails. The path ends early after `SECONDS`, or
    if an object's own code fails. The first error is the one that is raised.
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
from mpgrad.pickling.modules import closure_of, uses_in
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
    """Pickle a task's exception, or only its type and text if the exception cannot be pickled."""
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
            # The exception's own code runs here and may raise anything. The next form runs less of
            # it.
            continue
    raise InternalError("a RemoteError could not be pickled")


class ExceptionPickler(classes.ClassPickler):
    """Pickles exceptions. Their tensors become values without gradients.

    The failed call has left no graph, so a leaf would silently collect gradients.
    """

    rebuilds_all = False

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.detach().__reduce_ex__(5)  # type: ignore[no-untyped-call]
        kind = type(value)  # `isinstance` would believe `__class__`
        if issubclass(kind, BaseException) and (self.rebuilds_all or is_rebuilt(kind)):
            return reduce_exception(value)
        return super().reducer_override(value)


class RebuildingPickler(ExceptionPickler):
    """Pickles an exception without its class's own code, because that code fails."""

    rebuilds_all = True


def one_more(error: BaseException) -> BaseException:
    """Copy an exception for one more thread that waits for it.

    A raised exception keeps the frames of its thread, and would show them to all other threads.
    """
    copied: BaseException | None = None
    # The class's own code runs here, and may require other arguments.
    with contextlib.suppress(Exception):
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
    """Return a task's exception for the parent to raise.

    It has the original type, the remote traceback as its cause, and a note.
    """
    try:
        error = classes.loads(pickled)
    except BaseException as reason:
        # Its class cannot be imported here. The text matters more than the class.
        last = traceback.rstrip().rpartition("\n")[2]  # names the class, unless there are notes
        error = RemoteError(
            f"{last} (an exception that cannot be loaded here: {error_in_words(reason)})"
        )
    note = (
        f"raised in {f'{call}, ' if call else ''}worker {worker}, phase: "
        f"{phase}{f' ({given})' if given else ''}"
    )
    if not issubclass(type(error), BaseException):
        error = RemoteError(
            "an exception became another object when it was loaded here "
            f"({type(error).__qualname__})"
        )
    elif issubclass(type(error), SystemExit):
        # The program ends with this exception and does not report where it was raised.
        log.warning("a task called sys.exit: %s", note)
    write(error, "__cause__", RemoteTraceback(traceback))
    add_note(error, note)
    return error  # type: ignore[no-any-return]


# --- the path to the part that pickle refuses, and the remedy


SECONDS = 5.0


def not_carried(error: Exception, subject: str, value: object, may_wait: bool = False) -> NoReturn:
    """Raise an error for `value`, whose pickling raised `error`. It has the same type and names the
    `subject`.

    The `subject` is a text such as "item 3". An error that an object's own code raised stays the
    same object, and the subject becomes a note. If `may_wait`, the value may contain futures.
    """
    if isinstance(error, UnsupportedTorchError):
        raise error
    if type(error) in (TypeError, pickle.PicklingError):
        raise type(error)(why_not(error, subject, value, may_wait)) from error
    # To the loop that reads items from their source, a StopIteration would mean the end.
    if isinstance(error, StopIteration):
        raise pickle.PicklingError(why_not(error, subject, value, may_wait, repr(error))) from error
    add_note(error, why_not(error, subject, value, may_wait, ""))
    raise error


def why_not(
    error: Exception, subject: str, value: object, may_wait: bool = False, words: str | None = None
) -> str:
    """Return a message with the path to the culprit and a remedy. `words` are the error's words."""
    words = str(error) if words is None else words
    path, culprit = find(value, functools.partial(fails, may_wait))
    remedy = remedy_for(culprit) or (ELSE if str(error).lower().startswith(PICKLES_OWN) else "")
    colon, where = ": " if words else "", f" ({path})" if path else ""
    return (
        f"{subject} cannot be sent to or from a "
        f"worker{colon}{words}{where}{'; ' if remedy else ''}{remedy}"
    )


def item_not_carried(
    error: Exception, index: int, args: Sequence[object], kwargs: Mapping[str, object]
) -> NoReturn:
    """Raise the error of `not_carried` for an item."""
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
    path: str  # from the value to the culprit; "" if the value itself is the culprit
    culprit: object


class NamedPart(NamedTuple):
    name: str
    value: object


def find(value: object, fails: Callable[[object], bool]) -> CulpritPath:
    """Return the innermost part of `value` that cannot be pickled although all of its own parts
    can. `fails` tests one part."""
    deadline = time.monotonic() + SECONDS
    path, seen = "", {id(value)}
    while True:
        tried = () if remedy_for(value) else parts(value)
        inner = None
        # Errors of the user's objects are ignored, because another error is about to be raised.
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
    """Whether to search `part`: it is new, time is left, and it also fails."""
    return id(part) not in seen and time.monotonic() < deadline and fails(part)


SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60
shown = SHORT.repr  # works even if the object's own `repr` fails


def parts(value: object) -> Iterator[NamedPart]:
    """Yield the parts that pickle would include with `value`, with the names that a user would
    write."""
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
            yield NamedPart(f" (its cached result for {shown(entry.key)})", entry.result)
            yield NamedPart(f" (its cache's key {shown(entry.key)})", entry.key)
    elif (cached := getattr(value, "__wrapped__", None)) is not None:
        yield NamedPart("", cached)
    else:
        yield from parts_of_state(value)
        yield NamedPart(" (its class)", type(value))


def parts_of_function(function: types.FunctionType) -> Iterator[NamedPart]:
    """Yield all parts of a function's pickle, by name."""
    for name, each in closure_of(function).items():
        yield NamedPart(f"closure: {name}", each)
    for name in sorted(uses_in(function.__code__).names & function.__globals__.keys()):
        yield NamedPart(f"global: {name}", function.__globals__[name])
    for number, each in enumerate(function.__defaults__ or ()):
        yield NamedPart(f"default {number}", each)
    for name, each in (function.__kwdefaults__ or {}).items():
        yield NamedPart(f"default: {name}", each)
    for name, each in vars(function).items():
        yield NamedPart(f"attribute: {name}", each)


def parts_of_state(value: object) -> Iterator[NamedPart]:
    """Yield the parts that the object is rebuilt from. These are its attributes, unless it defines
    its own way of pickling."""
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # the object refuses, so it is the culprit
        return
    if isinstance(reduced, str):  # pickled by name
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
    """Return a remedy for an object that has no meaning outside the caller's process, or "" if none
    is known."""
    names = {f"{each.__module__}.{each.__qualname__}" for each in type(culprit).__mro__}
    return next((words for kinds, words in REMEDIES.items() if names & set(kinds)), "")


# These classes are given by name, because most of their modules are never imported.
ONCE = "or once a worker, with Pool(initializer=...)"
ELSE = f"make it in the function, {ONCE}, or leave it out in the __getstate__ of its owner"
PICKLES_OWN = ("cannot pickle", "can't pickle", "can't get")
REMEDIES = {
    (
        "io.IOBase",
        "_io._IOBase",
        "codecs.StreamReaderWriter",
        "mmap.mmap",
        "posix.ScandirIterator",
    ): f"pass its name, and open it in the function, {ONCE}",
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
    ): "make a list of its values, or make it in the function",
    ("threading.Thread",): "start it in the function, or keep it out of the function's reach",
    (
        "subprocess.Popen",
        "multiprocessing.process.BaseProcess",
    ): "it is the caller's child: pass its output, or start it in the function",
    (
        "multiprocessing.synchronize.SemLock",
        "_multiprocessing.SemLock",
    ): "workers are not children of multiprocessing: use "
    "one of a multiprocessing.Manager(), or lock a file (fcntl.flock) that each opens by name",
    (
        "queue.Queue",
        "_queue.SimpleQueue",
        "multiprocessing.queues.Queue",
        "multiprocessing.queues.SimpleQueue",
    ): "return the values that you would put into it, and pass the values that you would take out; "
    "or use a queue of a multiprocessing.Manager()",
    ("torch.nn.parallel.distributed.DistributedDataParallel",): "send the wrapped module (its "
    ".module), and leave the wrapper in the caller",
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        "torch.distributed.fsdp.FSDPModule",
    ): "send a module that is not sharded, with its full state dict "
    "(torch.distributed.checkpoint.state_dict)",
    (
        "torch.distributed.distributed_c10d.ProcessGroup",
        "torch.distributed.distributed_c10d.Store",
        "torch.distributed.distributed_c10d.Work",
    ): "workers are not ranks of its group: communicate in the caller, or call "
    "torch.distributed.init_process_group in the worker, with Pool(initializer=...)",
    ("torch.library.Library", "torch._library.custom_ops.CustomOpDef"): REGISTER,
    ("concurrent.futures._base.Future",): "pass its result()",
    ("torch.jit.Future",): "pass its value (wait())",
    ("builtins.frame", "builtins.traceback"): "pass its text (traceback.format_exc())",
}
