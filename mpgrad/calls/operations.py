"""An operation: one `map`, `submit` or `reduce`, from packed calls to results with gradients.
Caller only.

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
Assumes: the scheduling thread calls `deliver` and `fail`, or the maker of an operation that is
    never sent. Threads that wait read `outcomes` afterwards.
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
    TensorRef,
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
    """The results of an operation, as somebody holds them: an `AsyncResult`, a future, an iterator.

    It makes the operation, which refers to it weakly. One that has to be told of the end though
    nobody holds it (`_is_told`) is kept by the operation, until it has been told, or somebody who
    waited for it was interrupted.
    """

    _is_told = True
    _tells = False  # somebody else, when it is told
    # indices of outcomes as they come, for who takes them in this order
    _arrived: deque[int] | None = None

    def _starts(self) -> bool:
        """A call begins; False where it was cancelled before."""
        return True

    def _on_finished(self) -> None:
        """The operation has finished, and was not cancelled. Called once, by who calls
        `Operation.deliver`."""


NOBODY = Listener()


class Operation:
    """The calls of one `map`, `reduce` or the like: those that wait, and what came of the others.

    The caller adds calls and takes outcomes; the dispatcher takes calls and delivers outcomes.
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
        self.captures = captures  # that need gradients
        self.streams = streams or ItemStreams(None)  # of the generators that its items hold
        self._listener = weakref.ref(listener)
        self._kept = listener if listener._is_told else None
        self._arrived = listener._arrived
        self.was_interrupted = False  # somebody who waited for the results
        # written by the caller
        self.packed: deque[PackedCall] = deque()  # until the scheduling thread takes them
        self.added = 0
        self.items = 0  # in the calls added
        self.bundled: dict[int, int] = {}  # how many of them are in a call, where there are several
        self.sealed = False  # no call will be added
        # written by the scheduling thread
        self.queue: deque[PackedCall] = deque()  # calls that have all that they need, and no worker
        # the queue may have to be put in order before calls are taken from it
        self.unsorted = False
        self.largest_first = False  # the queue begins with the largest calls
        self.outcomes: dict[int, Outcome] = {}
        # results of the first outcomes: by the caller, call by call
        self._made: list[list[Any]] = []
        # the outcome at the limit; here also when outcomes have been taken
        self._failed: FailedResult | None = None
        self.delivered = 0  # outcomes of calls before the limit
        self.items_delivered = 0  # in these calls
        # calls from here on do not matter: an earlier one failed, or nobody waits
        self.limit: float = math.inf
        self.own_seconds = 0.0  # that its calls took by themselves, as the workers measured it
        self.mutated = False  # a call wrote into a captured tensor
        self.warned: deque[WarningReport] = deque()  # warnings of tasks

    # --- the caller's side

    def add(self, call: PackedCall) -> None:
        """Hand a call to the scheduling thread, once it is told; ValueError: one has a future of
        another pool."""
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
        """All calls that were added up to now have an outcome."""
        return self.delivered >= min(self.added, self.limit)

    @property
    def has_failed(self) -> bool:
        """A call raised, or nobody waits any more: calls that are added from now on do not
        matter."""
        return self.limit < math.inf

    @property
    def items_left(self) -> int:
        """Of those added, how many have no outcome yet; of bundles, whose sizes may differ, about
        so many."""
        left = min(self.added, self.limit) - self.delivered
        return round(left * self.items / self.added) if left > 0 else 0

    def first_failure(self) -> FailedResult | None:
        """What is to be raised, as the serial loop would have: the exception of the first failing
        item."""
        return None if self.options.return_errors else self._failed

    def value(self, index: int) -> Any:
        """The result of item `index`, which has come, as tensors with gradients; raises where the
        call raised.

        Only once: its outcome is gone then, but not where an interrupt came before.
        """
        self._warn()
        outcome = self.outcomes[index]
        if isinstance(outcome, FailedResult) and not self.options.return_errors:
            error = outcome.error()
            del self.outcomes[index]
            try:
                raise error
            finally:
                del error  # else it and this frame would keep each other
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
        """All results in the items' order; raises the first failing item's exception, or has all
        exceptions in their places."""
        self._warn()
        failed = self.first_failure()
        if failed is not None:
            self.outcomes.clear()
            raise failed.error()
        made, outcomes = self._made, self.outcomes
        with self.modes_of_caller():
            while len(made) < len(outcomes):
                made.append(self._build(len(made)))
        for outcome in outcomes.values():
            let_go(outcome)
        # whoever keeps the operation need not keep what its results do not depend on
        self.captures = None
        return list(itertools.chain.from_iterable(made))

    def only_value(self) -> Any:
        """The result of the only call."""
        (value,) = self.values()
        return value

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
        """Those under which the operation was asked for; its results may be fetched under others,
        or in another thread."""
        grad, inference = self.options.modes[:2]
        if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, inference):
            return outside_transforms()
        return under_others(grad, inference)

    def _build(self, index: int) -> list[Any]:
        """The result of a call; those of all items of a bundle."""
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
            return tensors  # each item gave one
        return [
            failed[place].error() if place in failed else structure.loads_result(shape, own)
            for place, (shape, own) in enumerate(split(parts, tensors))
        ]

    def _give_history(self, outcome: DeliveredResult, tensors: list[torch.Tensor]) -> None:
        """Make those of a result's `tensors` that need gradients outputs of the call's node; or the
        leaves they were.

        Until `let_go` it can be done again, where nobody has seen these tensors.
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
        """Gates for a call that was made without gradients, whose function turned them on by
        itself."""
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
        """What came of a call, unless it is past the limit. A failure that counts makes its call
        the limit.

        As soon as that makes the operation `finished`, another thread may take the outcomes. So
        that is written last.
        """
        if isinstance(outcome, BaseException):
            outcome = FailedResult.with_error(outcome)
        if index >= self.limit:
            return
        self.outcomes[index] = outcome
        if self.options.stop_at_failure and isinstance(outcome, FailedResult):
            self._failed = outcome
            self.unsorted = self.largest_first
            # no more than before, so it comes first
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
        """Other calls are to be given what it gives."""
        return False

    def starts(self, index: int) -> bool:
        """A call begins; False where it was cancelled before, and has got that as its outcome."""
        return True

    def tell_if_finished(self) -> None:
        if self.finished:
            listener = self._listener()
            self._listener = weakref.ref(NOBODY)  # it is told once, and refers to this
            self._kept = None
            if listener is not None:
                listener._on_finished()

    def note_interrupt(self, cancel: Callable[[Operation], None]) -> None:
        """Somebody who waited for the results was interrupted: `cancel` it as soon as nobody holds
        them, or is to be told."""
        listener = self._listener()
        if listener is None:
            cancel(self)
        elif not (listener is NOBODY or listener._tells or self.was_interrupted):
            self.was_interrupted = True
            self._kept = None
            weakref.finalize(listener, cancel, self).atexit = False

    def fail(self, error: BaseException) -> None:
        """Give every call that is still to come the same error."""
        failed = FailedResult.with_copies(error)
        self.queue.clear()
        self.packed.clear()
        for index in range(self.added):
            if index not in self.outcomes:
                self.deliver(index, failed)

    def cancel(self) -> None:
        """Nobody wants the rest any more."""
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
    """Modes that this thread is not in."""
    with outside_transforms(), torch.inference_mode(inference), torch.set_grad_enabled(grad):
        yield


def by_output(found: Sequence[tuple[int, str]], inner: Sequence[int]) -> dict[int, str]:
    """What was found of tensors of a result, by output of its node: `inner` are the tensors that
    are outputs."""
    words = dict(found)
    return {output: words[number] for output, number in enumerate(inner) if number in words}


def let_go(outcome: Outcome) -> None:
    """The result has been put down. What leads from its call to its graph would keep both, as the
    graph may keep the call."""
    if isinstance(outcome, DeliveredResult) and outcome.graph is not None:
        call = outcome.call
        call.leaves = call.leaf_items = ()
        call.gated = call.ungated = call.dependencies = ()


# --- results that other calls have still to give


class Dependency:
    """To the result of a submitted call, which stands among the arguments of another one."""

    __slots__ = ("__weakref__", "_gates", "_outcome", "is_settled", "source")

    def __init__(self, source: SubmittedOperation) -> None:
        self.source = source
        self.is_settled = False  # the gates are there
        self._gates: list[torch.Tensor] = []
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome | None:
        # in this order: when the value is taken, the second is set first
        return self.source.outcome or self._outcome

    def settle(self, outcome: DeliveredResult, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors have their history, which the caller cannot have changed yet."""
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
    """Gates to the results that a call was given; the calls that gave them get their nodes first,
    the oldest first of all."""
    stack = [dependency.source for dependency in dependencies if not dependency.is_settled]
    while stack:  # no recursion: a chain may be long
        earlier = stack[-1].unconnected()
        if earlier:
            stack += earlier
        else:
            stack.pop().connect()
    return [each for dependency in dependencies for each in dependency.gates()]


class SubmittedOperation(Operation):
    """A chain of calls that may be under way, or done, before anybody asks for a value.

        a = submit(f, x); b = submit(g, a)    the scheduler puts a's outcome into g's call
        b.result()                            gives both calls their nodes, a's first
    Until somebody asks for a's value nobody can see it: its node has stand-ins for outputs, which
    get their memory when somebody does. Its graph is hidden so long, and gradients go to it from
    worker to worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # classes of the caller's are unpickled meanwhile, and signals handled
        self._making = threading.RLock()
        self._had_dependents = False
        self._dependencies: list[weakref.ref[Dependency]] = []  # that are not settled yet
        self._tensors: list[torch.Tensor] | None = None  # of the result, with their history
        self._taken = False
        self._value: Any = None
        # of the dispatcher: to be told when there is an outcome
        self.dependents: deque[Callable[[], None]] = deque()

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
        return any(ref() is not None for ref in self._dependencies)

    def dependency(self) -> Dependency | None:
        """To the result as it comes from the worker; None where the caller has it, and may have
        changed it."""
        with self._making:
            if self._taken:
                return None
            dependency = Dependency(self)
            self._had_dependents = True
            self._dependencies.append(weakref.ref(dependency))
            return dependency

    def take(self) -> Any:
        """The value, which has come, as tensors with gradients; the same object at every call."""
        with self._making:
            if not self._taken:
                self._warn()
                outcome = self.outcomes[0]
                assert isinstance(outcome, DeliveredResult)
                with self.modes_of_caller():
                    tensors = outcome.views(private=self._had_dependents)
                    if self._tensors is None:
                        self._give_history(outcome, tensors)
                        self._tensors = tensors
                    else:
                        for tensor, memory in zip(self._tensors, tensors, strict=True):
                            if memory.layout is torch.strided:
                                tensor.data = memory
                        tensors = self._tensors
                    value = structure.loads_result(outcome.result.structure, tensors)
                # whoever is interrupted takes it again; a handler of a signal may have come here,
                # and taken it in between
                if not self._taken:
                    if outcome.graph is not None:
                        outcome.graph.reveal()
                    self._settle_dependencies(outcome, tensors)
                    self._value, self._taken = value, True
                    self._tensors = None
                    self.outcomes.clear()
            return self._value

    def connect(self) -> None:
        """Give the call its node, though nobody has asked for its value."""
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
        """Those that gave its call something, and have no node yet."""
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
        # a future that is kept need not keep what its result does not depend on
        self.captures = None
        for ref in self._dependencies:
            if (dependency := ref()) is not None and not dependency.is_settled:
                dependency.settle(outcome, tensors)
        self._dependencies = []

    def starts(self, index: int) -> bool:
        listener = self._listener()
        if listener is None or listener._starts():
            return True
        self.deliver(index, CancelledError())
        return False

    def deliver(self, index: int, outcome: Outcome | BaseException) -> None:
        super().deliver(index, outcome)
        self._tell_dependents()

    def cancel(self) -> None:
        if self.finished:
            # the result may have been given to other calls, which are to be connected with it
            return
        super().cancel()
        self._tell_dependents()

    def _tell_dependents(self) -> None:
        while self.dependents:
            self.dependents.popleft()()


# --- what came of a call


class DeliveredResult(NamedTuple):
    """A result as it came: not yet tensors, because those are made in the thread, and under the
    modes, of the caller."""

    result: Result
    payload: memoryview
    memories: dict[
        int, BorrowedMemory | Slot
    ]  # by address; slots of ours for what came from devices
    graph: RemoteGraph | None
    call: PackedCall
    worker: object  # that gave it

    def views(self, private: bool = False) -> list[torch.Tensor]:
        """Its tensors, without a history; `private`: not in memory where workers may still read
        them."""
        payload, memories = (
            self.payload,
            {place: holder.memory for place, holder in self.memories.items()},
        )
        if private:
            payload, memories = (
                own(payload),
                {place: own(memory) for place, memory in memories.items()},
            )

        def borrow(ref: TensorRef) -> Any:
            return memories[ref.place]

        return views(self.result.tensors, payload, borrow)

    def stand_ins(self) -> list[torch.Tensor]:
        """Tensors without a history that look like `views()`. Sparse ones are real: they cannot be
        given their memory later."""
        refs = self.result.tensors
        if not any(isinstance(ref.form, SparseParts) for ref in refs):
            return list(map(stand_in, refs))
        views = self.views(private=True)
        return [
            there if isinstance(ref.form, SparseParts) else stand_in(ref)
            for ref, there in zip(refs, views, strict=True)
        ]


class FailedResult:
    """An exception in the place of a result, made by who asks for it: its class is the caller's
    code, which may import more.

    One that is raised keeps the frames that it came through, and what these hold. So what many
    calls fail with, which may live for as long as the pool, is made anew for each who asks; that of
    one call is kept, and ends with its result.
    """

    def __init__(
        self,
        make: Callable[[], BaseException],
        origin: FailedResult | None = None,
        anew: bool = False,
    ) -> None:
        self._make = make
        self._anew = anew
        self._error: BaseException | None = None
        self.origin = origin or self  # the failure of an ancestor, where that is why
        self.is_cancelled = False

    @classmethod
    def with_error(cls, error: BaseException) -> FailedResult:
        """That of one call."""
        failed = cls(lambda: error)
        failed.is_cancelled = isinstance(error, CancelledError)
        return failed

    @classmethod
    def with_copies(cls, error: BaseException) -> FailedResult:
        """That of many calls."""
        failed = cls(functools.partial(one_more, error), anew=True)
        failed.is_cancelled = isinstance(error, CancelledError)
        return failed

    @classmethod
    def because_of(cls, other: FailedResult, call: str) -> FailedResult:
        origin = other.origin
        return cls(lambda: ancestor_failed(origin.error(), call), origin, origin._anew)

    def error(self) -> BaseException:
        if self._anew:
            return self._make()
        if self._error is None:
            self._error = self._make()
        # without the lines that asked before; its class may have a method of that name
        return BaseException.with_traceback(self._error, None)


class UncollectedFailures:
    """Failures of asynchronous calls that nobody has asked for."""

    MOST = 1000

    def __init__(self) -> None:
        # The scheduling thread notes while any other may look. Each step is one of the
        # dictionary's, so it needs no lock.
        self._numbers_of: dict[FailedResult, int] = {}
        self.numbers = itertools.count()  # for results that may become failures

    def note(self, number: int, error: FailedResult) -> None:
        if len(self._numbers_of) < self.MOST:
            self._numbers_of[error] = number

    def collected(self, error: FailedResult) -> None:
        self._numbers_of.pop(error, None)

    def surface(self) -> None:
        """Raise the failure of what was submitted first, and forget them all."""
        noted = sorted((number, error) for error, number in list(self._numbers_of.items()))
        # else another thread has it
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
    """A copy; the memory of slots on devices as it is."""
    # what lies on devices is copied anyway
    return memoryview(bytearray(memory)) if isinstance(memory, memoryview) else memory
