"""Launchers, which start worker processes and threads and report how these have ended. They run in
the caller, and in agents on other machines.

A launcher gives a worker its end of a socket pair, and later reports its exit code.
`ForkServerLauncher` is the default on Linux: it forks workers from a process that has imported
torch but nothing of the user's. `SpawnLauncher` is the default elsewhere: each worker is a program
of its own. `ContextLauncher` takes any start method of multiprocessing. `ThreadLauncher` runs the
same loop in threads.

Fresh interpreters are started only if `sys.executable` names a Python. In a frozen program, or one
that embeds Python, it names that program. Started instead of Python, the program would do its usual
work, which may include starting workers. multiprocessing's own processes, its fork server and its
resource tracker, are neither started nor ended here.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import errno
import functools
import importlib
import itertools
import math
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

from mpgrad.environment import PLACE, InheritedState, credentials, inherited, working_directory
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

MAIN_MODULE = threading.Lock()  # held while the main module is hidden
FORK_SERVER_PATIENCE = 2.0  # seconds that a fork server gets to end
FORK_SERVER_STAYS = 60  # seconds that it stays after its last pool has ended
STAYS_LONGER = 10  # further seconds, after which it ends by itself
EXIT_GAP = 0.5e-3  # seconds between the first two checks whether a worker has ended
LAST_STANDARD_STREAM = 2


class Exit(NamedTuple):
    """How a worker has ended."""

    # the same as `multiprocessing.Process.exitcode`; None if there is none, or it is not known
    code: int | None = None
    refusal: OSError | None = None  # why the system did not start it


class Launcher(ABC):
    """Starts and ends the workers of a pool.

    Guarantees: `launch` returns at once. After `close` no launched process is left.
    """

    can_kill = True  # even a worker that runs a call
    # Whether a worker starts as a copy of this process. Then no other thread should run at that
    # moment.
    copies_caller = False
    # the engine calls its `answer` when there is something to read
    tracker: SharedTracker | None = None

    @abstractmethod
    def launch(self, number: int, end: socket.socket) -> None:
        """Start worker `number` with its `end` of the socket pair, which the launcher closes.

        Raises:
            OSError: the system refuses now; the caller may try again.
            RuntimeError: the worker cannot be started as it should be, now or later.
        """

    @abstractmethod
    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        """End a worker by a signal."""

    @abstractmethod
    def exited(self, number: int) -> Exit | None:
        """Return how a worker has ended, and forget it. Return None if it has not ended yet."""

    @abstractmethod
    def close(self) -> None:
        """End all workers that were launched."""


def launched(launcher: Launcher, number: int) -> socket.socket:
    """Launch a worker, and return the caller's end of its socket pair. Raise what `Launcher.launch`
    raises."""
    ours, theirs = socket.socketpair()
    try:
        launcher.launch(number, theirs)
    except BaseException:
        ours.close()
        raise
    return ours


def exit_gap(since: float) -> float:
    """Return the seconds until the next check whether a worker has ended.

    `since` is when it began to end, on the clock of time.monotonic. No single event tells, on every
    system and for every kind of worker, that it has ended. So the engine checks repeatedly, at gaps
    of a quarter of the time since then.
    """
    return max(EXIT_GAP, (time.monotonic() - since) / 4)


def enter(module: str, function: str, *arguments: Any) -> None:
    """Call an entry point of the workers' side by name, because the caller's side never imports
    it."""
    getattr(importlib.import_module(module), function)(*arguments)


def enter_process(method: str, module: str, function: str, *arguments: Any) -> None:
    """Call `enter` in a process that may be a fork.

    Another thread may have been importing a module when this process was forked. Here no thread
    will finish that import. So code that imports the module does not wait for the end of the
    import. It gets the module as it is, as the importing thread would.
    """
    if method != "fork":
        # multiprocessing has passed its descriptors and this package's as inheritable. Programs
        # that a call starts would also keep them open.
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the descriptor that listed the others is closed
                os.set_inheritable(int(name), int(name) <= LAST_STANDARD_STREAM)
    for each in list(sys.modules.values()):
        spec = getattr(each, "__spec__", None)
        if getattr(spec, "_initializing", False):
            spec._initializing = False  # type: ignore[union-attr]
    enter(module, function, *arguments)


class ForkServerProcess:
    """The parent's end of a fork server. All pools of this process that can use it share it.

    After the last of them it stays for a while, because a second pool would need as long to start
    as the first. It then ends by itself, so that no thread has to wait here.
    """

    def __init__(self, begun_as: InheritedState, variables: Mapping[str, str]) -> None:
        """Start a fork server. `begun_as` is the state that this thread would pass on now, with
        these `variables`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = program(
                "mpgrad.workers.fork_server",
                "main",
                theirs,
                FORK_SERVER_STAYS + STAYS_LONGER,
                variables=variables,
            )
        self.begun_as = begun_as
        self.users = 0  # launchers that start workers here, and their workers
        self.unused_since = math.inf  # on the clock of time.monotonic
        self._control = ours
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        # exits of the workers whose launchers still exist; None until they are known
        self._exits: dict[int, Exit | None] = {}

    def fork(self, name: int, number: int, changes: dict[str, Any], *ends: socket.socket) -> bool:
        """Request a worker. Return False if the fork server is gone, which its pipe shows before
        `alive` does."""
        descriptors = array.array("i", [end.fileno() for end in ends])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        with self._sending:
            if self._control.fileno() < 0:  # another pool has found the fork server gone
                return False
            self._exits[name] = None
            try:
                self._control.sendmsg(
                    [pickle.dumps(("fork", name, (number, changes)))], rights, NO_SIGNAL
                )
            except ConnectionError:
                return False
        return True

    def kill(self, name: int, by: int) -> None:
        # an error means that the fork server has ended, with its workers
        with self._sending, contextlib.suppress(OSError):
            self._control.send(pickle.dumps(("kill", name, by)), NO_SIGNAL)

    def exited(self, name: int) -> Exit | None:
        """Return how a worker has ended, or that the fork server has ended with all of them. Also
        take reports about other workers."""
        with self._receiving:
            with contextlib.suppress(BlockingIOError):
                while report := self._report():
                    ended, code, refusal = pickle.loads(report)
                    if ended in self._exits:
                        error = OSError(refusal, os.strerror(refusal)) if refusal else None
                        self._exits[ended] = Exit(code, error)
                # the fork server has ended, so no more reports will come
                return self._exits.pop(name, None) or Exit()
            found = self._exits[name]
            if found is not None:
                del self._exits[name]
            return found

    def _report(self) -> bytes:
        """Return the next report, or nothing at the end. Raise BlockingIOError if no report has
        come yet."""
        try:
            return self._control.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:  # the fork server has been closed
            return b""

    def await_exit(self, name: int, until: float) -> bool:
        """Wait until a worker that was killed has ended, and return whether it has."""
        since = time.monotonic()
        while self.exited(name) is None:
            if time.monotonic() > until:
                self._exits.pop(name, None)
                return False
            time.sleep(exit_gap(since))
        return True

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def may_be_used(self) -> bool:
        return self.alive and time.monotonic() - self.unused_since < FORK_SERVER_STAYS

    def close(self) -> None:
        """End the fork server, which ends all its workers, and wait for it."""
        with contextlib.suppress(OSError):
            # The fork server and threads that wait for an exit code notice a shutdown, even if a
            # forked child holds a copy of this end.
            self._control.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            self._control.close()
        try:
            self._process.wait(FORK_SERVER_PATIENCE)
        except subprocess.TimeoutExpired:  # another process has stopped it
            self._process.kill()
            self._process.wait()


