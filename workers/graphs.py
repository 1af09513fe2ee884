"""The graph table contains the autograd graph of every call that ran here and whose backward may
come. This module runs in workers.

The outputs of a graph were sent to the caller as bytes, so the table keeps the graph's edges. The
nodes between them are PyTorch's own. So `retain_graph` and the RuntimeError of a second backward
are also PyTorch's own, not imitations.

These are the states of a call's graph. Each arrow is a method of `GraphTable`:

    (none) ── keep ──► KEPT ── note_emptied ──► EMPTIED
                        │                         │
                       trim                      trim
                        ▼                         │
    (none) ── find ──► DROPPED ◄──────────────────╯
              miss      │
                  take_dropped                           any ── release ──► (none)
                        ▼
                     (none)

    KEPT      the graph is here and whole
    EMPTIED   the graph is here but used up; PyTorch raises at a second backward
    DROPPED   the graph is not here, but the caller does not know that yet
    (none)    the graph was never here, or the caller knows that it is gone

keep: a call has run, for the first time or again, or a backward has run whose gradients are
differentiable. note_emptied: a backward has run through the graph without keeping it. release: the
caller's node has died, or the backward was the last one. trim: the graphs take too much memory.
find: a backward needs the graph. miss: an eager backward has run through a part of it. The caller
sends the call of a dropped graph again with the next backward that needs it.

The outputs of a graph keep it alive in autograd, so here the edges keep it alive:

    forward: entrances record where the inputs enter
        inputs ──► dress ──► the function ──► outputs
    backward: PyTorch runs it between these edges
        edges_at(entrances) ◄── gradients_at ◄── edge_of(output)
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from mpgrad.torch_state.private import (
    DELAYED_ERRORS,
    ERROR_NODE,
    NODE_IN_PYTHON,
    CallCounter,
    Level,
    apply,
    edge_that_keeps,
    gradients,
    graph_behind,
    is_alive,
    leaf_nodes,
    node_type,
    outputs_leading_to,
    over,
    plus,
    words_of_error,
)
from mpgrad.wire.messages import Release
from mpgrad.wire.tensor_refs import LEAF, PARAMETER, REQUIRES_GRAD, TensorRef
from mpgrad.workers.memory import DeviceMap, MemoryMonitor, give_back, memory_in_use

if TYPE_CHECKING:
    from mpgrad.workers.functions import Function

__all__ = [
    "CHECKPOINTS",
    "ENTRY_NODE",
    "ERRORS",
    "HOOKS",
    "CaptureSearch",
    "Edge",
    "Entrance",
    "GraphEdges",
    "GraphTable",
    "dress",
    "edge_of",
    "edges_at",
    "errors_behind",
    "gradients_at",
    "leaves_behind",
    "still_there",
]

# A leaf is its own edge. This is cheaper, and a sparse leaf has no other edge.
Edge = GradientEdge | torch.Tensor
# for an input: the node where its gradient leaves, or the input itself if it is a leaf
Entrance = weakref.ref[Any] | torch.Tensor


def edge_of(tensor: torch.Tensor) -> Edge:
    node = tensor.grad_fn
    if node is None:
        return tensor
    # the node's Python object alone does not keep its graph alive
    if isinstance(node, NODE_IN_PYTHON):
        return edge_that_keeps(tensor)
    return GradientEdge(node, tensor.output_nr)


class GraphEntry(torch.autograd.Function):
    """The node where the gradient of a non-leaf input leaves. In the caller this input has a
    history, so in-place writes to it are allowed."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, alone: list[torch.Tensor]) -> torch.Tensor:
        # The tensor is in a list, because an argument would be returned as a view, which forbids
        # in-place writes.
        return alone[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None]:
        # This runs only in `run_whole`, perhaps in several runs of the engine. Otherwise the engine
        # takes the gradient at this node's edge and does not run the node.
        held = vars(ctx).get("received")
        ctx.received = grad if held is None else held if grad is None else plus(held, grad)
        return None, None


