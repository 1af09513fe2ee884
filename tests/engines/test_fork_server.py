"""The fork server stays for a while after its last pool, so that the next one starts soon. Nothing
is left of it when the program ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import gone, linux_only, said_by

pytestmark = linux_only("the fork server")

BEGIN = """
import gc, os, signal, sys, time
import mpgrad, psutil
from mpgrad.engines import launch

def servers():
    return [child.pid for child in psutil.Process().children()]

def with_block():
    with mpgrad.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]

def busy():
    with mpgrad.Pool(2) as pool:
        pool.map_async(time.sleep, [100] * 4)

def join():
    pool = mpgrad.Pool(2)
    pool.close()
    pool.join()

def forgotten():
    mpgrad.Pool(2).map(abs, [-1])
    gc.collect()

def broken():
    with mpgrad.Pool(1, initializer=os._exit, initargs=(3,)) as pool:
        try:
            pool.map(abs, [-1])
        except mpgrad.WorkerDiedError:
            pass

def executor():
    with mpgrad.Executor(2) as executor:
        executor.submit(abs, -1).result()

def killed_executor():
    mpgrad.Executor(2).shutdown(kill_workers=True)

def ended(count=0):
    "The pools have ended: nobody waits for the end of a pool that was forgotten."
    while len(psutil.Process().children(recursive=True)) > count:
        time.sleep(0.01)

with_block()
(server,) = servers()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", BEGIN + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


EACH_END = """
for end in with_block, busy, join, forgotten, broken, executor, killed_executor:
    end()
    ended(1)
    assert servers() == [server], end
with_block()
assert servers() == [server]

# workers are what the caller is now
os.umask(0o027)
os.environ["ADDED"] = "now"
os.chdir("/")
with mpgrad.Pool(1) as pool:
    assert pool.apply(os.umask, (0o027,)) == 0o027
    assert pool.apply(os.getenv, ("ADDED",)) == "now"
    assert pool.apply(os.getcwd) == "/"
assert servers() == [server]
# this variable is read when torch is imported: the fork server is of no use any more
os.environ["TORCH_SOMETHING"] = "now"
with mpgrad.Pool(1) as pool:
    assert pool.apply(os.getenv, ("TORCH_SOMETHING",)) == "now"
    (another,) = servers()
    assert another != server

if child := os.fork():
    # a child's end leaves it alone
    os.waitpid(child, 0)
    assert servers() == [another]
    print(another)
"""


def test_it_stays_however_a_pool_ends() -> None:
    """Each pool paid the start, unless another one was open."""
    done = run(EACH_END)
    assert done.returncode == 0, done.stderr
    assert gone([int(done.stdout)], within=0)  # the program waits for it


@pytest.mark.slow
def test_it_ends_with_a_caller_that_is_killed() -> None:
    done = run("print(server, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert done.returncode == -9
    assert gone([int(done.stdout)], within=20)


BY_ITSELF = """
launch.FORK_SERVER_STAYS, launch.STAYS_LONGER = 0, 1
for _ in range(2):
    # one that may be about to end is not used
    with_block()
    before, (server,) = server, servers()
    assert server != before
    while psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_it_ends_by_itself_after_a_while() -> None:
    done = run(BY_ITSELF)
    assert (done.stderr, done.returncode) == ("", 0)


STOPPED = """
pool = mpgrad.Pool(1)
pool.map(abs, [-1])
os.kill(server, signal.SIGSTOP)
pool.terminate()
assert servers() == []
with_block()
"""


@pytest.mark.slow
def test_one_that_has_been_stopped_is_killed() -> None:
    done = run(STOPPED)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.slow
@linux_only("the fork server")
def test_a_fork_that_fails(tmp_path: Path) -> None:
    """It ended the fork server, and with it all workers of all pools."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "fork, count = os.fork, [0]\n"
        "def failing():\n"
        "    count[0] += 1\n"
        "    if count[0] == 3: raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return fork()\n"
        "os.fork = failing\n"
    )
    code = (
        "with mpgrad.Pool(2) as pool:\n"
        "    pool.map(abs, range(8), chunksize=1)\n"
        "    pids = {worker.pid for worker in pool.stats().workers}\n"
        "    pool.resize(3)\n"
        "    while len(pool.stats().workers) < 3: time.sleep(0.01)\n"
        "    print(pids <= {worker.pid for worker in pool.stats().workers}, pool.map(abs, [-1]))\n"
    )
    assert said_by(code, PYTHONPATH=str(tmp_path)) == "True [1]\n"


@pytest.mark.slow
@linux_only("the fork server")
def test_the_fork_server_is_dying_and_nobody_can_know() -> None:
    """A process that is killed closes its pipes before its parent is told; successors of its
    workers were asked of it."""
    code = (
        "from mpgrad.engines.launch import ForkServerLauncher, ForkServerProcess\n"
        "# without a look\n"
        "ForkServerProcess.alive = property(lambda self: self._process.returncode is None)\n"
        "with mpgrad.Pool(2) as first, mpgrad.Pool(1) as second:\n"
        "    (fork_server,) = psutil.Process().children()\n"
        "    print(first.map(abs, [-1, -2]), second.map(abs, [-3]))\n"
        "    fork_server.kill()\n"
        "    while first.stats().deaths < 2 or second.stats().deaths < 1: time.sleep(0.001)\n"
        "    print(first.map(abs, [-4, -5]), second.map(abs, [-6]))\n"
        "    print(len(psutil.Process().children()))\n"
        "ForkServerLauncher.end_unused()\n"
        "print(len(psutil.Process().children()))\n"
    )
    assert said_by(code).splitlines() == ["[1, 2] [3]", "[4, 5] [6]", "1", "0"]


@pytest.mark.slow
@linux_only("the fork server")
def test_a_fork_while_another_thread_starts_the_fork_server() -> None:
    """The child waited for ever for a lock whose owner it did not have."""
    code = (
        "import threading\n"
        "from mpgrad.engines.launch import ForkServerLauncher\n"
        "held, go = threading.Event(), threading.Event()\n"
        "def holds():\n"
        "    with ForkServerLauncher._lock: held.set(), go.wait()\n"
        "thread = threading.Thread(target=holds)\n"
        "thread.start(), held.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with mpgrad.Pool(1) as pool: print(pool.map(abs, [-1]), flush=True)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "go.set(), thread.join(), print(status)\n"
    )
    assert said_by(code) == "[1]\n0\n"


@pytest.mark.slow
def test_a_fork_server_that_somebody_has_stopped() -> None:
    """The end of the last pool waited for it for ever."""
    code = (
        "pool = mpgrad.Pool(1)\n"
        "assert pool.map(abs, [-1]) == [1]\n"
        "psutil.Process().children()[0].suspend()\n"
        "pool.terminate()\n"
        "print(psutil.Process().children())\n"
    )
    assert said_by(code) == "[]\n"


@pytest.mark.slow
def test_a_caller_that_blocks_signals() -> None:
    """The fork server had that from it, and never learnt that a worker had ended: nobody got its
    exit code, and all waited."""
    code = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "with mpgrad.Pool(1, retries=0) as pool:\n"
        "    try: pool.map(lambda x: os.kill(os.getpid(), 9), [1])\n"
        "    except mpgrad.WorkerDiedError as error: print(error.exit_code)\n"
    )
    assert said_by(code) == "-9\n"
