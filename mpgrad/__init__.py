"""mpgrad: a worker pool for PyTorch whose `map`, `reduce` and friends are differentiable.

``pool.map(fn, items)`` is the serial loop ``[fn(x) for x in items]`` run on worker processes: the
same values, the same gradients, the same exceptions. Only the time differs. docs/guarantees.md
lists the few other differences.
"""

# Both modules call functions of `threading` on import, which fail once the main thread has ended.
import concurrent.futures.process as _process  # noqa: F401
import concurrent.futures.thread as _thread  # noqa: F401
import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from concurrent.futures import as_completed, wait

    from mpgrad import functions, nn, testing
    from mpgrad.advice import Advice, advise
    from mpgrad.cluster.ray import Ray
    from mpgrad.derivatives import hessian, hvp, jacobian, jvp, per_item_grad, vjp
    from mpgrad.errors import (
        AncestorFailedError,
        CallTimeoutError,
        InternalError,
        PoolClosedError,
        RemoteError,
        RemoteTraceback,
        SharedMemoryError,
        UnsupportedTorchError,
        WorkerDiedError,
        failures,
    )
    from mpgrad.executor import Executor
    from mpgrad.pool import Pool
    from mpgrad.stats import PoolStats, WorkerStats
    from mpgrad.submission.results import AsyncResult, DifferentiableFuture, ResultIterator
    from mpgrad.timeline import Timeline

__version__ = "0.1.0"  # setup.cfg reads it, so it is right even in a clone

_HOMES = {
    "Advice": "mpgrad.advice",
    "AncestorFailedError": "mpgrad.errors",
    "AsyncResult": "mpgrad.submission.results",
    "CallTimeoutError": "mpgrad.errors",
    "DifferentiableFuture": "mpgrad.submission.results",
    "Executor": "mpgrad.executor",
    "InternalError": "mpgrad.errors",
    "Pool": "mpgrad.pool",
    "PoolClosedError": "mpgrad.errors",
    "PoolStats": "mpgrad.stats",
    "Ray": "mpgrad.cluster.ray",
    "RemoteError": "mpgrad.errors",
    "RemoteTraceback": "mpgrad.errors",
    "ResultIterator": "mpgrad.submission.results",
    "SharedMemoryError": "mpgrad.errors",
    "Timeline": "mpgrad.timeline",
    "UnsupportedTorchError": "mpgrad.errors",
    "WorkerDiedError": "mpgrad.errors",
    "WorkerStats": "mpgrad.stats",
    "advise": "mpgrad.advice",
    "as_completed": "concurrent.futures",
    "failures": "mpgrad.errors",
    "hessian": "mpgrad.derivatives",
    "hvp": "mpgrad.derivatives",
    "jacobian": "mpgrad.derivatives",
    "jvp": "mpgrad.derivatives",
    "per_item_grad": "mpgrad.derivatives",
    "vjp": "mpgrad.derivatives",
    "wait": "concurrent.futures",
}

__all__ = [
    "Advice",
    "AncestorFailedError",
    "AsyncResult",
    "CallTimeoutError",
    "DifferentiableFuture",
    "Executor",
    "InternalError",
    "Pool",
    "PoolClosedError",
    "PoolStats",
    "Ray",
    "RemoteError",
    "RemoteTraceback",
    "ResultIterator",
    "SharedMemoryError",
    "Timeline",
    "UnsupportedTorchError",
    "WorkerDiedError",
    "WorkerStats",
    "advise",
    "as_completed",
    "failures",
    "functions",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "nn",
    "per_item_grad",
    "testing",
    "vjp",
    "wait",
]


def __getattr__(name: str) -> _typing.Any:
    """Import a name when it is first used. Workers need a third of the names, so they start
    sooner."""
    if name in ("functions", "joblib", "nn", "testing"):
        # joblib is not in `__all__`, because it may not be installed
        return _importlib.import_module(f"mpgrad.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(_importlib.import_module(_HOMES[name]), name)
    except (AttributeError, ImportError):
        # If a part of PyTorch is missing, this names it.
        _importlib.import_module("mpgrad.torch_state.behaviours").check()
        raise
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
