"""What carries bytes between the caller and the sites of a cluster, starts sites, and says which
nodes there are. Both sides; needs no torch.

                       ClusterEngine ── nodes, start_site, exchange, kill_site ──► Carrier ═══ Site, on a node
A carrier knows neither frames nor workers. Replies and errors may come in any order, in any thread,
late, or twice. So both ends number what they send, and `Arriving` puts the pieces into their order,
each once.

What is sent is records, as bytes. Memory stands behind the pickle, as it is: it is copied once when
it is packed, from where it lies, and not when it is unpacked.

    number of buffers | size of each, and of the pickle | pickle | buffers
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "Arriving",
    "Carrier",
    "Node",
    "Record",
    "Reply",
    "SiteOptions",
    "packed",
    "unpacked",
]

# the content is None where it is on its way and takes some time; it comes with a second reply
Reply = Callable[["tuple[int, bytes | None] | BaseException"], None]


class Node(NamedTuple):
    """A machine that is alive."""

    id: str
    name: str  # for people: of the host, or its address
    slots: int  # for how many workers it has room, those of this pool included
    free: int | None = None  # for how many it has room now, as far as is known: others may hold a part of it


class SiteOptions(NamedTuple):
    """What a site is started with."""

    node: Node | None  # None: wherever there is room, as soon as there is
    slots: int  # for so many workers
    patience: float  # seconds: after such a silence each side takes the other for dead


class Carrier(Protocol):
    """One thread uses it, but for `nodes` and `exchange`, which others call at the same time."""

    def nodes(self) -> Sequence[Node]:
        """Those that are alive. May take a while.

        Raises:
            ConnectionError: the cluster cannot be reached.
        """
        ...

    def start_site(self, options: SiteOptions) -> Any:
        """What the other two know the site by; returns at once. What is sent before it has started waits for it.

        Raises:
            OSError: it cannot be started now.
        """
        ...

    def exchange(self, site: Any, number: int, content: bytes, reply: Reply) -> None:
        """Have `Site.exchange(number, content)` run there; `reply` gets what it returns, or why there will be nothing."""
        ...

    def kill_site(self, site: Any) -> None:
        """End it and its workers, whatever they do; it may have ended already. Its replies are errors."""
        ...

    def close(self) -> None:
        """End what the carrier itself has started."""
        ...


# --- records as bytes


Record = tuple[Any, ...]
COUNT = struct.Struct("<Q")


def packed(records: Sequence[Record]) -> bytes:
    """What is a `PickleBuffer` in them is a memoryview at the other end."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(records, protocol=5, buffer_callback=buffers.append)
    pieces: list[bytes | memoryview] = [pickled, *(buffer.raw() for buffer in buffers)]
    head = struct.pack(f"<{1 + len(pieces)}Q", len(pieces), *map(len, pieces))
    return b"".join((head, *pieces))


def unpacked(content: bytes) -> Sequence[Record]:
    view = memoryview(content)
    (count,) = COUNT.unpack_from(view)
    start = COUNT.size * (1 + count)
    pieces: list[memoryview] = []
    for size in struct.unpack_from(f"<{count}Q", view, COUNT.size):
        pieces.append(view[start : start + size])
        start += size
    records: Sequence[Record] = pickle.loads(pieces[0], buffers=pieces[1:])
    return records


# --- numbered pieces in their order


class Arriving:
    """What is missing is waited for; `missing_for` says how long already, for who gives up some time."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._coming: set[int] = set()
        self._since = 0.0  # on the clock of time.monotonic: when the next became the next, or the first came early

    def expect(self, number: int) -> None:
        """That piece is on its way, and may take long."""
        self._coming.add(number)

    def arrange(self, number: int, piece: bytes) -> Iterator[bytes]:
        """The piece comes: those that are now in turn. A number that has come before says nothing new."""
        if number > self._next and not self._early:
            self._since = time.monotonic()
        if number >= self._next:
            self._early.setdefault(number, piece)
        while self._next in self._early:
            self._coming.discard(self._next)
            self._next += 1
            if len(self._early) > 1:
                self._since = time.monotonic()
            yield self._early.pop(self._next - 1)

    @property
    def missing_for(self) -> float:
        """Seconds for which others have been there before the next, of which nobody knows."""
        return time.monotonic() - self._since if self._early and self._next not in self._coming else 0.0
