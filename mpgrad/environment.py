"""A process takes over its environment and its rights from the process that started it. Both sides
use this module.

The environment is the variables, directory, arguments, module paths, time zone, filters of
`warnings`, recursion limit, levels of loggers, and how `decimal` and NumPy compute. Workers follow
the caller's environment. On another machine, workers ignore what is specific to the caller's.

A serial loop finds in `os.environ` what the caller has put there. A worker would find what was
there when its pool began. So the caller's changes since then are sent with each operation and each
backward.

    caller   EnvironmentChanges: begin ──► Start                                changes ──► Follow
    worker   FOLLOWER:        take_over ──► initializer ──► settle             ──► follow

A task may catch a warning that the caller's filters make an error, so these filters hold in the
task. The caller's filters have to decide again about the warnings that pass, because "once" and
"default" need its counts. So all actions except "error" and "ignore" are "always" in a worker.
A filter names its category, which may be a class of a module that no task here imports. So the
worker compares names. Outside of tasks a worker has its own filters, because the modules that it
imports to load a function have already warned, and added their filters, in the caller.
Guarantees: a worker keeps what mpgrad or an initializer has set in it. While nothing changes, the
    caller only compares and the worker does nothing.
Assumes: `FOLLOWER` takes over in processes that belong to a pool. In other processes `follow` does
    nothing.

On Linux a process also inherits its user, its rights, its limits and its namespaces. A worker
should have what a child of the caller would get at that moment. But a fork server passes on what it
was given when it began, which may be another user, other limits or another root. So its state is
compared with the caller's present state. A fork changes itself as far as a process can. If more
differs, or if the fork lacks the right, a new fork server is needed. A program that root starts has
all rights again, even those that root had given up. So each fork compares itself with the caller.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import decimal
import errno
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import math
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpgrad.errors import contextmanager
from mpgrad.system import PROC, THREAD_VARIABLES, thread_variables

__all__ = [
    "FILTERS",
    "FOLLOWER",
    "PLACE",
    "Environment",
    "EnvironmentChanges",
    "InheritedState",
    "TaskFilters",
    "credentials",
    "current_environment",
    "inherited",
    "preparation",
    "take_over",
    "working_directory",
]


class Filter(NamedTuple):
    """A filter of `warnings`. Its category is the module and the name of the class."""

    action: str
    message: re.Pattern[str] | str | None
    category: tuple[str, str]
    module: re.Pattern[str] | str | None
    line: int


class Environment(NamedTuple):
    """The environment of a process at one moment."""

    variables: Mapping[str, str]
    directory: str | None  # None if it was deleted
    arguments: list[str]
    paths: list[str]  # where Python looks for modules
    zone: tuple[Any, ...]  # the result of `time.tzset` for the variable TZ
    filters: list[Filter]  # the filters of `warnings`
    extensions: Mapping[str, str]  # the files of extension modules that `import` does not find
    recursion_limit: int
    decimals: tuple[Any, ...]  # the arguments of `decimal.Context`
    float_errors: Mapping[str, str]  # NumPy's, if it is imported
    log_levels: Mapping[str, int]  # the levels of loggers that have one

    def changes(self, begin: Environment) -> dict[str, Any]:
        """Return the fields that differ from `begin`.

        Variables are returned only if they differ, with None for a deleted one.
        """
        changes = {
            name: value for name, value in self._asdict().items() if value != getattr(begin, name)
        }
        if "variables" in changes:
            deleted = dict.fromkeys(begin.variables.keys() - self.variables.keys())
            changes["variables"] = {
                **dict(self.variables.items() - begin.variables.items()),
                **deleted,
            }
        return changes

    def changed(self, changes: dict[str, Any]) -> Environment:
        """Return this environment with the changes applied."""
        variables = {**self.variables, **changes.get("variables", {})}.items()
        return self._replace(**changes)._replace(
            variables={name: value for name, value in variables if value is not None}
        )


def in_use() -> tuple[Any, ...]:
    """Return the present fields of the process. Other code may change these objects.

    `os.environ` stores its variables in a dictionary, which C compares in a microsecond.
    """
    variables = getattr(os.environ, "_data", os.environ)
    extensions = extensions_by_path(len(sys.modules))
    of_process = working_directory(), sys.argv, sys.path, zone_in_use(), FILTERS_IN_USE()
    of_numbers = sys.getrecursionlimit(), decimals_in_use(), float_errors_in_use()
    return variables, *of_process, extensions, *of_numbers, log_levels_in_use()


# Since Python 3.14 a context can have its own filters.
FILTERS_IN_USE = getattr(warnings, "_get_filters", lambda: warnings.filters)


def zone_in_use() -> tuple[Any, ...]:
    return time.tzname, time.timezone, time.altzone, time.daylight


def decimals_in_use() -> tuple[Any, ...]:
    """Return the settings of `decimal`'s context, without the signals that it has recorded."""
    _, (*numbers, _, traps) = decimal.getcontext().__reduce__()
    return *numbers, [], traps


