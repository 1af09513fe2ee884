"""mpgrad: a worker pool for PyTorch whose `map`, `reduce` and friends are differentiable.

``pool.map(fn, items)`` is the serial loop ``[fn(x) for x in items]`` run on worker processes: the same values, the same
gradients, the same exceptions. Only the time differs.
"""

import importlib as _importlib
import typing as _typing
from concurrent.futures import as_completed, wait

from mpgrad import nn
from mpgrad.derivatives import hessian, hvp, jacobian, jvp, vjp
from mpgrad.errors import (
    AncestorFailedError,
    CallTimeoutError,
    InternalError,
    PoolClosedError,
    RemoteError,
    RemoteTraceback,
    SharedMemoryError,
    WorkerDiedError,
)
from mpgrad.executor import Executor
from mpgrad.per_item import per_item_grad
from mpgrad.pool import Pool
from mpgrad.results import AsyncResult, DifferentiableFuture, ResultIterator

if _typing.TYPE_CHECKING:
    from mpgrad.workers.contexts import EmulatedAutogradContext, run_isolated_backward, run_isolated_forward
    from mpgrad.workers.parallel import map_with_parallel_backward

__all__ = [
    "AncestorFailedError",
    "AsyncResult",
    "CallTimeoutError",
    "DifferentiableFuture",
    "EmulatedAutogradContext",
    "Executor",
    "InternalError",
    "Pool",
    "PoolClosedError",
    "RemoteError",
    "RemoteTraceback",
    "ResultIterator",
    "SharedMemoryError",
    "WorkerDiedError",
    "as_completed",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "map_with_parallel_backward",
    "nn",
    "per_item_grad",
    "run_isolated_backward",
    "run_isolated_forward",
    "vjp",
    "wait",
]


_BEHIND_THE_WALL = {
    "EmulatedAutogradContext": "mpgrad.workers.contexts",
    "map_with_parallel_backward": "mpgrad.workers.parallel",
    "run_isolated_backward": "mpgrad.workers.contexts",
    "run_isolated_forward": "mpgrad.workers.contexts",
}


def __getattr__(name: str) -> _typing.Any:
    """What lives with the workers is imported when it is first asked for."""
    if name not in _BEHIND_THE_WALL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_BEHIND_THE_WALL[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
