"""Derivatives of every output: Jacobians, Hessians and products with them, here or on a pool's
workers.

`torch.autograd.functional.jacobian` runs one backward per output; `torch.func.jacrev` and `jacfwd`
batch them, for functions that suit torch.func, in one process. Here the sizes of the tensors decide
how a Jacobian is computed. If an operation does not support the chosen mode, the next mode is used.
Rows or columns are cut into shares. Shares run side by side, and so do items of a ragged list.
Arguments and outputs are structures of tensors, as in torch.func. Both are flattened at each
evaluation, so all code in between works on lists of tensors.

    [1] items x shares ──► [2] one evaluation of fn each, and its share of rows or columns
        ──► [3] joined, item by item

This module runs in the caller. Workers run the tasks of `tasks/jacobians.py`.
Guarantees: except for rounding, a derivative does not depend on the pool, its number of workers, or
`chunk_size`.

`per_item_grad` computes a separate gradient for each result, from the graphs that the workers keep.
`torch.autograd.grad` sums over its outputs, so separate gradients of all results with respect to
one tensor take one backward after another. Each result of a pool has its own graph. So all
backwards are sent at once, without the engine, and nothing is summed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.autograd.call_node import (
    differentiate,
    edges_behind_gates,
    edges_to_captures,
    is_call,
    item_of,
)
from mpgrad.autograd.gates import gate
from mpgrad.autograd.remote_graph import BackwardRequest, ExpectedGradients
from mpgrad.autograd.running import backward_without_engine
from mpgrad.errors import add_note, contextmanager
from mpgrad.pool import Pool
from mpgrad.submission.options import positive
from mpgrad.submission.starting import callable_of
from mpgrad.tasks.jacobians import (
    WAYS,
    Argnums,
    Arguments,
    Gradient,
    Hvp,
    Inputs,
    Jacobian,
    Jvp,
    Share,
    Task,
    Vjp,
    alike,
)
from mpgrad.torch_state.modes import DIFFERENTIATING, kept_random_state
from mpgrad.torch_state.private import grad_mode, plus, tree_flatten, tree_unflatten
from mpgrad.tracebacks import warn, without_own_frames
from mpgrad.transforms import may_be_followed

__all__ = ["hessian", "hvp", "jacobian", "jvp", "per_item_grad", "vjp"]

MODES = tuple(WAYS)
# If there are fewer calls for each worker, they are sent one by one, because shares take a long
# time, and each worker should get one.
FEW = 8
SAID: set[str] = set()  # the warnings that this process has given


@without_own_frames
def jacobian(
    fn: Callable[..., Any],
    *args: Any,
    mode: str = "auto",
    pool: Pool | None = None,
    chunk_size: int | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
    has_aux: bool = False,
) -> Any:
    """Compute the derivative of every element that `fn` returns with respect to every element of
    its arguments. A list among the arguments has one entry for each item; it is not a structure.

    Args:
        fn: takes `args`; returns a floating point tensor, or a structure of them: tuples, lists and
            dicts, nested or not (a pytree, in the words of torch.func). It may write into the
            tensors in its arguments, which are copies. All rows and columns of an item use the same
            random numbers. `torch.manual_seed` fixes them, and one number is drawn from the
            caller's generator. With engine "thread" draws depend on timing. Changes that `fn` makes
            outside of itself (running statistics) happen at each evaluation, but not if it runs in
            a pool.
        args: a list has one entry for each item, and `fn` is differentiated separately for each
            item. All other arguments are shared by all items. A differentiated argument is a
            floating point tensor of any shape, or a structure of them.
        mode: "reverse" runs one backward per row, which works for any function. "batched" runs one
            backward for all rows under a vmap. "forward" runs one evaluation on dual numbers for
            all columns under a vmap, or one for each column if vmap does not support the function.
            It does not suit functions that turn gradients off (`torch.no_grad`), because forward
            mode ignores that. "auto" uses forward if there are more than four rows for each column,
            and otherwise batched. If an operation has no forward derivative or no batching rule,
            "auto" uses the next of forward, batched, reverse, and warns once.
        pool: its workers share the items, and the rows or columns of large items. Each share costs
            one evaluation of `fn`.
        chunk_size: how many rows or columns are batched at a time, to limit the memory; None for
            all.
        argnums: which arguments to differentiate; None for all.
        create_graph: make the result differentiable with respect to the arguments and to the
            tensors that `fn` captures. Otherwise these are constants. Inside a transform or another
            function of this module the result is always differentiable.
        has_aux: `fn` returns a tuple ``(output, aux)``. ``aux`` is a structure of tensors, which is
            not differentiated.

    Returns:
        One tensor of shape ``(*output, *input)`` and the input's dtype for each tensor of the
        output and each tensor of the arguments. It is zero if the output does not depend on the
        input. The structure is the same as that of `torch.func.jacrev`: the structure of the
        output, with the structure of the differentiated argument in place of each tensor. If
        `argnums` is a tuple, or None with several arguments, a tuple with an entry for each
        argument replaces each tensor. With `has_aux`, the result is a tuple of the Jacobian
        and ``aux``. If there are lists, the result is a list with one such entry for each item.

    Raises:
        ValueError: an unknown `mode`, a `chunk_size` below 1, `argnums` out of range, lists of
            different lengths, or arguments or outputs without any tensor.
        TypeError: `fn` is not callable; a leaf of a differentiated argument or of the output is not
            a real floating point tensor; a leaf of ``aux`` is not a tensor. The message names the
            path to the leaf. Your own type counts as a structure only if its module registers it as
            a pytree.
        NotImplementedError: `fn` does not support the `mode` that you named. The message gives the
            reason and the remedy.

    Example:
        >>> import torch, mpgrad
        >>> from mpgrad import jacobian
        >>> c, x = torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0])
        >>> jacobian(lambda c, x: c * x ** 2, c, x, argnums=0)
        tensor([1., 4., 9.])
        >>> jacobian(lambda p: {"y": p["a"] * p["b"]}, {"a": c, "b": x})
        {'y': {'a': tensor([1., 2., 3.]), 'b': tensor([[2., 0., 0.],
                [0., 2., 0.],
                [0., 0., 2.]])}}
        >>> jacobian(
        ...     lambda x: (x.sum(), {"norm": x.norm()}), torch.tensor([3.0, 4.0]), has_aux=True
        ... )
        (tensor([1., 1.]), {'norm': tensor(5.)})
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     items = [torch.ones(2), torch.ones(3)]
        ...     jacobian(lambda c, x: (c * x).cumsum(0), c, items, argnums=0, pool=pool)
        [tensor([1., 2.]), tensor([1., 2., 3.])]
    """
    with noting_lists(args):
        arguments = Arguments(args, argnums)
        function = callable_of(fn)
        return differentiated(function, arguments, mode, pool, chunk_size, create_graph, has_aux)


@without_own_frames
def hessian(
    fn: Callable[..., Any],
    *args: Any,
    mode: str = "auto",
    pool: Pool | None = None,
    chunk_size: int | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
    has_aux: bool = False,
) -> Any:
    """Compute all second derivatives of a function that returns one value, which are the Jacobian
    of its gradient. The options are those of `jacobian`. A list among the arguments has one entry
    for each item; it is not a structure.

    Args:
        fn: returns one floating point value: a tensor of any shape with one element, or a structure
            with no other tensor. Everything else is as in `jacobian`. "forward" means forward over
            reverse.

    Returns:
        A tensor of shape ``(*input, *input)`` for each pair of tensors of the arguments. These are
        nested as in `torch.func.hessian`: a dict leads to a dict of dicts. Tuples, ``aux`` and
        lists are as in `jacobian`.

    Raises:
        ValueError: `fn` returns several values, or as for `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import hessian
        >>> hessian(lambda x: x.prod(), torch.tensor([1.0, 2.0, 3.0]))
        tensor([[0., 3., 2.],
                [3., 0., 1.],
                [2., 1., 0.]])
        >>> p = {"a": torch.tensor(3.0), "b": torch.tensor(2.0)}
        >>> hessian(lambda p: p["a"] * p["b"] ** 2, p)
        {'a': {'a': tensor(0.), 'b': tensor(4.)}, 'b': {'a': tensor(4.), 'b': tensor(6.)}}
    """
    with noting_lists(args):
        arguments = Arguments(args, argnums)
        gradient = Gradient(callable_of(fn), arguments, has_aux)
        return differentiated(gradient, arguments, mode, pool, chunk_size, create_graph, has_aux)


@without_own_frames
def jvp(
    fn: Callable[..., Any],
    args: Any,
    tangents: Any,
    *,
    pool: Pool | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
    has_aux: bool = False,
) -> Any:
    """Compute the output, and its Jacobian times `tangents`, in one evaluation on dual numbers.

    If an operation has no forward derivative, two backwards compute the product, and a warning
    reports this once. Source: J. Townsend, "A new trick for calculating Jacobian vector products",
    2017.

    Args:
        fn: as in `jacobian`.
        args: one argument, or a tuple of them; a list has one entry for each item. So a single
            argument that is a tuple or a list is passed as ``(argument,)`` or ``([argument],)``.
        tangents: the structure of the differentiated argument, with tensors of the same shapes and
            dtypes; a tuple of such structures, if `args` is a tuple and `argnums` is not an
            integer; lists have one entry for each item.
        pool, argnums, create_graph, has_aux: as in `jacobian`; the pool's workers share the items.

    Returns:
        ``(output, product)``, both with the output's shapes and structure, or
        ``(output, product, aux)`` with `has_aux`. If there are lists, the result is a list of such
        tuples.

    Raises:
        ValueError: a wrong structure, shape or dtype of `tangents`, or as for `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import jvp
        >>> jvp(torch.square, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0]))
        (tensor([1., 4.]), tensor([ 2., 40.]))
        >>> p = {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
        >>> t = {"a": torch.tensor(1.0), "b": torch.tensor(0.0)}
        >>> jvp(lambda p: [p["a"] * p["b"]], p, t)
        ([tensor(6.)], [tensor(3.)])
    """
    return product(Jvp, callable_of(fn), args, tangents, pool, argnums, create_graph, has_aux)


@without_own_frames
def vjp(
    fn: Callable[..., Any],
    args: Any,
    cotangents: Any,
    *,
    pool: Pool | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
    has_aux: bool = False,
) -> Any:
    """Compute the output, and `cotangents` times its Jacobian, which are the gradients of the
    arguments, in one backward.

    Args:
        cotangents: the structure of the output, with tensors of the same shapes and dtypes.
            A list, even in a tuple, has one entry for each item. So if `fn` returns a list, pass a
            list of lists.
        fn, args, pool, argnums, create_graph, has_aux: as in `jvp`.

    Returns:
        ``(output, gradients)``, or ``(output, gradients, aux)`` with `has_aux`. The gradients have
        the structure of the differentiated argument, or of a tuple of them, as `tangents` in `jvp`.
        If there are lists, the result is a list of such tuples.

    Raises:
        ValueError: a wrong structure, shape or dtype of `cotangents`, or as for `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import vjp
        >>> vjp(torch.square, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0]))
        (tensor([1., 4.]), tensor([ 2., 40.]))
        >>> p = {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
        >>> vjp(lambda p: (p["a"] * p["b"], p["a"].exp()), p, torch.tensor(1.0), has_aux=True)
        (tensor(6.), {'a': tensor(3.), 'b': tensor(2.)}, tensor(7.3891))
    """
    return product(Vjp, callable_of(fn), args, cotangents, pool, argnums, create_graph, has_aux)


@without_own_frames
def hvp(
    fn: Callable[..., Any],
    args: Any,
    vectors: Any,
    *,
    pool: Pool | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
    has_aux: bool = False,
) -> Any:
    """Compute the value of a function that returns one value, and its Hessian times `vectors`, at
    the cost of about two gradients.

    The product is the derivative of the gradient along the vectors, computed forward over reverse.
    If an operation has no forward derivative, it is computed reverse over reverse, and a warning
    reports this once. Source: B. Pearlmutter, "Fast exact multiplication by the Hessian", Neural
    Computation 6(1), 1994.

    Args:
        fn: returns one floating point value.
        vectors: as `tangents` in `jvp`.
        args, pool, argnums, create_graph, has_aux: as in `jvp`.

    Returns:
        ``(value, product)``, or ``(value, product, aux)`` with `has_aux`. The value has shape (),
        and the product has the structure of `vectors`. If there are lists, the result is a list of
        such tuples.

    Raises:
        ValueError: a wrong structure, shape or dtype of `vectors`; `fn` returns several values; or
            as for `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import hvp
        >>> hvp(lambda x: x.prod(), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 0.0]))
        (tensor(6.), tensor([0., 3., 2.]))
        >>> p = {"a": torch.tensor(3.0), "b": torch.tensor(2.0)}
        >>> v = {"a": torch.tensor(1.0), "b": torch.tensor(0.0)}
        >>> hvp(lambda p: p["a"] * p["b"] ** 2, p, v)
        (tensor(12.), {'a': tensor(0.), 'b': tensor(4.)})
    """
    return product(Hvp, callable_of(fn), args, vectors, pool, argnums, create_graph, has_aux)


# --- [1], [3]


@contextmanager
def noting_lists(args: Sequence[Any]) -> Iterator[None]:
    """Add a note to any error, if there is a list among the arguments."""
    try:
        yield
    except Exception as error:
        lists = [number for number, each in enumerate(args) if isinstance(each, list)]
        if lists:
            add_note(
                error,
                "a list among the arguments has one entry for each item, and fn is called with one "
                f"of them (lists: arguments {', '.join(map(str, lists))}); if you mean a "
                "structure, pass a tuple or a dict",
            )
        raise


def differentiated(
    fn: Callable[..., Any],
    arguments: Arguments,
    mode: str,
    pool: Pool | None,
    chunk_size: int | None,
    create_graph: bool,
    has_aux: bool,
) -> Any:
    """Run steps [1] and [3] of `jacobian` and `hessian`. The result is the Jacobian of `fn`."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))} (mode: {mode!r})")
    if chunk_size is not None:
        positive("chunk_size", chunk_size)
    check_pool(pool)
    cut = [1] * arguments.items if pool is None else shares_of(arguments.sizes(), pool.processes)
    calls = [
        (item, share, shares, *arguments.of(item))
        for item, shares in enumerate(cut)
        for share in range(shares)
    ]
    create_graph = create_graph or is_differentiated()
    task = Jacobian(fn, arguments, create_graph, has_aux, mode, chunk_size)
    found = iter(run_alike(task, calls, pool))
    answers = []
    with torch.inference_mode(False), grad_mode(create_graph):
        for (inputs, _), count in zip(arguments.each, cut, strict=True):
            shares = list(itertools.islice(found, count))
            whole = joined(shares, inputs)
            answers.append((whole, *shares[0].beside) if has_aux else whole)
    return answers if arguments.in_items else answers[0]


