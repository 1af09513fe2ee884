"""Functions that close, write to, or take the place of descriptors which are not theirs; and
handlers that interrupt a send.

Daemons close all that is open. What mpgrad keeps as numbers are other files' numbers then, and so
results were announced to, zeros written behind, and frames mixed with what belongs to the user.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import itertools
import logging
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import eventually, linux_only, said_by
from inside import is_refused_workers, sleeps_soundly

import mpgrad
from mpgrad.errors import SharedMemoryError
from mpgrad.memory.arena import Arena, ForeignSlabs
from mpgrad.wire.agent_messages import CrashTraceback
from mpgrad.wire.frames import Channel
from mpgrad.wire.messages import NewSlab, Results, ReturnedSlots, StartFailure, Stop
from mpgrad.wire.pipe import HEADER, MARK, UnreadableFrame, framed
from mpgrad.wire.tensor_refs import Packer, Payload

TESTS = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ),
}
FILES = 120  # they get all numbers that mpgrad had


def close_all(but_sockets: bool) -> None:
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            if not (but_sockets and stat.S_ISSOCK(os.fstat(number).st_mode)):
                os.close(number)


def open_files(folder: Path, but_sockets: bool) -> None:
    close_all(but_sockets)
    for number in range(FILES):
        descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT)
        os.write(descriptor, b"mine")


def with_files(folder: Path, but_sockets: bool) -> torch.Tensor:
    """Large enough for a slot in shared memory."""
    open_files(folder, but_sockets)
    return torch.arange(3e5)


def are_untouched(folder: Path) -> bool:
    return {each.read_bytes() for each in folder.iterdir()} == {b"mine"}


@linux_only("memory that is reserved through a descriptor")
def test_files_in_the_place_of_shared_memory_stay_as_they_are(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """They got zeros behind their data. The worker goes on with new memory, and what it has
    borrowed stays readable."""
    item = torch.ones(100_000)
    # each worker has borrowed, and lent
    assert fresh_pool.map(torch.sum, [item] * 4, 1) == [100_000] * 4

    def fn(k: int) -> torch.Tensor:
        return with_files(tmp_path, True) + item[:1] if k == 1 else item + k

    found = fresh_pool.map(fn, range(3), 1)
    assert [each[-1].item() for each in found] == [1, 3e5, 3] and are_untouched(tmp_path)
    assert fresh_pool.stats().deaths == 0 and torch.equal(fresh_pool.apply(fn, (2,)), item + 2)


@pytest.mark.slow
def test_files_in_the_place_of_the_pipe(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """It is the death of that worker, and its call is blamed; others go on."""
    with mpgrad.Pool(2, retries=0) as pool:
        with pytest.raises(mpgrad.WorkerDiedError, match="item 1"):
            pool.map(lambda k: with_files(tmp_path, False) if k == 1 else k, range(3), 1)
        assert are_untouched(tmp_path)
        assert pool.map(abs, [-1, -2, -3], 1) == [1, 2, 3]


@pytest.mark.quick
def test_a_socket_in_the_place_of_the_pipe(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    """Frames went to whoever the function spoke with, and what that one said was read as frames."""
    path = str(tmp_path / "socket")

    def fn() -> None:
        close_all(False)
        for _ in range(20):
            end = socket.socket(socket.AF_UNIX)
            end.connect(path)
            end.detach()

    with socket.socket(socket.AF_UNIX) as listener, mpgrad.Pool(1, retries=0) as pool:
        listener.bind(path)
        listener.listen(20)
        with pytest.raises(mpgrad.WorkerDiedError):
            pool.apply(fn)
        for _ in range(20):
            with listener.accept()[0] as end:
                assert end.recv(4096) == b""


@linux_only("what is forked from a process with threads")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_the_caller_that_becomes_a_daemon(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    """It closes all, and opens files. The end of a result was written into one of them, and closed
    others."""
    results: list[object] = fresh_pool.map(lambda k: torch.full((100_000,), k), range(4), 1)
    for folder in (tmp_path / "of_caller", tmp_path / "of_worker"):
        folder.mkdir()

    def become(folder: Path, held: list[object]) -> int:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                open_files(folder, False)
                held.clear()
                gc.collect()
                if grandchild := os.fork():
                    os.waitpid(grandchild, 0)
                status = sum(os.write(each, b"") for each in range(3, 3 + FILES))  # all are open
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    # then it is woken when there is something to give back
    eventually(lambda: sleeps_soundly(fresh_pool))
    children = [
        become(tmp_path / "of_caller", results),
        fresh_pool.apply(lambda tensor: become(tmp_path / "of_worker", [tensor]), (results[0],)),
    ]
    assert children == [0, 0]
    assert are_untouched(tmp_path / "of_caller") and are_untouched(tmp_path / "of_worker")


CLOSES_ALL = """
import os, sys, torch, mpgrad
from test_descriptors import close_all
pool = mpgrad.Pool(1)
items = [torch.ones(10_000_000)] * 2  # each has memory of its own
results = pool.map(torch.neg, items, 1)
child = os.fork()
if child == 0:
    close_all(False)
    del results
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for _ in range(2):
    assert [
        each.sum() for each in pool.map(lambda x: close_all(True) or x * 2, items, 1)
    ] == [2e7] * 2
