"""Pickle without tensors: any structure or function becomes bytes, plus the list of the tensors it reaches.

cloudpickle carries lambdas, closures and whatever a script defined, but it would carry tensors by value and fails on those
that need gradients. Here each tensor leaves its number in the bytes; what the tensors are, and who owns their memory, is
decided elsewhere. The tensors that a *function* reaches in this way are its captures.

Large buffers of other libraries (numpy arrays, above all) go the same way, as tensors of bytes: pickle asks for them in the
order in which it met them, so they stand at the end of the list, the first one last. What pickle refuses, or carries as
something else, goes as `mpgrad.reducers` has it.

A result that a call is still to give (`Deferred`) leaves a number below 0, and a claim to what it will be.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from cloudpickle.cloudpickle import _function_setstate as set_function
from cloudpickle.cloudpickle import _make_function as make_function
from torch.nn import Module

from mpgrad.classes import SETS_CLASS, ClassPickler, ClassUnpickler, reduce_class, refuse
from mpgrad.compiled import MARK, Surroundings, reduce_compiled
from mpgrad.packer import RIDE_BYTES
from mpgrad.reducers import cached_again, complete, itself, reduce_module

__all__ = ["Deferred", "Searched", "dumps", "dumps_arguments", "loads", "loads_function", "loads_result"]

Searched = dict[int, object]  # classes and functions that reach no tensor, by id


class Deferred:
    """A value that may still be to come. (No ABC: every object that is pickled is asked whether it is one.)"""

    def claim(self) -> object | None:
        """What will lead to the value; None where it has been taken, so that it is here, and may have been changed since."""
        raise NotImplementedError

    def taken(self) -> Any:
        """The value, where `claim` gave None."""
        raise NotImplementedError


def dumps(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of `value` and the distinct tensors in it, in the order in which pickle meets them; then its buffers."""
    buffer = io.BytesIO()
    pickler = TensorPickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors + pickler.buffers[::-1]


def dumps_arguments(value: object, searched: Searched | None = None) -> tuple[bytes, list[torch.Tensor], list[Any]]:
    """`dumps` of what may have `Deferred` values in it; and the claims to those, in the order in which pickle meets them.

    What is `searched` for tensors is searched once for all values that are given the same one: they must be there already.
    """
    buffer = io.BytesIO()
    pickler = TensorPickler(buffer, [], searched)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors + pickler.buffers[::-1], pickler.claims or []


def loads(pickled: bytes, tensors: Sequence[torch.Tensor], claimed: Sequence[Any] = (), apart: bool = False) -> Any:
    """The value again, with `tensors` in the places of those that `dumps` took out, and what was claimed in its own.

    Raises:
        NotApartError: it has a class that was carried by value, and was to be `apart` from all that is here.
    """
    return (ApartUnpickler if apart else TensorUnpickler)(io.BytesIO(pickled), tensors, claimed).load()


def loads_function(pickled: bytes, tensors: Sequence[torch.Tensor]) -> tuple[Any, Surroundings | None]:
    """`loads` of a function, and what it is to run in (`with`), where it has compiled ones in it."""
    if MARK not in pickled:
        return loads(pickled, tensors), None
    surroundings = Surroundings()
    return surroundings.load(SurroundedUnpickler(surroundings, io.BytesIO(pickled), tensors, ()).load), surroundings


def loads_result(shape: int | bytes | None, tensors: Sequence[torch.Tensor]) -> Any:
    """The result of a call (see `mpgrad.messages.Structure`)."""
    if shape is None:
        return tensors[0]
    return tuple(tensors) if isinstance(shape, int) else loads(shape, tensors)


class TensorPickler(ClassPickler):
    def __init__(self, buffer: io.BytesIO, claims: list[Any] | None = None, searched: Searched | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        # no method of ours: that would be a cycle, and the tensors, with the graphs behind them, wait for the collector
        super().__init__(buffer, protocol=5, buffer_callback=functools.partial(stays_in_band, self.buffers))
        self.claims = claims
        self._searched = {} if searched is None else searched
        self._number: dict[int, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, torch.Tensor):
            return self._number_of_claim(value) if isinstance(value, Deferred) else None
        number = self._number.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def _number_of_claim(self, value: Deferred) -> int | None:
        if self.claims is None:
            raise TypeError(
                "a future can be an argument of a call, but neither part of a function or result, nor within a torch.func "
                "transform; pass it as an argument, or pass its result()"
            )
        if id(value) not in self._number:
            claim = value.claim()
            if claim is None:
                return None
            self.claims.append(claim)
            self._number[id(value)] = -len(self.claims)
        return self._number[id(value)]

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Deferred):
            return itself, (value.taken(),)
        # Functions and classes of an importable module go by name, and the worker would import tensors of its own, not ours.
        if isinstance(value, types.FunctionType) and self._reaches_tensor(value):
            return self._dynamic_function_reduce(value)
        if isinstance(value, type) and self._reaches_tensor(value):
            return reduce_class(value)  # in the engines of this process it is to have the tensors that calls are given
        if isinstance(value, functools._lru_cache_wrapper) and self._reaches_tensor(value):
            return cached_again, (value.__wrapped__, value.cache_parameters())
        if isinstance(value, Module) and (reduced := reduce_module(value)) is not None:
            return reduced
        return super().reducer_override(value)

    def _reaches_tensor(self, value: object) -> bool:
        if id(value) in self._searched:
            return False
        reaches = reaches_tensor(value)
        if not reaches:
            self._searched[id(value)] = value
        return reaches

    def _dynamic_function_reduce(self, function: types.FunctionType) -> Any:
        compiled = reduce_compiled(function)
        return complete(function, super()._dynamic_function_reduce(function)) if compiled is None else compiled


