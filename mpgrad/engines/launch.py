"""How worker processes and threads come to be, and how one learns that they are gone.

A launcher gives a worker its end of a socket pair and later tells its exit code.
`ForkServerLauncher` is the default on Linux: workers are forked from a process that has imported
torch and nothing of the user's. `SpawnLauncher` is the default elsewhere: each worker is a program
of its own. `ContextLauncher` takes any start method of multiprocessing; `ThreadLauncher` runs the
same loop in threads.

Fresh interpreters are started only where there is one to start. A frozen program, or one that
embeds Python, is what `sys.executable` names: started in the place of Python it would do what it
always does, such as to start workers. multiprocessing's own processes, its fork server and its
resource tracker, are not ours to start or end.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import importlib
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from mpgrad.environment import InheritedState, credentials, inherited, working_directory
from mpgrad.errors import contextmanager
from mpgrad.system import (
    NO_SIGNAL,
    PORTABLE,
    PROC,
    OwnedDescriptor,
    has_calls_of_linux,
    receive_descriptors,
    remove_name,
    thread_variables,
)
from mpgrad.wire.pipe import OPEN

__all__ = [
    "ContextLauncher",
    "Exit",
    "ForkServerLauncher",
    "Launcher",
    "LifeSocket",
    "SharedTracker",
    "SpawnLauncher",
    "ThreadLauncher",
    "check_fork_server",
    "enter",
    "exit_gap",
    "is_python",
    "launched",
    "process_launcher",
    "program",
    "python",
]

MAIN_MODULE = threading.Lock()  # while it is hidden
NURSERY_PATIENCE = 2.0  # seconds for it to end
EXIT_GAP = 0.5e-3  # seconds between the first two looks at how a worker has ended
LAST_STANDARD_STREAM = 2


class Exit(NamedTuple):
    """How a worker has come to its end."""

    # as `multiprocessing.Process.exitcode`; None: there is none, or nobody knows it
    code: int | None = None
    refusal: OSError | None = None  # why the system would not start it


class Launcher(ABC):
    """Guarantees: `launch` returns at once; after `close` no process that was launched is left."""

    can_kill = True  # a worker that runs a call
    # a worker begins as what this process is at that moment: nothing else should go on in it
    copies_caller = False
    # its `answer` is to be called when there is something to read
    tracker: SharedTracker | None = None

    @abstractmethod
    def launch(self, number: int, end: socket.socket) -> None:
        """Start worker `number` with its `end` of the socket pair, which is the launcher's to
        close.

        Raises:
            OSError: the system refuses; it may be tried again.
            RuntimeError: it cannot be what it should be, now or later.
        """

    @abstractmethod
    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        """End a worker by a signal."""

    @abstractmethod
    def exited(self, number: int) -> Exit | None:
        """How a worker has ended, which is then forgotten; None where it has not yet."""

    @abstractmethod
    def close(self) -> None:
        """End what was launched."""


def launched(launcher: Launcher, number: int) -> socket.socket:
    """Launch a worker; returns our end of its socket pair. Raises what `Launcher.launch` does."""
    ours, theirs = socket.socketpair()
    try:
        launcher.launch(number, theirs)
    except BaseException:
        ours.close()
        raise
    return ours


def exit_gap(since: float) -> float:
    """Seconds until the next look at how a worker has ended, which began to end at `since`.

    That is on the clock of time.monotonic. Nothing can be waited for that says of every kind of
    worker, and on every system, that it has ended. So it is looked for, at gaps of a quarter of the
    time since.
    """
    return max(EXIT_GAP, (time.monotonic() - since) / 4)


def enter(module: str, function: str, *arguments: Any) -> None:
    """Call an entry point of the workers' side by its name: the parent's side never imports it."""
    getattr(importlib.import_module(module), function)(*arguments)


def enter_process(method: str, module: str, function: str, *arguments: Any) -> None:
    """`enter`, in a process that may be a fork of one in which some thread imported a module:
    nobody here will go on with that.

    Whoever asks for it gets it as it is, as in the thread that imports it, instead of waiting for
    the end.
    """
    if method != "fork":
        # multiprocessing has passed its pipes and ours in a way that programs which a call starts
        # would keep open, too
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the one that lists them is gone
                os.set_inheritable(int(name), int(name) <= LAST_STANDARD_STREAM)
    for each in list(sys.modules.values()):
        spec = getattr(each, "__spec__", None)
        if getattr(spec, "_initializing", False):
            spec._initializing = False  # type: ignore[union-attr]
    enter(module, function, *arguments)


class ForkServerProcess:
    """The parent's end of a fork server, shared by all pools of this process for which it is right;
    it ends with the last."""

    def __init__(self, begun_as: InheritedState, variables: Mapping[str, str]) -> None:
        """`begun_as`: what this thread would pass on at this moment, and these `variables`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = program(
                "mpgrad.workers.fork_server", "main", theirs, variables=variables
            )
        self.begun_as = begun_as
        self.users = 0  # launchers that start workers here, and workers
        self._control = ours
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        # of workers whose launchers are there; None: it is still to come
        self._exits: dict[int, Exit | None] = {}

    def fork(self, name: int, number: int, changes: dict[str, Any], *ends: socket.socket) -> bool:
        """Ask for a worker; False where the fork server is gone, of which its pipe knows before
        `alive` does."""
        descriptors = array.array("i", [end.fileno() for end in ends])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        with self._sending:
            if self._control.fileno() < 0:  # closed, by another pool that found it gone
                return False
            self._exits[name] = None
            try:
                self._control.sendmsg(
                    [pickle.dumps(("fork", name, (number, changes)))], rights, NO_SIGNAL
                )
            except ConnectionError:
                return False
        return True

    def forget(self, name: int) -> None:
        self._exits.pop(name, None)

    def kill(self, name: int, by: int) -> None:
        with self._sending, contextlib.suppress(OSError):  # it has ended, and its workers with it
            self._control.send(pickle.dumps(("kill", name, by)), NO_SIGNAL)

    def exited(self, name: int) -> Exit | None:
        """How a worker has ended, or the fork server with all of them; reads what was said of
        others, too."""
        with self._receiving:
            with contextlib.suppress(BlockingIOError):
                while report := self._report():
                    ended, code, refusal = pickle.loads(report)
                    if ended in self._exits:
                        error = OSError(refusal, os.strerror(refusal)) if refusal else None
                        self._exits[ended] = Exit(code, error)
                return self._exits.pop(name, None) or Exit()  # nothing more will come
            found = self._exits[name]
            if found is not None:
                del self._exits[name]
            return found

    def _report(self) -> bytes:
        """What comes next; nothing at the end. Raises BlockingIOError where there is none yet."""
        try:
            return self._control.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:  # the fork server has been closed
            return b""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the fork server, and with it all workers; waits for it."""
        with contextlib.suppress(OSError):
            # the fork server sees it even where a forked child holds a copy of this end, and so
            # does whoever waits for an exit code
            self._control.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            self._control.close()
        try:
            self._process.wait(NURSERY_PATIENCE)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()


class ForkServerLauncher(Launcher):
    """Workers forked from a fork server, which are what this process is now, and not what it was
    when the fork server began.

    Where they cannot take that over, the workers that a pool has stay with their fork server, and
    successors come from another one.
    """

    tracker: SharedTracker
    _lock = threading.Lock()
    _open: ClassVar[list[ForkServerProcess]] = []
    _owner_pid = 0
    _new_names = itertools.count(1)

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables`: for the environment of workers."""
        self._variables = variables
        # number of a worker in its pool -> the fork server that forked it, and its name there,
        # unique among pools
        self._born: dict[int, tuple[ForkServerProcess, int]] = {}
        self.tracker = SharedTracker()
        try:
            self._fork_server = self._join(inherited(variables), variables)
        except BaseException:
            self.tracker.close()
            raise

    @classmethod
    def _join(cls, now: InheritedState, variables: Mapping[str, str]) -> ForkServerProcess:
        """A fork server whose forks can be what this process is `now`, a new one where there is
        none; counts one more user."""
        with cls._lock:
            # a forked child has the parent's variables, but not its fork servers
            if cls._owner_pid != os.getpid():
                cls._open, cls._owner_pid = [], os.getpid()
            cls._open = [each for each in cls._open if each.alive]
            found = next(
                (each for each in cls._open if each.begun_as.changes(now) is not None), None
            )
            if found is None:
                found = ForkServerProcess(now, variables)
                cls._open.append(found)
            found.users += 1
            return found

    @classmethod
    def _leave(cls, fork_server: ForkServerProcess) -> None:
        """End it where nobody uses it any more."""
        with cls._lock:
            fork_server.users -= 1
            if fork_server.users:
                return
            cls._open = [each for each in cls._open if each is not fork_server]
        fork_server.close()

    def launch(self, number: int, end: socket.socket) -> None:
        name = next(self._new_names)
        with end:
            now = inherited(self._variables)
            changes = self._fork_server.begun_as.changes(now)
            ends = end, self.tracker.theirs
            if changes is None or not (
                self._fork_server.alive and self._fork_server.fork(name, number, changes, *ends)
            ):
                before = self._fork_server
                # else its forks cannot become what we are, but others may still want it
                if changes is not None:
                    before.close()  # it was killed from outside, and its workers with it
                self._fork_server = self._join(now, self._variables)
                self._leave(before)
                # should this one be gone too, so is the other end of the worker's pipe
                changes = self._fork_server.begun_as.changes(now)
                assert changes is not None
                self._fork_server.fork(name, number, changes, *ends)
        with self._lock:
            self._fork_server.users += 1
        self._born[number] = self._fork_server, name

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        fork_server, name = self._born[number]
        fork_server.kill(name, by)

    def exited(self, number: int) -> Exit | None:
        fork_server, name = self._born[number]
        found = fork_server.exited(name)
        if found is not None:
            del self._born[number]
            self._leave(fork_server)
        return found

    def close(self) -> None:
        """Ends fork servers that no other pool uses."""
        self.tracker.close()
        for fork_server, name in self._born.values():
            fork_server.kill(name, signal.SIGKILL)
            fork_server.forget(name)
        for fork_server in (
            self._fork_server,
            *(fork_server for fork_server, _ in self._born.values()),
        ):
            self._leave(fork_server)


