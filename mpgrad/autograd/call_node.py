"""The node of one call. Its backward sends the outputs' gradients to the worker and does not wait.
This module runs in the caller only.

    attach: outputs ──► Call ──► gates of inputs, token of captures
    Call.backward ──► a `Backward` ──► differentiate: out of wrappers ──► owner.link.send
                  └─► placeholders ──► gates
    gradients that are to be differentiated again ──► attach_gradients: a `Call` of their own
The results of a bundle share a node. `OwnHooks` keeps their hooks apart.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from mpgrad.autograd.gates import (
    ALONE_NODE,
    CAPTURE_GATE_NODE,
    ROOT,
    ROOT_EDGE,
    edges_behind_capture_gate,
    edges_of_leaves,
    gate,
    higher_order_token,
)
from mpgrad.autograd.remote_graph import (
    SEND,
    WAIT,
    Backward,
    BackwardRequest,
    BundleItem,
    ExpectedGradients,
    Promise,
    RemoteGraph,
)
from mpgrad.autograd.running import forget_at_end_of_backward
from mpgrad.errors import LostGradientError, add_note
from mpgrad.torch_state.private import (
    apply,
    current_graph_task,
    graph_is_kept,
    has_tangent,
    leaf_will_run,
    levels_of,
    node_type,
    outside_transforms,
    run_as_is,
    set_priority,
    will_run,
    without,
)
from mpgrad.tracebacks import hide_own_frames

__all__ = [
    "attach",
    "differentiate",
    "edges_behind_gates",
    "edges_to_captures",
    "is_call",
    "item_of",
]


ATTACHED = itertools.count()


class Call(torch.autograd.Function):
    """The node of one call: its backward sends gradients to the worker and does not wait."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: RemoteGraph,
        outputs: list[torch.Tensor],
        root: torch.Tensor | None,
        token: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the `outputs`, with this node as their history. It leads to the gated `inputs`,
        and to the captures through the `token`.

        `root` is given if outputs depend on nodes of the worker that a backward may not run (see
        `check_wanted_of_worker`).
        """
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        ctx.token = token
        ctx.has_root = root is not None
        # the last backward that came here
        ctx.graph_task = -1
        ctx.output_count = len(outputs)
        # They are needed only for further derivatives. Hooks for saved tensors need not see them.
        ctx.inputs = inputs
        graph.placeholders = tuple(
            [
                placeholder(each.dtype, each.shape, None if each.is_cpu else each.device)
                for each in inputs
            ]
        )
        return tuple(outputs)

    @staticmethod
    @run_as_is
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Send the backward, and return placeholders for the gradients of the inputs."""
        gates, capture_node = edges_of(ctx)
        if ctx.graph.members is not None:
            wanted = wanted_of_bundle(ctx.graph, gates, grads)
            count = len(ctx.graph.members.of_input)
        else:
            there = [number for number, (node, _) in enumerate(gates) if node is not None]
            wanted = tuple([number for number in there if will_run(gates[number][0])])
            count = len(there)
        captures = capture_node is not None and will_run(capture_node)
        graph_task = current_graph_task()
        promises = ctx.graph.take_promises(graph_task)
        if ctx.has_root:
            check_wanted_of_worker(ctx.graph, grads, promises)
        if not (wanted or captures):
            try:
                for _, promise in promises:
                    # No other node would raise its error.
                    promise.backward.owner.link.wait(promise.backward)
            except BaseException as error:
                hide_own_frames(error)
                raise
        else:
            ctx.graph_task = graph_task
            keep = graph_is_kept() or (ctx.graph.family is not None and relatives_will_run(ctx))
            whole = (
                len(wanted) == count
                and captures == (capture_node is not None)
                and len(outputs_given(grads, promises)) == len(grads)
            )
            create = torch.is_grad_enabled()
            asked = BackwardRequest(graph_task, keep, whole, create, wanted, captures)
            gradients = differentiate(ctx, asked, grads, promises)
            if wanted:
                ctx.graph.expect(gradients)
            if captures:
                ctx.graph.owner.add_to_sum(graph_task, gradients)
            if create:
                forget_at_end_of_backward(ctx.graph, graph_task)
        return None, None, None, None, *ctx.graph.placeholders

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> NoReturn:
        """Refuse PyTorch's compiled autograd, which calls this before it traces a backward.

        It would trace the sending and the waiting, in a different order from the engine's.
        """
        raise RuntimeError(
            "PyTorch's compiled autograd cannot run the backward of a pool's results; turn it off "
            "around this backward, with torch._dynamo.compiled_autograd._disable(), or with "
            "torch._dynamo.config.compiled_autograd = False before anything is compiled"
        )


