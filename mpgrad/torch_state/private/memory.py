"""The memory of tensors: whether it is plain, and storages that processes share. And what has
tensors in it: modules and scripts that are made again, and structures.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only

from mpgrad.system import anonymous_memory

__all__ = [
    "descriptor_of",
    "flattened",
    "has_plain_memory",
    "have_plain_memory",
    "load_script",
    "parametrize_again",
    "replica_of",
    "shared_storage",
    "storage_from_descriptor",
    "tree_leaves",
    "tree_map_only",
]

SHARED_STORAGE: Any = torch.UntypedStorage  # its private names are not in torch's type hints


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Shared memory mapped as torch.multiprocessing maps it.

    torch itself opens a file in /dev/shm, which in a container often ends at 64 MiB, and writing past that end is a SIGBUS;
    an anonymous memory file has no such limit, and never a name that could stay behind.
    """
    descriptor = anonymous_memory()
    try:
        os.truncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return storage_from_descriptor(descriptor, nbytes)


def storage_from_descriptor(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Map shared memory by its file descriptor, as torch.multiprocessing's reducers do, and close `descriptor`."""
    try:
        storage: torch.UntypedStorage = SHARED_STORAGE._new_shared_fd_cpu(descriptor, nbytes)
        return storage
    finally:
        os.close(descriptor)  # torch keeps a duplicate of its own


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """The file descriptor behind shared memory; it stays the storage's own."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)


KEYS_OF: Any = torch._C._dispatch_keys
with torch.inference_mode(False):
    PLAIN_KEYS = KEYS_OF(torch.empty(0, device="cpu")).raw_repr()


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in the CPU's memory as they are: no stand-in, sparse, quantized or conjugated tensor."""
    return bool(KEYS_OF(tensor).raw_repr() == PLAIN_KEYS)


def have_plain_memory(tensors: Sequence[torch.Tensor]) -> bool:
    return {KEYS_OF(tensor).raw_repr() for tensor in tensors} == {PLAIN_KEYS}


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The elements of the tensors, which are of one dtype, one after another, copied."""
    dims = {tensor.dim() for tensor in tensors}
    if dims == {1}:
        return torch.cat(tensors)
    return torch.stack(tensors) if dims == {0} else torch._C._nn.flatten_dense_tensors(tensors)


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