ENTRY_NODE = node_type(GraphEntry)
ROOT = torch.zeros((), device="cpu", requires_grad=True)
# This edge is kept alive because PyTorch would otherwise rebuild it. In anomaly mode PyTorch runs
# Python while it makes the edge and holds ROOT's lock. Another worker thread that holds the
# interpreter's lock and waits for ROOT's lock would then wait forever.
ROOT_EDGE = get_gradient_edge(ROOT)


def dress(
    tensors: Sequence[torch.Tensor], flags: Sequence[int]
) -> tuple[list[torch.Tensor], list[Entrance]]:
    """Return `tensors` as `fn` would see them in the caller, and an entrance for each tensor that
    needs a gradient."""
    dressed, entrances = list(tensors), list[Entrance]()
    for k, own in enumerate(flags):
        if own & PARAMETER:
            dressed[k] = torch.nn.Parameter(dressed[k], requires_grad=False)
        if own & REQUIRES_GRAD and own & LEAF:
            entrances.append(dressed[k].requires_grad_())
        elif own & REQUIRES_GRAD:
            with torch.enable_grad():  # `fn` may enable it even if the caller has it off
                dressed[k] = apply(GraphEntry, ROOT, [dressed[k]])
            # recorded now, because an in-place write moves the tensor to another node
            entrances.append(weakref.ref(dressed[k].grad_fn))
    return dressed, entrances


def edges_at(entrances: Sequence[Entrance]) -> list[Edge | None]:
    """Return the edges of the entrances, after `fn` has run and its arguments are dropped.

    The results keep the inputs that they depend on. For other inputs the edge is None, so no
    backward of these results runs the histories of such inputs in the caller. While the arguments
    are still referenced, every input has an edge.
    """
    return [edge_at(each) if isinstance(each, weakref.ref) else each for each in entrances]


def edge_at(entrance: weakref.ref[Any]) -> GradientEdge | None:
    node = entrance()
    return None if node is None else GradientEdge(node, 0)


def leaves_behind(
    outputs: Sequence[torch.Tensor], wanted: Collection[int], reentrant: bool
) -> set[int]:
    """Return the `wanted` leaves, by id, on which the outputs depend.

    A `reentrant` graph does not show this, so for such a graph all of them are returned.
    """
    if reentrant or not wanted:
        return set(wanted)
    found = {id(output) for output in outputs if id(output) in wanted}
    leaves = leaf_nodes(outputs)
    while len(found) < len(wanted) and (node := next(leaves, None)) is not None:
        if id(node.variable) in wanted:
            found.add(id(node.variable))
    return found


class CaptureSearch:
    """Finds the captures on which results depend, among those that have a history or hooks in the
    caller."""

    def __init__(self, captures: dict[int, int]) -> None:
        self._all = captures  # their numbers among those that need gradients, by id
        self._left = dict(captures)
        self._found: list[int] = []

    def look(self, outputs: Sequence[torch.Tensor], reentrant: bool) -> None:
        """Search the graphs of all calls until each capture has been found once. A capture that is
        never found costs a walk through every graph."""
        for each in leaves_behind(outputs, self._left, reentrant):
            self._found.append(self._left.pop(each))

    def take_found(self) -> list[int]:
        """Return the captures that were found since the last call."""
        found, self._found = self._found, []
        return found

    def behind(self, outputs: Sequence[torch.Tensor], reentrant: bool) -> list[int]:
        """Return the captures on which these outputs depend."""
        return [self._all[each] for each in leaves_behind(outputs, self._all, reentrant)]


def gradients_at(
    edges: Sequence[Edge | None],
    outputs: Sequence[Edge],
    grads: Sequence[torch.Tensor],
    reentrant: bool,
    keep: bool = False,
    create: bool = False,
    levels: tuple[Level, ...] = (),
) -> list[torch.Tensor | None]:
    """Return the gradients at the edges, or None for missing and unused edges."""
    there = [edge for edge in edges if edge is not None]
    found: Sequence[torch.Tensor | None]
    if not there:
        return [None] * len(edges)
    if reentrant:
        found = run_whole(outputs, there, grads, keep, create)
    elif levels:
        found = over(levels, lambda grads: gradients(outputs, there, grads, keep, create), grads)
    else:
        found = gradients(outputs, there, grads, keep, create)
    if len(there) == len(edges):
        return list(found)
    rest = iter(found)
    return [None if edge is None else next(rest) for edge in edges]


