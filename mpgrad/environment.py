"""What a process has of the one that started it. Both sides.

The environment of the caller's process, which its workers follow: variables, directory, arguments,
paths, time zone.

A worker is another process. A serial loop finds in `os.environ` what the caller has put there; a
worker would find what was there when its pool began. So each operation carries what the caller has
changed since then, and each backward does.

    caller   EnvironmentChanges: begin ──► Start                                changes ──► Follow
    worker   FOLLOWER:        take_over ──► initializer ──► settle             ──► follow
Guarantees: what mpgrad or an initializer has set in a worker stays. While nothing changes, the
    caller compares and the worker does nothing.
Assumes: `FOLLOWER` takes over in processes that belong to a pool. In other processes `follow` does
nothing.

What it inherits: who it is, what it may, and where it stands. (Linux only.) Whoever starts a worker
would have it be what a child would be at that moment. A fork server passes on what it was given
when it began, which may be another user, other limits or another root. So it is compared with what
its user is now. A fork takes over what a process can change of itself; where more differs, or it
may not, another fork server is needed. A program that root starts has all rights again, whatever
root had given up: so each fork compares itself with what the caller is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpgrad.errors import contextmanager
from mpgrad.system import PROC, THREAD_VARIABLES, thread_variables

__all__ = [
    "FOLLOWER",
    "PLACE",
    "Environment",
    "EnvironmentChanges",
    "InheritedState",
    "credentials",
    "current_environment",
    "inherited",
    "preparation",
    "take_over",
    "working_directory",
]


class Environment(NamedTuple):
    """The environment of a process at one moment."""

    variables: Mapping[str, str]
    directory: str | None  # None: it was deleted
    arguments: list[str]
    paths: list[str]  # of modules
    zone: tuple[Any, ...]  # what `time.tzset` has made of the variable TZ

    def changes(self, begin: Environment) -> dict[str, Any]:
        """The fields that differ; of the variables only those that do, None for one that was
        deleted."""
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
        """With these changes."""
        variables = {**self.variables, **changes.get("variables", {})}.items()
        return self._replace(**changes)._replace(
            variables={name: value for name, value in variables if value is not None}
        )


def in_use() -> tuple[Any, ...]:
    """The fields as the process has them now: objects that others may change. `os.environ` stores
    its variables in a dictionary, which C compares in a microsecond.
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


class EnvironmentChanges:
    """What the caller has changed since a pool began. Any thread may ask."""

    def __init__(self) -> None:
        self.begin = current_environment()
        # the fields at the last look, and what had changed
        self._seen: tuple[tuple[Any, ...], bytes] = (), b""

    def changes(self) -> bytes:
        """A pickle, the same object until something changes; no bytes where all is as at the
        beginning."""
        now = in_use()
        seen, pickled = self._seen  # read once: another thread may put others there
        if seen != now:
            seen = copied(now)
            changes = environment_of(seen).changes(self.begin)
            pickled = pickle.dumps(changes) if changes else b""
            self._seen = seen, pickled
        return pickled


class EnvironmentFollower:
    """Has a worker's environment follow the caller's."""

    def __init__(self) -> None:
        self._begin: Environment | None = None  # the caller's, when the pool began
        self._taken: Environment  # ours, after we took over
        self._own: Environment  # ours, after the initializer
        self._followed = b""
        self._target: Environment  # the caller's, as it was followed

    def take_over(self, begin: Environment) -> None:
        """Be like the caller when its pool began; the caller may have changed things before this
        process started."""
        self._begin = self._target = begin
        self._followed = b""
        for name in os.environ.keys() - begin.variables.keys() - set(THREAD_VARIABLES):
            del os.environ[name]
        for name, value in begin.variables.items():
            set_variable(name, value)
        sys.argv[:], sys.path[:] = begin.arguments, begin.paths
        if begin.directory is not None:
            # gone meanwhile; the initializer may know a better one
            with contextlib.suppress(OSError):
                os.chdir(begin.directory)
        if zone_in_use() != begin.zone:
            time.tzset()
        self._taken = current_environment()

    def settle(self) -> None:
        """The initializer has run: what it, or we, have set does not follow the caller."""
        if self._begin is not None:
            self._own = current_environment()

    def follow(self, changes: bytes | None) -> None:
        """Be like the caller at that time. None: this process is no worker, or not on the caller's
        machine."""
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
    """The caller may still be in a directory that was deleted: nothing is found there, and it has
    no name."""
    try:
        os.chdir(directory or "")
    except OSError:
        nowhere = tempfile.mkdtemp()
        os.chdir(nowhere)
        os.rmdir(nowhere)


