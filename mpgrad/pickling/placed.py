"""What pickle and the like find in the modules of a worker's process while a call runs: what its functions find.

Functions see what travelled of the user's modules (`modules`). Whatever looks into `sys.modules` would see what this process
has imported, and pickle refuses what is not the same object under its name there. So a module that this process has imported
holds for a while what travelled. One that it cannot import is the carried one, and the main module gives what it is asked for
of the script. Calls of one operation follow each other: all stays until another operation's begin, or the imports are wanted.

Assumes: one thread runs calls. Engines in the caller's process place nothing, for its modules are the caller's.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as CLASS_OF

from mpgrad.errors import contextmanager

if TYPE_CHECKING:
    from mpgrad.pickling.modules import Namespaces

__all__ = ["ABOUT_ITSELF", "CARRIED", "FAILED", "PLACED"]

CARRIED = "_mpgrad_carried"  # among the globals of a module that came from the caller
ABOUT_ITSELF = "__package__", "__path__", "__file__"  # what a module's imports look at
FAILED: dict[str, ImportError] = {}  # own imports that are not tried again


class Placed:
    """Of this process."""

    def __init__(self) -> None:
        self._running: list[Namespaces] = []  # one within another
        self._current: Namespaces | None = None
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each module what it holds by itself
        self._added: list[str] = []
        self._thread = 0  # that runs the calls of a worker's process; a task may have a pool of threads

    def begin(self) -> None:
        """This process, and this thread of it, is a worker's."""
        self._thread = threading.get_ident()
        vars(sys.modules["__main__"])["__getattr__"] = self.in_script

    def enter(self, names: Namespaces) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(names)
            self._place(names)

    def leave(self) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()
            if self._running:
                self._place(self._running[-1])

    def take_back(self, names: Namespaces | None = None) -> None:
        """Have the modules as this process has imported them; `names`: only where these are placed."""
        if names is not None and names is not self._current:
            return
        for contents, values in self._replaced:
            for name, value in values.items():
                if value is ABSENT:
                    contents.pop(name, None)
                else:
                    contents[name] = value
        for name in self._added:
            sys.modules.pop(name, None)
        self._replaced.clear()
        self._added.clear()
        self._current = None

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        before = self._current
        self.take_back()
        try:
            yield
        finally:
            if before is not None:
                self._place(before)

    def hides(self, module: str, name: str) -> bool:
        """Whether what stands there came with a call."""
        contents = vars(sys.modules[module]) if module in sys.modules else {}
        own = next((values for each, values in self._replaced if each is contents), {})
        return module in self._added or (name in own and own[name] is not contents.get(name))

    def in_script(self, name: str) -> Any:
        """`__getattr__` of the module `__main__`: what a call's functions have in the caller's."""
        current = self._current
        if current is not None and name in current.script:
            return current.script[name]
        if current is not None and current.main is not None and name in current.main:
            return current.main[name]
        for kind in reversed(list(CLASS_OF.values())):
            if (kind.__module__, kind.__qualname__) == ("__main__", name):
                return kind
        if name == "__file__" and current is not None:  # programs of multiprocessing that a task starts run it once more
            files = {each.__code__.co_filename for each in current.script.values() if isinstance(each, types.FunctionType)}
            if len(files) == 1 and os.path.isfile(file := files.pop()):
                return file
        raise AttributeError(f"module '__main__' has no attribute {name!r} (a call has what its functions use of the script)")

    def _place(self, names: Namespaces) -> None:
        if names is self._current:
            return
        self.take_back()
        self._current = names
        for name, carried in names.modules.items():
            if name in sys.modules:
                contents = vars(sys.modules[name])
                given = {each: value for each, value in vars(carried).items() if each not in OF_MODULES}
                self._replaced.append((contents, {each: contents.get(each, ABSENT) for each in given}))
                contents.update(given)
            elif name in FAILED:
                sys.modules[name] = carried
                self._added.append(name)


ABSENT = object()
OF_MODULES = {*vars(types.ModuleType("")), *ABOUT_ITSELF, "__builtins__", CARRIED, "_siblings"}
PLACED = Placed()
