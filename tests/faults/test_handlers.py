"""A handler of a signal may wait for the pool, wherever the main thread is in a future."""

from __future__ import annotations

import concurrent.futures
import faulthandler
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mpgrad
import mpgrad.calls
from mpgrad.calls.futures import BELLS

PATIENCE = 60.0  # seconds
CALLS = str(Path(mpgrad.calls.__file__).parent)
FILES = {
    concurrent.futures.wait.__code__.co_filename,
    threading.__file__,
    f"{CALLS}/results.py",
    f"{CALLS}/futures.py",
}


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(1e-3)


def waits_for(*futures: Future[Any]) -> Any:
    return concurrent.futures.wait(futures)


def waits_for_one(*futures: Future[Any]) -> Any:
    return concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)


def waits_for_an_error(*futures: Future[Any]) -> Any:
    return concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)


def takes_as_completed(*futures: Future[Any]) -> Any:
    return list(concurrent.futures.as_completed(futures))


def asks(*futures: Future[Any]) -> Any:
    first, last = futures
    first.done(), first.running(), first.cancelled(), repr(first)
    return last.result(), first.exception()


def adds_callbacks(*futures: Future[Any]) -> Any:
    for future in futures:
        future.add_done_callback(abs)  # which raises: that is logged
    return futures[0].result()


def cancels(*futures: Future[Any]) -> Any:
    return [future.cancel() for future in futures]


WAYS = [
    asks,
    adds_callbacks,
    cancels,
    waits_for,
    waits_for_one,
    waits_for_an_error,
    takes_as_completed,
]


class Handler:
    """Stands for a handler of a signal that comes at the line with this number, on top of the
    frame that runs it."""

    def __init__(self, at: int, handle: Callable[[], None]) -> None:
        self.left = at
        self.handle = handle

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            self.handle()
        return self if self.left > 0 else None


def attempt(pool: mpgrad.Pool, folder: Path, way: Callable[..., Any], at: int) -> bool:
    """Whether the handler came."""
    go = folder / f"{way.__name__} {at}"
    futures = [pool.submit(until, go) for _ in range(2)]

    def handle() -> None:
        go.touch()
        assert pool.map(abs, [-1, -2], 1) == [1, 2]
        assert pool.submit(abs, -3).result() == 3
        for future in futures:
            # one of them may have been cancelled
            assert isinstance(future.exception() if not future.cancelled() else None, type(None))
        assert concurrent.futures.wait(futures).done == {*futures}
        assert {*concurrent.futures.as_completed(futures)} == {*futures}
        pool.synchronize()

    handler = Handler(at, handle)
    timer = threading.Timer(0.05, go.touch)  # if the handler comes too late, or never
    timer.start()
    sys.settrace(handler)
    try:
        way(*futures)
    except CancelledError:
        pass
    finally:
        sys.settrace(None)
    go.touch()
    timer.cancel()
    timer.join()
    assert concurrent.futures.wait(futures).done == {*futures}
    return handler.left <= 0


def main(folder: Path, engine: str, stride: int) -> None:
    """Give up with a traceback of all threads where it hangs."""
    with mpgrad.Pool(2, engine=engine) as pool:
        for way in WAYS:
            at = 1
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            while attempt(pool, folder, way, at):
                faulthandler.dump_traceback_later(PATIENCE, exit=True)
                at += stride
            assert at > 1, way
    faulthandler.cancel_dump_traceback_later()
    print("moments", at)


@pytest.mark.parametrize(
    ("engine", "stride"),
    [
        ("thread", 24),
        pytest.param("process", 7, marks=pytest.mark.slow),
        pytest.param("thread", 3, marks=pytest.mark.slow),
    ],
)
def test_a_handler_that_waits_for_the_pool(tmp_path: Path, engine: str, stride: int) -> None:
    # symptom: a hang for ever. cause: the main thread was in the lock of a future, which the
    # scheduling thread needed to say that the future was done.
    ended = subprocess.run(
        [sys.executable, __file__, str(tmp_path), engine, str(stride)],
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
    )
    assert ended.returncode == 0 and ended.stdout.startswith("moments"), ended.stderr


def test_futures_of_several_kinds_together(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    """Threads of `concurrent.futures` tell the same waiter as the scheduling threads of pools."""
    with mpgrad.Pool(1, engine="thread") as other, concurrent.futures.ThreadPoolExecutor(2) as one:
        for _ in range(20):
            futures: list[Future[Any]] = []
            for k in range(3):
                futures += [each.submit(abs, -k) for each in (pool2, one, other)]
            cancelled = pool2.submit(until, Path("/"))
            cancelled.cancel()
            for when in ("FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED"):
                assert concurrent.futures.wait(futures, PATIENCE, when).done
            taken = [*concurrent.futures.as_completed([cancelled, *futures, *futures], PATIENCE)]
            assert len(taken) == 10 and {*taken} == {cancelled, *futures}
            failed = pool2.submit(divmod, 1, 0)
            late = one.submit(time.sleep, 0.05)
            done, not_done = concurrent.futures.wait([failed, late], PATIENCE, "FIRST_EXCEPTION")
            assert failed in done and (late in not_done or late.done())
        endless = other.submit(until, tmp_path / "go")
        assert concurrent.futures.wait([endless], 0.01) == ({*()}, {endless})
        with pytest.raises(concurrent.futures.TimeoutError):
            [*concurrent.futures.as_completed([endless], 0.01)]
        (tmp_path / "go").touch()
        assert not endless._entries[BELLS]
        assert all(isinstance(each, str) for each in endless._entries)  # no thread is inside


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