def check_wanted_of_worker(
    graph: RemoteGraph,
    grads: Sequence[torch.Tensor | None],
    promises: Sequence[tuple[int, Promise]],
) -> None:
    """Raise an error if a backward without `inputs` would come to nodes that only the worker has.

    Raises:
        LostGradientError: a leaf that only the worker has would get a gradient.
        RuntimeError: a node raises this, as it would in PyTorch.
    """
    if not leaf_will_run(ROOT_EDGE.node):
        return
    given = outputs_given(grads, promises)
    raised = [words for output, words in graph.errors.items() if output in given]
    reached = [words for output, words in graph.strays.items() if output in given]
    if raised or reached:
        name = graph.owner.names.words(graph.given(grads))
        error = (
            RuntimeError(raised[0])
            if raised
            else LostGradientError(
                f"a gradient of {name} would be lost: its result depends on {reached[0]}"
            )
        )
        if raised:
            add_note(error, f"raised for {name}, phase: backward")
        hide_own_frames(error)
        raise error


def strays_behind(output: torch.Tensor) -> list[str]:
    """Return descriptions of the leaves that only a worker has and that the output depends on."""
    graph = getattr(output.grad_fn, "graph", None)
    return [] if graph is None else list(graph.strays.values())


def outputs_given(
    grads: Sequence[torch.Tensor | None], promises: Sequence[tuple[int, Promise]]
) -> set[int]:
    """Return the outputs that get a gradient, now or later."""
    now = {output for output, grad in enumerate(grads) if grad is not None}
    return now.union(output for output, _ in promises)


def wanted_of_bundle(
    graph: RemoteGraph, gates: Sequence[tuple[Any, int]], grads: Sequence[torch.Tensor | None]
) -> tuple[int, ...]:
    """Return the wanted inputs of the items to whose results a gradient has come. The graphs of the
    other items are left alone."""
    if graph.members is None or not (gates and will_run(gates[0][0])):
        return ()
    given = graph.members.given(grads)
    inputs = [number for number, item in enumerate(graph.members.of_input) if item in given]
    if leaf_will_run(ROOT_EDGE.node):
        return tuple(inputs)
    leaves = edges_of_leaves(gates[0][0])
    return tuple([number for number in inputs if leaf_will_run(leaves[number][0])])


def relatives_will_run(node: Any) -> bool:
    """Whether this backward will come to another graph that shares nodes with this one in the
    worker. Only the last of these graphs may free the nodes."""
    relatives = [each for ref in node.graph.family or () if (each := ref()) is not None]
    return any(
        each is not node and each.graph_task != node.graph_task and will_run(each)
        for each in relatives
    )


class OwnHooks(OrderedDict[int, Callable[[torch.Tensor], Any]]):
    """The hooks of a result that shares its node with results of other items. They are called only
    if the result gets a gradient.

    PyTorch calls the hooks of all outputs of a node that runs, with None for outputs without a
    gradient. PyTorch's own hooks expect that.
    """

    def __setitem__(self, number: int, hook: Callable[[torch.Tensor], Any]) -> None:
        if getattr(hook, "__module__", "") != "torch.autograd.graph":
            hook = functools.update_wrapper(functools.partial(called_with_gradient, hook), hook)
        super().__setitem__(number, hook)


def called_with_gradient(hook: Callable[[torch.Tensor], Any], grad: torch.Tensor | None) -> Any:
    """Call the hook of a bundle's result, unless the backward is only for other items."""
    return None if grad is None else hook(grad)


