"""Checks that PyTorch does what mpgrad relies on beyond its public interface.

The check runs once per process, before a pool is made. A release of PyTorch may rename its private
parts or change what they do, and a version number does not show that. So the check looks for each
private name. It also tries the behaviours that would silently give wrong gradients if they were
different (`probes`), in a few milliseconds. On a version that differs, making a pool raises
`UnsupportedTorchError`, which names the differences.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import sys
import threading
import warnings
from collections.abc import Iterator

import torch

import mpgrad.system  # noqa: F401  # reports what a system lacks, which is not PyTorch's fault
from mpgrad.environment import PLACE
from mpgrad.errors import UnsupportedTorchError

__all__ = ["NAMES", "TRIED", "check", "check_compiler", "failures", "was_tried"]

# Python versions by minor version of torch. The tests have passed on these pairs; see
# docs/compatibility.md.
TRIED: dict[str, tuple[str, ...]] = {
    "2.8": ("3.10",),
    "2.9": ("3.10",),
    "2.10": ("3.11",),
    "2.11": ("3.12",),
    "2.12": ("3.11",),
    "2.13": ("3.11", "3.13"),
    "2.14": ("3.12",),
    "2.15": ("3.13", "3.14", "3.15"),
}

# PyTorch's private names in our code, and the names reached through them, by their owner. A test
# compares them with the code. The names of the compiler are not among them; they are tried where
# they are used (`check_compiler`).
NAMES: dict[str, str] = {
    "torch": "_add_batch_dim _functorch _remove_batch_dim _tensor_str",
    "torch.Tensor": (
        "_backward_hooks _indices _is_view _is_zerotensor _post_accumulate_grad_hooks _values "
        "_version"
    ),
    "torch.UntypedStorage": "_new_shared_fd_cpu _share_fd_cpu_",
    "torch._C": (
        "DisableTorchFunction DisableTorchFunctionSubclass _DisableAutocast _EnableTorchFunction "
        "_FunctionBase "
        "_TorchDispatchModeKey _are_functorch_transforms_active _autograd "
        "_current_graph_task_id _dispatch_keys _functions _functorch _get_dispatch_mode "
        "_get_tracing_state "
        "_len_torch_dispatch_stack _len_torch_function_stack _nn _pop_torch_dispatch_stack "
        "_set_grad_enabled _supported_qengines _vmapmode_decrement_nesting "
        "_vmapmode_increment_nesting _will_engine_execute_node"
    ),
    "torch._C._autograd": (
        "_get_current_graph_task_keep_graph _pop_saved_tensors_default_hooks _profiler_enabled "
        "_push_saved_tensors_default_hooks _saved_tensors_hooks_disable "
        "_saved_tensors_hooks_enable _saved_tensors_hooks_get_disabled_error_message "
        "_top_saved_tensors_default_hooks"
    ),
    "torch._C._functorch": (
        "TransformType _add_batch_dim _unwrap_batched get_interpreter_stack "
        "is_batchedtensor is_dead_tensor_wrapper is_functorch_wrapped_tensor "
        "is_legacy_batchedtensor maybe_get_level"
    ),
    "torch._C._functorch.TransformType": "Vmap",
    "torch._C._nn": "flatten_dense_tensors",
    "torch._functorch": "eager_transforms",
    "torch._functorch.eager_transforms": "JVP_NESTING",
    "torch._functorch.pyfunctorch": "temporarily_clear_interpreter_stack",
    "torch._tensor_str": "PRINT_OPTS",
    "torch._vmap_internals": "_vmap",
    "torch._weights_only_unpickler": "_remove_safe_globals",
    "torch.autograd.Function": "_backward_cls",
    "torch.autograd.Variable": "_execution_engine",
    "torch.autograd.forward_ad": "_current_level _set_fwd_grad_enabled",
    "torch.autograd.function.BackwardCFunction": "_register_hook_dict _set_sequence_nr",
    "torch.distributions.kl": "_KL_MEMOIZE _KL_REGISTRY",
    "torch.nn.Module": "_replicate_for_data_parallel",
    "torch.nn.modules.module": "_global_is_full_backward_hook",
    "torch.nn.utils.parametrize": "_cache_enabled _inject_new_class _inject_property",
    "torch.overrides": "_get_current_function_mode_stack _pop_mode _push_mode",
    "torch.utils._python_dispatch": "TorchDispatchMode _get_current_dispatch_mode_stack",
    "torch.utils._pytree": (
        "SERIALIZED_TYPE_TO_PYTHON_TYPE SUPPORTED_NODES SUPPORTED_SERIALIZED_TYPES "
        "_cxx_pytree_pending_imports keystr register_pytree_node tree_flatten "
        "tree_flatten_with_path "
        "tree_leaves tree_map_only tree_unflatten treespec_pprint"
    ),
}

LOGGER = logging.getLogger("mpgrad")


class Check:
    """The state of this process's check.

    A forked process inherits it, except the lock, which another thread may have held.
    """

    passed = False
    compiler_passed = False

    def __init__(self) -> None:
        self.unlock()

    def unlock(self) -> None:
        self.lock = threading.RLock()  # two probes at once would see each other's changes


CHECK = Check()
os.register_at_fork(after_in_child=CHECK.unlock)


def check() -> None:
    """Look for all names, and try all behaviours.

    It does nothing if this process, or the process whose worker it is, has done so already. It
    warns if the version has not been tried.

    Raises:
        UnsupportedTorchError: PyTorch does not behave as expected. The error names the expected
            behaviours, PyTorch's version and the versions tried.
    """
    if CHECK.passed or PLACE.in_worker:
        return
    with CHECK.lock:
        if CHECK.passed:
            return
        refuse(failures())
        CHECK.passed = True
    newest = max(map(minor_of, TRIED))
    if minor_of(torch.__version__) > newest:
        LOGGER.warning(
            "torch %s is newer than any that mpgrad has been tried with (%s); it behaves as "
            "expected in all that was checked",
            torch.__version__,
            ".".join(map(str, newest)),
        )


def check_compiler() -> None:
    """Try the behaviours that sending functions made by torch.compile relies on.

    For other functions the compiler need not be loaded.

    Raises:
        UnsupportedTorchError: these functions differ from what is expected.
    """
    with CHECK.lock:
        if not CHECK.compiler_passed:
            refuse(tried("OF_THE_COMPILER"))
            CHECK.compiler_passed = True


Failures = list[tuple[str, Exception]]  # the missing name or behaviour, and its error


def refuse(failed: Failures) -> None:
    """Raise an error if there are failures."""
    for _, error in failed:
        if isinstance(error, (OSError, MemoryError)):
            raise error  # the system lacks something, so PyTorch was not checked
    if failed:
        error = failed[0][1]
        raise UnsupportedTorchError(
            torch.__version__, [name for name, _ in failed], tuple(TRIED)
        ) from error


def failures() -> Failures:
    """Look for each name. If all exist, try each behaviour that a pool relies on."""
    return list(missing_names()) or tried("BEHAVIOURS")


def tried(which: str) -> Failures:
    """Try one of the lists in `probes`, in a thread of its own."""
    found: Failures = []
    with CHECK.lock:
        thread = threading.Thread(target=try_all, args=(which, found), name="mpgrad-check")
        thread.start()
        thread.join()
    return found


def missing_names() -> Iterator[tuple[str, Exception]]:
    for owner, names in NAMES.items():
        for name in names.split():
            try:
                getattr(pkgutil.resolve_name(owner), name)
            except (AttributeError, ImportError) as error:
                yield f"{owner}.{name} exists", error


def try_all(which: str, found: Failures) -> None:
    """Put the behaviours that fail into `found`."""
    try:
        from mpgrad.torch_state import probes
    except (AttributeError, ImportError) as error:
        found.append(("PyTorch has the parts that mpgrad imports", error))
        return
    # These warnings come only from the probes. The caller's filters may turn them into errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, probe in getattr(probes, which).items():
            try:
                probe()
            except Exception as error:
                # Whatever the error is, PyTorch no longer does what mpgrad was written for.
                found.append((name, error))


def was_tried(torch_version: str, python: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Return whether the tests have passed on this pair of minor versions.

    Example:
        >>> was_tried("1.13.1+cpu", (3, 8))
        False
    """
    return ".".join(map(str, python)) in TRIED.get(".".join(map(str, minor_of(torch_version))), ())


def minor_of(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
