"""The modules of `mpgrad.nn.parallel_apply`, as the function that workers run. Both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Replicas"]


class Replicas:
    """The modules of one `parallel_apply`, as a function of the number of one and its inputs."""

    captures_share_memory = True  # replicas look at one copy of the parameters, to which no forward writes

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.modules = list(modules)  # one for all, or one for each number

    def __call__(self, number: int, inputs: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        """The output, and the buffers that replica 0 has written to or replaced."""
        module = self.modules[number % len(self.modules)]
        for each in module.modules():
            # as PyTorch marks its replicas: `zero_grad`, which has no effect on them, then says so
            vars(each)["_is_replica"] = True
        own = dict(module.named_buffers(remove_duplicate=False))
        place = {id(buffer): name for name, buffer in own.items()}
        copies = {known: own[name].clone() for known, name in place.items()}
        for name, buffer in own.items():  # each call begins with those of the caller, and leaves them to the next as they were
            put(module, name, copies[id(buffer)])
        try:
            output = module(*inputs, **kwargs)
            written = copies.items() if number == 0 else ()
            # those that it wrote to: what it registered or replaced is lost, as in PyTorch. Versions do not tell: batch
            # normalization writes without counting
            return output, {place[known]: copy.detach() for known, copy in written if not torch.equal(copy, own[place[known]])}
        finally:
            for name, buffer in own.items():
                put(module, name, buffer)


def put(module: torch.nn.Module, path: str, buffer: torch.Tensor) -> None:
    """Make `buffer` the one at this path of the module."""
    owner, _, name = path.rpartition(".")
    module.get_submodule(owner)._buffers[name] = buffer
