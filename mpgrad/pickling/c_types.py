"""Types of ctypes. Their metaclasses have no names in `ctypes`, so cloudpickle can carry none of them.

Pointers, arrays and prototypes are made again from what they were made of. Structures of the user's modules are those that the
worker imports, as open libraries and files are. A script's are refused, as is the type that a library has for its functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cloudpickle.cloudpickle import _lookup_module_and_qualname as importable_as

from mpgrad.pickling.modules import attribute_here
from mpgrad.pickling.uses import name_of

__all__ = ["reduce_c_type"]

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
NATIVE, SWAPPED = ("__ctype_le__", "__ctype_be__")[:: 1 if sys.byteorder == "little" else -1]
USES_ERRNO = 8  # as in `ctypes`
OF_PYTHON = "PYFUNCTYPE.<locals>.CFunctionType"


def reduce_c_type(value: type) -> Reduced | None:
    """None for other types, and for those of libraries.

    Raises:
        TypeError: nobody can make it again: a script derived it, or it is the type of an open library's functions.
    """
    kind: Any = type(value)
    if not any(each.__module__ == "_ctypes" for each in kind.__mro__):
        return None
    if name_of(value) is not None:
        return attribute_here, (value.__module__, value.__qualname__)
    for make, arguments in origins(value):
        with contextlib.suppress(TypeError):
            if make(*arguments) is value or value.__qualname__ == OF_PYTHON:  # ctypes makes each of the others once
                return make, arguments
    if importable_as(value) is not None:
        return None
    raise TypeError(f"cannot pickle the class {value.__qualname__!r}, which is one of ctypes or derived from one")


def origins(value: Any) -> Iterator[Reduced]:
    """By what it may have been made."""
    if (other := getattr(value, NATIVE, value)) is not value:
        yield getattr, (other, SWAPPED)
    of, length = getattr(value, "_type_", None), getattr(value, "_length_", None)
    if length is not None:
        yield operator.mul, (of, length)
    elif isinstance(of, type):
        yield ctypes.POINTER, (of,)
    if value.__qualname__ == OF_PYTHON:
        yield ctypes.PYFUNCTYPE, (value._restype_, *value._argtypes_)
    elif hasattr(value, "_flags_") and hasattr(value, "_argtypes_"):
        make = functools.partial(ctypes.CFUNCTYPE, use_errno=bool(value._flags_ & USES_ERRNO))
        yield make, (value._restype_, *value._argtypes_)
    if hasattr(value, "_ndim_"):
        yield sys.modules["numpy"].ctypeslib.ndpointer, (value._dtype_, value._ndim_, value._shape_, value._flags_)
