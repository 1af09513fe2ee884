"""multiprocessing's fork server, which is not ours to end: when its workers end, and if it may start any. Caller's side."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import socket

from mpgrad.descriptors import Kept
from mpgrad.inherited import credentials
from mpgrad.system import PORTABLE
from mpgrad.wire.pipe import OPEN

__all__ = ["Life", "check_fork_server"]


class Life:
    """With the caller, the workers of a fork server end: their parent goes on for as long as anybody has something from it."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair()
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
