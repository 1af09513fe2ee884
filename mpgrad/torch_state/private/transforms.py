"""`torch.func`: tensors that stand for a batch, or that a transform follows, and forward mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from mpgrad.errors import contextmanager

__all__ = [
    "batched",
    "dual_level_is_active",
    "dual_level_kept",
    "has_ended",
    "has_tangent",
    "is_batched",
    "is_batched_the_older_way",
    "is_functorch_wrapped",
    "known_to_torch_func",
    "level_count",
    "level_of",
    "older_levels",
    "outside_transforms",
    "transforms_are_active",
    "unbatched",
    "unbatched_the_older_way",
    "vmap_levels",
    "vmap_the_older_way",
    "within_dual_level",
    "without_tangents",
]


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a wrapper inside `torch.func.grad`, `vmap` and their like."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def has_ended(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the wrapper of a `torch.func.grad`, `vjp` or `jvp` that is over."""
    return bool(torch._C._functorch.is_dead_tensor_wrapper(tensor))  # type: ignore[attr-defined]


# Whether a `torch.func` transform is running in this thread; PyTorch's own function, for it is asked many times a call.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def dual_level_is_active() -> bool:
    """Whether forward-mode differentiation is on in this process (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def vmap_levels() -> frozenset[int]:
    """The numbers of the `torch.func.vmap`s that are running in this thread."""
    stack: Any = torch._C._functorch.get_interpreter_stack() or ()
    return frozenset(each.level() for each in stack if each.key() == torch._C._functorch.TransformType.Vmap)


def level_count() -> int:
    """How many transforms are running in this thread."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a dual tensor of the level that is active."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class SharedLevel:
    """There is one level of dual tensors for all threads of a process: the first one opens it, the last one closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._level = contextlib.ExitStack()
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Whoever is here can make dual tensors; where somebody else has opened a level, that one serves."""
        with self._lock:
            is_ours = self._count > 0 or not dual_level_is_active()
            if is_ours and self._count == 0:
                self._level.enter_context(forward_ad.dual_level())
                self._level.enter_context(known_to_torch_func())
            self._count += is_ours
        try:
            yield
        finally:
            with self._lock:
                self._count -= is_ours
                if is_ours and self._count == 0:
                    self._level.close()


@contextmanager
def known_to_torch_func() -> Iterator[None]:
    """A `torch.func.jvp` in the body takes the level of dual tensors that there is, and does not open a second one."""
    torch._functorch.eager_transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        torch._functorch.eager_transforms.JVP_NESTING -= 1


DUAL_LEVEL = SharedLevel()


@contextmanager
def within_dual_level() -> Iterator[None]:
    """Forward-mode differentiation is on in the body."""
    with forward_ad._set_fwd_grad_enabled(True), DUAL_LEVEL.entered():  # a function's own `jvp` runs with it off
        yield


@contextmanager
def dual_level_kept() -> Iterator[None]:
    """Around all that is made of dual tensors, with forward-mode differentiation off.

    Tensors that a graph has saved have their tangents for as long as there is a level. If another thread closed it while this
    one's backward takes them out, that would fail.
    """
    with forward_ad._set_fwd_grad_enabled(False), DUAL_LEVEL.entered():
        yield


def without_tangents() -> contextlib.AbstractContextManager[None]:
    """Forward-mode differentiation is off in the body, as it is in a Function's own forward and `jvp`."""
    return forward_ad._set_fwd_grad_enabled(False)


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Run the body as if no `torch.func` transform were running; only plain tensors may be used in it."""
    if not transforms_are_active():
        return NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    stack: contextlib.AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return stack


NOTHING = contextlib.nullcontext()  # one for all: this is asked several times a call


def is_batched(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def level_of(tensor: torch.Tensor) -> int:
    """The number of the innermost transform that it belongs to."""
    return int(torch._C._functorch.maybe_get_level(tensor))


def unbatched(tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """The batch that `tensor` stands for at this level, and the batch dimension; None where it is not batched there."""
    value, dim = torch._C._functorch._unwrap_batched(tensor, level)
    return value, dim


def batched(tensor: torch.Tensor, level: int, older: bool) -> torch.Tensor:
    """Let `tensor` stand for one element of its leading dimension."""
    add: Any = torch._add_batch_dim if older else torch._C._functorch._add_batch_dim
    wrapper: torch.Tensor = add(tensor, 0, level)
    return wrapper


# The vmap before torch.func; `torch.autograd.grad(is_grads_batched=True)` is what still uses it.


def is_batched_the_older_way(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def older_levels() -> int:
    """How many such vmaps are running in this thread."""
    count = int(torch._C._vmapmode_increment_nesting()) - 1
    torch._C._vmapmode_decrement_nesting()
    return count


def unbatched_the_older_way(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """The batch in front; a batch of one where `tensor` is not batched at this level."""
    batch: torch.Tensor = torch._remove_batch_dim(tensor, level, 1, 0)
    return batch


def vmap_the_older_way(fn: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    from torch._vmap_internals import _vmap

    mapped: Callable[..., tuple[torch.Tensor, ...]] = _vmap(fn)
    return mapped
