"""The caller's handle of a graph that a worker keeps, what its backwards order, and what comes back.

Assumes: a `Home` that delivers. Nothing here makes autograd nodes; they share these handles.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch

from mpgrad.errors import CallNames
from mpgrad.torch_state.private import outside_transforms, set_priority
from mpgrad.torch_state.vmap_levels import Level, within

__all__ = [
    "SEND",
    "WAIT",
    "WAIT_LAST",
    "Derivative",
    "Grads",
    "Home",
    "Member",
    "Members",
    "Order",
    "Promise",
    "Reach",
    "RemoteGraph",
    "Reply",
    "forget_oldest",
    "modified_in_place",
]


# Priorities, with the number of the graph added. Other nodes are numbered as they are made, and there are more of them.
SEND = 1 << 40
WAIT = 1
WAIT_LAST = 0  # for captures: their sums are complete when all calls are done
MOST_TASKS = 256  # backwards of one operation at a time: in threads, or nested


class Promise(NamedTuple):
    """A gradient that another backward computes."""

    reply: Any  # the `homes.GradientReply` to that backward
    place: int  # among the gradients that it gives


Grads = Sequence[Sequence[torch.Tensor | Promise]]  # of the outputs of one call: the parts of each sum; none: no gradient


class Order(NamedTuple):
    """What a backward of one call has to compute."""

    graph_task: int  # the number of the backward
    keep: bool  # the graph, for another backward
    whole: bool  # from all outputs to all inputs and captures: none of the graph is left then, unless it is kept
    create: bool  # a graph of the gradients
    wanted: tuple[int, ...]  # inputs whose gradients are needed
    captures: bool  # gradients of the captures are needed
    apart: bool  # those of this call by themselves, rather than added up in the worker
    levels: tuple[Level, ...]  # gradients are batches with these dimensions in front


class Reply(Protocol):
    """What comes of a backward that was sent."""

    graph: RemoteGraph | None  # of the gradients themselves, where one was asked for and one of them needs it
    reached: Sequence[int]  # captures that this graph depends on, of those with more behind them
    is_ready: bool  # they are here already

    def gradients(self) -> list[torch.Tensor | None]:
        """Wait for the gradients of the wanted inputs, then those of the captures where they come apart; raises what the
        backward raised."""
        ...

    def connected(self) -> list[int]:
        """Which of these gradients are outputs of `graph`."""
        ...


class GradientsAhead(Protocol):
    """Gradients that a worker computed ahead, for a gradient of one."""

    apart: bool  # those of the captures too


class Home(Protocol):
    """Where the graphs of one operation live, as the nodes see it."""

    deterministic: bool  # captures' gradients are added in the order of the items
    timeout: float | None  # seconds for each call
    reach: Reach | None  # of the captures that need gradients, if there are any

    @property
    def function(self) -> int:
        """The number of the function with its captures."""
        ...

    @property
    def names(self) -> CallNames: ...

    @property
    def sender(self) -> object:
        """By which graphs are reached: that of one pool."""
        ...

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads) -> Reply:
        """Start the backward of one call; returns at once."""
        ...

    def capture_gradients(self, graph_task: int) -> Iterator[tuple[tuple[Level, ...], Sequence[torch.Tensor | None]]]:
        """Wait for the captures' gradients, summed over all calls that were to be added up in this backward."""
        ...

    def release(self, graph: RemoteGraph) -> None:
        """No backward of this call can come any more."""
        ...


class Member(NamedTuple):
    """One item of a bundle: which of the outputs and inputs of the bundle's graph are its own."""

    outputs: range
    inputs: range


class Members:
    """The items of a bundle, as numbers: an object for each of them would be more than all else that is kept of it."""

    def __init__(self, of_output: Sequence[int], of_input: Sequence[int]) -> None:
        """The items of all outputs and inputs of the graph: each has its own in a row."""
        self.of_output = of_output
        self.of_input = of_input

    def of(self, item: int) -> Member:
        return Member(*(range(bisect_left(each, item), bisect_right(each, item)) for each in (self.of_output, self.of_input)))

    def given(self, grads: Sequence[object]) -> dict[int, None]:
        """The items to whose results a gradient has come."""
        return dict.fromkeys(itertools.compress(self.of_output, [grad is not None for grad in grads]))


