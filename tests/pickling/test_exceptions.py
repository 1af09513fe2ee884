"""Exceptions of tasks whose classes make it hard to read, write or pickle them: they arrive, or a
RemoteError names them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import first_are_quick, said_by

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

    Cause: its cause and note, and its traceback where it left a block of ours, were set as
    attributes.
    """
    with pytest.raises(type(make())) as caught:
        pool.map(raises, [make])
    assert type(caught.value) is type(make())
    assert (repr(caught.value), caught.value.args) == (repr(make()), make().args)
    assert isinstance(caught.value.__cause__, mpgrad.RemoteTraceback)
    assert "raised in item 0 of raises, worker" in caught.value.__notes__[0]


@pytest.mark.parametrize("make", first_are_quick(2, [*OF_USERS]))
def test_an_exception_that_refuses_to_be_written_to_in_an_initializer(
    fork_server: mpgrad.Pool, make: Any
) -> None:
    """Symptom: as above; or FrozenWithSlots(code='__notes__').

    Cause: of the latter, copies were made by the class's `__setstate__`, which is not for what
    `BaseException` gives it.
    """
    with (
        mpgrad.Pool(1, initializer=raises, initargs=(make,)) as pool,
        pytest.raises(type(make())) as caught,
    ):
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
    *(
        "__cause__",
        "__context__",
        "__notes__",
        "__traceback__",
        "__class__",
        "__dict__",
        "args",
        "__suppress_context__",
    ),
    *(
        "with_traceback",
        "add_note",
        "__module__",
        "__reduce__",
        "__reduce_ex__",
        "__getattribute__",
        "__setattr__",
    ),
    *(
        "__str__",
        "__repr__",
        "__hash__",
        "__eq__",
        "__bool__",
        "__len__",
        "__setstate__",
        "text",
        "exceptions",
    ),
]


def raises_hostile(name: str, error: BaseException, is_property: bool) -> None:
    def fails(*args: Any) -> Any:
        raise error

    base: Any = {
        "text": SyntaxError,
        "exceptions": getattr(__import__("builtins"), "ExceptionGroup", None),
    }.get(name)
    args = ("t", [ValueError()]) if name == "exceptions" else ("t",)
    raise type("Hostile", (base or Exception,), {name: property(fails) if is_property else fails})(
        *args
    )


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
    return (
        str(error)
        if type(error) is mpgrad.RemoteError
        else vars(type)["__name__"].__get__(type(error))
    )


def test_no_exception_ends_a_worker(pool: mpgrad.Pool) -> None:
    """Symptom: WorkerDiedError, for each worker that tried it. Cause: its text and traceback were
    read without a guard."""
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


class Keyword(Exception):
    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Slotted(Exception):
    __slots__ = ("code",)


class Adds(Exception):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args, "a hint")


class New(Exception):
    def __new__(cls, text: str, code: int) -> Any:
        made = super().__new__(cls, text)
        made.code = code
        return made

    def __init__(self, text: str, code: int) -> None: ...


class Missing(FileNotFoundError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)


class Undecodable(UnicodeDecodeError):
    def __init__(self, data: bytes) -> None:
        super().__init__("utf-8", data, 0, 1, "no text")


class Exits(SystemExit):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


class NoSuch(AttributeError):
    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}", name=name, obj=threading.Lock())


def with_code(error: Any, code: int) -> Any:
    error.code = code
    return error


WITH_CODE_OF_THEIR_OWN: dict[str, Any] = {
    "keyword": lambda: Keyword("a", code=3),
    "slots": lambda: with_code(Slotted("a"), 3),
    "adds": lambda: Adds("a"),
    "new": lambda: New("a", 3),
    "of the system": lambda: Missing("a/b"),
    "of text": lambda: Undecodable(b"abc"),
    "exit": lambda: Exits(code=3),
    "attribute": lambda: NoSuch("a"),
    "of a library": lambda: subprocess.CalledProcessError(3, "a"),
}
FIELDS = (
    "code",
    "errno",
    "filename",
    "strerror",
    "encoding",
    "object",
    "start",
    "end",
    "reason",
    "name",
    "returncode",
    "cmd",
)


