"""Libraries and types of ctypes in what functions use."""

from __future__ import annotations

import ctypes
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpgrad

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("calls_are_sent")]

SOURCE = """
    import ctypes

    lib = ctypes.CDLL(None)
    lib.labs.restype = ctypes.c_long
    absolute = lib.labs
    Prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    OfPython = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)
    Pointer = ctypes.POINTER(ctypes.c_int)
    Three = ctypes.c_int * 3
    array = Three(1, 2, 3)
    pointer = ctypes.pointer(ctypes.c_int(4))

    class Pair(ctypes.Structure):
        _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_double)]

    class Either(ctypes.Union):
        _fields_ = [("pairs", Pair * 2), ("whole", ctypes.c_int)]

    pair = Pair(5, 6.0)

    @Prototype
    def callback(x):
        return x + 1

    class Holder:
        def __init__(self):
            self.lib = lib

    holder = Holder()
    table = {"lib": lib}

    def types(x):
        return Prototype(lambda y: y + x)(1), OfPython(lambda y, z: y + z)(1, x), Pointer(ctypes.c_int(x)).contents.value
    def arrays(x): return [*Three(x, x, x), *array]
    def library(x): return lib.labs(x)
    def function(x): return absolute(x)
    def called_back(x): return callback(x)
    def pointed(x): return pointer.contents.value + x
    def structures(x): return Pair(x, 2.0).second, pair.second, Either(whole=x).pairs[0].first, isinstance(pair, Pair)
    def held(x): return holder.lib.labs(x), table["lib"].labs(x)
"""
ANYWHERE = ["types", "arrays"]
OF_A_MODULE = ["library", "function", "called_back", "pointed", "structures", "held"]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "with_ctypes.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("with_ctypes")
    sys.modules.pop("with_ctypes", None)


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_modules_that_use_ctypes(library: Any, nursery: mpgrad.Pool, engine: str) -> None:
    """Symptom: type object 'PyCFuncPtrType' has no attribute '__mul__'. Cause: cloudpickle carried the metaclass by value."""
    with mpgrad.Pool(1, engine=engine) as pool:
        for name in (*ANYWHERE, *OF_A_MODULE):
            function = getattr(library, name)
            assert pool.map(function, [3]) == [function(3)], name
        assert type(pool.map(lambda _: library.Pair(1, 2.0), [0])[0]) is library.Pair
        assert pool.map(lambda pair: pair.second, [library.Pair(1, 7.0)]) == [7.0]


def test_scripts_that_use_ctypes(pool: mpgrad.Pool) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(SOURCE), script)
    for name in ANYWHERE:
        assert pool.map(script[name], [3]) == [script[name](3)], name
    for name, words in (
        ("library", "(library's global: lib)"),
        ("held", "(held's global: holder.lib)"),
        ("function", "(function's global: absolute)"),
    ):
        with pytest.raises(ValueError, match="pointers cannot be pickled") as caught:
            pool.map(script[name], [3])
        assert words in caught.value.__notes__[0]
        assert "load the library in the function, or once a worker" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="structures's global: "):
        pool.map(script["structures"], [3])


def test_types_are_the_same_object_again(pool2: mpgrad.Pool) -> None:
    made = [
        ctypes.c_int * 2,
        ctypes.POINTER(ctypes.c_double),
        ctypes.CFUNCTYPE(None, ctypes.c_int, use_errno=True),
        ctypes.c_int,
    ]
    found = pool2.map(lambda kind: kind, made)
    assert all(here is there for here, there in zip(made, found, strict=True))
