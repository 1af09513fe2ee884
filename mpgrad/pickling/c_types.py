"""Types of ctypes. Their metaclasses have no names in `ctypes`, so cloudpickle can carry none of them.

Pointers, arrays and prototypes are made again from what they were made of. Structures of the user's modules are those that the
worker imports, as open libraries and files are. A script's are refused.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mpgrad.pickling.modules import own_import
from mpgrad.pickling.uses import name_of

__all__ = ["reduce_c_type"]


def reduce_c_type(value: type) -> tuple[Any, ...] | None:
    """None for other types."""
    if type(value) is type or type(value).__module__ != "_ctypes":
        return None
    if name_of(value) is not None:
        return c_type_here, (value.__module__, value.__qualname__)
    if value.__qualname__ == OF_PYTHON:  # each time another one
        return python_prototype, (value._restype_, *value._argtypes_)  # type: ignore[attr-defined]
    for make, arguments in origins(value):
        with contextlib.suppress(TypeError):
            if make(*arguments) is value:  # ctypes makes each once
                return make, arguments
    return None


def c_type_here(module: str, path: str) -> Any:
    return operator.attrgetter(path)(own_import(module))


def origins(value: Any) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """By what it may have been made."""
    ctypes = sys.modules["ctypes"]
    of, length = getattr(value, "_type_", None), getattr(value, "_length_", None)
    if length is not None:
        yield operator.mul, (of, length)
    elif isinstance(of, type):
        yield ctypes.POINTER, (of,)
    if hasattr(value, "_flags_") and hasattr(value, "_argtypes_"):
        yield prototype, (value._flags_, value._restype_, *value._argtypes_)


def prototype(flags: int, result: Any, *arguments: Any) -> Any:
    import ctypes  # most programs have none of it

    return ctypes.CFUNCTYPE(result, *arguments, use_errno=bool(flags & USES_ERRNO))


def python_prototype(result: Any, *arguments: Any) -> Any:
    import ctypes

    return ctypes.PYFUNCTYPE(result, *arguments)


USES_ERRNO = 8  # as in `ctypes`
OF_PYTHON = "PYFUNCTYPE.<locals>.CFunctionType"
