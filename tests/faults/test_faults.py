"""The fault table: each fault gives one clear error, at once, and leaves a pool that works."""

from __future__ import annotations

import functools
import itertools
import multiprocessing.pool
import os
import pickle
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from conftest import PATIENCE, eventually
from inside import in_scheduling_thread, waiting_threads

import mpgrad
from mpgrad.calls.operations import Operation
from mpgrad.memory import arena
from mpgrad.scheduling.chunk_writer import ChunkWriter
from mpgrad.scheduling.receiving import Answers
from mpgrad.scheduling.recovery import Recovery
from mpgrad.scheduling.supervisor import WorkerSupervisor
from mpgrad.submission.submitter import WINDOW_PER_WORKER

pytestmark = pytest.mark.quick


class OwnError(Exception):
    """Defined where the worker cannot import it by accident, with arguments that its message does
    not show."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class Unloadable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("only one argument")


def works(pool: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    sum(r.sum() for r in pool.map(lambda t: t * 2, [x] * 6)).backward()
    assert torch.equal(x.grad, torch.full((3,), 12.0))


def test_the_exception_of_the_first_failing_item(pool: mpgrad.Pool) -> None:
    def fn(k: int) -> int:
        if k >= 5:
            raise OwnError(k, "text")
        return k

    for _ in range(5):
        with pytest.raises(OwnError) as caught:
            pool.map(fn, range(40), 2)
        assert caught.value.args == (5, "text") and caught.value.code == 5
    (note,) = caught.value.__notes__
    assert note.startswith("raised in item 5 of fn, worker ") and note.endswith(
        "phase: forward (int)"
    )
    assert 'raise OwnError(k, "text")' in str(caught.value.__cause__)
    works(pool)


def test_an_exception_defined_in_a_function(pool: mpgrad.Pool) -> None:
    class Local(Exception):
        pass

    def fn(k: int) -> int:
        raise Local("here")

    with pytest.raises(Local, match="here"):
        pool.map(fn, [1])
    works(pool)


class Speechless(Exception):
    """Neither pickle nor whoever wants to print it get anything from it."""

    def __reduce__(self) -> Any:
        raise TypeError("no")

    def __str__(self) -> str:
        raise ValueError("no text")


class SpeechlessFailure(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("kind", [Speechless, SpeechlessFailure])
def test_an_exception_that_cannot_be_printed(pool: mpgrad.Pool, kind: type[Exception]) -> None:
    def fn(k: int) -> int:
        raise kind

    with pytest.raises((kind, mpgrad.RemoteError)) as caught:
        pool.map(fn, [1])
    assert (
        caught.value.__notes__[0].startswith("raised in item 0 of fn, ")
        and pool.stats().deaths == 0
    )
    works(pool)


def test_an_exception_whose_arguments_do_not_fit_its_init(pool: mpgrad.Pool) -> None:
    def fn(k: int) -> int:
        error = Unloadable(1, 2)
        error.extra = "kept"
        raise error

    with pytest.raises(Unloadable, match="only one argument") as caught:
        pool.map(fn, [1])
    assert caught.value.extra == "kept"
    works(pool)


def test_an_exception_that_cannot_be_pickled(pool: mpgrad.Pool) -> None:
    def fn(k: int) -> int:
        raise ValueError("with a generator", (each for each in ()))

    with pytest.raises(mpgrad.RemoteError, match=r"ValueError: .*with a generator"):
        pool.map(fn, [1])
    works(pool)


def test_an_exception_that_ends_the_program_when_it_is_loaded(pool: mpgrad.Pool) -> None:
    class Ends(Exception):
        def __reduce__(self) -> Any:
            return sys.exit, (3,)

    def fn(k: int) -> int:
        raise Ends("text")

    with pytest.raises(Ends, match="text"):
        pool.map(fn, [1])
    works(pool)


def test_others_are_cancelled_promptly(pool2: mpgrad.Pool) -> None:
    def fn(k: int) -> None:
        if k == 0:
            raise ValueError("first")
        time.sleep(0.05)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="first"):
        pool2.map(fn, range(4000), 1)
    assert time.monotonic() - begin < 50  # all of them take 100


@pytest.mark.parametrize("exception", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exceptions_that_end_programs(pool: mpgrad.Pool, exception: BaseException) -> None:
    def fn(k: int) -> None:
        raise exception

    with pytest.raises(type(exception)) as caught:
        pool.map(fn, [1])
    assert caught.value.args == exception.args
    works(pool)


def test_unpicklable_functions_items_and_results(pool: mpgrad.Pool) -> None:
    numbers = iter(k for k in range(3))
    with pytest.raises(
        TypeError,
        match=r"the function cannot be sent to or from a worker: cannot pickle 'generator'",
    ):
        pool.map(lambda x: numbers, [1])
    with pytest.raises(
        TypeError, match=r"item 2 cannot be sent to or from a worker: cannot pickle 'generator'"
    ):
        pool.map(abs, [1, 2, numbers])
    with pytest.raises(
        TypeError, match="the result cannot be sent to or from a worker: cannot pickle"
    ) as caught:
        pool.map(lambda k: (j for j in range(k)) if k else k, [0, 1])
    assert any("item 1" in note and "phase: result" in note for note in caught.value.__notes__)
    works(pool)


class Refuses:
    """Its own pickling raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error

    def __repr__(self) -> str:
        return "<refuses>"


