"""The caller's handle of a graph that a worker keeps, and the backwards of this graph, from the
node that makes one to the gates. This module runs in the caller only.

    Call.backward ──► Backward ──► link.send ──► a worker ──► settle
                          └──► ExpectedGradients ─┬─► gates of inputs: take
                                                  └─► gate of captures: take_captures
A backward is in three parts: a `BackwardRequest` says what it computes, the `Backward` says how far
it is, and its outcome has the gradients. Gates take them from an `ExpectedGradients`. Nothing here
makes autograd nodes.
Assumes: a link delivers (`GraphLink`, which is all that nodes know of what sends). Each backward
    that is sent is settled once, in any thread, even if it is dropped.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch

from mpgrad.errors import CallNames, WorkerDiedError
from mpgrad.torch_state.private import (
    Level,
    outside_transforms,
    set_priority,
    within,
)

__all__ = [
    "SEND",
    "WAIT",
    "WAIT_LAST",
    "Backward",
    "BackwardRequest",
    "BundleItem",
    "BundleItems",
    "CaptureReach",
    "ExpectedGradients",
    "Grads",
    "GraphLink",
    "OperationGradients",
    "PendingOutcome",
    "Promise",
    "RemoteGraph",
    "SumRequest",
    "forget_oldest",
    "modified_in_place",
]

# Priorities, with the number of the graph added. Other nodes are numbered as they are made, and
# there are more of them.
SEND = 1 << 40
WAIT = 1
WAIT_LAST = 0  # for captures: their sums are complete when all calls are done
MOST_TASKS = 256  # backwards of one operation at a time: in threads, or nested


class Promise(NamedTuple):
    """A gradient that another backward computes."""

    backward: Backward
    # among that backward's gradients
    place: int


# For each output of a call, the parts of its gradient. An output without parts has no gradient.
Grads = Sequence[Sequence[torch.Tensor | Promise]]


class PendingOutcome:
    """An outcome that threads wait for. It may be missing, there, or a function that makes an
    exception for each thread that asks.

    An exception that is kept would keep its traceback, and so the object that keeps it.
    """

    __slots__ = ("__weakref__", "dependents", "outcome", "warned")

    def __init__(self) -> None:
        self.outcome: Any = None
        # called when the outcome comes, by the thread that settles it
        self.dependents: Sequence[Callable[[], None]] = ()
        # warnings of tasks
        self.warned: Any = ()

    @property
    def arrived(self) -> bool:
        return self.outcome is not None

    @property
    def has_failed(self) -> bool:
        return callable(self.outcome)

    def settle(self, outcome: Any) -> None:
        """Set the outcome, or a function that makes an exception."""
        self.outcome = outcome
        dependents, self.dependents = self.dependents, ()
        for tell in dependents:
            tell()


class BundleItem(NamedTuple):
    """The outputs and inputs of a bundle's graph that belong to one item."""

    outputs: range
    inputs: range


class BundleItems:
    """The items of a bundle, as numbers. An object for each item would take more memory than the
    rest of the bundle."""

    def __init__(self, of_output: Sequence[int], of_input: Sequence[int]) -> None:
        """Take the item of each output, and of each input. Those of one item are in a row."""
        self.of_output = of_output
        self.of_input = of_input

    def of(self, item: int) -> BundleItem:
        return BundleItem(
            *(
                range(bisect_left(each, item), bisect_right(each, item))
                for each in (self.of_output, self.of_input)
            )
        )

    def given(self, grads: Sequence[object]) -> dict[int, None]:
        """Return the items to whose results a gradient has come."""
        return dict.fromkeys(
            itertools.compress(self.of_output, [grad is not None for grad in grads])
        )


