"""An operation: one `map`, `submit` or `reduce`, from packed calls to results with gradients. This
module runs in the caller only.

    caller's thread: pack ──► scheduling thread: queue, send, receive, `deliver`
        ──► caller's thread: `value`
`submit` is an operation of one call (`SubmittedOperation`). Other calls may be given its result
before the result exists. A `Dependency` is the place of that result among their arguments, and has
gates to it.

The `Outcome` of a call is a result that is still bytes and memory, or an exception that is still to
be made. The thread of the caller that asks for it makes the value or the exception.
Guarantees: each outcome arrives once. An operation may be dropped at any time, and its graphs and
    its memory go with it. If a thread is interrupted while it makes results, it can ask again: an
    outcome and the gates of its call stay until the result is stored.
Assumes: `deliver` and `fail` are called by the scheduling thread, or by the maker of an
    operation that is never sent. Threads that wait read `outcomes` afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.call_node import attach
from mpgrad.autograd.gates import Captures, gate, gate_behind, leaf_gate
from mpgrad.autograd.remote_graph import (
    BundleItems,
    OperationGradients,
    RemoteGraph,
    modified_in_place,
)
from mpgrad.callbacks import taken, warned_again
from mpgrad.calls.packing import OperationOptions, PackedCall
from mpgrad.errors import add_note, ancestor_failed, contextmanager
from mpgrad.memory.arena import BorrowedMemory, Slot
from mpgrad.pickling import structure
from mpgrad.pickling.exceptions import one_more
from mpgrad.pickling.state import ItemStreams
from mpgrad.torch_state.private import outside_transforms
from mpgrad.tracebacks import warn
from mpgrad.wire.messages import Result, WarningReport, owners, split
from mpgrad.wire.tensor_refs import (
    LEAF,
    PARAMETER,
    REQUIRES_GRAD,
    SparseParts,
    flags_in,
    stand_in,
    views,
)

__all__ = [
    "NOBODY",
    "DeliveredResult",
    "Dependency",
    "FailedResult",
    "Listener",
    "Operation",
    "Outcome",
    "SubmittedOperation",
    "UncollectedFailures",
    "gates_to",
    "let_go",
]


class Listener:
    """The caller's view of an operation: an `AsyncResult`, a future or an iterator.

    It makes the operation, which refers to it weakly. If it must learn of the end even if the
    caller drops it (`_is_told`), the operation keeps it until then, or until a thread that waits
    for it is interrupted.
    """

    _is_told = True
    # whether it passes its end on, for example to a callback
    _tells = False
    # indices of outcomes in the order in which they come, if they are taken in this order
    _arrived: deque[int] | None = None

    def _starts(self) -> bool:
        """Note that a call begins. Return False if it was cancelled before."""
        return True

    def _on_finished(self) -> None:
        """React to the operation's end, unless it was cancelled. The thread that calls
        `Operation.deliver` calls this once."""


NOBODY = Listener()


class Operation:
    """The calls of one `map`, `reduce` or the like: waiting calls, and outcomes of the others.

    The caller adds calls and takes outcomes. The dispatcher takes calls and delivers outcomes.
    """

    def __init__(
        self,
        options: OperationOptions,
        owner: OperationGradients,
        captures: Captures | None = None,
        streams: ItemStreams | None = None,
        listener: Listener = NOBODY,
    ) -> None:
        self.options = options
        self.names = options.function.names
        self.owner = owner
        # the captures that need gradients
        self.captures = captures
        # the random numbers of generators that items hold
        self.streams = streams or ItemStreams(None)
        self._listener = weakref.ref(listener)
        self._kept = listener if listener._is_told else None
        self._arrived = listener._arrived
        # whether a thread that waited for the results was interrupted
        self.was_interrupted = False
        # written by the caller
        self.packed: deque[PackedCall] = deque()  # until the scheduling thread takes them
        self.added = 0
        # the number of items in the added calls
        self.items = 0
        # how many items each bundle has, by call
        self.bundled: dict[int, int] = {}
        # whether no further call will be added
        self.sealed = False
        # written by the scheduling thread
        # calls that are ready to run, and have no worker yet; `CallQueue` changes it
        self.queue: deque[PackedCall] = deque()
        # whether the queue may have to be sorted before calls are taken from it
        self.unsorted = False
        # whether the queue begins with the largest calls
        self.largest_first = False
        self.outcomes: dict[int, Outcome] = {}
        # the results that the caller has made from the first outcomes, call by call
        self._made: Sequence[list[Any]] = ()
        # the outcome at the limit, even after the outcomes have been taken
        self._failed: FailedResult | None = None
        # the number of outcomes before the limit
        self.delivered = 0
        # the number of items in these calls
        self.items_delivered = 0
        # Calls from here on do not matter: an earlier call failed, or the rest is not wanted.
        self.limit: float = math.inf
        # seconds that the calls took by themselves, as measured by the workers
        self.own_seconds = 0.0
        # whether a call wrote into a captured tensor
        self.mutated = False
        self.warned: list[WarningReport] = []  # warnings of tasks

    # --- the caller's side

    def add(self, call: PackedCall) -> None:
        """Add a call. The scheduling thread takes it when it is told.

        Raises:
            ValueError: the call takes a future of another pool.
        """
        call.options = self.options
        if call.dependencies and any(
            dependency.source.owner.link.sender is not self.owner.link.sender
            for dependency in call.dependencies
        ):
            raise ValueError(
                f"{self.names.words(call.item)} has a future of another pool; pass its value "
                "(future.result())"
            )
        call.item = self.items
        if call.items > 1:
            self.bundled[self.added] = call.items
            self.options.story.bundles[call.item] = call.items
        self.added += 1
        self.items += call.items
        self.packed.append(call)

    @property
    def finished(self) -> bool:
        return self.sealed and self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether all calls that were added up to now have an outcome."""
        return self.delivered >= min(self.added, self.limit)

    @property
    def has_failed(self) -> bool:
        """Whether a call raised, or the rest is not wanted. Calls that are added from now on do not
        matter then."""
        return self.limit < math.inf

    @property
    def items_left(self) -> int:
        """How many of the added items have no outcome yet. With bundles this is an estimate,
        because their sizes may differ."""
        left = min(self.added, self.limit) - self.delivered
        return round(left * self.items / self.added) if left > 0 else 0

    def first_failure(self) -> FailedResult | None:
        """Return the failure of the first failing item, which the serial loop would raise; None if
        there is none, or if errors are returned."""
        return None if self.options.return_errors else self._failed

    def value(self, index: int) -> Any:
        """Return the result of item `index`, which has come, or raise the call's exception.

        This works once, because the outcome is dropped then. After an interrupt it can be tried
        again.
        """
        self._warn()
        outcome = self.outcomes[index]
        if isinstance(outcome, FailedResult) and not self.options.return_errors:
            error = outcome.error()
            del self.outcomes[index]
            try:
                raise error
            finally:
                # The error refers to this frame, which would keep the error alive.
                del error
        try:
            with self.modes_of_caller():
                (value,) = self._build(index)
        except Exception:  # its class cannot be unpickled here
            del self.outcomes[index]
            raise
        del self.outcomes[index]
        let_go(outcome)
        return value

    def values(self) -> list[Any]:
        """Return all results in the items' order, with exceptions in their places if errors are
        returned. Otherwise raise the first failing item's exception."""
        self._warn()
        failed = self.first_failure()
        if failed is not None:
            self.outcomes.clear()
            raise failed.error()
        made, outcomes = list(self._made), self.outcomes
        self._made = made
        with self.modes_of_caller():
            while len(made) < len(outcomes):
                made.append(self._build(len(made)))
        for outcome in outcomes.values():
            let_go(outcome)
        # Captures that no result depends on need not live as long as the operation.
        self.captures = None
        return list(itertools.chain.from_iterable(made))

    def _warn(self) -> None:
        for warned in taken(self.warned):
            warned_again(*warned)
        if self.mutated:
            self.mutated = False
            warn(
                "the function wrote into a tensor that it captures, or into its .grad (for example "
                "running statistics, or a "
                "backward of its own), or into a shared tensor that the initializer was given; the "
                "change stays in the worker: return the new value, and "
                "store it in the caller"
            )

    def modes_of_caller(self) -> contextlib.AbstractContextManager[object]:
        """Return a context with the modes in which the operation was started. Its results may be
        fetched in other modes, or in another thread."""
        grad, inference = self.options.modes[:2]
        if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, inference):
            return outside_transforms()
        return under_others(grad, inference)

    def _build(self, index: int) -> list[Any]:
        """Return the result of a call, or the results of all items of a bundle."""
        outcome = self.outcomes[index]
        if isinstance(outcome, FailedResult):
            return [outcome.error()] * self.bundled.get(index, 1)
        tensors: list[torch.Tensor] = []
        if outcome.result.tensors:
            tensors = outcome.views()
            self._give_history(outcome, tensors)
        if not outcome.call.bundle:
            return [structure.loads_result(outcome.result.structure, tensors)]
        parts, failed = outcome.result.bundle, outcome.call.failed
        if not failed and all(shape is None for shape, _ in parts):
            return tensors  # one for each item
        return [
            failed[place].error() if place in failed else structure.loads_result(shape, own)
            for place, (shape, own) in enumerate(split(parts, tensors))
        ]

    def _give_history(self, outcome: DeliveredResult, tensors: list[torch.Tensor]) -> None:
        """Give the result's `tensors` that need gradients their history: they are outputs of the
        call's node, or leaves.

        Until `let_go` this can be repeated, unless the caller has seen these tensors.
        """
        graph, call = outcome.graph, outcome.call
        inner = []
        for number, flags in enumerate(flags_in(outcome.result.tensors)):
            if flags & REQUIRES_GRAD and not flags & LEAF:
                inner.append(number)
            elif flags & PARAMETER:
                tensors[number] = torch.nn.Parameter(
                    tensors[number], requires_grad=bool(flags & REQUIRES_GRAD)
                )
            elif flags & REQUIRES_GRAD:
                tensors[number].requires_grad_()
        if graph is not None:
            graph.inputs_lent = call.inputs_lent
            if not self.options.modes.grad:
                self._let_in(call)
            gated = (
                [*call.gated, *gates_to(call.dependencies)] if call.dependencies else [*call.gated]
            )
            for number in outcome.result.unused:
                gated[number] = gated[number].detach()
            if call.bundle:
                items = owners(outcome.result.bundle)
                graph.members = BundleItems([items[number] for number in inner], call.leaf_items)
            graph.strays = by_output(outcome.result.strays, inner)
            graph.errors = by_output(outcome.result.errors, inner)
            token = None if self.captures is None else self.captures.token()
            outputs = attach(
                graph, [tensors[number] for number in inner], token, gated, call.leaves
            )
            for number, output in zip(inner, outputs, strict=True):
                tensors[number] = output

    @torch.enable_grad()
    def _let_in(self, call: PackedCall) -> None:
        """Make gates for a call that was made without gradients. Its function itself has turned
        them on."""
        for tensor, version in call.ungated:
            if not tensor.is_inference() and tensor._version != version:
                raise RuntimeError(modified_in_place(tensor, version))
        tensors = [tensor for tensor, _ in call.ungated]
        call.gated = (
            [leaf_gate(tensors)]
            if call.bundle and tensors
            else [gate(tensor) for tensor in tensors]
        )

    # --- the scheduling thread

    def deliver(self, index: int, outcome: Outcome | BaseException) -> None:
        """Store the outcome of a call, unless the call is past the limit. A failure that stops the
        operation makes its call the limit.

        Another thread may take the outcomes as soon as the operation is `finished`. So the numbers
        that decide this are written last.
        """
        if isinstance(outcome, BaseException):
            outcome = FailedResult.with_error(outcome)
        if index >= self.limit:
            return
        self.outcomes[index] = outcome
        if self.options.stop_at_failure and isinstance(outcome, FailedResult):
            self._failed = outcome
            self.unsorted = self.largest_first
            # `delivered` does not grow here, so it is written before `limit`.
            before = [each for each in self.outcomes if each < index]
            self.delivered = len(before)
            self.items_delivered = sum(self.bundled.get(each, 1) for each in before)
            self.limit = index
        else:
            self.delivered += 1
            self.items_delivered += self.bundled.get(index, 1)
        if self._arrived is not None:
            self._arrived.append(index)
        self.tell_if_finished()

    @property
    def has_dependents(self) -> bool:
        """Whether other calls take its result."""
        return False

    def starts(self, index: int) -> bool:
        """Note that a call begins. If it was cancelled before, deliver that and return False."""
        listener = self._listener()
        if listener is None or listener._starts():
            return True
        self.deliver(index, CancelledError())
        return False

    def tell_if_finished(self) -> None:
        if self.finished:
            listener = self._listener()
            # The listener is told once. It refers to this operation.
            self._listener = weakref.ref(NOBODY)
            self._kept = None
            if listener is not None:
                listener._on_finished()

    def note_interrupt(self, cancel: Callable[[Operation], None]) -> None:
        """Note that a thread that waited for the results was interrupted. `cancel` the operation as
        soon as the caller has dropped it."""
        listener = self._listener()
        if listener is None:
            cancel(self)
        elif not (listener is NOBODY or listener._tells or self.was_interrupted):
            self.was_interrupted = True
            self._kept = None
            weakref.finalize(listener, cancel, self).atexit = False

    def fail(self, error: BaseException) -> None:
        """Give all calls without an outcome the same error."""
        failed = FailedResult.with_copies(error)
        self.queue.clear()
        self.packed.clear()
        for index in range(self.added):
            if index not in self.outcomes:
                self.deliver(index, failed)

    def cancel(self) -> None:
        """Drop the rest, because it is not wanted any more."""
        self._listener = weakref.ref(NOBODY)
        self._kept = None
        self.limit = 0
        self.sealed = True
        self.queue.clear()
        self.packed.clear()
        self.outcomes.clear()
        self._failed = None


