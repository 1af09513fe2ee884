"""The inline engine: one worker in the caller's own thread, for debugging. The same messages; no process, thread or pipe.

Guarantees: what the process engine does with a call happens here too (private copies, seeds, pickled functions, capture
    sums), so that a breakpoint in the function sees what a worker would see; the caller's random generators are put back.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpgrad.scheduling.crew import Worker
from mpgrad.scheduling.scheduler import Scheduler, Settings
from mpgrad.torch_state.modes import kept_random_state
from mpgrad.torch_state.private import outside_transforms, without_saved_tensor_hooks
from mpgrad.wire.frames import Frame, Pipe
from mpgrad.wire.messages import Message, Start, Stop

__all__ = ["InlineScheduler"]


class Loopback:
    """One direction of a pipe within a thread: frames wait in `frames` until they are taken."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.opposite: Loopback = self
        self._descriptors: deque[int] = deque()

    def send(self, messages: list[Message], payload: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        self._descriptors.extend(os.dup(descriptor) for descriptor in descriptors)
        self.frames.append(Frame(messages, memoryview(bytearray().join(payload))))

    def take_descriptor(self) -> int:
        return self.opposite._descriptors.popleft()


class InlineScheduler(Scheduler):
    """A scheduler that runs in whichever thread asks for something, and runs the calls there too."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings._replace(workers=1, calls=None))
        self._turn = threading.RLock()
        self._to_worker, self._to_parent = Loopback(), Loopback()
        self._to_worker.opposite, self._to_parent.opposite = self._to_parent, self._to_worker
        self._remote: Any = None  # the workers' side is named, not imported: it is loaded where it runs
        self.hire()
        self.wake()

    def wake(self) -> None:
        with self._turn:
            try:
                while self._ended is None and self._step():
                    pass
            except BaseException as error:
                interrupted = f"an inline pool was interrupted in the middle of its own work ({type(error).__name__})"
                self._break(RuntimeError(f"{interrupted}; make a new one, or use processes, which an interrupt does not break"))
                raise
            if self._stopping and self._ended is None:
                self.end()

    def _step(self) -> bool:
        """Work, have the worker work, take its answers; whether there was anything to do."""
        self.work()
        if self._to_worker.frames:
            self._run(self._to_worker.frames.popleft())
        elif self._to_parent.frames:
            (worker,) = self._workers.values()
            self.receive(worker, self._to_parent.frames.popleft())
        elif not self._inbox:
            return False
        return not self._stopping

    def _run(self, frame: Frame) -> None:
        first = frame.messages[0]
        # what is the caller's would follow the task
        with kept_random_state(), outside_transforms(), without_saved_tensor_hooks():
            if isinstance(first, Start):
                main = importlib.import_module("mpgrad.workers.main")
                self._remote = main.begin(1, self._to_parent, first)
            elif type(frame.messages[-1]) is not Stop:
                self._remote.handle(frame)

    def _feed(self) -> None:
        (worker,) = self._workers.values()
        if worker.ready and not self._to_worker.frames:  # a task may use the pool again: no limit of chunks under way
            self._give(worker)

    def nudge(self) -> None:
        """News rides with the next message."""

    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool:
        self.check_process()
        self.wake()
        return satisfied()

    def join(self) -> None:
        self.check_process()

    def leave(self) -> None:
        """There is no process to end."""
        self.close()

    def open_channel(self, number: int) -> Pipe:
        return self._to_worker

    def close_channel(self, worker: Worker) -> int | None:
        self._remote = None
        return None

    @property
    def can_kill(self) -> bool:
        return False

    def drain_pipe(self, worker: Worker) -> None:
        """It answers in our own thread."""

    def kill(self, worker: Worker, by: int = signal.SIGKILL) -> None:
        """There is no process to kill."""

    def watch(self, worker: Worker) -> None:
        """A queue in memory takes everything."""

    def tell_waiters(self) -> None:
        """Whoever waits is this thread, and looks for itself."""
