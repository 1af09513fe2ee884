"""The environment of the caller's process, which its workers follow: variables, directory, arguments, paths, time zone.

A worker is another process. A serial loop finds in `os.environ` what the caller has put there; a worker would find what was
there when its pool began. So each operation carries what the caller has changed since then, and each backward does.

    caller   Since: begin ──► Start                                changes ──► Follow
    worker   FOLLOWER:        take_over ──► initializer ──► settle             ──► follow
Guarantees: what mpgrad or an initializer has set in a worker stays. While nothing changes, the caller compares and the worker
    does nothing.
Assumes: `FOLLOWER` takes over in processes that belong to a pool. In other processes `follow` does nothing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpgrad.cpus import THREAD_VARIABLES
from mpgrad.errors import contextmanager
from mpgrad.place import working_directory

__all__ = ["FOLLOWER", "Environment", "Since", "current_environment"]


class Environment(NamedTuple):
    """The environment of a process at one moment."""

    variables: Mapping[str, str]
    directory: str | None  # None: it was deleted
    arguments: list[str]
    paths: list[str]  # of modules
    zone: tuple[Any, ...]  # what `time.tzset` has made of the variable TZ

    def changes(self, begin: Environment) -> dict[str, Any]:
        """The fields that differ; of the variables only those that do, None for one that was deleted."""
        changes = {name: value for name, value in self._asdict().items() if value != getattr(begin, name)}
        if "variables" in changes:
            deleted = dict.fromkeys(begin.variables.keys() - self.variables.keys())
            changes["variables"] = {**dict(self.variables.items() - begin.variables.items()), **deleted}
        return changes

    def changed(self, changes: dict[str, Any]) -> Environment:
        """With these changes."""
        variables = {**self.variables, **changes.get("variables", {})}.items()
        return self._replace(**changes)._replace(variables={name: value for name, value in variables if value is not None})


def in_use() -> tuple[Any, ...]:
    """The fields as the process has them now: objects that others may change. `os.environ` stores its variables in a
    dictionary, which C compares in a microsecond.
    """
    variables = getattr(os.environ, "_data", os.environ)
    return variables, working_directory(), sys.argv, sys.path, zone_in_use()


def zone_in_use() -> tuple[Any, ...]:
    return time.tzname, time.timezone, time.altzone, time.daylight


def copied(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    variables, directory, arguments, paths, zone = fields
    return dict(variables), directory, list(arguments), list(paths), zone


def environment_of(fields: tuple[Any, ...]) -> Environment:
    variables, directory, arguments, paths, zone = fields
    texts = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    return Environment(texts, directory, list(map(str, arguments)), list(map(str, paths)), zone)


def current_environment() -> Environment:
    return environment_of(copied(in_use()))


class Since:
    """What the caller has changed since a pool began. Any thread may ask."""

    def __init__(self) -> None:
        self.begin = current_environment()
        self._seen: tuple[tuple[Any, ...], bytes] = (), b""  # the fields at the last look, and what had changed

    def changes(self) -> bytes:
        """A pickle, the same object until something changes; no bytes where all is as at the beginning."""
        now = in_use()
        seen, pickled = self._seen  # read once: another thread may put others there
        if seen != now:
            seen = copied(now)
            changes = environment_of(seen).changes(self.begin)
            pickled = pickle.dumps(changes) if changes else b""
            self._seen = seen, pickled
        return pickled


class Follower:
    """Has a worker's environment follow the caller's."""

    def __init__(self) -> None:
        self._begin: Environment | None = None  # the caller's, when the pool began
        self._taken: Environment  # ours, after we took over
        self._own: Environment  # ours, after the initializer
        self._followed = b""
        self._target: Environment  # the caller's, as it was followed

    def take_over(self, begin: Environment) -> None:
        """Be like the caller when its pool began; the caller may have changed things before this process started."""
        self._begin = self._target = begin
        self._followed = b""
        for name in os.environ.keys() - begin.variables.keys() - set(THREAD_VARIABLES):
            del os.environ[name]
        for name, value in begin.variables.items():
            set_variable(name, value)
        sys.argv[:], sys.path[:] = begin.arguments, begin.paths
        if begin.directory is not None:
            with contextlib.suppress(OSError):  # gone meanwhile; the initializer may know a better one
                os.chdir(begin.directory)
        if zone_in_use() != begin.zone:
            time.tzset()
        self._taken = current_environment()

    def settle(self) -> None:
        """The initializer has run: what it, or we, have set does not follow the caller."""
        if self._begin is not None:
            self._own = current_environment()

    def follow(self, changes: bytes | None) -> None:
        """Be like the caller at that time. None: this process is no worker, or not on the caller's machine."""
        if changes is None or self._begin is None or changes == self._followed:
            return
        begin, own, taken, before = self._begin, self._own, self._taken, self._target
        now = begin.changed(pickle.loads(changes) if changes else {})
        self._followed, self._target = changes, now
        for name in {name for name, _ in before.variables.items() ^ now.variables.items()}:
            if own.variables.get(name) == begin.variables.get(name):
                set_variable(name, now.variables.get(name))
        if now.directory != before.directory and own.directory == taken.directory:
            go_to(now.directory)
        if now.arguments != before.arguments and own.arguments == taken.arguments:
            sys.argv[:] = now.arguments
        if now.paths != before.paths:
            sys.path[:] = [*(each for each in own.paths if each not in begin.paths), *now.paths]
        if now.zone != before.zone:
            time.tzset()

    @contextmanager
    def within(self, changes: bytes | None) -> Iterator[None]:
        """Follow others for a while."""
        before = self._followed
        self.follow(changes)
        try:
            yield
        finally:
            self.follow(before)


def set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value


def go_to(directory: str | None) -> None:
    """The caller may still be in a directory that was deleted: nothing is found there, and it has no name."""
    try:
        os.chdir(directory or "")
    except OSError:
        nowhere = tempfile.mkdtemp()
        os.chdir(nowhere)
        os.rmdir(nowhere)


FOLLOWER = Follower()
