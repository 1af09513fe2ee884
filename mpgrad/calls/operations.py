"""An operation: one `map`, `submit` or `reduce` on its way, from packed calls to results with gradients.

    caller's thread: pack ──► queue ──►  dispatcher's thread: send, receive, `deliver`  ──► caller's thread: `value`
Guarantees: outcomes arrive once; dropping an operation, at any time, drops its graphs and its memory with it.
Assumes: `deliver` and `fail` come from the dispatcher's thread only; whoever waits reads `outcomes` after that.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple, Protocol

import torch

from mpgrad.autograd.call_node import attach
from mpgrad.autograd.capture_gate import Captures
from mpgrad.autograd.input_gates import gate, gate_behind, leaf_gate
from mpgrad.autograd.remote_graph import Home, Members, RemoteGraph, modified_in_place
from mpgrad.calls.device_choice import Request
from mpgrad.calls.output import warned_again
from mpgrad.calls.packing import Conditions, PackedCall, SharedFunction
from mpgrad.errors import ancestor_failed
from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.pickling import structure
from mpgrad.torch_state.modes import Modes
from mpgrad.torch_state.private import outside_transforms
from mpgrad.tracebacks import warn
from mpgrad.wire.messages import Eager, Result, Structure, Warned
from mpgrad.wire.tensor_refs import LEAF, PARAMETER, REQUIRES_GRAD, Sparse, TensorRef, flags_in, stand_in, views

__all__ = ["Claim", "Delivered", "Failed", "Operation", "Submitted"]


class Delivered(NamedTuple):
    """A result as it came: not yet tensors, because those are made in the thread, and under the modes, of the caller."""

    result: Result
    payload: memoryview
    memories: dict[int, Borrowed | Slot]  # by address; slots of ours for what came from devices
    graph: RemoteGraph | None
    call: PackedCall
    worker: object  # that gave it

    def views(self, private: bool = False) -> list[torch.Tensor]:
        """Its tensors, without a history; `private`: not in memory where workers may still read them."""
        payload, memories = self.payload, {place: holder.memory for place, holder in self.memories.items()}
        if private:
            payload, memories = own(payload), {place: own(memory) for place, memory in memories.items()}

        def borrow(ref: TensorRef) -> Any:
            return memories[ref.place]

        return views(self.result.tensors, payload, borrow)

    def stand_ins(self) -> list[torch.Tensor]:
        """Tensors without a history that look like `views()`. Sparse ones are real: they cannot be given their memory later."""
        refs = self.result.tensors
        if not any(isinstance(ref.form, Sparse) for ref in refs):
            return list(map(stand_in, refs))
        views = self.views(private=True)
        return [there if isinstance(ref.form, Sparse) else stand_in(ref) for ref, there in zip(refs, views, strict=True)]


class Failed:
    """An exception in the place of a result, made by who asks for it: its class is the caller's code, which may import more."""

    def __init__(self, make: Callable[[], BaseException], origin: Failed | None = None) -> None:
        self._make = make
        self._error: BaseException | None = None
        self.origin = origin or self  # the failure of an ancestor, where that is why
        self.is_cancelled = False

    @classmethod
    def with_error(cls, error: BaseException) -> Failed:
        failed = cls(lambda: error)
        failed.is_cancelled = isinstance(error, CancelledError)
        return failed

    @classmethod
    def because_of(cls, other: Failed, subject: str) -> Failed:
        origin = other.origin
        return cls(lambda: ancestor_failed(origin.error(), subject), origin)

    def error(self) -> BaseException:
        if self._error is None:
            self._error = self._make()
        return self._error


Outcome = Delivered | Failed


def own(memory: Any) -> Any:
    return memoryview(bytearray(memory)) if isinstance(memory, memoryview) else memory  # what lies on devices is copied anyway


class Holder(Protocol):
    def give_up(self) -> None:
        """Whoever waited for the results was interrupted: they are wanted as long as somebody else holds this."""
        ...


class Operation:
    def __init__(
        self,
        function: SharedFunction,
        home: Home,
        captures: Captures | None,
        seed: int | None,
        modes: Modes,
        *,
        chunksize: int | None = None,
        stop_at_failure: bool = True,
        return_errors: bool = False,
        noun: str = "item",
        timeout: float | None = None,
        request: Request | None = None,
        eager: int = Eager.NO,
        first: int = 0,
        at_rest: bool = False,
    ) -> None:
        self.request = request  # where its calls are to run
        self.eager = eager
        self.noun = noun  # what a call is in the caller's eyes, for errors: an item, or a block of them
        self.conditions = Conditions(function, modes, seed, first)
        self.function = function
        self.home = home
        self.captures = captures  # that need gradients
        self.modes = modes
        self.timeout = timeout  # seconds for each call
        self.chunksize = chunksize
        self.at_rest = at_rest  # what calls are given is all there, and all results are waited for together
        self.stop_at_failure = stop_at_failure
        self.return_errors = return_errors  # in the place of the results that they prevented
        self.starts: Callable[[], bool] = lambda: True  # asked when a call begins; false where it was cancelled before
        self.on_outcome: Callable[[int], None] = lambda index: None
        self.on_finished: Callable[[], None] = lambda: None
        self.holder: Callable[[], Holder | None] | None = None  # of its results: the only one who can ask for them
        # written by the caller
        self.queue: deque[PackedCall] = deque()
        self.waiting: deque[PackedCall] = deque()  # for results of other calls; moved to the queue by the dispatcher
        self.added = 0
        self.items = 0  # in the calls added
        self.sealed = False  # no call will be added
        # written by the dispatcher
        self.unsorted = False  # the queue may have to be put in order before calls are taken from it
        self.largest_first = False  # the queue begins with the largest calls
        self.outcomes: dict[int, Outcome] = {}
        self.delivered = 0  # outcomes of calls before the limit
        self.limit: float = math.inf  # calls from here on do not matter: an earlier one failed, or nobody waits
        self.mutated = False  # a call wrote into a captured tensor
        self.warned: deque[Warned] = deque()  # warnings of tasks

    # --- the caller's side

    def add(self, call: PackedCall) -> None:
        call.conditions = self.conditions
        if call.claims and any(claim.source.home.carrier is not self.home.carrier for claim in call.claims):
            raise ValueError(f"{self.noun} {call.item} has a future of another pool; pass its value (future.result())")
        call.start = self.items
        self.added += 1
        self.items += call.items
        (self.waiting if call.claims else self.queue).append(call)

    @property
    def finished(self) -> bool:
        return self.sealed and self.has_ended

    @property
    def has_ended(self) -> bool:
        """All calls that were added up to now have an outcome."""
        return self.delivered >= min(self.added, self.limit)

    def first_failure(self) -> Failed | None:
        """What is to be raised, as the serial loop would have: the exception of the first failing item."""
        if self.return_errors:
            return None
        failures = {index: outcome for index, outcome in self.outcomes.items() if isinstance(outcome, Failed)}
        return failures[min(failures)] if failures else None

    def value(self, index: int) -> Any:
        """The result of item `index`, which has come, as tensors with gradients; raises where the call raised."""
        self._warn()
        outcome = self.outcomes.pop(index)
        if isinstance(outcome, Failed) and not self.return_errors:
            raise outcome.error()
        with self.modes_of_caller():
            return self._build(outcome)

    def values(self) -> list[Any]:
        """All results in the items' order; raises the first failing item's exception, or has all exceptions in their places."""
        self._warn()
        failed = self.first_failure()
        if failed is not None:
            self.outcomes.clear()
            raise failed.error()
        results: list[Any] = []
        with self.modes_of_caller():
            for index in range(len(self.outcomes)):
                outcome = self.outcomes.pop(index)
                if isinstance(outcome, Delivered) and outcome.call.bundle:
                    results += self._build_bundle(outcome)
                else:
                    results.append(self._build(outcome))
        self.captures = None  # whoever keeps the operation need not keep what its results do not depend on
        return results

    def take_warnings(self) -> Iterator[Warned]:
        """Those of tasks that have come, each once, whoever asks."""
        while True:
            try:
                yield self.warned.popleft()
            except IndexError:
                return

    def _warn(self) -> None:
        for warned in self.take_warnings():
            warned_again(*warned)
        if self.mutated:
            self.mutated = False
            warn(
                "the function wrote into a tensor that it captures, or into its .grad (for example running statistics, or a "
                "backward of its own); the change stays in the worker: return the new value, and store it in the caller"
            )

    @contextlib.contextmanager
    def modes_of_caller(self) -> Iterator[None]:
        """Those under which the operation was asked for; its results may be fetched under others, or in another thread."""
        with outside_transforms(), torch.inference_mode(self.modes.inference), torch.set_grad_enabled(self.modes.grad):
            yield

    def _build(self, outcome: Outcome) -> Any:
        if isinstance(outcome, Failed):
            return outcome.error()
        tensors = outcome.views()
        self._give_history(outcome, tensors)
        return structure.loads_result(outcome.result.structure, tensors)

    def _build_bundle(self, outcome: Delivered) -> list[Any]:
        tensors = outcome.views()
        self._give_history(outcome, tensors)
        shapes = outcome.result.bundle
        if all(shape is None for shape, _ in shapes):
            return tensors  # each item gave one
        rest = iter(tensors)
        return [structure.loads_result(shape, list(itertools.islice(rest, count))) for shape, count in shapes]

    def _give_history(self, outcome: Delivered, tensors: list[torch.Tensor]) -> None:
        """Make those of a result's `tensors` that need gradients outputs of the call's node; or the leaves they were."""
        graph, call = outcome.graph, outcome.call
        inner = []
        for number, flags in enumerate(flags_in(outcome.result.tensors)):
            if flags & REQUIRES_GRAD and not flags & LEAF:
                inner.append(number)
            elif flags & PARAMETER:
                tensors[number] = torch.nn.Parameter(tensors[number], requires_grad=bool(flags & REQUIRES_GRAD))
            elif flags & REQUIRES_GRAD:
                tensors[number].requires_grad_()
        if graph is not None:
            graph.inputs_lent = call.inputs_lent
            if not self.modes.grad:
                self._let_in(call)
            gated = [*call.gated, *gates_to(call.claims)]
            for number in outcome.result.unused:
                gated[number] = gated[number].detach()
            if call.bundle:
                graph.members = members_of(outcome.result.bundle, call.leaves, inner)
            token = None if self.captures is None else self.captures.token()
            outputs = attach(graph, [tensors[number] for number in inner], token, gated, call.leaves)
            call.leaves = ()
            call.gated = call.ungated = call.claims = ()  # they lead to the graph, which may keep the call
            for number, output in zip(inner, outputs, strict=True):
                tensors[number] = output

    @torch.enable_grad()
    def _let_in(self, call: PackedCall) -> None:
        """Gates for a call that was made without gradients, whose function turned them on by itself."""
        for tensor, version in call.ungated:
            if not tensor.is_inference() and tensor._version != version:
                raise RuntimeError(modified_in_place(tensor, version))
        tensors = [tensor for tensor, _ in call.ungated]
        call.gated = [leaf_gate(tensors)] if call.bundle and tensors else [gate(tensor) for tensor in tensors]

    # --- the dispatcher's side

    def deliver(self, index: int, outcome: Outcome | BaseException) -> None:
        if isinstance(outcome, BaseException):
            outcome = Failed.with_error(outcome)
        if index >= self.limit:
            return
        self.outcomes[index] = outcome
        self.delivered += 1
        if self.stop_at_failure and isinstance(outcome, Failed):
            self.limit = index
            self.unsorted = self.largest_first
            self.delivered = sum(1 for each in self.outcomes if each < index)
        self.on_outcome(index)
        self.tell_if_finished()

    @property
    def is_claimed(self) -> bool:
        """Other calls are to be given what it gives."""
        return False

    def tell_if_finished(self) -> None:
        if self.finished:
            tell, self.on_finished = self.on_finished, lambda: None  # once; and it may refer to what refers to us
            tell()

    def fail(self, error: BaseException) -> None:
        """Give every call that is still to come the same error."""
        self.queue.clear()
        self.waiting.clear()
        for index in range(self.added):
            if index not in self.outcomes:
                self.deliver(index, error)

    def cancel(self) -> None:
        """Nobody wants the rest any more."""
        self.limit = 0
        self.sealed = True
        self.queue.clear()
        self.waiting.clear()
        self.outcomes.clear()


