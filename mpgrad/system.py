"""What systems differ in, asked in one place: elsewhere nobody, but for the doctor, which describes
systems, asks for a system's name, or whether it has some function. Both sides; needs no torch.

Linux has anonymous memory files, private mappings of them, processes that die with their parent,
and so a fork server to fork workers from. Whatever else has Unix sockets, macOS first of all, takes
the portable branches. So does Linux where it is older than 5.3, where a sandbox refuses a call that
it needs, and where `MPGRAD_PORTABLE=1` is in the environment, in workers too, which is how those
branches are tested.

Also what a process has of the system: descriptors that are kept as numbers (`OwnedDescriptor`);
memory within the limits of Linux's control groups, versions 1 and 2, which containers and batch
systems set; how often the kernel has killed for want of memory; amounts of memory as people write
them; how many CPUs this process may really use: `os.cpu_count` counts what the machine has, while
schedulers and containers give less, by affinity or by quota; and how many CPUs other programs take,
so that figures of a busy machine can be told from those that may be relied on.
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

# how a call fails that an older kernel, or a sandbox, does not have
REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES)
# of what is sent: who has SIGPIPE end programs, as it does by default, must not end with a worker;
# macOS has no such flag
NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))

if not (hasattr(socket, "SCM_RIGHTS") and hasattr(socket, "CMSG_SPACE")):
    raise ImportError(
        "mpgrad needs Unix sockets that carry file descriptors (socket.SCM_RIGHTS), which this "
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
    except AttributeError:  # not in the system that this Python was built for
        return False
    except OSError as error:
        return error.errno not in REFUSED
    return True


PORTABLE: bool = (
    wants_portable(os.environ.get("MPGRAD_PORTABLE", ""))
    or sys.platform != "linux"
    or not has_calls_of_linux()
)
CLOSE_ON_EXEC = 0 if PORTABLE else int(socket.MSG_CMSG_CLOEXEC)  # of descriptors that are received
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")  # where Linux tells of itself
if PORTABLE:
    import _posixshmem  # as multiprocessing.shared_memory does


def anonymous_memory() -> int:
    """The descriptor of a file in memory that has no name, and as yet no size.

    torch itself leaves a name for as long as it takes to map the memory, or longer. If the process
    is killed meanwhile, the name stays, and on macOS the memory with it, until the next start of
    the machine.
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
            # another thread's, which is about to remove it, or a dead process's that had this
            # number
            remove_name(os.getpid())
        else:
            remove_name(os.getpid())
            return int(descriptor)


def name_of(pid: int) -> str:
    # macOS allows 31 characters; what another user has left cannot be removed
    return f"/mpgrad-{os.getuid()}-{pid}"


def remove_name(pid: int) -> None:
    """What a process had not come to if it was killed between two lines of `anonymous_memory`."""
    if PORTABLE:
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(name_of(pid))