def set_decimals(arguments: tuple[Any, ...]) -> None:
    decimal.setcontext(decimal.Context(*arguments))


def float_errors_in_use() -> dict[str, str]:
    numpy: Any = sys.modules.get("numpy")
    return numpy.geterr() if hasattr(numpy, "geterr") else {}


def set_float_errors(given: Mapping[str, str]) -> None:
    if given:
        importlib.import_module("numpy").seterr(**given)


def set_recursion_limit(limit: int) -> None:
    with contextlib.suppress(RecursionError):  # it is too low for what a worker itself needs
        sys.setrecursionlimit(limit)


def log_levels_in_use() -> dict[str, int]:
    """Return the levels of the loggers that have one. They are kept in a logger's cache, which
    `setLevel` empties."""
    cache: dict[Any, Any] = logging.root._cache  # type: ignore[attr-defined]
    found: dict[str, int] | None = cache.get(OF_LEVELS)
    if found is None:
        with logging._lock:  # type: ignore[attr-defined]  # `setLevel` takes it to empty the caches
            loggers = [*logging.root.manager.loggerDict.values(), logging.root]
            levels = {each.name: each.level for each in loggers if isinstance(each, logging.Logger)}
            found = {name: level for name, level in levels.items() if level}
            cache[OF_LEVELS] = found
    return found


OF_LEVELS = "mpgrad"  # a key that is not a level
FOLLOWED_LEVELS: dict[str, int] = {}  # the levels that this worker set last


def set_log_levels(given: Mapping[str, int]) -> None:
    for name in {**FOLLOWED_LEVELS, **given}:
        logging.getLogger(name).setLevel(given.get(name, logging.NOTSET))
    FOLLOWED_LEVELS.clear()
    FOLLOWED_LEVELS.update(given)


# Fields that belong to no machine, and how a worker sets them.
EVERYWHERE: dict[str, Callable[[Any], None]] = {
    "recursion_limit": set_recursion_limit,
    "decimals": set_decimals,
    "float_errors": set_float_errors,
    "log_levels": set_log_levels,
}


def copied(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    variables, directory, arguments, paths, zone, filters, *others = fields
    lists = list(arguments), list(paths)
    return dict(variables), directory, *lists, zone, list(filters), *others


def environment_of(fields: tuple[Any, ...]) -> Environment:
    variables, directory, arguments, paths, zone, filters, *others = fields
    texts = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    named = [
        Filter(action, message, (category.__module__, category.__qualname__), module, line)
        for action, message, category, module, line in filters
    ]
    lists = list(map(str, arguments)), list(map(str, paths))
    return Environment(texts, directory, *lists, zone, named, *others)


def current_environment() -> Environment:
    return environment_of(copied(in_use()))


class EnvironmentChanges:
    """Finds what the caller has changed since a pool began. Any thread may call it."""

    def __init__(self, elsewhere: bool = False) -> None:
        """With `elsewhere`, workers are on other machines, which have their own files."""
        self.begin = current_environment()
        self._elsewhere = elsewhere
        # the fields as they were last seen, and their changes as a pickle
        self._seen: tuple[tuple[Any, ...], bytes] = (), b""

    def changes(self) -> bytes:
        """Return a pickle of the changes, or no bytes if nothing differs from the beginning.

        The same object is returned until something changes.
        """
        now = in_use()
        # This is read once, because another thread may store a new pair.
        seen, pickled = self._seen
        if seen != now:
            seen = copied(now)
            changes = environment_of(seen).changes(self.begin)
            if self._elsewhere:
                kept = {"filters", *EVERYWHERE}
                changes = {name: each for name, each in changes.items() if name in kept}
            pickled = pickle.dumps(changes) if changes else b""
            self._seen = seen, pickled
        return pickled


# --- extension modules


SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)


