"""The gradient of each result by itself, from the graphs that the workers keep.

`torch.autograd.grad` adds up over its outputs, so that the derivative of every result with respect
to one tensor takes one backward after the other. The results of a pool have a graph each: here all
their backwards are sent at once, past the engine, and nothing is added up. Caller only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.call_node import (
    differentiate,
    edges_behind_gates,
    edges_to_captures,
    is_call,
    item_of,
)
from mpgrad.autograd.gates import gate
from mpgrad.autograd.remote_graph import Backward, backward_without_engine
from mpgrad.torch_state.modes import DIFFERENTIATING
from mpgrad.torch_state.private import plus, tree_flatten, tree_unflatten
from mpgrad.tracebacks import without_own_frames

__all__ = ["per_item_grad"]

Place = tuple[bool, int]  # whether it is a capture, and which one; else which input of the call
Places = list[list[Place]]  # for each tensor, all where it enters the call

# the engine's own backwards have numbers from 0, and -1 stands for none
GRAPH_TASKS = itertools.count(-2, -1)


@without_own_frames
def per_item_grad(
    results: Sequence[torch.Tensor],
    inputs: Any,
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> list[Any]:
    """The gradient of each of a pool's results with respect to its own input, or to a captured
    tensor: not summed.

    Hooks on results and inputs are not called: nothing goes through autograd's engine here.

    Args:
        results: tensors, each as `Pool.map`, `Pool.starmap`, `Pool.imap` or `Pool.submit` returned
            it.
        inputs: a tensor, or a tuple or dict of tensors, nested or not, that the function captured
            or that every item has; or a list with such an entry for each result. So parameters that
            you keep in a list are passed as `tuple(parameters)`.
        grad_outputs: for each result a tensor of its shape; None for results of one element, whose
            gradient is 1.
        retain_graph: keep the workers' graphs for another backward; None for as `create_graph`.
        create_graph: let the gradients themselves be differentiated. Inside of `jacobian` and its
            kin they always can be.

    Returns:
        For each result a tensor of its input's shape, or the structure of its inputs; zeros if it
        does not depend on the input.

    Raises:
        TypeError: `results` is no sequence, or an input or a gradient no tensor.
        ValueError: a result is not as a pool returned it, or has no graph; an input is none of its
            item's tensors nor a capture (zeros, where the result does not depend on all of these);
            lists of other lengths; a `grad_outputs` of another shape, or none for a result of
            several elements. Names the item.

    Example:
        >>> import torch, mpgrad
        >>> c = torch.tensor(2.0, requires_grad=True)
        >>> items = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     results = pool.map(lambda x: (c ** x).sum(), items)
        ...     mpgrad.per_item_grad(results, c)
        [tensor(1.), tensor(16.)]
        >>> p = {"a": c, "b": torch.tensor(1.0, requires_grad=True)}
        >>> items = [torch.tensor(3.0), torch.tensor(4.0)]
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     results = pool.map(lambda x: p["a"] * x + p["b"], items)
        ...     mpgrad.per_item_grad(results, p)
        [{'a': tensor(3.), 'b': tensor(1.)}, {'a': tensor(4.), 'b': tensor(1.)}]
    """
    if not isinstance(results, Sequence):
        raise TypeError(
            f"results must be a list of tensors (given: {type(results).__name__}); collect them "
            "first, [*results]"
        )
    count = len(results)
    each_inputs = inputs if isinstance(inputs, list) else [inputs] * count
    each_grad = [None] * count if grad_outputs is None else list(grad_outputs)
    for name, values in (("inputs", each_inputs), ("grad_outputs", each_grad)):
        if len(values) != count:
            remedy = "; for several inputs of each result pass a tuple" if name == "inputs" else ""
            raise ValueError(
                f"{name} must have one entry for each of the {count} results ({name}: "
                f"{len(values)} entries){remedy}"
            )
    trees = [tree_flatten(each) for each in each_inputs]
    for index, (result, (leaves, _)) in enumerate(zip(results, trees, strict=True)):
        check_graph(index, result)
        check_tensors(index, leaves)
    cotangents = [
        cotangent(index, *pair) for index, pair in enumerate(zip(results, each_grad, strict=True))
    ]
    create_graph = create_graph or DIFFERENTIATING.needs_graph()
    keep = create_graph if retain_graph is None else retain_graph
    asked = [
        Asked(index, result, leaves, incoming)
        for index, (result, (leaves, _), incoming) in enumerate(
            zip(results, trees, cotangents, strict=True)
        )
    ]
    found = by_workers(asked, keep, create_graph)
    return [tree_unflatten(grads, spec) for grads, (_, spec) in zip(found, trees, strict=True)]


class Asked(NamedTuple):
    """One result, and what is asked of it."""

    number: int
    result: torch.Tensor
    inputs: list[torch.Tensor]
    cotangent: torch.Tensor


def by_workers(asked: Sequence[Asked], keep: bool, create_graph: bool) -> list[list[torch.Tensor]]:
    """All backwards are sent at once."""
    ends: list[tuple[Any, int]] = [(each.result.grad_fn, each.result.output_nr) for each in asked]
    nodes, outputs = [node for node, _ in ends], [output for _, output in ends]
    places = [
        places_of(each.number, *end, each.inputs) for each, end in zip(asked, ends, strict=True)
    ]
    items = [(node, item_of(node, output)) for node, output in zip(nodes, outputs, strict=True)]
    # an item may have several results here, on one graph
    last = {item: index for index, item in enumerate(items)}
    graph_task = next(GRAPH_TASKS)
    with torch.set_grad_enabled(create_graph), backward_without_engine(graph_task):
        sent = []
        for index, (node, where, each, output) in enumerate(
            zip(nodes, places, asked, outputs, strict=True)
        ):
            backward = Backward(
                node.graph,
                graph_task,
                keep=keep or last[items[index]] != index,
                whole=False,
                create=create_graph,
                wanted=tuple(
                    dict.fromkeys(
                        number for place in where for captured, number in place if not captured
                    )
                ),
                captures=any(captured for place in where for captured, _ in place),
                apart=True,
            )
            cotangents = [
                each.cotangent if number == output else None for number in range(node.output_count)
            ]
            differentiate(node, backward, cotangents)
            sent.append(backward)
        return [
            taken(*each) for each in zip(sent, places, [each.inputs for each in asked], strict=True)
        ]


def check_graph(index: int, result: object) -> None:
    """Raises ValueError for what has no history, or one of the caller's."""
    if (
        not isinstance(result, torch.Tensor)
        or result.grad_fn is None
        or not is_call(result.grad_fn)
    ):
        raise ValueError(
            f"results[{index}] is not a tensor as a pool returned it with gradients (it is: "
            f"{type(result).__name__}); "
            "take the gradients of the pool's own results"
        )


