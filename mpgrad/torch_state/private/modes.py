"""What a thread is in: autocast, hooks for saved tensors, tracing, modes, and a `torch.no_grad` that is refused. And the hooks
that PyTorch calls for all modules or all optimizers: code of the user's in a dictionary of the process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from mpgrad.errors import contextmanager

__all__ = [
    "MAKE_FX",
    "GlobalHook",
    "default_device",
    "foreign_modes",
    "global_hooks",
    "grad_mode",
    "is_observer",
    "is_refusing_no_grad",
    "leave_all_modes",
    "name_of_mode",
    "parametrizations_are_cached",
    "profiler_is_on",
    "refusing_no_grad",
    "registered",
    "remove_global_hooks",
    "saved_tensor_hooks",
    "tracer",
    "under_default_device",
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


OBSERVERS = (
    "torch.cuda._sanitizer.CUDASanitizerDispatchMode",
    "torch.distributed._tools.",
    "torch.distributed.tensor.debug.",
    "torch.testing._internal.logging_tensor.LoggingTensorMode",
    "torch.utils._debug_mode.",
    "torch.utils.flop_counter.",
)  # PyTorch's own modes that only look on; where a module has nothing else, its name
# checkpoint with a policy: what it keeps and what it computes once more has the same values
UNNOTICED = "mpgrad.", "torch.utils.checkpoint._Cach"
CLONES = "torch.autograd.graph._CloneArgBeforeMutateMode"


def name_of_mode(mode: object) -> str:
    """As its user calls it."""
    name = f"{type(mode).__module__}.{type(mode).__qualname__}"
    return "torch.autograd.graph.allow_mutation_on_saved_tensors" if name == CLONES else name.replace("._Flop", ".Flop")


def is_observer(mode: object) -> bool:
    """Whether it is known to change no values."""
    return name_of_mode(mode).startswith(OBSERVERS)


def gives_device(mode: object) -> bool:
    return name_of_mode(mode) == "torch.utils._device.DeviceContext"


def function_modes() -> list[Any]:
    """Those of this thread, the innermost last."""
    stack: Any = torch.overrides._get_current_function_mode_stack
    return list(stack()) if torch._C._len_torch_function_stack() else []


def foreign_modes() -> list[Any]:
    """The modes of this thread that a worker knows nothing of; that of a default device is not among them."""
    found = [mode for mode in function_modes() if not gives_device(mode)]
    if torch._C._len_torch_dispatch_stack():
        found += dispatch_modes()
    return [mode for mode in found if not name_of_mode(mode).startswith(UNNOTICED)] if found else found


def dispatch_modes() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    stack: Any = _get_current_dispatch_mode_stack
    return list(stack())


def parametrizations_are_cached() -> bool:
    """Whether a `torch.nn.utils.parametrize.cached` is open."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


def profiler_is_on() -> bool:
    return bool(torch._C._autograd._profiler_enabled())


def default_device() -> str | None:
    """That of `torch.set_default_device` or ``with torch.device(...)`` in this thread."""
    found = [str(mode.device) for mode in function_modes() if gives_device(mode)]
    return found[-1] if found else None


@contextmanager
def under_default_device(name: str | None) -> Iterator[None]:
    """The body runs with it; None: without one, whatever there was."""
    if name is not None:
        with torch.device(name):
            yield
        return
    push: Any = torch.overrides._push_mode
    before = function_modes()
    pop_function_modes()
    try:
        for mode in before:
            if not gives_device(mode):
                push(mode)
        yield
    finally:
        pop_function_modes()
        for mode in before:
            push(mode)


def pop_function_modes() -> None:
    pop: Any = torch.overrides._pop_mode
    for _ in range(torch._C._len_torch_function_stack()):
        pop()


def leave_all_modes() -> None:
    """For a process that was forked by a thread that was in some."""
    pop_function_modes()
    if torch._C._len_torch_dispatch_stack():
        for mode in reversed(dispatch_modes()):
            torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))


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
    return any(isinstance(mode, RefusingNoGrad) for mode in function_modes())


@contextmanager
def refusing_no_grad() -> Iterator[None]:
    """`torch.no_grad` in the body raises; to be entered with gradients on."""
    with torch._C._EnableTorchFunction(), RefusingNoGrad():  # a task in the caller's thread may run `without_refusal`
        yield


# --- hooks for all modules and optimizers

MODULES: Any = torch.nn.modules.module
OPTIMIZERS: Any = sys.modules[torch.optim.Optimizer.__module__]  # PyTorch deletes the name
REGISTRIES = {
    "_global_forward_pre_hooks": (MODULES, "register_module_forward_pre_hook"),
    "_global_forward_hooks": (MODULES, "register_module_forward_hook"),
    "_global_backward_pre_hooks": (MODULES, "register_module_full_backward_pre_hook"),
    "_global_backward_hooks": (MODULES, "register_module_full_backward_hook"),
    "_global_buffer_registration_hooks": (MODULES, "register_module_buffer_registration_hook"),
    "_global_module_registration_hooks": (MODULES, "register_module_module_registration_hook"),
    "_global_parameter_registration_hooks": (MODULES, "register_module_parameter_registration_hook"),
    "_global_optimizer_pre_hooks": (OPTIMIZERS, "register_optimizer_step_pre_hook"),
    "_global_optimizer_post_hooks": (OPTIMIZERS, "register_optimizer_step_post_hook"),
}


class GlobalHook(NamedTuple):
    """As it travels: `register(hook, **options)` makes it one."""

    register: Callable[..., Any]
    hook: Callable[..., Any]
    options: dict[str, bool]


def global_hooks() -> list[GlobalHook]:
    """Those of this process, but for PyTorch's own, which only observe."""
    found = [name for name, (owner, _) in REGISTRIES.items() if getattr(owner, name)]
    return [
        GlobalHook(register_of(name), hook, options_of(name, number))
        for name in found
        for number, hook in getattr(REGISTRIES[name][0], name).items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.")
    ]


def register_of(name: str) -> Callable[..., Any]:
    owner, register = REGISTRIES[name]
    if name == "_global_backward_hooks" and not MODULES._global_is_full_backward_hook:  # the older kind
        register = "register_module_backward_hook"
    return getattr(owner, register)  # type: ignore[no-any-return]


def options_of(name: str, number: int) -> dict[str, bool]:
    if name != "_global_forward_hooks":
        return {}
    kinds = {"with_kwargs": "_global_forward_hooks_with_kwargs", "always_call": "_global_forward_hooks_always_called"}
    return {option: True for option, registry in kinds.items() if number in getattr(MODULES, registry)}


@contextmanager
def registered(hooks: Sequence[GlobalHook]) -> Iterator[None]:
    handles = []
    try:
        for register, hook, options in hooks:
            handles.append(register(hook, **options))
        yield
    finally:
        for handle in handles:
            handle.remove()


def remove_global_hooks() -> None:
    """For a process that was forked by one that has some."""
    for name, (owner, _) in REGISTRIES.items():
        getattr(owner, name).clear()
