"""Hooks of results that share a node with those of other items."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_hooks_apart"]


class OwnHooks(OrderedDict[int, Callable[[torch.Tensor], Any]]):
    """The hooks of a result that shares its node with those of other items: called only where a gradient has come for it.

    PyTorch calls those of all outputs of a node that runs, with None for which there is none. Its own hooks expect that.
    """

    def __setitem__(self, number: int, hook: Callable[[torch.Tensor], Any]) -> None:
        if getattr(hook, "__module__", "") != "torch.autograd.graph":
            hook = functools.update_wrapper(functools.partial(called_with_gradient, hook), hook)
        super().__setitem__(number, hook)


def called_with_gradient(hook: Callable[[torch.Tensor], Any], grad: torch.Tensor | None) -> Any:
    """A hook of a bundle's result: not called in a backward for other items only."""
    return None if grad is None else hook(grad)


def keep_hooks_apart(node_type: Any) -> None:
    """Of nodes of this type, those of bundles: a result's hook is for its item alone, and hooks on the node are refused."""
    register_hooks = node_type._register_hook_dict  # what `Tensor.register_hook` calls, of the result's node, at the first hook

    def register_own_hooks(node: Any, result: torch.Tensor) -> None:
        if node.graph.members is not None:
            result._backward_hooks = OwnHooks()
        register_hooks(node, result)

    node_type._register_hook_dict = register_own_hooks
    node_type.register_hook = refusing(node_type.register_hook)
    node_type.register_prehook = refusing(node_type.register_prehook)


def refusing(register: Callable[[Any, Callable[..., Any]], Any]) -> Callable[[Any, Callable[..., Any]], Any]:
    """Nobody can tell from a node whose result it was asked for."""

    @functools.wraps(register)
    def register_or_refuse(node: Any, hook: Callable[..., Any]) -> Any:
        if node.graph.members is not None:
            raise RuntimeError(
                "a hook on this node would be called for other items too: the results of cheap items, which travel together, "
                "share it; put the hook on the result (result.register_hook), or make each item a call of its own (chunksize=1)"
            )
        return register(node, hook)

    return register_or_refuse
