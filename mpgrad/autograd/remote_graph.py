"""Backward across processes. Autograd ends at a pickle, so the parent keeps a node per call and the worker keeps the graph.

PyTorch's engine runs one CPU node at a time: a node that waited for its worker would serialise the workers. So the work of
one call is split over two kinds of node, and the engine's own priorities put all waiting behind all sending:

    item's tensors ──► Gate (identity, runs late) ──┐
    captures ──► CaptureGate (runs last of all) ────┴─► Call ──► outputs                         forward, left to right
    real gradients ◄── wait, take ◄─────────────────── send the outputs' gradients, return at once   backward, right to left

A call may have been given the result of another one that nobody else sees (`hidden`). Then its gate does not wait: it passes
on a `Promise`, and the gradient goes from worker to worker as soon as it is there, whatever this thread waits for meanwhile.

With `create_graph=True` the worker keeps a graph of that backward too, and the gradients that the gates take are the outputs
of another `Call`, whose inputs are the outputs' gradients, the item's tensors and the captures. Nothing is special about it,
so there are derivatives of every order.

Guarantees: every item has gates of its own, so a backward for one item leaves the history of the others alone; gradients are
    the worker's, whatever placeholders travelled between the nodes.
Assumes: a `Home` that delivers. Nothing here knows processes or memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from mpgrad.torch_state.private import (
    apply,
    graph_is_kept,
    graph_task,
    has_tangent,
    leaf_will_run,
    node_type,
    outside_transforms,
    plus,
    set_priority,
    wait_for_devices,
    when_backward_ends,
    will_run,
)
from mpgrad.torch_state.vmap_levels import Level, levels_of, within, without
from mpgrad.tracebacks import hide_own_frames

__all__ = [
    "Captures",
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
    "attach",
    "backward_without_engine",
    "call_off_if_interrupted",
    "differentiate",
    "edges_behind_gates",
    "edges_to_captures",
    "forget_oldest",
    "gate",
    "gate_behind",
    "is_call",
    "item_of",
    "leaf_gate",
    "modified_in_place",
    "note_failure",
]


# Priorities, with the number of the graph added. Other nodes are numbered as they are made, and there are more of them.
SEND = 1 << 40
WAIT = 1
WAIT_LAST = 0  # for captures: their sums are complete when all calls are done
ATTACHED = itertools.count()

MOST_TASKS = 256  # backwards of one operation at a time: in threads, or nested


class Promise(NamedTuple):
    """A gradient that another backward computes."""

    reply: Any  # the `homes.GradientReply` to that backward
    place: int  # among the gradients that it gives


Grads = Sequence[Sequence[torch.Tensor | Promise]]  # of the outputs of one call: the parts of each sum; none: no gradient


class Order(NamedTuple):
    """What a backward of one call has to compute."""

    task: int  # the number of the backward
    keep: bool  # the graph, for another backward
    whole: bool  # from all outputs to all inputs and captures: none of the graph is left then, unless it is kept
    create: bool  # a graph of the gradients
    wanted: tuple[int, ...]  # inputs whose gradients are needed
    captures: bool  # gradients of the captures are needed
    apart: bool  # those of this call by themselves, rather than added up in the worker
    levels: tuple[Level, ...]  # gradients are batches with these dimensions in front


class Reply(Protocol):
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


class Ready(Protocol):
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
    def code(self) -> int:
        """The number of the function's pickle."""
        ...

    @property
    def carrier(self) -> object:
        """By which graphs are reached: that of one pool."""
        ...

    def send_gradients(self, graph: RemoteGraph, order: Order, grads: Grads) -> Reply:
        """Start the backward of one call; returns at once."""
        ...

    def capture_gradients(self, task: int) -> Iterator[tuple[tuple[Level, ...], Sequence[torch.Tensor | None]]]:
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

    def __init__(self, outputs: Iterable[int], inputs: Iterable[int]) -> None:
        """`outputs` and `inputs` are how many each item has."""
        self.of_output = owners(outputs)
        self.of_input = owners(inputs)

    def of(self, item: int) -> Member:
        return Member(*(range(bisect_left(each, item), bisect_right(each, item)) for each in (self.of_output, self.of_input)))

    def given(self, grads: Sequence[object]) -> dict[int, None]:
        """The items to whose results a gradient has come."""
        return dict.fromkeys(itertools.compress(self.of_output, [grad is not None for grad in grads]))