def is_differentiated() -> bool:
    """Return whether a transform or another derivative of this module encloses this one, so that
    the result needs a graph."""
    return may_be_followed() or DIFFERENTIATING.needs_graph()


def check_pool(pool: object) -> None:
    if pool is not None and not isinstance(pool, Pool):
        raise TypeError(f"pool must be an mpgrad.Pool, or None (pool: {pool!r})")


def shares_of(sizes: Sequence[int], workers: int) -> list[int]:
    """Return how many shares each item is cut into. A single item is cut into one share per worker,
    and small items are not cut."""
    total = sum(sizes)
    if len(sizes) == 1:
        return [workers]
    return [max(1, round(workers * size / total)) if total else 1 for size in sizes]


def run(task: Task, calls: list[tuple[Any, ...]], pool: Pool | None) -> list[Any]:
    """Return the results, computed in the modes that the task needs. The caller's generators stay
    as they were."""
    fn: Any = task
    chunksize = None if pool is None or len(calls) > FEW * pool.processes else 1
    with kept_random_state(), torch.inference_mode(False), grad_mode(task.create_graph):
        found = (
            [fn(*each) for each in calls] if pool is None else pool.starmap(fn, calls, chunksize)
        )
    for said in dict.fromkeys(each.said for each in found):
        if said and said not in SAID:
            SAID.add(said)
            warn(said)
    return found


