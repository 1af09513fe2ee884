"""What a storage holds around an argument stays in the caller, unless it is little: who reaches for it is told so.

Past the end of what has come the storage ends here too, and PyTorch raises. It sees nothing wrong with a place before the first
element, or in a gap: the memory there is another tensor's, or nobody's. So the functions that take such places as numbers are
wrapped, in processes, which belong to us, and look for the argument's flags (see `tensor_cores.dense_core`). These are noted
at its storage, for a backward that runs later finds nothing else; and not before somebody may ask, for most never do.

    a call ──► are_of ──► it reaches, or has a graph ──► mark ──► the flags at each storage ──► as_strided, anywhere: raises
                                                     asked where it begins ──► LONE is taken off that storage
Assumes: who asks where a tensor begins in its storage counts from there, which is right wherever that is. Not so PyTorch
    itself, nor we, who ask in order to copy or pickle it.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from mpgrad.torch_state.private import script_operations, unwrapped
from mpgrad.wire.tensor_refs import LONE, SPREAD

__all__ = ["SURROUNDINGS"]

REACHING: list[tuple[Any, str]] = [(torch.Tensor, name) for name in ("as_strided", "as_strided_", "as_strided_scatter")]
REACHING += [(torch, name) for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")]
MARK = "_mpgrad_stayed_behind"  # in a storage's attributes, which PyTorch keeps as long as its memory


class Given(Protocol):
    def arrived(self) -> Iterable[tuple[torch.Tensor, int]]:
        """The tensors that came for a call, with their flags."""
        ...


def of_nobody() -> None:
    return None


class Surroundings:
    """Of the arguments and captures of calls."""

    def __init__(self) -> None:
        self._is_watching = False
        self._given: Callable[[], Given | None] = of_nobody

    def are_of(self, given: Given) -> None:
        """It is the call that runs."""
        self._given = weakref.ref(given)  # it must not keep their memory beyond the call

    def mark(self) -> None:
        """Note at the storages what the call was given, while it has that."""
        given = self._given() if self._is_watching else None
        if given is None:
            return
        self._given = of_nobody  # once
        for tensor, flags in given.arrived():
            if flags & (LONE | SPREAD):
                notes_of(tensor).setdefault(MARK, flags)  # a capture may have been asked where it begins

    def watch(self) -> None:
        """From here on, in a process that belongs to us."""
        self._is_watching = True
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
            if not torch.compiler.is_compiling() and root_of(sys._getframe(1)) not in ("torch", "mpgrad"):
                self.mark()
                if args and isinstance(args[0], torch.Tensor) and (noted := notes_of(args[0])).get(MARK):
                    noted[MARK] &= ~LONE
            return function(*args, **kwargs)

        return heard

    def _check(self, name: str, tensor: torch.Tensor, offset: int | None) -> None:
        """Raises: RuntimeError, as PyTorch does for what lies outside of a storage."""
        self.mark()
        flags = notes_of(tensor).get(MARK, 0)
        if flags & SPREAD:
            raise RuntimeError(
                f"{name} is not for a tensor that came without what lies between its elements (a view with wide gaps, or a "
                f"conjugated one; shape: {tuple(tensor.shape)}); pass the tensor that it is a view of, or tensor.contiguous()"
            )
        if flags & LONE and offset is not None:
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


def root_of(frame: types.FrameType) -> str:
    """The package whose code runs there."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def notes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes of its storage; within a transform, of that of the tensor which it stands for."""
    tensor = unwrapped(tensor)
    return vars(tensor.untyped_storage()) if tensor.layout is torch.strided else {}


SURROUNDINGS = Surroundings()
