"""What a storage holds around an argument stays in the caller, unless it is little: who reaches for it is told so.

Past the end of what has come the storage ends here too, and PyTorch raises. It sees nothing wrong with a place before the first
element, or in a gap: the memory there is another tensor's, or nobody's. So the functions that take such places as numbers are
wrapped, in processes, which belong to us, and look for the argument's flags (see `packer.dense_core`).

Assumes: who asks where a tensor begins in its storage counts from there, which is right wherever that is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from mpgrad.torch_state.private import is_functorch_wrapped, script_operations
from mpgrad.wire.tensor_refs import LONE, SPREAD

__all__ = ["SURROUNDINGS"]

REACHING: list[tuple[Any, str]] = [(torch.Tensor, name) for name in ("as_strided", "as_strided_", "as_strided_scatter")]
REACHING += [(torch, name) for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")]


class Given(Protocol):
    def arrived(self) -> Iterable[tuple[torch.Tensor, int]]:
        """The tensors that came for a call, with their flags."""
        ...


class Surroundings:
    """Of the arguments and captures of the call that runs."""

    def __init__(self) -> None:
        self.were_asked_for = False  # the function has asked where a tensor begins in its storage
        self._given: Callable[[], Given | None] = lambda: None

    def are_of(self, given: Given) -> None:
        self._given = weakref.ref(given)  # it must not keep their memory beyond the call

    def watch(self) -> None:
        """From here on, in a process that belongs to us."""
        for owner, name in REACHING:
            replace(owner, name, self._guarded(name, getattr(owner, name)))
        replace(torch.Tensor, "storage_offset", self._heard(torch.Tensor.storage_offset))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        offset_at = 4 if name == "as_strided_scatter" else 3

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                offset = args[offset_at] if len(args) > offset_at else kwargs.get("storage_offset")
                for tensor in args[:1] or [each for key, each in kwargs.items() if key != "src"]:  # it has several names
                    if isinstance(tensor, torch.Tensor):
                        self._check(name, tensor, offset)
            return function(*args, **kwargs)

        return guarded

    def _heard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any, **kwargs: Any) -> Any:
            self.were_asked_for = True
            return function(*args, **kwargs)

        return heard

    def _check(self, name: str, tensor: torch.Tensor, offset: int | None) -> None:
        """Raises: RuntimeError, as PyTorch does for what lies outside of a storage."""
        given = self._given()
        if given is None:
            return
        flags = 0
        for each, own in given.arrived():
            if own & (LONE | SPREAD) and (is_functorch_wrapped(tensor) or have_one_storage(tensor, each)):
                flags |= own
        if flags & SPREAD:
            raise RuntimeError(
                f"{name} is not for a tensor that came without what lies between its elements (a view with wide gaps, or a "
                f"conjugated one; shape: {tuple(tensor.shape)}); pass the tensor that it is a view of, or tensor.contiguous()"
            )
        if flags & LONE and offset is not None and not self.were_asked_for:
            raise RuntimeError(
                f"{name} counts from the beginning of the tensor's storage (storage_offset: {offset}), but what lies there "
                "before it did not come along to the worker; leave storage_offset out, or count from tensor.storage_offset()"
            )


def replace(owner: Any, name: str, function: Any) -> None:
    """Have `function` in the place of one of PyTorch's, also for pickle and TorchScript."""
    before = getattr(owner, name)
    functools.update_wrapper(function, before)
    function.__module__, function.__qualname__ = "torch", f"{'Tensor.' * isinstance(owner, type)}{name}"
    operations = script_operations()
    if id(before) in operations:
        operations[id(function)] = operations[id(before)]
    setattr(owner, name, function)


def have_one_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided
    return plain and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


SURROUNDINGS = Surroundings()
