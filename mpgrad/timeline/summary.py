"""A trace in ten lines: how busy each worker was, the longest items, and what time was lost to."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpgrad.timeline.trace import Event, worker_number

__all__ = ["Span", "Summary", "read", "union"]

Span = tuple[float, float]  # microseconds

WORK = ("call", "load")
NOT_IDLE = *WORK, "start", "transfer", "lost"
MOST_NAMED = 8  # workers; of more the least and the most busy ones are named
LONGEST = 3  # items
MOST_OPERATIONS = 5
# why a worker has nothing to do: what the caller does then, the first of these that it does
REASONS = {
    "the caller packed items and functions": ("packs", "pickles"),
    "the caller made results": ("makes results",),
    "the caller waited for other workers": ("waits for results", "waits for gradients"),
    "the caller ran its part of a backward": ("runs backward",),
}
OTHERWISE = "the caller did something else"


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A trace that a timeline wrote.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    text = Path(path).read_text()
    try:
        trace: dict[str, Any] = json.loads(text)
        trace["mpgrad"]["workers"], trace["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no timeline of mpgrad (file: {str(path)!r}); write one with pool.timeline(file)") from error
    return trace


class Summary:
    """Shares are of the time of all workers, from the beginning to the end of the recording."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._about = trace["mpgrad"]
        self._end = 1e6 * self._about["seconds"]
        self._numbers = [each["number"] for each in self._about["workers"]]
        self._slices = [each for each in trace["traceEvents"] if each["ph"] == "X"]
        self._of_worker: dict[int, list[Event]] = defaultdict(list)
        self._of_caller: dict[str, list[Event]] = defaultdict(list)
        for each in self._slices:
            number = worker_number(each)
            if number is None:
                self._of_caller[each["cat"]].append(each)
            else:
                self._of_worker[number].append(each)

    def busy(self) -> dict[int, float]:
        """The share of each worker's time in which it ran calls and backwards."""
        return {number: total(self._work(number)) / self._end if self._end else 0.0 for number in self._numbers}

    def longest(self) -> list[Event]:
        """The slices of the items, or bundles, that took longest, each phase for itself."""
        calls = [each for events in self._of_worker.values() for each in events if each["cat"] in ("forward", "backward")]
        return sorted(calls, key=lambda each: -each["dur"])[:LONGEST]

    def shares(self) -> dict[str, float]:
        """Of the workers' time, by what they did. All add up to 1."""
        found: dict[str, float] = dict.fromkeys(("forward", "backward", "run again", "around calls", "loading functions"), 0.0)
        found |= {"starting": 0.0, "transfer": 0.0, "lost to deaths": 0.0, "idle": 0.0}
        for number in self._numbers:
            events = self._of_worker[number]
            work = self._work(number)
            inner = [each for each in events if each["cat"] in ("forward", "backward")]
            again = [each for each in inner if each["args"].get("again")]
            found["run again"] += total(union(again))
            for kind in ("forward", "backward"):
                found[kind] += total(union(each for each in inner if each["cat"] == kind and not each["args"].get("again")))
            loads = total(union(each for each in events if each["cat"] == "load"))
            found["loading functions"] += loads
            found["around calls"] += total(work) - loads - total(union(inner))
            lost = union(each for each in events if each["cat"] == "lost")
            starting = union(each for each in events if each["cat"] == "start")
            moving = minus(union(each for each in events if each["cat"] == "transfer"), merged([*work, *starting]))
            found["lost to deaths"] += total(lost)
            found["starting"] += total(starting)
            found["transfer"] += total(moving)
            found["idle"] += self._end - total(merged([*work, *lost, *starting, *moving]))
        whole = self._end * len(self._numbers)
        return {name: max(0.0, each) / whole if whole else 0.0 for name, each in found.items()}

    def idle(self) -> dict[str, float]:
        """Of the workers' time, that in which they had nothing to do, by what the caller did meanwhile."""
        found: dict[str, float] = defaultdict(float)
        doing = {reason: union(each for kind in kinds for each in self._of_caller[kind]) for reason, kinds in REASONS.items()}
        whole = self._end * len(self._numbers)
        for number in self._numbers:
            events = self._of_worker[number]
            left = minus([(0.0, self._end)], union(each for each in events if each["cat"] in NOT_IDLE))
            for reason, spans in doing.items():
                rest = minus(left, spans)
                found[reason] += (total(left) - total(rest)) / whole
                left = rest
            found[OTHERWISE] += total(left) / whole
        return dict(found)

    def operations(self) -> dict[str, float]:
        """Of the time of PyTorch's operations, what each took by itself, without those within it. Empty without `profile`."""
        found: dict[str, int] = defaultdict(int)  # nanoseconds: sums of microseconds would not meet
        around: list[tuple[str, int]] = []  # operations that go on, with their ends
        last = None
        for each in (each for each in self._slices if each["cat"] == "operation"):  # of one track after the other, in order
            if (track := (each["pid"], each["tid"])) != last:
                around, last = [], track
            start, end = round(1e3 * each["ts"]), round(1e3 * (each["ts"] + each["dur"]))
            while around and around[-1][1] <= start:
                around.pop()
            if around:
                found[around[-1][0]] -= min(end, around[-1][1]) - start
            found[each["name"]] += end - start
            around.append((each["name"], end))
        whole = sum(found.values())
        return {name: duration / whole for name, duration in found.items()} if whole else {}

    def lines(self) -> list[str]:
        """At most ten."""
        calls = [each for events in self._of_worker.values() for each in events if each["cat"] == "call"]
        bytes_there = sum(each["args"].get("bytes", 0) for each in self._of_caller["sends"])
        bytes_back = sum(each["args"].get("bytes", 0) for each in self._of_caller["receives"])
        deaths = sum(each["cat"] == "lost" for each in self._slices)
        ahead = sum(bool(each["args"].get("ahead")) for each in self._slices)
        lines = [
            f"{self._end / 1e6:.2f} s, engine {self._about['engine']}, {plural(len(self._numbers), 'worker')}",
            f"busy: {self._busy_in_words()}",
            f"workers: {shares_in_words(self.shares())}",
            f"idle while: {shares_in_words(self.idle())}",
            f"calls: {counted(calls, 'forward')} forward, {counted(calls, 'backward')} backward; "
            f"backwards of {ahead} items ran right after their forwards",
            f"tensors: {bytes_in_words(bytes_there)} to the workers, {bytes_in_words(bytes_back)} back",
        ]
        if longest := self.longest():
            lines.append(f"longest: {'; '.join(map(item_in_words, longest))}")
        if operations := self.operations():
            most = sorted(operations.items(), key=lambda each: -each[1])[:MOST_OPERATIONS]
            lines.append(f"operations: {', '.join(f'{name} {share:.0%}' for name, share in most)} (of their time)")
        if deaths:
            lines.append(f"deaths: {deaths}")
        return lines

    def _work(self, number: int) -> list[Span]:
        return union(each for each in self._of_worker[number] if each["cat"] in WORK)

    def _busy_in_words(self) -> str:
        busy = sorted(self.busy().items())
        if len(busy) <= MOST_NAMED:
            return ", ".join(f"worker {number} {share:.0%}" for number, share in busy) or "nobody"
        low, high = min(busy, key=lambda each: each[1]), max(busy, key=lambda each: each[1])
        mean = sum(share for _, share in busy) / len(busy)
        return f"{mean:.0%} on average, worker {low[0]} {low[1]:.0%}, worker {high[0]} {high[1]:.0%}"


# --- spans of time


def merged(spans: Iterable[Span]) -> list[Span]:
    """In order, without overlaps."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def union(events: Iterable[Event]) -> list[Span]:
    return merged((each["ts"], each["ts"] + each["dur"]) for each in events)


def minus(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What is left of the spans without the others; both in order, without overlaps."""
    found: list[Span] = []
    place = 0
    for start, end in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        after = place
        while after < len(others) and others[after][0] < end:
            low, high = others[after]
            if start < low:
                found.append((start, low))
            start = max(start, high)
            after += 1
        if start < end:
            found.append((start, end))
    return found


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


# --- words


def shares_in_words(shares: dict[str, float]) -> str:
    """The largest first, without those that round to nothing."""
    named = [(share, name) for name, share in shares.items() if share >= 0.005]
    return ", ".join(f"{name} {share:.0%}" for share, name in sorted(named, reverse=True)) or "nothing"


def item_in_words(event: Event) -> str:
    item, function = event["args"].get("item"), event["args"].get("function")
    subject = f"item {item}" if isinstance(item, int) else f"items {item[0]} to {item[-1]}" if item else "no item"
    of = f" of {function}" if function else ""
    return f"{subject}{of} {event['name']} {event['dur'] / 1e3:.1f} ms (worker {worker_number(event)})"


def items_of(item: int | list[int] | None) -> int:
    """How many an event's `args` name."""
    if item is None or item == []:
        return 0
    return 1 if isinstance(item, int) else item[-1] - item[0] + 1


def counted(calls: Iterable[Event], phase: str) -> int:
    return sum(items_of(each["args"].get("item")) for each in calls if each["args"]["phase"] == phase)


def bytes_in_words(nbytes: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
