"""The backwards of one operation, the sums of the captures' gradients, and for `graphs="auto"` the
prediction of the gradient that a function's losses will get. Caller only; any of its threads.

    Backward ──► predicted rightly, and its gradients came with the result: settled at once ──┐
             └─► sent to the worker that keeps the graph ──► settled when they come ──────────┤
                                                                                    gates ◄───┘
    captures ──► the sum of each worker that adds up, and single parts from all other workers
A `Predictor` learns from the gradients that came:

    the same gradient as in the map before: one more in a row ──► after LEAST, it is predicted
    predicted rightly for CONFIRMED maps in a row ──► graphs need not be kept for another backward
    predicted wrongly ──► a credit is lost, and it takes PRICE maps to earn another
So at most one in `PRICE` maps, and one more, is predicted wrongly, whatever the caller does.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpgrad.autograd.remote_graph import (
    Backward,
    CaptureReach,
    PendingOutcome,
    RemoteGraph,
    forget_oldest,
    note_failure,
)
from mpgrad.callbacks import taken, warned_again
from mpgrad.calls.packing import SharedFunction
from mpgrad.errors import CallNames, WorkerDiedError
from mpgrad.memory.arena import BorrowedMemory, Slot
from mpgrad.pickling.exceptions import one_more, raised_again
from mpgrad.torch_state.modes import Modes
from mpgrad.torch_state.private import Level, within
from mpgrad.tracebacks import shown
from mpgrad.wire.messages import EagerOptions, Failure
from mpgrad.wire.tensor_refs import (
    REQUIRES_GRAD,
    PackedTensor,
    Packer,
    TensorRef,
    is_like_a_loss,
    packed_again,
    place_of,
    staged_again,
    views,
)

if TYPE_CHECKING:
    from mpgrad.scheduling.admissions import GradientSender

__all__ = [
    "CONFIRMED",
    "LEAST",
    "PRICE",
    "GraphOwner",
    "Prediction",
    "Predictor",
    "ReceivedGradients",
    "SumRequest",
    "error_maker",
    "raised_from",
]

EXAMINED = 4  # backwards of a map, for what gradient its losses get


class ReceivedGradients(NamedTuple):
    """Received gradients: references, and the memory that the references name."""

    refs: Sequence[TensorRef | None]
    payload: memoryview
    memories: dict[int, BorrowedMemory | Slot]  # by address
    worker: object  # that gave them

    def tensors(self) -> list[torch.Tensor | None]:
        """Of the inputs that were wanted, then of the captures where they come apart."""

        def borrow(ref: TensorRef) -> Any:
            return self.memories[ref.place].memory

        return views(self.refs, self.payload, borrow)

    def connected(self) -> list[int]:
        """Which of them are outputs of a graph of the gradients."""
        return [
            place
            for place, ref in enumerate(self.refs)
            if ref is not None and ref.flags & REQUIRES_GRAD
        ]

    def passed_on(self, place: int, staged_by: Packer | None = None) -> PackedTensor | None:
        """One of them, for another worker; `staged_by`: for one that can read the CPU's memory
        only."""
        ref = self.refs[place]
        if ref is None:
            return None
        memories = self.memories
        if ref.place >= 0:
            memories = {ref.place: memories[place_of(self.refs, ref)]}
        if staged_by is None:
            return packed_again(ref, self.payload, memories)
        return staged_again(staged_by, ref, self.payload, memories)


class SumRequest(PendingOutcome):
    """A request for the captures' gradients that a worker has added up."""

    __slots__ = ("calls", "function", "graph_task", "levels", "timeout")

    def __init__(
        self,
        function: int,
        graph_task: int | None,
        levels: tuple[Level, ...],
        timeout: float | None,
    ) -> None:
        super().__init__()
        self.function = function
        self.graph_task = graph_task  # None: of the eager backwards
        self.levels = levels
        self.timeout = timeout
        self.calls = 0  # of which it is the sum


def raised_from(failure: Failure, call: str, worker: str) -> BaseException:
    """The exception of a task, anew; `call`, for its note: such as "item 3 of simulate", or ""."""
    return raised_again(
        failure.error, shown(failure.traceback), failure.phase, call, worker, failure.given
    )


def error_maker(error: BaseException) -> Callable[[], BaseException]:
    """Return a function that makes a new copy of the exception at each call."""
    return functools.partial(one_more, error)


