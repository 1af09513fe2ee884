"""The runner runs the calls and backwards of chunks in a worker, and sends sums of gradients to the
caller.

    Forward ──► each call: views ──► dress ──► the function ──► result_structure
                    ──► CallRun: tensors, shapes, graph
                    results: lend ──► Results
                    graph: keep; or the backward of a loss runs at once, and its gradients are lent
    Backwards ──► each: before: rerun the call, or the backward that made its graph
                    ──► differentiate ──► lend ──► Gradients
                            └──► captures' gradients: added up
    Collect ──► the sum ──► lend ──► CollectedSums

An eager backward runs right after the forward of a loss, for the predicted gradient, while the
graph is in the CPU's cache. Gradients of inputs are sent with the result. Gradients of captures are
also sent with it, or they are added up here until the caller collects them. Then the graph is
dropped, unless it must be kept. If the real backward turns out to be different, the caller has the
graph rebuilt.

During a call, a few numbers in shared memory tell the caller which call the worker is running
(`ProgressRecord`). A call's `Stage` records the phase of the call, in case it fails, and the
durations. If the caller records a timeline, it also records the times.

Guarantees: each call or backward that is not skipped has one outcome, whatever the task raises. A
    process that reads the chunk, the position and the chunk again, and finds the same chunk twice,
    has a matching pair. Each call of a forward is recorded before the worker checks whether it is
    skipped.
Assumes: one thread, in which a chunk may arrive during a call of another chunk (inline).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.environment import FOLLOWER, TaskFilters
from mpgrad.errors import SharedMemoryError, UncarriedResultError
from mpgrad.memory.arena import Arena
from mpgrad.pickling import classes, structure
from mpgrad.pickling.initialized import SHARED
from mpgrad.pickling.modules import Namespaces
from mpgrad.pickling.state import loads_whole
from mpgrad.pickling.streams import Streams
from mpgrad.torch_state.modes import under
from mpgrad.torch_state.private import NOTHING, plus
from mpgrad.wire.agent_messages import ProgressRecord, in_order
from mpgrad.wire.messages import (
    BackwardCall,
    Backwards,
    Collect,
    CollectedSums,
    EagerOptions,
    Failure,
    Forward,
    ForwardCall,
    Gradients,
    MissingGraph,
    Recompute,
    RecomputeBackward,
    Result,
    Results,
    Span,
    Structure,
    WarningReport,
    is_plain,
    plain_structure,
    split,
    with_tensors,
)
from mpgrad.wire.tensor_refs import (
    LEAF,
    REQUIRES_GRAD,
    PackedTensor,
    PackedTensors,
    Payload,
    TensorRef,
    check_carriable,
    flags_in,
    flags_of,
    have_attributes,
    is_like_a_loss,
    need_no_pickle,
    with_more_behind,
)
from mpgrad.workers.console import TaskWarnings, described, failure, given_in_words
from mpgrad.workers.early import EarlyAnswers
from mpgrad.workers.functions import CaptureSums, Copies, Function, FunctionTable, copied_in
from mpgrad.workers.graphs import (
    CHECKPOINTS,
    HOOKS,
    Edge,
    Entrance,
    GraphEdges,
    GraphTable,
    dress,
    edge_of,
    edges_at,
    errors_behind,
    gradients_at,
    leaves_behind,
    still_there,
)
from mpgrad.workers.memory import WorkerDevice, WorkerMemory

__all__ = ["ProgressWriter", "Runner"]

NEEDS_GRAD = operator.attrgetter("requires_grad")
WHEN_RUN_AGAIN = (
    "when it was run again; with the same inputs and random numbers it must do the same"
)


# --- the worker's position


class ProgressWriter:
    """The worker's end of its `ProgressRecord`. The worker writes it, but the caller writes the
    skipped chunks."""

    def __init__(self, arena: Arena) -> None:
        self._slot = arena.allocate(8 * ProgressRecord.COUNT)
        self._numbers = self._slot.memory.cast("q")
        self.address = self._slot.address
        self.descriptor: int = self._slot.slab.descriptor

    def is_skipped(self, chunk: int) -> bool:
        return chunk in self._numbers[ProgressRecord.SKIPPED :]

    def begin(self, chunk: int, position: int) -> None:
        """Record that a call of the chunk begins."""
        numbers = self._numbers
        numbers[ProgressRecord.STARTED] = time.monotonic_ns()
        numbers[ProgressRecord.OFFSET] = -1
        if numbers[ProgressRecord.CHUNK] == chunk:
            numbers[ProgressRecord.POSITION] = position
        else:
            # A process that reads both numbers finds a matching pair, or this mark.
            numbers[ProgressRecord.CHUNK] = ProgressRecord.BETWEEN
            in_order()
            numbers[ProgressRecord.POSITION] = position
            in_order()
            numbers[ProgressRecord.CHUNK] = chunk

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Record that the worker loads a function, which time limits do not include."""
        self._numbers[ProgressRecord.STARTED] = ProgressRecord.LOADING
        try:
            yield
        finally:
            self._numbers[ProgressRecord.STARTED] = time.monotonic_ns()

    def begin_item(self, offset: int) -> None:
        """Record the item of a bundle, in case it kills the worker. -1 means no item."""
        self._numbers[ProgressRecord.OFFSET] = offset


