"""A carrier without a cluster: nodes are names, and sites programs on this machine, over a pipe each. Both sides of that.

For tests of everything that is not the cluster's, and as the smallest example of a carrier.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpgrad.cluster.carrier import Node, Reply, SiteOptions
from mpgrad.engines.programs import program
from mpgrad.system import NO_SIGNAL

__all__ = ["LocalCarrier", "serve"]

LENGTHS = struct.Struct("<QQ")  # number of the exchange, bytes


class LocalSite:
    """The caller's end of one: a thread writes, and another one reads."""

    def __init__(self, options: SiteOptions) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = program("mpgrad.cluster.local", "serve", theirs, round(1000 * options.patience))
        self.socket = ours
        self.to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.replies: dict[int, Reply] = {}  # of exchanges under way
        self.ended: ConnectionError | None = None
        self.threads = [threading.Thread(target=each, name="mpgrad-site", daemon=True) for each in (self.write, self.read)]
        for thread in self.threads:
            thread.start()

    def exchange(self, number: int, content: bytes, reply: Reply) -> None:
        with self.lock:
            if self.ended is None:
                self.replies[number] = reply
                self.to_send.put(LENGTHS.pack(number, len(content)) + content)
                return
        reply(self.ended)

    def write(self) -> None:
        with contextlib.suppress(OSError):  # the reader sees it, too
            while (content := self.to_send.get()) is not None:
                self.socket.sendall(content, NO_SIGNAL)

    def read(self) -> None:
        try:
            with self.socket.makefile("rb") as file:
                while head := file.read(2 * LENGTHS.size):
                    (exchange, nbytes), (number, _) = LENGTHS.unpack(head[: LENGTHS.size]), LENGTHS.unpack(head[LENGTHS.size :])
                    content = file.read(nbytes)
                    if len(content) < nbytes:
                        break
                    self.replies.pop(exchange)((number, content))
        except (OSError, struct.error):  # in the middle of one
            pass
        with self.lock:
            self.ended = ConnectionError("its process has ended")
        for reply in self.replies.values():
            reply(self.ended)
        self.to_send.put(None)

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.process.wait()
        for thread in self.threads:
            thread.join()
        self.socket.close()


class LocalCarrier:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self.sites: list[LocalSite] = []

    def nodes(self) -> Sequence[Node]:
        return list(self._nodes)

    def join(self, node: Node) -> None:
        self._nodes.append(node)

    def part(self, node: str) -> None:
        self._nodes = [each for each in self._nodes if each.id != node]

    def start_site(self, options: SiteOptions) -> LocalSite:
        site = LocalSite(options)
        self.sites.append(site)
        return site

    def exchange(self, site: Any, number: int, content: bytes, reply: Reply) -> None:
        site.exchange(number, content, reply)

    def kill_site(self, site: Any) -> None:
        site.kill()
        self.sites.remove(site)

    def close(self) -> None:
        for site in list(self.sites):
            self.kill_site(site)


# --- in the site's process


class Arrived(NamedTuple):
    number: int
    content: bytes


def serve(descriptor: int, milliseconds: int) -> None:
    asyncio.run(serve_site(socket.socket(fileno=descriptor), milliseconds / 1000))


async def serve_site(end: socket.socket, patience: float) -> None:
    """Until the caller's end is closed."""
    from mpgrad.cluster.site import Site

    reader, writer = await asyncio.open_connection(sock=end)
    site = Site(patience)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(arrived: Arrived) -> None:
        number, content = await site.exchange(arrived.number, arrived.content)
        writer.write(LENGTHS.pack(arrived.number, len(content)) + LENGTHS.pack(number, 0) + content)

    def finished(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        task.result()  # an error is the loop's, which ends the site

    try:
        while True:
            number, nbytes = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
            task = asyncio.create_task(answer(Arrived(number, await reader.readexactly(nbytes))))
            tasks.add(task)
            task.add_done_callback(finished)
    except (asyncio.IncompleteReadError, ConnectionError):  # the caller is gone
        site.close()
