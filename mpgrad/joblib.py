"""This module makes a pool a backend of joblib, so that `joblib.Parallel` has gradients.

joblib's own backends return copies whose history ended at the process border. With this backend,
code written for joblib gets results that are connected to the arguments and captures of its
functions.

    [1] Parallel takes a batch of calls from its iterable         the caller's thread, later [4]'s
    [2] submit starts an operation, like a `starmap_async`
    [3] the operation is done                                     the callbacks thread
    [4] joblib's callback submits the next batch                  a thread of this module
    [5] results, and the nodes of their graphs, are made          the thread that iterates over them

[4] has a thread of its own because it takes items from the caller's iterable, whose code may take
long. Other callbacks of the pool would have to wait. It runs under the modes of the thread that
called Parallel. This module runs in the caller only. `joblib` in the imports below is the joblib
package.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import torch

from mpgrad.calls.operations import Operation
from mpgrad.engines.kinds import traits_of
from mpgrad.environment import PLACE
from mpgrad.pickling.state import ItemStreams
from mpgrad.pool import Pool
from mpgrad.submission.options import CallOptions
from mpgrad.submission.results import AsyncResult
from mpgrad.submission.starting import Source
from mpgrad.system import THREAD_VARIABLES, usable_cpus
from mpgrad.tasks.wrappers import IndexedFunctions
from mpgrad.torch_state.modes import current_modes, under
from mpgrad.torch_state.private import saved_tensor_hooks

try:
    from joblib.parallel import (
        FallbackToBackend,
        ParallelBackendBase,
        SequentialBackend,
        register_parallel_backend,
    )
except ImportError as error:
    raise ImportError(
        "mpgrad.joblib needs joblib, which is not installed; pip install joblib"
    ) from error

__all__ = ["register"]

# Batches keep their size if they take between these numbers of seconds, from sending to their end.
SHORTEST, LONGEST = 0.02, 0.2
# joblib passes these options to every backend, but only its own backends use them.
JOBLIB_OPTIONS = "max_nbytes", "temp_folder", "mmap_mode", "prefer", "require", "verbose", "context"
Outcome = Operation | BaseException
# the modes that a thread has; the others belong to the process
MODES_OF_A_THREAD = "grad", "inference", "autocast", "device", "thread_settings"


def register(make_default: bool = False) -> None:
    """Register the backend "mpgrad" with joblib.

    ``joblib.parallel_config(backend="mpgrad", n_jobs=...)`` also takes the options of
    `mpgrad.Pool`, such as `deterministic` or `graphs`. `n_jobs` means the same as in joblib. -1
    means as many workers as CPUs (on a cluster, as many as fit). None means 1, which is the serial
    loop.

    PyTorch and other libraries use ``inner_max_num_threads`` threads in a worker. Without it they
    use this machine's CPUs divided by the number of workers, unless a variable such as
    OMP_NUM_THREADS is set. If the cluster determines the number of workers, they use one thread.

    The same workers run everything under one `parallel_config`, or in one ``with Parallel(...)``.
    They end after it, once the graphs that they keep are no longer needed. A `Parallel` inside a
    task runs serially. A task's random numbers depend on the tasks that are sent with it; seed each
    task to fix them. If several tasks have the same generator as an argument, each gets a different
    stream of it.

    Args:
        make_default: use this backend when no backend is named.

    Raises:
        ImportError: joblib is not installed. Importing this module raises this.
        ValueError: `n_jobs` is 0. `joblib.Parallel` raises this.

    Example:
        >>> import joblib, torch, mpgrad.joblib
        >>> mpgrad.joblib.register()
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with joblib.parallel_config(backend="mpgrad", n_jobs=2):
        ...     squares = joblib.Parallel()(joblib.delayed(torch.square)(x * k) for k in (1, 3))
        >>> sum(each.sum() for each in squares).backward()
        >>> x.grad
        tensor([20., 40.])
    """
    register_parallel_backend("mpgrad", MpgradBackend, make_default=make_default)


class MpgradBackend(ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
    """A backend of `joblib.Parallel` that uses an `mpgrad.Pool`.

    Args:
        nesting_level: the number of `Parallel`s around this one.
        inner_max_num_threads: the number of intra-op threads of each worker.
        **options: options of `mpgrad.Pool`.
    """

    supports_inner_max_num_threads = True
    supports_retrieve_callback = True
    supports_sharedmem = False
    uses_threads = False

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._options = options
        self._pool: Pool | None = None
        self._leave: Callable[[], object] = lambda: None
        self._made_with: tuple[int | None, dict[str, Any]] | None = None
        self._callbacks = ThreadPoolExecutor(1, "mpgrad-joblib")
        self._under_way: weakref.WeakSet[Job] = weakref.WeakSet()
        self._batch_size = 1
        # The streams go on over all batches of a Parallel.
        self._streams = ItemStreams(None)
        # the number of tasks that have been sent in these batches
        self._begun = 0

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many workers joblib's `n_jobs` means."""
        if n_jobs == 0:
            raise ValueError(
                "n_jobs == 0 in Parallel has no meaning; for one worker per CPU pass -1 (n_jobs: 0)"
            )
        # In a worker, the pool around it uses the CPUs already.
        if n_jobs is None or PLACE.in_worker:
            return 1
        if (
            n_jobs == -1
            and self._pool is not None
            and self._made_with is not None
            and self._made_with[0] is None
        ):
            return self._pool.processes
        return n_jobs if n_jobs > 0 else max(usable_cpus() + 1 + n_jobs, 1)

    def configure(self, n_jobs: int | None = 1, parallel: Any = None, **options: Any) -> int:
        """Get workers for `parallel`. If the workers of the previous call fit, keep them."""
        self._streams, self._begun = ItemStreams(None), 0
        named = {
            **self._options,
            **{name: value for name, value in options.items() if name not in JOBLIB_OPTIONS},
        }
        threads = self.inner_max_num_threads
        if (
            n_jobs == -1
            and traits_of(named.get("engine") or "process").remote
            and not PLACE.in_worker
        ):
            # The cluster decides.
            workers = None
        elif (workers := self.effective_n_jobs(n_jobs)) > 1:
            if threads is None and not any(name in os.environ for name in THREAD_VARIABLES):
                threads = max(usable_cpus() // workers, 1)
        else:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        wanted = workers, {"threads_per_worker": threads, **named}
        if self._pool is None or self._made_with != wanted:
            self._leave()
            self._pool, self._made_with = Pool(workers, **wanted[1]), wanted
            # The pool's workers end when the graphs that they keep are no longer needed.
            self._leave = finalizer = weakref.finalize(self, self._pool._leave)
            finalizer.atexit = False
        return self._pool.processes

    def submit(self, func: Any, callback: Callable[[Outcome], object]) -> Job:  # [2]
        """Run a `joblib.parallel.BatchedCalls`. An error in sending it is also an outcome."""
        functions = {identity(function): function for function, _, _ in func.items}
        numbers = {key: number for number, key in enumerate(functions)}
        calls = [
            ((numbers[identity(function)], *args), kwargs) for function, args, kwargs in func.items
        ]
        streams = self._streams.onwards(self._begun)
        self._begun += len(calls)
        job = Job(callback)
        self._under_way.add(job)

        def tell(outcome: Outcome) -> None:  # [3]
            self._callbacks.submit(job.tell, outcome)

        assert self._pool is not None
        with job.being_sent:
            try:
                job.result = self._pool._submitter.run_async(
                    IndexedFunctions(tuple(functions.values()), (self.nesting_level or 0) + 1),
                    Source(calls, len(calls), at_rest=True, items=streams),
                    CallOptions(),
                    tell,
                    tell,
                    fetch=lambda operation: operation,
                )
            # If this were raised in [4], it would go unnoticed.
            except Exception as error:
                job.error = error
                tell(error)
        return job

    def retrieve_result_callback(self, out: Outcome) -> Iterator[Any]:
        """Return an iterator over the results of a batch.

        Raises:
            Exception: the exception of one of its calls, or an error in sending the batch.
        """
        if isinstance(out, BaseException):
            raise out
        return results(out)

    def compute_batch_size(self) -> int:
        """Return how many calls joblib sends together next, if the user has not set a number."""
        return self._batch_size

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Double the size of batches that are short, and halve the size of long ones.

        `duration` is the seconds from sending to the end.
        """
        # A batch that was sent with another size does not count.
        if batch_size == self._batch_size:
            if duration < SHORTEST:
                self._batch_size *= 2
            elif duration > LONGEST:
                self._batch_size = max(1, self._batch_size // 2)

    def terminate(self) -> None:
        """End a call of Parallel.

        Workers stay, because the next call may need them, and backwards may need their graphs.
        """
        self._batch_size = 1

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel, with grace, the batches that Parallel no longer needs."""
        for job in list(self._under_way):
            # Another thread may be sending the batch at this moment.
            with job.being_sent:
                result = job.result
            # The batches of other Parallels that share this backend go on.
            if result is not None and job.callback.parallel._aborting:
                result._scheduler.cancel_with_grace(result._operation)

    def get_nested_backend(self) -> tuple[SequentialBackend, None]:
        """Return the backend for a Parallel in a task, which is joblib's serial one."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None


class Job:
    """Represents a batch under way. It reports its end to joblib's callback once.

    The callback runs under the modes that PyTorch keeps for the thread that sent the batch.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.result: AsyncResult[Any] | None = None
        # why the batch could not be sent
        self.error: Exception | None = None
        self.being_sent = threading.Lock()
        self._told = False
        self._modes = current_modes()
        self._hooks = saved_tensor_hooks()

    def tell(self, outcome: Outcome) -> None:
        """Call joblib's callback with the outcome ([4])."""
        # The part of a batch that could be sent may end before the error is known.
        with self.being_sent:
            outcome = outcome if self.error is None else self.error
        if self._told:
            return
        # The result also refers to this job.
        self._told, self.result = True, None
        of_thread = {name: getattr(self._modes, name) for name in MODES_OF_A_THREAD}
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(*self._hooks)
            if self._hooks
            else contextlib.nullcontext()
        )
        with under(current_modes()._replace(**of_thread)), hooks:
            self.callback(outcome)


def results(operation: Operation) -> Iterator[Any]:
    """Make the results of a batch in the thread that iterates over them, because the nodes of their
    graphs belong to this thread."""
    yield from operation.values()  # [5]


def identity(function: Callable[..., Any]) -> tuple[int, int]:
    """Return a key that is the same for equal functions.

    Each access to a method makes another object, so `id` alone is not enough.
    """
    if isinstance(function, MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function), 0
