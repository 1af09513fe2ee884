"""How single kinds of objects travel that pickle and cloudpickle refuse, or carry as something else.

A forked process has a copy of whatever its parent had, so a script may keep anything in its globals and objects. What has a
meaning in another process is made again there: caches, dispatch tables, weak references, scripted and parametrized modules.
What guards something within a process (locks and their like) is another one there, which nobody holds. A file or a socket has
no second self: `mpgrad.uncarried` says where it is and what to do.

Guarantees: what a weak reference leads to is alive in the worker for as long as the reference is, as it is in the caller,
    where others hold it.
"""

from __future__ import annotations

import contextvars
import copy
import dis
import functools
import inspect
import sys
import threading
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
from cloudpickle.cloudpickle import _lookup_module_and_qualname as importable_as
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized

from mpgrad import caches
from mpgrad._torch import compiled_in_place, load_script, parametrize_again
from mpgrad.classes import ClassPickler
from mpgrad.compiled import reduce_compiled, with_compiled_call, without_marks
from mpgrad.modules import attribute_here

__all__ = ["complete", "itself", "reduce_module"]

Reduced = tuple[Any, ...]


def itself(value: Any) -> Any:
    return value


# --- functions


def complete(function: types.FunctionType, reduced: Reduced) -> Reduced:
    """cloudpickle's way of a function, with the globals that classes in it use; it looks into functions only."""
    make, arguments, (attributes, slots), *rest = reduced
    known = function.__globals__
    for name in names_in_classes(function.__code__) & known.keys():
        slots["__globals__"].setdefault(name, known[name])
    return make, arguments, (without_marks(attributes), slots), *rest


@functools.lru_cache(maxsize=4096)
def names_in_classes(code: types.CodeType) -> frozenset[str]:
    """What the bodies of classes that are defined within `code` look up by name."""
    found: set[str] = set()
    for inner in (each for each in code.co_consts if isinstance(each, types.CodeType)):
        found |= names_in_classes(inner)
        if not inner.co_flags & inspect.CO_OPTIMIZED:
            found |= {each.argval for each in dis.get_instructions(inner) if each.opname in LOOK_UP}
    return frozenset(found)


LOOK_UP = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def reduce_cached(value: Any) -> Any:
    """By its name, where a worker can import it. (cloudpickle asks that of functions and classes only.)"""
    if importable_as(value) is not None:
        return value.__qualname__
    return caches.reduce_by_value(value)


# --- what guards something within a process


def reduce_condition(value: threading.Condition) -> Reduced:
    return threading.Condition, (value._lock,)  # type: ignore[attr-defined]  # which others may hold, too


def reduce_event(value: threading.Event) -> Reduced:
    return event_again, (value.is_set(),)


def event_again(is_set: bool) -> threading.Event:
    event = threading.Event()
    if is_set:
        event.set()
    return event


def reduce_semaphore(value: threading.Semaphore) -> Reduced:
    # whoever holds one in the caller does not give it back here; how many there were at first is known of bounded ones only
    count = max(1, getattr(value, "_initial_value", value._value))
    return type(value), (count,)


def reduce_barrier(value: threading.Barrier) -> Reduced:
    return threading.Barrier, (value.parties, value._action, value._timeout)  # type: ignore[attr-defined]


def reduce_local(value: threading.local) -> Any:
    return reduce_attribute(value) or (threading.local, ())


def reduce_context_variable(value: contextvars.ContextVar[Any]) -> Any:
    if (by_name := reduce_attribute(value)) is not None:
        return by_name
    try:
        return context_variable_again, (value.name, value.get())  # in this context, or the default
    except LookupError:
        return context_variable_again, (value.name,)


def context_variable_again(name: str, *given: Any) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar(name, default=given[0]) if given else contextvars.ContextVar(name)


