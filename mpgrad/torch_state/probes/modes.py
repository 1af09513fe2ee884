"""Probes of `private.modes` and `private.settings`."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpgrad.torch_state import private
from mpgrad.torch_state.probes.expectations import DiffersError, behaviour, expect
from mpgrad.torch_state.probes.nodes import leaf


@behaviour("what records operations can be seen")
def tracers() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class AsMakeFx(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """In the place of the mode by which `make_fx` records, which it would take seconds to import."""

        _mode_key = torch._C._TorchDispatchModeKey.PROXY

    found: list[Any] = [private.tracer()]

    def look(*args: Any) -> Any:
        found.append(private.tracer())
        return args[0] * 2

    torch._C._create_graph_by_tracing(look, (leaf().detach(),), lambda tensor: "", True, False, None, [])
    with AsMakeFx():  # type: ignore[no-untyped-call]  # nothing is run in it: that would import seconds of code
        found.append(private.tracer())
    expect([None, "torch.jit.trace", private.MAKE_FX, None], [*found, private.tracer()])


@behaviour("autocast can be switched off for all devices")
def switched_off_autocast() -> None:
    matrix = torch.ones(2, 2, device="cpu", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expect(torch.bfloat16, (matrix @ matrix).dtype)
        torch.set_autocast_enabled("cuda", True)  # of this thread, and there need be none
        with private.without_autocast():
            expect(torch.float32, (matrix @ matrix).dtype)
            expect((False, False), (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))


@behaviour("the innermost hooks for saved tensors can be had")
def hooks_for_saved_tensors() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    outside = private.saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(unpack, pack), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        expect((None, (pack, unpack)), (outside, private.saved_tensor_hooks()))
        with private.without_saved_tensor_hooks():
            expect(None, private.saved_tensor_hooks())
        expect((pack, unpack), private.saved_tensor_hooks())


@behaviour("a mode can see, and refuse, that gradients are turned off")
def refused_no_grad() -> None:
    with torch.enable_grad(), private.refusing_no_grad():
        expect(True, private.is_refusing_no_grad())
        with private.grad_mode(False):
            expect(False, torch.is_grad_enabled())
        expect_refusal()
        with private.without_refusal():
            with torch.no_grad():
                expect(False, torch.is_grad_enabled())
            with private.refusing_no_grad():
                expect_refusal()
    expect((False, True), (private.is_refusing_no_grad(), torch.is_grad_enabled()))


def expect_refusal() -> None:
    try:
        with torch.no_grad():
            raise DiffersError("torch.no_grad was not refused")
    except NotImplementedError:
        pass


@behaviour("the modes of a thread can be seen, and left")
def seen_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class OfFunctions(TorchFunctionMode):
        __module__ = "users"  # our own do not count

    class OfOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
        __module__ = "users"

    inner, outer = OfOperations(), OfFunctions()  # type: ignore[no-untyped-call]
    with inner, outer:
        expect([outer, inner], private.foreign_modes())
    outer.__enter__()  # type: ignore[no-untyped-call]
    torch._C._push_on_torch_dispatch_stack(inner)
    private.leave_all_modes()
    expect([], private.foreign_modes())
    expect((False, False), (private.profiler_is_on(), private.parametrizations_are_cached()))
    with torch.nn.utils.parametrize.cached():
        expect(True, private.parametrizations_are_cached())


@behaviour("the default device can be seen, and gone without")
def default_devices() -> None:
    found = [private.default_device()]
    with torch.device("meta"):
        found.append(private.default_device())
        expect([], private.foreign_modes())
        with private.under_default_device(None):
            found += [private.default_device(), str(torch.empty(0).device)]
            with private.under_default_device("meta"):
                found += [private.default_device(), str(torch.empty(0).device)]
        found.append(private.default_device())
    expect([None, "meta", None, "cpu", "meta", "meta", "meta", None], [*found, private.default_device()])


@behaviour("settings can be read, and set")
def settings() -> None:
    """Only those of this thread are set."""
    other = {
        "torch.autograd.graph.disable_saved_tensors_hooks": "not now",
        "torch.autograd.set_multithreading_enabled": False,
        "torch.set_autocast_cache_enabled": False,
        "torch.set_autocast_dtype": torch.float16,
    }
    for setting in private.every_setting():
        before = setting.get()
        if setting.name in other:
            setting.set(other[setting.name])
            expect(other.pop(setting.name), setting.get())
            setting.set(before)
            expect(before, setting.get())
    expect({}, other)


@behaviour("hooks for all modules can be seen, and registered")
def hooks_of_all_modules() -> None:
    def hook(*args: Any, **kwargs: Any) -> None:
        """It does nothing, whichever thread runs a module meanwhile."""

    def ours() -> list[private.GlobalHook]:
        return [each for each in private.global_hooks() if each.hook is hook]

    register = torch.nn.modules.module.register_module_forward_hook
    with private.registered([private.GlobalHook(register, hook, {"with_kwargs": True})]):
        expect([(register, {"with_kwargs": True})], [(each.register, each.options) for each in ours()])
    expect([], ours())
    # to register one would forbid the user the other kind
    expect(True, torch.nn.modules.module._global_is_full_backward_hook in (None, True, False))