class Reach:
    """What the tokens of an operation have in common, as long as there is a result. Of the captures it keeps none alive."""

    def __init__(self, captures: Sequence[torch.Tensor], more_behind: Set[int]) -> None:
        self.more_behind = more_behind  # captures, by number, behind which the caller has a history, or hooks
        self.found: set[int] = set()  # of those, the ones that a result depends on, as the workers say
        self.apart: dict[int, list[Derivative]] = {}  # by backward: whose captures' gradients come one call at a time
        self.put_aside: dict[int, list[torch.Tensor | None]] = {}  # by backward: gradients that other tokens lead to
        self._captures = [(weakref.ref(each), 0 if each.is_inference() else each._version) for each in captures]

    @property
    def count(self) -> int:
        return len(self._captures)

    def as_it_was(self, number: int) -> torch.Tensor:
        """Capture `number`.

        Raises:
            RuntimeError: it is not what it was.
        """
        ref, version = self._captures[number]
        capture = ref()
        if capture is None or not capture.requires_grad or capture._version != version:
            raise RuntimeError(
                "a derivative of higher order depends on a tensor that the function captures and only its backward uses, and "
                "that the caller has dropped or changed since; keep it as it was, or use it in the function's result"
            )
        return capture


class RemoteGraph:
    """The parent's handle of one kept graph. The `Call` node and its gates share it; it is released with the last of them."""

    __slots__ = (
        "__weakref__",
        "_derivatives",
        "ahead",
        "call",
        "family",
        "gates_behind",
        "has_further",
        "hidden",
        "home",
        "index",
        "inputs_lent",
        "members",
        "number",
        "placeholders",
        "promises",
        "recipe",
        "strays",
        "worker",
    )

    def __init__(self, home: Home, worker: object, call: int, index: int | range, recipe: object = None) -> None:
        self.home = home
        self.worker = worker
        self.recipe = recipe  # from which the graph can be made again, by another worker; None where it cannot
        self.ahead: GradientsAhead | None = None
        self.call = call
        self.index = index  # of its item, or of those of a bundle
        self.members: Members | None = None  # of a bundle
        self.number = -1  # in the order in which graphs were attached to nodes
        self.strays: dict[int, str] | None = None  # by output: a leaf of the worker's own that it depends on, in words
        self.inputs_lent: Sequence[tuple[torch.Tensor, int]] = ()  # read in place by the worker, with their versions then
        # There is one of these for every call that is kept, so containers come when something is to be put into them: what
        # the collector of cycles has to walk through, again and again, costs more than all the rest.
        self.placeholders: tuple[torch.Tensor, ...] = ()  # for the gradients of the inputs
        self.has_further = False  # a derivative of this graph enters through the same gates
        self.family: list[weakref.ref[Any]] | None = None  # the `Call`s of this graph and of its derivatives
        self._derivatives: dict[int, Derivative] | None = None  # by backward: with gradients that no gate has taken yet
        self.hidden = False  # the caller cannot see the outputs, only calls that were given them
        self.gates_behind: list[weakref.ref[Any]] | None = None  # of those calls
        self.promises: dict[int, list[tuple[int, Promise]]] | None = None  # by backward: to which output

    def send(self, order: Order, grads: Grads, further: Further | None) -> Derivative:
        for tensor, version in self.inputs_lent:
            if tensor._version != version:
                raise RuntimeError(modified_in_place(tensor, version))
        self.has_further = self.has_further or further is not None
        return Derivative(self, order, self.home.send_gradients(self, order, grads), further)

    def expect(self, derivative: Derivative) -> None:
        if self._derivatives is None:
            self._derivatives = {}
        self._derivatives[derivative.order.graph_task] = derivative

    def take(self, graph_task: int, number: int) -> torch.Tensor | None:
        """The gradient of input `number`; the first gate of a call to ask waits for all of them."""
        derivative = self._expected(graph_task)
        grad = derivative.take(number)
        self._forget_taken(derivative)
        return grad

    def take_all(self, graph_task: int, count: int) -> list[torch.Tensor | None]:
        """The gradients of all `count` inputs of a bundle."""
        derivative = self._expected(graph_task)
        found = derivative.take_all()
        self._forget_taken(derivative)
        return [found.get(number) for number in range(count)]

    def given(self, grads: Sequence[object]) -> int | range:
        """The item, or the items, to whose results gradients have come; `grads` has nothing for the others."""
        if not isinstance(self.index, range) or self.members is None:
            return self.index
        items = self.members.given(grads)
        return self.index[next(iter(items))] if len(items) == 1 else self.index

    def is_expected(self, graph_task: int) -> bool:
        return self._derivatives is not None and graph_task in self._derivatives

    def forget(self, graph_task: int) -> None:
        """What nobody has taken of that backward, and nobody will."""
        if self._derivatives is not None:
            self._derivatives.pop(graph_task, None)
        if self.home.reach is not None:
            self.home.reach.apart.pop(graph_task, None)

    def _expected(self, graph_task: int) -> Derivative:
        assert self._derivatives is not None
        return self._derivatives[graph_task]

    def _forget_taken(self, derivative: Derivative) -> None:
        derivatives = self._derivatives
        if derivative.is_taken and derivatives is not None:
            derivatives.pop(derivative.order.graph_task, None)  # two gates may come here at once
            self._derivatives = derivatives or None

    def promise(self, graph_task: int, number: int) -> Promise | None:
        """Instead of `take`; None where the gradient has to be seen on its way."""
        derivative = self._expected(graph_task)
        promise = derivative.promise(number)
        self._forget_taken(derivative)
        return promise

    def take_promises(self, graph_task: int) -> Sequence[tuple[int, Promise]]:
        return () if self.promises is None else self.promises.pop(graph_task, ())

    def put_promise(self, graph_task: int, output: int, promise: Promise) -> None:
        if self.promises is None:
            self.promises = {}
        self.promises.setdefault(graph_task, []).append((output, promise))
        forget_oldest(self.promises)

    def reveal(self) -> None:
        """The caller may see the outputs now, and their gradients: those that come have to be waited for, after all is sent."""
        self.hidden = False
        for ref in self.gates_behind or ():
            if (node := ref()) is not None and node.graph is not None:
                set_priority(node, WAIT + node.graph.number)
        self.gates_behind = None

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not python_ends():
            self.home.release(self)


