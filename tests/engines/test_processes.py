"""Worker processes as children: what they inherit, what multiprocessing gives its own, what they
start from, how they end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, alive, first_are_quick, gone, in_turn, linux_only

import mpgrad
from mpgrad.engines.launch import (
    Exit,
    ForkServerLauncher,
    SpawnLauncher,
    is_python,
    process_launcher,
    program,
)
from mpgrad.environment import InheritedState, inherited, take_over
from mpgrad.system import PORTABLE

CONTEXTS = first_are_quick(2, [None, "fork", "spawn", "forkserver"])


def run(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# --- what multiprocessing gives its children


def make_block(content: int) -> str:
    block = SharedMemory(create=True, size=16)
    block.buf[0] = content
    block.close()
    return block.name


def content_of(name: str) -> int:
    block = SharedMemory(name)
    content = block.buf[0]
    block.close()
    return content


@pytest.mark.parametrize("context", CONTEXTS[:2])  # the others have multiprocessing's own
def test_shared_memory_that_a_task_makes_outlives_its_worker(
    fork_server: mpgrad.Pool, context: str | None
) -> None:
    """FileNotFoundError in the next map: each worker had a resource tracker, which took it away
    when the worker ended."""
    with mpgrad.Pool(2, maxtasksperchild=1, context=context) as pool:
        names = pool.map(make_block, [5, 6, 7], 1)
        assert pool.map(content_of, names, 1) == [5, 6, 7]
    for name, content in zip(names, [5, 6, 7], strict=True):
        assert content_of(name) == content
        SharedMemory(name).unlink()  # known to our tracker, which otherwise complains


TRACKED = """
import multiprocessing, os, sys, psutil, mpgrad
from multiprocessing import resource_tracker

def make(_):
    from multiprocessing.shared_memory import SharedMemory
    block = SharedMemory(create=True, size=16)
    block.close()
    return block.name

def trackers():
    children = psutil.Process().children(recursive=True)
    return sum("resource_tracker" in " ".join(each.cmdline()) for each in children)

with mpgrad.Pool(2) as pool:
    pool.map(abs, range(4))
    assert trackers() == 0
    names = pool.map(make, range(4), 1)
    assert trackers() == 1
print(*names, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["ended", "killed"])
@pytest.mark.slow
def test_the_tracker_is_the_callers_and_starts_when_a_task_needs_it(end: str) -> None:
    """What nobody unlinks goes with the program, and no sooner."""
    done = run(TRACKED, end)
    names = done.stdout.split()
    assert len(names) == 4, done.stderr
    deadline = time.monotonic() + PATIENCE
    while any(os.path.exists(f"/dev/shm/{name}") for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "4 leaked shared_memory objects" in done.stderr


def as_a_child(_: object) -> tuple[Any, ...]:
    process = multiprocessing.current_process()
    executable = os.fsdecode(multiprocessing.spawn.get_executable())
    level = logging.getLogger("multiprocessing").level
    return (
        bytes(process.authkey),
        executable,
        process.name,
        len(process._identity),
        level,
        multiprocessing.get_start_method(),
    )


@pytest.fixture
def multiprocessing_server(fork_server: mpgrad.Pool) -> Iterator[None]:
    """multiprocessing's is not left behind."""
    yield
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("context", CONTEXTS)
def test_what_multiprocessing_tells_its_children(
    multiprocessing_server: None,
    context: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """multiprocessing.set_executable had no effect on the children of tasks, nor had its start
    method."""
    wrapper = tmp_path / "another"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    method = multiprocessing.get_start_method(allow_none=True)
    before = os.fsdecode(multiprocessing.spawn.get_executable())
    logger = logging.getLogger("multiprocessing")
    monkeypatch.setattr(logger, "level", logging.ERROR)
    multiprocessing.set_executable(str(wrapper))
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with mpgrad.Pool(1, context=context) as pool:
            key, executable, name, numbers, level, start_method = pool.apply(as_a_child, (0,))
    finally:
        multiprocessing.set_executable(before)
        multiprocessing.set_start_method(method, force=True)
    assert key == multiprocessing.current_process().authkey
    assert (executable, name, numbers) == (str(wrapper), "mpgrad-worker-1", 1)
    assert (level, start_method) == (logging.ERROR, "spawn")


def start_daemon(_: object) -> int | None:
    process = multiprocessing.get_context("fork").Process(
        target=time.sleep, args=(1000,), daemon=True
    )
    process.start()
    return process.pid


def replace_those_of(pids: list[int], pool: mpgrad.Pool) -> None:
    """One map may be done by others."""
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)) and time.monotonic() < deadline:
        pool.map(abs, range(4), 1)


