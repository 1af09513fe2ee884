"""A worker that ends in peace ends like a Python process: what tasks have written is in its file,
and their objects are finalized."""

from __future__ import annotations

import csv
import gzip
import json
import logging.handlers
import multiprocessing.forkserver
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import first_are_quick, gone, linux_only, staffed
from inside import handles, in_scheduling_thread

import mpgrad
from mpgrad.machine.under_way import Chunk
from mpgrad.pickling.modules import UncarriedName
from mpgrad.workers import ending

ITEMS = 20
EXIT_PATIENCE = "mpgrad.scheduling.supervisor.EXIT_PATIENCE"
text = compressed = rows = kept = counter = generator = None  # set in workers, by `opens`


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that a busy machine stops for some seconds is not killed at its end."""
    monkeypatch.setattr(EXIT_PATIENCE, 30.0)


class Holder:
    """An object that holds a file, which nothing else does."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.itself = self


class Counter:
    """An object that writes at its end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: list[str] = []

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            file.write("".join(self.lines))


def writes_at_its_end(path: str, counter: Counter) -> Iterator[None]:
    try:
        yield
    finally:
        write(path, counter)


def write(path: str, counter: Counter) -> None:
    with open(path, "a") as file:
        file.write("".join(counter.lines))


def opens(folder: str) -> None:
    """Open files of each kind, and make objects of each kind that write at the end."""
    global text, compressed, rows, kept, counter, generator

    def path(name: str) -> str:
        return f"{folder}/{name}-{os.getpid()}"

    text = open(path("text"), "w")  # noqa: SIM115
    compressed = gzip.open(path("compressed"), "wt")  # noqa: SIM115
    rows = csv.writer(open(path("rows"), "w", newline=""), lineterminator="\n")  # noqa: SIM115
    kept = Holder(open(path("kept"), "wb"))  # noqa: SIM115
    counter = Counter(path("counter"))
    generator = writes_at_its_end(path("generator"), counter)
    next(generator)
    weakref.finalize(kept, write, path("finalizer"), counter)
    json.text = open(path("library"), "w")  # type: ignore[attr-defined] # noqa: SIM115
    target = logging.FileHandler(path("log"))
    logger = logging.getLogger("endings")
    logger.addHandler(logging.handlers.MemoryHandler(1000, target=target))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def writes(_: int) -> None:
    assert text and compressed and rows and kept and counter
    text.write("line\n")
    compressed.write("line\n")
    rows.writerow(["line"])
    kept.file.write(b"line\n")
    counter.lines.append("line\n")
    json.text.write("line\n")  # type: ignore[attr-defined]
    logging.getLogger("endings").info("line")


KINDS = (
    "text",
    "compressed",
    "rows",
    "kept",
    "counter",
    "generator",
    "finalizer",
    "library",
    "log",
)


def lines_in(folder: Path) -> dict[str, int]:
    """How many lines were written, by kind."""
    found = dict.fromkeys(KINDS, 0)
    for path in folder.iterdir():
        kind = path.name.partition("-")[0]
        content = path.read_bytes()
        content = gzip.decompress(content) if kind == "compressed" else content
        assert content == b"line\n" * content.count(b"\n")
        found[kind] += content.count(b"\n")
    return found


ALL = dict.fromkeys(KINDS, ITEMS)


def joins(folder: Path, **options: Any) -> None:
    pool = mpgrad.Pool(2, opens, (str(folder),), **options)
    pool.map(writes, range(ITEMS), 1)
    pool.close()
    pool.join()


def leaves_the_block(folder: Path, **options: Any) -> None:
    with mpgrad.Pool(2, opens, (str(folder),), **options) as pool:
        staffed(pool).map(writes, range(ITEMS), 1)


def replaces_workers(folder: Path) -> None:
    joins(folder, maxtasksperchild=3)


def resizes(folder: Path) -> None:
    with mpgrad.Pool(2, opens, (str(folder),)) as pool:
        pids = [worker.pid for worker in staffed(pool).stats().workers]
        pool.map(writes, range(ITEMS), 1)
        pool.resize(1)
        while all(map(os.path.exists, map("/proc/{}".format, pids))):
            time.sleep(0.01)


def shuts_an_executor_down(folder: Path) -> None:
    with mpgrad.Executor(2, initializer=opens, initargs=(str(folder),)) as executor:
        staffed(executor._pool)
        list(executor.map(writes, range(ITEMS), chunksize=1))
        pids = [worker.pid for worker in executor.stats().workers]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # `shutdown` waits for them


def forgets_the_pool(folder: Path) -> None:
    pool = staffed(mpgrad.Pool(2, opens, (str(folder),)))
    pool.map(writes, range(ITEMS), 1)
    pids = [worker.pid for worker in pool.stats().workers]
    del pool
    assert gone(pids, within=20)


@pytest.mark.quick
@pytest.mark.parametrize(
    "ends",
    [
        joins,
        leaves_the_block,
        replaces_workers,
        pytest.param(resizes, marks=linux_only("/proc")),
        shuts_an_executor_down,
        forgets_the_pool,
    ],
)
def test_what_tasks_have_written_is_there(
    fork_server: mpgrad.Pool, tmp_path: Path, ends: Callable[[Path], None]
) -> None:
    ends(tmp_path)
    assert lines_in(tmp_path) == ALL


@pytest.mark.parametrize(
    "context",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("ends", first_are_quick(1, [joins, leaves_the_block]))
def test_with_each_start_method(
    fork_server: mpgrad.Pool, tmp_path: Path, ends: Callable[..., None], context: str
) -> None:
    ends(tmp_path, context=context)
    if context == "forkserver":
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    assert lines_in(tmp_path) == ALL


def test_a_worker_whose_calls_were_all_taken_back(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """Symptom: now and then, the lines of a worker were lost at the end of a with block. Cause: it
    had not answered a message whose calls other workers had run, and so it was killed."""
    with mpgrad.Pool(1, opens, (str(tmp_path),)) as pool:
        pool.map(writes, range(ITEMS))
        (worker,) = handles(pool)
        chunk = Chunk(None, [], [], None, None)
        in_scheduling_thread(pool, lambda: worker.under_way.add(-1, chunk, time.monotonic()))
        while not worker.under_way:
            time.sleep(0.002)
    assert lines_in(tmp_path) == ALL


class Loading:
    """A function that loads for a long time in a worker."""

    def __init__(self) -> None:
        self.caller = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["caller"]:
            time.sleep(600)

    def __call__(self) -> None:
        """Do nothing."""


def test_a_worker_that_loads_a_function_is_not_waited_for(fork_server: mpgrad.Pool) -> None:
    """Symptom: a with block ended 2 s late. Cause: a worker that was loading a function counted as
    idle when other workers had run its calls."""
    with mpgrad.Pool(1) as pool:
        staffed(pool).submit(Loading())
        (worker,) = handles(pool)
        while not worker.under_way or worker.under_way.progress.started is not None:
            time.sleep(0.002)
        for chunk in worker.under_way.chunks.values():
            chunk.calls.clear()
    assert worker.exit_code == -signal.SIGKILL  # None if it was given up


def test_forks_leave_what_is_the_callers_alone(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """Files of the caller are written once, and its objects are finalized once."""
    unwritten = open(tmp_path / "caller", "w")  # noqa: SIM115
    unwritten.write("line\n")
    own = Counter(str(tmp_path / "own"))
    own.lines.append("line\n")
    handler = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(tmp_path / "log"))
    handler.emit(logging.makeLogRecord({"msg": "line", "levelno": logging.INFO}))
    finalizer = weakref.finalize(own, write, str(tmp_path / "finalizer"), own)
    with mpgrad.Pool(1, context="fork") as pool:
        pool.apply(abs, (-1,))
    assert {each.name: each.stat().st_size for each in tmp_path.iterdir()} == {
        "caller": 0,
        "log": 0,
    }
    assert finalizer.detach()
    handler.target.close()  # type: ignore[union-attr]
    handler.target = None
    handler.close()
    unwritten.close()


def test_a_worker_leaves_the_package_alone() -> None:
    """Symptom: a NameError at the end of a forked worker, now and then. Cause: in a clone, this
    package counted as the user's, and its globals were dropped."""
    found = ending.own_globals([ending.clear, vars(ending), writes, globals()])
    assert any(each is globals() for each in found)
    assert not any(each is vars(ending) for each in found)


