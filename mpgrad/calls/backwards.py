"""The outcome of a backward: the gradients that a worker has sent, or an exception, which is made
anew for each thread that asks. This module runs in any thread of the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.memory.arena import BorrowedMemory, Slot
from mpgrad.pickling.exceptions import one_more, raised_again
from mpgrad.tracebacks import shown
from mpgrad.wire.messages import Failure
from mpgrad.wire.tensor_refs import (
    REQUIRES_GRAD,
    PackedTensor,
    Packer,
    TensorRef,
    packed_again,
    place_of,
    staged_again,
    views,
)

__all__ = ["ReceivedGradients", "error_maker", "raised_from"]


class ReceivedGradients(NamedTuple):
    """The gradients that came of a backward, or the sums that a worker has collected. They are
    references, with the memory that the references name."""

    refs: Sequence[TensorRef | None]
    payload: memoryview
    # by address
    memories: dict[int, BorrowedMemory | Slot]
    # the worker that has sent them
    worker: object
    # the graph of the gradients
    derived: RemoteGraph | None = None
    # the captures with more behind them that this graph depends on
    reached: Sequence[int] = ()

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs that were wanted, then those of captures, if they come
        apart."""

        return views(self.refs, self.payload, lambda ref: self.memories[ref.place].memory)

    def connected(self) -> list[int]:
        """Return the places of those that are outputs of the graph of the gradients."""
        return [
            place
            for place, ref in enumerate(self.refs)
            if ref is not None and ref.flags & REQUIRES_GRAD
        ]

    def passed_on(self, place: int, staged_by: Packer | None = None) -> PackedTensor | None:
        """Return the gradient at this place, packed for another worker.

        `staged_by` is given if that worker can only read the CPU's memory.
        """
        ref = self.refs[place]
        if ref is None:
            return None
        memories = self.memories
        if ref.place >= 0:
            memories = {ref.place: memories[place_of(self.refs, ref)]}
        if staged_by is None:
            return packed_again(ref, self.payload, memories)
        return staged_again(staged_by, ref, self.payload, memories)


def raised_from(failure: Failure, call: str, worker: str) -> BaseException:
    """Return the exception of a task, made anew. Its note has the `call`, such as "item 3 of
    simulate", unless that is ""."""
    return raised_again(
        failure.error, shown(failure.traceback), failure.phase, call, worker, failure.given
    )


def error_maker(error: BaseException) -> Callable[[], BaseException]:
    """Return a function that makes a new copy of the exception at each call."""
    return functools.partial(one_more, error)
