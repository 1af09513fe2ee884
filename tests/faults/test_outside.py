"""Faults of the outside: little memory, few descriptors, large and many tensors, threads, forks,
signals, abrupt ends.

What limits a whole process runs in a program of its own, which the test starts.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from conftest import PATIENCE, eventually, gone, linux_only, staffed
from inside import graphs_known, handles

import mpgrad
from mpgrad.system import PORTABLE

pytestmark = pytest.mark.slow

MIB = 1 << 20
GIB = 1 << 30
# the whole of it, once by hand: 1,000,000 and 100,000
TINY_CALLS = 20_000
CALLS_WITH_GRAPHS = 2_000
# by which a process of 230 MiB may grow between the second and the last tenth of these
NOISE = 2 * MIB
LARGE = 2 * GIB + 4096 + 3  # bytes: more than 31 bits can say, and no whole pages
# bytes of memory: item, result, their slots and as much again for whoever else runs
LARGE_NEEDS = 9 * GIB

BEGIN = """
import faulthandler, gc, logging, os, resource, sys, time
faulthandler.dump_traceback_later(50, exit=True)
import torch, mpgrad

# these tiny calls are too cheap
logging.getLogger("mpgrad").addFilter(lambda record: "maps took" not in str(record.msg))
MIB = 1 << 20

def works(pool):
    x = torch.ones(3, requires_grad=True)
    sum(r.sum() for r in pool.map(lambda t: t * 2, [x] * 6)).backward()
    assert x.grad.tolist() == [12, 12, 12]

def limit(what, to):
    resource.setrlimit(what, (to, resource.getrlimit(what)[1]))

def unlimited(what):
    limit(what, resource.getrlimit(what)[1])

def error_of(action):
    try:
        action()
    except Exception as error:
        return error

def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
"""


def run(code: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    """What a program prints; it has to end well and say nothing on stderr."""
    # from Python 3.12 on it says that a fork of a process with threads may hang; the tests that
    # fork see that it does not
    command = [
        *before,
        sys.executable,
        "-W",
        "ignore:This process:DeprecationWarning",
        "-c",
        BEGIN + code,
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=58)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    return ended.stdout


def works(pool: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    sum(r.sum() for r in pool.map(lambda t: t * 2, [x] * 6)).backward()
    assert x.grad is not None and x.grad.tolist() == [12, 12, 12]


# --- little of something

SMALL = """
free = os.statvfs("/dev/shm")
assert free.f_blocks * free.f_frsize <= 16 * MIB
more = os.environ["TMPDIR"] + "/more"
assert isinstance(error_of(lambda: open(more, "wb").write(bytes(MIB))), OSError)
before = os.listdir("/dev/shm")
nbytes = 0
with mpgrad.Pool(2) as pool:
    while nbytes < 1024 * MIB:
        xs = [torch.full((MIB,), float(k), requires_grad=True) for k in range(16)]
        ys = pool.map(lambda t: t * 3, xs)
        sum(y.sum() for y in ys).backward()
        assert all(y[0] == y[-1] == 3 * k for k, y in enumerate(ys))
        assert all(x.grad[0] == x.grad[-1] == 3 for x in xs)
        nbytes += 4 * sum(y.nbytes for y in ys)  # items, results, and the gradients of both
        assert os.listdir("/dev/shm") == before