def owners(counts: Iterable[int]) -> list[int]:
    """For each of many things, the item that it belongs to: so many belong to the first, so many to the second."""
    return [item for item, count in enumerate(counts) for _ in range(count)]


class RemoteGraph:
    """The parent's handle of one kept graph. The `Call` node and its gates share it; it is released with the last of them."""

    __slots__ = (
        "__weakref__",
        "_derivatives",
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
        "ready",
        "recipe",
        "worker",
    )

    def __init__(self, home: Home, worker: object, call: int, index: int | range, recipe: object = None) -> None:
        self.home = home
        self.worker = worker
        self.recipe = recipe  # from which the graph can be made again, by another worker; None where it cannot
        self.ready: Ready | None = None
        self.call = call
        self.index = index  # of its item, or of those of a bundle
        self.members: Members | None = None  # of a bundle
        self.number = -1  # in the order in which graphs were attached to nodes
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
        self._derivatives[derivative.order.task] = derivative

    def take(self, task: int, number: int) -> torch.Tensor | None:
        """The gradient of input `number`; the first gate of a call to ask waits for all of them."""
        derivative = self._expected(task)
        grad = derivative.take(number)
        self._forget_taken(derivative)
        return grad

    def take_all(self, task: int, count: int) -> list[torch.Tensor | None]:
        """The gradients of all `count` inputs of a bundle."""
        derivative = self._expected(task)
        found = derivative.take_all()
        self._forget_taken(derivative)
        return [found.get(number) for number in range(count)]

    def given(self, grads: Sequence[object]) -> int | range:
        """The item, or the items, to whose results gradients have come; `grads` has nothing for the others."""
        if not isinstance(self.index, range) or self.members is None:
            return self.index
        items = self.members.given(grads)
        return self.index[next(iter(items))] if len(items) == 1 else self.index

    def is_expected(self, task: int) -> bool:
        return self._derivatives is not None and task in self._derivatives

    def forget(self, task: int) -> None:
        """What nobody has taken of that backward, and nobody will."""
        if self._derivatives is not None:
            self._derivatives.pop(task, None)
        if self.home.reach is not None:
            self.home.reach.apart.pop(task, None)

    def _expected(self, task: int) -> Derivative:
        assert self._derivatives is not None
        return self._derivatives[task]

    def _forget_taken(self, derivative: Derivative) -> None:
        derivatives = self._derivatives
        if derivative.is_taken and derivatives is not None:
            derivatives.pop(derivative.order.task, None)  # two gates may come here at once
            self._derivatives = derivatives or None

    def promise(self, task: int, number: int) -> Promise | None:
        """Instead of `take`; None where the gradient has to be seen on its way."""
        derivative = self._expected(task)
        promise = derivative.promise(number)
        self._forget_taken(derivative)
        return promise

    def take_promises(self, task: int) -> Sequence[tuple[int, Promise]]:
        return () if self.promises is None else self.promises.pop(task, ())

    def put_promise(self, task: int, output: int, promise: Promise) -> None:
        if self.promises is None:
            self.promises = {}
        self.promises.setdefault(task, []).append((output, promise))
        forget_oldest(self.promises)

    def reveal(self) -> None:
        """The caller may see the outputs now, and their gradients: those that come have to be waited for, after all is sent."""
        self.hidden = False
        for ref in self.gates_behind or ():
            if (node := ref()) is not None and node.graph is not None:
                set_priority(node, WAIT + node.graph.number)
        self.gates_behind = None

    def __del__(self) -> None:
        self.home.release(self)


class Carrier(Protocol):
    """By which gradients are sent."""

    def call_off_backward(self, task: int) -> None:
        """Nobody waits any more for what was sent for the backward with this number. Called from finalizers."""
        ...


