"""The engine of workers on other machines: places them on sites, one for each node, and notices which are gone. Caller's side.

    start ──► a site with room, or a new one ──► SiteLink          carrier's threads ──► inbox ──► wait ──► links with news
Where no number of workers was asked for, there are as many as the nodes have room for, and nodes that join or leave change it.
Two threads of its own ask for the nodes, and keep the sites from taking us for dead.
Assumes: one thread uses it, but for `wake`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mpgrad.callbacks import report
from mpgrad.cluster.carrier import Carrier, Node
from mpgrad.cluster.site import Hello, hello
from mpgrad.cluster.site_handle import SiteHandle, SiteLink
from mpgrad.wire.pipe import Traffic

__all__ = ["ClusterEngine"]

log = logging.getLogger("mpgrad")

NODES_EVERY = 2.0  # seconds
IDLE = 2.0  # seconds for which a site without workers stays, where their number is given
WAITING = 10.0  # seconds for a site to come, until it is said that it does not
CLOSE_PATIENCE = 2.0  # seconds for workers to end, if they can
# for which a node is left alone after its site was lost: one that had worked, and one that never said a word
AFTER_LOSS, AFTER_FAILURE = 1.0, 10.0
SAME = ("Python", "torch", "mpgrad")  # versions that have to be: pickles and numbers of dtypes depend on them


class ClusterEngine:
    """Guarantees: a site that is silent for `patience` seconds is given up, with its workers."""

    copies_caller = False

    def __init__(self, carrier: Carrier, workers: int | None, patience: float) -> None:
        """`workers`: None for as many as there is room for.

        Raises:
            ConnectionError: the cluster cannot be reached.
            RuntimeError: it has no room for a worker.
        """
        self.traffic = Traffic()
        self.room: int | None = None
        self._carrier = carrier
        self._patience = patience
        self._inbox: queue.SimpleQueue[tuple[SiteHandle | None, Any]] = queue.SimpleQueue()
        self._sites: list[SiteHandle] = []
        self._ours = hello()
        self._avoided: dict[str, float] = {}  # nodes by id, until when on the clock of time.monotonic
        self._closing = threading.Event()
        self._ask_now = threading.Event()  # for the nodes
        try:
            self._nodes = list(carrier.nodes())
            nodes = self._free_nodes(avoiding=True)
            if not any(node.slots for node in nodes):
                nodes = self._nodes  # others hold all of it: wait for them
            slots = sum(node.slots for node in nodes)
            if not slots and workers is None:
                raise RuntimeError("no node of the cluster has room for a worker; free some CPUs, or ask for `processes`")
            if workers is None:
                self.room = slots
            for node, number in placed(nodes, slots if workers is None else workers):
                self._open_site(node, number)
            for target in (self._ask_for_nodes, self._beat):
                threading.Thread(target=target, name="mpgrad-cluster", daemon=True).start()
        except BaseException:
            self.close()
            raise

    # --- workers

    def start(self, number: int) -> SiteLink:
        """
        Raises:
            OSError: nodes are followed, and those that are there have no room; or one could start no worker a moment ago.
        """
        sites = [site for site in self._sites if site.free > 0]
        if not sites:
            sites = [self._new_site()]
        return SiteLink(number, max(sites, key=lambda site: site.free / site.slots))

    def _new_site(self) -> SiteHandle:
        """For a worker for which there is no room."""
        alive = any(not site.lost for site in self._sites)
        nodes = [node for node in self._free_nodes(avoiding=alive or self.room is None) if node.slots]
        planned = [site for site in self._sites if site.is_planned]
        node = max(nodes, key=lambda node: node.slots, default=None)
        may_have_room_soon = any(site.is_refusing and site.refusals == 1 for site in self._sites)
        if self.room is None and (node is not None or not may_have_room_soon):
            return self._enlarged(planned, node)
        if node is None:  # a site wherever there is room would take that of one which is to have the whole node
            raise OSError("no node has room for a worker now")
        return self._open_site(node, node.slots)

    def _enlarged(self, planned: Sequence[SiteHandle], node: Node | None) -> SiteHandle:
        """A site that is to be started on that node, or wherever there is room, with room for one more worker."""
        largest = max((each.slots for each in self._nodes), default=0) or 1
        for site in planned:
            if site.on(node) and (node is not None or site.slots < largest):
                site.slots += 1
                return site
        return self._new_handle(node, 1)

    def _free_nodes(self, avoiding: bool) -> list[Node]:
        """Nodes, with the room that our sites and others have left there; `avoiding` those whose sites were lost just now.

        Where it is not avoided, what others hold is not counted either: it may be our own, that was lost.
        """
        taken: Counter[str] = Counter()
        for site in self._sites:
            if site.node is not None and not site.lost:
                taken[site.node.id] += site.slots
        nodes = [node for node in self._nodes if self._may_use(node) or not avoiding]
        found = []
        for node in nodes:
            left = node.slots - taken[node.id]
            if avoiding and node.free is not None:
                left = min(left, node.free)
            found.append(node._replace(slots=max(0, left)))
        return found

    def _may_use(self, node: Node) -> bool:
        return self._avoided.get(node.id, 0.0) <= time.monotonic()

    def _open_site(self, node: Node | None, slots: int) -> SiteHandle:
        site = self._new_handle(node, slots)
        try:
            site.open()
        except BaseException:
            self._sites.remove(site)
            raise
        site.flush()
        return site

    def _new_handle(self, node: Node | None, slots: int) -> SiteHandle:
        site = SiteHandle(self._carrier, node, slots, self._patience, self.traffic, self._inbox.put, self._look)
        self._sites.append(site)
        return site

    # --- what comes

    def wait(self, seconds: float | None) -> Sequence[SiteLink]:
        for site in self._sites:
            if site.is_planned:
                try:
                    site.open()
                except OSError as error:
                    self._lose(site, str(error))
            site.flush()
        self.traffic.system_calls += 1
        patience = self._patience / 4 if seconds is None else min(seconds, self._patience / 4)
        if patience > 0 and not any(link.frames for site in self._sites for link in site.links.values()):
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=patience))
        self._look()
        for site in self._sites:
            if not site.lost and site.hello is not None and (why := site.is_silent(self._patience)):
                self._lose(site, why)
            self._look_after(site)
            site.flush()
        links = [link for site in self._sites for link in site.links.values() if link.frames or link.ended]
        self._sites = [site for site in self._sites if not site.lost or site.links]
        return links

    def _look_after(self, site: SiteHandle) -> None:
        now = time.monotonic()
        if self.room is None and now - site.idle_since > IDLE:  # others may need its room
            site.close()
        elif site.hello is None and not site.lost and not site.is_missed and now - site.opened_at > WAITING:
            site.is_missed = True
            report(
                logging.WARNING,
                "a site for %d workers (%s) has not come for %g s; other jobs may hold the CPUs that it needs, or an "
                "autoscaler has yet to add a node: end them, wait, or ask for less (processes; workers_per_node or "
                "cpus_per_worker of mpgrad.Ray)",
                site.slots,
                f"on node {site.name}" if site.name else "wherever there is room",
                WAITING,
            )

    def _look(self) -> None:
        """Take what is there."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self._inbox.get_nowait())

    def _take(self, site: SiteHandle | None, news: Any) -> None:
        if site is not None:
            was_new, was_lost = site.hello is None, site.lost
            site.take(*news)
            if was_new and site.hello is not None:
                self._check(site, site.hello)
            if site.lost and not was_lost:
                self._lose(site, site.lost)
        elif news is not None:
            self._nodes = news
            there = {node.id for node in news}
            for each in self._sites:
                if each.node is not None and each.node.id not in there and not each.lost:
                    self._lose(each, "its node has left the cluster")
            if self.room is not None and not self._closing.is_set():
                self._follow()

    def _lose(self, site: SiteHandle, why: str) -> None:
        if not site.lost:
            site.lose(why)
        first_line, _, _ = why.partition("\n")
        report(logging.WARNING, "a site is gone (%s: %s)", site.name or "on a node that was to come", first_line)
        if site.node is not None:
            self._avoided[site.node.id] = time.monotonic() + (AFTER_FAILURE if site.hello is None else AFTER_LOSS)
        self._count_room()
        self._ask_now.set()

    def _check(self, site: SiteHandle, theirs: Hello) -> None:
        """A node where something else is installed would read other things than were sent."""
        for name in SAME:
            here, there = self._ours.versions[name], theirs.versions[name]
            if here != there:
                remedy = "use one minor version of Python everywhere"
                if name != "Python":
                    remedy = f"install the same there (pip install {name}=={here}, or the runtime_env of mpgrad.Ray)"
                site.refusal = f"node {theirs.host} has {name} {there}, and the caller {here}; {remedy}"
                if any(each.hello is not None and not each.refusal and not each.lost for each in self._sites):
                    self._lose(site, site.refusal)  # the others can be used
                    if site.node is not None:
                        self._avoided[site.node.id] = math.inf
                    return
                for link in site.links.values():
                    link.refuse(site.refusal)
                return

    def _follow(self) -> None:
        """Nodes have joined or left: have a site on each, and as many workers as they have room for."""
        for node in self._free_nodes(avoiding=True):
            if node.slots:
                with contextlib.suppress(OSError):  # asked again soon
                    self._open_site(node, node.slots)
        self._count_room()

    def _count_room(self) -> None:
        if self.room is not None:  # else the number is the user's by now
            self.room = max(1, sum(site.slots for site in self._sites if not site.lost))

    def _ask_for_nodes(self) -> None:
        while not self._closing.is_set():
            self._ask_now.wait(NODES_EVERY)
            self._ask_now.clear()
            try:
                self._inbox.put((None, list(self._carrier.nodes())))
            except ConnectionError as error:  # its sites will be missed, if they are gone, too
                log.debug("the cluster does not answer (%s)", error)

    def _beat(self) -> None:
        """Sites must hear of us also while the other thread is busy."""
        while not self._closing.wait(self._patience / 4):
            for site in list(self._sites):
                site.beat()

    def wake(self) -> None:
        self._inbox.put((None, None))

    def close(self) -> None:
        self._closing.set()
        self._ask_now.set()
        for site in self._sites:
            site.ask_to_close()
        deadline = time.monotonic() + CLOSE_PATIENCE
        while (left := deadline - time.monotonic()) > 0 and any(site.is_closing and not site.lost for site in self._sites):
            for site in self._sites:
                site.flush()
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=left))
        for site in self._sites:
            site.close()
        self._carrier.close()


def placed(nodes: Sequence[Node], workers: int) -> list[tuple[Node | None, int]]:
    """So many workers, evenly over the nodes that have room; for the rest there will be room somewhere."""
    given = {node.id: 0 for node in nodes}
    left = workers
    while left and (open_nodes := [node for node in nodes if given[node.id] < node.slots]):
        share = max(1, left // len(open_nodes))
        for node in open_nodes:
            number = min(share, left, node.slots - given[node.id])
            given[node.id] += number
            left -= number
    found: list[tuple[Node | None, int]] = [(node, given[node.id]) for node in nodes if given[node.id]]
    # where no node has room, nobody says how large those will be that an autoscaler adds: any of them has room for one worker
    largest = max((node.slots for node in nodes), default=0) or 1
    while left:
        number = min(left, largest)
        found.append((None, number))
        left -= number
    return found
