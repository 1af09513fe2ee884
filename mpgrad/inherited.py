"""What a process inherits from the one that starts it: who it is, what it may, and where it stands. (Linux only. Both sides.)

Whoever starts a worker would have it be what a child would be at that moment. A fork server passes on what it was given when it
began, which may be another user, other limits or another root. So it is compared with what its user is now. A fork takes
over what a process can change of itself; where more differs, or it may not, another fork server is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import resource
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpgrad.cpus import thread_variables
from mpgrad.environment import current_environment
from mpgrad.system import PROC

__all__ = ["Inherited", "credentials", "inherited", "take_over"]

THREAD = f"{PROC}/thread-self"  # of the thread that asks: a new process is its copy
CREDENTIALS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
STATUS = (*CREDENTIALS, "Seccomp_filters", "Umask", "Mems_allowed")
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
USER = {"Uid", "Gid", "Groups"}
LOST_WITH_ROOT = {"CapPrm", "CapEff", "CapAmb"}
TAKEN_OVER = USER | LOST_WITH_ROOT | {"NoNewPrivs", "Umask", "affinity", "limits", "niceness"}
MAY_CHANGE_USER = 1 << 6 | 1 << 7  # CAP_SETGID, CAP_SETUID
PR_SET_NO_NEW_PRIVS = 38
# variables that have been read when torch is loaded: by the loader, the C library, Python, and the libraries that compute
READ_EARLY = re.compile(
    "LD_|GLIBC_|MALLOC_|LANG|LC_|PYTHON|TORCH|PYTORCH_|ATEN_|CUDA|CUBLAS|CUDNN|NVIDIA_|HIP_|ROC|HSA_|ZE_|XPU|SYCL"
    "|OMP_|GOMP_|KMP_|LIBOMP|MKL|OPENBLAS_|GOTO|BLIS_|VECLIB_|NUMEXPR_|NPY_|NUMPY|DNNL_|ONEDNN_"
)


def take_over(wanted: dict[str, Any]) -> None:
    """Have this process, a fork, stand as `wanted`, which may be empty: then it does already.

    Raises:
        OSError: the system refuses.
        RuntimeError: it is something else now.
    """
    if not wanted:
        return
    now = inherited().standing
    differ = {key for key in wanted if now[key] != wanted[key]}
    if "affinity" in differ:
        os.sched_setaffinity(0, wanted["affinity"])
    if "niceness" in differ:
        os.setpriority(os.PRIO_PROCESS, 0, wanted["niceness"])
    if "limits" in differ:
        for limit, pair in wanted["limits"].items():
            resource.setrlimit(limit, pair)
    if "Umask" in differ:
        os.umask(int(wanted["Umask"], 8))
    if differ & USER:
        # the user last, as that takes the right to change the others
        os.setgroups([int(each) for each in wanted["Groups"].split()])
        os.setresgid(*ids(wanted["Gid"]))
        os.setresuid(*ids(wanted["Uid"]))
    if "NoNewPrivs" in differ:
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if (found := inherited().standing) != wanted:
        wrong = sorted(key for key in wanted if found[key] != wanted[key])
        raise RuntimeError(f"a worker could not become what its caller is (differs: {', '.join(wrong)})")


class Inherited(NamedTuple):
    standing: dict[str, Any]
    read_early: dict[str, str]  # variables of the environment; workers follow the others by themselves

    def changes(self, now: Inherited) -> dict[str, Any] | None:
        """What a fork of this process is to `take_over`, to be like `now`; None where it cannot."""
        if self.read_early != now.read_early or not self._may_become(now.standing):
            return None
        return {} if self.standing == now.standing else now.standing

    def _may_become(self, wanted: dict[str, Any]) -> bool:
        own = self.standing
        differ = {key for key in own if own[key] != wanted[key]}
        if not differ <= TAKEN_OVER:
            return False
        if differ & (USER | LOST_WITH_ROOT):
            is_root = set(ids(own["Uid"])) == {0} and int(own["CapEff"], 16) & MAY_CHANGE_USER == MAY_CHANGE_USER
            if not is_root or 0 in ids(wanted["Uid"]) or any(int(wanted[key], 16) for key in LOST_WITH_ROOT):
                return False
        return (
            wanted["NoNewPrivs"] >= own["NoNewPrivs"]
            and wanted["niceness"] >= own["niceness"]
            and all(height(wanted["limits"][key][1]) <= height(own["limits"][key][1]) for key in LIMITS)
        )


def inherited(variables: Mapping[str, str] | None = None) -> Inherited:
    """What a process that this thread starts now would be; `variables`: those that it is given besides.

    Raises:
        OSError: no descriptor is free to look with.
    """
    root = os.stat("/")
    standing: dict[str, Any] = credentials_and("thread-self", STATUS)
    standing |= {name: content(f"{THREAD}/{name}") for name in ("cgroup", "oom_score_adj", "attr/current")}
    standing |= {
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": {limit: resource.getrlimit(limit) for limit in LIMITS},
        "namespaces": [namespace(name) for name in NAMESPACES],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "root": (root.st_dev, root.st_ino),
        "scheduler": (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
    }
    given = {**thread_variables(1), **current_environment().variables, **(variables or {})}
    return Inherited(standing, {name: value for name, value in given.items() if value is not None and READ_EARLY.match(name)})


def credentials(pid: int) -> dict[str, str]:
    """Who a process is, and what it may; nothing if it is gone, or hidden from us."""
    return credentials_and(str(pid), CREDENTIALS)


def credentials_and(process: str, names: tuple[str, ...]) -> dict[str, str]:
    lines = (line.partition(":") for line in content(f"{PROC}/{process}/status").splitlines())
    return dict.fromkeys(names, "") | {name: value.strip() for name, _, value in lines if name in names}


def ids(line: str) -> list[int]:
    """Real, effective and saved."""
    return [int(each) for each in line.split()[:3]]


def height(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def namespace(name: str) -> str:
    with contextlib.suppress(FileNotFoundError, PermissionError):  # an older kernel, or another user now
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