class Backward:
    """One that is running: the engine holds this as long, and no longer, also if it fails or is interrupted.

    What it leaves behind then is work that nobody waits for; and, of one that is differentiable, gradients with a history
    that leads back to the graph which keeps them: Python's collector does not see a cycle through the engine's nodes.
    """

    def __init__(self, task: int) -> None:
        self.task = task
        self.graphs: list[weakref.ref[RemoteGraph]] = []
        self.carriers: list[Carrier] = []
        self.was_interrupted = True  # unless it comes to its end, or to what the backward of a call raised

    def __call__(self) -> None:
        """The engine calls it where the backward has not failed; then all has been taken."""
        self.was_interrupted = False

    def __del__(self) -> None:
        for ref in self.graphs:
            if (graph := ref()) is not None:
                graph.forget(self.task)
        if self.was_interrupted:
            for carrier in self.carriers:
                carrier.call_off_backward(self.task)


RUNNING: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()


def running(task: int) -> Backward:
    """The backward with this number, which runs in this thread."""
    backward = RUNNING.get(task)
    if backward is None:
        backward = RUNNING[task] = Backward(task)
        when_backward_ends(backward)
    return backward


def forget_at_end_of_backward(graph: RemoteGraph, task: int) -> None:
    running(task).graphs.append(weakref.ref(graph))


def call_off_if_interrupted(task: int, carrier: Carrier) -> None:
    """The carrier is about to send gradients for this backward."""
    if task in RUNNING or task == graph_task():
        backward = running(task)
        if carrier not in backward.carriers:
            backward.carriers.append(carrier)


@contextlib.contextmanager
def backward_without_engine(task: int) -> Iterator[None]:
    """What is sent within it, with this number, is called off if it is interrupted."""
    backward = RUNNING[task] = Backward(task)
    try:
        yield
        backward()
    finally:
        del backward  # the traceback may live on


def note_failure(task: int) -> None:
    """The backward of a call has raised, which ends the one with this number: nobody has interrupted that."""
    backward = RUNNING.get(task)
    if backward is not None:
        backward.was_interrupted = False


class Further(NamedTuple):
    """Where gradients are to be differentiated again: what they depend on."""

    node: weakref.ref[Any]  # the `Call`; weak, because a backward that fails leaves this behind
    grads: list[torch.Tensor]  # of the outputs, those that need gradients, each through a gate
    wanted: tuple[int, ...]  # inputs of the call; no gates to them, which would keep what keeps this


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
        if self._found is None:
            with outside_transforms():
                found = self._reply.gradients()
                graph, further, self._further = self._reply.graph, self._further, None
                if graph is not None and further is not None:
                    places = self._reply.connected()
                    outputs = [each for place in places if (each := found[place]) is not None]
                    attached = attach_further(graph, outputs, further, self._reply.reached)
                    for place, output in zip(places, attached, strict=True):
                        found[place] = output
            levels, count = self.order.levels, len(self.order.wanted)
            if levels:
                found = [None if each is None else within(each, levels) for each in found]
            self._found = dict(zip(self.order.wanted, found[:count], strict=True))
            if len(found) > count:
                self._of_captures = found[count:]
        return self._found


def attach_further(
    graph: RemoteGraph, outputs: list[torch.Tensor], further: Further, reached: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    node = further.node()
    assert node is not None  # the engine holds it
    family = graph.family = node.graph.family
    graph.inputs_lent = node.graph.inputs_lent  # read again, should it be made again
    home = node.graph.home
    token = node.token if home.reach is None else home.reach.further(home, node.token, reached)
    attached = attach(graph, outputs, token, [*further.grads, *gates_again(node, further.wanted)])
    family[:] = [ref for ref in family if ref() is not None]
    family.append(weakref.ref(attached[0].grad_fn))
    return attached


def modified_in_place(tensor: torch.Tensor, version: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}], which a call of the pool has read, "
        f"is at version {tensor._version}; expected version {version} instead"
    )