class Stage:
    """Records the progress of a call, or of a chunk's backwards."""

    def __init__(self, spans: list[Span] | None) -> None:
        """`spans` collects entries for a timeline. It is None unless the caller records one."""
        self.phase = "forward"
        self.position = 0  # of the call, in its chunk
        self.offset = 0  # of the item, in a bundle
        self.given = ""  # the arguments in words, if the function has raised
        self.own_seconds = 0.0  # spent in the function
        self.failed_seconds = 0.0  # spent on items of a bundle that failed
        self.backward_seconds = 0.0  # spent in PyTorch's engine
        self._spans = spans

    def ran(self, started: float) -> None:
        """Record that the function has run from `started` until now."""
        self.own_seconds += self._since(started, "forward")

    def differentiated(self, started: float) -> None:
        """Record that PyTorch's engine has run from `started` until now."""
        self.backward_seconds += self._since(started, "backward")

    def failure(self, error: BaseException) -> Failure:
        return failure(error, self.phase, self.offset, self.given)

    def _since(self, started: float, phase: str) -> float:
        seconds = time.perf_counter() - started
        if self._spans is not None:
            now = time.monotonic_ns()
            self._spans.append((phase, self.position, self.offset, now - int(1e9 * seconds), now))
        return seconds


# --- one run of a function


