"""Frames of messages: a list of them, the bytes of small tensors, and file descriptors. Both sides."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.wire.messages import Message, NewSlab
from mpgrad.wire.mirror import Mirror
from mpgrad.wire.pipe import MAX_DESCRIPTORS, Pipe, Traffic, UnreadableFrame, framed

__all__ = ["Channel", "Frame", "drained", "in_frames", "unframed"]


class Frame(NamedTuple):
    """What is sent, or received, at once."""

    messages: list[Message]
    payload: memoryview


class Channel(Pipe):
    """One end of a socket pair, a `wire.link.Link`."""

    def __init__(self, end: socket.socket, blocking: bool, traffic: Traffic | None = None) -> None:
        super().__init__(end, blocking, traffic)
        self._mirror: Mirror | None = None  # that the other end has of what is lent to it
        self.shares_memory = True

    def send(self, messages: list[Message], payload: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one frame, or queue what the pipe does not take now (`has_outgoing`).

        Raises:
            ConnectionError: the other end is gone.
            OSError: what has to wait needs descriptors of its own, and there are none.
        """
        if self._mirror is not None:
            messages, payload = self._mirror.enclose(messages, payload)
        self.send_raw(framed(messages, payload, len(descriptors)), descriptors)

    def lend_by_bytes(self) -> None:
        """From now on: the other end is a site's, which passes frames on to another machine, and cannot look into them."""
        self._mirror = Mirror()
        self.shares_memory = False

    def introduce(self, slabs: Sequence[Any]) -> None:
        for messages, descriptors in in_frames(slabs):
            self.send(messages, (), descriptors if self.shares_memory else ())

    def carry(self, holder: Slot | Borrowed) -> None:
        if self._mirror is not None:
            self._mirror.carry(holder)

    def drop(self, holder: Slot | Borrowed, times: int) -> None:
        if self._mirror is not None:
            self._mirror.drop(holder, times)

    def receive(self) -> Frame | None:
        """The next frame; None where the parent's end has no whole frame yet, and should wait until there is more to read.

        Raises:
            EOFError: the other end is gone.
        """
        raw = self.receive_raw()
        if raw is None:
            return None
        return Frame(*unframed(*raw))


def unframed(header: tuple[int, int, int], body: memoryview) -> tuple[list[Message], memoryview]:
    """Messages and payload again; the payload stays a part of the body.

    Raises:
        UnreadableFrame: it is none of ours.
    """
    try:
        messages = pickle.loads(body[: header[0]])
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise  # of a signal's handler; in other threads it is the pickle's
        raise UnreadableFrame(repr(error)) from error
    if type(messages) is not list:
        raise UnreadableFrame(f"it held no messages, but {type(messages).__name__}")
    return messages, body[header[0] :]


def in_frames(slabs: Sequence[Any]) -> Iterator[tuple[list[Message], list[int]]]:
    """The messages that say of slabs, in frames of as many descriptors as one may carry."""
    elsewhere = [each for each in slabs if each.elsewhere]
    if elsewhere:
        yield [NewSlab(each.number, each.nbytes, each.handle, each.lane.index + 1) for each in elsewhere], []
        slabs = [each for each in slabs if not each.elsewhere]
    for start in range(0, len(slabs), MAX_DESCRIPTORS):
        some = slabs[start : start + MAX_DESCRIPTORS]
        yield [NewSlab(slab.number, slab.nbytes) for slab in some], [slab.descriptor for slab in some]


def drained(queue: deque[Any]) -> list[Any]:
    """All that is in the queue now; other threads may go on appending, and taking."""
    found = []
    with contextlib.suppress(IndexError):
        for _ in range(len(queue)):
            found.append(queue.popleft())
    return found