class Call(torch.autograd.Function):
    """The node of one call: its backward sends gradients to the worker and does not wait."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: RemoteGraph,
        outputs: list[torch.Tensor],
        token: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        ctx.token = token
        ctx.has_token = token is not None
        ctx.task = -1  # the backward that came here last
        ctx.output_count = len(outputs)
        ctx.inputs = inputs  # only for what may be differentiated again; no hooks for saved tensors have to see them
        graph.placeholders = tuple(
            [placeholder(each.dtype, each.shape, None if each.is_cpu else each.device) for each in inputs]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gates, capture_node = edges_of(ctx)
        if ctx.graph.members is not None:
            wanted = wanted_of_bundle(ctx.graph, gates, grads)
            count = len(ctx.graph.members.of_input)
        else:
            there = [number for number, (node, _) in enumerate(gates) if node is not None]
            wanted = tuple([number for number in there if will_run(gates[number][0])])
            count = len(there)
        captures = capture_node is not None and will_run(capture_node)
        task = graph_task()
        promises = ctx.graph.take_promises(task)
        if not (wanted or captures):
            try:
                for _, promise in promises:
                    promise.reply.wait()  # nobody else would hear what it raises
            except BaseException as error:
                hide_own_frames(error)
                raise
        else:
            ctx.task = task
            keep = graph_is_kept() or relatives_will_run(ctx)
            whole = len(wanted) == count and captures == (capture_node is not None) and are_all_given(grads, promises)
            create = torch.is_grad_enabled()
            derivative = differentiate(ctx, grads, wanted, captures, task, keep, create, whole, promises=promises)
            if wanted:
                ctx.graph.expect(derivative)
            if derivative.order.apart:
                reach = ctx.graph.home.reach
                reach.apart.setdefault(derivative.order.task, []).append(derivative)
                forget_oldest(reach.apart)
            if create:
                forget_at_end_of_backward(ctx.graph, task)
        return None, None, None, *ctx.graph.placeholders


def are_all_given(grads: Sequence[torch.Tensor | None], promises: Sequence[tuple[int, Promise]]) -> bool:
    promised = {output for output, _ in promises}
    return all(grad is not None or output in promised for output, grad in enumerate(grads))


def wanted_of_bundle(
    graph: RemoteGraph, gates: Sequence[tuple[Any, int]], grads: Sequence[torch.Tensor | None]
) -> tuple[int, ...]:
    """The inputs that are wanted, of items to whose results a gradient has come: all others' graphs are left alone."""
    if graph.members is None or not (gates and will_run(gates[0][0])):
        return ()
    given = graph.members.given(grads)
    inputs = [number for number, item in enumerate(graph.members.of_input) if item in given]
    if will_run(ROOT_EDGE.node):
        return tuple(inputs)
    leaves = edges_of_leaves(gates[0][0])
    return tuple([number for number in inputs if leaf_will_run(leaves[number][0])])


def forget_oldest(by_task: dict[Any, Any]) -> None:
    """A backward that failed leaves behind what nobody takes any more."""
    if len(by_task) > MOST_TASKS:
        del by_task[next(iter(by_task))]


def relatives_will_run(node: Any) -> bool:
    """Whether this backward still comes to a graph that shares its nodes in the worker: the last one may free them."""
    relatives = [each for ref in node.graph.family or () if (each := ref()) is not None]
    return any(each is not node and each.task != node.task and will_run(each) for each in relatives)


def is_call(node: object) -> bool:
    return isinstance(node, CALL_NODE)


def edges_of(node: Any) -> tuple[Sequence[tuple[Any, int]], Any]:
    """Of a `Call`: the edges to its gates, and the node of its captures, or None."""
    edges: Sequence[tuple[Any, int]] = node.next_functions
    if not node.has_token:
        return edges, None
    return edges[1:], edges[0][0] if isinstance(edges[0][0], CAPTURE_GATE_NODE) else None


def item_of(node: Any, output: int) -> Member:
    """What belongs to the item of a `Call` that gave this output."""
    graph: RemoteGraph = node.graph
    if graph.members is None:
        return Member(range(node.output_count), range(len(edges_of(node)[0])))
    return graph.members.of(graph.members.of_output[output])