class Further(Protocol):
    """Where gradients are to be differentiated again: what they depend on."""

    def attach(self, graph: RemoteGraph, outputs: list[torch.Tensor], reached: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Give the gradients (`outputs`) their history: `graph`, which depends on the captures `reached`."""
        ...


class Derivative:
    """One backward of one call: sent, and taken piece by piece by its gates."""

    def __init__(self, graph: RemoteGraph, order: Order, reply: Reply, further: Further | None) -> None:
        self.order = order
        self.number = graph.number
        self._reply = reply
        self._further = further
        self._left = len(order.wanted)  # inputs whose gradients nobody has taken
        self._found: dict[int, torch.Tensor | None] | None = None  # by input
        self._of_captures: Sequence[torch.Tensor | None] = ()
        self._taking = threading.Lock()  # gates of captures, and of tensors on each device, run in threads of their own

    def take(self, number: int) -> torch.Tensor | None:
        with self._taking:
            self._left -= 1
            return self._results().pop(number)

    def take_all(self) -> dict[int, torch.Tensor | None]:
        with self._taking:
            self._left = 0
            return self._results()

    def promise(self, number: int) -> Promise | None:
        if self.order.levels or self.order.create or self._reply.is_ready:
            return None
        with self._taking:
            self._left -= 1
        return Promise(self._reply, self.order.wanted.index(number))

    def take_captures(self) -> Sequence[torch.Tensor | None]:
        with self._taking:
            self._results()
        found, self._of_captures = self._of_captures, ()
        return found

    @property
    def is_taken(self) -> bool:
        return self._left == 0

    def _results(self) -> dict[int, torch.Tensor | None]:
        """The gradients that nobody has taken, by input; the first to ask waits. Assumes: `_taking` is held."""
        if self._found is None:
            with outside_transforms():
                found = self._reply.gradients()
                graph, further, self._further = self._reply.graph, self._further, None
                if graph is not None and further is not None:
                    places = self._reply.connected()
                    outputs = [each for place in places if (each := found[place]) is not None]
                    attached = further.attach(graph, outputs, self._reply.reached)
                    for place, output in zip(places, attached, strict=True):
                        found[place] = output
            levels, count = self.order.levels, len(self.order.wanted)
            if levels:
                found = [None if each is None else within(each, levels) for each in found]
            self._found = dict(zip(self.order.wanted, found[:count], strict=True))
            if len(found) > count:
                self._of_captures = found[count:]
        return self._found


def modified_in_place(tensor: torch.Tensor, version: int) -> str:
    """PyTorch's own words for it."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}], which a call of the pool has read, "
        f"is at version {tensor._version}; expected version {version} instead"
    )


def forget_oldest(by_task: dict[Any, Any]) -> None:
    """A backward that failed leaves behind what nobody takes any more."""
    while len(by_task) > MOST_TASKS:
        oldest, *_ = list(by_task)  # several threads may be here, and forget the same one
        by_task.pop(oldest, None)
