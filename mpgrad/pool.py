"""`Pool` has the interface of `multiprocessing.Pool`, with gradients.

multiprocessing.Pool returns copies whose history ended at the process border. Here every result is
connected to the items and captures it came from, and its backward runs in the worker that made it.

    with mpgrad.Pool(processes=2) as pool:
        results = pool.map(fn, items)      # [fn(x) for x in items], on worker processes
        sum(results).backward()            # this also runs on worker processes

This module runs in the caller only. It has the public methods, with their arguments and errors.
`submission` does the work.
"""

# long because: three lines in four are signatures and docstrings of the public interface

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, overload

from torch.autograd import Function

from mpgrad.calls.packing import Device
from mpgrad.cluster.ray import Ray
from mpgrad.engines.kinds import EngineName, EngineRequest, traits_of
from mpgrad.environment import PLACE
from mpgrad.errors import contextmanager, suggests
from mpgrad.progress import Progress, ProgressState, reporter_of
from mpgrad.scheduling.dispatcher import scheduler_for
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.stats import PoolStats
from mpgrad.submission.options import (
    CallOptions,
    EachOptions,
    Graphs,
    OnError,
    PickledInitializer,
    PoolOptions,
    positive,
)
from mpgrad.submission.results import AsyncResult, DifferentiableFuture, ResultIterator
from mpgrad.submission.starting import Source, iterator, options_behind, refuse_options
from mpgrad.submission.submitter import Submitter, folded_into, mapped_and_folded
from mpgrad.timeline import Timeline
from mpgrad.torch_state import behaviours
from mpgrad.torch_state.modes import load_generators
from mpgrad.torch_state.private import not_compiled
from mpgrad.tracebacks import without_own_frames

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Pool", "PoolWorker"]

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
Items = Iterable[T | DifferentiableFuture[T]]
OnFailure = Callable[[BaseException], object] | None
Named = Literal["sum", "mean", "max", "min", "logsumexp", "cat", "stack"]


# long because: see the head of the module
class Pool:
    """Worker processes that run functions on tensors, forward and backward.


    Everyday arguments:
        processes: the number of workers. None: one for each CPU that this process may use. CPU
            affinity and cgroup quotas limit this number.
        initializer: a function that each worker calls once, with `initargs`, before anything else.
            If it raises, the pool is broken: each call raises the same exception.
        initargs: the arguments of `initializer`.
        engine: where calls run: "process", "thread", "inline" (the caller's thread, for debugging),
            "stream" (threads with a CUDA stream each) or "ray" (a cluster). None: "process". Inside
            a task None means "inline", unless there is a `timeout`.
        threads_per_worker: the number of intra-op threads that PyTorch and other libraries, such as
            OpenBLAS, use in each worker process. None: one. The other libraries then still follow
            environment variables such as OPENBLAS_NUM_THREADS.
        devices: "cuda" for one worker on each GPU, a list such as ["cpu", "cuda:0", "cuda:0"] with
            the device of each worker, or one device for all `processes` (None: one worker). None:
            the CPU. Only for engines "process" and "stream".
        ray: the Ray cluster of engine "ray". None: the cluster that this machine belongs to.

    Arguments for faults:
        maxtasksperchild: the number of calls after which a new worker replaces a worker. None:
            never.
        retries: how often a call runs again on another worker after its worker died. 0: the call
            fails, and so do the backwards whose graphs were lost.
        timeout: the time limit of each call, in seconds, for its forward and for its backward. A
            call that takes longer is killed with its worker, and fails. The loading of the function
            does not count. None: no limit. Only for engines "process" and "ray".
        timeout_retries: how often a call runs again on another worker after it took longer than its
            timeout.

    Expert arguments:
        graphs: "auto" keeps the graph of each call, but runs the backwards of losses early once it
            can predict their gradients. "keep" keeps each graph until its backward. "recompute"
            keeps no graphs, and a backward runs the forward again.
        graph_memory: bytes of CPU memory for the graphs in each worker, or a text such as "2 GiB".
            Beyond that, the worker drops the largest graphs, and their backwards run the forward
            again. None: no limit.
        deterministic: add up the gradients of captures in a fixed order, so that two runs agree bit
            for bit. `torch.use_deterministic_algorithms(True)` does the same while it is on.
        context: a start method or context of `multiprocessing`. None: mpgrad's own, which starts
            workers faster. Only engine "process" uses it.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type. The message names
            the argument and its value.
        pickle.PicklingError: `initializer` or its arguments cannot be pickled.
        UnsupportedTorchError: the installed PyTorch does not do what mpgrad relies on.
        ImportError, ConnectionError, RuntimeError: with engine "ray", Ray is missing, there is no
            cluster, or no node has room.

    Example:
        >>> import torch, mpgrad
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     a, b = pool.map(lambda item: item ** 2, [x, x * 3])
        ...     (a.sum() + b.sum()).backward()
        >>> x.grad
        tensor([20., 40.])
    """

    @suggests("Pool")
    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | str | None = None,
        *,
        threads_per_worker: int | None = None,
        engine: EngineName | None = None,
        deterministic: bool = False,
        retries: int = 2,
        timeout: float | None = None,
        timeout_retries: int = 0,
        graphs: Graphs = "auto",
        graph_memory: int | str | None = None,
        devices: Device | Sequence[Device] | None = None,
        ray: Ray | None = None,
    ) -> None:
        # long because: it has every argument of the public interface
        behaviours.check()
        if engine is None:
            engine = "inline" if PLACE.in_worker and timeout is None else "process"
        initargs = tuple(iterator("initargs", initargs))
        pickled = PickledInitializer(initializer, initargs, traits_of(engine))
        self._options = options = PoolOptions(
            processes=processes,
            initializer=pickled,
            maxtasksperchild=maxtasksperchild,
            context=context,
            threads_per_worker=threads_per_worker,
            engine=engine,
            deterministic=deterministic,
            retries=retries,
            timeout=timeout,
            timeout_retries=timeout_retries,
            graphs=graphs,
            graph_memory=graph_memory,
            devices=devices,
            ray=ray,
        )
        settings = options.settings()
        self._scheduler = scheduler_for(
            engine, settings, EngineRequest(processes, context, ray, threads_per_worker)
        )
        try:
            self._submitter = Submitter(options, self._scheduler)
            OPEN.add(self._scheduler)
            # The finalizer belongs to the submitter and not to the pool, because graphs that
            # torch.func follows use the submitter without the pool.
            self._finalizer = weakref.finalize(
                self._submitter, self._scheduler.terminate_without_waiting
            )
            # At exit, `terminate_all` ends the pool.
            self._finalizer.atexit = False
            self._scheduler.start()
            if initializer is not None and pickled.here is not None:
                # The first worker sets the globals that functions are pickled with.
                self._scheduler.wait_for_workers(any)
            load_generators()
        # This may be a KeyboardInterrupt, or the system starts no more threads.
        except BaseException:
            self._scheduler.terminate_without_waiting()
            raise

    # --- multiprocessing.Pool's interface

    @overload
    def map(self, func: type[Function], *args: Any, **options: Any) -> list[Any]: ...

    @overload
    def map(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> list[R | BaseException]: ...

    @overload
    def map(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> list[R]: ...

    @overload
    def map(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = None,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> list[R | BaseException]: ...

    @overload
    def map(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = None,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> list[R]: ...

    @not_compiled
    @options_behind("chunksize")
    def map(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        *iterables: Iterable[Any],
        chunksize: int | None = None,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: OnError = "raise",
        device: Device | None = None,
    ) -> list[Any]:
        """Return ``list(map(func, iterable, *iterables))``, computed by the workers.

        Workers begin with the first items. Among the last items of a list, they begin with those
        that have the largest tensors, if calls take 10 ms or more.

        Args:
            func: any function, including lambdas, closures, bound methods, partials, modules and
                `torch.autograd.Function` classes. Tensors that it reaches are its captures, and
                gradients also flow to them.
            iterable: tensors, or structures with tensors anywhere inside.
            iterables: further items, one iterable for each further argument of `func`, as in
                Python's ``map``. The shortest iterable ends the map.
            chunksize: the number of items that are sent together. None: it follows the measured
                cost of a call. It may also be the last positional argument, as in multiprocessing.
            progress: True or a description for a tqdm bar (a widget in notebooks), or a function of
                (done, total, seconds left), where None means unknown. The thread that waits for the
                results calls the function when a value changes, at most ten times a second. While
                no thread waits, or during a backward, a thread of the pool calls it. Only forwards
                count here; `Pool.progress` also counts backwards.
            timeout: the time limit of each call, in seconds, as for `Pool`. None: the pool's own.
            on_error: "raise": the first failing item's exception is raised, and the other items are
                cancelled. "return": each exception takes the place of the result, and gradients
                flow to all other items. With `retries=0` they do not reach items whose graphs were
                in a worker that died or was ended. `mpgrad.failures` finds the exceptions.
            device: run on workers of this device ("cpu", "cuda:1", or "cuda" for any GPU), to which
                all tensors are moved. None: run on a worker of the item's device. Either way,
                results and gradients return to the devices where they belong.

        Raises:
            Exception: the first failing item's exception, with a note that names item, worker and
                phase.
            TypeError, pickle.PicklingError: the function, an item or a result cannot be sent; the
                message names it. If pickling an item raises another exception, that one is raised
                with a note. For a result the exception is also a
                `multiprocessing.pool.MaybeEncodingError`. TypeError is also raised for an option of
                the wrong type.
            ValueError: an option is out of range, the engine has no `timeout`, or no worker is on
                `device`.
            WorkerDiedError: workers died while they ran one of the items, more than `retries`
                times.
            CallTimeoutError: one of the items took longer than `timeout`, more than the pool's
                `timeout_retries` times.
            AncestorFailedError: a future among the items failed.
            SharedMemoryError: there is no memory for a tensor.
            PoolClosedError: the pool was closed or terminated.
            RuntimeError: this process is a fork of the process that made the pool.

        Example:
            >>> import torch, mpgrad
            >>> weight = torch.tensor(3.0, requires_grad=True)
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     results = pool.map(lambda x: weight * x.sum(), [torch.ones(2), torch.ones(5)])
            ...     sum(results).backward()
            >>> weight.grad
            tensor(7.)
        """
        options = CallOptions(chunksize, timeout, on_error, device, progress)
        return self._submitter.run(func, Source.of_iterables(iterable, *iterables), options)

    @overload
    def starmap(self, func: type[Function], *args: Any, **options: Any) -> list[Any]: ...

    @overload
    def starmap(
        self,
        func: Callable[..., R],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> list[R | BaseException]: ...

    @overload
    def starmap(
        self,
        func: Callable[..., R],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> list[R]: ...

    @not_compiled
    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        *,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: OnError = "raise",
        device: Device | None = None,
    ) -> list[Any]:
        """Return ``[func(*arguments) for arguments in iterable]``, computed by the workers.

        Everything else is as for `map`.

        Example:
            >>> import torch, mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     pool.starmap(torch.mul, [(torch.tensor(2.0), 3), (torch.tensor(4.0), 5)])
            [tensor(6.), tensor(20.)]
        """
        options = CallOptions(chunksize, timeout, on_error, device, progress)
        return self._submitter.run(func, Source.of_arguments(iterable), options)

    @overload
    def apply(self, func: type[Function], *args: Any, **options: Any) -> Any: ...

    @overload
    def apply(
        self,
        func: Callable[..., R],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        device: Device | None = None,
    ) -> R: ...

    @not_compiled
    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        device: Device | None = None,
    ) -> Any:
        """Return ``func(*args, **kwds)``, computed by a worker.

        Args:
            func: any function, as for `map`.
            args: its arguments.
            kwds: its keyword arguments. If `func` has an argument named `timeout` or `device`, pass
                it here.
            timeout: the time limit of the call, and of its backward, in seconds. None: the pool's
                own `timeout`.
            device: as for `map`.

        Raises:
            Exception: the call's exception, or an error in sending it; see `map`.
            CallTimeoutError: the call took longer than `timeout`, more than the pool's
                `timeout_retries` times.
            ValueError: `timeout` is not more than 0, or the engine cannot end a call.

        Example:
            >>> import time, torch, mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     pool.apply(torch.sum, (torch.ones(2, 3),), {"dim": 0})
            tensor([2., 2., 2.])
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     try:
            ...         pool.apply(time.sleep, (60,), timeout=0.1)
            ...     except mpgrad.CallTimeoutError as error:
            ...         print(error.phase, error.seconds)
            forward 0.1
        """
        options = CallOptions(timeout=timeout, device=device)
        return self._submitter.run(func, Source.of_one(args, kwds), options)[0]

    @overload
    def map_async(
        self, func: type[Function], *args: Any, **options: Any
    ) -> AsyncResult[list[Any]]: ...

    @overload
    def map_async(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = None,
        callback: Callable[[list[R | BaseException]], object] | None = None,
        error_callback: OnFailure = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> AsyncResult[list[R | BaseException]]: ...

    @overload
    def map_async(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = None,
        callback: Callable[[list[R]], object] | None = None,
        error_callback: OnFailure = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> AsyncResult[list[R]]: ...

    # long because: it has every argument of the public interface
    @overload
    def map_async(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = None,
        callback: Callable[[list[R | BaseException]], object] | None = None,
        error_callback: OnFailure = None,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> AsyncResult[list[R | BaseException]]: ...

    # long because: it has every argument of the public interface
    @overload
    def map_async(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = None,
        callback: Callable[[list[R]], object] | None = None,
        error_callback: OnFailure = None,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> AsyncResult[list[R]]: ...

    # long because: it has every argument of the public interface
    @not_compiled
    @options_behind("chunksize", "callback", "error_callback")
    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        *iterables: Iterable[Any],
        chunksize: int | None = None,
        callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: OnError = "raise",
        device: Device | None = None,
    ) -> AsyncResult[Any]:
        """Start a `map`, and return at once.

        Callbacks run one after another in a thread of the pool. They may wait for other calls.

        Example:
            >>> import torch, mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     result = pool.map_async(torch.exp, [torch.zeros(1)])
            ...     result.get()
            [tensor([1.])]
        """
        options = CallOptions(chunksize, timeout, on_error, device, progress)
        return self._submitter.run_async(
            func, Source.of_iterables(iterable, *iterables), options, callback, error_callback
        )

    @overload
    def starmap_async(
        self, func: type[Function], *args: Any, **options: Any
    ) -> AsyncResult[list[Any]]: ...

    @overload
    def starmap_async(
        self,
        func: Callable[..., R],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callable[[list[R | BaseException]], object] | None = None,
        error_callback: OnFailure = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> AsyncResult[list[R | BaseException]]: ...

    @overload
    def starmap_async(
        self,
        func: Callable[..., R],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callable[[list[R]], object] | None = None,
        error_callback: OnFailure = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> AsyncResult[list[R]]: ...

    # long because: it has every argument of the public interface
    @not_compiled
    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: OnError = "raise",
        device: Device | None = None,
    ) -> AsyncResult[Any]:
        """Start a `starmap`, and return at once.

        Example:
            >>> import torch, mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     pairs = [(torch.tensor(2.0), 3), (torch.tensor(4.0), 5)]
            ...     result = pool.starmap_async(torch.mul, pairs)
            ...     result.get()
            [tensor(6.), tensor(20.)]
        """
        options = CallOptions(chunksize, timeout, on_error, device, progress)
        return self._submitter.run_async(
            func, Source.of_arguments(iterable), options, callback, error_callback
        )

    @overload
    def apply_async(self, func: type[Function], *args: Any, **options: Any) -> AsyncResult[Any]: ...

    @overload
    def apply_async(
        self,
        func: Callable[..., R],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callable[[R], object] | None = None,
        error_callback: OnFailure = None,
        *,
        timeout: float | None = None,
        device: Device | None = None,
    ) -> AsyncResult[R]: ...

    @not_compiled
    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callable[[Any], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        timeout: float | None = None,
        device: Device | None = None,
    ) -> AsyncResult[Any]:
        """Start an `apply`, and return at once.

        `timeout` limits the call, from the moment when the call begins. `get(timeout)` limits your
        wait.

        Example:
            >>> import torch, mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     result = pool.apply_async(torch.sum, (torch.ones(2, 3),), {"dim": 0})
            ...     result.get()
            tensor([2., 2., 2.])
        """
        options = CallOptions(timeout=timeout, device=device)
        return self._submitter.run_async(
            func,
            Source.of_one(args, kwds),
            options,
            callback,
            error_callback,
            fetch=lambda operation: operation.values()[0],
        )

    @overload
    def imap(self, func: type[Function], *args: Any, **options: Any) -> ResultIterator[Any]: ...

    @overload
    def imap(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = 1,
        *,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R | BaseException]: ...

    @overload
    def imap(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = 1,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R]: ...

    @overload
    def imap(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = 1,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R | BaseException]: ...

    @overload
    def imap(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = 1,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R]: ...

    @not_compiled
    @options_behind("chunksize")
    def imap(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        *iterables: Iterable[Any],
        chunksize: int | None = 1,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: OnError = "raise",
        device: Device | None = None,
    ) -> ResultIterator[Any]:
        """Return an iterator over the results of a `map`, in order, each as soon as it is
        available.

        It takes up to 16 chunks for each worker from `iterable` at once. Then it takes one more
        with each result, in your thread.

        Example:
            >>> import torch, mpgrad
            >>> x = torch.ones(2, requires_grad=True)
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     for loss in pool.imap(lambda k: (k * x).sum(), range(3)):
            ...         loss.backward()
            >>> x.grad
            tensor([3., 3.])
        """
        options = CallOptions(chunksize, timeout, on_error, device, progress)
        return self._submitter.iterate(
            func, Source.of_iterables(iterable, *iterables), options, ordered=True
        )

    @overload
    def imap_unordered(
        self, func: type[Function], *args: Any, **options: Any
    ) -> ResultIterator[Any]: ...

    @overload
    def imap_unordered(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = 1,
        *,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R | BaseException]: ...

    @overload
    def imap_unordered(
        self,
        func: Callable[[T], R],
        iterable: Items[T],
        chunksize: int | None = 1,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R]: ...

    @overload
    def imap_unordered(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = 1,
        on_error: Literal["return"],
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R | BaseException]: ...

    @overload
    def imap_unordered(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        second: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = 1,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[EachOptions],
    ) -> ResultIterator[R]: ...

    @not_compiled
    @options_behind("chunksize")
    def imap_unordered(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        *iterables: Iterable[Any],
        chunksize: int | None = 1,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: OnError = "raise",
        device: Device | None = None,
    ) -> ResultIterator[Any]:
        """Return an iterator as `imap` does, with the results in the order in which they arrive.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     sorted(pool.imap_unordered(abs, [-3, 1, -2]))
            [1, 2, 3]
        """
        options = CallOptions(chunksize, timeout, on_error, device, progress)
        return self._submitter.iterate(
            func, Source.of_iterables(iterable, *iterables), options, ordered=False
        )

    @without_own_frames
    def start(self) -> None:
        """Wait until the workers are ready for calls.

        Making a pool starts its workers, but does not wait for them. So make the pool before you
        load your data, and call this only if the first call must not take longer than later ones.

        Raises:
            PoolClosedError: the pool was closed or terminated.
            Exception: the exception of the `initializer`.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     pool.start()
            ...     len(pool.stats().workers)
            2
        """
        self._scheduler.life.check_open()
        self._scheduler.wait_for_workers(all)
        self._scheduler.life.check_open()

    def close(self) -> None:
        """Accept no more calls.

        Calls in progress are finished, and backward still works until `join` or `terminate`.

        Example:
            >>> import torch, mpgrad
            >>> x = torch.ones(2, requires_grad=True)
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     result = pool.apply_async(torch.sum, (x,))
            ...     pool.close()
            ...     result.get().backward()
            >>> x.grad
            tensor([1., 1.])
        """
        self._scheduler.close()

    def terminate(self) -> None:
        """End the workers now. Results that have arrived stay valid, but their graphs are gone.

        Example:
            >>> import mpgrad
            >>> pool = mpgrad.Pool(processes=1)
            >>> results = pool.map(abs, [-1, 2])
            >>> pool.terminate()
            >>> pool, results
            (<mpgrad.Pool processes=1 engine='process' closed>, [1, 2])
        """
        self._scheduler.terminate()

    @without_own_frames
    def join(self) -> None:
        """Wait until all calls are done and the workers have ended.

        Raises:
            ValueError: the pool is still open.
            RuntimeError: the caller is a callback of the pool.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     result = pool.map_async(abs, [-1, 2])
            ...     pool.close()
            ...     pool.join()
            >>> result.ready(), result.get()
            (True, [1, 2])
        """
        self._scheduler.drain()
        self._scheduler.join()

    @property
    def processes(self) -> int:
        """The number of workers."""
        return self._scheduler.settings.workers

    @property
    def workers(self) -> tuple[PoolWorker, ...]:
        """Names for the workers, which `mpgrad.nn` takes as devices.

        Example:
            >>> import torch, mpgrad
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     mpgrad.nn.scatter(torch.arange(3), pool.workers)
            [tensor([0, 1]), tensor([2])]
        """
        return tuple(PoolWorker(self, number) for number in range(self.processes))

    def _leave(self) -> None:
        """Accept no more calls, and return at once.

        Workers end when all work is done and the graphs that they keep are no longer needed.
        """
        self._finalizer.detach()
        self._scheduler.leave()

    def resize(self, processes: int) -> None:
        """Change the number of workers.

        Surplus workers get no new calls, and end once they keep no graphs.

        Raises:
            ValueError: `processes` is less than one, the engine is "inline", or the pool has
                devices, which fix the number of workers.
            PoolClosedError: the pool was closed or terminated.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     pool.resize(2)
            ...     pool.processes
            2
        """
        if not self._options.traits.may_resize:
            raise ValueError("an inline pool has one worker, the caller itself (engine: 'inline')")
        if self._options.device_codes is not None:
            raise ValueError(
                "a pool with devices has one worker for each of them; make a new pool "
                f"(processes: {processes})"
            )
        self._scheduler.resize(positive("processes", processes))

    def stats(self) -> PoolStats:
        """Return the memory, graphs, calls and deaths of each worker and of the pool.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     _ = pool.map(abs, range(10))
            ...     [(worker.calls, worker.graphs) for worker in pool.stats().workers]
            [(10, 0)]
        """
        return self._scheduler.stats()

    def story(self, item: int = 0) -> str:
        """Return what happened to an item of the last operation, with one line for each step.

        The notes of `WorkerDiedError` and `CallTimeoutError` contain the same lines.

        Args:
            item: the index of the item within its map; 0 for the call of a `submit` or `apply`.

        Raises:
            LookupError: the last operation had no such item, or more than 10,000 calls were sent
                after it.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     _ = pool.map(abs, range(3), chunksize=1)
            ...     print(pool.story(2))  # doctest: +ELLIPSIS
            item 2 of abs
                0.000 s  sent to worker 1
                0.0... s  worker 1 has answered
        """
        return self._scheduler.story_of(item)

    def timeline(self, path: str | os.PathLike[str] | None = None) -> Timeline:
        """Record, in a `with` block, which worker runs which item's forward and backward, and when.

        The timeline also shows when the caller's threads pack, wait and make results. Calls that
        were sent before the block are left out.

        Args:
            path: a file to write at the end of the block, even if the block raises. You can open it
                in https://ui.perfetto.dev.

        Raises:
            TypeError: `path` does not name a file.
            RuntimeError: this pool is already recording a timeline, or this object was used before.
                The beginning of the block raises this. `Timeline.events`, `Timeline.save` and
                `Timeline.draw` raise it until the block ends.
            OSError: the file cannot be written. The beginning of the block raises this.

        Example:
            >>> import torch, mpgrad
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     with pool.timeline() as timeline:
            ...         results = pool.map(torch.square, [torch.ones(3, requires_grad=True)] * 8)
            ...         torch.stack(results).sum().backward()
            >>> spans = [event for event in timeline.events if event["ph"] == "X"]
            >>> sorted({event["cat"] for event in spans} & {"forward", "backward"})
            ['backward', 'forward']
        """
        if not isinstance(path, str | os.PathLike | None):
            raise TypeError(f"path must name a file, or be None (path: {path!r})")
        return Timeline(self._scheduler, path)

    @contextmanager
    def progress(self, progress: Progress = True) -> Iterator[None]:
        """Show how much of the pool's work is done, until the block ends.

        Calls of `submit` and backwards also count. The total grows as you submit more. An item's
        backward counts as much as its forward, but cheap items that were sent together have one
        backward for all. With `graphs="auto"` backwards may have run with the forwards. Then a
        backward has nothing left to do, and nothing to show.

        Args:
            progress: as for `map`.

        Example:
            >>> import torch, mpgrad
            >>> x = torch.ones(3, requires_grad=True)
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     with pool.progress("simulate"):
            ...         futures = [pool.submit(torch.mul, x, n) for n in range(5)]
            ...         loss = sum(future.result().sum() for future in futures)
            ...     with pool.progress("differentiate"):
            ...         loss.backward()
            >>> x.grad
            tensor([10., 10., 10.])
        """

        before, _ = self._scheduler.tally()

        def look() -> ProgressState:
            done, left = self._scheduler.tally()
            return ProgressState(done - before, done - before + left)

        reporter = reporter_of(self._scheduler.callbacks, progress, look, is_of_pool=True)
        try:
            yield
        finally:
            if reporter is not None:
                reporter.end()

    def __enter__(self) -> Pool:
        self._scheduler.life.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Call `terminate`, as in multiprocessing.

        Get the results, and call backward, inside the with block.
        """
        self.terminate()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a pool cannot be pickled, nor captured by a function that it runs; make one in the "
            "task instead"
        )

    def __repr__(self) -> str:
        return (
            f"<mpgrad.Pool processes={self.processes} engine={self._options.engine!r} "
            f"{self._scheduler.life.state}>"
        )

    # --- beyond multiprocessing.Pool's interface

    @overload
    def submit(
        self, fn: type[Function], /, *args: Any, **kwargs: Any
    ) -> DifferentiableFuture[Any]: ...

    @overload
    def submit(
        self, fn: Callable[..., R], /, *args: Any, **kwargs: Any
    ) -> DifferentiableFuture[R]: ...

    @not_compiled
    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> DifferentiableFuture[Any]:
        """Run ``fn(*args, **kwargs)`` on a worker.

        Returns a `concurrent.futures.Future` whose result is differentiable. `Pool(timeout=)` and
        `apply_async`, which also has a `device`, limit the time that a call runs. The future's
        `cancel_after` sets a deadline, which includes the time that the call waits. As in
        `concurrent.futures`, `submit` passes all keyword arguments to `fn`.

        The arguments of a further call (`submit`, `map`, `reduce` and so on) may contain futures
        anywhere. That call starts when its arguments are available, and the caller does not wait.
        Gradients flow through the graph of calls. A result that only calls use is not copied to the
        caller. Once you have called `result()`, later calls get that value, with your in-place
        changes.

        Example:
            >>> import torch, mpgrad
            >>> x = torch.ones(3, requires_grad=True)
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     five = pool.submit(torch.mul, x, 5)
            ...     total = pool.submit(torch.sum, five)
            ...     total.result().backward()
            >>> x.grad
            tensor([5., 5., 5.])

        Raises (`result`):
            AncestorFailedError: a call whose result is an argument failed or was cancelled. Its
            error is the `__cause__`.
            concurrent.futures.CancelledError: the call was cancelled.
            Exception: the call's exception.
        """
        refuse_options(fn, kwargs)
        return self._submitter.submit(fn, (args, kwargs))

    @not_compiled
    def synchronize(self) -> None:
        """Wait until all calls that have been submitted so far have ended.

        Calls of `submit`, `map_async` and so on count, and so do calls of other threads.

        Raises:
            Exception: the first failure of a call whose result was not requested yet. The failure
                is then forgotten.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     futures = [pool.submit(abs, -k) for k in range(3)]
            ...     pool.synchronize()
            ...     [future.done() for future in futures]
            [True, True, True]
        """
        self._scheduler.await_all()
        self._scheduler.uncollected.surface()

    @not_compiled
    def reduce(
        self,
        fn: Callable[[Any, T], Any] | Named,
        items: Items[T],
        targets: A,
        *,
        associative: bool = False,
        progress: Progress = False,
    ) -> A:
        """Unlike `functools.reduce`, which is `map_reduce` here, fold all items into each target.

        The items keep their order, and the targets run in parallel.

        Args:
            fn: a function ``fn(target, item)``, which returns the new target, or writes into the
                target and returns None. It can also be the name of a reduction (see `map_reduce`);
                then the target is its first value.
            items: the items that are folded into every target.
            targets: one target (a tensor or structure), or a list of them.
            associative: whether ``fn(fn(t, a), b) == fn(t, fn(a, b))``. If so, the fold may be cut
                into blocks that run in parallel, and items and targets must be of one kind. The cut
                depends only on the number of items.

        Returns:
            The folded target, or the list of them. The caller's targets are not changed, even by
            in-place functions.

        Raises:
            ValueError: no reduction has the name `fn`. Otherwise as for `map`.

        Example:
            >>> import torch, mpgrad
            >>> a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     total, other = pool.reduce(
            ...         lambda target, item: target.add_(item), [a, b], [a * 10, b * 10]
            ...     )
            ...     (total * other).backward()
            >>> total, other, a.grad
            (tensor(25., grad_fn=<CallBackward>), tensor(35., grad_fn=<CallBackward>), tensor(410.))
        """
        asked: list[Any] = targets if isinstance(targets, list) else [targets]
        found = folded_into(
            self._submitter, fn, list(iterator("the items", items)), asked, associative, progress
        )
        return cast(A, found if asked is targets else found[0])

    @not_compiled
    def map_reduce(
        self,
        map_fn: Callable[[T], R],
        items: Items[T],
        reduce_fn: Callable[[R, R], object] | Named,
        init: R | None = None,
        *,
        progress: Progress = False,
    ) -> R:
        """Return ``functools.reduce(reduce_fn, map(map_fn, items))``, computed by the workers.

        Mapped values stay on the workers, and only accumulators are sent.

        Args:
            map_fn: a function that is applied to each item.
            items: at least one item, unless there is an `init`.
            reduce_fn: an associative function of an accumulator and a value. It returns the new
                accumulator, or writes into the one it got. It can also be one of "sum", "mean",
                "max", "min", "logsumexp" (elementwise over the items), "cat", "stack" (along
                dimension 0). Blocks of items are folded in parallel and merged in order. The cut
                into blocks depends only on the number of items.
            init: the first value; None for no first value.

        Raises:
            TypeError: there are no items and no `init`. Otherwise as for `map`.

        Example:
            >>> import torch, mpgrad
            >>> items = [torch.full((2,), float(i), requires_grad=True) for i in range(4)]
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     total = pool.map_reduce(lambda x: x ** 2, items, "sum")
            ...     total.sum().backward()
            >>> total.detach(), items[3].grad
            (tensor([14., 14.]), tensor([6., 6.]))
        """
        found: R = mapped_and_folded(
            self._submitter, map_fn, list(iterator("the items", items)), reduce_fn, init, progress
        )
        return found


class PoolWorker:
    """A name for one of the workers of a pool, and so for a share of work.

    The pool decides which process does the share.

    Example:
        >>> import mpgrad
        >>> with mpgrad.Pool(processes=1) as pool:
        ...     pool.workers
        (<worker 0 of <mpgrad.Pool processes=1 engine='process' open>>,)
    """

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool = pool
        self.number = number

    def __deepcopy__(self, memo: object) -> PoolWorker:
        return self

    def __repr__(self) -> str:
        return f"<worker {self.number} of {self.pool!r}>"


OPEN: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def terminate_all() -> None:
    """Terminate all pools when the interpreter ends."""
    for scheduler in list(OPEN):
        scheduler.terminate()


atexit.register(terminate_all)
