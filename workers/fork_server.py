"""The fork server: a process that imports torch once and then forks workers on request, in
milliseconds each.

multiprocessing's fork server does the same, but imports the parent's main module (so that every
script needs a guard), listens on a named socket and is shared with whatever else uses it. This one
has a single pipe, to the parent, and ends with it.

    parent ► fork server    ("fork", name, (number, changes)) with the worker's ends of two socket
                            pairs, by the second of which it may ask for a resource tracker
                        ("kill", name, signal)
    fork server ► parent    (name, exit code, 0) once for each worker
                        (name, None, errno) where the system refuses to start it
A worker's number is its own within its pool; its name is unique among all pools that share the
fork server. The changes are what the worker takes over, since the parent is not what it was when
the fork server began, nor need the fork server have been that.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import selectors
import signal
import socket
from typing import Any, NoReturn

from mpgrad.environment import take_over
from mpgrad.system import NO_SIGNAL, receive_descriptors

__all__ = [
    "main",
]

MESSAGE_BYTES = 1 << 18  # more than any order has


def main(descriptor: int) -> None:
    """Serves until the parent is gone, or closes its end; `descriptor` is our end of the pipe to
    it."""
    parent = os.pidfd_open(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # who starts us may have blocked it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    # what is imported stays: to look through it for garbage, again and again, is a fifth of what a
    # start costs
    gc.disable()
    # once for all workers: with torch, it is most of what a start costs
    import mpgrad.workers.main  # noqa: F401
    from mpgrad.torch_state.modes import load_generators

    load_generators()
    # a worker that becomes another user may not be able to read them any more
    import multiprocessing.resource_tracker
    import multiprocessing.shared_memory  # noqa: F401

    from mpgrad.pickling.modules import installed

    installed()
    # a worker's collector then leaves the inherited objects, and so their shared pages, alone
    gc.freeze()
    gc.enable()
    fork_server = ForkServer(socket.socket(fileno=descriptor), parent)
    fork_server.run()
    os._exit(0)  # nothing to tidy up, and the workers end when this process does


class ForkServer:
    """Forks workers when the parent says so, and reports what became of each, once."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._children: dict[int, int] = {}  # pid -> name
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        # without a handler the wake-up descriptor stays silent
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Obey until the parent closes its end or dies; the kernel kills the workers after us."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            # a process that the parent forked may hold the parent's end of the pipe open, so its
            # end alone is not enough
            selector.register(self._parent, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(MESSAGE_BYTES)
                        self._reap()
                    elif key.fileobj == self._parent or not self._obey():
                        return

    def _obey(self) -> bool:
        """One order of the parent; False at the end of the pipe."""
        try:
            # a program that a call starts with os.system must not keep the worker's end open, when
            # that has ended
            data, ends = receive_descriptors(self._control, MESSAGE_BYTES, 2)
        except ConnectionError:
            return False
        if not data:
            return False
        order, name, what = pickle.loads(data)
        if order == "fork":
            if len(ends) == 2:
                self._fork([socket.socket(fileno=each) for each in ends], name, *what)
            else:
                for each in ends:
                    os.close(each)
                self._report(name, None, errno.EMFILE)  # no descriptor was free to receive one with
        else:
            for pid, child in self._children.items():
                if child == name:
                    os.kill(pid, what)  # not reaped yet, so the pid is still its own
        return True

    def _fork(
        self, ends: list[socket.socket], name: int, number: int, changes: dict[str, Any]
    ) -> None:
        fork_server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(name, None, error.errno or errno.EAGAIN)
        else:
            if pid == 0:
                self._become_worker(ends, number, changes, fork_server_pid)
            self._children[pid] = name
        for end in ends:
            end.close()

    def _become_worker(
        self, ends: list[socket.socket], number: int, changes: dict[str, Any], fork_server_pid: int
    ) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for inherited in (self._control, self._woken, self._waker):
            inherited.close()
        from mpgrad.workers.main import refuse_and_exit, serve_and_exit

        end, tracker = ends
        try:
            take_over(changes)
        except (OSError, RuntimeError) as error:
            refuse_and_exit(end, error)
        serve_and_exit(end, number, fork_server_pid, tracker)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._report(self._children.pop(pid), os.waitstatus_to_exitcode(status))

    def _report(self, name: int, code: int | None, refusal: int = 0) -> None:
        # the parent is gone, which the next read will say
        with contextlib.suppress(ConnectionError):
            self._control.send(pickle.dumps((name, code, refusal)), NO_SIGNAL)
