"""How worker processes and threads come to be, and how one learns that they are gone.

A launcher gives a worker its end of a socket pair and later tells its exit code. `NurseryLauncher` is the default on Linux:
workers are forked from a process that has imported torch and nothing of the user's. `SpawnLauncher` is the default elsewhere:
each worker is a program of its own. `ContextLauncher` takes any start method of multiprocessing; `ThreadLauncher` runs the
same loop in threads.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import itertools
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from mpgrad.cpus import THREAD_VARIABLES
from mpgrad.place import working_directory
from mpgrad.system import PORTABLE, remove_name

__all__ = ["ContextLauncher", "Launcher", "NurseryLauncher", "SpawnLauncher", "ThreadLauncher", "enter", "process_launcher"]

MAIN_MODULE = threading.Lock()  # while it is hidden
NURSERY_PATIENCE = 2.0  # seconds for it to end


class Launcher(Protocol):
    """Guarantees: `launch` returns at once; after `close` no process that was launched is left."""

    can_kill: bool  # a worker that runs a call
    copies_caller: bool  # a worker begins as what this process is at that moment: nothing else should go on in it

    def launch(self, number: int, end: socket.socket) -> None:
        """Start worker `number` with its `end` of the socket pair, which is the launcher's to close."""
        ...

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        """End a worker by a signal."""
        ...

    def exit_code(self, number: int, timeout: float) -> int | None:
        """The exit code of a worker that has ended; None where it has none, or has not ended within `timeout` seconds."""
        ...

    def close(self) -> None: ...


def enter(module: str, function: str, *arguments: Any) -> None:
    """Call an entry point of the workers' side by its name: the parent's side never imports it."""
    getattr(importlib.import_module(module), function)(*arguments)


def enter_process(module: str, function: str, *arguments: Any) -> None:
    """`enter`, in a process that may be a fork of one in which some thread imported a module: nobody here will go on with that.

    Whoever asks for it gets it as it is, as in the thread that imports it, instead of waiting for the end.
    """
    for each in list(sys.modules.values()):
        spec = getattr(each, "__spec__", None)
        if getattr(spec, "_initializing", False):
            spec._initializing = False  # type: ignore[union-attr]
    enter(module, function, *arguments)


def program(module: str, function: str, end: socket.socket, *numbers: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter that calls an entry point of the workers' side with its end of a pipe, and `numbers`."""
    arguments = ", ".join(map(str, (end.fileno(), *numbers)))
    boot = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import {function}; {function}({arguments})"
    # else NumPy takes all CPUs in each worker, and so do others; PyTorch is told by the first message
    environment = {**dict.fromkeys(THREAD_VARIABLES, "1"), **os.environ}
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return subprocess.Popen(
        [sys.executable, *flags, "-c", boot, *sys.path],
        pass_fds=[end.fileno()],
        env=environment,
        cwd=working_directory() or "/",  # in one that was deleted torch cannot be loaded
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal is for the parent, which decides what becomes of the workers
    )


class NurseryProcess:
    """The parent's end of the nursery, shared by all pools of this process and ended with the last of them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = program("mpgrad.workers.nursery", "main", theirs)
        self._control = ours
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._exit_codes: dict[int, int] = {}

    def fork(self, name: int, number: int, end: socket.socket) -> bool:
        """Ask for a worker; False where the nursery is gone, of which its pipe knows before `alive` does."""
        descriptors = array.array("i", [end.fileno()])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        with self._sending:
            if self._control.fileno() < 0:  # closed, by another pool that found it gone
                return False
            try:
                self._control.sendmsg([pickle.dumps(("fork", name, number))], rights)
            except ConnectionError:
                return False
        return True

    def kill(self, name: int, by: int) -> None:
        with self._sending, contextlib.suppress(OSError):  # it has ended, and its workers with it
            self._control.send(pickle.dumps(("kill", name, by)))

    def exit_code(self, name: int, timeout: float) -> int | None:
        """Of a worker; None where it has not ended within `timeout` seconds, or the nursery has."""
        deadline = time.monotonic() + timeout
        with self._receiving:
            while name not in self._exit_codes:
                if self._control.fileno() < 0:
                    return None
                ready = wait([self._control], max(0.0, deadline - time.monotonic()))
                try:
                    data = self._control.recv(4096) if ready else b""
                except OSError:
                    data = b""
                if not data:
                    return None
                ended, code = pickle.loads(data)
                self._exit_codes[ended] = code
            return self._exit_codes.pop(name)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the nursery, and with it all workers; waits for it."""
        with contextlib.suppress(OSError):
            # the nursery sees it even where a forked child holds a copy of this end, and so does whoever waits for an exit code
            self._control.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            self._control.close()
        try:
            self._process.wait(NURSERY_PATIENCE)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()


class NurseryLauncher:
    """Workers forked from the nursery."""

    can_kill = True
    copies_caller = False
    _lock = threading.Lock()
    _shared: NurseryProcess | None = None
    _users = 0
    _owner_pid = 0
    _new_names = itertools.count(1)

    def __init__(self) -> None:
        # number of a worker in its pool -> the nursery that forked it, and its name there, unique among pools
        self._born: dict[int, tuple[NurseryProcess, int]] = {}
        self._nursery = self._join()

    @classmethod
    def _join(cls) -> NurseryProcess:
        """The nursery of this process, a new one where there is none; counts one more user."""
        with cls._lock:
            if cls._owner_pid != os.getpid():  # a forked child has the parent's variables, but not its nursery
                cls._shared, cls._users, cls._owner_pid = None, 0, os.getpid()
            if cls._shared is None or not cls._shared.alive:
                cls._shared, cls._users = NurseryProcess(), 0
            cls._users += 1
            return cls._shared

    def launch(self, number: int, end: socket.socket) -> None:
        name = next(self._new_names)
        with end:
            if not (self._nursery.alive and self._nursery.fork(name, number, end)):
                # killed from outside: its workers die with it, and their successors need a new one
                self._nursery.close()
                self._nursery = self._join()
                self._nursery.fork(name, number, end)  # should that one be gone too, so is the other end of the worker's pipe
        self._born[number] = self._nursery, name

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        nursery, name = self._born[number]
        nursery.kill(name, by)

    def exit_code(self, number: int, timeout: float) -> int | None:
        nursery, name = self._born[number]
        code = nursery.exit_code(name, timeout)
        if code is not None:
            del self._born[number]
        return code

    def close(self) -> None:
        """Ends the nursery where no other pool uses it."""
        nursery = self._nursery
        with self._lock:
            if nursery is NurseryLauncher._shared:
                NurseryLauncher._users -= 1
                if NurseryLauncher._users > 0:
                    return
                NurseryLauncher._shared = None
        nursery.close()


class SpawnLauncher:
    """Workers that are programs of their own.

    multiprocessing's "spawn" would have each import the parent's main module, lets none have children of its own, and starts
    none where the parent is a worker of a pool itself.
    """

    can_kill = True
    copies_caller = False

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, number: int, end: socket.socket) -> None:
        with end:
            self._processes[number] = program("mpgrad.workers.main", "serve_spawned", end, number)

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        self._processes[number].send_signal(by)

    def exit_code(self, number: int, timeout: float) -> int | None:
        try:
            code = self._processes[number].wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        remove_name(self._processes.pop(number).pid)
        return code

    def close(self) -> None:
        for number in list(self._processes):
            self.kill(number)
            self.exit_code(number, timeout=5)


