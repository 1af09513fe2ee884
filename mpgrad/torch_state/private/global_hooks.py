"""Hooks that PyTorch calls for all modules or all optimizers: code of the user's in a dictionary of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.errors import contextmanager

__all__ = ["GlobalHook", "global_hooks", "registered", "remove_global_hooks"]

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
