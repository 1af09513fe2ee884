"""Exceptions of tasks whose classes make it hard to read, write or pickle them: they arrive, or a RemoteError names them."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    text: str = "a"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenWithSlots(Exception):
    code: int
    text: str = "a"


@dataclasses.dataclass
class Unhashable(Exception):
    code: int


class Refuses(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"no {name}")


OF_USERS: list[Any] = [
    *(lambda: Frozen(3), lambda: Frozen(code=3, text="b")),
    *(lambda: FrozenWithSlots(3), lambda: FrozenWithSlots(code=3, text="b")),
    *(lambda: Unhashable(3), lambda: Refuses(3)),
]


def raises(make: Any) -> torch.Tensor:
    raise make()


@pytest.mark.parametrize("make", OF_USERS)
def test_an_exception_that_refuses_to_be_written_to(pool: mpgrad.Pool, make: Any) -> None:
    """Symptom: RemoteError, or FrozenInstanceError: cannot assign to field '__traceback__'.

    Cause: its cause and note, and its traceback where it left a block of ours, were set as attributes.
    """
    with pytest.raises(type(make())) as caught:
        pool.map(raises, [make])
    assert type(caught.value) is type(make())
    assert (repr(caught.value), caught.value.args) == (repr(make()), make().args)
    assert isinstance(caught.value.__cause__, mpgrad.RemoteTraceback)
    assert "raised in item 0 of raises, worker" in caught.value.__notes__[0]


@pytest.mark.parametrize("make", OF_USERS)
def test_an_exception_that_refuses_to_be_written_to_in_an_initializer(nursery: mpgrad.Pool, make: Any) -> None:
    """Symptom: as above; or FrozenWithSlots(code='__notes__').

    Cause: of the latter, copies were made by the class's `__setstate__`, which is not for what `BaseException` gives it.
    """
    with mpgrad.Pool(1, initializer=raises, initargs=(make,)) as pool, pytest.raises(type(make())) as caught:
        pool.map(abs, [1])
    assert (repr(caught.value), caught.value.args) == (repr(make()), make().args)


def raises_with_note(make: Any) -> None:
    error = make()
    vars(error)["__notes__"] = ["a note"]
    raise error


@pytest.mark.parametrize("make", OF_USERS)
def test_a_note_of_an_exception_that_refuses_to_be_written_to(pool: mpgrad.Pool, make: Any) -> None:
    """Symptom: FrozenWithSlots(code='__notes__'). Cause: as above, of its pickle."""
    with pytest.raises(type(make())) as caught:
        pool.map(raises_with_note, [make])
    assert (repr(caught.value), caught.value.args) == (repr(make()), make().args)
    assert caught.value.__notes__[0] == "a note"


HOSTILE = [
    *("__cause__", "__context__", "__notes__", "__traceback__", "__class__", "__dict__", "args", "__suppress_context__"),
    *("with_traceback", "add_note", "__module__", "__reduce__", "__reduce_ex__", "__getattribute__", "__setattr__"),
    *("__str__", "__repr__", "__hash__", "__eq__", "__bool__", "__len__", "__setstate__", "text", "exceptions"),
]


def raises_hostile(name: str, error: BaseException, is_property: bool) -> None:
    def fails(*args: Any) -> Any:
        raise error

    base: Any = {"text": SyntaxError, "exceptions": getattr(__import__("builtins"), "ExceptionGroup", None)}.get(name)
    args = ("t", [ValueError()]) if name == "exceptions" else ("t",)
    raise type("Hostile", (base or Exception,), {name: property(fails) if is_property else fails})(*args)


def raises_of_metaclass(name: str) -> None:
    class Meta(type):
        def __getattribute__(cls, asked: str) -> Any:
            if asked == name:
                raise RuntimeError("not that")
            return super().__getattribute__(asked)

    class Hostile(Exception, metaclass=Meta):
        pass

    raise Hostile("t")


def kind_of(error: BaseException | None) -> str:
    """Its class's own name, or that of the class for which the RemoteError stands."""
    assert error is not None
    return str(error) if type(error) is mpgrad.RemoteError else vars(type)["__name__"].__get__(type(error))


def test_no_exception_ends_a_worker(pool: mpgrad.Pool) -> None:
    """Symptom: WorkerDiedError, for each worker that tried it. Cause: its text and traceback were read without a guard."""
    names = [name for name in HOSTILE if name != "exceptions" or sys.version_info >= (3, 11)]
    deaths = pool.stats().deaths
    for error in (RuntimeError("no"), SystemExit(3)):
        for is_property in (True, False):
            futures = [pool.submit(raises_hostile, name, error, is_property) for name in names]
            for name, future in zip(names, futures, strict=True):
                assert "Hostile" in kind_of(future.exception()), name
                with pytest.raises(BaseException) as caught:  # of a class that may not be asked
                    future.result()
                assert "Hostile" in kind_of(caught.value), name
    for name in ("__name__", "__qualname__", "__module__", "__mro__", "__dict__"):
        assert "Hostile" in kind_of(pool.submit(raises_of_metaclass, name).exception()), name
    assert pool.stats().deaths == deaths


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Frozen(5)


def test_an_exception_of_a_backward_that_refuses_to_be_written_to(pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    result = pool.map(FailsInBackward.apply, [x])[0]
    with pytest.raises(Frozen, match="5"):
        result.sum().backward()


def test_blocks_leave_exceptions_alone() -> None:
    """As the contextmanager of contextlib, which writes to what passes."""
    from mpgrad.errors import contextmanager

    steps: list[str] = []

    @contextmanager
    def block() -> Any:
        steps.append("begun")
        try:
            yield 5
        finally:
            steps.append("ended")

    for error in (Frozen(1), StopIteration(2), RuntimeError("three"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, block() as value:
            assert value == 5
            raise error
        assert caught.value is error
    with block():
        pass
    assert steps == ["begun", "ended"] * 5