class CaptureReach:
    """The captures of an operation that results depend on. The operation's tokens share it, and it
    keeps no capture alive."""

    def __init__(self, captures: Sequence[torch.Tensor], more_behind: Set[int]) -> None:
        # numbers of the captures behind which the caller has a history, or hooks
        self.more_behind = more_behind
        # those of them that a result depends on, as reported by workers
        self.found: set[int] = set()
        self._captures = [
            (weakref.ref(each), 0 if each.is_inference() else each._version) for each in captures
        ]

    @property
    def count(self) -> int:
        return len(self._captures)

    def as_it_was(self, number: int) -> torch.Tensor:
        """Return the capture with this number.

        Raises:
            RuntimeError: the caller has dropped or changed it.
        """
        ref, version = self._captures[number]
        capture = ref()
        if capture is None or not capture.requires_grad or capture._version != version:
            raise RuntimeError(
                "a derivative of higher order depends on a tensor that the function captures and "
                "only its backward uses, and "
                "that the caller has dropped or changed since; keep it as it was, or use it in the "
                "function's result"
            )
        return capture


NONE: Mapping[int, str] = {}


class RemoteGraph:
    """The caller's handle of one kept graph. The `Call` node and its gates share it. The graph is
    released with the last of them."""

    __slots__ = (
        "__weakref__",
        "_expected",
        "call",
        "eager",
        "errors",
        "family",
        "gates_behind",
        "has_further",
        "hidden",
        "index",
        "inputs_lent",
        "lineage",
        "members",
        "number",
        "owner",
        "placeholders",
        "promises",
        "strays",
        "worker",
    )

    def __init__(
        self,
        owner: OperationGradients,
        worker: object,
        call: int,
        index: int | range,
        lineage: object = None,
    ) -> None:
        self.owner = owner
        self.worker = worker
        # from which another worker can rebuild the graph; None if it cannot be rebuilt
        self.lineage = lineage
        # the gradients of an eager backward, which came with the result
        self.eager: Any = None
        self.call = call
        # the number of its item, or the numbers of a bundle's items
        self.index = index
        # only for a bundle
        self.members: BundleItems | None = None
        # in the order in which graphs were attached to nodes
        self.number = -1
        # in words, by output: a leaf that only the worker has, and that the output depends on; and
        # the error that a backward of everything behind the output raises
        self.strays: Mapping[int, str] = NONE
        self.errors: Mapping[int, str] = NONE
        # tensors that the worker reads in place, with their versions at that time
        self.inputs_lent: Sequence[tuple[torch.Tensor, int]] = ()
        # Each call that is kept has such a handle, so containers are made when they are needed. The
        # garbage collector's repeated visits would cost more than everything else.
        # for the gradients of the inputs
        self.placeholders: tuple[torch.Tensor, ...] = ()
        # whether a derivative of this graph enters through the same gates
        self.has_further = False
        # the `Call` nodes of this graph and of its derivatives
        self.family: list[weakref.ref[Any]] | None = None
        # by graph task; with gradients that no gate has taken yet
        self._expected: dict[int, ExpectedGradients] | None = None
        # whether only other calls have been given the outputs, and the caller cannot see them
        self.hidden = False
        # the gates of these calls
        self.gates_behind: list[weakref.ref[Any]] | None = None
        # promises with their output, by graph task
        self.promises: dict[int, list[tuple[int, Promise]]] | None = None

    @property
    def can_be_made(self) -> bool:
        """Whether the graph, and all graphs that it derives from, have lineages."""
        lineage = self.lineage
        return lineage.graph.can_be_made if isinstance(lineage, Backward) else lineage is not None

    @property
    def first_item(self) -> int:
        return self.index if isinstance(self.index, int) else self.index.start

    def check_inputs(self) -> None:
        """Raise RuntimeError if an input that the worker reads in place was written to."""
        for tensor, version in self.inputs_lent:
            if tensor._version != version:
                raise RuntimeError(modified_in_place(tensor, version))

    def expect(self, gradients: ExpectedGradients) -> None:
        """Note that gates will take these gradients."""
        if self._expected is None:
            self._expected = {}
        self._expected[gradients.backward.graph_task] = gradients
        forget_oldest(self._expected)

    def expected(self, graph_task: int) -> ExpectedGradients | None:
        """Return the gradients of this backward, or None if no gate has to take any."""
        return None if self._expected is None else self._expected.get(graph_task)

    def note_taken(self, graph_task: int) -> None:
        """Note that gates have taken all gradients of this backward."""
        if self._expected is not None:
            self._expected.pop(graph_task, None)

    def given(self, grads: Sequence[object]) -> int | range:
        """Return the item, or the items, to whose results gradients have come. `grads` has None for
        the others."""
        if not isinstance(self.index, range) or self.members is None:
            return self.index
        items = self.members.given(grads)
        return self.index[next(iter(items))] if len(items) == 1 else self.index

    def forget(self, graph_task: int) -> None:
        """Forget the gradients of this backward that no gate has taken."""
        gradients = None if self._expected is None else self._expected.pop(graph_task, None)
        if gradients is not None:
            gradients.backward.let_go()
        self.owner.forget_sum(graph_task)

    def take_promises(self, graph_task: int) -> Sequence[tuple[int, Promise]]:
        return () if self.promises is None else self.promises.pop(graph_task, ())

    def put_promise(self, graph_task: int, output: int, promise: Promise) -> None:
        if self.promises is None:
            self.promises = {}
        self.promises.setdefault(graph_task, []).append((output, promise))
        forget_oldest(self.promises)

    def reveal(self) -> None:
        """Note that the caller may see the outputs now, and their gradients. So gates wait for
        these, after everything is sent."""
        self.hidden = False
        for ref in self.gates_behind or ():
            if (node := ref()) is not None and node.graph is not None:
                set_priority(node, WAIT + node.graph.number)
        self.gates_behind = None

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not python_ends():
            self.owner.link.release(self)