END: dict[str, Callable[[list[int], mpgrad.Pool], object]] = {
    "with block": lambda pids, pool: pool.terminate(),
    "join": lambda pids, pool: (pool.close(), pool.join()),
    "another worker": replace_those_of,
}


@pytest.mark.parametrize("end", END)
def test_daemonic_processes_of_tasks_end_with_their_worker(
    fork_server: mpgrad.Pool, end: str
) -> None:
    """They outlived the program: workers ended without multiprocessing's exit handlers."""
    pool = mpgrad.Pool(2, maxtasksperchild=2 if end == "another worker" else None)
    with pool:
        pids = pool.map(start_daemon, range(2), 1)
        try:
            END[end](pids, pool)
            assert gone(pids, within=20)
        finally:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ends_gently", [True, False])
def test_a_pool_waits_for_other_processes_of_tasks_only_if_it_is_joined(
    fork_server: mpgrad.Pool, ends_gently: bool, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def starts(_: object) -> int | None:
        def waits() -> None:
            fifo.read_text()
            (tmp_path / "done").touch()

        process = multiprocessing.get_context("fork").Process(target=waits)
        process.start()
        return process.pid

    pool = mpgrad.Pool(1)
    pid = pool.apply(starts, (0,))
    if ends_gently:
        fifo.write_text("go")
        pool.close()
        pool.join()
        assert (tmp_path / "done").exists()
    else:
        pool.terminate()
        assert pid is not None and alive(pid)
        fifo.write_text("go")
        assert gone([pid], within=20)


def test_exit_handlers_of_tasks_run(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    def registers(path: Path) -> None:
        import atexit

        atexit.register(path.touch)

    with mpgrad.Pool(1) as pool:
        pool.apply(registers, (tmp_path / "left",))
    assert (tmp_path / "left").exists()


# --- whose child a worker is


LIBC = ctypes.CDLL(None, use_errno=True)


def no_new_privileges() -> None:
    assert LIBC.prctl(38, 1, 0, 0, 0) == 0


def another_namespace() -> None:
    if LIBC.unshare(0x04000000) != 0:  # CLONE_NEWUTS
        pytest.skip("not allowed")


def another_root() -> None:
    os.chroot("/usr")


def as_nobody() -> None:
    os.setgroups([7, 8])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def without_capabilities() -> None:
    assert LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0


def unprivileged(then: Callable[[], object]) -> Callable[[], object]:
    return lambda: (as_nobody(), then())


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may")
TAKEN_OVER = [
    pytest.param(as_nobody, marks=AS_ROOT, id="user"),
    pytest.param(lambda: os.setuid(65534), marks=AS_ROOT, id="uid"),
    pytest.param(lambda: os.setgid(65534), marks=AS_ROOT, id="gid"),
    pytest.param(lambda: os.seteuid(65534), marks=AS_ROOT, id="effective uid"),
    pytest.param(lambda: LIBC.setfsuid(65534), marks=AS_ROOT, id="user of files"),
    pytest.param(lambda: os.setgroups([7, 8]), marks=AS_ROOT, id="groups"),
    pytest.param(without_capabilities, marks=AS_ROOT, id="capabilities"),
    pytest.param(lambda: LIBC.prctl(24, 13, 0, 0, 0), marks=AS_ROOT, id="bounds of capabilities"),
    pytest.param(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]), id="blocked signals"
    ),
    pytest.param(lambda: os.umask(0o027), id="umask"),
    pytest.param(lambda: os.nice(1), id="niceness"),
    pytest.param(lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]), id="affinity"),
    pytest.param(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (99, 100)), id="limits"),
    pytest.param(no_new_privileges, id="no_new_privs"),
    pytest.param(unprivileged(no_new_privileges), marks=AS_ROOT, id="user and no_new_privs"),
]
BEYOND = [
    pytest.param(
        lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)), id="scheduler"
    ),
    pytest.param(another_namespace, marks=AS_ROOT, id="namespace"),
    pytest.param(
        lambda: (another_namespace(), as_nobody()), marks=AS_ROOT, id="namespace and user"
    ),
    pytest.param(another_root, marks=AS_ROOT, id="root"),
    pytest.param(lambda: LIBC.personality(0x0040000), id="personality"),
    pytest.param(
        lambda: Path("/proc/self/coredump_filter").write_text("0"), id="what a core dump has"
    ),
    pytest.param(lambda: LIBC.prctl(28, 1, 0, 0, 0), marks=AS_ROOT, id="secure bits"),
    pytest.param(lambda: os.environ.update(CUDA_VISIBLE_DEVICES="7"), id="what torch reads"),
]


