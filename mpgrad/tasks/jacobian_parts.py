"""A share of a derivative: what a worker runs for one item, or the caller in its place if there is no pool.

A task is called for one item at a time: for a share of the rows or columns of its Jacobian, or for its product with vectors.
What it evaluates is a `Point`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpgrad.tasks.jacobian_arguments import Arguments, check_real, filled
from mpgrad.tasks.points import ForwardModeBusyError, Graph, Point, Task, column, columns, derivatives, push
from mpgrad.torch_state.private import grad_mode, transforms_are_active

ROWS_PER_COLUMN = 4  # where both are batched, a column costs as much as so many rows (scripts/benchmarks/batch_derivatives.py)


class Gradient:
    """The gradient of a function of one value, as a function; with `and_value`, the value comes last."""

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, and_value: bool = False) -> None:
        self.fn = fn
        self.wanted = arguments.wanted
        self.alone = arguments.alone and not and_value
        self.and_value = and_value

    def __call__(self, *args: Any) -> Any:
        inputs = [args[number] for number in self.wanted]

        def value_of(*inputs: Tensor) -> Tensor:
            value = self.fn(*filled(args, self.wanted, [tensor.clone() for tensor in inputs]))
            check_real(value, "the output", "a Hessian is of one value")
            if value.numel() != 1:
                raise ValueError(f"the function must return one value (output shape: {tuple(value.shape)})")
            one: Tensor = value.reshape(())
            return one

        if transforms_are_active():
            gradients, value = torch.func.grad_and_value(value_of, tuple(range(len(inputs))))(*inputs)
        else:
            gradients, value = gradients_and_value(value_of, inputs)
        if self.alone:
            return gradients[0]
        return (*gradients, value) if self.and_value else tuple(gradients)


def gradients_and_value(value_of: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """By ordinary autograd, where no transform is running."""
    history = torch.is_grad_enabled()
    with grad_mode(True):
        for each in inputs:
            each.requires_grad_()
        value = value_of(*inputs)
        if not value.requires_grad:
            return tuple(map(torch.zeros_like, inputs)), value
        return torch.autograd.grad(value, inputs, create_graph=history, allow_unused=True, materialize_grads=True), value


class Way(NamedTuple):
    """How a Jacobian comes about, and the `mode` that asks for it."""

    name: str
    mode: str
    by_rows: bool
    batched: bool


ROW = Way("one row at a time", "reverse", True, False)
ROWS = Way("batched rows", "batched", True, True)
COLUMN = Way("forward mode, one column at a time", "forward", False, False)
COLUMNS = Way("batched forward mode", "forward", False, True)
WAYS = {
    "auto": [COLUMNS, COLUMN, ROWS, ROW],
    "batched": [ROWS],
    "forward": [COLUMNS, COLUMN],
    "reverse": [ROW],
}


class Share(NamedTuple):
    """A part of a Jacobian: some rows, stacked for each input, or some columns, stacked for each output."""

    by_rows: bool
    tensors: list[Tensor]
    shapes: list[torch.Size]  # of the outputs
    several: bool  # outputs: a tuple
    said: str  # a warning, or ""


class Jacobian(Task):
    """Called for a share of the rows or columns of one item, in the best way that the function goes along with."""

    def __init__(
        self, fn: Callable[..., Any], arguments: Arguments, create_graph: bool, mode: str, chunk_size: int | None
    ) -> None:
        super().__init__(fn, arguments, create_graph)
        self.mode = mode
        self.ways = WAYS[mode]
        self.chunk_size = chunk_size

    def by_rows(self) -> Jacobian:
        """The same, by rows only: for shares of a matrix of which others could not be had by columns."""
        other = copy.copy(self)
        other.ways = [ROWS, ROW]
        return other

    def answer(self, item: int, share: int, shares: int, *own: Any) -> Share:
        point, _ = self.at(item, own)
        ways = self.ways
        graph = Graph(point) if ways[-1].by_rows else None
        if graph is not None and not ways[0].by_rows:
            if graph.size > ROWS_PER_COLUMN * point.size:
                graph = None  # not to be kept beside dual numbers; made again where these do not work
            else:
                ways = [ROWS, ROW]
        failures: list[str] = []
        for way in ways:
            try:
                graph = graph or (Graph(point) if way.by_rows else None)
                tensors = self.part(way, graph or point, share, shares)
                said = fallback(self.fn, failures, way.name, way.mode)
                return Share(way.by_rows, self.finished(tensors), point.shapes, point.several, said)
            except Exception as error:
                if way is ROW or isinstance(error, MemoryError | ForwardModeBusyError):
                    raise
                failures.append(f"{way.name} ({first_line(error)})")
                if way is ways[-1]:
                    Graph(point).row(0, 1)  # raises where not the way but the function is at fault
                    raise NotImplementedError(
                        f"{name_of(self.fn)} does not go along with mode {self.mode!r}: {'; '.join(failures)}; "
                        "use mode='auto' or mode='reverse'"
                    ) from error
        raise AssertionError("a way returns or raises")

    def part(self, way: Way, source: Point | Graph, share: int, shares: int) -> list[Tensor]:
        """Share `share` of `shares`: for each input [rows, *its shape]; by columns for each output [columns, *its shape]."""
        start, stop = (source.size * number // shares for number in (share, share + 1))
        step = (self.chunk_size or source.size) if way.batched else 1
        if isinstance(source, Graph):
            if start == stop:
                return [each.new_zeros(0, *each.shape) for each in source.inputs]
            of_batch = source.rows if way.batched else source.row
            return gathered(of_batch, batches(source.outputs, start, stop, step), self.create_graph)
        if start == stop:
            return [each.new_zeros(0, *each.shape) for each in source.evaluate(*source.inputs)]
        of_batch = functools.partial(columns if way.batched else column, source)
        return gathered(of_batch, batches(source.inputs, start, stop, step), self.create_graph)


def batches(likes: Sequence[Tensor], start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """Rows or columns `start` to `stop`, so many at a time, and of one tensor at a time.

    A batch over two would bring zeros to each from the other's part, and 0 times an infinite derivative is not 0.
    """
    ends = itertools.accumulate(like.numel() for like in likes)
    cuts = sorted({start, stop, *(end for end in ends if start < end < stop)})
    return [(at, min(at + step, end)) for begin, end in itertools.pairwise(cuts) for at in range(begin, end, step)]


def gathered(of_batch: Callable[[int, int], list[Tensor]], pieces: Sequence[tuple[int, int]], history: bool) -> list[Tensor]:
    """All batches, one after another; copied to their place as they come, if they have no history."""
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
    """What one item gives: the output, and the product of its derivative with vectors; both without structure."""

    outputs: list[Tensor]
    products: list[Tensor]
    several: bool  # outputs: a tuple
    said: str  # a warning, or ""


class Jvp(Task):
    """The output of one item, and the product of its Jacobian with tangents."""

    def answer(self, item: int, *own: Any) -> Product:
        point, tangents = self.at(item, own)
        said = ""
        try:
            outputs, moved = push(point, tangents)
        except ForwardModeBusyError:
            raise
        except Exception as error:  # or the function's own, which then comes again
            outputs, moved = push_by_two_backwards(point, tangents)
            said = fallback(self.fn, [f"forward mode ({first_line(error)})"], "two backwards")
        return Product(self.finished(outputs), self.finished(moved), point.several, said)


class Vjp(Task):
    """The output of one item, and the product of cotangents with its Jacobian."""

    def answer(self, item: int, *own: Any) -> Product:
        point, cotangents = self.at(item, own)
        graph = Graph(point)
        check_alike("cotangents", cotangents, graph.outputs)
        pulled = graph.pull(cotangents)
        return Product(self.finished(graph.outputs), self.finished(pulled), point.several, "")


class Hvp(Task):
    """Of the function's gradient, whose derivative is symmetric: a product from the left is one from the right."""

    def answer(self, item: int, *own: Any) -> Product:
        point, vectors = self.at(item, own)
        said = ""
        try:
            outputs, (*products, _) = push(point, vectors)
        except ForwardModeBusyError:
            raise
        except Exception as error:
            graph = Graph(point)
            outputs, products = list(graph.outputs), graph.pull([*vectors, None])
            said = fallback(self.fn, [f"forward over reverse ({first_line(error)})"], "reverse over reverse")
        return Product(self.finished(outputs[-1:]), self.finished(products), False, said)


