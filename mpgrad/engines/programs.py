"""What is not ours to start or end: fresh interpreters for the workers' side, if there is one to
start; and multiprocessing's own processes, its fork server and its resource tracker. Caller's side.

A frozen program, or one that embeds Python, is what `sys.executable` names. Started in the place of
Python it would do what it always does, such as to start workers.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import resource_tracker

from mpgrad.cpus import thread_variables
from mpgrad.inherited import credentials
from mpgrad.place import working_directory
from mpgrad.system import NO_SIGNAL, PORTABLE, PROC, Kept, receive_descriptors
from mpgrad.wire.pipe import OPEN

__all__ = [
    "Life",
    "SharedTracker",
    "check_fork_server",
    "is_python",
    "program",
    "python",
]

PROBED = "MPGRAD_STARTED_AS_PYTHON"  # in the environment of a program that is tried
PROBE_PATIENCE = 10.0  # seconds for it to answer


def python() -> str:
    """The program that starts a Python, as multiprocessing would.

    Raises:
        RuntimeError: it is another one, such as this program itself.
    """
    executable = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if PROBED in os.environ or not is_python(executable):
        raise RuntimeError(
            f"workers need a Python to start from, and this program's is none (executable: {executable!r}); "
            'use context="fork", or name one with multiprocessing.set_executable'
        )
    return executable


@functools.cache
def is_python(executable: str) -> bool:
    """Whether it is one; where it could be anything, it is tried, once, with a word to those who would start it again."""
    if not executable or (getattr(sys, "frozen", False) and executable == sys.executable):
        return False
    with contextlib.suppress(OSError):
        looks_like_one = re.fullmatch(r"(python|pypy)[\d.]*(-dbg|d|t)?", os.path.basename(executable))
        if looks_like_one and (PORTABLE or os.path.samefile(PROC / "self/exe", executable)):
            return True
    said = f"a Python for process {os.getpid()}\n"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        tried = subprocess.run(
            [executable, "-I", "-S", "-c", f"import sys; sys.stdout.write({said!r})"],
            env={**os.environ, PROBED: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_PATIENCE,
        )
        return tried.stdout == said.encode()
    return False


def program(
    module: str, function: str, *given: socket.socket | int, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that calls an entry point of the workers' side with numbers, and those of its ends of pipes."""
    numbers = [each if isinstance(each, int) else each.fileno() for each in given]
    arguments = ", ".join(map(str, numbers))
    boot = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import {function}; {function}({arguments})"
    # else NumPy takes all CPUs in each worker, and so do others; PyTorch is told by the first message
    environment = {**thread_variables(1), **os.environ, **(variables or {}), **({"MPGRAD_PORTABLE": "1"} if PORTABLE else {})}
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return subprocess.Popen(
        [python(), *flags, "-c", boot, *sys.path],
        pass_fds=[each.fileno() for each in given if not isinstance(each, int)],
        env=environment,
        cwd=working_directory() or "/",  # in one that was deleted torch cannot be loaded
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal is for the parent, which decides what becomes of the workers
    )


class Life:
    """A pair of sockets, whose other end the workers have.

    When the caller ends, this end closes and the workers of a fork server end too. Their parent, the fork server, goes on for
    as long as anybody has something from it.
    """

    def __init__(self, kind: int = socket.SOCK_STREAM) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, kind)
        OPEN[self._socket] = Kept(self._socket.fileno())

    def close(self) -> None:
        self._socket.close()
        self.theirs.close()


# --- multiprocessing's own processes


def check_fork_server() -> None:
    """multiprocessing has one for all, which stays what it was when it began.

    Raises:
        RuntimeError: it may do what this process may not, or the other way round.
    """
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None and not PORTABLE and credentials(server) != credentials(os.getpid()):
        raise RuntimeError(
            f"the fork server of multiprocessing has other rights than this process has now (pid: {server}), and its workers "
            "would have them, too; leave context out, or give rights up before that server starts"
        )


class SharedTracker(Life):
    """Gives workers the caller's resource tracker, as multiprocessing gives it to its children, but only when one asks for it.

    A tracker of its own would take away what a worker has made for others, as soon as the worker ends. One that is started for
    all of them stays for as long as the program; most never need it. (See `workers.child`.)
    """

    def __init__(self) -> None:
        super().__init__(socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> None:
        """Hand it to who has asked; who gets none, for want of descriptors or processes, starts one."""
        with contextlib.suppress(OSError):
            _, asking = receive_descriptors(self._socket, 1, 1)
            for each in asking:
                with socket.socket(fileno=each) as reply:
                    descriptor = resource_tracker.getfd()
                    assert descriptor is not None
                    socket.send_fds(reply, [b"!"], [descriptor], NO_SIGNAL)