def begins_a_thread(path: str) -> None:
    def waits_and_writes() -> None:
        time.sleep(0.1)
        Path(path).touch()

    thread.append(ThreadPoolExecutor(1))
    thread[0].submit(waits_and_writes)
    threading.Thread(target=waits_and_writes).start()


thread: list[Any] = []


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_threads_of_tasks_are_waited_for(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    pool = mpgrad.Pool(1)
    pool.apply(begins_a_thread, (str(tmp_path / "left"),))
    pool.close()
    pool.join()
    assert (tmp_path / "left").exists()


class Hanging:
    def __del__(self) -> None:
        while True:
            time.sleep(1)


class Failing:
    def __del__(self) -> None:
        raise ValueError("a finalizer that fails")


def makes(kind: type, folder: str) -> None:
    global text, kept, counter
    kept = kind()
    counter = Counter(f"{folder}/counter-{os.getpid()}")
    text = open(f"{folder}/text-{os.getpid()}", "w")  # noqa: SIM115


def writes_text(_: int) -> None:
    assert text is not None and kept is not None and counter is not None
    text.write("line\n")
    counter.lines.append("line\n")


@pytest.mark.parametrize(("kind", "finalized"), [(Failing, ITEMS), (Hanging, 0)])
def test_finalizers_that_fail_or_hang(
    fork_server: mpgrad.Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    finalized: int,
) -> None:
    """One that hangs does not keep the pool from ending, and files have been written by then."""
    if kind is Hanging:
        monkeypatch.setattr(EXIT_PATIENCE, 2.0)  # as outside of tests
    pool = mpgrad.Pool(1, makes, (kind, str(tmp_path)))
    pool.map(writes_text, range(ITEMS))
    pool.close()
    pool.join()
    found = lines_in(tmp_path)
    assert (found["text"], found["counter"]) == (ITEMS, finalized)


def test_an_object_that_stands_for_what_was_not_sent_does_not_disturb_the_end() -> None:
    """Any use of it raises, even a look at its class."""
    place = {"first": 1, "missing": UncarriedName("it was not sent"), "last": 2, "kept": int}
    ending.clear([place])
    assert place == {"kept": int}
