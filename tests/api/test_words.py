"""What docstrings and errors say where users often take one thing for another."""

from __future__ import annotations

import concurrent.futures
import inspect
import multiprocessing
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.quick


def first_lines(function: Any) -> str:
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


# --- `timeout` is the limit of a call, the end of a wait, or that of a whole map

LIMITS = [
    (mpgrad.Pool, "the time limit of each call"),
    (mpgrad.Pool.map, "the time limit of each call"),
    (mpgrad.Pool.apply, "the time limit of the call"),
    (mpgrad.Executor.map, "the limit of your wait for the whole map"),
    (mpgrad.AsyncResult.get, "only your wait"),
    (mpgrad.AsyncResult.wait, "only your wait"),
    (mpgrad.DifferentiableFuture.result, "only your wait"),
    (mpgrad.DifferentiableFuture.exception, "only your wait"),
    (mpgrad.ResultIterator.next, "only your wait"),
]


@pytest.mark.parametrize(("function", "words"), LIMITS)
def test_each_docstring_says_which_timeout_it_is(function: Any, words: str) -> None:
    text = " ".join((inspect.getdoc(function) or "").split())
    assert re.search(rf"timeout`?:? .*{words}", text)


def until(file: Path) -> None:
    while not file.exists():
        time.sleep(1e-3)


def test_each_error_says_which_timeout_it_was(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    later = fresh_pool.apply_async(until, (go,))
    future = fresh_pool.submit(until, go)
    results = fresh_pool.imap(until, [go])
    wait = r"^no result within the timeout of {} \(0.01 s\); the call goes on"
    for error, method, ask in [
        (multiprocessing.TimeoutError, "get", later.get),
        (concurrent.futures.TimeoutError, "result", future.result),
        (concurrent.futures.TimeoutError, "exception", future.exception),
        (multiprocessing.TimeoutError, "next", results.next),
    ]:
        with pytest.raises(error, match=wait.format(method)):
            ask(0.01)


def test_the_timeout_of_a_map_of_an_executor(tmp_path: Path) -> None:
    with mpgrad.Executor(1) as executor:
        results = executor.map(until, [tmp_path / "go"], timeout=0.01)
        with pytest.raises(
            concurrent.futures.TimeoutError,
            match=r"^no result within the timeout of map \(0.01 s since it was called\)",
        ):
            next(results)
        (tmp_path / "go").touch()


def test_the_time_limit_of_a_call(fork_server: mpgrad.Pool) -> None:
    match = r"ran longer than the time limit of a call"
    with mpgrad.Pool(1) as pool, pytest.raises(mpgrad.CallTimeoutError, match=match):
        pool.map(time.sleep, [60], timeout=0.1)


# --- the options of `submit`


@pytest.mark.parametrize("kind", [mpgrad.Pool, mpgrad.Executor])
def test_submit_has_no_time_limit_of_its_own(kind: Any, fork_server: mpgrad.Pool) -> None:
    """Its keyword arguments are the function's, which says only that it does not know one."""
    assert "cancel_after" in (inspect.getdoc(kind.submit) or "")

    def fn(x: int, **more: Any) -> Any:
        return more

    with kind(1) as pool:
        assert pool.submit(fn, 1, timeout=3).result() == {"timeout": 3}
        for name in ("timeout", "device"):
            with pytest.raises(TypeError, match=f"takes no '{name}' .* apply_async"):
                pool.submit(lambda x: x, 1, **{name: 3}).result()


# --- names that other libraries give other meanings


def test_reduce_is_not_that_of_functools() -> None:
    assert first_lines(mpgrad.Pool.reduce).startswith("Unlike `functools.reduce`, which is `map_r")


@pytest.mark.parametrize("function", [mpgrad.jacobian, mpgrad.hessian])
def test_a_list_means_items(function: Any) -> None:
    assert "list among the arguments has one entry for each item" in first_lines(function)
    pair = [torch.ones(2), torch.ones(3)]
    for given, fn in [
        ([pair], lambda each: each[0].sum() + each[2]),
        ([pair, [torch.ones(1)]], lambda one, other: one),
        ([["text"]], lambda each: each),
    ]:
        with pytest.raises(Exception) as caught:
            function(fn, *given)
        assert any(
            "a list among the arguments has one entry for each item" in note
            for note in caught.value.__notes__
        )
    with pytest.raises(ZeroDivisionError) as plain:
        function(lambda x: x / (1 // 0), torch.ones(1))
    assert not getattr(plain.value, "__notes__", [])


# --- exceptions in place of results


def test_failures_by_index(pool2: mpgrad.Pool) -> None:
    results = pool2.map(lambda k: 1 / k, [1, 0, 2, 0], on_error="return")
    failures = mpgrad.failures(results)
    assert list(failures) == [1, 3]
    assert failures[1] is results[1]
    assert mpgrad.failures([1.0, None]) == {}
    assert list(mpgrad.failures(pool2.imap(int, ["1", "x"], on_error="return"))) == [1]


# --- when workers start


def test_workers_start_with_the_pool(fork_server: mpgrad.Pool) -> None:
    """No call is needed for that."""
    with mpgrad.Pool(2) as pool:
        pool.start()
        assert len(pool.stats().workers) == 2  # those that are ready
        pool.start()
    with pytest.raises(mpgrad.PoolClosedError):
        pool.start()


def test_a_broken_pool_says_so_at_its_start(fork_server: mpgrad.Pool) -> None:
    def fails() -> None:
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"), mpgrad.Pool(1, fails) as pool:
        pool.start()


def test_progress_says_what_it_counts() -> None:
    text = " ".join((inspect.getdoc(mpgrad.Pool.map) or "").split())
    assert re.search(
        r"progress: .* Only forwards count here; `Pool.progress` also counts backwards", text
    )