print("right")
"""


@linux_only("memfd: memory that is no file of /dev/shm")
def test_a_small_dev_shm_and_a_full_disk(tmp_path: Path) -> None:
    mounts = (
        "mount --make-rprivate / && mount -t tmpfs -o size=16m tmpfs /dev/shm && "
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && "
    )
    fill = (
        f"{{ cat /dev/zero > {tmp_path}/full 2>/dev/null; true; }} && export TMPDIR={tmp_path} && "
    )
    tried = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounts + "true"], capture_output=True, text=True
    )
    if tried.returncode != 0:
        pytest.skip(
            "needs a mount namespace of its own, which only root may have here "
            f"({tried.stderr.strip()})"
        )
    assert (
        run(SMALL, before=("unshare", "-m", "sh", "-c", mounts + fill + 'exec "$0" "$@"'))
        == "right\n"
    )


FEW_DESCRIPTORS = """
limit(resource.RLIMIT_NOFILE, 64)
with mpgrad.Pool(2) as pool:
    for _ in range(int(sys.argv[1])):
        with mpgrad.Pool(2) as other:
            works(other)
    for _ in range(100):
        works(pool)
    xs = [torch.ones(MIB // 4, requires_grad=True) for _ in range(100)]
    sum(y.sum() for y in pool.map(lambda t: t * 2, xs)).backward()
    assert all(x.grad[0] == x.grad[-1] == 2 for x in xs)
    kept = [mpgrad.Pool(2) for _ in range(4)]
    for other in kept:
        works(other)
    for other in kept:
        other.terminate()
    works(pool)
print("right")
"""


NO_DESCRIPTORS = """
limit(resource.RLIMIT_NOFILE, 64)
with mpgrad.Pool(2) as pool:
    works(pool)
    room = 60 - len(os.listdir("/proc/self/fd"))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(room)]
    # each result has a slab, and so a descriptor, of its own
    error = error_of(lambda: pool.map(lambda k: torch.full((9 * MIB,), float(k)), range(8)))
    assert isinstance(error, (OSError, MemoryError)), repr(error)
    for each in taken:
        os.close(each)
    works(pool)
    unlimited(resource.RLIMIT_NOFILE)
    assert len(pool.map(lambda k: torch.full((9 * MIB,), float(k)), range(8))) == 8
    works(pool)
print("right")
"""


NO_DESCRIPTORS_FOR_A_WORKER = """
import logging
logging.getLogger("mpgrad").setLevel("ERROR")  # it warns that it has fewer workers than it should
with mpgrad.Pool(2) as pool:
    works(pool)
    works(pool)  # in this process, perhaps: what is imported for that is imported now
    limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")))
    pool.resize(4)
    works(pool)
    unlimited(resource.RLIMIT_NOFILE)
    works(pool)
print("right")
"""


NO_DESCRIPTORS_AT_THE_START = """
limit(resource.RLIMIT_NOFILE, 64)
taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(64 - len(os.listdir("/proc/self/fd")))]
error = error_of(lambda: mpgrad.Pool(2))
assert isinstance(error, OSError) and "open files" in str(error), repr(error)
for each in taken:
    os.close(each)
before = len(os.listdir("/proc/self/fd"))
with mpgrad.Pool(2) as pool:
    works(pool)
print("right")
"""


def test_few_descriptors_and_none() -> None:
    """At the start, for a result, for a further worker; and 64 are enough for pools, maps and large
    tensors."""
    pools = 3 if PORTABLE else 10  # workers that are spawned take a second to start
    code = (
        NO_DESCRIPTORS_AT_THE_START + NO_DESCRIPTORS + FEW_DESCRIPTORS + NO_DESCRIPTORS_FOR_A_WORKER
    )
    assert run(code, str(pools)) == "right\n" * 4


PARENT_LIMITS = """
for what in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
    large = torch.ones(25 * MIB, requires_grad=True)
    with mpgrad.Pool(2) as pool:
        works(pool)
        limit(what, MIB if what == resource.RLIMIT_FSIZE else address_space() + 90 * MIB)
        for _ in range(3):
            error = error_of(lambda: pool.map(lambda t: t.sum(), [large]))
            assert isinstance(error, mpgrad.SharedMemoryError), repr(error)
            assert "104,857,600 bytes requested" in str(error), repr(error)
            works(pool)
        unlimited(what)
        pool.map(lambda t: t.sum(), [large])[0].backward()
        assert large.grad[0] == large.grad[-1] == 1
    print("right")
"""


NO_ROOM_FOR_A_RESULT = """
with mpgrad.Pool(2) as pool:
    works(pool)
    limit(resource.RLIMIT_AS, address_space() + 90 * MIB)
    error = error_of(lambda: pool.map(lambda k: torch.ones(25 * MIB), [1]))
    assert isinstance(error, MemoryError), repr(error)
    works(pool)
    unlimited(resource.RLIMIT_AS)
    works(pool)
print("right")
"""


NO_ROOM_FOR_A_MESSAGE = """
logging.getLogger("mpgrad").addHandler(logging.NullHandler())  # of messages that could not be read
# retried by workers that the limit does not hold for: it may for their successors
with mpgrad.Pool(2, retries=1) as pool:
    works(pool)
    limit(resource.RLIMIT_AS, address_space() + 90 * MIB)
    error = error_of(lambda: pool.map(lambda k: "x" * k, [100 * MIB]))
    assert isinstance(error, MemoryError), repr(error)
    works(pool)