@functools.lru_cache(maxsize=1)
def extensions_by_path(modules: int) -> dict[str, str]:
    """Return the files of extension modules that were loaded by their path, as
    `torch.utils.cpp_extension.load` does. `modules` is the number of imported modules."""
    files = {
        name: vars(module).get("__file__")
        for name, module in list(sys.modules.items())
        if "." not in name and issubclass(type(module), types.ModuleType)
    }
    return {
        name: os.path.abspath(file)
        for name, file in files.items()
        if isinstance(file, str)
        and file.endswith(SUFFIXES)
        and os.path.dirname(file) not in sys.path
    }


class ExtensionFinder(importlib.abc.MetaPathFinder):
    """Makes a worker's imports find the caller's extension modules."""

    def __init__(self) -> None:
        self.files: Mapping[str, str] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return (
            importlib.util.spec_from_file_location(name, self.files[name])
            if name in self.files
            else None
        )


EXTENSIONS = ExtensionFinder()


# --- filters of `warnings`


class NamedCategory(type):
    """A class of warnings, known by its module and name."""

    def __subclasscheck__(cls, kind: type) -> bool:
        path = cls.__module__, cls.__qualname__
        return any((each.__module__, each.__qualname__) == path for each in kind.__mro__)


def category_named(module: str, name: str) -> type:
    if module == "builtins":
        found: type = getattr(builtins, name)
        return found
    return NamedCategory(name, (), {"__module__": module, "__qualname__": name})


# The module that calls a task. In the loop it is the caller's module.
OWN = re.compile(r"mpgrad\.")


def in_a_task(filters: Sequence[Filter]) -> list[tuple[Any, ...]]:
    """Return the caller's filters as they hold in a task.

    A warning may point to the code that called the task, which is mpgrad's here. Only the caller
    knows whether a filter for a module or a line applies to it.
    """
    rows: list[tuple[Any, ...]] = []
    for action, message, path, module, line in filters:
        category = category_named(*path)
        if module is not None or line:
            rows.append(("always", message, category, OWN, 0))
        action = action if action in ("error", "ignore") else "always"
        rows.append((action, message, category, module, line))
    return [*rows, ("always", None, Warning, None, 0)]


class TaskFilters:
    """The filters of `warnings` under which tasks run in a process that is a worker.

    As a context, it puts them in force. Within such a context, a further one suspends them while
    the worker loads something. It does nothing before `begin`, nor for workers that are threads:
    their tasks have the filters of their process.
    """

    def __init__(self) -> None:
        self._set: list[tuple[Any, ...]] = []  # the filters that were last set
        self._others: Any = None  # the filters that are not in force now
        self._in_force = False

    def begin(self, filters: list[tuple[Any, ...]]) -> None:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        self._others, self._in_force = [], False
        self.set(filters)

    def set(self, filters: list[tuple[Any, ...]]) -> None:
        self._set = filters
        of_tasks: Any = warnings.filters if self._in_force else self._others
        of_tasks[:] = filters
        # This is the public way to tell Python that the filters have changed.
        with warnings.catch_warnings():
            pass

    def added(self) -> list[tuple[Any, ...]]:
        """Return the filters that were added since they were set."""
        known = set(map(id, self._set))
        return [each for each in self._others if id(each) not in known]

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *error: object) -> None:
        self._swap()

    def _swap(self) -> None:
        if self._others is not None:
            self._others, warnings.filters = warnings.filters, self._others
            self._in_force = not self._in_force