class ForkServerLauncher(Launcher):
    """Workers that are forked from a fork server, but take over this process's present state.

    If workers of a fork server cannot take over a new state, the pool keeps its workers. New
    workers come from another fork server.
    """

    tracker: SharedTracker
    _lock = threading.Lock()
    _open: ClassVar[list[ForkServerProcess]] = []
    _owner_pid = 0
    _program_ends = False
    _new_names = itertools.count(1)

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables` are for the environment of workers."""
        self._variables = variables
        # number of a worker in its pool -> the fork server that forked it, and its name there,
        # which is unique among pools
        self._born: dict[int, tuple[ForkServerProcess, int]] = {}
        self.tracker = SharedTracker()
        try:
            self._fork_server = self._join(inherited(variables), variables)
        except BaseException:
            self.tracker.close()
            raise

    @classmethod
    def _join(cls, now: InheritedState, variables: Mapping[str, str]) -> ForkServerProcess:
        """Return a fork server whose forks can take over the state `now`, and count one more user.
        If there is none, start one, and end those that are not used."""
        with cls._lock:
            # a forked child inherits the parent's variables, but not its fork servers
            if cls._owner_pid != os.getpid():
                cls._open, cls._owner_pid = [], os.getpid()
            found = next(
                (
                    each
                    for each in cls._open
                    if each.may_be_used and each.begun_as.changes(now) is not None
                ),
                None,
            )
            if found is None:
                cls._close_unused()
                found = ForkServerProcess(now, variables)
                cls._open.append(found)
            found.users += 1
            found.unused_since = math.inf
            return found

    @classmethod
    def _leave(cls, fork_server: ForkServerProcess, obeys: bool = True) -> None:
        """Count one user fewer. After the last, the fork server stays for a while, unless it is
        gone or does not obey, or the program ends, or this process is a worker, which rarely has
        more than one pool."""
        with cls._lock:
            fork_server.users -= 1
            if not fork_server.users:
                fork_server.unused_since = time.monotonic()
                stays = obeys and fork_server.alive and not PLACE.in_worker
                if cls._program_ends or not stays:
                    cls._close_unused()

    @classmethod
    def _close_unused(cls) -> None:
        """End the fork servers that no pool uses. The caller has the lock."""
        unused = [each for each in cls._open if not each.users]
        cls._open = [each for each in cls._open if each.users]
        for each in unused:
            each.close()

    @classmethod
    def end_unused(cls) -> None:
        """End the fork servers that no pool uses, which this process has started."""
        with cls._lock:
            if cls._owner_pid == os.getpid():
                cls._close_unused()

    @classmethod
    def end_all(cls) -> None:
        """End each fork server with its last pool from now on, because the program ends."""
        cls._program_ends = True
        cls.end_unused()

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
                # If there are no changes, the fork server's forks cannot take over the state, but
                # other pools may still use it. Otherwise it was killed, with its workers.
                if changes is not None:
                    before.close()
                self._fork_server = self._join(now, self._variables)
                self._leave(before)
                # if this fork server is also gone, the worker's pipe ends, and the engine notices
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
        """End the workers. The fork servers stay for other pools."""
        self.tracker.close()
        for fork_server, name in self._born.values():
            fork_server.kill(name, signal.SIGKILL)
        until = time.monotonic() + FORK_SERVER_PATIENCE
        obeys = True  # another process may have stopped a fork server
        for fork_server, name in self._born.values():
            obeys = fork_server.await_exit(name, until) and obeys
        for fork_server in (
            self._fork_server,
            *(fork_server for fork_server, _ in self._born.values()),
        ):
            self._leave(fork_server, obeys)


atexit.register(ForkServerLauncher.end_all)


P = TypeVar("P")


class ChildLauncher(Launcher, Generic[P]):
    """Workers that are children of this process."""

    tracker: SharedTracker

    def __init__(self) -> None:
        self._processes: dict[int, P] = {}
        self.tracker = SharedTracker()

    @abstractmethod
    def exited(self, number: int, timeout: float = 0) -> Exit | None:
        """Do the same as `Launcher.exited`, but wait up to `timeout` seconds for the end."""

    def close(self) -> None:
        self.tracker.close()
        for number in list(self._processes):
            self.kill(number)
            self.exited(number, timeout=5)


class SpawnLauncher(ChildLauncher[subprocess.Popen[bytes]]):
    """Workers that are programs of their own.

    multiprocessing's "spawn" differs in three ways: each worker would import the parent's main
    module, could not have children, and could not be started by a worker of another pool.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables` are for the environment of workers."""
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

    No other thread should run during a fork. A module that it imports would be only half imported
    in the fork, and a thread could not find the main module while that is hidden.
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
            else:  # multiprocessing passes its own tracker on
                arguments = (self._method, *entry, end, number, os.getpid())
            process = self._context.Process(target=enter_process, args=arguments, daemon=True)  # type: ignore[attr-defined]
            with hidden_main_module():
                process.start()
        self._processes[number] = process

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        process = self._processes[number]
        if process.exitcode is None:
            assert process.pid is not None
            # the fork server may have noticed the end of the process first
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
    """Hide the main module from multiprocessing, whose children would import it and so run an
    unguarded script again."""
    stand_in = types.ModuleType("__main__")
    stand_in.__spec__ = None
    with MAIN_MODULE:  # otherwise a pool could take another's stand-in for the main module
        main = sys.modules["__main__"]
        sys.modules["__main__"] = stand_in
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class ThreadLauncher(Launcher):
    """Workers in threads of this process. They cannot be killed."""

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
        """Do nothing: the engine closes the worker's pipe, and the worker ends after its call."""

    def exited(self, number: int) -> Exit | None:
        if self._threads[number].is_alive():
            return None
        del self._threads[number]
        return Exit()

    def close(self) -> None:
        """Do nothing: a thread that still runs ends after its call."""