@contextmanager
def under_others(grad: bool, inference: bool) -> Iterator[None]:
    """Enter modes that this thread is not in."""
    with outside_transforms(), torch.inference_mode(inference), torch.set_grad_enabled(grad):
        yield


def by_output(found: Sequence[tuple[int, str]], inner: Sequence[int]) -> dict[int, str]:
    """`found` has descriptions by number of a result's tensor. Return them by output of its node.
    `inner` are the numbers of the tensors that are outputs."""
    words = dict(found)
    return {output: words[number] for output, number in enumerate(inner) if number in words}


def let_go(outcome: Outcome) -> None:
    """Drop what leads from the call of a result to its graph, because the result is stored. The
    graph may keep the call, so this would be a cycle."""
    if isinstance(outcome, DeliveredResult) and outcome.graph is not None:
        call = outcome.call
        call.leaves = call.leaf_items = ()
        call.gated = call.ungated = call.dependencies = ()


# --- results that are passed to other calls


class Dependency:
    """Stands for the result of a submitted call among the arguments of another call."""

    __slots__ = ("__weakref__", "_gates", "_outcome", "is_settled", "source")

    def __init__(self, source: SubmittedOperation) -> None:
        self.source = source
        # whether it has gates
        self.is_settled = False
        self._gates: list[torch.Tensor] = []
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome | None:
        # The order matters: when the value is taken, `_outcome` is set first.
        return self.source.outcome or self._outcome

    def settle(self, outcome: DeliveredResult, tensors: Sequence[torch.Tensor]) -> None:
        """Make gates to the tensors, which have their history. The caller cannot have changed them
        yet."""
        self._outcome = outcome
        with torch.enable_grad():
            needing = [each for each in tensors if each.requires_grad]
            self._gates = [
                gate(each) if each.is_leaf else gate_behind(outcome.graph, each) for each in needing
            ]
        self.is_settled = True

    def gates(self) -> list[torch.Tensor]:
        self.source.connect()
        return self._gates


