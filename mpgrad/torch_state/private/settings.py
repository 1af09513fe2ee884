"""PyTorch's own settings beyond grad mode and the like: a table of what each is called, how it is read and set.

PyTorch has no list of them, and reads each in its own way. What is not in the table is the worker's own: the inventory beside
the tests of this package says what becomes of everything in PyTorch that changes a state, and a test compares it with PyTorch.
A setting that differs from its default travels with a call. A default is a constant here rather than what this process began
with: whoever imports mpgrad late would take a change for it. Where a machine has another default, that travels each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.backends import opt_einsum
from torch.distributions import Distribution

__all__ = ["Setting", "every_setting", "parametrizations_are_cached"]

CHECKPOINT: Any = torch.utils.checkpoint
FUTURE: Any = torch.__future__
EINSUM: Any = opt_einsum
TINY, ONE = 5e-324, 1.0  # two, or the compiler would multiply


class Setting(NamedTuple):
    """`of_thread`: each thread has its own; else the process has one."""

    name: str  # of what sets it, in public
    get: Callable[[], Any]
    set: Callable[[Any], object]
    default: Any
    of_thread: bool = False


def attribute(name: str, holder: Any, field: str, default: Any) -> Setting:
    return Setting(name, lambda: getattr(holder, field), lambda value: setattr(holder, field, value), default)


def in_c(name: str, get: str, use: str, default: Any, of_thread: bool = False) -> Iterator[Setting]:
    """A pair of functions of PyTorch's, which an older one may not have."""
    if hasattr(torch._C, get) and hasattr(torch._C, use):
        yield Setting(name, getattr(torch._C, get), getattr(torch._C, use), default, of_thread)


def reduced(name: str, what: str) -> Iterator[Setting]:
    """Of two truth values, of which older PyTorch has the first only."""
    for setting in in_c(f"torch.backends.cuda.matmul.{name}", f"_get_{what}", f"_set_{what}", True):
        is_pair = isinstance(setting.get(), tuple)
        yield setting._replace(set=functools.partial(set_pair, setting.set), default=(True, True)) if is_pair else setting


def set_pair(use: Callable[..., object], both: tuple[bool, bool]) -> None:
    use(*both)


def old(setting: Setting) -> Setting:
    """One that newer settings overlap: while they contradict it, PyTorch refuses to read it, and it does not count."""
    get, default = setting.get, setting.default

    def read() -> Any:
        try:
            return get()
        except RuntimeError:
            return default

    return setting._replace(get=read)


def precisions() -> Iterator[Setting]:
    """The older settings come first: to set one sets some of the newer ones. What others inherit from comes before these."""
    yield old(
        Setting("torch.set_float32_matmul_precision", torch.get_float32_matmul_precision, set_matmul_precision, "highest")
    )
    yield from map(old, in_c("torch.backends.cudnn.allow_tf32", "_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32", True))
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for backend, operation, name in (
            ("generic", "all", ""),
            ("mkldnn", "all", ".mkldnn"),
            ("cuda", "all", ".cudnn"),
            ("mkldnn", "matmul", ".mkldnn.matmul"),
            ("mkldnn", "conv", ".mkldnn.conv"),
            ("mkldnn", "rnn", ".mkldnn.rnn"),
            ("cuda", "matmul", ".cuda.matmul"),
            ("cuda", "conv", ".cudnn.conv"),
            ("cuda", "rnn", ".cudnn.rnn"),
        ):
            default = "tf32" if name in (".cudnn.conv", ".cudnn.rnn") else "none"
            yield precision(f"torch.backends{name}.fp32_precision", backend, operation, default)
    else:
        yield from in_c("torch.backends.cuda.matmul.allow_tf32", "_get_cublas_allow_tf32", "_set_cublas_allow_tf32", False)


def precision(name: str, backend: str, operation: str, default: str) -> Setting:
    get, use = (getattr(torch._C, each) for each in ("_get_fp32_precision_getter", "_set_fp32_precision_setter"))
    of = backend, operation
    return Setting(name, functools.partial(get, *of), functools.partial(use, *of), default)


