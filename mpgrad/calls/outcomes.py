"""What came of a call: a result that is still bytes and memory, or an exception that is still to be made.

The scheduling thread puts them here; tensors and exceptions are made by who asks, in a thread of the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.calls.packing import PackedCall
from mpgrad.errors import ancestor_failed
from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.pickling.exceptions import one_more
from mpgrad.wire.messages import Result
from mpgrad.wire.tensor_refs import Sparse, TensorRef, stand_in, views

__all__ = ["Delivered", "Failed", "Outcome"]


class Delivered(NamedTuple):
    """A result as it came: not yet tensors, because those are made in the thread, and under the modes, of the caller."""

    result: Result
    payload: memoryview
    memories: dict[int, Borrowed | Slot]  # by address; slots of ours for what came from devices
    graph: RemoteGraph | None
    call: PackedCall
    worker: object  # that gave it

    def views(self, private: bool = False) -> list[torch.Tensor]:
        """Its tensors, without a history; `private`: not in memory where workers may still read them."""
        payload, memories = self.payload, {place: holder.memory for place, holder in self.memories.items()}
        if private:
            payload, memories = own(payload), {place: own(memory) for place, memory in memories.items()}

        def borrow(ref: TensorRef) -> Any:
            return memories[ref.place]

        return views(self.result.tensors, payload, borrow)

    def stand_ins(self) -> list[torch.Tensor]:
        """Tensors without a history that look like `views()`. Sparse ones are real: they cannot be given their memory later."""
        refs = self.result.tensors
        if not any(isinstance(ref.form, Sparse) for ref in refs):
            return list(map(stand_in, refs))
        views = self.views(private=True)
        return [there if isinstance(ref.form, Sparse) else stand_in(ref) for ref, there in zip(refs, views, strict=True)]


class Failed:
    """An exception in the place of a result, made by who asks for it: its class is the caller's code, which may import more.

    One that is raised keeps the frames that it came through, and what these hold. So what many calls fail with, which may
    live for as long as the pool, is made anew for each who asks; that of one call is kept, and ends with its result.
    """

    def __init__(self, make: Callable[[], BaseException], origin: Failed | None = None, anew: bool = False) -> None:
        self._make = make
        self._anew = anew
        self._error: BaseException | None = None
        self.origin = origin or self  # the failure of an ancestor, where that is why
        self.is_cancelled = False

    @classmethod
    def with_error(cls, error: BaseException) -> Failed:
        """That of one call."""
        failed = cls(lambda: error)
        failed.is_cancelled = isinstance(error, CancelledError)
        return failed

    @classmethod
    def with_copies(cls, error: BaseException) -> Failed:
        """That of many calls."""
        failed = cls(functools.partial(one_more, error), anew=True)
        failed.is_cancelled = isinstance(error, CancelledError)
        return failed

    @classmethod
    def because_of(cls, other: Failed, call: str) -> Failed:
        origin = other.origin
        return cls(lambda: ancestor_failed(origin.error(), call), origin, origin._anew)

    def error(self) -> BaseException:
        if self._anew:
            return self._make()
        if self._error is None:
            self._error = self._make()
        # without the lines that asked before; its class may have a method of that name
        return BaseException.with_traceback(self._error, None)


Outcome = Delivered | Failed


def own(memory: Any) -> Any:
    """A copy; the memory of slots on devices as it is."""
    return memoryview(bytearray(memory)) if isinstance(memory, memoryview) else memory  # what lies on devices is copied anyway
