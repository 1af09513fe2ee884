"""What an `mpgrad.Executor` has its workers run first. Both sides."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

__all__ = ["Initializer"]


class Initializer:
    """An initializer whose failure is a `BrokenProcessPool`, as the callers of an executor expect."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *initargs: Any) -> None:
        try:
            self._function(*initargs)
        except BaseException as error:
            raise BrokenProcessPool(f"the initializer failed in a worker ({type(error).__name__}: {error})") from error
