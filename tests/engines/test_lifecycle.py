"""A pool in the world: scripts without guard, start methods, replacement of workers, and nothing
left after any end."""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import alive, eventually, gone, linux_only, shared_memory_files, staffed

import mpgrad
import mpgrad.scheduling.dispatcher
from mpgrad.system import PORTABLE

SCRIPT = """
import torch, mpgrad

weight = torch.tensor(3.0, requires_grad=True)

class Item:
    def __init__(self, x):
        self.x = x

def function(item):
    return item.x * weight

class Failure(Exception):
    pass

def fails(item):
    raise Failure("own class")

with mpgrad.Pool(2) as pool:
    results = pool.map(function, [Item(torch.ones(n)) for n in range(5)])
    sum(r.sum() for r in results).backward()
    print("gradient", weight.grad.item())
    try:
        pool.map(fails, [1])
    except Failure as failure:
        print("caught", failure)
    print("same class", type(pool.map(lambda k: Item(k), [1])[0]) is Item)
"""
EXPECTED = "gradient 10.0\ncaught own class\nsame class True\n"


def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, **options)


def test_a_script_without_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run([sys.executable, "-W", "error", str(script)], cwd=tmp_path)
    assert (done.stdout, done.stderr) == (EXPECTED, "")


MAPS_AT_IMPORT = """
import os
from pathlib import Path

import torch, mpgrad

depth = int(os.environ["DEPTH"])
os.environ["DEPTH"] = str(depth + 1)
with open(Path(__file__).parent / "imports", "a") as file:
    file.write("x")
assert depth < 3, "each worker imports the module in workers of its own"
weight = torch.tensor(3.0, requires_grad=True)

class Item:
    def __init__(self, x):
        self.x = x

def function(item):
    return item.x * weight

with mpgrad.Pool(1, engine="process") as pool:
    sum(pool.map(function, [Item(1.0), Item(2.0)])).backward()
"""


