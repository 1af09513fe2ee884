"""Differences between systems are handled here. Both sides use this module, and it needs no torch.

No other module checks the system's name, or whether it has a certain function. The exception is the
doctor, which describes systems.

Linux has anonymous memory files, private mappings of them, and processes that die with their
parent. So it can have a fork server that forks workers. Other systems with Unix sockets, such as
macOS, take the portable branches. Linux takes them too if it is older than 5.3, or if a sandbox
refuses a call that the other branches need. `MPGRAD_PORTABLE=1` in the
environment selects them for tests, in workers too.

The module also describes a process's resources:

  * descriptors that are kept as numbers (`OwnedDescriptor`);
  * memory within the limits of Linux's control groups, versions 1 and 2, which containers and batch
    systems set;
  * how often the kernel has killed a process because memory ran out;
  * amounts of memory as people write them;
  * the CPUs that this process may really use: `os.cpu_count` counts those of the machine, while
    schedulers and containers give less, by affinity or by quota;
  * the CPUs that other programs take, which show whether timings can be relied on.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import math
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "CGROUPS",
    "CLOSE_ON_EXEC",
    "NO_SIGNAL",
    "PORTABLE",
    "PROC",
    "REFUSED",
    "THREAD_VARIABLES",
    "OthersClock",
    "OwnedDescriptor",
    "anonymous_memory",
    "bytes_of",
    "cgroup_folders",
    "cgroup_quota",
    "free_memory",
    "free_on_machine",
    "has_calls_of_linux",
    "kills_for_memory",
    "limiting",
    "memory_limit",
    "memory_used",
    "own_cgroups",
    "own_cpus",
    "read_words",
    "receive_descriptors",
    "remove_name",
    "reserve_memory",
    "resident_bytes",
    "thread_variables",
    "usable_cpus",
]

# the errors of a call that an older kernel or a sandbox does not offer
REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES)
# A flag for sending. A program that lets SIGPIPE end it, which is the default, must not end with a
# worker. macOS has no such flag.
NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))

if not (hasattr(socket, "SCM_RIGHTS") and hasattr(socket, "CMSG_SPACE")):
    raise ImportError(
        "mpgrad needs Unix sockets that can pass file descriptors (socket.SCM_RIGHTS), which this "
        "system lacks "
        f"(system: {sys.platform}); on Windows run it in WSL 2"
    )


def wants_portable(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ValueError(f"MPGRAD_PORTABLE must be 0 or 1 (MPGRAD_PORTABLE: {value!r})")
    return value == "1"


def has_calls_of_linux() -> bool:
    try:
        os.close(os.memfd_create("mpgrad", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:  # the system that this Python was built for lacks it
        return False
    except OSError as error:
        return error.errno not in REFUSED
    return True


PORTABLE: bool = (
    wants_portable(os.environ.get("MPGRAD_PORTABLE", ""))
    or sys.platform != "linux"
    or not has_calls_of_linux()
)
CLOSE_ON_EXEC = 0 if PORTABLE else int(socket.MSG_CMSG_CLOEXEC)  # for received descriptors
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")  # where Linux describes itself
if PORTABLE:
    import _posixshmem  # multiprocessing.shared_memory uses it too


def anonymous_memory() -> int:
    """Return the descriptor of a memory file that has no name and, at first, no size.

    torch itself leaves a name at least until it has mapped the memory. If the process is killed in
    that time, the name stays. On macOS the memory stays too, until the machine restarts.
    """
    if not PORTABLE:
        try:
            return os.memfd_create("mpgrad", os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            remedy = "export MPGRAD_PORTABLE=1 before the program starts"
            raise OSError(
                error.errno,
                f"memfd_create is refused here since mpgrad was imported ({error}); {remedy}",
            ) from error
    while True:
        try:
            descriptor = _posixshmem.shm_open(
                name_of(os.getpid()), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600
            )
        except FileExistsError:
            # The name belongs to another thread, which will soon remove it, or to a dead process
            # that had this number.
            remove_name(os.getpid())
        else:
            remove_name(os.getpid())
            return int(descriptor)


def name_of(pid: int) -> str:
    # macOS allows 31 characters. The user is in the name because no user can remove another's name.
    return f"/mpgrad-{os.getuid()}-{pid}"


def remove_name(pid: int) -> None:
    """Remove the name that a process left if it was killed in the middle of `anonymous_memory`."""
    if PORTABLE:
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(name_of(pid))


def receive_descriptors(end: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a message and its descriptors, which programs do not inherit.

    `socket.recv_fds` does not pass its flags on.
    """
    found = array.array("i")
    data, ancillary, _, _ = end.recvmsg(
        nbytes, socket.CMSG_SPACE(most * found.itemsize), CLOSE_ON_EXEC
    )
    for _, _, content in ancillary:
        found.frombytes(content[: len(content) - len(content) % found.itemsize])
    for each in found if CLOSE_ON_EXEC == 0 else ():
        os.set_inheritable(each, False)
    return data, list(found)


