"""The end of a worker's process, which looks to tasks like the end of a Python process. Worker's
side.

    begin ──► initializer, tasks ──► Stop ──► end
    end: flush files ──► threads ──► exit handlers ──► finalizers ──► globals of tasks ──► files
Taking the whole interpreter apart would cost each worker 0.1 s, and a fork would destroy objects of
the process that it was forked from, whose files would then be written twice. So only objects that
were made since `begin` are finalized: the garbage collector leaves the older ones out. Libraries
that tasks have imported stay, but their open files are flushed, and their objects with a `__del__`
are finalized.

The caller kills a worker that takes too long. Then only what the remaining steps would have written
is lost, because files are flushed first.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from mpgrad.pickling.initialized import INITIALIZED
from mpgrad.pickling.modules import installed

__all__ = [
    "begin",
    "end",
    "forget_exit_handlers",
    "leave_children",
]

ANY_FILE: Any = io.IOBase.__base__  # faster than `io.IOBase`, which is an abstract class
BUFFERS = io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair
CODE = types.ModuleType, types.FunctionType, type


def forget_exit_handlers() -> None:
    """Forget handlers and finalizers that were made before the fork: they belong to the parent."""
    atexit._clear()
    del logging._handlerList[:]  # type: ignore[attr-defined]
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        info.atexit = False
    # Modules register these once, which may have been before the fork.
    atexit.register(logging.shutdown)
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = True  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def begin() -> None:
    """Note that all objects from now on are those of tasks."""
    gc.freeze()


def leave_children() -> None:
    """Keep the exit handlers from waiting for children that are not daemons."""
    for child in multiprocessing.active_children():
        if not child.daemon:
            multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]


def end(status: int, waits: bool) -> NoReturn:
    """Do what Python does at its end, for all that tasks have made, and end the process.

    The exit handlers end daemonic children, and wait for the others. With `waits`, threads are
    waited for, too.
    """
    # nobody can be asked any more what happens to them
    warnings.simplefilter("ignore")
    try:
        write_files(gc.get_objects(), at_last=False)
        if waits:
            reported(threading._shutdown)  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        finalized = finalize(gc.get_objects())  # noqa: F841
        clear_globals()
        write_files(gc.get_objects(), at_last=True)
        for stream in (sys.stdout, sys.stderr):
            # closed streams must not turn a successful exit into a failed one
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(status)


def clear_globals() -> None:
    """Drop the globals that functions of tasks use, for objects that finalize themselves outside
    Python. Functions, classes and modules stay, because finalizers use them."""
    made = gc.get_objects()
    ours = {id(each) for each in made if type(each) is dict}
    places = {
        id(each.__globals__): each.__globals__
        for each in made
        if type(each) is types.FunctionType and id(each.__globals__) in ours
    }
    del made
    libraries = installed()
    for place in [*INITIALIZED.values(), *places.values()]:
        if not str(place.get("__file__")).startswith(libraries):
            for name in reversed(list(place)):
                if not (name.startswith("__") or isinstance(place[name], CODE)):
                    del place[name]


def finalize(made: list[Any]) -> list[Any]:
    """Run the finalizers that are still due: of objects with a `__del__`, and of generators.

    Return the objects, which must stay until the end. Otherwise Python would finalize them again.
    """
    finalizers = {kind: finalizer_of(kind) for kind in set(map(type, made))}
    due = [
        each for each in made if finalizers[type(each)] is not None and not gc.is_finalized(each)
    ]
    for each in due:
        reported(functools.partial(finalizers[type(each)], each))
    for each in [each for each in made if type(each) is types.GeneratorType]:
        if not each.gi_running:
            reported(each.close)
    return due


def finalizer_of(kind: type) -> Any:
    """Return the `__del__` of a class that is written in Python and is not mpgrad's."""
    found = next((vars(each)["__del__"] for each in kind.__mro__ if "__del__" in vars(each)), None)
    return found if isinstance(found, types.FunctionType) and not is_from("mpgrad", kind) else None


def write_files(made: list[Any], at_last: bool) -> None:
    """Write the buffers of open files, those of outer files first.

    `at_last` close the files that write an end, such as compressed ones.
    """
    kinds = {kind for kind in set(map(type, made)) if issubclass(kind, ANY_FILE)}
    texts = {kind for kind in kinds if issubclass(kind, io.TextIOWrapper)}
    layers = {
        kind for kind in kinds - texts if not (is_from("_io", kind) or is_from("mpgrad", kind))
    }
    buffers = {kind for kind in kinds if issubclass(kind, BUFFERS)}
    for some, write in (
        (texts, "flush"),
        (layers if at_last else set(), "close"),
        (buffers, "flush"),
    ):
        for each in [each for each in made if type(each) in some]:
            if not each.closed:
                reported(getattr(each, write))


def is_from(package: str, kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == package


def reported(call: Callable[[], object]) -> None:
    """Call it. Report an exception as Python does at its end, and go on."""
    try:
        call()
    except BaseException:
        sys.excepthook(*sys.exc_info())