def facts(error: Any) -> Any:
    return type(error), str(error), error.args, [getattr(error, name, None) for name in FIELDS]


@pytest.mark.parametrize("name", WITH_CODE_OF_THEIR_OWN)
def test_an_exception_whose_class_has_an_init(pool: mpgrad.Pool, name: str) -> None:
    """Symptom: of what it has in slots and fields, nothing; or its args twice. Cause: it was made
    again by its class."""
    make = WITH_CODE_OF_THEIR_OWN[name]
    error = pool.submit(raises, make).exception()
    assert facts(error) == facts(make())


@pytest.mark.parametrize("name", WITH_CODE_OF_THEIR_OWN)
def test_such_an_exception_as_a_value(pool: mpgrad.Pool, name: str) -> None:
    """Symptom: TypeError: __init__() missing 1 required keyword-only argument. Cause: pickle called
    its class."""
    error = WITH_CODE_OF_THEIR_OWN[name]()
    of_item, of_capture, result = pool.map(lambda each: (facts(each), facts(error), each), [error])[
        0
    ]
    assert of_item == of_capture == facts(result) == facts(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups")
@pytest.mark.parametrize("name", WITH_CODE_OF_THEIR_OWN)
def test_such_an_exception_in_a_group(pool: mpgrad.Pool, name: str) -> None:
    """Symptom: a RemoteError, which `except*` does not take. Cause: only the outermost one was made
    without its init."""
    make = WITH_CODE_OF_THEIR_OWN[name]
    of_group = lambda: BaseExceptionGroup("g", [make(), ValueError(1)])  # noqa: E731, F821
    group: Any = pool.submit(raises, of_group).exception()
    assert type(group).__name__ == ("BaseExceptionGroup" if name == "exit" else "ExceptionGroup")
    assert [facts(each) for each in group.exceptions] == [facts(make()), facts(ValueError(1))]


@pytest.mark.parametrize("name", first_are_quick(2, [*WITH_CODE_OF_THEIR_OWN]))
def test_such_an_exception_in_an_initializer(fork_server: mpgrad.Pool, name: str) -> None:
    """Each call that waits gets a copy."""
    make = WITH_CODE_OF_THEIR_OWN[name]
    with mpgrad.Pool(1, initializer=raises, initargs=(make,)) as pool:
        for future in [pool.submit(abs, 1) for _ in range(2)]:
            assert facts(future.exception()) == facts(make())


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


@pytest.mark.slow
def test_an_exception_of_a_module_that_is_being_imported(tmp_path: Path) -> None:
    """The pool's thread waited for the import, which waited for the pool."""
    (tmp_path / "simulation.py").write_text(
        "import mpgrad\n"
        "from mpgrad.environment import PLACE\n"
        "class MyError(Exception): pass\n"
        "def fails(x): raise MyError('boom')\n"
        "if not PLACE.in_worker:\n"
        "    with mpgrad.Pool(1) as pool:\n"
        "        try: pool.map(fails, [1])\n"
        "        except MyError as error: print(repr(error))\n"
    )
    assert (
        said_by(f"sys.path.insert(0, {str(tmp_path)!r}); import simulation") == "MyError('boom')\n"
    )


class OddError(Exception):
    """Pickles as a text."""

    def __reduce__(self) -> Any:
        return str, ("gone",)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int

    def __reduce__(self) -> Any:
        return FrozenError, (self.code,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OddError, FrozenError])
def test_exceptions_that_cannot_be_raised_again(pool: mpgrad.Pool, kind: type[Exception]) -> None:
    """They broke the pool."""

    def fails(x: int) -> None:
        raise kind(x)

    with pytest.raises(Exception, match=r"Odd|Frozen|1") as caught:
        pool.map(fails, [1])
    assert kind.__name__ in f"{type(caught.value).__name__}: {caught.value}"
    assert pool.map(abs, [-1]) == [1]
