"""The graph table: the autograd graph of every call that ran here and whose backward may come.

The outputs of a graph have gone to the caller as bytes, so the table holds its edges. Everything between is PyTorch's own, with
its own rules: `retain_graph`, and the RuntimeError of a second backward, are not imitated, they happen.

The life of a graph, by call. Each arrow is a method of `GraphTable`:

    (none) ── keep ──► KEPT ── spend ──► SPENT
                        │                  │             KEPT      here, and whole
                       trim               trim           SPENT     here, but emptied, which PyTorch tells a second backward
                        ▼                  │             DROPPED   not here, and the caller does not know it
    (none) ── find ──► DROPPED ◄───────────╯             (none)    never here, or the caller knows that it is not
              miss      │
                  take_dropped                           any ── release ──► (none)
                        ▼
                     (none)
keep: a call has run, for the first time or again; or a backward whose gradients are to be differentiated. spend: a backward
ran through it that was not to keep it. release: the caller's node has died, or the backward was the last one. trim: graphs
take too much memory. find: a backward wants it. miss: an eager backward ran through a part of it. Of a dropped graph the caller
sends the call once more with the next backward that needs it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpgrad.torch_state.private import Level
from mpgrad.wire.messages import Release
from mpgrad.workers.functions import Function
from mpgrad.workers.graph_edges import Edge, gradients_at, still_there
from mpgrad.workers.memory_watch import MemoryWatch, give_back, memory_in_use
from mpgrad.workers.station import NO_DEVICES, DeviceMap

__all__ = ["GraphEdges", "GraphTable"]

MOST_STALE = 1000  # entries of the heap for graphs that are gone


class GraphEdges(NamedTuple):
    """A graph by its edges; those of the captures are the function's."""

    function: Function
    outputs: list[Edge]  # of the outputs that need gradients, in order
    inputs: Sequence[Edge | None]  # of the inputs that need gradients, in order; None: the outputs do not depend on it
    reentrant: bool = False  # can only be run as a whole, by `backward()`: it holds a reentrant checkpoint
    devices: DeviceMap = NO_DEVICES

    def run_backward(
        self,
        grads: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
        captures: bool,
        keep: bool,
        create: bool,
        levels: tuple[Level, ...],
    ) -> list[torch.Tensor | None]:
        """Gradients of the `wanted` inputs, then of all captures where asked for; None for what was not used."""
        edges = [still_there(self.inputs[k]) for k in wanted]
        if captures:
            edges += map(still_there, self.function.edges)
        given = [(edge, grad) for edge, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        if not given:
            return [None] * len(edges)
        outputs, incoming = zip(*given, strict=True)
        return gradients_at(edges, outputs, incoming, self.reentrant, keep, create, levels)


class GraphTable:
    """The graphs that are here, by call. `trim` drops the largest beyond `limit` bytes, to be made again when they are wanted;
    and, while the `watch` finds memory short, the older half.

    A call is in one of `_kept`, `_spent` and `_dropped`, or in none. With a limit of 0 none is kept, and nothing is measured.
    """

    def __init__(self, limit: int | None, watch: MemoryWatch | None = None) -> None:
        self.nbytes = 0  # of those kept, where there is a limit
        self._limit = limit
        self._watch = watch
        self._kept: dict[int, GraphEdges] = {}
        self._spent: dict[int, GraphEdges] = {}
        self._dropped: set[int] = set()  # the caller believes that they are here
        self._sizes: dict[int, int] = {}  # of those kept
        self._largest: list[tuple[int, int]] = []  # a heap of (-bytes, call); may name some that are gone

    def __contains__(self, call: int) -> bool:
        return call in self._kept or call in self._spent

    def memory_in_use(self) -> int:
        """Bytes, where they matter: the rise over a call is what its graph takes."""
        return memory_in_use() if self._limit else 0

    def keep(self, call: int, graph: GraphEdges, nbytes: int) -> None:
        """`nbytes` is what the graph takes, 0 where nothing is measured."""
        self.release(call)
        self._kept[call] = graph
        if self._limit and nbytes > 0:
            self.nbytes += nbytes
            self._sizes[call] = nbytes
            heapq.heappush(self._largest, (-nbytes, call))
            if len(self._largest) > 2 * len(self._sizes) + MOST_STALE:
                self._largest = [(-size, call) for call, size in self._sizes.items()]
                heapq.heapify(self._largest)

    def find(self, call: int) -> GraphEdges | None:
        """For a backward. One that is not here counts as dropped from now on."""
        graph = self._kept.get(call) or self._spent.get(call)
        if graph is None:
            self._dropped.add(call)
        return graph

    def spend(self, call: int) -> None:
        if (graph := self._kept.get(call)) is not None:
            self.release(call)
            self._spent[call] = graph

    def trim(self) -> None:
        if self._limit == 0:
            self._dropped.update(self._kept, self._spent)
            self._kept.clear()
            self._spent.clear()
        while self._limit and self.nbytes > self._limit:
            size, call = heapq.heappop(self._largest)
            if self._sizes.get(call) == -size:
                self._drop(call)
        if self._watch is not None and self._kept and self._watch.is_short():
            for call in list(self._kept)[: (len(self._kept) + 1) // 2]:
                self._drop(call)
            give_back()

    def _drop(self, call: int) -> None:
        self.release(call)
        self._dropped.add(call)

    def miss(self, call: int) -> None:
        """It was never kept, and the caller believes that it was."""
        self._dropped.add(call)

    def forget(self, message: Release) -> None:
        for call in message.calls:
            self.release(call)

    def release(self, call: int) -> None:
        """Forget all about it."""
        self._kept.pop(call, None)
        self._spent.pop(call, None)
        self._dropped.discard(call)
        if self._sizes:
            self.nbytes -= self._sizes.pop(call, 0)

    def take_dropped(self) -> list[int]:
        """Those since the last time, for the caller."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped
