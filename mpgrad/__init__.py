"""mpgrad: a worker pool for PyTorch whose `map`, `reduce` and friends are differentiable.

``pool.map(fn, items)`` is the serial loop ``[fn(x) for x in items]`` run on worker processes: the same values, the same
gradients, the same exceptions. Only the time differs.
"""

from mpgrad.errors import InternalError, PoolClosedError, RemoteError, RemoteTraceback, SharedMemoryError, WorkerDiedError
from mpgrad.pool import Pool
from mpgrad.results import AsyncResult, ResultIterator

__all__ = [
    "AsyncResult",
    "InternalError",
    "Pool",
    "PoolClosedError",
    "RemoteError",
    "RemoteTraceback",
    "ResultIterator",
    "SharedMemoryError",
    "WorkerDiedError",
]
