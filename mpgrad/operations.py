"""An operation: one `map`, `submit` or `reduce` on its way, from packed calls to results with gradients.

    caller's thread: pack ──► queue ──►  dispatcher's thread: send, receive, `deliver`  ──► caller's thread: `value`
Guarantees: outcomes arrive once; dropping an operation, at any time, drops its graphs and its memory with it.
Assumes: `deliver` and `fail` come from the dispatcher's thread only; whoever waits reads `outcomes` after that.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad import structure
from mpgrad._torch import outside_transforms, transforms_are_active
from mpgrad.arena import Borrowed
from mpgrad.autograd import Home, RemoteGraph, attach, capture_gate, gate, modified_in_place
from mpgrad.carrier import (
    LEAF,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    Packer,
    Placed,
    are_distinct_tensors,
    check_carriable,
    flags_of,
    view,
)
from mpgrad.errors import warned_again
from mpgrad.messages import Result, Structure, Warned
from mpgrad.modes import Modes

__all__ = ["Delivered", "Operation", "PackedCall", "Shared", "SharedFunction", "pack_call"]


Shared = dict[int, tuple[torch.Tensor, Placed]]  # by id of the tensor, which the entry keeps from being another's


class SharedFunction:
    """A function as it is during one operation: its pickle, and its captures in one slot of shared memory."""

    numbers = itertools.count(1)

    def __init__(self, function: Callable[..., Any], packer: Packer, forget: Callable[[int, int], None]) -> None:
        try:
            self.pickled, captures = structure.dumps(function)
        except Exception as error:
            raise structure.transported(error, "the function") from error
        for tensor in captures:
            check_carriable(tensor, "the function")
        self.number = next(self.numbers)
        self.code = 0  # the scheduler's number of the pickle
        self.differentiable = [tensor for tensor in captures if tensor.requires_grad]
        self.refs, self.slot = packer.place_together(captures)
        self.nbytes = 0 if self.slot is None else self.slot.memory.nbytes
        self._forget = forget

    @property
    def block(self) -> tuple[int, int] | None:
        return None if self.slot is None else (self.slot.address, self.slot.memory.nbytes)

    def __del__(self) -> None:
        if hasattr(self, "_forget"):
            self._forget(self.number, self.nbytes)


class Conditions(NamedTuple):
    """What all calls of an operation run with, and run with again where a graph is lost."""

    function: SharedFunction
    modes: Modes
    seed: int | None


class PackedCall:
    """One call, ready to send; while its graph may be needed, also the recipe of that."""

    __slots__ = ("conditions", "deaths", "gated", "index", "inputs_lent", "placed", "structure", "ungated")

    conditions: Conditions

    def __init__(self, index: int, shape: Structure, placed: list[Placed]) -> None:
        self.index = index
        self.structure = shape
        self.placed = placed
        self.gated: Sequence[torch.Tensor] = ()
        self.ungated: Sequence[tuple[torch.Tensor, int]] = ()  # with their versions: gradients were off, but `fn` may want them
        self.inputs_lent: Sequence[tuple[torch.Tensor, int]] = ()
        self.deaths = 0  # of workers that ran this call, or came no further than to receive it

    @property
    def message_bytes(self) -> int:
        pickled = len(self.structure) if isinstance(self.structure, bytes) else 0
        return pickled + sum(len(each.body) for each in self.placed if each.body is not None)


def pack_call(
    packer: Packer,
    index: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grad: bool,
    shared: Shared | None = None,
) -> PackedCall:
    """Copy the arguments' tensors to where a worker can read them, and let those that need gradients through a gate.

    `shared` remembers what was placed, by the tensor's id, for operations whose calls have tensors in common.

    Raises:
        TypeError, pickle.PicklingError: an argument cannot be carried; names the item.
        SharedMemoryError: no room for a tensor.
    """
    if transforms_are_active():  # torch.func's, which follow none of these tensors; they would wrap all that is made here
        with outside_transforms():
            return pack_call(packer, index, args, kwargs, grad, shared)
    shape, tensors = arguments_structure(index, args, kwargs)
    placed = []
    for tensor in tensors:
        check_carriable(tensor, "item", index)
        placed.append(packer.place(tensor, flags_of(tensor)) if shared is None else place_once(packer, tensor, shared))
    call = PackedCall(index, shape, placed)
    if grad:
        call.gated = [gate(tensor) for tensor in tensors if tensor.requires_grad]
        lent = [tensor for tensor, each in zip(tensors, placed, strict=True) if isinstance(each.holder, Borrowed)]
        call.inputs_lent = [(tensor, tensor._version) for tensor in lent if not tensor.is_inference()]
    else:
        needing = [tensor for tensor in tensors if tensor.requires_grad]
        call.ungated = [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in needing]
    return call


def place_once(packer: Packer, tensor: torch.Tensor, shared: Shared) -> Placed:
    known = shared.get(id(tensor))
    if known is None:
        known = shared[id(tensor)] = tensor, packer.place(tensor, flags_of(tensor) | SHARED)
    return known[1]


def arguments_structure(index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Structure, list[torch.Tensor]]:
    if not kwargs and (are_distinct_tensors(args) if len(args) != 1 else isinstance(args[0], torch.Tensor)):
        return len(args), list(args)
    try:
        return structure.dumps((tuple(args), kwargs))
    except Exception as error:
        raise structure.transported(error, f"item {index}") from error


class Delivered(NamedTuple):
    """A result as it came: not yet tensors, because those are made in the thread, and under the modes, of the caller."""

    result: Result
    payload: memoryview
    memories: dict[int, memoryview]  # borrowed, by address
    graph: RemoteGraph | None
    call: PackedCall


class Operation:
    def __init__(
        self,
        function: SharedFunction,
        home: Home,
        token: torch.Tensor | None,
        seed: int | None,
        modes: Modes,
        *,
        chunksize: int | None = None,
        stop_at_failure: bool = True,
        return_errors: bool = False,
        noun: str = "item",
        timeout: float | None = None,
    ) -> None:
        self.noun = noun  # what a call is in the caller's eyes, for errors: an item, or a block of them
        self.conditions = Conditions(function, modes, seed)
        self.function = function
        self.home = home
        self.token = token
        self.modes = modes
        self.timeout = timeout  # seconds for each call
        self.chunksize = chunksize
        self.stop_at_failure = stop_at_failure
        self.return_errors = return_errors  # in the place of the results that they prevented
        self.starts: Callable[[], bool] = lambda: True  # asked when a call begins; false where it was cancelled before
        self.on_outcome: Callable[[int], None] = lambda index: None
        self.on_finished: Callable[[], None] = lambda: None
        # written by the caller
        self.queue: deque[PackedCall] = deque()
        self.added = 0
        self.sealed = False  # no call will be added
        # written by the dispatcher
        self.outcomes: dict[int, Delivered | BaseException] = {}
        self.delivered = 0  # outcomes of calls before the limit
        self.limit: float = math.inf  # calls from here on do not matter: an earlier one failed, or nobody waits
        self.mutated = False  # a call wrote into a captured tensor
        self.warned: deque[Warned] = deque()  # warnings of tasks

    # --- the caller's side

    def add(self, call: PackedCall) -> None:
        call.conditions = self.conditions
        self.added += 1
        self.queue.append(call)

    @property
    def finished(self) -> bool:
        return self.sealed and self.delivered >= min(self.added, self.limit)

    def first_error(self) -> BaseException | None:
        """What is to be raised, as the serial loop would have: the exception of the first failing item."""
        if self.return_errors:
            return None
        errors = [index for index, outcome in self.outcomes.items() if isinstance(outcome, BaseException)]
        if not errors:
            return None
        error = self.outcomes[min(errors)]
        assert isinstance(error, BaseException)
        return error

    def value(self, index: int) -> Any:
        """The result of item `index`, which has come, as tensors with gradients; raises where the call raised."""
        self._warn()
        outcome = self.outcomes.pop(index)
        if isinstance(outcome, BaseException) and not self.return_errors:
            raise outcome
        with self.modes_of_caller():
            return self._build(outcome)

    def values(self) -> list[Any]:
        """All results in the items' order; raises the first failing item's exception, or has all exceptions in their places."""
        self._warn()
        error = self.first_error()
        if error is not None:
            self.outcomes.clear()
            raise error
        with self.modes_of_caller():
            return [self._build(self.outcomes.pop(index)) for index in range(len(self.outcomes))]

    def _warn(self) -> None:
        while self.warned:
            warned_again(*self.warned.popleft())
        if self.mutated:
            self.mutated = False
            warnings.warn(
                "the function wrote into a tensor that it captures, or into its .grad (for example running statistics, or a "
                "backward of its own); the change stays in the worker: return the new value, and store it in the caller",
                stacklevel=4,
            )

    @contextlib.contextmanager
    def modes_of_caller(self) -> Iterator[None]:
        """Those under which the operation was asked for; its results may be fetched under others, or in another thread."""
        with outside_transforms(), torch.inference_mode(self.modes.inference), torch.set_grad_enabled(self.modes.grad):
            yield

    def _build(self, outcome: Delivered | BaseException) -> Any:
        if isinstance(outcome, BaseException):
            return outcome
        result, graph, call = outcome.result, outcome.graph, outcome.call
        tensors = [view(ref, outcome.payload, lambda ref: outcome.memories[ref.place]) for ref in result.tensors]
        inner = []
        for number, ref in enumerate(result.tensors):
            needs_grad = bool(ref.flags & REQUIRES_GRAD)
            if needs_grad and not ref.flags & LEAF:
                inner.append(number)
            elif ref.flags & PARAMETER:
                tensors[number] = torch.nn.Parameter(tensors[number], requires_grad=needs_grad)
            elif needs_grad:
                tensors[number].requires_grad_()  # a leaf that the function made
        if graph is not None:
            graph.inputs_lent = call.inputs_lent
            if not self.modes.grad:
                self._let_in(call)
            outputs = attach(graph, [tensors[number] for number in inner], self.token, call.gated)
            call.gated = call.ungated = ()  # they lead to the graph, which may keep the call
            for number, output in zip(inner, outputs, strict=True):
                tensors[number] = output
        if result.structure is None:
            return tensors[0]
        if isinstance(result.structure, int):
            return tuple(tensors)
        return structure.loads(result.structure, tensors)

    @torch.enable_grad()
    def _let_in(self, call: PackedCall) -> None:
        """Gates for a call that was made without gradients, whose function turned them on by itself."""
        if self.token is None and self.function.differentiable:
            self.token = capture_gate(self.home, self.function.differentiable)
        for tensor, version in call.ungated:
            if not tensor.is_inference() and tensor._version != version:
                raise RuntimeError(modified_in_place(tensor, version))
        call.gated = [gate(tensor) for tensor, _ in call.ungated]

    # --- the dispatcher's side

    def deliver(self, index: int, outcome: Delivered | BaseException) -> None:
        if index >= self.limit:
            return
        self.outcomes[index] = outcome
        self.delivered += 1
        if self.stop_at_failure and isinstance(outcome, BaseException):
            self.limit = index
            self.delivered = sum(1 for each in self.outcomes if each < index)
        self.on_outcome(index)
        self.tell_if_finished()

    def tell_if_finished(self) -> None:
        if self.finished:
            tell, self.on_finished = self.on_finished, lambda: None  # once; and it may refer to what refers to us
            tell()

    def fail(self, error: BaseException) -> None:
        """Give every call that is still to come the same error."""
        self.queue.clear()
        for index in range(self.added):
            if index not in self.outcomes:
                self.deliver(index, error)

    def cancel(self) -> None:
        """Nobody wants the rest any more."""
        self.limit = 0
        self.sealed = True
        self.queue.clear()
        self.outcomes.clear()