def keep_hooks_apart(node_type: Any) -> None:
    """For nodes of bundles: call a result's hooks for its own item only, and refuse hooks on the
    node."""
    # `Tensor.register_hook` calls this method of the result's node at the first hook.
    register_hooks = node_type._register_hook_dict

    def register_own_hooks(node: Any, result: torch.Tensor) -> None:
        if node.graph.members is not None:
            result._backward_hooks = OwnHooks()
        register_hooks(node, result)

    node_type._register_hook_dict = register_own_hooks
    node_type.register_hook = refusing(node_type.register_hook)
    node_type.register_prehook = refusing(node_type.register_prehook)


def refusing(
    register: Callable[[Any, Callable[..., Any]], Any],
) -> Callable[[Any, Callable[..., Any]], Any]:
    """Return a method that refuses hooks on nodes of bundles, which belong to several results."""

    @functools.wraps(register)
    def register_or_refuse(node: Any, hook: Callable[..., Any]) -> Any:
        if node.graph.members is not None:
            raise RuntimeError(
                "a hook on this node would be called for other items too: the results of cheap "
                "items, which travel together, "
                "share it; put the hook on the result (result.register_hook), or make each item a "
                "call of its own (chunksize=1)"
            )
        return register(node, hook)

    return register_or_refuse


CALL_NODE = node_type(Call)
keep_hooks_apart(CALL_NODE)


def is_call(node: object) -> bool:
    return isinstance(node, CALL_NODE)


def edges_of(node: Any) -> tuple[Sequence[tuple[Any, int]], Any]:
    """Return the edges of a `Call` to its gates, and the gate of its captures, or None."""
    edges: Sequence[tuple[Any, int]] = node.next_functions[node.has_root :]
    if node.token is None:
        return edges, None
    return edges[1:], edges[0][0] if isinstance(edges[0][0], CAPTURE_GATE_NODE) else None


def item_of(node: Any, output: int) -> BundleItem:
    """Return the outputs and inputs of the item that this output of a `Call` belongs to."""
    graph: RemoteGraph = node.graph
    if graph.members is None:
        return BundleItem(range(node.output_count), range(len(edges_of(node)[0])))
    return graph.members.of(graph.members.of_output[output])


def edges_behind_gates(node: Any) -> Sequence[tuple[Any, int]]:
    """Return for each input of a `Call` the edge to its node in the caller. The edge is empty if
    the results do not depend on the input."""
    gates, _ = edges_of(node)
    if node.graph.members is not None:
        return edges_of_leaves(gates[0][0]) if gates else ()
    return [
        (None, 0) if gate_node is None else gate_node.next_functions[0] for gate_node, _ in gates
    ]


def edges_to_captures(node: Any) -> Sequence[tuple[Any, int]]:
    """Return for each capture of a `Call` the edge to its node in the caller."""
    _, capture_node = edges_of(node)
    edges = [] if capture_node is None else edges_behind_capture_gate(capture_node)
    return [
        edge[0].next_functions[0] if isinstance(edge[0], ALONE_NODE) else edge for edge in edges
    ]


def differentiate(
    node: Any,
    asked: BackwardRequest,
    grads: Sequence[torch.Tensor | None],
    promises: Sequence[tuple[int, Promise]] = (),
    apart: bool = False,
) -> ExpectedGradients:
    """Send the backward of the call whose `Call` is `node` to its worker, and return at once.

    The gradients of the outputs are `grads` and, in addition, the `promises`. The captures'
    gradients come `apart` also if they cannot be added up.
    """
    if any(grad is not None and has_tangent(grad) for grad in grads):
        raise TypeError(
            "a gradient that came to a pool's result has a tangent, which would be lost; for "
            "forward over reverse, "
            "let the dual tensors go into the pool's map, or use torch.func.jvp of torch.func.grad"
        )
    levels = levels_of(grads)
    if levels:
        plain = iter(without([grad for grad in grads if grad is not None], levels))
        grads = [None if grad is None else next(plain) for grad in grads]
        asked = asked._replace(levels=levels)
    with outside_transforms():
        graph: RemoteGraph = node.graph
        further = None
        if asked.create:
            if graph.family is None:
                graph.family = [weakref.ref(node)]
            given = [gate(grad) for grad in grads if grad is not None and grad.requires_grad]
            # The reference is weak, because a backward that fails leaves this object.
            further = functools.partial(attach_gradients, weakref.ref(node), given, asked.wanted)
            graph.has_further = True
        parts: list[list[torch.Tensor | Promise]] = [
            [] if grad is None else [grad] for grad in grads
        ]
        for output, promise in promises:
            parts[output].append(promise)
        graph.check_inputs()
        apart = apart or asked.create or graph.owner.deterministic
        apart = apart or torch.are_deterministic_algorithms_enabled()
        backward = Backward(graph, asked, parts, apart, waits=bool(promises))
        graph.owner.link.send(backward)
        return ExpectedGradients(backward, further)


