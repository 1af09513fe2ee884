"""What every test shares: pools, and the guard that nothing is left behind.

A fork server takes about 2 s to import torch, so one pool is kept open for the whole session:
further pools then share its fork server and start in milliseconds. The guard compares with what was
there when a test began.
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
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import psutil
import pytest
import tqdm
from _pytest.assertion.rewrite import AssertionRewritingHook

import mpgrad
from mpgrad.engines import launch
from mpgrad.engines.launch import ForkServerLauncher, program
from mpgrad.machine.timing import Prediction
from mpgrad.scheduling.function_cache import FunctionCache
from mpgrad.system import PORTABLE

# has a process of its own
collect_ignore = [] if "MPGRAD_PRETEND" in os.environ else ["devices/pretend"]

# else inductor keeps processes, on torch 2.8 from its import on
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# torch's compiler and joblib set these when they are imported: then no worker would come from the
# session's fork server any more
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
)
os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")

OWN_NAMES = ("mpgrad", "torch_", "psm_")  # of shared memory: ours, torch's and multiprocessing's
PATIENCE = 20.0  # seconds for the system to take away what has been ended


@pytest.fixture(scope="session")
def fork_server() -> Iterator[mpgrad.Pool]:
    tqdm.tqdm.monitor_interval = 0  # else tqdm keeps a thread
    # once for the session, where a context of multiprocessing is used
    multiprocessing.resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "program", program_of_tests)
        with mpgrad.Pool(processes=1) as pool:
            pool.apply(abs, (-1,))
            yield pool


def program_of_tests(module: str, *given: Any, **options: Any) -> subprocess.Popen[bytes]:
    """In place of `mpgrad.engines.launch.program`."""
    is_server = module == "mpgrad.workers.fork_server"
    return program("fork_server_of_tests" if is_server else module, *given, **options)


@pytest.fixture(scope="session")
def shared_pools(fork_server: mpgrad.Pool) -> Iterator[Callable[[str, int], mpgrad.Pool]]:
    """Pools by engine and number of workers, each made once."""
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
    """A warm pool of each engine, shared by the whole session; for tests that do not hurt it."""
    return shared_pools(*request.param)


@pytest.fixture
def pool2(shared_pools: Callable[[str, int], mpgrad.Pool]) -> mpgrad.Pool:
    """A warm pool of two processes, for what does not depend on the engine."""
    return shared_pools("process", 2)


@pytest.fixture
def fresh_pool(fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    """A pool of two processes of the test's own, to be hurt."""
    with mpgrad.Pool(processes=2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_left_behind(shared_pools: Callable[[str, int], mpgrad.Pool]) -> Iterator[None]:
    """No process, thread, descriptor or name in /dev/shm more than before."""
    gc.collect()
    # what is still there stays: no collection of this test, or of a later one, need walk through it
    # (80 ms each)
    gc.freeze()
    before = footprint()
    yield
    ForkServerLauncher.end_unused()  # they stay for a while
    deadline = time.monotonic() + PATIENCE
    left = leftovers(before)
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        ForkServerLauncher.end_unused()  # of pools that have just ended
        left = leftovers(before)
    assert not left, f"left behind: {left}"


def footprint() -> dict[str, set[str]]:
    return {
        "processes": set(
            map(str, psutil.pids())
        ),  # of all, as it takes long to look whose children they are
        "threads": {f"{thread.ident} {thread.name}" for thread in threading.enumerate()},
        "descriptors": set(numbers_of_files()),
        "shared memory": set(names_of_shared_memory()),
    }


def names_of_shared_memory() -> Iterator[str]:
    """Names; but not those of other programs, nor multiprocessing's semaphores, which come and go
    with any of them."""
    if Path("/dev/shm").exists():
        yield from (name for name in os.listdir("/dev/shm") if name.startswith(OWN_NAMES))


def children_among(pids: set[str]) -> Iterator[str]:
    """Those of the processes that descend from this one."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if any(each.pid == os.getpid() for each in process.parents()):
                command = process.cmdline()
                if not any("multiprocessing.resource_tracker" in part for part in command):
                    yield f"{pid} {command}"


def numbers_of_files() -> Iterator[str]:
    """Descriptors, each with the numbers of its file, which take less time to ask for than its
    name."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            yield f"{name} {status.st_dev} {status.st_ino}"


def files_among(descriptors: set[str]) -> Iterator[str]:
    """Those that are not shared memory: warm pools may keep more of it than when the test began;
    its own tests look at that."""
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
    """Whether a descriptor is one of a slab's: an anonymous memory file, or one whose name has been
    removed."""
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
    """What has joined a cluster of Ray must not fork any more, as the standard library's executors
    do: its children die."""
    items.sort(key=lambda item: "ray_cluster" in getattr(item, "fixturenames", ()))
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


def pytest_collection_finish() -> None:
    """Test modules no longer lead to pytest's session, by way of the loader that rewrites their
    asserts: what looks through the user's modules would look through 200,000 objects, in each
    process."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        if spec is not None and isinstance(spec.loader, AssertionRewritingHook):
            spec.loader = module.__loader__ = SourceFileLoader(spec.name, str(spec.origin))


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
    """For parameters of which all are tried before a change lands, and the first ones whenever
    tests run: the rest is slow."""
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
    """The test is about something that the portable branches do without."""
    return pytest.mark.skipif(PORTABLE, reason=f"about {mechanism}, which only Linux has")


# --- for tests of eager backwards


@contextlib.contextmanager
def every_loss_gets(gradient: float | None, is_confirmed: bool = True) -> Iterator[None]:
    """With `graphs="auto"` this is predicted for all losses, from the first map on; None: nothing
    is.

    So backwards are eager wherever they may be. Graphs go with them, unless the prediction is not
    confirmed.
    """
    predicted = None if gradient is None else Prediction(gradient, is_confirmed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FunctionCache, "predicted", lambda self, pickled: predicted)
        yield


# --- for tests that run others, or scripts


def passes_with(plugin: Path, *names: str) -> None:
    """Each `test_{name}.py` passes with this plug-in of pytest, without what is slow or of engines
    in the caller's process.

    In one process, because its warm pools take longer to start than most tests.
    """
    faulthandler.cancel_dump_traceback_later()  # each of those tests has a limit of its own
    files = [str(file) for name in names for file in Path(__file__).parent.rglob(f"test_{name}.py")]
    assert len(files) == len(names)
    only = ["-k", "not thread and not inline", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin.stem, *only, *files]
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    # from its folder, so that an installed mpgrad is found, and not the sources
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
    """What a quick run of a benchmark, without a warning, writes into its file and prints."""
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
    """New files and folders, also ignored ones.

    Ignored folders belong to tools: caches, environments, the site. What is tracked may be edited
    while tests run.
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
    """The module's tests run programs of this repository, which write nothing there."""
    clone = Path(__file__).parents[1]
    is_clone = (clone / ".git").exists()
    before = written_in(clone) if is_clone else set()
    yield
    assert not is_clone or written_in(clone) <= before


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module's `SCRIPT`, which may import others from its folder."""
    path: Path = request.module.SCRIPT
    monkeypatch.syspath_prepend(str(path.parent))
    return importlib.import_module(path.stem)


# --- for tests that end processes


def staffed(pool: mpgrad.Pool) -> mpgrad.Pool:
    """All its workers have started: one alone may do all calls before the others have.

    The calls sleep, as they must not take the CPU from workers that import torch while they start.
    """
    while len(pool.stats().workers) < pool.processes:
        pool.map(time.sleep, [0.01] * (2 * pool.processes), 1)
    return pool


def gone(pids: list[int], within: float) -> bool:
    deadline = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        # who should reap an orphan is not our affair
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: a shell has it ignored by what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
