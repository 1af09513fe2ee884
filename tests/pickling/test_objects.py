"""Whatever a script can hold: run as scripts, because what stands in one travels by value; and what
cannot travel at all."""

from __future__ import annotations

import array
import codecs
import concurrent.futures
import contextlib
import contextvars
import functools
import gzip
import io
import multiprocessing
import os
import pickle
import queue
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import mpgrad
from mpgrad.pickling import exceptions, reducers, structure
from mpgrad.testing import assert_same_as_serial

FOLDER = Path(__file__).parent


def run_script(name: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", str(FOLDER / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_what_a_script_holds() -> None:
    lines = run_script("held_by_a_script.py")
    assert len(lines) > 10 and all(line.endswith(" ok") for line in lines), "\n".join(lines)


@pytest.mark.slow
def test_what_torch_compile_made(tmp_path: Path) -> None:
    lines = run_script("compiled_by_a_script.py", str(tmp_path / "compilations"))
    assert len(lines) > 15 and all(line.endswith(" ok") for line in lines), "\n".join(lines)


# --- what cannot travel


class Log:
    def __init__(self) -> None:
        self.file = open(os.devnull, "wb")  # as scripts do


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.file.close()


def numbers() -> Iterator[int]:
    yield 1


def refusal(pool: mpgrad.Pool, fn: Callable[..., Any], *items: Any) -> str:
    with pytest.raises((TypeError, pickle.PicklingError)) as caught:
        pool.map(fn, list(items or [1]))
    return str(caught.value)


def test_the_path_to_what_cannot_travel(pool: mpgrad.Pool, log: Log) -> None:
    held = SimpleNamespace(log=log, shared={"logs": [log]})

    def closes_over(x: Any) -> Any:
        return held.log

    def calls(x: Any) -> Any:
        return closes_over(x)

    for fn, path in (
        (closes_over, "closes_over's closure: held.log.file"),
        (calls, "calls's closure: closes_over, closes_over's closure: held.log.file"),
        (functools.partial(closes_over, log), "func, closes_over's closure: held.log.file"),
        (functools.partial(max, {"a": (1, log)}), "args[0]['a'][1].file"),
        (lambda x, log=log: log, "<lambda>'s default 0.file"),
        (log.__init__, "file"),  # a method
    ):
        said = refusal(pool, fn)
        assert said.startswith("the function cannot be sent to or from a worker: cannot pickle")
        assert f"({path}); pass its name, and open it in the function" in said
    assert (
        "item 1 cannot be sent" in (said := refusal(pool, str, 1, [2, {"log": log}]))
        and "([1]['log'].file)" in said
    )
    with pytest.raises(TypeError, match=r"item 0 .*\(\['1'\].file\)"):
        pool.starmap(max, [(1, log)])


# ruff: noqa: SIM115  # the tests are about files that are open
OPEN: dict[str, Callable[[str], Any]] = {
    "text": open,
    "binary": lambda name: open(name, "rb"),
    "raw": lambda name: open(name, "rb", buffering=0),
    "to read and write": lambda name: open(name, "r+"),
    "to write": lambda name: open(name, "a"),
    "temporary": lambda name: tempfile.NamedTemporaryFile("w+"),
    "binary and temporary": lambda name: tempfile.TemporaryFile(),
    "compressed": lambda name: gzip.open(f"{name}.gz"),
    "compressed text": lambda name: gzip.open(f"{name}.gz", "rt"),
    "archive": lambda name: zipfile.ZipFile(f"{name}.zip", "w"),
    "codec": lambda name: codecs.open(name, encoding="utf-8"),
    "directory": lambda name: os.scandir(os.path.dirname(name)),
    "input": lambda name: sys.__stdin__,
}


@pytest.fixture
def name(tmp_path: Path) -> str:
    path = tmp_path / "held"
    path.write_text("contents")
    (tmp_path / "held.gz").write_bytes(gzip.compress(b"contents"))
    return str(path)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:codecs.open:DeprecationWarning")
@pytest.mark.parametrize("kind", OPEN)
def test_open_files_are_refused(kind: str, name: str, pool2: mpgrad.Pool) -> None:
    """cloudpickle sent files that were open for reading as a StringIO, a copy of the contents."""
    file = OPEN[kind](name)
    held = SimpleNamespace(file=file)
    try:
        for fn, item in ((str, file), (str, [held]), (lambda x: held.file, 1), (file.close, 1)):
            said = refusal(pool2, fn, item)
            assert "cannot be sent to or from a worker: " in said
            assert "; pass its name, and open it in the function, or once a worker" in said
    finally:
        if kind != "input":
            file.close()


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["r", "rb", "w"])
def test_open_files_are_refused_as_results(
    mode: str, name: str, pool: mpgrad.Pool, pool2: mpgrad.Pool
) -> None:
    assert "(['file']); pass its name, and open it" in refusal(
        pool2,
        lambda name: {"file": open(name, mode)},
        name,
    )
    # nobody would close a file of a task in this process
    assert "; pass its name" in refusal(pool, lambda x: [sys.__stdin__])
    with pytest.raises(TypeError, match="pass its name"):
        pool2.map(open, [name])