def unlock_in_child() -> None:
    """Replace the locks, because another thread may have held them when this process was forked."""
    global MAIN_MODULE
    ForkServerLauncher._lock, MAIN_MODULE = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=unlock_in_child)


def process_launcher(context: BaseContext | str | None, threads: int | None = None) -> Launcher:
    """Return the launcher for `Pool(context=..., threads_per_worker=...)`.

    Raises:
        ValueError: `context` names no start method.
        TypeError: `context` is neither a name nor a context of multiprocessing.
        RuntimeError: there is no Python to start workers from.
    """
    if context is None:
        python()
        # A fork server needs message boundaries and the death signal, which only Linux has. A
        # sandbox may refuse the necessary system calls.
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


PROBED = "MPGRAD_STARTED_AS_PYTHON"  # in the environment of a program that is tested
PROBE_PATIENCE = 10.0  # seconds that it gets to answer


def python() -> str:
    """Return the program that starts a Python, as multiprocessing would.

    Raises:
        RuntimeError: the program is not a Python; it may be this program itself.
    """
    executable = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if PROBED in os.environ or not is_python(executable):
        raise RuntimeError(
            "workers need a Python to start from, and this program's executable is not one "
            f"(executable: {executable!r}); "
            'use context="fork", or name one with multiprocessing.set_executable'
        )
    return executable


