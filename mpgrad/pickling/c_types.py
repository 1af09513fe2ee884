"""Types of ctypes. Their metaclasses have no names in `ctypes`, so cloudpickle can carry none of them.

Pointers, arrays and prototypes are made again from what they were made of. Structures of the user's modules are those that the
worker imports, as open libraries and files are. A script's are refused, as is the type that a library has for its functions.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cloudpickle.cloudpickle import _lookup_module_and_qualname as importable_as

from mpgrad.pickling.modules import attribute_here
from mpgrad.pickling.uses import name_of

__all__ = ["reduce_c_type"]


def reduce_c_type(value: type) -> tuple[Any, ...] | None:
    """None for other types, and for those of libraries.

    Raises:
        ValueError: functions of an open library are of this type, as ctypes says of them.
        TypeError: it was derived by a script.
    """
    kind: Any = type(value)
    if kind is type or all(each.__module__ != "_ctypes" for each in kind.__mro__):
        return None
    if name_of(value) is not None:
        return attribute_here, (value.__module__, value.__qualname__)
    if value.__qualname__ == OF_PYTHON:  # each time another one
        return python_prototype, (value._restype_, *value._argtypes_)  # type: ignore[attr-defined]
    for make, arguments in origins(value):
        with contextlib.suppress(TypeError):
            if make(*arguments) is value:  # ctypes makes each once
                return make, arguments
    if importable_as(value) is not None:
        return None
    if issubclass(value, sys.modules["ctypes"]._CFuncPtr):
        raise ValueError("ctypes objects containing pointers cannot be pickled")
    raise TypeError(f"cannot pickle the class {value.__qualname__!r}, which is one of ctypes or derived from one")


def origins(value: Any) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """By what it may have been made."""
    ctypes = sys.modules["ctypes"]
    native, swapped = ("__ctype_le__", "__ctype_be__")[:: 1 if sys.byteorder == "little" else -1]
    if (other := getattr(value, native, value)) is not value:
        yield getattr, (other, swapped)
    of, length = getattr(value, "_type_", None), getattr(value, "_length_", None)
    if length is not None:
        yield operator.mul, (of, length)
    elif isinstance(of, type):
        yield ctypes.POINTER, (of,)
    if hasattr(value, "_flags_") and hasattr(value, "_argtypes_"):
        yield prototype, (value._flags_, value._restype_, *value._argtypes_)
    if hasattr(value, "_ndim_"):
        yield sys.modules["numpy"].ctypeslib.ndpointer, (value._dtype_, value._ndim_, value._shape_, value._flags_)


def prototype(flags: int, result: Any, *arguments: Any) -> Any:
    import ctypes  # most programs have none of it

    return ctypes.CFUNCTYPE(result, *arguments, use_errno=bool(flags & USES_ERRNO))


def python_prototype(result: Any, *arguments: Any) -> Any:
    import ctypes

    return ctypes.PYFUNCTYPE(result, *arguments)


USES_ERRNO = 8  # as in `ctypes`
OF_PYTHON = "PYFUNCTYPE.<locals>.CFunctionType"