def edges_behind_gates(node: Any) -> Sequence[tuple[Any, int]]:
    """Of a `Call`, for each input: the edge to what it is made of in the caller; none to what its results do not depend on."""
    gates, _ = edges_of(node)
    if node.graph.members is not None:
        return edges_of_leaves(gates[0][0]) if gates else ()
    return [(None, 0) if gate_node is None else gate_node.next_functions[0] for gate_node, _ in gates]


def edges_to_captures(node: Any) -> Sequence[tuple[Any, int]]:
    """Likewise for each capture."""
    _, capture_node = edges_of(node)
    edges = [] if capture_node is None else edges_behind_capture_gate(capture_node)
    return [edge[0].next_functions[0] if isinstance(edge[0], ALONE_NODE) else edge for edge in edges]


def edges_behind_capture_gate(node: Any) -> list[tuple[Any, int]]:
    own = list(node.next_functions)
    if not node.has_before:
        return own
    before = edges_behind_capture_gate(own.pop(0)[0])
    return [one if one[0] is not None else other for one, other in zip(own, before, strict=True)]


def differentiate(
    node: Any,
    grads: Sequence[torch.Tensor | None],
    wanted: tuple[int, ...],
    captures: bool,
    task: int,
    keep: bool,
    create: bool,
    whole: bool = False,
    apart: bool = False,
    promises: Sequence[tuple[int, Promise]] = (),
) -> Derivative:
    """Send the backward of the call whose `Call` is `node` to its worker; returns at once.

    `promises` are parts of the gradients of outputs, besides `grads`.
    """
    if any(grad is not None and has_tangent(grad) for grad in grads):
        raise TypeError(
            "a gradient that came to a pool's result has a tangent, which would be lost; for forward over reverse, "
            "let the dual tensors go into the pool's map, or use torch.func.jvp of torch.func.grad"
        )
    levels = levels_of(grads)
    if levels:
        plain = iter(without([grad for grad in grads if grad is not None], levels))
        grads = [None if grad is None else next(plain) for grad in grads]
    graph: RemoteGraph = node.graph
    apart = apart or create or graph.home.deterministic or torch.are_deterministic_algorithms_enabled()
    apart = captures and (apart or (graph.ready is not None and graph.ready.apart))
    further = None
    with outside_transforms():
        if create:
            if graph.family is None:
                graph.family = [weakref.ref(node)]
            given = [gate(grad) for grad in grads if grad is not None and grad.requires_grad]
            further = Further(weakref.ref(node), given, wanted)
        parts: list[list[torch.Tensor | Promise]] = [[] if grad is None else [grad] for grad in grads]
        for output, promise in promises:
            parts[output].append(promise)
        return graph.send(Order(task, keep, whole, create, wanted, captures, apart, levels), parts, further)


def gates_again(node: Any, wanted: Sequence[int]) -> list[torch.Tensor]:
    """The inputs of a `Call`, for one whose outputs are its gradients.

    In a bundle these are the inputs of all items: what a derivative of some has to do with others ends here.
    """
    if node.graph.members is None:
        return [gate(tensor) if tensor.requires_grad else tensor for tensor in node.inputs]
    own = set(wanted)
    return [gate(leaf) if number in own else leaf.detach() for number, leaf in enumerate(node.inputs)]


class Gate(torch.autograd.Function):
    """Waits for a call's gradient where it leaves the pool, and passes it on in place of what `Call` returned.

    A hook on an identity of PyTorch's own could not: it may not put a sparse gradient in the place of a dense placeholder.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph = None
        ctx.source = None  # the graph of the call that gave `tensor`, where it is a result that was passed on
        # No view: until the result is fetched the caller may write to `tensor` in place, which would move a view to the new
        # history. An argument that is returned as it is becomes one.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, others: torch.Tensor | None) -> torch.Tensor | None:
        graph, number, task = ctx.graph, ctx.number, graph_task()
        source: RemoteGraph | None = ctx.source
        if source is not None and source.hidden and not graph.has_further:
            promise = graph.promise(task, number)
            if promise is not None:
                source.put_promise(task, ctx.output, promise)
                return None
        try:
            if not graph.has_further:
                return graph.take(task, number)  # type: ignore[no-any-return]
            # Gradients of a derivative of this call have come through gates of their own, in front of this one, and are real.
            if others is graph.placeholders[number]:
                others = None
            grad = graph.take(task, number) if graph.is_expected(task) else None
        except BaseException as error:
            hide_own_frames(error)
            raise
        return others if grad is None else grad if others is None else plus(grad, others)


class Alone(torch.autograd.Function):
    """An identity, whose node has one output."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


