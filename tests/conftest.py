"""Contains what all tests share: pools, and a guard against leftovers.

A fork server takes about 2 s to import torch. So one pool stays open for the whole session, and
other pools share its fork server and start in milliseconds. The guard compares the process after a
test with the process before it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import getpass
import importlib
import json
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import tqdm
from inside import patience_with_callbacks, take_nothing_back

import mpgrad
from mpgrad.engines import launch
from mpgrad.engines.launch import ForkServerLauncher, program
from mpgrad.system import PORTABLE

# these tests run in their own process
collect_ignore = [] if "MPGRAD_PRETEND" in os.environ else ["devices/pretend"]

# otherwise inductor keeps processes, with torch 2.8 from its import on
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# torch's compiler and joblib set these when they are imported. After that, no worker would come
# from the session's fork server.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
)
os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")

OWN_NAMES = ("mpgrad", "torch_", "psm_")  # of shared memory: ours, torch's and multiprocessing's
PATIENCE = 20.0  # seconds for the system to remove ended processes


@pytest.fixture(scope="session")
def fork_server() -> Iterator[mpgrad.Pool]:
    tqdm.tqdm.monitor_interval = 0  # otherwise tqdm keeps a thread
    # started once for the session, for tests that use a context of multiprocessing
    multiprocessing.resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "program", program_of_tests)
        # A busy machine may stop the callbacks thread for longer than a caller waits for it.
        patience_with_callbacks(patch, 2.0)
        with mpgrad.Pool(processes=1) as pool:
            pool.apply(abs, (-1,))
            yield pool


def program_of_tests(module: str, *given: Any, **options: Any) -> subprocess.Popen[bytes]:
    """In place of `mpgrad.engines.launch.program`."""
    is_server = module == "mpgrad.workers.fork_server"
    return program("fork_server_of_tests" if is_server else module, *given, **options)


@pytest.fixture(scope="session")
def shared_pools(fork_server: mpgrad.Pool) -> Iterator[Callable[[str, int], mpgrad.Pool]]:
    """Return a function that finds a pool by engine and number of workers. Each pool is made
    once."""
    with contextlib.ExitStack() as stack:
        made: dict[tuple[str, int], mpgrad.Pool] = {}

        def get(engine: str, processes: int) -> mpgrad.Pool:
            if (engine, processes) not in made:
                made[engine, processes] = staffed(
                    stack.enter_context(mpgrad.Pool(processes, engine=engine))
                )
            return made[engine, processes]

        for engine, processes in (
            ("process", 1),
            ("process", 2),
            ("process", 4),
            ("thread", 2),
            ("inline", 1),
        ):
            get(engine, processes)
        yield get


ENGINES = [("process", 2), ("thread", 2), ("inline", 1)]
MORE_WORKERS = pytest.param(("process", 4), marks=pytest.mark.slow)


@pytest.fixture(
    params=[*ENGINES, MORE_WORKERS], ids=["process-2", "thread-2", "inline-1", "process-4"]
)
def pool(
    request: pytest.FixtureRequest, shared_pools: Callable[[str, int], mpgrad.Pool]
) -> mpgrad.Pool:
    """A warm pool of each engine, shared by the whole session, for tests that do not hurt it."""
    return shared_pools(*request.param)


@pytest.fixture
def pool2(shared_pools: Callable[[str, int], mpgrad.Pool]) -> mpgrad.Pool:
    """A warm pool of two processes, for tests that do not depend on the engine."""
    return shared_pools("process", 2)


@pytest.fixture
def fresh_pool(fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    """The test's own pool of two processes, which it may hurt."""
    with mpgrad.Pool(processes=2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_left_behind(shared_pools: Callable[[str, int], mpgrad.Pool]) -> Iterator[None]:
    """Check that a test leaves no process, thread, descriptor or name in /dev/shm behind."""
    gc.collect()
    # Objects that still exist stay. So no collection of this test, or of a later one, has to walk
    # through them (80 ms each).
    gc.freeze()
    before = footprint()
    yield
    ForkServerLauncher.end_unused()  # fork servers stay for a while
    deadline = time.monotonic() + PATIENCE
    left = leftovers(before)
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        ForkServerLauncher.end_unused()  # those of pools that have just ended
        left = leftovers(before)
    assert not left, f"left behind: {left}"


def footprint() -> dict[str, set[str]]:
    return {
        "processes": set(
            map(str, psutil.pids())
        ),  # all of them, because finding their parents takes long
        "threads": {f"{thread.ident} {thread.name}" for thread in threading.enumerate()},
        "descriptors": set(numbers_of_files()),
        "shared memory": set(names_of_shared_memory()),
    }


def names_of_shared_memory() -> Iterator[str]:
    """Yield the names, except those of other programs and of multiprocessing's semaphores, which
    any program may make or remove."""
    if Path("/dev/shm").exists():
        yield from (name for name in os.listdir("/dev/shm") if name.startswith(OWN_NAMES))


def children_among(pids: set[str]) -> Iterator[str]:
    """Yield the processes that descend from this one."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if any(each.pid == os.getpid() for each in process.parents()):
                command = process.cmdline()
                if not any("multiprocessing.resource_tracker" in part for part in command):
                    yield f"{pid} {command}"


def numbers_of_files() -> Iterator[str]:
    """Yield the descriptors, each with the numbers of its file, which are faster to get than its
    name."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            yield f"{name} {status.st_dev} {status.st_ino}"


def files_among(descriptors: set[str]) -> Iterator[str]:
    """Return the descriptors that are not shared memory. Warm pools may keep more of it than when
    the test began; other tests check that."""
    names = {each.partition(" ")[0] for each in descriptors}
    return (
        f"{name} {target}"
        for name, target in open_descriptors()
        if name in names and not is_shared_memory(target)
    )


def open_descriptors() -> Iterator[tuple[str, str]]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield name, os.readlink(f"/proc/self/fd/{name}")


def is_shared_memory(target: str) -> bool:
    """Return whether a descriptor belongs to a slab, that is, to an anonymous memory file or one
    whose name was removed."""
    return target.startswith(("/memfd:mpgrad", "/dev/shm/mpgrad-"))


def shared_memory_files() -> int:
    gc.collect()
    return sum(is_shared_memory(target) for _, target in open_descriptors())


def leftovers(before: dict[str, set[str]]) -> dict[str, set[str]]:
    now = footprint()
    new = {kind: now[kind] - before[kind] for kind in now}
    new["processes"] = set(children_among(new["processes"]))
    new["descriptors"] = set(files_among(new["descriptors"])) if new["descriptors"] else set()
    return {kind: names for kind, names in new.items() if names}


# --- which tests run where


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files that have tests with a Ray cluster last, and mark slow variants.

    A process that has joined a cluster must not fork, as `context="fork"` and the standard
    library's executors do, because its children would die.
    """
    on_ray = {item.path for item in items if uses_ray(item)}
    items.sort(key=lambda item: (item.path in on_ray, uses_ray(item)))
    firsts: dict[tuple[object, str], list[int]] = {}
    for item in items:
        if is_variant(item, firsts):
            item.add_marker(pytest.mark.slow)
    if config.option.markexpr == "quick":  # each test once, with its first parameters
        once: dict[tuple[object, str], pytest.Item] = {}
        for item in items:
            if not item.get_closest_marker("slow"):
                once.setdefault((item.parent, getattr(item, "originalname", item.name)), item)
        chosen = set(once.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def eventually(satisfied: Callable[[], bool], within: float = PATIENCE) -> None:
    deadline = time.monotonic() + within
    while not satisfied():
        assert time.monotonic() < deadline
        time.sleep(2e-3)


def graphs_in(pool: mpgrad.Pool) -> int:
    """Return how many graphs the workers keep."""
    return sum(worker.graphs for worker in pool.stats().workers)


def replace_all(pool: mpgrad.Pool) -> None:
    """Kill all workers, and wait until others have taken their places."""
    dead = {worker.pid for worker in pool.stats().workers}
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not dead & {worker.pid for worker in pool.stats().workers})
    eventually(lambda: len(pool.stats().workers) >= pool.processes)


def uses_ray(item: pytest.Item) -> bool:
    return "ray_cluster" in getattr(item, "fixturenames", ())


def is_variant(item: pytest.Item, firsts: dict[tuple[object, str], list[int]]) -> bool:
    """Whether this is a test of `pool`, with further parameters, that runs with processes, too.

    Whenever tests run, the first of these parameters are tried with each engine, and the others
    with processes.
    """
    spec = getattr(item, "callspec", None)
    if spec is None or spec.params.get("pool") not in ENGINES:
        return False
    others = [id(value) for name, value in spec.params.items() if name != "pool"]
    name = getattr(item, "originalname", item.name)
    return firsts.setdefault((item.parent, name), others) != others and (
        spec.params["pool"] != ENGINES[0]
    )


def first_are_quick(count: int, params: Sequence[Any]) -> list[Any]:
    """Mark all parameters except the first ones as slow. The first ones are tried whenever tests
    run, and all of them before a change lands."""
    return [
        *params[:count],
        *(pytest.param(each, marks=pytest.mark.slow) for each in params[count:]),
    ]


def in_turn(first: Iterable[Any], second: Iterable[Any], always: int = 0) -> list[Any]:
    """For two parameters, of which all pairs are tried before a change lands: most are slow.

    Whenever tests run, each value of the first goes with so many of the second that are `always`
    tried, and with one of the others, in turn.
    """
    others = list(second)
    return [
        pytest.param(
            one,
            other,
            marks=()
            if place < always or place - always == number % (len(others) - always)
            else pytest.mark.slow,
        )
        for number, one in enumerate(first)
        for place, other in enumerate(others)
    ]


def linux_only(mechanism: str) -> pytest.MarkDecorator:
    """Skip a test of a mechanism that the portable branches do not have."""
    return pytest.mark.skipif(PORTABLE, reason=f"about {mechanism}, which only Linux has")


# --- for tests that run others, or scripts


def passes_with(plugin: Path, *names: str) -> None:
    """Check that each `test_{name}.py` passes with this pytest plug-in. Slow tests, and tests of
    engines in the caller's process, are left out.

    All run in one process, because its warm pools take longer to start than most tests.
    """
    faulthandler.cancel_dump_traceback_later()  # each of those tests has its own limit
    files = [str(file) for name in names for file in Path(__file__).parent.rglob(f"test_{name}.py")]
    assert len(files) == len(names)
    only = ["-k", "not thread and not inline", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin.stem, *only, *files]
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    # runs in the plug-in's folder, so that an installed mpgrad is found instead of the sources
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=plugin.parent,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 0, ended.stdout[-6000:]


def said_by(code: str, **environment: str) -> str:
    """What a program of ours prints, without a warning."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        "import os, resource, sys, time, psutil, torch, mpgrad\n" + code,
    ]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def quick_figures(
    script: Path, folder: Path, *arguments: str, within: float = 58
) -> tuple[list[dict[str, Any]], str]:
    """Return the figures that a quick run of a benchmark writes into its file, and what it prints.
    It must not warn."""
    file = folder / "figures.json"
    command = [
        sys.executable,
        "-W",
        "error",
        str(script),
        *arguments,
        "--quick",
        "--json",
        str(file),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=within)
    assert (ended.returncode, ended.stderr) == (0, "")
    figures: list[dict[str, Any]] = json.loads(file.read_text())["figures"]
    return figures, ended.stdout


def written_in(clone: Path) -> set[str]:
    """Return new files and folders, including ignored ones.

    Ignored folders are left out, because they belong to tools: caches, environments, the site.
    Tracked files may be edited while tests run.
    """
    command = ["git", "status", "--porcelain", "--ignored"]
    said = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True).stdout
    return {
        line
        for line in said.splitlines()
        if line.startswith("?? ") or (line.startswith("!! ") and not line.endswith("/"))
    }


@pytest.fixture(scope="module")
def leaves_the_clone_clean() -> Iterator[None]:
    """Check that the programs of this repository that the module's tests run write nothing
    there."""
    clone = Path(__file__).parents[1]
    is_clone = (clone / ".git").exists()
    before = written_in(clone) if is_clone else set()
    yield
    assert not is_clone or written_in(clone) <= before


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module's `SCRIPT`, which may import others from its folder."""
    path: Path = request.module.SCRIPT
    monkeypatch.syspath_prepend(str(path.parent))
    return importlib.import_module(path.stem)


# --- for tests that end processes


def staffed(pool: mpgrad.Pool) -> mpgrad.Pool:
    """Wait until all workers have started. A single worker may run all calls before the others have
    started.

    The calls sleep, so that they do not take the CPU from workers that import torch while they
    start.
    """
    while len(pool.stats().workers) < pool.processes:
        pool.map(time.sleep, [0.01] * (2 * pool.processes), 1)
    return pool


@pytest.fixture
def nothing_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    take_nothing_back(monkeypatch)


def gone(pids: list[int], within: float) -> bool:
    deadline = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        # reaping an orphan is not this program's task
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt. A shell makes background programs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