def after(change: Callable[[], object]) -> InheritedState:
    """What a process is after a change."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            change()
            os.write(write, pickle.dumps(inherited()))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        found = file.read()
    os.waitpid(pid, 0)
    return pickle.loads(found)


@linux_only("the fork server")
@pytest.mark.quick
@pytest.mark.parametrize("change", TAKEN_OVER)
def test_a_worker_takes_over_what_its_caller_is_now(change: Callable[[], object]) -> None:
    """Workers were what the fork server was when it began: they ran as root after setuid."""
    before = inherited()
    now = after(change)
    changes = before.changes(now)
    assert changes is not None and changes == before.changes(now)
    assert after(lambda: take_over(changes)) == now


@linux_only("the fork server")
@pytest.mark.quick
@pytest.mark.parametrize("change", BEYOND)
def test_what_a_worker_cannot_take_over_is_anothers(change: Callable[[], object]) -> None:
    assert inherited().changes(after(change)) is None
    assert after(change).changes(after(change)) is not None  # and later pools share that one


@linux_only("the fork server")
@AS_ROOT
@pytest.mark.quick
def test_who_has_no_rights_gets_none_back() -> None:
    low = after(as_nobody)
    assert low.changes(inherited()) is None
    assert low.changes(after(lambda: (os.nice(-1), as_nobody()))) is None
    lower = after(unprivileged(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (99, 100))))
    assert lower.changes(low) is None and low.changes(lower) is not None


@linux_only("the fork server")
def test_the_environment_of_a_later_pool(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers had that of the first pool."""
    monkeypatch.setenv("MPGRAD_TESTS", "first")
    with mpgrad.Pool(1) as pool:
        assert pool.apply(os.environ.get, ("MPGRAD_TESTS",)) == "first"
        # libraries find it, too
        assert pool.apply(lambda: ctypes.CDLL(None).getenv(b"MPGRAD_TESTS") != 0)
    monkeypatch.delenv("MPGRAD_TESTS")
    before = set(ForkServerLauncher._open)
    with mpgrad.Pool(1) as pool:
        assert pool.apply(os.environ.get, ("MPGRAD_TESTS",)) is None
        assert set(ForkServerLauncher._open) == before  # in milliseconds


LATER = """
import os, resource, sys, mpgrad

def who():
    umask = os.umask(0)
    os.umask(umask)
    ids = os.getresuid(), os.getresgid(), os.getgroups()
    variable = os.environ.get("SOME_VARIABLE")
    return *ids, umask, os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE), variable

with mpgrad.Pool(1, maxtasksperchild=1) as old:
    root = old.apply(who)
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    os.environ["SOME_VARIABLE"] = "7"
    os.setgroups([7, 8])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    with mpgrad.Pool(1) as new:
        assert new.apply(who) == who() != root, (new.apply(who), who())
        old.apply(who)  # by one that may have been there
        later, now = old.apply(who), who()
        assert (later[:4], later[5:]) == (now[:4], now[5:]), later  # niceness is a thread's
        assert new.map(abs, [-1]) == [1]
print("right", end="")
"""


@linux_only("the fork server")
@AS_ROOT
@pytest.mark.slow
def test_workers_of_who_has_given_up_rights() -> None:
    """A new pool's workers, and later ones of an old pool, still ran as root."""
    done = run(LATER, cwd="/")
    assert (done.stdout, done.stderr) == ("right", "")


RIGHTS = """
import ctypes, os, sys, mpgrad
sys.path.append(sys.argv[1])
import of_the_user

libc = ctypes.CDLL(None)
if sys.argv[2] == "another user's":
    old = mpgrad.Pool(1)
    old.apply(of_the_user.rights)
    os.setresuid(65534, 65534, 65534)
elif sys.argv[2] == "fewer":
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
else:
    libc.prctl(28, 1, 0, 0, 0)
with mpgrad.Pool(1) as pool:
    try:
        assert pool.apply(of_the_user.rights) == of_the_user.rights()
        print("the same")
    except RuntimeError as error:
        print(error)
"""
READS = (
    "def rights(): return [line for line in open('/proc/self/status') if line[:3] in ('Cap', "
    "'Uid')]"
)


@linux_only("the fork server")
@AS_ROOT
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ("fewer", "the same"),
        ("another user's", "the same"),
        ("not by being root", "a worker cannot take over the state of this process (CapEff: "),
    ],
)
def test_rights_of_the_workers_of_root(tmp_path: Path, rights: str, said: str) -> None:
    """Root that had dropped its capabilities had workers with all of them: a program that root
    starts has them again.

    And as another user they could not load what a module's function needs, where Python was in a
    closed folder.
    """
    (tmp_path / "of_the_user.py").write_text(READS)
    done = run(RIGHTS, tmp_path, rights, cwd="/")
    assert done.stderr == "" and done.stdout.startswith(said)


FORK_SERVER = """
import os, mpgrad
with mpgrad.Pool(1, context="forkserver") as old:
    assert old.apply(os.getuid) == 0
    os.setresuid(65534, 65534, 65534)
    try:
        mpgrad.Pool(1, context="forkserver")
    except RuntimeError as error:
        print(error, end="")
"""


@linux_only("credentials of another process")
@AS_ROOT
@pytest.mark.slow
def test_the_fork_server_of_multiprocessing_after_rights_were_given_up() -> None:
    done = run(FORK_SERVER, cwd="/")
    assert done.stdout.startswith("the fork server of multiprocessing has different rights")


# --- what is no Python


PROGRAM = """#!/bin/sh
echo started >> {folder}/starts
test $(wc -l < {folder}/starts) -gt 5 && exit 9
exec {python} {folder}/main.py
"""
# the file's name, whether the program says that it is frozen, and how often it starts
PROGRAMS = {
    "frozen": ("program", True, 1),
    "no Python": ("program", False, 2),
    "named like Python": ("python3", False, 2),
    "without a name": ("", False, 1),
}
MAIN = """
import sys
sys.executable = {executable!r}
if {frozen}:
    sys.frozen = True
from mpgrad.engines.launch import process_launcher
try:
    process_launcher({context!r})
except RuntimeError as error:
    print(error)
"""