@pytest.mark.slow
def test_a_module_that_maps_while_it_is_imported(
    fork_server: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers imported it too, and mapped in workers of their own, and so on without end."""
    (tmp_path / "maps_at_import.py").write_text(MAPS_AT_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DEPTH", "0")
    module = importlib.import_module("maps_at_import")
    assert module.weight.grad == 3
    assert (tmp_path / "imports").read_text() == "xx"  # here and in one worker
    # a task may import such a module, as a loop may
    assert fork_server.apply(gradient_of_import, ("maps_at_import",)) == 3
    assert (tmp_path / "imports").read_text() == "xxxx"


def gradient_of_import(name: str) -> float:
    return float(importlib.import_module(name).weight.grad)


@pytest.mark.slow
def test_python_c(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", SCRIPT], cwd=tmp_path)
    assert (done.stdout, done.stderr) == (EXPECTED, "")


@pytest.mark.slow
def test_standard_input(tmp_path: Path) -> None:
    done = run([sys.executable], input=SCRIPT, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (EXPECTED, "")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods_of_multiprocessing_need_no_guard(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("Pool(2)", f"Pool(2, context={method!r})"))
    done = run([sys.executable, str(script)], cwd=tmp_path)
    assert (done.stdout, done.stderr) == (EXPECTED, "")


@pytest.mark.slow
def test_a_context_object(fork_server: mpgrad.Pool) -> None:
    import multiprocessing

    with mpgrad.Pool(1, context=multiprocessing.get_context("spawn")) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]


class InterruptedThreading:
    """`threading`, in which somebody presses Ctrl-C while an event is waited for."""

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def test_an_interrupt_while_the_workers_of_a_context_start(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the pool that nobody has."""
    monkeypatch.setattr(mpgrad.scheduling.dispatcher, "threading", InterruptedThreading())
    with pytest.raises(KeyboardInterrupt):
        mpgrad.Pool(1, context="spawn")


@pytest.mark.slow
def test_a_module_beside_the_script_is_importable(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def twice(x):\n    return 2 * x\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import mpgrad, helper\nwith mpgrad.Pool(1) as pool:\n    print(pool.map(helper.twice, [1, "
        "2]))\n"
    )
    assert run([sys.executable, str(script)], cwd="/").stdout == "[2, 4]\n"


UNCLOSED = """
import mpgrad, os, psutil, sys, time
pool = mpgrad.Pool(2)
pool.map(abs, range(10))
while len(pool.stats().workers) < 2: time.sleep(0.01)
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
"""


ENDING = """
busy, collected = mpgrad.Pool(2), mpgrad.Pool(2)
busy.map_async(__import__('time').sleep, [100] * 4)
collected.map(abs, range(10))
del collected
raise SystemExit(0)
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_with_open_pools() -> None:
    # in less time than the calls take
    done = run([sys.executable, "-W", "error", "-c", UNCLOSED + ENDING])
    assert done.stderr == "" and done.returncode == 0
    assert gone([int(pid) for pid in done.stdout.split()], within=20)


@pytest.mark.slow
def test_the_parent_is_killed() -> None:
    """With idle workers; tests/faults/test_outside.py has busy ones."""
    code = UNCLOSED + "__import__('time').sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
        assert len(pids) == (2 if PORTABLE else 3)  # the fork server among them
        assert gone(pids, within=20)


@pytest.mark.slow
def test_busy_workers_end_with_their_calls_if_not_before(tmp_path: Path) -> None:
    code = UNCLOSED + (
        "def waits(name):\n"
        "    open(f'{name}{os.getpid()}', 'w').close()\n"
        "    while not os.path.exists(f'{name}go'): pass\n"
        "pool.map(waits, [sys.argv[1]] * 4)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, f"{tmp_path}/"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        assert not PORTABLE or all(map(alive, pids))
        (tmp_path / "go").touch()
        assert gone(pids, within=20)


@pytest.mark.slow
def test_the_parent_is_killed_while_a_forked_child_holds_its_descriptors() -> None:
    code = (
        UNCLOSED
        + "child = os.fork()\nif child: print(child, flush=True)\n__import__('time').sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        child = int(parent.stdout.readline())
        parent.kill()
        try:
            assert gone(pids, within=20)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@linux_only("the fork server")
def test_the_fork_server_is_killed() -> None:
    code = UNCLOSED + (
        "fork_server = psutil.Process().children()[0]\n"
        "fork_server.kill()\n"
        "while fork_server.pid in [child.pid for child in psutil.Process().children()]:\n"
        "    try: pool.map(abs, range(10))\n"
        "    except mpgrad.WorkerDiedError: pass\n"
        "print(pool.map(abs, [-1, -2]))\n"
    )
    done = run([sys.executable, "-W", "error", "-c", code])
    assert done.stdout.splitlines()[1:] == ["[1, 2]"]
    said = r"mpgrad: (worker \d (died|was killed by SIGKILL) \(phase: |abs is too cheap for a pool)"
    assert all(re.match(said, line) for line in done.stderr.splitlines())


def test_garbage_collection_of_an_open_pool(fork_server: mpgrad.Pool) -> None:
    pool = staffed(mpgrad.Pool(2))  # else one of the two may be missing from `before`
    result = pool.map(torch.exp, [torch.ones(3, requires_grad=True)])
    reference = weakref.ref(pool)
    before = set(psutil.Process().children(recursive=True))
    del pool
    gc.collect()
    assert reference() is None
    while len(set(psutil.Process().children(recursive=True)) & before) > len(before) - 2:
        time.sleep(0.01)  # nobody waits for the end in a finalizer
    assert result[0].shape == (3,)


def test_after_an_exception_in_the_with_block(fork_server: mpgrad.Pool) -> None:
    with pytest.raises(LookupError), mpgrad.Pool(2) as pool:
        pool.map_async(time.sleep, [10] * 10)
        raise LookupError


def test_many_pools_leave_no_descriptors_and_no_memory(fork_server: mpgrad.Pool) -> None:
    before = shared_memory_files()
    for _ in range(5):
        with mpgrad.Pool(2) as pool:
            results = pool.map(
                lambda x: x * 2, [torch.ones(100_000, requires_grad=True) for _ in range(4)]
            )
            sum(r.sum() for r in results).backward()
        del results
    assert shared_memory_files() <= before


def test_results_outlive_their_pool(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(2) as pool:
        results = pool.starmap(torch.full, [((100_000,), float(k)) for k in range(6)])
    del pool
    gc.collect()
    assert all(bool((r == k).all()) for k, r in enumerate(results))
    for r in results:
        r.add_(1)
    assert [float(r[0]) for r in results] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_initializer(fork_server: mpgrad.Pool) -> None:
    for engine in ("process", "thread", "inline"):
        with mpgrad.Pool(
            2, initializer=os.putenv, initargs=("MPGRAD_TEST", engine), engine=engine
        ) as pool:
            assert set(pool.map(variable, ["MPGRAD_TEST"] * 8)) == {engine}
    os.unsetenv("MPGRAD_TEST")


def variable(name: str) -> str:
    return subprocess.run(["printenv", name], capture_output=True, text=True).stdout.strip()


def test_a_worker_is_replaced_after_as_many_calls(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, maxtasksperchild=3) as pool:
        pids = pool.map(lambda k: os.getpid(), range(12), 1)
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3, 3]


def test_a_replaced_worker_stays_while_it_keeps_graphs(fork_server: mpgrad.Pool) -> None:
    weight = torch.ones(2, requires_grad=True)
    with mpgrad.Pool(1, maxtasksperchild=2) as pool:
        results = pool.map(lambda k: weight * k, range(8))
        sum(r.sum() for r in results).backward()
        assert weight.grad.tolist() == [28, 28]
        del results
        gc.collect()
        pool.map(abs, range(3))
        eventually(lambda: len(pool.stats().workers) == 1)


def test_an_idle_pool_uses_no_cpu(fresh_pool: mpgrad.Pool) -> None:
    staffed(fresh_pool).map(abs, range(10))
    workers = psutil.Process().children(recursive=True)

    def used() -> list[tuple[int, int]]:
        return [
            (each.num_ctx_switches().voluntary, each.num_ctx_switches().involuntary)
            for each in workers
        ]

    for _ in range(40):  # what was left to tell is told
        before = used()
        time.sleep(0.5)
        if used() == before:
            return
    raise AssertionError("an idle pool goes on")


def test_a_pool_from_a_thread_that_has_ended(fork_server: mpgrad.Pool) -> None:
    made: list[mpgrad.Pool] = []
    thread = threading.Thread(target=lambda: made.append(mpgrad.Pool(2)))
    thread.start()
    thread.join()
    with made[0] as pool:
        assert pool.map(abs, range(-5, 0)) == [5, 4, 3, 2, 1]


def test_a_pool_inside_a_task(fresh_pool: mpgrad.Pool) -> None:
    def slope(k: float) -> float:
        x = torch.tensor(k, requires_grad=True)
        with mpgrad.Pool(1) as inner:
            assert inner.apply(os.getpid) == os.getpid()  # inline, unless asked otherwise
            sum(inner.map(lambda t: t**3, [x, x])).backward()
        return float(x.grad)

    assert fresh_pool.map(slope, [1.0, 2.0]) == [6.0, 24.0]


@pytest.mark.slow
def test_a_pool_of_processes_inside_a_task(fresh_pool: mpgrad.Pool) -> None:
    def fn(k: float) -> tuple[bool, float]:
        x = torch.tensor(k, requires_grad=True)
        with mpgrad.Pool(1, engine="process") as inner:
            inner.map(lambda t: t**3, [x])[0].backward()
            return inner.apply(os.getpid) != os.getpid(), float(x.grad)

    assert fresh_pool.map(fn, [1.0]) == [(True, 3.0)]


def test_a_large_message_both_ways(pool2: mpgrad.Pool) -> None:
    texts = [chr(65 + k) * 3_000_000 for k in range(6)]
    assert pool2.map(str.lower, texts) == [text.lower() for text in texts]


def test_many_threads_use_one_pool(pool2: mpgrad.Pool) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for k in range(15):
                x = torch.full((50,), float(seed), requires_grad=True)
                results = pool2.map(lambda t: t * seed, [x] * 5)
                sum(r.sum() for r in results).backward()
                assert torch.equal(x.grad, torch.full((50,), 5.0 * seed)), k
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_other_libraries_take_one_thread(pool2: mpgrad.Pool) -> None:
    """NumPy's linear algebra took all CPUs in each worker."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        assert pool2.apply(lambda name: os.environ.get(name), (name,)) == os.environ.get(name, "1")
    assert pool2.apply(torch.get_num_threads) == 1


AT_THE_END = """
import os, sys, time
import mpgrad
from mpgrad.calls.packing import SharedFunction

def watched(finalize, name, write=os.write, trace=sys.settrace):
    def look(frame, event, arg):
        if event == "exception":
            write(1, b" an exception in " + name)
        return look
    def watch(self):
        write(1, name)
        trace(look)
        try:
            finalize(self)
        finally:
            trace(None)
    return watch

SharedFunction.__del__ = watched(SharedFunction.__del__, b"SharedFunction")

def f(x):
    time.sleep(0.01)
    return x

pool = mpgrad.Pool(2)
results = pool.imap_unordered(f, range(1000))
next(results)
os.write(1, b"ends: ")
"""


@pytest.mark.slow
def test_what_is_left_at_the_end_of_the_program() -> None:
    # symptom: "Exception ignored in", for a partly read iterator of a module. cause:
    # when Python takes modules apart, their names become None, and finalizers still used them.
    ended = run([sys.executable, "-c", AT_THE_END])
    assert ended.returncode == 0 and not ended.stderr
    _, _, after = ended.stdout.partition("ends")
    assert after.count("SharedFunction") == 1 and "exception" not in after, after


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [pytest.param("in the launcher", marks=linux_only("the fork server")), "in the arena"]
)
def test_a_pool_is_collected_while_locks_are_held(
    fork_server: mpgrad.Pool, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finalizer waited for a thread that waited for the lock."""
    dropped: Any = mpgrad.Pool(1)
    x = torch.ones(5000, requires_grad=True)
    (y,) = dropped.map(lambda x: x * 2, [x])
    dropped.itself = dropped  # a cycle
    gc.disable()
    try:
        del dropped
        if moment == "in the launcher":
            alive: Any = mpgrad.engines.launch.ForkServerProcess.alive.fget  # type: ignore[attr-defined]
            collecting = property(lambda self: (gc.collect(), alive(self))[1])
            monkeypatch.setattr("mpgrad.engines.launch.ForkServerProcess.alive", collecting)
            mpgrad.Pool(1).terminate()
        else:
            free = mpgrad.memory.arena.free_memory
            monkeypatch.setattr(
                "mpgrad.memory.arena.free_memory", lambda: (gc.collect(), free())[1]
            )
            with pytest.raises(mpgrad.PoolClosedError):
                y.backward(torch.ones(5000) * 2)
    finally:
        gc.enable()
