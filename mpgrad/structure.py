"""Pickle without tensors: any structure or function becomes bytes, plus the list of the tensors it reaches.

cloudpickle carries lambdas, closures and whatever a script defined, but it would carry tensors by value and fails on those
that need gradients. Here each tensor leaves its number in the bytes; what the tensors are, and who owns their memory, is
decided elsewhere. The tensors that a *function* reaches in this way are its captures.

Large buffers of other libraries (numpy arrays, above all) go the same way, as tensors of bytes: pickle asks for them in the
order in which it met them, so they stand at the end of the list, the first one last. Scripted and parametrized modules, which
refuse to be pickled, are taken apart here and put together again around the tensors.

A result that a call is still to give (`Deferred`) leaves a number below 0, and a claim to what it will be.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
import sysconfig
import types
from collections import ChainMap, deque
from collections.abc import Sequence
from typing import Any, NoReturn

import cloudpickle
import torch
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized

from mpgrad._torch import load_script, parametrize_again
from mpgrad.classes import ClassPickler, ClassUnpickler, reduce_class, refuse
from mpgrad.errors import add_note
from mpgrad.packer import RIDE_BYTES

__all__ = ["Deferred", "Searched", "dumps", "dumps_arguments", "loads", "loads_result", "not_carried"]

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


def loads_result(shape: int | bytes | None, tensors: Sequence[torch.Tensor]) -> Any:
    """The result of a call (see `mpgrad.messages.Structure`)."""
    if shape is None:
        return tensors[0]
    return tuple(tensors) if isinstance(shape, int) else loads(shape, tensors)


def not_carried(error: Exception, subject: str) -> NoReturn:
    """Raise the `error` with which `subject` (for example "item 3") could not be pickled: same type, named subject.

    What an object's own code raised stays the object that it is, and the subject is a note.
    """
    message = f"{subject} cannot be carried to or from a worker"
    if type(error) in (TypeError, pickle.PicklingError):
        raise type(error)(f"{message}: {error}") from error
    if isinstance(error, StopIteration):  # the loop that takes items from their source would take it for its end
        raise pickle.PicklingError(f"{message}: {error!r}") from error
    add_note(error, message)
    raise error


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


class ApartUnpickler(TensorUnpickler):
    set_class = staticmethod(refuse)


def itself(value: Any) -> Any:
    return value


def cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    """A cached function with an empty cache: what was in it was computed from the caller's tensors."""
    return functools.lru_cache(**parameters)(function)


def reduce_module(value: Module) -> tuple[Any, ...] | None:
    """How the modules that refuse to be pickled are, all the same; None for any other."""
    if isinstance(value, torch.jit.ScriptModule):
        tensors = {**dict(value.named_parameters(remove_duplicate=False)), **dict(value.named_buffers(remove_duplicate=False))}
        hollow = copy.deepcopy(value)
        put_tensors(hollow, dict.fromkeys(tensors, torch.empty(0)))
        return script_again, (hollow.save_to_buffer(), tensors)
    if is_parametrized(value):  # its class was made for it, and refuses; what that was made from does not
        return object.__new__, (type(value).__base__,), vars(value), None, None, parametrize_again
    return None


def script_again(code: bytes, tensors: dict[str, torch.Tensor]) -> torch.jit.ScriptModule:
    module = load_script(code)
    put_tensors(module, tensors)
    return module


def put_tensors(module: torch.jit.ScriptModule, tensors: dict[str, torch.Tensor]) -> None:
    owners = dict(module.named_modules(remove_duplicate=False))
    for path, tensor in tensors.items():
        owner, _, name = path.rpartition(".")
        setattr(owners[owner], name, tensor)


class ScriptedFunction:
    """TorchScript saves a function as the method of a module, and forgets its defaults."""

    def __init__(self, code: bytes, names: list[str], defaults: dict[str, Any]) -> None:
        self._code, self._names, self._defaults = code, names, defaults
        self._module = load_script(code)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rest = {name: self._defaults[name] for name in self._names[len(args) :] if name in self._defaults}
        return self._module(*args, **{**rest, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:
        return ScriptedFunction, (self._code, self._names, self._defaults)


def reduce_script_function(value: Any) -> tuple[Any, ...]:
    arguments = value.schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return ScriptedFunction, (value.save_to_buffer(), [each.name for each in arguments], defaults)


def reduce_method(value: types.MethodType) -> Any:
    owner = value.__self__
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and value.__func__ is FUNCTION_APPLY:
        return getattr, (owner, "apply")  # the worker's own, not a copy of torch's code
    return cloudpickle.Pickler.dispatch_table[types.MethodType](value)


def reduce_generator(value: torch.Generator) -> Any:
    # of the default generator the worker's own is meant, which has the seed of the item
    return (getattr, (torch, "default_generator")) if value is torch.default_generator else value.__reduce_ex__(5)


def reduce_limits(value: torch.finfo | torch.iinfo) -> tuple[Any, ...]:
    return type(value), (getattr(torch, value.dtype),)


def reduce_imported(value: types.ModuleType) -> Any:
    """An imported module; also one like torch._C._functions, which is an attribute of another and cannot be imported."""
    parent, _, name = value.__name__.rpartition(".")
    if value.__name__ not in sys.modules and getattr(sys.modules.get(parent), name, None) is value:
        return getattr, (sys.modules[parent], name)
    return cloudpickle.Pickler.dispatch_table[types.ModuleType](value)


# None from torch 2.15 on, where it is no method but a builtin one, which pickle carries by its class and name
FUNCTION_APPLY: Any = getattr(torch.autograd.Function.apply, "__func__", None)
OWN_MAP, *OTHER_MAPS = cloudpickle.Pickler.dispatch_table.maps
REDUCERS = {
    torch.jit.ScriptFunction: reduce_script_function,
    torch.Generator: reduce_generator,
    torch.finfo: reduce_limits,
    torch.iinfo: reduce_limits,
    types.MethodType: reduce_method,
    types.ModuleType: reduce_imported,
}
TensorPickler.dispatch_table = ChainMap({**OWN_MAP, **REDUCERS}, *OTHER_MAPS)  # no deeper: every object is looked up here


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