def stays_in_band(taken_out: list[torch.Tensor], buffer: pickle.PickleBuffer) -> bool:
    memory = buffer.raw()
    if memory.nbytes <= RIDE_BYTES or "numpy" not in sys.modules:  # numpy makes buffers of tensors again
        return True
    # of memory that may not be written torch makes no tensors
    taken_out.append(torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8))
    return False


class TensorUnpickler(ClassUnpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[torch.Tensor], claimed: Sequence[Any]) -> None:
        # `cpu`, where `device=` has moved all that a call was given
        super().__init__(buffer, buffers=(tensor.cpu().numpy() for tensor in reversed(tensors)))
        self._tensors = tensors
        self._claimed = claimed

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number] if number >= 0 else self._claimed[-1 - number]


class SurroundedUnpickler(TensorUnpickler):
    """Gives functions the globals that `Surroundings` keeps for them."""

    def __init__(self, surroundings: Surroundings, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._given = {
            make_function.__name__: surroundings.make_function,
            set_function.__name__: functools.partial(surroundings.set_state, set_function),
            SETS_CLASS[1]: functools.partial(surroundings.set_class, self.set_class),
        }

    def find_class(self, module: str, name: str) -> Any:
        found = self._given.get(name) if module == make_function.__module__ else None
        return super().find_class(module, name) if found is None else found


class ApartUnpickler(TensorUnpickler):
    set_class = staticmethod(refuse)


def reaches_tensor(value: object) -> bool:
    """Whether using `value` can reach a tensor through globals, closures, defaults, attributes, containers or methods.

    Raises:
        TypeError: it reaches one that needs gradients through a module, of which the worker would import its own copy.
    """
    return bool(tensors_reached(value, set(), set()))


def tensors_reached(value: object, seen: set[int], behind_modules: set[int]) -> list[torch.Tensor]:
    """Of what was `seen`, nothing again; of what was seen `behind_modules`, nothing again there."""
    if isinstance(value, torch.Tensor):
        return [value]
    if id(value) in seen or isinstance(value, (types.ModuleType, str, bytes, int, float)):
        return []
    seen.add(id(value))
    found = [*value.parameters(), *value.buffers()] if isinstance(value, Module) else []
    for part in parts_of(value, behind_modules):
        found += tensors_reached(part, seen, behind_modules)
    return found


def parts_of(value: object, behind_modules: set[int]) -> list[object]:
    """What `value` may lead to; nothing for what belongs to a library."""
    if isinstance(value, types.FunctionType):
        return [] if is_library(value.__module__) else reach_of(value, behind_modules)
    if isinstance(value, (types.MethodType, functools.partial)):
        parts = [value.__func__, value.__self__] if isinstance(value, types.MethodType) else [value.func, *value.args]
        return [*parts, *getattr(value, "keywords", {}).values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, types.SimpleNamespace):
        return list(vars(value).values())
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, type):
        return [part for each in value.__mro__ if not is_library(each.__module__) for part in vars(each).values()]
    if is_library(type(value).__module__):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return [type(value), *getattr(value, "__dict__", {}).values(), *(getattr(value, name) for name in slots)]


def reach_of(function: types.FunctionType, behind_modules: set[int]) -> list[object]:
    parts: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # a cell that is not filled yet: a recursive function while it is defined
            continue
    names = names_in(function.__code__)
    parts += [function.__globals__[name] for name in names if name in function.__globals__]
    imported = [sys.modules[name] for name in names if name in sys.modules and name not in function.__globals__]
    for module in [*parts, *imported]:  # imported by the function itself: its own copy, in a worker
        if isinstance(module, types.ModuleType) and not is_library(module.__name__):
            for name in names & vars(module).keys():
                refuse_if_lost(f"{module.__name__}.{name}", vars(module)[name], behind_modules)
    return parts


def refuse_if_lost(path: str, value: object, behind_modules: set[int]) -> None:
    if any(tensor.requires_grad for tensor in tensors_reached(value, behind_modules, behind_modules)):
        raise TypeError(
            f"the function reaches a tensor that needs gradients through a module ({path}), of which a worker imports its own "
            "copy, so that gradients would be lost; import the name itself (from module import name), or pass it as an argument"
        )


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names that `code` and the functions defined in it may look up among the globals."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def is_library(module: str | None) -> bool:
    """Whether `module` is installed (or this package) rather than the user's own: it is not searched for tensors."""
    root = (module or "").partition(".")[0]
    if (root in sys.stdlib_module_names or root == "mpgrad") and root != "__main__":
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return file.startswith(tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))
