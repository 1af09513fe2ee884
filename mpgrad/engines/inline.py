"""The inline engine: one worker in the caller's own thread, for debugging. The same messages; no
process, thread or pipe.

Guarantees: what the process engine does with a call happens here too (private copies, seeds,
    pickled functions, capture sums), so that a breakpoint in the function sees what a worker would
    see; the caller's random generators are put back.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections import deque
from collections.abc import Sequence
from typing import Any

from mpgrad.engines.launch import Exit
from mpgrad.engines.sockets import LocalLink
from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.torch_state.modes import default_settings, kept_random_state
from mpgrad.torch_state.private import outside_transforms, without_saved_tensor_hooks
from mpgrad.wire.frames import Frame, in_frames
from mpgrad.wire.messages import Message, Start, Stop
from mpgrad.wire.pipe import Traffic

__all__ = ["InlineEngine"]


class Loopback(LocalLink):
    """One end of a link within a thread: what is sent waits at the other end until it is taken."""

    shares_memory = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.skipped: dict[int, int] = {}
        self.other: Loopback = self
        self.frames: deque[Frame] = deque()  # that have come
        self._descriptors: deque[int] = deque()

    def send(
        self,
        messages: list[Message],
        payload: Sequence[bytes] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        self.other._descriptors.extend(os.dup(descriptor) for descriptor in descriptors)
        self.other.frames.append(Frame(messages, memoryview(bytearray().join(payload))))

    def introduce(self, slabs: Sequence[Any]) -> None:
        for messages, descriptors in in_frames(slabs):
            self.send(messages, (), descriptors)

    def carry(self, holder: Slot | Borrowed) -> None:
        """Both ends look at the same memory."""

    def drop(self, holder: Slot | Borrowed, times: int) -> None:
        """Both ends look at the same memory."""

    def receive(self) -> Frame | None:
        return self.frames.popleft() if self.frames else None

    def take_descriptor(self) -> int:
        return self._descriptors.popleft()

    def has_more(self) -> bool:
        return bool(self.frames)

    def kill(self, by: int = signal.SIGKILL) -> None:
        """There is no process to kill, and when this is asked no call runs."""

    def close(self) -> None:
        self.frames.clear()

    def end(self) -> None:
        self.close()
        self.other.close()
        self.exit = Exit()


class InlineEngine:
    """One worker, which works while somebody waits for it (`wait`)."""

    copies_caller = False

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.room: int | None = None
        self._ours = Loopback(1)
        self._workers = Loopback(1)
        self._ours.other, self._workers.other = self._workers, self._ours
        # the workers' side is named, not imported: it is loaded where it runs
        self._worker: Any = None

    def start(self, number: int) -> Loopback:
        return self._ours

    def wait(self, seconds: float | None) -> list[Loopback]:
        """Have the worker do, in this thread, what it has been sent."""
        while self._workers.frames:
            self._run(self._workers.frames.popleft())
        return [self._ours] if self._ours.frames else []

    def _run(self, frame: Frame) -> None:
        first = frame.messages[0]
        # what is the caller's would follow the task
        with (
            kept_random_state(),
            outside_transforms(),
            without_saved_tensor_hooks(),
            default_settings(),
        ):
            if isinstance(first, Start):
                main = importlib.import_module("mpgrad.workers.main")
                self._worker = main.begin(1, self._workers, first)
            elif type(frame.messages[-1]) is not Stop:
                self._worker.handle(frame)

    def wake(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        self._worker = None
