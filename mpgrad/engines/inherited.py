"""What a process inherits from the one that starts it: who it is, what it may, and where it stands.

Whoever starts a worker would have it be what a child would be at that moment. A fork server passes on what it was given when it
began, which may be another user, other limits or another root. So it is compared with what its user is now, and one that no
longer agrees is left to the workers that it has. (Linux only.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from typing import NamedTuple

from mpgrad.system import PROC

__all__ = ["Inherited", "credentials", "environment", "inherited"]

# of the thread that asks: a new process is its copy
THREAD = f"{PROC}/thread-self"
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
CREDENTIALS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
STATUS = (*CREDENTIALS, "Seccomp_filters", "Umask", "Cpus_allowed", "Mems_allowed")
# variables that have been read when torch is loaded: by the loader, the C library, Python, and the libraries that compute
READ_EARLY = re.compile(
    "LD_|GLIBC_|MALLOC_|LANG|LC_|PYTHON|TORCH|PYTORCH_|ATEN_|CUDA|CUBLAS|CUDNN|NVIDIA_|HIP_|ROC|HSA_|ZE_|XPU|SYCL"
    "|OMP_|GOMP_|KMP_|LIBOMP|MKL|OPENBLAS_|GOTO|BLIS_|VECLIB_|NUMEXPR_|NPY_|NUMPY|DNNL_|ONEDNN_"
)
MOST_CHANGES = 1 << 15  # characters of variables, which have to fit into a message


class Inherited(NamedTuple):
    standing: tuple[object, ...]  # as a whole: it is the same, or it is not
    environment: dict[str, str]

    def changes(self, now: Inherited) -> dict[str, str | None] | None:
        """Which variables differ (None: is gone); None where a copy would need more than to be told these, to be like `now`."""
        if self.standing != now.standing:
            return None
        names = self.environment.keys() | now.environment.keys()
        changed = {name: now.environment.get(name) for name in names if self.environment.get(name) != now.environment.get(name)}
        size = sum(len(name) + len(value or "") for name, value in changed.items())
        return None if size > MOST_CHANGES or any(map(READ_EARLY.match, changed)) else changed


def inherited() -> Inherited:
    """What a process that this thread starts now would be.

    Raises:
        OSError: no descriptor is free to look with.
    """
    root = os.stat("/")
    return Inherited(
        (
            *status_lines(THREAD, STATUS),
            *(content(f"{THREAD}/{name}") for name in ("cgroup", "oom_score_adj", "attr/current")),
            *namespaces(),
            *map(resource.getrlimit, LIMITS),
            (root.st_dev, root.st_ino),
            os.getpriority(os.PRIO_PROCESS, 0),
            (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        ),
        environment(),
    )


def credentials(process: int) -> list[bytes]:
    """Who a process is, and what it may; nothing if it is gone, or hidden from us."""
    return status_lines(f"{PROC}/{process}", CREDENTIALS)


def status_lines(folder: str, names: tuple[str, ...]) -> list[bytes]:
    wanted = tuple(f"{name}:".encode() for name in names)
    return [line for line in content(f"{folder}/status").splitlines() if line.startswith(wanted)]


def namespaces() -> list[str]:
    """Nothing after a change of user, when the system hides them even from the process itself."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return [os.readlink(f"{THREAD}/ns/{each}") for each in sorted(os.listdir(f"{THREAD}/ns"))]
    return []


def content(file: str) -> bytes:
    """What it says; nothing if it is not there, or not for us."""
    try:
        with open(file, "rb", buffering=0) as opened:
            return opened.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return b""


def environment() -> dict[str, str]:
    while True:
        with contextlib.suppress(KeyError, RuntimeError):  # another thread has changed it meanwhile
            return dict(os.environ)