def reduce_attribute(value: object) -> Reduced | None:
    """How what belongs to an imported module is found there, by the functions of that module too; None for the script's."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and module.__name__ != "__main__":
            for attribute, held in list(vars(module).items()):
                if held is value:
                    return attribute_here, (module.__name__, attribute)
    return None


# --- weak references


class KeptReference(weakref.ref[Any]):
    """A weak reference that came to a worker, where nobody else holds what it leads to."""

    __slots__ = ("kept",)


class KeptMethod(weakref.WeakMethod[Any]):
    __slots__ = ("kept",)


def reference_again(kind: type[Any], target: Any) -> Any:
    made = kind(target)  # no callback: it would be called when the target goes, which is with the reference
    made.kept = target
    return made


def reduce_reference(value: weakref.ref[Any]) -> Reduced:
    target = value()
    if target is None:
        return dead_reference, ()
    kind = KeptMethod if isinstance(value, weakref.WeakMethod) else KeptReference
    return reference_again, (kind, target)


def dead_reference() -> weakref.ref[Any]:
    return weakref.ref(Dead())


class Dead:
    """Nobody holds one."""


def reduce_proxy(value: Any) -> Reduced:
    """As what it stands for, which looks the same."""
    return itself, (value.__repr__.__self__,)


def reduce_weak_mapping(value: Any) -> tuple[Any, Reduced, dict[str, Any], None, Iterator[tuple[Any, Any]]]:
    """A WeakKeyDictionary or WeakValueDictionary; what it leads to hangs on it."""
    pairs = list(value.items())
    return type(value), (), {"kept": pairs}, None, iter(pairs)


def reduce_weak_set(value: weakref.WeakSet[Any]) -> Reduced:
    return weakref.WeakSet, (), list(value), None, None, fill_weak_set


def fill_weak_set(made: Any, members: list[Any]) -> None:
    made.update(members)
    made.kept = members


# --- modules, scripts, and what else is PyTorch's


def reduce_module(value: Module) -> tuple[Any, ...] | None:
    """How the modules that refuse to be pickled are, all the same; None for any other."""
    if isinstance(value, torch.jit.ScriptModule):
        tensors = {**dict(value.named_parameters(remove_duplicate=False)), **dict(value.named_buffers(remove_duplicate=False))}
        hollow = copy.deepcopy(value)
        put_tensors(hollow, dict.fromkeys(tensors, torch.empty(0)))
        return script_again, (hollow.save_to_buffer(), tensors)
    if (reduced := reduce_compiled(value)) is not None:
        return reduced
    if is_parametrized(value):  # its class was made for it, and refuses; what that was made from does not
        reduced = object.__new__, (type(value).__base__,), vars(value), None, None, parametrize_again
    compiled = compiled_in_place(value)
    if compiled is None:
        return reduced
    own: Any = reduced or value.__reduce_ex__(5)
    return with_compiled_call(own, compiled)


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


def reduce_builtin(value: Any) -> Any:
    """Under the name by which everybody calls it, for workers watch some of PyTorch's functions: see `workers.surroundings`."""
    owner = torch.Tensor if isinstance(value, types.MethodDescriptorType) else torch
    name = value.__name__
    return (getattr, (owner, name)) if getattr(owner, name, None) is value else value.__reduce_ex__(5)


def reduce_generator(value: torch.Generator) -> Any:
    # of the default generator the worker's own is meant, which has the seed of the item
    return (getattr, (torch, "default_generator")) if value is torch.default_generator else value.__reduce_ex__(5)


def reduce_limits(value: torch.finfo | torch.iinfo) -> tuple[Any, ...]:
    return type(value), (getattr(torch, value.dtype),)


def reduce_operator(value: object) -> Reduced:
    """Of torch.ops: a namespace, an operator or an overload of one, each by its name there."""
    path = getattr(value, "__name__", "") if isinstance(value, types.ModuleType) else str(value)
    return operator_again, (path.removeprefix("torch.ops."),)


def operator_again(path: str) -> object:
    return functools.reduce(getattr, path.split("."), torch.ops)


def reduce_imported(value: types.ModuleType) -> Any:
    """An imported module; also one like torch._C._functions, which is an attribute of another and cannot be imported."""
    parent, _, name = value.__name__.rpartition(".")
    if value.__name__ not in sys.modules and getattr(sys.modules.get(parent), name, None) is value:
        return getattr, (sys.modules[parent], name)
    return cloudpickle.Pickler.dispatch_table[types.ModuleType](value)


# None from torch 2.15 on, where it is no method but a builtin one, which pickle carries by its class and name
FUNCTION_APPLY: Any = getattr(torch.autograd.Function.apply, "__func__", None)
OWN_MAP, *OTHER_MAPS = cloudpickle.Pickler.dispatch_table.maps
REDUCERS: dict[type, Callable[[Any], Any]] = {
    torch.jit.ScriptFunction: reduce_script_function,
    torch.Generator: reduce_generator,
    torch.finfo: reduce_limits,
    torch.iinfo: reduce_limits,
    types.BuiltinMethodType: reduce_builtin,
    types.MethodDescriptorType: reduce_builtin,
    types.MethodType: reduce_method,
    types.ModuleType: reduce_imported,
    type(torch.ops): reduce_imported,
    type(torch.classes): reduce_imported,
    type(torch.ops.aten): reduce_operator,
    type(torch.ops.aten.add): reduce_operator,
    type(torch.ops.aten.add.Tensor): reduce_operator,
    functools._lru_cache_wrapper: reduce_cached,
    type(threading.Lock()): lambda value: (threading.Lock, ()),
    type(threading.RLock()): lambda value: (threading.RLock, ()),
    threading.Condition: reduce_condition,
    threading.Event: reduce_event,
    threading.Semaphore: reduce_semaphore,
    threading.BoundedSemaphore: reduce_semaphore,
    threading.Barrier: reduce_barrier,
    threading.local: reduce_local,
    contextvars.ContextVar: reduce_context_variable,
    weakref.ref: reduce_reference,
    KeptReference: reduce_reference,
    weakref.WeakMethod: reduce_reference,
    KeptMethod: reduce_reference,
    weakref.ProxyType: reduce_proxy,
    weakref.CallableProxyType: reduce_proxy,
    weakref.WeakKeyDictionary: reduce_weak_mapping,
    weakref.WeakValueDictionary: reduce_weak_mapping,
    weakref.WeakSet: reduce_weak_set,
}
ClassPickler.dispatch_table = ChainMap({**OWN_MAP, **REDUCERS}, *OTHER_MAPS)  # no deeper: every object is looked up here
