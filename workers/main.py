"""The main loop of a worker, for each place where a worker can live: its own process, or a thread of the parent.

Assumes: in a process this is the only thread, and it dies with whoever made it: by the kernel's word, or, where the kernel has
    none (`PORTABLE`), by the end of the pipe, the next time that it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch

from mpgrad.cpus import thread_variables
from mpgrad.environment import FOLLOWER
from mpgrad.pickling import classes
from mpgrad.pickling.modules import PLACED, run_initializer
from mpgrad.place import PLACE
from mpgrad.system import PORTABLE
from mpgrad.torch_state.modes import begin_as_new
from mpgrad.wire.frames import Channel, Link
from mpgrad.wire.messages import Start, StartFailed, Stop
from mpgrad.workers.child import become_child, forget_exit_handlers, leave_children, run_exit_handlers, share_tracker
from mpgrad.workers.functions import failure
from mpgrad.workers.graph_edges import CHECKPOINTS, HOOKS
from mpgrad.workers.graphs import GraphTable
from mpgrad.workers.memory_watch import MemoryWatch
from mpgrad.workers.station import NO_STATION, station
from mpgrad.workers.strays import noting_those_of_initializer
from mpgrad.workers.streams import Outlet, promise_last_words
from mpgrad.workers.worker import Worker

__all__ = ["begin", "refuse_and_exit", "serve", "serve_and_exit", "serve_in_process", "serve_spawned"]

PR_SET_PDEATHSIG = 1
LIVES: list[socket.socket] = []  # kept for as long as this process


def serve(end: socket.socket, number: int, in_process: bool = False) -> None:
    """Answer frames until `Stop` or the end of the link; the caller's side has the other end of the socket."""
    link = Channel(end, blocking=True)
    outlet = None
    setting = contextlib.ExitStack()
    try:
        first = link.receive()
        assert first is not None
        start = first.messages[0]
        assert isinstance(start, Start)
        if start.remote:
            link.lend_by_bytes()
        if in_process:
            settle(start, number)
            outlet = Outlet(link, start.log_levels)
            promise_last_words(link)
        begin_as_new(is_process=in_process)
        worker = begin(number, link, start, setting)
        if outlet is not None and worker is not None:
            worker.take_warnings()
            worker.before_answer = outlet.flush
        while worker is not None and (frame := link.receive()) is not None:
            last = frame.messages[-1]
            if type(last) is Stop:
                if in_process and not last.waits:
                    leave_children()
                return
            worker.handle(frame)
            del frame  # it pins the payload while the worker waits for the next one
    except (EOFError, ConnectionError):
        return  # the parent is gone, and nobody is left to tell
    finally:
        setting.close()
        if outlet is not None:
            outlet.close()
        link.close()


def begin(number: int, link: Link, start: Start, setting: contextlib.ExitStack | None = None) -> Worker | None:
    """Run the initializer and make the worker; says over the link whether that went well. `setting`: the worker works in it."""
    device, phase = NO_STATION, "initializer"
    try:
        if setting is not None:
            device = setting.enter_context(station(start.device, number))
        initializer, initargs = classes.loads(start.initializer)
        if initializer is not None:
            with noting_those_of_initializer():
                run_initializer(initializer, initargs)
        FOLLOWER.settle()
        phase = "start"
        graphs = GraphTable(start.graph_bytes, MemoryWatch() if start.spares_memory else None)
        worker = Worker(number, link, graphs, device)  # which takes shared memory
    except BaseException as error:
        link.send([StartFailed(failure(error, phase))])
        return None
    worker.announce(os.getpid())
    return worker


def serve_in_process(
    end: socket.socket,
    number: int,
    parent_pid: int | None,
    tracker: socket.socket | None = None,
    life: socket.socket | None = None,
) -> None:
    """`serve` in a process of its own, made by `parent_pid` where that is known.

    It asks the caller through `tracker` for a resource tracker, and ends with the other end of `life`.
    """
    die_with(parent_pid)
    if life is not None:
        die_with_end(life)
    if tracker is not None:
        share_tracker(tracker)
    PLACE.in_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; what to do about it is the parent's choice
    serve(end, number, in_process=True)


def serve_and_exit(end: socket.socket, number: int, parent_pid: int | None, tracker: socket.socket) -> NoReturn:
    """`serve_in_process` in one that is nobody else's."""
    status = 1
    forget_exit_handlers()
    try:
        serve_in_process(end, number, parent_pid, tracker)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        run_exit_handlers()
        with contextlib.suppress(OSError, ValueError):  # closed streams must not turn a good exit into a bad one
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def refuse_and_exit(end: socket.socket, error: Exception) -> NoReturn:
    """Have the start of a worker fail, in its process."""
    link = Channel(end, blocking=True)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone, and nobody is left to tell
        link.receive()  # what it is told first
        link.send([StartFailed(failure(error, "start"))])
    os._exit(1)


def serve_spawned(descriptor: int, number: int, tracker: int) -> NoReturn:
    """`serve_and_exit` in a program of its own, which has inherited its end of the pipe."""
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)  # else a program that a call starts would keep it open, when this one has ended
    serve_and_exit(end, number, None, socket.socket(fileno=tracker))


def settle(start: Start, number: int) -> None:
    """Make this process look like the parent to the code that will run in it."""
    become_child(start.preparation, number)
    environment = start.environment
    if start.remote:  # of which this machine has its own; there may be a folder of that name
        sys.path[:] = merged(sys.path, environment.paths)
        sys.argv[:] = environment.arguments
        if environment.directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(environment.directory)
    else:
        FOLLOWER.take_over(environment)
    os.environ.update(thread_variables(start.threads))  # for what is loaded later
    torch.set_num_threads(start.threads or 1)
    warnings.simplefilter("always")  # the parent's filters decide
    classes.follow_the_caller()
    PLACED.begin()
    CHECKPOINTS.watch()
    HOOKS.watch()


def merged(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Where this machine's modules are, and behind that what there is here of the caller's folders."""
    return [*ours, *(each for each in theirs if each not in ours and os.path.exists(each))]


def die_with(parent_pid: int | None) -> None:
    """Have the kernel kill this process when the one that made it dies, however busy this one is then."""
    if PORTABLE:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:  # it died before we could ask
        os._exit(1)


def die_with_end(life: socket.socket) -> None:
    """Have the kernel kill this process when the other end of `life`, on which nothing is ever said, is closed."""
    if PORTABLE:
        return
    LIVES.append(life)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)  # in the place of SIGIO
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # closed before we could ask
        os._exit(1)