P = TypeVar("P")


class ChildLauncher(Launcher, Generic[P]):
    """Workers that are children of this process."""

    tracker: SharedTracker

    def __init__(self) -> None:
        self._processes: dict[int, P] = {}
        self.tracker = SharedTracker()

    @abstractmethod
    def exited(self, number: int, timeout: float = 0) -> Exit | None:
        """As `Launcher.exited` says, which waits so many seconds for the end here."""

    def close(self) -> None:
        self.tracker.close()
        for number in list(self._processes):
            self.kill(number)
            self.exited(number, timeout=5)


class SpawnLauncher(ChildLauncher[subprocess.Popen[bytes]]):
    """Workers that are programs of their own.

    multiprocessing's "spawn" would have each import the parent's main module, lets none have
    children of its own, and starts none where the parent is a worker of a pool itself.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables`: for the environment of workers."""
        super().__init__()
        self._variables = variables

    def launch(self, number: int, end: socket.socket) -> None:
        given = end, number, self.tracker.theirs
        with end:
            self._processes[number] = program(
                "mpgrad.workers.main", "serve_spawned", *given, variables=self._variables
            )

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        self._processes[number].send_signal(by)

    def exited(self, number: int, timeout: float = 0) -> Exit | None:
        try:
            code = self._processes[number].wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        remove_name(self._processes.pop(number).pid)
        return Exit(code)


