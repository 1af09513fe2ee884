"""The resource tracker of multiprocessing, for workers that need one. Caller's side; the workers' is `workers.child`."""

from __future__ import annotations

import contextlib
import socket
from multiprocessing import resource_tracker

from mpgrad.descriptors import Kept
from mpgrad.system import NO_SIGNAL, receive_descriptors
from mpgrad.wire.pipe import OPEN

__all__ = ["SharedTracker"]


class SharedTracker:
    """Gives workers the caller's resource tracker, as multiprocessing gives it to its children, but only when one asks for it.

    A tracker of its own would take away what a worker has made for others, as soon as the worker ends. One that is started for
    all of them stays for as long as the program; most never need it. (See `workers.child`.)
    """

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        OPEN[self._socket] = Kept(self._socket.fileno())

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

    def close(self) -> None:
        self._socket.close()
        self.theirs.close()