# attaches a graph of gradients to them, so that they can be differentiated again; the graph depends
# on these captures
Further = Callable[[RemoteGraph, list[torch.Tensor], Sequence[int]], tuple[torch.Tensor, ...]]


class BackwardRequest(NamedTuple):
    """What a backward asks of a graph."""

    # the number of the engine's backward that it is a part of
    graph_task: int
    # whether the graph is kept for another backward
    keep: bool
    # whether it runs from all outputs to all inputs and captures; unless the graph is kept, nothing
    # of it is left then
    whole: bool
    # whether the worker makes a graph of the gradients
    create: bool
    # the inputs whose gradients are needed
    wanted: tuple[int, ...]
    # whether the gradients of the captures are needed
    captures: bool
    # The gradients are batches with these dimensions in front.
    levels: tuple[Level, ...] = ()


class Backward(PendingOutcome):
    """How far a backward is. Its outcome has the gradients.

    It holds the graph until it is settled. It holds the graph longer only if it is the lineage of
    the graph of its gradients. A backward that fails may be held by the graph of its gradients.
    """

    __slots__ = (
        "_index",
        "_ref",
        "again",
        "apart",
        "asked",
        "call",
        "deaths",
        "derived_number",
        "environment",
        "grads",
        "held",
        "idle_deaths",
        "is_last",
        "modes",
        "names",
        "parts",
        "rebuilt",
        "sent",
        "timeouts",
        "waits",
        "was_eager",
        "worker",
    )

    def __init__(
        self,
        graph: RemoteGraph,
        asked: BackwardRequest,
        grads: Grads,
        apart: bool = False,
        waits: bool = False,
    ) -> None:
        """Take the gradients of the outputs.

        `apart` says that the worker sends the gradients of the captures for this call alone, and
        does not add them up. `waits` says that there are promises among `grads`.
        """
        super().__init__()
        self.asked = asked
        self.call = graph.call
        self.names = graph.owner.names
        self._index = graph.index
        # until it is settled
        self.held: RemoteGraph | None = graph
        self._ref = weakref.ref(graph)
        self.apart = asked.captures and apart
        # Whether nothing is left of the graph, and it could be rebuilt, unless this backward fails.
        # Then the worker need not keep what is used up.
        can_be_rebuilt = graph.lineage is not None and not isinstance(graph.lineage, Backward)
        self.is_last = asked.whole and can_be_rebuilt and not (asked.keep or asked.create)
        # tensors and promises; once they are packed, in a row
        self.grads: Any = grads
        # how many parts the gradient of each output has
        self.parts = [len(parts) for parts in grads]
        self.waits = waits
        self.modes: Any = None
        # as in `OperationOptions`
        self.environment: bytes | None = None
        # the worker whose sum has the captures' gradients, unless they are apart
        self.worker: object = None
        # whether that sum is the one of eager backwards
        self.was_eager = False
        # It was sent before, and may have freed its graph. That is not the caller's mistake.
        self.again = False
        # the number of the message in which it was last sent
        self.sent = math.inf
        # the graphs that its message rebuilds, if it begins
        self.rebuilt: Sequence[int] = ()
        # of workers that ran it
        self.deaths = 0
        # how often it took too long
        self.timeouts = 0
        # of workers that had it next
        self.idle_deaths = 0
        # the number of the graph of the gradients
        self.derived_number: int | None = None

    @property
    def graph_task(self) -> int:
        return self.asked.graph_task

    @property
    def kind(self) -> object:
        """Equal for backwards that can be in one message."""
        return self.modes, self.environment, self.owner.timeout

    @property
    def graph(self) -> RemoteGraph:
        """Assumes: the backward is not settled, or the engine holds the graph's nodes."""
        graph = self.held or self._ref()
        assert graph is not None, "a graph ended before its backward"
        return graph

    @property
    def owner(self) -> OperationGradients:
        """This is not kept, because the owner may have the backward in its sums."""
        return self.graph.owner

    def note(self, transition: Any) -> None:
        """Note what happens to the backward in the story of its call, unless it was cancelled."""
        if (graph := self.held) is not None:
            graph.owner.story.note(graph.first_item, transition)

    @property
    def has_lost_graph(self) -> bool:
        """Whether the graph cannot be rebuilt. A cancelled backward does not need it any more."""
        return self.held is not None and not self.held.can_be_made

    @property
    def items(self) -> int | range:
        """The item, or the items of a bundle to whose results gradients have come."""
        graph = self.held or self._ref()  # it may have been cancelled, and dropped
        return (
            self._index if graph is None else graph.given([count or None for count in self.parts])
        )

    def settle(self, outcome: Any) -> None:
        if callable(outcome) or outcome.derived is None:
            self.held = None
            # A part of a sum may have to be sent again: see `once_more`.
            if self.apart or not self.asked.captures:
                self.grads = ()
        super().settle(outcome)

    def once_more(self, apart: bool) -> Backward:
        """Return a backward for the captures' gradients alone.

        The sum that these were a part of is lost, or has other parts.
        """
        more = Backward(self.graph, self.asked._replace(wanted=()), (), apart)
        more.grads, more.parts, more.modes, more.environment = (
            self.grads,
            self.parts,
            self.modes,
            self.environment,
        )
        more.again = True
        return more

    def let_go(self) -> None:
        """Let go of the graph of the gradients, which keeps this backward as its lineage."""
        if self.arrived and not self.has_failed:
            self.outcome = self.outcome._replace(derived=None)


