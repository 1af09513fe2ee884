"""Probe of `private.compiler`, which is run where functions are carried that torch.compile made: it loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpgrad.torch_state import private
from mpgrad.torch_state.probes.expectations import expect


def what_it_was_made_with_can_be_read() -> None:
    compiler: Any = torch.compile
    module = torch.nn.Identity()
    given: list[dict[str, Any]] = [{"dynamic": None}, {"dynamic": True, "fullgraph": True}, {"dynamic": False, "mode": "other"}]
    given += [{"dynamic": None, "options": {"guard_filter_fn": list, "other": 1}}]
    for options in ({"backend": on_its_own, **each} for each in given):
        copied: dict[str, Any] = {name: dict(value) if name == "options" else value for name, value in options.items()}
        found: Any = compiler(probed, **copied)  # which takes some of the options out
        expect(True, private.made_by_compiler(found))
        expect(options, private.compiler_options(private.compiler_context(found)))
        expect(probed, private.before_compiler(found))
    eager = private.compiler_context(torch.compile(module, backend="eager"))
    expect({"backend": "eager", "dynamic": None}, private.compiler_options(eager))
    inductor: Any = torch.compile(module, options={"epilogue_fusion": False})
    expected = {"backend": "inductor", "dynamic": None, "options": {"epilogue_fusion": False}}
    expect(expected, private.compiler_options(private.compiler_context(inductor)))
    expect((True, False), (private.is_optimized(inductor), private.is_optimized(module)))
    expect(module, private.before_compiler(inductor))
    for recursive in (True, False):
        disabled: Any = torch.compiler.disable(probed, recursive=recursive, reason="why")  # type: ignore[no-untyped-call]
        expect((True, probed), (private.made_by_compiler(disabled), private.before_compiler(disabled)))
        expect({"recursive": recursive, "reason": "why"}, private.disabling(disabled))
    module.compile(backend="eager", dynamic=True)
    in_place = private.compiler_context(private.compiled_in_place(module))
    expect({"backend": "eager", "dynamic": True}, private.compiler_options(in_place))
    private.compile_in_place(module, lambda call: lambda x: (call(x), "compiled"))
    expect((1, "compiled"), module(1))


def probed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def on_its_own(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend that nothing is compiled with."""
    return graph.forward