def push_by_two_backwards(point: Point, tangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients are linear in the cotangents; their derivative along the tangents is the Jacobian's product."""
    graph = Graph(point, history=True)
    cotangents = [torch.zeros_like(output).requires_grad_() for output in graph.outputs]
    pairs = [pair for pair in zip(graph.pull(cotangents), tangents, strict=True) if pair[0].requires_grad]
    if not pairs:
        return list(graph.outputs), list(map(torch.zeros_like, graph.outputs))
    gradients, incoming = zip(*pairs, strict=True)
    return list(graph.outputs), list(derivatives(gradients, cotangents, incoming, point.task.create_graph))


def check_alike(name: str, vectors: Sequence[object], likes: Sequence[Tensor]) -> None:
    if len(vectors) != len(likes):
        raise ValueError(f"{name} must be {len(likes)} in number (given: {len(vectors)})")
    for number, (vector, like) in enumerate(zip(vectors, likes, strict=True)):
        if not isinstance(vector, Tensor) or (vector.shape, vector.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{name}[{number}] must be {described(like)} (given: {described(vector)})")


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
    """The words of a warning that another way was taken; "" where none failed."""
    if not failures:
        return ""
    remedy = f"; mode={mode!r} goes there at once" if mode else ""
    return f"{name_of(fn)} does not go along with {', nor with '.join(failures)}; {instead} took the place{remedy}"