class GraphOwner:
    """Where the graphs of one operation live; keeps the function that they share."""

    def __init__(
        self,
        sender: GradientSender,
        function: SharedFunction,
        modes: Modes,
        environment: bytes | None,
        deterministic: bool,
        timeout: float | None,
        eager: EagerOptions | None,
        learns: bool,
    ) -> None:
        """`modes` and `environment` are those of the calls."""
        self.sender = sender  # by which graphs are reached: that of one pool
        self._modes = modes
        self._environment = environment
        self._function = function
        # captures' gradients are added in the order of the items
        self.deterministic = deterministic
        self.timeout = timeout  # seconds for each call
        self.reach: CaptureReach | None = None  # of its captures that need gradients
        self._eager = eager
        # of two backwards in two threads one gets what came with the result
        self._serving = threading.Lock()
        # backwards that are still looked at, for the next map's sake
        self._to_see = EXAMINED if learns else 0
        self._seen: float | None = None  # the gradient of those before
        self._was_wrong = False
        # what is to be added up for captures, by graph task: backwards, and gradients that a node
        # has put aside
        self._sums: dict[int, list[Backward | list[torch.Tensor | None]]] = {}

    @property
    def function(self) -> int:
        """The number of the function with its captures."""
        return self._function.number

    @property
    def names(self) -> CallNames:
        return self._function.names

    def send(self, backward: Backward) -> None:
        """Start the backward of one call, and return at once."""
        gradients = (
            loss_gradients(backward) if self._to_see > 0 or self._eager is not None else set()
        )
        if self._to_see > 0:
            self._learn(gradients)
        if not self._is_settled(backward, gradients):
            self.sender.send(backward)

    def _is_settled(self, backward: Backward, gradients: set[float]) -> bool:
        """Whether this is the backward that was run with the call: of all of the graph, which is
        not kept."""
        graph, eager = backward.graph, self._eager
        if eager is None or graph.eager is None:
            return False
        with self._serving:
            arrived, graph.eager = graph.eager, None
        if arrived is None:
            return False
        needs_sum = backward.captures and not eager.apart
        _, modes, environment = self.sender.surroundings(backward.graph_task)
        is_like_the_calls = (
            modes.but_grad == self._modes.but_grad and environment == self._environment
        )
        is_same = gradients == {eager.gradient} and is_like_the_calls
        if not is_same or (needs_sum and backward.apart):
            self._note_wrong()
            return False
        backward.apart = backward.captures and eager.apart
        backward.worker, backward.was_eager = arrived.worker, True
        backward.settle(arrived)
        if not needs_sum:
            self.sender.consume(graph)
        return True

    def wait(self, settled: PendingOutcome) -> ReceivedGradients:
        """Wait for a backward or for a requested sum. Return its gradients, or raise its error."""
        # also if it has come: what tasks printed until then comes before it
        self.sender.wait_for(settled)
        for each in taken(settled.warned):
            warned_again(*each)
        if settled.has_failed:
            if isinstance(settled, Backward):
                note_failure(settled.graph_task)
            raise settled.outcome()
        arrived: ReceivedGradients = settled.outcome
        return arrived

    # --- what gradient losses get

    def _learn(self, gradients: set[float]) -> None:
        self._to_see -= 1
        predictor = self.sender.predictor_of(self._function)
        if predictor is None:
            return
        if len(gradients) != 1 or self._seen not in (None, *gradients):
            self._to_see = 0
            predictor.note_other()
        elif self._seen is None:
            (self._seen,) = gradients
            predictor.note_gradient(
                self._seen, None if self._eager is None else self._eager.gradient
            )

    def _note_wrong(self) -> None:
        """Note that an eager backward was run in vain."""
        self.sender.note_wrong_prediction()
        if not self._was_wrong:
            self._was_wrong = True
            if (predictor := self.sender.predictor_of(self._function)) is not None:
                predictor.note_wrong(self._eager is not None and self._seen == self._eager.gradient)

    # --- captures

    def add_to_sum(self, backward: Backward) -> None:
        """Note a backward that gives gradients to captures."""
        self._sums.setdefault(backward.graph_task, []).append(backward)
        forget_oldest(self._sums)

    def put_aside(self, graph_task: int, grads: list[torch.Tensor | None]) -> None:
        """Parts of captures' gradients that another node may ask for before this backward ends."""
        self._sums[graph_task] = [grads]
        forget_oldest(self._sums)

    def forget_sum(self, graph_task: int) -> None:
        """Forget the sums of a backward in which captures' gradients are no longer needed."""
        for each in self._sums.pop(graph_task, ()):
            if isinstance(each, Backward):
                each.forget()

    def capture_gradients(self, graph_task: int) -> Iterator[Sequence[torch.Tensor | None]]:
        """Wait for the captures' gradients from all calls in this backward, and yield the parts
        that the caller adds up."""
        parts = self._sums.pop(graph_task, [])
        backwards = [each for each in parts if isinstance(each, Backward)]
        for each in backwards:
            if each.waits:
                # only now it has gone to its worker; the others go there before a request does
                self.wait(each)
        # Asked once of each: while we wait, a worker may die, and what it had in its sum gets
        # gradients of its own (`apart`).
        apart, added_up = list[Backward](), list[Backward]()
        for each in backwards:
            (apart if each.apart else added_up).append(each)
        # The last call comes first, because the engine adds up the gradients of the serial loop's
        # items in this order.
        for each in sorted(apart, key=lambda each: -each.number):
            yield each.take_captures()
        eager = [each for each in added_up if each.was_eager]
        sent = [each for each in added_up if not each.was_eager]
        for own, request in self._request_sums(eager, None):
            found = self._sum_of(own, request)
            if found is not None:
                for each in own:
                    self.sender.consume(each.graph)
                yield found
            else:  # there are other calls in the sum than these
                self._note_wrong()
                sent += [self._sent_again(each, apart=False) for each in own]
        for own, request in self._request_sums(sent, graph_task):
            for each in own:
                self.wait(each)
            alone = [each for each in own if each.apart]  # it was done by another worker
            # all have come: nothing changes any more
            together = [each for each in own if not each.apart]
            found = self._sum_of(together, request)
            if found is not None:
                yield found
            else:
                alone += [self._sent_again(each, apart=True) for each in together]
            for each in alone:
                yield each.take_captures()
        yield from (each for each in parts if isinstance(each, list))

    def _request_sums(
        self, backwards: Sequence[Backward], graph_task: int | None
    ) -> list[tuple[list[Backward], SumRequest]]:
        """Ask all workers for their sums at once."""
        groups: dict[tuple[object, tuple[Level, ...]], list[Backward]] = {}
        for each in backwards:
            groups.setdefault((each.worker, each.levels), []).append(each)
        asked = []
        for (worker, levels), own in groups.items():
            request = SumRequest(self._function.number, graph_task, levels, self.timeout)
            self.sender.request_sum(worker, request)
            asked.append((own, request))
        return asked

    def _sum_of(
        self, backwards: Sequence[Backward], request: SumRequest
    ) -> list[torch.Tensor | None] | None:
        """Return the sum of a worker, or None if the sum is lost or belongs to other calls."""
        try:
            found = self.wait(request).tensors()
        except WorkerDiedError:
            return None
        if not backwards or request.calls != len(backwards):
            return None
        return [None if each is None else within(each, request.levels) for each in found]

    def _sent_again(self, backward: Backward, apart: bool) -> Backward:
        more = backward.once_more(apart)
        self.sender.send(more)
        return more

    def release(self, graph: RemoteGraph) -> None:
        """Release a graph that can get no further backward."""
        if graph.eager is not None:
            self._note_wrong()
        if self._to_see == EXAMINED:  # none has come at all
            self._to_see = 0
            if (predictor := self.sender.predictor_of(self._function)) is not None:
                predictor.note_other()
        self.sender.release(graph)