class CallRun:
    """One run of a call: its inputs and outputs, the edges of its graph, and the gradients of its
    eager backwards."""

    def __init__(
        self,
        call: ForwardCall,
        function: Function,
        refs: Sequence[TensorRef],
        given: list[torch.Tensor],
        entrances: Sequence[Entrance],
        worker_device: WorkerDevice,
        early: EarlyAnswers,
        eager: EagerOptions | None,
    ) -> None:
        """`given` are the tensors of `refs`, the call's references for this worker. `entrances` are
        those of the tensors that need gradients."""
        # for each item: the structure of its result, and the number of its tensors
        self.shapes: list[tuple[Structure, int]] = []
        # items of a bundle that failed alone
        self.failed: list[tuple[int, Failure]] = []
        self.tensors: list[torch.Tensor] = []
        self.flags: list[int] = []
        # known before the run for a bundle, because its inputs are leaves
        self.inputs = edges_at(entrances) if call.bundle else []
        self.graph: GraphEdges | None = None  # of all items, once all have run
        self.unused: Sequence[int] = ()  # inputs that the graph does not reach, see `Result`
        self.strays: list[tuple[int, str]] = []  # see `Result`
        self.errors: list[tuple[int, str]] = []  # see `Result`
        self._call = call
        self._refs = refs
        self._given = given
        self._entrances = entrances
        self._function = function
        self._worker_device = worker_device
        self._early = early
        self._outputs: list[Edge] = []  # without losses whose eager backward has run
        self._codes: list[int] = []  # devices of the outputs, in a pool with devices
        self._has_graph = False
        self._reentrant = False  # see `GraphEdges`
        self._known: set[int] = set()  # ids of inputs and captures, once they are needed
        # results that are stray leaves themselves; like captures, they are nodes of the graph
        self._kept_leaves: list[torch.Tensor] = []
        # if given, eager backwards run for the losses of the items, from the first item on
        self.eager = eager
        # gradients of the inputs, and also of the captures unless these are added up
        self.gradients: list[torch.Tensor | None] = []
        self.wanted: list[int] = []  # numbers of these inputs
        self.has_begun = False  # an eager backward has begun, so the call's graph may not be whole
        # The sum of this call alone. Either all of it is added to the function's sum, or nothing.
        self.sums = None
        if eager is not None and function.edges and not eager.apart:
            self.sums = CaptureSums()
        self._own_inputs = own_inputs(call) if eager is not None else ()
        self._differentiated = 0  # number of items whose eager backward has run

    def items(self) -> Iterable[list[torch.Tensor]]:
        """Return the tensors of the call, or of each item of a bundle."""
        if not self._call.bundle:
            return (self._given,)
        return (some for _, some in split(self._call.bundle, self._given))

    def note_strays(self, found: Sequence[torch.Tensor], copied: Copies) -> None:
        """Find stray leaves behind the results of an item. `copied` are leaves that were made when
        its arguments were loaded."""
        if not self._known:
            self._known = set(map(id, itertools.chain(self._given, self._function.captures)))
        for number, words in self._function.strays.behind(found, self._known, copied).items():
            self.strays.append((len(self.tensors) + number, words))
            if found[number].is_leaf:
                self._kept_leaves.append(found[number])

    def note_errors(self, found: Sequence[torch.Tensor]) -> None:
        """Find the errors that a backward of an item's results would raise."""
        for number, words in errors_behind(found).items():
            self.errors.append((len(self.tensors) + number, words))

    def connect(self, found: Sequence[torch.Tensor], reentrant: bool) -> list[torch.Tensor]:
        """Connect the results of an item, or of all items, to the graph. Return the results that
        have a graph, for `enter`."""
        flags = [
            flags_in_graph(tensor, self._given, self._function.captures, self._kept_leaves)
            for tensor in found
        ]
        self.flags += flags
        outputs = [
            tensor
            for tensor, each in zip(found, flags, strict=True)
            if each & REQUIRES_GRAD and not each & LEAF
        ]
        alone = not self._call.bundle
        if alone:
            # now only tensors that were made from a non-leaf input keep it alive
            self._given.clear()
            self.inputs = edges_at(self._entrances) if self._entrances else []
        if not outputs or torch.is_inference_mode_enabled():
            return []
        self._function.search.look(outputs, reentrant)
        if alone:
            self.unused = unused_inputs(self._refs, self.inputs, outputs, reentrant)
        self._has_graph = True
        return outputs

    def enter(self, outputs: Sequence[torch.Tensor], reentrant: bool) -> None:
        """Add these outputs to the edges where gradients enter."""
        self._outputs += map(edge_of, outputs)
        self._codes += self._worker_device.codes_of(outputs)
        self._reentrant = self._reentrant or reentrant

    def take_eagerly(
        self, item: int, found: list[torch.Tensor], reentrant: bool, hooks: int, stage: Stage
    ) -> list[torch.Tensor]:
        """Run the backward of an item's result if that is a loss, and return the tensors to send.

        `hooks` is the number of hooks registered on tensors before the item began. If the item
        registers hooks, they must run in the caller's backward, so no backward runs here.
        """
        outputs = self.connect(found, reentrant)
        if outputs and hooks == HOOKS.count and self._differentiate(item, found, reentrant, stage):
            # nothing refers to the graph now, so the next graph can reuse its memory
            return [tensor.detach() for tensor in found]
        if outputs:
            self.enter(outputs, reentrant)
        return found

    def _differentiate(
        self, item: int, tensors: list[torch.Tensor], reentrant: bool, stage: Stage
    ) -> bool:
        """Run the backward of an item's loss. Return whether it has run and the graph can be
        dropped."""
        loss, captures, how = loss_of(tensors), self._function.edges, self.eager
        if loss is None or how is None or item != self._differentiated:
            return False
        if HOOKS.count and any(
            isinstance(each, torch.Tensor) and each._backward_hooks for each in captures
        ):
            # Later items may add hooks to a capture, and the caller's backward must call all of
            # them.
            return False
        self.has_begun = True
        started = time.perf_counter()
        # the caller does not request gradients of unused inputs
        wanted = [number for number in self._own_inputs[item] if number not in self.unused]
        try:
            edges = [
                *(still_there(self.inputs[number]) for number in wanted),
                *map(still_there, captures),
            ]
            gradient = torch.full_like(loss, how.gradient)
            with self._early:
                found = gradients_at(edges, (edge_of(loss),), (gradient,), reentrant, how.keeps)
        except BaseException:
            # the caller's backward, which rebuilds the graph, will raise the error again
            return False
        finally:
            stage.differentiated(started)
        for place, grad in enumerate(found):
            if grad is not None and grad.layout is not torch.strided:
                # the function may keep the tensor of its indices, and write to it later
                found[place] = grad.clone()
        if self.sums is not None:
            self.sums.add(found[len(wanted) :])
            del found[len(wanted) :]
        self.gradients += found
        self.wanted += wanted
        self._differentiated += 1
        return not how.keeps

    @property
    def is_differentiated(self) -> bool:
        """Whether the eager backwards of all items have run."""
        return self._differentiated == len(self._own_inputs)

    def end(self) -> None:
        """Make the graph after all items have run."""
        if self._has_graph:
            function = self._function
            devices = self._worker_device.device_map(
                self._codes, self._call.tensors, function.caller_devices
            )
            self.graph = GraphEdges(function, self._outputs, self.inputs, self._reentrant, devices)


def arguments(
    call: ForwardCall,
    offset: int,
    shape: Structure,
    tensors: list[torch.Tensor],
    modules: Namespaces,
    filters: TaskFilters,
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return (args, kwargs) of the item at `offset`, whose structure is `shape`. `tensors` are the
    item's tensors, followed by those of the dependencies' results."""
    own, dependency_results = len(tensors), list[Any]()
    if call.dependency_results:
        own -= sum([count for _, count in call.dependency_results])
        dependency_results = [
            structure.loads_result(each, some)
            for each, some in split(call.dependency_results, tensors[own:])
        ]
    if isinstance(shape, tuple):
        positional, by_name = shape
        rest = iter(tensors[:own])
        args = with_tensors(positional, rest, dependency_results)
        return args, dict(
            zip(by_name, with_tensors(by_name.values(), rest, dependency_results), strict=True)
        )
    if not isinstance(shape, bytes):
        return tensors, {}
    streams = Streams()
    with filters:  # suspended
        args, kwargs = loads_whole(shape, tensors[:own], dependency_results, modules, streams)
    streams.begin(call.item + offset)  # for generators that functions in the item capture
    return args, kwargs


def has_objects(call: ForwardCall, shape: Structure) -> bool:
    """Whether the arguments may contain tensors that are not among the call's tensors."""
    return isinstance(shape, bytes) or any(
        isinstance(each, bytes) for each, _ in call.dependency_results
    )


def flags_in_graph(tensor: torch.Tensor, *given: Sequence[torch.Tensor]) -> int:
    """Return the flags of a result. A leaf that `fn` was given is a node of the graph. A leaf that
    `fn` made is also a new leaf in the parent."""
    if type(tensor) is torch.Tensor:  # most are
        if not tensor.requires_grad:
            return LEAF
        if tensor.grad_fn is not None:
            return REQUIRES_GRAD
    flags = flags_of(tensor)
    if (
        flags & LEAF
        and flags & REQUIRES_GRAD
        and any(tensor is each for each in itertools.chain(*given))
    ):
        flags &= ~LEAF
    return flags


def unused_inputs(
    refs: Sequence[TensorRef],
    edges: Sequence[Edge | None],
    outputs: Sequence[torch.Tensor],
    reentrant: bool,
) -> Sequence[int]:
    """Return `Result.unused`: inputs for which `edges_at` found no edge, and leaves with hooks that
    no output depends on."""
    if not (numbers := with_more_behind(refs)):
        return ()
    looked_for = {
        id(edge): number for number in numbers if isinstance(edge := edges[number], torch.Tensor)
    }
    unled_to = looked_for.keys() - leaves_behind(outputs, looked_for, reentrant)
    return [number for number, edge in enumerate(edges) if edge is None] + [
        looked_for[each] for each in unled_to
    ]


def result_structure(value: Any, kind: str) -> tuple[Structure, list[torch.Tensor]]:
    """Return the structure of a result, and its tensors. `kind` is the kind of the pool's devices,
    if it has any.

    Raises:
        UncarriedResultError: the result cannot be sent.
    """
    shape: Structure = None
    if isinstance(value, torch.Tensor) and not have_attributes((value,)):
        tensors = [value]
    elif type(value) is tuple and value and need_no_pickle(value):
        shape, tensors = len(value), list(value)
    elif is_plain(value):
        shape, tensors = (value,), []
    elif type(value) is tuple and (plain := plain_structure(value)) is not None:
        values, tensors = plain
        shape = (values,)
    else:
        try:
            shape, tensors = structure.dumps_result(value)
        except Exception as error:
            from mpgrad.pickling.exceptions import why_not  # only an error needs it

            raise UncarriedResultError(
                why_not(error, "the result", value), repr(error), described(value)
            ) from error
    try:
        for tensor in tensors:
            check_carriable(tensor, "the result", None, kind)
    except TypeError as error:
        raise UncarriedResultError(str(error), repr(error), described(value)) from error
    return shape, tensors


def loss_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the only result of an item that needs a gradient, if it is a loss. Otherwise return
    None."""
    needing = [tensor for tensor in tensors if tensor.requires_grad]
    if len(needing) != 1:
        return None
    return needing[0] if is_like_a_loss(needing[0]) else None


def own_inputs(call: ForwardCall) -> Sequence[range]:
    """Return, for each item, the numbers of its tensors that need gradients. The numbers count all
    such tensors of the call."""
    # for each tensor, how many tensors that need gradients come before it
    ends = [
        0,
        *itertools.accumulate(bool(flags & REQUIRES_GRAD) for flags in flags_in(call.tensors)),
    ]
    counts = [count for _, count in call.bundle] or [len(ends) - 1]
    starts = itertools.accumulate(counts, initial=0)
    return [range(ends[start], ends[stop]) for start, stop in itertools.pairwise(starts)]


# --- chunks


class ForwardAnswer:
    """The results of a chunk's calls that have not been sent."""

    def __init__(self, chunk: int, function: Function | None) -> None:
        self.chunk = chunk
        self.function = function
        self.sent = 0  # the number of outcomes that are already sent
        self.began = time.perf_counter()  # after the calls whose outcomes were sent
        self.ended = self.began  # after the last call
        self._begin()

    def _begin(self) -> None:
        self.payload = Payload()
        self.outcomes: list[Result | Failure] = []
        self.own_seconds = self.eager_seconds = self.failed_seconds = 0.0

    def take(self, runner: Runner, more: bool) -> tuple[Results, Payload]:
        """Return the results so far, and forget them."""
        function, payload = self.function, self.payload
        if function is not None and not more:
            function.containers.warn_of_writes(runner.task_warnings)
        results = Results(
            self.chunk,
            self.outcomes,
            self.ended - self.began - self.failed_seconds,
            self.own_seconds,
            self.eager_seconds,
            (function is not None and function.has_written) or SHARED.are_written(),
            *runner.take_notes(),
            () if function is None else function.search.take_found(),
            more,
        )
        self.sent += len(self.outcomes)
        self.began = self.ended
        self._begin()
        return results, payload


class BackwardAnswer:
    """The gradients of a chunk's backwards that have not been sent."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.sent = 0  # the number of outcomes that are already sent
        self._begin()

    def _begin(self) -> None:
        self.payload = Payload()
        self.outcomes: list[Sequence[TensorRef | None] | Failure | MissingGraph] = []
        self.reached: list[tuple[int, Sequence[int]]] = []
        self.errors: list[tuple[int, Sequence[tuple[int, str]]]] = []

    def take(self, runner: Runner, more: bool) -> tuple[Gradients, Payload]:
        """Return the gradients so far, and forget them."""
        payload = self.payload
        gradients = Gradients(
            self.chunk, self.outcomes, *runner.take_notes(), self.reached, self.errors, more
        )
        self.sent += len(self.outcomes)
        self._begin()
        return gradients, payload


class BackwardResult(NamedTuple):
    """The outcome of one step of a backward."""

    gradients: Sequence[torch.Tensor | None] = ()
    # the caller's devices of these gradients, in a pool with devices
    caller_devices: Sequence[int] | None = None
    reached: Sequence[int] = ()  # captures that the gradients depend on, see `Gradients`
    errors: Sequence[tuple[int, str]] = ()  # see `Gradients`


class Runner:
    """Answers `Forward`, `Backwards` and `Collect`. The graph table, the memory, and the sums of
    functions store what is needed later."""

    def __init__(
        self,
        functions: FunctionTable,
        graphs: GraphTable,
        memory: WorkerMemory,
        progress: ProgressWriter,
        task_warnings: TaskWarnings,
        worker_device: WorkerDevice,
        early: EarlyAnswers,
    ) -> None:
        self._functions = functions
        self._graphs = graphs
        self._memory = memory
        self._progress = progress
        self.task_warnings = task_warnings
        self._worker_device = worker_device
        self._early = early
        # of the current chunk; its finished outcomes may be sent early
        self.answer: ForwardAnswer | BackwardAnswer | None = None
        self.spans: list[Span] | None = None  # of the current chunk, for a timeline
        self.done = 0  # the number of calls or backwards of the last chunk that ran

    def take_early(self) -> tuple[Results | Gradients, Payload] | None:
        """Return the outcomes of the current chunk that have not been sent, or None."""
        answer = self.answer
        return answer.take(self, more=True) if answer is not None and answer.outcomes else None

    def take_notes(self) -> tuple[list[WarningReport], list[int], int]:
        """Return the warnings and dropped graphs since the last answer, and the size of the kept
        graphs."""
        return self.task_warnings.take(), self._graphs.take_dropped(), self._graphs.nbytes

    # --- forward

    def forward(self, message: Forward, incoming: memoryview) -> tuple[Results, Payload]:
        chunk, calls = message.chunk, message.calls
        found = self._functions.begin(message.function)
        function = found if isinstance(found, Function) else None
        self.answer = answer = ForwardAnswer(chunk, function)
        with (
            under(message.modes),
            NOTHING if function is None else function.running(),
            self.task_warnings.filters,
        ):
            for position, call in enumerate(calls):
                # This is recorded before the check. Some time after the caller has marked a chunk
                # as skipped, it takes back the calls that were not recorded.
                self._progress.begin(chunk, position)
                if self._progress.is_skipped(chunk):
                    break
                if answer.outcomes:
                    self._early.note_call(message.together)
                stage, begun = Stage(self.spans), time.perf_counter()
                stage.position = position
                outcome = (
                    self._call(message, call, found, incoming, answer, stage)
                    if isinstance(found, Function)
                    else found
                )
                answer.outcomes.append(outcome)
                # this raises if an error has made the device unusable, which ends the worker
                self._worker_device.finish()
                if function is None:
                    self._memory.give_back_unread(call)
                answer.ended = time.perf_counter()
                if isinstance(outcome, Result):
                    answer.own_seconds += stage.own_seconds
                    answer.eager_seconds += stage.backward_seconds
                    answer.failed_seconds += stage.failed_seconds
                    continue
                answer.failed_seconds += answer.ended - begun
                if message.stop_at_failure:
                    break
        self.done = answer.sent + len(answer.outcomes)
        self._memory.give_back_unread(*calls[self.done :])
        return answer.take(self, more=False)

    def _call(
        self,
        message: Forward,
        call: ForwardCall,
        function: Function,
        incoming: memoryview,
        answer: ForwardAnswer,
        stage: Stage,
    ) -> Result | Failure:
        """Return the outcome of a call. Lend its memory, and add its graph to the table if it is
        kept."""
        before = self._graphs.memory_in_use()
        try:
            eager = None if function.code.is_cut_short else message.eager
            run = self._run(message, call, function, incoming, stage, eager)
            packed = self._pack(run, call.origin, stage)
            # read only now, because the payload may have been sent during the run
            payload = answer.payload
            refs = self._memory.lend(packed, payload) if packed else ()
            graph = run.graph
            gradients = None
            if graph is not None and eager is not None and run.has_begun:
                gradients = self._lend_gradients(call.call, run, graph, payload)
                graph = graph if eager.keeps else None
            shape, bundle = (None, run.shapes) if call.bundle else (run.shapes[0][0], ())
            result = Result(
                shape,
                refs,
                run.graph is not None,
                gradients,
                bundle,
                run.unused,
                run.strays or (),
                run.errors or (),
                run.failed or (),
            )
            sums = None if gradients is None else run.sums
            del run, packed
            if graph is not None:
                self._graphs.keep(call.call, graph, self._graphs.memory_in_use() - before)
                self._graphs.trim()
            # added last, so that the sum does not contain gradients of a failed call
            if sums is not None:
                function.sums[None, ()].add(sums.sums)
            return result
        except BaseException as error:
            # also SystemExit and KeyboardInterrupt, which the parent will raise
            return stage.failure(error)

    def _run(
        self,
        message: Forward | Recompute,
        call: ForwardCall,
        function: Function,
        payload: memoryview,
        stage: Stage,
        eager: EagerOptions | None = None,
    ) -> CallRun:
        """Run a call for its results, or a second time for its graph. `stage` records its
        progress."""
        worker_device, kind, begin_item = (
            self._worker_device,
            self._memory.packer.kind,
            self._progress.begin_item,
        )
        refs = worker_device.named(call.tensors, function.gathers)
        given, entrances = (
            dress(self._memory.views(refs, payload), flags_in(refs)) if refs else ([], [])
        )
        run = CallRun(call, function, refs, given, entrances, worker_device, self._early, eager)
        goes_on = isinstance(message, Forward) and not message.stop_at_failure
        before = CHECKPOINTS.count
        for stage.offset, own in enumerate(run.items()):
            if stage.offset in call.failed:
                run.shapes.append((None, 0))
                continue
            if call.bundle:
                begin_item(stage.offset)
            hooks = HOOKS.count
            pickled = call.bundle[stage.offset][0] if call.bundle else call.structure
            began = time.perf_counter()
            try:
                value, copied, held = self._run_item(message, call, function, own, pickled, stage)
                shape, found = result_structure(value, kind)
            except BaseException as error:
                if not (call.bundle and goes_on):
                    raise
                run.failed.append((stage.offset, stage.failure(error)))
                run.shapes.append((None, 0))
                stage.failed_seconds += time.perf_counter() - began
                continue
            needs_grad = any(map(NEEDS_GRAD, found))
            if needs_grad and (has_objects(call, pickled) or function.strays.may_be_reached()):
                run.note_strays(found, copied)
            if needs_grad:
                run.note_errors(found)
            del held, own, value
            run.shapes.append((shape, len(found)))
            if eager is not None:
                reentrant = CHECKPOINTS.count != before
                found = run.take_eagerly(stage.offset, found, reentrant, hooks, stage)
                before = CHECKPOINTS.count
            run.tensors += found
        if eager is None and (
            outputs := run.connect(run.tensors, reentrant := CHECKPOINTS.count != before)
        ):
            run.enter(outputs, reentrant)
        if call.bundle:
            begin_item(-1)
        run.end()
        return run

    def _run_item(
        self,
        message: Forward | Recompute,
        call: ForwardCall,
        function: Function,
        own: list[torch.Tensor],
        pickled: Structure,
        stage: Stage,
    ) -> tuple[Any, Copies, object]:
        """Return the function's value for an item, the leaves that its arguments brought, and the
        arguments, which keep these leaves alive.

        `own` are the item's tensors.
        """
        stage.phase, stage.given = "forward", ""
        item = call.item + stage.offset
        with self._early:
            args, kwargs = arguments(
                call, stage.offset, pickled, own, function.modules, self.task_warnings.filters
            )
            copied = copied_in((args, kwargs), pickled, own) if isinstance(pickled, bytes) else {}
            if message.seed is not None:
                self._worker_device.seed_item(message.seed, item)
            if function.streams:
                function.streams.begin(item)
            started = time.perf_counter()
            try:
                value = function.target(*args, **kwargs)
            except BaseException:
                stage.given = given_in_words(args, kwargs)
                raise
            stage.ran(started)
            stage.phase = "result"
            return value, copied, (args, kwargs)

    def _pack(self, run: CallRun, origin: int, stage: Stage) -> list[PackedTensor] | PackedTensors:
        """Copy the results' tensors for the caller's devices. The call came from device
        `origin`."""
        packer = self._memory.packer
        if len(run.shapes) > 1:
            # If memory is short, the tensors may fit one by one. If not, the error names the
            # tensor.
            with contextlib.suppress(SharedMemoryError):
                if (together := packer.together(run.tensors, run.flags)) is not None:
                    return together
        # the last iterator may be infinite
        rows = zip(
            run.tensors,
            run.flags,
            self._worker_device.caller_devices_of(run.tensors, origin),
            strict=False,
        )
        packed: list[PackedTensor] = []
        for stage.offset, (_, count) in enumerate(run.shapes):
            packed += itertools.starmap(packer.pack, itertools.islice(rows, count))
        return packed

    def _lend_gradients(
        self, call: int, run: CallRun, graph: GraphEdges, payload: Payload
    ) -> Sequence[TensorRef | None] | None:
        """Lend the gradients of losses. Return None if not all are available. The caller then sends
        the backward."""
        gradients = None
        if run.is_differentiated:
            caller_devices = graph.caller_devices(run.wanted, run.sums is None)
            # If there is no room for the gradients, the result, which matters more, may still fit.
            with contextlib.suppress(Exception):
                gradients = self._memory.lend_all(run.gradients, caller_devices, payload)
        if gradients is None:
            graph.function.code.is_cut_short = True
            if run.eager is not None and not run.eager.keeps:
                self._graphs.miss(call)
        return gradients

    # --- backward

    def backward(self, message: Backwards, incoming: memoryview) -> tuple[Gradients, Payload]:
        chunk, calls = message.chunk, message.calls
        self.answer = answer = BackwardAnswer(chunk)
        stage = Stage(self.spans)
        with under(message.modes), self.task_warnings.filters:
            for position, call in enumerate(calls):
                if self._progress.is_skipped(chunk):
                    break
                if answer.outcomes:
                    self._early.note_call()
                stage.position = position
                steps = deque([*call.before, call])
                try:
                    found: BackwardResult | None = None
                    while steps:
                        self._progress.begin(chunk, position)
                        found = self._step(steps.popleft(), incoming, stage)
                        if found is None:
                            break
                    if found is not None and found.reached:
                        answer.reached.append((len(answer.outcomes), found.reached))
                    if found is not None and found.errors:
                        answer.errors.append((len(answer.outcomes), found.errors))
                    answer.outcomes.append(
                        MissingGraph()
                        if found is None
                        else self._memory.lend_all(
                            found.gradients, found.caller_devices, answer.payload
                        )
                    )
                except BaseException as error:
                    answer.outcomes.append(failure(error, "backward"))
                self._worker_device.finish()
                self._memory.give_back_unread(*steps)
                self._graphs.trim()
        self.done = answer.sent + len(answer.outcomes)
        for call in calls[self.done :]:
            self._memory.give_back_unread(*call.before, call)
        return answer.take(self, more=False)

    def _step(
        self, step: Recompute | RecomputeBackward | BackwardCall, incoming: memoryview, stage: Stage
    ) -> BackwardResult | None:
        """Run a backward, or a step that rebuilds the graph that it needs. Return None if the graph
        that the step starts from is gone."""
        if isinstance(step, BackwardCall):
            return self._differentiate(step, incoming, stage)
        with self.task_warnings.muted(), FOLLOWER.within(step.environment), under(step.modes):
            if isinstance(step, RecomputeBackward):
                return self._differentiate(step.call, incoming, stage)
            return self._run_again(step, incoming, stage)

    def _run_again(self, step: Recompute, incoming: memoryview, stage: Stage) -> BackwardResult:
        """Rebuild the graph of a call, and keep it. If the step is `consumed`, also run through the
        graph, so that it is used up."""
        call = step.call.call
        # the graph is still here, because what should have been the last backward failed
        if step.consumed and call in self._graphs:
            self._memory.give_back_unread(step)
            return BackwardResult()
        function = self._functions[step.function]
        if isinstance(function, Failure):
            self._memory.give_back_unread(step)
            raise classes.loads(function.error)
        before = self._graphs.memory_in_use()
        with function.running():
            run = self._run(step, step.call, function, incoming, stage)
        if run.graph is None:
            raise RuntimeError(f"no output of the function needed gradients {WHEN_RUN_AGAIN}")
        if step.consumed:
            run_through(run, run.graph)
        self._graphs.keep(call, run.graph, self._graphs.memory_in_use() - before)
        if step.consumed:
            self._graphs.note_emptied(call)
        return BackwardResult()

    def _differentiate(
        self, call: BackwardCall, incoming: memoryview, stage: Stage
    ) -> BackwardResult | None:
        """Return the requested gradients, or None if the graph is gone."""
        graph = self._graphs.find(call.call)
        if graph is None:
            self._memory.give_back_unread(call)
            return None
        if len(graph.outputs) != len(call.parts):
            self._memory.give_back_unread(call)
            found, expected = len(graph.outputs), len(call.parts)
            raise RuntimeError(
                f"{found} outputs of the function needed gradients, not {expected} as before, "
                f"{WHEN_RUN_AGAIN}"
            )
        before = self._graphs.memory_in_use()
        create = call.graph is not None
        refs = (
            call.grads if graph.devices is None else graph.devices.arriving(call.grads, call.parts)
        )
        given = self._memory.views(refs, incoming)
        entrances: Sequence[Entrance] = ()
        if create:
            given, entrances = dress(given, flags_in(refs))
        grads = added_up(given, call.parts)
        started = time.perf_counter()
        try:
            with graph.function.running(), self._early:
                gradients = graph.run_backward(
                    grads, call.wanted, call.captures, call.keep, create, call.levels
                )
        finally:
            stage.differentiated(started)
        if call.captures and not call.apart:
            gradients, of_captures = gradients[: len(call.wanted)], gradients[len(call.wanted) :]
            graph.function.sums[call.graph_task, call.levels].add(of_captures)
        reached: Sequence[int] = ()
        errors: Sequence[tuple[int, str]] = ()
        if call.graph is not None:
            connected = [grad for grad in gradients if grad is not None and grad.requires_grad]
            if connected:
                reached = graph.function.search.behind(connected, graph.reentrant)
                errors = list(errors_behind(connected).items())
                derived = graph.derived(connected, edges_at(entrances), call.grads)
                self._graphs.keep(call.graph, derived, self._graphs.memory_in_use() - before)
        elif call.last:
            # dropped while it is in the CPU's cache, so that the next graph can reuse its memory
            self._graphs.release(call.call)
        elif not call.keep:
            self._graphs.note_emptied(call.call)
        return BackwardResult(
            gradients,
            graph.caller_devices(call.wanted, call.captures and call.apart),
            reached,
            errors,
        )

    def collect(self, message: Collect, incoming: memoryview) -> tuple[CollectedSums, Payload]:
        """Send a sum and forget it. Without a sum, send no gradients and 0 calls."""
        payload = Payload()
        function = self._functions.get(message.function)
        if not isinstance(function, Function):
            return CollectedSums(message.chunk, [], 0), payload
        sums = function.sums.pop((message.graph_task, message.levels), None)
        if sums is None:
            return CollectedSums(message.chunk, [], 0), payload
        try:
            return CollectedSums(
                message.chunk,
                self._memory.lend_all(sums.sums, function.caller_devices, payload),
                sums.calls,
            ), payload
        except BaseException as error:
            return CollectedSums(message.chunk, failure(error, "backward"), 0), payload
        finally:
            self._worker_device.finish()


def added_up(given: list[torch.Tensor], parts: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """Return one gradient for each output: the sum of its gradients, whose number is in `parts`, or
    None if that is 0."""
    if set(parts) == {1}:
        return given
    rest = iter(given)
    return [
        functools.reduce(plus, [next(rest) for _ in range(count)]) if count else None
        for count in parts
    ]


def run_through(run: CallRun, graph: GraphEdges) -> None:
    """Run through a rebuilt graph that had been used up before it was dropped.

    So PyTorch itself decides what a second backward finds. The gradients are ones. Errors of the
    user's code and of anomaly mode are ignored.
    """
    pairs = zip(run.tensors, run.flags, strict=True)
    grads = [
        torch.ones_like(tensor)
        for tensor, flags in pairs
        if flags & REQUIRES_GRAD and not flags & LEAF
    ]
    with contextlib.suppress(Exception), torch.autograd.set_detect_anomaly(False):
        graph.run_backward(
            grads, range(len(graph.inputs)), True, keep=False, create=False, levels=()
        )
