"""Ledgers note what one worker has been given: graphs, and sums of captures' gradients.

The states of a graph, and the events that change them most often (`AFTER` has all but the release):

    keep ──► ALIVE ──► free: a backward that is not to keep the graph is sent ──► FREED
               │
               ├── drop: the worker has dropped it, or lacks it ──► LOST
               └── last: a backward is sent that leaves nothing of it ──► CONSUMED
                         fail: CONSUMED ──► FREED    cancel: CONSUMED ──► LOST
    rebuild: before a backward of a graph that is LOST ──► ALIVE
    move: a backward needs the graph of a worker that is gone ──► LOST at another, or CONSUMED
FREED means that another backward is the user's mistake, and the worker raises. CONSUMED means the
same for a graph of which nothing is left: before each further backward it is rebuilt, and run
through once, so that PyTorch itself decides what this backward does. If a graph is lost while it is
FREED, the mistake goes unnoticed. `free`, `last` and `rebuild` happen when the message is written,
and `move` when the backward gets another worker. The other events come with an answer.
Assumes: called by the scheduling thread. Any thread may append to `released` and `consumed`, and
    ask which graphs are there or needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Set
from typing import Any

__all__ = [
    "ALIVE",
    "CANCEL",
    "CONSUMED",
    "DROP",
    "FAIL",
    "FREE",
    "FREED",
    "KEEP",
    "LOST",
    "GraphLedger",
    "SumLedger",
]

# the most sums of one function in a worker; backwards that fail leave some
MOST_SUMS = 256

ALIVE = "alive"
# A backward that was not to keep the graph has freed a part of it.
FREED = "freed"
# The graph is rebuilt when it is needed.
LOST = "lost"
# The last backward left nothing of the graph. It is rebuilt when it is needed.
CONSUMED = "consumed"
TO_BE_MADE = {LOST, CONSUMED}

# The worker has made the graph.
KEEP = "keep"
# A backward is sent that does not keep the graph.
FREE = "free"
# A backward is sent that leaves nothing of the graph, or the gradients of an eager one were taken.
LAST = "last"
# The last backward has failed or did not begin, so the rest of the graph still exists.
FAIL = "fail"
# The last backward was cancelled. It is unknown how far it came, so another one starts anew.
CANCEL = "cancel"
# The worker has dropped the graph, or lacks the graph that a backward needs. The caller may have
# released it since.
DROP = "drop"
# A backward needs the graph.
REBUILD = "rebuild"
# The same backward needs it again. It may have freed the graph itself, in a worker that died.
REBUILD_AGAIN = "rebuild again"
# The graph's worker is gone. The state in its ledger gives the state in its successor's.
MOVE = "move"

# by event, then by state; None if the ledger does not know the graph. Other states stay.
AFTER: dict[str, dict[str | None, str]] = {
    KEEP: dict.fromkeys((None, ALIVE, FREED, LOST, CONSUMED), ALIVE),
    FREE: {ALIVE: FREED},
    LAST: dict.fromkeys((None, ALIVE, FREED, LOST, CONSUMED), CONSUMED),
    FAIL: {LOST: FREED, CONSUMED: FREED},
    CANCEL: {CONSUMED: LOST},
    DROP: dict.fromkeys((ALIVE, FREED, LOST), LOST),
    REBUILD: dict.fromkeys((None, LOST), ALIVE),
    REBUILD_AGAIN: dict.fromkeys((None, FREED, LOST, CONSUMED), ALIVE),
    MOVE: {**dict.fromkeys((None, ALIVE, FREED, LOST), LOST), CONSUMED: CONSUMED},
}


class GraphLedger:
    """Holds the states of one worker's graphs, by call."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        # by call, the backwards that leave nothing of the graph, in the order in which they were
        # sent; None for an eager one
        self._used_up_by: dict[int, tuple[int | None, ...]] = {}
        # bytes that the graphs take in the worker, if this is measured
        self.nbytes = 0
        # calls whose graphs can get no further backward
        self.released: deque[int] = deque()
        # calls whose last backward was an eager one, and has arrived
        self.consumed: deque[int] = deque()
        # calls of `consumed` that were noted, and whose graphs the worker still has
        self._to_drop: list[int] = []

    def __len__(self) -> int:
        return len(self.states)

    def handle(self, call: int, event: str) -> None:
        state = AFTER[event].get(self.states.get(call))
        if state is not None:
            self.states[call] = state

    def use_up(self, call: int, graph_task: int | None) -> None:
        """Note that a backward is sent that leaves nothing of the graph.

        None stands for an eager one, whose gradients were taken.
        """
        users = self._used_up_by.get(call, ())
        if graph_task not in users:
            self._used_up_by[call] = (*users, graph_task)
        self.handle(call, LAST)

    def note_unfinished(self, call: int, graph_task: int, event: str) -> None:
        """Note that such a backward has failed, was cancelled or did not begin.

        If there are others, these use up the graph.
        """
        users = self._used_up_by.pop(call, ())
        if others := tuple(each for each in users if each != graph_task):
            self._used_up_by[call] = others
        else:
            self.handle(call, event)

    def is_used_up_for(self, call: int, graph_task: int) -> bool:
        """Whether this backward is a mistake, because one before it uses up the graph."""
        first = self._used_up_by.get(call, ())[:1]
        return self.states.get(call) == CONSUMED and first != (graph_task,)

    @property
    def there(self) -> int:
        """The number of graphs that take memory in the worker."""
        # Another thread may ask while the states change.
        return sum(state not in TO_BE_MADE for state in list(self.states.values()))

    @property
    def needed(self) -> Set[int]:
        """The calls whose graphs are not released."""
        return self.states.keys() - set(self.released)

    def needs_worker(self, is_last: bool) -> bool:
        """Whether the worker has to stay for the sake of a graph.

        `is_last` means that no other worker could rebuild a lost graph.
        """
        done_with = {CONSUMED} if is_last else TO_BE_MADE
        return any(state not in done_with for state in self.states.values())

    def move_here(self, call: int, before: GraphLedger) -> None:
        """Take over the graph of a worker that is gone, whose ledger is `before`.

        This worker rebuilds the graph when it is needed.
        """
        before.note_consumed()
        self.states[call] = AFTER[MOVE][before.states.get(call)]
        self._used_up_by[call] = before._used_up_by.get(call, ())

    def rebuild(self, call: int, again: bool) -> str | None:
        """Return the state of a graph that must be rebuilt before a backward, or None.

        A LOST graph counts as ALIVE from now on, and a CONSUMED one stays so. `again` means that
        the backward was sent before, and may have freed or used up the graph itself. Then any graph
        is rebuilt, and counts as ALIVE.
        """
        before = self.states.get(call)
        self.handle(call, REBUILD_AGAIN if again else REBUILD)
        return None if self.states[call] == before != CONSUMED else before or LOST

    # --- graphs that the worker is to drop

    @property
    def has_dropped(self) -> bool:
        return bool(self.released or self.consumed or self._to_drop)

    def note_consumed(self) -> None:
        """Note the graphs of eager backwards that other threads have reported."""
        while self.consumed:
            call = self.consumed.popleft()
            if call in self.states:
                self.use_up(call, None)
            self._to_drop.append(call)

    def take_dropped(self) -> list[int]:
        """Return the calls whose graphs the next message has the worker drop."""
        self.note_consumed()
        dropped, self._to_drop = self._to_drop, []
        while self.released:
            call = self.released.popleft()
            self.states.pop(call, None)
            self._used_up_by.pop(call, None)
            dropped.append(call)
        return dropped


class SumLedger:
    """Notes the sums of captures' gradients that a worker holds.

    The keys are functions, then backwards and levels. For eager backwards, the backward is None. A
    worker holds a sum until it is collected, or until the caller has the worker forget the sum or
    its function.
    """

    def __init__(self) -> None:
        self._sums: dict[int, dict[tuple[int | None, Hashable], None]] = {}
        # sums that the next message has the worker forget
        self.forgotten: list[Any] = []

    def __len__(self) -> int:
        return len(self._sums)

    def are_before(self, graph_task: int) -> bool:
        """Whether all sums come from backwards before this one."""
        return all(
            each is not None and each < graph_task
            for sums in self._sums.values()
            for each, _ in sums
        )

    def note(self, function: int, graph_task: int | None, levels: Hashable) -> None:
        """Note that the worker adds gradients to a sum."""
        self._sums.setdefault(function, {})[graph_task, levels] = None

    def trim(self) -> None:
        """If there are too many sums, forget the oldest. Their backwards seem to have failed.

        The worker forgets them before it runs what is written after this.
        """
        for function, sums in self._sums.items():
            while len(sums) > MOST_SUMS:
                oldest = next(each for each in sums if each[0] is not None)
                del sums[oldest]
                self.forgotten.append((function, *oldest))

    def forget(self, function: int, graph_task: int | None, levels: Hashable) -> None:
        sums = self._sums.get(function, {})
        sums.pop((graph_task, levels), None)
        if not sums:
            self._sums.pop(function, None)

    def forget_function(self, function: int) -> None:
        self._sums.pop(function, None)
