"""Tracebacks show the code of the caller and of the tasks, without mpgrad's frames between them.

A serial loop's traceback leads from the caller's line to the line that failed. A pool adds its own
frames on both sides, which do not help to find the mistake. So this module removes them, even from
the text that comes from a worker. If mpgrad itself raises something unexpected, its frames stay.
`MPGRAD_FULL_TRACEBACK=1` in the environment always shows them.

    worker: full text ──► caller, when it reads the exception: `shown` ──► its cause
    caller: `hide_own_frames` in the outermost function of mpgrad, before the exception leaves it
Guarantees: it costs nothing unless something fails.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import ParamSpec, TypeVar

import cloudpickle
import torch

from mpgrad.errors import (
    AncestorFailedError,
    CallTimeoutError,
    PoolClosedError,
    RemoteTraceback,
    WorkerDiedError,
    read,
    write,
)

__all__ = [
    "hide_own_frames",
    "is_own",
    "outside",
    "shown",
    "shown_stack",
    "warn",
    "without_own_frames",
]

P = ParamSpec("P")
T = TypeVar("T")

PYTHON = os.path.join(os.path.dirname(os.__file__), "")
CALLS_OF_TASKS = (
    ("run.py", "_run_item"),
    ("private.py", "gradients"),
)  # these are in `workers` and `torch_state`
# These errors are not mistakes of mpgrad's. An interrupt may arrive wherever a thread waits.
OUTCOMES = (
    AncestorFailedError,
    CallTimeoutError,
    CancelledError,
    KeyboardInterrupt,
    PoolClosedError,
    WorkerDiedError,
)
OWN_FOLDER = os.path.join(os.path.dirname(__file__), "")
# The traceback module writes a frame like this, even within an exception group, and so does
# faulthandler.
FRAME = re.compile(
    r'(?P<indent>[ |]*)  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)'
)
STACK_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in .*')


@functools.cache
def hidden_folders() -> tuple[str, ...]:
    """Return the folders of mpgrad, and of the code that `torch.compile` puts around its
    functions."""
    return OWN_FOLDER, os.path.join(os.path.dirname(torch.__file__), "_dynamo", "")


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Return the folders of the libraries that mpgrad itself calls."""
    return tuple(os.path.join(folder, "") for folder in (*torch.__path__, *cloudpickle.__path__))


def is_own(file: str) -> bool:
    return file.startswith(OWN_FOLDER)


def is_callers(file: str) -> bool:
    """Return whether the file belongs neither to mpgrad nor to a library that mpgrad calls.

    Other packages are installed within Python's own folder.
    """
    in_python = file.startswith(PYTHON) and "-packages" not in file.removeprefix(PYTHON)
    return not (in_python or file.startswith((OWN_FOLDER, *library_folders(), "<frozen ")))


def raised_by_task(frame: re.Match[str]) -> bool:
    """Return whether this innermost frame, which is mpgrad's, calls the task or its graph.

    If so, the task is C code, and that code raised the exception.
    """
    return (os.path.basename(frame["file"]), frame["function"]) in CALLS_OF_TASKS


def wants_all() -> bool:
    return os.environ.get("MPGRAD_FULL_TRACEBACK", "") not in ("", "0")


# --- exceptions in this process


def hide_own_frames(error: BaseException) -> None:
    """Remove mpgrad's frames from an exception. A bare `raise` has to follow.

    This is done if a call raised the exception, if it comes from the caller's code, or if it is an
    interrupt.

    Python 3.10 re-raises what it has caught and ignores `__traceback__`. So there the frame that
    calls this function stays.
    """
    entries = list(entries_of(read(error, "__traceback__")))
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    innermost = itertools.takewhile(lambda file: not is_own(file), files[::-1])
    is_outcome = issubclass(type(error), OUTCOMES) or isinstance(
        read(error, "__cause__"), RemoteTraceback
    )
    if wants_all() or not (is_outcome or any(map(is_callers, innermost))):
        return
    kept: types.TracebackType | None = None
    for entry, file in zip(entries[:0:-1], files[:0:-1], strict=True):
        if not file.startswith(hidden_folders()):
            entry.tb_next, kept = kept, entry
    if sys.version_info >= (3, 11):
        write(error, "__traceback__", kept)
    else:
        entries[0].tb_next = kept


