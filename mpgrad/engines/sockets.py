"""The engines of one machine. They run in the caller.

The engine for processes and threads has a socket pair to each worker, and one selector for all of
them. The inline engine is one worker in the caller's own thread, for debugging. It uses the same
messages, without a process, thread or pipe.

Guarantees: the inline engine treats a call as the process engine does (private copies, seeds,
    pickled functions, capture sums). So a breakpoint in the function sees what a worker would see.
    It restores the caller's random generators.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from mpgrad.engines.launch import Exit, Launcher, exit_gap, launched
from mpgrad.memory.arena import BorrowedMemory, Slot
from mpgrad.system import OwnedDescriptor, resident_bytes
from mpgrad.torch_state.modes import default_settings, kept_random_state
from mpgrad.torch_state.private import outside_transforms, without_saved_tensor_hooks
from mpgrad.wire.frames import Channel, Frame, in_frames
from mpgrad.wire.messages import Message, Start, Stop
from mpgrad.wire.pipe import Traffic

__all__ = ["InlineEngine", "LocalLink", "SocketEngine"]


class LocalLink:
    """The parts that links to workers on this machine share. Such workers have the caller's memory
    and clock."""

    node = ""
    lost = ""
    crash_traceback = ""
    has_place = True
    could_start = keeps_time = is_leaving = False
    exit: Exit | None = None
    overrun: tuple[int, int] | None = None
    progress_record = None

    def resident_bytes(self, pid: int) -> int:
        return resident_bytes(pid)

    def skip(self, place: int, chunk: int) -> None:
        """Do nothing: both ends share the progress record."""

    def follow(self, seconds: float) -> None:
        """Do nothing: both ends share the progress record."""

    def limit(self, chunk: int, seconds: float | None) -> None:
        """Do nothing: the caller reads the worker's clock itself."""


