"""Pickle without tensors: any structure or function becomes bytes, plus the list of the tensors it reaches.

cloudpickle carries lambdas, closures and whatever a script defined, but it would carry tensors by value and fails on those
that need gradients. Here each tensor leaves its number in the bytes; what the tensors are, and who owns their memory, is
decided elsewhere. The tensors that a *function* reaches in this way are its captures.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
import sys
import sysconfig
import types
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

__all__ = ["dumps", "loads", "transported"]


def dumps(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of `value` and the distinct tensors in it, in the order in which pickle meets them."""
    buffer = io.BytesIO()
    pickler = TensorPickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def loads(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The value again, with `tensors` in the places of those that `dumps` took out."""
    return TensorUnpickler(io.BytesIO(pickled), tensors).load()


def transported(error: BaseException, subject: str) -> BaseException:
    """The error to raise where `subject` (for example "item 3") could not be pickled: same type, named subject."""
    kind = TypeError if isinstance(error, TypeError) else pickle.PicklingError
    return kind(f"{subject} cannot be carried to or from a worker: {error}")


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._number: dict[int, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        number = self._number.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def reducer_override(self, value: object) -> Any:
        # A function of an importable module goes by its name, and the worker would import tensors of its own instead of ours.
        if isinstance(value, types.FunctionType) and reaches_tensor(value, set()):
            return self._dynamic_function_reduce(value)
        return super().reducer_override(value)


class TensorUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def reaches_tensor(value: object, seen: set[int]) -> bool:
    """Whether calling or using `value` can reach a tensor through globals, closures, defaults, attributes or containers."""
    if isinstance(value, torch.Tensor):
        return True
    if id(value) in seen or isinstance(value, (type, types.ModuleType, str, bytes, int, float)):
        return False
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        return next(itertools.chain(value.parameters(), value.buffers()), None) is not None
    return any(reaches_tensor(part, seen) for part in parts_of(value))


def parts_of(value: object) -> list[object]:
    if isinstance(value, types.FunctionType):
        return [] if is_library(value.__module__) else reach_of(value)
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    return [] if is_library(type(value).__module__) else list(getattr(value, "__dict__", {}).values())


def reach_of(function: types.FunctionType) -> list[object]:
    parts: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # a cell that is not filled yet: a recursive function while it is defined
            continue
    names = function.__globals__
    parts.extend(names[name] for name in names_in(function.__code__) if name in names)
    return parts


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names that `code` and the functions defined in it may look up among the globals."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def is_library(module: str | None) -> bool:
    """Whether `module` is installed rather than the user's own: its functions are not searched for tensors."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return file.startswith(tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))