FOLLOWER = EnvironmentFollower()


# --- where this process stands: with the caller, or as a worker of one


class ProcessSide:
    in_worker = False


PLACE = ProcessSide()


def working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted, and a worker can do without one as well as we can
        return None


def preparation() -> dict[str, Any]:
    """What multiprocessing tells its children of itself, as in
    `multiprocessing.spawn.get_preparation_data`."""
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
THREAD = f"{PROC}/thread-self"  # of the thread that asks: a new process is its copy
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
ASKS = 0xFFFFFFFF  # for the personality
KEEPS_CAPABILITIES = 1 << 4  # of the secure bits, the one that no program passes on
# variables that have been read when torch is loaded: by the loader, the C library, Python, and the
# libraries that compute
READ_EARLY = re.compile(
    "LD_|GLIBC_|MALLOC_|LANG|LC_|PYTHON|TORCH|PYTORCH_|ATEN_|CUDA|CUBLAS|CUDNN|NVIDIA_|HIP_|ROC|HSA_|ZE_|XPU|SYCL"
    "|OMP_|GOMP_|KMP_|LIBOMP|MKL|OPENBLAS_|GOTO|BLIS_|VECLIB_|NUMEXPR_|NPY_|NUMPY|DNNL_|ONEDNN_"
)


def take_over(wanted: dict[str, Any]) -> None:
    """Have this process, a fork, stand as `wanted`, where it does not.

    Raises:
        RuntimeError: it cannot, and may be something in between now.
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
        # the user and the capabilities last, as they are the right to change the others
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
            f'a worker cannot become what this process is ({which}); use context="fork"'
        ) from refused


class InheritedState(NamedTuple):
    standing: dict[str, Any]
    # variables of the environment; workers follow the others by themselves
    read_early: dict[str, str]

    def changes(self, now: InheritedState) -> dict[str, Any] | None:
        """What a fork of this process is to `take_over`, to be like `now`; None where it cannot."""
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
    """What a process that this thread starts now would be; `variables`: those that it is given
    besides.

    Raises:
        OSError: no descriptor is free to look with.
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
    """Who a process is, and what it may; nothing if it is gone, or hidden from us."""
    return credentials_and(str(pid), CREDENTIALS)


def credentials_and(process: str, names: tuple[str, ...]) -> dict[str, str]:
    lines = (line.partition(":") for line in content(f"{PROC}/{process}/status").splitlines())
    return dict.fromkeys(names, "") | {
        name: value.strip() for name, _, value in lines if name in names
    }


def ids(line: str) -> list[int]:
    """Real, effective and saved."""
    return [int(each) for each in line.split()[:3]]


def mask(line: str) -> int:
    return int(line or "0", 16)  # where there is no /proc nobody knows


def bits(number: int) -> list[int]:
    return [each for each in range(number.bit_length()) if number >> each & 1]


def height(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def namespace(name: str) -> str:
    # an older kernel, or another user now
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return os.readlink(f"{THREAD}/ns/{name}")
    return ""


def content(file: str) -> str:
    """What it says; nothing if it is not there, or not for us."""
    try:
        with open(file, "rb", buffering=0) as opened:
            return opened.read().decode(errors="replace")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return ""
