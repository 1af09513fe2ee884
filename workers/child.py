"""A worker as multiprocessing's children are, for tasks that use multiprocessing themselves.

A worker is none of multiprocessing's processes. A task that starts processes, connects to a manager
or makes shared memory finds what it would find in one: the caller's authentication key,
interpreter, start method and resource tracker, a name and a number, and at the worker's end exit
handlers, which end daemonic children.

The tracker is that of the caller, because what a task makes may be for others, and what nobody
unlinks has to go with the program rather than with a worker. Most programs never need one, so a
worker asks for it (`engines.launch.SharedTracker`) when multiprocessing first looks for its
descriptor:

    a task makes a block ──► register ──► _fd ──► ask ═══ caller: getfd, which starts one where
                                                          there is none
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import socket
from collections.abc import Mapping
from multiprocessing import resource_tracker
from typing import Any

from mpgrad.system import receive_descriptors

__all__ = [
    "become_child",
    "forget_exit_handlers",
    "leave_children",
    "run_exit_handlers",
    "share_tracker",
]


class AskedTracker(resource_tracker.ResourceTracker):
    """Has the descriptor of the caller's, once it is looked at; without an answer, multiprocessing
    starts another one."""

    asks: socket.socket

    @property
    def _fd(self) -> int | None:
        if vars(self).get("_fd") is None:
            vars(self)["_fd"] = asked(self.asks)
        found: int | None = vars(self)["_fd"]
        return found

    @_fd.setter
    def _fd(self, descriptor: int | None) -> None:
        vars(self)["_fd"] = descriptor


def asked(where: socket.socket) -> int | None:
    """None: nobody is there, or has one to give."""
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs:
                socket.send_fds(where, [b"?"], [theirs.fileno()])
            _, descriptors = receive_descriptors(ours, 1, 1)
        except OSError:
            return None
    return descriptors[0] if descriptors else None


def share_tracker(where: socket.socket) -> None:
    """From now on this process asks there for its resource tracker."""
    where.set_inheritable(False)
    tracker = resource_tracker._resource_tracker
    AskedTracker.asks = where
    tracker.__class__ = AskedTracker


def become_child(preparation: Mapping[str, Any] | None, number: int) -> None:
    """`preparation`: the caller's word (`environment.preparation`); None: it is on another
    machine."""
    process = multiprocessing.current_process()
    process.name = f"mpgrad-worker-{number}"  # as log records call it
    if not process._identity:
        process._identity = (number,)  # by which tasks tell workers apart
    if preparation is None:
        return
    process.authkey = preparation["authkey"]
    multiprocessing.set_executable(preparation["executable"])
    if preparation["start_method"] is not None:
        multiprocessing.set_start_method(preparation["start_method"], force=True)
    if preparation["log_to_stderr"]:
        multiprocessing.util.log_to_stderr()
    logging.getLogger("multiprocessing").setLevel(preparation["log_level"])


def forget_exit_handlers() -> None:
    """Those of what was imported before this process was forked are not its own."""
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def leave_children() -> None:
    """Have the exit handlers not wait for those that are no daemons."""
    for child in multiprocessing.active_children():
        if not child.daemon:
            multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """Those of tasks, and multiprocessing's, which ends daemonic children and waits for the
    others."""
    atexit._run_exitfuncs()
