"""The warnings of tasks, on their way to the caller, whose filters say what becomes of them, as they do for a serial loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TextIO

from mpgrad.errors import contextmanager
from mpgrad.pickling import classes
from mpgrad.wire.messages import Warned

__all__ = ["TaskWarnings"]


class TaskWarnings:
    """Those since the last answer, each once, in order."""

    def __init__(self) -> None:
        self._given: dict[Warned, None] = {}

    def watch(self) -> None:
        """From here on, in a process that belongs to us."""
        warnings.showwarning = self._show

    def take(self) -> list[Warned]:
        """For the answer."""
        if not self._given:
            return []
        given, self._given = self._given, {}
        return list(given)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """While something runs again: its warnings were given the first time."""
        given = dict(self._given)
        try:
            yield
        finally:
            self._given = given

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        instance = message if isinstance(message, Warning) else category(message)
        try:
            pickled = classes.dumps(instance)
        except Exception:  # of a class of its own, with what cannot be carried: its text is what matters
            pickled = classes.dumps(UserWarning(str(message)))
        self._given[Warned(pickled, filename, lineno)] = None