def run_alike(task: Jacobian, calls: list[tuple[Any, ...]], pool: Pool | None) -> list[Share]:
    """Do the same as `run`, but make all shares of an item rows, or all of them columns, even if
    only some columns are supported."""
    found: list[Share] = run(task, calls, pool)
    by_rows = {call[0] for call, share in zip(calls, found, strict=True) if share.by_rows}
    mixed = {
        call[0]
        for call, share in zip(calls, found, strict=True)
        if call[0] in by_rows and not share.by_rows
    }
    # All shares of such an item run again, because a generator that the function captures gives
    # each operation different numbers.
    unlike = [k for k, call in enumerate(calls) if call[0] in mixed]
    if unlike:
        for k, share in zip(
            unlike, run(task.by_rows(), [calls[k] for k in unlike], pool), strict=True
        ):
            found[k] = share
    return found


def joined(shares: Sequence[Share], inputs: Inputs) -> Any:
    """Return the Jacobian in the structure of torch.func: that of the output, with the inputs'
    structure in place of each tensor."""
    shapes, spec = tree_flatten(shares[0].shapes, is_leaf=lambda each: isinstance(each, torch.Size))
    whole = [
        each[0] if len(each) == 1 else torch.cat(each)
        for each in zip(*(share.tensors for share in shares), strict=True)
    ]
    if shares[0].by_rows:
        parts = [each.split([shape.numel() for shape in shapes]) for each in whole]
        blocks = [
            [
                part[number].view((*shape, *x.shape))
                for part, x in zip(parts, inputs.tensors, strict=True)
            ]
            for number, shape in enumerate(shapes)
        ]
    else:
        blocks = [
            [
                part.movedim(0, -1).reshape((*shape, *x.shape)).to(x.dtype)
                for part, x in zip(
                    each.split([x.numel() for x in inputs.tensors]), inputs.tensors, strict=True
                )
            ]
            for shape, each in zip(shapes, whole, strict=True)
        ]
    return tree_unflatten(map(inputs.tree, blocks), spec)