def attach(
    graph: RemoteGraph,
    outputs: list[torch.Tensor],
    token: torch.Tensor | None,
    gated: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """Make `outputs` the results of a `Call` on the gated inputs and, through the token, the
    captures.

    `leaves` are the inputs of a bundle, which share one gate.

    The engine waits first for the graph that was attached last. Within an operation this is the
    last item, so the gradients of a tensor that several items share are added up in the serial
    loop's order. In a chain of operations it is the last operation, so all backwards of the
    operation before it are sent before the engine waits for one of them.
    """
    graph.number = next(ATTACHED)
    for number, tensor in enumerate(gated):
        node: Any = tensor.grad_fn
        if node is None:  # it needs no gradient
            continue
        node.graph, node.number = graph, number
        waits = node.source is None or not node.source.hidden
        set_priority(node, (WAIT if waits else SEND) + graph.number)
    root = ROOT if graph.strays or graph.errors else None
    if root is None and token is None and not any(tensor.requires_grad for tensor in gated):
        token = ROOT
    if torch.is_grad_enabled():
        attached: tuple[torch.Tensor, ...] = apply(Call, graph, outputs, root, token, *gated)
    else:  # the function itself has turned gradients on
        with torch.enable_grad():
            attached = apply(Call, graph, outputs, root, token, *gated)
    node = attached[0].grad_fn
    set_priority(node, SEND + graph.number)
    if leaves:
        node.inputs = leaves
    return attached


def attach_gradients(
    ref: weakref.ref[Any],
    grads: Sequence[torch.Tensor],
    wanted: Sequence[int],
    graph: RemoteGraph,
    outputs: list[torch.Tensor],
    reached: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Make `outputs`, which are gradients of the `Call` behind `ref`, the results of a `Call` of
    their own.

    `grads` are the gradients of its outputs that need gradients, each behind a gate. `wanted` are
    numbers of inputs, because gates to the inputs would make a cycle.
    """
    node = ref()
    assert node is not None  # the engine holds it
    family = graph.family = node.graph.family
    # They are read again if the graph is rebuilt.
    graph.inputs_lent = node.graph.inputs_lent
    if strays := node.graph.strays:
        graph.strays = dict.fromkeys(range(len(outputs)), next(iter(strays.values())))
    owner = node.graph.owner
    token = node.token if owner.reach is None else higher_order_token(owner, node.token, reached)
    attached = attach(graph, outputs, token, [*grads, *gates_again(node, wanted)])
    family[:] = [each for each in family if each() is not None]
    family.append(weakref.ref(attached[0].grad_fn))
    return attached


def gates_again(node: Any, wanted: Sequence[int]) -> list[torch.Tensor]:
    """Return the inputs of a `Call`, for the `Call` whose outputs are its gradients.

    In a bundle these are the inputs of all items. Only those of wanted items lead further.
    """
    if node.graph.members is None:
        return [gate(tensor) if tensor.requires_grad else tensor for tensor in node.inputs]
    own = set(wanted)
    return [
        gate(leaf) if number in own else leaf.detach() for number, leaf in enumerate(node.inputs)
    ]


@functools.lru_cache(maxsize=4096)
def placeholder(dtype: torch.dtype, shape: torch.Size, device: torch.device | None) -> torch.Tensor:
    """Return a gradient that takes no memory and passes the engine's checks."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device or "cpu").expand(shape)
