"""The scheduler in the caller's own thread, for engines whose calls run there too.

Guarantees: whoever waits has done, when it is its turn, all that can be done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpgrad.engines.protocol import Engine
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.scheduling.settings import Settings

__all__ = ["InlineScheduler"]


class InlineScheduler(Scheduler):
    """A scheduler that runs in whichever thread asks for something."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(settings._replace(workers=1, calls=None), engine)
        self._turn = threading.RLock()
        self.staff.hire()
        self.wake()

    def wake(self) -> None:
        with self._turn:
            try:
                while not self.life.has_ended and self._step():
                    pass
            except BaseException as error:
                interrupted = f"an inline pool was interrupted in the middle of its own work ({type(error).__name__})"
                self.life.break_off(
                    RuntimeError(f"{interrupted}; make a new one, or use processes, which an interrupt does not break")
                )
                raise
            if self.life.is_stopping and not self.life.has_ended:
                self.end()

    def _step(self) -> bool:
        """Work, have the worker work, take its answers; whether there was anything to do."""
        self.work()
        links = self.engine.wait(0)
        for link in links:
            self.receiver.serve(self.workers[link.number])
        if not links and not self.inbox:
            return False
        return not self.life.is_stopping

    def feed(self) -> None:
        (worker,) = self.workers.values()
        if worker.ready:  # a task may use the pool again: no limit of chunks under way
            self.deliveries.give(worker)

    def nudge(self) -> None:
        """News rides with the next message."""

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        self.life.check_process()
        self.wake()
        return satisfied()

    def join(self) -> None:
        self.life.check_process()

    def leave(self) -> None:
        """There is no process to end."""
        self.close()

    def tell_waiters(self) -> None:
        """Whoever waits is this thread, and looks for itself."""