FILTERS = TaskFilters()


# --- in the worker


class EnvironmentFollower:
    """Makes a worker's environment follow the caller's."""

    def __init__(self) -> None:
        self._begin: Environment | None = None  # the caller's environment when the pool began
        self._taken: Environment  # this process's, after it took over
        self._own: Environment  # this process's, after the initializer
        self._followed = b""
        self._target: Environment  # the caller's, as this process followed it last
        self._own_filters: list[Any]  # set by the initializer

    def take_over(self, begin: Environment, elsewhere: bool = False) -> None:
        """Set the environment that the caller had when its pool began.

        The caller may have changed things before this process started. If the caller is
        `elsewhere`, on another machine, this process keeps all that belongs to its own machine.
        """
        self._begin = self._target = begin
        self._followed = b""
        FILTERS.begin(in_a_task(begin.filters))
        for name, use in EVERYWHERE.items():
            use(getattr(begin, name))
        if elsewhere:
            self._taken = current_environment()
            return
        for name in os.environ.keys() - begin.variables.keys() - set(THREAD_VARIABLES):
            del os.environ[name]
        for name, value in begin.variables.items():
            set_variable(name, value)
        sys.argv[:], sys.path[:] = begin.arguments, begin.paths
        EXTENSIONS.files = begin.extensions
        if EXTENSIONS not in sys.meta_path:
            sys.meta_path.append(EXTENSIONS)
        if begin.directory is not None:
            # The directory may be gone by now. The initializer may know a better one.
            with contextlib.suppress(OSError):
                os.chdir(begin.directory)
        if zone_in_use() != begin.zone:
            time.tzset()
        self._taken = current_environment()

    def settle(self) -> None:
        """Note that the initializer has run. What it or mpgrad has set no longer follows the
        caller."""
        if self._begin is not None:
            self._own = current_environment()
            self._own_filters = FILTERS.added()

    def follow(self, changes: bytes | None) -> None:
        """Set the environment that the caller had when it sent `changes`.

        `changes` is None if workers share the caller's process.
        """
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
        EXTENSIONS.files = now.extensions
        if now.zone != before.zone:
            time.tzset()
        for name, use in EVERYWHERE.items():
            value = getattr(now, name)
            if value != getattr(before, name) and getattr(own, name) == getattr(taken, name):
                use(value)
        if now.filters != before.filters:
            FILTERS.set([*self._own_filters, *in_a_task(now.filters)])

    @contextmanager
    def within(self, changes: bytes | None) -> Iterator[None]:
        """Follow other changes during the body."""
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
    """Change to the directory, or to one that has no name if the caller's was deleted.

    The caller may still be in such a directory, where nothing can be found.
    """
    try:
        os.chdir(directory or "")
    except OSError:
        nowhere = tempfile.mkdtemp()
        os.chdir(nowhere)
        os.rmdir(nowhere)


FOLLOWER = EnvironmentFollower()


# --- the side of this process: the caller's, or a worker's


class ProcessSide:
    in_worker = False
    # modules whose import has started the pool of this worker, or that pool's own caller's
    importing: frozenset[str] = frozenset()


PLACE = ProcessSide()


def working_directory() -> str | None:
    try:
        return os.getcwd()
    # The directory was deleted. The caller does without one, and so can a worker.
    except OSError:
        return None


def preparation() -> dict[str, Any]:
    """Return the data that multiprocessing sends to its children, as
    `multiprocessing.spawn.get_preparation_data` does."""
    logger = logging.getLogger("multiprocessing")
    return {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "executable": multiprocessing.spawn.get_executable(),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "log_level": logger.level,
        "log_to_stderr": multiprocessing.util._log_to_stderr,  # type: ignore[attr-defined]
    }


# --- what a process inherits


