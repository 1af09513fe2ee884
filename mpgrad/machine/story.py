"""The story of an operation: what happened to each of its calls, and when.

A *transition* is a tuple of the moment, the words for what happened, and the worker's number. All
calls of a chunk share it. It is formatted only when the story is read. A call is known by the
number of its first item.
Assumes: called by the scheduling thread; any thread may call `in_words`.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ANSWERED",
    "BACKWARD_ANSWERED",
    "BACKWARD_MOVED",
    "BACKWARD_SENT",
    "DIED_AT",
    "DIED_BEFORE",
    "GIVEN_BACK",
    "GRAPH_MISSING",
    "LOST_WITH",
    "MOST_TOLD",
    "OVERDUE",
    "SENT",
    "WAITS",
    "Story",
    "Transition",
]

Transition = tuple[float, str, int]

WAITS = "waits for the result of another call"
SENT = "sent to worker {}"
ANSWERED = "worker {} has answered"
GIVEN_BACK = "waits again, because it had not begun"
DIED_AT = "worker {} died while it ran the call"
DIED_BEFORE = "worker {} died when the call was next"
OVERDUE = "worker {} was ended, because the call took longer than its timeout"
LOST_WITH = "waits again, because it was lost with worker {}"
BACKWARD_SENT = "its backward is sent to worker {}"
BACKWARD_ANSWERED = "worker {} has answered its backward"
BACKWARD_MOVED = "its backward goes to worker {}, because the worker of its graph is gone"
GRAPH_MISSING = "worker {} has no graph for its backward; it waits until the graph is rebuilt"

# If an operation has more calls, only those that were sent last are kept.
MOST_TOLD = 10_000
# the latest ones of one call, which may be given back again and again
MOST_TRANSITIONS = 100


class Story:
    """The transitions of an operation's calls, by the number of each call's first item."""

    __slots__ = ("bundles", "calls")

    def __init__(self) -> None:
        # The scheduler's hottest loops add to this directly.
        self.calls: dict[int, tuple[Transition, ...]] = {}
        # how many items each bundle has, by the number of its first item
        self.bundles: dict[int, int] = {}

    def note(self, item: int, transition: Transition) -> None:
        known = self.calls.get(item, ())
        self.calls[item] = (*known[1 - MOST_TRANSITIONS :], transition)

    def shorten(self) -> None:
        """Forget the calls that were sent first, if there are too many."""
        # Another thread may be reading the old dictionary, so this makes a new one.
        if len(self.calls) > 2 * MOST_TOLD:
            self.calls = dict(list(self.calls.items())[-MOST_TOLD:])

    def of(self, item: int) -> Sequence[Transition]:
        """Return the transitions of the call that has this item."""
        found = self.calls.get(item)
        if found is None:
            for first, count in list(self.bundles.items()):
                if first < item < first + count:
                    found = self.calls.get(first)
        return found or ()

    def in_words(self, item: int) -> str:
        """Return a line for each transition, with the seconds since the first, or "" if there are
        none."""
        return in_lines([(*each, "") for each in self.of(item)])

    def latest(self, count: int) -> str:
        """Return a line for each of the latest transitions of all calls."""
        found = [
            (*each, f"call of item {item}: ")
            for item, transitions in list(self.calls.items())
            for each in transitions
        ]
        return in_lines(sorted(found, key=lambda each: each[0])[-count:])


def in_lines(transitions: Sequence[tuple[float, str, int, str]]) -> str:
    return "\n".join(
        f"{moment - transitions[0][0]:9.3f} s  {call}{words.format(worker)}"
        for moment, words, worker, call in transitions
    )
