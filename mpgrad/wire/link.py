"""The way between the caller and one worker: what both ends of it can do, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.wire.frames import Frame
from mpgrad.wire.messages import Message

__all__ = ["Link"]


class Link(Protocol):
    """One end. Frames arrive whole, once, and in the order in which they were sent; or the other end is gone.

    Where `shares_memory`, both sides look at the same bytes: a slab is handed over once, with its descriptor. Elsewhere each
    has a mirror of the other's slabs, with the same numbers and offsets, and what is lent is carried: its bytes travel with
    a frame.
    """

    shares_memory: bool

    def send(self, messages: list[Message], payload: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """The caller's end never waits. Descriptors pass where memory is shared.

        Raises:
            ConnectionError: the other end is gone.
        """
        ...

    def introduce(self, slabs: Sequence[Any]) -> None:
        """Slabs that messages are going to name."""
        ...

    def carry(self, holder: Slot | Borrowed) -> None:
        """The next frame names this memory, which is not shared."""
        ...

    def drop(self, holder: Slot | Borrowed, times: int) -> None:
        """It has been given back so many times."""
        ...

    def receive(self) -> Frame | None:
        """The next frame; None where the caller's end has no whole one yet.

        Raises:
            EOFError: the other end is gone.
        """
        ...

    def close(self) -> None: ...

    def take_descriptor(self) -> int | None:
        """What came with the message just read: for a `NewSlab`, of the slab, or its mirror; None where none could be had."""
        ...
