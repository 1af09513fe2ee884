"""What comes after a pool's end, answered in the thread that finds it: there is no scheduling thread any more. Caller's side.

Any thread, but one at a time; another one that comes meanwhile leaves what it has brought to that one, and does not wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from mpgrad.callbacks import report
from mpgrad.calls.operations import Operation
from mpgrad.errors import InternalError
from mpgrad.scheduling.lifecycle import Lifecycle

__all__ = ["Settling"]


class Settling:
    """Orders are carried out, and operations fail with the reason of the end."""

    def __init__(self, inbox: deque[Callable[[], None]], unfinished: dict[Operation, None], life: Lifecycle) -> None:
        self._inbox = inbox
        self._unfinished = unfinished
        self._life = life
        self._turn = threading.RLock()  # callbacks that run meanwhile may ask for something, too

    def settle(self) -> None:
        while self._inbox or self._unfinished:
            if not self._turn.acquire(blocking=False):
                return  # whoever has it looks once more after giving it back
            try:
                while self._inbox:
                    carry_out(self._inbox.popleft())
                while self._unfinished:
                    operation = next(iter(self._unfinished))
                    del self._unfinished[operation]  # first: its callbacks may lead here again
                    operation.fail(self._life.ended or InternalError("settled before the end"))
            finally:
                self._turn.release()


def carry_out(order: Callable[[], None]) -> None:
    try:
        order()
    except BaseException:  # a fault of ours, perhaps the one that broke the pool: others still wait for an answer
        report(logging.ERROR, "an order that came too late failed", with_traceback=True)
