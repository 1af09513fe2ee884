"""PyTorch's own settings are in a table that defines how each is read and set.

PyTorch has no list of its settings, and reads each in its own way. A setting that is not in the
table is the worker's own. An inventory beside the tests of this package lists how mpgrad treats
everything in PyTorch that changes a state, and a test compares the inventory with PyTorch. A
setting that differs from its default is sent with each call. The default is a constant here, not
the value at the start of this process, because a program may change settings before it imports
mpgrad. If a machine has another default, that value is sent each time.

The module also handles the hooks that PyTorch calls for all modules or all optimizers. They are the
user's code, in dictionaries of the process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.backends import opt_einsum
from torch.distributions import Distribution

from mpgrad.errors import contextmanager

__all__ = [
    "GlobalHook",
    "Setting",
    "every_setting",
    "global_hooks",
    "registered",
    "remove_global_hooks",
]


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
    "_global_parameter_registration_hooks": (
        MODULES,
        "register_module_parameter_registration_hook",
    ),
    "_global_optimizer_pre_hooks": (OPTIMIZERS, "register_optimizer_step_pre_hook"),
    "_global_optimizer_post_hooks": (OPTIMIZERS, "register_optimizer_step_post_hook"),
}


class GlobalHook(NamedTuple):
    """A hook as it is sent. `register(hook, **options)` installs it."""

    register: Callable[..., Any]
    hook: Callable[..., Any]
    options: dict[str, bool]


def global_hooks() -> list[GlobalHook]:
    """Return the hooks of this process, except PyTorch's own, which only observe."""
    found = [name for name, (owner, _) in REGISTRIES.items() if getattr(owner, name)]
    return [
        GlobalHook(register_of(name), hook, options_of(number))
        for name in found
        for number, hook in getattr(REGISTRIES[name][0], name).items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.")
    ]


def register_of(name: str) -> Callable[..., Any]:
    owner, register = REGISTRIES[name]
    # PyTorch has an older kind of backward hooks, which is registered differently.
    if name == "_global_backward_hooks" and not MODULES._global_is_full_backward_hook:
        register = "register_module_backward_hook"
    return getattr(owner, register)  # type: ignore[no-any-return]


def options_of(number: int) -> dict[str, bool]:
    """Return the options of a forward hook. No other hook of the process has its number."""
    kinds = {
        "with_kwargs": "_global_forward_hooks_with_kwargs",
        "always_call": "_global_forward_hooks_always_called",
    }
    return {
        option: True for option, registry in kinds.items() if number in getattr(MODULES, registry)
    }


