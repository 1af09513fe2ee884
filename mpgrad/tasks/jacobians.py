"""Computes derivatives of a function at one item, in a worker, or in the caller if there is no
pool.

`Arguments` holds which arguments are differentiated, and which ones all items share. A task is
called for one item at a time. It computes a share of the rows or columns of the item's Jacobian, or
the product of the Jacobian with vectors. It evaluates a `PinnedFunction`, which is the function at
the item's arguments. A `Graph` is one evaluation, which gives rows. Columns need dual numbers and
one evaluation each, or one evaluation for all under a vmap.

Guarantees: every evaluation of an item gets the same random numbers, so all rows and columns
    belong to one function.
Assumes: `fn` returns the same values if it runs twice with the same random numbers.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpgrad.errors import contextmanager
from mpgrad.pickling.streams import Streams
from mpgrad.torch_state.modes import DIFFERENTIATING, draw_seed, seed_item
from mpgrad.torch_state.private import (
    grad_mode,
    has_tangent,
    keystr,
    refusing_no_grad,
    transforms_are_active,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_pprint,
)
from mpgrad.wire.tensor_refs import overlaps

Argnums = int | tuple[int, ...] | None


class Arguments:
    """Holds the arguments of all items. A list has one entry for each item, and items share all
    other arguments. Some arguments are differentiated.

    The Jacobian is multiplied by `vectors`. If they are `in_tuple`, the tuple's lists have one
    entry for each item.
    """

    def __init__(
        self, args: tuple[Any, ...], argnums: Argnums, vectors: Any = (), in_tuple: bool = True
    ) -> None:
        every = (*args, *(vectors if in_tuple else (vectors,)))
        lengths = {len(each) for each in every if isinstance(each, list)}
        if len(lengths) > 1:
            raise ValueError(
                "lists must have one entry for each item, so the same length (lengths: "
                f"{sorted(lengths)}); "
                "leave values that all items share out of lists"
            )
        self.own = {number: each for number, each in enumerate(every) if isinstance(each, list)}
        self.in_items = bool(lengths)
        self.items = lengths.pop() if lengths else 1
        common = [None if number in self.own else each for number, each in enumerate(every)]
        self.form = ArgumentLayout(
            common, list(self.own), len(args), numbers_of(argnums, len(args)), in_tuple
        )
        # inputs and vectors
        self.each = [self.form.of(self.of(item)) for item in range(self.items)]

    def of(self, item: int) -> list[Any]:
        """Return the arguments that the item does not share, in order."""
        return [each[item] for each in self.own.values()]

    def sizes(self) -> list[int]:
        """Return the number of elements that each item does not share."""
        own = (tree_leaves(self.of(item)) for item in range(self.items))
        return [sum(each.numel() for each in leaves if isinstance(each, Tensor)) for leaves in own]


LEAVE_OUT = (
    "leave it out of argnums, or have the module of its type, where workers import that, register "
    "it as a pytree"
)


class ArgumentLayout(NamedTuple):
    """Holds the arguments that all items share, and the positions of those that each item has for
    itself."""

    common: list[Any]
    own: list[int]
    arity: int  # the number of arguments; vectors follow them
    argnums: int | tuple[int, ...]
    in_tuple: bool  # the vectors

    def of(self, own: Sequence[Any]) -> tuple[Inputs, Any]:
        """Return an item's arguments, and the vectors by which its Jacobian is multiplied."""
        every = filled(self.common, self.own, own)
        vectors = every[self.arity :]
        return Inputs(every[: self.arity], self.argnums), tuple(
            vectors
        ) if self.in_tuple else vectors[0]


class Inputs:
    """Holds the tensors that a function is differentiated with respect to, which are leaves of its
    arguments."""

    def __init__(self, args: Sequence[Any], argnums: int | tuple[int, ...]) -> None:
        self.args = args
        self.argnums = argnums
        tree = (
            args[argnums] if isinstance(argnums, int) else tuple(args[number] for number in argnums)
        )
        self.tensors, self.spec = tree_flatten(tree)
        if not all(map(is_real, self.tensors)):
            for number in numbers_in(argnums):
                checked(args[number], f"argument {number}", LEAVE_OUT)
        if not self.tensors:
            raise ValueError(
                f"the arguments to differentiate must contain a tensor (argnums: {argnums}, "
                f"given: {tree!r})"
            )

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """Return one tensor for each input, in the structure of the argument, or of a tuple of
        arguments."""
        return tree_unflatten(tensors, self.spec)

    def in_arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return all arguments, with other tensors in place of these inputs."""
        tree = self.tree(tensors)
        return filled(
            self.args, numbers_in(self.argnums), [tree] if isinstance(self.argnums, int) else tree
        )


def numbers_of(argnums: Argnums, count: int) -> int | tuple[int, ...]:
    """Return the numbers of the differentiated arguments, counted from 0. It is a tuple if results
    have a tuple with an entry for each."""
    if argnums is None:
        argnums = 0 if count == 1 else tuple(range(count))
    numbers = numbers_in(argnums)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise TypeError(
            f"argnums must be an integer, a tuple of integers, or None (argnums: {argnums!r})"
        )
    if not numbers or not all(-count <= number < count for number in numbers):
        raise ValueError(
            f"argnums must name some of the {count} arguments, from 0 (argnums: {argnums!r})"
        )
    if len({number % count for number in numbers}) < len(numbers):
        raise ValueError(f"argnums must name each argument once (argnums: {argnums!r})")
    return (
        argnums % count if isinstance(argnums, int) else tuple(number % count for number in numbers)
    )


def numbers_in(argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    return argnums if isinstance(argnums, tuple) else (argnums,)


def checked(tree: object, name: str, remedy: str) -> tuple[list[Tensor], Any]:
    """Return the leaves of a tree and its structure. Raise TypeError if a leaf has no derivative.

    `name` and `remedy` are for the message.
    """
    leaves, spec = tree_flatten(tree)
    for number, leaf in enumerate(leaves):
        if is_real(leaf):
            continue
        whole = leaf_name(name, tree, number)
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{whole} must be a floating point tensor (given: {type(leaf).__name__}); {remedy}"
            )
        if leaf.is_complex():
            raise TypeError(f"{whole} must be real (dtype: {leaf.dtype}); use torch.view_as_real")
        raise TypeError(
            f"{whole} must be floating point to have a derivative (dtype: {leaf.dtype}); {remedy}"
        )
    return leaves, spec


def is_real(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def leaf_name(name: str, tree: object, number: int) -> str:
    """Return the name of a leaf for an error message: the tree's name, then the path to the
    leaf."""
    try:
        path, _ = tree_flatten_with_path(tree)[0][number]
    except ValueError:  # a registered type has no names for its parts
        return f"{name}, leaf {number},"
    return f"{name}{keystr(path)}"


def separated(found: Any, has_aux: bool) -> tuple[Any, list[Any]]:
    """Split a function's return value into its output and a list of the auxiliary values, which
    holds one tree or none."""
    if not has_aux:
        return found, []
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(
            "with has_aux=True the function must return a tuple (output, aux) (returned: "
            f"{described(found)})"
        )
    output, aux = found
    for number, leaf in enumerate(tree_leaves(aux)):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{leaf_name('aux', aux, number)} must be a tensor (given: {type(leaf).__name__}); "
                "return numbers as torch.tensor(number), and leave out anything else"
            )
    return output, [aux]


def filled(common: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return `common` with `values` at some positions."""
    whole = list(common)
    for number, value in zip(numbers, values, strict=True):
        whole[number] = value
    return whole


# --- the function at one item


# PyTorch has one level of dual numbers for all threads of a process
FORWARD_MODE = threading.RLock()
# Seconds to wait for another thread to leave forward mode. After that it is assumed that the other
# thread waits for this one.
PATIENCE = 120.0


