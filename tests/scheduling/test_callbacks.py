"""Callbacks, handlers and streams of the caller run in a thread of their own, so nothing that they
do holds up the pool."""

from __future__ import annotations

import concurrent.futures
import io
import logging
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually
from inside import in_scheduling_thread, patience_with_callbacks

import mpgrad
from mpgrad.callbacks import PATIENCE as OF_CALLERS
from mpgrad.callbacks import report

PATIENCE = 50.0  # seconds
SHORT = 20.0  # seconds, of which a held lock or a slow callback may take a part


def prints(k: int) -> int:
    print("line", k)
    return k


def logs(k: int) -> int:
    logging.getLogger("callbacks").warning("record %s", k)
    return k


@pytest.fixture
def impatient(fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait for the callbacks thread only as long as outside of tests."""
    patience_with_callbacks(monkeypatch, OF_CALLERS)


class LockedStream(io.StringIO):
    """A stream whose lock is no RLock: who holds it cannot write."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def write(self, text: str) -> int:
        with self.lock:
            return super().write(text)


def test_a_caller_that_holds_the_lock_of_a_stream(
    impatient: None, fresh_pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # symptom: a hang for ever. cause: the thread that delivers results also wrote what tasks had
    # printed.
    stream = LockedStream()
    fresh_pool.map(abs, [-1] * 4, 1)
    monkeypatch.setattr(sys, "stdout", stream)
    with stream.lock:
        assert fresh_pool.map_async(prints, range(40), 1).get(SHORT) == [*range(40)]
        begin = time.monotonic()
        for k in range(150):
            assert fresh_pool.submit(prints, k).result(SHORT) == k
        assert time.monotonic() - begin < SHORT  # not each of them waits for the stream
    fresh_pool.synchronize()
    assert sorted(stream.getvalue().splitlines()) == sorted(
        f"line {k}" for k in [*range(40), *range(150)]
    )


def test_an_interrupt_while_the_stream_is_waited_for(
    fresh_pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt(BaseException):
        pass

    def interrupts(*_: object) -> None:
        raise Interrupt

    patience_with_callbacks(monkeypatch, PATIENCE)
    stream = LockedStream()
    monkeypatch.setattr(sys, "stdout", stream)
    result = fresh_pool.map_async(prints, [1])
    before = signal.signal(signal.SIGALRM, interrupts)
    try:
        with stream.lock:
            while not result.ready():
                time.sleep(1e-3)
            with pytest.raises(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                result.get()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert result.get(PATIENCE) == [1]
    assert stream.getvalue() == "line 1\n"


def test_output_comes_before_the_result_of_a_future_that_is_done(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    for k in range(50):
        future = pool2.submit(prints, k)
        concurrent.futures.wait([future])
        assert future.result() == k
        assert stream.getvalue().endswith(f"line {k}\n")


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_handler_that_raises(
    fresh_pool: mpgrad.Pool, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    class Refusing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            raise error("refused")

    seen: list[str] = []
    handler, logger = Refusing(), logging.getLogger("callbacks")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        assert fresh_pool.map(logs, range(10), 1) == [*range(10)]
        fresh_pool.synchronize()
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    assert sorted(seen) == [f"record {k}" for k in range(10)]
    assert fresh_pool.map(abs, [-1]) == [1]


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(1e-3)


def test_a_callback_that_blocks(impatient: None, fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    # symptom: nobody got a result meanwhile. cause: callbacks ran in the thread that delivers
    # results.
    go, told = threading.Event(), []
    blocked = fresh_pool.submit(until, tmp_path / "go")
    # before it is done: after that this thread would call it
    blocked.add_done_callback(lambda _: go.wait(PATIENCE))
    blocked.add_done_callback(told.append)
    (tmp_path / "go").touch()
    begin = time.monotonic()
    for k in range(40):
        assert fresh_pool.submit(abs, -k).result(SHORT) == k
    assert fresh_pool.map(abs, range(40)) == [*range(40)]
    assert list(fresh_pool.imap(abs, range(40))) == [*range(40)]
    assert time.monotonic() - begin < SHORT
    assert not told
    go.set()
    fresh_pool.synchronize()
    assert told == [blocked]


def test_a_callback_waits_for_other_calls(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    found: list[Any] = []

    def asks(future: concurrent.futures.Future[int]) -> None:
        other = pool2.submit(abs, -2)
        inner = pool2.map_async(abs, [-3], callback=found.extend)
        found.append((future.result(), other.result(), inner.get()))
        pool2.synchronize()  # which cannot wait for callbacks here: this one has not ended

    pool2.submit(until, tmp_path / "go").add_done_callback(asks)
    (tmp_path / "go").touch()
    pool2.synchronize()
    pool2.synchronize()  # for the callback of the callback's call
    assert found == [(None, 2, [3]), 3]


def test_the_order_of_callbacks_and_output(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream, threads = io.StringIO(), set()

    def note(k: int, place: int) -> Callable[[object], None]:
        def called(_: object) -> None:
            threads.add(threading.current_thread().name)
            stream.write(f"callback {k} {place}\n")

        return called

    with mpgrad.Pool(1) as pool:
        pool.apply(abs, (-1,))
        monkeypatch.setattr(sys, "stdout", stream)
        pool.submit(until, tmp_path / "go")
        futures = [pool.submit(prints, k) for k in range(20)]
        for k, future in enumerate(futures):
            for place in range(2):
                future.add_done_callback(note(k, place))
        (tmp_path / "go").touch()
        assert futures[-1].result() == 19
        last = pool.apply_async(prints, (20,), callback=note(20, 0))
        assert last.get() == 20
        assert stream.getvalue().endswith("line 20\ncallback 20 0\n")
    called = [line for line in stream.getvalue().splitlines() if line.startswith("callback")]
    assert called == [
        *(f"callback {k} {place}" for k in range(20) for place in range(2)),
        "callback 20 0",
    ]
    lines = stream.getvalue().splitlines()
    assert all(lines.index(f"line {k}") < lines.index(f"callback {k} 0") for k in range(21))
    assert threads == {"mpgrad-callbacks"}


def joins(pool: mpgrad.Pool) -> None:
    pool.close()
    pool.join()


@pytest.mark.parametrize("end", [joins, mpgrad.Pool.terminate, mpgrad.Pool.synchronize])
def test_who_waits_for_the_end_waits_for_callbacks(
    fork_server: mpgrad.Pool, end: Callable[[mpgrad.Pool], None]
) -> None:
    told: list[object] = []

    def slow(value: object) -> None:
        time.sleep(0.1)
        told.append(value)

    with mpgrad.Pool(1) as pool:
        result = pool.apply_async(abs, (-1,), callback=slow)
        pool.map_async(divmod, [1], error_callback=slow)
        while not result.ready():
            time.sleep(1e-3)
        if end is mpgrad.Pool.terminate:
            assert result.get() == 1
        end(pool)
        assert told[0] == 1 and len(told) == 2


def test_a_shutdown_waits_for_callbacks(fork_server: mpgrad.Pool) -> None:
    told: list[object] = []
    with mpgrad.Executor(1) as executor:
        executor.submit(time.sleep, 0.1).add_done_callback(
            lambda future: (time.sleep(0.1), told.append(future.done()))
        )
    assert told == [True]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """That a callback has come to its end."""
    event = threading.Event()
    yield event
    assert event.wait(PATIENCE)


def test_a_callback_that_ends_its_pool(fork_server: mpgrad.Pool, told: threading.Event) -> None:
    with mpgrad.Pool(1) as pool:

        def ends(_: object) -> None:
            pool.close()
            with pytest.raises(RuntimeError, match="a callback cannot join its pool"):
                pool.join()
            pool.terminate()
            told.set()

        pool.apply_async(abs, (-1,), callback=ends)
        pool.close()
        pool.join()
        assert told.is_set()


def test_a_callback_that_shuts_its_executor_down(
    fork_server: mpgrad.Pool, told: threading.Event
) -> None:
    executor = mpgrad.Executor(1)
    executor.submit(time.sleep, 0.1).add_done_callback(lambda _: (executor.shutdown(), told.set()))
    assert told.wait(PATIENCE)


def test_a_finalizer_in_the_scheduling_thread_that_waits_for_the_pool(
    fresh_pool: mpgrad.Pool,
) -> None:
    found: list[str] = []

    def waits() -> None:
        try:
            fresh_pool.synchronize()
        except RuntimeError as error:
            found.append(str(error))

    in_scheduling_thread(fresh_pool, waits)
    fresh_pool.synchronize()
    assert found == [
        "a finalizer that Python runs in the pool's own thread cannot wait for the pool"
    ]


AT_EXIT = """
import time, mpgrad
executor = mpgrad.Executor(1)
executor.submit(time.sleep, 0.3).add_done_callback(lambda future: print("told", future.done()))
executor.submit(print, "printed")
"""


@pytest.mark.slow
def test_callbacks_and_output_as_the_interpreter_ends(fork_server: mpgrad.Pool) -> None:

    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "told True\nprinted\n", "")


def told_in_a_task(_: int) -> list[str]:
    told: list[str] = []
    with mpgrad.Pool(1, engine="inline") as pool:
        pool.submit(abs, -1).add_done_callback(lambda future: told.append("future"))
        pool.map_async(abs, [-1], callback=lambda values: told.append("map")).wait()
    return told


@pytest.mark.parametrize("context", [None, "fork"])
def test_callbacks_in_a_task_run(context: str | None) -> None:
    """Symptom: none ran, without a word. Cause: a forked worker took itself for the thread that had
    forked it."""
    with mpgrad.Pool(1, context=context) as pool:
        assert pool.map(told_in_a_task, [0]) == [["future", "map"]]


@pytest.mark.quick
def test_a_report_without_handlers_names_the_logger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report(logging.WARNING, "first")  # a handler would show the name by itself
    monkeypatch.setattr(logging.root, "handlers", [])
    report(logging.WARNING, "worker %d died", 7)
    assert capsys.readouterr().err == "mpgrad: worker 7 died\n"


def test_finished_operations_are_forgotten(pool: mpgrad.Pool) -> None:
    # symptom: operations stayed for ever, and callbacks did not come. cause: one that was sealed
    # after its last outcome was not looked at again.
    done = threading.Event()

    def slow_source() -> Iterator[int]:
        yield from range(3)
        time.sleep(0.2)  # all outcomes are there before the end is known

    result = pool.map_async(abs, slow_source(), callback=lambda values: done.set())
    assert done.wait(PATIENCE) and result.get() == [0, 1, 2]
    for _ in range(10):
        assert len(list(pool.imap(abs, range(17)))) == 17
        assert pool.map(abs, slow_source_of(4)) == [0, 1, 2, 3]
    eventually(lambda: not pool.stats().operations)


def slow_source_of(count: int) -> Iterator[int]:
    for k in range(count):
        time.sleep(0.001)
        yield k


def test_a_callback_that_ends_the_program(
    pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    # symptom: a broken pool. cause: only Exception was caught.
    pool2.apply_async(abs, (-1,), callback=lambda value: sys.exit(3)).get()
    assert pool2.map(abs, [-1]) == [1]
    pool2.synchronize()  # waits for callbacks, too
    assert "a callback of the pool raised" in caplog.text
    pool2.submit(until, tmp_path / "go").add_done_callback(lambda future: sys.exit(3))
    (tmp_path / "go").touch()
    assert pool2.map(abs, [-1] * 8) == [1] * 8
    pool2.synchronize()
    assert "a callback of a future raised" in caplog.text


class Refusing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("refused")


@pytest.mark.slow
def test_a_handler_and_a_stream_of_the_callers_that_raise(
    fresh_pool: mpgrad.Pool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The pool was broken for good."""

    def waits(go: Path) -> int:
        while not go.exists():
            time.sleep(1e-3)
        return 1

    handler = Refusing()
    logging.getLogger().addHandler(handler)
    try:
        monkeypatch.setattr(
            "sys.stdout", types.SimpleNamespace(write=handler.emit, flush=lambda: None)
        )
        assert fresh_pool.map(
            lambda x: (logging.getLogger("task").warning("logged"), print("printed"), x)[-1], [1]
        ) == [1]
        future = fresh_pool.submit(waits, tmp_path / "go")
        # before it is done: after that this thread would call it
        future.add_done_callback(lambda future: 1 / 0)
        (tmp_path / "go").touch()
        assert future.result() == 1
        assert fresh_pool.map(abs, [-1]) == [1]
    finally:
        logging.getLogger().removeHandler(handler)
    monkeypatch.undo()
    assert fresh_pool.map(abs, [-1]) == [1]
    told = capfd.readouterr().err
    assert told.count("RuntimeError: refused") >= 3 and "ZeroDivisionError" in told
