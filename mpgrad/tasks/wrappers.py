"""Functions of mpgrad that stand around those of the caller, or in their place, on the way to a
worker. Both sides.

    Delayed       functions that joblib was given with `delayed`, as one function of their arguments
    Initializer   what an `mpgrad.Executor` has its workers run first
    Replicas      the modules of `mpgrad.nn.parallel_apply`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from mpgrad.environment import PLACE

__all__ = [
    "Delayed",
    "Initializer",
    "Replicas",
]


class Delayed:
    """Functions, called by their number.

    They are apart from the arguments: for all calls of the same functions this is the same function to the pool, which pickles
    it once, and what the functions reach are captures.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], nesting_level: int) -> None:
        self.functions = tuple(functions)
        self.nesting_level = nesting_level  # of a `joblib.Parallel` in one of the functions

    def __call__(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        from joblib import parallel_config  # only workers of a pool that joblib uses have it
        from joblib.parallel import SequentialBackend, register_parallel_backend

        if PLACE.in_worker:  # for functions that name it: the pool has the CPUs already. In the caller it is ours
            register_parallel_backend("mpgrad", SequentialBackend)
        with parallel_config(backend=SequentialBackend(nesting_level=self.nesting_level), n_jobs=None):
            return self.functions[number](*args, **kwargs)


class Initializer:
    """An initializer whose failure is a `BrokenProcessPool`, as the callers of an executor expect."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *initargs: Any) -> None:
        try:
            self._function(*initargs)
        except BaseException as error:
            raise BrokenProcessPool(f"the initializer failed in a worker ({type(error).__name__}: {error})") from error


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