print("right")
"""


def test_no_room_in_the_parent() -> None:
    """For an item, a result, a message."""
    assert run(PARENT_LIMITS + NO_ROOM_FOR_A_RESULT + NO_ROOM_FOR_A_MESSAGE) == "right\n" * 4


LIMITED_FILES = """
before = resource.getrlimit(resource.RLIMIT_FSIZE)
limit(resource.RLIMIT_FSIZE, MIB)

def in_a_pool(initializer=None):
    with mpgrad.Pool(1, initializer=initializer) as pool:
        pool.map(torch.sum, [torch.ones(MIB)])

def limited():
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

errors = [error_of(in_a_pool)]
resource.setrlimit(resource.RLIMIT_FSIZE, before)
errors.append(error_of(lambda: in_a_pool(limited)))
for error in errors:
    assert isinstance(error, mpgrad.SharedMemoryError), error
    assert "1,048,576 bytes" in str(error) and "ulimit -f" in str(error), error
in_a_pool()
print("right")
"""


@pytest.mark.slow
@linux_only("memory that is a file")
def test_a_limit_on_the_size_of_files_is_named() -> None:
    """For the caller, and for workers, which ended three times in a row; it said "no room", with
    many gigabytes free."""
    assert run(LIMITED_FILES) == "right\n"


def limit_address_space(further: int) -> None:
    resource.setrlimit(
        resource.RLIMIT_AS, (psutil.Process().memory_info().vms + further, resource.RLIM_INFINITY)
    )


def test_tasks_without_memory(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(2, initializer=limit_address_space, initargs=(300 * MIB,)) as pool:
        works(pool)
        with pytest.raises(MemoryError) as caught:
            pool.map(lambda k: len(bytearray(k)), [GIB])
        assert any("item 0" in note and "phase: forward" in note for note in caught.value.__notes__)
        with pytest.raises(RuntimeError, match="can't allocate memory"):  # torch's own word for it
            pool.map(lambda k: torch.ones(k).sum(), [GIB])
        # the last of the address space goes to a tensor of the task, or to the slab of its result
        with pytest.raises((RuntimeError, mpgrad.SharedMemoryError), match=r"20,?971,?520"):
            pool.map(lambda k: torch.ones(5 * MIB), range(40), 1)
        works(pool)
        assert pool.stats().deaths == 0


def test_no_room_for_an_item_in_a_worker(
    fork_server: mpgrad.Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    with mpgrad.Pool(2, initializer=limit_address_space, initargs=(90 * MIB,)) as pool:
        with pytest.raises(MemoryError):
            pool.map(lambda t: t.sum(), [torch.ones(25 * MIB)])
        works(pool)
        assert pool.stats().deaths == 0
    assert capfd.readouterr().err == ""


# --- large and many


def test_a_tensor_of_more_than_two_gibibytes(fresh_pool: mpgrad.Pool) -> None:
    if "MPGRAD_LARGE_TESTS" not in os.environ:
        pytest.skip("takes 15 to 30 s to touch the pages; set MPGRAD_LARGE_TESTS to have it")
    available = psutil.virtual_memory().available
    if available < LARGE_NEEDS:
        pytest.skip(f"needs {LARGE_NEEDS >> 30} GiB of memory ({available >> 30} are available)")
    x = torch.zeros(LARGE, dtype=torch.uint8)
    places = [0, (1 << 31) - 1, 1 << 31, LARGE - 1]
    x[places] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    (y,) = fresh_pool.map(lambda t: t, [x])
    assert y.shape == x.shape and y[places].tolist() == [1, 2, 3, 4] and int(y[1 << 20]) == 0


def test_many_items(pool2: mpgrad.Pool) -> None:
    count = 100_000
    process = psutil.Process()
    before, begin = process.memory_info().rss, time.monotonic()
    results = pool2.map(lambda t: t * 3 + 1, torch.arange(count).unbind())
    seconds, grown = time.monotonic() - begin, process.memory_info().rss - before
    print(f"{count:,} items: {seconds:.1f} s, parent grown by {grown / MIB:.0f} MiB")
    assert torch.equal(torch.stack(results), torch.arange(count) * 3 + 1)


def test_an_item_of_many_tensors(pool2: mpgrad.Pool) -> None:
    count = 10_000
    xs = [torch.full((3,), float(k), requires_grad=True) for k in range(count)]
    (ys,) = pool2.map(lambda tensors: [t * 2 for t in tensors], [xs])
    (torch.stack(ys) * torch.arange(count)[:, None]).sum().backward()
    assert torch.equal(torch.stack(ys), 2 * torch.stack(xs))
    assert torch.equal(
        torch.stack([x.grad for x in xs]), (2.0 * torch.arange(count))[:, None].expand(-1, 3)
    )


def test_many_maps_whose_graphs_are_all_held(fresh_pool: mpgrad.Pool) -> None:
    count = 1000
    xs = [torch.full((3,), float(k), requires_grad=True) for k in range(3)]
    weight = torch.ones(3, requires_grad=True)
    results = [fresh_pool.map(lambda t: t * weight * factor, xs) for factor in range(count)]
    assert sum(worker.graphs for worker in fresh_pool.stats().workers) == count * len(xs)
    sum(y.sum() for some in results for y in some).backward()
    total = sum(range(count))
    assert all(x.grad.tolist() == [total] * 3 for x in xs)
    assert weight.grad.tolist() == [3 * total] * 3
    del results
    gc.collect()
    fresh_pool.map(abs, range(4), 1)
    eventually(lambda: graphs_known(fresh_pool) == 0)


@pytest.mark.parametrize("with_graphs", [False, True], ids=["values", "graphs"])
def test_memory_stays_what_it_is(fresh_pool: mpgrad.Pool, with_graphs: bool) -> None:
    xs = [torch.full((4,), float(k), requires_grad=True) for k in range(100)]
    staffed(fresh_pool)

    def calls(count: int) -> None:
        for _ in range(count // 100 if with_graphs else count // 1000):
            if with_graphs:
                sum(y.sum() for y in fresh_pool.map(lambda t: t * t, xs)).backward()
            else:
                assert fresh_pool.map(abs, range(-1000, 0))[0] == 1000

    count = CALLS_WITH_GRAPHS if with_graphs else TINY_CALLS
    tenths = []
    for _ in range(10):
        calls(count // 10)
        gc.collect()
        tenths.append(held(fresh_pool))
    second, last = tenths[1], tenths[-1]
    print(
        f"{count:,} calls, bytes in parent and workers after the second tenth and the last: "
        f"{second[0]}, {last[0]}"
    )
    (parent, *workers), (parent_now, *workers_now) = second[0], last[0]
    # on a busy machine one worker may have done little by then, and come later to where the other
    # is
    assert parent_now - parent < NOISE and max(workers_now) - max(workers) < NOISE
    # a slab more or less is no leak: one would leave something in each of thousands of calls
    for (parent, *workers), (parent_now, *workers_now) in zip(second[1:], last[1:], strict=True):
        assert parent_now - parent <= 2 and max(workers_now) - max(workers) <= 2


def held(pool: mpgrad.Pool) -> tuple[list[int], list[int], list[int]]:
    """Of the parent and the pool's workers: resident bytes, descriptors, threads."""
    processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in pool.stats().workers)]
    return (
        [process.memory_info().rss for process in processes],
        [process.num_fds() for process in processes],
        [process.num_threads() for process in processes],
    )