def entries_of(entry: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def without_own_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Make a public function whose exceptions show only the caller's frames."""

    @functools.wraps(function)
    def outermost(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise

    return outermost


# --- from workers


def shown(text: str) -> str:
    """Return a worker's traceback without mpgrad's frames.

    It adds lines of source that only the caller has, such as those of notebooks.
    """
    if not wants_all():
        text = "\n".join(without_own(text.split("\n")))
    lines = text.split("\n")
    found: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        frame = FRAME.fullmatch(line)
        found += (
            [line]
            if frame is None or is_source(following, frame)
            else with_source(frame, frame["indent"])
        )
    return "\n".join(found)


def is_source(line: str, frame: re.Match[str]) -> bool:
    """Return whether `line` belongs to the frame before it, as its source or as marks below the
    source."""
    return line.startswith(f"{frame['indent']}    ")


def without_own(lines: list[str]) -> Iterator[str]:
    """Yield the lines of each traceback without mpgrad's frames.

    A traceback that ends in one of mpgrad's frames keeps them all, because mpgrad itself has
    raised.
    """
    # the frames of the present traceback, with their lines
    frames: list[tuple[re.Match[str], list[str]]] = []
    latest: re.Match[str] | None = None
    for line in lines:
        frame = FRAME.fullmatch(line)
        if frame is not None:
            latest = frame
            frames.append((frame, [line]))
        elif latest is not None and (
            is_source(line, latest) or line.lstrip(" |").startswith("[Previous line repeated ")
        ):
            frames[-1][1].append(line)
        else:
            yield from lines_of(frames)
            frames, latest = [], None
            yield line
    yield from lines_of(frames)


def lines_of(frames: list[tuple[re.Match[str], list[str]]]) -> Iterator[str]:
    ends_here = bool(frames) and is_own(frames[-1][0]["file"]) and not raised_by_task(frames[-1][0])
    for frame, lines in frames:
        if ends_here or not is_own(frame["file"]):
            yield from lines


def shown_stack(text: str) -> str:
    """Return the stacks that faulthandler wrote for a worker's threads, innermost frames first.

    It returns the stacks of threads that were in a task; if there are none, those of all threads.
    """
    threads = [each.strip("\n").split("\n") for each in text.split("\n\n")]
    found: list[str] = []
    idle: list[str] = []
    for title, *lines in threads:
        frames = [frame for line in lines if (frame := STACK_FRAME.fullmatch(line)) is not None]
        own = [is_own(frame["file"]) for frame in frames]
        kept = frames
        if any(own) and not own[0] and not wants_all():
            # the frames further out started the process
            inside = len(own) - own[::-1].index(True)
            kept = [
                frame
                for frame, ours in zip(frames[:inside], own, strict=False)
                if not (ours or is_import(frame))
            ]
        if kept:
            some = idle if all(own) else found
            some += [title, *itertools.chain.from_iterable(map(with_source, kept))]
    return "\n".join(found or idle)


def is_import(frame: re.Match[str]) -> bool:
    """Return whether the frame belongs to the import machinery, which Python's tracebacks also
    leave out."""
    return frame["file"].startswith("<frozen importlib.")


def with_source(frame: re.Match[str], indent: str = "") -> list[str]:
    source = linecache.getline(frame["file"], int(frame["line"])).strip()
    return [frame[0], f"{indent}    {source}"] if source else [frame[0]]


# --- warnings


def outside() -> tuple[types.FrameType, int]:
    """Return the caller's innermost frame, and its `stacklevel` seen from the function that calls
    this.

    That function has level 1.
    """
    here = inspect.currentframe()
    assert here is not None and here.f_back is not None
    frame, level = here.f_back, 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(hidden_folders()):
        frame, level = frame.f_back, level + 1
    return frame, level


def warn(message: str) -> None:
    """Call `warnings.warn` as if from the caller's line."""
    _, level = outside()
    warnings.warn(message, stacklevel=level)
