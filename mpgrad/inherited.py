"""What a process inherits from the one that starts it: who it is, what it may, and where it stands. (Linux only. Both sides.)

Whoever starts a worker would have it be what a child would be at that moment. A fork server passes on what it was given when it
began, which may be another user, other limits or another root. So it is compared with what its user is now. A fork takes
over what a process can change of itself; where more differs, or it may not, another fork server is needed. A program that root
starts has all rights again, whatever root had given up: so each fork compares itself with what the caller is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import resource
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpgrad.cpus import thread_variables
from mpgrad.environment import current_environment
from mpgrad.system import PROC

__all__ = ["Inherited", "credentials", "inherited", "take_over"]

LIBC = ctypes.CDLL(None)
THREAD = f"{PROC}/thread-self"  # of the thread that asks: a new process is its copy
CREDENTIALS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
STATUS = (*CREDENTIALS, "Seccomp_filters", "SigBlk", "Umask", "Mems_allowed")
FILES = ("cgroup", "oom_score_adj", "attr/current", "../../coredump_filter")
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
USER = {"Uid", "Gid", "Groups"}
LOST_WITH_ROOT = {"CapPrm", "CapEff", "CapAmb"}
CAPABILITIES = LOST_WITH_ROOT | {"CapInh", "CapBnd"}
TAKEN_OVER = USER | CAPABILITIES | {"NoNewPrivs", "SigBlk", "Umask", "affinity", "limits", "niceness"}
MAY_CHANGE_USER = 1 << 6 | 1 << 7  # CAP_SETGID, CAP_SETUID
MAY_DROP_BOUNDS = 1 << 8  # CAP_SETPCAP
CAPABILITY_VERSION = 0x20080522
PR_CAPBSET_DROP, PR_GET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 24, 27, 38
ASKS = 0xFFFFFFFF  # for the personality
KEEPS_CAPABILITIES = 1 << 4  # of the secure bits, the one that no program passes on
# variables that have been read when torch is loaded: by the loader, the C library, Python, and the libraries that compute
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
            LIBC.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)(*halves))
        if "NoNewPrivs" in differ:
            LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    except OSError as error:
        refused = error
    found = inherited().standing if differ else now
    if wrong := sorted(key for key in wanted if found[key] != wanted[key]):
        which = ", ".join(f"{key}: {wanted[key]}, not {found[key]}" for key in wrong)
        raise RuntimeError(f'a worker cannot become what this process is ({which}); use context="fork"') from refused


class Inherited(NamedTuple):
    standing: dict[str, Any]
    read_early: dict[str, str]  # variables of the environment; workers follow the others by themselves

    def changes(self, now: Inherited) -> dict[str, Any] | None:
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
            and all(height(wanted["limits"][key][1]) <= height(own["limits"][key][1]) for key in LIMITS)
        )


def inherited(variables: Mapping[str, str] | None = None) -> Inherited:
    """What a process that this thread starts now would be; `variables`: those that it is given besides.

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
    return Inherited(standing, {name: value for name, value in given.items() if READ_EARLY.match(name)})


def credentials(pid: int) -> dict[str, str]:
    """Who a process is, and what it may; nothing if it is gone, or hidden from us."""
    return credentials_and(str(pid), CREDENTIALS)


def credentials_and(process: str, names: tuple[str, ...]) -> dict[str, str]:
    lines = (line.partition(":") for line in content(f"{PROC}/{process}/status").splitlines())
    return dict.fromkeys(names, "") | {name: value.strip() for name, _, value in lines if name in names}


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