class ContextLauncher(ChildLauncher[multiprocessing.process.BaseProcess]):
    """Workers started by a context of multiprocessing: "spawn", "fork" or "forkserver".

    A fork has half of a module that some thread imports in that moment; and while the main module
    is hidden nobody finds it.
    """

    copies_caller = True

    def __init__(self, context: BaseContext) -> None:
        super().__init__()
        self._context = context
        self._method = context.get_start_method()
        self._life = LifeSocket() if self._method == "forkserver" else None

    def launch(self, number: int, end: socket.socket) -> None:
        entry = "mpgrad.workers.main", "serve_in_process"
        with end:
            if self._life is not None:
                check_fork_server()
                arguments: tuple[Any, ...] = (
                    self._method,
                    *entry,
                    end,
                    number,
                    None,
                    None,
                    self._life.theirs,
                )
            elif self._method == "fork":
                arguments = (self._method, *entry, end, number, os.getpid(), self.tracker.theirs)
            else:  # it has multiprocessing's own tracker
                arguments = (self._method, *entry, end, number, os.getpid())
            process = self._context.Process(target=enter_process, args=arguments, daemon=True)  # type: ignore[attr-defined]
            with hidden_main_module():
                process.start()
        self._processes[number] = process

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        process = self._processes[number]
        if process.exitcode is None:
            assert process.pid is not None
            # a fork server has seen its end before us
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, by)

    def exited(self, number: int, timeout: float = 0) -> Exit | None:
        process = self._processes[number]
        process.join(timeout)
        code = process.exitcode
        if code is None:
            return None
        assert process.pid is not None
        remove_name(process.pid)
        process.close()
        del self._processes[number]
        return Exit(code)

    def close(self) -> None:
        super().close()
        if self._life is not None:
            self._life.close()


@contextmanager
def hidden_main_module() -> Iterator[None]:
    """multiprocessing has a child import the parent's main module, which would run an unguarded
    script again."""
    stand_in = types.ModuleType("__main__")
    stand_in.__spec__ = None
    with MAIN_MODULE:  # else one pool could take another's stand-in for the module
        main = sys.modules["__main__"]
        sys.modules["__main__"] = stand_in
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class ThreadLauncher(Launcher):
    """Workers in threads of this process. They cannot be killed, only asked."""

    can_kill = False

    def __init__(self) -> None:
        self._threads: dict[int, threading.Thread] = {}

    def launch(self, number: int, end: socket.socket) -> None:
        arguments = ("mpgrad.workers.main", "serve", end, number)
        thread = threading.Thread(
            target=enter, args=arguments, name=f"mpgrad-worker-{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            end.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        self._threads[number] = thread

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        """Its pipe is closed next, and it ends after the call that it is in."""

    def exited(self, number: int) -> Exit | None:
        if self._threads[number].is_alive():
            return None
        del self._threads[number]
        return Exit()

    def close(self) -> None:
        """A thread that is left ends with the call that it is in."""


def unlock_in_child() -> None:
    """Another thread may have held them as this process was forked."""
    global MAIN_MODULE
    ForkServerLauncher._lock, MAIN_MODULE = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=unlock_in_child)


