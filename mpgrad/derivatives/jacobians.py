"""Derivatives of every output: Jacobians, Hessians and products with them, here or on a pool's workers.

`torch.autograd.functional.jacobian` runs one backward per output; `torch.func.jacrev` and `jacfwd` batch them, for functions
that suit torch.func, in one process. Here the sizes choose the way, a way that some operation does not go along with gives
place to the next, and rows or columns are cut into shares that run side by side, as do the items of a ragged list.

    [1] items x shares ──► [2] one evaluation of fn each, and its share of rows or columns ──► [3] joined, item by item

Caller only; workers run the tasks of `tasks/jacobians.py`.
# Guarantees: a derivative does not depend on the pool, its number of workers, or `chunk_size`, but for rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpgrad.pool import Pool
from mpgrad.submission.options import positive
from mpgrad.submission.starting import callable_of
from mpgrad.tasks.jacobians import WAYS, Argnums, Arguments, Gradient, Hvp, Jacobian, Jvp, Share, Task, Vjp, check_alike
from mpgrad.torch_state.modes import DIFFERENTIATING, kept_random_state
from mpgrad.torch_state.private import grad_mode
from mpgrad.tracebacks import warn, without_own_frames
from mpgrad.transforms import may_be_followed

__all__ = ["hessian", "hvp", "jacobian", "jvp", "vjp"]

MODES = tuple(WAYS)
FEW = 8  # calls for each worker, below which they are sent one by one: shares are long, and each worker shall have one
SAID: set[str] = set()  # what this process has been warned of


@without_own_frames
def jacobian(
    fn: Callable[..., Any],
    *args: Any,
    mode: str = "auto",
    pool: Pool | None = None,
    chunk_size: int | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
) -> Any:
    """The derivative of every element that `fn` returns with respect to every element of its arguments.

    Args:
        fn: takes `args`; returns a floating point tensor, or a tuple of them. It may write into the arguments that are
            differentiated, which are copies. All rows and columns of an item meet the same random numbers, fixed by
            `torch.manual_seed`: one number is drawn from the caller's generator (engine "thread": they depend on timing).
            What it changes outside of itself (running statistics) changes as often as it is evaluated, or, in a pool, not.
        args: a list has one entry for each item, and `fn` is differentiated for each item by itself; anything else is
            shared by all items. What is differentiated are floating point tensors, of any shapes.
        mode: "reverse": one backward per row, which takes any function. "batched": all rows in one backward under a vmap.
            "forward": all columns in one evaluation on dual numbers under a vmap, or one by one where that cannot be; not
            for functions that turn gradients off (`torch.no_grad`), which forward mode would not heed.
            "auto": forward where there are more than four rows for each column, otherwise batched; where an operation has no
            forward derivative or no batching rule, the next of forward, batched, reverse, and a warning says so once.
        pool: its workers share the items, and the rows or columns of large items; each share costs an evaluation.
        chunk_size: rows or columns that are batched at a time, to bound the memory; None for all.
        argnums: which arguments to differentiate; None for all.
        create_graph: let the result be differentiated, with respect to the arguments and to the tensors that `fn` captures,
            which are constants otherwise. Inside of a transform or another of these functions it always can be.

    Returns:
        A tensor of shape ``(*output, *input)`` and the input's dtype, as `torch.autograd.functional.jacobian`, zeros where
        there is no dependence; a tuple of them over the arguments, if `argnums` is a tuple, or None with several arguments; a
        tuple of all that over the outputs, if `fn` returns a tuple; a list of all that over the items, if there are lists.

    Raises:
        ValueError: an unknown `mode`, a `chunk_size` below 1, `argnums` out of range, lists of different lengths.
        TypeError: `fn` is not callable; an argument to differentiate, or an output, is no real floating point tensor.
        NotImplementedError: `fn` does not go along with a mode that was asked for by name; says why, and names the remedy.

    Example:
        >>> import torch, mpgrad
        >>> from mpgrad import jacobian
        >>> c, x = torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0])
        >>> jacobian(lambda c, x: c * x ** 2, c, x, argnums=0)
        tensor([1., 4., 9.])
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     jacobian(lambda c, x: (c * x).cumsum(0), c, [torch.ones(2), torch.ones(3)], argnums=0, pool=pool)
        [tensor([1., 2.]), tensor([1., 2., 3.])]
    """
    return differentiated(callable_of(fn), Arguments(args, argnums), mode, pool, chunk_size, create_graph)


@without_own_frames
def hessian(
    fn: Callable[..., Any],
    *args: Any,
    mode: str = "auto",
    pool: Pool | None = None,
    chunk_size: int | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
) -> Any:
    """All second derivatives of a function of one value: the Jacobian of its gradient, with the options of `jacobian`.

    Args:
        fn: returns one floating point value, of any shape. The rest is as in `jacobian`; "forward" is forward over reverse.

    Returns:
        A tensor of shape ``(*input, *input)``, as `torch.autograd.functional.hessian`; a tuple of tuples of them where
        `jacobian` has a tuple over the arguments; a list of all that over the items, if there are lists.

    Raises:
        ValueError: `fn` returns several values. Otherwise as `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import hessian
        >>> hessian(lambda x: x.prod(), torch.tensor([1.0, 2.0, 3.0]))
        tensor([[0., 3., 2.],
                [3., 0., 1.],
                [2., 1., 0.]])
    """
    arguments = Arguments(args, argnums)
    return differentiated(Gradient(callable_of(fn), arguments), arguments, mode, pool, chunk_size, create_graph)


@without_own_frames
def jvp(
    fn: Callable[..., Any],
    args: Any,
    tangents: Any,
    *,
    pool: Pool | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
) -> Any:
    """The output, and its Jacobian times `tangents`, in one evaluation on dual numbers.

    Where an operation has no forward derivative, two backwards give the product, which a warning says once.
    Source: J. Townsend, "A new trick for calculating Jacobian vector products", 2017.

    Args:
        fn: as in `jacobian`.
        args: one argument, or a tuple of them; lists have one entry for each item.
        tangents: for each differentiated argument one of its shape, in the same form as `args`.
        pool, argnums, create_graph: as in `jacobian`; the pool's workers share the items.

    Returns:
        ``(output, product)``, both with the outputs' shapes and structure; a list of such pairs, if there are lists.

    Raises:
        ValueError: a tangent of another shape, or another number of them. Otherwise as `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import jvp
        >>> jvp(torch.square, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0]))
        (tensor([1., 4.]), tensor([ 2., 40.]))
    """
    return product(Jvp, callable_of(fn), args, tangents, "tangents", pool, argnums, create_graph)


@without_own_frames
def vjp(
    fn: Callable[..., Any],
    args: Any,
    cotangents: Any,
    *,
    pool: Pool | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
) -> Any:
    """The output, and `cotangents` times its Jacobian: the gradients of the arguments, in one backward.

    Args:
        cotangents: of the output's shape, or a tuple of them if `fn` returns a tuple; a list has one entry for each item.
        fn, args, pool, argnums, create_graph: as in `jvp`.

    Returns:
        ``(output, gradients)`` with a gradient for each differentiated argument, a tuple if `args` or `argnums` is one;
        a list of such pairs, if there are lists.

    Raises:
        ValueError: a cotangent of another shape, or another number of them. Otherwise as `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import vjp
        >>> vjp(torch.square, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0]))
        (tensor([1., 4.]), tensor([ 2., 40.]))
    """
    return product(Vjp, callable_of(fn), args, cotangents, "cotangents", pool, argnums, create_graph)


@without_own_frames
def hvp(
    fn: Callable[..., Any],
    args: Any,
    vectors: Any,
    *,
    pool: Pool | None = None,
    argnums: Argnums = None,
    create_graph: bool = False,
) -> Any:
    """The value of a function of one value, and its Hessian times `vectors`, at the cost of some two gradients.

    The derivative of the gradient along the vectors, forward over reverse; where an operation has no forward derivative,
    reverse over reverse, which a warning says once. Source: B. Pearlmutter, "Fast exact multiplication by the Hessian",
    Neural Computation 6(1), 1994.

    Args:
        fn: returns one floating point value.
        vectors: for each differentiated argument one of its shape, in the same form as `args`.
        args, pool, argnums, create_graph: as in `jvp`.

    Returns:
        ``(value, product)`` with a tensor of shape (), and a product for each differentiated argument, a tuple if
        `args` or `argnums` is one; a list of such pairs, if there are lists.

    Raises:
        ValueError: a vector of another shape, another number of them, or `fn` returns several values. Otherwise as `jacobian`.

    Example:
        >>> import torch
        >>> from mpgrad import hvp
        >>> hvp(lambda x: x.prod(), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 0.0]))
        (tensor(6.), tensor([0., 3., 2.]))
    """
    return product(Hvp, callable_of(fn), args, vectors, "vectors", pool, argnums, create_graph)


# --- [1], [3]


def differentiated(
    fn: Callable[..., Any],
    arguments: Arguments,
    mode: str,
    pool: Pool | None,
    chunk_size: int | None,
    create_graph: bool,
) -> Any:
    """[1], [3] of `jacobian` and `hessian`: `fn` is what the Jacobian is of."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))} (mode: {mode!r})")
    if chunk_size is not None:
        positive("chunk_size", chunk_size)
    check_pool(pool)
    cut = [1] * arguments.items if pool is None else shares_of(arguments.sizes(), pool.processes)
    calls = [(item, share, shares, *arguments.of(item)) for item, shares in enumerate(cut) for share in range(shares)]
    create_graph = create_graph or is_differentiated()
    task = Jacobian(fn, arguments, create_graph, mode, chunk_size)
    found = iter(run_alike(task, calls, pool))
    with torch.inference_mode(False), grad_mode(create_graph):
        jacobians = [
            joined(list(itertools.islice(found, shares)), arguments.inputs(item), arguments.alone)
            for item, shares in enumerate(cut)
        ]
    return jacobians if arguments.in_items else jacobians[0]


def is_differentiated() -> bool:
    """Whether a transform, or another derivative of ours, is taken around this one, and so needs a graph."""
    return may_be_followed() or DIFFERENTIATING.needs_graph()


def check_pool(pool: object) -> None:
    if pool is not None and not isinstance(pool, Pool):
        raise TypeError(f"pool must be an mpgrad.Pool, or None (pool: {pool!r})")


def shares_of(sizes: Sequence[int], workers: int) -> list[int]:
    """Into how many shares each item is cut: one item into as many as there are workers, small ones not at all."""
    total = sum(sizes)
    if len(sizes) == 1:
        return [workers]
    return [max(1, round(workers * size / total)) if total else 1 for size in sizes]


def run(task: Task, calls: list[tuple[Any, ...]], pool: Pool | None) -> list[Any]:
    """The results, under the modes that the task needs, and with the caller's generators as they were."""
    fn: Any = task
    chunksize = None if pool is None or len(calls) > FEW * pool.processes else 1
    with kept_random_state(), torch.inference_mode(False), grad_mode(task.create_graph):
        found = [fn(*each) for each in calls] if pool is None else pool.starmap(fn, calls, chunksize)
    for said in dict.fromkeys(each.said for each in found):
        if said and said not in SAID:
            SAID.add(said)
            warn(said)
    return found


def run_alike(task: Jacobian, calls: list[tuple[Any, ...]], pool: Pool | None) -> list[Share]:
    """As `run`; all shares of an item are rows, or all are columns, though an operation may go along with some columns only."""
    found: list[Share] = run(task, calls, pool)
    by_rows = {call[0] for call, share in zip(calls, found, strict=True) if share.by_rows}
    mixed = {call[0] for call, share in zip(calls, found, strict=True) if call[0] in by_rows and not share.by_rows}
    # all shares of such an item: generators that the function captures give each operation other numbers
    unlike = [k for k, call in enumerate(calls) if call[0] in mixed]
    if unlike:
        for k, share in zip(unlike, run(task.by_rows(), [calls[k] for k in unlike], pool), strict=True):
            found[k] = share
    return found


def joined(shares: Sequence[Share], inputs: Sequence[Tensor], alone: bool) -> Any:
    """The Jacobian in the layout of torch.autograd.functional: blocks over the outputs, then over the inputs."""
    by_rows, _, shapes, several, _ = shares[0]
    whole = [each[0] if len(each) == 1 else torch.cat(each) for each in zip(*(share.tensors for share in shares), strict=True)]
    if by_rows:
        parts = [each.split([shape.numel() for shape in shapes]) for each in whole]
        blocks = [
            tuple(part[number].view((*shape, *x.shape)) for part, x in zip(parts, inputs, strict=True))
            for number, shape in enumerate(shapes)
        ]
    else:
        blocks = [
            tuple(
                part.movedim(0, -1).reshape((*shape, *x.shape)).to(x.dtype)
                for part, x in zip(each.split([x.numel() for x in inputs]), inputs, strict=True)
            )
            for shape, each in zip(shapes, whole, strict=True)
        ]
    over_outputs = tuple(block[0] if alone else block for block in blocks)
    return over_outputs if several else over_outputs[0]


def product(
    kind: type[Jvp] | type[Vjp] | type[Hvp],
    fn: Callable[..., Any],
    args: Any,
    vectors: Any,
    noun: str,
    pool: Pool | None,
    argnums: Argnums,
    create_graph: bool,
) -> Any:
    """[1], [3] of `jvp`, `vjp` and `hvp`, whose task is `kind`. `noun`: what the vectors are, in errors."""
    check_pool(pool)
    arguments = Arguments(as_tuple(args), argnums, as_tuple(vectors))
    alone = isinstance(argnums, int) or (argnums is None and not isinstance(args, tuple))
    for item in range(0 if kind is Vjp else arguments.items):
        check_alike(noun, arguments.vectors(item), arguments.inputs(item))
    create_graph = create_graph or is_differentiated()
    task = kind(Gradient(fn, arguments, and_value=True) if kind is Hvp else fn, arguments, create_graph)
    found = run(task, [(item, *arguments.of(item)) for item in range(arguments.items)], pool)
    pairs = [
        (
            tuple(each.outputs) if each.several else each.outputs[0],
            tuple(each.products) if (each.several if kind is Jvp else not alone) else each.products[0],
        )
        for each in found
    ]
    return pairs if arguments.in_items else pairs[0]


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