class Task(ABC):
    """The function of an operation. It holds the values that all items share. A call gets the
    item's number and its own values."""

    def __init__(
        self, fn: Callable[..., Any], arguments: Arguments, create_graph: bool, has_aux: bool
    ) -> None:
        self.fn = fn
        self.form = arguments.form
        self.create_graph = create_graph
        self.has_aux = has_aux
        self.seed = draw_seed()
        self.streams = Streams()  # for generators that `fn` captures, in a worker

    def __call__(self, item: int, *own: Any) -> Any:
        with DIFFERENTIATING.entered():
            return self.answer(item, *own)

    @abstractmethod
    def answer(self, item: int, *own: Any) -> Any:
        """Return the derivative of one item, or a share of it."""

    def at(self, item: int, own: Sequence[Any]) -> tuple[PinnedFunction, Any]:
        """Return the function at the item's arguments, and the vectors by which its Jacobian is
        multiplied."""
        inputs, vectors = self.form.of(own)
        return PinnedFunction(self, item, inputs), vectors

    def finished(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, each in its own memory, and without the history from captures unless
        `create_graph` is set."""
        if self.create_graph:
            return list(tensors)
        memory = set[int]()
        return [apart(tensor.detach(), memory) for tensor in tensors]

    def beside(self, point: PinnedFunction) -> list[Any]:
        """Return the function's auxiliary values, finished."""
        if not self.has_aux:
            return []
        leaves, spec = tree_flatten(point.beside)
        return list(tree_unflatten(self.finished(leaves), spec))


def apart(tensor: Tensor, memory: set[int]) -> Tensor:
    """Return the tensor in memory that no other tensor uses. `memory` records the addresses in
    use."""
    if transforms_are_active() or tensor.layout is not torch.strided:
        return tensor
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor.clone()  # tensors within it own its memory
    pointer = tensor.untyped_storage().data_ptr()
    if pointer in memory:
        return tensor.clone()
    memory.add(pointer)
    return tensor


class PinnedFunction:
    """A function at fixed arguments. It is the same function at every evaluation, because it uses
    the same random numbers."""

    # These describe the latest output.
    spec: Any
    shapes: list[torch.Size]
    beside: list[Any]

    def __init__(self, task: Task, item: int, given: Inputs) -> None:
        self.task = task
        self.item = item
        self.given = given
        self.inputs = [
            fit(tensor if task.create_graph else tensor.detach()) for tensor in given.tensors
        ]
        self.size = sum(tensor.numel() for tensor in self.inputs)

    def tree(self, values: Sequence[Any]) -> Any:
        """Return one value for each output, in the structure of the function's result."""
        return tree_unflatten(values, self.spec)

    def seed(self) -> None:
        seed_item(self.task.seed, self.item)
        self.task.streams.begin(self.item)

    def evaluate(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Return the output's leaves and the auxiliary values, from the item's own random numbers.

        Raise an error if an output is not a real tensor.
        """
        self.seed()
        # These are copies, because fn may write to them even if they are leaves or belong to the
        # caller. A Jacobian is many times as large.
        args = self.given.in_arguments([tensor.clone() for tensor in inputs])
        for number in set(range(len(args))).difference(numbers_in(self.given.argnums)):
            args[number] = tree_map_only(Tensor, torch.clone, args[number])
        output, beside = separated(self.task.fn(*args), self.task.has_aux)
        remedy = "the function must return tensors that depend smoothly on its arguments"
        outputs, self.spec = checked(output, "the output", remedy)
        if not outputs:
            raise ValueError(f"the function must return at least one tensor (returned: {output!r})")
        self.shapes = [each.shape for each in outputs]
        return tuple(outputs), beside

    def moved(
        self, tangents: Mapping[int, Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[Any]]:
        """Return the outputs, their derivatives along the tangents of some inputs, and the
        auxiliary values."""

        def of_some(*some: Tensor) -> tuple[tuple[Tensor, ...], list[Any]]:
            with refusing_no_grad():
                return self.evaluate(*filled(self.inputs, list(tangents), some))

        with grad_mode(True):
            primals = tuple(self.inputs[k] for k in tangents)
            found: Any = torch.func.jvp(of_some, primals, tuple(tangents.values()), has_aux=True)
        outputs, moved, beside = found
        return outputs, moved, beside


def fit(tensor: Tensor) -> Tensor:
    """Return a tensor that is fit for derivatives. Inference tensors have none, and a tangent has
    the memory layout of its value."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone()
    if tensor.layout is torch.strided and overlaps(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class Graph:
    """One evaluation with a graph, from which any rows of the Jacobian can be computed."""

    def __init__(self, point: PinnedFunction, history: bool = False) -> None:
        self.point = point
        # whether gradients are themselves differentiated
        self.history = history or point.task.create_graph
        self._pull_back: Callable[..., tuple[Tensor, ...]] | None = None
        with grad_mode(True):
            if transforms_are_active():  # then only torch.func may compute gradients
                self.inputs = point.inputs
                found: Any = torch.func.vjp(point.evaluate, *point.inputs, has_aux=True)
                self.outputs, self._pull_back, point.beside = found
            else:
                self.inputs = list(map(own, point.inputs))
                self.outputs, point.beside = point.evaluate(*self.inputs)
        self.size = sum(output.numel() for output in self.outputs)

    def pull(self, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients of the inputs. A cotangent is None for an output that is not
        used."""
        self.point.seed()
        if self._pull_back is not None:
            whole = [
                torch.zeros_like(out) if cot is None else cot
                for out, cot in zip(self.outputs, cotangents, strict=True)
            ]
            return list(self._pull_back(tuple(whole)))
        pairs = [
            (out, cot)
            for out, cot in zip(self.outputs, cotangents, strict=True)
            if cot is not None and out.requires_grad
        ]
        if not pairs:
            return list(map(torch.zeros_like, self.inputs))
        outputs, incoming = zip(*pairs, strict=True)
        return list(derivatives(outputs, self.inputs, incoming, self.history))

    def row(self, start: int, stop: int) -> list[Tensor]:
        one = [None if each is None else each[0] for each in basis(self.outputs, start, stop)]
        return [grad.unsqueeze(0) for grad in self.pull(one)]

    def rows(self, start: int, stop: int) -> list[Tensor]:
        # This does not use is_grads_batched, because its older vmap has fewer batching rules. It is
        # ten times slower for 300 rows of a chain of tanh.
        blocks = basis(self.outputs, start, stop)
        dims = [None if block is None else 0 for block in blocks]
        return list(torch.func.vmap(self.pull, (dims,), randomness="same")(blocks))


def own(tensor: Tensor) -> Tensor:
    """Return a new tensor that needs gradients, with the history and the tangent of this one."""
    if tensor.requires_grad:
        return tensor.view_as(tensor)
    return (tensor.clone() if has_tangent(tensor) else tensor.detach()).requires_grad_()


def derivatives(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], history: bool
) -> tuple[Tensor, ...]:
    """Return derivatives, which are zero if no output depends on the input. The graph is kept."""
    return torch.autograd.grad(
        outputs,
        inputs,
        cotangents,
        retain_graph=True,
        create_graph=history,
        allow_unused=True,
        materialize_grads=True,
    )


def push(
    point: PinnedFunction, tangents: Mapping[int, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and their derivatives along the tangents of some inputs."""
    with forward_mode():
        outputs, moved, point.beside = point.moved(tangents)
    return list(outputs), list(moved)


def column(point: PinnedFunction, start: int, stop: int) -> list[Tensor]:
    """Return one column for each output."""
    tangents = {
        k: block[0] for k, block in enumerate(basis(point.inputs, start, stop)) if block is not None
    }
    _, moved = push(point, tangents)
    return [tangent.unsqueeze(0) for tangent in moved]


def columns(point: PinnedFunction, start: int, stop: int) -> list[Tensor]:
    """Return several columns at once for each output."""
    tangents = {
        k: block for k, block in enumerate(basis(point.inputs, start, stop)) if block is not None
    }
    with forward_mode():
        batched = torch.func.vmap(lambda tangents: point.moved(tangents)[1:], randomness="same")
        moved, beside = batched(tangents)
    if beside:  # copies, because a view would keep one for each column
        point.beside = tree_map_only(Tensor, lambda each: each[0].clone(), beside)
    return list(moved)


class ForwardModeBusyError(RuntimeError):
    """Forward mode is in use. The function did not fail, so no other mode is tried."""


@contextmanager
def forward_mode() -> Iterator[None]:
    """Enter forward mode, one thread at a time."""
    if not FORWARD_MODE.acquire(timeout=PATIENCE):
        raise ForwardModeBusyError(
            f"another thread has been in forward mode for {PATIENCE} s, perhaps waiting for this "
            "one, and PyTorch lets one thread of a process use it at a time; use mode='reverse', "
            "or a pool of processes"
        )
    try:
        yield
    finally:
        FORWARD_MODE.release()


def basis(likes: Sequence[Tensor], start: int, stop: int) -> list[Tensor | None]:
    """Return rows of the identity matrix over the elements of all `likes`, in their shapes. An
    entry is None if the rows have no 1 in that tensor."""
    blocks: list[Tensor | None] = []
    end = 0
    for like in likes:
        begin, end = end, end + like.numel()
        if end <= start or stop <= begin:
            blocks.append(None)
            continue
        block = like.new_zeros(stop - start, like.numel())
        block.diagonal(start - begin).fill_(1)
        blocks.append(block.view(stop - start, *like.shape))
    return blocks


# --- tasks


# If both are batched, a column costs as much as this number of rows
# (scripts/benchmarks/batch_derivatives.py).
ROWS_PER_COLUMN = 4


class Gradient:
    """The gradient of a function that returns one value, as a function.

    It returns the gradient and the auxiliary values of `fn`. If `and_value`, the value comes first.
    """

    def __init__(
        self, fn: Callable[..., Any], arguments: Arguments, has_aux: bool, and_value: bool = False
    ) -> None:
        self.fn = fn
        self.argnums = arguments.form.argnums
        self.has_aux = has_aux
        self.and_value = and_value

    def __call__(self, *args: Any) -> Any:
        inputs = Inputs(args, self.argnums)

        def value_of(*tensors: Tensor) -> tuple[Tensor, list[Any]]:
            """Return the value, and a list of the value in the output's structure and the auxiliary
            values."""
            found = self.fn(*inputs.in_arguments([tensor.clone() for tensor in tensors]))
            output, beside = separated(found, self.has_aux)
            leaves, spec = checked(output, "the output", "a Hessian needs one value")
            if [leaf.numel() for leaf in leaves] != [1]:
                shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
                raise ValueError(f"the function must return one value (output shape: {shapes})")
            value = leaves[0].reshape(())
            return value, [tree_unflatten([value], spec), *beside]

        tensors = inputs.tensors
        if transforms_are_active():
            numbers = tuple(range(len(tensors)))
            gradients, (_, [value, *beside]) = torch.func.grad_and_value(
                value_of, numbers, has_aux=True
            )(*tensors)
        else:
            gradients, [value, *beside] = gradients_and_beside(value_of, tensors)
        gradient = tree_map_only(Tensor, lambda _: inputs.tree(gradients), value)
        if self.and_value:
            return gradient, (value, *beside)
        return (gradient, *beside) if beside else gradient


def gradients_and_beside(
    value_of: Callable[..., tuple[Tensor, list[Any]]], inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Return the gradients and the auxiliary values, computed with ordinary autograd. No transform
    may be running."""
    history = torch.is_grad_enabled()
    with grad_mode(True):
        for each in inputs:
            each.requires_grad_()
        value, beside = value_of(*inputs)
        if not value.requires_grad:
            return tuple(map(torch.zeros_like, inputs)), beside
        found = torch.autograd.grad(
            value, inputs, create_graph=history, allow_unused=True, materialize_grads=True
        )
        return found, beside


class JacobianMethod(NamedTuple):
    """Describes how a Jacobian is computed, and the `mode` that selects it."""

    name: str
    mode: str
    by_rows: bool
    batched: bool


ROW = JacobianMethod("one row at a time", "reverse", True, False)
ROWS = JacobianMethod("batched rows", "batched", True, True)
COLUMN = JacobianMethod("forward mode, one column at a time", "forward", False, False)
COLUMNS = JacobianMethod("batched forward mode", "forward", False, True)
WAYS = {
    "auto": [COLUMNS, COLUMN, ROWS, ROW],
    "batched": [ROWS],
    "forward": [COLUMNS, COLUMN],
    "reverse": [ROW],
}


class Share(NamedTuple):
    """A part of a Jacobian: some rows, stacked for each input, or some columns, stacked for each
    output."""

    by_rows: bool
    tensors: list[Tensor]
    shapes: Any  # the outputs' shapes, in their structure
    beside: list[Any]  # the function's auxiliary values, in the first share
    said: str  # the text of a warning, or ""


class Jacobian(Task):
    """Computes a share of the rows or columns of one item, in the best way that the function
    supports."""

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        create_graph: bool,
        has_aux: bool,
        mode: str,
        chunk_size: int | None,
    ) -> None:
        super().__init__(fn, arguments, create_graph, has_aux)
        self.mode = mode
        self.ways = WAYS[mode]
        self.chunk_size = chunk_size

    def by_rows(self) -> Jacobian:
        """Return the same task, but by rows only. It is needed if other shares of the matrix could
        not be computed by columns."""
        other = copy.copy(self)
        other.ways = [ROWS, ROW]
        return other

    def answer(self, item: int, share: int, shares: int, *own: Any) -> Share:
        point, _ = self.at(item, own)
        ways = self.ways
        graph = Graph(point) if ways[-1].by_rows else None
        if graph is not None and not ways[0].by_rows:
            if graph.size > ROWS_PER_COLUMN * point.size:
                # The graph is not kept during forward mode. It is rebuilt if forward mode fails.
                graph = None
            else:
                ways = [ROWS, ROW]
        failures: list[str] = []
        for way in ways:
            try:
                graph = graph or (Graph(point) if way.by_rows else None)
                tensors = self.part(way, graph or point, share, shares)
                said = fallback(self.fn, failures, way.name, way.mode)
                beside = self.beside(point) if share == 0 else []
                return Share(
                    way.by_rows, self.finished(tensors), point.tree(point.shapes), beside, said
                )
            except Exception as error:
                if way is ROW or isinstance(error, MemoryError | ForwardModeBusyError):
                    raise
                failures.append(f"{way.name} ({first_line(error)})")
                if way is ways[-1]:
                    Graph(point).row(0, 1)  # raises if the function, not the mode, is at fault
                    raise NotImplementedError(
                        f"{name_of(self.fn)} does not support mode {self.mode!r}: "
                        f"{'; '.join(failures)}; "
                        "use mode='auto' or mode='reverse'"
                    ) from error
        raise AssertionError("a way returns or raises")

    def part(
        self, way: JacobianMethod, source: PinnedFunction | Graph, share: int, shares: int
    ) -> list[Tensor]:
        """Return share number `share` of `shares`. By rows, it has a tensor of shape [rows, *input]
        for each input. By columns, it has a tensor of shape [columns, *output] for each output."""
        start, stop = (source.size * number // shares for number in (share, share + 1))
        step = (self.chunk_size or source.size) if way.batched else 1
        if isinstance(source, Graph):
            if start == stop:
                return [each.new_zeros(0, *each.shape) for each in source.inputs]
            of_batch = source.rows if way.batched else source.row
            return gathered(of_batch, batches(source.outputs, start, stop, step), self.create_graph)
        if start == stop:
            outputs, source.beside = source.evaluate(*source.inputs)
            return [each.new_zeros(0, *each.shape) for each in outputs]
        of_batch = functools.partial(columns if way.batched else column, source)
        return gathered(of_batch, batches(source.inputs, start, stop, step), self.create_graph)


def batches(likes: Sequence[Tensor], start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """Return ranges of the rows or columns `start` to `stop`. Each range has at most `step` of
    them, which belong to one tensor.

    In a batch over two tensors, each would get zeros from the other's part, and 0 times an infinite
    derivative is not 0.
    """
    ends = itertools.accumulate(like.numel() for like in likes)
    cuts = sorted({start, stop, *(end for end in ends if start < end < stop)})
    return [
        (at, min(at + step, end))
        for begin, end in itertools.pairwise(cuts)
        for at in range(begin, end, step)
    ]


def gathered(
    of_batch: Callable[[int, int], list[Tensor]], pieces: Sequence[tuple[int, int]], history: bool
) -> list[Tensor]:
    """Join all batches. If they have no history, each is copied to its place as it arrives."""
    if len(pieces) == 1:
        return [each.contiguous() for each in of_batch(*pieces[0])]
    found = (of_batch(*piece) for piece in pieces)
    if history:
        return [torch.cat(each) for each in zip(*found, strict=True)]
    whole: list[Tensor] = []
    first, last = pieces[0][0], pieces[-1][1]
    for (start, stop), batch in zip(pieces, found, strict=True):
        whole = whole or [each.new_empty(last - first, *each.shape[1:]) for each in batch]
        for each, part in zip(whole, batch, strict=True):
            each[start - first : stop - first] = part.detach()
    return whole


class Product(NamedTuple):
    """The result of one item: the output, the product of its derivative with vectors, and the
    auxiliary values."""

    answer: tuple[Any, ...]
    said: str  # the text of a warning, or ""


class Jvp(Task):
    """Computes the output of one item, and the product of its Jacobian with tangents."""

    noun = "tangents"  # the name of the vectors in errors

    def answer(self, item: int, *own: Any) -> Product:
        point, tree = self.at(item, own)
        outputs, moved, said = pushed_somehow(
            point, tree_leaves(tree), "forward mode", push_by_two_backwards, "two backwards"
        )
        found = point.tree(self.finished(outputs)), point.tree(self.finished(moved))
        return Product((*found, *self.beside(point)), said)


class Vjp(Task):
    """Computes the output of one item, and the product of cotangents with its Jacobian."""

    noun = "cotangents"  # the name of the vectors in errors

    def answer(self, item: int, *own: Any) -> Product:
        point, cotangents = self.at(item, own)
        graph = Graph(point)
        pulled = graph.pull(alike(self.noun, cotangents, "the output", graph.outputs, point.spec))
        found = point.tree(self.finished(graph.outputs)), point.given.tree(self.finished(pulled))
        return Product((*found, *self.beside(point)), "")


class Hvp(Task):
    """Computes the product of vectors with the derivative of the function's gradient. That matrix
    is symmetric, so a product from the left equals one from the right."""

    noun = "vectors"  # the name of the vectors in errors

    def answer(self, item: int, *own: Any) -> Product:
        point, tree = self.at(item, own)
        _, products, said = pushed_somehow(
            point,
            tree_leaves(tree),
            "forward over reverse",
            lambda point, vectors: ([], Graph(point).pull(vectors)),
            "reverse over reverse",
        )
        [(value, *beside)] = self.beside(point)
        return Product((value, point.given.tree(self.finished(products)), *beside), said)


def pushed_somehow(
    point: PinnedFunction,
    tangents: Sequence[Tensor],
    way: str,
    otherwise: Callable[[PinnedFunction, Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]],
    instead: str,
) -> tuple[list[Tensor], list[Tensor], str]:
    """Return what `push` does, and "". If it fails, do it `otherwise`, and return also the text of
    a warning, which names both ways."""
    try:
        return *push(point, dict(enumerate(tangents))), ""
    except ForwardModeBusyError:
        raise
    except Exception as error:  # if the function itself fails, it fails again below
        fn = point.task.fn
        return *otherwise(point, tangents), fallback(fn, [f"{way} ({first_line(error)})"], instead)


def push_by_two_backwards(
    point: PinnedFunction, tangents: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the product with two backwards. Gradients are linear in the cotangents, and their
    derivative along the tangents is the product with the Jacobian."""
    graph = Graph(point, history=True)
    cotangents = [torch.zeros_like(output).requires_grad_() for output in graph.outputs]
    pairs = [
        pair for pair in zip(graph.pull(cotangents), tangents, strict=True) if pair[0].requires_grad
    ]
    if not pairs:
        return list(graph.outputs), list(map(torch.zeros_like, graph.outputs))
    gradients, incoming = zip(*pairs, strict=True)
    return list(graph.outputs), list(
        derivatives(gradients, cotangents, incoming, point.task.create_graph)
    )


def alike(name: str, vectors: object, of: str, likes: Sequence[Tensor], spec: Any) -> list[Tensor]:
    """Return the leaves of the vectors. Raise an error if they differ from `likes` in structure,
    shape or dtype."""
    leaves, given = tree_flatten(vectors)
    if given != spec:
        raise ValueError(
            f"{name} must have the structure of {of}, {treespec_pprint(spec)} (given: "
            f"{treespec_pprint(given)}); "
            "a list has one entry for each item"
        )
    for number, (leaf, like) in enumerate(zip(leaves, likes, strict=True)):
        if not isinstance(leaf, Tensor) or (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            whole = leaf_name(name, vectors, number)
            raise ValueError(f"{whole} must be {described(like)} (given: {described(leaf)})")
    return leaves


def described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}"


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def name_of(fn: Callable[..., Any]) -> str:
    if isinstance(fn, Gradient):
        return f"the gradient of {name_of(fn.fn)}"
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def fallback(fn: Callable[..., Any], failures: Sequence[str], instead: str, mode: str = "") -> str:
    """Return the text of a warning that another mode was used; "" if none failed."""
    if not failures:
        return ""
    remedy = f"; mode={mode!r} uses this at once" if mode else ""
    return (
        f"{name_of(fn)} does not support {', nor '.join(failures)}; mpgrad used "
        f"{instead} instead{remedy}"
    )