class OwnHooks(OrderedDict[int, Callable[[torch.Tensor], Any]]):
    """The hooks of a result that shares its node with those of other items: called only where a gradient has come for it.

    PyTorch calls those of all outputs of a node that runs, with None for which there is none. Its own hooks expect that.
    """

    def __setitem__(self, number: int, hook: Callable[[torch.Tensor], Any]) -> None:
        if getattr(hook, "__module__", "") != "torch.autograd.graph":
            hook = functools.update_wrapper(functools.partial(called_with_gradient, hook), hook)
        super().__setitem__(number, hook)


def called_with_gradient(hook: Callable[[torch.Tensor], Any], grad: torch.Tensor | None) -> Any:
    return None if grad is None else hook(grad)


CALL_NODE = node_type(Call)
REGISTER_HOOKS = CALL_NODE._register_hook_dict  # what `Tensor.register_hook` calls, of the result's node, at the first hook


def register_hooks(node: Any, result: torch.Tensor) -> None:
    if node.graph.members is not None:
        result._backward_hooks = OwnHooks()
    REGISTER_HOOKS(node, result)


def refusing(register: Callable[[Any, Callable[..., Any]], Any]) -> Callable[[Any, Callable[..., Any]], Any]:
    """Nobody can tell from a node whose result it was asked for."""

    @functools.wraps(register)
    def register_or_refuse(node: Any, hook: Callable[..., Any]) -> Any:
        if node.graph.members is not None:
            raise RuntimeError(
                "a hook on this node would be called for other items too: the results of cheap items, which travel together, "
                "share it; put the hook on the result (result.register_hook), or make each item a call of its own (chunksize=1)"
            )
        return register(node, hook)

    return register_or_refuse


CALL_NODE._register_hook_dict = register_hooks
CALL_NODE.register_hook = refusing(CALL_NODE.register_hook)
CALL_NODE.register_prehook = refusing(CALL_NODE.register_prehook)


class LeafGate(torch.autograd.Function):
    """The gate of a bundle: waits for the gradients of all its items at once.

    They are leaves, of which a backward that has nothing for them leaves nothing behind. The last comes first: so the engine
    adds up the gradients of a tensor that several items share in the order of the serial loop.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph = ctx.source = None
        ctx.count = len(leaves)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[torch.Tensor | None, ...]:
        graph, task = ctx.graph, graph_task()
        try:
            return None, *(graph.take_all(task, ctx.count)[::-1] if graph.is_expected(task) else (None,) * ctx.count)
        except BaseException as error:
            hide_own_frames(error)
            raise


def leaf_gate(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Let leaves that need gradients into a bundle, all of them together.

    `ROOT` is one more. Nobody can ask for its gradient, so that it runs in those backwards only for which nobody has said what
    is wanted: then all leaves are, and none has to be asked about.
    """
    token: torch.Tensor = apply(LeafGate, ROOT, *leaves[::-1])
    return token


def edges_of_leaves(gate: Any) -> Sequence[tuple[Any, int]]:
    """In the order of the inputs. PyTorch keeps a Python object for each, from when they are first asked for."""
    return gate.next_functions[:0:-1]  # type: ignore[no-any-return]


def gate(tensor: torch.Tensor) -> torch.Tensor:
    """Let `tensor` into an operation: an identity whose node learns in `attach` which gradient it waits for."""
    gated: torch.Tensor = apply(Gate, tensor)
    return gated


