"""The pool: `multiprocessing.Pool`'s interface, with gradients.

multiprocessing.Pool returns copies whose history ended at the process border. Here every result is connected to the items
and captures it came from, and its backward runs in the worker that made it.

    with mpgrad.Pool(processes=2) as pool:
        results = pool.map(fn, items)      # [fn(x) for x in items], on worker processes
        sum(results).backward()            # so is this
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, NoReturn

import torch

from mpgrad.autograd.capture_gate import Captures
from mpgrad.calls.device_choice import Device, requested
from mpgrad.calls.homes import OperationHome
from mpgrad.calls.operations import Operation, OperationOptions
from mpgrad.calls.packing import (
    Arguments,
    Conditions,
    PackedCall,
    Packing,
    PickledFunction,
    Shared,
    SharedFunction,
    pack_bundle,
    pack_call,
    pickled_function,
)
from mpgrad.calls.results import AsyncResult, DifferentiableFuture, ResultIterator, Uncollected
from mpgrad.calls.submitted import Submitted
from mpgrad.collector import LONGEST_HOLD, collector_held, let_collector_look
from mpgrad.cpus import usable_cpus
from mpgrad.engines.start import start_engine
from mpgrad.engines.stations import worker_devices
from mpgrad.engines.traits import traits_of
from mpgrad.memory.limits import bytes_of
from mpgrad.pickling import classes
from mpgrad.pickling.uncarried import not_carried
from mpgrad.place import PLACE
from mpgrad.progress import Progress, progress_bar
from mpgrad.scheduling.costs import Costs
from mpgrad.scheduling.queue import fed, guided_size
from mpgrad.scheduling.run_in_caller import AdaptiveMap, is_at_rest, may_run_here
from mpgrad.scheduling.scheduler import Scheduler, Settings
from mpgrad.stats import PoolStats
from mpgrad.suggestions import suggests
from mpgrad.tasks.reduction import Block, Finish, Fold, FunctionReduction, blocks_of, reduction_named
from mpgrad.torch_state import behaviours
from mpgrad.torch_state.modes import Modes, current_modes, draw_seed, load_generators, under_hooks
from mpgrad.torch_state.private import not_compiled, outside_transforms, tracer
from mpgrad.tracebacks import without_own_frames
from mpgrad.transforms import may_be_followed, run_followed
from mpgrad.wire.messages import Eager
from mpgrad.wire.tensor_packing import Packer
from mpgrad.wire.tensor_refs import with_more_behind

__all__ = ["Pool", "PoolWorker"]

GRAPHS = ("keep", "recompute", "eager")
ON_ERROR = ("raise", "return")
INLINE = ("auto", "never")
FIRST_LOOKED_AT = 4  # calls, for the classes of the user's modules that they bring
LEAD = 4e-3  # seconds of work that are packed before any of it is sent; doubles
FIRST_BATCH = 16  # items that are in any case: of a few dear ones all, so that the largest can be begun first
LARGEST_BATCH = 512  # items that are at most
BATCH_BYTES = 1 << 20  # of tensors copied, after which what is packed is sent in any case
WINDOW_PER_WORKER = 16  # items that `imap` takes ahead of what was asked for

SHORTEST_BUNDLE, LONGEST_BUNDLE = 4e-3, 20e-3  # seconds of work in a bundle of cheap items: the more, the further off the end
BUNDLES_PER_WORKER = 4  # at least, where there are items enough
MOST_BUNDLED = 48  # items: more win little, and a backward for one of them passes by all


class Pool:
    """Worker processes that run functions on tensors, forward and backward.

    Args:
        processes: number of workers; None for as many CPUs as this process may use (affinity and cgroup quota counted).
        initializer: called once in each worker, with `initargs`, before anything else.
        initargs: its arguments.
        maxtasksperchild: number of calls after which a worker is replaced; None for never.
        context: a start method or context of `multiprocessing`; None for mpgrad's own, which needs no
            ``if __name__ == "__main__"`` guard and starts a further worker in some 40 ms.
        threads_per_worker: intra-op threads of each worker process.
        engine: "process", the default; "thread" for functions that release the GIL (there they share the process's random
            generators, so that random numbers depend on timing); "inline" for debugging: everything runs in the caller's
            thread. In a task, whose pool has the CPUs already, the default is "inline" (with a `timeout`, "process"). "stream":
            threads that each have a CUDA stream of their own, for functions whose Python part is short; needs `devices`.
        deterministic: add up the gradients of captures in an order fixed by the items, so that two runs agree bit for bit
            (and with the serial loop, where each item uses a capture once). Otherwise each worker adds up its own, which
            sends less. `torch.use_deterministic_algorithms(True)` does the same for as long as it is on.
        retries: how often a call whose worker died is run again on another one, which makes lost graphs and gradients again;
            0 for never: what was lost then raises. Until its graph is dropped, a call's input is kept for this.
        timeout: seconds that a call, forward or backward, may take; past it, it is killed with its worker, and run again or
            given up like one whose worker died; starting a worker is no call. None for no limit. Engine "process" only.
        graphs: "keep"; or "recompute": workers keep no graphs, and a backward runs the forward again; or "eager": where a
            result is a loss (one float32 or float64 number, and nothing else that needs gradients), the worker runs the
            backward right after the forward, while the graph is hot in its cache, and keeps the gradients only; the caller's
            backward multiplies them by the gradient that comes. Gradients of captures are added up on the workers as if
            that were the same for all items of a map, as in a sum or a mean; where it turns out not to be, and with
            `create_graph` or batched gradients, forwards are run again. Half precision, autocast and anomaly mode keep graphs.
            So do functions whose backward may do more than multiply (with a `torch.autograd.Function`, or with
            `Tensor.register_hook`), once another gradient than one has come for such a function, and always with engines
            "thread" and "inline" (which do not notice hooks).
        graph_memory: bytes that the graphs in each worker may take, also as a text like "2 GiB"; beyond, the largest are
            dropped, and their backward runs the forward again. None for no limit. Memory of the CPU is what is measured.
        inline: "auto": calls of `map`, `starmap` and `apply` for which sending would take longer than running, as measured,
            run in the caller's thread, on private copies and with the same results; "never": all are sent to workers. With an
            `initializer`, a `timeout`, `progress`, `chunksize` or `devices` all are sent, and so are items that a generator
            makes, and calls that bring a class of the script (or another that no module can be imported for).
        devices: where the workers are: "cuda" for one on each GPU; a list with the device of each worker, such as
            ["cuda:0"] * 4 or ["cpu", "cpu", "cuda:0"]; or one device for all `processes`. None for the CPU. A worker that
            dies is replaced by one on the same device. Engines "process" and "stream" only.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type; names it and its value.
        UnsupportedTorchError: PyTorch as installed does not do what mpgrad relies on.

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
        threads_per_worker: int = 1,
        engine: str | None = None,
        deterministic: bool = False,
        retries: int = 2,
        timeout: float | None = None,
        graphs: str = "keep",
        graph_memory: int | str | None = None,
        inline: str = "auto",
        devices: Device | Sequence[Device] | None = None,
    ) -> None:
        behaviours.check()
        if engine is None:
            engine = "inline" if PLACE.in_worker and timeout is None else "process"
        self._traits = traits_of(engine)
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a function or None (initializer: {initializer!r})")
        if graphs not in GRAPHS:
            raise ValueError(f"graphs must be one of {', '.join(GRAPHS)} (graphs: {graphs!r})")
        if inline not in INLINE:
            raise ValueError(f"inline must be one of {', '.join(INLINE)} (inline: {inline!r})")
        graph_bytes = None if graph_memory is None else bytes_of("graph_memory", graph_memory)
        if processes is not None:
            positive("processes", processes)
        self._devices = worker_devices(devices, processes, engine, context)
        workers = len(self._devices) if self._devices is not None else usable_cpus() if processes is None else processes
        settings = Settings(
            workers=workers,
            initializer=pickled_initializer(initializer, tuple(initargs)),
            threads=positive("threads_per_worker", threads_per_worker),
            calls=None if maxtasksperchild is None else calls_of_a_worker(maxtasksperchild),
            retries=at_least("retries", retries, 0) if self._traits.is_process else 0,
            graph_bytes=0 if graphs == "recompute" else graph_bytes,
            devices=self._devices,
            in_process=not self._traits.is_process,
            eager=graphs == "eager",
        )
        self._eager = settings.eager
        self._engine = engine
        self._timeout = self._seconds(timeout)
        self._deterministic = deterministic
        self._processes = settings.workers
        self._uncollected = Uncollected()
        self._scheduler = start_engine(engine, settings, context)
        is_plain = initializer is None and self._timeout is None and self._devices is None
        self._may_stay = inline == "auto" and self._traits.is_process and is_plain
        counts_calls = settings.calls is not None or settings.graph_bytes is not None
        self._may_bundle = not (deterministic or counts_calls or self._timeout or self._devices)
        self._costs = Costs(self._scheduler.ran)
        OPEN.add(self._scheduler)
        # not a method of the pool: a finalizer that refers to it would keep it alive
        self._finalizer = weakref.finalize(self, self._scheduler.abandon)
        self._finalizer.atexit = False  # that is for `terminate_all`
        load_generators()

    # --- multiprocessing.Pool's interface

    @not_compiled
    def map(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        *,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: str = "raise",
        device: Device | None = None,
    ) -> list[Any]:
        """``[func(item) for item in iterable]`` on the workers.

        The first items are begun first; but of the last ones of a list, where calls take 10 ms or more, those with the largest
        tensors.

        Args:
            func: any function, also a lambda, closure, bound method, partial, module, or a `torch.autograd.Function` class.
                Tensors that it reaches are its captures; gradients flow to them too.
            iterable: tensors, or structures with tensors anywhere inside.
            chunksize: items that travel together; None for sizes that follow the measured cost of a call.
            progress: True or a description for a tqdm bar.
            timeout: seconds for each call; None for the pool's own `timeout`.
            on_error: "raise": the first failing item's exception is raised, and the others are cancelled. "return": each
                exception stands in the place of the result, and gradients flow to all other items.
            device: run on workers of this device ("cpu", "cuda:1", or "cuda" for any GPU), to which all tensors are moved. None
                for a worker where the item lies. Either way results and gradients come back to where they belong.

        Raises:
            Exception: what the first failing item raised, with a note that names item, worker and phase.
            TypeError, pickle.PicklingError: the function, an item or a result cannot be carried; says which. Where the pickling
                of an item raises something else, that is raised, with a note; and that of a result is a
                `multiprocessing.pool.MaybeEncodingError` too.
            WorkerDiedError: workers died while they ran one of the items, more often than it is retried.
            CallTimeoutError: one of the items took longer than `timeout`, likewise.
            PoolClosedError: after `close` or `terminate`.

        Example:
            >>> import torch, mpgrad
            >>> weight = torch.tensor(3.0, requires_grad=True)
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     results = pool.map(lambda x: weight * x.sum(), [torch.ones(2), torch.ones(5)])
            ...     sum(results).backward()
            >>> weight.grad
            tensor(7.)
        """
        calls: Iterable[Arguments] = (((item,), {}) for item in iterable)
        return self._map(func, calls, iterable, chunksize, progress, timeout, on_error, device)

    @not_compiled
    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        *,
        progress: Progress = False,
        timeout: float | None = None,
        on_error: str = "raise",
        device: Device | None = None,
    ) -> list[Any]:
        """``[func(*arguments) for arguments in iterable]`` on the workers; otherwise as `map`."""
        calls: Iterable[Arguments] = ((tuple(args), {}) for args in iterable)
        return self._map(func, calls, iterable, chunksize, progress, timeout, on_error, device)

    @not_compiled
    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: dict[str, Any] | None = None,
        *,
        device: Device | None = None,
    ) -> Any:
        """``func(*args, **kwds)`` on a worker."""
        return self._run(func, [(tuple(args), kwds or {})], 1, None, False, device=device, at_rest=True)[0]

    @not_compiled
    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        timeout: float | None = None,
        on_error: str = "raise",
        device: Device | None = None,
    ) -> AsyncResult:
        """`map` that returns at once. A callback runs in a thread of the pool, and may not wait for the pool."""
        calls: Iterable[Arguments] = (((item,), {}) for item in iterable)
        return self._map_async(func, calls, iterable, chunksize, callback, error_callback, timeout, on_error, device)

    @not_compiled
    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        timeout: float | None = None,
        on_error: str = "raise",
        device: Device | None = None,
    ) -> AsyncResult:
        """`starmap` that returns at once."""
        calls: Iterable[Arguments] = ((tuple(args), {}) for args in iterable)
        return self._map_async(func, calls, iterable, chunksize, callback, error_callback, timeout, on_error, device)

    @not_compiled
    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: dict[str, Any] | None = None,
        callback: Callable[[Any], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        device: Device | None = None,
    ) -> AsyncResult:
        """`apply` that returns at once."""
        calls = [(tuple(args), kwds or {})]
        fetch = operator.methodcaller("value", 0)
        return self._run_async(self._begin(func, device=device, like=calls), calls, callback, error_callback, fetch)

    @not_compiled
    def imap(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = 1,
        *,
        timeout: float | None = None,
        on_error: str = "raise",
        device: Device | None = None,
    ) -> ResultIterator:
        """`map` as an iterator: results in order, each as soon as it is there; takes only as many items as it needs."""
        operation = self._begin(
            func, chunksize, stop_at_failure=False, timeout=timeout, on_error=on_error, one_by_one=True, device=device
        )
        return self._iterate(operation, (((item,), {}) for item in iterable), ordered=True)

    @not_compiled
    def imap_unordered(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = 1,
        *,
        timeout: float | None = None,
        on_error: str = "raise",
        device: Device | None = None,
    ) -> ResultIterator:
        """`imap` with the results in the order in which they come."""
        operation = self._begin(
            func, chunksize, stop_at_failure=False, timeout=timeout, on_error=on_error, one_by_one=True, device=device
        )
        return self._iterate(operation, (((item,), {}) for item in iterable), ordered=False)

    def close(self) -> None:
        """Take no new calls. Those under way are finished, and backward still works until `join` or `terminate`."""
        self._scheduler.close()

    def terminate(self) -> None:
        """End the workers now. Results that have come stay valid; their graphs are gone."""
        self._scheduler.terminate()

    @without_own_frames
    def join(self) -> None:
        """Wait until all calls are done and the workers have ended.

        Raises:
            ValueError: the pool is still open.
        """
        self._scheduler.drain()
        self._scheduler.join()

    @property
    def processes(self) -> int:
        """The number of workers."""
        return self._processes

    @property
    def workers(self) -> tuple[PoolWorker, ...]:
        """Names for the workers, to be used as devices in `mpgrad.nn`."""
        return tuple(PoolWorker(self, number) for number in range(self._processes))

    def leave(self) -> None:
        """Take no new calls. Workers end when all is done and no graph that they keep is needed any more. Does not wait."""
        self._finalizer.detach()
        self._scheduler.leave()

    def resize(self, processes: int) -> None:
        """Have another number of workers. Those that are too many take no new calls, and end when they keep no graph any more.

        Raises:
            ValueError: less than one; the engine is "inline"; or the pool has devices, which say how many workers there are.
            PoolClosedError: after `close` or `terminate`.
        """
        if not self._traits.may_resize:
            raise ValueError("an inline pool has one worker, the caller itself (engine: 'inline')")
        if self._devices is not None:
            raise ValueError(f"a pool with devices has one worker for each of them; make another pool (processes: {processes})")
        self._scheduler.resize(positive("processes", processes))
        self._processes = processes

    def stats(self) -> PoolStats:
        """Memory, graphs, calls and deaths: of each worker, and of the pool.

        Example:
            >>> import mpgrad
            >>> with mpgrad.Pool(processes=1) as pool:
            ...     _ = pool.map(abs, range(10))
            ...     [(worker.calls, worker.graphs) for worker in pool.stats().workers]
            [(10, 0)]
        """
        return self._scheduler.stats(self._costs.calls_here)

    def __enter__(self) -> Pool:
        self._scheduler.check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """`terminate`, as in multiprocessing: ask for results, and call backward, inside the with block."""
        self.terminate()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool cannot be pickled, nor captured by a function that it runs; make one in the task instead")

    def __repr__(self) -> str:
        return f"<mpgrad.Pool processes={self._processes} engine={self._engine!r} {self._scheduler.state}>"

    # --- beyond it

    @not_compiled
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> DifferentiableFuture:
        """``fn(*args, **kwargs)`` on a worker, as a `concurrent.futures.Future` whose result is differentiable.

        A future may stand, anywhere, among the arguments of a further call (`submit`, `map`, `reduce` and friends): that call
        starts when its arguments are there, without anybody waiting here, and gradients flow through the graph of calls. A
        result that only calls ask for does not come to the caller's memory. Where a future's value has been asked for,
        further calls are given the value as it is then.

        In a pool with `devices`, the keyword `device` is the pool's, as for `map`; where `fn` has an argument of that name,
        give it with `functools.partial`.

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
            AncestorFailedError: a call that was to give an argument failed or was cancelled; that is the `__cause__`.
            concurrent.futures.CancelledError: the call was cancelled.
            Exception: what the call raised.
        """
        device = None if self._devices is None else kwargs.pop("device", None)
        operation = self._begin(fn, kind=Submitted, one_by_one=True, device=device, like=[(args, kwargs)])
        assert isinstance(operation, Submitted)
        future = DifferentiableFuture(self._scheduler, operation, self._uncollected)
        self._add_all(operation, [(args, kwargs)], borrow=False)
        return future

    def failed_call(self, error: BaseException) -> DifferentiableFuture:
        """The future of a call that could not be sent."""
        operation = self._begin(abs, kind=Submitted, one_by_one=True, pickled=pickled_function(abs), drawn=0)
        assert isinstance(operation, Submitted)
        future = DifferentiableFuture(self._scheduler, operation, self._uncollected)
        operation.added, operation.sealed = 1, True
        operation.fail(error)
        return future

    @not_compiled
    def synchronize(self) -> None:
        """Wait until all that was submitted up to now has ended: by `submit`, `map_async` and the like, or other threads.

        Raises:
            Exception: the first failure of a call whose future or result nobody has asked for; it is then forgotten.
        """
        self._scheduler.await_all()
        self._uncollected.surface()

    @not_compiled
    def reduce(
        self,
        fn: Callable[[Any, Any], Any] | str,
        items: Iterable[Any],
        targets: Any,
        *,
        associative: bool = False,
        progress: Progress = False,
    ) -> Any:
        """Fold all items into each target, in the items' order; the targets side by side.

        Args:
            fn: ``fn(target, item)`` returns the new target, or writes into the one it got and returns None; or the name of
                a reduction (see `map_reduce`), which takes the target as its first value.
            items: the items that every target takes in.
            targets: one target (a tensor or structure), or a list of them.
            associative: ``fn(fn(t, a), b) == fn(t, fn(a, b))``, so that the fold may be cut into blocks that run
                side by side; where it is cut depends on the number of items only. Items and targets are then of one kind.

        Returns:
            The folded target, or the list of them. The caller's targets are not changed, also not by in-place functions.

        Raises:
            ValueError: no reduction has the name `fn`. Otherwise as `map`.

        Example:
            >>> import torch, mpgrad
            >>> a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     total, other = pool.reduce(lambda target, item: target.add_(item), [a, b], [a * 10, b * 10])
            ...     (total * other).backward()
            >>> total, other, a.grad
            (tensor(25., grad_fn=<CallBackward>), tensor(35., grad_fn=<CallBackward>), tensor(410.))
        """
        reduction = reduction_named(fn)
        several = isinstance(targets, list)
        all_targets = targets if several else [targets]
        items = list(items)
        calls: list[Arguments]
        if isinstance(reduction, FunctionReduction) and not associative:
            fold: Callable[..., Any] = Fold(reduction)
            calls = [((target, items), {}) for target in all_targets]
        else:
            fold = Finish(reduction)
            blocks: list[Arguments] = [((block,), {}) for block in blocks_of(items)]
            accumulators = self._run(Block(reduction), blocks, len(blocks), 1, progress, noun="block", at_rest=True)
            calls = [(([target], accumulators), {}) for target in all_targets]
        folded = self._run(fold, calls, len(calls), 1, progress, shared={}, noun="target")
        return folded if several else folded[0]

    @not_compiled
    def map_reduce(
        self,
        map_fn: Callable[[Any], Any],
        items: Iterable[Any],
        reduce_fn: Callable[[Any, Any], Any] | str,
        init: Any = None,
        *,
        progress: Progress = False,
    ) -> Any:
        """``functools.reduce(reduce_fn, map(map_fn, items))``; mapped values stay on the workers, accumulators travel.

        Args:
            map_fn: applied to each item.
            items: at least one item, unless there is an `init`.
            reduce_fn: an associative function of an accumulator and a value, which returns the new accumulator or writes
                into the one it got; or one of "sum", "mean", "max", "min", "logsumexp" (elementwise over the items),
                "cat", "stack" (along dimension 0). Blocks of items are folded side by side and merged in order; how they
                are cut depends on the number of items only.
            init: the first value, or None for none.

        Raises:
            TypeError: no items and no `init`. Otherwise as `map`.

        Example:
            >>> import torch, mpgrad
            >>> items = [torch.full((2,), float(i), requires_grad=True) for i in range(4)]
            >>> with mpgrad.Pool(processes=2) as pool:
            ...     total = pool.map_reduce(lambda x: x ** 2, items, "sum")
            ...     total.sum().backward()
            >>> total.detach(), items[3].grad
            (tensor([14., 14.]), tensor([6., 6.]))
        """
        reduction = reduction_named(reduce_fn)
        blocks: list[Arguments] = [((block,), {}) for block in blocks_of(list(items))]
        if not blocks and init is None:
            raise TypeError("map_reduce of no items needs a first value (init: None)")
        accumulators = self._run(
            Block(reduction, callable_of(map_fn)), blocks, len(blocks), 1, progress, noun="block", at_rest=True
        )
        first = [] if init is None else [init]
        return self._run(Finish(reduction), [((first, accumulators), {})], 1, 1, False, noun="target")[0]

    # --- how they all run

    def _begin(
        self,
        function: Callable[..., Any],
        chunksize: int | None = None,
        stop_at_failure: bool = True,
        noun: str = "item",
        modes: Modes | None = None,
        timeout: float | None = None,
        on_error: str = "raise",
        kind: type[Operation] = Operation,
        device: Device | None = None,
        one_by_one: bool = False,
        first: int = 0,
        pickled: PickledFunction | None = None,
        drawn: int | None = None,
        at_rest: bool = False,
        like: Sequence[Arguments] = (),
    ) -> Operation:
        """`first`: the item of the first call; `pickled`, `drawn`: the function and the map's seed, where these are there.

        `like`: the arguments of some of the calls.
        """
        function = under_hooks(callable_of(function))
        check_untraced()
        check_chunksize(chunksize)
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)} (on_error: {on_error!r})")
        seconds = self._timeout if timeout is None else self._seconds(timeout)
        scheduler = self._scheduler
        scheduler.check_open()
        with outside_transforms():
            request = requested(device, self._devices)
            pickled = pickled or pickled_function(function, scheduler.packer.kind, like)
            shared = SharedFunction(pickled, scheduler.packer, scheduler.forget_function, request)
            home = OperationHome(scheduler, shared, self._deterministic, seconds)
            needing = [tensor for tensor in pickled.captures if tensor.requires_grad]
            captures = Captures(home, needing, with_more_behind(shared.refs)) if needing else None
        seed = drawn if drawn is not None else self._draw_seed() if modes is None else None
        conditions = Conditions(shared, modes or current_modes(scheduler.packer.kind), seed, first)
        options = OperationOptions(
            chunksize=chunksize,
            stop_at_failure=stop_at_failure and on_error == "raise",
            return_errors=on_error == "return",
            noun=noun,
            timeout=seconds,
            request=request,
            eager=self._eagerness(one_by_one),
            at_rest=at_rest,
        )
        return kind(conditions, home, captures, options)

    def _eagerness(self, one_by_one: bool) -> int:
        if not self._eager:
            return Eager.NO
        deterministic = self._deterministic or torch.are_deterministic_algorithms_enabled()
        return Eager.APART if one_by_one or deterministic else Eager.SUMS

    def _seconds(self, timeout: float | None) -> float | None:
        if timeout is None:
            return None
        if not self._traits.is_process:
            raise ValueError(f"a timeout needs workers that can be killed: engine 'process' (engine: {self._engine!r})")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, or None (timeout: {timeout!r})")
        if not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds (timeout: {timeout})")
        return float(timeout)

    def _draw_seed(self) -> int | None:
        return draw_seed() if self._traits.own_generators else None

    def _add_all(
        self,
        operation: Operation,
        calls: Iterable[Arguments],
        *,
        borrow: bool,
        shared: Shared | None = None,
        seal: bool = True,
        total: int | None = None,
    ) -> None:
        """Pack the calls, and let the workers begin with the first ones meanwhile.

        `borrow`: former results among the arguments are read where they lie. That needs a caller who waits: one that goes on
        could change them in place before they are read. `seal`: there will be no more calls. `total`: of how many calls these
        are, where cheap ones may go in bundles.
        """
        packer = self._scheduler.packer if borrow else self._scheduler.copying_packer
        batch, packed, copied = self._first_batch(operation), 0, packer.bytes_copied
        try:
            for call in self._packed(operation, iter(calls), packer, shared, total):
                operation.add(call)
                packed += call.items
                if packed >= batch or packer.bytes_copied - copied > BATCH_BYTES:
                    self._scheduler.admit(operation, waits=borrow)
                    let_collector_look()
                    batch, packed, copied = min(2 * batch, LARGEST_BATCH), 0, packer.bytes_copied
            operation.sealed = seal
            self._scheduler.admit(operation, waits=borrow)
        except BaseException:
            self._scheduler.call_off(operation)
            raise

    def _first_batch(self, operation: Operation) -> int:
        """How many items are packed before the workers hear of them.

        Once they do, they take the CPUs, the caller's too where there are no more; and when it is its turn again its caches are
        cold, and they have run dry. So of cheap items, which are packed in no time, the caller packs many first. That would be
        too late for many workers, of which the first few leave it its CPU: so it does not depend on how many there are.
        """
        ran = self._scheduler.ran(operation.function.pickled)
        seconds = math.inf if ran is None else max(ran.total, 1e-9)
        return min(LARGEST_BATCH, max(FIRST_BATCH, math.ceil(LEAD / seconds)))

    def _packed(
        self, operation: Operation, calls: Iterator[Arguments], packer: Packer, shared: Shared | None, total: int | None
    ) -> Iterator[PackedCall]:
        """The calls, one by one; or, as soon as they are known to be cheap, in bundles."""
        first = operation.conditions.first
        packing = Packing(packer, operation.modes.grad, operation.request, operation.function.state, shared)

        def alone(args: Sequence[Any], kwargs: dict[str, Any]) -> PackedCall:
            return pack_call(packing, operation.added, args, kwargs, first + operation.items)

        size = self._bundle_size(operation, total)
        while size != 1 and (some := list(itertools.islice(calls, size or 1))):
            item = first + operation.items
            bundle = None if size is None else pack_bundle(packing, operation.added, some, item)
            if bundle is not None:
                yield bundle
            else:
                yield from itertools.starmap(alone, some)
            if bundle is None and size is not None:
                break  # items of this kind have calls of their own
            size = self._bundle_size(operation, total)
        yield from itertools.starmap(alone, calls)

    def _bundle_size(self, operation: Operation, total: int | None) -> int | None:
        """Of how many items; None where it is not known yet what they cost."""
        if total is None:
            return 1
        ran = self._scheduler.ran(operation.function.pickled)
        if ran is None:
            return None
        return bundle_size(ran.total, total, total - operation.conditions.first - operation.items, self._processes)

    def _map(
        self,
        function: Callable[..., Any],
        calls: Iterable[Arguments],
        source: Iterable[Any],
        chunksize: int | None,
        progress: Progress,
        timeout: float | None,
        on_error: str,
        device: Device | None,
    ) -> list[Any]:
        """`calls` are made of the items of `source`, one of each."""
        bundles = progress is False and self._goes_in_bundles(source, chunksize, timeout, on_error)
        return self._run(
            function,
            calls,
            length(source),
            chunksize,
            progress,
            timeout=timeout,
            on_error=on_error,
            device=device,
            at_rest=is_at_rest(source),
            bundles=bundles,
        )

    def _map_async(
        self,
        function: Callable[..., Any],
        calls: Iterable[Arguments],
        source: Iterable[Any],
        chunksize: int | None,
        callback: Callable[[Any], object] | None,
        error_callback: Callable[[BaseException], object] | None,
        timeout: float | None,
        on_error: str,
        device: Device | None,
    ) -> AsyncResult:
        at_rest = is_at_rest(source)
        check_chunksize(chunksize)
        like, calls = first_of(calls, at_rest)
        operation = self._begin(
            function, chunksize, timeout=timeout, on_error=on_error, device=device, at_rest=at_rest, like=like
        )
        total = length(source) if self._goes_in_bundles(source, chunksize, timeout, on_error) else None
        return self._run_async(operation, calls, callback, error_callback, total=total)

    def _goes_in_bundles(self, source: Iterable[Any], chunksize: int | None, timeout: float | None, on_error: str) -> bool:
        """Whether several items of a map over `source` may go as one call: nothing is asked of each of them."""
        if not self._may_bundle or torch.are_deterministic_algorithms_enabled():
            return False
        return is_at_rest(source) and chunksize is None and timeout is None and on_error == "raise"

    def _run(
        self,
        function: Callable[..., Any],
        calls: Iterable[Arguments],
        total: int | None,
        chunksize: int | None,
        progress: Progress,
        shared: Shared | None = None,
        noun: str = "item",
        modes: Modes | None = None,
        timeout: float | None = None,
        on_error: str = "raise",
        device: Device | None = None,
        at_rest: bool = False,
        bundles: bool = False,
    ) -> list[Any]:
        """`at_rest`: the calls are there already, and cheap ones may run in the caller's thread; `bundles`: or go together."""
        if modes is None and may_be_followed():
            check_untraced()
            if on_error == "return":
                raise NotImplementedError("on_error='return' is not for torch.func transforms and dual tensors; use 'raise'")
            calls = list(calls)
            run = functools.partial(
                self._run, total=total, chunksize=chunksize, progress=progress, noun=noun, timeout=timeout, device=device
            )
            results = run_followed(callable_of(function), calls, self._draw_seed, run)
            if results is not None:
                return results
        plain = chunksize is None and timeout is None and progress is False and on_error in ON_ERROR
        if at_rest and plain and self._may_stay and may_run_here():
            return self._run_adaptively(function, calls, total, on_error, device, bundles)
        check_chunksize(chunksize)
        like, calls = first_of(calls, at_rest)
        operation = self._begin(
            function,
            chunksize,
            noun=noun,
            modes=modes,
            timeout=timeout,
            on_error=on_error,
            device=device,
            at_rest=at_rest,
            like=like,
        )
        wait_until = self._scheduler.wait_until
        try:
            with progress_bar(progress, total) as move_to:
                with collector_held():
                    self._add_all(operation, calls, borrow=True, shared=shared, total=total if bundles else None)
                    finished = move_to is None and wait_until(lambda: operation.finished, LONGEST_HOLD)
                if move_to is not None:
                    self._watch(operation, move_to)
                elif not finished:
                    wait_until(lambda: operation.finished)
        except BaseException:  # KeyboardInterrupt, above all
            self._scheduler.call_off(operation)
            raise
        with collector_held():
            return operation.values()

    def _run_adaptively(
        self,
        function: Callable[..., Any],
        calls: Iterable[Arguments],
        total: int | None,
        on_error: str,
        device: Device | None,
        bundles: bool,
    ) -> list[Any]:
        requested(device, self._devices)  # refuses what cannot be
        check_untraced()
        self._scheduler.check_open()
        function = callable_of(function)
        like, calls = first_of(calls, at_rest=True)
        pickled, drawn = pickled_function(function, first=like), self._draw_seed()
        begin = functools.partial(self._begin, function, on_error=on_error, pickled=pickled, drawn=drawn, at_rest=True)
        add = functools.partial(self._add_all, borrow=True, total=total if bundles else None)
        return AdaptiveMap(pickled, self._costs, self._processes, begin, add, self._scheduler).run(calls, total)

    def _watch(self, operation: Operation, move_to: Callable[[int], None]) -> None:
        while True:
            finished, done = operation.finished, operation.delivered
            move_to(done)
            if finished:
                return
            self._scheduler.wait_until(lambda done=done: operation.finished or operation.delivered > done)  # type: ignore[misc]

    def _run_async(
        self,
        operation: Operation,
        calls: Iterable[Arguments],
        callback: Callable[[Any], object] | None,
        error_callback: Callable[[BaseException], object] | None,
        fetch: Callable[[Operation], Any] = Operation.values,
        total: int | None = None,
    ) -> AsyncResult:
        result = AsyncResult(self._scheduler, operation, fetch, callback, error_callback, self._uncollected)
        with contextlib.nullcontext() if total is None else collector_held():  # a generator may take long
            self._add_all(operation, calls, borrow=False, total=total)
        return result

    def results_of(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None, window: int | None
    ) -> ResultIterator:
        """`starmap` as an iterator that takes `window` items ahead of the results; all at once where that is None."""
        operation = self._begin(func, chunksize, stop_at_failure=False, one_by_one=True)
        calls: Iterable[Arguments] = ((tuple(args), {}) for args in iterable)
        return self._iterate(operation, calls, ordered=True, window=math.inf if window is None else window)

    def _iterate(
        self, operation: Operation, calls: Iterable[Arguments], ordered: bool, window: float | None = None
    ) -> ResultIterator:
        packer = self._scheduler.copying_packer
        if window is None:
            window = WINDOW_PER_WORKER * self._processes * (operation.chunksize or 1)
        pack = functools.partial(pack_call, Packing(packer, operation.modes.grad, operation.request, operation.function.state))
        packs = (functools.partial(pack, index, args, kwargs) for index, (args, kwargs) in enumerate(calls))
        return ResultIterator(self._scheduler, operation, packs, window, ordered)


def first_of(calls: Iterable[Arguments], at_rest: bool) -> tuple[Sequence[Arguments], Iterable[Arguments]]:
    """What the first few calls are given, if there is anything but tensors; and all calls. Only of those that are `at_rest`."""
    if not at_rest:
        return (), calls
    calls = iter(calls)
    head = list(itertools.islice(calls, FIRST_LOOKED_AT))
    others = [call for call in head if call[1] or not all(isinstance(value, torch.Tensor) for value in call[0])]
    return others, itertools.chain(head, calls)


class PoolWorker:
    """One of the workers of a pool, as a name for a share of work; which process does the share is the pool's business."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool = pool
        self.number = number

    def __deepcopy__(self, memo: object) -> PoolWorker:
        return self

    def __repr__(self) -> str:
        return f"<worker {self.number} of {self.pool!r}>"


OPEN: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def terminate_all() -> None:
    for scheduler in list(OPEN):
        scheduler.terminate()


atexit.register(terminate_all)


def bundle_size(seconds: float, total: int, left: int, workers: int) -> int:
    """How many of the `left` ones of `total` items, of so many seconds each, go together: some for each worker that is fed."""
    most = min(MOST_BUNDLED, total // (BUNDLES_PER_WORKER * fed(workers, total, seconds)))
    return max(1, min(most, guided_size(seconds, left, workers, SHORTEST_BUNDLE, LONGEST_BUNDLE)))


def callable_of(function: object) -> Callable[..., Any]:
    """`function` itself, or the `apply` of an `autograd.Function`; a context of PyTorch's own serves it in the worker."""
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        apply: Callable[..., Any] = function.apply
        return apply
    if not callable(function):
        raise TypeError(f"the function must be callable (given: {function!r})")
    return function


