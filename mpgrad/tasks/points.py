"""A function at the arguments of one item, and the rows and columns of its derivative there. Wherever the call runs.

A `Task` holds the function and what all items share. A `Point` is the function at the item's arguments; a `Graph` one
evaluation there, from which rows can be had. Columns take dual numbers, and an evaluation each, or one for all under a vmap.

Guarantees: every evaluation of an item meets the same random numbers, so that all rows and columns belong to one function.
Assumes: `fn`, run twice with the same random numbers, is the same function.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpgrad.errors import contextmanager
from mpgrad.pickling.streams import Streams
from mpgrad.tasks.jacobian_arguments import Arguments, check_real, filled
from mpgrad.torch_state.modes import DIFFERENTIATING, draw_seed, seed_item
from mpgrad.torch_state.private import grad_mode, has_tangent, refusing_no_grad, transforms_are_active
from mpgrad.wire.tensor_refs import overlaps

FORWARD_MODE = threading.RLock()  # PyTorch has one level of dual numbers for all threads of a process
PATIENCE = 120.0  # seconds to wait for another thread to leave forward mode, before it is taken for one that waits for us


class Task(ABC):
    """The function of an operation: holds what all items share; a call gets the item's number and what is its own."""

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, create_graph: bool) -> None:
        self.fn = fn
        self.common = arguments.common
        self.own = list(arguments.own)
        self.count = arguments.count
        self.wanted = arguments.wanted
        self.create_graph = create_graph
        self.seed = draw_seed()
        self.streams = Streams()  # in a worker: of the generators that `fn` captures

    def __call__(self, item: int, *own: Any) -> Any:
        with DIFFERENTIATING.entered():
            return self.answer(item, *own)

    @abstractmethod
    def answer(self, item: int, *own: Any) -> Any:
        """The derivative of one item, or a share of it."""

    def at(self, item: int, own: Sequence[Any]) -> tuple[Point, list[Any]]:
        """The point, and the vectors that a product is taken with."""
        every = filled(self.common, self.own, own)
        return Point(self, item, every[: self.count]), every[self.count :]

    def finished(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each in memory of its own, and without the history that captures would give them, unless it was asked for."""
        if self.create_graph:
            return list(tensors)
        memory = set[int]()
        return [apart(tensor.detach(), memory) for tensor in tensors]


def apart(tensor: Tensor, memory: set[int]) -> Tensor:
    """In memory that no other has, of which `memory` keeps account."""
    if transforms_are_active() or tensor.layout is not torch.strided:
        return tensor
    pointer = tensor.untyped_storage().data_ptr()
    if pointer in memory:
        return tensor.clone()
    memory.add(pointer)
    return tensor


class Point:
    """A function at one place: the same function at every evaluation, because it meets the same random numbers."""

    shapes: list[torch.Size]  # of what it returned last
    several: bool  # whether that was a tuple

    def __init__(self, task: Task, item: int, args: list[Any]) -> None:
        self.task = task
        self.item = item
        self.args = args
        self.inputs = [fit(args[number] if task.create_graph else args[number].detach()) for number in task.wanted]
        self.size = sum(tensor.numel() for tensor in self.inputs)

    def seed(self) -> None:
        seed_item(self.task.seed, self.item)
        self.task.streams.begin(self.item)

    def evaluate(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, always a tuple, from the item's own random numbers; raises where one is no real tensor."""
        self.seed()
        # copies: fn may write into them, also where they are leaves or the caller's; a Jacobian is many times as large
        outputs = self.task.fn(*filled(self.args, self.task.wanted, [tensor.clone() for tensor in inputs]))
        self.several = isinstance(outputs, tuple)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for number, output in enumerate(outputs):
            check_real(output, f"output {number}", "the function must return tensors that depend smoothly on its arguments")
        self.shapes = [output.shape for output in outputs]
        return outputs

    def moved(self, tangents: Mapping[int, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs, and their derivatives along the tangents of some inputs."""

        def of_some(*some: Tensor) -> tuple[Tensor, ...]:
            with refusing_no_grad():
                return self.evaluate(*filled(self.inputs, list(tangents), some))

        with grad_mode(True):
            found: Any = torch.func.jvp(of_some, tuple(self.inputs[k] for k in tangents), tuple(tangents.values()))
        outputs, moved = found
        return outputs, moved


def fit(tensor: Tensor) -> Tensor:
    """Derivatives are not followed through inference tensors, and tangents are written into the memory layout of the value."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone()
    if tensor.layout is torch.strided and overlaps(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class Graph:
    """One evaluation with a graph, from which any rows of the Jacobian can be had."""

    def __init__(self, point: Point, history: bool = False) -> None:
        self.point = point
        self.history = history or point.task.create_graph  # whether gradients are differentiated in their turn
        self._pull_back: Callable[..., tuple[Tensor, ...]] | None = None
        with grad_mode(True):
            if transforms_are_active():  # where nothing else may ask for gradients
                self.inputs = point.inputs
                found: Any = torch.func.vjp(point.evaluate, *point.inputs)
                self.outputs, self._pull_back = found
            else:
                self.inputs = list(map(own, point.inputs))
                self.outputs = point.evaluate(*self.inputs)
        self.size = sum(output.numel() for output in self.outputs)

    def pull(self, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients of the inputs; None stands for outputs that play no part."""
        self.point.seed()
        if self._pull_back is not None:
            whole = [torch.zeros_like(out) if cot is None else cot for out, cot in zip(self.outputs, cotangents, strict=True)]
            return list(self._pull_back(tuple(whole)))
        pairs = [(out, cot) for out, cot in zip(self.outputs, cotangents, strict=True) if cot is not None and out.requires_grad]
        if not pairs:
            return list(map(torch.zeros_like, self.inputs))
        outputs, incoming = zip(*pairs, strict=True)
        return list(derivatives(outputs, self.inputs, incoming, self.history))

    def row(self, start: int, stop: int) -> list[Tensor]:
        one = [None if each is None else each[0] for each in basis(self.outputs, start, stop)]
        return [grad.unsqueeze(0) for grad in self.pull(one)]

    def rows(self, start: int, stop: int) -> list[Tensor]:
        # not is_grads_batched, whose older vmap has fewer rules: ten times slower for 300 rows of a chain of tanh
        blocks = basis(self.outputs, start, stop)
        dims = [None if block is None else 0 for block in blocks]
        return list(torch.func.vmap(self.pull, (dims,), randomness="same")(blocks))


def own(tensor: Tensor) -> Tensor:
    """A tensor of ours that needs gradients, with the history and the tangent of this one."""
    if tensor.requires_grad:
        return tensor.view_as(tensor)
    return (tensor.clone() if has_tangent(tensor) else tensor.detach()).requires_grad_()


def derivatives(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], history: bool
) -> tuple[Tensor, ...]:
    """Zeros where nothing depends on an input; the graph is kept."""
    return torch.autograd.grad(
        outputs, inputs, cotangents, retain_graph=True, create_graph=history, allow_unused=True, materialize_grads=True
    )


def push(point: Point, tangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and their derivatives along the tangents of the inputs."""
    with forward_mode():
        outputs, moved = point.moved(dict(enumerate(tangents)))
    return list(outputs), list(moved)


def column(point: Point, start: int, stop: int) -> list[Tensor]:
    """One column, for each output."""
    tangents = {k: block[0] for k, block in enumerate(basis(point.inputs, start, stop)) if block is not None}
    with forward_mode():
        return [tangent.unsqueeze(0) for tangent in point.moved(tangents)[1]]


def columns(point: Point, start: int, stop: int) -> list[Tensor]:
    """Several at once, for each output."""
    tangents = {k: block for k, block in enumerate(basis(point.inputs, start, stop)) if block is not None}
    with forward_mode():
        return list(torch.func.vmap(lambda tangents: point.moved(tangents)[1], randomness="same")(tangents))


class ForwardModeBusyError(RuntimeError):
    """No fault of the function's: no other way is taken for it."""


@contextmanager
def forward_mode() -> Iterator[None]:
    """One thread at a time."""
    if not FORWARD_MODE.acquire(timeout=PATIENCE):
        raise ForwardModeBusyError(
            f"another thread has been in forward mode for {PATIENCE} s, perhaps waiting for this one, and PyTorch has one "
            "level of it for all threads of a process; use mode='reverse', or a pool of processes"
        )
    try:
        yield
    finally:
        FORWARD_MODE.release()


def basis(likes: Sequence[Tensor], start: int, stop: int) -> list[Tensor | None]:
    """Rows of the identity matrix over the elements of all `likes`, in their shapes; None where a tensor has no 1 in them."""
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
