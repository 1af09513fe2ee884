"""The graph table: the autograd graph of every call that ran here and whose backward may come.

The outputs of a graph have gone to the caller as bytes, so the table holds its edges. Everything
between is PyTorch's own, with its own rules: `retain_graph`, and the RuntimeError of a second
backward, are not imitated, they happen.

The life of a graph, by call. Each arrow is a method of `GraphTable`:

    (none) ── keep ──► KEPT ── note_emptied ──► EMPTIED
                        │                         │
                       trim                      trim
                        ▼                         │
    (none) ── find ──► DROPPED ◄──────────────────╯
              miss      │
                  take_dropped                           any ── release ──► (none)
                        ▼
                     (none)

    KEPT      here, and whole
    EMPTIED   here, but emptied, which PyTorch tells a second backward
    DROPPED   not here, and the caller does not know it
    (none)    never here, or the caller knows that it is not

keep: a call has run, for the first time or again; or a backward whose gradients are to be
differentiated. note_emptied: a backward ran through it that was not to keep it. release: the
caller's node has died, or the backward was the last one. trim: graphs take too much memory. find: a
backward wants it. miss: an eager backward ran through a part of it. Of a dropped graph the caller
sends the call once more with the next backward that needs it.

Autograd keeps a graph alive from its outputs, so the edges are what keeps it here:

    forward: entrances remember where the inputs came in
        inputs ──► dress ──► the function ──► outputs
    backward: PyTorch's own, between these edges
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
    LEAF_NODE,
    NODE_IN_PYTHON,
    CallCounter,
    Level,
    apply,
    edge_that_keeps,
    gradients,
    graph_behind,
    is_alive,
    node_type,
    over,
    plus,
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
    "gradients_at",
    "leaves_behind",
    "runs_whole",
    "still_there",
]

# a leaf stands for its own edge: that is cheaper, and a sparse leaf has no other
Edge = GradientEdge | torch.Tensor
# of an input: the node where its gradient leaves, or the leaf that it is
Entrance = weakref.ref[Any] | torch.Tensor


def edge_of(tensor: torch.Tensor) -> Edge:
    node = tensor.grad_fn
    if node is None:
        return tensor
    if isinstance(node, NODE_IN_PYTHON):  # its Python object, by itself, keeps nothing
        return edge_that_keeps(tensor)
    return GradientEdge(node, tensor.output_nr)


class GraphEntry(torch.autograd.Function):
    """Where the gradient of a non-leaf input leaves: the caller's tensor has a history, so in-place
    writes to it are legal."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, alone: list[torch.Tensor]) -> torch.Tensor:
        # hidden in a list: as an argument it would come back as a view, which forbids in-place
        # writes
        return alone[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None]:
        # for `run_whole`, perhaps in several runs of the engine; otherwise that takes it off before
        # it comes here
        held = vars(ctx).get("received")
        ctx.received = grad if held is None else held if grad is None else plus(held, grad)
        return None, None


ENTRY_NODE = node_type(GraphEntry)
ROOT = torch.zeros((), device="cpu", requires_grad=True)
# Kept alive: in anomaly mode PyTorch makes it with ROOT's lock held and runs Python meanwhile, so
# that another worker thread which waits for that lock, holding the interpreter's, would wait for
# ever.
ROOT_EDGE = get_gradient_edge(ROOT)


def dress(
    tensors: Sequence[torch.Tensor], flags: Sequence[int]
) -> tuple[list[torch.Tensor], list[Entrance]]:
    """`tensors` as `fn` would see them in the caller, and an entrance for each one that needs a
    gradient."""
    dressed, entrances = list(tensors), list[Entrance]()
    for k, own in enumerate(flags):
        if own & PARAMETER:
            dressed[k] = torch.nn.Parameter(dressed[k], requires_grad=False)
        if own & REQUIRES_GRAD and own & LEAF:
            entrances.append(dressed[k].requires_grad_())
        elif own & REQUIRES_GRAD:
            with torch.enable_grad():  # where the caller has it off, `fn` may still turn it on
                dressed[k] = apply(GraphEntry, ROOT, [dressed[k]])
            # now: an in-place write moves the tensor away from that node
            entrances.append(weakref.ref(dressed[k].grad_fn))
    return dressed, entrances


def edges_at(entrances: Sequence[Entrance]) -> list[Edge | None]:
    """After `fn` has run, and the tensors that it was given are forgotten: what its results depend
    on has been kept by them.

    None where they do not. The caller has a history behind it then which is not theirs, and no
    backward of theirs may run it. Where the tensors are still held there is an edge to each.
    """
    return [edge_at(each) if isinstance(each, weakref.ref) else each for each in entrances]


def edge_at(entrance: weakref.ref[Any]) -> GradientEdge | None:
    node = entrance()
    return None if node is None else GradientEdge(node, 0)


def leaves_behind(
    outputs: Sequence[torch.Tensor], wanted: Collection[int], reentrant: bool
) -> set[int]:
    """Those leaves, of the `wanted` ones by id, that the outputs depend on.

    A graph that is `reentrant` does not show what that is: so it may be any.
    """
    if reentrant or not wanted:
        return set(wanted)
    found = {id(output) for output in outputs if id(output) in wanted}
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes and len(found) < len(wanted):
        for node, _ in nodes.pop().next_functions:
            if type(node) is LEAF_NODE:
                if id(node.variable) in wanted:
                    found.add(id(node.variable))
            elif node is not None and node not in seen:
                seen.add(node)
                nodes.append(node)
    return found


class CaptureSearch:
    """For the captures of a function behind which the caller has a history, or hooks: which of them
    results depend on."""

    def __init__(self, captures: dict[int, int]) -> None:
        self._all = captures  # their numbers among those that need gradients, by id
        self._left = dict(captures)
        self._found: list[int] = []

    def look(self, outputs: Sequence[torch.Tensor], reentrant: bool) -> None:
        """In the graphs of all calls, until each has been found once; so one that never is costs a
        walk through every graph."""
        self._found += [
            self._left.pop(each) for each in leaves_behind(outputs, self._left, reentrant)
        ]

    def take_found(self) -> list[int]:
        """Since the last time."""
        found, self._found = self._found, []
        return found

    def behind(self, outputs: Sequence[torch.Tensor], reentrant: bool) -> list[int]:
        """Those that these outputs depend on."""
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
    """None where there is no edge, and for what was not used."""
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


def delayed_errors(outputs: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Return the edges behind nodes that raise when a gradient comes to them.

    PyTorch puts such a node behind the gradients of a `once_differentiable` backward. No input is
    behind it, so the engine would pass it by and silently leave a part of the gradient out, unless
    the gradient at such an edge is asked for too.
    """
    return [
        GradientEdge(behind, 0)
        for node in graph_behind(outputs)
        if type(node) is ERROR_NODE
        for behind, _ in node.next_functions
        if behind is not None
    ]


def still_there(edge: Edge | None) -> Edge | None:
    """Not a leaf that the call has frozen, nor a node that has ended."""
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
    """As `torch.autograd.backward`: gradients gather in leaves and entries, and are taken from
    there."""
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
ERRORS = CallCounter(DELAYED_ERRORS, "DelayedError")  # see `delayed_errors`
HOOKS = CallCounter(torch.Tensor, "register_hook")


def runs_whole() -> int:
    """Return a number that changes when a function makes a graph that has to run as a whole, by
    `backward()`: one with a reentrant checkpoint, or with a node that only raises."""
    return CHECKPOINTS.count + ERRORS.count


# --- the table


MOST_STALE = 1000  # entries of the heap for graphs that are gone


class GraphEdges(NamedTuple):
    """A graph by its edges; those of the captures are the function's."""

    function: Function
    outputs: list[Edge]  # of the outputs that need gradients, in order
    # of the inputs that need gradients, in order; None: the outputs do not depend on it
    inputs: Sequence[Edge | None]
    # can only be run as a whole, by `backward()`, see `runs_whole`
    reentrant: bool = False
    devices: DeviceMap | None = None
    errors: Sequence[GradientEdge] = ()  # see `delayed_errors`

    def run_backward(
        self,
        grads: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
        captures: bool,
        keep: bool,
        create: bool,
        levels: tuple[Level, ...],
    ) -> list[torch.Tensor | None]:
        """Gradients of the `wanted` inputs, then of all captures where asked for; None for what was
        not used."""
        # a part that nobody took of what is run as a whole would be added to what comes next
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
            found = gradients_at(
                [*edges, *self.errors], outputs, incoming, self.reentrant, keep, create, levels
            )[: len(edges)]
        if self.reentrant:
            return [*(found[k] for k in wanted), *(found[len(self.inputs) :] if captures else ())]
        return found

    def caller_devices(self, wanted: Sequence[int], captures: bool) -> Sequence[int] | None:
        """Where gradients of the `wanted` inputs, and of the captures, are to be in the caller, in
        a pool with devices."""
        return None if self.devices is None else self.devices.caller_devices(wanted, captures)

    def derived(
        self,
        outputs: Sequence[torch.Tensor],
        entered: Sequence[Edge | None],
        grads: Sequence[TensorRef],
    ) -> GraphEdges:
        """The graph of a backward of this one, which gave `outputs` for `grads`; these `entered`
        it."""
        devices = None if self.devices is None else self.devices.derived(outputs, grads)
        edges = [*entered, *self.inputs]
        errors = delayed_errors(outputs)
        return GraphEdges(
            self.function, list(map(edge_of, outputs)), edges, devices=devices, errors=errors
        )


class GraphTable:
    """The graphs that are here, by call. `trim` drops the largest beyond `limit` bytes, to be made
    again when they are wanted; and, while the `watch` finds memory short, the older half.

    A call is in one of `_kept`, `_emptied` and `_dropped`, or in none. With a limit of 0 none is
    kept, and nothing is measured.
    """

    def __init__(self, limit: int | None, watch: MemoryMonitor | None = None) -> None:
        self.nbytes = 0  # of those kept, where there is a limit
        self._limit = limit
        self._watch = watch
        self._kept: dict[int, GraphEdges] = {}
        self._emptied: dict[int, GraphEdges] = {}
        self._dropped: set[int] = set()  # the caller believes that they are here
        self._sizes: dict[int, int] = {}  # of those kept
        # a heap of (-bytes, call); may name some that are gone
        self._largest: list[tuple[int, int]] = []

    def __contains__(self, call: int) -> bool:
        return call in self._kept or call in self._emptied

    def memory_in_use(self) -> int:
        """Bytes, where they matter: the rise over a call is what its graph takes."""
        return memory_in_use() if self._limit else 0

    def keep(self, call: int, graph: GraphEdges, nbytes: int) -> None:
        """`nbytes` is what the graph takes, 0 where nothing is measured."""
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
        """For a backward. One that is not here counts as dropped from now on."""
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
        """It was never kept, and the caller believes that it was."""
        self._dropped.add(call)

    def forget(self, message: Release) -> None:
        for call in message.calls:
            self.release(call)

    def release(self, call: int) -> None:
        """Forget all about it."""
        self._kept.pop(call, None)
        self._emptied.pop(call, None)
        self._dropped.discard(call)
        if self._sizes:
            self.nbytes -= self._sizes.pop(call, 0)

    def take_dropped(self) -> list[int]:
        """Those since the last time, for the caller."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped
