"""The work of a pool's public methods: to run an operation while the caller waits, in the
background, or as far as the caller needs its results. This module runs in the caller only.

    function, source, options ──► starting.py ──► Feeder ──► wait, or hand out an AsyncResult,
                                                             an iterator, a future
    Feeder: calls ──► alone, or in bundles once they are known to be cheap
        ──► `scheduler.admit`, window by window
A reduction is several operations, one after another. Their functions are in `tasks/wrappers.py`:

    [1] blocks of items, folded in parallel ──► accumulators
        ──► [2] one fold of the accumulators for each target
Every call is sent, so the effects of a call never depend on how long it takes. Whether sending pays
is not known beforehand. But workers report how long the calls of a map took by themselves, and a
loop would take the sum of these times. If maps of a function take much longer, a warning reports
it once, and names a remedy (`CheapCalls`).

The collector of cycles pauses while an operation makes its many small objects.
Guarantees: if the caller is interrupted while it waits, the operation is cancelled with grace. An
    operation gets all its calls and is sealed, or it is cancelled. After a call has failed it gets
    no more calls. Values that the caller's code may change are copied when they are packed, before
    that code runs on. They are not copied if the caller waits for the results and all items are at
    rest.
Assumes: one thread feeds an operation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.callbacks import report
from mpgrad.calls.operations import Operation, SubmittedOperation
from mpgrad.calls.packing import (
    Arguments,
    PackedCall,
    PackingOptions,
    Shared,
    pack_bundle,
    pack_call,
)
from mpgrad.collector import LONGEST_HOLD, collector_held, let_collector_look
from mpgrad.errors import ONE_CALL
from mpgrad.machine.policy import LARGEST_WINDOW, WINDOW_BYTES, bundle_size, first_window
from mpgrad.pickling.state import largest_part
from mpgrad.progress import Progress, ProgressState, Reporter, reported, reporter_of
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.submission.options import CallOptions, PoolOptions
from mpgrad.submission.results import AsyncResult, DifferentiableFuture, ResultIterator
from mpgrad.submission.starting import Source, Starter, callable_of, check_untraced, first_of
from mpgrad.tasks.wrappers import (
    FinalMerge,
    Fold,
    FoldedBlock,
    FunctionReduction,
    blocks_of,
    reduction_named,
)
from mpgrad.torch_state.modes import Modes, current_modes
from mpgrad.transforms import Run, may_be_followed, run_followed
from mpgrad.wire.tensor_refs import Packer

__all__ = [
    "CheapCalls",
    "Feeder",
    "Submitter",
    "folded_into",
    "mapped_and_folded",
]

# items per worker that `imap` takes ahead of the results, unless the caller sets a window
WINDOW_PER_WORKER = 16
AS_USUAL = CallOptions()


class Submitter:
    """Begins all operations of a pool. The workers live at least as long as this object."""

    def __init__(self, options: PoolOptions, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._may_bundle = options.may_bundle
        self.starter = Starter(options, scheduler)
        self.feeder = Feeder(scheduler)
        # Devices are not measured, because kernels go on after the call.
        is_measured = not options.traits.in_caller and options.device_codes is None
        self.cheap_calls = CheapCalls(scheduler) if is_measured else None

    def run(
        self,
        function: Callable[..., Any],
        source: Source,
        options: CallOptions,
        *,
        shared: Shared | None = None,
        modes: Modes | None = None,
    ) -> list[Any]:
        """Run the operation, and return all results.

        `shared` remembers the tensors that calls have in common. `modes` are set if no transform
        may follow the calls any more; such calls draw no random numbers.
        """
        started = time.perf_counter()
        if modes is None and may_be_followed():
            self.starter.check_modes()
            if options.on_error == "return":
                raise NotImplementedError(
                    "on_error='return' is not for torch.func transforms and dual tensors; use "
                    "'raise'"
                )
            given = list(source.calls)
            run = self._unfollowed(options, source.noun)
            results = run_followed(
                callable_of(function), given, source.items, self.starter.draw_seed, run
            )
            if results is not None:
                return results
            source = source._replace(calls=given)
        like, calls = first_of(source)
        operation = self.starter.begin(
            function,
            options,
            like=like,
            items=source.items,
            modes=modes,
            noun=source.noun,
            at_rest=source.at_rest,
        )
        answers = self._scheduler.receiver.answers
        try:
            look = functools.partial(standing_of, operation, source.total)
            with reported(self._scheduler.callbacks, options.progress, look) as reporter:
                if reporter is not None:
                    calls = reporter.at_each(calls)
                with collector_held():
                    self.feeder.feed(
                        operation,
                        calls,
                        waits=True,
                        shared=shared,
                        total=self._to_bundle(source, options),
                    )
                    finished = self._scheduler.wait_until(lambda: operation.finished, LONGEST_HOLD)
                if not finished:
                    self._scheduler.wait_until(lambda: operation.finished)
        except BaseException:  # KeyboardInterrupt, above all
            self._scheduler.cancel_with_grace(operation)
            raise
        with collector_held(), self._scheduler.tracer.span("makes results"):
            results = operation.values()
        is_map = source.at_rest and source.noun != ONE_CALL
        is_fair = (
            is_map and modes is None and options.on_error == "raise" and operation.names.function
        )
        if is_fair and self.cheap_calls is not None:
            self.cheap_calls.note(function, operation, time.perf_counter() - started, answers)
        return results

    def _unfollowed(self, options: CallOptions, noun: str) -> Run:
        """Return the function that runs maps and their derivatives for a transform. The transform's
        graph refers to it, and so keeps the pool's workers alive."""

        def run(function: Callable[..., Any], calls: list[Arguments], *, modes: Modes) -> list[Any]:
            return self.run(
                function,
                Source(calls, len(calls), at_rest=True, noun=noun, items=calls),
                options,
                modes=modes,
            )

        return run

    def _to_bundle(self, source: Source, options: CallOptions) -> int | None:
        """Return the number of calls if some of them may be bundled, or None if each is sent by
        itself."""
        if not (self._may_bundle and source.at_rest and options.may_bundle):
            return None
        return (
            None
            if source.total == 1 or torch.are_deterministic_algorithms_enabled()
            else source.total
        )

    def run_async(
        self,
        function: Callable[..., Any],
        source: Source,
        options: CallOptions,
        callback: Callable[[Any], object] | None,
        error_callback: Callable[[BaseException], object] | None,
        fetch: Callable[[Operation], Any] = Operation.values,
    ) -> AsyncResult[Any]:
        """Start the operation, and return its `AsyncResult`, whose value `fetch` makes."""
        like, calls = first_of(source)
        begin = functools.partial(
            self.starter.begin,
            function,
            options,
            like=like,
            items=source.items,
            noun=source.noun,
            at_rest=source.at_rest,
        )
        report = self._reporting(options.progress, source.total)
        result = AsyncResult(self._scheduler, begin, fetch, callback, error_callback, report)
        total = self._to_bundle(source, options)
        # The collector is not held if a generator makes the items, because that may take long.
        with contextlib.nullcontext() if total is None else collector_held():
            self.feeder.feed(result._operation, calls, waits=False, total=total)
        return result

    def iterate(
        self,
        function: Callable[..., Any],
        source: Source,
        options: CallOptions,
        *,
        ordered: bool = True,
        window: float | None = None,
    ) -> ResultIterator[Any]:
        """Return an iterator over the results.

        It takes up to `window` items ahead of the results, a chunk at a time.
        """
        begin = functools.partial(
            self.starter.begin,
            function,
            options,
            items=source.items,
            stop_at_failure=False,
            one_by_one=True,
        )
        step = 1 if window is None else options.chunksize or 1
        if window is None:
            window = WINDOW_PER_WORKER * self._scheduler.settings.workers * (options.chunksize or 1)
        report = self._reporting(options.progress, source.total)
        calls, packing = iter(source.calls), self.feeder.packing
        return ResultIterator(self._scheduler, begin, calls, packing, window, ordered, report, step)

    def _reporting(
        self, progress: Progress, total: int | None
    ) -> Callable[[Operation], Reporter | None]:
        """Return a function that makes the progress reporter of an operation."""
        return lambda operation: reporter_of(
            self._scheduler.callbacks, progress, functools.partial(standing_of, operation, total)
        )

    def submit(self, function: Callable[..., Any], call: Arguments) -> DifferentiableFuture[Any]:
        """Start one call, and return its future, which may be passed to other calls."""
        future = self._begin_submitted(function, [call])
        self.feeder.feed_one(future._operation, call)
        return future

    def failed_call(self, error: BaseException) -> DifferentiableFuture[Any]:
        """Return the future of a call that could not be sent."""
        check_untraced()
        future = self._begin_submitted(abs, (), current_modes())
        operation = future._operation
        operation.added, operation.sealed = 1, True
        operation.deliver(0, error)
        return future

    def _begin_submitted(
        self, function: Callable[..., Any], like: Sequence[Arguments], modes: Modes | None = None
    ) -> DifferentiableFuture[Any]:
        begin: Callable[..., Any] = functools.partial(
            self.starter.begin,
            function,
            AS_USUAL,
            like=like,
            items=(),
            modes=modes,
            noun=ONE_CALL,
            one_by_one=True,
            kind=SubmittedOperation,
        )
        return DifferentiableFuture(self._scheduler, begin)


