"""The nodes where tensors enter an operation. Their backward waits for gradients from workers. This
module runs in the caller only.

    an input ──► Gate, or one LeafGate for all inputs of a bundle
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
    # It is the token if only tensors that `fn` made itself need gradients, because the outputs must
    # need them, too. See also `leaf_gate`.
    ROOT = torch.zeros((), requires_grad=True, device="cpu")
    # This is kept alive: two threads that make it at once, in anomaly mode, can deadlock.
    ROOT_EDGE = get_gradient_edge(ROOT)


class Gate(torch.autograd.Function):
    """Waits for the gradient of an input, and passes it on in place of the placeholder that `Call`
    returned.

    A hook on a node of PyTorch's own may not replace a dense placeholder with a sparse gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph = None
        # if `tensor` is a result that was passed on: the graph of the call that returned it
        ctx.source = None
        # This must not be a view. The caller may write to `tensor` in place until the result is
        # fetched, and that would move a view to the new history. If this returned its argument,
        # PyTorch would make a view of it.
        return tensor.detach()

    @staticmethod
    @run_as_is
    def backward(ctx: Any, others: torch.Tensor | None) -> torch.Tensor | None:
        """Wait for the worker's gradient and return it, or None if a promise was passed on."""
        graph, number, graph_task = ctx.graph, ctx.number, current_graph_task()
        gradients = graph.expected(graph_task)
        source: RemoteGraph | None = ctx.source
        if source is not None and source.hidden and not graph.has_further:
            promise = gradients.promise(number)
            if promise is not None:
                source.put_promise(graph_task, ctx.output, promise)
                return None
        try:
            if not graph.has_further:
                return gradients.take(number)  # type: ignore[no-any-return]
            # A derivative of this call has its own gates, in front of this one. The gradients that
            # came through them are real.
            if others is graph.placeholders[number]:
                others = None
            grad = None if gradients is None else gradients.take(number)
        except BaseException as error:
            hide_own_frames(error)
            raise
        return others if grad is None else grad if others is None else plus(grad, others)


class LeafGate(torch.autograd.Function):
    """The gate of a bundle. It waits for the gradients of all items at once.

    The inputs are leaves, so a backward without gradients for them has no effect. The last input
    comes first, so that the engine adds up the gradients of a tensor that several items share in
    the order of the serial loop.
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
        gradients = ctx.graph.expected(current_graph_task())
        try:
            found = {} if gradients is None else gradients.take_all()
            return None, *[found.get(number) for number in reversed(range(ctx.count))]
        except BaseException as error:
            hide_own_frames(error)
            raise


def leaf_gate(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Let leaves that need gradients into a bundle, all of them together.

    `ROOT` is one more leaf. Nobody can name it as an input of a backward, so it runs only in
    backwards without `inputs`. All leaves are wanted then, and need not be looked at one by one.
    """
    token: torch.Tensor = apply(LeafGate, ROOT, *leaves[::-1])
    return token


def edges_of_leaves(gate: Any) -> Sequence[tuple[Any, int]]:
    """Return the edges behind a `LeafGate`, in the order of the inputs. From the first time on,
    PyTorch keeps a Python object for each of them."""
    return gate.next_functions[:0:-1]  # type: ignore[no-any-return]


def gate(tensor: torch.Tensor) -> torch.Tensor:
    """Let `tensor` into an operation. The result is the same tensor with a `Gate` as its node;
    `attach` tells that node which gradient it waits for."""
    gated: torch.Tensor = apply(Gate, tensor)
    return gated


def gate_behind(source: RemoteGraph | None, tensor: torch.Tensor) -> torch.Tensor:
    """Let an output of `source` into another call."""
    gated = gate(tensor)
    node: Any = gated.grad_fn
    if source is not None and source.hidden:
        node.source, node.output = source, tensor.output_nr
        source.gates_behind = source.gates_behind or []
        source.gates_behind.append(weakref.ref(node))
    return gated


# --- captures


class CaptureGate(torch.autograd.Function):
    """The gate of all captures of an operation. Each call gets one token instead of an edge per
    capture.

    An operation may have several such gates (see `Captures`). In a backward the first one that runs
    gets all gradients, and puts aside those that belong to the other gates. `before` is the token
    of another gate that leads to further captures.
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
        # captures with more behind them that this gate leads to
        ctx.led_to = led_to
        ctx.has_before = before is not None
        return torch.zeros((), device="cpu")

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Wait for the workers, and return the gradient of each capture over all calls of the
        backward."""
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
            owner.add_to_sum(graph_task, for_others)
            # The other gates may not be part of this backward.
            when_backward_ends(lambda: owner.forget_sum(graph_task))
        wait_for_devices(total)
        return None, None, None, *total


class SingleOutput(torch.autograd.Function):
    """Returns the same tensor, with a node that has one output."""

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
    """Return the sum of both, item by item. None stands for no gradient."""
    pairs = zip(total, grads, strict=True)
    return [
        grad if held is None else held if grad is None else plus(held, grad) for held, grad in pairs
    ]


def higher_order_token(
    owner: OperationGradients, token: torch.Tensor | None, reached: Sequence[int]
) -> torch.Tensor | None:
    """Return a token for gradients. Because of hooks they may depend on captures (`reached`) that
    the result does not depend on.

    Raises:
        RuntimeError: the caller has dropped or changed such a capture.
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

    A token leads only to captures that a result depends on, because its backward would also run and
    free the histories of the others. For captures that have `more_behind`, the workers report
    whether a result depends on them, before the result arrives.
    """

    def __init__(
        self,
        owner: OperationGradients,
        captures: Sequence[torch.Tensor],
        more_behind: Set[int] = frozenset(),
    ) -> None:
        self._owner = owner
        self._reach = owner.reach = CaptureReach(captures, more_behind)
        # The function may turn gradients on.
        with torch.enable_grad():
            # The caller may write to the captures, or freeze them, before the token is made.
            self._captures = [
                apply(SingleOutput, each) if more_behind else each for each in captures
            ]
        # what the last token leads to, and this token; both are written at once, because any thread
        # may be here
        self._made: tuple[Set[int], torch.Tensor | None] | None = None
        if torch.is_grad_enabled() and not more_behind:
            self.token()

    @torch.enable_grad()
    def token(self) -> torch.Tensor | None:
        """Return the token, or None if it would lead to nothing. It is a new one if results depend
        on more captures than the last token leads to."""
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
    """Return for each capture the edge to its node in the caller, from this gate or from the one
    before it."""
    own = list(node.next_functions)
    if not node.has_before:
        return own
    before = edges_behind_capture_gate(own.pop(0)[0])
    return [one if one[0] is not None else other for one, other in zip(own, before, strict=True)]