def product(
    kind: type[Jvp] | type[Vjp] | type[Hvp],
    fn: Callable[..., Any],
    args: Any,
    vectors: Any,
    pool: Pool | None,
    argnums: Argnums,
    create_graph: bool,
    has_aux: bool,
) -> Any:
    """Run steps [1] and [3] of `jvp`, `vjp` and `hvp`, whose task is `kind`."""
    check_pool(pool)
    if not isinstance(args, tuple):
        args = (args,)
        argnums = 0 if argnums is None else argnums
    elif argnums is None:
        argnums = tuple(range(len(args)))
    # The vector of a single argument has that argument's structure, which may be a tuple that
    # contains lists.
    in_tuple = type(vectors) is tuple and (kind is Vjp or not isinstance(argnums, int))
    arguments = Arguments(args, argnums, vectors, in_tuple)
    for inputs, tree in [] if kind is Vjp else arguments.each:
        alike(kind.noun, tree, "the arguments", inputs.tensors, inputs.spec)
    if kind is Hvp:
        fn, has_aux = Gradient(fn, arguments, has_aux, and_value=True), True
    task = kind(fn, arguments, create_graph or is_differentiated(), has_aux)
    found = run(task, [(item, *arguments.of(item)) for item in range(arguments.items)], pool)
    answers = [each.answer for each in found]
    return answers if arguments.in_items else answers[0]