LIBC = ctypes.CDLL(None)
THREAD = f"{PROC}/thread-self"  # a new process is a copy of the thread that starts it
CREDENTIALS = (
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
)
STATUS = (*CREDENTIALS, "Seccomp_filters", "SigBlk", "Umask", "Mems_allowed")
FILES = ("cgroup", "oom_score_adj", "attr/current", "../../coredump_filter")
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
USER = {"Uid", "Gid", "Groups"}
LOST_WITH_ROOT = {"CapPrm", "CapEff", "CapAmb"}
CAPABILITIES = LOST_WITH_ROOT | {"CapInh", "CapBnd"}
TAKEN_OVER = (
    USER | CAPABILITIES | {"NoNewPrivs", "SigBlk", "Umask", "affinity", "limits", "niceness"}
)
MAY_CHANGE_USER = 1 << 6 | 1 << 7  # CAP_SETGID, CAP_SETUID
MAY_DROP_BOUNDS = 1 << 8  # CAP_SETPCAP
CAPABILITY_VERSION = 0x20080522
PR_CAPBSET_DROP, PR_GET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 24, 27, 38
ASKS = 0xFFFFFFFF  # reads the personality instead of setting it
# the one secure bit that no program passes on
KEEPS_CAPABILITIES = 1 << 4
# Variables that are read when torch is loaded, by the loader, the C library, Python or
# numerical libraries.
READ_EARLY = re.compile(
    "LD_|GLIBC_|MALLOC_|LANG|LC_|PYTHON|TORCH|PYTORCH_|ATEN_|CUDA|CUBLAS|CUDNN|NVIDIA_|HIP_|ROC|HSA_|ZE_|XPU|SYCL"
    "|OMP_|GOMP_|KMP_|LIBOMP|MKL|OPENBLAS_|GOTO|BLIS_|VECLIB_|NUMEXPR_|NPY_|NUMPY|DNNL_|ONEDNN_"
)


def take_over(wanted: dict[str, Any]) -> None:
    """Change this process, a fork, to the state `wanted`, if it differs.

    Raises:
        RuntimeError: the process cannot change. Some of its state may have changed already.
    """
    refused = None
    now = inherited().standing
    differ = {key for key in wanted if now[key] != wanted[key]}
    try:
        if "affinity" in differ:
            os.sched_setaffinity(0, wanted["affinity"])
        if "niceness" in differ:
            os.setpriority(os.PRIO_PROCESS, 0, wanted["niceness"])
        if "limits" in differ:
            for limit, pair in wanted["limits"].items():
                resource.setrlimit(limit, pair)
        if "Umask" in differ:
            os.umask(int(wanted["Umask"], 8))
        if "SigBlk" in differ:
            blocked = {each + 1 for each in bits(mask(wanted["SigBlk"]))}
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked & signal.valid_signals())
        # The user and the capabilities come last, because changing the others requires them.
        if "CapBnd" in differ:
            for each in bits(mask(now["CapBnd"]) & ~mask(wanted["CapBnd"])):
                LIBC.prctl(PR_CAPBSET_DROP, each, 0, 0, 0)
        if "Groups" in differ:
            os.setgroups([int(each) for each in wanted["Groups"].split()])
        if "Gid" in differ:
            os.setresgid(*ids(wanted["Gid"]))
            LIBC.setfsgid(int(wanted["Gid"].split()[3]))
        if "Uid" in differ:
            os.setresuid(*ids(wanted["Uid"]))
            LIBC.setfsuid(int(wanted["Uid"].split()[3]))
        if differ & (CAPABILITIES | USER):
            sets = [mask(wanted[key]) for key in ("CapEff", "CapPrm", "CapInh")]
            halves = [part >> shift & 0xFFFFFFFF for shift in (0, 32) for part in sets]
            LIBC.capset(
                (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)(*halves)
            )
        if "NoNewPrivs" in differ:
            LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    except OSError as error:
        refused = error
    found = inherited().standing if differ else now
    if wrong := sorted(key for key in wanted if found[key] != wanted[key]):
        which = ", ".join(f"{key}: {wanted[key]}, not {found[key]}" for key in wrong)
        raise RuntimeError(
            f'a worker cannot take over the state of this process ({which}); use context="fork"'
        ) from refused


