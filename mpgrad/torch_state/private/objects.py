"""Modules and scripts made again, and structures with tensors in them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "load_script",
    "parametrize_again",
    "replica_of",
    "tree_leaves",
    "tree_map_only",
]


def replica_of(network: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> torch.nn.Module:
    """A module like `network` with other tensors, by the id of the old ones; buffers that are not named stay the same."""
    modules: Any = list(network.modules())
    copies: Any = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in network.modules():
        replica = copies[id(module)]
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copies[id(child)]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, tensors[id(parameter)])  # a plain attribute: it is no leaf, and so no parameter
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else tensors.get(id(buffer), buffer)
    return copies[id(network)]  # type: ignore[no-any-return]


def load_script(code: bytes) -> torch.jit.ScriptModule:
    """What `save_to_buffer` of a scripted module or function has saved."""
    load: Any = torch.jit.load
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)  # said to the one who scripted it
        module: torch.jit.ScriptModule = load(io.BytesIO(code))
    return module


def parametrize_again(module: Any, state: dict[str, Any]) -> None:
    """Give a module the state of a parametrized one, and the class that makes tensors anew from their parametrizations."""
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)
