"""mpgrad.Executor is a ProcessPoolExecutor: the same program gives the same with either, and
gradients with ours."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import first_are_quick, gone, said_by
from inside import every_loss_gets, scheduler_of

import mpgrad
from mpgrad.scheduling import dispatcher

PATIENCE = 20.0  # seconds
FORK = multiprocessing.get_context("fork")  # Python 3.14's own would leave a server
STANDARD = functools.partial(concurrent.futures.ProcessPoolExecutor, mp_context=FORK)
BOTH = first_are_quick(1, [mpgrad.Executor, STANDARD])
both = pytest.mark.parametrize("kind", BOTH, ids=["mpgrad", "concurrent.futures"])


@pytest.fixture(autouse=True)
def kept_fork_server(fork_server: mpgrad.Pool) -> None:
    """Executors start in milliseconds."""


@pytest.fixture(autouse=True, scope="module")
def kept_server() -> None:
    """From Python 3.14 on, executors of the standard library start a server, which stays."""
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def fails(x: Any) -> Any:
    raise LookupError(f"nothing at {x}")


def identity(x: Any) -> Any:
    return x


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(1e-3)


class Unpicklable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error

    def __call__(self, *args: Any) -> None:
        raise AssertionError("it cannot have been sent")


def exits(x: Any) -> Any:
    os._exit(3)


def pid(x: Any) -> int:
    return os.getpid()


def note(path: Path, x: int) -> int:
    (path / str(x)).touch()
    return x


def note_and_wait(path: Path, go: Path, x: int) -> int:
    note(path, x)
    until(go)
    return x


def set_variable(name: str, value: str) -> None:
    os.environ[name] = value


# --- what both do


@both
@pytest.mark.quick
def test_submit_and_map(kind: Any) -> None:
    with kind(2) as executor:
        assert isinstance(executor, concurrent.futures.Executor)
        assert executor.submit(divmod, 7, 3).result() == (2, 1)
        assert executor.submit(int, "11", base=2).result() == 3
        assert list(executor.map(pow, [2, 3, 4], [5, 2])) == [32, 9]
        assert list(executor.map(abs, range(-50, 0), chunksize=7)) == list(range(50, 0, -1))
        assert list(executor.map(abs, [])) == []
        results = executor.map(fails, [1, 2])
        with pytest.raises(LookupError, match="nothing at 1"):
            next(results)
        with pytest.raises(StopIteration):
            next(results)
        with pytest.raises(LookupError):
            executor.submit(fails, 1).result()


@both
def test_items_that_come_from_the_executor(kind: Any) -> None:
    with kind(2) as executor:
        assert list(executor.map(abs, (executor.submit(abs, -k).result() for k in range(4)))) == [
            0,
            1,
            2,
            3,
        ]
        with pytest.raises(ZeroDivisionError):
            executor.map(abs, (1 // k for k in (1, 0)))


@both
def test_a_map_that_nobody_looks_at_is_cancelled(kind: Any, tmp_path: Path) -> None:
    executor = kind(1)
    notes, go = tmp_path / "notes", tmp_path / "go"
    notes.mkdir()
    executor.map(functools.partial(note_and_wait, notes, go), range(40), chunksize=1)
    while not list(notes.iterdir()):
        time.sleep(1e-3)
    last = executor.submit(abs, -1)  # which shows that the shutdown has begun
    shutdown = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True})
    shutdown.start()
    while not last.cancelled():
        time.sleep(1e-3)
    go.touch()
    shutdown.join()
    assert len(list(notes.iterdir())) < 20


@pytest.mark.slow
@both
def test_a_timeout_of_map(kind: Any, tmp_path: Path) -> None:
    with kind(1) as executor:
        results = executor.map(until, [tmp_path, tmp_path / "go"], timeout=0.3)
        with pytest.raises(concurrent.futures.TimeoutError):
            list(results)
        (tmp_path / "go").touch()
    with pytest.raises(ValueError, match="chunksize"), kind(1) as executor:
        executor.map(abs, [1], chunksize=0)


@both
@pytest.mark.quick
def test_shutdown(kind: Any, tmp_path: Path) -> None:
    executor = kind(1)
    future = executor.submit(nap, 0.2)
    executor.map(functools.partial(note, tmp_path), range(5))  # nobody looks at the results
    executor.shutdown()
    assert future.done() and len(list(tmp_path.iterdir())) == 5
    for use in (lambda: executor.submit(abs, 1), lambda: executor.map(abs, [1])):
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            use()
    executor.shutdown()


@pytest.mark.slow
@both
def test_shutdown_without_waiting(kind: Any, tmp_path: Path) -> None:
    executor = kind(1)
    future = executor.submit(until, tmp_path / "go")
    executor.shutdown(wait=False)
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.result(PATIENCE) is None


@both
def test_shutdown_that_cancels(kind: Any, tmp_path: Path) -> None:
    executor = kind(1)
    go = tmp_path / "go"
    futures = [executor.submit(until, go) for _ in range(10)]
    while not futures[0].running():
        time.sleep(1e-3)
    shutdown = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True})
    shutdown.start()
    while not futures[-1].cancelled():
        time.sleep(1e-3)
    go.touch()
    shutdown.join()
    assert futures[0].result() is None
    assert all(future.done() for future in futures)
    # the other one leaves them where `wait` does not see that they are done
    if kind is mpgrad.Executor:
        assert concurrent.futures.wait(futures, timeout=PATIENCE).not_done == set()


@both
def test_an_initializer(kind: Any) -> None:
    with kind(1, initializer=set_variable, initargs=("MPGRAD_TEST", "here")) as executor:
        assert executor.submit(os.getenv, "MPGRAD_TEST").result() == "here"


@pytest.mark.filterwarnings("ignore")
@both
def test_an_initializer_that_fails(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with kind(1, initializer=fails, initargs=(3,)) as executor:
        with pytest.raises(BrokenProcessPool):
            executor.submit(abs, 1).result()
        with pytest.raises(concurrent.futures.BrokenExecutor):
            executor.submit(abs, 1).result()


@both
def test_wrong_arguments(kind: Any) -> None:
    with pytest.raises(ValueError, match="max_workers"):
        kind(0)
    # before, the standard library's takes none
    if kind is mpgrad.Executor or sys.version_info >= (3, 11):
        with pytest.raises(ValueError, match="max_tasks_per_child"):
            kind(1, max_tasks_per_child=0)
    with pytest.raises(TypeError, match="initializer must be"):
        kind(1, initializer=3)


@both
def test_asyncio(kind: Any) -> None:
    async def main(executor: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        return list(
            await asyncio.gather(*(loop.run_in_executor(executor, pow, k, 2) for k in range(5)))
        )

    with kind(2) as executor:
        assert asyncio.run(main(executor)) == [0, 1, 4, 9, 16]


@both
def test_as_completed_and_callbacks(kind: Any, tmp_path: Path) -> None:
    called: list[Any] = []
    with kind(2) as executor:
        slow, quick = executor.submit(until, tmp_path / "go"), executor.submit(nap, 0.0)
        for future in (slow, quick):
            future.add_done_callback(called.append)
        completed = concurrent.futures.as_completed([slow, quick])
        assert next(completed) is quick
        (tmp_path / "go").touch()
        assert list(completed) == [slow]
    assert called == [quick, slow]


@both
def test_waiting_for_the_first_exception(kind: Any, tmp_path: Path) -> None:
    """Symptom: it waited for all. Cause: futures that failed were told that they had a result."""
    with kind(2) as executor:
        slow, failing = executor.submit(until, tmp_path / "go"), executor.submit(fails, 1)
        started = time.monotonic()
        for _ in range(2):  # the second time it has failed before
            found = concurrent.futures.wait(
                [slow, failing], PATIENCE, concurrent.futures.FIRST_EXCEPTION
            )
            assert found == ({failing}, {slow}) and time.monotonic() - started < PATIENCE
        (tmp_path / "go").touch()
        error = failing.exception()
        assert isinstance(error, LookupError) and failing.exception() is error
        with pytest.raises(LookupError, match="nothing at 1"):
            failing.result()


@both
def test_the_first_exception_in_asyncio(kind: Any, tmp_path: Path) -> None:
    async def main(executor: Any) -> None:
        slow, failing = map(
            asyncio.wrap_future,
            (executor.submit(until, tmp_path / "go"), executor.submit(fails, 1)),
        )
        assert await asyncio.wait([slow, failing], return_when=asyncio.FIRST_EXCEPTION) == (
            {failing},
            {slow},
        )
        (tmp_path / "go").touch()
        with pytest.raises(LookupError, match="nothing at 1"):
            await failing
        await slow

    with kind(2) as executor:
        asyncio.run(main(executor))


@both
def test_callbacks_of_failures(kind: Any) -> None:
    seen: list[Any] = []
    with kind(1) as executor:
        executor.submit(fails, 1).add_done_callback(
            lambda future: seen.append((future.done(), str(future.exception())))
        )
    assert seen == [(True, "nothing at 1")]


def generator() -> Iterator[None]:
    """What nothing carries."""
    yield


@both
def test_what_cannot_be_pickled_fails_its_future(kind: Any) -> None:
    """Symptom: `submit` raised."""
    with kind(1) as executor:
        for error, arguments in (
            (KeyError, (Unpicklable(KeyError("no")),)),
            (TypeError, (generator(),)),
        ):
            future = executor.submit(note, *arguments)
            with pytest.raises(error) as caught:
                future.result(PATIENCE)
            assert future.exception() is caught.value
            assert isinstance(caught.value.__cause__, concurrent.futures.process._RemoteTraceback)
        with pytest.raises(KeyError, match="no"):
            executor.submit(Unpicklable(KeyError("no"))).result(PATIENCE)
        results = executor.map(identity, [1, Unpicklable(KeyError("no")), 3])
        assert next(results) == 1
        with pytest.raises(KeyError, match="no"):
            next(results)
        with pytest.raises(StopIteration):
            next(results)
        results = executor.map(Unpicklable(KeyError("no")), [1, 2])
        with pytest.raises(KeyError, match="no"):
            next(results)
        with pytest.raises(StopIteration):
            next(results)
        assert executor.submit(abs, -1).result() == 1


@both
def test_errors_of_workers_are_the_standard_librarys(kind: Any) -> None:
    with kind(1) as executor:
        cause = executor.submit(fails, 1).exception().__cause__
        assert isinstance(cause, concurrent.futures.process._RemoteTraceback)
        assert 'LookupError(f"nothing at {x}")' in cause.tb and str(cause) == cause.tb
        with pytest.raises(TypeError, match="cannot pickle"):
            executor.submit(generator).result()


@both
def test_many_threads(kind: Any) -> None:
    with kind(2) as executor, concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda k: executor.submit(pow, k, 2).result(), range(40))) == [
            k**2 for k in range(40)
        ]


EXIT = """
import time, {module}
def say(x):
    # in one write, for several processes share the pipe
    time.sleep(0.3); print("done %d\\n" % x, end="", flush=True); return x