class InheritedState(NamedTuple):
    standing: dict[str, Any]
    # variables that are read early; workers follow the others by themselves
    read_early: dict[str, str]

    def changes(self, now: InheritedState) -> dict[str, Any] | None:
        """Return what a fork of this process must `take_over` to be like `now`; None if it
        cannot."""
        if self.read_early != now.read_early or not self._may_become(now.standing):
            return None
        return {key: now.standing[key] for key in TAKEN_OVER}

    def _may_become(self, wanted: dict[str, Any]) -> bool:
        own = self.standing
        differ = {key for key in own if own[key] != wanted[key]}
        if not differ <= TAKEN_OVER:
            return False
        rights = mask(own["CapEff"])
        if differ & USER:
            is_root = set(ids(own["Uid"])) == {0} and rights & MAY_CHANGE_USER == MAY_CHANGE_USER
            loses_rights = 0 not in ids(wanted["Uid"])
            if not is_root or (loses_rights and any(mask(wanted[key]) for key in LOST_WITH_ROOT)):
                return False
        return (
            all(mask(wanted[key]) & ~mask(own[key]) == 0 for key in CAPABILITIES)
            and ("CapBnd" not in differ or rights & MAY_DROP_BOUNDS != 0)
            and wanted["NoNewPrivs"] >= own["NoNewPrivs"]
            and wanted["niceness"] >= own["niceness"]
            and all(
                height(wanted["limits"][key][1]) <= height(own["limits"][key][1]) for key in LIMITS
            )
        )


def inherited(variables: Mapping[str, str] | None = None) -> InheritedState:
    """Return the state that a process started by this thread would have now.

    `variables` are further environment variables for it.

    Raises:
        OSError: no descriptor is free for reading the state.
    """
    root = os.stat("/")
    standing: dict[str, Any] = credentials_and("thread-self", STATUS)
    standing |= {name: content(f"{THREAD}/{name}") for name in FILES}
    standing |= {
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": {limit: resource.getrlimit(limit) for limit in LIMITS},
        "namespaces": [namespace(name) for name in NAMESPACES],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "personality": LIBC.personality(ASKS),
        "root": (root.st_dev, root.st_ino),
        "secure bits": LIBC.prctl(PR_GET_SECUREBITS, 0, 0, 0, 0) & ~KEEPS_CAPABILITIES,
        "scheduler": (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
    }
    given = {**thread_variables(1), **current_environment().variables, **(variables or {})}
    return InheritedState(
        standing, {name: value for name, value in given.items() if READ_EARLY.match(name)}
    )


def credentials(pid: int) -> dict[str, str]:
    """Return the user, groups and rights of a process; nothing if it is gone or hidden from us."""
    return credentials_and(str(pid), CREDENTIALS)


def credentials_and(process: str, names: tuple[str, ...]) -> dict[str, str]:
    lines = (line.partition(":") for line in content(f"{PROC}/{process}/status").splitlines())
    return dict.fromkeys(names, "") | {
        name: value.strip() for name, _, value in lines if name in names
    }


def ids(line: str) -> list[int]:
    """Return the real, effective and saved id."""
    return [int(each) for each in line.split()[:3]]


def mask(line: str) -> int:
    return int(line or "0", 16)  # unknown without /proc


def bits(number: int) -> list[int]:
    return [each for each in range(number.bit_length()) if number >> each & 1]


def height(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def namespace(name: str) -> str:
    # The kernel may be older, or the process may have another user now.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return os.readlink(f"{THREAD}/ns/{name}")
    return ""


def content(file: str) -> str:
    """Return the text of the file; "" if it does not exist or may not be read."""
    try:
        with open(file, "rb", buffering=0) as opened:
            return opened.read().decode(errors="replace")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return ""
