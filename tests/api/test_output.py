"""What tasks print, log and warn of arrives in the caller's streams and handlers."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import threading

import pytest

import mpgrad


def test_prints_arrive_before_the_result(pool: mpgrad.Pool) -> None:
    def fn(k: int) -> int:
        print("line", k)
        print("to stderr", k, file=sys.stderr)
        sys.stdout.write(f"unfinished {k} ")
        return k

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert pool.map(fn, range(3), 1) == [0, 1, 2]
        seen = out.getvalue()
    assert all(f"line {k}\n" in seen and f"unfinished {k} " in seen for k in range(3))
    assert sorted(err.getvalue().splitlines()) == [f"to stderr {k}" for k in range(3)]
    assert "stderr" not in seen


def test_the_crash_traceback_of_a_worker(fork_server: mpgrad.Pool) -> None:
    def fn(k: int) -> None:
        print("about to end")
        os._exit(3)

    out = io.StringIO()
    with (
        mpgrad.Pool(1, retries=0) as pool,
        contextlib.redirect_stdout(out),
        pytest.raises(mpgrad.WorkerDiedError),
    ):
        pool.map(fn, [1])
    assert out.getvalue() == "about to end\n"


# Python 3.12 says it for an instant after `join`, while the system has not ended the thread
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_prints_of_other_threads_and_of_forked_children(fresh_pool: mpgrad.Pool) -> None:
    def fn(k: int) -> int:
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            sys.stdout.write("")  # not ours to send: the link belongs to the worker
            os._exit(0)
        return os.waitpid(child, 0)[1]

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert fresh_pool.map(fn, [1]) == [0]
    assert out.getvalue() == "from a thread\n"


def test_prints_where_nobody_reads(fresh_pool: mpgrad.Pool) -> None:
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stdout(closed):
        assert fresh_pool.map(lambda k: print("unheard") or k, range(3)) == [0, 1, 2]
    assert fresh_pool.apply(abs, (-1,)) == 1


def test_streams_are_files_as_far_as_code_asks(pool2: mpgrad.Pool) -> None:
    def fn() -> tuple[int, bool, str]:
        return sys.stdout.fileno(), sys.stdout.isatty(), sys.stdout.encoding

    assert pool2.apply(fn) == (1, False, "utf-8")
    with pytest.raises(TypeError, match="must be str"):
        pool2.apply(lambda: sys.stdout.write(b"bytes"))


def test_log_records(caplog: pytest.LogCaptureFixture, fork_server: mpgrad.Pool) -> None:
    def fn(k: int) -> int:
        logger = logging.getLogger("simulation.step")
        logger.info("step %d of %s", k, object)
        logger.debug("not wanted")
        try:
            return 1 // k
        except ZeroDivisionError:
            logger.exception("failed")
            return -1

    with caplog.at_level(logging.INFO), mpgrad.Pool(2) as pool:
        assert pool.map(fn, [1, 0]) == [1, -1]
        records = [record for record in caplog.records if record.name == "simulation.step"]
    assert sorted(record.getMessage().splitlines()[0] for record in records) == [
        "failed",
        "step 0 of <class 'object'>",
        "step 1 of <class 'object'>",
    ]
    (failed,) = (record for record in records if record.levelno == logging.ERROR)
    assert failed.exc_info is not None and failed.exc_info[0] is ZeroDivisionError


@pytest.mark.slow
def test_a_program_without_streams() -> None:
    program = """
import sys
sys.stdout = sys.stderr = None
import mpgrad
with mpgrad.Pool(1) as pool:
    assert pool.map(lambda k: print("unheard") or k, [1, 2]) == [1, 2]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
