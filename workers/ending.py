"""A worker process ends in such a way that tasks see the usual end of a Python process. Worker's
side.

    begin ──► initializer, tasks ──► Stop ──► end
    end: flush files ──► threads ──► exit handlers ──► finalizers ──► files ──► globals of tasks
Finalizing the whole interpreter would cost each worker 0.1 s. A fork would also finalize objects of
the process that it was forked from, whose files would then be written twice. So only objects that
were made after `begin` are finalized, because the garbage collector skips the older ones. Libraries
that tasks have imported stay, but their open files are flushed, and their objects with a `__del__`
are finalized.

The caller kills a worker that takes too long. Files are flushed first, so only the output of the
remaining steps is lost.
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
from mpgrad.pickling.modules import installed, is_of_libraries

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
    """Forget handlers and finalizers from before the fork, because they belong to the parent."""
    atexit._clear()
    del logging._handlerList[:]  # type: ignore[attr-defined]
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        info.atexit = False
    # modules register these only once, perhaps before the fork
    atexit.register(logging.shutdown)
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = True  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def begin() -> None:
    """Treat all objects that are made from now on as objects of tasks."""
    gc.freeze()


def leave_children() -> None:
    """Keep the exit handlers from waiting for children that are not daemons."""
    for child in multiprocessing.active_children():
        if not child.daemon:
            multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]


def end(status: int, waits: bool) -> NoReturn:
    """Do the steps of Python's end for all objects of tasks, and end the process.

    The exit handlers end daemonic children, and wait for the others. If `waits`, also wait for
    threads.
    """
    # warnings can no longer be sent to the caller
    warnings.simplefilter("ignore")
    try:
        objects = gc.get_objects()
        places = own_globals(objects)
        due = with_an_end(objects)
        del objects
        gc.freeze()  # the next search finds only objects that are made from now on
        write_files(due, at_last=False)
        if waits:
            reported(threading._shutdown)  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        due += with_an_end(gc.get_objects())
        finalized = finalize(due)  # noqa: F841
        write_files(due, at_last=True)
        del due
        clear(places)
        for stream in (sys.stdout, sys.stderr):
            # closed streams must not turn a successful exit into a failed one
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def own_globals(objects: list[Any]) -> list[dict[str, Any]]:
    """Return the globals of tasks and of the initializer."""
    libraries = installed()
    functions = [each for each in objects if type(each) is types.FunctionType]
    places = {
        id(each): each
        for each in {
            id(function.__globals__): function.__globals__ for function in functions
        }.values()
        if not (
            str(each.get("__file__")).startswith(libraries)
            or is_of_libraries(each.get("__name__"))  # this package, if it runs in a clone
        )
    }
    # if this process is a fork of the caller, other globals are the caller's
    made = [each for each in objects if type(each) is dict and id(each) in places]
    return [*INITIALIZED.values(), *made]


def clear(places: list[dict[str, Any]]) -> None:
    """Drop globals, because some objects are finalized outside Python. Functions, classes and
    modules stay, because finalizers use them."""
    for place in places:
        for name in reversed(list(place)):
            if not (name.startswith("__") or issubclass(type(place[name]), CODE)):
                del place[name]


def with_an_end(objects: list[Any]) -> list[Any]:
    """Return the objects that need finalizing: files, generators, and objects with a `__del__`."""
    wanted = {
        kind
        for kind in set(map(type, objects))
        if kind is types.GeneratorType or issubclass(kind, ANY_FILE) or finalizer_of(kind)
    }
    return [each for each in objects if type(each) in wanted]


def finalize(due: list[Any]) -> list[Any]:
    """Finalize objects with a `__del__`, and generators.

    Return the objects with a `__del__`, which must stay until the end. Otherwise Python would
    finalize them again.
    """
    finalizers = {kind: finalizer_of(kind) for kind in set(map(type, due))}
    finalized = [
        each for each in due if finalizers[type(each)] is not None and not gc.is_finalized(each)
    ]
    for each in finalized:
        reported(functools.partial(finalizers[type(each)], each))
    for each in due:
        if type(each) is types.GeneratorType and not each.gi_running:
            reported(each.close)
    return finalized


def finalizer_of(kind: type) -> Any:
    """Return the `__del__` of a class that is written in Python and is not mpgrad's."""
    found = next((vars(each)["__del__"] for each in kind.__mro__ if "__del__" in vars(each)), None)
    return found if isinstance(found, types.FunctionType) and not is_from("mpgrad", kind) else None


def write_files(due: list[Any], at_last: bool) -> None:
    """Write the buffers of open files, those of outer files first.

    If `at_last`, close the files that write an end, such as compressed ones.
    """
    kinds = {kind for kind in set(map(type, due)) if issubclass(kind, ANY_FILE)}
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
        for each in [each for each in due if type(each) in some]:
            if not each.closed:
                reported(getattr(each, write))


def is_from(package: str, kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == package


def reported(call: Callable[[], object]) -> None:
    """Run the call. Report an exception as Python does at its end, and continue."""
    try:
        call()
    except BaseException:
        sys.excepthook(*sys.exc_info())