@contextmanager
def registered(hooks: Sequence[GlobalHook]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for register, hook, options in hooks:
            stack.enter_context(register(hook, **options))
        yield


def remove_global_hooks() -> None:
    """Remove the hooks that this process inherited when it was forked."""
    for name, (owner, _) in REGISTRIES.items():
        getattr(owner, name).clear()


CHECKPOINT: Any = torch.utils.checkpoint
EINSUM: Any = opt_einsum
TINY, ONE = 5e-324, 1.0  # two constants, because the compiler would multiply literals


class Setting(NamedTuple):
    """A setting of each thread, if `of_thread` is true, or of the process."""

    name: str  # the public function or field that sets it
    get: Callable[[], Any]
    set: Callable[[Any], object]
    default: Any
    of_thread: bool = False


def attribute(name: str, holder: Any, field: str, default: Any) -> Setting:
    get = functools.partial(getattr, holder, field)
    return Setting(name, get, functools.partial(setattr, holder, field), default)


def kind_of_library(kinds: str, kind: str) -> Any:
    return getattr(getattr(torch._C, kinds, None), kind, None)


# Settings that a pair of functions of torch._C reads and sets. An older PyTorch may lack them.
# Fields: name, the two functions, default, and `of_thread`.
IN_C: tuple[tuple[str, str, str, Any] | tuple[str, str, str, Any, bool], ...] = (
    ("torch.backends.cuda.enable_flash_sdp", "_get_flash_sdp_enabled", "_set_sdp_use_flash", True),
    (
        "torch.backends.cuda.enable_mem_efficient_sdp",
        "_get_mem_efficient_sdp_enabled",
        "_set_sdp_use_mem_efficient",
        True,
    ),
    ("torch.backends.cuda.enable_math_sdp", "_get_math_sdp_enabled", "_set_sdp_use_math", True),
    ("torch.backends.cuda.enable_cudnn_sdp", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn", True),
    (
        "torch.nn.attention.sdpa_kernel",
        "_get_overrideable_sdp_enabled",
        "_set_sdp_use_overrideable",
        True,
    ),
    (
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
        False,
    ),
    (
        "torch.nn.attention.sdpa_kernel(set_priority)",
        "_get_sdp_priority_order",
        "_set_sdp_priority_order",
        [1, 2, 0, 3, 4],
    ),
    (
        "torch.backends.cuda.preferred_linalg_library",
        "_get_linalg_preferred_backend",
        "_set_linalg_preferred_backend",
        kind_of_library("_LinalgBackend", "Default"),
    ),
    (
        "torch.backends.cuda.preferred_blas_library",
        "_get_blas_preferred_backend",
        "_set_blas_preferred_backend",
        kind_of_library("_BlasBackend", "Cublas"),
    ),
    (
        "torch.backends.cuda.preferred_rocm_fa_library",
        "_get_rocm_fa_preferred_backend",
        "_set_rocm_fa_preferred_backend",
        kind_of_library("_ROCmFABackend", "Default"),
    ),
    (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
        True,
    ),
    (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
        True,
    ),
    (
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
        "_get_cublas_allow_fp16_accumulation",
        "_set_cublas_allow_fp16_accumulation",
        False,
    ),
    (
        "torch.backends.cuda.matmul.prefer_cublaslt_grouped_gemm",
        "_get_cublaslt_prefer_grouped_gemm",
        "_set_cublaslt_prefer_grouped_gemm",
        False,
    ),
    ("torch.backends.cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled", True),
    ("torch.backends.cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark", False),
    (
        "torch.backends.cudnn.deterministic",
        "_get_cudnn_deterministic",
        "_set_cudnn_deterministic",
        False,
    ),
    (
        "torch.backends.cudnn.depthwise_kernel",
        "_get_cudnn_depthwise_kernel",
        "_set_cudnn_depthwise_kernel",
        "auto",
    ),
    (
        "torch.backends.cudnn.benchmark_limit",
        "_cuda_get_cudnn_benchmark_limit",
        "_cuda_set_cudnn_benchmark_limit",
        10,
    ),
    ("torch.backends.miopen.immediate", "_get_miopen_immediate", "_set_miopen_immediate", False),
    ("torch.backends.mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled", True),
    (
        "torch.backends.mkldnn.deterministic",
        "_get_mkldnn_deterministic",
        "_set_mkldnn_deterministic",
        False,
    ),
    (
        "torch.backends.cpu.allow_fp16_reduced_precision_reduction",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
        False,
    ),
    ("torch.backends.nnpack.set_flags", "_get_nnpack_enabled", "_set_nnpack_enabled", True),
    (
        "torch.backends.quantized.engine",
        "_get_qengine",
        "_set_qengine",
        max(torch._C._supported_qengines()),
    ),
    (
        "torch.sparse.check_sparse_tensor_invariants",
        "_check_sparse_tensor_invariants",
        "_set_check_sparse_tensor_invariants",
        False,
    ),
    (
        "torch.utils.deterministic.fill_uninitialized_memory",
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
        True,
    ),
    (
        "torch.jit.optimized_execution",
        "_get_graph_executor_optimize",
        "_set_graph_executor_optimize",
        True,
    ),
    (
        "torch.utils.backcompat.broadcast_warning.enabled",
        "_get_backcompat_broadcast_warn",
        "_set_backcompat_broadcast_warn",
        False,
    ),
    (
        "torch.utils.backcompat.keepdim_warning.enabled",
        "_get_backcompat_keepdim_warn",
        "_set_backcompat_keepdim_warn",
        False,
    ),
    (
        "torch.autograd.set_multithreading_enabled",
        "_is_multithreading_enabled",
        "_set_multithreading_enabled",
        True,
        True,
    ),
    (
        "torch.autograd.enforce_grad_layout_policy",
        "_is_grad_layout_enforcement_enabled",
        "_set_grad_layout_enforcement_enabled",
        True,
        True,
    ),
)


def in_c(name: str, get: str, use: str, default: Any, of_thread: bool = False) -> Iterator[Setting]:
    if hasattr(torch._C, get) and hasattr(torch._C, use):
        yield Setting(name, getattr(torch._C, get), getattr(torch._C, use), default, of_thread)


def of_this_version(setting: Setting) -> Setting:
    """Return the setting with the default and setter of this PyTorch, as older versions differ."""
    now = setting.get()
    # The setting has two truth values, but an older PyTorch has only the first.
    if isinstance(now, tuple) and setting.default is True:
        return setting._replace(set=lambda both: setting.set(*both), default=(True, True))
    return (
        setting._replace(default=setting.default[: len(now)]) if isinstance(now, list) else setting
    )


def old(setting: Setting) -> Setting:
    """Return an older setting that newer settings overlap.

    If the newer ones contradict it, PyTorch refuses to read it, and then it does not count.
    """
    get, default = setting.get, setting.default

    def read() -> Any:
        try:
            return get()
        except RuntimeError:
            return default

    return setting._replace(get=read)


def precisions() -> Iterator[Setting]:
    """Yield the precision settings, older ones first, because setting one sets some newer ones.

    Settings from which others inherit come before these others.
    """
    yield old(
        Setting(
            "torch.set_float32_matmul_precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            "highest",
        )
    )
    yield from map(
        old,
        in_c(
            "torch.backends.cudnn.allow_tf32",
            "_get_cudnn_allow_tf32",
            "_set_cudnn_allow_tf32",
            True,
        ),
    )
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
        yield from in_c(
            "torch.backends.cuda.matmul.allow_tf32",
            "_get_cublas_allow_tf32",
            "_set_cublas_allow_tf32",
            False,
        )


def precision(name: str, backend: str, operation: str, default: str) -> Setting:
    get, use = (
        getattr(torch._C, each)
        for each in ("_get_fp32_precision_getter", "_set_fp32_precision_setter")
    )
    of = backend, operation
    return Setting(name, functools.partial(get, *of), functools.partial(use, *of), default)


def einsum(field: str, default: Any) -> Setting:
    """Return a setting of `opt_einsum`.

    A value that the user assigns hides what `torch.backends.opt_einsum.flags` sets.
    """
    assigned, flags = vars(EINSUM), vars(EINSUM.m)

    def use(value: Any) -> None:
        (assigned if field in assigned else flags)[field] = value

    return Setting(
        f"torch.backends.opt_einsum.{field}",
        lambda: assigned.get(field, flags[field]),
        use,
        default,
    )


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


def others() -> tuple[Setting, ...]:
    """Return the settings that are read or set in special ways."""
    mha, print_options = torch.backends.mha, vars(torch._tensor_str.PRINT_OPTS)
    return (
        Setting(
            "torch.set_default_dtype",
            torch.get_default_dtype,
            torch.set_default_dtype,
            torch.float32,
        ),
        Setting(
            "torch.use_deterministic_algorithms",
            torch.get_deterministic_debug_mode,
            use_deterministic_algorithms,
            0,
        ),
        Setting(
            "torch.autograd.set_detect_anomaly",
            anomaly_detection,
            set_anomaly_detection,
            (False, True),
        ),
        Setting(
            "torch.set_flush_denormal",
            lambda: TINY * ONE == 0.0,
            torch.set_flush_denormal,
            False,
            of_thread=True,
        ),
        Setting(
            "torch.backends.mha.set_fastpath_enabled",
            mha.get_fastpath_enabled,
            mha.set_fastpath_enabled,
            True,
        ),
        einsum("enabled", EINSUM.is_available()),
        einsum("strategy", "auto" if EINSUM.is_available() else None),
        Setting(
            "torch.autograd.graph.disable_saved_tensors_hooks",
            torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
            disable_saved_tensors_hooks,
            None,
            of_thread=True,
        ),
        attribute(
            "torch.utils.checkpoint.set_checkpoint_early_stop",
            CHECKPOINT,
            "_enable_checkpoint_early_stop",
            None,
        ),
        attribute(
            "torch.utils.checkpoint.set_checkpoint_debug_enabled",
            CHECKPOINT,
            "_checkpoint_debug_enabled",
            None,
        ),
        Setting(
            "torch.set_autocast_dtype",
            functools.partial(torch.get_autocast_dtype, "cpu"),
            functools.partial(torch.set_autocast_dtype, "cpu"),
            torch.bfloat16,
            of_thread=True,
        ),
        Setting(
            "torch.set_autocast_cache_enabled",
            torch.is_autocast_cache_enabled,
            torch.set_autocast_cache_enabled,
            True,
            of_thread=True,
        ),
        Setting(
            "torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always, False
        ),
        Setting(
            "torch.set_printoptions",
            print_options.copy,
            print_options.update,
            {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None},
        ),
        attribute(
            "torch.distributions.Distribution.set_default_validate_args",
            Distribution,
            "_validate_args",
            __debug__,
        ),
        attribute(
            "torch.__future__.set_overwrite_module_params_on_conversion",
            torch.__future__,
            "_overwrite_module_params_on_conversion",
            False,
        ),
        attribute(
            "torch.__future__.set_swap_module_params_on_conversion",
            torch.__future__,
            "_swap_module_params_on_conversion",
            False,
        ),
    )


def every_setting() -> tuple[Setting, ...]:
    """Return all settings, in the order in which they must be set."""
    in_table = [of_this_version(setting) for row in IN_C for setting in in_c(*row)]
    return (*precisions(), *in_table, *others())
