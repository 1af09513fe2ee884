"""A pool as a backend of joblib: `joblib.Parallel` with gradients.

joblib's own backends return copies whose history ended at the process border. With this one, code
that is written for joblib gets results that are connected to the arguments and captures of its
functions.

    [1] Parallel takes a batch of calls from its iterable            caller's thread, later [4]'s
    [2] submit: an operation of the pool, like a `starmap_async`
    [3] it is done                                                   the pool's thread for callbacks
    [4] joblib's callback, which has the next batch submitted        a thread of our own
    [5] results, and the nodes of their graphs, are made             whoever iterates over results

[4] has a thread because it takes from the caller's iterable, whose code may take long; other
callbacks of the pool would wait. It runs under the modes of the thread that called Parallel. Caller
only; the package that it imports is joblib's.
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
from mpgrad.calls.results import AsyncResult
from mpgrad.engines.kinds import traits_of
from mpgrad.environment import PLACE
from mpgrad.pickling.state import ItemStreams
from mpgrad.pool import Pool
from mpgrad.submission.options import CallOptions
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

# seconds from sending a batch to its end, between which batches keep their size
SHORTEST, LONGEST = 0.02, 0.2
# what joblib tells every backend; these concern its own ones
JOBLIB_OPTIONS = "max_nbytes", "temp_folder", "mmap_mode", "prefer", "require", "verbose", "context"
Outcome = Operation | BaseException
# the others are the process's
MODES_OF_A_THREAD = "grad", "inference", "autocast", "device", "thread_settings"


def register(make_default: bool = False) -> None:
    """Have joblib know the backend "mpgrad".

    ``joblib.parallel_config(backend="mpgrad", n_jobs=...)`` takes the options of `mpgrad.Pool` too,
    such as `deterministic` or `graphs`. `n_jobs` means what it means to joblib: -1 for as many
    workers as CPUs (on a cluster, as it has room for), None for 1, which is the serial loop.
    PyTorch and other libraries have ``inner_max_num_threads`` threads in a worker. Without it they
    have this machine's CPUs divided by the number of workers, if no variable such as
    OMP_NUM_THREADS says otherwise (one, on a cluster that says how many workers there are). All
    that runs under one `parallel_config`, or in one ``with Parallel(...)``, is run by the same
    workers. They end with it, and when no graph that they keep is needed any more. A `Parallel`
    inside of a task runs serially. Random numbers of a task depend on which tasks travel with it;
    seed each task to fix them. A generator that several tasks are given has another stream in each.

    Args:
        make_default: use it wherever no backend is named.

    Raises:
        ImportError: (of the module) joblib is not installed.
        ValueError: (of `joblib.Parallel`) `n_jobs` is 0.

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
    """What `joblib.Parallel` asks of a backend, answered by an `mpgrad.Pool`.

    Args:
        nesting_level: how many `Parallel`s are around this one.
        inner_max_num_threads: intra-op threads of each worker.
        **options: of `mpgrad.Pool`.
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
        self._streams = ItemStreams(None)  # over all batches of a Parallel
        self._begun = 0  # tasks of these

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many workers joblib's `n_jobs` asks for."""
        if n_jobs == 0:
            raise ValueError(
                "n_jobs == 0 in Parallel has no meaning; for as many as there are CPUs take -1 "
                "(n_jobs: 0)"
            )
        if n_jobs is None or PLACE.in_worker:  # whose pool has the CPUs already
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
        """Have workers for `parallel`; those of the call before, where these will do."""
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
            workers = None  # the cluster knows
        elif (workers := self.effective_n_jobs(n_jobs)) > 1:
            if threads is None and not any(name in os.environ for name in THREAD_VARIABLES):
                threads = max(usable_cpus() // workers, 1)
        else:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        wanted = workers, {"threads_per_worker": threads, **named}
        if self._pool is None or self._made_with != wanted:
            self._leave()
            self._pool, self._made_with = Pool(workers, **wanted[1]), wanted
            # its workers end when no graph that they keep is needed any more
            self._leave = finalizer = weakref.finalize(self, self._pool._leave)
            finalizer.atexit = False
        return self._pool.processes

    def submit(self, func: Any, callback: Callable[[Outcome], object]) -> Job:  # [2]
        """Have a `joblib.parallel.BatchedCalls` run; whatever goes wrong is an outcome too."""
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
            except Exception as error:  # in [4] nobody would hear of it
                job.error = error
                tell(error)
        return job

    def retrieve_result_callback(self, out: Outcome) -> Iterator[Any]:
        """The results of a batch.

        Raises:
            Exception: what one of its calls raised, or what came of sending it.
        """
        if isinstance(out, BaseException):
            raise out
        return results(out)

    def compute_batch_size(self) -> int:
        """How many calls joblib is to send together next, where nobody says."""
        return self._batch_size

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Double the size of batches that are short, halve that of long ones. `duration`: seconds
        from sending to the end."""
        if batch_size == self._batch_size:  # not of one that was sent when the size was another
            if duration < SHORTEST:
                self._batch_size *= 2
            elif duration > LONGEST:
                self._batch_size = max(1, self._batch_size // 2)

    def terminate(self) -> None:
        """A call of Parallel has ended. Workers stay: the next call may want them, and backwards
        the graphs that they keep."""
        self._batch_size = 1

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel, with grace, what Parallel does not want any more."""
        for job in list(self._under_way):
            with job.being_sent:  # by another thread, perhaps in this moment
                result = job.result
            # those of others that share this backend go on
            if result is not None and job.callback.parallel._aborting:
                result._scheduler.cancel_with_grace(result._operation)

    def get_nested_backend(self) -> tuple[SequentialBackend, None]:
        """For a Parallel in a task."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None


class Job:
    """A batch under way: what is to be told of its end, once, under what PyTorch keeps for the
    thread that sent it."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.result: AsyncResult[Any] | None = None
        self.error: Exception | None = None  # it could not be sent
        self.being_sent = threading.Lock()
        self._told = False
        self._modes = current_modes()
        self._hooks = saved_tensor_hooks()

    def tell(self, outcome: Outcome) -> None:
        """[4]"""
        with self.being_sent:  # what could be sent of a batch may end before the error is known
            outcome = outcome if self.error is None else self.error
        if self._told:
            return
        self._told, self.result = True, None  # which refers to this, too
        of_thread = {name: getattr(self._modes, name) for name in MODES_OF_A_THREAD}
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(*self._hooks)
            if self._hooks
            else contextlib.nullcontext()
        )
        with under(current_modes()._replace(**of_thread)), hooks:
            self.callback(outcome)


def results(operation: Operation) -> Iterator[Any]:
    """Make the results of a batch in the thread that iterates over them: graphs' nodes belong to
    it."""
    yield from operation.values()  # [5]


def identity(function: Callable[..., Any]) -> tuple[int, int]:
    """The same for equal functions: each access to a method makes another object."""
    if isinstance(function, MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function), 0