assert pool.stats().deaths == 0
"""


@pytest.mark.slow
@linux_only("memory that has a descriptor")
def test_memory_ends_well_without_its_descriptor() -> None:
    """PyTorch aborts the process, child or worker, where the descriptor of shared memory was closed
    by others."""
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", CLOSES_ALL]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=58, cwd=Path(__file__).parent, env=TESTS
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def socket_of_worker() -> int:
    """The only one that it has for frames."""
    (number,) = (
        each
        for each in range(3, 256)
        if os.path.exists(f"/proc/self/fd/{each}") and is_stream(each)
    )
    return number


def is_stream(number: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return False
    with socket.socket(fileno=os.dup(number)) as found:
        return found.type is socket.SOCK_STREAM


GARBAGE = [
    bytes(64),
    pytest.param(b"a line of text\n" * 10, marks=pytest.mark.slow),
    pytest.param(b"\x08" + bytes(7) + b"\x00" * 12 + b"no pickle", marks=pytest.mark.slow),
]


@linux_only("/proc")
@pytest.mark.parametrize("garbage", GARBAGE, ids=["zeros", "text", "short"])
def test_garbage_on_the_pipe_is_the_death_of_that_worker(
    garbage: bytes, fork_server: mpgrad.Pool
) -> None:
    """One frame that could not be read broke the whole pool, or had it wait for a frame of
    exabytes."""
    with mpgrad.Pool(2, retries=0) as pool:
        future = pool.submit(time.sleep, 0.3)
        with pytest.raises(mpgrad.WorkerDiedError, match=r"item 1.*what it sent is not a message"):
            pool.map(lambda k: os.write(socket_of_worker(), garbage) if k == 1 else k, range(3), 1)
        assert future.result() is None
        assert pool.map(abs, [-1, -2, -3], 1) == [1, 2, 3]


class Raises:
    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> object:
        return exec, (f"raise {self._text}",)


def header(pickled: int, payload: int = 0, descriptors: int = 0) -> bytes:
    return HEADER.pack(MARK, pickled, payload, descriptors)


def results(chunk: int, outcomes: Any) -> Results:
    return Results(chunk, outcomes, 0.0, 0.0, 0.0, False, [], [], 0)


FORGED = {
    "two at a time": framed([1], [], 3) + framed([CrashTraceback()], []),
    "exabytes": header(1 << 63, 1 << 63),
    "terabytes": header(1 << 45),
    "too many descriptors": header(4, 0, 1 << 20),
    "no descriptor": framed([CrashTraceback()], []),
    "no slab": framed([NewSlab(7, 4096)], []),
    "an integer": framed(5, []),  # type: ignore[arg-type]
    "nothing": framed(None, []),  # type: ignore[arg-type]
    "strings": framed(["a"], []),
    "of the parent": framed([Stop()], []),
    "of the start": framed([StartFailure(None)], []),  # type: ignore[arg-type]
    "exits": framed([Raises("SystemExit(3)")], []),
    "interrupts": framed([Raises("KeyboardInterrupt")], []),
    "unknown chunk": framed([results(1 << 40, [])], []),
    "no outcomes": framed([results(3, 5)], []),
    "not lent": framed([ReturnedSlots([(1 << 50, 1)])], []),
}


@linux_only("/proc")
@pytest.mark.parametrize(
    "what", [*list(FORGED)[:1], *(pytest.param(k, marks=pytest.mark.slow) for k in [*FORGED][1:])]
)
def test_a_frame_that_makes_no_sense_is_the_death_of_that_worker(
    what: str, fork_server: mpgrad.Pool
) -> None:
    """Where the mark was right it broke the whole pool: sizes, descriptors and messages were
    believed."""
    with mpgrad.Pool(2, retries=0) as pool:
        future = pool.submit(time.sleep, 0.3)
        with pytest.raises(
            mpgrad.WorkerDiedError, match=r"item 1.*what it sent is not a message"
        ) as raised:
            pool.map(
                lambda k: (
                    (os.write(socket_of_worker(), FORGED[what]), time.sleep(60)) if k == 1 else k
                ),
                range(3),
                1,
            )
        assert isinstance(raised.value.__cause__, UnreadableFrame)
        assert future.result() is None
        assert pool.map(abs, [-1, -2, -3], 1) == [1, 2, 3]


@linux_only("the C library's fork")
@pytest.mark.slow
def test_a_task_that_forks_in_c(fork_server: mpgrad.Pool) -> None:
    """Python does not know of the child, which answers, too: an answer that nobody waited for broke
    the pool."""
    with mpgrad.Pool(1, retries=0) as pool:
        with contextlib.suppress(mpgrad.WorkerDiedError):
            pool.map(lambda k: ctypes.CDLL(None).fork() and k, [1, 2], 1)
        with contextlib.suppress(mpgrad.WorkerDiedError):
            pool.apply(time.sleep, (0.1,))
        assert pool.map(abs, [-1, -2, -3], 1) == [1, 2, 3]


# --- what interrupts a send


HANDLERS = ["prints", "logs", "raises"]


@linux_only("timers that interrupt a system call many times a second")
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_signal_while_a_frame_is_being_sent(
    handler: str, fork_server: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that printed or logged put its frame into the middle of the other; one that raised
    left a half of it."""

    def fn(k: int) -> int:
        rungs, may_raise = itertools.count(1), False

        def ring(number: int, frame: object) -> None:
            nonlocal may_raise
            rung = next(rungs)  # a handler may interrupt a handler
            if handler == "prints":
                print(f"rung {rung} " + "r" * 50_000)
            elif handler == "logs":
                logging.getLogger("ringing").error("rung %d %s", rung, "r" * 50_000)
            elif may_raise:
                may_raise = False
                raise TimeoutError

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for line in range(60):
                with contextlib.suppress(TimeoutError):
                    may_raise = True
                    print(f"line {line} " + "x" * 200_000)
                    may_raise = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return next(rungs) - 1

    out = io.StringIO()
    with mpgrad.Pool(1, retries=0) as pool, contextlib.redirect_stdout(out):
        (rung,) = pool.map(fn, [0])
        assert pool.apply(abs, (-1,)) == 1
    text = out.getvalue() + "".join(
        each.getMessage() for each in caplog.records if each.name == "ringing"
    )
    numbers = [int(found) for found in re.findall(r"line (\d+) x{200000}", text)]
    assert rung > 0 and numbers == sorted(set(numbers))
    if handler == "raises":
        # what was interrupted may be missing, but nothing is torn
        assert re.fullmatch(r"(line \d+ x{200000}|\n)*", text)
    else:
        assert numbers == list(range(60))
        assert sorted(map(int, re.findall(r"rung (\d+) r{50000}", text))) == list(
            range(1, rung + 1)
        )