def gate_behind(source: RemoteGraph | None, tensor: torch.Tensor) -> torch.Tensor:
    """A gate for an output of `source` that is passed on to another call."""
    gated = gate(tensor)
    node: Any = gated.grad_fn
    if source is not None and source.hidden:
        node.source, node.output = source, tensor.output_nr
        source.gates_behind = source.gates_behind or []
        source.gates_behind.append(weakref.ref(node))
    return gated


def attach(
    graph: RemoteGraph,
    outputs: list[torch.Tensor],
    token: torch.Tensor | None,
    gated: Sequence[torch.Tensor],
    leaves: Sequence[Sequence[torch.Tensor]] = (),
) -> tuple[torch.Tensor, ...]:
    """Make `outputs` the results of a `Call` on the gated inputs and, through the token, the captures.

    Of a bundle, whose gate is one for all, `leaves` are the inputs of each item.

    What was attached last is waited for first. Of one operation this is the last item, as in the serial loop, so that the
    gradients of a tensor that several items share are added up in the same order. Of a chain of operations it is the last
    one, so that all backwards of the one before can be sent before any of them is waited for.
    """
    graph.number = next(ATTACHED)
    for number, tensor in enumerate(gated):
        node: Any = tensor.grad_fn
        if node is None:  # nobody can ask for this one's gradient
            continue
        node.graph, node.number = graph, number
        waits = node.source is None or not node.source.hidden
        set_priority(node, (WAIT if waits else SEND) + graph.number)
    if token is None and not any(tensor.requires_grad for tensor in gated):
        token = ROOT
    if torch.is_grad_enabled():
        attached: tuple[torch.Tensor, ...] = apply(Call, graph, outputs, token, *gated)
    else:  # the function turned gradients on by itself
        with torch.enable_grad():
            attached = apply(Call, graph, outputs, token, *gated)
    node = attached[0].grad_fn
    set_priority(node, SEND + graph.number)
    if leaves:
        node.inputs = [leaf for each in leaves for leaf in each]
    return attached


