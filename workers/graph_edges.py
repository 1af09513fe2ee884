"""The edges of a graph: where gradients of outputs enter, where those of inputs leave, and PyTorch's engine between them.

Autograd keeps a graph alive from its outputs, which go to the caller as bytes. So a worker holds the graph's edges instead.

    inputs ──► dress ──► the function ──► outputs            forward: entrances remember where the inputs came in
    edges_at(entrances) ◄── gradients_at ◄── edge_of(output)      backward: PyTorch's own, between these edges
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from mpgrad.torch_state.private import (
    LEAF_NODE,
    NODE_IN_PYTHON,
    CallCounter,
    Level,
    apply,
    edge_that_keeps,
    gradients,
    is_alive,
    node_type,
    over,
    plus,
)
from mpgrad.wire.tensor_refs import LEAF, PARAMETER, REQUIRES_GRAD

__all__ = [
    "CHECKPOINTS",
    "ENTRY_NODE",
    "HOOKS",
    "CaptureSearch",
    "Edge",
    "Entrance",
    "dress",
    "edge_of",
    "edges_at",
    "gradients_at",
    "leaves_behind",
    "still_there",
]

Edge = GradientEdge | torch.Tensor  # a leaf stands for its own edge: that is cheaper, and a sparse leaf has no other
Entrance = weakref.ref[Any] | torch.Tensor  # of an input: the node where its gradient leaves, or the leaf that it is


def edge_of(tensor: torch.Tensor) -> Edge:
    node = tensor.grad_fn
    if node is None:
        return tensor
    if isinstance(node, NODE_IN_PYTHON):  # its Python object, by itself, keeps nothing
        return edge_that_keeps(tensor)
    return GradientEdge(node, tensor.output_nr)


class GraphEntry(torch.autograd.Function):
    """Where the gradient of a non-leaf input leaves: the caller's tensor has a history, so in-place writes to it are legal."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, alone: list[torch.Tensor]) -> torch.Tensor:
        return alone[0]  # hidden in a list: as an argument it would come back as a view, which forbids in-place writes

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None]:
        # for `run_whole`, perhaps in several runs of the engine; otherwise that takes it off before it comes here
        held = vars(ctx).get("received")
        ctx.received = grad if held is None else held if grad is None else plus(held, grad)
        return None, None


ENTRY_NODE = node_type(GraphEntry)
ROOT = torch.zeros((), device="cpu", requires_grad=True)
# Kept alive: in anomaly mode PyTorch makes it with ROOT's lock held and runs Python meanwhile, so that another worker thread
# which waits for that lock, holding the interpreter's, would wait for ever.
ROOT_EDGE = get_gradient_edge(ROOT)


def dress(tensors: Sequence[torch.Tensor], flags: Sequence[int]) -> tuple[list[torch.Tensor], list[Entrance]]:
    """`tensors` as `fn` would see them in the caller, and an entrance for each one that needs a gradient."""
    dressed, entrances = list(tensors), list[Entrance]()
    for k, own in enumerate(flags):
        if own & PARAMETER:
            dressed[k] = torch.nn.Parameter(dressed[k], requires_grad=False)
        if own & REQUIRES_GRAD and own & LEAF:
            entrances.append(dressed[k].requires_grad_())
        elif own & REQUIRES_GRAD:
            with torch.enable_grad():  # where the caller has it off, `fn` may still turn it on
                dressed[k] = apply(GraphEntry, ROOT, [dressed[k]])
            entrances.append(weakref.ref(dressed[k].grad_fn))  # now: an in-place write moves the tensor away from that node
    return dressed, entrances


def edges_at(entrances: Sequence[Entrance]) -> list[Edge | None]:
    """After `fn` has run, and the tensors that it was given are forgotten: what its results depend on has been kept by them.

    None where they do not. The caller has a history behind it then which is not theirs, and no backward of theirs may run it.
    Where the tensors are still held there is an edge to each.
    """
    return [edge_at(each) if isinstance(each, weakref.ref) else each for each in entrances]


def edge_at(entrance: weakref.ref[Any]) -> GradientEdge | None:
    node = entrance()
    return None if node is None else GradientEdge(node, 0)


def leaves_behind(outputs: Sequence[torch.Tensor], wanted: Collection[int], reentrant: bool) -> set[int]:
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
    """For the captures of a function behind which the caller has a history, or hooks: which of them results depend on."""

    def __init__(self, captures: dict[int, int]) -> None:
        self._all = captures  # their numbers among those that need gradients, by id
        self._left = dict(captures)
        self._found: list[int] = []

    @property
    def is_on(self) -> bool:
        """Whether there is one that has not been found."""
        return bool(self._left)

    def look(self, outputs: Sequence[torch.Tensor], reentrant: bool) -> None:
        """In the graphs of all calls, until each has been found once; so one that never is costs a walk through every graph."""
        self._found += [self._left.pop(each) for each in leaves_behind(outputs, self._left, reentrant)]

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


def still_there(edge: Edge | None) -> Edge | None:
    """Not a leaf that the call has frozen, nor a node that has ended."""
    if isinstance(edge, torch.Tensor):
        return edge if edge.requires_grad else None
    return edge if edge is None or is_alive(edge.node) else None


def run_whole(
    outputs: Sequence[Edge], edges: Sequence[Edge], grads: Sequence[torch.Tensor], keep: bool, create: bool
) -> list[torch.Tensor | None]:
    """As `torch.autograd.backward`: gradients gather in leaves and entries, and are taken from there."""
    leaves = [edge for edge in edges if isinstance(edge, torch.Tensor)]
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(outputs, grads, keep, create)  # type: ignore[arg-type]  # edges and tensors may be mixed
    return [taken(edge) for edge in edges]


def taken(edge: Edge) -> torch.Tensor | None:
    if isinstance(edge, torch.Tensor):
        grad, edge.grad = edge.grad, None
        return grad
    return vars(edge.node).pop("received", None)  # type: ignore[no-any-return]


CHECKPOINTS = CallCounter(CheckpointFunction, "forward")  # reentrant ones
HOOKS = CallCounter(torch.Tensor, "register_hook")