def all_of(file: Any) -> Any:
    with file:
        return file.read()


@pytest.mark.quick
def test_files_in_memory_and_the_streams_of_the_process(pool2: mpgrad.Pool) -> None:
    with tempfile.SpooledTemporaryFile() as spooled:
        spooled.write(b"small")
        spooled.seek(0)
        buffers = [io.StringIO("text"), io.BytesIO(b"bytes"), spooled]
        assert pool2.map(all_of, buffers) == ["text", b"bytes", b"small"]
    out = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        assert pool2.map(lambda stream: stream is sys.stdout, [sys.stdout]) == [True]
        assert pool2.apply(lambda: print("heard", file=out)) is None
        out.flush()
        assert out.buffer.getvalue() == b"heard\n"  # type: ignore[attr-defined]


def test_the_path_in_a_result(pool: mpgrad.Pool) -> None:
    assert "(['numbers'][0]); make a list of its values" in refusal(
        pool, lambda x: {"numbers": [numbers()]}
    )


def test_what_to_do(pool2: mpgrad.Pool) -> None:
    thread = threading.Thread(target=print)
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    with socket.socket() as open_socket, sqlite3.connect(":memory:") as connection:
        child = subprocess.Popen([sys.executable, "-c", ""])
        for value, remedy in (
            (open_socket, "connect in the function, or once a worker, with Pool(initializer=...)"),
            (connection, "connect in the function"),
            (numbers(), "make a list of its values"),
            (thread, "start it in the function"),
            (child, "it is the caller's child"),
            (queue.Queue(), "return the values that you would put into it"),
            (queue.SimpleQueue(), "return the values that you would put into it"),
            (future, "pass its result()"),
            (sys._getframe(), "pass its text"),
        ):
            said = refusal(pool2, closing_over(value))
            assert f"(<lambda>'s closure: value); {remedy}" in said
        child.wait()
    connection.close()


def closing_over(value: Any) -> Callable[[Any], Any]:
    return lambda x: value


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    cycle: list[Any] = []
    cycle.append([cycle, log])
    fails = functools.partial(exceptions.fails, False)
    assert exceptions.find(cycle, fails) == ("[0][1].file", log.file)
    monkeypatch.setattr(exceptions, "SECONDS", 0.0)
    assert exceptions.find(cycle, fails) == ("", cycle)


class Unruly(dict[Any, Any]):
    """Of which an error's search learns nothing."""

    def __repr__(self) -> str:
        raise ValueError("no name yet")

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name == "__getstate__":  # which pickle asks for, up to Python 3.10
            raise AttributeError(name)
        raise ValueError(f"no {name} yet")