@pytest.mark.quick
@pytest.mark.parametrize(("program", "context"), in_turn(PROGRAMS, [None, "spawn", "forkserver"]))
def test_a_program_that_is_no_python_is_not_started_again_and_again(
    tmp_path: Path, program: str, context: str | None
) -> None:
    """Each start of workers ran the program's main module again, which started workers."""
    name, frozen, starts = PROGRAMS[program]
    if PORTABLE and name == "python3":
        pytest.skip("only Linux tells what program this is")
    file = tmp_path / (name or "program")
    file.write_text(PROGRAM.format(folder=tmp_path, python=sys.executable))
    file.chmod(0o755)
    main = MAIN.format(executable=str(file) if name else "", frozen=frozen, context=context)
    (tmp_path / "main.py").write_text(main)
    done = subprocess.run([file], capture_output=True, text=True, timeout=60)
    expected = (
        f"this program's executable is not one (executable: {str(file) if name else ''!r})"
        if name
        else "is not one (executable: '')"
    )
    assert expected in done.stdout and 'use context="fork"' in done.stdout and done.stderr == ""
    assert (tmp_path / "starts").read_text().count("started") == starts


def test_a_python_by_another_name(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    wrapper = tmp_path / "interpreter"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    assert is_python(str(wrapper))


@pytest.mark.slow
def test_a_frozen_program_forks(tmp_path: Path) -> None:
    code = "import sys; sys.frozen = True; sys.executable = '/nowhere'\nimport mpgrad\n"
    done = run(code + "with mpgrad.Pool(2, context='fork') as pool: print(pool.map(abs, [-1, -2]))")
    assert (done.stdout, done.stderr) == ("[1, 2]\n", "")


# --- ends


@pytest.mark.quick
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_programs_of_tasks_inherit_nothing_of_the_worker(method: str) -> None:
    """multiprocessing passes pipes to its children so that these pass them on."""
    code = (
        "import os, sys\n"
        "from mpgrad.engines.launch import enter_process\n"
        "ends = os.pipe()\n"
        "for end in ends: os.set_inheritable(end, True)\n"
        "enter_process(sys.argv[1], 'os', 'system', f'test -e /dev/fd/{ends[0]} -o -e "
        "/dev/fd/{ends[1]} || echo none')"
    )
    assert run(code, method).stdout == "none\n"


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_a_death_is_noticed_while_a_program_of_the_task_goes_on(
    multiprocessing_server: None, context: str, tmp_path: Path
) -> None:
    """The program inherited the worker's pipe: the death was noticed when the program ended, or
    never."""

    def starts_and_dies(path: Path) -> None:
        if path.exists():
            return
        os.system(f"sleep 1000 & echo $! > {path}")
        os.kill(os.getpid(), signal.SIGKILL)

    path = tmp_path / "pid"
    with mpgrad.Pool(1, context=context) as pool:
        try:
            result = pool.apply_async(starts_and_dies, (path,))
            result.get(timeout=30)
            assert pool.stats().deaths == 1
        finally:
            os.kill(int(path.read_text()), signal.SIGKILL)


BUSY = """
import os, time, mpgrad, psutil, multiprocessing
def spin(path):
    open(path, "w").close()
    while True: pass
if __name__ == "__main__":
    import sys
    pool = mpgrad.Pool(1, context="forkserver")
    pool.apply(abs, (1,))
    pool.apply_async(spin, (sys.argv[1],))
    if sys.argv[2] == "forked":
        child = os.fork()
        if not child: time.sleep(1000)
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
    print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), 9)
"""


@linux_only("signals of sockets")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "forked"])
def test_the_caller_of_a_fork_server_is_killed(tmp_path: Path, how: str) -> None:
    """A busy worker, the fork server and the resource tracker stayed."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path / "busy"), how], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == (3 if how == "alone" else 4)
        if how == "alone":
            assert gone(pids, within=20)
        else:
            deadline = time.monotonic() + PATIENCE
            while len(list(filter(alive, pids))) == 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            left = len(list(filter(alive, pids)))
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)
            # the worker is gone; what the fork has inherited of multiprocessing is its own
            assert left < 4


@pytest.fixture
def launcher(fork_server: mpgrad.Pool) -> ForkServerLauncher | SpawnLauncher:
    made: Any = process_launcher(None)
    return made  # type: ignore[no-any-return]


def exit_of(launcher: Any, number: int) -> Exit:
    deadline = time.monotonic() + 30
    while (found := launcher.exited(number)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_nothing_is_kept_of_workers_that_end_late(launcher: Any) -> None:
    """Their exit codes came when nobody waited for them, and were kept as long as the fork
    server."""
    ends = []
    for number in range(3):
        ours, theirs = socket.socketpair()
        ends.append(ours)
        launcher.launch(number, theirs)
    assert launcher.exited(0) is None  # it is told nothing, and waits
    assert launcher.exited(1) is None
    ends[2].close()
    assert exit_of(launcher, 2) == Exit(0)
    launcher.kill(0)
    assert exit_of(launcher, 0) == Exit(-signal.SIGKILL)
    if isinstance(launcher, ForkServerLauncher):
        (last,) = launcher._born.values()
        names = launcher._fork_server._exits
        assert last[1] in names
        launcher.close()
        assert last[1] not in names
    else:
        launcher.close()
        assert launcher._processes == {}
    for end in ends:
        end.close()


PIPES = """
import os, signal, socket, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from mpgrad.engines.launch import ForkServerProcess
from mpgrad.environment import InheritedState, inherited, take_over
from mpgrad.wire.pipe import Pipe