def members_of(
    results: Sequence[tuple[Structure, int]], leaves: Sequence[Sequence[torch.Tensor]], inner: Sequence[int]
) -> Members:
    """`inner` are the tensors of a bundle's results that need gradients: these, and only these, are outputs of its graph."""
    counts = [count for _, count in results]
    if len(inner) < sum(counts):
        needing = set(inner)
        rest = iter([number in needing for number in range(sum(counts))])
        counts = [sum(itertools.islice(rest, count)) for count in counts]
    return Members(counts, map(len, leaves))


class Submitted(Operation):
    """An operation of one call, whose result other calls may be given before it is there.

        a = submit(f, x); b = submit(g, a)       the scheduler puts a's outcome into g's call as soon as it comes
        b.result()                               gives both calls their nodes, a's first
    Until somebody asks for a's value nobody can see it: its node has stand-ins for outputs, which get their memory when
    somebody does. Its graph is hidden so long, and gradients go to it from worker to worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._making = threading.Lock()
        self._is_claimed = False
        self._claims: list[weakref.ref[Claim]] = []  # that are not settled yet
        self._tensors: list[torch.Tensor] | None = None  # of the result, with their history
        self._taken = False
        self._value: Any = None
        # of the dispatcher: to be told when there is an outcome
        self.dependents: deque[Callable[[], None]] = deque()
        self.on_passed_on: Callable[[], None] = lambda: None  # its failure is somebody else's now

    @property
    def outcome(self) -> Outcome | None:
        found = self.outcomes.get(0)
        return Failed.with_error(CancelledError()) if found is None and self.limit == 0 else found

    @property
    def is_claimed(self) -> bool:
        return any(ref() is not None for ref in self._claims)

    def claim(self) -> Claim | None:
        """To the result as it comes from the worker; None where the caller has it, and may have changed it."""
        with self._making:
            if self._taken:
                return None
            claim = Claim(self)
            self._is_claimed = True
            self._claims.append(weakref.ref(claim))
            return claim

    def take(self) -> Any:
        """The value, which has come, as tensors with gradients; the same object at every call."""
        with self._making:
            if not self._taken:
                self._warn()
                outcome = self.outcomes[0]
                assert isinstance(outcome, Delivered)
                with self.modes_of_caller():
                    tensors = outcome.views(private=self._is_claimed)
                    if self._tensors is None:
                        self._give_history(outcome, tensors)
                        self._tensors = tensors
                    else:
                        for tensor, memory in zip(self._tensors, tensors, strict=True):
                            if memory.layout is torch.strided:
                                tensor.data = memory
                    self._value = structure.loads_result(outcome.result.structure, self._tensors)
                if outcome.graph is not None:
                    outcome.graph.reveal()
                self._settle_claims(outcome, self._tensors)
                self.outcomes.clear()
                self._tensors, self._taken = None, True
            return self._value

    def connect(self) -> None:
        """Give the call its node, though nobody has asked for its value."""
        with self._making:
            if self._taken:
                return
            outcome = self.outcomes[0]
            assert isinstance(outcome, Delivered)
            if self._tensors is None:
                with self.modes_of_caller():
                    tensors = outcome.stand_ins()
                    self._give_history(outcome, tensors)
                if outcome.graph is not None:
                    outcome.graph.hidden = True
                self._tensors = tensors
            self._settle_claims(outcome, self._tensors)

    def _give_history(self, outcome: Delivered, tensors: list[torch.Tensor]) -> None:
        super()._give_history(outcome, tensors)
        self.captures = None  # a future that is kept need not keep what its result does not depend on

    def unconnected(self) -> list[Submitted]:
        """Those that gave its call something, and have no node yet."""
        outcome = self.outcomes.get(0)
        if self._tensors is not None or not isinstance(outcome, Delivered):
            return []
        return [claim.source for claim in outcome.call.claims if not claim.is_settled]

    def _settle_claims(self, outcome: Delivered, tensors: list[torch.Tensor]) -> None:
        claims, self._claims = self._claims, []
        for ref in claims:
            if (claim := ref()) is not None:
                claim.settle(outcome, tensors)

    def deliver(self, index: int, outcome: Outcome | BaseException) -> None:
        super().deliver(index, outcome)
        self._tell_dependents()

    def cancel(self) -> None:
        super().cancel()
        self._tell_dependents()

    def _tell_dependents(self) -> None:
        while self.dependents:
            self.dependents.popleft()()


class Claim:
    """To the result of a submitted call, which stands among the arguments of another one."""

    __slots__ = ("__weakref__", "_gates", "_outcome", "is_settled", "source")

    def __init__(self, source: Submitted) -> None:
        self.source = source
        self.is_settled = False  # the gates are there
        self._gates: list[torch.Tensor] = []
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome | None:
        return self.source.outcome or self._outcome  # in this order: when the value is taken, the second is set first

    def settle(self, outcome: Delivered, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors have their history, which the caller cannot have changed yet."""
        self._outcome = outcome
        with torch.enable_grad():
            for tensor in tensors:
                if tensor.requires_grad:
                    self._gates.append(gate(tensor) if tensor.is_leaf else gate_behind(outcome.graph, tensor))
        self.is_settled = True

    def gates(self) -> list[torch.Tensor]:
        self.source.connect()
        return self._gates


def gates_to(claims: Sequence[Any]) -> list[torch.Tensor]:
    """Gates to the results that a call was given; the calls that gave them get their nodes first, the oldest first of all."""
    stack = [claim.source for claim in claims if not claim.is_settled]
    while stack:  # no recursion: a chain may be long
        earlier = stack[-1].unconnected()
        if earlier:
            stack += earlier
        else:
            stack.pop().connect()
    return [each for claim in claims for each in claim.gates()]
