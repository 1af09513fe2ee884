"""PyTorch's modules and TorchScript: those that refuse to be pickled are, and others travel without what is empty.

Runs on both sides of the process border.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized

from mpgrad.pickling.compiled import reduce_compiled, with_compiled_call
from mpgrad.torch_state.private import compiled_in_place, load_script, parametrize_again

__all__ = ["reduce_module", "reduce_script_function"]


def reduce_module(value: Module) -> tuple[Any, ...] | None:
    """How the modules that refuse to be pickled are, all the same; others without what is empty. None for any other."""
    if isinstance(value, torch.jit.ScriptModule):
        tensors = {**dict(value.named_parameters(remove_duplicate=False)), **dict(value.named_buffers(remove_duplicate=False))}
        hollow = copy.deepcopy(value)
        put_tensors(hollow, dict.fromkeys(tensors, torch.empty(0, device="cpu")))
        return script_again, (hollow.save_to_buffer(), tensors)
    if (reduced := reduce_compiled(value)) is not None:
        return reduced
    if is_parametrized(value):  # its class was made for it, and refuses; what that was made from does not
        reduced = object.__new__, (type(value).__base__,), vars(value), None, None, parametrize_again
    elif is_plain(type(value)):
        reduced = without_empty_hooks(value.__reduce_ex__(5))
    elif all(getattr(type(value), name) is getattr(Module, name) for name in PLAIN[:2]):
        create, arguments, state, *rest = tuple(value.__reduce_ex__(5))
        is_of_all = isinstance(state, dict) and "_modules" in state  # that of a quantized one has nothing of what all have
        reduced = create if is_of_all else bare_module, arguments, state, *rest
    elif isinstance(value, torch.fx.GraphModule) and is_exported(value):
        raise TypeError(f"a graph of torch.export cannot be made again elsewhere ({type(value).__name__}); {UNEXPORTED}")
    compiled = compiled_in_place(value)
    if compiled is None:
        return reduced
    own: Any = reduced or value.__reduce_ex__(5)
    return with_compiled_call(own, compiled)


UNEXPORTED = "carry the module that was exported, or load the program in the function (torch.export.load)"


def is_exported(graph: torch.fx.GraphModule) -> bool:
    """Whether its tracer wants to be told of a module: PyTorch, which makes one as it loads a graph, does not know which."""
    tracer = vars(graph).get("_tracer_cls")
    try:
        inspect.signature(tracer or object).bind()
    except TypeError:
        return True
    return False


HOOKS = frozenset(name for name, each in vars(Module()).items() if type(each) is OrderedDict)
PLAIN = "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__"


def is_plain(kind: type[Module]) -> bool:
    """Pickled as PyTorch has it for all modules."""
    return all(getattr(kind, name, None) is getattr(Module, name, None) for name in PLAIN)


def without_empty_hooks(reduced: Any) -> tuple[Any, ...]:
    """As `reduced`, but for a module's dictionaries that have no hook: nine of ten objects that it consists of."""
    create, arguments, state, *_ = reduced
    if type(state) is not dict:
        return tuple(reduced)  # it has slots
    left = {name: None if name in HOOKS and not each else each for name, each in state.items()}
    return create, arguments, left, None, None, set_with_hooks


def set_with_hooks(module: Module, state: dict[str, Any]) -> None:
    """The state of a module, with dictionaries for the hooks that it does not have."""
    made = {name: OrderedDict[Any, Any]() if each is None and name in HOOKS else each for name, each in state.items()}
    module.__setstate__(made)  # type: ignore[no-untyped-call]


def bare_module(kind: type[Module]) -> Module:
    made = kind.__new__(kind)
    Module.__init__(made)
    return made


def script_again(code: bytes, tensors: dict[str, torch.Tensor]) -> torch.jit.ScriptModule:
    module = load_script(code)
    put_tensors(module, tensors)
    return module


def put_tensors(module: torch.jit.ScriptModule, tensors: dict[str, torch.Tensor]) -> None:
    """Into the places that paths of attributes name."""
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