class CaptureGate(torch.autograd.Function):
    """All captures of an operation enter here; each call gets one token instead of an edge per capture.

    An operation may have several, see `Captures`. In a backward the first to run gets all gradients, and puts aside for the
    others what it does not lead to. `before` is the token of one that leads to further captures.
    """

    @staticmethod
    def forward(ctx: Any, home: Home, led_to: Set[int], before: torch.Tensor | None, *captures: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.home = home
        ctx.led_to = led_to  # of those that have more behind them
        ctx.has_before = before is not None
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        reach: Reach = ctx.home.reach
        task = graph_task()
        edges = ctx.next_functions[1:] if ctx.has_before else ctx.next_functions
        total: list[torch.Tensor | None] = [None] * len(edges)
        # the last first: the order in which the engine adds up what the serial loop's items contribute
        try:
            for derivative in sorted(reach.apart.pop(task, ()), key=lambda derivative: -derivative.number):
                total = added(total, derivative.take_captures())
            for levels, grads in ctx.home.capture_gradients(task):
                total = added(total, [None if each is None else within(each, levels) for each in grads])
        except BaseException as error:
            hide_own_frames(error)
            raise
        if task in reach.put_aside:
            total = added(total, reach.put_aside.pop(task))
        for_others = [grad if node is None else None for grad, (node, _) in zip(total, edges, strict=True)]
        if any(grad is not None for grad in for_others):
            reach.put_aside[task] = for_others
            forget_oldest(reach.put_aside)
            when_backward_ends(lambda: reach.put_aside.pop(task, None))  # the others may not be in it
        wait_for_devices(total)
        return None, None, None, *total


def added(total: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    pairs = zip(total, grads, strict=True)
    return [grad if held is None else held if grad is None else plus(held, grad) for held, grad in pairs]


class Reach:
    """What the tokens of an operation have in common, as long as there is a result. Of the captures it keeps none alive."""

    def __init__(self, captures: Sequence[torch.Tensor], more_behind: Set[int]) -> None:
        self.more_behind = more_behind  # captures, by number, behind which the caller has a history, or hooks
        self.found: set[int] = set()  # of those, the ones that a result depends on, as the workers say
        self.apart: dict[int, list[Derivative]] = {}  # by backward: whose captures' gradients come one call at a time
        self.put_aside: dict[int, list[torch.Tensor | None]] = {}  # by backward: gradients that other tokens lead to
        self._captures = [(weakref.ref(each), 0 if each.is_inference() else each._version) for each in captures]

    def further(self, home: Home, token: torch.Tensor | None, reached: Sequence[int]) -> torch.Tensor | None:
        """A token for gradients, which may depend on captures (`reached`), by way of hooks, that the result did not depend on.

        Raises:
            RuntimeError: such a capture is not what it was.
        """
        gate: Any = None if token is None or not isinstance(token.grad_fn, CAPTURE_GATE_NODE) else token.grad_fn
        led_to = frozenset() if gate is None else gate.led_to
        missing = set(reached) - led_to
        if not missing:
            return token
        nothing = torch.zeros((), device="cpu")
        numbers = range(len(self._captures))
        captures = [apply(Alone, self._as_it_was(number)) if number in missing else nothing for number in numbers]
        further: torch.Tensor = apply(CaptureGate, home, led_to | missing, None if gate is None else token, *captures)
        set_priority(further.grad_fn, WAIT_LAST)
        return further

    def _as_it_was(self, number: int) -> torch.Tensor:
        ref, version = self._captures[number]
        capture = ref()
        if capture is None or not capture.requires_grad or capture._version != version:
            raise RuntimeError(
                "a derivative of higher order depends on a tensor that the function captures and only its backward uses, and "
                "that the caller has dropped or changed since; keep it as it was, or use it in the function's result"
            )
        return capture


class Captures:
    """The captures of one operation that need gradients, and the token that leads a call's results to them.

    To those that a result was made from, and no other: its backward would run, and free, what the caller has behind that. The
    workers say, before a result is here, which ones it was made from of those that have `more_behind`.
    """

    def __init__(self, home: Home, captures: Sequence[torch.Tensor], more_behind: Set[int] = frozenset()) -> None:
        self._home = home
        self._reach = home.reach = Reach(captures, more_behind)
        with torch.enable_grad():  # the function may turn them on
            # as they are now: the caller may write to them, or freeze them, before the token is made
            self._captures = [apply(Alone, each) if more_behind else each for each in captures]
        # what the last token leads to, and it: written at once, because any thread may be here
        self._made: tuple[Set[int], torch.Tensor | None] | None = None
        if torch.is_grad_enabled() and not more_behind:
            self.token()

    @torch.enable_grad()
    def token(self) -> torch.Tensor | None:
        """None where there is nothing to lead to. A new one, where more has been found than the last one leads to."""
        made = self._made
        if made is None or not self._reach.found <= made[0]:
            led_to = frozenset(self._reach.found)
            left_out = self._reach.more_behind - led_to
            captures = [each.detach() if number in left_out else each for number, each in enumerate(self._captures)]
            token: torch.Tensor | None = None
            if len(left_out) < len(captures):
                token = apply(CaptureGate, self._home, led_to, None, *captures)
                set_priority(token.grad_fn, WAIT_LAST)
            made = self._made = led_to, token
        return made[1]


ALONE_NODE = node_type(Alone)
CAPTURE_GATE_NODE = node_type(CaptureGate)

with torch.inference_mode(False):
    # stands in as the token where only tensors that `fn` made itself need gradients: the outputs must need them too; and see
    # `leaf_gate`
    ROOT = torch.zeros((), requires_grad=True, device="cpu")
    ROOT_EDGE = get_gradient_edge(ROOT)  # kept alive: made anew in anomaly mode, by two threads at once, it can lock both


@functools.lru_cache(maxsize=4096)
def placeholder(dtype: torch.dtype, shape: torch.Size, device: torch.device | None) -> torch.Tensor:
    """A gradient that costs nothing and passes the engine's checks."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device or "cpu").expand(shape)