if __name__ == "__main__":
    open, deleted, shut_down = ({module}.{name}(1) for _ in range(3))
    for number, executor in enumerate((open, deleted, shut_down)):
        executor.submit(say, 2 * number); executor.submit(say, 2 * number + 1)
    del deleted, executor
    shut_down.shutdown(wait=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [("mpgrad", "Executor"), ("concurrent.futures", "ProcessPoolExecutor")]
)
def test_what_was_submitted_is_done_before_the_interpreter_ends(
    tmp_path: Path, module: str, name: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXIT.format(module=module, name=name))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50)
    assert sorted(ended.stdout.splitlines()) == [f"done {k}" for k in range(6)]
    assert (ended.stderr, ended.returncode) == ("", 0)


NEVER_SHUT_DOWN = """
import atexit, multiprocessing
@atexit.register
def run_last():
    try:
        executors[0].submit(abs, 1)
    except RuntimeError as error:
        print(error)
import mpgrad
def say(x):
    import slow
    # in one write, for several processes share the pipe
    print("done %s\\n" % x, end="", flush=True)
{guard}
    executors = []
    for number, method in enumerate({methods}):
        context = method and multiprocessing.get_context(method)
        executors.append(mpgrad.Executor(1, mp_context=context))
        import slow
        executors[-1].submit(say, number)
"""


@pytest.mark.parametrize(
    ("runs", "guard", "methods"),
    [
        ("script.py", "if True:", ("fork", None)),
        ("-c", "if __name__ == '__main__':", ("spawn",)),
        ("import", "if True:", ("fork",)),
    ],
    ids=["script", "-c", "import"],
)
@pytest.mark.slow
def test_executors_that_nobody_shuts_down(
    tmp_path: Path, runs: str, guard: str, methods: tuple[str | None, ...]
) -> None:
    """Symptom: a program with a forked worker never ended. Cause: it was forked while another
    thread imported a module.

    That was one that the caller imported next, or the one whose import makes the executor.
    """
    (tmp_path / "slow.py").write_text("import time; time.sleep(0.3)")
    script = tmp_path / "script.py"
    script.write_text(NEVER_SHUT_DOWN.format(guard=guard, methods=methods))
    arguments = {
        "script.py": [script],
        "-c": ["-c", script.read_text()],
        "import": ["-c", "import script"],
    }[runs]
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    *done, last = ended.stdout.splitlines()
    assert (sorted(done), ended.stderr, ended.returncode) == (
        [f"done {k}" for k in range(len(methods))],
        "",
        0,
    )
    assert last == "cannot schedule new futures after interpreter shutdown"


# --- what ours does


def test_a_future_that_failed_before_it_was_sent() -> None:
    """It keeps no arguments, and what is given it fails with it."""
    x = torch.rand(3)
    reference = weakref.ref(x)
    with mpgrad.Executor(1) as executor:
        future = executor.submit(abs, x, generator())
        del x
        assert (
            future.done()
            and not future.running()
            and not future.cancelled()
            and not future.cancel()
        )
        assert reference() is None  # no cycle either
        with pytest.raises(mpgrad.AncestorFailedError, match="cannot pickle") as caught:
            executor.submit(abs, future).result()
        assert caught.value.__cause__ is future.exception()
        with pytest.raises(
            TypeError, match="item 0 cannot be sent to or from a worker: cannot pickle"
        ):
            future.result()
        with pytest.raises(TypeError, match="the function must be callable"):
            executor.submit(3)  # type: ignore[arg-type]


def test_gradients_after_the_shutdown() -> None:
    x = torch.rand(3000, requires_grad=True)
    before = threading.active_count()
    with mpgrad.Executor(2) as executor:
        results = list(executor.map(torch.mul, [x, x], [2, 3]))
        top = executor.submit(torch.exp, x)
        last = executor.submit(torch.mul, top, 2)
    reference = weakref.ref(executor)
    del executor
    gc.collect()
    assert reference() is None
    (sum(results).sum() + last.result().sum()).backward(retain_graph=True)
    torch.testing.assert_close(x.grad, 5 + 2 * x.detach().exp())
    assert threading.active_count() > before  # the graphs are kept
    del results, top, last
    wait_for_threads(before)


@pytest.mark.parametrize(
    "options", [{}, {"graphs": "recompute"}, {"graph_memory": 1}, {"graphs": "keep"}], ids=str
)
def test_gradients_of_captures_after_the_shutdown(options: dict[str, Any]) -> None:
    """Symptom: PoolClosedError. Cause: workers that had but sums, or whose graphs were to be made
    again, counted as done."""
    before = threading.active_count()
    weight = torch.rand(3, requires_grad=True)
    xs = [torch.rand(3, requires_grad=True) for _ in range(6)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).exp().sum()

    with every_loss_gets(1.0), mpgrad.Executor(2, **options) as executor:
        losses = list(executor.map(loss, xs))
    expected = torch.autograd.grad(torch.stack([loss(x) for x in xs]).sum(), [*xs, weight])
    torch.testing.assert_close(
        torch.autograd.grad(torch.stack(losses).sum(), [*xs, weight]), expected
    )
    del losses
    wait_for_threads(before)


