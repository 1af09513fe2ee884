"""Whose thread the scheduling thread is: what the parts of a scheduler ask of whoever runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from mpgrad.autograd.remote_graph import Backward
from mpgrad.scheduling.notes import Notes
from mpgrad.scheduling.worker_handle import WorkerHandle

__all__ = ["Driver"]


class Driver(Protocol):
    """A `Dispatcher` has a thread of its own, an `InlineScheduler` the caller's. All of it may be called by any thread."""

    notes: Notes
    inbox: deque[Callable[[], None]]  # orders for the scheduling thread's next turn

    def put(self, order: Callable[[], None]) -> None:
        """Into the inbox; after the end it is done at once."""
        ...

    def post(self, order: Callable[[], None]) -> None:
        """`put`, and `wake`."""
        ...

    def wake(self) -> None:
        """Have the scheduling thread look at what there is to do."""
        ...

    def hand_over(self) -> None:
        """`wake`, by a caller who has much work of its own: let the scheduling thread have its turn first."""
        ...

    def nudge(self) -> None:
        """There is news for a worker, which can wait a little. Called from finalizers: it may not wait, lock or raise."""
        ...

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in the caller's thread until `satisfied()`, which is evaluated after each frame; whether it was."""
        ...

    def wait_for_gradients(self, backward: Backward) -> None:
        """Send it when the gradients have come that it needs of other backwards. Called by the scheduling thread."""
        ...

    def rescue(self, worker: WorkerHandle) -> None:
        """Have others do what was left for a worker that is gone. Called by the scheduling thread."""
        ...

    def call_off_backward(self, graph_task: int) -> None:
        """Nobody waits any more for what was sent for the backward with this number. Called from finalizers."""
        ...

    def tell_waiters(self) -> None:
        """Something was delivered. Called by the scheduling thread; after the end by any."""
        ...
