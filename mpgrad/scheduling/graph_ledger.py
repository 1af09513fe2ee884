"""What a worker has, as the caller knows it: graphs, parts of the sums of captures' gradients, and
what it has been lent: memory that has to live, and to be seen there, until the worker has given it
back. Caller's side.

    forward, or a differentiable backward ──► HERE ──► a backward not to keep it ──► FREED ──┐
                                               │                                             ├──► released: forgotten
                 dropped there for want of room ▼        the last backward, of which          │
                                            MISSING      nothing is left ──► SPENT ───────────┘
    the next backward of one that is MISSING, SPENT, or FREED by mistake has it made again: HERE
Assumes: called by the scheduling thread; any may ask how many graphs there are, and whether one is.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import Any

from mpgrad.autograd.remote_graph import Backward, RemoteGraph, forget_oldest
from mpgrad.memory.addresses import slab_of
from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.torch_state.private import Level
from mpgrad.wire.frames import Link

__all__ = [
    "GraphLedger",
    "GraphState",
    "Loans",
    "SumLedger",
]


class GraphState(enum.Enum):
    HERE = enum.auto()
    FREED = enum.auto()  # by a backward that was not to keep it: another one is a mistake of the caller's
    MISSING = enum.auto()  # to be made again when it is wanted
    SPENT = enum.auto()  # likewise, because nothing was left of it


HERE, FREED, MISSING, SPENT = GraphState
TO_BE_MADE = {MISSING, SPENT}


class GraphLedger:
    """The states of one worker's graphs, by call. Each state was noted when the worker was told, not when it has acted."""

    def __init__(self) -> None:
        self.states: dict[int, GraphState] = {}
        self.nbytes = 0  # that they take there, where it is measured

    def __len__(self) -> int:
        return len(self.states)

    @property
    def there(self) -> int:
        """How many take memory in the worker."""
        return sum(state not in TO_BE_MADE for state in list(self.states.values()))  # others may ask while it changes

    def needs_worker(self, is_last: bool) -> bool:
        """Whether there is a graph for whose sake the worker has to stay. `is_last`: no other could make those again."""
        done_with = {SPENT} if is_last else TO_BE_MADE
        return any(state not in done_with for state in self.states.values())

    def keep(self, call: int) -> None:
        self.states[call] = HERE

    def move_here(self, call: int, before: GraphLedger) -> None:
        """The graph of a worker that is gone, with its ledger `before`: to be made here when it is wanted."""
        self.states[call] = SPENT if before.states.get(call) is SPENT else MISSING

    def note_backward(self, backward: Backward) -> None:
        """It is on its way to the worker."""
        if backward.is_last:
            self.states[backward.call] = SPENT
        elif not backward.keep:
            self._note_freed(backward.graph)

    def note_spent(self, calls: Iterable[int]) -> None:
        """Their last backward was an eager one, and has come."""
        for call in calls:
            if call in self.states:  # others have been released meanwhile
                self.states[call] = SPENT

    def _note_freed(self, graph: RemoteGraph) -> None:
        """A graph of gradients is freed together with the one that it derives from: they share nodes."""
        if self.states.get(graph.call) is HERE:
            self.states[graph.call] = FREED
        if isinstance(graph.recipe, Backward):
            self._note_freed(graph.recipe.graph)

    def note_rest(self, backward: Backward) -> None:
        """A backward that was to leave nothing of its graph failed or was not begun: what is left is there, all the same."""
        if backward.is_last and self.states.get(backward.call) in TO_BE_MADE:
            self.states[backward.call] = FREED

    def note_no_rest(self, backward: Backward) -> None:
        """Such a backward has left nothing, though one before it may have failed."""
        if backward.is_last and self.states.get(backward.call) is FREED:
            self.states[backward.call] = SPENT

    def note_missing(self, call: int) -> None:
        if self.states.get(call) is not SPENT:
            self.states[call] = MISSING

    def note_dropped(self, calls: Iterable[int]) -> int:
        """Returns how many of these graphs a backward would have found."""
        there = 0
        for call in calls:
            if call in self.states:  # others have been released meanwhile
                there += self.states[call] is HERE
                self.note_missing(call)
        return there

    def note_unknown(self, call: int) -> None:
        """The last backward of a graph was called off, and nobody knows how far it came: another one starts anew."""
        if self.states.get(call) is SPENT:
            self.states[call] = MISSING

    def begin_again(self, call: int, again: bool) -> GraphState | None:
        """Before a backward: what was the state of a graph that has to be made before it, HERE from now on; else None.

        `again`: the backward was sent before, so that it may have freed the graph itself.
        """
        state = self.states.get(call)
        if state is HERE or (state is FREED and not again):
            return None
        self.states[call] = HERE
        return MISSING if state is None else state

    def forget(self, calls: Iterable[int]) -> None:
        for call in calls:
            self.states.pop(call, None)


class SumLedger:
    """The sums of captures' gradients that a worker holds: by function, then by backward (None: eager) and levels."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[tuple[int | None, tuple[Level, ...]], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def are_before(self, graph_task: int) -> bool:
        """All of them are of earlier backwards than this."""
        return all(each is not None and each < graph_task for sums in self._sums.values() for each, _ in sums)

    def note(self, function: int, graph_task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self._sums.setdefault(function, {})
        sums[graph_task, levels] = None
        forget_oldest(sums)  # as the worker does, which keeps that of eager backwards beside

    def forget(self, function: int, graph_task: int | None, levels: tuple[Level, ...]) -> None:
        sums = self._sums.get(function, {})
        sums.pop((graph_task, levels), None)
        if not sums:
            self._sums.pop(function, None)

    def forget_function(self, function: int) -> None:
        self._sums.pop(function, None)


# --- what the worker has been lent


class Loans:
    """Of one worker. It gives an address back as often as it was sent, so one that is on its way again stays lent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lent: dict[int, tuple[Slot | Borrowed, int]] = {}  # address -> what has to live, how often it was sent
        self._slabs: set[int] = set()  # of which the worker knows, or will with the next message
        self._new_slabs: list[Any] = []
        self.gone_slabs: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, address: int, holder: Slot | Borrowed) -> None:
        """Keep `holder` until the worker has given the address back as often as it was sent."""
        _, times = self._lent.get(address, (None, 0))
        self._lent[address] = holder, times + 1
        if not self._link.shares_memory:
            self._link.carry(holder)
        if holder.slab.number not in self._slabs:
            self._slabs.add(holder.slab.number)
            self._new_slabs.append(holder.slab)

    def take_back(self, address: int, times: int) -> None:
        holder, sent = self._lent.pop(address)
        if not self._link.shares_memory:
            self._link.drop(holder, times)
        if sent > times:  # it is on its way there once more
            self._lent[address] = holder, sent - times

    def have_any_of(self, slab: int) -> bool:
        return any(slab_of(address) == slab for address in self._lent)

    def tell_again(self, slab: int) -> None:
        """The worker does not know the slab after all: it is told of it when it is next lent something there."""
        self._slabs.discard(slab)

    def unmap(self, slab: int) -> None:
        """The slab is gone, and the worker is to be told so."""
        if slab in self._slabs:
            self._slabs.discard(slab)
            self.gone_slabs.append(slab)

    def take_new_slabs(self) -> list[Any]:
        new, self._new_slabs = self._new_slabs, []
        return new

    def end(self) -> None:
        """The worker is gone, and holds nothing of ours any more."""
        if not self._link.shares_memory:
            for holder, times in self._lent.values():
                self._link.drop(holder, times)
        self._lent.clear()
