"""What carries bytes between the caller and the sites of a cluster, starts sites, and says which nodes there are.

                       ClusterEngine ── nodes, start_site, exchange, kill_site ──► Carrier ═══ Site, on a node
A carrier knows neither frames nor workers. Replies and errors may come in any order, in any thread, late, or twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Carrier", "Node", "Reply", "SiteOptions"]

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
