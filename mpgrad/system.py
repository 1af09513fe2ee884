"""What systems differ in, asked in one place: elsewhere nobody, but for the doctor, which describes systems, asks for a
system's name, or whether it has some function.

Linux has anonymous memory files, private mappings of them, processes that die with their parent, and so a nursery to fork
workers from. Whatever else has Unix sockets, macOS first of all, takes the portable branches. So does Linux where it is older
than 5.3, where a sandbox refuses a call that it needs, and where `MPGRAD_PORTABLE=1` is in the environment, in workers too,
which is how those branches are tested.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import sys
from pathlib import Path

__all__ = [
    "CGROUPS",
    "CLOSE_ON_EXEC",
    "NO_SIGNAL",
    "PORTABLE",
    "PROC",
    "REFUSED",
    "anonymous_memory",
    "free_on_machine",
    "has_calls_of_linux",
    "receive_descriptors",
    "remove_name",
    "reserve_memory",
    "resident_bytes",
]

REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # how a call fails that an older kernel, or a sandbox, does not have
# of what is sent: who has SIGPIPE end programs, as it does by default, must not end with a worker; macOS has no such flag
NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))

if not (hasattr(socket, "SCM_RIGHTS") and hasattr(socket, "CMSG_SPACE")):
    raise ImportError(
        "mpgrad needs Unix sockets that carry file descriptors (socket.SCM_RIGHTS), which this system lacks "
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


PORTABLE: bool = wants_portable(os.environ.get("MPGRAD_PORTABLE", "")) or sys.platform != "linux" or not has_calls_of_linux()
CLOSE_ON_EXEC = 0 if PORTABLE else int(socket.MSG_CMSG_CLOEXEC)  # of descriptors that are received
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")  # where Linux tells of itself
if PORTABLE:
    import _posixshmem  # as multiprocessing.shared_memory does


def anonymous_memory() -> int:
    """The descriptor of a file in memory that has no name, and as yet no size.

    torch itself leaves a name for as long as it takes to map the memory, or longer. If the process is killed meanwhile, the
    name stays, and on macOS the memory with it, until the next start of the machine.
    """
    if not PORTABLE:
        try:
            return os.memfd_create("mpgrad", os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            remedy = "export MPGRAD_PORTABLE=1 before the program starts"
            raise OSError(error.errno, f"memfd_create is refused here since mpgrad was imported ({error}); {remedy}") from error
    while True:
        try:
            descriptor = _posixshmem.shm_open(name_of(os.getpid()), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        except FileExistsError:  # another thread's, which is about to remove it, or a dead process's that had this number
            remove_name(os.getpid())
        else:
            remove_name(os.getpid())
            return int(descriptor)


def name_of(pid: int) -> str:
    return f"/mpgrad-{os.getuid()}-{pid}"  # macOS allows 31 characters; what another user has left cannot be removed


def remove_name(pid: int) -> None:
    """What a process had not come to if it was killed between two lines of `anonymous_memory`."""
    if PORTABLE:
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(name_of(pid))


def receive_descriptors(end: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """A message and what came with it, which programs do not inherit. (`socket.recv_fds` leaves its flags out.)"""
    found = array.array("i")
    data, ancillary, _, _ = end.recvmsg(nbytes, socket.CMSG_SPACE(most * found.itemsize), CLOSE_ON_EXEC)
    for _, _, content in ancillary:
        found.frombytes(content[: len(content) - len(content) % found.itemsize])
    for each in found if CLOSE_ON_EXEC == 0 else ():
        os.set_inheritable(each, False)
    return data, list(found)


def reserve_memory(descriptor: int, offset: int, nbytes: int) -> None:
    """Take pages of a memory file from the system now: a lack is an error here, and not a SIGBUS in the middle of a copy.

    Where the call itself is denied, by a container's profile for example, pages come when they are first written, as on macOS.

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
    """Bytes that programs can still have without swapping, if nothing but the machine limits them (see `cgroups`)."""
    if not PORTABLE:
        with open(PROC / "meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
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