def loss_gradients(backward: Backward) -> set[float]:
    """What came for losses whose backward runs once, and through all of the graph; nothing where
    one is otherwise."""
    if backward.keep or backward.create or backward.levels or backward.waits or not backward.whole:
        return set()
    parts: list[torch.Tensor] = list(itertools.chain.from_iterable(backward.grads))
    if not all(map(is_like_a_loss, parts)):
        return set()
    found = set(map(float, parts))
    return found if all(each and math.isfinite(each) for each in found) else set()


# --- which gradient losses will get


LEAST = 2  # maps in a row, with the same gradient, before the next one's is predicted
CONFIRMED = 2  # maps in a row that were predicted rightly
PRICE = 25  # maps seen for each that may be predicted wrongly
# so that a long time of right ones does not pay for as long a time of wrong ones
MOST_CREDIT = 40 * PRICE


class Prediction(NamedTuple):
    gradient: float
    is_confirmed: bool


class Predictor:
    """Predicts the gradient that the losses of one function will get."""

    __slots__ = ("_credit", "_gradient", "_in_a_row", "_right")

    def __init__(self) -> None:
        self._gradient: float | None = None
        self._in_a_row = 0
        self._right = 0  # predictions in a row
        # what each prediction that is under way may cost has been taken from it
        self._credit = PRICE

    def predict(self) -> Prediction | None:
        """Return the gradient that the losses of a new map will get, or None if it is unknown."""
        if self._gradient is None or self._in_a_row < LEAST or self._credit < PRICE:
            return None
        self._credit -= PRICE
        return Prediction(self._gradient, self._right >= CONFIRMED)

    def note_gradient(self, gradient: float, predicted: float | None) -> None:
        """Note the gradient that the losses of a map got."""
        self._in_a_row = self._in_a_row + 1 if gradient == self._gradient else 1
        self._gradient = gradient
        self._credit = min(self._credit + 1, MOST_CREDIT)
        if predicted == gradient:
            self._credit += PRICE
            self._right += 1

    def note_other(self) -> None:
        """Results of a map got no backward, or one that is not a loss's, or different ones."""
        self._in_a_row = 0

    def note_wrong(self, was_right: bool) -> None:
        """Backwards of a map were run in vain. `was_right`: the gradient came, but not for all that
        was run."""
        self._right = 0
        if was_right:
            self._credit -= PRICE