def check_tensors(index: int, inputs: Sequence[object]) -> None:
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"an input for results[{index}] must be a tensor (given: {type(tensor).__name__})"
            )


def places_of(index: int, node: Any, output: int, inputs: Sequence[torch.Tensor]) -> Places:
    """Where each of the inputs enters the call, of all places the gates of `node` know."""
    behind = edges_behind_gates(node)
    known: dict[Any, list[Place]] = {}
    for number in item_of(node, output).inputs:
        known.setdefault(behind[number], []).append((False, number))
    for number, captured in enumerate(edges_to_captures(node)):
        known.setdefault(captured, []).append((True, number))
    unused = known.pop((None, 0), None)  # of these is not known which they are
    found = []
    for tensor in inputs:
        with torch.enable_grad():
            gated: Any = gate(tensor)  # its node, asked below, may end with it
        edge = gated.grad_fn.next_functions[0] if tensor.requires_grad else None
        if edge is not None and unused:
            known.setdefault(edge, [])
        if edge not in known:
            raise ValueError(
                f"an input for results[{index}] is neither one of its item's tensors nor captured "
                "by its function, or does not "
                f"require grad, or has been changed in place since (shape: {tuple(tensor.shape)}); "
                "if an item or a capture was "
                "computed from it, ask for that one, or compute it within the function"
            )
        found.append(known[edge])
    return found


def cotangent(index: int, result: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """The gradient of a result, checked; ones where None will do."""
    if grad is None:
        if result.is_complex():
            raise ValueError(
                f"results[{index}] is complex, and no grad_outputs says what to take for its "
                "gradient"
            )
        if result.numel() != 1:
            raise ValueError(
                f"results[{index}] has several elements, and no grad_outputs says how to weigh "
                "them "
                f"(shape: {tuple(result.shape)}); pass torch.ones_like(result) for their sum"
            )
        return torch.ones_like(result)
    if not isinstance(grad, torch.Tensor):
        raise TypeError(
            f"grad_outputs[{index}] must be a tensor or None (given: {type(grad).__name__})"
        )
    if grad.shape != result.shape:
        raise ValueError(
            f"grad_outputs[{index}] must have the shape of its result ({tuple(result.shape)}; "
            f"given: {tuple(grad.shape)})"
        )
    return grad


def taken(backward: Backward, places: Places, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Wait for the gradients of one result; those of a tensor that enters several times are added
    up."""
    of_captures = backward.take_captures()
    of_inputs = {number: backward.take(number) for number in backward.wanted}
    grads = []
    for tensor, where in zip(inputs, places, strict=True):
        parts = [
            of_captures[number] if captured else of_inputs[number] for captured, number in where
        ]
        there = [part for part in parts if part is not None]
        grads.append(functools.reduce(plus, there) if there else torch.zeros_like(tensor))
    return grads