for descriptors in [], [0]:
    ours, theirs = socket.socketpair()
    pipe = Pipe(ours, blocking=False)
    theirs.close()
    try:
        pipe.send_raw(b"frame", descriptors)
    except ConnectionError:
        print("noticed")
fork_server = ForkServerProcess(inherited(), {})
fork_server._process.kill()
fork_server._process.wait()
ours, theirs = socket.socketpair()
fork_server.kill(1, signal.SIGKILL)
print(fork_server.fork(1, 1, {}, ours, theirs))
fork_server.close()
"""


@linux_only("the fork server")
@pytest.mark.quick
def test_a_caller_with_sigpipe_as_it_was_by_default() -> None:
    """It ended with -13 when it wrote to a worker that had been killed."""
    done = run(PIPES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "noticed\nnoticed\nFalse\n", "")


LATE = """
import sys, threading
import mpgrad

def late():
    threading.main_thread().join()
    {use}

threading.Thread(target=late).start()
"""
POOL = "with mpgrad.Pool(1) as pool: print(pool.map(abs, [-1, -2]))"


@pytest.mark.parametrize(
    "use",
    [
        pytest.param("mpgrad.WorkerDiedError; print([1, 2])", marks=pytest.mark.quick),
        pytest.param(POOL, marks=pytest.mark.slow),
    ],
)
def test_first_use_after_the_main_thread_has_ended(use: str) -> None:
    """RuntimeError: can't register atexit after shutdown, since concurrent.futures.process was not
    imported before."""
    done = run(LATE.format(use=use))
    assert (done.stdout, done.stderr) == ("[1, 2]\n", "")


def test_pytorchs_warning_of_a_missing_numpy_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "warning.py").write_text(
        "import warnings\n"
        "warnings.warn('Failed to initialize NumPy: No module named numpy')\n"
        "warnings.warn('another')\n"
        "def main(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert program("warning", "main").wait(20) == 0
    warned = capfd.readouterr().err
    assert "another" in warned and "NumPy" not in warned


def test_a_working_directory_that_was_deleted(tmp_path: Path, fork_server: mpgrad.Pool) -> None:
    # symptom: InternalError(FileNotFoundError). cause: os.getcwd where workers are started.
    before = os.getcwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        with mpgrad.Pool(1) as pool:
            assert pool.map(abs, [-1]) == [1]
    finally:
        os.chdir(before)