def standing_of(operation: Operation, total: int | None) -> ProgressState:
    """Return the operation's progress. `total` is the number of its calls, if it is known."""
    # A failure also ends the packing.
    all_there = operation.added if total is None and operation.finished else total
    return ProgressState(operation.items_delivered, all_there, operation.finished)


# --- reductions


def folded_into(
    submitter: Submitter,
    fn: Callable[[Any, Any], Any] | str,
    items: Sequence[Any],
    targets: Sequence[Any],
    associative: bool,
    progress: Progress,
) -> list[Any]:
    """Return each target with all items folded into it; see `Pool.reduce`."""
    reduction = reduction_named(fn)
    if isinstance(reduction, FunctionReduction) and not associative:
        fold: Callable[..., Any] = Fold(reduction)
        calls: list[Arguments] = [((target, items), {}) for target in targets]
    else:
        fold = FinalMerge(reduction)
        accumulators = accumulated(submitter, FoldedBlock(reduction), items, progress)
        calls = [(([target], accumulators), {}) for target in targets]
    return run_targets(submitter, fold, calls, progress)


def mapped_and_folded(
    submitter: Submitter,
    map_fn: Callable[[Any], Any],
    items: Sequence[Any],
    reduce_fn: Callable[[Any, Any], Any] | str,
    init: Any,
    progress: Progress,
) -> Any:
    """Return the mapped items folded together, starting with `init` if it is given; see
    `Pool.map_reduce`."""
    reduction = reduction_named(reduce_fn)
    if not items and init is None:
        raise TypeError("map_reduce of no items needs an initial value (init: None)")
    accumulators = accumulated(
        submitter, FoldedBlock(reduction, callable_of(map_fn)), items, progress
    )
    first = [] if init is None else [init]
    return run_targets(submitter, FinalMerge(reduction), [((first, accumulators), {})])[0]