def test_the_search_does_not_fail_itself(pool: mpgrad.Pool, log: Log) -> None:
    """Symptom: "ValueError: no name yet" in place of what could not be pickled."""
    held = {Unruly(): log}
    # from Python 3.14 on, pickle itself asks for the key's `repr`
    with pytest.raises((TypeError, ValueError)) as caught:
        pool.map(lambda x: held, [1])
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "closure: held[<Unruly instance at 0x" in said and "].file)" in said
    long = {"name" * 100: {log}}
    assert (
        len(said := refusal(pool, lambda x: long)) < 500
        and "(<lambda>'s closure: long['namename" in said
    )
    unruly = Unruly(log=log)
    unruly.items = None  # type: ignore[assignment,method-assign]
    assert "(<lambda>'s closure: unruly" in refusal(pool, lambda x: unruly)


def test_a_proxy_of_what_is_gone(pool: mpgrad.Pool, log: Log) -> None:
    proxy = weakref.proxy(Holder(torch.ones(1)))
    assert "uses a weak proxy (weakref.proxy) of an object that is gone; drop" in refusal(
        pool, lambda x: proxy
    )
    held = [proxy, log]
    assert "closure: held[1].file)" in refusal(pool, lambda x: held)
    assert pool.map(len, [held[:1]]) == [1]


def test_what_a_script_registers_as_an_operator(fork_server: mpgrad.Pool) -> None:
    """Symptom: "cannot pickle 'torch._C._DispatchModule'", or an AttributeError without a word of
    where and why."""
    library = torch.library.Library("registered_here", "FRAGMENT")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        twice: Any = torch.ops.registered_here.twice
        register = torch.library.custom_op(
            "registered_here::thrice", mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        thrice = register(lambda x: x * 3)
        with mpgrad.Pool(1) as pool:
            for value in (thrice, library):
                said = refusal(pool, closing_over(value))
                assert (
                    "(<lambda>'s closure: value); register operators in a module that workers "
                    "import" in said
                )
            with pytest.raises(
                AttributeError,
                match=r"no operator registered_here\.twice .* register operators in a module",
            ):
                pool.map(lambda x: twice(x), [torch.ones(1)])
    finally:
        library._destroy()


def test_no_remedy_beside_one(pool2: mpgrad.Pool) -> None:
    said = refusal(pool2, lambda x: pool2)
    assert said.endswith("make one in the task instead (<lambda>'s closure: pool2)")


def test_objects_of_items_and_results(pool: mpgrad.Pool) -> None:
    """Not only of functions."""
    (lock,) = pool.map(lambda given: given, [threading.RLock()])
    with lock:
        assert type(lock) is type(threading.RLock())
    kept = Holder(torch.ones(2, requires_grad=True))
    assert_same_as_serial(lambda reference: reference().x * 2, [weakref.ref(kept)], pool)


class Block(bytearray): ...


NUMBERS = array.array("d", [1.0, 2.0, 3.0, 4.0])
VIEWS: dict[str, memoryview] = {
    "array": memoryview(NUMBERS),
    "bytes": memoryview(b"abc"),
    "read-only": memoryview(NUMBERS).toreadonly(),
    "cast": memoryview(NUMBERS).cast("B"),
    "rows": memoryview(NUMBERS).cast("B").cast("d", (2, 2)),
    "scalar": memoryview(NUMBERS)[:1].cast("B").cast("d", ()),
    "part": memoryview(NUMBERS)[1:3],
    "part, read-only": memoryview(b"abcd")[1:],
    "strided": memoryview(NUMBERS)[::2],
    "reversed": memoryview(NUMBERS)[::-1],
    "empty": memoryview(NUMBERS)[:0],
    "numpy": memoryview(numpy.arange(6.0).reshape(2, 3)),
    "numpy, large": memoryview(numpy.arange(6000.0)),
    "numpy, read-only": memoryview(numpy.broadcast_to(numpy.float64(1), (2, 3))),
    "numpy, columns first": memoryview(numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))),
    "numpy, another order of bytes": memoryview(numpy.arange(3, dtype=">f8")),
    "numpy, without rows": memoryview(numpy.zeros((0, 3))),
    "of a subclass": memoryview(Block(b"abc")),
}


