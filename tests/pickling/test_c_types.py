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

pytestmark = pytest.mark.quick

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
        prototyped, of_python = Prototype(lambda y: y + x)(1), OfPython(lambda y, z: y + z)(1, x)
        return prototyped, of_python, Pointer(ctypes.c_int(x)).contents.value
    def arrays(x): return [*Three(x, x, x), *array]
    def library(x): return lib.labs(x)
    def function(x): return absolute(x)
    def called_back(x): return callback(x)
    def pointed(x): return pointer.contents.value + x
    def structures(x):
        either = Either(whole=x).pairs[0].first
        return Pair(x, 2.0).second, pair.second, either, isinstance(pair, Pair)
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
def test_modules_that_use_ctypes(library: Any, fork_server: mpgrad.Pool, engine: str) -> None:
    """Symptom: type object 'PyCFuncPtrType' has no attribute '__mul__'. Cause: cloudpickle carried
    the metaclass by value."""
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
        ("library", "library's global: lib"),
        ("held", "held's global: holder.lib"),
        ("function", "function's global: absolute"),
    ):
        assert f"({words}); load the library in the function, or once a worker" in refusal(
            pool, script[name]
        )
    with pytest.raises(TypeError, match=r"which is a ctypes class .*structures's global: "):
        pool.map(script["structures"], [3])


def refusal(pool: mpgrad.Pool, function: Any) -> str:
    """What is said of a library: a ValueError, which is ctypes's own, where its objects are met
    first, and else a TypeError."""
    with pytest.raises((TypeError, ValueError)) as caught:
        pool.map(function, [3])
    return "".join((str(caught.value), *getattr(caught.value, "__notes__", ())))


def test_types_are_the_same_object_again(pool2: mpgrad.Pool) -> None:
    made = [
        ctypes.c_int * 2,
        ctypes.POINTER(ctypes.c_double),
        ctypes.c_char * 3,
        ctypes.CFUNCTYPE(None, ctypes.c_int, use_errno=True),
        ctypes.c_int,
    ]
    found = pool2.map(lambda kind: kind, made)
    assert all(here is there for here, there in zip(made, found, strict=True))


OTHERS = """
    import ctypes
    import numpy

    class Error(ctypes.c_int): pass
    class Own(ctypes.CDLL): pass
    class Big(ctypes.BigEndianStructure): _fields_ = [("a", ctypes.c_int)]
    class Of:
        lib, function = ctypes.CDLL(None), ctypes.CDLL(None).abs
        def both(self): return getattr(self, "lib").abs(-2), type(self).function(-3)

    untouched, with_errno = ctypes.CDLL(None), ctypes.CDLL(None, use_errno=True)
    python = ctypes.PyDLL(None)
    several, own, big = [ctypes.cdll.LoadLibrary(None), ctypes.CDLL(None)], Own(None), Big(5)
    of_python, Swapped = ctypes.pythonapi, ctypes.c_int.__ctype_be__
    Array = numpy.ctypeslib.ndpointer(dtype=numpy.float64)

    def swapped(x): return Swapped(x).value, Array.from_param(numpy.ones(2)) is not None
    def not_touched(x): return untouched.abs(-x)
    def of_errno(x): return with_errno.abs(-x)
    def of_pydll(x): return python.Py_IsInitialized()
    def of_pythonapi(x): return of_python.Py_IsInitialized()
    def of_several(x): return several[1].abs(-x)
    def of_own(x): return own.abs(-x)
    def of_class(x): return Of().both()
    def big_endian(x): return Big(x).a, big.a
    def derived(x): return Error(x).value
"""
POINTERS = [
    "not_touched",
    "of_errno",
    "of_pydll",
    "of_pythonapi",
    "of_several",
    "of_own",
    "of_class",
]


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "others_of_ctypes.py").write_text(textwrap.dedent(OTHERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("others_of_ctypes")
    del sys.modules["others_of_ctypes"]


@pytest.mark.parametrize("engine", ["process", "inline"])
def test_libraries_that_nothing_has_called_yet(
    others: Any, fork_server: mpgrad.Pool, engine: str
) -> None:
    """Symptom: 'PyCFuncPtrType' has no attribute '__mul__'. Cause: cloudpickle carried the type of
    the library's functions."""
    with mpgrad.Pool(1, engine=engine) as pool:
        found = {
            name: pool.map(getattr(others, name), [3])
            for name in (*POINTERS, "swapped", "big_endian", "derived")
        }
    assert found == {name: [getattr(others, name)(3)] for name in found}


def test_such_libraries_of_scripts(pool: mpgrad.Pool) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(OTHERS), script)
    assert pool.map(script["swapped"], [3]) == [script["swapped"](3)]
    for name in POINTERS:
        said = refusal(pool, script[name])
        assert f"({name}'s global: " in said and "load the library in the function" in said
    for name, kind in (("big_endian", "Big"), ("derived", "Error")):
        with pytest.raises(
            TypeError, match=rf"class '{kind}', which is a ctypes class.*{name}'s global: {kind}"
        ):
            pool.map(script[name], [3])
