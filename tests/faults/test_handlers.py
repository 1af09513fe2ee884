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
    go = folder / str(at)
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


def main(name: str, folder: Path) -> None:
    """Give up with a traceback of all threads where it hangs."""
    way = next(way for way in WAYS if way.__name__ == name)
    with mpgrad.Pool(2, engine="thread") as pool:
        at = 1
        while True:
            faulthandler.dump_traceback_later(PATIENCE / 3, exit=True)
            if not attempt(pool, folder, way, at):
                break
            at += 1
    faulthandler.cancel_dump_traceback_later()
    print("moments", at)


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_a_handler_that_waits_for_the_pool(way: str, tmp_path: Path) -> None:
    # symptom: a hang for ever. cause: the main thread was in the lock of a future, which the
    # scheduling thread needed to say that the future was done.
    ended = subprocess.run(
        [sys.executable, __file__, way, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[1]) > 20


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