class Interrupted(str):
    """While it is added to what was written before, another thread writes: a switch at the worst
    moment."""

    def __radd__(self, before: str) -> str:
        write_elsewhere()
        return before + str(self)


def write_elsewhere() -> None:
    thread = threading.Thread(target=lambda: sys.stdout.write("of another thread\n"))
    thread.start()
    thread.join()


@pytest.mark.quick
def test_threads_of_a_task_that_print_at_once(pool2: mpgrad.Pool) -> None:
    """The line that was being gathered had no lock: parts of it were lost, or came twice."""

    def fn(k: int) -> None:
        sys.stdout.write("begins, ")
        sys.stdout.write(Interrupted("ends"))
        write_elsewhere()

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        pool2.map(fn, [0])
    assert out.getvalue().replace("of another thread\n", "") == "begins, ends"
    assert out.getvalue().count("of another thread\n") in (1, 2)


def test_statistics_without_a_free_descriptor(pool2: mpgrad.Pool) -> None:
    # symptom: OSError from `stats`. cause: how much memory a worker has is read from a file.
    pool2.map(abs, [-1] * 8, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        found = pool2.stats()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [each.resident_bytes for each in found.workers] == [0, 0] and found.calls >= 8


PATIENCE = 20.0  # seconds


@pytest.fixture
def no_descriptors() -> Iterator[Any]:
    """Take all descriptors away, and give them back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_pool_without_workers_for_a_moment(
    fork_server: mpgrad.Pool,
    no_descriptors: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The successor of a worker that had done its calls could not be started, and nobody tried
    again."""
    # the pool must not break before this thread has looked
    monkeypatch.setattr("mpgrad.scheduling.supervisor.START_PATIENCE", 3 * PATIENCE)
    word, go = tmp_path / "word", tmp_path / "go"

    def waits(x: int) -> int:
        word.touch()
        while not go.exists():
            time.sleep(1e-3)
        return x

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with mpgrad.Pool(1, maxtasksperchild=1) as pool:
        pool.map(abs, [1])
        result = pool.map_async(waits, [1, 2], chunksize=1)
        while not word.exists():
            time.sleep(1e-3)
        no_descriptors()
        os.symlink("/", go)  # takes no descriptor
        eventually(lambda: is_refused_workers(pool))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert result.get(PATIENCE) == [1, 2]


@pytest.mark.slow
def test_a_frame_that_is_half_sent_needs_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be killed: it waited for the rest of a frame for ever, and its calls for
    it."""

    def refuse(descriptors: Any) -> list[int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with mpgrad.Pool(1, engine="thread") as pool:
        pool.map(abs, [1])
        monkeypatch.setattr("mpgrad.wire.pipe.duplicates", refuse)
        result = pool.map_async(len, [bytes(1 << 22)])  # more than a pipe takes at once
        assert result.get(PATIENCE) == [1 << 22]


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, (1 << 32, 64)])
def test_captures_that_cannot_be_mapped_are_given_back(block: tuple[int, int] | None) -> None:
    """The first was; those behind it, which nobody had looked at, stayed in use for as long as the
    pool lived.

    Only captures on devices have slots of their own, so this asks the worker's side directly.
    """
    from mpgrad.workers.memory import WorkerDevice, WorkerMemory

    ref = Payload().add(Packer(Arena(1)).pack(torch.zeros(4), 0))
    refs = [ref._replace(place=number << 32) for number in (2, 3, 4)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        memory = WorkerMemory(1, Channel(theirs, blocking=True), WorkerDevice())
        for number in range(1, 5):
            memory._foreign_slabs.attach(number, None, 4096)  # no descriptor was free
        with pytest.raises(mpgrad.SharedMemoryError):
            memory.captures(block, refs)
    returned = [ref.place for ref in refs] + ([] if block is None else [block[0]])
    assert sorted(memory.take_returns()) == sorted((address, 1) for address in returned)


@pytest.mark.slow
def test_many_open_files() -> None:
    """Above 1,024 descriptors any death, and the end, broke the pool: `select` knows no more."""
    code = (
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))\n"
        "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]\n"
        "with mpgrad.Pool(2) as pool:\n"
        "    pool.map(abs, range(8), chunksize=1)\n"
        "    result = pool.map_async(lambda x: time.sleep(0.3) or x, [1, 2])\n"
        "    time.sleep(0.1); os.kill(pool.stats().workers[0].pid, 9)\n"
        "    print(result.get(20))\n"
    )
    assert said_by(code) == "[1, 2]\n"


@pytest.mark.slow
def test_a_pool_for_which_no_descriptor_is_left() -> None:
    """It counted as a user of the fork server, which stayed when all pools had ended; and so did
    its pipe."""
    code = (
        "from mpgrad.engines.launch import ForkServerLauncher\n"
        "first = mpgrad.Pool(1)\n"
        "assert first.map(abs, [-1]) == [1]\n"
        "before = psutil.Process().num_fds()\n"
        "for spare in range(3):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, "
        "resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "    held = []\n"
        "    try:\n"
        "        while True: held.append(os.dup(0))\n"
        "    except OSError: pass\n"
        "    for _ in range(spare): os.close(held.pop())\n"
        "    try: mpgrad.Pool(1)\n"
        "    except OSError as error: print(error.errno == 24, end=' ')\n"
        "    for each in held: os.close(each)\n"
        "    assert psutil.Process().num_fds() == before, spare\n"
        "first.terminate()\n"
        "ForkServerLauncher.end_unused()\n"
        "print(psutil.Process().children())\n"
    )
    assert said_by(code) == "True True True []\n"


LARGE = 10 << 20  # elements, whose memory is a slab of its own


def forget_first_slab(lost: list[int]) -> Callable[..., None]:
    """In place of `ForeignSlabs.attach`: as where no descriptor is free for the first slab that
    comes."""
    attach = ForeignSlabs.attach

    def attached(self: ForeignSlabs, number: int, descriptor: int | None, nbytes: int) -> None:
        if not lost and descriptor is not None:
            lost.append(number)
            os.close(descriptor)
            descriptor = None
        attach(self, number, descriptor, nbytes)

    return attached


def lose_first_slab() -> None:
    ForeignSlabs.attach = forget_first_slab([])  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_slab_for_which_no_descriptor_was_free_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was not, and everything that was put there from then on could not be had."""
    lost: list[int] = []
    with mpgrad.Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]  # it is there, with its first slab
        monkeypatch.setattr(ForeignSlabs, "attach", forget_first_slab(lost))
        with pytest.raises(SharedMemoryError, match="no file descriptor was free"):
            pool.map(torch.ones, [LARGE])
        assert lost
        for _ in range(3):
            assert pool.map(torch.ones, [LARGE])[0].sum() == LARGE


@pytest.mark.slow
def test_likewise_in_a_worker() -> None:
    with mpgrad.Pool(1, initializer=lose_first_slab) as pool:
        with pytest.raises(SharedMemoryError, match="no file descriptor was free"):
            pool.map(torch.sum, [torch.ones(100_000)])
        for _ in range(3):
            assert pool.map(torch.sum, [torch.ones(100_000)] * 3) == [100_000] * 3