# --- the gradient of each result by itself


Place = tuple[bool, int]  # whether it is a capture, and the number of the capture or input
Places = list[list[Place]]  # for each tensor, all places where it enters the call

# The engine numbers its own backwards from 0, and -1 means that none is running.
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
    """Compute a separate gradient for each result of a pool, with respect to its own input or to a
    captured tensor, without summing them.

    Hooks on results and inputs are not called. As `torch.autograd.grad` does, this frees the graphs
    unless you retain them. Unlike `jacobian`, it does not run the function again.

    Args:
        results: tensors that `Pool.map`, `Pool.starmap`, `Pool.imap` or `Pool.submit` returned,
            unchanged.
        inputs: a tensor, or a tuple or dict of tensors, nested or not, that the function captured
            or that every item contains; or a list with such an entry for each result. So if you
            keep parameters in a list, pass `tuple(parameters)`.
        grad_outputs: a tensor for each result, of the result's shape; None for results of one
            element, whose gradient is 1.
        retain_graph: keep the workers' graphs, for example for a later ``sum(results).backward()``.
            None means the value of `create_graph`.
        create_graph: make the gradients themselves differentiable. Inside `jacobian` and similar
            functions they always are.

    Returns:
        For each result, a tensor of its input's shape, or a structure of them like `inputs`. The
        tensor is zero if the result does not depend on the input.

    Raises:
        TypeError: `results` is not a sequence, or an input or a gradient is not a tensor.
        ValueError: a result was changed after a pool returned it, or has no graph; an input is
            neither one of its item's tensors nor a capture; the lists have different lengths; an
            entry of `grad_outputs` has the wrong shape, or is missing for a result of several
            elements. The message names the item. If the result depends on only some of the tensors
            and captures, any other input gets zeros instead of an error.

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
    tensors = [leaves for leaves, _ in trees]
    found = by_workers(results, tensors, cotangents, keep, create_graph)
    return [tree_unflatten(grads, spec) for grads, (_, spec) in zip(found, trees, strict=True)]


def by_workers(
    results: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor]],
    cotangents: Sequence[torch.Tensor],
    keep: bool,
    create_graph: bool,
) -> list[list[torch.Tensor]]:
    """Send all backwards at once, and return the gradients of each result with respect to its
    inputs."""
    nodes: list[Any] = [each.grad_fn for each in results]
    outputs = [each.output_nr for each in results]
    places = [
        places_of(index, *each)
        for index, each in enumerate(zip(nodes, outputs, inputs, strict=True))
    ]
    items = [(node, item_of(node, output)) for node, output in zip(nodes, outputs, strict=True)]
    # One item may have several results in the list, which share a graph.
    last = {item: index for index, item in enumerate(items)}
    graph_task = next(GRAPH_TASKS)
    with torch.set_grad_enabled(create_graph), backward_without_engine(graph_task):
        sent = []
        for index, (node, where, incoming, output) in enumerate(
            zip(nodes, places, cotangents, outputs, strict=True)
        ):
            request = BackwardRequest(
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
            )
            grads = [incoming if number == output else None for number in range(node.output_count)]
            sent.append(differentiate(node, request, grads, apart=True))
        return [taken(*each) for each in zip(sent, places, inputs, strict=True)]


def check_graph(index: int, result: object) -> None:
    """Raise ValueError if the result has no history, or a history in the caller."""
    if (
        not isinstance(result, torch.Tensor)
        or result.grad_fn is None
        or not is_call(result.grad_fn)
    ):
        raise ValueError(
            f"results[{index}] is not an unchanged result of a pool with gradients (it is: "
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
    """Return the places where each of the inputs enters the call, among all places that the gates
    of `node` know."""
    behind = edges_behind_gates(node)
    known: dict[Any, list[Place]] = {}
    for number in item_of(node, output).inputs:
        known.setdefault(behind[number], []).append((False, number))
    for number, captured in enumerate(edges_to_captures(node)):
        known.setdefault(captured, []).append((True, number))
    unused = known.pop((None, 0), None)  # it is unknown which tensors these are
    found = []
    for tensor in inputs:
        with torch.enable_grad():
            gated: Any = gate(tensor)  # keeps its node alive, which is read below
        edge = gated.grad_fn.next_functions[0] if tensor.requires_grad else None
        if edge is not None and unused:
            known.setdefault(edge, [])
        if edge not in known:
            raise ValueError(
                f"an input for results[{index}] is neither one of its item's tensors nor captured "
                "by its function, or does not "
                f"require grad, or has been changed in place since (shape: {tuple(tensor.shape)}); "
                "if an item or a capture was "
                "computed from it, pass that tensor, or compute it within the function"
            )
        found.append(known[edge])
    return found


def cotangent(index: int, result: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """Check and return the gradient of a result. None stands for ones if the result has one
    element."""
    if grad is None:
        if result.is_complex():
            raise ValueError(
                f"results[{index}] is complex, so its gradient must be passed as grad_outputs"
            )
        if result.numel() != 1:
            raise ValueError(
                f"results[{index}] has several elements, so grad_outputs must have a weight for "
                f"each (shape: {tuple(result.shape)}); pass torch.ones_like(result) for their sum"
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


def taken(
    gradients: ExpectedGradients, places: Places, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Wait for the gradients of one result. If a tensor enters the call several times, its
    gradients are summed."""
    of_captures = gradients.take_captures()
    of_inputs = gradients.take_all()
    grads = []
    for tensor, where in zip(inputs, places, strict=True):
        parts = [
            of_captures[number] if captured else of_inputs[number] for captured, number in where
        ]
        there = [part for part in parts if part is not None]
        grads.append(functools.reduce(plus, there) if there else torch.zeros_like(tensor))
    return grads