def receive_descriptors(end: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """A message and what came with it, which programs do not inherit. (`socket.recv_fds` leaves its
    flags out.)"""
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
    """Take pages of a memory file from the system now: a lack is an error here, and not a SIGBUS in
    the middle of a copy.

    Where the call itself is denied, by a container's profile for example, pages come when they are
    first written, as on macOS.

    Raises:
        OSError: there are none; or a limit forbids it.
    """
    if PORTABLE:
        return
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in (*REFUSED, errno.EOPNOTSUPP):
            raise


def free_on_machine() -> int:
    """Bytes that programs can still have without swapping, if nothing but the machine limits them
    (see `system`)."""
    if not PORTABLE:
        with open(PROC / "meminfo") as file:
            return next(
                1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")
            )
    import psutil  # here and below: 6 ms and 4 MiB, which no worker should take

    return int(psutil.virtual_memory().available)


def resident_bytes(pid: int) -> int:
    """Of a process; 0 where it has ended, or where no descriptor is free to look."""
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
    """The number of a descriptor, and what it stands for.

    The user's code may close all that are open (as daemons do), and open files of its own, which
    get the same numbers: a write to a number that was kept would be a write into one of these.
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
            if error.errno != errno.EBADF:  # a signal's handler may have raised a TimeoutError
                raise
            return False

    @property
    def number(self) -> int:
        """To be used at once.

        Raises:
            OSError: it was closed.
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
        """Only if it is still what it was."""
        if self.is_ours:
            os.close(self._number)


# --- memory, and the control groups that limit it


MEMBERSHIP = PROC / "self/cgroup"
# of a group's limit: for what is taken without asking. At the limit the kernel kills, and says
# nothing before
SPARED = 0.05
# seconds, at most, for which the groups that limit memory are those that were found, which takes
# 0.7 ms
KNOWN_FOR = 0.5


def own_cgroups(controller: str) -> list[Path]:
    """Where limits of `controller` for this process may be; nowhere on other systems, and where
    that cannot be read."""
    try:
        return [] if PORTABLE else list(cgroup_folders(CGROUPS, MEMBERSHIP, controller))
    except (OSError, ValueError):
        return []


def cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Of this process's cgroup and of all above it."""
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
    """Those that set a limit of memory that this machine could exceed."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [folder for folder in folders if memory_limit(folder) < there]


@functools.lru_cache(maxsize=1)
def limiting_now(root: Path, membership: Path, moment: int) -> list[Path]:
    """Of this process's groups. Looked for once in each moment, since groups and their limits may
    change."""
    return limiting(own_cgroups("memory"))


def free_memory() -> int:
    """Bytes that this process can still have: of the machine's, and within the limits of all groups
    that it is in.

    What other processes of the groups take meanwhile, they take from the same.
    """
    folders = limiting_now(CGROUPS, MEMBERSHIP, int(time.monotonic() / KNOWN_FOR))
    rooms = [int((1 - SPARED) * memory_limit(folder)) - memory_used(folder) for folder in folders]
    return max(0, min(free_on_machine(), *rooms)) if rooms else free_on_machine()


def memory_limit(folder: Path) -> float:
    """In bytes: `memory.max` in version 2, `memory.limit_in_bytes` in version 1."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = read_words(folder / name)
        if words and words[0] != "max":
            return int(words[0])
    return math.inf


def memory_used(folder: Path) -> int:
    """In bytes, without the file cache that the kernel drops when memory is wanted."""
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
    except OSError:  # this cgroup does not set it, or a container does not show it
        return []


# --- amounts of memory, and deaths for want of it


UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000 ** (1 + k) for k, letter in enumerate("KMGT")}
UNITS |= {f"{letter}iB": 1024 ** (1 + k) for k, letter in enumerate("KMGT")}


def bytes_of(name: str, amount: int | str) -> int:
    """A number of bytes, or a text like "2 GiB" or "500 MB".

    Raises:
        ValueError: not positive, or a unit that does not exist; names `name`.
        TypeError: neither a number nor a text.
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
    """How many processes the kernel has killed because memory ran out, anywhere on the machine; 0
    where it does not say."""
    if PORTABLE:
        return 0
    with contextlib.suppress(OSError):
        for line in (PROC / "vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


# --- CPUs


THREAD_VARIABLES = (  # of libraries that compute, which read them when they are loaded
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def thread_variables(threads: int | None) -> dict[str, str]:
    """What has these libraries use as many threads; None: as many as the variables say that are
    there."""
    return {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))


def usable_cpus() -> int:
    """At least 1: the CPUs of this process's affinity mask, or fewer where a cgroup grants it less
    time than that."""
    if PORTABLE:
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(own_cpus()), cgroup_quota(own_cgroups("cpu")))))


def own_cpus() -> list[int]:
    """The numbers of those that this process may run on."""
    return list(range(os.cpu_count() or 1)) if PORTABLE else sorted(os.sched_getaffinity(0))


def cgroup_quota(folders: Sequence[Path]) -> float:
    """CPU seconds per second that all these cgroups allow; infinity where nothing limits them."""
    return min(map(quota_of, folders), default=math.inf)


def quota_of(folder: Path) -> float:
    """The limit that one cgroup sets: `cpu.max` in version 2, `cpu.cfs_quota_us` in version 1."""
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
    """Looks at the CPUs that this process may run on, from when it is made. Its descendants are no
    others."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def cpus(self) -> float:
        """How many of them others kept busy up to now. The system counts in ticks of 10 ms: after
        some tenths of a second."""
        own = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in own_seconds().items())
        return max(0.0, (busy_seconds() - self._busy - own) / (time.monotonic() - self._start))


def busy_seconds() -> float:
    """Of the CPUs that this process may run on, since the machine started."""
    import psutil

    times, ours = psutil.cpu_times(percpu=True), own_cpus()
    if ours and max(ours) < len(times):
        times = [times[number] for number in ours]
    # of a guest, time is counted as the user's, too; what the host takes from us counts as busy
    still = "idle", "iowait", "guest", "guest_nice"
    return sum(
        float(getattr(each, name)) for each in times for name in each._fields if name not in still
    )


def own_seconds() -> dict[int, float]:
    """CPU time of this process and its descendants, each with that of its children that have
    ended."""
    import psutil

    found, this = {}, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = float(sum(process.cpu_times()[:4]))
    return found
