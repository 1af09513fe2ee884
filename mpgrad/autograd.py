"""Backward across processes. Autograd ends at a pickle, so the parent keeps a node per call and the worker keeps the graph.

PyTorch's engine runs one CPU node at a time: a node that waited for its worker would serialise the workers. So the work of
one call is split over two kinds of node, and the engine's own priorities put all waiting behind all sending:

    item's tensors ──► Gate (identity, runs late) ──┐
    captures ──► CaptureGate (runs last of all) ────┴─► Call ──► outputs                         forward, left to right
    real gradients ◄── wait, take ◄─────────────────── send the outputs' gradients, return at once   backward, right to left

Guarantees: every item has gates of its own, so a backward for one item leaves the history of the others alone; gradients are
    the worker's, whatever placeholders travelled between the nodes.
Assumes: a `Home` that delivers. Nothing here knows processes or memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mpgrad._torch import alias, apply, graph_is_kept, graph_task, run_last, will_run

__all__ = ["Grads", "Home", "RemoteGraph", "Reply", "attach", "capture_gate", "gate"]

Grads = Sequence[torch.Tensor | None]


class Reply(Protocol):
    def gradients(self) -> list[torch.Tensor | None]:
        """Wait for the gradients of the wanted inputs, in their order; raises what the backward raised."""
        ...


class Home(Protocol):
    """Where the graphs of one operation live, as the nodes see it."""

    def send_gradients(
        self, graph: RemoteGraph, task: int, keep: bool, wanted: tuple[int, ...], captures: bool, grads: Grads
    ) -> Reply:
        """Start the backward of one call; returns at once."""
        ...

    def capture_gradients(self, task: int) -> Grads:
        """Wait for the captures' gradients, summed over all calls that were sent with `captures` in this backward."""
        ...

    def release(self, graph: RemoteGraph) -> None:
        """No backward of this call can come any more."""
        ...


class RemoteGraph:
    """The parent's handle of one kept graph. The `Call` node and its gates share it; it is released with the last of them."""

    __slots__ = ("_replies", "_taken", "call", "home", "index", "inputs_lent", "worker")

    def __init__(self, home: Home, worker: object, call: int, index: int) -> None:
        self.home = home
        self.worker = worker
        self.call = call
        self.index = index
        self.inputs_lent: Sequence[tuple[torch.Tensor, int]] = ()  # read in place by the worker, with their versions then
        self._replies: dict[int, tuple[tuple[int, ...], Reply]] = {}  # by backward: not waited for yet
        self._taken: dict[int, dict[int, torch.Tensor | None]] = {}  # by backward and input: waited for, not taken yet

    def send(self, task: int, keep: bool, wanted: tuple[int, ...], captures: bool, grads: Grads) -> None:
        for tensor, version in self.inputs_lent:
            if tensor._version != version:
                raise RuntimeError(modified_in_place(tensor, version))
        reply = self.home.send_gradients(self, task, keep, wanted, captures, grads)
        self._replies[task] = wanted, reply

    def take(self, task: int, number: int) -> torch.Tensor | None:
        """The gradient of input `number`; the first gate of a call to ask waits for all of them."""
        if task in self._replies:
            wanted, reply = self._replies.pop(task)
            self._taken[task] = dict(zip(wanted, reply.gradients(), strict=True))
        taken = self._taken[task]
        grad = taken.pop(number)
        if not taken:
            del self._taken[task]
        return grad

    def __del__(self) -> None:
        self.home.release(self)


def modified_in_place(tensor: torch.Tensor, version: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}], a result of the pool that a later call has read, "
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
        ctx.has_token = token is not None
        ctx.placeholders = [placeholder(tensor.dtype, tensor.shape) for tensor in inputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph=True does not reach through a pool call yet, and its gradients would silently be constants; "
                "take the inner derivative inside the function that the pool runs"
            )
        edges: Sequence[tuple[Any, int]] = ctx.next_functions
        gates = edges[1:] if ctx.has_token else edges
        wanted = tuple([number for number, (node, _) in enumerate(gates) if will_run(node)])
        captures = ctx.has_token and isinstance(edges[0][0], CAPTURE_GATE_NODE) and will_run(edges[0][0])
        if wanted or captures:
            ctx.graph.send(graph_task(), graph_is_kept(), wanted, captures, grads)
        return None, None, None, *ctx.placeholders


class GateHook:
    """Waits for a call's gradients where they leave the pool: replaces the placeholder that `Call` returned."""

    __slots__ = ("_graph", "_number")

    def __init__(self, graph: RemoteGraph, number: int) -> None:
        self._graph = graph
        self._number = number

    def __call__(self, placeholders: object) -> tuple[torch.Tensor | None]:
        return (self._graph.take(graph_task(), self._number),)


def gate(tensor: torch.Tensor) -> torch.Tensor:
    """Let `tensor` into an operation: an identity whose node, a C++ one, gets its hook when the call's graph is known.

    No view: until the result is fetched the caller may write to `tensor` in place, which would move a view to the new history.
    """
    return alias(tensor)


def attach(
    graph: RemoteGraph,
    outputs: list[torch.Tensor],
    token: torch.Tensor | None,
    gated: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Make `outputs` the results of a `Call` on the gated inputs and, through the token, the captures.

    Waiting goes from the last item to the first, which is the order in which the engine sent them, and in which the serial
    loop would have added up the gradients of a tensor that several items share.
    """
    for number, tensor in enumerate(gated):
        node = tensor.grad_fn
        assert node is not None
        run_last(node, 1 + graph.index)
        node.register_prehook(GateHook(graph, number))
    if token is None and not gated:
        token = ROOT
    return tuple(apply(Call, graph, outputs, token, *gated))


class CaptureGate(torch.autograd.Function):
    """All captures of an operation enter here; each call gets one token instead of an edge per capture."""

    @staticmethod
    def forward(ctx: Any, home: Home, *captures: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.home = home
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.home.capture_gradients(graph_task())


def capture_gate(home: Home, captures: Sequence[torch.Tensor]) -> torch.Tensor:
    """The token of an operation whose function reaches `captures`, all of which need gradients."""
    token = apply(CaptureGate, home, *captures)
    assert isinstance(token, torch.Tensor)
    run_last(token.grad_fn, 0)
    return token


CAPTURE_GATE_NODE = CaptureGate._backward_cls

with torch.inference_mode(False):
    # stands in as the token where only tensors that `fn` made itself need gradients: the outputs must need them too
    ROOT = torch.zeros((), requires_grad=True)


@functools.lru_cache(maxsize=4096)
def placeholder(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A gradient that costs nothing and passes the engine's checks."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype).expand(shape)