def gates_to(dependencies: Sequence[Any]) -> list[torch.Tensor]:
    """Return gates to the results that a call takes. The calls of these results get their nodes
    before that, the oldest first."""
    stack = [dependency.source for dependency in dependencies if not dependency.is_settled]
    # A chain may be too long for recursion.
    while stack:
        earlier = stack[-1].unconnected()
        if earlier:
            stack += earlier
        else:
            stack.pop().connect()
    return [each for dependency in dependencies for each in dependency.gates()]


class SubmittedOperation(Operation):
    """An operation of one call, whose result other calls may take before the caller does.

        a = submit(f, x); b = submit(g, a)    the scheduler puts a's outcome into g's call
        b.result()                            gives both calls their nodes, a's first
    As long as the caller has not taken a's value, the outputs of its node are stand-ins without
    memory, and its graph is hidden. Gradients go to it from worker to worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It is reentrant, because the caller's classes are unpickled and signals handled within it.
        self._making = threading.RLock()
        # dependencies that are not settled yet; None if no call has taken the result
        self._dependencies: list[weakref.ref[Dependency]] | None = None
        # the tensors of the result, with their history
        self._tensors: list[torch.Tensor] | None = None
        self._taken = False
        self._value: Any = None
        # called when there is an outcome, by the thread that delivers it
        self.dependents: list[Callable[[], None]] = []

    @property
    def outcome(self) -> Outcome | None:
        found = self.outcomes.get(0)
        return (
            FailedResult.with_error(CancelledError())
            if found is None and self.limit == 0
            else found
        )

    @property
    def has_dependents(self) -> bool:
        return any(ref() is not None for ref in self._dependencies or ())

    def dependency(self) -> Dependency | None:
        """Return a dependency on the result as it comes from the worker. Return None if the caller
        has it already, and may have changed it."""
        with self._making:
            if self._taken:
                return None
            dependency = Dependency(self)
            if self._dependencies is None:
                self._dependencies = []
            self._dependencies.append(weakref.ref(dependency))
            return dependency

    def take(self) -> Any:
        """Return the value, which has come. It is the same object each time."""
        with self._making:
            if not self._taken:
                self._warn()
                outcome = self.outcomes[0]
                assert isinstance(outcome, DeliveredResult)
                with self.modes_of_caller():
                    tensors = outcome.views(private=self._dependencies is not None)
                    if self._tensors is None:
                        self._give_history(outcome, tensors)
                        self._tensors = tensors
                    else:
                        for tensor, memory in zip(self._tensors, tensors, strict=True):
                            if memory.layout is torch.strided:
                                tensor.data = memory
                        tensors = self._tensors
                    value = structure.loads_result(outcome.result.structure, tensors)
                # A thread that is interrupted takes it again. A signal handler may have taken it
                # in between.
                if not self._taken:
                    if outcome.graph is not None:
                        outcome.graph.reveal()
                    self._settle_dependencies(outcome, tensors)
                    self._value, self._taken = value, True
                    self._tensors = None
                    self.outcomes.clear()
            return self._value

    def connect(self) -> None:
        """Give the call its node, before its value is taken."""
        with self._making:
            if self._taken:
                return
            outcome = self.outcomes[0]
            assert isinstance(outcome, DeliveredResult)
            if self._tensors is None:
                with self.modes_of_caller():
                    tensors = outcome.stand_ins()
                    self._give_history(outcome, tensors)
                if outcome.graph is not None:
                    outcome.graph.hidden = True
                self._tensors = tensors
            self._settle_dependencies(outcome, self._tensors)

    def unconnected(self) -> list[SubmittedOperation]:
        """Return the operations whose results the call took, and whose calls have no node yet."""
        outcome = self.outcomes.get(0)
        if self._tensors is not None or not isinstance(outcome, DeliveredResult):
            return []
        return [
            dependency.source
            for dependency in outcome.call.dependencies
            if not dependency.is_settled
        ]

    def _settle_dependencies(self, outcome: DeliveredResult, tensors: list[torch.Tensor]) -> None:
        let_go(outcome)
        # Captures that the result does not depend on need not live as long as a future.
        self.captures = None
        dependencies = self._dependencies or []
        for ref in dependencies:
            if (dependency := ref()) is not None and not dependency.is_settled:
                dependency.settle(outcome, tensors)
        dependencies.clear()

    def deliver(self, index: int, outcome: Outcome | BaseException) -> None:
        super().deliver(index, outcome)
        self._tell_dependents()

    def cancel(self) -> None:
        if self.finished:
            # Other calls may have taken the result, and need its node.
            return
        super().cancel()
        self._tell_dependents()

    def _tell_dependents(self) -> None:
        # They are taken from the end, so that none is lost if one raises.
        self.dependents.reverse()
        while self.dependents:
            self.dependents.pop()()


# --- outcomes of calls


class DeliveredResult(NamedTuple):
    """A result as it came from a worker. The caller's thread makes the tensors, in the caller's
    modes."""

    result: Result
    payload: memoryview
    # by address; memory from devices has slots of the caller
    memories: dict[int, BorrowedMemory | Slot]
    graph: RemoteGraph | None
    call: PackedCall
    # the worker that has sent it
    worker: object

    def views(self, private: bool = False) -> list[torch.Tensor]:
        """Return the tensors, without a history. With `private` they are copies, because workers
        may still read the originals."""
        payload, memories = (
            self.payload,
            {place: holder.memory for place, holder in self.memories.items()},
        )
        if private:
            payload, memories = (
                own(payload),
                {place: own(memory) for place, memory in memories.items()},
            )
        return views(self.result.tensors, payload, lambda ref: memories[ref.place])

    def stand_ins(self) -> list[torch.Tensor]:
        """Return tensors without memory and history that look like `views()`. Sparse tensors have
        memory, because they cannot get it later."""
        refs = self.result.tensors
        if not any(isinstance(ref.form, SparseParts) for ref in refs):
            return list(map(stand_in, refs))
        views = self.views(private=True)
        return [
            there if isinstance(ref.form, SparseParts) else stand_in(ref)
            for ref, there in zip(refs, views, strict=True)
        ]


class FailedResult:
    """An exception in place of a result. The thread that asks for it makes it, because its class is
    the caller's code, which may import more.

    A raised exception keeps the frames that it passed through, and their variables. So an exception
    of many calls, which may live as long as the pool, is made anew each time. The exception of one
    call is kept as long as its result.
    """

    def __init__(
        self,
        make: Callable[[], BaseException],
        origin: FailedResult | None = None,
        anew: bool = False,
        is_cancelled: bool = False,
    ) -> None:
        self._make = make
        self._anew = anew
        self._error: BaseException | None = None
        # the failure of the ancestor that caused it
        self.origin = origin or self
        self.is_cancelled = is_cancelled

    @classmethod
    def with_error(cls, error: BaseException) -> FailedResult:
        """Return a failure of one call."""
        return cls(lambda: error, is_cancelled=isinstance(error, CancelledError))

    @classmethod
    def with_copies(cls, error: BaseException) -> FailedResult:
        """Return a failure of many calls."""
        make = functools.partial(one_more, error)
        return cls(make, anew=True, is_cancelled=isinstance(error, CancelledError))

    @classmethod
    def because_of(cls, other: FailedResult, call: str) -> FailedResult:
        origin = other.origin
        return cls(lambda: ancestor_failed(origin.error(), call), origin, origin._anew)

    def error(self) -> BaseException:
        if self._anew:
            return self._make()
        if self._error is None:
            self._error = self._make()
        # This removes the traceback of earlier requests. The class may override `with_traceback`.
        return BaseException.with_traceback(self._error, None)


class UncollectedFailures:
    """Failures of asynchronous calls whose results were not taken."""

    MOST = 1000

    def __init__(self) -> None:
        # The scheduling thread notes failures while other threads look. Each step is one operation
        # of the dictionary, so it needs no lock.
        self._numbers_of: dict[FailedResult, int] = {}
        self.numbers = itertools.count()  # for results that may become failures

    def note(self, number: int, error: FailedResult) -> None:
        if len(self._numbers_of) < self.MOST:
            self._numbers_of[error] = number

    def collected(self, error: FailedResult) -> None:
        self._numbers_of.pop(error, None)

    def surface(self) -> None:
        """Raise the failure of the call that was submitted first, and forget all failures."""
        noted = sorted((number, error) for error, number in list(self._numbers_of.items()))
        # Another thread may have taken one.
        failures = [error for _, error in noted if self._numbers_of.pop(error, None) is not None]
        if failures:
            first = failures[0].error()
            if len(failures) > 1:
                add_note(
                    first, f"failures that nobody asked for, besides this one: {len(failures) - 1}"
                )
            raise first


Outcome = DeliveredResult | FailedResult


def own(memory: Any) -> Any:
    """Return a copy, or the memory of a slot on a device, which is copied anyway."""
    return memoryview(bytearray(memory)) if isinstance(memory, memoryview) else memory