def test_what_an_objects_own_pickling_raises(pool: mpgrad.Pool) -> None:
    """Symptom: a PicklingError. multiprocessing.Pool raises the exception itself."""
    error = LookupError("not found")
    with pytest.raises(LookupError) as caught:
        pool.map(abs, [1, Refuses(error)])
    assert caught.value is error and error.__cause__ is None
    # the last one: from Python 3.14 on, pickle adds notes of its own
    assert error.__notes__[-1] == "item 1 cannot be sent to or from a worker"
    with pytest.raises(RuntimeError, match="no function") as caught:
        pool.map(functools.partial(abs, Refuses(RuntimeError("no function"))), [1])
    assert caught.value.__notes__[-1] == "the function cannot be sent to or from a worker (args[0])"
    # it must not be taken for the end of the items
    results = pool.imap(abs, [-1, Refuses(StopIteration(3)), -2])
    assert next(results) == 1
    with pytest.raises(
        pickle.PicklingError,
        match=r"item 1 cannot be sent to or from a worker: StopIteration\(3\)",
    ):
        next(results)
    works(pool)


class Interrupted:
    """Its own pickling is interrupted the first time."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def __reduce__(self) -> Any:
        if next(self.count) == 0:
            raise KeyboardInterrupt
        return int, (-1,)


def test_an_interrupt_while_an_item_of_imap_is_packed(pool2: mpgrad.Pool) -> None:
    """Symptom: the next result never came, because the calls behind the item had numbers that left
    out one. As in a loop, only the item that was interrupted is lost."""
    ahead = WINDOW_PER_WORKER * pool2.processes
    items = [*range(ahead + 2), Interrupted(), *range(ahead + 2, 2 * ahead)]
    results = pool2.imap(abs, iter(items))
    found = [results.next(timeout=60), results.next(timeout=60)]
    with pytest.raises(KeyboardInterrupt):
        results.next(timeout=60)
    for _ in range(2, 2 * ahead):
        found.append(results.next(timeout=60))
    assert found == list(range(2 * ahead))
    with pytest.raises(StopIteration):
        next(results)


class Unreadable(Refuses):
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_a_result_that_cannot_be_carried_is_a_maybe_encoding_error(pool: mpgrad.Pool) -> None:
    for fn, exc, value in (
        (lambda k: Refuses(LookupError("not found")), "LookupError('not found')", "<refuses>"),
        (
            lambda k: Unreadable(LookupError("not found")),
            "LookupError('not found')",
            "Unreadable object at",
        ),
        (
            lambda k: torch.ones(2).to_mkldnn(),
            "its layout is torch._mkldnn",
            "layout=torch._mkldnn",
        ),
    ):
        with pytest.raises(
            multiprocessing.pool.MaybeEncodingError, match=r"the result .*cannot be sent"
        ) as caught:
            pool.map(fn, [1])
        assert isinstance(caught.value, pickle.PicklingError) and isinstance(
            caught.value, TypeError
        )
        assert exc in caught.value.exc and value in caught.value.value
        assert "phase: result" in caught.value.__notes__[0]
    works(pool)


def test_remote_tracebacks_are_the_standard_librarys(pool: mpgrad.Pool) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        pool.apply(divmod, (1, 0))
    cause = caught.value.__cause__
    assert isinstance(cause, multiprocessing.pool.RemoteTraceback) and isinstance(
        cause, mpgrad.RemoteTraceback
    )
    assert str(cause) == cause.tb == f'\n"""\n{cause.text}"""' and "ZeroDivisionError" in cause.text
    again = pickle.loads(pickle.dumps(cause))
    assert (type(again), again.tb, again.text) == (type(cause), cause.tb, cause.text)


def test_a_pool_cannot_be_captured(pool2: mpgrad.Pool) -> None:
    with pytest.raises(
        TypeError, match="a pool cannot be pickled, nor captured by a function that it runs"
    ):
        pool2.map(lambda x: pool2.map(abs, [x]), [1])


def test_a_function_that_cannot_be_loaded(pool2: mpgrad.Pool) -> None:
    class Breaks:
        def __reduce__(self) -> Any:
            return broken_loader, ()

        def __call__(self, x: int) -> int:
            return x

    with pytest.raises(OSError, match="cannot be loaded") as caught:
        pool2.map(Breaks(), [1, 2])
    assert any("phase: loading the function" in note for note in caught.value.__notes__)
    works(pool2)


def broken_loader() -> None:
    raise OSError("cannot be loaded")


def die(how: str) -> None:
    if how == "segfault":
        import faulthandler

        faulthandler.disable()
        import ctypes

        ctypes.string_at(0)
    elif how == "exit":
        os._exit(7)
    else:
        os.kill(os.getpid(), getattr(signal, how))


DEATHS = [
    ("segfault", "was killed by SIGSEGV"),
    ("exit", "exited with status 7"),
    pytest.param("SIGKILL", "was killed by SIGKILL", marks=pytest.mark.slow),
    pytest.param("SIGTERM", "was killed by SIGTERM", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("how", "text"), DEATHS)
def test_a_worker_that_dies_in_forward(fresh_pool: mpgrad.Pool, how: str, text: str) -> None:
    works(fresh_pool)
    with pytest.raises(
        mpgrad.WorkerDiedError, match=rf"worker \d+ {text} \(phase: forward, item 3\)"
    ) as caught:
        fresh_pool.map(lambda k: die(how) if k == 3 else time.sleep(0.01), range(20))
    assert (caught.value.item, caught.value.phase) == (3, "forward")
    works(fresh_pool)
    eventually(lambda: len(fresh_pool.stats().workers) == 2)


@pytest.mark.parametrize(("how", "text"), [DEATHS[1], DEATHS[2]])
def test_a_worker_that_dies_in_backward(fresh_pool: mpgrad.Pool, how: str, text: str) -> None:
    class Dies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            die(how)
            return grad

    x = torch.ones(2, requires_grad=True)
    results = fresh_pool.map(lambda t: Dies.apply(t), [x])
    with pytest.raises(mpgrad.WorkerDiedError, match=rf"{text} \(phase: backward, item 0\)"):
        results[0].sum().backward()
    with pytest.raises(mpgrad.WorkerDiedError, match=rf"{text} \(phase: backward, item 0\)"):
        results[0].sum().backward()
    works(fresh_pool)


def test_without_retries_what_is_lost_raises(fork_server: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    weight = torch.ones(2, requires_grad=True)
    with mpgrad.Pool(2, retries=0) as pool:
        made = pool.map(lambda k: (os.getpid(), x * k * weight), range(8), 1)
        results = [result for _, result in made]
        os.kill(made[0][0], signal.SIGKILL)
        eventually(lambda: pool.stats().deaths == 1)
        for _ in range(2):
            with pytest.raises(
                mpgrad.WorkerDiedError, match=r"phase: backward.*the graph .* was lost with it"
            ):
                sum(r.sum() for r in results).backward(retain_graph=True)
        # what has come stays valid
        assert [bool((r == k).all()) for k, r in enumerate(results)] == [True] * 8
        with pytest.raises(mpgrad.WorkerDiedError, match=r"item 3\)"):
            pool.map(lambda k: die("SIGKILL") if k == 3 else k, range(6))
        works(pool)


def test_an_idle_worker_that_dies_is_replaced(fresh_pool: mpgrad.Pool) -> None:
    for _ in range(5):
        victim = fresh_pool.apply(os.getpid)
        os.kill(victim, signal.SIGKILL)
        works(fresh_pool)


def test_calls_that_had_not_begun_go_to_others(fresh_pool: mpgrad.Pool) -> None:
    futures = [fresh_pool.submit(time.sleep, 0.02) for _ in range(20)]
    killer = fresh_pool.submit(die, "SIGKILL")
    futures += [fresh_pool.submit(pow, k, 2) for k in range(20)]
    assert isinstance(killer.exception(30), mpgrad.WorkerDiedError)
    assert [future.result(30) for future in futures] == [None] * 20 + [k * k for k in range(20)]


def test_a_failing_initializer(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(2, initializer=broken_loader) as pool:
        for _ in range(2):
            with pytest.raises(OSError, match="cannot be loaded") as caught:
                pool.map(abs, [1])
        assert any("phase: initializer" in note for note in caught.value.__notes__)


def test_workers_that_die_at_start(fork_server: mpgrad.Pool) -> None:
    message = r"exited with status 5 \(phase: start\); so did 3 in a row"
    with (
        mpgrad.Pool(1, initializer=os._exit, initargs=(5,)) as pool,
        pytest.raises(mpgrad.WorkerDiedError, match=message),
    ):
        pool.map(abs, [1])


def test_ctrl_c_during_a_map(fresh_pool: mpgrad.Pool, interruptible: None) -> None:
    works(fresh_pool)
    interrupted(fresh_pool, lambda: fresh_pool.map(time.sleep, [100] * 4, 1))
    works(fresh_pool)


def test_ctrl_c_during_backward(fresh_pool: mpgrad.Pool, interruptible: None) -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(100)
            return grad

    x = torch.ones(2, requires_grad=True)
    results = fresh_pool.map(lambda t: Slow.apply(t), [x] * 2, 1)
    interrupted(fresh_pool, lambda: sum(r.sum() for r in results).backward())
    works(fresh_pool)


def interrupted(pool: mpgrad.Pool, work: Callable[[], object]) -> None:
    """Run `work` of 100 seconds or more, interrupt it as Ctrl-C does (workers too) when it waits,
    and see it end before."""
    for child in psutil.Process().children(recursive=True):
        child.send_signal(signal.SIGINT)
    main, was_raised = threading.main_thread().ident or 0, threading.Event()

    def interrupt() -> None:
        while not waiting_threads(pool):
            time.sleep(2e-3)
        signal.pthread_kill(main, signal.SIGINT)
        # it came when the thread was about to block: Python looks again at the next signal only
        if not was_raised.wait(10):
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        work()
    was_raised.set()
    assert time.monotonic() - begin < 50
    thread.join()


def test_after_close(fork_server: mpgrad.Pool) -> None:
    pool = mpgrad.Pool(2)
    x = torch.ones(2, requires_grad=True)
    (y,) = pool.map(lambda t: t * 2, [x])
    with pytest.raises(
        ValueError, match="the pool is still open; close or terminate it before join"
    ):
        pool.join()
    running = pool.map_async(abs, range(50))
    pool.close()
    for use in (
        lambda: pool.map(abs, [1]),
        lambda: pool.submit(abs, 1),
        lambda: pool.imap(abs, [1]),
        pool.__enter__,
    ):
        with pytest.raises(mpgrad.PoolClosedError, match="the pool is closed; make a new one"):
            use()
    assert running.get(30) == list(range(50))
    y.sum().backward(retain_graph=True)  # close alone keeps the graphs
    pool.join()
    pool.join()
    assert y.tolist() == [2, 2] and x.grad.tolist() == [2, 2]
    with pytest.raises(
        mpgrad.PoolClosedError,
        match="the pool is closed, and its workers and their graphs are gone",
    ):
        y.sum().backward()
    pool.terminate()


def test_terminate_fails_what_is_under_way(fork_server: mpgrad.Pool) -> None:
    pool = mpgrad.Pool(2)
    result = pool.map_async(time.sleep, [100] * 10, 1)
    future = pool.submit(abs, 1)
    iterator = pool.imap(time.sleep, [100] * 3)
    begin = time.monotonic()
    pool.terminate()
    assert time.monotonic() - begin < 50
    for wait in (result.get, future.result, iterator.next):
        with pytest.raises(mpgrad.PoolClosedError):
            wait()


def test_one_thread_at_a_time_answers_what_came_too_late(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would give an operation the same error twice."""
    failed, entered, go = [], threading.Event(), threading.Event()
    fail = Operation.fail

    def fail_slowly(operation: Operation, error: BaseException) -> None:
        failed.append(operation)
        entered.set()
        assert go.wait(PATIENCE)
        fail(operation, error)

    pool = mpgrad.Pool(1)
    results = [pool.apply_async(time.sleep, (600,)) for _ in range(2)]
    monkeypatch.setattr(Operation, "fail", fail_slowly)
    ends = threading.Thread(target=pool.terminate)
    ends.start()
    assert entered.wait(PATIENCE)
    late = threading.Event()
    other = threading.Thread(target=in_scheduling_thread, args=(pool, late.set))
    other.start()
    other.join(30)  # it waits for nobody
    assert not other.is_alive()
    go.set()
    ends.join()
    assert late.wait(PATIENCE)
    assert failed == [result._operation for result in results]
    for result in results:
        with pytest.raises(mpgrad.PoolClosedError):
            result.get(PATIENCE)


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_close_and_join_of_each_engine(fork_server: mpgrad.Pool, engine: str) -> None:
    pool = mpgrad.Pool(2, engine=engine)
    result = pool.map_async(abs, range(10))
    pool.close()
    pool.join()
    assert result.get() == list(range(10))
    with pytest.raises(mpgrad.PoolClosedError):
        pool.apply(abs, (1,))


