"""multiprocessing's own processes, which are not ours to end: its fork server, and its resource tracker. Caller's side."""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import os
import socket
from multiprocessing import resource_tracker

from mpgrad.descriptors import Kept
from mpgrad.inherited import credentials
from mpgrad.system import NO_SIGNAL, PORTABLE, receive_descriptors
from mpgrad.wire.pipe import OPEN

__all__ = ["Life", "SharedTracker", "check_fork_server"]


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
