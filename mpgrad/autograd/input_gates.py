"""Where tensors enter an operation: identities whose backward waits for a worker's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.torch_state.private import apply, current_graph_task, plus
from mpgrad.tracebacks import hide_own_frames

__all__ = ["ROOT", "ROOT_EDGE", "edges_of_leaves", "gate", "gate_behind", "leaf_gate"]


with torch.inference_mode(False):
    # stands in as the token where only tensors that `fn` made itself need gradients: the outputs must need them too; and see
    # `leaf_gate`
    ROOT = torch.zeros((), requires_grad=True, device="cpu")
    ROOT_EDGE = get_gradient_edge(ROOT)  # kept alive: made anew in anomaly mode, by two threads at once, it can lock both


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
        """The worker's gradient, for which it waits; None where that goes on as a promise."""
        graph, number, graph_task = ctx.graph, ctx.number, current_graph_task()
        source: RemoteGraph | None = ctx.source
        if source is not None and source.hidden and not graph.has_further:
            promise = graph.promise(graph_task, number)
            if promise is not None:
                source.put_promise(graph_task, ctx.output, promise)
                return None
        try:
            if not graph.has_further:
                return graph.take(graph_task, number)  # type: ignore[no-any-return]
            # Gradients of a derivative of this call have come through gates of their own, in front of this one, and are real.
            if others is graph.placeholders[number]:
                others = None
            grad = graph.take(graph_task, number) if graph.is_expected(graph_task) else None
        except BaseException as error:
            hide_own_frames(error)
            raise
        return others if grad is None else grad if others is None else plus(grad, others)


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
        graph, graph_task = ctx.graph, current_graph_task()
        try:
            if not graph.is_expected(graph_task):
                return None, *[None] * ctx.count
            return None, *graph.take_all(graph_task, ctx.count)[::-1]
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