class NotingLock:
    """A lock that calls a function when a thread has to wait for it."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._lock, self._note = threading.Lock(), note
        self.release = self._lock.release

    def acquire(self, timeout: float = -1) -> bool:
        if self._lock.locked():
            self._note()
        return self._lock.acquire(timeout=timeout)


def test_a_shutdown_that_waits_before_the_workers_retire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: `shutdown` hung. Cause: workers that only keep graphs were marked as the last ones,
    and the thread that waits for that was not told."""
    before = threading.active_count()
    executor = mpgrad.Executor(1)
    leaf = torch.ones((), requires_grad=True)
    result = executor.submit(torch.exp, leaf).result()
    scheduler, make, waits = scheduler_of(executor), dispatcher.Waiter, threading.Event()

    def note() -> None:
        waits.set()
        scheduler.wake()

    def make_noting(satisfied: Callable[[], bool], lock: threading.Lock) -> dispatcher.Waiter:
        is_last = "await_unneeded" in satisfied.__qualname__
        return make(satisfied, NotingLock(note) if is_last else lock)  # type: ignore[arg-type]

    monkeypatch.setattr(dispatcher, "Waiter", make_noting)
    retire_all = scheduler.supervisor.retire_all

    def late(now: float) -> None:
        if waits.is_set():
            retire_all(now)

    monkeypatch.setattr(scheduler.supervisor, "retire_all", late)
    thread = threading.Thread(target=executor.shutdown, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    result.backward()
    assert leaf.grad is not None
    wait_for_threads(before)


def wait_for_threads(count: int) -> None:
    """Until there are no more: the workers have ended."""
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_end_with_the_backward_that_leaves_nothing_of_their_graphs() -> None:
    """After the shutdown, and though the results are still held."""
    x = torch.rand(3000, requires_grad=True)
    before = threading.active_count()
    with mpgrad.Executor(2) as executor:
        results = list(executor.map(torch.mul, [x, x], [2, 3]))
    assert threading.active_count() > before
    sum(results).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 5))
    wait_for_threads(before)
    with pytest.raises(mpgrad.PoolClosedError, match="its workers and their graphs are gone"):
        sum(results).sum().backward()


@pytest.mark.parametrize("engine", ["thread", "inline"])
def test_other_engines(engine: str) -> None:
    x = torch.rand(3, requires_grad=True)
    with mpgrad.Executor(2, engine=engine) as executor:
        found = list(executor.map(torch.square, [x]))
    assert torch.equal(found[0], x**2)


def test_items_are_taken_as_needed() -> None:
    taken: list[int] = []

    def source() -> Any:
        for k in range(1000):
            taken.append(k)
            yield k

    with mpgrad.Executor(2) as executor:
        results = executor.map(abs, source(), buffersize=4)
        assert next(results) == 0 and len(taken) <= 6
        results.close()  # type: ignore[attr-defined]
        assert len(taken) <= 6


# Python 3.14 has these: before, what it does is written down here

since_3_14 = pytest.mark.parametrize("kind", BOTH if sys.version_info >= (3, 14) else BOTH[:1])


@since_3_14
@pytest.mark.parametrize(("chunksize", "buffersize"), [(1, 1), (1, 4), (3, 2)])
def test_a_buffer_has_so_many_chunks(kind: Any, chunksize: int, buffersize: int) -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        while True:
            taken.append(len(taken))
            yield taken[-1]

    with kind(2) as executor:
        exponents = itertools.repeat(2)
        results = executor.map(pow, source(), exponents, chunksize=chunksize, buffersize=buffersize)
        assert len(taken) == chunksize * buffersize
        for n in range(1, 10):
            assert next(results) == (n - 1) ** 2
            assert len(taken) == chunksize * (buffersize + math.ceil(n / chunksize))
        assert list(
            executor.map(abs, range(-7, 0), chunksize=chunksize, buffersize=buffersize)
        ) == [7, 6, 5, 4, 3, 2, 1]
        assert (
            list(executor.map(abs, [], buffersize=buffersize))
            == list(executor.map(abs, buffersize=buffersize))
            == []
        )


@since_3_14
def test_buffers_that_cannot_be(kind: Any) -> None:
    with kind(1) as executor:
        for buffersize in ("foo", 2.0):
            with pytest.raises(TypeError, match="buffersize must be an integer or None"):
                executor.map(abs, [1], buffersize=buffersize)
        for buffersize in (0, -1):
            with pytest.raises(ValueError, match="buffersize must be None or > 0"):
                executor.map(abs, [1], buffersize=buffersize)


@since_3_14
def test_a_buffer_that_is_full_when_the_executor_is_shut_down(kind: Any) -> None:
    executor = kind(2)
    taken = itertools.count()
    results = executor.map(abs, taken, buffersize=4)
    executor.shutdown()
    assert next(taken) == 4
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        list(results)
    executor = kind(2)
    results = executor.map(abs, [-1, -2], buffersize=2)
    executor.shutdown()
    assert list(results) == [1, 2]