class SocketLink(LocalLink, Channel):
    """The caller's end of a socket pair."""

    def __init__(self, number: int, end: socket.socket, engine: SocketEngine) -> None:
        super().__init__(end, blocking=False, traffic=engine.traffic)
        self.number = number
        self.skipped: dict[int, int] = {}
        self._engine = engine

    def send(
        self,
        messages: list[Message],
        payload: Sequence[bytes] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        try:
            super().send(messages, payload, descriptors)
        finally:
            self._engine.watch(self)

    def has_more(self) -> bool:
        return self._engine.has_more(self)

    def kill(self, by: int = signal.SIGKILL) -> None:
        if self._engine.launcher.can_kill:
            self._engine.launcher.kill(self.number, by)
        else:
            self.hang_up()

    def end(self) -> None:
        self._engine.unwatch(self)
        self.close()
        self._engine.await_exit(self)


class SocketEngine:
    """The engine for processes and threads.

    Guarantees: `wait` sleeps in `select`. It notices a worker's death at once, as the end of its
    pipe, and its exit soon after.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.copies_caller = launcher.copies_caller
        self.traffic = Traffic()
        self.room: int | None = None
        self._watched: dict[int, int] = {}  # by worker: the watched events of its pipe
        self._ending: dict[SocketLink, float] = {}  # since when, on the clock of time.monotonic
        # closes what was opened, if no descriptor is left for the rest
        with contextlib.ExitStack() as undo:
            undo.callback(launcher.close)
            read, write = os.pipe()
            # These are objects because an object knows that it is closed. At a late `wake` the bare
            # numbers may belong to other files.
            self._wake_read = undo.enter_context(io.FileIO(read))
            self._wake_write = undo.enter_context(io.FileIO(write, "w"))
            self._kept = OwnedDescriptor(write)
            os.set_blocking(read, False)
            os.set_blocking(write, False)
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._selector.register(self._wake_read, selectors.EVENT_READ)
            if launcher.tracker is not None:
                self._selector.register(launcher.tracker, selectors.EVENT_READ)
            undo.pop_all()

    def start(self, number: int) -> SocketLink:
        link = SocketLink(number, launched(self.launcher, number), self)
        self.watch(link)
        return link

    def wait(self, seconds: float | None) -> list[SocketLink]:
        self.traffic.system_calls += 1
        found = []
        if self._ending:
            gap = exit_gap(max(self._ending.values()))
            seconds = gap if seconds is None else min(seconds, gap)
        for key, mask in self._selector.select(seconds):
            link: SocketLink | None = key.data
            if key.fileobj is self.launcher.tracker:
                self.launcher.tracker.answer()
                continue
            if link is None:
                self.traffic.system_calls += 2  # this read, and the write of `wake`
                self._wake_read.read(4096)
                continue
            if mask & selectors.EVENT_WRITE:
                try:
                    link.flush()
                except ConnectionError:
                    pass  # the worker has died; what it had sent is read first
                except OSError:  # the worker got only a part of a frame
                    link.kill()
                self.watch(link)
            if mask & selectors.EVENT_READ:
                found.append(link)
        if self._ending:
            found += [link for link in list(self._ending) if self._has_exited(link)]
        return found

    def wake(self) -> None:
        # a closed pipe means that the engine has ended; a full one wakes `wait` anyway
        with contextlib.suppress(ValueError, OSError):
            # in a fork of this process that has closed all descriptors, the number may be another
            # file's
            if self._kept.is_ours:
                self._wake_write.write(b"!")

    def close(self) -> None:
        self.launcher.close()
        self._selector.close()
        self._wake_write.close()
        self._wake_read.close()

    # --- for its links

    def watch(self, link: SocketLink) -> None:
        """Watch the worker's pipe for answers, and for room if frames are still queued."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_outgoing else 0)
        watched, self._watched[link.number] = self._watched.get(link.number), events
        if watched is None:
            self._selector.register(link, events, link)
        elif watched != events:
            self._selector.modify(link, events, link)

    def await_exit(self, link: SocketLink) -> None:
        self._ending[link] = time.monotonic()
        self._has_exited(link)

    def _has_exited(self, link: SocketLink) -> bool:
        link.exit = self.launcher.exited(link.number)
        if link.exit is None:
            return False
        del self._ending[link]
        return True

    def unwatch(self, link: SocketLink) -> None:
        self._selector.unregister(link)
        del self._watched[link.number]

    def has_more(self, link: SocketLink) -> bool:
        return any(
            key.data is link and mask & selectors.EVENT_READ
            for key, mask in self._selector.select(0)
        )


# --- the caller's own thread


class Loopback(LocalLink):
    """One end of a link within a thread. Each end keeps the frames for it until they are taken."""

    shares_memory = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.skipped: dict[int, int] = {}
        self.other: Loopback = self
        self.frames: deque[Frame] = deque()  # received frames
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

    def carry(self, holder: Slot | BorrowedMemory) -> None:
        """Do nothing: both ends share memory."""

    def drop(self, holder: Slot | BorrowedMemory, times: int) -> None:
        """Do nothing: both ends share memory."""

    def receive(self) -> Frame | None:
        return self.frames.popleft() if self.frames else None

    def take_descriptor(self) -> int:
        return self._descriptors.popleft()

    def has_more(self) -> bool:
        return bool(self.frames)

    def kill(self, by: int = signal.SIGKILL) -> None:
        """Do nothing: there is no process to kill, and no call runs when the scheduler calls
        this."""

    def close(self) -> None:
        self.frames.clear()

    def end(self) -> None:
        self.close()
        self.other.close()
        self.exit = Exit()


class InlineEngine:
    """One worker, which works while the caller waits for it (`wait`)."""

    copies_caller = False

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.room: int | None = None
        self._ours = Loopback(1)
        self._workers = Loopback(1)
        self._ours.other, self._workers.other = self._workers, self._ours
        # imported by name when it runs, because the caller's side does not import the workers' side
        self._worker: Any = None

    def start(self, number: int) -> Loopback:
        return self._ours

    def wait(self, seconds: float | None) -> list[Loopback]:
        """Have the worker handle the frames that it was sent, in this thread."""
        while self._workers.frames:
            self._run(self._workers.frames.popleft())
        return [self._ours] if self._ours.frames else []

    def _run(self, frame: Frame) -> None:
        first = frame.messages[0]
        # the task must not see the caller's modes and settings
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
        """Do nothing: no thread sleeps."""

    def close(self) -> None:
        self._worker = None
