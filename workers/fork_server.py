"""The fork server is a process that imports torch once, and then forks each worker on request in
milliseconds.

multiprocessing's fork server does the same. But it imports the parent's main module, so every
script needs a guard. It listens on a named socket, and all code in a process shares it. This fork
server has a single pipe, to the parent, and ends with the parent. It also ends if it has had no
worker for a while.

    parent ► fork server    ("fork", name, (number, changes)) with the worker's ends of two socket
                            pairs; the worker may request a resource tracker through the second one
                            ("kill", name, signal)
    fork server ► parent    (name, exit code, 0) once for each worker
                            (name, None, errno) if the system refuses to start it
A worker's number is unique in its pool, and its name among all pools that share the fork server.
The changes are the state that the worker takes over. The parent's state may have changed since it
started the fork server, and the fork server's own state may differ from it.
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

MESSAGE_BYTES = 1 << 18  # more than any order needs


def main(descriptor: int, patience: float) -> None:
    """Serve until the parent dies or closes its end, or until there has been no worker for
    `patience` seconds. `descriptor` is this end of the pipe to the parent."""
    parent = os.pidfd_open(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the process that started this one may have blocked the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    # Imported objects stay. Repeated searches of them for garbage would take a fifth of the start.
    gc.disable()
    # This is imported once for all workers. With torch, it is most of the time of a start.
    import mpgrad.workers.main  # noqa: F401
    from mpgrad.torch_state.modes import load_generators

    load_generators()
    # imported now, because a worker that becomes another user may not be able to read the files
    import multiprocessing.resource_tracker
    import multiprocessing.shared_memory  # noqa: F401

    from mpgrad.pickling.modules import installed

    installed()
    # Each worker's garbage collector then skips the inherited objects, whose pages stay shared.
    gc.freeze()
    gc.enable()
    fork_server = ForkServer(socket.socket(fileno=descriptor), parent)
    fork_server.run(patience)
    os._exit(0)  # nothing needs a cleanup, and the workers end with this process


class ForkServer:
    """Forks workers when the parent orders it, and reports the end of each worker once."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._children: dict[int, int] = {}  # pid -> name
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        # without a handler, Python does not write to the wake-up descriptor
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def run(self, patience: float) -> None:
        """Obey until the parent closes its end or dies. The kernel then kills the workers.

        Without workers, wait no longer than `patience` for an order.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            # A child of the parent may hold the parent's end of the pipe open, so the pipe alone
            # does not show the parent's death.
            selector.register(self._parent, selectors.EVENT_READ)
            while True:
                found = selector.select(None if self._children else patience)
                if not found:
                    return
                for key, _ in found:
                    if key.fileobj is self._woken:
                        self._woken.recv(MESSAGE_BYTES)
                        self._reap()
                    elif key.fileobj == self._parent or not self._obey():
                        return

    def _obey(self) -> bool:
        """Carry out one order of the parent. Return False at the end of the pipe."""
        try:
            # The received descriptors are not inheritable. A program that a call starts with
            # os.system must not keep the worker's end open after the worker has ended.
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
                self._report(name, None, errno.EMFILE)  # an end could not be received
        else:
            for pid, child in self._children.items():
                if child == name:
                    os.kill(pid, what)  # not reaped yet, so the pid is still the worker's
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
        from mpgrad.workers.main import refuse_and_exit, serve_in_process

        end, tracker = ends
        try:
            take_over(changes)
        except (OSError, RuntimeError) as error:
            refuse_and_exit(end, error)
        serve_in_process(end, number, fork_server_pid, tracker)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._report(self._children.pop(pid), os.waitstatus_to_exitcode(status))

    def _report(self, name: int, code: int | None, refusal: int = 0) -> None:
        # a dead parent is detected by the next read
        with contextlib.suppress(ConnectionError):
            self._control.send(pickle.dumps((name, code, refusal)), NO_SIGNAL)