def test_gradients_of_a_map_with_a_buffer() -> None:
    weight = torch.rand(3, requires_grad=True)
    xs = [torch.rand(3, requires_grad=True) for _ in range(6)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).exp().sum()

    with mpgrad.Executor(2) as executor:
        losses = list(executor.map(loss, xs, chunksize=2, buffersize=1))
    expected = torch.autograd.grad(torch.stack([loss(x) for x in xs]).sum(), [*xs, weight])
    torch.testing.assert_close(
        torch.autograd.grad(torch.stack(losses).sum(), [*xs, weight]), expected
    )


def runs(path: Path, name: str) -> None:
    """Until somebody ends it; says of a SIGTERM that it has come."""

    def told(*_: Any) -> None:
        (path / f"{name} was told").touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, told)
    (path / f"{name}.new").write_text(str(os.getpid()))
    (path / f"{name}.new").rename(path / name)
    until(path / "never")


@pytest.mark.parametrize("ending", ["terminate_workers", "kill_workers"])
@since_3_14
def test_workers_are_ended(kind: Any, ending: str, tmp_path: Path) -> None:
    with kind(2) as executor:
        done = executor.submit(abs, -1)
        assert done.result() == 1
        running = [executor.submit(runs, tmp_path, name) for name in ("a", "b")]
        pids = [pid_in(tmp_path / name) for name in ("a", "b")]
        waiting = [executor.submit(abs, -1) for _ in range(20)]
        getattr(executor, ending)()
        for use in (lambda: executor.submit(abs, 1), lambda: executor.map(abs, [1])):
            with pytest.raises(RuntimeError):
                use()
        for future in running:
            with pytest.raises(BrokenProcessPool):
                future.result(PATIENCE)
        assert concurrent.futures.wait([waiting[-1]], PATIENCE).done or waiting[-1].cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            waiting[-1].result(PATIENCE)
        assert done.result() == 1
        getattr(executor, ending)()
    assert gone(pids, within=PATIENCE)
    assert [(tmp_path / f"{name} was told").exists() for name in ("a", "b")] == [
        ending == "terminate_workers"
    ] * 2


def pid_in(path: Path) -> int:
    until(path)
    return int(path.read_text())


@since_3_14
def test_workers_that_nobody_has_used_are_ended(kind: Any) -> None:
    for ending in ("terminate_workers", "kill_workers"):
        with kind(1) as executor:
            getattr(executor, ending)()
        getattr(executor, ending)()


def ignores(path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path.touch()
    until(path / "never")


@pytest.mark.slow
def test_who_does_not_heed_a_sigterm_is_killed(tmp_path: Path) -> None:
    executor = mpgrad.Executor(1)
    worker = executor.submit(os.getpid).result()
    future = executor.submit(ignores, tmp_path / "runs")
    until(tmp_path / "runs")
    executor.terminate_workers()
    with pytest.raises(BrokenProcessPool, match=r"terminate_workers\(\) ended workers"):
        future.result(PATIENCE)
    assert gone([worker], within=PATIENCE)


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
@pytest.mark.parametrize("ending", ["terminate_workers", "kill_workers", "shutdown"])
def test_graphs_end_with_the_workers(ending: str, engine: str) -> None:
    x = torch.rand(3, requires_grad=True)
    executor = mpgrad.Executor(1, engine=engine)
    first, second = (executor.submit(torch.exp, x).result() for _ in range(2))
    first.sum().backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]
    getattr(executor, ending)(**({"kill_workers": True} if ending == "shutdown" else {}))
    assert torch.equal(second, x.exp())
    with pytest.raises(BrokenProcessPool, match=rf"{ending}\(.*\) ended workers"):
        second.sum().backward()


def test_a_shutdown_that_kills(tmp_path: Path) -> None:
    """As loky's: all that has not ended fails with a RuntimeError that says why, and no worker is
    left."""
    executor = mpgrad.Executor(2)
    futures = [executor.submit(runs, tmp_path, name) for name in ("a", "b")]
    pids = [pid_in(tmp_path / name) for name in ("a", "b")]
    futures += [executor.submit(abs, -1) for _ in range(20)]
    results = executor.map(abs, itertools.count(), buffersize=2)
    executor.shutdown(wait=True, kill_workers=True)
    assert gone(pids, within=0)
    for future in futures:
        with pytest.raises(RuntimeError, match="kill_workers=True") as caught:
            future.result(0)
        assert isinstance(caught.value, BrokenProcessPool)
    with pytest.raises(BrokenProcessPool, match="kill_workers=True"):
        next(results)
    executor.shutdown(wait=True, kill_workers=True)