def about(view: memoryview) -> tuple[Any, ...]:
    return type(view), view.format, view.shape, view.readonly, view.tobytes()


def test_views_of_memory(pool: mpgrad.Pool) -> None:
    """Symptom: `sum(view)` was another number. Cause: cloudpickle makes bytes of a view, whatever
    its elements are."""
    captured = pool.map(lambda name: about(VIEWS[name]), VIEWS)
    returned = pool.map(lambda view: (about(view), view), VIEWS.values())
    for name, there, (of_item, result) in zip(VIEWS, captured, returned, strict=True):
        assert there == of_item == about(result) == about(VIEWS[name]), name


def test_a_view_and_what_it_looks_at(pool2: mpgrad.Pool) -> None:
    """They are one memory in the worker too."""

    def write(seen: Any, view: memoryview) -> Any:
        seen[0] = 7
        return view[0], view.readonly

    arrays = array.array("d", [1.0, 2.0]), numpy.zeros(2), bytearray(b"ab")
    for each in arrays:
        views = memoryview(each), memoryview(each).toreadonly()
        assert pool2.starmap(write, [(each, view) for view in views]) == [(7, False), (7, True)]


def test_views_that_are_refused(pool2: mpgrad.Pool) -> None:
    record_part, released = memoryview(numpy.zeros(3, dtype="i4,i4"))[1:], memoryview(b"abc")
    said = refusal(pool2, closing_over(record_part))
    assert (
        "memoryview with the format 'T{i:f0:i:f1:}' and the shape (2,); pass the object whose"
        in said
    )
    assert "memory it shows (<lambda>'s closure: value)" in said
    released.release()
    assert "released memoryview" in refusal(pool2, closing_over(released))


class Members(weakref.WeakSet[Any]): ...


class Keyed(weakref.WeakKeyDictionary[Any, Any]): ...


class ByName(weakref.WeakValueDictionary[Any, Any]): ...


def test_what_is_not_made_again(pool2: mpgrad.Pool) -> None:
    kept = Holder(torch.ones(1))
    for base, value in (
        ("WeakSet", Members([kept])),
        ("WeakKeyDictionary", Keyed({kept: 1})),
        ("WeakValueDictionary", ByName(a=kept)),
    ):
        said = (
            f"{type(value).__name__!r} object, of a subclass of {base}; use a {base} (<lambda>'s "
            "closure: value"
        )
        assert said in refusal(pool2, closing_over(value))


def test_proxies_of_a_manager(pool: mpgrad.Pool) -> None:
    """Of the caller's, as for a `multiprocessing.Pool`: workers know its key. (Symptom:
    AuthenticationError.)"""
    with multiprocessing.get_context("spawn").Manager() as manager:
        squares, steps = manager.dict(), manager.Queue()

        def notes(k: int, queue: Any) -> None:
            squares[k] = k * k
            queue.put(k)

        pool.starmap(notes, [(k, steps) for k in range(5)])
        assert squares.copy() == {k: k * k for k in range(5)}
        assert sorted(steps.get() for _ in range(5)) == list(range(5))
        # The inline engine's worker lets go of a function in the next call. From Python 3.14 on a
        # thread's connection lasts as long as any proxy of the manager does.
        pool.map(abs, [1])


def test_the_modules_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: each map looked through all names of all modules for each context variable of a
    script; 3 ms for one."""
    searches: list[object] = []
    search = reducers.name_in_a_module
    monkeypatch.setattr(
        reducers, "name_in_a_module", lambda value: searches.append(value) or search(value)
    )
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=3)
    local = threading.local()
    for _ in range(2):
        for value in (variable, local):
            structure.dumps([value])
    assert searches == [variable, local]
    library_of_variables = types.ModuleType("library_of_variables")
    library_of_variables.variable = variable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library_of_variables", library_of_variables)
    assert b"library_of_variables" in structure.dumps([variable])[0]


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