def still_there(edge: Edge | None) -> Edge | None:
    """Return the edge, or None if the call has frozen its leaf or its node is dead."""
    if isinstance(edge, torch.Tensor):
        return edge if edge.requires_grad else None
    return edge if edge is None or is_alive(edge.node) else None


def run_whole(
    outputs: Sequence[Edge],
    edges: Sequence[Edge],
    grads: Sequence[torch.Tensor],
    keep: bool,
    create: bool,
) -> list[torch.Tensor | None]:
    """Run `torch.autograd.backward`, which accumulates gradients in leaves and entry nodes, and
    take them from there."""
    leaves = [edge for edge in edges if isinstance(edge, torch.Tensor)]
    for leaf in leaves:
        leaf.grad = None
    try:
        # edges and tensors may be mixed
        torch.autograd.backward(outputs, grads, keep, create)  # type: ignore[arg-type]
    finally:
        found = [taken(edge) for edge in edges]
    return found


def taken(edge: Edge) -> torch.Tensor | None:
    if isinstance(edge, torch.Tensor):
        grad, edge.grad = edge.grad, None
        return grad
    return vars(edge.node).pop("received", None)  # type: ignore[no-any-return]


CHECKPOINTS = CallCounter(CheckpointFunction, "forward")  # reentrant ones
ERRORS = CallCounter(DELAYED_ERRORS, "DelayedError")  # see `errors_behind`
HOOKS = CallCounter(torch.Tensor, "register_hook")


def errors_behind(outputs: Sequence[torch.Tensor]) -> dict[int, str]:
    """Return the errors that a backward through the whole graph raises, by number of the output.

    PyTorch puts a node that only raises behind the gradients of a `once_differentiable` backward.
    This node does not lead to an input. So a backward for given inputs does not reach it, neither
    in the loop nor here. Only the caller knows whether a backward is for all inputs, so the caller
    raises the error. The search takes about as long as the backward, so it is skipped until such a
    node has been made.
    """
    if not ERRORS.may_have_run:
        return {}
    users = graph_behind(outputs)
    errors = {node: words_of_error(node) for node in users if type(node) is ERROR_NODE}
    return outputs_leading_to(errors, outputs, users)


# --- the table


MOST_STALE = 1000  # entries in the heap of graphs that are gone


class GraphEdges(NamedTuple):
    """A graph, represented by its edges. The function stores the captures' edges."""

    function: Function
    outputs: list[Edge]  # of the outputs that need gradients, in order
    # of the inputs that need gradients, in order; None if the outputs do not depend on the input
    inputs: Sequence[Edge | None]
    # whether only `backward()` can run it, because it has a reentrant checkpoint
    reentrant: bool = False
    devices: DeviceMap | None = None

    def run_backward(
        self,
        grads: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
        captures: bool,
        keep: bool,
        create: bool,
        levels: tuple[Level, ...],
    ) -> list[torch.Tensor | None]:
        """Return gradients of the `wanted` inputs and, if `captures`, then of all captures. They
        are None for unused inputs and captures."""
        # `run_whole` accumulates gradients in all leaves. All of them are taken, because the next
        # backward would add to the others.
        numbers = range(len(self.inputs)) if self.reentrant else wanted
        edges = [still_there(self.inputs[k]) for k in numbers]
        if captures or self.reentrant:
            edges += map(still_there, self.function.edges)
        given = [
            (edge, grad) for edge, grad in zip(self.outputs, grads, strict=True) if grad is not None
        ]
        found: list[torch.Tensor | None] = [None] * len(edges)
        if given:
            outputs, incoming = zip(*given, strict=True)
            found = gradients_at(edges, outputs, incoming, self.reentrant, keep, create, levels)
        if self.reentrant:
            return [*(found[k] for k in wanted), *(found[len(self.inputs) :] if captures else ())]
        return found

    def caller_devices(self, wanted: Sequence[int], captures: bool) -> Sequence[int] | None:
        """Return the caller's devices for gradients of the `wanted` inputs, and of the captures.
        Return None in a pool without devices."""
        return None if self.devices is None else self.devices.caller_devices(wanted, captures)

    def derived(
        self,
        outputs: Sequence[torch.Tensor],
        entered: Sequence[Edge | None],
        grads: Sequence[TensorRef],
    ) -> GraphEdges:
        """Return the graph of a backward through this graph. The backward turned `grads`, which
        entered at the edges `entered`, into `outputs`."""
        devices = None if self.devices is None else self.devices.derived(outputs, grads)
        edges = [*entered, *self.inputs]
        return GraphEdges(self.function, list(map(edge_of, outputs)), edges, devices=devices)