def reserve_memory(descriptor: int, offset: int, nbytes: int) -> None:
    """Take pages of a memory file from the system now.

    So a lack of memory is an error here, and not a SIGBUS in the middle of a copy. If the call
    itself is denied (by a container's profile, for example), pages are taken when they are first
    written, as on macOS.

    Raises:
        OSError: no pages are free, or a limit forbids it.
    """
    if PORTABLE:
        return
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in (*REFUSED, errno.EOPNOTSUPP):
            raise


def free_on_machine() -> int:
    """Return the bytes that programs can still get without swapping, if only the machine limits
    them."""
    if not PORTABLE:
        with open(PROC / "meminfo") as file:
            return next(
                1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")
            )
    # It is imported only when needed, because it takes 6 ms and 4 MiB, which no worker should
    # spend.
    import psutil

    return int(psutil.virtual_memory().available)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended or no descriptor is free to
    look."""
    try:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return int(psutil.Process(pid).memory_info().rss)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    return 0


# --- descriptors


class OwnedDescriptor:
    """The number of a descriptor, together with the identity of the open file.

    The user's code may close all open descriptors (as daemons do) and open its own files. These get
    the same numbers, so a write to a kept number could reach one of them.
    """

    __slots__ = ("_device", "_inode", "_number")

    def __init__(self, number: int) -> None:
        found = os.fstat(number)
        self._number, self._device, self._inode = number, found.st_dev, found.st_ino

    @property
    def is_ours(self) -> bool:
        try:
            found = os.fstat(self._number)
            return found.st_ino == self._inode and found.st_dev == self._device
        except OSError as error:
            # A signal's handler may have raised a TimeoutError, which is an OSError.
            if error.errno != errno.EBADF:
                raise
            return False

    @property
    def number(self) -> int:
        """Return the number, which must be used at once.

        Raises:
            OSError: the descriptor was closed.
        """
        if not self.is_ours:
            raise self.lost
        return self._number

    @property
    def lost(self) -> OSError:
        why = (
            f"descriptor {self._number} of mpgrad's was closed by other code (os.closerange?); "
            "close only what you open"
        )
        return OSError(errno.EBADF, why)

    def close(self) -> None:
        """Close it, but only if it is still the same open file."""
        if self.is_ours:
            os.close(self._number)


# --- memory, and the control groups that limit it


MEMBERSHIP = PROC / "self/cgroup"
# The share of a group's limit that is kept free for memory that is taken without a check. At the
# limit the kernel kills without a warning.
SPARED = 0.05
# Seconds for which the list of limiting groups is reused. Finding them takes 0.7 ms.
KNOWN_FOR = 0.5


def own_cgroups(controller: str) -> list[Path]:
    """Return the folders that may hold limits of `controller` for this process.

    There are none on other systems, or if they cannot be read.
    """
    try:
        return [] if PORTABLE else list(cgroup_folders(CGROUPS, MEMBERSHIP, controller))
    except (OSError, ValueError):
        return []


def cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of all above it."""
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        folder = base / group.lstrip("/")
        for each in (folder, *folder.parents):
            yield each
            if each == base:
                break


def limiting(folders: Sequence[Path]) -> list[Path]:
    """Return the folders that set a limit of memory that this machine could exceed."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [folder for folder in folders if memory_limit(folder) < there]


@functools.lru_cache(maxsize=1)
def limiting_now(root: Path, membership: Path, moment: int) -> list[Path]:
    """Return the limiting folders of this process's groups.

    They are looked up once for each `moment`, since groups and their limits may change.
    """
    return limiting(own_cgroups("memory"))


def free_memory() -> int:
    """Return the bytes that this process can still get from the machine and within its groups'
    limits.

    Other processes of the groups take from the same memory.
    """
    folders = limiting_now(CGROUPS, MEMBERSHIP, int(time.monotonic() / KNOWN_FOR))
    rooms = [int((1 - SPARED) * memory_limit(folder)) - memory_used(folder) for folder in folders]
    return max(0, min(free_on_machine(), *rooms)) if rooms else free_on_machine()


def memory_limit(folder: Path) -> float:
    """Return the limit in bytes: `memory.max` (version 2) or `memory.limit_in_bytes` (version
    1)."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = read_words(folder / name)
        if words and words[0] != "max":
            return int(words[0])
    return math.inf