def test_a_shutdown_that_kills_after_one_that_does_not(tmp_path: Path) -> None:
    executor = mpgrad.Executor(1)
    future = executor.submit(runs, tmp_path, "a")
    pids = [pid_in(tmp_path / "a")]
    executor.shutdown(wait=False)
    executor.shutdown(wait=False, kill_workers=True)
    with pytest.raises(BrokenProcessPool, match="kill_workers=True"):
        future.result(PATIENCE)
    assert gone(pids, within=PATIENCE)


def test_another_number_of_workers(tmp_path: Path) -> None:
    with mpgrad.Executor(1) as executor:
        executor.resize(3)
        names = ["a", "b", "c"]
        # of which one waits for the others
        futures = [executor.submit(meets, tmp_path, name, names) for name in names]
        assert len({future.result(PATIENCE) for future in futures}) == 3
        executor.resize(1)
        with pytest.raises(ValueError, match=r"max_workers must be at least 1 \(max_workers: 0\)"):
            executor.resize(0)
        with pytest.raises(
            TypeError, match=r"max_workers must be an integer \(max_workers: None\)"
        ):
            executor.resize(None)  # type: ignore[arg-type]
        assert executor.submit(abs, -1).result() == 1
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.resize(2)


def meets(path: Path, name: str, names: list[str]) -> int:
    (path / name).touch()
    for other in names:
        until(path / other)
    return os.getpid()


def test_a_call_that_kills_its_workers_fails_alone() -> None:
    with mpgrad.Executor(2) as executor:
        others = [executor.submit(abs, -k) for k in range(5)]
        with pytest.raises(concurrent.futures.BrokenExecutor) as caught:
            executor.submit(exits, 1).result()
        assert isinstance(caught.value, mpgrad.WorkerDiedError) and isinstance(
            caught.value, BrokenProcessPool
        )
        assert [future.result() for future in others] == list(range(5))
        assert executor.submit(abs, -1).result() == 1


def test_workers_are_replaced() -> None:
    with mpgrad.Executor(1, max_tasks_per_child=2) as executor:
        pids = list(executor.map(pid, range(6), chunksize=1))
    assert len(set(pids)) == 3


class Submits:
    """Uses an executor where it is pickled, in a thread of its own if need be."""

    def __init__(self, executor: mpgrad.Executor, in_thread: bool) -> None:
        self.executor, self.in_thread = executor, in_thread

    def __reduce__(self) -> Any:
        found = []
        ask = threading.Thread(
            target=lambda: found.append(self.executor.submit(abs, -3).result(20)), daemon=True
        )
        if self.in_thread:
            ask.start()
            ask.join(20)
        else:
            ask.run()
        return int, (found[0],)


@pytest.mark.parametrize("in_thread", [False, True])
def test_code_that_pickles_may_use_the_executor(fork_server: mpgrad.Pool, in_thread: bool) -> None:
    # symptom: a hang. cause: `submit` held a lock, which is not re-entrant, while the caller's code
    # pickled the arguments.
    with mpgrad.Executor(1) as executor:
        ask = threading.Thread(
            target=lambda: found.append(executor.submit(abs, Submits(executor, in_thread))),
            daemon=True,
        )
        found: list[Any] = []
        ask.start()
        ask.join(20)
        assert found and found[0].result(20) == 3


@pytest.mark.slow
def test_a_forked_child_of_a_program_with_executors() -> None:
    """It stumbled over its parent's as it ended, and did not finish what it had submitted to its
    own."""
    code = (
        "executors = [mpgrad.Executor(1) for _ in range(3)]\n"
        "assert [each.submit(abs, -1).result() for each in executors] == [1] * 3\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    own = mpgrad.Executor(1)\n"
        "    own.submit(lambda: (time.sleep(0.3), print('done', flush=True)))\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert said_by(code) == "done\n0\n"
