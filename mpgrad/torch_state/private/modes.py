"""What a thread is in: autocast, hooks for saved tensors, tracing, and a `torch.no_grad` that is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpgrad.errors import contextmanager

__all__ = [
    "MAKE_FX",
    "grad_mode",
    "is_refusing_no_grad",
    "refusing_no_grad",
    "saved_tensor_hooks",
    "tracer",
    "without_autocast",
    "without_refusal",
    "without_saved_tensor_hooks",
]


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """What is copied in the body stays what it is."""
    off: Any = torch._C._DisableAutocast
    return off()  # type: ignore[no-any-return]


def saved_tensor_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The innermost `torch.autograd.graph.saved_tensors_hooks` of this thread: those that apply."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """As in a thread of its own."""
    hidden = []
    try:
        while (hooks := saved_tensor_hooks()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hidden.append(hooks)
        yield
    finally:
        for hooks in reversed(hidden):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def tracer() -> str | None:
    """What records the operations of this thread instead of only running them; it would see none of a worker's."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    keys: Any = torch._C._TorchDispatchModeKey
    return None if torch._C._get_dispatch_mode(keys.PROXY) is None else MAKE_FX


MAKE_FX = "torch.fx (make_fx, torch.func.linearize, torch.export)"


class RefusingNoGrad(TorchFunctionMode):
    """See `refusing_no_grad`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not args[0]:
            raise NotImplementedError("forward mode follows what is computed under torch.no_grad, which has no derivative")
        return func(*args, **(kwargs or {}))


def without_refusal() -> contextlib.AbstractContextManager[Any]:
    """For our own code within a function that runs under `refusing_no_grad`. Other function modes are off there too."""
    guard: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return guard


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """`torch.set_grad_enabled`, without the refusal."""
    before = torch.is_grad_enabled()
    with without_refusal():
        torch.set_grad_enabled(enabled)
    try:
        yield
    finally:
        with without_refusal():
            torch.set_grad_enabled(before)


def is_refusing_no_grad() -> bool:
    modes: Any = torch.overrides._get_current_function_mode_stack
    return any(isinstance(mode, RefusingNoGrad) for mode in modes())


@contextmanager
def refusing_no_grad() -> Iterator[None]:
    """`torch.no_grad` in the body raises; to be entered with gradients on."""
    with torch._C._EnableTorchFunction(), RefusingNoGrad():  # a task in the caller's thread may run `without_refusal`
        yield