@functools.cache
def is_python(executable: str) -> bool:
    """Return whether the program is a Python. If its name does not show this, it is run once, with
    a variable that keeps it from starting itself again."""
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
    """Start a fresh interpreter that calls an entry point. The arguments are numbers, and the
    descriptors of sockets."""
    numbers = [each if isinstance(each, int) else each.fileno() for each in given]
    arguments = ", ".join(map(str, numbers))
    # If NumPy is missing, PyTorch warns of this in each process. The caller has seen the warning.
    boot = (
        "import sys, warnings; sys.path[:] = sys.argv[1:]; "
        "warnings.filterwarnings('ignore', 'Failed to initialize NumPy'); "
        f"from {module} import {function}; {function}({arguments})"
    )
    # Without these variables, NumPy and other libraries would use all CPUs in each worker. PyTorch
    # gets its number of threads with the first message.
    environment = {
        **thread_variables(1),
        **os.environ,
        **(variables or {}),
        **({"MPGRAD_PORTABLE": "1"} if PORTABLE else {}),
    }
    # multiprocessing does the same
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen(
        [python(), *flags, "-c", boot, *sys.path],
        pass_fds=[each.fileno() for each in given if not isinstance(each, int)],
        env=environment,
        cwd=working_directory() or "/",  # torch cannot be imported in a deleted directory
        stdin=subprocess.DEVNULL,
        # Ctrl-C in a terminal is for the parent, which decides what happens to the workers
        start_new_session=True,
    )


class LifeSocket:
    """A pair of sockets. Workers have the other end.

    When the caller ends, this end closes, and the workers of multiprocessing's fork server also
    end. The fork server, their parent, runs as long as any process holds something from it.
    """

    def __init__(self, kind: int = socket.SOCK_STREAM) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, kind)
        OPEN[self._socket] = OwnedDescriptor(self._socket.fileno())

    def close(self) -> None:
        self._socket.close()
        self.theirs.close()


# --- multiprocessing's own processes


def check_fork_server() -> None:
    """Check the rights of multiprocessing's fork server, which keeps those that it began with.

    Raises:
        RuntimeError: its rights differ from those of this process.
    """
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None and not PORTABLE and credentials(server) != credentials(os.getpid()):
        raise RuntimeError(
            "the fork server of multiprocessing has different rights from this process (pid: "
            f"{server}), and its workers "
            "would also have them; leave context out, or give rights up before that server starts"
        )


class SharedTracker(LifeSocket):
    """Gives a worker the caller's resource tracker when the worker requests it. multiprocessing
    gives it to all its children.

    If a worker had a tracker of its own, this tracker would remove what the worker has made for
    others when the worker ends. A tracker for all workers runs as long as the program, and most
    workers never need it. (See `workers.main`.)
    """

    def __init__(self) -> None:
        super().__init__(socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> None:
        """Send the tracker's descriptor to the worker that requested it. If no descriptor or
        process is free for this, the worker starts its own tracker."""
        with contextlib.suppress(OSError):
            _, asking = receive_descriptors(self._socket, 1, 1)
            for each in asking:
                with socket.socket(fileno=each) as reply:
                    descriptor = resource_tracker.getfd()
                    assert descriptor is not None
                    socket.send_fds(reply, [b"!"], [descriptor], NO_SIGNAL)