def check_untraced() -> None:
    if (by := tracer()) is not None:
        raise RuntimeError(f"a pool call cannot be traced, its result would be taken for a constant (by: {by})")


def pickled_initializer(initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> bytes:
    try:
        return classes.dumps((initializer, initargs))
    except Exception as error:
        given = {"initializer": initializer, "initargs": initargs}
        not_carried(error, "the initializer or its arguments", given)


def check_chunksize(chunksize: object) -> None:
    if isinstance(chunksize, Iterable):
        raise TypeError(
            "one iterable of items is taken, and what follows it is the chunksize; for functions of several arguments use "
            f"pool.starmap(function, zip(first, second)) (chunksize: a {type(chunksize).__name__})"
        )
    if chunksize is not None:
        positive("chunksize", chunksize)


def positive(name: str, number: object) -> int:
    return at_least(name, number, 1)


def calls_of_a_worker(number: int) -> int:
    try:
        return positive("maxtasksperchild", number)
    except TypeError as error:  # multiprocessing.Pool says so of any type
        raise ValueError(*error.args) from None


def at_least(name: str, number: object, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an integer ({name}: {number!r})")
    if number < least:
        raise ValueError(f"{name} must be at least {least} ({name}: {number})")
    return number


def length(iterable: Iterable[Any]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
