"""A progress bar for calls that take long, where tqdm is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator

__all__ = ["Progress", "progress_bar"]

Progress = bool | str  # False: none; True: a bar; a string: a bar with this description


@contextlib.contextmanager
def progress_bar(progress: Progress, total: int | None) -> Iterator[Callable[[int], None] | None]:
    """A function that moves the bar to the number of calls done; None where no bar is asked for.

    Raises:
        ImportError: a bar is asked for, and tqdm is not installed.
        TypeError: `progress` is neither a bool nor a string.
    """
    if not isinstance(progress, (bool, str)):
        raise TypeError(f"progress must be True, False or a description (progress: {progress!r})")
    if progress is False:
        yield None
        return
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ImportError("progress needs tqdm, which is not installed; install mpgrad[progress]") from error
    with tqdm(total=total, desc=progress if isinstance(progress, str) else None) as bar:

        def move_to(done: int) -> None:
            bar.update(done - bar.n)

        yield move_to