@pytest.mark.parametrize(
    "place",
    [
        (Answers, "results"),
        (Answers, "gradients"),
        (Answers, "collected"),
        (ChunkWriter, "forward"),
        (ChunkWriter, "backward"),
        (Recovery, "take_apart"),
        (WorkerSupervisor, "requeue"),
    ],
    ids=lambda place: ".".join([place[0].__name__, place[1]]),
)
def test_a_fault_of_our_own_breaks_the_pool(
    fork_server: mpgrad.Pool, place: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Whoever waited for gradients waited for ever."""

    def faulty(*_: object) -> None:
        raise NameError("a misspelt name")

    weight = torch.ones(3, requires_grad=True)
    with mpgrad.Pool(2) as pool:
        total = sum(pool.map(lambda k: (weight * k).sum(), range(4)))
        monkeypatch.setattr(*place, faulty)
        if place[0] in (Recovery, WorkerSupervisor):
            # one that the backward needs
            victim = max(pool.stats().workers, key=lambda worker: worker.graphs)
            os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(mpgrad.InternalError, match="NameError: a misspelt name"):
            pool.map(abs, [-1])
            total.backward()  # type: ignore[union-attr]
        with pytest.raises(mpgrad.InternalError, match="please report"):
            pool.map(abs, [-1])
    assert "the dispatcher failed" in caplog.text


def test_from_a_forked_child(fresh_pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    (y,) = fresh_pool.map(lambda t: t * 2, [x])
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        errors = []
        for use in (
            lambda: fresh_pool.map(abs, [1]),
            lambda: y.sum().backward(),
            lambda: fresh_pool.submit(abs, 1),
        ):
            try:
                use()
            except RuntimeError as error:
                errors.append(str(error))
        del y
        fresh_pool.terminate()
        os.write(writer, pickle.dumps(errors))
        os._exit(0)
    os.waitpid(pid, 0)
    errors = pickle.loads(os.read(reader, 1 << 16))
    os.close(reader)
    os.close(writer)
    assert len(errors) == 3
    assert all(
        f"this pool belongs to process {os.getpid()} and cannot be used in its forked child {pid}"
        in e
        for e in errors
    )
    works(fresh_pool)
    y.sum().backward()


def test_no_room_for_an_item(pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "free_memory", lambda: 10_000_000)
    message = r"\(400,000,000 bytes requested, 10,000,000 bytes of memory free\); drop"
    with pytest.raises(mpgrad.SharedMemoryError, match=message):
        pool.map(lambda x: x, [torch.ones(2), torch.empty(100_000_000)])
    monkeypatch.undo()
    works(pool)


def test_no_room_for_a_result(pool2: mpgrad.Pool) -> None:
    def fn(k: int) -> torch.Tensor:
        from mpgrad.memory import arena

        arena.free_memory = lambda: 10_000_000
        return torch.empty(100_000_000) if k == 3 else torch.empty(3)

    with mpgrad.Pool(1) as pool:
        with pytest.raises(mpgrad.SharedMemoryError, match="400,000,000 bytes requested") as caught:
            pool.map(fn, range(5))
        assert any("item 3" in note for note in caught.value.__notes__)
        works(pool)


def test_the_system_refuses_memory(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, initializer=limit_files, initargs=(1 << 27,)) as pool:
        with pytest.raises(mpgrad.SharedMemoryError, match="800,000,000 bytes requested"):
            pool.map(lambda k: torch.empty(100_000_000, dtype=torch.float64), [0])
        works(pool)


def limit_files(nbytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"processes": 0}, ValueError, r"processes must be at least 1 \(processes: 0\)"),
        ({"processes": -3}, ValueError, r"processes must be at least 1 \(processes: -3\)"),
        ({"processes": "2"}, TypeError, r"processes must be an integer \(processes: '2'\)"),
        ({"processes": 2.0}, TypeError, r"processes must be an integer \(processes: 2.0\)"),
        ({"processes": True}, TypeError, r"processes must be an integer \(processes: True\)"),
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker must be at least 1"),
        ({"maxtasksperchild": 0}, ValueError, "maxtasksperchild must be at least 1"),
        (
            {"maxtasksperchild": 0.5},
            ValueError,
            r"maxtasksperchild must be an integer \(maxtasksperchild: 0.5\)",
        ),
        (
            {"engine": "gpu"},
            ValueError,
            r"engine must be one of process, thread, inline, stream, ray \(engine: 'gpu'\)",
        ),
        ({"initializer": 3}, TypeError, "initializer must be a function or None"),
        (
            {"initializer": abs, "initargs": (sys._getframe(),)},
            TypeError,
            "the initializer or its arguments cannot be",
        ),
        ({"context": 3}, TypeError, "context must be a name or a context of multiprocessing"),
        (
            {"context": "vfork"},
            ValueError,
            r"context must be one of .*spawn.* \(context: 'vfork'\)",
        ),
        (
            {"deterministic": "yes"},
            TypeError,
            r"deterministic must be True or False \(deterministic: 'yes'\)",
        ),
        (
            {"deterministic": 1},
            TypeError,
            r"deterministic must be True or False \(deterministic: 1\)",
        ),
        (
            {"initializer": abs, "initargs": 3},
            TypeError,
            r"initargs must be an iterable \(given: 3\)",
        ),
    ],
)
def test_bad_arguments_of_the_pool(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        mpgrad.Pool(**arguments)


def test_bad_arguments_of_calls(pool: mpgrad.Pool) -> None:
    with pytest.raises(TypeError, match=r"the function must be callable \(given: 3\)"):
        pool.map(3, [1])
    with pytest.raises(ValueError, match=r"chunksize must be at least 1 \(chunksize: 0\)"):
        pool.map(abs, [1], 0)
    not_iterable: list[tuple[str, Callable[[], object]]] = [
        (r"the items must be an iterable \(given: 3\)", lambda: pool.map(abs, 3)),
        (r"the items must be an iterable \(given: 3\)", lambda: pool.starmap(abs, 3)),
        (
            r"the items must be an iterable \(given: tensor\(3\.\)\)",
            lambda: pool.map(abs, torch.tensor(3.0)),
        ),
        (
            r"the function comes first, then the items \(given: <built-in function abs>\)",
            lambda: pool.map([1], abs),
        ),
        (
            r"the function comes first, then the items \(given: <class 'list'>\)",
            lambda: pool.imap([1], list),
        ),
        (
            r"as the arguments of a call, must be an iterable \(given: 1\)",
            lambda: pool.starmap(abs, [1, 2]),
        ),
        (r"args must be an iterable \(given: 3\)", lambda: pool.apply(abs, 3)),
        (
            r"the function comes first, then args \(given: <built-in function abs>\)",
            lambda: pool.apply_async((3,), abs),
        ),
        (r"kwds must be a mapping \(kwds: 4\)", lambda: pool.apply(abs, (3,), 4)),
        (
            r"the items must be an iterable \(given: 3\)",
            lambda: pool.reduce("sum", 3, torch.zeros(1)),
        ),
        (r"the function comes first, then the items", lambda: pool.map_reduce([1], abs, "sum")),
        (r"the items must be an iterable \(given: 3\)", lambda: mpgrad.advise(abs, 3)),
    ]
    for match, call in not_iterable:
        with pytest.raises(TypeError, match=match):
            call()
    assert pool.apply(int, ("11",), types.MappingProxyType({"base": 2})) == 3
    with pytest.raises(TypeError, match=r"path must name a file, or be None \(path: 3\)"):
        pool.timeline(3)
    with pytest.raises(
        TypeError, match="progress must be True, False, a description, or a function"
    ):
        pool.map(abs, [1], progress=3)
    works(pool)