def accumulated(
    submitter: Submitter, block: FoldedBlock, items: Sequence[Any], progress: Progress
) -> list[Any]:
    """Fold each block of items, and return the accumulators: step [1]."""
    calls: list[Arguments] = [((each,), {}) for each in blocks_of(items)]
    source = Source(calls, len(calls), at_rest=True, noun="block", items=calls)
    return submitter.run(block, source, CallOptions(chunksize=1, progress=progress))


def run_targets(
    submitter: Submitter,
    fold: Callable[..., Any],
    calls: list[Arguments],
    progress: Progress = False,
) -> list[Any]:
    """Fold the accumulators for each target: step [2]. Tensors that the calls have in common are
    packed once."""
    source = Source(calls, len(calls), at_rest=True, noun="target", items=calls)
    return submitter.run(fold, source, CallOptions(chunksize=1, progress=progress), shared={})


# --- calls that are not worth sending


MUCH = 1.5  # times as long as the calls by themselves
# slow maps in a row before the warning; a single map may be slow because the machine is busy
MAPS = 3
# seconds; if calls take longer on average, their number is not what makes a map slow
CHEAP = 5e-3
MOST_FUNCTIONS = 128

# hashes of the pickles of the functions that this process has warned about
TOLD: dict[int, object] = {}