def memory_used(folder: Path) -> int:
    """Return the bytes in use, without the file cache, which the kernel drops when memory is
    needed."""
    words = (
        read_words(folder / "memory.current")
        or read_words(folder / "memory.usage_in_bytes")
        or ["0"]
    )
    stat = read_words(folder / "memory.stat")
    counts = dict(zip(stat[::2], map(int, stat[1::2]), strict=False))
    cache = [
        counts.get(f"total_{kind}", counts.get(kind, 0))
        for kind in ("active_file", "inactive_file")
    ]
    return max(0, int(words[0]) - sum(cache))


def read_words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # not set by this cgroup, or hidden by a container
        return []


# --- amounts of memory, and deaths for lack of it


UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000 ** (1 + k) for k, letter in enumerate("KMGT")}
UNITS |= {f"{letter}iB": 1024 ** (1 + k) for k, letter in enumerate("KMGT")}


def bytes_of(name: str, amount: int | str) -> int:
    """Convert an amount, a number of bytes or a text like "2 GiB" or "500 MB", to bytes.

    Raises:
        ValueError: the amount is not positive, or has an unknown unit. The message names `name`.
        TypeError: the amount is neither a number nor a text.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise TypeError(
            f'{name} must be a number of bytes, or a text like "2 GiB" ({name}: {amount!r})'
        )
    if isinstance(amount, str):
        matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", amount)
        if matched is None or matched[2] not in UNITS:
            raise ValueError(f'{name} must be like "2 GiB" or "500 MB" ({name}: {amount!r})')
        amount = int(float(matched[1]) * UNITS[matched[2]])
    if amount < 1:
        raise ValueError(f"{name} must be at least 1 byte ({name}: {amount})")
    return amount


def kills_for_memory() -> int:
    """Return how many processes the kernel has killed on this machine because memory ran out.

    It is 0 if the kernel does not report it.
    """
    if PORTABLE:
        return 0
    with contextlib.suppress(OSError):
        for line in (PROC / "vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


# --- CPUs


THREAD_VARIABLES = (  # numerical libraries read them when they are loaded
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def thread_variables(threads: int | None) -> dict[str, str]:
    """Return the variables that make these libraries use `threads` threads.

    With None, the existing variables decide.
    """
    return {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1.

    These are the CPUs of its affinity mask, or fewer if a cgroup grants less time.
    """
    if PORTABLE:
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(own_cpus()), cgroup_quota(own_cgroups("cpu")))))


def own_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may run on."""
    return list(range(os.cpu_count() or 1)) if PORTABLE else sorted(os.sched_getaffinity(0))


def cgroup_quota(folders: Sequence[Path]) -> float:
    """Return the CPU seconds per second that all these cgroups allow; infinity without a limit."""
    return min(map(quota_of, folders), default=math.inf)


def quota_of(folder: Path) -> float:
    """Return the limit of one cgroup: `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1)."""
    both = read_words(folder / "cpu.max")
    if len(both) == 2 and both[0] != "max":
        return int(both[0]) / int(both[1])
    quota, period = (
        read_words(folder / "cpu.cfs_quota_us"),
        read_words(folder / "cpu.cfs_period_us"),
    )
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return math.inf


# --- other programs' CPUs


class OthersClock:
    """Measures how busy other programs keep this process's CPUs, from when it is made.

    The descendants of this process do not count as others.
    """

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def cpus(self) -> float:
        """Return how many CPUs others have kept busy until now.

        The system counts in ticks of 10 ms, so call this after a few tenths of a second.
        """
        own = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in own_seconds().items())
        return max(0.0, (busy_seconds() - self._busy - own) / (time.monotonic() - self._start))


def busy_seconds() -> float:
    """Return the busy time of the CPUs that this process may run on, since the machine started."""
    import psutil

    times, ours = psutil.cpu_times(percpu=True), own_cpus()
    if ours and max(ours) < len(times):
        times = [times[number] for number in ours]
    # A guest's time is also counted as the user's. Time that the host takes from us counts as busy.
    still = "idle", "iowait", "guest", "guest_nice"
    return sum(
        float(getattr(each, name)) for each in times for name in each._fields if name not in still
    )


def own_seconds() -> dict[int, float]:
    """Return the CPU time of this process and of its descendants.

    Each includes the time of its children that have ended.
    """
    import psutil

    found, this = {}, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = float(sum(process.cpu_times()[:4]))
    return found