# --- where the items come from


def half_a_source() -> Iterator[torch.Tensor]:
    for k in range(50):
        yield torch.full((3,), float(k), requires_grad=True)
    raise LookupError("half-way")


def test_a_source_that_raises(pool: mpgrad.Pool) -> None:
    uses: list[Callable[[], object]] = [
        lambda: pool.map(torch.exp, half_a_source()),
        lambda: pool.starmap(torch.mul, ((t, t) for t in half_a_source())),
        lambda: pool.map_async(torch.exp, half_a_source()).get(10),
        lambda: pool.reduce(lambda target, item: target + item, half_a_source(), torch.zeros(3)),
        lambda: pool.map_reduce(torch.exp, half_a_source(), "sum"),
        lambda: list(pool.imap_unordered(torch.exp, half_a_source())),
    ]
    for use in uses:
        with pytest.raises(LookupError, match="half-way"):
            use()
        works(pool)
    came = []
    with pytest.raises(LookupError, match="half-way"):
        for result in pool.imap(lambda t: t * 2, half_a_source()):
            came.append(result)
    # what came before the error is good
    assert [y[0].item() for y in came] == [2 * k for k in range(50)]
    sum(y.sum() for y in came).backward()


def test_a_source_without_end(fresh_pool: mpgrad.Pool) -> None:
    taken = []

    def endless() -> Iterator[torch.Tensor]:
        for k in itertools.count():
            taken.append(k)
            yield torch.full((3,), float(k), requires_grad=True)

    results = fresh_pool.imap(lambda t: t * 2, endless())
    for k in range(10):
        y = next(results)
        y.sum().backward()
        assert y[0].item() == 2 * k
    assert len(taken) <= 10 + 16 * 2
    begin = time.monotonic()
    del results
    gc.collect()
    works(fresh_pool)
    assert len(taken) <= 10 + 16 * 2
    results = fresh_pool.imap(time.sleep, itertools.repeat(0.05))
    next(results)
    fresh_pool.terminate()
    with pytest.raises(mpgrad.PoolClosedError):
        list(results)
    assert time.monotonic() - begin < 50