class GraphTable:
    """The graphs that are kept here, by call.

    While the graphs exceed `limit` bytes, `trim` drops the largest, which are rebuilt if they are
    needed. While `watch` finds memory short, `trim` also drops the older half.

    A call is in one of `_kept`, `_emptied` and `_dropped`, or in none. With a limit of 0 no graph
    is kept, and sizes are not measured.
    """

    def __init__(self, limit: int | None, watch: MemoryMonitor | None = None) -> None:
        self.nbytes = 0  # of the kept graphs, if there is a limit
        self._limit = limit
        self._watch = watch
        self._kept: dict[int, GraphEdges] = {}
        self._emptied: dict[int, GraphEdges] = {}
        self._dropped: set[int] = set()  # the caller believes that these graphs are here
        self._sizes: dict[int, int] = {}  # of the kept graphs
        # a heap of (-bytes, call), which may contain graphs that are gone
        self._largest: list[tuple[int, int]] = []

    def __contains__(self, call: int) -> bool:
        return call in self._kept or call in self._emptied

    def memory_in_use(self) -> int:
        """Return the bytes in use, or 0 without a limit. The rise during a call is the size of its
        graph."""
        return memory_in_use() if self._limit else 0

    def keep(self, call: int, graph: GraphEdges, nbytes: int) -> None:
        """Keep a graph. `nbytes` is its size, or 0 if sizes are not measured."""
        self.release(call)
        self._kept[call] = graph
        if self._limit and nbytes > 0:
            self.nbytes += nbytes
            self._sizes[call] = nbytes
            heapq.heappush(self._largest, (-nbytes, call))
            if len(self._largest) > 2 * len(self._sizes) + MOST_STALE:
                self._largest = [(-size, call) for call, size in self._sizes.items()]
                heapq.heapify(self._largest)

    def find(self, call: int) -> GraphEdges | None:
        """Return the graph for a backward. A missing graph counts as dropped from now on."""
        graph = self._kept.get(call) or self._emptied.get(call)
        if graph is None:
            self._dropped.add(call)
        return graph

    def note_emptied(self, call: int) -> None:
        if (graph := self._kept.get(call)) is not None:
            self.release(call)
            self._emptied[call] = graph

    def trim(self) -> None:
        if self._limit == 0:
            self._dropped.update(self._kept, self._emptied)
            self._kept.clear()
            self._emptied.clear()
        while self._limit and self.nbytes > self._limit:
            size, call = heapq.heappop(self._largest)
            if self._sizes.get(call) == -size:
                self._drop(call)
        if self._watch is not None and self._kept and self._watch.is_short():
            for call in list(self._kept)[: (len(self._kept) + 1) // 2]:
                self._drop(call)
            give_back()

    def _drop(self, call: int) -> None:
        self.release(call)
        self._dropped.add(call)

    def miss(self, call: int) -> None:
        """Record that the caller will expect this graph, although it was never kept."""
        self._dropped.add(call)

    def forget(self, message: Release) -> None:
        for call in message.calls:
            self.release(call)

    def release(self, call: int) -> None:
        """Forget the graph of a call in any state."""
        self._kept.pop(call, None)
        self._emptied.pop(call, None)
        self._dropped.discard(call)
        if self._sizes:
            self.nbytes -= self._sizes.pop(call, 0)

    def take_dropped(self) -> list[int]:
        """Return the calls whose graphs were dropped since the last call of this method."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped
