"""Probes of `private.autograd`: the order in which a backward runs nodes, what it says of itself, and hooks."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from mpgrad.torch_state import private
from mpgrad.torch_state.probes.expectations import DiffersError, behaviour, expect
from mpgrad.torch_state.probes.nodes import Entrance, Node, leaf, through


@behaviour("of the nodes that are ready, a backward runs the one with the highest sequence number first")
def order_by_priority() -> None:
    ran: list[Any] = []
    first, second, third = (through(leaf(), lambda name=name: name, ran) for name in "abc")  # type: ignore[misc]
    private.set_priority(first.grad_fn, 1 << 40)
    private.set_priority(second.grad_fn, 0)
    private.set_priority(third.grad_fn, 1)
    (first + second + third).sum().backward()
    expect(["a", "c", "b"], ran)


@behaviour("a node can ask which other nodes the running backward will run")
def nodes_that_will_run() -> None:
    seen: list[Any] = []
    x, y = leaf(), leaf()
    left, right = x * 2, y * 2
    nodes: list[Any] = [left.grad_fn, right.grad_fn]
    leaves = [node.next_functions[0][0] for node in nodes]
    top = through(left + right, lambda: [*map(private.will_run, nodes), *map(private.leaf_will_run, leaves)], seen).sum()
    torch.autograd.grad(top, [x], retain_graph=True)
    expect([True, False, True, False], seen.pop())
    top.backward()
    expect([True] * 4, seen.pop())


@behaviour("a node can ask whether the running backward keeps the graph")
def kept_graphs() -> None:
    seen: list[Any] = []
    x = leaf()
    result = through(x, private.graph_is_kept, seen).sum()
    for keep, create in ((True, False), (True, True), (False, False)):
        private.gradients([result], [x], [torch.ones_like(result)], keep, create)
    expect([True, True, False], seen)


@behaviour("each backward has a number of its own, also one within another")
def numbered_backwards() -> None:
    outer, inner = list[Any](), list[Any]()
    nested = through(leaf(), private.current_graph_task, inner).sum()

    def look() -> int:
        before = private.current_graph_task()
        nested.backward(retain_graph=True)
        expect(before, private.current_graph_task())
        return before

    result = through(through(leaf(), private.current_graph_task, outer), look, outer).sum()
    result.backward(retain_graph=True)
    result.backward()
    first, again, second, third = outer
    expect((-1, first, second), (private.current_graph_task(), again, third))
    expect(4, len({first, second, *inner}))
    expect(True, min(first, second, *inner) >= 0)


@behaviour("what a node returns comes to the next node as the very same object, also a number that is expanded")
def placeholders_untouched() -> None:
    placeholder = torch.zeros((), dtype=torch.float64, device="cpu").expand(2)
    real = torch.full((2,), 3.0, dtype=torch.float64, device="cpu")
    came: list[Any] = []

    def replace(grad: Any) -> Any:
        came.append(grad)
        return real

    x = leaf()
    result = private.apply(Node, private.apply(Node, x, replace), lambda grad: placeholder)
    result.sum().backward()
    expect(True, came[0] is placeholder)
    expect([3.0, 3.0], [] if x.grad is None else x.grad.tolist())


@behaviour("gradients can be asked for at edges of the graph; there are none at what it does not lead to")
def gradients_at_edges() -> None:
    x, aside = leaf(), leaf()
    inner = x * 3
    result = inner * inner
    edges = [torch.autograd.graph.get_gradient_edge(each) for each in (result, inner, aside)]
    ones = torch.ones_like(result)
    found = private.gradients(edges[:1], [edges[1], x, edges[2]], [ones], keep=True, create=False)
    expect([[6.0, 6.0], [18.0, 18.0], None], [None if grad is None else grad.tolist() for grad in found])
    differentiable = private.gradients([result], [x], [ones], keep=True, create=True)[0]
    expect(True, differentiable is not None and differentiable.requires_grad)
    private.gradients([result], [x], [ones], keep=False, create=False)
    try:
        private.gradients([result], [x], [ones], keep=False, create=False)
    except RuntimeError:
        return
    raise DiffersError("a graph that was not kept gave gradients again")


@behaviour("an edge to a node written in Python keeps the graph behind it")
def edges_that_keep() -> None:
    x = leaf()
    edge = private.edge_that_keeps(private.apply(Node, x * 3, lambda grad: grad * 2))
    (grad,) = private.gradients([edge], [x], [torch.ones(2, dtype=torch.float64, device="cpu")], keep=False, create=False)
    expect([6.0, 6.0], None if grad is None else grad.tolist())


@behaviour("of a leaf in a graph one can tell whether it is held in Python")
def held_leaves() -> None:
    x = leaf()
    nodes: list[Any] = [(each * each.detach()).grad_fn for each in (x, leaf())]
    expect([True, False], [private.is_held(node.next_functions[0][0]) for node in nodes])


@behaviour("at the end of a backward a callback is called once, after all nodes")
def callbacks_at_the_end() -> None:
    ran: list[Any] = []
    below = through(leaf(), lambda: "below", ran)
    through(below, lambda: private.when_backward_ends(lambda: ran.append("end")), ran).sum().backward()
    expect([None, "below", "end"], ran)


@behaviour("a node written in Python ends with the last tensor or graph that leads to it")
def ends_of_nodes() -> None:
    entered = private.apply(Entrance, leaf(), [torch.ones(2, dtype=torch.float64, device="cpu")])
    kept = entered * 2
    ref = weakref.ref(entered.grad_fn)
    kinds = private.NODE_IN_PYTHON, BackwardCFunction, private.node_type(Entrance), private.node_type(Node)
    expect([True, True, True, False], [isinstance(ref(), kind) for kind in kinds])
    del entered
    expect((True, True), (ref() is not None, private.is_alive(ref())))
    del kept
    expect(None, ref())


@behaviour("a node written in Python that outlives its tensors says so, or can still be asked for its gradient")
def nodes_that_outlive_their_tensors() -> None:
    node = private.apply(Entrance, leaf(), [torch.ones(2, dtype=torch.float64, device="cpu")]).grad_fn
    if private.is_alive(node):  # so it is from torch 2.9 on
        x, edge = leaf(), torch.autograd.graph.GradientEdge(node, 0)
        ones = torch.ones(2, dtype=torch.float64, device="cpu")
        (grad,) = private.gradients([x * 2], [edge], [ones], keep=False, create=False)
        expect(None, grad)


@behaviour("a tensor that a Function gives out, and that was no argument, is no view; writes in place are counted")
def outputs_are_no_views() -> None:
    entered = private.apply(Entrance, leaf(), [torch.ones(2, dtype=torch.float64, device="cpu")])
    expect((False, 0), (entered._is_view(), entered._version))
    entered.mul_(2)
    expect(1, entered._version)
    expect(True, entered[:1]._is_view())


@behaviour("a leaf's node names the leaf, and hooks on a leaf can be seen")
def leaves_and_their_hooks() -> None:
    x = leaf()
    node = (x * 2).grad_fn.next_functions[0][0]
    expect(True, node.variable is x)
    expect((False, False), (bool(x._backward_hooks), bool(x._post_accumulate_grad_hooks)))
    x.register_hook(lambda grad: None)
    x.register_post_accumulate_grad_hook(lambda tensor: None)
    expect((True, True), (bool(x._backward_hooks), bool(x._post_accumulate_grad_hooks)))


class Doubling(OrderedDict[int, Any]):
    """Hooks whose results are doubled."""

    def __setitem__(self, number: int, hook: Callable[[Any], Any]) -> None:
        super().__setitem__(number, lambda grad: 2 * hook(grad))


@behaviour("the first hook on a tensor asks its node for the dictionary, which may be one of another type")
def hooks_in_a_dictionary_of_our_own() -> None:
    class Hooked(Node):
        pass

    node_type = private.node_type(Hooked)
    register = node_type._register_hook_dict

    def register_our_own(node: Any, tensor: torch.Tensor) -> None:
        tensor._backward_hooks = Doubling()
        register(node, tensor)

    node_type._register_hook_dict = register_our_own
    x = leaf()
    result = private.apply(Hooked, x, lambda grad: grad)
    result.register_hook(lambda grad: grad * 7)
    expect((Doubling, 1), (type(result._backward_hooks), len(result._backward_hooks)))
    (grad,) = torch.autograd.grad(result.sum(), [x])
    expect([14.0, 14.0], grad.tolist())


@behaviour("PyTorch's own hooks tell by their module that they are")
def hooks_of_pytorch() -> None:
    x = leaf()
    torch.autograd.graph.register_multi_grad_hook([x], lambda grads: None)
    expect(["torch.autograd.graph"], [hook.__module__ for hook in x._backward_hooks.values()])
    expect("torch.utils.checkpoint", torch.utils.checkpoint._checkpoint_hook.__module__)


@behaviour("calls of PyTorch's methods can be counted, of whatever class they are asked for")
def counted_calls() -> None:
    applied = private.CallCounter(torch.autograd.Function, "apply")
    checkpoints = private.CallCounter(CheckpointFunction, "forward")
    hooks = private.CallCounter(torch.Tensor, "register_hook")
    with applied.watching(), checkpoints.watching(), hooks.watching():
        result: Any = Node.apply(leaf(), lambda grad: grad)  # type: ignore[no-untyped-call]
        expect(True, isinstance(result.grad_fn, private.node_type(Node)))
        torch.nn.Parameter(torch.ones(1, device="cpu")).register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
        expect((1, 0, 1), (applied.count, checkpoints.count, hooks.count))
        # as `checkpoint(use_reentrant=True)`, whose first use takes seconds
        CheckpointFunction.apply(torch.neg, False, leaf())  # type: ignore[no-untyped-call]
        expect(1, checkpoints.count)
    Node.apply(leaf(), lambda grad: grad)  # type: ignore[no-untyped-call]
    expect(2, applied.count)  # the checkpoint is one, too