def test_workers_begin_before_the_source_has_filled_the_window(pool2: mpgrad.Pool) -> None:
    done = pool2.stats().calls

    def source() -> Iterator[int]:
        yield os.getpid()
        eventually(lambda: pool2.stats().calls > done)
        yield 1

    assert len(list(pool2.imap(abs, source()))) == 2


def test_what_nobody_wants_any_more_is_not_begun(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    def given_and_begun(pool: mpgrad.Pool, folder: Path) -> tuple[int, set[str]]:
        """How many calls the worker had when nobody wanted them any more, and which it began."""

        def note(k: int) -> None:
            (folder / f"begun {k}").touch()
            while k == 0 and not (folder / "go").exists():
                time.sleep(1e-3)

        # short calls, of which a worker gets one more than it runs
        pool.map(note, range(100, 108), 1)
        unwanted = pool.imap(note, range(8))
        while not (folder / "begun 0").exists():
            time.sleep(1e-3)
        (worker,) = handles(pool)
        given = sum(len(chunk.calls) for chunk in worker.under_way.chunks.values())
        del unwanted
        gc.collect()
        eventually(lambda: not pool.stats().operations)
        (folder / "go").touch()
        works(pool)
        return given, {path.name for path in folder.glob("begun ?")}

    with mpgrad.Pool(1) as pool:
        for attempt in range(20):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            given, begun = given_and_begun(pool, folder)
            assert begun == {"begun 0"}  # the call that had begun, and no other
            if given > 1:
                return
    raise AssertionError(
        "calls seemed long each time, so the worker never had one that it could leave out"
    )


# --- threads, coroutines, forks


def until(file: Path) -> None:
    while not file.exists():
        time.sleep(1e-3)


def test_asyncio(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    xs = [torch.full((3,), float(k), requires_grad=True) for k in range(20)]

    def step() -> list[float]:
        x = torch.full((2,), 3.0, requires_grad=True)
        sum(y.sum() for y in fresh_pool.map(lambda t: t**2, [x] * 4)).backward()
        return x.grad.tolist()

    async def use() -> None:
        ys = await asyncio.gather(
            *(asyncio.wrap_future(fresh_pool.submit(lambda t: t * weight * 2, x)) for x in xs)
        )
        sum(y.sum() for y in ys).backward()
        assert weight.grad.tolist() == [380] * 3 and all(x.grad.tolist() == [2] * 3 for x in xs)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(fresh_pool.submit(divmod, 1, 0))
        assert await asyncio.gather(*(asyncio.to_thread(step) for _ in range(4))) == [[24, 24]] * 4
        before = [fresh_pool.submit(until, tmp_path / "go") for _ in range(6)]
        source = fresh_pool.submit(time.sleep, 100)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(source), 0.05)
        await asyncio.sleep(0)  # the cancelling of the source is a callback of the loop
        assert source.cancelled()
        (tmp_path / "go").touch()
        await asyncio.gather(*map(asyncio.wrap_future, before))

    begin = time.monotonic()
    asyncio.run(use())
    works(fresh_pool)
    assert time.monotonic() - begin < 50  # nobody waited for the 100 s


def test_sixteen_threads_with_all_that_can_happen(fresh_pool: mpgrad.Pool) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for step in range(12):
                chance.choice([good, raising, cancelling, half_iterated])(seed, step)
        except BaseException as error:
            failures.append(error)

    def new_item(seed: int) -> torch.Tensor:
        return torch.full((40,), seed / 16, requires_grad=True)

    def good(seed: int, step: int) -> None:
        x = new_item(seed)
        sum(y.sum() for y in fresh_pool.map(lambda t: t * seed, [x] * 5)).backward()
        assert x.grad.tolist() == [5 * seed] * 40

    def raising(seed: int, step: int) -> None:
        def fn(k: int) -> int:
            if k >= 3:
                raise LookupError(seed, step, k)
            return k

        with pytest.raises(LookupError) as caught:
            fresh_pool.map(fn, range(8))
        assert caught.value.args == (seed, step, 3)

    def cancelling(seed: int, step: int) -> None:
        x = new_item(seed)
        futures = [fresh_pool.submit(torch.mul, x, k) for k in range(1, 7)]
        for future in futures[::2]:
            future.cancel()
        kept = [k for k, future in enumerate(futures, 1) if not future.cancelled()]
        sum(futures[k - 1].result(30).sum() for k in kept).backward()
        assert x.grad.tolist() == [sum(kept)] * 40

    def half_iterated(seed: int, step: int) -> None:
        x = new_item(seed)
        next(fresh_pool.imap_unordered(lambda t: t.exp(), [x] * 6)).sum().backward()
        assert torch.equal(x.grad, x.exp())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    works(fresh_pool)


def test_a_future_that_is_cancelled_before_its_turn_comes(
    fresh_pool: mpgrad.Pool, tmp_path: Path
) -> None:
    before = [fresh_pool.submit(until, tmp_path / "go") for _ in range(6)]
    future = fresh_pool.submit(abs, -1)
    assert future.cancel()
    (tmp_path / "go").touch()
    assert [each.result(PATIENCE) for each in before] == [None] * 6
    works(fresh_pool)
    assert future.cancelled()


FORKS = """
import atexit, multiprocessing, pickle, threading
pid_of_parent = os.getpid()
pool = mpgrad.Pool(2)
works(pool)
weight = torch.ones(3, requires_grad=True)
(y,) = pool.map(lambda t: t * weight, [torch.ones(3)])
busy = pool.map_async(time.sleep, [0.01] * 100)
iterator = pool.imap(abs, range(10))
atexit.register(
    lambda: print("parent at exit", flush=True) if os.getpid() == pid_of_parent else None
)

def in_the_child():
    uses = [
        lambda: pool.map(abs, [1]),
        lambda: y.sum().backward(),
        lambda: next(iterator),
        lambda: busy.get(),
        pool.stats,
    ]
    for use in uses:
        error = error_of(use)
        assert "cannot be used in its forked child" in str(error), repr(error)
    pool.terminate()

def fork(end):
    child = os.fork()
    if child == 0:
        in_the_child()
        end()
    assert os.waitpid(child, 0)[1] == 0

fork(lambda: os._exit(0))
failed = []
def from_a_thread():
    try:
        fork(lambda: (atexit._run_exitfuncs(), gc.collect(), os._exit(0)))
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=from_a_thread) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
process = multiprocessing.get_context("fork").Process(target=in_the_child)
process.start()
process.join()
assert process.exitcode == 0
faulthandler.cancel_dump_traceback_later()  # a forked child would wait for its thread
child = os.fork()
if child == 0:
    in_the_child()
    del pool, y, busy, iterator
    gc.collect()
    sys.exit(0)  # through all that an interpreter does at its end
assert os.waitpid(child, 0)[1] == 0
assert busy.get() == [None] * 100 and list(iterator) == list(range(10))
y.sum().backward()
assert weight.grad.tolist() == [1, 1, 1]
works(pool)
"""


def test_forks_leave_the_parent_unharmed() -> None:
    assert run(FORKS) == "parent at exit\n"


# --- ends

BUSY = """
import pathlib
where = pathlib.Path(sys.argv[1])

def spins(k):
    while True:
        pass

def computes(k):
    a = torch.ones(8000, 8000)
    while True:
        a @ a

def task(name):
    (where / f"{os.getpid()}").write_text(name)
    sleeps = lambda k: time.sleep(1000)
    {"spins": spins, "computes": computes, "sleeps": sleeps, "stopped": spins}[name](0)

pool = mpgrad.Pool(4)
# all have started: the first to be ready would get two of the calls
pool.map(time.sleep, [0.1] * 8, 1)
result = pool.map_async(task, ["spins", "computes", "sleeps", "stopped"], 1)
time.sleep(1000)
"""


@linux_only("the death signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_the_parent_is_killed_while_workers_are_busy(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + BUSY, str(tmp_path)], stderr=subprocess.PIPE
    ) as parent:
        deadline = time.monotonic() + 40
        names: dict[int, str] = {}
        while len(names) < 4 or "" in names.values():
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
            names = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
        assert sorted(names.values()) == ["computes", "sleeps", "spins", "stopped"]
        (stopped,) = [pid for pid, name in names.items() if name == "stopped"]
        os.kill(stopped, signal.SIGSTOP)
        pids = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert set(names) < set(pids)
        parent.send_signal(number)
        assert gone([parent.pid, *pids], within=20)
        assert parent.stderr is not None and parent.stderr.read() == b""
        assert parent.wait() == -number


def test_callbacks_that_raise(fresh_pool: mpgrad.Pool, caplog: pytest.LogCaptureFixture) -> None:
    def raises(value: object) -> None:
        raise LookupError("in a callback")

    def exits(value: object) -> None:
        raise SystemExit(3)

    for callback in (raises, exits):
        with caplog.at_level(logging.ERROR):
            assert fresh_pool.map_async(abs, [-1], callback=callback).get(10) == [1]
            with pytest.raises(ZeroDivisionError):
                fresh_pool.apply_async(divmod, (1, 0), error_callback=callback).get(10)
            future = fresh_pool.submit(time.sleep, 0.05)
            future.add_done_callback(callback)
            assert future.result(10) is None
            works(fresh_pool)
        assert [record.name for record in caplog.records].count("mpgrad") >= 2
        caplog.clear()


ENDS = """
import atexit, threading
pools = [mpgrad.Pool(2) for _ in range(3)]
for pool in pools:
    works(pool)
iterator = pools[0].imap(time.sleep, [300] * 4)
future = pools[0].submit(time.sleep, 300)
future.add_done_callback(lambda future: None)
pools[1].in_a_cycle = pools[1]
result = pools[1].map_async(time.sleep, [300] * 4)
quick = pools[2].map_async(abs, [1], callback=lambda value: time.sleep(0.3))
quick.wait()
atexit.register(lambda: works(pools[2]))
threading.Thread(target=lambda: pools[2].map(time.sleep, [0.2] * 4)).start()
"""


def test_an_interpreter_that_ends_while_calls_are_running() -> None:
    assert run(ENDS) == ""  # which does not wait so long as the calls take


def test_garbage_collection_while_calls_are_running(
    fork_server: mpgrad.Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = mpgrad.Pool(2)
    works(pool)
    pids = [worker.pid for worker in pool.stats().workers]
    pool.in_a_cycle = pool
    result = pool.map_async(time.sleep, [300] * 4, 1)
    future = pool.submit(time.sleep, 300)
    del pool
    gc.collect()
    for wait in (result.get, future.result):
        with pytest.raises(mpgrad.PoolClosedError):
            wait(30)
    assert gone(pids, within=20)
    assert capfd.readouterr() == ("", "")


# --- what a function reaches

CYCLE = {
    "one.py": "import two\ndef f(n, x):\n    return x if n == 0 else two.g(n - 1, x)\n",
    "two.py": "import one\ndef g(n, x):\n    return one.f(n, x * 2)\n",
}


def test_modules_that_call_each_other(
    pool2: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in CYCLE.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        import one

        with mpgrad.Pool(1) as pool:  # whose workers start with this path
            assert pool.map(lambda t: one.f(5, t), [torch.ones(2)])[0].tolist() == [32, 32]
    finally:
        for name in CYCLE:
            sys.modules.pop(name.removesuffix(".py"), None)
