"""`torch.compile`: what it makes, with which options, and code that it is to leave alone."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from mpgrad.tracebacks import hide_own_frames

__all__ = [
    "before_compiler",
    "compile_in_place",
    "compiled_in_place",
    "compiler_context",
    "compiler_options",
    "disabling",
    "is_optimized",
    "made_by_compiler",
    "not_compiled",
]


P = ParamSpec("P")
T = TypeVar("T")


def not_compiled(fn: Callable[P, T]) -> Callable[P, T]:
    """Have `torch.compile` break its graph at `fn`, and leave alone what `fn` calls, without loading the compiler for it.

    `fn` is public: its exceptions show the caller's frames.
    """

    @functools.wraps(fn)
    def uncompiled(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            disable: Any = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # another thread may be importing it
            if disable is None:
                return fn(*args, **kwargs)
            result: T = disable(fn)(*args, **kwargs)
            return result
        except BaseException as error:
            hide_own_frames(error)
            raise

    uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
    uncompiled._torchdynamo_disable_msg = "it runs in other processes"  # type: ignore[attr-defined]
    never_compile(uncompiled.__code__)  # type: ignore[attr-defined]
    return uncompiled


def never_compile(code: types.CodeType) -> None:
    """Have the compiler leave frames of `code` alone. Where it cannot be told, it compiles them: slow, but right."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")):
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def made_by_compiler(function: types.FunctionType) -> bool:
    """Whether `torch.compile` or `torch.compiler.disable` gave it; no wrapper that functools.wraps has given its marks."""
    maker = function.__globals__.get("__name__")
    return maker in COMPILERS and "_torchdynamo_orig_callable" in vars(function)


def is_optimized(module: torch.nn.Module) -> bool:
    """Whether `torch.compile(module)` gave it."""
    return "dynamo_ctx" in vars(module)


COMPILERS = ("torch._dynamo.eval_frame", "torch._dynamo.external_utils")


def compiler_context(compiled: Any) -> Any:
    """What `torch.compile` wraps functions with, by a function or module that it has wrapped; None where there is none."""
    if isinstance(compiled, torch.nn.Module):
        return vars(compiled).get("dynamo_ctx")
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    held = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    return next((each for each in held if isinstance(each, dynamo._TorchDynamoContext)), None)


def before_compiler(made: Any) -> Any:
    """What was given to `torch.compile` or `torch.compiler.disable`."""
    return made._orig_mod if isinstance(made, torch.nn.Module) else made._torchdynamo_orig_callable


def disabling(made: Any) -> dict[str, Any]:
    """The arguments of `torch.compiler.disable` that gave `made`."""
    context = compiler_context(made)
    if context is None:  # without `recursive` PyTorch has no need of one
        return {"recursive": False, "reason": made._torchdynamo_disable_msg}
    return {"recursive": True, "reason": context.msg}


def compiled_in_place(module: torch.nn.Module) -> Any:
    """What `module.compile()` has put into it, of which its state has nothing; None where it was not called."""
    return vars(module).get("_compiled_call_impl")


def compile_in_place(module: Any, wrap: Callable[[Any], Any]) -> None:
    """As `module.compile()`, with `wrap` in the place of the compiler."""
    module._compiled_call_impl = wrap(module._call_impl)


def compiler_options(context: Any) -> dict[str, Any] | None:
    """The arguments of `torch.compile` that gave `context`, as far as they are not its defaults; None of `disable`'s."""
    if not callable(context.callback):
        return None
    layers = [context.callback]
    while (inner := inner_layer(layers[-1])) is not None:
        layers.append(inner)
    convert, found = layers[1], backend_options(layers[-1])
    inner_options = found["options"] or {}
    if (kept := context.callback.hooks.guard_filter_fn) is not None:
        inner_options = {**inner_options, "guard_filter_fn": kept}
    found.update(
        options=inner_options or None,
        fullgraph=getattr(convert, "_one_graph", False),
        dynamic=context._dynamic,
        # of later versions
        recompile_limit=getattr(convert, "_recompile_limit", None),
        isolate_recompiles=getattr(context, "_isolate_recompiles_id", -1) != -1,
        shapes_spec=getattr(context, "_shapes_spec", None),
    )
    return {name: value for name, value in found.items() if name == "dynamic" or value not in (None, False)}


def inner_layer(layer: Any) -> Any:
    """What a layer around a backend calls; None of the backend itself. (The name is that of versions up to 2.8.)"""
    attributes = getattr(layer, "__dict__", {})
    return attributes.get("_torchdynamo_orig_backend", attributes.get("_torchdynamo_orig_callable"))


def backend_options(backend: Any) -> dict[str, Any]:
    """The arguments of `torch.compile` that a backend of PyTorch stands for."""
    names: Any = torch
    if isinstance(backend, names._TorchCompileInductorWrapper):
        options = dict(backend.config)
        if backend.compiler_name != "inductor":
            options["use_aoti"] = True
        return {"backend": "inductor", "options": options, "name": getattr(backend, "name", None)}
    if not isinstance(backend, names._TorchCompileWrapper):  # torch._dynamo.optimize was called
        return {"backend": backend, "options": None}
    function = backend.compiler_fn
    module = getattr(function, "__module__", None) or type(function).__module__
    own = module.partition(".")[0] == "torch"  # it may be no function then, but is known by its name
    return {"backend": backend.compiler_name if own else function, "mode": None, "options": None, **backend.kwargs}