def process_launcher(context: BaseContext | str | None, threads: int | None = None) -> Launcher:
    """The launcher for `Pool(context=..., threads_per_worker=...)`.

    Raises:
        ValueError: `context` names no start method.
        TypeError: `context` is neither a name nor a context of multiprocessing.
        RuntimeError: there is no Python to start workers from.
    """
    if context is None:
        python()
        # a fork server needs message boundaries and the death signal, which only Linux has, and
        # calls that may be refused by now
        variables = thread_variables(threads)
        return (
            SpawnLauncher(variables)
            if PORTABLE or not has_calls_of_linux()
            else ForkServerLauncher(variables)
        )
    if isinstance(context, str):
        if context not in (methods := multiprocessing.get_all_start_methods()):
            raise ValueError(f"context must be one of {', '.join(methods)} (context: {context!r})")
        context = multiprocessing.get_context(context)
    if not isinstance(context, BaseContext):
        raise TypeError(
            f"context must be a name or a context of multiprocessing (context: {context!r})"
        )
    if context.get_start_method() != "fork":
        python()
    if context.get_start_method() == "forkserver":
        check_fork_server()
    return ContextLauncher(context)


# --- fresh interpreters


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
            "workers need a Python to start from, and this program's is none (executable: "
            f"{executable!r}); "
            'use context="fork", or name one with multiprocessing.set_executable'
        )
    return executable


@functools.cache
def is_python(executable: str) -> bool:
    """Whether it is one; where it could be anything, it is tried, once, with a word to those who
    would start it again."""
    if not executable or (getattr(sys, "frozen", False) and executable == sys.executable):
        return False
    with contextlib.suppress(OSError):
        looks_like_one = re.fullmatch(
            r"(python|pypy)[\d.]*(-dbg|d|t)?", os.path.basename(executable)
        )
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
    module: str,
    function: str,
    *given: socket.socket | int,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that calls an entry point of the workers' side with numbers, and those of
    its ends of pipes."""
    numbers = [each if isinstance(each, int) else each.fileno() for each in given]
    arguments = ", ".join(map(str, numbers))
    boot = (
        f"import sys; sys.path[:] = sys.argv[1:]; from {module} import {function}; "
        f"{function}({arguments})"
    )
    # else NumPy takes all CPUs in each worker, and so do others; PyTorch is told by the first
    # message
    environment = {
        **thread_variables(1),
        **os.environ,
        **(variables or {}),
        **({"MPGRAD_PORTABLE": "1"} if PORTABLE else {}),
    }
    # as multiprocessing does
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen(
        [python(), *flags, "-c", boot, *sys.path],
        pass_fds=[each.fileno() for each in given if not isinstance(each, int)],
        env=environment,
        cwd=working_directory() or "/",  # in one that was deleted torch cannot be loaded
        stdin=subprocess.DEVNULL,
        # Ctrl-C in a terminal is for the parent, which decides what becomes of the workers
        start_new_session=True,
    )


class LifeSocket:
    """A pair of sockets, whose other end the workers have.

    When the caller ends, this end closes and the workers of a fork server end too. Their parent,
    the fork server, goes on for as long as anybody has something from it.
    """

    def __init__(self, kind: int = socket.SOCK_STREAM) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, kind)
        OPEN[self._socket] = OwnedDescriptor(self._socket.fileno())

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
            "the fork server of multiprocessing has other rights than this process has now (pid: "
            f"{server}), and its workers "
            "would have them, too; leave context out, or give rights up before that server starts"
        )


class SharedTracker(LifeSocket):
    """Gives workers the caller's resource tracker, as multiprocessing gives it to its children, but
    only when one asks for it.

    A tracker of its own would take away what a worker has made for others, as soon as the worker
    ends. One that is started for all of them stays for as long as the program; most never need it.
    (See `workers.child`.)
    """

    def __init__(self) -> None:
        super().__init__(socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> None:
        """Hand it to who has asked; who gets none, for want of descriptors or processes, starts
        one."""
        with contextlib.suppress(OSError):
            _, asking = receive_descriptors(self._socket, 1, 1)
            for each in asking:
                with socket.socket(fileno=each) as reply:
                    descriptor = resource_tracker.getfd()
                    assert descriptor is not None
                    socket.send_fds(reply, [b"!"], [descriptor], NO_SIGNAL)