class ExpectedGradients:
    """The gradients that come of a backward, for the gates that take them. The first gate that asks
    waits for all of them."""

    __slots__ = ("_found", "_further", "_left", "_of_captures", "_taking", "backward")

    def __init__(self, backward: Backward, further: Further | None = None) -> None:
        """Take `further` if there is a graph of the gradients."""
        self.backward = backward
        self._further = further
        # how many inputs' gradients have not been taken
        self._left = len(backward.asked.wanted)
        # by input
        self._found: dict[int, torch.Tensor | None] | None = None
        self._of_captures: Sequence[torch.Tensor | None] = ()
        # Gates of captures, and of tensors on each device, run in threads of their own.
        self._taking = threading.Lock()

    def take(self, number: int) -> torch.Tensor | None:
        """Return the gradient of this input."""
        with self._taking:
            grad = self._results().pop(number)
            self._note_taken(1)
            return grad

    def take_all(self) -> dict[int, torch.Tensor | None]:
        with self._taking:
            # A gradient's history may lead here.
            found, self._found = self._results(), {}
            self._note_taken(self._left)
            return found

    def promise(self, number: int) -> Promise | None:
        """Return a promise of the gradient of this input.

        Return None if the gradient has come, or if the caller has to see it.
        """
        backward = self.backward
        if backward.asked.levels or backward.asked.create or backward.was_eager:
            return None
        with self._taking:
            self._note_taken(1)
        return Promise(backward, backward.asked.wanted.index(number))

    def take_captures(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the captures, which come apart."""
        with self._taking:
            self._results()
        found, self._of_captures = self._of_captures, ()
        return found

    def _note_taken(self, count: int) -> None:
        """Note that gates have taken the gradients of this many inputs. Assumes: `_taking` is
        held."""
        self._left -= count
        if not self._left:
            self.backward.graph.note_taken(self.backward.graph_task)

    def _results(self) -> dict[int, torch.Tensor | None]:
        """Return the gradients that no gate has taken, by input. Assumes: `_taking` is held."""
        if self._found is None:
            # Transforms would wrap all tensors that are made here.
            with outside_transforms():
                backward, wanted = self.backward, self.backward.asked.wanted
                arrived = backward.owner.link.wait(backward)
                found = arrived.tensors()
                if arrived.derived is not None and self._further is not None:
                    backward.let_go()
                    places = arrived.connected()
                    outputs = [each for place in places if (each := found[place]) is not None]
                    attached = self._further(arrived.derived, outputs, arrived.reached)
                    for place, output in zip(places, attached, strict=True):
                        found[place] = output
                self._further = None
                if levels := backward.asked.levels:
                    found = [None if each is None else within(each, levels) for each in found]
                self._found = dict(zip(wanted, found[: len(wanted)], strict=True))
                self._of_captures = found[len(wanted) :]
        return self._found


# --- what the graphs of one operation share


class SumRequest(PendingOutcome):
    """A request for the captures' gradients that a worker has added up."""

    # see `Backward`; a request is never put back
    sent = math.inf

    __slots__ = ("calls", "function", "graph_task", "levels", "timeout", "worker")

    def __init__(
        self,
        function: int,
        graph_task: int | None,
        levels: tuple[Level, ...],
        timeout: float | None,
        worker: object,
    ) -> None:
        super().__init__()
        self.function = function
        # None for the sum of eager backwards
        self.graph_task = graph_task
        self.levels = levels
        self.timeout = timeout
        # the worker that has the sum
        self.worker = worker
        # how many calls are in the sum
        self.calls = 0

    @property
    def kind(self) -> object:
        """No other request, and no backward, can be in its message."""
        return self


class GraphLink(Protocol):
    """The way from the nodes of one operation to the workers that keep its graphs."""

    @property
    def sender(self) -> object:
        """The same for all operations of a pool."""

    def send(self, item: Backward | SumRequest) -> None:
        """Start it, and return at once."""

    def wait(self, item: PendingOutcome) -> Any:
        """Wait for it. Return its gradients, or raise its error."""

    def release(self, graph: RemoteGraph) -> None:
        """Note that the graph can get no further backward."""

    def note_eager_sum(self, backwards: Sequence[Backward], is_theirs: bool) -> None:
        """Note that the sum of these eager backwards was asked for, and whether it was theirs."""


class OperationGradients:
    """The way to the workers, and the gradients of the captures, which all graphs of one operation
    share.

    A worker adds up the captures' gradients of all calls that it ran in a backward. `_sums` notes
    which calls these are. Gradients that a worker could not add up come apart.
    """

    def __init__(
        self,
        link: GraphLink,
        function: int,
        names: CallNames,
        deterministic: bool,
        timeout: float | None,
        story: Any = None,
    ) -> None:
        """Take the `story`, in which the scheduler notes what happens to the calls."""
        self.story = story
        self.link = link
        # the number of the function with its captures
        self.function = function
        self.names = names
        # whether captures' gradients are added in the order of the items
        self.deterministic = deterministic
        # seconds for each call
        self.timeout = timeout
        # only if captures need gradients
        self.reach: CaptureReach | None = None
        # what is added up for the captures, by graph task: the gradients of backwards, and those
        # that a node has put aside
        self._sums: dict[int, list[ExpectedGradients | list[torch.Tensor | None]]] = {}

    def add_to_sum(
        self, graph_task: int, part: ExpectedGradients | list[torch.Tensor | None]
    ) -> None:
        """Note gradients of captures, which a node takes before this backward ends."""
        self._sums.setdefault(graph_task, []).append(part)
        forget_oldest(self._sums)

    def forget_sum(self, graph_task: int) -> None:
        """Forget the sums of a backward in which captures' gradients are no longer needed."""
        for each in self._sums.pop(graph_task, ()):
            if isinstance(each, ExpectedGradients):
                each.backward.let_go()

    def capture_gradients(self, graph_task: int) -> Iterator[Sequence[torch.Tensor | None]]:
        """Wait for the captures' gradients from all calls in this backward, and yield the parts
        that the caller adds up."""
        parts = self._sums.pop(graph_task, [])
        expected = [each for each in parts if isinstance(each, ExpectedGradients)]
        for each in expected:
            if each.backward.waits:
                # Only now it has gone to its worker. The others go there before a request does.
                self.link.wait(each.backward)
        # Each is asked once. While we wait, a worker may die, and the parts of its sum get
        # gradients of their own (`apart`).
        apart = {each for each in expected if each.backward.apart}
        added_up = [each.backward for each in expected if each not in apart]
        # The last call comes first, because the engine adds up the gradients of the serial loop's
        # items in this order.
        for each in sorted(apart, key=lambda each: -each.backward.graph.number):
            yield each.take_captures()
        eager = [each for each in added_up if each.was_eager]
        sent = [each for each in added_up if not each.was_eager]
        for own, request in self._request_sums(eager, None):
            found = self._sum_of(own, request)
            # If it is None, there are other calls in the sum than these.
            self.link.note_eager_sum(own, is_theirs=found is not None)
            if found is not None:
                yield found
            else:
                sent += [self._sent_again(each, apart=False) for each in own]
        for own, request in self._request_sums(sent, graph_task):
            for backward in own:
                self.link.wait(backward)
            # Another worker ran these.
            alone = [backward for backward in own if backward.apart]
            # All have come, so nothing changes any more.
            together = [backward for backward in own if not backward.apart]
            found = self._sum_of(together, request)
            if found is not None:
                yield found
            else:
                alone += [self._sent_again(backward, apart=True) for backward in together]
            for backward in alone:
                yield ExpectedGradients(backward).take_captures()
        yield from (each for each in parts if isinstance(each, list))

    def _request_sums(
        self, backwards: Sequence[Backward], graph_task: int | None
    ) -> list[tuple[list[Backward], SumRequest]]:
        """Ask all workers for their sums at once."""
        groups: dict[tuple[object, tuple[Level, ...]], list[Backward]] = {}
        for each in backwards:
            groups.setdefault((each.worker, each.asked.levels), []).append(each)
        asked = []
        for (worker, levels), own in groups.items():
            request = SumRequest(self.function, graph_task, levels, self.timeout, worker)
            self.link.send(request)
            asked.append((own, request))
        return asked

    def _sum_of(
        self, backwards: Sequence[Backward], request: SumRequest
    ) -> list[torch.Tensor | None] | None:
        """Return the sum of a worker, or None if the sum is lost or belongs to other calls."""
        try:
            found = self.link.wait(request).tensors()
        except WorkerDiedError:
            return None
        if not backwards or request.calls != len(backwards):
            return None
        return [None if each is None else within(each, request.levels) for each in found]

    def _sent_again(self, backward: Backward, apart: bool) -> Backward:
        more = backward.once_more(apart)
        self.link.send(more)
        return more


def modified_in_place(tensor: torch.Tensor, version: int) -> str:
    """Return PyTorch's message for a tensor that was modified in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: "
        f"[{tensor.type()} {list(tensor.shape)}], which a call of the pool has read, "
        f"is at version {tensor._version}; expected version {version} instead"
    )


def forget_oldest(by_task: dict[Any, Any]) -> None:
    """Forget the oldest entries if there are too many. Backwards that failed leave some."""
    while len(by_task) > MOST_TASKS:
        # Several threads may be here, and forget the same entry.
        oldest, *_ = list(by_task)
        by_task.pop(oldest, None)
