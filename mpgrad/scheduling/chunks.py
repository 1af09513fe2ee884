"""What workers are sent: the chunks in which calls, backwards and requests for sums travel. Caller's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpgrad.autograd.remote_graph import Backward
from mpgrad.calls.homes import SumRequest
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall

__all__ = ["Chunk"]


class Chunk(NamedTuple):
    """What a worker has been sent and has not answered: calls of an operation, backwards, or a request for a sum."""

    operation: Operation | None
    calls: list[tuple[int, PackedCall]]  # with the call's number
    backwards: list[Backward]
    request: SumRequest | None
    timeout: float | None  # of each call, in seconds

    def fail_backwards(self, make: Callable[[], BaseException]) -> None:
        """Those that wait for it get the exception that `make` gives."""
        for backward in self.backwards:
            backward.settle(make)
        if self.request is not None:
            self.request.settle(make)

    def wanted(self) -> list[bool]:
        """Of each call or backward: whether anybody waits for it."""
        if self.operation is not None:
            return [call.index < self.operation.limit for _, call in self.calls]
        requests = [] if self.request is None else [self.request]
        return [not each.arrived for each in (*self.backwards, *requests)]