class ContextLauncher:
    """Workers started by a context of multiprocessing: "spawn", "fork" or "forkserver".

    A fork has half of a module that some thread imports in that moment; and while the main module is hidden nobody finds it.
    """

    can_kill = True
    copies_caller = True

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}

    def launch(self, number: int, end: socket.socket) -> None:
        forked_by_us = self._context.get_start_method() != "forkserver"
        arguments = ("mpgrad.workers.main", "serve_in_process", end, number, os.getpid() if forked_by_us else None)
        process = self._context.Process(target=enter_process, args=arguments, daemon=True)  # type: ignore[attr-defined]
        with hidden_main_module(), end:
            process.start()
        self._processes[number] = process

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        process = self._processes[number]
        if process.exitcode is None:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # a fork server has seen its end before us
                os.kill(process.pid, by)

    def exit_code(self, number: int, timeout: float) -> int | None:
        process = self._processes[number]
        process.join(timeout)
        code = process.exitcode
        if code is not None:
            assert process.pid is not None
            remove_name(process.pid)
            process.close()
            del self._processes[number]
        return code

    def close(self) -> None:
        for number in list(self._processes):
            self.kill(number)
            self.exit_code(number, timeout=5)


@contextlib.contextmanager
def hidden_main_module() -> Iterator[None]:
    """multiprocessing has a child import the parent's main module, which would run an unguarded script again."""
    stand_in = types.ModuleType("__main__")
    stand_in.__spec__ = None
    with MAIN_MODULE:  # else one pool could take another's stand-in for the module
        main = sys.modules["__main__"]
        sys.modules["__main__"] = stand_in
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class ThreadLauncher:
    """Workers in threads of this process. They cannot be killed, only asked."""

    can_kill = False
    copies_caller = False

    def __init__(self) -> None:
        self._threads: dict[int, threading.Thread] = {}

    def launch(self, number: int, end: socket.socket) -> None:
        arguments = ("mpgrad.workers.main", "serve", end, number)
        thread = threading.Thread(target=enter, args=arguments, name=f"mpgrad-worker-{number}", daemon=True)
        thread.start()
        self._threads[number] = thread

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        pass  # its pipe is closed next, and it ends after the call it is in

    def exit_code(self, number: int, timeout: float) -> int | None:
        self._threads.pop(number).join(timeout)
        return None

    def close(self) -> None:
        for number in list(self._threads):
            self.exit_code(number, timeout=5)


def unlock_in_child() -> None:
    """Another thread may have held them as this process was forked."""
    global MAIN_MODULE
    NurseryLauncher._lock, MAIN_MODULE = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=unlock_in_child)


def process_launcher(context: BaseContext | str | None) -> Launcher:
    """The launcher for `Pool(context=...)`.

    Raises:
        ValueError: `context` names no start method.
        TypeError: `context` is neither a name nor a context of multiprocessing.
    """
    if context is None:
        # a nursery needs message boundaries and the death signal, which only Linux has
        return SpawnLauncher() if PORTABLE else NurseryLauncher()
    if isinstance(context, str):
        if context not in (methods := multiprocessing.get_all_start_methods()):
            raise ValueError(f"context must be one of {', '.join(methods)} (context: {context!r})")
        return ContextLauncher(multiprocessing.get_context(context))
    if isinstance(context, BaseContext):
        return ContextLauncher(context)
    raise TypeError(f"context must be a name or a context of multiprocessing (context: {context!r})")
