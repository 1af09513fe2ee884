"""The nodes where tensors enter an operation. Their backward waits for gradients from workers.
Caller only.

    an input ──► Gate, or one LeafGate for all of a bundle
    all captures ──► one CaptureGate, which runs last, when the sums are complete
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from mpgrad.autograd.remote_graph import WAIT_LAST, CaptureReach, OperationGradients, RemoteGraph
from mpgrad.torch_state.private import (
    apply,
    current_graph_task,
    node_type,
    plus,
    run_as_is,
    set_priority,
    wait_for_devices,
    when_backward_ends,
)
from mpgrad.tracebacks import hide_own_frames

__all__ = [
    "ALONE_NODE",
    "CAPTURE_GATE_NODE",
    "ROOT",
    "ROOT_EDGE",
    "Captures",
    "edges_behind_capture_gate",
    "edges_of_leaves",
    "gate",
    "gate_behind",
    "higher_order_token",
    "leaf_gate",
]


with torch.inference_mode(False):
    # stands in as the token where only tensors that `fn` made itself need gradients: the outputs
    # must need them too; and see `leaf_gate`
    ROOT = torch.zeros((), requires_grad=True, device="cpu")
    # kept alive: made anew in anomaly mode, by two threads at once, it can lock both
    ROOT_EDGE = get_gradient_edge(ROOT)


class Gate(torch.autograd.Function):
    """Waits for a call's gradient where it leaves the pool, and passes it on in place of what
    `Call` returned.

    A hook on an identity of PyTorch's own could not: it may not put a sparse gradient in the place
    of a dense placeholder.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph = None
        # the graph of the call that gave `tensor`, where it is a result that was passed on
        ctx.source = None
        # No view: until the result is fetched the caller may write to `tensor` in place, which
        # would move a view to the new history. An argument that is returned as it is becomes one.
        return tensor.detach()

    @staticmethod
    @run_as_is
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
            # Gradients of a derivative of this call have come through gates of their own, in front
            # of this one, and are real.
            if others is graph.placeholders[number]:
                others = None
            grad = graph.take(graph_task, number) if graph.is_expected(graph_task) else None
        except BaseException as error:
            hide_own_frames(error)
            raise
        return others if grad is None else grad if others is None else plus(grad, others)


class LeafGate(torch.autograd.Function):
    """The gate of a bundle: waits for the gradients of all its items at once.

    They are leaves, of which a backward that has nothing for them leaves nothing behind. The last
    comes first: so the engine adds up the gradients of a tensor that several items share in the
    order of the serial loop.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph = ctx.source = None
        ctx.count = len(leaves)
        return torch.zeros((), device="cpu")

    @staticmethod
    @run_as_is
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

    `ROOT` is one more. Nobody can ask for its gradient, so that it runs in those backwards only for
    which nobody has said what is wanted: then all leaves are, and none has to be asked about.
    """
    token: torch.Tensor = apply(LeafGate, ROOT, *leaves[::-1])
    return token


def edges_of_leaves(gate: Any) -> Sequence[tuple[Any, int]]:
    """In the order of the inputs. PyTorch keeps a Python object for each, from when they are first
    asked for."""
    return gate.next_functions[:0:-1]  # type: ignore[no-any-return]


def gate(tensor: torch.Tensor) -> torch.Tensor:
    """Let `tensor` into an operation: an identity whose node learns in `attach` which gradient it
    waits for."""
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


# --- captures