def set_matmul_precision(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def attention() -> Iterator[Setting]:
    """What `torch.nn.attention.sdpa_kernel` sets."""
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        name = f"torch.backends.cuda.enable_{kind}_sdp"
        yield from in_c(name, f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}", True)
    yield from in_c("torch.nn.attention.sdpa_kernel", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable", True)
    halves = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp"
    yield from in_c(halves, "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction", False)
    order = "torch.nn.attention.sdpa_kernel(set_priority)"
    for setting in in_c(order, "_get_sdp_priority_order", "_set_sdp_priority_order", [1, 2, 0, 3, 4]):
        yield setting._replace(default=setting.default[: len(setting.get())])  # older PyTorch has fewer


def cuda() -> Iterator[Setting]:
    for library, kinds, usual in (
        ("linalg", "_LinalgBackend", "Default"),
        ("blas", "_BlasBackend", "Cublas"),
        ("rocm_fa", "_ROCmFABackend", "Default"),
    ):
        name, what = f"torch.backends.cuda.preferred_{library}_library", f"{library}_preferred_backend"
        yield from in_c(name, f"_get_{what}", f"_set_{what}", getattr(getattr(torch._C, kinds, None), usual, None))
    yield from reduced("allow_fp16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction")
    yield from reduced("allow_bf16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction")
    half = "cublas_allow_fp16_accumulation"
    yield from in_c("torch.backends.cuda.matmul.allow_fp16_accumulation", f"_get_{half}", f"_set_{half}", False)
    for kind, default in (("enabled", True), ("benchmark", False), ("deterministic", False), ("depthwise_kernel", "auto")):
        yield from in_c(f"torch.backends.cudnn.{kind}", f"_get_cudnn_{kind}", f"_set_cudnn_{kind}", default)
    limit = "cudnn_benchmark_limit"
    yield from in_c("torch.backends.cudnn.benchmark_limit", f"_cuda_get_{limit}", f"_cuda_set_{limit}", 10)
    yield from in_c("torch.backends.miopen.immediate", "_get_miopen_immediate", "_set_miopen_immediate", False)


def cpu() -> Iterator[Setting]:
    yield Setting("torch.set_flush_denormal", lambda: TINY * ONE == 0.0, torch.set_flush_denormal, False, of_thread=True)
    for kind, default in (("enabled", True), ("deterministic", False)):
        yield from in_c(f"torch.backends.mkldnn.{kind}", f"_get_mkldnn_{kind}", f"_set_mkldnn_{kind}", default)
    half = "cpu_allow_fp16_reduced_precision_reduction"
    yield from in_c("torch.backends.cpu.allow_fp16_reduced_precision_reduction", f"_get_{half}", f"_set_{half}", False)
    yield from in_c("torch.backends.nnpack.set_flags", "_get_nnpack_enabled", "_set_nnpack_enabled", True)
    yield from in_c("torch.backends.quantized.engine", "_get_qengine", "_set_qengine", max(torch._C._supported_qengines()))
    mha = torch.backends.mha
    yield Setting("torch.backends.mha.set_fastpath_enabled", mha.get_fastpath_enabled, mha.set_fastpath_enabled, True)
    yield einsum("enabled", EINSUM.is_available())
    yield einsum("strategy", "auto" if EINSUM.is_available() else None)


def einsum(field: str, default: Any) -> Setting:
    """An assignment of the user's hides what `torch.backends.opt_einsum.flags` sets."""
    assigned, flags = vars(EINSUM), vars(EINSUM.m)

    def use(value: Any) -> None:
        (assigned if field in assigned else flags)[field] = value

    return Setting(f"torch.backends.opt_einsum.{field}", lambda: assigned.get(field, flags[field]), use, default)


def of_autograd() -> Iterator[Setting]:
    for name, what in (
        ("torch.autograd.set_multithreading_enabled", "multithreading_enabled"),
        ("torch.autograd.enforce_grad_layout_policy", "grad_layout_enforcement_enabled"),
    ):
        yield from in_c(name, f"_is_{what}", f"_set_{what}", True, of_thread=True)
    message: Any = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
    name = "torch.autograd.graph.disable_saved_tensors_hooks"
    yield Setting(name, message, disable_saved_tensors_hooks, None, of_thread=True)
    yield attribute("torch.utils.checkpoint.set_checkpoint_early_stop", CHECKPOINT, "_enable_checkpoint_early_stop", None)
    yield attribute("torch.utils.checkpoint.set_checkpoint_debug_enabled", CHECKPOINT, "_checkpoint_debug_enabled", None)


def disable_saved_tensors_hooks(message: str | None) -> None:
    if message is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(message)


def use_deterministic_algorithms(level: int) -> None:
    torch.use_deterministic_algorithms(level > 0, warn_only=level == 1)


def anomaly_detection() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def set_anomaly_detection(both: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*both)


def others() -> Iterator[Setting]:
    yield Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32)
    level: Any = torch.get_deterministic_debug_mode
    yield Setting("torch.use_deterministic_algorithms", level, use_deterministic_algorithms, 0)
    name = "torch.autograd.set_detect_anomaly"
    yield Setting(name, anomaly_detection, set_anomaly_detection, (False, True))
    get, use = functools.partial(torch.get_autocast_dtype, "cpu"), functools.partial(torch.set_autocast_dtype, "cpu")
    yield Setting("torch.set_autocast_dtype", get, use, torch.bfloat16, of_thread=True)
    cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    yield Setting("torch.set_autocast_cache_enabled", *cache, True, of_thread=True)
    name, what = "torch.sparse.check_sparse_tensor_invariants", "check_sparse_tensor_invariants"
    yield from in_c(name, f"_{what}", f"_set_{what}", False)
    name, what = "torch.utils.deterministic.fill_uninitialized_memory", "deterministic_fill_uninitialized_memory"
    yield from in_c(name, f"_get_{what}", f"_set_{what}", True)
    what = "graph_executor_optimize"
    yield from in_c("torch.jit.optimized_execution", f"_get_{what}", f"_set_{what}", True)
    for what in ("broadcast", "keepdim"):
        found = f"_backcompat_{what}_warn"
        yield from in_c(f"torch.utils.backcompat.{what}_warning.enabled", f"_get{found}", f"_set{found}", False)
    yield Setting("torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always, False)
    options = vars(torch._tensor_str.PRINT_OPTS)
    defaults = {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None}
    yield Setting("torch.set_printoptions", options.copy, options.update, defaults)
    name = "torch.distributions.Distribution.set_default_validate_args"
    yield attribute(name, Distribution, "_validate_args", __debug__)
    for what in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        yield attribute(f"torch.__future__.set_{what}", FUTURE, f"_{what}", False)


def every_setting() -> tuple[Setting, ...]:
    """All of them, in the order in which they are to be set."""
    return (*precisions(), *attention(), *cuda(), *cpu(), *of_autograd(), *others())


def parametrizations_are_cached() -> bool:
    """Whether a `torch.nn.utils.parametrize.cached` is open."""
    return bool(torch.nn.utils.parametrize._cache_enabled)