class CheapCalls:
    """Warns about functions of a pool whose last maps took much longer than their calls."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._receiver = scheduler.receiver
        # seconds of maps, of their calls, and of checking the function, by hash of the pickle
        self._slow: dict[int, list[tuple[float, float, float]]] = {}

    def note(
        self, function: Callable[..., Any], operation: Operation, seconds: float, answers: int
    ) -> None:
        """Note that a map of the function took `seconds`.

        The pool had received `answers` answers when the map began. If it has now received more than
        this map's, workers also did something else, and the map may have waited for that.

        Assumes: the comparison is fair, because all items existed when the map began, and the
        caller waited for it.
        """
        shared = operation.options.function
        if (
            shared.is_new
            or self._receiver.answers - answers != operation.items
            or not operation.items
        ):
            return
        key = hash(shared.pickled)
        if key in TOLD:
            return
        if seconds <= MUCH * operation.own_seconds:
            self._slow.pop(key, None)
            return
        maps = self._slow.setdefault(key, [])
        maps.append((seconds, operation.own_seconds, shared.seconds))
        if len(self._slow) > MOST_FUNCTIONS:
            self._slow.clear()
        if len(maps) < MAPS:
            return
        mine = object()
        if TOLD.setdefault(key, mine) is not mine:  # another thread was faster
            return
        whole, own, looking = (1e3 * sum(each) for each in zip(*maps, strict=True))
        what = "%s%s is too cheap for a pool: "
        remedy = "use larger items, several items in one call, or a plain loop"
        if operation.own_seconds > CHEAP * operation.items:
            what = "%s%s gains nothing from a pool: "
            remedy = "its arguments are expensive to send, or other programs use the CPUs"
        if looking > whole / 4:
            largest = largest_part(function, shared.state) or "its captures"
            remedy = (
                f"checking {largest} for changes took {looking:.3g} ms of this; make it smaller, "
                "or set it in the initializer of the pool; make arrays read-only"
            )
        report(
            logging.WARNING,
            what + "its last %d maps took %.3g ms, and the calls alone %.3g ms; %s",
            shared.names.function,
            place_of(function),
            MAPS,
            whole,
            own,
            remedy,
        )


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is defined, such as " (/home/me/fit.py:12)"; "" for C code."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


# --- how an operation gets its calls


class Feeder:
    """Packs calls into operations. How many it packs at a time depends on their cost and on the
    number of workers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def feed(
        self,
        operation: Operation,
        calls: Iterable[Arguments],
        *,
        waits: bool,
        shared: Shared | None = None,
        total: int | None = None,
    ) -> None:
        """Pack the calls, and let the workers begin with the first ones before all are packed.

        `waits` is true if the caller waits for all results. `total` is the number of calls if cheap
        ones may be bundled.

        Arguments that are earlier results are not copied if none of the caller's code runs until
        they are read. Such code could change them in place.
        """
        scheduler = self._scheduler
        is_still = waits and operation.options.at_rest
        packer = scheduler.packer if is_still else scheduler.copying_packer
        window_size, packed, copied = self._first_window(operation), 0, packer.bytes_copied
        try:
            with scheduler.tracer.span("packs", operation.options.function.names.function):
                for call in self._packed(operation, iter(calls), packer, shared, total):
                    operation.add(call)
                    packed += call.items
                    if packed >= window_size or packer.bytes_copied - copied > WINDOW_BYTES:
                        scheduler.admit(operation, waits=waits)
                        let_collector_look()
                        window_size, packed, copied = (
                            min(2 * window_size, LARGEST_WINDOW),
                            0,
                            packer.bytes_copied,
                        )
                    # As in a loop, later items are not even taken from their source.
                    if operation.has_failed:
                        break
                operation.sealed = True
                scheduler.admit(operation, waits=waits)
        except BaseException:
            scheduler.cancel_with_grace(operation)
            raise

    def feed_one(self, operation: Operation, call: Arguments) -> None:
        """Pack the only call of an operation. The caller does not wait for it yet."""
        scheduler = self._scheduler
        try:
            with scheduler.tracer.span("packs", operation.names.function):
                operation.add(pack_call(self.packing(operation), 0, *call))
            operation.sealed = True
            scheduler.admit(operation)
        except BaseException:
            scheduler.cancel_with_grace(operation)
            raise

    def packing(
        self, operation: Operation, packer: Packer | None = None, shared: Shared | None = None
    ) -> PackingOptions:
        """Return how the operation's calls are packed. Without a `packer`, arguments are copied."""
        options, packer = operation.options, packer or self._scheduler.copying_packer
        grad, state = options.modes.grad, options.function.state
        return PackingOptions(packer, grad, operation.streams, options.request, state, shared)

    def _first_window(self, operation: Operation) -> int:
        seconds = self._scheduler.functions.own_seconds(operation.options.function.pickled)
        return first_window(math.inf if seconds is None else seconds)

    def _packed(
        self,
        operation: Operation,
        calls: Iterator[Arguments],
        packer: Packer,
        shared: Shared | None,
        total: int | None,
    ) -> Iterator[PackedCall]:
        """Pack the calls one by one, and in bundles once they are known to be cheap."""
        packing = self.packing(operation, packer, shared)
        size = self._bundle_size(operation, total)
        while size != 1 and (some := list(itertools.islice(calls, most_of(operation, size)))):
            bundle = (
                None
                if size is None
                else pack_bundle(packing, operation.added, some, operation.items)
            )
            if bundle is None and size is not None:
                # Items of this kind cannot be bundled.
                calls = itertools.chain(some, calls)
                break
            yield bundle or pack_call(packing, operation.added, *some[0], operation.items)
            size = self._bundle_size(operation, total)
        for args, kwargs in calls:
            yield pack_call(packing, operation.added, args, kwargs, operation.items)

    def _bundle_size(self, operation: Operation, total: int | None) -> int | None:
        """Return the number of items in the next bundle, or None if their cost is unknown."""
        if total is None:
            return 1
        seconds = self._scheduler.functions.own_seconds(operation.options.function.pickled)
        if seconds is None:
            return None
        return bundle_size(
            seconds, total, total - operation.items, self._scheduler.settings.workers
        )


def most_of(operation: Operation, size: int | None) -> int:
    """Return how many items of a bundle of `size` fit into the chunk that `chunksize` sets."""
    chunksize = operation.options.chunksize
    if size is None or chunksize is None:
        return size or 1
    return min(size, chunksize - operation.items % chunksize)