class CaptureGate(torch.autograd.Function):
    """All captures of an operation enter here; each call gets one token instead of an edge per
    capture.

    An operation may have several, see `Captures`. In a backward the first to run gets all
    gradients, and puts aside for the others what it does not lead to. `before` is the token of one
    that leads to further captures.
    """

    @staticmethod
    def forward(
        ctx: Any,
        owner: OperationGradients,
        led_to: Set[int],
        before: torch.Tensor | None,
        *captures: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        ctx.led_to = led_to  # of those that have more behind them
        ctx.has_before = before is not None
        return torch.zeros((), device="cpu")

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """For each capture its gradient, over all calls of the backward; waits for the workers."""
        owner, graph_task = ctx.owner, current_graph_task()
        edges = ctx.next_functions[1:] if ctx.has_before else ctx.next_functions
        total: list[torch.Tensor | None] = [None] * len(edges)
        try:
            for grads in owner.capture_gradients(graph_task):
                total = added(total, grads)
        except BaseException as error:
            hide_own_frames(error)
            raise
        for_others = [
            grad if node is None else None for grad, (node, _) in zip(total, edges, strict=True)
        ]
        if any(grad is not None for grad in for_others):
            owner.put_aside(graph_task, for_others)
            when_backward_ends(lambda: owner.forget_sum(graph_task))  # the others may not be in it
        wait_for_devices(total)
        return None, None, None, *total


class SingleOutput(torch.autograd.Function):
    """An identity, whose node has one output."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


ALONE_NODE = node_type(SingleOutput)
CAPTURE_GATE_NODE = node_type(CaptureGate)


def added(
    total: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Both, item by item; None stands for no gradient."""
    pairs = zip(total, grads, strict=True)
    return [
        grad if held is None else held if grad is None else plus(held, grad) for held, grad in pairs
    ]


def higher_order_token(
    owner: OperationGradients, token: torch.Tensor | None, reached: Sequence[int]
) -> torch.Tensor | None:
    """A token for gradients, which may depend on captures (`reached`), by way of hooks, that the
    result did not depend on.

    Raises:
        RuntimeError: such a capture is not what it was.
    """
    reach = owner.reach
    assert reach is not None
    gate: Any = (
        None if token is None or not isinstance(token.grad_fn, CAPTURE_GATE_NODE) else token.grad_fn
    )
    led_to = frozenset() if gate is None else gate.led_to
    missing = set(reached) - led_to
    if not missing:
        return token
    nothing = torch.zeros((), device="cpu")
    numbers = range(reach.count)
    captures = [
        apply(SingleOutput, reach.as_it_was(number)) if number in missing else nothing
        for number in numbers
    ]
    further: torch.Tensor = apply(
        CaptureGate, owner, led_to | missing, None if gate is None else token, *captures
    )
    set_priority(further.grad_fn, WAIT_LAST)
    return further


class Captures:
    """The captures of one operation that need gradients, and the token that leads a call's results
    to them.

    To those that a result was made from, and no other: its backward would run, and free, what the
    caller has behind that. The workers say, before a result is here, which ones it was made from of
    those that have `more_behind`.
    """

    def __init__(
        self,
        owner: OperationGradients,
        captures: Sequence[torch.Tensor],
        more_behind: Set[int] = frozenset(),
    ) -> None:
        self._owner = owner
        self._reach = owner.reach = CaptureReach(captures, more_behind)
        with torch.enable_grad():  # the function may turn them on
            # as they are now: the caller may write to them, or freeze them, before the token is
            # made
            self._captures = [
                apply(SingleOutput, each) if more_behind else each for each in captures
            ]
        # what the last token leads to, and it: written at once, because any thread may be here
        self._made: tuple[Set[int], torch.Tensor | None] | None = None
        if torch.is_grad_enabled() and not more_behind:
            self.token()

    @torch.enable_grad()
    def token(self) -> torch.Tensor | None:
        """None where there is nothing to lead to. A new one, where more has been found than the
        last one leads to."""
        made = self._made
        if made is None or not self._reach.found <= made[0]:
            led_to = frozenset(self._reach.found)
            left_out = self._reach.more_behind - led_to
            captures = [
                each.detach() if number in left_out else each
                for number, each in enumerate(self._captures)
            ]
            token: torch.Tensor | None = None
            if len(left_out) < len(captures):
                token = apply(CaptureGate, self._owner, led_to, None, *captures)
                set_priority(token.grad_fn, WAIT_LAST)
            made = self._made = led_to, token
        return made[1]


def edges_behind_capture_gate(node: Any) -> list[tuple[Any, int]]:
    """For each capture the edge to what it is in the caller: from this gate, or from the one before
    it."""
    own = list(node.next_functions)
    if not node.has_before:
        return own
    before = edges_behind_capture_gate(own.pop(0)[0])
    return [one if one[0] is not None else other for one, other in zip(own, before, strict=True)]
